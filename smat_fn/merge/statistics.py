"""Statistics that data-driven mergers need: the diagonal of the Fisher matrix, and Gram matrices of layer inputs.

Pure functions of a loss, parameters and batches, summed batch by batch in float32. `fisher` and `reg_mean` take one
tree of them for each expert.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import random, tree
from ..execution import unrounded
from ..grad import ModuleLoss, value_and_grad
from ..types import Batch, LossFn, Micro, Params
from .parts.inputs import Leaves


def diagonal_fisher(loss_fn: LossFn, params: Params, rows: Iterable[Micro]) -> Leaves:
    """F = 1/n Σ_r (w_r ∇ℓ_r(θ))², the diagonal of the Fisher matrix over n rows.

    ℓ_r is the loss of row r and w_r its weight: the number of tokens that the loss is the mean of, 1 of a classifier,
    so that w_r ℓ_r is −log p of the row's answer. Labels of the rows give the empirical matrix, labels that
    `drawn_labels` draws an unbiased estimate of the Fisher matrix.

    Args:
        loss_fn: ``(params, batch) -> (loss, aux)``.
        params: any tree of floating-point tensors.
        rows: batches of one row each, as ``split_rows(batch, rows)`` of `smat_fn.data.batching` gives them.

    Returns:
        F by parameter name, float32.

    Raises:
        ValueError: there are no rows, or a value of F is not finite.

    Source: Matena and Raffel, "Merging models with Fisher-weighted averaging", 2022, equation (6).
    """
    total = {path: torch.zeros_like(leaf, dtype=torch.float32) for path, leaf in tree.flatten(params).items()}
    count = 0
    for grads, weight in row_gradients(loss_fn, params, rows):
        count += 1
        for path, grad in grads.items():
            total[path] += (grad.float() * weight).square_()
    found = {path: leaf / count for path, leaf in total.items()}
    tree.check_finite(found, "the Fisher matrix")
    return found


def row_gradients(loss_fn: LossFn, params: Params, rows: Iterable[Micro]) -> Iterator[tuple[Leaves, float]]:
    """The gradients of rows one after another, by parameter name, with the rows' weights.

    Raises: ValueError for rows that are not `Micro`, and where there are none.
    """
    at = value_and_grad(loss_fn, engine="autograd" if isinstance(loss_fn, ModuleLoss) else "func")
    count = 0
    for count, row in enumerate(rows, 1):
        if not isinstance(row, Micro):  # a pair of inputs and labels would be taken for a batch and its weight
            raise ValueError(
                f"row {count - 1} is a {type(row).__name__}: give Micro(batch, weight) of one row each, as "
                "smat_fn.data.batching.split_rows(batch, rows) does"
            )
        yield tree.flatten(at(params, row.batch)[1]), row.weight
    if not count:
        raise ValueError("no rows: give at least one")


def drawn_labels(loss_fn: LossFn, params: Params, batch: Batch, key: Tensor) -> Batch:
    """A classifier's batch with labels drawn from its own predictions, softmax(logits).

    Args:
        loss_fn: a classifier's, whose aux are the logits (B, classes).
        batch: (inputs, labels), or a NamedTuple with a field ``labels``.
        key: int64 (2,).

    Returns:
        A batch of the same type.
    """
    with torch.no_grad():
        logits = loss_fn(params, batch)[1]
    # on the CPU: CUDA adds up in no fixed order
    shares = torch.from_numpy(logits.double().softmax(1).cpu().numpy().cumsum(1))
    drawn = random.uniform(key, (len(shares),), dtype=torch.float64).cpu()
    labels = (shares < drawn[:, None] * shares[:, -1:]).sum(1)
    if hasattr(batch, "_fields"):
        return batch._replace(labels=labels.to(batch.labels.device))
    inputs, given = batch
    return inputs, labels.to(given.device)


def input_grams(loss_fn: LossFn, params: Params, batches: Iterable[Batch], *, only: Sequence[str] = ()) -> Leaves:
    """G = 1/n Σ_r x_r x_rᵀ of every linear layer, x_r its n inputs: rows, or tokens that an attention mask keeps.

    Args:
        loss_fn: a `ModuleLoss`; the layers are its ``torch.nn.Linear`` whose weights are in ``params``.
        params: flat, by parameter name.
        batches: of the loss.
        only: names of weights (default: all).

    Returns:
        G (inputs, inputs) by the name of the layer's weight, float32; layers that see no input are left out.

    Raises:
        ValueError: the loss is not one of a module, none of its layers has a weight in ``params``, there are no
            batches, a batch has `untold_padding`, or a value of G is not finite.

    Source: Jin et al., "Dataless knowledge fusion by merging weights of language models", 2023, section 3.
    """
    wanted = gram_layers(loss_fn, params, only=only)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    batch: Any = None
    with _seen(wanted) as seen, torch.no_grad():
        for batch in batches:
            if reason := untold_padding(loss_fn, batch):
                raise ValueError(f"{reason}: give batches of one row, as the split of its suite makes them")
            seen.clear()
            loss_fn(params, batch)
            for path, inputs in seen:  # a weight that layers share has the inputs of all of them
                rows = unpadded(inputs, batch).float()
                with unrounded(rows.device):
                    sums[path] = rows.mT @ rows + sums.get(path, 0)
                counts[path] = counts.get(path, 0) + len(rows)
    if batch is None:
        raise ValueError("no batches: give at least one")
    found = {path: sums[path] / max(counts[path], 1) for path in wanted if path in sums}
    tree.check_finite(found, "the Gram matrices")
    return found


def gram_layers(loss_fn: LossFn, params: Params, *, only: Sequence[str] = ()) -> dict[str, list[nn.Linear]]:
    """The layers whose inputs `input_grams` reads, by the name of their weight, which several may share.

    Raises: ValueError if there are none.
    """
    if not isinstance(loss_fn, ModuleLoss):
        raise ValueError("Gram matrices need the layers of a module: give a smat_fn.grad.ModuleLoss")
    layers = {
        f"{name}.weight".lstrip("."): layer
        for name, layer in loss_fn.module.named_modules()
        if isinstance(layer, nn.Linear)
    }
    sharing: dict[int, list[nn.Linear]] = {}
    weights = {path: id(dict(layer.named_parameters(recurse=False)).get("weight")) for path, layer in layers.items()}
    for path, layer in layers.items():
        sharing.setdefault(weights[path], []).append(layer)
    wanted = {path: sharing[weights[path]] for path in layers if path in params and (not only or path in only)}
    if not wanted and not only:
        raise ValueError(
            f"no torch.nn.Linear of {type(loss_fn.module).__name__} has its weight among the {len(params)} parameters, "
            "so that there is no Gram matrix and RegMean would be the mean: take another merger"
        )
    return wanted


def untold_padding(loss_fn: LossFn, batch: Batch) -> str:
    """Why the inputs of layers may hold padding that no attention mask of the batch marks; "" where they do not.

    Texts of several lengths are filled up inside the loss; an encoder-decoder's mask is that of its sources.
    """
    if hasattr(batch, "owners") and len(batch.labels) > 1:
        return f"the {len(batch.labels)} texts of a batch are filled up to one length inside the loss"
    config = getattr(loss_fn.module, "config", None) if isinstance(loss_fn, ModuleLoss) else None
    if getattr(config, "is_encoder_decoder", False) and isinstance(batch, Mapping):
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        if (mask is not None and not mask.all()) or (labels is not None and (labels < 0).any()):
            return "the sources and the targets of a batch of an encoder-decoder are filled up to two lengths"
    return ""


@contextmanager
def _seen(layers: Mapping[str, Sequence[nn.Module]]) -> Iterator[list[tuple[str, Tensor]]]:
    """A list that gets the inputs of layers as they run."""
    found: list[tuple[str, Tensor]] = []

    def hook_of(path: str) -> Any:
        return lambda _, args, named: found.append((path, (args[0] if args else named["input"]).detach()))

    hooks = [
        layer.register_forward_pre_hook(hook_of(path), with_kwargs=True)
        for path, sharing in layers.items()
        for layer in sharing
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def unpadded(inputs: Tensor, batch: Batch) -> Tensor:
    """The inputs as rows, without those of padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    rows = inputs.reshape(-1, inputs.shape[-1])
    # OPT's MLP gets the tokens of all rows one after another
    if isinstance(mask, Tensor) and (inputs.shape[:-1] == mask.shape or inputs.shape[:-1] == (mask.numel(),)):
        return rows[mask.to(rows.device, torch.bool).flatten()]
    return rows
