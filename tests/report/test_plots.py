"""The figure is a PNG that shows the table."""

import struct

import matplotlib.figure
import pytest

from smat_fn.evaluate import Result
from smat_fn.evaluate.statistics import estimate
from smat_fn.report.plots import COLOURS, colours, drawable, main_plot, noise_plot, paired_plot
from smat_fn.report.tables import COLUMNS, Cell, MainTable, main_table


@pytest.fixture
def figures(monkeypatch):
    """Figures in the order in which they are saved."""
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    return drawn


def test_png_of_the_stated_size(rows):
    data = main_plot(main_table(rows))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1800, 900)


def test_every_bar_carries_its_number_and_the_axis_starts_at_zero(rows, figures):
    table = main_table(rows)
    main_plot(table)
    (axes,) = figures[0].axes
    means = [cell.mean for line in table.cells.values() for cell in line.values()]
    assert [bar.get_height() for bar in axes.patches] == means
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f}" for mean in means]
    assert axes.get_ylim()[0] == 0
    assert "0 to 100" in axes.get_ylabel()
    assert len(axes.get_xticklabels()) == len(COLUMNS)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["FT", "SMAT"]


def test_tables_that_cannot_be_drawn_are_refused(rows):
    line = main_table(rows).cells["FT"]
    for cells in ({}, {f"method {n}": line for n in range(6)}):
        with pytest.raises(ValueError, match="cannot draw methods"):
            main_plot(MainTable("test", cells))


def test_other_mergers_have_bars_of_their_own(rows, figures):
    more = [Result("FT", "slerp", task, "test", 40.0, seed) for task in "ab" for seed in (0, 1)]
    for given, labels in ((rows + more, ["Experts", *COLUMNS[1:-1], "SLERP", "Avg of 5"]), (more, ["SLERP"])):
        main_plot(main_table(given))
        (axes,) = figures[-1].axes
        assert [label.get_text() for label in axes.get_xticklabels()] == labels
        assert 40.0 in [bar.get_height() for bar in axes.patches]


def test_paired_differences_have_a_dot_a_seed_and_an_interval_a_line(figures):
    found = {
        "SMAT - FT": {"TA": estimate([1.0, 1.1, 0.9]), "Avg": estimate([-1.0, 2.0])},
        "ASAM - FT": {"TA": estimate([0.5])},
    }
    assert paired_plot(found).startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    dots = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[1.0, 1.1, 0.9], [-1.0, 2.0], [0.5]]
    bars = [tuple(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 2]
    assert bars == [found["SMAT - FT"]["TA"].interval, found["SMAT - FT"]["Avg"].interval]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["TA", "Avg", "TA"]
    assert [text.get_text() for text in axes.texts] == ["SMAT - FT", "ASAM - FT"]
    assert len({line.get_color() for line in axes.lines if line.get_marker() == "o"}) == 2  # zero is outside in one
    with pytest.raises(ValueError, match="no differences"):
        paired_plot({})


def test_the_noise_curve_has_a_line_a_family_and_the_reference_as_a_level(figures):
    curves = {"uniform": {0.01: Cell({0: 50.0, 1: 52.0}), 0.02: Cell({0: 53.0})}, "laplace": {0.02: Cell({0: 49.0})}}
    assert noise_plot(curves, reference=("FT", Cell({0: 48.0}))).startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert [list(c.lines[0].get_xydata().ravel()) for c in axes.containers] == [[0.01, 51.0, 0.02, 53.0], [0.02, 49.0]]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"uniform", "laplace", "FT"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.02"]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0.01 < 0.02 < right
    assert low < 48.0
    assert high > 53.0


def test_muons_methods_have_the_colours_of_their_namesakes(rows):
    line = main_table(rows).cells["FT"]
    assert colours(["FT-Muon", "smat (muon)"]) == {"FT-Muon": COLOURS["ft"], "smat (muon)": COLOURS["smat"]}
    beside = colours(["FT-Muon", "FT", "Muon"])
    assert beside["FT"] == COLOURS["ft"]
    assert len(set(beside.values())) == 3
    many = {f"{name} (Muon)": line for name in ("FT", "SMAT", "ASAM", "MergOPT", "OrthoReg")}
    assert drawable(MainTable("test", many))
    assert not drawable(MainTable("test", {}))
    assert not drawable(MainTable("test", {f"method {n}": line for n in range(6)}))
