"""Files beside the weights of a checkpoint (configuration, tokenizer, chat template), and which input they are from."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...checkpoint import read_json
from ...errors import problems_of
from .quantised import plain_config, quantised_by
from .reading import MODULES, PIPELINE, ROUTER, SUFFIXES, config_of, load_config, module_folders
from .towers import compared
from .vocabulary import FITTED

Files: TypeAlias = dict[str, Path | bytes]  # by name: to be copied, or as they are

MORE_TEMPLATES = "additional_chat_templates"
CONFIG = "config.json", "generation_config.json", "*.py", "custom_generate/*"
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    f"{MORE_TEMPLATES}/*.jinja",
    "*.spm",
    "tekken.json",
    "normalizer.json",
    *("*.codes", "dict.txt", "emoji.json", "byte_maps.json", "*_vocab.json", "word_*.json", "*.tokenizer"),
)
OTHERS = "*processor_config.json", PIPELINE, MODULES, ROUTER, "*sentence*.json"  # and of `module_folders` all
WEIGHT_FILES = (*SUFFIXES, ".safetensors.index.json", ".bin", ".msgpack", ".h5", ".onnx")  # merged, or of base alone
TEMPLATE = "chat_template.jinja"

# what a model computes is not what its weights say alone: by kind, the names in config.json
ERRORS = {
    "another kind of model": ("model_type",),
    "another activation": ("hidden_act", "hidden_activation", "activation_function"),
    "other heads": ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"),
    "labels in another order": ("id2label",),
}
NOTES = {
    "positions": (
        *("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "factor"),
        *("max_position_embeddings", "sliding_window"),
    ),
    "norms": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "special tokens": ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    "labels": ("id2label",),
}
_KNOWN = {name for names in (*ERRORS.values(), *NOTES.values()) for name in names}
_UNREAD = {  # of what is left: what weights and tokenizers say, and what no output of the model depends on
    "_name_or_path", "architectures", "auto_map", "dtype", "feature_extractor_type", "finetuning_task",
    "gradient_checkpointing", "image_processor_type", "initializer_range", "label2id", "n_layer",
    "num_hidden_layers", "num_layers", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "processor_class", "return_dict", "task_specific_params", "torch_dtype", "transformers_version",
    "unsloth_version", "use_cache", "vocab_size",
}  # fmt: skip


def files_of(root: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files of a checkpoint that these patterns name."""
    found = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    return {str(file.relative_to(root)): file for file in found}


def _others(root: Path) -> dict[str, Path]:
    """The files of a checkpoint that are neither weights nor those of the model itself and its tokenizer."""
    found = files_of(root, OTHERS)
    for folder in module_folders(root):
        found |= {str(Path(folder.relative_to(root), name)): file for name, file in files_of(folder, ["*"]).items()}
    return {name: file for name, file in found.items() if not name.endswith(WEIGHT_FILES)}


def beside(
    base: Path,
    config: Path,
    tokenizer: Path | Files,
    *,
    changes: Mapping[str, Any],
    numbers: Mapping[int, int],
    dtype: torch.dtype | None,
    chat_template: str | None,
) -> Files:
    """The files of an output beside its weights.

    Args:
        base: checkpoint of what is neither configuration nor tokenizer.
        config: checkpoint of config.json, generation_config.json and code.
        tokenizer: checkpoint of tokenizer and chat template, or these files.
        changes: fields of config.json that the weights decide.
        numbers: new ids of tokens by old ones, of the ids in the configuration.
        dtype: of the weights, None: as ``base`` says.
        chat_template: text of another one.
    """
    files: Files = {**_others(base), **files_of(config, CONFIG)}
    files |= tokenizer if isinstance(tokenizer, dict) else files_of(tokenizer, TOKENIZER)
    for path, file in files.items():  # of components too
        if path.endswith("config.json") and isinstance(file, Path) and quantised_by(own := _read(file)):
            files[path] = _json(plain_config(own))
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is None and config != base:
        name = config_of(base).get("dtype") or config_of(base).get("torch_dtype")
    if "config.json" in files:
        before = config_of(config)
        after = before | dict(changes)
        after |= {field: name for field in ("dtype", "torch_dtype") if name is not None and field in before}
        if (after := _renumbered(plain_config(after), numbers)) != before or dtype is not None:
            files["config.json"] = _json(after)
    if numbers and "generation_config.json" in files:
        files["generation_config.json"] = _json(_renumbered(_read(config / "generation_config.json"), numbers))
    if chat_template is not None:
        files[TEMPLATE] = chat_template.encode()
        own = _read(files.get("tokenizer_config.json"))
        if own.pop("chat_template", None) is not None:
            files["tokenizer_config.json"] = _json(own)
    return files


def template_of(root: Path) -> str | None:
    """The chat template of a checkpoint; the default one of several."""
    if (root / TEMPLATE).is_file():
        return (root / TEMPLATE).read_text(encoding="utf-8")
    found = _read(root / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = _by_name(found).get("default")
    return found if isinstance(found, str) else None


def _by_name(templates: object) -> dict[str, Any]:
    """The templates of a list in tokenizer_config.json."""
    entries = templates if isinstance(templates, list) else []
    return {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}


def named_templates(root: Path) -> dict[str, str]:
    """The chat templates of a checkpoint beside the default one, by name."""
    listed = _by_name(_read(root / "tokenizer_config.json").get("chat_template"))
    files = sorted((root / MORE_TEMPLATES).glob("*.jinja"))
    found = {name: str(text) for name, text in listed.items()}
    found |= {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()}
    return {name: text for name, text in found.items() if name != "default"}


def unlike_templates(base: Path, root: Path) -> str:
    """The names of chat templates, beside the default one, that differ in two checkpoints, joined by commas."""
    own, others = named_templates(base), named_templates(root)
    return ", ".join(sorted(name for name in own.keys() | others.keys() if own.get(name) != others.get(name)))


def chosen_template(asked: str | None, roots: Sequence[Path]) -> str | None:
    """The text that ``chat_template`` asks for; "auto" is the most frequent one of these checkpoints, or the first.

    Raises: ValueError as `template_text`.
    """
    if asked == "auto":
        found = Counter(text.strip() for root in roots if (text := template_of(root)))
        return found.most_common(1)[0][0] if found else None
    return None if asked is None else template_text(asked)


def template_text(asked: str) -> str:
    """A chat template that is given as it is, or as a file. Raises: ValueError for what is neither of them."""
    if "{" in asked:
        _check_template(f"{asked if len(asked) <= 60 else f'{asked[:60]}...'!r}, which", asked)
        return asked
    if not Path(asked).is_file():
        raise ValueError(f"chat_template is {asked!r}: must be auto, a template in Jinja, or a file of one")
    try:
        text = Path(asked).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"chat_template is {asked!r}, a file that is not text in UTF-8 ({error}): correct it"
        ) from error
    _check_template(f"{asked!r}, a file that", text)
    return text


def _check_template(named: str, text: str) -> None:
    """Raises: ValueError for a template that does not compile in Jinja with the tags that transformers knows."""
    # transformers makes its environment inside a function that renders, and takes seconds to import; torch needs jinja2
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """``{% generation %}``, which marks the tokens of an assistant's answer."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=["jinja2.ext.loopcontrols", Generation]).compile(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template is {named} is not valid Jinja (line {error.lineno}: {error.message}): correct it"
        ) from error


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
        own, config = _flat(own), _flat(config)
        rest = {_last(name) for name in own.keys() & config.keys()} - _KNOWN - _UNREAD
        other = {"settings": sorted(name for name in rest if "drop" not in name)}
        for kind, names in {**ERRORS, **NOTES, **other}.items() if own and config else ():
            found = [
                path
                for name in names
                for path in own
                if _last(path) == name and _unlike(own[path], config.get(path), kind)
            ]
            said = ", ".join(f"{name} {_short(config[name])}, base's is {_short(own[name])}" for name in found)
            if found and kind in ERRORS and not chosen:
                problems.append(f"{label} has {kind} in config.json ({said}), which its weights do not show: {way}")
            elif found:
                notes.append(f"{label} has {kind}: {said}" if kind in ERRORS else f"{label} has other {kind}: {said}")
        notes += special_tokens(label, base, root)
        notes += _texts(label, base, root, chosen=chosen, template=template)
        notes += _settings(label, base, root)
    return problems, notes


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a configuration and, as "text_config.hidden_act", of those inside it."""
    found: dict[str, Any] = {}
    for name, value in _one_rope(config).items():
        inside = isinstance(value, dict) and name.endswith("_config")
        found |= _flat(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return found


_ROPES = {"mrope": "default", "su": "longrope"}  # of Qwen2-VL and Phi-3, as transformers reads them


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


def _unlike(left: Any, right: Any, kind: str) -> bool:
    """Whether two values of a field differ in a way that is of this kind."""
    if left is None or right is None or left == right:
        return False
    if kind.startswith("labels"):
        names = [sorted(map(str, side.values())) if isinstance(side, dict) else side for side in (left, right)]
        return (names[0] == names[1]) == (kind in ERRORS)
    lists = isinstance(left, list) and isinstance(right, list)
    return kind != "settings" or not lists or len(left) == len(right)  # stacks have lists of other lengths


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
    own, others = (_read(path / "generation_config.json") for path in (base, root))
    if own and others:
        found = sorted(
            name
            for name in own.keys() | others.keys()
            if own.get(name) != others.get(name) and name != "transformers_version"
        )
        if found:
            yield f"{label} has another generation_config.json than base: {', '.join(found)}"
    # one that transformers made of config.json when it saved the model says nothing more
    if others and not own and not chosen and config_of(base) and not others.get("_from_model_config"):
        yield f"{label} has a generation_config.json, base has none: the output has none"


def special_tokens(label: str, base: Path, root: Path, *, of: str = "base") -> Iterator[str]:
    """Notes on tokens that begin and end texts, where config.json does not show that they differ: in adapters."""
    own, others = (_read(path / "tokenizer_config.json") for path in (base, root))
    left, right = config_of(base), config_of(root)
    for name in ("bos_token", "eos_token"):
        token, other = (
            value.get("content") if isinstance(value, dict) else value for value in (own.get(name), others.get(name))
        )
        if token and other and token != other and not _unlike(left.get(f"{name}_id"), right.get(f"{name}_id"), name):
            yield f"{label} has other special tokens: {name} {other!r} of its tokenizer, {of}'s is {token!r}"


def _settings(label: str, base: Path, root: Path) -> Iterator[str]:
    """Notes on what comes from base alone: pooling, image processors, schedulers and components of a pipeline."""
    if (root / MODULES).is_file() and not (base / MODULES).is_file():
        yield (
            f"{label} is a model of sentence-transformers, base is not: the output has no pooling, copy {MODULES}, the "
            "folders that it names and *sentence*.json into it"
        )
    for name, file in _others(base).items():
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


def _read_settings(file: Path) -> dict[str, Any]:
    if file.name == PIPELINE:  # of each component the library and the class, null without it
        return {name: value[-1] if isinstance(value, list) else value for name, value in _read(file).items() if value}
    if file.name != MODULES:
        return _flat(_read(file))
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return {"modules": " ".join(entry["type"].rpartition(".")[2] for entry in read_json(file))}
    return {}


def _renumbered(config: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    def new(value: Any) -> Any:
        if isinstance(value, list):
            return [new(entry) for entry in value]
        return numbers.get(value, value) if isinstance(value, int) else value

    return {
        name: new(value) if name.endswith("_token_id") and isinstance(value, (int, list)) else value
        for name, value in config.items()
    }


def _read(file: Path | bytes | None) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read."""
    try:
        found = read_json(file) if isinstance(file, Path) else json.loads(file or b"")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
