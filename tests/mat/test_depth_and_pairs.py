"""SMAT with alpha by depth, and with antithetic pairs of draws, against the definitions."""

import pytest
import torch

from smat_fn import draw, lora, optim, random, simulate, testing
from smat_fn.grad import ModuleLoss
from smat_fn.mat import smat
from smat_fn.simulation import materialise, opposite, participation, reweight
from smat_fn.where import by_depth

SHAPES = {"layers.0.w": (8, 4), "layers.1.w": (4, 6), "layers.2.w": (6,), "head": (3,)}
KEY = random.key(9)
BASE, PARAMS = (testing.random_tree(seed, SHAPES) for seed in (0, 1))
HYPER = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.4}


def states(count, **options):
    """The states at which the loss is evaluated, of parameters that no step changes."""
    seen = []

    def loss(params, batch):
        seen.append({path: leaf.detach().clone() for path, leaf in params.items()})
        return sum(leaf.sum() for leaf in params.values()), None

    method = smat.build(loss, optim.adam(0.0), BASE, **HYPER | options)
    state = method.init(PARAMS)
    for _ in range(count):
        state, _ = method.update(KEY, state, None)
    return seen


def test_alpha_of_every_leaf_is_linear_in_its_block():
    drawn = draw(KEY, **HYPER, factors=by_depth(SHAPES, 0.5, 1.5))
    shown = participation(drawn, PARAMS, where=lambda path, leaf: False)
    want = {"layers.0.w": 0.5, "layers.1.w": 1.0, "layers.2.w": 1.5, "head": 0.5}
    for path, factor in want.items():
        assert torch.equal(shown[path], (drawn.scale * factor).expand(SHAPES[path]))
    # each leaf as if it were drawn alone, with that alpha
    for path, factor in want.items():
        alone = drawn._replace(scale=drawn.scale * factor, factors={})
        own, origin = {path: PARAMS[path]}, {path: BASE[path]}
        both = simulate(PARAMS, BASE, drawn), reweight(PARAMS, drawn)
        for found, expected in zip(both, (simulate(own, origin, alone), reweight(own, alone)), strict=True):
            assert torch.equal(found[path], expected[path])
    mask, _ = materialise(drawn, PARAMS)
    assert {float(value) for leaf in mask.values() for value in leaf.unique()} == {0.0, 2.0}


@pytest.mark.parametrize("given", [(0.5, 1.5), by_depth(SHAPES, 0.5, 1.5), by_depth(SHAPES, 0.5, 1.5).get])
def test_a_step_takes_its_gradient_at_alpha_by_depth(given):
    (seen,) = states(1, alpha_depth=given, period=1)
    drawn = draw(random.fold_in(KEY, 0), **HYPER, factors=by_depth(SHAPES, 0.5, 1.5))
    testing.assert_trees_equal(seen, simulate(PARAMS, BASE, drawn))
    testing.assert_trees_equal(states(1, alpha_depth=(1.0, 1.0), period=1)[0], states(1, period=1)[0])


def test_depth_alone_is_not_off():
    off = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0, "period": 1}
    (seen,) = states(1, alpha_depth=(0.0, 1.0), **off)
    middle = BASE["layers.1.w"] + 0.5 * (PARAMS["layers.1.w"] - BASE["layers.1.w"])
    assert torch.equal(seen["layers.1.w"], middle)
    assert torch.equal(seen["layers.0.w"], BASE["layers.0.w"])
    assert torch.equal(seen["head"], BASE["head"])


def test_depth_of_the_merged_weight_of_adapters():
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))})
    base = {path: p.detach() for path, p in module.named_parameters()}
    saved = ("layers.0.bias", "layers.1.bias")
    adapters = lora.Lora(tuple(path for path in base if path.endswith("weight")), 2, 4.0, saved=saved)
    seen, biases = [], []

    def loss(module, batch):  # a weight is formed for its layer's forward pass: read it off the layer's output
        outputs = [layer(torch.eye(4)) for layer in module["layers"]]
        seen.append([(out - layer.bias).detach().T for out, layer in zip(outputs, module["layers"], strict=True)])
        biases.extend(layer.bias.detach() for layer in module["layers"])
        return sum(out.sum() for out in outputs), None

    options = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0, "period": 1}
    method = lora.build(ModuleLoss(module, loss), optim.adam(0.1), base, adapters, alpha_depth=(0.0, 1.0), **options)
    start = testing.random_tree(3, {path: leaf.shape for path, leaf in lora.init(KEY, base, adapters).items()})
    method.update(KEY, method.init(start), None)
    merged = lora.expand(start, base, adapters)
    torch.testing.assert_close(seen[0][0], base["layers.0.weight"])
    torch.testing.assert_close(seen[0][1], merged["layers.1.weight"])
    assert not torch.allclose(seen[0][1], base["layers.1.weight"])
    testing.assert_trees_close(biases, [base["layers.0.bias"], start["layers.1.bias"]], atol=1e-6)


@pytest.mark.parametrize("offload", ["cpu", None])
def test_depth_and_pairs_wherever_the_base_is(offload):
    options = {"alpha_depth": (0.5, 1.5), "antithetic": True, "period": 2}
    found = states(4, offload=offload, **options)
    first = draw(random.fold_in(KEY, 1), **HYPER, factors=by_depth(SHAPES, 0.5, 1.5))
    for seen, drawn in zip(found[1::2], (first, opposite(first)), strict=True):
        testing.assert_trees_equal(seen, simulate(PARAMS, BASE, drawn))


@pytest.mark.parametrize("period", [1, 3])
def test_pairs_of_simulated_steps_share_a_key(period):
    found = states(6 * period, antithetic=True, period=period, drop_prob=0.3)[period - 1 :: period]
    for pair in range(3):
        drawn = draw(random.fold_in(KEY, 2 * pair * period + period - 1), **HYPER | {"drop_prob": 0.3})
        testing.assert_trees_equal(found[2 * pair], simulate(PARAMS, BASE, drawn))
        testing.assert_trees_equal(found[2 * pair + 1], simulate(PARAMS, BASE, opposite(drawn)))
    plain = states(6 * period, period=period, drop_prob=0.3)[period - 1 :: period]
    testing.assert_trees_equal(found[0], plain[0])


@pytest.mark.parametrize("noise", ["uniform", "gaussian", "laplace"])
def test_the_mean_of_a_pair_is_the_state_without_mask_and_noise(noise):
    wide = {path: leaf.double() for path, leaf in PARAMS.items()}
    base = {path: leaf.double() for path, leaf in BASE.items()}
    one = draw(KEY, **HYPER, noise=noise)
    other = opposite(one)
    (mask, epsilon), (mask_, epsilon_) = (materialise(drawn, wide) for drawn in (one, other))
    pair = simulate(wide, base, one), simulate(wide, base, other)
    for path, theta in wide.items():
        assert torch.equal(epsilon[path], -epsilon_[path])
        assert torch.equal(mask[path] + mask_[path], torch.full_like(theta, 2.0))
        mean = base[path] + one.scale.double() * (theta - base[path])
        torch.testing.assert_close((pair[0][path] + pair[1][path]) / 2, mean, rtol=0, atol=1e-14)
    testing.assert_trees_equal(simulate(wide, base, opposite(other)), pair[0])


@pytest.mark.parametrize("prob", [0.1, 0.5, 0.8, 65535 / 65536])
def test_the_opposite_mask_drops_as_often_and_elsewhere(prob):
    like = {"w": torch.zeros(1 << 16)}
    one = draw(KEY, alpha_min=1.0, drop_prob=prob, sigma=0.0)
    dropped, other = (materialise(drawn, like)[0]["w"] == 0 for drawn in (one, opposite(one)))
    assert abs(int(dropped.sum()) - int(other.sum())) < 600
    assert int((dropped & other).sum()) == 0 if prob <= 0.5 else not bool((~dropped & ~other).any())
    # fields are read from the other end, so that 65536 - T counts among those that are dropped
    fields = random.bits(random.leaf_streams(KEY, ["w"])[0, 0], 1 << 16)
    assert torch.equal(other, fields >= 65536 - int(random.threshold(prob)))


def test_factors_that_cannot_be_had_are_refused():
    for bad, text in (
        ({"layers.9": 1.0}, "alpha_depth names 'layers.9', which no parameter here has"),
        ({"head": float("inf")}, "factors of alpha must be finite: head inf"),
        ((0.5, float("nan")), "high is nan, must be finite"),
    ):
        with pytest.raises(ValueError, match=text):
            smat.build(lambda params, batch: None, optim.adam(0.1), BASE, alpha_depth=bad)
    with pytest.raises(ValueError, match="no two blocks"):
        smat.build(lambda params, batch: None, optim.adam(0.1), {"w": torch.ones(2)}, alpha_depth=(0.5, 1.0))
    with pytest.raises(ValueError, match="factors of alpha must be finite: w nan"):
        draw(KEY, **HYPER, factors={"w": float("nan")})
    with pytest.raises(ValueError, match=r"factors is \[2\.0\]: give a mapping"):
        draw(KEY, **HYPER, factors=[2.0])
