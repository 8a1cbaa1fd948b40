"""Climbing along the momentum, in MSAM and in SMAT, against closed forms and against the definitions."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from smat_fn import draw, optim, random, reweight, simulate, testing, tree
from smat_fn.mat import asam, msam, smat
from smat_fn.types import Optimizer

KEY = random.key(3)
HESSIAN = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, -0.25], [0.0, -0.25, 3.0]])
LINEAR = np.array([0.5, -1.0, 0.25])
START = {"w": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}
LOSS = testing.quadratic(torch.from_numpy(HESSIAN), torch.from_numpy(LINEAR))
SHAPES = {"blocks.0.w": (8, 4), "head": (4,)}
BASE, PARAMS = (testing.random_tree(seed, SHAPES) for seed in (0, 1))
HYPER = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.01}


class Momentum(NamedTuple):
    """State of SGD with momentum."""

    momentum: dict


def gradient_at(point):
    return HESSIAN @ point + LINEAR


def climbed(theta, slope, rho, adaptive):
    weight = np.abs(theta) if adaptive else np.ones(3)
    return theta + rho * weight**2 * slope / (np.linalg.norm(weight * slope) + 1e-12)


def in_block(path, leaf):
    return path == "blocks.0.w"


def loss(params, batch):
    return ((batch @ params["blocks.0.w"]).tanh() @ params["head"]).square().mean(), {}


def batches(count):
    return [testing.random_tree(seed, {"x": (6, 8)})["x"] for seed in range(20, 20 + count)]


def run(method, data):
    state, infos = method.init(PARAMS), []
    for batch in data:
        state, info = method.update(KEY, state, batch)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("along", ["momentum", "gradient"])
def test_three_steps_on_a_quadratic_are_the_closed_form(along, adaptive):
    lr, beta, rho = 0.1, 0.75, 0.3

    def sgd(grads, momentum, params):
        momentum = momentum._replace(momentum={"w": beta * momentum.momentum["w"] + (1 - beta) * grads["w"]})
        return {"w": params["w"] - lr * momentum.momentum["w"]}, momentum

    optimizer = Optimizer(lambda params: Momentum({"w": torch.zeros_like(params["w"])}), sgd)
    theta, mean, last = START["w"].numpy().copy(), np.zeros(3), np.zeros(3)
    method = msam.build(LOSS, optimizer, START, rho=rho, adaptive=adaptive, along=along)
    state = method.init(START)
    for _ in range(3):
        at = climbed(theta, mean if along == "momentum" else last, rho, adaptive)
        last = gradient_at(at)
        mean = beta * mean + (1 - beta) * last
        theta = theta - lr * mean
        state, info = method.update(KEY, state, 0)
        np.testing.assert_allclose(state.params["w"].numpy(), theta, rtol=1e-12)
        np.testing.assert_allclose(info.loss, at @ HESSIAN @ at / 2 + LINEAR @ at, rtol=1e-12)
        np.testing.assert_allclose(info.grad_norm, np.linalg.norm(last), rtol=1e-6)


@pytest.mark.parametrize("climb", ["clean", "both"])
@pytest.mark.parametrize("optimizer", [optim.adam(0.01), optim.muon(0.01, rest=optim.adam(0.01))], ids=["adam", "muon"])
def test_smat_with_a_climb_is_its_definition_bit_for_bit(optimizer, climb):
    data, gradient = batches(6), torch.func.grad(loss, has_aux=True)
    options = {"where": in_block, "period": 3, "rho": 0.2, **HYPER}
    method = smat.build(loss, optimizer, BASE, climb=climb, engine="func", **options)
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    state = method.init(PARAMS)
    for step, batch in enumerate(data):
        simulated = (step + 1) % 3 == 0
        point = params
        if climb == "both" or not simulated:
            point = asam.climb(params, optim.momentum_of(opt_state, params), rho=0.2)
        if simulated:
            drawn = draw(random.fold_in(KEY, step), **HYPER)
            point = simulate(point, BASE, drawn, where=in_block)
        grads, _ = gradient(point, batch)
        grads = reweight(grads, drawn, where=in_block) if simulated else grads
        params, opt_state = optimizer.update(grads, opt_state, params)
        state, info = method.update(KEY, state, batch)
        assert info.simulated == simulated
        testing.assert_trees_equal(state.params, params)


@pytest.mark.parametrize("climb", ["clean", "both"])
def test_smat_with_everything_off_is_msam(climb):
    off = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0, "period": 2}
    ours, _ = run(smat.build(loss, optim.adam(0.01), BASE, climb=climb, rho=0.2, **off), batches(4))
    theirs, _ = run(msam.build(loss, optim.adam(0.01), BASE, rho=0.2), batches(4))
    testing.assert_trees_equal(ours.params, theirs.params)


def test_clean_differs_from_both_and_a_radius_or_clean_steps_that_play_no_part_are_errors():
    def end(**climb):
        return run(smat.build(loss, optim.adam(0.01), BASE, period=2, **HYPER, **climb), batches(4))[0].params

    testing.assert_trees_equal(end(climb="clean"), end(climb="clean", rho=0.5))
    with pytest.raises(ValueError, match=r"smat: rho is 3\.0, the radius of a climb, and there is none: give"):
        end(rho=3.0)
    with pytest.raises(ValueError, match="smat: climb 'clean' needs clean steps, period 1 has none: take climb 'both'"):
        smat.build(loss, optim.adam(0.01), BASE, climb="clean", period=1, **HYPER)
    smat.build(loss, optim.adam(0.01), BASE, climb="clean", period=1, alpha_min=1.0, drop_prob=0.0, sigma=0.0)
    ends = [end(), end(climb="clean"), end(climb="both"), end(climb="clean", rho=0.1)]
    assert len({tuple(leaf["head"].tolist()) for leaf in ends}) == 4
    testing.assert_trees_equal(end(climb="both"), end(climb="both", offload="cpu"))
    testing.assert_trees_equal(end(climb="clean"), end(climb="clean", offload="cpu"))


def test_the_gradient_of_the_last_step_is_kept_before_clipping():
    method = msam.build(loss, optim.adam(0.01), BASE, along="gradient", max_grad_norm=1e-3, donate=True)
    state, infos = run(method, batches(2))
    assert tree.global_norm(state.previous).item() == pytest.approx(infos[-1].grad_norm.item(), rel=1e-6)


@pytest.mark.parametrize("build", [msam.build, lambda *a: smat.build(*a, climb="clean")], ids=["msam", "smat"])
def test_an_optimizer_without_momentum_is_refused_before_the_first_step(build):
    stateless = Optimizer(lambda params: (), lambda grads, state, params: (params, state))
    with pytest.raises(ValueError, match="the optimizer keeps no momentum of 2 of 2 leaves"):
        build(loss, stateless, BASE).init(PARAMS)


def test_a_mixed_objective_has_no_clean_steps_to_climb_in():
    with pytest.raises(ValueError, match="climb 'clean' needs clean steps, lam has none"):
        smat.build(loss, optim.adam(0.01), BASE, climb="clean", lam=0.3)
