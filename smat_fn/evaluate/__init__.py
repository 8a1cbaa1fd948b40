"""From parameters to numbers, and from numbers to tables and plots."""

from .metrics import accuracy
from .records import Records
from .results import Result, append_results, read_results, write_results
from .scoring import Scorer, score_bar, score_models
from .tables import main_table, markdown

__all__ = [
    "Records",
    "Result",
    "Scorer",
    "accuracy",
    "append_results",
    "main_table",
    "markdown",
    "read_results",
    "score_bar",
    "score_models",
    "write_results",
]
