"""Benchmarks as values: a base, one loss and one score per task, batches by random access."""

from .batching import batch_indices, permutation
from .suite import SUITES, Suite, load_suite, task_names

__all__ = ["SUITES", "Suite", "batch_indices", "load_suite", "permutation", "task_names"]
