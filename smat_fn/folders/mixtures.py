"""Mixtures of experts from folders of dense models: a view of their files that is written as any merge is."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checkpoint, errors
from ..errors import problems_of
from ..merge.around.mixture import (
    ARCHITECTURES,
    MIXTRAL,
    QWEN3,
    Architecture,
    fit_problems,
    origins,
    router_problems,
    scale_problems,
    scaled,
)
from ..merge.parts.chunks import CHUNK
from ..merge.weight_average import WeightAverage
from .inputs.adapters import is_adapter
from .inputs.opening import open_input
from .inputs.reading import Folder, Read, load_config, reader_of_tensor, seen
from .inputs.side_files import CONFIG, TOKENIZER, Files, differences, files_of
from .inputs.vocabulary import one_head, tokenizer_notes
from .prepare import SHARD_SIZE, OutDtype, out_dtypes, place_problems
from .run import Describe, Report, write_job
from .streaming.chunks import Job, Scratch, target
from .writing import layout


class Models(NamedTuple):
    """The opened models of a mixture."""

    base: Folder
    experts: dict[str, Folder]
    architecture: Architecture
    config: dict[str, Any]  # of the mixture
    notes: tuple[str, ...]


def open_models(base: Path, experts: Mapping[str, Path], *, per_token: int) -> Models:
    """Base and experts, from their headers and configurations.

    Args: per_token: experts that a token is sent to.
    Raises: ValueError that lists all models that are not plain Llama or Mistral, or Qwen3, models of one shape.
    """
    problems, opened, notes, architecture = list[str](), dict[str, Folder](), list[str](), MIXTRAL
    for label, path in {"base": base, **{f"expert {name!r}": path for name, path in experts.items()}}.items():
        if is_adapter(path):
            problems.append(f"{label}: {path} is an adapter: make it a whole model first, by merge.py export")
            continue
        with errors.collected(problems):
            opened[label] = open_input(label, path)
            kind = (load_config(opened[label].root) or {}).get("model_type")
            own = next((own for own in ARCHITECTURES if kind in own.kinds), None)
            if label == "base":
                architecture = own or architecture
            if own is None or own is not architecture:
                said = f"of kind {kind}" if kind else "without a model_type in config.json"
                kinds = [kind for own in ARCHITECTURES for kind in own.kinds if label == "base" or own is architecture]
                problems.append(f"{label}: {path} is {said}, must be {' or '.join(kinds)}")
    if not 1 <= per_token <= len(experts):
        problems.append(f"experts_per_token is {per_token}: must be from 1 to the number of experts, {len(experts)}")
    errors.raise_problems(problems)
    start, *_ = one_head(opened.pop("base"), {})  # as in any merge: a copy of the embeddings is left out
    named = dict(zip(experts, opened.values(), strict=True))
    problems += problems_of(lambda: origins(start.leaves, len(named)))
    problems += fit_problems(start.leaves, {name: folder.leaves for name, folder in named.items()})
    roots = {label: folder.root for label, folder in opened.items()}
    wrong, texts = differences(start.root, roots, chosen=False, template=True, options=False)
    notes += [*texts, *tokenizer_notes(start.root, roots)]
    errors.raise_problems([*problems, *wrong])
    if len({folder.root.resolve() for folder in named.values()}) == 1:
        notes.append("all experts are one model: before it is trained, the mixture computes what that model's MLPs do")
    notes += filter(None, [start.note])
    config = mixture_config(architecture, start.root, len(named), per_token) | dict(start.config)
    return Models(start, named, architecture, config, tuple(notes))


def mixture_config(architecture: Architecture, base: Path, experts: int, per_token: int) -> dict[str, Any]:
    """The config.json of a mixture: base's fields that its class has, those that base's class fills in too."""
    import transformers

    try:
        own = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False).to_dict()
    except Exception as error:  # transformers checks fields each its way
        raise ValueError(f"base: transformers refuses its config.json ({' '.join(str(error).split())})") from error
    make = getattr(transformers, f"{architecture.model}Config")
    known = {*make().to_dict(), "head_dim"} - {"model_type", "architectures"}
    kept = {name: value for name, value in own.items() if name in known}
    kept |= {"num_local_experts": experts, "num_experts_per_tok": per_token}
    if "sliding_window" not in own:
        kept["sliding_window"] = None
    if architecture is QWEN3:
        if own.get("use_sliding_window"):
            raise ValueError(
                "base has use_sliding_window, for its last layers alone: a Qwen3-MoE has it for all layers"
            )
        kept |= {"moe_intermediate_size": own["intermediate_size"], "norm_topk_prob": True}
        kept |= {"decoder_sparse_step": 1, "mlp_only_layers": []}  # every layer is a mixture
    # transformers 4 knows the number of a Qwen3-MoE's experts by this name alone
    found = make(**kept).to_dict() | ({"num_experts": experts} if architecture is QWEN3 else {})
    found.pop("_name_or_path", None)  # where base lies here
    return {**found, "architectures": [f"{architecture.model}ForCausalLM"]}


def mixed(models: Models, router: Tensor, residual_scales: Sequence[float | None]) -> Folder:
    """The mixture as a checkpoint, formed while it is read."""
    leaves, reads = dict[str, Tensor](), dict[str, Read]()
    folders = list(models.experts.values())
    for path, origin in origins(models.base.leaves, len(folders)).items():
        folder = models.base if origin.expert is None else folders[origin.expert]
        if origin.router:
            like = models.base.leaves[f"model.layers.{origin.path}.mlp.gate_proj.weight"]
            own = router[int(origin.path)].to(like.dtype)
            leaves[path], reads[path] = own.to("meta"), reader_of_tensor(own)
            continue
        down = origin.expert is not None and "down_proj" in origin.path
        leaves[path] = models.base.leaves[origin.path]
        reads[path] = _scaled(folder.reads[origin.path], residual_scales[origin.expert or 0] if down else None)
    stores = {file: store for folder in (models.base, *folders) for file, store in folder.stores.items()}
    return Folder("the mixture", leaves, reads, stores, models.base.root)


def _scaled(read: Read, factor: float | None) -> Read:
    return lambda start, stop: scaled(read(start, stop), factor)


def merge_mixture(
    models: Models,
    router: Tensor,
    out: Path,
    *,
    residual_scales: Sequence[float | None] = (),
    out_dtype: OutDtype = "same",
    shard_size: int = SHARD_SIZE,
    chunk: int = CHUNK,
    workers: int = 1,
    overwrite: bool = False,
    describe: Describe | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Write a mixture (`merge.around.mixture`) that ``from_pretrained`` of its class loads, as `merge_folders`.

    Bits are those of the experts, cast to ``out_dtype``; memory is that of one chunk and of the router.

    Args:
        models: those of `open_models`.
        router: (layers, N, width).
        residual_scales: a factor of each expert's ``down_proj``, None: 1.
        out_dtype, shard_size, chunk, workers, overwrite, describe: as of `merge_folders`.
        notes: that the report is to hold too.

    Raises: ValueError as `merge_folders`.
    """
    out = checkpoint.follow(out)
    errors.raise_problems(scale_problems(residual_scales, len(models.experts)))
    base, scales = models.base, [*residual_scales, *[None] * (len(models.experts) - len(residual_scales))]
    roots = [base.root, *(folder.root for folder in models.experts.values())]
    found = origins(base.leaves, len(models.experts))
    problems = place_problems(out, roots, overwrite=overwrite)
    problems += router_problems(found, base.leaves, len(models.experts), router)
    errors.raise_problems(problems)
    whole, dtype = mixed(models, router, scales), out_dtypes(out_dtype)
    job = Job(
        WeightAverage(), {}, None, whole, {"mixture": whole}, dtype, max(1, chunk // workers), torch.device("cpu"),
        Scratch(), (*models.notes, *notes), workers, frozenset(), seen(whole), MappingProxyType(beside(models, dtype)),
    )  # fmt: skip
    like = {path: leaf.to(target(job, path)) for path, leaf in whole.leaves.items()}
    digest = hashlib.sha256(router.float().contiguous().numpy().tobytes()).hexdigest()
    shards = layout(like, shard_size, {})
    return write_job(job, shards, out, describe=describe, overwrite=overwrite, more=json.dumps([digest, scales]))


def beside(models: Models, dtype: torch.dtype | None) -> Files:
    """The files beside the weights: base's tokenizer and generation configuration, and the mixture's config.json."""
    root = models.base.root
    config = models.config | ({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")})
    files = files_of(root, (*CONFIG, *TOKENIZER))
    return {name: file for name, file in files.items() if not name.endswith(".py")} | {
        "config.json": (json.dumps(config, indent=2) + "\n").encode()
    }
