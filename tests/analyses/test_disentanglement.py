"""The disentanglement error of models whose predictions are known at every point."""

import pytest
import torch

from smat_fn import random
from smat_fn.analyses import disentanglement, predictions
from smat_fn.types import Micro

POINTS = [(a, b) for a in (-1.0, 0.0, 0.5, 2.0) for b in (-1.0, 0.0, 0.5, 2.0)]


def normal(seed, *shape):
    return random.uniform(random.key(seed), shape, minval=-1.0, dtype=torch.float64)


def linear(params, batch):
    """A linear classifier; its aux are the logits."""
    return torch.tensor(0.0), batch[0] @ params["w"].T


def predictor(inputs):
    batches = {task: [Micro((x, None), len(x)) for x in own.split(5)] for task, own in inputs.items()}
    return predictions(dict.fromkeys(inputs, linear), batches)


@pytest.mark.parametrize("memory", [0, 1 << 24])
def test_updates_of_disjoint_subspaces_of_a_linear_model_do_not_meet(memory):
    masks = {"one": torch.tensor([1.0, 1.0, 0.0, 0.0]), "two": torch.tensor([0.0, 0.0, 1.0, 1.0])}
    base = {"w": normal(0, 3, 4)}
    inputs = {task: normal(place, 12, 4) * mask for place, (task, mask) in enumerate(masks.items(), 1)}
    experts = {
        task: {"w": base["w"] + 3 * normal(place, 3, 4) * mask} for place, (task, mask) in enumerate(masks.items(), 3)
    }
    predict = predictor(inputs)
    found = disentanglement(base, experts, predict, POINTS, memory=memory)
    assert found == [{"one": 0.0, "two": 0.0}] * len(POINTS)
    for task, expert in experts.items():  # though each expert predicts otherwise than base
        assert (predict(expert, task) != predict(base, task)).any()


@pytest.mark.parametrize("memory", [0, 1 << 24])
def test_two_experts_of_one_update_differ_by_what_the_other_adds(memory):
    # class 1 where w > x, so that w from p to q changes the inputs between them
    inputs = {
        "one": torch.arange(40, dtype=torch.float64) / 10 - 1.97,
        "two": torch.arange(20, dtype=torch.float64) / 5 - 1.93,
    }

    def threshold(params, batch):
        return None, torch.stack([batch, params["w"].expand(len(batch))], 1)

    predict = predictions(dict.fromkeys(inputs, threshold), {task: [Micro(own, 1.0)] for task, own in inputs.items()})
    base = {"w": torch.tensor(0.25, dtype=torch.float64)}
    experts = {task: {"w": torch.tensor(0.75, dtype=torch.float64)} for task in inputs}
    found = disentanglement(base, experts, predict, POINTS, memory=memory)
    for (a, b), shares in zip(POINTS, found, strict=True):
        both = 0.25 + 0.5 * (a + b)
        for task, own in (("one", a), ("two", b)):
            low, high = sorted((0.25 + 0.5 * own, both))
            expected = sum(low <= x < high for x in inputs[task].tolist()) / len(inputs[task])
            assert shares[task] == pytest.approx(expected), (a, b, task)
    assert found[POINTS.index((0.5, 2.0))] == {"one": pytest.approx(10 / 40), "two": pytest.approx(2 / 20)}


def test_logits_that_are_not_numbers_have_no_share_and_two_experts_are_required():
    base, inputs = {"w": torch.ones(2, 1)}, {"one": torch.ones(3, 1), "two": torch.ones(2, 1)}
    experts = {"one": {"w": torch.full((2, 1), 3e38)}, "two": {"w": torch.ones(2, 1)}}

    def predict(params, task):
        logits = inputs[task] @ params["w"].T
        return predictions({task: lambda p, b: (None, logits - logits)}, {task: [Micro(None, 1.0)]})(params, task)

    (fine, lost) = disentanglement(base, experts, predict, [(1.0, 1.0), (4.0, 0.0)], memory=0)
    assert fine == {"one": 0.0, "two": 0.0}
    assert all(share != share for share in lost.values())
    with pytest.raises(ValueError, match=r"experts are 1 \('one'\): give two"):
        disentanglement(base, {"one": base}, predict, [(1.0, 1.0)])
    with pytest.raises(ValueError, match="experts are a list: give a mapping"):
        disentanglement(base, [base, base], predict, [(1.0, 1.0)])
