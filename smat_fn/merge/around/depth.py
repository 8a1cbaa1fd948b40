"""LiNeS: coefficients that grow with depth, around any merger with a base."""

import glob
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from torch import Tensor

from ... import errors, tree
from ...types import Params
from ...where import blocks_of, by_depth, unet_problems
from ..parts.inputs import Experts, Leaves, check, coef_problems
from ..task_arithmetic import task_arithmetic_vector

Depth: TypeAlias = Callable[[str], int | None]


def lines_coefs(paths: Iterable[str], *, low: float, high: float, layer_of: Depth | None = None) -> dict[str, float]:
    """γ_l = low + (high − low) · l / (L − 1) of block l = 0 … L − 1, and low of leaves in no block.

    What `apply_rules`, `merge_by` and `merge_folders` take as ``coef``: LiNeS around any merger with a base, in memory
    or on folders. Blocks are counted as by `smat_fn.where.by_depth`.

    Args:
        paths: of leaves; of all leaves, unless ``layer_of`` is given.
        low, high: γ of the first and of the last block, finite. In the paper's symbols: α and α + β.
        layer_of: the block of a leaf, None outside of blocks; default: by `smat_fn.where.blocks_of`.

    Returns:
        γ by path, in the order of ``paths``.

    Raises:
        ValueError: lists coefficients that are not finite; or there are fewer than two blocks, or those of a UNet.

    Source: Wang et al., "LiNeS: post-training layer scaling prevents forgetting and enhances model merging", 2025;
        src/eval/eval.py of wang-kee/LiNeS at 43a7bdd.
    """
    paths = list(paths)
    by_hand = "give each block a coefficient by its name, as `coef={'{}.*': 0.2}`"
    problems = [] if layer_of else unet_problems(blocks_of(paths).values(), by_hand)
    problems = problems or errors.problems_of(by_depth, paths, 0.0, 0.0, layer_of=layer_of)
    errors.raise_problems([*coef_problems(low, "low"), *coef_problems(high, "high"), *problems])
    return by_depth(paths, low, high, layer_of=layer_of)


def lines_rules(paths: Iterable[str], *, low: float, high: float) -> dict[str, float]:
    """`lines_coefs` as one rule for each block, {"model.layers.3.*": γ}, and {"*": low} for leaves in no block.

    Args:
        paths, low, high: see `lines_coefs`, which raises too.
    """
    rules, rest, blocks = dict[str, float](), dict[str, float](), blocks_of(paths := list(paths))
    for path, coef in lines_coefs(paths, low=low, high=high).items():
        if block := blocks[path]:
            rules[glob.escape(block) + ".*"] = coef
        else:
            rest["*"] = low
    return rules | rest


def lines(vector: Mapping[str, Tensor], *, low: float, high: float, layer_of: Depth | None = None) -> Leaves:
    """γ_l τ_l of every leaf: a merged task vector scaled by depth, for `apply_vector` with coef 1.

    Args:
        vector: τ, flat, of any merger.
        low, high, layer_of: see `lines_coefs`, which raises too.
    """
    leaves = tree.flatten(vector)
    coefs = lines_coefs(leaves, low=low, high=high, layer_of=layer_of)
    return {path: leaf * coefs[path] for path, leaf in leaves.items()}


def lines_low(vector: Mapping[str, Tensor], base: Params, experts: Experts) -> float:
    """The authors' γ of the first block: ‖Σ_i Δ_i‖₁ / (N ‖τ‖₁), which is 1/N for task arithmetic; then high − low is β.

    Args:
        vector: τ, flat, of any merger.
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.

    Raises:
        ValueError: lists what does not fit; or τ is zero or not finite.
    """
    errors.raise_problems([f"vector: {text}" for text in errors.problems_of(tree.flatten, vector)])
    start, flat = check(base, experts)
    floating = {path: leaf for path, leaf in start.items() if leaf.is_floating_point()}
    tree.check_same(floating, "base", vector=(leaves := tree.flatten(vector)))
    size = sum(float(leaf.abs().sum()) for leaf in leaves.values())
    if not size:
        raise ValueError("the merged vector is zero: there is nothing to scale")
    if not math.isfinite(size):
        raise ValueError("the merged vector holds values that are NaN or infinite: do the experts, too?")
    total = sum(float(leaf.abs().sum()) for leaf in task_arithmetic_vector(start, flat).values())
    return total / size / len(flat)
