"""Evaluate experts and merged models: a table, JSON lines, and a plot.

    python eval.py runs/ft runs/smat --out runs/scores --plot runs/scores/merging.png
    python eval.py merged TASK1=EXPERT TASK2=EXPERT --preset lm --model BASE --data DATA --out scores
    python eval.py landscape --ft runs/ft --methods runs/smat --out runs/scores
    python eval.py report runs/scores --out runs/report

`eval.py landscape --help` explains a command's options. Folders are searched for checkpoints of train.py and merge.py.
Experts are scored on their own task, merged models on the tasks of the experts merged into them. An interrupted
evaluation resumes when rerun with the same --out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from smat_fn.scripts import cli, outcome
from smat_fn.scripts.analyse import pictures, predictions, scores, weights
from smat_fn.scripts.analyse.commands import SUITE
from smat_fn.scripts.analyse.commands import command as analysis

AS_TRAINED = arg(help_behavior_hint="(default: as they were trained)")


@dataclass(frozen=True)
class Eval:
    """Evaluate experts and merged models."""

    checkpoints: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...", help_behavior_hint="(at least one)")]
    """Checkpoints, or folders that contain them; TASK=FOLDER for an expert of another tool (a model or an adapter)."""
    out: Annotated[Path | None, cli.NONE] = None
    """Folder for results.jsonl, results.json and table.md, and for the cache of scores and answers."""
    plot: Annotated[Path | None, cli.NONE] = None
    """PNG with the mean scores of experts and merged models by method."""
    split: Literal["test", "dev"] = "test"
    """Split to score."""
    base: bool = False
    """Also score the base on the tasks of its experts: a line BASE, in the column Expert."""
    relative: bool = False
    """Print a second table: scores of merged models in % of the expert's, mean over tasks (normalised accuracy)."""
    other_tasks: Annotated[tuple[str, ...] | None, arg(metavar="[TASK...]", help_behavior_hint="(default: off)")] = None
    """Print another table: scores on tasks of the data that the models were not made from: these, or all if none is
    named."""
    preset: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: none)")] = None
    """Preset of train.py (lm, text, images) whose suite scores checkpoints that name none: merges of downloaded
    experts."""
    model: Annotated[str | None, AS_TRAINED] = None
    """Base model."""
    data: Annotated[str | None, AS_TRAINED] = None
    """Data, as in train.py --data."""
    device: Annotated[str | None, AS_TRAINED] = None
    """Device of the scores, cpu or cuda:0."""
    suite_options: Annotated[cli.Values, SUITE] = field(default_factory=dict)
    """Other options of model and data, e.g. eval_batch 16; train.py ft --preset NAME --help-all lists them."""
    threads: int = 1
    """CPU threads."""


def main(args: Eval) -> None:
    """Score experts and merged models, and print the table."""
    if not args.checkpoints:
        raise ValueError(f"give at least one checkpoint, or a folder that contains some{_taken(args.other_tasks)}")
    import torch

    from smat_fn.checkpoint import write_bytes
    from smat_fn.errors import collected, raise_problems
    from smat_fn.folders.files import identity
    from smat_fn.report.plots import check_colours, main_plot
    from smat_fn.report.tables import main_table, other_table, other_tasks_of, relative_table, show, terminal
    from smat_fn.scripts.evaluate import evaluation, models, outputs

    torch.set_num_threads(args.threads)
    if args.plot:
        pictures.check_picture(args.plot)
    raise_problems(outputs.foreign_problems(args.out) if args.out else [])
    folders = models.find_checkpoints(args.checkpoints)
    for note in models.lacking_experts(args.checkpoints):
        outcome.line(f"note: {note}")
    manifests = models.manifests_of(folders).values()
    if args.plot:
        check_colours(manifest["label"] for manifest in manifests)
    if args.relative:  # whether each merge has its experts, before anything is scored
        relative_table(evaluation.planned(manifests, split=args.split, score=1.0), split=args.split)
    options = cli.with_named(args.suite_options, model=args.model, data=args.data, device=args.device)
    recipes: dict[Path, dict[str, Any]] = {}
    before = identity(args.out / outputs.RESULTS) if args.out else None
    rows = evaluation.evaluate(
        folders, split=args.split, options=options, implied=_implied(args.preset), keep=args.out, recipes=recipes,
        report=outcome.line, base=args.base, other_tasks=args.other_tasks,
    )  # fmt: skip
    table = main_table(rows, split=args.split)
    for note in outputs.notes_on(rows, table):
        outcome.line(f"note: {note}")
    show(terminal(table))
    other, relative, problems = None, None, list[str]()
    if args.relative:
        with collected(problems):  # an expert may score 0: the rest is shown and written first
            show(terminal(relative := relative_table(rows, split=args.split), relative=True))
    if args.other_tasks is not None:
        show(terminal(other := other_table(rows, split=args.split), others=other_tasks_of(rows)))
    for row in rows:
        outcome.add("scores", vars(row))
    if args.out:
        if identity(file := args.out / outputs.RESULTS) != before:  # only the cache of scores is shared
            outcome.line(
                f"note: replaces {file}, which another evaluation wrote meanwhile: rerun with the checkpoints of both"
            )
        tables = {"relative": relative, "other": other}
        outputs.write_report(args.out, rows, table, checkpoints=folders, recipes=recipes, **tables)
        outcome.line(f"results: {args.out}")
        outcome.add("written", args.out)
    if args.plot:
        write_bytes(args.plot, main_plot(table, title=f"{args.split} score, mean over tasks"))
        outcome.line(f"plot: {args.plot}")
        outcome.add("written", args.plot)
    outcome.line(verdict := outputs.verdict(table))
    outcome.add("verdict", verdict)
    raise_problems(problems)


def _taken(tasks: tuple[str, ...] | None) -> str:
    """The way out where --other-tasks has taken the folders behind it."""
    folder = next((name for name in tasks or () if Path(name).is_dir()), "")
    return f" before --other-tasks, which takes {folder} as a task" if folder else ""


def _implied(preset: str | None) -> dict[str, Any]:
    """Name and options of the suite of a preset."""
    from smat_fn.config import preset_of

    return {} if preset is None else {"name": preset_of(preset).suite, **preset_of(preset).options}


@dataclass(frozen=True)
class Report:
    """Report on finished runs, from stored results: one HTML page, Markdown, CSV and PNG; nothing is evaluated."""

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...", help_behavior_hint="(at least one)")]
    """Folders of eval.py --out, of studies, of analyses; or files of scores (JSON lines)."""
    out: Path
    """Folder for report.html, report.md, tables as CSV and figures as PNG."""
    title: str = "Results"
    """Title of the page."""
    split: Literal["test", "dev"] = "test"
    """Split whose scores are reported."""
    reference: str = "FT"
    """Label of the reference that others are compared with."""
    overwrite: bool = False
    """Replace a report that exists."""


def report(options: Report) -> None:
    """Find the results and write the report. Raises: ValueError as `read_sources`; for no sources."""
    if not options.sources:
        raise ValueError("give at least one folder of scores")
    if (page := options.out / "report.html").exists() and not options.overwrite:
        raise ValueError(f"{page} exists: choose another --out or pass --overwrite")
    from smat_fn.report import write_full_report
    from smat_fn.scripts.evaluate.sources import read_sources

    found = read_sources(options.sources, besides=options.out, split=options.split)
    page = write_full_report(
        options.out,
        found.rows,
        found.runs,
        title=options.title,
        split=options.split,
        reference=options.reference,
        facts=found.facts,
        extra=found.analyses,
    )
    outcome.line(f"report: {page}")
    outcome.add("written", page)


def command(script: str, launch: Sequence[str]) -> None:
    """The command line of eval.py; arguments as those of `entry.train`."""
    commands: dict[str, cli.Command] = {
        "experts-curve": analysis(scores.experts_curve, scores.ExpertsCurve),
        "replacement": analysis(scores.replacement, scores.Replacement),
        "gains": analysis(scores.gains, scores.Gains),
        "landscape": analysis(weights.landscape, weights.Landscape),
        "diagnose": analysis(weights.diagnose, weights.Diagnose),
        "interference": analysis(pictures.interference, pictures.Interference),
        "disentanglement": analysis(predictions.disentanglement, predictions.Disentanglement),
        "report": (report, Report),
    }
    cli.run(script, main, Eval, description=__doc__, commands=commands)
