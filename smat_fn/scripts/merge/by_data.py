"""Mergers that use task data: AdaMerging and RegMean++. In memory, from experts of a suite."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ... import checkpoint, errors, random
from ...checkpoint import BASE
from ...data.batching import split_rows
from ...errors import problems_of
from ...merge.adamerging import adamerging
from ...merge.reg_mean_plus import reg_mean_plus
from ...suites import Suite
from ...suites.suite import EncoderSuite
from ...types import Batch
from .. import outcome
from ..recipes.places import sources_text
from .card import CARD, card
from .inputs import Inputs, all_inputs, load_inputs
from .merging import sources_of
from .settings import AdaMerging, OfRun, RegMeanPlus
from .statistics import batches_of, digest, length, without_padding
from .suite import common_suite


def adapt(asked: AdaMerging) -> Iterator[str]:
    """AdaMerging of a run's experts on unlabelled rows of their dev splits, into ``out/adamerging``.

    Raises: ValueError that lists what does not fit, before any work; for a suite that is not one of classifiers.
    """
    inputs, suite, folder = _begin(asked, "adamerging", {"batch": asked.batch})
    if not isinstance(suite, EncoderSuite):
        raise ValueError(f"adamerging requires classifiers: suite {suite.name!r} has none, choose another merger")
    tasks = list(inputs.experts)
    key = random.fold_in(random.key(asked.seed), "adamerging")
    batches = {task: _cut(suite, batches_of(suite, task, "dev", 1 << 62, key), asked.batch) for task in tasks}
    losses = {task: suite.loss_fn(task) for task in tasks}
    settings = {"layer_wise": asked.layer_wise, "steps": asked.steps, "lr": asked.lr, "start": asked.start}
    found = adamerging(losses, inputs.base, inputs.experts, batches, key, **settings)  # type: ignore[arg-type]
    settings["batch"] = asked.batch
    facts = {"coefs": found.coefs, "entropy": [found.entropy[0], found.entropy[-1]]}
    yield from _write(asked, folder, found.params, settings, inputs, suite, batches, facts)


def regress(asked: RegMeanPlus) -> Iterator[str]:
    """RegMean++ of a run's experts on rows of their own tasks, into ``out/reg_mean_plus``.

    Raises: ValueError that lists what does not fit, before any work.
    """
    inputs, suite, folder = _begin(asked, "reg_mean_plus", {"rows": asked.rows})
    tasks = list(inputs.experts)
    key = random.fold_in(random.key(asked.seed), "statistics")
    batches = {task: batches_of(suite, task, asked.split, asked.rows, random.fold_in(key, task)) for task in tasks}
    losses = {task: suite.loss_fn(task) for task in tasks}
    rows = {task: without_padding(suite, task, own) for task, own in batches.items()}
    params = reg_mean_plus(losses, inputs.base, inputs.experts, rows, scale=asked.scale)
    settings = {"scale": asked.scale, "rows": asked.rows, "split": asked.split}
    yield from _write(asked, folder, params, settings, inputs, suite, batches, {})


def _begin(asked: OfRun, merger: str, least: Mapping[str, int]) -> tuple[Inputs, Suite, Path]:
    folder = asked.out / merger
    problems = [f"{name} is {n}, must be at least 1" for name, n in least.items() if n < 1]
    problems += problems_of(checkpoint.refuse_existing, folder, overwrite=asked.overwrite)
    errors.raise_problems(problems)
    inputs = load_inputs(*all_inputs(asked.run))
    suite = common_suite(inputs, asked.suite_options)
    at = next(iter(suite.base.values())).device
    here = {name: {path: leaf.to(at) for path, leaf in own.items()} for name, own in inputs.experts.items()}
    prints = (*inputs.prints, (suite.base, inputs.print_of(inputs.base)))  # of the same bits, as the suite was checked
    return inputs._replace(base=suite.base, experts=here, prints=prints), suite, folder


def _cut(suite: Suite, batches: list[Batch], size: int) -> list[Batch]:
    """Batches of at most so many rows."""
    split = suite.split or split_rows
    return [part for batch in batches for part, _ in split(batch, -(-length(batch) // size))]


def _write(
    asked: OfRun, folder: Path, params: Any, settings: dict[str, Any], inputs: Inputs, suite: Suite,
    batches: Mapping[str, list[Batch]], more: Mapping[str, Any],
) -> Iterator[str]:  # fmt: skip
    """Save the merged model with its dev scores and its provenance."""
    dev = {task: suite.score(params, task, "dev") for task in inputs.experts}
    facts = sources_of(asked.run / BASE, list(inputs.places.values()), inputs, asked.seed, suite)
    manifest = checkpoint.describe(
        params,
        merger=folder.name,
        **facts,
        hyperparameters=settings,
        dev=dev,
        dev_curve=[],
        data={task: digest(own) for task, own in batches.items()},
        **more,
    )
    manifest, places = checkpoint.without_places(manifest)
    files = {CARD: card(manifest), checkpoint.SOURCES: sources_text({}, places)}
    checkpoint.save_expert(folder, params, manifest, overwrite=asked.overwrite, files=files)
    outcome.add("merged", {"folder": folder, "dev": dev})
    yield f"merged: {folder}, dev {sum(dev.values()) / len(dev):.2f}"
