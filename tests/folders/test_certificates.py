"""What a finished merge says holds: inputs that change, damaged work folders, kills, links, full disks."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from smat_fn import checkpoint
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_folders, run, writing

TA = TaskArithmetic(coef=0.5)
OPTIONS = {"shard_size": 150}


def digests(folder):
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def leftovers(folder):
    return sorted(path.name for path in folder.glob(".*"))


@pytest.fixture
def whole(inputs, tmp_path):
    merge_folders(TA, *inputs, tmp_path / "whole", **OPTIONS)
    return digests(tmp_path / "whole")


def at(call, action):
    """The chunk writer, which first acts once, at its ``call``-th call."""
    count = [0]

    def write(*args):
        count[0] += 1
        if count[0] == call:
            action()
        return writing.write_chunk(*args)

    return write


def interrupted(inputs, tmp_path, monkeypatch, call=8):
    """A merge that stopped with some shards finished. Returns: its work folder."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", at(call, lambda: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    folder = tmp_path / ".out.merging"
    assert list(folder.glob("*.safetensors"))
    return folder


CHANGES = {
    "renamed": lambda file: (file.rename(file.with_name("moved")), shutil.copy2(file.with_name("moved"), file)),
    "gone": lambda file: file.rename(file.with_name("moved")),
    "written": lambda file: file.write_bytes(file.read_bytes()),
    "set back": lambda file: (
        stat := file.stat(),
        file.write_bytes(file.read_bytes()[:-1] + b"\0"),
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns)),
    ),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 1),
}


@pytest.mark.parametrize("call", [1, 5, 9])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["base", "sum"])
def test_an_input_that_changes_during_a_merge_is_told(inputs, tmp_path, monkeypatch, change, call, which):
    base, experts = inputs
    file = next((base if which == "base" else experts["sum"]).glob("*.safetensors"))
    monkeypatch.setattr(run, "write_chunk", at(call, lambda: CHANGES[change](file)))
    with pytest.raises(ValueError, match=rf"{file} (is gone|was written|has \d+ bytes).*nothing is written"):
        merge_folders(TA, *inputs, tmp_path / "out", describe=lambda files, report: {}, **OPTIONS)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == [".out.merging"]


def test_an_input_that_changes_after_its_hash_was_asked_for_is_told(inputs, tmp_path):
    file = next(inputs[1]["sum"].glob("*.safetensors"))

    def describe(files, report):
        assert report.hashes[file] == hashlib.sha256(file.read_bytes()).hexdigest()
        CHANGES["set back"](file)
        return {"card": "it is all right"}

    with pytest.raises(ValueError, match="was written to or replaced while it was read"):
        merge_folders(TA, *inputs, tmp_path / "out", describe=describe)
    assert leftovers(tmp_path) == [".out.merging"]


def test_an_input_of_new_permissions_stops_a_merge_which_resumes(inputs, tmp_path, monkeypatch):
    file, write = next(inputs[1]["sum"].glob("*.safetensors")), run.write_text
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_text", lambda *args: (write(*args), file.chmod(0o600)))  # the manifest, at the end
        with pytest.raises(ValueError, match="was written to or replaced while it was read"):
            merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", None)
        merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    merge_folders(TA, *inputs, tmp_path / "fresh", **OPTIONS)
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")
    assert leftovers(tmp_path) == []


def test_a_resumed_merge_begins_again_where_an_input_is_another_of_its_size_and_time(
    inputs, tmp_path, monkeypatch, caplog
):
    folder = interrupted(inputs, tmp_path, monkeypatch)
    file = next(inputs[1]["sum"].glob("*.safetensors"))
    CHANGES["set back"](file)
    merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert caplog.messages == [f"note: an unfinished merge in {folder} is discarded: {file} changed since"]
    merge_folders(TA, *inputs, tmp_path / "fresh", **OPTIONS)
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


DAMAGES = {
    "missing": lambda file: file.unlink(),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 8),
    "zeroed": lambda file: file.write_bytes(file.read_bytes()[:-8] + bytes(8)),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_of_an_interrupted_merge_is_made_again(inputs, whole, tmp_path, monkeypatch, damage):
    folder = interrupted(inputs, tmp_path, monkeypatch)
    file = min(folder.glob("*.safetensors"))
    DAMAGES[damage](file)
    merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", '{"recipe": 3}', "RECIPE"])
def test_a_broken_note_of_progress_begins_again(inputs, whole, tmp_path, monkeypatch, text):
    note = interrupted(inputs, tmp_path, monkeypatch) / "progress.json"
    if text == "RECIPE":
        text = json.dumps({"recipe": json.loads(note.read_text())["recipe"], "shards": {"x": 1}})
    note.write_text(text)
    merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == whole


# kills at the n-th of all calls that change the disk, each in a fork, then a call that must finish
KILLS = """
import os, sys, json
from pathlib import Path
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_folders, run
import shutil, hashlib
base, expert, place = map(Path, sys.argv[1:4])
overwrite = sys.argv[4] == "overwrite"
def merge(out, coef=0.5, **more):
    merge_folders(TaskArithmetic(coef=coef), base, {"sum": expert}, out, shard_size=150, **more)
def content(out):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in out.iterdir()}
def wrap(owner, name, left):
    real = getattr(owner, name)
    def dying(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        return real(*args, **options)
    setattr(owner, name, dying)
def killed_at(n, out):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    left = [n]
    for name in ("pwrite", "ftruncate", "rename", "replace", "unlink", "rmdir", "mkdir"):
        wrap(os, name, left)
    merge(out, overwrite=overwrite)
    os._exit(0)
merge(place / "whole")
merge(place / "before", coef=0.25)
wanted, before = content(place / "whole"), content(place / "before")
n, step = 1, int(sys.argv[5])
while True:
    out = place / f"out{n}"
    if overwrite:
        shutil.copytree(place / "before", out)
    died = killed_at(n, out)
    there = content(out) if out.exists() else wanted
    there.pop("progress.json", None)  # removed last: until then a rerun finds the finished files
    if there not in (wanted, before):
        sys.exit(f"kill {n} left a part of a merge: {there}")
    pid = os.fork()
    if not pid:
        merge(out, overwrite=out.exists() or overwrite)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"no merge after kill {n}")
    if content(out) != wanted:
        sys.exit(f"other bytes after kill {n}")
    left = [path.name for path in place.glob(".*")]
    if left:
        sys.exit(f"left after kill {n}: {left}")
    if not died:
        break
    n += step
print(n)
"""


@pytest.mark.parametrize(
    ("mode", "step"),
    [("overwrite", 5), *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in ("fresh", "overwrite"))],
)
@pytest.mark.slow
def test_a_kill_at_any_step_leaves_nothing_half_written_and_is_resumed(inputs, tmp_path, mode, step):
    place = tmp_path / "kills"
    place.mkdir()
    command = [sys.executable, "-c", KILLS, str(inputs[0]), str(inputs[1]["sum"]), str(place), mode, str(step)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_what_a_killed_replacement_had_moved_aside_comes_back(inputs, tmp_path):
    merge_folders(TA, *inputs, tmp_path / "out")
    before = digests(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old-4711")
    with pytest.raises(ValueError, match="out exists: choose another folder"):
        merge_folders(TA, *inputs, tmp_path / "out")
    assert digests(tmp_path / "out") == before
    assert [name for name in leftovers(tmp_path) if "old" in name] == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_written(inputs, whole, tmp_path, there):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        merge_folders(TaskArithmetic(coef=0.1), *inputs, disk / "ta")
    (tmp_path / "out").symlink_to(disk / "ta")
    merge_folders(TA, *inputs, tmp_path / "out", overwrite=there, **OPTIONS)
    assert (tmp_path / "out").is_symlink()
    assert digests(disk / "ta") == whole
    assert leftovers(tmp_path) == leftovers(disk) == []


def test_a_circle_of_links_is_told(inputs, tmp_path):
    for a, b in (("x", "y"), ("y", "x")):
        (tmp_path / a).symlink_to(tmp_path / b)
    base, experts = inputs
    with pytest.raises(ValueError, match="is a symbolic link that leads back to itself"):
        merge_folders(TA, base, experts, tmp_path / "x")
    with pytest.raises(ValueError, match="x is not a folder"):
        merge_folders(TA, base, {"sum": tmp_path / "x"}, tmp_path / "out")
    with pytest.raises(ValueError, match="leads back to itself"), checkpoint.atomic_folder(tmp_path / "x"):
        pass


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_broken_config_of_base_is_told_before_any_work(inputs, tmp_path, text):
    (inputs[0] / "config.json").write_text(text)
    for out_dtype in ("same", "float32"):
        with pytest.raises(ValueError, match=r"config\.json (cannot be read|holds a)"):
            merge_folders(TA, *inputs, tmp_path / "out", out_dtype=out_dtype)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_broken_config_of_an_expert_is_reported_before_any_work(inputs, tmp_path, text):
    (inputs[1]["sum"] / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^expert 'sum': .*config\.json (cannot be read|holds a)"):
        merge_folders(TA, *inputs, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_a_place_above_the_output_that_is_no_folder_is_reported_before_any_work(inputs, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for name, text in ("link", "a link that leads nowhere"), ("file", "a file"):
        with pytest.raises(ValueError, match=f"{name} is {text}: remove it"):
            merge_folders(TA, *inputs, tmp_path / name / "deep" / "out")
    assert (tmp_path / "file").read_text() == "x"


def test_a_disk_that_is_too_small_and_one_that_fills_up(inputs, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(ValueError, match=r"has 100 bytes free, [\d.]+ (bytes|kB) are needed"):
            merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert leftovers(tmp_path) == []

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", at(8, full))
        with pytest.raises(ValueError, match=rf"the disk of {tmp_path} is full: .* rerun"):
            merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert leftovers(tmp_path) == [".out.merging"]
    merge_folders(TA, *inputs, tmp_path / "out", **OPTIONS)
    assert digests(tmp_path / "out") == whole
    assert leftovers(tmp_path) == []
