"""On a CUDA device: the copies are waited for, memory is what is promised, the host does not wait."""

import gc

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss, optim, random
from smat_fn.mat import smat
from smat_fn.mat.offload.storage import HELD, BaseBuffer, StreamedBase
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
OFFLOADS = [None, "cpu", "recompute", "stream"]
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.02}
BUSY = 20_000_000  # cycles, about 10 ms
MIB = 1 << 20


def big(count=8):
    return random_tree(1, {f"w{i}": (4 * MIB,) for i in range(count)})


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_the_buffer_waits_for_its_last_use_and_is_waited_for():
    base = big()
    buffer = BaseBuffer(base, dict.fromkeys(base, torch.zeros(1, device="cuda")), slices=3)
    for _ in range(3):
        for _ in range(3):
            torch.cuda._sleep(BUSY)
            buffer.prefetch()
        taken = buffer.take()
        seen = {path: leaf.clone() for path, leaf in taken.items()}
        torch.cuda._sleep(BUSY)
        for leaf in taken.values():
            leaf.fill_(float("nan"))  # after the sleep: a copy that did not wait would come before
        assert_trees_equal({path: leaf.cpu() for path, leaf in seen.items()}, base)


@pytest.mark.parametrize("busy", [False, True])
def test_streamed_leaves_are_right_and_few(busy):
    base = big()
    ahead, source = 2, StreamedBase(base, dict.fromkeys(base, torch.zeros(1, device="cuda")), ahead=2)
    order = [(path,) for path in base]
    order += order[::-1]
    before = allocated()
    for turn in range(3):
        sums = []
        torch.cuda.reset_peak_memory_stats()
        for group in order:
            (leaf,) = source.get(group)
            if busy:
                torch.cuda._sleep(BUSY // 10)
            sums.append(leaf.sum())
            del leaf
        source.rewind()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 16 * MIB * (1 + HELD + (ahead if turn else 0)) + MIB  # no order is known in the first turn
        for (path,), total in zip(order, sums, strict=True):
            assert torch.equal(total, base[path].cuda().sum())
    assert allocated() - before <= 16 * MIB * HELD + MIB


@pytest.mark.parametrize("family", ["llama tied", "gpt2 tied", "vit", "clip"])
def test_offload_modes_agree(case, family):
    model, runs = case(family), []
    model.module.eval().cuda()
    for offload in OFFLOADS:
        method = smat.build(
            model.module_loss(), optim.adam(3e-3), model.base, where=model.where, period=2, offload=offload,
            engine="autograd", **STRENGTHS,
        )  # fmt: skip
        if offload is None:
            on_device = {path: leaf.cuda() for path, leaf in model.base.items()}
            method = smat.build(
                model.module_loss(), optim.adam(3e-3), on_device, where=model.where, period=2, **STRENGTHS
            )
        state = method.init({path: leaf.cuda() for path, leaf in model.base.items()})
        losses = []
        for batch in model.batches(6):
            state, info = method.update(random.key(5).cuda(), state, batch.cuda())
            losses.append(info.loss)
        runs.append(losses)
    for losses in runs[1:]:
        # noise of the strength above moves a loss by far more
        assert_trees_close(losses, runs[0], rtol=1e-5)


def network(depth=6, width=2048):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def squares(module, batch):
    return module(batch).pow(2).sum(), None


def warm_up(module, batch):
    """cuBLAS takes its workspaces, tens of MiB for each thread, and keeps them."""
    squares(module, batch)[0].backward()
    module.zero_grad()


@pytest.mark.parametrize(("offload", "copies"), [("recompute", 1.0), ("stream", 0.0)])
def test_memory_of_a_simulated_step(offload, copies):
    module, batch = network(), torch.ones(2, 2048, device="cuda")
    params = {name: p.detach() for name, p in module.named_parameters()}
    base = {name: p.cpu() for name, p in params.items()}
    size = sum(p.nbytes for p in params.values())
    layer = size / 6
    warm_up(module, batch)
    before = allocated()
    method = smat.build(ModuleLoss(module, squares), optim.adam(1e-3), base, offload=offload, period=1, **STRENGTHS)
    state = method.init(params)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        state, _ = method.update(random.key(5).cuda(), state, batch)
    peak = torch.cuda.max_memory_allocated() - before
    # new params, two moments and their successors, gradients and what reweighting makes of them; a few layers
    assert peak <= (copies + 3 + 3 + 2) * size + 5 * layer


# the key of dropout is read on the host, as that of the scripts is there
@pytest.mark.parametrize(("place", "training"), [("cuda", False), ("cpu", True)])
@pytest.mark.parametrize("offload", [None, "cpu", "recompute", "stream"])
def test_the_host_does_not_wait(offload, place, training):
    module, batch = network(3, 64).train(training), torch.ones(2, 64, device="cuda")
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    method = smat.build(
        ModuleLoss(module, squares), optim.adam(1e-3, fused=False, foreach=True), params, offload=offload, period=2,
        max_grad_norm=1.0, noise="gaussian", **STRENGTHS,
    )  # fmt: skip
    key, state = random.key(5).to(place), method.init(params)
    for _ in range(4):
        state, _ = method.update(key, state, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            state, _ = method.update(key, state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
