"""TaLoS against its closed form and against a sort; what is frozen never moves."""

import pytest
import torch

from smat_fn import optim, random, testing, tree
from smat_fn.mat import finetune, talos
from smat_fn.types import Micro, Optimizer

KEY = random.key(5)
SHAPES = {"blocks.0.w": (8, 4), "head": (4,), "scale": ()}
PARAMS = testing.random_tree(1, SHAPES)
SGD = Optimizer(lambda p: (), lambda g, s, p: (tree.tree_map(lambda x, y: x - 0.5 * y, p, g), s))
DECAYED = {
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.5),
    "muon": lambda: optim.muon(0.1, rest=optim.adamw(0.1, weight_decay=0.5), weight_decay=0.5),
    "averaged": lambda: optim.averaged(optim.adamw(0.1, weight_decay=0.5), optim.ema(0.5)),
}


def loss(params, batch):
    out = ((batch @ params["blocks.0.w"]).tanh() @ params["head"]) * params["scale"]
    return (out - 1).square().mean(), {}


def batches(count):
    return [testing.random_tree(seed, {"x": (6, 8)})["x"] for seed in range(20, 20 + count)]


def run(method, data, params=PARAMS):
    states = [method.init(params)]
    for batch in data:
        states.append(method.update(KEY, states[-1], batch)[0])
    return states


def joined(params):
    return torch.cat([leaf.reshape(-1) for leaf in tree.flatten(params).values()])


def test_two_rounds_on_a_quadratic_are_the_closed_form():
    # L = sum_j h_j theta_j^2 / 2 + c theta_0 theta_3: the second round sees theta_3's slope with a tenth of theta_0
    h, c = torch.tensor([4.0, 0.5, 3.0, 0.25], dtype=torch.float64), 1.0
    theta = torch.tensor([2.0, 1.0, -1.0, 0.5], dtype=torch.float64)

    def quadratic(params, factor):
        x = params["x"]
        return factor * ((h * x**2).sum() / 2 + c * x[0] * x[3]), {}

    def slope(x):
        return h * x + c * torch.stack([x[3], 0 * x[0], 0 * x[0], x[0]])

    method = talos.build(quadratic, SGD, {"x": theta}, sparsity=0.75, rounds=2, calibration=4)
    states = run(method, [1.0, 2.0, 3.0, 1.0, 0.5, 0.5], {"x": theta})
    # round 1: slopes 8.5, 0.5, -3, 2.125: the half with the smallest squares is left
    assert slope(theta).tolist() == [8.5, 0.5, -3.0, 2.125]
    assert states[1].scores["x"].tolist() == (slope(theta) ** 2).tolist()
    assert states[2].scores["x"].tolist() == [-1.0, 0.0, -1.0, 0.0]
    # round 2: slopes at [0.2, 1, -0.1, 0.5] are 0.5 and 0.325, where theta itself has 0.5 and 2.125
    shrunk = slope(theta * torch.tensor([0.1, 1.0, 0.1, 1.0], dtype=torch.float64))
    torch.testing.assert_close(states[3].scores["x"][1::2], (9 * shrunk**2)[1::2].float())
    assert states[4].scores["x"].tolist() == [-1.0, -1.0, -1.0, 0.0]
    for state in states[:5]:
        assert torch.equal(state.params["x"], theta)
    for state in states[5:]:
        theta = theta - torch.tensor([0.0, 0.0, 0.0, 0.25], dtype=torch.float64) * slope(theta)
        assert torch.equal(state.params["x"], theta)


@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_one_round_leaves_the_coordinates_that_a_sort_puts_first(sparsity):
    method = talos.build(loss, optim.adam(0.1), PARAMS, sparsity=sparsity, rounds=1, calibration=3)
    data = batches(3)
    left = joined(run(method, data)[-1].scores) == 0
    grads = [joined(torch.func.grad(loss, has_aux=True)(PARAMS, batch)[0]) for batch in data]
    order = torch.stack(grads).square().sum(0).argsort()
    assert sorted(left.nonzero().flatten().tolist()) == sorted(order[: int((1 - sparsity) * 37)].tolist())


def test_equal_scores_at_the_threshold_are_all_left():
    def slopes(params, batch):
        return (params["x"] * batch).sum(), {}

    start, slope = {"x": torch.ones(6)}, torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 1.0])
    method = talos.build(slopes, SGD, start, sparsity=0.6, rounds=1, calibration=1)
    assert run(method, [slope], start)[-1].scores["x"].tolist() == [-1.0, 0.0, 0.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", DECAYED)
def test_frozen_coordinates_never_move_and_the_others_do_as_in_fine_tuning_from_there(name, donate):
    options = {"sparsity": 0.5, "rounds": 2, "calibration": 4, "max_grad_norm": 0.01, "donate": donate}
    method, state = talos.build(loss, DECAYED[name](), PARAMS, **options), None
    state = method.init(PARAMS)
    for batch in batches(4):
        state, _ = method.update(KEY, state, batch)
        testing.assert_trees_equal(state.params, PARAMS)
    plain = finetune.build(loss, DECAYED[name](), PARAMS, max_grad_norm=0.01)
    (own,) = batches(5)[4:]
    copied = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    free, info = plain.update(KEY, finetune.State(*copied[:3]), own)
    state, own_info = method.update(KEY, state, own)
    frozen = joined(state.scores) < 0
    assert 10 < frozen.sum() < 30
    assert torch.equal(joined(state.params), torch.where(frozen, joined(PARAMS), joined(free.params)))
    assert (joined(free.params) != joined(PARAMS)).all()
    assert torch.equal(info.grad_norm, own_info.grad_norm)  # of the whole gradient
    for batch in batches(9)[5:]:
        state, _ = method.update(KEY, state, batch)
    assert torch.equal(joined(state.params)[frozen], joined(PARAMS)[frozen])
    assert (joined(state.params) != joined(PARAMS))[~frozen].all()
    if name == "averaged":
        assert torch.equal(joined(state.opt_state.average)[frozen], joined(PARAMS)[frozen])


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_run_that_is_resumed_in_calibration_is_bit_identical(at):
    options = {"sparsity": 0.6, "rounds": 2, "calibration": 4}
    whole = run(talos.build(loss, optim.adam(0.1), PARAMS, **options), batches(7))
    state, again = whole[at], talos.build(loss, optim.adam(0.1), PARAMS, **options)
    for batch in batches(7)[at:]:
        state, _ = again.update(KEY, state, batch)
    testing.assert_trees_equal(state.params, whole[-1].params)
    testing.assert_trees_equal(state.scores, whole[-1].scores)
    assert not torch.equal(joined(state.params), joined(PARAMS))


def test_micro_batches_have_the_scores_of_the_whole_batch():
    method = talos.build(loss, optim.adam(0.1), PARAMS, sparsity=0.5, rounds=1, calibration=2)
    (batch,) = batches(1)
    whole, parts = (run(method, [given])[-1].scores for given in (batch, [Micro(batch[:3]), Micro(batch[3:])]))
    testing.assert_trees_close(parts, whole, rtol=1e-5)


def test_fewer_steps_than_rounds_are_refused():
    with pytest.raises(ValueError, match="talos: calibration is 3, must be at least rounds, 4: every round takes a s"):
        talos.build(loss, SGD, PARAMS, calibration=3)


def test_sparsity_0_is_fine_tuning_from_the_first_step():
    ours = run(talos.build(loss, optim.adam(0.1), PARAMS, sparsity=0.0), batches(3))[-1]
    theirs = run(finetune.build(loss, optim.adam(0.1), PARAMS), batches(3))[-1]
    testing.assert_trees_equal(ours.params, theirs.params)
