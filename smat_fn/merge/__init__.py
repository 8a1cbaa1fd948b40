"""Mergers: pure functions of a base and experts, one file each. θ_merged = θ₀ + γ τ(Δ₁, …, Δ_N); WA has no base.

Every merger with a base is ``apply_vector(base, <name>_vector(...), coef=coef)``, so that a search over coef merges
once; `apply_rules` takes a coefficient for each leaf. Experts are {name: tree} or a list of trees, whose names are
their positions. ``MERGERS`` holds the option classes of the paper's five, ``MORE_MERGERS`` those of the others.
The functions have the names of their modules: ``smat_fn.merge.ties`` is the function, and
``from smat_fn.merge.ties import Ties`` imports from the module. ``parts`` holds what mergers are made of and imports
none of them; ``around`` holds what is done with any of them: coefficients, norms, adapters, mixtures of experts.
"""

from ..where import block_of, block_prefix, blocks_of
from .adamerging import adamerging
from .arcee_fusion import arcee_fusion
from .around.depth import lines, lines_coefs, lines_low, lines_rules
from .around.factors import Factors, combine, truncated
from .around.norms import norms, norms_note, shortening
from .around.select import (
    CALIBRATION_COEFS,
    DROP_PROBS,
    TIES_KEEPS,
    WIDER,
    Layered,
    Selection,
    apply_blocks,
    choose,
    choose_coef,
    exceeds,
    grid_edge,
    next_coef,
    select_coef,
    select_coefs,
)  # fmt: skip
from .around.spaces import core_space, knots
from .around.weights import (
    ByExpert,
    check_trials,
    numbers_of,
    over_problems,
    select_numbers,
    select_weights,
    with_numbers,
)
from .breadcrumbs import breadcrumbs, breadcrumbs_vector
from .cart import cart
from .consensus import consensus, consensus_vector
from .dare import dare, dare_vector
from .dare_ties import dare_ties, dare_ties_vector
from .dc_merge import dc_merge, dc_merge_vector
from .della import della, della_vector
from .emr import emr, emr_vector
from .fisher import fisher, fisher_vector
from .iso_c import iso_c, iso_c_vector
from .iso_cts import iso_cts, iso_cts_vector
from .karcher import karcher
from .magmax import magmax, magmax_vector
from .metagpt import metagpt, metagpt_vector
from .model_stock import model_stock, model_stock_vector
from .multislerp import multislerp, multislerp_vector
from .nearswap import nearswap, nearswap_vector
from .nuslerp import nuslerp, nuslerp_vector
from .opcm import opcm, opcm_vector
from .parts.coefs import Rules, apply_rules, coef_of, coefs_of
from .parts.inputs import Experts, flat_statistics
from .parts.merger import COEFS, WIDE, Merger
from .parts.vectors import apply_vector, task_vector
from .pcb import pcb, pcb_vector
from .ram import ram, ram_vector
from .reg_mean import reg_mean, reg_mean_vector
from .reg_mean_plus import reg_mean_plus
from .registry import BASELESS, MERGERS, MORE_MERGERS, RANDOM, check_options, merge_by, vector_by
from .sce import sce, sce_vector
from .slerp import slerp
from .svc import svc, svc_vector
from .tall_mask import tall_mask, tall_mask_vector
from .task_arithmetic import task_arithmetic, task_arithmetic_vector
from .ties import ties, ties_density, ties_vector
from .tsv_merge import tsv_merge, tsv_merge_vector
from .weight_average import weight_average
from .weighted_average import weighted_average
from .wise_ft import wise_ft, wise_ft_vector
from .wudi import wudi, wudi_vector

ta = task_arithmetic  # its name in merge.py and in tables

__all__ = [
    "BASELESS", "CALIBRATION_COEFS", "COEFS", "DROP_PROBS", "MERGERS", "MORE_MERGERS", "RANDOM", "TIES_KEEPS", "WIDE",
    "WIDER", "ByExpert", "Experts", "Factors", "Layered", "Merger", "Rules", "Selection", "adamerging", "apply_blocks",
    "apply_rules", "apply_vector", "arcee_fusion", "block_of", "block_prefix", "blocks_of", "breadcrumbs",
    "breadcrumbs_vector", "cart", "check_options", "check_trials", "choose", "choose_coef", "coef_of", "coefs_of",
    "combine", "consensus", "consensus_vector", "core_space", "dare", "dare_ties", "dare_ties_vector", "dare_vector",
    "dc_merge", "dc_merge_vector", "della", "della_vector", "emr", "emr_vector", "exceeds", "fisher", "fisher_vector",
    "flat_statistics", "grid_edge", "iso_c", "iso_c_vector", "iso_cts", "iso_cts_vector", "karcher", "knots", "lines",
    "lines_coefs", "lines_low", "lines_rules", "magmax", "magmax_vector", "merge_by", "metagpt", "metagpt_vector",
    "model_stock", "model_stock_vector", "multislerp", "multislerp_vector", "nearswap", "nearswap_vector", "next_coef",
    "norms", "norms_note", "numbers_of", "nuslerp", "nuslerp_vector", "opcm", "opcm_vector", "over_problems", "pcb",
    "pcb_vector", "ram", "ram_vector", "reg_mean", "reg_mean_plus", "reg_mean_vector", "sce", "sce_vector",
    "select_coef", "select_coefs", "select_numbers", "select_weights", "shortening", "slerp", "svc", "svc_vector", "ta",
    "tall_mask", "tall_mask_vector", "task_arithmetic", "task_arithmetic_vector", "task_vector", "ties", "ties_density",
    "ties_vector", "truncated", "tsv_merge", "tsv_merge_vector", "vector_by", "weight_average", "weighted_average",
    "wise_ft", "wise_ft_vector", "with_numbers", "wudi", "wudi_vector",
]  # fmt: skip
