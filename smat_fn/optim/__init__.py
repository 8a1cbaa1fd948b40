"""Optimizers as pure ``init`` / ``update`` pairs over parameter trees, with torch's own arithmetic."""

from .adam import AdamState, adam, adamw
from .chain import chain, clip, clip_by_global_norm
from .muon import MuonState, muon
from .schedules import constant, cosine
from .transformations import GradientTransformation, as_transformation, from_transformation

__all__ = [
    "AdamState",
    "GradientTransformation",
    "MuonState",
    "adam",
    "adamw",
    "as_transformation",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "from_transformation",
    "muon",
]
