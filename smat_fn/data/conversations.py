"""Messages of a conversation, as a row holds them, and what is wrong with them."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import shorten
from typing import Any

ANSWERS = "assistant"
_ROLES = {  # as other formats of conversations have them: as chat templates do
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "assistant"), "assistant"),
    "system": "system",
}


class Conversation(tuple[Mapping[str, Any], ...]):
    """Messages with role and content, and the tools that a template describes before them."""

    tools: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> "Conversation":
        """The conversation of a row."""
        own = cls(messages)
        own.tools = tools
        return own


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that the loss covers: OpenAI's format leaves some out by weight 0."""
    return message["role"] == ANSWERS and message.get("weight") != 0


def tools_in(value: Any) -> Any:
    """The tools of a row's value, which is a list or a JSON text of one; what is neither stays as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value or "null") or ()
        return value
    return without_nulls(value) or ()


def without_nulls(value: Any) -> Any:
    """A value whose mappings, at every depth, have no keys that are null: Arrow gives all rows the keys of each."""
    if isinstance(value, Mapping):
        return {key: without_nulls(own) for key, own in value.items() if own is not None}
    return [without_nulls(own) for own in value] if isinstance(value, list | tuple) else value


def problem_of(messages: Any, tools: Any = ()) -> str:
    """The problem of a row's messages or tools, an empty text for none."""
    if messages is None:
        return "no messages (with --chat a row has messages, or prompt and answer)"
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        return "messages must be a list of objects with role and content"
    if any(not isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        return 'every message needs a role and a content, both texts (content "" where it only calls tools)'
    for role in (message["role"] for message in messages):
        if (meant := _ROLES.get(role.lower(), role.lower())) != role and meant in _ROLES.values():
            return f"a message has role {role!r}: write {meant!r}, by which its template finds it"
    if len(messages) < 2 or messages[-1]["role"] != ANSWERS:
        return "the last message must be the assistant's, and one before it what it answers"
    if what := _of_weights(messages):
        return what
    if is_trained(messages[0]):
        return "the first message is the assistant's, and answers nothing: begin with the user's, or give it weight 0"
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        return f"tools are {shorten(repr(tools), 60)}, must be a list of objects, or a JSON text of one"
    halved = re.search("[\ud800-\udfff]", json.dumps([messages, tools], ensure_ascii=False, default=str))
    return "a message has half a surrogate pair" if halved else ""


def _of_weights(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in messages:
        weight = message.get("weight", 0)
        if weight not in (0, 1):
            return f"a message has weight {weight!r}, must be 1 (an answer is trained) or 0 (it is not)"
        if weight and message["role"] != ANSWERS:
            return f"a message of role {message['role']!r} has weight 1, but answers alone are trained: leave it out"
    return (
        "" if any(map(is_trained, messages)) else "all answers have weight 0: leave the row out, or give one weight 1"
    )
