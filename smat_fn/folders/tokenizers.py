"""Do base and experts number their tokens alike? Only told: their weights can be merged either way."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FILES = "tokenizer.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt"


def notes(base: Path, experts: Mapping[str, Path]) -> Iterator[str]:
    """A sentence for every expert whose tokenizer numbers tokens differently; one without a tokenizer has base's."""
    for label, path in experts.items():
        for file in _FILES:
            if not all((folder / file).is_file() for folder in (base, path)) or _same(base / file, path / file):
                continue
            left, right = (_tokens(folder / file) for folder in (base, path))
            if left is None or right is None:
                yield f"{label} has another {file} than base: its tokens may be numbered differently"
            elif left != right:
                changed = sorted(token for token in left.keys() | right.keys() if left.get(token) != right.get(token))
                yield (
                    f"{label} numbers {len(changed)} tokens otherwise than base, such as {changed[0]!r} "
                    f"({left.get(changed[0])} in base, {right.get(changed[0])} there): "
                    "the merged model has base's tokenizer"
                )
            else:
                continue
            break


def _same(left: Path, right: Path) -> bool:
    return len({hashlib.sha256(file.read_bytes()).digest() for file in (left, right)}) == 1


def _tokens(file: Path) -> dict[str, Any] | None:
    """Token to number, added ones too; None for a file that does not say it in JSON."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        if file.name != "tokenizer.json":
            return dict(read)
        vocabulary = read["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t[0], i) for i, t in enumerate(vocabulary))
        return {**dict(pairs), **{token["content"]: token["id"] for token in read.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
