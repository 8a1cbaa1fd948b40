"""The output folder: whole or not at all, resumed after a kill, one merge at a time, readable by transformers."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from smat_fn import checkpoint, machine, merge, random
from smat_fn.config import Dare, MultiSlerp, Opcm, TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import files, merge_folders, plan, run, writing
from smat_fn.folders.prepare import prepare
from smat_fn.folders.streaming import estimate, survey
from smat_fn.scripts import cli

TA = TaskArithmetic(coef=0.5)
TIES = Ties(coef=0.5, keep=0.3, aggregate="sum", scope="global")
DARE = Dare(coef=0.5, drop_prob=0.5)
MERGE = """
import sys
from pathlib import Path
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_folders
base, expert, out = map(Path, sys.argv[1:])
merge_folders(TaskArithmetic(coef=0.5), base, {"sum": expert}, out)
"""


def digests(folder):
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def leftovers(folder):
    return sorted(path.name for path in folder.glob(".*"))


@pytest.mark.parametrize("config", [TA, TIES, DARE], ids=lambda config: config.name)
def test_an_interrupted_merge_goes_on_after_its_last_whole_shard(config, inputs, folders, tmp_path, monkeypatch):
    options = {"key": folders.key, "shard_size": 150}
    merge_folders(config, *inputs, tmp_path / "whole", **options)
    count, write = [0], writing.write_chunk

    def failing(*args):
        count[0] += 1
        if count[0] == 8:
            raise OSError("the disk is gone")
        write(*args)

    monkeypatch.setattr(run, "write_chunk", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        merge_folders(config, *inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == [".out.merging"]
    done = {file.name for file in (tmp_path / ".out.merging").glob("*.safetensors")}
    assert done
    seen = []
    monkeypatch.setattr(
        run, "write_chunk", lambda *args: (seen.append(os.readlink(f"/proc/self/fd/{args[0]}")), write(*args))
    )
    monkeypatch.setattr(survey, "find", None)  # thresholds are kept too
    report = merge_folders(config, *inputs, tmp_path / "out", **options)
    assert not done & {os.path.basename(file).removesuffix(".part") for file in seen}
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert report.rounding_ratio > 0
    assert leftovers(tmp_path) == []


def test_a_killed_merge_resumes_and_its_lock_is_taken_over(inputs, killed, tmp_path, monkeypatch):
    base, experts = inputs
    out, one = tmp_path / "out", {"sum": experts["sum"]}
    options, write, chunks = {"key": random.key(0), "shard_size": 150}, run.write_chunk, count(1)

    def dying(*args):
        if next(chunks) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", dying)
        killed(lambda: merge_folders(DARE, base, one, out, **options))
    assert not out.exists()
    assert leftovers(tmp_path) == [".out.lock", ".out.merging"]
    for folder in (out, tmp_path / "whole"):
        merge_folders(DARE, base, one, folder, **options)
    assert digests(out) == digests(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_an_interrupted_merge_of_another_recipe_is_begun_again(inputs, folders, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    other = TaskArithmetic(coef=0.25)
    for name in ("out", "whole"):
        merge_folders(other, *inputs, tmp_path / name, shard_size=150)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    work = tmp_path / ".out.merging"
    told = f"note: an unfinished merge in {work} is discarded: it has other settings or inputs"
    assert caplog.messages == [told]
    monkeypatch.setattr(run, "take_place", lambda *args: 1 / 0)
    for vocabulary in ("error", "base-rows", "base-rows"):  # what is not in the settings of the merger counts too
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "rows", vocabulary=vocabulary)
    assert caplog.messages == [told, told.replace(".out.", ".rows.")]


def test_an_interrupted_merge_of_other_code_is_begun_again(inputs, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(machine, "code", lambda: "0.0.1+old")
        patch.setattr(run, "take_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    shard = next((tmp_path / ".out.merging").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    assert caplog.messages == [
        f"note: an unfinished merge in {tmp_path / '.out.merging'} is discarded: it has other settings or inputs"
    ]
    assert checkpoint.load_manifest(tmp_path / "out")["code"] == machine.code()


def test_a_merge_that_resumes_needs_room_for_the_rest_alone(inputs, tmp_path, monkeypatch):
    total, write = plan(TA, *inputs, tmp_path / "out", shard_size=150).disk, writing.write_chunk
    left = iter(range(8))

    def failing(*args):
        if next(left) == 7:
            raise OSError("the disk is gone")
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_chunk", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    present = sum(file.stat().st_blocks * 512 for file in (tmp_path / ".out.merging").glob("*.safetensors*"))
    assert present > 0
    free = [total - present - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(ValueError, match="are needed: free space or write elsewhere"):
        merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    free[0] += 1
    merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)


def test_without_room_nothing_is_left_of_the_folders_that_were_made(inputs, tmp_path, monkeypatch):
    path, experts = inputs
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(run.shutil, "disk_usage", lambda place: SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"1 bytes free, .* are needed"):
        merge_folders(TaskArithmetic(coef=1.0), path, experts, tmp_path / "new" / "deep" / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_kill_after_the_last_rename_leaves_a_folder_that_can_be_replaced(inputs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writing, "tidy", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_folders(TA, *inputs, tmp_path / "out")
    assert (tmp_path / "out" / "progress.json").exists()
    merge_folders(TA, *inputs, tmp_path / "out", overwrite=True)
    assert sorted(digests(tmp_path / "out")) == ["manifest.json", "model.safetensors"]


@pytest.mark.slow
def test_two_merges_into_one_folder_exclude_each_other(inputs, tmp_path):
    out, lock = tmp_path / "out", tmp_path / ".out.lock"
    told = rf"^another merge into {out} is running \(it holds {lock}\)"
    merge = [sys.executable, "-c", MERGE, inputs[0], inputs[1]["sum"], out]
    with writing.exclusive(out):
        with pytest.raises(ValueError, match=told):
            merge_folders(TA, *inputs, out)
        with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=told):
            pool.submit(merge_folders, TA, *inputs, out).result()
        other = subprocess.run(merge, check=False, capture_output=True, text=True)
        assert f"ValueError: another merge into {out} is running" in other.stderr
    assert leftovers(tmp_path) == []
    merge_folders(TA, *inputs, out)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("text", ["", "elsewhere 11438 1", "{host} {pid} 1"])
def test_a_lock_file_that_nobody_holds_is_taken_over(inputs, tmp_path, text):
    (tmp_path / ".out.lock").write_text(text.format(host=socket.gethostname(), pid=os.getpid()))
    merge_folders(TA, *inputs, tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_killed_holder_frees_the_lock(tmp_path):
    out = tmp_path / "out"
    hold = "import sys; from pathlib import Path; from smat_fn.folders import writing\n"
    hold += "with writing.exclusive(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another merge"), writing.exclusive(out):
            pass
        assert leftovers(tmp_path) == [".out.lock"]
        holder.kill()
    with writing.exclusive(out):
        assert leftovers(tmp_path) == [".out.lock"]
    assert leftovers(tmp_path) == []


def test_one_of_several_threads_at_a_time_holds_the_lock(tmp_path):
    inside, most, failed = [], [], []

    def enter(_):
        try:
            with writing.exclusive(tmp_path / "out"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
        except ValueError:
            failed.append(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(400)))
    assert set(most) == {1}
    assert len(most) + len(failed) == 400
    assert leftovers(tmp_path) == []


def test_an_existing_folder_is_replaced_only_when_asked(inputs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("")
    (tmp_path / ".out.old-1").mkdir()  # a replacement that was killed before it deleted what it had replaced
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="out holds mine, which no manifest of smat_fn in it names"):
            merge_folders(TA, *inputs, out, overwrite=overwrite)
    assert (out / "mine").exists()
    (out / "mine").unlink()
    with pytest.raises(ValueError, match="out exists: choose another folder"):
        merge_folders(TA, *inputs, out)
    for _ in range(2):  # in place of an empty folder, then of its own output
        merge_folders(TA, *inputs, out, overwrite=True)
        assert sorted(digests(out)) == ["manifest.json", "model.safetensors"]
        assert leftovers(tmp_path) == []
    (out / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"out holds notes\.txt, which"):
        merge_folders(TA, *inputs, out, overwrite=True)
    shutil.copytree(inputs[0], tmp_path / "theirs")  # somebody's model
    with pytest.raises(ValueError, match=r"theirs holds model-00001-of-.*, which no manifest"):
        merge_folders(TA, *inputs, tmp_path / "theirs", overwrite=True)


@pytest.mark.parametrize("config", [TA, TIES, DARE, MultiSlerp(), Opcm()], ids=lambda config: config.name)
def test_values_that_are_not_finite_are_listed_and_nothing_is_left(config, family, folders, tmp_path):
    base, experts = family(torch.bfloat16, count=3)
    base["vector"][2] = float("nan")
    experts["sum"]["matrix"][1, 1:3] = float("inf")
    experts["cstance"]["scalar"].fill_(-float("inf"))
    before = sorted(tmp_path.iterdir())
    inputs = folders.save_family(tmp_path, base, experts)
    with pytest.raises(ValueError, match="NaN or infinite") as caught:
        merge_folders(config, *inputs, tmp_path / "out", key=folders.key, shard_size=150)
    assert str(caught.value).split("; ") == [
        "parameter 'vector' of base holds 1 values that are NaN or infinite",
        "parameter 'matrix' of expert 'sum' holds 2 values that are NaN or infinite",
        "parameter 'scalar' of expert 'cstance' holds 1 values that are NaN or infinite",
    ]
    assert before == []
    assert {path.name for path in tmp_path.iterdir()} == {"in", *(f"in-{name}" for name in experts)}


def test_a_number_of_the_whole_model_is_kept_for_the_merge_that_resumes(inputs, tmp_path, monkeypatch):
    job, _ = prepare(Opcm(), *inputs, tmp_path / "out")
    found, written = {}, []
    first = Opcm()._scale(survey.Survey(job, {}))
    Opcm().rule(survey.Survey(job, found, lambda: written.append(json.dumps(found))))
    assert json.loads(written[0]) == {"scale": first}
    monkeypatch.setattr(Opcm, "_scale", lambda *_: pytest.fail("computed again"))
    Opcm().rule(survey.Survey(job, json.loads(written[0])))


@pytest.mark.parametrize("config", [WeightAverage(), TA], ids=lambda config: config.name)
@pytest.mark.parametrize("where", ["base", "sum"])
def test_sums_do_not_hide_what_is_not_finite(where, config, family, folders, tmp_path):
    base, experts = family(torch.bfloat16, count=2)
    (base if where == "base" else experts["sum"])["matrix"][1, 1] = float("nan")
    label = "base" if where == "base" else "expert 'sum'"
    with pytest.raises(ValueError, match=f"^parameter 'matrix' of {label} holds 1 values that are NaN or infinite$"):
        merge_folders(config, *folders.save_family(tmp_path, base, experts), tmp_path / "out")


@pytest.mark.parametrize("config", [TA, TIES], ids=lambda config: config.name)  # the second by compiled loops
def test_variances_of_batch_norms_do_not_become_negative(config, folders, tmp_path):
    trees = [{"bn.weight": torch.ones(6), "bn.running_var": torch.full((6,), size)} for size in (1.0, 0.3, 0.2, 0.1)]
    trees[0]["bn.running_var"][-1] = 0.0
    base, *others = trees
    inputs = folders.save_family(tmp_path, base, dict(zip("xyz", others, strict=True)))
    with pytest.raises(
        ValueError, match=r"^parameter 'bn.running_var', .* below 0, .* by `coef=.'.running_.': 0.`"
    ) as caught:
        merge_folders(config, *inputs, tmp_path / "out", coef=1.0)
    assert "--coef '*running_*=0'" in cli.spoken(str(caught.value), ["coef"])
    merge_folders(config, *inputs, tmp_path / "out", coef={"*running_*": 0.0, "*": 1.0})
    assert torch.equal(folders.load(tmp_path / "out")["bn.running_var"], base["bn.running_var"])


def test_shards_go_to_the_disk_while_they_are_merged(inputs, folders, tmp_path, monkeypatch):
    flushed, threads, write = [], threading.active_count(), writing.write_chunk
    monkeypatch.setattr(writing, "FLUSH", 0.001)
    monkeypatch.setattr(writing, "_sync", flushed.append)
    monkeypatch.setattr(run, "write_chunk", lambda *args: (write(*args), time.sleep(0.01)))
    merge_folders(TA, *inputs, tmp_path / "out")
    assert flushed
    assert threading.active_count() == threads

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_sync", full)  # the caller's own fsync is what tells
    merge_folders(TA, *inputs, tmp_path / "again")
    assert digests(tmp_path / "out") == digests(tmp_path / "again")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"disk of .* is full: .* rerun"):
        merge_folders(TA, *inputs, tmp_path / "full")
    assert not (tmp_path / "full").exists()
    assert threading.active_count() == threads


def test_files_of_base_come_along_and_the_index_names_every_leaf(family, folders, tmp_path):
    base, experts = family(torch.bfloat16, count=2)
    path, paths = folders.save_family(tmp_path, base, experts)
    texts = {
        "config.json": json.dumps({"model_type": "llama", "dtype": "bfloat16"}),
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "x",
        "additional_chat_templates/tool.jinja": "y",
        "modules.json": "[]",
        "sentence_bert_config.json": "{}",
        "config_sentence_transformers.json": "{}",
        "wordembedding_config.json": "{}",
        "whitespacetokenizer_config.json": "{}",
        "phrasetokenizer_config.json": "{}",
        "1_Pooling/config.json": "{}",
    }
    for name, text in {**texts, "manifest.json": "{}", "training_args.txt": "", "README.md": ""}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    merge_folders(TA, path, paths, tmp_path / "out", shard_size=150)
    merge_folders(TA, path, paths, tmp_path / "wide", out_dtype="float32")
    assert {name: (tmp_path / "out" / name).read_text() for name in texts} == texts
    assert not {"training_args.txt", "README.md"} & set(digests(tmp_path / "wide"))
    assert json.loads((tmp_path / "wide/manifest.json").read_text())["kind"] == "merged"  # its own
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == base.keys()
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in base.values())


def test_the_headers_are_those_of_safetensors(inputs, folders, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    merge_folders(TA, *inputs, tmp_path / "out", shard_size=150)
    merge_folders(TA, *inputs, tmp_path / "one")
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, framework="pt") as store:
            assert store.metadata() == {"format": "pt"}
            held = store.offset_keys()
            offsets = {name: store.get_tensor(name).data_ptr() % store.get_tensor(name).itemsize for name in held}
        assert set(offsets.values()) <= {0}
    # equal sizes as the library's own writer
    save_file(folders.load(tmp_path / "one"), tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "again.safetensors").stat().st_size == (tmp_path / "one/model.safetensors").stat().st_size


def test_a_tied_llama_loads_with_the_parameters_of_its_base(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(config).to(torch.bfloat16))
        models[-1].save_pretrained(tmp_path / f"{seed}", max_shard_size="4KB" if seed else "5GB")
    merge_folders(TIES, tmp_path / "0", {"a": tmp_path / "1", "b": tmp_path / "2"}, tmp_path / "out", shard_size=4000)
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert merged.dtype == torch.bfloat16
    assert merged.num_parameters() == models[0].num_parameters()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    base, *experts = (dict(model.named_parameters()) for model in models)
    expected = merge.ties(base, experts, coef=0.5, keep=0.3)
    assert all(torch.equal(leaf, expected[path]) for path, leaf in merged.named_parameters())


def test_a_plan_writes_nothing_and_tells_the_size_on_disk(inputs, folders, tmp_path):
    before = sorted(tmp_path.iterdir())
    planned = plan(TIES, *inputs, tmp_path / "out", shard_size=150)
    assert sorted(tmp_path.iterdir()) == before
    merge_folders(TIES, *inputs, tmp_path / "out", shard_size=150)
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert tuple(sorted(sizes)) == planned.shards
    assert sum(sizes.values()) == planned.disk
    assert planned.seconds > 0


@pytest.mark.parametrize(("count", "size"), [(128, 4), (2, 1 << 20)])
def test_the_time_of_many_small_parameters_is_measured_on_several(count, size, folders, tmp_path, monkeypatch):
    now, rule = [0.0], estimate.rule_of

    def slow(*args):
        now[0] += estimate.SAMPLED  # seconds
        return rule(*args)

    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(estimate, "rule_of", slow)
    paths = [folders.save(tmp_path / name, {f"w{i}": torch.ones(size) for i in range(count)}) for name in "ab"]
    found = plan(TaskArithmetic(coef=1.0), paths[0], {"b": paths[1]}, tmp_path / "out", chunk=1 << 20)
    assert found.seconds == 128  # twice 64 small ones, or two large ones, alone


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shard_size", [150, 1 << 20])
def test_hashes_made_while_files_are_written_are_those_of_the_files(workers, shard_size, inputs, folders, tmp_path):
    out, options = tmp_path / "out", {"key": folders.key, "workers": workers, "shard_size": shard_size, "chunk": 64}
    report = merge_folders(DARE, *inputs, out, **options)
    found = {file.name: digest for file, digest in report.hashes.items()}
    assert all(file.parent == out and file.is_file() for file in report.hashes)
    assert sum(name.endswith(".safetensors") for name in found) == (1 if shard_size > 150 else 2)
    assert found.items() <= digests(out).items()


def test_a_file_that_is_followed_is_read_only_as_far_as_it_is_written(tmp_path, monkeypatch):
    content, file = random.bits(random.key(5), 3000).numpy().tobytes(), tmp_path / "file"
    file.write_bytes(content)
    asked, read = [], os.preadv
    monkeypatch.setattr(files, "FOLLOWED", 1000)
    monkeypatch.setattr(files.os, "preadv", lambda d, b, at: asked.append(at + len(b[0])) or read(d, b, at))
    with file.open("r+b") as opened, files.followed(opened.fileno()) as (digest, reached):
        for end in (0, 1, 1, 999, 1001, len(content)):
            reached(end)
    assert digest.result() == hashlib.sha256(content).hexdigest()
    assert asked[:3] == [1, 999, 1001]
    with file.open("r+b") as opened, files.followed(opened.fileno()) as (digest, reached):
        opened.truncate(7)
        reached(len(content))
    with pytest.raises(OSError, match="cut to 7 bytes"):
        digest.result()


def test_options_left_out_have_the_defaults_of_the_function(inputs, folders, tmp_path):
    for out, config in {"short": Ties(coef=0.4, keep=0.2), "full": Ties(coef=0.4, keep=0.2, aggregate="sum")}.items():
        merge_folders(config, *inputs, tmp_path / out)
    short, full = (digests(tmp_path / out)["model.safetensors"] for out in ("short", "full"))
    assert short == full


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("4kb", 4000), ("1.5 MB", 1500000), ("123", 123)])
def test_sizes(text, size):
    assert files.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "5GiB", "-1", "GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="write 5GB, 200MB or a number of bytes"):
        files.bytes_of(text)
