"""A step inside a user's program: autocast, modules whose weights change, losses of other weights."""

import re

import pytest
import torch
from torch import nn

from smat_fn import SimulatedWeights, draw, lora, optim, random, simulate, value_and_grad
from smat_fn.grad import ModuleLoss
from smat_fn.mat import finetune, l2sp, orthoreg, smat
from smat_fn.mat import weights as mat_weights
from smat_fn.mat.step import as_tensors
from smat_fn.types import Method, Optimizer
from smat_fn.where import never

from .test_conformance import METHODS, assert_bits, bowl, method, parameters, randn, run

KEY, STEPS = random.key(3), 4
BATCH = torch.linspace(-1, 1, 12).view(3, 4)
OPTIONS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def net():
    torch.manual_seed(0)
    return Net()


def squares(module, batch):
    return (module(batch).float() ** 2).mean(), None


def copies(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def rounded():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_inside_autocast_is_that_of_autocast_in_the_loss_alone(name):
    # the loss has no operation that autocast rounds: all of the difference would be the method's
    data = [randn(seed=i) for i in range(STEPS)]
    for hyper in METHODS[name][0].values():
        update = method(name, bowl, optim.muon(1e-2, rest=optim.adam(1e-2)), parameters(), **hyper, max_grad_norm=0.5)
        want, _ = run(update, parameters(seed=7), data)
        with rounded():
            got, _ = run(update, parameters(seed=7), data)
        assert_bits(got.params, want.params)


def test_adapters_inside_autocast_are_merged_in_float32():
    module = net()
    base = copies(module)
    adapter = lora.Lora(lora.linear_paths(module)[0], rank=2)
    moved = {name: leaf + 0.1 for name, leaf in lora.init(KEY, base, adapter).items()}

    def loss(module, batch):
        with rounded():
            return squares(module, batch)

    def expanded(adapters, batch):
        return ModuleLoss(module, loss)({**base, **lora.expand(adapters, base, adapter)}, batch)

    want = value_and_grad(expanded, engine="autograd")(moved, BATCH)
    got = value_and_grad(lora.with_lora(ModuleLoss(module, loss), base, adapter), engine="autograd")(moved, BATCH)
    assert torch.equal(got[0][0], want[0][0])
    assert_bits(got[1], want[1])


@pytest.mark.parametrize("switch", [True, False])
def test_weights_that_are_switched_inside_autocast_are_those_that_run(switch):
    module = net()
    base = copies(module)
    weights = SimulatedWeights(dict(module.named_parameters()), base, switch=switch)
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.5)
    with weights.at(drawn), rounded():
        want = squares(module, BATCH)[0].item()
    with rounded():
        clean = squares(module, BATCH)[0].item()
        with weights.at(drawn):
            assert squares(module, BATCH)[0].item() == want != clean
            if switch:
                with weights.away():
                    with weights.away():  # as a model that generates by a part of its own
                        pass
                    assert squares(module, BATCH)[0].item() == clean
                assert squares(module, BATCH)[0].item() == want
        assert squares(module, BATCH)[0].item() == clean


@pytest.mark.parametrize("switch", [True, False])
def test_a_write_to_weights_that_hold_a_simulated_state_is_no_silent_loss(switch):
    module = net()
    base = copies(module)
    weights = SimulatedWeights(dict(module.named_parameters()), base, switch=switch)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    squares(module, BATCH)[0].backward()
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.5)
    told = pytest.raises(ValueError, match=r"written to while they held theta~ \(layers\.0\.0\.weight, layers")
    with told, weights.at(drawn):
        optimizer.step()
    assert_bits(copies(module), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_through_data_are_found_in_later_steps_too(dtype):
    module = net().to(dtype)
    params = dict(module.named_parameters())
    base, weights = copies(module), SimulatedWeights(params, copies(module))

    def step(*written):
        with weights.at(draw(KEY, **OPTIONS)):
            for name in written:
                largest = params[name].data.abs().view(-1).argmax()
                params[name].data.view(-1)[largest] *= 1.01  # hidden by the norm's rounding to bfloat16

    with pytest.raises(ValueError, match=r"held theta~ \(layers\.0\.0\.weight\)"):
        step("layers.0.0.weight")  # the first step, which does not count, compares all
    for _ in range(3):
        step()
    with pytest.raises(ValueError, match="written to while they held theta~"):
        step(*params)
    with pytest.raises(ValueError, match=r"held theta~ \(layers\.1\.0\.bias\)"):
        [step("layers.1.0.bias") for _ in params]
    assert_bits(copies(module), base)


def test_a_device_is_not_waited_for_at_the_end_of_a_pass_but_its_write_is_found_at_the_next(monkeypatch):
    monkeypatch.setattr(mat_weights, "_at_hand", lambda norms: False)  # as on a GPU
    module = net()
    params = dict(module.named_parameters())
    base, weights = copies(module), SimulatedWeights(params, copies(module))
    for _ in params:
        with weights.at(draw(KEY, **OPTIONS)):
            pass
    with monkeypatch.context() as inside, weights.at(draw(KEY, **OPTIONS)):
        inside.setattr(torch, "equal", None)  # reading a number is an error
        for p in params.values():
            p.data.mul_(1.01)
    assert_bits(copies(module), base)
    with pytest.raises(ValueError, match="written to while they held theta~"), weights.at(draw(KEY, **OPTIONS)):
        raise AssertionError("the pass has begun")
    assert_bits(copies(module), base)
    with weights.at(draw(KEY, **OPTIONS)):  # once
        pass


@pytest.mark.parametrize("way", ["switched", "copied", "host"])
def test_a_draw_that_is_used_again_is_of_the_weights_of_now(way):
    module = net()
    params, base, drawn = dict(module.named_parameters()), copies(module), draw(KEY, **OPTIONS)
    weights = SimulatedWeights(params, base, switch=way != "copied", slices=1 if way == "host" else None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        wanted = simulate(copies(module), base, drawn)
        for _ in range(2):
            with weights.at(drawn):
                assert_bits(copies(module), wanted)
        squares(module, BATCH)[0].backward()
        optimizer.step()


class Interrupted(dict):
    """Parameters; the user interrupts the program once, when the first one is restored."""

    waiting = None

    def items(self):
        for i, (name, p) in enumerate(super().items()):
            if i == 1 and self.waiting is not None and torch.equal(self[next(iter(self))], self.waiting):
                self.waiting = None
                raise KeyboardInterrupt
            yield name, p


@pytest.mark.parametrize("switch", [True, False])
def test_an_interrupt_between_two_parameters_leaves_no_simulated_one(switch):
    module = net()
    params, base = Interrupted(module.named_parameters()), copies(module)
    weights = SimulatedWeights(params, base, switch=switch)
    with pytest.raises(KeyboardInterrupt), weights.at(draw(KEY, **OPTIONS)):
        params.waiting = next(iter(base.values()))
    assert params.waiting is None
    assert_bits(copies(module), base)


def test_weights_that_are_no_longer_the_models_are_told():
    module = torch.nn.Linear(2, 2)
    weights = dict(module.named_parameters())
    states = SimulatedWeights(weights, copies(module))
    module.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, assign=True)
    drawn = draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.1)
    with states.at(drawn):
        module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="grads holds no gradient: no parameter has one"):
        states.reweight({path: p.grad for path, p in weights.items() if p.grad is not None}, drawn)
    with pytest.raises(ValueError, match="grads holds no gradient: no parameter has one"):
        states.reweight({path: p.grad for path, p in weights.items()}, drawn)


@pytest.mark.parametrize("switch", [True, False])
def test_a_clean_step_inside_at_is_at_the_weights(switch):
    module = net()
    base, drawn = copies(module), draw(KEY, **OPTIONS)
    weights = SimulatedWeights(dict(module.named_parameters()), base, switch=switch)
    for given in (None, drawn, None):
        with weights.at(given):
            assert torch.equal(module.layers[0][0].weight, base["layers.0.0.weight"]) == (given is None)
        assert_bits(copies(module), base)
    with pytest.raises(ValueError, match=r"draw is a float, must be what smat_fn\.draw returns, or None"):  # noqa: SIM117
        with SimulatedWeights(dict(module.named_parameters()), base).at(0.5):
            pass


def test_weights_that_cannot_be_replaced_are_refused_at_once():
    module = net()
    params, base = dict(module.named_parameters()), copies(module)
    with pytest.raises(ValueError, match=r"parameters is a generator, must be a dict"):
        SimulatedWeights(module.named_parameters(), base)
    with pytest.raises(ValueError, match=r"'layers.0.0.weight' and 'tied' share memory, which theta~ would separate"):
        SimulatedWeights({**params, "tied": torch.nn.Parameter(params["layers.0.0.weight"].data)}, base)
    with pytest.raises(ValueError, match=r"where is a type: give a function"):
        SimulatedWeights(params, base, where=torch.nn.Linear)
    with pytest.raises(ValueError, match=r"where is a \w+: give a function"):
        SimulatedWeights(params, base, where=module)
    for slices in (0, -1, 1.5):
        with pytest.raises(ValueError, match=rf"slices is {slices}, must be an integer of at least 1"):
            SimulatedWeights(params, base, slices=slices)
    for options in ({"switch": False}, {"starts": dict.fromkeys(params, 0)}):
        with pytest.raises(ValueError, match="slices needs switch=True and starts=None: leave it out"):
            SimulatedWeights(params, base, slices=1, **options)


def test_weights_of_every_kind_are_taken():
    module, drawn = net(), draw(KEY, **OPTIONS)
    base = {"w": torch.ones(3), "x": torch.ones(3)}
    weights = torch.nn.ParameterDict({"w": torch.zeros(3), "x": torch.zeros(3)})
    with SimulatedWeights(weights, base).at(drawn):
        assert weights["w"].any()
    assert not weights["w"].any()
    with SimulatedWeights(dict(module.named_parameters()), copies(module), where=never).at(drawn):
        pass  # a part of a model that Mask does not act on
    freed = {name: torch.nn.Parameter(torch.ones(3)) for name in "ab"}
    for p in freed.values():
        p.untyped_storage().resize_(0)  # as code that shards weights by itself leaves them between two passes
    SimulatedWeights(freed, {name: torch.ones(3) for name in "ab"})


def test_a_masked_set_of_other_names_is_told():
    module = net()
    weights = SimulatedWeights(
        dict(module.named_parameters()), copies(module), where=lambda name, _: name.startswith("module.")
    )
    with pytest.raises(ValueError, match=r"drop_prob is 0.5, but Mask has nothing to act on.*where\.never"):  # noqa: SIM117
        with weights.at(draw(KEY, **OPTIONS)):
            pass
    with SimulatedWeights(dict(module.named_parameters()), copies(module), where=lambda *_: False).at(
        draw(KEY, **{**OPTIONS, "drop_prob": 0.0})
    ):
        pass


@pytest.mark.parametrize("half", ["entering", "leaving"])
def test_a_handler_between_two_parameters_leaves_no_simulated_state(half):
    module = net()
    params, base = dict(module.named_parameters()), copies(module)
    weights, drawn, seen = SimulatedWeights(params, base), draw(KEY, **OPTIONS), []

    class Interrupted(dict):
        """Signals come between two of its items."""

        def items(self):
            for number, item in enumerate(super().items()):
                if number == 1 and weights._kept:
                    with weights.away():
                        seen.append(copies(module))
                yield item

    def interrupt():
        weights._parameters = Interrupted(params)

    if half == "entering":
        interrupt()
    with weights.at(drawn):
        at_state = copies(module)
        interrupt()
    assert seen
    for own in seen:
        assert_bits(own, base)
    assert not torch.equal(at_state["layers.0.0.weight"], base["layers.0.0.weight"])
    assert_bits(copies(module), base)
    with SimulatedWeights(params, base).at(drawn):
        assert_bits(copies(module), at_state)


@pytest.mark.parametrize("switch", [True, False])
def test_a_base_that_is_the_weights_themselves_is_refused(switch):
    params = dict(net().named_parameters())
    base = {name: p.detach().clone() if name.endswith("bias") else p.detach() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"with the parameters \(layers\.0\.0\.weight, layers\.1\.0\.weight\), so"):
        SimulatedWeights(params, base, switch=switch)


def test_all_micro_batches_of_the_first_simulated_step_are_compared():
    module = net()
    weights, drawn = SimulatedWeights(dict(module.named_parameters()), copies(module)), draw(KEY, **OPTIONS)
    for _ in range(2):
        with weights.at(drawn):
            pass
    with pytest.raises(ValueError, match=r"held theta~ \(layers\.0\.0\.bias\)"), weights.at(drawn):
        module.layers[0][0].bias.data += 1


def counted(method):
    """The method with states whose steps are tensors."""
    return Method(lambda params: as_tensors(method.init(params)), method.update)


BASES = {
    "smat": lambda loss, base: smat.build(loss, optim.adam(1e-2), base, period=2),
    **{
        offload: lambda loss, base, offload=offload: smat.build(loss, optim.adam(1e-2), base, period=1, offload=offload)
        for offload in ("recompute", "cpu", "stream")
    },
    "mixed": lambda loss, base: smat.build(loss, optim.adam(1e-2), base, lam=0.5),
    **{
        f"sigma of the {of}": lambda loss, base, of=of: smat.build(
            loss, optim.adam(1e-2), base, period=1, sigma=0.5, sigma_of=of
        )
        for of in ("update", "leaf")
    },
    "steps as tensors": lambda loss, base: counted(smat.build(loss, optim.adam(1e-2), base, period=2)),
    "l2sp": lambda loss, base: l2sp.build(loss, optim.adam(1e-2), base),
    "orthoreg": lambda loss, base: orthoreg.build(loss, optim.adam(1e-2), base),
}


@pytest.mark.parametrize("name", BASES)
def test_a_base_that_a_module_shares_and_changes_is_refused(name):
    module = net()
    base = dict(module.named_parameters())  # not a copy
    own, unused = (BASES[name](ModuleLoss(module, squares), base) for _ in range(2))
    state, _ = own.update(KEY, own.init(base), BATCH)
    module.load_state_dict(state.params)  # to evaluate it, say
    for method_of_before in (own, unused):
        with pytest.raises(ValueError, match=r"base was written to since the method was built \(layers\.0\.0\.weight"):
            method_of_before.update(KEY, state, BATCH)


def test_a_base_that_a_module_shares_and_changes_is_refused_for_adapters():
    module = net()
    base = dict(module.named_parameters())
    adapter = lora.Lora(lora.linear_paths(module)[0], rank=2)
    start, loss = lora.init(KEY, base, adapter), ModuleLoss(module, squares)
    own = lora.build(loss, optim.adam(1e-2), base, adapter, period=2)
    clean = [
        finetune.build(lora.with_lora(one, base, adapter), optim.adam(1e-2), start)
        for one in (loss, lambda params, batch: loss(params, batch))
    ]
    state, _ = own.update(KEY, own.init(start), BATCH)
    module.load_state_dict({**base, **lora.expand(state.params, base, adapter)})
    for method_of_before in (own, *clean):
        with pytest.raises(ValueError, match="base was written to since the method was built"):
            method_of_before.update(KEY, state, BATCH)


def test_a_loss_at_the_modules_own_weights_is_refused():
    module = net()
    base = copies(module)
    own = finetune.build(lambda params, batch: squares(module, batch), optim.adam(1e-2), base)
    with pytest.raises(ValueError, match="has a gradient, but in none of the 4 parameters given to it"):
        own.update(KEY, own.init(base), BATCH)


def test_a_loss_that_writes_into_its_parameters_is_refused():
    module = nn.Sequential(nn.Embedding(4, 4, max_norm=0.1), nn.Linear(4, 4))
    base = copies(module)
    own = finetune.build(ModuleLoss(module, squares), optim.adam(1e-2), base)
    with pytest.raises(ValueError, match=r"wrote into the parameters given to it \(0\.weight\)"):
        own.update(KEY, own.init(base), torch.arange(3))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_to_train_is_refused(name):
    frozen = {name: p for name, p in net().requires_grad_(False).named_parameters() if p.requires_grad}
    with pytest.raises(ValueError, match="params has no leaf"):
        method(name, bowl, optim.adam(1e-2), frozen).init(frozen)


def test_a_predicate_may_return_what_is_true_or_not():
    module = net()
    base = copies(module)

    def trained(where):
        own = smat.build(ModuleLoss(module, squares), optim.adam(1e-2), base, where=where, period=1)
        return own.update(KEY, own.init({name: leaf + 1 for name, leaf in base.items()}), BATCH)[0].params

    assert_bits(trained(lambda path, leaf: re.search(r"weight", path)), trained(lambda path, leaf: "weight" in path))


@pytest.mark.parametrize("name", ["max_grad_norm", "rho", "lam"])
def test_a_number_of_another_type_is_named(name):
    base = copies(net())
    with pytest.raises(ValueError, match="is '1'"):
        smat.build(bowl, optim.adam(1e-2), base, **{name: "1"})


def test_parameters_in_the_place_of_a_state_are_told():
    base = copies(net())
    with pytest.raises(ValueError, match="state is a dict: give what the method's init or update returned"):
        smat.build(bowl, optim.adam(1e-2), base).update(KEY, base, BATCH)


def test_a_state_is_of_the_leaves_of_the_method_in_whatever_tree():
    trees = [{"0.a": torch.ones(2)}, {"0": {"a": torch.ones(2)}}, [{"a": torch.ones(2)}], ({"a": torch.ones(2)},)]
    for base in trees:
        own = finetune.build(bowl, optim.adam(1e-2), base)
        for params in trees:
            state, _ = own.update(KEY, own.init(params), 0.0)
            assert type(state.params) is type(params)
        for other in ([{"a": torch.ones(2)}, torch.ones(2)], {"0.a": torch.ones(2), "1": torch.ones(2)}):
            state = finetune.build(bowl, optim.adam(1e-2), other).init(other)
            with pytest.raises(ValueError, match=r"state is of other parameters than the method \('1' in one of them"):
                own.update(KEY, state, 0.0)


def sgd(step):
    return Optimizer(lambda params: (), lambda grads, state, params: step(grads, params))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda g, p: ({n: w.sub_(0.1 * g[n]) for n, w in p.items()}, ()),
            r"wrote into the parameters given to it \(w\)",
        ),
        (
            lambda g, p: ({"w": p["w"].double()}, ()),
            "leaf 'w' is float32 before the optimizer's update and float64 after",
        ),
        (lambda g, p: ({"w": p["w"].sum()}, ()), r"has shape \(\) in what the optimizer's update returned but \(2,\)"),
        (lambda g, p: ({}, ()), "what the optimizer's update returned lacks parameter 'w'"),
        (lambda g, p: {"w": p["w"] - 0.1 * g["w"]}, r"update returned a dict: return \(params, state\)"),
    ],
)
def test_an_optimizer_of_your_own_that_is_not_pure_or_gives_other_parameters_is_refused(step, message):
    base = {"w": torch.ones(2)}
    own = finetune.build(lambda params, batch: (params["w"].square().sum(), None), sgd(step), base)
    with pytest.raises(ValueError, match=message):
        own.update(KEY, own.init(base), None)
