"""SimulatedWeights.climbed: the second pass of ASAM in a loop of the caller's own."""

import math
import weakref

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss, Schedule, SimulatedWeights, draw
from smat_fn.mat import asam, smat
from smat_fn.testing import assert_trees_equal
from smat_fn.where import block_linear

from .test_around import BATCH, copies, net, squares
from .test_ascent import HYPER, KEY, LR, OPTIMIZERS, adamw, assert_same, batch_of, by_method
from .test_weights import WRAPPERS

RHO = 0.3
OPTIONS = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.1}


def loop(module, *, rho=RHO, adaptive=True, make=adamw, steps=5, micro=1, engine=None, scale=1.0):
    """The loop of docs/own_loop.md; returns what the parameters are after each step."""
    optimizer, runs = make(module), module if engine is None else engine
    states, seen = SimulatedWeights.of(runs), []
    for step in range(steps):
        batches = [batch_of(step)] * micro
        for batch in batches:
            (scale * squares(runs, batch)[0] / micro).backward()
        with states.climbed(rho=rho, adaptive=adaptive):
            for batch in batches:
                (scale * squares(runs, batch)[0] / micro).backward()
        for own in optimizer if isinstance(optimizer, list) else [optimizer]:
            own.step()
        module.zero_grad()
        seen.append(copies(module))
    return seen


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("make", "pure"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("micro", [1, 2])
def test_the_loop_takes_the_steps_of_asam_bit_for_bit(adaptive, make, pure, micro):
    module = net()
    method = asam.build(ModuleLoss(module, squares), pure, copies(module), rho=RHO, adaptive=adaptive)
    wanted = by_method(method, module, steps=5, micro=micro)
    assert_same(loop(net(), adaptive=adaptive, make=make, micro=micro), wanted)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_modules_climb_as_bare_ones(wrap):
    module = net()
    assert_same(loop(module, engine=wrap(module)), loop(net()))


def test_the_scale_of_a_loss_leaves_the_climb_as_it_is():
    """As a GradScaler scales it."""

    def after(scale):
        return loop(
            net(), scale=scale, steps=1, make=lambda module: torch.optim.SGD(module.parameters(), lr=LR / scale)
        )

    assert_same(after(1024.0), after(1.0))


def test_the_gradient_is_that_of_the_block_alone_and_the_weights_are_restored():
    module = net()
    states, theta = SimulatedWeights.of(module), copies(module)
    squares(module, BATCH)[0].backward()
    first = {name: p.grad for name, p in module.named_parameters()}
    wanted = asam.climb(theta, first, rho=RHO)
    alive = [weakref.ref(grad) for grad in first.values()]
    del first
    with states.climbed(rho=RHO):
        assert_trees_equal(copies(module), wanted)
        assert not any(ref() is not None for ref in alive)  # no second gradient in memory
        squares(module, BATCH)[0].backward()
    assert_trees_equal(copies(module), theta)
    other = net()
    other.load_state_dict(wanted)
    squares(other, BATCH)[0].backward()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_parameter_without_a_gradient_stays_where_it_is():
    module = net()
    states, still = SimulatedWeights.of(module), module.layers[1][0].weight.detach().clone()
    module.layers[0](BATCH).sum().backward()
    with states.climbed(rho=RHO):
        assert torch.equal(module.layers[1][0].weight, still)
        module.layers[0](BATCH).sum().backward()
    assert module.layers[1][0].weight.grad is None


def test_clean_steps_that_climb_alternate_with_simulated_ones():
    """SMAT whose clean steps are ASAM's: the steps of either method, with one optimizer."""
    module = net()
    optimizer, states, schedule = adamw(module), SimulatedWeights.of(module), Schedule(**HYPER)
    base, loss, pure = copies(module), ModuleLoss(module, squares), OPTIMIZERS["adamw"][1]
    simulated = smat.build(loss, pure, base, where=block_linear(module), **HYPER)
    ascending, state = asam.build(loss, pure, base, rho=RHO), None
    for step in range(6):
        drawn, batch = schedule.draw(KEY, step), batch_of(step)
        with states.at(drawn):
            squares(module, batch)[0].backward()
        states.reweight_grads(drawn)
        if drawn is None:
            with states.climbed(rho=RHO):
                squares(module, batch)[0].backward()
        optimizer.step()
        module.zero_grad()
        method = ascending if drawn is None else simulated
        state, _ = method.update(KEY, method.init(base) if state is None else state, batch)
        assert_trees_equal(copies(module), state.params)


def test_batch_norms_move_their_statistics_in_the_first_pass_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    states = SimulatedWeights.of(module, where=lambda name, p: p.ndim == 2)
    module(BATCH).square().sum().backward()
    before = module[1].running_mean.clone()
    with states.climbed():
        module(BATCH).square().sum().backward()
    assert torch.equal(module[1].running_mean, before)


def test_what_would_be_silently_wrong_is_told():
    module = net()
    states, theta = SimulatedWeights.of(module), copies(module)
    for rho in (-1.0, math.nan, "1"):
        with pytest.raises(ValueError, match=f"climbed: rho is {rho!r}, must be finite"), states.climbed(rho=rho):
            raise AssertionError("the block has begun")
    with pytest.raises(ValueError, match="adaptive is 1, must be True or False"), states.climbed(adaptive=1):
        raise AssertionError("the block has begun")
    with pytest.raises(ValueError, match=r"no parameter has one: call backward\(\) before"), states.climbed():
        raise AssertionError("the block has begun")
    squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match=r"no backward pass ran in the block of climbed\(\)"), states.climbed():
        pass
    squares(module, BATCH)[0].backward()
    with states.climbed():
        squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="those of the climbed\\(\\) block before: a step has one"), states.climbed():
        raise AssertionError("the block has begun")
    module.zero_grad()
    squares(module, BATCH)[0].backward()
    for inner in (states.climbed(), states.at(draw(KEY, **OPTIONS)), SimulatedWeights.of(module).climbed()):
        with states.climbed():
            squares(module, BATCH)[0].backward()
            with pytest.raises(ValueError, match="a block inside another block"), inner:
                raise AssertionError("the block has begun")
        module.zero_grad()
        squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="written to while"), states.climbed(), torch.no_grad():
        module.layers[1][0].bias += 1
    assert_trees_equal(copies(module), theta)
    with states.at(draw(KEY, **OPTIONS)):
        squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="gradient of the draw before was not reweighted"), states.climbed():
        raise AssertionError("the block has begun")


def test_a_block_for_every_micro_batch_is_told():
    """As those of `at` are: the gradient of all micro-batches but the last would be lost."""
    module = net()
    states = SimulatedWeights.of(module)
    squares(module, BATCH)[0].backward()
    with states.climbed(rho=RHO):
        squares(module, BATCH)[0].backward()
    squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="were added to, those of the climbed\\(\\) block before"), states.climbed():
        raise AssertionError("the block has begun")


@pytest.mark.parametrize("name", ["grad_sample", "main_grad"])
def test_gradients_that_an_optimizer_reads_elsewhere_are_told(name):
    module = net()
    states = SimulatedWeights.of(module)
    squares(module, BATCH)[0].backward()
    setattr(module.layers[1][0].bias, name, BATCH)
    with pytest.raises(ValueError, match=f"bias. has {name}, by which an optimizer may step"), states.climbed():
        raise AssertionError("the block has begun")


def test_the_gradient_of_the_block_is_not_in_memory_after_zero_grad():
    module = net()
    states = SimulatedWeights.of(module)
    for _ in range(2):
        squares(module, BATCH)[0].backward()
        with states.climbed(rho=RHO):
            squares(module, BATCH)[0].backward()
        alive = [weakref.ref(p.grad) for p in module.parameters()]
        module.zero_grad()
        assert not any(ref() is not None for ref in alive)


def in_place(module):
    module.zero_grad(set_to_none=False)


def by_data(module):
    for p in module.parameters():
        p.grad.data.zero_()


@pytest.mark.parametrize("clear", [in_place, by_data])
def test_gradients_that_are_zeroed_in_place_are_new_ones(clear):
    module = net()
    states, optimizer = SimulatedWeights.of(module), torch.optim.SGD(module.parameters(), lr=LR)
    for _ in range(2):
        squares(module, BATCH)[0].backward()
        with states.climbed(rho=RHO):
            squares(module, BATCH)[0].backward()
        optimizer.step()
        clear(module)


def test_a_second_block_after_an_update_is_told():
    module = net()
    states, optimizer = SimulatedWeights.of(module), torch.optim.SGD(module.parameters(), lr=LR)
    squares(module, BATCH)[0].backward()
    with states.climbed(rho=RHO):
        squares(module, BATCH)[0].backward()
    optimizer.step()
    with pytest.raises(ValueError, match="those of the climbed\\(\\) block before"), states.climbed():
        raise AssertionError("the block has begun")


@pytest.mark.parametrize("options", [{"switch": False}, {"starts": {"w": 0}}])
def test_shards_do_not_climb(options):
    states = SimulatedWeights({"w": torch.ones(3, requires_grad=True)}, {"w": torch.ones(3)}, **options)
    with pytest.raises(ValueError, match="climbed\\(\\) needs switch=True and starts=None"), states.climbed():
        raise AssertionError("the block has begun")
