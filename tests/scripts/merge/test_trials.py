"""A search that then tries other weights of the experts, on dev."""

import json
from statistics import fmean

import pytest

from smat_fn import checkpoint, merge
from smat_fn.config import TaskArithmetic, Ties, TsvMerge, WeightedAverage
from smat_fn.evaluate import Scorer
from smat_fn.scripts.commands import merge as command
from smat_fn.scripts.merge import commands, in_memory, settings
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.inputs import load_inputs
from smat_fn.scripts.run_folder import find_inputs

TASKS = ("mirror", "rot90")
TIES = Ties(keep=0.4, aggregate="sum", scope="global")


def inputs_of(runs):
    base, experts = find_inputs(runs["ft"])
    return base, [path for path in experts if path.name in TASKS]


def searched(runs, out, config=None, *, trials=8, **options):
    given = {"search": True, "seed": 3, "coefs": (0.5, 1.5), **options}
    (found,) = merge_run(
        Request([config or TaskArithmetic()], *inputs_of(runs), out=out, trials=trials, **given)
    ).values()
    return found


def brute_force(config, runs, suite, *, start, trials=8):
    """The choice of `select_weights` by dev scores of merges that are made one by one, and its model."""
    inputs = load_inputs(*inputs_of(runs))

    def merged(weights):
        return merge.merge_by(merge.with_weights(config, weights), inputs.base, inputs.experts)

    def score(weights):
        return fmean(suite.score(merged(weights), task, "dev") for task in TASKS)

    found = merge.select_weights(start, score, trials=trials, seed=3)
    return found, merged(found.best)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (TaskArithmetic(), {}),
        (Ties(keep=0.4, aggregate="sum", scope="global", weights={"rot90": 0.5}), {"rot90": 0.5}),
        (TsvMerge(coef=0.8), {}),
        (WeightedAverage(weights=(0.2, 1.0)), {"mirror": 0.2, "rot90": 1.0}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_best_coefficient_comes_first_then_the_weights_of_the_best_dev_score(config, given, runs, suite, tmp_path):
    coefs = {} if config.name in ("ta", "ties") else {"coefs": ()}
    found = searched(runs, tmp_path / "it", config, **coefs)
    alone = searched(runs, tmp_path / "alone", config, trials=0, **coefs)
    assert (found.coef, found.curve) == (alone.coef, alone.curve)
    at = config if found.coef is None else type(config)(**{**vars(config), "coef": found.coef})
    expected, params = brute_force(at, runs, suite, start=dict.fromkeys(TASKS, 1.0) | given)
    assert found.weighted == expected
    assert list(found.weighted.best) == list(TASKS)
    assert checkpoint.same(found.params, params)
    assert found.dev == {task: suite.score(params, task, "dev") for task in TASKS}
    assert fmean(found.dev.values()) == expected.score >= fmean(alone.dev.values())
    assert found.tried.candidates == alone.tried.candidates + 8
    folder = tmp_path / "it" / config.name
    commands.from_recipe(settings.FromRecipe(folder / checkpoint.RECIPE, tmp_path / "disk"))
    assert checkpoint.same(checkpoint.load_leaves(tmp_path / "disk" / config.name)[0], found.params)


def test_card_manifest_and_summary_hold_the_weights_and_another_number_of_trials_is_another_merge(
    runs, tmp_path, capsys
):
    found = searched(runs, tmp_path)
    folder = tmp_path / "ta"
    manifest = checkpoint.load_manifest(folder)
    assert manifest["hyperparameters"]["weights"] == found.weighted.best
    assert manifest["dev_weights"] == [[weights, score] for weights, score in found.weighted.curve]
    assert manifest["asked"]["trials"] == 8
    text = " ".join(f"{name} {weight:g}" for name, weight in found.weighted.best.items())
    card = (folder / "README.md").read_text()
    assert "Then CMA-ES tried 8 models with other weights of the experts. The best dev score, " in card
    assert f"{found.weighted.score:.2f} at {text.replace(' rot90', ', rot90')}, is optimistic" in card
    assert f"that at the first weights (mirror 1, rot90 1) is {found.weighted.curve[0][1]:.2f}." in card
    assert f", coef {found.coef:g}" in (line := next(iter(in_memory.summary({folder: found}))))
    assert line.endswith(f", weights {text}, dev {found.weighted.score:.2f}")
    said = [own for own in capsys.readouterr().err.splitlines() if ", trial " in own]
    rising = [score for _, score in found.weighted.curve]
    rising = [score for place, score in enumerate(rising) if place and score > max(rising[:place])]
    assert [own.partition(": dev ")[2].partition(",")[0] for own in said] == [f"{score:.2f}" for score in rising]
    again = searched(runs, tmp_path)
    assert (again.kept, again.weighted, again.coef) == (True, found.weighted, found.coef)
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.trials is 8, this merge's would be 9"):
        searched(runs, tmp_path, trials=9)
    with pytest.raises(ValueError, match=r"its asked\.trials is 8, this merge's would be left out"):
        searched(runs, tmp_path, trials=0)


def test_a_killed_search_resumes_on_the_same_path_and_scores_no_model_twice(runs, tmp_path, monkeypatch):
    calls, compute = [], Scorer._score

    def counted(self, params, task, split, repeat, key, about):
        calls.append((about["name"], task))
        if len(calls) == dies:
            raise KeyboardInterrupt
        return compute(self, params, task, split, repeat, key, about)

    monkeypatch.setattr(Scorer, "_score", counted)
    dies = None
    whole, plain = searched(runs, tmp_path / "whole", trials=14), list(calls)
    assert len(plain) == 2 * (2 + 14)
    calls.clear()
    dies = 2 * (2 + 9)  # in the second generation
    with pytest.raises(KeyboardInterrupt):
        searched(runs, tmp_path / "killed", trials=14)
    assert calls == plain[:dies]
    calls.clear()
    dies = None
    resumed = searched(runs, tmp_path / "killed", trials=14)
    assert calls == plain[21:], "the score that was cut off, and those after it"
    assert (resumed.weighted, resumed.dev) == (whole.weighted, whole.dev)
    assert checkpoint.same(resumed.params, whole.params)
    calls.clear()
    searched(runs, tmp_path / "killed", trials=15, overwrite=True)
    assert len(calls) == 2, "more trials begin with the same"


def test_trials_begin_with_the_best_options_and_sparsity(runs, suite, tmp_path):
    found = searched(runs, tmp_path / "over", TIES, over={"keep": (0.9, 0.2)})
    alone = searched(runs, tmp_path / "alone", TIES, trials=0, over={"keep": (0.9, 0.2)})
    assert (found.options, found.coef, found.tuned) == (alone.options, alone.coef, alone.tuned)
    at = Ties(coef=found.coef, aggregate="sum", scope="global", **found.options)
    expected, params = brute_force(at, runs, suite, start=dict.fromkeys(TASKS, 1.0))
    assert found.weighted == expected
    assert checkpoint.same(found.params, params)
    made = checkpoint.load_manifest(tmp_path / "over/ties")["hyperparameters"]
    assert (made["keep"], made["weights"]) == (found.options["keep"], expected.best)
    sparse = searched(runs, tmp_path / "sparse", TIES, calibration={"ties": 0.2})
    made = checkpoint.load_manifest(tmp_path / "sparse/ties")["hyperparameters"]
    assert made == {**settings_of(sparse.calibration.config), "coef": sparse.coef, "weights": sparse.weighted.best}


def settings_of(config):
    return json.loads(json.dumps(config.settings()))


@pytest.mark.parametrize(
    ("merger", "choice", "text"),
    [
        (command.All(), {}, "--trials tries weights of the experts with one merger: name it in place of all"),
        (TaskArithmetic(coef=0.3), {"search": False}, "--trials requires --search"),
        (command.MERGERS[0](), {}, "--trials tries weights of the experts, and wa takes none: leave it out"),
        (TIES, {"snapshots": True}, "--trials is not available with --snapshots: search one, as --run RUN/snapshots/"),
        (TIES, {"per_layer": 1}, "--trials and --per-layer both begin at the best coefficient: leave one out"),
        (TIES, {"trials": 7}, "--trials is 7, must be an integer of at least 8: a generation of 4 weights"),
        (TIES, {"trials": -8}, "--trials is -8, must be an integer of at least 8"),
        (Ties(weights={"rot90": 0.0, "mirror": 0.0, "negative": 0.0}), {}, "--trials: CMA-ES needs two experts at"),
    ],
)
def test_what_cannot_be_tried_is_an_error_before_anything_is_loaded(merger, choice, text, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory, "load_inputs", lambda *args, **options: pytest.fail("weights were read"))
    options = command.Merge(
        merger=merger, inputs=command.Inputs(run=runs["ft"]), machine=command.Machine(),
        choice=command.Choices(**{"search": True, "trials": 8, **choice}), output=command.Outputs(out=tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^{text}"):
        command.main(options)
    assert list(tmp_path.iterdir()) == []
