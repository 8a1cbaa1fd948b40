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


from_recipe = printing(".subcommands.by_recipe", "merge")
COMMANDS: dict[str, Command] = {
    "verify": (printing(".provenance.finished", "verified"), Verify),
    "recipe": (from_recipe, FromRecipe),
    "export": (printing(".subcommands.exporting", "write"), Export),
    "extract-lora": (printing(".subcommands.extracting", "extract"), ExtractLora),
    "statistics": (printing(".subcommands.statistics", "make_statistics"), Statistics),
    "adamerging": (printing(".subcommands.by_data", "adapt"), AdaMerging),
    "reg_mean_plus": (printing(".subcommands.by_data", "regress"), RegMeanPlus),
    "adapters": (printing(".subcommands.adapters", "merge"), MergeAdapters),
    "transport": (printing(".subcommands.transport", "transport"), Transport),
    "moe": (printing(".subcommands.moe", "make"), Moe),
    "transplant-tokenizer": (printing(".subcommands.transplanting", "transplant"), TransplantTokenizer),
}
