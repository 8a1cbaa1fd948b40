"""Evaluate checkpoints on disk: scores as JSON lines, the main table, a summary and a plot."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import checkpoint, errors, lora, machine, tree
from ...evaluate import Records, Result, Scorer, score_bar, score_models, write_results
from ...evaluate.results import RUNS, run_of, write_runs
from ...evaluate.statistics import differences
from ...report.tables import MainTable, markdown
from ...suites import Suite, load_suite


def find_checkpoints(paths: Sequence[Path]) -> list[Path]:
    """Checkpoints of experts and merged models at or below the given folders, in order, each once.

    Raises: ValueError that lists every folder without one.
    """
    found: dict[Path, None] = {}
    problems = []
    for path in paths:
        folders = [manifest.parent for manifest in sorted(path.rglob(checkpoint.MANIFEST))]
        folders = [f for f in folders if checkpoint.load_manifest(f).get("kind") in ("expert", "merged")]
        problems += (
            [] if folders else [f"{path} holds no expert or merged checkpoint: give folders of train.py or merge.py"]
        )
        found.update(dict.fromkeys(folders))
    errors.raise_problems(problems)
    return list(found)


def evaluate(
    folders: Sequence[Path],
    *,
    split: str = "test",
    on_model: Callable[[str], None] | None = None,
    options: Mapping[str, Any] | None = None,
    keep: Path | None = None,
) -> list[Result]:
    """Score checkpoints: experts on their own task, merged models on every task of the experts merged into them.

    The suite is rebuilt from each manifest, and must give the base that the checkpoint was made from.

    Args: split: "dev" or "test"; on_model: called with each folder's name before it is scored; options: of the
        suites, instead of those in the manifests; keep: folder for ``scores.jsonl`` and, of language tasks,
        ``answers.jsonl``, filled as scoring goes; what stands there of the same weights, recipe and data is not scored
        again, so that a run that was ended goes on and gives the same rows.
    Raises: ValueError that lists every checkpoint without a suite, of another base, or of one label, model and seed
        with another, before any is scored; for weights that are not finite and scores that are no number.
    """
    manifests = {folder: checkpoint.load_manifest(folder) for folder in folders}
    named: dict[Path, str] = {}
    suites: dict[str, Suite] = {}
    prints: dict[str, str] = {}
    rows_of: dict[tuple[Any, ...], Path] = {}
    problems = []
    for folder, manifest in manifests.items():
        line = manifest["label"], _model(manifest), manifest["seed"]
        if (other := rows_of.setdefault(line, folder)) != folder:
            problems.append(
                f"{folder} and {other} are both {line[0]} {line[1]} of seed {line[2]}: "
                "evaluate one of them, or train one with another --label"
            )
        # experts of others name no suite, nor does what is merged of them
        recipe = manifest.get("suite") or ({"seed": 0} if "name" in (options or {}) else None)
        if not recipe:
            problems.append(f"{folder} names no suite: say --suite-options name NAME, and its model and data")
            continue
        name = named[folder] = json.dumps(recipe)
        if name not in suites:
            suites[name] = load_suite(**{**recipe, **(options or {})})
            prints[name] = checkpoint.fingerprint(suites[name].base)
        if manifest.get("base_fingerprint") != prints[name]:
            problems.append(
                f"{folder} was made from another base than suite {suites[name].name!r} gives here: "
                "other library versions or threads pretrain another one, train again (experts of others: give their "
                "own base and its dtype as --suite-options model, dtype)"
            )
        if strange := [task for task in _tasks(manifest) if task not in suites[name].tasks]:
            problems.append(
                f"{folder} is of {', '.join(strange)}, no tasks of suite {suites[name].name!r}: merge again with "
                f"experts named as its tasks, NAME=FOLDER, {', '.join(suites[name].tasks)}"
            )
    errors.raise_problems(problems)
    rows, records = [], Records(keep)
    with score_bar() as bar:
        scorers = {
            name: Scorer(suite, records, about={"base": prints[name]}, answers=keep is not None, bar=bar)
            for name, suite in suites.items()
        }
        for folder, manifest in manifests.items():
            scorer = scorers[named[folder]]
            scorer.expect(sum(scorer.suite.repeats.get(task, 1) for task in _tasks(manifest)))
        for folder, manifest in manifests.items():
            if on_model is not None:
                on_model(str(folder))
            scorer, model = scorers[named[folder]], _model(manifest)
            params, _ = lora.load_expert(folder, scorer.suite.base)
            tree.check_finite(tree.flatten(params), str(folder))
            tasks = scorer.suite.tasks if manifest["kind"] == "expert" else _tasks(manifest)
            rows += score_models(
                scorer.suite._replace(tasks=tasks),
                {model: params},
                split,
                method=manifest["label"],
                seed=manifest["seed"],
                coefs={model: manifest["hyperparameters"].get("coef")},
                scorer=scorer,
            )
    return rows


def _tasks(manifest: dict[str, Any]) -> tuple[str, ...]:
    return (manifest["task"],) if manifest["kind"] == "expert" else tuple(manifest["experts"])


def _model(manifest: dict[str, Any]) -> str:
    return f"expert:{manifest['task']}" if manifest["kind"] == "expert" else manifest["merger"]


def write_report(out: Path, rows: Sequence[Result], table: MainTable, *, checkpoints: Sequence[Path]) -> None:
    """``results.jsonl`` (a line a score), ``table.md`` and ``results.json`` (means, what was scored) in a folder.

    ``runs.jsonl`` beside them has what the manifests say: eval.py report needs no checkpoint.
    """
    write_results(out / "results.jsonl", rows)
    manifests = [checkpoint.load_manifest(folder) for folder in checkpoints]
    write_runs(out / RUNS, map(run_of, manifests))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = machine.describe(shlex.join(["python", *sys.argv]), gpu=gpu)
    summary: dict[str, Any] = {
        **{name: facts[name] for name in ("command", "commit", "hardware")},
        "suites": list({json.dumps(m["suite"]): m["suite"] for m in manifests}.values()),
        "learning_rates": {m["label"]: m["training"]["lr"] for m in manifests if "training" in m},
        "versions": manifests[0]["versions"],
        "split": table.split,
        "means": {
            method: {
                column: {"mean": cell.mean, "sd": cell.sd, "by_seed": list(cell.scores)}
                for column, cell in line.items()
            }
            for method, line in table.cells.items()
        },
        "coefs": {f"{row.method} {row.model} seed {row.seed}": row.coef for row in rows if row.coef is not None},
    }
    for name, text in {"table.md": markdown(table), "results.json": json.dumps(summary, indent=2) + "\n"}.items():
        checkpoint.write_text(out / name, text)


def verdict(table: MainTable) -> str:
    """One line: each method's mean over the five mergers, and its difference from the first method's, by seed."""
    five = {method: line["Avg"] for method, line in table.cells.items() if "Avg" in line}
    if not five:
        return "no method has all five mergers"
    first, *others = five
    parts = [f"{method} {cell.mean:.2f}" for method, cell in five.items()]
    for method in others:
        got = differences(five[first].by_seed, five[method].by_seed)
        parts.append(f"{method} - {first} {'has no seed in common' if got is None else f'{got.mean:+.2f}'}")
    return "mean over five mergers: " + ", ".join(parts)
