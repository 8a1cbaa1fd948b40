"""Texts of many lengths through an encoder, and their features.

States of frozen layers are packed: several texts stand one after another in a row, each attends to itself alone, and
rows are about equally long, so that little is filled up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import tree
from .modules import sent

ROOM = 160  # tokens of a row: attention costs its square, and shorter rows differ more in length


class Texts(NamedTuple):
    """A batch of texts, one after another; what a token is depends on `Encoder.states`."""

    tokens: Tensor  # input of the first trained layer, float32 (S, H), or ids, int64 (S,)
    owners: Tensor  # int64 (S,), ascending: whose token it is, 0 to B - 1
    labels: Tensor  # int64 (B,)


def texts(tokens: Sequence[Tensor], labels: Tensor) -> Texts:
    """A batch from the tokens of every text."""
    owners = torch.arange(len(tokens)).repeat_interleave(torch.tensor([len(own) for own in tokens]))
    return Texts(torch.cat(list(tokens)), owners, labels)


def pooled(module: nn.Module, batch: Texts, *, normalize: bool, pad: int) -> Tensor:
    """Features of a batch: the mean over every text's last hidden states, of length 1 if asked; (B, D).

    Args: module: a model of ``transformers`` that takes attention_mask and inputs_embeds or input_ids; pad: id that
        fills up short texts.
    """
    like = next(p for p in module.parameters())
    lengths = torch.bincount(batch.owners, minlength=len(batch.labels))
    parts = batch.tokens.split(lengths.tolist())
    options: dict[str, Tensor]
    if batch.tokens.is_floating_point():
        rows = pack(lengths.tolist(), ROOM)
        given = _filled([torch.cat([parts[i] for i in row]) for row in rows], 0)
        owners = _filled([torch.tensor(row).repeat_interleave(lengths[row]) for row in rows], -1)
        alone = rearrange(owners, "row t -> row 1 t 1") == rearrange(owners, "row t -> row 1 1 t")
        options = {"inputs_embeds": sent(given, like.device).to(like), "attention_mask": sent(alone, like.device)}
    else:
        owners = _filled([torch.full_like(own, i) for i, own in enumerate(parts)], -1)
        options = {"input_ids": _filled(parts, pad), "attention_mask": (owners >= 0).long()}
        options = {name: sent(value, like.device) for name, value in options.items()}
    hidden = rearrange(module(**options).last_hidden_state, "row t d -> (row t) d")
    hidden = hidden.to(tree.compute_dtype(hidden))
    share = (rearrange(owners, "row t -> (row t)") == torch.arange(len(lengths))[:, None]) / lengths[:, None]
    mean = sent(share, hidden.device).to(hidden) @ hidden
    return F.normalize(mean, dim=-1) if normalize else mean


def pack(lengths: list[int], room: int) -> list[list[int]]:
    """Places in ``ceil(sum / room)`` rows of about equal sums of lengths: the longest first, to the emptiest row."""
    rows: list[list[int]] = [[] for _ in range(min(len(lengths), -(-sum(lengths) // room)))]
    filled = [0] * len(rows)
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = filled.index(min(filled))
        rows[row].append(place)
        filled[row] += lengths[place]
    return rows


def _filled(parts: Sequence[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=value)
