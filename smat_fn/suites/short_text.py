"""Suite ``short_text``: classification of short texts with a pretrained encoder, one expert a task.

A task is texts with a class each in the splits train, dev and test (`labelled`). A text's feature is the mean over its
last hidden states; the head of a task is a logistic regression on the base's features of a few training rows, then
frozen. Where only the top layers are trained, what the frozen ones give for a row is computed once and kept (`cache`).
A score is top-1 accuracy; dev and test rows are only ever scored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache, partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import errors, random, tree
from ..checkpoint import fingerprint
from ..data.batching import batch_indices
from ..data.cache import cached
from ..data.labelled import Task, load_task, take
from ..errors import check_member, count_problem
from ..evaluate.metrics import accuracy
from ..evaluate.records import content_key
from ..models import encoder as encoders
from ..models.encoder import Encoder
from ..models.modules import FullLoss
from ..models.packing import Texts, texts
from ..types import Micro, Params
from .heads import fit_head, head_rows
from .short_text_recipe import ShortTextRecipe, resolve_data
from .sources import absolute, pick_device, tasks_of
from .suite import Suite

TASKS = ("sst2", "emotion", "trec", "banking77", "clinc150")
HELD = 2 * 2**30  # bytes of a split's frozen states that are kept; of a larger one they are computed again each time
Ids = list[Tensor]


def task_names(*, data: Any = "", tasks: Sequence[str] | None = None, **options: Any) -> tuple[str, ...]:
    """The given tasks; else those of a folder or mapping, the known ones first; else the known ones (`TASKS`).

    Raises: ValueError for a folder without tasks, and for tasks named twice.
    """
    own = resolve_data(data) if data else ""
    if isinstance(own, Mapping) and tasks is None:
        return (*(task for task in TASKS if task in own), *(task for task in own if task not in TASKS))
    return tasks_of("" if isinstance(own, Mapping) else own, tasks, known=TASKS, splits=("train",))


def load(
    *, seed: int, device: str | None = None, eval_batch: int = 32, progress: bool | None = None, **options: Any
) -> Suite:
    """The suite of an encoder and texts. The base is the trained leaves alone, on the model's device.

    Batch: `Texts`; its loss is `encoder.classify`, the aux the logits. Score: top-1 accuracy over the rows of the
    split. Heads and states of frozen layers go through the cache.

    Args: seed: of the rows that heads are made of; device: of model and training, None: the first GPU, or the CPU;
        eval_batch: texts scored together; progress: bar on stderr where states are computed, None: where stderr is a
        terminal; options: fields of `ShortTextRecipe`, model and data must be given; data may be the JSON file of a
        mapping. Device, eval_batch and progress are not in the recipe.
    Raises: ValueError for unknown or bad options; that lists every task that is missing or malformed (of the hub the
        first); for a model that cannot be loaded, or not trained that way.
    """
    known = [field.name for field in fields(ShortTextRecipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"short_text has no options {unknown}: they are {[*known, 'device', 'eval_batch']}")
    if lacking := [name for name in ("model", "data") if not options.get(name)]:
        raise ValueError(f"short_text needs {' and '.join(lacking)}: a folder, or a name on the hub")
    settled = {"model": absolute(options["model"]), "data": resolve_data(options["data"])}
    recipe = ShortTextRecipe(**{**options, **settled, "tasks": task_names(**options)})
    place = pick_device(device)
    problems = count_problem("eval_batch", eval_batch)
    if Path(recipe.model).is_absolute() and not Path(recipe.model).is_dir():
        problems.append(f"there is no folder {recipe.model}: give a model's folder, or its name on the hub")
    data: dict[str, Task] = {}
    for task in recipe.tasks:
        try:
            data[task] = load_task(recipe.source(task))
        except ValueError as error:
            problems.append(str(error))
            if not Path(recipe.source(task)).is_absolute():  # a hub that cannot be reached takes a minute to say so
                break
    errors.raise_problems(problems)
    encoder = encoders.load(
        recipe.model, train_layers=recipe.train_layers, normalize=recipe.normalize, dtype=recipe.dtype, device=place
    )
    longest = encoder.config.get("max_position_embeddings") or recipe.max_length
    if recipe.max_length > longest:
        raise ValueError(f"max_length is {recipe.max_length}, the model has {longest} positions: choose at most that")
    return _suite(recipe, data, encoder, seed, place, eval_batch, progress)


def _suite(
    recipe: ShortTextRecipe,
    data: Mapping[str, Task],
    encoder: Encoder,
    seed: int,
    device: torch.device,
    eval_batch: int,
    progress: bool | None,
) -> Suite:
    tasks, base = recipe.tasks, encoder.params
    model = {
        "weights": fingerprint(encoder.frozen),
        "config": content_key({"config": str(sorted(encoder.config.items()))}),
        "device": device.type,
        "versions": {package: metadata.version(package) for package in ("torch", "transformers", "scikit-learn")},
    }
    heads = {
        task: _head(recipe, own, encoder, model, random.fold_in(random.key(seed), task)) for task, own in data.items()
    }
    losses = {task: encoder.loss_fn(head["weight"].to(device), head["bias"].to(device)) for task, head in heads.items()}

    @cache
    def rows(task: str, split: str) -> tuple[Ids, Tensor]:
        own = data[task].splits[split]
        ids, labels = encoder.ids(own.texts[: recipe.rows], recipe.max_length), own.labels[: recipe.rows]
        # scored in any order: texts of one length side by side
        order = range(len(ids)) if split == "train" else sorted(range(len(ids)), key=lambda i: len(ids[i]))
        return [ids[i] for i in order], torch.tensor([labels[i] for i in order])

    @cache  # computed when a split is first used
    def tokens(task: str, split: str) -> Callable[[list[int]], list[Tensor]]:
        ids, _ = rows(task, split)
        lengths, compute = [len(own) for own in ids], encoder.states
        if compute is None:
            return lambda places: [ids[i] for i in places]
        if 4 * sum(lengths) * encoder.config["hidden_size"] > HELD:
            return lambda places: list(compute(some := [ids[i] for i in places], False).split([len(x) for x in some]))
        config = {
            **model,
            "first": str(next(iter(base))),
            "ids": fingerprint({"ids": torch.cat(ids)}),
            "lengths": lengths,
        }
        states = cached("text-states", config, lambda: {"states": compute(ids, progress)})["states"].split(lengths)
        return lambda places: [states[i] for i in places]

    def some(task: str, split: str, places: list[int]) -> Texts:
        return texts(tokens(task, split)(places), rows(task, split)[1][places])

    def scored(task: str, split: str) -> list[Texts]:
        places = list(range(len(rows(task, split)[1])))
        return [some(task, split, places[i : i + eval_batch]) for i in range(0, len(places), eval_batch)]

    def loss_fn(task: str) -> FullLoss:
        check_member("short_text task", task, tasks)
        return losses[task]

    def epoch_steps(task: str) -> int:
        check_member("short_text task", task, tasks)
        return -(-len(rows(task, "train")[1]) // recipe.batch_size)

    def batch_rows(task: str, key: Tensor, step: int) -> list[int]:
        check_member("short_text task", task, tasks)
        return batch_indices(key, len(rows(task, "train")[1]), recipe.batch_size, step).tolist()

    def batch(task: str, key: Tensor, step: int) -> Texts:
        return some(task, "train", batch_rows(task, key, step))

    def dev_batches(task: str) -> list[Micro]:
        check_member("short_text task", task, tasks)
        return [Micro(own, len(own.labels)) for own in scored(task, "dev")]

    def predictions(params: Params, task: str, split: str) -> tuple[Tensor, Tensor]:
        check_member("short_text task", task, tasks)
        check_member("split", split, ("dev", "test"))
        tree.check_same(base, "the base", params=params)
        here = {name: leaf.to(device) for name, leaf in params.items()}
        with torch.no_grad():
            found = [losses[task](here, own)[1].argmax(1) for own in scored(task, split)]
        return torch.cat(found), rows(task, split)[1]

    def score(params: Params, task: str, split: str) -> float:
        return accuracy(*predictions(params, task, split))

    @cache
    def content(task: str, split: str) -> str:
        ids, labels = rows(task, split)
        return content_key(
            {**model, "ids": [x.tolist() for x in ids], "labels": labels.tolist(), "head": fingerprint(heads[task])}
        )

    facts = {"name": "short_text", "seed": seed, **asdict(recipe), "tasks": list(tasks)}
    return Suite(
        "short_text",
        tasks,
        base,
        encoder.where,
        loss_fn,
        batch,
        score,
        facts,
        seed,
        epoch_steps,
        content=content,
        split=split_texts,
        batch_rows=batch_rows,
        dev_batches=dev_batches,
    )


def split_texts(batch: Texts, parts: int) -> list[Micro]:
    """A batch as at most ``parts`` micro-batches of equally many texts, up to one; their weight is that number."""
    bounds = [len(batch.labels) * part // parts for part in range(parts + 1)]
    found = []
    for start, stop in pairwise(bounds):
        if stop > start:
            own = (batch.owners >= start) & (batch.owners < stop)
            few = Texts(batch.tokens[own], batch.owners[own] - start, batch.labels[start:stop])
            found.append(Micro(few, stop - start))
    return found


def _head(
    recipe: ShortTextRecipe, task: Task, encoder: Encoder, model: Mapping[str, Any], key: Tensor
) -> dict[str, Tensor]:
    train = task.splits["train"]
    few = take(train, head_rows(train.labels, len(task.classes), key, recipe.per_class))
    ids, labels = encoder.ids(few.texts, recipe.max_length), torch.tensor(few.labels)
    config = {
        **model,
        "normalize": recipe.normalize,
        "c": recipe.head_c,
        "ids": [own.tolist() for own in ids],
        "labels": labels.tolist(),
    }
    return cached("text-head", config, partial(_fit, encoder, ids, labels, recipe.head_c))


def _fit(encoder: Encoder, ids: Ids, labels: Tensor, c: float) -> dict[str, Tensor]:
    return fit_head(encoder.features(ids), labels, c=c)
