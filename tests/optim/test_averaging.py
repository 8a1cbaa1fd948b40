"""Averages over steps against their closed forms; training beside them is not changed."""

import pytest
import torch

from smat_fn import optim, testing
from smat_fn.optim.averaging import averaged, averaging, ema, swa

PARAMS = testing.random_tree(0, {"w": (3, 2), "b": (2,)}, dtype=torch.float64)
GRADS = [testing.random_tree(seed, {"w": (3, 2), "b": (2,)}, dtype=torch.float64) for seed in range(1, 8)]


def walk(weight, optimizer, *, donate=False, params=PARAMS):
    """(all parameters after a step, the last state)."""
    both, seen = averaged(optimizer, weight), []
    state = both.init(params)
    params = {path: leaf.clone() for path, leaf in params.items()}
    for grads in GRADS:
        grads = {path: leaf.to(params[path].dtype) for path, leaf in grads.items()}
        params, state = both.update(grads, state, params, **({"donate": True} if donate else {}))
        seen.append({path: leaf.clone() for path, leaf in params.items()})
    return seen, state


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_ema_is_the_normalised_sum_of_powers(decay):
    seen, state = walk(ema(decay), optim.adam(0.1))
    powers = [decay ** (len(seen) - 1 - s) for s in range(len(seen))]
    for path, mean in state.average.items():
        want = sum(w * own[path] for w, own in zip(powers, seen, strict=True)) / sum(powers)
        torch.testing.assert_close(mean, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("share", "count"), [(1.0, 7), (0.3, 2), (0.001, 1)])
def test_swa_is_the_mean_of_the_last_steps(share, count):
    seen, state = walk(swa(7, share), optim.adam(0.1))
    for path, mean in state.average.items():
        torch.testing.assert_close(mean, sum(own[path] for own in seen[-count:]) / count, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", [optim.adamw(0.1, weight_decay=0.1), optim.muon(0.1, rest=optim.adam(0.1))])
def test_training_keeps_its_bits_donated_or_not(optimizer):
    plain, state = PARAMS, optimizer.init(PARAMS)
    for grads in GRADS:
        plain, state = optimizer.update(grads, state, plain)
    results = [walk(ema(0.5), optimizer, donate=donate) for donate in (False, True)]
    for seen, last in results:
        testing.assert_trees_equal(seen[-1], plain)
        testing.assert_trees_equal(optim.momentum_of(last, plain), optim.momentum_of(state, plain))
        testing.assert_trees_equal(last.average, results[0][1].average)


def test_without_donation_the_old_average_stays():
    both = averaged(optim.adam(0.1), ema(0.5))
    start = both.init(PARAMS)
    params, state = both.update(GRADS[0], start, PARAMS)
    testing.assert_trees_equal(start.average, PARAMS)
    before = {path: leaf.clone() for path, leaf in state.average.items()}
    both.update(GRADS[1], state, params)
    testing.assert_trees_equal(state.average, before)


def test_bfloat16_is_averaged_in_float32_and_the_start_has_no_part():
    params = {path: leaf.bfloat16() for path, leaf in PARAMS.items()}
    seen, state = walk(swa(7, 1.0), optim.adam(0.01), params=params)
    for path, mean in state.average.items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, sum(own[path].float() for own in seen) / 7, rtol=1e-5, atol=1e-6)


def test_texts():
    assert [averaging("ema:0.75", 9)(step) for step in (0, 1)] == [1.0, pytest.approx(0.25 / (1 - 0.75**2))]
    assert [averaging("swa:25%", 8)(step) for step in range(5, 8)] == [0.0, 1.0, 0.5]
    for text in ("ema", "ema:1.5", "ema:nan", "swa:25", "swa:-1%", "mean"):
        with pytest.raises(ValueError, match=r"give ema:DECAY as in ema:0.999, swa:SHARE% as in swa:25%, or none"):
            averaging(text, 8)
    with pytest.raises(ValueError, match="swa: a share of 2 of 8 steps"):
        averaging("swa:200%", 8)
    with pytest.raises(ValueError, match="ema: decay is 1"):
        ema(1.0)


def test_a_decay_in_the_place_of_a_function_and_a_state_before_the_first_step_are_refused():
    with pytest.raises(ValueError, match=r"weight is 0\.9: give a function of the step, as ema\(0\.999\)"):
        optim.averaged(optim.adam(1e-2), 0.9)
    with pytest.raises(ValueError, match="optimizer is a NoneType: give one with init and update"):
        optim.averaged(None, optim.ema(0.9))
    with pytest.raises(ValueError, match="second_moments: the state is of step 0"):
        optim.second_moments(optim.adam(1e-2).init({"w": torch.ones(1)}))
    for state in (None, optim.muon(0.1, rest=optim.adam(0.1)).init({})._replace(rest=None)):
        with pytest.raises(ValueError, match=r"second_moments: a \w+ has none: give the state of adam or adamw"):
            optim.second_moments(state)
    for beta in (1.0, -0.1, float("nan"), "0.9"):
        with pytest.raises(ValueError, match=rf"beta is {beta!r}, must lie in \[0, 1\)"):
            optim.second_moments(optim.adam(1e-2).init({"w": torch.ones(1)}), beta=beta)
