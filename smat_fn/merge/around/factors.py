"""Several adapters of one matrix as one adapter: the methods of PEFT's ``add_weighted_adapter``."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ... import errors, random, tree
from ...execution import transformed, unrounded
from ...tree import dtype_name
from ..parts.arithmetic import divisor
from ..parts.inputs import key_problems, type_problems
from ..parts.ranks import among_largest

RULES = "linear", "magnitude_prune", "ties", "dare_linear", "dare_ties"
METHODS = (*RULES, "cat", "svd", *(f"{rule}_svd" for rule in RULES[1:]))
Majority: TypeAlias = Literal["total", "frequency"]
NONE: Mapping[str, float] = MappingProxyType({})


class Factors(NamedTuple):
    """ΔW = scale · B A, the change of one matrix.

    Attributes:
        a: A, floating-point (rank, inputs).
        b: B, floating-point (outputs, rank).
        scale: finite.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.a)


# over 60 lines: its docstring explains every argument
def combine(
    adapters: Mapping[str, Factors],
    *,
    method: str,
    weights: Mapping[str, float] = NONE,
    rank: int | None = None,
    density: float | None = None,
    majority: Majority = "total",
    key: Tensor | None = None,
) -> Factors:
    """Adapters of one matrix as one, of scale 1: with s_i, w_i the scale and the weight of expert i.

    ``cat``: A = [w_i s_i A_i] below each other, B = [B_i] side by side, so that BA = Σ w_i ΔW_i. ``svd``: the nearest
    BA of rank ``rank`` to it, A = Vᵀ, B = U Σ. ``linear``: A = Σ ±√|w_i s_i| A_i, B = Σ √|w_i s_i| B_i, the sign of w_i
    with A: cross terms make BA another matrix than Σ w_i ΔW_i unless the A_i or the B_i are equal.
    ``magnitude_prune``: the same after all but the largest ⌊density · n⌋ entries of every A_i and B_i became 0.
    ``dare_linear``: after a random share of ``density`` of them stayed, divided by it. ``ties`` and ``dare_ties``:
    then of what agrees with the elected sign the weighted sum over the number that agrees; the sign is that of the sum
    of the unweighted entries, or of their signs with majority "frequency", + where it is 0.
    With ``_svd``, the same rule on ΔW_i and w_i instead of factors and roots, then `svd`.

    Arithmetic in float32 (float64 for float64 adapters).

    Args:
        adapters: by expert; equal inputs and outputs; equal ranks for rules on factors.
        method: one of `METHODS`.
        weights: w_i, finite; 1 for experts that are not named.
        rank: of the result at most, at least 1; default: as it comes, for ``svd`` the largest of the adapters'.
        density: share of entries that stays, in (0, 1]; needed by the methods that drop entries, and by no other.
        majority: "total" or "frequency".
        key: int64 (2,), for ``dare``: the mask of a factor depends on it, on the expert's name and on the factor alone.

    Returns:
        Factors of scale 1; of rank at most inputs and outputs where ``rank`` or the method asks for an SVD.

    Raises:
        ValueError: lists every problem of options and shapes; or the change, of which an SVD is taken, is not finite.

    Source: ``LoraModel.add_weighted_adapter`` and ``utils/merge_utils.py`` of peft 0.21.2. Differences: equal
    magnitudes at the threshold are kept by position; a single adapter is merged by the method asked for, where peft
    takes ``linear``; masks are drawn from the key.
    """
    errors.raise_problems(
        [*option_problems(method, rank, density, majority, key), *_problems(adapters, method, weights)]
    )
    names = list(adapters)
    kind = tree.compute_dtype(*(half for found in adapters.values() for half in found[:2]))
    halves = [[found.a.to(kind) for found in adapters.values()], [found.b.to(kind) for found in adapters.values()]]
    given = [float(weights.get(name, 1.0)) for name in names]
    scales = [found.scale for found in adapters.values()]
    rule = method.removesuffix("_svd")

    def fused(tensors: Sequence[Tensor], shares: Sequence[float], part: str) -> Tensor:
        keys = None if key is None else [random.fold_in(random.fold_in(key, name), part) for name in names]
        return fuse(_sparse(rule, tensors, density, keys), shares, majority if rule.endswith("ties") else None)

    if method in RULES:
        shares = [w * s for w, s in zip(given, scales, strict=True)]
        roots = [math.sqrt(abs(share)) for share in shares]
        signed = [math.copysign(root, share) for root, share in zip(roots, shares, strict=True)]
        merged = Factors(fused(halves[0], signed, "A"), fused(halves[1], roots, "B"))
    elif method in ("cat", "svd"):
        rows = [a * w * s for a, w, s in zip(halves[0], given, scales, strict=True)]
        merged = Factors(torch.cat(rows), torch.cat(halves[1], 1))
        if method == "svd":
            rank = rank or max(found.rank for found in adapters.values())
    else:
        with unrounded(halves[0][0].device):
            deltas = [b @ a * s for a, b, s in zip(*halves, scales, strict=True)]
        return nearest(fused(deltas, given, "BA"), rank or max(found.rank for found in adapters.values()))
    return merged if rank is None else truncated(merged, rank)


def fuse(tensors: Sequence[Tensor], weights: Sequence[float], majority: Majority | None) -> Tensor:
    """Σ w_i t_i; with a majority the mean of the entries that agree with the elected sign."""
    total = torch.zeros_like(tensors[0])
    if majority is None:
        for tensor, weight in zip(tensors, weights, strict=True):
            total += tensor * weight
        return total
    for tensor in tensors:
        total += tensor if majority == "total" else tensor.sign()
    sign, total, count = (total >= 0).to(total.dtype) * 2 - 1, torch.zeros_like(total), torch.zeros_like(total)
    for tensor, weight in zip(tensors, weights, strict=True):
        agrees = tensor.sign() == sign
        total += tensor * weight * agrees
        count += agrees
    return total / count.clamp(min=1)


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest BA of at most ``rank`` to ΔW, without forming ΔW: A = Vᵀ, B = U Σ in the dtype of A, scale 1.

    Raises: ValueError for a rank below 1; or ΔW is not finite.

    Source: Eckart & Young, 1936.
    """
    errors.raise_problems(errors.count_problem("rank", rank))
    left, inner = torch.linalg.qr(factors.b.double() * factors.scale)
    right, outer = torch.linalg.qr(factors.a.double().mT)
    u, values, v = _decomposed(inner @ outer.mT)
    b, a = (left @ (u * values))[:, :rank], (v @ right.mT)[:rank]
    return Factors(a.to(factors.a.dtype), b.to(factors.a.dtype))


def nearest(delta: Tensor, rank: int) -> Factors:
    """The nearest BA of at most ``rank`` to a matrix: A = Vᵀ, B = U Σ."""
    u, values, v = _decomposed(delta)
    return Factors(v[:rank].contiguous(), (u * values)[:, :rank].contiguous())


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not transformed() and not bool(matrix.isfinite().all()):
        raise ValueError("the change is not finite: factors hold NaN or infinite values, or weights are too large")
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, values, right


def option_problems(
    method: str, rank: int | None, density: float | None, majority: str, key: Tensor | None
) -> list[str]:
    """Validation errors for the options of `combine`."""
    if not isinstance(method, str):
        return [f"method is {method!r}, must be one of {', '.join(METHODS)}"]
    if method not in METHODS:
        return [f"method is {method!r}{errors.suggestion(method, METHODS) or ','} one of {', '.join(METHODS)}"]
    problems = rank_problems(rank)
    drops = method not in ("linear", "cat", "svd")
    if drops and density is None:
        problems.append(f"{method} drops entries: give density, the share that stays")
    if not drops and density is not None:
        problems.append(f"{method} drops no entries: leave out density")
    wrong = [] if density is None else type_problems(density=density)
    problems += wrong
    if density is not None and not wrong and not 0 < density <= 1:
        problems.append(f"density is {density}, must be in (0, 1]")
    if majority not in ("total", "frequency"):
        problems.append(f"majority is {majority!r}, must be 'total' or 'frequency'")
    if method.startswith("dare"):
        none = [f"{method} drops at random: pass a key, smat_fn.random.key(seed)"]
        problems += none if key is None else key_problems(key)
    return problems


def rank_problems(rank: int | None) -> list[str]:
    """Validation errors for ``rank``."""
    return [] if rank is None else errors.count_problem("rank", rank)


def factor_problems(label: str, found: Factors) -> list[str]:
    """Errors for anything but the factors of one matrix, and for a scale that is not finite. No values are read."""
    if not isinstance(found, Factors):
        return [f"{label} is a {type(found).__name__}, must be Factors(a, b, scale)"]
    problems = [
        f"{part} of {label} is {dtype_name(half) if isinstance(half, Tensor) else type(half).__name__}, must be a "
        "floating-point tensor"
        for part, half in (("A", found.a), ("B", found.b))
        if not isinstance(half, Tensor) or not half.is_floating_point()
    ] + type_problems(**{f"the scale of {label}": found.scale})
    if problems:
        return problems
    a, b = tuple(found.a.shape), tuple(found.b.shape)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        problems.append(f"A {a} and B {b} of {label} do not fit: they must be (rank, inputs) and (outputs, rank)")
    elif 0 in (*a, *b):
        problems.append(f"A {a} and B {b} of {label} are empty: leave it out")
    return problems + ([] if math.isfinite(found.scale) else [f"the scale of {label} is {found.scale}, must be finite"])


def _problems(adapters: Mapping[str, Factors], method: str, weights: Mapping[str, float]) -> list[str]:
    if not isinstance(adapters, Mapping) or not isinstance(weights, Mapping):
        kinds = f"adapters are a {type(adapters).__name__} and weights a {type(weights).__name__}"
        return [f"{kinds}: pass mappings {{expert's name: Factors}} and {{expert's name: number}}"]
    if not adapters:
        return ["no adapters: pass at least one"]
    if wrong := [p for name, w in weights.items() for p in type_problems(**{f"the weight of {name!r}": w})]:
        return wrong
    if wrong := [text for name, own in adapters.items() for text in factor_problems(f"adapter {name!r}", own)]:
        return wrong
    problems = [
        f"weights names {name!r}, which is not an adapter: they are {', '.join(adapters)}"
        for name in weights.keys() - adapters.keys()
    ]
    problems += [f"the weight of {n!r} is {w}, must be finite" for n, w in weights.items() if not math.isfinite(w)]
    shapes = {name: (len(found.b), *found.a.shape[1:]) for name, found in adapters.items()}
    if len(set(shapes.values())) > 1:
        problems.append(f"adapters are of matrices of different shapes: {shapes}")
    ranks = {name: found.rank for name, found in adapters.items()}
    if method in RULES and len(set(ranks.values())) > 1:
        problems.append(f"{method} adds factors entry by entry, and ranks differ ({ranks}): take cat, svd or an _svd")
    return problems


def _sparse(
    rule: str, tensors: Sequence[Tensor], density: float | None, keys: Sequence[Tensor] | None
) -> Sequence[Tensor]:
    """The tensors with zeros for entries that a rule drops."""
    if density is None or density == 1:
        return tensors
    if keys is None or not rule.startswith("dare"):
        return [_largest(tensor, density) for tensor in tensors]
    threshold = int(random.threshold(1 - density))
    fields = [random.bits(key, tensor.numel()).view(tensor.shape) for key, tensor in zip(keys, tensors, strict=True)]
    kept = 1 - threshold / 65536
    return [t / divisor(kept, t) * (field.to(t.device) >= threshold) for t, field in zip(tensors, fields, strict=True)]


def _largest(tensor: Tensor, density: float) -> Tensor:
    mask = among_largest(tensor.reshape(-1).abs(), int(density * tensor.numel()))
    return tensor.where(mask.view(tensor.shape), 0)
