"""Image models of ``transformers`` other than CLIP (ViT, Swin, DINOv2, ConvNeXt) as losses of all but their head.

The head of a checkpoint is left out: experts that are to be merged share all leaves, so that a task's classes are
separated by a frozen head of its own on the features that the checkpoint's own head gets.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..types import Batch, Where
from ..where import block_linear
from .modules import FullLoss, sent, train_only
from .pretrained import checkpoint_blocks, config_of, fetch, floating

_HEAD = "classifier"


class ImageClassifier(NamedTuple):
    """A pretrained model without its head, ready to train."""

    module: nn.Module  # in eval mode: no dropout; its ``logits`` are the features
    params: dict[str, Tensor]  # theta_0; the module's own storage: not to be written to
    where: Where  # the masked set S
    processor: Any  # of images
    features: Callable[[Tensor], Tensor]  # of pixel values (B, 3, H, W) by theta_0: (B, D), see `unit_features`
    loss_fn: Callable[..., FullLoss]  # (head, values, module=module), see `classify`
    pooled: Callable[[nn.Module, Tensor], Tensor]  # (module, pixel values (B, 3, H, W)) -> what a head is made for
    config: dict[str, Any]  # of the pretrained model: features depend on it


def load(
    source: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    train_layers: int | None = None,
    train: Sequence[str] | None = None,
) -> ImageClassifier:
    """Load a model of ``AutoModelForImageClassification`` with its image processor; its own head may be missing.

    A family without such a class (DINOv3) is loaded by ``AutoModel``, and its features are those it pools.

    Args:
        source: as `clip.load`, like all arguments.

    Returns:
        An `ImageClassifier`.

    Raises:
        ValueError: a part cannot be loaded, weights are missing, or the head is not named ``classifier``; of
            ``features``, for a model that pools nothing or takes images of another size than its processor makes.
    """
    what, kinds = "a CLIP or an image classifier with its image processor", "AutoModelForImageClassification"
    own: dict[str, Any] = {"parts": (_HEAD,), "optional": (f"{_HEAD}.",)}
    if backbone := _is_backbone(source):
        kinds, own = "AutoModel", {}
    module, processor = fetch(source, what, kinds, "AutoImageProcessor", dtype=floating(dtype), **own)
    if not backbone:
        setattr(module, _HEAD, nn.Identity())
    module = module.to(device).eval()
    train_only(module, layers=train_layers, names=train)
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if gradient_checkpointing:
        checkpoint_blocks(module)

    def features(values: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                return unit_features(module, values)
        except ValueError as error:  # most transformers with learned positions take one size
            size = " x ".join(map(str, values.shape[2:]))
            raise ValueError(
                f"{str(source)!r} gives no features of the {size} images that its image processor makes ({error}): "
                "give an image classifier with its own preprocessor_config.json"
            ) from error

    def loss_fn(head: Tensor, values: Callable[[Tensor], Tensor], module: nn.Module = module) -> FullLoss:
        return FullLoss(module, classify(head, values))

    where, config = block_linear(module), module.config.to_dict()
    return ImageClassifier(module, params, where, processor, features, loss_fn, unit_features, config)


def is_clip(source: str | Path) -> bool:
    """Whether a model's config has image and text parts, and its weights too; True if it cannot be loaded."""
    config = config_of(source)
    if config is None:
        return True
    # a classifier made of the image tower alone has the config of both
    alone = any(name.endswith("ForImageClassification") for name in config.architectures or ())
    return hasattr(config, "text_config") and hasattr(config, "vision_config") and not alone


def _is_backbone(source: str | Path) -> bool:
    """Whether a model is of a family that ``transformers`` knows but has no class of classifiers for."""
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    config = config_of(source)
    return config is not None and type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING


def unit_features(module: nn.Module, values: Tensor) -> Tensor:
    """``v(x) / |v(x)|``, v(x) what the head of the checkpoint gets: (B, 3, H, W) to (B, D), float32 or float64.

    Raises: ValueError for a model that pools nothing, such as one that is pretrained on masked images.
    """
    weight = next(module.parameters())
    out = module(pixel_values=values.to(weight.device, weight.dtype))
    found = out.logits if hasattr(out, "logits") else getattr(out, "pooler_output", None)
    if found is None:
        raise ValueError(f"a {type(module).__name__} has neither logits nor a pooled output")
    return F.normalize(found.flatten(1).to(tree.compute_dtype(weight)), dim=-1)


def classify(head: Tensor, values: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    """Cross entropy of ``W v(x) / |v(x)| + b``; its aux are the logits (B, C).

    Args: head: (C, D + 1), W and in the last column b; values: makes the pixel values of a batch, on the module's
        device.
    Returns: ``loss(module, (pixels, labels))``, both moved to the module's device.
    """

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        unit = unit_features(module, values(sent(pixels, next(module.parameters()).device)))
        logits = F.linear(unit, head[:, :-1].to(unit), head[:, -1].to(unit))
        return F.cross_entropy(logits, sent(labels, logits.device)), logits

    return loss
