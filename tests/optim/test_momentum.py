"""The momentum that methods climb along."""

from typing import Any, NamedTuple

import pytest
import torch

from smat_fn import optim, testing
from smat_fn.optim import momentum_of

PARAMS = testing.random_tree(0, {"w": (3, 2), "b": (2,)})
GRADS = testing.random_tree(1, {"w": (3, 2), "b": (2,)})


class Sgd(NamedTuple):
    momentum: Any
    step: int


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (optim.adam(0.1), {"w": 0.1, "b": 0.1}),
        (optim.chain(dict, optim.adamw(0.1, weight_decay=0.1, betas=(0.75, 0.9))), {"w": 0.25, "b": 0.25}),
        (optim.muon(0.1, rest=optim.adam(0.1), momentum=0.5), {"w": 0.5, "b": 0.1}),
    ],
    ids=["adam", "chain of adamw", "muon"],
)  # fmt: skip
def test_after_one_step_it_is_the_gradient_by_the_rate_of_the_mean(optimizer, rate):
    state = optimizer.init(PARAMS)
    assert all(not leaf.any() for leaf in momentum_of(state, PARAMS).values())
    _, state = optimizer.update(GRADS, state, PARAMS)
    found = momentum_of(state, PARAMS)
    assert list(found) == list(PARAMS)
    for path, leaf in found.items():
        torch.testing.assert_close(leaf, rate[path] * GRADS[path], rtol=1e-5, atol=1e-7)


def test_a_state_of_another_optimizer_has_it_in_a_field_of_that_name():
    nested = {"block": [{"w": PARAMS["w"]}, PARAMS["b"]]}
    found = momentum_of(Sgd(nested, 3), nested)
    assert found["block"][0]["w"] is PARAMS["w"]
    assert found["block"][1] is PARAMS["b"]


@pytest.mark.parametrize("state", [(), None, Sgd({"w": PARAMS["w"]}, 0)], ids=["none", "stateless", "of some leaves"])
def test_an_optimizer_without_one_is_refused(state):
    with pytest.raises(
        ValueError, match=r"keeps no momentum of [12] of 2 leaves, first '[wb]': take adam, adamw or muon"
    ):
        momentum_of(state, PARAMS)
