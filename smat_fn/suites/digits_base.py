"""The base of suite ``digits``: the tiny ViT, pretrained on the training images under transforms that no task uses."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import optim, random
from ..checkpoint import fingerprint
from ..data.batching import batch_indices
from ..data.cache import cached, versions
from ..mat import finetune
from ..models import FullLoss, features, parameters, tiny_vit
from ..models.vit import WIDTH
from ..progress import bar
from ..types import Batch, PerStep

CLASSES = 10
REVISION = 1  # part of the cache's key: raise it when the code below gives another base
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "upright": lambda x: x,
    "rot180": lambda x: torch.rot90(x, 2, (-2, -1)),
    "transpose": lambda x: x.transpose(-2, -1),
    "edge": lambda x: x - F.pad(x[..., :-1], (1, 0)),
    "roll": lambda x: x.roll((4, 4), (-2, -1)),
}


class Examples(NamedTuple):
    """Images and their digits."""

    images: Tensor  # float32 (N, 8, 8), ink in [0, 1]
    labels: Tensor  # int64 (N,)


def embed(module: nn.Module, images: Tensor) -> Tensor:
    """Features of images: ink (B, 8, 8) brought to about zero mean and unit variance, then the class token (B, 128)."""
    return features(module, ((images - 0.3) / 0.37)[:, None])


def base(train: Examples, seed: int, *, progress: bool | None = None, **settings: Any) -> dict[str, Tensor]:
    """`pretrain` through the cache, by seed, settings, training examples and versions of the libraries."""
    facts = {"seed": seed, "revision": REVISION, "train": fingerprint(train._asdict()), **settings}
    config = facts | versions("torch", "transformers")
    return cached("digits-base", config, lambda: pretrain(train, seed, progress=progress, **settings))


def pretrain(
    train: Examples,
    seed: int,
    *,
    steps: int,
    batch: int,
    lr: float,
    warmup: int,
    decay: float,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    """Parameters of the ViT after AdamW on the digits' labels; the linear head is thrown away.

    Every batch is distorted by `affine` and then seen under one of `VIEWS`, both drawn from the seed.

    Args: batch: images a step; lr: peak of `_schedule`; decay: of all weights, decoupled.
    Returns: the leaves of `tiny_vit`, float32.
    """
    root = random.key(seed)
    body = tiny_vit(random.fold_in(root, "init"))
    module = nn.ModuleDict({"body": body, "head": nn.utils.skip_init(nn.Linear, WIDTH, CLASSES)})
    bound = WIDTH**-0.5  # as torch initialises a linear layer
    params = parameters(module)
    for name in ("head.weight", "head.bias"):
        key = random.fold_in(root, name)
        params[name] = random.uniform(key, params[name].shape, minval=-bound, maxval=bound)
    optimizer = optim.adamw(_schedule(lr, steps, min(warmup, steps)), weight_decay=decay, fused=True)
    method = finetune.build(FullLoss(module, _label_loss), optimizer, params, donate=True)
    state = method.init(params)
    run = random.fold_in(root, "pretrain")
    with bar(steps, desc="pretraining the digits base", shown=progress) as shown:
        for step in range(steps):
            chosen = batch_indices(run, len(train.labels), batch, step)
            view_key, affine_key = random.split(random.fold_in(run, step))
            view = list(VIEWS.values())[int(random.uniform(view_key) * len(VIEWS))]
            images = view(affine(affine_key, train.images[chosen]))
            state, _ = method.update(run, state, (images, train.labels[chosen]))
            shown.update()
    return {name.removeprefix("body."): p for name, p in state.params.items() if name.startswith("body.")}


def affine(
    key: Tensor, images: Tensor, *, rotate: float = 15, zoom: float = 0.15, shift: float = 0.1, shear: float = 0.15
) -> Tensor:
    """Every image (N, 8, 8) under a random affine map of its own, bilinear, zero outside.

    ``[[c, k - s, x], [s, c, y]]`` on coordinates in [-1, 1], (c, s) = z (cos a, sin a); a, z - 1, k, x and y uniform
    within +- rotate (degrees), zoom, shear, shift and shift.
    """
    angle, scale, skew, right, down = random.uniform(key, (5, len(images)), minval=-1.0)
    angle, scale = angle * math.radians(rotate), 1 + zoom * scale
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = [torch.stack((cos, shear * skew - sin, shift * right), -1), torch.stack((sin, cos, shift * down), -1)]
    grid = F.affine_grid(torch.stack(rows, 1), [len(images), 1, *images.shape[1:]], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def _schedule(lr: float, steps: int, warmup: int) -> PerStep:
    """A cosine from step 0 on, whose first steps are replaced by a linear warm-up: all stored results start from it."""
    decay = optim.cosine(lr, steps)
    return lambda step: lr * (step + 1) / warmup if step < warmup else decay(step)


def _label_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, None]:
    images, labels = batch
    return F.cross_entropy(module["head"](embed(module["body"], images)), labels), None  # type: ignore[index]
