"""Experiment trackers beside the log's own JSON lines; each is imported only when it is asked for."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Interface of an experiment tracker."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one step."""

    def close(self) -> None:
        """Close the tracker."""


def problems(names: Sequence[str]) -> list[str]:
    """Errors for unknown trackers, and for packages that are not installed."""
    found = []
    for name in names:
        if name not in PACKAGES:
            found.append(f"tracker {name!r} is unknown, choose among {', '.join(PACKAGES)}")
            continue
        try:
            importlib.import_module(PACKAGES[name])
        except ImportError as error:
            found.append(f"--log {name} needs the package {name}, which cannot be imported ({error}): install it")
    return found


def open_tracker(name: str, *, out: Path, run: str, run_id: str, start: int, config: Mapping[str, Any]) -> Tracker:
    """A tracker of one expert.

    Args: out: folder of the experiment; run: name of the run; run_id: the same when a run is resumed; start: first step
        that will be logged, those from there on are replaced; config: what the run is about.
    """
    module = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        return _TensorBoard(module, out / "tensorboard" / run, start)
    more = {"id": run_id, "dir": str(out)} if name == "wandb" else {}
    unique = run if name == "wandb" else f"{run}-{run_id[:8]}"
    return _Run(module.init(project="smat_fn", name=unique, config=dict(config), resume="allow", **more))


class _TensorBoard:
    def __init__(self, module: Any, folder: Path, start: int) -> None:
        self._writer = module.SummaryWriter(str(folder), purge_step=start or None)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One scalar each."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class _Run:
    """A run of wandb, or of trackio, which has the same calls."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
