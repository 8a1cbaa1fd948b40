"""Adapters on disk in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .. import errors, random, tree
from ..checkpoint import MANIFEST, atomic_folder, file_hashes, load_manifest, plain, read_json
from ..checkpoint import load_expert as load_full
from .adapters import WEIGHT, A, B, Lora, expand, init, layer_of, names_of

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TRANSPOSED = "transposed"  # in the metadata of the weights, where only some of the layers are, or could be
UNKNOWN = "rank_pattern", "alpha_pattern"  # here; a merge of folders knows them
CONV1D = "c_attn", "q_attn", "c_proj", "c_fc"  # the layers of this class in transformers
_BY_FOLDERS = "give this folder to merge.py or smat_fn.folders as an expert, they read it"


def save_peft(
    path: str | Path,
    adapters: Mapping[str, Tensor],
    lora: Lora,
    *,
    base: str,
    manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    task_type: str | None = None,
    overwrite: bool = False,
    hashed: bool = False,
) -> None:
    """Write adapters as a folder that ``peft.PeftModel.from_pretrained`` loads, atomically.

    Args:
        base: name or folder of the model they belong to.
        manifest: JSON values for ``manifest.json`` beside them (default: that they are adapters), or a function that
            returns them, called when the weights are written.
        task_type: as PEFT names it ("CAUSAL_LM").
        hashed: as of `smat_fn.checkpoint.save_expert`.

    Raises:
        ValueError: if the folder exists and ``overwrite`` is off; for adapters that are not those of ``lora``.
    """
    adapters = tree.flatten_unwrapped(adapters)  # PEFT looks for the layers of the model itself
    paths, saved, transposed = (tuple(map(tree.unwrapped, own)) for own in (lora.paths, lora.saved, lora.transposed))
    lora = replace(lora, paths=paths, saved=saved, transposed=frozenset(transposed))
    wanted = names_of(lora)
    problems = [f"adapters lack leaf {name!r} of lora" for name in wanted if name not in adapters]
    problems += [f"adapters have leaf {name!r} that lora lacks" for name in sorted(adapters.keys() - {*wanted})]
    ranks = {leaf.shape[0] for name, leaf in adapters.items() if name.endswith(A)} - {lora.rank}
    problems += [f"adapters have rank {rank}, lora has {lora.rank}" for rank in sorted(ranks)]
    errors.raise_problems(errors.shortened(problems, "{} more leaves differ"))
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "task_type": task_type, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "bias": "none",
        "lora_dropout": lora.dropout, "fan_in_fan_out": bool(lora.transposed),
        "modules_to_save": list(dict.fromkeys(path.rpartition(".")[0] for path in lora.saved)) or None,
        "target_modules": [layer_of(path) for path in lora.paths if path.endswith(WEIGHT)],
        "target_parameters": [path for path in lora.paths if not path.endswith(WEIGHT)] or None,
    }  # fmt: skip
    stored = {PREFIX + name: plain(leaf) for name, leaf in adapters.items()}
    # PEFT corrects its one fan_in_fan_out by the class of each layer; `load_peft` may see no layers
    mixed = (lora.transposed and not lora.transposed.issuperset(lora.paths)) or len(_by_name(lora.paths)) > 1
    noted = {TRANSPOSED: json.dumps(sorted(lora.transposed))} if mixed else {}
    with atomic_folder(path, overwrite=overwrite) as folder:
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt", **noted})
        facts = manifest() if callable(manifest) else manifest
        facts = {"adapter": "trained"} if facts is None else dict(facts)
        facts |= {"files": file_hashes(folder, WEIGHTS)} if hashed else {}
        texts = {CONFIG: config, MANIFEST: facts}
        for name, value in texts.items():
            (folder / name).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load_peft(path: str | Path, module: nn.Module | None = None) -> tuple[dict[str, Tensor], Lora]:
    """Adapters that `save_peft` wrote, or PEFT with these options, and what they are.

    Args: module: the model of the adapters, whose Conv1D layers store their weights (in, out). Without it PEFT's one
        ``fan_in_fan_out`` is taken for all layers, unless `save_peft` wrote the folder.

    Raises: ValueError for a folder without adapters, for options of PEFT other than those of `save_peft`, for tensors
        of other kinds (adapters of embeddings, trained tokens), for layers that ``module`` lacks, and for square
        weights in models that have both layouts, without ``module``.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no adapters: {CONFIG} and {WEIGHTS} are needed")
    from ..folders.inputs.adapters.config import config_problems  # takes long

    config, stored = _read(folder)
    dropout = config.get("lora_dropout") or 0.0
    problems = [*config_problems(str(folder), config), *_dropout_problems(folder, dropout)]
    problems += [
        f"{folder}: {name} is {config[name]!r}, adapters have one rank and alpha here: {_BY_FOLDERS}"
        for name in UNKNOWN
        if config.get(name)
    ]
    errors.raise_problems(problems)
    adapters = {tree.unwrapped(name).removeprefix(PREFIX): leaf for name, leaf in stored.items()}
    whole = tuple(name for name in adapters if not name.endswith((A, B)))
    saved = [f"{own}." for own in config.get("modules_to_save") or ()]  # PEFT takes ends of names
    problems = [
        f"{folder}: {name!r} belongs neither to an adapter of a linear layer nor to modules_to_save: {_BY_FOLDERS}"
        for name in whole
        if not any(own in name for own in saved)
    ]
    problems += [
        f"{folder}: {name!r} is of shape {tuple(leaf.shape)}, not a matrix: convolutions are not read here, merge "
        "it into its base with peft"
        for name, leaf in adapters.items()
        if name.endswith((A, B)) and leaf.ndim != 2
    ]
    ends = {half: {name.removesuffix(half) for name in adapters if name.endswith(half)} for half in (A, B)}
    problems += [
        f"{folder}: {layer!r} has one factor, must have both: save it again" for layer in sorted(ends[A] ^ ends[B])
    ]
    problems = errors.shortened(problems, f"{folder}: {{}} more tensors of other kinds")
    ranks = {len(leaf) for name, leaf in adapters.items() if name.endswith(A)}
    if ranks - {config["r"]}:
        found = ", ".join(map(str, sorted(ranks)))
        problems.append(f"{folder}: adapters have rank {found}, {CONFIG} says {config['r']}: of different adapters?")
    errors.raise_problems(problems)
    paths = _paths(config, [name.removesuffix(A) for name in adapters if name.endswith(A)])
    transposed = _transposed(folder, config, adapters, paths, module)
    return adapters, Lora(
        paths,
        config["r"],
        config["lora_alpha"],
        bool(config.get("use_rslora")),
        frozenset(transposed),
        whole,
        float(dropout),
    )


def _dropout_problems(folder: Path, dropout: Any) -> list[str]:
    fine = isinstance(dropout, (int, float)) and 0 <= dropout < 1
    return [] if fine else [f"{folder}: lora_dropout of {CONFIG} is {dropout!r}, must lie in [0, 1)"]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors. Raises: ValueError for files that are cut off, or of another kind."""
    try:
        config = read_json(folder / CONFIG)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds a {type(config).__name__}")
        return config, load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} is not a readable adapter ({error}): copy or download it again") from error


def _transposed(
    folder: Path,
    config: Mapping[str, Any],
    adapters: Mapping[str, Tensor],
    paths: Sequence[str],
    module: nn.Module | None,
) -> Sequence[str]:
    """The weights that are stored (in, out), as `load_peft` takes them."""
    layers = {path: layer_of(path) for path in paths}
    if module is not None:
        kinds = {tree.unwrapped(name): type(own).__name__ for name, own in module.named_modules()}
        errors.raise_problems(
            [
                f"{folder}: module has no layer {layer!r}: is it the model that was adapted?"
                for layer in layers.values()
                if layer not in kinds
            ]
        )
        return [path for path, layer in layers.items() if kinds[layer] == "Conv1D"]
    with safe_open(folder / WEIGHTS, framework="pt") as store:
        some = (store.metadata() or {}).get(TRANSPOSED)
    if some:
        return [*json.loads(some)]
    square = [layer for layer in layers.values() if adapters[layer + A].shape[1] == len(adapters[layer + B])]
    named = _by_name(paths)
    if square and len(named) > 1:
        raise ValueError(
            f"{folder}: fan_in_fan_out of {CONFIG} is that of one layer, but {named[True]!r} is named as a Conv1D, "
            f"{named[False]!r} is not, and the shape of {square[0]!r} does not show its layout: give load_peft the "
            f"model as module, or {_BY_FOLDERS}"
        )
    return paths if config.get("fan_in_fan_out") else ()


def _by_name(paths: Sequence[str]) -> dict[bool, str]:
    """A layer that is named as a Conv1D, and one that is not, where they are among those of ``paths``."""
    return {layer.rpartition(".")[2] in CONV1D: layer for layer in map(layer_of, paths)}


def _paths(config: Mapping[str, Any], layers: Sequence[str]) -> tuple[str, ...]:
    """The weights of the layers that have adapters, in the configuration's order where it names whole paths."""
    targets, parameters = config.get("target_modules"), config.get("target_parameters") or ()
    own = {layer_of(path): path for path in parameters}
    found = {own.get(layer, layer + WEIGHT): None for layer in layers}
    named = (*(name + WEIGHT for name in targets or () if isinstance(targets, list)), *parameters)
    return named if set(named) == found.keys() else tuple(found)


def load_expert(path: str | Path, base: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights on the CPU, manifest) of an expert of train.py, whole or as adapters of ``base``.

    Raises: ValueError as `smat_fn.checkpoint.load_expert`, as `load_peft`, and for adapters that do not fit.
    """
    if not (Path(path) / CONFIG).is_file():
        weights, manifest = load_full(path, base)
        return dict(tree.flatten(weights)), manifest
    adapters, lora = load_peft(path)
    shapes = {name: leaf.to("meta") for name, leaf in base.items()}
    tree.check_same(init(random.key(0), shapes, lora), f"adapters of the base for {path}", found=adapters)
    own = {name: leaf.cpu() for name, leaf in base.items()}
    return {**own, **expand(adapters, own, lora)}, load_manifest(path)
