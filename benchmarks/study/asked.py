"""Labelled texts as rows of a language model: the prompt asks for a text's class, the answer is its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from smat_fn.data.labelled import load_task

ROWS = {"dev": 100, "test": 200}  # the first ones; of train all
FILES = {"train": "train", "dev": "dev", "test": "eval"}


class Asked(NamedTuple):
    """The question that follows the texts of a task, and the answers."""

    question: str  # stands after the text
    classes: tuple[str, ...] = ()  # in place of the source's names, where these are numbers or codes


TASKS: Mapping[str, Asked] = {
    "sst2": Asked("Sentiment", ("negative", "positive")),
    "emotion": Asked("Emotion", ("anger", "joy", "optimism", "sadness")),
    "trec": Asked("Type of answer", ("abbreviation", "description", "entity", "human", "location", "number")),
    "banking77": Asked("Request"),
}


def write_rows(source: str, folder: Path) -> Path:
    """Write the tasks of a folder of labelled texts as prompts and answers, in the layout of the suite ``trace``.

    Args:
        source: a folder with a folder for each task of `TASKS`, as the suite ``short_text`` reads them.
        folder: for the rows; files that are there are written again.

    Returns:
        The folder.
    """
    for task, asked in TASKS.items():
        splits, names, *_ = load_task(f"{source}/{task}")
        classes = asked.classes or tuple(name.replace("_", " ") for name in names)
        (folder / task).mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            pairs = zip(rows.texts[: ROWS.get(split)], rows.labels, strict=False)
            made = [
                {"prompt": f"Text: {text.strip()}\n{asked.question}:", "answer": classes[label]}
                for text, label in pairs
            ]
            (folder / task / f"{FILES[split]}.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    return folder
