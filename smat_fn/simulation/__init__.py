"""Simulated merged states: Scale, Mask and Perturb (paper section 4.1), and the losses taken at them (4.2)."""

from .apply import materialise, participation, reweight, simulate
from .draws import NOISES, Draw, draw
from .losses import clean_loss, mixed_loss, simulated_loss
from .probes import Probe, probe

__all__ = [
    "NOISES",
    "Draw",
    "Probe",
    "clean_loss",
    "draw",
    "materialise",
    "mixed_loss",
    "participation",
    "probe",
    "reweight",
    "simulate",
    "simulated_loss",
]
