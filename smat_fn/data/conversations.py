"""Messages of a conversation, as a row holds them, and what is wrong with them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = {  # as other formats of conversations have them: as chat templates do
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "assistant"), "assistant"),
    "system": "system",
}


class Conversation(tuple[Mapping[str, Any], ...]):
    """Messages with role and content."""


def without_nulls(value: Any) -> Any:
    """A value whose mappings, at every depth, have no keys that are null: Arrow gives all rows the keys of each."""
    if isinstance(value, Mapping):
        return {key: without_nulls(own) for key, own in value.items() if own is not None}
    return [without_nulls(own) for own in value] if isinstance(value, list | tuple) else value


def problem_of(messages: Any) -> str:
    """The problem of a row's messages, an empty text for none."""
    if messages is None:
        return "no messages (with --chat a row has messages, or prompt and answer)"
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        return "messages must be a list of objects with role and content"
    if any(not isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        return 'every message needs a role and a content, both texts (content "" where it only calls tools)'
    for role in (message["role"] for message in messages):
        if (meant := _ROLES.get(role.lower(), role.lower())) != role and meant in _ROLES.values():
            return f"a message has role {role!r}: write {meant!r}, by which its template finds it"
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return "the last message must be the assistant's, and one before it what it answers"
    if messages[0]["role"] == "assistant":
        return "the first message is the assistant's, and answers nothing: begin with the user's"
    return "a message has half a surrogate pair" if _has_surrogate(messages) else ""


def _has_surrogate(messages: Sequence[Any]) -> bool:
    return bool(re.search("[\ud800-\udfff]", json.dumps(messages, ensure_ascii=False, default=str)))
