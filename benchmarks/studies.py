"""One backward pass against two on pretrained backbones.

The protocols are backbones.md, vit_blocks.md, vit_length.md, text.md, smollm2_text.md, smollm2_text_passes.md,
smollm2_text_strengths.md and smollm2_trace.md of docs/protocols.

``python -m benchmarks backbones FOLDER`` makes the models. ``--dry-run`` takes a few steps of every method on the
device at hand and prints the minutes of each part; ``--tasks``, ``--rows`` and ``--steps`` make a trial run on a seed
of no stage, whose results stay in FOLDER.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tyro.conf import Positional

from smat_fn.config import PRESETS, IsoC, Msam, Training, TsvMerge, Wudi
from smat_fn.suites.sources import absolute

from . import timing
from .digits_mergers import MERGERS
from .methods import Candidate, Options, Protocol, Stage, replaced, say
from .study import asked, first_rows
from .study.grids import Axis, Grid, Widening, widening
from .study.trial import Kind, Seconds, kind_of, time_kinds

TRIAL_SEED = 10  # of no stage


class Backbone(NamedTuple):
    """A backbone's study: budget, grids' centres, seeds, and options of its suite."""

    preset: str
    training: Training
    lr: float  # of the middle of every grid
    sigma: float
    tuning: tuple[int, ...]  # none: every method has one candidate
    evaluation: tuple[int, ...]
    options: Options = ()
    coefs: tuple[float, ...] = ()  # where the search on dev starts; none: the grid of each merger
    candidates: Literal[5, 3, 1] = 5  # of each method
    alpha_min: float = 0.25  # of SMAT with three candidates
    strengths: bool = False  # candidates differ in alpha_min or rho, not in the learning rate
    tuned_on: Options = ()  # options of the suite in tuning
    others: bool = False  # evaluation scores every merger that needs no data
    mergers: tuple[str, ...] = ()  # some of the names; none: all
    tf32: bool = False  # on a GPU, matrix products of float32 round their inputs
    rows: Callable[[str, Path], Path] | None = None  # writes the rows from the data; none: the data are the rows
    without: tuple[str, ...] = ()  # methods that are left out
    lengths: tuple[int, ...] = ()  # FT and SMAT at these steps and `rates`, each a label of its own
    rates: tuple[float, ...] = ()


PAPERS = "wa", "ta", "ties", "dare", "della"
LANGUAGE = Training(
    steps=None,
    lr=1e-4,
    optimizer="adamw",
    schedule="cosine",
    weight_decay=1e-3,
    max_grad_norm=1.0,
    precision="mixed",
)
BACKBONES = {
    "vit": Backbone(
        "clip-vit-b32",
        Training(steps=300, lr=4e-5, optimizer="adam", schedule="cosine"),
        lr=4e-5,
        sigma=2e-3,
        tuning=(151,),
        evaluation=(161, 162, 163),
        options=(("batch_size", 32),),
        coefs=(0.2, 0.4, 0.6, 0.8, 1.0),
        candidates=3,
        alpha_min=1.0,
        tuned_on=(("tasks", ("DTD", "EuroSAT", "GTSRB")),),
        mergers=PAPERS,
        tf32=True,
    ),
    "vit_blocks": Backbone(
        "clip-vit-b32",
        Training(steps=400, lr=2e-4, optimizer="adam", schedule="cosine"),
        lr=2e-4,
        sigma=1e-3,
        tuning=(211,),
        evaluation=(221, 222, 223, 224, 225),
        options=(
            ("train_layers", 2),
            ("batch_size", 16),
            ("tasks", ("DTD", "EuroSAT", "GTSRB", "MNIST", "RESISC45", "SVHN")),
        ),
        coefs=(0.2, 0.4, 0.6, 0.8, 1.0),
    ),
    "text": Backbone(
        "minilm",
        Training(steps=600, lr=2e-4, optimizer="adam", schedule="cosine"),
        lr=2e-4,
        sigma=2.5e-3,
        tuning=(231,),
        evaluation=(241, 242, 243, 244, 245),
        coefs=(0.2, 0.4, 0.6, 0.8, 1.0),
        tuned_on=(("tasks", ("trec", "banking77", "clinc150")),),
        others=True,
    ),
    "smollm2_text": Backbone(
        "llama-3.2-1b",
        replace(LANGUAGE, steps=125, lr=1e-3),
        lr=1e-3,
        sigma=2e-3,
        tuning=(271,),
        evaluation=(281, 282, 283),
        options=(
            ("tasks", tuple(asked.TASKS)),
            ("train_layers", 4),
            ("dtype", "float32"),
            ("batch_size", 16),
            ("mask_prompt", True),
            ("metric", "exact"),
            ("max_new_tokens", 10),
            ("decode_batch", 100),
        ),
        coefs=(0.3, 0.6, 1.0),
        candidates=3,
        tuned_on=(("tasks", ("trec", "banking77")),),
        mergers=("wa", "ta", "ties", "tsv_merge", "wudi"),
        rows=asked.write_rows,
    ),
    "smollm2_trace": Backbone(
        "llama-3.2-1b",
        replace(LANGUAGE, steps=120, lr=1e-4),
        lr=1e-4,
        sigma=2e-3,
        tuning=(),
        evaluation=(351, 352, 353),
        options=(
            ("dtype", "bfloat16"),
            ("max_length", 384),
            ("truncate", "prompt-middle"),
            ("mask_prompt", True),
            ("batch_size", 8),
            ("max_new_tokens", 32),
            ("repeats", 1),
            ("decode_batch", 200),
        ),
        coefs=(0.3, 0.6, 1.0),
        candidates=1,
        mergers=PAPERS,
        rows=first_rows.write_rows,
        without=("MSAM",),
    ),
}
BACKBONES["vit_length"] = BACKBONES["vit_blocks"]._replace(
    tuning=(),
    evaluation=(226, 227, 228),
    candidates=1,
    alpha_min=1.0,
    mergers=("wa", "ta", "ties", "tsv_merge"),
    lengths=(200, 400, 800, 1600),
    rates=(1e-4, 2e-4),
)
BACKBONES["smollm2_text_strengths"] = BACKBONES["smollm2_text"]._replace(
    evaluation=(284, 285, 286, 287, 288), strengths=True
)
Name = Literal["vit", "vit_blocks", "vit_length", "text", "smollm2_text", "smollm2_text_strengths", "smollm2_trace"]


def study(name: Name, model: str, data: str, options: Mapping[str, Any]) -> Widening:
    """The study of a backbone: its methods with as many candidates each, the paper's mergers and three others."""
    own = BACKBONES[name]
    given = {**dict(own.options), **options, "model": absolute(model), "data": absolute(data)}
    eight = (*PRESETS[own.preset].mergers.values(), TsvMerge(), IsoC(), Wudi())
    mergers = tuple(merger for merger in eight if merger.name in (own.mergers or {one.name for one in eight}))
    names = {merger.name for merger in mergers}
    grids = {label: grid for label, grid in _grids(own).items() if label not in own.without}
    protocol = Protocol(
        name=name if own.lengths else f"{name}_onepass",
        preset=own.preset,
        grids={},
        tuning=own.tuning,
        evaluation=own.evaluation,
        options=tuple(given.items()),
        mergers=mergers,
        others=tuple(merger for merger in MERGERS if own.others and merger.name not in names),
        coefs=own.coefs,
        widen=True,
        tuned_on=() if options else own.tuned_on,
    )
    return widening(protocol, grids)


def _grids(own: Backbone) -> dict[str, Grid]:
    if own.lengths:
        return _lengths(own)
    if own.strengths:
        return _strengths(own)
    return _crosses(own) if own.candidates == 5 else _rates(own)


def _crosses(own: Backbone) -> dict[str, Grid]:
    """Five learning rates, or three and, at the middle one, two values more of another axis."""
    training = own.training
    ft, smat, asam = (PRESETS[own.preset].methods[method] for method in ("ft", "smat", "asam"))
    lr, rho = Axis("lr", _about(own.lr)), Axis("rho", _about(0.5))
    wide = Axis("lr", tuple(sorted({*_about(own.lr / 2), *_about(own.lr * 2)})))
    least = Axis("alpha_min", (0.25, 0.5, 1.0), most=1.0)
    smat = replaced(smat, sigma=own.sigma)
    return {
        "FT": Grid(ft, training, wide, Axis("steps", (training.steps,))),
        "SMAT": Grid(smat, training, lr, least, (own.lr, 1.0)),
        "SMAT climbing": Grid(replaced(smat, climb="both", rho=0.5), training, lr, least, (own.lr, 1.0)),
        "MSAM": Grid(Msam(), training, lr, rho, (own.lr, 0.5)),
        "ASAM": Grid(asam, training, lr, rho, (own.lr, 0.5)),
        "ASAM, half the steps": Grid(asam, _half(training), lr, rho, (own.lr, 0.5)),
    }


def _rates(own: Backbone) -> dict[str, Grid]:
    """Three learning rates, or one; everything else has one value."""
    whole = own.training
    ft, smat, asam = (PRESETS[own.preset].methods[method] for method in ("ft", "smat", "asam"))
    smat, asam = replaced(smat, alpha_min=own.alpha_min, sigma=own.sigma), replaced(asam, rho=0.5)
    rates = _about(own.lr) if own.candidates > 1 else (own.lr,)
    methods = {
        "FT": (ft, whole),
        "SMAT": (smat, whole),
        "SMAT climbing": (replaced(smat, climb="both", rho=0.5), whole),
        "MSAM": (Msam(rho=0.5), whole),
        "ASAM": (asam, whole),
        "ASAM, half the steps": (asam, _half(whole)),
    }
    return {
        label: Grid(method, training, Axis("lr", rates), Axis("steps", (training.steps,)))
        for label, (method, training) in methods.items()
    }


def _strengths(own: Backbone) -> dict[str, Grid]:
    """One learning rate, at which every method has three values of its own hyperparameter; FT three finer rates."""
    ft, smat, asam = (PRESETS[own.preset].methods[method] for method in ("ft", "smat", "asam"))
    rate, steps = Axis("lr", (own.lr,)), Axis("steps", (own.training.steps,))
    least, rho = Axis("alpha_min", (0.25, 0.5, 1.0), most=1.0), Axis("rho", (0.125, 0.25, 0.5))
    return {
        "FT": Grid(ft, own.training, Axis("lr", (0.7 * own.lr, own.lr, 1.4 * own.lr)), steps),
        "SMAT": Grid(replaced(smat, sigma=own.sigma), own.training, rate, least),
        "MSAM": Grid(Msam(), own.training, rate, rho),
        "ASAM": Grid(asam, own.training, rate, Axis("rho", _about(0.5))),
    }


def _lengths(own: Backbone) -> dict[str, Grid]:
    """FT and SMAT at every length and learning rate."""
    ft, smat = (PRESETS[own.preset].methods[method] for method in ("ft", "smat"))
    methods = {"FT": ft, "SMAT": replaced(smat, alpha_min=own.alpha_min, sigma=own.sigma)}
    return {
        f"{label}, {steps} steps at {rate:g}": Grid(
            method, replace(own.training, steps=steps, lr=rate), Axis("lr", (rate,)), Axis("steps", (steps,))
        )
        for steps in own.lengths
        for rate in own.rates
        for label, method in methods.items()
    }


def _half(training: Training) -> Training:
    return replace(training, steps=training.length // 2)


def main(
    folder: Positional[Path],
    *,
    name: Name,
    model: str,
    data: str,
    jobs: int = 1,
    only: Stage | None = None,
    dry_run: bool = False,
    steps: int | None = None,
    rows: int | None = None,
    tasks: tuple[str, ...] = (),
) -> None:
    """Run the protocol of a backbone.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        name: the backbone.
        model: its folder.
        data: folder of the tasks' rows.
        jobs: processes, which share the device.
        only: one of its two stages.
        dry_run: print the minutes of each part and end.
        steps: a trial run: steps of an expert.
        rows: a trial run: rows of a split.
        tasks: a trial run: some of the tasks.
    """
    tried = {key: value for key, value in {"rows": rows, "tasks": tasks}.items() if value}
    if (write_rows := BACKBONES[name].rows) is not None:
        data = str(write_rows(data, folder / "rows"))
    if BACKBONES[name].tf32 and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"  # of the processes of the trials
    own = study(name, model, data, tried)
    facts = timing.describe(f"python -m benchmarks studies FOLDER --name {name} --model MODEL --data DATA")
    if steps is not None or tried:
        own = _trial_run(own, folder, steps)
        facts = {**facts, "trial_run": {"steps": steps, **tried}}
    if dry_run:
        say(forecast(own.protocol, jobs))
        return
    own.run(folder, jobs, facts, only)


def forecast(protocol: Protocol, jobs: int) -> str:
    """Minutes of both stages on the device at hand: a few steps of every method and scores of every task, multiplied.

    Without merging, which takes no data.
    """
    firsts = {kind_of(*candidates[0]): (label, candidates[0]) for label, candidates in protocol.grids.items()}

    def seconds_of(*, tuning: bool) -> dict[Kind, Seconds]:
        trials = [protocol.trial(label, first, TRIAL_SEED, tuning=tuning) for label, first in firsts.values()]
        return time_kinds(trials, test=not tuning)

    whole, tuned = seconds_of(tuning=False), seconds_of(tuning=True) if protocol.tuning else {}

    def minutes(one: Candidate, seconds: Mapping[Kind, Seconds]) -> float:
        step, scores = seconds[kind_of(*one)]
        return (step * one.training.length + scores) / 60

    lines, parts = [], {"tuning": 0.0, "evaluation": 0.0}
    for label, candidates in protocol.grids.items():
        found = [minutes(one, whole) for one in candidates]
        tuning = sum(minutes(one, tuned) for one in candidates) * len(protocol.tuning) if tuned else 0.0
        middle = sorted(found)[len(found) // 2]
        parts["tuning"] += tuning
        parts["evaluation"] += middle * len(protocol.evaluation)
        lines.append(f"{label}: {middle:.1f} min a trial, {tuning:.1f} min of tuning")
    stages = ", ".join(f"{stage} {value / jobs:.0f} min" for stage, value in parts.items())
    return "\n".join([*lines, f"in {jobs} processes, if they do not slow each other down, without merging: {stages}"])


def _about(middle: float) -> tuple[float, float, float]:
    return middle / 2, middle, middle * 2


def _trial_run(own: Widening, folder: Path, steps: int | None) -> Widening:
    """Run on one seed of no stage, with two learning rates and one hyperparameter value a method."""
    few = {}
    for label, grid in own.grids.items():
        training = replace(grid.training, steps=steps or grid.training.steps)
        second = grid.second._replace(
            values=(training.steps,) if grid.second.field == "steps" else grid.second.values[:1]
        )
        few[label] = Grid(grid.method, training, grid.first._replace(values=grid.first.values[:2]), second)
    place, only = str((folder / own.protocol.name).resolve()), (TRIAL_SEED,)
    tuning = only if own.protocol.tuning else ()
    return widening(own.protocol._replace(name=place, tuning=tuning, evaluation=only), few)
