"""Methods, mergers and presets as frozen dataclasses and plain values. Nothing here needs torch.

A field that is ``None`` takes the preset's value; `resolve` fills them in.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from .mergers import (
    MERGERS,
    MORE_MERGERS,
    Breadcrumbs,
    Dare,
    DareTies,
    Della,
    MagMax,
    MergerConfig,
    ModelStock,
    MoreMerger,
    PaperMerger,
    Slerp,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
)
from .methods import METHODS, Asam, Finetune, Mergopt, MethodConfig, Orthoreg, Smat
from .presets import DIGITS, PRESETS, Adapters, Preset, Training, preset_of
from .semantics import DIFFERENCES, Semantics, with_semantics

__all__ = [
    "DIFFERENCES",
    "DIGITS",
    "MERGERS",
    "METHODS",
    "MORE_MERGERS",
    "PRESETS",
    "Adapters",
    "Asam",
    "Breadcrumbs",
    "Dare",
    "DareTies",
    "Della",
    "Finetune",
    "MagMax",
    "MergerConfig",
    "Mergopt",
    "MethodConfig",
    "ModelStock",
    "MoreMerger",
    "Orthoreg",
    "PaperMerger",
    "Preset",
    "Semantics",
    "Slerp",
    "Smat",
    "TaskArithmetic",
    "Ties",
    "Training",
    "TsvMerge",
    "WeightAverage",
    "WeightedAverage",
    "WiseFt",
    "preset_of",
    "resolve",
    "settings",
    "with_semantics",
]

C = TypeVar("C", bound=MethodConfig | MergerConfig)


def resolve(config: C, defaults: Mapping[str, Any]) -> C:
    """``config`` with the preset's value wherever it says None; as it is where the preset holds no such config."""
    default = defaults.get(config.name, config)
    missing = {f.name for f in fields(config) if getattr(config, f.name) is None}
    return replace(config, **{name: getattr(default, name) for name in missing})


def settings(config: MethodConfig | MergerConfig) -> dict[str, Any]:
    """The values of a config that are set, as JSON values."""
    return {name: value for name, value in asdict(config).items() if value is not None}
