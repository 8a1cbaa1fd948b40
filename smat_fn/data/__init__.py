"""Rows, splits, tokens and pixels, and batches of them by random access."""

from .batching import batch_indices, permutation

__all__ = ["batch_indices", "permutation"]
