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

from .... import checkpoint, errors, random
from ....folders import Report, chunk_of, local_folder
from ....folders.files import Hashing, bytes_of, size_text
from ....folders.inputs.hub import unavailable
from ....folders.mixtures import Models, beside, merge_mixture, open_models
from ....folders.prepare import out_dtypes
from ....merge.around.mixture import ARCHITECTURES, MIXTRAL, QWEN2, QWEN3, Architecture, random_rows, rows
from ... import outcome
from ...manifests import manifest_of, rewritten_meanwhile
from ...recipes.load import fields_of
from ...recipes.places import folder_name, folders_beside, placed, placed_by_name
from ...recipes.problems import DTYPES, misspelled
from ..experts.inputs import facts_of
from ..provenance.card import card, licenses_of
from ..provenance.fingerprints import expert_prints, fingerprints_of
from ..provenance.finished import differences, hashes, is_kept, kept, other_inputs, texts
from ..settings import Moe

States: TypeAlias = Callable[[Sequence[str]], Tensor]  # (layers, width) of prompts

FIELDS = "base_model", "experts", "gate_mode", "dtype", "experts_per_token", "architecture", "shared_experts", "seed"
RANDOM = "random", "uniform_random"
MODES = "hidden", "hidden_avg", "hidden_last", "cheap_embed", *RANDOM


class Expert(NamedTuple):
    """A model whose MLPs are one expert of every layer; fields as in a file."""

    source_model: str
    positive_prompts: Sequence[str] | None = None
    negative_prompts: Sequence[str] | None = None
    residual_scale: float | None = None
    noise_scale: float | None = None


class Mixture(NamedTuple):
    """The fields of a file."""

    base: str
    experts: list[Expert]  # and a shared one, the last
    shared: bool
    mode: str
    dtype: str | None
    per_token: int
    seed: int | None  # of a file of ours
    architecture: str | None
    notes: tuple[str, ...] = ()

    @property
    def ungated(self) -> bool:
        """Whether the shared expert has no prompts that its gate could be made of."""
        return self.shared and self.mode not in RANDOM and not self.experts[-1].positive_prompts


def load(file: Path) -> Mixture:
    """The mixture that a file in mergekit-moe's format describes.

    Raises: ValueError that lists every field that is unknown, malformed or not supported; no model is looked at.
    """
    found = fields_of(file, "a mixture of experts")
    if "merge_method" in found and "experts" not in found:
        raise ValueError(f"{file} is a recipe, not a mixture of experts: run merge.py {file}")
    if problems := list(_problems(found)):
        raise ValueError(f"{file}: {'; '.join(problems)}")
    return Mixture(
        found["base_model"],
        [Expert(**{name: value for name, value in own.items() if name in Expert._fields}) for own in _experts(found)],
        shared=bool(found.get("shared_experts")),
        mode=found.get("gate_mode", "hidden"),
        dtype=found.get("dtype"),
        per_token=found.get("experts_per_token", 2),
        seed=found.get("seed"),
        architecture=found.get("architecture"),
        notes=tuple(_ignored(found)),
    )


def architectures_named(name: Any) -> tuple[Architecture, ...]:
    """The architectures that mergekit-moe knows by a name; all without one."""
    known = {"mixtral": (MIXTRAL,), "qwen": (QWEN3, QWEN2), "qwen3": (QWEN3,), "qwen2": (QWEN2,)}
    plain = re.sub("[ _-]|moe$", "", str(name).lower())
    return ARCHITECTURES if name is None else known.get(plain, ())


def _experts(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The experts of a file, a shared one last."""
    return [*found["experts"], *(found.get("shared_experts") or ())]


def _misspelled(name: object, known: Sequence[str]) -> str:
    return "" if name in known else misspelled(name, known)


def _ignored(found: Mapping[str, Any]) -> Iterator[str]:
    """Notes on fields that a mixture does not have, each once."""
    names = [name for name in found if name not in FIELDS]
    names += [name for own in _experts(found) for name in own if name not in Expert._fields]
    yield from (f"{name} is not a field of a mixture: ignored, as in mergekit" for name in dict.fromkeys(names))


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name} is not a field{near}" for name in found if (near := _misspelled(name, FIELDS)))
    named = found.get("architecture")
    if not (known := architectures_named(named)):
        yield f"architecture is {named!r}, must be mixtral, qwen2 or qwen3; transformers has no class of a DeepSeek-MoE"
    elif found.get("shared_experts") and QWEN2 not in known:
        yield f"architecture is {named!r}, which has no shared_experts: leave architecture out for a Qwen2-MoE"
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
        yield from _expert_problems(f"experts[{place}]", own, prompts=mode not in RANDOM)
    if shared := found.get("shared_experts"):
        if not isinstance(shared, list) or len(shared) != 1:
            yield f"shared_experts is {shared!r}: must be a list of one model"
            return
        prompts = isinstance(shared[0], dict) and bool(shared[0].get("negative_prompts"))
        yield from _expert_problems("shared_experts[0]", shared[0], prompts=prompts)
    given = [
        [own.get(f"{kind}_prompts") for kind in ("positive", "negative")] for own in experts if isinstance(own, dict)
    ]
    if mode not in RANDOM and len(given) > 1 and all(prompts == given[0] for prompts in given):
        yield "experts have the same prompts, so that the router could not tell them apart: name what each is for"


def _expert_problems(label: str, own: Any, *, prompts: bool) -> Iterator[str]:
    if not isinstance(own, dict) or not isinstance(own.get("source_model"), str):
        yield f"{label} is {own!r}: must have source_model, a folder or a hub name"
        return
    yield from (f"{label}.{name} is not a field{near}" for name in own if (near := _misspelled(name, Expert._fields)))
    if "+" in own["source_model"]:
        yield f"{label}.source_model is {own['source_model']!r}: export the adapter first, merge.py export"
    for name in "residual_scale", "noise_scale":
        scale = own.get(name)
        if scale is not None and (
            isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale)
        ):
            yield f"{label}.{name} is {scale!r}: must be a number"
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
        name: placed(own.source_model, places.get(f"expert {name!r}", ()))
        for name, own in _named(asked.experts).items()
    }
    base = placed(asked.base, places.get("base", ()))
    errors.raise_problems(unavailable({"base": base, **{f"expert {name!r}": path for name, path in paths.items()}}))
    base = local_folder("base", base)
    folders = {n: local_folder(n, path) for n, path in paths.items()}
    allowed = architectures_named(asked.architecture)
    models = open_models(base, folders, per_token=asked.per_token, shared=asked.shared, architectures=allowed)
    facts = {
        **facts_of(base, list(paths.values()), {name: manifest_of(path) for name, path in paths.items()}, seed),
        **_settings(asked),
        "shard_size": bytes_of(args.shard_size),
    }
    if is_kept(args.out, partial(_others, args.out, facts, models, args.threads), overwrite=args.overwrite):
        outcome.add("merged", {"folder": args.out, "kept": True})
        yield kept(args.out)
        return
    router = router_of(asked, base, models, seed)
    alike = ", ".join(map(str, degenerate(router[:, : len(paths) - asked.shared])))
    notes = [*asked.notes]
    if alike:
        notes.append(f"layers {alike}: router rows are nearly dependent, prompts may be too similar")
    residual = [own.residual_scale for own in asked.experts]
    if asked.ungated:  # sigmoid(0) is 1/2
        residual[-1] = 2 * (1 if residual[-1] is None else residual[-1])
        notes.append("the shared expert has no prompts: it counts in full, by a gate of 1/2 and a doubled down_proj")
    report = merge_mixture(
        models,
        router,
        args.out,
        residual_scales=residual,
        noise_scales=[own.noise_scale for own in asked.experts],
        key=random.fold_in(random.key(seed), "moe noise"),
        out_dtype=asked.dtype or "same",  # type: ignore[arg-type]
        shard_size=bytes_of(args.shard_size),
        chunk=chunk_of(args.memory_mib << 20),
        workers=args.threads,
        overwrite=args.overwrite,
        describe=partial(_texts, asked, seed, paths, base, models, facts),
        notes=notes,
    )
    outcome.add("merged", {"folder": args.out, "kept": False})
    told = f"{len(paths) - asked.shared} experts, {asked.per_token} a token{', and a shared one' * asked.shared}"
    yield f"merged: {args.out}, {told}, {size_text(report.bytes)}"
    yield from (f"note: {note}" for note in report.notes)


def _settings(asked: Mixture) -> dict[str, Any]:
    """The settings of a file, as the manifest holds them."""
    prompts = json.dumps([(own.positive_prompts or [], own.negative_prompts or []) for own in asked.experts])
    noise = [own.noise_scale for own in asked.experts]
    found = {
        "gate_mode": asked.mode,
        "experts_per_token": asked.per_token,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "residual_scales": [own.residual_scale for own in asked.experts],
        **({"noise_scales": noise} if any(noise) else {}),
        **({"shared_experts": 1} if asked.shared else {}),
    }
    return {"merger": "moe", "hyperparameters": found, "out_dtype": asked.dtype or "same"}


def _named(experts: Sequence[Expert]) -> dict[str, Expert]:
    """Experts by the name of their folder; of equal ones with their place."""
    names = [folder_name(Path(own.source_model)) for own in experts]
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
    *others, last = paths
    mlps = f"{', '.join(others)}, and for every token of {last}" if asked.shared else ", ".join(paths)
    said = f"attention, norms and embeddings are base's, the MLPs those of {mlps}; routers by {asked.mode}"
    manifest = checkpoint.describe(
        {}, **{**facts, "experts": expert_prints(facts["experts"], hashed)}, base_fingerprint=origin, dev={},
        dev_curve=[], rounding_ratio=None, notes=[said, *report.notes], **licenses_of(base, paths), **hashed,
    ) | {"fingerprint": merged}  # fmt: skip
    named = [own._replace(source_model=placed_by_name(Path(own.source_model))) for own in asked.experts]
    experts = [{name: value for name, value in own._asdict().items() if value not in (None, [])} for own in named]
    recipe = {
        "base_model": placed_by_name(Path(asked.base)), "gate_mode": asked.mode, "dtype": asked.dtype,
        "experts_per_token": asked.per_token, "seed": seed,
        "experts": experts[:-1] if asked.shared else experts,
        **({"shared_experts": experts[-1:]} if asked.shared else {}),
        **({"architecture": asked.architecture} if asked.architecture else {}),
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
        gated = asked.experts[:-1] if asked.ungated else asked.experts
        prompts = [(own.positive_prompts or (), own.negative_prompts) for own in gated]
        found = [rows(states(positive), states(negative) if negative else None) for positive, negative in prompts]
    found += [torch.zeros_like(found[0])] if asked.ungated else []
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
