"""What an experiment is: its suite, the budget that all methods share, the strengths of methods and mergers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..merge import Merger
from ..types import Precision
from .methods import MethodConfig


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters instead of all weights: ``W_0 + s B A`` on linear layers of blocks."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # layers, none: all
    simulate: Literal["merged", "factors"] = "merged"  # SMAT at the merged weight, or at A and B themselves


@dataclass(frozen=True)
class Training:
    """How an expert is trained, whatever the method."""

    steps: int | None  # None: by epochs
    lr: float
    optimizer: Literal["adam", "adamw", "muon"] = "adam"  # muon: AdamW beside the matrices of blocks
    muon_lr: float | None = None  # of the matrices
    schedule: Literal["constant", "cosine"] = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    accumulate: int = 1  # micro-batches that the batch of a step is split into
    precision: Precision | None = None  # of training; None: the dtype of the suite
    lora: Adapters | None = None  # None: all weights
    independent_draws: bool = False  # with several processes: each draws for itself
    epochs: Mapping[str, int] = field(default_factory=dict)  # by task, where there are no steps


@dataclass(frozen=True)
class Preset:
    """One experiment: a suite, the budget that all methods share, and the strengths of methods and mergers."""

    suite: str
    family: Literal["language", "vision"]  # decides the coefficients of the sparsity calibration
    seed: int
    training: Training
    lr: Mapping[str, float]  # by method, chosen on dev
    lr_grid: tuple[float, ...]  # what it was chosen from
    methods: Mapping[str, MethodConfig]
    mergers: Mapping[str, Merger]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the suite
