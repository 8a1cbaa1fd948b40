"""Scores of models held in memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..types import Params
from .results import Result

if TYPE_CHECKING:
    from ..data.suite import Suite

EXPERT = "expert:"


def score_models(
    suite: "Suite",
    models: Mapping[str, Params],
    split: str,
    *,
    method: str,
    seed: int,
    coefs: Mapping[str, float] | None = None,
) -> list[Result]:
    """One row per model and task: an expert on its own task, any other model on every task of the suite.

    Args: models: parameters by name, an expert's is "expert:<task>"; split: "dev" or "test"; method, seed: of the
        training; coefs: gamma by model name, for merged models that have one.
    Raises: ValueError for an expert of no task of the suite.
    """
    strangers = [m for m in models if m.startswith(EXPERT) and m.removeprefix(EXPERT) not in suite.tasks]
    if strangers:
        raise ValueError(f"models {strangers} are experts of no task of suite {suite.name!r}, which has {suite.tasks}")
    return [
        Result(method, model, task, split, suite.score(params, task, split), seed, (coefs or {}).get(model))
        for model, params in models.items()
        for task in ([model.removeprefix(EXPERT)] if model.startswith(EXPERT) else suite.tasks)
    ]
