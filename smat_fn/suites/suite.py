"""What every benchmark looks like to training, merging and evaluation."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..types import Batch, LossFn, Micro, Params, Where

if TYPE_CHECKING:
    from ..data.text import Cut

SUITES = ("digits", "trace", "clip8", "short_text")


class Suite(NamedTuple):
    """A base model, K tasks on it, and how to train and score them; a value, nothing in it changes.

    Functions of a task raise ValueError for a name outside ``tasks``. Only scores and ``dev_batches`` read dev, test.
    """

    name: str
    tasks: tuple[str, ...]
    base: dict[str, Tensor]  # theta_0: the trainable leaves that all experts share
    where: Where  # the masked set S
    loss_fn: Callable[[str], LossFn]  # task -> loss_fn(params, batch) -> (loss, aux)
    batch: Callable[[str, Tensor, int], Batch]  # (task, run key, step): a pure function of the three
    score: Callable[[Params, str, str], float]  # (params, task, "dev" or "test") -> 0 to 100
    recipe: Mapping[str, Any]  # JSON values; ``load_suite(**recipe)`` builds the same suite
    seed: int  # of splits, base and heads, of sampled answers
    epoch_steps: Callable[[str], int] | None = None  # task -> batches of one epoch; checks all that the task needs
    repeats: Mapping[str, int] = MappingProxyType({})  # tasks whose score is the mean of several decodes: how many
    score_once: Callable[..., float] | None = None  # (.., repeat, journal=None): of one decode, kept row by row
    cuts: Callable[[str], "Cut"] | None = None  # task -> what truncation does to its training rows
    content: Callable[[str, str], str] | None = None  # (task, split) -> hash of what scores depend on beside the recipe
    score_tensor: Callable[[Params, str, str], Tensor] | None = None  # ``score``, 0-d, by operations that vmap knows
    split: Callable[[Batch, int], list[Micro]] | None = None  # (batch, parts) -> micro-batches; None: rows, equal parts
    batch_rows: Callable[[str, Tensor, int], list[int]] | None = None  # as batch -> rows of the task's training split
    dev_batches: Callable[[str], list[Micro]] | None = None  # task -> its dev split as batches of the loss


def load_suite(name: str, *, seed: int, **options: Any) -> Suite:
    """The suite of a name, from ``load(seed=..., **options)`` of the module ``smat_fn.data.<name>``.

    Raises: ValueError for a name not in `SUITES`, and for bad options.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is unknown, the suites are {', '.join(map(repr, SUITES))}")
    return import_module(f".{name}", __package__).load(seed=seed, **options)


def task_names(name: str, **options: Any) -> tuple[str, ...]:
    """The tasks of a suite, without its base: ``task_names(**options)`` of its module, or its ``TASKS``.

    Raises: ValueError as `load_suite`.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is unknown, the suites are {', '.join(map(repr, SUITES))}")
    module = import_module(f".{name}", __package__)
    return module.task_names(**options) if hasattr(module, "task_names") else tuple(module.TASKS)
