"""Mixtures of experts: mergekit-moe's YAML as it is, routers from prompts, manifest and model card."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import yaml
from torch import Tensor

from ... import checkpoint, errors, random
from ...folders import Report, chunk_of, local_folder
from ...folders.files import Hashing, size_text
from ...folders.inputs.hub import unavailable
from ...folders.mixtures import Models, beside, merge_mixture, open_models
from ...folders.prepare import out_dtypes
from ...merge.around.mixture import MIXTRAL, QWEN3, Architecture, random_rows, rows
from .. import outcome
from ..recipes.load import fields_of
from ..recipes.places import folder_name, folders_beside, placed, placed_by_name
from ..recipes.problems import DTYPES
from .card import card, licenses_of
from .finished import differences, hashes, other_inputs, texts
from .inputs import facts_of, manifest_of, rewritten_meanwhile
from .settings import Moe
from .streaming import bytes_of, expert_prints, fingerprints_of

States: TypeAlias = Callable[[Sequence[str]], Tensor]  # (layers, width) of prompts

FIELDS = "base_model", "experts", "gate_mode", "dtype", "experts_per_token", "architecture", "shared_experts", "seed"
EXPERT = "source_model", "positive_prompts", "negative_prompts", "residual_scale", "noise_scale"
RANDOM = "random", "uniform_random"
MODES = "hidden", "hidden_avg", "hidden_last", "cheap_embed", *RANDOM


class Expert(NamedTuple):
    """A model whose MLPs are one expert of every layer."""

    source: str
    positive: list[str]
    negative: list[str]
    residual_scale: float | None


class Mixture(NamedTuple):
    """The fields of a file."""

    base: str
    experts: list[Expert]
    mode: str
    dtype: str | None
    per_token: int
    seed: int | None  # of a file of ours
    architecture: Architecture | None


def load(file: Path) -> Mixture:
    """The mixture that a file in mergekit-moe's format describes.

    Raises: ValueError that lists every field that is unknown, malformed or not supported; no model is looked at.
    """
    found = fields_of(file, "a mixture of experts")
    if problems := list(_problems(found)):
        raise ValueError(f"{file}: {'; '.join(problems)}")
    experts = [
        Expert(
            own["source_model"],
            list(own.get("positive_prompts") or ()),
            list(own.get("negative_prompts") or ()),
            own.get("residual_scale"),
        )
        for own in found["experts"]
    ]
    return Mixture(
        found["base_model"],
        experts,
        mode=found.get("gate_mode", "hidden"),
        dtype=found.get("dtype"),
        per_token=found.get("experts_per_token", 2),
        seed=found.get("seed"),
        architecture=architecture_named(found.get("architecture")),
    )


def architecture_named(name: Any) -> Architecture | None:
    """The architecture that mergekit-moe knows by a name."""
    known = {"mixtral": MIXTRAL, "qwen3": QWEN3, "qwen3moe": QWEN3}
    return known.get(re.sub("[ _-]", "", str(name).lower()))


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is not a field: they are {', '.join(FIELDS)}" for name in found if name not in FIELDS)
    if found.get("shared_experts"):
        yield "shared_experts is not supported: Mixtral and Qwen3-MoE have none"
    if (named := found.get("architecture")) is not None and architecture_named(named) is None:
        yield f"architecture is {named!r}, must be mixtral or qwen3"
    if not isinstance(found.get("base_model"), str) or "+" in found["base_model"]:
        yield f"base_model is {found.get('base_model')!r}: must be a folder or a hub name"
    mode = found.get("gate_mode", "hidden")
    if mode not in MODES:
        yield f"gate_mode is {mode!r}, must be one of {', '.join(MODES)}"
    if found.get("dtype") not in (None, *DTYPES):
        yield f"dtype is {found['dtype']!r}, must be one of {', '.join(DTYPES)}"
    for name in "experts_per_token", "seed":
        if type(found.get(name, 2)) is not int:
            yield f"{name} is {found[name]!r}: must be a whole number"
    experts = found.get("experts")
    if not isinstance(experts, list) or not experts:
        yield f"experts is {experts!r}: must be a list of models"
        return
    for place, own in enumerate(experts):
        yield from _expert_problems(place, own, prompts=mode not in RANDOM)
    given = [
        [own.get(f"{kind}_prompts") for kind in ("positive", "negative")] for own in experts if isinstance(own, dict)
    ]
    if mode not in RANDOM and len(given) > 1 and all(prompts == given[0] for prompts in given):
        yield "experts have the same prompts, so that the router could not tell them apart: name what each is for"


def _expert_problems(place: int, own: Any, *, prompts: bool) -> Iterator[str]:
    label = f"experts[{place}]"
    if not isinstance(own, dict) or not isinstance(own.get("source_model"), str):
        yield f"{label} is {own!r}: must have source_model, a folder or a hub name"
        return
    yield from (f"{label}.{name} is not a field: they are {', '.join(EXPERT)}" for name in own if name not in EXPERT)
    if "+" in own["source_model"]:
        yield f"{label}.source_model is {own['source_model']!r}: export the adapter first, merge.py export"
    if own.get("noise_scale") is not None:
        yield f"{label}.noise_scale is not supported: experts are taken as they are"
    scale = own.get("residual_scale")
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale)
    ):
        yield f"{label}.residual_scale is {scale!r}: must be a number"
    for kind in "positive_prompts", "negative_prompts":
        value = own.get(kind)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            yield f"{label}.{kind} is {value!r}: must be a list of texts"
    if prompts and not own.get("positive_prompts"):
        yield f"{label}.positive_prompts is missing: give texts that this expert is for, or gate_mode random"


def make(args: Moe) -> Iterator[str]:
    """Write the mixture that a file describes; yields the printed lines."""
    asked, places = load(args.file), folders_beside(args.file.parent)
    seed = (asked.seed or 0) if args.seed is None else args.seed
    paths = {
        name: placed(own.source, places.get(f"expert {name!r}", ())) for name, own in _named(asked.experts).items()
    }
    base = placed(asked.base, places.get("base", ()))
    errors.raise_problems(unavailable({"base": base, **{f"expert {name!r}": path for name, path in paths.items()}}))
    base = local_folder("base", base)
    models = open_models(base, {n: local_folder(n, path) for n, path in paths.items()}, per_token=asked.per_token)
    if asked.architecture not in (None, models.architecture):
        raise ValueError(
            f"{args.file}: architecture is {asked.architecture.name}, of these models it is {models.architecture.name}"
        )
    prompts = json.dumps([(own.positive, own.negative) for own in asked.experts])
    facts = {
        **facts_of(base, list(paths.values()), {name: manifest_of(path) for name, path in paths.items()}, seed),
        "merger": "moe",
        "hyperparameters": {
            "gate_mode": asked.mode,
            "experts_per_token": asked.per_token,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
            "residual_scales": [own.residual_scale for own in asked.experts],
        },
        "out_dtype": asked.dtype or "same",
        "shard_size": bytes_of(args.shard_size),
    }
    if args.out.exists() and not args.overwrite:
        checkpoint.refuse_existing(args.out, overwrite=True)  # what --overwrite would not replace either
        if others := _others(args.out, facts, models, args.threads):
            raise ValueError(
                f"{args.out} exists and holds something else ({others[0]}): choose another folder or pass --overwrite"
            )
        outcome.add("merged", {"folder": args.out, "kept": True})
        yield f"kept: {args.out}: already finished"
        return
    router = router_of(asked, base, models, seed)
    alike = ", ".join(map(str, degenerate(router)))
    notes = [f"layers {alike}: router rows are nearly dependent, prompts may be too similar"] if alike else []
    report = merge_mixture(
        models,
        router,
        args.out,
        residual_scales=[own.residual_scale for own in asked.experts],
        out_dtype=asked.dtype or "same",  # type: ignore[arg-type]
        shard_size=bytes_of(args.shard_size),
        chunk=chunk_of(args.memory_mib << 20),
        workers=args.threads,
        overwrite=args.overwrite,
        describe=partial(_texts, asked, seed, paths, base, models, facts),
        notes=notes,
    )
    outcome.add("merged", {"folder": args.out, "kept": False})
    yield f"merged: {args.out}, {len(paths)} experts, {asked.per_token} a token, {size_text(report.bytes)}"
    yield from (f"note: {note}" for note in report.notes)


def _named(experts: Sequence[Expert]) -> dict[str, Expert]:
    """Experts by the name of their folder; of equal ones with their place."""
    names = [folder_name(Path(own.source)) for own in experts]
    own_names = [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
    if len(set(own_names)) < len(names):  # folders a, b/a and a-0
        own_names = [f"{name}-{i}" for i, name in enumerate(own_names)]
    return dict(zip(own_names, experts, strict=True))


def _inputs(models: Models) -> dict[str, list[Path]]:
    own = {"base": models.base, **{f"expert {name!r}": folder for name, folder in models.experts.items()}}
    return {label: list(folder.stores) for label, folder in own.items()}


def _others(out: Path, facts: Mapping[str, Any], models: Models, workers: int) -> list[str]:
    """Why a folder does not hold this very mixture."""
    wanted = {name: value for name, value in facts.items() if name != "experts"}
    if found := differences(out, wanted):
        return found
    with Hashing(workers) as hashing:
        files = beside(models, out_dtypes(facts["out_dtype"]))
        return other_inputs(out, _inputs(models), facts["experts"], files, hashing)


def _texts(
    asked: Mixture, seed: int, paths: Mapping[str, Path], base: Path, models: Models, facts: Mapping[str, Any],
    files: Sequence[Path], report: Report,
) -> dict[str, str]:  # fmt: skip
    """Manifest, model card, recipe and the places of inputs."""
    inputs = _inputs(models)
    errors.raise_problems(rewritten_meanwhile(paths, inputs, report.hashes))
    hashed = hashes(files, inputs, report.hashes)
    origin, merged = fingerprints_of(base, files[0].parent)
    said = f"attention, norms and embeddings are base's, the MLPs those of {', '.join(paths)}; routers by {asked.mode}"
    manifest = checkpoint.describe(
        {}, **{**facts, "experts": expert_prints(facts["experts"], hashed)}, base_fingerprint=origin, dev={},
        dev_curve=[], rounding_ratio=None, notes=[said, *report.notes], **licenses_of(base, paths), **hashed,
    ) | {"fingerprint": merged}  # fmt: skip
    experts = [
        {"source_model": placed_by_name(Path(own.source)), "positive_prompts": own.positive,
         "negative_prompts": own.negative, "residual_scale": own.residual_scale}
        for own in asked.experts
    ]  # fmt: skip
    recipe = {
        "base_model": placed_by_name(Path(asked.base)), "gate_mode": asked.mode, "dtype": asked.dtype,
        "experts_per_token": asked.per_token, "seed": seed,
        "experts": [{name: value for name, value in own.items() if value not in (None, [])} for own in experts],
    }  # fmt: skip
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return texts(manifest, card, inputs) | {checkpoint.RECIPE: text}


def router_of(asked: Mixture, base: Path, models: Models, seed: int) -> Tensor:
    """The router, (layers, experts, width). Raises: ValueError for a base without a tokenizer."""
    config = models.config
    shape = config["num_hidden_layers"], len(asked.experts), config["hidden_size"]
    if asked.mode in RANDOM:
        return random_rows(random.fold_in(random.key(seed), "moe"), shape, uniform=asked.mode == "uniform_random")
    states = _states(asked.mode, base, models)
    with torch.no_grad():
        found = [rows(states(own.positive), states(own.negative) if own.negative else None) for own in asked.experts]
    return torch.stack(found, dim=1)


def degenerate(router: Tensor) -> list[int]:
    """Layers whose rows are nearly dependent: a condition number above 5, mergekit's bound."""
    return [i for i, own in enumerate(router.float()) if float(torch.linalg.cond(own)) > 5]


def _states(mode: str, base: Path, models: Models) -> States:
    """The function that gives what base computes of prompts, as mergekit 0.1.5 (moe/router.py) takes it.

    ``hidden`` is the last token's state before every layer in bfloat16, ``hidden_avg`` the mean over tokens, padding
    included; ``cheap_embed`` the sum of the tokens' embeddings, normalised.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"base: the tokenizer of {base} cannot be read ({errors.first_line(error)}): prompts need it"
        ) from error
    tokenizer.padding_side = "left"
    tokenizer.pad_token_id = tokenizer.bos_token_id
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    known = models.base.leaves["model.embed_tokens.weight"].shape[0]

    def tokens(prompts: Sequence[str]) -> Any:
        texts = [(tokenizer.bos_token or "") + prompt for prompt in prompts]
        found = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        for prompt, ids in zip(prompts, found["input_ids"], strict=True):
            if (largest := int(ids.max())) >= known:
                raise ValueError(
                    f"the prompt {prompt!r} has the token {largest}, and base has embeddings of {known} tokens: change "
                    "the prompt, or give base its own tokenizer"
                )
        return found

    if mode == "cheap_embed":
        table = models.base.leaf("model.embed_tokens.weight")

        def embedded(prompts: Sequence[str]) -> Tensor:
            found = tokens(prompts)
            own = (
                (table[found["input_ids"]].float() * found["attention_mask"].unsqueeze(-1)).sum(1).sum(0, keepdim=True)
            )
            return rows(own).repeat(models.config["num_hidden_layers"], 1)

        return embedded
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, trust_remote_code=False)

    def hidden(prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            every = torch.stack(model(**tokens(prompts), output_hidden_states=True).hidden_states[:-1])
        own = every.sum(2) / every.shape[2] if mode == "hidden_avg" else every[:, :, -1, :]
        return own.sum(1) / own.shape[1]

    return hidden
