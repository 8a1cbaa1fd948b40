"""Suite ``digits``: 8x8 handwritten digits under four image transforms, one expert each, minutes on one core.

scikit-learn's 1,797 digits, split 1,000 / 250 / 547 by seed. A tiny ViT is pretrained on the spot on the training
images (`digits_base`); a task is to tell the digit under one transform, on 300 of the training images, with a frozen
head of class means. Dev and test images are only ever scored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import random
from ..data.batching import permutation
from ..data.cache import cached, versions
from ..errors import count_problem
from ..evaluate.metrics import accuracy
from ..mat.step import check_not_negative
from ..models import FullLoss, tiny_vit
from ..models.modules import train_only
from ..types import Batch, Micro, Params
from ..where import block_linear
from .digits_base import CLASSES, Examples, base, embed
from .sources import patterns_of
from .suite import EncoderSuite, SuiteOptions

SIZES = {"train": 1000, "dev": 250, "test": 547}
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "rot90": lambda x: torch.rot90(x, 1, (-2, -1)),
    "mirror": lambda x: x.flip(-1),
    "negative": lambda x: 1 - x,
    # odd rows inverted
    "stripes": lambda x: (x - (torch.arange(x.shape[-2]) % 2).to(x)[:, None]).abs(),
}


@dataclass(frozen=True)
class DigitsOptions(SuiteOptions):
    """Options of suite ``digits``."""

    LOCAL = ("progress",)
    UNSAID = (*SuiteOptions.UNSAID, "train")
    LOWEST: ClassVar = {"images_per_task": 1, "batch_size": 1, "pretrain_steps": 1, "pretrain_batch": 1}
    POSITIVE = ("logit_scale", "pretrain_lr")

    images_per_task: int = 300
    """Training images of one expert."""
    batch_size: int = 16
    """Images in a batch of an expert."""
    logit_scale: float = 20.0
    """Factor from cosine similarities to logits."""
    pretrain_steps: int = 1500
    """Steps of pretraining the base."""
    pretrain_batch: int = 128
    """Images in a batch of pretraining."""
    pretrain_lr: float = 1e-3
    """Peak learning rate of pretraining."""
    pretrain_warmup: int = 50
    """Warm-up steps of pretraining, at most pretrain_steps."""
    pretrain_decay: float = 0.01
    """Weight decay of pretraining."""
    train: Any = None
    """Parameters that are trained: attention, or patterns of names, separated by commas (default: all)."""
    linearised: bool = False
    """Train and score the model's first-order expansion around the base (tangent-space fine-tuning)."""
    progress: bool | None = None
    """Show a progress bar on stderr while pretraining (default: where stderr is a terminal)."""

    def problems(self) -> list[str]:
        most, own = SIZES["train"], vars(self)
        found = count_problem("pretrain_warmup", self.pretrain_warmup, 0)
        found += [
            f"{name} is {own[name]}, must be at most {most}, the number of training images"
            for name in ("images_per_task", "batch_size", "pretrain_batch")
            if isinstance(own[name], int) and own[name] > most
        ]
        return found + check_not_negative(pretrain_decay=self.pretrain_decay)


def splits(seed: int) -> dict[str, Examples]:
    """Train, dev and test examples of a seed: disjoint, together all 1,797 digits."""
    # scikit-learn takes more than a second to import
    images, labels = cached("digits", versions("scikit-learn"), _stored).values()
    order = permutation(random.fold_in(random.key(seed), "split"), len(labels))
    parts = order.split(list(SIZES.values()))
    return {name: Examples(images[part], labels[part]) for name, part in zip(SIZES, parts, strict=True)}


def _stored() -> dict[str, Tensor]:
    """All digits in scikit-learn's order."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = rearrange(torch.tensor(pixels, dtype=torch.float32), "n (h w) -> n h w", h=8) / 16
    return {"images": images, "labels": torch.tensor(digits, dtype=torch.int64)}


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


class Digits(EncoderSuite):
    """The suite of a seed; the base comes from the cache, or is pretrained first (half a minute on one core).

    Logits are ``logit_scale * cos(feature, class mean)``, the loss their cross entropy, the aux of the loss the logits.
    Batch: (images, labels) under the task's transform. Score: top-1 accuracy.
    """

    Options = DigitsOptions
    name = "digits"
    epoch_steps = None  # type: ignore[assignment]  # its budgets are in steps

    def __init__(self, *, seed: int, **options: Any) -> None:
        self.options = own = DigitsOptions(**{**options, "train": patterns_of(options.get("train"))})
        self.device, self.batch_size = torch.device("cpu"), own.batch_size
        self._data, root = splits(seed), random.key(seed)
        settings = {name.removeprefix("pretrain_"): v for name, v in vars(own).items() if name.startswith("pretrain_")}
        theta0 = base(self._data["train"], seed, progress=own.progress, **settings)
        module = tiny_vit(random.fold_in(root, "init"))
        module.load_state_dict(theta0)
        train_only(module, names=own.train)
        theta0 = {name: leaf for name, leaf in theta0.items() if module.get_parameter(name).requires_grad}
        self._train, self.losses = {}, {}
        images, labels = self._data["train"]
        for task, transform in TASKS.items():
            rows = permutation(random.fold_in(root, f"images:{task}"), SIZES["train"])[: own.images_per_task]
            self._train[task] = Examples(transform(images[rows]), labels[rows])
            head = class_means(module, self._train[task])
            self.losses[task] = FullLoss(module, _cosine_loss(head, own.logit_scale))
        super().__init__(tasks=tuple(TASKS), base=theta0, where=block_linear(module), seed=seed)

    @classmethod
    def task_names(cls, **options: Any) -> tuple[str, ...]:
        return tuple(TASKS)

    def examples(self, task: str) -> int:
        return self.options.images_per_task

    def batch(self, task: str, key: Tensor, step: int) -> Batch:
        chosen = self.batch_rows(task, key, step)
        return self._train[task].images[chosen], self._train[task].labels[chosen]

    def dev_batches(self, task: str) -> list[Micro]:
        self.check(task)
        images, labels = self._data["dev"]
        return [Micro((TASKS[task](images), labels), len(labels))]

    def score(self, params: Params, task: str, split: str) -> float:
        return accuracy(*self._answers(params, task, split))

    def score_tensor(self, params: Params, task: str, split: str) -> Tensor:
        predicted, labels = self._answers(params, task, split)
        score = 100 * (predicted == labels).sum().double() / len(labels)
        return torch.where((predicted < 0).any(), math.nan, score)

    def _answers(self, params: Params, task: str, split: str) -> tuple[Tensor, Tensor]:
        self.check(task, split)
        images, labels = self._data[split]
        return self.predictions(params, task, [(TASKS[task](images), labels)]), labels


def _cosine_loss(head: Tensor, scale: float) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        unit = F.normalize(embed(module, images), dim=1)
        logits = scale * (unit @ head.to(unit).T)
        return F.cross_entropy(logits, labels.to(logits.device)), logits

    return loss
