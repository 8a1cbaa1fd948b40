"""What a result was measured with."""

from smat_fn.machine import describe

__all__ = ["describe"]
