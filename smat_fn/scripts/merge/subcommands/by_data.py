"""Mergers that use task data: AdaMerging and RegMean++. In memory, from experts of a suite."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .... import checkpoint, errors, random
from ....config import preset_of
from ....data.batching import split_rows
from ....errors import and_more, problems_of
from ....merge import task_arithmetic
from ....merge.adamerging import adamerging
from ....merge.parts.inputs import Leaves
from ....merge.reg_mean_plus import reg_mean_plus
from ....suites import Suite, has_heads
from ....types import Batch
from ... import outcome
from ...cli import with_named
from ...recipes.places import sources_text
from ...run_folder import all_inputs
from ..experts.given import weight_of
from ..experts.inputs import Inputs, load_inputs
from ..experts.suite import made_problems, of_base, suite_and_part
from ..experts.whole_models import SuitePart
from ..in_memory import sources_of
from ..provenance.card import CARD, card, licenses_of
from ..settings import AdaMerging, ByData, RegMeanPlus, check_given
from .statistics import batches_of, digest, length, without_padding


class Given(NamedTuple):
    """The models and the suite of a merge."""

    folder: Path  # of the merged model
    place: Path  # of base
    inputs: Inputs  # models as they are stored
    suite: Suite
    part: SuitePart | None  # what the suite trains of them; None: all
    experts: Mapping[str, Leaves]  # that part, on the suite's device


def adapt(asked: AdaMerging) -> Iterator[str]:
    """AdaMerging of experts on unlabelled rows of their dev splits, into ``out/adamerging``.

    No entropy depends on leaves that the suite does not train: their coefficients stay at their start, and one for all
    of an expert's leaves is theirs too.

    Raises: ValueError that lists what does not fit, before any work; for a suite that is not one of classifiers.
    """
    given = _begin(asked, "adamerging", {"batch": asked.batch})
    suite, tasks = given.suite, list(given.experts)
    yield from (f"note: {note}" for note in suite.notes)
    key = random.fold_in(random.key(asked.seed), "adamerging")
    batches = {task: _cut(suite, batches_of(suite, task, "dev", 1 << 62, key), asked.batch) for task in tasks}
    losses = {task: suite.loss_fn(task) for task in tasks}
    settings = {"layer_wise": asked.layer_wise, "steps": asked.steps, "lr": asked.lr, "start": asked.start}
    found = adamerging(losses, suite.base, given.experts, batches, key, **settings)  # type: ignore[arg-type]
    settings["batch"] = asked.batch
    facts = {"coefs": found.coefs, "entropy": [found.entropy[0], found.entropy[-1]]}
    beside = {task: own.get("*", asked.start) for task, own in found.coefs.items()}
    how = f"{asked.start:g} (start)" if asked.layer_wise else "the coefficient of each expert"
    how = f"the sum of their changes, each times {how}"
    yield from _write(asked, given, found.params, settings, batches, facts, how, weights=beside)


def regress(asked: RegMeanPlus) -> Iterator[str]:
    """RegMean++ of experts on rows of their own tasks, into ``out/reg_mean_plus``.

    Leaves that the suite does not train are averaged, as those outside of blocks.

    Raises: ValueError that lists what does not fit, before any work.
    """
    given = _begin(asked, "reg_mean_plus", {"rows": asked.rows})
    suite, tasks = given.suite, list(given.experts)
    yield from (f"note: {note}" for note in suite.notes)
    key = random.fold_in(random.key(asked.seed), "statistics")
    batches = {task: batches_of(suite, task, asked.split, asked.rows, random.fold_in(key, task)) for task in tasks}
    losses = {task: suite.loss_fn(task) for task in tasks}
    rows = {task: without_padding(suite, task, own) for task, own in batches.items()}
    params = reg_mean_plus(losses, suite.base, given.experts, rows, scale=asked.scale)
    settings = {"scale": asked.scale, "rows": asked.rows, "split": asked.split}
    yield from _write(asked, given, params, settings, batches, {}, "the mean of their changes", aggregate="mean")


def _begin(asked: ByData, merger: str, least: Mapping[str, int]) -> Given:
    """Raises: ValueError that lists all problems of options, inputs and the suite."""
    folder = asked.out / merger
    check_given(merger, asked.run, asked.base, asked.experts)
    problems = [f"{name} is {n}, must be at least 1" for name, n in least.items() if n < 1]
    problems += problems_of(checkpoint.refuse_existing, folder, overwrite=asked.overwrite)
    problems += [
        f"{merger} takes no weights by expert, as {path}: leave them out"
        for path in asked.experts
        if weight_of(path)[1] is not None
    ]
    errors.raise_problems(problems)
    place, experts = (asked.base or Path(), [*asked.experts]) if asked.run is None else all_inputs(asked.run)
    options = with_named(asked.suite_options, data=asked.data)
    preset = None if asked.preset is None else preset_of(asked.preset)
    implied = {} if preset is None else of_base({"name": preset.suite, **preset.options}, place)
    named = {**implied, **options}.get("name")
    if named is not None and asked.run is None:
        _check_suite(merger, named)
    inputs = load_inputs(place, experts, heads=named is not None and has_heads(named))
    suite, part = suite_and_part(inputs, options, implied=implied, preset=True)
    _check_suite(merger, suite.name)
    others = [name for name, manifest in inputs.manifests.items() if not manifest]
    errors.raise_problems(made_problems(suite, others, "dev"))
    at = next(iter(suite.base.values())).device
    here = {
        name: {path: leaf.to(at) for path, leaf in (own if part is None else part.of(own)).items()}
        for name, own in inputs.experts.items()
    }
    return Given(folder, place, inputs, suite, part, here)


def _check_suite(merger: str, name: str) -> None:
    """Raises: ValueError for a suite without classifiers, where the merger takes entropies of their predictions."""
    if merger == "adamerging" and not has_heads(name):
        raise ValueError(f"adamerging requires classifiers: suite {name!r} has none, choose another merger")


def _cut(suite: Suite, batches: list[Batch], size: int) -> list[Batch]:
    """Batches of at most so many rows."""
    split = suite.split or split_rows
    return [part for batch in batches for part, _ in split(batch, -(-length(batch) // size))]


def _write(
    asked: ByData, given: Given, params: Any, settings: dict[str, Any], batches: Mapping[str, list[Batch]],
    more: Mapping[str, Any], how: str, **options: Any,
) -> Iterator[str]:  # fmt: skip
    """Save the merged model with its dev scores and its provenance.

    Args: how: what leaves take that the suite does not train, in words; options: of task arithmetic, for these.
    """
    inputs, suite, folder, part = given.inputs, given.suite, given.folder, given.part
    dev = {task: suite.score(params, task, "dev") for task in inputs.experts}
    notes = [*inputs.notes]
    if part is not None:
        notes.append(_of_others(given, part, how))
        params = part.whole(params, task_arithmetic(inputs.base, inputs.experts, coef=1.0, **options))
    facts = sources_of(given.place, list(inputs.places.values()), inputs, asked.seed, suite)
    manifest = checkpoint.describe(
        params,
        merger=folder.name,
        **facts,
        hyperparameters=settings,
        dev=dev,
        dev_curve=[],
        data={task: digest(own) for task, own in batches.items()},
        **({"notes": notes} if notes else {}),
        **licenses_of(given.place, inputs.places),
        **more,
    )
    manifest, places = checkpoint.without_places(manifest)
    files = {CARD: card(manifest), checkpoint.SOURCES: sources_text({}, places)}
    checkpoint.save_expert(folder, params, manifest, overwrite=asked.overwrite, files=files)
    outcome.add("merged", {"folder": folder, "dev": dev})
    yield f"merged: {folder}, dev {sum(dev.values()) / len(dev):.2f}"
    yield from (f"note: {note}" for note in notes)


def _of_others(given: Given, part: SuitePart, how: str) -> str:
    """A note on the leaves that the suite does not train."""
    changed = part.changed_beside(given.inputs.experts.values())
    count = len(part.view.leaves) - len(part.names)
    names = and_more(map(repr, changed), 2)
    those = f"those that experts changed ({names}) take {how}, the others" if changed else "they"
    return f"suite {given.suite.name!r} does not train {count} parameters of base: {those} stay base's"
