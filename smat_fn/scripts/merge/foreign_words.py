"""Options of mergekit 0.1.5, and fields of its recipes, on the command line of merge.py, and what to write instead."""

import re
from itertools import takewhile

_DROP = "leave out"
_ALWAYS = f"{_DROP}, always on here"
FOREIGN = {
    "allow-crimes": f"{_DROP}, or write --config-from NAME where config.json differs",
    "async-write": _ALWAYS,
    "base-model": "write --base",
    "clone-tensors": _ALWAYS,
    "copy-tokenizer": f"{_DROP}, the base's tokenizer is always copied",
    "cuda": "write --device cuda",
    "gpu-rich": _DROP,
    "lambda": "write --coef",
    "lazy-loader": _ALWAYS,
    "lazy-unpickle": _ALWAYS,
    "lora-merge-cache": f"{_DROP}, adapters are merged while they are read",
    "lora-merge-dtype": f"{_DROP}, adapters are added in float32",
    "low-cpu-memory": _ALWAYS,
    "merge-method": "write the method's name after merge.py",
    "models": "write --experts",
    "multi-gpu": _DROP,
    "num-threads": "write --threads N",
    "out-shard-size": "write --shard-size 5GB, in bytes instead of parameters",
    "quiet": _DROP,
    "random-seed": "write --seed N",
    "read-to-gpu": _DROP,
    "safe-serialization": _ALWAYS,
    "tokenizer-source": "write --tokenizer-from",
    "transformers-cache": f"{_DROP}, and set HF_HUB_CACHE",
    "trust-remote-code": f"{_DROP}, no code of models is run",
    "verbose": _DROP,
    "write-model-card": _ALWAYS,
    "write-threads": "write --threads N",
}


def without_foreign(words: list[str]) -> list[str]:
    """The same words. Raises: ValueError for options of mergekit, and for several numbers after --coef."""
    ways = dict[str, list[str]]()
    for word in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        name = word.removeprefix("--").removeprefix("no-").replace("_", "-")
        if name in FOREIGN:
            ways.setdefault(FOREIGN[name], []).append(word)
    if ways:
        raise ValueError("; ".join(f"{', '.join(own)} of mergekit: {way}" for way, own in ways.items()))
    for place, word in enumerate(words):
        if word.partition("=")[0] == "--coef":
            joined = [word.partition("=")[2]] if "=" in word else []
            numbers = [*joined, *takewhile(_is_number, words[place + 1 :])]
            if len(numbers) > 1 and all(map(_is_number, numbers)):
                weights = " ".join(f"{name}@{number}" for name, number in zip("ABCDEFGH", numbers, strict=False))
                lines = f", for factors of the first and the last block --lines {' '.join(numbers)}"
                raise ValueError(
                    f"--coef takes one number, not {' '.join(numbers)}: for a weight of each expert write --coef 1 "
                    f"--experts {weights}{lines if len(numbers) == 2 else ''}"
                )
    return words


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) is not None
