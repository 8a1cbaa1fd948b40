"""Learning rates against closed forms and torch's schedulers."""

import math
from itertools import pairwise

import pytest
import torch

from smat_fn import optim


def torch_rates(lr, steps, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_constant():
    assert [optim.constant(0.25)(s) for s in (0, 1, 10**6)] == [0.25] * 3
    assert optim.constant(0.0)(3) == 0
    assert [optim.constant(0.5, warmup=2)(s) for s in range(4)] == [0.25, 0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="warmup is -1"):
        optim.constant(0.5, warmup=-1)


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_cosine_has_the_values_of_torch(steps):
    want = torch_rates(2e-3, steps + 1, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=steps))
    assert [optim.cosine(2e-3, steps)(s) for s in range(steps + 1)] == pytest.approx(want, rel=1e-9, abs=1e-15)


def test_cosine_at_the_known_points():
    schedule = optim.cosine(0.5, 12)
    assert schedule(0) == 0.5
    assert schedule(4) == pytest.approx(0.375)
    assert schedule(6) == pytest.approx(0.25)
    assert [schedule(s) for s in (12, 13, 1000)] == [0, 0, 0]


@pytest.mark.parametrize("warmup", [1, 4, 30])
def test_after_the_warmup_the_rates_are_those_of_transformers(warmup):
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    pairs = (optim.cosine, get_cosine_schedule_with_warmup), (optim.linear, get_linear_schedule_with_warmup)
    for ours, theirs in pairs:
        want = torch_rates(0.4, 101, lambda o, theirs=theirs: theirs(o, warmup, 100))
        rates = [ours(0.4, 100, warmup=warmup)(step) for step in range(103)]
        assert rates[warmup:101] == pytest.approx(want[warmup:], rel=1e-9, abs=1e-15)
        assert rates[:warmup] == pytest.approx([0.4 * (step + 1) / warmup for step in range(warmup)])
        assert rates[100:] == [0, 0, 0]
        # no jump anywhere: each step changes the rate by at most the slope of the warm-up or of the decay
        steepest = 0.4 * max(1 / warmup, math.pi / 2 / (100 - warmup)) + 1e-12
        assert all(abs(a - b) <= steepest for a, b in pairwise(rates))


def test_a_warmup_of_all_steps():
    for schedule in (optim.cosine(0.4, 3, warmup=3), optim.linear(0.4, 3, warmup=3)):
        assert [schedule(step) for step in range(5)] == pytest.approx([0.4 / 3, 0.8 / 3, 0.4, 0, 0])


def test_linear_decay_at_the_known_points():
    assert [optim.linear(0.5, 4)(step) for step in range(6)] == [0.5, 0.375, 0.25, 0.125, 0, 0]


def test_bad_arguments_are_refused():
    for schedule in (optim.constant, lambda lr: optim.cosine(lr, 5), lambda lr: optim.linear(lr, 5)):
        with pytest.raises(ValueError, match=r"learning rate is <function .*>, must be a number$"):
            schedule(lambda step: 0.1)
    for decaying in (optim.cosine, optim.linear):
        with pytest.raises(ValueError, match=r"learning rate is -1.*steps is 0, must be at least 1"):
            decaying(-1, 0)
        for warmup in (-1, 6):
            with pytest.raises(ValueError, match=rf"warmup is {warmup}, must lie in \[0, steps = 5\]"):
                decaying(0.1, 5, warmup=warmup)
