"""Suites of tasks: a base model, one loss and one score per task, batches by random access."""

from .suite import SUITES, Suite, load_suite, task_names

__all__ = ["SUITES", "Suite", "load_suite", "task_names"]
