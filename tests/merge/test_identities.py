"""One expert at coefficient 1 is that expert, equal experts are one of them: every merger, or the reason why not."""

import inspect

import pytest
import torch

from smat_fn import merge, random, tree

KEY = random.key(5)


def name_of(experts):
    return next(iter(experts))


# options under which nothing is dropped
WHOLE = {
    "metagpt": lambda base, experts, coef: merge.metagpt(base, experts, coef=coef),
    "wa": lambda base, experts, coef: merge.weight_average(experts),
    "ta": lambda base, experts, coef: merge.task_arithmetic(base, experts, coef=coef),
    "ties": lambda base, experts, coef: merge.ties(base, experts, coef=coef, keep=1.0, aggregate="mean"),
    "dare": lambda base, experts, coef: merge.dare(KEY, base, experts, coef=coef, drop_prob=0.0),
    "della": lambda base, experts, coef: merge.della(KEY, base, experts, coef=coef, drop_prob=0.0, window=0.0),
    "weighted_average": lambda base, experts, coef: merge.weighted_average(
        experts, weights=dict.fromkeys(experts, 3.0)
    ),
    "wise_ft": lambda base, experts, coef: merge.wise_ft(base, dict([next(iter(experts.items()))]), coef=coef),
    "dare_ties": lambda base, experts, coef: merge.dare_ties(
        KEY, base, experts, coef=coef, drop_prob=0.0, aggregate="mean"
    ),
    "breadcrumbs": lambda base, experts, coef: merge.breadcrumbs(
        base, experts, coef=coef, drop_smallest=0.0, drop_largest=0.0
    ),
    "magmax": lambda base, experts, coef: merge.magmax(base, experts, coef=coef),
    "tsv_merge": lambda base, experts, coef: merge.tsv_merge(base, experts, coef=coef, share=1.0),
    "wudi": lambda base, experts, coef: merge.wudi(base, experts, coef=coef, ridge=0.0),
    "karcher": lambda base, experts, coef: merge.karcher(experts),
    "sce": lambda base, experts, coef: merge.sce(base, experts, coef=coef, density=1.0, floor=0.0),
    "multislerp": lambda base, experts, coef: merge.multislerp(base, experts, coef=coef),
    "cart": lambda base, experts, coef: merge.cart(experts, coef=coef, share=1.0),
    "consensus": lambda base, experts, coef: merge.consensus(base, experts, coef=coef, ratio=0.0, least=1),
    "tall_mask": lambda base, experts, coef: merge.tall_mask(
        base, experts, coef=coef, task=name_of(experts), ratio=0.0
    ),
    "emr": lambda base, experts, coef: merge.emr(base, experts, coef=coef, task=name_of(experts)),
    "nearswap": lambda base, experts, coef: merge.nearswap(base, dict([next(iter(experts.items()))]), t=1e9, coef=coef),
    "ram": lambda base, experts, coef: merge.ram(base, experts, coef=coef, threshold=0.0),
    "opcm": lambda base, experts, coef: merge.opcm(base, experts, coef=coef),
    "dc_merge": lambda base, experts, coef: merge.dc_merge(base, experts, coef=coef, share=1.0, keep=1.0, elect=False),
}
NOT_ALONE = {
    "iso_c": "its singular values become equal",
    "iso_cts": "its singular values become equal",
    "slerp": "of two experts",
    "arcee_fusion": "of two experts",
    "nuslerp": "of two experts",
    "model_stock": "of two experts or more",
    "svc": "of a merged model and experts",
    "pcb": "coordinates have weights, the smallest 0",
}
ADDING = {"ta", "dare", "breadcrumbs", "consensus", "tall_mask"}  # N equal experts add up to N Δ
PAIRS = {
    "slerp": lambda base, experts: merge.slerp(experts, coef=0.3),
    "arcee_fusion": lambda base, experts: merge.arcee_fusion(experts, coef=1.0),
    "nuslerp": lambda base, experts: merge.nuslerp(base, experts, coef=1.0, t=0.3),
    "model_stock": lambda base, experts: merge.model_stock(base, experts, coef=1.0),
    "svc": lambda base, experts: merge.svc(base, experts, coef=1.0),
}
NOT_EQUAL = {"iso_c", "iso_cts", "pcb", "opcm"}  # for the reasons of NOT_ALONE; opcm adds up what is no matrix


def of_statistics(merger):
    """Whether it takes more than base and experts: those have tests of their own."""
    parameters = inspect.signature(merger.function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return not set(names) <= {"key", "base", "experts"}


def close(merged, expected):
    for path, leaf in expected.items():
        torch.testing.assert_close(merged[path], leaf, rtol=1e-9, atol=1e-9, msg=path)


def test_every_merger_stands_here():
    names = {merger.name for merger in (*merge.MERGERS, *merge.MORE_MERGERS) if not of_statistics(merger)}
    assert names == WHOLE.keys() | NOT_ALONE.keys()
    assert names == WHOLE.keys() | PAIRS.keys() | NOT_EQUAL


@pytest.mark.parametrize("name", WHOLE)
def test_one_expert_at_coefficient_one_is_that_expert(name, family):
    base, experts = family(torch.float64, count=1)
    close(WHOLE[name](base, experts, 1.0), experts[name_of(experts)])


@pytest.mark.parametrize("name", [name for name in WHOLE if name not in NOT_EQUAL])
def test_equal_experts_are_one_of_them(name, family):
    base, experts = family(torch.float64, count=1)
    twins = {twin: tree.clone(experts[name_of(experts)]) for twin in "abcd"}
    close(WHOLE[name](base, twins, 1 / 4 if name in ADDING else 1.0), twins["a"])


@pytest.mark.parametrize("name", PAIRS)
def test_two_equal_experts_are_one_of_them(name, family):
    base, experts = family(torch.float64, count=1)
    twins = {twin: tree.clone(experts[name_of(experts)]) for twin in "ab"}
    close(PAIRS[name](base, twins), twins["a"])


def test_a_change_moves_to_another_model_of_the_same_base(family):
    base, experts = family(torch.float64, count=2)
    new, expert = experts.values()
    moved = merge.task_arithmetic(base, {"new": new, "expert": expert}, coef=1.0, weights={"expert": 0.8})
    floating = (path for path, leaf in base.items() if leaf.is_floating_point())
    close(moved, {path: new[path] + 0.8 * (expert[path] - base[path]) for path in floating})
