"""--quiet and --json of every command: nothing on stderr but problems, one object on stdout."""

import json

import pytest
import torch
from safetensors.torch import save_file

from smat_fn import progress
from smat_fn.scripts import outcome


@pytest.fixture
def models(tmp_path):
    for seed, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        leaves = {"w.weight": torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))}
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
    return "--base", tmp_path / "base", "--experts", tmp_path / "a", tmp_path / "b"


@pytest.fixture
def call(exits, capsys, monkeypatch):
    for name in progress.SILENT:
        monkeypatch.setenv(name, "")  # given back when the test ends

    def run(*words):
        code = exits("merge.py", *words)
        return code, capsys.readouterr()

    return run


def test_json_is_one_object_on_stdout_and_the_lines_go_to_stderr(call, models, tmp_path):
    words = "ta", "--coef", 0.3, *models, "--out", tmp_path / "out"
    code, said = call(*words, "--json")
    assert code is None
    folder = str(tmp_path / "out/ta")
    assert json.loads(said.out) == {"merged": [{"folder": folder, "coef": 0.3, "kept": False}]}
    assert f"merged: {folder}, coef 0.3" in said.err
    code, said = call("--json", *words)
    assert json.loads(said.out)["merged"][0]["kept"] is True
    code, said = call(*words)
    assert said.out.startswith(f"kept: {folder}")
    assert outcome.add("merged", {}) is None  # outside a command with --json


def test_json_of_a_command_that_fails_has_its_error(call, models, tmp_path):
    code, said = call("ta", *models, "--out", tmp_path / "out", "--json")
    assert "ta needs a coefficient" in code
    assert json.loads(said.out) == {"error": code}
    code, said = call("verify", tmp_path / "none", "--json", "--quiet")
    assert json.loads(said.out)["error"] == code
    code, said = call("ties", "--keep", "many", "--json")
    assert code == 2
    assert json.loads(said.out) == {"error": "status 2, the error is on stderr"}


def test_json_lists_files_that_changed(call, models, tmp_path):
    call("ta", "--coef", 0.3, *models, "--out", tmp_path / "out")
    file = tmp_path / "out/ta/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, said = call("verify", tmp_path / "out/ta", "--json")
    assert json.loads(said.out)["verified"][0]["changed"] == 1
    assert len(json.loads(said.out)["problems"]) == 1
    assert "1 of " in code


def test_json_of_plans_parts_and_of_numbers_that_json_has_not(call, models, tmp_path):
    words = "ta", "--coef", 0.3, *models, "--out", tmp_path / "out", "--json"
    (plan,) = json.loads(call(*words, "--dry-run")[1].out)["plans"]
    assert (plan["folder"], plan["parameters"]) == (str(tmp_path / "out/ta"), 24)
    assert json.loads(call(*words, "--part", "1/1")[1].out)["merged"][0]["kept"] is False
    assert json.loads(call(*words, "--dry-run")[1].out)["plans"] == [{"folder": str(tmp_path / "out/ta"), "kept": True}]


def test_json_has_no_nan(capsys):
    outcome.called(["--json"], lambda words: outcome.add("losses", [float("nan"), float("inf"), 1.0]))
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"losses": [[None, None, 1.0]]}


def test_help_is_text_with_json_too(call):
    code, said = call("ties", "--help", "--json")
    assert code == 0
    assert said.out.startswith("usage: merge.py ")
    assert said.out.endswith(outcome.HELP)


def test_a_plot_compares_what_is_merged_and_its_place_is_checked_first(call, models, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "b").rename(tmp_path / "other/a")
    named = "--base", tmp_path / "base", "--experts", tmp_path / "a", f"z={tmp_path / 'other/a'}"
    words = "ta", "--coef", 0.3, *named, "--out", tmp_path / "out"
    for place, said in ((tmp_path / "p.txt", "is a PNG"), (tmp_path / "a/model.safetensors/p.png", "below a file")):
        assert said in call(*words, "--plot", place)[0]
    (tmp_path / "p.png").mkdir()
    assert "cannot replace a folder" in call(*words, "--plot", tmp_path / "p.png")[0]
    assert not (tmp_path / "out").exists()
    code, said = call(*words, "--plot", tmp_path / "x.png", "--json")
    assert (code, json.loads(said.out)["written"]) == (None, [str(tmp_path / "x.png")])


def test_a_part_that_waits_makes_the_plot_of_its_experts(call, tmp_path):
    for seed, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        key = torch.Generator().manual_seed(seed)
        leaves = {f"{i}.weight": torch.randn(6, 4, generator=key) for i in range(3)}
        if seed:
            leaves["head.weight"] = torch.randn(seed, 4, generator=key)
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
    words = "ta", "--coef", 0.3, "--base", tmp_path / "base", "--experts", tmp_path / "a", tmp_path / "b"
    words = *words, "--out", tmp_path / "out", "--heads", "keep", "--shard-size", 100, "--part", "1/2"
    code, said = call(*words, "--plot", tmp_path / "x.png", "--json")
    found = json.loads(said.out)
    assert (code, found["parts"][0]["part"], found["parts"][0]["missing"]) == (None, "1/2", ["2/2"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_quiet_leaves_results_alone(call, models, tmp_path):
    loud, quiet = (
        call("ta", "--coef", 1, *models, "--out", tmp_path / name, *more)
        for name, more in (("loud", []), ("quiet", ["--quiet"]))
    )
    assert (loud[0], quiet[0]) == (None, None)
    assert loud[1].err.startswith("merge.py ta: loading libraries\nmerging 2 experts by ta\n")
    assert quiet[1].err == ""
    assert quiet[1].out == loud[1].out.replace("loud", "quiet")


def test_silence_reaches_bars_lines_and_other_packages(monkeypatch, capsys):
    for name in progress.SILENT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(progress, "SECONDS", 0.0)

    def work():
        with progress.bar(4, desc="work") as shown:
            for _ in range(4):
                shown.update()
        progress.say("begins")
        return capsys.readouterr().err

    assert work().count("work: ") == 4
    progress.silence()
    assert work() == ""


def test_help_names_both(call):
    code, said = call("ties", "--help")
    assert code == 0
    assert said.out.endswith(outcome.HELP)
