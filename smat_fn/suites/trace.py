"""Suite ``trace``: language tasks on one language model, the paper's seven or those of a folder.

A task is rows of prompt and answer in the splits train, dev and eval (`rows`); eval is the test split. An expert
minimises the mean negative log-likelihood of every token (`text`), of an encoder-decoder that of the answer (`pairs`);
a score is the task's metric of decoded answers. Tasks that are not TRACE's are decoded greedily and scored by the
option ``metric``.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from .. import errors, tree
from ..data import pairs, text
from ..data.batching import batch_indices
from ..data.rows import TextRows, load_rows
from ..errors import check_member, count_problem
from ..evaluate.decoding import generator, prompt_ids
from ..evaluate.engine import Engine, engine_name, find_engine, in_batches
from ..evaluate.metrics import TRACE_METRICS, first_letter_accuracy, label_accuracy
from ..evaluate.records import Answer, Journal, content_key
from ..grad import ModuleLoss
from ..models import language
from ..models.pretrained import DeviceMap
from ..types import Batch, Micro, Params
from .sources import absolute, columns_of, pick_device, recipe_of, tasks_of
from .suite import Suite
from .trace_recipe import METRICS, TraceRecipe, settings_of

TASKS = tuple(TRACE_METRICS)
LABELS, LETTERS = (label_accuracy, first_letter_accuracy), tuple("ABCD")
PLACES = ("device", "device_map", "decode_batch", "engine")  # options that are not in the recipe
SPLITS = {"train": "train", "dev": "dev", "test": "eval"}  # ours -> the source's


def task_names(*, data: str | Path = "", tasks: tuple[str, ...] | None = None, **options: Any) -> tuple[str, ...]:
    """The given tasks; else those of a folder, TRACE's first, then its other folders of rows by name; else the seven.

    Raises: ValueError for a folder without tasks, and for tasks named twice.
    """
    return tasks_of(data, tasks, known=TASKS, splits=tuple(SPLITS.values()))


def load(
    *,
    seed: int,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    decode_batch: int = 16,
    engine: str | Engine = generator,
    **options: Any,
) -> Suite:
    """The suite of a model and rows. The base is all trainable leaves of the model, on its device.

    Batch: as `text.collate`. Score: the task's metric over the rows of the split, 0 to 100, the mean of its decodes
    where they are sampled; scoring other parameters swaps them in by reference.

    Args: seed: of sampled answers; device: of model and training, None: the first GPU, or the CPU; device_map: splits
        the model over devices instead, as `causal_lm.load` takes it; decode_batch: rows decoded together, which
        changes speed, and texts by rounding alone; engine: what answers prompts, or its place as "module:function";
        options: fields of `TraceRecipe`. The others are not in the recipe.
    Raises: ValueError for unknown or bad options; that lists every split that is missing or malformed (of the hub's
        the first); for a model that cannot be loaded, or whose tokenizer does not fit. ``batch``, ``epoch_steps`` and
        ``cuts`` raise it for rows that do not fit the model.
    """
    known = [field.name for field in fields(TraceRecipe)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"trace has no options {unknown}: they are {[*known, *PLACES]}")
    if lacking := [name for name in ("model", "data") if options.get(name) is None]:
        raise ValueError(f"trace needs {' and '.join(lacking)}: a folder, or a name on the hub")
    tasks = task_names(**options)
    settled = {name: absolute(options[name]) for name in ("model", "data")}
    columns = columns_of(options.get("columns"))
    recipe = TraceRecipe(**{**options, **settled, "tasks": tasks, "columns": columns})
    place = pick_device(device)
    problems = count_problem("decode_batch", decode_batch)
    if device is not None and device_map is not None:
        problems.append(f"device is {device!r} and there is a device_map too: give one of them")
    try:
        engine = find_engine(engine) if isinstance(engine, str) else engine
    except ValueError as error:
        problems.append(str(error))
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
    for (task, split), own in rows.items():
        metric = TRACE_METRICS.get(task, METRICS[recipe.metric])
        if split != "train" and metric in LABELS and not any(a.strip()[:1].upper() in LETTERS for a in own.answers):
            problems.append(
                f"no answer of {task} ({SPLITS[split]}) begins with a letter A to D, which its metric compares: every "
                "score would be 0; write letters, or give the task another name and choose a metric"
            )
    errors.raise_problems(problems)
    lm = language.load(
        recipe.model,
        dtype=recipe.dtype,
        device=place,
        device_map=device_map,
        gradient_checkpointing=recipe.gradient_checkpointing,
    )
    assert not isinstance(engine, str)
    first = next(iter(lm.params.values())).device
    return _suite(recipe, tasks, rows, lm, seed, first, decode_batch, engine)


def _suite(
    recipe: TraceRecipe,
    tasks: tuple[str, ...],
    rows: Mapping[tuple[str, str], TextRows],
    lm: language.LanguageModel,
    seed: int,
    device: torch.device,
    decode_batch: int,
    engine: Engine,
) -> Suite:
    settings = {task: settings_of(task, recipe) for task in tasks}
    repeats = {task: s.repeats for task, s in settings.items() if s.repeats > 1}
    module: Any = lm.module
    limit = getattr(module.config, "max_position_embeddings", None) or math.inf
    pair = bool(getattr(module.config, "is_encoder_decoder", False))
    form: Any = pairs if pair else text  # how rows become batches
    options: dict[str, Any] = {name: getattr(recipe, name) for name in ("max_length", "truncate", "mask_prompt")}
    vocabulary, pad = module.get_input_embeddings().weight.shape[0], text.pad_id(lm.tokenizer)

    @cache  # tokenized when a task is first trained: merging and evaluation do not need it
    def examples(task: str, split: str = "train") -> list[text.Example]:
        try:
            return form.encode(_pairs(rows[task, split]), lm.tokenizer, vocabulary=vocabulary, **options)
        except ValueError as error:
            raise ValueError(f"{split.replace('train', 'training')} rows of {task}: {error}") from error

    @cache
    def epoch_steps(task: str) -> int:
        check_member("trace task", task, tasks)
        problems, new = [], settings[task].max_new_tokens
        beside = 0 if pair else new  # positions that answers take beside prompts
        if new > limit:
            problems.append(f"max_new_tokens of {task} is {new}, more than the model's {limit}")
        if (longest := max(len(ids) for e in examples(task) for ids in e)) > limit:
            problems.append(f"training rows of {task} have up to {longest} tokens, more than the model's {limit}")
        for split in ("dev", "test"):
            room = limit - beside
            # a token is a byte at least, a few are special: most prompts need not be tokenized
            long = [prompt for prompt in rows[task, split].prompts if len(prompt.encode()) + 8 > room]
            longest = max(map(len, lm.tokenizer(long, verbose=False)["input_ids"])) if long else 0
            if longest > room:
                more = f" with {beside} new ones" if beside else ""
                problems.append(
                    f"{split} prompts of {task} have up to {longest} tokens,{more} more than the model's {limit}"
                )
        errors.raise_problems(problems)
        return -(-len(examples(task)) // recipe.batch_size)

    def batch(task: str, key: Tensor, step: int) -> Batch:
        check_member("trace task", task, tasks)
        return form.collate([examples(task)[i] for i in batch_rows(task, key, step)], pad)

    def batch_rows(task: str, key: Tensor, step: int) -> list[int]:
        return batch_indices(key, len(examples(task)), recipe.batch_size, step).tolist()

    def dev_batches(task: str) -> list[Micro]:
        check_member("trace task", task, tasks)
        found, size = examples(task, "dev"), recipe.batch_size
        return [m for i in range(0, len(found), size) for m in form.split(form.collate(found[i : i + size], pad), 1)]

    def loss_fn(task: str) -> ModuleLoss:
        check_member("trace task", task, tasks)
        return lm.loss_fn

    @cache
    def tokens(task: str, split: str) -> list[list[int]]:
        return prompt_ids(rows[task, split].prompts, lm.tokenizer, closed=pair)

    @cache
    def content(task: str, split: str) -> str:
        backend = getattr(lm.tokenizer, "backend_tokenizer", None)
        facts = {
            "rows": rows[task, split],
            "tokens": tokens(task, split),
            "tokenizer": backend.to_str() if backend else sorted(lm.tokenizer.get_vocab().items()),
            "model": [str(getattr(module, name, None)) for name in ("config", "generation_config")],
            "decoding": [*settings[task], seed, device.type],
            "engine": engine_name(engine),
            "transformers": metadata.version("transformers"),
        }
        return content_key(facts)

    def score_once(params: Params, task: str, split: str, repeat: int, journal: Journal | None = None) -> float:
        check_member("trace task", task, tasks)
        check_member("split", split, ("dev", "test"))
        tree.check_same(lm.params, "the base", params=params)
        here = {name: leaf.to(lm.params[name].device) for name, leaf in params.items()}
        prompts, answers = rows[task, split]

        def keep(new: Mapping[int, str], done: int, total: int) -> None:
            if journal is not None:
                journal.add([Answer(row, text, answers[row]) for row, text in new.items()], done, total)

        texts = in_batches(
            engine(lm.loss_fn, lm.tokenizer, here, batch_size=decode_batch),
            prompts,
            settings[task],
            seed,
            repeat=repeat,
            lengths=list(map(len, tokens(task, split))),
            batch_size=decode_batch,
            known={} if journal is None else journal.known,
            on_batch=keep,
        )
        return TRACE_METRICS.get(task, METRICS[recipe.metric])(texts, answers, prompts)

    def score(params: Params, task: str, split: str) -> float:
        return fmean(score_once(params, task, split, r) for r in range(repeats.get(task, 1)))

    def cuts(task: str) -> text.Cut:
        check_member("trace task", task, tasks)
        return form.cut_report({task: _pairs(rows[task, "train"])}, lm.tokenizer, max_length=recipe.max_length)[task]

    facts = {"name": "trace", "seed": seed, **recipe_of(recipe)}
    return Suite(
        "trace",
        tasks,
        lm.params,
        lm.where,
        loss_fn,
        batch,
        score,
        facts,
        seed,
        epoch_steps,
        repeats,
        score_once,
        cuts,
        content=content,
        split=form.split,
        batch_rows=batch_rows,
        dev_batches=dev_batches,
    )


def _texts(recipe: TraceRecipe, task: str, split: str) -> TextRows:
    rows = load_rows(recipe.data, task, split, columns=recipe.columns)
    if not isinstance(rows, TextRows):
        raise ValueError(f"{recipe.data} ({task}, {split}) holds images: give rows of prompt and answer")
    return TextRows(rows.prompts[: recipe.rows], rows.answers[: recipe.rows])


def _pairs(rows: TextRows) -> list[tuple[str, str]]:
    return list(zip(*rows, strict=True))
