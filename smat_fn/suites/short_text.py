"""Suite ``short_text``: classification of short texts with a pretrained encoder, one expert a task.

A task is texts with a class each in the splits train, dev and test (`labelled`). A text's feature is the mean over its
last hidden states; the head of a task is a logistic regression on the base's features of a few training rows, then
frozen. Where only the top layers are trained, what the frozen ones give for a row is computed once and kept (`cache`).
A score is top-1 accuracy; dev and test rows are only ever scored.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import errors, random
from ..checkpoint import fingerprint
from ..data.cache import HELD, cached, versions
from ..data.labelled import Labelled, Task, load_task, place_of, take
from ..errors import check_member, count_problem, problems_of
from ..evaluate.metrics import CLASS_METRICS
from ..evaluate.records import content_key
from ..models import encoder as encoders
from ..models.packing import Texts, texts
from ..types import Micro, Params
from .heads import fit_head, head_rows
from .sources import (
    absolute,
    collect,
    json_file,
    made_note,
    model_problems,
    one_class,
    pick_device,
    settled,
    shared_rows,
    tasks_of,
    two_labels,
)
from .suite import EncoderSuite, Head, SuiteOptions, remembered

TASKS = ("sst2", "emotion", "trec", "banking77", "clinc150")
_COUNTED = 1000  # texts of a task that are looked at for a note
Data = str | Mapping[str, str]
Ids = list[Tensor]


@dataclass(frozen=True)
class ShortTextOptions(SuiteOptions):
    """Options of suite ``short_text``."""

    LOCAL = ("device", "eval_batch", "progress", "only")
    UNSAID = (*SuiteOptions.UNSAID, "train")
    LOWEST: ClassVar = {"train_layers": 1, "per_class": 1, "batch_size": 1, "max_length": 3, "rows": 1}
    POSITIVE = ("head_c",)

    model: str
    """A folder, or a repository on the hub, perhaps with its @revision."""
    data: Data
    """A folder of tasks, a dataset on the hub whose configs are the tasks, or a JSON file {task: folder or dataset}."""
    tasks: tuple[str, ...] | None = None
    """Tasks (default: those of the folder or mapping, of a hub dataset sst2, emotion, trec, banking77 and clinc150)."""
    train_layers: int | None = None
    """Number of top layers that are trained (default: the whole encoder)."""
    train: Any = None
    """Parameters that are trained: attention, or patterns of names, separated by commas (default: all)."""
    linearised: bool = False
    """Train and score the model's first-order expansion around the base (tangent-space fine-tuning)."""
    metric: str | None = None
    """Score: accuracy, or, where classes have unequal numbers of rows, balanced-accuracy or macro-f1 (default:
    accuracy)."""
    per_class: int | None = None
    """Training rows per class that heads are made of (default: 16, or 3 with more than 20 classes)."""
    head_c: float = 10.0
    """Inverse regularization strength of the heads (scikit-learn's C)."""
    normalize: bool = True
    """Scale features to length 1."""
    batch_size: int = 16
    """Texts in a batch."""
    max_length: int = 128
    """Maximum number of tokens of a text."""
    dtype: str = "float32"
    """Dtype of trained parameters and their computation, float32, bfloat16 or float16."""
    columns: Any = None
    """Column names of the source, as text=review,label=stars (default: text and label)."""
    only: tuple[str, ...] | None = None
    """Tasks whose rows are read and checked (train.py: those of --tasks; default: all)."""
    rows: int | None = None
    """Only the first rows of each split, for quick runs; heads are those of all rows (default: all)."""
    device: str | None = None
    """Device of model and training, cpu or cuda:0 (default: the first GPU, or the CPU)."""
    eval_batch: int = 32
    """Texts scored together."""
    progress: bool | None = None
    """Show a progress bar on stderr while states are computed (default: where stderr is a terminal)."""

    def problems(self) -> list[str]:
        tasks = self.tasks or ()
        found = problems_of(check_member, "metric", self.metric or "accuracy", list(CLASS_METRICS))
        if bad := [task for task in tasks if not re.fullmatch(r"\w[\w.-]*", task)]:
            found.append(f"tasks {bad} cannot name folders: use letters, digits, '.', '_' and '-'")
        if isinstance(self.data, Mapping) and (lacking := [task for task in tasks if task not in self.data]):
            found.append(f"data has no {', '.join(lacking)}, it has {', '.join(self.data)}")
        return found

    def source(self, task: str) -> str:
        """The folder or the hub's dataset of a task."""
        if isinstance(self.data, Mapping):
            return self.data[task]
        return str(Path(self.data) / task) if Path(self.data).is_absolute() else f"{self.data}:{task}"


class ShortText(EncoderSuite):
    """The suite of an encoder and texts. The base is the trained leaves alone, on the model's device.

    Batch: `Texts`; its loss is `encoder.classify`, the aux the logits. Score: top-1 accuracy, or ``metric``, over the
    rows of the split. Heads and states of frozen layers go through the cache.

    Args: seed: of the rows that heads are made of; options: `ShortTextOptions`; data may also be a mapping.
    Raises: ValueError for bad options; that lists every task that is missing or malformed (of the hub the
        first); for a model that cannot be loaded, or not trained that way.
    """

    Options = ShortTextOptions
    name = "short_text"

    def __init__(self, *, seed: int, **options: Any) -> None:
        tasks, data = self.task_names(**options), resolve_data(options["data"])
        self.options = own = ShortTextOptions(**{**options, **settled(tasks, options), "data": data})
        self.device, self.batch_size = pick_device(own.device), own.batch_size
        chosen = own.only or tasks
        self._data, found = collect(
            chosen,
            lambda task: load_task(own.source(task), columns=own.columns),
            local=lambda task: Path(own.source(task)).is_absolute(),
        )
        errors.raise_problems([*count_problem("eval_batch", own.eval_batch), *model_problems(own.model), *found])
        self._encoder = encoder = encoders.load(
            own.model, train_layers=own.train_layers, train=own.train, normalize=own.normalize, dtype=own.dtype,
            device=self.device,
        )  # fmt: skip
        splits = {task: self._data[task].splits for task in chosen}
        notes = [shared_rows(task, {s: rows.texts for s, rows in found.items()}) for task, found in splits.items()]
        notes += [two_labels(task, *found["train"]) for task, found in splits.items()]
        notes += [_made_splits(task, self._data[task], own.rows) for task in chosen]
        self.made = {task: self._data[task].made for task in chosen if self._data[task].made}
        for task, parts in splits.items():
            labels = {split: rows.labels[: own.rows] for split, rows in parts.items()}
            notes.append(one_class(task, labels, self._data[task].classes))
        self.notes = (*filter(None, (encoder.note, encoders.pooling_note(own.model))), *chain.from_iterable(notes))
        longest = encoder.positions or own.max_length
        if own.max_length > longest:
            raise ValueError(
                f"`max_length={own.max_length}` is more than the {longest} positions of {own.model}: pass {longest}"
            )
        self.notes += tuple(chain.from_iterable(self._cut_off(task) for task in chosen))
        self._model = {
            "weights": fingerprint(encoder.frozen),
            "config": content_key({"config": str(sorted(encoder.config.items()))}),
            "device": self.device.type,
            "versions": versions("torch", "transformers", "scikit-learn"),
        }
        self._few = {task: self._head_rows(task, random.fold_in(random.key(seed), task)) for task in chosen}
        self._heads = {task: self._head(few) for task, few in self._few.items()}
        self.heads = {
            task: Head(head["weight"], head["bias"], self._data[task].classes) for task, head in self._heads.items()
        }
        self.losses = {
            task: encoder.loss_fn(head["weight"].to(self.device), head["bias"].to(self.device))
            for task, head in self._heads.items()
        }
        members: dict[str, Any] = {"base": encoder.params, "where": encoder.where, "reads": encoder.reads}
        members["untrained"] = encoder.frozen if own.train_layers or own.train else {}  # which is all of the model
        super().__init__(tasks=tasks, seed=seed, **members)

    def _cut_off(self, task: str) -> list[str]:
        """A note on texts that are longer than what is read."""
        own, found = self.options, []
        for split, rows in self._data[task].splits.items():
            texts = rows.texts[: own.rows][:_COUNTED]
            long = [text for text in texts if len(text.encode()) > own.max_length]  # a token is a byte at least
            ids = self._encoder.ids(long, own.max_length + 1) if long else []
            if count := sum(len(one) > own.max_length for one in ids):
                found.append(f"{count} of the{' first' * (len(texts) == _COUNTED)} {len(texts)} {split} texts")
        if not found:
            return []
        more = self._encoder.positions
        way = f": pass `max_length={more}` to read more" if more and more > own.max_length else ""
        return [
            f"{', '.join(found)} of {task} have more than the {own.max_length} tokens that are read, the rest is cut "
            f"off{way}"
        ]

    @classmethod
    def task_names(cls, *, data: Any = "", tasks: Sequence[str] | None = None, **options: Any) -> tuple[str, ...]:
        """The given tasks; else those of a folder or mapping, the known ones first; else the known ones (`TASKS`).

        Raises: ValueError for a folder without tasks, and for tasks named twice.
        """
        own = resolve_data(data) if data else ""
        if isinstance(own, Mapping) and tasks is None:
            return (*(task for task in TASKS if task in own), *(task for task in own if task not in TASKS))
        return tasks_of("" if isinstance(own, Mapping) else own, tasks, known=TASKS, splits=("train",))

    def examples(self, task: str) -> int:
        return len(self._rows(task, "train")[1])

    def batch(self, task: str, key: Tensor, step: int) -> Texts:
        return self._some(task, "train", self.batch_rows(task, key, step))

    def split(self, batch: Texts, parts: int) -> list[Micro]:
        """A batch as at most ``parts`` micro-batches of equally many texts, up to one; their weight is that number."""
        bounds = [len(batch.labels) * part // parts for part in range(parts + 1)]
        found = []
        for start, stop in pairwise(bounds):
            if stop > start:
                own = (batch.owners >= start) & (batch.owners < stop)
                few = Texts(batch.tokens[own], batch.owners[own] - start, batch.labels[start:stop])
                found.append(Micro(few, stop - start))
        return found

    @remembered
    def train_rows(self, task: str) -> dict[str, Any]:
        self.check(task)
        splits, limit = self._data[task].splits, self.options.rows
        train, dev = (
            content_key({"texts": own.texts[:limit], "labels": own.labels[:limit]})
            for own in (splits["train"], splits["dev"])
        )
        ids = self._rows(task, "train")[0]
        inputs = content_key({"ids": [own.tolist() for own in ids[:1000]]})
        place, few = place_of(self.options.source(task)), self._few[task]
        head = content_key({"texts": few.texts, "labels": few.labels})  # perhaps beyond the rows that are trained on
        return {"from": place, "count": len(ids), "hash": train, "dev": dev, "inputs": inputs, "head": head}

    def dev_batches(self, task: str) -> list[Micro]:
        self.check(task)
        return [Micro(own, len(own.labels)) for own in self._scored(task, "dev")]

    def score(self, params: Params, task: str, split: str) -> float:
        self.check(task, split)
        return CLASS_METRICS[self.options.metric or "accuracy"](
            self.predictions(params, task, self._scored(task, split)), self._rows(task, split)[1]
        )

    @remembered
    def content(self, task: str, split: str) -> str:
        ids, labels = self._rows(task, split)
        facts = {"ids": [x.tolist() for x in ids], "labels": labels.tolist(), "head": fingerprint(self._heads[task])}
        return content_key({**self._model, **facts})

    @remembered
    def _rows(self, task: str, split: str) -> tuple[Ids, Tensor]:
        own, limit = self._data[task].splits[split], self.options.rows
        ids, labels = self._encoder.ids(own.texts[:limit], self.options.max_length), own.labels[:limit]
        # scored in any order: texts of one length side by side
        order = range(len(ids)) if split == "train" else sorted(range(len(ids)), key=lambda i: len(ids[i]))
        return [ids[i] for i in order], torch.tensor([labels[i] for i in order])

    @remembered  # computed when a split is first used
    def _tokens(self, task: str, split: str) -> Callable[[list[int]], list[Tensor]]:
        ids, _ = self._rows(task, split)
        lengths, compute = [len(own) for own in ids], self._encoder.states
        if compute is None:
            return lambda places: [ids[i] for i in places]
        config: Any = self._encoder.module.config  # DistilBERT stores its width by another name
        if 4 * sum(lengths) * config.hidden_size > HELD:
            return lambda places: list(compute(some := [ids[i] for i in places], False).split([len(x) for x in some]))
        facts = {
            **self._model,
            "first": str(next(iter(self.base))),
            "ids": fingerprint({"ids": torch.cat(ids)}),
            "lengths": lengths,
        }
        progress = self.options.progress
        states = cached("text-states", facts, lambda: {"states": compute(ids, progress)})["states"].split(lengths)
        return lambda places: [states[i] for i in places]

    def _some(self, task: str, split: str, places: list[int]) -> Texts:
        return texts(self._tokens(task, split)(places), self._rows(task, split)[1][places])

    def _scored(self, task: str, split: str) -> list[Texts]:
        places, size = list(range(len(self._rows(task, split)[1]))), self.options.eval_batch
        return [self._some(task, split, places[i : i + size]) for i in range(0, len(places), size)]

    def _head_rows(self, task: str, key: Tensor) -> Labelled:
        data = self._data[task]
        train = data.splits["train"]
        return take(train, head_rows(train.labels, len(data.classes), key, self.options.per_class))

    def _head(self, few: Labelled) -> dict[str, Tensor]:
        own, encoder = self.options, self._encoder
        ids, labels = encoder.ids(few.texts, own.max_length), torch.tensor(few.labels)
        config = {
            **self._model,
            "normalize": own.normalize,
            "c": own.head_c,
            "ids": [x.tolist() for x in ids],
            "labels": labels.tolist(),
        }
        return cached("text-head", config, lambda: fit_head(encoder.features(ids), labels, c=own.head_c))


def _made_splits(task: str, data: Task, limit: int | None) -> list[str]:
    """A note on splits that were made from the training rows, with the number of rows of each split that are used."""
    sizes = {split: len(rows.texts[:limit]) for split, rows in data.splits.items()}
    return [made_note(task, data.made, sizes, left=data.left)] if data.made else []


def resolve_data(given: Any) -> Data:
    """A folder by its absolute path, a name of the hub as it is; of a mapping, or the JSON file of one, every value.

    Raises: ValueError for anything else.
    """
    if isinstance(given, str | Path) and str(given).endswith(".json"):
        given = json_file(given, "JSON file of data, {task: folder or dataset}")
    if isinstance(given, Mapping) and given and all(isinstance(x, str) for pair in given.items() for x in pair):
        return {task: absolute(source) for task, source in given.items()}
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError(f"data is {given!r}, must be a folder, a dataset of the hub, or {{task: one of these}}")
    return absolute(given)
