"""Find the inputs of a report in folders: scores, facts of runs, trials of studies, analyses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ... import checkpoint, errors
from ...analyses import results as analyses
from ...analyses.plots import draw
from ...evaluate import Result, read_results
from ...evaluate.results import RUNS, SET, Run, check_type, checked, once, read_rows, run_of, text_lines
from ...report import Section, Table, with_muon
from .models import SCORED
from .outputs import RESULTS

OUTCOME = "outcome.json"  # of a trial of a study
BY_LABEL = ("dev", "lr", "chosen")  # of a study: the tuning of each method
FACTS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("command", "commit", "hardware"), str),
        "versions": Mapping[str, str],
        "dev": Mapping[str, Mapping[str, Sequence[float]] | Sequence[Mapping[str, Any]]],
        "lr": Mapping[str, float],
        "chosen": Mapping[str, Mapping[str, Any]],
    }
)
TRIED = {"training": Mapping[str, Any], "hyperparameters": Mapping[str, Any], "dev": Sequence[float]}


Weights = tuple[str, str, int]  # label, model, seed


class Sources(NamedTuple):
    """All that was found, in the order of the folders."""

    rows: list[Result]
    runs: list[Run]  # the first of each model
    facts: dict[str, Any]
    analyses: list[Section]


def read_sources(paths: Sequence[Path], *, besides: Path | None = None, split: str = "test") -> Sources:
    """Everything at or below the given folders, or beside the given files of scores.

    A folder is searched for ``results.jsonl`` of eval.py (with ``runs.jsonl`` and ``results.json`` beside it), for
    outcomes of studies, for analyses (JSON), and for manifests of checkpoints. A file ``NAME.jsonl`` of scores may
    have ``NAME_runs.jsonl``, ``NAME.json`` and ``NAME_tuning.json`` beside it.

    Args: besides: a folder that is left out; split: whose runs are read: another split may be scored on another suite.
    Raises: ValueError that lists all that cannot be read, and for no scores at all.
    """
    found = Sources([], [], {}, [])
    problems, scored, there = list[str](), dict[Weights, tuple[str, Path]](), dict[Weights, dict[str, Path]]()
    for path in paths:
        try:
            files = [path] if path.is_file() else _below(path, besides)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        for file in files:
            known = len(found.runs)
            try:
                _read(file, found, split)
                for run in found.runs[known:]:
                    key = run.label, run.model, run.seed
                    if run.fingerprint and file.name == checkpoint.MANIFEST:
                        there.setdefault(key, {})[run.fingerprint] = file.parent
                    elif run.fingerprint:
                        scored.setdefault(key, (run.fingerprint, file))
            except KeyError as error:
                problems.append(f"{file} lacks {error}: it was written by another version, or is something else")
            except UnicodeDecodeError as error:
                problems.append(f"{file} is not text in UTF-8 ({error.reason}): give a file of scores (JSON lines)")
            except ValueError as error:  # that names its file, or not
                problems += [t if t.startswith(str(file)) else f"{file}: {t}" for t in errors.texts(error)]
            except (TypeError, AttributeError, IndexError) as error:  # of rows of an analysis or an outcome
                problems.append(f"{file} holds a value of another type ({error}): write it again")
    problems += _outdated(found.runs, scored, there)
    if not found.rows and not problems:
        names = ", ".join(map(str, paths)) or "no folder"
        problems = [f"{names}: no scores there: run eval.py on the checkpoints with --out, then report on that folder"]
    errors.raise_problems(problems)
    return Sources(found.rows, once(found.runs), found.facts, found.analyses)


def _outdated(
    runs: Sequence[Run], scored: Mapping[Weights, tuple[str, Path]], there: Mapping[Weights, Mapping[str, Path]]
) -> list[str]:
    """Errors for scores of weights that are no longer the checkpoint's; not where Muon and others share a label."""
    muon = {run.label for run in runs if run.training.get("optimizer") == "muon"}
    return [
        f"{file}: the scores of {key[0]}, {key[1]}, seed {key[2]} are of other weights than "
        f"{next(iter(there[key].values()))} holds now: run eval.py again, or report on the scores alone"
        for key, (fingerprint, file) in scored.items()
        if key in there and fingerprint not in there[key] and key[0] not in muon
    ]


def _below(folder: Path, besides: Path | None) -> list[Path]:
    """Files that may be read, facts that were written for a report before those that a manifest repeats."""
    if not folder.is_dir():
        raise ValueError("there is no such file or folder")
    names = (RESULTS, OUTCOME, *(f"{name}.json" for name in analyses.ANALYSES), checkpoint.MANIFEST)
    left_out = besides.resolve() if besides else None
    return [
        file
        for name in names
        for file in checkpoint.files_below(folder, name)
        if left_out is None or left_out not in file.resolve().parents or folder.resolve() == left_out
    ]


def _read(file: Path, found: Sources, split: str) -> None:
    if file.suffix == ".jsonl":
        beside = file.with_name(RUNS if file.name == RESULTS else f"{file.stem}_{RUNS}")
        # told apart here: two files may have one label with Muon and without
        rows, runs = with_muon(read_results(file), _runs(beside) if beside.exists() else [])
        found.rows.extend(rows)
        scored = {(row.method, row.seed) for row in rows if row.split == split}
        found.runs.extend(run for run in runs if (run.label, run.seed) in scored)
        for name in (f"{file.stem}.json", f"{file.stem}_tuning.json"):
            if (facts := file.with_name(name)).exists():
                _add(found.facts, facts)
        return
    values = checkpoint.read_json(file)
    if not isinstance(values, dict):  # of another program
        return
    if file.name == OUTCOME:
        found.rows.extend(checked(Result(**row)) for row in values["test"] or ())
        found.runs.extend([run_of_trial({**values, **values["trial"]})] if values["test"] else [])
    elif file.name == checkpoint.MANIFEST:
        found.runs.extend([run_of(values)] if values.get("kind") in SCORED and "label" in values else ())
    elif values.get("analysis"):
        found.analyses.append(analysis_section(values))


def _check_facts(values: Any) -> None:
    """Raises: ValueError for the first fact that a report shows and that is of another type."""
    check_type("the value", values, Mapping[str, Any])
    for name, hint in FACTS.items():
        check_type(name, values.get(name), hint | None)
    for label, tried in (values.get("dev") or {}).items():
        for place, candidate in enumerate(tried if isinstance(tried, list) else ()):
            for name, hint in TRIED.items():
                check_type(f"dev[{label!r}][{place}][{name!r}]", candidate.get(name), hint)


def run_of_trial(values: Mapping[str, Any]) -> Run:
    """The experts of a study's trial as one row. Raises: ValueError for a field of another type."""
    run = Run(
        values["label"],
        SET,
        values["seed"],
        method=values["method"],
        hyperparameters=values["hyperparameters"],
        training=values["training"],
        seconds=values["training_seconds"],
        peak_memory_bytes=values["peak_bytes"],
        suite=values.get("suite", {}),
    )
    return checked(run)


def analysis_section(result: analyses.Result) -> Section:
    """An analysis with its table, its rows as CSV, and its figure."""
    if not result["rows"]:
        raise ValueError("the analysis has no rows: run it again")
    title, columns, lines = analyses.summary(result)
    name = result["analysis"].replace("-", " ").capitalize()
    table = Table(columns, lines, analyses.records(result))
    return Section(name, f"{title[:1].upper()}{title[1:]}.", table, draw(result))


def _runs(file: Path) -> list[Run]:
    """Runs of eval.py, or a study's lines, which have no model."""
    try:
        lines = [json.loads(line) for line in text_lines(file)]
        if not any("model" in line for line in lines):
            return [run_of_trial(line) for line in lines]
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} beside it holds other lines than runs ({error!r}): write it again") from None
    return read_rows(file, Run)


def _add(facts: dict[str, Any], file: Path) -> None:
    """Keep each fact once, several different texts joined; of each label, the tuning of the first study that has it."""
    try:
        _check_facts(more := checkpoint.read_json(file))
    except ValueError as error:
        raise ValueError(f"in {file.name} beside it {error}: correct it, or remove that file") from None
    for name in FACTS:
        if more.get(name) is None:
            continue
        old, new = facts.get(name), more[name]
        if isinstance(old, str) and isinstance(new, str):
            facts[name] = old if new in old.split("; ") else f"{old}; {new}"
        elif name in BY_LABEL:
            facts[name] = {**new, **(old or {})}
        else:
            facts.setdefault(name, new)
