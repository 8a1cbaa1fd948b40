"""TIES merging: trim small changes, elect a sign for every coordinate, add the changes that agree with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import ClassVar, TypeAlias

import numpy
import torch
from torch import Tensor

from .. import execution
from ..types import Aggregate, Params, Scope
from .parts import looped, looped_ranks
from .parts.arithmetic import add, zeroed
from .parts.chunks import CHUNK, Piece, compute_dtype, delta_of, pieces
from .parts.inputs import Experts, Leaves, check, type_problems
from .parts.merger import Cut, InMemory, Mapped, Rule, Trimming, merged, orders_by_loops, read_best, vector_function
from .parts.per_expert import NONE, Numbers, Own, Sparse, Sparsify, number, number_problems
from .parts.ranks import INFINITE, largest, order_of, value_of
from .parts.windows import Read, in_order

Cuts: TypeAlias = Mapping[str, list[Cut]]  # of every leaf, one an expert


def ties(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    keep: float,
    aggregate: Aggregate = "sum",
    scope: Scope = "global",
    elect: bool = True,
    weights: Numbers | None = None,
    densities: Numbers | None = None,
    rescale: bool = False,
) -> Params:
    """θ₀ + γ Σ_i δ̂_i [sgn δ̂_i = s], δ̂ the trimmed task vectors and s the sign of Σ_i δ̂_i, rounded once.

    A zero sum takes the majority sign, sgn Σ_k sgn(Σ_i δ̂_ik) over all coordinates k; if that is 0 too, nothing agrees.

    Args:
        keep: the fraction of coordinates that stays, in (0, 1]. An expert of d coordinates keeps those with |δ| ≥ the
            (d − ⌊d·keep⌋)-th smallest magnitude (at least the 1st), ties included: see `ties_density`.
        aggregate: "sum" of the agreeing entries, or their "mean".
        scope: "global", one threshold per expert over all floating-point leaves; "tensor", exactly ⌊n·keep⌋ (at least
            one) coordinates of each leaf of n, equal magnitudes by position, and a zero sum takes +.
        elect: False takes all entries, whatever their sign; their mean is over those that are not 0. With the mean it
            is Localize-and-Stitch without data: θ₀ + γ Σ_i m_i ⊙ Δ_i / Σ_j m_j, m_i = 1 where δ̂_i ≠ 0, 0 / 0 = 0.
        weights: w_i by expert, finite: δ̂_i times w_i is what is elected and added, a mean is over the weights that
            agree, and, unless all are 1, a zero sum takes +. A number, or {glob: number} by leaf; 1 for others.
        densities: ``keep`` by expert, by leaf with scope "tensor"; ``keep`` for those not named. 0 keeps nothing.
        rescale: give each leaf of δ̂_i the L1 norm of δ_i; a zero sum takes +.

    Returns:
        a new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Yadav et al., "TIES-Merging", 2023; scope "tensor" is that of mergekit and peft. Without election: He et
        al., "Localize-and-Stitch: efficient model merging via sparse task arithmetic", 2024 (arXiv 2408.13656).
    """
    return merged(Ties, **locals())


def fuse(piece: Piece, cuts: Cuts, majority: int, aggregate: Aggregate) -> Tensor:
    """The merged vector of a chunk. Args: majority: the sign of a zero sum."""
    deltas = trimmed(piece, cuts)
    sign = add(deltas).sign_()
    if majority:
        sign.mul_(2).add_(majority).sign_()
    return _agreeing(deltas, sign, mean=aggregate == "mean")


def votes(total: Tensor) -> Tensor:
    """Σ_k sgn(t_k), 0-d int64, for which the host does not wait."""
    # ±1 add up exactly in float32 as long as there are at most 2²⁴ of them
    return torch.stack([part.sign().sum().long() for part in total.split(1 << 24)]).sum()


def _net(leaves: InMemory) -> int:
    """Σ_k sgn(Σ_i δ̂_ik) over all coordinates k."""
    bands = {path: bands_of(cuts) for path, cuts in leaves.cuts.items() if leaves.looped(path)}
    rest = {path: leaf for path, leaf in leaves.base.items() if bands.get(path) is None}
    net = int(sum(votes(add(trimmed(piece, leaves.cuts))) for piece in pieces(rest, leaves.trees)))
    tasks = (
        votes_by_loops(leaves.read(path, leaves.trees), leaves.base[path].numel(), own)
        for path, own in bands.items()
        if own is not None
    )
    return net + sum(in_order(chain.from_iterable(tasks), leaves.workers))


def votes_by_loops(read: Read, size: int, bands: Sequence[looped.Band]) -> Iterator[Callable[[], int]]:
    """Tasks whose sum is that of `votes` of a leaf's trimmed vectors."""
    loops = execution.loops()
    assert loops is not None

    def count(start: int, stop: int) -> int:
        where, _held = read(start, stop)
        return looped.votes(loops, where, start, stop - start, bands)

    return (partial(count, start, min(start + read.span, size)) for start in range(0, size, read.span))


def _agreeing(deltas: Sequence[Tensor], sign: Tensor, *, mean: bool) -> Tensor:
    """s Σ max(s δ̂_i, 0): the sum, or mean, of the entries whose sign is ``sign``, for finite numbers."""
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta in deltas:
        agrees = (delta * sign).relu_()
        total += agrees
        if mean:
            count += agrees.sign_()
    total = total.div_(count.clamp_(min=1)) if mean else total
    return total.mul_(sign).add_(0.0)  # no −0 where nothing agrees


def ties_density(
    base: Params, experts: Experts, *, keep: float, scope: Scope = "global", densities: Numbers | None = None
) -> dict[str, float]:
    """The fraction of coordinates that `ties` keeps of each expert: more than ``keep`` where magnitudes are equal."""
    own = NONE if densities is None else densities
    problems = [*(type_problems(keep=keep) or _problems(keep, scope)), *number_problems(experts, densities=own)]
    start, flat = check(base, experts, problems)
    size = sum(leaf.numel() for leaf in start.values() if leaf.is_floating_point())
    _, kept = read_best(start, flat, None, lambda leaves: _cuts(leaves, keep, scope, own))
    return {name: count / max(size, 1) for name, count in kept.items()}


def _problems(keep: float, scope: str) -> list[str]:
    problems = [] if 0 < keep <= 1 else [f"keep is {keep}, must be in (0, 1]: it is the density, the share that stays"]
    return problems + ([] if scope in ("global", "tensor") else [f"scope is {scope!r}, must be 'global' or 'tensor'"])


def _cuts(leaves: InMemory, keep: float, scope: Scope, densities: Numbers = NONE) -> tuple[Cuts, dict[str, int]]:
    """One cut for every floating-point leaf and, in their order, every expert; the coordinates that each one keeps."""
    paths = [path for path in leaves.coefs if leaves.base[path].numel()]
    groups = [[path] for path in paths] if scope == "tensor" else [paths] if paths else []
    cuts: dict[str, list[Cut]] = {path: [] for path in paths}
    kept = dict.fromkeys(leaves.trees, 0)
    for name in leaves.trees:
        shares = [number(densities, name, group[0], keep) for group in groups]
        tasks = (partial(_cut, leaves, name, *each, scope) for each in zip(groups, shares, strict=True))
        # threads share the coordinates of a single group
        own = in_order(tasks, leaves.workers if scope == "tensor" else 1)
        for group, (cut, count) in zip(groups, own, strict=True):
            kept[name] += count
            for path in group:
                cuts[path].append(cut)
    return cuts, kept


def _cut(leaves: InMemory, name: str, group: Sequence[str], share: float, scope: Scope) -> tuple[Cut, int]:
    """The cut of some leaves of one expert, and how many coordinates it keeps."""
    ranked = leaves.ranks(name, group, leaves.workers if scope == "global" else 1) if share else None
    if ranked is not None:
        size, count = ranked.size, int(ranked.size * share)
        if scope == "global":
            (order,) = orders_by_loops(ranked, [max(size - count, 1)])
            return Cut(value_of(order.bits, torch.float32), None), size - order.below
        (order,) = orders_by_loops(ranked, [size - max(count, 1) + 1])
        wanted = max(count, 1) - (size - order.below - order.equal)  # of the equal magnitudes
        last = None if wanted == order.equal else looped_ranks.position(ranked, order.bits, wanted)
        return Cut(value_of(order.bits, torch.float32), last), max(count, 1)
    dtypes = {path: compute_dtype(path, leaves.base, leaves.trees) for path in group}
    magnitudes = _magnitudes({path: leaves.base[path] for path in group}, leaves.trees[name], dtypes)
    if scope == "tensor" and magnitudes.isnan().any():  # the exact count has no last coordinate then
        raise ValueError(
            f"parameter {group[0]!r} of expert {name!r} minus base's is NaN in places, which have no order: "
            "find them by smat_fn.tree.check_finite, in base too"
        )
    if not share:
        return Cut(value_of(INFINITE[magnitudes.dtype], magnitudes.dtype), None), 0
    return (_exact if scope == "tensor" else _threshold)(magnitudes, int(magnitudes.numel() * share))


def _magnitudes(leaves: Leaves, expert: Leaves, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """|δ| of some leaves, one after the other, in the widest of the dtypes that they are merged in."""
    # one buffer filled piece by piece: a list of pieces joined at the end would take the memory twice
    wide = torch.float64 if torch.float64 in {dtypes[path] for path in leaves} else torch.float32
    size = sum(leaf.numel() for leaf in leaves.values())
    out = torch.empty(size, dtype=wide, device=next(iter(leaves.values())).device)
    rest = out
    for path, leaf in leaves.items():
        own, rest = rest[: leaf.numel()], rest[leaf.numel() :]
        parts = (flat.reshape(-1).split(CHUNK) for flat in (expert[path], leaf, own))
        for theirs, start, target in zip(*parts, strict=True):
            target.copy_(delta_of(theirs, start, dtypes[path]).abs_())
    return out


def _threshold(magnitudes: Tensor, count: int) -> tuple[Cut, int]:
    order = order_of(magnitudes, max(magnitudes.numel() - count, 1))
    return Cut(value_of(order.bits, magnitudes.dtype), None), magnitudes.numel() - order.below


def _exact(magnitudes: Tensor, count: int) -> tuple[Cut, int]:
    order, last = largest(magnitudes, max(count, 1))
    return Cut(value_of(order.bits, magnitudes.dtype), last), max(count, 1)


def _keeps(delta: Tensor, start: int, cut: Cut) -> Tensor:
    # a 0-d float64 threshold would be rounded to the dtype of a float32 leaf
    magnitude, value = delta.abs().to(cut.value.dtype), cut.value
    if cut.last is None:
        return magnitude >= value
    early = torch.arange(start, start + delta.numel(), device=delta.device) <= cut.last
    return (magnitude > value) | ((magnitude == value) & early)


def trimmed(piece: Piece, cuts: Cuts) -> list[Tensor]:
    """The task vectors of a chunk, with zeros for entries below the experts' thresholds."""
    return [_trimmed(delta, piece.start, cut) for delta, cut in zip(piece.deltas, cuts[piece.path], strict=True)]


def _trimmed(delta: Tensor, start: int, cut: Cut) -> Tensor:
    if cut.last is not None and start <= cut.last < start + delta.numel() - 1:
        return zeroed(delta, _keeps(delta, start, cut))
    equal = cut.last is None or cut.last >= start
    return torch.hardshrink(delta, _limit(cut.value, delta.dtype, equal=equal))


def _limit(value: Tensor, dtype: torch.dtype, *, equal: bool) -> float:
    """Number of ``dtype`` that just those magnitudes exceed that exceed ``value``, or, with ``equal``, reach it."""
    exact, kind = float(value), numpy.float64 if dtype == torch.float64 else numpy.float32
    with numpy.errstate(over="ignore"):
        near = kind(exact)
    if float(near) > exact or (equal and float(near) == exact):  # NumPy would round ``exact`` before it compares
        near = numpy.nextafter(near, kind(-numpy.inf))
    return float(near)


def bands_of(cuts: Sequence[Cut]) -> list[looped.Band] | None:
    """The magnitudes that cuts keep; None for cuts in float64."""
    if any(cut.value.dtype != torch.float32 for cut in cuts):
        return None
    above = looped.INFINITE
    values = [(looped.bits_of(cut.value), looped.NEVER if cut.last is None else cut.last + 1) for cut in cuts]
    return [((bits, bits + 1, above, above), (split, looped.NEVER)) for bits, split in values]


@dataclass(frozen=True)
class Ties(Sparse):
    """TIES: trim small changes, elect signs, add the changes that agree."""

    name = "ties"
    same_on_gpu = True
    semantics: ClassVar = {
        "mergekit": {"aggregate": "mean", "scope": "tensor"},
        "original": {"aggregate": "mean", "scope": "global"},
    }
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    keep: float | None = None
    """Density: fraction of coordinates to keep, largest magnitudes first. Also --density."""
    aggregate: Aggregate | None = None
    """Sum or mean of the agreeing entries."""
    scope: Scope | None = None
    """One threshold per expert (global), or one per tensor."""
    elect: bool = field(default=True, kw_only=True)
    """True: take entries that have the elected sign; False: take all entries; a mean is of those that are not 0."""

    present = True

    def density(self, name: str) -> float | None:
        return self.keep

    def trimming(self) -> Trimming:
        assert self.keep is not None
        assert self.scope is not None
        return Trimming(self.keep, self.scope, self.densities, votes=self.scope == "global" and not self.special())

    def problems(self, experts: Experts) -> list[str]:
        keep, scope, densities, _ = self.trimming()
        if wrong := super().problems(experts):
            return [*_problems(keep, scope), *wrong]
        return [
            *_problems(keep, scope),
            *(
                f"densities of {name!r} differ by parameter, which needs scope 'tensor': give one number"
                for name, rules in densities.items()
                if isinstance(rules, Mapping) and scope != "tensor"
            ),
        ]

    def special(self) -> bool:
        """Whether experts are scaled, or no signs elected: densities are in the cuts."""
        return self.rescale or not self.elect or any(weight != 1 for weight in self.weights.values())

    def prepare(self, leaves: InMemory) -> None:
        keep, scope, densities, voting = self.trimming()
        leaves.cuts, _ = _cuts(leaves, keep, scope, densities)
        if voting:
            net = _net(leaves)
            leaves.majority = (net > 0) - (net < 0)

    def sparsify(self, leaves: Mapped) -> Sparsify:
        return lambda part, plain: _trimmed(part.delta, part.start, leaves.cuts[part.path][part.place])

    def plain(self, leaves: Mapped) -> Rule:
        aggregate = self.aggregate
        assert aggregate is not None
        return Rule(
            lambda _: lambda piece: fuse(piece, leaves.cuts, leaves.majority, aggregate),
            loop=partial(self.looped, leaves, majority=leaves.majority),
        )

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask | None:
        bands = bands_of(leaves.cuts[own.path])
        return None if bands is None else looped.ByMagnitude(bands)


ties_vector = vector_function(Ties, aggregate="sum", scope="global")
