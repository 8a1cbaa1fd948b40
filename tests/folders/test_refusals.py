"""What cannot be merged is refused by name before any work."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smat_fn import random
from smat_fn.config import (
    Breadcrumbs,
    Dare,
    Della,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
)
from smat_fn.folders import merge_folders, plan
from smat_fn.folders.inputs import reading
from smat_fn.folders.inputs.hub import missing, repository_of
from smat_fn.folders.prepare import prepare
from smat_fn.scripts.merge.experts.inputs import load_inputs

TA = TaskArithmetic(coef=0.5)


@pytest.fixture
def inputs(family, folders, tmp_path):
    base, experts = family(count=2)
    return folders.save_family(tmp_path / "inputs", base, experts)


def refusal(tmp_path, base, experts, config=TA, **options):
    """The problems, each a sentence; nothing was written."""
    with pytest.raises(ValueError, match=r".") as caught:
        merge_folders(config, base, experts, tmp_path / "new" / "out", **options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r".") as planned:
        plan(config, base, experts, tmp_path / "new" / "out", **options)
    assert str(planned.value) == str(caught.value)
    return str(caught.value).split("; ")


def index_of(folder):
    return folder / "model.safetensors.index.json"


def edit_index(folder, **placed):
    index = json.loads(index_of(folder).read_text())
    index["weight_map"] |= placed
    index_of(folder).write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors"])
def test_an_index_that_leaves_its_folder(file, inputs, tmp_path):
    edit_index(inputs[0], matrix=file)
    problems = refusal(tmp_path, *inputs)
    assert f"base: {index_of(inputs[0])} names {file!r}, outside the folder: do not trust this index" in problems


def test_broken_shards_of_all_inputs_are_listed_together(inputs, tmp_path):
    base, experts = inputs
    edit_index(base, matrix="model-9.safetensors", ghost="model-00001-of-00002.safetensors")
    whole = (experts["sum"] / "model.safetensors").read_bytes()
    (experts["sum"] / "model.safetensors").write_bytes(whole[:-1])
    problems = refusal(tmp_path, base, {**experts, "lost": tmp_path / "lost"})
    for start, end in (
        (f"base: {base}/model-9.safetensors is missing", "download it again"),
        (f"base: {base}/model-00001-of-00002.safetensors lacks parameter 'ghost'", "download it again"),
        (f"expert 'sum': {experts['sum']}/model.safetensors cannot be read", "copy or download it again"),
        (f"expert 'lost': {tmp_path}/lost is not a folder", "give the folder of a checkpoint"),
    ):
        assert any(problem.startswith(start) and problem.endswith(end) for problem in problems), (start, problems)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_git_has_not_fetched(file, inputs, tmp_path):
    base, experts = inputs
    (experts["sum"] / "model.safetensors").unlink()
    (experts["sum"] / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 9\n")
    (problem,) = refusal(tmp_path, base, experts)
    pointer = f"{experts['sum']}/{file} is a pointer of Git LFS: fetch the file by git lfs pull"
    assert problem == f"expert 'sum': {pointer}"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(text, inputs, tmp_path):
    index_of(inputs[0]).write_text(text)
    assert f"base: {index_of(inputs[0])} is not an index" in refusal(tmp_path, *inputs)[0]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin holds pickled weights that cannot be read safely"),
        ("model.pt", "holds pickled weights under the name model.pt: give this file if it is a state dict, or save"),
        ("llama.Q4_K.gguf", "holds a GGUF file (llama.Q4_K.gguf), whose weights are quantised"),
        ("sdxl.safetensors", "holds weights under the name sdxl.safetensors: give this file"),
        ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.safetensors cannot be read (Error while deserial"),
        ("pytorch_lora_weights.bin", "holds pickled weights under the name pytorch_lora_weights.bin: give this file"),
        ("notes.txt", "holds neither model.safetensors nor model.safetensors.index.json: give the folder"),
        ("training_args.bin", "holds neither model.safetensors nor model.safetensors.index.json: give the folder"),
        ("checkpoint-9/model.safetensors", "holds no weights, but its folders checkpoint-9 do: give one of them"),
        ("mine/adapter_config.json", "holds no weights, but its folders mine do: give one of them"),
        (
            "global_step9/states.pt",
            "holds parts of a model (global_step9) as FSDP or DeepSpeed saves them: write whole weights from them "
            "first, by zero_to_fp32.py",
        ),
        (
            "step-9/__0_0.distcp",
            "holds parts of a model (step-9/__0_0.distcp) as FSDP or DeepSpeed saves them: write w",
        ),
        ("actor/model_world_size_2_rank_0.pt", "holds parts of a model (actor/model_world_size_2_rank_0.pt) as FSDP"),
        ("pytorch_model.bin/pytorch_model.bin", "pytorch_model.bin is a folder, as DeepSpeed's zero_to_fp32.py makes"),
        ("rng_state_0.pth", "holds neither model.safetensors nor model.safetensors.index.json: give the folder"),
        (
            "model-00001-of-00001.safetensors",
            "holds model-00001-of-00001.safetensors and no model.safetensors.index.json: rename the file to model.saf",
        ),
        (
            "pytorch_model-00001-of-00002.bin",
            "holds pytorch_model-00001-of-00002.bin and no pytorch_model.bin.index.json: download all of its files",
        ),
        ("tf_model.h5", "holds a file of Keras or TensorFlow (tf_model.h5), which is not read: save the model by"),
    ],
)
def test_other_formats(file, words, inputs, tmp_path):
    (tmp_path / "other" / file).parent.mkdir(parents=True)
    (tmp_path / "other" / file).write_bytes(b"")
    (problem,) = refusal(tmp_path, inputs[0], {"x": tmp_path / "other"})
    assert problem.startswith((f"expert 'x': {tmp_path}/other {words}", f"expert 'x': {tmp_path}/other/{words}"))


def test_several_files_of_pickled_weights_may_be_parts(inputs, tmp_path):
    (tmp_path / "other").mkdir()
    for name in "hf_model_0001_0.pt", "hf_model_0002_0.pt", "recipe_state.pt":
        (tmp_path / "other" / name).touch()
    (problem,) = refusal(tmp_path, inputs[0], {"x": tmp_path / "other"})
    assert "holds 2 files of pickled weights (hf_model_0001_0.pt, hf_model_0002_0.pt): give one if each is" in problem


def test_weights_without_values_are_those_of_zero_3(family, folders, tmp_path):
    base, experts = family(count=2)
    names = ("a.weight", "b.weight")
    base |= {path: torch.ones(2) for path in names}
    empty = experts["sum"] | {path: torch.empty(0) for path in names}
    start, paths = folders.save_family(tmp_path, base, {"x": empty})
    (problem,) = refusal(tmp_path, start, paths)
    told = "holds weights without values ('a.weight' and 1 more), as ZeRO-3 saves them without its parts: run zero_to"
    assert problem.startswith(f"expert 'x': {paths['x']} {told}")


def test_an_adapter_whose_weights_are_elsewhere(inputs, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "adapter_config.json").write_text("{}")
    (tmp_path / "ours/lora.safetensors").touch()
    (problem,) = refusal(tmp_path, inputs[0], {"x": tmp_path / "ours"})
    words = "the configuration of an adapter and no adapter_model.safetensors: copy or download it"
    assert problem.startswith(f"expert 'x': {tmp_path}/ours holds {words}")


def test_quantised_weights(family, folders, inputs, tmp_path):
    base, _ = family()
    for name, extra in {"named": {"q.qweight": torch.zeros(2, dtype=torch.int32)}, "configured": {}}.items():
        folders.save(tmp_path / name, base | extra)
    (tmp_path / "configured/config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    merge_folders(TA, *inputs, tmp_path / "out", config_from=str(tmp_path / "configured"))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {}  # the weights written are not quantised
    folders.save(tmp_path / "mlx", base)
    (tmp_path / "mlx/config.json").write_text(json.dumps({"quantization": {"bits": 4}}))
    folders.save(tmp_path / "complex", {**base, "matrix": base["matrix"].to(torch.complex64)})
    experts = {name: tmp_path / name for name in ("named", "configured", "mlx", "complex")}
    out = "merge the checkpoint it was made from, or a dequantised copy"
    problems = refusal(tmp_path, inputs[0], experts)
    assert problems == [
        f"expert 'named': {tmp_path}/named is quantised (it holds parameter 'q.qweight', int32): {out}",
        f"expert 'configured': {tmp_path}/configured is quantised (gptq, says its config.json): {out}",
        f"expert 'mlx': {tmp_path}/mlx is quantised (unknown method, says its config.json): {out}",
        "expert 'complex': parameter 'matrix' is stored as C64, which cannot be merged: "
        "convert the checkpoint to bfloat16, float16 or float32",
    ]


def test_leaves_shapes_and_kinds_of_all_experts(family, folders, tmp_path):
    base, experts = family(count=2)
    experts["sum"]["matrix"] = torch.zeros(6, 12)
    del experts["sum"]["row"]
    experts["cstance"]["extra.weight"] = torch.zeros(2)
    experts["cstance"]["vector"] = torch.zeros(9, dtype=torch.int64)
    text = "; ".join(refusal(tmp_path, *folders.save_family(tmp_path / "inputs", base, experts)))
    for part in (
        "expert 'sum' lacks parameter 'row' of base",
        "parameter 'matrix' has shape (6, 12) in expert 'sum' but (6, 11) in base",
        "expert 'cstance' has parameter 'extra.weight' that base lacks",
        "parameter 'vector' is int64 in expert 'cstance' but float32 in base",
    ):
        assert part in text


def test_options(inputs, tmp_path):
    problems = refusal(
        tmp_path, *inputs, Dare(drop_prob=1.5), chunk=0, shard_size=0, out_dtype="int8", coef=float("nan")
    )
    for part in (
        "shard_size is 0",
        "chunk is 0",
        "out_dtype is 'int8'",
        "coef is nan",
        "key is not set",
        "drop_prob is 1.5",
    ):
        assert any(problem.startswith(part) for problem in problems), part
    assert refusal(tmp_path, *inputs, Ties(coef=0.3)) == [
        "keep of ties is not set: smat_fn.config.resolve takes it from a preset"
    ]
    odd = {"heads": "foo", "token_rows": "foo", "overwrite": "no", "partial": 1, "workers": 2.0, "shard_size": "5GB"}
    assert refusal(tmp_path, *inputs, TA, **odd) == [
        "shard_size is '5GB', must be an integer of at least 1",
        "workers is 2.0, must be an integer of at least 1",
        "heads 'foo' is unknown, choose one of 'error', 'keep'",
        "token_rows 'foo' is unknown, choose one of 'base', 'mean', 'by-row'",
        "overwrite is 'no', must be True or False",
        "partial is 1, must be True or False",
    ]
    assert refusal(tmp_path, *inputs, Ties)[0].endswith(
        "must be the options of a merger, such as Ties(coef=0.4, keep=0.2)"
    )
    assert refusal(tmp_path, inputs[0], [*inputs[1].values()]) == ["experts is a list: give a mapping {name: folder}"]
    assert refusal(tmp_path, *inputs, TaskArithmetic()) == ["coef is not set: pass one"]
    assert refusal(tmp_path, *inputs, WeightAverage(), coef=0.5) == ["coef is 0.5, but wa has none: leave it out"]
    (problem,) = refusal(tmp_path, *inputs, Della(coef=1.0, drop_prob=0.1, window=0.5), key=random.key(0))
    assert problem.endswith("both must be in (0, 1]: take a smaller window")
    assert refusal(tmp_path, inputs[0], {}) == ["experts is empty: pass at least one"]


def test_an_output_over_an_input(inputs, tmp_path):
    base, experts = inputs
    for out in (base, base.parent, base / "merged", experts["sum"]):
        with pytest.raises(ValueError, match="which is, holds or lies in"):
            merge_folders(TA, base, experts, out, overwrite=True)


def test_averages_take_bases_buffers_where_experts_differ(family, folders, tmp_path):
    base, experts = family(count=2)
    for expert in experts.values():
        expert["steps"] += 5
    inputs = folders.save_family(tmp_path / "equal", base, experts)
    assert merge_folders(WeightAverage(), *inputs, tmp_path / "same").notes == ()
    assert torch.equal(folders.load(tmp_path / "same")["steps"], base["steps"] + 5)
    experts["cstance"]["steps"] += 1
    inputs = folders.save_family(tmp_path / "unlike", base, experts)
    note = "parameter 'steps', not floating-point, differs among the experts: base's is used"
    assert merge_folders(WeightAverage(), *inputs, tmp_path / "out").notes == (note,)
    assert torch.equal(folders.load(tmp_path / "out")["steps"], base["steps"])


def test_buffers_that_no_merger_changes_are_told_where_they_differ(family, folders, tmp_path):
    base, experts = family(count=2)
    base |= {"counts.num_batches_tracked": torch.tensor(1), "mask": torch.tensor([True, False])}
    for i, expert in enumerate(experts.values()):
        expert |= {"counts.num_batches_tracked": torch.tensor(9), "mask": torch.tensor([True, i == 1])}
    inputs = folders.save_family(tmp_path, base, experts)
    note = "parameter 'mask', not floating-point, differs from base's in an expert: base's is used"
    assert plan(TA, *inputs, tmp_path / "out").notes == (note,)
    assert plan(TA, inputs[0], dict([*inputs[1].items()][:1]), tmp_path / "out").notes == ()


def test_batch_norms_whose_statistics_are_of_other_models_are_told(family, folders, tmp_path):
    base, experts = family(count=2)
    base |= {"bn.num_batches_tracked": torch.tensor(1), "bn.running_var": torch.ones(2)}
    same = {name: expert | base for name, expert in experts.items()}
    assert plan(TA, *folders.save_family(tmp_path / "frozen", base, same), tmp_path / "out").notes == ()
    same["other"] = base | {"bn.num_batches_tracked": torch.tensor(2)}
    (note,) = plan(TA, *folders.save_family(tmp_path / "moved", base, same), tmp_path / "out").notes
    assert note.startswith("running statistics of batch norms ('bn') are not those of the merged model")


def test_globs_that_skip_nothing_are_told(family, folders, tmp_path):
    config = TsvMerge(coef=1.0, skip=("*matri*", "*matrx*"))
    notes = plan(config, *folders.save_family(tmp_path, *family(count=2)), tmp_path / "out").notes
    assert notes == ("skip '*matrx*' matches no parameter",)


def test_experts_that_are_strange_to_base_and_base_itself_are_told(folders, tmp_path, monkeypatch):
    def matrix(seed):
        return {"w": torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))}

    same = {"u": matrix(3)["w"], "v": matrix(4)["w"]}  # as of a tower, which has base's rest
    near = {"w": matrix(0)["w"] + 0.9 * matrix(2)["w"]}
    given = {"base": matrix(0) | same, "far": matrix(1) | same, "near": near | same}
    paths = {name: folders.save(tmp_path / name, tree) for name, tree in given.items()}
    assert plan(TA, paths["base"], paths, tmp_path / "out").notes == (
        "the weights of expert 'far' have little in common with base's (cosine 0.02 in the median of a sample): "
        "was it trained from another base?",
        "expert 'base' is base itself: its task vector is 0",
    )
    (tmp_path / "link").symlink_to(paths["near"])
    twice = {"near": paths["near"], "link": tmp_path / "link"}
    told = f"experts 'near' and 'link' are one folder, {paths['near']}: it is merged 2 times"
    assert plan(TA, paths["base"], twice, tmp_path / "out").notes == (told,)
    assert load_inputs(paths["base"], [*twice.values()]).notes == (told,)
    (tmp_path / "broken").symlink_to("nowhere")
    broken = tmp_path / "broken"
    assert missing({"expert 'a'": broken}) == [
        f"expert 'a': {broken} is a link to nowhere, which leads nowhere: set it again, or give the folder"
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to("name")  # to itself
    assert repository_of(Path("owner/name")) is None
    small = [folders.save(tmp_path / str(seed), {"w": matrix(seed)["w"][:9, :9].clone()}) for seed in range(2)]
    assert plan(TA, small[0], {"x": small[1]}, tmp_path / "out").notes == ()


def test_names_that_are_not_bases_are_not_blamed_on_a_tied_head(family, folders, tmp_path):
    base, _ = family(count=2)
    base |= {"lm_head.weight": torch.ones(2, 2), "model.embed_tokens.weight": torch.zeros(2, 2)}
    start = folders.save(tmp_path / "base", base)
    inner = {f"model.{path}": leaf for path, leaf in base.items()}
    wrapped = folders.save(tmp_path / "wrapped", inner | {"criterion.weight": torch.ones(2)})
    other = folders.save(tmp_path / "other", {"something": torch.ones(2)})
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    problems = refusal(tmp_path, start, {"w": wrapped, "o": other, "e": empty})
    assert problems == [
        f"expert 'e': {empty} holds no parameters: download it again, or save the model again",
        "expert 'w' has no parameter of base: names in expert 'w' start with 'model.': save it without "
        "(model.base_model.save_pretrained), or pass `heads='keep'`, or load and save both by one version of "
        "transformers",
        "expert 'o' has no parameter of base ('something' the first, base's 'steps'): trained from another base?",
    ]


def test_a_change_that_the_output_cannot_hold(folders, tmp_path):
    base, expert = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 1e5, 0.0])}
    paths = folders.save(tmp_path / "b", base), {"x": folders.save(tmp_path / "x", expert)}
    with pytest.raises(ValueError, match=r"parameter 'w': merged values exceed the range of torch.float16: choose"):
        merge_folders(TA, *paths, tmp_path / "out", coef=1.0, out_dtype="float16")
    huge = {"w": torch.full((3,), 3e38)}
    paths = folders.save(tmp_path / "n", {"w": -huge["w"]}), {"x": folders.save(tmp_path / "h", huge)}
    with pytest.raises(ValueError, match="parameter 'w': expert - base overflows float32"):
        merge_folders(TA, *paths, tmp_path / "out")
    merge_folders(WeightAverage(), paths[0], {"x": paths[1]["x"], "y": paths[0]}, tmp_path / "out")
    assert folders.load(tmp_path / "out")["w"].eq(0).all()


def test_a_disk_that_is_too_small(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    for step in (merge_folders, plan):
        with pytest.raises(ValueError, match=r"has 10 bytes free, .* are needed: free space or write elsewhere"):
            step(TA, *inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_devices_that_are_not_there(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(tmp_path, *inputs, device="cuda") == ["device is 'cuda', but torch sees no GPU here: give cpu"]
    for device in ("gpu", "meta"):
        assert refusal(tmp_path, *inputs, device=device) == [f"device is {device!r}: give cpu or cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refusal(tmp_path, *inputs, device="cuda:2") == ["device is 'cuda:2', but the last GPU is cuda:1"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for free, chunk in ((80 << 30, 1 << 27), (1 << 30, (1 << 30) // 160), (1 << 20, 1 << 19)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        job, _ = prepare(TA, *inputs, tmp_path / "out", device="cuda", workers=2)
        assert job.device == torch.device("cuda:1")  # as tensors there say
        assert job.chunk == chunk // 2
    job, _ = prepare(TA, *inputs, tmp_path / "out", device="cuda", chunk=100)
    assert job.chunk == 100


def test_coefficients_by_leaf_that_do_not_fit(inputs, tmp_path):
    (problem,) = refusal(tmp_path, *inputs, TaskArithmetic(), coef={"*": 0.3, "matrix": 0.1})
    assert problem.startswith(
        "rule 'matrix' of the coefficients decides for no parameter: earlier rules match all of its parameters"
    )
    problems = refusal(tmp_path, *inputs, TaskArithmetic(), coef={"m*": 0.3})
    assert "no rule matches parameter 'vector'" in "; ".join(problems)
    assert refusal(tmp_path, *inputs, WeightAverage(), coef={"*": 0.3})[0].endswith("wa has none: leave it out")


def test_a_link_to_weights_that_are_gone_is_told_as_one(inputs, tmp_path):
    base, experts = inputs
    (gone := tmp_path / "gone").mkdir()
    (gone / "model.safetensors").symlink_to("../blobs/0f")
    (problem,) = refusal(tmp_path, base, experts | {"sum": gone})
    assert problem.endswith(
        "holds a link model.safetensors to ../blobs/0f, which does not exist: copy or download it again"
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (WiseFt(coef=1.0), "the number of experts is 2: wise_ft takes exactly 1"),
        (WeightedAverage((1.0,)), "weights holds 1 numbers for 2 experts: give one for each"),
        (Breadcrumbs(0.6, 0.5, coef=1.0), "drop_smallest 0.6 and drop_largest 0.5 leave nothing: lower one"),
        (
            Breadcrumbs(0.1, 0.1, coef=1.0, largest={"sum": {"*": 0.95}}),
            "drop_smallest 0.1 and largest 0.95 of 'sum' leave nothing: lower one",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_mergers_say_themselves_what_does_not_fit(config, told, inputs, tmp_path):
    assert refusal(tmp_path, *inputs, config) == [told]


def test_leaves_that_do_not_fit_the_machine_are_refused_before_any_reading(folders, tmp_path, monkeypatch):
    trees = [{"embed.w": torch.ones(64, 32), "w": torch.eye(4)} for _ in range(3)]
    paths = folders.save_family(tmp_path, trees[0], dict(zip("ab", trees[1:], strict=True)))
    monkeypatch.setattr("smat_fn.folders.streaming.estimate._available", lambda: (33 << 20) + 64 * 32 * 72 - 1)
    monkeypatch.setattr("smat_fn.folders.streaming.estimate.FIXED", 33 << 20)
    needed = "tsv_merge needs 0.0 GiB of memory for 1 of the largest parameters.*by `skip`, e.g. .*or use fewer `wor"
    for call in (merge_folders, plan):
        with pytest.raises(ValueError, match=needed):
            call(TsvMerge(coef=1.0), *paths, tmp_path / "out")
    with monkeypatch.context() as smaller:
        smaller.setattr("smat_fn.merge.parts.spectral.SIDE", 31)
        for call in (merge_folders, plan):
            with pytest.raises(ValueError, match=r"^parameter 'embed\.w' is 64 x 32, .*count in 32 bits"):
                call(TsvMerge(coef=1.0), *paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_folders(TsvMerge(coef=1.0, skip=("embed*",)), *paths, tmp_path / "out")
    merge_folders(TaskArithmetic(coef=1.0), *paths, tmp_path / "ta")


@pytest.mark.parametrize(("own", "of_base"), [(1, 3), (3, 1)])
def test_an_expert_of_a_model_with_more_or_fewer_layers(own, of_base, folders, tmp_path):
    def model(layers):
        return {"embed.weight": torch.ones(4, 2)} | {f"layers.{i}.q.weight": torch.ones(2, 2) for i in range(layers)}

    base, experts = folders.save_family(tmp_path / "inputs", model(of_base), {"x": model(own)})
    told = f"expert 'x' has layers 0 to {own - 1}, base 0 to {of_base - 1}: give the base that it was trained from"
    assert refusal(tmp_path, base, experts)[-1] == told


def test_json_that_is_nested_too_deeply_and_pipes_are_told(inputs, tmp_path):
    base = inputs[0]
    index_of(base).write_text("[" * 100_000)
    assert f"base: {index_of(base)} is not an index" in refusal(tmp_path, *inputs)[0]
    (base / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        reading.load_config(base)
    (base / "config.json").unlink()
    os.mkfifo(base / "config.json")  # nobody writes into it: to read it would never end
    with pytest.raises(ValueError, match=r"config\.json cannot be read \(it is not a file\)"):
        reading.load_config(base)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["deep", "pipe"])
def test_a_file_beside_the_weights_that_cannot_be_read_counts_as_none(kind, file, inputs, tmp_path):
    base, experts = inputs
    for folder in experts.values():
        if kind == "deep":
            (folder / file).write_text("[" * 100_000)
        else:
            os.mkfifo(folder / file)
    merge_folders(TA, base, experts, tmp_path / "out")


def test_weights_that_this_user_may_not_read_are_not_called_absent(inputs, tmp_path, monkeypatch):
    base, experts = inputs
    file = experts["sum"] / "model.safetensors"
    file.write_bytes(b"")  # a superuser may read all
    monkeypatch.setattr(os, "access", lambda place, mode: place != file)
    told = f"expert 'sum': {file} cannot be read by this user: ask its owner (chmod)"
    assert told in refusal(tmp_path, base, experts)


def test_weights_that_are_a_pipe_are_told(inputs, tmp_path):
    base, experts = inputs
    (folder := next(iter(experts.values()))).joinpath("model.safetensors.index.json").unlink(missing_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    os.mkfifo(folder / "model.safetensors")
    assert "model.safetensors cannot be read (it is not a file)" in refusal(tmp_path, base, experts)[0]


def test_a_shape_that_torch_cannot_count_is_told(inputs, tmp_path):
    base, experts = inputs
    folder = next(iter(experts.values()))
    index_of(folder).unlink(missing_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "parameter 'w' is stored as F32, which cannot be merged" in refusal(tmp_path, base, experts)[0]


def test_an_output_whose_name_is_not_utf_8_is_told_before_the_merge(inputs, tmp_path):
    out = tmp_path / os.fsdecode(b"b\xff")
    with pytest.raises(ValueError, match="which is not UTF-8"):
        merge_folders(TA, *inputs, out)
    assert not out.exists()
