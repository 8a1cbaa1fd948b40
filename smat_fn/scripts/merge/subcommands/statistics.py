"""Statistics of experts on rows of their own task: made, kept beside the weights, and read again for a merge."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .... import checkpoint, errors, lora, random
from ....checkpoint import STATISTICS
from ....data.batching import split_rows
from ....evaluate.records import content_key
from ....folders.writing import locked
from ....merge.parts.inputs import Leaves
from ....merge.statistics import diagonal_fisher, drawn_labels, gram_layers, input_grams, untold_padding
from ....suites import Suite
from ....suites.suite import EncoderSuite
from ....types import Batch, Micro
from ... import outcome
from ...manifests import manifest_of, value_for
from ...run_folder import find_inputs
from ..experts.given import named
from ..experts.inputs import like_base, load_inputs
from ..experts.suite import OF_OTHERS, suite_and_part
from ..experts.whole_models import SuitePart
from ..settings import Statistics

_ELSEWHERE = "model", "data", "tasks"  # of a suite's recipe: what the weights and the digest of the rows say


def make_statistics(asked: Statistics) -> Iterator[str]:
    """Make statistics of experts; yields a line for each file.

    Args: asked: experts or folders of runs, and how; ``base`` None: that of the first one's run.
    Raises: ValueError that lists what does not fit, before any work.
    """
    problems = [f"rows is {asked.rows}, must be at least 1"] if asked.rows < 1 else []
    problems += ["no experts: give at least one folder"] if not asked.experts else []
    problems += ["kinds is empty: fisher, gram or both"] if not asked.kinds else []
    errors.raise_problems(problems)
    base = asked.base
    experts: list[Path] = []
    for place in asked.experts:
        if manifest_of(named(place)[1]) or not any(place.glob(f"*/{checkpoint.MANIFEST}")):
            experts.append(place)
            continue
        found, own = find_inputs(place)
        base, experts = base or found, [*experts, *own]
    errors.raise_problems(
        [
            f"{place} is not a folder, and statistics are stored beside the weights: download it and give its folder"
            for _, place in map(named, experts)
            if not place.is_dir()
        ]
    )
    if base is None:
        first = named(experts[0])[1]
        if not manifest_of(first):
            raise ValueError(
                f"{first} is not an expert of train.py, so its base is not known: pass --base BASE, {OF_OTHERS}"
            )
        base = find_inputs(first.absolute().parent)[0]
    inputs = load_inputs(base, experts)
    suite, part = suite_and_part(inputs, asked.suite_options)
    if part is not None and part.naming is not None:
        raise ValueError(
            f"{base} names its leaves otherwise than suite {suite.name!r}, so statistics would not be found beside "
            "them: save base and experts by the suite's class of transformers (AutoModel of a text encoder)"
        )
    if asked.labels == "model" and not isinstance(suite, EncoderSuite):
        raise ValueError(f"--labels model requires a classifier, suite {suite.name!r} has none: pass --labels data")
    if "gram" in asked.kinds:
        gram_layers(suite.loss_fn(next(iter(inputs.experts))), suite.base)
    places_of = dict(zip(inputs.experts, (named(path)[1] for path in experts), strict=True))
    for task, params in inputs.experts.items():
        yield from write_statistics(suite, places_of[task], task, params, asked, part=part, print_of=inputs.print_of)


def statistics_of_run(suite: Suite, folders: Sequence[Path], *, kinds: Sequence[str], seed: int) -> Iterator[str]:
    """`make_statistics` of experts just trained on a suite, with its defaults."""
    for folder in folders:
        params = lora.load_expert(folder, suite.base)[0]
        wanted = Statistics((), tuple(kinds), seed=seed, overwrite=True)  # type: ignore[arg-type]
        yield from write_statistics(suite, folder, folder.name, params, wanted)


def write_statistics(
    suite: Suite,
    folder: Path,
    task: str,
    params: dict[str, Tensor],
    asked: Statistics,
    *,
    part: SuitePart | None = None,
    print_of: Callable[[dict[str, Tensor]], str] = checkpoint.fingerprint,
) -> Iterator[str]:
    """Statistics of one expert, written into its folder; those that are there already are kept.

    Args: part: of a whole model, what the suite trains; the diagonal of other leaves, which no loss reads, is 0.
    Raises: ValueError where there are others that are not to be replaced.
    """
    key = random.fold_in(random.fold_in(random.key(asked.seed), "statistics"), task)
    loss_fn, drawn = suite.loss_fn(task), asked.labels or ("model" if isinstance(suite, EncoderSuite) else "data")
    here = like_base(suite.base, params if part is None else part.of(params))
    batches = batches_of(suite, task, asked.split, asked.rows, key)
    manifest = manifest_of(folder)
    facts: dict[str, Any] = {
        "expert": manifest.get("fingerprint") or print_of(params),
        "task": task,
        "split": asked.split,
        "rows": sum(map(length, batches)),
        "data": digest(batches),
        "suite": content_key({n: value_for(task, n, suite.recipe) for n in suite.recipe if n not in _ELSEWHERE}),
        "seed": asked.seed,
    }
    for kind in asked.kinds:
        own = facts | ({"labels": drawn} if kind == "fisher" else {})
        file = folder / STATISTICS[kind]
        with ExitStack() as held:
            yield from _hold(file, held)
            if file.exists() and not asked.overwrite:
                if checkpoint.statistics_facts(file) == {"kind": kind, **own}:
                    yield f"kept: {file}, {own['rows']} rows"
                    continue
                raise ValueError(f"{file} is from other rows, weights or settings: remove it, or pass --overwrite")
            if kind == "gram":
                found = input_grams(loss_fn, here, without_padding(suite, task, batches))
                if unseen := [path for path in gram_layers(loss_fn, here) if path not in found]:
                    yield (
                        f"note: {len(unseen)} linear layers are called as functions (first: {unseen[0]}) and have "
                        "no Gram matrix: reg_mean merges them as --others says"
                    )
            else:
                found = diagonal_fisher(loss_fn, here, _rows(suite, task, here, batches, drawn, key))
            if part is not None:
                found = {name: found[path] for name, path in part.names.items() if path in found}
                rest = {name: leaf for name, leaf in params.items() if kind == "fisher" and leaf.is_floating_point()}
                found = {name: torch.zeros_like(leaf, dtype=torch.float32) for name, leaf in rest.items()} | found
            checkpoint.save_statistics(folder, kind, found, own)
            outcome.add("written", file)
            yield f"{kind}: {file}, {own['rows']} rows"


def _hold(file: Path, held: ExitStack) -> Iterator[str]:
    """Lock a file of statistics, where the disk has locks, and remove partial writes of killed processes.

    Yields a line where another process makes that file, then waits for it.
    """
    folder = file.parent.resolve()
    lock, taken = folder.parent / f".{folder.name}.{file.name}.lock", f"another process makes {file}"
    with suppress(OSError):  # a cluster's disk may have no locks
        try:
            held.enter_context(locked(lock, taken))
        except ValueError:
            yield f"waiting: {taken}"
            held.enter_context(locked(lock, taken, wait=math.inf))
        checkpoint.sweep(file)


def batches_of(suite: Suite, task: str, split: str, rows: int, key: Tensor) -> list[Batch]:
    """Batches of a split until they hold so many rows; none is taken twice.

    Raises: ValueError for the test split, and for a dev split that the suite does not give as batches.
    """
    if split == "dev":
        if suite.dev_batches is None:
            raise ValueError(f"suite {suite.name!r} has no batches of its dev split: pass --split train")
        every = iter([batch for batch, _ in suite.dev_batches(task)])
    elif split == "train":
        every = _train_batches(suite, task, key)
    else:
        raise ValueError(f"split is {split!r}, must be 'train' or 'dev'")
    found: list[Batch] = []
    while sum(map(length, found)) < rows and (batch := next(every, None)) is not None:
        found.append(batch)
    return found


def _train_batches(suite: Suite, task: str, key: Tensor) -> Iterator[Batch]:
    """Batches of training rows, one epoch at most."""
    seen: set[int] = set()
    step, most = 0, None if suite.epoch_steps is None else suite.epoch_steps(task)
    while most is None or step < most:
        if suite.batch_rows is not None:
            own = set(suite.batch_rows(task, key, step))
            if own & seen:
                return
            seen |= own
        yield suite.batch(task, key, step)
        step += 1


def without_padding(suite: Suite, task: str, batches: Sequence[Batch]) -> list[Batch]:
    """Batches for `input_grams`: those with padding that it could not tell from tokens as batches of one row."""
    loss_fn, split = suite.loss_fn(task), suite.split or split_rows
    return [
        part
        for batch in batches
        for part in ([row for row, _ in split(batch, length(batch))] if untold_padding(loss_fn, batch) else [batch])
    ]


def length(batch: Batch) -> int:
    """The number of rows of a batch."""
    if hasattr(batch, "labels"):
        return len(batch.labels)
    return next(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)


def digest(batches: Sequence[Batch]) -> str:
    """SHA-256 of all tensors of some batches."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(list(batches)):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _rows(
    suite: Suite, task: str, params: Leaves, batches: Sequence[Batch], labels: str, key: Tensor
) -> Iterator[Micro]:
    """The rows one by one."""
    for number, batch in enumerate(batches):
        if labels == "model":
            batch = drawn_labels(suite.loss_fn(task), params, batch, random.fold_in(key, number))
        yield from (suite.split or split_rows)(batch, length(batch))
