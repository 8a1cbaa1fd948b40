"""Options of train.py beside the method's own, in the groups of ``--help``, and those of its other commands."""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ...config import PRESETS
from ...types import Precision
from .. import cli

Place = Literal["auto", "device", "cpu", "recompute", "stream"]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The model to train, and the data."""

    preset: Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")] = "digits"
    """Preset of an experiment: suite, budget and hyperparameters. Other options override it."""
    model: str | None = None
    """Base model: a folder, or a name on the hub. The preset digits trains its own."""
    data: str | None = None
    """Data: a folder with a folder for each task (docs/own_model.md shows the layout), or a dataset on the hub."""
    tasks: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all of the suite)")] = ()
    """Tasks to train an expert for."""
    joint: bool = False
    """Train one model on all these tasks together (OUT/joint) instead of an expert for each: steps take a batch of each
    task in turn. --steps and --epochs are those of each task."""
    rows: Annotated[int | None, arg(help_behavior_hint=cli.open_at("all"))] = None
    """Use only the first rows of each split."""
    metric: Annotated[
        str | None, arg(help_behavior_hint=cli.open_at("rouge-l, of plain texts likelihood, of classifiers accuracy"))
    ] = None
    """Language tasks of your own: rouge-l, label, number, exact, f1, contains, likelihood, choice, choice_norm, or a
    function as module:function. Classifiers: accuracy, balanced-accuracy, macro-f1."""
    chat: bool = False
    """Language models: rows are conversations (messages with role and content), formatted with the tokenizer's chat
    template; the loss covers only the assistant's answers."""
    mask_prompt: bool = False
    """Language models: compute the loss on the answer only, not on the prompt."""
    train: Annotated[str | None, arg(help_behavior_hint="(default: preset, or all)")] = None
    """Parameters to train: attention (query, key, value and output projections), or globs of parameter names,
    separated by commas."""
    train_layers: Annotated[int | None, arg(help_behavior_hint=cli.open_at("all"))] = None
    """Train only this number of top layers."""
    batch_size: Annotated[int | None, arg(help_behavior_hint=cli.open_at("the suite's"))] = None
    """Rows in a batch."""
    max_length: Annotated[int | None, arg(help_behavior_hint=cli.open_at("the suite's"))] = None
    """Language models and text encoders: maximum number of tokens of a row."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    device: Annotated[str | None, arg(help_behavior_hint="(default: the first GPU, or the CPU)")] = None
    """Device of model and training, cpu or cuda:0."""
    suite_options: Annotated[
        cli.Values, arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: preset, or the suite's)")
    ] = field(default_factory=dict)
    """Other options of model and data, e.g. truncate prompt-middle. --help-all lists them."""
    suite_seed: Annotated[int | None, arg(help_behavior_hint="(default: --seed)")] = None
    """Seed of the suite (splits, base). Experts to be merged need the same one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Length, learning rate and precision."""

    lr: float | None = None
    """Learning rate (the preset has one for each method)."""
    steps: int | None = None
    """Optimizer steps per expert, instead of epochs."""
    epochs: Annotated[int | None, arg(help_behavior_hint=cli.open_at("preset, by task, if it has no steps"))] = None
    """Passes over a task's rows, the same for all tasks."""
    eval_every: Annotated[int | None, arg(help_behavior_hint="(default: never)")] = None
    """Evaluate on dev every so many steps and at the end; the expert is the best of these states."""
    eval_by: Literal["score", "loss"] = "score"
    """Metric of --eval-every: the task's score, or the loss (faster where scoring decodes text)."""
    patience: Annotated[int | None, arg(help_behavior_hint="(default: all steps)")] = None
    """End training after this many evaluations without improvement."""
    optimizer: Literal["adam", "adamw", "muon"] | None = None
    """adam, adamw, or muon: Muon on the matrices of blocks, AdamW elsewhere."""
    schedule: Literal["constant", "cosine", "linear"] | None = None
    """Learning-rate schedule; cosine and linear decay to 0."""
    warmup: int | None = None
    """Steps of linear learning-rate warmup."""
    weight_decay: float | None = None
    """Decoupled weight decay (adamw and muon only)."""
    max_grad_norm: Annotated[float | None, arg(help_behavior_hint=cli.open_at("preset, or no clipping"))] = None
    """Clip gradients to this norm; inf: no clipping."""
    accumulate: int | None = None
    """Micro-batches per step: less memory, the same step up to rounding."""
    precision: Annotated[Precision | None, arg(help_behavior_hint=cli.open_at("the suite's dtype"))] = None
    """bf16 or fp32: everything in that dtype; mixed: fp32 parameters and optimizer while training, bf16 losses, and
    experts stored in the suite's dtype (preset lm: bf16)."""
    dropout: bool = False
    """Enable the model's own dropout in training, drawn from the run's seed; otherwise the model is in eval mode."""
    average: Annotated[str | None, arg(help_behavior_hint=cli.open_at("none"))] = None
    """Average the weights over steps: ema:0.999 (exponential), swa:25% (mean of the last quarter), or none. Until the
    average begins, the weights themselves are evaluated and kept."""
    muon_lr: Annotated[float | None, arg(help_behavior_hint=cli.open_at("preset, or 20 times --lr"))] = None
    """Learning rate of Muon."""
    decay_matrices: bool = False
    """Apply weight decay to matrices only, not to norms and biases."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Low-rank adapters instead of all weights."""

    lora_rank: Annotated[int | None, arg(help_behavior_hint="(default: all weights)")] = None
    """Train adapters of this rank on the linear layers of blocks, saved in PEFT's format."""
    lora_alpha: Annotated[float | None, arg(help_behavior_hint="(default: 2 times --lora-rank)")] = None
    """Adapters are scaled by alpha / rank."""
    lora_targets: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Layers with adapters: names (q_proj), or globs over paths (model.layers.1.*)."""
    lora_dropout: float = 0.0
    """Dropout probability of adapter inputs in training; masks depend on the run's seed."""
    lora_save: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Modules to train fully, without adapters (PEFT's modules_to_save): names (lm_head), or globs over paths."""
    lora_simulate: Literal["merged", "factors"] = "merged"
    """SMAT simulates merging on the merged weight, or on the two factors (cheaper)."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Seed and machine."""

    dry_run: bool = False
    """Check all options and print settings, parameters, steps and truncated rows; train nothing."""
    seed: int | None = None
    """Seed of training: batches and draws."""
    threads: int = 1
    """CPU threads; small models are fastest with one. Results are bit-identical at the same number."""
    shard: bool = False
    """With torchrun: split weights, gradients and the optimizer's state over the processes (FSDP2)."""
    compile: bool = False
    """Compile the model's forward and backward pass with torch.compile (Inductor); results agree within rounding."""
    independent_draws: bool = False
    """With torchrun: each process has its own draws, and the gradients are averaged."""


@dataclass(frozen=True)
class RunSettings:
    """Names, logs, checkpoints and resuming."""

    out: Path
    """Folder for the experts."""
    _: KW_ONLY
    resume: bool = False
    """Keep finished experts of --out and continue an interrupted one from its checkpoint; train the others."""
    overwrite: bool = False
    """Replace existing experts."""
    label: Annotated[str | None, arg(help_behavior_hint="(default: the method's)")] = None
    """Name of these experts in tables."""
    probe: int = 0
    """Measure each expert's dev loss at this number of simulated merges (by the preset's SMAT hyperparameters); with
    --resume, finished experts' too."""
    offload: Place = "auto"
    """Where SMAT stores the base; results do not change. cpu (the paper's): in pinned host memory, with one buffer on
    the device; device: base and simulated weights on the device; recompute, stream: simulated weights rebuilt block by
    block, the base on the device (recompute) or streamed (stream); auto: cpu, if full weights are trained on a GPU and
    some steps are clean, else device."""
    log: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], arg(help_behavior_hint="(default: none)")
    ] = ()
    """Experiment trackers to log to as well; their packages must be installed."""
    log_every: int = 1
    """Steps between lines of the log."""
    save_every_steps: Annotated[int | None, arg(help_behavior_hint="(default: by time only)")] = None
    """Steps between training checkpoints, from which --resume continues."""
    save_every_minutes: float = 30.0
    """Minutes between training checkpoints; inf: none by time."""
    keep_snapshots: int = 0
    """Parameter snapshots to keep, evenly spaced, in --out/snapshots/NUMBER/TASK; merge.py --snapshots chooses one."""
    keep_moments: bool = False
    """Keep Adam's second moments beside each expert's weights, for `merge.py fisher --weights-from adam`."""
    statistics: Annotated[tuple[Literal["fisher", "gram"], ...], arg(help_behavior_hint="(default: none)")] = ()
    """Statistics to compute for each expert on its training rows, as `merge.py statistics` does by default."""


@dataclass(frozen=True)
class Sweep:
    """Train every method with every seed, one process per device; when rerun, only runs that lack an expert.

    A task that was added to the folder of the data is trained beside the others, unless --flags names the tasks.
    """

    out: Path
    """Folder: the run of a method and seed becomes OUT/METHOD-seedN."""
    methods: tuple[str, ...] = ("ft", "smat")
    """Methods, by the names of train.py."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Training seeds of each method."""
    flags: str = ""
    """More options of train.py for all runs, after an equals sign: --flags="--preset digits --steps 100"."""
    devices: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: no choice of GPU)")] = ()
    """GPUs, as CUDA_VISIBLE_DEVICES names them: one run at a time on each."""
    processes: int = 1
    """Number of runs at a time if no devices are given."""
    launcher: Literal["local", "submitit"] = "local"
    """local: processes here; submitit: jobs of a cluster (the package submitit)."""
    cluster_options: Annotated[
        dict[str, int | str], arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: none)")
    ] = field(default_factory=dict)
    """Parameters of submitit's executor, e.g. slurm_partition gpu timeout_min 600."""
    other_code: bool = False
    """Keep experts that another version of this package has trained, and resume its unfinished ones; else an error."""


@dataclass(frozen=True)
class Status:
    """Print a table of the runs in a folder: which experts are done, how far the others are."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder of a sweep, or of any runs of train.py."""
