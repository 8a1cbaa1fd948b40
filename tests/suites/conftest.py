import pytest
import torch

from smat_fn import random
from smat_fn.data.batching import split_rows
from smat_fn.suites import load_suite
from smat_fn.suites.joint import joint

FEW = {"pretrain_steps": 2, "pretrain_batch": 32, "pretrain_warmup": 1, "images_per_task": 120}


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """``few(seed)``: the digits suite after a few pretraining steps, through a cache of this run."""

    def load(seed=0, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SMAT_FN_CACHE", str(folder))
            return load_suite("digits", seed=seed, **FEW | options)

    folder = tmp_path_factory.mktemp("cache")
    return load


@pytest.fixture(scope="session")
def suite(few):
    return few()


@pytest.fixture(scope="session")
def joint_of():
    """``joint_of(suite)``: its first two tasks as one, each of whose steps has the batch and the loss of its task."""

    def check(suite):
        together, steps = joint(suite, dict.fromkeys(suite.tasks, 2), seed=5), []
        for step in range(4):
            task = suite.tasks[step % 2]
            batch = suite.batch(task, random.fold_in(random.key(5), task), step // 2)
            mine = together.batch("joint", random.key(0), step)
            value, _ = together.loss_fn("joint")(suite.base, mine)
            assert torch.equal(value, suite.loss_fn(task)(suite.base, batch)[0])
            parts = together.split(mine, 2)
            assert sum(part.weight for part in parts) == sum(
                part.weight for part in (suite.split or split_rows)(batch, 2)
            )
            steps.append(sum(float(together.loss_fn("joint")(suite.base, part)[0]) * w for part, w in parts))
            assert steps[-1] / sum(part.weight for part in parts) == pytest.approx(float(value), rel=1e-4)
        assert len(set(steps)) == 4
        return together

    return check
