"""Conversations as training rows: rendered by the tokenizer's own chat template, the loss on the answers alone."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from ..errors import and_more, raise_problems
from ..models.head import IGNORED
from ..models.pretrained import check_tokenizer
from .text import Cut, Example, Truncate, fit_problems, kept_places

Conversation: TypeAlias = Sequence[Mapping[str, str]]  # of messages with role and content
Span: TypeAlias = tuple[int, int]  # characters of a rendered conversation
ANSWERS = "assistant"
_TODAY = datetime(2024, 7, 26)  # for templates that write the date: Llama 3's own default
_NOW = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
_MARK = "\ue000"  # stands for an answer; in no text


class Rendered:
    """A tokenizer for texts that a chat template has rendered: special tokens are in them already."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.tokenizer(*texts, **{**options, "add_special_tokens": False})

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["tokenizer"], name)


def check_template(tokenizer: Any, source: str) -> None:
    """Raises: ValueError for a tokenizer without a chat template, and for one that does not say where tokens are."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"chat: the tokenizer of {source} has no chat template: take the model's instruction-tuned version, save a "
            "template as chat_template.jinja beside the tokenizer, or leave --chat out and give rows of prompt and "
            "answer"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"chat: the tokenizer of {source} does not say which characters a token stands for, so that answers cannot "
            "be distinguished from prompts: save a fast tokenizer (tokenizer.json), or leave --chat out"
        )


def render(conversations: Sequence[Conversation], tokenizer: Any) -> tuple[list[str], list[list[Span]]]:
    """Every conversation as text, and the characters that answer in it: all that follows a generation prompt.

    Raises: ValueError that lists rows that the template refuses, and those of which it renders a beginning otherwise
        than alone, so that no prompt would lead to the answer that is trained.
    """
    texts, spans, problems = [], [], []
    for row, messages in enumerate(conversations):
        own: list[Span] = []
        try:
            whole = _text(messages, tokenizer)
            for i, message in enumerate(messages):
                if message["role"] != ANSWERS:
                    continue
                front, end = _front(messages[: i + 1], tokenizer), _text(messages[: i + 1], tokenizer)
                if not end.startswith(front):
                    raise ValueError(
                        f"before the answer of message {i} it renders other text than as a prompt: change the template "
                        "(chat_template.jinja), or write a system message into the user's"
                    )
                if not whole.startswith(end):
                    raise ValueError(f"it renders message {i} otherwise when more follow: give that answer its own row")
                own.append((len(front), len(end)))
        except Exception as error:  # of jinja2, or whatever a template raises
            problems.append(f"row {row}: the chat template does not take it ({error})")
            continue
        texts.append(whole)
        spans.append(own)
    raise_problems(problems)
    return texts, spans


def prompt_of(messages: Conversation, tokenizer: Any) -> str:
    """The rendered conversation up to where its last message, the answer, begins.

    With what the template writes between its generation prompt and an answer (Qwen3: an empty thought), which does not
    belong to the answer.
    """
    front, end = _front(messages, tokenizer), _text(messages, tokenizer)
    last = {"role": messages[-1]["role"], "content": _MARK}
    before, mark, _ = _text([*messages[:-1], last], tokenizer).partition(_MARK)
    added = before.removeprefix(front).strip() and before.startswith(front)
    return before.rstrip(" ") if mark and added and end.startswith(before) else front


def encode(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    vocabulary: int,
    max_length: int = 512,
    truncate: Truncate = "right",
    last: bool = False,
) -> list[Example]:
    """Training examples of whole conversations; labels are the answers' tokens and the template's end of each answer.

    Args: as `text.encode`; "prompt-middle" cuts before the first answer; last: labels are those of the last answer
        alone. A token across the border of an answer belongs to it.
    Raises: ValueError as `render`; for tokens without a row in the embedding, and rows of which no token is supervised.
    """
    check_tokenizer(tokenizer, vocabulary)
    whole = _tokens(conversations, tokenizer, last=last)
    examples, empty = [], []
    for row, (ids, labels) in enumerate(whole):
        start = next((i for i, label in enumerate(labels) if label != IGNORED), len(ids))
        places = kept_places(len(ids), start, max_length, truncate, bos=ids[:1] == (tokenizer.bos_token_id,))
        examples.append(Example(tuple(ids[i] for i in places), tuple(labels[i] for i in places)))
        if all(label == IGNORED for label in examples[-1].labels[1:]):
            empty.append(f"{row} ({len(ids)} tokens)")
    problems = fit_problems([max(ids) for ids, _ in whole], vocabulary)
    if empty:
        problems.append(
            f"within {max_length} tokens rows {and_more(empty, 5)} hold no answer: raise max_length, or keep the "
            "answers by `truncate='prompt-middle'`"
        )
    raise_problems(problems)
    return examples


def cut_report(conversations: Sequence[Conversation], tokenizer: Any, *, max_length: int = 512) -> Cut:
    """Effect of "right" truncation on the rows: ``eos`` counts those that lose the end of their last answer."""
    count, ends, answers, lost = 0, 0, 0, 0
    longest = 0
    for ids, labels in _tokens(conversations, tokenizer):
        places = [i for i, label in enumerate(labels) if label != IGNORED]
        count, longest = count + 1, max(longest, len(ids))
        ends += places[-1] >= max_length
        answers += places[-1] - 1 >= max_length
        lost += places[0] >= max_length
    return Cut(count, ends / count, answers / count, lost / count, longest)


def ends_by(conversation: Conversation, tokenizer: Any) -> frozenset[int]:
    """The last few tokens of the last answer, with what the template ends it by: one of them has to end decoding."""
    ids, labels = _tokens([conversation], tokenizer)[0]
    return frozenset([token for token, label in zip(ids, labels, strict=True) if label != IGNORED][-4:])


def _front(messages: Conversation, tokenizer: Any) -> str:
    return _text(messages[:-1], tokenizer, add_generation_prompt=True)


def _text(messages: Conversation, tokenizer: Any, **options: bool) -> str:
    template = tokenizer.get_chat_template()
    dated = _NOW.sub(lambda call: repr(_TODAY.strftime(call[2])), template)  # tomorrow's rows would be others
    return tokenizer.apply_chat_template(list(messages), chat_template=dated, tokenize=False, **options)


def _tokens(conversations: Sequence[Conversation], tokenizer: Any, *, last: bool = False) -> list[Example]:
    """Tokens and labels of whole conversations, before they are cut."""
    texts, spans = render(conversations, tokenizer)
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    examples = []
    for ids, places, every in zip(out["input_ids"], out["offset_mapping"], spans, strict=True):
        own = every[-1:] if last else every
        answers = [any(start < right and left < end for start, end in own) for left, right in places]
        labels = (token if answer else IGNORED for token, answer in zip(ids, answers, strict=True))
        examples.append(Example(tuple(ids), tuple(labels)))
    return examples
