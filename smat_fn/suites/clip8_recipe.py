"""The options of suite ``clip8`` as a value."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import count_problems
from .templates import DEFAULT, TEMPLATES


@dataclass(frozen=True)
class Clip8Recipe:
    """Everything that the suite depends on."""

    model: str  # a folder, or a repository of the hub
    data: str  # a folder of <task>/<split>, or a dataset of the hub whose configs are the tasks
    tasks: tuple[str, ...]
    templates: Mapping[str, list[str]]  # by task
    batch_size: int = 128
    dtype: str = "float32"  # of parameters and computation
    gradient_checkpointing: bool = False
    rows: int | None = None  # only the first rows of each split, for quick runs
    columns: Mapping[str, str] = field(default_factory=dict)  # ours: the source's

    def __post_init__(self) -> None:
        problems = count_problems(self, {"batch_size": 1, "rows": 1})
        if not isinstance(self.gradient_checkpointing, bool):
            problems.append(f"gradient_checkpointing is {self.gradient_checkpointing!r}, must be a bool")
        for task, own in self.templates.items():
            if bad := [template for template in own if not isinstance(template, str) or "{}" not in template]:
                problems.append(f"templates of {task} are to hold {{}} for the class, these do not: {bad}")
            if not own:
                problems.append(f"templates of {task}: there are none, give at least one")
        errors.raise_problems([f"clip8: {problem}" for problem in problems])


def resolve_templates(given: Any, tasks: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by task, from a mapping, the JSON file of one, or one prompt.

    Raises: ValueError for anything else, and for templates of other tasks.
    """
    if isinstance(given, str) and "{}" in given:
        given = {task: [given] for task in tasks}
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"templates {given!r} is neither a prompt with {{}} for the class nor a JSON file ({error})"
            ) from error
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(own, (list, tuple)) for own in given.values()):
        raise ValueError(
            f"templates are {given!r}, must be lists of prompts by task: {{'MNIST': ['a photo of {{}}.']}}"
        )
    if strangers := sorted(set(given) - set(tasks)):
        raise ValueError(f"templates name {strangers}, the tasks are {list(tasks)}")
    return {task: list(given.get(task, TEMPLATES.get(task, DEFAULT))) for task in tasks}
