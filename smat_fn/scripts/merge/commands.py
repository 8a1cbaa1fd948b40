"""merge.py's subcommands beside mergers. No torch until one runs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .. import outcome
from ..cli import Command
from .settings import (
    AdaMerging,
    Export,
    ExtractLora,
    FromRecipe,
    MergeAdapters,
    Moe,
    RegMeanPlus,
    Statistics,
    TransplantTokenizer,
    Transport,
    Verify,
)


def printing(module: str, name: str) -> Callable[[Any], None]:
    """The command that prints the lines which a function of a module here yields for its options."""

    def run(args: Any) -> None:
        import torch

        torch.set_num_threads(getattr(args, "threads", 1))
        for line in getattr(import_module(module, __package__), name)(args):
            outcome.line(line)

    return run


from_recipe = printing(".by_recipe", "merge")
COMMANDS: dict[str, Command] = {
    "verify": (printing(".finished", "verified"), Verify),
    "recipe": (from_recipe, FromRecipe),
    "export": (printing(".exporting", "write"), Export),
    "extract-lora": (printing(".extracting", "extract"), ExtractLora),
    "statistics": (printing(".statistics", "make_statistics"), Statistics),
    "adamerging": (printing(".by_data", "adapt"), AdaMerging),
    "reg_mean_plus": (printing(".by_data", "regress"), RegMeanPlus),
    "adapters": (printing(".adapters", "merge"), MergeAdapters),
    "transport": (printing(".transport", "transport"), Transport),
    "moe": (printing(".moe", "make"), Moe),
    "transplant-tokenizer": (printing(".transplanting", "transplant"), TransplantTokenizer),
}
