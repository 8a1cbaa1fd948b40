"""Whole models: the offload modes are naive training, bit for bit; checkpointing and compilation change nothing."""

import functools

import pytest
import torch

from smat_fn import ModuleLoss, optim, random, tree, value_and_grad
from smat_fn.mat import smat
from smat_fn.testing import assert_trees_close, assert_trees_equal
from smat_fn.types import Micro

OFFLOADS = [None, "cpu", "recompute", "stream"]
FAST = {("llama tied", offload) for offload in OFFLOADS} | {("vit", "recompute"), ("vit", "stream")}
ROWS = [
    pytest.param(family, offload, marks=[pytest.mark.slow] * ((family, offload) not in FAST))
    for family in ("llama tied", "vit", "gpt2 tied", "clip", "llama", "gpt2")
    for offload in OFFLOADS
]
KEY = random.key(2**40 + 11)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.02}


def train(case, batches, *, offload, period=4, loss=None, **options):
    method = smat.build(
        loss or case.module_loss(), optim.adam(3e-3), case.base, where=case.where, period=period, offload=offload,
        **{**STRENGTHS, **options},
    )  # fmt: skip
    state, infos = method.init(case.params), []
    for batch in batches:
        state, info = method.update(KEY, state, batch)
        infos.append(info)
    return state, infos


@pytest.fixture(scope="module")
def reference(literal):
    @functools.cache
    def run(make, family):
        return literal(make(family), 12, 4)

    return run


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "checkpointed"])
@pytest.mark.parametrize(("family", "offload"), ROWS, ids=str)
def test_naive_training_bit_for_bit(case, reference, checkpoint, family, offload, checkpointing):
    model = case(family)
    own = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    if checkpointing:
        checkpoint(model.module)
    params, losses, norms = reference(case, family)
    steps = 9 if checkpointing else 12
    state, infos = train(model, model.batches(12)[:steps], offload=offload, donate=True)
    assert_trees_equal([info.loss for info in infos], losses[:steps])
    assert_trees_equal([info.grad_norm for info in infos], norms[:steps])
    if not checkpointing:
        assert_trees_equal(state.params, params)
    assert_trees_equal(dict(model.module.named_parameters()), own)


def assert_same(runs):
    (state, infos), *others = runs
    for other, theirs in others:
        assert_trees_equal(other.params, state.params)
        for info, expected in zip(theirs, infos, strict=True):
            assert_trees_equal([info.loss, info.grad_norm, info.aux], [expected.loss, expected.grad_norm, expected.aux])


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    ("options", "dtype", "family"),
    [
        pytest.param(*row, family, id=f"{name} {family}", marks=[pytest.mark.slow] * (family not in fast))
        for name, row, fast in (
            ("accumulation", ({"micro": 3}, torch.float32), ("llama tied",)),
            ("mixed", ({"lam": 0.3}, torch.float32), ("llama tied",)),
            (
                "bf16",
                ({"micro": 2, "period": 1, "noise": "gaussian", "max_grad_norm": 0.1}, torch.bfloat16),
                ("vit",),
            ),
        )
        for family in ("llama tied", "gpt2 tied", "vit")
    ],
)
def test_offload_modes_equal_each_other(case, checkpoint, family, options, dtype, checkpointing):
    model, options = case(family, dtype), dict(options)
    if checkpointing:
        checkpoint(model.module)
    batches, micro = model.batches(6), options.pop("micro", 1)
    if micro > 1:
        batches = [[Micro(one) for one in batches[i : i + micro]] for i in range(0, 6, micro)]
    options["period"] = options.get("period", 2)
    assert_same([train(model, batches, offload=offload, **options) for offload in OFFLOADS])


def test_buffer_serves_the_functional_engine(case):
    model = case("llama tied")
    assert_same(
        [train(model, model.batches(4), offload=r, period=2, engine="func") for r in (None, "cpu")],
    )


# of torch's own tracing of hooks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "offload",
    [None, "cpu", pytest.param("recompute", marks=pytest.mark.slow), pytest.param("stream", marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_compiled_loss_is_the_loss_within_rounding(case, offload):
    model = case("llama tied")
    compiled = ModuleLoss(model.module, torch.compile(model.loss, backend="aot_eager"))
    batches = model.batches(4)
    _, infos = train(model, batches, offload=offload, period=2)
    _, theirs = train(model, batches, offload=offload, period=2, loss=compiled)
    assert_trees_close([i.loss for i in theirs], [i.loss for i in infos], rtol=1e-5)
    assert_trees_close([i.grad_norm for i in theirs], [i.grad_norm for i in infos], rtol=1e-4)


@pytest.mark.slow
def test_compiled_gradient_is_the_gradient_within_rounding(case):
    model = case("llama tied")
    gradient = value_and_grad(model.module_loss(), engine="func")
    batch = model.batches(1)[0]
    (loss, _), grads = gradient(model.params, batch)
    (compiled, _), theirs = torch.compile(gradient, backend="aot_eager")(model.params, batch)
    assert_trees_close(compiled, loss, rtol=1e-5)
    for path, g in tree.flatten(grads).items():
        assert_trees_close(theirs[path], g, atol=1e-4 * g.abs().max().item())
