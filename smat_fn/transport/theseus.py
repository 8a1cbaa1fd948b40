"""Theseus: an expert's change in the coordinates of the new base's layers, by orthogonal maps between activations."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .. import tree
from ..errors import raise_problems, some_of
from ..execution import unrounded
from ..grad import ModuleLoss
from ..merge.parts.arithmetic import add
from ..merge.parts.inputs import Leaves, coef_problems
from ..merge.parts.vectors import applied
from ..merge.statistics import unpadded
from ..types import Batch, LossFn, Params
from .changes import changes

Others = Literal["zero", "add"]
# layers whose channels are not the last axis
_CHANNELS_FIRST = nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm
_KEPT = 1e-9  # of the norm of a cross-covariance, over its size, on the diagonal: what no row shows is not rotated


class Alignment(NamedTuple):
    """Orthogonal maps (old, new) of the axes of a leaf, float64; None: the axis is the same in both bases.

    Attributes:
        first: of the first axis, the outputs of a linear layer and the entries of a vector.
        last: of the second one, the inputs of a linear layer.
    """

    first: Tensor | None = None
    last: Tensor | None = None


def theseus(
    new: Params,
    old: Params,
    expert: Params,
    maps: Mapping[str, Alignment],
    *,
    coef: float = 1.0,
    others: Others = "zero",
) -> Params:
    """θ_new + γ T_outᵀ (W − W_old) T_in of linear layers (outputs, inputs), θ_new + γ T_outᵀ (b − b_old) of vectors.

    Where the activations of both bases are equal up to rotations, x_new = T_inᵀ x_old, the moved change has the effect
    on them that it had in the old base.

    Args:
        new: the base that receives the change, any tree of old's names; the widths of its layers may be others.
        old: the base that the expert was trained from.
        expert: θ, a tree of old's names and shapes.
        maps: T by parameter name: `alignments`.
        coef: γ, finite.
        others: of leaves without maps: "zero", or "add" their change as it is.

    Returns:
        A new tree of new's structure and dtypes; non-floating leaves are new's.

    Raises:
        ValueError: lists every problem of values, names, shapes and dtypes.

    Source: Rinaldi et al., "Transporting task vectors across different architectures without training", 2026
        (arXiv 2602.12952).
    """
    vector = theseus_vector(new, old, expert, maps, coef_problems(coef), others=others)
    return applied(new, vector, coef=coef)


def theseus_vector(
    new: Params,
    old: Params,
    expert: Params,
    maps: Mapping[str, Alignment],
    problems: Sequence[str] = (),
    *,
    others: Others = "zero",
) -> Leaves:
    """The moved change of `theseus`: flat, floating-point leaves only, for `apply_vector`.

    Args: as `theseus`; problems: found before, raised with those found here.
    """
    known = [] if others in get_args(Others) else [f"others is {others!r}, choose zero or add"]
    start, vector = changes(new, old, expert, [*problems, *known], same_shapes=False)
    problems = [f"maps name {some_of(unknown)}, which new lacks"] if (unknown := _unknown(maps, vector)) else []
    for path, change in vector.items():
        found = maps.get(path)
        if found is None and others == "zero":
            vector[path] = torch.zeros_like(start[path], dtype=change.dtype)
        elif _moved(change.shape, found or Alignment()) == start[path].shape:
            vector[path] = _rotated(change, *(found or Alignment()))
        else:
            way = "take others='zero'" if found is None else "make maps of these two bases by `alignments`"
            shapes = f"{tuple(change.shape)} in old and {tuple(start[path].shape)} in new"
            problems.append(f"parameter {path!r} has shape {shapes}, which its maps do not join: {way}")
    raise_problems(problems)
    return vector


def _unknown(maps: Mapping[str, Alignment], vector: Mapping[str, Tensor]) -> list[str]:
    return [repr(path) for path in maps if path not in vector]


def _moved(shape: torch.Size, alignment: Alignment) -> torch.Size | None:
    """The shape of a leaf after its maps; None where they do not fit."""
    sizes = list(shape)
    for axis, own in enumerate(alignment):
        if own is not None:
            if axis >= len(sizes) or len(own) != sizes[axis]:
                return None
            sizes[axis] = own.shape[1]
    return torch.Size(sizes)


def _rotated(change: Tensor, first: Tensor | None, last: Tensor | None) -> Tensor:
    """``firstᵀ @ change @ last``, in float64."""
    wide = change.double()
    with unrounded(change.device):
        wide = wide if first is None else first.to(wide).mT @ wide
        wide = wide if last is None else wide @ last.to(wide)
    return wide.to(change.dtype)


def alignments(
    loss_old: LossFn,
    old: Params,
    loss_new: LossFn,
    new: Params,
    batches: Iterable[Batch],
    batches_new: Iterable[Batch] | None = None,
) -> dict[str, Alignment]:
    """T = argmin ‖X_old T − X_new‖ over orthogonal T, X the inputs and the outputs of every layer on the same rows.

    T = U Vᵀ of the singular value decomposition X_oldᵀ X_new = U S Vᵀ. Between layers of equal width what no row shows
    keeps its direction. Layers are linear ones, embeddings and those with vectors as long as their outputs (norms); all
    have channels in the last axis.

    Args:
        loss_old: a `ModuleLoss` of a task at the old base.
        old: parameters of the old base, flat, by parameter name.
        loss_new: a `ModuleLoss` at the new base, whose module has layers of the same names.
        new: parameters of the new base, flat.
        batches: of the task.
        batches_new: the same rows for the new base (default: ``batches``).

    Returns:
        `Alignment` by parameter name; layers that see no input are left out.

    Raises:
        ValueError: a loss is not one of a module, the modules have no layer of one name, there are no batches, or the
            bases see different numbers of rows.

    Source: as `theseus`; there what no row shows is rotated as the decomposition happens to.
    """
    for label, loss in {"loss_old": loss_old, "loss_new": loss_new}.items():
        if not isinstance(loss, ModuleLoss):
            raise ValueError(f"{label} is not a loss of a module, whose layers are read: give a smat_fn.ModuleLoss")
    assert isinstance(loss_old, ModuleLoss)
    assert isinstance(loss_new, ModuleLoss)
    rows = list(batches)
    rows_new = rows if batches_new is None else list(batches_new)
    if not rows or len(rows) != len(rows_new):
        raise ValueError(
            f"there are {len(rows)} batches for the old base and {len(rows_new)} for the new one: give both"
        )
    known = _layers(loss_old.module, old)
    layers = {name: layer for name, layer in _layers(loss_new.module, new).items() if name in known}
    if not layers:
        raise ValueError("the modules of the two losses have no layer of one name: give bases of one architecture")
    sums: dict[tuple[str, str], Tensor] = {}
    for own, other in zip(rows, rows_new, strict=True):
        seen = _activations(loss_old, old, own, layers)
        for place, parts in _activations(loss_new, new, other, layers).items():
            sums[place] = _product(place[0], seen.get(place, []), parts) + sums.get(place, 0)
    found = {place: _procrustes(total) for place, total in sums.items()}
    return {
        path: alignment
        for name, layer in layers.items()
        for path, alignment in _alignments_of(name, layer, found.get((name, "in")), found.get((name, "out")))
        if path in new and path in old
    }


def _layers(module: nn.Module, params: Params) -> dict[str, nn.Module]:
    """The modules that have parameters of their own among these, and channels in the last axis."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if not isinstance(layer, _CHANNELS_FIRST) and getattr(layer, "data_format", "") != "channels_first"
        if any(_path(name, own) in params for own, _ in layer.named_parameters(recurse=False))
    }


def _path(name: str, parameter: str) -> str:
    return f"{name}.{parameter}".lstrip(".")


def _activations(
    loss: ModuleLoss, params: Params, batch: Batch, names: Iterable[str]
) -> dict[tuple[str, str], list[Tensor]]:
    """Rows of the inputs and the outputs of layers, one tensor for each call."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    modules = dict(loss.module.named_modules())

    def hook_of(name: str) -> Any:
        def hook(layer: nn.Module, args: Any, named: Any, output: Any) -> None:
            given = args[0] if args else next(iter(named.values()), None)
            # of a module with layers in it, an output of four axes may be an image
            most = 3 if next(layer.children(), None) else math.inf
            for side, value in (("in", given), ("out", output)):
                if isinstance(value, Tensor) and value.is_floating_point() and 0 < value.ndim <= most:
                    found.setdefault((name, side), []).append(unpadded(value.detach(), batch))

        return hook

    hooks = [modules[name].register_forward_hook(hook_of(name), with_kwargs=True) for name in names]
    try:
        with torch.no_grad():
            loss(params, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _product(layer: str, old: list[Tensor], new: list[Tensor]) -> Tensor:
    """X_oldᵀ X_new of a layer's calls. Raises: ValueError where they are not of the same rows."""
    if (before := [len(part) for part in old]) != (after := [len(part) for part in new]):
        raise ValueError(
            f"layer {layer!r} sees {sum(before)} rows in the old base and {sum(after)} in the new one, and rows are "
            "compared one by one: give bases with the same tokenizer or image size, and no mixture of experts"
        )
    with unrounded(new[0].device):
        return add(a.to(b.device).double().mT @ b.double() for a, b in zip(old, new, strict=True))


def _procrustes(total: Tensor) -> Tensor:
    """U Vᵀ of X_oldᵀ X_new."""
    tree.check_finite({"activations": total}, "the two bases")
    if total.shape[0] == total.shape[1]:
        total.diagonal().add_(_KEPT * total.norm() / len(total))
    left, _, right = torch.linalg.svd(total, full_matrices=False)
    return left @ right


def _alignments_of(
    name: str, layer: nn.Module, inputs: Tensor | None, outputs: Tensor | None
) -> Iterator[tuple[str, Alignment]]:
    """The maps of a layer's parameters."""
    for own, leaf in layer.named_parameters(recurse=False):
        path = _path(name, own)
        if outputs is None:
            continue
        if leaf.ndim == 1 and len(leaf) == outputs.shape[1]:
            yield path, Alignment(outputs)
        elif isinstance(layer, nn.Embedding):
            yield path, Alignment(None, outputs)
        elif leaf.ndim == 2 and inputs is not None and isinstance(layer, nn.Linear):
            yield path, Alignment(outputs, inputs)
        elif leaf.ndim == 2 and inputs is not None and type(layer).__name__ == "Conv1D":  # of GPT-2: (inputs, outputs)
            yield path, Alignment(inputs, outputs)
