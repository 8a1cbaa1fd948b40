"""L2-SP and Mixout against their closed forms."""

import pytest
import torch

from smat_fn import random, testing
from smat_fn.mat import l2sp, mixout
from smat_fn.types import Optimizer

KEY = random.key(4)
BASE, PARAMS, BATCH = (testing.random_tree(seed, {"w": (40, 50)}, dtype=torch.float64) for seed in range(3))
SGD = Optimizer(lambda p: (), lambda g, s, p: ({"w": p["w"] - 0.5 * g["w"]}, s))


def test_l2sp_is_the_gradient_and_the_pull():
    method = l2sp.build(lambda p, batch: ((p["w"] * batch["w"]).sum(), {}), SGD, BASE, pull=0.25)
    state, info = method.update(KEY, method.init(PARAMS), BATCH)
    torch.testing.assert_close(
        state.params["w"], PARAMS["w"] - 0.5 * (BATCH["w"] + 0.25 * (PARAMS["w"] - BASE["w"])), rtol=1e-14, atol=1e-14
    )
    torch.testing.assert_close(info.loss, (PARAMS["w"] * BATCH["w"]).sum())


def test_mixout_of_no_number_is_named():
    with pytest.raises(ValueError, match="mixout: drop_prob is None, must lie in"):
        mixout.build(lambda params, batch: (params["w"].sum(), {}), SGD, BASE, drop_prob=None)


def test_mixout_is_its_sources_formula_and_passes_no_gradient_to_what_is_dropped():
    p, seen = 0.25, []

    def loss(params, batch):
        seen.append(params["w"].detach().clone())
        return (params["w"] * batch["w"]).sum(), {}

    method = mixout.build(loss, SGD, BASE, drop_prob=p)
    state, _ = method.update(KEY, method.init(PARAMS), BATCH)
    kept = seen[0] != BASE["w"]  # b of the source
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5
    mixed = (torch.where(kept, PARAMS["w"], BASE["w"]) - p * BASE["w"]) / (1 - p)
    torch.testing.assert_close(seen[0], mixed, rtol=1e-12, atol=1e-12)
    step = torch.where(kept, BATCH["w"] / (1 - p), 0.0)
    torch.testing.assert_close(state.params["w"], PARAMS["w"] - 0.5 * step, rtol=1e-12, atol=1e-12)
    again, _ = method.update(KEY, state, BATCH)
    assert (seen[1] != BASE["w"]).ne(kept).any()  # a new mask every step
    assert again.step == 2
