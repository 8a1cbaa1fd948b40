"""What the package does where none of its extras is installed, and how a command names the one that it misses."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import merge
from smat_fn.scripts import entry

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCORES = ROOT / "benchmarks" / "results" / "digits.jsonl"
NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "markdown_it": "markdown-it-py"}  # imported as -> installed as
CODE = """
import sys
from importlib.machinery import PathFinder

class Found(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Found
import torch
from smat_fn import analyses, checkpoint, config, evaluate, folders, grad, integrations, lora, mat, merge, optim
from smat_fn import parallel, random, report, simulation, suites, testing, tree
from smat_fn.scripts import entry

base = {{"w": torch.zeros(4)}}
loss_fn = lambda params, batch: (((params["w"] - 1) ** 2).sum(), None)
method = mat.smat.build(loss_fn, optim.adam(0.1), base, sigma=1e-3)
state, info = method.update(random.key(0), method.init(base), None)
merge.ties(base, {{"a": state.params, "b": base}}, coef=0.5, keep=0.5)

def run(call, *words):
    sys.argv = ["", *map(str, words)]
    try:
        call()
    except SystemExit as error:
        print(error, flush=True)

run(entry.merge, "ta", "--base", "base", "--experts", "one", "two", "--coef", 0.5, "--out", "merged")
run(entry.merge, "verify", "merged/ta")
run(entry.train, "ft", "--out", "x")
run(entry.evaluate, "report", "{scores}", "--out", "y")
"""


def packages(requirements):
    """Names of the packages that requirements install, those of other extras included."""
    for requirement in requirements:
        if extras := re.match(r"smat_fn\[(.+)\]", requirement):
            for extra in extras[1].split(","):
                yield from packages(PROJECT["optional-dependencies"][extra])
        else:
            yield re.match(r"[\w-]+", requirement)[0]


def test_a_missing_package_is_in_the_extra_that_the_message_names():
    for module, extra in entry.EXTRAS.items():
        assert NAMES.get(module, module) in packages(PROJECT["optional-dependencies"][extra])
    installed = {NAMES.get(module, module) for module in entry.EXTRAS}
    extras = PROJECT["optional-dependencies"]
    assert {*packages(extras["eval"]), *packages(extras["gpu"])} == installed


@pytest.mark.slow
def test_functions_folders_and_merges_need_the_core_alone(tmp_path):
    generator = torch.Generator().manual_seed(0)
    trees = {name: {"w": torch.randn(6, 4, generator=generator)} for name in ("base", "one", "two")}
    for name, leaves in trees.items():
        (tmp_path / name).mkdir()
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
    absent = {*entry.EXTRAS, "triton", "peft", "accelerate", "submitit"}
    code = CODE.format(absent=absent, scores=SCORES)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    merged, verified, train, report = done.stdout.splitlines()
    assert merged.startswith("merged: merged/ta, coef 0.5")
    assert verified.endswith(" files have the hashes stored in merged/ta")
    assert re.fullmatch(r"smat-train: the package \w+ is missing: pip install 'smat_fn\[train\]', .*", train)
    assert re.fullmatch(r"smat-eval: the package \w+ is missing: pip install 'smat_fn\[eval\]', .*", report)
    experts = {name: trees[name] for name in ("one", "two")}
    expected = merge.task_arithmetic(trees["base"], experts, coef=0.5)
    assert torch.equal(load_file(tmp_path / "merged/ta/model.safetensors")["w"], expected["w"])


def test_a_missing_package_of_no_extra_is_not_explained_away(monkeypatch):
    def command(script, launch):
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    monkeypatch.setattr("smat_fn.scripts.commands.train.command", command)
    monkeypatch.setattr(sys, "argv", ["smat-train"])
    with pytest.raises(ModuleNotFoundError, match="mine"):
        entry.train()
