"""Training methods as frozen dataclasses. A field that is ``None`` takes the preset's value."""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ..types import Noise, Offload


@dataclass(frozen=True)
class Finetune:
    """FT: plain fine-tuning."""

    name: ClassVar[str] = "ft"
    module: ClassVar[str] = "finetune"


@dataclass(frozen=True)
class Smat:
    """SMAT: the loss at simulated merged states every t-th step (Scale, Mask, Perturb)."""

    name: ClassVar[str] = "smat"
    module: ClassVar[str] = "smat"

    alpha_min: float | None = None
    """Scale: alpha is uniform on [alpha_min, 1]; 1 switches Scale off."""
    drop_prob: float | None = None
    """Mask: probability of removing a coordinate of the masked set; 0 switches Mask off."""
    sigma: float | None = None
    """Perturb: RMS of the noise, in units of the weights; 0 switches Perturb off."""
    period: int | None = None
    """Every period-th step is simulated; 1: every step."""
    noise: Noise | None = None
    """Distribution of the noise."""
    lam: float | None = None
    """Mixed objective instead of the period: weight of the simulated loss in every step."""
    offload: Offload | None = None
    """Memory for time, equal results; host: pinned base, one buffer; device, stream: rebuilt block by block."""


@dataclass(frozen=True)
class Asam:
    """ASAM: the gradient at the worst nearby point, two passes a step."""

    name: ClassVar[str] = "asam"
    module: ClassVar[str] = "asam"

    rho: float | None = None
    """Radius of the climb."""
    adaptive: bool | None = None
    """Scale the climb by the weights' magnitudes; False is plain SAM."""


@dataclass(frozen=True)
class Mergopt:
    """MergOPT: the gradient at a randomly offset point in every step."""

    name: ClassVar[str] = "mergopt"
    module: ClassVar[str] = "mergopt"

    b: float | None = None
    """Scale of the Laplace noise, in units of the weights."""
    k_max: int | None = None
    """Number of experts that will be merged."""


@dataclass(frozen=True)
class Orthoreg:
    """OrthoReg: a penalty that keeps the columns of every update matrix orthonormal."""

    name: ClassVar[str] = "orthoreg"
    module: ClassVar[str] = "orthoreg"

    lambda_reg: float | None = None
    """Weight of the penalty."""
    block_only: bool | None = None
    """Only the linear weights of blocks, instead of every matrix."""


MethodConfig: TypeAlias = Finetune | Smat | Asam | Mergopt | Orthoreg
METHODS: tuple[type[MethodConfig], ...] = (Finetune, Smat, Asam, Mergopt, Orthoreg)
