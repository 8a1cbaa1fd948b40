"""Presets: an experiment's suite, training budget and hyperparameters of methods and mergers, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import suggestion
from ..mat import METHODS, MethodConfig
from ..mat.asam import Asam
from ..mat.finetune import Finetune
from ..mat.mergopt import Mergopt
from ..mat.orthoreg import Orthoreg
from ..mat.smat import Smat
from ..merge.dare import Dare
from ..merge.della import Della
from ..merge.parts.merger import Merger
from ..merge.task_arithmetic import TaskArithmetic
from ..merge.ties import Ties
from ..merge.weight_average import WeightAverage
from ..types import Precision


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters instead of all weights: ``W_0 + s B A`` on linear layers of blocks."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # layers, none: all
    simulate: Literal["merged", "factors"] = "merged"  # SMAT at the merged weight, or at A and B themselves
    dropout: float = 0.0  # of the adapters' inputs
    save: tuple[str, ...] = ()  # modules that are trained whole beside them


@dataclass(frozen=True)
class Dev:
    """Evaluations on dev while training; the best parameters are the expert."""

    every: int  # steps, and after the last one
    by: Literal["score", "loss"] = "score"
    patience: int | None = None  # evaluations without a better one that end training; None: all steps


@dataclass(frozen=True)
class Training:
    """How an expert is trained, whatever the method."""

    steps: int | None  # None: by epochs
    lr: float
    optimizer: Literal["adam", "adamw", "muon"] = "adam"  # muon: AdamW beside the matrices of blocks
    muon_lr: float | None = None  # of the matrices
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    accumulate: int = 1  # micro-batches that the batch of a step is split into
    precision: Precision | None = None  # of training; None: the dtype of the suite
    lora: Adapters | None = None  # None: all weights
    independent_draws: bool = False  # with several processes: each draws for itself
    warmup: int = 0  # first steps, over which the learning rate rises linearly
    decay_matrices: bool = False  # weight decay on matrices alone: not on norms and biases
    average: str | None = None  # over steps: ema:0.999, swa:25%; None: the last parameters
    dropout: bool = False  # the model in train mode
    dev: Dev | None = None  # evaluations while training
    shard: bool = False  # by FSDP2 over several processes
    compiled: bool = False  # forward and backward pass, by torch.compile
    epochs: Mapping[str, int] = field(default_factory=dict)  # by task, where there are no steps

    @property
    def length(self) -> int:
        """The number of steps, given or counted from epochs (`scripts.train.loop.budget`)."""
        assert self.steps is not None, "a training of one task"
        return self.steps


@dataclass(frozen=True)
class Preset:
    """One experiment: a suite, the budget that all methods share, and the hyperparameters of methods and mergers."""

    suite: str
    family: Literal["language", "vision"]  # decides the coefficients of the sparsity calibration
    seed: int
    training: Training
    lr: Mapping[str, float]  # by method, chosen on dev
    lr_grid: tuple[float, ...]  # what it was chosen from
    methods: Mapping[str, MethodConfig]
    mergers: Mapping[str, Merger]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the suite
    epochs: int | None = None  # of every task, where the training has neither steps nor epochs by task
    note: str = ""  # where settings are from, for those who bring their own model


def _methods(
    *, alpha_min: float, sigma: float | Literal["auto"], rho: float, b: float, k_max: int, lambda_reg: float
) -> dict[str, MethodConfig]:
    """The five methods of the paper."""
    return {
        "ft": Finetune(),
        "smat": Smat(alpha_min=alpha_min, drop_prob=0.5, sigma=sigma, period=4, noise="uniform"),
        "asam": Asam(rho=rho, adaptive=True),
        "mergopt": Mergopt(b=b, k_max=k_max),
        "orthoreg": Orthoreg(lambda_reg=lambda_reg, block_only=False),
    }


def _mergers(*, della: float) -> dict[str, Merger]:
    """The five mergers of the paper, with the drop probability of DELLA."""
    return {
        "wa": WeightAverage(),
        "ta": TaskArithmetic(),
        "ties": Ties(keep=0.5, aggregate="sum", scope="global"),
        "dare": Dare(drop_prob=0.3),
        "della": Della(drop_prob=della, window=0.14),
    }


DIGITS = Preset(
    suite="digits",
    family="vision",
    seed=21,
    training=Training(steps=400, lr=2.5e-4),
    # chosen on dev: FT's and SMAT's rates by docs/protocols/digits.md; the other rates and the hyperparameters of ASAM,
    # MergOPT and OrthoReg by docs/protocols/digits_methods.md, which chose 1.25e-4 for FT and SMAT
    lr={"ft": 2.5e-4, "smat": 5e-4, "asam": 2.5e-4, "mergopt": 1.25e-4, "orthoreg": 1.25e-4},
    lr_grid=(1.25e-4, 2.5e-4, 5e-4),
    methods=_methods(alpha_min=0.1, sigma=0.01, rho=0.5, b=4e-3, k_max=4, lambda_reg=0.2),
    mergers=_mergers(della=0.1),
)


def _llama(model: str, *, rho: float, b: float, lambda_reg: float, muon_lr: float | None = None) -> Preset:
    """The paper's language experiment on a backbone."""
    epochs = {
        "C-STANCE": 5, "FOMC": 3, "MeetingBank": 7, "ScienceQA": 3, "NumGLUE-cm": 5, "NumGLUE-ds": 5, "20Minuten": 7,
    }  # fmt: skip
    lr = 2e-5  # of all methods in the paper
    return Preset(
        suite="trace",
        family="language",
        seed=0,
        training=Training(
            steps=None,
            lr=lr,
            optimizer="adamw" if muon_lr is None else "muon",
            muon_lr=muon_lr,
            schedule="constant",
            weight_decay=1e-3,
            max_grad_norm=1.0,
            epochs=epochs,
        ),
        lr={config.name: lr for config in METHODS},
        lr_grid=(lr,),
        methods=_methods(alpha_min=0.2, sigma=2e-3, rho=rho, b=b, k_max=7, lambda_reg=lambda_reg),
        mergers=_mergers(della=0.5),
        options={
            "model": model,
            "data": "yanggangu/SMAT-TRACE",
            "dtype": "bfloat16",
            "max_length": 512,
            "batch_size": 8,
        },
    )


def _clip(model: str, *, rho: float, b: float, lambda_reg: float) -> Preset:
    """The paper's vision experiment on a backbone."""
    lr = 1e-5  # of all methods in the paper
    return Preset(
        suite="clip8",
        family="vision",
        seed=0,
        training=Training(steps=4000, lr=lr, optimizer="adam", schedule="cosine"),
        lr={config.name: lr for config in METHODS},
        lr_grid=(lr,),
        methods=_methods(alpha_min=0.1, sigma=1e-3, rho=rho, b=b, k_max=8, lambda_reg=lambda_reg),
        mergers=_mergers(della=0.1),
        options={"model": model, "data": "yanggangu/SMAT-CLIP8", "dtype": "float32", "batch_size": 128},
    )


MINILM = Preset(
    suite="short_text",
    family="vision",  # classification under frozen heads by Adam and a cosine, as there
    seed=51,
    training=Training(steps=600, lr=2e-4, optimizer="adam", schedule="cosine"),
    # rates and hyperparameters chosen on dev by docs/protocols/minilm.md
    lr={"ft": 4e-4, "smat": 2e-4, "asam": 4e-4, "mergopt": 2e-4, "orthoreg": 2e-4},
    lr_grid=(1e-4, 2e-4, 4e-4, 8e-4),
    methods=_methods(alpha_min=0.1, sigma=0.005, rho=0.5, b=1e-3, k_max=5, lambda_reg=0.2),
    mergers=_mergers(della=0.1),
    options={
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "train_layers": 3,
        "batch_size": 16,
        "max_length": 64,
        "dtype": "float32",
    },
)


def _own(like: Preset, *, lr: float, note: str, training: Mapping[str, Any], epochs: int, **options: Any) -> Preset:
    """A preset for your own model and data: usual settings, sigma set for the model (``--sigma auto``), k_max by tasks.

    Args: like: the experiment whose suite, mergers and hyperparameters of other methods it has; options: of the suite.
    """
    kept = {name: value for name, value in like.options.items() if name not in ("model", "data", "train_layers")}
    smat, mergopt = like.methods["smat"], like.methods["mergopt"]
    assert isinstance(smat, Smat)
    assert isinstance(mergopt, Mergopt)
    return replace(
        like,
        seed=0,
        training=replace(like.training, lr=lr, steps=None, epochs={}, **training),
        lr={config.name: lr for config in METHODS},
        lr_grid=(lr,),
        methods={**like.methods, "smat": replace(smat, sigma="auto"), "mergopt": replace(mergopt, k_max=None)},
        options={**kept, **options},
        epochs=epochs,
        note=f"{note}, not tuned on this model",
    )


_LLAMA = _llama("meta-llama/Llama-3.2-1B-Instruct", rho=2.0, b=5e-4, lambda_reg=0.03)
_CLIP = _clip("openai/clip-vit-base-patch32", rho=0.25, b=2e-4, lambda_reg=0.1)
LM = _own(
    _LLAMA, lr=2e-5, note="the paper's for language models", training={"schedule": "cosine", "weight_decay": 0.0},
    epochs=3,
)  # fmt: skip
# rate, epochs and batch: the middle of those that Devlin et al., 2019 (BERT, A.3) found to work across tasks
TEXT = _own(
    MINILM, lr=3e-5, note="usual for encoders of texts", training={"optimizer": "adamw"}, epochs=3,
    batch_size=32, max_length=128,
)  # fmt: skip
IMAGES = _own(_CLIP, lr=1e-5, note="the paper's for encoders of images", training={}, epochs=10, batch_size=32)

PRESETS: Mapping[str, Preset] = {
    "digits": DIGITS,
    "lm": LM,
    "text": TEXT,
    "images": IMAGES,
    "llama-3.2-1b": _LLAMA,
    "llama-3.2-1b-muon": _llama("meta-llama/Llama-3.2-1B-Instruct", rho=2.0, b=5e-4, lambda_reg=0.03, muon_lr=4e-4),
    "llama-3.1-8b": _llama("meta-llama/Llama-3.1-8B-Instruct", rho=0.25, b=2.5e-4, lambda_reg=0.01),
    "clip-vit-b32": _CLIP,
    "clip-vit-l14": _clip("openai/clip-vit-large-patch14", rho=0.125, b=5e-5, lambda_reg=0.05),
    "minilm": MINILM,
}


def preset_of(name: str) -> Preset:
    """The preset of a name. Raises: ValueError for a name not in `PRESETS`."""
    if name not in PRESETS:
        near = suggestion(name, PRESETS)
        raise ValueError(f"preset {name!r} is unknown{near or ','} choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
