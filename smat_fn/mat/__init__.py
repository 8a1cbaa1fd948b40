"""Training methods, one file each: ``State``, ``Info``, ``build(loss_fn, optimizer, base, ...) -> Method``."""

from . import asam, finetune, mergopt, orthoreg, smat

__all__ = ["asam", "finetune", "mergopt", "orthoreg", "smat"]
