"""One trial as a value: a method at a seed, and all that decides its outcome."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smat_fn.config import PRESETS, MethodConfig, Training, settings

if TYPE_CHECKING:
    from smat_fn.suites import Suite

Kind = tuple[str, str]  # trials of one kind take equally long


class Trial(NamedTuple):
    """A method with its strengths, a training configuration and a seed, on the suite and mergers of a preset."""

    label: str  # in tables
    preset: str
    method: MethodConfig
    training: Training
    seed: int
    options: tuple[tuple[str, Any], ...] = ()  # of the suite, beside and over those of the preset

    def facts(self) -> dict[str, Any]:
        """All that decides the outcome, as JSON values; without the label, which only names it."""
        preset = PRESETS[self.preset]
        return {
            "preset": self.preset,
            "suite": {"name": preset.suite, **preset.options, **dict(self.options)},
            "method": self.method.name,
            "hyperparameters": settings(self.method),
            "training": asdict(self.training),
            "mergers": {name: settings(config) for name, config in preset.mergers.items()},
            "seed": self.seed,
        }

    def folder(self, work: Path) -> Path:
        """Where its experts, merged models and outcome are kept, by a hash of `facts` and the label."""
        text = json.dumps([self.label, self.facts()], sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")
        return work / f"{slug}-seed{self.seed}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"

    def load(self) -> "Suite":
        """Its suite."""
        from smat_fn.suites import load_suite

        return load_suite(**self.facts()["suite"], seed=self.seed, progress=False)

    def kind(self) -> Kind:
        """Method and optimizer."""
        return self.method.name, self.training.optimizer

    def __str__(self) -> str:
        """Label, learning rates and seed; the strengths that differ from the preset's."""
        default = settings(PRESETS[self.preset].methods[self.method.name])
        own = {name: value for name, value in settings(self.method).items() if default.get(name) != value}
        if self.training.muon_lr is not None:
            own["muon_lr"] = self.training.muon_lr
        shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in own.items()}
        values = "".join(f", {name} {value}" for name, value in {"lr": f"{self.training.lr:g}", **shown}.items())
        return f"{self.label}{values}, seed {self.seed}"
