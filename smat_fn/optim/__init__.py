"""Optimizers as pure ``init`` / ``update`` pairs over parameter trees, with torch's own arithmetic."""

from .adam import AdamState, adam, adamw
from .averaging import AveragedState, averaged, averaging, ema, swa
from .chain import chain, clip, clip_by_global_norm
from .moments import momentum_of, second_moments
from .muon import MuonState, muon
from .partition import PartitionState, partition
from .schedules import constant, cosine, linear
from .transformations import GradientTransformation, as_transformation, from_transformation

__all__ = [
    "AdamState",
    "AveragedState",
    "GradientTransformation",
    "MuonState",
    "PartitionState",
    "adam",
    "adamw",
    "as_transformation",
    "averaged",
    "averaging",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "ema",
    "from_transformation",
    "linear",
    "momentum_of",
    "muon",
    "partition",
    "second_moments",
    "swa",
]
