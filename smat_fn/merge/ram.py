"""RAM: coordinates that several experts change are averaged over these, those of one expert are kept or enlarged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params, Scope
from .parts import arithmetic
from .parts.arithmetic import largest, zeroed
from .parts.chunks import Fuse, Piece
from .parts.inputs import Experts
from .parts.merger import Mapped, Merger, Rule, merged, vector_function


def ram(
    base: Params,
    experts: Experts,
    *,
    coef: float = 1.0,
    threshold: float = 1e-5,
    boost: float = 0.0,
    cap: float = 1.0,
    scope: Scope = "global",
) -> Params:
    """θ₀ + γ τ, τ = Σ_i m_i Δ_i / c where c = Σ_i m_i is above 1, λ_i Δ_i where expert i alone changes, else 0.

    m_i is 1 where |Δ_i| > threshold, else 0. ``λ_i = 1 + boost · min(s_i / u_i, cap)``, with s_i the number of
    coordinates that expert i and others change, u_i those that it alone changes; λ_i is 1 where u_i is 0, for which the
    authors' code divides by 0. RAM has boost 0, RAM+ above 0.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; 1 in the source.
        threshold: smaller changes count as none, at least 0, in units of the weights.
        boost: r, finite and at least 0; 0.2 in the authors' RAM+, 0.1 in mergekit's.
        cap: α, at least 0; 1 in the authors' code, 0.2 in mergekit.
        scope: "global" counts s and u in the whole model as the authors do, "tensor" in each leaf as mergekit does.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Yuan et al., "Behavior knowledge merge in reinforced agentic models", 2026; ``arm-r-v2`` in ram-main.py of
        xiangchi-yuan/mrl at e2d930d; mergekit, merge_methods/ram.py.
    """
    return merged(Ram, **locals())


def fuse(piece: Piece, threshold: float, factors: Sequence[float]) -> Tensor:
    """The merged vector of a chunk. Args: factors: λ of every expert."""
    shared, alone = (torch.zeros_like(piece.deltas[0]) for _ in range(2))
    count = torch.zeros_like(shared)
    for delta, factor in zip(piece.deltas, factors, strict=True):
        changed = _changed(delta, threshold)
        own = zeroed(delta, changed)
        shared += own
        alone += own * factor
        count += changed
    return torch.where(count > 1, shared / count.clamp(min=1), alone)


def factors_of(blocks: Iterable[list[Tensor]], threshold: float, boost: float, cap: float) -> list[float]:
    """λ of every expert, from the blocks of all task vectors that count together.

    Raises: ValueError for blocks of several numbers of experts.
    """
    counts: Tensor | None = None  # s and u of every expert
    for deltas in blocks:
        changed = torch.stack([_changed(delta, threshold) for delta in deltas])
        several = changed.sum(0) > 1
        found = torch.stack([(changed & several).sum(1), (changed & ~several).sum(1)])
        if counts is not None and counts.shape != found.shape:
            raise ValueError("scope 'global' needs all experts in every layer: take scope 'tensor', or boost 0")
        counts = found if counts is None else found + counts.to(found.device)
    if counts is None:
        return []
    # without a coordinate of its own an expert has nothing to enlarge
    return [1 + boost * min(s / u, cap) if u else 1.0 for s, u in counts.T.tolist()]


def _changed(delta: Tensor, threshold: float) -> Tensor:
    return ~(delta.abs() <= threshold)  # a NaN is a change, and stays one


@dataclass(frozen=True)
class Ram(Merger):
    """RAM: average what several experts change, keep or enlarge (--boost) what one expert alone changes."""

    name = "ram"
    uneven = True
    semantics: ClassVar = {"mergekit": {"scope": "tensor"}}
    coef: float = 1.0
    """Factor of the merged change (gamma); the authors take 1."""
    threshold: float = 1e-5
    """Changes of weights up to this size count as none."""
    boost: float = 0.0
    """0: RAM. Above 0: RAM+, where what one expert alone changes grows by up to boost * cap; the authors take 0.2."""
    cap: float = 1.0
    """Largest ratio of an expert's shared to its own coordinates that counts for --boost."""
    scope: Scope = "global"
    """Count coordinates for --boost in the whole model, or in each parameter as mergekit does."""

    def problems(self, experts: Experts) -> list[str]:
        given = {name: getattr(self, name) for name in ("threshold", "boost", "cap")}
        found = [
            f"{name} is {value}, must be finite and at least 0"
            for name, value in given.items()
            if not 0 <= value < float("inf")
        ]
        known = self.scope in ("global", "tensor")
        return found if known else [*found, f"scope is {self.scope!r}, must be 'global' or 'tensor'"]

    def rule(self, leaves: Mapped) -> Rule:
        def counted(paths: Iterable[str]) -> list[float]:
            blocks = chain.from_iterable(map(leaves.blocks, paths))
            return factors_of(blocks, self.threshold, self.boost, self.cap)

        known = [1.0] * len(leaves.experts)
        if self.boost and self.scope == "global":
            known = counted(leaves.coefs)

        def own(path: str) -> Fuse:
            factors = counted([path]) if self.boost and self.scope == "tensor" else known
            return lambda piece: fuse(piece, self.threshold, factors[: len(piece.deltas)])

        return Rule(own)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return (8 * experts + 32) * min(largest(leaves), arithmetic.BLOCK) if self.boost else 0


ram_vector = vector_function(Ram)
