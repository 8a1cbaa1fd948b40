"""Options of merge.py's subcommands beside mergers. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..cli import NONE, SUITE, Values


def check_given(merger: str, run: Path | None, base: Path | None, experts: Sequence[Path]) -> None:
    """Raises: ValueError for inputs of a merge that are given twice or not at all."""
    given = base is not None, bool(experts)
    if any(given) if run else not all(given):
        raise ValueError(
            "give either --run FOLDER of train.py, or --base FOLDER with --experts FOLDER..."
            + (_base_of(merger, experts) if given == (False, True) and not run else "")
        )


def _base_of(merger: str, experts: Sequence[Path]) -> str:
    """A way out for a command line without --base: the base that experts name, or any expert."""
    from ...merge.registry import BASELESS
    from .experts.given import origins

    if merger in BASELESS:
        return f"; {merger} takes configuration and tokenizer from --base: give any of the experts"
    names = origins(experts)
    named = f"by their files {' or '.join(names)}" if names else "missing"
    return f"; the base, which the experts were trained from, is {named}"


@dataclass(frozen=True)
class Verify:
    """Hash a merged model's files and its inputs again, and list every file that has changed."""

    path: Positional[Path]
    """Folder of the merged model, or its README.md."""


@dataclass(frozen=True)
class Export:
    """Write an expert or merged model as a complete model for from_pretrained: base with its parameters replaced."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of an expert of train.py, of a merged model, or of a LoRA adapter."""
    base: Path
    """The model that it was trained from: a folder, or a hub name."""
    out: Path
    """Folder for the whole model."""
    task: Annotated[str | None, NONE] = None
    """Task to export of a folder that emr or tall_mask wrote for all tasks; --base is the base of that merge."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of all weights; same: the base's."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    vocabulary: Literal["error", "base-rows", "pad-with-base"] = "error"
    """If embeddings have more or fewer rows than base's: error; cut to its rows (fewer stay an error); or cut and pad
    with its rows."""
    tokenizer_from: Annotated[str | None, NONE] = None
    """Tokenizer to write if MODEL is an adapter with added tokens: base, union, or a folder, such as MODEL."""
    overwrite: bool = False
    """Replace a model that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class ExtractLora:
    """Extract a LoRA adapter for peft from a fine-tuned model: a truncated SVD of expert - base."""

    base: Path
    """Base: a folder, or a hub name."""
    expert: Path
    """Fine-tuned model: a folder, or a hub name."""
    out: Path
    """Folder for the adapter."""
    rank: Annotated[int | None, arg(help_behavior_hint="(default: none; required without --energy)")] = None
    """Maximum rank of the adapter."""
    energy: Annotated[float | None, NONE] = None
    """Use for each matrix the smallest rank that keeps this share of the squared norm, e.g. 0.95; at most --rank."""
    linear_only: bool = False
    """Store only low-rank factors (of linear layers and embeddings), no whole modules, which vLLM does not serve; other
    changes are left out."""
    only: Annotated[tuple[str, ...], arg(metavar="GLOB ...", help_behavior_hint="(default: all)")] = ()
    """Globs over parameter names; all other parameters keep the base's values."""
    skip: Annotated[tuple[str, ...], arg(metavar="GLOB ...", help_behavior_hint="(default: none)")] = ()
    """Globs over parameters that keep the base's values, even if --only matches them."""
    overwrite: bool = False
    """Replace an adapter that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class TransplantTokenizer:
    """Give a model the tokenizer of another model; embeddings of tokens that it lacks are approximated."""

    model: Path
    """Model: a folder, or a hub name."""
    tokenizer_from: Path
    """Model with the new tokenizer: a folder, or a hub name. Methods subtokens and mean need no weights there."""
    out: Path
    """Folder for the model with the new tokenizer."""
    method: Literal["omp-centred", "omp", "nearest", "subtokens", "mean"] = "omp-centred"
    """Row of a token that the model lacks. omp: orthogonal matching pursuit, the sum of --k rows that approximates the
    token's row in the other model, of this model's rows; omp-centred: the same of differences from the mean rows;
    nearest: mean of the --k rows nearest to it there, weighted by cosine; subtokens: mean of the rows of the tokens
    that its text is split into; mean: mean of all rows."""
    k: int = 64
    """With omp, omp-centred and nearest: number of tokens of both models in a sum."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that searches for these tokens."""
    dry_run: bool = False
    """Check all inputs and print tokens, disk space and operations; write nothing."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    overwrite: bool = False
    """Replace a model that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class MergeAdapters:
    """Merge LoRA adapters of one base, folders of PEFT or files of another tool, into one; base is not read."""

    experts: tuple[Path, ...]
    """Adapters: folders, hub names, LoRA files or NAME=PATH. PATH@0.5 sets a weight, else 1; changes are added."""
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
    """A combination type of PEFT's add_weighted_adapter, or knots or core_space with --merger."""
    rank: Annotated[int | None, arg(help_behavior_hint="(default: the method's; svd: the adapters' largest)")] = None
    """Maximum rank of the adapter."""
    density: Annotated[float | None, NONE] = None
    """Share of entries that is kept; required by magnitude_prune, ties and dare."""
    majority: Literal["total", "frequency"] = "total"
    """With ties: elect the sign of the sum of entries (total), or of the sum of their signs (frequency)."""
    merger: str = "ties"
    """With knots and core_space: a merger with a base and without statistics, as merge.py names it."""
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


@dataclass(frozen=True)
class FromRecipe:
    """Merge by a recipe: mergekit's YAML, or the recipe.yml of a merged model. `merge.py FILE.yml` is the same."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """YAML file; several merges are separated by ---, as of mergekit-multi."""
    out: Path
    """Folder for the merged model, which becomes --out/MERGER; merges with a name go to --out/merges/NAME."""
    seed: Annotated[int | None, arg(help_behavior_hint="(default: the file's, else 0)")] = None
    """Seed of random masks."""
    dry_run: bool = False
    """Check all inputs and print the memory, disk space and time of the merge; write nothing."""
    overwrite: bool = False
    """Replace a merged model that exists."""
    shard_size: Annotated[str | None, arg(help_behavior_hint="(default: the file's, else 5GB)")] = None
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    vocabulary: Annotated[
        Literal["error", "base-rows", "pad-with-base"] | None,
        arg(help_behavior_hint="(default: the file's, else error)"),
    ] = None
    """If embeddings have more or fewer rows than the base's: error; cut to its rows (fewer stay an error); or cut and
    pad with its rows."""
    config_from: Annotated[str | None, arg(help_behavior_hint="(default: the file's, else none)")] = None
    """Source of config.json if the models' files differ: base, a model's name, or a folder."""
    heads: Annotated[Literal["error", "keep"] | None, arg(help_behavior_hint="(default: the file's, else error)")] = (
        None
    )
    """If a model's head differs from the base's: error, or merge the rest and write heads/MODEL.safetensors."""
    into: Annotated[str | None, arg(help_behavior_hint="(default: the file's, else none)")] = None
    """Vision-language model among the models (base, or a model's name): merges its language model with text models and
    copies its other weights."""
    partial: bool = False
    """Models may lack parameters of the base, such as a file without a VAE: those are taken from the base."""
    memory_mib: Annotated[int | None, arg(help_behavior_hint="(default: 72, or up to 10272 of a GPU)")] = None
    """Working memory, in MiB, besides mapped files (with --device cuda: GPU memory); --dry-run prints the need."""
    device: Annotated[Literal["cpu", "cuda"] | None, arg(help_behavior_hint="(default: the file's, else cpu)")] = None
    """Device that merges chunks; some mergers have other last bits on a GPU."""
    threads: int = 1
    """CPU threads; they share --memory-mib."""
    part: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="(default: all)")] = None
    """Merge one of N parts, on machines that share the disk of --out; the part that ends last completes the folder."""
    push_to_hub: Annotated[str | None, NONE] = None
    """Upload the merged model to this hub repository, owner/name; it is created if missing. Needs a token."""
    public: bool = False
    """Make a repository that --push-to-hub creates public."""


@dataclass(frozen=True)
class Moe:
    """Make a mixture of experts from Llama, Mistral, Qwen2 or Qwen3 models, by mergekit-moe's YAML."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """YAML file: base_model, experts with source_model and prompts, gate_mode, dtype, experts_per_token."""
    out: Path
    """Folder for the model."""
    seed: Annotated[int | None, arg(help_behavior_hint="(default: the file's, else 0)")] = None
    """Seed of a random router, and of noise."""
    overwrite: bool = False
    """Replace a model that exists."""
    shard_size: str = "5GB"
    """Maximum size of a weight file, e.g. 500MB or 5GB."""
    memory_mib: int = 72
    """Working memory, in MiB, besides mapped files; gate_mode hidden first loads the whole base, beyond that."""
    threads: int = 1
    """CPU threads; they share --memory-mib."""


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
    suite_options: Annotated[Values, SUITE] = field(default_factory=dict)
    """Options of model and data. Experts of other tools need name trace (or short_text, clip8) model BASE data DATA."""
    overwrite: bool = False
    """Replace statistics of other rows or settings."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True, kw_only=True)
class ByData:
    """Options of mergers that read rows."""

    run: Annotated[Path | None, NONE] = None
    """Folder that train.py wrote: its base and all its experts."""
    base: Annotated[Path | None, NONE] = None
    """Base checkpoint, with --experts instead of --run: a folder, or a hub name."""
    experts: Annotated[tuple[Path, ...], arg(metavar="[TASK=EXPERT ...]", help_behavior_hint="(default: none)")] = ()
    """Expert checkpoints or LoRA adapters, with --base instead of --run: folders or hub names, named by their tasks."""
    out: Path
    """Folder for the merged model, which becomes --out/MERGER."""
    preset: Annotated[str | None, arg(help_behavior_hint="(default: that of the experts)")] = None
    """Preset of train.py with the suite of experts whose manifests name none: images or text, for reg_mean_plus also
    lm."""
    data: Annotated[str | None, arg(help_behavior_hint="(default: as they were trained)")] = None
    """Data, as in train.py --data. Rows of dev must be none that an expert was trained on."""
    seed: int = 0
    """Seed of the order of rows."""
    suite_options: Annotated[Values, SUITE] = field(default_factory=dict)
    """Other options of model and data, e.g. device cpu."""
    overwrite: bool = False
    """Replace a merged model that exists."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True, kw_only=True)
class AdaMerging(ByData):
    """AdaMerging: coefficients that minimise the merged classifier's prediction entropy on unlabelled dev rows."""

    layer_wise: bool = True
    """True: one coefficient per parameter tensor and expert; False: learn one coefficient per expert."""
    steps: int = 500
    """Steps of Adam."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    start: float = 0.3
    """Initial value of all coefficients."""
    batch: int = 16
    """Rows of each task in a step."""


@dataclass(frozen=True, kw_only=True)
class RegMeanPlus(ByData):
    """RegMean++: RegMean block by block, with input statistics from the blocks already merged."""

    scale: float = 0.9
    """Factor of the off-diagonal entries of the Gram matrices."""
    rows: int = 256
    """Rows of each task, rounded up to whole batches."""
    split: Literal["train", "dev"] = "train"
    """Split of the rows; test is not allowed."""


@dataclass(frozen=True)
class Transport:
    """Move a run's experts to another base: add their changes to it unchanged, or by GradFix or Theseus."""

    run: Path
    """Folder that train.py wrote: its base and all its experts."""
    out: Path
    """Folder for the new base and the moved experts, a run like the first."""
    model: Annotated[str | None, arg(help_behavior_hint="(default: the run's)")] = None
    """The new base: a folder, or a hub name."""
    suite_options: Annotated[Values, arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: the run's)")] = (
        field(default_factory=dict)
    )
    """Other options of the suite with the new base, such as max_length."""
    method: Literal["add", "gradfix", "theseus"] = "add"
    """add: the whole change. gradfix: its coordinates whose sign lowers the task's loss at the new base. theseus: the
    change mapped to the coordinates of the new base's layers, which may have other widths."""
    vote: Literal["mean", "majority"] = "mean"
    """Sign of gradfix: of the mean gradient, or of most rows' gradients."""
    coefs: Annotated[tuple[float, ...], arg(metavar="GAMMA [GAMMA ...]")] = (1.0,)
    """Factor gamma of the moved changes. If there are several, each task gets the one with the best score on dev."""
    rows: int = 64
    """Rows of each task that gradfix and theseus read, rounded up to whole batches."""
    split: Literal["train", "dev"] = "train"
    """Split of these rows; test is not allowed."""
    label: Annotated[str | None, arg(help_behavior_hint="(default: the run's and the method)")] = None
    """Name of the moved experts in tables."""
    seed: int = 0
    """Seed that selects rows."""
    overwrite: bool = False
    """Replace moved experts that exist."""
    threads: int = 1
    """CPU threads."""
