import itertools
import math

import pytest
import torch

from smat_fn import random
from smat_fn.simulation import draw, materialise, participation, simulate

# nodes and weights with the moments of each unit noise up to the fifth; of the coin, up to the third
NODES = {
    "uniform": ([-math.sqrt(9 / 5), 0.0, math.sqrt(9 / 5)], [5 / 18, 8 / 18, 5 / 18]),
    "gaussian": ([-math.sqrt(3), 0.0, math.sqrt(3)], [1 / 6, 2 / 3, 1 / 6]),
    "coin": ([-1.0, 1.0], [1 / 2, 1 / 2]),
    "laplace": ([-math.sqrt(6), 0.0, math.sqrt(6)], [1 / 12, 5 / 6, 1 / 12]),
}


def only_w(path, leaf):
    return path == "w"


class Draws:
    """Finitely many weighted draws of (alpha, m, epsilon) with the true moments up to the third, made by `simulate`.

    Coordinates 0 and 1 are masked, 2 is not. alpha and noise sit on quadrature nodes, masks run through all patterns:
    expectations of cubic polynomials of the state are exact. A table that holds one number everywhere sets the
    noise, a searched key drops or keeps both coordinates; independent coordinates are then combined.
    """

    def __init__(self, alpha_min, drop_prob, sigma, noise="uniform"):
        nodes, node_weights = (torch.tensor(column, dtype=torch.float64) for column in NODES[noise])
        # alpha's variance is (1 - alpha_min)^2 / 12
        alphas = (1 + alpha_min) / 2 + torch.tensor([-1, 1], dtype=torch.float64) * (1 - alpha_min) / math.sqrt(12)
        self.alpha_min, self.sigma = alpha_min, sigma
        self.drop = float(random.threshold(drop_prob)) / 65536
        drawn = draw(random.key(0), alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma)
        keys = [_key(drawn, kept) if self.drop else drawn.key for kept in (False, True)]
        count, tables = len(nodes), [node.expand(65536) for node in nodes]
        self._draws = [
            drawn._replace(key=key, scale=alpha, noise=table) for alpha in alphas for key in keys for table in tables
        ]
        cases = torch.tensor(list(itertools.product((0, 1), (0, 1), (0, 1), *[range(count)] * 3)))
        self._rows = torch.stack(
            [(cases[:, 0] * 2 + cases[:, kept]) * count + cases[:, z] for kept, z in ((1, 3), (2, 4), (1, 5))]
        )
        mask_weights = torch.tensor([self.drop, 1 - self.drop], dtype=torch.float64)[cases[:, 1:3]].prod(1)
        self.weights = mask_weights / 2 * node_weights[cases[:, 3:]].prod(1)

    def _combine(self, fn):
        parts = torch.stack([torch.cat([tree["w"], tree["b"]]) for tree in map(fn, self._draws)])
        return torch.stack([parts[rows, k] for k, rows in enumerate(self._rows)], 1)

    def states(self, theta, theta_0):
        """(number of draws, 3), differentiable in the vectors theta and theta_0."""
        args = {"w": theta[:2], "b": theta[2:]}, {"w": theta_0[:2], "b": theta_0[2:]}
        return self._combine(lambda drawn: simulate(*args, drawn, where=only_w))

    def participation(self):
        """alpha m of every draw, (number of draws, 3)."""
        like = {"w": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
        return self._combine(lambda drawn: participation(drawn, like, where=only_w))

    def mean(self, values):
        """The expectation of (number of draws, ...)."""
        return torch.tensordot(self.weights, values, 1)

    def loss(self, loss_fn, theta, theta_0):
        return self.mean(torch.func.vmap(loss_fn)(self.states(theta, theta_0)))

    def moments(self, theta, theta_0):
        """Mean and covariance of Prop. simulated-state-moments, in its own symbols."""
        delta, low = theta - theta_0, self.alpha_min
        mean_alpha, var_alpha = (1 + low) / 2, (1 - low) ** 2 / 12
        p = torch.tensor([self.drop, self.drop, 0.0], dtype=torch.float64)
        masked = (mean_alpha**2 + var_alpha) * torch.diag(delta**2 * p / (1 - p))
        covariance = var_alpha * torch.outer(delta, delta) + masked + self.sigma**2 * torch.eye(3, dtype=torch.float64)
        return theta_0 + mean_alpha * delta, covariance


def _key(drawn, kept):
    """A key whose mask keeps (or drops) both masked coordinates."""
    for seed in itertools.count():
        mask, _ = materialise(drawn._replace(key=random.key(seed)), {"w": torch.zeros(2)})
        if ((mask["w"] > 0) == kept).all():
            return random.key(seed)


@pytest.fixture
def all_draws():
    """``all_draws(alpha_min, drop_prob, sigma, noise)``: exact expectations over draws."""
    return Draws


@pytest.fixture
def point():
    """theta, theta_0: float64 vectors of three coordinates."""
    theta_0 = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64)
    return theta_0 + torch.tensor([0.9, 0.6, -0.7], dtype=torch.float64), theta_0


@pytest.fixture
def bowl():
    """A quadratic (hessian, linear) with curvature of both signs."""
    root = torch.tensor([[1.0, 0.3, -0.2], [0.0, 0.7, 0.5], [0.0, 0.0, -0.4]], dtype=torch.float64)
    return root + root.t(), torch.tensor([0.3, -1.0, 0.6], dtype=torch.float64)


@pytest.fixture
def waves():
    """A smooth loss that is neither convex nor polynomial, with global bounds on its first three derivatives.

    ``sum_k a_k sin(w_k x + b_k)``: gradient at most sum |a| |w|, Hessian sum |a| |w|^2, its Lipschitz constant
    sum |a| |w|^3.
    """
    a = torch.tensor([1.0, -0.7, 0.5], dtype=torch.float64)
    w = torch.tensor([[1.0, 0.4, -0.3], [0.2, -1.1, 0.6], [0.8, 0.5, 1.2]], dtype=torch.float64)
    b = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64)
    norms = w.norm(dim=1)

    def loss(x):
        return (a * torch.sin(w @ x + b)).sum()

    return loss, [float((a.abs() * norms**order).sum()) for order in (1, 2, 3)]
