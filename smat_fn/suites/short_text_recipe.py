"""The options of suite ``short_text`` as a value."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import count_problems
from .sources import absolute

Data = str | Mapping[str, str]


@dataclass(frozen=True)
class ShortTextRecipe:
    """Everything but the seed that the suite depends on."""

    model: str  # a folder, or a repository of the hub
    data: Data  # a folder of tasks, a dataset of the hub whose configs are the tasks, or {task: folder or dataset}
    tasks: tuple[str, ...]
    train_layers: int | None = None  # of the top; None: the whole encoder
    per_class: int | None = None  # training rows a class that heads are made of; None: 16, 3 of more than 20 classes
    head_c: float = 10.0  # inverse strength of the heads' penalty
    normalize: bool = True  # features have length 1
    batch_size: int = 16
    max_length: int = 128  # tokens of a text
    dtype: str = "float32"  # of trained parameters and their computation
    rows: int | None = None  # only the first rows of each split, for quick runs; heads are those of all rows

    def __post_init__(self) -> None:
        lowest = {"train_layers": 1, "per_class": 1, "batch_size": 1, "max_length": 3, "rows": 1}
        problems = count_problems(self, lowest)
        if not isinstance(self.head_c, int | float) or not 0 < self.head_c < float("inf"):
            problems.append(f"head_c is {self.head_c!r}, must be positive and finite")
        if not isinstance(self.normalize, bool):
            problems.append(f"normalize is {self.normalize!r}, must be a bool")
        if bad := [task for task in self.tasks if not re.fullmatch(r"\w[\w.-]*", task)]:
            problems.append(f"tasks {bad} cannot name folders: use letters, digits, '.', '_' and '-'")
        if isinstance(self.data, Mapping) and (lacking := [task for task in self.tasks if task not in self.data]):
            problems.append(f"data has no {', '.join(lacking)}, it has {', '.join(self.data)}")
        errors.raise_problems([f"short_text: {problem}" for problem in problems])

    def source(self, task: str) -> str:
        """The folder or the hub's dataset of a task."""
        if isinstance(self.data, Mapping):
            return self.data[task]
        return str(Path(self.data) / task) if Path(self.data).is_absolute() else f"{self.data}:{task}"


def resolve_data(given: Any) -> Data:
    """A folder by its absolute path, a name of the hub as it is; of a mapping, or the JSON file of one, every value.

    Raises: ValueError for anything else.
    """
    if isinstance(given, str | Path) and str(given).endswith(".json"):
        try:
            given = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"data {str(given)!r} is no JSON file of {{task: folder or dataset}} ({error})") from error
    if isinstance(given, Mapping) and given and all(isinstance(x, str) for pair in given.items() for x in pair):
        return {task: absolute(source) for task, source in given.items()}
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError(f"data is {given!r}, must be a folder, a dataset of the hub, or {{task: one of these}}")
    return absolute(given)
