"""When does merge-aware training pay? Fits of the gain over FT on the runs of all stored studies; runs nothing.

``python -m benchmarks when-it-pays`` reads benchmarks/results and writes when_it_pays.json there, the numbers of
docs/when_it_pays.md between its marks, and docs/results/when_it_pays.png.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from smat_fn import machine
from smat_fn.checkpoint import write_bytes, write_text
from smat_fn.config import DIGITS
from smat_fn.report.plots import colours, new_figure, png, tidy

from .methods import REFERENCE
from .readme import RESULTS, ROOT, fill, ranged, table

COMMAND = "python -m benchmarks when-it-pays"
PAGE, FIGURE = ROOT / "docs/when_it_pays.md", ROOT / "docs/results/when_it_pays.png"
MEAN = "mean"  # of the mergers of a study
FEW = 10  # clusters, below which sandwich intervals are known to be too narrow


class Run(NamedTuple):
    """The experts of one method at one seed, merged by one merger or the mean over those of the study."""

    study: str
    split: str
    label: str
    reference: bool  # plain fine-tuning
    optimizer: str
    seed: int
    merger: str
    tasks: int
    lr: float
    other_lr: float | None  # Adam's, where Muon's is ``lr``
    steps: int
    score: float  # merged, mean over tasks
    expert: float | None = None  # mean over tasks
    geometry: Mapping[str, float] | None = None  # mean cosine of pairs of task vectors, and mean norm


class Gain(NamedTuple):
    """A run beside that of FT at the same seed, with the same optimizer, merger and number of experts."""

    run: Run
    gain: float
    values: dict[str, float]  # of covariates, those that can be had

    @property
    def cluster(self) -> str:
        """Runs of one seed of one study share data and FT."""
        return f"{self.parent} {self.run.seed}"

    @property
    def group(self) -> str:
        """Study and method, which have an intercept of their own."""
        return f"{self.run.study} {self.run.label}"

    @property
    def parent(self) -> str:
        """The study, whose tuning is a part of it; of the screening all parts are one."""
        return self.run.study.split()[0]


class Fit(NamedTuple):
    """``gain = intercept of study and method + slope x`` by least squares, with an interval robust to clusters."""

    question: str
    unit: str
    rows: int
    clusters: int
    groups: int
    slope: float
    interval: tuple[float, float]
    residual_sd: float
    explained: float  # share of the variance inside groups
    residuals: tuple[float, ...]  # least, quartiles, largest

    @property
    def settled(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.interval[0] <= 0 <= self.interval[1]


def main() -> None:
    """Write the results, the numbers of the page and the figure."""
    found = analyse(list(runs(RESULTS)))
    result = {**machine.describe(COMMAND), **as_json(found)}
    write_text(RESULTS / "when_it_pays.json", json.dumps(result, indent=1) + "\n")
    text = shown(found)
    fill(PAGE, "when-it-pays", text)
    write_bytes(FIGURE, figure(found["gains"]))
    print(text)


def runs(folder: Path) -> Iterator[Run]:
    """All runs whose results are stored in a folder."""
    for file in sorted(folder.glob("*_runs.jsonl")):
        if file.name.endswith(("_mergers_runs.jsonl", "_equal_passes_runs.jsonl")):
            continue  # experts of another study once more
        yield from _evaluated(folder, file.name.removesuffix("_runs.jsonl"), lines(file))
    for file in sorted(folder.glob("*_tuning.json")):
        yield from _tuned(file.name.removesuffix("_tuning.json"), json.loads(file.read_text())["runs"])
    for file in sorted(folder.glob("analyses/*/experts-curve.json")):
        yield from _curves(file.parent.name, json.loads(file.read_text())["rows"])
    if (file := folder / "digits.json").exists():
        yield from _pilot(json.loads(file.read_text()))
    screened = set[str]()  # methods of the screening that an earlier part of it has
    for file in sorted(folder.glob("screening*.json")):
        yield from _screened(file.stem.replace("_", " "), json.loads(file.read_text()), screened)
    if (file := folder / "antithetic.json").exists():
        yield from _screened("antithetic", json.loads(file.read_text()), set())
    if (file := folder / "digits_length.json").exists():
        yield from _lengths("digits_length", json.loads(file.read_text()))


def lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _facts(line: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a line is plain fine-tuning, and its optimizer, rate and steps."""
    training = line["training"]
    rate = training["muon_lr"] or training["lr"]  # Muon moves the matrices, which are nearly all weights
    own = {"optimizer": training["optimizer"], "lr": rate, "steps": training["steps"]}
    return {**own, "other_lr": training["lr"] if training["muon_lr"] else None, "reference": line["method"] == "ft"}


def _averaged(line: Mapping[str, Any]) -> bool:
    """Whether weights are averaged over steps: a control, neither plain fine-tuning nor merge-aware training."""
    return bool(line["training"].get("average"))


def _evaluated(folder: Path, study: str, settings: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    """Test scores by method, seed and merger."""
    scores: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in lines(folder / f"{study}.jsonl"):
        model = "expert" if row["model"].startswith("expert:") else row["model"]
        if model != "expert" or row["model"] == f"expert:{row['task']}":
            scores.setdefault((row["method"], row["seed"]), {}).setdefault(model, []).append(row["score"])
    for line in settings:
        if _averaged(line):
            continue
        own = scores[line["label"], line["seed"]]
        expert = fmean(own["expert"])
        for merger, tasks in own.items():
            if merger != "expert":
                yield Run(
                    study=study, split="test", label=line["label"], seed=line["seed"], merger=merger, tasks=len(tasks),
                    score=fmean(tasks), expert=expert, geometry=line.get("geometry"), **_facts(line),
                )  # fmt: skip


def _tuned(study: str, settings: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    """Dev scores of candidates: the mean over mergers, at many learning rates."""
    for line in settings:
        if _averaged(line):
            continue
        name = line["label"].partition(",")[0]  # without what is said of its steps
        label = " ".join([name, *(f"{name} {value}" for name, value in line["hyperparameters"].items())])
        yield Run(
            study=f"{study} tuning", split="dev", label=label, seed=line["seed"], merger=MEAN, tasks=0,
            score=line["five"], geometry=line.get("geometry"), **_facts(line),
        )  # fmt: skip


def _screened(study: str, found: Mapping[str, Any], known: set[str]) -> Iterator[Run]:
    """Test scores of a screening at FT's best learning rate on dev, by seed and merger.

    Args: known: labels beside FT's that are left out; gets those of this one.
    """
    plain = [line for line in found["lines"] if line["family"] == REFERENCE]
    rate = max(plain, key=lambda line: fmean(line["dev"]))["training"]["lr"]
    for line in found["lines"]:
        if _averaged(line) or line["training"]["lr"] != rate or line["label"] in known:
            continue
        known |= set() if line in plain else {line["label"]}
        for merger in sorted(line["test"].keys() - {"expert", MEAN}):
            for place, seed in enumerate(found["seeds"]):
                facts = {**_facts(line), "reference": line in plain}  # not FT of a part, or of a linearised model
                yield Run(
                    study=study, split="test", label=line["label"], seed=seed, merger=merger, tasks=4,
                    score=line["test"][merger][place], expert=line["test"]["expert"][place], **facts,
                )  # fmt: skip


def _lengths(study: str, found: Mapping[str, Any]) -> Iterator[Run]:
    """Dev scores of a study of several lengths of training: each learning rate at each of them."""
    for line in found["lines"]:
        for seed, score in zip(found["seeds"], line["dev"], strict=True):
            yield Run(
                study=f"{study} tuning", split="dev", label=line["label"], seed=seed, merger=MEAN, tasks=0, score=score,
                **_facts(line),
            )  # fmt: skip


def _pilot(found: Mapping[str, Any]) -> Iterator[Run]:
    """FT against SMAT on digits: test scores by merger, and dev scores of every learning rate."""
    shared: dict[str, Any] = {"optimizer": "adam", "other_lr": None, "steps": DIGITS.training.steps}
    for label, line in found["test"].items():
        own = {**shared, "label": label, "reference": label == "FT", "lr": found["lr"][label.lower()]}
        for merger in ("wa", "ta", "ties", "dare", "della"):
            for seed, score, expert in zip(found["seeds"], line[merger.upper()], line["Expert"], strict=True):
                yield Run(
                    study="digits", split="test", seed=seed, merger=merger, tasks=4, score=score, expert=expert, **own
                )
    for label, rates in found["dev"].items():
        for lr, scores in rates.items():
            for seed, score in zip(found["seeds"], scores, strict=True):
                own = {**shared, "label": label.upper(), "reference": label == "ft", "lr": float(lr)}
                yield Run(study="digits tuning", split="dev", seed=seed, merger=MEAN, tasks=0, score=score, **own)


def _curves(study: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    """Test scores by number of experts, the mean over subsets and tasks; Adam's methods at their chosen rates."""

    def place(row: Mapping[str, Any]) -> tuple[str, int, int]:
        return row["method"], row["seed"], row["experts"]

    for (label, seed, experts), own in groupby(sorted(rows, key=place), place):
        yield Run(
            study=f"{study} curve", split="test", label=label, reference=label == "FT", optimizer="adam", seed=seed,
            merger="ta", tasks=experts, lr=math.nan, other_lr=None, steps=0, score=fmean(row["score"] for row in own),
        )  # fmt: skip


def gains(found: Sequence[Run]) -> list[Gain]:
    """Every run beside FT's, with its covariates.

    FT's drop by merging is the mean over the *other* seeds of the study: that of the same seed has FT's own score in
    it, as the gain has, so that noise alone would make a slope. Tuning runs are compared at equal learning rates and
    steps.
    """
    references = {_place(run): run for run in found if run.reference}
    drops: dict[tuple[Any, ...], dict[int, float]] = {}
    for run in references.values():
        if run.expert is not None:
            drops.setdefault(_kind(run), {})[run.seed] = run.expert - run.score
    result = []
    for run in found:
        ft = references.get(_place(run))
        if run.reference or ft is None:
            continue
        values = {"experts": float(run.tasks)} if run.study.endswith("curve") else {}
        others = [drop for seed, drop in drops.get(_kind(run), {}).items() if seed != run.seed]
        if others:
            values["drop"] = values["inside"] = fmean(others)
        if run.expert is not None and ft.expert is not None:
            values["expert"] = run.expert - ft.expert
        if run.split == "dev":
            values |= {"rate": math.log2(run.lr), "length": math.log2(run.steps)}
        elif run.steps:
            values |= {"apart": math.log2(run.lr / ft.lr), "steps": math.log2(run.steps / ft.steps)}
        for name, value in (ft.geometry or {}).items():
            values[name] = 100 * value if name == "cosine" else value
        result.append(Gain(run, run.score - ft.score, values))
    return result


def _kind(run: Run) -> tuple[Any, ...]:
    return run.study, run.split, run.optimizer, run.merger, run.tasks


def _place(run: Run) -> tuple[Any, ...]:
    return (*_kind(run), run.seed, *((run.lr, run.other_lr, run.steps) if run.split == "dev" else ()))


# covariate -> (question, unit of the slope)
QUESTIONS = {
    "drop": ("FT's loss by merging, between studies and mergers", "a point that FT loses"),
    "inside": ("FT's loss by merging, between mergers of a study", "a point that FT loses"),
    "experts": ("number of experts merged, by TA", "an expert more"),
    "rate": ("learning rate, the same for both (tuning)", "a doubling"),
    "length": ("steps of training, the same for both (tuning)", "a doubling"),
    "apart": ("the method's learning rate above FT's", "a doubling"),
    "steps": ("the method's steps above FT's", "a doubling"),
    "expert": ("the experts' own gain before merging", "a point of the experts'"),
    "cosine": ("cosine of FT's task vectors", "0.01"),
    "norm": ("norm of FT's task vectors", "1"),
}
# covariate -> what has an intercept of its own, where this is not the method in its study
GROUPS: Mapping[str, Callable[[Gain], str]] = {
    "drop": lambda row: row.run.label,  # it differs between studies too
    "inside": lambda row: f"{row.group} {row.run.seed}",  # FT's noise is in its gain, and in the drops of other seeds
}
SHARED = "drop", "inside"  # they hardly differ between seeds, so the seeds of a study are one cluster


def analyse(found: Sequence[Run]) -> dict[str, Any]:
    """Fits by covariate, those that no stored run can answer with the reason, and mean gains by merger."""
    rows = gains(found)
    fits, missing = {}, {}
    for name in QUESTIONS:
        try:
            fits[name] = fit_of(rows, name)
        except ValueError as error:
            missing[name] = str(error)
    return {"gains": rows, "fits": fits, "missing": missing, "mergers": by_merger(rows), "rates": by_rate(found)}


def fit_of(rows: Sequence[Gain], name: str) -> Fit:
    """`fit` of the rows that have a covariate. Raises: ValueError as it."""
    own = [row for row in rows if name in row.values]
    cluster: Callable[[Gain], str] = (lambda row: row.parent) if name in SHARED else (lambda row: row.cluster)
    return fit(own, name, GROUPS.get(name, lambda row: row.group), cluster, *QUESTIONS[name])


def fit(
    rows: Sequence[Gain],
    name: str,
    group: Callable[[Gain], str],
    cluster: Callable[[Gain], str] = lambda row: row.cluster,
    question: str = "",
    unit: str = "",
) -> Fit:
    r"""Least squares inside groups: ``gain_ij = a_i + b x_ij + u_ij``.

    ``b = sum x~ y~ / sum x~^2`` of deviations from group means; its variance is the sandwich over clusters c,
    ``c G/(G-1) (n-1)/(n-p) sum_c (sum_{ij in c} x~ u)^2 / (sum x~^2)^2``, the interval that of Student's t with G - 1
    degrees of freedom.

    Raises:
        ValueError: no rows, fewer than three clusters, or a covariate that is constant inside every group.
    """
    if not rows:
        raise ValueError("no stored run has it")
    spread: dict[str, set[float]] = {}
    for row in rows:
        spread.setdefault(group(row), set()).add(round(row.values[name], 12))
    rows = [row for row in rows if len(spread[group(row)]) > 1]  # the others say nothing about a slope
    if not rows:
        raise ValueError("one value for each method, so it cannot be separated from the method")
    x, y = np.array([row.values[name] for row in rows]), np.array([row.gain for row in rows])
    names, clusters = [group(row) for row in rows], [cluster(row) for row in rows]
    x, y = _centred(x, names), _centred(y, names)
    count, groups, squares, total = len(set(clusters)), len(set(names)), float(x @ x), float(y @ y)
    if count < 3 or len(rows) <= groups + 1:
        raise ValueError(f"stored for {count} {'studies' if name in SHARED else 'seeds'} alone")
    from scipy.stats import t

    slope = float(x @ y) / squares
    rest = y - slope * x
    sums = [float((x * rest)[[own == c for own in clusters]].sum()) for c in sorted(set(clusters))]
    adjust = count / (count - 1) * (len(rows) - 1) / (len(rows) - groups - 1)
    half = float(t.ppf(0.975, count - 1)) * math.sqrt(adjust * sum(s * s for s in sums)) / squares
    return Fit(
        question, unit, len(rows), count, groups, slope, (slope - half, slope + half),
        math.sqrt(float(rest @ rest) / (len(rows) - groups - 1)), 1 - float(rest @ rest) / total if total else 0.0,
        tuple(float(q) for q in np.quantile(rest, (0, 0.25, 0.5, 0.75, 1))),
    )  # fmt: skip


def _centred(values: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """Deviations from the means of groups."""
    found = values.copy()
    for group in set(groups):
        inside = np.array([own == group for own in groups])
        found[inside] -= values[inside].mean()
    return found


def by_merger(rows: Sequence[Gain]) -> list[dict[str, Any]]:
    """The mean gain of the methods by study and merger, with the interval over seeds of the mean over methods."""
    from smat_fn.evaluate.statistics import estimate

    kept = [row for row in rows if row.run.split == "test" and not row.run.study.endswith("curve")]
    found = []
    for place in sorted({(row.run.study, row.run.merger) for row in kept}):
        own = [row for row in kept if (row.run.study, row.run.merger) == place]
        seeds = [fmean(row.gain for row in own if row.run.seed == seed) for seed in sorted({r.run.seed for r in own})]
        result = estimate(seeds)
        drops = [row.values["drop"] for row in own if "drop" in row.values]  # a lone seed has no others
        found.append(
            {"study": place[0], "merger": place[1], "seeds": len(seeds), "gain": result.mean}
            | ({"drop": fmean(drops)} if drops else {})
            | ({"interval": list(result.interval)} if result.interval else {})
        )
    return found


def by_rate(found: Sequence[Run]) -> list[dict[str, Any]]:
    """FT's merged dev score by learning rate in tuning, and the mean gain of merge-aware candidates at that rate."""
    tuned = [run for run in found if run.split == "dev" and run.optimizer != "muon"]
    pairs, result = gains(tuned), []
    for place in sorted({(run.study, run.steps, run.lr) for run in tuned if run.reference}):
        scores = [run.score for run in tuned if run.reference and (run.study, run.steps, run.lr) == place]
        own = [row.gain for row in pairs if (row.run.study, row.run.steps, row.run.lr) == place]
        facts: dict[str, Any] = dict(zip(("study", "steps", "lr"), place, strict=True))
        facts |= {"seeds": len(scores), "ft": fmean(scores), "compared": len(own)}
        result.append(facts | ({"gain": fmean(own), "best": max(own)} if own else {}))
    return result


def as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    """The stored part: without the single gains, which the other results hold."""
    fits = {name: own._asdict() for name, own in found["fits"].items()}
    return {
        "compared": len(found["gains"]),
        "fits": fits,
        **{name: found[name] for name in ("missing", "mergers", "rates")},
    }


def shown(found: Mapping[str, Any]) -> str:
    """The tables of the page."""
    fits: Mapping[str, Fit] = found["fits"]
    settled = [own.question for own in fits.values() if own.settled]
    slopes = [
        (
            *(own.question, ranged({"mean": own.slope, "interval": own.interval}), own.unit),
            *(str(own.rows), f"{own.clusters}{' *' if own.clusters < FEW else ''}", f"{own.residual_sd:.2f}"),
            *(f"{100 * own.explained:.0f} %", f"{own.residuals[0]:+.1f} to {own.residuals[-1]:+.1f}"),
        )
        for own in fits.values()
    ]
    numbers = "Rows", "Clusters", "Residual sd", "Explained", "Residuals"
    head = "Gain over FT against", "Slope (95 % interval)", "for", *numbers
    absent = "; ".join(f"{QUESTIONS[name][0]} ({why})" for name, why in found["missing"].items())
    mergers = [
        (
            own["study"],
            own["merger"].upper().replace("_", "-"),
            f"{own['drop']:.1f}" if "drop" in own else "-",
            ranged({**own, "mean": own["gain"]}),
            str(own["seeds"]),
        )
        for own in found["mergers"]
    ]
    rates = [
        (own["study"].removesuffix(" tuning"), str(own["steps"]), f"{own['lr']:g}", f"{own['ft']:.2f}",
         f"{own['gain']:+.2f}" if "gain" in own else "-", f"{own['best']:+.2f}" if "best" in own else "-",
         str(own["compared"]))
        for own in found["rates"]
    ]  # fmt: skip
    told = (
        f"Significantly different from 0: {'; '.join(settled)}."
        if settled
        else "No slope differs significantly from 0."
    )
    return "\n".join(
        [
            table(head, slopes),
            f"{len(found['gains'])} comparisons with FT at the same seed. {told} One intercept for each method of each "
            "study (first line: each method; second line: each method and seed). Rows of one seed are one cluster of "
            "the interval, in the first two lines rows of one study: what FT loses hardly differs between its seeds. "
            f"* marks fewer than {FEW} clusters, where such intervals are too narrow.",
            *([f"\nUnavailable in the stored runs: {absent}."] if absent else []),
            "\nMean gain of all methods by merger (interval over seeds):\n",
            table(("Study", "Merger", "FT loses", "Gain", "Seeds"), mergers),
            "Tuning on dev, Adam or AdamW, every method at the learning rate and steps of FT beside it:\n",
            table(("Study", "Steps", "Learning rate", "FT, merged", "Mean gain there", "Largest", "Candidates"), rates),
        ]
    )


def figure(rows: Sequence[Gain]) -> bytes:
    """The gain against each of four covariates, means over seeds of every method, study and merger."""
    panels = ("drop", "length", "rate", "expert")
    figure, grid = new_figure(9, 6, nrows=2, ncols=2, squeeze=False)
    names = ("SMAT", "ASAM", "MergOPT", "OrthoReg", "others")
    palette = colours(names)
    for axes, name in zip(grid.flat, panels, strict=True):
        own = [row for row in rows if name in row.values]
        places: dict[tuple[Any, ...], list[Gain]] = {}
        for row in own:
            apart = row.values[name] if name in ("length", "rate") else None
            places.setdefault((row.group, row.run.merger, row.run.tasks, row.run.lr, apart), []).append(row)
        for label in names:
            at = [
                (fmean(row.values[name] for row in few), fmean(row.gain for row in few))
                for (group, *_), few in places.items()
                if _family(few[0].run.label) == label
            ]
            if at:
                axes.scatter(*zip(*at, strict=True), s=14, color=palette[label], edgecolor="0.3", lw=0.3, label=label)
        axes.axhline(0, color="0.4", lw=0.8)
        axes.set_xlabel(QUESTIONS[name][0] + (", log2" if name in ("length", "rate") else ""))
        axes.set_ylabel("gain over FT")
        tidy(axes, "both")
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    handles = {text: handle for own in legends for handle, text in zip(*own, strict=True)}
    figure.legend(handles.values(), handles.keys(), ncols=len(names), loc="outside upper center", frameon=False)
    return png(figure)


def _family(label: str) -> str:
    first = label.replace("-", " ").replace(",", " ").split()[0]
    return first if first in ("SMAT", "ASAM", "MergOPT", "OrthoReg") else "others"
