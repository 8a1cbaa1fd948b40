"""The commands by name: installed, by ``python -m smat_fn``, and as files of a clone."""

import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import smat_fn
from smat_fn.scripts import cli, entry
from smat_fn.scripts.train.sweep import Sweep, jobs

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


@pytest.fixture
def given(monkeypatch):
    """What the commands give to `cli.run`, which does nothing."""
    calls = []
    monkeypatch.setattr(cli, "run", lambda script, main, options, **more: calls.append((script, options, more)))
    return calls


@pytest.mark.parametrize(("name", "target"), SCRIPTS.items())
def test_an_installed_command_is_the_script_of_a_clone(name, target, given, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    module, _, function = target.partition(":")
    call = getattr(importlib.import_module(module), function)
    call()
    call("x.py", (str(ROOT / "x.py"),))
    (first, options, _), (second, again, _) = given
    assert (first, second) == (name, "x.py")
    assert options is again
    assert options.__name__.lower() == name.removeprefix("smat-")


def test_every_command_is_installed_and_listed(capsys):
    assert sorted(SCRIPTS) == sorted(f"smat-{name}" for name in entry.COMMANDS)
    entry.listed(["--help"])
    listed = capsys.readouterr().out
    assert all(f"smat-{name}" in listed for name in entry.COMMANDS)
    with pytest.raises(SystemExit, match=r"'trian' is unknown, choose from train, merge, eval"):
        entry.listed(["trian"])


def test_the_first_word_after_the_package_names_a_command(given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "merge", "verify", "x"])
    entry.listed(sys.argv[1:])
    assert given[0][0] == "python -m smat_fn merge"
    assert sys.argv == ["__main__.py", "verify", "x"]


def test_a_sweep_of_an_installed_command_starts_it_as_a_module(tmp_path, given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["smat-train"])
    entry.train()
    taken = []
    monkeypatch.setattr("smat_fn.scripts.train.sweep.sweep", lambda options, script: taken.append(script))
    given[0][2]["commands"]["sweep"][0](None)
    (job,) = jobs(Sweep(tmp_path, methods=("ft",), seeds=(0,)), script=taken[0])
    assert job.command[:5] == (sys.executable, "-m", "smat_fn", "train", "ft")


def test_texts_name_the_command_that_runs():
    text = "python train.py ft\ntorchrun --nproc-per-node 2 train.py smat\n`merge.py verify` of eval.py"
    assert cli.named(text, "train.py") == text
    expected = "smat-train ft\ntorchrun --nproc-per-node 2 -m smat_fn train smat\n`smat-merge verify` of smat-eval"
    assert cli.named(text, "smat-train") == expected


@pytest.mark.slow
def test_python_dash_m_from_any_folder(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "smat_fn", "merge", "verify", "absent"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("python -m smat_fn merge verify: there is no folder absent")


HELPED = [
    ("train", "--help"),
    ("train", "smat --preset lm --help"),
    ("train", "smat --preset lm --help-all"),
    ("train", "sweep --help"),
    ("merge", "--help"),
    ("merge", "ties --help"),
    ("merge", "export --help"),
    ("eval", "landscape --help"),
]


@pytest.mark.parametrize(
    ("name", "mergers"), [("train", ()), ("merge", ("adamerging", "reg_mean_plus", "slerp")), ("eval", ())]
)
def test_help_lists_every_command_with_the_first_line_of_its_description(name, mergers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    given = {}

    def kept(*args, commands, **more):
        given.update(commands)
        return run(*args, commands=commands, **more)

    run = cli.run
    monkeypatch.setattr(cli, "run", kept)
    with pytest.raises(SystemExit):
        importlib.import_module(f"smat_fn.scripts.commands.{name}").command(f"{name}.py", ())
    out = capsys.readouterr().out
    above, _, listed = out.partition("\ncommands:\n")
    others = above.partition("\nmore mergers:\n")[2]
    assert given
    for command, (_, options) in given.items():
        first = inspect.getdoc(options).partition("\n")[0]
        place = others if command in mergers else listed
        assert f" {command} {first} " in f" {' '.join(place.split())} "
        assert "." in first
    assert all(f"  {merger} " in others for merger in mergers)
    assert max(map(len, f"{others}\n{listed}".splitlines())) <= 80


def test_an_interrupt_is_a_line_without_a_traceback_and_still_ends_by_the_signal(monkeypatch, capsys):
    def interrupted(*words):
        raise KeyboardInterrupt

    before = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: before.append(error))
    monkeypatch.setattr(entry, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        entry.merge()
    sys.excepthook(KeyboardInterrupt, caught.value, caught.tb)
    assert capsys.readouterr().err == "smat-merge: interrupted; rerun the command, it resumes from what is kept\n"
    sys.excepthook(OSError, other := OSError(), None)
    assert before == [(OSError, other, None)]
    with pytest.raises(KeyboardInterrupt):
        entry.train()
    sys.excepthook(KeyboardInterrupt, caught.value, caught.tb)
    assert "rerun the command (training with --resume), it resumes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], pytest.param(["ties", "--help-all"], marks=pytest.mark.slow)], ids=["at the end", "within"]
)
def test_a_reader_that_ends_early_ends_a_command_without_a_word(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "smat_fn", "merge", *words]
    process = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_takes_no_more_ends_a_command_with_one_line():
    command = [sys.executable, "-m", "smat_fn", "merge", "--help"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "python -m smat_fn merge: standard output cannot be written (No space left on device): send it to another"
    assert process.returncode == 1
    assert said in process.stderr
    assert "Traceback" not in process.stderr


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch):
    for error in (OSError("libcudart.so cannot be opened"), FileNotFoundError(2, "No such file", "x")):

        def fail(*words, error=error):
            raise error

        monkeypatch.setattr(entry, "_start", fail)
        with pytest.raises(type(error), match=str(error.args[-1])):
            entry.merge()


@pytest.mark.slow
def test_help_is_printed_without_torch_and_says_the_same():
    """One process for all: forgotten modules are imported again."""
    code = f"""
import sys, io, contextlib
from smat_fn.scripts import entry
for name, words in {HELPED}:
    sys.argv = [name, *words.split()]
    print("===", name, words)
    try:
        entry.run(name, f"{{name}}.py", ())
    except SystemExit as ended:
        assert not ended.code
    assert not any(module == "torch" or module.startswith("torch.") for module in sys.modules)
import torch
from smat_fn.scripts import entry
for name, words in {HELPED}:
    sys.argv = [name, *words.split()]
    print("===", name, words)
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        entry.run(name, f"{{name}}.py", ())
"""
    process = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    shown = process.stdout.split("=== ")[1:]
    assert len(shown) == 2 * len(HELPED)
    assert shown[: len(HELPED)] == shown[len(HELPED) :]
    assert all(text.count("usage:") == 1 and "-h, --help" in text for text in shown)
    short, whole = (text for text in shown[: len(HELPED)] if text.startswith("train smat"))
    for option in ("--warmup", "--keep-moments", "--antithetic", "gradient_checkpointing"):
        assert option not in short, "an option that few need is in the whole help alone"
        assert option in whole
    shown_in_both = "--data", "--drop-prob", "--steps", "(default: 2e-05)"
    assert all(option in text for option in shown_in_both for text in (short, whole))
    assert "all options: train.py smat --help-all" in short
    lists = "merge --help"  # every merger and command with a description
    brief = [text for text in shown if "--help-all" not in text.split("\n")[0] and not text.startswith(lists)]
    assert max(len(text.splitlines()) for text in brief) < 56
    (merge,) = (text for text in shown[: len(HELPED)] if text.startswith("merge --help"))
    assert "reg_mean_plus" in " ".join(merge.split())


def test_the_version_is_printed_without_a_command(monkeypatch, capsys):
    for name in ("train", "merge", "eval"):
        monkeypatch.setattr(sys, "argv", [name, "--version"])
        entry.run(name, f"smat-{name}", ())
        assert capsys.readouterr().out == f"smat-{name} {smat_fn.__version__}\n"
    entry.listed(["--version"])
    assert capsys.readouterr().out == f"smat_fn {smat_fn.__version__}\n"


def test_a_current_folder_that_was_removed_is_told(tmp_path, monkeypatch, given):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="smat-merge: the current folder was removed: cd to another one"):
        entry.merge()
    assert given == []


def test_windows_is_told_before_any_work(monkeypatch, given):
    monkeypatch.setattr(entry.os, "name", "nt")
    with pytest.raises(SystemExit, match="smat-merge: runs on Linux and macOS; on Windows use it inside WSL"):
        entry.merge()
    assert given == []


@pytest.mark.parametrize(
    "given", [{"PYTHONIOENCODING": "cp437"}, pytest.param({"COLUMNS": "3"}, marks=pytest.mark.slow)]
)
def test_help_ends_in_any_terminal(given):
    command = [sys.executable, ROOT / "merge.py", "ties", "--help"]
    found = subprocess.run(command, env={**os.environ, **given}, capture_output=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"--coef" in found.stdout
