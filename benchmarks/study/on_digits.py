"""Studies on digits: the protocol of those whose grids widen, and the command that runs one."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tyro.conf import Positional

from smat_fn import machine
from smat_fn.config import DIGITS, IsoC, TsvMerge, Wudi

from ..methods import Protocol, Stage
from .grids import Grid, Widening, widening


def study(name: str, grids: Mapping[str, Grid], *, tuning: tuple[int, ...], evaluation: tuple[int, ...]) -> Widening:
    """Grids on digits, tuned and evaluated at seeds by the paper's five mergers and three more."""
    mergers = (*DIGITS.mergers.values(), TsvMerge(), IsoC(), Wudi())
    protocol = Protocol(
        name=name, preset="digits", grids={}, tuning=tuning, evaluation=evaluation, mergers=mergers, widen=True
    )
    return widening(protocol, grids)


def command(name: str, run: Callable[..., None]) -> Callable[..., None]:
    """The function ``main`` of ``python -m benchmarks NAME``: ``run(folder, jobs, facts, only)``."""

    def main(folder: Positional[Path], *, jobs: int = 2, only: Stage | None = None) -> None:
        """Run the protocol.

        Args:
            folder: keeps the trials; a stopped run resumes from it.
            jobs: processes of one thread each.
            only: one of its two stages.
        """
        run(folder, jobs, machine.describe(f"python -m benchmarks {name} FOLDER"), only)

    return main
