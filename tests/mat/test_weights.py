"""SMAT in a loop of one's own in a few lines: SimulatedWeights of a module, and Schedule."""

import copy

import numpy
import pytest
import torch
from torch import nn

from smat_fn import (
    ModuleLoss,
    Schedule,
    SimulatedWeights,
    draw,
    random,
    reweight,
    simulate,
    tree,
    value_and_grad,
)
from smat_fn.grad import trained
from smat_fn.mat import smat
from smat_fn.simulation import opposite
from smat_fn.testing import assert_trees_equal
from smat_fn.where import block_linear

from .test_around import BATCH, copies, net, squares
from .test_conformance import assert_bits

KEY = random.key(5)
SCHEDULE = Schedule(alpha_min=0.3, drop_prob=0.5, sigma=0.1, period=2)


def loop(module, states, schedule, *, steps=4, engine=None):
    """The loop of docs/own_loop.md; returns what the parameters are after each step."""
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(steps):
        drawn = schedule.draw(KEY, step)
        with states.at(drawn):
            squares(module if engine is None else engine, BATCH)[0].backward()
        states.reweight_grads(drawn)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(copies(module))
    return seen


def literal(module, schedule, *, steps=4):
    """The same by the paper's literal step."""
    from smat_fn.grad import ModuleLoss
    from smat_fn.types import Optimizer

    sgd = Optimizer(lambda params: None, lambda g, s, p: ({k: torch.add(p[k], g[k], alpha=-0.1) for k in p}, s))
    options = {name: getattr(schedule, name) for name in ("alpha_min", "drop_prob", "sigma", "period")}
    base, where, seen = copies(module), block_linear(module), []
    state = smat.State(base, None, 0)
    for _ in range(steps):
        state, _ = smat.literal_step(
            KEY, state, BATCH, loss_fn=ModuleLoss(module, squares), optimizer=sgd, base=base, where=where, **options
        )
        seen.append(state.params)
    return seen


class Fabricated(nn.Module):
    """As what ``setup`` of Lightning Fabric returns: the module, perhaps wrapped by others, under another name."""

    def __init__(self, module, wrap=lambda module: module):
        super().__init__()
        self._forward_module, self._original_module = wrap(module), module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)

    def forward(self, *args):
        return self._forward_module(*args)


WRAPPERS = {
    "bare": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "parallel": nn.DataParallel,
    "fabric": Fabricated,
    "fabric of another wrapper": lambda module: Fabricated(module, nn.DataParallel),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_loop_of_ones_own_takes_the_papers_literal_steps_bit_for_bit(wrap):
    module = net()
    wanted = literal(net(), SCHEDULE)
    engine = wrap(module)
    states = SimulatedWeights.of(engine)
    for got, want in zip(loop(module, states, SCHEDULE, engine=engine), wanted, strict=True):
        assert_trees_equal(got, want)


def test_theta_0_is_a_copy_of_the_weights_when_it_is_made_or_what_is_given():
    module, start = net(), copies(net())
    loop(module, SimulatedWeights.of(module), SCHEDULE)
    other = net()
    with torch.no_grad():
        other.layers[0][0].weight.add_(1)  # as a checkpoint that is loaded first
    drawn = draw(KEY, alpha_min=0.3, drop_prob=0.0, sigma=0.0)
    for base, origin in ((None, copies(other)), (start, start)):
        with SimulatedWeights.of(other, base=base).at(drawn):
            inside = copies(other)
        want = origin["layers.0.0.weight"] + drawn.scale * (other.layers[0][0].weight - origin["layers.0.0.weight"])
        torch.testing.assert_close(inside["layers.0.0.weight"], want.detach())
    with pytest.raises(ValueError, match="base"):
        SimulatedWeights.of(other, base={"layers.0.0.weight": start["layers.0.0.weight"]})


def test_frozen_parameters_are_left_alone_and_an_explicit_one_is_refused():
    module = net()
    module.layers[0].requires_grad_(False)
    frozen = copies(module.layers[0])
    with SimulatedWeights.of(module).at(SCHEDULE.draw(KEY, 1)):
        assert_trees_equal(copies(module.layers[0]), frozen)
        assert not torch.equal(module.layers[1][0].weight, net().layers[1][0].weight)
    with pytest.raises(ValueError, match=r"parameters are frozen \(layers.0.0.weight, layers.0.0.bias\)"):
        SimulatedWeights(dict(module.named_parameters()), copies(module))
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        SimulatedWeights.of(module.requires_grad_(False))


def test_a_gradient_is_reweighted_once_and_with_the_draw_of_its_own_blocks():
    module = net()
    states, drawn = SimulatedWeights.of(module), SCHEDULE.draw(KEY, 1)
    with states.at(drawn):
        squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="not that of the last block"):
        states.reweight_grads(SCHEDULE.draw(KEY, 3))
    states.reweight_grads(drawn)
    with pytest.raises(ValueError, match="reweighted already"):
        states.reweight_grads(drawn)
    with pytest.raises(ValueError, match=r"module\.layers\.0\.0\.weight, names that SimulatedWeights does not have"):
        states.reweight({"module.layers.0.0.weight": module.layers[0][0].weight.grad}, drawn)
    before = module.layers[0][0].weight.grad.clone()
    states.reweight_grads(None)
    assert torch.equal(module.layers[0][0].weight.grad, before)


def test_a_backward_pass_after_the_block_is_told():
    module = net()
    states, drawn = SimulatedWeights.of(module), SCHEDULE.draw(KEY, 1)
    with states.at(drawn):
        loss = squares(module, BATCH)[0]
    loss.backward()
    with pytest.raises(ValueError, match=r"call backward\(\) inside, where"):
        states.reweight_grads(drawn)


def freeze(module):
    module.layers[0].requires_grad_(False)


def replace(module):
    module.load_state_dict(copies(net()), assign=True)


def copied(module):
    module.layers[1] = copy.deepcopy(module.layers[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (freeze, "'layers.0.0.weight' was trained when SimulatedWeights was made, and is not now"),
        (replace, "'layers.0.0.weight' is another tensor than when"),
        (copied, "'layers.1.0.weight' is another tensor than when"),
    ],
)
def test_parameters_that_were_replaced_or_frozen_are_told_in_the_next_simulated_step(change, said):
    module = net()
    states = SimulatedWeights.of(module)
    change(module)
    with states.at(None):  # clean: nothing is simulated
        pass
    with pytest.raises(ValueError, match=said), states.at(SCHEDULE.draw(KEY, 1)):
        raise AssertionError("the pass has begun")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_have_the_running_statistics_of_clean_steps_alone(momentum):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum, affine=False))
    clean = copy.deepcopy(module)
    states = SimulatedWeights.of(module, where=lambda name, weight: weight.ndim == 2)
    for step in range(4):
        drawn = SCHEDULE.draw(KEY, step)
        with states.at(drawn):
            out = module(BATCH * (step + 1))
            out.sum().backward()
        states.reweight_grads(drawn)
        module.zero_grad()
        assert out.mean(0).abs().max() < 1e-5  # normalised by the batch, at theta~ too
        if drawn is None:
            clean(BATCH * (step + 1))
        for name in "running_mean", "running_var":
            assert_bits(getattr(module[1], name), getattr(clean[1], name))
    with pytest.raises(RuntimeError), states.at(SCHEDULE.draw(KEY, 5)):
        raise RuntimeError
    assert module[1].momentum == momentum


class Stubborn(nn.BatchNorm1d):
    """A norm of another library that has a rate of its own for its running statistics."""

    def forward(self, x):
        self.running_mean.lerp_(x.detach().mean(0), 0.5)
        self.running_var = torch.lerp(self.running_var, x.detach().var(0), 0.5)
        return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_norms_that_do_not_heed_momentum_keep_their_running_statistics(momentum):
    module = nn.Sequential(nn.Linear(4, 4), Stubborn(4, momentum=momentum, affine=False))
    states = SimulatedWeights.of(module, where=lambda name, weight: weight.ndim == 2)
    module(BATCH)
    norm = module[1]
    before = {name: (own, own.clone()) for name, own in norm.named_buffers()}
    with states.at(SCHEDULE.draw(KEY, 1)):
        module(BATCH * 2)
        assert not torch.equal(norm.running_mean, before["running_mean"][1])
    for name, (own, value) in before.items():
        assert getattr(norm, name) is own
        assert_bits(own, value)
    assert norm.momentum == momentum


def test_embeddings_with_sparse_gradients_are_told():
    with pytest.raises(ValueError, match="'1' gives sparse gradients"):
        SimulatedWeights.of(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))


def test_a_schedule_is_the_draws_of_the_method():
    assert [SCHEDULE.draw(KEY, step) is None for step in range(5)] == [True, False, True, False, True]
    for step in (1, 3):
        found = SCHEDULE.draw(KEY, step)
        want = draw(random.fold_in(KEY, step), alpha_min=0.3, drop_prob=0.5, sigma=0.1)
        assert_trees_equal(found._asdict() | {"factors": {}}, want._asdict() | {"factors": {}})
    every = Schedule(sigma=0.1, period=1, antithetic=True, noise="gaussian", alpha_max=2.0)
    first, second = every.draw(KEY, 6), every.draw(KEY, 7)
    assert_trees_equal(opposite(first)._asdict() | {"factors": {}}, second._asdict() | {"factors": {}})
    assert Schedule(alpha_min=1, drop_prob=0, sigma=0, period=1).draw(KEY, 0) is None
    assert Schedule(alpha_min=1, drop_prob=0, sigma=0, period=1, alpha_max=1.5).draw(KEY, 0) is not None


def test_all_bad_values_of_a_schedule_are_listed():
    said = r"drop_prob is 1.*; sigma is -1.*; period is 0.*; antithetic is 'no'.*factors"
    with pytest.raises(ValueError, match=said):
        Schedule(drop_prob=1.0, sigma=-1, period=0, antithetic="no", factors={"w": float("nan")})


def test_a_period_of_numpy_is_a_number():
    schedule = Schedule(sigma=0.1, period=numpy.int64(2))
    assert type(schedule.period) is int
    assert schedule.draw(KEY, numpy.int64(0)) is None


@pytest.mark.parametrize("order", ["zero_grad after the block", "clean pass before", "micro-batches"])
def test_gradients_of_other_passes_are_told(order):
    module = net()
    states, optimizer = SimulatedWeights.of(module), torch.optim.SGD(module.parameters(), lr=0.1)
    if order == "zero_grad after the block":
        squares(module, BATCH)[0].backward()  # of the step before
        with states.at(SCHEDULE.draw(KEY, 1)) as _:
            loss = squares(module, BATCH)[0]
        optimizer.zero_grad()
        loss.backward()
        with pytest.raises(ValueError, match="no backward pass ran in the blocks of this draw"):
            states.reweight_grads(states._passed)
        return
    drawn = SCHEDULE.draw(KEY, 1)
    if order == "clean pass before":
        squares(module, BATCH)[0].backward()
        told = pytest.raises(
            ValueError, match="were not cleared before the first block of a draw: a backward pass in the"
        )
        with told, states.at(drawn):
            squares(module, BATCH)[0].backward()
        return
    for _ in range(2):  # micro-batches of one draw are fine
        with states.at(drawn):
            squares(module, BATCH)[0].backward()
    states.reweight_grads(drawn)


def test_several_draws_in_a_step_give_the_mean_of_their_reweighted_gradients():
    module = net()
    leaves, where = dict(module.named_parameters()), block_linear(module)
    base = {name: leaf + 0.1 for name, leaf in copies(module).items()}
    states, draws = SimulatedWeights.of(module, base=base), [SCHEDULE.drawn(KEY, step) for step in (1, 3)]
    with states.at(draws[0]):
        squares(module, BATCH)[0].backward()
    states.reweight_grads(draws[0])
    with pytest.raises(ValueError, match=r"several draws in one step .* torch\.autograd\.grad"), states.at(draws[1]):
        squares(module, BATCH)[0].backward()
    module.zero_grad()
    states, found, wanted = SimulatedWeights.of(module, base=base), [], []
    for drawn in draws:
        with states.at(drawn):
            grads = dict(zip(leaves, torch.autograd.grad(squares(module, BATCH)[0], leaves.values()), strict=True))
        states.reweight(grads, drawn)
        found.append(grads)
        merged = simulate(copies(module), base, drawn, where=where)
        gradient = value_and_grad(ModuleLoss(module, squares))(merged, BATCH)[1]
        wanted.append(reweight(gradient, drawn, where=where))
    mean = {name: sum(grads[name] for grads in wanted) / 2 for name in leaves}
    assert_trees_equal({name: sum(grads[name] for grads in found) / 2 for name in leaves}, mean)
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_inside_the_block_or_zeros_before_it_are_fine(to_none):
    module, wanted = net(), []
    for inside in (False, True):
        states, optimizer = SimulatedWeights.of(module), torch.optim.SGD(module.parameters(), lr=0.1)
        squares(module, BATCH)[0].backward()  # of the step before
        drawn = SCHEDULE.draw(KEY, 1)
        if not inside:
            optimizer.zero_grad(set_to_none=to_none)
        with states.at(drawn):
            loss = squares(module, BATCH)[0]
            if inside:
                optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
        states.reweight_grads(drawn)
        wanted.append({name: p.grad.clone() for name, p in module.named_parameters()})
        optimizer.zero_grad()
    assert_trees_equal(*wanted)


def test_a_gradient_that_is_not_reweighted_is_told_at_the_next_draw():
    module = net()
    states = SimulatedWeights.of(module)
    with states.at(SCHEDULE.draw(KEY, 1)), torch.no_grad():
        squares(module, BATCH)  # an evaluation
    with states.at(SCHEDULE.draw(KEY, 3)):
        squares(module, BATCH)[0].backward()
    module.zero_grad()
    told = pytest.raises(ValueError, match=r"gradient of the draw before was not reweighted: .*a step share one Draw")
    with told, states.at(SCHEDULE.draw(KEY, 5)):
        raise AssertionError("the pass has begun")


def test_gradients_that_an_optimizer_of_some_parameters_leaves_are_named():
    module = net()
    states = SimulatedWeights.of(module)
    held = {name: p for name, p in module.named_parameters() if p.ndim == 2}
    left = [name for name, p in module.named_parameters() if p.ndim != 2]
    optimizer = torch.optim.SGD(held.values(), lr=0.1)
    squares(module, BATCH)[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    refused = pytest.raises(ValueError, match=r"Call module\.zero_grad\(\).* or freeze what is not trained")
    with refused as told, states.at(SCHEDULE.draw(KEY, 1)):
        squares(module, BATCH)[0].backward()
    said = str(told.value)
    assert said.startswith(f"gradients of {left[0]}, ")
    assert not any(name in said for name in held)
    module.zero_grad()
    drawn = SCHEDULE.draw(KEY, 1)
    with states.at(drawn):
        squares(module, BATCH)[0].backward()
    states.reweight_grads(drawn)


def fused(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    squares(module, BATCH)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def by_data(module):
    for p in module.parameters():
        p.data.mul_(1.5)


@pytest.mark.parametrize("change", [fused, by_data])
def test_a_draw_that_is_used_again_is_simulated_again(change):
    module, start = net(), copies(net())
    states, drawn = SimulatedWeights.of(module), SCHEDULE.draw(KEY, 1)
    for _ in range(2):
        want = simulate(copies(module), start, drawn, where=block_linear(module))
        with states.at(drawn):
            assert_trees_equal(copies(module), want)
        change(module)


@pytest.mark.parametrize(
    "to", [{"dtype": torch.float64}, {"memory_format": torch.channels_last}], ids=["dtype", "layout"]
)
def test_a_module_that_is_converted_afterwards_holds_states_of_its_own_kind(to):
    module = nn.Conv2d(3, 4, 3)
    states = SimulatedWeights.of(module, where=lambda name, weight: weight.ndim == 4)
    module.to(**to)
    before = module.weight.dtype, module.weight.stride()
    drawn = SCHEDULE.draw(KEY, 1)
    with states.at(drawn):
        assert (module.weight.dtype, module.weight.stride()) == before
        module(torch.ones(1, 3, 4, 4, dtype=module.weight.dtype)).sum().backward()
    assert (module.weight.grad.dtype, module.weight.grad.stride()) == before


def test_factors_of_unknown_names_and_a_mask_without_parameters_are_told_whenever_they_come():
    module = nn.Sequential(nn.Linear(4, 4))  # no blocks
    states = SimulatedWeights.of(module)
    with states.at(draw(KEY, alpha_min=0.2, drop_prob=0.0, sigma=0.1)):
        pass
    with pytest.raises(ValueError, match=r"where=smat_fn\.where\.never"), states.at(SCHEDULE.draw(KEY, 1)):
        raise AssertionError("the pass has begun")
    other = Schedule(sigma=0.1, drop_prob=0.0, period=1, factors={"ghost": 0.5}).draw(KEY, 0)
    with pytest.raises(ValueError, match="factors of alpha name 'ghost', which"), states.at(other):
        raise AssertionError("the pass has begun")
    with pytest.raises(ValueError, match=r"factors of alpha must be numbers: 0\.weight tensor"):
        Schedule(sigma=0.1, factors={"0.weight": torch.ones(())})


def test_a_base_of_the_whole_module_serves_its_trained_parameters():
    module = net()
    base = copies(module)
    module.layers[0].requires_grad_(False)
    with SimulatedWeights.of(module, base=base).at(SCHEDULE.draw(KEY, 1)):
        pass
    with pytest.raises(ValueError, match="must be a torch"):
        SimulatedWeights.of(base)


def test_a_block_that_was_not_left_is_told_at_the_next():
    """As where a hook that would leave it did not run: theta would be lost without a word."""
    module = net()
    states, other = SimulatedWeights.of(module), SimulatedWeights.of(module)
    before, drawn = copies(module), SCHEDULE.draw(KEY, 1)
    block = states.at(drawn)
    block.__enter__()
    for again in (states.at(drawn), states.at(SCHEDULE.draw(KEY, 3)), states.at(None), other.at(drawn)):
        with pytest.raises(ValueError, match="a block before was not left"), again:
            pass
    block.__exit__(None, None, None)
    assert_trees_equal(copies(module), before)
    with states.at(None), pytest.raises(ZeroDivisionError), other.at(drawn):
        raise ZeroDivisionError
    with states.at(drawn):
        assert not torch.equal(next(iter(copies(module).values())), next(iter(before.values())))
    assert_trees_equal(copies(module), before)


def test_a_base_that_is_written_to_is_told_at_the_next_simulated_step():
    module = net()
    base = copies(module)
    states = SimulatedWeights.of(module, base=base)
    with states.at(SCHEDULE.draw(KEY, 1)):
        pass
    next(iter(base.values())).mul_(2)
    with pytest.raises(ValueError, match="base was written to"), states.at(SCHEDULE.draw(KEY, 3)):
        pass
    assert_trees_equal(copies(module), {name: p.detach() for name, p in module.named_parameters()})


@pytest.mark.parametrize("name", ["grad_sample", "main_grad"])
def test_gradients_that_an_optimizer_reads_elsewhere_are_told(name):
    module = net()
    states, drawn = SimulatedWeights.of(module), SCHEDULE.draw(KEY, 1)
    with states.at(drawn):
        squares(module, BATCH)[0].backward()
    setattr(next(module.parameters()), name, torch.ones(3))
    with pytest.raises(ValueError, match=f"has {name}, by which an optimizer may step"):
        states.reweight_grads(drawn)


def test_parameters_without_coordinates_share_no_memory():
    assert trained.weight_problems({"w": torch.empty(0)}, {"w": torch.empty(0)}) == []


@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_an_embedding_that_clips_its_rows_is_told(max_norm):
    module = nn.Sequential(nn.Embedding(5, 4, max_norm=max_norm), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"'0' writes to its weight in the forward pass, .*: set its max_norm to None"):
        SimulatedWeights.of(module, where=block_linear)
    module[0].weight.requires_grad_(False)
    SimulatedWeights.of(module, where=lambda name, p: p.ndim == 2)


def test_a_device_without_float64_is_told(monkeypatch):
    monkeypatch.setattr(tree, "WITHOUT_FLOAT64", frozenset({"cpu"}))  # as mps, which is not here
    with pytest.raises(ValueError, match=r"parameters are on cpu, which has no float64.*use_cpu=True"):
        SimulatedWeights.of(net())


def test_its_text_says_which_parameters_are_masked():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    states = SimulatedWeights.of(nn.TransformerEncoder(layer, 2))
    text = "SimulatedWeights: Mask acts on 8 of 24 trained parameters (256 of 344 values): "
    assert repr(states) == text + ", ".join(
        f"layers.*.{name}.weight (2)" for name in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    ).replace("in_proj.weight", "in_proj_weight")
    one, other = torch.zeros(3, requires_grad=True), torch.zeros(3)
    assert repr(SimulatedWeights({"w": one}, {"w": other})).endswith("on 1 of 1 trained parameters (3 of 3 values): w")
    none = SimulatedWeights({"w": one}, {"w": other}, where=lambda path, leaf: False)
    assert repr(none).endswith("on 0 of 1 trained parameters (0 of 3 values)")
