"""Suite ``digits``: 8x8 handwritten digits under four image transforms, one expert each, minutes on one core.

scikit-learn's 1,797 digits, split 1,000 / 250 / 547 by seed. A tiny ViT is pretrained on the spot on the training
images (`digits_base`); a task is to tell the digit under one transform, on 300 of the training images, with a frozen
head of class means. Dev and test images are only ever scored.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import random, tree
from ..data.batching import batch_indices, permutation
from ..errors import check_member
from ..evaluate.metrics import accuracy
from ..models import FullLoss, tiny_vit
from ..types import Batch, Micro
from ..where import block_linear
from .digits_base import CLASSES, Examples, base, embed
from .suite import Suite

SIZES = {"train": 1000, "dev": 250, "test": 547}
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "rot90": lambda x: torch.rot90(x, 1, (-2, -1)),
    "mirror": lambda x: x.flip(-1),
    "negative": lambda x: 1 - x,
    # odd rows inverted
    "stripes": lambda x: (x - (torch.arange(x.shape[-2]) % 2).to(x)[:, None]).abs(),
}


@dataclass(frozen=True)
class DigitsRecipe:
    """Everything but the seed that the suite depends on."""

    images_per_task: int = 300  # training images of one expert
    batch_size: int = 16  # of an expert
    logit_scale: float = 20.0  # of the cosines that are the logits
    pretrain_steps: int = 1500
    pretrain_batch: int = 128
    pretrain_lr: float = 1e-3
    pretrain_warmup: int = 50  # steps, at most pretrain_steps
    pretrain_decay: float = 0.01

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, must be an integer from {low} to {high}"
            for name, low, high in (
                ("images_per_task", 1, SIZES["train"]),
                ("batch_size", 1, SIZES["train"]),
                ("pretrain_steps", 1, 10**9),
                ("pretrain_batch", 1, SIZES["train"]),
                ("pretrain_warmup", 0, 10**9),
            )
            if not isinstance(value := getattr(self, name), int) or not low <= value <= high
        ]
        problems += [
            f"{name} is {value!r}, must be positive and finite"
            for name in ("logit_scale", "pretrain_lr")
            if not 0 < (value := getattr(self, name)) < float("inf")
        ]
        problems += (
            []
            if 0 <= self.pretrain_decay < float("inf")
            else [f"pretrain_decay is {self.pretrain_decay!r}, must be finite and not negative"]
        )
        if problems:
            raise ValueError("digits: " + "; ".join(problems))


def splits(seed: int) -> dict[str, Examples]:
    """Train, dev and test examples of a seed: disjoint, together all 1,797 digits."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = rearrange(torch.tensor(pixels, dtype=torch.float32), "n (h w) -> n h w", h=8) / 16
    labels = torch.tensor(digits, dtype=torch.int64)
    order = permutation(random.fold_in(random.key(seed), "split"), len(labels))
    parts = order.split(list(SIZES.values()))
    return {name: Examples(images[part], labels[part]) for name, part in zip(SIZES, parts, strict=True)}


def class_means(module: nn.Module, examples: Examples) -> Tensor:
    """The head: per class the normalised mean of the normalised features, (10, 128).

    Raises: ValueError where a class has no example.
    """
    absent = sorted(set(range(CLASSES)) - set(examples.labels.tolist()))
    if absent:
        raise ValueError(f"digits {absent} are not among {len(examples.labels)} training images: raise images_per_task")
    with torch.no_grad():
        unit = F.normalize(embed(module, examples.images), dim=1)
    means = torch.stack([unit[examples.labels == digit].mean(0) for digit in range(CLASSES)])
    return F.normalize(means, dim=1)


def load(*, seed: int, progress: bool | None = None, **options: Any) -> Suite:
    """The suite of a seed; the base comes from the cache, or is pretrained first (half a minute on one core).

    Logits are ``logit_scale * cos(feature, class mean)``, the loss their cross entropy, the aux of the loss the logits.
    Batch: (images, labels) under the task's transform. Score: top-1 accuracy.

    Args: progress: bar on stderr, None: where stderr is a terminal; options: fields of `DigitsRecipe`.
    Raises: ValueError for unknown or bad options.
    """
    known = [field.name for field in fields(DigitsRecipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"digits has no options {unknown}: they are {known}")
    recipe = DigitsRecipe(**options)
    data = splits(seed)
    root = random.key(seed)

    settings = {name.removeprefix("pretrain_"): v for name, v in asdict(recipe).items() if name.startswith("pretrain_")}
    theta0 = base(data["train"], seed, progress=progress, **settings)
    module = tiny_vit(random.fold_in(root, "init"))
    module.load_state_dict(theta0)
    train, heads = {}, {}
    for task, transform in TASKS.items():
        own = permutation(random.fold_in(root, f"images:{task}"), SIZES["train"])[: recipe.images_per_task]
        train[task] = Examples(transform(data["train"].images[own]), data["train"].labels[own])
        heads[task] = class_means(module, train[task])
    losses = {task: FullLoss(module, _cosine_loss(head, recipe.logit_scale)) for task, head in heads.items()}
    tasks = tuple(TASKS)

    def loss_fn(task: str) -> FullLoss:
        check_member("digits task", task, tasks)
        return losses[task]

    def batch(task: str, key: Tensor, step: int) -> Batch:
        check_member("digits task", task, tasks)
        chosen = batch_indices(key, recipe.images_per_task, recipe.batch_size, step)
        return train[task].images[chosen], train[task].labels[chosen]

    def batch_rows(task: str, key: Tensor, step: int) -> list[int]:
        return batch_indices(key, recipe.images_per_task, recipe.batch_size, step).tolist()

    def dev_batches(task: str) -> list[Micro]:
        check_member("digits task", task, tasks)
        images, labels = data["dev"]
        return [Micro((TASKS[task](images), labels), len(labels))]

    def predictions(params: dict[str, Tensor], task: str, split: str) -> tuple[Tensor, Tensor]:
        check_member("digits task", task, tasks)
        check_member("split", split, ("dev", "test"))
        tree.check_same(theta0, "the base", params=params)
        images, labels = data[split]
        with torch.no_grad():
            _, logits = losses[task](params, (TASKS[task](images), labels))
        return logits.argmax(1), labels

    def score(params: dict[str, Tensor], task: str, split: str) -> float:
        return accuracy(*predictions(params, task, split))

    def score_tensor(params: dict[str, Tensor], task: str, split: str) -> Tensor:
        predicted, labels = predictions(params, task, split)
        return 100 * (predicted == labels).sum().double() / len(labels)

    return Suite(
        "digits",
        tasks,
        theta0,
        block_linear(module),
        loss_fn,
        batch,
        score,
        {"name": "digits", "seed": seed, **asdict(recipe)},
        seed,
        score_tensor=score_tensor,
        batch_rows=batch_rows,
        dev_batches=dev_batches,
    )


def _cosine_loss(head: Tensor, scale: float) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        unit = F.normalize(embed(module, images), dim=1)
        logits = scale * (unit @ head.to(unit).T)
        return F.cross_entropy(logits, labels.to(logits.device)), logits.detach()

    return loss
