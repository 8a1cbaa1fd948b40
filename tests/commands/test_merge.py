"""merge.py on folders in Hugging Face's layout, as a user runs it."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from smat_fn import machine, merge, random
from smat_fn.config import MERGERS, PRESETS, Della, Ties, WeightAverage
from smat_fn.folders import chunk_of, writing
from smat_fn.folders import run as stream
from smat_fn.folders.parts import Part
from smat_fn.scripts import run_folder
from smat_fn.scripts.analyse import pictures
from smat_fn.scripts.commands import merge as command
from smat_fn.scripts.merge import commands, in_memory, on_disk, settings
from smat_fn.scripts.merge.search import outside, snapshots
from smat_fn.scripts.recipes import load as recipes
from smat_fn.scripts.recipes.own import Recipe

from .conftest import assert_effects

ROOT = Path(__file__).parents[2]
KILLED = """
import os, runpy, signal, sys
from smat_fn.folders import run
write, left = run.write_chunk, [15]
def dying(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
run.write_chunk = dying
script, *words = sys.argv[1:]
sys.argv = [script, *words]
runpy.run_path(script, run_name="__main__")
"""


BASE, EXPERTS = Path("base"), [Path("x"), Path("y")]
OF_RUN = {"base": None, "experts": (), "run": Path("run")}
FROM_RUN = {"base": Path("run/base"), "experts": [Path("run/a"), Path("run/b")]}
DRAWN = {"vocabulary": "error", "heads": "error", "tokenizer_from": None, "method": "experts"}
PLOT, DIGITS = Path("p.png"), PRESETS["digits"].mergers
DELLA, OF_LM = DIGITS["della"], {"drop_prob": PRESETS["lm"].mergers["della"].drop_prob}
ORIGINAL = {"merger": Ties(coef=0.3), "semantics": "original"}


def as_given(**options):
    return [({name: value}, {name: value}) for name, value in options.items()]


EITHER_WAY = [
    ({"base": Path("b")}, {"base": Path("b")}),
    ({"experts": (Path("x"),)}, {"experts": [Path("x")]}),
    (OF_RUN, FROM_RUN),
    *as_given(seed=3, out=Path("elsewhere"), overwrite=True),
]
ON_DISK = [
    *EITHER_WAY,
    ({"merger": command.All(0.7)}, {"configs": [
        DIGITS[m.name] if m is WeightAverage else replace(DIGITS[m.name], coef=0.7) for m in MERGERS
    ]}),
    *as_given(
        vocabulary="base-rows", heads="keep", partial=True, into="x", device="cuda", out_dtype="float16", dry_run=True,
        config_from="x", tokenizer_from="union", chat_template="auto", coefs={"*": 0.5},
    ),
    ({"threads": 3}, {"threads": 3, "workers": 3}),
    ({"shard_size": "7MB"}, {"shard_size": 7_000_000}),
    ({"memory_mib": 80}, {"chunk": chunk_of(80 << 20)}),
    ({"part": "1/2"}, {"part": Part(1, 2)}),
    ({"push_to_hub": "me/it"}, {"push": "me/it"}),
    ({"push_to_hub": "me/it", "public": True}, {"push": "me/it", "public": True}),
    ({"plot": PLOT}, {"rows": (BASE, EXPERTS, DRAWN), "picture": (PLOT, [])}),
    ({"heads": "keep", "vocabulary": "base-rows", "tokenizer_from": "union", "plot": PLOT}, {
        **(own := {"heads": "keep", "vocabulary": "base-rows", "tokenizer_from": "union"}),
        "rows": (BASE, EXPERTS, DRAWN | own), "picture": (PLOT, []),
    }),
    ({"preset": "lm"}, {"configs": [replace(DELLA, coef=0.3, **OF_LM)]}),
    ({"lines": (0.2, 1.0)}, {"coefs": (BASE, (0.2, 1.0))}),
    (ORIGINAL, {
        "configs": [Ties(coef=0.3, keep=0.5, aggregate="mean", scope="global")], "semantics": "original",
    }),
]  # fmt: skip
IN_MEMORY = [
    *EITHER_WAY,
    ({"merger": Della(drop_prob=0.4)}, {"configs": [replace(DELLA, drop_prob=0.4)]}),
    *as_given(widen=True, lines=(0.2, 1.0)),
    ({"threads": 3}, {"threads": 3}),
    ({"calibrate": True}, {"calibration": merge.CALIBRATION_COEFS["vision"]}),
    ({"calibrate": True, "search": False}, {"calibration": merge.CALIBRATION_COEFS["vision"], "search": False}),
    ({"grid": (0.1, 0.2)}, {"coefs": (0.1, 0.2)}),
    ({"per_layer": 2}, {"sweeps": 2}),
    ({"trials": 8}, {"trials": 8}),
    ({"trials": 8, "trials_over": ("densities",)}, {"trials": 8, "trials_over": ("densities",)}),
    ({"search_over": ("drop_prob=0.2,0.4", "elect=False")}, {"over": {"drop_prob": (0.2, 0.4), "elect": (False,)}}),
    ({**OF_RUN, "snapshots": True}, {**FROM_RUN, "snapshots": {1: [Path("run"), *FROM_RUN["experts"]]}}),
    ({"preset": "lm"}, {
        "configs": [replace(DELLA, **OF_LM)], "implied": {"name": "trace", **PRESETS["lm"].options},
    }),
    ({"data": "D"}, {"options": {"data": "D"}}),
    ({"suite_options": {"device": "cpu"}}, {"options": {"device": "cpu"}}),
    ({"merger": Ties(), "semantics": "original"}, {
        "configs": [Ties(keep=0.5, aggregate="mean", scope="global")],
    }),
    ({"plot": PLOT}, {  # digits scores under heads of its own
        "rows": (BASE, EXPERTS, DRAWN | {"heads": "keep"}), "picture": (PLOT, [Path("out/della")]),
    }),
]  # fmt: skip

OF_SUITES, OF_SCORE = (
    {"per_layer", "snapshots", "calibrate", "data", "suite_options", "search_over"},
    {"score", "score_key"},
)
ASKED = outside.Asked("true {model}")
BY_SCORE = [
    *(row for row in ON_DISK if not {*row[0]} & {"merger", "plot", "preset", "lines", "part"}),
    ({"merger": Della(drop_prob=0.4)}, {"configs": [replace(DELLA, drop_prob=0.4)]}),
    ({"merger": Ties(), "semantics": "original"}, {
        "configs": [Ties(keep=0.5, aggregate="mean", scope="global")], "semantics": "original",
    }),
    ({"widen": True}, {"asked": ASKED._replace(widen=True)}),
    ({"score": "other {model}"}, {"asked": ASKED._replace(command="other {model}")}),
    ({"score_key": ("a/b",)}, {"asked": ASKED._replace(keys=("a/b",))}),
    ({"grid": (0.1, 0.2)}, {"asked": ASKED._replace(coefs=(0.1, 0.2))}),
    ({"trials": 8}, {"asked": ASKED._replace(trials=8)}),
    ({"trials": 8, "trials_over": ("densities",)}, {"asked": ASKED._replace(trials=8, trials_over=("densities",))}),
    ({"preset": "lm"}, {"configs": [replace(DELLA, **OF_LM)]}),
    ({"plot": PLOT}, {"rows": (BASE, EXPERTS, DRAWN), "picture": (PLOT, [Path("out/della")])}),
]  # fmt: skip


@pytest.fixture
def received(monkeypatch):
    """``received(command, options)``: what the functions that merge get for options of a command, by name."""
    got = {}

    def took(*places, **fixed):
        def call(*args, report=None, **named):
            got.update({**dict(zip(places, args, strict=True)), **named, **fixed})
            return []

        return call

    for module, name, stub in (
        (torch, "set_num_threads", took("threads")),
        (run_folder, "all_inputs", lambda run: (run / "base", [run / "a", run / "b"])),
        (on_disk, "order", took("base", "experts")),
        (on_disk, "by_depth", lambda base, configs, lines: (base, lines)),
        (on_disk, "run", took("configs", "order")),
        (outside, "run", took("configs", "order", "asked")),
        (in_memory, "merge_run", lambda asked, report: got.update(asked._asdict())),
        (snapshots, "find_snapshots", lambda run, experts: {1: [run, *experts]}),
        (recipes, "documents_of", lambda *_: [{}]),
        (recipes, "recipe_of", lambda _, file, **own: got.update(file=file, **own) or RECIPE),
        (pictures, "check_picture", lambda file: None),
        (pictures, "rows_of", lambda base, experts, **own: got.update(rows=(base, experts, own))),
        (pictures, "picture", lambda file, rows, merged: got.update(picture=(file, merged))),
    ):
        monkeypatch.setattr(module, name, stub)

    def call(command, options):
        got.clear()
        command(options)
        return dict(got)

    return call


def options(merger, **choice):
    return command.Merge(
        merger=merger, inputs=command.Inputs(base=BASE, experts=tuple(EXPERTS)), choice=command.Choices(**choice),
        output=command.Outputs(out=Path("out")), machine=command.Machine(),
    )  # fmt: skip


def test_every_option_reaches_a_merge_on_disk(received):
    of_search = {"search", "grid", "widen", "trials", "trials_over", *OF_SUITES, *OF_SCORE}
    assert_effects(partial(received, command.main), options(Della(coef=0.3)), ON_DISK, besides=of_search)


def test_every_option_reaches_a_merge_in_memory(received):
    besides = {*command.ON_DISK, *OF_SCORE}
    assert_effects(partial(received, command.main), options(Della(), search=True), IN_MEMORY, besides=besides)


def test_every_option_reaches_a_search_by_a_command(received):
    plain, besides = options(Della(), search=True, score=ASKED.command), {"search", "lines", "part", *OF_SUITES}
    assert_effects(partial(received, command.main), plain, BY_SCORE, besides=besides)


RECIPE = Recipe(Della(coef=0.3), BASE, {"x": Path("x")}, None, {"seed": 1, "heads": "error"})


def test_every_option_of_recipe_reaches_the_merge(received):
    table = [
        *as_given(
            file=Path("other.yml"), out=Path("elsewhere"), seed=3, dry_run=True, overwrite=True, vocabulary="base-rows",
            config_from="x", heads="keep", into="x", partial=True, device="cuda",
        ),
        ({"shard_size": "7MB"}, {"shard_size": 7_000_000}),
        ({"memory_mib": 80}, {"chunk": chunk_of(80 << 20)}),
        ({"threads": 3}, {"threads": 3, "workers": 3}),
        ({"part": "1/2"}, {"part": Part(1, 2)}),
        ({"push_to_hub": "me/it"}, {"push": "me/it"}),
        ({"push_to_hub": "me/it", "public": True}, {"push": "me/it", "public": True}),
    ]  # fmt: skip
    plain = settings.FromRecipe(Path("merge.yml"), Path("out"))
    found = assert_effects(partial(received, commands.from_recipe), plain, table)
    assert (found["chunk"], found["seed"]) == (None, 1)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A base and two experts in several shards, with tokenizer, generation config and chat template."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hub")
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", chat_template="{{ messages }}")
    for seed, name in enumerate(("base", "math", "code")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / name, max_shard_size="4KB")
        tokenizer.save_pretrained(folder / name)
    assert len(list((folder / "math").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def call(exits, capsys):
    """``call(*words)``: (what merge.py prints, what it exits with)."""

    def run(*words):
        code = exits("merge.py", *words)
        return capsys.readouterr().out, code

    return run


def inputs(hub):
    return "--base", hub / "base", "--experts", hub / "math", hub / "code"


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def leaves(folder):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize(
    "merger",
    [
        *("ties --keep 0.3", "dare --drop-prob 0.5"),
        *(pytest.param(merger, marks=pytest.mark.slow) for merger in ("magmax", "model_stock")),
    ],
)
def test_a_merged_model_loads_in_transformers_with_the_parameters_of_its_base(merger, hub, call, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, *options = merger.split()
    words = (*inputs(hub), "--out", tmp_path, "--coef", "0.5", "--shard-size", "4KB", "--seed", "3")
    printed, code = call(name, *words, *options)
    assert code is None
    assert printed.startswith(f"merged: {tmp_path / name}, coef 0.5, rounding is ")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(hub / "base")
    assert model.num_parameters() == base.num_parameters()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == "{{ messages }}"
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / name / file).read_bytes() == (hub / "base" / file).read_bytes()
    origin, experts = dict(base.named_parameters()), {task: leaves(hub / task) for task in ("math", "code")}
    key = random.fold_in(random.key(3), "merge")
    expected = {
        "ties": lambda: merge.ties(origin, experts, coef=0.5, keep=0.3),
        "dare": lambda: merge.dare(key, origin, experts, coef=0.5, drop_prob=0.5),
        "magmax": lambda: merge.magmax(origin, experts, coef=0.5),
        "model_stock": lambda: merge.model_stock(origin, experts, coef=0.5),
    }[name]()
    assert all(torch.equal(leaf, expected[path]) for path, leaf in model.named_parameters())


def test_a_dry_run_says_what_a_merge_needs_and_writes_nothing(hub, call, tmp_path):
    words = ("della", *inputs(hub), "--out", tmp_path / "out", "--coef", "1", "--drop-prob", "0.5", "--window", "0.14")
    printed, code = call(*words, "--dry-run", "--memory-mib", "40")
    assert code is None
    first, memory, disk, time = printed.splitlines()
    assert first == f"{tmp_path / 'out' / 'della'}: all checks passed, 20 tensors, 4,944 parameters"
    assert memory == "  memory: at most 40 MiB beside mapped files"
    assert disk.endswith("kB in 1 file")
    assert re.fullmatch(
        r"  time: about [\d.]+ s of computation, then [\d.]+ s of hashing .*; 35\.9 kB to read; .*", time
    )
    _, code = call(*words, "--dry-run", "--window", "3")
    assert "take a smaller window" in code
    assert list(tmp_path.iterdir()) == []


def test_options_without_effect_are_refused(hub, call, tmp_path):
    for merger, words, told in (
        ("ta", ("--coef", 0.3, "--suite-options", "data", "x"), "--suite-options requires --search or --calibrate"),
        ("ta", ("--coef", 0.3, "--search", "--grid", 0.1), "--grid and --widen choose a coefficient, here it is given"),
        ("wa", ("--search", "--widen"), "--grid and --widen choose a coefficient, here it is given: wa (none)"),
        ("metagpt", ("--search", "--grid", 0.1), "metagpt (1.0); to try others of it: --search-over coef=0.5,1"),
        ("ta", ("--coef", 0.3, "--search", "--per-layer", 1), "--per-layer chooses a coefficient, here it is given"),
        ("ta", ("--search", "--grid", 0.3, "--per-layer", 1), "--grid, 0.3 is one: give two or more"),
        (
            "ties",
            ("--search", "--calibrate", "--keep", 0.2),
            "--calibrate chooses the sparsity, and --keep sets it: leave",
        ),
        ("ta", ("--coef", 0.3, "--calibrate"), "--calibrate chooses the sparsity of ties, dare, della: leave it out"),
    ):
        assert told in call(merger, *inputs(hub), *words, "--out", tmp_path / "out")[1]
    assert "svc takes a merged model first, --run has none" in call("svc", "--run", hub, "--out", tmp_path / "out")[1]
    assert not (tmp_path / "out").exists()


def test_text_experts_are_merged_into_a_model_that_sees(hub, call, tmp_path):
    from safetensors.torch import load_file, save_file

    tree = {path: leaf for file in (hub / "code").glob("*.safetensors") for path, leaf in load_file(file).items()}
    (tmp_path / "sees").mkdir()
    seeing = {f"language_model.{path}": leaf for path, leaf in tree.items()} | {"vision.weight": torch.ones(2, 3)}
    save_file(seeing, tmp_path / "sees/model.safetensors", metadata={"format": "pt"})
    text = json.loads((hub / "base/config.json").read_text())
    (tmp_path / "sees/config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    words = ("ta", "--base", hub / "base", "--experts", f"{tmp_path / 'sees'}@1", f"{hub / 'math'}@0.3", "--coef", 1)
    words = (*words, "--into", "sees", "--out")
    assert "all checks passed, 21 tensors" in call(*words, tmp_path / "out", "--dry-run")[0]
    assert call(*words, tmp_path / "out")[1] is None
    made, folder = load_file(tmp_path / "out/ta/model.safetensors"), tmp_path / "out/ta"
    alone = ("ta", "--base", hub / "base", "--experts", f"{hub / 'code'}@1", f"{hub / 'math'}@0.3", "--coef", 1)
    call(*alone, "--out", tmp_path / "alone")
    assert made.pop("vision.weight").equal(torch.ones(2, 3))
    for path, leaf in load_file(tmp_path / "alone/ta/model.safetensors").items():
        assert made.pop(f"language_model.{path}").equal(leaf), path
    assert not made
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llava"
    assert "20 parameters of the language model of sees are merged" in (folder / "README.md").read_text()
    assert call("recipe", folder / "recipe.yml", "--out", tmp_path / "again")[1] is None
    assert digests(tmp_path / "again/ta") == digests(folder)
    assert call(*words, tmp_path / "out")[0].startswith("kept: ")
    assert call("verify", folder)[1] is None
    assert "into" in call(*words[:-2], "base", "--out", tmp_path / "out")[1]
    assert "--into: not available with --search" in call(*words, tmp_path / "no", "--search")[1]
    assert "--lines is not available with --into" in call(*words, tmp_path / "no", "--lines", 0.5, 1)[1]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("merger", [pytest.param("ties", marks=pytest.mark.slow), "dare"])
def test_parts_on_one_disk_make_the_folder_of_one_process(merger, hub, call, tmp_path):
    words = (merger, *inputs(hub), "--coef", "0.5", "--shard-size", "2KB", "--seed", "3", "--out")
    call(*words, tmp_path / "whole")
    out = tmp_path / "parts"
    for part, missing in (("2/3", "s 1/3, 3/3"), ("3/3", " 1/3")):
        printed, code = call(*words, out, "--part", part)
        assert code is None
        assert printed == f"part {part} of {out / merger} is done, unfinished yet: missing part{missing}\n"
        assert not (out / merger).exists()
    _, code = call(*words, out, "--part", "1/3", "--coefs", "*.mlp.*", "0.25")
    assert "part 1/3 differs from part 2/3 in hyperparameters, coef: give this one the same settings, or delete" in code
    _, code = call(*words, out, "--part", "1/3", "--seed", "4")
    assert "part 1/3 differs from part 2/3 in " in code  # the card names the seed of a merge without masks too
    printed, code = call("recipe", tmp_path / "whole" / merger / "recipe.yml", "--out", out, "--part", "1/3")
    assert (code, printed.split(",")[0]) == (None, f"merged: {out / merger}")
    assert digests(out / merger) == digests(tmp_path / "whole" / merger)
    printed, _ = call(*words, out, "--part", "1/3")
    assert printed.startswith(f"kept: {out / merger}: already finished")
    assert [path.name for path in out.iterdir()] == [merger]


def test_a_finished_merge_of_other_code_is_kept_with_a_note_and_repeated_from_any_folder_name(
    hub, call, tmp_path, monkeypatch
):
    places = {}
    for old, new in {"math": "math[0:1]", "code": "math+code"}.items():
        places[old] = shutil.copytree(hub / old, tmp_path / new)
    words = ("ta", "--base", hub / "base", "--experts", *places.values(), "--coef", "0.5", "--out")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "code", lambda: "0.0.1+old")
        assert call(*words, tmp_path / "one")[1] is None
    kept, _ = call(*words, tmp_path / "one")
    assert kept.endswith(f", by other code (0.0.1+old, now {machine.code()}; --overwrite makes it anew)\n")
    monkeypatch.chdir(shutil.copytree(hub, tmp_path / "work"))  # holds a folder math
    assert call("recipe", tmp_path / "one/ta/recipe.yml", "--out", tmp_path / "two")[1] is None
    one, two = (load_file(tmp_path / name / "ta/model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(leaf, two[path]) for path, leaf in one.items())


def test_control_characters_of_inputs_reach_neither_the_terminal_nor_the_model_card(hub, call, tmp_path):
    shutil.copytree(hub / "math", tmp_path / "math")
    config = json.loads((tmp_path / "math" / "config.json").read_text()) | {"rms_norm_eps": "\x1b[31m<b>"}
    (tmp_path / "math" / "config.json").write_text(json.dumps(config))
    for words in (
        ("ta", "--base", hub / "base", "--experts", tmp_path / "math", "--coef", "1", "--out", tmp_path / "out"),
        (tmp_path / "out" / "ta" / "recipe.yml", "--out", tmp_path / "again"),
    ):
        printed, code = call(*words)
        assert code is None
        assert "rms_norm_eps \\x1b[31m<b>, base's is" in printed
    assert "rms_norm_eps \\\\x1b\\[31m\\<b>, base's is" in (tmp_path / "out" / "ta" / "README.md").read_text()


def test_verify_prints_every_change_and_fails(hub, call, tmp_path):
    call("ta", *inputs(hub), "--out", tmp_path, "--coef", "0.5")
    folder = tmp_path / "ta"
    count = len(list(folder.iterdir())) - 4 + sum(1 for _ in hub.glob("*/*.safetensors"))
    assert call("verify", folder) == (f"{count} files have the hashes stored in {folder}\n", None)
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes(b"")
    printed, code = call("verify", folder / "README.md")
    assert [line.partition(" has changed")[0] for line in printed.splitlines()] == [
        str(folder / "model.safetensors"),
        str(folder / "config.json"),
    ]
    assert code == f"merge.py verify: 2 of {count} files differ from the hashes stored in {folder / 'README.md'}"


@pytest.mark.slow
def test_a_killed_merge_goes_on_and_ends_with_the_same_bytes(hub, call, tmp_path):
    options = ("--coef", "0.5", "--drop-prob", "0.5", "--shard-size", "4KB")
    words = [str(word) for word in ("dare", *inputs(hub), "--out", tmp_path / "out", *options)]
    command = [sys.executable, "-c", KILLED, str(ROOT / "merge.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, check=False, env=environment).returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".dare.lock", ".dare.merging"]
    assert list((tmp_path / "out" / ".dare.merging").glob("*.safetensors"))
    for folder in ("out", "whole"):
        assert call("dare", *inputs(hub), "--out", tmp_path / folder, *options)[1] is None
    assert digests(tmp_path / "out" / "dare") == digests(tmp_path / "whole" / "dare")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dare"]


def test_factors_by_depth_are_coefficients_by_block_in_card_and_recipe(hub, call, tmp_path):
    words = "ta", *inputs(hub), "--coef", 0.5, "--lines", 0.2, 1
    said, code = call(*words, "--out", tmp_path / "out")
    assert (said.startswith(f"merged: {tmp_path / 'out' / 'ta'}, coef by parameter, "), code) == (True, None)
    rules = {"model.layers.0.*": 0.1, "model.layers.1.*": 0.5, "*": 0.1}
    made = tmp_path / "out" / "ta"
    assert json.loads((made / "manifest.json").read_text())["hyperparameters"] == {"coef": 0.5, "coefs": rules}
    assert yaml.safe_load((made / "recipe.yml").read_text())["coef"] == rules
    assert str(rules) in (made / "README.md").read_text()
    given = [word for pair in rules.items() for word in pair]
    assert call("ta", *inputs(hub), "--coefs", *given, "--out", tmp_path / "rules")[1] is None
    found, wanted = leaves(made), leaves(tmp_path / "rules" / "ta")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())
    assert "--lines and --coefs both" in call(*words, "--coefs", "*", 1, "--out", tmp_path / "no")[1]
    assert "slerp has no task vector" in call("slerp", *words[1:], "--out", tmp_path / "no")[1]


def test_factors_by_depth_of_a_unet_are_an_error_that_names_the_way_out(call, tmp_path):
    names = [f"{way}_blocks.{i}.{part}.weight" for way in ("input", "output") for i in range(3) for part in "ab"]
    for seed, name in enumerate(("base", "expert")):
        (tmp_path / name).mkdir()
        save_file({n: torch.full((2, 2), float(seed)) for n in names}, tmp_path / name / "model.safetensors")
    words = (
        "ta",
        "--base",
        tmp_path / "base",
        "--experts",
        tmp_path / "expert",
        "--coef",
        0.5,
        "--out",
        tmp_path / "out",
    )
    text = call(*words, "--lines", 0.2, 1)[1]
    assert text == (
        "merge.py: input_blocks and output_blocks are the two halves of a UNet, whose blocks have no depth: give each "
        "block a coefficient by its name, as --coef 'input_blocks.0.*=0.2'"
    )
    assert call(*words, "--coef", "input_blocks.0.*=0.2")[1] is None
    found = load_file(tmp_path / "out" / "ta" / "model.safetensors")
    assert [found[name].unique().tolist() for name in names[:3]] == [[pytest.approx(0.2)]] * 2 + [[0.5]]


def test_chat_templates_by_the_names_that_recipes_have(hub, call, tmp_path):
    from transformers import AutoTokenizer

    words = "wa", *inputs(hub), "--overwrite", "--out", tmp_path
    messages = [{"role": "user", "content": "Hi"}]
    said, _ = call(*words, "--chat-template", "alpaca")
    assert said.startswith("note: chat_template alpaca has, as in mergekit, no line break before the last")
    said, _ = call(*words, "--chat-template", "chatml")
    assert said.startswith("merged: ")
    text = AutoTokenizer.from_pretrained(tmp_path / "wa").apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    told = "--chat-template is 'chatML': must be auto, chatml, llama3, alpaca, mistral, a template in Jinja, or a file"
    assert told in call(*words, "--chat-template", "chatML")[1]
    for content, told in ((b"{{ '\xe9' }}", "not text in UTF-8"), (b"{{ x", "not valid Jinja")):
        (tmp_path / "own.jinja").write_bytes(content)
        said = call(*words, "--chat-template", tmp_path / "own.jinja")[1]
        assert f"--chat-template is '{tmp_path / 'own.jinja'}', a file that is {told}" in said


def test_the_note_on_assumed_settings_leaves_out_those_that_dev_chooses():
    def said(calibrate, over=()):
        choice = SimpleNamespace(calibrate=calibrate, semantics="paper", search_over=over)
        return command.assumed_note(SimpleNamespace(merger=Della(), choice=choice), PRESETS["digits"])

    assert said(False).endswith("drop_prob of della is 0.1 (lm: 0.5)")
    assert said(True) == said(False, over=("drop_prob=0.1,0.2",)) == ""


def test_all_after_a_kill_keeps_what_is_done(hub, call, tmp_path):
    plain = [*inputs(hub), "--out", tmp_path, "--shard-size", "4KB"]
    words = [*plain, "--coef", "*=0.3"]
    done = "already finished: its files and inputs match its model card\n"
    assert call("wa", *words)[1] == "merge.py: wa takes no coefficient: leave out --coefs"
    assert [call("wa", *plain)[1], call("ta", *words)[1]] == [None, None]
    printed, code = call("all", *words)
    assert code is None
    note, printed = printed.split("\n", 1)
    assert note == "note: no expert names a preset, so settings are of digits: drop_prob of della is 0.1 (lm: 0.5)"
    assert not call("all", *words, "--preset", "digits")[0].startswith("note: ")
    kept, others = printed.split(done)[:2], printed.split(done)[2]
    assert kept == [f"kept: {tmp_path / merger}: " for merger in ("wa", "ta")]
    mergers = "ties", "dare", "della"
    assert [line.split(",")[0] for line in others.splitlines()] == [
        f"merged: {tmp_path / merger}" for merger in mergers
    ]
    assert call("all", *words, "--dry-run")[0].count(done) == 5


def test_a_coefficient_of_a_glob_is_given_as_one_word(hub, call, tmp_path):
    glob, common = "model.layers.*.mlp.*", (*inputs(hub), "--coef", "0.3")
    call("ta", *common, "--coefs", glob, "0.4", "*norm*", "0", "--out", tmp_path / "a")
    call("ta", *common, "--coef", f"{glob}=0.4", "--coef=*norm*=0", "--out", tmp_path / "b")
    call("ta", *common, f"--coef={glob}=0.4", "--coefs", "*norm*", "0", "--out", tmp_path / "c")
    call("ta", *common, "--out", tmp_path / "d")
    a, b, c, d = (hashlib.sha256((tmp_path / x / "ta/model.safetensors").read_bytes()).digest() for x in "abcd")
    assert a == b == c != d
    assert call("ta", *common, "--coef", "model.layer=0.4", "--out", tmp_path / "e")[1].endswith("matches no parameter")


def test_what_stops_a_merge_is_told_in_one_line(hub, call, tmp_path, monkeypatch):
    words = ("ta", *inputs(hub), "--out", tmp_path, "--coef", "0.5")
    with writing.exclusive(tmp_path / "ta"):
        code = call(*words)[1]
    assert code.startswith(f"merge.py: another merge into {tmp_path / 'ta'} is running (")
    assert all(line.startswith("  ") for line in code.split("\n")[1:])

    def full(*args):
        raise OSError(*reasons.pop())

    reasons = [(28, "No space left on device"), *[(27, "File too large")] * 3]
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_chunk", full)
        larger = f"the disk of {tmp_path} takes no file that is so large (File too large): "
        smaller = call(*words)[1].removeprefix(
            f"merge.py: {larger}give a smaller --shard-size (the largest parameter takes"
        )
        assert re.fullmatch(r" [\d.]+ kB\)", smaller)
        with monkeypatch.context() as limited:  # no parameter is so small
            limited.setattr(stream, "file_limit", lambda: 100)
            other = "choose another disk, or raise the limit on file sizes (ulimit -f)"
            assert call(*words)[1] == f"merge.py: {larger}{other}"
        assert call(*words, "--shard-size", "1")[1] == f"merge.py: {larger}{other}"  # a file for each parameter
        told = call(*words)[1]
    assert told.startswith(f"merge.py: the disk of {tmp_path} is full: finished files stay in .ta.merging;")
    assert not (tmp_path / "ta").exists()
    assert call(*words)[1] is None
    assert call(*words[:-1], "0.6")[1].split("\n") == [
        "merge.py:",
        f"  {tmp_path / 'ta'} holds another merge: its hyperparameters.coef is 0.5, this merge's would be 0.6",
        f"  {tmp_path / 'ta'} exists: choose another folder or pass --overwrite",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("all",), "  ta needs a coefficient: give --coef, or --search for one on dev\n  ties needs"),
        (("dare", "--coef", "1", "--semantics", "mergekit"), "dare with the semantics of mergekit is unavailable"),
        (("ties", "--coef", "1", "--scope", "global", "--semantics", "mergekit"), "scope of ties is 'global', but"),
        (("wise_ft", "--coef", "1"), "the number of experts is 2: wise_ft takes exactly 1"),
        (("weighted_average", "--weights", "1"), "weights holds 1 numbers for 2 experts"),
        (("ta", "--coefs", "*.mlp.*", "1"), "no rule matches parameter 'model.embed_tokens.weight'"),
        (("ta", "--coef", "1", "--device", "cuda"), "device is 'cuda', but torch sees no GPU here"),
        (("ta", "--coef", "1", "--memory-mib", "8"), "8 MiB are too little memory for a merge: give more than 32 MiB"),
        (("ta", "--coef", "1", "--shard-size", "5GiB"), "--shard-size is '5GiB': write 5GB"),
        (("ta", "--search", "--dry-run"), "--dry-run: not available with --search or --calibrate"),
        (("ta", "--search", "--part", "1/2"), "--part: not available with --search or --calibrate"),
        (("ta", "--coef", "1", "--part", "2"), "part is '2', must be I/N with I from 1 to N, as 2/3"),
        (
            ("ta", "--coef", "1", "--part", "1/2", "--dry-run", "--push-to-hub", "a/b"),
            "--dry-run checks the whole merge: leave out --part\n  --push-to-hub takes a whole model",
        ),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_merged_is_told_in_one_line(words, told, hub, call, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, code = call(*words, *inputs(hub), "--out", tmp_path / "out")
    assert told in code
    assert all(line.startswith("  ") for line in code.split("\n")[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_is_merged_on_the_device_that_is_asked_for(hub, call, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    models = [{"model": str(hub / name), "parameters": {"weight": 0.5}} for name in ("math", "code")]
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps({"merge_method": "linear", "models": models, "dtype": "float32"}))
    _, code = call("recipe", file, "--device", "cuda", "--out", tmp_path / "out")
    assert "device is 'cuda', but torch sees no GPU here" in code
    assert call("recipe", file, "--device", "cpu", "--memory-mib", 80, "--out", tmp_path / "out")[1] is None


def test_models_of_all_tasks_in_one_folder(hub, call, tmp_path):
    given = ("--base", hub / "base", "--experts", hub / "math", hub / "code")
    said, code = call("emr", *given, "--out", tmp_path)
    assert code is None
    assert "one vector and a mask each for math, code" in said
    said, code = call("export", tmp_path / "emr", "--base", hub / "base", "--task", "code", "--out", tmp_path / "code")
    assert code is None
    assert "exported:" in said
    assert call("emr", *given, "--task", "code", "--out", tmp_path / "own")[1] is None
    for file in sorted((tmp_path / "own" / "emr").glob("*.safetensors")):
        assert (tmp_path / "code" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "code" / "tokenizer.json").exists()
    assert call("verify", tmp_path / "emr")[1] is None
    for words in (("--search",), ("--plot", tmp_path / "a.png")):
        assert "give --task" in str(call("emr", *given, *words, "--out", tmp_path / "no"))
    assert "pass --task, one of math, code" in str(
        call("export", tmp_path / "emr", "--base", hub / "base", "--out", tmp_path / "no")
    )
    assert not (tmp_path / "no").exists()
