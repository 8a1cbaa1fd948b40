"""Train experts of a suite with one method.

    python train.py ft --out runs/ft
    python train.py smat --tasks rot90 mirror --sigma 0.01 --out runs/smat
    python train.py ft --joint --out runs/ft
    python train.py smat --preset lm --model FOLDER --data FOLDER --out runs/lm --dry-run
    python train.py smat --preset lm --model FOLDER --data FOLDER --out runs/lm --accumulate 8 --resume
    torchrun --nproc-per-node 2 train.py smat --preset llama-3.2-1b --model FOLDER --data FOLDER --out runs/llama
    python train.py sweep --methods ft smat --seeds 0 1 2 --devices 0 1 --flags="--preset llama-3.2-1b" --out runs
    python train.py status runs

`train.py smat --help` explains the main options, --help-all all of them. Each task's expert is written to a folder
in --out (model.safetensors, manifest.json), with a JSON-lines log beside it; the common base is --out/base. The
defaults that --help shows are those of --preset: `train.py smat --preset NAME --help`.
The same command with --resume continues an interrupted run; the result is bit-identical.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

from tyro.conf import arg, subcommand

from smat_fn.config import (
    METHODS,
    MORE_METHODS,
    PRESETS,
    Adapters,
    Dev,
    Mergopt,
    MethodConfig,
    Smat,
    Training,
    preset_of,
    resolve,
)
from smat_fn.errors import raise_problems, suggestion
from smat_fn.mat import build_of
from smat_fn.progress import say
from smat_fn.scripts import cli, outcome
from smat_fn.scripts.train.settings import (
    AdapterSettings,
    DataSettings,
    OptimizerSettings,
    ProcessSettings,
    RunSettings,
    Status,
    Sweep,
)

if TYPE_CHECKING:
    from smat_fn import parallel
    from smat_fn.scripts.train.options import RunOptions

    Chosen: TypeAlias = MethodConfig
else:  # a subcommand for every method
    Chosen = Union[tuple(Annotated[c, subcommand(c.name, description=c.__doc__)] for c in (*METHODS, *MORE_METHODS))]  # noqa: UP007 - built from the registry


NAMES = [config.name for config in (*METHODS, *MORE_METHODS)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train experts of a suite with one method."""

    data: Annotated[DataSettings, arg(name="model and data")]
    method: Chosen
    training: Annotated[OptimizerSettings, arg(name="optimizer")]
    adapters: Annotated[AdapterSettings, arg(name="adapter")]
    process: Annotated[ProcessSettings, arg(name="run")]
    run: Annotated[RunSettings, arg(name="output")]


FIRST = {
    Smat: ("alpha_min", "drop_prob", "sigma", "period"),
    DataSettings: ("preset", "model", "data", "tasks", "batch_size"),
    OptimizerSettings: ("lr", "steps", "epochs", "precision"),
    AdapterSettings: ("lora_rank",),
    ProcessSettings: ("dry_run",),
    RunSettings: ("out", "resume", "overwrite"),
}


def shown(words: Sequence[str]) -> list[Any]:
    """The values of the preset that the words of a command name, as ``--help`` shows them."""
    name = cli.value_of("--preset", words, DataSettings.preset)
    if (preset := PRESETS.get(name)) is None:
        return []
    method = next((word for word in words if word in NAMES), "ft")
    training = preset.training
    names = {own.name for own in fields(OptimizerSettings)} & {own.name for own in fields(Training)} - {"epochs"}
    values = {name: getattr(training, name) for name in names}
    given: dict[str, Any] = {name: str(value) for name in ("model", "data") if (value := preset.options.get(name))}
    given |= {name: value for name in ("batch_size", "max_length") if (value := preset.options.get(name))}
    return [
        DataSettings(preset=name, **given),
        OptimizerSettings(**{**values, "lr": preset.lr.get(method, training.lr), "epochs": preset.epochs}),
        ProcessSettings(seed=preset.seed),
        *(_with_defaults(preset.methods.get(own.name, own())) for own in (*METHODS, *MORE_METHODS)),
    ]


def _with_defaults(method: MethodConfig) -> MethodConfig:
    """The method with the defaults of its `build` for what the preset leaves open, as a run takes them."""
    own = signature(build_of(method)).parameters
    missing = {f.name for f in fields(method) if getattr(method, f.name) is None} - {"k_max"}  # from the data's tasks
    return replace(method, **{name: own[name].default for name in missing})


def main(args: Train) -> None:
    """Train the experts, in this process or in those of torchrun."""
    preset_of(args.data.preset)  # an unknown name is an error before torch is imported
    from smat_fn import parallel

    with parallel.joined() as world:
        train(args, world)


def train(args: Train, world: "parallel.World") -> None:
    """Load, check, train and save, in this process: the only one, or one of those that torchrun started."""
    import torch

    from smat_fn.scripts.merge.subcommands.statistics import statistics_of_run
    from smat_fn.scripts.train.describe import dry_run, headline
    from smat_fn.scripts.train.joint import joint_run
    from smat_fn.scripts.train.options import check_run, experts_to_merge, suite_options
    from smat_fn.scripts.train.resuming import Interrupted, on_signals
    from smat_fn.scripts.train.training import train_run
    from smat_fn.suites import load_suite
    from smat_fn.suites.trace_rows import given_metric

    torch.set_num_threads(args.process.threads)
    own, tasks, seed = args.data, args.data.tasks, args.process.seed
    preset = preset_of(own.preset)
    method = resolve(args.method, preset.methods)
    given = cli.with_named(own.suite_options, **_named(own, preset.suite))
    options = suite_options(preset, given, precision=args.training.precision)
    known, options = _tasks(preset.suite, options, tasks)
    run = _run_options(args, with_rows := tasks or known, preset.seed if seed is None else seed)
    report = partial(print, flush=True) if world.leads else lambda line: None
    if isinstance(method, Mergopt) and method.k_max is None:
        method = replace(method, k_max=experts_to_merge(run, known, report))
    plain = replace(preset.training, lr=preset.lr.get(method.name, preset.training.lr))
    if preset.epochs is not None:
        plain = replace(plain, epochs=dict.fromkeys(with_rows, preset.epochs))
    training = training_of(args, plain, with_rows)
    # before the suite is loaded, which pretrains a base the first time
    if world.leads:
        check_run(method, training, run, known=known, world=world)
    sources = ", ".join(_source(name, str(options[name])) for name in ("model", "data") if options.get(name))
    if world.leads:
        say(f"loading suite {preset.suite}{f': {sources}' if sources else ''}")
    with world.first():
        seed = run.seed if own.suite_seed is None else own.suite_seed
        suite = load_suite(preset.suite, seed=seed, needed=tasks or None, **options)
    raise_problems(given_metric(suite, options))
    if run.joint:
        suite, training, run = joint_run(suite, training, run)
    if args.process.dry_run:
        report(plan := dry_run(suite, method, training, run))
        outcome.add("plans", plan)
        return
    origin = "given" if args.training.lr is not None else f"preset {own.preset}{preset.note and ': '}{preset.note}"
    report(headline(suite, method, training, origin=origin, seed=run.seed, processes=world.size))
    try:
        with on_signals(second_ends=world.size == 1 and "SUBMITIT_EXECUTOR" not in os.environ) as stop:
            folders = train_run(suite, method, training, run, stop=stop, world=world, report=report)
    except Interrupted as ended:
        if world.leads:
            print(f"train.py: {ended}", file=sys.stderr)
        sys.exit(ended.status)
    for folder in folders:
        report(f"{'multi-task model' if run.joint else 'expert'}: {folder}")
        outcome.add("experts", {"folder": folder, "task": folder.name, "method": method.name, "seed": run.seed})
    if run.statistics and world.leads:
        for line in statistics_of_run(suite, folders, kinds=run.statistics, seed=run.seed):
            report(line)


def _run_options(args: Train, tasks: tuple[str, ...], seed: int) -> "RunOptions":
    """The options of a run: of an expert for each task, or of one model of them all."""
    from smat_fn.checkpoint import JOINT
    from smat_fn.scripts.train.options import RunOptions

    return RunOptions(
        **{option.name: getattr(args.run, option.name) for option in fields(RunSettings)},
        tasks=(JOINT,) if args.data.joint else tasks,
        joint=tasks if args.data.joint else (),
        seed=seed,
        preset=args.data.preset,
        probe_at=resolve(Smat(), preset_of(args.data.preset).methods),
    )


def _tasks(suite: str, options: dict[str, Any], named: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The tasks of a suite, and its options, with the tasks that are named where only the hub knows a dataset's."""
    from smat_fn.suites import task_names

    known, data = task_names(suite, **options), options.get("data")
    hub = isinstance(data, str) and not Path(data).expanduser().exists()
    if hub and options.get("tasks") is None and not set(named) <= set(known):
        return named, {**options, "tasks": named}
    return known, options


def _named(own: DataSettings, suite: str) -> dict[str, Any]:
    """Options of a suite that have an option of their own here. Raises: ValueError for some that the suite lacks."""
    from smat_fn.suites import describe_options

    flags = "chat", "mask_prompt", "gradient_checkpointing"
    values = "model", "data", "rows", "metric", "train", "train_layers", "batch_size", "max_length", "device"
    named = {name: getattr(own, name) for name in values} | {name: getattr(own, name) or None for name in flags}
    there = describe_options(suite)
    if strange := ["--" + n.replace("_", "-") for n, value in named.items() if value is not None and n not in there]:
        others = "for a model and data of your own pass --preset lm (language models), text (text encoders) or images"
        way = "leave out what it lacks" if "model" in there else others
        raise ValueError(f"the preset {own.preset} has no {', '.join(strange)}: {way}")
    return named


def _source(name: str, given: str) -> str:
    """Model or data as a run begins to load them: what is not here is asked from the hub, which takes a while."""
    path = Path(given).expanduser()
    if path.exists():
        return f"{name} {given}"
    near = suggestion(path.name, [own.name for own in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return f"{name} {given} (no folder here{near or ','} asking the hub)"


def training_of(args: Train, training: Training, tasks: Sequence[str]) -> Training:
    """The preset's training, overridden. Raises: ValueError for options without the one that they belong to."""
    own, adapters = args.training, args.adapters
    names = "lr", "schedule", "warmup", "weight_decay", "max_grad_norm", "accumulate", "precision"
    given: dict[str, Any] = {name: value for name in names if (value := getattr(own, name)) is not None}
    lr = given.get("lr", training.lr)
    if given.get("max_grad_norm") == float("inf"):
        given["max_grad_norm"] = None
    elif not (bound := given.get("max_grad_norm", 1)) > 0:
        raise ValueError(f"--max-grad-norm is {bound:g}, must be positive (inf: no clipping)")
    if own.optimizer not in (None, training.optimizer):
        given |= {"optimizer": own.optimizer, "muon_lr": 20 * lr if own.optimizer == "muon" else None}
    if own.average is not None:
        given["average"] = None if own.average == "none" else own.average
    if own.muon_lr is not None:
        given["muon_lr"] = own.muon_lr
    if own.epochs is not None and own.steps is not None:
        raise ValueError(f"--epochs {own.epochs} and --steps {own.steps} are both the length: give one of them")
    if own.epochs is not None:
        given |= {"steps": None, "epochs": dict.fromkeys(tasks, own.epochs)}
    if own.steps is not None:
        given |= {"steps": own.steps, "epochs": {}}
    if (rank := adapters.lora_rank) is not None:
        alpha = 2 * rank if adapters.lora_alpha is None else adapters.lora_alpha
        more = adapters.lora_simulate, adapters.lora_dropout, adapters.lora_save
        given["lora"] = Adapters(rank, alpha, adapters.lora_targets, *more)
    elif adapters != AdapterSettings():
        raise ValueError(
            "--lora-alpha, --lora-targets, --lora-dropout, --lora-save and --lora-simulate require --lora-rank"
        )
    if own.eval_every is not None:
        given["dev"] = Dev(own.eval_every, own.eval_by, own.patience)
    elif own.patience is not None or own.eval_by != "score":
        raise ValueError("--patience and --eval-by require --eval-every")
    if own.decay_matrices:
        given["decay_matrices"] = True
    given |= {"independent_draws": args.process.independent_draws, "compiled": args.process.compile}
    given |= {"shard": args.process.shard}
    return replace(training, dropout=own.dropout, **given)


def command(script: str, launch: Sequence[str]) -> None:
    """The command line of train.py.

    Args: script: its name in messages; launch: words after ``python`` that start it in another process.
    """

    def sweep(options: Sweep) -> None:
        from smat_fn.scripts.train.sweep import sweep as run

        run(options, script=launch)

    def status(options: Status) -> None:
        from smat_fn.scripts.train.sweep import status as show

        show(options)

    commands: dict[str, cli.Command] = {"sweep": (sweep, Sweep), "status": (status, Status)}
    cli.run(script, main, Train, description=__doc__, commands=commands, names=NAMES, shown=shown, first=FIRST)
