"""Methods, mergers and presets as frozen dataclasses and plain values.

A merger's options are beside its arithmetic in `smat_fn.merge`. A field that is ``None`` takes the preset's value;
`resolve` fills them in.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias, TypeVar

from ..mat import METHODS, MORE_METHODS, MethodConfig
from ..mat.asam import Asam
from ..mat.finetune import Finetune
from ..mat.l2sp import L2sp
from ..mat.mergopt import Mergopt
from ..mat.mixout import Mixout
from ..mat.msam import Msam
from ..mat.orthoreg import Orthoreg
from ..mat.smat import Smat
from ..mat.talos import Talos
from ..merge import MERGERS, MORE_MERGERS
from ..merge import Merger as MergerConfig
from ..merge.arcee_fusion import ArceeFusion
from ..merge.breadcrumbs import Breadcrumbs
from ..merge.cart import Cart
from ..merge.consensus import Consensus
from ..merge.dare import Dare
from ..merge.dare_ties import DareTies
from ..merge.dc_merge import DcMerge
from ..merge.della import Della
from ..merge.emr import Emr
from ..merge.fisher import Fisher
from ..merge.iso_c import IsoC
from ..merge.iso_cts import IsoCts
from ..merge.karcher import Karcher
from ..merge.magmax import MagMax
from ..merge.metagpt import MetaGpt
from ..merge.model_stock import ModelStock
from ..merge.multislerp import MultiSlerp
from ..merge.nearswap import NearSwap
from ..merge.nuslerp import NuSlerp
from ..merge.opcm import Opcm
from ..merge.pcb import Pcb
from ..merge.ram import Ram
from ..merge.reg_mean import RegMean
from ..merge.sce import Sce
from ..merge.slerp import Slerp
from ..merge.svc import Svc
from ..merge.tall_mask import TallMask
from ..merge.task_arithmetic import TaskArithmetic
from ..merge.ties import Ties
from ..merge.tsv_merge import TsvMerge
from ..merge.weight_average import WeightAverage
from ..merge.weighted_average import WeightedAverage
from ..merge.wise_ft import WiseFt
from ..merge.wudi import Wudi
from .presets import DIGITS, PRESETS, Adapters, Dev, Preset, Training, preset_of
from .semantics import DIFFERENCES, Semantics, with_semantics

__all__ = [
    "DIFFERENCES", "DIGITS", "MERGERS", "METHODS", "MORE_MERGERS", "MORE_METHODS", "PRESETS", "Adapters",
    "ArceeFusion", "Asam", "Breadcrumbs", "Cart", "Consensus", "Dare", "DareTies", "DcMerge", "Della", "Dev", "Emr",
    "Finetune", "Fisher", "IsoC", "IsoCts", "Karcher", "L2sp", "MagMax", "MergerConfig", "Mergopt", "MetaGpt",
    "MethodConfig", "Mixout", "ModelStock", "Msam", "MultiSlerp", "NearSwap", "NuSlerp", "Opcm", "Orthoreg",
    "PaperMerger", "Pcb", "Preset", "Ram", "RegMean", "Sce", "Semantics", "Slerp", "Smat", "Svc", "TallMask", "Talos",
    "TaskArithmetic", "Ties", "Training", "TsvMerge", "WeightAverage", "WeightedAverage", "WiseFt", "Wudi",
    "preset_of", "resolve", "settings", "with_semantics",
]  # fmt: skip

PaperMerger: TypeAlias = WeightAverage | TaskArithmetic | Ties | Dare | Della
C = TypeVar("C", bound=MethodConfig | MergerConfig)


def resolve(config: C, defaults: Mapping[str, Any]) -> C:
    """``config`` with the preset's value for every None; unchanged if the preset has no such config."""
    default = defaults.get(config.name, config)
    missing = {f.name for f in fields(config) if getattr(config, f.name) is None}
    if isinstance(config, Smat) and config.lam is not None:
        missing -= {"period"}  # lam replaces it, so that no manifest holds a period that nothing uses
    return replace(config, **{name: getattr(default, name) for name in missing})


def settings(config: MethodConfig | MergerConfig) -> dict[str, Any]:
    """The values of a config that are set, as JSON values, without those that equal what leaving them out means."""
    if isinstance(config, MergerConfig):
        return config.settings()
    implied = getattr(config, "IMPLIED", {})
    return {name: value for name, value in asdict(config).items() if value is not None and value != implied.get(name)}
