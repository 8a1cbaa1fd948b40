"""The configuration of an adapter: which settings a merge can follow, and the scale of each module's factors."""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import regex

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"  # of older versions of peft

_LONGEST = 1.0  # seconds that an expression may take: re, which has no limit, may never end
_UNUSED = {  # by the merged weights; everything else that is set, and not handled below, is refused
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",  # of an initialisation, as the other ones: `init_lora_weights` says whether it is in force
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_USED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),  # others change base's weights
    "r": None,
    "lora_alpha": None,
    "rank_pattern": None,
    "alpha_pattern": None,
    "use_rslora": None,
    "fan_in_fan_out": None,
}
_OF_PRODUCTS = {  # fields of LoHa and LoKr alone, which say how the tensors that are stored were made
    "decompose_both",
    "decompose_factor",
    "init_weights",
    "module_dropout",
    "rank_dropout",
    "rank_dropout_scale",
    "use_effective_conv2d",
}
_BIASES = "all", "lora_only"  # that are trained, and stored as whole leaves
MERGED = "merge it into its base with peft, and give the result"
_CHANGED = (
    "give as base the model whose weights this initialisation changed, and set init_lora_weights to true in a copy of "
    "the adapter"
)
_CONVERTED = (
    "peft does not repeat this initialisation exactly on load, so convert the adapter where it was trained, by "
    "save_pretrained(OUT, path_initial_model_for_weight_conversion=INIT)"
)
_CONVERTIBLE = "pissa_niter_", "corda", "lora_ga"  # pissa and olora are repeated exactly
WHOLE = "merge whole models instead, merge.py MERGER --base BASE --experts ADAPTERS"
WIDER = "the widest dtype of the adapters: give smaller weights, or save an adapter in float32"
_UNMERGED = "it is not a fixed change of weights, so it cannot be merged: leave it out"
_WITHOUT_WEIGHTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "XLORA",
    "POLY",
)


def as_lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration; if it is of a LoHa or LoKr, that of a LoRA with the same ranks and scales."""
    if config.get("peft_type") not in ("LOHA", "LOKR"):
        return dict(config)
    own = {name: value for name, value in config.items() if name not in {*_OF_PRODUCTS, "alpha"}}
    return {**own, "peft_type": "LORA", "lora_alpha": config.get("alpha")}


def config_problems(label: str, config: Mapping[str, Any], *, whole: bool = False) -> Iterator[str]:
    """Errors for settings of an adapter under which its weight is not ``W_0 + s B A``, and for unknown ones.

    Args: whole: a whole expert is made of it: rows may have other norms (``use_dora``), biases other values.
    """
    if is_other_kind(config):
        way = _UNMERGED if config["peft_type"] in _WITHOUT_WEIGHTS else MERGED
        yield f"{label}: its {CONFIG} sets peft_type to {config['peft_type']!r}, which is not read here: {way}"
        return
    for name, value in config.items():
        if whole and ((name == "use_dora" and isinstance(value, bool)) or (name == "bias" and value in _BIASES)):
            continue
        allowed = _USED.get(name)
        if name in _UNUSED or (name in _USED and allowed is None) or (allowed and value in allowed):
            continue
        if name == "target_parameters" and not _of_parameters(config):
            continue
        if name in _USED or value not in (None, False, {}, []):
            yield f"{label}: its {CONFIG} sets {name} to {value!r}, which is not read here: {_way_out(name, value)}"
    yield from (f"{label}: in its {CONFIG} {text}" for text in _no_patterns(config))
    yield from (f"{label}: its {CONFIG} has no number {name}: is it a LoRA adapter?" for name in _no_numbers(config))


def _way_out(name: str, value: object) -> str:
    if name == "alora_invocation_tokens":
        return _UNMERGED
    if name != "init_lora_weights" or not str(value).startswith((*_CONVERTIBLE, "loftq")):
        return MERGED
    return _CHANGED if value == "loftq" else f"{_CONVERTED}, or {_CHANGED}"


def no_scales(config: Mapping[str, Any]) -> bool:
    """Whether settings among `config_problems` leave ranks and scales of factors unknown."""
    return any(_no_numbers(config)) or any(_no_patterns(config)) or _of_parameters(config)


def is_other_kind(config: Mapping[str, Any]) -> bool:
    """Whether an adapter is none of LoRA: its other fields are another kind's too."""
    return isinstance(config.get("peft_type"), str) and config["peft_type"] != "LORA"


def _of_parameters(config: Mapping[str, Any]) -> bool:
    """Whether factors are of parameters that are not weights of linear layers, as the experts of a mixture are.

    Those of nn.MultiheadAttention have two dimensions, as such a weight.
    """
    return not all(str(path).endswith(".in_proj_weight") for path in config.get("target_parameters") or ())


def _no_patterns(config: Mapping[str, Any]) -> Iterator[str]:
    """Errors for `rank_pattern` and `alpha_pattern`: each must map regular expressions to numbers."""
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            yield f"{name} is {pattern!r}, must be an object of expressions and numbers"
            continue
        for key in pattern:
            try:
                regex.compile(_whole(key))
            except (regex.error, RecursionError, OverflowError) as error:  # "(" * 9999, "a{9999999999}"
                yield f"{name} has {key!r}, which is not a regular expression ({error})"


def _no_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Names of fields that must be finite numbers and are not."""
    numbers = {name: config.get(name) for name in ("r", "lora_alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        numbers |= {f"{name}[{key!r}]": value for key, value in (pattern.items() if isinstance(pattern, dict) else ())}
    return (
        name
        for name, value in numbers.items()
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max
    )


def targets(config: Mapping[str, Any], module: str) -> bool:
    """Whether ``target_modules`` names a module of a base, as in peft; False where only some layers are adapted.

    Raises: TimeoutError for an expression that takes longer than `_LONGEST`.
    """
    if config.get("layers_to_transform") is not None:
        return False
    return _names(config.get("target_modules"), module) and not _names(config.get("exclude_modules"), module)


def _names(given: object, module: str) -> bool:
    """Whether an expression matches a module's path, or a list has its end."""
    if isinstance(given, str):
        try:
            return regex.fullmatch(given, module, timeout=_LONGEST) is not None
        except (regex.error, RecursionError, OverflowError):
            return False
    return isinstance(given, list) and any(f".{module}".endswith(f".{end}") for end in given)


def scale_of(label: str, config: Mapping[str, Any], module: str, rank: int | None) -> float:
    """The scale of a module's factors: alpha / rank, or alpha / √rank.

    Args: rank: None for a product of whole matrices.
    Raises: ValueError where the configuration gives another rank, or one that is not above 0.
    """
    given = _of_pattern(label, config, "rank_pattern", module, config["r"])
    if not given > 0:
        raise ValueError(f"{label}: {module!r} has rank {given} in its {CONFIG}, must be above 0: save it again")
    if rank is not None and given != rank:
        raise ValueError(f"{label}: {module!r} has rank {rank}, its {CONFIG} says {given}: of different adapters?")
    alpha = _of_pattern(label, config, "alpha_pattern", module, config["lora_alpha"])
    return alpha / math.sqrt(given) if config.get("use_rslora") else alpha / given


def _of_pattern(label: str, config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """The value of the first expression that a module's path ends with, as in peft.

    Raises: ValueError for an expression that takes longer than `_LONGEST`, as only a hostile one does.
    """
    for key, value in (config.get(name) or {}).items():
        try:
            if regex.match(_whole(key), module, timeout=_LONGEST):
                return value
        except TimeoutError:
            raise ValueError(
                f"{label}: in its {CONFIG} {name} has {key!r}, which takes over {_LONGEST} s to match {module!r}: "
                "give the names of modules instead"
            ) from None
    return default


def _whole(expression: str) -> str:
    return rf"(.*\.)?({expression})$"
