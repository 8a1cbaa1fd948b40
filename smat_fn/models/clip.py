"""CLIP and SigLIP models of ``transformers`` as losses of the vision tower's parameters, with frozen zero-shot heads.

`image_classifier` has the same fields for models without a text tower, whose heads come from something else than texts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor, nn

from .. import tree
from ..types import Batch, Where
from ..where import block_linear
from .modules import FullLoss, sent, train_only
from .pretrained import checkpoint_blocks, fetch, floating

_TOGETHER = 256  # texts encoded in one pass
_PARTS = "vision_model", "text_model", "logit_scale"
_PROJECTIONS = "visual_projection", "text_projection"


class Clip(NamedTuple):
    """A pretrained model, ready to train: theta_0 of its vision tower, and what makes heads and losses."""

    module: nn.Module  # the vision tower, in eval mode: no dropout
    params: dict[str, Tensor]  # theta_0; the module's own storage: not to be written to
    where: Where  # the masked set S
    processor: Any  # of images
    image_size: int
    tokens: Callable[[list[str]], dict[str, Tensor]]  # texts -> input_ids, attention_mask, int64 (n, T) on the CPU
    head: Callable[[Mapping[str, Tensor], int], Tensor]  # (tokens of the classes' prompts, classes) -> (C, D)
    text: dict[str, Tensor]  # what heads are made of: the frozen text tower, its projection and the logit scale
    loss_fn: Callable[..., FullLoss]  # (head, values, module=module), see `classify`
    pooled: Callable[[nn.Module, Tensor], Tensor]  # (module, pixel values (B, 3, H, W)) -> what a head is made for
    config: dict[str, Any]  # of the pretrained model: features depend on it


# over 60 lines: what a Clip holds is made here, a field a line
def load(
    source: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    train_layers: int | None = None,
    train: Sequence[str] | None = None,
) -> Clip:
    """Load a CLIP or SigLIP model with its tokenizer and image processor.

    Args:
        source: folder or hub repository, as for `causal_lm.load`.
        dtype: dtype of the vision tower (default float32); heads are float32, the projection is at least float32.
        device: device of the model (default "cpu").
        gradient_checkpointing, train_layers, train: as `causal_lm.load`, of the vision tower.

    Returns:
        A `Clip`.

    Raises:
        ValueError: a part cannot be loaded, weights are missing, or the model is neither of these.
    """
    kind, what = floating(dtype), "a CLIP or SigLIP model with tokenizer and image processor"
    rest = "AutoTokenizer", "AutoImageProcessor"
    model, tokenizer, processor = fetch(source, what, "AutoModel", *rest, parts=_PARTS, dtype=torch.float32)
    siglip = model.config.model_type == "siglip"
    if (lacking := [part for part in _PROJECTIONS if not hasattr(model, part)]) and not siglip:
        raise ValueError(
            f"{str(source)!r} is a {type(model).__name__}, it has no {', no '.join(lacking)}: give a CLIP, or a "
            "SigLIP or SigLIP 2 whose images have one fixed size (class SiglipModel)"
        )
    model = model.to(device).eval().requires_grad_(False)
    vision = model.vision_model.to(kind)
    projection = nn.Identity() if siglip else model.visual_projection.to(torch.promote_types(kind, torch.float32))
    vision.requires_grad_(True)
    train_only(vision, layers=train_layers, names=train)
    if gradient_checkpointing:
        checkpoint_blocks(vision)
    frozen = {
        name: p.detach()
        for name, p in model.named_parameters()
        if name.startswith(("text_model.", "text_projection.", "logit_scale"))
    }
    positions = model.config.text_config.max_position_embeddings

    def loss_fn(head: Tensor, values: Callable[[Tensor], Tensor], module: nn.Module = vision) -> FullLoss:
        return FullLoss(module, classify(projection, head, values))

    return Clip(
        vision,
        {name: p.detach() for name, p in vision.named_parameters() if p.requires_grad},
        block_linear(vision),
        processor,
        model.config.vision_config.image_size,
        partial(_tokens, tokenizer, positions, siglip),
        lambda ids, classes: zero_shot_head(model, ids, classes),
        frozen,
        loss_fn,
        pooled,
        model.config.to_dict(),
    )


def _tokens(tokenizer: Any, positions: int, fixed: bool, texts: list[str]) -> dict[str, Tensor]:
    """Token ids of texts, all of them of ``positions`` tokens where that is how the model was trained: SigLIP."""
    rows = tokenizer(texts, verbose=False)["input_ids"]
    if long := [text for text, row in zip(texts, rows, strict=True) if len(row) > positions]:
        raise ValueError(
            f"{len(long)} prompts have more tokens than the {positions} of the text tower, {long[0]!r} the first: "
            "shorten the template or the name of the class"
        )
    options = {"padding": "max_length", "max_length": positions} if fixed else {"padding": True}
    ids = tokenizer(texts, return_tensors="pt", verbose=False, **options)
    mask = torch.ones_like(ids["input_ids"]) if fixed else ids["attention_mask"]  # it reads its last position
    return {"input_ids": ids["input_ids"][:, :positions], "attention_mask": mask[:, :positions]}


def zero_shot_head(model: Any, tokens: Mapping[str, Tensor], classes: int) -> Tensor:
    """``exp(logit_scale) * unit(mean_j unit(f(prompt_cj)))`` of every class c, unit(x) = x / |x|.

    Args: tokens: ``input_ids`` and ``attention_mask`` (C * n, T), the n prompts of a class one after another.
    Returns: float32 (C, D) on the CPU. Source: Radford et al., 2021, section 3.1.
    """
    parts = []
    with torch.no_grad():
        for start in range(0, len(tokens["input_ids"]), _TOGETHER):
            some = {name: ids[start : start + _TOGETHER].to(model.device) for name, ids in tokens.items()}
            parts.append(F.normalize(model.get_text_features(**some).pooler_output, dim=-1))
        means = reduce(torch.cat(parts), "(c prompts) d -> c d", "mean", c=classes)
        return (F.normalize(means, dim=-1) * model.logit_scale.exp()).cpu()


def pooled(module: nn.Module, values: Tensor) -> Tensor:
    """The pooled output of a vision tower for pixel values (B, 3, H, W) on its device: (B, D)."""
    return module(pixel_values=values.to(next(module.parameters()).dtype)).pooler_output


def classify(
    projection: nn.Module, head: Tensor, values: Callable[[Tensor], Tensor]
) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    """The loss of a vision tower: cross entropy of ``unit(P v(x)) @ head.T``; its aux are the logits (B, C).

    Args: projection: P, frozen, at least float32, the dtype of the logits; of SigLIP the identity; head: (C, D);
        values: makes the pixel values of a batch, on the module's device.
    Returns: ``loss(module, (pixels, labels))``, both moved to the module's device.
    """

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        pixels, labels = batch
        found = pooled(module, values(sent(pixels, next(module.parameters()).device)))
        unit = F.normalize(projection(found.to(tree.compute_dtype(found))), dim=-1)
        logits = unit @ head.to(unit).T
        return F.cross_entropy(logits, sent(labels, logits.device)), logits

    return loss
