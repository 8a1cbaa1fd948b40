"""Problems as one error: each once, at most ten, with a suggestion for a mistyped name."""

import pickle

import pytest

from smat_fn.errors import (
    Problems,
    all_at_once,
    and_more,
    check_member,
    collected,
    count_problem,
    first_line,
    name_rows,
    printable,
    problems_of,
    raise_problems,
    some_of,
    suggestion,
    takes,
)


def test_problems_are_said_once_and_joined():
    raise_problems([])
    with pytest.raises(ValueError, match=r"^a; b$"):
        raise_problems(["a", "b", "a"])
    with pytest.raises(ValueError, match=r"^row 0; row 1; .*row 9$"):
        raise_problems([f"row {i}" for i in range(10)])


def test_problems_of_a_check_inside_another_are_listed_one_by_one():
    def check():
        raise_problems(["a is 1", "b is 2"])

    assert problems_of(check) == ["a is 1", "b is 2"]
    with pytest.raises(Problems, match="c is 3; a is 1; b is 2") as raised:
        all_at_once(["c is 3", "a is 1"], check)
    assert raised.value.problems == ("c is 3", "a is 1", "b is 2")


def test_a_block_ends_with_its_problem_and_other_errors_go_on():
    problems, ran = ["a is 1"], []
    with collected(problems):
        ran.append("first")
        raise_problems(["b is 2", "c is 3"])
        ran.append("second")
    assert (problems, ran) == (["a is 1", "b is 2", "c is 3"], ["first"])
    with pytest.raises(KeyError), collected(problems):
        raise KeyError("d")


def test_of_many_problems_every_kind_is_said():
    many = [f"leaf 'a.{i}' of /x/{i} is float16" for i in range(60)]
    with pytest.raises(ValueError, match=r"/0 is float16; .*/2 is float16; lr is 0; and 57 more like these$"):
        raise_problems([*many, "lr is 0"])
    with pytest.raises(ValueError, match=r"kind a; .*kind l$"):  # twelve kinds
        raise_problems([f"kind {letter}" for letter in "abcdefghijkl"])


def test_a_mistyped_name_is_suggested():
    assert suggestion("samt", ["ft", "smat"]) == ", did you mean 'smat'?"
    assert suggestion("tsv", ["svc", "tsv_merge"]) == ", did you mean 'tsv_merge'?"
    assert suggestion("zebra", ["ft", "smat"]) == suggestion("s", ["ft", "smat"]) == ""
    with pytest.raises(ValueError, match=r"task 'rot9' is unknown, did you mean 'rot90'\? choose one of 'rot90', 'mir"):
        check_member("task", "rot9", ["rot90", "mirror"])
    with pytest.raises(ValueError, match="task 'x' is unknown, choose one of 'rot90'"):
        check_member("task", "x", ["rot90"])


def test_lists_end_with_the_number_of_the_others():
    letters = "abcdefghijklm"
    assert some_of(letters[:12]) == ", ".join(letters[:12])
    assert some_of(letters) == "a, b, c, d, e, f, 7 more"
    assert (and_more("ab", 2), and_more("abc", 2)) == ("a, b", "a, b and 1 more")
    assert [name_rows([3]), name_rows([3, 5])] == ["row 3", "rows 3 and 5"]
    assert name_rows(range(10)) == "rows 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9"
    assert name_rows(range(12)) == "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_bool_is_no_count():
    assert count_problem("period", 1) == []
    for bad in (True, 1.0, 0):
        assert count_problem("period", bad) == [f"period is {bad!r}, must be an integer of at least 1"]


def test_a_function_takes_arguments_unless_it_says_otherwise():
    assert takes(lambda a, *, b: 0, 1, b=2)
    assert not takes(lambda a: 0, 2)
    assert takes(dict, 1)  # whose signature nothing says


@pytest.mark.parametrize(
    ("text", "line"),
    [("\nno file\nTraceback", "no file"), ("it lacks:\n  a key\n", "it lacks: a key"), (" ", "KeyboardInterrupt")],
)
def test_an_exception_is_quoted_by_its_first_line(text, line):
    assert first_line(KeyboardInterrupt(text)) == line


def test_problems_survive_the_way_back_from_another_process():
    copied = pickle.loads(pickle.dumps(Problems(["a is 1", "b is 2"])))
    assert (str(copied), copied.problems) == ("a is 1; b is 2", ("a is 1", "b is 2"))


def test_control_characters_are_printed_as_escapes():
    assert printable("a\x1b[31m\r\u202eb\tc\x85") == "a\\x1b[31m\\r\\u202eb\\tc\\x85"
    assert printable("two lines\nof θ̃, 10⁻⁶") == "two lines\nof θ̃, 10⁻⁶"
