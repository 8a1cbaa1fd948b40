"""KnOTS and Core Space: adapters merged in coordinates that they share, by any merger with a base."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ... import errors
from ..parts.inputs import coef_problems, key_problems
from ..parts.merger import Merger
from ..parts.spectral import is_real
from ..registry import vector_by
from .factors import Factors, factor_problems, rank_problems, truncated

Adapters: TypeAlias = Mapping[str, Mapping[str, Factors]]  # by expert, by module
Basis: TypeAlias = tuple[Tensor, Tensor | None]  # (outputs, k), and (l, inputs) where inputs have coordinates too


def knots(
    adapters: Adapters, merger: Merger, *, coef: float, key: Tensor | None = None, rank: int | None = None
) -> dict[str, Factors]:
    """U τ(Σ V_1ᵀ, …, Σ V_Nᵀ) of every matrix, [ΔW_1 … ΔW_N] = U Σ [V_1ᵀ … V_Nᵀ]: coordinates in one set of outputs.

    τ is the merger on the trees {module: Σ V_iᵀ = Uᵀ ΔW_i} with a base of zeros, so that a threshold of TIES, say, is
    one of the whole expert. What adds up (task arithmetic) gives the dense result; the rank is at most the sum of the
    adapters'. No ΔW is formed; float64; directions of value 0 up to rounding are left out.

    Args:
        adapters: of every expert by name, its factors by module; a module that an expert lacks is one of no change.
        merger: options of a merger with a base, its `coef` is not read.
        coef: γ, finite.
        key: int64 (2,), for a merger that drops at random.
        rank: of the result at most; default: all of it, nothing is lost.

    Returns:
        Factors of scale 1 by module, float32.

    Raises:
        ValueError: lists every problem of values and shapes.

    Source: Stoica et al., "Model merging with SVD to tie the KnOTS", 2025; ``task_merger.py`` of gstoica27/KnOTS at
    baa35e8, which leaves out directions below 1e-5 and takes alpha / r for 1.
    """
    return _merged(adapters, merger, _output_basis, coef, key, rank)


def core_space(
    adapters: Adapters, merger: Merger, *, coef: float, key: Tensor | None = None, rank: int | None = None
) -> dict[str, Factors]:
    """U τ(M_1, …, M_N) Vᵀ of every matrix, M_i = Uᵀ ΔW_i V: coordinates in one set of outputs and one of inputs.

    U are the left singular vectors of [s_1 B_1 … s_N B_N], Vᵀ the right ones of A_1 … A_N below each other: M_i are as
    small as the ranks add up to. Else as `knots`. Directions of value 0 are left out: with adapters that share A or B
    the M_i are smaller than the authors', so that Iso-C has a larger mean of singular values, and TSV-M takes fewer
    directions of each expert.

    Args:
        adapters, merger, coef, key, rank: see `knots`.

    Returns:
        Factors of scale 1 by module, float32.

    Raises:
        ValueError: as `knots`.

    Source: Panariello et al., "Accurate and efficient low-rank model merging in core space", 2025, arXiv 2509.17786;
    ``get_core_matrices`` in ``task_merger.py`` of apanariello4/core-space-merging at 85176fa, where every s_i is 1.
    """
    return _merged(adapters, merger, _core_basis, coef, key, rank)


def _merged(
    adapters: Adapters,
    merger: Merger,
    basis: Callable[[Sequence[Factors]], Basis],
    coef: float,
    key: Tensor | None,
    rank: int | None,
) -> dict[str, Factors]:
    errors.raise_problems(_problems(adapters, merger, coef, key, rank))
    bases: dict[str, Basis] = {}
    coordinates: dict[str, dict[str, Tensor]] = {name: {} for name in adapters}
    for module in dict.fromkeys(module for found in adapters.values() for module in found):
        own = {name: _wide(found[module]) for name, found in adapters.items() if module in found}
        left, right = bases[module] = basis(list(own.values()))
        columns = next(iter(own.values())).a.shape[1] if right is None else len(right)
        for name in adapters:
            zeros = left.new_zeros(left.shape[1], columns)
            coordinates[name][module] = _seen(own[name], left, right) if name in own else zeros
    base = {module: torch.zeros_like(leaf) for module, leaf in next(iter(coordinates.values())).items()}
    vector = vector_by(merger, base, coordinates, key=key)
    merged = {}
    for module, (left, right) in bases.items():
        found = _product(left, vector[module] * coef, right)
        found = found if rank is None else truncated(found, rank)
        merged[module] = Factors(found.a.float(), found.b.float())
    return merged


def _wide(factors: Factors) -> Factors:
    return Factors(factors.a.double(), factors.b.double() * factors.scale)


def _seen(factors: Factors, left: Tensor, right: Tensor | None) -> Tensor:
    """Uᵀ ΔW, or Uᵀ ΔW V."""
    return left.mT @ factors.b @ (factors.a if right is None else factors.a @ right.mT)


def _product(left: Tensor, middle: Tensor, right: Tensor | None) -> Factors:
    """U M, or U M Vᵀ, as factors of the smaller rank."""
    if right is None:
        return Factors(middle, left)
    return Factors(middle @ right, left) if len(middle) <= len(right) else Factors(right, left @ middle)


def _output_basis(factors: Sequence[Factors]) -> Basis:
    # ΔW_i = B_i Rᵀ Qᵀ of A_iᵀ = Q R: what is orthonormal changes no left singular vector
    small = torch.cat([found.b @ torch.linalg.qr(found.a.mT).R.mT for found in factors], 1)
    return _left(small), None


def _core_basis(factors: Sequence[Factors]) -> Basis:
    return _left(torch.cat([found.b for found in factors], 1)), _left(torch.cat([f.a for f in factors]).mT).mT


def _left(matrix: Tensor) -> Tensor:
    """Left singular vectors of values that are not 0, at least one."""
    left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    real = is_real(values, matrix)
    real[:1] = True
    return left[:, real]


def _problems(adapters: Adapters, merger: Merger, coef: float, key: Tensor | None, rank: int | None) -> list[str]:
    if not isinstance(merger, Merger) or not isinstance(adapters, Mapping):
        kinds = f"merger is a {type(merger).__name__} and adapters are a {type(adapters).__name__}"
        return [f"{kinds}: pass options such as Ties(keep=0.5), and {{expert's name: {{module: Factors}}}}"]
    problems = coef_problems(coef) + ([] if adapters else ["no adapters: pass at least one"])
    if not merger.based:
        problems.append(f"{merger.name} takes no base, coordinates have one of zeros: take another merger, as ta")
    if merger.random:
        problems += ["the merger drops at random: pass a key"] if key is None else key_problems(key)
    problems += rank_problems(rank)
    wrong = [
        f"adapters of {name!r} are a {type(x).__name__}, must be a mapping {{module: Factors}}"
        for name, x in adapters.items()
        if not isinstance(x, Mapping)
    ]
    if wrong:
        return problems + wrong
    if adapters and not any(adapters.values()):
        problems.append("adapters have no modules: give at least one")
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    for name, found in adapters.items():
        for module, factors in found.items():
            if broken := factor_problems(f"{module!r} of expert {name!r}", factors):
                problems += broken
            elif not (bool(factors.a.isfinite().all()) and bool(factors.b.isfinite().all())):
                problems.append(f"expert {name!r}: {module!r} holds values that are NaN or infinite")
            else:
                shapes.setdefault(module, {})[name] = (len(factors.b), factors.a.shape[1])
    problems += [f"{m!r} is of different shapes: {s}" for m, s in shapes.items() if len(set(s.values())) > 1]
    return problems
