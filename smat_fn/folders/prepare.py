"""Checks of a merge of folders before any work."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor

from .. import checkpoint, errors, random
from ..errors import check_member, count_problem, flag_problems, problems_of, some_of
from ..merge.parts.coefs import Rules, coefs_of, matches
from ..merge.parts.inputs import coef_problems, of_two_dtypes
from ..merge.parts.merger import Merger
from ..merge.parts.per_expert import Weighted
from ..merge.parts.windows import Scratch
from ..merge.registry import check_options, with_defaults
from .inputs.config_source import Sources, TokenRows
from .inputs.diffusion import copied_metadata
from .inputs.lineage import strangers
from .inputs.opening import inputs_of, open_inputs
from .inputs.reading import Folder, seen
from .inputs.side_files import Files
from .inputs.stacks import folders_of
from .inputs.statistics import with_statistics
from .inputs.tokens import Tokens
from .inputs.vocabulary import Vocabulary
from .streaming.chunks import Job, target, unlike, usual_chunk, written
from .writing import Shard, layout

OutDtype: TypeAlias = Literal["same", "float32", "bfloat16", "float16", "float64"]
_COUNT = "num_batches_tracked"  # of batch norms
_OUT: dict[str, torch.dtype | None] = {
    name: None if name == "same" else getattr(torch, name) for name in get_args(OutDtype)
}
SHARD_SIZE = 5 * 10**9


class Options(TypedDict, total=False):
    """How `merge_folders` and `plan` merge: see there. `prepare` has the defaults."""

    coef: Rules | None
    key: Tensor | None
    out_dtype: OutDtype
    shard_size: int
    chunk: int | None
    workers: int
    overwrite: bool
    device: str
    vocabulary: Vocabulary
    partial: bool
    config_from: str | None
    tokenizer_from: str | None
    chat_template: str | None
    token_rows: TokenRows
    tokens: Tokens | None
    pad_to_multiple_of: int
    heads: Literal["error", "keep"]
    into: str | None


# over 60 lines: its signature names every option
def prepare(
    config: Merger,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    coef: Rules | None = None,
    key: Tensor | None = None,
    out_dtype: OutDtype = "same",
    shard_size: int = SHARD_SIZE,
    chunk: int | None = None,
    workers: int = 1,
    overwrite: bool = False,
    device: str = "cpu",
    vocabulary: Vocabulary = "error",
    partial: bool = False,
    config_from: str | None = None,
    tokenizer_from: str | None = None,
    chat_template: str | None = None,
    token_rows: TokenRows = "base",
    tokens: Tokens | None = None,
    pad_to_multiple_of: int = 1,
    heads: Literal["error", "keep"] = "error",
    into: str | None = None,
) -> tuple[Job, list[Shard]]:
    """The job and the files of its output. Raises: ValueError that lists every problem of options and headers."""
    if not isinstance(config, Merger):
        raise ValueError(f"config is {config!r}, must be the options of a merger, such as Ties(coef=0.4, keep=0.2)")
    config = with_defaults(config)
    if not isinstance(experts, Mapping):
        raise ValueError(f"experts is a {type(experts).__name__}: give a mapping {{name: folder}}")
    sizes = {"shard_size": shard_size, "workers": workers, "pad_to_multiple_of": pad_to_multiple_of}
    sizes |= {} if chunk is None else {"chunk": chunk}
    problems = [text for name, value in sizes.items() for text in count_problem(name, value)]
    problems += problems_of(check_member, "heads", heads, ("error", "keep"))
    problems += problems_of(check_member, "token_rows", token_rows, get_args(TokenRows))
    problems += flag_problems(overwrite=overwrite, partial=partial)
    problems += [*problems_of(out_dtypes, out_dtype), *device_problems(device)]
    if tokenizer_from is None and (tokens or pad_to_multiple_of > 1):
        problems.append("tokens and pad_to_multiple_of require tokenizer_from")
    if tokenizer_from is not None and token_rows != "by-row" and vocabulary != "error":
        problems.append(f"vocabulary {vocabulary!r} is by row, tokenizer_from merges by token: leave one of them out")
    if into is not None:
        others = {"config_from": config_from, "tokenizer_from": tokenizer_from, "partial": partial}
        # the most frequent template is that of the text models, which has no place for images
        others |= {"heads='keep'": heads == "keep", "chat_template='auto'": chat_template == "auto"}
        problems += _into_problems(config, [name for name, asked in others.items() if asked])
    rules = getattr(config, "coef", None) if coef is None else coef
    problems += _merger_problems(config, list(experts), rules, key)
    problems += place_problems(out, (base, *experts.values()), overwrite=overwrite)
    given = inputs_of(base, experts)
    pad = max(pad_to_multiple_of, 1)
    sources = Sources(given, config_from, tokenizer_from, chat_template, token_rows, tokens or {}, pad)
    align, kept = sources.align(based=config.based), sources.heads if heads == "keep" else None
    start, found = open_inputs(base, experts, vocabulary, problems, partial=partial, align=align, heads=kept, into=into)
    floating = [path for path, leaf in start.leaves.items() if leaf.is_floating_point()] if start is not None else []
    notes, files = list[str](), Files()
    if start is not None:
        files = sources.files(start, found, _OUT.get(out_dtype), problems, notes, partial=partial)
        if not config.based:
            problems += _buffer_problems(start, found)
        problems += _absence_problems(config, start, found)
        notes += skip_notes(config, floating)
        if isinstance(rules, Mapping) and hasattr(config, "coef"):
            if config.coef is not None and any(not matches(path, rules) for path in floating):
                rules = {**rules, "*": config.coef}
            problems += problems_of(lambda: coefs_of(floating, rules))
        if (kind := config.statistics()) is not None:
            found = with_statistics(kind, start, experts, found, problems)
    errors.raise_problems(problems)
    assert start is not None
    coefs = {} if rules is None else coefs_of(floating, rules)
    masks = key if config.random else None
    place = device_of(device)
    each = max(1, (usual_chunk(place) if chunk is None else chunk) // workers)
    read = seen(start, *found.values())
    other = frozenset[str]() if config.based else unlike(start, found.values(), each)
    notes += [*same_folders(experts), *strangers(start, found), *([buffers_note(other)] if other else [])]
    if config.based:
        notes += _base_notes(base, experts, start, found, each)
    metadata = copied_metadata(base, start.within or start, notes)
    rest = tuple(notes), workers, other, read, files
    job = Job(config, coefs, masks, start, found, _OUT[out_dtype], each, place, Scratch(), *rest)
    like = {path: leaf.to(target(job, path)) for path, leaf in written(job).leaves.items()}
    if start.root.is_file():
        shard_size = max(shard_size, sum(leaf.nbytes for leaf in like.values()))  # as base, whose readers read one file
    return job, layout(like, shard_size, start.outputs, metadata)


def _into_problems(config: Merger, others: Iterable[str]) -> list[str]:
    """Errors for what a merge into a part of a larger model does not have. Args: others: options that are given."""
    problems = [f"`{name}` is not available with `into`: leave one out" for name in others]
    if config.statistics() is not None:
        problems.append(f"{config.name} is not available with `into`: its statistics are of whole models")
    return problems


def same_folders(experts: Mapping[str, Path]) -> list[str]:
    """Notes on experts that are one folder under several names, by links."""
    names = dict[str, list[str]]()
    for name, path in experts.items():
        names.setdefault(os.path.realpath(path), []).append(repr(name))
    return [
        f"experts {' and '.join(own)} are one folder, {place}: it is merged {len(own)} times"
        for place, own in names.items()
        if len(own) > 1
    ]


def _base_notes(
    base: Path, experts: Mapping[str, Path], start: Folder, found: Mapping[str, Folder], chunk: int
) -> list[str]:
    """Notes on an expert that is base itself, and on buffers of experts that the merged model does not have."""
    own = [name for name, path in experts.items() if os.path.realpath(path) == os.path.realpath(base)]
    notes = [f"expert {name!r} is base itself: its task vector is 0" for name in own]
    differing = unlike(start, (start, *found.values()), chunk)
    counts = {path for path in differing if path.endswith(_COUNT)}  # of every training
    norms = [path.removesuffix(f".{_COUNT}") for path in sorted(counts)]
    if norms := [repr(norm) for norm in norms if f"{norm}.running_var" in start.leaves]:
        notes.append(
            f"running statistics of batch norms ({some_of(norms)}) are not those of the merged "
            "model, however they are merged: compute them again on training data (torch.optim.swa_utils.update_bn)"
        )
    apart = differing - counts
    return notes + ([buffers_note(apart, "differs from base's in an expert")] if apart else [])


def device_of(device: str) -> torch.device:
    """The device of a name, with its number: tensors say cuda:0, which does not equal cuda."""
    place = torch.device(device)
    first = place.type == "cuda" and place.index is None
    return torch.device("cuda", torch.cuda.current_device()) if first else place


def out_dtypes(name: str) -> torch.dtype | None:
    """The dtype of an option ``out_dtype``; None for "same". Raises: ValueError for another name."""
    if name not in _OUT:
        raise ValueError(f"out_dtype is {name!r}, must be one of {', '.join(_OUT)}")
    return _OUT[name]


def place_problems(out: Path, inputs: Iterable[Path], *, overwrite: bool) -> list[str]:
    """Errors for an output that exists, or is one of the inputs."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        return [f"out is {str(out)!r}, which is not UTF-8: the readers of safetensors cannot open files there"]
    problems = problems_of(lambda: checkpoint.refuse_existing(out, overwrite=overwrite))
    above = next((place for place in out.parents if place.is_symlink() or place.exists()), None)
    if above is not None and not above.is_dir():
        what = "a link that leads nowhere" if above.is_symlink() else "a file"
        problems.append(f"out is {out}, but {above} is {what}: remove it, or choose another folder")
    return problems + [
        f"out is {out}, which is, holds or lies in {path}: choose another folder"
        for given in map(Path, inputs)
        for path in folders_of(given)
        if _overlap(out, path)
    ]


def _merger_problems(config: Merger, experts: list[str], rules: Rules | None, key: Tensor | None) -> list[str]:
    problems = []
    if not hasattr(config, "coef"):
        problems += [] if rules is None else [f"coef is {rules}, but {config.name} has none: leave it out"]
    elif rules is None:
        problems.append("coef is not set: pass one")
    elif not isinstance(rules, Mapping):
        problems += coef_problems(rules)
    unset = [name for name, value in vars(config).items() if value is None and name != "coef"]
    problems += [
        f"{name} of {config.name} is not set: "
        + ("name an expert" if name == "task" else "smat_fn.config.resolve takes it from a preset")
        for name in unset
    ]
    if key is None and config.random:
        problems.append("key is not set: make one by smat_fn.random.key(seed)")
    if unset:
        return problems
    # the merger itself knows the rest: on a single coordinate it costs nothing
    coef, mask_key = (1.0 if hasattr(config, "coef") else None), (random.key(0) if key is None else key)
    return problems + problems_of(lambda: check_options(config, experts, key=mask_key, coef=coef))


def _absence_problems(config: Merger, start: Folder, found: Mapping[str, Folder]) -> list[str]:
    """Errors for leaves that some experts only hold the place of."""
    if start.absent:
        return ["base has placeholders, such as A[0:2]~: give layers of a model"]
    if not any(folder.absent for folder in found.values()):
        return []
    if not config.uneven:
        return [
            f"{config.name} needs all experts in every layer: leave out the ~ of their parts, or choose another one"
        ]
    present = dict.fromkeys(
        tuple(name for name, folder in found.items() if path not in folder.absent) for path in start.leaves
    )
    equal = replace(config, weights={}) if isinstance(config, Weighted) else config  # weights name absent ones too
    return [
        f"in some layers there are {len(names)} experts ({', '.join(names)}), too few for {config.name}"
        for names in present
        if not names or equal.problems({name: {} for name in names})
    ]


def device_problems(device: str) -> list[str]:
    """Errors for the name of a device that a merge cannot use."""
    try:
        place = torch.device(device)
    except RuntimeError:
        return [f"device is {device!r}: give cpu or cuda"]
    if place.type not in ("cpu", "cuda"):
        return [f"device is {device!r}: give cpu or cuda"]
    if place.type == "cpu":
        return []
    if not torch.cuda.is_available():
        return [f"device is {device!r}, but torch sees no GPU here: give cpu"]
    last = torch.cuda.device_count() - 1
    return [f"device is {device!r}, but the last GPU is cuda:{last}"] if (place.index or 0) > last else []


def skip_notes(config: Merger, floating: Collection[str]) -> list[str]:
    """Notes on globs of a merger's ``skip`` without a match among its parameters."""
    globs = getattr(config, "skip", ())
    unmatched = (glob for glob in globs if not any(fnmatchcase(path, glob) for path in floating))
    return [f"skip {glob!r} matches no parameter" for glob in unmatched]


def buffers_note(paths: Collection[str], how: str = "differs among the experts") -> str:
    """Note on non-floating-point leaves that differ; without a base to change, those among the experts count."""
    return f"parameter {errors.and_more(map(repr, sorted(paths)))}, not floating-point, {how}: base's is used"


def _overlap(out: Path, path: Path) -> bool:
    a, b = (Path(os.path.realpath(p)) for p in (out, path))  # of a circle of links too
    return a == b or a in b.parents or b in a.parents


def _buffer_problems(start: Folder, experts: Mapping[str, Folder]) -> list[str]:
    """Mergers without a base take non-floating leaves from the experts."""
    return [
        of_two_dtypes(path, folder.leaves[path], folder.label, leaf, "base")
        for folder in experts.values()
        for path, leaf in start.leaves.items()
        if not leaf.is_floating_point() and path in folder.leaves
        if not folder.leaves[path].is_floating_point() and folder.leaves[path].dtype != leaf.dtype
    ]
