"""Kernels for tests: on a CUDA device where there is one, else in Triton's interpreter; torch.empty gives NaN."""

import os
import sys
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

# as in tests/conftest.py, whose function is called later than this file is imported where pytest is given this folder
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton.language as tl
from triton.runtime import interpreter

from smat_fn import ops, random, simulate
from smat_fn.ops import launch, library
from smat_fn.ops.cpu import Numbers
from smat_fn.simulation import draw, reweight
from smat_fn.testing import random_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def _compiler_knows_torch():
    """torch.compile lists torch's functions at its first use: that must not happen while some are replaced."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))


@pytest.fixture(scope="session", autouse=True)
def _replaced_once():
    """Triton's interpreter replaces triton.language at each call of a function inside a kernel, a third of its time.

    Here it does so at the first one of a launch; the others find it replaced.
    """
    replace, replaced = interpreter._patch_lang, set()

    def once(fn):
        modules = frozenset(id(thing) for thing in fn.__globals__.values() if thing is tl or thing is tl.core)
        if modules in replaced:
            return interpreter._LangPatchScope()
        scope, launch = replace(fn), not replaced
        replaced.add(modules)
        if launch:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(interpreter, "_LangPatchScope"):  # not in older versions
            patch.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture(autouse=True)
def _poison(_compiler_knows_torch, monkeypatch):
    """Memory that smat_fn allocates without a value holds NaN, or a number that no result has."""

    def poisoned(allocate):
        def inner(*args, **kwargs):
            memory = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("smat_fn."):
                memory.fill_(float("nan") if memory.is_floating_point() else 0x5A5A5A5A & torch.iinfo(memory.dtype).max)
            return memory

        return inner

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


class Case(NamedTuple):
    """theta, theta_0 and a draw; which leaves are masked, and where they start."""

    params: dict
    base: dict
    drawn: object
    masked: list
    starts: list

    @property
    def numbers(self):
        """The draw as the operations take it."""
        d = self.drawn
        streams = random.leaf_streams(d.key, list(self.params))
        return Numbers(streams, d.scale, random.threshold(d.drop_prob), d.sigma, d.noise)

    def where(self, path, leaf):
        """The masked set as a predicate."""
        return self.masked[list(self.params).index(path)]

    def public(self):
        """States and weighted gradients by the public functions."""
        starts = dict(zip(self.params, self.starts, strict=True))
        states = simulate(self.params, self.base, self.drawn, where=self.where, starts=starts)
        return states, reweight(self.params, self.drawn, where=self.where, starts=starts)

    def chunked(self):
        """The same by the operations in plain torch."""
        return self._by_ops(self.numbers, "cpu")

    def kernels(self, *, launches=None):
        """The same by the kernels, with the number of launches of each asserted."""
        before = launch.LAUNCHES.copy()
        with by_kernels():
            result = self._by_ops(on(DEVICE, self.numbers), DEVICE)
        counts = {name: launch.LAUNCHES[name] - before[name] for name in ("simulate_kernel", "reweight_kernel")}
        assert min(counts.values()) > 0, counts
        assert launches is None or set(counts.values()) == {launches}, counts
        return result

    def _by_ops(self, numbers, device):
        params, base = on(device, self.params.values()), on(device, self.base.values())
        states = ops.simulate(params, base, Numbers(*numbers), self.masked, self.starts)
        weighted = ops.reweight(params, Numbers(*numbers), self.masked, self.starts)
        paths = list(self.params)
        return tuple(dict(zip(paths, (v.cpu() for v in values), strict=True)) for values in (states, weighted))


def on(device, leaves):
    """Leaves on a device, each at its place in its own memory: alignment and strides are kept."""
    if device == "cpu":
        return list(leaves)
    return [storage_on(device, leaf).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset()) for leaf in leaves]


def storage_on(device, leaf):
    """All of a leaf's storage, flat."""
    whole = torch.tensor([], dtype=leaf.dtype).set_(leaf.untyped_storage())
    return whole.to(device)


def by_kernels():
    """Inside, leaves on DEVICE go to the kernels."""
    return library.forced() if DEVICE == "cpu" else nullcontext()


@pytest.fixture
def kernels():
    """`by_kernels`."""
    return by_kernels


@pytest.fixture
def device():
    """Where kernels run: "cuda", or "cpu" for the interpreter."""
    return DEVICE


@pytest.fixture
def case():
    """``case(shapes, dtype, ...)``: a `Case` of random leaves; bf16 like weights, a first leaf that is not masked."""

    def make(
        shapes, dtype=torch.float32, base_dtype=None, *, noise="uniform", masked=None, start=0, seed=0, **strengths
    ):
        params = random_tree(seed, shapes, dtype=dtype)
        base = random_tree(seed + 1, shapes, dtype=base_dtype or dtype)
        drawn = draw(random.key(seed), **{"alpha_min": 0.2, "drop_prob": 0.37, "sigma": 0.01} | strengths, noise=noise)
        masked = [i != 0 for i in range(len(shapes))] if masked is None else [masked] * len(shapes)
        return Case(params, base, drawn, masked, [start] * len(shapes))

    return make
