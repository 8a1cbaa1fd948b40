"""A model with the tokenizer of another one: rows of new tokens are approximated, all other weights are copied."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .. import checkpoint, errors, tree
from ..errors import check_member, count_problem, problems_of
from ..merge.around.pursuit import Sparse, combined, matching_pursuit, nearest
from ..merge.parts.chunks import CHUNK
from ..merge.parts.windows import Scratch
from ..merge.weight_average import WeightAverage
from .inputs.adapters.peft import is_adapter
from .inputs.hub import local_folder
from .inputs.reading import Folder, config_of, open_folder, seen
from .inputs.side_files import Files, beside
from .inputs.spelling import Spelling, matches, new_ids, spelling_of
from .inputs.stored import Read
from .inputs.tokens import (
    configured_rows,
    leaves_of_tokens,
    of_tokens,
    resized,
    rows_of_tokens,
    tokenizer_of,
    with_tokenizer,
)
from .inputs.vocabulary import one_head
from .prepare import SHARD_SIZE, device_of, device_problems, place_problems
from .run import Describe, Report, room_problems, write_job
from .streaming.chunks import Job
from .writing import Shard, layout, work_folder

Method: TypeAlias = Literal["omp-centred", "omp", "nearest", "subtokens", "mean"]
_BY_ROWS = "omp", "omp-centred", "nearest"  # methods that read the donor's embeddings
_HEADS = "lm_head.weight", "embed_out.weight", "decoder.weight", "projector.weight", "proj_out.weight", "bias"


class Transplant(NamedTuple):
    """An opened model and the tokenizer that it is to get."""

    model: Folder
    donor: Folder  # without leaves where its embeddings are not read
    method: Method
    k: int
    old: Spelling
    new: Spelling
    found: dict[int, int]  # the model's token of every token that both have
    table: Tensor  # the model's row of every row of the output, -1 where it has none
    known: Tensor  # the model's tokens that have a row
    shared: Tensor  # tokens that both have, with a row in the donor
    lacking: Tensor  # tokens that are approximated
    notes: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The model's leaves by token."""
        return _by_token(self.model)

    @property
    def operations(self) -> float:
        """Those of the search for sums."""
        sources = {self.source_of(path) for path in self.paths} if self.donor.leaves else set[str]()
        widths = sum(self.donor.leaves[source].shape[1] for source in sources)
        return 2.0 * len(self.lacking) * len(self.shared) * widths * (1 if self.method == "nearest" else self.k)

    def source_of(self, path: str) -> str:
        """The donor's matrix for one of these leaves: its head for a head, where it has one of its own."""
        found = [own for own in _by_token(self.donor) if self.donor.leaves[own].ndim == 2]
        return next((own for own in found if own.endswith(_HEADS) == path.endswith(_HEADS)), found[0])


def _by_token(folder: Folder) -> list[str]:
    return leaves_of_tokens(folder, rows_of_tokens(folder))


def open_transplant(model: Path, tokenizer_from: Path, *, method: Method = "omp-centred", k: int = 64) -> Transplant:
    """The tokens of both, matched (`spelling.matches`); of weights headers alone are read.

    Args:
        model: folder or hub name of the model.
        tokenizer_from: folder or hub name of the donor, a model; for methods that read no embeddings a tokenizer.
        method: of tokens that the model lacks. omp: `matching_pursuit` of the donor's row over its rows of shared
            tokens, and the same sum of the model's rows; omp-centred: the same of differences from the mean of these
            rows, in both; nearest: the same by `nearest`; subtokens: the mean row of the tokens into which the model's
            tokenizer splits the token's text; mean: the mean row.
        k: number of shared tokens in a sum.

    Raises: ValueError that lists every problem of options, tokenizers and headers.
    """
    problems = [*problems_of(check_member, "method", method, get_args(Method)), *count_problem("k", k)]
    opened, spellings = list[Folder](), list[Spelling]()
    for label, path in {"model": Path(model), "tokenizer_from": Path(tokenizer_from)}.items():
        with errors.collected(problems):
            root = local_folder(label, path)
            spellings.append(_spelling(label, root))
            read = label == "model" or method in _BY_ROWS
            opened.append(_opened(label, root) if read else Folder(label, {}, {}, {}, root))
    errors.raise_problems(problems)
    (own, donor), (old, new) = map(with_tokenizer, opened), spellings
    rows, theirs, ids = rows_of_tokens(own), rows_of_tokens(donor) if donor.leaves else 0, new.tokens()
    found, known = matches(old, new, rows), [i for i in old.tokens() if i < rows]
    padding = iter(sorted({*range(rows)}.difference(known)))  # for the hardware: they stay as far as there are any
    size = max(1 + max(ids), theirs, _configured(donor.root))
    table = torch.tensor([found.get(i, -1) if i in ids else next(padding, -1) for i in range(size)])
    shared = torch.tensor([i for i in found if i < theirs], dtype=torch.long)
    new_ones = [i for i in ids if i not in found]
    lacking = [i for i in new_ones if i < theirs or method not in _BY_ROWS]
    if lacking and method in _BY_ROWS and len(shared) < k:
        way = f"give k {len(shared)}, or" if len(shared) else "give"
        raise ValueError(f"k is {k}, but the model and {donor.root} share {len(shared)} tokens: {way} method subtokens")
    notes = list[str]()
    if lost := len(known) - len({*found.values()}):
        notes.append(f"{lost} tokens of the model are not in the new tokenizer: dropped")
    if rowless := len(new_ones) - len(lacking):
        notes.append(f"{rowless} new tokens have no row in {donor.root}: they get the mean row")
    tensors = table, torch.tensor(known), shared, torch.tensor(lacking, dtype=torch.long)
    return Transplant(own, donor, method, k, old, new, found, *tensors, tuple(notes))


def _spelling(label: str, root: Path) -> Spelling:
    if is_adapter(root):
        raise ValueError(f"{label}: {root} is an adapter: make it a whole model first, by merge.py export")
    if (tokenizer := tokenizer_of(root)) is None:
        raise ValueError(f"{label}: {root} has no tokenizer: give a folder that has one")
    return spelling_of(f"{label}: {root}", tokenizer)


def _opened(label: str, root: Path) -> Folder:
    """A model with embeddings. Raises: ValueError as `open_folder`, and for one without."""
    folder, *_ = one_head(open_folder(label, root), {})
    if not any(of_tokens(path) for path in folder.leaves):
        raise ValueError(f"{label}: {root} has no embeddings of tokens: give a language model")
    rows_of_tokens(folder)
    return folder


def _configured(root: Path) -> int:
    """The number of rows that a config.json names, 0 where it names none."""
    found = configured_rows(config_of(root))
    return found if isinstance(found, int) else 0


def transplanted(asked: Transplant, device: torch.device) -> tuple[Folder, str]:
    """The model with the new rows, which are in memory, as a checkpoint; and their digest.

    Raises: ValueError for embeddings with values that are not finite.
    """
    whole, digest, sums = resized(asked.model, len(asked.table)), hashlib.sha256(), dict[str, Sparse]()
    for path in asked.paths:
        leaf = asked.model.leaf(path)
        made = torch.cat([_approximated(asked, path, leaf, sums, device), _mean(leaf, asked.known).to(leaf.dtype)])
        digest.update(made.contiguous().view(torch.uint8).numpy().tobytes())
        place = torch.full_like(asked.table, -1)  # the mean row, of tokens and padding without another one
        some = (made[:-1] != 0).reshape(len(made) - 1, made[0].numel()).any(1)
        place[asked.lacking] = torch.where(some, torch.arange(len(some)), -1)
        shape = len(asked.table), *leaf.shape[1:]
        read = _reader(asked, path, made, place)
        whole = whole.with_leaf(path, torch.empty(shape, dtype=leaf.dtype, device="meta"), read)
    return whole._replace(stores={**asked.model.stores, **asked.donor.stores}), digest.hexdigest()


def _approximated(asked: Transplant, path: str, leaf: Tensor, sums: dict[str, Sparse], device: torch.device) -> Tensor:
    """The rows of the tokens that the model lacks; 0 where nothing is known of one. Args: sums: by donor's matrix."""
    if asked.method == "mean" or not len(asked.lacking):
        return leaf.new_zeros(len(asked.lacking), *leaf.shape[1:])
    if asked.method == "subtokens":
        texts = asked.new.tokens()
        split = [[i for i in asked.old.split(texts[i][1]) if i < len(leaf)] for i in asked.lacking.tolist()]
        none = leaf.new_zeros(leaf.shape[1:])
        return torch.stack([leaf[own].double().mean(0).to(leaf.dtype) if own else none for own in split])
    if (source := asked.source_of(path)) not in sums:
        rows = asked.donor.leaf(source)
        points, targets = (rows[own].float() for own in (asked.shared, asked.lacking))
        if not (tree.is_finite(points) and tree.is_finite(targets)):
            raise ValueError(f"parameter {source!r} of {asked.donor.root} holds values that are NaN or infinite")
        if asked.method == "omp-centred":
            points, targets = (own - points.mean(0) for own in (points, targets))
        find = nearest if asked.method == "nearest" else matching_pursuit
        found = find(points.to(device), targets.to(device), asked.k)
        sums[source] = found._replace(indices=asked.table[asked.shared][found.indices])
    centre = _mean(leaf, asked.table[asked.shared]) if asked.method == "omp-centred" else None
    made = combined(leaf, sums[source], centre)
    made[~(asked.donor.leaf(source)[asked.lacking] != 0).any(1)] = 0
    return made


def _mean(leaf: Tensor, ids: Tensor) -> Tensor:
    """The mean of some rows, (1, ...), float64."""
    return torch.stack([leaf[some].double().sum(0) for some in ids.split(4096)]).sum(0, keepdim=True) / len(ids)


def _reader(asked: Transplant, path: str, made: Tensor, place: Tensor) -> Read:
    """Rows of the model by its table; where that is -1, rows of ``made`` by ``place``."""
    width = made[0].numel()

    def read(start: int, stop: int) -> Tensor:
        first, last = start // width, -(-stop // width)
        own = asked.table[first:last]
        rows = asked.model.leaf(path).view(-1, width)[own.clamp(min=0)]
        rows[own < 0] = made.view(-1, width)[place[first:last][own < 0]]
        return rows.reshape(-1)[start - first * width : stop - first * width]

    return read


def files_beside(asked: Transplant) -> Files:
    """The files beside the weights: the donor's tokenizer and chat template, the model's others with the new ids."""
    root = asked.model.root

    def ids(config: Mapping[str, Any]) -> dict[str, Any]:
        return new_ids(config, asked.old, asked.new, asked.found)

    changes = dict(resized(asked.model, len(asked.table)).config) | ids(config_of(root))
    if isinstance(inner := changes.get("text_config", config_of(root).get("text_config")), dict):
        changes["text_config"] = inner | ids(inner)
    files = beside(root, root, asked.donor.root, changes=changes, numbers={}, dtype=None, chat_template=None)
    if isinstance(file := files.get("generation_config.json"), Path):
        own = checkpoint.read_json(file)
        files[file.name] = (json.dumps(own | ids(own), indent=2) + "\n").encode()
    return files


def transplant_tokenizer(
    asked: Transplant,
    out: Path,
    *,
    shard_size: int = SHARD_SIZE,
    device: str = "cpu",
    workers: int = 1,
    overwrite: bool = False,
    describe: Describe | None = None,
) -> Report:
    """Write a model whose tokenizer is another model's, as `merge_folders` writes: atomically, in shards.

    A token that both have keeps the model's row in every leaf by token (embeddings, head, its bias). Sums are computed
    in float64 and rounded once to the dtype of the leaf. Rows of an untied head are combined as the donor's head is, or
    as its embeddings, where it ties them. The widths of both models may differ. The output has as many rows as the
    donor; rows of no token are the model's own, else its mean row.

    Args:
        asked: that of `open_transplant`.
        device: of the search for combinations.
        out, shard_size, workers, overwrite, describe: as of `merge_folders`.

    Raises: ValueError as `merge_folders`.
    """
    out = checkpoint.follow(out)
    errors.raise_problems([*output_problems(asked, out, overwrite=overwrite), *device_problems(device)])
    whole, digest = transplanted(asked, device_of(device))
    job = Job(
        WeightAverage(), {}, None, whole, {"model": whole}, None, max(1, CHUNK // workers), torch.device("cpu"),
        Scratch(), (*filter(None, [whole.note]), *asked.notes), workers, frozenset(), seen(whole),
        MappingProxyType(files_beside(asked)),
    )  # fmt: skip
    return write_job(job, shards_of(asked, shard_size), out, describe=describe, overwrite=overwrite, more=digest)


def shards_of(asked: Transplant, shard_size: int) -> list[Shard]:
    """The files of the output."""
    leaves, size = asked.model.leaves, len(asked.table)
    sized = {path: leaves[path].new_empty(size, *leaves[path].shape[1:]) for path in asked.paths}
    return layout(leaves | sized, shard_size, asked.model.outputs)


def output_problems(asked: Transplant, out: Path, *, overwrite: bool) -> list[str]:
    """Errors for an output that exists, or is one of the inputs, and for a disk that is too small."""
    problems = place_problems(out, [asked.model.root, asked.donor.root], overwrite=overwrite)
    return problems or room_problems(work_folder(out), shards_of(asked, SHARD_SIZE))
