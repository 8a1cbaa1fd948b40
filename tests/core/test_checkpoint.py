"""Checkpoints: exact round trips, all or nothing on disk, every problem named."""

import json
import math
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import SafetensorError

from smat_fn import checkpoint, lora, tree

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
MANIFEST = {
    **{"seed": 3, "lr": 2e-5, "third": 1 / 3, "big": 2**60, "none": None, "flag": True, "text": "ümlaut 文 \u2028"},
    "nested": {"list": [1, 2.5, {"deep": []}], "empty": {}},
}


def test_an_unknown_kind_of_statistics_is_named(tmp_path):
    with pytest.raises(ValueError, match="kind of statistics 'fishers' is unknown, did you mean 'fisher'"):
        checkpoint.save_statistics(tmp_path, "fishers", {}, {})


class Head(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


def values(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def make():
    return {
        "blocks": [{"w": values(3, 4), "b": values(4, seed=1)}, (values(2, seed=2),)],
        "head": Head(values(2, 2, dtype=torch.bfloat16), values(dtype=torch.float64)),
        "steps": torch.tensor([1, 2]),
    }


def assert_same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert list(a) == list(b)
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype, path
        assert leaf.shape == b[path].shape, path
        assert bytes_of(leaf) == bytes_of(b[path]), path


def bytes_of(leaf):
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_round_trip_of_a_nested_tree(tmp_path):
    params = make()
    checkpoint.save_expert(tmp_path / "deep" / "expert", params, MANIFEST)
    loaded, manifest = checkpoint.load_expert(tmp_path / "deep" / "expert", tree.tree_map(torch.zeros_like, params))
    assert_same(loaded, params)
    assert type(loaded["head"]) is Head
    assert type(loaded["blocks"][1]) is tuple
    assert manifest == MANIFEST
    assert checkpoint.load_manifest(tmp_path / "deep" / "expert") == MANIFEST
    assert list(manifest) == list(MANIFEST)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["expert"]


def test_names_of_wrapped_modules_are_stored_without_the_wrapper(tmp_path):
    plain = {"layers.0.w": values(2), "layers.1.b": values(3)}
    for path in ("layers.0._orig_mod.w", "_orig_mod.layers.0.w", "layers.0._checkpoint_wrapped_module._orig_mod.w"):
        wrapped = {path: plain["layers.0.w"], "layers.1.b": plain["layers.1.b"]}
        checkpoint.save_expert(tmp_path / path, wrapped, checkpoint.describe(wrapped))
        checkpoint.save_statistics(tmp_path / path, "fisher", wrapped, {})
        for like in (plain, wrapped):
            loaded, manifest = checkpoint.load_expert(tmp_path / path, like)
            assert_same(loaded, like)
            assert manifest["fingerprint"] == checkpoint.fingerprint(plain)
        assert checkpoint.load_statistics(tmp_path / path / "fisher.safetensors").keys() == plain.keys()
    with pytest.raises(
        ValueError, match=r"^parameters '_orig_mod\.layers\.1\.b' and 'layers\.1\.b' are one parameter without"
    ):
        checkpoint.save_expert(tmp_path / "both", plain | {"_orig_mod.layers.1.b": values(3)}, {})
    assert tree.unwrapped("a._orig_mods.my_orig_mod.b") == "a._orig_mods.my_orig_mod.b"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_of_every_dtype(tmp_path, dtype):
    params = {"m": values(5, 3, dtype=dtype), "scalar": values(dtype=dtype), "empty": values(0, 2, dtype=dtype)}
    if dtype.is_floating_point and dtype.itemsize > 1:
        params["odd"] = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny / 2]).to(dtype)
    checkpoint.save_expert(str(tmp_path / "e"), params, {})
    assert_same(checkpoint.load_expert(str(tmp_path / "e"), params)[0], params)


def test_round_trip_of_leaves_that_share_memory_or_are_views(tmp_path):
    whole = values(4, 6)
    params = {"a": whole, "same": whole, "t": whole.T, "part": whole[1:3], "x": whole[:1].expand(3, 6)}
    params.update(empty=torch.zeros(0), empty_too=torch.zeros(0, 2), grad=values(2).requires_grad_())
    want = tree.clone(params)
    checkpoint.save_expert(tmp_path / "e", params, {})
    loaded, _ = checkpoint.load_expert(tmp_path / "e", params)
    assert_same(loaded, want)
    assert_same(params, want)
    loaded["a"].zero_()
    assert loaded["same"].any()


def test_the_tree_of_a_checkpoint_is_that_of_like(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"a": {"w": values(2)}, "b": values(1)}, {})
    flat, _ = checkpoint.load_expert(tmp_path / "e", OrderedDict({"b": torch.empty(1), "a.w": torch.empty(2)}))
    assert type(flat) is OrderedDict
    assert torch.equal(flat["a.w"], values(2))


def test_weights_are_as_readable_as_their_folder_and_a_full_disk_is_named(tmp_path, monkeypatch):
    checkpoint.save_expert(tmp_path / "e", {"w": torch.zeros(2)}, {})
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "e").iterdir()}
    assert modes["model.safetensors"] == modes["manifest.json"]

    def full(*given, **options):
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OSError, match=f"^{tmp_path / 'x'} cannot be written .*No space left.*: free space there, and run"
    ):
        checkpoint.save_expert(tmp_path / "x", {"w": torch.zeros(2)}, {})
    assert [folder.name for folder in tmp_path.iterdir()] == ["e"]
    with pytest.raises(
        OSError, match=f"^{tmp_path / 'e/fisher.safetensors'} cannot be written .*No space left.*: free space there"
    ):
        checkpoint.save_statistics(tmp_path / "e", "fisher", {"w": torch.zeros(2)}, {})


def test_statistics_that_fill_the_disk_name_the_folder_of_their_expert(tmp_path, monkeypatch):
    write = checkpoint.save_file

    def full(tensors, path, **options):
        if "fisher" in Path(path).name:
            raise SafetensorError("No space left on device (os error 28)")
        write(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=f"^{tmp_path / 'x'} cannot be written .*No space left"):
        checkpoint.save_expert(
            tmp_path / "x", {"w": torch.zeros(2)}, {}, statistics={"fisher": ({"w": torch.zeros(2)}, {})}
        )
    assert not [*tmp_path.iterdir()]


def test_an_exception_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def fails(tensors, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save_expert(tmp_path / "e", make(), {})
    assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_old_checkpoint_until_the_new_is_whole(tmp_path, monkeypatch):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"n": 1})
    seen = []
    real = checkpoint.save_file

    def looks(tensors, path, **kwargs):
        real(tensors, path, **kwargs)
        seen.append(checkpoint.load_expert(tmp_path / "e", {"a": values(2)}))

    monkeypatch.setattr(checkpoint, "save_file", looks)
    checkpoint.save_expert(tmp_path / "e", {"a": values(2, seed=1)}, {"n": 2}, overwrite=True)
    (old, manifest), *_ = seen
    assert torch.equal(old["a"], values(2))
    assert manifest == {"n": 1}
    new, manifest = checkpoint.load_expert(tmp_path / "e", {"a": values(2)})
    assert torch.equal(new["a"], values(2, seed=1))
    assert manifest == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["e"]

    monkeypatch.setattr(checkpoint, "save_file", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"n": 3}, overwrite=True)
    assert checkpoint.load_manifest(tmp_path / "e") == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"n": 1})
    real = Path.rename

    def rename(self, target):
        if ".new-" in self.name:
            raise OSError("no such luck")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no such luck"), checkpoint.atomic_folder(tmp_path / "e", overwrite=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert checkpoint.load_manifest(tmp_path / "e") == {"n": 1}


def test_an_existing_folder_is_refused_before_any_work(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"n": 1})
    with pytest.raises(ValueError, match=r"/e exists: choose another folder or pass `overwrite=True`"):
        checkpoint.save_expert(tmp_path / "e", {"a": "not even a tensor"}, {"n": 2})
    assert checkpoint.load_manifest(tmp_path / "e") == {"n": 1}
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, not a folder"):
        checkpoint.save_expert(tmp_path / "file", {"a": values(2)}, {})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.txt").touch()
    for overwrite in (False, True):  # no way out is named that would be refused next
        with pytest.raises(ValueError, match=r"own holds mine\.txt, which no manifest .*: move it, or choose another"):
            checkpoint.save_expert(tmp_path / "own", {"a": values(2)}, {}, overwrite=overwrite)


MERGES_OWN = ("README.md", "recipe.yml", "sources.json")
STATISTICS = ("fisher.safetensors", "gram.safetensors", "adam.safetensors")


@pytest.mark.parametrize("kind", ["base", "expert", "snapshot", "merged", "adapters", None])
def test_only_what_is_written_into_a_kind_of_folder_is_replaced(tmp_path, kind):
    facts = {} if kind is None else {"kind": "expert" if kind == "adapters" else kind}
    texts = dict.fromkeys(MERGES_OWN, "made") if kind in ("merged", None) else {}
    adapter = lora.Lora(("w.weight",), 1, 1.0)

    def save(*, overwrite):
        if kind == "adapters":
            leaves = {"w.lora_A.weight": values(1, 2), "w.lora_B.weight": values(2, 1)}
            lora.save_peft(tmp_path / "e", leaves, adapter, base="x", manifest=facts, overwrite=overwrite, hashed=True)
        else:
            checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, facts, files=texts, overwrite=overwrite)

    save(overwrite=False)
    for name in STATISTICS:
        checkpoint.save_statistics(tmp_path / "e", name.partition(".")[0], {"a": values(2)}, {"expert": ""})
    save(overwrite=True)
    mine = {*MERGES_OWN, *STATISTICS, "model.safetensors", "adapter_config.json", "adapter_model.safetensors", "x.txt"}
    for name in mine - {file.name for file in (tmp_path / "e").iterdir()}:
        (tmp_path / "e" / name).write_text("mine")
        with pytest.raises(ValueError, match=f"e holds .*{name}, which no manifest of smat_fn in it names"):
            save(overwrite=True)
        assert (tmp_path / "e" / name).read_text() == "mine"
        (tmp_path / "e" / name).unlink()
    save(overwrite=True)


@pytest.mark.parametrize("bad", [torch.ones(1), float("nan"), float("inf"), {1, 2}, Path("x")], ids=repr)
def test_a_manifest_that_is_no_json_is_refused_before_anything_is_written(tmp_path, bad):
    with pytest.raises(ValueError, match="the manifest is not JSON"):
        checkpoint.save_expert(tmp_path / "deep" / "e", {"a": values(2)}, {"fine": 1, "bad": [bad]})
    assert list(tmp_path.iterdir()) == []


OUTSIDE = "../victim", "/victim", "a/b", "a\\b", "..", ""
TAKEN = "model.safetensors", "model.safetensors.index.json", "Manifest.json", "fisher.safetensors"


@pytest.mark.parametrize("name", [*OUTSIDE, *TAKEN])
def test_more_files_have_names_of_their_own_inside_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"^save_expert: files names .*(without folders|choose another name)$"):
        checkpoint.save_expert(tmp_path / "deep" / "e", {"a": values(2)}, {}, files={name: "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_comes_back_in_the_types_of_json(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"pair": (1, 2), "by": {3: "x"}})
    assert checkpoint.load_expert(tmp_path / "e", {"a": values(2)})[1] == {"pair": [1, 2], "by": {"3": "x"}}


def test_a_leaf_that_is_no_tensor_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(ValueError, match="parameter 'a' is a float"):
        checkpoint.save_expert(tmp_path / "e", {"a": 1.0}, {})
    assert list(tmp_path.iterdir()) == []


def test_every_difference_is_listed_by_path(tmp_path):
    stored = {"same": values(2), "shape": values(2), "dtype": values(2), "unknown": values(1)}
    checkpoint.save_expert(tmp_path / "e", stored, {})
    like = {"same": values(2), "shape": values(2, 1), "dtype": values(2, dtype=torch.bfloat16), "lost": values(1)}
    with pytest.raises(ValueError, match="made from another base") as caught:
        checkpoint.load_expert(tmp_path / "e", like)
    text = str(caught.value)
    where = str(tmp_path / "e")
    assert f"{where} lacks parameter 'lost' of the expected tree" in text
    assert f"{where} has parameter 'unknown' that the expected tree lacks" in text
    assert f"parameter 'shape' has shape (2,) in {where} but (2, 1) in the expected tree" in text
    assert f"parameter 'dtype' of {where} is float32, expected bfloat16" in text
    assert "'same'" not in text


def test_a_mistyped_leaf_alone_is_refused(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {})
    with pytest.raises(ValueError, match=r"parameter 'a' of .* is float32, expected float16: cast it first"):
        checkpoint.load_expert(tmp_path / "e", {"a": values(2, dtype=torch.float16)})


@pytest.mark.parametrize("name", ["name", "reference", "others"])
def test_a_relative_folder_of_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    checkpoint.save_expert(name, {"a": values(2)}, {})
    assert torch.equal(checkpoint.load_expert(name, {"a": values(2)})[0]["a"], values(2))


def test_files_below_a_folder_are_those_of_rglob_but_in_hidden_folders(tmp_path):
    for name in (
        "b/x.json",
        "a/c/x.json",
        "x.json",
        "a/.c.new-5/x.json",
        "lost+found/x.json",
        "a/y.log.jsonl",
        "z.log.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "pipe").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe" / "x.json")  # whose reader would wait
    found = sorted(
        file
        for file in tmp_path.rglob("x.json")
        if file.is_file()
        and not {"a/.c.new-5", "lost+found"}.intersection(map(str, file.relative_to(tmp_path).parents))
    )
    assert checkpoint.files_below(tmp_path, "x.json") == found
    assert len(checkpoint.files_below(tmp_path, "*.log.jsonl")) == 2
    assert checkpoint.files_below(tmp_path / "none", "*") == []
    assert checkpoint.files_below(tmp_path / "x.json", "*") == []


def test_files_of_linked_folders_are_found_once_and_by_their_own_name_if_they_have_one(tmp_path):
    runs, scratch = tmp_path / "runs", tmp_path / "scratch"
    for place in (runs / "own", scratch / "far" / "deep", tmp_path / "other"):
        place.mkdir(parents=True)
        (place / "x.json").touch()
    for link, target in {
        runs / "a": runs / "own",
        runs / "far": scratch / "far",
        runs / "again": scratch / "far",
        scratch / "far" / "back": runs,
        runs / "own" / "up": tmp_path,
        runs / "lost": tmp_path / "none",
    }.items():
        link.symlink_to(target)
    found = [runs / "again" / "deep" / "x.json", runs / "own" / "x.json"]
    assert checkpoint.files_below(runs, "x.json") == found
    link = tmp_path / "link"
    link.symlink_to(runs)
    assert checkpoint.files_below(link, "x.json") == [link / file.relative_to(runs) for file in found]


def test_a_folder_that_cannot_be_read_is_an_error_and_one_that_is_gone_is_not(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    scandir, error = os.scandir, PermissionError(13, "Permission denied", str(tmp_path / "closed"))

    def denied(place):
        if Path(place).name == "closed":
            raise error
        return scandir(place)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="closed"):
        checkpoint.files_below(tmp_path, "*.json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "data").symlink_to(tmp_path / "closed")
    assert checkpoint.files_below(tmp_path / "runs", "*.json") == []  # where a link leads is not searched
    error = FileNotFoundError(2, "No such file")
    assert checkpoint.files_below(tmp_path, "*.json") == []


def test_weights_that_this_user_may_not_read_are_not_called_absent(tmp_path, monkeypatch):
    checkpoint.save_expert(tmp_path / "e", {"w": torch.zeros(2)}, {})
    opened = Path.open

    def denied(path, *words, **more):
        if path.name == checkpoint.WEIGHTS:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **more)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=r"Permission denied.*e/model\.safetensors"):
        checkpoint.load_leaves(tmp_path / "e")


def test_nothing_is_written_beside_the_weights_of_a_checkpoint(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"w": torch.zeros(2)}, {"kind": "expert"})
    (told,) = checkpoint.foreign_problems({tmp_path / "e" / name: b"a" for name in ("x.csv", "y.csv")})
    assert told == f"{tmp_path / 'e'} is a checkpoint, which takes no other files: choose another folder"
    (tmp_path / "e" / checkpoint.MANIFEST).write_text('{"name": "a web page"}')
    assert checkpoint.foreign_problems({tmp_path / "e" / "x.csv": b"a"}) == []


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_weights_file_is_refused(tmp_path, keep):
    checkpoint.save_expert(tmp_path / "e", make(), {})
    file = tmp_path / "e" / checkpoint.WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*: train or merge it again with --o"):
        checkpoint.load_expert(tmp_path / "e", make())


def test_broken_folders_are_refused(tmp_path):
    checkpoint.save_expert(tmp_path / "e", {"a": values(2)}, {"n": 1})
    like = {"a": values(2)}
    for path in (tmp_path / "none", tmp_path, tmp_path / "e" / checkpoint.WEIGHTS):
        with pytest.raises(ValueError, match=r"is not a checkpoint \(no manifest\.json in it\)"):
            checkpoint.load_expert(path, like)
    (tmp_path / "e" / checkpoint.MANIFEST).write_text('{"n": ')
    with pytest.raises(ValueError, match=r"manifest\.json is not JSON"):
        checkpoint.load_expert(tmp_path / "e", like)
    (tmp_path / "e" / checkpoint.MANIFEST).write_text("{}")
    (tmp_path / "e" / checkpoint.WEIGHTS).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load_expert(tmp_path / "e", like)


def test_fingerprint_sees_every_value_name_dtype_and_shape():
    params = make()
    reference = checkpoint.fingerprint(params)
    variants = [reference]
    for path, leaf in tree.flatten(params).items():
        for n in range(leaf.numel()):
            changed = tree.clone(params)
            flat = tree.flatten(changed)[path].reshape(-1)
            # one unit in the last place, or one
            flat[n] = flat[n] + 1 if not leaf.is_floating_point() else torch.nextafter(flat[n], flat[n] + 9)
            variants.append(checkpoint.fingerprint(changed))
            assert not checkpoint.same(changed, params)
    assert checkpoint.same(params, tree.clone(params))
    a = values(2, 3)
    variants += [checkpoint.fingerprint(x) for x in ({"a": a}, {"b": a}, {"a": a.T}, {"a": a.reshape(3, 2)}, {})]
    variants += [checkpoint.fingerprint({"a": a.double()}), checkpoint.fingerprint({"a": a.view(torch.int32)})]
    variants += [checkpoint.fingerprint({"a": values(0, 2)}), checkpoint.fingerprint({"a": values(2, 0)})]
    variants += [checkpoint.fingerprint({"a": torch.tensor(0.0)}), checkpoint.fingerprint({"a": torch.tensor(-0.0)})]
    assert len(set(variants)) == len(variants)
    nan = {"a": torch.tensor([0.0, math.nan])}
    for other in ({"a": torch.tensor([-0.0, math.nan])}, {"b": nan["a"]}, {"a": nan["a"].double()}, {}):
        assert not checkpoint.same(nan, other)
    assert checkpoint.same(nan, tree.clone(nan))
    assert all(len(v) == 64 for v in variants)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_the_values_of_a_lazy_view_are_stored_hashed_and_compared(view, tmp_path):
    leaf = view(torch.randn(3, dtype=torch.complex64))
    values = {"w": leaf.resolve_conj().resolve_neg().clone()}
    checkpoint.save_expert(tmp_path / "out", {"w": leaf}, {})
    assert torch.equal(checkpoint.load_leaves(tmp_path / "out")[0]["w"], values["w"])
    assert checkpoint.fingerprint({"w": leaf}) == checkpoint.fingerprint(values)
    assert checkpoint.same({"w": leaf}, values)


def test_fingerprint_does_not_see_order_nesting_strides_or_gradients(tmp_path):
    a, b = values(3, 2), values(4, seed=1)
    reference = checkpoint.fingerprint({"a": a, "b": b})
    assert checkpoint.fingerprint({"b": b, "a": a}) == reference
    assert checkpoint.fingerprint({"b": b.clone().requires_grad_(), "a": a.T.contiguous().T}) == reference
    assert checkpoint.fingerprint({"x": {"a": a}, "b": b}) == checkpoint.fingerprint({"b": b, "x.a": a})
    checkpoint.save_expert(tmp_path / "e", {"a": a, "b": b}, {})
    assert checkpoint.fingerprint(checkpoint.load_expert(tmp_path / "e", {"b": b, "a": a})[0]) == reference


def test_describe_is_a_manifest(tmp_path):
    params = make()
    manifest = checkpoint.describe(params, task="digits", seed=1)
    assert manifest["task"] == "digits"
    assert manifest["fingerprint"] == checkpoint.fingerprint(params)
    assert manifest["versions"].keys() >= {"smat_fn", "python", "torch", "safetensors"}
    assert json.loads(json.dumps(manifest)) == manifest
    checkpoint.save_expert(tmp_path / "e", params, manifest)
    assert checkpoint.load_manifest(tmp_path / "e") == manifest


def test_a_sweep_takes_the_name_of_a_folder_letter_by_letter(tmp_path):
    for name in (".a[1].new-5", ".a[1].old-5", ".a1.new-6"):
        (tmp_path / name).mkdir()
    (tmp_path / ".a[1].new-7").touch()  # of `write_text`
    checkpoint.sweep(tmp_path / "a[1]")
    assert [path.name for path in tmp_path.iterdir()] == [".a1.new-6"]


def test_what_killed_statistics_leave_is_replaced_with_the_expert_and_by_a_process_of_its_number(tmp_path, monkeypatch):
    params, write = {"w": torch.zeros(2)}, checkpoint.save_file
    checkpoint.save_expert(tmp_path / "e", params, checkpoint.describe(params, kind="expert"))

    def killed(leaves, file, **options):
        write(leaves, file, **options)
        (Path(file).parent / ".tmpAbC").touch()  # as safetensors names its own
        shutil.copytree(tmp_path / "e", tmp_path / "left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", killed)
        checkpoint.save_statistics(tmp_path / "e", "gram", {"w": torch.ones(2, 2)}, {})
    assert not [*(tmp_path / "e").glob(".*")]
    shutil.copytree(tmp_path / "left", tmp_path / "again")
    checkpoint.save_expert(tmp_path / "left", params, {"n": 2}, overwrite=True)
    checkpoint.save_statistics(tmp_path / "again", "gram", {"w": torch.ones(2, 2)}, {})
    assert not [*(tmp_path / "left").glob(".*"), *(tmp_path / "again").glob(".*")]


def test_a_folder_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(os.readlink(f"/proc/self/fd/{number}"))))
    checkpoint.save_expert(tmp_path / "x", {"w": torch.zeros(2)}, {}, files={"more.json": "{}"})
    fresh = tmp_path / f".x.new-{os.getpid()}"
    assert set(flushed[:-2]) == {fresh / file.name for file in (tmp_path / "x").iterdir()}
    assert flushed[-2:] == [fresh, tmp_path]


def test_an_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    named = f"No space left on device: '{tmp_path / 'e'}'"
    with pytest.raises(OSError, match=named), checkpoint.atomic_folder(tmp_path / "e"):
        full()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x.json'}'"):
        checkpoint.write_text(tmp_path / "x.json", "1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not an index"),
        ("[1]", "is not an index"),
        ('{"weight_map": 3}', "is not an index"),
        ('{"weight_map": {"w": "../other.safetensors"}}', "names '../other.safetensors', outside the folder"),
    ],
)
def test_an_index_that_is_none_or_leaves_the_folder(text, told, tmp_path):
    checkpoint.save_expert(tmp_path / "out", {"w": torch.ones(2)}, {})
    (tmp_path / "out" / checkpoint.INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{checkpoint.INDEX} {told}"):
        checkpoint.load_leaves(tmp_path / "out")
