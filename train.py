"""Train experts of a suite with one method.

    python train.py ft --out runs/ft
    python train.py smat --tasks rot90 mirror --sigma 0.01 --out runs/smat

Each task's expert becomes a folder of --out (model.safetensors, manifest.json) with a JSON-lines log beside it.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from smat_fn.config import PRESETS, Finetune, Smat, resolve


@dataclass(frozen=True)
class Train:
    """Train experts of a suite with one method."""

    method: (
        Annotated[Finetune, tyro.conf.subcommand("ft", description=Finetune.__doc__)]
        | Annotated[Smat, tyro.conf.subcommand("smat", description=Smat.__doc__)]
    )
    out: Path
    """Folder for the experts."""
    preset: str = "digits"
    """Suite, budget and strengths of an experiment; other options override it."""
    tasks: tuple[str, ...] = ()
    """Tasks to train an expert for; none named: all of the suite."""
    seed: int | None = None
    """Seed of training (batches, draws); left out: the preset's."""
    suite_seed: int | None = None
    """Seed of the suite (splits, base); left out: --seed."""
    lr: float | None = None
    """Learning rate; left out: what the preset chose for the method on dev."""
    steps: int | None = None
    """Optimizer steps per expert; left out: the preset's."""
    label: str | None = None
    """Name of these experts in tables; left out: the method's."""
    log_every: int = 1
    """Steps between lines of the log."""
    overwrite: bool = False
    """Replace experts that exist."""
    threads: int = 1
    """CPU threads; small models are fastest with one. Results repeat bit for bit at the same number."""


def main(args: Train) -> None:
    if args.preset not in PRESETS:
        raise ValueError(f"preset {args.preset!r} is unknown, choose one of {', '.join(PRESETS)}")
    import torch

    from smat_fn.data import load_suite
    from smat_fn.pipeline.training import train_run

    torch.set_num_threads(args.threads)
    preset = PRESETS[args.preset]
    method = resolve(args.method, preset.methods)
    lr = preset.lr[method.name] if args.lr is None else args.lr
    steps = preset.training.steps if args.steps is None else args.steps
    seed = preset.seed if args.seed is None else args.seed
    suite = load_suite(preset.suite, seed=seed if args.suite_seed is None else args.suite_seed)
    origin = "given" if args.lr is not None else f"preset {args.preset}"
    print(f"{method.name} on {suite.name}: learning rate {lr:g} ({origin}), {steps} steps an expert, seed {seed}")
    folders = train_run(
        suite,
        method,
        replace(preset.training, lr=lr, steps=steps),
        seed=seed,
        tasks=args.tasks or suite.tasks,
        out=args.out,
        label=args.label,
        log_every=args.log_every,
        overwrite=args.overwrite,
    )
    for folder in folders:
        print(f"expert: {folder}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Train, description=__doc__, config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs)))
    except ValueError as error:
        sys.exit(f"train.py: {error}")
