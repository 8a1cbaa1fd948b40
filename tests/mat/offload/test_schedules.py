"""Offload modes over steps: when copies run, odd schedules, exceptions and resumes."""

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss, optim, random
from smat_fn.grad import reparametrised, with_master_weights
from smat_fn.mat import smat
from smat_fn.parallel import replicated
from smat_fn.testing import assert_trees_equal

KEY = random.key(2**33 + 5)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.05}
OFFLOADS = ["cpu", "recompute", "stream"]
each_mode = pytest.mark.parametrize("offload", OFFLOADS)


class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("burst in backward")


class Network(nn.Module):
    """Embedding and tied head, two blocks, a frozen scale; bursts when a batch says so."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, tokens, burst):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            if burst == "forward":
                raise RuntimeError("burst in forward")
        if burst == "backward":
            x = Burst.apply(x)
        return self.head(x) * self.scale


def loss(module, batch):
    tokens, burst = batch
    return nn.functional.cross_entropy(module(tokens, burst).view(-1, 11), tokens.view(-1)), burst


@pytest.fixture
def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Network()


def batches(count):
    return [(row, None) for row in torch.randint(11, (count, 7), generator=torch.Generator().manual_seed(3))]


def trees(module):
    base = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(4)
    return {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in base.items()}, base


def build(module, offload, **options):
    _, base = trees(module)
    return smat.build(
        ModuleLoss(module, loss), optim.adam(0.01), base, where=lambda path, leaf: "blocks" in path, offload=offload,
        engine="autograd", **{**STRENGTHS, **options},
    )  # fmt: skip


def train(method, state, data):
    infos = []
    for batch in data:
        state, info = method.update(KEY, state, batch)
        infos.append(info)
    return state, infos


def assert_same(one, other):
    (state, infos), (expected, others) = one, other
    assert_trees_equal(state.params, expected.params)
    assert_trees_equal(list(state.opt_state[1:]), list(expected.opt_state[1:]))
    for mine, theirs in zip(infos, others, strict=True):
        assert_trees_equal([mine.loss, mine.grad_norm, mine.scale], [theirs.loss, theirs.grad_norm, theirs.scale])
        assert mine.simulated == theirs.simulated


@pytest.mark.parametrize("first", [*(pytest.param(first, marks=pytest.mark.slow) for first in (0, 1, 2)), 3])
@pytest.mark.parametrize(
    "options",
    [{"period": 1}, pytest.param({"period": 2}, marks=pytest.mark.slow), {"period": 4}, {"lam": 0.3}],
    ids=str,
)
@each_mode
def test_any_schedule_from_any_step_ending_on_any_step(runtime, network, offload, options, first):
    params, _ = trees(network)
    runs = []
    for kind in (None, offload):
        method = build(network, kind, donate=kind is not None, **options)
        runs.append(train(method, method.init(params)._replace(step=first), batches(5)))
    assert_same(*runs)


@pytest.mark.parametrize("steps", [4, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (5, 6)), 7])
@each_mode
def test_resuming_within_a_period_with_a_new_method(runtime, network, offload, steps):
    params, _ = trees(network)
    data = batches(9)
    method = build(network, offload)
    straight = train(method, method.init(params), data)
    state, before = train(build(network, offload), method.init(params), data[:steps])
    state, after = train(build(network, offload), state, data[steps:])
    assert_same((state, before + after), straight)


@pytest.mark.parametrize(
    ("failing", "burst"),
    [
        *((0, "forward"), (3, "backward")),
        *(pytest.param(step, "forward", marks=pytest.mark.slow) for step in (2, 3, 4, 7)),
        *(pytest.param(step, "backward", marks=pytest.mark.slow) for step in (0, 2, 4, 7)),
    ],
)
@each_mode
def test_after_an_exception_the_step_taken_again_is_right(runtime, network, offload, failing, burst):
    params, _ = trees(network)
    own = {name: (p, p.detach().clone(), p.requires_grad) for name, p in network.named_parameters()}
    data = batches(8)
    expected = train(build(network, None), build(network, None).init(params), data)
    method = build(network, offload)
    state, before = train(method, method.init(params), data[:failing])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"burst in {burst}"):
            method.update(KEY, state, (data[failing][0], burst))
        for name, p in network.named_parameters():
            assert p is own[name][0]
            assert torch.equal(p, own[name][1])
            assert (p.requires_grad, p.grad) == (own[name][2], None)
        assert network.head.weight is network.embed.weight
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    state, after = train(method, state, data[failing:])
    assert_same((state, before + after), expected)


def test_buffer_is_filled_a_slice_a_clean_step(runtime, network):
    params, base = trees(network)
    total = sum(leaf.nbytes for leaf in base.values())
    method = build(network, "cpu", period=4)
    state = method.init(params)
    assert runtime.pinned == 0  # nothing is placed before a device is known
    for period in range(3):
        for step in range(4):
            copied = len(runtime.copies)
            state, _ = method.update(KEY, state, batches(1)[0])
            assert len(runtime.copies) - copied == (step < 3)  # none left for the simulated step
            assert len(runtime.joins) == period + (step == 3)  # which alone waits, once
        slices = runtime.copies[3 * period :]
        assert sum(slices) == total
        assert max(slices) - min(slices) <= 8
    assert runtime.pinned == runtime.alive == runtime.peak == total


def test_a_streamed_base_is_copied_twice_a_simulated_step(runtime, network):
    params, base = trees(network)
    size = {name: leaf.nbytes for name, leaf in base.items()}
    block = size["blocks.0.weight"] + size["blocks.0.bias"]
    forward = 2 * size["embed.weight"] + 2 * block
    # the head, last in forward, is first in backward; the embedding's gradient needs its indices alone
    backward = 2 * block
    method = build(network, "stream", period=2)
    state = method.init(params)
    for step in range(6):
        copied = len(runtime.copies)
        state, _ = method.update(KEY, state, batches(1)[0])
        assert sum(runtime.copies[copied:]) == (forward + backward if step % 2 else 0)
        assert runtime.alive == 0
        # embedding, blocks, head, and back: from the second simulated step on the next one is under way
        assert runtime.ahead[-6:] == ([] if step == 0 else [0] * 6 if step < 3 else [1] * 5 + [0])
        assert runtime.peak <= 2 * max(block, size["embed.weight"])  # the one in use and one ahead
    assert runtime.pinned == sum(size.values())


def test_a_base_on_the_device_is_not_copied(runtime, network):
    params, _ = trees(network)
    method = build(network, "recompute", period=1)
    train(method, method.init(params), batches(3))
    assert (runtime.pinned, runtime.copies, runtime.alive) == (0, [], 0)


@pytest.mark.parametrize("offload", ["cpu", "stream"])
def test_the_callers_base_is_let_go(runtime, network, offload):
    import gc
    import weakref

    params, base = trees(network)
    gone = [weakref.ref(leaf) for leaf in base.values()]
    method = smat.build(ModuleLoss(network, loss), optim.adam(0.01), base, offload=offload, period=1, **STRENGTHS)
    state = method.init(params)
    del base
    train(method, state, batches(1))
    gc.collect()
    assert not any(leaf() is not None for leaf in gone)


def test_a_base_of_another_dtype(runtime, network):
    _, base = trees(network)
    base = {name: leaf.bfloat16() for name, leaf in base.items()}
    params, _ = trees(network)
    runs = []
    for offload in (None, *OFFLOADS):
        method = smat.build(ModuleLoss(network, loss), optim.adam(0.01), base, offload=offload, period=2, **STRENGTHS)
        runs.append(train(method, method.init(params), batches(4)))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_bad_offload_modes_are_named(network):
    _, base = trees(network)
    for offload, loss_fn, options, text in [
        ("disk", ModuleLoss(network, loss), {}, "offload is 'disk', choose cpu, recompute, stream, or None"),
        ("recompute", lambda p, b: (p, b), {}, "offload 'recompute' rebuilds the weights of modules: give a smat_fn"),
        ("recompute", reparametrised(ModuleLoss(network, loss), lambda p: p), {}, "or take offload 'cpu' for adapters"),
        (
            "stream",
            with_master_weights(replicated(ModuleLoss(network, loss))),
            {},
            "offload 'stream' rebuilds the weights",
        ),
        ("stream", ModuleLoss(network, loss), {"engine": "func"}, "offload 'stream' needs engine 'autograd', not"),
    ]:
        with pytest.raises(ValueError, match=text):
            smat.build(loss_fn, optim.adam(0.01), base, offload=offload, **options)


@each_mode
def test_init_still_checks_the_base(runtime, network, offload):
    params, _ = trees(network)
    del params["blocks.1.bias"]
    with pytest.raises(ValueError, match=r"params lacks parameter 'blocks\.1\.bias' of base"):
        build(network, offload).init(params)


@each_mode
def test_params_that_are_not_the_modules(runtime, network, offload):
    params, base = ({**tree, "extra": torch.ones(2)} for tree in trees(network))
    method = smat.build(ModuleLoss(network, loss), optim.adam(0.01), base, offload=offload, period=1, **STRENGTHS)
    with pytest.raises(ValueError, match="leaf 'extra' is not a parameter of the module"):
        method.update(KEY, method.init(params), batches(1)[0])
