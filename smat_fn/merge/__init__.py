"""Mergers: pure functions of a base and experts, one file each. θ_merged = θ₀ + γ τ(Δ₁, …, Δ_N); WA has no base.

Every merger with a base is ``apply_vector(base, <name>_vector(...), coef=coef)``, so that a search over coef merges
once; `apply_rules` takes a coefficient for each leaf. Experts are {name: tree} or a list of trees, whose names are
their positions. ``MERGERS`` are the paper's five; those of ``MORE_MERGERS`` see one leaf at a time.
"""

from collections.abc import Mapping
from types import ModuleType

from . import breadcrumbs as _breadcrumbs
from . import dare as _dare
from . import dare_ties as _dare_ties
from . import della as _della
from . import magmax as _magmax
from . import model_stock as _model_stock
from . import slerp as _slerp
from . import task_arithmetic as _task_arithmetic
from . import ties as _ties
from . import tsv_merge as _tsv_merge
from . import weight_average as _weight_average
from . import weighted_average as _weighted_average
from . import wise_ft as _wise_ft
from .breadcrumbs import breadcrumbs, breadcrumbs_vector
from .coefs import Rules, apply_rules, coef_of, coefs_of
from .common import apply_vector, task_vector
from .configured import BASELESS, RANDOM, merge_by, vector_by
from .dare import dare, dare_vector
from .dare_ties import dare_ties, dare_ties_vector
from .della import della, della_vector
from .inputs import Experts
from .magmax import magmax, magmax_vector
from .model_stock import model_stock, model_stock_ratios, model_stock_vector
from .select import CALIBRATION_COEFS, COEFS, DROP_PROBS, TIES_KEEPS, Selection, choose, select_coef
from .slerp import slerp
from .task_arithmetic import task_arithmetic, task_arithmetic_vector
from .ties import ties, ties_density, ties_vector
from .tsv_merge import tsv_merge, tsv_merge_vector
from .weight_average import weight_average
from .weighted_average import weighted_average
from .wise_ft import wise_ft, wise_ft_vector

# the functions shadow their modules of the same name: this is the way to the modules
MERGERS: Mapping[str, ModuleType] = {
    "wa": _weight_average,
    "ta": _task_arithmetic,
    "ties": _ties,
    "dare": _dare,
    "della": _della,
}
MORE_MERGERS: Mapping[str, ModuleType] = {
    "weighted_average": _weighted_average,
    "wise_ft": _wise_ft,
    "slerp": _slerp,
    "model_stock": _model_stock,
    "dare_ties": _dare_ties,
    "breadcrumbs": _breadcrumbs,
    "magmax": _magmax,
    "tsv_merge": _tsv_merge,
}

__all__ = [
    "BASELESS",
    "CALIBRATION_COEFS",
    "COEFS",
    "DROP_PROBS",
    "MERGERS",
    "MORE_MERGERS",
    "RANDOM",
    "TIES_KEEPS",
    "Experts",
    "Rules",
    "Selection",
    "apply_rules",
    "apply_vector",
    "breadcrumbs",
    "breadcrumbs_vector",
    "choose",
    "coef_of",
    "coefs_of",
    "dare",
    "dare_ties",
    "dare_ties_vector",
    "dare_vector",
    "della",
    "della_vector",
    "magmax",
    "magmax_vector",
    "merge_by",
    "model_stock",
    "model_stock_ratios",
    "model_stock_vector",
    "select_coef",
    "slerp",
    "task_arithmetic",
    "task_arithmetic_vector",
    "task_vector",
    "ties",
    "ties_density",
    "ties_vector",
    "tsv_merge",
    "tsv_merge_vector",
    "vector_by",
    "weight_average",
    "weighted_average",
    "wise_ft",
    "wise_ft_vector",
]
