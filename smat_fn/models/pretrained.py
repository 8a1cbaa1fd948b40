"""Loading of pretrained models, with one message for each way it can fail."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .. import errors
from ..grad import ModuleLoss
from ..importing import uncollected
from ..progress import downloading
from ..types import Aux, Where
from ..where import block_linear
from .modules import FullLoss

# as ``from_pretrained`` takes it: a device by module, "auto", "balanced" or "sequential"; or the JSON file of a mapping
DeviceMap: TypeAlias = str | Path | Mapping[str, str | int]

log = logging.getLogger(__name__)

NO_EOS = "the tokenizer has no EOS token, nothing would end an answer: set tokenizer.eos_token, save it with the model"


class LanguageModel(NamedTuple):
    """A pretrained causal model or encoder-decoder, ready to train."""

    module: nn.Module  # in eval mode: no dropout
    tokenizer: Any
    params: dict[str, Tensor]  # theta_0, tied weights once; the module's own storage: not to be written to
    loss_fn: ModuleLoss  # loss_fn(params, batch) -> (loss, number of supervised tokens)
    where: Where  # the masked set S


def language_model(module: nn.Module, tokenizer: Any, loss: Callable[..., tuple[Tensor, Aux]]) -> LanguageModel:
    """The bundle of a module, which is put into eval mode, and a loss of it."""
    params = {name: p.detach() for name, p in module.eval().named_parameters() if p.requires_grad}
    return LanguageModel(module, tokenizer, params, FullLoss(module, loss), block_linear(module))


def read(
    auto: str,
    what: str,
    source: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    attention: str | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer by ``from_pretrained``, on a device or split over several.

    Args:
        auto: class of ``transformers`` that loads the model.
        what: kind of model, for messages.
        source: and all others as `causal_lm.load`, with its errors.
    """
    options: dict[str, Any] = {"dtype": floating(dtype), "attn_implementation": attention}
    if device_map is not None:
        options["device_map"] = _device_map(device_map)
    module, tokenizer = fetch(source, f"{what} with its tokenizer", auto, "AutoTokenizer", **options)
    check_tokenizer(tokenizer, vocabulary_of(module))
    if device_map is None:
        return module.to(device), tokenizer
    _check_placed(module)
    return module, tokenizer


def floating(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype, given itself or by name. Raises: ValueError unless it is a floating-point dtype."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is not a floating-point dtype: choose 'bfloat16' or 'float32'")
    return kind


def fetch(
    source: str | Path,
    what: str,
    auto: str,
    *beside: str,
    parts: Sequence[str] = (),
    optional: tuple[str, ...] = (),
    **options: Any,
) -> list[Any]:
    """A model and what comes with it by ``from_pretrained``.

    Args:
        source: folder or hub repository, ``owner/name`` or ``owner/name@revision``.
        what: kind of model, for messages.
        auto: class of ``transformers`` that loads the model.
        beside: classes that load the rest: AutoTokenizer, AutoImageProcessor.
        parts: modules and parameters that the model must have.
        optional: prefixes of names of weights that a checkpoint may lack.
        options: of the model's ``from_pretrained``.

    Raises:
        ValueError: says what cannot be loaded, is not there, or is missing, and what to give instead.
    """
    import transformers

    if (Path(source) / "adapter_config.json").is_file():
        raise ValueError(_adapter(source))
    try:
        name, revision = _pinned(source)
        # no code of the folder is run, and nobody is asked whether it may be
        own: dict[str, Any] = {"trust_remote_code": False, **revision}
        with downloading(source), _no_table():
            with uncollected():  # the second is most of what any model's own module imports
                load, _ = getattr(transformers, auto).from_pretrained, transformers.PreTrainedModel
            module, info = load(name, output_loading_info=True, **own, **options)
        if lacking := [part for part in parts if not hasattr(module, part)]:
            raise ValueError(f"a {type(module).__name__}, it has no {', no '.join(lacking)}")
        # the other backend of image processors resizes with other rounding, and needs torchvision
        backend = {"AutoImageProcessor": {"backend": "pil"}}
        rest = [getattr(transformers, kind).from_pretrained(name, **own, **backend.get(kind, {})) for kind in beside]
    # RuntimeError: sizes that differ; TypeError: a configuration of other keys, as timm's
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, TypeError) as error:
        gated = type(error.__cause__).__name__ == "GatedRepoError"
        raise ValueError(
            f"{str(source)!r} cannot be loaded as {what}: give a folder of one, or a hub repository that is in the "
            f"cache or can be reached{', with HF_TOKEN or hf auth login for a gated one' if gated else ''} "
            f"({shorten(str(error), 300)})"
        ) from error
    _check_loaded(source, auto, module, info, optional)
    if getattr(module.config, "rescale_every", None):
        module.config.rescale_every = 0  # RWKV would halve weights in place, those of the caller, when it first decodes
    return [module, *rest]


def _check_loaded(
    source: str | Path, auto: str, module: Any, info: Mapping[str, Any], optional: tuple[str, ...]
) -> None:
    """Log weights that were left out. Raises: ValueError for missing weights, and for an adapter over its base."""
    if getattr(module, "_hf_peft_config_loaded", False):  # of the hub: transformers puts it over its base
        raise ValueError(_adapter(source))
    if names := sorted(name for name in info["missing_keys"] if not name.startswith(optional)):
        encoder = ", or, for an encoder, the preset text of train.py" if auto == "AutoModelForCausalLM" else ""
        raise ValueError(
            f"{str(source)!r} lacks {len(names)} weights of {type(module).__name__} (first: {names[0]}): "
            f"give a checkpoint of the whole model{encoder}"
        )
    if unused := sorted(info["unexpected_keys"]):
        log.warning(
            f"{source}: {type(module).__name__} has no place for {len(unused)} of the stored weights (first: "
            f"{unused[0]}): they are left out, as heads of other tasks are; merge.py export keeps them"
        )


def _adapter(source: str | Path) -> str:
    """Error message for an adapter in place of a model."""
    merging = f"merge.py wa --base BASE --experts {source} --out OUT"
    return f"{str(source)!r} holds an adapter: write a whole model, {merging}, and give OUT/wa"


@contextmanager
def _no_table() -> Iterator[None]:
    """Withholds the table of missing and unused weights of ``transformers``, which calls unused weights random."""

    def passes(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or any(kind in text for kind in ("MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _check_placed(module: nn.Module) -> None:
    """Every weight lies on a device. Raises: ValueError that names the parts that a device map has put elsewhere."""
    if not (left := [name for name, p in module.named_parameters() if p.is_meta]):
        return
    raise ValueError(
        f"the device map leaves {len(left)} weights on no device, {left[0]} the first: weights that are offloaded to "
        "CPU or disk cannot be trained; give more devices, or a map that puts every module on one"
    )


def _device_map(given: DeviceMap) -> Any:
    if find_spec("accelerate") is None:
        raise ValueError("device_map needs the package accelerate: pip install accelerate")
    if isinstance(given, Mapping):
        return dict(given)
    if Path(given).suffix != ".json":
        return str(given)
    try:
        found = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"device_map {str(given)!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"device_map {str(given)!r} holds no mapping of modules to devices")
    return found


def config_of(source: str | Path) -> Any:
    """The config of a folder or hub repository; None if it cannot be loaded."""
    from transformers import AutoConfig

    name, revision = _pinned(source)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **revision)
    except (OSError, ValueError, TypeError, AttributeError):  # the last two of a file that is no mapping
        return None


def facts_of(source: str | Path, subfolder: str) -> dict[str, Any]:
    """Read config.json in a subfolder of a model; empty if there is none."""
    from transformers import PretrainedConfig

    name, revision = _pinned(source)
    try:
        return dict(PretrainedConfig.get_config_dict(name, subfolder=subfolder, **revision)[0])
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _pinned(source: str | Path) -> tuple[str | Path, dict[str, str]]:
    """The source without its revision, and this as an option of ``from_pretrained``."""
    name, _, revision = str(source).partition("@")
    return (name, {"revision": revision}) if revision and not Path(source).exists() else (source, {})


def is_encoder_decoder(source: str | Path) -> bool:
    """Whether a model's config says so; False if it cannot be loaded."""
    return bool(getattr(config_of(source), "is_encoder_decoder", False))


def vocabulary_of(module: Any) -> int:
    """Rows of a model's token embeddings. Raises: ValueError for one without such a table, as CANINE."""
    try:
        return int(module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{type(module).__name__} has no table of token embeddings, which is needed here: use a model with one"
        ) from error


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """The tokenizer can close an answer, and its vocabulary and special tokens have rows in the embedding.

    Args: vocabulary: rows of the embedding.
    Raises: ValueError that lists what is wrong.
    """
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    outside = [f"its {name} token {i}" for name, i in special.items() if i is not None and i >= vocabulary]
    if tokenizer.vocab_size > vocabulary:
        outside.insert(0, f"its {tokenizer.vocab_size} tokens")
    problems = [NO_EOS] if special["eos"] is None else []
    if outside:
        problems.append(
            f"the embedding has {vocabulary} rows, too few for the tokenizer ({', '.join(outside)}): "
            "take the model's own tokenizer, or resize the embedding and save the result as the base"
        )
    errors.raise_problems(problems)


def checkpoint_blocks(module: Any) -> None:
    """Switches on non-reentrant gradient checkpointing in a ``transformers`` module, in place, without dropout."""
    # the first name is new, the second one warns where the first exists
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # only reentrant checkpointing needs this hook on the embedding, and torch.func refuses it
    module.disable_input_require_grads()
    for layer in module.modules():
        if getattr(layer, "gradient_checkpointing", False):
            # transformers checkpoints in training mode alone; the layers inside stay in eval mode
            layer.training = True
            for name, value in list(vars(layer).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
