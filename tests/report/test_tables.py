"""The main table against numbers worked out by hand."""

import io
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from smat_fn.config import MORE_MERGERS
from smat_fn.evaluate import Result
from smat_fn.report.tables import (
    COLUMNS,
    main_table,
    markdown,
    marked,
    other_table,
    other_tasks_of,
    plain,
    relative_table,
    rich_table,
    seed_notes,
    show,
    terminal,
)
from smat_fn.scripts.evaluate.outputs import verdict


def test_means_over_tasks_mergers_and_seeds(rows):
    table = main_table(rows)
    assert list(table.cells) == ["FT", "SMAT"]
    assert table.split == "test"
    for bonus, line in zip((0, 4), table.cells.values(), strict=True):
        assert tuple(line) == COLUMNS
        # mean of 10 and 20 more, mean of 0 and 2 more over seeds with sd sqrt(2)
        assert [line[c].scores for c in COLUMNS[:-1]] == [(10 * p + 15 + bonus, 10 * p + 17 + bonus) for p in range(6)]
        assert line["Avg"].scores == (45 + bonus, 47 + bonus)
        assert line["Avg"].mean == 46 + bonus
        assert line["Avg"].sd == pytest.approx(2**0.5)


def test_relative_scores_are_means_of_shares_and_no_shares_of_means():
    rows = [
        Result("FT", "expert:a", "a", "test", 80.0, 0), Result("FT", "expert:b", "b", "test", 10.0, 0),
        Result("FT", "ta", "a", "test", 40.0, 0), Result("FT", "ta", "b", "test", 15.0, 0),
        Result("FT", "ta", "a", "dev", 1.0, 0), Result("FT", "expert:a", "a", "dev", 2.0, 0),
        Result("BASE", "expert:a", "a", "test", 20.0, 0),
    ]  # fmt: skip
    table = relative_table(rows)
    assert {method: list(line) for method, line in table.cells.items()} == {"FT": ["TA"]}
    assert table.cells["FT"]["TA"].scores == (100.0,)  # of 50 % and 150 %; 55 / 90 would be 61 %
    zero = [replace(row, score=0.0) if row.model == "expert:b" else row for row in rows]
    with pytest.raises(ValueError, match="FT, seed 0: the expert of b scores 0: merged scores have no share of it"):
        relative_table(zero)
    with pytest.raises(ValueError, match="FT, seed 0: the expert of a was not scored, give it"):
        relative_table(rows[1:])
    with pytest.raises(ValueError, match="there is no merged model whose scores could be given"):
        relative_table(rows[:2])


def test_markdown():
    table = main_table(
        [Result("FT", "expert:a", "a", "test", 90.125, 0), Result("FT", "wa", "a", "test", 50.0, 0)], split="test"
    )
    assert markdown(table, digits=1) == (
        "| Method | Expert | WA | TA | TIES | DARE | DELLA | Avg |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| FT | 90.1 | 50.0 | – | – | – | – | – |\n"  # noqa: RUF001
    )


def test_several_seeds_show_their_deviation(rows):
    assert "| 46.00 ± 1.41 |\n" in markdown(main_table(rows))
    assert "±" not in markdown(main_table([row for row in rows if row.seed == 1]))


def test_terminal_table_fits_and_shows_the_same_numbers(rows):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(terminal(main_table(rows)))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for line in main_table(rows).cells.values():
        assert all(f"{cell.mean:.2f}" in text for cell in line.values())


def test_control_characters_in_labels_do_not_reach_the_terminal():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(rich_table("title", ["Method"], [["a\x1b]0;b\x07"]]))
    assert "a\\x1b]0;b\\x07" in out.getvalue()


def test_terminal_marks_the_best_of_each_column(rows):
    drawn = terminal(main_table(rows))
    for column in list(drawn.columns)[1:]:
        ft, smat = column.cells
        assert "bold" not in ft
        assert smat.startswith("[bold]")


def test_means_over_other_seeds_are_named_and_only_those_over_the_same_are_compared():
    def some(label, model, scores):
        return [Result(label, model, "a", "test", score, seed) for seed, score in scores.items()]

    both = {0: 50.0, 1: 60.0}
    rows = some("FT", "expert:a", both) + some("A", "expert:a", both) + some("B", "expert:a", {0: 90.0})
    table = main_table([*rows, *some("FT", "emr", {0: 10.0}), *some("A", "emr", {1: 20.0}), *some("FT", "iso_c", both)])
    assert seed_notes(table, str.lower) == [
        "labels have different seeds (ft 0, 1; a 0, 1; b 0)", "EMR of ft: seed 0 alone", "EMR of a: seed 1 alone"
    ]  # fmt: skip
    texts = marked(table, "<{}>".format)
    assert [texts[label][0] for label in ("FT", "A", "B")] == ["<55.00 ± 7.07>", "<55.00 ± 7.07>", "90.00"]
    assert [texts[label][table.columns.index("EMR")] for label in ("FT", "A")] == ["10.00", "20.00"]
    assert texts["FT"][table.columns.index("ISO_C")] == "<55.00 ± 7.07>"
    assert verdict(table) == "best merged model: FT 55.00 by ISO_C (seeds 0, 1), A 20.00 by EMR (seed 1)"
    assert seed_notes(main_table(some("FT", "emr", both))) == []


def test_scores_on_other_tasks_are_in_a_table_of_their_own(rows):
    others = [
        Result("FT", "other:expert:a", "c", "test", 10.0, 1), Result("FT", "other:expert:b", "c", "test", 30.0, 1),
        Result("FT", "other:ta", "c", "test", 50.0, 1, 0.3), Result("BASE", "other:expert:c", "c", "test", 40.0, 1),
    ]  # fmt: skip
    assert main_table(rows + others) == main_table(rows)
    assert relative_table(rows + others) == relative_table(rows)
    table = other_table(rows + others + [replace(others[0], split="dev", score=1.0)])
    assert {name: {c: cell.by_seed for c, cell in line.items()} for name, line in table.cells.items()} == {
        "FT": {"Expert": {1: 20.0}, "TA": {1: 50.0}}, "BASE": {"Expert": {1: 40.0}},
    }  # fmt: skip
    assert other_tasks_of(rows + others) == ["c"]
    with pytest.raises(ValueError, match="FT, expert:b, seed 1 has two scores on c"):
        other_table([*others, replace(others[1], score=31.0)])
    with pytest.raises(ValueError, match=r"different tasks .*FT on c, d; BASE on c\)"):
        other_table(others + [replace(row, task="d") for row in others[:3]])


def test_other_splits_models_and_foreign_tasks_of_experts_are_left_out(rows):
    more = [
        replace(rows[0], split="dev"),
        replace(rows[0], model="soup"),
        Result("FT", "expert:a", "b", "test", 1.0, 0),
    ]
    assert main_table(rows + more) == main_table(rows)


def test_other_mergers_have_columns_where_they_were_scored(rows):
    more = [Result("SMAT", "slerp", task, "test", score, 1) for task, score in (("a", 50.0), ("b", 70.0))]
    table = main_table(rows + more)
    assert table.columns == ("Expert", "WA", "TA", "TIES", "DARE", "DELLA", "SLERP", "Avg")
    assert table.cells["SMAT"]["SLERP"].by_seed == {1: 60.0}
    assert {**table.cells["SMAT"], "SLERP": None} == {**main_table(rows).cells["SMAT"], "SLERP": None}
    assert "| 60.00 |" in markdown(table)
    alone = main_table(more)
    assert alone.columns == ("SLERP",)
    assert markdown(alone) == "| Method | SLERP |\n| --- | ---: |\n| SMAT | 60.00 |\n"
    with pytest.raises(ValueError, match="SMAT, SLERP, seed 1 lacks task 'b'"):
        main_table(rows + more[:1])


def test_every_merger_that_writes_a_model_has_a_column(rows):
    names = [config.name for config in MORE_MERGERS] + ["reg_mean_plus", "adamerging"]
    more = [Result("SMAT", name, "a", "test", 50.0, 1) for name in names]
    assert main_table(more).columns == tuple(name.upper() for name in names)


def test_methods_choose_lines_and_order(rows):
    assert list(main_table(rows, methods=["SMAT", "FT"]).cells) == ["SMAT", "FT"]
    with pytest.raises(ValueError, match="method 'ASAM' has no test scores"):
        main_table(rows, methods=["ASAM"])


def test_methods_of_different_tasks_are_not_compared(rows):
    few = [row for row in rows if row.method == "FT" or row.task == "a"]
    with pytest.raises(ValueError, match=r"different tasks .*\(FT on a, b; SMAT on a\): give methods of the same"):
        main_table(few)


def test_names_are_shown_as_they_are(rows):
    from rich.console import Console

    names = {"FT": "FT [v2]", "SMAT": "S|T [/x]"}
    table = main_table([replace(row, method=names[row.method]) for row in rows])
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal(table))
    assert all(name in console.file.getvalue() for name in names.values())
    assert markdown(table).splitlines()[3].startswith("| S\\|T [/x] | ")


@pytest.mark.parametrize("name", ["a&amp;b", "&#35; x", "AT&T", "a~~b~~", "~", "x_y *z* `q` <i>"])
def test_a_name_in_markdown_is_read_letter_by_letter(name):
    (block,) = MarkdownIt("commonmark").enable("strikethrough").parse(plain(name))[1:2]
    assert "".join(child.content for child in block.children) == name
    assert {child.type for child in block.children} <= {"text", "text_special"}


def test_a_wide_table_is_printed_whole(rows, capsys):
    more = [Result("FT", c.name, task, "test", 40.0, seed) for c in MORE_MERGERS for task in "ab" for seed in (0, 1)]
    table = main_table(rows + more)
    show(terminal(table))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("40.00") >= len(MORE_MERGERS)
    assert all(column in printed for column in table.columns)


def test_gaps_and_repetitions_are_listed_together(rows):
    without = [r for r in rows if not (r.method == "FT" and r.model == "ties" and r.task == "b" and r.seed == 1)]
    without = [r for r in without if not (r.method == "SMAT" and r.model == "wa" and r.seed == 0)]
    with pytest.raises(
        ValueError, match=r"FT, wa, seed 0 has two scores on a.*FT, TIES, seed 1 lacks task 'b'.*SMAT, WA lacks seed 0"
    ):
        main_table([*without, Result("FT", "wa", "a", "test", 1.0, 0)])
