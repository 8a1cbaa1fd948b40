"""Sizes of updates, of the changes that other experts add, and of Perturb's noise, by kind of leaf."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import errors, merge, tree
from ..merge.parts.inputs import type_problems
from ..simulation.noise import quantiles
from ..simulation.state import draw_problems
from ..types import Noise, Params, Where

KINDS = ("embeddings", "attention", "mlp", "norms", "biases", "head", "other")
ALL = "all"


class Group(NamedTuple):
    """Leaves of one kind, RMS over their coordinates and over experts.

    Attributes:
        kind: one of `KINDS`, or "all".
        size: coordinates of one model.
        delta: RMS of Δ.
        partners: RMS of γ Σ_{j≠i} Δ_j; None for a single expert.
    """

    kind: str
    size: int
    delta: float
    partners: float | None


def groups(module: nn.Module, where: Where | None = None) -> dict[str, str]:
    """The kind of every parameter of a module, one of `KINDS`, by its owner's type and place.

    In this order: in a norm; a bias; in an embedding, or anything below a module whose type says "Embed" (class tokens,
    positions, patch projections); below a module whose type says "Attention"; picked by ``where`` (the masked set);
    outside every ``nn.ModuleList``: head; other. A weight that is tied to an embedding counts there.
    """
    modules, picks = dict(module.named_modules()), tree.predicate(where)

    def kind(path: str, leaf: Tensor) -> str:
        parts = path.split(".")
        owners = [modules[".".join(parts[:depth])] for depth in range(len(parts))]
        names = [type(owner).__name__ for owner in owners]
        if "Norm" in names[-1]:
            return "norms"
        if parts[-1].endswith("bias"):
            return "biases"
        if any("Embed" in name for name in names):
            return "embeddings"
        if any("Attention" in name for name in names):
            return "attention"
        if picks is not None and picks(path, leaf):
            return "mlp"
        return "other" if any(isinstance(owner, nn.ModuleList) for owner in owners) else "head"

    return {path: kind(path, leaf) for path, leaf in module.named_parameters()}


def diagnose(
    base: Params, experts: Mapping[str, Params], kinds: Mapping[str, str], *, coef: float = 0.3
) -> list[Group]:
    """A `Group` for each kind that is there, in the order of `KINDS`, and last of all leaves together.

    Args: experts: by task, at least one; kinds: by parameter name (`groups`); coef: γ.
    Raises: ValueError that lists leaves of base without a kind, or of another one; for a coef that is negative or not
        finite.
    """
    problems = mapping_problems(experts) + type_problems(coef=coef)
    if not problems and not 0 <= coef < math.inf:
        problems = [f"coef is {coef}, must be finite and not negative"]
    if not isinstance(kinds, Mapping):
        problems.append(f"kinds are a {type(kinds).__name__}: give {{parameter: kind}}, as groups does")
    errors.raise_problems(problems)
    start = _floating(base, kinds)
    sums, names = {path: [0.0, 0.0] for path in start}, list(experts)
    total = merge.task_arithmetic_vector(base, experts)
    for name in names:
        for path, delta in tree.flatten(merge.task_vector(experts[name], base)).items():
            if path in sums:
                sums[path][0] += _square(delta)
                sums[path][1] += _square(total[path] - delta)

    def group(kind: str, leaves: Mapping[str, Tensor]) -> Group:
        size = _size(leaves)
        own, others = (math.fsum(sums[path][i] for path in leaves) for i in (0, 1))
        partners = coef * math.sqrt(others / (size * len(names))) if len(names) > 1 else None
        return Group(kind, size, math.sqrt(own / (size * len(names))), partners)

    return [group(kind, leaves) for kind, leaves in _by_kind(start, kinds).items()]


def mapping_problems(experts: Mapping[str, Params]) -> list[str]:
    """The error for experts that are not in a mapping by task."""
    fine = isinstance(experts, Mapping)
    return [] if fine else [f"experts are a {type(experts).__name__}: give a mapping {{task: tree}}"]


def unmoved(leaves: Mapping[str, Tensor], sigma: float, noise: Noise = "uniform") -> int:
    """How many coordinates noise of RMS sigma cannot change: its peak is below half the way to the next number.

    The number below a power of two is half as far as the one above.

    Raises: ValueError for a sigma that is negative or not a finite number, and an unknown noise.
    """
    errors.raise_problems(draw_problems(1.0, 0.0, sigma, noise), "unmoved")
    peak = sigma * (math.sqrt(3) if noise == "uniform" else float(quantiles(noise)[-1]))
    count = 0
    for leaf in leaves.values():
        kind = torch.finfo(leaf.dtype)
        # half the gap below numbers in (2**(k - 1), 2**k] is eps * 2**(k - 2), which exceeds the peak from this k on
        _, exponent = math.frexp(4 * peak / kind.eps)
        if (largest := math.ldexp(0.5, exponent) if peak else 0.0) < kind.max:
            count += int(torch.count_nonzero(leaf.abs() > largest))
    return count


def unmoved_shares(base: Params, kinds: Mapping[str, str], sigma: float, noise: Noise = "uniform") -> dict[str, float]:
    """`unmoved` as a share of the coordinates of each kind of leaf, and of all."""
    by_kind = _by_kind(_floating(base, kinds), kinds)
    return {kind: unmoved(leaves, sigma, noise) / _size(leaves) for kind, leaves in by_kind.items()}


def suggested_sigma(whole: Group) -> float | None:
    """RMS of γ Σ_{j≠i} Δ_j over all coordinates, to two digits: noise of the size of the updates that it simulates.

    Perturb takes the place of the other experts' updates (Eq. merged-state: ε_i = γ Σ_{j≠i} Δ_j for task arithmetic),
    and its variance is the one moment of them that σ sets. Where to start a search on dev, not its result.

    Returns: None for a single expert, and for experts that did not move.
    """
    return float(f"{whole.partners:.2g}") if whole.partners else None


def _floating(base: Params, kinds: Mapping[str, str]) -> dict[str, Tensor]:
    leaves = {path: leaf for path, leaf in tree.flatten(base).items() if leaf.is_floating_point()}
    problems = [f"leaf {path!r} has no kind: name every leaf" for path in leaves if path not in kinds]
    problems += [
        f"leaf {path!r} is of kind {kinds[path]!r}: choose one of {', '.join(KINDS)}"
        for path in leaves
        if path in kinds and kinds[path] not in KINDS
    ]
    errors.raise_problems(problems)
    return leaves


def _by_kind(leaves: Mapping[str, Tensor], kinds: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
    found = {kind: {path: leaf for path, leaf in leaves.items() if kinds[path] == kind} for kind in KINDS}
    return {kind: own for kind, own in {**found, ALL: dict(leaves)}.items() if _size(own)}


def _size(leaves: Mapping[str, Tensor]) -> int:
    return sum(leaf.numel() for leaf in leaves.values())


def _square(leaf: Tensor) -> float:
    return float(leaf.to(torch.float64).square().sum())
