"""The options of suite ``trace`` as a value, and what follows from them alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

from .. import errors
from ..data import text
from ..errors import count_problems
from ..evaluate import decoding
from ..evaluate.decoding import Decoding
from ..evaluate.metrics import TextMetric, label_accuracy, numeric_accuracy, rouge_l

METRICS: Mapping[str, TextMetric] = MappingProxyType(
    {"rouge-l": rouge_l, "label": label_accuracy, "number": numeric_accuracy}
)


@dataclass(frozen=True)
class TraceRecipe:
    """Everything but the seed that the suite depends on."""

    model: str  # a folder, or a repository of the hub
    data: str  # a folder of <task>/<split> files, or a dataset of the hub whose configs are the tasks
    tasks: tuple[str, ...] | None = None  # None: those of the folder, of a hub dataset the seven
    metric: str = "rouge-l"  # of tasks that are not TRACE's: a name of METRICS
    max_length: int = 512  # tokens of a training row
    truncate: text.Truncate = "right"
    mask_prompt: bool = False  # no loss on the prompt
    batch_size: int = 8
    dtype: str = "float32"  # of parameters and computation
    gradient_checkpointing: bool = False
    max_new_tokens: int | None = None  # fewer than the task's, for quick runs; of other tasks: 100 where None
    rows: int | None = None  # only the first rows of each split, for quick runs
    columns: Mapping[str, str] = field(default_factory=dict)  # ours: the source's

    def __post_init__(self) -> None:
        problems = count_problems(self, {"max_length": 2, "batch_size": 1, "max_new_tokens": 1, "rows": 1})
        problems += [
            f"{name} is {value!r}, must be a {kind.__name__}"
            for name, kind in {"model": str, "data": str, "mask_prompt": bool, "gradient_checkpointing": bool}.items()
            if not isinstance(value := getattr(self, name), kind)
        ]
        for name, known in {"metric": tuple(METRICS), "truncate": get_args(text.Truncate)}.items():
            if (value := getattr(self, name)) not in known:
                problems.append(f"{name} {value!r} is unknown, choose one of {', '.join(map(repr, known))}")
        errors.raise_problems([f"trace: {problem}" for problem in problems])


def settings_of(task: str, recipe: TraceRecipe) -> Decoding:
    """How a task is decoded."""
    if task not in decoding.TRACE:
        return Decoding(recipe.max_new_tokens or 100)
    given = decoding.TRACE[task]
    return given._replace(max_new_tokens=min(given.max_new_tokens, recipe.max_new_tokens or given.max_new_tokens))
