"""Checks of --resume: what is in the folder of a run must be of the same settings, weights and rows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from ... import checkpoint, errors
from ...errors import problems_of
from ..manifests import BY_TASK, check_weights
from ..run_folder import is_free
from . import resuming
from .options import RunOptions


def check_resumed(
    run: RunOptions,
    experts: Mapping[str, Mapping[str, Any]],
    report: Callable[[str], None],
    *,
    same_bits: Collection[str] = (),
) -> None:
    """Raises: ValueError that lists experts and checkpoints of other settings or rows, and damaged experts.

    A label that is given is a new name. Tasks may have come beside, and folders of data and model may have moved:
    hashes compare what is in them. A model of another place is reported, since its configuration has none.

    Args: same_bits: options of the suite that change no bit, which are not compared.
    """
    out, problems, edited, damaged, moved = run.out, list[str](), list[str](), list[str](), dict[str, None]()
    for task, facts in experts.items():
        last, path = resuming.read(resuming.path_of(out, task)), out / task
        ended = resuming.finished(out, task)
        if not ended and not is_free(path) and not resuming.replaced(out, task).exists():
            damaged.append(f"{path} is not the folder of an expert of train.py: move it to train {task} there")
        found = checkpoint.load_manifest(path) if ended else None if last is None else last.settings
        if found is None:
            continue
        if "transport" in found:
            damaged.append(f"{path} was moved by merge.py transport, not trained: choose another --out, or --overwrite")
            continue
        damaged += problems_of(check_weights, path, found) if ended else []
        if (of := found.get("task", task) if last is None or ended else last.task) != task:
            file = path if ended else resuming.path_of(out, task)
            damaged.append(f"{file} is of task {of}: give it back the name of that task, or move it to train {task}")
        rows, now = (settings.get("train_rows") or {} for settings in (found, facts))
        parts = "hash", "dev", "inputs", "head", "classes"
        other = {name for name in parts if name in rows and now.get(name, rows[name]) != rows[name]}
        begun = f"changed since {task} in {out} was begun"
        others = {name: value for name, value in facts.items() if name != "train_rows"}
        besides = _not_compared(task, found, facts, relabels=bool(run.label))
        besides += [f"suite.{name}" for name in same_bits]
        old, model = ((settings.get("suite") or {}).get("model") for settings in (found, facts))
        if old != model and "inputs" in rows and _holds_all(facts["suite"]):
            besides.append("suite.model")
            moved[f"model was {old}, is {model}"] = None
        differ = resuming.differences(found, others, besides=besides)
        # other options of the suite make other inputs of the same files
        edited += [] if _other_options(differ) else _edits(task, out, begun, rows, now, other)
        if differ:
            problems.append(f"{task} in {out} was trained with other settings: {', '.join(differ)}")
        elif other == {"head"}:  # which settings choose too
            what = "rows that no step trains on, but of which its head is made,"
            edited.append(f"{now['from']} {begun}: {what} are others")
    if problems:
        problems.append("give the settings it was started with, or choose another --out")
    if edited:
        edited.append("put the old files back, or choose another --out, or start over with --overwrite")
    errors.raise_problems(problems + edited + damaged)
    for line in moved:
        report(f"note: {line}: weights and tokens of training rows are the same, other files of it are not compared")


def _not_compared(task: str, found: Mapping[str, Any], facts: Mapping[str, Any], *, relabels: bool) -> list[str]:
    """Settings by path in which a task may differ from before: a new label, other tasks' options, the data's place."""
    besides = [checkpoint.UNTRAINED] if checkpoint.UNTRAINED not in found else []  # of earlier code
    besides += ["suite.tasks", *(["label"] if relabels else [])]
    besides += ["suite.data"] if "hash" in (found.get("train_rows") or {}) else []
    for name, recipe in product(BY_TASK, (found.get("suite"), facts["suite"])):
        values = (recipe or {}).get(name)
        of_tasks = values if isinstance(values, Mapping) else {}
        besides += [f"suite.{name}.{x}" for x in of_tasks if x != task or f"suite.{name}" in besides]
    return besides


def _other_options(differ: Sequence[str]) -> bool:
    """Whether differences are of options of the suite, beside its model and the folder of its rows."""
    own = [text.split(" was ")[0] for text in differ]
    return any(name.startswith("suite.") and name not in ("suite.model", "suite.data") for name in own)


def _edits(
    task: str, out: Path, begun: str, rows: Mapping[str, Any], now: Mapping[str, Any], other: Collection[str]
) -> Iterator[str]:
    """Errors for training rows, what is made of them, class names and dev rows that are not those of before."""
    if "hash" in other:
        was, has = (f"{own['count']} rows of hash {own['hash'][:8]}" for own in (rows, now))
        yield f"{now['from']} {begun}: it held {was}, now {has}"
    elif "inputs" in other:
        made = "the tokenizer, its chat template or the image processor makes other inputs of its training rows"
        yield f"{task} in {out} was begun with another model folder: {made}"
    if "classes" in other:
        lists = ([*own["classes"], "no class"] for own in (rows, now))
        names = next(f"{a!r} is now {b!r}" for a, b in zip_longest(*lists) if a != b)
        yield f"the class names of {task} {begun}, and its head is made of them: {names}"
    if "dev" in other:
        yield f"the dev rows of {task} {begun}, which --eval-every scores"


def _holds_all(suite: Mapping[str, Any]) -> bool:
    """Whether an expert has every weight that its loss reads, so that the fingerprint of the base tells the model."""
    return suite.get("name") != "clip8" and not suite.get("train_layers") and not suite.get("train")
