"""Methods, mergers and presets as frozen dataclasses and plain values. Nothing here needs torch.

A field that is ``None`` takes the preset's value; `resolve` fills them in.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from .mergers import MERGERS, Dare, Della, MergerConfig, TaskArithmetic, Ties, WeightAverage
from .methods import METHODS, Asam, Finetune, Mergopt, MethodConfig, Orthoreg, Smat
from .preset import Preset, Training
from .presets import DIGITS, PRESETS, preset_of

__all__ = [
    "DIGITS",
    "MERGERS",
    "METHODS",
    "PRESETS",
    "Asam",
    "Dare",
    "Della",
    "Finetune",
    "MergerConfig",
    "Mergopt",
    "MethodConfig",
    "Orthoreg",
    "Preset",
    "Smat",
    "TaskArithmetic",
    "Ties",
    "Training",
    "WeightAverage",
    "preset_of",
    "resolve",
    "settings",
]

C = TypeVar("C", bound=MethodConfig | MergerConfig)


def resolve(config: C, defaults: Mapping[str, Any]) -> C:
    """``config`` with the preset's value wherever it says None."""
    default = defaults[config.name]
    missing = {f.name for f in fields(config) if getattr(config, f.name) is None}
    return replace(config, **{name: getattr(default, name) for name in missing})


def settings(config: MethodConfig | MergerConfig) -> dict[str, Any]:
    """The values of a config that are set, as JSON values."""
    return {name: value for name, value in asdict(config).items() if value is not None}
