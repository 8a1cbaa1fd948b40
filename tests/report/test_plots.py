"""The figure is a PNG that shows the table."""

import struct

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.text import Text

from smat_fn.evaluate import Result
from smat_fn.evaluate.statistics import estimate
from smat_fn.report.plots import (
    COLOURS,
    FONT,
    colours,
    drawable,
    legible,
    main_plot,
    merger_plot,
    noise_plot,
    paired_plot,
)
from smat_fn.report.tables import COLUMNS, Cell, MainTable, main_table


@pytest.fixture
def figures(monkeypatch):
    """Figures in the order in which they are saved, laid out but not rendered."""
    drawn = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or self.draw_without_rendering()
    )
    return drawn


def test_png_of_the_stated_size(rows):
    data = main_plot(main_table(rows))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1800, 900)


def test_every_point_carries_its_number_and_the_axes_have_one_scale_and_say_where_they_are_cut(rows, figures):
    table = main_table(rows)
    main_plot(table)
    experts, merged = figures[0].axes
    drawn = [float(y) for axes in (experts, merged) for c in axes.containers for y in c.lines[0].get_ydata()]
    lines = table.cells.values()
    means = [line["Expert"].mean for line in lines] + [line[c].mean for line in lines for c in COLUMNS[1:]]
    assert drawn == means
    assert [text.get_text() for axes in (experts, merged) for text in axes.texts] == [f"{mean:.1f}" for mean in means]
    low, high = (np.ptp(axes.get_ylim()) for axes in (experts, merged))
    assert low == pytest.approx(high)
    assert experts.get_ylim() != merged.get_ylim()
    # experts are 16 and 20, merged models 26 to 70, sd sqrt(2)
    assert figures[0].get_supxlabel().endswith("scores are 0 to 100, shown are 0 to 45 and 21 to 75")
    assert [len(axes.get_xticklabels()) for axes in (experts, merged)] == [1, len(COLUMNS) - 1]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["FT", "SMAT"]


def test_numbers_of_many_methods_are_left_to_the_table(rows, figures):
    line = main_table(rows).cells["FT"]
    for count in (6, 7):
        main_plot(
            MainTable(
                "test", {f"method {n}": line for n in range(5)} | dict.fromkeys(["FT", "SMAT"][: count - 5], line)
            )
        )
    assert [len(figure.axes[1].texts) for figure in figures] == [6 * (len(COLUMNS) - 1), 0]


def test_all_words_of_a_figure_have_one_size(rows, figures):
    main_plot(main_table(rows), title="T")
    assert {text.get_fontsize() for text in figures[0].findobj(Text) if text.get_text()} == {FONT}


def test_the_heat_map_has_a_line_a_merger_and_its_number_in_each_field(rows, figures):
    more = [Result("FT", "slerp", task, "test", 40.0, seed) for task in "ab" for seed in (0, 1)]
    table = main_table(rows + more)
    merger_plot(table, ["TIES", "SLERP"])
    axes, bar = figures[0].axes
    ties = [line["TIES"].mean for line in table.cells.values()]
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f}" for mean in (*ties, 40.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["TIES", "SLERP"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["FT", "SMAT"]
    assert np.isnan(axes.images[0].get_array().filled(np.nan)[1, 1])  # SMAT was not merged by SLERP
    assert bar.get_ylabel().endswith(f"colours from 40.0 to {max(ties):.1f}")


def test_tables_that_cannot_be_drawn_are_refused(rows):
    line = main_table(rows).cells["FT"]
    for cells in ({}, {f"method {n}": line for n in range(6)}):
        with pytest.raises(ValueError, match="cannot draw methods"):
            main_plot(MainTable("test", cells))


def test_experts_alone_and_mergers_alone_have_one_panel(rows, figures):
    for kind, labels in ((True, ["Experts"]), (False, [*COLUMNS[1:-1], "Avg of 5"])):
        main_plot(main_table([row for row in rows if row.model.startswith("expert:") == kind]))
        panels = [[text.get_text() for text in axes.get_xticklabels()] for axes in figures[-1].axes]
        assert panels == [labels]


def test_other_mergers_have_points_of_their_own(rows, figures):
    more = [Result("FT", "slerp", task, "test", 40.0, seed) for task in "ab" for seed in (0, 1)]
    for given, labels in ((rows + more, [*COLUMNS[1:-1], "SLERP", "Avg of 5"]), (more, ["SLERP"])):
        main_plot(main_table(given))
        axes = figures[-1].axes[-1]
        assert [label.get_text() for label in axes.get_xticklabels()] == labels
        assert 40.0 in axes.containers[0].lines[0].get_ydata()


def test_paired_differences_have_a_dot_a_seed_and_an_interval_a_line(figures):
    found = {
        "SMAT - FT": {"TA": estimate([1.0, 1.1, 0.9]), "Avg": estimate([-1.0, 2.0])},
        "ASAM - FT": {"TA": estimate([0.5])},
    }
    paired_plot(found)
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
    noise_plot(curves, reference=("FT", Cell({0: 48.0})))
    (axes,) = figures[0].axes
    assert [list(c.lines[0].get_xydata().ravel()) for c in axes.containers] == [[0.01, 51.0, 0.02, 53.0], [0.02, 49.0]]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"uniform", "laplace", "FT"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.02"]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0.01 < 0.02 < right
    assert low < 48.0
    assert high > 53.0


def test_labels_are_drawn_letter_by_letter(figures):
    names = ["_smat", "a$_$b", "FT", "ft"]
    main_plot(MainTable("test", {name: {"Expert": Cell({0: 50.0})} for name in names}))
    assert [text.get_text().lstrip("\u200b") for text in figures[0].legends[0].get_texts()] == names
    assert len(set(colours(names).values())) == 4  # FT and ft too


def words_inside(figure):
    """Whether every text of a figure lies inside it, but for numbers: some are of ticks that are not shown."""
    texts = [text for text in figure.findobj(Text) if any(map(str.isalpha, text.get_text()))]
    ends = [text.get_window_extent() for text in texts]
    return all(0 <= end.x0 < end.x1 <= figure.bbox.x1 and 0 <= end.y0 < end.y1 <= figure.bbox.y1 for end in ends)


@pytest.mark.parametrize("letters", [4, 31, 55])
def test_long_labels_are_not_cut(rows, figures, letters):
    table, labels = main_table(rows), [f"{n} {'a' * (letters - 2)}" for n in range(5)]
    cells = MainTable("test", dict.fromkeys(labels, table.cells["FT"]))
    main_plot(cells)
    merger_plot(cells, COLUMNS[1:])
    found = estimate([1.0, 1.5])
    paired_plot({label: {"TA": found} for label in labels})
    paired_plot({"TA": dict.fromkeys(labels, found)})
    noise_plot({label: {0.01: Cell({0: 50.0})} for label in labels})
    assert [words_inside(figure) for figure in figures] == [True] * 5
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == labels
    for figure in figures[2:4]:
        assert figure.axes[0].bbox.width > 3 * figure.dpi


def test_a_label_longer_than_a_line_of_a_legend_has_several():
    assert legible("a" * 60) == "a" * 60
    assert legible("ab " * 30) == f"{'ab ' * 20}".strip() + "\n" + ("ab " * 10).strip()
    assert legible("_" + "a" * 60) == "\u200b_" + "a" * 59 + "\na"


def test_letters_that_a_font_lacks_are_named_in_a_note(rows, caplog):
    main_plot(MainTable("test", {"日本": main_table(rows).cells["FT"]}))
    assert caplog.messages == [
        "note: a figure shows boxes instead of 日本, which its font lacks: the tables have all labels"
    ]


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
