"""Answers of a causal language model: greedy or sampled, row by row the same in whatever batch.

The token of row i in repeat r at position t maximises ``logits / temperature + g``, g standard Gumbel numbers that
depend on (seed, r, i, t) alone: a sample of the softmax (Gumbel-max), and models that are close give close texts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .. import random
from ..grad import ModuleLoss
from ..tree import raise_problems


class Decoding(NamedTuple):
    """How to decode; ``repeats`` is for the caller, who averages the scores of that many decodes."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    repeats: int = 1  # greedy repeats would be equal


TRACE = {
    "C-STANCE": Decoding(20),
    "FOMC": Decoding(20),
    "MeetingBank": Decoding(150, 0.7, 3),
    "ScienceQA": Decoding(100, 0.5, 3),
    "NumGLUE-cm": Decoding(20),
    "NumGLUE-ds": Decoding(20),
    "20Minuten": Decoding(150, 0.7, 3),
}


class Generate(Protocol):
    """One answer per prompt, in order, without the prompt and outer whitespace."""

    def __call__(self, prompts: Sequence[str], settings: Decoding, seed: int, *, repeat: int = 0) -> list[str]: ...


Progress = Callable[[int, int], None]  # (rows done, rows)


def generator(
    model: ModuleLoss,
    tokenizer: Any,
    params: Mapping[str, Tensor],
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Generate:
    """`Generate` with given weights: rows of similar length together, padded on the left, with a key-value cache.

    The weights stand in the module by reference while it decodes, and its own are back afterwards, exceptions
    included: the next set of weights costs nothing but another call. A row ends at EOS: the tokenizer's, or one of the
    model's generation config. Other settings of that config (top_p and so on) are not used.

    Args: model: of a causal language model of ``transformers``; params: its flat parameters, on its device.
    Raises: ValueError for a batch size below 1; when called, for bad settings, and for prompts that hold no token,
        have tokens without a row in the embedding, or are too long for the model's positions.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, must be at least 1")
    module: Any = model.module
    stops = _stops(module, tokenizer)

    def generate(prompts: Sequence[str], settings: Decoding, seed: int, *, repeat: int = 0) -> list[str]:
        _check_settings(settings, repeat)
        ids = _encode(prompts, tokenizer, module, settings.max_new_tokens)
        # batches of one length waste no step
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        root = random.fold_in(random.fold_in(random.key(seed), "decode"), repeat)
        texts = [""] * len(ids)

        def run(lm: nn.Module) -> None:
            for first in range(0, len(order), batch_size):
                chosen = order[first : first + batch_size]
                keys = random.fold_in(root, torch.tensor(chosen)) if settings.temperature else None
                new = _decode(lm, [ids[i] for i in chosen], settings, keys, stops)
                for i, tokens in zip(chosen, new, strict=True):
                    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                    texts[i] = text.strip()
                if progress:
                    progress(first + len(chosen), len(order))

        with torch.no_grad(), _evaluating(module):
            model.within(params, run)
        return texts

    return generate


def sample(logits: Tensor, keys: Tensor, position: int, temperature: float) -> Tensor:
    """``argmax(logits / temperature - log(-log u))``: one token a row, distributed as softmax(logits / temperature).

    Args: logits: (B, V); keys: int64 (B, 2); u = (word + 1/2) / 2**32, word n of row b's blocks under
        ``fold_in(keys[b], position)`` for token n.
    Returns: int64 (B,). Source: Gumbel-max; Maddison, Tarlow and Minka, 2014.
    """
    keys = random.fold_in(keys, position)
    counters = torch.arange(-(-logits.shape[1] // 4), device=logits.device)
    words = torch.stack(random.philox(keys[:, :1], keys[:, 1:] + counters), -1).flatten(1)[:, : logits.shape[1]]
    uniform = (words.double() + 0.5) * 2.0**-32
    return (logits.double() / temperature - (-uniform.log()).log()).argmax(1)


def _decode(
    module: nn.Module, rows: Sequence[Sequence[int]], settings: Decoding, keys: Tensor | None, stops: frozenset[int]
) -> list[list[int]]:
    device = next(module.parameters()).device
    keys = None if keys is None else keys.to(device)
    width = max(map(len, rows))
    # any token will do where attention is 0, and where a row has ended
    filler = rows[0][0]
    ids = torch.tensor([[filler] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    accepted = signature(module.forward).parameters
    stop = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    new: list[Tensor] = []
    cache = None
    for position in range(settings.max_new_tokens):
        options = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in accepted}
        out = module(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        logits, cache = out.logits[:, -1], out.past_key_values
        token = logits.argmax(1) if keys is None else sample(logits, keys, position, settings.temperature)
        new.append(token)
        ended = ended | torch.isin(token, stop)
        if bool(ended.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(rows), 1)), 1)
    return [_until(stops, row) for row in torch.stack(new, 1).tolist()]


def _until(stops: frozenset[int], tokens: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode everywhere (gradient checkpointing would drop the cache), then the modes from before."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def _stops(module: Any, tokenizer: Any) -> frozenset[int]:
    own = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    several: Iterable[int | None] = own if isinstance(own, (list, tuple)) else [own]
    return frozenset(i for i in [*several, tokenizer.eos_token_id] if i is not None)


def _check_settings(settings: Decoding, repeat: int) -> None:
    problems = []
    if settings.max_new_tokens < 1:
        problems.append(f"max_new_tokens is {settings.max_new_tokens}, must be at least 1")
    if not 0 <= settings.temperature < float("inf"):
        problems.append(f"temperature is {settings.temperature}, must be finite and not negative (0: greedy)")
    if repeat < 0:
        problems.append(f"repeat is {repeat}, must not be negative")
    raise_problems(problems)


def _encode(prompts: Sequence[str], tokenizer: Any, module: Any, max_new_tokens: int) -> list[list[int]]:
    if not prompts:
        return []
    options = {"add_special_tokens": True, "truncation": False, "padding": False, "verbose": False}
    ids = [list(row) for row in tokenizer(list(prompts), **options)["input_ids"]]
    # a tokenizer that closes texts by itself would close the prompt
    ids = [row[:-1] if row and row[-1] == tokenizer.eos_token_id else row for row in ids]
    vocabulary = module.get_input_embeddings().weight.shape[0]
    limit = getattr(module.config, "max_position_embeddings", None) or float("inf")
    problems = []
    for index, row in enumerate(ids):
        if not row:
            problems.append(f"prompt {index} holds no token")
        elif max(row) >= vocabulary:
            problems.append(f"prompt {index} has token {max(row)}, the embedding has {vocabulary} rows")
        elif len(row) + max_new_tokens > limit:
            problems.append(
                f"prompt {index} has {len(row)} tokens, with {max_new_tokens} new ones more than the model's {limit}"
            )
    if len(problems) > 5:
        problems[5:] = [f"and {len(problems) - 5} more"]
    raise_problems(problems)
    return ids
