"""Models as functions of flat parameters: losses and predictions over modules whose weights are arguments."""

from .modules import FullLoss, parameters
from .vit import features, tiny_vit

__all__ = ["FullLoss", "features", "parameters", "tiny_vit"]
