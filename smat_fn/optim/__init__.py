"""Optimizers as pure ``init`` / ``update`` pairs over parameter trees, with torch's own arithmetic."""

from .adam import AdamState, adam, adamw
from .chain import chain, clip, clip_by_global_norm
from .muon import MuonState, muon
from .partition import PartitionState, partition
from .schedules import constant, cosine, linear

__all__ = [
    "AdamState",
    "MuonState",
    "PartitionState",
    "adam",
    "adamw",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "linear",
    "muon",
    "partition",
]
