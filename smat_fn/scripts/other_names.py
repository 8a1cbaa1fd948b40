"""Options under the names that other trainers give them, and options of suites given without --suite-options."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

OF_TRAINERS = {
    "learning-rate": "--lr",
    "num-train-epochs": "--epochs",
    "max-steps": "--steps",
    "per-device-train-batch-size": "--batch-size",
    "gradient-accumulation-steps": "--accumulate",
    "warmup-steps": "--warmup",
    "lr-scheduler-type": "--schedule",
    "max-seq-length": "--max-length",
    "bf16": "--precision bf16",
    "batch-size": "--suite-options decode_batch N (language models) or eval_batch N",  # of commands that score
    "output-dir": "--out",
    "model-name-or-path": "--model",
    "dataset": "--data",
    "dataset-name": "--data",
    "report-to": "--log",
    "wandb": "--log wandb",
}


def spelled_otherwise(words: Sequence[str], options: type) -> list[str]:
    """Errors for options of transformers' and other trainers that have another name here, and for those of suites."""
    kinds = [kind for own in get_type_hints(options).values() for kind in (own, *get_args(own))]  # of a union too
    known = {field.name for part in (options, *kinds) if is_dataclass(part) for field in fields(part)}
    if "suite_options" not in known:
        return []
    given = dict.fromkeys(word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    strange = [name for name in given if _field(name) not in known]
    ours = {name: own for name in strange if (own := OF_TRAINERS.get(name)) and _field(own.split()[0]) in known}
    problems = [f"--{name} is {own} here" for name, own in ours.items()]
    if others := [name for name in strange if name not in ours]:
        from ..suites import SUITES, describe_options  # loads torch

        of_suites = {option for suite in SUITES for option in describe_options(suite)}
        found = [name for name in others if _field(name) in of_suites]
        problems += [f"--{n} is an option of a suite: write --suite-options {_field(n)} VALUE" for n in found]
    return problems


def _field(option: str) -> str:
    """The field of an option, with its dashes or without."""
    return option.removeprefix("--").replace("-", "_")
