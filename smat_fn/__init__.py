"""Merge-aware training (SMAT) and model merging as pure functions over parameter trees."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grad import ModuleLoss, apply_fn, value_and_grad
    from .mat.smat import Schedule
    from .mat.weights import SimulatedWeights
    from .simulation import (
        Draw,
        clean_loss,
        draw,
        materialise,
        mixed_loss,
        participation,
        reweight,
        simulate,
        simulated_loss,
    )

__version__ = "0.1.0"

# kernels that round alike on all x86 processors with AVX2 (docs/gotchas.md, Reproducing)
_PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
if os.environ.get("SMAT_FN_PORTABLE", "0") != "0":
    os.environ.update(_PORTABLE)
    if "torch" in sys.modules and sys.modules["torch"].backends.cpu.get_cpu_capability() != "AVX2":
        raise ImportError("SMAT_FN_PORTABLE is set, but torch has chosen its kernels: import smat_fn before using it")

__all__ = [
    "Draw",
    "ModuleLoss",
    "Schedule",
    "SimulatedWeights",
    "__version__",
    "apply_fn",
    "clean_loss",
    "draw",
    "materialise",
    "mixed_loss",
    "participation",
    "reweight",
    "simulate",
    "simulated_loss",
    "value_and_grad",
]

_HOMES = {
    **dict.fromkeys(("ModuleLoss", "apply_fn", "value_and_grad"), "grad"),
    "Schedule": "mat.smat",
    "SimulatedWeights": "mat.weights",
}
_SUBMODULES = {
    *("analyses", "checkpoint", "config", "data", "errors", "evaluate", "folders", "grad", "integrations", "lora"),
    *("mat", "merge", "models", "ops", "optim", "parallel", "random", "report", "scripts", "simulation", "suites"),
    *("testing", "tree", "types", "where"),
}


def __getattr__(name: str) -> Any:
    # on first use: `import smat_fn` does not load torch
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(importlib.import_module(f".{_HOMES.get(name, 'simulation')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
