"""Building blocks of mergers: `Merger`, its `Rule` for chunks, task vectors chunk by chunk, base + coef * vector."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from inspect import Parameter, Signature
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ... import errors, random, tree
from ...compiled import array, loops_for
from ...errors import problems_of
from ...ops.cpu import centered_fields
from ...types import Params, Scope
from .inputs import Experts, Leaves, check, coef_problems, derivative_problems, key_problems, kind_problems
from .looped import Loop

Fuse: TypeAlias = Callable[["Piece"], Tensor]  # the merged task vector (n,) of a piece

CONTIGUOUS = torch.contiguous_format
CHUNK = 1 << 19  # coordinates, over all experts together, that are worked on at a time
BLOCK = 1 << 18  # coordinates whose products are added by halves: part of the definition of `gram`, unlike CHUNK
BYTES_PER_COORDINATE = 80  # of a chunk, at the peak of the greediest merger, DELLA: its sort and its 64-bit fields
COEFS = tuple(i / 10 for i in range(1, 11))  # the paper's grid of coefficients
WIDE = tuple(i / 5 for i in range(1, 11))  # of mergers whose vector is short: as many candidates, up to 2
# reasons in `Merger.semantics`
L1_NORMS = "mergekit rescales what it keeps by a ratio of L1 norms, here each entry is divided by its keep probability"
UNKNOWN = "mergekit has no such merger"


class Piece(NamedTuple):
    """Coordinates [start, start + n) of one leaf, for every expert: flat tensors (n,)."""

    path: str
    start: int
    deltas: list[Tensor]  # task vectors in compute dtype
    fields: list[Tensor]  # int32 in [0, 65536); none without a key


class Cut(NamedTuple):
    """The part of a leaf that an expert keeps: magnitudes above ``value``, equal ones up to flat position ``last``."""

    value: Tensor
    last: int | None  # None: all of them


class Trimming(NamedTuple):
    """Magnitude thresholds that a merger needs before the first chunk."""

    keep: float  # density
    scope: Scope
    densities: Mapping[str, Any] = MappingProxyType({})  # by expert instead: a number, or {glob: number}


class Mapped(Protocol):
    """The interface of chunk-wise leaves that `Merger.rule` may use. Nothing is read before it is asked for."""

    experts: Mapping[str, object]  # by name, in their order
    coefs: Mapping[str, float]  # gamma of every floating-point leaf
    device: torch.device  # where chunks are merged
    cuts: Mapping[str, list[Cut]]  # with `Merger.trimming`: of every floating-point leaf, one for each expert
    majority: int  # with `Merger.trimming`: the sign of a zero sum

    def shape(self, path: str) -> torch.Size:
        """Shape of a leaf."""

    def gram(self, path: str) -> list[list[float]]:
        """`gram` of a leaf's task vectors, or of the experts' weights for a merger without a base."""

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        """Flat task vectors of a leaf, `BLOCK` coordinates at a time."""

    def statistic(self, name: str, path: str) -> Any:
        """An expert's statistic of a leaf for `Merger.statistics`, a tensor; None where it has none."""

    def ranked(self, path: str, ranks: Sequence[int]) -> list[list[tuple[Tensor, int]]]:
        """The magnitude of each rank (1: the smallest) in a leaf's task vector, and its position, by expert.

        Equal magnitudes are ranked by position.
        """


class Rule(NamedTuple):
    """How a merger sees the chunks of leaves: one of the first two is given."""

    fuse: Callable[[str], Fuse] | None = None  # of a leaf; a chunk is merged from all experts at once
    total: Callable[[Iterator[Tensor]], Tensor] | None = None  # of task vectors, or weights, that it sees one by one
    rows: bool = False  # no row is cut
    whole: Callable[[str], bool] | None = None  # which leaves are not cut
    block: Callable[[str], int] | None = None  # coordinates of a leaf in every chunk but the last; 0: any number
    loop: Callable[[str], Loop | None] | None = None  # of a leaf; taken where loops are compiled; bit-identical

    def at_once(self, leaves: Leaves, path: str) -> int:
        """Coordinates that every chunk of a leaf has, but for the last one; 0: any number."""
        if self.whole is not None and self.whole(path):
            return leaves[path].numel()
        return 0 if self.block is None else self.block(path)


@dataclass(frozen=True)
class Merger:
    """Options of a merger: each file of a merger ends with one subclass, a frozen dataclass that says all about it.

    The subclass's docstring and those of its fields are the help of ``merge.py``. A field that is ``None`` takes the
    preset's value. ``coef`` is gamma; every other field is a keyword of ``function``.
    """

    name: ClassVar[str]  # of the subcommand
    function: ClassVar[Callable[..., Any]]  # `<name>_vector` by `vector_function`; without a base, the merger
    based: ClassVar[bool] = True  # chunks hold task vectors and give one; else they hold weights and give weights
    random: ClassVar[bool] = False  # ``function`` takes a key first
    grams: ClassVar[bool] = False  # `rule` reads the inner products of every leaf, `Mapped.gram`
    uneven: ClassVar[bool] = False  # `rule` accepts a leaf that only some of the experts have
    grid: ClassVar[tuple[float, ...]] = COEFS  # coefficients that a search tries, unless it is given others
    semantics: ClassVar[
        Mapping[str, Mapping[str, Any] | str]
    ] = {}  # options of other definitions, or why there are none
    selects: ClassVar[tuple[str, ...]] = ()  # fields that ``function`` does not take: they choose its statistics

    def problems(self, experts: Experts) -> list[str]:
        """Errors for options, and for experts that they do not fit, beside those of `check`."""
        return []

    def vector(self, base: Leaves, experts: Mapping[str, Leaves], key: Tensor | None = None) -> Leaves:
        """The merged task vector of checked leaves in memory: `rule` on chunk after chunk."""
        return vector_by_rule(self.rule(InMemory(base, experts)), base, experts, key)

    def trimming(self) -> Trimming | None:
        """Density and scope of magnitude thresholds that `rule` needs before the first chunk: `Mapped.cuts`."""
        return None

    def statistics(self) -> str | None:
        """The kind of statistics (`checkpoint.STATISTICS`) that ``function`` takes after the experts; None: none."""
        return None

    def rule(self, leaves: Mapped) -> Rule:
        """The arithmetic on chunks, in memory and of folders."""
        raise NotImplementedError

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        """Bytes that one worker needs at least, where some leaves do not fit a chunk."""
        return gram_memory(leaves, experts) if self.grams else 0

    def work(self, shape: Sequence[int]) -> float:
        """Time that a leaf takes, in any unit."""
        return float(torch.Size(shape).numel())

    def settings(self) -> dict[str, Any]:
        """The options that are set, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class InMemory:
    """`Mapped` leaves of trees in memory."""

    def __init__(self, base: Leaves, experts: Mapping[str, Leaves]) -> None:
        self.base, self.trees = base, experts
        self.experts: Mapping[str, object] = experts
        self.coefs: Mapping[str, float] = {path: 1.0 for path, leaf in base.items() if leaf.is_floating_point()}
        self.cuts: Mapping[str, list[Cut]] = {}
        self.majority, self.device = 1, next(iter(base.values()), torch.empty(0)).device

    def shape(self, path: str) -> torch.Size:
        return self.base[path].shape

    def statistic(self, name: str, path: str) -> Any:
        raise NotImplementedError("a merger with statistics takes them as an argument in memory")

    def gram(self, path: str) -> list[list[float]]:
        return gram([leaves[path] for leaves in self.trees.values()], self.base[path])

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        dtype, origin = compute_dtype(path, self.base, self.trees), self.base[path].reshape(-1)
        leaves = [own[path].reshape(-1) for own in self.trees.values()]
        for first in range(0, origin.numel(), BLOCK):
            part = slice(first, first + BLOCK)
            yield [delta_of(leaf[part], origin[part], dtype) for leaf in leaves]

    def ranked(self, path: str, ranks: Sequence[int]) -> list[list[tuple[Tensor, int]]]:
        found, dtype = [], compute_dtype(path, self.base, self.trees)
        for leaves in self.trees.values():
            magnitudes, own = delta_of(leaves[path], self.base[path], dtype).reshape(-1).abs_(), []
            for rank in ranks:
                value = magnitudes.kthvalue(rank).values
                equal = (magnitudes == value).nonzero().squeeze(1)
                own.append((value, int(equal[rank - int((magnitudes < value).sum()) - 1])))
            found.append(own)
        return found


def vector_by_rule(rule: Rule, base: Leaves, experts: Mapping[str, Leaves], key: Tensor | None = None) -> Leaves:
    """The merged task vector of checked leaves by a rule that has ``fuse`` or ``total``."""
    fuse, total = rule.fuse, rule.total
    if total is not None:
        return merge_pieces(base, experts, lambda piece: total(iter(piece.deltas)), key=key)
    assert fuse is not None
    own = {path: fuse(path) for path, leaf in base.items() if leaf.is_floating_point()}
    return merge_pieces(
        base,
        experts,
        lambda piece: own[piece.path](piece),
        key=key,
        rows=rule.rows,
        at_once=partial(rule.at_once, base),
    )


def merged_vector(
    config: Merger, base: Params, experts: Experts, key: Tensor | None = None, problems: Sequence[str] = ()
) -> Leaves:
    """The merged task vector of a merger with a base: flat, floating-point leaves only, for `apply_vector`.

    Raises: ValueError that lists the given problems, the merger's, and all of structure and shapes.
    """
    found = [*(key_problems(key) if config.random else []), *problems, *config.problems(experts)]  # type: ignore[arg-type]
    return config.vector(*check(base, experts, found), key)


def merged(
    kind: type[Merger], *, base: Params, experts: Experts, coef: float, key: Tensor | None = None, **options: Any
) -> Params:
    """θ₀ + γ τ by a merger with a base and its options: the body of a merger's own function."""
    vector = merged_vector(kind(**options), base, experts, key, coef_problems(coef))
    return apply_vector(base, vector, coef=coef)


def vector_function(kind: type[Merger], **defaults: Any) -> Callable[..., Leaves]:
    """``<name>_vector`` of a merger with a base: `merged_vector` of its options but ``coef``, which also gets it.

    Args: defaults: of options that otherwise take the preset's value.
    """
    names = [*(["key"] if kind.random else []), "base", "experts"]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    for option in fields(kind):
        given = {} if option.default_factory is dict else option.default
        default = Parameter.empty if given in (None, MISSING) else given
        if option.name != "coef":
            default = defaults.get(option.name, default)
            parameters.append(Parameter(option.name, Parameter.KEYWORD_ONLY, default=default))
    signature = Signature(parameters)

    def vector(*trees: Any, **options: Any) -> Leaves:
        bound = signature.bind(*trees, **options)
        bound.apply_defaults()
        *key, base, experts = (bound.arguments.pop(name) for name in names)
        return merged_vector(kind(**bound.arguments), base, experts, *key)

    own = kind.__module__.rpartition(".")[2]
    vector.__name__ = vector.__qualname__ = f"{own}_vector"
    vector.__doc__ = f"The merged task vector of `{own}`: flat, floating-point leaves only, for `apply_vector`."
    vector.__module__, vector.__signature__ = kind.__module__, signature  # type: ignore[attr-defined]
    kind.function = staticmethod(vector)
    return vector


def task_vector(params: Params, base: Params) -> Params:
    """Δ = θ − θ₀.

    Args:
        params, base: trees of the same leaf paths and shapes.

    Returns:
        a tree of base's structure, float32 (float64 where a leaf is float64); other leaves are zeros.

    Raises:
        ValueError: lists every missing, unknown or misshapen leaf.
    """
    start, leaves = tree.flatten(base), tree.flatten(params)
    problems = problems_of(lambda: tree.check_same(start, "base", params=leaves))
    errors.raise_problems(problems + kind_problems(start, "base", leaves, "params"))

    def delta(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return torch.zeros_like(leaf)
        return delta_of(leaves[path], leaf, tree.compute_dtype(leaves[path], leaf))

    return tree.unflatten(base, {path: delta(path, leaf) for path, leaf in start.items()})


def apply_vector(base: Params, vector: Mapping[str, Tensor], *, coef: float, out: Params | None = None) -> Params:
    """θ₀ + γ τ, rounded once to the dtype of each leaf of base.

    Args:
        vector: a merged task vector τ, one flat entry for every floating-point leaf of base.
        coef: γ, finite.
        out: a tree like base, written to instead of a new one: one pass over the weights, bit-identical.

    Returns:
        a tree of base's structure, shapes and dtypes; other leaves are copies of base's.

    Raises:
        ValueError: for a coef that is not finite and for a vector, or an ``out``, that does not fit base.
    """
    leaves = tree.flatten(base)
    floating = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    problems = coef_problems(coef) + problems_of(lambda: tree.check_same(floating, "base", vector=vector))
    problems += derivative_problems("base", leaves) + derivative_problems("vector", vector)
    merged = {} if out is None else tree.flatten(out)
    if out is not None:
        problems += problems_of(lambda: tree.check_same(leaves, "base", out=merged))
        problems += problems_of(lambda: tree.check_apart(merged))
        problems += [
            f"leaf {path!r} of out is {merged[path].dtype}, base's is {leaf.dtype}"
            for path, leaf in leaves.items()
            if path in merged and merged[path].dtype != leaf.dtype
        ]
    errors.raise_problems(problems)
    for path, leaf in leaves.items():
        if path not in merged:
            merged[path] = torch.empty_like(leaf, memory_format=CONTIGUOUS)
        if path in floating:
            target = merged[path] if merged[path].is_contiguous() else torch.empty_like(leaf, memory_format=CONTIGUOUS)
            _write_scaled(target, vector[path].detach(), leaf.detach(), float(coef))
            if target is not merged[path]:
                merged[path].copy_(target)
        else:
            merged[path].copy_(leaf)
    return tree.unflatten(base, merged)


def merge_pieces(
    base: Leaves,
    experts: Mapping[str, Leaves],
    fuse: Fuse,
    *,
    key: Tensor | None = None,
    rows: bool = False,
    at_once: Callable[[str], int] | None = None,
) -> Leaves:
    """A merged task vector: ``fuse(piece)`` (n,) at the coordinates of every chunk of every floating-point leaf."""
    vector = {
        path: torch.empty(leaf.shape, dtype=compute_dtype(path, base, experts), device=leaf.device)
        for path, leaf in base.items()
        if leaf.is_floating_point()
    }
    for piece in pieces(base, experts, key=key, rows=rows, at_once=at_once):
        flat = vector[piece.path].view(-1)
        flat[piece.start : piece.start + piece.deltas[0].numel()] = fuse(piece)
    return vector


def pieces(
    base: Leaves,
    experts: Mapping[str, Leaves],
    *,
    key: Tensor | None = None,
    rows: bool = False,
    at_once: Callable[[str], int] | None = None,
) -> Iterator[Piece]:
    """All floating-point coordinates once, small leaves together, large ones cut; with ``rows`` no row is cut.

    Leaves that ``at_once`` has a number for are cut at its multiples.

    With a key, the fields of an expert's leaf are its mask stream, ``leaf_streams(fold_in(key, name), paths)[0]``.
    """
    sizes = {path: 0 if at_once is None else at_once(path) for path in base}
    paths = [path for path, leaf in base.items() if leaf.is_floating_point()]
    paths.sort(key=lambda path: sizes[path] > 0)  # those come last
    flat = {path: (base[path].reshape(-1), [leaves[path].reshape(-1) for leaves in experts.values()]) for path in paths}
    keys = mask_keys(key, list(experts), paths) if key is not None else None
    uncut = [
        [(i, start, min(start + sizes[path], base[path].numel()))]
        for i, path in enumerate(paths)
        if sizes[path]
        for start in range(0, base[path].numel(), sizes[path])
    ]
    cut = [base[path] for path in paths if not sizes[path]]
    for group in chain(groups(cut, max(1, CHUNK // len(experts)), rows), uncut):
        fields = fields_of(keys, group, base[paths[group[0][0]]].device) if keys is not None else [[] for _ in group]
        for (index, start, stop), field in zip(group, fields, strict=True):
            origin, others = flat[paths[index]]
            dtype = compute_dtype(paths[index], base, experts)
            deltas = [delta_of(other[start:stop], origin[start:stop], dtype) for other in others]
            yield Piece(paths[index], start, deltas, [f.to(origin.device) for f in field])


def merge_leaves(
    base: Leaves, experts: Mapping[str, Leaves], fuse: Callable[[str, Iterator[Tensor]], Tensor]
) -> Leaves:
    """A merged task vector: ``fuse(path, task vectors)`` of every floating-point leaf; they are made one by one."""

    def deltas(path: str) -> Iterator[Tensor]:
        dtype = compute_dtype(path, base, experts)
        return (delta_of(leaves[path], base[path], dtype) for leaves in experts.values())

    return {path: fuse(path, deltas(path)) for path, leaf in base.items() if leaf.is_floating_point()}


def add(tensors: Iterable[Tensor], *, into_first: bool = False) -> Tensor:
    """The sum in the order given, in new memory or in that of the first."""
    rest = iter(tensors)
    total = next(rest) if into_first else next(rest).clone()
    for tensor in rest:
        total += tensor
    return total


def elected(tensors: Sequence[Tensor]) -> Tensor:
    """+ where the sum is at least 0, and else −, as 1 and −1."""
    return (add(tensors) >= 0).to(tensors[0].dtype).mul_(2).sub_(1)


def agreeing(tensors: Sequence[Tensor], sign: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of the non-zero entries whose sign is ``sign``; 0 where there are none."""
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    loops = loops_for(sign, *tensors) if sign.dtype == torch.float32 else None
    for tensor in tensors:
        if loops is not None:
            loops.agree(*map(array, (tensor, sign, total, count)))
            continue
        agrees = tensor * sign > 0
        total += zeroed(tensor, agrees)
        if mean:
            count += agrees.to(count.dtype)
    return total / count.clamp(min=1) if mean else total


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """``values.where(keep, 0)``, by bits: a branch a coordinate takes ten times as long."""
    kind = torch.int64 if values.itemsize == 8 else torch.int32
    return keep.to(kind).neg_().bitwise_and_(values.view(kind)).view(values.dtype)


def row_length(shape: Sequence[int]) -> int:
    """Length of the rows of a leaf: its last axis; a vector, or a 0-d tensor, is one row."""
    return shape[-1] if shape else 1


def groups(leaves: Sequence[Tensor], limit: int, rows: bool) -> Iterator[list[tuple[int, int, int]]]:
    """Windows (leaf, start, stop) of at most ``limit`` coordinates together (or one row) that cover all leaves.

    With ``rows`` no row is cut.
    """
    if not rows:
        yield from tree.spans([leaf.numel() for leaf in leaves], limit)
        return
    small = [leaf.numel() if leaf.numel() <= limit else 0 for leaf in leaves]
    yield from tree.spans(small, limit)
    for index, leaf in enumerate(leaves):
        if leaf.numel() > limit:
            length = row_length(leaf.shape)
            for ((_, start, stop),) in tree.spans([leaf.numel()], max(1, limit // length) * length):
                yield [(index, start, stop)]


def mask_keys(key: Tensor, names: Sequence[str], paths: Sequence[str]) -> Tensor:
    """The mask streams of every expert's leaves: int64 (experts, leaves, 2)."""
    hashes = [torch.tensor(random.name_hashes(tuple(words)), dtype=torch.int64) for words in (names, paths)]
    experts, leaves = (part.to(key.device) for part in hashes)
    return random.split(random.fold_in(random.fold_in(key, experts)[:, None], leaves))[0]


def fields_of(keys: Tensor, group: Sequence[tuple[int, int, int]], device: torch.device) -> list[list[Tensor]]:
    """The fields of a group's windows, for every expert: those of window w are the w-th list."""
    chosen = keys[:, [index for index, _, _ in group]].reshape(-1, 2).to(device)
    centered = centered_fields(list(chosen), [(start, stop) for _, start, stop in group] * len(keys))
    drawn = [field.to(torch.int32).add_(32768) for field in centered]
    return [drawn[position :: len(group)] for position in range(len(group))]


def compute_dtype(path: str, base: Leaves, experts: Mapping[str, Leaves]) -> torch.dtype:
    """The dtype that a leaf is merged in."""
    return tree.compute_dtype(base[path], *(leaves[path] for leaves in experts.values()))


def delta_of(leaf: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """θ − θ₀ in compute dtype, where θ₀ is."""
    return leaf.to(start.device, dtype) - start.to(dtype)


def merge_weights(
    experts: Experts, flat: Mapping[str, Leaves], fuse: Callable[[str, Iterator[Tensor]], Tensor]
) -> Params:
    """A merged tree without a base: ``fuse(path, weights)`` of every floating-point leaf, rounded once.

    Args:
        experts: whose first has the structure and the other leaves of the merged tree.
        flat: their leaves by `check_alone`.
        fuse: of a leaf's path, and its weights in compute dtype, which it must not write to, one for each expert.
    """
    start = next(iter(flat.values()))

    def merged(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.clone()
        dtype = tree.compute_dtype(leaf)
        return fuse(path, (leaves[path].to(leaf.device, dtype) for leaves in flat.values())).to(leaf.dtype)

    first = next(iter(experts.values() if isinstance(experts, Mapping) else experts))
    return tree.unflatten(first, {path: merged(path, leaf) for path, leaf in start.items()})


def gram(leaves: Sequence[Tensor], start: Tensor | None = None) -> list[list[float]]:
    """All inner products of N tensors, or of their differences from ``start``, as float64 numbers.

    The float64 products of a block of 262,144 coordinates are added by halves, coordinate i to coordinate i + half,
    then block by block: no chunk size, thread count or device changes a bit.
    """
    first, others = leaves[0], ([] if start is None else [start])
    dtype = tree.compute_dtype(*leaves, *others)
    flat = [leaf.reshape(-1) for leaf in leaves]
    origin = None if start is None else start.reshape(-1)

    def block(begin: int, end: int) -> Tensor:
        rows = torch.stack([leaf[begin:end].to(first.device, dtype) for leaf in flat])
        return rows if origin is None else rows.sub_(origin[begin:end].to(first.device, dtype))

    return gram_of(block, len(flat), first.numel())


def gram_of(block: Callable[[int, int], Tensor], count: int, size: int) -> list[list[float]]:
    """`gram` of ``count`` flat tensors of ``size`` coordinates; ``block(begin, end)`` gives theirs as rows."""
    total = torch.zeros(count, count, dtype=torch.float64)
    for begin in range(0, size, BLOCK):
        rows = block(begin, min(begin + BLOCK, size)).double()
        for index, row in enumerate(rows):
            total[index] += halved(rows * row).cpu()
    return total.tolist()


def halved(rows: Tensor) -> Tensor:
    """The sum of each row, added by halves, coordinate i to coordinate i + half: no thread count changes a bit."""
    rows = torch.nn.functional.pad(rows, (0, (1 << (rows.shape[1] - 1).bit_length()) - rows.shape[1]))
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def gram_memory(leaves: Mapping[str, Tensor], experts: int) -> int:
    """`Merger.memory` of what calls `Mapped.gram`."""
    return 32 * experts * min(max((leaf.numel() for leaf in leaves.values()), default=0), BLOCK)


def cosine(products: Sequence[Sequence[float]], left: int, right: int) -> float:
    """The cosine of the angle between two tensors of a `gram`; 0 where one of them is zero."""
    size = (products[left][left] * products[right][right]) ** 0.5
    return products[left][right] / size if size else 0.0


def _write_scaled(out: Tensor, vector: Tensor, leaf: Tensor, coef: float) -> None:
    """Write ``leaf + coef * vector`` in chunks that fit the processor's cache, without a copy of the leaf."""
    dtype = tree.compute_dtype(vector, leaf)
    target, flat, start = out.view(-1), vector.reshape(-1), leaf.reshape(-1)
    for first in range(0, leaf.numel(), CHUNK):
        piece = slice(first, first + CHUNK)
        scaled = flat[piece].to(leaf.device, dtype) * coef
        target[piece] = scaled.add_(start[piece].to(dtype))
