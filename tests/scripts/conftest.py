"""One small digits suite, one FT run and one SMAT run on it, shared by all tests of this folder."""

from contextlib import contextmanager

import pytest
import torch

from smat_fn.checkpoint import fingerprint
from smat_fn.config import DIGITS, Training
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import digits, load_suite
from smat_fn.suites.digits_base import Examples

RECIPE = {"seed": 21, "pretrain_steps": 10, "images_per_task": 120}
SIX = Training(steps=6, lr=5e-4)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


_heads = {}


@contextmanager
def few_scored():
    """Suites inside have 64 dev and 64 test images, as searches score a hundred models, and make equal heads once."""
    true, class_means = digits.splits, digits.class_means

    def head(module, examples):
        made_of = fingerprint({**module.state_dict(), **examples._asdict()})
        if made_of not in _heads:
            _heads[made_of] = class_means(module, examples)
        return _heads[made_of].clone()

    def few(seed):
        parts = true(seed)
        return parts | {name: Examples(*(own[:64] for own in parts[name])) for name in ("dev", "test")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "splits", few)
        patch.setattr(digits, "class_means", head)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_scored():
    with few_scored():
        yield


@pytest.fixture(scope="session")
def suite(_own_cache):
    with few_scored():
        return load_suite("digits", progress=False, **RECIPE)


@pytest.fixture(scope="session")
def train(suite):
    """``train(out, name, ...)``: six steps of a method of the preset on every task."""

    def run(out, name="smat", *, method=None, suite=suite, tasks=suite.tasks, training=SIX, seed=21, **options):
        method = DIGITS.methods[name] if method is None else method
        around = {name: options.pop(name) for name in ("stop", "report") if name in options}
        return train_run(suite, method, training, RunOptions(out, tasks, seed, **options), **around)

    return run


@pytest.fixture(scope="session")
def runs(train, tmp_path_factory):
    """The folders of the two runs, to be read only."""
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in ("ft", "smat")}
    for name, folder in folders.items():
        train(folder, name)
    return folders
