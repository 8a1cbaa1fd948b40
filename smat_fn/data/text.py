"""Prompts with answers, and plain texts, as batches of tokens for a causal language model.

A tokenizer is one of ``transformers``; only its call, its special ids and its vocabulary are used.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch import Tensor

from ..errors import and_more, name_rows, raise_problems
from ..models.head import IGNORED
from ..models.modules import filled
from ..models.pretrained import NO_EOS, check_tokenizer
from ..types import Micro
from .batching import split_rows

MULTIPLE = 8
_TOGETHER = 1000, 2**20  # rows and characters that are tokenized in one call, but one row may have more
Truncate: TypeAlias = Literal["right", "left", "prompt-middle"]
Row: TypeAlias = tuple[str, str]


class Example(NamedTuple):
    """One row as tokens; ``labels`` are the token itself or -100."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


class Cut(NamedTuple):
    """The effect of truncation on the answers of a task, as shares from 0 to 1 of ``rows``."""

    rows: int
    eos: float  # EOS is lost, and maybe more
    answer: float  # a part of the answer is lost
    whole_answer: float  # no token of the answer is left
    longest: int  # tokens of the longest row, EOS included
    texts: int = 0  # plain texts that the rows are windows of, 0: rows of prompts and answers
    middle: float = 0.0  # EOS or a part of the answer would be lost by "prompt-middle" too

    def among(self, rows: int) -> "Cut":
        """The effect on so many rows, of which all that are cut are counted here."""
        eos, answer, whole_answer, middle = (round(share * self.rows) / rows for share in (*self[1:4], self.middle))
        return Cut(rows, eos, answer, whole_answer, self.longest, middle=middle)


def pad_id(tokenizer: Any) -> int:
    """The padding id of short rows: PAD, or EOS where there is none.

    EOS is safe: attention masks and labels come from the lengths of rows, so a filled position is never seen and
    never supervised, and a row's own EOS always is.
    """
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    vocabulary: int,
    max_length: int = 512,
    truncate: Truncate = "right",
    mask_prompt: bool = False,
) -> list[Example]:
    r"""Training examples: ``prompt + "\n" + answer + EOS``, with special tokens, at most ``max_length`` tokens.

    EOS is appended before truncation and supervised when it is retained; a tokenizer that appends it itself adds no
    second one. The answer begins at the first token in which the row differs from ``prompt + "\n"`` alone, so that a
    token across the border belongs to the answer.

    Args: rows: pairs of prompt and answer; vocabulary: rows of the embedding; truncate: "right" keeps the first tokens
        (the paper), "left" BOS and the last ones, "prompt-middle" BOS, answer and EOS, and of the prompt both ends
        (where even BOS, answer and EOS are too long it keeps the first tokens of those); mask_prompt: no loss on the
        prompt.
    Raises: ValueError for a tokenizer that does not fit (`check_tokenizer`), bad options, tokens without a row in
        the embedding, and rows of which no token would be supervised.
    """
    if truncate not in get_args(Truncate):
        raise ValueError(f"truncate {truncate!r} is unknown, choose one of {get_args(Truncate)}")
    _check(max_length, tokenizer, vocabulary)
    examples, empty, largest = [], [], []
    one = list(range(vocabulary))  # an integer a token, however often it occurs: most of the memory of many rows
    apart = mask_prompt or truncate == "prompt-middle"
    for index, (ids, start) in enumerate(_tokens(rows, tokenizer, apart=apart)):
        largest.append(max(ids))
        kept = kept_places(len(ids), start, max_length, truncate, bos=ids[0] == tokenizer.bos_token_id)
        own = tuple(one[ids[i]] if ids[i] < vocabulary else ids[i] for i in kept)
        labels = tuple(IGNORED if i < start else token for i, token in zip(kept, own, strict=True))
        examples.append(Example(own, labels if mask_prompt else own))
        if all(label == IGNORED for label in examples[-1].labels[1:]):
            empty.append(f"{index} ({len(ids)} tokens)")
    problems = fit_problems(largest, vocabulary)
    if empty:
        problems.append(
            f"within {max_length} tokens nothing is to be predicted in rows {and_more(empty, 5)}: "
            "raise max_length, or keep the answers by `truncate='prompt-middle'`"
        )
    raise_problems(problems)
    return examples


def windows(
    texts: Sequence[str], tokenizer: Any, *, vocabulary: int, max_length: int = 512
) -> list[tuple[Example, ...]]:
    """Every plain text and EOS, with special tokens, as consecutive windows of at most ``max_length`` tokens.

    A window after the first begins with the last token of the one before, so that each token of a text but its first,
    which has no prediction, is predicted once. Texts are not joined: none sees another one.

    Args: as `encode`.
    Raises: ValueError as `encode`.
    """
    _check(max_length, tokenizer, vocabulary)
    found, bare, largest = [], [], []
    one = list(range(vocabulary))
    for index, ids in enumerate(_closed(texts, tokenizer)):
        largest.append(max(ids))
        own = tuple(one[i] if i < vocabulary else i for i in ids)
        parts = (own[start : start + max_length] for start in range(0, len(own) - 1, max_length - 1))
        found.append(tuple(Example(part, part) for part in parts))
        if not found[-1]:
            bare.append(index)
    problems = fit_problems(largest, vocabulary)
    problems += [f"the tokenizer finds no token in {name_rows(bare)}: remove these texts"] if bare else []
    raise_problems(problems)
    return found


def collate(examples: Sequence[Example], pad: int, *, multiple: int = MULTIPLE) -> dict[str, Tensor]:
    """Examples as one batch, padded on the right to the longest, rounded up to a multiple.

    Args: pad: id of filled positions (`pad_id`), which have label -100 and attention 0.
    Returns: int64 tensors (B, T) ``input_ids``, ``attention_mask``, ``labels`` on the CPU.
    Raises: ValueError for no examples.
    """
    if not examples:
        raise ValueError("collate: no examples, give at least one")
    ids, labels = zip(*examples, strict=True)
    columns = {
        "input_ids": (ids, pad),
        "attention_mask": ([[1] * len(row) for row in ids], 0),
        "labels": (labels, IGNORED),
    }
    return {name: filled(rows, value, multiple=multiple) for name, (rows, value) in columns.items()}


def split(batch: Mapping[str, Tensor], parts: int, *, multiple: int = MULTIPLE) -> list[Micro]:
    """A batch of `collate` as at most ``parts`` micro-batches of rows, each filled up to its own longest alone.

    The weight of a micro-batch is the number of tokens that its loss is the mean of, so that the weighted mean of the
    losses is the mean over all tokens of the batch; a micro-batch without such a token is left out.
    """
    found = []
    for micro, _ in split_rows(dict(batch), parts):
        length = -(-int(micro["attention_mask"].sum(1).max()) // multiple) * multiple
        tokens = int((micro["labels"][:, 1:] != IGNORED).sum())
        if tokens:
            found.append(Micro({name: rows[:, :length] for name, rows in micro.items()}, tokens))
    return found


def cut_report(
    rows: Mapping[str, Sequence[Row]], tokenizer: Any, *, max_length: int = 512, truncate: Truncate = "right"
) -> dict[str, Cut]:
    """Per task, the shares of rows whose answer or EOS truncation cuts.

    Args: rows: task -> pairs of prompt and answer.
    Raises: ValueError for a tokenizer without EOS and for a task without rows.
    """
    raise_problems([f"task {task!r} has no rows: leave it out" for task, pairs in rows.items() if not pairs])
    report = {}
    for task, pairs in rows.items():
        found = _tokens(pairs, tokenizer, apart=True)
        answers = ((ids, range(start, len(ids))) for ids, start in found)
        report[task] = cut_of(answers, tokenizer.bos_token_id, max_length, truncate)
    return report


def cut_of(rows: Iterable[tuple[Sequence[int], Sequence[int]]], bos: int | None, limit: int, truncate: Truncate) -> Cut:
    """The effect of truncation to ``limit`` tokens on rows of tokens, and of positions of answers and their end."""
    ends, parts, whole, middle = (list[bool]() for _ in range(4))
    longest = 0
    for ids, places in rows:
        longest = max(longest, len(ids))
        cut = partial(kept_places, len(ids), places[0], limit, bos=ids[0] == bos)
        kept, otherwise = {*cut(truncate)}, {*cut("prompt-middle")}
        answer = [place in kept for place in places[:-1]]
        ends.append(places[-1] not in kept)
        parts.append(not all(answer))
        whole.append(bool(answer) and not any(answer))
        middle.append(not otherwise.issuperset(places))
    return Cut(len(ends), fmean(ends), fmean(parts), fmean(whole), longest, middle=fmean(middle))


def fit_problems(largest: Sequence[int], vocabulary: int) -> list[str]:
    """A sentence on the rows with tokens that have no row in the embedding, if there are any.

    Args: largest: token of each row.
    """
    outside = [f"{index} (token {token})" for index, token in enumerate(largest) if token >= vocabulary]
    return [
        f"the embedding has {vocabulary} rows, too few for the tokens of rows {and_more(outside, 5)}: "
        "take the model's own tokenizer, or remove these rows"
    ] if outside else []  # fmt: skip


def closed(ids: Sequence[int], eos: int) -> list[int]:
    """Tokens with EOS at their end: a tokenizer that appends it itself adds no second one."""
    return list(ids) if ids and ids[-1] == eos else [*ids, eos]


def _tokens(rows: Sequence[Row], tokenizer: Any, *, apart: bool) -> Iterator[tuple[list[int], int]]:
    """Whole texts with EOS, and where their answers begin: 0 unless they are wanted ``apart`` from prompts."""
    texts = _closed([prompt + "\n" + answer for prompt, answer in rows], tokenizer)
    fronts = _ids([prompt + "\n" for prompt, _ in rows], tokenizer) if apart else repeat(())
    for ids, front in zip(texts, fronts, strict=False):
        yield ids, _border(front, ids) if apart else 0


def _closed(texts: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Texts as tokens with EOS."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(NO_EOS)
    yield from (closed(ids, eos) for ids in _ids(texts, tokenizer))


def _ids(texts: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Texts as tokens, with the special ones that the tokenizer adds."""
    options = {"add_special_tokens": True, "truncation": False, "padding": False, "verbose": False}
    part, size, (rows, most) = list[str](), 0, _TOGETHER
    for text in texts:
        if part and (len(part) == rows or size + len(text) > most):
            yield from tokenizer(part, **options)["input_ids"]
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield from tokenizer(part, **options)["input_ids"]


def _check(max_length: int, tokenizer: Any, vocabulary: int) -> None:
    """Raises: ValueError for a max_length below 2, and as `check_tokenizer`."""
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, must be at least 2: the first token has no prediction")
    check_tokenizer(tokenizer, vocabulary)


def _border(front: Sequence[int], ids: Sequence[int]) -> int:
    """The first token in which a row differs from its front."""
    same = (i for i, (a, b) in enumerate(zip(front, ids, strict=False)) if a != b)
    return min(next(same, len(front)), len(ids) - 1)


def kept_places(length: int, start: int, limit: int, truncate: Truncate, *, bos: bool) -> list[int]:
    """The positions that a row keeps when it is cut to ``limit`` tokens."""
    excess = length - limit
    if excess <= 0:
        return list(range(length))
    if truncate == "left":
        return [*range(bos), *range(excess + bos, length)]
    if truncate == "prompt-middle":
        if start - bos < excess:
            return [*range(bos), *range(start, length)][:limit]
        room = start - excess
        head = max(room - room // 2, int(bos))
        return [*range(head), *range(head + excess, length)]
    return list(range(limit))
