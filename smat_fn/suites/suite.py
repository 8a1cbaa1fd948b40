"""Base classes of suites and of their options."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from .. import tree
from ..data.batching import batch_indices
from ..errors import check_member, count_problems, raise_problems
from ..grad import linearised
from ..types import Batch, LossFn, Params, Where

Method = TypeVar("Method", bound=Callable[..., Any])
_KINDS: Mapping[Any, str] = MappingProxyType({bool: "True or False", str: "a text"})


@dataclass(frozen=True)
class SuiteOptions:
    """Options of a suite: annotations check texts and bools, `LOWEST` and `POSITIVE` numbers, `problems` the rest."""

    LOCAL: ClassVar[tuple[str, ...]] = ()  # those that say where and how fast it runs, which are not in its recipe
    # those that the recipe names only where they are given
    UNSAID: ClassVar[tuple[str, ...]] = ("columns", "linearised", "metric")
    LOWEST: ClassVar[Mapping[str, int]] = MappingProxyType({})  # the least values of integers
    POSITIVE: ClassVar[tuple[str, ...]] = ()  # numbers that must be positive and finite

    def __post_init__(self) -> None:
        problems = count_problems(self, self.LOWEST)
        problems += [
            f"{name} is {value!r}, must be positive and finite"
            for name in self.POSITIVE
            if not (isinstance(value := getattr(self, name), int | float) and 0 < value < inf)
        ]
        problems += [
            f"{field.name} is {value!r}, must be {_KINDS[field.type]}"
            for field in fields(self)
            if field.type in (bool, str) and not isinstance(value := getattr(self, field.name), field.type)
        ]
        name = type(self).__module__.rpartition(".")[2]
        raise_problems([f"{name}: {problem}" for problem in [*problems, *self.problems()]])

    def problems(self) -> list[str]:
        """Errors for bad values that no other check finds."""
        return []

    def loading(self) -> dict[str, Any]:
        """The options that loaders of models take."""
        return {name: getattr(self, name) for name in ("dtype", "gradient_checkpointing", "train_layers", "train")}

    def recipe(self, name: str, seed: int) -> dict[str, Any]:
        """JSON values from which the suite can be rebuilt; columns only where some are renamed."""
        kept = {
            option: list(value) if isinstance(value, tuple) else value
            for option, value in vars(self).items()
            if option not in self.LOCAL
        }
        facts: dict[str, Any] = {"name": name, "seed": seed, **kept}
        return {option: value for option, value in facts.items() if value or option not in self.UNSAID}


class BaseSuite:
    """Base class of suites, as `types.Suite` describes them; optional methods are None.

    Args: members: attributes and, for a suite made of functions, methods; of a suite with ``options`` its recipe is
        theirs.
    """

    Options: ClassVar[type[SuiteOptions]]
    OWN_HEADS: ClassVar[bool] = False  # scores are under heads that the suite makes itself
    options: Any = None

    name: str
    tasks: tuple[str, ...]
    base: dict[str, Tensor]
    where: Where
    recipe: Mapping[str, Any]
    seed: int
    repeats: Mapping[str, int] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    made: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # splits of a task that were made of its training rows
    reads: frozenset[str] | None = None
    same_bits: tuple[str, ...] = ()  # options of memory and time that change no bit of an expert
    plain: frozenset[str] = frozenset()  # language tasks whose rows are plain texts
    untrained: Mapping[str, Tensor] = MappingProxyType({})
    loss_fn: Any
    batch: Any
    score: Any
    epoch_steps: Any = None
    score_once: Any = None
    cuts: Any = None
    content: Any = None
    score_tensor: Any = None
    split: Any = None
    batch_rows: Any = None
    train_rows: Any = None
    dev_batches: Any = None

    def __init__(self, **members: Any) -> None:
        if self.options is not None:
            members["recipe"] = self.options.recipe(self.name, members["seed"])
        vars(self).update(members)

    def replace(self, **members: Any) -> Self:
        """A copy with other members."""
        new = copy(self)
        vars(new).update(members)
        return new

    def check(self, task: str, split: str = "test") -> None:
        """Raises: ValueError for a task that is not one of this suite, and a split other than dev and test."""
        check_member(f"{self.name} task", task, self.tasks)
        check_member("split", split, ("dev", "test"))


class Head(NamedTuple):
    """The frozen head of a task: logits ``weight @ f + bias`` of a feature f, of length 1 unless the suite says no."""

    weight: Tensor  # float32 (C, D)
    bias: Tensor  # float32 (C,)
    classes: tuple[str, ...]  # their names


class EncoderSuite(BaseSuite):
    """A suite of classification by an encoder under frozen heads.

    Subclasses set ``device``, ``batch_size`` and ``losses``, whose aux are the logits, and define `examples`; suites of
    pretrained models set ``heads``, on the CPU.
    """

    OWN_HEADS = True
    device: torch.device
    batch_size: int
    losses: Mapping[str, LossFn]  # by task
    heads: Mapping[str, Head]  # by task

    def __init__(self, **members: Any) -> None:
        if getattr(self.options, "linearised", False):
            self.losses = {task: linearised(loss, members["base"]) for task, loss in self.losses.items()}
        super().__init__(**members)

    def examples(self, task: str) -> int:
        """The number of training rows of a task."""
        raise NotImplementedError

    def loss_fn(self, task: str) -> LossFn:
        self.check(task)
        return self.losses[task]

    def epoch_steps(self, task: str) -> int:
        self.check(task)
        return -(-self.examples(task) // self.batch_size)

    def batch_rows(self, task: str, key: Tensor, step: int) -> list[int]:
        self.check(task)
        return batch_indices(key, self.examples(task), self.batch_size, step).tolist()

    def predictions(self, params: Params, task: str, batches: Iterable[Batch]) -> Tensor:
        """The classes with the largest logits, -1 where they are NaN. Raises: ValueError for leaves unlike base's."""
        tree.check_same(self.base, "the base", params=params)
        here = {name: leaf.to(self.device) for name, leaf in params.items()}
        with torch.no_grad():
            logits = torch.cat([self.losses[task](here, batch)[1] for batch in batches])
        return torch.where(logits.amax(1).isnan(), -1, logits.argmax(1))


def remembered(method: Method) -> Method:
    """Cache a method's results with its object, by arguments (functools.cache would keep the object alive)."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        results = vars(self).setdefault("_results", {})
        key = (method.__name__, *args)
        if key not in results:
            results[key] = method(self, *args)
        return results[key]

    return call  # type: ignore[return-value]
