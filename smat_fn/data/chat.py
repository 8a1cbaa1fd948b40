"""Conversations as training rows: rendered by the tokenizer's own chat template, the loss on the answers alone."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from textwrap import shorten
from typing import Any, TypeAlias

from ..errors import and_more, raise_problems
from ..models.head import IGNORED
from ..models.pretrained import check_tokenizer
from .conversations import is_trained
from .text import Cut, Example, Truncate, cut_of, fit_problems, kept_places

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # with role and content; a `Conversation` may have tools
Span: TypeAlias = tuple[int, int]  # characters of a rendered conversation
_TODAY = datetime(2024, 7, 26)  # for templates that write the date: Llama 3's own default
_NOW = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
_MARK = "\ue000"  # stands for an answer; in no text
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of messages that templates put before the content


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


def render(
    conversations: Sequence[Messages], tokenizer: Any
) -> tuple[list[str], list[list[Span]], list[tuple[str, ...]]]:
    """Every conversation as text, the characters that answer in it, and what the template leaves out of it.

    Answers are all that follows a generation prompt; those of weight 0 have no characters, but for the last one, which
    is scored. Left out are "tools", and messages of a role: "tool messages".

    Raises: ValueError that lists rows that the template refuses, those of which it renders a beginning otherwise than
        alone, so that no prompt would lead to the answer that is trained, and those of which it leaves out an answer.
    """
    found, problems = list[tuple[str, list[Span], tuple[str, ...]]](), list[str]()
    for row, messages in enumerate(conversations):
        try:
            found.append(_rendered(messages, tokenizer))
        except Exception as error:  # of jinja2, or whatever a template raises
            problems.append(f"row {row}: the chat template does not take it ({error})")
    raise_problems(problems)
    return [text for text, *_ in found], [spans for _, spans, _ in found], [lost for *_, lost in found]


def _rendered(messages: Messages, tokenizer: Any) -> tuple[str, list[Span], tuple[str, ...]]:
    """`render` of one conversation. Raises: ValueError for what is wrong with it, and whatever a template raises."""
    write = _writer(messages, tokenizer)
    whole, own, lost = write(messages), list[Span](), list[str]()
    for i, message in enumerate(messages):
        if not is_trained(message) and i + 1 < len(messages):
            lost += [f"{message['role']} messages"] if _unwritten(message, whole) else []
            continue
        front, end = write(messages[:i], add_generation_prompt=True), write(messages[: i + 1])
        if not end.startswith(front):
            raise ValueError(
                f"before the answer of message {i} it renders other text than as a prompt: change the template "
                "(chat_template.jinja), or write a system message into the user's"
            )
        if not whole.startswith(end):
            raise ValueError(f"it renders message {i} otherwise when more follow: give that answer its own row")
        what = _unwritten(message, end[len(front) :])
        if what and _unwritten(message, end.removeprefix(write(messages[:i]))):  # <think> may be in the prompt's end
            way = "" if i + 1 == len(messages) else ", or give the answer weight 0"  # the last one is scored
            raise ValueError(
                f"it does not write all of {what} in message {i}, an answer: change the template "
                f"(chat_template.jinja) or the row{way}"
            )
        own.append((len(front), len(end)))
    if getattr(messages, "tools", None) and whole == write(messages, tools=None):
        lost.append("tools")
    return whole, own, tuple(dict.fromkeys(lost))


def _unwritten(message: Mapping[str, Any], text: str) -> str:
    """The part of a message that is not in a text that should have it, however it is spaced; "" for none."""
    content = message["content"]
    as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # of a tool's result
    if content.strip() not in text and not any(_unspaced(form) in _unspaced(text) for form in (content, as_json)):
        return shorten(repr(content), 60)
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    names = [str(own["name"]) for own in functions if isinstance(own, Mapping) and "name" in own]
    if lost := next((f"the call of {name}" for name in names if name not in text), ""):
        return lost
    thoughts = {name: message[name] for name in _THOUGHTS if is_trained(message) and isinstance(message.get(name), str)}
    return next((f"the {name}" for name, own in thoughts.items() if _unspaced(own) not in _unspaced(text)), "")


def _unspaced(text: str) -> str:
    return "".join(text.split())


def prompt_of(messages: Messages, tokenizer: Any) -> str:
    """The rendered conversation up to where its last message, the answer, begins.

    With what the template writes between its generation prompt and an answer (Qwen3: an empty thought), which does not
    belong to the answer.
    """
    write = _writer(messages, tokenizer)
    front, end = write(messages[:-1], add_generation_prompt=True), write(messages)
    last = {"role": messages[-1]["role"], "content": _MARK}
    before, mark, _ = write([*messages[:-1], last]).partition(_MARK)
    added = before.removeprefix(front).strip() and before.startswith(front)
    return before.rstrip(" ") if mark and added and end.startswith(before) else front


def encode(
    conversations: Sequence[Messages],
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


def cut_report(
    conversations: Sequence[Messages], tokenizer: Any, *, max_length: int = 512, truncate: Truncate = "right"
) -> Cut:
    """Effect of truncation on the rows: ``eos`` counts those that lose the end of their last answer."""
    found = _tokens(conversations, tokenizer)
    answers = ((ids, [i for i, label in enumerate(labels) if label != IGNORED]) for ids, labels in found)
    return cut_of(answers, tokenizer.bos_token_id, max_length, truncate)


def ends_by(conversation: Messages, tokenizer: Any) -> frozenset[int]:
    """The last few tokens of the last answer, with what the template ends it by: one of them has to end decoding."""
    ids, labels = _tokens([conversation], tokenizer, last=True)[0]
    return frozenset([token for token, label in zip(ids, labels, strict=True) if label != IGNORED][-4:])


def _writer(messages: Messages, tokenizer: Any) -> Callable[..., str]:
    """The template as a function of some of these messages and its options."""
    template = tokenizer.get_chat_template()
    options = {
        "chat_template": _NOW.sub(lambda call: repr(_TODAY.strftime(call[2])), template),  # else others tomorrow
        "tools": getattr(messages, "tools", None) or None,
        "tokenize": False,
    }
    return lambda some, **others: tokenizer.apply_chat_template(list(some), **{**options, **others})


def _tokens(conversations: Sequence[Messages], tokenizer: Any, *, last: bool = False) -> list[Example]:
    """Tokens and labels of whole conversations, before they are cut."""
    texts, spans, _ = render(conversations, tokenizer)
    out = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    examples = []
    every = zip(conversations, out["input_ids"], out["offset_mapping"], spans, strict=True)
    for messages, ids, places, found in every:
        own = found[-1:] if last else found[: len(found) - (not is_trained(messages[-1]))]
        answers = [any(start < right and left < end for start, end in own) for left, right in places]
        labels = (token if answer else IGNORED for token, answer in zip(ids, answers, strict=True))
        examples.append(Example(tuple(ids), tuple(labels)))
    return examples
