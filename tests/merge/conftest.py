"""Small families of trees that hold every shape a merger must accept."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SHAPES = {
    "scalar": (),
    "one": (1,),
    "column": (5, 1),
    "row": (1, 7),
    "vector": (9,),
    "matrix": (6, 11),
    "conv": (2, 3, 2, 3),
    "empty": (0, 4),
    "void": (3, 0),
}


def _family(dtype=torch.float32, *, count=3, seed=0, scale=0.1, grid=None):
    """(base, {name: expert}): flat trees; with ``grid`` all values are multiples of it, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def leaves(scale):
        drawn = {
            path: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for path, shape in SHAPES.items()
        }
        return {path: (leaf / grid).round() * grid if grid else leaf for path, leaf in drawn.items()}

    buffers = {"steps": torch.tensor(7), "causal": torch.tensor([True, False, True])}
    base = leaves(1.0)
    names = ["sum", "cstance", "qa", "fomc"][:count]
    deltas = {name: leaves(scale) for name in names}
    trees = {name: {path: base[path] + delta[path] for path in base} for name, delta in deltas.items()}
    cast = {name: {path: leaf.to(dtype) for path, leaf in tree.items()} for name, tree in {"": base, **trees}.items()}
    full = {name: {**tree, **{path: leaf.clone() for path, leaf in buffers.items()}} for name, tree in cast.items()}
    return full.pop(""), full


STORED = Path(__file__).parent / "golden" / "mergekit.safetensors"
VERSION = "from importlib.metadata import version; print(version('mergekit'))"


@pytest.fixture(scope="session")
def golden_file(tmp_path_factory):
    """What mergekit 0.1.5 gives: made anew where it is installed, here or for $MERGEKIT_PYTHON, else as stored."""
    python = os.environ.get("MERGEKIT_PYTHON") or (sys.executable if find_spec("mergekit") else None)
    if python is None:
        return STORED
    found = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
    if found != "0.1.5":
        return STORED
    made = tmp_path_factory.mktemp("mergekit") / STORED.name
    subprocess.run([python, str(STORED.parent.parent / "make_golden.py"), str(made)], capture_output=True, check=True)
    return made


@pytest.fixture
def family():
    return _family
