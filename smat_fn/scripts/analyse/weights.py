"""Analyses of weights: loss along merge directions, sizes of updates. No torch until one runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ... import errors
from ..cli import NONE
from .commands import Batched, OfSuite, progress

if TYPE_CHECKING:
    from ...analyses.results import Result
    from ...suites import Suite
    from ...types import Micro

MOST = 1e38  # of a factor of an update: torch multiplies by float32


@dataclass(frozen=True, kw_only=True)
class Landscape(Batched):
    """Compute the loss at base + a * the expert's update + b * gamma * the sum of the other FT experts' updates."""

    ft: Path
    """Run folder of train.py of method ft. It is plotted first, and the other experts are taken from it."""
    methods: Annotated[tuple[Path, ...], NONE] = ()
    """Run folders of train.py whose experts are evaluated in the same way."""
    tasks: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Target tasks."""
    coef: float = 0.3
    """gamma of the other experts' updates."""
    a: tuple[float, float] = (0.0, 2.0)
    """Range of a, the factor of the expert's own update."""
    b: tuple[float, float] = (-1.0, 3.0)
    """Range of b, the factor of the other experts' updates."""
    points: int = 21
    """Points along each axis; a = 1 and b = 0 (the expert itself) are added where missing."""
    batches: int = 8
    """Maximum number of dev batches per task; the same batches at every point and for every method."""
    seed: int = 0
    """Seed of training batches, which are used if a suite has no dev batches."""


def landscape(options: Landscape) -> "Result":
    """`analyses.landscape` of the standard run and of every other, for every task; a row per point.

    The `samples` of a task are the same for all points and methods. The suite of a causal language model counts the
    answer's tokens only (mask_prompt), and cuts prompts in the middle so that answers stay, unless the options of the
    suite say otherwise.

    Raises: ValueError as `load_runs` does; for bad axes, a first run of another method than ft, tasks that the runs
        lack, fewer than one batch, and a coef or a loss that is not finite.
    """
    from ... import analyses
    from .runs import load_runs, result_of

    axes, coef = _axes(options), options.coef
    suite_options = {**_answers_only(options), **options.suite_options}
    runs = load_runs([options.ft, *(path for path in options.methods if path != options.ft)], options=suite_options)
    ft = runs[0]
    problems = [f"batches is {options.batches}, must be at least 1"] if options.batches < 1 else []
    problems += [] if math.isfinite(coef) else [f"coef is {coef}, must be finite"]
    problems += [] if ft.method == "ft" else [f"{ft.path} is of method {ft.method}, not ft: give a run of ft as --ft"]
    problems += [
        f"runs have no task {task!r}, they have {', '.join(ft.tasks)}" for task in options.tasks if task not in ft.tasks
    ]
    problems += [
        f"{run.path} is of seed {run.seed}, {ft.path} of {ft.seed}: give runs of one seed"
        for run in runs
        if run.seed != ft.seed
    ]
    errors.raise_problems(problems)
    chosen = list(dict.fromkeys(options.tasks)) or list(ft.tasks)
    rows: list[dict[str, Any]] = []
    with progress("point", len(chosen) * len(runs) * len(axes["a"]) * len(axes["b"])) as done:
        for task in chosen:
            partners = analyses.partner_update(ft.inputs.base, ft.inputs.experts, task, coef=coef)
            split, found = samples(ft.suite, task, batches=options.batches, seed=options.seed)
            loss = analyses.mean_loss(ft.suite.loss_fn(task), found)
            more: dict[str, Any] = {**axes, "memory": options.memory_bytes, "done": done}
            for run in runs:
                values = analyses.landscape(ft.inputs.base, run.inputs.experts[task], partners, loss, **more)
                rows += [
                    {"task": task, "method": run.label, "a": x, "b": y, "loss": value}
                    for y, line in zip(axes["b"], values, strict=True)
                    for x, value in zip(axes["a"], line, strict=True)
                ]
    lost = [row for row in rows if not math.isfinite(row["loss"])]
    if lost:
        where = ", ".join("{task} {method} ({a:g}, {b:g})".format(**row) for row in lost[:5])
        raise ValueError(f"the loss is not finite at {len(lost)} of {len(rows)} points ({where}): narrow --a and --b")
    origin = {"split": split, "batches": options.batches, "seed": options.seed, "suite_options": suite_options}
    return result_of("landscape", runs, rows, coef=coef, **axes, tasks=chosen, samples=origin)


def _axes(options: Landscape) -> dict[str, list[float]]:
    """Points of both axes. Raises: ValueError that lists too few points, and ranges that do not rise."""
    count, ranges = options.points, {"a": options.a, "b": options.b}
    problems = [f"points is {count}, must be at least 2"] if count < 2 else []
    problems += [text for name, ends in ranges.items() for text in range_problems(name, *ends)]
    errors.raise_problems(problems)
    expert = {"a": 1.0, "b": 0.0}
    return {name: sorted({*spaced(*ends, count), expert[name]}) for name, ends in ranges.items()}


def range_problems(name: str, low: float, high: float) -> list[str]:
    """Errors for the ends of an axis, along which updates are multiplied."""
    if not 0 < high - low < math.inf:
        return [f"{name} is {low:g} {high:g}, must rise between finite numbers"]
    return [f"{name} is {low:g} {high:g}, must be between -1e38 and 1e38"] if max(-low, high) > MOST else []


def spaced(low: float, high: float, count: int) -> list[float]:
    """``count`` points from low to high in equal steps, as short numbers."""
    # three digits beyond the first of a step, at least six: no two points are one
    digits = max(6, 3 + len(str(count)) - math.floor(math.log10(high - low)))
    return [round(low + (high - low) * i / (count - 1), digits) for i in range(count)]


def _answers_only(options: Landscape) -> Mapping[str, Any]:
    from ... import checkpoint
    from ...models.pretrained import is_encoder_decoder
    from ..run_folder import find_inputs

    recipe = checkpoint.load_manifest(find_inputs(options.ft)[1][0]).get("suite") or {}
    causal = "mask_prompt" in recipe and not is_encoder_decoder(options.suite_options.get("model", recipe["model"]))
    return {"mask_prompt": True, "truncate": "prompt-middle"} if causal else {}


def samples(suite: "Suite", task: str, *, batches: int, seed: int) -> "tuple[str, list[Micro]]":
    """The split that samples are from, and the first ``batches`` batches of it with their weights.

    The dev split; where a suite has no batches of it, the training split as ``suite.batch`` gives it at steps 0, 1, ...
    under the key ``fold_in(fold_in(key(seed), "samples"), task)``, all batches of one weight.
    """
    from ... import random
    from ...types import Micro

    if suite.dev_batches is not None:
        return "dev", suite.dev_batches(task)[:batches]
    key = random.fold_in(random.fold_in(random.key(seed), "samples"), task)
    return "train", [Micro(suite.batch(task, key, step), 1.0) for step in range(batches)]


@dataclass(frozen=True, kw_only=True)
class Diagnose(OfSuite):
    """Compare update sizes, by kind of parameter, with the other experts' updates and the noise; suggest a sigma."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Run folder of train.py."""
    coef: float = 0.3
    """gamma of the other experts' updates."""
    sigma: Annotated[float | None, arg(help_behavior_hint="(default: the run's, else the suggested one)")] = None
    """RMS of the noise to compare with, in units of the weights."""


def diagnose(options: Diagnose) -> "Result":
    """`analyses.diagnose` of a run; a row per kind of leaf, with sigma beside the sizes.

    A run's sigma in other units than those of the weights is left out. Of a run of adapters the rows are of the weights
    that these change, and have no share that noise leaves as they are: their noise is not rounded into them.

    Raises: ValueError as `load_runs` and `analyses.diagnose` do; for a sigma that is negative or not finite.
    """
    import torch

    from ... import analyses, lora, tree
    from ...folders.inputs.adapters.peft import is_adapter
    from ..train.noise_level import perturbed
    from .runs import facts, load_runs, result_of

    coef, sigma = options.coef, options.sigma
    if sigma is not None and not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}, must be finite and not negative")
    (run,) = load_runs([options.run], options=options.suite_options)
    module = run.suite.loss_fn(run.tasks[0]).module  # type: ignore[attr-defined]
    kinds = analyses.groups(module, run.suite.where)
    base, experts = run.inputs.base, run.inputs.experts
    if is_adapter(folder := options.run / run.tasks[0]):
        base = perturbed(base, lora.load_peft(folder)[1])
        experts = {task: {path: own[path] for path in base} for task, own in experts.items()}
    found = analyses.diagnose(base, experts, kinds, coef=coef)
    method, training = (facts(run).get(name) or {} for name in ("hyperparameters", "training"))
    adapters = training.get("lora") or {}
    in_weights = method.get("sigma_of", "weights") == "weights" and adapters.get("simulate") != "factors"
    suggested, own = analyses.suggested_sigma(found[-1]), method.get("sigma") if in_weights else None
    origin = "given" if sigma is not None else "the run's" if own else "suggested" if suggested else None
    used = sigma if sigma is not None else own or suggested
    weights = run.inputs.base
    if training.get("precision") in ("mixed", "bf16"):
        weights = tree.cast(weights, torch.bfloat16)  # the dtype of simulated states
    noise = method.get("noise", "uniform")
    shares = analyses.unmoved_shares(weights, kinds, used, noise) if used and not adapters else {}
    rows = [
        {
            **row._asdict(),
            "sigma_by_delta": used / row.delta if used and row.delta else None,
            "sigma_by_partners": used / row.partners if used and row.partners else None,
            "unmoved": shares.get(row.kind),
        }
        for row in found
    ]
    return result_of("diagnose", [run], rows, coef=coef, sigma=used, sigma_origin=origin, suggested_sigma=suggested)
