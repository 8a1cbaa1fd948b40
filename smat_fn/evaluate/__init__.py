"""Evaluation: decoding, metrics, scores and results."""

from .metrics import accuracy
from .records import Records
from .results import Result, read_results, write_results
from .scoring import Scorer, score_bar, score_model

__all__ = [
    "Records", "Result", "Scorer", "accuracy", "read_results", "score_bar", "score_model",
    "write_results",
]  # fmt: skip
