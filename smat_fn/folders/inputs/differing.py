"""Differences between the files beside the weights of models: configurations, labels, chat templates, code."""

import filecmp
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...checkpoint import read_json
from ...errors import problems_of, some_of
from .adapters.peft import is_adapter
from .reading import MODULES, PIPELINE, config_of, load_config
from .side_files import (
    COPIED,
    PROCESSOR,
    TOKENIZER,
    files_of,
    others_of,
    read_object,
    template_of,
    unlike_templates,
    unread_weights,
)
from .towers import compared
from .vocabulary import FITTED

# what a model computes is not what its weights say alone: by kind, the names in config.json
ERRORS = {
    "another kind of model": ("model_type",),
    "another activation": ("hidden_act", "hidden_activation", "activation_function"),
    "other heads": ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"),
    "labels in another order": ("id2label", "label_names"),
}
NOTES = {
    "positions": (
        *("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "factor"),
        *("max_position_embeddings", "sliding_window"),
    ),
    "norms": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "special tokens": ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    "labels": ("id2label", "label_names"),
}
# of a field that config.json lacks, as in older ones: what most classes have
_DEFAULTS = {"rope_theta": 10000.0, "rope_type": "default", "sliding_window": None}
_KNOWN = {name for names in (*ERRORS.values(), *NOTES.values()) for name in names}
_UNREAD = {  # of what is left: what weights and tokenizers say, and what no output of the model depends on
    "_name_or_path", "architectures", "auto_map", "dtype", "feature_extractor_type", "finetuning_task",
    "gradient_checkpointing", "image_processor_type", "initializer_range", "label2id", "n_layer",
    "num_hidden_layers", "num_layers", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "processor_class", "repo_or_path", "return_dict", "task_specific_params", "torch_dtype",
    "transformers_version", "unsloth_version", "use_cache", "vocab_size",
}  # fmt: skip


def differences(
    base: Path, others: Mapping[str, Path], *, chosen: bool, template: bool, options: bool = True
) -> tuple[list[str], list[str]]:
    """Problems and notes: configurations and chat templates of experts that differ from base's.

    Args:
        others: checkpoints by label; those without a config.json have base's.
        chosen: the user has said whose configuration the output has, so that no difference is a problem.
        template: the user has said which chat template it has.
        options: the caller takes ``config_from``.
    """
    way = (
        "merge models of one configuration, or say whose the output has, by config_from"
        if options
        else f"give models of one configuration, or write its weights under base's first, {FITTED} --config-from base"
    )
    problems, notes = list[str](), list[str]()
    for label, root in others.items():
        problems += [f"{label}: {text}" for text in problems_of(load_config, root)]
        own, config = compared(config_of(base), config_of(root))
        own, config = _alike(_flat(own), _flat(config))
        rest = {_last(name) for name in own.keys() & config.keys()} - _KNOWN - _UNREAD
        other = {"settings": sorted(name for name in rest if "drop" not in name)}
        for kind, names in {**ERRORS, **NOTES, **other}.items() if own and config else ():
            found = [
                path
                for name in names
                for path in own
                if _last(path) == name and _unlike(own[path], config.get(path), kind, path)
            ]
            said = ", ".join(f"{name} {_short(config[name])}, base's is {_short(own[name])}" for name in found)
            if found and kind in ERRORS and not chosen:
                problems.append(f"{label} has {kind} in config.json ({said}), which its weights do not show: {way}")
            elif found:
                notes.append(f"{label} has {kind}: {said}" if kind in ERRORS else f"{label} has other {kind}: {said}")
        notes += special_tokens(label, base, root)
        notes += _texts(label, base, root, chosen=chosen, template=template)
        notes += [] if chosen else _code(label, base, root)
        notes += _settings(label, base, root)
    if not chosen:
        problems += [f"{text}: {way}" for text in _orders_among(base, others)]
    return problems, notes


def _orders_among(base: Path, others: Mapping[str, Path]) -> Iterator[str]:
    """Errors for labels that experts have in several orders, where base has no names for them."""
    first = dict[tuple[str, ...], tuple[str, list[str]]]()
    if _labels(base):
        return
    for label, root in others.items():
        if names := _labels(root):
            other, known = first.setdefault(tuple(sorted(names)), (label, names))
            if names != known:
                yield (
                    f"{label} has labels in another order in config.json than {other} ({', '.join(names)} and "
                    f"{', '.join(known)}), which their weights do not show"
                )


def _labels(root: Path) -> list[str]:
    """The names of a model's classes, in their order; none for those that transformers makes up."""
    labels = config_of(root).get("id2label")
    with suppress(TypeError, ValueError):
        names = [str(name) for _, name in sorted((int(place), name) for place, name in dict(labels or {}).items())]
        return [] if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names
    return []


def _alike(own: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two configurations with the fields of `_DEFAULTS` that one of them has, and the names of classes."""
    nested = ("rope_parameters", "rope_scaling")  # of layers of several kinds: not taken apart
    plain = not any(_last(path) in nested and value for side in (own, config) for path, value in side.items())
    for path in {**own, **config} if own and config else ():
        name, labels = _last(path), config.get(path)
        if name in _DEFAULTS and (plain or name == "sliding_window"):
            for side in (own, config):
                off = side.get(f"{path.removesuffix(name)}use_{name}") is False  # as Qwen2's window
                side[path] = _DEFAULTS[name] if off or side.get(path) is None else side[path]
        elif name == "id2label" and own.get(path) is None and isinstance(labels, dict):
            own[path] = {place: f"LABEL_{place}" for place in labels}
    return own, config


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a configuration and, as "text_config.hidden_act", of those inside it."""
    found: dict[str, Any] = {}
    for name, value in _one_rope(config).items():
        inside = isinstance(value, dict) and (name.endswith("_config") or "model_type" in value)  # encoder, decoder
        found |= _flat(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return found


# of Qwen2-VL and Phi-3, as transformers reads them; of Qwen2-VL's vision tower, which transformers 4 does not name
_ROPES = {"mrope": "default", "su": "longrope", "axial": "default"}


def _one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the rotary positions of either form as single fields: rope_theta, rope_scaling.rope_type.

    transformers 5 writes them as ``rope_parameters``, before it was ``rope_scaling``, null where nothing is scaled.
    """
    fields = {"rope_theta", "rope_scaling", "rope_parameters"}
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values())  # of layers
    if by_kind or fields.isdisjoint(config):
        return dict(config)
    found = {name: value for name, value in config.items() if name not in fields}
    inside = {name: value for name, value in given.items() if name not in ("type", "rope_type", "rope_theta")}
    kind = given.get("rope_type", given.get("type", "default"))
    return found | {
        "rope_theta": given.get("rope_theta", config.get("rope_theta")),
        "rope_scaling.rope_type": _ROPES.get(str(kind), kind),
        **{f"rope_scaling.{name}": value for name, value in inside.items()},
    }


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _unlike(left: Any, right: Any, kind: str, path: str = "") -> bool:
    """Whether two values of a field differ in a way that is of this kind."""
    if left == right or (None in (left, right) and _last(path) != "sliding_window"):
        return False
    if path.endswith("model_type"):
        kinds = {_kind(side, inner="." in path) for side in (left, right)}
        return len(kinds) > 1 and "" not in kinds  # transformers 4 wrote "" for some parts
    if kind.startswith("labels"):
        names = [side.values() if isinstance(side, dict) else side for side in (left, right)]
        found = [sorted(map(str, side)) if isinstance(side, Collection) else side for side in names]
        return (found[0] == found[1]) == (kind in ERRORS)
    lists = isinstance(left, list) and isinstance(right, list)
    return kind != "settings" or not lists or len(left) == len(right)  # stacks have lists of other lengths


def _kind(name: object, *, inner: bool) -> str:
    """A model_type without what transformers 4 and 5 write differently: lfm2-vl and lfm2_vl, Glm4vMoe and glm4v_moe.

    Args: inner: of a part; Qwen2-VL's vision tower is called qwen2_vl by the former, qwen2_vl_vision by the latter.
    """
    words = re.sub(r"_(vision|text)$", "", str(name)) if inner else str(name)
    return re.sub("[-_]", "", words).lower()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _texts(label: str, base: Path, root: Path, *, chosen: bool, template: bool) -> Iterator[str]:
    left, right = template_of(base), template_of(root)
    if right is not None and left != right and not template:
        what = "has a chat template, base has none" if left is None else "has another chat template than base"
        yield f"{label} {what}: the output has {'none' if left is None else 'that of base'}"
    if (named := unlike_templates(base, root)) and not template:
        yield f"{label} has other named chat templates than base ({named}): the output has those of base"
    if _has_tokenizer(root) and not _has_tokenizer(base) and not template:
        yield f"{label} has a tokenizer, base has none: the output has none, copy one there"
    own, others = (read_object(path / "generation_config.json") for path in (base, root))
    if own and others:
        found = sorted(
            name
            for name in own.keys() | others.keys()
            if own.get(name) != others.get(name) and name != "transformers_version"
        )
        if found and not chosen:
            said = f"has another generation_config.json than base ({', '.join(found)})"
            yield f"{label} {said}: the output has that of base"
    # one that transformers made of config.json when it saved the model says nothing more
    if others and not own and not chosen and config_of(base) and not others.get("_from_model_config"):
        yield f"{label} has a generation_config.json, base has none: the output has none"


def _has_tokenizer(root: Path) -> bool:
    return any("chat_template" not in name for name in files_of(root, TOKENIZER))


def special_tokens(label: str, base: Path, root: Path, *, of: str = "base") -> Iterator[str]:
    """Notes on tokens that begin and end texts, where config.json does not show that they differ: in adapters."""
    own, others = (read_object(path / "tokenizer_config.json") for path in (base, root))
    left, right = config_of(base), config_of(root)
    for name in ("bos_token", "eos_token"):
        token, other = (
            value.get("content") if isinstance(value, dict) else value for value in (own.get(name), others.get(name))
        )
        if token and other and token != other and not _unlike(left.get(f"{name}_id"), right.get(f"{name}_id"), name):
            yield f"{label} has other special tokens: {name} {other!r} of its tokenizer, {of}'s is {token!r}"


def _code(label: str, base: Path, root: Path) -> Iterator[str]:
    """A note on code of its own that an expert brings along."""
    own, others = (files_of(path, ["*.py"]) for path in (base, root))
    if found := [name for name in own.keys() & others.keys() if own[name].read_bytes() != others[name].read_bytes()]:
        yield f"{label} has another {' and '.join(sorted(found))} than base: the output has that of base"


def _settings(label: str, base: Path, root: Path) -> Iterator[str]:
    """Notes on what comes from base alone: pooling, image processors, schedulers and components of a pipeline."""
    own, others = (files_of(path, (PROCESSOR, *COPIED)) for path in (base, root))
    if more := [name for name in others if name not in own]:
        yield f"{label} has files that base lacks ({some_of(more)}): the output lacks them, copy them there"
    weights = [name for name in others if name in own and not name.endswith(".json")]
    if unlike := [name for name in weights if not filecmp.cmp(own[name], others[name], shallow=False)]:
        yield f"{label} has other weights than base in {some_of(unlike)}: the output has those of base"
    if (root / MODULES).is_file() and not (base / MODULES).is_file():
        yield (
            f"{label} is a model of sentence-transformers, base is not: the output has no pooling, copy {MODULES}, the "
            "folders that it names and *sentence*.json into it"
        )
    for name, file in others_of(base).items():
        if file.suffix != ".json" or any(file.match(pattern) for pattern in TOKENIZER):
            continue
        own, other = (_read_settings(path) for path in (file, root / name))
        found = [
            f"{field} {_short(other[field])}, base's is {_short(own[field])}"
            for field in sorted(own.keys() & other.keys() - _UNREAD)
            if not field.startswith("_") and "drop" not in field and _unlike(own[field], other[field], "settings")
        ]
        if found:
            yield f"{label} has another {name} ({', '.join(found)}): the output has that of base"


def unread_notes(roots: Mapping[str, Path]) -> Iterator[str]:
    """Notes on files of weights that are lost in an output. Args: roots: of base and experts, by label."""
    for label, root in roots.items():
        if not is_adapter(root) and (found := unread_weights(root)):
            yield (
                f"{label} holds weights beside its model that are neither merged nor copied ({some_of(found)}): copy "
                "them to the output if it needs them"
            )


def _read_settings(file: Path) -> dict[str, Any]:
    if file.name == PIPELINE:  # of each component the library and the class, null without it
        return {
            name: value[-1] if isinstance(value, list) else value for name, value in read_object(file).items() if value
        }
    if file.name != MODULES:
        return _flat(read_object(file))
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return {"modules": " ".join(entry["type"].rpartition(".")[2] for entry in read_json(file))}
    return {}
