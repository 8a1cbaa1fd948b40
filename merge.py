"""Merge experts into one model: one merger, or all five.

    python merge.py ta --run runs/smat --coef 0.3 --out runs/merged
    python merge.py all --run runs/smat --search --out runs/smat/merged
    python merge.py ties --base runs/ft/base --experts runs/ft/rot90 runs/smat/mirror --search --out runs/mixed

Each merged model becomes the folder --out/<merger> with a card (README.md) beside its weights.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from smat_fn.config import PRESETS, Dare, Della, TaskArithmetic, Ties, WeightAverage, resolve


@dataclass(frozen=True)
class All:
    """All five mergers with the preset's settings."""

    name: ClassVar[str] = "all"


@dataclass(frozen=True)
class Merge:
    """Merge experts into one model."""

    merger: (
        Annotated[All, tyro.conf.subcommand("all", description=All.__doc__)]
        | Annotated[WeightAverage, tyro.conf.subcommand("wa", description=WeightAverage.__doc__)]
        | Annotated[TaskArithmetic, tyro.conf.subcommand("ta", description=TaskArithmetic.__doc__)]
        | Annotated[Ties, tyro.conf.subcommand("ties", description=Ties.__doc__)]
        | Annotated[Dare, tyro.conf.subcommand("dare", description=Dare.__doc__)]
        | Annotated[Della, tyro.conf.subcommand("della", description=Della.__doc__)]
    )
    out: Path
    """Folder for the merged models."""
    run: Path | None = None
    """Folder that train.py wrote: its base and all its experts."""
    base: Path | None = None
    """Base checkpoint, instead of --run."""
    experts: tuple[Path, ...] = ()
    """Expert checkpoints, instead of --run."""
    search: bool = False
    """Choose the coefficient on the suite's dev split, and score the merged model there."""
    preset: str = "digits"
    """Settings of mergers; a merger's own options override them."""
    seed: int = 0
    """Seed of the random masks of DARE and DELLA."""
    overwrite: bool = False
    """Replace merged models that exist."""
    threads: int = 1
    """CPU threads."""


def main(args: Merge) -> None:
    if args.preset not in PRESETS:
        raise ValueError(f"preset {args.preset!r} is unknown, choose one of {', '.join(PRESETS)}")
    if (args.run is None) == (args.base is None or not args.experts):
        raise ValueError("give --run FOLDER of train.py, or --base FOLDER with --experts FOLDER...")
    import torch

    from smat_fn.pipeline import merging

    torch.set_num_threads(args.threads)
    defaults = PRESETS[args.preset].mergers
    configs = list(defaults.values()) if isinstance(args.merger, All) else [resolve(args.merger, defaults)]
    base, experts = merging.find_inputs(args.run) if args.run else (args.base or Path(), list(args.experts))
    merged = merging.merge_run(
        configs, base, experts, out=args.out, search=args.search, seed=args.seed, overwrite=args.overwrite
    )
    for folder, model in merged.items():
        coef = "" if model.coef is None else f", coef {model.coef:g}"
        score = f", dev {merging.mean(list(model.dev.values())):.2f}" if model.dev else ""
        print(f"merged: {folder}{coef}{score}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Merge, description=__doc__, config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs)))
    except ValueError as error:
        sys.exit(f"merge.py: {error}")
