"""The modules of a checkpoint that peft can adapt: by the classes of ``transformers``, else by their names."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from .reading import Folder, config_of

_EMBEDDINGS = (
    *("embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings", "embed_positions", "embed_in"),
    *("class_embedding", "embedding_table"),  # of diffusers
)
_CONV1D = "c_attn", "c_proj", "c_fc", "q_attn"  # GPT-2's, whose weights are (in, out)


def modules_of(folder: Folder, model: Any) -> tuple[dict[str, str], list[str]]:
    """Modules that peft can adapt, each with its kind, and the names of all modules: by type, else by their names."""
    if model is None:
        modules = sorted({path.rpartition(".")[0] for path in folder.leaves} - {""})
        gpt2 = str(config_of(folder.root).get("model_type", "")).startswith(("gpt2", "openai-gpt", "imagegpt"))
        kinds = {}
        for module in modules:
            last = module.rpartition(".")[2]
            kinds[module] = "conv1d" if gpt2 and last in _CONV1D else "linear"
            if last in _EMBEDDINGS and f"{module}.bias" not in folder.leaves:
                kinds[module] = "embedding"
        return kinds, modules
    from transformers.pytorch_utils import Conv1D

    found = dict(model.named_modules())
    kinds = {}
    for name, module in found.items():
        # peft looks up tokens as a plain embedding does, and would merge an attention's own projection twice
        if isinstance(found.get(name.rpartition(".")[0]), nn.MultiheadAttention):
            continue
        if isinstance(module, nn.Embedding):
            if type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale"):
                kinds[name] = "embedding"
        elif isinstance(module, Conv1D | nn.Linear):
            kinds[name] = "conv1d" if isinstance(module, Conv1D) else "linear"
    return kinds, [name for name in found if name]


def tied(model: Any, adapted: Collection[str]) -> tuple[str, ...]:
    """Weights of adapted modules that other modules share."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    shared = (name for same in names.values() if len(same) > 1 for name in same)
    return tuple(name for name in shared if name.removesuffix(".weight") in adapted)


def saved(others: Sequence[str], adapted: Collection[str]) -> set[str]:
    """The modules of leaves that no factors hold, to be stored whole, unless adapted ones are among or below them."""
    own = {path.rpartition(".")[0] for path in others} - {""}
    own = {module for module in own if not any(inside(other, {module}) for other in adapted)}
    return {module for module in own if not inside(module.rpartition(".")[0], own)}


def inside(path: str, modules: Collection[str]) -> bool:
    """Is a module or a leaf one of these modules, or below one?"""
    parts = path.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))
