"""Experiment trackers beside the log's own JSON lines; each is imported only when it is asked for."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(NamedTuple):
    """Interface of an experiment tracker."""

    log: Callable[[Mapping[str, float], int], None]  # (numbers, step)
    close: Callable[[], None]


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
    Raises: ValueError where the package cannot begin a run.
    """
    module = importlib.import_module(PACKAGES[name])
    if name == "tensorboard":
        # from step 0 as well: the folder may hold the run that this one replaces
        writer = module.SummaryWriter(str(out / "tensorboard" / run), purge_step=start)

        def log(numbers: Mapping[str, float], step: int) -> None:
            for title, value in numbers.items():
                writer.add_scalar(title, value, step)

        return Tracker(log, writer.close)
    # trackio has the same calls as wandb
    more = {"id": run_id, "dir": str(out)} if name == "wandb" else {}
    unique = run if name == "wandb" else f"{run}-{run_id[:8]}"
    try:
        opened = module.init(project="smat_fn", name=unique, config=dict(config), resume="allow", **more)
    except Exception as error:  # each package has errors of its own
        way = "log in, or leave the option out and pass --resume"
        raise ValueError(f"--log {name}: {name} cannot begin a run ({str(error) or repr(error)}): {way}") from error
    return Tracker(lambda numbers, step: opened.log(dict(numbers), step=step), opened.finish)
