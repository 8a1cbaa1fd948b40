"""The experiments by name, as plain values."""

from collections.abc import Mapping

from ..merge.dare import Dare
from ..merge.della import Della
from ..merge.task_arithmetic import TaskArithmetic
from ..merge.ties import Ties
from ..merge.weight_average import WeightAverage
from .methods import METHODS, Asam, Finetune, Mergopt, Orthoreg, Smat
from .preset import Preset, Training

DIGITS = Preset(
    suite="digits",
    family="vision",
    seed=21,
    training=Training(steps=400, lr=2.5e-4),
    # chosen on dev: FT and SMAT by docs/protocols/digits.md, the others and their strengths by digits_methods.md
    lr={"ft": 2.5e-4, "smat": 5e-4, "asam": 2.5e-4, "mergopt": 1.25e-4, "orthoreg": 1.25e-4},
    lr_grid=(1.25e-4, 2.5e-4, 5e-4),
    methods={
        "ft": Finetune(),
        "smat": Smat(alpha_min=0.1, drop_prob=0.5, sigma=0.01, period=4, noise="uniform"),
        "asam": Asam(rho=0.5, adaptive=True),
        "mergopt": Mergopt(b=4e-3, k_max=4),
        "orthoreg": Orthoreg(lambda_reg=0.2, block_only=False),
    },
    mergers={
        "wa": WeightAverage(),
        "ta": TaskArithmetic(),
        "ties": Ties(keep=0.5, aggregate="sum", scope="global"),
        "dare": Dare(drop_prob=0.3),
        "della": Della(drop_prob=0.1, window=0.14),
    },
)


def _llama(model: str, *, rho: float, b: float, lambda_reg: float, muon_lr: float | None = None) -> Preset:
    """The paper's language experiment on a backbone."""
    epochs = {
        "C-STANCE": 5, "FOMC": 3, "MeetingBank": 7, "ScienceQA": 3, "NumGLUE-cm": 5, "NumGLUE-ds": 5, "20Minuten": 7,
    }  # fmt: skip
    lr, names = 2e-5, [config.name for config in METHODS]
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
        lr=dict.fromkeys(names, lr),
        lr_grid=(lr,),
        methods={
            "ft": Finetune(),
            "smat": Smat(alpha_min=0.2, drop_prob=0.5, sigma=2e-3, period=4, noise="uniform"),
            "asam": Asam(rho=rho, adaptive=True),
            "mergopt": Mergopt(b=b, k_max=7),
            "orthoreg": Orthoreg(lambda_reg=lambda_reg, block_only=False),
        },
        mergers={
            "wa": WeightAverage(),
            "ta": TaskArithmetic(),
            "ties": Ties(keep=0.5, aggregate="sum", scope="global"),
            "dare": Dare(drop_prob=0.3),
            "della": Della(drop_prob=0.5, window=0.14),
        },
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
    lr, names = 1e-5, [config.name for config in METHODS]
    return Preset(
        suite="clip8",
        family="vision",
        seed=0,
        training=Training(steps=4000, lr=lr, optimizer="adam", schedule="cosine"),
        lr=dict.fromkeys(names, lr),
        lr_grid=(lr,),
        methods={
            "ft": Finetune(),
            "smat": Smat(alpha_min=0.1, drop_prob=0.5, sigma=1e-3, period=4, noise="uniform"),
            "asam": Asam(rho=rho, adaptive=True),
            "mergopt": Mergopt(b=b, k_max=8),
            "orthoreg": Orthoreg(lambda_reg=lambda_reg, block_only=False),
        },
        mergers={
            "wa": WeightAverage(),
            "ta": TaskArithmetic(),
            "ties": Ties(keep=0.5, aggregate="sum", scope="global"),
            "dare": Dare(drop_prob=0.3),
            "della": Della(drop_prob=0.1, window=0.14),
        },
        options={"model": model, "data": "yanggangu/SMAT-CLIP8", "dtype": "float32", "batch_size": 128},
    )


MINILM = Preset(
    suite="short_text",
    family="vision",  # classification under frozen heads by Adam and a cosine, as there
    seed=51,
    training=Training(steps=600, lr=2e-4, optimizer="adam", schedule="cosine"),
    # chosen on dev, strengths too: docs/protocols/minilm.md
    lr={"ft": 4e-4, "smat": 2e-4, "asam": 4e-4, "mergopt": 2e-4, "orthoreg": 2e-4},
    lr_grid=(1e-4, 2e-4, 4e-4, 8e-4),
    methods={
        "ft": Finetune(),
        "smat": Smat(alpha_min=0.1, drop_prob=0.5, sigma=0.005, period=4, noise="uniform"),
        "asam": Asam(rho=0.5, adaptive=True),
        "mergopt": Mergopt(b=1e-3, k_max=5),
        "orthoreg": Orthoreg(lambda_reg=0.2, block_only=False),
    },
    mergers={
        "wa": WeightAverage(),
        "ta": TaskArithmetic(),
        "ties": Ties(keep=0.5, aggregate="sum", scope="global"),
        "dare": Dare(drop_prob=0.3),
        "della": Della(drop_prob=0.1, window=0.14),
    },
    options={
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "train_layers": 3,
        "batch_size": 16,
        "max_length": 64,
        "dtype": "float32",
    },
)

PRESETS: Mapping[str, Preset] = {
    "digits": DIGITS,
    "llama-3.2-1b": _llama("meta-llama/Llama-3.2-1B-Instruct", rho=2.0, b=5e-4, lambda_reg=0.03),
    "llama-3.2-1b-muon": _llama("meta-llama/Llama-3.2-1B-Instruct", rho=2.0, b=5e-4, lambda_reg=0.03, muon_lr=4e-4),
    "llama-3.1-8b": _llama("meta-llama/Llama-3.1-8B-Instruct", rho=0.25, b=2.5e-4, lambda_reg=0.01),
    "clip-vit-b32": _clip("openai/clip-vit-base-patch32", rho=0.25, b=2e-4, lambda_reg=0.1),
    "clip-vit-l14": _clip("openai/clip-vit-large-patch14", rho=0.125, b=5e-5, lambda_reg=0.05),
    "minilm": MINILM,
}


def preset_of(name: str) -> Preset:
    """The preset of a name. Raises: ValueError for a name not in `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown, choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
