"""The models of several tasks in one folder: one vector in shards, and beside each of its leaves every task's mask.

A leaf x of a base is ``vector/x`` in compute dtype and ``mask/0/x``, ``mask/1/x`` …, a bit a coordinate as
``numpy.packbits`` packs them; `TASKS` names the tasks in this order, their scales and γ. A task's model is
θ₀ + γ λ_t m_t ⊙ τ, rounded once, so its bits are those of the merge for this task alone. Other leaves are base's.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Unpack

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import checkpoint, errors, tree
from ..merge.emr import added, magnitudes
from ..merge.parts import arithmetic
from ..merge.parts.arithmetic import zeroed
from ..merge.parts.masked import Masked, of_all_tasks
from ..merge.parts.merger import Merger
from ..merge.parts.windows import in_order
from ..merge.weight_average import WeightAverage
from ..tree import dtype_name
from .files import check_unchanged, followed
from .inputs.diffusion import copied_metadata
from .inputs.reading import TASKS, Folder, indexed
from .inputs.stored import Read, Store
from .prepare import SHARD_SIZE, Options, prepare
from .streaming.chunks import Job, compute_dtype, finite, looped, refuse_values, vectors_of, window_of
from .streaming.survey import Survey
from .writing import Shard, Work, layout_together, shard_file, write_chunk

VECTOR = "vector.safetensors"
INDEX = f"{VECTOR}.index.json"
_Form: TypeAlias = Callable[[int, int], tuple[Tensor, list[Tensor], list[float]]]
# options that a folder of several models has no use for
_OF_A_MODEL = "out_dtype", "device", "config_from", "tokenizer_from", "chat_template", "heads", "into"


class Several(NamedTuple):
    """A folder of the models of all tasks. Raises, where it is opened: ValueError that lists what is broken."""

    root: Path
    scales: dict[str, float]  # λ of every task, in the order of the masks
    coefs: Mapping[str, float]  # γ of leaves; "" for all others
    leaves: dict[str, Tensor]  # of the vector, meta tensors
    stores: dict[Path, Any]  # mapped files
    files: dict[str, Path]  # of every tensor

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, flat and mapped."""
        found: Tensor = self.stores[self.files[name]].get_tensor(name)
        return found.reshape(-1)

    def tensors(self) -> dict[str, Tensor]:
        """All stored tensors by name, memory-mapped."""
        return {name: self.stores[file].get_tensor(name) for name, file in self.files.items()}

    def fits(self, base: Mapping[str, Tensor]) -> bool:
        """Whether the vector has the floating-point leaves of a base, in their shapes."""
        floating = {path: leaf.shape for path, leaf in base.items() if leaf.is_floating_point()}
        return floating == {path: leaf.shape for path, leaf in self.leaves.items()}

    def place(self, task: str | None) -> int:
        """The position of a task in the folder's order. Raises: ValueError that lists the tasks."""
        if task not in self.scales:
            said = "holds models of several tasks: pass --task" if task is None else f"has no task {task!r}"
            raise ValueError(f"{self.root} {said}, one of {', '.join(self.scales)}")
        return list(self.scales).index(task)

    def vector(self, path: str, task: str, start: int, stop: int) -> Tensor:
        """Coordinates [start, stop) of γ λ_t m_t ⊙ τ, in new memory."""
        first = start // 8
        packed = self.tensor(f"mask/{self.place(task)}/{path}")[first : -(-stop // 8)].numpy()
        mask = torch.from_numpy(np.unpackbits(packed)[start - 8 * first :][: stop - start])
        own = zeroed(self.tensor(f"vector/{path}")[start:stop], mask).mul_(self.scales[task])
        return own.mul_(self.coefs.get(path, self.coefs[""]))

    def model(self, task: str, base: Folder) -> Folder:
        """The model of a task in compute dtype, formed while it is read."""

        def reader(path: str) -> Read:
            def read(start: int, stop: int) -> Tensor:
                own = self.vector(path, task, start, stop)
                return own.add_(base.read(path, start, stop).to(own.dtype))

            return read

        stores = {**self.stores, self.root / TASKS: None}  # what is base's is among base's
        reads = {**base.reads, **{path: reader(path) for path in self.leaves}}
        return Folder(f"task {task!r}", {**base.leaves, **self.leaves}, reads, stores, self.root)


def is_several(path: Path) -> bool:
    """Whether a folder holds models of several tasks."""
    return (path / TASKS).is_file()


def prepared(
    config: Merger, base: Path, experts: Mapping[str, Path], out: Path, **options: Unpack[Options]
) -> tuple[Job, list[Shard]]:
    """`prepare` of any merger; one of all tasks gets the files of a folder for all of them.

    Raises: ValueError as `prepare`; of a merger of all tasks for options of a single model.
    """
    if not of_all_tasks(config):
        return prepare(config, base, experts, out, **options)
    one: Any = config
    given: Mapping[str, Any] = options
    usual = {name: option.default for name, option in signature(prepare).parameters.items()}
    unfit = [f"{name}={given[name]!r}" for name in _OF_A_MODEL if given.get(name, usual[name]) != usual[name]]
    unfit += ["vocabulary='pad-with-base'"] if given.get("vocabulary") == "pad-with-base" else []
    problems = [f"`{what}` requires one model: give `task`, or leave it out" for what in unfit]
    job = None
    with errors.collected(problems):
        job, _ = prepare(replace(one, task=next(iter(experts), "")), base, experts, out, **options)
        alone, _ = prepare(WeightAverage(), base, {"base": base}, out, overwrite=True)
        problems += [
            f"parameter {path!r} is not one of base as it is stored: a folder of all tasks cannot hold it, give `task`"
            for path, leaf in job.base.leaves.items()
            if path not in alone.base.leaves or alone.base.leaves[path].shape != leaf.shape
        ]
    if job is not None and not job.coefs:
        problems.append("base has no floating-point parameters: there is nothing to merge")
    errors.raise_problems(problems)
    assert job is not None
    groups = {}
    for path in job.coefs:
        leaf, size = job.base.leaves[path], -(-job.base.leaves[path].numel() // 8)
        groups[path] = {f"vector/{path}": torch.empty(leaf.shape, dtype=compute_dtype(job, path), device="meta")}
        groups[path] |= {
            f"mask/{i}/{path}": torch.empty(size, dtype=torch.uint8, device="meta") for i in range(len(experts))
        }
    shards = layout_together(groups, options.get("shard_size", SHARD_SIZE), VECTOR)
    of_one_model = list[str]()
    copied_metadata(base, job.base, of_one_model)  # which a task's model gets when it is exported
    notes = tuple(note for note in job.notes if note not in of_one_model)
    return job._replace(config=config, beside={}, notes=notes), shards


def write_several(job: Job, survey: Survey, shards: Sequence[Shard], work: Work) -> dict[str, bytes]:
    """Write the shards that the progress does not name, and note each in it with its sums of magnitudes by task.

    Returns: `TASKS`.
    """
    config, count = job.config, len(job.experts)
    assert isinstance(config, Masked)
    for shard in shards:
        if shard.file not in work.progress["shards"]:
            found: dict[str, list[list[float]]] = {path: [] for path in _paths(shard)}
            with shard_file(work.folder, shard) as descriptor, followed(descriptor) as (digest, reached):
                for path, sums, end in in_order(_blocks(job, shard, descriptor), job.workers):
                    found[path].append(sums)
                    reached(end)
                reached(shard.size)
            # the first two are those of `merge_shards`: nothing is rounded here
            every = [0.0, 0.0, *chain.from_iterable(added(sums, 2 * count) for sums in found.values())]
            work.progress["shards"][shard.file] = {"sums": every, "sha256": digest.result()}
            work.save()
    sums_of = dict[str, Sequence[float]]()
    for shard in shards:
        noted = work.progress["shards"][shard.file]["sums"][2:]
        for i, path in enumerate(_paths(shard)):
            sums_of[path] = noted[2 * count * i : 2 * count * (i + 1)]
    scales = {
        name: config.scale((job.base.leaves[path].numel(), sums_of[path][2 * i : 2 * i + 2]) for path in job.coefs)
        for i, name in enumerate(job.experts)
    }
    common_coef = next(iter(job.coefs.values()))
    coefs = {"": common_coef, **{path: coef for path, coef in job.coefs.items() if coef != common_coef}}
    facts = {"merger": config.name, "scales": scales, "coefs": coefs}
    return {TASKS: (json.dumps(facts, indent=2, allow_nan=False) + "\n").encode()}


def _paths(shard: Shard) -> list[str]:
    return [name.removeprefix("vector/") for name in shard.offsets if name.startswith("vector/")]


def _blocks(job: Job, shard: Shard, descriptor: int) -> Iterator[Callable[[], tuple[str, list[float], int]]]:
    """Tasks that write a block of a leaf each: its path, its `magnitudes` by expert, the end of its vector in the file.

    Vectors lie before all masks, in the order of the tasks (`writing.layout_together`).
    """

    def write(path: str, start: int, stop: int, form: _Form) -> tuple[str, list[float], int]:
        vector, masks, sums = form(start, stop)
        begin = shard.offsets[f"vector/{path}"] + start * vector.itemsize
        write_chunk(descriptor, vector, begin)
        for i, mask in enumerate(masks):
            write_chunk(descriptor, mask, shard.offsets[f"mask/{i}/{path}"] + start // 8)
        return path, sums, begin + vector.nbytes

    for path in _paths(shard):
        check_unchanged(job.seen)  # a mapped file that was cut kills the process when it is read
        size, form = job.base.leaves[path].numel(), _by_loop(job, path) or _plain(job, path)
        for start in range(0, size, arithmetic.BLOCK):
            yield partial(write, path, start, min(start + arithmetic.BLOCK, size), form)


def _plain(job: Job, path: str) -> _Form:
    """A block's vector, packed masks, and `magnitudes` by expert, by torch's operations."""
    config, dtype = job.config, compute_dtype(job, path)
    assert isinstance(config, Masked)

    def form(start: int, stop: int) -> tuple[Tensor, list[Tensor], list[float]]:
        deltas = list(vectors_of(job, path, start, stop, dtype))
        if not finite(deltas):
            refuse_values(job, path, deltas)
        vector, masks = config.shared(deltas)
        if not tree.is_finite(vector):
            raise _too_large(path, dtype)
        packed = [torch.from_numpy(np.packbits(mask.numpy())) for mask in masks]
        if not config.scaled:
            return vector, packed, [0.0, 0.0] * len(deltas)
        kept = (magnitudes(delta, zeroed(vector, mask)) for delta, mask in zip(deltas, masks, strict=True))
        return vector, packed, list(chain.from_iterable(kept))

    return form


def _by_loop(job: Job, path: str) -> _Form | None:
    """`_plain` by a compiled loop, bit-identical; None where none reads the leaf."""
    config = job.config
    assert isinstance(config, Masked)
    loop = config.shared_by_loop() if looped(job, path) else None
    if loop is None:
        return None
    window, nothing = window_of(job, path), torch.empty(0, device="cpu")

    def form(start: int, stop: int) -> tuple[Tensor, list[Tensor], list[float]]:
        found = loop(window(start, stop, nothing))
        if not found.finite:
            refuse_values(job, path, list(vectors_of(job, path, start, stop, torch.float32)))
        if not found.fits:
            raise _too_large(path, torch.float32)
        return found.vector, list(found.masks), found.sums

    return form


def _too_large(path: str, dtype: torch.dtype) -> ValueError:
    return ValueError(f"parameter {path!r}: the merged vector exceeds the range of {dtype}")


def open_several(path: Path) -> Several:
    """Read the headers of a folder of all tasks. Raises: ValueError that lists what is missing or broken."""
    problems, scales, coefs = list[str](), dict[str, float](), dict[str, float]()
    try:
        facts = checkpoint.read_json(path / TASKS)
        scales = {str(name): float(scale) for name, scale in facts["scales"].items()}
        coefs = {"": float(facts["coefs"][""])} | {str(leaf): float(coef) for leaf, coef in facts["coefs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{path / TASKS} cannot be read ({error!r}): copy the folder again")
    files: dict[str, Path] = {}
    stores: dict[Path, Any] = {}
    headers: dict[str, Tensor] = {}
    found = [path / VECTOR] if (path / VECTOR).exists() else list(indexed(str(path), path, problems, INDEX))
    for file in found:
        try:
            stores[file] = Store(file)
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} cannot be read ({error}): copy the folder again")
            continue
        names = {name: stores[file].header(name) for name in stores[file].names}
        headers |= {name: leaf for name, leaf in names.items() if leaf is not None}
        files |= dict.fromkeys(names, file)
    leaves = {name.removeprefix("vector/"): leaf for name, leaf in headers.items() if name.startswith("vector/")}
    for leaf_path, leaf in leaves.items():
        if not leaf.is_floating_point():
            problems.append(f"{path}: 'vector/{leaf_path}' is {_said(leaf)}: copy the folder again")
        for i, task in enumerate(scales):
            mask, size = headers.get(f"mask/{i}/{leaf_path}"), -(-leaf.numel() // 8)
            if mask is None or mask.dtype != torch.uint8 or tuple(mask.shape) != (size,):
                said = "is missing" if mask is None else f"is {_said(mask)}, must be uint8 ({size},)"
                problems.append(f"{path}: the mask of task {task!r} for {leaf_path!r} {said}: copy the folder again")
    errors.raise_problems(problems)
    return Several(path, scales, coefs, leaves, stores, files)


def _said(leaf: Tensor) -> str:
    return f"{dtype_name(leaf)} {tuple(leaf.shape)}"


def task_params(model: Path, task: str, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model of a task in memory, bit-identical to `export_task`.

    Args: base: flat leaves of the base of that merge.
    Raises: ValueError as `export_task`.
    """
    found = open_several(model)
    found.place(task)
    if not found.fits(base):
        raise ValueError(
            f"{model} has other parameters than the base it is to be scored with: merge again from that base"
        )

    def made(path: str, leaf: Tensor) -> Tensor:
        if path not in found.leaves:
            return leaf.clone()
        own = found.vector(path, task, 0, leaf.numel())
        return own.add_(leaf.reshape(-1).to("cpu", own.dtype)).to(leaf.dtype).view(leaf.shape)

    return {path: made(path, leaf) for path, leaf in base.items()}
