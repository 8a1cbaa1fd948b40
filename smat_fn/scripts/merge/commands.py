"""The command line of merge.py beside mergers: its other subcommands, and --coef GLOB=NUMBER. No torch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from .. import outcome
from ..cli import Command

if TYPE_CHECKING:
    from ...folders import Extracted


@dataclass(frozen=True)
class Verify:
    """Hash a merged model's files and its inputs again, and list every file that has changed."""

    path: Positional[Path]
    """Folder of the merged model, or its README.md."""


def verify(args: Verify) -> None:
    """Print what has changed since the merge, or how many files are as they were."""
    from .finished import verify

    count, problems = verify(args.path)
    outcome.add("verified", {"path": args.path, "files": count, "changed": len(problems)})
    for problem in problems:
        print(problem)
        outcome.add("problems", problem)
    if problems:
        raise ValueError(f"{len(problems)} of {count} files differ from the hashes stored in {args.path}")
    print(f"{count} {'file has the hash' if count == 1 else 'files have the hashes'} stored in {args.path}")


@dataclass(frozen=True)
class Export:
    """Write an expert or merged model as a complete model for from_pretrained: base with its parameters replaced."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of an expert of train.py, of a merged model, or of a LoRA adapter."""
    base: Path
    """The model that it was trained from: a folder, or a hub name."""
    out: Path
    """Folder for the whole model."""
    task: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """Task to export of a folder that emr or tall_mask wrote for all tasks; --base is the base of that merge."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of all weights; same: base's."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    overwrite: bool = False
    """Replace a model that exists."""
    threads: int = 1
    """CPU threads."""


def export(args: Export) -> None:
    """Write the whole model and print its size."""
    import torch

    from ...folders.files import size_text
    from .exporting import export
    from .streaming import bytes_of

    torch.set_num_threads(1)  # of each worker
    report = export(
        args.model,
        args.base,
        args.out,
        task=args.task,
        out_dtype=args.out_dtype,
        shard_size=bytes_of(args.shard_size),
        overwrite=args.overwrite,
        workers=args.threads,
    )
    rounded = f"rounding is {report.rounding_ratio:.2%} of the change" if report.rounding_ratio else "bit for bit"
    outcome.add("written", args.out)
    print(f"exported: {args.out}, {size_text(report.bytes)}, {rounded}")
    for note in report.notes:
        print(f"note: {note}")


@dataclass(frozen=True)
class ExtractLora:
    """Extract a LoRA adapter for peft from a fine-tuned model: a truncated SVD of expert - base."""

    base: Path
    """Base: a folder, or a hub name."""
    expert: Path
    """Fine-tuned model: a folder, or a hub name."""
    out: Path
    """Folder for the adapter."""
    rank: int
    """Maximum rank of the adapter."""
    overwrite: bool = False
    """Replace an adapter that exists."""
    threads: int = 1
    """CPU threads."""


def extract_lora(args: ExtractLora) -> None:
    """Write the adapter and print its errors."""
    import torch

    from ...folders import extract_lora
    from ...folders.files import size_text
    from .inputs import manifest_of

    torch.set_num_threads(args.threads)
    try:
        made = extract_lora(args.base, args.expert, args.out, rank=args.rank, overwrite=args.overwrite)
    except ValueError as error:
        if "leaf" not in str(error) or not manifest_of(args.expert):
            raise
        way = f"merge.py export {args.expert} --base {args.base} --out FOLDER, then pass --expert FOLDER"
        raise ValueError(
            f"{args.expert} has the names of train.py, not those of {args.base}: {way} ({error})"
        ) from error
    for line in summary(made):
        print(line)
    outcome.add("written", args.out)
    print(f"extracted: {args.out}, rank {args.rank}, {size_text(made.bytes)}, relative error {made.error:.2e} in all")


def summary(made: "Extracted") -> Iterator[str]:
    """Lines that summarise an extracted adapter, one for each kind of leaf."""
    beside = {*made.whole, *made.left_out}
    low = sorted((error, path) for path, error in made.errors.items() if path not in beside)
    if low:
        (worst, path), middle = low[-1], low[len(low) // 2][0]
        yield f"{_count(low, 'matrix', 'matrices')}: relative error {middle:.2e} in the middle, {worst:.2e} at {path}"
    if made.whole:
        yield f"{_count(made.whole, 'changed leaf', 'changed leaves')} stored whole: {_some(made.whole)}"
    if made.left_out:
        what = _count(made.left_out, "changed leaf", "changed leaves")
        yield f"{what} left out, an adapter cannot hold them: {_some(made.left_out)}"
    if made.tied:
        yield f"{_some(made.tied)}: other modules share it, peft changes them too with merge_and_unload alone"


@dataclass(frozen=True)
class MergeAdapters:
    """Merge LoRA adapters of one base into one adapter, without reading the base."""

    experts: tuple[Path, ...]
    """Adapters: folders, or hub names, or NAME=one of them; FOLDER@0.5 sets a weight."""
    out: Path
    """Folder for the adapter."""
    method: Literal[
        "linear",
        "magnitude_prune",
        "ties",
        "dare_linear",
        "dare_ties",
        "cat",
        "svd",
        "magnitude_prune_svd",
        "ties_svd",
        "dare_linear_svd",
        "dare_ties_svd",
        "knots",
        "core_space",
    ] = "svd"
    """A combination of PEFT's add_weighted_adapter, or KnOTS or Core Space with --merger."""
    rank: Annotated[int | None, arg(help_behavior_hint="(default: as it comes, with svd the adapters' largest)")] = None
    """Maximum rank of the adapter."""
    density: Annotated[float | None, arg(help_behavior_hint="(default: none)")] = None
    """Share of entries that is kept; required by magnitude_prune, ties and dare."""
    majority: Literal["total", "frequency"] = "total"
    """With ties: elect the sign of the sum of entries (total), or of the sum of their signs (frequency)."""
    merger: str = "ties"
    """With knots and core_space: a merger with a base, as merge.py names it."""
    options: Annotated[
        dict[str, bool | int | float | str],
        arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: those of --preset)"),
    ] = field(default_factory=dict)
    """Options of --merger, e.g. keep 0.2 aggregate mean; merge.py MERGER --help lists them."""
    coef: float = 1.0
    """With knots and core_space: gamma."""
    preset: str = "digits"
    """Preset of train.py for merger settings that --options does not set."""
    base: Annotated[str | None, arg(help_behavior_hint="(default: the one that all adapters name)")] = None
    """Base of the adapters (a folder or a hub name), written to the adapter's configuration."""
    seed: int = 0
    """Seed of random masks."""
    overwrite: bool = False
    """Replace an adapter that exists."""
    threads: int = 1
    """CPU threads."""


def merge_adapters(args: MergeAdapters) -> None:
    """Write the adapter and print its ranks."""
    import torch

    from ...folders.files import size_text
    from .adapters import merge

    torch.set_num_threads(args.threads)
    made = merge(args)
    ranks = sorted(set(made.ranks.values()))
    what = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    if made.partial:
        lacking = _count(made.partial, "module", "modules")
        print(f"note: {lacking} of some adapters alone, merged from those: {_some(made.partial)}")
    outcome.add("merged", {"folder": args.out})
    print(f"merged: {args.out}, {_count(made.ranks, 'module', 'modules')} of {what}, {size_text(made.bytes)}")


def _count(things: Collection[object], one: str, several: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else several}"


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


@dataclass(frozen=True)
class FromRecipe:
    """Merge by a recipe: mergekit's YAML, or the recipe.yml of a merged model. `merge.py FILE.yml` is the same."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """YAML file."""
    out: Path
    """Folder for the merged model, which becomes --out/MERGER."""
    seed: int | None = None
    """Seed of random masks; preset: the file's, else 0."""
    dry_run: bool = False
    """Check all inputs and print the memory, disk space and time of the merge; write nothing."""
    overwrite: bool = False
    """Replace a merged model that exists."""
    shard_size: str | None = None
    """Maximum size of a weight file, e.g. 500MB or 5GB; preset: the file's, else 5GB."""
    memory_mib: int = 72
    """Working memory, in MiB, besides mapped files; --dry-run prints the need."""
    threads: int = 1
    """CPU threads; they share --memory-mib."""
    part: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="(default: all)")] = None
    """Merge one of N parts, on machines that share the disk of --out; the part that ends last completes the folder."""
    push_to_hub: str | None = None
    """Upload the merged model to this hub repository, owner/name; it is created if missing. Needs a token."""
    public: bool = False
    """Make a repository that --push-to-hub creates public."""


def from_recipe(args: FromRecipe) -> None:
    """Merge, and print a summary."""
    import torch

    from ...folders import chunk_of
    from . import streaming
    from .pushing import pushed
    from .recipe import load

    part = streaming.chosen_part(args.part, dry_run=args.dry_run, push=args.push_to_hub)
    found = load(args.file)
    given = dict(found.options)
    seed = given.pop("seed", 0)
    seed = seed if args.seed is None else args.seed
    if args.shard_size is not None:
        given["shard_size"] = streaming.bytes_of(args.shard_size)
    coefs = found.coef if isinstance(found.coef, Mapping) else {} if found.coef is None else {"*": found.coef}
    order = streaming.order(
        found.base,
        found.experts,
        out=args.out,
        seed=seed,
        coefs=coefs,
        overwrite=args.overwrite,
        chunk=chunk_of(args.memory_mib << 20),
        workers=args.threads,
        part=part,
        **given,
    )
    torch.set_num_threads(1)  # of each worker
    for note in found.notes:
        print(f"note: {note}")
    if args.dry_run:
        for planned in streaming.plan_run([found.config], order).items():
            print(streaming.plan_text(*planned))
        return
    with_push = pushed(args.push_to_hub, public=args.public, count=1)
    for merged in streaming.stream_run([found.config], order):
        print("\n".join([*streaming.summary(found.config, *merged, coefs), *with_push(merged[0])]))


@dataclass(frozen=True)
class Moe:
    """Make a mixture of experts (Mixtral) from Llama or Mistral models, by mergekit-moe's YAML."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """YAML file: base_model, experts with source_model and prompts, gate_mode, dtype, experts_per_token."""
    out: Path
    """Folder for the model."""
    seed: int | None = None
    """Seed of a random router; preset: the file's, else 0."""
    overwrite: bool = False
    """Replace a model that exists."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    memory_mib: int = 72
    """Working memory, in MiB, besides mapped files; gate_mode hidden holds base in memory first."""
    threads: int = 1
    """CPU threads; they share --memory-mib."""


def by_file(words: list[str]) -> list[str]:
    """``FILE.yml`` as the first word is ``recipe FILE.yml``."""
    return ["recipe", *words] if words and words[0].endswith((".yml", ".yaml")) else words


@dataclass(frozen=True)
class Statistics:
    """Compute statistics for `fisher` and `reg_mean` on each expert's own rows; store them beside its weights."""

    experts: Annotated[Positional[tuple[Path, ...]], arg(metavar="EXPERT", help_behavior_hint="(one or more)")]
    """Folders of experts, or run folders of train.py (all their experts)."""
    kinds: tuple[Literal["fisher", "gram"], ...] = ("fisher",)
    """fisher: squared gradients; gram: products of the inputs of linear layers, (inputs)^2 numbers a layer."""
    rows: int = 256
    """Rows of each task, rounded up to whole batches."""
    split: Literal["train", "dev"] = "train"
    """Split of the rows; test is not allowed."""
    labels: Annotated[
        Literal["model", "data"] | None, arg(help_behavior_hint="(default: model of classifiers, else data)")
    ] = None
    """For fisher: labels sampled from the expert's predictions (model), or the rows' own (data: empirical Fisher)."""
    seed: int = 0
    """Seed that selects rows and samples labels."""
    base: Annotated[Path | None, arg(help_behavior_hint="(default: that of the run)")] = None
    """Base of the experts."""
    suite_options: Annotated[
        dict[str, bool | int | float | str | None],
        arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: as they were trained)"),
    ] = field(default_factory=dict)
    """Other options of model and data; experts that train.py did not make need them: name NAME model ... data ..."""
    overwrite: bool = False
    """Replace statistics of other rows or settings."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class OfRun:
    """Options of mergers that look at rows."""

    run: Path
    """Folder that train.py wrote: its base and all its experts."""
    out: Path
    """Folder for the merged model, which becomes --out/MERGER."""
    seed: int = 0
    """Seed of the order of rows."""
    suite_options: Annotated[
        dict[str, bool | int | float | str | None],
        arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: as they were trained)"),
    ] = field(default_factory=dict)
    """Other options of model and data."""
    overwrite: bool = False
    """Replace a merged model that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class AdaMerging(OfRun):
    """AdaMerging: coefficients that minimise the merged classifier's prediction entropy on unlabelled dev rows."""

    layer_wise: bool = True
    """One coefficient per parameter tensor and expert; with --no-layer-wise one per expert."""
    steps: int = 500
    """Steps of Adam."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    start: float = 0.3
    """Initial value of all coefficients."""
    batch: int = 16
    """Rows of each task in a step."""


@dataclass(frozen=True)
class RegMeanPlus(OfRun):
    """RegMean++: RegMean block by block, with input statistics from the blocks already merged."""

    scale: float = 0.9
    """Factor of the off-diagonal entries of the Gram matrices."""
    rows: int = 256
    """Rows of each task, rounded up to whole batches."""
    split: Literal["train", "dev"] = "train"
    """Split of the rows; test is not allowed."""


def printing(module: str, name: str) -> Callable[[Any], None]:
    """The command that prints the lines which a function of a module here yields for its options."""

    def run(args: Any) -> None:
        import torch

        torch.set_num_threads(args.threads)
        for line in getattr(import_module(module, __package__), name)(args):
            print(line, flush=True)

    return run


COMMANDS: dict[str, Command] = {
    "verify": (verify, Verify),
    "recipe": (from_recipe, FromRecipe),
    "export": (export, Export),
    "extract-lora": (extract_lora, ExtractLora),
    "statistics": (printing(".statistics", "make_statistics"), Statistics),
    "adamerging": (printing(".by_data", "adapt"), AdaMerging),
    "reg_mean_plus": (printing(".by_data", "regress"), RegMeanPlus),
    "adapters": (merge_adapters, MergeAdapters),
    "moe": (printing(".moe", "make"), Moe),
}


def by_density(words: list[str]) -> list[str]:
    """``--density``, the name in mergekit and PEFT, as --keep; adapters and sce have a --density of their own."""
    if "ties" not in words or words[0] in ("adapters", "sce"):
        return words
    return [word.replace("--density", "--keep", 1) if word.partition("=")[0] == "--density" else word for word in words]


def by_glob(words: list[str]) -> list[str]:
    """Every ``--coef GLOB=NUMBER`` as words of --coefs."""
    left, rules, rest = list[str](), list[str](), iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        given = [option, value] if value else [word, *([next(rest, "")] if word == "--coef" else [])]
        if given[0] == "--coef" and "=" in given[-1]:
            rules += given[-1].rpartition("=")[::2]
        else:
            left += [word] if value else given
    if not rules:
        return words
    place = left.index("--coefs") if "--coefs" in left else len(left)
    return [*left[:place], "--coefs", *rules, *left[place + 1 :]]
