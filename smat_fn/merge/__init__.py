"""Mergers: pure functions of a base and experts, one file each. θ_merged = θ₀ + γ τ(Δ₁, …, Δ_N); WA has no base.

Each of task arithmetic, TIES, DARE and DELLA is ``apply_vector(base, <name>_vector(...), coef=coef)``, so that a search
over coef merges once. Experts are {name: tree} or a list of trees, whose names are their positions.
"""

from collections.abc import Mapping
from types import ModuleType

from . import dare as _dare
from . import della as _della
from . import task_arithmetic as _task_arithmetic
from . import ties as _ties
from . import weight_average as _weight_average
from ._common import apply_vector, task_vector
from ._inputs import Experts
from .dare import dare, dare_vector
from .della import della, della_vector
from .select import (
    CALIBRATION_COEFS,
    COEFS,
    DROP_PROBS,
    TIES_KEEPS,
    Selection,
    choose,
    select_coef,
)
from .task_arithmetic import task_arithmetic, task_arithmetic_vector
from .ties import ties, ties_density, ties_vector
from .weight_average import weight_average

# the functions shadow their modules of the same name: this is the way to the modules
MERGERS: Mapping[str, ModuleType] = {
    "wa": _weight_average,
    "ta": _task_arithmetic,
    "ties": _ties,
    "dare": _dare,
    "della": _della,
}

__all__ = [
    "CALIBRATION_COEFS",
    "COEFS",
    "DROP_PROBS",
    "MERGERS",
    "TIES_KEEPS",
    "Experts",
    "Selection",
    "apply_vector",
    "choose",
    "dare",
    "dare_vector",
    "della",
    "della_vector",
    "select_coef",
    "task_arithmetic",
    "task_arithmetic_vector",
    "task_vector",
    "ties",
    "ties_density",
    "ties_vector",
    "weight_average",
]
