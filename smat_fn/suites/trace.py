"""Suite ``trace``: language tasks on one language model, the paper's seven or those of a folder.

A task is rows of prompt and answer in the splits train, dev and eval (`rows`); eval is the test split. An expert
minimises the mean negative log-likelihood of every token (`text`), of an encoder-decoder that of the answer (`pairs`);
a score is the task's metric of decoded answers. The paper's seven (`TASKS`) have metrics and decoding of their own;
all other tasks, those of TRACE that the paper leaves out too (Py150), are decoded greedily and scored by the option
``metric``, which may also read log probabilities of given answers (`likelihood`). Rows of a task may be plain texts
instead: all of a text is trained, and scored by likelihood, in windows (`text.windows`); ``metric`` is not for them.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, get_args

from torch import Tensor

from .. import errors, tree
from ..checkpoint import fingerprint
from ..data import chat, text
from ..data.batching import batch_indices
from ..data.conversations import Conversation
from ..data.rows import TextRows, place_of
from ..data.splits import with_made
from ..errors import check_member, count_problem, problems_of
from ..evaluate import decoding, likelihood
from ..evaluate.decoding import Decoding, prompt_ids
from ..evaluate.engine import Engine, Generate, engine_name, find_engine, in_batches
from ..evaluate.metrics import TRACE_METRICS, TextMetric, metric_of, uncounted
from ..evaluate.records import Answer, Journal, content_key
from ..grad import ModuleLoss
from ..models import language
from ..models.modules import frozen
from ..models.pretrained import DeviceMap, LanguageModel
from ..models.prompts import Prompts, prompts_of
from ..models.seq2seq import start_problems
from ..models.top_language import top_language
from ..types import Batch, Micro, Params
from .sources import absolute, collect_splits, model_problems, pick_device, settled, tasks_of
from .suite import BaseSuite, SuiteOptions, remembered
from .trace_rows import (
    LABELS,
    SPLITS,
    TASKS,
    asked_of,
    conversations,
    hashed,
    is_letter,
    left_out,
    letter_of,
    overlaps,
    plain_tasks,
    size_of,
    some_of,
    texts_of,
    unlettered,
    unread_metric,
)
from .trace_states import States
from .trace_tokens import Tokens, is_pair, length

# rows and tokens that are decoded together: small batches wait for the host; on a CPU large ones took as long
_ON_A_GPU = 256, 16_384


@dataclass(frozen=True)
class TraceOptions(SuiteOptions):
    """Options of suite ``trace``."""

    LOCAL = ("device", "device_map", "decode_batch", "engine", "only")
    UNSAID = ("columns", "chat", "repeats")
    LOWEST: ClassVar = {
        "max_length": 2,
        "batch_size": 1,
        "max_new_tokens": 1,
        "repeats": 1,
        "rows": 1,
        "train_layers": 1,
    }

    model: str
    """A folder, or a repository on the hub, perhaps with its @revision."""
    data: str
    """A folder of <task>/<split> files, or a dataset on the hub whose configs are the tasks."""
    tasks: tuple[str, ...] | None = None
    """Tasks (default: those of the folder, for a dataset on the hub the paper's seven of TRACE)."""
    metric: str = "rouge-l"
    """Metric of all tasks but the paper's seven: rouge-l, label, number, exact, f1, contains, likelihood, choice,
    choice_norm, or module:function, the larger the better. Plain texts are scored by likelihood."""
    max_length: int = 512
    """Maximum number of tokens of a training row; longer plain texts are split into such windows, for scores too."""
    truncate: text.Truncate = "right"
    """Long rows keep: right: their first tokens; left: BOS and the last tokens; prompt-middle: answer and EOS, of
    conversations all from the first answer on, cut at their end if these alone are too long."""
    mask_prompt: bool = False
    """Compute the loss on the answer alone, not on the prompt too."""
    chat: bool = False
    """Rows are conversations (messages), in the tokenizer's chat template; the loss is on the answers alone."""
    batch_size: int = 8
    """Rows in a batch."""
    dtype: str = "float32"
    """Dtype of parameters and computation, float32, bfloat16 or float16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    train_layers: int | None = None
    """Number of top layers that are trained (default: all parameters)."""
    train: Any = None
    """Parameters that are trained: attention, or patterns of names, separated by commas (default: all)."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of an answer, not above that of the task (default: the task's, 100 for other tasks)."""
    repeats: int | None = None
    """Number of decodes of tasks whose answers are sampled, which a score is the mean of (default: the task's, 3)."""
    only: tuple[str, ...] | None = None
    """Tasks whose rows are read and checked (train.py: those of --tasks; default: all)."""
    rows: int | None = None
    """Only the first rows of each split, for quick runs (default: all)."""
    columns: Any = None
    """Column names of the source, as prompt=question,answer=reply (default: prompt and answer)."""
    device: str | None = None
    """Device of model and training, cpu or cuda:0 (default: the first GPU, or the CPU)."""
    device_map: DeviceMap | None = None
    """Spread the model over devices, as accelerate does: auto, balanced, in Python {module: device} (default: one)."""
    decode_batch: int | None = None
    """Rows decoded together; affects speed, and answers only by rounding (default: 16; on a GPU as many as have 16,384
    tokens with their answers, at most 256)."""
    engine: str | Engine = "smat_fn.evaluate.decoding:generator"
    """Function that answers prompts, as module:function."""

    def problems(self) -> list[str]:
        found = problems_of(metric_of, self.metric)
        if self.chat and self.metric in likelihood.CHOICES:
            found.append(f"metric {self.metric} needs rows of prompt, answer and choices: leave --chat out")
        return [*found, *problems_of(check_member, "truncate", self.truncate, get_args(text.Truncate))]


class Trace(BaseSuite):
    """The suite of a model and rows. The base is all trainable leaves of the model, on its device.

    Batch: as `text.collate`; with ``train_layers`` also ``states`` of the frozen layers (B, T, D), where the model
    allows it, so that a step runs the top layers alone; they go through the cache. Score: the task's metric over the
    rows of the split, 0 to 100, the mean of its decodes where they are sampled; scoring other parameters swaps them in
    by reference.

    Args: seed: of sampled answers; options: `TraceOptions`.
    Raises: ValueError for bad options; that lists every split that is missing or malformed (of the hub's
        the first); for a model that cannot be loaded, or whose tokenizer does not fit. ``batch``, ``epoch_steps`` and
        ``cuts`` raise it for rows that do not fit the model.
    """

    Options = TraceOptions
    name = "trace"

    def __init__(self, *, seed: int, **options: Any) -> None:
        tasks = self.task_names(**options)
        options |= {**settled(tasks, options), "data": absolute(options["data"])}
        self.options = own = TraceOptions(**options)
        place = pick_device(own.device)
        problems = [] if own.decode_batch is None else count_problem("decode_batch", own.decode_batch)
        if own.device is not None and own.device_map is not None:
            problems.append(f"device is {own.device!r} and device_map is given too: give one of them")
        with errors.collected(problems):
            self._engine: Any = own.engine if callable(own.engine) else find_engine(str(own.engine))
        read = partial(conversations, own.data, columns=own.columns) if own.chat else self._row_texts
        found, wrong, notes, self.made = collect_splits(
            own.only or tasks, read, self._with_made, size=size_of, take=some_of, rows=own.rows,
            local=Path(own.data).exists(),
        )  # fmt: skip
        self._chats: dict[Any, tuple[Conversation, ...]] = found if own.chat else {}
        answers = {key: TextRows((), tuple(c[-1]["content"] for c in rows)) for key, rows in self._chats.items()}
        self._rows: dict[Any, TextRows] = answers or found
        self.notes += tuple(notes)
        self.plain, mixed = plain_tasks(self._rows)
        problems += [*model_problems(own.model), *wrong, *mixed, *self._unread(tasks)]
        if self.plain:
            self.notes += (f"{', '.join(sorted(self.plain))}: plain texts, scored by likelihood, 100 / perplexity",)
        for (task, split), rows in self._rows.items():
            if split != "train" and self._metric(task) in LABELS:
                problems += unlettered(task, SPLITS[split], rows.answers)
        errors.raise_problems(problems)
        for task in own.only or tasks:
            self.notes += tuple(overlaps(task, {split: found[task, split] for split in SPLITS}))
        if own.metric != TraceOptions.metric and all(task in TRACE_METRICS for task in tasks):
            self.notes += (f"metric {own.metric} scores no task: the paper's seven have metrics of their own",)
        elif own.only and {*own.only} <= self.plain and own.metric not in (TraceOptions.metric, "likelihood"):
            self.notes += (f"metric {own.metric} scores none of {', '.join(own.only)}, which are plain texts",)
        if own.repeats is not None and not any(decoding.TRACE[task].temperature for task in tasks if task in TASKS):
            self.notes += (f"repeats {own.repeats} changes no score: all tasks are decoded greedily, once",)
        self._lm = lm = language.load(own.model, device=place, device_map=own.device_map, **own.loading())
        self.notes += tuple(self._doubts(lm))
        self._device = next(iter(lm.params.values())).device
        self._settings = {task: Decoding(0) if task in self.plain else settings_of(task, own) for task in tasks}
        if is_pair(lm) and self.plain:
            raise ValueError(
                f"{', '.join(sorted(self.plain))}: plain texts are for causal models, {own.model} is an "
                "encoder-decoder: give rows of prompt and answer"
            )
        if own.chat:
            self._chat(lm)
        cut: dict[str, Any] = {name: getattr(own, name) for name in ("max_length", "truncate", "mask_prompt")}
        self._tokens = Tokens(self._lm, self._rows, self._chats, self.plain, **cut)
        self.split = self._tokens.form.split
        # T5's position bias takes another attention kernel; the top layers alone are trained on states
        same = not is_pair(lm) and own.train_layers is None
        self.same_bits = ("gradient_checkpointing",) if same else ()
        for task in own.only or tasks:
            decoded = task not in TASKS and not self._by_likelihood(task)
            self.notes += (*self._cut_off(task), *self._joined(task)) if decoded else ()
        self._states, self._prompts = self._frozen_below(lm)
        repeats = {task: s.repeats for task, s in self._settings.items() if s.repeats > 1}
        members: dict[str, Any] = {"base": lm.params, "where": lm.where, "untrained": frozen(lm.module)}
        super().__init__(tasks=tasks, seed=seed, repeats=repeats, **members)

    def _unread(self, tasks: Sequence[str]) -> Iterator[str]:
        """Errors for names of tasks, metrics and engines that do not fit plain texts or likelihood."""
        if ours := [task for task in tasks if task in self.plain and task in TASKS]:
            yield (
                f"{', '.join(ours)}: the rows are plain texts, and a metric of this name's own compares answers: give "
                "the task another name"
            )
        if self.options.metric != TraceOptions.metric:  # recipes name the default too
            yield from unread_metric(self.options.metric, self.plain, tasks)
        by = next(filter(None, map(self._by_likelihood, tasks)), "")
        if by and getattr(self, "_engine", decoding.generator) is not decoding.generator:
            yield (
                f"metric {by} reads log probabilities, which engine {engine_name(self._engine)} does not give: leave "
                "the engine out, or choose a metric of generated answers, such as exact"
                f"{', and tasks that are not plain texts' if self.plain else ''}"
            )

    def _by_likelihood(self, task: str) -> str:
        """The metric of a task that reads log probabilities, "" for one of decoded answers."""
        if task in self.plain:
            return "likelihood"
        metric = self.options.metric
        return metric if task not in TASKS and metric in likelihood.NAMES else ""

    def _row_texts(self, task: str, split: str) -> TextRows:
        """Rows of a split, with their choices where these are scored."""
        choices = split != "train" and self._by_likelihood(task) in likelihood.CHOICES
        rows = texts_of(self.options.data, task, split, self.options.columns, choices=choices)
        if rows.empty:
            every = len(rows.answers) + rows.empty
            self.notes += (f"{rows.empty} of the {every} texts of {task} ({SPLITS[split]}) are empty, and left out",)
        return rows

    def _with_made(self, task: str, splits: dict[str, Any], missing: tuple[str, ...]) -> dict[str, Any]:
        """The splits with those that are missing, made from train."""
        if self._by_likelihood(task) in likelihood.CHOICES:
            own = self.options
            train = texts_of(own.data, task, "train", own.columns, choices=True)
            made = with_made({**splits, "train": train}, missing, rows=asked_of, take=some_of)
            return {**made, "train": made["train"]._replace(choices=())}
        lettered = self._metric(task) in LABELS and not self.options.chat and not splits["train"].plain
        if lettered:
            errors.raise_problems(unlettered(task, SPLITS["train"], splits["train"].answers))
        labels: Any = (lambda rows: [letter_of(answer) for answer in rows.answers]) if lettered else (lambda rows: None)
        return with_made(splits, missing, rows=asked_of, take=some_of, labels=labels)

    def _doubts(self, lm: LanguageModel) -> Iterator[str]:
        """Notes on answers that cannot be counted, and on settings for generation that are not used."""
        for (task, split), rows in self._rows.items():
            others = sum(not is_letter(task, answer) for answer in rows.answers)
            if split != "train" and self._metric(task) in LABELS and others:
                yield (
                    f"{others} of {len(rows.answers)} answers of {task} ({SPLITS[split]}) do not begin with a "
                    "stand-alone letter A to D, which its metric compares: the same text counts as wrong"
                )
            if task not in TASKS and split != "train":
                where = f"of the {len(rows.answers)} answers of {task} ({SPLITS[split]})"
                yield from (f"{where} {text}" for text in uncounted(self._metric(task), rows.answers))
            if split != "train" and not self._by_likelihood(task):
                special = decoding.special_answers(lm.tokenizer, rows.answers)
                yield from (f"answers of {task} ({SPLITS[split]}) {text}" for text in special)
            if self._by_likelihood(task) == "choice" and (count := sum(map(_begun, rows.choices))):
                yield (
                    f"in {count} of the {len(rows.choices)} rows of {task} ({SPLITS[split]}) a choice begins another "
                    "one, which has the smaller sum of log probabilities if its tokens begin alike: choice_norm "
                    "divides it by its length"
                )
        if unused := decoding.unused_settings(lm.module):
            said = ", ".join(f"{name} {value}" for name, value in unused.items())
            yield f"{self.options.model} sets {said} for generation, which decoding here does not use"

    def _frozen_below(self, lm: LanguageModel) -> tuple[States | None, Prompts | None]:
        """The top layers alone, to train and decode with, where only these are trained and need nothing but states."""
        own = self.options
        if self._tokens.pair or own.train_layers is None or own.gradient_checkpointing or own.device_map is not None:
            return None, None
        texts = asked_of(next(iter(self._rows.values()))).prompts[:3]
        rows = [(*ids[: 16 - i], lm.tokenizer.eos_token_id) for i, ids in enumerate(prompt_ids(texts, lm.tokenizer))]
        top = top_language(lm, self._tokens.collate([text.Example(ids, ids) for ids in rows]))
        if isinstance(top, str):
            self.notes += (f"the frozen layers of {own.model} cannot be cached ({top}): they run in every step",)
            return None, None
        with decoding.evaluating(lm.module):
            found = prompts_of(lm.module, decoding.prompt_tokens(rows, self._device))
        states = States(top, self._tokens, lm.module, next(iter(lm.params)))
        return states, None if isinstance(found, str) else found

    def _cut_off(self, task: str) -> list[str]:
        """A note on dev answers that are longer than what is decoded."""
        limit, answers = self._settings[task].max_new_tokens, self._rows[task, "dev"].answers
        long = [answer for answer in answers if len(answer.encode()) > limit]  # a token is a byte at least
        ids = self._lm.tokenizer(long, add_special_tokens=False, verbose=False)["input_ids"] if long else []
        if not (beyond := [len(own) for own in ids if len(own) > limit]):
            return []
        return [
            f"{len(beyond)} of the {len(answers)} dev answers of {task} have more than the {limit} tokens that are "
            f"decoded, up to {max(beyond)}: --suite-options max_new_tokens {max(beyond) + 1} scores them whole"
        ]

    def _joined(self, task: str) -> list[str]:
        """A note on prompts that are decoded from tokens that no training row begins with."""
        if self._tokens.pair:
            return []
        rows, chat = self._rows[task, "dev"], self.options.chat
        prompts, masked = self._tokens.prompts(task, "dev")[:100], self.options.mask_prompt
        behind = rows.answers[:100] if chat or masked else ["\n"] * len(prompts)
        whole = [prompt + end for prompt, end in zip(prompts, behind, strict=True)]
        alone, ended = (prompt_ids(own, self._lm.tokenizer) for own in (prompts, whole))
        count = sum(longer[: len(ids)] != ids for ids, longer in zip(alone, ended, strict=True))
        if count and chat:
            return [
                f"the tokenizer joins the end of the chat template's prompt to the answer in {count} of {len(prompts)} "
                f"dev rows of {task}, so that answers are decoded from tokens that no training row has: end the "
                "template's generation prompt in a special token or a line end, not in a space"
            ]
        if count and masked:
            return [
                f"the tokenizer joins the line end that follows a prompt to the answer in {count} of {len(prompts)} "
                f"dev rows of {task}, so that answers are decoded from tokens that no training row has: remove spaces "
                "and line ends at the beginning of answers"
            ]
        return [
            f"the tokenizer joins the line end that follows a prompt to its last token in {count} of {len(prompts)} "
            f"dev rows of {task}, but prompts are decoded without it: --mask-prompt decodes them as they are trained"
        ] if count else []  # fmt: skip

    def _chat(self, lm: LanguageModel) -> None:
        """Prompts by the tokenizer's template. Raises: ValueError for a model without one."""
        if is_pair(lm):
            raise ValueError(f"chat is for causal models, {self.options.model} is an encoder-decoder: leave --chat out")
        chat.check_template(lm.tokenizer, self.options.model)
        self._lm = lm._replace(tokenizer=chat.Rendered(lm.tokenizer))
        left = dict[str, list[tuple[str, ...]]]()
        for (task, split), found in self._chats.items():
            try:
                left.setdefault(task, []).extend(chat.render(found, lm.tokenizer)[2])
            except ValueError as error:
                raise ValueError(f"{task} ({SPLITS[split]}): {error}") from error
            prompts = tuple(chat.prompt_of(own, lm.tokenizer) for own in found)
            self._rows[task, split] = TextRows(prompts, self._rows[task, split].answers)
        self.notes += tuple(note for task, rows in left.items() for note in left_out(task, rows))
        ends = chat.ends_by(next(iter(self._chats.values()))[0], lm.tokenizer)
        if not ends & decoding.stops(lm.module, lm.tokenizer):
            self.notes += (
                "the chat template ends answers with no token that stops decoding (the tokenizer's EOS or eos_token_id "
                "of generation_config.json): answers will not end before max_new_tokens, nor do they end in a server; "
                "if a token ends them, add it to eos_token_id in generation_config.json",
            )

    @classmethod
    def task_names(
        cls, *, data: str | Path = "", tasks: tuple[str, ...] | None = None, **options: Any
    ) -> tuple[str, ...]:
        """The given tasks; else those of a folder, the paper's first, then its others by name; else the paper's seven.

        Raises: ValueError for a folder without tasks, and for tasks named twice.
        """
        return tasks_of(data, tasks, known=TASKS, splits=tuple(SPLITS.values()))

    def loss_fn(self, task: str) -> ModuleLoss:
        self.check(task)
        return self._lm.loss_fn if self._states is None else self._states.loss_fn

    @remembered
    def epoch_steps(self, task: str) -> int:
        self.check(task)
        new = {t: self._settings[t].max_new_tokens for t in self.options.only or self._settings}
        problems = self._tokens.problems(task, new, read=bool(self._by_likelihood(task)))
        examples = self._tokens.examples(task, "train")
        problems += start_problems(self._lm.module, examples[0].labels) if self._tokens.pair else []
        errors.raise_problems(problems)
        return -(-len(examples) // self.options.batch_size)

    def batch(self, task: str, key: Tensor, step: int) -> Batch:
        return self._some(task, "train", self.batch_rows(task, key, step))

    def batch_rows(self, task: str, key: Tensor, step: int) -> list[int]:
        self.check(task)
        return batch_indices(key, len(self._tokens.examples(task, "train")), self.options.batch_size, step).tolist()

    @remembered
    def rows_hash(self, task: str, split: str = "train") -> str:
        """The hash of a split's texts, of which none is tokenized."""
        own = self._chats if self.options.chat else self._rows
        return content_key({"rows": hashed(own[task, split])})

    @remembered
    def train_rows(self, task: str) -> dict[str, Any]:
        self.check(task)
        inputs = content_key({"ids": self._tokens.examples(task, "train")[:1000]})
        place = place_of(self.options.data, task, SPLITS["train"])
        return {
            "from": place,
            "count": len(self._rows[task, "train"].answers),
            "hash": self.rows_hash(task),
            "dev": self.rows_hash(task, "dev"),
            "inputs": inputs,
        }

    def dev_batches(self, task: str) -> list[Micro]:
        self.check(task)
        rows, size = range(len(self._tokens.examples(task, "dev"))), self.options.batch_size
        parts = (self._some(task, "dev", rows[i : i + size]) for i in rows[::size])
        return [micro for part in parts for micro in self.split(part, 1)]

    def score(self, params: Params, task: str, split: str) -> float:
        return fmean(self.score_once(params, task, split, r) for r in range(self.repeats.get(task, 1)))

    def score_once(self, params: Params, task: str, split: str, repeat: int, journal: Journal | None = None) -> float:
        self.check(task, split)
        tree.check_same(self._lm.params, "the base", params=params)
        here = {name: leaf.to(self._lm.params[name].device) for name, leaf in params.items()}
        prompts, answers = self._rows[task, split][:2]

        def keep(new: Mapping[int, str], done: int, total: int) -> None:
            if journal is not None:  # the reference of a plain text would be all of it
                expected = {row: "" if task in self.plain else answers[row] for row in new}
                journal.add([Answer(row, text, expected[row]) for row, text in new.items()], done, total)

        size, tokens = self._together()
        texts = in_batches(
            self._generate(here, task, split, size),
            self._tokens.prompts(task, split),
            self._settings[task],
            self.seed,
            repeat=repeat,
            lengths=self._lengths(task, split),
            batch_size=size,
            tokens=tokens,
            known={} if journal is None else journal.known,
            on_batch=keep,
        )
        try:
            value: Any = self._metric(task)(texts, answers, prompts)
        except ValueError:  # says what is wrong by itself
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"metric {self._metric_name(task)!r} failed with {told}") from error
        name = self._metric_name(task)
        try:
            score = float(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise ValueError(f"metric {name!r} returned a {kind}, must return a number") from None
        if ":" in name and not 0 <= score <= 100:  # of log probabilities it may be the weights that are wrong
            raise ValueError(f"metric {name!r} returned {score}, must return 0 to 100, the larger the better")
        return score

    def _generate(self, params: Params, task: str, split: str, size: int) -> Generate:
        """The texts that a metric takes: answers, or what is read of log probabilities."""
        lm, choices = self._lm, self._rows[task, split].choices
        if name := self._by_likelihood(task):
            own: dict[str, Any] = {"collate": self._tokens.collate, "batch_size": size, "norm": name == "choice_norm"}
            return likelihood.reader(lm.loss_fn, params, self._tokens.read(task, split), choices, **own)
        kept = {"prompts": self._prompts} if self._engine is decoding.generator else {}
        return self._engine(lm.loss_fn, lm.tokenizer, params, batch_size=size, **kept)

    def _lengths(self, task: str, split: str) -> list[int]:
        """Tokens of every row: of its prompt, or, where they are read, of its texts side by side."""
        if not self._by_likelihood(task):
            return list(map(len, self._tokens.prompt_ids(task, split)))
        return [len(own) * max(map(length, own)) for own in self._tokens.read(task, split)]

    def _together(self) -> tuple[int, int | None]:
        """Rows, and tokens if these count too, that are decoded together at most."""
        if self.options.decode_batch is not None:
            return self.options.decode_batch, None
        return (16, None) if self._device.type == "cpu" else _ON_A_GPU

    def cuts(self, task: str) -> text.Cut:
        self.check(task)
        return self._tokens.cuts(task)

    @remembered
    def content(self, task: str, split: str) -> str:
        tokenizer = self._lm.tokenizer
        facts = {
            "rows": hashed(self._rows[task, split]),
            "tokens": (self._tokens.read if self._by_likelihood(task) else self._tokens.prompt_ids)(task, split),
            "tokenizer": self._tokenizer(),
            "special": [
                tokenizer.eos_token_id,
                *sorted(tokenizer.all_special_ids),
            ],  # end answers, are left out of them
            "model": [str(getattr(self._lm.module, name, None)) for name in ("config", "generation_config")],
            "decoding": [*self._settings[task], self.seed, self._device.type],
            "engine": engine_name(self._engine),
            "transformers": metadata.version("transformers"),
        }
        if held := frozen(self._lm.module):
            facts["frozen"] = fingerprint(held)
        if not (place := getattr(self._engine, "__module__", "")).startswith("smat_fn."):  # its name alone stays, too
            facts["engine source"] = _source(place)
        metric = self._metric(task)
        if metric not in TRACE_METRICS.values() and ":" in self._metric_name(task):  # its name stays when it changes
            facts["metric"] = inspect.getsource(sys.modules[self.options.metric.partition(":")[0]])
        return content_key(facts)

    @remembered  # megabytes, the same for all tasks
    def _tokenizer(self) -> str:
        tokenizer = self._lm.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return content_key({"all": backend.to_str() if backend else sorted(tokenizer.get_vocab().items())})

    def _metric(self, task: str) -> TextMetric:
        own = self._by_likelihood(task)
        return metric_of(own) if own else TRACE_METRICS.get(task) or metric_of(self.options.metric)

    def _metric_name(self, task: str) -> str:
        """The name of the metric of a task, for errors: of the paper's seven that of its function."""
        own = self._by_likelihood(task) or self.options.metric
        return TRACE_METRICS[task].__name__ if task in TRACE_METRICS else own

    def _some(self, task: str, split: str, rows: Sequence[int]) -> Batch:
        examples = self._tokens.examples(task, split)
        batch = self._tokens.collate([examples[i] for i in rows])
        return batch if self._states is None else {**batch, "states": self._states.of(task, split, rows, batch)}


def _source(module: str) -> str:
    """The source of a module; empty where it has none, as what is typed into a session or a notebook."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def settings_of(task: str, options: TraceOptions) -> Decoding:
    """Decoding settings of a task."""
    if task not in decoding.TRACE:
        return Decoding(0 if options.metric in likelihood.NAMES else options.max_new_tokens or 100)
    given = decoding.TRACE[task]
    return given._replace(
        max_new_tokens=min(given.max_new_tokens, options.max_new_tokens or given.max_new_tokens),
        repeats=(options.repeats or given.repeats) if given.temperature else 1,
    )


def _begun(choices: Sequence[str]) -> bool:
    """Whether a choice begins another one."""
    return any(one != other and other.startswith(one) for one in choices for other in choices)
