"""Evaluate experts and merged models: a table, JSON lines, and a plot.

    python eval.py runs/ft runs/smat --out runs/report --plot runs/report/merging.png

Folders are searched for checkpoints of train.py and merge.py. Experts are scored on their own task, merged models on
the tasks of the experts merged into them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from smat_fn.pipeline import cli

NONE = arg(help_behavior_hint="(default: none)")


@dataclass(frozen=True)
class Eval:
    """Evaluate experts and merged models."""

    checkpoints: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...", help_behavior_hint="(at least one)")]
    """Checkpoints, or folders that hold some."""
    out: Annotated[Path | None, NONE] = None
    """Folder for results.jsonl (a line a score), results.json (means) and table.md."""
    plot: Annotated[Path | None, NONE] = None
    """PNG of experts and merged models, methods side by side."""
    split: Literal["test", "dev"] = "test"
    """Which examples to score."""
    suite_options: Annotated[
        dict[str, bool | int | float | str], arg(help_behavior_hint="(default: as they were trained)")
    ] = field(default_factory=dict)
    """Options of the suite to change, as NAME VALUE pairs: model FOLDER data FOLDER device cpu decode_batch 64."""
    threads: int = 1
    """CPU threads."""


def main(args: Eval) -> None:
    if not args.checkpoints:
        raise ValueError("give at least one checkpoint, or a folder that holds some")
    import torch
    from rich.console import Console

    from smat_fn.evaluate.plots import main_plot
    from smat_fn.evaluate.tables import main_table, terminal
    from smat_fn.pipeline import evaluation

    torch.set_num_threads(args.threads)
    folders = evaluation.find_checkpoints(args.checkpoints)
    rows = evaluation.evaluate(folders, split=args.split, options=args.suite_options)
    table = main_table(rows, split=args.split)
    Console(width=max(100, Console().width)).print(terminal(table))
    if args.out:
        evaluation.write_report(args.out, rows, table, checkpoints=folders)
        print(f"results: {args.out}")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        main_plot(table, args.plot, title=f"{args.split} score, mean over tasks")
        print(f"plot: {args.plot}")
    print(evaluation.verdict(table))


if __name__ == "__main__":
    cli.run("eval.py", main, Eval, description=__doc__)
