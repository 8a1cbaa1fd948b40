"""AdaMerging and RegMean++ of a trained run: rows of dev or train, never of test, and a model that says what it is."""

import pytest

from smat_fn import checkpoint, random
from smat_fn.checkpoint import same
from smat_fn.merge.adamerging import adamerging
from smat_fn.merge.reg_mean_plus import reg_mean_plus
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.settings import AdaMerging, RegMeanPlus
from smat_fn.scripts.merge.subcommands import by_data
from smat_fn.scripts.merge.subcommands.statistics import batches_of
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.suites.suite import BaseSuite

TASKS = "mirror", "negative", "rot90", "stripes"
ADA = {"layer_wise": True, "steps": 2, "lr": 0.01, "start": 0.3, "batch": 25, "seed": 4, "suite_options": {}}
REG = {"scale": 0.9, "rows": 16, "split": "train", "seed": 4, "suite_options": {}}


@pytest.fixture
def watched(suite, monkeypatch):
    """The suite whose scores may not be of test."""

    def score(params, task, split):
        assert split == "dev"
        return suite.score(params, task, split)

    own = suite.replace(score=score)
    monkeypatch.setattr(by_data, "suite_and_part", lambda *_, **given: (own, None))
    return own


def test_adamerging_takes_dev_rows(runs, watched, tmp_path):
    (line,) = by_data.adapt(AdaMerging(run=runs["ft"], out=tmp_path, **ADA))
    inputs = load_inputs(*find_inputs(runs["ft"]))
    key = random.fold_in(random.key(4), "adamerging")
    batches = {}
    for task in TASKS:
        ((images, labels), _), = watched.dev_batches(task)  # fmt: skip
        batches[task] = [(images[a:b], labels[a:b]) for a, b in ((0, 21), (21, 42), (42, 64))]
    losses = {task: watched.loss_fn(task) for task in TASKS}
    expected = adamerging(losses, inputs.base, inputs.experts, batches, key, steps=2, lr=0.01, start=0.3)
    params, manifest = checkpoint.load_leaves(tmp_path / "adamerging")
    assert same(params, expected.params)
    assert manifest["coefs"] == expected.coefs
    assert manifest["hyperparameters"] == {"layer_wise": True, "steps": 2, "lr": 0.01, "start": 0.3, "batch": 25}
    assert manifest["dev"] == {task: watched.score(params, task, "dev") for task in TASKS}
    assert line.startswith(f"merged: {tmp_path / 'adamerging'}, dev ")
    with pytest.raises(ValueError, match="adamerging exists"):
        next(by_data.adapt(AdaMerging(run=runs["ft"], out=tmp_path, **ADA)))


def test_reg_mean_plus_takes_training_rows(runs, watched, tmp_path):
    watched.recipe = {**watched.recipe, "data": str(tmp_path / "rows")}
    list(by_data.regress(RegMeanPlus(run=runs["ft"], out=tmp_path, **REG)))
    inputs = load_inputs(*find_inputs(runs["ft"]))
    key = random.fold_in(random.key(4), "statistics")
    batches = {task: batches_of(watched, task, "train", 16, random.fold_in(key, task)) for task in TASKS}
    losses = {task: watched.loss_fn(task) for task in TASKS}
    params, manifest = checkpoint.load_leaves(tmp_path / "reg_mean_plus")
    assert same(params, reg_mean_plus(losses, inputs.base, inputs.experts, batches))
    assert manifest["experts"] == {task: m["fingerprint"] for task, m in inputs.manifests.items()}
    assert manifest["suite"]["data"] == str(tmp_path / "rows")  # from sources.json, which is not published
    assert str(tmp_path) not in (tmp_path / "reg_mean_plus" / checkpoint.MANIFEST).read_text()


def test_what_cannot_be_merged_is_refused(runs, suite, tmp_path, monkeypatch):
    language = BaseSuite(**{**vars(suite), "name": "trace"})
    monkeypatch.setattr(by_data, "suite_and_part", lambda *_, **given: (language, None))
    with pytest.raises(ValueError, match="adamerging requires classifiers: suite 'trace' has none"):
        list(by_data.adapt(AdaMerging(run=runs["ft"], out=tmp_path, **ADA)))
    with pytest.raises(ValueError, match="batch is 0, must be at least 1"):
        list(by_data.adapt(AdaMerging(run=runs["ft"], out=tmp_path, **ADA | {"batch": 0})))
    assert not any(tmp_path.iterdir())
