"""The analyses on folders: load runs, compute, and keep the numbers with what they came from.

Each returns a result that `analyses.results` prints and writes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ... import analyses, checkpoint, errors, random
from ...analyses import Job, Scored
from ...analyses.results import Result
from ...analyses.stacked import Progress
from ...models.pretrained import is_encoder_decoder
from ...report.tables import main_table
from ...suites import Suite
from ...types import Micro
from ..evaluate.evaluation import evaluate, find_checkpoints
from ..merge.inputs import find_inputs
from .runs import Run, chosen_merger, facts, load_runs, merged_params, result_of, standard_runs


def experts_curve(
    paths: Sequence[Path],
    *,
    merger: str,
    coef: Sequence[float],
    preset: str | None,
    seed: int,
    split: str,
    memory: int | None,
    options: Mapping[str, Any],
) -> Result:
    """`analyses.experts_curve` of every run; a row per merged model and task.

    Args: coef: one for all runs, or one each, or none (`chosen_merger`); preset: settings of mergers, by default that
        of the experts; seed: of random masks; memory: bytes for models evaluated together; options: of the suites.
    Raises: ValueError as `load_runs`, `standard_runs` and `chosen_merger` do; for another number of coefs.
    """
    if len(coef) not in (0, 1, len(paths)):
        raise ValueError(f"{len(coef)} coefs for {len(paths)} runs: give none, one for all, or one each")
    runs = load_runs(paths, options=options)
    reference = _reference(standard_runs(runs), split)
    coefs = [None] * len(runs) if not coef else list(coef) * (len(runs) if len(coef) == 1 else 1)
    configs = [
        chosen_merger(run, merger, coef=c, preset=preset, seed=seed, memory=memory)
        for run, c in zip(runs, coefs, strict=True)
    ]
    rows = []
    total = sum(count * (len(run.tasks) if count < len(run.tasks) else 1) for run in runs for count in _counts(run))
    with _progress("score", total) as done:
        for run, config in zip(runs, configs, strict=True):
            found = analyses.experts_curve(
                run.tasks,
                partial(merged_params, config, run, seed=seed),
                _scores(run.suite, split, memory, done),
                reference=reference[run.seed],
            )
            rows += _lines(found, run, coef=getattr(config, "coef", None))
    return result_of("experts-curve", runs, rows, merger=merger, split=split, merge_seed=seed)


def replacement(
    standard: Sequence[Path],
    others: Sequence[Path],
    *,
    coef: float,
    split: str,
    memory: int | None,
    options: Mapping[str, Any],
) -> Result:
    """`analyses.replacement_curve` of every other run against the standard run of its seed; rows as `experts_curve`.

    Raises: ValueError as `load_runs` and `standard_runs` do; for a standard run of another method than ft.
    """
    runs = load_runs([*standard, *others], options=options)
    ft, rest = standard_runs(runs), runs[len(standard) :]
    errors.raise_problems(
        [f"{run.path} is of method {run.method}, not ft" for run in runs[: len(standard)] if run.method != "ft"]
    )
    reference = _reference(ft, split)
    rows = []
    sets = sum(len(analyses.replacement_sets(run.tasks)) * len(run.tasks) for run in rest)
    with _progress("score", sets) as done:
        for run in rest:
            found = analyses.replacement_curve(
                run.inputs.base,
                ft[run.seed].inputs.experts,
                run.inputs.experts,
                _scores(run.suite, split, memory, done),
                reference=reference[run.seed],
                coef=coef,
            )
            rows += _lines(found, run, coef=coef)
    return result_of("replacement", runs, rows, coef=coef, split=split)


def gains(paths: Sequence[Path], *, split: str, options: Mapping[str, Any]) -> Result:
    """`analyses.gains` of experts and merged checkpoints at or below the paths; a row per method and seed.

    Raises: ValueError as `evaluate`, `main_table` and `analyses.gains` do.
    """
    folders = find_checkpoints(paths)
    with _progress("checkpoint", len(folders)) as done:
        scores = evaluate(folders, split=split, options=options, on_model=lambda name: done(1))
    found = analyses.gains(main_table(scores, split=split))
    rows = [
        {
            "method": method,
            "seed": seed,
            "expert": gain.expert.by_seed[seed],
            "merged": gain.merged.by_seed[seed],
            "drop": drop,
        }
        for method, gain in found.items()
        for seed, drop in gain.drop.by_seed.items()
    ]
    kept = ("label", "kind", "task", "merger", "hyperparameters", "seed", "suite", "fingerprint", "versions")
    manifests = {folder: checkpoint.load_manifest(folder) for folder in folders}
    models = [{"path": str(f), **{name: m[name] for name in kept if name in m}} for f, m in manifests.items()]
    return {**result_of("gains", [], rows, split=split), "runs": models}


def landscape(
    standard: Path,
    methods: Sequence[Path],
    *,
    tasks: Sequence[str],
    coef: float,
    a: Sequence[float],
    b: Sequence[float],
    batches: int,
    seed: int,
    memory: int | None,
    options: Mapping[str, Any],
) -> Result:
    """`analyses.landscape` of the standard run and of every other, for every task; a row per point.

    The `samples` of a task are the same for all points and methods. The suite of a causal language model counts the
    answer's tokens alone (mask_prompt), and cuts prompts in the middle so that answers stay, unless ``options`` say
    otherwise.

    Args: tasks: which, none: all; a, b: axes of the grid; batches: at most so many of a task; seed: of samples.
    Raises: ValueError as `load_runs` does; for tasks that the runs lack, and fewer than one batch.
    """
    recipe = checkpoint.load_manifest(find_inputs(standard)[1][0]).get("suite") or {}
    causal = "mask_prompt" in recipe and not is_encoder_decoder(options.get("model", recipe["model"]))
    answers = {"mask_prompt": True, "truncate": "prompt-middle"} if causal else {}
    runs = load_runs([standard, *(path for path in methods if path != standard)], options={**answers, **options})
    ft = runs[0]
    problems = [f"batches is {batches}, must be at least 1"] if batches < 1 else []
    problems += [
        f"runs have no task {task!r}, they have {', '.join(ft.tasks)}" for task in tasks if task not in ft.tasks
    ]
    problems += [
        f"{run.path} is of seed {run.seed}, {ft.path} of {ft.seed}: give runs of one seed"
        for run in runs
        if run.seed != ft.seed
    ]
    errors.raise_problems(problems)
    chosen = list(dict.fromkeys(tasks)) or list(ft.tasks)
    rows: list[dict[str, Any]] = []
    with _progress("point", len(chosen) * len(runs) * len(a) * len(b)) as done:
        for task in chosen:
            partners = analyses.partner_update(ft.inputs.base, ft.inputs.experts, task, coef=coef)
            split, found = samples(ft.suite, task, batches=batches, seed=seed)
            loss = analyses.mean_loss(ft.suite.loss_fn(task), found)
            for run in runs:
                values = analyses.landscape(
                    ft.inputs.base, run.inputs.experts[task], partners, loss, a=a, b=b, memory=memory, done=done
                )
                rows += [
                    {"task": task, "method": run.label, "a": x, "b": y, "loss": value}
                    for y, line in zip(b, values, strict=True)
                    for x, value in zip(a, line, strict=True)
                ]
    lost = [row for row in rows if not math.isfinite(row["loss"])]
    if lost:
        where = ", ".join("{task} {method} ({a:g}, {b:g})".format(**row) for row in lost[:5])
        raise ValueError(f"the loss is not finite at {len(lost)} of {len(rows)} points ({where}): narrow --a and --b")
    origin = {"split": split, "batches": batches, "seed": seed, "suite_options": {**answers, **options}}
    return result_of("landscape", runs, rows, coef=coef, a=list(a), b=list(b), tasks=chosen, samples=origin)


def diagnose(path: Path, *, coef: float, sigma: float | None, options: Mapping[str, Any]) -> Result:
    """`analyses.diagnose` of a run; a row per kind of leaf, with σ beside the sizes.

    Args: sigma: None: the run's own, or the suggested one where its method has none.
    """
    (run,) = load_runs([path], options=options)
    module = run.suite.loss_fn(run.tasks[0]).module  # type: ignore[attr-defined]
    kinds = analyses.groups(module, run.suite.where)
    found = analyses.diagnose(run.inputs.base, run.inputs.experts, kinds, coef=coef)
    suggested, own = analyses.suggested_sigma(found[-1]), facts(run).get("hyperparameters", {}).get("sigma")
    origin = "given" if sigma is not None else "the run's" if own else "suggested" if suggested else None
    used = sigma if sigma is not None else own or suggested
    shares = analyses.unmoved_shares(run.inputs.base, kinds, used) if used else {}
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


def samples(suite: Suite, task: str, *, batches: int, seed: int) -> tuple[str, list[Micro]]:
    """The split that samples are from, and the first ``batches`` batches of it with their weights.

    The dev split; where a suite has no batches of it, the training split as ``suite.batch`` gives it at steps 0, 1, ...
    under the key ``fold_in(fold_in(key(seed), "samples"), task)``, all batches of one weight.
    """
    if suite.dev_batches is not None:
        return "dev", suite.dev_batches(task)[:batches]
    key = random.fold_in(random.fold_in(random.key(seed), "samples"), task)
    return "train", [Micro(suite.batch(task, key, step), 1.0) for step in range(batches)]


def _counts(run: Run) -> range:
    return range(2, len(run.tasks) + 1)


def _reference(standard: Mapping[int, Run], split: str) -> dict[int, dict[str, float]]:
    return {
        seed: {task: run.suite.score(params, task, split) for task, params in run.inputs.experts.items()}
        for seed, run in standard.items()
    }


def _scores(
    suite: Suite, split: str, memory: int | None, done: Progress
) -> Callable[[Sequence[Job]], list[dict[str, float]]]:
    tensor = suite.score_tensor
    return partial(
        analyses.score_jobs,
        score=lambda params, task: suite.score(params, task, split),
        batched=None if tensor is None else lambda params, task: tensor(params, task, split),
        memory=memory,
        done=done,
    )


def _lines(found: Sequence[Scored], run: Run, *, coef: float | None) -> list[dict[str, Any]]:
    return [
        {"method": run.label, "seed": run.seed, **row._asdict(), "subset": "+".join(row.subset), "coef": coef}
        for row in found
    ]


@contextmanager
def _progress(unit: str, total: int) -> Iterator[Progress]:
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, disable=None, leave=False) as bar:
        yield bar.update
