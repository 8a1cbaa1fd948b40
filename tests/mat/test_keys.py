"""Randomness and buffers of a loss: a function of run key, step and micro-batch; the module is never changed."""

import copy
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smat_fn import ModuleLoss, lora, optim, random, tree, value_and_grad
from smat_fn.grad import reparametrised, takes_key, with_master_weights
from smat_fn.mat import finetune, smat
from smat_fn.mat.smat import literal_step
from smat_fn.testing import assert_trees_equal, random_tree
from smat_fn.types import Micro

from .test_conformance import FEW, RUNS

KEY = random.key(7)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.01}


class Net(nn.Module):
    """Two blocks with dropout, checkpointed or not."""

    def __init__(self, p=0.5, checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(p), nn.Tanh()) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def squares(module, batch):
    out = module(batch.to(next(module.parameters()).dtype))
    return out.square().mean(), out.detach()


def net(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**options)


def trees(module):
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    return base, {name: leaf + 0.1 for name, leaf in base.items()}


def data(count=3):
    return [random_tree(step, {"x": (4, 6)})["x"] for step in range(count)]


def trained(method, start, batches, seed=0):
    torch.manual_seed(seed)  # what nothing depends on
    state, infos = method.init(start), []
    for batch in batches:
        state, info = method.update(KEY, state, batch)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize(
    ("name", "hyper", "engine"),
    [  # each run with one engine in turn, the others are slow
        pytest.param(
            *run.values, engine, id=f"{run.id} {engine}", marks=[*run.marks, *[pytest.mark.slow] * ((i + j) % 2)]
        )
        for i, run in enumerate(FEW)
        for j, engine in enumerate(["func", "autograd"])
    ],
)
def test_dropout_is_a_function_of_the_run_key_and_the_step(name, hyper, engine):
    base, start = trees(net())
    build = importlib.import_module(f"smat_fn.mat.{name}").build
    method = build(ModuleLoss(net(), squares), optim.adam(0.1), base, engine=engine, **hyper)
    batches = [*data(2), [Micro(part) for part in data(2)]]
    (state, _), (again, _) = (trained(method, start, batches, seed) for seed in (1, 2))
    assert_trees_equal(state.params, again.params)
    # resumed after the first step
    resumed, _ = method.update(KEY, trained(method, start, batches[:1], 3)[0], batches[1])
    resumed, _ = method.update(KEY, resumed, batches[2])
    assert_trees_equal(resumed.params, state.params)
    other = method.init(start)
    for batch in batches:
        other, _ = method.update(random.key(8), other, batch)
    assert not torch.equal(other.params["layers.0.0.weight"], state.params["layers.0.0.weight"])


def test_the_generator_of_the_user_is_left_as_it_was():
    base, start = trees(net())
    method = smat.build(ModuleLoss(net(), squares), optim.adam(0.1), base, period=1, **STRENGTHS)
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    method.update(KEY, method.init(start), data()[0])
    assert torch.equal(torch.rand(3), want)


def keys_seen(name, hyper, batches):
    """The keys that each call of the loss had, step by step."""
    seen = []

    def loss_fn(params, batch, *, key):
        seen.append(tuple(key.tolist()))
        return sum((leaf * batch.mean()).square().sum() for leaf in params.values()), None

    base, start = (random_tree(seed, {"a": (3, 2), "b": (2,)}) for seed in (0, 1))
    method = importlib.import_module(f"smat_fn.mat.{name}").build(loss_fn, optim.adam(0.1), base, **hyper)
    state, steps = method.init(start), []
    for batch in batches:
        state, _ = method.update(KEY, state, batch)
        steps.append(list(seen))
        seen.clear()
    return steps


@pytest.mark.parametrize(("name", "hyper"), RUNS)
def test_passes_of_a_step_share_a_key_and_micro_batches_and_steps_do_not(name, hyper):
    one, parts, alone = keys_seen(name, hyper, [data(1)[0], [Micro(part) for part in data(2)], [Micro(data(1)[0])]])
    twice = name == "asam" or "lam" in hyper
    passes = [2 if twice or step < hyper.get("calibration", 0) else 1 for step in range(3)]
    assert [len(one), len(parts), len(alone)] == [passes[0], 2 * passes[1], passes[2]]
    assert len(set(one)) == len(set(alone)) == 1
    assert len(set(parts)) == 2
    assert parts[:2] * passes[1] == parts
    assert len({*one, *parts, *alone}) == 4
    want = random.fold_in(random.fold_in(KEY, 0), "loss:0")
    assert one[0] == tuple(want.tolist())


def test_one_batch_and_a_list_of_one_have_the_same_dropout():
    base, start = trees(net())
    method = finetune.build(ModuleLoss(net(), squares), optim.adam(0.1), base)
    (state, (info,)), (other, (listed,)) = (trained(method, start, [b]) for b in (data(1)[0], [Micro(data(1)[0])]))
    assert_trees_equal(state.params, other.params)
    assert torch.equal(info.aux, listed.aux[0])


@pytest.mark.parametrize("offload", ["cpu", "recompute", "stream"])
@pytest.mark.parametrize("masters", [False, True])
def test_offload_modes_draw_the_same(offload, masters):
    results = []
    for own in (None, offload):
        base, start = trees(net())
        loss = ModuleLoss(net(), squares)
        loss = with_master_weights(loss) if masters else loss
        method = smat.build(loss, optim.adam(0.1), base, period=1, offload=own, **STRENGTHS)
        results.append(trained(method, start, data(2))[0].params)
    assert_trees_equal(*results)


def test_the_built_step_is_the_literal_one():
    base, start = trees(net())
    loss, optimizer = ModuleLoss(net(), squares), optim.adam(0.1)
    state = trained(smat.build(loss, optimizer, base, period=2, **STRENGTHS), start, data(2))[0]
    literal = smat.State(start, optimizer.init(start), 0)
    for batch in data(2):
        literal, _ = literal_step(
            KEY, literal, batch, loss_fn=loss, optimizer=optimizer, base=base, period=2, **STRENGTHS
        )
    assert_trees_equal(literal.params, state.params)


def test_checkpointed_layers_drop_the_same_again():
    grads = []
    for checkpointed in (False, True):
        module = net(checkpointed=checkpointed)
        run = value_and_grad(ModuleLoss(module, squares), engine="autograd")
        grads.append(run(trees(module)[1], data(1)[0], key=KEY)[1])
    assert_trees_equal(*grads)


@pytest.mark.parametrize("simulate", ["merged", "factors"])
def test_adapters_train_with_the_models_dropout(simulate):
    module = net()
    base, _ = trees(module)
    loss = ModuleLoss(module, squares)
    adapters = lora.Lora(lora.linear_paths(module)[0], rank=2)
    start = lora.init(random.key(1), base, adapters)
    if simulate == "merged":
        method = lora.build(loss, optim.adam(0.1), base, adapters, period=2, **STRENGTHS)
    else:
        method = smat.build(lora.with_lora(loss, base, adapters), optim.adam(0.1), start, period=2, **STRENGTHS)
    first, again = (trained(method, start, data(3), seed)[0].params for seed in (1, 2))
    assert_trees_equal(first, again)
    module.eval()
    path = "layers.0.0.lora_B.weight"
    assert not torch.equal(trained(method, start, data(3))[0].params[path], first[path])


def test_a_loss_takes_a_key_by_its_signature():
    def plain(params, batch):
        return None

    def keyed(params, batch, *, key):
        return None

    assert not takes_key(plain)
    assert takes_key(keyed)
    assert takes_key(functools.partial(keyed, batch=None))
    assert not takes_key(functools.partial(keyed, key=KEY))
    assert not takes_key(None)
    for wrap in (with_master_weights, lambda loss: reparametrised(loss, lambda params: params)):
        assert takes_key(wrap(keyed))
        assert not takes_key(wrap(plain))


@pytest.mark.parametrize("wrap", ["master", "reparametrised", "module"])
def test_wrapped_losses_pass_their_key_on(wrap):
    seen = []

    def loss_fn(params, batch, key):
        seen.append(tuple(key.tolist()))
        return sum(leaf.sum() for leaf in params.values()) * batch.mean(), None

    start = {"w": torch.ones(2)}
    if wrap == "master":
        loss = with_master_weights(loss_fn)
    elif wrap == "reparametrised":
        loss = reparametrised(loss_fn, lambda params: params)
    else:
        module = nn.Module()
        module.w = nn.Parameter(torch.ones(2))
        loss = ModuleLoss(module.eval(), lambda m, batch, key: loss_fn(dict(m.named_parameters()), batch, key))
    finetune_step = finetune.build(loss, optim.adam(0.1), start)
    finetune_step.update(KEY, finetune_step.init(start), data(1)[0])
    own = random.fold_in(random.fold_in(KEY, 0), "loss:0")
    own = random.fold_in(own, "loss") if wrap == "module" else own
    assert seen == [tuple(own.tolist())]


@pytest.mark.parametrize("key", [0, None, torch.tensor(3), torch.zeros(2)], ids=str)
@pytest.mark.parametrize(("name", "hyper"), RUNS)
def test_a_key_of_another_type_is_one_sentence_at_the_first_step(name, hyper, key):
    base = random_tree(0, {"a": (3, 2)})
    loss_fn = lambda params, batch: (params["a"].sum(), None)  # noqa: E731
    method = importlib.import_module(f"smat_fn.mat.{name}").build(loss_fn, optim.adam(0.1), base, **hyper)
    with pytest.raises(ValueError, match=r"key is an int64 tensor of shape|a draw takes one key"):
        method.update(key, method.init(base), None)


def test_train_and_eval_mode_are_given_and_put_back():
    module = net().eval()
    module.layers[1].train()
    modes = [m.training for m in module.modules()]
    params, batch = trees(module)[1], data(1)[0]
    plain, dropping = ModuleLoss(module, squares), ModuleLoss(module, squares, training=True)
    still = ModuleLoss(module, squares, training=False)
    assert torch.equal(dropping(params, batch, key=KEY)[0], plain.in_training()(params, batch, key=KEY)[0])
    losses = [loss(params, batch, key=KEY)[0] for loss in (plain, dropping, still)]
    assert len({loss.item() for loss in losses}) == 3
    assert torch.equal(losses[2], ModuleLoss(copy.deepcopy(module).eval(), squares)(params, batch)[0])
    with pytest.raises(RuntimeError, match="in the middle"):
        ModuleLoss(module, lambda m, b: throw(), training=True)(params, batch)
    assert [m.training for m in module.modules()] == modes
    with pytest.raises(ValueError, match="in_training: a _Reparametrised runs the loss inside it"):
        reparametrised(plain, lambda p: p).in_training()


def throw():
    raise RuntimeError("in the middle")


class Counting(nn.Module):
    """Counts its passes in a buffer, in place or anew; and keeps something that is no state."""

    def __init__(self, anew=False):
        super().__init__()
        self.w, self.anew = nn.Parameter(torch.ones(6)), anew
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training and self.anew is not None:
            self.passes = self.passes + 1 if self.anew else self.passes.add_(1)
        self.last = x.mean().detach()
        return x * self.w


def test_a_buffer_that_is_no_state_may_be_written_and_is_put_back():
    module = Counting(anew=None)
    last = module.last
    value_and_grad(ModuleLoss(module, squares), engine="autograd")(trees(module)[1], data(1)[0])
    assert module.last is last


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize(
    ("module", "told"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
            "^module '1' in train mode would write",
        ),
        (lambda: nn.Sequential(Counting()), r"^0\.passes are buffers that the forward pass writes"),
        (lambda: Counting(anew=True), "^passes are buffers that the forward pass writes"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), r"^parametrizations\.weight\.0\._u; "),
    ],
    ids=["batch norm", "in place", "anew", "spectral norm"],
)
def test_a_module_that_writes_its_buffers_is_refused_and_never_changed(engine, module, told):
    module = module()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    method = finetune.build(ModuleLoss(module, squares), optim.adam(0.1), trees(module)[0], engine=engine)
    with pytest.raises(ValueError, match=told + r".*|put these parts in eval mode") as caught:
        method.update(KEY, method.init(trees(module)[1]), data(1)[0])
    assert "put these parts in eval mode (module.eval()), or give a loss that passes buffers" in str(caught.value)
    assert_trees_equal(module.state_dict(), before)
    module.eval()
    state, _ = method.update(KEY, method.init(trees(module)[1]), data(1)[0])
    assert_trees_equal(module.state_dict(), before)
    assert set(state.params) == set(dict(module.named_parameters()))


def test_a_batch_norm_in_eval_mode_or_without_statistics_trains_beside_dropout():
    for norm in (nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6, track_running_stats=False)):
        module = nn.Sequential(nn.Linear(6, 6), norm, nn.Dropout(0.5))
        mode = norm.training
        base, start = trees(module)
        method = finetune.build(ModuleLoss(module, squares, training=True), optim.adam(0.1), base)
        first, again = (trained(method, start, data(2), seed)[0].params for seed in (1, 2))
        assert_trees_equal(first, again)
        assert norm.training == mode


def test_buffers_in_aux_are_the_way_out():
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def loss_fn(params, batch):
        x, own = batch
        own = tree.clone(own)
        out = torch.func.functional_call(module, {**params, **own}, (x,))
        return out.square().mean() + F.relu(out).mean(), own

    base, start = trees(module)
    method = finetune.build(loss_fn, optim.adam(0.1), base)
    state = method.init(start)
    for x in data(2):
        state, info = method.update(KEY, state, (x, buffers))
        buffers = info.aux
    assert buffers["1.num_batches_tracked"].item() == 2
    assert module[1].num_batches_tracked.item() == 0
    assert (buffers["1.running_mean"] != 0).all()


def test_vmap_over_a_module_in_train_mode():
    still = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    module = net()
    for own, told in ((still, None), (module, "randomness|random operation")):
        params, batch = trees(own)[1], data(1)[0]
        stacked = {name: torch.stack((leaf, leaf)) for name, leaf in params.items()}
        gradient = value_and_grad(ModuleLoss(own, squares))
        run = torch.func.vmap(lambda p, k, run=gradient, batch=batch: run(p, batch, key=k)[1])
        if told is None:
            want = gradient(params, batch)[1]
            assert torch.allclose(run(stacked, random.split(KEY))["0.weight"][1], want["0.weight"])
        else:
            with pytest.raises(RuntimeError, match=told):
                run(stacked, random.split(KEY))


@pytest.mark.slow
def test_compiled_steps_refuse_dropout_and_take_modules_without():
    still = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    params, batch = trees(still)[1], data(1)[0]
    run = value_and_grad(ModuleLoss(still, squares))
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(params, batch, key=KEY)[1]
    assert torch.allclose(got["0.weight"], run(params, batch)[1]["0.weight"])
    dropping = value_and_grad(ModuleLoss(net(), squares))
    with pytest.raises(Exception, match="dropout in a compiled step would have no key"):
        torch.compile(dropping, backend="aot_eager", fullgraph=True)(trees(net())[1], batch, key=KEY)
