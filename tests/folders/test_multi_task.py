"""One folder with the models of all tasks: each of the bits of the merge for this task alone, resumed, checked."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import execution
from smat_fn.config import Emr, TallMask
from smat_fn.folders import merge_folders, multi_task
from smat_fn.folders.multi_task import open_several, task_params
from smat_fn.folders.run import export_task
from smat_fn.merge.parts import arithmetic

CONFIGS = {"emr": Emr(), "tall_mask": TallMask(0.4, coef=0.7)}
KILLED = """
import os, signal, sys
from pathlib import Path
from smat_fn.config import Emr
from smat_fn.folders import merge_folders, multi_task
write, left = multi_task.write_chunk, [int(sys.argv[4])]
def dying(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
multi_task.write_chunk = dying
base, folder, out = map(Path, sys.argv[1:4])
merge_folders(Emr(), base, {name: folder / f"in-{name}" for name in ("sum", "cstance")}, out, shard_size=60)
"""


def alone(config, task):
    return type(config)(**{**vars(config), "task": task})


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def blocks(monkeypatch):
    """Leaves of several blocks."""
    monkeypatch.setattr(arithmetic, "BLOCK", 32)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_task_has_the_bits_of_its_own_merge(name, dtype, count, family, folders, tmp_path, blocks):
    config = CONFIGS[name]
    base, experts = family(dtype, count=count)
    base["odd"], base["none"], base["one"] = torch.zeros(41, dtype=dtype), torch.zeros(0, 3), torch.tensor(0.5)
    for i, expert in enumerate(experts.values()):
        shift = torch.arange(41.0).sub(20 + i).mul((-1) ** i)
        expert |= {"odd": shift.to(dtype), "none": torch.zeros(0, 3), "one": torch.tensor(0.25 * i)}
    paths = folders.save_family(tmp_path, base, experts)
    coef = {"odd": 0.5, "*": 0.8}
    options = {"chunk": 5, "workers": 2, "shard_size": 300}
    report = merge_folders(config, *paths, tmp_path / "all", coef=coef, **options)
    assert len(list((tmp_path / "all").glob("*.safetensors"))) > 1
    assert report.bytes == sum(leaf.nbytes for leaf in open_several(tmp_path / "all").tensors().values())
    for task in experts:
        files = (tmp_path / "own" / task, tmp_path / "exported" / task)
        merge_folders(alone(config, task), *paths, files[0], coef=coef, shard_size=150)
        export_task(tmp_path / "all", paths[0], task, files[1], chunk=7, shard_size=150)
        own, exported = map(content, files)
        assert own.pop("manifest.json") != exported.pop("manifest.json")
        assert own == exported
        folders.assert_same_bits(task_params(tmp_path / "all", task, base), folders.load(files[0]))


@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_the_dtype_of_a_model_is_chosen_when_it_is_exported(out_dtype, family, folders, tmp_path):
    paths = folders.save_family(tmp_path, *family(torch.bfloat16))
    merge_folders(Emr(), *paths, tmp_path / "all")
    merge_folders(Emr("qa"), *paths, tmp_path / "own", out_dtype=out_dtype)
    export_task(tmp_path / "all", paths[0], "qa", tmp_path / "exported", out_dtype=out_dtype)
    folders.assert_same_bits(folders.load(tmp_path / "exported"), folders.load(tmp_path / "own"))


def test_masks_are_bits_that_numpy_unpacks(folders, tmp_path):
    base = {"w": torch.zeros(3, 3)}
    one, two = torch.tensor([1.0, -2, 3, 0, 5, -6, 7, 8, -9]), torch.tensor([2.0, 1, -4, 0, -5, -1, 7, 0, 9])
    experts = {"one": {"w": one.view(3, 3)}, "two": {"w": two.view(3, 3)}}
    merge_folders(Emr(), *folders.save_family(tmp_path, base, experts), tmp_path / "all")
    stored = load_file(tmp_path / "all" / "vector.safetensors")
    assert {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in stored.items()} == {
        "vector/w": (torch.float32, (3, 3)), "mask/0/w": (torch.uint8, (2,)), "mask/1/w": (torch.uint8, (2,)),
    }  # fmt: skip
    vector = torch.tensor([2.0, -2, -4, 0, -5, -6, 7, 8, -9])
    assert torch.equal(stored["vector/w"].view(-1), vector)
    for i, own in enumerate((one, two)):
        bits = np.unpackbits(stored[f"mask/{i}/w"].numpy())
        assert bits[:9].tolist() == (own * vector > 0).tolist()
        assert not bits[9:].any()
    facts = json.loads((tmp_path / "all" / "tasks.json").read_text())
    means = [(own.abs().sum(), (vector.abs() * (own * vector > 0)).sum()) for own in (one, two)]
    assert facts["scales"] == {
        n: float((a.double() / 9) / (b.double() / 9)) for n, (a, b) in zip(("one", "two"), means, strict=True)
    }


def test_a_folder_of_three_tasks_is_the_vector_and_a_32nd_for_each(folders, tmp_path):
    experts = {name: {"w": torch.full((64, 64), float(i))} for i, name in enumerate("abc")}
    paths = folders.save_family(tmp_path, {"w": torch.ones(64, 64)}, experts)
    assert merge_folders(CONFIGS["tall_mask"], *paths, tmp_path / "all").bytes == 64 * 64 * 4 * (1 + 3 / 32)


@pytest.mark.slow
def test_a_killed_merge_resumes_to_the_same_bytes(family, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, *family(torch.bfloat16, count=2))
    merge_folders(Emr(), base, experts, tmp_path / "whole", shard_size=60)
    first = min((tmp_path / "whole").glob("*.safetensors")).name
    command = [sys.executable, "-c", KILLED, base, tmp_path, tmp_path / "all", "20"]
    assert subprocess.run(list(map(str, command)), check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "all").exists()
    done = tmp_path / ".all.merging" / first
    assert done.exists()
    before = os.stat(done).st_mtime_ns
    merge_folders(Emr(), base, experts, tmp_path / "all", shard_size=60)
    assert os.stat(tmp_path / "all" / first).st_mtime_ns == before  # it was not written again
    assert content(tmp_path / "all") == content(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_refusals(family, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, *family(torch.float32))
    given = {"out_dtype": "bfloat16", "config_from": "qa", "chat_template": "auto", "vocabulary": "pad-with-base"}
    with pytest.raises(ValueError, match=r"out_dtype.*config_from.*chat_template.*'pad-with-base'"):
        merge_folders(Emr(), base, experts, tmp_path / "all", heads="keep", **given)
    save_file({"n": torch.arange(3)}, folders.save(tmp_path / "whole", {"n": torch.arange(3)}) / "model.safetensors")
    with pytest.raises(ValueError, match="no floating-point parameters"):
        merge_folders(Emr(), tmp_path / "whole", {"a": tmp_path / "whole"}, tmp_path / "all")
    merge_folders(Emr(), base, experts, tmp_path / "all")
    with pytest.raises(ValueError, match="has no task 'code', one of sum, cstance, qa"):
        export_task(tmp_path / "all", base, "code", tmp_path / "out")
    with pytest.raises(ValueError, match="pass --task, one of sum, cstance, qa"):
        export_task(tmp_path / "all", base, None, tmp_path / "out")
    with pytest.raises(ValueError, match="give the base of that merge"):
        export_task(tmp_path / "all", tmp_path / "whole", "qa", tmp_path / "out")
    with pytest.raises(ValueError, match=r"models of several tasks: write one of them by merge\.py export"):
        merge_folders(Emr("qa"), base, {"qa": tmp_path / "all"}, tmp_path / "out")
    with pytest.raises(ValueError, match="which is, holds or lies in"):
        export_task(tmp_path / "all", base, "qa", tmp_path / "all", overwrite=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("plain", [False, True], ids=["loops", "torch"])
def test_values_that_are_not_finite_leave_nothing(plain, family, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "_off", plain)
    base, experts = family(torch.float32)
    experts["qa"]["matrix"].view(-1)[3] = torch.nan
    paths = folders.save_family(tmp_path, base, experts)
    with pytest.raises(ValueError, match="parameter 'matrix' of expert 'qa' holds 1 values that are NaN or infinite"):
        merge_folders(Emr(), *paths, tmp_path / "all")
    huge = {name: {"w": torch.full((4,), 3e38)} for name in "ab"}
    large = folders.save_family(tmp_path / "b", {"w": torch.zeros(4)}, huge)
    with pytest.raises(ValueError, match=r"exceeds the range of torch\.float32"):
        merge_folders(CONFIGS["tall_mask"], *large, tmp_path / "all")
    assert not list(tmp_path.glob("*all*")) + list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("name", "leaf", "told"), [
    ("mask/1/matrix", None, "mask of task 'cstance' for 'matrix' is missing"),
    ("mask/1/matrix", torch.zeros(1, dtype=torch.uint8), "'matrix' is uint8 (1,), must be uint8 (9,)"),
    ("vector/matrix", torch.zeros(2, dtype=torch.int64), "'vector/matrix' is int64 (2,)"),
])  # fmt: skip
def test_masks_that_do_not_fit_are_told_by_name(name, leaf, told, family, folders, tmp_path):
    merge_folders(Emr(), *folders.save_family(tmp_path, *family(torch.float32)), tmp_path / "all")
    file = tmp_path / "all" / multi_task.VECTOR
    held = {**load_file(file), name: leaf}
    save_file({path: tensor for path, tensor in held.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=re.escape(told)):
        open_several(tmp_path / "all")


def test_a_folder_that_lacks_files_is_told(family, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, *family(torch.float32))
    merge_folders(Emr(), base, experts, tmp_path / "all", shard_size=300)
    last = max((tmp_path / "all").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:100])
    (tmp_path / "all" / "tasks.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tasks.json cannot be read .*; .*cannot be read .*copy the folder again"):
        open_several(Path(tmp_path / "all"))
