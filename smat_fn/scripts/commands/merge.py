"""Merge experts into one model: one merger, or all five of the paper.

    python merge.py all --run runs/smat --search --out runs/smat/merged
    python merge.py ta --run runs/smat --coef 0.3 --out runs/merged
    python merge.py ties --base MODEL --experts EXPERT EXPERT --coef 1 --semantics mergekit --out merged --dry-run
    python merge.py ta --base TEXT --experts VLM@1 EXPERT@0.3 --coef 1 --into VLM --out merged
    python merge.py recipe.yml --out merged
    python merge.py verify merged/ties
    python merge.py export runs/merged/ta --base MODEL --out published
    python merge.py export merged/emr --base MODEL --task TASK --out published
    python merge.py extract-lora --base MODEL --expert EXPERT --rank 16 --out adapter
    python merge.py adapters --experts ADAPTER ADAPTER@0.5 --rank 16 --out adapter
    python merge.py transplant-tokenizer --model MODEL --tokenizer-from OTHER --out transplanted

`merge.py ties --help` explains the main options, --help-all all of them. Each merged model is written to the
folder --out/MERGER, with a model card (README.md). With --search or --calibrate, models are merged in memory and scored
on dev data: the run's, or that of --data. Otherwise, and if --score names a command for the search, folders in Hugging
Face's layout, of any size, are merged chunk by chunk, with bit-identical results. An interrupted merge resumes when
rerun; finished models are verified by hash and kept. Options with "default: preset" take the value of --preset.
"""

import faulthandler
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

from tyro.conf import arg, subcommand

from smat_fn.config import (
    DIFFERENCES,
    MERGERS,
    MORE_MERGERS,
    PRESETS,
    MergerConfig,
    Preset,
    Semantics,
    preset_of,
    resolve,
    with_semantics,
)
from smat_fn.errors import raise_problems
from smat_fn.progress import say
from smat_fn.scripts import cli, outcome
from smat_fn.scripts.cli import NONE
from smat_fn.scripts.merge.commands import COMMANDS
from smat_fn.scripts.merge.search.over import over_of, with_searched
from smat_fn.scripts.merge.settings import check_given
from smat_fn.scripts.merge.words import by_density, by_file, by_glob, refuse_loose, without_foreign


@dataclass(frozen=True)
class All:
    """All five mergers of the paper with the preset's settings."""

    name: ClassVar[str] = "all"
    coef: Annotated[float | None, NONE] = None
    """Coefficient gamma of all mergers but wa, which has none. Without it, --search chooses one for each on dev."""


if TYPE_CHECKING:
    Chosen: TypeAlias = All | MergerConfig
    Few: TypeAlias = All | MergerConfig
else:
    few, more = (
        [Annotated[kind, subcommand(kind.name, description=kind.__doc__)] for kind in kinds]
        for kinds in ((All, *MERGERS), MORE_MERGERS)
    )
    Few, Chosen = Union[tuple(few)], Union[(*few, *more)]  # noqa: UP007 - of a list


NAMES = [All.name, *(config.name for config in (*MERGERS, *MORE_MERGERS))]


OF_MERGEKIT = {
    "linear": "wa, or weighted_average with --weights", "task_arithmetic": "ta", "dare_linear": "dare",
    "della_linear": "della --no-elect --aggregate sum", "breadcrumbs_ties": "breadcrumbs --elect",
    "passthrough": "wa, of a stack of layers as --base and --experts", "yaml": "recipe",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The models to merge."""

    run: Annotated[Path | None, NONE] = None
    """Folder that train.py wrote: its base and all its experts."""
    base: Annotated[Path | None, NONE] = None
    """Base checkpoint, with --experts instead of --run: a folder, a .safetensors or .pt file, or a hub name."""
    experts: Annotated[tuple[Path, ...], NONE] = ()
    """Expert checkpoints or LoRA adapters, with --base instead of --run: paths like that of --base, or NAME=PATH.
    FOLDER@0.5 sets a weight (ta, ties, dare, dare_ties, della, breadcrumbs, magmax, pcb, tsv_merge, iso_c, iso_cts,
    wudi, sce, consensus, opcm, dc_merge, fisher, weighted_average). A[0:3]+B[1:4] stacks layers of A and B."""
    vocabulary: Literal["error", "base-rows", "pad-with-base"] = "error"
    """If embeddings have more or fewer rows than the base's: error; cut to its rows (fewer stay an error); or cut and
    pad with its rows."""
    heads: Literal["error", "keep"] = "error"
    """If an expert's head differs from the base's: error, or merge the rest and write heads/EXPERT.safetensors."""
    partial: bool = False
    """Experts may lack parameters of the base, such as a file without a VAE: those are taken from the base."""
    into: Annotated[str | None, NONE] = None
    """Vision-language model among the inputs (base, or an expert's name): merges its language model with text models
    and copies its other weights."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choice of coefficients and settings."""

    search: bool = False
    """Choose missing coefficients on the dev split, or by --score. An interrupted search resumes when rerun."""
    score: Annotated[str | None, arg(metavar="COMMAND", help_behavior_hint="(default: dev scores)")] = None
    """With --search: score by this command instead. {model} is the merged model's folder, {out} one for its files.
    The score is the last line that it prints, or --score-key; higher is better. It is run without a shell."""
    score_key: Annotated[tuple[str, ...], arg(metavar="[KEY ...]", help_behavior_hint="(default: none)")] = ()
    """Numbers in a JSON file below {out}, e.g. results/TASK/acc,none, instead of that line; their mean is the score."""
    grid: Annotated[tuple[float, ...], arg(help_behavior_hint="(default: 0.1 to 1.0, or the merger's own)")] = ()
    """The coefficients that --search tries."""
    widen: bool = False
    """Extend the grid, by ten values at most, while the best coefficient is its smallest or largest."""
    search_over: Annotated[
        tuple[str, ...], arg(metavar="NAME=VALUE,VALUE ...", help_behavior_hint="(default: none)")
    ] = ()
    """With --search: other options of the merger to choose, with values to try, e.g. ratio=0.2,0.4,0.6 least=1,2. Each
    combination gets its own coefficient; the one with the best score is chosen."""
    trials: int = 0
    """With --search: number of models to try with other weights of the experts, by CMA-ES, after the coefficient."""
    trials_over: tuple[Literal["weights", "densities"], ...] = ("weights",)
    """Numbers of each expert that --trials varies: weights, densities (ties, dare, dare_ties, della, breadcrumbs), or
    both."""
    per_layer: int = 0
    """With --search: number of sweeps over the blocks, each of which gets the coefficient with the best dev score."""
    snapshots: bool = False
    """With --run and --search: also choose among the run's snapshots (train.py --keep-snapshots), one for all tasks."""
    calibrate: bool = False
    """First choose the sparsity of TIES, DARE and DELLA by dev scores, at the paper's reference coefficients."""
    preset: Annotated[
        str | None,
        arg(metavar="{" + ",".join(PRESETS) + "}", help_behavior_hint="(default: that of the experts, else digits)"),
    ] = None
    """Preset of train.py with the mergers' default settings; a merger's own options override it. With --search also the
    suite of experts whose manifests name none."""
    coefs: Annotated[dict[str, float], arg(metavar="[GLOB NUMBER ...]", help_behavior_hint="(default: none)")] = field(
        default_factory=dict
    )
    """Coefficients by glob of parameter names; the first match counts, --coef for the rest. Also --coef GLOB=NUMBER."""
    lines: Annotated[tuple[float, float] | None, NONE] = None
    """Factors of gamma at the first and the last block (LiNeS), e.g. 0.2 1; outside blocks the first applies."""
    semantics: Semantics = "paper"
    """Definition of the merger where implementations differ: the paper's, mergekit's, or the original authors'."""
    seed: int = 0
    """Seed of random masks, and of --trials."""
    data: Annotated[str | None, arg(help_behavior_hint="(default: as they were trained)")] = None
    """With --search: data, as in train.py --data, e.g. for downloaded experts; name each expert after its task."""
    suite_options: Annotated[cli.Values, cli.SUITE] = field(default_factory=dict)
    """With --search: other options of the suite, e.g. device cpu; train.py ft --preset NAME --help-all lists all."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The output folder and its format."""

    out: Path
    """Folder for the merged models."""
    dry_run: bool = False
    """Check all inputs and print the memory, disk space and time of the merge; write nothing."""
    overwrite: bool = False
    """Replace merged models that exist."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of the merged weights; arithmetic is in float32 in any case."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    config_from: Annotated[str | None, NONE] = None
    """Source of the output's config.json and generation_config.json if the experts' files differ: base, an expert's
    name, or a folder."""
    tokenizer_from: Annotated[str | None, NONE] = None
    """Source of the output's tokenizer: base, union, an expert's name, or a folder. Merges embeddings by token."""
    chat_template: Annotated[str | None, NONE] = None
    """Chat template of the output: auto (the most frequent one of the inputs), chatml, llama3, alpaca, mistral, a
    template, or a file with one."""
    plot: Annotated[Path | None, NONE] = None
    """PNG with the experts' updates by block (sizes, cosines, signs) and the dev scores of --search by coefficient."""
    push_to_hub: Annotated[str | None, NONE] = None
    """Upload the merged model to this hub repository, owner/name; it is created if missing. Needs a token."""
    public: bool = False
    """Make a repository that --push-to-hub creates public."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory, threads, device."""

    threads: int = 1
    """CPU threads; in a merge on disk they share --memory-mib."""
    memory_mib: Annotated[int | None, arg(help_behavior_hint="(default: 72, or up to 10272 of a GPU)")] = None
    """Working memory of a merge on disk, in MiB, besides mapped files (with --device cuda: GPU memory);
    --dry-run prints the need."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that merges chunks; some mergers have other last bits on a GPU."""
    part: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="(default: all)")] = None
    """Merge one of N parts, on machines that share the disk of --out; the part that ends last completes the folder."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge experts into one model."""

    merger: Chosen
    inputs: Annotated[Inputs, arg(name="input")]
    choice: Annotated[Choices, arg(name="coefficient")]
    output: Annotated[Outputs, arg(name="output")]
    machine: Annotated[Machine, arg(name="machine")]


@dataclass(frozen=True, kw_only=True)
class Brief(Merge):
    """Merge experts into one model."""

    merger: Few


FIRST = {
    Inputs: ("run", "base", "experts"),
    Choices: ("search",),
    Outputs: ("out", "dry_run", "out_dtype", "overwrite"),
    Machine: (),
}
BY_DATA = "adamerging", "reg_mean_plus"  # mergers among COMMANDS: they read rows, and their options differ
# merges in memory have none
ON_DISK = (
    "coefs", "dry_run", "out_dtype", "shard_size", "memory_mib", "device", "vocabulary", "config_from",
    "tokenizer_from", "chat_template", "push_to_hub", "public", "heads", "part", "into", "partial",
)  # fmt: skip


def shown(words: Sequence[str]) -> list[MergerConfig]:
    """The mergers of the preset that the words of a command name, as ``--help`` shows their options."""
    preset = PRESETS.get(cli.value_of("--preset", words))
    return [] if preset is None else [*preset.mergers.values()]


def main(args: Merge) -> None:
    """Merge by the chosen mergers, in memory or on disk, and print a line for each merged model."""
    if args.choice.preset is not None:
        preset_of(args.choice.preset)
    _check_inputs(args)
    _check_score(args)
    _check_over(args)
    import torch

    from smat_fn.scripts.merge.experts.given import manifests_of, weight_of, weighted
    from smat_fn.scripts.run_folder import all_inputs, sigma_note, trained_by

    torch.set_num_threads(args.machine.threads)
    base, experts = (
        all_inputs(args.inputs.run) if args.inputs.run else (args.inputs.base or Path(), list(args.inputs.experts))
    )
    pairs = [weight_of(expert) for expert in experts]
    experts, weights = [path for path, _ in pairs], [weight for _, weight in pairs]
    manifests = manifests_of(experts)
    preset = preset_of(args.choice.preset or trained_by(manifests))
    configs = weighted(mergers(args, preset), base, experts, weights)
    _check_grid(args.choice, configs, args.merger)
    _check_trials(args, configs[0], base, experts)
    cli.with_named(args.choice.suite_options, data=args.choice.data)
    _check_data(args, preset, configs)
    merge = in_memory if (args.choice.search and args.choice.score is None) or args.choice.calibrate else on_disk
    if not args.output.dry_run:
        found = "expert" + "s" * (len(experts) != 1) + ("" if args.inputs.run is None else f" of {args.inputs.run}")
        say(f"merging {len(experts)} {found} by {', '.join(config.name for config in configs)}")
    if plot := args.output.plot:
        from smat_fn.scripts.analyse.pictures import check_picture, picture, rows_of
        from smat_fn.suites import has_heads

        check_picture(plot)
    if plot and not args.output.dry_run:  # before the merge: experts that cannot be compared are an error at once
        own, tokens = args.inputs, args.output.tokenizer_from
        heads = "keep" if merge is in_memory and has_heads(preset.suite) else own.heads
        rows = rows_of(base, experts, vocabulary=own.vocabulary, heads=heads, tokenizer_from=tokens, method="experts")
    unnamed = args.choice.preset is None and not any(own.get("preset") for own in manifests.values())
    for note in filter(None, [sigma_note(manifests), assumed_note(args, preset) if unnamed else ""]):
        outcome.line(f"note: {note}")
    for line in merge(args, preset, configs, base, experts):
        outcome.line(line)
    if plot and not args.output.dry_run:
        # a merge on disk has no curve, and that of a part perhaps no folder yet
        searched = configs if args.choice.search else []
        picture(plot, rows, [args.output.out / config.name for config in searched])
        outcome.line(f"plot: {plot}")
        outcome.add("written", plot)


def _check_data(args: Merge, preset: Preset, configs: Sequence[MergerConfig]) -> None:
    """Raises: ValueError for options of a search or a calibration without one, and for mergers that have none."""
    from smat_fn.merge import CALIBRATION_COEFS
    from smat_fn.merge.parts.masked import of_all_tasks

    for option, value in {"--data": args.choice.data, "--suite-options": args.choice.suite_options}.items():
        if value and not (args.choice.search or args.choice.calibrate):
            raise ValueError(f"{option} requires --search or --calibrate")
    if args.choice.calibrate and not any(config.name in CALIBRATION_COEFS[preset.family] for config in configs):
        sparse = ", ".join(CALIBRATION_COEFS[preset.family])
        raise ValueError(f"--calibrate chooses the sparsity of {sparse}: leave it out with {args.merger.name}")
    if args.choice.snapshots and not (args.choice.search and args.inputs.run):
        raise ValueError("--snapshots requires --run and --search")
    every = [config.name for config in configs if of_all_tasks(config)]
    if every and (args.choice.search or args.choice.calibrate or args.output.plot):
        raise ValueError(f"{every[0]} for all tasks is not a model for --search, --calibrate or --plot: give --task")


def _check_inputs(args: Merge) -> None:
    """Raises: ValueError for inputs that are given twice or not at all, and that the merger or a plot cannot have."""
    check_given(args.merger.name, args.inputs.run, args.inputs.base, args.inputs.experts)
    if args.inputs.run and args.merger.name == "svc":
        raise ValueError("svc takes a merged model first, --run has none: pass --base BASE --experts MERGED EXPERT...")
    if args.output.plot and (args.inputs.into is not None or args.inputs.partial):  # it compares whole models
        raise ValueError("--plot is not available with --into and --partial: leave it out")


def _check_score(args: Merge) -> None:
    """Raises: ValueError for options of a search by a command without one, and for those that it replaces."""
    choice = args.choice
    if choice.score is None:
        if choice.score_key:
            raise ValueError("--score-key requires --score")
        return
    if not choice.search:
        raise ValueError("--score requires --search")
    of_suites = {
        "--data": choice.data, "--suite-options": choice.suite_options, "--calibrate": choice.calibrate,
        "--snapshots": choice.snapshots, "--per-layer": choice.per_layer,
    }  # fmt: skip
    if given := [option for option, value in of_suites.items() if value]:
        raise ValueError(
            f"{', '.join(given)}: not available with --score, whose command takes the place of dev data: leave it out, "
            "or leave out --score"
        )
    if choice.lines is not None:
        raise ValueError("--lines is not available with --score: leave it out, or give it a number by --coef")
    if args.machine.part is not None:
        raise ValueError("--part is not available with --search: leave it out, or give the coefficient by --coef")


def _check_grid(choice: Choices, configs: Sequence[MergerConfig], merger: Any) -> None:
    """Raises: ValueError for options of a search without one, and where there is nothing to choose or to extend."""
    given = [name for name in ("keep", "drop_prob") if getattr(merger, name, None) is not None]
    if choice.calibrate and given:
        option = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"--calibrate chooses the sparsity, and {option} sets it: leave one out")
    if choice.grid and not choice.search:
        raise ValueError("--grid requires --search")
    if choice.widen and not choice.search:
        raise ValueError("--widen requires --search")
    if choice.widen and len(choice.grid) == 1:
        raise ValueError(f"--widen extends by the steps of --grid, {choice.grid[0]:g} has none: give two or more")
    if choice.per_layer and not (choice.search and choice.per_layer > 0):
        raise ValueError(f"--per-layer {choice.per_layer} requires --search, and must be at least 1")
    if choice.per_layer and len(choice.grid) == 1:
        raise ValueError(f"--per-layer chooses among the values of --grid, {choice.grid[0]:g} is one: give two or more")
    if choice.grid or choice.widen or choice.per_layer:
        without = [f"{config.name} ({getattr(config, 'coef', 'none')})" for config in configs]
        options = "--grid and --widen choose" if choice.grid or choice.widen else "--per-layer chooses"
        if all(getattr(config, "coef", 0.0) is not None for config in configs):
            default = any(getattr(type(config), "coef", None) is not None for config in configs)  # perhaps not given
            way = "; to try others of it: --search-over coef=0.5,1" if default else ""
            raise ValueError(f"{options} a coefficient, here it is given: {', '.join(without)}{way}")


def _check_over(args: Merge) -> None:
    """Raises: ValueError for --search-over without a search, of several mergers, and beside what it cannot be with."""
    choice, merger = args.choice, args.merger
    if not choice.search_over:
        return
    if isinstance(merger, All):
        raise ValueError("--search-over tries the options of one merger: name it in place of all")
    names, problems = list(over_of(type(merger), choice.search_over)), list[str]()
    if not choice.search:
        problems.append("--search-over requires --search")
    if choice.calibrate:
        problems.append("--calibrate and --search-over both choose options: leave one out")
    if choice.snapshots:
        problems.append("--search-over is not available with --snapshots: search one, as --run RUN/snapshots/NUMBER")
    if choice.per_layer:
        problems.append("--search-over is not available with --per-layer: search first, then give the chosen options")
    wanted = DIFFERENCES[choice.semantics].get(merger.name, {})
    problems += [
        f"--semantics {choice.semantics} and --search-over both set {name} of {merger.name}: leave one out"
        for name in names
        if not isinstance(wanted, str) and name in wanted  # a text: the merger has no such semantics
    ]
    raise_problems(problems)


def _check_trials(args: Merge, config: MergerConfig, base: Path, experts: Sequence[Path]) -> None:
    """Raises: ValueError for --trials without a search, without numbers to try, and beside what it cannot be with."""
    from smat_fn.merge import check_trials, numbers_of, over_problems
    from smat_fn.scripts.merge.experts.given import by_name

    choice, merger = args.choice, args.merger
    if not choice.trials:
        if choice.trials_over != ("weights",):
            raise ValueError(f"--trials-over {' '.join(choice.trials_over)} requires --trials")
        return
    if isinstance(merger, All):
        raise ValueError("--trials tries weights of the experts with one merger: name it in place of all")
    problems = [] if choice.search else ["--trials requires --search"]
    problems += over_problems(config, choice.trials_over, "--trials-over", "--trials")
    if choice.snapshots:
        problems.append("--trials is not available with --snapshots: search one, as --run RUN/snapshots/NUMBER")
    if choice.per_layer:
        problems.append("--trials and --per-layer both begin at the best coefficient: leave one out")
    raise_problems(problems)
    names = [name for name, *_ in by_name(base, experts, None)[0]]
    check_trials(numbers_of(config, names, choice.trials_over), choice.trials, "--trials")


def mergers(args: Merge, preset: Preset) -> list[MergerConfig]:
    """The chosen mergers with the settings of the preset, in the definition that --semantics names."""
    return [resolve(config, preset.mergers) for config in _chosen(args)]


def _chosen(args: Merge) -> list[MergerConfig]:
    chosen: list[MergerConfig] = []
    if isinstance(args.merger, All):
        given: dict[str, Any] = {"coef": args.merger.coef}
        chosen += [merger(**(given if hasattr(merger, "coef") else {})) for merger in MERGERS]
    else:
        chosen.append(args.merger)
    return [with_semantics(config, args.choice.semantics) for config in chosen]


def assumed_note(args: Merge, preset: Preset) -> str:
    """A note on omitted settings of digits, the preset where none is named; empty where `lm` has the same."""
    said = []
    for config in _chosen(args):
        own, other = (vars(resolve(config, given.mergers)) for given in (preset, preset_of("lm")))
        chosen = ("keep", "drop_prob") if args.choice.calibrate else over_of(type(config), args.choice.search_over)
        unlike = {name: value for name, value in own.items() if value != other[name] and name not in chosen}
        said += [f"{name} of {config.name} is {value:g} (lm: {other[name]:g})" for name, value in unlike.items()]
    return f"no expert names a preset, so settings are of digits: {', '.join(said)}" if said else ""


def in_memory(
    args: Merge, preset: Preset, configs: list[MergerConfig], base: Path, experts: list[Path]
) -> Iterable[str]:
    """Merge in memory, with --search or --calibrate: coefficients and sparsity are chosen on dev."""
    from smat_fn.merge import CALIBRATION_COEFS
    from smat_fn.scripts.merge import in_memory
    from smat_fn.scripts.merge.search.snapshots import find_snapshots

    parts = args.inputs, args.choice, args.output, args.machine
    given = {own.name: (getattr(part, own.name), own.default) for part in parts for own in fields(part)}
    if extra := [f"--{name.replace('_', '-')}" for name in ON_DISK if given[name][0] not in ({}, given[name][1])]:
        raise ValueError(f"{', '.join(extra)}: not available with --search or --calibrate, which merge in memory")
    asked = in_memory.Request(
        configs,
        base,
        experts,
        args.output.out,
        search=args.choice.search,
        seed=args.choice.seed,
        calibration=CALIBRATION_COEFS[preset.family] if args.choice.calibrate else {},
        overwrite=args.output.overwrite,
        options=cli.with_named(args.choice.suite_options, data=args.choice.data),
        implied={"name": preset.suite, **preset.options} if args.choice.preset else {},
        coefs=args.choice.grid,
        widen=args.choice.widen,
        over=over_of(type(configs[0]), args.choice.search_over),
        snapshots=find_snapshots(args.inputs.run, experts) if args.choice.snapshots and args.inputs.run else {},
        sweeps=args.choice.per_layer,
        trials=args.choice.trials,
        trials_over=args.choice.trials_over,
        lines=args.choice.lines,
    )
    in_memory.merge_run(asked, outcome.line)
    return ()


def on_disk(args: Merge, preset: Preset, configs: list[MergerConfig], base: Path, experts: list[Path]) -> Iterable[str]:
    """Merge folders chunk by chunk, with --score after a search, or plan it by --dry-run; yields printed lines."""
    from smat_fn.folders import chunk_of
    from smat_fn.folders.files import bytes_of
    from smat_fn.scripts.merge import on_disk
    from smat_fn.scripts.recipes.templates import NOTES, TEMPLATES

    template = str(args.output.chat_template)
    known = "auto", *TEMPLATES
    if template not in ("None", *known) and "{" not in template and not Path(template).is_file():
        words = f"must be {', '.join(known)}, a template in Jinja, or a file of one"
        raise ValueError(f"--chat-template is {template!r}: {words}")
    if note := NOTES.get(template):
        outcome.line(f"note: {note}")
    lines, coefs = args.choice.lines, args.choice.coefs
    if args.inputs.into is not None and lines is not None:
        raise ValueError("--lines is not available with --into: leave it out")
    if lines is not None and coefs:
        raise ValueError("--lines and --coefs both give coefficients by parameter: leave one out")
    part = on_disk.chosen_part(args.machine.part, dry_run=args.output.dry_run, push=args.output.push_to_hub)
    order = on_disk.order(
        base,
        experts,
        out=args.output.out,
        part=part,
        based=any(config.based for config in configs),
        seed=args.choice.seed,
        coefs=coefs if lines is None else on_disk.by_depth(base, configs, lines),
        semantics=args.choice.semantics,
        overwrite=args.output.overwrite,
        out_dtype=args.output.out_dtype,
        shard_size=bytes_of(args.output.shard_size),
        chunk=None if args.machine.memory_mib is None else chunk_of(args.machine.memory_mib << 20),
        device=args.machine.device,
        workers=args.machine.threads,
        vocabulary=args.inputs.vocabulary,
        config_from=args.output.config_from,
        tokenizer_from=args.output.tokenizer_from,
        chat_template=TEMPLATES.get(template, args.output.chat_template),
        heads=args.inputs.heads,
        into=args.inputs.into,
        partial=args.inputs.partial,
    )
    own = args.output
    if args.choice.score is not None:
        from smat_fn.scripts.merge.search import outside

        ours = args.choice.grid, args.choice.widen, args.choice.trials, args.choice.trials_over
        over = over_of(type(configs[0]), args.choice.search_over)
        asked = outside.Asked(args.choice.score, args.choice.score_key, *ours, over)
        return outside.run(configs, order, asked, dry_run=own.dry_run, push=own.push_to_hub, public=own.public)
    return on_disk.run(configs, order, dry_run=own.dry_run, push=own.push_to_hub, public=own.public)


def command(script: str, launch: Sequence[str]) -> None:
    """The command line of merge.py; arguments as those of `entry.train`."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a mapped input that is cut while it is read ends the process: say where
    more = {config.name: config.__doc__ or "" for config in MORE_MERGERS}
    more |= {name: COMMANDS[name][1].__doc__ or "" for name in BY_DATA}
    cli.run(
        script, main, Merge, description=__doc__, commands=COMMANDS, names=NAMES, elsewhere=OF_MERGEKIT,
        prepare=lambda words: with_searched(by_glob(by_density(by_file(refuse_loose(without_foreign(words), NAMES))))),
        shown=shown, first=FIRST, brief=(Brief, more),
    )  # fmt: skip
