"""Classifiers of texts or images of ``transformers`` (BERT, ViT) as a loss and classes of flat parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..grad import ModuleLoss
from ..types import Batch, Params, Where
from ..where import block_linear
from .modules import FullLoss

LABELS = "labels"


class Classifier(NamedTuple):
    """A classifier, ready to train."""

    params: dict[str, Tensor]  # theta_0, head included; the module's own storage: not to be written to
    loss_fn: ModuleLoss  # loss_fn(params, batch) -> (loss, logits)
    predict_fn: Callable[[Params, Batch], Tensor]  # (params, batch) -> classes, int64 (B,)
    where: Where  # the masked set S


def classifier(module: nn.Module) -> Classifier:
    """A model of ``AutoModelForSequenceClassification``, or of any name whose output has ``logits`` (B, C).

    Experts of several tasks can be merged if they have the same head: keep it frozen (``requires_grad_(False)``), or
    train one head for the classes of all tasks. The module is put into eval mode: no dropout.

    Raises: ValueError for a config of fewer than two classes (a regression) or of several labels a row.
    """
    config: Any = module.config
    if config.num_labels < 2 or getattr(config, "problem_type", None) == "multi_label_classification":
        raise ValueError(
            f"{type(module).__name__} has num_labels {config.num_labels} and problem_type {config.problem_type!r}: "
            "the loss here is for one of at least two classes, write your own around smat_fn.models.FullLoss"
        )
    params = {name: p.detach() for name, p in module.eval().named_parameters() if p.requires_grad}
    loss_fn = FullLoss(module, class_loss)

    def predict(params: Params, batch: Batch) -> Tensor:
        loss_fn.check(params)
        with torch.no_grad():
            return loss_fn.within(params, lambda inner: _logits(inner, batch)).argmax(1)

    return Classifier(params, loss_fn, predict, block_linear(module))


def class_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of float32 logits (float64 stays float64) against ``labels``.

    Args: batch: mapping of the module's inputs (``input_ids`` and ``attention_mask``, or ``pixel_values``) and of
        int64 (B,) ``labels``, moved to the module's device.
    Returns: (loss, logits (B, C)).
    """
    logits = _logits(module, batch)
    return F.cross_entropy(logits, batch[LABELS].to(logits.device)), logits.detach()


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    device = next(module.parameters()).device
    logits = module(**{name: value.to(device) for name, value in batch.items() if name != LABELS}).logits
    return logits.to(tree.compute_dtype(logits))
