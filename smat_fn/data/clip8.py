"""Suite ``clip8``: image classification with a CLIP model, the paper's eight tasks or those of a folder.

A task is images with labels in the splits train, dev and test (`rows`). Only the vision tower is trained; the head of a
task is frozen: the text tower's features of its class names in the prompts of `templates`. The checkpoint's own image
processor prepares images, without augmentation. A score is top-1 accuracy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache, partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..checkpoint import fingerprint
from ..evaluate.metrics import accuracy
from ..evaluate.records import content_key
from ..models import clip
from ..models.modules import FullLoss
from ..types import Batch, Micro, Params
from . import pixels
from .batching import batch_indices
from .cache import cached
from .clip8_recipe import Clip8Recipe, resolve_templates
from .rows import ImageRows, load_rows, take
from .sources import absolute, pick_device, tasks_of
from .suite import Suite, check_member
from .templates import TEMPLATES, prompts

TASKS = tuple(TEMPLATES)
SPLITS = ("train", "dev", "test")


def task_names(*, data: str | Path = "", tasks: Sequence[str] | None = None, **options: Any) -> tuple[str, ...]:
    """The given tasks; else those of a folder, the paper's first, then its others by name; else the paper's eight.

    Raises: ValueError for a folder without tasks, and for tasks named twice.
    """
    return tasks_of(data, tasks, known=TASKS, splits=SPLITS)


def load(*, seed: int, device: str | None = None, eval_batch: int = 256, **options: Any) -> Suite:
    """The suite of a model and images. The base is all leaves of the model's vision tower, on its device.

    Batch: (pixels uint8 (B, 3, H, W), labels int64 (B,)); its loss is `clip.classify`, the aux the logits. Score: top-1
    accuracy over the rows of the split. Heads and prepared images go through the cache (`pixels`).

    Args: seed: kept with the suite, nothing depends on it; device: of model and training, None: the first GPU, or the
        CPU; eval_batch: images scored together; options: fields of `Clip8Recipe`, model and data must be given;
        templates: {task: prompts}, or a JSON file of that, or one prompt for all tasks, each with ``{}`` for the class;
        of tasks left out those of `TEMPLATES`. Device and eval_batch are not in the recipe.
    Raises: ValueError for unknown or bad options; that lists every split that is missing or malformed (of the hub's
        the first), and class names that are missing or differ; for a model that cannot be loaded or is no CLIP.
    """
    known = [field.name for field in fields(Clip8Recipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"clip8 has no options {unknown}: they are {[*known, 'device', 'eval_batch']}")
    if lacking := [name for name in ("model", "data") if options.get(name) is None]:
        raise ValueError(f"clip8 needs {' and '.join(lacking)}: a folder, or a name on the hub")
    tasks = task_names(**options)
    settled = {
        "model": absolute(options["model"]),
        "data": absolute(options["data"]),
        "tasks": tasks,
        "templates": resolve_templates(options.get("templates"), tasks),
    }
    recipe = Clip8Recipe(**{**options, **settled})
    place = pick_device(device)
    problems = [] if eval_batch >= 1 else [f"eval_batch is {eval_batch}, must be at least 1"]
    if Path(recipe.model).is_absolute() and not Path(recipe.model).is_dir():
        problems.append(f"there is no folder {recipe.model}: give a model's folder, or its name on the hub")
    rows: dict[tuple[str, str], ImageRows] = {}
    for task, split in product(tasks, SPLITS):
        try:
            rows[task, split] = _pictures(recipe, task, split)
        except ValueError as error:
            problems.append(str(error))
            if not Path(recipe.data).exists():  # a hub that cannot be reached takes a minute to say so
                break
    tree.raise_problems(problems)
    names = _class_names(rows, tasks)
    model = clip.load(
        recipe.model, dtype=recipe.dtype, device=place, gradient_checkpointing=recipe.gradient_checkpointing
    )
    return _suite(recipe, rows, names, model, seed, place, eval_batch)


def _suite(
    recipe: Clip8Recipe,
    rows: Mapping[tuple[str, str], ImageRows],
    names: Mapping[str, tuple[str, ...]],
    model: clip.Clip,
    seed: int,
    device: torch.device,
    eval_batch: int,
) -> Suite:
    tasks, base = recipe.tasks, model.params
    heads = _heads(recipe, names, model, device)
    table = pixels.value_table(model.processor).to(device)
    firsts = {key: pixels.prepare_some(own.images, model.processor, [0]) for key, own in rows.items()}
    size = (model.image_size, model.image_size)
    tree.raise_problems(
        [
            f"the image processor makes images of {tuple(first.shape[2:])} (task {task}, {split}), the model takes "
            f"{size}: give the model's own preprocessor_config.json"
            for (task, split), first in firsts.items()
            if first.shape[2:] != size
        ]
    )
    processor = model.processor
    losses = {
        task: model.loss_fn(head.to(device), lambda values: pixels.look_up(table, values))
        for task, head in heads.items()
    }

    @cache  # prepared when a split is first used
    def images(task: str, split: str) -> pixels.Pixels:
        return pixels.open_pixels(rows[task, split].images, processor, firsts[task, split])

    @cache
    def labels(task: str, split: str) -> Tensor:
        return torch.from_numpy(rows[task, split].labels)

    def some(task: str, split: str, places: Tensor) -> tuple[Tensor, Tensor]:
        return images(task, split)(places), labels(task, split)[places]

    def loss_fn(task: str) -> FullLoss:
        check_member("clip8 task", task, tasks)
        return losses[task]

    def epoch_steps(task: str) -> int:
        check_member("clip8 task", task, tasks)
        return -(-len(rows[task, "train"].labels) // recipe.batch_size)

    def batch(task: str, key: Tensor, step: int) -> Batch:
        check_member("clip8 task", task, tasks)
        return some(task, "train", batch_indices(key, len(labels(task, "train")), recipe.batch_size, step))

    def batch_rows(task: str, key: Tensor, step: int) -> list[int]:
        return batch_indices(key, len(labels(task, "train")), recipe.batch_size, step).tolist()

    def dev_batches(task: str) -> list[Micro]:
        check_member("clip8 task", task, tasks)
        parts = torch.arange(len(labels(task, "dev"))).split(recipe.batch_size)
        return [Micro(some(task, "dev", places), len(places)) for places in parts]

    def predictions(params: Params, task: str, split: str) -> Tensor:
        check_member("clip8 task", task, tasks)
        check_member("split", split, ("dev", "test"))
        tree.check_same(base, "the base", params=params)
        here = {name: leaf.to(device) for name, leaf in params.items()}
        parts = torch.arange(len(labels(task, split))).split(eval_batch)
        with torch.no_grad():
            return torch.cat([losses[task](here, some(task, split, places))[1].argmax(1) for places in parts])

    def score(params: Params, task: str, split: str) -> float:
        return accuracy(predictions(params, task, split), labels(task, split))

    @cache
    def content(task: str, split: str) -> str:
        facts = {
            "images": pixels.content(rows[task, split].images),
            "labels": labels(task, split).tolist(),
            "head": fingerprint({"head": heads[task], "table": table}),
            "processor": processor.to_json_string(),
            "device": device.type,
            "versions": _versions("torch", "transformers", "pillow"),
        }
        return content_key(facts)

    facts = {"name": "clip8", "seed": seed, **asdict(recipe), "tasks": list(tasks)}
    return Suite(
        "clip8",
        tasks,
        base,
        model.where,
        loss_fn,
        batch,
        score,
        facts,
        seed,
        epoch_steps,
        content=content,
        batch_rows=batch_rows,
        dev_batches=dev_batches,
    )


def _heads(
    recipe: Clip8Recipe, names: Mapping[str, tuple[str, ...]], model: clip.Clip, device: torch.device
) -> dict[str, Tensor]:
    """The frozen head of every task, float32 (C, D), through the cache."""
    text = fingerprint(model.text)
    heads, problems = {}, []
    for task, own in names.items():
        try:
            tokens = model.tokens(prompts(recipe.templates[task], own))
        except ValueError as error:
            problems.append(f"{task}: {error}")
            continue
        config = {
            "text": text,
            "tokens": fingerprint(tokens),
            "classes": len(own),
            "device": device.type,
            "versions": _versions("torch", "transformers"),
        }
        heads[task] = cached("clip-head", config, partial(_head, model, tokens, len(own)))["head"]
    tree.raise_problems(problems)
    return heads


def _head(model: clip.Clip, tokens: Mapping[str, Tensor], classes: int) -> dict[str, Tensor]:
    return {"head": model.head(tokens, classes)}


def _versions(*packages: str) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}


def _pictures(recipe: Clip8Recipe, task: str, split: str) -> ImageRows:
    rows = load_rows(recipe.data, task, split)
    if not isinstance(rows, ImageRows):
        raise ValueError(f"{recipe.data} ({task}, {split}) holds texts: give images and labels")
    return rows if recipe.rows is None else take(rows, range(min(recipe.rows, len(rows.labels))))  # type: ignore[return-value]


def _class_names(rows: Mapping[tuple[str, str], ImageRows], tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The class names of every task, which must be those of all its splits that name them.

    Raises: ValueError that lists tasks whose names are missing, differ, or are too few for the labels.
    """
    names, problems = {}, []
    for task in tasks:
        found = {split: rows[task, split].class_names for split in SPLITS if rows[task, split].class_names}
        own = next(iter(found.values()), ())
        names[task] = own
        if not own:
            problems.append(
                f"{task} names no classes, a head needs them: give class_names in an .npz, or a label column of "
                "ClassLabel, or a folder per class"
            )
            continue
        problems += [
            f"the class names of {task} in {split} are not those in {next(iter(found))}"
            for split, other in found.items()
            if other != own
        ]
        problems += [
            f"{task} has label {top} in {split} and {len(own)} class names"
            for split in SPLITS
            if (top := int(rows[task, split].labels.max())) >= len(own)
        ]
    tree.raise_problems(problems)
    return names
