"""Adapters into one adapter, on disk: what peft makes of it is what peft makes of them; the rest is refused by name."""

import copy
import json
import shutil
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from smat_fn import lora, merge, random
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_adapters, merge_folders
from smat_fn.scripts.merge.subcommands.adapters import by_module

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHARES = {"x": 0.7, "y": -0.4}


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(9, 6), nn.ModuleList([Inner(), Inner()]), nn.Linear(6, 4)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.up, self.conv = nn.Linear(6, 6), nn.Linear(6, 8), Conv1D(5, 6)


@pytest.fixture
def saved(tmp_path):
    """``saved(name, **options)`` writes a random adapter of Toy, as peft does."""

    def save(name, seed, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Conv1D and of embeddings, which peft sets right
            model = peft.get_peft_model(Toy(), peft.LoraConfig(**{"target_modules": ["q", "up"]} | options))
            generator = torch.Generator().manual_seed(seed)
            for path, leaf in model.named_parameters():
                if "lora_" in path:
                    leaf.data.copy_(torch.randn(leaf.shape, generator=generator))
            model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def by_peft(folders, method, **options):
    """The weights of Toy with peft's own merge of the adapters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, place), *rest = folders.items()
        model = peft.PeftModel.from_pretrained(Toy(), place, adapter_name=first)
        for name, path in rest:
            model.load_adapter(path, name)
        shares = [SHARES[name] for name in folders]
        model.add_weighted_adapter(list(folders), shares, "m", combination_type=method, **options)
        model.set_adapter("m")
        return model.merge_and_unload().state_dict()


def loaded(folder):
    """The weights of Toy with an adapter, by peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # missing and unknown keys, options that do not fit
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*|.*save_embedding_layers.*")
        return peft.PeftModel.from_pretrained(Toy(), folder).merge_and_unload().state_dict()


def close(left, right):
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        torch.testing.assert_close(leaf, right[path], rtol=1e-5, atol=2e-5, msg=path)
    assert not torch.equal(left["block.0.q.weight"], Toy().state_dict()["block.0.q.weight"])


def combined(folders, out, method, **options):
    how = {"weights": SHARES, "key": merge_key(), "rank": None} | options
    return merge_adapters(folders, out, lambda found: by_module(found, method=method, **how))


def merge_key():
    return random.key(0)


@pytest.mark.parametrize(
    "method", ["linear", "cat", "svd", "ties", "magnitude_prune", "ties_svd", "magnitude_prune_svd"]
)
def test_peft_loads_what_it_would_make_itself(method, saved, tmp_path):
    options = {} if method in ("linear", "cat", "svd") else {"density": 0.6}
    folders = {"x": saved("x", 1, r=3, lora_alpha=6), "y": saved("y", 2, r=3, lora_alpha=2)}
    made = combined(folders, tmp_path / "out", method, **options)
    assert made.partial == ()
    assert made.rank == (6 if method == "cat" else 3)
    close(loaded(tmp_path / "out"), by_peft(folders, method, **options))


@pytest.mark.parametrize("method", ["cat", "svd"])
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 3, "use_rslora": True},
        {"r": 2, "rank_pattern": {"0.q": 4}, "alpha_pattern": {"up": 9}},
        {"r": 2, "target_modules": ["q", "conv", "embed"]},
        {"r": 5, "target_modules": r"block\.1\..*"},
    ],
    ids=["rslora", "patterns", "embeddings and Conv1D", "an expression"],
)
def test_scales_ranks_and_modules_of_each_adapter_are_its_own(method, options, saved, tmp_path):
    folders = {"x": saved("x", 1, r=3, lora_alpha=6), "y": saved("y", 2, **options)}
    made = combined(folders, tmp_path / "out", method, rank=None if method == "cat" else 6)
    dense = {path: leaf.clone() for path, leaf in Toy().state_dict().items()}
    for name, folder in folders.items():
        for path, leaf in loaded(folder).items():
            dense[path] += SHARES[name] * (leaf - Toy().state_dict()[path])
    close(loaded(tmp_path / "out"), dense)
    assert bool(made.partial) == ("target_modules" in options)


def test_peft_scales_a_merge_of_rank_stabilised_adapters_wrongly(saved, tmp_path):
    """peft keeps use_rslora and sets lora_alpha to the rank, so that its sum is √r times too large."""
    folders = {name: saved(name, seed, r=4, lora_alpha=4, use_rslora=True) for name, seed in (("x", 1), ("y", 2))}
    merge_adapters({"x": folders["x"]}, tmp_path / "alone", lambda found: found["x"])  # of scale 2, stored with 1
    close(loaded(tmp_path / "alone"), loaded(folders["x"]))
    combined(folders, tmp_path / "out", "svd")
    ours, theirs, base = loaded(tmp_path / "out"), by_peft(folders, "svd"), Toy().state_dict()
    for path in ("block.0.q.weight", "block.1.up.weight"):
        torch.testing.assert_close(2 * (ours[path] - base[path]), theirs[path] - base[path], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("space", [merge.knots, merge.core_space])
def test_knots_and_core_space_on_disk(space, saved, tmp_path):
    folders = {"x": saved("x", 1, r=3, lora_alpha=6), "y": saved("y", 2, r=2, target_modules=["q", "conv"])}
    made = merge_adapters(folders, tmp_path / "out", lambda found: space(found, TaskArithmetic(), coef=0.5))
    base = Toy().state_dict()
    dense = {path: leaf + sum(0.5 * (loaded(f)[path] - leaf) for f in folders.values()) for path, leaf in base.items()}
    close(loaded(tmp_path / "out"), dense)
    assert set(made.modules) == {f"block.{i}.{k}" for i in (0, 1) for k in ("q", "up", "conv")}
    assert made.rank == 5
    # as in llama.cpp, whose scale of a module is lora_alpha divided by the rank of its tensors
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    halves = load_file(tmp_path / "out" / WEIGHTS)
    scales = {config["lora_alpha"] / half.shape[1] for path, half in halves.items() if "lora_B" in path}
    assert (scales, config["rank_pattern"], config["alpha_pattern"]) == ({1.0}, {}, {})


def test_the_result_is_an_expert_of_merge_folders_and_keeps_its_dtype(saved, folders, tmp_path):
    places = {name: saved(name, seed, r=2) for name, seed in (("x", 1), ("y", 2))}
    for place in places.values():
        halves = {path: leaf.bfloat16() for path, leaf in load_file(place / WEIGHTS).items()}
        save_file(halves, place / WEIGHTS)
    made = combined(places, tmp_path / "out", "cat")
    leaves = load_file(tmp_path / "out" / WEIGHTS)
    assert {leaf.dtype for leaf in leaves.values()} == {torch.bfloat16}
    assert made.bytes == sum(leaf.nbytes for leaf in leaves.values())

    def linear(leaves):  # beside a Conv1D nothing shows how the square q is stored: base has no configuration
        return {path: leaf for path, leaf in leaves.items() if "conv" not in path}

    base = folders.save(tmp_path / "base", linear(Toy().state_dict()))
    merge_folders(TaskArithmetic(coef=1.0), base, {"x": tmp_path / "out"}, tmp_path / "whole")
    close(folders.load(tmp_path / "whole"), linear(loaded(tmp_path / "out")))


def test_adapters_of_an_attention_that_train_py_writes(tmp_path):
    module = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1))
    base = {path: leaf.detach() for path, leaf in module.named_parameters()}
    paths, _ = lora.linear_paths(module)
    places = {}
    for name in "xy":
        found = lora.Lora(paths, rank=2, alpha=3.0)
        leaves = {p: torch.randn(leaf.shape) for p, leaf in lora.init(merge_key(), base, found).items()}
        places[name] = tmp_path / name
        lora.save_peft(places[name], leaves, found, base="toy")
    combined(places, tmp_path / "out", "cat")
    expected = {
        path: leaf + sum(SHARES[n] * (lora.load_expert(place, base)[0][path] - leaf) for n, place in places.items())
        for path, leaf in base.items()
    }
    merged = lora.load_expert(tmp_path / "out", base)[0]
    for path, leaf in expected.items():
        torch.testing.assert_close(merged[path], leaf, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["target_parameters"] == ["0.layers.0.self_attn.in_proj_weight"]
    assert [name.rpartition(".")[2] for name in config["target_modules"]] == ["linear1", "linear2"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bias": "lora_only"}, "sets bias to 'lora_only', which is not read here: merge it into its base with peft"),
        ({"use_dora": True}, "sets use_dora to True, which is not read here: merge it into its base with peft"),
        ({"lora_bias": True}, "sets lora_bias to True"),
        (
            {"modules_to_save": ["head"]},
            r"holds '\S+head.(bias|weight)', which is not a factor of a matrix: merge whole",
        ),
    ],
)
def test_what_factors_cannot_hold_is_refused_by_name(options, told, saved, tmp_path):
    folders = {"x": saved("x", 1), "y": saved("y", 2, **options)}
    with pytest.raises(ValueError, match=f"adapter 'y': .*{told}"):
        combined(folders, tmp_path / "out", "svd")
    assert not (tmp_path / "out").exists()


def change(folder, leaves=None, **config):
    """Edit an adapter's files."""
    if leaves is not None:
        save_file(leaves(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    found = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(found | config))


def test_all_problems_of_all_adapters_are_told_at_once(saved, tmp_path):
    names = "bases", "half", "rank", "wide", "conv", "zero", "nan", "broken", "whole"
    places = {name: saved(name, i) for i, name in enumerate(names)}
    q = "base_model.model.block.0.q"
    change(places["bases"], base_model_name_or_path="another", task_type="CAUSAL_LM")
    change(places["half"], lambda found: {k: v for k, v in found.items() if k != f"{q}.lora_A.weight"})
    change(places["rank"], r=5)
    change(places["wide"], lambda found: found | {f"{q}.lora_A.weight": torch.zeros(8, 7)}, task_type="SEQ_CLS")
    change(places["conv"], lambda found: found | {f"{q}.lora_A.weight": torch.zeros(8, 6, 1)})
    change(places["zero"], r=0)
    change(places["nan"], lambda found: found | {f"{q}.lora_A.weight": torch.full((8, 6), torch.nan)}, revision="v2")
    (places["broken"] / WEIGHTS).write_bytes(b"none")
    shutil.rmtree(places["whole"])
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists: choose another folder") as caught:
        combined(places, tmp_path / "out", "svd")
    for part in (
        "adapter 'half': 'base_model.model.block.0.q.lora_B.weight' has no other factor",
        "adapter 'rank': 'block.0.q' has rank 8, its adapter_config.json says 5",
        "adapter 'conv': A (8, 6, 1) and B (6, 8) of 'block.0.q' are not factors of a matrix",
        "adapter 'zero': 'block.0.q' has rank 0 in its adapter_config.json, must be above 0",
        "adapter 'nan': the factors of 'block.0.q' hold values that are NaN or infinite",
        "adapter 'broken':",
        "adapter 'whole':",
        "adapters name different bases (bases 'another', wide 'None', nan 'None@v2'): if these are one",
        "adapters differ in task_type (bases 'CAUSAL_LM', wide 'SEQ_CLS')",
        "'block.0.q' is of shape (6, 6) in bases, (6, 7) in wide: they are of different models",
    ):
        assert part in str(caught.value), part


def test_ranks_and_values_that_cannot_be_merged(saved, tmp_path):
    places = {"x": saved("x", 1, r=2), "y": saved("y", 2, r=3)}
    with pytest.raises(ValueError, match=r"'block.0.q': linear adds factors entry by entry, and ranks differ"):
        combined(places, tmp_path / "out", "linear")
    change(places["x"], lambda found: {k: torch.full_like(v, 1e30) for k, v in found.items()})
    with pytest.raises(ValueError, match="the merged factors of block"):
        combined(places, tmp_path / "out", "cat", weights={"x": 1e30})
    with pytest.raises(ValueError, match=r"'block.0.q': the change is not finite: .* weights are too large"):
        combined(places, tmp_path / "out", "ties_svd", density=0.5)
    for place in places.values():  # the sum is a float32 number, and not one of the adapters' dtype
        change(place, lambda found: {k: torch.full_like(v, 6e4, dtype=torch.float16) for k, v in found.items()})
    with pytest.raises(ValueError, match=r"lora_A.weight' exceeds the range of torch.float16"):
        combined(places, tmp_path / "out", "cat", weights={"x": 3.0})
    missing = tmp_path / "nowhere"
    with pytest.raises(
        ValueError, match=f"adapter 'x': {missing} is not a folder: give the folder of a LoRA adapter, or"
    ):
        merge_adapters({"x": missing}, tmp_path / "out", lambda held: held["x"])
    with pytest.raises(ValueError, match="no adapters: give at least one"):
        combined({}, tmp_path / "out", "cat")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".out*")) == []


def test_stored_embeddings_below_factors_go_with_them_and_must_be_equal(saved, tmp_path):
    places = {name: saved(name, i, target_modules=["embed", "head", "q"]) for i, name in enumerate("xy")}
    name, more = "base_model.model.embed.base_layer.weight", Toy().embed.weight.data + 1
    head = {"base_model.model.head.base_layer.weight": Toy().head.weight.data}
    for place in places.values():  # as peft stores those of a transformers model
        change(place, lambda found: found | {name: more} | head)
    combined(places, tmp_path / "out", "svd")
    stored = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(stored[name], more)
    assert head.keys() < stored.keys()
    wrapped = saved("wrapped", 1)
    change(wrapped, lambda found: {path.replace("block.0.", "block.0._orig_mod."): own for path, own in found.items()})
    combined({"x": wrapped}, tmp_path / "unwrapped", "svd")
    assert load_file(tmp_path / "unwrapped" / WEIGHTS).keys() == load_file(saved("plain", 1) / WEIGHTS).keys()
    change(places["x"], ensure_weight_tying=True)
    with pytest.raises(ValueError, match=r"holds '\S+head.base_layer.weight', which is not a factor"):
        combined(places, tmp_path / "again", "svd")
    change(places["x"], ensure_weight_tying=False)
    change(places["y"], lambda found: found | {name: found[name] + 1})
    with pytest.raises(ValueError, match=r"'base_model.model.embed.base_layer.weight' differs between x and y"):
        combined(places, tmp_path / "again", "svd")


def test_a_module_whose_name_ends_another_keeps_its_change(tmp_path):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.fc, self.block = nn.Linear(6, 6), nn.ModuleDict({"fc": nn.Linear(6, 6)})

    model = peft.get_peft_model(
        Ends(), peft.LoraConfig(r=2, lora_alpha=2, target_modules=["fc"], rank_pattern={"block.fc": 3})
    )
    for path, leaf in model.named_parameters():
        leaf.data.normal_() if "lora_" in path else None
    model.save_pretrained(tmp_path / "x")
    made = merge_adapters(
        {"x": tmp_path / "x"},
        tmp_path / "out",
        lambda f: by_module(f, method="cat", weights={}, key=merge_key(), rank=None),
    )
    assert (sorted(made.modules), made.rank) == (["block.fc", "fc"], 3)
    ours = peft.PeftModel.from_pretrained(Ends(), tmp_path / "out").merge_and_unload().state_dict()
    theirs = copy.deepcopy(model).merge_and_unload().state_dict()
    for path, leaf in theirs.items():
        torch.testing.assert_close(ours[path], leaf)


def test_the_first_tokenizer_and_chat_template_are_kept(saved, tmp_path):
    folders = {"w": saved("w", 0), "x": saved("x", 1), "y": saved("y", 2), "z": saved("z", 3)}

    def write(name, end, template, **vocabulary):
        for file, content in {"tokenizer.json": {"model": {"vocab": vocabulary}}, "tokenizer_config.json": end}.items():
            (folders[name] / file).write_text(json.dumps(content))
        (folders[name] / "additional_chat_templates").mkdir()
        (folders[name] / "additional_chat_templates/tool.jinja").write_text(template)
        (folders[name] / "chat_template.jinja").write_text(template)

    write("x", {"eos_token": "</s>"}, "{{ a }}", a=0, b=1)
    write("y", {"eos_token": "</s>"}, "{{ a }}", a=0, b=1)
    (folders["y"] / "additional_chat_templates/rag.jinja").write_text("{{ c }}")
    write("z", {"eos_token": "<end>"}, "{{ b }}", a=1, b=0)
    made = combined(folders, tmp_path / "out", "cat")
    assert made.notes == (
        "adapter 'z' numbers 2 tokens differently from x, e.g. 'a' (0 in x, 1 there): the merged model has x's "
        "tokenizer",
        "adapter 'y' has other named chat templates than x (rag): the merged adapter has x's",
        "adapter 'z' has other special tokens: eos_token '<end>' of its tokenizer, x's is '</s>'",
        "adapter 'z' has another chat template than x: the merged adapter has x's",
        "adapter 'z' has other named chat templates than x (tool): the merged adapter has x's",
    )
    files = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (folders["x"] / file).read_bytes()
    alone = combined({"w": folders["w"]}, tmp_path / "alone", "cat")
    assert (alone.notes, (tmp_path / "alone/tokenizer.json").exists()) == ((), False)
