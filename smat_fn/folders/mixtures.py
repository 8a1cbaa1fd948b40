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
    QWEN2,
    QWEN3,
    UNUSED,
    Architecture,
    Change,
    change_problems,
    changed,
    changes,
    fit_problems,
    made,
    origins,
    router_problems,
)
from ..merge.parts.chunks import CHUNK
from ..merge.parts.windows import Scratch
from ..merge.weight_average import WeightAverage
from .inputs.adapters.peft import is_adapter
from .inputs.differing import differences
from .inputs.opening import open_input
from .inputs.reading import Folder, load_config, seen
from .inputs.side_files import CONFIG, TOKENIZER, Files, files_of
from .inputs.stored import Read, reader_of_tensor
from .inputs.vocabulary import one_head, tokenizer_notes
from .prepare import SHARD_SIZE, OutDtype, out_dtypes, place_problems
from .run import Describe, Report, write_job
from .streaming.chunks import Job, target
from .writing import layout


class Models(NamedTuple):
    """The opened models of a mixture."""

    base: Folder
    experts: dict[str, Folder]
    architecture: Architecture
    config: dict[str, Any]  # of the mixture
    notes: tuple[str, ...]
    shared: bool = False  # the last expert


def open_models(
    base: Path,
    experts: Mapping[str, Path],
    *,
    per_token: int,
    shared: bool = False,
    architectures: Sequence[Architecture] = ARCHITECTURES,
) -> Models:
    """Base and experts, from their headers and configurations.

    Args:
        per_token: experts that a token is sent to, beside a shared one.
        shared: the last expert is shared: every token goes through it.
        architectures: of those that base's kind of model has, the first is written.

    Raises: ValueError that lists all models that are not plain models of one shape, of a kind that has an architecture.
    """
    problems, opened, notes = list[str](), dict[str, Folder](), list[str]()
    fitting = [own for own in architectures if own.shared or not shared]
    for label, path in {"base": base, **{f"expert {name!r}": path for name, path in experts.items()}}.items():
        if is_adapter(path):
            problems.append(f"{label}: {path} is an adapter: make it a whole model first, by merge.py export")
            continue
        with errors.collected(problems):
            opened[label] = open_input(label, path)
            kind = (load_config(opened[label].root) or {}).get("model_type")
            found = [own for own in fitting if kind in own.kinds]
            if label == "base":
                fitting = found[:1] or fitting
            if not found:
                said = f"of kind {kind}" if kind else "without a model_type in config.json"
                kinds = " or ".join(dict.fromkeys(kind for own in fitting for kind in own.kinds))
                names = f"{', '.join(own.name for own in fitting)}{', which has a shared expert' if shared else ''}"
                problems.append(f"{label}: {path} is {said}, must be {kinds} ({names})")
    if not 1 <= per_token <= (routed := len(experts) - shared):
        problems.append(f"experts_per_token is {per_token}: must be from 1 to the number of experts, {routed}")
    errors.raise_problems(problems)
    architecture = fitting[0]
    start, *_ = one_head(opened.pop("base"), {})  # as in any merge: a copy of the embeddings is left out
    named = dict(zip(experts, opened.values(), strict=True))
    problems += problems_of(lambda: origins(start.leaves, len(named), architecture, shared=shared))
    problems += fit_problems(start.leaves, {name: folder.leaves for name, folder in named.items()})
    roots = {label: folder.root for label, folder in opened.items()}
    wrong, texts = differences(start.root, roots, chosen=False, template=True, options=False)
    notes += [*texts, *tokenizer_notes(start.root, roots)]
    errors.raise_problems([*problems, *wrong])
    notes += filter(None, [folder.note for folder in (start, *named.values())])
    config = mixture_config(architecture, start.root, routed, per_token, shared=shared) | dict(start.config)
    return Models(start, named, architecture, config, tuple(notes), shared)


def mixture_config(
    architecture: Architecture, base: Path, experts: int, per_token: int, *, shared: bool
) -> dict[str, Any]:
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
    if architecture in (QWEN2, QWEN3):
        if own.get("use_sliding_window"):
            name = architecture.name  # transformers 4 reads no list of a Qwen2-MoE's layers
            raise ValueError(f"base has use_sliding_window, for its last layers alone: a {name} has it for others")
        kept |= {"moe_intermediate_size": own["intermediate_size"], "norm_topk_prob": True}
        kept |= {"decoder_sparse_step": 1, "mlp_only_layers": []}  # every layer is a mixture
    if architecture is QWEN2:
        kept["num_experts"] = kept.pop("num_local_experts")
        kept["shared_expert_intermediate_size"] = own["intermediate_size"] if shared else UNUSED
        if "use_sliding_window" not in own and own.get("sliding_window") is not None:  # of a Mistral
            kept |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * own["num_hidden_layers"]}
    # transformers 4 knows the number of a Qwen3-MoE's experts by this name alone
    found = make(**kept).to_dict() | ({"num_experts": experts} if architecture is QWEN3 else {})
    found.pop("_name_or_path", None)  # where base lies here
    found |= _older_rope(found.get("rope_parameters") or {})
    return {**found, "architectures": [f"{architecture.model}ForCausalLM"]}


def _older_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The names under which transformers 4 reads RoPE; without them it silently takes its class's own base."""
    found = {name: value for name, value in rope.items() if name == "rope_theta"}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return found


def mixed(models: Models, router: Tensor, made_of: Sequence[Change], key: Tensor | None) -> Folder:
    """The mixture as a checkpoint, formed while it is read."""
    leaves, reads = dict[str, Tensor](), dict[str, Read]()
    base, folders = models.base, list(models.experts.values())
    for path, origin in origins(base.leaves, len(folders), models.architecture, shared=models.shared).items():
        if (own := made(origin, base.leaves, router)) is not None:
            leaves[path], reads[path] = own.to("meta"), reader_of_tensor(own)
            continue
        leaves[path], reads[path] = base.leaves[origin.path], base.reads[origin.path]
        if (i := origin.expert) is not None:
            reads[path] = _changed(folders[i].reads[origin.path], made_of[i], key, path)
    stores = {file: store for folder in (base, *folders) for file, store in folder.stores.items()}
    return Folder("the mixture", leaves, reads, stores, base.root)


def _changed(read: Read, change: Change, key: Tensor | None, path: str) -> Read:
    return lambda start, stop: changed(read(start, stop), change, key, path, start=start)


def merge_mixture(
    models: Models,
    router: Tensor,
    out: Path,
    *,
    residual_scales: Sequence[float | None] = (),
    noise_scales: Sequence[float | None] = (),
    key: Tensor | None = None,
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
        router: (layers, N, width); the last row is that of a shared expert.
        residual_scales: a factor of each expert's ``down_proj``; None: 1.
        noise_scales: standard deviation of normal noise added to each expert's MLPs, before the factor; None: 0.
        key: int64 (2,), of the noise; the name of a parameter in the mixture is folded into it.
        out_dtype, shard_size, chunk, workers, overwrite, describe: as of `merge_folders`.
        notes: that the report is to hold too.

    Raises: ValueError as `merge_folders`.
    """
    out = checkpoint.follow(out)
    errors.raise_problems(change_problems(residual_scales, noise_scales, len(models.experts), key))
    base, made_of = models.base, changes(residual_scales, noise_scales, len(models.experts))
    roots = [base.root, *(folder.root for folder in models.experts.values())]
    found = origins(base.leaves, len(models.experts), models.architecture, shared=models.shared)
    problems = place_problems(out, roots, overwrite=overwrite)
    problems += router_problems(found, base.leaves, len(models.experts), router)
    errors.raise_problems(problems)
    whole, dtype = mixed(models, router, made_of, key), out_dtypes(out_dtype)
    routed = zip(roots[1:], made_of[: len(made_of) - models.shared], strict=False)
    if len({(root.resolve(), change) for root, change in routed}) == 1 and not any(noise_scales):
        notes = [*notes, "all experts are one model: until they are trained, they compute the same"]
    job = Job(
        WeightAverage(), {}, None, whole, {"mixture": whole}, dtype, max(1, chunk // workers), torch.device("cpu"),
        Scratch(), (*models.notes, *notes), workers, frozenset(), seen(whole), MappingProxyType(beside(models, dtype)),
    )  # fmt: skip
    like = {path: leaf.to(target(job, path)) for path, leaf in whole.leaves.items()}
    digest = hashlib.sha256(router.float().contiguous().numpy().tobytes()).hexdigest()
    more = [digest, made_of, None if key is None else key.tolist()]
    shards = layout(like, shard_size, {})
    return write_job(job, shards, out, describe=describe, overwrite=overwrite, more=json.dumps(more))


def beside(models: Models, dtype: torch.dtype | None) -> Files:
    """The files beside the weights: base's tokenizer and generation configuration, and the mixture's config.json."""
    root = models.base.root
    config = models.config | ({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")})
    files = files_of(root, (*CONFIG, *TOKENIZER))
    return {name: file for name, file in files.items() if not name.endswith(".py")} | {
        "config.json": (json.dumps(config, indent=2) + "\n").encode()
    }
