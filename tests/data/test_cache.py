"""The cache: a hit gives what was built, damage is noticed, nothing half-written stays."""

import logging
import os

import pytest
import torch
from safetensors import SafetensorError

from smat_fn.checkpoint import same
from smat_fn.data import cache
from smat_fn.data.cache import cache_dir, cached

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counter:
    calls = 0

    def __call__(self):
        self.calls += 1
        return TENSORS


def test_second_call_reads_what_the_first_built(folder):
    build = Counter()
    first, second = (cached("x", {"seed": 1}, build) for _ in range(2))
    assert build.calls == 1
    assert list(second) == ["b", "a"]
    assert all(torch.equal(first[n], second[n]) and first[n].dtype == second[n].dtype for n in TENSORS)
    assert [p.suffix for p in folder.iterdir()] == [".safetensors"]


def test_what_is_built_has_the_strides_of_what_is_read(folder):
    built, read = (cached("x", {}, lambda: {"head": torch.zeros(3, 5).T.contiguous().T}) for _ in range(2))
    assert built["head"].stride() == read["head"].stride() == (5, 1)  # another layout has other kernels and last bits


def test_without_a_home_folder_nothing_is_kept_and_the_way_out_is_named(monkeypatch, caplog, tmp_path):
    monkeypatch.delenv("SMAT_FN_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)  # of a user that the system does not know
    monkeypatch.chdir(tmp_path)
    build = Counter()
    for _ in range(2):
        cached("x", {"seed": 1}, build)
    assert build.calls == 2
    assert list(tmp_path.iterdir()) == []
    assert "or set SMAT_FN_CACHE to another folder" in caplog.text


def test_files_are_as_readable_as_others_for_a_folder_that_several_users_share(folder):
    before = os.umask(0o002)
    try:
        cached("x", {"seed": 1}, Counter())
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o664


def test_another_config_or_name_is_built_apart(folder):
    build = Counter()
    for name, config in (("x", {"seed": 1}), ("x", {"seed": 2}), ("y", {"seed": 1})):
        cached(name, config, build)
    assert build.calls == len(list(folder.iterdir())) == 3


def test_other_kernels_build_apart(folder, monkeypatch):
    build = Counter()
    for value in ("COMPATIBLE", "AVX2", "COMPATIBLE"):
        monkeypatch.setenv("MKL_CBWR", value)
        cached("x", {"seed": 1}, build)
    assert build.calls == len(list(folder.iterdir())) == 2


def test_another_version_of_this_package_builds_anew(monkeypatch):
    build = Counter()
    for version in ("1.0", "1.1", "1.0"):
        monkeypatch.setattr(cache, "__version__", version)
        cached("x", {"seed": 1}, build)
    assert build.calls == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "foreign"])
def test_a_damaged_file_is_built_again(folder, damage, caplog):
    cached("x", {"seed": 1}, Counter())
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[-3] ^= 1
    elif damage == "foreign":
        cached("x", {"seed": 2}, Counter())
        (other,) = set(folder.iterdir()) - {path}
        data = bytearray(other.read_bytes())
    path.write_bytes({"empty": b"", "cut": bytes(data[:-8])}.get(damage, bytes(data)))
    build = Counter()
    with caplog.at_level(logging.WARNING):
        rebuilt = cached("x", {"seed": 1}, build)
    assert build.calls == 1
    assert path.name in caplog.text
    assert torch.equal(rebuilt["b"], TENSORS["b"])
    again = Counter()
    cached("x", {"seed": 1}, again)
    assert again.calls == 0


@pytest.mark.parametrize("failure", [OSError("disk full"), SafetensorError("I/O error: disk full")], ids=repr)
def test_a_failed_write_leaves_no_file_is_said_once_and_costs_no_result(folder, monkeypatch, caplog, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr(*("os.replace", fail) if isinstance(failure, OSError) else (cache, "save_shared", fail))
    for seed in (1, 2):
        assert same(cached("x", {"seed": seed}, Counter()), TENSORS)
    assert not list(folder.iterdir())
    (line,) = caplog.messages
    assert line.startswith(f"the cache {folder} cannot be written ({failure}): ")
    assert "SMAT_FN_CACHE" in line


def test_a_cache_below_a_file_costs_no_result(folder, monkeypatch, caplog):
    folder.write_text("not a folder")
    monkeypatch.setenv("SMAT_FN_CACHE", str(folder / "below"))
    assert same(cached("x", {"seed": 1}, Counter()), TENSORS)
    (line,) = caplog.messages
    assert line.startswith(f"the cache {folder / 'below'} cannot be written")


def test_the_folder_is_that_of_the_environment_or_of_the_user(folder, monkeypatch, tmp_path):
    assert cache_dir() == folder
    monkeypatch.delenv("SMAT_FN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "smat_fn"
