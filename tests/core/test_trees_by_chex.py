"""Trees keep structure, shapes and dtypes in every update and merge: checked by chex, which sees them as JAX would."""

import importlib

import chex
import jax
import numpy as np
import pytest
import torch

from smat_fn import merge, optim, random, tree
from smat_fn.testing import random_tree

from ..mat.test_conformance import RUNS
from ..merge.test_conformance import ALL, NO_BASE

KEY = random.key(3)
SHAPES = {"blocks.0.w": (4, 3), "blocks.0.b": (3,), "head": (3, 2), "gain": ()}
OPTIMIZERS = {
    "adam": lambda: optim.adam(1e-2),
    "adamw": lambda: optim.adamw(optim.cosine(1e-2, 9), weight_decay=0.1),
    "muon": lambda: optim.muon(1e-2, rest=optim.adamw(1e-3, weight_decay=0.1)),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-2)),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


def nested(seed, dtype=torch.float32):
    """A dict of a list, a tuple and a scalar."""
    flat = random_tree(seed, SHAPES, dtype=dtype)
    return {
        "blocks": [{"w": flat["blocks.0.w"], "b": flat["blocks.0.b"]}],
        "head": (flat["head"],),
        "gain": flat["gain"],
    }


def squares(params, batch):
    """Sum of squares about the batch."""
    return sum(((leaf - batch) ** 2).sum() for leaf in tree.flatten(params).values()), None


def alike(*trees):
    """One structure, its shapes and its dtypes; a step count is a leaf that is not an array."""
    trees = [jax.tree_util.tree_map(lambda x: x if isinstance(x, torch.Tensor) else np.asarray(x), t) for t in trees]
    chex.assert_trees_all_equal_structs(*trees)
    chex.assert_trees_all_equal_shapes(*trees)
    chex.assert_trees_all_equal_dtypes(*trees)


def numbers(params):
    """float32 arrays: chex cannot compare bfloat16 tensors."""
    return jax.tree_util.tree_map(lambda leaf: leaf.detach().float().numpy(), params)


@each_optimizer
@each_dtype
@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_keeps_params_and_state(optimizer, dtype, donate):
    params, grads = nested(1, dtype), nested(2, dtype)
    pure, options = OPTIMIZERS[optimizer](), {"donate": donate} if optimizer != "chain" else {}
    state = first = pure.init(params)
    start = tree.clone(params)
    for _ in range(3):
        now, state = pure.update(grads, state, params, **options)
        alike(start, now)
        alike(first, state)
        params = now
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(numbers(start), numbers(params))


@pytest.mark.parametrize(
    ("name", "hyper", "optimizer"),
    [  # each run with one optimizer in turn, the others are slow
        pytest.param(*run.values, name, id=f"{run.id} {name}", marks=[pytest.mark.slow] * ((i + j) % 4 > 0))
        for i, run in enumerate(RUNS)
        for j, name in enumerate(OPTIMIZERS)
    ],
)
def test_a_method_keeps_its_state(name, hyper, optimizer):
    build = importlib.import_module(f"smat_fn.mat.{name}").build
    method = build(squares, OPTIMIZERS[optimizer](), nested(0), **hyper)
    params = nested(1)
    state = first = method.init(params)
    for step in range(4):
        state, info = method.update(KEY, state, torch.tensor(0.1 * step))
        alike(first, state)
        alike(params, state.params)
        chex.assert_shape([info.loss, info.grad_norm], ())
    chex.assert_trees_all_equal(numbers(params), numbers(nested(1)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float64))],
    ids=str,
)
def test_a_merged_model_is_a_tree_like_base_and_experts(name, dtype):
    base, experts = nested(0, dtype), {str(i): nested(i, dtype) for i in (1, 2, 3)}
    alike(base, ALL[name](base, experts, KEY), *experts.values())


@pytest.mark.parametrize("name", sorted(set(ALL) - NO_BASE))
def test_merging_base_with_itself_changes_nothing(name):
    base = nested(0)
    merged = ALL[name](base, {str(i): tree.clone(base) for i in (1, 2, 3)}, KEY)
    chex.assert_trees_all_close(numbers(merged), numbers(base), rtol=1e-6)


def test_a_task_vector_is_a_tree_like_base():
    base, expert = nested(0), nested(1)
    vector = merge.task_vector(expert, base)
    alike(base, vector)
    added = jax.tree_util.tree_map(torch.add, base, vector)
    chex.assert_trees_all_close(numbers(added), numbers(expert), rtol=1e-6, atol=1e-6)
