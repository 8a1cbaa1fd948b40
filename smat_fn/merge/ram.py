"""RAM: coordinates that several experts change are averaged over these, those of one expert are kept or enlarged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params, Scope
from .parts import arithmetic, looped
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


def counts_of(deltas: Sequence[Tensor], threshold: float) -> Tensor:
    """s and u of every expert in a block: (2, experts)."""
    changed = torch.stack([_changed(delta, threshold) for delta in deltas])
    several = changed.sum(0) > 1
    return torch.stack([(changed & several).sum(1), (changed & ~several).sum(1)])


def factors_of(counts: Iterable[Tensor], boost: float, cap: float) -> list[float]:
    """λ of every expert, from all counts that belong together. Raises: ValueError for several numbers of experts."""
    total: Tensor | None = None
    for found in counts:
        if total is not None and total.shape != found.shape:
            raise ValueError("scope 'global' needs all experts in every layer: take scope 'tensor', or boost 0")
        total = found if total is None else found + total.to(found.device)
    # without a coordinate of its own an expert has nothing to enlarge
    return [] if total is None else [1 + boost * min(s / u, cap) if u else 1.0 for s, u in total.T.tolist()]


def _changed(delta: Tensor, threshold: float) -> Tensor:
    return ~(delta.abs() <= threshold)  # a NaN is a change, and stays one


@dataclass(frozen=True)
class Ram(Merger):
    """RAM: average coordinates that several experts change; keep or enlarge (--boost) those that one expert changes."""

    name = "ram"
    uneven = True
    semantics: ClassVar = {"mergekit": {"scope": "tensor"}}
    coef: float = 1.0
    """Factor of the merged change (gamma); the authors take 1."""
    threshold: float = 1e-5
    """Changes up to this size, in units of the weights, count as no change."""
    boost: float = 0.0
    """0: RAM. Above 0: RAM+, with changes of one expert alone times up to 1 + boost * cap; the authors take 0.2."""
    cap: float = 1.0
    """For --boost: upper bound of the ratio of an expert's shared coordinates to those that it alone changes."""
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
        def counts(path: str) -> Iterator[Tensor]:
            found = leaves.each_window(partial(looped.counted, threshold=self.threshold), path)
            if found is not None:
                yield torch.from_numpy(looped.joined(found).sum(-1))
            else:
                yield from (counts_of(deltas, self.threshold) for deltas in leaves.blocks(path))

        def counted(paths: Iterable[str]) -> list[float]:
            return factors_of(chain.from_iterable(map(counts, paths)), self.boost, self.cap)

        known = [1.0] * len(leaves.experts)
        if self.boost and self.scope == "global":
            known = counted(leaves.coefs)

        def own(path: str) -> list[float]:
            return counted([path]) if self.boost and self.scope == "tensor" else known

        def plain(path: str) -> Fuse:
            factors = own(path)
            return lambda piece: fuse(piece, self.threshold, factors[: len(piece.deltas)])

        return Rule(
            plain, loop=lambda path: partial(looped.combined, kind="RAM", one=self.threshold, by_expert=own(path))
        )

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return (8 * experts + 32) * min(largest(leaves), arithmetic.BLOCK) if self.boost else 0


ram_vector = vector_function(Ram)
