"""Train experts of a suite with one method.

    python train.py ft --out runs/ft
    python train.py smat --tasks rot90 mirror --sigma 0.01 --out runs/smat
    python train.py smat --preset llama-3.2-1b --model FOLDER --data FOLDER --out runs/llama --dry-run
    python train.py smat --preset llama-3.2-1b --model FOLDER --data FOLDER --out runs/llama --accumulate 8 --resume
    torchrun --nproc-per-node 2 train.py smat --preset llama-3.2-1b --model FOLDER --data FOLDER --out runs/llama
    python train.py sweep --methods ft smat --seeds 0 1 2 --devices 0 1 --flags="--preset llama-3.2-1b" --out runs
    python train.py status runs

`train.py smat --help` has the method's own strengths as well. Each task's expert becomes a folder of --out
(model.safetensors, manifest.json) with a JSON-lines log beside it; the base that all start from is --out/base.
Options with "default: preset" take the value of --preset. A run that was ended by a signal, or killed, goes on with
the same command and --resume, to the same bits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg, subcommand

from smat_fn.config import Adapters, Asam, Finetune, Mergopt, Orthoreg, Smat, Training, preset_of, resolve
from smat_fn.scripts import cli
from smat_fn.scripts.train.sweep import Status, Sweep, status, sweep
from smat_fn.types import Precision

if TYPE_CHECKING:
    from smat_fn import parallel


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
    """Base: a folder, or a name on the hub. The preset digits makes its own."""
    data: str | None = None
    """Rows: a folder with a folder for each task, as README.md lays it out, or a dataset of the hub."""
    rows: Annotated[int | None, arg(help_behavior_hint="(default: all)")] = None
    """Only the first rows of each split, for a quick try."""
    suite_options: Annotated[
        dict[str, bool | int | float | str | None],
        arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: preset, or the suite's)"),
    ] = field(default_factory=dict)
    """Options of model and data: batch_size 4 gradient_checkpointing True device cpu. Listed at the end of --help."""
    lr: float | None = None
    """Learning rate, of each method its own in a preset."""
    optimizer: Literal["adam", "adamw", "muon"] | None = None
    """adam, adamw, or muon: Muon on the matrices of blocks, AdamW elsewhere."""
    muon_lr: Annotated[float | None, arg(help_behavior_hint="(default: preset, or 20 times --lr)")] = None
    """Muon's own learning rate."""
    schedule: Literal["constant", "cosine"] | None = None
    """Of the learning rate; cosine falls to 0."""
    weight_decay: float | None = None
    """Decoupled, of adamw and muon."""
    max_grad_norm: float | None = None
    """Norm that gradients are clipped to; inf: no clipping."""
    steps: int | None = None
    """Optimizer steps per expert, instead of epochs."""
    epochs: int | None = None
    """Passes over a task's rows, the same for all tasks."""
    accumulate: int | None = None
    """Micro-batches that the batch of a step is split into: less memory, the same step up to rounding."""
    mask_prompt: bool = False
    """Language models: the loss is that of the answer alone, not of the prompt too."""
    precision: Annotated[Precision | None, arg(help_behavior_hint="(default: the suite's dtype)")] = None
    """bf16 or fp32: everything in that dtype; mixed: parameters and optimizer in fp32, losses in bf16."""
    lora_rank: Annotated[int | None, arg(help_behavior_hint="(default: all weights)")] = None
    """Train adapters of this rank on the linear layers of blocks, saved in PEFT's format."""
    lora_alpha: Annotated[float | None, arg(help_behavior_hint="(default: 2 times --lora-rank)")] = None
    """Adapters are scaled by this over their rank."""
    lora_targets: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Layers with adapters: names (q_proj), or globs over paths (model.layers.1.*)."""
    lora_simulate: Literal["merged", "factors"] = "merged"
    """SMAT's simulated state: of the merged weight, or of the two factors themselves, which is cheaper."""
    independent_draws: bool = False
    """With torchrun: each process draws for itself, and the gradients are averaged."""
    label: Annotated[str | None, arg(help_behavior_hint="(default: the method's)")] = None
    """Name of these experts in tables."""
    log_every: int = 1
    """Steps between lines of the log."""
    log: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], arg(help_behavior_hint="(default: none)")
    ] = ()
    """Trackers to log to as well; their packages must be installed."""
    save_every_steps: Annotated[int | None, arg(help_behavior_hint="(default: by time alone)")] = None
    """Steps after which the state of training is saved, to go on from."""
    save_every_minutes: float = 30.0
    """Minutes after which it is saved; inf: never."""
    resume: bool = False
    """Leave finished experts of --out alone and go on where training was interrupted; else start."""
    probe: int = 0
    """Simulated states at whose dev loss each finished expert is probed, with the preset's strengths of SMAT."""
    dry_run: bool = False
    """Only check, and print what would be trained: settings, leaves, budget, rows that truncation cuts."""
    overwrite: bool = False
    """Replace experts that exist."""
    threads: int = 1
    """CPU threads; small models are fastest with one. Results repeat bit for bit at the same number."""


def main(args: Train) -> None:
    preset_of(args.preset)
    from smat_fn import parallel

    with parallel.joined() as world:
        train(args, world)


def train(args: Train, world: "parallel.World") -> None:
    """Train in this process, one of those that torchrun started or the only one."""
    preset = preset_of(args.preset)
    import torch

    from smat_fn.scripts.train.checks import check_run
    from smat_fn.scripts.train.dry_run import dry_run
    from smat_fn.scripts.train.snapshots import Interrupted, on_signals
    from smat_fn.scripts.train.training import train_run
    from smat_fn.suites import load_suite, task_names

    torch.set_num_threads(args.threads)
    method = resolve(args.method, preset.methods)
    lr = preset.lr[method.name] if args.lr is None else args.lr
    seed = preset.seed if args.seed is None else args.seed
    suite_seed = seed if args.suite_seed is None else args.suite_seed
    named: dict[str, Any] = {name: getattr(args, name) for name in ("model", "data", "rows")}
    named["mask_prompt"] = args.mask_prompt or None
    if "dtype" in preset.options and "dtype" not in args.suite_options:
        named["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(args.precision or "")
    options = {**preset.options, **args.suite_options, **{k: v for k, v in named.items() if v is not None}}
    known = task_names(preset.suite, **options)
    tasks = args.tasks or known
    training = training_of(args, replace(preset.training, lr=lr), tasks)
    kept: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("log_every", "overwrite", "resume", "save_every_steps", "save_every_minutes", "probe")
    }
    kept["log_to"] = args.log
    # loading a suite for the first time pretrains its base: bad input is told before
    if world.leads:
        check_run(method, training, known=known, tasks=tasks, out=args.out, world=world, **kept)
    with world.first():
        suite = load_suite(preset.suite, seed=suite_seed, **options)
    report = print if world.leads else lambda *texts, **how: None
    if args.dry_run:
        report(dry_run(suite, method, training, tasks=tasks, seed=seed))
        return
    origin = "given" if args.lr is not None else f"preset {args.preset}"
    length = "epochs by task" if training.steps is None else f"{training.steps} steps"
    more = f", precision {training.precision}" if training.precision else ""
    more += f", {training.accumulate} micro-batches a step" if training.accumulate > 1 else ""
    more += f", adapters of rank {training.lora.rank}" if training.lora else ""
    more += f", {world.size} processes" if world.size > 1 else ""
    report(f"{method.name} on {suite.name}: learning rate {lr:g} ({origin}), {length}{more}, seed {seed}", flush=True)
    try:
        with on_signals(second_ends=world.size == 1) as stop:
            folders = train_run(
                suite,
                method,
                training,
                seed=seed,
                tasks=tasks,
                out=args.out,
                label=args.label,
                preset=args.preset,
                probe_at=resolve(Smat(), preset.methods),
                stop=stop,
                world=world,
                report=report,
                **kept,
            )
    except Interrupted as ended:
        if world.leads:
            print(f"train.py: {ended}", file=sys.stderr)
        sys.exit(ended.status)
    for folder in folders:
        report(f"expert: {folder}")


def training_of(args: Train, training: Training, tasks: Sequence[str]) -> Training:
    """The preset's training, overridden. Raises: ValueError for options of adapters without a rank."""
    names = "schedule", "weight_decay", "max_grad_norm", "accumulate", "precision"
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if given.get("max_grad_norm") == float("inf"):
        given["max_grad_norm"] = None
    if args.optimizer is not None:
        given |= {"optimizer": args.optimizer, "muon_lr": 20 * training.lr if args.optimizer == "muon" else None}
    if args.muon_lr is not None:
        given["muon_lr"] = args.muon_lr
    if args.epochs is not None:
        given |= {"steps": None, "epochs": dict.fromkeys(tasks, args.epochs)}
    if args.steps is not None:
        given |= {"steps": args.steps, "epochs": {}}
    if args.lora_rank is not None:
        alpha = 2 * args.lora_rank if args.lora_alpha is None else args.lora_alpha
        given["lora"] = Adapters(args.lora_rank, alpha, args.lora_targets, args.lora_simulate)
    elif args.lora_alpha is not None or args.lora_targets:
        raise ValueError("--lora-alpha and --lora-targets are of adapters: give --lora-rank")
    return replace(training, independent_draws=args.independent_draws, **given)


if __name__ == "__main__":
    commands: dict[str, cli.Command] = {
        "sweep": (lambda options: sweep(options, script=Path(__file__)), Sweep),
        "status": (status, Status),
    }
    cli.run("train.py", main, Train, description=__doc__, commands=commands)
