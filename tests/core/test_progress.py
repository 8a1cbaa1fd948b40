"""Lines in place of a bar where stderr is not a terminal, and the first line of a script."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smat_fn import progress

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_a_line_after_five_per_cent_that_took_five_seconds(clock, capsys):
    with progress.bar(100, desc="work") as bar:
        for _ in range(100):
            clock[0] += 1.25
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every fifth of a hundred
    assert lines[0] == "work: 5% of 100, about 119 s left"
    assert lines[-1] == "work: 100% of 100, about 0 s left"


def test_work_of_less_than_five_seconds_writes_nothing(clock, capsys):
    with progress.bar(desc="work") as bar:
        bar.total = 3
        for _ in range(3):
            clock[0] += 1.5
            bar.update()
    assert capsys.readouterr().err == ""


def test_a_resumed_bar_reckons_with_its_own_steps_and_shows_its_text(clock, capsys):
    with progress.bar(100, desc="train a", initial=50) as bar:
        bar.set_postfix_str("loss 0.5")
        clock[0] += 10
        bar.update(10)
    assert capsys.readouterr().err == "train a: 60% of 100, loss 0.5, about 40 s left\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown", "bar"), [(Terminal, None, True), (io.StringIO, True, True), (Terminal, False, False)])  # fmt: skip  # noqa: E501
def test_a_terminal_and_a_demand_show_a_bar(monkeypatch, stream, shown, bar):
    monkeypatch.setattr(sys, "stderr", stream())
    with progress.bar(2, desc="work", shown=shown) as made:
        made.update(2)
        made.refresh()
        assert ("2/2" in sys.stderr.getvalue()) is bar


def test_a_script_says_what_it_starts_before_it_imports_torch(capsys, monkeypatch):
    code = "import sys; from smat_fn.progress import starting; starting('train.py', ['smat']); print('torch' in sys.modules)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "train.py smat: loading libraries\n")
    monkeypatch.setenv("RANK", "1")
    progress.starting("train.py", ["smat"])
    monkeypatch.setenv("RANK", "0")
    progress.starting("train.py", ["smat", "--help"])
    assert capsys.readouterr().err == "train.py smat: loading libraries\n"  # by the first process alone, help or not
    progress.starting("eval.py", [str(ROOT), "--out", "a"])
    assert capsys.readouterr().err == "eval.py: loading libraries\n", "a folder is not a command"
    progress.starting("eval.py", ["task=folder"])
    assert capsys.readouterr().err == "eval.py: loading libraries\n", "a named folder is not a command"
    for script in ("train.py", "merge.py", "eval.py"):  # nothing but the line comes before
        first = (ROOT / script).read_text(encoding="utf-8").split('"""', 2)[2].split("starting(")[0]
        assert "torch" not in first


def test_a_download_says_how_much_has_come_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    blobs = tmp_path / "models--owner--name/blobs"
    blobs.mkdir(parents=True)
    (blobs / "before").write_bytes(bytes(5_000_000))
    with progress.downloading("owner/name"):
        (tmp_path / "new").write_bytes(bytes(3_000_000))
        (tmp_path / "new").rename(blobs / "new.incomplete")
        end = time.monotonic() + 10
        while not (said := capsys.readouterr().err) and time.monotonic() < end:
            time.sleep(0.01)
    assert said == "downloading owner/name: 3 MB so far\n"
    with progress.downloading(tmp_path):  # a folder
        time.sleep(0.03)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.downloading("owner/name"):  # the hub has bars of its own
        (blobs / "more").write_bytes(bytes(9))
        time.sleep(0.03)
    assert sys.stderr.getvalue() == ""


def test_a_first_step_that_compiles_does_not_count_in_what_is_left(clock, capsys):
    with progress.bar(20, desc="work") as bar:
        for seconds in (100, 6, 6):
            clock[0] += seconds
            bar.update()
    assert [line.rsplit(", ")[-1] for line in capsys.readouterr().err.splitlines()] == [
        "about 1900 s left",
        "about 108 s left",
        "about 102 s left",
    ]
