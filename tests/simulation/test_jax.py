"""The same equations written in jax.numpy, fed with the same mask and noise: states and gradients agree."""

import numpy as np
import pytest
import torch

from smat_fn import random
from smat_fn.simulation import draw, materialise, reweight, simulate
from smat_fn.testing import random_tree

jax = pytest.importorskip("jax")
chex = pytest.importorskip("chex")
jax.config.update("jax_platforms", "cpu")
jnp = jax.numpy

SHAPES = {"w": (6, 5), "b": (6,), "scalar": ()}


def only_w(path, leaf):
    return path == "w"


def torch_loss(params, x):
    hidden = torch.tanh(x @ params["w"].T + params["b"])
    return (hidden * torch.sin(params["scalar"] + hidden)).sum()


def jax_loss(params, x):
    hidden = jnp.tanh(x @ params["w"].T + params["b"])
    return (hidden * jnp.sin(params["scalar"] + hidden)).sum()


def jax_state(theta, theta_0, alpha, sigma, mask, unit):
    def one(t, t_0, m, z):
        return t_0 + alpha * m * (t - t_0) + sigma * z

    return jax.tree.map(one, theta, theta_0, mask, unit)


def as_numpy(tree):
    return jax.tree.map(lambda leaf: leaf.detach().numpy(), tree)


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_states_and_gradients_in_every_argument_equal_jax(noise, dtype, jit):
    theta, theta_0 = (random_tree(s, SHAPES, dtype=dtype) for s in (1, 2))
    x = random_tree(3, {"x": (4, 5)}, dtype=dtype)["x"]
    drawn = draw(random.key(5), alpha_min=0.2, drop_prob=0.5, sigma=0.1, noise=noise)
    alpha, sigma = drawn.scale.to(dtype), drawn.sigma.to(dtype)

    def loss(theta, theta_0, alpha, sigma):
        return torch_loss(simulate(theta, theta_0, drawn._replace(scale=alpha, sigma=sigma), where=only_w), x)

    grads = torch.func.grad(loss, argnums=(0, 1, 2, 3))(theta, theta_0, alpha, sigma)
    state = simulate(theta, theta_0, drawn, where=only_w)
    explicit = reweight(torch.func.grad(torch_loss)(state, x), drawn, where=only_w)
    mask, epsilon = materialise(drawn, theta, where=only_w)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}

    with jax.enable_x64(dtype == torch.float64):
        fed = as_numpy((theta, theta_0, alpha, sigma))
        m, z = as_numpy(mask), jax.tree.map(lambda e: np.asarray(e / fed[3]), as_numpy(epsilon))

        def same_loss(theta, theta_0, alpha, sigma):
            return jax_loss(jax_state(theta, theta_0, alpha, sigma, m, z), x.numpy())

        variant = jax.jit if jit else lambda f: f
        expected = variant(jax.grad(same_loss, argnums=(0, 1, 2, 3)))(*fed)
        expected_state = variant(jax_state)(*fed, m, z)
        got = as_numpy(grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
        chex.assert_trees_all_close(got, expected, **tolerance)
        chex.assert_trees_all_close(as_numpy(explicit), expected[0], **tolerance)
        chex.assert_trees_all_equal_shapes_and_dtypes(as_numpy(state), expected_state, fed[0])
        chex.assert_trees_all_close(as_numpy(state), expected_state, **tolerance)
    chex.assert_rank([*(got[0][path] for path in SHAPES), got[2], got[3]], [2, 1, 0, 0, 0])
    chex.assert_trees_all_equal_structs(as_numpy(theta), got[0], as_numpy(mask))
    assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(got))
