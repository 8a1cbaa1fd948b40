"""Screening of training methods on digits by docs/protocols/screening.md: a first look at candidates, no evidence.

``python -m benchmarks screening OUT --seeds 111 112`` keeps its trials in OUT, so that a stopped run resumes and more
seeds can be added, and writes OUT/screening.json and OUT/screening.md again after every seed that is complete.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

import torch

from benchmarks.study.trial import Trial
from benchmarks.study.trials import Outcome, rows_of, run_trials
from smat_fn import machine
from smat_fn.checkpoint import write_text
from smat_fn.config import DIGITS, L2sp, MergerConfig, MethodConfig, Mixout, Msam, Talos, Training, TsvMerge, settings
from smat_fn.evaluate.statistics import paired

from .methods import Options, complete_seeds, replaced, say
from .readme import ranged, table

COMMAND = "python -m benchmarks screening"
SEEDS = tuple(range(111, 119))
USED = {*range(12), *range(21, 24), *range(31, 34), *range(41, 51), *range(101, 110)}  # by protocols, searches, pilots
USED |= {*range(131, 151), 301, *range(311, 319), 321, 322, *range(331, 341)}  # by later protocols, 121 to 128 left out
MERGERS: tuple[MergerConfig, ...] = (*(DIGITS.mergers[name] for name in ("wa", "ta", "ties")), TsvMerge())
MEAN = "wa", "ta", "ties"  # what the mean is over
COEFS = tuple(i / 10 for i in range(1, 21))
RATES = (2.5e-4, 5e-4)
REFERENCE = "FT"
BASE = DIGITS.training


class Candidate(NamedTuple):
    """A method with its hyperparameters, and how it is trained; candidates of one family differ in numbers alone."""

    family: str
    label: str
    method: MethodConfig
    training: Training
    options: Options = ()  # of the suite
    length: int = 400  # steps of FT beside it

    def trial(self, seed: int) -> Trial:
        """The trial of this candidate at a seed."""
        return Trial(self.label, "digits", self.method, self.training, seed, self.options, MERGERS, COEFS)

    @property
    def passes(self) -> int:
        """Forward and backward passes of an expert."""
        second = getattr(self.method, "calibration", 0)  # steps of TaLoS that have two
        return self.training.length * (2 if self.method.name == "asam" else 1) + second


def candidates(rates: Iterable[float], steps: int | None = None) -> list[Candidate]:
    """All candidates, each at every rate; as many steps as the preset has unless they are given."""
    base = BASE if steps is None else replace(BASE, steps=steps)
    ft, smat, asam = (DIGITS.methods[name] for name in ("ft", "smat", "asam"))
    radii = (0.25, 0.5, 1.0)
    methods: list[tuple[str, str, MethodConfig]] = [
        ("FT", "FT", ft),
        ("SMAT", "SMAT", smat),
        *(("ASAM", f"ASAM, rho {rho:g}", replaced(asam, rho=rho)) for rho in radii),
        *(("MSAM", f"MSAM, rho {rho:g}", Msam(rho=rho)) for rho in radii),
        ("MSAM, gradient", "MSAM along the last gradient, rho 0.5", Msam(rho=0.5, along="gradient")),
        *(("SMAT climbing", f"SMAT climbing, rho {rho:g}", replaced(smat, climb="clean", rho=rho)) for rho in radii),
        ("SMAT, relative", "SMAT, sigma 0.5 of the update", replaced(smat, sigma=0.5, sigma_of="update")),
        *(("SMAT, relative", f"SMAT, sigma {s:g} of each leaf's update", replaced(smat, sigma=s, sigma_of="leaf"))
          for s in (0.5, 1.0)),
        *(("SMAT, alpha above 1", f"SMAT, alpha up to {a:g}", replaced(smat, alpha_max=a)) for a in (1.5, 2.0)),
        *(("SMAT, alpha by depth", f"SMAT, alpha times {low:g} to {high:g} by depth",
           replaced(smat, alpha_depth=(low, high))) for low, high in ((0.5, 1.5), (1.5, 0.5))),
        ("SMAT, antithetic", "SMAT, antithetic draws", replaced(smat, antithetic=True)),
        *(("L2-SP", f"L2-SP, pull {pull:g}", L2sp(pull=pull)) for pull in (0.1, 1.0)),
        *(("TaLoS", f"TaLoS, sparsity {s:g}", Talos(sparsity=s, calibration=20)) for s in (0.5, 0.75, 0.9)),
        *(("Mixout", f"Mixout, p {p:g}", Mixout(drop_prob=p)) for p in (0.3, 0.7)),
        *(("SMAT climbing in both", f"SMAT climbing in both, rho {rho:g}", replaced(smat, climb="both", rho=rho))
          for rho in radii),
    ]  # fmt: skip
    found = [Candidate(*one, replace(base, lr=lr)) for lr in rates for one in methods]
    found += [
        Candidate(f"{name}, averaged", f"{name}, {average}", method, replace(base, lr=lr, average=average))
        for lr in rates
        for name, method in (("FT", ft), ("SMAT", smat))
        for average in ("ema:0.98", "swa:25%", "swa:75%")
    ]
    parts: tuple[tuple[str, Options], ...] = (
        ("FT, linearised", (("linearised", True),)),
        ("FT, attention alone", (("train", "attention"),)),
    )
    found += [Candidate(name, name, ft, replace(base, lr=lr), options) for lr in rates for name, options in parts]
    half = replace(base, steps=base.length // 2)  # as many passes as the others
    name = "ASAM, half the steps"
    found += [Candidate(name, f"{name}, rho 0.5", replaced(asam, rho=0.5), replace(half, lr=lr)) for lr in rates]
    muon = (
        ("FT-Muon", ft),
        ("SMAT-Muon", smat),
        ("MSAM-Muon", Msam(rho=0.5)),
        ("SMAT-Muon climbing", replaced(smat, climb="clean", rho=0.5)),
    )
    for lr in rates:
        training = replace(base, lr=lr, optimizer="muon", muon_lr=2e-3)
        found += [Candidate(name, name, method, training) for name, method in muon]
    return [one._replace(length=base.length) for one in found]


def main(arguments: list[str]) -> None:
    """Run what is missing, and write what was found."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=Path, metavar="OUT", help="keeps trials and results; a stopped run resumes")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="none of a protocol, search or pilot")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates of every candidate")
    parser.add_argument("--steps", type=int, nargs="+", default=[BASE.length], help="lengths of training")
    parser.add_argument("--families", nargs="+", help="only these; FT is always there (default: all)")
    asked = parser.parse_args(arguments)
    every = [one for steps in sorted({*asked.steps}) for one in candidates(sorted(asked.rates), steps)]
    known = list(dict.fromkeys(one.family for one in every))
    wanted = {REFERENCE, *(asked.families or known)}
    problems = [f"seed {seed} was used before: take another" for seed in asked.seeds if seed in USED]
    problems += [f"family {name!r} is unknown, choose from {', '.join(known)}" for name in sorted(wanted - {*known})]
    if problems or len({*asked.seeds}) < len(asked.seeds):
        parser.error("; ".join(problems or ["a seed is named twice"]))
    torch.set_num_threads(1)
    chosen = [one for one in every if one.family in wanted]
    facts = machine.describe(f"{COMMAND} OUT")
    screen(chosen, asked.seeds, asked.folder, asked.jobs, facts)


def screen(
    chosen: Sequence[Candidate], seeds: Sequence[int], folder: Path, jobs: int, facts: Mapping[str, Any]
) -> None:
    """All candidates at all seeds, seed by seed, into ``folder``; the summary again after every complete seed."""
    work = folder / "trials"
    trials = {(seed, i): one.trial(seed) for seed in seeds for i, one in enumerate(chosen)}
    places = {trial.folder(work): place for place, trial in trials.items()}
    running = run_trials(list(trials.values()), work, jobs=jobs, report=say, test=True, keep=lambda trial: False)
    found = ((*places[trial.folder(work)], outcome) for trial, outcome in running)
    for outcomes in complete_seeds(seeds, range(len(chosen)), found):
        complete = list(dict.fromkeys(seed for seed, _ in outcomes))
        lines = [line_of(one, [outcomes[seed, i] for seed in complete]) for i, one in enumerate(chosen)]
        result = {**facts, "seeds": complete, "planned_seeds": seeds, **compared(lines)}
        write_text(folder / "screening.json", json.dumps(result, indent=1) + "\n")
        write_text(folder / "screening.md", page(result))
        say(f"complete seeds: {', '.join(map(str, complete))}; {folder / 'screening.md'}")


def line_of(candidate: Candidate, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Settings and scores of a candidate, numbers by seed: means over tasks of test and dev scores."""
    rows = [rows_of(outcome) for outcome in outcomes]

    def mean(model: str) -> list[float]:
        return [fmean(row.score for row in own if row.model.partition(":")[0] == model) for own in rows]

    test = {name: mean(name) for name in ("expert", *(config.name for config in MERGERS))}
    dev = [[fmean(outcome["dev"][name].values()) for name in MEAN] for outcome in outcomes]
    return {
        "family": candidate.family,
        "label": candidate.label,
        "method": candidate.method.name,
        "hyperparameters": settings(candidate.method),
        **({"options": dict(candidate.options)} if candidate.options else {}),
        "training": outcomes[0]["trial"]["training"],
        "passes": candidate.passes,
        "length": candidate.length,
        "test": {**test, "mean": [fmean(scores) for scores in zip(*(test[name] for name in MEAN), strict=True)]},
        "dev": [fmean(scores) for scores in dev],
        "coefs": [outcome["coefs"] for outcome in outcomes],
        "cpu_seconds": [outcome["training_cpu_seconds"] for outcome in outcomes],
    }


def compared(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Every line with its difference from FT at its rate and length, and at every length the choice of each family.

    Differences are of the mean over `MEAN` on test, paired by seed; those of the choices, which dev makes, from FT's
    choice at the same length. With several lengths ``per_doubling`` has the least-squares slope of the latter against
    log2 of the length, by seed.
    """
    plain = {(line["length"], line["training"]["lr"]): line for line in lines if line["family"] == REFERENCE}
    for line in lines:
        reference = plain[line["length"], line["training"]["lr"]]
        line["from_ft"] = paired(reference["test"]["mean"], line["test"]["mean"])
        line["cpu_ratio"] = fmean(line["cpu_seconds"]) / fmean(reference["cpu_seconds"])
    chosen: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        best = chosen.get((line["length"], line["family"]))
        if best is None or fmean(line["dev"]) > fmean(best["dev"]):
            chosen[line["length"], line["family"]] = line
    by_dev = []
    for (length, family), line in chosen.items():
        first = chosen[length, REFERENCE]
        differences = {
            f"{prefix}from_ft": paired(first["test"][name], line["test"][name])
            for prefix, name in (("", "mean"), ("tsv_merge_", "tsv_merge"), ("expert_", "expert"))
        }
        scores = {name: fmean(line["test"][name]) for name in ("expert", "mean", "tsv_merge")}
        by_dev.append(
            {"family": family, "label": line["label"], "length": length, "lr": line["training"]["lr"], **scores,
             **differences}
        )  # fmt: skip
    return {"lines": lines, "by_dev": by_dev, "per_doubling": _per_doubling(by_dev)}


def _per_doubling(by_dev: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By family and merger: what a doubling of the length adds to the difference from FT, over seeds."""
    found = {}
    for family in dict.fromkeys(one["family"] for one in by_dev if one["family"] != REFERENCE):
        own = [one for one in by_dev if one["family"] == family]
        if len(own) < 2:
            continue
        lengths = [log2(one["length"]) for one in own]
        for merger, name in (("mean", "from_ft"), ("tsv_merge", "tsv_merge_from_ft")):
            seeds = zip(*(one[name]["differences"] for one in own), strict=True)
            slopes = [linear_regression(lengths, gains).slope for gains in seeds]
            found[f"{family}, {merger}"] = paired([0.0] * len(slopes), slopes)
    return found


def page(result: Mapping[str, Any]) -> str:
    """The page of the screening: two Markdown tables."""
    seeds = result["seeds"]
    columns = ("passes", "expert", "WA", "TA", "TIES", "mean", "mean - FT", "TSV-M", "dev", "CPU time / FT")
    head = ("candidate", "lr", *columns)
    every = [
        (
            line["label"],
            f"{line['training']['lr']:g}",
            str(line["passes"]),
            *(f"{fmean(line['test'][name]):.2f}" for name in ("expert", *MEAN, "mean")),
            _difference(line["from_ft"]),
            f"{fmean(line['test']['tsv_merge']):.2f}",
            f"{fmean(line['dev']):.2f}",
            f"{line['cpu_ratio']:.2f}",
        )
        for line in sorted(result["lines"], key=lambda line: -fmean(line["test"]["mean"]))
    ]
    choices = [
        (
            one["label"],
            str(one["length"]),
            f"{one['lr']:g}",
            f"{one['expert']:.2f}",
            f"{one['mean']:.2f}",
            _difference(one["from_ft"]),
            f"{one['tsv_merge']:.2f}",
            _difference(one["tsv_merge_from_ft"]),
        )
        for one in sorted(result["by_dev"], key=lambda one: (one["length"], -one["from_ft"]["mean"]))
    ]
    slopes = [(name, ranged(one)) for name, one in result["per_doubling"].items()]
    doubled = (
        "\n## What a doubling of the steps adds to the difference from FT, both as chosen by dev\n\n"
        f"{table(('candidate, merger', 'points a doubling (95 %)'), slopes)}"
    )
    return (
        f"# Screening on digits, {len(seeds)} seeds\n\nA first look by docs/protocols/screening.md, no evidence: many "
        f"candidates, few seeds ({', '.join(map(str, seeds))}), nothing fixed before. Test scores; mean: of WA, TA and "
        "TIES; differences from FT are at the same learning rate and steps, paired by seed, mean (standard "
        "deviation).\n\n"
        f"{table(head, every)}\n## The candidate of each family that dev would choose, against FT's\n\n"
        f"{table(('candidate', 'steps', 'lr', 'expert', 'mean', 'mean - FT', 'TSV-M', 'TSV-M - FT'), choices)}"
        f"{doubled if slopes else ''}"
    )


def _difference(found: Mapping[str, Any]) -> str:
    return f"{found['mean']:+.2f}" + (f" ({found['sd']:.2f})" if "sd" in found else "")
