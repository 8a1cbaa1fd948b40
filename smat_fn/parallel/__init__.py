"""Many devices: replicas (torchrun, gloo or NCCL) and FSDP2 shards.

All processes draw the same numbers by construction: a draw depends on key, leaf path and coordinate alone. A model
split over devices by ``device_map`` needs nothing: every leaf is simulated where it lies, and there is one norm.
"""

from .replicas import Share, independent_smat, replicated, share
from .sharded import SHARDED, Sharded, frozen_shards
from .shards import base_shards, reweight_grads, simulated_shards, starts_of
from .world import ALONE, World, joined

__all__ = [
    "ALONE",
    "SHARDED",
    "Sharded",
    "Share",
    "World",
    "base_shards",
    "frozen_shards",
    "independent_smat",
    "joined",
    "replicated",
    "reweight_grads",
    "share",
    "simulated_shards",
    "starts_of",
]
