"""`Merger`, the interface of every merger, its `Rule` for chunks, and what runs a rule on trees in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from inspect import Parameter, Signature, getdoc, signature
from itertools import chain, repeat, starmap
from sys import modules
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ... import execution, tree
from ...errors import flag_problems, raise_problems
from ...types import Params, Scope
from . import arithmetic, looped_ranks
from .arithmetic import gram, gram_memory, gram_sum
from .chunks import CHUNK, Fuse, Piece, compute_dtype, delta_of, fields_of, groups, mask_keys, merge_weights, pieces
from .inputs import Experts, Leaves, check, check_variances, coef_problems, key_problems, tied_problems, type_problems
from .looped import KINDS, Loop, Window
from .ranks import Order, order_of, position_of, value_of
from .vectors import applied
from .windows import ROWS, InPlace, NotFinite, Scratch, each_window, in_order, products_by_loops, spans, windows

Value = TypeVar("Value")
STARTED = 1 << 31  # weights of all experts whose sum by a loop saves the 0.3 s that numba takes to start
WORTH = 1 << 24  # weights in memory that take loops; four times as many where numba would be started
COEFS = tuple(i / 10 for i in range(1, 11))  # the paper's grid of coefficients
WIDE = tuple(i / 5 for i in range(1, 11))  # of mergers whose vector is short: as many candidates, up to 2
# reasons in `Merger.semantics`
L1_NORMS = "mergekit rescales what it keeps by a ratio of L1 norms, here each entry is divided by its keep probability"
UNKNOWN = "mergekit has no such merger"


class Cut(NamedTuple):
    """The part of a leaf that an expert keeps: magnitudes above ``value``, equal ones up to flat position ``last``."""

    value: Tensor  # 0-d, on the CPU
    last: int | None  # None: all of them


class Trimming(NamedTuple):
    """Magnitude thresholds that a merger needs before the first chunk."""

    keep: float  # density
    scope: Scope
    densities: Mapping[str, Any] = MappingProxyType({})  # by expert instead: a number, or {glob: number}
    votes: bool = False  # whether `Mapped.majority` is needed


class Mapped(Protocol):
    """The interface of chunk-wise leaves that `Merger.rule` may use. Nothing is read before it is asked for."""

    experts: Mapping[str, object]  # by name, in their order
    coefs: Mapping[str, float]  # gamma of every floating-point leaf
    device: torch.device  # where chunks are merged
    cuts: Mapping[str, list[Cut]]  # with `Merger.trimming`: of every floating-point leaf, one for each expert
    majority: int  # with `Trimming.votes`: the sign of a zero sum

    def shape(self, path: str) -> torch.Size:
        """Shape of a leaf."""

    def names(self, path: str) -> list[str]:
        """The names of the experts that have a leaf: all but for a merger that is ``uneven``."""

    def gram(self, path: str, *, diagonal: bool = False) -> list[list[float]]:
        """`gram` of a leaf's task vectors, or of the experts' weights for a merger without a base.

        Args: diagonal: the caller reads no other numbers.
        """

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        """Flat task vectors of a leaf, `BLOCK` coordinates at a time; valid until the next block."""

    def each_block(
        self, function: Callable[[Piece], Value], paths: Iterable[str], *, rows: bool = False
    ) -> Iterator[Value]:
        """``function`` of every `BLOCK` coordinates of leaves, in order, by as many threads as merge chunks.

        They are task vectors, or the experts' weights for a merger without a base. Args: rows: no row is cut.
        """

    def each(self, function: Callable[[str], Value], paths: Iterable[str]) -> Iterator[Value]:
        """``function(path)`` of every path in their order, by as many threads as merge chunks."""

    def once(self, name: str, number: Callable[[], float]) -> float:
        """``number()``, of the whole model: a resumed merge of folders has it from the interrupted one."""

    def statistic(self, name: str, path: str) -> Any:
        """An expert's statistic of a leaf for `Merger.statistics`, a tensor; None where it has none."""

    def ranked(self, path: str, ranks: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, int]]]:
        """The magnitude of each rank (1: the smallest) in a leaf's task vector, and its position.

        Equal magnitudes are ranked by position. Args: ranks: of each expert.
        """

    def vector(self, path: str, name: str, *, rows: bool) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """An expert's task vector of a leaf, window by window: start, coordinates, and with a key their fields.

        Args: rows: no row is cut.
        """

    def each_window(
        self, function: Callable[[Window], Value], path: str, *, rows: bool = False
    ) -> Iterator[Value] | None:
        """``function``, such as `looped.ByField.norms`, of all windows of a leaf that compiled loops read, in order.

        Args: rows: no row is cut.
        Returns: None where no loop reads the leaf or its chunks are too small: `vector` and `blocks` give the same.
        """


class Rule(NamedTuple):
    """How a merger sees the chunks of leaves: one of the first two is given."""

    fuse: Callable[[str], Fuse] | None = None  # of a leaf; a chunk is merged from all experts at once
    total: Callable[[Iterator[Tensor]], Tensor] | None = None  # of task vectors, or weights, that it sees one by one
    rows: bool = False  # no row is cut
    whole: Callable[[str], bool] | None = None  # which leaves are not cut
    block: Callable[[str], int] | None = None  # coordinates of a leaf in every chunk but the last; 0: any number
    loop: Callable[[str], Loop | None] | None = None  # of a leaf; taken where loops are compiled; bit-identical

    def worth(self, weights: int) -> "Rule":
        """The rule, a sum of few weights without its loop, since starting numba takes more time than it saves."""
        keep = self.total is None or weights >= STARTED or execution.started()
        return self if keep else self._replace(loop=None)

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
    by_leaf: ClassVar[tuple[str, ...]] = ()  # options with one number, which may be {glob: number} in Python
    uneven: ClassVar[bool] = False  # `rule` accepts a leaf that only some of the experts have
    same_on_gpu: ClassVar[bool] = False  # the bits of the CPU: a search on dev merges on the GPU that scores
    grid: ClassVar[tuple[float, ...]] = COEFS  # coefficients that a search tries, unless it is given others
    semantics: ClassVar[
        Mapping[str, Mapping[str, Any] | str]
    ] = {}  # options of other definitions, or why there are none
    selects: ClassVar[tuple[str, ...]] = ()  # fields that ``function`` does not take: they choose its statistics

    def problems(self, experts: Experts) -> list[str]:
        """Errors for options, and for experts that they do not fit, beside those of `check`."""
        return []

    def prepare(self, leaves: "InMemory") -> None:
        """Find what `trimming` asks for, of trees in memory: `Mapped.cuts` and `Mapped.majority`."""

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

    def size_problems(self, leaves: Mapping[str, Tensor], experts: int) -> list[str]:
        """Errors for leaves that are too large for a library that ``function`` calls, whatever the memory."""
        return []

    def work(self, shape: Sequence[int]) -> float:
        """Time that a leaf takes, in any unit."""
        return float(torch.Size(shape).numel())

    def settings(self) -> dict[str, Any]:
        """The options that are set, as JSON values; keyword-only ones where they are not the default."""
        plain = self._plain_options()
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: value for name, value in given.items() if name not in plain or value != plain[name]}

    def _plain_options(self) -> dict[str, Any]:
        """The defaults of keyword-only options."""
        return {f.name: {} if f.default is MISSING else f.default for f in fields(self) if f.kw_only}


class InMemory:
    """`Mapped` leaves of trees in memory."""

    def __init__(
        self,
        base: Leaves,
        experts: Mapping[str, Leaves],
        statistics: Mapping[str, Leaves] = MappingProxyType({}),
        key: Tensor | None = None,
        *,
        by_loops: bool = False,
        alone: float | None = None,
    ) -> None:
        """Args: by_loops: let compiled loops read what they can; they raise `NotFinite`.

        alone: the coefficient, or any number, of a merger without a base: base is one of the experts then.
        """
        self.base, self.trees, self.statistics, self.key, self.by_loops = base, experts, statistics, key, by_loops
        self.experts: Mapping[str, object] = experts
        self.based, coef = alone is None, 1.0 if alone is None else alone
        self.coefs: Mapping[str, float] = {path: coef for path, leaf in base.items() if leaf.is_floating_point()}
        self.cuts: Mapping[str, list[Cut]] = {}
        self.majority, self.device = 1, next(iter(base.values()), torch.empty(0)).device
        self.workers, self._scratch = torch.get_num_threads() if by_loops else 1, Scratch()

    def shape(self, path: str) -> torch.Size:
        return self.base[path].shape

    def names(self, path: str) -> list[str]:
        return list(self.trees)

    def statistic(self, name: str, path: str) -> Any:
        return self.statistics[name].get(path)

    def looped(self, path: str) -> bool:
        """Whether compiled loops read a leaf of base and of all experts."""
        if not self.by_loops or not self.base[path].numel():
            return False
        leaves = [self.base[path], *(own[path] for own in self.trees.values())]
        return {leaf.dtype for leaf in leaves} <= set(KINDS) and execution.loops_for(*leaves) is not None

    def read(self, path: str, names: Iterable[str]) -> InPlace:
        """Where compiled loops read a leaf of base and of experts."""
        return InPlace(list(map(_aligned, (self.base[path], *(self.trees[name][path] for name in names)))))

    def window(self, path: str, read: InPlace, coef: float | None = None) -> Callable[[int, int, Tensor], Window]:
        """`windows.windows` of a leaf."""
        return windows(read, self.key, self.trees, path, coef, partial(self._scratch.take, device=self.device))

    def ranks(self, name: str, paths: Sequence[str], workers: int = 1) -> looped_ranks.Group | None:
        """Leaves of one expert whose magnitudes are ranked together by loops; None where loops do not read them."""
        if not all(map(self.looped, paths)):
            return None
        size = sum(self.base[path].numel() for path in paths)
        return looped_ranks.Group(
            size, lambda: ((self.base[path].numel(), self.read(path, [name])) for path in paths), workers
        )

    def gram(self, path: str, *, diagonal: bool = False) -> list[list[float]]:
        if self.looped(path):
            read, size = self.read(path, self.trees), self.base[path].numel()
            tasks = products_by_loops(read, size, based=self.based, diagonal=diagonal)
            return gram_sum(in_order(tasks, self.workers), len(self.trees))
        return gram([leaves[path] for leaves in self.trees.values()], self.base[path] if self.based else None)

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        return (block().deltas for block in self._blocks(path))

    def each_block(
        self, function: Callable[[Piece], Value], paths: Iterable[str], *, rows: bool = False
    ) -> Iterator[Value]:
        def task(block: Callable[[], Piece]) -> Value:
            return function(block())

        blocks = chain.from_iterable(self._blocks(path, rows=rows) for path in paths)
        return in_order((partial(task, block) for block in blocks), self.workers)

    def _blocks(self, path: str, *, rows: bool = False) -> Iterator[Callable[[], Piece]]:
        dtype, origin = compute_dtype(path, self.base, self.trees), self.base[path].reshape(-1)
        leaves = [own[path].reshape(-1) if self.based else _aligned(own[path]) for own in self.trees.values()]

        def block(start: int, stop: int) -> Piece:
            parts = [leaf[start:stop] for leaf in leaves]
            if self.based:
                parts = [delta_of(part, origin[start:stop], dtype) for part in parts]
            return Piece(path, start, parts, [])

        return (partial(block, *span) for span in spans(self.base[path], arithmetic.BLOCK, rows=rows))

    def each(self, function: Callable[[str], Value], paths: Iterable[str]) -> Iterator[Value]:
        return map(function, paths)

    def once(self, name: str, number: Callable[[], float]) -> float:
        return number()

    def ranked(self, path: str, ranks: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, int]]]:
        dtype = compute_dtype(path, self.base, self.trees)

        def one(name: str, wanted: Sequence[int]) -> list[tuple[Tensor, int]]:
            if not wanted:
                return []
            orders: Iterable[Order]
            if (group := self.ranks(name, [path])) is not None:
                orders, position = orders_by_loops(group, wanted), partial(looped_ranks.position, group)
            else:
                magnitudes = delta_of(self.trees[name][path], self.base[path], dtype).reshape(-1).abs_()
                orders, position = (order_of(magnitudes, rank) for rank in wanted), partial(position_of, magnitudes)
            return [
                (value_of(order.bits, dtype), position(order.bits, rank - order.below))
                for rank, order in zip(wanted, orders, strict=True)
            ]

        workers = self.workers if self.looped(path) else 1
        return list(in_order(map(partial, repeat(one), self.trees, ranks), workers))

    def each_window(
        self, function: Callable[[Window], Value], path: str, *, rows: bool = False
    ) -> Iterator[Value] | None:
        if not self.looped(path):
            return None
        read, most = self.read(path, self.trees), CHUNK // len(self.trees)
        tasks = each_window(self.window(path, read), function, self.base[path], read.span, most, rows=rows)
        return None if tasks is None else in_order(tasks, self.workers)

    def vector(self, path: str, name: str, *, rows: bool) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        dtype, origin = compute_dtype(path, self.base, self.trees), self.base[path].reshape(-1)
        leaf, keys = self.trees[name][path].reshape(-1), None
        if self.key is not None:
            keys = mask_keys(self.key, [name], [path])
        for group in groups([self.base[path]], CHUNK, rows):
            for _, start, stop in group:
                drawn = None if keys is None else fields_of(keys, [(0, start, stop)], origin.device)[0][0]
                yield start, delta_of(leaf[start:stop], origin[start:stop], dtype), drawn


def _aligned(leaf: Tensor) -> Tensor:
    """A flat leaf as loops read it: a file may place leaves at odd addresses."""
    flat = leaf.resolve_neg().reshape(-1).contiguous()
    return flat.clone() if flat.data_ptr() % flat.itemsize else flat


def orders_by_loops(group: looped_ranks.Group, ranks: Sequence[int]) -> list[Order]:
    """`looped_ranks.orders`. Raises: NotFinite."""
    if (found := looped_ranks.orders(group, ranks)) is None:
        raise NotFinite
    return found


def vector_by_rule(rule: Rule, base: Leaves, experts: Mapping[str, Leaves], key: Tensor | None = None) -> Leaves:
    """The merged task vector of checked leaves by a rule that has ``fuse`` or ``total``."""

    def fuse(path: str) -> Fuse:
        if rule.fuse is not None:
            return rule.fuse(path)
        total = rule.total
        assert total is not None
        return lambda piece: total(iter(piece.deltas))

    floating = {path: leaf for path, leaf in base.items() if leaf.is_floating_point()}
    own = {path: fuse(path) for path in floating}
    vector = {
        path: torch.empty(leaf.shape, dtype=compute_dtype(path, base, experts), device=leaf.device)
        for path, leaf in floating.items()
    }
    for piece in pieces(base, experts, key=key, rows=rule.rows, at_once=partial(rule.at_once, base)):
        flat = vector[piece.path].view(-1)
        flat[piece.start : piece.start + piece.deltas[0].numel()] = own[piece.path](piece)
    return vector


def by_loops(rule: Rule, leaves: InMemory, coef: float | None) -> Leaves:
    """The merged task vector, or with a coefficient the merged weights, of those leaves that compiled loops read.

    Raises: NotFinite.
    """
    found: dict[str, Tensor] = {}

    def tasks(path: str, loop: Loop) -> Iterator[Callable[[], bool]]:
        leaf, read = leaves.base[path], leaves.read(path, leaves.trees)
        window, dtype = leaves.window(path, read, coef), torch.float32 if coef is None else leaf.dtype
        found[path] = torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
        flat = found[path].view(-1)

        def merge(start: int, stop: int) -> bool:
            done = loop(window(start, stop, flat[start:stop]))
            return done.finite and done.fits

        most = min(CHUNK // len(leaves.trees), ROWS) if rule.rows else read.span
        return (partial(merge, *span) for span in spans(leaf, most, rows=rule.rows))

    if rule.loop is not None:
        paths = filter(leaves.looped, leaves.coefs)
        every = ((path, loop) for path in paths if (loop := rule.loop(path)) is not None)
        if not all(in_order(chain.from_iterable(starmap(tasks, every)), leaves.workers)):
            raise NotFinite
    return found


def merged_leaves(config: Merger, leaves: InMemory, coef: float | None) -> tuple[Leaves, Leaves]:
    """The leaves of `by_loops`, and the task vector of all others. Raises: NotFinite."""
    config.prepare(leaves)
    base = leaves.base
    rule = config.rule(leaves).worth(sum(base[path].numel() for path in leaves.coefs) * len(leaves.trees))
    done = by_loops(rule, leaves, coef) if leaves.by_loops else {}
    rest = {path: leaf for path, leaf in base.items() if path not in done}
    return done, vector_by_rule(rule, rest, leaves.trees, leaves.key)


def read_best(
    base: Leaves,
    experts: Mapping[str, Leaves],
    key: Tensor | None,
    fn: Callable[[InMemory], Value],
    alone: float | None = None,
) -> Value:
    """``fn`` of trees in memory, read by compiled loops where that is worth their start and all values are finite."""
    weights = sum(leaf.numel() for leaf in base.values() if leaf.is_floating_point()) * len(experts)
    if weights >= WORTH * (1 if execution.started() else 4) and not execution.transformed():
        with suppress(NotFinite):
            return fn(InMemory(base, experts, key=key, by_loops=True, alone=alone))
    return fn(InMemory(base, experts, key=key, alone=alone))


def merge_alone(
    config: Merger,
    experts: Experts,
    flat: Mapping[str, Leaves],
    fuse: Callable[[str, Iterator[Tensor]], Tensor],
    coef: float = 1.0,
) -> Params:
    """`merge_weights` of a merger without a base, by its rule where compiled loops read leaves, else by ``fuse``."""
    start = next(iter(flat.values()))

    def leaves_of(leaves: InMemory) -> Leaves:
        if not leaves.by_loops:
            return {}
        weights = sum(start[path].numel() for path in leaves.coefs) * len(flat)
        return by_loops(config.rule(leaves).worth(weights), leaves, coef)

    done = read_best(start, flat, None, leaves_of, alone=coef)

    def merged(path: str, values: Iterator[Tensor]) -> Tensor:
        return done[path] if path in done else fuse(path, values)

    return merge_weights(experts, flat, merged)


def checked_leaves(
    config: Merger,
    base: Params,
    experts: Experts,
    key: Tensor | None = None,
    problems: Sequence[str] = (),
    coef: float | None = None,
) -> tuple[Leaves, Leaves]:
    """`merged_leaves` of a merger with a base. Loops are taken for trees as large as `WORTH` outside of transforms.

    Raises: ValueError that lists the given problems, the merger's, and all of structure and shapes.
    """
    found = [*(key_problems(key) if config.random else []), *problems]  # type: ignore[arg-type]
    found += option_problems(config) or config.problems(experts)
    start, flat = check(base, experts, found)
    raise_problems(config.size_problems(start, len(flat)))
    if config.random or config.trimming() is not None:
        raise_problems(tied_problems(start))
    return read_best(start, flat, key, lambda leaves: merged_leaves(config, leaves, coef))


def option_problems(config: Merger) -> list[str]:
    """Errors for options of the wrong type, so that `Merger.problems` may compare them."""
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "coef"}
    numbers = {f.name for f in fields(config) if f.type in (float, float | None, int)}
    wanted = {name for name, own in signature(config.function).parameters.items() if own.default is not None}
    wanted &= {f.name for f in fields(config) if f.default is None} - numbers  # a preset's value stands for None
    return [
        *type_problems(
            **{
                label: number
                for name in given.keys() & numbers
                for label, number in named(name, given[name], by_leaf=name in config.by_leaf).items()
            }
        ),
        *flag_problems(**{f.name: given[f.name] for f in fields(config) if f.type is bool}),
        *(f"{name} is None: give a value" for name in given if name in wanted and given[name] is None),
    ]


def named(name: str, value: Any, *, by_leaf: bool = True) -> dict[str, Any]:
    """The numbers of an option by their names in errors. Args: by_leaf: it may be {glob: number}."""
    one = not (by_leaf and isinstance(value, Mapping))
    return {name: value} if one else {f"{name} of {glob!r}": own for glob, own in value.items()}


def merged(
    kind: type[Merger], *, base: Params, experts: Experts, coef: float, key: Tensor | None = None, **options: Any
) -> Params:
    """θ₀ + γ τ by a merger with a base and its options: the body of a merger's own function."""
    config, problems = kind(**options), coef_problems(coef)
    done, vector = checked_leaves(config, base, experts, key, problems, None if problems else float(coef))
    if not done:
        return applied(base, vector, coef=coef)
    for path, leaf in done.items():
        check_variances(path, leaf)
    rest = {path: leaf for path, leaf in tree.flatten(base).items() if path not in done}
    return tree.unflatten(base, {**done, **tree.flatten(applied(rest, vector, coef=coef))})


def vector_function(kind: type[Merger], **defaults: Any) -> Callable[..., Leaves]:
    """``<name>_vector`` of a merger with a base, by its options but ``coef``; the merger gets it as ``function``.

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
    own_signature = Signature(parameters)

    def vector(*trees: Any, **options: Any) -> Leaves:
        bound = own_signature.bind(*trees, **options)
        bound.apply_defaults()
        *key, base, experts = (bound.arguments.pop(name) for name in names)
        done, rest = checked_leaves(kind(**bound.arguments), base, experts, *key)
        return {path: found for path in tree.flatten(base) if (found := done.get(path, rest.get(path))) is not None}

    own = kind.__module__.rpartition(".")[2]
    vector.__name__ = vector.__qualname__ = f"{own}_vector"
    vector.__doc__ = f"The merged task vector of `{own}`: flat, floating-point leaves only, for `apply_vector`."
    whole = getdoc(vars(modules[kind.__module__]).get(own, vector)) or ""  # of the merger's own function
    lines = whole.partition("Args:\n")[2].partition("\n\n")[0].splitlines()
    if lines := [line for line in lines if not line.startswith("    coef: ")]:
        vector.__doc__ = "\n".join([f"{vector.__doc__}\n\nArgs:", *lines])
    vector.__module__, vector.__signature__ = kind.__module__, own_signature  # type: ignore[attr-defined]
    kind.function = staticmethod(vector)
    return vector
