"""LoRA adapters of one base merged into one: folders of PEFT into a folder that it loads, files into such a file."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__, checkpoint, errors, machine
from ..errors import some_of
from ..merge.around.factors import Factors
from .inputs.adapters.config import CONFIG, WEIGHTS, WHOLE
from .inputs.adapters.factors import Held, check_range, read_adapter, stored_as, stored_halves
from .inputs.adapters.file_factors import LoraFile, file_problems, header_notes, merged_file, read_file
from .inputs.adapters.other_tools import DIFFUSERS, file_of
from .inputs.adapters.peft import PREFIX, weights_of
from .inputs.differing import special_tokens
from .inputs.hub import local_folder
from .inputs.reading import own_modules
from .inputs.side_files import TOKENIZER, Files, files_of, template_of, unlike_templates
from .inputs.vocabulary import tokenizer_notes
from .prepare import place_problems
from .writing import exclusive, fill

Combine: TypeAlias = Callable[[Mapping[str, Mapping[str, Factors]]], Mapping[str, Factors]]
Texts: TypeAlias = Callable[[Sequence[Path], Mapping[str, Sequence[Path]]], Mapping[str, str]]


class Combined(NamedTuple):
    """Report of `merge_adapters`."""

    modules: tuple[str, ...]
    rank: int  # of all modules
    partial: tuple[str, ...]  # modules that some adapters lack
    bytes: int
    notes: tuple[str, ...]  # on tokenizers and headers that differ, on modules and adapters beside those read


def merge_adapters(
    adapters: Mapping[str, Path],
    out: Path,
    combine: Combine,
    *,
    base: str | None = None,
    overwrite: bool = False,
    texts: Texts | None = None,
) -> Combined:
    """Write the adapter that ``combine`` makes of adapters; base is not read, the folder is written atomically.

    ``lora_alpha`` is the rank, and ``use_rslora`` off, so that ΔW = BA. All modules have the largest rank: lower ones
    are padded with zeros, since llama.cpp and diffusers read other ranks wrongly. Tensors have the widest dtype of the
    adapters'. Tokenizer and chat template are those of the first adapter that holds any. Files of diffusers and kohya's
    scripts become ``pytorch_lora_weights.safetensors``, with their names.

    Args:
        adapters: folders or hub names by name; or LoRA files of one tool, or their folders.
        out: folder to write.
        combine: factors by module, from those by expert and by module: `merge.combine` module by module, `knots`.
        base: name of their base; default: the one that all of them name.
        overwrite: replace a folder that exists.
        texts: text files by name, given the files written and the files read of every adapter; default: a manifest.

    Raises:
        ValueError: lists every problem of the adapters together, before any work: what is broken, of another kind than
            plain LoRA (DoRA, biases, whole modules), of different bases or tools; or as ``combine`` does.
    """
    places, held, files = _read(adapters, out, base, overwrite)
    found = {name: own.factors for name, own in (files or held).items()}
    merged = combine(found)
    merged = {m: Factors(f.a, f.b if f.scale == 1 else f.b * f.scale) for m, f in merged.items()}  # stored as BA
    broken = [m for m, (a, b, _) in merged.items() if not bool(a.isfinite().all() and b.isfinite().all())]
    if broken:
        raise ValueError(f"the merged factors of {', '.join(broken[:3])} are NaN or infinite: nothing is written")
    rank = max(factors.rank for factors in merged.values())
    stored, header = (
        merged_file(merged, files.values(), rank) if files else (_stored(merged, held, rank), {"format": "pt"})
    )
    config = {} if files else {CONFIG: json.dumps(_config(held, merged, base, rank), indent=2) + "\n"}
    made = {DIFFUSERS if files else WEIGHTS: (stored, header)}
    notes = [*header_notes({f"adapter {name!r}": own for name, own in files.items()}), *_module_notes(places)]
    notes += [own.note for own in held.values() if own.note]
    notes += _write(checkpoint.follow(out), made, config, places, overwrite=overwrite, texts=texts)
    return Combined(
        tuple(merged),
        rank,
        tuple(module for module in merged if any(module not in own for own in found.values())),
        sum(tensor.nbytes for tensor in stored.values()),
        tuple(notes),
    )


def _write(
    out: Path,
    weights: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]],
    config: Mapping[str, str],
    places: Mapping[str, Path],
    *,
    overwrite: bool,
    texts: Texts | None,
) -> tuple[str, ...]:
    """The folder of a merged adapter; notes on tokenizers. Args: weights, config: by the file's name."""
    with exclusive(out):
        checkpoint.sweep(out)  # what a killed call has left
        with checkpoint.atomic_folder(out, overwrite=overwrite) as folder:
            for file, (stored, header) in weights.items():
                save_file(dict(stored), folder / file, metadata=dict(header))
            for file, text in config.items():
                (folder / file).write_text(text, encoding="utf-8")
            tokenizer, notes = tokenizer_of(places) if config else ({}, ())
            written = [folder / file for file in (*config, *weights)] + fill(folder, tokenizer, [])
            facts = {"adapter": "merged", "code": machine.code(), "versions": {"smat_fn": __version__}}
            plain = json.dumps(facts, indent=2) + "\n"
            given = texts(written, files_read(places)) if texts else {}
            for file, text in {checkpoint.MANIFEST: plain, **given}.items():
                (folder / file).write_text(text, encoding="utf-8")
    return notes


def files_read(places: Mapping[str, Path]) -> dict[str, list[Path]]:
    """The files of adapters that are merged, by label. Args: places: their folders or files by name."""
    found = {f"adapter {name!r}": place for name, place in places.items()}
    return {
        label: [file]
        if (file := file_of(place))
        else [place / CONFIG, weights_of(place), *files_of(place, TOKENIZER).values()]
        for label, place in found.items()
    }


def tokenizer_of(places: Mapping[str, Path]) -> tuple[Files, tuple[str, ...]]:
    """Tokenizer and chat template of the first adapter that has any, and notes on others that differ."""
    roots = {name: place for name, place in places.items() if files_of(place, TOKENIZER)}
    if not roots:
        return {}, ()
    (first, root), *rest = roots.items()
    others = {f"adapter {name!r}": place for name, place in rest}
    notes = list(tokenizer_notes(root, others, of=first))
    for label, place in others.items():
        notes += special_tokens(label, root, place, of=first)
        if template_of(place) != template_of(root):
            notes.append(f"{label} has another chat template than {first}: the merged adapter has {first}'s")
        if named := unlike_templates(root, place):
            notes.append(
                f"{label} has other named chat templates than {first} ({named}): the merged adapter has {first}'s"
            )
    return {**files_of(root, TOKENIZER)}, tuple(notes)


def _module_notes(places: Mapping[str, Path]) -> list[str]:
    """Notes on the weights of modules of sentence-transformers, which are in no adapter."""
    return [
        f"adapter {name!r} lies beside weights of {', '.join(modules)}, which the merged adapter has not: merge the "
        "adapters as whole models if these are to count"
        for name, place in places.items()
        if (modules := own_modules(place))
    ]


def _stored(merged: Mapping[str, Factors], held: Mapping[str, Held], rank: int) -> dict[str, Tensor]:
    """The tensors of the merged adapter, all of one rank.

    Raises: ValueError for values beyond the range of the widest dtype.
    """
    halves = [half for found in held.values() for factors in found.factors.values() for half in factors[:2]]
    kind = reduce(torch.promote_types, (half.dtype for half in halves))
    embeddings = {module for found in held.values() for module in found.embeddings}
    stored = {
        PREFIX + path: half
        for module, factors in merged.items()
        for path, half in stored_halves(module, *stored_as(kind, factors, rank), embedding=module in embeddings).items()
    }
    check_range(stored, kind)
    return stored | {path: leaf.clone() for found in held.values() for path, leaf in found.under.items()}


def _read(
    adapters: Mapping[str, Path], out: Path, base: str | None, overwrite: bool
) -> tuple[dict[str, Path], dict[str, Held], dict[str, LoraFile]]:
    """Places and contents of adapters, folders of PEFT or files of other tools. Raises: ValueError for all problems."""
    problems = [] if adapters else ["no adapters: give at least one"]
    problems += place_problems(out, adapters.values(), overwrite=overwrite)
    held, files, places = dict[str, Held](), dict[str, LoraFile](), dict[str, Path]()
    for name, path in adapters.items():
        label = f"adapter {name!r}"
        with errors.collected(problems):
            places[name] = local_folder(label, Path(path))
            if file := file_of(places[name]):
                files[name] = read_file(label, file)
            else:
                held[name] = read_adapter(label, places[name])
    if held and files:
        problems.append(f"{some_of(held)} are folders of PEFT, {some_of(files)} files of other tools: {WHOLE}")
    if base is not None and files and not held:
        problems.append(f"base is {base!r}, but LoRA files name none, and it is not read: leave it out")
    problems += _problems(held, base)
    problems += file_problems({f"adapter {name!r}": found for name, found in files.items()})
    problems += _factor_problems({name: own.factors for name, own in held.items()}, held)
    problems += _factor_problems({name: own.factors for name, own in files.items()}, held)
    errors.raise_problems(problems)
    return places, held, files


def _problems(held: Mapping[str, Held], base: str | None) -> list[str]:
    """Errors for settings that differ among the adapters."""
    problems = []
    bases = {name: str(found.config.get("base_model_name_or_path")) + _revision(found) for name, found in held.items()}
    if base is None and len(set(bases.values())) > 1:
        named = ", ".join(f"{name} {place!r}" for name, place in bases.items())
        problems.append(f"adapters name different bases ({named}): if these are one model, give its name as --base")
    kinds = {name: kind for name, found in held.items() if (kind := found.config.get("task_type"))}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{name} {kind!r}" for name, kind in kinds.items())
        problems.append(f"adapters differ in task_type ({named}): they are of different models")
    under = dict[str, tuple[str, Tensor]]()
    for name, found in held.items():
        for path, leaf in found.under.items():
            other, first = under.setdefault(path, (name, leaf))
            if not torch.equal(first, leaf):
                problems.append(
                    f"{path!r} differs between {other} and {name}: they were trained from different weights"
                )
    return problems


def _factor_problems(factors: Mapping[str, Mapping[str, Factors]], held: Mapping[str, Held]) -> list[str]:
    """Errors for factors that cannot be merged with each other. Args: factors: by adapter and module."""
    problems = [
        f"adapter {name!r}: the factors of {module!r} hold values that are NaN or infinite: save it again"
        for name, found in factors.items()
        for module, (a, b, _) in found.items()
        if not bool(a.isfinite().all() and b.isfinite().all())
    ]
    shapes: dict[str, dict[tuple[Any, ...], str]] = {}
    for name, found in factors.items():
        for module, (a, b, _) in found.items():
            kind = [module in own for own in (held[name].embeddings, held[name].parameters)] if name in held else []
            shapes.setdefault(module, {}).setdefault((len(b), a.shape[1], *kind), name)
    problems += [
        f"{module!r} is of shape {', '.join(f'{shape[:2]} in {name}' for shape, name in found.items())}: they are of "
        "different models"
        for module, found in shapes.items()
        if len(found) > 1
    ]
    return problems


def _revision(held: Held) -> str:
    """That of its base, which peft loads with it, as @REVISION."""
    revision = held.config.get("revision")
    return "" if revision in (None, "main") else f"@{revision}"


def _config(held: Mapping[str, Held], merged: Collection[str], base: str | None, rank: int) -> dict[str, Any]:
    configs = [found.config for found in held.values()]
    parameters = {module for found in held.values() for module in found.parameters}
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base or configs[0].get("base_model_name_or_path"),
        "revision": None if base else configs[0].get("revision"),
        "task_type": next((kind for config in configs if (kind := config.get("task_type"))), None),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "fan_in_fan_out": any(config.get("fan_in_fan_out") for config in configs),
        "target_modules": sorted(set(merged) - parameters),
        "target_parameters": sorted(f"{module}.in_proj_weight" for module in parameters.intersection(merged)) or None,
        "modules_to_save": None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
