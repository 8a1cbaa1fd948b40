"""From weights to a task vector, and from a merged task vector to weights: θ − θ₀ and θ₀ + γ τ."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ... import errors, tree
from ...errors import problems_of
from ...execution import batched, recorded, recorded_in_loss
from ...types import Params
from . import chunks
from .chunks import delta_of
from .inputs import check_variances, coef_problems, complex_problems, differentiated, kind_problems, storage_problems

CONTIGUOUS = torch.contiguous_format


def task_vector(params: Params, base: Params) -> Params:
    """Δ = θ − θ₀.

    Args:
        params, base: trees of the same parameter names and shapes.

    Returns:
        a tree of base's structure, float32 (float64 where a leaf is float64); other leaves are zeros.

    Raises:
        ValueError: lists every missing, unknown or misshapen leaf.
    """
    start, leaves = tree.flatten(base), tree.flatten(params)
    problems = problems_of(lambda: tree.check_same(start, "base", params=leaves))
    problems += complex_problems("base", start) + complex_problems("params", leaves)
    problems += storage_problems("base", start) + storage_problems("params", leaves)
    errors.raise_problems(problems + kind_problems(start, "base", leaves, "params"))

    def delta(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return torch.zeros_like(leaf)
        return delta_of(leaves[path], leaf, tree.compute_dtype(leaves[path], leaf))

    return tree.unflatten(base, {path: delta(path, leaf) for path, leaf in start.items()})


def apply_vector(base: Params, vector: Params, *, coef: float, out: Params | None = None) -> Params:
    """θ₀ + γ τ, rounded once to the dtype of each leaf of base.

    It has a derivative, in base, vector and coef, inside torch.func, and for autograd where vector or coef requires
    grad; ``torch.func.vmap`` takes it too.

    Args:
        vector: a merged task vector τ, one entry for every floating-point leaf of base; flat, or nested as base is.
        coef: γ, finite; a number or a 0-d tensor.
        out: a tree like base, written to instead of a new one: one pass over the weights, bit-identical.

    Returns:
        a tree of base's structure, shapes and dtypes; other leaves are copies of base's.

    Raises:
        ValueError: for a coef that is not finite and for a vector, or an ``out``, that does not fit base.
    """
    leaves = tree.flatten(base)
    floating = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    errors.raise_problems([f"vector: {text}" for text in problems_of(tree.flatten, vector)])
    vector = tree.flatten(vector)
    merged, written_out = {} if out is None else tree.flatten(out), _transformed(leaves, vector, coef)
    problems = coef_problems(coef, derivative=True) + _vector_problems(leaves, vector)
    for label, own in {"base": leaves, "vector": vector, "out": merged}.items():
        problems += storage_problems(label, own)
    if out is not None:
        problems += _out_problems(leaves, merged)
        problems += ["out is written to, which has no derivative and no batches: leave it out"] * written_out
    errors.raise_problems(problems)
    if written_out:
        return tree.unflatten(
            base,
            {
                path: _scaled(vector[path], leaf, coef) if path in vector else leaf.clone()
                for path, leaf in leaves.items()
            },
        )
    for path, leaf in leaves.items():
        if path not in merged:
            merged[path] = torch.empty_like(leaf, memory_format=CONTIGUOUS)
        if path in floating:
            given, start = merged[path].detach(), leaf.detach()  # parameters are written to as well
            target = given if given.is_contiguous() else torch.empty_like(start, memory_format=CONTIGUOUS)
            _write_scaled(target, vector[path].detach(), start, float(coef))
            if target is not given:
                given.copy_(target)
        else:
            merged[path].copy_(leaf)
    return tree.unflatten(base, merged)


def _vector_problems(leaves: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> list[str]:
    """Errors for a vector that does not fit base, by its leaves."""
    floating = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    buffers = leaves.keys() - floating.keys()
    problems = complex_problems("base", leaves) + complex_problems("vector", vector)
    problems += [
        f"vector has parameter {path!r}, which is not floating-point in base and stays as it is: leave it out"
        for path in vector
        if path in buffers
    ]
    own = {path: leaf for path, leaf in vector.items() if path not in buffers}
    return problems + problems_of(lambda: tree.check_same(floating, "base", vector=own))


def _out_problems(leaves: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> list[str]:
    """Errors for an ``out`` that is not like base."""
    problems = problems_of(lambda: tree.check_same(leaves, "base", out=out))
    problems += problems_of(lambda: tree.check_apart(out))
    return problems + [
        f"parameter {path!r} of out is {out[path].dtype}, base's is {leaf.dtype}"
        for path, leaf in leaves.items()
        if path in out and out[path].dtype != leaf.dtype
    ]


def _transformed(base: Mapping[str, Tensor], vector: Mapping[str, Tensor], coef: float) -> bool:
    """Whether the result is differentiated or batched, so that nothing may be written in place."""
    moved = [*vector.values(), *([coef] if isinstance(coef, Tensor) else [])]
    return any(batched(leaf) or differentiated(leaf) for leaf in [*base.values(), *moved]) or any(
        [*map(recorded, moved), *map(recorded_in_loss, base.values())]
    )


def _scaled(vector: Tensor, leaf: Tensor, coef: float) -> Tensor:
    dtype = tree.compute_dtype(vector, leaf)
    return (vector.to(leaf.device, dtype) * coef + leaf.to(dtype)).to(leaf.dtype)


def applied(base: Params, vector: Params, *, coef: float) -> Params:
    """`apply_vector` as the end of a merger; a search scores candidates that are broken models as they are.

    Raises: ValueError as `apply_vector`, and for a ``running_var`` below 0.
    """
    merged = apply_vector(base, vector, coef=coef)
    for path, leaf in tree.flatten(merged).items():
        check_variances(path, leaf)
    return merged


def _write_scaled(out: Tensor, vector: Tensor, leaf: Tensor, coef: float) -> None:
    """Write ``leaf + coef * vector`` in chunks that fit the processor's cache, without a copy of the leaf."""
    dtype = tree.compute_dtype(vector, leaf)
    target, flat, start = out.view(-1), vector.reshape(-1), leaf.reshape(-1)
    for first in range(0, leaf.numel(), chunks.CHUNK):
        piece = slice(first, first + chunks.CHUNK)
        scaled = flat[piece].to(leaf.device, dtype) * coef
        target[piece] = scaled.add_(start[piece].to(dtype))
