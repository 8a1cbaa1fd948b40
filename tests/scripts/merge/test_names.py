"""Other names of options, and words of other tools."""

import sys
from dataclasses import fields

import pytest

from smat_fn.scripts import cli, entry
from smat_fn.scripts.commands.merge import NAMES, Choices, Inputs, Machine, Merge, Outputs
from smat_fn.scripts.merge.commands import COMMANDS
from smat_fn.scripts.merge.words import FOREIGN, by_density, by_file, refuse_loose, without_foreign


def test_density_is_keep(capsys):
    words = ["ties", "--base", "B", "--experts", "A", "C", "--coef", "0.3", "--out", "O"]
    for given in (["--density", "0.2"], ["--density=0.2"], ["--keep", "0.2"]):
        merge = cli.parse(Merge, description=None, args=by_density([*words, *given]), prog="merge.py")
        assert (merge.merger.name, merge.merger.keep) == ("ties", 0.2)
    both = ["--keep=0.3", "--density", "0.2"]
    with pytest.raises(SystemExit):
        cli.parse(Merge, description=None, args=by_density([*words, *both]), prog="merge.py")
    assert "--density" in capsys.readouterr().err
    assert by_density(["--densities", "A", "0.5"]) == ["--densities", "A", "0.5"]
    for name in ("dare", "dare_ties", "della"):
        for given in (["--density", "0.3"], ["--density=0.3"]):
            assert by_density([name, *given, "--out", "O"]) == [name, "--drop-prob", "0.7", "--out", "O"]
        assert by_density([name, "--density", "x"]) == [name, "--drop-prob", "x"]
        assert "--density" in by_density([name, "--density", "0.3", "--drop-prob", "0.7"])
    for words in (["adapters", "--method", "ties"], ["sce"], ["breadcrumbs"]):
        assert by_density([*words, "--density", "0.5"]) == [*words, "--density", "0.5"]
    merge = cli.parse(Merge, description=None, args=by_density(["sce", *words_of("0.5")]), prog="merge.py")
    assert merge.merger.density == 0.5


def words_of(density):
    return ["--density", density, "--base", "B", "--experts", "A", "C", "--out", "O"]


def test_a_word_after_a_recipe_is_its_output():
    for words in (["cfg.yml", "OUT"], ["recipe", "cfg.yml", "OUT"]):
        assert by_file([*words, "--seed", "1"]) == ["recipe", "cfg.yml", "--out", "OUT", "--seed", "1"]
    for words in (["recipe", "cfg.yml", "--out", "OUT"], ["recipe", "cfg.yml", "MORE", "--out=OUT"], ["recipe"]):
        assert by_file(words) == words
    assert by_file(["ta", "cfg.yml", "OUT"]) == ["ta", "cfg.yml", "OUT"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cuda", "--copy-tokenizer"], "merge.py: --cuda of mergekit: write --device cuda"),
        (["--cuda", "--copy-tokenizer"], "; --copy-tokenizer of mergekit: leave out, the base's tokenizer is always"),
        (["--lazy-unpickle", "--low-cpu-memory"], "--low-cpu-memory of mergekit: leave out, always on here\n"),
        (["--out-shard-size=1B", "--random-seed", "3"], "--random-seed of mergekit: write --seed N"),
        (["--no-write-model-card"], "--no-write-model-card of mergekit: leave out"),
        (["--allow_crimes"], "--allow_crimes of mergekit: leave out, or write --config-from NAME"),
        (["--lambda=0.3", "--models", "B"], "--lambda of mergekit: write --coef; --models of mergekit: write --exp"),
        (["--coef", "0.2", "-0.8"], "A@0.2 B@-0.8, for factors of the first and the last block --lines 0.2 -0.8\n"),
        (["--coef=0.2", "0.8", "1"], "write --coef 1 --experts A@0.2 B@0.8 C@1\n"),
    ],
)  # fmt: skip
def test_words_of_mergekit_and_several_coefficients_are_one_line(given, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["merge.py", "cfg.yml", "OUT", *given])
    with pytest.raises(SystemExit, match="2"):
        entry.merge("merge.py", ())
    (line,) = [own for own in capsys.readouterr().err.splitlines(keepends=True) if not own.endswith("libraries\n")]
    assert said in line


def test_no_option_here_is_called_foreign():
    kinds = Inputs, Choices, Outputs, Machine, *(kind for _, kind in COMMANDS.values())
    assert not {name.replace("-", "_") for name in FOREIGN} & {option.name for kind in kinds for option in fields(kind)}
    words = ["ta", "--coef", "0.5", "--coefs", "a", "0.1", "--lines", "0.2", "1", "--seed", "3"]
    assert without_foreign(words) == words
    assert without_foreign(["ta", "--coef", "*a*=0.5", "--out", "0.2"]) == ["ta", "--coef", "*a*=0.5", "--out", "0.2"]


def test_words_between_a_merger_and_its_first_option_are_refused():
    for words in (["ta", "--out", "O"], ["recipe.yml", "OUT"], ["export", "F"], ["adapters", "--experts", "A"], []):
        assert refuse_loose(words, NAMES) == words
    with pytest.raises(ValueError, match=r"^ties A B: experts are given as --experts A B$"):
        refuse_loose(["ties", "A", "B", "--coef", "1"], NAMES)
    with pytest.raises(ValueError, match=r"^ta ties: give one merger a command, or all, the paper's five$"):
        refuse_loose(["ta", "ties"], NAMES)
