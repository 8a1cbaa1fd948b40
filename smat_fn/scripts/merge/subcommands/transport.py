"""Experts of a run moved to another base, as a run of its own that can be merged and scored."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .... import checkpoint, errors, random, tree
from ....checkpoint import BASE
from ....data.batching import split_rows
from ....errors import problems_of
from ....folders.inputs.hub import local_folder
from ....folders.inputs.vocabulary import tokenizer_notes
from ....merge import apply_vector, choose, task_vector
from ....merge.parts.inputs import Leaves, coef_problems
from ....suites import Suite, describe_options, load_suite
from ....transport import alignments, descent_signs, gradfix_vector, theseus_vector
from ... import outcome
from ...cli import with_named
from ...manifests import check_weights, manifest_of
from ...run_folder import all_inputs, moving
from ..experts.inputs import Inputs, load_inputs
from ..experts.suite import common_suite, unlike
from ..provenance.finished import kept
from ..settings import Transport
from .statistics import batches_of, digest, length, without_padding

# facts of an expert that hold for the moved one too; its cost, curves and probes are of the old base
KEPT = "method", "hyperparameters", "training", "seed", "preset", "sigma_from"
_OTHER_SHAPES = "theseus alone moves to other shapes: pass --method theseus, or another --model"
_OTHER_LAYERS = "no method moves to other layers: pass another --model"
Params = dict[str, Tensor]


def transport(asked: Transport) -> Iterator[str]:
    """Move every expert; yields a line for each.

    Raises: ValueError that lists what does not fit, before anything is written.
    """
    errors.raise_problems(_problems(asked))
    inputs = load_inputs(*all_inputs(asked.run))
    old = common_suite(inputs, {})
    new = _other_suite(old, asked, inputs.experts)
    about = checkpoint.describe(new.base, kind="base", suite=json.loads(json.dumps(new.recipe)))
    facts = {task: _facts(asked, inputs, task) for task in inputs.experts}
    places = {task: asked.out / task for task in facts}
    finished = [task for task in facts if _is_finished(asked, places[task], facts[task], about)]
    has_base = _is_same(manifest_of(asked.out / BASE), about)
    others = [*([] if has_base else [asked.out / BASE]), *(places[task] for task in facts if task not in finished)]
    errors.raise_problems(
        [text for path in others for text in problems_of(checkpoint.refuse_existing, path, overwrite=asked.overwrite)]
    )
    if not has_base:
        checkpoint.save_expert(asked.out / BASE, new.base, about, overwrite=asked.overwrite)
    for task in (task for task in facts if task not in finished):
        checkpoint.write_text(moving(places[task]), "")
    yield from (f"note: {text}" for text in _token_notes(old, new))
    for task, expert in inputs.experts.items():
        outcome.add("moved", {"folder": places[task], "kept": task in finished})
        if task in finished:
            moving(places[task]).unlink(missing_ok=True)
            yield kept(places[task])
            continue
        vector, data = _vector(asked, old, new, task, expert)
        params, found = _chosen(asked, new, task, vector)
        manifest = _manifest(asked, inputs.manifests[task], new, params, about, facts[task] | data | found)
        checkpoint.save_expert(places[task], params, manifest | {"task": task}, overwrite=asked.overwrite, hashed=True)
        moving(places[task]).unlink(missing_ok=True)
        yield f"moved: {places[task]}, coefficient {found['coef']:g}" + _scores(found)


def _problems(asked: Transport) -> list[str]:
    """Errors that need no model."""
    problems = [f"rows is {asked.rows}, must be at least 1"] if asked.rows < 1 else []
    problems += [] if asked.coefs else ["coefs is empty: give at least one"]
    problems += [text for coef in asked.coefs for text in coef_problems(coef, "coefs")]
    problems += [f"coefs are {list(asked.coefs)}: name each once"] if len({*asked.coefs}) < len(asked.coefs) else []
    if not (asked.model or asked.suite_options):
        problems.append("nothing says which base is the new one: pass --model NEW, or --suite-options")
    if fixed := [name for name in ("name", "seed") if name in asked.suite_options]:
        problems.append(f"--suite-options {' and '.join(fixed)} would give other tasks or splits: leave it out")
    if asked.out.resolve() == asked.run.resolve():
        problems.append(f"--out and --run are both {asked.run}: choose another folder for the moved experts")
    if inside := [place for place in (asked.out, *asked.out.parents) if manifest_of(place)]:
        problems.append(f"--out is {asked.out}, but {inside[0]} is a checkpoint: choose a folder outside it")
    return problems


def _other_suite(old: Suite, asked: Transport, tasks: Collection[str]) -> Suite:
    """The suite of the same tasks and rows with the new base; rows of these tasks alone are read."""
    if asked.model is not None and "model" not in describe_options(old.name):
        raise ValueError(f"suite {old.name!r} has no model to choose: leave out --model, and pass --suite-options")
    options = {**old.recipe, **with_named(asked.suite_options, model=asked.model)}
    new = load_suite(**options, needed=tasks)
    problems = [f"task {task!r} is not in the suite with these options" for task in old.tasks if task not in new.tasks]
    if checkpoint.same(old.base, new.base):
        problems.append(f"the new base has the weights of the old one, {asked.run / BASE}: there is nothing to move")
    found = problems_of(lambda: tree.check_same(old.base, "the old base", **{"the new base": new.base}))
    if found and (asked.method != "theseus" or old.base.keys() != new.base.keys()):
        problems += [*found, _OTHER_SHAPES if old.base.keys() == new.base.keys() else _OTHER_LAYERS]
    errors.raise_problems(problems)
    return new


def _token_notes(old: Suite, new: Suite) -> Iterator[str]:
    """The note on bases of texts whose tokenizers differ: embeddings of equal shapes would be those of other tokens."""
    names = [suite.recipe.get("model") for suite in (old, new)]
    if old.name != "clip8" and all(names):  # images see no tokens
        before, after = (local_folder("the base", Path(str(name))) for name in names)
        so = "changes of embeddings are moved by number"
        yield from tokenizer_notes(before, {"the new base": after}, of="the old base", so=so)


def _facts(asked: Transport, inputs: Inputs, task: str) -> dict[str, Any]:
    """The settings and the origin of a moved expert."""
    facts = {"method": asked.method, "coefs": sorted(asked.coefs), "from": inputs.manifests[task].get("fingerprint")}
    if asked.method != "add":
        facts |= {"rows": asked.rows, "split": asked.split, "seed": asked.seed}
    return facts | ({"vote": asked.vote} if asked.method == "gradfix" else {})


def _is_same(base: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a base is the new one, of a suite with the same options."""
    same = base.get("fingerprint") == about["fingerprint"]
    return same and not unlike(about["suite"], base.get("suite") or {}, "")


def _is_finished(asked: Transport, folder: Path, facts: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether a folder has the expert that these facts give, which stays. Raises: ValueError for damaged weights."""
    manifest = {} if asked.overwrite else manifest_of(folder)
    own = manifest.get("transport") or {}
    same = all(own.get(name) == value for name, value in facts.items())
    same = same and asked.label in (None, "", manifest.get("label"))
    if not (own and same and manifest.get("base_fingerprint") == about["fingerprint"]):
        return False
    if unlike(about["suite"], manifest.get("suite") or {}, manifest["task"]):
        return False
    check_weights(folder, manifest)
    return True


def _vector(asked: Transport, old: Suite, new: Suite, task: str, expert: Params) -> tuple[Leaves, dict[str, str]]:
    """The moved change of an expert, and the digest of the rows that were read."""
    expert = {path: leaf.to(old.base[path].device) for path, leaf in expert.items()}
    if asked.method == "add":
        return task_vector(expert, old.base), {}
    key = random.fold_in(random.fold_in(random.key(asked.seed), "transport"), task)
    batches = batches_of(new, task, asked.split, asked.rows, key)
    data = {"data": digest(batches)}
    if asked.method == "gradfix":
        parts = (
            part
            for batch in batches
            for part in (new.split or split_rows)(batch, length(batch) if asked.vote == "majority" else 1)
        )
        signs = descent_signs(new.loss_fn(task), new.base, parts, vote=asked.vote)
        return gradfix_vector(new.base, old.base, expert, signs), data
    before = without_padding(old, task, batches_of(old, task, asked.split, asked.rows, key))
    after = without_padding(new, task, batches)
    maps = alignments(old.loss_fn(task), old.base, new.loss_fn(task), new.base, before, after)
    return theseus_vector(new.base, old.base, expert, maps), data


def _chosen(asked: Transport, new: Suite, task: str, vector: Leaves) -> tuple[Params, dict[str, Any]]:
    """The moved expert with the best coefficient, and how it was found."""

    def moved(coef: float) -> Params:
        return apply_vector(new.base, vector, coef=coef)

    if len(asked.coefs) == 1:
        return moved(asked.coefs[0]), {"coef": asked.coefs[0]}
    found = choose(sorted(asked.coefs), lambda coef: new.score(moved(coef), task, "dev"))
    curve = [list(pair) for pair in found.curve]
    return moved(found.best), {"coef": found.best, "dev_curve": curve, "base_dev": new.score(new.base, task, "dev")}


def _scores(found: Mapping[str, Any]) -> str:
    """The end of the line of an expert whose coefficient was chosen."""
    if "dev_curve" not in found:
        return ""
    best = max(score for _, score in found["dev_curve"])
    return f", dev {best:.2f} (the new base {found['base_dev']:.2f})"


def _manifest(
    asked: Transport,
    own: Mapping[str, Any],
    new: Suite,
    params: Params,
    about: Mapping[str, Any],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The manifest of a moved expert: that of train.py, with the suite and the base that it has now."""
    kept = {name: own[name] for name in KEPT if name in own}
    beside = {checkpoint.UNTRAINED: checkpoint.fingerprint(new.untrained)} if new.untrained else {}
    return checkpoint.describe(
        params,
        kind="expert",
        label=asked.label or f"{own['label']} by {asked.method}",
        suite=dict(new.recipe),
        base_fingerprint=about["fingerprint"],
        transport=facts,
        **kept,
        **beside,
    )
