"""A search over options of a merger beside its coefficient: every combination is searched as if it were given."""

import sys
from dataclasses import replace
from itertools import product
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from smat_fn import checkpoint, merge
from smat_fn.config import (
    Consensus,
    DareTies,
    DcMerge,
    Sce,
    Slerp,
    TallMask,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    Wudi,
)
from smat_fn.evaluate import Scorer
from smat_fn.scripts.commands import merge as command
from smat_fn.scripts.merge import in_memory
from smat_fn.scripts.merge.experts import suite as scoring
from smat_fn.scripts.merge.experts.inputs import Inputs
from smat_fn.scripts.merge.provenance.searched import edges_of
from smat_fn.scripts.merge.search.choosing import merge_one
from smat_fn.scripts.merge.search.over import over_of, with_searched
from smat_fn.scripts.recipes.load import fields_of, recipe_of

TASKS = ("rot90", "mirror")
TIES = Ties(aggregate="sum", scope="global")


def noise(seed):
    return {"w": torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def inputs():
    base = noise(0)
    experts = {task: {"w": base["w"] + 0.1 * noise(i)["w"]} for i, task in enumerate(TASKS, 1)}
    return Inputs(base, experts, {})


def nearness(params, task, split="dev"):
    """A score of parameters that neither the smallest nor the largest change maximises."""
    wanted = noise(0)["w"] + 0.07 * noise({"rot90": 1, "mirror": 2}[task])["w"].sign()
    return 100 / (1 + float((params["w"] - wanted).square().mean()) * 1e3)


def brute_force(function, over, coefs):
    """(options, coef, score, curve) of every combination by a pure merger, and the place of the best one."""
    found = []
    for values in product(*over.values()):
        own = dict(zip(over, values, strict=True))
        curve = []
        for coef in coefs:
            params = function(**own, **({} if coef is None else {"coef": coef}))
            curve.append((coef, fmean(nearness(params, task) for task in TASKS)))
        coef, score = max(curve, key=lambda point: point[1])  # the first of equal ones
        found.append((own, coef, score, () if coef is None else tuple(curve)))
    return found, max(range(len(found)), key=lambda place: found[place][2])


@pytest.mark.parametrize(
    ("config", "function", "over", "coefs"),
    [
        (Consensus(ratio=9.0), merge.consensus, {"ratio": (0.2, 0.6, 0.4), "least": (2, 1)}, (0.3, 0.9)),
        (TIES, merge.ties, {"scope": ("tensor", "global"), "keep": (0.9, 0.4)}, (0.5, 1.0)),
        (Wudi(), merge.wudi, {"norms": (False, True)}, (0.4, 0.8)),
        (DcMerge(), merge.dc_merge, {"keep": (0.2, 0.8), "smooth": ("none", "mean"), "elect": (True, False)}, (1.0,)),
        (Sce(), merge.sce, {"density": (0.5, 0.8), "coef": (0.5, 1.5)}, (None,)),
        (Slerp(), merge.slerp, {"arc": ("slerp", "first"), "coef": (0.3, 0.8, 0.6)}, (None,)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_choice_is_that_of_brute_force(config, function, over, coefs, inputs, suite):
    base = (inputs.base,) if config.based else ()

    def pure(**options):
        return function(*base, inputs.experts, **{"aggregate": "sum"} if config is TIES else {}, **options)

    expected, best = brute_force(pure, over, coefs)
    said = []
    scorer, given = Scorer(suite.replace(score=nearness)), () if coefs == (None,) else coefs
    found = merge_one(config, inputs, seed=0, scorer=scorer, coefs=given, over=over, report=said.append)
    options, coef, score, _ = expected[best]
    assert [(own.options, own.score, own.curve) for own in found.tuned] == [
        (own, pytest.approx(value, abs=1e-9), points and tuple((x, pytest.approx(y, abs=1e-9)) for x, y in points))
        for own, _, value, points in expected
    ]
    assert (found.options, found.coef) == (options, options.get("coef", getattr(config, "coef", None) or coef))
    assert found.curve == found.tuned[best].curve
    assert torch.equal(found.params["w"], pure(**options, **({} if coef is None else {"coef": coef}))["w"])
    assert fmean(found.dev.values()) == pytest.approx(score)
    assert found.tried.candidates == len(expected) * len(coefs)
    assert len(said) == len(expected)
    assert all(f"{name} {value}" in said[best] for name, value in options.items())
    assert len({own.score for own in found.tuned}) > 1, "else any choice passes"


def test_the_vector_is_merged_once_for_a_combination_and_once_for_the_best(inputs, suite, monkeypatch):
    made, scored, vector = [], [], merge.vector_by

    def counted(config, *args, **options):
        made.append((config.ratio, config.least))
        return vector(config, *args, **options)

    monkeypatch.setattr(merge, "vector_by", counted)

    def score(params, task, split):
        scored.append(task)
        return 50.0 - len(made)  # the first combination is the best one

    over = {"ratio": (0.4, 0.2), "least": (2, 1)}
    found = merge_one(Consensus(ratio=0.4), inputs, seed=0, scorer=Scorer(suite.replace(score=score)), over=over)
    assert made == [(0.4, 2), (0.4, 1), (0.2, 2), (0.2, 1), (0.4, 2)]
    assert len(scored) == 4 * 10 * 2
    assert (found.options, found.coef) == ({"ratio": 0.4, "least": 2}, 0.1)


def test_the_bar_expects_the_scores_of_all_combinations_from_the_start(inputs, suite):
    expected = []

    def score(params, task, split):
        expected.append(bar.total)
        return nearness(params, task)

    bar = SimpleNamespace(total=None, update=lambda share: None)
    scorer = Scorer(suite.replace(score=score), bar=bar)
    merge_one(Consensus(ratio=0.4), inputs, seed=0, scorer=scorer, coefs=(0.1, 0.2, 0.3), over={"least": (1, 2, 3)})
    assert expected == [3 * 3 * 2] * 18


def test_of_equal_scores_the_first_combination_as_typed_wins_and_notes_say_so(inputs, suite):
    flat = Scorer(suite.replace(score=lambda params, task, split: 50.0))
    found = merge_one(Consensus(ratio=0.4), inputs, seed=0, scorer=flat, over={"ratio": (0.6, 0.2), "least": (3, 1)})
    assert (found.options, found.coef) == ({"ratio": 0.6, "least": 3}, 0.1)
    assert [own.options for own in found.tuned] == [
        {"ratio": ratio, "least": least} for ratio in (0.6, 0.2) for least in (3, 1)
    ]
    of_coefs, of_options = in_memory.tied(found)
    assert of_coefs.startswith("all 10 coefficients have the same dev score, 50.00: 0.1 is only the smallest")
    assert of_options.startswith(
        "all 4 combinations of options have the same dev score, 50.00: ratio 0.6, least 3 is only the first"
    )


def test_numbers_at_an_edge_of_those_tried_are_said(inputs, suite):
    def found(over):
        scorer = Scorer(suite.replace(score=lambda params, task, split: 50.0))
        return merge_one(Consensus(ratio=1.0), inputs, seed=0, scorer=scorer, over=over)

    assert edges_of(found({"ratio": (0.6, 0.2), "least": (2,)}).tuned) == {"ratio": "largest"}
    assert edges_of(found({"ratio": (0.4, 0.2, 0.6), "least": (1, 2)}).tuned) == {"least": "smallest"}
    scorer = Scorer(suite.replace(score=lambda params, task, split: 50.0))
    found = merge_one(Wudi(), inputs, seed=0, scorer=scorer, over={"norms": (True, False)})
    assert edges_of(found.tuned) == {}


def test_each_combination_is_the_search_at_these_options_in_two_stages_and_extended(inputs, suite):
    """Of a suite that samples answers, and with a grid that grows."""

    def once(params, task, split, repeat):
        return nearness(params, task) - 3 * abs(float(params["w"][0, 0])) * repeat

    sampled = suite.replace(repeats={"mirror": 3}, score_once=once)
    given = {"seed": 0, "coefs": (0.1, 0.2), "widen": True}
    keeps = (0.3, 0.9, 0.6)
    found = merge_one(TIES, inputs, scorer=Scorer(sampled), over={"keep": keeps}, **given)
    alone = [merge_one(replace(TIES, keep=keep), inputs, scorer=Scorer(sampled), **given) for keep in keeps]
    assert [(own.coef, own.score, own.curve) for own in found.tuned] == [
        (one.coef, fmean(one.dev.values()), one.curve) for one in alone
    ]
    best = max(alone, key=lambda one: fmean(one.dev.values()))
    assert (found.coef, found.dev, found.curve, found.finals) == (best.coef, best.dev, best.curve, best.finals)
    assert torch.equal(found.params["w"], best.params["w"])
    assert found.tried.scores == sum(one.tried.scores for one in alone)
    assert len(found.curve) > 2


def test_a_model_for_one_task_is_chosen_by_the_dev_score_of_that_task(inputs, suite):
    scored = []

    def score(params, task, split):
        scored.append(task)
        return nearness(params, task)

    ratios, config = (0.1, 0.5, 1.0, 4.0), TallMask(ratio=9.0, task="mirror")
    scorer = Scorer(suite.replace(score=score))
    found = merge_one(config, inputs, seed=0, scorer=scorer, over={"ratio": ratios})
    expected = [
        nearness(merge.tall_mask(inputs.base, inputs.experts, task="mirror", ratio=ratio), "mirror") for ratio in ratios
    ]
    assert set(scored) == {"mirror"}
    assert [own.score for own in found.tuned] == expected
    assert found.options == {"ratio": ratios[expected.index(max(expected))]}
    assert found.dev == {"mirror": max(expected)}
    assert len({*expected}) > 1


@pytest.fixture
def counted(suite, monkeypatch):
    """The scores that searches of `merge_run` compute; the one of number ``stop`` ends them."""
    state = {"calls": 0, "stop": None}

    def score(params, task, split):
        if state["calls"] == state["stop"]:
            raise KeyboardInterrupt
        state["calls"] += 1
        return suite.score(params, task, split)

    monkeypatch.setattr(scoring, "load_suite", lambda **recipe: suite.replace(score=score))
    return state


def searched(runs, out, over, config=None, report=print, **options):
    given = {"search": True, "seed": 0, "coefs": (0.2, 0.5), **options}
    config = Consensus(ratio=0.0) if config is None else config
    experts = [runs["ft"] / task for task in TASKS]
    asked = in_memory.Request([config], runs["ft"] / "base", experts, out=out, over=over, **given)
    (found,) = in_memory.merge_run(asked, report).values()
    return found


OVER = {"ratio": (0.2, 0.8), "least": (2, 1)}


def test_an_interrupted_search_over_options_resumes_and_a_finished_one_is_kept(runs, counted, tmp_path, monkeypatch):
    whole = searched(runs, tmp_path / "whole", OVER)
    assert counted["calls"] == whole.tried.scores == 4 * 2 * 2
    counted.update(calls=0, stop=9)
    with pytest.raises(KeyboardInterrupt):
        searched(runs, tmp_path / "part", OVER)
    counted.update(calls=0, stop=None)
    found = searched(runs, tmp_path / "part", OVER)
    assert (counted["calls"], found.tried.kept) == (16 - 9, 9)
    assert (found.options, found.coef, found.dev, found.tuned) == (whole.options, whole.coef, whole.dev, whole.tuned)
    # a search over more values computes the new ones alone, and merges nothing for the others
    made, vector = [], merge.vector_by
    monkeypatch.setattr(merge, "vector_by", lambda *given, **own: made.append(given[0]) or vector(*given, **own))
    more = searched(runs, tmp_path / "part", {"ratio": (0.2, 0.5, 0.8), "least": (2, 1)}, overwrite=True)
    assert (counted["calls"], more.tried.kept) == (7 + 8, 16)
    assert [config.ratio for config in made[:2]] == [0.5, 0.5]
    assert len(made) == 3  # the chosen one
    again = searched(runs, tmp_path / "whole", OVER)
    assert again.kept
    lines = [list(in_memory.summary({tmp_path: model._replace(kept=False, notes=())})) for model in (whole, again)]
    assert lines[0] == lines[1]
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.over\.ratio is"):
        searched(runs, tmp_path / "whole", {"ratio": (0.2,), "least": (2, 1)})
    with pytest.raises(ValueError, match=r"holds another merge: its asked\.over\.least is"):
        searched(runs, tmp_path / "whole", {"ratio": (0.2, 0.8)})


def test_model_card_and_manifest_hold_every_score_and_the_recipe_the_choice(runs, tmp_path):
    said = []
    found = searched(runs, tmp_path, OVER, report=said.append)
    manifest, card = (checkpoint.load_manifest(tmp_path / "consensus"), (tmp_path / "consensus/README.md").read_text())
    assert manifest["dev_options"] == [
        {"options": own.options, "coef": own.coef, "dev": own.score, "curve": [list(point) for point in own.curve]}
        for own in found.tuned
    ]
    assert [own["options"] for own in manifest["dev_options"]] == [
        {"ratio": ratio, "least": least} for ratio in (0.2, 0.8) for least in (2, 1)
    ]
    hyperparameters = {**found.options, "coef": found.coef}
    assert manifest["hyperparameters"] == hyperparameters
    assert manifest["asked"]["settings"] == {}
    assert manifest["asked"]["over"] == {"ratio": [0.2, 0.8], "least": [2, 1]}
    assert "ratio, least were chosen on dev (mean over tasks), each combination at its best coefficient." in card
    assert "At an edge of the values tried: ratio (" in card
    for own, line in zip(found.tuned, said, strict=False):
        points = ", ".join(f"{coef}: {score:.2f}" for coef, score in own.curve)
        assert f"\n| {own.options['ratio']} | {own.options['least']} | {own.score:.2f} | {points} |\n" in card
        options = f"ratio {own.options['ratio']}, least {own.options['least']}"
        assert line.startswith(f"{options}: coef {own.coef:g} (")
        assert line.endswith(f", dev {own.score:.2f}")
    edges = edges_of(found.tuned)
    chosen = ", ".join(f"{name} {value} ({edges[name]} of those tried)" for name, value in found.options.items())
    assert said[4].startswith(f"merged: {tmp_path / 'consensus'}, {chosen}, coef {found.coef:g} (")
    file = tmp_path / "consensus" / checkpoint.RECIPE
    recipe = recipe_of(fields_of(file, "a recipe"), file)
    assert recipe.config == Consensus(**hyperparameters)


def test_factors_by_depth_apply_to_every_combination(runs, tmp_path):
    lines = {"lines": (0.25, 1.0)}
    found = searched(runs, tmp_path / "over", {"share": (0.4, 0.1)}, TsvMerge(), **lines)
    alone = searched(runs, tmp_path / "alone", {}, TsvMerge(share=found.options["share"]), **lines)
    assert (found.coef, found.dev, found.curve) == (alone.coef, alone.dev, alone.curve)
    assert checkpoint.same(found.params, alone.params)


def test_combinations_out_of_range_are_errors_before_anything_is_loaded(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory, "load_inputs", lambda *args, **options: pytest.fail("weights were read"))
    (tmp_path / "consensus").mkdir()
    with pytest.raises(ValueError, match="ratio is -1") as error:
        searched(runs, tmp_path, {"ratio": (-1.0, 0.2, float("inf")), "least": (-3, 1)}, coefs=(0.1, 0.1))
    assert list(error.value.problems) == [
        "coefficients to search are [0.1, 0.1]: name each once",
        f"{tmp_path / 'consensus'} exists: choose another folder or pass `overwrite=True`",
        "--search-over: ratio is -1.0, must be finite and at least 0",
        "--search-over: least is -3, must be at least 0",
        "--search-over: ratio is inf, must be finite and at least 0",
    ]


def test_words_become_values_of_the_options_types():
    words = ["keep=0.2,1e-1", "scope=tensor,global", "rescale=True,False"]
    assert over_of(Ties, words) == {"keep": (0.2, 0.1), "scope": ("tensor", "global"), "rescale": (True, False)}
    (least,) = over_of(Consensus, ["least=1,2"]).values()
    assert [type(value) for value in least] == [int, int]
    assert over_of(DareTies, ["drop-prob=0.1"]) == {"drop_prob": (0.1,)}
    assert over_of(Sce, ["coef=0.5,1"]) == {"coef": (0.5, 1.0)}
    assert over_of(Ties, []) == {}


@pytest.mark.parametrize(
    ("kind", "word", "error"),
    [
        (
            Ties,
            "kept=0.2",
            "kept is not an option of ties, did you mean 'keep'? choose from rescale, keep, aggregate, scope",
        ),
        (WeightAverage, "keep=0.2", "keep is not an option of wa: wa has no options to search"),
        (Ties, "densities=0.2", "densities is neither a number, a choice nor a switch: choose from rescale, keep,"),
        (Ties, "coef=0.1,0.2", "coef: --search tries coefficients already, give them by --grid 0.1 0.2"),
        (TaskArithmetic, "keep", "keep: write NAME=VALUE,VALUE without spaces, such as ratio=0.2,0.4"),
        (Ties, "keep=", "keep=: write NAME=VALUE,VALUE without spaces"),
        (Ties, "keep 0.2 0.4", "keep 0.2 0.4: write NAME=VALUE,VALUE without spaces"),
        (Ties, "keep=0.2,high", "keep=high: must be a number"),
        (Consensus, "least=1.5", "least=1.5: must be an integer"),
        (Ties, "scope=layer", "scope=layer: must be one of global, tensor"),
        (Wudi, "norms=yes", "norms=yes: must be True or False"),
        (Ties, "keep=0.2,0.20", "keep=0.2,0.20: name each value once"),
    ],
)
def test_words_that_cannot_be_searched_are_errors(kind, word, error):
    with pytest.raises(ValueError, match=r"^--search-over ") as found:
        over_of(kind, word.split())
    assert str(found.value).removeprefix("--search-over ").startswith(error)


def test_problems_of_words_are_listed_together_and_an_option_has_one_place():
    words = [
        "consensus",
        "--least",
        "2",
        "--ratio=0.3",
        "--search-over",
        "least=1,2",
        "ratio=0.2",
        "ratio=0.4",
        "many=1",
    ]
    with pytest.raises(ValueError, match="given twice") as error:
        with_searched(words)
    assert [text.partition(":")[0] for text in error.value.problems] == [
        "--search-over ratio is given twice",
        "--search-over many is not an option of consensus",
        "--least and --search-over least both set least",
        "--ratio and --search-over ratio both set ratio",
    ]
    with pytest.raises(ValueError, match="--no-elect and --search-over elect both set elect: leave one out"):
        with_searched(["dc_merge", "--no-elect", "--search-over=elect=True,False"])


def test_problems_of_words_are_printed_line_by_line(monkeypatch, capsys):
    words = [
        "consensus",
        "--run",
        "run",
        "--search",
        "--least=1",
        "--search-over",
        "ratio=high",
        "least=2",
        "--out",
        "out",
    ]
    monkeypatch.setattr(sys, "argv", ["merge.py", *words])
    with pytest.raises(SystemExit, match="2"):
        command.command("merge.py", ())
    assert capsys.readouterr().err.splitlines() == [
        "merge.py:",
        "  --search-over ratio=high: must be a number",
        "  --least and --search-over least both set least: leave one out",
    ]


def test_a_required_option_that_is_searched_counts_as_given():
    words = ["breadcrumbs", "--search-over", "drop-smallest=0.1,0.2", "elect=True", "--drop-largest", "0.1"]
    assert with_searched(words) == [*words, "--drop-smallest", "0.1"]
    for same in (["consensus", "--ratio", "0.2"], ["all", "--search-over", "ratio=0.2"], ["ties", "--search-over"]):
        assert with_searched(same) == same


@pytest.mark.parametrize(
    ("merger", "choice", "told"),
    [
        (command.All(), {"search": True}, "--search-over tries the options of one merger: name it in place of all"),
        (TIES, {}, "--search-over requires --search"),
        (TIES, {"search": True, "calibrate": True}, "--calibrate and --search-over both choose options: leave one out"),
        (TIES, {"search": True, "snapshots": True}, "--snapshots: search one, as --run RUN/snapshots/NUMBER"),
        (TIES, {"search": True, "per_layer": 1}, "--per-layer: search first, then give the chosen options"),
        (Ties(), {"search": True, "semantics": "mergekit"}, "--semantics mergekit and --search-over both set scope"),
    ],
)
def test_what_excludes_a_search_over_options_is_an_error(merger, choice, told, tmp_path):
    options = command.Merge(
        merger=merger, inputs=command.Inputs(run=tmp_path / "run"), machine=command.Machine(),
        choice=command.Choices(search_over=("scope=global,tensor",), **choice),
        output=command.Outputs(out=tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=told):
        command.main(options)
    assert list(tmp_path.iterdir()) == []
