"""Other names of options."""

import pytest

from smat_fn.scripts import cli
from smat_fn.scripts.commands.merge import Merge
from smat_fn.scripts.merge.commands import by_density


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
