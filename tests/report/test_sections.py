"""Tables and sentences of a report against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from smat_fn.evaluate import Result
from smat_fn.evaluate.results import Run
from smat_fn.report import build_report, plots
from smat_fn.report.tables import Cell

ORDER = ["Summary", "Main results", "Paired differences", "Scores by task", "Coefficients", "Settings", "Provenance"]

ORDER_WITH_MERGERS = [*ORDER[:2], "Trainers and mergers", *ORDER[2:], "Scores"]


def records(section, **wanted):
    return [r for r in section.table.records if all(r[name] == value for name, value in wanted.items())]


def column(section, name):
    return [row[section.table.columns.index(name)] for row in section.table.rows]


def test_the_main_table_has_changes_times_and_memory(make, sections):
    ft = make("FT", [50.0, 52.0], seconds=10.0, peak=3 << 30)
    smat = make("SMAT", [53.0, 56.0], "smat", seconds=15.0, peak=4 << 30)
    found = sections(ft, smat)
    main = found["Main results"]
    assert main.table.columns == (
        ["Method", "Expert", "WA", "TA", "TIES", "DARE", "DELLA", "Avg", "Drop", "Avg - FT", "Time x FT",
         "Peak memory"]
    )  # fmt: skip
    best, other = "**64.50 ± 2.12**", "**54.50 ± 2.12**"
    assert main.table.rows[0] == ["FT", "61.00 ± 1.41", *["51.00 ± 1.41"] * 6, "10.00 ± 0.00", None, "1", "3.0 GiB"]
    assert main.table.rows[1] == ["SMAT", best, *[other] * 6, "10.00 ± 0.00", "+3.50", "1.500 ± 0.000", "4.0 GiB"]
    (record,) = records(main, method="SMAT")
    assert (record["Avg"], record["Drop"], record["avg_change"], record["times_reference"]) == (54.5, 10.0, 3.5, 1.5)
    assert record["peak_memory_bytes"] == 4 << 30
    cost = found["Training cost"]
    # 2 experts of 50 steps
    assert cost.table.rows[1] == ["SMAT", "0.3000 ± 0.0000", "30.0 ± 0.0", "1.500 ± 0.000", "4.0 GiB", "+33.3 %"]
    assert list(found) == [*ORDER[:5], "Training cost", *ORDER[5:], "Scores"]


def test_more_labels_than_colours_have_no_figure_and_a_sentence_says_so(make, sections):
    few, many = (sections(*(make(f"label {n}", [50.0]) for n in range(count)))["Main results"] for count in (5, 6))
    assert (few.png, many.png) == (b"main_plot", None)
    assert "no figure" not in few.text
    assert many.text.endswith(" There are more labels than colours, so there is no figure.")


def test_a_row_of_a_whole_set_has_the_steps_of_all_its_experts(make, sections):
    rows, runs = make("FT", [50.0, 51.0], seconds=15.0)
    sets = [replace(run, model="experts", seconds=30.0) for run in runs if run.model == "expert:a"]
    found = [sections((rows, given))["Training cost"].table.rows for given in (runs, sets)]
    assert found[0] == found[1]
    assert found[1][0][:3] == ["FT", "0.3000 ± 0.0000", "30.0 ± 0.0"]


def test_dev_scores_while_training_have_a_section_and_early_ends_count_as_steps(make, sections):
    rows, runs = make("FT", [50.0], seconds=15.0)
    curve = {"by": "score", "curve": [[10, 40.0], [20, 61.25], [30, 60.0]], "step": 20, "best": 61.25}
    runs = [replace(run, evaluations=curve) if run.model == "expert:a" else run for run in runs]
    found = sections((rows, runs))
    dev = found["Dev scores while training"]
    assert dev.table.rows == [["FT", "a", 0, "score", "61.25", 20, "30 of 50", 3]]
    assert [r["value"] for r in records(dev, task="a", step=20)] == [61.25]
    assert found["Training cost"].table.rows[0][1] == "0.3750"  # 30 s of 30 + 50 steps
    assert "Dev scores while training" not in sections(make("FT", [50.0]))


def test_scores_alone_make_a_report_with_dashes(make, sections):
    found = sections((make("FT", [50.0])[0], []), (make("SMAT", [53.0], "smat")[0], []))
    assert [row[-2:] for row in found["Main results"].table.rows] == [[None, None]] * 2
    assert "Settings" not in found
    assert "Training cost" not in found
    assert found["Provenance"].text.count("not recorded") == 5


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ([51.0, 52.0, 53.0], ["+2.00", "-0.48 to +4.48", "3 / 0 / 0", "not established"]),
        ([51.0, 51.5, 51.2], ["+1.23", "+0.61 to +1.86", "3 / 0 / 0", "above"]),
        ([49.0, 48.5, 48.8], ["-1.23", "-1.86 to -0.61", "0 / 0 / 3", "below"]),
        ([51.0, 50.0, 48.0], ["-0.33", "-4.13 to +3.46", "1 / 1 / 1", "not established"]),
        ([50.0, 50.0, 50.0], ["+0.00", "+0.00 to +0.00", "0 / 3 / 0", "equal"]),
        ([53.0], ["+3.00", None, "1 / 0 / 0", "open: one seed"]),
        ([52.0, 52.0, 52.0], ["+2.00", "+2.00 to +2.00", "3 / 0 / 0", "open: the same in all seeds"]),
    ],
)
def test_the_summary_says_what_the_interval_says(make, sections, scores, told):
    found = sections(make("FT", [50.0, 50.0, 50.0]), make("SMAT", scores, "smat"))["Summary"]
    assert found.text.startswith("**FT** is the reference: 50.00 ± 0.00 on the mean of five mergers.\n\n")
    # experts are 10 above what is merged
    assert found.table.rows == [["SMAT", "FT", "Avg", *told, told[0], told[1], None]]
    (record,) = found.table.records
    assert (record["finding"], record["n"]) == (told[3], len(scores))
    assert record["mean"] == pytest.approx(np.mean(scores) - 50)


def test_the_summary_has_times_of_training(make, sections):
    studies = make("FT", [50.0, 51.0], seconds=10.0), make("SMAT", [52.0, 53.0], "smat", seconds=15.0)
    assert column(sections(*studies)["Summary"], "Time x") == ["1.500 ± 0.000"]


def test_methods_without_a_common_seed_or_a_reference_are_not_compared(make, sections):
    rows, _ = make("SMAT", [50.0, 51.0], "smat")
    later = [r for r in rows if r.seed == 1], []
    found = sections(make("FT", [50.0]), later)
    assert column(found["Summary"], "Finding") == ["no seed has both"]
    assert column(found["Summary"], "Difference") == [None]
    assert "Paired differences" not in found
    found = sections(later)
    assert found["Summary"].text.startswith("**SMAT** has no reference here: 51.00 on the mean of five mergers.\n")
    assert found["Summary"].table is None  # no summary.csv of one blank line
    assert found["Main results"].table.columns[-3] == "Avg - FT"


def test_without_five_mergers_the_experts_are_compared(make, sections):
    studies = make("FT", [50.0, 50.0]), make("SMAT", [51.0, 52.0], "smat")
    few = [([r for r in rows if r.model != "della"], runs) for rows, runs in studies]
    found = sections(*few)
    assert found["Summary"].table.rows[0][2:4] == ["Expert", "+1.50"]
    assert "on the experts, since WA, TA, TIES, DARE and DELLA were not all scored" in found["Summary"].text
    assert column(found["Main results"], "DELLA") == ["–", "–"]  # noqa: RUF001
    assert column(found["Paired differences"], "Scores") == ["Expert", "WA", "TA", "TIES", "DARE"]


def test_more_mergers_than_the_papers_have_a_table_with_every_way_to_train(make, sections):
    studies = make("FT", [50.0, 50.0, 50.0]), make("SMAT", [51.0, 51.5, 51.2], "smat")
    assert "Trainers and mergers" not in sections(*studies)
    assert "Trainers and mergers" in ORDER_WITH_MERGERS
    for rows, runs in studies:
        label, seeds = rows[0].method, sorted({row.seed for row in rows})
        for seed in seeds[: 3 if label == "FT" else 2]:
            coef = 1.2 + 0.2 * seed
            rows += [Result(label, "iso_c", task, "test", 60.0 + seed, seed, coef) for task in "ab"]
            own = {"name": "toy", "seed": seed}
            runs.append(Run(label, "iso_c", seed, dev_curve=[(1.0, 55.0), (coef, 60.0)], suite=own))
    found = sections(*studies, facts={"chosen": {"SMAT": {}}})
    assert list(found) == ORDER_WITH_MERGERS
    section = found["Trainers and mergers"]
    assert section.png == b"merger_plot"
    assert section.table.columns == ["Merger", "Coefficient", "Seeds", "FT", "SMAT", "SMAT - FT"]
    assert column(section, "Merger") == ["WA", "TA", "TIES", "DARE", "DELLA", "ISO_C"]
    ta, iso = section.table.rows[1], section.table.rows[-1]
    assert ta == ["TA", "0.3", "3", "50.00 ± 0.00", "**51.23 ± 0.25**", "+1.23 (+0.61 to +1.86)"]
    seeds = "FT 0, 1, 2; SMAT 0, 1"
    assert iso == ["ISO_C", "1.2 to 1.6 dev", seeds, "61.00 ± 1.00", "60.50 ± 0.71", "+0.00 (+0.00 to +0.00)"]
    assert "**Means are over different seeds** (ISO_C of SMAT: seeds 0, 1 alone), diff" in found["Summary"].text
    (record,) = records(section, merger="ISO_C", method="SMAT")
    assert (record["n"], record["reference"], record["difference"], record["low"]) == (2, "FT", 0.0, 0.0)
    assert "chosen on dev for SMAT" in section.text
    assert "not recorded" in sections(*studies)["Trainers and mergers"].text
    base = [Result("BASE", f"expert:{task}", task, "test", 40.0, seed) for task in "ab" for seed in range(3)]
    assert sections(*studies, (base, []), facts={"chosen": {"SMAT": {}}})["Trainers and mergers"] == section
    # the main table stays the paper's
    assert "ISO_C" not in found["Main results"].table.columns


def test_paired_differences_are_by_seed_with_signs(make, sections):
    found = sections(make("FT", [50.0, 50.0, 50.0]), make("SMAT", [51.0, 50.0, 48.0], "smat"))
    paired = found["Paired differences"]
    assert len(paired.table.rows) == 7
    (record,) = records(paired, column="Avg")
    assert (record["above"], record["equal"], record["below"], record["n"]) == (1, 1, 1, 3)
    assert record["differences"] == "1.0 0.0 -2.0"
    assert paired.table.rows[-1][2:] == [
        "-0.33", "1.53", "-4.13 to +3.46", "yes", 3, "1 + / 1 - / 1 =", "+1.00, +0.00, -2.00",
    ]  # fmt: skip
    assert paired.png == b"paired_plot"


def test_of_many_pairs_the_experts_and_the_mean_are_shown_and_every_merger_kept(make, sections):
    studies = [make("FT", [50.0]), *(make(f"method {n}", [50.0 + n], "asam") for n in range(5))]
    few, many = (sections(*studies[:count])["Paired differences"] for count in (5, 6))
    assert len(few.table.rows) == len(few.table.records) == 4 * 7
    assert len(many.table.records) == 5 * 7
    assert column(many, "Scores") == ["Expert", "Avg"] * 5
    assert "`paired-differences.csv` has every merger" in many.text


def test_the_peak_is_the_largest_of_all_experts(make, sections):
    (rows, runs), sizes = make("FT", [50.0, 51.0], peak=1), (5 << 20, 9 << 20, 7 << 20, 2 << 20)
    runs = [replace(run, peak_memory_bytes=size) for run, size in zip(runs, sizes, strict=True)]
    assert column(sections((rows, runs))["Main results"], "Peak memory") == ["9 MiB"]
    assert column(
        sections((rows, [*runs[:3], replace(runs[3], peak_memory_bytes=None)]))["Main results"], "Peak memory"
    ) == [None]


def test_another_reference_can_be_named(make, sections):
    found = sections(make("FT", [50.0]), make("SMAT", [51.0], "smat"), reference="SMAT")
    assert column(found["Paired differences"], "Difference") == ["FT - SMAT"] * 7
    with pytest.raises(ValueError, match=r"reference 'SMATT' is none of the labels .* choose one of 'FT', 'SMAT'"):
        sections(make("FT", [50.0]), make("SMAT", [51.0], "smat"), reference="SMATT")


def test_labels_of_different_seeds_are_said_to_be(make, sections):
    found = sections(make("FT", [50.0, 60.0]), make("SMAT", [51.0], "smat"))
    told = "**Means are over different seeds** (labels have different seeds (FT 0, 1; SMAT 0)), differences"
    assert told in found["Summary"].text
    assert column(found["Main results"], "Avg") == ["55.00 ± 7.07", "51.00"]  # none is marked as best
    assert "different seeds" not in sections(make("FT", [50.0]), make("SMAT", [51.0], "smat"))["Summary"].text


def test_settings_of_a_merger_that_differ_are_said(make, sections):
    def merged(label, keep, **more):
        options = {"coef": 0.3, "keep": keep, **more}
        return [], [Run(label, "ties", 0, hyperparameters=options), Run(label, "ta", 0, hyperparameters={"coef": 0.2})]

    studies = make("FT", [50.0]), make("SMAT", [51.0], "smat")
    alike = sections(*studies, merged("FT", 0.5), merged("SMAT", 0.5))["Coefficients"].text
    assert alike == sections(*studies)["Coefficients"].text
    text = sections(*studies, merged("FT", 0.5), merged("SMAT", 0.2, coefs={"a": 1.0}))["Coefficients"].text
    assert text == f"{alike} **Other settings of TIES differ** (FT: keep 0.5; SMAT: keep 0.2, coefs by parameter)." + (
        " TIES of SMAT has other coefficients for some parameters."
    )


def test_ablations_stand_beside_the_full_smat_that_they_are_of(make, sections, full):
    studies = [
        make("FT", [50.0, 51.0]),
        make("SMAT", [60.0, 61.0], "smat", full),
        make("SMAT p2", [70.0, 71.0], "smat", full | {"period": 2}),
        make("no scale", [58.0, 59.5], "smat", full | {"alpha_min": 1.0}),
        make("no noise", [55.0, 56.1], "smat", full | {"sigma": 0.0}),
    ]
    found = sections(*studies)
    ablation = found["Ablation"]
    assert [row[:2] for row in ablation.table.rows] == [
        ["full SMAT", "SMAT"], ["without Scale", "no scale"], ["without Perturb", "no noise"],
    ]  # fmt: skip
    assert column(ablation, "Change") == [None, "-1.75", "-4.95"]
    assert column(ablation, "Finding") == [None, "not established", "below"]
    assert column(found["Main results"], "Method") == ["FT", "SMAT", "SMAT p2"]
    pairs = set(column(found["Paired differences"], "Difference"))
    assert {"no scale - SMAT", "no scale - FT"} <= pairs
    assert "no scale - SMAT p2" not in pairs
    lonely = sections(studies[0], studies[3])
    assert column(lonely["Ablation"], "Change") == ["+8.25"]
    assert "against FT." in lonely["Ablation"].text
    assert column(lonely["Ablation"], "Finding") == ["above"]


def test_muon_has_a_table_and_a_reference_of_its_own(make, sections, full):
    studies = [
        make("FT", [50.0, 51.0]),
        make("SMAT", [60.0, 61.0], "smat", full),
        make("FT Muon", [40.0, 41.0], optimizer="muon"),
        make("SMAT Muon", [45.0, 46.0], "smat", full, optimizer="muon"),
    ]
    found = sections(*studies)
    assert column(found["Main results"], "Method") == ["FT", "SMAT"]
    assert found["Muon"].table.columns[-3:] == ["Avg - FT Muon", "Time x FT Muon", "Peak memory"]
    assert column(found["Muon"], "Avg - FT Muon") == [None, "+5.00"]
    pairs = list(dict.fromkeys(column(found["Paired differences"], "Difference")))
    assert pairs == ["SMAT - FT", "FT Muon - FT", "SMAT Muon - FT Muon", "SMAT Muon - FT"]
    assert "Muon" not in sections(*studies[:2])
    # scores of eval.py say "(Muon)", the manifests beside them do not: the same runs all the same
    rows, runs = make("FT (Muon)", [40.0, 41.0], optimizer="muon", seconds=5.0)
    twice = runs + [replace(run, label="FT") for run in runs]
    once, doubled = (sections((rows, given))["Training cost"].table.records for given in (runs, twice))
    assert once == doubled
    alone = sections(*studies[2:])
    assert "Main results" not in alone
    assert column(alone["Muon"], "Avg - FT Muon") == [None, "+5.00"]


def test_perturb_alone_is_a_curve_by_family_and_rms(make, sections, full):
    alone = full | {"alpha_min": 1.0, "drop_prob": 0.0}
    points = [("gaussian", 0.02, 54.0), ("uniform", 0.02, 53.0), ("uniform", 0.01, 50.0)]
    studies = [make("FT", [50.0, 50.0, 50.0])]
    studies += [
        make(f"{noise} {sigma}", [score, score + 0.1, score - 0.1], "smat", alone | {"noise": noise, "sigma": sigma})
        for noise, sigma, score in points
    ]
    found = sections(*studies)
    noise = found["Noise"]
    assert [row[:2] for row in noise.table.rows] == [["gaussian", "0.02"], ["uniform", "0.01"], ["uniform", "0.02"]]
    assert column(noise, "Avg - FT") == ["+4.00", "+0.00", "+3.00"]
    assert noise.png == b"noise_plot"
    assert found["Summary"].table is None
    assert (
        "**Perturb alone**, 3 settings of its noise: the interval of the difference from FT lies above zero for 2, "
        "below zero for 0, and contains it for 1."
    ) in found["Summary"].text
    assert column(found["Main results"], "Method") == ["FT"]
    assert not {"Noise", "Ablation", "Muon"} & set(sections(studies[0]))
    # what is alike in all seeds, and what one seed has, establishes nothing
    alike = make("alike", [52.0, 52.0, 52.0], "smat", alone | {"sigma": 0.03})
    found = sections(studies[0], alike, make("lone", [53.0], "smat", alone | {"sigma": 0.04}))
    assert "zero for 0, below zero for 0, and contains it for 0; 1 open: the same in all seeds; 1 open: one seed." in (
        found["Summary"].text
    )
    assert column(found["Noise"], "Over seeds") == ["+2.00 in all 3 seeds, which establishes nothing", None]


def test_noise_of_a_sigma_that_every_seed_found_stands_at_their_mean(make, sections, full, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "noise_plot", lambda curves, *, reference: drawn.append(curves) or b"")
    rows, runs = make("auto", [52.0, 53.0, 54.0], "smat", full | {"alpha_min": 1.0, "drop_prob": 0.0})
    values = [run.hyperparameters | {"sigma": (0.001, 0.002, 0.006)[run.seed]} for run in runs]
    found = [replace(run, hyperparameters=v, sigma_from={"from": "ft"}) for run, v in zip(runs, values, strict=True)]
    noise = sections(make("FT", [50.0, 50.0, 50.0]), (rows, found))["Noise"]
    assert column(noise, "RMS") == ["0.001 to 0.006 (auto)"]
    assert [list(points) for points in drawn[0].values()] == [[0.003]]
    assert noise.text.endswith("Where --sigma auto found several, the figure has their mean.")


def test_noise_of_one_sigma_and_of_two_optimizers_has_a_curve_for_each(make, sections, full, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "noise_plot", lambda curves, *, reference: drawn.append((curves, reference)) or b"")
    alone = full | {"alpha_min": 1.0, "drop_prob": 0.0}
    ft, four = make("FT", [50.0]), make("four", [52.0], "smat", alone)
    noise = sections(ft, four, make("two", [53.0], "smat", alone | {"period": 2}))["Noise"]
    assert column(noise, "Noise") == ["uniform, period 2", "uniform, period 4"]
    noise = sections(ft, four, make("twin", [53.0], "smat", alone))["Noise"]
    assert column(noise, "Noise") == ["uniform, four", "uniform, twin"]
    muon = make("FT-Muon", [40.0], optimizer="muon"), make("noise-Muon", [46.0], "smat", alone, optimizer="muon")
    found = sections(ft, four, *muon)
    names = ["uniform, optimizer adam", "uniform, optimizer muon"]
    assert column(found["Noise"], "Noise") == names
    assert column(found["Noise"], "Avg - reference") == ["+2.00", "+6.00"]
    assert found["Noise"].text.endswith(f" Reference: of {names[0]}, FT; of {names[1]}, FT-Muon.")
    assert [found["Summary"].text.count(f"the difference from {x} lies") for x in ("FT", "FT-Muon")] == [1, 1]
    assert [[next(iter(curve.values())).mean for curve in curves.values()] for curves, _ in drawn] == [
        [53.0, 52.0], [52.0, 53.0], [52.0, 46.0],
    ]  # fmt: skip
    assert [reference and reference[0] for _, reference in drawn] == ["FT", "FT", None]


def test_noise_alone_has_no_table_of_mergers(make, sections, full):
    rows, runs = make("noise", [52.0], "smat", full | {"alpha_min": 1.0, "drop_prob": 0.0})
    rows += [Result("noise", "iso_c", task, "test", 60.0, 0) for task in "ab"]
    assert "Trainers and mergers" not in sections((rows, runs))


def test_equal_scores_are_equal_in_whatever_order_their_tasks_come(sections):
    scores = {"a": 50.1, "b": 60.2, "c": 70.3}
    studies = [
        ([Result(label, model or f"expert:{task}", task, "test", scores[task] + 0.1 * seed, seed)
          for seed in range(3) for task in order for model in ("", "wa", "ta", "ties", "dare", "della")], [])
        for label, order in (("FT", "abc"), ("SMAT", "cba"))
    ]  # fmt: skip
    found = sections(*studies)
    means = [found["Main results"].table.records[i]["Expert"] for i in (0, 1)]
    assert means[0] != means[1]  # in their last bits
    assert [row[1:8] for row in found["Main results"].table.rows] == [["**60.30 ± 0.10**"] * 7] * 2
    assert found["Summary"].table.rows[0][3:9] == [
        "+0.00", "+0.00 to +0.00", "0 / 3 / 0", "equal", "+0.00", "+0.00 to +0.00",
    ]  # fmt: skip


def test_costs_of_a_part_of_a_set_are_left_out_and_two_references_are_told(make, sections):
    rows, runs = make("SMAT", [50.0, 51.0], "smat", seconds=15.0, peak=1 << 20)
    ft = make("FT", [50.0, 51.0], seconds=10.0, peak=1 << 20)
    for kept in (runs[:-1], [run for run in runs if run.model == "expert:a"]):
        found = sections(ft, (rows, kept))
        assert column(found["Training cost"], "Method") == ["FT"]
        assert column(found["Summary"], "Time x") == [None]
    muon = [
        make(f"{label}-Muon", [40.0, 41.0], label.lower(), optimizer="muon", seconds=s)
        for label, s in (("FT", 30), ("SMAT", 33))
    ]
    cost = sections(ft, (rows, runs), *muon)["Training cost"]
    assert column(cost, "x reference") == ["1", "1.500 ± 0.000", "1", "1.100 ± 0.000"]
    assert cost.text.endswith(" References: FT of SMAT; FT-Muon of SMAT-Muon.")


def test_a_coefficient_is_of_dev_only_where_that_is_known_of_every_model(make, sections):
    rows, runs = make("FT", [50.0, 51.0])
    rows += [Result("FT", "iso_c", task, "test", 60.0, seed, 1.2) for task in "ab" for seed in (0, 1)]
    searched = [Run("FT", "iso_c", seed, dev_curve=[(1.0, 55.0), (1.2, 60.0)]) for seed in (0, 1)]
    for count, text in ((1, "1.2"), (2, "1.2 dev")):
        assert column(sections((rows, runs + searched[:count]))["Trainers and mergers"], "Coefficient")[-1] == text


def test_noise_is_compared_on_its_own_seeds_and_in_its_own_section(make, sections, full, monkeypatch):
    levels = []
    monkeypatch.setattr(plots, "noise_plot", lambda curves, *, reference: levels.append(reference) or b"")
    alone = make("noise", [52.0], "smat", full | {"alpha_min": 1.0, "drop_prob": 0.0})
    found = sections(make("FT", [50.0, 60.0]), make("SMAT", [51.0, 61.0], "smat", full), alone)
    assert levels == [("FT", Cell({0: 50.0}))]
    assert "FT is the mean over the seeds that were trained with noise" in found["Noise"].text
    paired = found["Paired differences"]
    assert set(column(paired, "Difference")) == {"SMAT - FT"}
    assert {record["method"] for record in paired.table.records} == {"SMAT", "noise"}
    assert "`paired-differences.csv` has Perturb alone too" in paired.text


def test_scores_on_other_tasks_have_a_section_and_change_no_other(make, sections):
    ft, smat = make("FT", [50.0, 52.0]), make("SMAT", [53.0, 56.0], "smat")
    others = [
        Result(label, f"other:{model}", "c", "test", score + seed, seed)
        for label, model, score in (("FT", "expert:a", 10.0), ("FT", "expert:b", 20.0), ("SMAT", "ta", 30.0))
        for seed in (0, 1)
    ]
    found, without = sections(ft, smat, (others, [])), sections(ft, smat)
    assert [title for title in found if title != "Other tasks"] == list(without)
    for title, section in without.items():
        if title != "Scores":
            assert found[title] == section, title
    other = found["Other tasks"]
    assert "(c)" in other.text
    assert other.table.columns[:4] == ["Method", "Expert", "WA", "TA"]
    assert [row[:4] for row in other.table.rows] == [
        ["FT", "15.50 ± 0.71", "–", "–"], ["SMAT", "–", "–", "30.50 ± 0.71"],  # noqa: RUF001
    ]  # fmt: skip
    assert len(found["Scores"].table.records) == len(without["Scores"].table.records) + len(others)


def test_scores_by_task_coefficients_and_settings(make, sections, full):
    found = sections(make("FT", [50.0, 52.0]), make("SMAT", [53.0, 53.0], "smat", full))
    tasks = found["Scores by task"].table.rows
    assert [row[:2] for row in tasks] == [["a", "FT"], ["a", "SMAT"], ["b", "FT"], ["b", "SMAT"]]
    assert tasks[0][2:4] == ["60.00 ± 1.41", "50.00 ± 1.41"]
    assert found["Coefficients"].table.rows[0] == ["FT", "0.3, 0.3", "0.3, 0.3", "0.3, 0.3", "0.3, 0.3"]
    label, method, strengths, training, steps = found["Settings"].table.rows[1]
    assert (label, method, steps) == ("SMAT", "smat", "50")
    assert strengths == "alpha_min 0.1, drop_prob 0.5, sigma 0.01, period 4, noise uniform"
    assert training == "optimizer adam, lr 0.001"
    rows = found["Scores"].table.records
    assert len(rows) == 2 * 2 * 2 * 6
    assert {(r["label"], r["lr"]) for r in rows} == {("FT", 1e-3), ("SMAT", 1e-3)}


def test_learning_rates_and_facts_of_a_study(make, sections):
    facts = {
        "command": "make study", "commit": "abc", "hardware": "an abacus", "versions": {"torch": "2.5"},
        "dev": {"ft": {"0.001": [10.0, 20.0], "0.002": [1.0, 3.0]}}, "lr": {"ft": 0.001},
    }  # fmt: skip
    found = sections(make("FT", [50.0]), facts=facts)
    assert found["Tuning"].table.rows == [
        ["ft", "lr 0.001", "15.00 ± 7.07", "chosen"], ["ft", "lr 0.002", "2.00 ± 1.41", ""],
    ]  # fmt: skip
    for part in ("Suite: name toy\n", "torch 2.0 and 2.5", "an abacus", "abc", "`make study`"):
        assert part in found["Provenance"].text + "\n"


def test_candidates_of_a_tuning_are_told_by_what_they_differ_in(make, sections):
    def candidate(lr, sigma, *dev):
        strengths, training = {"sigma": sigma, "period": 4}, {"lr": lr, "steps": 400}
        return {"method": "smat", "hyperparameters": strengths, "training": training, **({"dev": dev} if dev else {})}

    tried = [candidate(1e-3, 0.01, 1.0, 3.0), candidate(1e-3, 0.02, 3.0, 3.0), candidate(2e-3, 0.01, 2.0, 2.0)]
    facts = {"dev": {"SMAT": tried}, "chosen": {"SMAT": candidate(1e-3, 0.02)}}
    assert sections(make("FT", [50.0]), facts=facts)["Tuning"].table.rows == [
        ["SMAT", "lr 0.001, sigma 0.01", "2.00 ± 1.41", ""],
        ["SMAT", "lr 0.001, sigma 0.02", "3.00 ± 0.00", "chosen"],
        ["SMAT", "lr 0.002, sigma 0.01", "2.00 ± 0.00", ""],
    ]


@pytest.mark.usefixtures("_undrawn")
def test_what_is_there_twice_counts_once_and_what_contradicts_is_refused(make):
    rows, runs = make("FT", [50.0])
    assert build_report(rows * 2, runs * 2) == build_report(rows, runs)
    with pytest.raises(ValueError, match="FT, wa, seed 0 has two scores on a"):
        build_report([*rows, Result("FT", "wa", "a", "test", 1.0, 0)], runs)
    with pytest.raises(ValueError, match="no dev scores of any model"):
        build_report(rows, runs, split="dev")
    other = [run.__class__(**{**vars(run), "label": "SMAT", "suite": {"name": "game"}}) for run in runs]
    more = [Result("SMAT", row.model, row.task, "test", 1.0, 0) for row in rows]
    with pytest.raises(ValueError, match=r"runs differ in name \(\"game\", \"toy\"\): make a report for each suite"):
        build_report(rows + more, runs + other)
    assert build_report(rows, runs + other)  # whose scores are not asked for
    rows_of_two, runs_of_two = make("SMAT", [50.0, 51.0])
    apart = [replace(run, suite={"name": "toy", "seed": 9}) if run.seed == 1 else run for run in runs_of_two]
    assert build_report(rows + rows_of_two, runs + apart)  # suites differ between training seeds
    apart = [replace(run, suite={"name": "toy", "seed": 9}) for run in runs_of_two]
    with pytest.raises(ValueError, match=r"runs differ in suite seed, with training seed 0 \(0, 9\): make a report"):
        build_report(rows + rows_of_two, runs + apart)
    memory = {"name": "toy", "gradient_checkpointing": True}
    saving = [run.__class__(**{**vars(run), "suite": {**run.suite, **memory}}) for run in other]
    plain = [run.__class__(**{**vars(run), "suite": {**run.suite, "gradient_checkpointing": False}}) for run in runs]
    assert build_report(rows + more, plain + saving)  # memory makes no other suite
