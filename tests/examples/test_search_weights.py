"""The example that searches a weight and a density for each expert."""

import runpy
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "search_weights.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(FILE))


def test_a_soup_takes_an_expert_in_only_if_the_score_does_not_fall(example):
    experts = {name: {"w": torch.tensor([value])} for name, value in (("far", 9.0), ("near", 1.5), ("best", 0.5))}
    score = lambda params: -abs(float(params["w"]) - 0.75)  # noqa: E731
    assert example["greedy_soup"](experts, score) == (-0.25, ["best", "near"])


def test_the_search_finds_what_its_score_prefers(example):
    base = {"w": torch.zeros(4)}
    experts = {name: {"w": torch.full((4,), value)} for name, value in (("one", 1.0), ("two", -1.0))}
    best, weights, densities = example["search"](base, experts, lambda params: float(params["w"].sum()), 30)
    assert weights["one"] > weights["two"]
    assert best == float(example["merged"](base, experts, weights, densities)["w"].sum()) > 0


@pytest.mark.slow
def test_it_reads_a_run_and_writes_what_it_found(run, tmp_path):
    brief = "--steps", 2, "--tasks", "mirror", "negative", "--suite-options", "pretrain_steps", 2
    run("train.py", "ft", *brief, "--out", tmp_path / "ft")
    said = run("examples/search_weights.py", tmp_path / "ft", 2).splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "TIES, equal weights", "TIES, best of 2", "  mirror", "  negative", "greedy soup",
    ]  # fmt: skip
    assert (tmp_path / "ft" / "searched.safetensors").is_file()
