"""Mergers as configurations name them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ..config import MergerConfig, settings
from ..types import Params
from .breadcrumbs import breadcrumbs_vector
from .coefs import Rules, apply_rules
from .common import apply_vector
from .dare import dare_vector
from .dare_ties import dare_ties_vector
from .della import della_vector
from .inputs import Experts, Leaves
from .magmax import magmax_vector
from .model_stock import model_stock_vector
from .slerp import slerp
from .task_arithmetic import task_arithmetic_vector
from .ties import ties_vector
from .tsv_merge import tsv_merge_vector
from .weight_average import weight_average
from .weighted_average import weighted_average
from .wise_ft import wise_ft_vector

BASELESS: Mapping[str, Callable[..., Params]] = {
    "wa": weight_average,
    "weighted_average": weighted_average,
    "slerp": slerp,
}
RANDOM: Mapping[str, Callable[..., Leaves]] = {
    "dare": dare_vector,
    "della": della_vector,
    "dare_ties": dare_ties_vector,
}
_VECTORS: Mapping[str, Callable[..., Leaves]] = {
    "ta": task_arithmetic_vector,
    "ties": ties_vector,
    "wise_ft": wise_ft_vector,
    "model_stock": model_stock_vector,
    "breadcrumbs": breadcrumbs_vector,
    "magmax": magmax_vector,
    "tsv_merge": tsv_merge_vector,
}


def merge_by(
    config: MergerConfig, base: Params, experts: Experts, *, key: Tensor | None = None, coef: Rules | None = None
) -> Params:
    """The merger that a configuration names, with its options.

    Args: key: for those with random masks; coef: γ, or {glob: γ} for a merger with a base; else ``config.coef``.
    Raises: as the merger does.
    """
    options = settings(config)
    own = options.pop("coef", None)
    coef = own if coef is None else coef
    if config.name in BASELESS:
        return BASELESS[config.name](experts, **options, **({} if coef is None else {"coef": coef}))
    vector = vector_by(config, base, experts, key=key)
    assert coef is not None
    return apply_rules(base, vector, coef=coef) if isinstance(coef, Mapping) else apply_vector(base, vector, coef=coef)


def vector_by(config: MergerConfig, base: Params, experts: Experts, *, key: Tensor | None = None) -> Leaves:
    """The merged task vector of `merge_by`, of a merger that has a base; it does not depend on the coefficient."""
    options = settings(config)
    options.pop("coef", None)
    if config.name in RANDOM:
        return RANDOM[config.name](key, base, experts, **options)
    return _VECTORS[config.name](base, experts, **options)
