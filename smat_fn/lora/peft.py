"""Adapters on disk in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import errors, random, tree
from ..checkpoint import MANIFEST, atomic_folder, load_manifest
from ..checkpoint import load_expert as load_full
from .adapters import WEIGHT, A, B, Lora, expand, init, layer_of, names_of

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TRANSPOSED = "transposed"  # in the metadata of the weights, where only some of the layers are
UNKNOWN = "rank_pattern", "alpha_pattern", "layers_to_transform"  # here; a merge of folders knows them


def save_peft(
    path: str | Path,
    adapters: Mapping[str, Tensor],
    lora: Lora,
    *,
    base: str,
    manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    task_type: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write adapters as a folder that ``peft.PeftModel.from_pretrained`` loads, atomically.

    Args:
        base: name or folder of the model they belong to.
        manifest: JSON values for ``manifest.json`` beside them (default: that they are adapters), or a function that
            returns them, called when the weights are written.
        task_type: as PEFT names it ("CAUSAL_LM").

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
    stored = {PREFIX + name: leaf.detach().cpu().contiguous() for name, leaf in adapters.items()}
    # PEFT corrects its one fan_in_fan_out by the class of each layer; `load_peft` sees no layers
    mixed = lora.transposed and not lora.transposed.issuperset(lora.paths)
    noted = {TRANSPOSED: json.dumps(sorted(lora.transposed))} if mixed else {}
    with atomic_folder(path, overwrite=overwrite) as folder:
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt", **noted})
        facts = manifest() if callable(manifest) else manifest
        texts = {CONFIG: config, MANIFEST: {"adapter": "trained"} if facts is None else dict(facts)}
        for name, value in texts.items():
            (folder / name).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load_peft(path: str | Path) -> tuple[dict[str, Tensor], Lora]:
    """Adapters that `save_peft` wrote, or PEFT with these options, and what they are.

    PEFT's one ``fan_in_fan_out`` is taken for all layers, since no module is seen; `smat_fn.folders` reads the base.

    Raises: ValueError for a folder without adapters, for options of PEFT other than those of `save_peft`, and for
        tensors of other kinds (adapters of embeddings, trained tokens).
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no adapters: {CONFIG} and {WEIGHTS} are needed")
    from ..folders.inputs.adapters import config_problems  # takes long

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    problems = [*config_problems(str(folder), config)]
    problems += [
        f"{folder}: option {name} is {config[name]!r}, which is not supported" for name in UNKNOWN if config.get(name)
    ]
    errors.raise_problems(problems)
    adapters = {tree.unwrapped(name.removeprefix(PREFIX)): leaf for name, leaf in load_file(folder / WEIGHTS).items()}
    whole = tuple(name for name in adapters if not name.endswith((A, B)))
    saved = [f"{module}." for module in config.get("modules_to_save") or ()]  # PEFT takes ends of names
    problems = [
        f"{folder}: {name!r} belongs neither to an adapter of a linear layer nor to modules_to_save"
        for name in whole
        if not any(module in name for module in saved)
    ]
    problems += [
        f"{folder}: {name!r} is of shape {tuple(leaf.shape)}, not a matrix: convolutions are not read here"
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
    with safe_open(folder / WEIGHTS, framework="pt") as store:
        some = (store.metadata() or {}).get(TRANSPOSED)
    transposed = json.loads(some) if some else paths if config.get("fan_in_fan_out") else ()
    return adapters, Lora(
        paths,
        config["r"],
        config["lora_alpha"],
        bool(config.get("use_rslora")),
        frozenset(transposed),
        whole,
        float(config.get("lora_dropout") or 0.0),
    )


def _paths(config: Mapping[str, Any], layers: Sequence[str]) -> tuple[str, ...]:
    """The weights of the layers that have adapters, in the configuration's order where it names whole paths."""
    targets, parameters = config["target_modules"], config.get("target_parameters") or ()
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
