"""Tokens of different tokenizers that are the same text: byte-level BPE, SentencePiece and WordPiece spell it apart."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

Key: TypeAlias = tuple[bool, bytes]  # whether a token is special, and its text

ROLES = "eos", "bos", "pad", "unk", "sep", "cls", "mask"  # where one token has several, the first counts
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet writes as they are
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}
_BYTE, _SPACE = re.compile("<0x([0-9A-Fa-f]{2})>"), "\u2581"  # of SentencePiece


class Spelling(NamedTuple):
    """How a tokenizer spells text in its tokens."""

    tokenizer: Any
    read: Callable[[str], bytes]  # the text of a token that is not special
    write: Callable[[bytes], str]  # a text as the tokenizer's model splits it. Raises: ValueError for incomplete UTF-8

    def tokens(self) -> dict[int, Key]:
        """Every token by id, in ascending order."""
        added = self.tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special} | {*self.tokenizer.all_special_ids}
        plain = {i for i in added if i not in special}
        return {
            i: (i in special, token.encode() if i in special or (i in plain and self.read is _from_bytes)
                else self.read(token))
            for token, i in sorted(self.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        }  # fmt: skip

    def roles(self) -> dict[str, int]:
        """The ids of the special tokens by role."""
        found = {role: getattr(self.tokenizer, f"{role}_token_id", None) for role in ROLES}
        return {role: i for role, i in found.items() if i is not None}

    def split(self, text: bytes) -> list[int]:
        """The ids of the tokens that a text is split into, with nothing added; without those of unknown text."""
        model = self.tokenizer.backend_tokenizer.model
        with suppress(ValueError):
            return [token.id for token in model.tokenize(self.write(text)) if token.id != self.tokenizer.unk_token_id]
        return []


def spelling_of(label: str, tokenizer: Any) -> Spelling:
    """The spelling of a tokenizer of transformers. Raises: ValueError for one that is not in a tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{label} has a {type(tokenizer).__name__}, which is in no tokenizer.json: save a fast tokenizer there"
        )
    parts = json.loads(backend.to_str())
    around = json.dumps([parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"ByteLevel"' in around:
        return Spelling(tokenizer, _from_bytes, lambda text: "".join(_LETTERS[byte] for byte in text))
    if _SPACE in around:
        return Spelling(tokenizer, _from_pieces, lambda text: text.decode().replace(" ", _SPACE))
    if parts["model"]["type"] == "WordPiece":
        inside = parts["model"]["continuing_subword_prefix"]
        return Spelling(
            tokenizer,
            lambda token: (token[len(inside) :] if token.startswith(inside) else f" {token}").encode(),
            lambda text: text[1:].decode() if text.startswith(b" ") else inside + text.decode(),
        )
    return Spelling(tokenizer, lambda token: token.encode(), lambda text: text.decode())


def _from_bytes(token: str) -> bytes:
    known = all(letter in _BYTES for letter in token)
    return bytes(_BYTES[letter] for letter in token) if known else token.encode()


def _from_pieces(token: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


def matches(model: Spelling, donor: Spelling, rows: int) -> dict[int, int]:
    """The model's token for the donor's tokens that it has too, by their ids: of the same text, or of the same role.

    A special token matches only special ones, by its text first. Of several tokens of one text the one of the same
    spelling counts, else the first, but a byte that SentencePiece falls back to comes last.

    Args: rows: of the model: tokens behind the last one do not count.
    """
    own = {i: key for i, key in model.tokens().items() if i < rows}
    words = model.tokenizer.get_vocab()
    bytes_ = {i for word, i in words.items() if _BYTE.fullmatch(word)}
    table: dict[Key, int] = {}
    for i, key in sorted(own.items(), key=lambda pair: (pair[0] in bytes_, pair[0])):
        table.setdefault(key, i)
    theirs, spelled = donor.tokens(), {i: words.get(word, rows) for word, i in donor.tokenizer.get_vocab().items()}
    found = {i: spelled[i] if own.get(spelled[i]) == key else table[key] for i, key in theirs.items() if key in table}
    by_role = model.roles()
    for role, i in donor.roles().items():
        if i not in found and by_role.get(role, rows) < rows:
            found[i] = by_role[role]
    return dict(sorted(found.items()))


def new_ids(names: Mapping[str, Any], model: Spelling, donor: Spelling, found: Mapping[int, int]) -> dict[str, Any]:
    """The ``*_token_id`` fields of a configuration with the donor's ids, None where the donor has no such token.

    Args: names: of the configuration; found: `matches`.
    """
    of_role = {f"{role}_token_id": i for role, i in donor.roles().items()}
    by_own: dict[int, int] = {}
    for theirs, own in found.items():
        by_own.setdefault(own, theirs)

    def new(name: str, value: Any) -> Any:
        if isinstance(value, list):
            kept = dict.fromkeys(i for own in value if (i := new(name, own)) is not None)
            return list(kept) or None
        i = of_role.get(name)
        return i if i is not None and (found.get(i) == value or value not in by_own) else by_own.get(value)

    return {
        name: new(name, value)
        for name, value in names.items()
        if name.endswith("_token_id") and isinstance(value, (int, list))
    }
