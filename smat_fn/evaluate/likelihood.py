"""Log probabilities of texts that are given, in forward passes alone: scores of language models without decoding."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.text import Example
from ..grad import ModuleLoss
from ..models.head import IGNORED
from ..models.language import log_probs
from ..types import Batch
from .decoding import evaluating, overflows
from .engine import Decoding, Generate

CHOICES = "choice", "choice_norm"
NAMES = "likelihood", *CHOICES  # metrics that read log probabilities
LOGITS = 2**28  # numbers that the output head gives in one pass at most: 1 GiB in float32


def reader(
    model: ModuleLoss,
    params: Mapping[str, Tensor],
    texts: Sequence[Sequence[Example]],
    choices: Sequence[Sequence[str]] = (),
    *,
    collate: Callable[[list[Example]], Batch],
    batch_size: int,
    norm: bool = False,
) -> Generate:
    """`Generate` that reads given texts with given weights: "SUM COUNT" of `log_likelihoods`, or the likeliest choice.

    SUM and COUNT are those of all texts of a row: its answer, or the windows of a plain text.

    The likeliest choice has the largest sum, of equal ones it is the first.

    Args:
        model: of a language model; params: its flat parameters, on its device.
        texts: of every row its answer, or its choices in their order, with the prompt, as tokens; or the windows of a
            plain text; those with a label count.
        choices: of every row, as texts; none: an answer or a plain text is given.
        collate: makes a batch of texts; batch_size: texts of a batch at most.
        norm: divide the sum of a choice by its number of characters.
    Raises: ValueError when called, as `log_likelihoods`.
    """

    def read(
        prompts: Sequence[str], settings: Decoding, seed: int, *, repeat: int = 0, rows: Sequence[int] | None = None
    ) -> list[str]:
        numbers = range(len(prompts)) if rows is None else rows
        every = [example for row in numbers for example in texts[row]]
        found = iter(log_likelihoods(model, params, every, collate=collate, batch_size=batch_size))
        own = {row: [next(found) for _ in texts[row]] for row in numbers}
        if not choices:
            both = (zip(*own[row], strict=True) for row in numbers)
            return [f"{math.fsum(sums)} {sum(counts)}" for sums, counts in both]
        return [_likeliest(choices[row], [total for total, _ in own[row]], norm=norm) for row in numbers]

    return read


def log_likelihoods(
    model: ModuleLoss,
    params: Mapping[str, Tensor],
    texts: Sequence[Example],
    *,
    collate: Callable[[list[Example]], Batch],
    batch_size: int,
) -> list[tuple[float, int]]:
    """``sum_t log p(token_t | what is before it)`` over the labels of every text, and their number.

    Texts of similar length run together, fewer than ``batch_size`` where their labels have more than `LOGITS` logits.
    Of a causal model the first token has no prediction.

    Raises: ValueError for log probabilities that are NaN.
    """
    found: list[tuple[float, int]] = [(0.0, 0)] * len(texts)

    def run(module: Any) -> None:
        most = LOGITS // module.get_input_embeddings().weight.shape[0]
        for chosen in _batches(texts, batch_size, most):
            values, predicted = log_probs(module, collate([texts[i] for i in chosen]))
            sums, counts = values.double().sum(1).tolist(), predicted.sum(1).tolist()
            if lost := sum(map(math.isnan, sums)):
                what = f"the log probabilities of {lost} of {len(chosen)} texts"
                raise ValueError(overflows(what, next(module.parameters()).dtype))
            for i, total, count in zip(chosen, sums, counts, strict=True):
                found[i] = total, count

    with torch.no_grad(), evaluating(model.module):
        model.within(params, run)
    return found


def _batches(texts: Sequence[Example], size: int, most: int) -> Iterator[list[int]]:
    """The longest texts first, ``size`` together, of one text or of ``most`` labels at most."""
    chosen, labels = list[int](), 0
    for i in sorted(range(len(texts)), key=lambda i: -len(texts[i].input_ids)):
        own = sum(label != IGNORED for label in texts[i].labels)
        if chosen and (len(chosen) == size or labels + own > most):
            yield chosen
            chosen, labels = [], 0
        chosen.append(i)
        labels += own
    if chosen:
        yield chosen


def _likeliest(choices: Sequence[str], sums: Sequence[float], *, norm: bool) -> str:
    scores = [total / len(choice) if norm else total for choice, total in zip(choices, sums, strict=True)]
    return choices[scores.index(max(scores))]
