"""Metrics on the 0 to 100 scale."""

from torch import Tensor


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """``100 * (number of equal entries) / N``.

    Args: predictions, labels: integers of one shape (N,).
    Raises: ValueError for unequal shapes and for N = 0.
    """
    if predictions.shape != labels.shape or not labels.numel():
        raise ValueError(
            f"accuracy of predictions {tuple(predictions.shape)} against labels {tuple(labels.shape)}: "
            "give one prediction per label, at least one"
        )
    return 100 * int((predictions == labels.to(predictions.device)).sum()) / labels.numel()
