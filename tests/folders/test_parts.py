"""Merging in parts: the same bytes as one process, whatever is killed or called again, and nothing mixed up."""

import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint, machine
from smat_fn.config import Consensus, Dare, ModelStock, TaskArithmetic, Ties
from smat_fn.folders import Part, Report, Waiting, merge_folders, merge_part, part_of, parts, run, writing
from smat_fn.folders.files import BLOCK, SAMPLES, sampled

TA = TaskArithmetic(coef=0.5)
TIES = Ties(coef=0.5, keep=0.3, aggregate="sum", scope="global")
TIES_TENSOR = Ties(coef=0.5, keep=0.3, aggregate="mean", scope="tensor")
DARE = Dare(coef=0.5, drop_prob=0.5)
KILLED = """
import os, signal, sys
from pathlib import Path
from smat_fn import random
from smat_fn.config import Ties
from smat_fn.folders import merge_part, part_of, run
write, left = run.write_chunk, [int(sys.argv[5])]
def dying(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
run.write_chunk = dying
base, *experts = map(Path, sys.argv[1:3]), Path(sys.argv[3])
base, other = base
experts = {"sum": other, "other": experts[0]}
ties = Ties(coef=0.5, keep=0.3, aggregate="sum", scope="global")
print(merge_part(ties, base, experts, Path(sys.argv[4]), part_of(sys.argv[6]), shard_size=30, chunk=16))
"""


def digests(folder):
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def leftovers(folder):
    return sorted(path.name for path in folder.glob(".*"))


def described(files, report):
    """All that a description is told: every figure of the report, and the hashes of inputs too."""
    hashes = {file.name: digest for file, digest in report.hashes.items()}
    facts = {"ratio": report.rounding_ratio, "density": report.density, "hashes": hashes, "bytes": report.bytes}
    return {
        "smat_fn.json": json.dumps(facts | {"kind": "merged", "files": {f.name: report.hashes[f] for f in files}}),
    }


@pytest.mark.parametrize(
    "config", [TA, TIES, TIES_TENSOR, DARE, Consensus(0.4, coef=0.5), ModelStock()], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("count", [1, 3])
def test_parts_in_any_order_make_the_bytes_of_one_process(config, count, inputs, folders, tmp_path):
    options = {"key": folders.key, "shard_size": 30, "describe": described}
    whole = merge_folders(config, *inputs, tmp_path / "whole", **options)
    for done, number in enumerate(range(count, 0, -1), 1):
        found = merge_part(config, *inputs, tmp_path / "out", Part(number, count), **options)
        if done < count:
            assert found == Waiting(Part(number, count), tuple(f"{i}/{count}" for i in range(1, number)))
            assert not (tmp_path / "out").exists()
    assert isinstance(found, Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert (found.density, found.rounding_ratio, found.bytes) == (whole.density, whole.rounding_ratio, whole.bytes)
    assert leftovers(tmp_path) == []


def test_the_parts_share_the_files_and_the_work(inputs, folders, tmp_path):
    job, shards = run.prepare(TA, *inputs, tmp_path / "out", shard_size=30)
    assert len(shards) > 3
    for count in range(1, len(shards) + 1):
        placed = parts.shares(job, shards, count)
        assert sorted(shard.file for own in placed for shard in own) == sorted(shard.file for shard in shards)
        assert all(placed)
        loads = [sum(job.base.leaves[path].numel() for shard in own for path in shard.offsets) for own in placed]
        most = max(sum(job.base.leaves[path].numel() for path in shard.offsets) for shard in shards)
        assert max(loads) - min(loads) <= most


@pytest.mark.slow  # four processes
def test_killed_processes_are_called_again_and_the_last_one_completes_the_folder(inputs, tmp_path):
    base, experts = inputs
    paths = {"sum": experts["sum"], "other": next(path for name, path in experts.items() if name != "sum")}
    merge_folders(TIES, base, paths, tmp_path / "whole", shard_size=30, chunk=16)

    def start(number, writes):
        words = [str(base), *map(str, paths.values()), str(tmp_path / "out"), str(writes), f"{number}/3"]
        return subprocess.Popen([sys.executable, "-c", KILLED, *words], stdout=subprocess.PIPE, text=True)

    def outcomes(children):
        return [(child.communicate()[0], child.returncode) for child in children]

    killed, *others = outcomes([start(3, 3), start(1, 0), start(2, 0)])
    assert killed == ("", -signal.SIGKILL)
    assert [code for _, code in others] == [0, 0]
    assert all("'3/3'" in text for text, _ in others)
    assert not (tmp_path / "out").exists()
    (again,) = outcomes([start(3, 0)])
    assert again[1] == 0
    assert again[0].startswith("Report(")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_a_part_that_is_called_again_writes_only_what_is_not_there(inputs, folders, tmp_path, monkeypatch):
    options = {"key": folders.key, "shard_size": 30, "chunk": 16}
    merge_folders(DARE, *inputs, tmp_path / "whole", **options)
    count, write = itertools.count(1), writing.write_chunk

    def failing(*args):
        if next(count) == 4:
            raise OSError("the disk is gone")
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            merge_part(DARE, *inputs, tmp_path / "out", Part(2, 2), **options)
    work = tmp_path / ".out.merging"
    before = {file: file.stat().st_mtime_ns for file in work.glob("*.safetensors")}
    assert before
    assert merge_part(DARE, *inputs, tmp_path / "out", Part(2, 2), **options).missing == ("1/2",)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", None)
        assert merge_part(DARE, *inputs, tmp_path / "out", Part(2, 2), **options).missing == ("1/2",)  # once more
    assert isinstance(merge_part(DARE, *inputs, tmp_path / "out", Part(1, 2), **options), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_of_parts_that_end_together_exactly_one_completes_the_folder(inputs, tmp_path):
    merge_folders(TA, *inputs, tmp_path / "whole", shard_size=30)
    for turn in range(3):
        out = tmp_path / f"out-{turn}"
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: merge_part(TA, *inputs, out, Part(i, 4), shard_size=30), range(1, 5)))  # noqa: B023
        assert sum(isinstance(one, Report) for one in found) == 1
        assert digests(out) == digests(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_a_part_whose_file_was_changed_is_missing_again(inputs, tmp_path):
    merge_folders(TA, *inputs, tmp_path / "whole", shard_size=30)
    for wrong in (Part(0, 2), Part(3, 2), (1, 2), "1/2", Part(1.0, 2)):
        with pytest.raises(ValueError, match=r"must be Part\(i, n\) with i from 1 to n"):
            merge_part(TA, *inputs, tmp_path / "out", wrong, shard_size=30)
    merge_part(TA, *inputs, str(tmp_path / "out"), Part(1, 2), shard_size=30)
    file = min((tmp_path / ".out.merging").glob("*.safetensors"))
    file.write_bytes(bytes(file.stat().st_size))
    assert merge_part(TA, *inputs, tmp_path / "out", Part(2, 2), shard_size=30).missing == ("1/2",)
    assert isinstance(merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_kill_while_the_folder_is_completed_leaves_it_to_the_next_call(inputs, tmp_path, monkeypatch):
    merge_folders(TIES, *inputs, tmp_path / "whole", shard_size=30)
    merge_part(TIES, *inputs, tmp_path / "out", Part(1, 2), shard_size=30)
    with monkeypatch.context() as patch:
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_part(TIES, *inputs, tmp_path / "out", Part(2, 2), shard_size=30)
    assert not (tmp_path / "out").exists()
    assert isinstance(merge_part(TIES, *inputs, tmp_path / "out", Part(1, 2), shard_size=30), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_kill_before_the_last_rename_leaves_it_to_any_part(inputs, tmp_path, monkeypatch):
    merge_folders(TA, *inputs, tmp_path / "whole", shard_size=30)
    merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_part(TA, *inputs, tmp_path / "out", Part(2, 2), shard_size=30)
    assert isinstance(merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("late", [False, True], ids=["while it merges", "while it completes"])
def test_an_input_of_another_time_stops_a_part_which_resumes(inputs, tmp_path, monkeypatch, late):
    merge_folders(TA, *inputs, tmp_path / "whole", shard_size=30)
    merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30)
    work, file = tmp_path / ".out.merging", next(inputs[0].glob("*.safetensors"))
    touched = {"fill": run.fill} if late else {"write_chunk": run.write_chunk}
    with monkeypatch.context() as patch:
        for name, call in touched.items():
            patch.setattr(run, name, lambda *args, call=call: (file.touch(), call(*args))[1])
        with pytest.raises(ValueError, match="was written to or replaced while it was read: nothing is written"):
            merge_part(TA, *inputs, tmp_path / "out", Part(2, 2), shard_size=30)
    assert json.loads((work / ".part-1.json").read_text())["done"]
    assert isinstance(merge_part(TA, *inputs, tmp_path / "out", Part(2, 2), shard_size=30), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_what_contradicts_the_parts_before_is_refused_by_name(inputs, folders, tmp_path, monkeypatch):
    base, experts = inputs
    out, options = tmp_path / "out", {"shard_size": 30}
    merge_part(TA, base, experts, out, Part(1, 3), **options)
    work = {file: file.read_bytes() for file in (tmp_path / ".out.merging").iterdir()}
    with pytest.raises(ValueError, match=r"part is 2/4, but .*\.out\.merging holds part 1/3: give this one the same"):
        merge_part(TA, base, experts, out, Part(2, 4), **options)
    with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in hyperparameters, coef: give"):
        merge_part(TaskArithmetic(coef=0.25), base, experts, out, Part(2, 3), **options)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "code", lambda: "0.0.1+old")
        with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in version of smat_fn: give"):
            merge_part(TA, base, experts, out, Part(2, 3), **options)
    with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in files of the output: "):
        merge_part(TA, base, experts, out, Part(2, 3), shard_size=50)
    with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in suffix: "):
        merge_part(TA, base, experts, out, Part(2, 3), facts={"suffix": 1}, **options)
    with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in order of the experts: "):
        merge_part(TA, base, dict(reversed(experts.items())), out, Part(2, 3), **options)
    other = folders.load(experts["sum"])
    other["matrix"][0, 0] += 1
    changed = {**experts, "sum": folders.save(tmp_path / "changed", other)}
    with pytest.raises(ValueError, match=r"part 2/3 differs from part 1/3 in expert 'sum': "):
        merge_part(TA, base, changed, out, Part(2, 3), **options)
    with pytest.raises(ValueError, match=r"\.out\.merging holds parts of an unfinished merge: finish it by --part, or"):
        merge_folders(TA, base, experts, out, **options)
    assert {file: file.read_bytes() for file in (tmp_path / ".out.merging").iterdir()} == work


def test_inputs_may_lie_elsewhere_on_another_machine(inputs, tmp_path):
    base, experts = inputs
    merge_folders(TA, base, experts, tmp_path / "whole", shard_size=30)
    merge_part(TA, base, experts, tmp_path / "out", Part(1, 2), shard_size=30)
    moved = {name: shutil.copytree(path, tmp_path / "moved" / path.name) for name, path in experts.items()}
    assert isinstance(merge_part(TA, base, moved, tmp_path / "out", Part(2, 2), shard_size=30), Report)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_part_that_is_running_is_not_run_twice_and_not_taken_for_finished(inputs, tmp_path):
    out, work = tmp_path / "out", tmp_path / ".out.merging"
    merge_part(TA, *inputs, out, Part(1, 2), shard_size=30)
    with parts._running(work, Part(1, 2)):
        with pytest.raises(ValueError, match=r"part 1/2 in .*\.out\.merging is running already: wait for it"):
            merge_part(TA, *inputs, out, Part(1, 2), shard_size=30)
        assert merge_part(TA, *inputs, out, Part(2, 2), shard_size=30).missing == ("1/2",)
    assert isinstance(merge_part(TA, *inputs, out, Part(2, 2), shard_size=30), Report)


def test_a_part_leaves_the_completion_to_who_is_at_it(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "WAIT", 0.01)
    lock = writing.exclusive(tmp_path / "out")
    monkeypatch.setattr(parts, "merge_shards", lambda *args: lock.__enter__())
    assert merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30) == Waiting(Part(1, 2), ())


def test_a_part_that_cannot_be_merged_deletes_what_it_wrote_and_only_that(family, folders, tmp_path):
    base, experts = family(torch.float32, count=2)
    experts["sum"]["matrix"][2, 3] = float("nan")
    paths = folders.save_family(tmp_path, base, experts)
    job, shards = run.prepare(TA, *paths, tmp_path / "out", shard_size=30)
    placed = parts.shares(job, shards, 2)
    bad = next(i for i, own in enumerate(placed, 1) if any("matrix" in shard.offsets for shard in own))
    merge_part(TA, *paths, tmp_path / "out", Part(3 - bad, 2), shard_size=30)
    work = {file: file.read_bytes() for file in (tmp_path / ".out.merging").iterdir()}
    with pytest.raises(ValueError, match="parameter 'matrix' of expert 'sum' holds 1 values that are NaN or infinite"):
        merge_part(TA, *paths, tmp_path / "out", Part(bad, 2), shard_size=30)
    assert {file: file.read_bytes() for file in (tmp_path / ".out.merging").iterdir()} == work
    with pytest.raises(ValueError, match="NaN"):
        merge_part(TA, *paths, tmp_path / "alone", Part(bad, 2), shard_size=30)
    assert leftovers(tmp_path) == [".out.merging"]


def test_parts_that_are_refused_once_all_have_ended_leave_nothing(inputs, tmp_path):
    def refused(files, report):
        raise ValueError("damaged weights")

    for number in (1, 2):
        if number == 2:
            assert leftovers(tmp_path) == [".out.merging"]
        with pytest.raises(ValueError, match="damaged weights") if number == 2 else nullcontext():
            merge_part(TA, *inputs, tmp_path / "out", Part(number, 2), shard_size=30, describe=refused)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("text", ["3/2", "0/2", "1", "1/2/3", "-1/2", ""])
def test_what_names_no_part_is_refused(text):
    with pytest.raises(ValueError, match=r"must be I/N with I from 1 to N, as 2/3"):
        part_of(text)


def test_more_parts_than_files_and_a_merge_by_one_process_are_refused(inputs, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"part is 2/9, but the output has 1 file of weights: take fewer"):
        merge_part(TA, *inputs, tmp_path / "out", Part(2, 9))
    with monkeypatch.context() as patch:
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "out", shard_size=30)
    with pytest.raises(ValueError, match=r"holds an unfinished merge by one process: finish it without --part"):
        merge_part(TA, *inputs, tmp_path / "out", Part(1, 2), shard_size=30)


def test_a_sample_has_the_size_the_first_and_the_last_block(tmp_path):
    size = 3 * SAMPLES * BLOCK + 5
    file = Path(tmp_path / "file")
    seen = set()
    for place in (None, 0, size - 1, BLOCK - 1):
        with file.open("wb") as opened:
            opened.truncate(size)
            if place is not None:
                opened.seek(place)
                opened.write(b"x")
        seen.add(sampled(file))
    file.write_bytes(b"")
    assert len({*seen, sampled(file)}) == 5
