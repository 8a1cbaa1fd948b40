"""Suite ``clip8``: image classification with a CLIP or another image model, the paper's eight tasks or a folder's.

A task is images with labels in the splits train, dev and test (`rows`). Only the vision tower is trained; the head of a
task is frozen (`heads`): the text tower's features of its class names in the prompts of `templates`, and of a model
without a text tower (ViT) a logistic regression on its features of a few training rows. The checkpoint's own image
processor prepares images, without augmentation. A score is top-1 accuracy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import errors, random, tree
from ..checkpoint import fingerprint
from ..data import pixels
from ..data.batching import batch_indices
from ..data.rows import ImageRows, load_rows, take
from ..errors import check_member, count_problem
from ..evaluate.metrics import accuracy
from ..evaluate.records import content_key
from ..models import clip, image_classifier
from ..models.image_classifier import ImageClassifier
from ..models.modules import FullLoss
from ..types import Batch, Micro, Params
from .clip8_recipe import Clip8Recipe, resolve_templates
from .heads import image_heads, text_heads, versions
from .sources import absolute, columns_of, pick_device, recipe_of, tasks_of
from .suite import Suite
from .templates import TEMPLATES

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

    Args: seed: of the rows that heads are made of; of a CLIP nothing depends on it; device: of model and training,
        None: the first GPU, or the CPU; eval_batch: images scored together; options: fields of `Clip8Recipe`, model and
        data must be given; templates: {task: prompts}, or a JSON file of that, or one prompt for all tasks, each with
        ``{}`` for the class; of tasks left out those of `TEMPLATES`. Device and eval_batch are not in the recipe.
    Raises: ValueError for unknown or bad options; that lists every split that is missing or malformed (of the hub's
        the first), and class names that are missing or differ; for a model that cannot be loaded, and
        templates for one without a text tower.
    """
    known = [field.name for field in fields(Clip8Recipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"clip8 has no options {unknown}: they are {[*known, 'device', 'eval_batch']}")
    if lacking := [name for name in ("model", "data") if options.get(name) is None]:
        raise ValueError(f"clip8 needs {' and '.join(lacking)}: a folder, or a name on the hub")
    tasks = task_names(**options)
    of_texts = image_classifier.is_clip(absolute(options["model"]))
    if options.get("templates") and not of_texts:
        raise ValueError(f"templates are of heads from texts, {options['model']} has no text tower: leave them out")
    settled = {
        "model": absolute(options["model"]),
        "data": absolute(options["data"]),
        "tasks": tasks,
        "columns": columns_of(options.get("columns")),
        "templates": resolve_templates(options.get("templates"), tasks) if of_texts else {},
    }
    recipe = Clip8Recipe(**{**options, **settled})
    place = pick_device(device)
    problems = count_problem("eval_batch", eval_batch)
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
    errors.raise_problems(problems)
    names = _class_names(rows, tasks)
    model: clip.Clip | ImageClassifier = (clip if of_texts else image_classifier).load(
        recipe.model, dtype=recipe.dtype, device=place, gradient_checkpointing=recipe.gradient_checkpointing
    )
    return _suite(recipe, rows, names, model, seed, place, eval_batch)


def _suite(
    recipe: Clip8Recipe,
    rows: Mapping[tuple[str, str], ImageRows],
    names: Mapping[str, tuple[str, ...]],
    model: clip.Clip | ImageClassifier,
    seed: int,
    device: torch.device,
    eval_batch: int,
) -> Suite:
    tasks, base = recipe.tasks, model.params
    if isinstance(model, clip.Clip):
        heads = text_heads(recipe.templates, names, model, device)
    else:
        train = {task: rows[task, "train"] for task in tasks}
        heads = image_heads(train, names, model, random.key(seed), device.type)
    table = pixels.value_table(model.processor).to(device)
    firsts = {key: pixels.prepare_some(own.images, model.processor, [0]) for key, own in rows.items()}
    size = (model.image_size, model.image_size) if isinstance(model, clip.Clip) else None
    errors.raise_problems(
        [
            f"the image processor makes images of {tuple(first.shape[2:])} (task {task}, {split}), the model takes "
            f"{size}: give the model's own preprocessor_config.json"
            for (task, split), first in firsts.items()
            if size is not None and first.shape[2:] != size
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
            "versions": versions("torch", "transformers", "pillow"),
        }
        return content_key(facts)

    facts = {"name": "clip8", "seed": seed, **recipe_of(recipe)}
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


def _pictures(recipe: Clip8Recipe, task: str, split: str) -> ImageRows:
    rows = load_rows(recipe.data, task, split, columns=recipe.columns)
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
    errors.raise_problems(problems)
    return names
