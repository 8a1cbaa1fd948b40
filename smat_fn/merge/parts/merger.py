"""`Merger`, the interface of every merger, its `Rule` for chunks, and what runs a rule on trees in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from inspect import Parameter, Signature, getdoc, signature
from sys import modules
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...errors import flag_problems, raise_problems
from ...types import Params, Scope
from . import arithmetic
from .arithmetic import gram, gram_memory
from .chunks import CHUNK, Fuse, compute_dtype, delta_of, fields_of, groups, mask_keys, pieces
from .inputs import Experts, Leaves, check, coef_problems, key_problems, tied_problems, type_problems
from .looped import Loop, Window
from .ranks import order_of, position_of, value_of
from .vectors import applied

Value = TypeVar("Value")
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
        """Flat task vectors of a leaf, `BLOCK` coordinates at a time; valid until the next block."""

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

    def sums(self, path: str, of: Callable[[Window], Any], *, rows: bool) -> Any:
        """Sums of a leaf's windows by a compiled loop, one after the other: a NumPy array.

        Args: of: a window, such as `looped.ByField.norms`; rows: no row is cut.
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
        return vector_by_rule(self.rule(InMemory(base, experts, key=key)), base, experts, key)

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
    ) -> None:
        self.base, self.trees, self.statistics, self.key = base, experts, statistics, key
        self.experts: Mapping[str, object] = experts
        self.coefs: Mapping[str, float] = {path: 1.0 for path, leaf in base.items() if leaf.is_floating_point()}
        self.cuts: Mapping[str, list[Cut]] = {}
        self.majority, self.device = 1, next(iter(base.values()), torch.empty(0)).device

    def shape(self, path: str) -> torch.Size:
        return self.base[path].shape

    def statistic(self, name: str, path: str) -> Any:
        return self.statistics[name].get(path)

    def gram(self, path: str) -> list[list[float]]:
        return gram([leaves[path] for leaves in self.trees.values()], self.base[path])

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        dtype, origin = compute_dtype(path, self.base, self.trees), self.base[path].reshape(-1)
        leaves = [own[path].reshape(-1) for own in self.trees.values()]
        for first in range(0, origin.numel(), arithmetic.BLOCK):
            part = slice(first, first + arithmetic.BLOCK)
            yield [delta_of(leaf[part], origin[part], dtype) for leaf in leaves]

    def each(self, function: Callable[[str], Value], paths: Iterable[str]) -> Iterator[Value]:
        return map(function, paths)

    def once(self, name: str, number: Callable[[], float]) -> float:
        return number()

    def ranked(self, path: str, ranks: Sequence[Sequence[int]]) -> list[list[tuple[Tensor, int]]]:
        found, dtype = [], compute_dtype(path, self.base, self.trees)
        for leaves, wanted in zip(self.trees.values(), ranks, strict=True):
            magnitudes, own = delta_of(leaves[path], self.base[path], dtype).reshape(-1).abs_(), []
            for rank in wanted:
                order = order_of(magnitudes, rank)
                place = position_of(magnitudes, order.bits, rank - order.below)
                own.append((value_of(order.bits, dtype), place))
            found.append(own)
        return found

    def sums(self, path: str, of: Callable[[Window], Any], *, rows: bool) -> Any:
        return None  # loops of rules are for folders

    def vector(self, path: str, name: str, *, rows: bool) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        dtype, origin = compute_dtype(path, self.base, self.trees), self.base[path].reshape(-1)
        leaf, keys = self.trees[name][path].reshape(-1), None
        if self.key is not None:
            keys = mask_keys(self.key, [name], [path])
        for group in groups([self.base[path]], CHUNK, rows):
            for _, start, stop in group:
                drawn = None if keys is None else fields_of(keys, [(0, start, stop)], origin.device)[0][0]
                yield start, delta_of(leaf[start:stop], origin[start:stop], dtype), drawn


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


def merged_vector(
    config: Merger, base: Params, experts: Experts, key: Tensor | None = None, problems: Sequence[str] = ()
) -> Leaves:
    """The merged task vector of a merger with a base: flat, floating-point leaves only, for `apply_vector`.

    Raises: ValueError that lists the given problems, the merger's, and all of structure and shapes.
    """
    found = [*(key_problems(key) if config.random else []), *problems]  # type: ignore[arg-type]
    found += option_problems(config) or config.problems(experts)
    start, flat = check(base, experts, found)
    raise_problems(config.size_problems(start, len(flat)))
    if config.random or config.trimming() is not None:
        raise_problems(tied_problems(start))
    return config.vector(start, flat, key)


def option_problems(config: Merger) -> list[str]:
    """Errors for options of the wrong type, so that `Merger.problems` may compare them."""
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "coef"}
    numbers = {f.name for f in fields(config) if f.type in (float, float | None, int)}
    wanted = {name for name, own in signature(config.function).parameters.items() if own.default is not None}
    wanted &= {f.name for f in fields(config) if f.default is None} - numbers  # a preset's value stands for None
    return [
        *type_problems(**{name: value for name, value in given.items() if name in numbers}),
        *flag_problems(**{f.name: given[f.name] for f in fields(config) if f.type is bool}),
        *(f"{name} is None: give a value" for name in given if name in wanted and given[name] is None),
    ]


def merged(
    kind: type[Merger], *, base: Params, experts: Experts, coef: float, key: Tensor | None = None, **options: Any
) -> Params:
    """θ₀ + γ τ by a merger with a base and its options: the body of a merger's own function."""
    vector = merged_vector(kind(**options), base, experts, key, coef_problems(coef))
    return applied(base, vector, coef=coef)


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
    own_signature = Signature(parameters)

    def vector(*trees: Any, **options: Any) -> Leaves:
        bound = own_signature.bind(*trees, **options)
        bound.apply_defaults()
        *key, base, experts = (bound.arguments.pop(name) for name in names)
        return merged_vector(kind(**bound.arguments), base, experts, *key)

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
