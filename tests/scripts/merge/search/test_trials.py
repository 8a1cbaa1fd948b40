"""A search that then tries other weights of the experts, on dev."""

import json
from statistics import fmean

import pytest

from smat_fn import checkpoint, merge
from smat_fn.config import Dare, TaskArithmetic, Ties, TsvMerge, WeightedAverage
from smat_fn.evaluate import Scorer
from smat_fn.scripts.commands import merge as command
from smat_fn.scripts.merge import commands, in_memory, settings
from smat_fn.scripts.merge.experts.inputs import load_inputs, mask_key
from smat_fn.scripts.merge.in_memory import Request, merge_run
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


def brute_force(config, runs, suite, *, over=("weights",), trials=8):
    """The choice of `select_numbers` by dev scores of merges that are made one by one, and its model."""
    inputs = load_inputs(*inputs_of(runs))

    def merged(numbers):
        return merge.merge_by(merge.with_numbers(config, numbers), inputs.base, inputs.experts, key=mask_key(3))

    def score(numbers):
        return fmean(suite.score(merged(numbers), task, "dev") for task in TASKS)

    found = merge.select_numbers(config, TASKS, score, over=over, trials=trials, seed=3)
    return found, merged(found.best)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (TaskArithmetic(), {"weights": (1.0, 1.0)}),
        (Ties(keep=0.4, aggregate="sum", scope="global", weights={"rot90": 0.5}), {"weights": (1.0, 0.5)}),
        (TsvMerge(coef=0.8), {"weights": (1.0, 1.0)}),
        (WeightedAverage(weights=(0.2, 1.0)), {"weights": (0.2, 1.0)}),
        (Ties(keep=0.4, aggregate="sum", scope="global", densities={"rot90": 0.9}), {"densities": (0.4, 0.9)}),
        (Dare(drop_prob=0.3), {"weights": (1.0, 1.0), "densities": (0.7, 0.7)}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_best_coefficient_comes_first_then_the_numbers_of_the_best_dev_score(config, start, runs, suite, tmp_path):
    coefs, over = {"coefs": ()} if config.name in ("tsv_merge", "weighted_average") else {}, tuple(start)
    trials = 6 if config.name == "tsv_merge" else 8  # a generation: its merges take longest; the others begin another
    found = searched(runs, tmp_path / "it", config, trials_over=over, trials=trials, **coefs)
    alone = searched(runs, tmp_path / "alone", config, trials=0, **coefs)
    assert (found.coef, found.curve) == (alone.coef, alone.curve)
    at = config if found.coef is None else type(config)(**{**vars(config), "coef": found.coef})
    expected, params = brute_force(at, runs, suite, over=over, trials=trials)
    assert found.trials == expected
    assert found.trials.curve[0][0] == {option: dict(zip(TASKS, own, strict=True)) for option, own in start.items()}
    assert checkpoint.same(found.params, params)
    assert found.dev == {task: suite.score(params, task, "dev") for task in TASKS}
    assert fmean(found.dev.values()) == expected.score >= fmean(alone.dev.values())
    assert found.tried.candidates == alone.tried.candidates + trials
    folder = tmp_path / "it" / config.name
    commands.from_recipe(settings.FromRecipe(folder / checkpoint.RECIPE, tmp_path / "disk"))
    assert checkpoint.same(checkpoint.load_leaves(tmp_path / "disk" / config.name)[0], found.params)
    made = checkpoint.load_manifest(folder)
    assert "density" not in made or made["density"] == checkpoint.load_manifest(tmp_path / "disk/ties")["density"]
    again = searched(runs, tmp_path / "it", config, trials_over=over, trials=trials, **coefs)
    assert (again.kept, again.trials) == (True, expected)


def test_card_manifest_and_summary_hold_the_weights_and_another_number_of_trials_is_another_merge(
    runs, tmp_path, capsys
):
    found = searched(runs, tmp_path)
    folder = tmp_path / "ta"
    manifest = checkpoint.load_manifest(folder)
    best = found.trials.best["weights"]
    assert manifest["hyperparameters"]["weights"] == best
    assert manifest["dev_weights"] == [[own["weights"], score] for own, score in found.trials.curve]
    assert manifest["asked"]["trials"] == 8
    text = "weights " + " ".join(f"{name} {weight:g}" for name, weight in best.items())
    card = (folder / "README.md").read_text()
    assert "Then CMA-ES tried 8 models with other weights of the experts. The best dev score, " in card
    assert f"{found.trials.score:.2f} at {text.replace(' rot90', ', rot90')}, is optimistic" in card
    assert f"the first ones (weights mirror 1, rot90 1) score {found.trials.curve[0][1]:.2f}." in card
    assert f", coef {found.coef:g}" in (line := next(iter(in_memory.summary({folder: found}))))
    assert line.endswith(f", {text}, dev {found.trials.score:.2f}")
    said = [own for own in capsys.readouterr().err.splitlines() if ", trial " in own]
    rising = [score for _, score in found.trials.curve]
    rising = [score for place, score in enumerate(rising) if place and score > max(rising[:place])]
    assert [own.partition(": dev ")[2].partition(",")[0] for own in said] == [f"{score:.2f}" for score in rising]
    again = searched(runs, tmp_path)
    assert (again.kept, again.trials, again.coef) == (True, found.trials, found.coef)
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.trials is 8, this merge's would be 9"):
        searched(runs, tmp_path, trials=9)
    with pytest.raises(ValueError, match=r"its asked\.trials is 8, this merge's would be left out"):
        searched(runs, tmp_path, trials=0)


def test_card_and_summary_hold_densities_too_and_other_numbers_are_another_merge(runs, tmp_path):
    found = searched(runs, tmp_path, TIES, trials_over=("weights", "densities"))
    made = checkpoint.load_manifest(tmp_path / "ties")
    assert {option: made["hyperparameters"][option] for option in found.trials.best} == found.trials.best
    assert made["dev_densities"] == [[own["densities"], score] for own, score in found.trials.curve]
    assert made["asked"]["trials_over"] == ["weights", "densities"]
    lists = {option: ", ".join(f"{name} {x:g}" for name, x in own.items()) for option, own in found.trials.best.items()}
    card = (tmp_path / "ties/README.md").read_text()
    assert "Then CMA-ES tried 8 models with other weights and densities of the experts." in card
    assert f" at weights {lists['weights']}; densities {lists['densities']}, is optimistic" in card
    assert "the first ones (weights mirror 1, rot90 1; densities mirror 0.4, rot90 0.4) score " in card
    line = next(iter(in_memory.summary({tmp_path / "ties": found})))
    assert f", weights {lists['weights']}, densities {lists['densities']}, dev ".replace(", rot90", " rot90") in line
    with pytest.raises(
        ValueError, match=r"its asked\.trials_over is \['weights', 'densities'\], this merge's would be"
    ):
        searched(runs, tmp_path, TIES)


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
    assert (resumed.trials, resumed.dev) == (whole.trials, whole.dev)
    assert checkpoint.same(resumed.params, whole.params)
    calls.clear()
    searched(runs, tmp_path / "killed", trials=15, overwrite=True)
    assert len(calls) == 2, "more trials begin with the same"


def test_trials_begin_with_the_best_options_and_sparsity(runs, suite, tmp_path):
    found = searched(runs, tmp_path / "over", TIES, over={"keep": (0.9, 0.2)})
    alone = searched(runs, tmp_path / "alone", TIES, trials=0, over={"keep": (0.9, 0.2)})
    assert (found.options, found.coef, found.tuned) == (alone.options, alone.coef, alone.tuned)
    at = Ties(coef=found.coef, aggregate="sum", scope="global", **found.options)
    expected, params = brute_force(at, runs, suite)
    assert found.trials == expected
    assert checkpoint.same(found.params, params)
    made = checkpoint.load_manifest(tmp_path / "over/ties")["hyperparameters"]
    assert (made["keep"], made["weights"]) == (found.options["keep"], expected.best["weights"])
    sparse = searched(runs, tmp_path / "sparse", TIES, calibration={"ties": 0.2})
    made = checkpoint.load_manifest(tmp_path / "sparse/ties")["hyperparameters"]
    assert made == {**settings_of(sparse.calibration.config), "coef": sparse.coef, **sparse.trials.best}


def settings_of(config):
    return json.loads(json.dumps(config.settings()))


@pytest.mark.parametrize(
    ("merger", "choice", "text"),
    [
        (command.All(), {}, "--trials tries weights of the experts with one merger: name it in place of all"),
        (TaskArithmetic(coef=0.3), {"search": False}, "--trials requires --search"),
        (command.MERGERS[0](), {}, "--trials: wa takes no weights by expert, leave it out"),
        (
            TaskArithmetic(),
            {"trials_over": ("densities",)},
            "--trials: ta takes no densities by expert, leave --trials-o",
        ),
        (
            TIES,
            {"trials_over": ("weights", "weights")},
            r"--trials-over is \('weights', 'weights'\), must be weights or",
        ),
        (TIES, {"trials_over": ("densities",), "trials": 0}, "--trials-over densities requires --trials"),
        (TIES, {"snapshots": True}, "--trials is not available with --snapshots: search one, as --run RUN/snapshots/"),
        (TIES, {"per_layer": 1}, "--trials and --per-layer both begin at the best coefficient: leave one out"),
        (TIES, {"trials": 7}, "--trials is 7, must be an integer of at least 8: a generation of 4 weights"),
        (TIES, {"trials": -8}, "--trials is -8, must be an integer of at least 8"),
        (
            Ties(weights={"rot90": 0.0, "mirror": 0.0, "negative": 0.0}),
            {},
            "--trials: CMA-ES needs at least two weights",
        ),
        (
            TIES,
            {"trials_over": ("weights", "densities")},
            "--trials is 8, must be an integer of at least 10: a generation",
        ),
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
