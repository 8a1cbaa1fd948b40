"""Merge experts into one model: one merger, or all five.

    python merge.py ta --run runs/smat --coef 0.3 --out runs/merged
    python merge.py all --run runs/smat --search --out runs/smat/merged
    python merge.py ties --base runs/ft/base --experts runs/ft/rot90 runs/smat/mirror --search --out runs/mixed

Each merged model becomes the folder --out/<merger> with a card (README.md) beside its weights. Options with
"default: preset" take the value of --preset.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import arg, subcommand

from smat_fn.config import Dare, Della, TaskArithmetic, Ties, WeightAverage, preset_of, resolve
from smat_fn.pipeline import cli

NONE = arg(help_behavior_hint="(default: none)")


@dataclass(frozen=True)
class All:
    """All five mergers with the preset's settings, their coefficients by --search."""

    name: ClassVar[str] = "all"


@dataclass(frozen=True)
class Merge:
    """Merge experts into one model."""

    merger: (
        Annotated[All, subcommand("all", description=All.__doc__)]
        | Annotated[WeightAverage, subcommand("wa", description=WeightAverage.__doc__)]
        | Annotated[TaskArithmetic, subcommand("ta", description=TaskArithmetic.__doc__)]
        | Annotated[Ties, subcommand("ties", description=Ties.__doc__)]
        | Annotated[Dare, subcommand("dare", description=Dare.__doc__)]
        | Annotated[Della, subcommand("della", description=Della.__doc__)]
    )
    out: Path
    """Folder for the merged models."""
    run: Annotated[Path | None, NONE] = None
    """Folder that train.py wrote: its base and all its experts."""
    base: Annotated[Path | None, NONE] = None
    """Base checkpoint, with --experts instead of --run."""
    experts: Annotated[tuple[Path, ...], NONE] = ()
    """Expert checkpoints, with --base instead of --run."""
    search: bool = False
    """Choose a coefficient that is left out on the suite's dev split, and score the merged model there."""
    calibrate: bool = False
    """First choose the sparsity of TIES, DARE and DELLA on dev, at the paper's reference coefficients."""
    preset: str = "digits"
    """Settings of mergers; a merger's own options override them."""
    seed: int = 0
    """Seed of the random masks of DARE and DELLA."""
    overwrite: bool = False
    """Replace merged models that exist."""
    suite_options: Annotated[
        dict[str, bool | int | float | str], arg(help_behavior_hint="(default: as they were trained)")
    ] = field(default_factory=dict)
    """Options of the suite to change, as NAME VALUE pairs: model FOLDER data FOLDER device cpu decode_batch 64."""
    threads: int = 1
    """CPU threads."""


def main(args: Merge) -> None:
    preset = preset_of(args.preset)
    given = args.base is not None, bool(args.experts)
    if any(given) if args.run else not all(given):
        raise ValueError("give either --run FOLDER of train.py, or --base FOLDER with --experts FOLDER...")
    import torch

    from smat_fn.merge import CALIBRATION_COEFS
    from smat_fn.pipeline import merging

    torch.set_num_threads(args.threads)
    defaults = preset.mergers
    configs = list(defaults.values()) if isinstance(args.merger, All) else [resolve(args.merger, defaults)]
    base, experts = merging.find_inputs(args.run) if args.run else (args.base or Path(), list(args.experts))
    merged = merging.merge_run(
        configs,
        base,
        experts,
        out=args.out,
        search=args.search,
        calibration=CALIBRATION_COEFS[preset.family] if args.calibrate else None,
        seed=args.seed,
        overwrite=args.overwrite,
        options=args.suite_options,
    )
    for folder, model in merged.items():
        coef = "" if model.coef is None else f", coef {model.coef:g}"
        score = f", dev {merging.mean(list(model.dev.values())):.2f}" if model.dev else ""
        print(f"merged: {folder}{coef}{score}")


if __name__ == "__main__":
    cli.run("merge.py", main, Merge, description=__doc__)
