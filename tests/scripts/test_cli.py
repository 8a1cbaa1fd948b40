"""Errors of scripts in words of the command line."""

import pytest

from smat_fn.scripts.cli import mistyped, spoken


def test_options_are_said_as_the_command_line_has_them():
    assert spoken("train it whole, train_layers=None") == "train it whole, --suite-options train_layers None"
    assert spoken("cut by truncate='prompt-middle'") == "cut by --suite-options truncate prompt-middle"
    assert spoken("choose another folder or pass --overwrite (overwrite=True)").endswith("pass --overwrite")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["samt"], "'samt' is unknown, did you mean 'smat'?"),
        (["landscap", "--out", "x"], "'landscap' is unknown, did you mean 'landscape'?"),
        (["smat"], ""),
        (["--out", "x"], ""),
        ([], ""),
        (["runs/ft"], ""),
    ],
)
def test_a_mistyped_subcommand_is_suggested(words, said):
    assert mistyped(words, ["ft", "smat", "landscape"]) == said


def test_a_path_that_is_there_is_no_subcommand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    assert mistyped(["reports"], ["report"]) == ""
    assert mistyped(["report5"], ["report"]) != ""
