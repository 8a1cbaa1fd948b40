"""merge.py --search --score: the coefficient that another program scores highest, as a user runs it."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint, merge
from smat_fn.config import DIGITS, MERGERS, TaskArithmetic
from smat_fn.scripts.merge.search.outside import Asked, Program, at, last_number

# minus the distance of the first number of w from 1.3, read without torch: it takes no time to start
SCORE = """
import json, os, signal, struct, sys
from pathlib import Path

here, model = Path(__file__).parent, Path(sys.argv[1])
with (here / "runs").open("a") as runs:
    print(model.name, file=runs)
data = (model / "model.safetensors").read_bytes()
size = int.from_bytes(data[:8], "little")
begin = 8 + size + json.loads(data[8 : 8 + size])["w"]["data_offsets"][0]
score = -abs(struct.unpack("<f", data[begin : begin + 4])[0] - 1.3)
print("loading", model.name)
print("a warning", file=sys.stderr)
if len(sys.argv) > 2:
    out = Path(sys.argv[2])
    assert not list(out.iterdir())
    (out / "my__model").mkdir()
    rows = {"acc,none": score, "acc_stderr,none": "N/A", "alias": "gsm8k"}
    results = {"gsm8k": rows, "leader/v1.5": {"acc,none": 2 * score}}
    results = {"results": results, "n-samples": {"gsm8k": {"original": 9}}}
    (out / "my__model/results_2026-11-27T10-00-00.1.json").write_text(json.dumps(results))
    (out / "my__model/samples_gsm8k.jsonl").write_text("{}\\n{}\\n")
else:
    print(f"{score}\\n")
if (die := here / "die").exists() and len((here / "runs").read_text().split()) == int(die.read_text() or 2):
    os.kill(os.getppid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory: a base, experts a and b, score.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    start = {"w": torch.zeros(3, 4), "b": torch.ones(4)}
    for name, change in {"base": 0.0, "a": 2.0, "b": 0.5}.items():
        Path(name).mkdir()
        save_file({path: leaf + change for path, leaf in start.items()}, f"{name}/model.safetensors")
    Path("score.py").write_text(SCORE)
    return tmp_path


@pytest.fixture
def call(exits, capsys, place):
    """``call(merger, *words)``: (what merge.py prints, its progress, what it exits with)."""

    def run(
        merger, *words, score=f"{sys.executable} score.py {{model}}", inputs=("--base", "base", "--experts", "a", "b")
    ):
        code = exits("merge.py", merger, *inputs, "--search", "--score", score, *words)
        printed = capsys.readouterr()
        return printed.out, printed.err, code

    return run


@pytest.fixture
def killed(killed, exits, place):
    """``killed(*words)``: run merge.py until score.py kills it."""
    return lambda *words: killed(lambda: exits("merge.py", *words, "--score", f"{sys.executable} score.py {{model}}"))


def runs():
    file = Path("runs")
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def manifest(folder):
    return json.loads((Path(folder) / "manifest.json").read_text())


IN_FILES = f"{sys.executable} score.py {{model}} {{out}}"


def test_the_coefficient_is_that_of_brute_force_and_the_recipe_repeats_the_merge(call, exits, place):
    out, err, code = call(
        "ta", "--grid", 0.3, 0.6, 0.9, "--out", "out", score=f"{sys.executable} {place}/score.py {{model}}"
    )
    assert code is None
    brute = {coef: -abs(2.5 * coef - 1.3) for coef in (0.3, 0.6, 0.9)}
    assert max(brute, key=brute.get) == 0.6
    assert out.splitlines() == [
        "merged: out/ta, coef 0.6, rounding is 0.00% of the merged change (RMS)", "score: out/ta, -0.2",
    ]  # fmt: skip
    assert [line for line in err.splitlines() if line.startswith("ta ")] == [
        "ta 0.3: -0.55",
        "ta 0.6: -0.2",
        "ta 0.9: -0.95",
    ]
    assert runs() == ["ta-0.3", "ta-0.6", "ta-0.9"]
    made = manifest("out/ta")
    assert made["score_curve"] == [[coef, pytest.approx(score)] for coef, score in brute.items()]
    assert (made["score"], made["hyperparameters"], made["dev"]) == (made["score_curve"][1][1], {"coef": 0.6}, {})
    assert made["asked"]["score"] == f"{Path(sys.executable).name} score.py {{model}}", (
        "without folders of this machine"
    )
    assert (made["asked"]["coefs"], "score_edge" in made) == ([0.3, 0.6, 0.9], False)
    card = Path("out/ta/README.md").read_text()
    assert "is -0.2: `python" in card
    assert "by this score, which is therefore optimistic: 0.3: -0.55, 0.6: -0.2, 0.9: -0.95.\n" in card
    assert not any(
        str(place) in (Path("out/ta") / name).read_text() for name in ("README.md", "manifest.json", "recipe.yml")
    )
    assert "score" not in Path("out/ta/recipe.yml").read_text()
    assert exits("merge.py", "out/ta/recipe.yml", "--out", "again") is None
    assert (place / "again/ta/model.safetensors").read_bytes() == (place / "out/ta/model.safetensors").read_bytes()
    assert sorted(path.name for path in Path("out").iterdir()) == ["candidates.jsonl", "logs", "ta"]
    assert (Path("out/logs/ta-0.3.out").read_text().split()[:2], runs()) == (["loading", "ta-0.3"], [])
    assert Path("out/logs/ta-0.3.err").read_text() == "a warning\n"


def test_a_finished_search_is_kept_and_another_one_is_an_error_before_a_score(call):
    words = "--grid", 0.3, 0.6, "--out", "out"
    call("ta", *words)
    assert runs() == ["ta-0.3", "ta-0.6"]
    Path("out/candidates.jsonl").unlink()
    out, _, code = call("ta", *words)
    assert (out, code, runs()) == (
        "kept: out/ta: already finished: its files and inputs match its model card\n",
        None,
        [],
    )
    for more, said in (
        (("--widen",), "its asked.widen is left out, this merge's would be True"),
        (("--out-dtype", "bfloat16"), "its --out-dtype is same, this merge's would be bfloat16"),
    ):
        assert f"out/ta holds another merge: {said}" in call("ta", *words, *more)[2]
    said = "its asked.coefs is [0.3, 0.6], this merge's would be [0.3]"
    assert said in call("ta", "--grid", 0.3, "--out", "out")[2]
    said = "its asked.score is python score.py {model}, this merge's would be python score.py {model} x".replace(
        "python", Path(sys.executable).name
    )
    assert said in call("ta", *words, score=f"{sys.executable} score.py {{model}} x")[2]
    save_file({"w": torch.ones(3, 4), "b": torch.ones(4)}, "a/model.safetensors")
    assert "it was made of another expert 'a'" in call("ta", *words)[2]
    assert runs() == []
    _, err, code = call("ta", *words, "--overwrite")
    assert (code, runs()) == (None, ["ta-0.3", "ta-0.6"])
    _, err, code = call("ta", "--grid", 0.3, 0.6, 0.7, "--out", "out", "--overwrite")
    assert "ta 0.3: -0.85 (kept)" in err
    assert (code, runs()) == (None, ["ta-0.7"])


def test_a_killed_search_scores_no_candidate_twice_and_its_leftover_goes(call, killed, place):
    words = ["ta", "--base", "base", "--experts", "a", "b", "--search", "--grid", "0.3", "0.6", "0.9", "--out", "out"]
    Path("die").touch()
    killed(*words)
    assert (place / "out/.ta.smat-candidate/ta-0.6/model.safetensors").is_file()
    Path("die").unlink()
    assert runs() == ["ta-0.3", "ta-0.6"]
    _, err, code = call("ta", *words[7:])
    assert (code, runs()) == (None, ["ta-0.6", "ta-0.9"])
    assert "ta 0.3: -0.55 (kept)\nta 0.6: -0.2\nta 0.9: -0.95\n" in err
    assert sorted(path.name for path in Path("out").iterdir()) == ["candidates.jsonl", "logs", "ta"]


def test_trials_begin_at_the_best_coefficient_and_a_killed_search_resumes_on_their_path(call, killed, exits, place):
    words = "--grid", 0.3, 0.6, "--seed", 4, "--out", "out", "--trials"
    start, every = {"a": 1.0, "b": 1.0}, [f"ta-trial-{place}" for place in range(1, 13)]
    wanted = merge.select_weights(start, lambda w: -abs(0.6 * (2 * w["a"] + 0.5 * w["b"]) - 1.3), trials=12, seed=4)
    assert wanted.best != start
    Path("die").write_text("7")
    killed("ta", "--base", "base", "--experts", "a", "b", "--search", *words, 12)
    Path("die").unlink()
    assert runs() == ["ta-0.3", "ta-0.6", *every[:5]]
    out, err, code = call("ta", *words, 12)
    assert (code, runs()) == (None, every[4:])
    assert "ta trial 4: " in err
    made = manifest("out/ta")
    assert [weights for weights, _ in made["score_weights"]] == [weights for weights, _ in wanted.curve]
    scores = [score for _, score in made["score_weights"]]
    assert scores == pytest.approx([score for _, score in wanted.curve], abs=1e-6)
    assert made["hyperparameters"] == {"coef": 0.6, "weights": wanted.best}
    assert made["score"] == max(scores)
    text = "weights a {a:g} b {b:g}".format(**wanted.best)
    assert out.splitlines()[1:] == [
        f"score: out/ta, {made['score']:.6g}, at the largest coefficient of those tried: --widen or --grid tries more",
        f"best of 12 trials: {text}; the first ones score -0.2",
    ]
    card = Path("out/ta/README.md").read_text()
    assert "Then CMA-ES tried 12 models with other weights of the experts. The best score, " in card
    assert f" at {text.replace(' b', ', b')}, is optimistic, for it is the best of so many; the first ones (w" in card
    assert exits("merge.py", "out/ta/recipe.yml", "--out", "again") is None
    assert (place / "again/ta/model.safetensors").read_bytes() == (place / "out/ta/model.safetensors").read_bytes()
    assert "kept: out/ta" in call("ta", *words, 12)[0]
    for more, said in (
        ((13,), "its asked.trials is 12, this merge's would be 13"),
        ((12, "--weights", "a", 0.5), "its asked.weights.a is left out, this merge's would be 0.5"),
    ):
        assert f"out/ta holds another merge: {said}" in call("ta", *words, *more)[2]
    assert runs() == []
    found = json.loads(call("ta", *words, 6, "--overwrite", "--json")[0])
    assert found["searched"][0]["weights"] == merge.select_weights(start, of(wanted), trials=6, seed=4).best
    assert runs() == []


OVER = "--search-over", "aggregate=sum,mean", "keep=0.9,0.8"


def test_options_are_chosen_with_the_coefficient_and_a_killed_search_resumes(call, killed, exits, place):
    """The first number of w is γ times 2.5 for the sum, 1.25 for the mean; TIES keeps the first of equal magnitudes."""
    words = *OVER, "--grid", 0.3, 0.6, 0.9, "--scope", "tensor", "--out", "out"
    every = [f"aggregate-{own}-keep-{keep}" for own in ("sum", "mean") for keep in (0.9, 0.8)]
    names = [f"ties-{own}-{coef}" for own in every for coef in (0.3, 0.6, 0.9)]
    Path("die").write_text("5")
    killed("ties", "--base", "base", "--experts", "a", "b", "--search", *words)
    Path("die").unlink()
    assert runs() == names[:5]
    out, err, code = call("ties", *words)
    assert (code, runs()) == (None, names[4:])
    assert "ties aggregate sum keep 0.8 0.3: -0.55 (kept)\nties aggregate sum keep 0.8 0.6: -0.2\n" in err
    assert out.splitlines() == [
        "merged: out/ties, coef 0.9, rounding is 0.00% of the merged change (RMS)",
        "aggregate sum, keep 0.9: coef 0.6, score -0.2",
        "aggregate sum, keep 0.8: coef 0.6, score -0.2",
        "aggregate mean, keep 0.9: coef 0.9 (largest of those tried), score -0.175",
        "aggregate mean, keep 0.8: coef 0.9 (largest of those tried), score -0.175",
        "score: out/ties, aggregate mean, keep 0.9 (largest of those tried), -0.175, at the largest coefficient of "
        "those tried: --widen or --grid tries more",
    ]
    made = manifest("out/ties")
    factors = [("sum", 0.9, 2.5), ("sum", 0.8, 2.5), ("mean", 0.9, 1.25), ("mean", 0.8, 1.25)]
    curves = [[[coef, pytest.approx(-abs(y * coef - 1.3), abs=1e-6)] for coef in (0.3, 0.6, 0.9)] for *_, y in factors]
    assert made["score_options"] == [
        {"options": {"aggregate": own, "keep": keep}, "coef": coef, "score": curve[place][1], "curve": curve}
        for (own, keep, _), coef, place, curve in zip(factors, (0.6, 0.6, 0.9, 0.9), (1, 1, 2, 2), curves, strict=True)
    ]
    assert (made["score_option_edges"], made["score_edge"]) == ({"keep": "largest"}, "largest")
    assert (made["score"], made["score_curve"]) == (made["score_options"][2]["score"], curves[2])
    chosen = {"coef": 0.9, "rescale": False, "keep": 0.9, "aggregate": "mean", "scope": "tensor"}
    assert made["hyperparameters"] == {name: value for name, value in chosen.items() if name in made["hyperparameters"]}
    assert {"coef", "keep", "aggregate"} <= made["hyperparameters"].keys()
    assert made["asked"]["over"] == {"aggregate": ["sum", "mean"], "keep": [0.9, 0.8]}
    card = Path("out/ties/README.md").read_text()
    assert (
        "\naggregate, keep were chosen by this score, which is therefore optimistic, each combination at its best "
        "coefficient. At an edge of the values tried: keep (largest).\n" in card
    )
    assert "\n| aggregate | keep | score | by coefficient |\n" in card
    assert "\n| mean | 0.9 | -0.175 | 0.3: -0.925, 0.6: -0.55, 0.9: -0.175 |\n" in card
    assert exits("merge.py", "out/ties/recipe.yml", "--out", "again") is None
    assert (place / "again/ties/model.safetensors").read_bytes() == (place / "out/ties/model.safetensors").read_bytes()
    assert sorted(path.name for path in Path("out").iterdir()) == ["candidates.jsonl", "logs", "ties"]


def test_a_finished_search_over_options_is_kept_and_another_one_is_another_request(call):
    words = "--coef", 0.9, "--keep", 0.9, "--out", "out", "--search-over"
    out, _, code = call("ties", *words, "aggregate=sum,mean")
    assert (code, runs()) == (None, ["ties-aggregate-sum", "ties-aggregate-mean"])
    assert "aggregate sum: score -0.95\naggregate mean: score -0.175\nscore: out/ties, aggregate mean, -0.175\n" in out
    Path("out/candidates.jsonl").unlink()
    for more in ((), ("--dry-run",)):
        assert "already finished" in call("ties", *words, "aggregate=sum,mean", *more)[0]
    said = "out/ties holds another merge: its asked.over.aggregate is ['sum', 'mean'], this merge's would be ['mean']"
    assert said in call("ties", *words, "aggregate=mean")[2]
    assert "its asked.over.scope is left out" in call("ties", *words, "aggregate=sum,mean", "scope=tensor")[2]
    said = "its asked.over.aggregate is ['sum', 'mean'], this merge's would be left out"
    assert said in call("ties", *words[:-1], "--aggregate", "mean")[2]
    assert runs() == []
    # coef of a merger whose own is a number, and a chosen option that is the default, which a manifest leaves out
    out, _, code = call("sce", "--search-over", "coef=0.5,1", "--out", "out", "--json")
    assert runs() == ["sce-coef-0.5", "sce-coef-1.0"]
    (found,) = json.loads(out)["searched"]
    assert found["options"] == {"coef": found["coef"]}
    assert "already finished" in call("sce", "--search-over", "coef=0.5,1", "--out", "out")[0]
    words = "ta", "--search-over", "aggregate=mean,sum", "--coef", 0.5, "--out", "out"
    assert call(*words)[2] is None
    made = manifest("out/ta")
    sums = {"options": {"aggregate": "sum"}, "coef": 0.5, "score": pytest.approx(-0.05, abs=1e-6), "curve": []}
    assert (made["score_options"][1], made["hyperparameters"]) == (sums, {"coef": 0.5})
    assert "already finished" in call(*words)[0]


def test_equal_combinations_are_a_note_trials_begin_at_the_first_and_a_dry_run_counts_all(call):
    words = *OVER, "--grid", 0.3, 0.6, "--trials", 6, "--out", "out"
    out, _, _ = call("ties", *words, "--dry-run")
    assert "  search: 8 models, then 6 with other weights, one after another: " in out
    assert "  search: 4 models, one after another: " in call("ties", *OVER, "--coef", 1, "--out", "out", "--dry-run")[0]
    assert (runs(), Path("out").exists()) == ([], False)
    out, err, code = call("ties", *words, score="bash -c 'echo 7 # {model}'")
    assert code is None
    assert (
        "note: all 4 combinations of options have the same score, 7: aggregate sum, keep 0.9 is only the first; score "
        "more rows, or try other values\n" in out
    )
    assert "ties trial 6: 7\n" in err
    made = manifest("out/ties")
    assert made["hyperparameters"].items() >= {"aggregate": "sum", "keep": 0.9, "coef": 0.3}.items()
    assert (len(made["score_options"]), len(made["score_weights"])) == (4, 7)
    assert "kept: out/ties" in call("ties", *words, score="bash -c 'echo 7 # {model}'")[0]


def test_combinations_out_of_range_are_listed_once_before_a_score(call):
    words = "--search-over", "keep=0.5,1.5,-1", "aggregate=sum,mean", "--out", "out"
    for more in ((), ("--dry-run",)):
        code = call("ties", *words, *more, score="nothing-of-this-name {model}")[2]
        assert [code.count(f"--search-over: keep is {keep}, must be ") for keep in (1.5, -1.0)] == [1, 1]
        assert "which is not there or not executable" in code
        assert code.count("keep is") == 2
    assert "name it in place of all" in call("all", "--search-over", "keep=0.5", "--out", "out")[2]
    assert (runs(), Path("out").exists()) == ([], False)


def test_trials_over_densities_begin_at_the_one_of_all_and_the_recipe_has_the_chosen_ones(call, exits, place):
    words = "--coef", 0.6, "--keep", 0.5, "--trials", 8, "--trials-over", "weights", "densities", "--out", "out"
    score = "bash -c 'basename {model} | cksum | cut -c 1-4'"
    out, _, code = call("ties", *words, score=score)
    assert code is None
    made = manifest("out/ties")
    assert made["score_weights"][0][0] == {"a": 1.0, "b": 1.0}
    assert made["score_densities"][0][0] == {"a": 0.5, "b": 0.5}
    assert len(made["score_densities"]) == len(made["score_weights"]) == 9
    best = max(range(9), key=lambda at: made["score_weights"][at][1])
    assert best, "the candidates' names decide the scores"
    assert made["hyperparameters"]["weights"] == made["score_weights"][best][0]
    assert made["hyperparameters"]["densities"] == made["score_densities"][best][0]
    assert made["asked"]["densities"] == made["asked"]["weights"] == {}
    assert "best of 8 trials: weights a " in out
    assert exits("merge.py", "out/ties/recipe.yml", "--out", "again") is None
    assert (place / "again/ties/model.safetensors").read_bytes() == (place / "out/ties/model.safetensors").read_bytes()
    assert "kept: out/ties" in call("ties", *words, score=score)[0]


def of(selection):
    """The score of weights that a selection knows."""
    return lambda weights: next(score for own, score in selection.curve if own == weights)


def test_sigterm_ends_the_program_too_and_removes_the_candidate(call):
    Path("score.sh").write_text("trap 'echo ended > ended; exit' TERM\nsleep 0.2\nkill -TERM $PPID\nsleep 60 & wait\n")
    _, _, code = call("ta", "--out", "out", score="bash score.sh {model}")
    assert (code, Path("ended").read_text()) == (128 + signal.SIGTERM, "ended\n")
    assert [path.name for path in Path("out").iterdir()] == ["logs"]


def test_all_mergers_are_searched_one_after_another(call):
    keys = ("results/gsm8k/acc,none", "results/leader/v1.5/acc,none")
    out, _, code = call("all", "--out", "out", "--grid", 0.3, 0.5, "--score-key", *keys, score=IN_FILES)
    assert code is None
    assert runs() == ["wa", *(f"{config.name}-{coef}" for config in MERGERS[1:] for coef in (0.3, 0.5))]
    for config in MERGERS:
        made, own = manifest(f"out/{config.name}"), DIGITS.mergers[config.name]
        assert made["scores"][keys[1]] == 2 * made["scores"][keys[0]]
        assert made["score"] == pytest.approx(1.5 * made["scores"][keys[0]])
        if config.name in ("wa", "ta"):
            assert made["score_curve"] == (
                [] if config.name == "wa" else [[0.3, pytest.approx(-0.825)], [0.5, pytest.approx(-0.075)]]
            )
        assert made["asked"]["score_keys"] == list(keys)
        assert own.name == made["merger"]
    assert manifest("out/wa")["score"] == pytest.approx(1.5 * -abs(1.25 - 1.3))
    card = Path("out/ta/README.md").read_text()
    assert "(results/gsm8k/acc,none, results/leader/v1.5/acc,none), larger is better, is -0.075" in card
    assert "It is the mean of results/gsm8k/acc,none -0.05, results/leader/v1.5/acc,none -0.1." in card
    assert "The chosen one is the largest tried." in card
    assert "score: out/ta, -0.075, at the largest coefficient of those tried: --widen or --grid tries more\n" in out


def test_options_of_merges_on_disk_reach_the_candidates(call):
    words = "--coefs", "b", 0.0, "--out-dtype", "bfloat16", "--widen", "--grid", 0.3, 0.4
    Path("other.py").write_text("import sys; print(float(sys.argv[1].rpartition('-')[2]) * (sys.argv[1][-1] < '6'))")
    _, _, code = call("ta", *words, "--out", "out", score=f"{sys.executable} other.py {{model}}")
    assert code is None
    assert manifest("out/ta")["hyperparameters"] == {"coef": 0.5, "coefs": {"b": 0.0}}
    assert [coef for coef, _ in manifest("out/ta")["score_curve"]] == [0.3, 0.4, 0.5, 0.6]
    made = load_file("out/ta/model.safetensors")
    assert made["w"].dtype == torch.bfloat16
    assert made["b"].equal(torch.ones(4, dtype=torch.bfloat16))
    said = "--coef has a number for every parameter, so there is nothing to choose: leave it out"
    assert said in call("ta", "--coefs", "*", 0.2, "--out", "other", score="true {model}")[2]


def test_equal_scores_are_a_note_and_json_holds_the_curve(call):
    out, _, code = call("ta", "--grid", 0.2, 0.1, "--out", "out", "--json", score="bash -c 'echo 7; echo 3 # {model}'")
    assert code is None
    found = json.loads(out)
    assert found["searched"] == [{"folder": "out/ta", "coef": 0.1, "score": 3.0, "curve": [[0.1, 3.0], [0.2, 3.0]]}]
    out, _, _ = call("ta", "--grid", 0.2, 0.1, "--out", "other", score="bash -c 'echo 7; echo 3 # {model}'")
    assert (
        "note: all 2 coefficients have the same score, 3: 0.1 is only the smallest; score more rows, or give --coef"
        in out
    )


def test_a_dry_run_counts_the_candidates_and_writes_nothing(call):
    out, _, code = call("all", "--dry-run", "--out", "out")
    assert code is None
    assert out.count("all checks passed") == 5
    said = "  search: 10 models, one after another: each is merged, scored by --score and removed\n"
    assert (out.count(said), out.count("search: ")) == (4, 4), "wa has nothing to choose"
    for words, said in ((("--grid", 0.3, 0.6), "2 models"), (("--coef", 0.3), "1 model")):
        out, _, _ = call("ta", *words, "--trials", 6, "--dry-run", "--out", "out")
        assert f"  search: {said}, then 6 with other weights, one after another: " in out
    assert (runs(), Path("out").exists()) == ([], False)


def test_a_program_that_gives_no_score_names_candidate_command_and_output(call):
    python = shlex.quote(sys.executable)
    for score, keys, said in (
        (
            "bash -c 'echo first; echo broken >&2; exit 3' {model}",
            (),
            ["the command ended with status 3", "    broken"],
        ),
        ("bash -c 'kill -9 $$' {model}", (), ["was ended by signal 9", "it printed nothing"]),
        ("echo good {model}", (), ["the last line of the command's standard output is 'good /"]),
        ("bash -c 'echo nan' {model}", (), ["its score is nan, must be finite"]),
        ("bash -c 'echo -inf' {model}", (), ["its score is -inf, must be finite"]),
        (
            "true {model} {out}",
            ("results/x",),
            ["--score-key results/x is in no JSON file", "none with numbers is below"],
        ),
        (IN_FILES, ("results/gsm8k/acc",), ["give one of its numbers, such as results/gsm8k/acc,none"]),
        (
            IN_FILES,
            ("results/gsm8k/alias",),
            ["--score-key results/gsm8k/alias is 'gsm8k' in results_2026", "a number"],
        ),
        (IN_FILES, ("results/gsm8k",), ["--score-key results/gsm8k is {'acc,none'"]),
    ):
        more = ("--score-key", *keys) if keys else ()
        out, _, code = call(
            "ta", "--grid", 0.3, 0.6, "--out", "out", *more, score=score.replace(sys.executable, python)
        )
        assert out == ""
        for text in ("ta 0.3: ", "\n  command: ", *said):
            assert text in code, (score, text)
        assert {path.name for path in Path("out").iterdir()} == {"logs"}
        assert "/ta-0.3" in code
    assert "a warning" in code
    assert "out/logs/ta-0.3.err, at its end:" in code


def test_what_a_search_by_a_program_does_not_take_is_an_error_with_a_way_out(call, exits, place):
    instead = (
        ": not available with --score, whose command takes the place of dev data: leave it out, or leave out --score"
    )
    for words, said in (
        (("--data", "x"), f"--data{instead}"),
        (("--suite-options", "device", "cpu", "--per-layer", 1), f"--suite-options, --per-layer{instead}"),
        (("--calibrate",), f"--calibrate{instead}"),
        (("--snapshots",), f"--snapshots{instead}"),
        (("--lines", 0.2, 1), "--lines is not available with --score: leave it out, or give it a number by --coef"),
        (("--part", "1/2"), "--part is not available with --search: leave it out, or give the coefficient by --coef"),
        (
            ("--score-key", "a"),
            "--score-key reads a JSON file of the program: write {out} in --score for its output folder",
        ),
        (("--coef", 0.3, "--grid", 0.1, 0.2), "--grid and --widen choose a coefficient, here it is given: ta (0.3)"),
        (("--grid", 0.1, 0.1), "coefficients to search are [0.1, 0.1]: name each once"),
        (("--push-to-hub", "x"), "push"),
    ):
        assert said in call("ta", *words, "--out", "out")[2], words
    assert "give --task" in call("emr", "--out", "out")[2]
    for score, said in (
        ("true", "--score 'true' does not read the merged model: write {model} for the model's folder"),
        ("nothing-of-this-name {model}", "--score runs 'nothing-of-this-name', which is not there or not executable"),
        ("true '{model}", "has an open quote or a last backslash (No closing quotation): close it"),
        ("true {model} | tail -1", "--score has |, but no shell runs it: write it as \"bash -c '...'\""),
        ("", "--score is empty"),
    ):
        assert said in call("ta", "--out", "out", score=score)[2], score
    plain = "merge.py", "ta", "--base", "base", "--experts", "a", "b", "--out", "out"
    assert "--score requires --search" in exits(*plain, "--coef", 1, "--score", "true {model}")
    assert "--score-key requires --score" in exits(*plain, "--search", "--score-key", "a")
    assert not Path("out").exists()


def test_a_recipe_holds_no_command(place, exits):
    Path("recipe.yml").write_text(
        "smat_fn: 0.1.0\nmerger: ta\noptions: {coef: 0.6}\nbase: base\nexperts: {a: a}\nscore: touch ran {model}\n"
    )
    assert "score is not a field of this file" in exits("merge.py", "recipe.yml", "--out", "out")
    assert not Path("ran").exists()


def test_a_run_of_train_py_is_searched_as_folders(call, place):
    """`--run` gives base and experts; manifests of train.py name tasks and fingerprints."""
    start = {"w": torch.zeros(3, 4), "b": torch.ones(4)}
    print_ = checkpoint.fingerprint(start)
    checkpoint.save_expert("run/base", start, checkpoint.describe(start, kind="base"))
    for task, change in {"x": 2.0, "y": 0.5}.items():
        params = {path: leaf + change for path, leaf in start.items()}
        facts = {"kind": "expert", "task": task, "label": "SMAT", "seed": 1, "hyperparameters": {}, "suite": None}
        checkpoint.save_expert(f"run/{task}", params, checkpoint.describe(params, **facts, base_fingerprint=print_))
    _, _, code = call("ta", "--grid", 0.3, 0.6, "--out", "run/merged", inputs=("--run", "run"))
    assert code is None
    assert manifest("run/merged/ta")["hyperparameters"] == {"coef": 0.6}
    assert list(manifest("run/merged/ta")["experts"]) == ["x", "y"]


def test_the_newest_json_file_that_has_the_key_counts(tmp_path):
    files = {"old.json": {"a": {"b": 1}}, "deep/er/new.json": {"a": {"b": 2}}, "other.json": {"c": 3}, "cut.json": None}
    for age, (name, content) in enumerate(files.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{" if content is None else json.dumps(content))
        os.utime(tmp_path / name, (age, age))
    assert (at("a/b", tmp_path), at("c", tmp_path)) == (2, 3)
    (tmp_path / "old.json").write_text(
        json.dumps({"a": {"b/c": {"d": 1.5}, "b": {"x": 1, "c": True}}, "a/b": {"y": 4}})
    )
    assert [at(key, tmp_path) for key in ("a/b/c/d", "a/b/x", "a/b/y")] == [1.5, 1, 4]
    (tmp_path / "deep/er/new.json").unlink()
    with pytest.raises(ValueError, match=r"a/b/c is True in old.json"):
        at("a/b/c", tmp_path)


@pytest.mark.parametrize(
    ("text", "number"),
    [("41.2", 41.2), ("x\n-3e-2\n\n  \n", -0.03), ("10%\r50%\r100%\n 7 \r\n", 7), ("y" * 70_000 + "\n5", 5)],
)
def test_the_last_line_that_is_not_empty_is_the_score(text, number, tmp_path):
    (tmp_path / "out").write_text(text)
    assert last_number(tmp_path / "out") == number


def test_folders_with_spaces_and_placeholders_within_words(tmp_path):
    model = tmp_path / "a b/.x/ta-0.1"
    model.mkdir(parents=True)
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:]); print(len(sys.argv))")
    asked = Asked(
        f"{sys.executable} {shlex.quote(str(tmp_path))}/show.py pretrained={{model}},x={{y}} --to={{out}}/it '{{}}'"
    )
    assert Program(asked, tmp_path / "logs")(model) == {"": 4}
    words = f"['pretrained={model},x={{y}}', '--to={model.parent}/files/it', '{{}}']\n4\n"
    assert (tmp_path / "logs/ta-0.1.out").read_text() == words


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("lm_eval --model_args pretrained={model},tokenizer=/home/me/tok --output_path {out}",
         "lm_eval --model_args pretrained={model},tokenizer=tok --output_path {out}"),
        ("/usr/bin/env ~/bin/score.sh '/data/my/x' {model}/sub ./here/there --url http://localhost:8000/v1",
         "env score.sh 'x' {model}/sub ./here/there --url http://localhost:8000/v1"),
    ],
)  # fmt: skip
def test_published_commands_name_no_folders_of_this_machine(command, shown):
    facts = Asked(command).facts(TaskArithmetic())["asked"]
    assert facts["score"] == shown
    assert facts["score_sha256"] != Asked(command.replace("/", "/x/")).facts(TaskArithmetic())["asked"]["score_sha256"]
