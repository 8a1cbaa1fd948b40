"""Checkpoint folders in Hugging Face's layout, opened by the headers of their files."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from ...checkpoint import INDEX, WEIGHTS, read_json
from ...errors import raise_problems, some_of
from ...tree import unwrapped
from ..files import Identity, identity
from .quantised import dequantised, other_formats, refused
from .stored import FLOAT8, OF_VERL, SAFE, Pickled, Read, Store, Stored, empty_problems

DIFFUSION, PIPELINE = "diffusion_pytorch_model.safetensors", "model_index.json"  # of diffusers
DIFFUSION_INDEX = f"{DIFFUSION}.index.json"
MODULES, ROUTER = "modules.json", "router_config.json"  # of sentence-transformers
SUFFIXES = ".safetensors", ".sft"  # of one format
PICKLES = ".bin", ".pt", ".pth", ".ckpt", ".tar"  # of torch.save; timm writes .pth.tar
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # what is read without safetensors
TASKS = "tasks.json"  # of models of several tasks: see `several`
OF_TRAINERS = (  # beside weights
    *("training_args.bin", "optim*", "scheduler*", "lr_scheduler*", "*scaler.pt", "sampler*", "dl_state_dict*"),
    *("rng_state*", "recipe_state.pt", "custom_checkpoint_*", "zero_pp_rank_*"),
)
_SHARDED = {  # what writes whole weights from such parts
    "model_world_size_*_rank_*": OF_VERL,
    "pytorch_model_fsdp_*": "accelerate merge-weights",
    "global_step[0-9]*": "zero_to_fp32.py, which DeepSpeed writes beside them",
    "zero_to_fp32.py": "this program",
    "*.distcp": "python -m torch.distributed.checkpoint.format_utils dcp_to_torch",
}
_OTHERS = {
    ".h5": "Keras or TensorFlow",
    ".keras": "Keras",
    ".mlmodel": "Core ML",
    ".msgpack": "Flax",
    ".nemo": "NeMo",
    ".npz": "NumPy",
    ".onnx": "ONNX",
    ".tflite": "TensorFlow Lite",
}
_STARTS = WEIGHTS, INDEX, "adapter_config.json", PICKLED, PICKLED_INDEX
_SHARD = re.compile(r"-\d+-of-(\d+)\.(safetensors|sft|bin)$")
# computed from the configuration when a model is loaded
BUFFERS = "position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index"
FACTOR = re.compile(r"\.(lora[._]|lora_linear_layer\.|hada_|lokr_)|_lora\.(down|up)\.")  # LoRA, LoHa, LoKr


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
    tied = config_of(path).get("tie_word_embeddings") is True
    for prefix, file, names in wanted:
        try:
            stores[file] = store = _store(file)
        except ValueError as error:
            problems.append(f"{label}: {error}")
            continue
        problems += [] if names is None else _misplaced(f"{label}: {file}", store.names, names, tied)
        for name in store.names:
            if (leaf := store.header(name, FLOAT8)) is None:
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
    configs = {prefix: config_of(path / prefix) for prefix in ("", *modules)}
    problems += [text for store in stores.values() for text in other_formats(label, store.metadata)]
    leaves, reads, dequantising, configured = dequantised(label, leaves, reads, configs, problems)
    stores |= {file: None for prefix in configured if (file := path / prefix / "config.json").is_file()}
    problems += refused(label, {path / prefix: config for prefix, config in configs.items()}, leaves)
    problems += empty_problems(f"{label}: {path}", leaves)
    if path.is_file() and (factor := next(filter(FACTOR.search, leaves), None)):
        problems.append(
            f"{label}: {path} holds factors of an adapter ({factor!r}), not weights: give it as an expert of the model "
            f"that it was trained on, from a .safetensors file, which safetensors.torch.save_file writes"
        )
    if not leaves and not problems:
        problems.append(f"{label}: {path} holds no parameters: download it again, or save the model again")
    raise_problems(problems)
    outputs = {prefix: f"{prefix}{_main(placed)}" for prefix, placed in modules.items()}
    outputs |= {"": DIFFUSION} if _main(own_files) == DIFFUSION else {}
    note = f"{label} holds an adapter beside its weights, which is left out: merge the adapter first if it is to count"
    beside = (path / "adapter_config.json").is_file()
    return Folder(label, leaves, reads, stores, path, outputs=outputs).noted(note if beside else "", dequantising)


def _store(file: Path) -> Store | Pickled:
    """A file of tensors, mapped. Raises: ValueError for one that cannot be read."""
    try:
        return Pickled(file) if file.suffix in PICKLES else Store(file)
    except (OSError, SafetensorError) as error:
        fine = not file.exists() or os.access(file, os.R_OK)  # else safetensors says that there is none
        reason = f"({error}): copy or download it again" if fine else "by this user: ask its owner (chmod)"
        raise ValueError(f"{file} cannot be read {reason}") from error


def _misplaced(where: str, there: Iterable[str], placed: Collection[str], tied: bool) -> list[str]:
    """Errors for a file that lacks leaves that its index places there, or holds others.

    It may lack buffers that a model computes, and a tied head: torchtune keeps the index of the model that it trains.
    """
    lacking = sorted(
        name
        for name in {*placed}.difference(there)
        if name.rpartition(".")[2] not in BUFFERS and not (tied and name == "lm_head.weight")
    )
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

    Those of the latter are in `MODULES`, or numbered where it has none, or in the folder of a Router (once Asym), whose
    configuration names them.
    """
    if (path / PIPELINE).is_file():
        return sorted(path.glob("*/"))
    named = _named(path)
    own = sorted(path.glob("[0-9]_*/")) if named is None else named
    return [*own, *(folder for router in (path, *own) for folder in _routed(router))]


def _named(path: Path) -> list[Path] | None:
    """The folders inside a checkpoint that `MODULES` names; None where it names no modules."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        if names := [PurePosixPath(entry["path"]) for entry in read_json(path / MODULES)]:
            inside = (path / name for name in names if name.parts and not {"/", ".."}.intersection(name.parts))
            return [folder for folder in dict.fromkeys(inside) if folder.is_dir()]
    return None


def _routed(router: Path) -> list[Path]:
    for name in ROUTER, "config.json":
        with suppress(OSError, ValueError, KeyError, TypeError):
            types = dict(read_json(router / name)["types"])
            return [folder for folder in sorted(router.glob("*/")) if folder.name in types]
    return []


def own_modules(path: Path) -> list[str]:
    """The modules of sentence-transformers in a folder that hold weights, as prefixes of leaves, such as "2_Dense/"."""
    return [*_modules("", path, [])] if (path / MODULES).is_file() else []


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
    of_folder = _of_trainer(path.name) or (
        path.name in (WEIGHTS, DIFFUSION, PICKLED) and (path.parent / "config.json").exists()
    )
    return path.is_file() and not of_folder


def _of_trainer(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OF_TRAINERS)


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
    if (path / name).is_dir():
        made = "is a folder, as DeepSpeed's zero_to_fp32.py makes one"
        problems.append(f"{label}: {path / name} {made}: move its files up, or give this folder")
        return {}
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
    if sharded := _sharded(names):
        return sharded
    if only == "*" and (inner := [name for name in names if any((path / name / file).exists() for file in _STARTS)]):
        return f"holds no weights, but its folders {some_of(inner)} do: give one of them"
    if only == "*" and (sharded := _sharded(f"{file.parent.name}/{file.name}" for file in sorted(path.glob("*/*")))):
        return sharded
    names = [name for name in names if not _of_trainer(name)]
    if only == "*" and (found := [name for name in names if name.endswith(PICKLES) and not _SHARD.search(name)]):
        if len(found) > 1:
            many = f"{len(found)} files of pickled weights ({some_of(found)})"
            return f"holds {many}: give one if each is a whole model, or write one file first if these are parts"
        return f"holds pickled weights under the name {found[0]}: give this file if it is a state dict, or {SAFE}"
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
    stored = [name for name in names if name.endswith((*SUFFIXES, ".bin"))]
    if not stored and (found := [name for name in names if name.endswith((*_OTHERS,))]):
        kind = _OTHERS[PurePosixPath(found[0]).suffix]
        return f"{verb} a file of {kind} ({found[0]}), which is not read: save the model by PyTorch, in safetensors"
    if only.endswith(SUFFIXES + PICKLES):
        return "is a file of a checkpoint: give its folder"
    if only != "*":
        return "is a file: give the folder of a checkpoint"
    if stored:
        return f"holds {_without_index(stored, 'config.json' in names)}"
    return f"holds neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint"


def _sharded(names: Iterable[str]) -> str:
    """The error for a folder with parts of a model among its files; "" for another one."""
    every = [*names]
    for pattern, tool in _SHARDED.items():
        if found := next((name for name in every if fnmatch(name.rpartition("/")[2], pattern)), None):
            parts = f"parts of a model ({found}) as FSDP or DeepSpeed saves them"
            return f"holds {parts}: write whole weights from them first, by {tool}"
    return ""


def _without_index(found: Sequence[str], configured: bool) -> str:
    """The files of weights in a folder without an index: under other names, or shards."""
    name, index = (WEIGHTS, INDEX) if found[0].endswith(SUFFIXES) else (PICKLED, PICKLED_INDEX)
    if len(found) > 1:
        return (
            f"{len(found)} files of weights ({found[0]} the first) and no {index}: download that too, or give one of "
            "the files if each is a whole model or adapter"
        )
    if shard := _SHARD.search(found[0]):
        way = f"rename the file to {name}" if int(shard[1]) == 1 else "download all of its files"
        return f"{found[0]} and no {index}: {way}"
    way = f", or rename it to {WEIGHTS} to merge it with its config.json" if configured else ""
    return f"weights under the name {found[0]}: give this file{way}"
