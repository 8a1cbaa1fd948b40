"""Embeddings by token: rows of all models in the order of one tokenizer, base's, an expert's, or the union of all."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ... import errors
from .optional_leaves import may_be_copy
from .reading import Folder, config_of
from .side_files import TOKENIZER, Files, files_of
from .stored import Read
from .vocabulary import by_token

Tokens: TypeAlias = Mapping[str, Mapping[str, Any]]  # by token: "model" (and "token" or "id" there) or "zero"; "force"

_BIASES = "predictions.bias", "vocab_projector.bias", "decoder.bias"  # of heads that `by_token` does not know: of BERT


class Aligned(NamedTuple):
    """Models whose rows are those of one tokenizer."""

    base: Folder
    experts: dict[str, Folder]
    tokenizer: Path | Files  # of the output
    numbers: dict[int, int]  # new ids of base's tokens, where they differ
    notes: tuple[str, ...] = ()


# over 60 lines: its docstring explains every argument
def aligned(
    base: Folder,
    experts: Mapping[str, Folder],
    source: str,
    *,
    based: bool,
    mean: bool = False,
    tokens: Tokens = MappingProxyType({}),
    pad: int = 1,
) -> Aligned:
    """Embeddings and heads by token, as mergekit's ``tokenizer_source`` has them.

    A token that a model does not have takes base's row where base is merged and has it, else that of the one model
    that has it, or the mean of several; a token that none has is 0. Rows are those of all tokens of the output's
    tokenizer, also of those behind the last row of the model that it is from; a union leaves such tokens of experts
    out.

    Args:
        source: "base", "union", the name of an expert, or the folder of another tokenizer.
        based: base is merged; else only where it is an expert too.
        mean: base's row comes before none, the mean of all that have the token is taken.
        tokens: where rows of these tokens are from, instead: that of a "model" ("base" or an expert), of this token or
            of its "token" or row "id", or "zero"; for models that lack the token, with "force" for all. Tokens that the
            tokenizer lacks are added to it.
        pad: rows are a multiple of it; those behind the last token are the mean of a model's others.
    Raises: ValueError that lists the models without a tokenizer that transformers reads, an expert without one as the
        source, a union with tokens of base beyond its rows, and those of ``tokens`` without a row.
    """
    models = {name: with_tokenizer(folder) for name, folder in {"base": base, **experts}.items()}
    problems, found = list[str](), dict[str, Any]()
    for name, folder in models.items():
        with errors.collected(problems, folder.label):
            found[name] = tokenizer_of(folder.root)
    if found.get("base") is None and not problems:
        problems.append(f"base: {base.root} has no tokenizer, so rows match no tokens: leave out `tokenizer_from`")
    elif source in found and found[source] is None:
        problems.append(without_tokenizer(source, models[source].root))
    errors.raise_problems(problems)
    rows = {name: rows_of_tokens(folder) for name, folder in models.items()}
    own = {name: tokenizer or found["base"] for name, tokenizer in found.items()}
    known = {name: dict(tokenizer.get_vocab()) for name, tokenizer in own.items()}
    words = {
        name: {token: i for token, i in vocabulary.items() if i < rows[name]} for name, vocabulary in known.items()
    }
    files, wanted = _chosen(source, models, own, words, known)
    files, wanted = _with_tokens(files, wanted, [token for token in tokens if token not in wanted])
    padded = -(-(1 + max(wanted.values())) // pad) * pad
    alike = all(table == wanted for table in words.values()) and not tokens and len(set(rows.values())) == 1
    if alike and (pad == 1 or padded == rows["base"]):  # padding rows are merged as they are
        start = models.pop("base")
        return Aligned(start, models, files, {}, _notes(words, known, wanted, set()))
    taking = [name for name in models if name != "base" or based]
    anchor = "base" if based else next((name for name in experts if models[name].root == base.root), None)
    anchor = None if mean else anchor
    size = 1 + max(wanted.values())
    table = {name: _table(wanted, words[name], size) for name in models}
    donors = _donors(table, taking, anchor, size)
    rowless = _rowless(wanted, table, taking) - tokens.keys()
    _place_tokens(tokens, models, wanted, table, donors, known, rows)
    paths = leaves_of_tokens(base, rows["base"])
    fitted = dict(models)
    for name, folder in models.items():
        for path in paths:
            holders = [(models[other].leaves[path], other) for other in taking if path in models[other].leaves]
            dtype = folder.leaves[path].dtype
            for leaf, _ in holders:
                dtype = torch.promote_types(dtype, leaf.dtype)
            shape = padded, *folder.leaves[path].shape[1:]
            dtype = base.leaves[path].dtype if name == "base" else dtype
            others = {other: (models[other], donors[other]) for _, other in holders}
            read = _reader(folder, path, table[name], others, dtype)
            if padded > size:
                read = _padded(read, size, folder.leaves[path].numel() // len(folder.leaves[path]))
            fitted[name] = fitted[name].with_leaf(path, torch.empty(shape, dtype=dtype, device="meta"), read)
    changed = {i: wanted[token] for token, i in words["base"].items() if token in wanted and wanted[token] != i}
    start = fitted.pop("base")
    return Aligned(resized(start, padded), fitted, files, changed, _notes(words, known, wanted, rowless))


def without_tokenizer(source: str, root: Path) -> str:
    """The error for a source of the tokenizer that has none."""
    return (
        f"tokenizer_from is {source!r}, but {root} has no tokenizer: give base, union, or an expert or a folder that "
        "has one"
    )


def _chosen(
    source: str,
    models: Mapping[str, Folder],
    own: Mapping[str, Any],
    words: Mapping[str, Mapping[str, int]],
    known: Mapping[str, Mapping[str, int]],
) -> tuple[Path | Files, dict[str, int]]:
    """The output's tokenizer as files, and its tokens by id."""
    if source == "union":
        return _union(own, words)
    if source in models:
        return models[source].root, dict(known[source])
    tokenizer = tokenizer_of(Path(source))
    if tokenizer is None:
        raise ValueError(f"tokenizer_from is {source!r}: must be base, union, an expert's name or a folder of one")
    return Path(source), dict(tokenizer.get_vocab())


def _union(own: Mapping[str, Any], words: Mapping[str, Mapping[str, int]]) -> tuple[Files, dict[str, int]]:
    """Base's tokenizer with the tokens of all others at its end, in their order; as in mergekit, those with a row."""
    beyond = sorted(token for token, i in own["base"].get_vocab().items() if token not in words["base"])
    if beyond:
        raise ValueError(
            f"base has {len(beyond)} tokens without a row, such as {beyond[0]!r}: a union needs a row for each of them"
        )
    with TemporaryDirectory() as folder:
        own["base"].save_pretrained(folder)
        union = tokenizer_of(Path(folder))
        special: dict[str, Any] = {}
        for name, tokenizer in own.items():
            added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
            plain = [token for token in sorted(words[name], key=words[name].__getitem__) if token not in added]
            known = union.get_vocab()
            union.add_tokens([token for token in plain if token not in known])
            special = {token: kind for token, kind in added.items() if token in words[name]} | special
        union.add_tokens(list(special.values()))
    return _saved(union), dict(union.get_vocab())


def _with_tokens(
    files: Path | Files, wanted: dict[str, int], new: Sequence[str]
) -> tuple[Path | Files, dict[str, int]]:
    """A tokenizer with more tokens at its end."""
    if not new:
        return files, wanted
    with TemporaryDirectory() as place:
        for name, file in (files_of(files, TOKENIZER) if isinstance(files, Path) else files).items():
            (Path(place) / name).parent.mkdir(exist_ok=True)
            (Path(place) / name).write_bytes(file.read_bytes() if isinstance(file, Path) else file)
        tokenizer = tokenizer_of(Path(place))
    tokenizer.add_tokens(list(new))
    return _saved(tokenizer), dict(tokenizer.get_vocab())


def _saved(tokenizer: Any) -> Files:
    """The files of a tokenizer."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {name: (Path(folder) / name).read_bytes() for name in files_of(Path(folder), TOKENIZER)}


def _place_tokens(
    tokens: Tokens,
    models: Mapping[str, Folder],
    wanted: Mapping[str, int],
    table: Mapping[str, Tensor],
    donors: Mapping[str, Tensor],
    known: Mapping[str, Mapping[str, int]],
    rows: Mapping[str, int],
) -> None:
    """Write the rows of ``tokens`` into the tables. Raises: ValueError that lists those without a row."""
    problems, places = list[str](), {token: wanted[token] for token in tokens}
    before = {name: own.clone() for name, own in table.items()}
    for token, own in tokens.items():
        i = places[token]
        lacking = [name for name in donors if before[name][i] < 0]
        if not lacking and not own.get("force"):
            continue
        giver, row = _giver(own, i, models, before, donors, known)
        if not own.get("zero") and not 0 <= row < rows.get(giver, 0):
            what = (
                f"has no row in {giver}" if giver in donors else "names no merged model" if giver else "names no source"
            )
            need = "force needs one" if own.get("force") else f"{lacking[0]} lacks it"
            problems.append(f"tokens: {token!r} {what}, but {need}: name a model that has it, or zero")
            continue
        for name in donors:
            donors[name][i] = row if name == giver and not own.get("zero") else -1
        for name in table if own.get("force") else ():
            table[name][i] = -1
    errors.raise_problems(problems)


def _giver(
    own: Mapping[str, Any],
    i: int,
    models: Mapping[str, Folder],
    table: Mapping[str, Tensor],
    donors: Mapping[str, Tensor],
    known: Mapping[str, Mapping[str, int]],
) -> tuple[str, int]:
    """The model that gives a token's row, "" where none is named, and its row there; -1 where it has none."""
    giver = str(own.get("model", ""))
    if giver not in donors and giver in models:  # base, where it is one of the experts
        giver = next((name for name in donors if models[name].root == models[giver].root), giver)
    if giver not in donors:
        return giver, -1
    if "id" in own:
        return giver, int(own["id"])
    return giver, known[giver].get(own["token"], -1) if "token" in own else int(table[giver][i])


def _padded(read: Read, size: int, width: int) -> Read:
    """Rows behind ``size`` that are the mean of those before."""

    @cache
    def mean() -> Tensor:
        total = torch.zeros(width, dtype=torch.float64)
        for first in range(0, size, 1024):
            total += read(first * width, min(first + 1024, size) * width).view(-1, width).sum(0, dtype=torch.float64)
        return total / size

    def padded(start: int, stop: int) -> Tensor:
        end = size * width
        own = read(min(start, end), min(stop, end))
        if stop <= end:
            return own
        return torch.cat([own, mean()[torch.arange(max(start, end), stop) % width].to(own.dtype)])

    return padded


def with_tokenizer(folder: Folder) -> Folder:
    """A model with the files of its tokenizer among those that are read: they say which row is of which token."""
    return folder._replace(stores={**folder.stores, **dict.fromkeys(files_of(folder.root, TOKENIZER).values())})


def tokenizer_of(root: Path) -> Any:
    """The tokenizer of a checkpoint, None where it has none. Raises: ValueError for one that cannot be read."""
    import transformers

    if not files_of(root, ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "*.spm")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(root, trust_remote_code=False)
    except Exception as error:  # of many kinds: the packages of tokenizers and transformers check files each its way
        raise ValueError(f"the tokenizer of {root} cannot be read ({errors.first_line(error)})") from error


def of_tokens(path: str) -> bool:
    """Whether a leaf has an entry for every token, by its name: embeddings, heads and their biases."""
    return may_be_copy(path) or path.endswith(_BIASES)


def leaves_of_tokens(folder: Folder, rows: int) -> list[str]:
    """The leaves with an entry for every token: embeddings, heads and their biases. Args: rows: of `rows_of_tokens`."""
    return [path for path, leaf in folder.leaves.items() if of_tokens(path) and leaf.ndim and len(leaf) == rows]


def configured_rows(config: Mapping[str, Any]) -> Any:
    """The number of tokens that a configuration names; None where it names none."""
    return config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))


def rows_of_tokens(folder: Folder) -> int:
    """Rows of the embeddings. Raises: ValueError where no leaf, or leaves of several sizes, hold them."""
    sizes = {len(leaf) for path, leaf in folder.leaves.items() if by_token(path) and leaf.ndim == 2}
    config = config_of(folder.root) | dict(folder.config)
    known = configured_rows(config)
    if known in sizes:  # others may be those of segments (BERT) or of a projection
        return int(known)
    if len(sizes) != 1:
        raise ValueError(f"{folder.label}: embeddings and heads have {sorted(sizes)} rows, must have one number")
    return sizes.pop()


def _table(wanted: Mapping[str, int], own: Mapping[str, int], size: int) -> Tensor:
    """The row that a model has for every token of the output, -1 where it has none."""
    table = torch.full((size,), -1)
    for token, i in wanted.items():
        table[i] = own.get(token, -1)
    return table


def _donors(table: Mapping[str, Tensor], taking: Sequence[str], anchor: str | None, size: int) -> dict[str, Tensor]:
    """The rows of every model that replace rows that another model lacks; -1 elsewhere."""
    by_anchor = torch.zeros(size, dtype=torch.bool) if anchor is None else table[anchor] >= 0
    return {
        name: torch.where(by_anchor, torch.tensor(-1), table[name]) if name != anchor else table[name].clone()
        for name in taking
    }


def _reader(
    folder: Folder, path: str, table: Tensor, donors: Mapping[str, tuple[Folder, Tensor]], dtype: torch.dtype
) -> Read:
    width = folder.leaves[path].numel() // len(folder.leaves[path])
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rows_of(other: Folder, numbers: Tensor) -> Tensor:
        leaf = other.leaves[path]
        return other.read(path, 0, leaf.numel()).view(len(leaf), width)[numbers]

    def read(start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=dtype)
        first, last = start // width, -(-stop // width)
        own = table[first:last]
        block = rows_of(folder, own.clamp(min=0)).to(dtype)
        if bool((own < 0).any()):
            missing = (own < 0).nonzero().squeeze(1)
            total, count = torch.zeros(len(missing), width, dtype=wide), torch.zeros(len(missing), 1, dtype=wide)
            for other, numbers in donors.values():
                has = (taken := numbers[first:last][missing]) >= 0
                total[has] += rows_of(other, taken[has]).to(wide)
                count[has] += 1
            block[missing] = (total / count.clamp(min=1)).to(dtype)
        return block.reshape(-1)[start - first * width : stop - first * width]

    return read


def resized(base: Folder, size: int) -> Folder:
    """Base with its number of tokens in config.json."""
    config = config_of(base.root) | dict(base.config)
    if "vocab_size" in config:
        return base._replace(config={**base.config, "vocab_size": size})
    if isinstance(inner := config.get("text_config"), dict):
        return base._replace(config={**base.config, "text_config": {**inner, "vocab_size": size}})
    return base


def _rowless(wanted: Mapping[str, int], table: Mapping[str, Tensor], taking: Sequence[str]) -> set[str]:
    """Tokens of the output that no merged model has a row for."""
    held = torch.stack([table[name] >= 0 for name in taking]).any(0).tolist()
    return {token for token, i in wanted.items() if not held[i]}


def _notes(
    words: Mapping[str, Mapping[str, int]],
    known: Mapping[str, Mapping[str, int]],
    wanted: Mapping[str, int],
    rowless: set[str],
) -> tuple[str, ...]:
    lacking = {name: len(wanted.keys() - own.keys() - rowless) for name, own in words.items()}
    said = [f"{count} in {name}" for name, count in lacking.items() if count]
    lost = {token for own in words.values() for token in own} - wanted.keys()
    behind = {token for own in known.values() for token in own} - wanted.keys() - lost
    notes = [f"of {len(wanted)} tokens {', '.join(said)} have no row: other models' rows are used"] if said else []
    notes += [f"{_some(rowless)} no row in any merged model: filled with 0"] if rowless else []
    notes += [f"{len(lost)} tokens, such as {min(lost)!r}, are not in the output's tokenizer: dropped"] if lost else []
    notes += [f"{_some(behind)} no row in any model: left out of the output's tokenizer"] if behind else []
    return tuple(notes)


def _some(tokens: Collection[str]) -> str:
    first = repr(min(tokens))
    return f"the token {first} has" if len(tokens) == 1 else f"{len(tokens)} tokens, such as {first}, have"
