"""Frozen heads of classification tasks: of a CLIP from texts, of other encoders from a few training rows."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import pack
from torch import Tensor

from .. import errors, random
from ..checkpoint import fingerprint
from ..data import pixels
from ..data.batching import permutation
from ..data.cache import cached, versions
from ..data.images import ImageRows
from ..models.clip import Clip
from ..models.image_classifier import ImageClassifier
from .templates import prompts

_C = 10.0  # inverse strength of the penalty, of images
_FEW, _FEWER, _MANY = 16, 3, 20  # rows a class for a head; of more than 20 classes
_TOGETHER = 64  # images in one pass


def head_rows(labels: Sequence[int], classes: int, key: Tensor, per_class: int | None) -> list[int]:
    """Places of the rows that a head is made of: of every class the first in a random order of the key."""
    number = (_FEWER if classes > _MANY else _FEW) if per_class is None else per_class
    found: list[list[int]] = [[] for _ in range(classes)]
    for place in permutation(key, len(labels)).tolist():
        found[labels[place]].append(place)
    return [place for own in found for place in own[:number]]


def fit_head(features: Tensor, labels: Tensor, *, c: float, way: str = "choose a smaller head_c") -> dict[str, Tensor]:
    """Logistic regression ``argmin |W|^2 / (2 c) + sum_i CE(W f_i + b, y_i)``: weight (C, D), bias (C,), float32.

    Of two classes the difference of the rows of W is penalised.

    Args: way: the way out that the error names.
    Raises: ValueError where no minimum is found.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            fit = LogisticRegression(C=c, max_iter=10_000).fit(features.double().numpy(), labels.numpy())
        except ConvergenceWarning as warning:
            raise ValueError(f"the fit of a head does not converge with c = {c:g} ({warning}): {way}") from warning
    weight, bias = fit.coef_, fit.intercept_
    if len(weight) == 1:  # of two classes the difference of their logits alone
        weight, bias = (np.concatenate((-x / 2, x / 2)) for x in (weight, bias))
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in (("weight", weight), ("bias", bias))}


def text_heads(
    templates: Mapping[str, Sequence[str]], names: Mapping[str, tuple[str, ...]], model: Clip, device: torch.device
) -> dict[str, Tensor]:
    """The head of every task from the prompts of its classes, float32 (C, D), through the cache.

    Raises: ValueError that lists prompts that are too long, and classes whose prompts are the same.
    """
    text = fingerprint(model.text)
    heads, problems = dict[str, Tensor](), list[str]()
    for task, own in names.items():
        with errors.collected(problems, task):
            tokens = model.tokens(prompts(templates[task], own))
            problems += _alike(task, own, tokens["input_ids"])
            config = {
                "text": text,
                "config": str(sorted(model.config.items())),
                "tokens": fingerprint(tokens),
                "classes": len(own),
                "device": device.type,
                "versions": versions("torch", "transformers"),
            }
            heads[task] = cached("clip-head", config, partial(_of_texts, model, tokens, len(own)))["head"]
    errors.raise_problems(problems)
    return heads


def _alike(task: str, names: Sequence[str], tokens: Tensor) -> list[str]:
    """An error for two classes with one row of the head, the second of which no image would ever get."""
    places: dict[bytes, int] = {}
    for place, ids in enumerate(tokens.reshape(len(names), -1).numpy()):
        if (first := places.setdefault(ids.tobytes(), place)) != place:
            both = f"{names[first]!r} and {names[place]!r}"
            return [
                f"{task}: the prompts of classes {first} and {place}, {both}, have the same tokens: name them apart"
            ]
    return []


def image_heads(
    rows: Mapping[str, ImageRows], names: Mapping[str, tuple[str, ...]], model: ImageClassifier, key: Tensor, kind: str
) -> dict[str, Tensor]:
    """The head of every task from a few of its training rows (`head_rows`), W and b float32 (C, D + 1), cached.

    Args: key: int64 (2,), which rows; kind: of device.
    Raises: ValueError that lists classes without training rows.
    """
    weights = fingerprint({**dict(model.module.named_parameters()), **dict(model.module.named_buffers())})
    heads, problems = {}, []
    for task, own in names.items():
        train = rows[task]
        there = set(train.labels.tolist())
        if absent := [name for place, name in enumerate(own) if place not in there]:
            problems.append(f"{task}: no row of train is of class {', '.join(absent[:10])}, and a head needs one")
            continue
        places = head_rows(train.labels.tolist(), len(own), random.fold_in(key, task), None)
        few = pixels.prepare(train.images, model.processor, places)
        labels = torch.from_numpy(train.labels[places])
        config = {
            "weights": weights,
            "config": str(sorted(model.config.items())),
            "rows": fingerprint({"images": few, "labels": labels}),
            "processor": model.processor.to_json_string(),
            "c": _C,
            "device": kind,
            "versions": versions("torch", "transformers", "scikit-learn"),
        }
        heads[task] = cached("image-head", config, partial(_of_images, model, few, labels))["head"]
    errors.raise_problems(problems)
    return heads


def _of_texts(model: Clip, tokens: Mapping[str, Tensor], classes: int) -> dict[str, Tensor]:
    return {"head": model.head(tokens, classes)}


def _of_images(model: ImageClassifier, few: Tensor, labels: Tensor) -> dict[str, Any]:
    table = pixels.value_table(model.processor)
    features = torch.cat([model.features(pixels.look_up(table, part)).cpu() for part in few.split(_TOGETHER)])
    head = fit_head(features, labels, c=_C, way="give other training rows, or another encoder")
    return {"head": pack((head["weight"], head["bias"]), "c *")[0]}
