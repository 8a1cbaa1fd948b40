"""Methods, mergers and presets as frozen dataclasses and plain values.

A merger's options stand beside its arithmetic in `smat_fn.merge`. A field that is ``None`` takes the preset's value;
`resolve` fills them in.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias, TypeVar

from ..mat import METHODS, MethodConfig
from ..mat.asam import Asam
from ..mat.finetune import Finetune
from ..mat.mergopt import Mergopt
from ..mat.orthoreg import Orthoreg
from ..mat.smat import Smat
from ..merge import MERGERS, MORE_MERGERS
from ..merge import Merger as MergerConfig
from ..merge.breadcrumbs import Breadcrumbs
from ..merge.dare import Dare
from ..merge.dare_ties import DareTies
from ..merge.della import Della
from ..merge.magmax import MagMax
from ..merge.model_stock import ModelStock
from ..merge.slerp import Slerp
from ..merge.task_arithmetic import TaskArithmetic
from ..merge.ties import Ties
from ..merge.tsv_merge import TsvMerge
from ..merge.weight_average import WeightAverage
from ..merge.weighted_average import WeightedAverage
from ..merge.wise_ft import WiseFt
from .presets import DIGITS, PRESETS, Adapters, Preset, Training, preset_of
from .semantics import DIFFERENCES, Semantics, with_semantics

__all__ = [
    "DIFFERENCES", "DIGITS", "MERGERS", "METHODS", "MORE_MERGERS", "PRESETS", "Adapters", "Asam", "Breadcrumbs",
    "Dare", "DareTies", "Della", "Finetune", "MagMax", "MergerConfig", "Mergopt", "MethodConfig", "ModelStock",
    "Orthoreg", "PaperMerger", "Preset", "Semantics", "Slerp", "Smat", "TaskArithmetic", "Ties", "Training",
    "TsvMerge", "WeightAverage", "WeightedAverage", "WiseFt", "preset_of", "resolve", "settings", "with_semantics",
]  # fmt: skip

PaperMerger: TypeAlias = WeightAverage | TaskArithmetic | Ties | Dare | Della
C = TypeVar("C", bound=MethodConfig | MergerConfig)


def resolve(config: C, defaults: Mapping[str, Any]) -> C:
    """``config`` with the preset's value wherever it says None; as it is where the preset holds no such config."""
    default = defaults.get(config.name, config)
    missing = {f.name for f in fields(config) if getattr(config, f.name) is None}
    return replace(config, **{name: getattr(default, name) for name in missing})


def settings(config: MethodConfig | MergerConfig) -> dict[str, Any]:
    """The values of a config that are set, as JSON values."""
    return {name: value for name, value in asdict(config).items() if value is not None}
