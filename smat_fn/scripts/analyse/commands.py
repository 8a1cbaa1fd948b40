"""The analyses as commands of eval.py: options, and what prints and writes their results. No torch until one runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..cli import Command

if TYPE_CHECKING:
    from ...analyses.results import Result

NONE = arg(help_behavior_hint="(default: none)")
SPLIT = Literal["test", "dev"]
RUNS = arg(metavar="RUN...", help_behavior_hint="(at least one)")
SUITE = arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: as they were trained)")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all analyses have."""

    out: Annotated[Path | None, NONE] = None
    """Folder for the numbers (JSON, CSV) and the figure (PNG), named as the command."""
    suite_options: Annotated[dict[str, bool | int | float | str | None], SUITE] = field(default_factory=dict)
    """Other options of model and data: model FOLDER device cpu, decode_batch 64 (texts), eval_batch 64 (images)."""
    memory: Annotated[int | None, arg(help_behavior_hint="(default: 8 on a CPU, 1024 on a GPU)")] = None
    """MiB for models that are evaluated together by torch.func.vmap; 0: one by one."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True, kw_only=True)
class ExpertsCurve(Shared):
    """Merge K = 2..N experts of each run, score each merge on its own tasks, divide by the FT experts' scores."""

    runs: Annotated[Positional[tuple[Path, ...]], RUNS]
    """Folders of train.py, one of method ft among them for every seed."""
    merger: Literal["wa", "ta", "ties", "dare", "della"] = "ta"
    """How experts are merged."""
    coef: Annotated[tuple[float, ...], arg(help_behavior_hint="(default: the run's own, else searched on dev)")] = ()
    """One coefficient for all runs, or one for each. A run's own is that of its merged model of all experts."""
    preset: Annotated[str | None, arg(help_behavior_hint="(default: that of the experts, else digits)")] = None
    """Settings of mergers that have more than a coefficient, where a run holds no merged model of its own."""
    seed: int = 0
    """Seed of the random masks of DARE and DELLA."""
    split: SPLIT = "test"
    """Which examples to score."""


@dataclass(frozen=True, kw_only=True)
class Replacement(Shared):
    """Replace q = 0..N of the FT experts by another method's of the same tasks, merge by TA, score on all tasks."""

    ft: tuple[Path, ...]
    """Folders of train.py of method ft, one a seed."""
    other: tuple[Path, ...]
    """Folders of train.py whose experts replace them, of the same seeds."""
    coef: float = 0.3
    """gamma of all merges."""
    split: SPLIT = "test"
    """Which examples to score."""


@dataclass(frozen=True, kw_only=True)
class Gains(Shared):
    """Expert scores against the mean of the five mergers; the difference is the merging drop."""

    runs: Annotated[Positional[tuple[Path, ...]], RUNS]
    """Checkpoints, or folders that hold them: of every method experts and all five merged models (merge.py all)."""
    split: SPLIT = "test"
    """Which examples to score."""


@dataclass(frozen=True, kw_only=True)
class Landscape(Shared):
    """Loss at base + a * expert's own update + b * gamma * sum of the FT partners' updates."""

    ft: Path
    """Folder of train.py of the experts whose updates are the partners'; its own slices are drawn first."""
    methods: Annotated[tuple[Path, ...], NONE] = ()
    """Folders of train.py whose experts are rescaled beside them."""
    tasks: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Target tasks."""
    coef: float = 0.3
    """gamma of the partners' update."""
    a: tuple[float, float] = (0.0, 2.0)
    """Range of the factor of the own update."""
    b: tuple[float, float] = (-1.0, 3.0)
    """Range of the factor of the partners' update."""
    points: int = 21
    """Points along each axis; a = 1 and b = 0, the expert, are added where they are not among them."""
    batches: int = 8
    """At most so many batches of a task's dev split: the samples, the same at every point and for every method."""
    seed: int = 0
    """Seed of the samples where a suite has no dev batches and they are of the training split."""


@dataclass(frozen=True, kw_only=True)
class Diagnose(Shared):
    """Sizes of updates by kind of leaf, beside those of the partners and of the noise, and a sigma to start from."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of train.py."""
    coef: float = 0.3
    """gamma of the partners' updates."""
    sigma: Annotated[float | None, arg(help_behavior_hint="(default: the run's, else the suggested one)")] = None
    """RMS of the noise to compare with."""


def _experts_curve(args: ExpertsCurve) -> "Result":
    from . import analysing

    return analysing.experts_curve(
        args.runs,
        merger=args.merger,
        coef=args.coef,
        preset=args.preset,
        seed=args.seed,
        split=args.split,
        memory=_bytes(args),
        options=args.suite_options,
    )


def _replacement(args: Replacement) -> "Result":
    from . import analysing

    return analysing.replacement(
        args.ft, args.other, coef=args.coef, split=args.split, memory=_bytes(args), options=args.suite_options
    )


def _gains(args: Gains) -> "Result":
    from . import analysing

    return analysing.gains(args.runs, split=args.split, options=args.suite_options)


def _landscape(args: Landscape) -> "Result":
    from . import analysing

    problems = [f"points is {args.points}, must be at least 2"] if args.points < 2 else []
    problems += [
        f"{name} is {low:g} {high:g}, must rise"
        for name, (low, high) in (("a", args.a), ("b", args.b))
        if not low < high
    ]
    if problems:
        raise ValueError("; ".join(problems))
    axes = {
        name: sorted({round(low + (high - low) * i / (args.points - 1), 6) for i in range(args.points)} | mark)
        for name, (low, high), mark in (("a", args.a, {1.0}), ("b", args.b, {0.0}))
    }
    return analysing.landscape(
        args.ft,
        args.methods,
        tasks=args.tasks,
        coef=args.coef,
        batches=args.batches,
        seed=args.seed,
        memory=_bytes(args),
        options=args.suite_options,
        **axes,
    )


def _diagnose(args: Diagnose) -> "Result":
    from . import analysing

    return analysing.diagnose(args.run, coef=args.coef, sigma=args.sigma, options=args.suite_options)


def _bytes(args: Shared) -> int | None:
    return None if args.memory is None else args.memory << 20


def _command(compute: Any) -> Any:
    def main(args: Shared) -> None:
        if args.memory is not None and args.memory < 0:
            raise ValueError(f"memory is {args.memory}, must not be negative")
        import torch
        from rich.console import Console
        from rich.table import Table

        from ...analyses.plots import write
        from ...analyses.results import summary

        torch.set_num_threads(args.threads)
        result = compute(args)
        title, columns, lines = summary(result)
        table = Table(title=title)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for line in lines:
            table.add_row(*line)
        Console(width=max(100, Console().width)).print(table)
        if args.out:
            for path in write(args.out, result):
                print(f"{path.suffix[1:]}: {path}")

    return main


COMMANDS: Mapping[str, Command] = {
    "experts-curve": (_command(_experts_curve), ExpertsCurve),
    "replacement": (_command(_replacement), Replacement),
    "gains": (_command(_gains), Gains),
    "landscape": (_command(_landscape), Landscape),
    "diagnose": (_command(_diagnose), Diagnose),
}
