"""Whose definition of a merger: what `with_semantics` says, against what mergekit 0.1.5 computed (test_golden.py)."""

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import merge
from smat_fn.config import (
    DIFFERENCES,
    MERGERS,
    MORE_MERGERS,
    ArceeFusion,
    Breadcrumbs,
    Dare,
    Karcher,
    ModelStock,
    MultiSlerp,
    NearSwap,
    NuSlerp,
    Ram,
    Sce,
    Slerp,
    TaskArithmetic,
    Ties,
    WeightAverage,
    WeightedAverage,
    WiseFt,
    with_semantics,
)
from smat_fn.merge.model_stock import ratio_of
from smat_fn.merge.parts.arithmetic import gram

EMBED = "model.embed_tokens.weight"
# a merger, its experts, mergekit's run; coefficients are its lambda, weights are 1
RUNS = {
    "wa": (WeightAverage(), "e0 e1 e2", "linear"),
    "ta": (TaskArithmetic(coef=0.3), "e0 e1 e2", "task_arithmetic"),
    "ties": (Ties(coef=0.3, keep=0.3), "e0 e1 e2", "ties_mean"),
    "weighted_average": (WeightedAverage((0.5, 2.0, 0.3)), "e0 e1 e2", "linear_weighted"),
    "slerp": (Slerp(coef=0.3), "e0 e1", "slerp"),
    "breadcrumbs": (Breadcrumbs(coef=0.3, drop_smallest=0.25, drop_largest=0.125), "e0 e1 e2", "breadcrumbs"),
}
ALL, TWO = "e0 e1 e2 e3", "e0 e1"
# the same of checkpoints that are not related: random sizes and angles
UNRELATED = {
    "linear": (WeightAverage(), ALL),
    "linear_weighted": (WeightedAverage((0.5, 2.0, 0.3, -0.4)), ALL),
    "task_arithmetic": (TaskArithmetic(coef=0.3), ALL),
    "ties_37": (Ties(coef=0.3, keep=0.37), ALL),
    "ties_9": (Ties(coef=0.3, keep=0.09), ALL),
    "breadcrumbs_37": (Breadcrumbs(coef=0.3, drop_smallest=0.52, drop_largest=0.11), ALL),
    "breadcrumbs_85": (Breadcrumbs(coef=0.3, drop_smallest=0.1, drop_largest=0.05), ALL),
    "model_stock": (ModelStock(), ALL),
    "model_stock_rows": (ModelStock(along="last"), ALL),
    "slerp": (Slerp(coef=0.3), TWO),
    "nuslerp": (NuSlerp(t=0.25), TWO),
    "nuslerp_rows": (NuSlerp(t=0.25, along="last"), TWO),
    "nuslerp_columns": (NuSlerp(t=0.25, along="first"), TWO),
    "karcher": (Karcher(), ALL),
    "multislerp": (MultiSlerp(), ALL),
    "multislerp_weighted": (MultiSlerp(weights=(0.5, 2.0, 0.3, 0.4)), ALL),
    "multislerp_raw": (MultiSlerp(weights=(0.5, 2.0, 0.3, -2.8), normalize=False), ALL),
    "sce": (Sce(), ALL),
    "sce_37": (Sce(density=0.37), ALL),
    "arcee_fusion": (ArceeFusion(), TWO),
    "nearswap": (NearSwap(t=5e-5), "e0"),
    "ram": (Ram(threshold=1e-4), ALL),
    "ram_plus": (Ram(threshold=1e-4, boost=0.1, cap=0.2), ALL),
    "ram_plus_5": (Ram(threshold=1e-4, boost=0.3, cap=5.0), ALL),
}
EXACT = {"linear", "task_arithmetic", "ties_37", "ties_9", "breadcrumbs_37", "breadcrumbs_85"}


@pytest.fixture(scope="module")
def leaves(golden_file):
    stored = load_file(golden_file)

    def of(name):
        prefix = f"float32/{name}/"
        return {path.removeprefix(prefix): leaf for path, leaf in stored.items() if path.startswith(prefix)}

    return of


@pytest.mark.parametrize("name", RUNS)
def test_mergekits(name, leaves):
    config, experts, run = RUNS[name]
    merged = merge.merge_by(
        with_semantics(config, "mergekit"), leaves("base"), {expert: leaves(expert) for expert in experts.split()}
    )
    expected = leaves(run)
    assert merged.keys() == expected.keys()
    for path, leaf in expected.items():
        # weighted sums are added in another order
        assert (merged[path] - leaf).abs().max() <= (
            2**-22 if name in ("weighted_average", "slerp") else 0
        ) * leaf.abs().max()


@pytest.fixture(scope="module", params=["large", "small"])
def random_leaves(request, golden_file):
    stored = load_file(golden_file)

    def of(name):
        prefix = f"random/{request.param}/{name}/"
        return {path.removeprefix(prefix): leaf for path, leaf in stored.items() if path.startswith(prefix)}

    return of


@pytest.mark.parametrize("run", UNRELATED)
def test_mergekits_of_unrelated_checkpoints(run, random_leaves):
    config, experts = UNRELATED[run]
    config = with_semantics(config, "mergekit")
    base = random_leaves("base")
    merged = merge.merge_by(config, base, {expert: random_leaves(expert) for expert in experts.split()})
    expected = random_leaves(run)
    assert merged.keys() == expected.keys() == base.keys()
    for path, leaf in expected.items():
        errors = (merged[path].double() - leaf.double()).abs()
        wrong = errors > (0 if run in EXACT else 2**-19) * leaf.double().abs().max()
        few = 0.1 if run == "arcee_fusion" else 0.0  # which entries stay depends on the processor's exponentials
        assert float(wrong.double().mean()) <= few, (path, float(errors.max()))


def test_unrelated_checkpoints_are_of_the_awkward_kind(random_leaves):
    base, experts = random_leaves("base"), {expert: random_leaves(expert) for expert in ALL.split()}
    grams = [gram([own[path] for own in experts.values()], leaf) for path, leaf in base.items()]
    assert min(ratio_of(own, clamp=False) for own in grams) < 0 == min(ratio_of(own, clamp=True) for own in grams)
    # the paper's count is another
    plain = Breadcrumbs(coef=0.3, drop_smallest=0.52, drop_largest=0.11)
    merged, expected = merge.merge_by(plain, base, experts), random_leaves("breadcrumbs_37")
    assert sum(int((merged[path] != leaf).sum()) for path, leaf in expected.items()) >= 4


def test_wise_ft_is_task_arithmetic_of_one(leaves):
    base, experts = leaves("base"), {"e0": leaves("e0")}
    left, right = (merge.merge_by(config, base, experts) for config in (WiseFt(coef=0.3), TaskArithmetic(coef=0.3)))
    assert all(torch.equal(leaf, right[path]) for path, leaf in left.items())


def test_every_merger_has_mergekits_definition_or_a_reason():
    names = {config.name for config in (*MERGERS, *MORE_MERGERS)}
    refused = {name for name, wanted in DIFFERENCES["mergekit"].items() if isinstance(wanted, str)}
    unrelated = {config.name for config, _ in UNRELATED.values()}
    assert names == refused | unrelated | {"wise_ft"}  # which is above
    assert set(RUNS) <= unrelated
    assert {name for table in DIFFERENCES.values() for name in table} <= names
    with pytest.raises(ValueError, match="dare with the semantics of mergekit is unavailable: mergekit rescales"):
        with_semantics(Dare(coef=1.0, drop_prob=0.5), "mergekit")


@pytest.mark.parametrize(
    ("semantics", "options"),
    [("paper", {}), ("mergekit", {"aggregate": "mean", "scope": "tensor"}), ("original", {"aggregate": "mean"})],
)
def test_ties(semantics, options):
    open_ = Ties(coef=0.5, keep=0.2)
    resolved = with_semantics(open_, semantics)
    expected = {"aggregate": None, "scope": None} | ({"scope": "global"} if semantics == "original" else {}) | options
    assert resolved == Ties(coef=0.5, keep=0.2, **expected)
    assert with_semantics(resolved, semantics) == resolved


def test_options_that_say_otherwise_and_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"aggregate of ties is 'sum', but 'mean'.*scope of ties is 'global', but 'tens"
    ):
        with_semantics(Ties(aggregate="sum", scope="global"), "mergekit")
    with pytest.raises(ValueError, match="semantics 'peft' is unknown, choose one of paper, mergekit, original"):
        with_semantics(ModelStock(), "peft")
