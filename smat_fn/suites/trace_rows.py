"""Rows of language tasks: read, taken apart, and checked for what their metric compares."""

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..data.conversations import ANSWERS, Conversation
from ..data.rows import TextRows, load_conversations, load_rows, take
from ..data.splits import normalised
from ..errors import name_rows
from ..evaluate.metrics import TRACE_METRICS, extract_label, first_letter_accuracy, label_accuracy
from .sources import shared_rows

TASKS = tuple(TRACE_METRICS)  # the paper's seven
LABELS = label_accuracy, first_letter_accuracy  # of letters
LETTERS = tuple("ABCD")
SPLITS = {"train": "train", "dev": "dev", "test": "eval"}  # ours -> the source's


def conversations(data: str, task: str, split: str, columns: Any) -> tuple[Conversation, ...]:
    """The conversations of a split."""
    return load_conversations(data, task, SPLITS[split], columns=columns)


def texts_of(data: str, task: str, split: str, columns: Any, *, choices: bool) -> TextRows:
    """The prompts and answers, or the plain texts, of a split. Raises: ValueError for images."""
    asked = {"choices": True} if choices else {}
    rows = load_rows(data, task, SPLITS[split], columns=columns, **asked)
    if not isinstance(rows, TextRows):
        way = "this suite takes prompts and answers: give some, or take --preset images"
        raise ValueError(f"{data} ({task}, {SPLITS[split]}) holds images, {way}")
    return rows


def size_of(rows: TextRows | Sequence[Conversation]) -> int:
    """How many rows there are."""
    return len(rows.answers) if isinstance(rows, TextRows) else len(rows)


def hashed(rows: Any) -> Any:
    """Rows as they are hashed: choices and tools alone where there are some, as runs begun before have them."""
    if isinstance(rows, TextRows):
        return rows[: 3 if rows.choices else 2]
    return [{"messages": own, "tools": own.tools} if own.tools else own for own in rows]


def some_of(rows: Any, places: Sequence[int]) -> Any:
    """The rows at these places."""
    return take(rows, places) if isinstance(rows, TextRows) else tuple(rows[i] for i in places)


def plain_tasks(every: Mapping[tuple[str, str], TextRows]) -> tuple[frozenset[str], list[str]]:
    """The tasks of plain texts, and errors for those with both kinds of rows."""
    splits = dict[str, dict[bool, list[str]]]()
    for (task, split), rows in every.items():
        splits.setdefault(task, {}).setdefault(rows.plain, []).append(SPLITS[split])
    problems = [
        f"{task} has plain texts in {', '.join(own[True])} and prompts with answers in {', '.join(own[False])}: give "
        "all its splits rows of one kind"
        for task, own in splits.items()
        if len(own) > 1
    ]
    return frozenset(task for task, own in splits.items() if True in own), problems


def asked_of(rows: TextRows | Sequence[Conversation]) -> TextRows:
    """Rows as what they ask, without answers: a prompt may have several. Of a plain text it is all.

    Of a conversation it is what the first answer is to: rows may be beginnings of one conversation.
    """
    if isinstance(rows, TextRows):
        prompts = rows.answers if rows.plain else rows.prompts
    else:
        prompts = tuple(map(_opening, rows))
    return TextRows(prompts, ("",) * len(prompts))


def _opening(messages: Conversation) -> str:
    """A conversation up to its first message of the user's; without one, its first message."""
    end = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages[: end + 1])


def overlaps(task: str, rows: Mapping[str, Any]) -> list[str]:
    """Notes on rows that are in two splits (`shared_rows`), of a task's rows by split.

    A conversation is in train too if it is the beginning of one there.
    """
    if isinstance(rows["train"], TextRows):
        pairs = {split: [*map(_plain_pair, *own[:2])] for split, own in rows.items()}
        return shared_rows(task, pairs)
    begun = {split: [*map(_beginnings, own)] for split, own in rows.items()}
    within = [key for keys in begun["train"] for key in keys]
    return shared_rows(task, {split: [keys[-1] for keys in own] for split, own in begun.items()} | {"train": within})


def _plain_pair(prompt: str, answer: str) -> str:
    return f"{normalised(prompt)}\0{normalised(answer)}"


def _beginnings(messages: Conversation) -> list[str]:
    """A digest of the messages up to each answer; that of the last one is of all."""
    state, found = hashlib.sha256(), []
    for message in messages:
        own = message["role"], normalised(message["content"]), message.get("tool_calls")
        state.update(repr(own).encode())
        if message["role"] == ANSWERS:
            found.append(state.hexdigest())
    return found


def left_out(task: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A note on what a chat template leaves out of the rows of a task, or none."""
    if not (count := sum(map(bool, rows))):
        return []
    what = ", ".join(dict.fromkeys(name for own in rows for name in own))
    return [
        f"the chat template leaves out {what}, or parts of them, in {count} of the {len(rows)} rows of {task}: change "
        "the template (chat_template.jinja), or write them into the user's messages"
    ]


def unlettered(task: str, split: str, answers: Sequence[str]) -> list[str]:
    """The error for answers that a metric of letters can never count; the paper's tasks may have some."""
    bad = [i for i, answer in enumerate(answers) if not is_letter(task, answer)]
    if not bad or (task in TASKS and len(bad) < len(answers)):
        return []
    which = "no answer" if len(bad) == len(answers) else f"the answer of {name_rows(bad)}"
    begins = "begins" if len(bad) == len(answers) else "does not begin"
    way = "give the task another name and choose a metric" if task in TASKS else "choose another metric, such as exact"
    return [
        f"{which} of {task} ({split}) {begins} with a stand-alone letter A to D, which its metric compares: the "
        f"same text would count as wrong; the first is {answers[bad[0]].strip()[:40]!r}; write letters (capitals where "
        f"words follow), or {way}"
    ]


def letter_of(answer: str) -> str:
    """The first character of an answer, as a capital."""
    return answer.strip()[:1].upper()


def is_letter(task: str, answer: str) -> bool:
    """Whether an answer begins with a letter that its metric finds in texts: the first of "B: hawkish", not "business".

    The metric of ScienceQA reads first characters alone.
    """
    if TRACE_METRICS.get(task) is first_letter_accuracy:
        return letter_of(answer) in LETTERS
    return bool(re.match(r"\s*[A-D](?![A-Za-z0-9])", answer, re.IGNORECASE) and extract_label(answer))


def pairs_of(rows: TextRows) -> list[tuple[str, str]]:
    """Prompt and answer of each row."""
    return list(zip(rows.prompts, rows.answers, strict=True))


def unread_metric(metric: str | None, plain: Set[str], tasks: Sequence[str]) -> list[str]:
    """The error for a metric that is given and scores no task, since all are plain texts or have their own."""
    if metric in (None, "likelihood") or not plain or not plain >= {*tasks} - {*TASKS}:
        return []
    return [
        f"metric {metric} compares answers, and {', '.join(sorted(plain))} are plain texts: leave the metric out, they "
        "are scored by likelihood"
    ]


def given_metric(suite: Any, options: Mapping[str, Any]) -> list[str]:
    """`unread_metric` of a metric among options that are given for a suite, even if it is the default."""
    plain = getattr(suite, "plain", None)
    return unread_metric(options.get("metric"), plain, suite.tasks) if plain else []
