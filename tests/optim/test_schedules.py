"""Learning rates against closed forms and torch's schedulers."""

import math

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


def test_warmup_is_linear_and_joins_the_cosine():
    warm, plain = optim.cosine(0.4, 10, warmup=4), optim.cosine(0.4, 10)
    assert [warm(s) for s in range(4)] == [0.1, 0.2, pytest.approx(0.3), 0.4]
    assert [warm(s) for s in range(4, 12)] == [plain(s) for s in range(4, 12)]
    assert all(math.isfinite(optim.cosine(0.4, 3, warmup=3)(s)) for s in range(5))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="steps is 0, must be at least 1"):
        optim.cosine(0.1, 0)
    for warmup in (-1, 6):
        with pytest.raises(ValueError, match=rf"warmup is {warmup}, must lie in \[0, steps = 5\]"):
            optim.cosine(0.1, 5, warmup=warmup)
