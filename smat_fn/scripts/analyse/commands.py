"""The part that all analyses of eval.py share: options, and printing and writing results. No torch until one runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from .. import outcome
from ..cli import NONE, SUITE, Command, Values

if TYPE_CHECKING:
    from ...analyses.results import Result

SPLIT = Literal["test", "dev"]
RUNS = arg(metavar="RUN...", help_behavior_hint="(at least one)")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of every analysis."""

    out: Annotated[Path | None, NONE] = None
    """Folder for the numbers (JSON, CSV) and the figure (PNG); the files have the command's name."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True, kw_only=True)
class OfSuite(Shared):
    """Options of every analysis that loads a suite."""

    suite_options: Annotated[Values, SUITE] = field(default_factory=dict)
    """Other options of model and data: model FOLDER, device cpu, decode_batch 64 (texts), eval_batch 64 (images)."""


@dataclass(frozen=True, kw_only=True)
class Batched(OfSuite):
    """Options of every analysis that evaluates several models together."""

    memory: Annotated[int | None, arg(help_behavior_hint="(default: 8 on a CPU, 1024 on a GPU)")] = None
    """Memory, in MiB, for models that torch.func.vmap evaluates together; 0: one by one."""

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else self.memory << 20


def command(compute: Callable[[Any], "Result"], options: type[Shared]) -> Command:
    """A command of eval.py that prints the result of ``compute(options)``, and writes it to ``options.out``."""

    def main(args: Shared) -> None:
        if isinstance(args, Batched) and args.memory is not None and args.memory < 0:
            raise ValueError(f"memory is {args.memory}, must not be negative")
        import torch
        from rich.markup import escape

        from ...analyses.plots import foreign_problems, write
        from ...analyses.results import summary
        from ...errors import raise_problems
        from ...report.tables import rich_table, show

        raise_problems(foreign_problems(args.out, compute.__name__.replace("_", "-")) if args.out else [])
        torch.set_num_threads(args.threads)
        result = compute(args)
        title, columns, rows = summary(result)
        show(rich_table(escape(title), columns, [map(escape, row) for row in rows]))
        outcome.add("tables", {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        if args.out:
            for path in write(args.out, result):
                outcome.line(f"{path.suffix[1:]}: {path}")
                outcome.add("written", path)

    return main, options


@contextmanager
def progress(unit: str, total: int) -> Iterator[Callable[[int], Any]]:
    """A progress bar: yields the function that advances it."""
    from ...progress import bar

    with bar(total, desc=f"{unit}s", unit=unit, leave=False) as shown:
        yield shown.update
