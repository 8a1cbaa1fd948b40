"""Train experts of a suite with one method.

    python train.py ft --out runs/ft
    python train.py smat --tasks rot90 mirror --sigma 0.01 --out runs/smat
    python train.py smat --preset llama-3.2-1b --model FOLDER --data FOLDER --out runs/llama --dry-run

Each task's expert becomes a folder of --out (model.safetensors, manifest.json) with a JSON-lines log beside it, the
base that all of them start from the folder --out/base. Options with "default: preset" take the value of --preset.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg, subcommand

from smat_fn.config import Asam, Finetune, Mergopt, Orthoreg, Smat, preset_of, resolve
from smat_fn.pipeline import cli


@dataclass(frozen=True)
class Train:
    """Train experts of a suite with one method."""

    method: (
        Annotated[Finetune, subcommand("ft", description=Finetune.__doc__)]
        | Annotated[Smat, subcommand("smat", description=Smat.__doc__)]
        | Annotated[Asam, subcommand("asam", description=Asam.__doc__)]
        | Annotated[Mergopt, subcommand("mergopt", description=Mergopt.__doc__)]
        | Annotated[Orthoreg, subcommand("orthoreg", description=Orthoreg.__doc__)]
    )
    out: Path
    """Folder for the experts."""
    preset: str = "digits"
    """An experiment: its suite, budget and strengths. Other options override it."""
    tasks: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all of the suite)")] = ()
    """Tasks to train an expert for."""
    seed: int | None = None
    """Seed of training: batches and draws."""
    suite_seed: Annotated[int | None, arg(help_behavior_hint="(default: --seed)")] = None
    """Seed of the suite: splits and base. Experts to be merged need the same."""
    model: str | None = None
    """Language suites: the base, a folder or a name on the hub."""
    data: str | None = None
    """Language suites: rows, a folder of TASK/{train,dev,eval}.json or a dataset of the hub."""
    rows: Annotated[int | None, arg(help_behavior_hint="(default: all)")] = None
    """Language suites: only the first rows of each split."""
    suite_options: Annotated[
        dict[str, bool | int | float | str], arg(help_behavior_hint="(default: preset, or the suite's)")
    ] = field(default_factory=dict)
    """Other options of the suite to change, as NAME VALUE pairs: pretrain_steps 300, or mask_prompt True device cpu."""
    lr: float | None = None
    """Learning rate. The preset's was chosen on dev, for each method."""
    optimizer: Literal["adam", "adamw", "muon"] | None = None
    """adam, adamw, or muon: Muon on the matrices of blocks, AdamW elsewhere."""
    muon_lr: Annotated[float | None, arg(help_behavior_hint="(default: preset, or 20 times --lr)")] = None
    """Muon's own learning rate."""
    steps: int | None = None
    """Optimizer steps per expert, instead of epochs."""
    epochs: int | None = None
    """Passes over a task's rows, the same for all tasks."""
    label: Annotated[str | None, arg(help_behavior_hint="(default: the method's)")] = None
    """Name of these experts in tables."""
    log_every: int = 1
    """Steps between lines of the log."""
    dry_run: bool = False
    """Only check, and print what would be trained: settings, leaves, budget, rows that truncation cuts."""
    overwrite: bool = False
    """Replace experts that exist."""
    threads: int = 1
    """CPU threads; small models are fastest with one. Results repeat bit for bit at the same number."""


def main(args: Train) -> None:
    preset = preset_of(args.preset)
    import torch

    from smat_fn.data import load_suite, task_names
    from smat_fn.pipeline.dry_run import dry_run
    from smat_fn.pipeline.training import check_run, train_run

    torch.set_num_threads(args.threads)
    method = resolve(args.method, preset.methods)
    lr = preset.lr[method.name] if args.lr is None else args.lr
    seed = preset.seed if args.seed is None else args.seed
    suite_seed = seed if args.suite_seed is None else args.suite_seed
    named = {"model": args.model, "data": args.data, "rows": args.rows}
    options = {**preset.options, **args.suite_options, **{k: v for k, v in named.items() if v is not None}}
    known = task_names(preset.suite, **options)
    tasks = args.tasks or known
    training = replace(preset.training, lr=lr)
    if args.optimizer is not None:
        training = replace(training, optimizer=args.optimizer, muon_lr=20 * lr if args.optimizer == "muon" else None)
    if args.muon_lr is not None:
        training = replace(training, muon_lr=args.muon_lr)
    if args.epochs is not None:
        training = replace(training, steps=None, epochs=dict.fromkeys(tasks, args.epochs))
    if args.steps is not None:
        training = replace(training, steps=args.steps, epochs={})
    # loading a suite for the first time pretrains its base: bad input is told before
    check_run(
        method, training, known=known, tasks=tasks, out=args.out, log_every=args.log_every, overwrite=args.overwrite
    )
    suite = load_suite(preset.suite, seed=suite_seed, **options)
    if args.dry_run:
        print(dry_run(suite, method, training, tasks=tasks, seed=seed))
        return
    origin = "given" if args.lr is not None else f"preset {args.preset}"
    length = "epochs by task" if training.steps is None else f"{training.steps} steps"
    print(f"{method.name} on {suite.name}: learning rate {lr:g} ({origin}), {length}, seed {seed}")
    folders = train_run(
        suite,
        method,
        training,
        seed=seed,
        tasks=tasks,
        out=args.out,
        label=args.label,
        log_every=args.log_every,
        overwrite=args.overwrite,
    )
    for folder in folders:
        print(f"expert: {folder}")


if __name__ == "__main__":
    cli.run("train.py", main, Train, description=__doc__)
