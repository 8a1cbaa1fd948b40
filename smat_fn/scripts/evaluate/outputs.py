"""Files that eval.py writes: scores, the main table, a summary."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ... import checkpoint, machine
from ...evaluate import Result, write_results
from ...evaluate.records import ANSWERS, SCORES
from ...evaluate.results import OTHERS, RUNS, run_of
from ...evaluate.scoring import shares_note
from ...evaluate.statistics import differences
from ...report.tables import JOINT, MainTable, markdown, other_tasks_of, plain, seed_notes, seeds_text
from .models import manifests_of

RESULTS = "results.jsonl"


def foreign_problems(out: Path) -> list[str]:
    """Errors for files in a folder that `evaluate` and `write_report` would write to, and that they did not write."""
    begins = {
        RESULTS: b'{"method": ',
        RUNS: b'{"label": ',
        "results.json": b'{\n  "command": ',
        "table.md": b"| Method |",
        SCORES: b'{"key": ',
        ANSWERS: b'{"key": ',
    }
    return checkpoint.foreign_problems({out / name: begin for name, begin in begins.items()})


def write_report(
    out: Path,
    rows: Sequence[Result],
    table: MainTable,
    *,
    checkpoints: Sequence[Path],
    recipes: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
    relative: MainTable | None = None,
    other: MainTable | None = None,
) -> None:
    """``results.jsonl`` (a line a score), ``table.md`` and ``results.json`` (means, what was scored) in a folder.

    ``runs.jsonl`` beside them has what the manifests say: eval.py report needs no checkpoint.

    Args: recipes: the suite that each checkpoint was scored on, as `evaluate` fills it in (default: its manifest's);
        relative: scores in % of the experts', a second table; other: scores on other tasks, `other_table`.
    """
    write_results(out / RESULTS, rows)
    manifests = [
        {**manifest, "suite": recipes.get(folder, manifest.get("suite"))}
        for folder, manifest in manifests_of(checkpoints).items()
    ]
    write_results(out / RUNS, map(run_of, manifests))
    tasks = other_tasks_of(rows)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = machine.describe(shlex.join(["python", *sys.argv]), gpu=gpu)
    summary: dict[str, Any] = {
        **{name: facts[name] for name in ("command", "commit", "hardware", "versions")},
        "suites": list({json.dumps(m["suite"]): m["suite"] for m in manifests}.values()),
        "learning_rates": {m["label"]: m["training"]["lr"] for m in manifests if "lr" in (m.get("training") or {})},
        "split": table.split,
        "means": _means(table),
        **({} if relative is None else {"relative": _means(relative)}),
        **({} if other is None else {"other_tasks": {"tasks": tasks, "means": _means(other)}}),
        "coefs": {
            f"{row.method} {row.model} seed {row.seed}": row.coef
            for row in rows
            if row.coef is not None and not row.model.startswith(OTHERS)
        },
    }
    text = "\n".join([markdown(table), *(f"Note: {note}.\n" for note in seed_notes(table, plain))])
    if relative is not None:
        text += f"\nIn % of the expert's score, mean over tasks:\n\n{markdown(relative)}"
    if other is not None:
        text += f"\nOther tasks ({', '.join(map(plain, tasks))}), mean over tasks:\n\n{markdown(other)}"
    for name, content in {"table.md": text, "results.json": json.dumps(summary, indent=2) + "\n"}.items():
        checkpoint.write_text(out / name, content)


def notes_on(rows: Sequence[Result], table: MainTable) -> list[str]:
    """Notes on scores that are all tiny, and on means over different seeds."""
    return [*filter(None, [shares_note(row.score for row in rows)]), *seed_notes(table)]


def _means(table: MainTable) -> dict[str, Any]:
    return {
        method: {column: {"mean": cell.mean, "sd": cell.sd, "by_seed": cell.by_seed} for column, cell in line.items()}
        for method, line in table.cells.items()
    }


def verdict(table: MainTable) -> str:
    """One line: each method's mean over the five mergers, and its difference from the first method's, by seed.

    Where no method has all five, each method's best merged model, with its seeds where they differ.
    """
    besides = {"Expert", JOINT}
    five = {method: line["Avg"] for method, line in table.cells.items() if "Avg" in line}
    if not five:
        merged = {
            method: max((cell.mean, name) for name, cell in line.items() if name not in besides)
            for method, line in table.cells.items()
            if line.keys() - besides
        }
        seeds = {method: seeds_text(table.cells[method][name].by_seed) for method, (_, name) in merged.items()}
        of = {method: f" ({text})" for method, text in seeds.items()} if len({*seeds.values()}) > 1 else {}
        best = ", ".join(f"{x} {mean:.2f} by {name}{of.get(x, '')}" for x, (mean, name) in merged.items())
        return f"best merged model: {best}" if best else "no merged models: merge the experts with merge.py"
    first, *others = five
    parts = [f"{method} {cell.mean:.2f}" for method, cell in five.items()]
    for method in others:
        got = differences(five[first].by_seed, five[method].by_seed)
        common = 0 if got is None or five[first].by_seed.keys() == five[method].by_seed.keys() else len(got.values)
        over = f" over the {common} common seed{'s' * (common != 1)}" if common else ""
        parts.append(f"{method} - {first} {'has no seed in common' if got is None else f'{got.mean:+.2f}{over}'}")
    return "mean over five mergers: " + ", ".join(parts)
