"""Helpers for tests of methods and mergers: comparison of trees, checks of donation, random trees, quadratics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import random, tree
from .types import Aux, Method, Params

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_trees_equal(actual: Params, expected: Params) -> None:
    """Bit-identical trees: equal parameter names in order, shapes, dtypes and bits.

    -0 differs from 0; a NaN equals a bit-identical NaN.

    Raises:
        AssertionError: lists every parameter that differs.
    """
    problems = []
    for path, a, b in _pairs(actual, expected):
        if a.dtype != b.dtype:
            problems.append(f"leaf {path!r} is {a.dtype}, expected {b.dtype}")
            continue
        differ = _bits(a) != _bits(b)
        differ = differ.any(1) if differ.ndim > 1 else differ
        if differ.any():
            first = int(differ.nonzero()[0])
            problems.append(
                f"leaf {path!r} differs in {int(differ.sum())} of {a.numel()} values, first at flat index {first}: "
                f"{a.reshape(-1)[first].item()!r}, expected {b.reshape(-1)[first].item()!r}"
            )
    assert not problems, "; ".join(problems)


def assert_trees_close(actual: Params, expected: Params, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal names and shapes, and ``|actual - expected| <= atol + rtol |expected|`` in float64 (complex128).

    An infinity is close to an equal one alone; NaN is close to nothing.

    Raises:
        AssertionError: lists every parameter that is too far away.
    """
    problems = []
    for path, a, b in _pairs(actual, expected):
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        gap = (a - b).abs().masked_fill(a == b, 0.0)
        bad = (gap != 0) & ~((gap <= atol + rtol * b.abs()) & (gap < torch.inf))  # 0 * inf is NaN
        if bad.any():
            problems.append(f"leaf {path!r}: {int(bad.sum())} of {a.numel()} values off, by up to {gap.max().item():g}")
    assert not problems, "; ".join(problems)


def assert_within_errors(samples: Tensor, expected: Tensor | float) -> None:
    """The mean of independent samples lies within five standard errors of the expected mean.

    Args:
        samples: (n, ...), independent along the first dimension.
        expected: the mean, a number or (...).

    Raises:
        AssertionError: with the largest distance in standard errors.
    """
    samples = samples.double()
    error = samples.std(0) / len(samples) ** 0.5
    gap = (samples.mean(0) - torch.as_tensor(expected, dtype=torch.float64)).abs()
    bad = ~(gap <= 5.0 * error + 1e-12 * samples.abs().amax(0))
    assert not bad.any(), f"{int(bad.sum())} means off, by up to {(gap / error)[bad].max().item():.1f} standard errors"


def verify_donation(
    build: Callable[[bool], Method], params: Params, batches: Sequence[Any], *, key: Tensor, untouched: Any = ()
) -> None:
    """A method with ``donate=True`` is bit-identical to the pure one, and writes only into buffers of its own state.

    Args:
        build: ``build(donate) -> Method``.
        params: starting parameters.
        batches: one per step.
        key: run key, int64 (2,).
        untouched: more tensors that must stay unchanged, such as the base.

    Raises:
        AssertionError: names what differs.
    """
    given = {"params": params, "batches": list(batches), "untouched": untouched}
    before = _tensors(given, clone=True)
    results: list[dict[str, Tensor]] = []
    for donate in (False, True):
        method, infos = build(donate), []
        state = method.init(params)
        owned = [leaf.data_ptr() for leaf in tree.flatten(state.params).values()]
        for batch in batches:
            state, info = method.update(key, state, batch)
            infos.append(info)
        results.append(_tensors({"state": state, "infos": infos}, clone=True))
        assert_trees_equal(_tensors(given), before)
    kept = [leaf.data_ptr() for leaf in tree.flatten(state.params).values()]
    assert kept == owned, "the donating method's parameters do not lie where it began with them"
    assert_trees_equal(results[1], results[0])


def random_tree(
    seed: int, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A flat tree of uniform numbers in [-1, 1), a function of (seed, name).

    Example:
        >>> random_tree(0, {"w": (2, 3)})["w"].shape
        torch.Size([2, 3])
    """
    key = random.key(seed)
    return {
        path: random.uniform(random.fold_in(key, path), shape, dtype=torch.float64, minval=-1.0, maxval=1.0).to(dtype)
        for path, shape in shapes.items()
    }


def quadratic(hessian: Tensor, linear: Tensor) -> Callable[..., tuple[Tensor, Aux]]:
    """The loss ``x^T H x / 2 + b^T x`` of all parameters joined to one vector x, in tree order.

    Args:
        hessian: H, symmetric (d, d).
        linear: b, (d,).

    Returns:
        ``loss_fn(params, *args) -> (loss, {})``.
    """

    def loss_fn(params: Params, *args: object) -> tuple[Tensor, Aux]:
        x = torch.cat([leaf.reshape(-1) for leaf in tree.flatten(params).values()])
        return x @ hessian @ x / 2 + linear @ x, {}

    return loss_fn


def _pairs(actual: Params, expected: Params) -> list[tuple[str, Tensor, Tensor]]:
    a, b = tree.flatten(actual), tree.flatten(expected)
    assert list(a) == list(b), f"paths {list(a)}, expected {list(b)}"
    shapes = [
        f"leaf {p!r} has shape {tuple(a[p].shape)}, expected {tuple(b[p].shape)}" for p in a if a[p].shape != b[p].shape
    ]
    assert not shapes, "; ".join(shapes)
    return [(path, a[path].detach(), b[path].detach()) for path in a]


def _tensors(thing: Any, *, clone: bool = False) -> dict[str, Tensor]:
    """All tensors in a nest of containers, by the way to them."""
    leaves, _ = pytree.tree_flatten_with_path(thing)
    return {
        pytree.keystr(path): leaf.detach().clone() if clone else leaf.detach()
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    }


def _bits(leaf: Tensor) -> Tensor:
    flat = leaf.resolve_conj().resolve_neg().reshape(-1).contiguous()
    if leaf.dtype == torch.complex128:  # two words a value
        return flat.view(torch.int64).view(-1, 2)
    return flat.view(_BITS[leaf.element_size()])
