"""Gradients of loss functions: `value_and_grad` with two engines, losses of modules, float32 master weights."""

from .engines import detached, loss_and_aux, value_and_grad
from .master_weights import MasterWeights, with_master_weights
from .modules import ModuleLoss, apply_fn, reparametrised

__all__ = [
    "MasterWeights",
    "ModuleLoss",
    "apply_fn",
    "detached",
    "loss_and_aux",
    "reparametrised",
    "value_and_grad",
    "with_master_weights",
]
