"""Calls of torch around forward and backward: as many for 146 leaves as for 11, and few.

A custom operation, a foreach operation and a fused optimizer are one call each: what a device gets to do. The kernels'
way is counted without a device: its launches are recorded and not made, and calls inside custom operations count too.
"""

import collections

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import grad, optim, random, tree
from smat_fn.mat import asam, finetune, l2sp, smat
from smat_fn.ops import launch, library
from smat_fn.optim.averaging import averaged, ema
from smat_fn.types import Micro

from ..parallel.devices import FIRST, SECOND, Placed, Places

BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
BLOCK = (*BLOCK, "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


class Calls(TorchDispatchMode):
    """Calls by name; with ``inside`` those that a custom operation makes instead of its own."""

    def __init__(self, *, inside=False):
        super().__init__()
        self.inside, self.found = inside, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.inside and func.namespace == "smat_fn":
            with self:
                return OPDEFS[func.name()]._init_fn(*args, **(kwargs or {}))
        self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


def llama(layers):
    """A tree with the leaves of a Llama, 146 for 16 layers, of 256 blocks of 4,096 coordinates together."""
    names = ["model.norm", *(f"model.layers.{i}.{name}" for i in range(layers) for name in BLOCK)]
    sizes = {"model.embed_tokens": 4096 * (256 - len(names)), **dict.fromkeys(names, 64)}
    return {f"{name}.weight": torch.full((size,), 0.5, dtype=torch.bfloat16) for name, size in sizes.items()}


def loss(params, batch):
    return torch.stack([leaf.float().sum() for leaf in params.values()]).square().sum() * batch, {}


HALVINGS = 19 - 8  # a Llama of 1B has 2 ** 19 blocks: a call more for each doubling, to add them in the order defined
TWO = FIRST, SECOND
METHODS = {
    "smat": (smat, {"period": 1, "where": lambda path, leaf: "proj" in path}, 1),
    "smat clean": (smat, {"period": 10**6}, 1),
    "finetune": (finetune, {}, 1),
    "asam": (asam, {}, 2),
}


BY_GROUPS = {
    "mixed": (smat, {"lam": 0.5}, 2),
    "of update": (smat, {"period": 1, "sigma_of": "update"}, 1),
    "l2sp": (l2sp, {}, 1),
    "averaged": (finetune, {}, 1),
}

LAUNCHES = {"smat": 3, "smat clean": 2, "finetune": 2, "asam": 4}


def around(name, layers, *, inside, mixed=False, weights=()):
    """Calls of one update less those of its passes alone. Args: weights: of micro-batches, without any one batch."""
    method, options, passes = (METHODS | BY_GROUPS)[name]
    base, one, key = llama(layers), torch.ones(()), random.key(0)
    batch = [Micro(one, weight) for weight in weights] or one
    if mixed:
        base["model.norm.weight"] = base["model.norm.weight"].double()
    optimizer = optim.adamw(1e-3, weight_decay=0.1, fused=True)
    optimizer = averaged(optimizer, ema(0.9)) if name == "averaged" else optimizer
    updates = method.build(loss, optimizer, base, max_grad_norm=0.1, donate=True, **options)
    state, _ = updates.update(key, updates.init(base), batch)
    with Calls() as own:
        grad.value_and_grad(loss, engine="autograd")(base, one)
    with Calls(inside=inside) as calls:
        updates.update(key, state, batch)
    for _ in range(passes * max(1, len(weights))):
        calls.found -= own.found
    return calls.found


@pytest.mark.parametrize("name", METHODS)
def test_a_step_makes_below_sixty_calls_whatever_the_number_of_leaves(name):
    few, many = around(name, 1, inside=False), around(name, 16, inside=False)
    assert few == many
    assert many.total() + HALVINGS < 60


@pytest.mark.parametrize("name", BY_GROUPS)
def test_arithmetic_on_groups_makes_below_a_hundred_calls_whatever_the_number_of_leaves(name):
    few, many = around(name, 1, inside=False), around(name, 16, inside=False)
    for found in (few, many):
        del found["aten::empty_like"]  # memory of wide copies and states, which nothing is launched for
    assert few == many
    assert many.total() + HALVINGS < 100


def test_micro_batches_add_five_calls_each_whatever_the_number_of_leaves():
    weights = 1.0, 2.0, 3.0
    few, many = (around("smat", layers, inside=False, weights=weights) for layers in (1, 16))
    for found in (few, many):
        del found["aten::empty_like"]  # memory of sums, one a leaf, which nothing is launched for
    assert few == many
    assert many.total() + HALVINGS < 60 + 5 * len(weights)


def on_two(params, batch):
    return sum(loss({p: leaf for p, leaf in params.items() if leaf.device == d}, 1.0)[0].cpu() for d in TWO) * batch, {}


def around_on_two(name, layers):
    """As `around`, the tree spread over two devices."""
    method, options, _ = METHODS[name]
    batch, key = torch.ones(()), random.key(0)
    with Places():
        base = {p: Placed(leaf, TWO["mlp" in p or "norm" in p]) for p, leaf in llama(layers).items()}
        optimizer = optim.adamw(1e-3, weight_decay=0.1, fused=True)
        updates = method.build(on_two, optimizer, base, max_grad_norm=0.1, donate=True, **options)
        state, _ = updates.update(key, updates.init(base), batch)
        with Calls() as own:
            grad.value_and_grad(on_two, engine="autograd")(base, batch)
        with Calls() as calls:
            updates.update(key, state, batch)
    return calls.found - own.found


@pytest.mark.parametrize(
    "name", ["smat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("smat clean", "finetune"))]
)
def test_a_device_map_asks_for_below_sixty_calls_a_device(name, monkeypatch):
    monkeypatch.setattr(tree, "PLAIN", (*tree.PLAIN, Placed))  # as real devices' tensors
    few, many = around_on_two(name, 1), around_on_two(name, 16)
    assert few == many
    assert many.total() + HALVINGS < 60 * len(TWO)
    assert many.total() > around(name, 16, inside=False).total()  # both devices are counted


@pytest.fixture
def recorded(monkeypatch):
    """Launches by kernel, recorded and not made."""
    launches = collections.Counter()
    monkeypatch.setattr(launch, "_launch", lambda kernel, *_, **__: launches.update([kernel.__name__]))
    with library.forced():
        yield launches


@pytest.mark.parametrize("name", METHODS)
def test_so_does_the_kernels_way_with_all_that_surrounds_its_launches(name, recorded):
    few, many = around(name, 1, inside=True), around(name, 16, inside=True)
    for found in (few, many):
        del found["aten::empty_like"]  # memory of states, one a leaf, which nothing is launched for
    assert few == many
    assert many.total() + HALVINGS < 100  # a third are on a few numbers of the draw
    assert recorded.total() == 4 * LAUNCHES[name]  # of four updates


def test_a_float64_leaf_takes_no_other_one_from_the_kernels(recorded):
    around("smat", 16, inside=False, mixed=True)
    assert recorded["simulate_kernel"] == 2


def test_a_norm_is_one_launch_and_as_many_calls_for_many_leaves_as_for_two(recorded):
    found = []
    for leaves in (2, 146):
        whole = [torch.zeros(8192 * 73 // leaves) for _ in range(leaves)]
        with Calls(inside=True) as calls:
            tree.global_norm(whole)
        found.append(calls.found)
    assert recorded == {"reweight_kernel": 2}
    assert found[0] == found[1]
    assert found[0].total() < 50
