"""Optimizers as pure ``init`` / ``update`` pairs over parameter trees, with torch's own arithmetic."""

from .adam import AdamState, adam, adamw
from .averaging import AveragedState, averaged, averaging, ema, swa
from .chain import chain, clip, clip_by_global_norm
from .momentum import momentum_of
from .muon import MuonState, muon
from .schedules import constant, cosine

__all__ = [
    "AdamState",
    "AveragedState",
    "MuonState",
    "adam",
    "adamw",
    "averaged",
    "averaging",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "ema",
    "momentum_of",
    "muon",
    "swa",
]
