"""The figure is a PNG that shows the table."""

import struct

import matplotlib.figure
import pytest

from smat_fn.evaluate import main_table
from smat_fn.evaluate.plots import main_plot
from smat_fn.evaluate.tables import COLUMNS, MainTable


def test_png_of_the_stated_size(rows, tmp_path):
    path = tmp_path / "main.png"
    main_plot(main_table(rows), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1800, 900)


def test_every_bar_carries_its_number_and_the_axis_starts_at_zero(rows, tmp_path, monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    table = main_table(rows)
    main_plot(table, tmp_path / "main.png")
    (axes,) = drawn[0].axes
    means = [cell.mean for line in table.cells.values() for cell in line.values()]
    assert [bar.get_height() for bar in axes.patches] == means
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f}" for mean in means]
    assert axes.get_ylim()[0] == 0
    assert "0 to 100" in axes.get_ylabel()
    assert len(axes.get_xticklabels()) == len(COLUMNS)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["FT", "SMAT"]


def test_tables_that_cannot_be_drawn_are_refused(rows, tmp_path):
    line = main_table(rows).cells["FT"]
    for cells in ({}, {f"method {n}": line for n in range(6)}):
        with pytest.raises(ValueError, match="cannot draw methods"):
            main_plot(MainTable("test", cells), tmp_path / "main.png")
    assert not list(tmp_path.iterdir())
