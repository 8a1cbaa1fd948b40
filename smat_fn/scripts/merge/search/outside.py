"""Search by the score of another program: candidates are merged on disk, scored by a command, and removed."""

import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .... import checkpoint, errors
from ....config import MergerConfig, settings
from ....errors import problems_of
from ....folders import Candidate, Searched, search_folders
from ....folders.files import Hashing
from ....merge.around.select import best_of, combinations
from ....progress import say
from ... import outcome
from ...signals import leaving_on_signals
from ..on_disk import Order, kept_of, options_of, plan_run, plan_text, pushed, stream_run, summary
from ..provenance.finished import is_merged
from ..provenance.searched import (
    alike,
    chosen_of,
    chosen_text,
    facts_of_options,
    facts_of_trials,
    numbers_text,
    text_of,
    tuned_text,
)
from .choosing import is_open
from .over import Over, value_problems

MODEL, FILES = "{model}", "{out}"  # in a command: the folder of a candidate, and one for the program's own files
LOGS = "logs"  # folder in --out with the output of the command for each candidate
_SHELL = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}  # words that a shell alone acts on
_PLACE = re.compile(r"(?<![^\s=,:'\"])~?/(?!/)[^\s,:'\"]*?([^\s/,:'\"]+)/?(?=$|[\s,:'\"])")  # an absolute path
_LAST, _SHOWN = 1 << 16, 10  # bytes of an output that are read, its lines in an error
_PATIENCE = 10.0  # seconds between asking a program to end and ending it


class Asked(NamedTuple):
    """How a search scores, and what it tries."""

    command: str  # with `MODEL`, and `FILES` where there are keys
    keys: Sequence[str] = ()  # of numbers in a JSON file, names with slashes between; none: the last line is the score
    coefs: Sequence[float] = ()
    widen: bool = False
    trials: int = 0
    trials_over: Sequence[str] = ("weights",)
    over: Over = MappingProxyType({})  # values to try by option, in a search by one merger

    def facts(self, config: MergerConfig) -> dict[str, Any]:
        """The request for one merger, as its manifest has it; of folders of this machine it has names and a hash."""
        own: dict[str, Any] = {"score": _PLACE.sub(r"\1", self.command), "score_keys": list(self.keys)}
        own |= {"score_sha256": hashlib.sha256(self.name.encode()).hexdigest()}
        tried = {"coefs": sorted(self.coefs or config.grid), **({"widen": True} if self.widen else {})}
        own |= {"over": {name: list(values) for name, values in self.over.items()}} if self.over else {}
        given = settings(config)
        begun = {"trials": self.trials, **{option: given.get(option, {}) for option in self.trials_over}}
        return {"asked": {**own, **(tried if is_open(config) else {}), **(begun if self.trials else {})}}

    @property
    def name(self) -> str:
        """The text that distinguishes this score from others."""
        return " ".join([self.command, *(["--score-key", *self.keys] if self.keys else [])])


def run(
    configs: Sequence[MergerConfig], order: Order, asked: Asked, *, dry_run: bool, push: str | None, public: bool
) -> Iterator[str]:
    """Choose open coefficients and options by the scores of a command, merge by the best, and yield the printed lines.

    Raises: ValueError that lists all problems of the command, of inputs and of outputs before any merging; later as
        `search_folders`.
    """
    torch.set_num_threads(1)  # of each worker
    problems = list(problems_in(asked))
    if wrong := [text for own in configs if asked.over for text in value_problems(own, asked.over, [*order.experts])]:
        errors.raise_problems([*problems, *wrong])
    order = order._replace(searched={config.name: asked.facts(config) for config in configs})
    first = [_first(config, asked, order.out / config.name) for config in configs]
    if dry_run:
        plans = errors.all_at_once(problems, lambda: plan_run(first, order))
        for (folder, plan), config in zip(plans.items(), configs, strict=True):
            yield plan_text(folder, plan)
            if plan is not None and (is_open(config) or asked.trials or asked.over):
                models = len(combinations(asked.over)) * (len(asked.coefs or config.grid) if is_open(config) else 1)
                count = f"{models} model{'s' * (models > 1)}"
                count += f", then {asked.trials} with other {' and '.join(asked.trials_over)}" if asked.trials else ""
                yield f"  search: {count}, one after another: each is merged, scored by --score and removed"
        return
    with_push = pushed(push, public=public, count=len(configs))
    with Hashing(order.options.get("workers", 1)) as hashing, leaving_on_signals():
        kept = errors.all_at_once(problems, lambda: kept_of(first, order, hashing))
        for config, own in zip(configs, first, strict=True):
            found = None if own in kept else _search(config, order, asked, hashing)
            facts = {**order.searched[config.name], **({} if found is None else _facts(found))}
            chosen = own if found is None else found.config
            for folder, report in stream_run([chosen], order._replace(searched={config.name: facts}), hashing):
                yield from summary(chosen, folder, report, order.coefs)
                yield from () if found is None else _said(folder, found)
                yield from with_push(folder)


def _first(config: MergerConfig, asked: Asked, folder: Path) -> MergerConfig:
    """A merger to check the merge with: that of the finished folder, or the first one that is tried."""
    made = checkpoint.load_manifest(folder).get("hyperparameters") if is_merged(folder) else None
    changes = {} if isinstance(made, dict) else combinations(asked.over)[0]
    made = made if isinstance(made, dict) else {}
    # a manifest leaves out some defaults, which the merger itself has
    changes |= {name: made[name] for name in asked.over if isinstance(made.get(name), int | float | str)}
    if is_open(config):
        coef = made.get("coef")
        known = isinstance(coef, float) and math.isfinite(coef)
        changes["coef"] = coef if known else min(asked.coefs or config.grid)
    for option in asked.trials_over if asked.trials else ():
        if isinstance(own := made.get(option), (dict, list)):
            changes[option] = tuple(own) if isinstance(own, list) else own
    return replace(config, **changes)


def _search(config: MergerConfig, order: Order, asked: Asked, hashing: Hashing) -> Searched:
    def report(candidate: Candidate) -> None:
        say(f"{candidate.name}: {candidate.score:.6g}{' (kept)' if candidate.kept else ''}")

    return search_folders(
        config,
        order.base,
        order.experts,
        order.out / config.name,
        score=Program(asked, order.out / LOGS),
        coefs=asked.coefs if is_open(config) else (),
        widen=asked.widen,
        over=asked.over,
        trials=asked.trials,
        trials_over=asked.trials_over,
        seed=order.seed,
        name=asked.name,
        hashing=hashing,
        report=report,
        **options_of(config, order),
    )


def _facts(found: Searched) -> dict[str, Any]:
    """The facts of a search for a manifest, beside what was asked."""
    named = {} if list(found.scores) == [""] else {"scores": found.scores}
    edge = {"score_edge": found.edge} if found.edge else {}
    more = facts_of_options(found.tuned, "score") | facts_of_trials(found.trials, "score")
    return {"score": found.score, **named, "score_curve": [list(point) for point in found.curve], **edge, **more}


def _said(folder: Path, found: Searched) -> Iterator[str]:
    coef = getattr(found.config, "coef", None)
    edge = f", at the {found.edge} coefficient of those tried: --widen or --grid tries more" if found.edge else ""
    yield from (tuned_text(own, f"score {own.score:.6g}") for own in found.tuned)
    yield f"score: {folder}{chosen_text(found.tuned)}, {found.score:.6g}{edge}"
    facts: dict[str, Any] = {"folder": folder, "coef": coef, "score": found.score, "curve": found.curve}
    facts |= {"options": chosen_of(found.tuned)} if found.tuned else {}
    if found.trials:
        best, _ = best_of(found.trials)
        facts |= best
        text, trials = numbers_text(best), len(found.trials) - 1
        yield f"best of {trials} trials: {text}; the first ones score {found.trials[0][1]:.6g}"
    outcome.add("searched", facts)
    if alike(scores := [score for _, score in found.curve]):
        same = f"all {len(scores)} coefficients have the same score, {scores[0]:.6g}"
        yield f"note: {same}: {coef:g} is only the smallest; score more rows, or give --coef"
    if alike(scores := [own.score for own in found.tuned]):
        same = f"all {len(scores)} combinations of options have the same score, {scores[0]:.6g}"
        yield f"note: {same}: {text_of(chosen_of(found.tuned))} is only the first; score more rows, or try other values"


def problems_in(asked: Asked) -> Iterator[str]:
    """Errors for a command that cannot score."""
    yield from problems_of(words_of, asked.command)
    if MODEL not in asked.command:
        yield f"--score {asked.command!r} does not read the merged model: write {MODEL} for the model's folder"
    if asked.keys and FILES not in asked.command:
        yield f"--score-key reads a JSON file of the program: write {FILES} in --score for its output folder"
    yield from (f"--score-key {key!r} is empty: give names with slashes between" for key in asked.keys if not key)
    if len({*asked.keys}) < len(asked.keys):
        yield f"--score-key is {' '.join(asked.keys)}: give each once"


def words_of(command: str) -> list[str]:
    """The words of a command, which no shell reads. Raises: ValueError for one that needs a shell, or is not there."""
    try:
        words = [os.path.expanduser(word) for word in shlex.split(command)]
    except ValueError as error:
        raise ValueError(f"--score {command!r} has an open quote or a last backslash ({error}): close it") from None
    if not words:
        raise ValueError("--score is empty: give the command that scores a model")
    if shell := [word for word in words if word in _SHELL]:
        raise ValueError(f"--score has {shell[0]}, but no shell runs it: write it as \"bash -c '...'\"")
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"--score runs {words[0]!r}, which is not there or not executable: install it, or give its path"
        )
    return words


class Program:
    """A command as the score of a folder: the last line of its output, or numbers in a JSON file that it writes."""

    def __init__(self, asked: Asked, logs: Path) -> None:
        self._asked, self._logs, self._words = asked, logs, words_of(asked.command)

    def __call__(self, model: Path) -> dict[str, float]:
        """Run the command on a model. Its output is kept in two files.

        Raises: ValueError with the command and the last lines of its output, where there is no score.
        """
        files = model.parent / "files"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        places = {MODEL: str(model.absolute()), FILES: str(files.absolute())}
        words = [re.sub(r"\{model\}|\{out\}", lambda found: places[found[0]], word) for word in self._words]
        self._logs.mkdir(parents=True, exist_ok=True)
        out, err = (self._logs / f"{model.name}.{end}" for end in ("out", "err"))
        try:
            if status := _status(words, out, err):
                ended = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
                raise ValueError(f"the command {ended}")
            found = {key: at(key, files) for key in self._asked.keys} or {"": last_number(out)}
            if wrong := {name: value for name, value in found.items() if not math.isfinite(value)}:
                name, value = next(iter(wrong.items()))
                raise ValueError(f"{f'--score-key {name}' if name else 'its score'} is {value}, must be finite")
            return found
        except ValueError as error:
            raise ValueError(f"{error}\n{_ending(shlex.join(words), out, err)}") from None


def _status(words: Sequence[str], out: Path, err: Path) -> int:
    """The exit status of a program whose output goes to two files; it and its children end with an exception here."""
    with open(out, "wb") as output, open(err, "wb") as errs:
        # a group of its own: a program may start others, which end with it
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errs, start_new_session=True)
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a program and what it started, by SIGTERM first."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_number(out: Path) -> float:
    """The number in the last line of an output. Raises: ValueError where it holds anything else."""
    line = next(reversed(_lines(out)), "").strip()
    try:
        return float(line)
    except ValueError:
        raise ValueError(
            f"the last line of the command's standard output is {line!r}, must be a number: print one, or name a "
            "number in a JSON file by --score-key"
        ) from None


def at(key: str, files: Path) -> float:
    """The number of a key in the newest JSON file below a folder that has it.

    Args: key: names with slashes between; a name may itself hold slashes.
    Raises: ValueError where no file has the key, or where its value is not a number.
    """
    known: list[str] = []
    for file in sorted(files.rglob("*.json"), key=lambda file: (-file.stat().st_mtime_ns, str(file))):
        try:
            content = checkpoint.read_json(file)
        except (OSError, ValueError):
            continue  # of another kind, or cut off
        if found := list(_values(content, key.split("/"))):
            if type(found[0]) not in (int, float):
                raise ValueError(f"--score-key {key} is {found[0]!r} in {file.name}, must be a number")
            return float(found[0])
        known += _numbers(content)
    near = get_close_matches(key, known, n=5, cutoff=0.3) or known[:5]
    has = f"; give one of its numbers, such as {', '.join(near)}" if near else f", none with numbers is below {FILES}"
    raise ValueError(f"--score-key {key} is in no JSON file of the command{has}")


def _values(content: Any, names: Sequence[str]) -> Iterator[Any]:
    """The values at a path of names, of which several may be one name with slashes."""
    if not names:
        yield content
    elif isinstance(content, dict):
        for end in range(1, len(names) + 1):
            if (name := "/".join(names[:end])) in content:
                yield from _values(content[name], names[end:])


def _numbers(content: Any, above: str = "") -> Iterator[str]:
    """The keys of all numbers in the objects of a JSON value."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if type(value) in (int, float):
            yield f"{above}{name}"
        yield from _numbers(value, f"{above}{name}/")


def _ending(command: str, *logs: Path) -> str:
    """The command and the last lines of its output, for an error."""
    lines = [f"  command: {command}"]
    for log in logs:
        if own := _lines(log)[-_SHOWN:]:
            lines += [f"  {log}, at its end:", *(f"    {line}" for line in own)]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  it printed nothing"])


def _lines(log: Path) -> list[str]:
    """The last lines of an output that hold more than spaces; of a bar of progress the last state."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line]
