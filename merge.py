"""Merge experts into one model: one merger, or all five of the paper.

    python merge.py all --run runs/smat --search --out runs/smat/merged
    python merge.py ta --run runs/smat --coef 0.3 --out runs/merged
    python merge.py ties --base MODEL --experts EXPERT EXPERT --coef 1 --semantics mergekit --out merged --dry-run
    python merge.py verify merged/ties
    python merge.py export runs/merged/ta --base MODEL --out published
    python merge.py extract-lora --base MODEL --expert EXPERT --rank 16 --out adapter

`merge.py ties --help` has the merger's own settings as well. Each merged model becomes the folder --out/MERGER with a
card (README.md) beside its weights. With --search or --calibrate models are merged in memory and scored on the dev
data of train.py's experts. Without them any folders in Hugging Face's layout are merged chunk by chunk, whatever their
size: to the same bits, and a merge that was ended, called again, goes on; what is done already is hashed again and
stays. Options with "default: preset" take the value of --preset.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg, subcommand

from smat_fn.config import (
    MERGERS,
    Breadcrumbs,
    Dare,
    DareTies,
    Della,
    MagMax,
    MergerConfig,
    ModelStock,
    Preset,
    Semantics,
    Slerp,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
    preset_of,
    resolve,
    with_semantics,
)
from smat_fn.scripts import cli
from smat_fn.scripts.merge.globs import by_glob

NONE = arg(help_behavior_hint="(default: none)")


@dataclass(frozen=True)
class All:
    """All five mergers of the paper with the preset's settings."""

    name: ClassVar[str] = "all"
    coef: Annotated[float | None, NONE] = None
    """gamma of all but wa, which has none; left open, --search chooses one for each on dev."""


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
        | Annotated[WeightedAverage, subcommand("weighted_average", description=WeightedAverage.__doc__)]
        | Annotated[WiseFt, subcommand("wise_ft", description=WiseFt.__doc__)]
        | Annotated[Slerp, subcommand("slerp", description=Slerp.__doc__)]
        | Annotated[ModelStock, subcommand("model_stock", description=ModelStock.__doc__)]
        | Annotated[DareTies, subcommand("dare_ties", description=DareTies.__doc__)]
        | Annotated[Breadcrumbs, subcommand("breadcrumbs", description=Breadcrumbs.__doc__)]
        | Annotated[MagMax, subcommand("magmax", description=MagMax.__doc__)]
        | Annotated[TsvMerge, subcommand("tsv_merge", description=TsvMerge.__doc__)]
    )
    out: Path
    """Folder for the merged models."""
    run: Annotated[Path | None, NONE] = None
    """Folder that train.py wrote: its base and all its experts."""
    base: Annotated[Path | None, NONE] = None
    """Base checkpoint, with --experts instead of --run: a folder, or a hub name."""
    experts: Annotated[tuple[Path, ...], NONE] = ()
    """Expert checkpoints or LoRA adapters, with --base instead of --run: folders, or hub names, or NAME=one of them."""
    search: bool = False
    """Choose coefficients that are left out by dev scores. Ended and called again, it goes on."""
    grid: Annotated[tuple[float, ...], arg(help_behavior_hint="(default: 0.1 to 1.0)")] = ()
    """The coefficients that --search tries."""
    calibrate: bool = False
    """First choose the sparsity of TIES, DARE and DELLA by dev scores, at the paper's reference coefficients."""
    coefs: Annotated[dict[str, float], arg(metavar="[GLOB NUMBER ...]", help_behavior_hint="(default: none)")] = field(
        default_factory=dict
    )
    """Coefficients by glob of leaf names, the first that matches, or each as --coef GLOB=NUMBER; --coef for others."""
    semantics: Semantics = "paper"
    """Whose definition, where they differ: the paper's, mergekit's, or that of the merger's own source."""
    dry_run: bool = False
    """Check everything, print memory, disk and time that a merge needs, write nothing."""
    preset: Annotated[str | None, arg(help_behavior_hint="(default: that of the experts, else digits)")] = None
    """Settings of mergers, by the name of a preset of train.py. A merger's own options override them."""
    seed: int = 0
    """Seed of random masks."""
    overwrite: bool = False
    """Replace merged models that exist."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of the merged weights; arithmetic is in float32 in any case."""
    shard_size: str = "5GB"
    """Largest file of weights, as 500MB or 5GB."""
    memory_mib: int = 72
    """Working memory of a merge without --search, in MiB, beside mapped files; --dry-run says what it needs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where chunks are merged; cuda has not been tried on a device, and may round divisions otherwise."""
    vocabulary: Literal["error", "base-rows", "pad-with-base"] = "error"
    """Experts with another number of embedding rows: refuse, cut, or cut and pad with base's rows."""
    suite_options: Annotated[
        dict[str, bool | int | float | str | None],
        arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: as they were trained)"),
    ] = field(default_factory=dict)
    """With --search, other options of model and data, as device cpu; train.py --preset NAME --help lists them."""
    threads: int = 1
    """CPU threads; without --search they share --memory-mib."""


@dataclass(frozen=True)
class Verify:
    """Hash the files of a merged model, and those that it was made from, again; list every one that has changed."""

    path: Positional[Path]
    """Its folder, or its card."""


@dataclass(frozen=True)
class Export:
    """Write an expert or a merged model as the whole model it belongs to, for from_pretrained: base with its leaves."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of an expert of train.py, of a merged model, or of a LoRA adapter."""
    base: Path
    """The model that it was trained from: a folder, or a hub name."""
    out: Path
    """Folder for the whole model."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of all weights; same: base's."""
    shard_size: str = "5GB"
    """Largest file of weights, as 500MB or 5GB."""
    overwrite: bool = False
    """Replace a model that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class ExtractLora:
    """Write what an expert changed in base as a LoRA adapter for peft, as near as its rank allows."""

    base: Path
    """Base: a folder, or a hub name."""
    expert: Path
    """Fine-tuned model: a folder, or a hub name."""
    out: Path
    """Folder for the adapter."""
    rank: int
    """Rank of the adapter, at most."""
    overwrite: bool = False
    """Replace an adapter that exists."""
    threads: int = 1
    """CPU threads."""


DONE = "done before, its files and its inputs are as its card says"
# merges in memory have none
ON_DISK = "coefs", "dry_run", "out_dtype", "shard_size", "memory_mib", "device", "vocabulary"


def main(args: Merge) -> None:
    if args.preset is not None:
        preset_of(args.preset)
    given = args.base is not None, bool(args.experts)
    if any(given) if args.run else not all(given):
        raise ValueError("give either --run FOLDER of train.py, or --base FOLDER with --experts FOLDER...")
    import torch

    from smat_fn.scripts.merge.inputs import find_inputs, manifests_of, trained_by

    torch.set_num_threads(args.threads)
    base, experts = find_inputs(args.run) if args.run else (args.base or Path(), list(args.experts))
    preset = preset_of(args.preset or trained_by(manifests_of(experts)))
    configs = mergers(args, preset)
    if args.grid and not args.search:
        raise ValueError("--grid is of a search: say --search")
    if args.search or args.calibrate:
        in_memory(args, preset, configs, base, experts)
    else:
        on_disk(args, configs, base, experts)


def mergers(args: Merge, preset: Preset) -> list[MergerConfig]:
    chosen: list[MergerConfig] = []
    if isinstance(args.merger, All):
        given: dict[str, Any] = {"coef": args.merger.coef}
        chosen += [merger(**(given if hasattr(merger, "coef") else {})) for merger in MERGERS]
    else:
        chosen.append(args.merger)
    return [resolve(with_semantics(config, args.semantics), preset.mergers) for config in chosen]


def in_memory(args: Merge, preset: Preset, configs: list[MergerConfig], base: Path, experts: list[Path]) -> None:
    from smat_fn.merge import CALIBRATION_COEFS
    from smat_fn.scripts.merge import merging

    defaults: dict[str, object] = {f.name: {} if f.name == "coefs" else f.default for f in fields(Merge)}
    if extra := [f"--{name.replace('_', '-')}" for name in ON_DISK if getattr(args, name) != defaults[name]]:
        raise ValueError(f"{', '.join(extra)}: not with --search or --calibrate, which merge in memory")
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
        coefs=args.grid,
    )
    for folder, model in merged.items():
        coef = "" if model.coef is None else f", coef {model.coef:g}"
        score = f", dev {fmean(model.dev.values()):.2f}" if model.dev else ""
        print(f"{'kept' if model.kept else 'merged'}: {folder}{coef}{score}")


def on_disk(args: Merge, configs: list[MergerConfig], base: Path, experts: list[Path]) -> None:
    import torch

    from smat_fn.folders import chunk_of
    from smat_fn.scripts.merge import streaming
    from smat_fn.scripts.merge.streaming_card import plan_text, rounding

    order = streaming.order(
        base,
        experts,
        out=args.out,
        seed=args.seed,
        coefs=args.coefs,
        semantics=args.semantics,
        overwrite=args.overwrite,
        out_dtype=args.out_dtype,
        shard_size=streaming.bytes_of(args.shard_size),
        chunk=chunk_of(args.memory_mib << 20),
        device=args.device,
        workers=args.threads,
        vocabulary=args.vocabulary,
    )
    torch.set_num_threads(1)  # of each worker
    if args.dry_run:
        for folder, plan in streaming.plan_run(configs, order).items():
            print(f"{folder}: {DONE}" if plan is None else plan_text(folder, plan))
        return
    for config, (folder, report) in zip(configs, streaming.stream_run(configs, order), strict=True):
        if report is None:
            print(f"kept: {folder}: {DONE}")
            continue
        coef = getattr(config, "coef", None)
        print(f"merged: {folder}{'' if coef is None else f', coef {coef:g}'}, {rounding(report.rounding_ratio)}")
        for note in report.notes:
            print(f"note: {note}")


def verify(args: Verify) -> None:
    from smat_fn.scripts.merge import streaming

    count, problems = streaming.verify(args.path)
    for problem in problems:
        print(problem)
    if problems:
        raise ValueError(f"{len(problems)} of {count} files are not those that {args.path} names")
    print(f"{count} files are those that {args.path} names")


def export(args: Export) -> None:
    import torch

    from smat_fn.scripts.merge import exporting, streaming

    torch.set_num_threads(1)  # of each worker
    report = exporting.export(
        args.model,
        args.base,
        args.out,
        out_dtype=args.out_dtype,
        shard_size=streaming.bytes_of(args.shard_size),
        overwrite=args.overwrite,
        workers=args.threads,
    )
    rounded = f"rounding is {report.rounding_ratio:.2%} of the change" if report.rounding_ratio else "bit for bit"
    print(f"exported: {args.out}, {report.bytes / 1e6:.1f} MB, {rounded}")
    for note in report.notes:
        print(f"note: {note}")


def extract(args: ExtractLora) -> None:
    import torch

    from smat_fn.folders import extract_lora

    torch.set_num_threads(args.threads)
    made = extract_lora(args.base, args.expert, args.out, rank=args.rank, overwrite=args.overwrite)
    for path, error in made.errors.items():
        print(f"{path}: relative error {error:.2e}" + (", stored whole" if path in made.whole else ""))
    if made.left_out:
        print(f"left out, an adapter cannot hold them: {', '.join(made.left_out)}")
    print(f"extracted: {args.out}, rank {args.rank}, {made.bytes / 1e6:.1f} MB, relative error {made.error:.2e} in all")


if __name__ == "__main__":
    sys.argv[1:] = by_glob(sys.argv[1:])
    commands: dict[str, cli.Command] = {
        "verify": (verify, Verify),
        "export": (export, Export),
        "extract-lora": (extract, ExtractLora),
    }
    cli.run("merge.py", main, Merge, description=__doc__, commands=commands)
