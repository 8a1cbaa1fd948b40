"""Suite ``trace``: language tasks on one causal language model, the paper's seven or those of a folder.

A task is rows of prompt and answer in the splits train, dev and eval (`rows`); eval is the test split. An expert
minimises the mean negative log-likelihood of every token (`text.encode`); a score is the task's metric of decoded
answers. Tasks that are not TRACE's are decoded greedily and scored by the option ``metric``.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor

from .. import tree
from ..evaluate import decoding
from ..evaluate.decoding import Decoding, generator
from ..evaluate.metrics import TRACE_METRICS, TextMetric, label_accuracy, numeric_accuracy, rouge_l
from ..models import causal_lm
from ..types import Batch, Params
from . import text
from .rows import SUFFIXES, TextRows, load_rows
from .suite import Suite, check_member

TASKS = tuple(TRACE_METRICS)
SPLITS = {"train": "train", "dev": "dev", "test": "eval"}  # ours -> the source's
METRICS: Mapping[str, TextMetric] = MappingProxyType(
    {"rouge-l": rouge_l, "label": label_accuracy, "number": numeric_accuracy}
)


@dataclass(frozen=True)
class TraceRecipe:
    """Everything but the seed that the suite depends on."""

    model: str  # a folder, or a repository of the hub
    data: str  # a folder of <task>/<split> files, or a dataset of the hub whose configs are the tasks
    tasks: tuple[str, ...] | None = None  # None: those of the folder, of a hub dataset the seven
    metric: str = "rouge-l"  # of tasks that are not TRACE's: a name of METRICS
    max_length: int = 512  # tokens of a training row
    truncate: text.Truncate = "right"
    mask_prompt: bool = False  # no loss on the prompt
    batch_size: int = 8
    dtype: str = "float32"  # of parameters and computation
    gradient_checkpointing: bool = False
    max_new_tokens: int | None = None  # fewer than the task's, for quick runs; of other tasks: 100 where None
    rows: int | None = None  # only the first rows of each split, for quick runs

    def __post_init__(self) -> None:
        counts = {"max_length": 2, "batch_size": 1, "max_new_tokens": 1, "rows": 1}
        problems = [
            f"{name} is {value!r}, must be an integer of at least {low}"
            for name, low in counts.items()
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < low)
        ]
        problems += [
            f"{name} is {value!r}, must be a {kind.__name__}"
            for name, kind in {"model": str, "data": str, "mask_prompt": bool, "gradient_checkpointing": bool}.items()
            if not isinstance(value := getattr(self, name), kind)
        ]
        for name, known in {"metric": tuple(METRICS), "truncate": get_args(text.Truncate)}.items():
            if (value := getattr(self, name)) not in known:
                problems.append(f"{name} {value!r} is unknown, choose one of {', '.join(map(repr, known))}")
        tree.raise_problems([f"trace: {problem}" for problem in problems])


def task_names(*, data: str | Path = "", tasks: tuple[str, ...] | None = None, **options: Any) -> tuple[str, ...]:
    """The given tasks; else those of a folder, TRACE's first, then its other folders of rows by name; else the seven.

    Raises: ValueError for a folder without tasks, and for tasks named twice.
    """
    if tasks is not None:
        if not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"trace: tasks are {list(tasks)}: name at least one, each once")
        return tuple(tasks)
    if not data or not (folder := Path(data).expanduser()).is_dir():
        return TASKS
    names = {f"{split}{suffix}" for split in SPLITS.values() for suffix in SUFFIXES}
    found = {child.name for child in folder.iterdir() if any((child / name).is_file() for name in names)}
    if not found:
        raise ValueError(f"{folder} holds no task: make folders <task> with train.json, dev.json and eval.json in it")
    return (*(task for task in TASKS if task in found), *sorted(found.difference(TASKS)))


def load(*, seed: int, device: str | None = None, decode_batch: int = 16, **options: Any) -> Suite:
    """The suite of a model and rows. The base is all trainable leaves of the model, on its device.

    Batch: as `text.collate`. Score: the task's metric over the rows of the split, 0 to 100, the mean of its decodes
    where they are sampled; scoring other parameters swaps them in by reference.

    Args: seed: of sampled answers; device: of model and training, None: the first GPU, or the CPU; decode_batch: rows
        decoded together, which changes speed, and texts by rounding alone; options: fields of `TraceRecipe`. Device
        and decode_batch are not in the recipe.
    Raises: ValueError for unknown or bad options; that lists every split that is missing or malformed (of the hub's
        the first); for a model that cannot be loaded, or whose tokenizer does not fit. ``batch``, ``epoch_steps`` and
        ``cuts`` raise it for rows that do not fit the model.
    """
    known = [field.name for field in fields(TraceRecipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"trace has no options {unknown}: they are {[*known, 'device', 'decode_batch']}")
    if lacking := [name for name in ("model", "data") if options.get(name) is None]:
        raise ValueError(f"trace needs {' and '.join(lacking)}: a folder, or a name on the hub")
    tasks = task_names(**options)
    recipe = TraceRecipe(
        **{**options, "tasks": tasks, "model": _absolute(options["model"]), "data": _absolute(options["data"])}
    )
    place = _device(device)
    problems = [] if decode_batch >= 1 else [f"decode_batch is {decode_batch}, must be at least 1"]
    if Path(recipe.model).is_absolute() and not Path(recipe.model).is_dir():
        problems.append(f"there is no folder {recipe.model}: give a model's folder, or its name on the hub")
    rows: dict[tuple[str, str], TextRows] = {}
    for task, split in product(tasks, SPLITS):
        try:
            rows[task, split] = _texts(recipe, task, SPLITS[split])
        except ValueError as error:
            problems.append(str(error))
            if not Path(recipe.data).exists():  # a hub that cannot be reached takes a minute to say so
                break
    tree.raise_problems(problems)
    lm = causal_lm.load(
        recipe.model, dtype=recipe.dtype, device=place, gradient_checkpointing=recipe.gradient_checkpointing
    )
    return _suite(recipe, tasks, rows, lm, seed, place, decode_batch)


def settings_of(task: str, recipe: TraceRecipe) -> Decoding:
    """How a task is decoded."""
    if task not in decoding.TRACE:
        return Decoding(recipe.max_new_tokens or 100)
    given = decoding.TRACE[task]
    return given._replace(max_new_tokens=min(given.max_new_tokens, recipe.max_new_tokens or given.max_new_tokens))


def _suite(
    recipe: TraceRecipe,
    tasks: tuple[str, ...],
    rows: Mapping[tuple[str, str], TextRows],
    lm: causal_lm.CausalLM,
    seed: int,
    device: torch.device,
    decode_batch: int,
) -> Suite:
    settings = {task: settings_of(task, recipe) for task in tasks}
    repeats = {task: s.repeats for task, s in settings.items() if s.repeats > 1}
    module: Any = lm.module
    limit = getattr(module.config, "max_position_embeddings", None) or math.inf
    options: dict[str, Any] = {name: getattr(recipe, name) for name in ("max_length", "truncate", "mask_prompt")}
    vocabulary, pad = module.get_input_embeddings().weight.shape[0], text.pad_id(lm.tokenizer)

    @cache  # tokenized when a task is first trained: merging and evaluation do not need it
    def examples(task: str) -> list[text.Example]:
        try:
            return text.encode(_pairs(rows[task, "train"]), lm.tokenizer, vocabulary=vocabulary, **options)
        except ValueError as error:
            raise ValueError(f"training rows of {task}: {error}") from error

    @cache
    def epoch_steps(task: str) -> int:
        check_member("trace task", task, tasks)
        problems = []
        if (longest := max(len(e.input_ids) for e in examples(task))) > limit:
            problems.append(f"training rows of {task} have up to {longest} tokens, more than the model's {limit}")
        for split in ("dev", "test"):
            room = limit - settings[task].max_new_tokens
            # a token is a byte at least, a few are special: most prompts need not be tokenized
            long = [prompt for prompt in rows[task, split].prompts if len(prompt.encode()) + 8 > room]
            longest = max(map(len, lm.tokenizer(long, verbose=False)["input_ids"])) if long else 0
            if longest > room:
                problems.append(
                    f"{split} prompts of {task} have up to {longest} tokens, with {settings[task].max_new_tokens} "
                    f"new ones more than the model's {limit}"
                )
        tree.raise_problems(problems)
        return -(-len(examples(task)) // recipe.batch_size)

    def batch(task: str, key: Tensor, step: int) -> Batch:
        check_member("trace task", task, tasks)
        return text.batch(examples(task), key, step, batch_size=recipe.batch_size, pad=pad)

    def loss_fn(task: str) -> causal_lm.ModuleLoss:
        check_member("trace task", task, tasks)
        return lm.loss_fn

    def score_once(params: Params, task: str, split: str, repeat: int) -> float:
        check_member("trace task", task, tasks)
        check_member("split", split, ("dev", "test"))
        tree.check_same(lm.params, "the base", params=params)
        here = {name: leaf.to(device) for name, leaf in params.items()}
        generate = generator(lm.loss_fn, lm.tokenizer, here, batch_size=decode_batch)
        prompts, answers = rows[task, split]
        metric = TRACE_METRICS.get(task, METRICS[recipe.metric])
        return metric(generate(prompts, settings[task], seed, repeat=repeat), answers, prompts)

    def score(params: Params, task: str, split: str) -> float:
        return fmean(score_once(params, task, split, r) for r in range(repeats.get(task, 1)))

    def cuts(task: str) -> text.Cut:
        check_member("trace task", task, tasks)
        return text.cut_report({task: _pairs(rows[task, "train"])}, lm.tokenizer, max_length=recipe.max_length)[task]

    facts = {"name": "trace", "seed": seed, **asdict(recipe), "tasks": list(tasks)}
    return Suite(
        "trace", tasks, lm.params, lm.where, loss_fn, batch, score, facts, seed, epoch_steps, repeats, score_once, cuts
    )


def _texts(recipe: TraceRecipe, task: str, split: str) -> TextRows:
    rows = load_rows(recipe.data, task, split)
    if not isinstance(rows, TextRows):
        raise ValueError(f"{recipe.data} ({task}, {split}) holds images: give rows of prompt and answer")
    return TextRows(rows.prompts[: recipe.rows], rows.answers[: recipe.rows])


def _pairs(rows: TextRows) -> list[tuple[str, str]]:
    return list(zip(*rows, strict=True))


def _absolute(source: str | Path) -> str:
    """A folder by its absolute path, also one that is not there but can be no name on the hub."""
    path, name = Path(source).expanduser(), str(source)
    return str(path.resolve()) if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 else name


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown: cpu, cuda, or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: there is no GPU here, or torch cannot use it")
    return device
