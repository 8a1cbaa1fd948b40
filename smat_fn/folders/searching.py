"""Search of a coefficient, of options and of numbers by expert, by any score of merged folders, one at a time."""

import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, Unpack

import torch

from .. import checkpoint, errors, json_lines
from ..merge.around.select import Tuned, choose, choose_coef, combinations, grid_problems
from ..merge.around.weights import (
    ByExpert,
    check_trials,
    numbers_of,
    over_problems,
    select_numbers,
    with_numbers,
)
from ..merge.parts.merger import Merger
from .files import Hashing, shared
from .prepare import Options, prepare
from .run import decided, read_by, room_problems, write_job
from .streaming.chunks import Job
from .streaming.estimate import memory_problems
from .writing import Shard, locked, work_folder

log = logging.getLogger(__name__)
SCORES = "candidates.jsonl"  # beside the merged models: scores of candidates
_CANDIDATE = ".smat-candidate"  # ends the name of the folder of a candidate, which is removed after its score

Score: TypeAlias = Callable[[Path], float | Mapping[str, float]]


class Searched(NamedTuple):
    """A coefficient, and perhaps options and numbers by expert, that were chosen by the score of merged folders."""

    config: Merger  # with the coefficient, these options and these numbers
    scores: dict[str, float]  # of the chosen one, by name; of a score without a name {"": score}
    curve: tuple[tuple[float, float], ...]  # (coefficient, score) of every candidate; empty where there is no choice
    edge: str = ""  # "smallest" or "largest", where the coefficient is at the edge of those tried
    trials: tuple[tuple[ByExpert, float], ...] = ()  # (numbers by expert, score) of every trial, first the start
    tuned: tuple[Tuned, ...] = ()  # every combination of options, where there are several to choose from

    @property
    def score(self) -> float:
        """The mean of the scores."""
        return fmean(self.scores.values())


class Candidate(NamedTuple):
    """A score as soon as it is known."""

    name: str  # of the output folder, with options and coefficient, or a trial: "ties keep 0.2 0.3", "ta trial 7"
    score: float
    kept: bool  # known from an earlier search


class _Ready(NamedTuple):
    """A candidate before it is merged."""

    name: str
    folder: Path
    job: Job
    shards: list[Shard]
    more: str


# over 60 lines: its docstring explains every argument
def search_folders(
    config: Merger,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    score: Score,
    coefs: Sequence[float] = (),
    widen: bool = False,
    over: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    trials: int = 0,
    trials_over: Sequence[str] = ("weights",),
    seed: int = 0,
    name: str = "",
    hashing: Hashing | None = None,
    report: Callable[[Candidate], object] = lambda candidate: None,
    **options: Unpack[Options],
) -> Searched:
    """The coefficient whose merged folder has the largest score; `merge_folders` then merges by `Searched.config`.

    Each candidate is merged by `merge_folders`, with the same bytes, into a folder beside ``out``, scored, and removed,
    also after an error. There is one such folder at a time; one that a killed process left is removed at the next
    start. A merger without an open coefficient is one candidate. With ``over`` there is such a search for every
    combination of these values, those of the last option first; the best score decides, of equal ones the first
    combination. With ``trials`` the best candidate is the first one of `select_numbers`, which tries so many with other
    weights or densities of the experts.

    Args:
        config: its ``coef`` is None, to be chosen; it may hold any value of the options in ``over``.
        base, experts: as of `merge_folders`.
        out: folder for the merged model, which is not written here.
        score: of the folder of a candidate, the larger the better: a number, or several by name, whose mean counts.
            Beside this folder it may write files of its own, which are removed too.
        coefs: candidates; default: the merger's own, `Merger.grid`.
        widen: try more as long as the best one is at an edge of those, ten at most (`choose_coef`).
        over: values to try by option of the merger, such as ``{"keep": (0.1, 0.3)}``: numbers, texts or switches.
        trials: models with other numbers by expert to try, 0 or at least a generation of CMA-ES.
        trials_over: which numbers: "weights", "densities" or both.
        seed: of these numbers.
        name: text that distinguishes this score from others. With it, scores are kept in ``candidates.jsonl`` beside
            ``out``, by the content of the inputs, all options that decide the bytes, and this name: none is computed
            twice.
        hashing: as of `merge_folders`.
        report: called with each score.
        options: as of `merge_folders`, ``coef`` by glob only; coefficients are for the other parameters.

    Raises:
        ValueError: as `merge_folders`, of every combination before any work; for coefficients that are not finite, are
            given twice or change nothing; for options that the merger does not have, and values that are given twice;
            for trials as `select_numbers`; if another search of ``out`` is running; and, with the name of the
            candidate, if a score is not a finite number or ``score`` raises one.
        ModuleNotFoundError: as `select_numbers`.
    """
    out = checkpoint.follow(Path(out))
    every, more = _combined(config, over), read_by(base, experts, options)
    place, kept = _place(out), _kept(out.parent / SCORES) if name else {}
    found = dict[str, dict[str, float]]()  # by options and coefficient, or number of the trial

    def ready(own: Merger, *end: str) -> _Ready:
        named = " ".join([out.name, *end]), place / "-".join([out.name, *(re.sub(r"[^\w.+-]", "_", e) for e in end)])
        return _Ready(*named, *prepare(own, base, experts, out, **options), more)

    problems = list[str]()
    for _, own in every:
        with errors.collected(problems):
            if trials:
                errors.raise_problems(over_problems(own, trials_over, "trials_over"))
                check_trials(numbers_of(own, list(experts), trials_over), trials)
            tried = _tried(own, coefs)
            first = ready(_at(own, tried[0]))
            problems += [*memory_problems(first.job), *room_problems(work_folder(out), first.shards)]
            if any(first.job.coefs == ready(_at(own, coef)).job.coefs for coef in tried[1:2]):
                problems.append("`coef` has a number for every parameter, so there is nothing to choose: leave it out")
    errors.raise_problems(problems)
    with shared(hashing, options.get("workers", 1)) as hashes, _only(out, place):

        def score_of(config: Merger, *end: str) -> float:
            own, begin = ready(config, *end), time.perf_counter()
            key = _key(own, hashes, name) if name else ""
            scores = found[" ".join(end)] = kept[key] if key in kept else _scored(own, score, hashes)
            if name and key not in kept:
                about = {"key": key, "candidate": own.name, "score": name, "scores": scores}
                json_lines.append(out.parent / SCORES, [{**about, "seconds": round(time.perf_counter() - begin, 3)}])
            report(Candidate(own.name, fmean(scores.values()), key in kept))
            return fmean(scores.values())

        def search(config: Merger, *end: str) -> Searched:
            grid = [coef for coef in _tried(config, coefs) if coef is not None]
            if not grid:
                score_of(config, *end)
                return Searched(config, found[" ".join(end)], ())
            best, edge = choose_coef(lambda coef: score_of(_at(config, coef), *end, _text(coef)), grid, widen=widen)
            return Searched(_at(config, best.best), found[" ".join([*end, _text(best.best)])], best.curve, edge)

        searched = [search(own, *(str(text) for option in at.items() for text in option)) for at, own in every]
        chosen = choose(searched, lambda own: own.score).best
        if over:
            tuned = (
                Tuned(at, getattr(own.config, "coef", None), own.score, own.curve)
                for (at, _), own in zip(every, searched, strict=True)
            )
            chosen = chosen._replace(tuned=tuple(tuned))
        if not trials:
            return chosen
        places = count()

        def score_with(numbers: ByExpert) -> float:
            if (at := next(places)) == 0:  # the first ones are those of the best coefficient
                return chosen.score
            return score_of(with_numbers(chosen.config, numbers), "trial", str(at))

        made = select_numbers(chosen.config, list(experts), score_with, over=trials_over, trials=trials, seed=seed)
        best_one = [numbers for numbers, _ in made.curve].index(made.best)
        scores = found[f"trial {best_one}"] if best_one else chosen.scores
        return chosen._replace(config=with_numbers(chosen.config, made.best), scores=scores, trials=made.curve)


def _text(coef: float) -> str:
    return f"{coef:.12g}"


def _combined(config: Merger, over: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Merger]]:
    """Every combination of options, and the merger with it. Raises: ValueError for those that cannot be tried."""
    if not isinstance(config, Merger):
        raise ValueError(f"config is {config!r}, must be the options of a merger, such as TaskArithmetic()")
    if not isinstance(over, Mapping):
        raise ValueError(f"over is {over!r}, must be a mapping {{option: values}}")
    problems, known = list[str](), [option.name for option in fields(config)]
    for name, values in over.items():
        several = isinstance(values, Sequence) and not isinstance(values, str) and len(values)
        if name not in known:
            choice = f"choose from {', '.join(known)}" if known else "it has none"
            problems.append(f"over: {name!r} is not an option of {config.name}, {choice}")
        elif not several or not all(isinstance(value, int | float | str) for value in values):
            problems.append(f"over: {name} is {values!r}, must be one or more numbers, texts or switches")
        elif len({*values}) < len(values):
            problems.append(f"over: {name} is {list(values)}: name each value once")
    errors.raise_problems(problems)
    return [(options, replace(config, **options)) for options in combinations(over)]


def _tried(config: Merger, coefs: Sequence[float]) -> list[float | None]:
    """The coefficients to try, None for the merger as it is. Raises: ValueError for those that cannot be tried."""
    if getattr(config, "coef", 0.0) is not None:
        if coefs:
            given = f"{config.coef:g}, leave one out" if hasattr(config, "coef") else "none: leave them out"
            raise ValueError(f"coefs are {list(coefs)}, but the coefficient of {config.name} is {given}")
        return [None]
    errors.raise_problems(grid_problems(coefs))
    return [*sorted(coefs or config.grid)]


def _at(config: Merger, coef: float | None) -> Merger:
    return config if coef is None else replace(config, coef=coef)  # type: ignore[call-arg]


def _place(out: Path) -> Path:
    return out.parent / f".{out.name}{_CANDIDATE}"


@contextmanager
def _only(out: Path, place: Path) -> Iterator[None]:
    """Only one search of ``out`` is inside. Folders of candidates are removed at the end, and at the start left ones.

    Raises: ValueError if another search of ``out`` is running.
    """
    with _locked(place, f"another search of {out} is running (it holds the lock beside {place}): wait for it"):
        try:
            for left in out.parent.glob(f".*{_CANDIDATE}"):
                with suppress(ValueError), nullcontext() if left == place else _locked(left, "a search is running"):
                    shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _locked(place: Path, taken: str) -> AbstractContextManager[None]:
    return locked(place.with_name(f"{place.name}.lock"), taken)


def _scored(own: _Ready, score: Score, hashing: Hashing) -> dict[str, float]:
    """Merge a candidate, score it and remove it. Raises: ValueError with its name."""
    try:
        write_job(own.job, own.shards, own.folder, describe=None, hashing=hashing, overwrite=False, more=own.more)
        own.job.scratch.free()
        if own.job.device.type == "cuda":
            torch.cuda.empty_cache()  # for the program that scores
        found = score(own.folder)
        scores = dict(found) if isinstance(found, Mapping) else {"": found}
        errors.raise_problems([] if scores else ["there is no score: give at least one"])
        return {str(name): _number(name, value) for name, value in scores.items()}
    except ValueError as error:
        raise errors.Problems([f"{own.name}: {text}" for text in errors.texts(error)]) from error
    finally:
        shutil.rmtree(own.folder.parent, ignore_errors=True)


def _number(name: Any, value: Any) -> float:
    """A score as a float. Raises: ValueError if it is not a finite number."""
    said = f"score {name!r}" if name else "its score"
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # the last one of tensors
        raise ValueError(f"{said} is {value!r}, must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{said} is {number}, must be finite")
    return number


def _key(own: _Ready, hashing: Hashing, name: str) -> str:
    """SHA-256 of all that a score depends on: input files by content, settings, files beside the weights, its name."""
    job, files = own.job, hashing.digests(own.job.seen)
    inputs = [[label, *(files[f] for f in each.stores)] for label, each in {"": job.base, **job.experts}.items()]
    copied = hashing.digests(file for file in job.beside.values() if isinstance(file, Path))
    beside = {
        path: copied[file] if isinstance(file, Path) else hashlib.sha256(file).hexdigest()
        for path, file in job.beside.items()
    }
    facts = [decided(job, own.shards), own.more, inputs, sorted(files.values()), sorted(beside.items()), name]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kept(file: Path) -> dict[str, dict[str, float]]:
    """The scores that earlier searches kept, by key."""
    found = dict[str, dict[str, float]]()

    def take(line: Mapping[str, Any]) -> None:
        found[str(line["key"])] = {str(name): _number(name, value) for name, value in line["scores"].items()}

    json_lines.read(file, take, log)
    return found
