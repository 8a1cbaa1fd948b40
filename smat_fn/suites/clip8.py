"""Suite ``clip8``: image classification with a CLIP or another image model, the paper's eight tasks or a folder's.

A task is images with labels in the splits train, dev and test (`rows`). Only the vision tower is trained; the head of a
task is frozen (`heads`): the text tower's features of its class names in the prompts of `templates`, and of a model
without a text tower (ViT) a logistic regression on its features of a few training rows. The checkpoint's own image
processor prepares images, without augmentation. A score is top-1 accuracy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import errors, random
from ..checkpoint import fingerprint
from ..data import pixels
from ..data.batching import batch_indices
from ..data.cache import HELD, cached, versions
from ..data.rows import ImageRows, TextRows, load_rows, place_of, take
from ..data.splits import with_made
from ..errors import check_member, count_problem, problems_of
from ..evaluate.metrics import CLASS_METRICS
from ..evaluate.records import content_key
from ..models import clip, image_classifier
from ..models.image_classifier import ImageClassifier
from ..models.modules import frozen
from ..models.top import Top, top_of
from ..progress import bar
from ..types import Batch, LossFn, Micro, Params
from .heads import image_heads, text_heads
from .sources import (
    absolute,
    collect_splits,
    json_file,
    model_problems,
    one_class,
    pick_device,
    settled,
    shared_rows,
    tasks_of,
    two_labels,
)
from .suite import EncoderSuite, Head, SuiteOptions, remembered
from .templates import DEFAULT, TEMPLATES

TASKS = tuple(TEMPLATES)
SPLITS = ("train", "dev", "test")
_TOGETHER = 32  # images that go through the frozen layers in one pass


@dataclass(frozen=True)
class Clip8Options(SuiteOptions):
    """Options of suite ``clip8``."""

    LOCAL = ("device", "eval_batch", "only")
    LOWEST: ClassVar = {"batch_size": 1, "rows": 1, "train_layers": 1}

    model: str
    """A folder, or a repository on the hub, perhaps with its @revision."""
    data: str
    """A folder of <task>/<split>, or a dataset on the hub whose configs are the tasks."""
    tasks: tuple[str, ...] | None = None
    """Tasks (default: those of the folder, for a dataset on the hub the paper's eight)."""
    templates: Any = None
    """Prompts with {} for the class: one prompt, or a JSON file of {task: prompts} (default: CLIP's own)."""
    batch_size: int = 128
    """Images in a batch."""
    dtype: str = "float32"
    """Dtype of parameters and computation, float32, bfloat16 or float16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    train_layers: int | None = None
    """Number of top layers that are trained (default: all parameters)."""
    train: Any = None
    """Parameters that are trained: attention, or patterns of names, separated by commas (default: all)."""
    linearised: bool = False
    """Train and score the model's first-order expansion around the base (tangent-space fine-tuning)."""
    metric: str | None = None
    """Score: accuracy, or, where classes have unequal numbers of rows, balanced-accuracy or macro-f1 (default:
    accuracy)."""
    only: tuple[str, ...] | None = None
    """Tasks whose rows are read and checked (train.py: those of --tasks; default: all)."""
    rows: int | None = None
    """Only the first rows of each split, for quick runs (default: all)."""
    columns: Any = None
    """Column names of the source, as image=picture,label=class (default: image and label)."""
    device: str | None = None
    """Device of model and training, cpu or cuda:0 (default: the first GPU, or the CPU)."""
    eval_batch: int = 256
    """Images scored together."""

    def problems(self) -> list[str]:
        found = problems_of(check_member, "metric", self.metric or "accuracy", list(CLASS_METRICS))
        if self.linearised and self.gradient_checkpointing:
            found.append("linearised excludes gradient_checkpointing, which has no forward derivative: leave one out")
        for task, own in (self.templates or {}).items():
            if bad := [template for template in own if not isinstance(template, str) or "{}" not in template]:
                found.append(f"templates of {task} must contain {{}} for the class, these do not: {bad}")
            if not own:
                found.append(f"templates of {task}: the list is empty, give at least one")
        return found


class Clip8(EncoderSuite):
    """The suite of a model and images. The base is all leaves of the model's vision tower, on its device.

    Batch: (pixels uint8 (B, 3, H, W), labels int64 (B,)); with ``train_layers`` states of the frozen layers (B, T, D)
    take the place of pixels, where the model allows it. Its loss is `clip.classify`, the aux the logits. Score: top-1
    accuracy, or ``metric``, over the rows of the split. Heads, prepared images (`pixels`) and states go through the
    cache.

    Args: seed: of the rows that heads are made of; of a CLIP nothing depends on it; options: `Clip8Options`.
    Raises: ValueError for bad options; that lists every split that is missing or malformed (of the hub's
        the first), and class names that are missing or differ; for a model that cannot be loaded, and
        templates for one without a text tower.
    """

    Options = Clip8Options
    name = "clip8"

    def __init__(self, *, seed: int, **options: Any) -> None:
        tasks = self.task_names(**options)
        of_texts = image_classifier.is_clip(absolute(options["model"]))
        if options.get("templates") and not of_texts:
            raise ValueError(f"templates make heads from texts, {options['model']} has no text tower: leave them out")
        templates = resolve_templates(options.get("templates"), tasks) if of_texts else {}
        options |= {**settled(tasks, options), "data": absolute(options["data"]), "templates": templates}
        self.options = own = Clip8Options(**options)
        self.device, self.batch_size = pick_device(own.device), own.batch_size
        chosen = own.only or tasks
        self._rows, found, made, self.made = collect_splits(
            chosen, partial(_pictures, own), _with_made, size=_size, take=_some, rows=own.rows,
            local=Path(own.data).exists(),
        )  # fmt: skip
        errors.raise_problems([*count_problem("eval_batch", own.eval_batch), *model_problems(own.model), *found])
        names = _class_names(self._rows, chosen)
        self.notes = (*made, *chain.from_iterable(self._notes(task, own) for task, own in names.items()))
        self.notes += _underscored(names) if of_texts else ()
        model: clip.Clip | ImageClassifier = (clip if of_texts else image_classifier).load(
            own.model, device=self.device, **own.loading()
        )
        if isinstance(model, clip.Clip):
            self._heads = text_heads(own.templates, names, model, self.device)
        else:
            train = {task: self._rows[task, "train"] for task in names}
            self._heads = image_heads(train, names, model, random.key(seed), self.device.type)
        self.heads = {task: _described(head, names[task], of_texts) for task, head in self._heads.items()}
        self._prompted = names if of_texts else {}
        self.untrained = frozen(model.module)
        self._config = str(sorted(model.config.items()))
        self._processor, self._table = model.processor, pixels.value_table(model.processor).to(self.device)
        self._firsts = {k: pixels.prepare(rows.images, model.processor, [0]) for k, rows in self._rows.items()}
        if isinstance(model, clip.Clip):
            _check_sizes(self._firsts, (model.image_size, model.image_size))
        self._top = self._states_of(model)
        self.same_bits = ("gradient_checkpointing",) if own.train_layers is None else ()
        self.losses = {task: self._loss(model, head.to(self.device)) for task, head in self._heads.items()}
        reads = None if of_texts else frozenset(model.module.state_dict())  # heads of a CLIP are from its texts
        super().__init__(tasks=tasks, base=model.params, where=model.where, seed=seed, reads=reads)

    @classmethod
    def task_names(
        cls, *, data: str | Path = "", tasks: Sequence[str] | None = None, **options: Any
    ) -> tuple[str, ...]:
        """The given tasks; else those of a folder, the paper's first, then its others by name; else the paper's eight.

        Raises: ValueError for a folder without tasks, and for tasks named twice.
        """
        return tasks_of(data, tasks, known=TASKS, splits=SPLITS)

    def examples(self, task: str) -> int:
        return len(self._rows[task, "train"].labels)

    def batch(self, task: str, key: Tensor, step: int) -> Batch:
        self.check(task)
        return self._some(task, "train", batch_indices(key, self.examples(task), self.batch_size, step))

    @remembered
    def train_rows(self, task: str) -> dict[str, Any]:
        self.check(task)
        train, dev = (
            content_key({"images": pixels.content(rows.images), "labels": rows.labels.tolist()})
            for rows in (self._rows[task, "train"], self._rows[task, "dev"])
        )
        inputs = fingerprint({"first": self._firsts[task, "train"], "table": self._table})
        place = place_of(self.options.data, task, "train")
        classes = {"classes": list(self._prompted[task])} if task in self._prompted else {}
        return {"from": place, "count": self.examples(task), "hash": train, "dev": dev, "inputs": inputs, **classes}

    def dev_batches(self, task: str) -> list[Micro]:
        self.check(task)
        return [Micro(part, len(part[1])) for part in self._parts(task, "dev", self.batch_size)]

    def score(self, params: Params, task: str, split: str) -> float:
        self.check(task, split)
        predicted = self.predictions(params, task, self._parts(task, split, self.options.eval_batch))
        return CLASS_METRICS[self.options.metric or "accuracy"](predicted, self._labels(task, split))

    @remembered
    def content(self, task: str, split: str) -> str:
        images = self._rows[task, split].images
        facts = {
            "images": pixels.content(images),
            **pixels.decoding(images),
            "labels": self._labels(task, split).tolist(),
            "head": fingerprint({"head": self._heads[task], "table": self._table}),
            "processor": self._processor.to_json_string(),
            "untrained": fingerprint(self.untrained),
            "config": self._config,
            "device": self.device.type,
            "versions": versions("torch", "transformers", "pillow"),
        }
        return content_key(facts)

    def _notes(self, task: str, names: Sequence[str]) -> list[str]:
        """Rows that are in two splits or have two labels, and classes that nothing is trained on."""
        own = {split: self._rows[task, split] for split in SPLITS}
        hashes = {split: pixels.each(rows.images) for split, rows in own.items()}
        labels = {split: set(rows.labels.tolist()) for split, rows in own.items()}
        new = [names[label] for label in sorted((labels["dev"] | labels["test"]) - labels["train"])]
        notes = [f"no train row of {task} is of class {', '.join(new[:10])}, which dev or test have"] if new else []
        notes += one_class(task, {split: rows.labels.tolist() for split, rows in own.items()}, names)
        return [*shared_rows(task, hashes), *two_labels(task, hashes["train"], own["train"].labels.tolist()), *notes]

    def _states_of(self, model: clip.Clip | ImageClassifier) -> Top | None:
        """The top layers alone, where only these are trained and need nothing but states."""
        sizes = {first.shape[2:] for first in self._firsts.values()}
        if self.options.train_layers is None or self.options.gradient_checkpointing or len(sizes) > 1:
            return None
        example = pixels.look_up(self._table, next(iter(self._firsts.values())).to(self.device))
        top = top_of(model.module, model.pooled, example.to(next(model.module.parameters()).dtype))
        if isinstance(top, Top):
            return top
        self.notes += (f"the frozen layers of {self.options.model} cannot be cached ({top}): they run in every step",)
        return None

    def _loss(self, model: clip.Clip | ImageClassifier, head: Tensor) -> LossFn:
        if self._top:
            return model.loss_fn(head, self._top.give, self._top.module)
        table = self._table
        return model.loss_fn(head, lambda values: pixels.look_up(table, values))

    def _some(self, task: str, split: str, places: Tensor) -> tuple[Tensor, Tensor]:
        return self._inputs(task, split)(places), self._labels(task, split)[places]

    def _parts(self, task: str, split: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        places = torch.arange(len(self._labels(task, split)))
        return (self._some(task, split, part) for part in places.split(size))

    @remembered  # prepared and computed when a split is first used
    def _inputs(self, task: str, split: str) -> pixels.Pixels:
        """Prepared images by their places, or the states that frozen layers give for them."""
        images = pixels.open_pixels(self._rows[task, split].images, self._processor, self._firsts[task, split])
        if self._top is None:
            return images
        top, table, device = self._top, self._table, self.device

        def states(places: Tensor) -> Tensor:
            return top.states(pixels.look_up(table, images(places).to(device))).cpu()

        count = len(self._labels(task, split))
        if count * (one := states(torch.tensor([0]))).nbytes > HELD:
            return states
        config = {"content": self.content(task, split), "first": str(next(iter(self.base))), "dtype": str(one.dtype)}
        parts = torch.arange(count).split(_TOGETHER)

        def every() -> dict[str, Tensor]:
            with bar(len(parts), desc="states of frozen layers", leave=False, delay=1) as shown:
                found = []
                for part in parts:
                    found.append(states(part))
                    shown.update()
            return {"states": torch.cat(found)}

        kept = cached("image-states", config, every)["states"]
        return lambda places: kept[places]

    def _labels(self, task: str, split: str) -> Tensor:
        return torch.from_numpy(self._rows[task, split].labels)


def resolve_templates(given: Any, tasks: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by task, from a mapping, the JSON file of one, or one prompt.

    Raises: ValueError for anything else, and for templates of other tasks.
    """
    if isinstance(given, str) and "{}" in given:
        given = {task: [given] for task in tasks}
    if isinstance(given, str):
        given = json_file(given, "prompt with {} for the class or a JSON file of templates")
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(own, (list, tuple)) for own in given.values()):
        raise ValueError(
            f"templates are {given!r}, must be lists of prompts by task: {{'MNIST': ['a photo of {{}}.']}}"
        )
    if strangers := sorted(set(given) - set(tasks)):
        raise ValueError(f"templates name {strangers}, the tasks are {list(tasks)}")
    return {task: list(given.get(task, TEMPLATES.get(task, DEFAULT))) for task in tasks}


def _pictures(options: Clip8Options, task: str, split: str) -> ImageRows:
    rows = load_rows(options.data, task, split, columns=options.columns)
    if not isinstance(rows, ImageRows):
        way = "this suite takes images and labels: give some, or a preset of texts (text, lm)"
        raise ValueError(f"{options.data} ({task}, {split}) holds texts, {way}")
    return rows


def _size(rows: ImageRows) -> int:
    return len(rows.labels)


def _some(rows: ImageRows, places: Sequence[int]) -> ImageRows:
    return take(rows, places)  # type: ignore[return-value]


def _with_made(task: str, splits: dict[str, ImageRows], missing: tuple[str, ...]) -> dict[str, ImageRows]:
    """The splits with those that are missing, made from train; an image is its stored bytes, hashed once."""
    hashed = {split: (own, tuple(each.hex() for each in pixels.each(own.images))) for split, own in splits.items()}
    found = with_made(
        hashed, missing, rows=lambda own: TextRows(own[1], tuple(map(str, own[0].labels.tolist()))),
        take=lambda own, places: (_some(own[0], places), tuple(own[1][i] for i in places)),
        labels=lambda own: own[0].labels.tolist(),
    )  # fmt: skip
    return {split: own for split, (own, _) in found.items()}


def _described(head: Tensor, classes: tuple[str, ...], of_texts: bool) -> Head:
    if of_texts:
        return Head(head, torch.zeros(len(head)), classes)
    return Head(head[:, :-1], head[:, -1], classes)


def _check_sizes(firsts: Mapping[tuple[str, str], Tensor], size: tuple[int, int]) -> None:
    errors.raise_problems(
        [
            f"the image processor makes images of {tuple(first.shape[2:])} (task {task}, {split}), the model takes "
            f"{size}: give the model's own preprocessor_config.json"
            for (task, split), first in firsts.items()
            if first.shape[2:] != size
        ]
    )


def _underscored(names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A note for each task whose prompts would have underscores."""
    found = {task: [name for name in own if "_" in name] for task, own in names.items()}
    return tuple(
        f"{len(own)} class names of {task} have underscores ({own[0]!r}), also in prompts: write them with spaces"
        for task, own in found.items()
        if own
    )


def _class_names(rows: Mapping[tuple[str, str], ImageRows], tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The class names of every task; all its splits that name classes must agree.

    Raises: ValueError that lists tasks whose names are missing, differ, or are too few for the labels.
    """
    names, problems = {}, []
    for task in tasks:
        found = {split: rows[task, split].class_names for split in SPLITS if rows[task, split].class_names}
        own = next(iter(found.values()), ())
        names[task] = own
        if not own:
            problems.append(
                f"{task} names no classes, but a head needs them: give class_names in an .npz, or a label column of "
                "ClassLabel, or a folder per class"
            )
            continue
        twice = [name for name in dict.fromkeys(own) if own.count(name) > 1]
        problems += [f"{task} has two classes {name!r}: rename one, or merge their labels" for name in twice]
        problems += [f"{task} has a class without a name: give it one"] if any(not name.strip() for name in own) else []
        if len(own) == 1:
            problems.append(f"all images of {task} are of class {own[0]!r}: give two or more")
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
