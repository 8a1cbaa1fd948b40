"""Updates by block: closed forms for two and three experts, in pieces as a whole."""

import math

import pytest
import torch

from smat_fn import random
from smat_fn.analyses import interference
from smat_fn.analyses.interference import as_rows, mean_rms
from smat_fn.analyses.plots import draw, merge_picture
from smat_fn.analyses.results import summary


def test_two_experts_in_closed_form():
    updates = [
        ("embed.weight", [torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 4.0]])]),
        ("layers.1.w", [torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 2.0])]),
        ("layers.0.w", [torch.tensor([0.0, 0.0]), torch.tensor([0.0, 5.0])]),
        ("layers.1.b", [torch.tensor([2.0]), torch.tensor([0.0])]),
    ]
    found = interference(updates)
    assert [layer.layer for layer in found] == ["outside", "0", "1", "all"]
    outside, still, last, whole = found
    assert (outside.size, outside.rms) == (2, (math.sqrt(9 / 2), math.sqrt(25 / 2)))
    assert outside.cosine == outside.lowest == outside.highest == 9 / 15
    assert outside.agreement == (2 + 1) / 3  # the second coordinate: one moved, and agrees with itself
    assert (still.cosine, still.agreement) == (None, 1)
    assert last.cosine == pytest.approx(-5 / (3 * math.sqrt(5)), rel=1e-15)
    assert last.agreement == 1 / 5  # opposite signs twice, a lone one
    assert whole.size == 2 + 2 + 2 + 1
    assert whole.rms == (math.sqrt((9 + 5 + 4) / 7), math.sqrt((25 + 5 + 25) / 7))
    assert whole.cosine == pytest.approx((9 - 5) / math.sqrt(18 * 55), rel=1e-15)
    assert whole.agreement == (3 + 1 + 1) / (3 + 1 + 5)


def test_blocks_of_one_number_in_an_encoder_and_a_decoder_are_apart():
    paths = "shared.w", "decoder.block.0.w", "encoder.block.10.w", "encoder.block.2.w", "encoder.block.0.w"
    found = interference((path, [torch.ones(size), torch.ones(size)]) for size, path in enumerate(paths, 1))
    blocks = ["decoder.block.0", "encoder.block.0", "encoder.block.2", "encoder.block.10"]
    assert [layer.layer for layer in found] == ["outside", *blocks, "all"]
    assert [layer.size for layer in found] == [1, 2, 5, 4, 3, 15]


def test_random_signs_agree_as_those_of_coins():
    """Of three independent signs the sum is 3 in size with probability 1/4, else 1: 1/2 of the three on average."""
    count = 60_000
    parts = [random.uniform(random.fold_in(random.key(5), i), (count,), minval=-1) for i in range(3)]
    (block, whole) = interference([("layers.0.w", parts)])
    error = math.sqrt(0.75) / 3 / math.sqrt(count)  # the sum's standard deviation is sqrt(9/4 + 3/4 - 9/4)
    assert abs(block.agreement - 0.5) < 4 * error
    assert max(abs(block.lowest), abs(block.highest)) < 4 / math.sqrt(count)
    assert whole._replace(layer="0") == block


def test_pieces_give_what_the_whole_gives():
    parts = [random.uniform(random.fold_in(random.key(5), i), (37,), minval=-1) for i in range(3)]
    whole = interference([("layers.2.w", parts)])
    pieces = interference(("layers.2.w", [part[i : i + 10] for part in parts]) for i in range(0, 37, 10))
    assert [layer.size for layer in pieces] == [37, 37]
    for one, other in zip(whole, pieces, strict=True):
        assert one.rms == pytest.approx(other.rms, rel=1e-14)
        assert one[3:] == pytest.approx(other[3:], rel=1e-12)


def test_experts_that_did_not_move_and_nothing():
    (block, _) = interference([("layers.0.w", [torch.zeros(3), torch.zeros(3)])])
    assert block[2:] == ((0.0, 0.0), None, None, None, None)
    assert interference([]) == []
    with pytest.raises(ValueError, match=r"update of layers\.0\.w of expert 2 of 2 is not finite"):
        interference([("layers.0.w", [torch.ones(2), torch.tensor([1.0, math.nan])])])
    with pytest.raises(ValueError, match=r"layers\.0\.b has 1 updates, leaves before it 2"):
        interference([("layers.0.w", [torch.ones(2)] * 2), ("layers.0.b", [torch.ones(2)])])
    with pytest.raises(ValueError, match=r"layers\.1\.w has 1 updates, leaves before it 2: give every expert's"):
        interference([("layers.0.w", [torch.ones(2)] * 2), ("layers.1.w", [torch.ones(2)])])
    with pytest.raises(ValueError, match=r"layers\.0\.w has 0 updates"):
        interference([("layers.0.w", [])])
    with pytest.raises(ValueError, match=r"the updates of layers\.0\.w have 2, 3 coordinates"):
        interference([("layers.0.w", [torch.ones(2), torch.ones(3)])])


def result(*runs):
    return {"analysis": "interference", "settings": {}, "rows": [row for rows in runs for row in rows]}


def test_table_and_figures_hold_every_block(monkeypatch):
    layers = interference([("norm", [torch.zeros(2)] * 2), ("layers.0.w", [torch.ones(3), torch.tensor([1.0, -1, 0])])])
    rows = as_rows(layers, ["a", "b"], method="FT", seed=1)
    assert mean_rms(rows[1]) == math.sqrt((1 + 2 / 3) / 2)
    _, columns, lines = summary(result(rows))
    assert len(columns) == 8
    assert lines == [
        ["FT", "outside", "2", "0", "-", "-", "-", "-"],
        ["FT", "0", "3", "0.913", "0.000", "0.000", "0.000", "0.600"],
        ["FT", "all", "5", "0.707", "0.000", "0.000", "0.000", "0.600"],
    ]
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or self.draw_without_rendering())
    other = as_rows(layers, ["a", "b"], method="SMAT", seed=1)
    draw(result(rows, other))
    again = as_rows(layers, ["a", "b"], method="FT", seed=2)
    assert [line[0] for line in summary(result(rows, again)).lines[::3]] == ["FT, seed 1", "FT, seed 2"]
    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == ["FT", "SMAT"]
    assert drawn[0].axes[1].get_lines()[0].get_xdata().tolist() == [-1, 0]
    draw(result(rows, again, other))
    legend = drawn.pop().axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["FT, seed 1", "FT, seed 2", "SMAT"]
    draw(result(rows, again))
    assert len(drawn.pop().axes[0].get_legend().get_texts()) == 2
    merge_picture(rows, {"ta": {0.1: 50.0, 0.2: 60.0}, "ties": {0.1: 40.0}})
    *_, scores = drawn[1].axes
    assert [line.get_xydata().tolist() for line in scores.get_lines()[:2]] == [[[0.1, 50], [0.2, 60]], [[0.2, 60]]]
    stacks = interference((f"{name}.0.w", [torch.ones(2)] * 2) for name in ("encoder", "decoder"))
    merge_picture(as_rows(stacks, ["a", "b"], method="T5"), {})
    assert len(drawn[2].axes) == 3
    assert [label.get_text() for label in drawn[2].axes[0].get_xticklabels()] == ["encoder.0", "decoder.0"]
