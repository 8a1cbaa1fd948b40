"""A coefficient chosen by any score of the merged folder: as by brute force, one candidate at a time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smat_fn import execution, merge
from smat_fn.config import Sce, TallMask, TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import merge_folders, plan, run, search_folders
from smat_fn.folders.files import Hashing
from smat_fn.merge.around.select import Tuned
from smat_fn.merge.parts.windows import Scratch

TA = TaskArithmetic(coef=None)
GRID = (0.9, 0.1, 0.5, 0.3)


@pytest.fixture
def family_in(family, folders, tmp_path):
    """(base, experts) as trees and as folders, in float32."""
    trees = family(torch.float32, count=2)
    return trees, folders.save_family(tmp_path, *trees)


class Scoring:
    """Minus the distance of the first parameters from a target; notes the folders that it was called with."""

    def __init__(self, folders, target):
        self.load, self.target, self.calls = folders.load, target, []

    def of(self, tree):
        return -float((tree["matrix"] - self.target["matrix"]).norm())

    def __call__(self, folder):
        self.calls.append(folder)
        assert [own.name for own in folder.parent.iterdir()] == [folder.name], "one candidate at a time"
        return self.of(self.load(folder))


@pytest.mark.parametrize("config", [TA, Ties(keep=0.5, aggregate="sum", scope="global")], ids=["ta", "ties"])
def test_the_choice_is_that_of_brute_force_and_candidates_have_the_bytes_of_the_merge(
    config, family_in, folders, tmp_path
):
    ((base, experts), places), kept = family_in, {}
    target = merge.merge_by(replace(config, coef=0.46), base, experts)
    scoring = Scoring(folders, target)

    def score(folder):
        kept[folder.name] = {file.name: file.read_bytes() for file in folder.glob("model*")}
        return scoring(folder)

    out, curve = tmp_path / "out/it", []
    found = search_folders(config, *places, out, score=score, coefs=GRID, report=curve.append, shard_size=400)
    brute = {coef: scoring.of(merge.merge_by(replace(config, coef=coef), base, experts)) for coef in sorted(GRID)}
    assert dict(found.curve) == pytest.approx(brute, rel=1e-5)
    assert [coef for coef, _ in found.curve] == sorted(GRID)
    assert found.config == replace(config, coef=max(brute, key=brute.get)) == replace(config, coef=0.5)
    assert (found.score, found.edge) == (dict(found.curve)[0.5], "")
    assert [own.name for own in curve] == ["it 0.1", "it 0.3", "it 0.5", "it 0.9"]
    assert not list(tmp_path.glob("out*")), "neither the model, nor a candidate, nor a file of scores"
    merge_folders(found.config, *places, out, shard_size=400)
    assert kept["it-0.5"] == {file.name: file.read_bytes() for file in out.glob("model*")}
    assert len(kept["it-0.5"]) > 2


def test_widening_follows_a_rising_score_and_stops_where_it_falls(family_in, tmp_path):
    _, places = family_in

    def search(best, grid=(0.3, 0.4), **options):
        at = []

        def score(folder):
            at.append(float(folder.name.removeprefix("ta-")))
            return -abs(at[-1] - best)

        found = search_folders(TA, *places, tmp_path / "ta", score=score, coefs=grid, **options)
        return found.config.coef, found.edge, at

    assert search(0.7, widen=True) == (0.7, "", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert search(0.08, widen=True) == (0.075, "", [0.3, 0.4, 0.15, 0.075, 0.0375])
    assert search(0.7) == (0.4, "largest", [0.3, 0.4])
    coef, edge, at = search(99.0, widen=True)
    assert (coef, edge, len(at)) == (1.4, "largest", 2 + merge.WIDER)
    flat = search_folders(TA, *places, tmp_path / "ta", score=lambda folder: 1, coefs=(0.5, 0.4), widen=True)
    assert (flat.config.coef, flat.edge, len(flat.curve)) == (0.4, "smallest", 2), "the smaller of equal ones"


def test_several_scores_count_by_their_mean_and_a_merger_without_a_choice_is_scored_once(family_in, tmp_path):
    _, places = family_in
    tables = {"ta-0.2": {"a": 1.0, "b": 5}, "ta-0.4": {"a": 4.0, "b": 1.5}}
    found = search_folders(TA, *places, tmp_path / "ta", score=lambda own: tables[own.name], coefs=(0.2, 0.4))
    assert (found.config.coef, found.scores, found.curve) == (0.2, {"a": 1, "b": 5}, ((0.2, 3.0), (0.4, 2.75)))
    for config in (WeightAverage(), TaskArithmetic(coef=0.7)):
        calls = []
        found = search_folders(config, *places, tmp_path / "x", score=lambda own, calls=calls: calls.append(own) or 3)
        assert (found.config, found.score, found.curve) == (config, 3.0, ())
        assert [own.name for own in calls] == ["x"]
    scored = search_folders(Ties(keep=0.5, aggregate="sum", scope="global"), *places, tmp_path / "x", score=len_of)
    assert [coef for coef, _ in scored.curve] == list(merge.COEFS), "the merger's own grid"


def len_of(folder):
    return len(folder.name)


def test_kept_scores_are_of_content_and_options_and_of_the_name_of_the_score(family_in, folders, tmp_path):
    (_, (base, experts)), calls = family_in, []

    def search(experts=experts, name="norm", config=TA, coefs=(0.2, 0.4), **options):
        before = len(calls)
        score = lambda folder: calls.append(folder) or 1 / len(calls)  # noqa: E731
        search_folders(config, base, experts, tmp_path / "ta", score=score, coefs=coefs, name=name, **options)
        return len(calls) - before

    assert (search(), search()) == (2, 0)
    assert search(coefs=(0.2, 0.3, 0.4)) == 1
    assert search(workers=2, chunk=64) == 0, "what changes no byte"
    moved = {name: path.rename(tmp_path / f"moved-{name}") for name, path in experts.items()}
    assert search(moved) == 0, "content, not places"
    assert search(moved, name="other") == 2
    assert search(moved, out_dtype="bfloat16") == 2
    assert search(moved, shard_size=100) == 2
    assert search(moved, coef={"matrix": 0.7}) == 2
    assert search(moved, config=Ties(keep=0.5, aggregate="sum", scope="global")) == 2
    assert search(dict(reversed(moved.items()))) == 2
    (base / "config.json").write_text("{}")
    assert search(moved) == 2, "files beside the weights"
    assert search(moved, name="") == search(moved, name="") == 2, "without a name none is kept"
    (first, *_), count = moved.values(), len((tmp_path / "candidates.jsonl").read_text().splitlines())
    tree = folders.load(first)
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    folders.save(first, tree | {"vector": tree["vector"] + 1})
    assert search(moved) == 2, "other weights in the same place"
    lines = list(map(json.loads, (tmp_path / "candidates.jsonl").read_text().splitlines()))
    assert len(lines) == count + 2
    assert {"candidate": "ta 0.2", "score": "norm"}.items() <= lines[0].items()
    assert lines[0]["scores"] == {"": 1.0}


def test_broken_lines_of_kept_scores_are_passed_over(family_in, tmp_path, caplog):
    _, places = family_in
    options = {"score": len_of, "coefs": (0.2, 0.4), "name": "n"}
    search_folders(TA, *places, tmp_path / "ta", **options)
    file = tmp_path / "candidates.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first.replace('6.0', 'NaN')}\n[]\n{second}\n{first[:40]}")
    calls = []
    search_folders(TA, *places, tmp_path / "ta", **options | {"score": lambda own: calls.append(own.name) or 6})
    assert calls == ["ta-0.2"]
    assert "lines [1, 2] are not valid records" in caplog.text
    search_folders(TA, *places, tmp_path / "ta", **options | {"score": pytest.fail})


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda _: math.nan, "^ta 0.2: its score is nan, must be finite$"),
        (lambda _: {"a": 1, "b": -math.inf}, "^ta 0.2: score 'b' is -inf, must be finite$"),
        (lambda _: "good", "^ta 0.2: its score is 'good', must be a number$"),
        (lambda _: None, "^ta 0.2: its score is None, must be a number$"),
        (lambda _: {}, "^ta 0.2: there is no score: give at least one$"),
        (lambda folder: int(folder.name), "^ta 0.2: invalid literal for int"),
    ],
)
def test_a_score_that_is_not_a_finite_number_names_the_candidate(score, said, family_in, tmp_path):
    _, places = family_in
    with pytest.raises(ValueError, match=said):
        search_folders(TA, *places, tmp_path / "out/ta", score=score, coefs=(0.2, 0.4), name="n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError("gone")])
def test_a_candidate_is_removed_whatever_ends_the_search(error, family_in, tmp_path):
    _, places = family_in

    def score(folder):
        (folder.parent / "more").mkdir()
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        search_folders(TA, *places, tmp_path / "out/ta", score=score)
    assert not (tmp_path / "out").exists()


def test_left_candidates_are_removed_at_the_start_but_not_those_of_a_search_that_runs(family_in, tmp_path):
    _, places = family_in
    for name in ("ta", "ties", "other"):
        left = tmp_path / f".{name}.smat-candidate/{name}-0.3"
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".ta.smat-candidate.lock").touch()  # of a killed process, which holds it no more

    def during(folder):
        seen.append(sorted(own.name for own in tmp_path.glob(".*")))
        with pytest.raises(ValueError, match=r"^another search of .*/ta is running \(it holds .*\): wait for it$"):
            search_folders(TA, *places, tmp_path / "ta", score=len_of)
        search_folders(TA, *places, tmp_path / "ties", score=len_of, coefs=(0.1,))
        assert folder.is_dir()
        return 1

    seen = []
    search_folders(TA, *places, tmp_path / "ta", score=during, coefs=(0.3,))
    assert seen == [[".ta.smat-candidate", ".ta.smat-candidate.lock"]]
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_searched_is_an_error_before_any_merge(family_in, tmp_path, monkeypatch):
    _, places = family_in
    never = {"score": pytest.fail}
    for config, options, said in (
        (TaskArithmetic(coef=0.3), {"coefs": (0.1,)}, r"coefs are \[0.1\], but the coefficient of ta is 0.3,"),
        (WeightAverage(), {"coefs": (0.1,)}, "but the coefficient of wa is none: leave them out"),
        (TA, {"coefs": (0.1, math.inf)}, "coefficient inf to search is not finite"),
        (TA, {"coefs": (0.1, 0.1)}, r"coefficients to search are \[0.1, 0.1\]: name each once"),
        (TA, {"coef": {"*": 0.3}}, "`coef` has a number for every parameter, so there is nothing to choose"),
        (TA, {"out_dtype": "int8"}, "out_dtype is 'int8', must be one of"),
        (len_of, {}, "config is .*, must be the options of a merger"),
    ):
        with pytest.raises(ValueError, match=said):
            search_folders(config, *places, tmp_path / "out/ta", **never, **options)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(ValueError, match="taken"):
        search_folders(TA, *places, tmp_path / "taken", **never)
    need = plan(TaskArithmetic(coef=1.0), *places, tmp_path / "out/ta").disk
    free = run.shutil.disk_usage(tmp_path)._replace(free=need - 1)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda place: free)
    with pytest.raises(ValueError, match="free space or write elsewhere"):
        search_folders(TA, *places, tmp_path / "out/ta", **never)
    assert not (tmp_path / "out").exists()


def test_memory_of_the_merge_is_free_while_a_candidate_is_scored(family_in, tmp_path, monkeypatch):
    _, places = family_in
    made, make = [], Scratch.__init__
    monkeypatch.setattr(Scratch, "__init__", lambda self: made.append(self) or make(self))
    monkeypatch.setattr(execution, "loops", lambda: None)  # which take less
    taken, take = [], Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda self, *args: taken.append(args) or take(self, *args))
    held = lambda folder: sum(len(own._held) for own in made)  # noqa: E731
    config = Ties(keep=0.5, aggregate="sum", scope="global")
    found = search_folders(config, *places, tmp_path / "ta", score=held, coefs=(0.1, 0.2), chunk=64)
    assert taken
    assert found.curve == ((0.1, 0.0), (0.2, 0.0))


def test_inputs_are_hashed_once_for_all_candidates(family_in, tmp_path, monkeypatch):
    (_, (base, experts)), seen = family_in, []
    digest = Hashing._digest
    monkeypatch.setattr(Hashing, "_digest", lambda self, file: seen.append(Path(file)) or digest(self, file))
    search_folders(TA, base, experts, tmp_path / "ta", score=len_of, coefs=(0.1, 0.2, 0.3), name="n")
    inputs = [file for file in seen if "smat-candidate" not in str(file)]
    assert len(inputs) == len({*inputs})
    assert {*inputs} == {file for folder in (base, *experts.values()) for file in folder.glob("*.safetensors")}


def test_trials_choose_weights_by_brute_force_from_the_best_coefficient_on(family_in, folders, tmp_path):
    (base, experts), places = family_in
    names = list(experts)
    target = merge.merge_by(TaskArithmetic(coef=0.5, weights={names[1]: 1.4}), base, experts)
    scoring, said = Scoring(folders, target), []
    options = {"coefs": GRID, "trials": 13, "seed": 2, "name": "distance"}
    found = search_folders(TA, *places, tmp_path / "ta", score=scoring, report=said.append, **options)
    alone = search_folders(TA, *places, tmp_path / "ta", score=pytest.fail, coefs=GRID, name="distance")
    at = alone.config
    assert (found.curve, found.edge, alone.trials) == (alone.curve, alone.edge, ())

    def score(numbers):
        return scoring.of(merge.merge_by(merge.with_numbers(at, numbers), base, experts))

    expected = merge.select_numbers(at, names, score, trials=13, seed=2)
    assert [numbers for numbers, _ in found.trials] == [numbers for numbers, _ in expected.curve]
    assert found.config == replace(at, **expected.best)
    assert found.score == pytest.approx(expected.score)
    assert found.score > alone.score
    assert [own.name for own in said[4:]] == [f"ta trial {place}" for place in range(1, 14)]
    assert [own.name for own in scoring.calls[4:]] == [f"ta-trial-{place}" for place in range(1, 14)]
    assert search_folders(TA, *places, tmp_path / "ta", score=pytest.fail, **options) == found
    fixed = search_folders(at, *places, tmp_path / "ta", score=pytest.fail, **options | {"coefs": ()})
    assert (fixed.config, fixed.trials, fixed.curve) == (found.config, found.trials, ())
    for config, trials, text in (
        (WeightAverage(), 13, "trials: wa takes no weights by expert, leave it out"),
        (TA, 5, "trials is 5, must be an integer of at least 6: a generation of 2 weights"),
        (TaskArithmetic(weights={names[0]: 0.0}), 13, "CMA-ES needs at least two weights other than 0"),
        (TaskArithmetic(weights={names[0]: {"*": 0.0}}), 13, "the weight of .* is {'\\*': 0.0}, must be a number"),
    ):
        with pytest.raises(ValueError, match=text):
            search_folders(config, *places, tmp_path / "out/ta", score=pytest.fail, trials=trials)
    with pytest.raises(ValueError, match="trials: ta takes no densities by expert, leave trials_over out"):
        search_folders(TA, *places, tmp_path / "out/ta", score=pytest.fail, trials=13, trials_over=["densities"])
    assert not (tmp_path / "out").exists()


TIES = Ties(keep=0.7, aggregate="sum", scope="global")
OVER = {"aggregate": ("sum", "mean"), "keep": (0.9, 0.4)}  # that of TIES is not among them
EVERY = [{"aggregate": aggregate, "keep": keep} for aggregate in ("sum", "mean") for keep in (0.9, 0.4)]


def test_each_combination_of_options_is_searched_as_if_it_was_given(family_in, folders, tmp_path):
    (base, experts), places = family_in
    scoring = Scoring(folders, merge.merge_by(replace(TIES, aggregate="mean", keep=0.5, coef=0.7), base, experts))
    said, given = [], {"coefs": (0.3, 0.4), "widen": True, "name": "n"}
    found = search_folders(TIES, *places, tmp_path / "it", score=scoring, over=OVER, report=said.append, **given)
    # the scores of single searches are the same ones, so none is computed
    alone = [search_folders(replace(TIES, **o), *places, tmp_path / "it", score=pytest.fail, **given) for o in EVERY]
    rows = zip(EVERY, alone, strict=True)
    assert found.tuned == tuple(Tuned(options, one.config.coef, one.score, one.curve) for options, one in rows)
    best = max(alone, key=lambda one: one.score)
    assert found._replace(tuned=()) == best
    assert alone.index(best) == 3
    for options, one in zip(EVERY, alone, strict=True):
        for coef, value in one.curve:
            merged = merge.merge_by(replace(TIES, **options, coef=coef), base, experts)
            assert value == pytest.approx(scoring.of(merged), rel=1e-5)
    assert len({len(one.curve) for one in alone}) > 1, [one.curve for one in alone]
    names = [own.name for own in said]
    assert names[:2] == ["it aggregate sum keep 0.9 0.3", "it aggregate sum keep 0.9 0.4"]
    assert [own.name for own in scoring.calls] == [name.replace(" ", "-") for name in names]
    assert sorted({name.rpartition(" ")[0] for name in names}) == sorted(
        f"it aggregate {own['aggregate']} keep {own['keep']}" for own in EVERY
    )
    assert sorted(own.name for own in tmp_path.glob("*it*")) == [], "one folder at a time, none is left"


def test_options_of_a_merger_without_an_open_coefficient_are_scored_once_each(family_in, tmp_path):
    _, (base, experts) = family_in
    calls, over = [], {"density": (0.5, 1), "coef": (0.5, 1.0)}
    found = search_folders(
        Sce(), base, experts, tmp_path / "x", score=lambda own: calls.append(own.name) or 3, over=over
    )
    assert calls == [f"x-density-{density}-coef-{coef}" for density in (0.5, 1) for coef in (0.5, 1.0)]
    assert (found.config, found.curve, found.edge) == (Sce(density=0.5, coef=0.5), (), "")
    assert [(own.coef, own.score, own.curve) for own in found.tuned] == [(c, 3.0, ()) for c in (0.5, 1.0)] * 2
    named = dict(zip(("a/b", "c:d"), experts.values(), strict=True))
    config, score = TallMask(ratio=0.4, task="c:d"), lambda own: {"x-task-a_b": 2, "x-task-c_d": 1}[own.name]
    found = search_folders(config, base, named, tmp_path / "x", score=score, over={"task": (*named,)})
    assert (found.config.task, found.score) == ("a/b", 2.0)


def test_of_equal_scores_the_first_combination_is_chosen_at_its_smallest_coefficient(family_in, tmp_path):
    _, places = family_in
    over = {"keep": (0.9, 0.4), "aggregate": ("mean", "sum")}
    found = search_folders(TIES, *places, tmp_path / "x", score=lambda own: 1, coefs=(0.5, 0.2), over=over)
    assert found.config == replace(TIES, keep=0.9, aggregate="mean", coef=0.2)
    assert [own.options for own in found.tuned] == [
        {"keep": keep, "aggregate": aggregate} for keep in (0.9, 0.4) for aggregate in ("mean", "sum")
    ]


def test_an_interrupted_search_over_options_resumes_and_trials_begin_at_the_best(family_in, folders, tmp_path):
    (base, experts), places = family_in
    names, out = list(experts), tmp_path / "ties"
    target = merge.merge_by(replace(TIES, aggregate="mean", keep=0.4, coef=0.6, weights={names[1]: 1.4}), base, experts)
    scoring, stop = Scoring(folders, target), 5

    def score(folder):
        if len(scoring.calls) == stop:
            raise KeyboardInterrupt
        return scoring(folder)

    options = {"coefs": (0.3, 0.6), "over": OVER, "trials": 13, "seed": 2, "name": "n"}
    with pytest.raises(KeyboardInterrupt):
        search_folders(TIES, *places, out, score=score, **options)
    found = search_folders(TIES, *places, out, score=scoring, **options)
    called = [own.name for own in scoring.calls]
    assert len(called) == len({*called}) == 4 * 2 + 13, "none twice"
    start = search_folders(TIES, *places, out, score=pytest.fail, **options | {"trials": 0})
    assert (start.config, start.tuned) == (replace(TIES, aggregate="mean", keep=0.4, coef=0.6), found.tuned)
    alone = search_folders(start.config, *places, out, score=pytest.fail, trials=13, seed=2, name="n")
    assert (found.config, found.trials, found.score) == (alone.config, alone.trials, alone.score)
    assert found.score > start.score
    more = options | {"over": {**OVER, "keep": (0.9, 0.5, 0.4)}, "trials": 0}
    search_folders(TIES, *places, out, score=scoring, **more)
    assert len(scoring.calls) == len(called) + 2 * 2, "the new combinations alone"


def test_combinations_that_cannot_be_tried_are_errors_before_any_merge(family_in, tmp_path):
    _, places = family_in
    never = {"score": pytest.fail}
    for over, said in (
        (
            {"kept": (0.2,), "keep": ()},
            ["'kept' is not an option of ties, choose from", "keep is \\(\\), must be one or"],
        ),
        ({"keep": 0.2}, ["over: keep is 0.2, must be one or more numbers, texts or switches"]),
        ({"scope": "global"}, ["over: scope is 'global', must be one or more"]),
        ({"weights": ({"a": 1},)}, ["over: weights is .*, must be one or more numbers"]),
        ({"keep": (0.2, 0.1, 0.2)}, [r"over: keep is \[0.2, 0.1, 0.2\]: name each value once"]),
        (["keep"], [r"over is \['keep'\], must be a mapping"]),
        ({"coef": (0.2,)}, ["but the coefficient of ties is 0.2, leave one out"]),
    ):
        with pytest.raises(ValueError, match=".*".join(said)):
            search_folders(TIES, *places, tmp_path / "out/x", coefs=(0.1, 0.2), over=over, **never)
    over = {"keep": (0.5, 1.5, -1.0), "scope": ("global", "layer")}
    with pytest.raises(ValueError, match=r"keep is 1\.5") as error:
        search_folders(TIES, *places, tmp_path / "out/x", coefs=(0.1, 0.2), over=over, **never)
    assert [text.partition(",")[0] for text in error.value.problems] == [
        "scope is 'layer'", "keep is 1.5", "keep is -1.0",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"config is .*, must be the options of a merger"):
        search_folders(len_of, *places, tmp_path / "out/x", over={"keep": (0.1,)}, **never)
    assert not (tmp_path / "out").exists()
