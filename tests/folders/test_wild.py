"""Inputs as they are found: other vocabularies, tied heads, tokenizers, quantised weights, single files, hub names."""

import argparse
import json
from pathlib import PurePosixPath

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import safe_globals
from torch.testing._internal.distributed.fake_pg import FakeStore

from smat_fn import random
from smat_fn.config import Della, TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import extract_lora, merge_folders, plan
from smat_fn.folders.inputs.adapters.peft import BESIDE
from smat_fn.folders.inputs.side_files import COPIED
from smat_fn.tree import clone

TA = TaskArithmetic(coef=0.5)
CONFIGS = [
    TA,
    WeightAverage(),
    Ties(coef=0.5, keep=0.4, aggregate="sum", scope="global"),
    Della(coef=0.9, drop_prob=0.5, window=0.14),
]
EMBED, HEAD, POSITIONS = "model.embed_tokens.weight", "lm_head.weight", "model.position_embeddings.weight"


def model(seed, rows=12, *, dtype=torch.bfloat16, head=True, positions=8):
    generator = torch.Generator().manual_seed(seed)
    shapes = {EMBED: (rows, 5), "model.up.weight": (7, 5), POSITIONS: (positions, 5), HEAD: (rows, 5)}
    return {
        path: torch.randn(shape, generator=generator).to(dtype)
        for path, shape in shapes.items()
        if head or path != HEAD
    }


def rows_of(expert, base, wanted):
    """An expert with base's rows: the closed form of the two policies."""
    fitted = {path: leaf.float() for path, leaf in expert.items()}
    for path in (EMBED, HEAD):
        fitted[path] = torch.cat([expert[path].float(), base[path][len(expert[path]) :].float()])[:wanted]
    return fitted


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("policy", "sizes"), [("base-rows", [15, 12]), ("pad-with-base", [9, 15])])
def test_policies_for_other_numbers_of_rows(policy, sizes, config, folders, tmp_path):
    base = model(0)
    experts = {f"{i}": model(i + 1, rows, dtype=torch.float16) for i, rows in enumerate(sizes)}
    paths = folders.save_family(tmp_path, base, experts)
    fitted = {name: rows_of(expert, base, 12) for name, expert in experts.items()}
    expected = folders.in_memory(config, base, fitted)
    if isinstance(config, WeightAverage):
        expected = {path: leaf.bfloat16() for path, leaf in expected.items()}
    for chunk in (7, 1 << 19):
        out = tmp_path / f"{chunk}"
        merge_folders(config, *paths, out, key=folders.key, chunk=chunk, vocabulary=policy)
        folders.assert_same_bits(folders.load(out), expected)


def test_other_numbers_of_rows_are_explained_once_for_every_expert(folders, tmp_path):
    experts = {"small": model(1, 9), "large": model(2, 15), "same": model(3)}
    paths = folders.save_family(tmp_path, model(0), experts)
    both = f"{EMBED!r}, {HEAD!r}"
    other = ", or merge by token (`tokenizer_from='union'`)"
    large = f"expert 'large' has 15 rows in {both}, base 12: pass `vocabulary='base-rows'` (its first rows){other}"
    small = (
        f"expert 'small' has 9 rows in {both}, base 12: pass `vocabulary='pad-with-base'` (base's rows there){other}"
    )
    for policy, problems in {"error": [small, large], "base-rows": [small]}.items():
        with pytest.raises(ValueError, match="rows") as caught:
            plan(TA, *paths, tmp_path / "out", vocabulary=policy)
        assert str(caught.value).split("; ") == problems
    with pytest.raises(ValueError, match="vocabulary is 'union', must be one of error, base-rows, pad-with-base"):
        plan(TA, *paths, tmp_path / "out", vocabulary="union")


def test_other_leaves_are_no_vocabulary(folders, tmp_path):
    paths = folders.save_family(tmp_path, model(0), {"x": model(1, positions=9), "y": model(1, rows=13)})
    paths[1]["y"] = folders.save(tmp_path / "wide", model(1) | {EMBED: torch.zeros(13, 6)})
    with pytest.raises(ValueError, match="shape") as caught:
        plan(TA, *paths, tmp_path / "out", vocabulary="pad-with-base")
    assert f"parameter {POSITIONS!r} has shape (9, 5) in expert 'x' but (8, 5) in base" in str(caught.value)
    assert f"parameter {EMBED!r} has shape (13, 6) in expert 'y' but (12, 5) in base" in str(caught.value)


def tie(tree):
    return {**tree, HEAD: tree[EMBED].clone()}


def test_a_stored_copy_of_tied_embeddings_is_left_out(folders, tmp_path):
    base, experts = model(0, head=False), {"tied": model(1, head=False), "copied": tie(model(2))}
    paths = folders.save_family(tmp_path, base, experts)
    bare = {name: {path: leaf for path, leaf in tree.items() if path != HEAD} for name, tree in experts.items()}
    for config in CONFIGS:
        merge_folders(config, *paths, tmp_path / config.name, key=folders.key)
        folders.assert_same_bits(folders.load(tmp_path / config.name), folders.in_memory(config, base, bare))


def test_where_base_stores_the_copy_it_is_written_unless_its_configuration_says_tied(folders, tmp_path):
    base, experts = tie(model(0)), {"tied": model(1, head=False), "copied": tie(model(2))}
    paths = folders.save_family(tmp_path, base, experts)
    config = CONFIGS[2]
    merge_folders(config, *paths, tmp_path / "stored")
    expected = folders.in_memory(config, base, {name: tie(tree) for name, tree in experts.items()})
    folders.assert_same_bits(folders.load(tmp_path / "stored"), expected)
    (paths[0] / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    merge_folders(config, *paths, tmp_path / "once")
    bare = {name: {path: leaf for path, leaf in t.items() if path != HEAD} for name, t in {**experts, "": base}.items()}
    folders.assert_same_bits(folders.load(tmp_path / "once"), folders.in_memory(config, bare.pop(""), bare))


@pytest.mark.parametrize("whose", ["base", "x"])
def test_a_head_of_its_own_is_not_tied_again(whose, folders, tmp_path):
    trees = {"base": tie(model(0)), "x": tie(model(1)), "y": tie(model(2))} | {whose: model(3)}
    base, experts = folders.save_family(tmp_path, trees.pop("base"), trees)
    (base / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    report = merge_folders(TA, base, experts, tmp_path / "out")
    assert HEAD in folders.load(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert [note for note in report.notes if note.endswith("the output has tie_word_embeddings false")]


def test_heads_that_only_some_have_are_explained(folders, tmp_path):
    tied, own = model(0, head=False), model(1)
    paths = {name: folders.save(tmp_path / name, tree) for name, tree in {"tied": tied, "own": own}.items()}
    with pytest.raises(ValueError, match="head") as caught:
        plan(TA, paths["tied"], {"own": paths["own"]}, tmp_path / "out")
    assert str(caught.value) == (
        f"expert 'own' has a head of its own (parameter {HEAD!r}), base ties its head to its embeddings: "
        "give base a head too (tie_word_embeddings false, saved again), or train the expert with a tied head"
    )
    with pytest.raises(ValueError, match="head") as caught:
        plan(TA, paths["own"], {"tied": paths["tied"]}, tmp_path / "out")
    assert str(caught.value) == (
        f"expert 'tied' has no parameter {HEAD!r}, its head is tied to its embeddings or was not saved; base has a "
        "head of its own: untie the expert's head (tie_word_embeddings false, saved again), or pass `partial=True` if "
        "it was not saved, which takes base's"
    )
    headless = folders.save(tmp_path / "headless", {path.removeprefix("model."): leaf for path, leaf in tied.items()})
    with pytest.raises(
        ValueError, match=r"names in base start with 'model\.': .* pass `partial=True`, which takes"
    ) as caught:
        plan(TA, paths["own"], {"headless": headless}, tmp_path / "out")
    assert "into=" not in str(caught.value)
    for name, given in (("tied", paths["tied"]), ("headless", headless)):  # base's, as every parameter that it lacks
        report = merge_folders(TA, paths["own"], {name: given}, tmp_path / f"{name}-out", partial=True)
        assert f"expert {name!r} lacks lm_head: it has base's" in report.notes
        expected = folders.in_memory(TA, own, {name: tied | {HEAD: own[HEAD]}})
        folders.assert_same_bits(folders.load(tmp_path / f"{name}-out"), expected)
    copy = folders.save(tmp_path / "copy", tie(model(2)))  # with an expert whose configuration says nothing, as GPT-2's
    merge_folders(TA, copy, {"tied": paths["tied"]}, tmp_path / "copy-out", partial=True)
    expected = folders.in_memory(TA, tie(model(2)), {"tied": tie(tied)})
    folders.assert_same_bits(folders.load(tmp_path / "copy-out"), expected)
    (paths["tied"] / "config.json").write_text('{"tie_word_embeddings": true}')
    for partial in False, True:
        with pytest.raises(
            ValueError, match=r"is tied to its embeddings; .* \(tie_word_embeddings false, saved again\)$"
        ):
            plan(TA, paths["own"], {"tied": paths["tied"]}, tmp_path / "out", partial=partial)
    scored = folders.save(tmp_path / "scored", tied | {"score.weight": torch.ones(1, 5, dtype=torch.bfloat16)})
    for base, expert in ((paths["own"], scored), (scored, paths["own"])):
        with pytest.raises(ValueError, match=r"parameter 'score\.weight'") as caught:
            plan(TA, base, {"x": expert}, tmp_path / "out")
        assert "tied" not in str(caught.value), "a score in place of a head"


def tokenizer(vocabulary, added=()):
    added = [{"id": i, "content": token} for token, i in added]
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added})


def test_tokenizers_that_number_tokens_otherwise_are_told(folders, tmp_path):
    names = ["same", "spaced", "renumbered", "longer", "shorter", "none", "pieces", "opaque"]
    base, experts = folders.save_family(tmp_path, model(0), {name: model(i) for i, name in enumerate(names)})
    (base / "tokenizer.json").write_text(tokenizer({"a": 0, "b": 1}))
    (base / "tokenizer.model").write_bytes(b"1")
    texts = {
        "same": tokenizer({"a": 0, "b": 1}),
        "spaced": tokenizer({"b": 1, "a": 0}) + "\n",
        "renumbered": tokenizer({"a": 1, "b": 0}),
        "longer": tokenizer({"a": 0, "b": 1}, [("<pad>", 2)]),
        "shorter": tokenizer({"a": 0}),
        "pieces": tokenizer([["a", -1.0], ["b", -2.0]]),
    }
    for name, text in texts.items():
        (experts[name] / "tokenizer.json").write_text(text)
    (experts["opaque"] / "tokenizer.model").write_bytes(b"2")
    expected = (
        "expert 'renumbered' numbers 2 tokens differently from base, e.g. 'a' (0 in base, 1 there): "
        "the merged model has base's tokenizer",
        "expert 'longer' has 1 token that base lacks, e.g. '<pad>' (2 there): the merged model has base's tokenizer",
        "expert 'shorter' lacks 1 token of base, e.g. 'b' (1 in base): the merged model has base's tokenizer",
        "expert 'opaque' has another tokenizer.model than base: its tokens may be numbered differently",
    )
    assert plan(TA, base, experts, tmp_path / "out").notes == expected
    assert merge_folders(TA, base, experts, tmp_path / "out").notes == expected


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("model.up.weight", torch.zeros(7, 5, dtype=torch.int8)),
        ("model.up.weight", torch.zeros(18, 1, dtype=torch.uint8)),
        ("model.up.weight", torch.zeros(7, 1, dtype=torch.uint32)),  # of MLX
        ("model.up.weight.absmax", torch.zeros(2)),
        ("model.up.weight.quant_state.bitsandbytes__nf4", torch.zeros(2, dtype=torch.uint8)),
        ("model.up.qweight", torch.zeros(2, dtype=torch.int32)),
        ("model.up.weight_scale", torch.zeros(1)),
        ("model.experts.down_proj_blocks", torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_packed_weights_are_refused(leaf, value, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1) | {leaf: value}})
    with pytest.raises(ValueError, match=rf"^expert 'x': .* is quantised \(it holds parameter '{leaf}', \w+\): merge"):
        plan(TA, base, experts, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.gguf", "is a GGUF file (model.gguf), whose weights are quantised: merge the original checkpoint"),
        ("model.ckpt", "model.ckpt holds pickled weights that cannot be read safely"),
        ("model.keras", "is a file of Keras (model.keras), which is not read: save the model by PyTorch"),
        ("scaler.pt", "is a file of a checkpoint: give its folder"),
        ("optimizer.pt", "is a file of a checkpoint: give its folder"),
        ("pytorch_model.bin", "is a file of a checkpoint: give its folder"),
        ("model.safetensors", "is a file of a checkpoint: give its folder"),
        ("model-00001-of-00002.safetensors", "is a file of a checkpoint: give its folder"),
        ("adapter_model.safetensors", "is the file of an adapter: give its folder"),
    ],
)
def test_a_file_in_place_of_a_folder(file, words, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1)})
    (experts["x"] / file).touch()
    (experts["x"] / "config.json").touch()
    with pytest.raises(ValueError, match="expert 'x'") as caught:
        plan(TA, base, {"x": experts["x"] / file}, tmp_path / "out")
    assert words in str(caught.value)


def test_a_state_dict_in_one_file(folders, tmp_path):
    """As base it gives one file too, which is an input again; files and folders mix; factors are refused."""
    base, experts = model(0), {"x": model(1), "y": model(2)}
    for name, tree in {"base": base, **experts}.items():
        save_file(tree, tmp_path / f"{name}.safetensors")
    inputs = {"x": tmp_path / "x.safetensors", "y": folders.save(tmp_path / "y", experts["y"], shards=2)}
    merge_folders(TA, tmp_path / "base.safetensors", inputs, tmp_path / "out", shard_size=100)
    folders.assert_same_bits(load_file(tmp_path / "out/model.safetensors"), folders.in_memory(TA, base, experts))
    again = plan(TA, tmp_path / "out/model.safetensors", {"x": tmp_path / "out", **inputs}, tmp_path / "again")
    assert again.shards == ("model.safetensors",)
    torch.save({"a.lora_down.weight": torch.zeros(2)}, tmp_path / "l.ckpt")
    told = r"expert 'l': .* holds factors of an adapter \('a\.lora_down\.weight'\), not weights: give it as an expert"
    with pytest.raises(ValueError, match=told):
        plan(TA, tmp_path / "base.safetensors", {"l": tmp_path / "l.ckpt"}, tmp_path / "no")
    positions = {"text.position_ids": torch.arange(8)[None]}
    save_file(base | positions, tmp_path / "positions.safetensors")
    save_file(experts["x"] | {"text.position_ids": torch.arange(8.0)[None]}, tmp_path / "floats.safetensors")
    merge_folders(TA, tmp_path / "positions.safetensors", {"f": tmp_path / "floats.safetensors"}, tmp_path / "cast")
    folders.assert_same_bits(
        load_file(tmp_path / "cast/model.safetensors"), folders.in_memory(TA, base, {"x": experts["x"]}) | positions
    )
    save_file(base | {f"model_ema.{i}": torch.zeros(2) for i in range(9)}, tmp_path / "ema.safetensors")
    with pytest.raises(ValueError, match=r"model_ema\.\* are averages over training, of no use after it: remove them"):
        plan(TA, tmp_path / "ema.safetensors", {"x": tmp_path / "x.safetensors"}, tmp_path / "no")
    with pytest.raises(ValueError, match=r"expert 'l': of/mine\.safetensors is not a file$"):  # no name on the hub
        plan(TA, tmp_path / "base.safetensors", {"l": "of/mine.safetensors"}, tmp_path / "no")


def test_another_ending_and_names_of_wrapped_modules(folders, tmp_path):
    """Of torch.compile and of torch's checkpoint_wrapper around blocks, or around the whole model."""
    base, experts = model(0), {"x": model(1), "y": model(2)}
    parts = {"model.": "model._orig_mod.", "lm_head.": "lm_head._checkpoint_wrapped_module._orig_mod."}
    named = {path: path.replace(old, new) for old, new in parts.items() for path in base if path.startswith(old)}
    save_file({named[path]: leaf for path, leaf in experts["x"].items()}, tmp_path / "x.sft")
    whole = folders.save(tmp_path / "y", {f"_orig_mod.{path}": leaf for path, leaf in experts["y"].items()}, shards=2)
    save_file({f"_orig_mod.{path}": leaf for path, leaf in base.items()}, tmp_path / "base.sft")
    merge_folders(TA, tmp_path / "base.sft", {"x": tmp_path / "x.sft", "y": whole}, tmp_path / "out")
    folders.assert_same_bits(load_file(tmp_path / "out/model.safetensors"), folders.in_memory(TA, base, experts))
    (tmp_path / "alone").mkdir()
    save_file(
        {EMBED: base[EMBED], EMBED.replace("model", "model._orig_mod"): base[EMBED] + 1}, tmp_path / "alone/a.sft"
    )
    for given, told in (
        (
            tmp_path / "alone/a.sft",
            r"holds 'model\..*weight' and 'model\..*weight', one parameter without its wrapper: save one$",
        ),
        (tmp_path / "alone", r"holds weights under the name a\.sft: give this file$"),
        ("of/mine.sft", r"of/mine\.sft is not a file$"),
    ):
        with pytest.raises(ValueError, match=told):
            plan(TA, tmp_path / "base.sft", {"x": given}, tmp_path / "no")


def pickled(folder, *, shards=1, legacy=False):
    """The weights of a folder as torch.save writes them."""
    files = sorted(folder.glob("model*.safetensors*"))
    leaves = {path: leaf for file in files if file.suffix == ".safetensors" for path, leaf in load_file(file).items()}
    for file in files:
        file.unlink()
    names = (
        [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    )
    placed = {path: names[i % shards] for i, path in enumerate(leaves)}
    for name in names:
        own = {path: leaf for path, leaf in leaves.items() if placed[path] == name}
        torch.save(own, folder / name, _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


class Own(torch.Tensor):
    """As DTensor's, a class that may be loaded once it is known."""

    def __new__(cls, leaf):
        return leaf.as_subclass(cls)


@pytest.mark.parametrize(
    ("leaf", "told"),
    [
        (torch.eye(2).to_sparse(), "holds 'w', a tensor that is sparse"),
        (torch.empty(2, device="meta"), "holds 'w', a tensor that is sparse, nested, without values"),
        (None, "holds a dict of 1, not pickled weights by name"),
        (Own(torch.ones(2)), "holds 'w', a tensor that is sparse, nested, without values .* or of a class of its own"),
        (5, r"holds 'w' \(int\) among its tensors: save the state dict without them"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[sS]parse.*invariant")  # torch 2.12, 2.15
def test_pickled_tensors_that_are_not_plain_are_refused(leaf, told, folders, tmp_path):
    base = folders.save(tmp_path / "base", model(0))
    torch.save(
        {1: torch.ones(2)} if leaf is None else {"w": leaf, "x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "x.pt"
    )
    with safe_globals([Own]), pytest.raises(ValueError, match=told):
        plan(TA, base, {"x": tmp_path / "x.pt"}, tmp_path / "out")


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_are_read_without_their_code(shards, folders, tmp_path):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1), "y": model(2)})
    merge_folders(TA, base, experts, tmp_path / "safe")
    for folder in (base, experts["x"]):
        pickled(folder, shards=shards)
    merge_folders(TA, base, experts, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.load(tmp_path / "safe"))
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_pickled_weights_in_one_file(folders, tmp_path):
    for name, seed, ending in (("base", 0, "pt"), ("x", 1, "pth"), ("y", 2, "bin")):
        torch.save(model(seed), tmp_path / f"{name}.{ending}")
        folders.save(tmp_path / name, model(seed))
    merge_folders(TA, tmp_path / "base", {n: tmp_path / n for n in "xy"}, tmp_path / "safe")
    merge_folders(TA, tmp_path / "base.pt", {"x": tmp_path / "x.pth", "y": tmp_path / "y.bin"}, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.load(tmp_path / "safe"))
    assert [file.name for file in (tmp_path / "out").iterdir() if file.suffix in (".pt", ".pth", ".bin")] == []
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_state_dict_in_the_file_of_a_training_script(folders, tmp_path):
    optimizer = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1}]}
    wrapped = {f"module.{path}": leaf for path, leaf in model(1).items()}
    torch.save({"epoch": 3, "state_dict": wrapped, "optimizer": optimizer}, tmp_path / "x.pth.tar")
    torch.save({"model": model(2), "step": torch.ones(())}, tmp_path / "y.pt")
    torch.save({"epoch": 3, "optimizer": optimizer}, tmp_path / "z.pt")
    base = folders.save(tmp_path / "base", model(0))
    merge_folders(TA, base, {"x": tmp_path / "x.pth.tar", "y": tmp_path / "y.pt"}, tmp_path / "out")
    expected = folders.in_memory(TA, model(0), {"x": model(1), "y": model(2)})
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)
    with pytest.raises(ValueError, match=r"z\.pt holds a dict of 'epoch', 'optimizer', not pickled weights by name"):
        plan(TA, base, {"z": tmp_path / "z.pt"}, tmp_path / "other")


@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit")
def test_a_training_script_may_keep_its_arguments_beside_the_state_dict(folders, tmp_path):
    """As timm's does; other classes are named, without torch's own text and its control characters."""
    args = argparse.Namespace(lr=0.1, names=["a"])
    base = folders.save(tmp_path / "base", model(0))
    torch.save({"state_dict": model(1), "args": args, "epoch": 3}, tmp_path / "x.pth.tar")
    merge_folders(TA, base, {"x": tmp_path / "x.pth.tar"}, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(TA, model(0), {"x": model(1)}))
    torch.save({"state_dict": model(1), "at": PurePosixPath("a")}, tmp_path / "y.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "z.pt")
    told = {
        "y": r"y\.pt holds pickled weights that cannot be read safely \(it holds objects of pathlib.PurePosixPath\): s",
        "z": r"z\.pt is a program of TorchScript: save torch\.jit\.load\('z\.pt'\)\.state_dict\(\) by torch\.save$",
    }
    for name, words in told.items():
        with pytest.raises(ValueError, match=words) as caught:
            plan(TA, base, {name: tmp_path / f"{name}.pt"}, tmp_path / "no")
        assert "\x1b" not in str(caught.value)


def test_statistics_beside_a_model_are_not_a_second_one(folders, tmp_path):
    base = folders.save(tmp_path / "base", model(0))
    others = {"fisher": model(2), "grads": model(3), "norm": {next(iter(model(0))): torch.ones(1)}}
    torch.save({"state_dict": model(1), **others}, tmp_path / "x.pt")
    merge_folders(TA, base, {"x": tmp_path / "x.pt"}, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(TA, model(0), {"x": model(1)}))


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"student": model(2), "step": 3}, r"holds several sets of weights, 'ema', 'student': save"),
        ({"student": {f"module.{path}": leaf for path, leaf in model(2).items()}}, "holds several sets of weights"),
        ({"criterion": {"proxies": torch.ones(2, 2)}}, None),
    ],
)
def test_a_second_model_under_a_name_of_its_own_is_not_passed_over(beside, told, folders, tmp_path):
    base = folders.save(tmp_path / "base", model(0))
    torch.save({"ema": model(1), **beside}, tmp_path / "x.pt")
    if told is None:
        merge_folders(TA, base, {"x": tmp_path / "x.pt"}, tmp_path / "out")
        folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(TA, model(0), {"x": model(1)}))
    else:
        with pytest.raises(ValueError, match=told):
            plan(TA, base, {"x": tmp_path / "x.pt"}, tmp_path / "out")


@pytest.fixture
def distributed():
    """A mesh of two ranks that send nothing."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_rank_of_a_sharded_model_is_not_read_as_a_whole(distributed, folders, tmp_path):
    """A DTensor has the shape of the whole; the file of a process that has not imported DTensor needs its class."""
    part = {path: DTensor.from_local(leaf, distributed, [Shard(0)]) for path, leaf in model(1, rows=6).items()}
    torch.save(part, tmp_path / "x.pt")
    torch.save({"w": torch.ones(2), "as": ShardingStrategy.FULL_SHARD}, tmp_path / "y.pt")
    base = folders.save(tmp_path / "base", model(0))
    for name in "xy":
        with pytest.raises(
            ValueError, match=rf"{name}\.pt is a part of a model that FSDP has sharded: write whole .*verl"
        ):
            merge_folders(TA, base, {name: tmp_path / f"{name}.pt"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_a_wrapped_base_stay(folders, tmp_path):
    base = folders.save(tmp_path / "base", {f"module.{path}": leaf for path, leaf in model(0).items()})
    merge_folders(TA, base, {"x": folders.save(tmp_path / "x", model(1))}, tmp_path / "out")
    expected = folders.in_memory(TA, model(0), {"x": model(1)})
    folders.assert_same_bits(
        folders.load(tmp_path / "out"), {f"module.{path}": leaf for path, leaf in expected.items()}
    )


class _Code:
    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


def test_pickles_with_code_and_old_ones_are_refused_by_name(folders, tmp_path, capfd):
    base, experts = folders.save_family(tmp_path, model(0), {"code": model(1), "old": model(2), "nested": model(3)})
    for name, legacy in (("code", False), ("old", True), ("nested", False)):
        pickled(experts[name], legacy=legacy)
    torch.save({"w": _Code()}, experts["code"] / "pytorch_model.bin")
    torch.save({"state_dict": model(3), "state_dict_ema": model(4)}, experts["nested"] / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights") as caught:
        plan(TA, base, experts, tmp_path / "out")
    for name in "code", "old":
        assert f"{experts[name] / 'pytorch_model.bin'} holds pickled weights that cannot be read safely" in str(
            caught.value
        )
    several = "holds several sets of weights, 'state_dict', 'state_dict_ema': save the state dict with safetensors"
    assert several in str(caught.value)
    assert "ran" not in capfd.readouterr().out


def test_hub_names(folders, tmp_path, monkeypatch):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1)})
    asked = []

    def fetch(repo_id, *, revision, allow_patterns, local_files_only=False):
        if local_files_only:  # is it in the cache? all of it
            return str({"owner/base": base, "owner/x": experts["x"]}[repo_id])
        asked.append((repo_id, revision))
        weights = [own for own in set(allow_patterns) - {*BESIDE, *COPIED} if own.endswith((".bin", ".pt", ".pth"))]
        assert not weights
        return str({"owner/base": base, "owner/x": experts["x"]}[repo_id])

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (base / "config.json").write_text("{}")
    merge_folders(TA, "owner/base", {"x": "owner/x@v2"}, tmp_path / "out")
    assert asked == [("owner/base", None), ("owner/x", "v2")]
    expected = folders.in_memory(TA, model(0), {"x": model(1)})
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)
    assert (tmp_path / "out/config.json").exists()


def test_a_hub_that_gives_nothing_is_one_sentence(folders, tmp_path, monkeypatch):
    base, _ = folders.save_family(tmp_path, model(0), {})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="hub") as caught:
        plan(TA, base, {"x": "owner/nothing", "y": tmp_path / "no" / "folder"}, tmp_path / "out")
    first, second = str(caught.value).split("; ")
    assert first.startswith(
        "expert 'x': there is no folder owner/nothing, and the hub did not give a repository of this"
    )
    assert first.endswith("give a folder, or fetch it first with hf download")
    assert "\n" not in first
    assert second.startswith("expert 'y': ")


def test_keys_of_masks_are_those_of_names_not_of_paths(folders, tmp_path):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1)})
    options = {"key": random.key(1)}
    merge_folders(CONFIGS[3], base, experts, tmp_path / "a", **options)
    experts["x"].rename(tmp_path / "moved")
    merge_folders(CONFIGS[3], base, {"x": tmp_path / "moved"}, tmp_path / "b", **options)
    folders.assert_same_bits(folders.load(tmp_path / "a"), folders.load(tmp_path / "b"))


def test_extraction_refuses_what_a_merge_refuses(folders, tmp_path):
    base, experts = folders.save_family(tmp_path, model(0), {"x": model(1, rows=13)})
    with pytest.raises(ValueError, match=r"13 rows .*: give it as many first, merge.py wa .* --vocabulary base-rows$"):
        extract_lora(base, experts["x"], tmp_path / "lora", rank=2)
    merge_folders(WeightAverage(), base, experts, tmp_path / "fitted", vocabulary="base-rows")
    expected = {path: leaf[:12] if path in (EMBED, HEAD) else leaf for path, leaf in model(1, rows=13).items()}
    folders.assert_same_bits(folders.load(tmp_path / "fitted"), expected)
    bad = model(1)
    bad["model.up.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter 'model.up.weight' .* NaN or infinite"):
        extract_lora(base, folders.save(tmp_path / "bad", bad), tmp_path / "lora", rank=2)
    assert not list(tmp_path.glob("*lora*"))


def test_buffers_that_are_computed_may_be_missing(folders, tmp_path):
    extra = {
        "model.embeddings.position_ids": torch.arange(8)[None],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4).tril().bool(),
    }
    base, x = model(0), model(1)
    paths = folders.save_family(tmp_path / "base", base | extra, {"x": x})
    merge_folders(TA, *paths, tmp_path / "out")
    expected = folders.in_memory(TA, base, {"x": x})
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected | extra)
    paths = folders.save_family(tmp_path / "expert", base, {"x": x | extra})
    merge_folders(TA, *paths, tmp_path / "out2")
    folders.assert_same_bits(folders.load(tmp_path / "out2"), expected)
    bias = {"h.0.attn.bias": torch.rand(4)}  # a weight of this name
    paths = folders.save_family(tmp_path / "bias", base | bias, {"x": x})
    with pytest.raises(ValueError, match=r"expert 'x' lacks parameter 'h.0.attn.bias' of base"):
        plan(TA, *paths, tmp_path / "out3")
    wrapped = {f"transformer.{path}": leaf for path, leaf in x.items()}
    paths = folders.save_family(tmp_path / "wrapped", base | extra, {"x": wrapped})
    merge_folders(TA, *paths, tmp_path / "out4")
    folders.assert_same_bits(folders.load(tmp_path / "out4"), expected | extra)


@pytest.mark.parametrize("name", ["model.layers.0.rotary_emb.inv_freq", HEAD, "model.layers.0.up.weight"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_index_may_name_what_a_model_does_not_store(name, tied, folders, tmp_path):
    """As torchtune's, which is that of the model that was trained."""
    trees = {"base": model(0, head=False), "x": model(1, head=False)}
    base, expert = (folders.save(tmp_path / key, tree, shards=2) for key, tree in trees.items())
    index = json.loads((expert / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "model-00001-of-00002.safetensors"
    (expert / "model.safetensors.index.json").write_text(json.dumps(index))
    (expert / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if name.endswith("inv_freq") or (name == HEAD and tied):
        merge_folders(TA, base, {"x": expert}, tmp_path / "out")
        folders.assert_same_bits(
            folders.load(tmp_path / "out"), folders.in_memory(TA, trees["base"], {"x": trees["x"]})
        )
    else:
        with pytest.raises(
            ValueError, match=f"lacks parameter '{name}' that the index places there: download it again"
        ):
            plan(TA, base, {"x": expert}, tmp_path / "out")


@pytest.mark.parametrize("prefix", ["module.", "model.", "net._orig_mod.", "_forward_module.", "base_model.model."])
@pytest.mark.parametrize("partial", [False, True])
def test_one_prefix_before_all_names_is_removed_and_that_of_base_added(prefix, partial, folders, tmp_path):
    """As Lightning saves a model in a field of its module."""
    trees = {"base": model(0), "x": model(1)}
    for name, tree in trees.items():
        folders.save(tmp_path / name, tree)
        folders.save(tmp_path / f"{name}-in", {prefix + path: leaf for path, leaf in tree.items()})
    kept = prefix.removesuffix("_orig_mod.") if prefix != "_forward_module." else ""
    wanted = folders.in_memory(TA, trees["base"], {"x": trees["x"]})
    for base, expert, own in (("base", "x-in", ""), ("base-in", "x", kept)):
        merge_folders(TA, tmp_path / base, {"x": tmp_path / expert}, tmp_path / f"{base}-out", partial=partial)
        merged = folders.load(tmp_path / f"{base}-out")
        folders.assert_same_bits(merged, {own + path: leaf for path, leaf in wanted.items()})


def test_a_model_with_an_adapter_in_its_layers_is_told_to_merge_it_first(folders, tmp_path):
    """The state dict of a PEFT model, with PEFT's prefix before all names; its base layers are not heads."""
    names = {path: f"base_model.model.{path.replace('down.', 'down.base_layer.')}" for path in LAYERS}
    wrapped = {name: LAYERS[path] for path, name in names.items()}
    paths = folders.save_family(tmp_path, LAYERS, {"x": wrapped})
    for options in {}, {"heads": "keep"}:
        with pytest.raises(ValueError, match=r"\*\.base_layer\.\* are layers in which an adapter is loaded") as caught:
            plan(TA, *paths, tmp_path / "out", **options)
        assert "heads=" not in str(caught.value)


@pytest.mark.parametrize("heads", ["error", "keep"])
@pytest.mark.parametrize("whose", ["base", "expert"])
def test_weight_norms_have_bases_names(whose, heads, folders, tmp_path):
    def saved(seed, old):
        names = (".weight_g", ".weight_v") if old else tuple(f".parametrizations.weight.original{i}" for i in range(2))
        leaves = model(seed)
        factors = {"pos.conv" + names[0]: leaves[HEAD][:1], "pos.conv" + names[1]: leaves[HEAD]}
        layer = {f"layers.{i}.{name}.weight": leaves[EMBED] for i in range(2) for name in ("up", "down")}
        return {path: leaf.clone() for path, leaf in (factors | layer).items()}

    base, x = saved(0, whose == "base"), saved(1, whose == "expert")
    expected = folders.in_memory(TA, base, {"x": dict(zip(base, x.values(), strict=True))})
    if heads == "keep":
        x = {f"hubert.{path}": leaf for path, leaf in x.items()} | {"lm_head.weight": model(1)[HEAD]}
    merge_folders(TA, *folders.save_family(tmp_path, base, {"x": x}), tmp_path / "out", heads=heads)
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)
    if heads == "keep":
        assert load_file(tmp_path / "out/heads/x.safetensors").keys() == {"lm_head.weight"}


@pytest.mark.parametrize("name", ["mtp.layers.0.up.weight", "model.layers.2.up.weight"])
def test_layers_that_predict_ahead_may_be_missing(name, folders, tmp_path):
    """Trainers of transformers write experts without them: they are base's, and other missing layers an error."""
    ahead = {name: torch.randn(3, 2), f"{name.removesuffix('up.weight')}norm.weight": torch.ones(2)}
    start, x = ({f"model.layers.{i}.up.weight": torch.randn(3, 2) for i in range(2)} for _ in range(2))
    base, experts = folders.save_family(tmp_path, start | ahead, {"x": x, "y": x | ahead})
    config = {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}}
    (base / "config.json").write_text(json.dumps(config))
    report = merge_folders(TA, base, experts, tmp_path / "out")
    assert report.notes == (
        f"expert 'x' lacks layers that predict further tokens ({name!r} and 1 more): base's are used",
    )
    expected = folders.in_memory(TA, start, {"x": x, "y": clone(x)}) | ahead
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)
    for rest in ({**x, name: ahead[name]}, {"model.layers.0.up.weight": x["model.layers.0.up.weight"]}):
        part = folders.save(tmp_path / f"part{len(rest)}", rest)
        with pytest.raises(ValueError, match="expert 'z' lacks parameter"):
            plan(TA, base, {"z": part}, tmp_path / "none")


LAYERS = {f"layers.{i}.{name}.weight": torch.ones(2, 2) for i in range(2) for name in ("up", "down")}
COPIES = {
    **dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD), "shared.weight"),
    **dict.fromkeys(("proj_out.weight", "cls.predictions.decoder.weight"), "shared.weight"),
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


@pytest.mark.parametrize("config", [TA, WeightAverage()], ids=lambda config: config.name)
def test_copies_of_shared_embeddings_may_be_missing(config, folders, tmp_path):
    shapes = {"shared.weight": (6, 4), "encoder.up.weight": (4, 4), "cls.predictions.bias": (6,)}
    trees = [{path: torch.randn(shape) for path, shape in shapes.items()} for _ in range(3)]
    base, x, y = trees
    many = [tree | {path: tree[of].clone() for path, of in COPIES.items()} for tree in trees]
    wanted = folders.in_memory(config, base, {"x": x, "y": y})
    paths = folders.save_family(tmp_path / "few", base, {"x": many[1], "y": y})
    merge_folders(config, *paths, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), wanted)
    paths = folders.save_family(tmp_path / "many", many[0], {"x": x, "y": many[2]})
    merge_folders(config, *paths, tmp_path / "out2")
    copies = {path: wanted[of] for path, of in COPIES.items()}
    folders.assert_same_bits(folders.load(tmp_path / "out2"), wanted | copies)
    for path in COPIES.keys() - {HEAD}:  # no copy
        own = x | {path: torch.randn_like(x[COPIES[path]])}
        paths = folders.save_family(tmp_path / path, base, {"x": own})
        with pytest.raises(ValueError, match=rf"has parameter '{path}' that base lacks"):
            plan(config, *paths, tmp_path / "out3")


def test_leaves_that_differ_come_with_a_way_out(folders, tmp_path):
    base = {"model.layers.0.up.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    paths = folders.save_family(tmp_path, base, {"head": base | {"classifier.weight": torch.ones(3, 2)}})
    with pytest.raises(ValueError, match="outside the layers: if they are heads, pass `heads='keep'`"):
        plan(TA, *paths, tmp_path / "out")
    wide = base | {"norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match="outside the layers: if they are heads, pass `heads='keep'`"):
        plan(TA, paths[0], {"head": folders.save(tmp_path / "wide", wide)}, tmp_path / "out")
    wrapped = {"model.layers.0.up.base_layer.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"\*\.base_layer\.\* are layers in which an adapter is loaded: save"):
        plan(TA, paths[0], {"lora": folders.save(tmp_path / "lora", wrapped)}, tmp_path / "out")
    numbered = {"classifier.1.weight": torch.ones(3, 2)}  # of ResNet, in an nn.Sequential
    other = {"other": folders.save(tmp_path / "other", base | {"classifier.1.weight": torch.zeros(5, 2)})}
    merge_folders(TA, folders.save(tmp_path / "resnet", base | numbered), other, tmp_path / "kept", heads="keep")
    assert (tmp_path / "kept/heads/other.safetensors").is_file()
    folders.assert_same_bits(folders.load(tmp_path / "kept"), base | numbered)
    same = {"same": folders.save(tmp_path / "same", base | {"classifier.1.weight": torch.zeros(3, 2)})}
    with pytest.raises(ValueError, match="`heads='keep'` keeps nothing: all parameters of the experts are base's"):
        plan(TA, tmp_path / "resnet", same, tmp_path / "out", heads="keep")
    wide |= {"model.layers.0.up.weight": torch.ones(3, 3)}
    with pytest.raises(ValueError, match="has shape") as caught:
        plan(TA, paths[0], {"size": folders.save(tmp_path / "size", wide)}, tmp_path / "out")
    assert "heads keep" not in str(caught.value)
    seeing = folders.save(tmp_path / "seeing", base | {"visual.blocks.0.up.weight": torch.ones(2, 2)})
    part = {"part": folders.save(tmp_path / "part", {path: leaf + 1 for path, leaf in base.items()})}
    with pytest.raises(ValueError, match=r"'part' lacks visual as a whole: .* for other parts pass `partial=True`"):
        plan(TA, seeing, part, tmp_path / "out")
    merge_folders(TA, seeing, part, tmp_path / "seen", partial=True)
    assert folders.load(tmp_path / "seen")["norm.weight"].eq(1.5).all()
    old = {path.replace("up.weight", "up.gamma"): leaf for path, leaf in base.items()}
    with pytest.raises(ValueError, match=r"inside the layers: .* by one version of transformers"):
        plan(TA, paths[0], {"old": folders.save(tmp_path / "old", old)}, tmp_path / "out")
