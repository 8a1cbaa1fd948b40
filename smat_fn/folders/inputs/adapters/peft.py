"""Adapters of PEFT in folders: which folder is one, and its tensors."""

import re
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from .... import checkpoint, tree
from ....errors import some_of
from .. import reading
from ..reading import PICKLES, SUFFIXES, foreign
from ..side_files import unread_weights
from ..stored import Pickled, Store
from .config import CONFIG, PICKLED, WEIGHTS, as_lora, config_problems, is_other_kind, no_scales, scale_of
from .opened import Opened
from .other_tools import file_of

# pickled weights that are trained beside an adapter: of LLaVA, of Qwen2-VL and Phi-3-V's finetuning, of LongLoRA
BESIDE = "non_lora_trainables.bin", "mm_projector.bin", "non_lora_state_dict.bin", "trainable_params.bin"
_HEADS = "value_head.", "scoring_head."  # of LLaMA-Factory and ms-swift, which no base has
PREFIX = "base_model.model."
_PREFIX = re.compile(r"^(module\.)?base_model\.model\.")
_OF_TRAINER = re.compile(r"checkpoint-\d+")  # folders of transformers' Trainer, from earlier steps
PARTS = {
    ".lora_A.weight": ("A", False),
    ".lora_B.weight": ("B", False),
    ".lora_embedding_A": ("A", True),
    ".lora_embedding_B": ("B", True),
}
# as in memory, of the adapter that peft calls default: state dicts of FSDP and DeepSpeed
IN_MEMORY = {".lora_A.default.weight": ("A", False), ".lora_B.default.weight": ("B", False)}


def is_adapter(path: Path) -> bool:
    """Does a folder hold an adapter and no whole model, or is a file one of another tool?"""
    own = any((path / file).exists() for file in (CONFIG, WEIGHTS, PICKLED))
    names = checkpoint.WEIGHTS, checkpoint.INDEX, reading.PICKLED, reading.PICKLED_INDEX
    whole = [file for file in names if (path / file).is_file()]
    return (own and (not whole or (whole == [reading.PICKLED] and _holds_a_head(path)))) or file_of(path) is not None


def _holds_a_head(path: Path) -> bool:
    """Whether pytorch_model.bin beside an adapter holds a value head alone, as TRL's PPO writes it."""
    try:
        return all(name.startswith("v_head.") for name in Pickled(path / reading.PICKLED).names)
    except (OSError, ValueError):  # whoever reads it says what is wrong
        return False


def bare_name(name: str) -> str:
    """A name without peft's prefix, and without the parts that wrappers put before and into it."""
    return _PREFIX.sub("", tree.unwrapped(name))


def weights_of(path: Path) -> Path:
    """The file of an adapter's weights."""
    return path / (PICKLED if (path / PICKLED).exists() and not (path / WEIGHTS).exists() else WEIGHTS)


def opened_folder(label: str, path: Path, *, whole: bool = False) -> Opened:
    """An adapter of peft, with its problems. Raises: ValueError where there is nothing else to say."""
    if path.suffix in SUFFIXES + PICKLES and not path.is_dir():
        pickled = "is pickled: save its tensors by safetensors.torch.save_file"
        what = pickled if path.suffix in PICKLES else "holds no LoRA: give the file or the folder of an adapter"
        raise ValueError(f"{label}: {path} {what}" if path.exists() else f"{label}: there is no file {path}")
    if not path.is_dir():
        raise ValueError(
            f"{label}: {path} is not a folder: give the folder of a LoRA adapter, or a hub name owner/name"
        )
    if not (path / CONFIG).is_file():
        inner = sorted(own.parent.name for own in path.glob(f"*/{CONFIG}"))
        way = f", but its folders {some_of(inner)} do: give one of them" if inner else ""
        way = way or ": give the folder of a LoRA adapter, or download it again"
        raise ValueError(f"{label}: {path} holds no {CONFIG}{way}")
    try:
        config = checkpoint.read_json(path / CONFIG)
        file = weights_of(path)
        store = None if not file.exists() else Pickled(file) if file.name == PICKLED else Store(file)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds a {type(config).__name__}, must be a JSON object")
        config = as_lora(config) if whole else config
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{label}: {path} is not a readable adapter ({error}): copy or download it again") from error
    if store is None:
        raise ValueError(f"{label}: {path} {foreign(path)}")
    problems = list(config_problems(label, config, whole=whole))
    beside = unread_weights(path)
    heads = [name for name in beside if name.startswith(_HEADS)]
    heads += [reading.PICKLED] if _holds_a_head(path) else []
    problems += [
        f"{label}: {path / name} holds weights beside the adapter, which are not read here: write the whole model by "
        "the program that trained it, and give that, or a copy of the adapter's folder without this file"
        for name in beside
        if name not in heads
    ]
    if is_other_kind(config):  # its leaves are another kind's too
        raise ValueError(problems[0])
    scale = None if no_scales(config) else partial(scale_of, label, config)
    left = f"{label} holds a head beside the adapter, which is left out ({some_of(heads)})" if heads else ""
    note = "; ".join(filter(None, (_others_note(label, path), left)))
    return Opened(config, store, scale, problems, {file: store, path / CONFIG: None}, note)


def _others_note(label: str, path: Path) -> str:
    """A note on adapters with names, which peft saves in folders beside the one that it calls default."""
    found = [own.parent for own in sorted(path.glob(f"*/{CONFIG}")) if not _OF_TRAINER.fullmatch(own.parent.name)]
    if not found:
        return ""
    whose = f"{label} is the default adapter of its folder, which holds others too"
    return f"{whose}: for one of them give its path ({some_of(map(str, found))})"
