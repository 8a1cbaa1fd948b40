"""Words of merge.py's command line: short forms written out, and options of mergekit 0.1.5 refused with a way out."""

import re
from collections.abc import Collection
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


def refuse_loose(words: list[str], mergers: Collection[str]) -> list[str]:
    """The same words. Raises: ValueError for words between a merger and its first option."""
    if words and words[0] in mergers and (own := [*takewhile(lambda word: not word.startswith("-"), words[1:])]):
        if any(word in mergers for word in own):
            raise ValueError(f"{' '.join([words[0], *own])}: give one merger a command, or all, the paper's five")
        raise ValueError(f"{' '.join([words[0], *own])}: experts are given as --experts {' '.join(own)}")
    return words


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) is not None


def by_file(words: list[str]) -> list[str]:
    """``FILE.yml`` as the first word is ``recipe FILE.yml``; a word after the file is --out, as of mergekit-yaml."""
    words = ["recipe", *words] if words and words[0].endswith((".yml", ".yaml")) else words
    named = words[:1] == ["recipe"] and len(words) > 2 and not any(word.startswith("-") for word in words[1:3])
    if not named or "--out" in {word.partition("=")[0] for word in words}:
        return words
    return [*words[:2], "--out", *words[2:]]


def by_density(words: list[str]) -> list[str]:
    """``--density``, the name in mergekit and PEFT, as --keep of TIES; of DARE and DELLA --drop-prob is 1 - density.

    Adapters and sce have a --density of their own.
    """
    drops = words[0] in ("dare", "dare_ties", "della") if words else False
    if not (drops or "ties" in words) or words[0] in ("adapters", "sce"):
        return words
    names, option = [word.partition("=")[0] for word in words], "--drop-prob" if drops else "--keep"
    if option in names or "--density" not in names:
        return words  # with both, one would be taken in silence: --density is an unknown option then
    place = names.index("--density")
    joined = words[place].partition("=")[2]
    value, after = (joined, place + 1) if joined else ("".join(words[place + 1 : place + 2]), place + 2)
    if drops and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", value):
        value = f"{1 - float(value):.12g}"
    return [*words[:place], option, value, *words[after:]]


def by_glob(words: list[str]) -> list[str]:
    """Every ``--coef GLOB=NUMBER`` as words of --coefs."""
    left, rules, rest = list[str](), list[str](), iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        given = [option, value] if value else [word, *([next(rest, "")] if word == "--coef" else [])]
        if given[0] == "--coef" and "=" in given[-1]:
            rules += given[-1].rpartition("=")[::2]
        else:
            left += [word] if value else given
    if not rules:
        return words
    place = left.index("--coefs") if "--coefs" in left else len(left)
    return [*left[:place], "--coefs", *rules, *left[place + 1 :]]
