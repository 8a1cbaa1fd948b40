"""Prompts with answers as batches for an encoder-decoder: the prompt is the source, the answer and EOS the target.

Both are as the tokenizer writes sources and targets, with language codes where it has some.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import raise_problems
from ..models.head import IGNORED
from ..models.pretrained import check_tokenizer
from ..types import Micro
from . import text
from .batching import split_rows
from .text import Cut, Example, Row, fit_problems


def encode(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    vocabulary: int,
    max_length: int = 512,
    truncate: str = "right",
    mask_prompt: bool = False,
) -> list[Example]:
    """Training examples: source and target tokens of every row, at most ``max_length`` each, special ends kept.

    Args: as `text.encode`; ``mask_prompt`` changes nothing, for no prompt is predicted here; ``labels`` of an example
        are its target.
    Raises: ValueError for a tokenizer that does not fit, another ``truncate`` than "right", a max_length below 2, rows
        without a token, and tokens without a row in the embedding.
    """
    problems = [] if truncate == "right" else [f"truncate {truncate!r} requires a causal model: give 'right'"]
    problems += [] if max_length >= 2 else [f"max_length is {max_length}, must be at least 2: a token and EOS"]
    raise_problems(problems)
    check_tokenizer(tokenizer, vocabulary)
    found = [Example(tuple(source), tuple(target)) for source, target in _tokens(rows, tokenizer)]
    bare = [f"{i}" for i, own in enumerate(found) if not own.input_ids]
    raise_problems(fit_problems([max(*own.input_ids, *own.labels) for own in found], vocabulary))
    raise_problems([f"rows {', '.join(bare)} have prompts without a token: remove them"] if bare else [])
    # EOS of most tokenizers, of mBART's EOS and a language code; at least one token, and a text is not all end
    ends = [min(max(len(_ends(tokenizer, kind)[1]), 1), max_length - 1) for kind in ("text", "text_target")]
    return [Example(*map(partial(_cut, limit=max_length), own, ends)) for own in found]


def collate(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """Examples as a batch (`text.collate`), sources and targets each padded to their own longest."""
    return text.collate(examples, pad, multiple=1)


def split(batch: Mapping[str, Tensor], parts: int) -> list[Micro]:
    """A batch of `collate` as at most ``parts`` micro-batches of rows, each padded to its own longest.

    The weight of a micro-batch is its number of target tokens, so that the weighted mean of the losses is the mean over
    all of the batch.
    """
    found = []
    for micro, _ in split_rows(dict(batch), parts):
        real = micro["labels"] != IGNORED
        widths = {name: int(micro["attention_mask"].sum(1).max()) for name in ("input_ids", "attention_mask")}
        widths["labels"] = int(real.sum(1).max())
        found.append(Micro({name: rows[:, : widths[name]] for name, rows in micro.items()}, int(real.sum())))
    return found


def cut_report(rows: Mapping[str, Sequence[Row]], tokenizer: Any, *, max_length: int = 512) -> dict[str, Cut]:
    """Shares of cut answers by task as `text.cut_report`: EOS and a part of each stay; ``longest`` is of both sides."""
    report = {}
    for task, pairs in rows.items():
        found = _tokens(pairs, tokenizer)
        long = sum(len(target) > max_length for _, target in found)
        report[task] = Cut(len(pairs), 0.0, long / len(pairs), 0.0, max(len(ids) for own in found for ids in own))
    return report


def target_ends(tokenizer: Any) -> int:
    """The number of tokens that end every target: EOS, or as mBART has it EOS and a language code."""
    behind = _ends(tokenizer, "text_target")[1]
    return len(behind) + (tokenizer.eos_token_id not in behind)


def _tokens(rows: Sequence[Row], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Sources as the tokenizer leaves them, as they are in decoding, and targets, with EOS where it puts none.

    An EOS that targets begin with (SeamlessM4T) is left out: a model that learns it ends every answer at once.
    """
    if not rows:
        return []
    options = {"padding": False, "truncation": False, "verbose": False}
    sources = tokenizer([source for source, _ in rows], **options)["input_ids"]
    targets = tokenizer(text_target=[target for _, target in rows], **options)["input_ids"]
    eos = tokenizer.eos_token_id
    before, behind = _ends(tokenizer, "text_target")
    if before[:1] == [eos]:
        targets = [target[1:] for target in targets]
    if eos not in behind:
        targets = [text.closed(target, eos) for target in targets]
    return [(list(source), list(target)) for source, target in zip(sources, targets, strict=True)]


def _ends(tokenizer: Any, kind: str) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and behind a source ("text") or a target ("text_target")."""
    whole, bare = (
        list(tokenizer(**{kind: "a"}, add_special_tokens=special, verbose=False)["input_ids"])
        for special in (True, False)
    )
    starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    start = next(starts, None) if bare else None
    return ([], whole[-1:]) if start is None else (whole[:start], whole[start + len(bare) :])


def _cut(ids: tuple[int, ...], end: int, *, limit: int) -> tuple[int, ...]:
    """Tokens cut to a limit before their last ``end`` ones."""
    return ids if len(ids) <= limit else (*ids[: limit - end], *ids[len(ids) - end :])
