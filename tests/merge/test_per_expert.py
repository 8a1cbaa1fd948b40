"""Weights and densities of single experts: closed forms, the plain merger's bits without them, folders as in memory."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import merge, random
from smat_fn.config import Breadcrumbs, Dare, DareTies, Della, TaskArithmetic, Ties
from smat_fn.folders import merge_folders
from smat_fn.merge.parts import chunks
from smat_fn.merge.parts.per_expert import combined

RECIPES = Path(__file__).parents[1] / "scripts" / "merge" / "subcommands" / "make_recipes.py"
_spec = importlib.util.spec_from_file_location("make_recipes", RECIPES)
make_recipes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_recipes)

KEY = random.key(5)
LEAF = {"*.mlp.*": 0.75, "*": 0.25}
WEIGHTS = {"A": 0.5, "B": -0.3}
CONFIGS = {
    "ta": TaskArithmetic(coef=0.3, weights=WEIGHTS),
    "ta by leaf": TaskArithmetic(coef=0.3, weights={"A": LEAF}, aggregate="mean"),
    "ties": Ties(coef=0.7, keep=0.3, aggregate="sum", scope="global", weights=WEIGHTS, densities={"C": 0.6}),
    "ties tensor": Ties(coef=0.7, keep=0.3, aggregate="mean", scope="tensor", densities={"B": LEAF}, rescale=True),
    "ties all": Ties(coef=0.7, keep=0.3, aggregate="mean", scope="global", elect=False),
    "ties all weights": Ties(
        coef=0.7, keep=0.3, aggregate="mean", scope="tensor", elect=False, weights={"A": LEAF}, densities={"B": LEAF}
    ),
    "dare": Dare(coef=0.3, drop_prob=0.3, weights=WEIGHTS, densities={"A": 0.2, "B": LEAF}),
    "dare norms": Dare(coef=0.3, drop_prob=0.3, rescale=True, aggregate="mean"),
    "dare_ties": DareTies(coef=0.3, drop_prob=0.3, weights=WEIGHTS, densities={"A": 0.2}, aggregate="mean"),
    "della": Della(coef=0.9, drop_prob=0.5, window=0.14, weights=WEIGHTS, densities={"A": 0.7}, windows={"A": 0.3}),
    "della norms": Della(coef=0.9, drop_prob=0.5, window=0.14, rescale=True, elect=False, aggregate="sum"),
    "breadcrumbs": Breadcrumbs(0.3, 0.1, coef=0.3, weights=WEIGHTS, densities={"A": 0.4}, largest={"B": 0.2}),
    "breadcrumbs kept": Breadcrumbs(0.3, 0.1, coef=0.3, densities={"A": LEAF}, elect=True, count="kept", rescale=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_recipes.write_models(folder)
    return folder, {name: load_file(folder / name / "model.safetensors") for name in ("BASE", "A", "B", "C")}


@pytest.fixture(scope="module")
def merged(models):
    """``merged(name)``: what memory gives, made once."""
    _, trees = models
    experts = {name: trees[name] for name in "ABC"}
    return functools.cache(lambda name: merge.merge_by(CONFIGS[name], trees["BASE"], experts, key=KEY))


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_in_memory_change_no_bit(name, models, merged, monkeypatch):
    _, trees = models
    expected = merged(name)
    monkeypatch.setattr(chunks, "CHUNK", 100)
    again = merge.merge_by(CONFIGS[name], trees["BASE"], {name: trees[name] for name in "ABC"}, key=KEY)
    assert all(torch.equal(again[path], leaf) for path, leaf in expected.items())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [97, pytest.param(1 << 19, marks=pytest.mark.slow)])
def test_folders_give_what_memory_gives(name, chunk, models, merged, tmp_path):
    folder, _ = models
    out = tmp_path / "out"
    merge_folders(CONFIGS[name], folder / "BASE", {n: folder / n for n in "ABC"}, out, key=KEY, chunk=chunk)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[path], leaf) for path, leaf in merged(name).items())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_operation_has_a_deterministic_form_on_cuda_and_the_same_bits(name, family, as_on_cuda):
    base, experts = family()
    experts = dict(zip("ABC", experts.values(), strict=True))
    with as_on_cuda() as mode:
        found = merge.merge_by(CONFIGS[name], base, experts, key=KEY)
    assert not mode.inexact
    expected = merge.merge_by(CONFIGS[name], base, experts, key=KEY)
    assert all(torch.equal(found[path], leaf) for path, leaf in expected.items())


def test_one_of_several_experts_is_subtracted(models):
    _, trees = models
    base, a, b = trees["BASE"], trees["A"], trees["B"]
    found = merge.task_arithmetic(base, {"A": a, "B": b}, coef=0.5, weights={"B": -1.0})
    for path, leaf in base.items():
        assert torch.equal(found[path], leaf + 0.5 * ((a[path] - leaf) - (b[path] - leaf)))


def test_weights_of_powers_of_two_scale_experts():
    base = {"w": torch.zeros(64)}
    one, two = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    experts, scaled = {"a": {"w": one}, "b": {"w": two}}, {"a": {"w": 2 * one}, "b": {"w": -0.5 * two}}
    own = {"weights": {"a": 2.0, "b": -0.5}}
    runs = {
        "ta": lambda trees, **own: merge.task_arithmetic(base, trees, coef=1.0, **own),
        "ties": lambda trees, **own: merge.ties(base, trees, coef=1.0, keep=0.3, scope="tensor", **own),
        "dare": lambda trees, **own: merge.dare(KEY, base, trees, coef=1.0, drop_prob=0.5, **own),
        "dare_ties": lambda trees, **own: merge.dare_ties(KEY, base, trees, coef=1.0, drop_prob=0.5, **own),
        "breadcrumbs": lambda trees, **own: merge.breadcrumbs(
            base, trees, coef=1.0, drop_smallest=0.5, drop_largest=0.1, **own
        ),
    }
    for name, run in runs.items():
        assert torch.equal(run(experts, **own)["w"], run(scaled)["w"]), name


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_densities_equal_to_the_mergers_own_change_no_bit(scope, models):
    _, trees = models
    base, experts = trees["BASE"], {name: trees[name] for name in "ABC"}
    same = dict.fromkeys("ABC", 0.5)
    pairs = [
        (merge.ties_vector(base, experts, keep=0.5, scope=scope, densities=d) for d in ({}, same)),
        (merge.dare_vector(KEY, base, experts, drop_prob=0.5, densities=d) for d in ({}, same)),
        (merge.dare_ties_vector(KEY, base, experts, drop_prob=0.5, densities=d) for d in ({}, same)),
        (merge.della_vector(KEY, base, experts, drop_prob=0.5, window=0.2, densities=d) for d in ({}, same)),
    ]
    for plain, special in pairs:
        assert all(torch.equal(plain[path], leaf) for path, leaf in special.items())


def test_rescaled_leaves_keep_their_l1_norm():
    base = {"w": torch.zeros(400)}
    expert = {"w": torch.randn(400, generator=torch.Generator().manual_seed(1))}
    found = merge.dare(KEY, base, {"a": expert}, coef=1.0, drop_prob=0.7, rescale=True)["w"]
    assert 0.6 < float((found == 0).float().mean()) < 0.8
    torch.testing.assert_close(found.abs().sum(), expert["w"].abs().sum())


def test_a_mean_is_over_the_weights_that_agree():
    vectors = [torch.tensor([2.0, 2.0, 0.0]), torch.tensor([6.0, -1.0, 0.0])]
    assert combined(vectors, [1.0, 3.0], elect=True, mean=True).tolist() == [2.0, 2.0, 0.0]
    assert combined(vectors, [1.0, 3.0], elect=False, mean=True).tolist() == [2.0, 0.25, 0.0]
    assert combined(vectors, [1.0, -1.0], elect=False, mean=True).tolist() == [8.0, 1.0, 0.0]


def test_numbers_of_no_expert_and_out_of_range_are_one_error():
    tree = {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="not an expert") as error:
        merge.ties(tree, {"a": tree}, coef=1.0, keep=0.5, weights={"b": float("nan")}, densities={"a": 1.5})
    assert "the weight of 'b' is nan" in str(error.value)
    assert "densities of 'a' is 1.5" in str(error.value)
    with pytest.raises(ValueError, match="needs scope 'tensor'"):
        merge.ties(tree, {"a": tree}, coef=1.0, keep=0.5, densities={"a": {"*": 0.5}})
