"""Training methods, one file each: ``build(loss_fn, optimizer, base, ...) -> Method``, its State and Info, its options.

The options of a method are a frozen dataclass whose fields are the hyperparameters of ``build``; a field that is None
takes the preset's value. Its ``name`` is that of train.py's subcommand.
"""

import sys
from collections.abc import Callable
from typing import TypeAlias

from ..types import Method
from . import asam, finetune, l2sp, mergopt, mixout, msam, orthoreg, smat, talos
from .asam import Asam
from .finetune import Finetune
from .l2sp import L2sp
from .mergopt import Mergopt
from .mixout import Mixout
from .msam import Msam
from .orthoreg import Orthoreg
from .smat import Smat
from .talos import Talos

MethodConfig: TypeAlias = Finetune | Smat | Asam | Mergopt | Orthoreg | Msam | L2sp | Mixout | Talos
METHODS: tuple[type[MethodConfig], ...] = Finetune, Smat, Asam, Mergopt, Orthoreg  # the paper's
# no preset holds values of theirs: those of ``build`` count
MORE_METHODS: tuple[type[MethodConfig], ...] = Msam, L2sp, Mixout, Talos

__all__ = ["asam", "finetune", "l2sp", "mergopt", "mixout", "msam", "orthoreg", "smat", "talos"]


def build_of(method: MethodConfig) -> Callable[..., Method]:
    """The ``build`` that these options are of: the one in their file."""
    build: Callable[..., Method] = sys.modules[type(method).__module__].build
    return build
