"""The top layers of a causal language model on states that its frozen layers gave once."""

from collections.abc import Callable
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..types import Batch
from .head import IGNORED
from .modules import FullLoss, sent
from .pretrained import LanguageModel
from .top import FAILURES, Cut, closeness, cut_of


class TopLanguage(NamedTuple):
    """The top layers of a causal language model, ready to train."""

    loss_fn: FullLoss  # of batches with ``states`` beside what the whole model takes
    states: Callable[[Batch], Tensor]  # a batch -> input of the first trained layer (B, T, D)


def top_language(lm: LanguageModel, example: Batch) -> TopLanguage | str:
    """Start a causal language model of which only top blocks are trained at the first of these.

    Embedding, positions and masks are the model's own, from the true tokens; only the input of the first trained layer
    is replaced. The output head runs where a token is to be predicted, nowhere else.

    Args:
        lm: the whole model.
        example: a batch of `data.text.collate`, rows of several lengths.

    Returns:
        A `TopLanguage`, or the reason why the model needs more than the states, or gives another loss or gradient.
    """
    if isinstance(cut := cut_of(lm.module), str):
        return cut
    places: list[Tensor] = []
    head: Any = cut.module.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return "it has no output head of its own"
    # for good: a compiled module keeps the hooks of its first call, and reads the list anew
    head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1).index_select(0, places[0]), *args[1:]))

    def states(batch: Batch) -> Tensor:
        device = next(lm.module.parameters()).device
        ids, mask = (sent(batch[name], device) for name in ("input_ids", "attention_mask"))
        return cut.states(lambda: lm.module(input_ids=ids, attention_mask=mask, use_cache=False))

    made = TopLanguage(FullLoss(cut.module, _loss_of(cut, places)), states)
    return _unlike(made, lm, example) or made


def _loss_of(cut: Cut, places: list[Tensor]) -> Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]:
    """`causal_lm.next_token_loss` from states, up to rounding."""

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        device = next(module.parameters()).device
        ids, mask = (sent(batch[name], device) for name in ("input_ids", "attention_mask"))
        # where the batch is: on a device the host would wait for their number
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        predicted = (targets != IGNORED).nonzero()[:, 0]
        cut.given[:], places[:] = [sent(batch["states"], device)], [sent(predicted, device)]
        logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits, count = logits.to(tree.compute_dtype(logits)), torch.full((), len(predicted), device=device)
        # the mean of nothing is nan, as it is for the whole model
        return F.cross_entropy(logits, sent(targets[predicted], device)), count

    return loss


def _unlike(top: TopLanguage, lm: LanguageModel, batch: Batch) -> str:
    """Why the top layers on states do not give loss and gradients of the whole model; "" where they do."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in lm.params.items()}
    leaves = list(params.values())
    try:
        own = {**batch, "states": top.states(batch)}
        if own["states"].shape[:2] != batch["input_ids"].shape:
            return f"states are of shape {tuple(own['states'].shape)}"
        (got, count), (wanted, expected) = top.loss_fn(params, own), lm.loss_fn(params, batch)
        ours, theirs = (
            torch.cat([leaf.flatten().float() for leaf in torch.autograd.grad(value, leaves, materialize_grads=True)])
            for value in (got, wanted)
        )
        off = float((ours - theirs).norm() / theirs.norm())  # of all: the gradient of a key's bias is only rounding
    except FAILURES as error:
        return shorten(str(error), 200)
    close = closeness(leaves[0].dtype)
    found, due = float(got.detach()), float(wanted.detach())
    if int(count) != int(expected) or not abs(found - due) <= close * abs(due):
        return f"the loss is {found:.6g} instead of {due:.6g}"
    return "" if off <= close else f"gradients differ by {off:.1e}"
