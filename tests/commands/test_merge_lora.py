"""merge.py with adapters and other vocabularies, and its extract-lora, as a user runs them."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(exits, capsys):
    """``call(*words)``: (what merge.py prints, what it exits with)."""

    def run(*words):
        code = exits("merge.py", *words)
        return capsys.readouterr().out, code

    return run


@pytest.fixture
def model(tmp_path):
    def save(name, seed, rows=10):
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "model.embed_tokens.weight": (rows, 4),
            "model.q.weight": (6, 4),
            "model.q.bias": (6,),
            "norm.weight": (4,),
        }
        (tmp_path / name).mkdir()
        leaves = {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
        return tmp_path / name, leaves

    return save


def test_an_expert_with_the_names_of_train_py_is_told_to_be_exported_first(exits, capsys, model, tmp_path):
    run, (base, _) = tmp_path / "run", model("base", 0)
    checkpoint.save_expert(run / "mirror", {"layers.0.weight": torch.ones(6, 4)}, {"kind": "expert"})
    words = "--base", base, "--expert", run / "mirror", "--out", tmp_path / "lora", "--rank", 2
    code = exits("merge.py", "extract-lora", *words)
    said = f"{code} {capsys.readouterr().err}"
    assert "has the names of train.py" in said
    assert f"merge.py export {run / 'mirror'} --base {base} --out FOLDER" in said


def test_an_adapter_that_was_extracted_is_an_expert(call, model, tmp_path):
    (base, before), (expert, after) = model("base", 0), model("expert", 1)
    inputs = "--base", base, "--expert", expert, "--out", tmp_path / "lora"
    said, code = call("extract-lora", *inputs, "--rank", 4)
    assert code is None
    for line in (
        "2 matrices: relative error ",
        "1 changed parameter stored whole: norm.weight\n",
        "1 changed parameter left out, an adapter cannot hold them: model.q.bias\n",
        "not in the adapter: ",
    ):
        assert line in said
    assert f"extracted: {tmp_path / 'lora'}, rank 4" in said
    assert call("verify", tmp_path / "lora") == (f"4 files have the hashes stored in {tmp_path / 'lora'}\n", None)
    assert call("extract-lora", *inputs, "--rank", 0)[1].startswith(
        "merge.py extract-lora:\n  --rank is 0, must be at least 1\n  "
    )
    words = "ta", "--coef", 1, "--base", base, "--experts", tmp_path / "lora", "--out", tmp_path / "out"
    said, code = call(*words)
    assert code is None
    merged = load_file(tmp_path / "out/ta/model.safetensors")
    for path, leaf in (after | {"model.q.bias": before["model.q.bias"]}).items():
        torch.testing.assert_close(merged[path], leaf, rtol=0, atol=2e-6)
    manifest = json.loads((tmp_path / "out/ta/manifest.json").read_text())
    used = {Path(file).name for file in manifest["inputs"]["expert 'lora'"]}
    assert used == {"adapter_config.json", "adapter_model.safetensors"}
    assert call("verify", tmp_path / "out/ta")[1] is None


def test_factors_alone_are_an_option_whose_loss_is_printed(call, model, tmp_path):
    (base, before), adapters = model("base", 0), []
    for seed in (1, 2):
        (expert, after), out = model(f"expert{seed}", seed), tmp_path / f"lora{seed}"
        adapters.append(out)
        words = "--base", base, "--expert", expert, "--energy", 1 - 1e-9, "--linear-only", "--out", out
        said, code = call("extract-lora", *words)
        assert code is None
        deltas = {path: (leaf - before[path]).double() for path, leaf in after.items()}
        lost = sum(float(deltas[path].square().sum()) for path in ("norm.weight", "model.q.bias"))
        share = math.sqrt(lost / sum(float(delta.square().sum()) for delta in deltas.values()))
        left_out = "2 changed parameters left out, they have no low-rank factors (--linear-only): "
        assert (
            f"{left_out}model.q.bias, norm.weight\nnot in the adapter: {share:.2%} of the norm of expert - base\n"
            in said
        )
        assert f"extracted: {out}, rank 4, " in said
    said, code = call("adapters", "--experts", *adapters, "--method", "cat", "--out", tmp_path / "both")
    assert (said.startswith(f"merged: {tmp_path / 'both'}, 2 modules of rank 8, "), code) == (True, None)
    words = "--energy", 0.5, "--only", "model.*", "--skip", "*.q.*", "--out", tmp_path / "some", "--json"
    facts = json.loads(call("extract-lora", "--base", base, "--expert", expert, *words)[0])
    assert facts["skipped"] == ["model.q.bias", "model.q.weight", "norm.weight"]
    assert 0 < facts["lost"][0] < 1
    assert facts.keys() == {"skipped", "lost", "written"}


def test_an_adapter_that_is_extracted_already_is_kept(call, model, tmp_path):
    (base, _), (expert, leaves), out = model("base", 0), model("expert", 1), tmp_path / "lora"
    again = "extract-lora", "--base", base, "--expert", expert, "--rank", 2, "--skip", "*.q.*", "--out", out
    assert call(*again)[1] is None
    written = (out / "adapter_config.json").stat().st_mtime_ns
    assert call(*again) == (f"kept: {out}: already finished\n", None)
    assert (out / "adapter_config.json").stat().st_mtime_ns == written
    others = ("--rank", 3), ("--energy", 0.5), ("--skip", "*.q.weight"), ("--only", "*"), ("--linear-only",)
    for words in others:
        changed = [*again[:5], "--rank", 2, "--skip", "*.q.*", "--out", out]
        if words[0] in changed:
            changed[changed.index(words[0]) + 1] = words[1]
        else:
            changed += words
        assert "lora exists: choose another folder or pass --overwrite" in call(*changed)[1], words
    shutil.copytree(base, tmp_path / "copy")
    assert (
        "lora exists" in call("extract-lora", "--base", tmp_path / "copy", *again[3:])[1]
    )  # it is named in the adapter
    other, _ = model("other", 2)
    assert "lora exists" in call(*again[:4], other, *again[5:])[1]
    text = (out / "adapter_config.json").read_text()
    (out / "adapter_config.json").write_text(text + " ")
    assert "lora exists" in call(*again)[1]
    (out / "adapter_config.json").write_text(text)
    assert call(*again)[0].startswith("kept: ")
    save_file(leaves | {"norm.weight": leaves["norm.weight"] + 1}, expert / "model.safetensors", {"format": "pt"})
    assert "lora exists" in call(*again)[1]
    assert call(*again, "--overwrite")[1] is None
    assert call(*again)[0].startswith("kept: ")


@pytest.mark.parametrize("command", ["extract-lora", "adapters"])
def test_a_kept_adapter_of_unequal_ranks_is_noted(call, model, tmp_path, command):
    if command == "adapters":
        write_adapter(tmp_path / "x", 0, 2)
        words = "--experts", tmp_path / "x"
    else:
        words = "--base", model("base", 0)[0], "--expert", model("expert", 1)[0], "--rank", 2
    again, out = (command, *words, "--out", tmp_path / "lora"), tmp_path / "lora"
    assert call(*again)[1] is None
    config, manifest = (json.loads((out / name).read_text()) for name in ("adapter_config.json", "manifest.json"))
    text = json.dumps(config | {"rank_pattern": {"model.q": 1}})  # as it was written before ranks were padded
    (out / "adapter_config.json").write_text(text)
    manifest["files"]["adapter_config.json"] = hashlib.sha256(text.encode()).hexdigest()
    (out / "manifest.json").write_text(json.dumps(manifest))
    said = "its modules have unequal ranks, which llama.cpp scales wrongly: pass --overwrite to write it with one rank"
    assert call(*again) == (f"kept: {out}: already finished\nnote: {said}\n", None)
    assert call(*again, "--overwrite")[1] is None
    assert call(*again) == (f"kept: {out}: already finished\n", None)


def test_an_adapter_of_other_layers_is_extracted_again(call, tmp_path):
    for seed, name in enumerate(("base", "other")):
        (tmp_path / name).mkdir()
        torch.manual_seed(seed)
        leaves = {f"model.layers.{i}.q.weight": torch.randn(6, 4) for i in range(3)}
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
    base, other = tmp_path / "base", tmp_path / "other"

    def extract(first):
        expert = f"{base}[0:{first}]+{other}[{first}:3]"
        return call("extract-lora", "--base", base, "--expert", expert, "--rank", 2, "--out", tmp_path / "lora")

    assert extract(1)[1] is None
    assert extract(1)[0].startswith("kept: ")
    assert "lora exists: choose another folder or pass --overwrite" in extract(2)[1]


def test_errors_of_an_extraction_are_listed_at_once_as_options(call, model, tmp_path):
    (base, _), (expert, _) = model("base", 0), model("expert", 1)
    words = "--base", base / "model.safetensors", "--expert", expert, "--out", tmp_path / "lora"
    _, said = call("extract-lora", *words, "--only", "q", "--skip", "*.k.*")
    assert said.splitlines()[:2] == [
        "merge.py extract-lora:",
        "  neither --rank nor --energy is given: give --rank 16, or --energy 0.95, or both",
    ]
    assert f"\n  --base is {base / 'model.safetensors'}, a single file, " in said
    assert (
        "\n  --only q matches no parameter of base: give a glob over names such as model.embed_tokens.weight\n" in said
    )
    assert "\n  --skip '*.k.*' matches no parameter of base" in said
    assert len(said.splitlines()) == 5
    _, said = call("extract-lora", *words, "--rank", 1, "--only", "model.*", "--skip", "*")
    assert "--skip matches every parameter that --only leaves: give narrower globs" in said
    assert not (tmp_path / "lora").exists()


def test_vocabulary_is_an_option(call, model, tmp_path):
    (base, before), (expert, after) = model("base", 0), model("expert", 1, rows=12)
    words = "ta", "--coef", 1, "--base", base, "--experts", expert, "--out", tmp_path / "out"
    assert (
        "expert 'expert' has 12 rows in 'model.embed_tokens.weight', base 10: pass --vocabulary base-rows"
        in call(*words)[1]
    )
    assert call(*words, "--vocabulary", "base-rows")[1] is None
    merged = load_file(tmp_path / "out/ta/model.safetensors")
    start = before["model.embed_tokens.weight"]
    assert torch.equal(merged["model.embed_tokens.weight"], start + (after["model.embed_tokens.weight"][:10] - start))


def write_adapter(folder, seed, rank, **settings):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (rank, 4), "B": (6, rank)}
    leaves = {
        f"base_model.model.model.q.lora_{half}.weight": torch.randn(s, generator=generator)
        for half, s in shapes.items()
    }
    folder.mkdir()
    save_file(leaves, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    a, b = leaves.values()
    return 2 * b @ a


def test_adapters_become_one(call, model, tmp_path):
    base, before = model("base", 0)
    deltas = [write_adapter(tmp_path / name, seed, 2) for seed, name in enumerate(("x", "y"))]
    names = tmp_path / "x", f"{tmp_path / 'y'}@0.5"
    expected = before["model.q.weight"] + deltas[0] + 0.5 * deltas[1]
    for method, *words in (
        ["svd", "--rank", 4],
        ["knots", "--merger", "ta"],
        ["core_space", "--merger", "ta", "--coef", 1],
    ):
        out = tmp_path / method
        said, code = call("adapters", "--experts", *names, "--method", method, *words, "--out", out)
        assert (said, code) == (f"merged: {out}, 1 module of rank 4, 160 bytes\n", None)
        assert (
            call("ta", "--coef", 1, "--base", base, "--experts", out, "--out", tmp_path / f"{method}-whole")[1] is None
        )
        merged = load_file(tmp_path / f"{method}-whole/ta/model.safetensors")
        torch.testing.assert_close(merged["model.q.weight"], expected, rtol=0, atol=1e-5)
    manifest = json.loads((tmp_path / "core_space/manifest.json").read_text())
    assert (manifest["method"], manifest["merger"], manifest["weights"]) == ("core_space", "ta", {"y": 0.5})
    assert (manifest["stored_rank"], manifest["adapters"]) == (4, ["x", "y"])
    card = ModelCard.load(tmp_path / "core_space" / "README.md")
    assert card.data.to_dict() == {"library_name": "peft", "tags": ["merge", "smat_fn", "lora", "core_space"]}
    assert "Method: core_space (merger ta, coef 1.0). Rank 4, scale 1: the change of a matrix is BA." in card.text
    assert "| x | 1 |\n| y | 0.5 |\n" in card.text
    assert f"| adapter_model.safetensors | `{manifest['files']['adapter_model.safetensors']}` |" in card.text
    assert call("verify", tmp_path / "svd") == (
        "6 files have the hashes stored in " + str(tmp_path / "svd") + "\n",
        None,
    )
    assert "exists: choose another folder" in call("adapters", "--experts", *names, "--out", tmp_path / "svd")[1]
    knots = "--method", "knots", "--merger", "ta", "--out", tmp_path / "knots"
    again = "adapters", "--experts", *names, *knots
    written = (tmp_path / "knots/adapter_config.json").stat().st_mtime_ns
    assert call(*again) == (f"kept: {tmp_path / 'knots'}: already finished\n", None)
    assert (tmp_path / "knots/adapter_config.json").stat().st_mtime_ns == written
    swapped = "adapters", "--experts", *reversed(names), *knots
    for other in swapped, (*again, "--coef", 0.5), (*again, "--seed", 1), (*again, "--base", "other"):
        assert "knots exists: choose another folder or pass --overwrite" in call(*other)[1]
    assert call(*again, "--overwrite")[0].startswith("merged: ")
    for changed in tmp_path / "knots/adapter_config.json", tmp_path / "y/adapter_config.json":
        text = changed.read_text()
        changed.write_text(text + " ")
        assert "knots exists: choose another folder" in call(*again)[1]
        changed.write_text(text)
    assert call(*again)[0].startswith("kept: ")
    words = "--method", "ties_svd", "--density", 0.5, "--out", tmp_path / "svd", "--overwrite"
    assert call("adapters", "--experts", *names, *words)[1] is None
    assert json.loads((tmp_path / "svd/manifest.json").read_text())["density"] == 0.5


def test_lora_files_become_one_file(call, tmp_path):
    for seed, name in enumerate(("style", "subject")):
        one = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        two = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed + 9))
        leaves = {"lora_unet_q.lora_down.weight": one, "lora_unet_q.lora_up.weight": two}
        save_file(leaves | {"lora_unet_q.alpha": torch.tensor(1.0)}, tmp_path / f"{name}.safetensors")
    names = tmp_path / "style.safetensors", f"{tmp_path / 'subject.safetensors'}@0.5"
    words = "adapters", "--experts", *names, "--method", "cat", "--out", tmp_path / "out"
    assert call(*words) == (f"merged: {tmp_path / 'out'}, 1 module of rank 4, 164 bytes\n", None)
    assert call(*words) == (f"kept: {tmp_path / 'out'}: already finished\n", None)
    stored = load_file(tmp_path / "out/pytorch_lora_weights.safetensors")
    assert float(stored["lora_unet_q.alpha"]) == 4
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["stored_rank"], manifest["weights"], manifest["tool"]) == (4, {"subject": 0.5}, "diffusers")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.to_dict() == {"library_name": "diffusers", "tags": ["merge", "smat_fn", "lora", "cat"]}
    assert "Rank 4, scale 1: the change of a matrix is BA." in card.text
    assert "Base: that of its adapters. It was not read." in card.text
    assert "| style | 1 |\n| subject | 0.5 |\n" in card.text
    assert call("verify", tmp_path / "out")[1] is None
    assert "out exists: choose another folder or pass --overwrite" in call(*words, "--rank", 3)[1]
    assert "rank 3, 124 bytes" in call(*words, "--rank", 3, "--overwrite")[0]


def test_the_card_of_an_adapter_says_what_was_merged(call, tmp_path):
    for seed, (name, settings) in enumerate({"x": {"base_model_name_or_path": "owner/base"}, "y": {}}.items()):
        write_adapter(tmp_path / name, seed, 2, **settings)
    (tmp_path / "y/README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "x/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "y/chat_template.jinja").write_text("{{ messages[1] }}")
    words = "--experts", tmp_path / "x", f"{tmp_path / 'y'}@-0.5", "--base", "owner/base", "--method", "dare_ties_svd"
    words = *words, "--density", 0.5, "--seed", 3, "--rank", 1, "--out", tmp_path / "out"
    said, code = call("adapters", *words)
    assert said.startswith("note: adapter 'y' has another chat template than x")
    assert code is None
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "base_model": "owner/base",
        "library_name": "peft",
        "tags": ["merge", "smat_fn", "lora", "dare_ties_svd"],
        "base_model_relation": "adapter",
    }
    said = "Method: dare_ties_svd (density 0.5, majority total), random masks from seed 3. Rank 1, scale 1"
    assert said in card.text
    assert "Base: `owner/base`. It was not read." in card.text
    assert "The license of base is not known; adapters name theirs (y mit): check their terms." in card.text
    assert "| x | 1 |\n| y | -0.5 |\n" in card.text
    assert "| chat_template.jinja | `" in card.text
    assert call("verify", tmp_path / "out")[1] is None
    assert call("adapters", *words)[0].startswith("kept: ")
    (tmp_path / "x/chat_template.jinja").write_text("{{ messages[0] }}")
    assert "exists: choose another folder or pass --overwrite" in call("adapters", *words)[1]


def test_random_masks_of_adapters_come_from_the_seed(call, tmp_path):
    for seed, name in enumerate(("x", "y")):
        write_adapter(tmp_path / name, seed, 2)
    names, files = (tmp_path / "x", tmp_path / "y"), []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        words = "--method", "dare_ties", "--density", 0.5, "--seed", seed, "--out", tmp_path / out
        assert call("adapters", "--experts", *names, *words)[1] is None
        files.append((tmp_path / out / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_options_of_adapters_that_make_no_sense(call, tmp_path):
    for seed, name in enumerate(("x", "y")):
        write_adapter(tmp_path / name, seed, 2, use_dora=name == "y")
    names = "--experts", tmp_path / "x", tmp_path / "y", "--out", tmp_path / "out"
    for words, told in (
        (("--method", "ties"), "ties drops entries: give density, the share that stays"),
        (("--method", "svd", "--options", "keep", 1), "--options is for knots and core_space, not for svd"),
        (("--method", "svd", "--coef", 0.5), "--coef is for knots and core_space, not for svd"),
        (("--method", "cat", "--merger", "ta"), "--merger is for knots and core_space, not for cat"),
        (("--method", "svd", "--majority", "frequency"), "--majority is for ties and ties_svd, not for svd"),
        (("--method", "knots", "--merger", "tie"), "--merger is 'tie', did you mean 'ties'? choose one of ta"),
        (("--method", "knots", "--merger", "wa"), "--merger is 'wa', must be one of ta, ties"),
        (("--method", "knots", "--merger", "fisher"), "--merger is 'fisher', must be one of ta, ties"),
        (("--method", "core_space", "--merger", "reg_mean"), "--merger is 'reg_mean'"),
        (("--method", "knots", "--options", "kep", 1), "--options kep is not an option of ties: they are weights, "),
        (("--method", "knots", "--merger", "emr"), "emr needs --options task VALUE"),
        (("--method", "knots", "--density", 0.5), "knots has no density of its own: give it in --options"),
        (("--method", "svd"), "adapter 'y': its adapter_config.json sets use_dora to True"),
    ):
        assert told in call("adapters", *names, *words)[1], words
    assert not (tmp_path / "out").exists()
