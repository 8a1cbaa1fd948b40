"""ASAM, MergOPT and OrthoReg against second computations: numpy, closed forms, definitions written out again."""

import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import optim, random, simulate
from smat_fn.mat import asam, mergopt, orthoreg
from smat_fn.types import Micro
from smat_fn.where import never

KEY = random.key(3)


def tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def quadratic(hessian, center):
    """L = (x - c)' H (x - c) / 2 with gradient H (x - c), over leaves "a" (2, 2) and "b" (2,)."""

    def loss(params, batch):
        x = torch.cat([params["a"].reshape(-1), params["b"]]) - center
        return 0.5 * x @ hessian @ x, {}

    return loss


def flat(params):
    return np.concatenate([params["a"].reshape(-1).numpy(), params["b"].numpy()])


@pytest.fixture
def problem():
    root = tensor(6, 6, seed=1)
    hessian, center = root @ root.T / 6 + torch.eye(6, dtype=torch.float64), tensor(6, seed=2)
    return hessian, center, {"a": tensor(2, 2, seed=3), "b": tensor(2, seed=4)}


def sgd(lr):
    from smat_fn.types import Optimizer

    def update(grads, state, params):
        return {name: p - lr * grads[name] for name, p in params.items()}, state

    return Optimizer(lambda params: (), update)


@pytest.mark.parametrize("adaptive", [True, False])
def test_asam_climbs_by_the_closed_form_and_descends_from_theta(problem, adaptive):
    hessian, center, start = problem
    h, c, theta, rho, lr = hessian.numpy(), center.numpy(), flat(start), 0.3, 0.1
    gradient = h @ (theta - c)
    weight = np.abs(theta) if adaptive else np.ones(6)
    climb = rho * weight**2 * gradient / (np.sqrt(((weight * gradient) ** 2).sum()) + 1e-12)
    expected = theta - lr * h @ (theta + climb - c)
    method = asam.build(quadratic(hessian, center), sgd(lr), start, rho=rho, adaptive=adaptive)
    state, info = method.update(KEY, method.init(start), 0)
    np.testing.assert_allclose(flat(state.params), expected, rtol=1e-12)
    np.testing.assert_allclose(info.loss, 0.5 * (theta - c) @ h @ (theta - c), rtol=1e-12)
    at = theta + climb - c
    np.testing.assert_allclose(info.climbed_loss, 0.5 * at @ h @ at, rtol=1e-12)
    np.testing.assert_allclose(info.grad_norm, np.linalg.norm(h @ at), rtol=1e-6)


@pytest.mark.parametrize("donate", [True, False])
def test_asam_keeps_no_first_gradient_beside_the_climbed_weights(donate, problem, monkeypatch):
    hessian, center, start = problem
    accumulate, first, alive = asam.step.accumulate, dict[str, weakref.ref](), []

    def watched(at, params, batch):
        if first:
            alive.extend(first[path]() is leaf for path, leaf in params.items())
            alive.extend(ref() is not None for ref in first.values())
        loss, aux, grads = accumulate(at, params, batch)
        first.update({path: weakref.ref(leaf) for path, leaf in grads.items()})
        return loss, aux, grads

    monkeypatch.setattr(asam.step, "accumulate", watched)
    method = asam.build(quadratic(hessian, center), optim.adam(1e-3), start, donate=donate)
    method.update(KEY, method.init(start), 0)
    assert alive == [donate] * 4  # the climbed weights stand in its memory, or it is freed


def test_the_climb_has_length_rho_in_units_of_the_weights(problem):
    _, _, start = problem
    grads = {"a": tensor(2, 2, seed=8), "b": tensor(2, seed=9)}
    moved = asam.climb(start, grads, rho=0.7)
    with pytest.raises(ValueError, match="parameter 'cut' has shape"):
        asam.climb({**start, "cut": torch.ones(3)}, {**grads, "cut": torch.ones(2)}, rho=0.7)
    for rho in (-1.0, math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match=f"climb: rho is {rho!r}, must be finite and not negative"):
            asam.climb(start, grads, rho=rho)
    whole = {"n": torch.ones(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match="parameter 'n' of params has dtype int64"):
        asam.climb(whole, whole, rho=0.7)
    relative = (flat(moved) - flat(start)) / np.abs(flat(start))
    assert math.isclose(np.linalg.norm(relative), 0.7, rel_tol=1e-9)
    still = asam.climb(start, {name: torch.zeros_like(leaf) for name, leaf in start.items()}, rho=0.7)
    assert all(torch.equal(still[name], start[name]) for name in start)


def test_asam_takes_both_passes_over_all_micro_batches(problem):
    hessian, center, start = problem

    def loss(params, scale):
        value, aux = quadratic(hessian, center)(params, None)
        return scale * value, aux

    method = asam.build(loss, sgd(0.1), start, rho=0.3)
    micro, _ = method.update(KEY, method.init(start), [Micro(0.5), Micro(1.5)])
    whole, _ = method.update(KEY, method.init(start), 1.0)
    np.testing.assert_allclose(flat(micro.params), flat(whole.params), rtol=1e-14)


def test_mergopt_offsets_each_coordinate_by_c_z(problem):
    hessian, center, start = problem
    h, c, lr, b, k_max = hessian.numpy(), center.numpy(), 0.1, 0.02, 4
    method, state = mergopt.build(quadratic(hessian, center), sgd(lr), start, b=b, k_max=k_max), None
    state = method.init(start)
    for step in range(3):
        before, step_key = flat(state.params), random.fold_in(KEY, step)
        u = random.uniform(random.fold_in(step_key, 1), (2,), dtype=torch.float64)
        k, a = 1 + math.floor(float(u[0]) * k_max), (1 + math.floor(float(u[1]) * 6)) / 10
        factor = k * a - 1
        # z from the Laplace quantiles of each coordinate's 16 bits
        z = []
        for path, size in (("a", 4), ("b", 2)):
            fields = random.bits(random.leaf_streams(step_key, [path])[1, 0], size).double().numpy()
            upper = np.abs(fields - 32767.5) / 32768
            z.append(np.sign(fields - 32767.5) * -np.log1p(-upper) * b)
        offset = factor * np.concatenate(z)
        state, info = method.update(KEY, state, 0)
        assert math.isclose(float(info.offset), factor, abs_tol=1e-12)
        # the table is normalised to RMS 1 exactly, a relative change of about 1e-4 of b
        expected = before - lr * h @ (before + offset - c)
        np.testing.assert_allclose(flat(state.params), expected, atol=3e-4 * b * lr * np.abs(h).sum())


def test_the_coefficient_of_mergopt_runs_over_k_a_minus_one():
    drawn = torch.func.vmap(lambda key: mergopt.offset(key, b=1.0, k_max=3).sigma)(random.split(KEY, 2000))
    seen = {round(float(s) / math.sqrt(2), 9) for s in drawn}
    assert seen == {round(k * a / 10 - 1, 9) for k in (1, 2, 3) for a in range(1, 7)}
    for k_max in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"offset: b is -1.0, .*; k_max is {k_max}, must be an integer of"):
            mergopt.offset(KEY, b=-1.0, k_max=k_max)


def test_the_coefficient_of_mergopt_has_the_bits_of_the_cpu_on_a_gpu_that_is_not_waited_for():
    key = KEY.to("meta")
    with Calls() as seen:
        mergopt._factor(key, 4)
    # a GPU multiplies by the reciprocal of a number, and what the host makes is copied
    divisors = [args[1] for name, args in seen.calls if name.startswith("aten.div.")]
    assert [type(divisor) for divisor in divisors] == [torch.Tensor]
    assert not [name for name, args in seen.calls if "copy" in name and args[0].is_cpu]


class Calls(TorchDispatchMode):
    """Names and arguments of the operations inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), args))
        return func(*args, **(kwargs or {}))


def test_mergopt_noise_has_rms_sqrt_two_b_times_c_and_no_mean():
    zeros = {"w": torch.zeros(200_000)}
    drawn = mergopt.offset(KEY, b=0.01, k_max=5)
    noise = simulate(zeros, zeros, drawn, where=never)["w"].double()
    rms = abs(float(drawn.sigma))
    assert abs(noise.mean()) < 4 * rms / math.sqrt(200_000)
    # the square of Laplace noise has variance 5 rms^4
    assert abs((noise**2).mean() - rms**2) < 4 * math.sqrt(5) * rms**2 / math.sqrt(200_000)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_the_penalty_and_its_gradient_are_the_closed_forms(shape):
    base, params = {"w": tensor(*shape, seed=1), "b": tensor(3, seed=2)}, {"w": tensor(*shape, seed=3), "b": tensor(3)}
    delta = (params["w"] - base["w"]).numpy()
    wide = delta if shape[0] >= shape[1] else delta.T
    gap = wide.T @ wide - np.eye(wide.shape[1])
    np.testing.assert_allclose(orthoreg.penalty(params, base), np.sqrt((gap**2).sum()), rtol=1e-12)
    expected = 2 * wide @ gap / np.sqrt((gap**2).sum())
    loss = lambda params, batch: (0.0 * params["b"].sum(), {})  # noqa: E731
    method = orthoreg.build(loss, sgd(1.0), base, lambda_reg=0.3)
    state, info = method.update(KEY, method.init(params), 0)
    moved = (params["w"] - state.params["w"]).numpy()
    np.testing.assert_allclose(moved, 0.3 * (expected if shape[0] >= shape[1] else expected.T), rtol=1e-10)
    assert torch.equal(state.params["b"], params["b"])
    np.testing.assert_allclose(info.penalty, np.sqrt((gap**2).sum()), rtol=1e-12)


def test_orthoreg_starts_at_the_base_and_at_an_orthonormal_update_without_nan():
    base = {"w": torch.zeros(4, 2)}
    orthonormal = {"w": torch.eye(4)[:, :2].contiguous()}
    for params in (base, orthonormal):
        method = orthoreg.build(lambda p, _: (p["w"].sum() * 0, {}), optim.adam(1e-3), base, lambda_reg=1.0)
        state, _ = method.update(KEY, method.init(params), 0)
        assert torch.equal(state.params["w"], params["w"])


def test_orthoreg_on_blocks_alone_and_on_every_matrix():
    base = {"block": torch.zeros(3, 3), "embed": torch.zeros(3, 3)}
    params = {name: tensor(3, 3, seed=i, dtype=torch.float32) for i, name in enumerate(base)}
    for block_only, moved in ((True, {"block"}), (False, {"block", "embed"})):
        method = orthoreg.build(
            lambda p, _: (p["block"].sum() * 0 + p["embed"].sum() * 0, {}),
            sgd(0.1),
            base,
            where=lambda path, leaf: path == "block",
            lambda_reg=1.0,
            block_only=block_only,
        )
        state, _ = method.update(KEY, method.init(params), 0)
        assert {name for name in base if not torch.equal(state.params[name], params[name])} == moved


def test_orthoreg_on_blocks_without_a_matrix_is_refused_and_never_is_not():
    base = {"w": torch.zeros(3, 3), "b": torch.zeros(3)}
    build = partial(orthoreg.build, lambda p, _: (p["w"].sum(), {}), sgd(0.1), base, block_only=True)
    with pytest.raises(ValueError, match=r"^orthoreg: block_only is True, but where picks no matrix among 'w', 'b'"):
        build(where=lambda path, leaf: path == "b")
    with pytest.raises(ValueError, match=r"^orthoreg: where is a str"):
        build(where="w")
    for where in (None, never, {"w": True, "b": False}):
        build(where=where)


def test_the_penalty_of_trees_that_do_not_match_is_an_error():
    with pytest.raises(ValueError, match="base lacks parameter 'a' of params"):
        orthoreg.penalty({"a": torch.zeros(2, 2)}, {})
    whole = {"a": torch.zeros(2, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match="parameter 'a' of params has dtype int64"):
        orthoreg.penalty(whole, whole)


def test_the_penalty_enters_once_whatever_the_micro_batches():
    base, params = {"w": torch.zeros(3, 2)}, {"w": tensor(3, 2, dtype=torch.float32)}
    method = orthoreg.build(lambda p, x: ((p["w"] * x).sum(), {}), sgd(0.1), base, lambda_reg=0.5)
    micro, _ = method.update(KEY, method.init(params), [Micro(1.0)] * 4)
    whole, _ = method.update(KEY, method.init(params), 1.0)
    assert torch.equal(micro.params["w"], whole.params["w"])
