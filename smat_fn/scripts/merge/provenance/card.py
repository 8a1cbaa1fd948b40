"""Model cards of merged and exported models: metadata for the Hugging Face hub, then the manifest as text."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ....errors import printable
from ....folders.inputs.hub import local_folder
from ....folders.inputs.reading import DIFFUSION, DIFFUSION_INDEX, MODULES, PIPELINE, config_of
from ....folders.inputs.stacks import folders_of
from ....merge import RANDOM, ByExpert
from ....merge.around.select import best_of
from ...recipes.places import folder_name
from .searched import trials_of

CARD = "README.md"
_LICENSE = "license", "license_name", "license_link"  # of a model card's metadata
_ID = re.compile(r"(\b[\w\-.]+\b/)?\b[\w\-.]{1,96}\b", re.ASCII)


def card(manifest: Mapping[str, Any]) -> str:
    """The model card of a merged model, Markdown with YAML metadata.

    The text names the merger and its options, the dev scores of a search, the precision and the SHA-256 of every file
    that a merge on disk read and wrote, and fingerprints of weights.
    """
    label = _text(manifest["label"])
    options = _options(manifest["hyperparameters"]) or "no options"
    semantics = f", semantics {manifest['semantics']}" if "semantics" in manifest else ""
    masks = f", random masks from seed {manifest['merge_seed']}" if manifest["merger"] in RANDOM else ""
    stacks = manifest.get("stacks", {})
    mixed = manifest["merger"] == "moe"
    title = f"# {label} experts merged by {manifest['merger'].upper()}"
    title = f"# Mixture of experts of {label}" if mixed else title
    text = [
        f"# Layers of {label}, stacked" if stacks and len(manifest["experts"]) == 1 else title,
        f"Merger: {manifest['merger']} ({options}){semantics}{masks}.",
    ]
    if stacks:
        said = ", ".join(f"{name} is `{parts}`" for name, parts in stacks.items())
        text.append(f"Its layers are those of several models one after another, [first:last + 1]: {said}.")
    if whose := {name: manifest[f"{name}_from"] for name in ("config", "tokenizer") if manifest.get(f"{name}_from")}:
        text.append(f"Not base's: {', '.join(f'{name} of {place}' for name, place in whose.items())}.")
    if scales := manifest.get("scales"):
        each = _points(scales.items(), "{} {:.6g}")
        text.append(f"Not one model but one for each task: a vector, and a mask and a scale each ({each}).")
        text.append("`python merge.py export FOLDER --base BASE --task TASK --out MODEL` writes the model of a task.")
    elif mixed:
        more = "scales and noise are as above; routers are new, and parameters that the models lack are zero"
        text.append(f"Weights are those of the inputs: {more}; dtypes: {manifest['out_dtype']}.")
    elif "out_dtype" in manifest:
        text.append(f"Precision: {rounding(manifest['rounding_ratio'])}; dtypes: {manifest['out_dtype']}.")
    if manifest.get("density"):
        text.append(f"Share of coordinates that was kept: {_points(manifest['density'].items(), '{} {:.6f}')}.")
    text += [*_search(manifest), *_outside(manifest), *_notes(manifest), *_other_licenses(manifest, "experts")]
    table = ["| expert | dev score of the merged model | fingerprint (SHA-256) |", "|---|---:|---|"]
    for name, print_ in manifest["experts"].items():
        score = f" {manifest['dev'][name]:.2f}" if name in manifest["dev"] else ""
        table.append(f"| {_cell(name)} |{score} | {'' if print_ is None else f'`{print_}`'} |")
    text += ["\n".join(table), f"Base `{manifest['base_fingerprint']}`, merged weights `{manifest['fingerprint']}`."]
    metadata = {  # in the order of huggingface_hub's own cards
        "base_model": model_ids(manifest["base_model"]),
        "library_name": _library(manifest),
        **_license_metadata(manifest),
        "tags": ["merge", "smat_fn", manifest["merger"]],
        "base_model_relation": "merge",
    }
    return _with_hashes(text, manifest, metadata)


def _options(given: Mapping[str, Any]) -> str:
    """Names and values, without those that hold nothing."""
    return ", ".join(f"{name} {value}" for name, value in given.items() if value not in (None, "", [], {}, ()))


def licenses_of(base: Path | None, experts: Mapping[str, Path]) -> dict[str, Any]:
    """The field ``licenses`` of a manifest: what the model cards of base and experts say; empty where none does."""
    first, *more = folders_of(base) if base is not None else [None]
    parts = {name: folders_of(path) for name, path in experts.items()}
    places = {own.name: own for own in [*more, *(own for several in parts.values() for own in several[1:])]}
    places |= {name: own for name, (own, *_) in parts.items()}
    known = {"base": first and _license(first)}
    known["experts"] = {name: own for name, path in places.items() if (own := _license(path))}
    return {"licenses": found} if (found := {name: own for name, own in known.items() if own}) else {}


def library_of(folder: Path) -> dict[str, str]:
    """The field ``library`` of a manifest: what loads a model, where config.json shows it and no name of a file."""
    config = config_of(folder)
    if "sentence_transformers" in config:  # a cross-encoder
        return {"library": "sentence-transformers"}
    return {"library": "timm"} if "pretrained_cfg" in config and "model_type" not in config else {}


def _license(path: Path) -> dict[str, Any]:
    """The license in the metadata of a folder's model card, or of a hub name's in the cache; empty without one."""
    try:
        file = local_folder("", path, fetch=False) / CARD
        text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""  # a pipe would never end
        _, found, _ = re.split(r"^---[ \t]*$", text, maxsplit=2, flags=re.M)
        metadata = yaml.safe_load(found)
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError):  # !!bool x too
        return {}
    return _license_in(metadata) if text.startswith("---") and isinstance(metadata, dict) else {}


def _license_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields on the license in the metadata of a model card, a name or a list of names; empty without any."""
    found = metadata.get("license")
    names = found if isinstance(found, list) else [found]
    if not names or not all(isinstance(name, str) for name in names):
        return {}
    more = {name: metadata[name] for name in _LICENSE[1:] if isinstance(metadata.get(name), str)}
    return {"license": found, **more}


def _licenses(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The licenses of base and experts in a manifest, as `licenses_of` found them."""
    found = manifest.get("licenses", {})
    return found.get("base", {}), found.get("experts", {})


def _license_metadata(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The license of base, without a link that is a path: it would name a file of that other folder."""
    of_base, _ = _licenses(manifest)
    return {name: value for name, value in of_base.items() if name != "license_link" or value.startswith("http")}


def _license_name(own: Mapping[str, Any]) -> str:
    found = own.get("license_name") or own["license"]
    return _text(found if isinstance(found, str) else " and ".join(found))


def _other_licenses(manifest: Mapping[str, Any], what: str) -> list[str]:
    """A paragraph on those of the inputs, ``what``, whose license is not the base's."""
    of_base, others = _licenses(manifest)
    base = _license_name(of_base) if of_base else None
    named = {name: own for name, found in others.items() if (own := _license_name(found)) != base}
    if not named:
        return []
    each = ", ".join(f"{name} {license}" for name, license in named.items())
    whose = f"is that of base; {what} name others" if of_base else f"of base is not known; {what} name theirs"
    return [f"The license {whose} ({each}): check their terms."]


def adapter_card(manifest: Mapping[str, Any]) -> str:
    """The model card of an adapter merged from adapters: how, of which rank, base and weights, and SHA-256 hashes.

    Args: manifest: of the adapter, with ``adapters``, ``stored_rank``, ``base_model`` (or None), ``tool`` (or peft).
    """
    how = [f"{name} {manifest[name]}" for name in ("merger", "coef", "density", "majority") if name in manifest]
    how += [_options(given)] if (given := manifest.get("options", {})) else []
    options = f" ({', '.join(how)})" if how else ""
    drops = manifest["method"].startswith("dare") or manifest.get("merger") in RANDOM
    masks = f", random masks from seed {manifest['merge_seed']}" if drops else ""
    base, of_peft = manifest["base_model"], manifest.get("tool", "peft") == "peft"
    unnamed = "as its adapters name it in their configuration" if of_peft else "that of its adapters"
    table = ["| adapter | weight |", "|---|---:|"]
    table += [f"| {_cell(name)} | {manifest['weights'].get(name, 1.0):g} |" for name in manifest["adapters"]]
    text = [
        f"# LoRA adapters merged by {manifest['method']}",
        f"Method: {manifest['method']}{options}{masks}. "
        f"Rank {manifest['stored_rank']}, scale 1: the change of a matrix is BA.",
        f"Base: {_code(base) if base else unnamed}. It was not read.",
        "\n".join(table),
        *_other_licenses(manifest, "adapters"),
    ]
    known = model_ids([base]) if base else None
    metadata = {
        "base_model": known and known[0],
        "library_name": "peft" if of_peft else "diffusers",
        **_license_metadata(manifest),
        "tags": ["merge", "smat_fn", "lora", manifest["method"]],
        "base_model_relation": "adapter" if known else None,
    }
    return _with_hashes(text, manifest, metadata)


def transplanted_card(manifest: Mapping[str, Any]) -> str:
    """The model card of a model with another model's tokenizer: tokens, method, SHA-256 hashes and fingerprints."""
    label, other = _text(manifest["label"]), _text(manifest["tokenizer_from"])
    tokens = manifest["tokens"]
    text = [
        f"# {label} with the tokenizer of {other}",
        f"{tokens['shared']} of {tokens['all']} tokens have the rows of {label}. The other rows were approximated, "
        f"not trained: {_options(manifest['hyperparameters'])}. All other weights are those of {label}.",
        *_notes(manifest),
        *_other_licenses(manifest, "models"),
        f"Model `{manifest['source_fingerprint']}`, written weights `{manifest['fingerprint']}`.",
    ]
    metadata = {
        "base_model": model_ids(manifest["base_model"]),
        "library_name": _library(manifest),
        **_license_metadata(manifest),
        "tags": ["smat_fn"],
    }
    return _with_hashes(text, manifest, metadata)


def _notes(manifest: Mapping[str, Any]) -> list[str]:
    """A paragraph for each note."""
    return [f"Note: {_text(note)}." for note in manifest.get("notes", ())]


def _with_hashes(paragraphs: Sequence[str], manifest: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """A model card that ends with tables of the files that were written and read, if the manifest names them."""
    text = [*paragraphs]
    if files := manifest.get("files"):
        text.append("`python merge.py verify FOLDER` hashes the files below again and reports changes.")
        for title, own in {"written": files, **{f"read of {n}": of for n, of in manifest["inputs"].items()}}.items():
            rows = [f"| {_cell(file)} | `{print_}` |" for file, print_ in own.items()]
            text.append("\n".join([f"| {_cell(title)} | SHA-256 |", "|---|---|", *rows]))
    text.append(", ".join(f"{name} {version}" for name, version in manifest["versions"].items()) + ".\n")
    return _with_metadata("\n\n".join(text), metadata)


def exported_card(model: Path, manifest: Mapping[str, Any]) -> str:
    """The model card of ``model`` with a note that it was exported; a new one where it has none that can be read.

    Args: manifest: of the exported model.
    """
    from huggingface_hub import ModelCard

    try:
        found = ModelCard.load(model / CARD)
    except Exception:  # no card, or metadata that are not YAML: huggingface_hub raises errors of several kinds
        task, tasks = manifest.get("task"), manifest.get("tasks")
        of = f" expert of {task}" if task else ""
        of = f" on all of {', '.join(tasks)}" if tasks else of
        title = f"# {manifest.get('label', folder_name(model))}{of}\n"
        found = ModelCard(_with_metadata(title, {"tags": ["smat_fn"]}))
    if "smat_fn" in found.data.get("tags", ()):
        found.data["base_model"] = model_ids(manifest["base_model"])
    found.data["library_name"] = _library(manifest)
    if "merger" in manifest and "task" in manifest:  # of a folder for all tasks, whose card is of no model
        named = f"{manifest['label']} experts merged by {manifest['merger'].upper()}"
        options = _options(manifest["hyperparameters"])
        found.text = f"\n# {named}: the model of {manifest['task']}\n\nMerger: {manifest['merger']} ({options}).\n"
    (of_base, _), own = _licenses(manifest), _license_in(found.data.to_dict())
    if not own:
        for name, value in _license_metadata(manifest).items():
            found.data[name] = value
    elif of_base and _license_name(own) != _license_name(of_base):
        whose = f"The license is that of the model; base names another ({_license_name(of_base)})"
        found.text += f"\n{whose}: check its terms.\n"
    found.text += (
        "\nWritten as the whole model that it belongs to: `from_pretrained` reads this folder, and "
        "`python merge.py verify FOLDER` hashes what was read and written again.\n"
    )
    return str(found)


def model_ids(names: Iterable[str]) -> list[str] | None:
    """Those of the names that the hub takes for models in metadata, by `huggingface_hub.utils.validate_repo_id`."""
    return [name for name in names if _ID.fullmatch(name) and not re.search(r"--|\.\.|\.git$", name)] or None


def rounding(ratio: float | None) -> str:
    """Rounding error of the output relative to the merged change."""
    if ratio is None or not math.isfinite(ratio):
        return "nothing but rounding changes the base"
    return f"rounding is {ratio:.2%} of the merged change (RMS)"


def _with_metadata(text: str, metadata: Mapping[str, Any]) -> str:
    present = {name: value for name, value in metadata.items() if value is not None}
    found = yaml.safe_dump(present, sort_keys=False, allow_unicode=True)
    return f"---\n{found}---\n\n{text}"


def _cell(name: str) -> str:
    """A name as a table's cell; a bar, which would begin the next cell, is escaped."""
    return _text(name).replace("|", "\\|")


def _code(given: str) -> str:
    """Text of input folders as code in Markdown."""
    text = printable(" ".join(given.split())).replace("`", "'")
    return f"`{text}`"


def _text(given: str) -> str:
    """Text of input folders as one line of Markdown, in which neither HTML, links nor images begin."""
    return re.sub(r"([\\<\[])", r"\\\1", printable(" ".join(given.split())))


def _library(manifest: Mapping[str, Any]) -> str:
    files = manifest.get("files", ())
    if any(PurePosixPath(file).name in (PIPELINE, DIFFUSION, DIFFUSION_INDEX) for file in files):
        return "diffusers"
    if MODULES in files:
        return "sentence-transformers"
    if "library" in manifest:
        return str(manifest["library"])
    return "transformers" if "config.json" in files else "smat_fn"


def _search(manifest: Mapping[str, Any]) -> list[str]:
    """Paragraphs about the search on dev, if there was one."""
    text = []
    if found := manifest.get("calibration"):
        tried = _points(found["curve"])
        text.append(f"{found['field']} was chosen on dev at coefficient {found['coef']} (mean over tasks): {tried}.")
    text += _combinations(manifest, "dev", "on dev (mean over tasks)", "dev score", "{:.2f}")
    if manifest["dev_curve"]:
        edge = f" The chosen one is the {found} tried." if (found := manifest.get("dev_edge")) else ""
        text.append(f"The coefficient was chosen on dev (mean over tasks): {_points(manifest['dev_curve'])}.{edge}")
    if blocks := manifest.get("dev_blocks"):
        text.append(f"Then each block in its turn got the coefficient that does best on dev, {len(blocks)} were tried.")
    text += _trials(trials_of(manifest, "dev"), "dev score", "{:.2f}")
    if at := manifest.get("snapshot"):
        points = ", ".join(
            f"{index}: {score:.2f}" + ("" if coef is None else f" at coefficient {coef:g}")
            for index, score, coef in at["curve"]
        )
        steps = ", ".join(f"{task} {step}" for task, step in at["steps"].items())
        text.append(
            f"Snapshot {at['index']} of {at['of']} was chosen on dev (mean over tasks, the last one is the end of "
            f"training): {points}. Steps of training: {steps}."
        )
    if finals := manifest.get("dev_finals"):
        text.append(f"That was one decode; the best were decoded again, means over decodes: {_points(finals)}.")
    if cost := manifest.get("tried"):
        known = f" ({cost['kept']} known from before, {cost['seconds_saved']:.1f} s saved)" if cost["kept"] else ""
        text.append(
            f"Tried on dev: {cost['candidates']} candidates, {cost['scores']} scores of one task and decode{known}; "
            f"{cost['seconds_merging']:.1f} s of merging, {cost['seconds_scoring']:.1f} s of scoring."
        )
    return text


def _outside(manifest: Mapping[str, Any]) -> list[str]:
    """Paragraphs about the score of another program, if the coefficient was chosen by it."""
    if "score" not in manifest:
        return []
    asked, edge = manifest["asked"], manifest.get("score_edge")
    keys = f" ({_text(', '.join(asked['score_keys']))})" if asked["score_keys"] else ""
    text = [
        f"The score of another program{keys}, larger is better, is {manifest['score']:.6g}: {_code(asked['score'])}."
    ]
    if len(scores := manifest.get("scores", {})) > 1:
        means = _points(((_text(name), own) for name, own in scores.items()), "{} {:.6g}")
        text.append(f"It is the mean of {means}.")
    where = "by this score, which is therefore optimistic"
    text += _combinations(manifest, "score", where, "score", "{:.6g}")
    if curve := manifest["score_curve"]:
        chosen = f" The chosen one is the {edge} tried." if edge else ""
        text.append(f"The coefficient was chosen {where}: {_points(curve, '{}: {:.6g}')}.{chosen}")
    return text + _trials(trials_of(manifest, "score"), "score", "{:.6g}")


def _trials(tried: Sequence[tuple[ByExpert, float]], what: str, form: str) -> list[str]:
    """A sentence on numbers of experts that CMA-ES chose, if it did. Args: tried: (numbers, score), first the start."""
    if not tried:
        return []
    (start, score), (best, most) = tried[0], best_of(tried)
    first, own = (
        "; ".join(
            f"{option} " + _points(((_text(name), number) for name, number in each.items()), "{} {:g}")
            for option, each in numbers.items()
        )
        for numbers in (start, best)
    )
    return [
        f"Then CMA-ES tried {len(tried) - 1} models with other {' and '.join(start)} of the experts. The best {what}, "
        f"{form.format(most)} at {own}, is optimistic, for it is the best of so many; the first ones ({first}) score "
        f"{form.format(score)}."
    ]


def _combinations(manifest: Mapping[str, Any], start: str, where: str, title: str, form: str) -> list[str]:
    """A sentence on the options that a search tried, and a table of all their combinations; empty without them.

    Args: start: of the fields of the manifest, and the field of a score.
    """
    if not (tried := manifest.get(f"{start}_options")):
        return []
    names, searched = list(tried[0]["options"]), any(own["curve"] for own in tried)
    how = ", each combination at its best coefficient" if searched else ""
    edges = [f"{name} ({edge})" for name, edge in manifest[f"{start}_option_edges"].items()]
    more = f" At an edge of the values tried: {', '.join(edges)}." if edges else ""
    table = ["| " + " | ".join([*names, title, *(["by coefficient"] if searched else [])]) + " |"]
    table.append("|" + "---|" * len(names) + "---:|" + "---|" * searched)
    for own in tried:
        points = [_points(own["curve"], f"{{}}: {form}")] if searched else []
        cells = [*map(str, own["options"].values()), form.format(own[start]), *points]
        table.append(f"| {' | '.join(cells)} |")
    verb = "was" if len(names) == 1 else "were"
    return [f"{', '.join(names)} {verb} chosen {where}{how}.{more}", "\n".join(table)]


def _points(points: Iterable[Any], form: str = "{}: {:.2f}") -> str:
    return ", ".join(form.format(*point) for point in points)
