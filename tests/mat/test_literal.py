"""The paper's step, literally, is what every fast path computes: bit for bit, over several steps of a schedule."""

import copy
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import smat_fn
from smat_fn import ModuleLoss, lora, optim, random
from smat_fn.grad import with_master_weights
from smat_fn.lora import Lora
from smat_fn.mat import smat
from smat_fn.testing import assert_trees_equal
from smat_fn.types import Micro
from smat_fn.where import block_linear

HYPER = {"alpha_min": 0.1, "drop_prob": 0.3, "sigma": 0.02, "noise": "uniform"}
STEPS, PERIOD = 9, 3


@pytest.fixture
def network():
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.4
    return module


@pytest.fixture
def loss(network):
    return ModuleLoss(network, lambda module, batch: (module(batch[0].to(next(module.parameters()).dtype)).float().sub(batch[1]).square().mean(), {}))  # fmt: skip  # noqa: E501


def trees(network, dtype=torch.float32):
    base = {name: p.detach().to(dtype) for name, p in network.named_parameters()}
    start = {name: leaf + 0.05 * torch.ones_like(leaf) for name, leaf in base.items()}
    return base, start


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)) for _ in range(STEPS)]


def run(update, state, key=None):
    infos, key = [], random.key(7) if key is None else key
    for batch in batches():
        state, info = update(key, state, batch)
        infos.append(info)
    return state, infos


def literal(loss_fn, base, start, optimizer, where, max_grad_norm=0.5):
    state = smat.build(loss_fn, optimizer, base).init(start)
    options = {"loss_fn": loss_fn, "optimizer": optimizer, "base": base, "where": where, "period": PERIOD, **HYPER}
    return run(lambda *args: smat.literal_step(*args, max_grad_norm=max_grad_norm, **options), state)


def assert_same(found, expected):
    (state, infos), (wanted, others) = found, expected
    assert_trees_equal(state.params, wanted.params)
    assert_trees_equal({"mu": state.opt_state.mu, "nu": state.opt_state.nu}, {"mu": wanted.opt_state.mu, "nu": wanted.opt_state.nu})  # fmt: skip  # noqa: E501
    assert [i.simulated for i in infos] == [i.simulated for i in others] == [s % PERIOD == PERIOD - 1 for s in range(STEPS)]  # fmt: skip  # noqa: E501
    for a, b in zip(infos, others, strict=True):
        assert (a.loss.item(), a.grad_norm.item(), a.scale.item()) == (b.loss.item(), b.grad_norm.item(), b.scale.item())  # fmt: skip  # noqa: E501


DTYPES = torch.bfloat16, torch.float64, torch.float32
MODES = None, "cpu", "recompute", "stream"
# fast: two dtypes and both values of donate in each mode, with and without a clip
RUNS = [
    pytest.param(
        dtype, mode, donate, bound, id=f"{dtype}-{mode}-{donate}-{bound}",
        marks=[pytest.mark.slow] * (i != (j + donate) % 2 or donate != (bound is not None)),
    )
    for (i, dtype), (j, mode), donate, bound in product(enumerate(DTYPES), enumerate(MODES), (False, True), (None, 0.5))
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "offload", "donate", "max_grad_norm"), RUNS)
def test_every_offload_mode_is_the_literal_step(network, loss, dtype, offload, donate, max_grad_norm):
    module = network.to(dtype)
    base, start = trees(module, dtype)
    loss, where, optimizer = ModuleLoss(module, loss.loss), block_linear(module), optim.adamw(1e-2, weight_decay=0.1)
    method = smat.build(
        loss, optimizer, base, where=where, max_grad_norm=max_grad_norm, period=PERIOD, offload=offload, donate=donate,
        **HYPER,
    )  # fmt: skip
    expected = literal(loss, base, start, optimizer, where, max_grad_norm)
    assert_same(run(method.update, method.init(start)), expected)


@pytest.mark.parametrize("offload", [None, "cpu", "recompute", "stream"])
def test_master_weights_are_the_literal_step(network, loss, offload):
    module = copy.deepcopy(network).bfloat16()
    base, start = trees(network)
    inner = with_master_weights(ModuleLoss(module, loss.loss))
    where, optimizer = block_linear(module), optim.adam(1e-2)
    method = smat.build(inner, optimizer, base, where=where, max_grad_norm=0.5, period=PERIOD, offload=offload, **HYPER)
    assert_same(run(method.update, method.init(start)), literal(inner, base, start, optimizer, where))


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_both_engines_are_the_literal_step(network, loss, engine):
    base, start = trees(network)
    where, optimizer = block_linear(network), optim.adam(1e-2)
    method = smat.build(loss, optimizer, base, where=where, max_grad_norm=0.5, period=PERIOD, engine=engine, **HYPER)
    state = method.init(start)
    options = {"loss_fn": loss, "optimizer": optimizer, "base": base, "where": where, "engine": engine, **HYPER}
    expected = run(lambda *args: smat.literal_step(*args, max_grad_norm=0.5, period=PERIOD, **options), state)
    assert_same(run(method.update, state), expected)


def test_with_everything_off_no_step_is_simulated(network, loss):
    base, start = trees(network)
    optimizer, off = optim.adam(1e-2), {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}
    options = {"loss_fn": loss, "optimizer": optimizer, "base": base, "max_grad_norm": 0.5, "period": 1, **off}
    method = smat.build(max_grad_norm=0.5, period=1, loss_fn=loss, optimizer=optimizer, base=base, **off)
    found, state = run(method.update, method.init(start)), method.init(start)
    expected = run(lambda *args: smat.literal_step(*args, **options), state)
    assert_trees_equal(found[0].params, expected[0].params)
    assert (
        [(i.simulated, i.scale) for i in found[1]] == [(i.simulated, i.scale) for i in expected[1]] == [(False, 1)] * 9
    )


def test_a_clean_literal_step_checks_its_arguments_too(network, loss):
    base, start = trees(network)
    optimizer = optim.adam(1e-2)
    step = partial(
        smat.literal_step, random.key(7), smat.build(loss, optimizer, base).init(start), batches()[0],
        loss_fn=loss, optimizer=optimizer, base=base,
    )  # fmt: skip
    with pytest.raises(TypeError, match="unexpected keyword argument 'sgima'"):
        step(**HYPER, sgima=1.0)
    with pytest.raises(ValueError, match=r"sigma is -1.0.*; period is 0, must be an integer of at least 1"):
        step(**HYPER | {"sigma": -1.0}, period=0)
    with pytest.raises(ValueError, match="period is 0, must be an integer of at least 1"):
        smat.is_simulated(3, 0)


def test_a_list_of_one_micro_batch_is_the_literal_step(network, loss):
    base, start = trees(network)
    where, optimizer = block_linear(network), optim.adam(1e-2)
    method = smat.build(loss, optimizer, base, where=where, max_grad_norm=0.5, period=PERIOD, **HYPER)
    found = run(lambda key, state, batch: method.update(key, state, [Micro(batch, 3.0)]), method.init(start))
    assert_same(found, literal(loss, base, start, optimizer, where))


def test_adapters_are_the_literal_step_of_the_loss_at_the_merged_weight(network, loss):
    base, _ = trees(network)
    adapters = Lora(tuple(name for name in base if name.endswith("weight")), rank=2, alpha=4.0)
    where, optimizer = block_linear(network), optim.adam(1e-2)
    method = lora.build(loss, optimizer, base, adapters, where=where, max_grad_norm=0.5, period=PERIOD, **HYPER)
    start = lora.init(random.key(3), base, adapters)
    state, key, other = method.init(start), random.key(7), method.init(start)
    for step, batch in enumerate(batches()):
        state, info = method.update(key, state, batch)
        drawn = None
        if smat.is_simulated(step, PERIOD):
            drawn = smat_fn.draw(random.fold_in(key, step), **HYPER)
        merged = lora.with_lora(loss, base, adapters, drawn=drawn, where=where)
        (value, _), grads = smat_fn.value_and_grad(merged, engine="autograd")(other.params, batch)
        grads, norm = optim.clip(grads, 0.5)
        params, opt_state = optimizer.update(grads, other.opt_state, other.params)
        other = smat.State(params, opt_state, step + 1)
        assert (value.item(), norm.item()) == (info.loss.item(), info.grad_norm.item())
    assert_trees_equal(state.params, other.params)


def test_one_update_runs_through_twelve_files_at_most():
    base = {"a": torch.randn(4, 8), "b": torch.randn(8)}
    optimizer = optim.adamw(1e-3, weight_decay=0.1)
    method = smat.build(lambda p, x: ((x @ p["a"] @ p["b"]).sum(), {}), optimizer, base, period=1, max_grad_norm=1.0)
    root, seen = Path(smat_fn.__file__).parent, set()
    state, key, batch = method.init(base), random.key(0), torch.randn(4)
    state, _ = method.update(key, state, batch)  # what is loaded on first use is no part of a step

    def look(frame, event, argument):
        if event == "call" and (file := Path(frame.f_code.co_filename)).is_relative_to(root):
            seen.add(str(file.relative_to(root)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        method.update(key, state, batch)
    finally:
        sys.setprofile(before)
    assert "mat/smat.py" in seen
    assert len(seen) <= 12, sorted(seen)
