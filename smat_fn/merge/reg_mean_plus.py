"""RegMean++: RegMean block by block, each on inputs that the blocks merged before it give."""

from collections.abc import Mapping, Sequence

from .. import errors, tree
from ..types import Batch, LossFn, Params
from ..where import block_prefix
from .parts.inputs import Experts, Leaves, check
from .parts.vectors import applied
from .reg_mean import reg_mean_vector, scale_problems


# over 60 lines: its docstring explains every argument
def reg_mean_plus(
    loss_fns: Mapping[str, LossFn],
    base: Params,
    experts: Experts,
    batches: Mapping[str, Sequence[Batch]],
    *,
    scale: float = 0.9,
) -> Params:
    """`reg_mean` of block after block l, G_i of the inputs in f_i,l ∘ f_M,l−1 ∘ … ∘ f_M,1: those before are merged.

    Blocks are in the order of the losses' module. Inside a block inputs are those of the expert's own layers. Leaves
    outside of blocks are averaged, and merged first.

    Args:
        loss_fns: of the experts' tasks by the experts' names, `ModuleLoss`.
        base: flat tree that the experts were trained from.
        experts: {name: flat tree}.
        batches: rows of every task, by the same names.
        scale: as of `reg_mean`.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, names, structure and shapes; or no leaf is in a block.

    Source: Nguyen et al., "RegMean++: enhancing effectiveness and generalization of regression mean for model
        merging", 2025 (arXiv 2508.03121); fusion_bench/method/regmean_plusplus of tanganke/fusion_bench at 1066030.
    """
    from ..grad import ModuleLoss  # here, so that importing a merger loads no training
    from .statistics import input_grams

    start, flat = check(base, experts)
    groups: dict[str, list[str]] = {}
    # weights of a file are in the order of their names, layers.10 before layers.2
    modules = [loss.module for loss in loss_fns.values() if isinstance(loss, ModuleLoss)]
    place = {path: i for module in modules[:1] for i, (path, _) in enumerate(module.named_parameters())}
    for path in sorted(start, key=lambda path: place.get(path, -1)):
        groups.setdefault(block_prefix(path), []).append(path)
    outside = groups.pop("", [])
    problems = scale_problems(scale)
    problems += [] if groups else ["no parameter is in a numbered block, as layers.3.weight is: take reg_mean"]
    for name in flat:
        problems += [f"task {name!r} has no loss: give one by the expert's name"] if name not in loss_fns else []
        problems += [f"task {name!r} has no batches: give at least one"] if not batches.get(name) else []
    errors.raise_problems(problems)

    def part(leaves: Leaves, paths: Sequence[str]) -> Leaves:
        return {path: leaves[path] for path in paths}

    merged: Leaves = {}
    for paths in (outside, *groups.values()):
        grams: dict[str, Leaves] = {name: {} for name in flat}
        if paths is not outside:
            for name, own in flat.items():
                now = {path: leaf.to(start[path].dtype) for path, leaf in {**own, **merged}.items()}
                grams[name] = input_grams(loss_fns[name], now, batches[name], only=paths)
        parts = {name: part(leaves, paths) for name, leaves in flat.items()}
        vector = reg_mean_vector(part(start, paths), parts, grams, scale=scale)
        merged |= applied(part(start, paths), vector, coef=1.0)
    return tree.unflatten(base, merged)
