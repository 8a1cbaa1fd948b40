"""Any tree of parameters trains as its flat form does: None, registered pytree nodes, masked sets as trees of bools."""

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smat_fn import merge, optim, participation, random, reweight, simulate, tree
from smat_fn.grad import ModuleLoss
from smat_fn.mat import finetune, smat
from smat_fn.optim import muon
from smat_fn.simulation import draw
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree

from .test_conformance import RUNS

KEY = random.key(5)
SHAPES = {"blocks.0.w": (4, 3), "blocks.0.more.0": (3, 4), "head": (3, 2), "gain": ()}


@dataclass
class Layer:
    """A registered dataclass."""

    w: object
    b: object
    more: object


class Model(NamedTuple):
    """A NamedTuple with a part that is missing."""

    blocks: list
    head: object
    adapter: object
    gain: object


pytree.register_dataclass(Layer, field_names=["w", "b", "more"])
OPTIMIZERS = {
    "adam": lambda: optim.adam(1e-2),
    "muon": lambda: optim.muon(1e-2, rest=optim.adamw(1e-3, weight_decay=0.1)),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1)),
}


def nested(flat):
    layer = Layer(flat["blocks.0.w"], None, (flat["blocks.0.more.0"],))
    return Model([layer], flat["head"], None, flat["gain"])


def squares(params, batch):
    return sum(((leaf - batch) ** 2).sum() for leaf in tree.flatten(params).values()), None


def trained(build, start, steps=3):
    method = build(start)
    state = method.init(start)
    for step in range(steps):
        state, info = method.update(KEY, state, torch.tensor(0.1 * step))
    return state, info


@pytest.mark.parametrize(("name", "hyper"), RUNS)
@pytest.mark.parametrize(
    ("engine", "donate"),
    [
        *(("func", False), ("autograd", True)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("func", True), ("autograd", False))),
    ],
)
def test_every_method_trains_a_tree_as_its_flat_form(name, hyper, engine, donate):
    module, flat = importlib.import_module(f"smat_fn.mat.{name}"), random_tree(1, SHAPES)
    base = random_tree(0, SHAPES)

    def build(start):
        own = nested(base) if isinstance(start, Model) else base
        return module.build(squares, optim.adam(1e-2), own, engine=engine, donate=donate, **hyper)

    (state, info), (want, wanted) = trained(build, nested(flat)), trained(build, flat)
    assert type(state.params) is Model
    assert type(state.params.blocks[0]) is Layer
    assert state.params.adapter is state.params.blocks[0].b is None
    assert_trees_equal(tree.flatten(state.params), want.params)
    assert_trees_equal([info.loss, info.grad_norm], [wanted.loss, wanted.grad_norm])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_a_tree_as_its_flat_form(optimizer):
    build = lambda start: finetune.build(squares, OPTIMIZERS[optimizer](), start)  # noqa: E731
    flat = random_tree(1, SHAPES)
    assert_trees_equal(tree.flatten(trained(build, nested(flat))[0].params), trained(build, flat)[0].params)


def test_a_registered_tree_is_merged_as_its_flat_form():
    base, experts = random_tree(0, SHAPES), [random_tree(i, SHAPES) for i in (1, 2)]
    for merged in (
        lambda base, experts: merge.ties(base, experts, coef=0.5, keep=0.4),
        lambda base, experts: merge.dare(KEY, base, experts, coef=0.5, drop_prob=0.3),
    ):
        got = merged(nested(base), [nested(expert) for expert in experts])
        assert type(got) is Model
        assert_trees_equal(tree.flatten(got), merged(base, experts))


def test_a_tree_of_bools_is_a_masked_set():
    flat, base = random_tree(1, SHAPES), random_tree(0, SHAPES)
    chosen = {"blocks.0.w": True, "blocks.0.more.0": False, "head": True, "gain": False}
    predicate = lambda path, leaf: chosen[path]  # noqa: E731
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.01)
    bools = nested(chosen)
    for own in (bools, chosen):
        got = simulate(nested(flat), nested(base), drawn, where=own)
        assert_trees_equal(tree.flatten(got), simulate(flat, base, drawn, where=predicate))
        assert_trees_equal(reweight(flat, drawn, where=own), reweight(flat, drawn, where=predicate))
        assert_trees_equal(participation(drawn, flat, where=own), participation(drawn, flat, where=predicate))

    def run(where):
        build = lambda start: smat.build(squares, optim.adam(1e-2), base, where=where, period=2)  # noqa: E731
        return trained(build, flat)[0].params

    assert_trees_equal(run(bools), run(predicate))
    assert not torch.equal(run(bools)["blocks.0.more.0"], run(None)["blocks.0.more.0"])
    optimizer = lambda where: muon(1e-2, rest=optim.adam(1e-3), where=where)  # noqa: E731
    one, other = (optimizer(where).init(flat) for where in (bools, predicate))
    assert list(one.momentum) == list(other.momentum) == ["blocks.0.w", "head"]


@pytest.mark.parametrize("where", [{"head"}, ["head"], {"head": Tensor}], ids=["set", "list", "types"])
def test_a_masked_set_of_another_kind_is_refused_when_a_method_is_built(where):
    base = random_tree(0, SHAPES)
    with pytest.raises(ValueError, match=r"where is a \w+: give a function \(name, weight\) -> bool, a tree of bools"):
        smat.build(squares, optim.adam(1e-2), base, where=where)
    with pytest.raises(ValueError, match=r"where is a \w+.*learning rate is -1"):
        optim.muon(-1.0, rest=optim.adam(1e-3), where=where)


def test_a_nested_tree_and_a_module_are_no_parameters_of_a_module():
    module = torch.nn.Linear(2, 2)
    loss = ModuleLoss(module, lambda m, x: (m(x).sum(), None))
    for params, got in (({"layer": {"weight": torch.ones(2, 2)}}, "a dict under 'layer'"), (module, "a Linear")):
        with pytest.raises(ValueError, match=rf"flat dict, as dict\(module.named_parameters\(\)\), got {got}"):
            loss(params, torch.ones(1, 2))


def test_complex_trees_are_compared_in_both_parts():
    one, two = {"w": torch.tensor([1 + 1j])}, {"w": torch.tensor([1 + 2j])}
    assert_trees_close(one, one)
    with pytest.raises(AssertionError, match="1 of 1 values off, by up to 1"):
        assert_trees_close(one, two)
