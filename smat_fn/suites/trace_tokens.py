"""Rows of language tasks as the tokens that are trained, decoded, and read."""

import math
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from .. import errors
from ..data import chat, pairs, text
from ..data.conversations import Conversation
from ..data.rows import TextRows
from ..errors import name_rows
from ..evaluate.decoding import prompt_ids
from ..models.head import IGNORED
from ..models.pretrained import LanguageModel
from ..types import Batch
from .suite import remembered
from .trace_rows import SPLITS, pairs_of, some_of


class Tokens:
    """Rows by task and split in a model's tokens, each split tokenized when it is first asked for.

    Args: lm: of a tokenizer that renders conversations, where there are any; rows: of all tasks, prompts of
        conversations as they are rendered; chats: the conversations, or none; plain: tasks of plain texts; others: as
        of `TraceOptions`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        rows: Mapping[tuple[str, str], TextRows],
        chats: Mapping[tuple[str, str], tuple[Conversation, ...]],
        plain: Set[str],
        *,
        max_length: int,
        truncate: text.Truncate,
        mask_prompt: bool,
    ) -> None:
        config: Any = lm.module.config
        self.pair = is_pair(lm)
        self.positions = getattr(config, "max_position_embeddings", None) or math.inf  # of the model
        self.form: Any = pairs if self.pair else text  # how rows become batches
        self._rows, self._chats, self._plain, self._tokenizer = rows, chats, plain, lm.tokenizer
        self._vocabulary = lm.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        self._limit, self._truncate, self._masked = max_length, truncate, mask_prompt

    @remembered
    def examples(self, task: str, split: str) -> list[text.Example]:
        """The rows of a split as they are trained. Raises: ValueError for rows that cannot be."""
        if task in self._plain:
            return [example for own in self.windows(task, split) for example in own]
        options: dict[str, Any] = {"vocabulary": self._vocabulary, "max_length": self._limit}
        options["truncate"] = self._truncate
        try:
            if self._chats:
                return chat.encode(self._chats[task, split], self._tokenizer, **options)
            rows = pairs_of(self._rows[task, split])
            found: list[text.Example] = self.form.encode(rows, self._tokenizer, mask_prompt=self._masked, **options)
        except ValueError as error:
            raise ValueError(f"{split.replace('train', 'training')} rows of {task}: {error}") from error
        return found

    @remembered
    def windows(self, task: str, split: str) -> list[tuple[text.Example, ...]]:
        """The windows of every plain text, which are trained and scored alike.

        Raises: ValueError for windows that are longer than the model's positions.
        """
        try:
            found = text.windows(
                self._rows[task, split].answers,
                self._tokenizer,
                vocabulary=self._vocabulary,
                max_length=self._limit,
            )
        except ValueError as error:
            raise ValueError(f"{task} ({SPLITS[split]}): {error}") from error
        if (longest := max(length(example) for own in found for example in own)) > self.positions:
            raise ValueError(
                f"windows of {task} ({SPLITS[split]}) have up to {longest} tokens, more than the model's "
                f"{self.positions}: pass `max_length={self.positions}` or less, which splits its texts further"
            )
        return found

    @remembered
    def read(self, task: str, split: str) -> Sequence[Sequence[text.Example]]:
        """The texts of every row whose log probabilities are read, never cut: its answer, its choices, or its windows.

        Labels are the answer's tokens and EOS, as in training, or the choice's tokens without EOS.
        Raises: ValueError for rows that are longer than the model's positions, and choices without a token.
        """
        if task in self._plain:
            return self.windows(task, split)
        rows, place = self._rows[task, split], f"{task} ({SPLITS[split]})"
        whole: dict[str, Any] = {"vocabulary": self._vocabulary, "max_length": sys.maxsize}
        options = rows.choices or [(answer,) for answer in rows.answers]
        asked = [(prompt, one) for prompt, own in zip(rows.prompts, options, strict=True) for one in own]
        try:
            if self._chats:
                every = chat.encode(self._chats[task, split], self._tokenizer, last=True, **whole)
            else:
                every = self.form.encode(asked, self._tokenizer, mask_prompt=True, **whole)
        except ValueError as error:
            counted = ", a row for each choice" if rows.choices else ""
            raise ValueError(f"{place}{counted}: {error}") from error
        if rows.choices:
            end = pairs.target_ends(self._tokenizer) if self.pair else 1
            every = [own._replace(labels=(*own.labels[:-end], *[IGNORED] * end)) for own in every]
        parts = iter(every)
        found = [[next(parts) for _ in own] for own in options]
        longest = [max(map(length, own)) for own in found]
        problems = []
        if long := [i for i, count in enumerate(longest) if count > self.positions]:
            problems.append(
                f"{name_rows(long)} of {place} with answers have up to {max(longest)} tokens, more than the model's "
                f"{self.positions}: shorten these prompts or answers"
            )
        if bare := [i for i, own in enumerate(found) if not all(map(self._predicts, own))]:
            problems.append(f"a choice of {name_rows(bare)} of {place} has no token: change it, or remove these rows")
        errors.raise_problems(problems)
        return found

    def prompts(self, task: str, split: str) -> tuple[str, ...]:
        """The prompts that are decoded: with the line end that no loss has taught an expert to write."""
        prompts = self._rows[task, split].prompts
        end = "\n" if self._masked and not (self._chats or self.pair) else ""
        return tuple(prompt + end for prompt in prompts) if end else prompts

    @remembered
    def prompt_ids(self, task: str, split: str) -> list[list[int]]:
        """The tokens of `prompts`."""
        return prompt_ids(self.prompts(task, split), self._tokenizer, closed=self.pair)

    def collate(self, examples: list[text.Example]) -> Batch:
        """The batch of some examples."""
        batch: Batch = self.form.collate(examples, text.pad_id(self._tokenizer))
        # rows are filled up to a multiple, which may be beyond the model's positions
        width = max(self.positions, *map(length, examples))
        return batch if batch["input_ids"].shape[1] <= width else {name: own[:, :width] for name, own in batch.items()}

    def cuts(self, task: str) -> text.Cut:
        """The training rows that are cut, and how much of them."""
        lengths = [max(map(len, own)) for own in self.examples(task, "train")]
        if task in self._plain:
            return text.Cut(len(lengths), 0.0, 0.0, 0.0, max(lengths), len(self._rows[task, "train"].answers))
        # shorter examples are not cut: most rows need not be tokenized again
        places = [place for place, count in enumerate(lengths) if count >= self._limit]
        if not places:
            return text.Cut(len(lengths), 0.0, 0.0, 0.0, max(lengths))
        cut: dict[str, Any] = {"max_length": self._limit}
        cut |= {} if self.pair else {"truncate": self._truncate}
        if self._chats:
            chats = some_of(self._chats[task, "train"], places)
            return chat.cut_report(chats, self._tokenizer, **cut).among(len(lengths))
        rows = {task: pairs_of(some_of(self._rows[task, "train"], places))}
        report: dict[str, text.Cut] = self.form.cut_report(rows, self._tokenizer, **cut)
        return report[task].among(len(lengths))

    def problems(self, task: str, new: Mapping[str, int], *, read: bool) -> list[str]:
        """Errors for rows of a task that have more tokens than the model has positions.

        Args: new: the most tokens of an answer, by task; read: log probabilities are read, and no prompt is decoded.
        """
        limit, problems = self.positions, list[str]()
        beside = 0 if self.pair else new[task]  # positions that answers take beside prompts
        fewer = "pass `max_new_tokens`"
        if new[task] > limit:  # the same text of all such tasks, so that one line names them
            beyond = {t: count for t, count in new.items() if count > limit}
            most = f"{'' if len(set(beyond.values())) == 1 else 'up to '}{max(beyond.values())}"
            more = f"more than the model's {limit}: {fewer} below it"
            problems.append(f"max_new_tokens of {', '.join(beyond)} is {most}, {more}")
        if (longest := max(map(length, self.examples(task, "train")))) > limit:
            problems.append(
                f"training rows of {task} have up to {longest} tokens, more than the model's {limit}: "
                f"pass `max_length={limit}` or less, which cuts them"
            )
        if read:
            return problems + [p for split in ("dev", "test") for p in errors.problems_of(self.read, task, split)]
        for split in ("dev", "test") if beside <= limit else ():
            room = limit - beside
            # a token is a byte at least, a few are special: most prompts need not be tokenized
            long = [prompt for prompt in self.prompts(task, split) if len(prompt.encode()) + 8 > room]
            longest = max(map(len, self._tokenizer(long, verbose=False)["input_ids"])) if long else 0
            if longest > room:
                more = f" with {beside} new ones" if beside else ""
                way = f", or {fewer} {limit - longest} or less" if beside and longest < limit else ""
                problems.append(
                    f"{split} prompts of {task} have up to {longest} tokens,{more} more than the model's {limit}: "
                    f"shorten these prompts{way}"
                )
        return problems

    def _predicts(self, example: text.Example) -> bool:
        """Whether a label of the example is predicted: of a causal model's all but the first can be."""
        return any(label != IGNORED for label in example.labels[0 if self.pair else 1 :])


def is_pair(lm: LanguageModel) -> bool:
    """Whether a model is an encoder-decoder."""
    return bool(getattr(lm.module.config, "is_encoder_decoder", False))


def length(example: text.Example) -> int:
    """The tokens of an example, of the longer side of an encoder-decoder's."""
    return max(map(len, example))
