"""Surveys of whole leaves, or of all leaves, before chunks are merged: order statistics, inner products.

Order statistics are exact, of magnitudes that are never in memory together: `merge.parts.ranks`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import tree
from ...checkpoint import STATISTICS
from ...merge.parts import arithmetic, looped_ranks
from ...merge.parts.arithmetic import add, gram_sum, products
from ...merge.parts.chunks import Piece, delta_of
from ...merge.parts.looped import Window
from ...merge.parts.merger import Cut, Value
from ...merge.parts.per_expert import NONE, Numbers, number
from ...merge.parts.ranks import INFINITE, Order, Scan, position, select, value_of
from ...merge.parts.windows import Threads, in_order, products_by_loops, spans
from ...merge.ties import bands_of, trimmed, votes, votes_by_loops
from .chunks import (
    Job,
    Sources,
    blocks_of,
    compute_dtype,
    each_window,
    looped,
    refuse_values,
    span_of,
    vector_of,
    vectors_of,
    weights_of,
)

LARGE = 1 << 24  # coordinates of a group


class Survey:
    """`Mapped` leaves of folders."""

    def __init__(
        self, job: Job, found: dict[str, Any], save: Callable[[], object] = dict, own: Collection[str] | None = None
    ) -> None:
        """Compute the statistics that the merger needs of all leaves. Raises: as `write_order`.

        Args:
            job: see `Job`.
            found: JSON values of an earlier survey, which are not looked for again; new ones are added.
            save: called after each addition.
            own: leaves that will be merged, where they are not all: thresholds of single others are not looked for.
        """
        self.job, self.device, self._found, self._save = job, job.device, found, save
        self._threads = Threads(job.workers)
        self.experts: Mapping[str, object] = job.experts
        self.coefs: Mapping[str, float] = job.coefs
        self.cuts: Mapping[str, list[Cut]] = {}
        self.majority = 1
        self.density: dict[str, float] = {}  # the fraction of coordinates that is kept of every expert
        if (trimming := job.config.trimming()) is None:
            return
        keep, scope, densities, voting = trimming
        paths = trimmed_leaves(job)
        size = max(sum(job.base.leaves[path].numel() for path in paths), 1)
        if own is not None and scope == "tensor":
            paths = [path for path in paths if path in own]
        groups = [[path] for path in paths] if scope == "tensor" else [paths] if paths else []
        if "trims" not in found:
            found["trims"] = find(job, groups, keep, exact=scope == "tensor", densities=densities)
            save()
        trims = [[Trim(*trim) for trim in row] for row in found["trims"]]
        self.cuts = {path: [t.cut() for t in row] for group, row in zip(groups, trims, strict=True) for path in group}
        self.density = {name: sum(row[i].kept for row in trims) / size for i, name in enumerate(job.experts)}
        if "majority" not in found:
            found["majority"] = self._net_sign() if voting else 1
            save()
        self.majority = found["majority"]

    def shape(self, path: str) -> torch.Size:
        return self.job.base.leaves[path].shape

    def names(self, path: str) -> list[str]:
        return [name for name, folder in self.job.experts.items() if path not in folder.absent]

    def gram(self, path: str, *, diagonal: bool = False) -> list[list[float]]:
        job, dtype, count = self.job, compute_dtype(self.job, path), len(self.names(path))
        based, cuts = job.config.based, spans(job.base.leaves[path], arithmetic.step_on(job.device, count))
        if looped(job, path):
            read = Sources(job, path, job.experts)
            tasks = products_by_loops(read, self.shape(path).numel(), based=based, diagonal=diagonal)
            return gram_sum(self._threads.in_order(tasks), count)

        def block(start: int, stop: int) -> Tensor:
            rows = job.scratch.take("rows", count * (stop - start), dtype, job.device).view(count, -1)
            rows_of = vectors_of if based else weights_of
            for row, values in zip(rows, rows_of(job, path, start, stop, dtype), strict=True):
                row.copy_(values)
            return products(rows)

        return gram_sum(self._threads.in_order(partial(block, *span) for span in cuts), count)

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        return (block().deltas for block in self._blocks(path))

    def each_block(
        self, function: Callable[[Piece], Value], paths: Iterable[str], *, rows: bool = False
    ) -> Iterator[Value]:
        def of(block: Callable[[], Piece]) -> Value:
            return function(block())

        every = chain.from_iterable(self._blocks(path, rows=rows) for path in paths)
        return self._threads.in_order(partial(of, block) for block in every)

    def _blocks(self, path: str, *, rows: bool = False) -> Iterator[Callable[[], Piece]]:
        of = blocks_of(self.job, path)

        def block(start: int, stop: int) -> Piece:
            return Piece(path, start, of(start, stop), [])

        leaf = self.job.base.leaves[path]
        return (partial(block, *span) for span in spans(leaf, arithmetic.BLOCK, rows=rows))

    def each(self, function: Callable[[str], Value], paths: Iterable[str]) -> Iterator[Value]:
        return self._threads.in_order(partial(function, path) for path in paths)

    def once(self, name: str, number: Callable[[], float]) -> float:
        if name not in self._found:
            self._found[name] = number()
            self._save()
        return float(self._found[name])

    def statistic(self, name: str, path: str) -> Tensor | None:
        kind = self.job.config.statistics()
        assert kind is not None
        stores = self.job.experts[name].stores.items()
        file, store = next((file, store) for file, store in stores if file.name == STATISTICS[kind])
        if path not in store.names:
            return None
        leaf = store.get_tensor(path)
        if not all(map(tree.is_finite, leaf.reshape(-1).split(arithmetic.BLOCK))):
            raise ValueError(f"parameter {path!r} of {file} holds values that are NaN or infinite: compute it again")
        return leaf

    def ranked(self, path: str, ranks: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, int]]]:
        dtype = compute_dtype(self.job, path)

        def one(name: str, wanted: Sequence[int]) -> list[tuple[Tensor, int]]:
            group = Group(self.job, name, [path], dtype)
            return [
                (value_of(order.bits, dtype), group.position(order.bits, rank - order.below))
                for rank, order in zip(wanted, group.orders(wanted) if wanted else (), strict=True)
            ]

        return list(self._threads.in_order(map(partial, repeat(one), self.experts, ranks)))

    def vector(self, path: str, name: str, *, rows: bool) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        return vector_of(self.job, path, name, rows=rows)

    def each_window(
        self, function: Callable[[Window], Value], path: str, *, rows: bool = False
    ) -> Iterator[Value] | None:
        if not looped(self.job, path) or (tasks := each_window(self.job, path, function, rows=rows)) is None:
            return None
        return self._threads.in_order(tasks)

    def _net_sign(self) -> int:
        """The majority sign of TIES, sgn Σ_k sgn(Σ_i δ̂_ik)."""
        job = self.job

        def tasks(path: str) -> Iterator[Callable[[], int]]:
            bands = bands_of(self.cuts[path]) if looped(job, path) else None
            if bands is None:
                limit = min(job.chunk // len(job.experts), span_of(job))
                return (partial(plain, path, *span) for span in spans(job.base.leaves[path], limit))
            return votes_by_loops(Sources(job, path, job.experts), job.base.leaves[path].numel(), bands)

        def plain(path: str, start: int, stop: int) -> int:
            piece = Piece(path, start, list(vectors_of(job, path, start, stop, compute_dtype(job, path))), [])
            return int(votes(add(trimmed(piece, self.cuts))))

        net = sum(self._threads.in_order(chain.from_iterable(map(tasks, self.cuts))))
        return (net > 0) - (net < 0)


def trimmed_leaves(job: Job) -> list[str]:
    """Leaves that thresholds are looked for in."""
    return [path for path, leaf in job.base.leaves.items() if leaf.is_floating_point() and leaf.numel()]


class Trim(NamedTuple):
    """The coordinates that one expert keeps of one group of leaves: see `Cut`; ``kept`` counts the coordinates."""

    bits: int
    double: bool
    last: int | None
    kept: int

    def cut(self) -> Cut:
        return Cut(value_of(self.bits, torch.float64 if self.double else torch.float32), self.last)


class Group(NamedTuple):
    """Task vectors of one expert whose magnitudes are ranked together, in a dtype that holds all of them."""

    job: Job
    name: str
    paths: Sequence[str]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(self.job.base.leaves[path].numel() for path in self.paths)

    def orders(self, ranks: Sequence[int], workers: int = 1) -> list[Order]:
        """The order statistics of the given ranks, counted from 1.

        Raises: ValueError for values that are not finite.
        """
        if self._looped():
            found = looped_ranks.orders(self._ranked(workers), ranks)
        else:
            each = [select(_magnitudes(*self), rank, self.dtype) for rank in ranks]
            found = [order for order, _ in each] if all(finite for _, finite in each) else None
        if found is None:
            refuse_values(self.job, self.paths[0], [])
            raise ValueError("expert - base overflows float32; was the expert fine-tuned from this base?")
        return found

    def position(self, bits: int, count: int) -> int:
        """The flat position, in all leaves one after the other, of the ``count``-th magnitude of these bits."""
        if self._looped():
            return looped_ranks.position(self._ranked(), bits, count)
        return position(_magnitudes(*self), bits, count)

    def _ranked(self, workers: int = 1) -> looped_ranks.Group:
        def leaves() -> Iterator[tuple[int, Sources]]:
            return ((self.job.base.leaves[path].numel(), Sources(self.job, path, (self.name,))) for path in self.paths)

        return looped_ranks.Group(self.size, leaves, workers)

    def _looped(self) -> bool:
        return all(looped(self.job, path) for path in self.paths)


def find(
    job: Job, groups: Sequence[Sequence[str]], keep: float, *, exact: bool, densities: Numbers = NONE
) -> list[list[Trim]]:
    """Find the trims: one for every group of leaves and every expert, in their order. Raises: as `write_order`."""

    def all_trims(workers: int, large: bool) -> Iterator[Callable[[], Trim]]:
        for paths in groups:
            wide = torch.float64 if torch.float64 in {compute_dtype(job, path) for path in paths} else torch.float32
            for name in job.experts:
                group = Group(job, name, paths, wide)
                if (group.size > LARGE) == large:
                    share = number(densities, name, paths[0], keep)
                    if share:
                        yield partial(_trim, group, int(group.size * share), exact=exact, workers=workers)
                    else:
                        yield partial(Trim, INFINITE[wide], wide == torch.float64, None, 0)

    # threads share the coordinates of a large group, and groups if they are small
    many, few = in_order(all_trims(1, False), job.workers), in_order(all_trims(job.workers, True), 1)
    sizes = (sum(job.base.leaves[path].numel() for path in paths) for paths in groups)
    return [[next(few if size > LARGE else many) for _ in job.experts] for size in sizes]


def _trim(group: Group, count: int, *, exact: bool, workers: int) -> Trim:
    double, size = group.dtype == torch.float64, group.size
    if not exact:
        (order,) = group.orders([max(size - count, 1)], workers)
        return Trim(order.bits, double, None, size - order.below)
    count = max(count, 1)
    (order,) = group.orders([size - count + 1], workers)
    wanted = count - (size - order.below - order.equal)  # of the equal magnitudes
    last = None if wanted == order.equal else group.position(order.bits, wanted)
    return Trim(order.bits, double, last, count)


def _magnitudes(job: Job, name: str, group: Sequence[str], wide: torch.dtype) -> Scan:
    """|δ| of an expert's leaves, chunk by chunk."""

    def scan() -> Iterator[Tensor]:
        for path in group:
            dtype = compute_dtype(job, path)
            for start, stop in spans(job.base.leaves[path], min(job.chunk, span_of(job))):
                origin = job.base.read(path, start, stop).to(job.device)
                yield delta_of(job.experts[name].read(path, start, stop), origin, dtype).abs_().to(wide)

    return scan
