"""Tall matrices of folders by blocks of rows: the bits of memory, whatever the chunk and the threads."""

import pytest
import torch

from smat_fn.config import IsoC, IsoCts, TsvMerge
from smat_fn.folders import merge_folders
from smat_fn.merge import merge_by
from smat_fn.merge.parts import tall

KINDS = [TsvMerge(coef=0.5), IsoC(coef=0.5), IsoCts(coef=0.5)]


@pytest.fixture
def inputs(monkeypatch):
    monkeypatch.setattr(tall, "LARGE", 403 * 12 - 1)
    generator = torch.Generator().manual_seed(1)

    def tree(scale):
        shapes = {"embed": (403, 12), "small": (3, 4), "bias": (5,)}
        return {path: (scale * torch.randn(shape, generator=generator)).bfloat16() for path, shape in shapes.items()}

    base = tree(1.0)
    return base, {name: {path: base[path] + leaf for path, leaf in tree(0.1).items()} for name in ("x", "y")}


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.name)
def test_folders_merge_to_the_bits_of_memory(config, inputs, folders, tmp_path):
    base, experts = inputs
    expected = folders.in_memory(config, base, experts)
    paths = folders.save_family(tmp_path, base, experts)
    for i, (chunk, workers) in enumerate([(1 << 19, 1), (40, 1), (1000, 2)]):
        merge_folders(config, *paths, tmp_path / f"{i}", chunk=chunk, workers=workers, key=folders.key)
        folders.assert_same_bits(folders.load(tmp_path / f"{i}"), expected)


def test_values_that_are_not_finite_are_refused_by_name(inputs, folders, tmp_path):
    base, experts = inputs
    experts["x"]["embed"][400, 2] = float("nan")
    with pytest.raises(ValueError, match="parameter 'embed' has no singular values, are all of its values finite"):
        merge_by(IsoC(coef=0.5), base, experts)
    with pytest.raises(ValueError, match="parameter 'embed'"):
        merge_folders(IsoC(coef=0.5), *folders.save_family(tmp_path, base, experts), tmp_path / "out")
