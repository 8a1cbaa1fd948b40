"""The choice among a run's snapshots: the same one for all tasks, by merged dev score."""

import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch

from smat_fn import checkpoint, merge
from smat_fn.checkpoint import same
from smat_fn.config import Fisher, TaskArithmetic, Training, WeightAverage
from smat_fn.evaluate import Scorer
from smat_fn.scripts.merge import commands, on_disk, settings
from smat_fn.scripts.merge.experts.inputs import Inputs, load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.search.choosing import Merged
from smat_fn.scripts.merge.search.snapshots import choose_snapshot, find_snapshots
from smat_fn.scripts.run_folder import find_inputs

TASKS = "mirror", "rot90"
LONG = Training(steps=6, lr=2e-3, schedule="constant")


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    """A run with two snapshots, to be read only."""
    folder = tmp_path_factory.mktemp("snapshots") / "run"
    train(folder, "ft", tasks=TASKS, training=LONG, keep_snapshots=2)
    return folder


def test_every_snapshot_is_searched_and_the_best_is_written(run, suite, tmp_path):
    base, experts = find_inputs(run)
    snapshots = find_snapshots(run, experts)
    assert list(snapshots) == [1, 2, 3]
    assert snapshots[3] == experts
    options = {"search": True, "seed": 0, "coefs": (0.5, 1.0), "snapshots": snapshots}
    configs = [TaskArithmetic(), WeightAverage()]
    lines = []
    made = merge_run(Request(configs, base, experts, out=tmp_path, **options), report=lines.append)
    for config, (folder, found) in zip(configs, made.items(), strict=True):
        curve = {}
        for index, folders in snapshots.items():
            inputs = load_inputs(base, folders)
            candidates = [0.5, 1.0] if config.name == "ta" else [None]
            scored = {}
            for coef in candidates:
                params = merge.merge_by(config, inputs.base, inputs.experts, coef=coef)
                scored[coef] = fmean(suite.score(params, task, "dev") for task in TASKS)
            best = max(scored, key=scored.get)
            curve[index] = [index, scored[best], best]
        chosen = max(curve, key=lambda index: (curve[index][1], index))
        manifest = checkpoint.load_manifest(folder)
        assert manifest["snapshot"]["curve"] == list(curve.values())
        assert manifest["tried"]["candidates"] == found.tried.candidates == 3 * len(candidates)  # of all snapshots
        assert manifest["tried"]["scores"] == 3 * len(candidates) * len(TASKS)
        assert manifest["snapshot"]["index"] == found.snapshot == chosen
        assert manifest["snapshot"]["steps"] == dict.fromkeys(TASKS, 2 * chosen)
        prints = {path.name: checkpoint.load_manifest(path)["fingerprint"] for path in snapshots[chosen]}
        assert manifest["experts"] == prints
        inputs = load_inputs(base, snapshots[chosen])
        assert same(found.params, merge.merge_by(config, inputs.base, inputs.experts, coef=found.coef))
        assert f"Snapshot {chosen} of 3 was chosen on dev" in (folder / "README.md").read_text()
        assert any(f", snapshot {chosen}, dev " in line for line in lines)
    again = merge_run(Request(configs, base, experts, out=tmp_path, **options))
    assert [model.kept for model in again.values()] == [True, True]
    assert [model.snapshot for model in again.values()] == [model.snapshot for model in made.values()]
    with pytest.raises(ValueError, match="holds another merge"):
        merge_run(Request(configs, base, experts, out=tmp_path, **options | {"snapshots": {3: experts}}))


def test_depth_and_a_coefficient_for_each_block_go_with_snapshots(run, tmp_path):
    """LiNeS is in the vector that blocks are searched on, and the manifest's rules give the same merge on disk."""
    base, experts = find_inputs(run)
    options = {"search": True, "seed": 0, "coefs": (0.4, 1.2), "snapshots": find_snapshots(run, experts)}
    config, depth = TaskArithmetic(), {"low": 0.3, "high": 1.0}
    (found,) = merge_run(Request([config], base, experts, out=tmp_path, lines=(0.3, 1.0), sweeps=1, **options)).values()
    chosen = options["snapshots"][found.snapshot]
    inputs = load_inputs(base, chosen)
    vector = merge.lines(merge.vector_by(config, inputs.base, inputs.experts), **depth)
    assert same(found.params, merge.apply_blocks(inputs.base, vector, found.layers.coefs))
    manifest = checkpoint.load_manifest(tmp_path / "ta")
    rules, factors = manifest["hyperparameters"]["coefs"], merge.lines_coefs(vector, **depth)
    for path, factor in factors.items():
        assert merge.coef_of(path, rules) == found.layers.coefs[merge.block_prefix(path)] * factor
    assert len({*factors.values()}) == 2
    order = on_disk.order(base, chosen, out=tmp_path / "disk", seed=0, coefs=rules)
    list(on_disk.stream_run([config], order))
    for path, leaf in checkpoint.load_leaves(tmp_path / "disk" / "ta")[0].items():
        torch.testing.assert_close(leaf, found.params[path], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.lines is"):
        merge_run(Request([config], base, experts, out=tmp_path, lines=(0.5, 1.0), sweeps=1, **options))


def test_the_later_of_equal_snapshots_wins(run):
    base, experts = find_inputs(run)
    snapshots = find_snapshots(run, experts)
    scores = {1: 40.0, 2: 70.0, 3: 70.0}
    order = []

    def merge_at(inputs):
        assert isinstance(inputs, Inputs)
        index = next(iter(inputs.manifests.values())).get("snapshot", {}).get("index", 3)
        order.append(index)
        return Merged({}, 0.1 * index, {"mirror": scores[index] - 5, "rot90": scores[index] + 5}, ())

    last = load_inputs(base, experts)
    found = choose_snapshot(base, snapshots, last, merge_at)
    assert order == [3, 2, 1]
    assert found.facts["index"] == 3
    assert [score for _, score, _ in found.facts["curve"]] == [40.0, 70.0, 70.0]
    scores[1] = 71.0
    assert choose_snapshot(base, snapshots, last, merge_at).facts["index"] == 1


def test_scores_of_one_snapshot_are_not_those_of_another(run, suite):
    calls = []

    def counted(params, task, split):
        calls.append(task)
        return suite.score(params, task, split)

    scorer = Scorer(suite.replace(score=counted), about={"experts": 1})
    for own in (scorer, scorer.of({"experts": 2}), scorer.of({"experts": 1})):
        own.once(lambda: suite.base, "rot90", "dev", model={"merger": "ta"}, name="x")
    assert len(calls) == 2  # the third is kept


def test_snapshots_that_are_not_there_or_of_another_run_are_refused(run, runs, tmp_path):
    with pytest.raises(ValueError, match=r"holds no common snapshots \(mirror 0, .*train with --keep-snapshots"):
        find_snapshots(runs["ft"], find_inputs(runs["ft"])[1])
    copy = shutil.copytree(run, tmp_path / "swapped")
    for place, own in (("rot90", "mirror"), ("mirror", "rot90")):
        shutil.rmtree(copy / "snapshots" / "1" / place)
        shutil.copytree(run / "snapshots" / "1" / own, copy / "snapshots" / "1" / place)
    with pytest.raises(ValueError, match=r"1/mirror is from another training run than .*1/rot90 is from another"):
        find_snapshots(copy, find_inputs(copy)[1])
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "snapshots" / "1" / "rot90")
    manifest = checkpoint.load_manifest(copy / "snapshots" / "2" / "mirror") | {"seed": 5}
    params = checkpoint.load_leaves(copy / "snapshots" / "2" / "mirror")[0]
    checkpoint.save_expert(copy / "snapshots" / "2" / "mirror", params, manifest, overwrite=True)
    place = copy / "snapshots" / "1" / "mirror"
    rows = checkpoint.load_manifest(place) | {"train_rows": {"hash": "of other rows"}}
    checkpoint.save_expert(place, params, rows, overwrite=True)
    other = "is from another training run than"
    with pytest.raises(ValueError, match=rf"1/mirror {other}.*1/rot90 is not a checkpoint.*2/mirror {other}"):
        find_snapshots(copy, find_inputs(copy)[1])


def test_statistics_of_every_snapshot_are_asked_for_first(run, tmp_path):
    base, experts = find_inputs(run)
    options = {"out": tmp_path / "out", "search": True, "seed": 0, "snapshots": find_snapshots(run, experts)}
    with pytest.raises(ValueError, match=r"no fisher\.safetensors in"):
        merge_run(Request([Fisher()], base, experts, **options))


def test_snapshots_of_one_task_are_merged_as_any_experts(run, tmp_path, monkeypatch):
    places = {"1": run / "snapshots" / "1" / "rot90", "2": run / "snapshots" / "2" / "rot90", "last": run / "rot90"}
    named = [Path(f"{name}={place}") for name, place in places.items()]
    order = on_disk.order(run / "base", named, out=tmp_path, seed=0)
    list(on_disk.stream_run([WeightAverage()], order))
    merged = checkpoint.load_leaves(tmp_path / "wa")[0]
    every = [checkpoint.load_leaves(path)[0] for path in places.values()]
    assert same(merged, merge.weight_average(every))
    (tmp_path / "wa" / checkpoint.SOURCES).unlink()  # as of a model from elsewhere: the recipe's names count
    monkeypatch.chdir(run)
    commands.from_recipe(settings.FromRecipe(tmp_path / "wa" / checkpoint.RECIPE, tmp_path / "again"))
    assert same(checkpoint.load_leaves(tmp_path / "again" / "wa")[0], merged)
