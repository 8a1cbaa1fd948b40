"""Scores of models held in memory, each computed once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import checkpoint, machine, progress
from ..types import Params, Suite
from .records import Answer, Journal, Records, Scored, content_key
from .results import OTHERS, Result

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Cost(NamedTuple):
    """Counts and times of a `Scorer`."""

    scores: int = 0  # of one task and decode each
    kept: int = 0  # of them, found in the records
    seconds: float = 0.0  # of scoring the others
    saved: float = 0.0  # seconds that the kept ones had taken


class Scorer:
    """Scores models of a suite, each score computed once and cached by its inputs.

    The cache key holds the suite's recipe and content, torch's version, that of smat_fn with a hash of its source files
    (mergers and metrics may be edited), ``about``, the model's facts, task, split and repeat. The number of threads and
    the decoding batch size are left out: they change scores by rounding alone.

    Args:
        suite: provides tasks and ``score`` or ``score_once``.
        records: score cache; None: in memory.
        about: JSON values that all models share, such as facts of the base.
        answers: cache decoded rows too, so that an interrupted decode resumes.
        bar: tqdm bar that counts scores; None: no bar.
    """

    def __init__(
        self,
        suite: Suite,
        records: Records | None = None,
        *,
        about: Mapping[str, Any] = NOTHING,
        answers: bool = False,
        bar: Any = None,
    ) -> None:
        self.suite, self.cost = suite, Cost()
        self._records = Records() if records is None else records
        self._answers, self._bar = answers, bar
        versions = {"smat_fn": machine.code(), "torch": machine.version("torch")}
        self._facts = {"suite": dict(suite.recipe), "versions": versions, "about": dict(about)}

    def of(self, about: Mapping[str, Any]) -> "Scorer":
        """A scorer with the same suite, cache and bar for models with other facts."""
        return Scorer(self.suite, self._records, about=about, answers=self._answers, bar=self._bar)

    def expect(self, scores: int) -> None:
        """Add to the number of scores that the bar expects."""
        if self._bar is not None:
            self._bar.total = (self._bar.total or 0) + scores

    def once(
        self,
        build: Callable[[], Params],
        task: str,
        split: str,
        repeat: int = 0,
        *,
        model: Mapping[str, Any],
        name: str,
    ) -> float:
        """The score of one decode, from the cache if it is there.

        Args:
            build: makes the parameters; only called if the score must be computed.
            task: task name.
            split: "dev" or "test".
            repeat: number of the decode, from 0.
            model: JSON values that determine the parameters, such as their fingerprint.
            name: name of the model in messages and in the cache.

        Returns:
            The score, 0 to 100.

        Raises:
            ValueError: the score is outside [0, 100]; the suite's own, with the names of model and task.
        """
        facts = {"model": dict(model), "task": task, "split": split, "repeat": repeat}
        content = self.suite.content(task, split) if self.suite.content is not None else None
        key = content_key({**self._facts, **facts, "content": content})
        kept, cost = self._records.score(key), self.cost
        if kept is not None:
            self.cost = Cost(cost.scores + 1, cost.kept + 1, cost.seconds, cost.saved + kept.seconds)
            self.expect(-1)  # the time left is that of the others
            return kept.score
        params, about = build(), {"name": name, **facts}
        started = perf_counter()
        try:
            kept = Scored(self._score(params, task, split, repeat, key, about), perf_counter() - started)
        except ValueError as error:
            raise ValueError(f"{name} on {task} ({split}): {error}") from error
        if not 0 <= kept.score <= 100:
            raise ValueError(
                f"the score of {name} on {task} ({split}) is {kept.score}, no number from 0 to 100: "
                f"look at the metric of suite {self.suite.name!r}, or at weights that are too large for their dtype"
            )
        self.cost = Cost(cost.scores + 1, cost.kept, cost.seconds + kept.seconds, cost.saved)
        self._records.add_score(key, kept, about)
        return kept.score

    def score(
        self, build: Callable[[], Params], task: str, split: str, *, model: Mapping[str, Any], name: str
    ) -> float:
        """The mean score over the decodes of the task."""
        repeats = range(self.suite.repeats.get(task, 1))
        return fmean(self.once(build, task, split, repeat, model=model, name=name) for repeat in repeats)

    def _score(self, params: Params, task: str, split: str, repeat: int, key: str, about: Mapping[str, Any]) -> float:
        done = 0.0

        def advance(share: float) -> None:
            nonlocal done
            if self._bar is not None:
                self._bar.update(share - done)
            done = share

        def add(answers: Sequence[Answer], rows_done: int, rows: int) -> None:
            self._records.add_answers(key, answers, about)
            advance(rows_done / rows)

        if self.suite.score_once is None:
            value = self.suite.score(params, task, split)
        elif self._answers:
            value = self.suite.score_once(params, task, split, repeat, Journal(self._records.answers(key), add))
        else:
            value = self.suite.score_once(params, task, split, repeat)
        advance(1.0)
        return float(value)


def shares_note(scores: Iterable[float]) -> str:
    """A note where no score is above 1 and some are above 0; an empty text elsewhere."""
    scores = list(scores)
    if not scores or not 0 < max(scores) <= 1:
        return ""
    return "no score is above 1 of 100: the models solve next to nothing, or a metric of your own returns shares"


def score_bar() -> Any:
    """A progress bar over scores with the remaining time; where stderr is not a terminal, a line every few per cent."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f} of {total} [{elapsed}<{remaining}]"
    return progress.bar(desc="scores", leave=False, delay=1, bar_format=form)


def score_model(
    scorer: Scorer,
    params: Params,
    split: str,
    *,
    method: str,
    model: str,
    seed: int,
    tasks: Iterable[str],
    others: Sequence[str] = (),
    coef: float | None = None,
    fingerprint: str = "",
) -> list[Result]:
    """One `Result` for each task of a model, and for others, whose rows have a model that begins with `OTHERS`.

    Args: method, model, seed, coef: for the rows; tasks: those that it was made for; others: further ones; fingerprint:
        of params, where it is known.
    Raises: ValueError as `Scorer.once`.
    """
    facts = {"fingerprint": fingerprint or checkpoint.fingerprint(params)}
    rows = []
    for task in (*tasks, *others):
        score = scorer.score(lambda: params, task, split, model=facts, name=f"{method} {model}, seed {seed}")
        rows.append(Result(method, OTHERS + model if task in others else model, task, split, score, seed, coef))
    return rows
