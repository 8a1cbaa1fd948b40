"""Training methods, one file each: ``State``, ``Info``, ``build(loss_fn, optimizer, base, ...) -> Method``."""

from . import finetune, smat

__all__ = ["finetune", "smat"]
