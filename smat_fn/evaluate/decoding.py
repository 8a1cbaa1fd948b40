"""Answers of a language model, causal or encoder-decoder: greedy or sampled; samples do not depend on the batch.

The token of row i in repeat r at position t maximises ``logits / temperature + g``, g standard Gumbel numbers that
depend on (seed, r, i, t) alone: a sample of the softmax (Gumbel-max), and models that are close give close texts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import random
from ..errors import raise_problems, some_of
from ..grad import ModuleLoss
from ..models.modules import CACHES, cache_name, filled
from ..models.prompts import Prompts
from ..models.top import CLOSE
from .engine import Decoding, Generate, root_key

TRACE = {
    "C-STANCE": Decoding(20),
    "FOMC": Decoding(20),
    "MeetingBank": Decoding(150, 0.7, 3),
    "ScienceQA": Decoding(100, 0.5, 3),
    "NumGLUE-cm": Decoding(20),
    "NumGLUE-ds": Decoding(20),
    "20Minuten": Decoding(150, 0.7, 3),
}


def generator(
    model: ModuleLoss,
    tokenizer: Any,
    params: Mapping[str, Tensor],
    *,
    batch_size: int = 16,
    prompts: Prompts | None = None,
) -> Generate:
    """`Generate` with given weights: rows of similar length together, with a key-value cache.

    The module holds the weights by reference while it decodes, and its own again afterwards, exceptions
    included: the next set of weights costs nothing but another call. A row ends at EOS: the tokenizer's, or one of the
    model's generation config. Other settings of that config (top_p and so on) are not used.

    Args: model: of a causal language model or an encoder-decoder of ``transformers``; params: its flat parameters, on
        its device; prompts: reads the prompts of a causal model whose lower blocks are frozen (default: the model).
    Raises: ValueError for a batch size below 1; when called, for bad settings, for prompts that hold no token, have
        tokens without a row in the embedding, or are too long for the model's positions, and for logits that are NaN.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, must be at least 1")
    module: Any = model.module
    ends, reads = stops(module, tokenizer), prompts
    # found with the first rows of two lengths, where layers hold more than keys and values
    padded: list[bool] = [not recurrent(module)] if recurrent(module) or not _is_mixed(module) else []

    def generate(
        prompts: Sequence[str], settings: Decoding, seed: int, *, repeat: int = 0, rows: Sequence[int] | None = None
    ) -> list[str]:
        _check_settings(settings, repeat)
        numbers = range(len(prompts)) if rows is None else rows
        ids = _encode(prompts, tokenizer, module, settings.max_new_tokens, numbers)
        # batches of one length waste no step
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        root = root_key(seed, repeat)
        texts = [""] * len(ids)

        def run(lm: nn.Module) -> None:
            if not padded and len({*map(len, ids)}) > 1:
                padded.append(not _reads_padding(lm, ids[order[-1]][:8], ids[order[0]][:16]))
            for chosen in _batches(order, ids, batch_size, padded=all(padded)):
                own = torch.tensor([numbers[i] for i in chosen])
                keys = random.fold_in(root, own) if settings.temperature else None
                new = _decode(lm, [ids[i] for i in chosen], settings, keys, ends, reads)
                for i, tokens in zip(chosen, new, strict=True):
                    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                    texts[i] = text.strip()

        with torch.no_grad(), evaluating(module), _contiguous(module):
            model.within(params, run)
        return texts

    return generate


def _batches(order: Sequence[int], ids: Sequence[Sequence[int]], size: int, *, padded: bool) -> Iterator[list[int]]:
    """Rows in batches; without padding rows of one length alone: some models read padding as tokens."""
    for _, group in groupby(order, key=lambda i: 0 if padded else len(ids[i])):
        rows = list(group)
        yield from (rows[first : first + size] for first in range(0, len(rows), size))


def prompt_ids(prompts: Sequence[str], tokenizer: Any, *, closed: bool = False) -> list[list[int]]:
    """Tokens of prompts with special tokens; ``closed``: as the tokenizer leaves them, else no EOS at the end."""
    if not prompts:
        return []
    options = {"add_special_tokens": True, "truncation": False, "padding": False, "verbose": False}
    ids = [list(row) for row in tokenizer(list(prompts), **options)["input_ids"]]
    end = tokenizer.eos_token_id
    # a tokenizer that closes texts by itself would close the prompt; an EOS that the text ends in is the prompt's own
    if closed or list(tokenizer("a", **options)["input_ids"])[-1:] != [end]:
        return ids
    return [row[:-1] if row and row[-1] == end else row for row in ids]


def sample(logits: Tensor, keys: Tensor, position: int, temperature: float) -> Tensor:
    """``argmax(logits / temperature - log(-log u))``: one token a row, distributed as softmax(logits / temperature).

    Args: logits: (B, V); keys: int64 (B, 2); u = (word + 1/2) / 2**32, word n of row b's blocks under
        ``fold_in(keys[b], position)`` for token n.
    Returns: int64 (B,). Source: Gumbel-max; Maddison, Tarlow and Minka, 2014.
    """
    keys = random.fold_in(keys, position)
    counters = torch.arange(-(-logits.shape[1] // 4), device=logits.device)
    words = rearrange(list(random.philox(keys[:, :1], keys[:, 1:] + counters)), "word b block -> b (block word)")
    uniform = (words[:, : logits.shape[1]].double() + 0.5) * 2.0**-32
    return (logits.double() / temperature - (-uniform.log()).log()).argmax(1)


def _decode(
    module: nn.Module,
    rows: Sequence[Sequence[int]],
    settings: Decoding,
    keys: Tensor | None,
    stops: frozenset[int],
    prompts: Prompts | None,
) -> list[list[int]]:
    device, dtype = (first := next(module.parameters())).device, first.dtype
    keys = None if keys is None else keys.to(device)
    step = _answering(module, rows, device) if _is_pair(module) else _continuing(module, rows, device, prompts)
    stop = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    lost = torch.zeros_like(ended)
    new: list[Tensor] = []
    for position in range(settings.max_new_tokens):
        logits = step(new[-1] if new else None)
        lost = lost | logits.amax(1).isnan()
        token = logits.argmax(1) if keys is None else sample(logits, keys, position, settings.temperature)
        new.append(token)
        ended = ended | torch.isin(token, stop)
        if bool(ended.all()):
            break
    if count := int(lost.sum()):
        raise ValueError(overflows(f"the logits of {count} of {len(rows)} prompts", dtype))
    return [_until(stops, row) for row in torch.stack(new, 1).tolist()]


def overflows(what: str, dtype: torch.dtype) -> str:
    """The error for values that are NaN, with the way out."""
    wider = ", or load the model as float32 (--suite-options dtype float32)" if dtype.itemsize < 4 else ""
    return f"{what} are NaN: the weights overflow in {dtype}, choose a smaller coefficient{wider}"


_UNUSED: Mapping[str, tuple[Any, ...]] = {  # with the values that change nothing
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "stop_strings": (),
}
_CLOSE_NARROW = 0.1  # logits of narrow dtypes, relative: rounding adds up over layers, what reads padding is off by 1

Step = Callable[[Tensor | None], Tensor]  # the last tokens (B,), None: none yet -> logits of the next ones (B, V)


def prompt_tokens(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Prompts that end together, filled up on the left: input_ids, attention_mask, position_ids, int64 (B, T) each."""
    ids, mask = (tensor.flip(1) for tensor in _padded([row[::-1] for row in rows], device))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _continuing(
    module: nn.Module, rows: Sequence[Sequence[int]], device: torch.device, prompts: Prompts | None
) -> Step:
    """A causal model: the prompt on the left of its answer; read anew for every token by a model without a cache."""
    ids, mask, positions = prompt_tokens(rows, device).values()
    accepted = signature(module.forward).parameters
    name, cache = cache_name(module), None

    def step(token: Tensor | None) -> Tensor:
        nonlocal ids, mask, positions, cache
        if token is not None:
            ids = torch.cat((ids, token[:, None]), 1)
            positions = torch.cat((positions, positions[:, -1:] + 1), 1)
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), 1)
        new = slice(None) if cache is None else slice(-1, None)
        options = {name: cache, "use_cache": bool(name), "position_ids": positions[:, new], "logits_to_keep": 1}
        known = {option: value for option, value in options.items() if option in accepted}
        masked = {} if recurrent(module) else {"attention_mask": mask}  # Mamba reads a mask of one step wrongly
        read = partial(prompts, module) if prompts is not None and cache is None else module
        out = read(input_ids=ids[:, new], **masked, **known)
        cache = getattr(out, name, None)
        return out.logits[:, -1]

    return step


def _answering(module: Any, rows: Sequence[Sequence[int]], device: torch.device) -> Step:
    """An encoder-decoder: the prompt in the encoder, read once, the answer in the decoder."""
    ids, mask = _padded(rows, device)
    encoded = module.get_encoder()(input_ids=ids, attention_mask=mask)
    start = torch.full((len(rows),), module.config.decoder_start_token_id, device=device)
    # a wrapper may hand on all its options; transformers takes the second name until 5.40
    name, cache = cache_name(module) or CACHES[1], None

    def step(token: Tensor | None) -> Tensor:
        nonlocal cache
        last = start if token is None else token
        options = {name: cache, "use_cache": True}
        out = module(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=last[:, None], **options)
        cache = out[name]
        return out.logits[:, -1]

    return step


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows filled up on the right, and where they are real; any token will do where attention is 0."""
    ids, mask = filled(rows, rows[0][0]), filled([[1] * len(row) for row in rows], 0)
    return ids.to(device), mask.to(device)


def recurrent(module: Any) -> bool:
    """Whether a model of transformers keeps a state beside keys and values, as Mamba and RWKV do."""
    return bool(getattr(module, "_is_stateful", False))


def _is_mixed(module: Any) -> bool:
    """Whether a causal model's config lists layers of another kind than attention with keys and values."""
    kinds = getattr(module.config, "layer_types", None) or ()
    return not _is_pair(module) and any(
        kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds
    )


def _reads_padding(module: nn.Module, short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether a causal model answers a row in another way where a longer one beside it fills it up.

    MiniMax does (transformers 5.23): with its cache, which does not begin with keys, it masks wrongly.
    """
    device = next(module.parameters()).device

    def second(rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits of the last row after its prompt and one token, so that what a cache holds counts."""
        step = _continuing(module, rows, device, None)
        step(None)
        return step(torch.full((len(rows),), short[0], device=device))[-1]

    alone, beside = second([short]), second([long, short])
    close = CLOSE if torch.finfo(alone.dtype).bits >= 32 else _CLOSE_NARROW
    return bool((beside.float() - alone.float()).norm() > close * alone.float().norm())  # NaN: said elsewhere


def _is_pair(module: Any) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))


def _until(stops: frozenset[int], tokens: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])


def _contiguous(module: Any) -> AbstractContextManager[Any]:
    """The output head gets contiguous states: for a slice of them, torch copies the weight once for each row."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if head is None:
        return nullcontext()
    return head.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]) if args else None)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode everywhere (gradient checkpointing would drop the cache), then the modes from before."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def stops(module: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a row: EOS of the tokenizer, and of the model's generation config."""
    own = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    several: Iterable[int | None] = own if isinstance(own, (list, tuple)) else [own]
    return frozenset(i for i in [*several, tokenizer.eos_token_id] if i is not None)


def special_answers(tokenizer: Any, answers: Iterable[str]) -> list[str]:
    """A note on answers with special tokens, which no decoded text has."""
    whole = "\n".join(answers)
    found = [repr(token) for token in tokenizer.all_special_tokens if token in whole]
    return [
        f"hold special tokens of the tokenizer ({some_of(found)}), which decoding leaves out, so that the same answer "
        "counts as wrong: make them ordinary tokens, or choose the metric choice or likelihood"
    ] if found else []  # fmt: skip


def unused_settings(module: Any) -> dict[str, Any]:
    """Settings of the model's generation config that change logits or search, and that decoding here does not use."""
    own = getattr(module, "generation_config", None)
    found = {name: getattr(own, name, None) for name in _UNUSED}
    return {name: value for name, value in found.items() if value not in (*_UNUSED[name], None, [])}


def _check_settings(settings: Decoding, repeat: int) -> None:
    problems = []
    if settings.max_new_tokens < 1:
        problems.append(f"max_new_tokens is {settings.max_new_tokens}, must be at least 1")
    if not 0 <= settings.temperature < float("inf"):
        problems.append(f"temperature is {settings.temperature}, must be finite and not negative (0: greedy)")
    if repeat < 0:
        problems.append(f"repeat is {repeat}, must not be negative")
    raise_problems(problems)


def _encode(
    prompts: Sequence[str], tokenizer: Any, module: Any, max_new_tokens: int, numbers: Sequence[int]
) -> list[list[int]]:
    pair = _is_pair(module)
    ids = prompt_ids(prompts, tokenizer, closed=pair)  # what an encoder reads is closed
    vocabulary = module.get_input_embeddings().weight.shape[0]
    limit = getattr(module.config, "max_position_embeddings", None) or float("inf")
    problems = []
    for index, row in zip(numbers, ids, strict=True):
        if not row:
            problems.append(f"prompt {index} holds no token")
        elif max(row) >= vocabulary:
            problems.append(f"prompt {index} has token {max(row)}, the embedding has {vocabulary} rows")
        elif (max(len(row), max_new_tokens) if pair else len(row) + max_new_tokens) > limit:
            problems.append(
                f"prompt {index} has {len(row)} tokens, with {max_new_tokens} new ones more than the model's {limit}"
            )
    if len(problems) > 5:
        problems[5:] = [f"and {len(problems) - 5} more"]
    raise_problems(problems)
    return ids
