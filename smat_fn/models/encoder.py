"""Text encoders of ``transformers`` as losses of the parameters of their top layers, or of all of them.

Frozen layers see a text once: what they give is the input of the trained ones. Where those need more than that
(relative positions, rotary embeddings), the whole model runs in every step.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..progress import bar
from ..types import Batch, Where
from ..where import block_linear
from .modules import FullLoss, blocks, check_choice, check_layers, frozen, sent, train_only
from .packing import pooled, texts
from .pretrained import facts_of, fetch, floating, vocabulary_of
from .top import CLOSE, FAILURES, Passed, input_of

_TOGETHER = 32  # texts that go through the whole model in one pass


class Encoder(NamedTuple):
    """A pretrained encoder, ready to train: theta_0 of its trained leaves, and what makes heads and losses."""

    module: nn.Module  # the trained part, in eval mode: no dropout
    params: dict[str, Tensor]  # theta_0; the module's own storage: not to be written to
    where: Where  # the masked set S
    ids: Callable[[Sequence[str], int], list[Tensor]]  # (texts, longest) -> special tokens included, int64 (T,) each
    features: Callable[[Sequence[Tensor]], Tensor]  # ids -> float32 (n, D) of the whole pretrained model, on the CPU
    # (ids, progress=None) -> input of the first trained layer, one text after another, float32 (S, H) on the CPU
    states: Callable[..., Tensor] | None
    frozen: dict[str, Tensor]  # all weights and buffers of the pretrained model: features and states depend on them
    config: dict[str, Any]  # of the pretrained model, JSON values
    loss_fn: Callable[[Tensor, Tensor], FullLoss]  # (weight (C, D), bias (C,)) of a head -> loss of `Texts`
    positions: int | None  # tokens of a text, at most; None: any number
    reads: frozenset[str]  # names of all that is run: no pooler, no head of another task
    note: str = ""  # why frozen layers run in every step, where they do


# over 60 lines: its arguments, one a line, and the two ways to freeze layers
def load(
    source: str | Path,
    *,
    train_layers: int | None = None,
    train: Sequence[str] | None = None,
    normalize: bool = True,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Encoder:
    """Load a text encoder and its tokenizer; a pooler is left out.

    A feature is the mean over a text's last hidden states, scaled to length 1 with ``normalize``.

    Args:
        source: folder or hub repository, as for `causal_lm.load`.
        train_layers: number of top layers to train, the rest is frozen, and run once for a text where the top layers
            need nothing but hidden states (BERT; not DeBERTa, ModernBERT); None: train everything.
        train: as `modules.train_only`'s names; frozen layers then run in every step.
        normalize: scale features to length 1 (default).
        dtype: dtype of the trained part (default float32); the frozen part is float32.
        device: device of the model (default "cpu").

    Returns:
        An `Encoder`.

    Raises:
        ValueError: a part cannot be loaded, weights are missing, or the model has fewer layers.
    """
    kind = floating(dtype)
    check_choice(train_layers, train)
    model, tokenizer, layers = _read(source, train_layers, device)
    first = None if train_layers is None else len(layers) - train_layers
    pad, vocabulary = tokenizer.pad_token_id or 0, vocabulary_of(model)

    def made(trained: nn.Module, states: Callable[..., Tensor] | None, note: str = "") -> Encoder:
        return Encoder(
            trained.to(kind),
            {name: p.detach() for name, p in trained.named_parameters() if p.requires_grad},
            block_linear(trained),
            partial(_ids, tokenizer, vocabulary),
            lambda texts: _features(model, texts, pad, normalize),
            states,
            frozen(model),
            model.config.to_dict(),
            lambda weight, bias: FullLoss(trained, classify(weight, bias, normalize=normalize, pad=pad)),
            _positions(model),
            frozenset(model.state_dict()),
            note,
        )

    if first is None:
        trained = copy.deepcopy(model).requires_grad_(True)
        train_only(trained, names=train)
        return made(trained, None)
    reason = f"a {type(model).__name__} has no embeddings to leave out"
    if hasattr(model, "embeddings"):
        encoder = made(
            _top(model, first), lambda texts, progress=None: _states(model, layers[first], texts, pad, progress)
        )
        if not (reason := _not_alone(encoder, vocabulary=vocabulary, normalize=normalize)):
            return encoder
    whole = copy.deepcopy(model)
    for layer in blocks(whole)[first:]:
        layer.requires_grad_(True)
    note = f"the frozen layers of {str(source)!r} cannot be cached ({reason}): they run in every step"
    return made(whole, None, note)


def pooling_note(source: str | Path) -> str:
    """A note for a model that sentence-transformers pools otherwise than by the mean; an empty text for others."""
    facts, start = facts_of(source, "1_Pooling"), "pooling_mode_"
    given = facts.get("pooling_mode")  # of newer versions a name, or several; of older ones a flag for each
    modes = [given] if isinstance(given, str) else list(given or ())
    modes = modes or [name.removeprefix(start) for name, on in facts.items() if name.startswith(start) and on]
    if modes in ([], ["mean"], ["mean_tokens"]):
        return ""
    return (
        f"sentence-transformers pools {source} by {', '.join(modes)}, while a feature here is the mean over a text's "
        "tokens: heads are made for these features"
    )


def _read(source: str | Path, train_layers: int | None, device: str | torch.device) -> tuple[Any, Any, list[nn.Module]]:
    """The frozen model, its tokenizer and its layers. Raises: ValueError as `load`."""
    own: dict[str, Any] = {"optional": ("pooler.",), "dtype": torch.float32}
    model, tokenizer = fetch(source, "an encoder with a tokenizer", "AutoModel", "AutoTokenizer", **own)
    if getattr(model.config, "is_encoder_decoder", False):  # its last hidden states are the decoder's
        raise ValueError(
            f"{str(source)!r} is an encoder-decoder ({type(model).__name__}), not a text encoder: take a model such as "
            "BERT, or train this one as a language model (--preset lm)"
        )
    if hasattr(model, "pooler"):
        model.pooler = nn.Identity()  # not None: SqueezeBERT and LayoutLM call it unasked
    model = model.to(device).eval().requires_grad_(False)
    layers = blocks(model)
    if train_layers is not None:
        check_layers(train_layers, layers, type(model).__name__)
    return model, tokenizer, layers


def _positions(model: Any) -> int | None:
    """The positions of a text: of RoBERTa's table the first ones are not for tokens."""
    count = getattr(model.config, "max_position_embeddings", None)
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    unused = getattr(table, "padding_idx", None)
    return count if not count or unused is None else count - unused - 1


def _ids(tokenizer: Any, vocabulary: int, texts: Sequence[str], longest: int) -> list[Tensor]:
    found = tokenizer(list(texts), truncation=True, max_length=longest, padding=False, verbose=False)["input_ids"]
    if bare := [text for text, own in zip(texts, found, strict=True) if not own]:
        raise ValueError(f"{len(bare)} texts give no token, {bare[0]!r} the first: remove them, they have no features")
    if (top := max(map(max, found))) >= vocabulary:
        raise ValueError(
            f"the tokenizer gives token {top}, the model has embeddings of {vocabulary}: use the model's own tokenizer"
        )
    return [torch.tensor(own) for own in found]


def classify(weight: Tensor, bias: Tensor, *, normalize: bool, pad: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The loss of an encoder with a frozen head: cross entropy of ``W f(text) + b``; its aux are the logits (B, C).

    Logits are float32 (float64 stays float64).

    Args: weight: (C, D); bias: (C,); pad: id that fills up short texts where the whole model is trained.
    Returns: ``loss(module, Texts)``, the batch is moved to the module's device.
    """

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        features = pooled(module, batch, normalize=normalize, pad=pad)
        logits = features @ weight.to(features).T + bias.to(features)
        return F.cross_entropy(logits, sent(batch.labels, logits.device)), logits

    return loss


class _Given(nn.Module):
    """Stands for the embeddings: gives back the states that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **options: Any) -> Tensor:
        given = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        return given[0] if inputs_embeds is None else inputs_embeds


def _top(model: Any, first: int) -> nn.Module:
    """The model without embeddings and the layers before ``first``, under the same names; its top layers train."""
    top = copy.deepcopy(model)
    top.embeddings = _Given()
    stack = next(m for m in top.modules() if isinstance(m, nn.ModuleList) and len(m) == len(blocks(model)))
    for place, layer in enumerate(stack):
        if place < first:
            stack[place] = Passed()
        else:
            layer.requires_grad_(True)
    return top


def _not_alone(encoder: Encoder, *, vocabulary: int, normalize: bool) -> str:
    """Why the top layers on states, packed, do not give the features of the whole model; "" where they do."""
    assert encoder.states is not None
    ids = [torch.arange(n) * 7919 % vocabulary for n in (3, 7, 5)]
    float32 = copy.deepcopy(encoder.module).float()
    try:
        states = encoder.states(ids, False).split([len(own) for own in ids])
        with torch.no_grad():
            got = pooled(float32, texts(states, torch.zeros(len(ids))), normalize=normalize, pad=0).cpu()
        wanted = encoder.features(ids)
        off = float((got - wanted).abs().max() / wanted.abs().max())
    except FAILURES as error:
        return shorten(str(error), 200)
    return "" if off < CLOSE else f"features differ by {off:.1e}"


def _features(model: nn.Module, ids: Sequence[Tensor], pad: int, normalize: bool) -> Tensor:
    found = []
    try:
        with torch.no_grad():
            for start in range(0, len(ids), _TOGETHER):
                some = ids[start : start + _TOGETHER]
                found.append(pooled(model, texts(some, torch.zeros(len(some))), normalize=normalize, pad=pad).cpu())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a model that takes texts of some lengths alone, such as Nystromformer
        longest = max(map(len, ids))
        raise ValueError(
            f"a {type(model).__name__} fails on texts of up to {longest} tokens ({shorten(str(error), 200)}): it may "
            "take texts of one length alone; use another encoder"
        ) from error
    return torch.cat(found)


def _states(model: nn.Module, layer: nn.Module, ids: Sequence[Tensor], pad: int, progress: bool | None) -> Tensor:
    found: dict[int, Tensor] = {}
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # equal lengths need no padding
    steps = -(-len(order) // _TOGETHER)
    with bar(steps, desc="states of frozen layers", shown=progress, leave=False) as parts:
        for start in range(0, len(order), _TOGETHER):
            places = order[start : start + _TOGETHER]
            some = texts([ids[i] for i in places], torch.zeros(len(places)))
            rows = input_of(layer, partial(pooled, model, some, normalize=False, pad=pad))
            for place, states in zip(places, rows, strict=True):
                found[place] = states[: len(ids[place])].cpu().clone()
            parts.update()
    return torch.cat([found[i] for i in range(len(ids))])
