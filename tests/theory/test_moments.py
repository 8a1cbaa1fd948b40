"""Prop. simulated-state-moments: exactly over all draws, and in standard errors over real keys."""

import pytest
import torch

from smat_fn import random
from smat_fn.simulation import NOISES, draw, simulate
from smat_fn.testing import assert_trees_close, assert_within_errors

STRENGTHS = [(0.2, 0.3, 0.4), (1.0, 0.3, 0.0), (0.2, 0.0, 0.0), (1.0, 0.0, 0.4), (0.0, 0.9, 0.1)]


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
def test_mean_and_covariance_over_all_draws_are_the_closed_form(all_draws, point, strengths):
    draws = all_draws(*strengths)
    assert_trees_close([draws.weights.sum()], [torch.tensor(1.0)], rtol=1e-14)
    states = draws.states(*point)
    mean = draws.mean(states)
    centered = states - mean
    covariance = draws.mean(centered[:, :, None] * centered[:, None, :])
    assert_trees_close([mean, covariance], list(draws.moments(*point)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("strengths", STRENGTHS[:2], ids=str)
def test_mean_and_covariance_over_keys_within_standard_errors(all_draws, point, strengths, noise):
    mean, covariance = all_draws(*strengths).moments(*point)
    (theta, theta_0), (alpha_min, drop_prob, sigma) = point, strengths

    def products(key):
        # 50 independent copies of mask and noise under one alpha, averaged
        drawn = draw(key, alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise)
        params, base = ({"w": x[:2].expand(50, 2), "b": x[2:].expand(50, 1)} for x in (theta, theta_0))
        states = torch.cat(list(simulate(params, base, drawn, where=lambda path, leaf: path == "w").values()), 1)
        return states.mean(0), (states - mean).t() @ (states - mean) / 50

    means, squares = torch.func.vmap(products)(random.split(random.key(1), 600))
    assert_within_errors(means, mean)
    assert_within_errors(squares, covariance)
