"""Files beside the weights of a checkpoint (configuration, tokenizer, chat template), and which input they are from."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...checkpoint import STATISTICS, read_json
from .quantised import plain_config, quantised_by
from .reading import MODULES, OF_TRAINERS, PICKLES, PIPELINE, ROUTER, SUFFIXES, config_of, module_folders

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
PROCESSOR = "*processor_config.json"
_OWN_FOLDERS = "*_tokenizer/*", "speaker_embeddings*", "speaker_embeddings/**/*"  # of a processor
_WORDS = "wordembedding_config.json", "whitespacetokenizer_config.json", "phrasetokenizer_config.json"
OTHERS = PROCESSOR, PIPELINE, MODULES, ROUTER, "*sentence*.json", *_OWN_FOLDERS, *_WORDS  # and of `module_folders` all
# weights that are used beside those of a model: Qwen2.5-Omni's speakers, MMS's adapters of languages, BGE-M3's heads
COPIED = "spk_dict.pt", "colbert_linear.pt", "sparse_linear.pt", "adapter.*.safetensors", "adapter.*.bin"
_PASSED = (  # files of weights that need no note beside those that are read, since the output loses nothing with them
    *("model[.-]*", "pytorch_model*", "diffusion_pytorch_model*", "adapter_model.*"),  # read, or the same once more
    *("consolidated*", "openvino_*", "open_clip_*", "ggml*", "lit_model.pth"),  # of other programs
    *("adapter_[0-9]*.pt", "[0-9]*_adapters.safetensors"),  # of steps before the last one
    *(*OF_TRAINERS, "*_state.*", "*_model_states.pt", "*_world_size_*"),
    *(*STATISTICS.values(), "smat_*", "*.resume.safetensors"),  # of train.py and the Trainer with SMAT
)
TEMPLATE = "chat_template.jinja"
_OLD_TEMPLATE = "chat_template.json"
_WITH_TEMPLATE = "processor_config.json", _OLD_TEMPLATE, "tokenizer_config.json"  # as a field; a processor's is first
_DTYPES = "dtype", "torch_dtype"
WEIGHT_FILES = (*SUFFIXES, ".safetensors.index.json", ".bin", ".msgpack", ".h5", ".onnx")  # merged, or of base alone


def files_of(root: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files of a checkpoint that these patterns name."""
    found = sorted({file for pattern in patterns for file in root.glob(pattern) if file.is_file()})
    return {str(file.relative_to(root)): file for file in found}


def others_of(root: Path) -> dict[str, Path]:
    """The files of a checkpoint that are neither weights nor those of the model itself and its tokenizer."""
    found = files_of(root, (*OTHERS, *COPIED))
    for folder in module_folders(root):
        own = {str(Path(folder.relative_to(root), name)): file for name, file in files_of(folder, ["*"]).items()}
        found |= {name: file for name, file in own.items() if not name.endswith(WEIGHT_FILES)}
    return found


def unread_weights(root: Path) -> list[str]:
    """Files of weights beside those of a model or an adapter, by name, that are neither read nor copied.

    Passed over are a trainer's state and what stands for the model's own weights; in pipelines, whose weights lie in
    folders, files of the whole.
    """
    if not root.is_dir() or (root / PIPELINE).exists():
        return []
    known = {*others_of(root), *files_of(root, (*CONFIG, *TOKENIZER))}
    for index in root.glob("*.index.json"):
        placed = read_object(index).get("weight_map")
        known |= set(map(str, placed.values())) if isinstance(placed, dict) else set()
    found = {file.name for file in root.iterdir() if file.suffix in SUFFIXES + PICKLES and file.is_file()} - known
    return sorted(name for name in found if not any(fnmatch(name, pattern) for pattern in _PASSED))


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
    files: Files = {**others_of(base), **files_of(config, CONFIG)}
    files |= tokenizer if isinstance(tokenizer, dict) else files_of(tokenizer, TOKENIZER)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    for path, file in files.items():  # of components too
        if not path.endswith("config.json") or not isinstance(file, Path):
            continue
        own = read_object(file)
        if quantised_by(own):
            files[path] = _json(own := plain_config(own))
        if name is not None and path.endswith("/config.json") and (fields := own.keys() & set(_DTYPES)):
            files[path] = _json(own | dict.fromkeys(fields, name))
    if name is None and config != base:
        name = config_of(base).get("dtype") or config_of(base).get("torch_dtype")
    if "config.json" in files:
        before = config_of(config)
        after = before | dict(changes)
        after |= {field: name for field in _DTYPES if name is not None and field in before}
        if (after := _renumbered(plain_config(after), numbers)) != before or dtype is not None:
            files["config.json"] = _json(after)
    if numbers and "generation_config.json" in files:
        files["generation_config.json"] = _json(_renumbered(read_object(config / "generation_config.json"), numbers))
    if isinstance(tokenizer, Path) and tokenizer != base and _field(read_object(files.get(_WITH_TEMPLATE[0]))):
        chat_template = template_of(tokenizer) if chat_template is None else chat_template
    if chat_template is not None:
        files[TEMPLATE] = chat_template.encode()
        files.pop(_OLD_TEMPLATE, None)
        for path in _WITH_TEMPLATE:
            own = read_object(files.get(path))
            if own.pop("chat_template", None) is not None:
                files[path] = _json(own)
    return files


def template_of(root: Path) -> str | None:
    """The chat template of a checkpoint, of its processor if that has one; the default one of several."""
    *of_processor, of_tokenizer = (_field(read_object(root / name)) for name in _WITH_TEMPLATE)
    if text := next(filter(None, of_processor), None):
        return text
    return (root / TEMPLATE).read_text(encoding="utf-8") if (root / TEMPLATE).is_file() else of_tokenizer


def _field(config: Mapping[str, Any]) -> str | None:
    """The default chat template in a configuration."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = _by_name(found).get("default")
    return found if isinstance(found, str) else None


def _by_name(templates: object) -> dict[str, Any]:
    """The templates of a list in tokenizer_config.json."""
    entries = templates if isinstance(templates, list) else []
    return {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}


def named_templates(root: Path) -> dict[str, str]:
    """The chat templates of a checkpoint beside the default one, by name."""
    listed = _by_name(read_object(root / "tokenizer_config.json").get("chat_template"))
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


def _renumbered(config: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    def new(value: Any) -> Any:
        if isinstance(value, list):
            return [new(entry) for entry in value]
        return numbers.get(value, value) if isinstance(value, int) else value

    return {
        name: new(value) if name.endswith("_token_id") and isinstance(value, (int, list)) else value
        for name, value in config.items()
    }


def read_object(file: Path | bytes | None) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read."""
    try:
        found = read_json(file) if isinstance(file, Path) else json.loads(file or b"")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
