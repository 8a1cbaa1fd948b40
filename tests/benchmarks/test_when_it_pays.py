"""Fits of the gain: closed forms, unavailable quantities, and the page against the stored results."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks import readme
from benchmarks import when_it_pays as pays
from benchmarks.study.trials import geometry
from smat_fn import checkpoint
from smat_fn.evaluate.statistics import estimate


def run(label, seed, score, *, study="s", merger="ta", expert=90.0, **options):
    own = {"split": "test", "optimizer": "adam", "tasks": 4, "lr": 1e-3, "other_lr": None, "steps": 100, **options}
    return pays.Run(study=study, label=label, reference=label == "FT", seed=seed, merger=merger, score=score,
                    expert=expert, **own)  # fmt: skip


def rows(x, y, seeds, labels=None):
    labels = labels or ["M"] * len(x)
    return [
        pays.Gain(run(label, seed, 0.0), gain, {"x": value})
        for value, gain, seed, label in zip(x, y, seeds, labels, strict=True)
    ]


def label_of(row):
    return row.run.label


def test_a_line_is_found_and_leaves_no_residuals():
    x = [0.0, 1.0, 2.0, 5.0, 1.0, 3.0]
    labels = ["A", "A", "A", "B", "B", "B"]
    y = [1 + 2 * v for v in x[:3]] + [-4 + 2 * v for v in x[3:]]
    found = pays.fit(rows(x, y, [1, 2, 3, 1, 2, 3], labels), "x", label_of)
    assert found.slope == pytest.approx(2)
    assert found.interval == pytest.approx((2, 2))
    assert found.residual_sd == pytest.approx(0, abs=1e-12)
    assert found.explained == pytest.approx(1)
    assert (found.rows, found.clusters, found.groups) == (6, 3, 2)
    assert found.settled


def test_the_interval_is_the_sandwich_written_out():
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=24), generator.normal(size=24)
    seeds, labels = [i % 6 for i in range(24)], [["A", "B"][i // 12] for i in range(24)]
    found = pays.fit(rows(x.tolist(), (0.5 * x + noise).tolist(), seeds, labels), "x", label_of)
    design = np.stack([x, *(np.array([own == name for own in labels], float) for name in "AB")], 1)
    y = 0.5 * x + noise
    bread = np.linalg.inv(design.T @ design)
    rest = y - design @ (bread @ design.T @ y)
    meat = sum(np.outer(s, s) for c in range(6) for s in [design[c::6].T @ rest[c::6]])
    from scipy.stats import t

    variance = (bread @ meat @ bread)[0, 0] * (6 / 5) * (23 / 21)
    assert found.slope == pytest.approx((bread @ design.T @ y)[0])
    assert found.interval[1] - found.slope == pytest.approx(t.ppf(0.975, 5) * math.sqrt(variance))


def test_gains_are_beside_ft_of_the_same_seed_and_ft_s_loss_is_of_the_others():
    found = [run("FT", seed, 80.0 + seed, expert=90.0) for seed in (1, 2, 3)]
    found += [run("SMAT", seed, 81.0 + seed, expert=91.0) for seed in (1, 2, 3)]
    found += [run("SMAT", 9, 50.0), run("SMAT", 1, 50.0, merger="wa"), run("SMAT", 1, 50.0, optimizer="muon")]
    gains = pays.gains(found)
    assert [(row.run.seed, row.gain) for row in gains] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert [row.values["drop"] for row in gains] == [90 - 82.5, 90 - 82.0, 90 - 81.5]
    assert {row.values["expert"] for row in gains} == {1.0}
    # noise in FT's score makes no slope
    assert "rate" not in gains[0].values


def test_tuning_runs_are_compared_at_equal_rates():
    rates = {"split": "dev", "merger": pays.MEAN, "expert": None}
    found = [run("FT", 1, 80.0, lr=1e-3, **rates), run("FT", 1, 70.0, lr=2e-3, **rates)]
    found += [run("SMAT", 1, 81.0, lr=1e-3, **rates), run("SMAT", 1, 75.0, lr=2e-3, **rates)]
    found += [run("SMAT", 1, 99.0, lr=4e-3, **rates), run("SMAT", 1, 99.0, lr=1e-3, **rates | {"steps": 50})]
    gains = pays.gains(found)
    assert [row.gain for row in gains] == [1.0, 5.0]
    assert gains[1].values["rate"] - gains[0].values["rate"] == pytest.approx(1)


def test_a_part_of_the_screening_has_ft_s_best_rate_and_methods_that_no_earlier_part_has():
    def line(family, label, lr, dev, method="ft"):
        test = {"wa": [70.0, 71.0], "expert": [90.0, 91.0], "mean": [0.0, 0.0]}
        training = {"optimizer": "adam", "lr": lr, "muon_lr": None, "steps": 4}
        return {"family": family, "label": label, "method": method, "training": training, "dev": dev, "test": test}

    lines = [line("FT", "FT", 1.0, [5.0, 5.0]), line("FT", "FT", 2.0, [7.0, 4.0])]
    lines += [line("M", "old", 2.0, [0.0], "m"), line("M", "new", 2.0, [0.0], "m"), line("M", "new", 1.0, [9.0], "m")]
    lines.append(line("FT, linearised", "FT, linearised", 2.0, [0.0]))
    known = {"old"}
    found = list(pays._screened("screening more", {"seeds": [3, 4], "lines": lines}, known))
    places = [(own.label, own.reference, own.lr, own.seed, own.score, own.expert) for own in found]
    assert places == [
        (label, label == "FT", 2.0, seed, score, score + 20)
        for label in ("FT", "new", "FT, linearised")
        for seed, score in ((3, 70.0), (4, 71.0))
    ]
    assert known == {"old", "new", "FT, linearised"}
    gain = pays.gains(found)[0]
    assert (gain.parent, gain.cluster) == ("screening", "screening 3")


def test_cosines_and_norms_are_used_where_they_are_stored():
    found = []
    for seed in range(4):
        place = {"geometry": {"cosine": seed / 10, "norm": 1.0 + seed % 2}}
        found += [run("FT", seed, 80.0, **place), run("SMAT", seed, 80.0 + seed, **place)]
    fits = pays.analyse(found)["fits"]
    assert fits["cosine"].slope == pytest.approx(0.1)  # of a hundredth
    assert fits["norm"].rows == 4
    assert pays.analyse([own._replace(geometry=None) for own in found])["missing"]["cosine"] == "no stored run has it"


def test_seeds_of_a_study_are_one_cluster_of_a_slope_against_ft_s_loss():
    def found(seeds):
        for study, slope in (("steep", 1.0), ("flat", 0.0), ("down", -0.5)):
            for seed in range(seeds):
                for merger, loss in (("ta", 5.0), ("wa", 10.0), ("ties", 12.0)):
                    ft = 90.0 - loss - seed  # noise of the seed, in every merger alike
                    gain = slope * loss + seed
                    yield from (run(x, seed, ft + g, merger=merger, study=study) for x, g in (("FT", 0), ("M", gain)))

    few, many = (pays.analyse(list(found(seeds)))["fits"] for seeds in (3, 30))
    for name in ("drop", "inside"):
        assert few[name].clusters == many[name].clusters == 3
    # one merger's loss and its gain at one seed: the noise of seeds makes no slope, and more seeds no narrower interval
    assert few["inside"].slope == pytest.approx(0.5 / 3) == many["inside"].slope
    widths = [one["inside"].interval[1] - one["inside"].interval[0] for one in (few, many)]
    assert widths[1] > 0.9 * widths[0]


def test_the_page_says_the_slopes_without_the_language_model():
    page = " ".join(pays.PAGE.read_text(encoding="utf-8").split())
    every = pays.gains(list(pays.runs(pays.RESULTS)))
    rows = [row for row in every if not row.parent.startswith("smollm2")]
    assert len({row.parent for row in every} - {row.parent for row in rows}) == 2
    drop, inside = (pays.fit_of(rows, name).slope for name in ("drop", "inside"))
    assert f"Without these studies they are {drop:+.2f} and {inside:+.2f}." in page


@pytest.mark.parametrize(
    ("x", "seeds", "why"),
    [
        ([], [], "no stored run has it"),
        ([1.0, 1.0, 2.0, 2.0], [1, 2, 3, 4], "cannot be separated from the method"),
        ([1.0, 2.0, 3.0, 4.0], [1, 1, 2, 2], "stored for 2 seeds alone"),
        # a covariate that does not vary in its group counts neither as a row nor as a cluster
        ([1.0, 2.0, 3.0, 3.0], [1, 2, 3, 4], "stored for 2 seeds alone"),
    ],
)
def test_covariates_that_cannot_be_fitted_say_why(x, seeds, why):
    with pytest.raises(ValueError, match=why):
        pays.fit(rows(x, [0.0] * len(x), seeds, list("AABB")[: len(x)]), "x", label_of)


def test_by_merger_is_the_t_interval_over_seeds():
    found = [run("FT", seed, 80.0) for seed in (1, 2, 3)]
    found += [run(name, seed, 80.0 + seed + shift) for name, shift in (("A", 0), ("B", 2)) for seed in (1, 2, 3)]
    (own,) = pays.by_merger(pays.gains(found))
    assert own["gain"] == 3.0
    assert own["interval"] == list(estimate([2.0, 3.0, 4.0]).interval)


def test_a_lone_seed_and_equal_gains_have_tables():
    lone = pays.analyse([run("FT", 1, 80.0), run("SMAT", 1, 81.0)])
    assert "| s | TA | - | +1.00 | 1 |" in pays.shown(lone)
    equal = [run(name, seed, score, expert=90.0 + seed * (score - 80)) for name, score in (("FT", 80.0), ("SMAT", 81.0))
             for seed in range(4)]  # fmt: skip
    assert (found := pays.analyse(equal)["fits"]["expert"]).slope == found.explained == 0
    assert readme.spread([1.5]) == "1.50"
    assert readme.of_pair([1.0], [2.0]) == readme.interval({"paired": {"A": {"mean": 1.0}}}, "A") == "+1.00"
    assert readme.seeds({"seeds": [1], "planned_seeds": [1]}) == "1 seed"


def test_the_geometry_of_experts_by_hand(tmp_path):
    base = {"w": torch.tensor([1.0, 1.0, 1.0]), "b": torch.tensor(2.0)}
    steps = {"one": [3.0, 0.0, 0.0], "two": [0.0, 4.0, 0.0], "three": [3.0, 4.0, 0.0]}
    checkpoint.save_expert(tmp_path / "base", base, checkpoint.describe(base, kind="base"))
    for name, step in steps.items():
        own = {"w": base["w"] + torch.tensor(step), "b": base["b"]}
        checkpoint.save_expert(tmp_path / name, own, checkpoint.describe(own, kind="expert"))
    found = geometry(tmp_path / "base", [tmp_path / name for name in steps])
    assert found == {"cosine": pytest.approx((0 + 3 / 5 + 4 / 5) / 3), "norm": pytest.approx(4)}


def rounded(value):
    """A value as JSON gives it back, its numbers with nine digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))


def test_the_page_and_the_stored_fits_are_those_of_the_stored_results():
    found = pays.analyse(list(pays.runs(pays.RESULTS)))
    page = pays.PAGE.read_text(encoding="utf-8")
    assert pays.shown(found) in page, f"run {pays.COMMAND}: other results are stored now"
    stored = json.loads((pays.RESULTS / "when_it_pays.json").read_text())
    # the last bits of a fit are those of the processor's linear algebra
    assert rounded({name: stored[name] for name in pays.as_json(found)}) == rounded(pays.as_json(found))
    assert pays.figure(found["gains"]).startswith(b"\x89PNG")
