"""Checkpoint folders in Hugging Face's layout: headers first, then flat ranges of leaves from mapped files."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoint import INDEX, WEIGHTS, read_json
from ...errors import first_line, some_of
from ...tree import dtype_name, unwrapped
from ..files import Identity, identity

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DIFFUSION, PIPELINE = "diffusion_pytorch_model.safetensors", "model_index.json"  # of diffusers
DIFFUSION_INDEX = f"{DIFFUSION}.index.json"
MODULES, ROUTER = "modules.json", "router_config.json"  # of sentence-transformers
SUFFIXES = ".safetensors", ".sft"  # of one format
PICKLES = ".bin", ".pt", ".pth", ".ckpt", ".tar"  # of torch.save; timm writes .pth.tar
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # what is read without safetensors
TASKS = "tasks.json"  # of models of several tasks: see `several`
_OF_TRAINERS = "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt"  # beside weights
_SHARDED = "pytorch_model_fsdp_*", "global_step*", "*.distcp"
_STARTS = WEIGHTS, INDEX, "adapter_config.json", PICKLED, PICKLED_INDEX
_QUANTISED = (  # last parts of leaf names: GPTQ and AWQ, bitsandbytes, compressed-tensors, fp8, HQQ, MXFP4
    *("qweight", "qzeros", "g_idx"),
    *("SCB", "absmax", "quant_map", "nested_absmax", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_scale_inv", "W_q"),
)
_SHARD = re.compile(r"-\d+-of-\d+\.(safetensors|sft|bin)$")
FACTOR = re.compile(r"\.(lora[._]|lora_linear_layer\.|hada_|lokr_)|_lora\.(down|up)\.")  # LoRA, LoHa, LoKr
_DEQUANTISED = "merge the checkpoint it was made from, or a dequantised copy"
_SAFE = "save the state dict with safetensors.torch.save_file, or the model with save_pretrained"
_POINTER = b"version https://git-lfs."
_MODEL = re.compile(r"(model|module|net|network|state_dict|params)(_.+)?|.+_state_dict|ema")  # keys of training scripts

Read: TypeAlias = Callable[[int, int], Tensor]  # flat coordinates [start, stop) of a leaf


class Store:
    """A mapped safetensors file. Tensors just read stay mapped: mapping one costs as much as a small chunk."""

    def __init__(self, file: Path) -> None:
        self.identity = identity(_regular(file))
        store: Any = safe_open(file, framework="pt")
        self.get_tensor: Callable[[str], Tensor] = lru_cache(maxsize=4)(store.get_tensor)
        self.names: list[str] = store.offset_keys()
        self.metadata: dict[str, str] = store.metadata() or {}
        self._slice = store.get_slice

    def code(self, name: str) -> str:
        """How a tensor is stored: "BF16"."""
        return self._slice(name).get_dtype()

    def header(self, name: str) -> Tensor | None:
        """Shape and dtype of a tensor, as a meta tensor; None for a dtype that cannot be merged."""
        code = self.code(name)
        shape = self._slice(name).get_shape()
        try:
            return torch.empty(shape, dtype=DTYPES[code], device="meta") if code in DTYPES else None
        except RuntimeError:  # a shape such as (0, 2**62, 2**62), whose strides torch cannot count
            return None


def _regular(file: Path) -> Path:
    """The file. Raises: OSError for a folder or a pipe, which would never end; ValueError for a pointer of Git LFS."""
    if file.exists() and not file.is_file():
        raise OSError("it is not a file")
    with suppress(OSError), file.open("rb") as found:
        if found.read(len(_POINTER)) == _POINTER:  # what git leaves in place of a file that it did not fetch
            raise ValueError(f"{file} is a pointer of Git LFS: fetch the file by git lfs pull")
    return file


def _named(found: object) -> bool:
    """Whether an object is a dict of tensors by name."""
    return isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())


def _plain(leaf: Tensor) -> bool:
    """Whether a tensor's values lie in memory as its shape says: not for one that is sparse, nested or meta."""
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta


def _inner(found: object) -> dict[str, dict[str, Tensor]]:
    """The state dicts in the dict of a training script, beside its epoch and its optimizer."""
    if not isinstance(found, dict) or _named(found):
        return {}
    return {key: own for key, own in found.items() if _named(own) and own and _MODEL.fullmatch(str(key))}


class Pickled:
    """A mapped file of ``torch.save``, read without running any of its code."""

    def __init__(self, file: Path) -> None:
        self.identity = identity(_regular(file))
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle's, zip's, torch's
            raise ValueError(
                f"{file} holds pickled weights that cannot be read safely ({first_line(error)}): {_SAFE}"
            ) from error
        inner = _inner(found)
        if len(inner) > 1:
            raise ValueError(f"{file} holds several sets of weights, {', '.join(map(repr, inner))}: {_SAFE}")
        found = next(iter(inner.values()), found)
        if not _named(found):
            keys = some_of(map(repr, found)) if isinstance(found, dict) else ""
            what = f"a dict of {keys}" if keys else f"a {type(found).__name__}"
            raise ValueError(f"{file} holds {what}, not pickled weights by name: {_SAFE}")
        if odd := next((name for name, leaf in found.items() if not _plain(leaf)), None):
            raise ValueError(f"{file} holds {odd!r}, a tensor that is sparse, nested or without values (meta): {_SAFE}")
        self._leaves = found
        self.names: list[str] = list(found)
        self.metadata: dict[str, str] = {}

    def get_tensor(self, name: str) -> Tensor:
        """A leaf as a memory-mapped tensor."""
        return self._leaves[name].detach()

    def code(self, name: str) -> str:
        """How a tensor is stored: "bfloat16"."""
        return dtype_name(self._leaves[name])

    def header(self, name: str) -> Tensor | None:
        """Shape and dtype of a leaf, as `Store.header`."""
        leaf = self._leaves[name]
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if leaf.dtype in DTYPES.values() else None


class Folder(NamedTuple):
    """A checkpoint on disk. ``leaves`` are meta tensors in the order of its files; `read` gives their values."""

    label: str
    leaves: dict[str, Tensor]
    reads: Mapping[str, Read]  # of every leaf: as it is stored, or formed from others
    stores: dict[Path, Any]  # mapped files; None for one that only says how to read the others
    root: Path = Path()
    config: Mapping[str, Any] = MappingProxyType({})  # fields that differ from config.json in ``root``
    outputs: Mapping[str, str] = MappingProxyType({})  # other files than `WEIGHTS` that hold leaves, by their prefix
    note: str = ""  # what a user should know of how it was read
    absent: frozenset[str] = frozenset()  # leaves that only hold the place: the model has no such layers
    within: "Folder | None" = None  # the whole model that these leaves are a part of, where it is written

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Flat coordinates [start, stop) of a leaf, not to be written to: mostly a view of the mapped file."""
        return self.reads[path](start, stop)

    def leaf(self, path: str) -> Tensor:
        """A whole leaf in its shape, as `read` gives it."""
        return self.read(path, 0, self.leaves[path].numel()).view(self.leaves[path].shape)

    def tensors(self) -> dict[str, Tensor]:
        """All leaves, each as `leaf` gives it."""
        return {path: self.leaf(path) for path in self.leaves}

    def with_leaf(self, path: str, leaf: Tensor, read: Read) -> "Folder":
        """The same checkpoint with a leaf that is read in another way."""
        return self._replace(leaves={**self.leaves, path: leaf}, reads={**self.reads, path: read})

    def with_leaves_of(self, other: "Folder", paths: Collection[str]) -> "Folder":
        """The same checkpoint with some leaves of another one."""
        leaves = {path: other.leaves[path] for path in paths}
        reads = {path: other.reads[path] for path in paths}
        return self._replace(leaves={**self.leaves, **leaves}, reads={**self.reads, **reads})

    def without(self, *paths: str) -> "Folder":
        """The same checkpoint without some leaves."""
        return self._replace(leaves={name: leaf for name, leaf in self.leaves.items() if name not in paths})

    def named(self, names: Mapping[str, str]) -> "Folder":
        """The same checkpoint with other names: the new one by the old one."""
        leaves = {names[path]: leaf for path, leaf in self.leaves.items()}
        return self._replace(leaves=leaves, reads={names[path]: self.reads[path] for path in self.leaves})

    def noted(self, *notes: str) -> "Folder":
        """The same checkpoint with more notes."""
        return self._replace(note="; ".join(filter(None, (self.note, *notes))))


def seen(*folders: Folder) -> dict[Path, Identity | None]:
    """The identity of every file of some checkpoints, as it was when the file was opened."""
    stores = {file: store for folder in folders for file, store in folder.stores.items()}
    return {file: identity(file) if store is None else store.identity for file, store in stores.items()}


def open_folder(label: str, path: Path) -> Folder:
    """Read the headers of a checkpoint folder; no tensor data is read.

    Raises: ValueError that lists what is missing, broken or of a kind that cannot be merged, by name.
    """
    problems: list[str] = []
    modules = _modules(label, path, problems)
    whole = {path / prefix for prefix in modules}
    own_files = _files(label, path, problems, whole)
    wanted = [("", *pair) for pair in own_files.items()]
    wanted += [(prefix, *pair) for prefix, placed in modules.items() for pair in placed.items()]
    stores: dict[Path, Any] = {}
    leaves: dict[str, Tensor] = {}
    reads: dict[str, Read] = {}
    spelled: dict[str, str] = {}  # the stored name of each leaf
    for prefix, file, names in wanted:
        try:
            store = Pickled(file) if file.suffix in PICKLES else Store(file)
        except ValueError as error:
            problems.append(f"{label}: {error}")
            continue
        except (OSError, SafetensorError) as error:
            fine = not file.exists() or os.access(file, os.R_OK)  # else safetensors says that there is none
            reason = f"({error}): copy or download it again" if fine else "by this user: ask its owner (chmod)"
            problems.append(f"{label}: {file} cannot be read {reason}")
            continue
        stores[file] = store
        problems += [] if names is None else _misplaced(f"{label}: {file}", store.names, names)
        for name in store.names:
            if (leaf := store.header(name)) is None:
                problems.append(
                    f"{label}: parameter {name!r} is stored as {store.code(name)}, which cannot be merged: "
                    "convert the checkpoint to bfloat16, float16 or float32"
                )
                continue
            own = prefix + unwrapped(name)
            if (other := spelled.setdefault(own, name)) != name:
                problems.append(
                    f"{label}: {path} holds {other!r} and {name!r}, one parameter without its wrapper: save one"
                )
            leaves[own], reads[own] = leaf, Stored(store, name)
    problems += _quantised(label, [path, *(path / prefix for prefix in modules)], leaves)
    if path.is_file() and (factor := next(filter(FACTOR.search, leaves), None)):
        problems.append(
            f"{label}: {path} holds factors of an adapter ({factor!r}), not weights: give it as an expert of the model "
            f"that it was trained on, from a .safetensors file, which safetensors.torch.save_file writes"
        )
    if not leaves and not problems:
        problems.append(f"{label}: {path} holds no parameters: download it again, or save the model again")
    if problems:
        raise ValueError("; ".join(problems))
    outputs = {prefix: f"{prefix}{_main(placed)}" for prefix, placed in modules.items()}
    outputs |= {"": DIFFUSION} if _main(own_files) == DIFFUSION else {}
    note = f"{label} holds an adapter beside its weights, which is left out: merge the adapter first if it is to count"
    beside = (path / "adapter_config.json").is_file()
    return Folder(label, leaves, reads, stores, path, outputs=outputs, note=note if beside else "")


def _misplaced(where: str, there: Iterable[str], placed: Collection[str]) -> list[str]:
    """Errors for a file that lacks leaves that its index places there, or holds others."""
    lacking = sorted({*placed}.difference(there))
    return [
        *(f"{where} lacks parameter {n!r} that the index places there: download it again" for n in lacking),
        *(
            f"{where} holds parameter {n!r} that the index does not place there: write the checkpoint again"
            for n in there
            if n not in placed
        ),
    ]


def module_folders(path: Path) -> list[Path]:
    """The folders of the components of a pipeline of diffusers, or of further modules of sentence-transformers.

    Those of the latter are numbered, or in the folder of a Router (once Asym), whose configuration names them.
    """
    if (path / PIPELINE).is_file():
        return sorted(path.glob("*/"))
    numbered = sorted(path.glob("[0-9]_*/"))
    return [*numbered, *(folder for router in (path, *numbered) for folder in _routed(router))]


def _routed(router: Path) -> list[Path]:
    for name in ROUTER, "config.json":
        with suppress(OSError, ValueError, KeyError, TypeError):
            types = dict(read_json(router / name)["types"])
            return [folder for folder in sorted(router.glob("*/")) if folder.name in types]
    return []


def _modules(label: str, path: Path, problems: list[str]) -> dict[str, dict[Path, set[str] | None]]:
    """Weight files of `module_folders` as of `_files`, by the prefix of their leaves, such as "2_Dense/"."""
    of_pipeline = DIFFUSION, DIFFUSION_INDEX, WEIGHTS, INDEX
    names = of_pipeline if (path / PIPELINE).is_file() else (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX)
    found: dict[str, dict[Path, set[str] | None]] = {}
    for folder in module_folders(path):
        if name := next((name for name in names if (folder / name).exists()), None):
            found[f"{folder.relative_to(path).as_posix()}/"] = _placed(label, folder, problems, name)
    return found


def _main(files: Iterable[Path]) -> str:
    """The name of the one file that stands for files of weights."""
    return DIFFUSION if any(file.name.startswith(DIFFUSION.partition(".")[0]) for file in files) else WEIGHTS


def is_single(path: Path) -> bool:
    """Whether a path is that of a state dict in one file, not of a file in the folder of a checkpoint or adapter."""
    if path.suffix not in SUFFIXES + PICKLES or path.stem == "adapter_model" or _SHARD.search(path.name):
        return False
    of_folder = path.name in _OF_TRAINERS or (
        path.name in (WEIGHTS, DIFFUSION, PICKLED) and (path.parent / "config.json").exists()
    )
    return path.is_file() and not of_folder


@dataclass(frozen=True)
class Stored:
    """Reads coordinates of a stored tensor; ``store`` has `Store.get_tensor`."""

    store: Any
    name: str

    def __call__(self, start: int, stop: int) -> Tensor:
        found: Tensor = self.store.get_tensor(self.name).reshape(-1)[start:stop]
        return found

    def mapped(self) -> Tensor | None:
        """All of them, flat, in the memory of the mapped file; None where their order or address is another one."""
        found: Tensor = self.store.get_tensor(self.name)
        usual = found.is_contiguous() and found.data_ptr() % found.itemsize == 0
        return found.view(-1) if usual else None


def reader_of_tensor(leaf: Tensor) -> Read:
    """A function that reads coordinates of a tensor in memory."""
    return lambda start, stop: leaf.reshape(-1)[start:stop]


def _files(label: str, path: Path, problems: list[str], whole: Collection[Path]) -> dict[Path, set[str] | None]:
    """The files of a checkpoint and the leaves that its index places in each; None without an index.

    Args: whole: components of a pipeline, or modules, whose weights are read.
    """
    names = WEIGHTS, INDEX, PICKLED, PICKLED_INDEX, DIFFUSION, DIFFUSION_INDEX
    if is_single(path):
        return {path: None}
    if path.is_file():
        problems.append(f"{label}: {path} {foreign(path.parent, path.name)}")
    elif not path.is_dir():
        file = path.suffix in SUFFIXES + PICKLES
        problems.append(f"{label}: {path} is not a {'file' if file else 'folder: give the folder of a checkpoint'}")
    elif name := next((name for name in names if (path / name).exists()), None):
        return _placed(label, path, problems, name)
    elif (piped := (path / PIPELINE).exists()) or (whole and (path / MODULES).exists()):
        kinds = "*.bin", "*.safetensors"
        others = {
            file.parent: file for own in module_folders(path) for kind in kinds for file in sorted(own.glob(kind))
        }
        read = f"{WEIGHTS}, {DIFFUSION if piped else PICKLED}"
        kind = "component of a pipeline" if piped else "module of sentence-transformers"
        loaded = "DiffusionPipeline.from_pretrained, for *.fp16.* with variant='fp16'; save_pretrained"
        again = f"load the pipeline and save it again ({loaded})" if piped else "save it again"
        unread = [file for folder, file in others.items() if folder not in whole]
        also = f" (also {some_of(file.parent.name for file in unread[1:])})" if unread[1:] else ""
        problems += [
            f"{label}: {file.parent} holds its weights in {file.name}{also}, but those of a {kind} must be in "
            f"{read} or shards with an index: {again}"
            for file in unread[:1]
        ]
    else:
        problems.append(f"{label}: {path} {foreign(path)}")
    return {}


def _placed(label: str, path: Path, problems: list[str], name: str) -> dict[Path, set[str] | None]:
    """`_files` of one file of weights, or of an index."""
    return indexed(label, path, problems, name) if name.endswith(".index.json") else {path / name: None}


def indexed(label: str, path: Path, problems: list[str], index: str) -> dict[Path, set[str] | None]:
    """The files that an index names, and the leaves that it places in each; errors go into ``problems``."""
    try:
        placed = read_json(path / index)["weight_map"]
        pairs = [(str(name), str(file)) for name, file in placed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{label}: {path / index} is not an index ({error!r}): download it again")
        return {}
    names: dict[str, set[str] | None] = {}
    for name, file in pairs:
        group = names.setdefault(file, set())
        assert group is not None
        group.add(name)
    for file in sorted(names):
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
            problems.append(f"{label}: {path / index} names {file!r}, outside the folder: do not trust this index")
        elif not (path / file).is_file():
            problems.append(f"{label}: {path / file} is missing, {index} names it: download it again")
        else:
            continue
        del names[file]
    return {path / file: names[file] for file in sorted(names)}


def config_of(path: Path) -> dict[str, Any]:
    """The model's config.json, or {} where there is none that can be read."""
    try:
        return load_config(path) or {}
    except ValueError:
        return {}


def load_config(path: Path) -> dict[str, Any] | None:
    """The model's config.json, None where there is none. Raises: ValueError for one that is not a JSON object."""
    file = path / "config.json"
    try:
        config = read_json(file) if file.exists() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): copy or download it again") from error
    if not (config is None or isinstance(config, dict)):
        raise ValueError(f"{file} holds a {type(config).__name__}, must be a JSON object: copy or download it again")
    return config


def foreign(path: Path, only: str = "*") -> str:
    """Error message for a path without safetensors weights: it names what is there instead."""
    names = sorted(file.name for file in path.glob("*") if fnmatch(file.name, only))
    verb = "holds" if only == "*" else "is"
    if lost := [name for name in names if (path / name).is_symlink() and not (path / name).exists()]:
        file = path / lost[0]
        return f"{verb} a link {lost[0]} to {file.readlink()}, which does not exist: copy or download it again"
    if found := [name for name in names if any(fnmatch(name, pattern) for pattern in _SHARDED)]:
        return (
            f"holds parts of a model ({found[0]}) as FSDP or DeepSpeed saves them: write whole weights from them first"
        )
    if only == "*" and (inner := [name for name in names if any((path / name / file).exists() for file in _STARTS)]):
        return f"holds no weights, but its folders {some_of(inner)} do: give one of them"
    names = [name for name in names if name not in _OF_TRAINERS]
    if only == "*" and (found := [name for name in names if name.endswith(PICKLES) and not _SHARD.search(name)]):
        return f"holds pickled weights under the name {found[0]}: give this file if it is a state dict, or {_SAFE}"
    if found := [name for name in names if name.endswith(".gguf")]:
        return f"{verb} a GGUF file ({found[0]}), whose weights are quantised: merge the original checkpoint"
    if TASKS in names:
        return "holds models of several tasks: write one of them by merge.py export FOLDER --base BASE --task TASK"
    if only == "adapter_model.safetensors":
        return "is the file of an adapter: give its folder, in which adapter_config.json says how to apply it"
    if {"adapter_model.safetensors", "adapters.safetensors", "pytorch_lora_weights.safetensors"} & {*names}:
        return "holds an adapter, not a whole model: only experts can be adapters"
    if "adapter_config.json" in names:
        return "holds the configuration of an adapter and no adapter_model.safetensors: copy or download it again"
    if only.endswith(SUFFIXES + PICKLES):
        return "is a file of a checkpoint: give its folder"
    if only != "*":
        return "is a file: give the folder of a checkpoint"
    if found := [name for name in names if name.endswith(SUFFIXES)]:
        alone = f"weights under the name {found[0]}: give this file" + (
            f", or rename it to {WEIGHTS} to merge it with its config.json" if "config.json" in names else ""
        )
        several = (
            f"{len(found)} files of weights ({found[0]} the first) and no {INDEX}: download that too, or give one of "
            "the files if each is a whole model or adapter"
        )
        return f"holds {alone if len(found) == 1 else several}"
    return f"holds neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint"


def quantised_by(config: Mapping[str, Any]) -> str:
    """The method of quantisation that a config.json names; "" for a model that is not quantised."""
    names = "quantization_config", "quantization", "compression_config"  # of MLX; of older compressed-tensors
    asked = next((own for name in names if (own := config.get(name))), None)
    return str(asked.get("quant_method", "unknown method") if isinstance(asked, dict) else asked or "")


def refused_by_config(label: str, path: Path, config: Mapping[str, Any]) -> list[str]:
    """An error for a checkpoint whose config.json says that it is quantised."""
    method = quantised_by(config)
    return [f"{label}: {path} is quantised ({method}, says its config.json): {_DEQUANTISED}"] if method else []


def _quantised(label: str, places: Sequence[Path], leaves: Mapping[str, Tensor]) -> Iterator[str]:
    """An error for a quantised checkpoint; ``places`` are its folder and those of its components."""
    told = [text for place in places for text in refused_by_config(label, place, config_of(place))]
    if told:
        yield from told
        return
    for name, leaf in leaves.items():
        packed = not leaf.is_floating_point() and name.endswith((".weight", "_blocks"))  # of MLX uint32
        if packed or name.rpartition(".")[2] in _QUANTISED:
            yield f"{label}: {places[0]} is quantised (it holds parameter {name!r}, {dtype_name(leaf)}): {_DEQUANTISED}"
            return
