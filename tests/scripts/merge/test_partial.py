"""Experts that hold a part of base, on the command line."""

import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint
from smat_fn.scripts import entry
from smat_fn.scripts.merge.provenance.finished import verify

WHOLE = {"model.diffusion_model.out.weight": (3, 2), "first_stage_model.conv.weight": (2, 2)}
NOTE = "expert 'unet' lacks first_stage_model: it has base's"


@pytest.fixture
def run(tmp_path, monkeypatch):
    draws = torch.Generator().manual_seed(1)
    for name, paths in {"base": [*WHOLE], "x": [*WHOLE], "unet": [*WHOLE][:1]}.items():
        leaves = {path: torch.randn(WHOLE[path], generator=draws) for path in paths}
        save_file(leaves, tmp_path / f"{name}.safetensors", metadata={"config": name})
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["merge.py", *words])
        entry.merge("merge.py", ())

    return run


INPUTS = "--base", "base.safetensors", "--experts", "x.safetensors", "unet.safetensors", "--coef", "0.5"


def test_the_recipe_and_the_parts_of_a_partial_merge_give_its_bytes(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"expert 'unet' lacks .*pass --partial, which takes what it lacks from base"):
        run("ta", *INPUTS, "--out", "whole")
    run("ta", *INPUTS, "--partial", "--out", "whole", "--dry-run")
    assert not (tmp_path / "whole").exists()
    run("ta", *INPUTS, "--partial", "--out", "whole")
    assert capsys.readouterr().out.count(f"note: {NOTE}") == 2
    merged = tmp_path / "whole/ta"
    base, x, unet = (load_file(tmp_path / f"{name}.safetensors") for name in ("base", "x", "unet"))
    for path, leaf in load_file(merged / "model.safetensors").items():
        assert leaf.equal(base[path] + 0.5 * ((x[path] - base[path]) + ((base | unet)[path] - base[path]))), path
    assert f"\nNote: {NOTE}.\n" in (merged / "README.md").read_text()
    assert checkpoint.load_manifest(merged)["partial"] is True
    assert yaml.safe_load((merged / "recipe.yml").read_text())["partial"] is True
    run("whole/ta/recipe.yml", "again")
    run("ta", *INPUTS, "--partial", "--out", "part", "--part", "1/1")
    for other in "again", "part":
        for name in "model.safetensors", "recipe.yml", checkpoint.MANIFEST:
            assert (tmp_path / other / "ta" / name).read_bytes() == (merged / name).read_bytes(), (other, name)
    assert verify(merged) == (4, [])
    run("ta", *INPUTS, "--partial", "--out", "whole")
    assert "kept: whole/ta" in capsys.readouterr().out


def test_mergekits_recipes_take_it_on_the_command_line(run, tmp_path):
    models = [{"model": f"{name}.safetensors", "parameters": {"weight": 0.5}} for name in ("x", "unet")]
    asked = {"merge_method": "task_arithmetic", "base_model": "base.safetensors", "models": models}
    (tmp_path / "cfg.yml").write_text(yaml.safe_dump(asked | {"parameters": {"normalize": False}}))
    with pytest.raises(SystemExit, match="pass --partial, which"):
        run("cfg.yml", "made")
    run("cfg.yml", "made", "--partial")
    run("made/ta/recipe.yml", "again")
    files = [(tmp_path / out / "ta/model.safetensors").read_bytes() for out in ("made", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--into", "base", "--plot", "p.png"], "--plot is not available with --into and --partial: leave it out"),
        (["--into", "base"], "--partial is not available with --into: leave one out"),
        (["--plot", "p.png"], "--plot is not available with --into and --partial: leave it out"),
        (["--search"], "--partial: not available with --search or --calibrate"),
    ],
)
def test_what_a_partial_merge_cannot_have(words, said, run):
    given = INPUTS[:-2] if "--search" in words else INPUTS
    with pytest.raises(SystemExit, match=said):
        run("ta", *given, "--partial", "--out", "out", *words)
