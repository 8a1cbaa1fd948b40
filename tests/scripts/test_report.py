"""Reports and the scripts of examples/ as a user runs them."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "results" / "digits.jsonl"
SCRIPTS = {
    "ablations.sh": "ablations/report/report.html",
    "muon.sh": "muon/report/report.html",
    "noise_curve.sh": "noise/report/report.html",
    "experts_curve.sh": "experts-curve/experts-curve.json",
    "replacement.sh": "replacement/replacement.json",
    "landscape.sh": "landscape/landscape.json",
}


@pytest.fixture
def call(monkeypatch, capsys):
    """``call(*words)``: what eval.py exits with and prints, run in this process."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, words)])
        try:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code, capsys.readouterr().out
        return None, capsys.readouterr().out

    return run


def test_the_stored_study_becomes_a_report_that_says_what_it_found(call, tmp_path):
    status, printed = call("report", STUDY, "--out", tmp_path / "out", "--title", "FT and SMAT")
    assert status is None
    assert printed == f"report: {tmp_path / 'out' / 'report.html'}\n"
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    stored = json.loads(STUDY.with_suffix(".json").read_text(encoding="utf-8"))
    low, high = stored["paired"]["interval"]
    assert f"{stored['paired']['mean']:+.2f} points on the mean of five mergers" in text
    assert f"95 % interval {low:+.2f} to {high:+.2f} {'contains' if low < 0 < high else 'leaves out'} zero" in text
    assert stored["commit"] in text
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<title>FT and SMAT</title>" in page
    assert "<script" not in page


def test_what_cannot_be_reported_ends_in_one_line(call, tmp_path):
    text, _ = call("report", tmp_path / "none", "--out", tmp_path / "out")
    assert text == f"eval.py report: {tmp_path / 'none'}: there is no such file or folder"
    text, _ = call("report", STUDY, "--split", "dev", "--out", tmp_path / "out")
    assert text == "eval.py report: no dev scores of any model: evaluate some with eval.py"
    text, _ = call("report", "--out", tmp_path / "out")
    assert text == "eval.py report: give at least one folder of scores"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all experiments: what one has trained the next finds."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_experiment_runs_with_digits(script, out):
    environment = os.environ | {
        **{"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"},
        **{"PRESET": "digits", "STEPS": "2", "SEEDS": "0", "METHODS": "ft smat", "OUT": str(out)},
        **{"SIGMAS": "0.01", "NOISES": "laplace", "LANDSCAPE": "--points 3 --batches 1 --tasks rot90"},
        "MORE": "--suite-options pretrain_steps 10 images_per_task 120",
    }
    if script in ("replacement.sh", "landscape.sh"):
        environment["METHODS"] = "smat"
    command = ["bash", str(ROOT / "examples" / script)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert "Warning" not in process.stderr
    assert (out / SCRIPTS[script]).exists()
    if script == "noise_curve.sh":
        assert "| laplace | 0.01 |" in (out / "noise" / "report" / "report.md").read_text(encoding="utf-8")


def test_every_experiment_has_a_test_and_says_how_it_is_run():
    scripts = {path.name for path in (ROOT / "examples").glob("*.sh")} - {"common.sh", "llama_main.sh", "clip_main.sh"}
    assert scripts == set(SCRIPTS)
    for script in scripts:
        text = (ROOT / "examples" / script).read_text(encoding="utf-8")
        assert f"bash examples/{script}" in text
