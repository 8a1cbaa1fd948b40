"""What is kept between calls is made outside every mode and transform: first use inside one spoils nothing after it."""

import contextlib
import functools
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Mapping

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import smat_fn
from smat_fn import draw, materialise, random, reweight, simulate
from smat_fn.data.batching import batch_indices
from smat_fn.ops import launch
from smat_fn.simulation import NOISES
from smat_fn.simulation import noise as noise_tables
from smat_fn.testing import assert_trees_equal

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
HYPER = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.1}
PLACE = torch.device("cpu")


def values(scale=1.0, key=None):
    """States and gradients for all noises: everything that looks into a cache."""
    key, found = random.key(3) if key is None else key, {}
    theta = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4) * scale
    for noise in NOISES:
        drawn = draw(key, **HYPER, noise=noise)
        found[noise] = simulate({"w": theta}, {"w": theta * 0.5}, drawn)["w"]
        found[f"{noise} gradient"] = reweight({"w": theta}, drawn)["w"]
        found[f"{noise} table"] = drawn.noise + 0
        noise_tables.table_on(drawn.noise, torch.device("meta"))
    launch._owner((2, 1), PLACE)
    return found


def total(scale):
    return sum(leaf.sum() for leaf in values(scale).values())


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Module(torch.nn.Module):
    def forward(self, scale):
        return total(scale)


def fake():
    with FakeTensorMode():
        values()


def meta():
    with torch.device("meta"):
        values(key=torch.tensor([3, 0], device="cpu"))
        batch_indices(torch.tensor([3, 0], device="cpu"), 10, 4, 0)


def inference():
    with torch.inference_mode():
        values()
        batch_indices(random.key(3), 10, 4, 0)


def logging():
    with Logging():
        values()


def in_grad(scale):
    batch_indices(random.key(3), 10, 4, 0)
    return total(scale)


ONE = torch.ones(())
MODES = {
    "FakeTensorMode": fake,
    "meta": meta,
    "inference_mode": inference,
    "a dispatch mode": logging,
    "make_fx fake": lambda: make_fx(total, tracing_mode="fake")(ONE),
    "make_fx symbolic": lambda: make_fx(total, tracing_mode="symbolic")(ONE),
    "make_fx real": lambda: make_fx(total)(ONE),
    "grad": lambda: torch.func.grad(in_grad)(ONE),
    "jvp": lambda: torch.func.jvp(in_grad, (ONE,), (ONE,)),
    "vmap": lambda: torch.func.vmap(in_grad)(torch.ones(2)),
    "vmap keys": lambda: torch.func.vmap(lambda key: values(key=key))(random.split(random.key(3), 2)),
    # torch has no rule for an autograd.Function inside functionalize
    "functionalize": lambda: torch.func.functionalize(lambda key: draw(key, **HYPER, noise="laplace"))(random.key(3)),
    "export": lambda: torch.export.export(Module(), (ONE,), strict=False),
    "compile": lambda: torch.compile(lambda key: draw(key, **HYPER, noise="laplace").noise[3], backend="eager")(
        random.key(3)
    ),
}


def modules():
    for found in pkgutil.walk_packages(smat_fn.__path__, "smat_fn."):
        if found.name in sys.modules:
            yield importlib.import_module(found.name)


def kept():
    """Every tensor in a name of a loaded module, or in a container there; values of mappings."""
    for module in modules():
        for name, thing in vars(module).items():
            inside = thing.values() if isinstance(thing, Mapping) else thing  # of weak keys too, which keep nothing
            inside = inside if isinstance(inside, Iterable) and not isinstance(inside, torch.Tensor) else [thing]
            with contextlib.suppress(TypeError):
                yield from ((f"{module.__name__}.{name}", leaf) for leaf in inside if isinstance(leaf, torch.Tensor))


def forget(monkeypatch):
    """The state of a fresh process."""
    for module, name in ((noise_tables, "_TABLES"), (noise_tables, "_SENT"), (launch, "_owners")):
        monkeypatch.setattr(module, name, {})
    for module in modules():
        for thing in vars(module).values():
            if isinstance(thing, functools._lru_cache_wrapper) and thing.__module__ == module.__name__:
                thing.cache_clear()


@pytest.fixture
def fresh(monkeypatch):
    expected = values(), batch_indices(random.key(3), 10, 4, 0)
    forget(monkeypatch)
    yield expected
    torch._dynamo.reset()


SLOW = "export", "make_fx symbolic", "make_fx fake"


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.slow] if m in SLOW else []) for m in MODES])
def test_first_use_inside_a_mode_changes_nothing_after_it(mode, fresh, monkeypatch):
    expected, order = fresh
    with monkeypatch.context() as patch:
        if mode.startswith(("make_fx", "export")):  # fewer rounds to trace: what is kept does not depend on them
            patch.setattr(random, "_ROUNDS", 1)
        MODES[mode]()
    for name, leaf in kept():
        plain = type(leaf) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        assert plain, name
        assert not leaf.is_inference(), name
    assert_trees_equal(values(), expected)
    assert torch.equal(batch_indices(random.key(3), 10, 4, 0), order)
    weights = {"w": torch.ones(3, requires_grad=True)}
    simulate(weights, {"w": torch.zeros(3)}, draw(random.key(0), **HYPER, noise="gaussian"))["w"].sum().backward()
    assert weights["w"].grad is not None


def test_caches_hold_no_tensor_of_a_call():
    """One rule: numbers, numpy arrays, modules, and what `compiled.constant` keeps."""
    names = {name for name, _ in kept()}
    assert names <= {f"smat_fn.{n}" for n in ("simulation.noise._TABLES", "simulation.noise._SENT", "ops.launch._owners")}  # fmt: skip  # noqa: E501
    values()
    assert isinstance(noise_tables._values("gaussian"), numpy.ndarray)


def test_a_mode_s_own_tensors_are_its_own(monkeypatch):
    forget(monkeypatch)
    with FakeTensorMode():
        assert all(type(draw(random.key(0), **HYPER, noise=noise).noise) is not torch.Tensor for noise in NOISES)
    assert all(type(draw(random.key(0), **HYPER, noise=noise).noise) is torch.Tensor for noise in NOISES)
    mask, _ = materialise(draw(random.key(0), **HYPER), {"w": torch.zeros(8)})
    assert mask["w"].shape == (8,)


@pytest.mark.slow
def test_importing_the_package_inside_modes_spoils_nothing():
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with torch.device("meta"), torch.inference_mode(), FakeTensorMode():
    import smat_fn, smat_fn.data.batching, smat_fn.mat, smat_fn.merge, smat_fn.ops.launch
    from smat_fn import random
hyper = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.1}
draws = [smat_fn.draw(random.key(0), **hyper, noise=noise) for noise in smat_fn.simulation.NOISES]
state = smat_fn.simulate({"w": torch.ones(2)}, {"w": torch.zeros(2)}, draws[1])
print([type(d.noise).__name__ for d in draws], state["w"].shape)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "['Tensor', 'Tensor', 'Tensor'] torch.Size([2])\n"
