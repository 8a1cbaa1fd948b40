"""Imports of transformers run without garbage collection, which runs again after them."""

import gc
import sys
from types import ModuleType

import pytest

from smat_fn.models import tiny_vit
from smat_fn.models.pretrained import fetch
from smat_fn.random import key


@pytest.mark.parametrize("load", [lambda: tiny_vit(key(0)), lambda: fetch("model", "a model", "AutoModel")])
def test_transformers_is_imported_without_garbage_collection(load, monkeypatch):
    collected = []

    class Lazy(ModuleType):
        def __getattr__(self, name):
            collected.append(gc.isenabled())
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "transformers", Lazy("transformers"))
    with pytest.raises((ImportError, AttributeError)):
        load()
    assert collected
    assert not any(collected)
    assert gc.isenabled()
