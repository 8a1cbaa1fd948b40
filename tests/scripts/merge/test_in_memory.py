"""Merged models on disk: checked inputs, coefficients and sparsity from dev alone, the merger's own bits."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from smat_fn import checkpoint, folders, lora, machine, merge, random
from smat_fn.checkpoint import same
from smat_fn.config import (
    DIGITS,
    Dare,
    Della,
    Karcher,
    MagMax,
    Slerp,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
)
from smat_fn.evaluate import Scorer
from smat_fn.folders.inputs.opening import read_inputs
from smat_fn.folders.writing import exclusive
from smat_fn.scripts.analyse import scores
from smat_fn.scripts.analyse.runs import Run, merged_params
from smat_fn.scripts.commands import merge as command
from smat_fn.scripts.merge import commands, in_memory, on_disk, settings
from smat_fn.scripts.merge.experts import suite as suite_of
from smat_fn.scripts.merge.experts.inputs import Inputs, load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run, notes_of, summary, tied
from smat_fn.scripts.merge.search.choosing import Merged, calibrate, merge_one
from smat_fn.scripts.run_folder import find_inputs, trained_by

MERGERS = list(DIGITS.mergers.values())
TA, TWO = TaskArithmetic(coef=0.3), ("stripes", "mirror")


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory):
    """All five mergers of two SMAT experts, coefficients by search."""
    out, experts = tmp_path_factory.mktemp("merged"), [runs["smat"] / task for task in TWO]
    options = {"search": True, "seed": 5, "coefs": (0.2, 0.5, 0.8)}
    return merge_run(Request(MERGERS, runs["smat"] / "base", experts, out=out, **options))


def tiny(*tasks):
    return Inputs(
        {"w": torch.zeros(4)},
        {task: {"w": torch.arange(4.0) + i} for i, task in enumerate(tasks)},
        dict.fromkeys(tasks),
    )


def scoring(suite, candidates, seen=None):
    """The suite with the given mean scores, one a candidate (two tasks each, a point above and below)."""
    scores = iter([score + shift for score in candidates for shift in (1, -1)])

    def score(params, task, split):
        (seen if seen is not None else []).append((task, split))
        return next(scores)

    return suite.replace(score=score)


def test_a_merged_model_is_what_the_merger_gives_in_memory(merged, runs, suite):
    base, experts = suite.base, load_inputs(runs["smat"] / "base", [runs["smat"] / task for task in TWO]).experts
    key = random.fold_in(random.key(5), "merge")
    coefs = {folder.name: model.coef for folder, model in merged.items()}
    expected = {
        "wa": merge.weight_average(experts),
        "ta": merge.task_arithmetic(base, experts, coef=coefs["ta"]),
        "ties": merge.ties(base, experts, coef=coefs["ties"], keep=0.5),
        "dare": merge.dare(key, base, experts, coef=coefs["dare"], drop_prob=0.3),
        "della": merge.della(key, base, experts, coef=coefs["della"], drop_prob=0.1, window=0.14),
    }
    assert [folder.name for folder in merged] == list(expected)
    for folder, model in merged.items():
        stored, manifest = checkpoint.load_expert(folder, base)
        assert same(stored, expected[folder.name])
        assert same(stored, model.params)
        assert manifest["fingerprint"] == checkpoint.fingerprint(stored)
        assert model.dev == {task: suite.score(stored, task, "dev") for task in TWO}


def test_experts_of_different_sigma_are_noted(runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs["smat"], run := tmp_path / "smat")
    monkeypatch.setattr(sys, "argv", ["merge.py", "wa", "--run", str(run), "--out", str(tmp_path), "--dry-run"])
    for sigma in (None, 0.02):
        if sigma is not None:
            manifest = checkpoint.load_manifest(run / "mirror")
            manifest["hyperparameters"]["sigma"] = sigma
            (run / "mirror" / "manifest.json").write_text(json.dumps(manifest))
        command.command("merge.py", ())
        said = capsys.readouterr().out
        assert (
            ("note: the experts were trained with different sigma (" in said) == ("mirror 0.02" in said) == bool(sigma)
        )


def test_the_same_inputs_merge_to_the_same_bits_and_another_seed_masks_otherwise(merged, runs, tmp_path):
    open_at = [TaskArithmetic(coef=0.4), Dare(coef=0.4, drop_prob=0.3), Della(coef=0.4, drop_prob=0.1, window=0.14)]
    prints = []
    for number, seed in enumerate((5, 5, 6)):
        done = merge_run(
            Request(open_at, *find_inputs(runs["smat"]), out=tmp_path / str(number), search=False, seed=seed)
        )
        prints.append([checkpoint.fingerprint(model.params) for model in done.values()])
    assert prints[0] == prints[1]
    assert [a == b for a, b in zip(prints[0], prints[2], strict=True)] == [True, False, False]


def test_the_recipe_of_a_search_gives_the_same_bytes_without_one(merged, tmp_path):
    for folder in merged:
        commands.from_recipe(settings.FromRecipe(folder / checkpoint.RECIPE, tmp_path))
        first, again = (place / folder.name / checkpoint.WEIGHTS for place in (folder.parent, tmp_path))
        assert again.read_bytes() == first.read_bytes(), folder.name


def test_weight_averaging_has_no_coefficient(merged):
    folder, model = next((f, m) for f, m in merged.items() if f.name == "wa")
    assert model.coef is None
    assert model.curve == ()
    manifest = checkpoint.load_manifest(folder)
    assert manifest["hyperparameters"] == {}
    assert list(manifest["dev"]) == list(TWO)
    assert "coefficient" not in (folder / "README.md").read_text()


def test_the_card_names_merger_coefficient_scores_and_fingerprints(merged, runs):
    for folder, model in merged.items():
        card, manifest = (folder / "README.md").read_text(), checkpoint.load_manifest(folder)
        metadata = {"base_model": ["base"], "base_model_relation": "merge", "library_name": "smat_fn"}
        parsed = ModelCard(card)
        assert parsed.data.to_dict() == metadata | {"tags": ["merge", "smat_fn", folder.name]}
        assert str(parsed) == card
        assert parsed.text.startswith(f"\n# SMAT experts merged by {folder.name.upper()}\n")
        if model.coef is not None:
            assert f"coef {model.coef}" in card
            assert ", ".join(f"{coef}: {score:.2f}" for coef, score in model.curve) in card
            assert manifest["hyperparameters"]["coef"] == model.coef
        assert ("random masks from seed 5" in card) == (folder.name in ("dare", "della"))
        for task, score in model.dev.items():
            print_ = checkpoint.load_manifest(runs["smat"] / task)["fingerprint"]
            assert f"| {task} | {score:.2f} | `{print_}` |" in card
        assert manifest["base_fingerprint"] in card
        assert manifest["fingerprint"] in card
        assert f"torch {version('torch')}" in card


def test_search_takes_the_largest_mean_and_the_smaller_of_equal_coefficients(suite):
    means = [10, 30, 20, 50, 50, 40, 50, 10, 10, 10]
    seen = []
    model = merge_one(TaskArithmetic(), tiny("rot90", "mirror"), seed=0, scorer=Scorer(scoring(suite, means, seen)))
    assert model.coef == 0.4
    assert model.curve == tuple((i / 10, mean) for i, mean in enumerate(means, 1))
    assert torch.equal(model.params["w"], torch.tensor([1.0, 3.0, 5.0, 7.0]) * 0.4)
    assert model.dev == {"rot90": 51, "mirror": 49}
    assert seen == [("rot90", "dev"), ("mirror", "dev")] * 10


def test_a_given_coefficient_needs_neither_suite_nor_scores(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(suite_of, "load_suite", lambda **recipe: pytest.fail("the suite is not needed"))
    configs = [WeightAverage(), TA]
    done = merge_run(Request(configs, *find_inputs(runs["ft"]), out=tmp_path, search=False, seed=0))
    assert [(model.coef, model.dev, model.curve) for model in done.values()] == [(None, {}, ()), (0.3, {}, ())]
    assert "| rot90 | | `" in (tmp_path / "ta" / "README.md").read_text()


def test_a_given_coefficient_is_kept_by_a_search_and_scored(runs, suite, tmp_path):
    (model,) = merge_run(Request([TA], *find_inputs(runs["ft"]), out=tmp_path, search=True, seed=0)).values()
    assert model.coef == 0.3
    assert model.curve == ()
    assert model.dev == {task: suite.score(model.params, task, "dev") for task in suite.tasks}


@pytest.mark.parametrize(
    ("config", "scores", "field", "best"),
    [
        (Ties(keep=0.5, aggregate="sum", scope="global"), (10, 40, 40, 20), "keep", 0.3),
        (Dare(drop_prob=0.3), (10, 20, 20, 40, 40), "drop_prob", 0.7),
        (Della(drop_prob=0.1, window=0.14), (30, 30, 30, 30, 30), "drop_prob", 0.1),
    ],
)
def test_calibration_takes_the_best_on_dev_and_of_equal_ones_the_least_pruning(suite, config, scores, field, best):
    seen, models, inputs = [], [], tiny("rot90", "mirror")
    scored = scoring(suite, scores, seen)
    watched = scored.replace(
        score=lambda params, *asked: models.append(params["w"].clone()) or scored.score(params, *asked)
    )
    found = calibrate(config, inputs, Scorer(watched), coef=0.2, seed=0)
    assert found.config == replace(config, **{field: best})
    assert found.curve == tuple(zip(merge.TIES_KEEPS if field == "keep" else merge.DROP_PROBS, scores, strict=True))
    assert seen == [("rot90", "dev"), ("mirror", "dev")] * len(scores)
    tried = merge.TIES_KEEPS if field == "keep" else merge.DROP_PROBS
    for value, model in zip(tried, models[::2], strict=True):
        expected = merge_one(replace(config, coef=0.2, **{field: value}), inputs, seed=0)
        assert torch.equal(model, expected.params["w"])


def test_a_calibrated_run_merges_at_the_chosen_sparsity(runs, tmp_path):
    inputs = find_inputs(runs["ft"])
    options = {"out": tmp_path, "search": False, "calibration": merge.CALIBRATION_COEFS["vision"], "seed": 0}
    ties = Ties(coef=0.6, keep=1.0, aggregate="sum", scope="global")
    (model,) = merge_run(Request([ties], *inputs, **options)).values()
    keep = checkpoint.load_manifest(tmp_path / "ties")["hyperparameters"]["keep"]
    assert keep in merge.TIES_KEEPS
    base, experts, *_ = load_inputs(*inputs)
    assert same(model.params, merge.ties(base, experts, coef=0.6, keep=keep))


def test_a_sparsity_that_calibration_cannot_try_is_told_before_any_is_scored(tmp_path):
    della, inputs = Della(drop_prob=0.1, window=0.2), (tmp_path / "base", [tmp_path / "expert"])
    told = "calibration of della: drop_prob 0.9 and window 0.2 give keep probabilities from .* take a smaller window; "
    with pytest.raises(ValueError, match=told):  # what is missing follows
        merge_run(Request([della], *inputs, out=tmp_path, search=False, calibration={"della": 1.0}, seed=0))


def test_inputs_are_refused_all_at_once(runs, suite, tmp_path):
    def save(name, params, **facts):
        checkpoint.save_expert(tmp_path / name, params, {"kind": "expert", "task": name, **facts})
        return tmp_path / name

    wrong = {path: leaf.clone() for path, leaf in suite.base.items()}
    wrong["layernorm.weight"] = torch.ones(3)
    nan = {path: leaf.clone() for path, leaf in suite.base.items()}
    nan["layernorm.bias"][:2] = math.nan
    experts = [
        runs["ft"] / "rot90",
        runs["smat"] / "rot90",
        tmp_path / "missing",
        save("foreign", suite.base, base_fingerprint="0" * 64),
        save("shape", wrong),
        save("half", {path: leaf.half() for path, leaf in suite.base.items()}),
        save("nan", nan),
    ]
    shutil.copytree(runs["ft"] / "stripes", tmp_path / "stripes")
    save_file(dict(suite.base), tmp_path / "stripes" / checkpoint.WEIGHTS)  # beside the manifest of the old ones
    experts.append(tmp_path / "stripes")
    with pytest.raises(ValueError, match="another expert named 'rot90'") as error:
        load_inputs(runs["ft"] / "base", experts)
    text = str(error.value)
    for part in (
        f"expert 'missing': {tmp_path / 'missing'} is not a folder",
        f"{tmp_path / 'foreign'} was trained from another base than",
        "parameter 'layernorm.weight' has shape (3,)",
        "was it made from another base?",
        f"of {tmp_path / 'half'} is float16, expected float32",
        f"parameter 'layernorm.bias' of {tmp_path / 'nan'} holds 2 values that are NaN",
        f"the weights in {tmp_path / 'stripes'} are not those that its manifest.json names: put these back, or delete",
    ):
        assert part in text
    with pytest.raises(ValueError, match=r"base: .*nobase is not a folder.*noexpert is not a folder.*named 'mirror'"):
        load_inputs(tmp_path / "nobase", [tmp_path / "noexpert", runs["ft"] / "mirror", runs["smat"] / "mirror"])
    with pytest.raises(ValueError, match="no experts: give at least one"):
        load_inputs(runs["ft"] / "base", [])
    with pytest.raises(ValueError, match=r"nan holds 2 values.*was trained from another base"):
        load_inputs(tmp_path / "nan", [runs["ft"] / "rot90"])


def test_options_outputs_and_inputs_are_refused_before_any_merging(runs, tmp_path):
    (tmp_path / "ta").mkdir()
    configs = [
        WeightAverage(),
        TaskArithmetic(coef=math.inf),
        Ties(coef=0.1, keep=2.0, aggregate="sum", scope="global"),
        Dare(drop_prob=1.0),
        Della(coef=0.1, drop_prob=0.01, window=0.14),
    ]
    with pytest.raises(ValueError, match="coef is inf") as error:
        merge_run(Request(configs, runs["ft"] / "bass", [runs["ft"] / "rot90"], out=tmp_path, search=False, seed=0))
    text = str(error.value)
    for part in ("ta exists", "keep is 2.0", "dare needs a coefficient: give --coef, or --search", "drop_prob is 1.0"):
        assert part in text
    for part in ("window", "bass is not a folder"):
        assert part in text
    assert [p.name for p in tmp_path.iterdir()] == ["ta"]


def test_a_merger_of_another_number_of_experts_is_refused_before_any_merging(runs, tmp_path):
    configs = [Slerp(), WiseFt(coef=0.5), WeightedAverage(weights=(1.0, 2.0))]
    with pytest.raises(ValueError, match=r"slerp takes exactly 2; .*wise_ft takes exactly 1; weights holds 2 numbers"):
        merge_run(Request(configs, *find_inputs(runs["ft"]), out=tmp_path / "out", search=False, seed=0))
    assert not (tmp_path / "out").exists()


def test_a_search_finds_the_coefficient_of_other_mergers_too(runs, suite, tmp_path):
    base, experts = runs["ft"] / "base", [runs["ft"] / task for task in TWO]
    done = merge_run(Request([MagMax(), Slerp()], base, experts, out=tmp_path, search=True, seed=0))
    magmax, slerp = done.values()
    assert [coef for coef, _ in magmax.curve] == list(merge.COEFS)
    assert (slerp.coef, slerp.curve) == (0.5, ())
    inputs = load_inputs(base, experts)
    assert same(magmax.params, merge.magmax(inputs.base, inputs.experts, coef=magmax.coef))
    assert same(slerp.params, merge.slerp(inputs.experts, coef=0.5))
    assert slerp.dev == {task: suite.score(slerp.params, task, "dev") for task in TWO}


def test_a_search_tries_the_coefficients_that_it_is_told(runs, tmp_path, monkeypatch):
    given = {"out": tmp_path, "search": True, "seed": 0}
    (model,) = merge_run(Request([TaskArithmetic()], *find_inputs(runs["ft"]), coefs=(0.35, 0.05), **given)).values()
    assert [coef for coef, _ in model.curve] == [0.05, 0.35]
    assert model.coef in (0.05, 0.35)
    (kept,) = merge_run(Request([TaskArithmetic()], *find_inputs(runs["ft"]), coefs=(0.05, 0.35), **given)).values()
    assert kept.kept
    with pytest.raises(ValueError, match="ta holds another merge: its asked"):
        merge_run(Request([TaskArithmetic()], *find_inputs(runs["ft"]), **given))
    monkeypatch.setattr(suite_of, "load_suite", None)  # what it does not decide is an error before it is loaded
    (tmp_path / "ties").mkdir()
    with pytest.raises(ValueError, match=r"^[^;]*ties exists[^;]*$"):
        merge_run(Request([Ties(keep=0.5, aggregate="sum", scope="global")], *find_inputs(runs["ft"]), **given))
    with pytest.raises(ValueError, match=r"coefficient inf to search is not finite; .*\[inf, inf\]: name each once"):
        merge_run(Request([TaskArithmetic()], *find_inputs(runs["ft"]), coefs=(math.inf, math.inf), **given))


def test_a_search_scales_by_depth_and_gives_what_folders_give(runs, tmp_path):
    run, options = runs["ft"], {"search": True, "seed": 0, "coefs": [0.2, 0.4], "lines": (0.25, 1.0)}
    experts = [run / task for task in TWO]
    ((folder, found),) = merge_run(
        Request([TaskArithmetic()], run / "base", experts, out=tmp_path / "in", **options)
    ).items()
    manifest = checkpoint.load_manifest(folder)
    assert manifest["hyperparameters"] == {"coef": found.coef, "lines": [0.25, 1.0]}
    assert manifest["asked"]["lines"] == [0.25, 1.0]
    inputs = load_inputs(run / "base", experts)
    vector = merge.task_arithmetic_vector(inputs.base, inputs.experts)
    expected = merge.apply_vector(inputs.base, merge.lines(vector, low=0.25, high=1.0), coef=found.coef)
    assert same(found.params, expected)
    config = TaskArithmetic(coef=found.coef)
    coefs = on_disk.by_depth(run / "base", [config], (0.25, 1.0))
    order = on_disk.order(run / "base", experts, out=tmp_path / "disk", seed=0, coefs=coefs)
    ((disk, _),) = on_disk.stream_run([config], order)
    for path, leaf in checkpoint.load_leaves(disk)[0].items():
        torch.testing.assert_close(leaf, expected[path], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="holds another merge: its asked"):
        merge_run(
            Request([TaskArithmetic()], run / "base", experts, out=tmp_path / "in", **options | {"lines": (0.5, 1.0)})
        )


def test_factors_by_depth_that_make_no_sense_are_refused_before_any_merging(runs, tmp_path):
    run, given = runs["ft"], {"search": False, "seed": 0, "out": tmp_path / "out"}
    experts = [run / task for task in TWO]
    with pytest.raises(ValueError, match=r"--lines nan must be finite; slerp has no task vector with a coefficient"):
        merge_run(Request([Slerp(coef=0.5)], run / "base", experts, lines=(float("nan"), 1.0), **given))
    with pytest.raises(ValueError, match="wa has no task vector with a coefficient: leave out --lines"):
        on_disk.by_depth(run / "base", [WeightAverage()], (0.2, 1.0))
    with pytest.raises(ValueError, match="--lines multiplies a coefficient: pass --coef, or --search"):
        on_disk.by_depth(run / "base", [TaskArithmetic()], (0.2, 1.0))
    flat = tmp_path / "flat"
    checkpoint.save_expert(flat, {"w": torch.zeros(2)}, {})
    with pytest.raises(ValueError, match="no two blocks"):
        on_disk.by_depth(flat, [TA], (0.2, 1.0))
    assert not (tmp_path / "out").exists()


def test_a_search_needs_one_suite_for_all_experts_and_its_base(runs, suite, tmp_path, monkeypatch):
    def save(name, **facts):
        checkpoint.save_expert(tmp_path / name, suite.base, {"kind": "expert", "task": name, **facts})
        return tmp_path / name

    recipe = dict(suite.recipe)
    experts = [runs["ft"] / "rot90", save("bare"), save("other", suite=recipe | {"seed": 5})]
    with pytest.raises(ValueError, match=r"'bare' names no suite.*'other' is of another suite"):
        merge_run(Request([TA], runs["ft"] / "base", experts, out=tmp_path / "out", search=True, seed=0))
    moved = suite.replace(base={path: leaf + 1 for path, leaf in suite.base.items()})
    monkeypatch.setattr(suite_of, "load_suite", lambda **recipe: moved)
    with pytest.raises(ValueError, match="gives another base here than the experts'"):
        merge_run(Request([TA], *find_inputs(runs["ft"]), out=tmp_path / "out", search=True, seed=0))
    assert not (tmp_path / "out").exists()


def test_experts_of_several_methods_carry_both_labels(runs, tmp_path):
    experts = [runs["ft"] / "rot90", runs["smat"] / "mirror"]
    merge_run(Request([TA], runs["ft"] / "base", experts, out=tmp_path, search=False, seed=0))
    manifest = checkpoint.load_manifest(tmp_path / "ta")
    assert manifest["label"] == "FT+SMAT"
    assert list(manifest["experts"]) == ["rot90", "mirror"]


def test_experts_of_two_presets_need_a_choice():
    assert trained_by({}) == trained_by({"a": {}}) == "digits"
    assert trained_by({"a": {"preset": "minilm"}, "b": {}}) == "minilm"
    with pytest.raises(ValueError, match=r"several presets \(a by minilm, b by digits\): pass --preset"):
        trained_by({"a": {"preset": "minilm"}, "b": {"preset": "digits"}})


def test_a_run_folder_gives_its_base_and_experts_and_nothing_below(runs, tmp_path):
    base, experts = find_inputs(runs["smat"])
    assert base == runs["smat"] / "base"
    assert [path.name for path in experts] == ["mirror", "negative", "rot90", "stripes"]
    with pytest.raises(ValueError, match="holds no experts: give the --out folder of train"):
        find_inputs(tmp_path)
    with pytest.raises(ValueError, match="missing does not exist, so it holds no experts"):
        find_inputs(Path(tmp_path / "missing"))
    with pytest.raises(ValueError, match=rf"train.py \(here perhaps .*{runs['smat']}"):
        find_inputs(runs["smat"].parent)


def test_a_merge_that_is_done_stays_and_one_of_other_settings_is_refused(runs, tmp_path, monkeypatch):
    inputs = runs["ft"] / "base", [runs["ft"] / task for task in TWO]
    options = {"out": tmp_path, "search": True, "seed": 0}
    configs, checked = [TaskArithmetic(), Slerp()], in_memory._checked
    (first,) = merge_run(Request(configs[:1], *inputs, **options)).values()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "ta").iterdir()}
    second, other = merge_run(Request(configs, *inputs, **options)).values()
    assert (first.kept, second.kept, other.kept) == (False, True, False)
    assert same(first.params, second.params)
    assert (first.coef, first.dev, first.curve) == (second.coef, second.dev, second.curve)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "ta").iterdir()} == files
    with monkeypatch.context() as patch:
        patch.setattr(machine, "code", lambda: "0.2.0+new")
        (later,) = merge_run(Request(configs[:1], *inputs, **options)).values()
        code = checkpoint.load_manifest(tmp_path / "ta")["code"]
        told = f"it was merged before, by other code ({code}, now 0.2.0+new; --overwrite makes it anew)"
        assert later.notes == (*second.notes, f"{told}: its dev score is of that code")
    with exclusive(tmp_path / "wa"), pytest.raises(ValueError, match=r"another merge into .*wa is running"):
        merge_run(Request([WeightAverage()], *inputs, **options))
    with monkeypatch.context() as patch:  # another process writes it after the first look
        patch.setattr(in_memory, "_checked", lambda asked: (*checked(asked)[:3], {}))
        assert merge_run(Request(configs[:1], *inputs, **options))[tmp_path / "ta"].kept
    refused = {
        "its merge_seed is 0, this merge's would be 1": {"seed": 1},
        "its asked.": {"search": False},
    }
    for told, changed in refused.items():
        config = TA if "search" in changed else TaskArithmetic()
        with pytest.raises(ValueError, match="ta exists: choose another folder") as error:
            merge_run(Request([config], *inputs, **options | changed))
        assert f"{tmp_path / 'ta'} holds another merge: {told}" in str(error.value)
    with pytest.raises(ValueError, match="holds another merge: its experts"):
        merge_run(Request(configs[:1], inputs[0], inputs[1][::-1][:1], **options))
    text = (tmp_path / "ta" / "manifest.json").read_text()
    (tmp_path / "ta" / "manifest.json").write_text(text.replace('"label": "', '"label": "once '))
    with pytest.raises(ValueError, match="holds another merge: its label is once FT, this merge's would be FT"):
        merge_run(Request(configs[:1], *inputs, **options))
    (tmp_path / "ta" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=f"holds another merge: it was made of experts in the order {', '.join(TWO)}"):
        merge_run(Request(configs[:1], inputs[0], inputs[1][::-1], **options))
    assert not merge_run(Request(configs[:1], *inputs, **options, overwrite=True))[tmp_path / "ta"].kept
    weights = bytearray((tmp_path / "ta" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "ta" / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"model\.safetensors does not hold the weights that were written"):
        merge_run(Request(configs[:1], *inputs, **options))


def bare(run, task, folder):
    """An expert as others publish it."""
    folder.mkdir(parents=True)
    shutil.copy(run / task / "model.safetensors", folder)
    (folder / "manifest.json").write_text("[]")  # of something else
    return folder


def test_experts_of_other_tools_are_searched_as_those_of_train_py(runs, suite, tmp_path):
    base, (one, two) = runs["ft"] / "base", TWO
    given = {"search": True, "seed": 0, "coefs": (0.3, 0.7)}
    (expected,) = merge_run(
        Request([TaskArithmetic()], base, [runs["ft"] / task for task in TWO], out=tmp_path / "a", **given)
    ).values()
    mixed = [runs["ft"] / one, bare(runs["ft"], two, tmp_path / two)]
    (found,) = merge_run(Request([TaskArithmetic()], base, mixed, out=tmp_path / "b", **given)).values()
    assert same(found.params, expected.params)
    assert (found.coef, found.dev) == (expected.coef, expected.dev)
    names = {task: checkpoint.load_manifest(runs["ft"] / task)["fingerprint"] for task in TWO}
    assert checkpoint.load_manifest(tmp_path / "b" / "ta")["experts"] == names
    foreign = bare(runs["ft"], "base", tmp_path / "base"), [bare(runs["ft"], one, tmp_path / one), mixed[1]]
    with pytest.raises(ValueError, match="no expert names a suite: pass --preset lm"):
        merge_run(Request([TaskArithmetic()], *foreign, out=tmp_path / "c", **given))
    recipe = dict(suite.recipe)
    (found,) = merge_run(Request([TaskArithmetic()], *foreign, out=tmp_path / "c", **given, options=recipe)).values()
    assert (found.coef, found.dev) == (expected.coef, expected.dev)
    wrong = bare(runs["ft"], two, tmp_path / "x" / "nothing")
    with pytest.raises(
        ValueError, match="expert 'nothing' has no task of suite 'digits': name it as its task, NAME=FOLDER, of"
    ):
        merge_run(Request([TaskArithmetic()], base, [mixed[0], wrong], out=tmp_path / "d", **given))


def test_adapters_of_other_tools_merge_in_memory_as_on_disk(runs, tmp_path):
    base, (one, two) = runs["ft"] / "base", TWO
    folders.extract_lora(base, runs["ft"] / two, tmp_path / two, rank=3)
    experts = [runs["ft"] / one, tmp_path / two]
    merge_run(Request([TA], base, experts, out=tmp_path / "memory", search=False, seed=0))
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path / "disk", seed=0)))
    left, right = (checkpoint.load_leaves(tmp_path / place / "ta")[0] for place in ("memory", "disk"))
    assert same(left, right)
    whole = merge.task_arithmetic(*load_inputs(base, [runs["ft"] / task for task in TWO])[:2], coef=0.3)
    assert not same(left, whole)
    config = json.loads((tmp_path / two / "adapter_config.json").read_text())
    assert load_inputs(base, experts).notes == ()
    config["base_model_name_or_path"] = "owner/another"
    (tmp_path / two / "adapter_config.json").write_text(json.dumps(config))
    (note,) = load_inputs(base, experts).notes
    assert note.startswith(f"expert '{two}' names 'owner/another' as its base, here it is {base}: make sure")
    stated = {"base_fingerprint": checkpoint.load_manifest(base)["fingerprint"]}  # as train.py has it, on disk too
    (tmp_path / two / "manifest.json").write_text(json.dumps(stated))
    read_inputs(base, {two: tmp_path / two}, said := [])
    assert not said
    (tmp_path / two / "manifest.json").unlink()
    (tmp_path / two / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=f"expert '{two}': .* is not a readable adapter"):
        load_inputs(base, experts)


def test_a_result_that_is_not_finite_is_not_written(tmp_path):
    base = {"w": torch.ones(3, dtype=torch.float64)}
    experts = [tmp_path / name for name in ("a", "b")]
    for number, folder in enumerate((tmp_path / "base", *experts)):
        leaves = {"w": base["w"] * 1e160 * number if number else base["w"]}
        facts = {"kind": "expert" if number else "base", "task": folder.name}
        checkpoint.save_expert(folder, leaves, checkpoint.describe(leaves, **facts))
    with pytest.raises(ValueError, match="parameter 'w' of the model merged by karcher holds 3 values that are NaN"):
        merge_run(Request([Karcher()], tmp_path / "base", experts, out=tmp_path / "out", search=False, seed=0))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("manifest", [True, False], ids=["train.py", "other tools"])
def test_adapters_on_a_base_in_bfloat16_merge_in_memory_as_on_disk(manifest, tmp_path):
    torch.manual_seed(0)
    base = {f"layers.{i}.mlp.weight": torch.randn(20, 30).bfloat16() for i in range(2)}
    checkpoint.save_expert(tmp_path / "base", base, checkpoint.describe(base, kind="base"))
    rank = lora.Lora(tuple(base), rank=3, alpha=6.0)
    experts = [tmp_path / name for name in ("a", "b")]
    for place in experts:
        own = {path: torch.randn_like(leaf) * 0.1 for path, leaf in lora.init(random.key(0), base, rank).items()}
        facts = {"kind": "expert", "task": place.name, "base_fingerprint": checkpoint.fingerprint(base)}
        lora.save_peft(place, own, rank, base="x", manifest=partial(checkpoint.describe, own, **facts))
        if not manifest:
            (place / checkpoint.MANIFEST).unlink()
    for config in (TA, WeightAverage()):
        merge_run(Request([config], tmp_path / "base", experts, out=tmp_path / "memory", search=False, seed=0))
        order = on_disk.order(tmp_path / "base", experts, out=tmp_path / "disk", seed=0)
        list(on_disk.stream_run([config], order))
        left, right = (checkpoint.load_leaves(tmp_path / place / config.name)[0] for place in ("memory", "disk"))
        assert same(left, right)
        assert {leaf.dtype for leaf in left.values()} == {torch.bfloat16}


def test_analyses_score_experts_in_the_dtypes_of_base(suite):
    inputs = Inputs({"w": torch.zeros(3).bfloat16()}, {"rot90": {"w": torch.ones(3)}}, {})  # as of an adapter
    own = suite.replace(score=lambda params, *_: float(params["w"].dtype == torch.bfloat16))
    run = Run(Path(), "FT", "ft", 0, inputs, own)
    assert scores._reference({0: run}, "dev") == {0: {"rot90": 1.0}}
    assert own.score(merged_params(WeightAverage(), run, ["rot90"], seed=0)) == 1.0


def test_a_search_on_edited_dev_rows_is_another_one(runs, suite, tmp_path, monkeypatch):
    rows = {"rot90": "1", "mirror": "1"}
    monkeypatch.setattr(suite_of, "load_suite", lambda **_: suite.replace(content=lambda task, split: rows[task]))
    inputs = runs["ft"] / "base", [runs["ft"] / task for task in rows]

    def search(**options):
        (model,) = merge_run(Request([WeightAverage()], *inputs, out=tmp_path, search=True, seed=0, **options)).values()
        return model.kept

    assert (search(), search()) == (False, True)
    rows["rot90"] = "2"
    with pytest.raises(ValueError, match="wa holds another merge: the dev rows of rot90, or the tokenizer, device or"):
        search()
    assert (search(overwrite=True), search()) == (False, True)


def test_a_search_says_what_a_merge_on_disk_says(runs, suite, tmp_path):
    (_, two), plain = TWO, [bare(runs["ft"], name, tmp_path / name) for name in ("base", *TWO)]
    base, experts = plain[0], plain[1:]
    for folder, scale in zip(plain, (10000.0, 10000.0, 500000.0), strict=True):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": scale, "x": 1}))
    (experts[0] / "README.md").write_text("---\nlicense: mit\n---\n")
    given = {"search": True, "seed": 0, "options": dict(suite.recipe)}
    skips = TaskArithmetic(coef=0.3), TsvMerge(coef=0.3, skip=("*nothing*",))
    done = merge_run(Request(skips, base, experts, out=tmp_path / "memory", **given))
    ta, tsv = (model.notes for model in done.values())
    assert ta[0] == f"expert '{two}' has other positions: rope_theta 500000.0, base's is 10000.0"
    assert "skip '*nothing*' matches no parameter" in tsv
    assert "skip '*nothing*' matches no parameter" not in ta
    card = (tmp_path / "memory" / "ta" / "README.md").read_text()
    assert ta[0] in card
    assert "experts name theirs" in card
    (experts[1] / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ValueError, match=f"expert '{two}' has another kind of model in config.json"):
        merge_run(Request(skips, base, experts, out=tmp_path / "other", **given))


def test_buffers_that_differ_from_bases_are_said(suite):
    start = {"a": torch.zeros(2), "count": torch.tensor(1), "n.num_batches_tracked": torch.tensor(1)}
    other = {**start, "count": torch.tensor(2), "n.num_batches_tracked": torch.tensor(5)}
    inputs = Inputs(start, {"one": start, "two": other}, {})
    (note,) = notes_of(TaskArithmetic(coef=0.3), inputs)
    assert note == "parameter 'count', not floating-point, differs from base's in an expert: base's is used"
    assert notes_of(TaskArithmetic(coef=0.3), inputs._replace(experts={"one": start})) == []


def test_experts_of_unequal_norms_and_a_choice_at_the_edge_are_said(runs, tmp_path):
    base, experts = find_inputs(runs["ft"])
    start, _ = checkpoint.load_leaves(base)
    leaves, _ = checkpoint.load_leaves(experts[0])
    long = {path: start[path] + 9 * (leaf - start[path]) for path, leaf in leaves.items()}
    checkpoint.save_expert(tmp_path / "long", long, checkpoint.describe(long))
    given = {"out": tmp_path / "out", "search": False, "seed": 0}
    named = [Path(f"long={tmp_path / 'long'}"), *experts[1:]]
    done = merge_run(Request([TaskArithmetic(coef=0.1), WeightAverage()], base, named, **given))
    said = list(summary(done))
    assert len(said) == 3
    assert re.match(r"note: the task vector of 'long' .* times as long as that of", said[1])
    assert said[1].removeprefix("note: ") in (tmp_path / "out" / "ta" / "README.md").read_text()
    again = merge_run(Request([TaskArithmetic(coef=0.1), WeightAverage()], base, named, **given))
    assert said[1] in list(summary(again))
    edge = summary({tmp_path: done[tmp_path / "out" / "ta"]._replace(edge="largest")})
    assert "coef 0.1 (largest of those tried: --widen or --grid tries more)" in next(iter(edge))


def test_experts_that_equal_the_base_are_said_as_each_model_is_done(runs, tmp_path):
    base, _ = find_inputs(runs["ft"])
    told, named = [], [Path(f"{name}={base}") for name in ("a", "b")]
    given = {"out": tmp_path / "out", "search": False, "seed": 0}
    done = merge_run(Request([TaskArithmetic(coef=0.1), WeightAverage()], base, named, **given), told.append)
    assert told == list(summary(done))
    assert told[1] == f"note: experts 'a' and 'b' are one folder, {base}: it is merged 2 times"
    assert told[2].startswith("note: all experts equal the base")


def test_the_places_of_a_stack_of_one_folder_name_it_once(tmp_path):
    file = tmp_path / "A" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"")
    stack = Path(f"{file.parent}[0:2]+{file.parent}[3:4]")
    places = in_memory._files_of(file.parent, Inputs({}, {}, {}, {"s": stack}))
    assert places == {"base": [file], "expert 's'": [file]}
    assert json.loads(in_memory.sources_text(places, {}))["expert 's'"] == {file.name: str(file)}


def test_a_search_in_which_all_coefficients_tie_says_so():
    flat = Merged({}, 0.1, {"x": 5.0}, ((0.1, 5.0), (0.2, 5.0)))
    (note,) = tied(flat)
    assert note.startswith("all 2 coefficients have the same dev score, 5.00: 0.1 is only the smallest")
    assert tied(flat._replace(curve=((0.1, 5.0), (0.2, 5.5)))) == tied(flat._replace(curve=((0.1, 5.0),))) == []
