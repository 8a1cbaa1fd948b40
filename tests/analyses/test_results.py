"""What is written: numbers that can be read back, and figures that show them."""

import csv
import json

import matplotlib.figure
import numpy as np
import pytest

from smat_fn.analyses.plots import draw, foreign_problems, write
from smat_fn.analyses.results import records, summary
from smat_fn.report.section import csv_text


def result(analysis, rows, **settings):
    return {
        "analysis": analysis,
        "settings": settings,
        "runs": [{"label": "FT"}],
        "versions": {"torch": "2"},
        "rows": rows,
    }


def curve_rows():
    return [
        {
            **{"method": method, "seed": seed, "experts": count, "subset": ["a", "b"], "task": task, "score": 5.0},
            **{"relative": 100.0 - 10 * count + seed + bonus + more, "coef": 0.3},
        }
        for bonus, method in ((0, "FT"), (4, "SMAT")) for seed in (1, 3) for count in (2, 3)
        for more, task in ((-1, "a"), (1, "b"))
    ]  # fmt: skip


def slice_rows():
    high = {("a", "FT"): 2.0, ("a", "SMAT"): 1.0, ("b", "FT"): 0.5, ("b", "SMAT"): 0.3}
    return [
        {"task": task, "method": method, "a": a, "b": b, "loss": 0.05 + top * ((a - 1) ** 2 + b**2) / 2}
        for (task, method), top in high.items() for b in (-1.0, 0.0, 1.0) for a in (0.0, 0.5, 1.0, 1.5, 2.0)
    ]  # fmt: skip


def gain_rows():
    return [
        {"method": method, "seed": seed, "expert": 90.0 + seed, "merged": 80.0 + bonus, "drop": 10.0 + seed - bonus}
        for bonus, method in ((0, "FT"), (4, "ours")) for seed in (1, 3)
    ]  # fmt: skip


def size_rows():
    return [
        {
            **{"kind": kind, "size": 10, "delta": 2e-3, "partners": partners, "sigma_by_delta": 0.5},
            **{"sigma_by_partners": None if partners is None else 2.0, "unmoved": 0.25},
        }
        for kind, partners in (("mlp", 5e-4), ("all", None))
    ]


def pair_rows():
    return [
        {
            **{"method": method, "seed": seed, "first": "a", "second": second, "a1": a, "a2": b},
            **{"on_first": scale * a * b + 0.02 * seed, "on_second": scale * abs(a - b) * (1 + a)},
        }
        for method, scale in (("FT", 0.1), ("SMAT", 0.04)) for seed in (1, 3) for second in ("b", "c")
        for a, b in [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5)]
    ]  # fmt: skip


SAMPLES = {"split": "dev", "batches": 8}
SIGMA = {"coef": 0.3, "sigma": 1e-3, "sigma_origin": "given", "suggested_sigma": None}
RESULTS = {
    "experts-curve": result("experts-curve", curve_rows(), merger="ta", split="test"),
    "replacement": result("replacement", curve_rows(), coef=0.3, split="test"),
    "gains": result("gains", gain_rows(), split="test"),
    "landscape": result("landscape", slice_rows(), coef=0.3, samples=SAMPLES),
    "diagnose": result("diagnose", size_rows(), **SIGMA),
    "disentanglement": result("disentanglement", pair_rows(), coef=0.5, a=[0.0, 1.0], samples=SAMPLES),
}


@pytest.fixture
def figure(monkeypatch):
    """``figure(result)``: what `draw` saved, laid out but not rendered."""
    saved = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: saved.append(self) or self.draw_without_rendering()
    )

    def drawn(result):
        draw(result)
        return saved.pop()

    return drawn


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "replacement" else name for name in RESULTS]
)  # whose figure is that of the experts' curve
def test_files_hold_everything_and_the_figure_can_be_drawn_from_them_again(name, tmp_path):
    given = RESULTS[name]
    if name == "landscape":  # of one task: figures of several take a second each
        given = given | {"rows": [row for row in given["rows"] if row["task"] == "a"]}
    files = write(tmp_path / "new", given)
    assert [file.name for file in files] == [f"{name}.json", f"{name}.csv", f"{name}.png"]
    assert sorted(tmp_path.rglob("*.*")) == sorted(files)  # and nothing half-written
    stored = json.loads(files[0].read_text())
    assert stored == given
    assert files[2].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert draw(stored) == files[2].read_bytes()
    table = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [list(row) for row in table] == [list(row) for row in stored["rows"]]
    assert len(files[0].read_text().splitlines()) > len(stored["rows"])


def test_files_of_others_are_named_before_an_analysis_runs(tmp_path):
    for name in ("gains.csv", "gains.png", "gains.json"):
        (tmp_path / name).write_text("mine")
        (problem,) = foreign_problems(tmp_path, "gains")
        assert problem.startswith(f"{tmp_path / name} holds something else than is written there")
        (tmp_path / name).unlink()
    write(tmp_path, RESULTS["gains"])
    assert foreign_problems(tmp_path, "gains") == []
    (problem,) = foreign_problems(tmp_path / "gains.csv", "gains")
    assert problem.endswith("gains.csv is a file, not a folder: move it, or choose another folder")


def test_csv_joins_sequences_and_leaves_none_empty():
    lines = csv_text(records(RESULTS["experts-curve"])).splitlines()
    assert lines[:2] == ["method,seed,experts,subset,task,score,relative,coef", "FT,1,2,a+b,a,5.0,80.0,0.3"]
    assert csv_text(records(RESULTS["diagnose"])).splitlines()[2] == "all,10,0.002,,0.5,,0.25"


def test_csv_has_a_column_for_each_number_by_name():
    rows = [{"layer": "all", "rms": {"a": 0.5, "b": None}}, {"layer": "0", "rms": {"a": 1.0, "b": 2.0}}]
    lines = csv_text(records({"analysis": "interference", "rows": rows})).splitlines()
    assert lines == ["layer,rms a,rms b", "all,0.5,", "0,1.0,2.0"]


def test_nothing_is_written_that_is_no_number(tmp_path):
    rows = [row | {"loss": float("nan")} for row in slice_rows()]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, RESULTS["landscape"] | {"rows": rows})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["experts-curve", "replacement"])
def test_curves_are_means_over_tasks_with_a_deviation_over_seeds(name, figure):
    title, columns, lines = summary(RESULTS[name])
    sign = "K" if name == "experts-curve" else "q"
    assert columns == ["Method", f"{sign} = 2", f"{sign} = 3"]
    assert lines == [["FT", "82.00 ± 1.41", "72.00 ± 1.41"], ["SMAT", "86.00 ± 1.41", "76.00 ± 1.41"]]
    assert "independent FT experts" in title
    (axes,) = figure(RESULTS[name]).axes
    assert [list(bars[0].get_ydata()) for bars in axes.containers] == [[82.0, 72.0], [86.0, 76.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["FT", "SMAT"]
    fewer = [row for row in RESULTS[name]["rows"] if (row["method"], row["seed"]) != ("SMAT", 1)]
    assert summary(RESULTS[name] | {"rows": fewer}).title == (
        f"{title}; methods have different seeds (FT 1, 3; SMAT 3)"
    )


def test_gains_show_experts_open_and_merges_filled(figure):
    _, columns, lines = summary(RESULTS["gains"])
    assert columns == ["Method", "Expert", "Five mergers", "Drop"]
    assert lines[1] == ["ours", "92.00 ± 1.41", "84.00 ± 0.00", "8.00 ± 1.41"]
    (axes,) = figure(RESULTS["gains"]).axes
    dots = [(points.get_offsets()[0][0], tuple(points.get_facecolor()[0])) for points in axes.collections]
    assert [x for x, _ in dots] == [92.0, 80.0, 92.0, 84.0]
    assert [colour == (1, 1, 1, 1) for _, colour in dots] == [True, False, True, False]
    assert [text.get_text() for text in axes.texts] == ["-12.0", "-8.0"]


def test_slices_share_a_scale_per_task_have_contours_every_tenth_and_a_star(figure):
    title, _, lines = summary(RESULTS["landscape"])
    assert "dev split" in title
    # a single point of FT's first task is at most 0.1 above the lowest, all points of one row of the flattest are more
    assert lines[0] == ["a", "FT", "0.050", "0.050", "6.7%"]
    axes = figure(RESULTS["landscape"]).axes
    slices = [ax for ax in axes if ax.get_label() != "<colorbar>"]
    assert len(slices) == 4
    scales = [next(c for c in ax.collections if hasattr(c, "_coordinates")).get_clim() for ax in slices]
    assert scales[0] == scales[1] == pytest.approx((0.05, 0.05 + 2.0))
    assert scales[2] == scales[3] == pytest.approx((0.05, 0.05 + 0.5))
    for ax in slices:
        (contours,) = [c for c in ax.collections if hasattr(c, "levels")]
        assert contours.levels * 10 == pytest.approx(np.round(contours.levels * 10))
        assert len(contours.levels) == 1 or np.diff(contours.levels) == pytest.approx(0.1)
        assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1.0, 0.0)]


def test_disentanglement_is_at_the_merge_and_over_the_grid_without_it(figure):
    title, columns, lines = summary(RESULTS["disentanglement"])
    assert title.startswith("% of dev predictions")
    assert columns == ["Method", "at (0.5, 0.5)", "mean over the grid"]
    assert lines == [["FT", "3.25 ± 1.41", "7.00 ± 1.41"], ["SMAT", "2.50 ± 1.41", "4.00 ± 1.41"]]
    maps = [ax for ax in figure(RESULTS["disentanglement"]).axes if ax.get_label() != "<colorbar>"]
    assert [ax.get_title() for ax in maps] == ["FT", "SMAT"]
    drawn = [next(c for c in ax.collections if hasattr(c, "_coordinates")) for ax in maps]
    assert drawn[0].get_array().tolist() == [pytest.approx([2.0, 12.0]), pytest.approx([7.0, 7.0])]  # a row for each a2
    assert drawn[0].get_clim() == drawn[1].get_clim() == pytest.approx((0.0, 12.0))
    assert [tuple(line.get_xydata()[0]) for ax in maps for line in ax.lines] == [(0.5, 0.5)] * 2


def test_experts_that_did_not_move_have_a_figure_and_no_drop_has_no_sign(figure):
    rows = [row | {"delta": 0.0, "partners": None} for row in size_rows()]
    (axes,) = figure(result("diagnose", rows, **SIGMA | {"sigma": None})).axes
    assert axes.get_xscale() == "linear"
    figure(result("diagnose", rows, **SIGMA))  # with sigma alone
    (axes,) = figure(
        result("gains", [{"method": "FT", "seed": 1, "expert": 9.0, "merged": 9.0, "drop": 0.0}], split="dev")
    ).axes
    assert [text.get_text() for text in axes.texts] == ["+0.0"]


def test_flat_and_steep_slices_can_be_drawn(figure):
    for scale, most in ((0.0, 0), (1e6, 99)):  # contours: none of a flat one, of a steep one the lowest
        rows = [row | {"loss": row["loss"] * scale} for row in slice_rows() if row["task"] == "a"]
        slices = [ax for ax in figure(RESULTS["landscape"] | {"rows": rows}).axes if ax.get_label() != "<colorbar>"]
        levels = [len(c.levels) for ax in slices for c in ax.collections if hasattr(c, "levels")]
        assert max(levels, default=0) == most
        for ax in slices:
            low, high = next(c for c in ax.collections if hasattr(c, "_coordinates")).get_clim()
            losses = [row["loss"] for row in rows]
            assert (low, high) == (min(losses), max(*losses, 0.1))


def test_sizes_are_dots_beside_the_line_of_sigma(figure):
    title, columns, lines = summary(RESULTS["diagnose"])
    start = "RMS of updates, and of 0.3 x the sum of the other experts'; sigma 0.001 (given)"
    assert title == f"{start}; no sigma suggested: it takes two experts that moved"
    assert columns[0] == "Kind"
    assert lines == [
        ["mlp", "10", "0.002", "0.0005", "0.5", "2", "25.00%"],
        ["all", "10", "0.002", "-", "0.5", "-", "25.00%"],
    ]
    (axes,) = figure(RESULTS["diagnose"]).axes
    own, partners = ([tuple(xy) for xy in dots.get_offsets()] for dots in axes.collections)
    assert own == [(2e-3, 0.0), (2e-3, 1.0)]
    assert partners == [(5e-4, 0.0)]
    assert list(axes.lines[0].get_xdata()) == [1e-3, 1e-3]
