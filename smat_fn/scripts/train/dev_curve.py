"""Dev scores while an expert trains: the best parameters are kept, and training ends when they stop improving."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import tree
from ...analyses import mean_loss
from ...config import Dev, MethodConfig, Training
from ...lora import Lora
from ...parallel import World
from ...suites import Suite
from ...types import Params
from .variants import whole_weights


class Tracked(NamedTuple):
    """A training state with the best parameters so far, as training checkpoints hold it."""

    state: Any
    best: Params

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step


class DevCurve:
    """The dev scores (or losses) of one expert by step.

    Args:
        measure: of parameters as they would be saved.
        dev: how often, by what, and how many evaluations without a better one end training.
        held: steps at the start that move no parameter, as those of TaLoS's calibration: nothing is evaluated in them.
    """

    def __init__(self, measure: Callable[[Params], float], dev: Dev, held: int = 0) -> None:
        self._measure, self._dev, self._held = measure, dev, held
        self.points: list[tuple[int, float]] = []  # steps done, value
        self.best: Params = None  # in the first process

    def resume(self, points: Sequence[Sequence[Any]], best: Params) -> None:
        """Restore earlier evaluations and the best state."""
        self.points, self.best = [(step, value) for step, value in points], best

    def due(self, done: int, total: int) -> bool:
        """Whether to evaluate after ``done`` of ``total`` steps: every so often, and at the end."""
        return done > self._held and (done % self._dev.every == 0 or done == total)

    def add(self, done: int, params: Params, world: World) -> dict[str, float]:
        """Evaluate in the first process, which keeps a copy of the best parameters, the earliest of equals.

        All processes call it. Returns: the value by its name in logs. Raises: ValueError for one that is not finite;
            an error in all processes where the first one cannot evaluate.
        """
        value = world.led(lambda: self._measure(params))
        if not math.isfinite(value):
            raise ValueError(
                f"the dev {self._dev.by} is {value} after {done} steps: check the weights (a lower learning rate), and "
                "whether every dev row has something to score"
            )
        self.points.append((done, value))
        if world.leads and self._best_index() == len(self.points) - 1:
            self.best = tree.tree_map(lambda leaf: leaf.detach().clone(), params)
        return {f"dev_{self._dev.by}": value}

    def ended(self) -> bool:
        """Whether the last ``patience`` evaluations brought no improvement."""
        patience = self._dev.patience
        return patience is not None and bool(self.points) and len(self.points) - 1 - self._best_index() >= patience

    def facts(self) -> dict[str, Any]:
        """JSON values for the manifest."""
        step, value = self.points[self._best_index()]
        return {"by": self._dev.by, "curve": [list(point) for point in self.points], "step": step, "best": value}

    def line(self, steps: int | None) -> str:
        """Which evaluation was the best, of a training of so many steps."""
        found, (ended, _) = self.facts(), self.points[-1]
        at = f"after {found['step']} of {ended} steps" + (f" (of {steps})" if ended != steps else "")
        return f"dev {found['by']} {found['best']:.4g} {at} is the best of {len(self.points)}, and is kept"

    def _best_index(self) -> int:
        values = [value for _, value in self.points]
        return values.index(min(values) if self._dev.by == "loss" else max(values))


def curve_of(
    suite: Suite, task: str, training: Training, method: MethodConfig, adapters: Lora | None
) -> DevCurve | None:
    """The curve that a training asks for. Raises: ValueError for losses of a suite without dev batches."""
    if (dev := training.dev) is None:
        return None
    if dev.by == "loss" and suite.dev_batches is None:
        raise ValueError(f"suite {suite.name!r} has no batches of its dev split: evaluate by score")

    def measure(params: Params) -> float:
        found = whole_weights(params, suite.base, adapters)
        full = {path: leaf.to(suite.base[path].device) for path, leaf in found.items()}  # gathered ones are on the CPU
        if dev.by == "score":
            return suite.score(full, task, "dev")
        assert suite.dev_batches is not None
        with torch.no_grad():
            return float(mean_loss(suite.loss_fn(task), suite.dev_batches(task))(full))

    return DevCurve(measure, dev, getattr(method, "held", 0))
