"""Trainer collects garbage in every run: the modules that it looks through are set aside first."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _modules_are_not_garbage():
    import accelerate  # noqa: F401
    import transformers.trainer  # noqa: F401

    gc.freeze()
