"""SimulatedWeights with a climb: theta + e in clean blocks, along the momentum of torch's own optimizers."""

import copy

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss, Schedule, SimulatedWeights, draw, optim, random, simulate
from smat_fn.mat import asam, ascent, msam, smat
from smat_fn.mat.ascent import Ascent
from smat_fn.testing import assert_trees_equal
from smat_fn.types import Micro
from smat_fn.where import block_linear

from .test_around import BATCH, copies, net, squares
from .test_weights import WRAPPERS, fused

KEY, LR, RHO = random.key(5), 0.05, 0.3
HYPER = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.1, "period": 3}
OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0, "period": 1}
CLIMBS = pytest.mark.parametrize("climb", ["clean", "both"])


def batch_of(step):
    return BATCH * (1 + step)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1)


def muon(module):
    """As everyone trains by Muon: it takes matrices alone."""
    matrices = [p for p in module.parameters() if p.ndim == 2]
    rest = [p for p in module.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=LR, weight_decay=0.0), torch.optim.AdamW(rest, lr=LR, weight_decay=0.1)]


class Wrapper:
    """As Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


OPTIMIZERS = {
    "adamw": (adamw, optim.adamw(LR, weight_decay=0.1)),
    "wrapped": (lambda module: Wrapper(adamw(module)), optim.adamw(LR, weight_decay=0.1)),
    "muon": (muon, optim.muon(LR, rest=optim.adamw(LR, weight_decay=0.1))),
}


def loop(module, *, climb, rho=RHO, make=adamw, hyper=HYPER, steps=7, engine=None, micro=1, optimizer=None):
    """The loop of docs/own_loop.md; returns what the parameters are after each step."""
    optimizer = make(module) if optimizer is None else optimizer
    climbs = {} if climb is None else {"optimizer": optimizer, "climb": climb, "rho": rho}
    states = SimulatedWeights.of(module if engine is None else engine, **climbs)
    schedule, seen = Schedule(**hyper), []
    for step in range(steps):
        drawn = schedule.draw(KEY, step)
        for _ in range(micro):
            with states.at(drawn):
                (squares(module if engine is None else engine, batch_of(step))[0] / micro).backward()
        states.reweight_grads(drawn)
        for own in optimizer if isinstance(optimizer, list) else [optimizer]:
            own.step()
        module.zero_grad()
        seen.append(copies(module))
    return seen


def by_method(method, module, *, steps=7, micro=1):
    state, seen = method.init(copies(module)), []
    for step in range(steps):
        batch = batch_of(step)
        state, _ = method.update(KEY, state, [Micro(batch)] * micro if micro > 1 else batch)
        seen.append(state.params)
    return seen


def by_build(module, *, climb, rho=RHO, pure=OPTIMIZERS["adamw"][1], micro=1):
    loss, where = ModuleLoss(module, squares), block_linear(module)
    return by_method(
        smat.build(loss, pure, copies(module), where=where, climb=climb, rho=rho, **HYPER), module, micro=micro
    )


def assert_same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert_trees_equal(got, want)


@CLIMBS
@pytest.mark.parametrize(("make", "pure"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_loop_of_ones_own_takes_the_climbing_steps_of_build_bit_for_bit(climb, make, pure):
    wanted = by_build(net(), climb=climb, pure=pure)
    assert_same(loop(net(), climb=climb, make=make), wanted)
    other = by_build(net(), climb={"clean": "both", "both": "clean"}[climb], pure=pure)
    assert not torch.equal(wanted[-1]["layers.0.0.weight"], other[-1]["layers.0.0.weight"])


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_modules_climb_as_bare_ones(wrap):
    module = net()
    assert_same(loop(module, climb="both", engine=wrap(module)), loop(net(), climb="both"))


@CLIMBS
def test_with_everything_off_it_is_msam(climb):
    module = net()
    method = msam.build(ModuleLoss(module, squares), OPTIMIZERS["adamw"][1], copies(module), rho=RHO)
    assert_same(loop(net(), climb=climb, hyper=OFF), by_method(method, module))


@CLIMBS
def test_without_a_radius_it_is_the_loop_without_a_climb(climb):
    assert_same(loop(net(), climb=climb, rho=0), loop(net(), climb=None))


@CLIMBS
def test_micro_batches_of_a_step_climb_to_one_point(climb):
    assert_same(loop(net(), climb=climb, micro=2), loop(net(), climb=climb))  # halves of a gradient are exact
    assert_same(loop(net(), climb=climb, micro=2), by_build(net(), climb=climb, micro=2))


@CLIMBS
def test_a_resumed_loop_climbs_along_the_momentum_that_was_saved(climb):
    module, start = net(), copies(net())
    optimizer, hyper = adamw(module), HYPER | {"period": 1 if climb == "both" else 100}
    loop(module, climb=climb, hyper=hyper, optimizer=optimizer, steps=2)
    again = net()
    resumed = adamw(again)
    states = SimulatedWeights.of(again, optimizer=resumed, climb=climb, rho=RHO)
    again.load_state_dict(module.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    drawn = Schedule(**hyper).draw(KEY, 2)
    slopes = {name: resumed.state[p]["exp_avg"] for name, p in again.named_parameters()}
    wanted = asam.climb(copies(module), slopes, rho=RHO)
    if drawn is not None:
        wanted = simulate(wanted, start, drawn, where=block_linear(again))
    with states.at(drawn):
        assert_trees_equal(copies(again), wanted)
    assert_trees_equal(copies(again), copies(module))
    assert not torch.equal(wanted["layers.0.0.bias"], module.layers[0][0].bias)


def test_before_the_first_update_and_in_simulated_steps_of_clean_there_is_no_climb():
    module = net()
    optimizer = adamw(module)
    states, start = SimulatedWeights.of(module, optimizer=optimizer, climb="clean"), copies(module)
    with states.at(None):
        assert_trees_equal(copies(module), start)
        squares(module, BATCH)[0].backward()
    states.reweight_grads(None)
    optimizer.step()
    module.zero_grad()
    theta, drawn = copies(module), draw(KEY, alpha_min=0.3, drop_prob=0.5, sigma=0.1)
    with states.at(drawn):
        assert_trees_equal(copies(module), simulate(theta, start, drawn, where=block_linear(module)))
    with states.at(None):
        assert not torch.equal(module.layers[0][0].weight, theta["layers.0.0.weight"])
    assert_trees_equal(copies(module), theta)


def climbing(make=adamw, **options):
    """(module, optimizer, states) after one update."""
    module = net()
    optimizer = make(module)
    states = SimulatedWeights.of(module, optimizer=optimizer, **{"climb": "clean", "rho": RHO, **options})
    squares(module, BATCH)[0].backward()
    optimizer.step()
    module.zero_grad()
    return module, optimizer, states


def test_a_clean_block_that_climbs_is_protected_as_a_simulated_one():
    module, _, states = climbing()
    theta, drawn = copies(module), draw(KEY, alpha_min=0.3, drop_prob=0.5, sigma=0.1)
    with pytest.raises(ValueError, match=r"written to while .* \(layers.0.0.bias\), or theta \+ e"), states.at(None):
        module.layers[0][0].bias.data += 1  # which the first block finds in any of them
    other = SimulatedWeights.of(module)
    for inner in (states.at(None), states.at(drawn), other.at(drawn)):
        with states.at(None), pytest.raises(ValueError, match="a block before was not left"), inner:
            pass
    with pytest.raises(ValueError, match=r"written to while .* \(layers.1.0.bias\)"), states.at(None), torch.no_grad():
        module.layers[1][0].bias += 1
    with pytest.raises(ZeroDivisionError), states.at(None):
        raise ZeroDivisionError
    assert_trees_equal(copies(module), theta)
    with states.at(drawn):
        squares(module, BATCH)[0].backward()
    with pytest.raises(ValueError, match="gradient of the draw before was not reweighted"), states.at(None):
        raise AssertionError("the pass has begun")
    states.reweight_grads(drawn)
    module.layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'layers.0.0.weight' was trained when"), states.at(None):
        raise AssertionError("the pass has begun")


def test_a_clean_block_climbs_anew_after_an_update_that_leaves_no_trace():
    module, optimizer, states = climbing()
    for _ in range(2):
        slopes = {name: optimizer.state[p]["exp_avg"] for name, p in module.named_parameters()}
        wanted = asam.climb(copies(module), slopes, rho=RHO)
        with states.at(None):
            assert_trees_equal(copies(module), wanted)
        fused(module)


@pytest.mark.parametrize("slices", [None, 2])
@CLIMBS
def test_blocks_that_share_a_point_write_it_once_until_the_next_step_is_prepared(climb, slices):
    """As `attach` runs micro-batches, with theta_0 where it is and in host memory; fused updates leave no trace."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    base, where = copies(net()), block_linear(module)
    leaves, climbs = dict(module.named_parameters()), Ascent(lambda: optimizer, climb, RHO)
    states = SimulatedWeights(leaves, base, where=where, slices=slices, once=True, climbs=climbs)
    schedule = Schedule(**HYPER)
    for step in range(6):
        drawn, theta = schedule.draw(KEY, step), copies(module)
        if drawn is None:
            states.prepare()
        wanted = theta
        if step and (drawn is None or climb == "both"):
            slopes = {name: optimizer.state[p]["exp_avg"] for name, p in leaves.items()}
            wanted = asam.climb(theta, slopes, rho=RHO)
        if drawn is not None:
            wanted = simulate(wanted, base, drawn, where=where)
        for _ in range(2):
            with states.at(drawn):
                assert_trees_equal(copies(module), wanted)
                squares(module, batch_of(step))[0].backward()
        states.reweight_grads(drawn)
        optimizer.step()
        module.zero_grad()


def test_batch_norms_move_their_statistics_in_clean_steps_that_climb():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    states = SimulatedWeights.of(module, where=lambda name, p: p.ndim == 2, optimizer=optimizer, climb="both")
    for step in range(3):
        drawn, before = Schedule(**HYPER | {"period": 2}).draw(KEY, step), module[1].running_mean.clone()
        with states.at(drawn):
            module(BATCH).square().sum().backward()
        states.reweight_grads(drawn)
        optimizer.step()
        module.zero_grad()
        assert torch.equal(module[1].running_mean, before) is (drawn is not None)


def test_a_layout_that_is_not_contiguous_climbs_as_the_values():
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    module.zero_grad()
    where = {"where": lambda name, p: p.ndim == 4}
    states, before = SimulatedWeights.of(module, optimizer=optimizer, climb="clean", **where), copies(module)
    wanted = asam.climb(before, {name: torch.ones_like(leaf) for name, leaf in before.items()}, rho=0.5)
    with states.at(None):
        assert module.weight.stride() == before["weight"].stride()
        assert_trees_equal(copies(module), wanted)


RADIUS = 50.0  # so that the rounding of a direction shows in bfloat16


def given(**state):
    """(module, states of it) whose weight has these entries in the state of its SGD, and whose bias has a momentum."""
    module = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    states = SimulatedWeights.of(module, where=lambda name, p: True, optimizer=optimizer, climb="clean", rho=RADIUS)
    optimizer.state[module.weight] |= state
    optimizer.state[module.bias]["momentum_buffer"] = torch.ones(4).bfloat16()
    return module, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_of_a_wider_dtype_than_their_parameters_are_rounded_with_theta_alone(dtype):
    slope = torch.linspace(-1, 1, 32, dtype=dtype).view(4, 8)
    module, states = given(exp_avg=slope)
    bias, own = torch.ones(4).bfloat16(), copies(module)
    wanted, narrow = (asam.climb(own, {"weight": s, "bias": bias}, rho=RADIUS) for s in (slope, slope.bfloat16()))
    assert not torch.equal(wanted["weight"], narrow["weight"])
    with states.at(None):
        assert_trees_equal(copies(module), wanted)


@pytest.mark.parametrize("state", [{}, {"momentum_buffer": None}, {"step": 0}], ids=str)
def test_a_parameter_without_a_gradient_so_far_has_the_momentum_0(state):
    module, states = given(**state)
    wanted = asam.climb(copies(module), {"weight": torch.zeros(4, 8), "bias": torch.ones(4)}, rho=RADIUS)
    with states.at(None):
        assert_trees_equal(copies(module), wanted)
        assert not torch.equal(module.bias, states._kept["bias"])


class Quantised(torch.Tensor):
    """As torchao's states of 8 bits."""


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"exp_avg": torch.zeros(4, 8, device="meta")},
            r"'weight' in SGD is a Tensor float32 \(4, 8\) on meta, must be",
        ),
        ({"exp_avg": torch.zeros(2, 8)}, r"is a Tensor float32 \(2, 8\) on cpu, must be .* of shape \(4, 8\) on cpu"),
        ({"exp_avg": torch.zeros(4, 8, dtype=torch.uint8)}, r"is a Tensor uint8"),
        ({"exp_avg": torch.zeros(4, 8).as_subclass(Quantised)}, r"is a Quantised float32"),
        (
            {"state1": torch.zeros(4, 8), "qmap1": torch.zeros(9)},
            r"SGD keeps no momentum of 'weight', but state1, qmap1: ",
        ),
    ],
    ids=["device", "shape", "dtype", "kind", "name"],
)
def test_a_momentum_that_cannot_be_read_is_told_at_the_next_block(state, said):
    module, states = given(**state)
    before = copies(module)
    with pytest.raises(ValueError, match=f"{said}.*climb needs an optimizer that keeps exp_avg"), states.at(None):
        raise AssertionError("the pass has begun")
    assert_trees_equal(copies(module), before)


def on(kind, **options):
    return lambda module: kind(module.parameters(), lr=LR, **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (on(torch.optim.SGD), "SGD keeps no momentum, momentum is 0: climb needs an optimizer that keeps exp_avg"),
        (on(torch.optim.RMSprop), "RMSprop keeps no momentum, momentum is 0"),
        (on(torch.optim.Adam, betas=(0.0, 0.9)), r"Adam keeps no momentum, betas is \(0\.0, 0\.9\)"),
        (on(torch.optim.Adagrad), "Adagrad keeps no momentum of 'layers.0.0.weight', but sum"),
        (lambda module: None, "optimizer is a NoneType, must be a torch.optim.Optimizer or a list of them"),
        (lambda module: "adamw", "optimizer is a str, must be a torch.optim.Optimizer"),
        (lambda module: [], r"does not have 4 of 4 trained parameters \(layers.0.0.weight, "),
        (
            lambda module: muon(module)[:1],
            r"2 of 4 trained parameters \(layers.0.0.bias, .*give all optimizers as a list",
        ),
        (lambda module: adamw(net()), "does not have 4 of 4 trained parameters"),
    ],
    ids=["sgd", "rmsprop", "beta1", "adagrad", "none", "name", "empty", "part", "other"],
)
def test_optimizers_without_a_momentum_are_told_before_the_first_step(make, said):
    with pytest.raises(ValueError, match=said):
        climbing(make)


def test_an_optimizer_and_a_radius_without_a_climb_are_told():
    module = net()
    for options, said in (
        ({"rho": 0.5}, "rho is 0.5, the radius of a climb, and there is none: give climb too, or leave rho out"),
        (
            {"optimizer": adamw(module)},
            "optimizer is for a climb, and there is none: give climb too, or leave optimizer",
        ),
    ):
        with pytest.raises(ValueError, match=f"^SimulatedWeights: {said}"):
            SimulatedWeights.of(module, **options)
    assert SimulatedWeights.of(module, optimizer=adamw(module), climb="clean")._climbs.rho == 0.5


@pytest.mark.parametrize(("climb", "rho", "said"), [("all", 0.5, "climb is 'all', choose"), ("clean", -1, "rho is -1")])
def test_other_values_of_climb_and_rho_are_told(climb, rho, said):
    with pytest.raises(ValueError, match=said):
        climbing(climb=climb, rho=rho)


def test_adafactor_and_shards_of_an_optimizer_are_told():
    (p,) = leaves = list(nn.Linear(2, 1, bias=False).parameters())
    optimizer = adamw(nn.ParameterList(leaves))
    optimizer.param_groups[0] |= {"beta1": None}
    assert ascent.optimizer_problems(optimizer, {"w": p})[0].startswith("AdamW keeps no momentum, beta1 is None: climb")
    optimizer.consolidate_state_dict = lambda: None  # as ZeroRedundancyOptimizer
    assert ascent.optimizer_problems(optimizer, {"w": p})[0].startswith("AdamW keeps a part of the momentum in each")


@pytest.mark.parametrize("options", [{"switch": False}, {"starts": {"w": 0}}])
def test_shards_do_not_climb(options):
    weight, climbs = torch.zeros(3, requires_grad=True), Ascent(lambda: None, "clean", 0.5)
    with pytest.raises(ValueError, match="climbs needs switch=True and starts=None"):
        SimulatedWeights({"w": weight}, {"w": torch.zeros(3)}, climbs=climbs, **options)
