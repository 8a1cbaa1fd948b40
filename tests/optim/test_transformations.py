"""Gradient transformations as optimizers and back: against closed forms, and with torchopt where it is installed."""

from typing import NamedTuple

import pytest
import torch

from smat_fn import optim, random, tree
from smat_fn.mat import smat
from smat_fn.optim import as_transformation, from_transformation
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree, verify_donation

SHAPES = {"b": (3, 2), "a.x": (4,), "gain": ()}
PARAMS, GRADS, BASE = (random_tree(seed, SHAPES, dtype=torch.float64) for seed in range(3))


class Transformation(NamedTuple):
    """optax's two functions."""

    init: object
    update: object


def heavy_ball(lr, decay=0.5):
    """``u = -lr m``, ``m <- decay m + g``: a state, and params that are not needed."""

    def update(updates, state, params=None):
        trace = {path: decay * state[path] + g for path, g in updates.items()}
        return {path: -lr * m for path, m in trace.items()}, trace

    return Transformation(lambda params: tree.tree_map(torch.zeros_like, params), update)


def decay_towards_zero(rate):
    """``u = -rate theta``: params that are needed."""
    shrunk = lambda updates, state, params: (tree.tree_map(lambda p: -rate * p, params), ())  # noqa: E731
    return Transformation(lambda params: (), shrunk)


def steps(optimizer, params, count, grads=GRADS, **options):
    state = optimizer.init(params)
    for _ in range(count):
        params, state = optimizer.update(grads, state, params, **options)
    return params, state


def test_updates_are_added_and_the_state_goes_on():
    (params, state), lr = steps(from_transformation(heavy_ball(0.25)), PARAMS, 3), 0.25
    # m is g, 1.5 g, 1.75 g
    assert_trees_close(params, {path: PARAMS[path] - lr * 4.25 * g for path, g in GRADS.items()}, rtol=1e-15)
    assert_trees_equal(state, {path: 1.75 * g for path, g in GRADS.items()})


def test_a_transformation_sees_params_and_any_tree_is_flat_for_it():
    optimizer = from_transformation(decay_towards_zero(0.5))
    nested = {"b": PARAMS["b"], "a": {"x": PARAMS["a.x"]}, "gain": PARAMS["gain"], "none": None}
    got, _ = optimizer.update({**nested, "b": GRADS["b"]}, optimizer.init(nested), nested)
    assert got["none"] is None
    assert_trees_equal(tree.flatten(got), {path: 0.5 * leaf for path, leaf in PARAMS.items()})


def test_a_method_takes_it_and_donates():
    def loss_fn(params, batch):
        return sum(((leaf - batch) ** 2).sum() for leaf in params.values()), None

    def build(donate):
        return smat.build(loss_fn, from_transformation(heavy_ball(1e-2)), BASE, period=2, donate=donate)

    verify_donation(build, PARAMS, [torch.tensor(0.1 * i) for i in range(4)], key=random.key(1), untouched=BASE)


def test_steps_are_differentiable_where_the_transformation_is():
    optimizer = from_transformation(heavy_ball(0.5))

    def end(scale):
        grads = {path: scale * g for path, g in GRADS.items()}
        return sum(leaf.sum() for leaf in steps(optimizer, PARAMS, 2, grads=grads)[0].values())

    slope = torch.func.grad(end)(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(slope, -0.5 * 2.5 * sum(g.sum() for g in GRADS.values()))


def test_bf16_parameters_stay_bf16():
    params = tree.cast(PARAMS, torch.bfloat16)
    got, _ = steps(from_transformation(heavy_ball(0.25)), params, 1)  # updates in float64
    want = {path: (leaf + -0.25 * GRADS[path]).bfloat16() for path, leaf in params.items()}
    assert_trees_equal(got, want)


@pytest.mark.parametrize("make", [lambda: optim.adam(0.1), lambda: optim.muon(0.1, rest=optim.adam(0.1))])
def test_an_optimizer_is_a_transformation_and_back(make):
    transformation = as_transformation(make())
    state = transformation.init(PARAMS)
    updates, state = transformation.update(GRADS, state, PARAMS)
    want, _ = steps(make(), PARAMS, 1)
    assert_trees_equal(updates, tree.tree_map(torch.sub, want, PARAMS))
    again, want = (steps(one, PARAMS, 3)[0] for one in (from_transformation(transformation), make()))
    assert_trees_close(again, want, rtol=1e-14, atol=1e-15)


def test_what_is_no_transformation_is_refused():
    with pytest.raises(ValueError, match="a Adam is not a gradient transformation: give an object with init"):
        from_transformation(torch.optim.Adam([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(ValueError, match=r"call update\(updates, state, params=\.\.\.\)"):
        as_transformation(optim.adam(0.1)).update(GRADS, None)
    partial = from_transformation(Transformation(lambda p: (), lambda u, s, params: ({"b": u["b"]}, s)))
    with pytest.raises(ValueError, match=r"updates lacks parameter 'a\.x' of params"):
        partial.update(GRADS, (), PARAMS)


def torchopt():
    return pytest.importorskip("torchopt", exc_type=ImportError, reason="torchopt is not here, or not for this torch")


def test_adam_of_torchopt_is_ours():
    their = torchopt()
    for transformation, ours in (
        (their.adam(1e-2), optim.adam(1e-2)),
        (their.adamw(1e-2, weight_decay=0.1), optim.adamw(1e-2, weight_decay=0.1)),
    ):
        given = tree.clone({"params": PARAMS, "grads": GRADS})
        got = steps(from_transformation(transformation), PARAMS, 5)[0]
        # steps of 1e-2; torchopt's bias correction is in float32
        assert_trees_close(got, steps(ours, PARAMS, 5)[0], atol=1e-6)
        assert_trees_equal({"params": PARAMS, "grads": GRADS}, given)


def test_ours_in_a_chain_of_torchopt():
    their = torchopt()
    chained = their.chain(their.clip.clip_grad_norm(0.1), as_transformation(optim.adam(1e-2, eps=0.1)))
    params, state = PARAMS, chained.init(PARAMS)
    for _ in range(3):
        updates, state = chained.update(tree.clone(GRADS), state, params=params, inplace=False)
        params = their.apply_updates(params, updates, inplace=False)
    want = steps(optim.chain(optim.clip_by_global_norm(0.1), optim.adam(1e-2, eps=0.1)), PARAMS, 3)[0]
    assert_trees_close(params, want, rtol=1e-9, atol=1e-12)


def test_methods_train_with_torchopt():
    their = torchopt()

    def loss_fn(params, batch):
        return sum(((leaf - batch) ** 2).sum() for leaf in params.values()), None

    def build(donate):
        optimizer = from_transformation(their.chain(their.clip.clip_grad_norm(1.0), their.rmsprop(1e-2)))
        return smat.build(loss_fn, optimizer, BASE, period=2, donate=donate)

    verify_donation(build, PARAMS, [torch.tensor(0.1 * i) for i in range(4)], key=random.key(1), untouched=BASE)
