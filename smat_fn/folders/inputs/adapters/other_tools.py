"""Adapters of diffusers, kohya's scripts, LyCORIS and MLX: their tensors by module, and by parameter of a base."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from .... import checkpoint, errors
from ....errors import and_more, some_of
from ..reading import DIFFUSION, DIFFUSION_INDEX, FACTOR, PIPELINE, SUFFIXES, Folder, config_of, is_single
from ..stored import Store
from ..vocabulary import HEAD, by_token
from . import products
from .config import CONFIG, PICKLED, WEIGHTS, config_problems, no_scales, scale_of
from .opened import Made, Opened
from .places import Find, Part, Place, finder, module_of, overlap

DIFFUSERS, MLX = "pytorch_lora_weights.safetensors", "adapters.safetensors"
SETTINGS = "lora_adapter_metadata"  # of diffusers: settings of peft in the header, by component
ENDS = {  # of the names of tensors, and what these are
    **{".lora_A.weight": "A", ".lora_B.weight": "B"},
    **{".lora.down.weight": "A", ".lora.up.weight": "B"},  # of older versions of diffusers
    **{".lora_linear_layer.down.weight": "A", ".lora_linear_layer.up.weight": "B"},
    **{"_lora.down.weight": "A", "_lora.up.weight": "B"},
    **{".lora_down.weight": "A", ".lora_up.weight": "B"},  # of kohya's scripts
    **products.ENDS,
    ".alpha": "alpha",
    ".dora_scale": "magnitude",
}
_NAMES_HERE = {"A": ".lora_A.weight", "B": ".lora_B.weight", **{part: end for end, part in products.ENDS.items()}}
_OF_MLX = {".lora_a": "A", ".lora_b": "B", ".m": "magnitude"}
_BESIDE = "alpha", "magnitude"  # the factors
_DENOISERS, _SECOND = ("unet", "transformer", "prior"), "transformer_2"  # the latter for low noise, in Wan 2.2
_TEXT = {"te": "text_encoder", "te1": "text_encoder", "te2": "text_encoder_2", "te3": "text_encoder_3"}
_FLAT = re.compile(r"lora_(unet|transformer|te[123]?)_(.+)")  # of kohya's scripts, with "_" for "."
_T5 = re.compile(r"encoder[._]block[._]\d")
_LYCORIS = "lycoris_"  # before flat names without a component
_DOTTED = re.compile(r"(unet|transformer(?:_2)?|prior|diffusion_model|text_encoder(?:_[234])?)\.(.+)")
_INSIDE = {  # where one file of a whole model has its components
    "model.diffusion_model.": "unet",
    "cond_stage_model.transformer.": "text_encoder",
    "cond_stage_model.model.": "text_encoder",
    "conditioner.embedders.0.transformer.": "text_encoder",
    "conditioner.embedders.1.model.": "text_encoder_2",
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.clip_g.transformer.": "text_encoder_2",
    "text_encoders.t5xxl.transformer.": "text_encoder_3",
}
_ENCODERS = "cond_stage_model.", "conditioner.", "text_encoders."
_OLD = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}  # of text encoders
MAGNITUDE, DORA = ".lora_magnitude_vector", ".dora_scale"  # of peft's DoRA; of LyCORIS, which has other shapes
_UNREAD = "merge it into its model by the tool that trained it, and give that"
_OF_PEFT = f"give the folder of an adapter of PEFT, in which {CONFIG} says its scale"
_FUSE = "write the whole model by mlx_lm.fuse, and give that"


class Module(NamedTuple):
    """An adapted module of a file: its name there, its component, its path in it, and its tensors by what they are."""

    name: str
    part: str
    path: str
    held: dict[str, str]


_Own: TypeAlias = tuple[Module, Place]  # a module, and what it changes of one weight


def file_of(path: Path) -> Path | None:
    """The weights of another tool's adapter, given as a file or by its folder; None for anything else."""
    if path.is_dir():
        others = WEIGHTS, PICKLED, checkpoint.WEIGHTS, checkpoint.INDEX, PIPELINE, DIFFUSION, DIFFUSION_INDEX
        if any((path / name).exists() for name in others):
            return None
        if named := next((path / name for name in (DIFFUSERS, MLX) if (path / name).is_file()), None):
            return named
        files = [file for file in path.iterdir() if file.suffix in SUFFIXES]  # as in hub repositories
        path = files[0] if len(files) == 1 and not (path / CONFIG).exists() else path
    if path.suffix not in SUFFIXES or not is_single(path):
        return None
    try:
        return path if any(map(FACTOR.search, Store(path).names)) else None
    except (OSError, ValueError, SafetensorError):
        return None  # whoever opens it says why


def open_foreign(label: str, file: Path, base: Folder) -> Opened:
    """The factors of a file by the parameters of base that they change; no tensor but alphas is read.

    Names are those of diffusers, or flat as kohya's; those of the original code mean the same (`finder`).

    Raises: ValueError that lists what is broken, unknown, not of a plain LoRA, or not in base.
    """
    store = open_store(label, file)
    if any(name.endswith(".lora_a") for name in store.names) or file.name == MLX:
        return _of_mlx(label, file, store)
    modules = modules_of(label, file, store, ENDS)
    problems = list[str]()
    settings = settings_of(label, store, modules, problems)
    places, note = _places(label, file, store, modules, base)
    made, scales = Made(), dict[str, float]()
    for leaf, own in _targets(label, file, modules, places, base, problems).items():
        name = module_of(leaf)
        with errors.collected(problems):
            found = [scale_of_module(label, store, module, settings, base) for module, _ in own]
            parts = [
                (module, place.part, scale / found[0])
                for (module, place), scale in zip(own, found, strict=True)
                if place.part
            ]
            scales[name] = found[0]
            if parts:
                _add_parts(label, made, store, leaf, parts, tuple(base.leaves[leaf].shape))
                continue
            ((module, _),) = own
            ends = {stored: _NAMES_HERE[part] for part, stored in parts_of(module).items()}
            ends |= {stored: DORA for part, stored in module.held.items() if part == "magnitude"}
            for stored, end in ends.items():
                made.add(f"{name}{end}", like_of(store, stored), partial(store.get_tensor, stored))
    return Opened({}, made, lambda module, rank: scales[module], problems, {file: store}, note)


def open_store(label: str, file: Path) -> Store:
    """A file, mapped. Raises: ValueError for one that cannot be read."""
    try:
        return Store(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{label}: {file} cannot be read ({error}): copy or download it again") from error


def like_of(store: Store, name: str) -> Tensor:
    """Shape and dtype of a tensor of `modules_of`, as a meta tensor."""
    leaf = store.header(name)
    assert leaf is not None, "`modules_of` refuses dtypes that cannot be merged"
    return leaf


def modules_of(
    label: str,
    file: Path,
    store: Store,
    ends: Mapping[str, str],
    way_out: str = _UNREAD,
) -> list[Module]:
    """The modules that a file adapts.

    Args: ends: of the names of tensors, and what these are; way_out: what to do about other tensors.
    Raises: ValueError for each tensor that is not one of a plain adapter's.
    """
    problems, found, others = list[str](), dict[str, Module](), dict[str, list[str]]()
    for name in store.names:
        end = next((end for end in ends if name.endswith(end)), "")
        if (like := store.header(name)) is None:
            code = store.code(name)
            problems.append(f"{label}: {name!r} is stored as {code}, which cannot be merged: save the adapter again")
        elif not end or name.startswith("base_model."):
            kind = "".join(re.findall(r"[^.]+(?:\.weight|\.bias)?$", name))
            others.setdefault(kind, []).append(name)
        elif ends[end] not in _BESIDE and (like.ndim < 2 or not like.numel()):
            shape = tuple(like.shape)
            problems.append(f"{label}: {name!r} of shape {shape} is not a factor of a matrix: save the adapter again")
        else:
            module = name.removesuffix(end)
            held = found.setdefault(module, Module(module, *_part(module, old=end[0] == "_"), {})).held
            if ends[end] in held:
                problems.append(f"{label}: {held[ends[end]]!r} and {name!r} mean the same: save the adapter again")
            held[ends[end]] = name
    for first, *more in others.values():
        told = and_more([repr(first), *more])
        way = _OF_PEFT if first.startswith("base_model.") else _FUSE if ".lora_a" in ends else way_out
        problems.append(f"{label}: {file.name} holds {told}, which is not of a plain LoRA: {way}")
    alone = [module for module in found.values() if not products.is_complete(parts_of(module))]
    problems += [
        f"{label}: {next(iter(held.values()))!r} has no other factor in {file.name}: save the adapter again"
        for held in (parts_of(module) or module.held for module in alone)
        if not others
    ]
    if not found and not problems:
        problems.append(f"{label}: {file} holds no factors: is it an adapter?")
    errors.raise_problems(problems)
    return list(found.values())


def parts_of(module: Module) -> dict[str, str]:
    """The tensors whose product changes the weight."""
    return {part: name for part, name in module.held.items() if part not in _BESIDE}


def _shapes(store: Store, module: Module) -> dict[str, tuple[int, ...]]:
    return {part: tuple(like_of(store, name).shape) for part, name in parts_of(module).items()}


def _part(module: str, *, old: bool) -> tuple[str, str]:
    """The component that a module's name begins with, "" for none, and its path there."""
    found = _FLAT.fullmatch(module) or _DOTTED.fullmatch(module)
    module = module.removeprefix(_LYCORIS)
    part, path = (_TEXT.get(found[1], found[1]), found[2]) if found else ("", module)
    path = path.replace(".processor.", ".")
    if old:
        above, _, last = path.rpartition(".")
        last = _OLD.get(last, last) if part.startswith("text") else last.replace("to_out", "to_out.0")
        path = f"{above}.{last}"
    return part, path


def settings_of(label: str, store: Store, modules: Sequence[Module], problems: list[str]) -> dict[str, dict[str, Any]]:
    """The settings of peft in the header of diffusers' file, by component; errors go into ``problems``."""
    if (text := store.metadata.get(SETTINGS)) is None:
        return {}
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        problems.append(f"{label}: {SETTINGS} in its header is {found!r:.80}, must be a JSON object: save it again")
        return {}
    if both := next((module.held["alpha"] for module in modules if "alpha" in module.held), ""):
        problems.append(f"{label}: it holds {both!r} and {SETTINGS} in its header, two scales: remove one of them")
    known = dict[str, dict[str, Any]]()
    for part in dict.fromkeys(module.part for module in modules):
        start = f"{part}." if part else ""
        own = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        problems += [
            text.replace(CONFIG, f"{SETTINGS} for {part}" if part else SETTINGS) for text in config_problems(label, own)
        ]
        known |= {} if no_scales(own) else {part: own}
    return known


def scale_of_module(
    label: str, store: Store, module: Module, settings: Mapping[str, Mapping[str, Any]], base: Folder | None
) -> float:
    """alpha / rank, else that of the header's settings, else 1.

    Raises: ValueError for an alpha that is 0 or not a finite number, for names of PEFT alone, which may begin with
        "transformer." in a language model, and as `scale_of`.
    """
    rank = products.rank(_shapes(store, module))
    if name := module.held.get("alpha"):
        alpha = store.get_tensor(name)
        value = float(alpha) if alpha.numel() == 1 else math.nan
        if not math.isfinite(value) or value == 0:
            raise ValueError(f"{label}: {name!r} is {alpha.tolist()}, must be a number other than 0: save it again")
        return 1.0 if rank is None else value / rank  # whole matrices are stored with their scale, as in LyCORIS
    if module.part not in settings:
        config = config_of(base.root) if base is not None and module.part == "transformer" else {}
        of_text = "model_type" in config and "_class_name" not in config
        if (of_text or not module.part) and module.held.get("A", "").endswith(".lora_A.weight"):
            raise ValueError(
                f"{label}: nothing says at which scale {module.name!r} is changed: {_OF_PEFT}, or for a model of "
                "diffusers a file whose names begin with the component (unet., transformer.)"
            )
        return 1.0
    try:
        return scale_of(label, settings[module.part], module.path, rank)
    except ValueError as error:
        raise ValueError(str(error).replace(CONFIG, SETTINGS)) from None


def _places(
    label: str, file: Path, store: Store, modules: Sequence[Module], base: Folder
) -> tuple[dict[str, str], str]:
    """The prefix that leaves of base have, for each component of a file that is in base, and a note on the others.

    Raises: ValueError for a component that a whole model lacks, and where it is not clear which one base is.
    """
    parts = dict[str, list[Module]]()
    for module in modules:
        parts.setdefault(module.part, []).append(module)
    whole = (base.root / PIPELINE).is_file()
    there = {prefix.rstrip("/"): prefix for prefix in base.outputs if prefix and whole}
    if not whole:
        there = {part: start for start, part in _INSIDE.items() if any(leaf.startswith(start) for leaf in base.leaves)}
        whole = any(leaf.startswith(_ENCODERS) for leaf in base.leaves)
    found = dict[str, str]()
    for part in parts if there else ():
        denoiser = part in ("", "diffusion_model", *_DENOISERS)
        if denoiser and _SECOND in there and _SECOND not in parts:
            raise ValueError(
                f"{label}: {file.name} may adapt transformer or {_SECOND} of base {base.root}, for which files have "
                "equal names: give the folder of one of them as base"
            )
        names = part, *(_DENOISERS if denoiser else ())
        if known := next((name for name in names if name in there), None):
            found[part] = there[known]
        elif all(_T5.match(module.path) for module in parts[part]):  # of Flux: 2 in diffusers, 3 in kohya's scripts
            others = [start for name, start in there.items() if name.startswith("text_encoder") and name not in parts]
            fitting = [start for start in others if _all_fit(store, parts[part], base, finder(base, start))]
            found |= {part: fitting[0]} if len(fitting) == 1 else {}
    if not there:
        find = finder(base, "")
        fitting = [part for part, own in parts.items() if any(_fits(store, module, base, find) for module in own)]
        named = [part for part in fitting if part == base.root.name]
        found = dict.fromkeys(named or fitting or parts, "")
        if len(found) > 1:
            what = "each of them fits" if fitting else "none of them fits"
            raise ValueError(
                f"{label}: {file.name} adapts {some_of(parts)}, and {what} base {base.root}: give the whole pipeline "
                "as base, or the folder of one of them, under its name"
            )
    lost = [f"{part or 'a denoiser'} ({len(own)} modules)" for part, own in parts.items() if part not in found]
    if lost and (whole or not found):
        raise ValueError(f"{label}: {file.name} adapts {some_of(lost)}, base has {some_of(there)} alone: {_UNREAD}")
    return found, f"{label} also adapts {some_of(lost)}, which base does not have: left out" if lost else ""


def _all_fit(store: Store, modules: Sequence[Module], base: Folder, find: Find) -> bool:
    return all(_fits(store, module, base, find) for module in modules)


def _fits(store: Store, module: Module, base: Folder, find: Find) -> bool:
    """Whether base has a module under its name and in its shape."""
    made = products.matrix(_shapes(store, module))
    for place, *_ in find(module.path):
        own = base.leaves[place.leaf]
        if made == (place.part.height if place.part else len(own), own.numel() // max(1, len(own))):
            return True
    return False


def _targets(
    label: str, file: Path, modules: Sequence[Module], places: Mapping[str, str], base: Folder, problems: list[str]
) -> dict[str, list[_Own]]:
    """The modules of a file by the weight of base that each changes, several where each changes other rows of it."""
    finders = {prefix: finder(base, prefix) for prefix in places.values()}
    targets, unknown = dict[str, list[_Own]](), list[str]()
    for module in modules:
        if module.part not in places:
            continue
        found = finders[places[module.part]](module.path)
        if not found:
            unknown.append(repr(module.name))
        elif len(found) > 1:
            meant = some_of(repr(place.leaf) for place, *_ in found)
            problems.append(f"{label}: {module.name!r} means {meant} of base: {_UNREAD}")
        for place in found[0] if len(found) == 1 else ():
            own = targets.setdefault(place.leaf, [])
            if same := next((other for other, held in own if overlap(held, place)), None):
                problems.append(
                    f"{label}: {same.name!r} and {module.name!r} both change {place.leaf!r}: save the adapter again"
                )
            else:
                own.append((module, place))
    if unknown:
        problems.append(
            f"{label}: {file.name} adapts {and_more(unknown)}, but base has no parameter of this name: was it trained "
            f"from another base? If base only has other names, {_UNREAD}"
        )
    return targets


def _add_parts(
    label: str,
    made: Made,
    store: Store,
    leaf: str,
    own: Sequence[tuple[Module, Part, float]],
    shape: tuple[int, ...],
) -> None:
    """The factors of parts of a weight as those of the whole: A below each other, B along the diagonal, scaled."""
    pairs = list[tuple[str, str, Part, float]]()
    for module, part, scale in own:
        if not products.is_plain(parts_of(module)) or "magnitude" in module.held:
            raise ValueError(f"{label}: {module.name!r} of {leaf!r} is not a plain LoRA: {_UNREAD}")
        a, b = (tuple(like_of(store, module.held[half]).shape) for half in "AB")
        if a[1:] != shape[1:] or b != (part.height, a[0]):
            raise ValueError(
                f"{label}: B {b} and A {a} of {module.name!r} have no product of shape {(part.height, *shape[1:])}, as "
                f"{leaf!r} {shape} needs: was it trained from another base?"
            )
        pairs.append((module.held["A"], module.held["B"], part, scale))
    rank = sum(len(like_of(store, a)) for a, *_ in pairs)

    def below() -> Tensor:
        return torch.cat([store.get_tensor(a).float() for a, *_ in pairs])

    def along() -> Tensor:
        blocks, column = torch.zeros(shape[0], rank), 0
        for _, b, part, scale in pairs:
            rows = store.get_tensor(b)[part.of_product : part.of_product + part.stop - part.start]
            blocks[part.start : part.stop, column : column + rows.shape[1]] = rows.float() * scale
            column += rows.shape[1]
        return blocks

    name = module_of(leaf)
    made.add(f"{name}.lora_A.weight", torch.empty(rank, shape[1], device="meta"), below)
    made.add(f"{name}.lora_B.weight", torch.empty(shape[0], rank, device="meta"), along)


def _of_mlx(label: str, file: Path, store: Store) -> Opened:
    """An adapter of mlx-lm: s · (lora_a @ lora_b)ᵀ is added; with DoRA rows then have the norms ``m``."""
    config, scale = _mlx_config(label, file)
    ends = {end: kind for end, kind in _OF_MLX.items() if kind != "magnitude" or config["use_dora"]}
    made, problems = Made(), list[str]()
    modules = modules_of(label, file, store, ends)
    for module in modules:
        a, b = (like_of(store, module.held[half]) for half in "AB")
        if a.ndim != 2 or b.ndim != 2:
            what = f"has {a.ndim} dimensions, as the experts of a mixture"
            problems.append(f"{label}: {module.held['A']!r} {what}, which is not read here: {_FUSE}")
            continue
        if (rank := a.shape[1]) != config["r"]:
            problems.append(
                f"{label}: {module.name!r} has rank {rank}, its {CONFIG} says {config['r']}: of different adapters?"
            )
        if config["use_dora"] and "magnitude" not in module.held:
            problems.append(f"{label}: {module.name!r} has no {module.name + '.m'!r}, its magnitude: save it again")
        embedding = by_token(f"{module.name}.weight") and not module.name.endswith(HEAD.removesuffix(".weight"))
        end = ".lora_embedding_{}" if embedding else ".lora_{}.weight"
        for half, like in (("A", a), ("B", b)):
            made.add(module.name + end.format(half), like.T, partial(_transposed, store, module.held[half]))
        if own := module.held.get("magnitude"):
            made.add(f"{module.name}{MAGNITUDE}", like_of(store, own), partial(store.get_tensor, own))
    return Opened(config, made, lambda module, rank: scale, problems, {file: store, file.parent / CONFIG: None})


def _transposed(store: Store, name: str) -> Tensor:
    return store.get_tensor(name).T


def _mlx_config(label: str, file: Path) -> tuple[dict[str, Any], float]:
    """The rank and kind of an adapter of mlx-lm in peft's terms, and its scale.

    Raises: ValueError for weights that are not factors, and where rank or scale is missing or has two meanings.
    """
    path = file.parent / CONFIG
    try:
        found: Any = checkpoint.read_json(path)
        own = found["lora_parameters"] if found.get("fine_tune_type") != "full" else {}
        numbers = {name: own.get(name) for name in ("rank", "scale")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{label}: {path} does not say rank and scale of this adapter of MLX ({error!r}): give the folder that "
            f"mlx_lm.lora wrote, or {_FUSE}"
        ) from error
    kind = found.get("fine_tune_type", "dora" if found.get("use_dora") else "lora")
    if kind not in ("lora", "dora"):
        raise ValueError(f"{label}: its {CONFIG} sets fine_tune_type to {kind!r}, which is not read here: {_FUSE}")
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{label}: {name} in lora_parameters of {path} is {value!r}, must be a number: {_FUSE}")
    rank, scale = numbers["rank"], float(numbers["scale"] or 0)
    if (alpha := own.get("alpha")) not in (None, rank) and "fine_tune_type" not in found:
        raise ValueError(
            f"{label}: lora_parameters of {path} have alpha {alpha!r} and scale {scale:g}, and mlx-lm multiplied scale "
            f"by alpha / rank until June 2024: multiply it there if the adapter is older, and remove alpha"
        )
    return {"r": rank, "use_dora": kind == "dora", "base_model_name_or_path": found.get("model")}, scale
