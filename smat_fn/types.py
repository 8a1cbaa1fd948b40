"""The calling conventions of the whole library, written once.

- *Params*: any pytree of tensors (mappings, sequences, NamedTuples, None, types registered with
  ``torch.utils._pytree``); canonically the flat ``dict[str, Tensor]`` of ``module.named_parameters()``, with tied
  weights once.
- *LossFn*: ``loss_fn(params, *args) -> (loss, aux)`` with a scalar loss. One with a parameter named ``key`` gets from
  methods a key of its own: a child of the step's, the same in all passes of a step, another for each micro-batch.
- *Where*: ``where(path, tensor) -> bool`` picks leaves, or a tree of bools that is like the parameters; ``None`` picks
  every leaf.
- *Optimizer*: ``init(params) -> state``; ``update(grads, state, params) -> (params, state)``.
- *Method*: ``init(params) -> State``; ``update(key, state, batch) -> (State, Info)``. ``key`` is the run key: the
  step number is folded in by ``update``. ``batch`` is one batch of any type, or a ``list`` of
  `Micro`, whose losses and gradients are averaged by their weights.
- *Suite*: a base model and K tasks on it, as training, merging and evaluation see them.

This module imports nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Params: TypeAlias = Any
Batch: TypeAlias = Any
Aux: TypeAlias = Any
LossFn: TypeAlias = Callable[..., tuple[Tensor, Aux]]
Predicate: TypeAlias = Callable[[str, Tensor], bool]
Where: TypeAlias = Predicate | Mapping[str, Any] | Sequence[Any]
PerStep: TypeAlias = Callable[[Any], Any]  # step -> learning rate or weight: numbers, or 0-d tensors inside transforms
Engine: TypeAlias = Literal["func", "autograd"]
Noise: TypeAlias = Literal["uniform", "gaussian", "laplace"]
Offload: TypeAlias = Literal["cpu", "recompute", "stream"]
Precision: TypeAlias = Literal["bf16", "fp32", "mixed"]
Aggregate: TypeAlias = Literal["sum", "mean"]
Scope: TypeAlias = Literal["global", "tensor"]


class Micro(NamedTuple):
    """A micro-batch: a list of them, and nothing else, is what one step averages over.

    Attributes:
        batch: of any type.
        weight: number of examples or tokens that its loss is the mean of, positive and finite; equal weights are all 1.
    """

    batch: Batch
    weight: float = 1.0


class Optimizer(NamedTuple):
    """A pure optimizer; ``update(..., donate=True)`` may write into its arguments and is bit-identical.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (params, state)``.
    """

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Params, Any]]


class Method(NamedTuple):
    """A training method: one optimizer step a call.

    The parameters of the state that ``init`` returns share memory with those given to it, unless the method was built
    with ``donate=True``.

    Attributes:
        init: ``init(params) -> State``.
        update: ``update(key, state, batch) -> (State, Info)``; key: the run key, int64 (2,).
    """

    init: Callable[[Params], Any]
    update: Callable[[Tensor, Any, Batch], tuple[Any, Any]]


class Suite(Protocol):
    """A base model, K tasks on it, and how to train and score them; immutable.

    Methods that take a task raise ValueError for a name outside ``tasks``. Only scores and ``dev_batches`` read dev and
    test rows. The properties are optional methods: None where a suite does not have them.
    """

    name: str
    tasks: tuple[str, ...]
    base: dict[str, Tensor]  # theta_0: the trainable leaves that all experts share
    where: Where  # the masked set S
    recipe: Mapping[str, Any]  # JSON values; ``load_suite(**recipe)`` builds the same suite
    seed: int  # of splits, base and heads, of sampled answers
    repeats: Mapping[str, int]  # number of decodes of tasks whose score is the mean of several
    notes: tuple[str, ...]  # what whoever trains on it should know
    made: Mapping[str, tuple[str, ...]]  # splits of a task that were made of its training rows
    reads: frozenset[str] | None  # of its model's leaves those that scores depend on, named as base's; None: all
    untrained: Mapping[str, Tensor]  # leaves of its model that the loss reads and no expert holds

    def loss_fn(self, task: str, /) -> LossFn:
        """``loss_fn(params, batch) -> (loss, aux)`` of a task."""

    def batch(self, task: str, key: Tensor, step: int, /) -> Batch:
        """The training batch of one step: a pure function of task, run key and step."""

    def score(self, params: Params, task: str, split: str, /) -> float:
        """The score of parameters on split "dev" or "test", 0 to 100."""

    def replace(self, **members: Any) -> "Suite":
        """A copy with other members."""

    @property
    def epoch_steps(self) -> Callable[[str], int] | None:
        """(task) -> batches of one epoch; checks everything that training the task needs."""

    @property
    def score_once(self) -> Callable[..., float] | None:
        """`(params, task, split, repeat, journal=None)` -> score of one decode, its answers cached row by row."""

    @property
    def cuts(self) -> Callable[[str], Any] | None:
        """(task) -> `data.text.Cut`: the shares of its training rows that truncation cuts."""

    @property
    def content(self) -> Callable[[str, str], str] | None:
        """(task, split) -> hash of everything that scores depend on and the recipe does not hold."""

    @property
    def score_tensor(self) -> Callable[[Params, str, str], Tensor] | None:
        """``score`` as a 0-d tensor, computed by operations that vmap supports."""

    @property
    def split(self) -> Callable[[Batch, int], list[Micro]] | None:
        """(batch, parts) -> micro-batches; None: equal numbers of rows (`data.batching.split_rows`)."""

    @property
    def batch_rows(self) -> Callable[[str, Tensor, int], list[int]] | None:
        """(task, key, step) -> the rows of the task's training split that ``batch`` is made of."""

    @property
    def train_rows(self) -> Callable[[str], dict[str, Any]] | None:
        """(task) -> its training rows: "from", a file or a source, "count", and "hash", which edited rows change.

        "dev", such a hash of its dev rows, and "inputs", of what tokenizer or image processor makes of the first rows.
        """

    @property
    def dev_batches(self) -> Callable[[str], list[Micro]] | None:
        """(task) -> its dev split as batches of the loss."""
