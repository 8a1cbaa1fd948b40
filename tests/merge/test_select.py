"""The search: maximum, ties to the earlier, and nothing seen but the score it is given."""

import inspect
import math
import random as numbers

import pytest
import torch

from smat_fn import merge, random


def test_choose_maximises_and_takes_the_earlier_of_equal_scores():
    scores = {"a": 1.0, "b": 3.0, "c": 3.0, "d": -2.0}
    chosen = merge.choose(list(scores), scores.__getitem__)
    assert chosen == merge.Selection("b", 3.0, tuple(scores.items()))
    assert merge.choose([4, 3], lambda _: float("-inf")).best == 4


def test_means_of_the_same_scores_in_another_order_are_equal():
    rng = numbers.Random(0)
    for _ in range(300):
        scores = [100 * rng.randrange(90) / 90 for _ in range(7)]
        means = [sum(own) / 7 for own in (scores, scores[::-1], sorted(scores))]
        assert merge.choose([0, 1, 2], means.__getitem__).best == 0
        assert merge.choose([0, 1], (means[0], means[0] + 1e-6).__getitem__).best == 1
    assert not merge.exceeds(-math.inf, -math.inf)
    assert merge.exceeds(1e-300, 0.0)
    assert merge.exceeds(-1.0, -1.0 - 1e-9)


def test_choose_scores_each_candidate_once_in_order():
    seen = []
    merge.choose(merge.DROP_PROBS, lambda p: seen.append(p) or 0.0)
    assert seen == [0.1, 0.3, 0.5, 0.7, 0.9]


def test_choose_refuses_nan_and_nothing():
    with pytest.raises(ValueError, match=r"the score of candidate 0\.2 is NaN"):
        merge.choose([0.1, 0.2, 0.3], lambda c: float("nan") if c == 0.2 else 1.0)
    with pytest.raises(ValueError, match="candidates is empty"):
        merge.choose([], float)
    assert merge.choose(torch.tensor([1.0, 2.0]), float).score == 2
    for score in (None, (1.0, 2.0), torch.ones(2)):
        with pytest.raises(ValueError, match=rf"candidate 0\.1 is a {type(score).__name__}: score must return"):
            merge.choose([0.1], lambda _, score=score: score)


def test_candidates():
    assert merge.COEFS == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert list(merge.TIES_KEEPS) == sorted(merge.TIES_KEEPS, reverse=True)  # from less to more pruning
    assert list(merge.DROP_PROBS) == sorted(merge.DROP_PROBS)
    # the paper's reference coefficients (appendix A)
    assert merge.CALIBRATION_COEFS == {
        "language": {"ties": 0.3, "dare": 0.3, "della": 1.0},
        "vision": {"ties": 0.2, "dare": 0.2, "della": 1.0},
    }


def test_every_merger_states_its_grid():
    paper = {"wa", "ta", "ties", "dare", "della"}
    grids = {merger.name: merger.grid for merger in (*merge.MERGERS, *merge.MORE_MERGERS)}
    assert {grids[name] for name in paper} == {merge.COEFS}
    assert {name for name, grid in grids.items() if grid == merge.WIDE} >= {"tsv_merge"}
    assert {merge.WIDE[0], merge.WIDE[-1], len(merge.WIDE)} == {0.2, 2.0, 10}
    assert set(grids.values()) == {merge.COEFS, merge.WIDE}


def test_a_coefficient_at_an_edge_and_the_next_one_beyond():
    assert [merge.grid_edge(c, merge.COEFS) for c in (0.1, 0.5, 1.0)] == ["smallest", "", "largest"]
    assert merge.grid_edge(0.3, (0.3,)) == merge.grid_edge(0.3, (0.1, 0.2)) == ""
    for coefs, edge in ((merge.COEFS, "Largest"), (merge.COEFS, ""), ((0.3,), "largest")):
        with pytest.raises(ValueError, match=rf"edge is '{edge}' of .*: give 'smallest' or 'largest', of two"):
            merge.next_coef(coefs, edge)
    assert merge.next_coef(merge.COEFS[::-1], "largest") == 1.1
    assert merge.next_coef(merge.WIDE, "largest") == 2.2
    assert merge.next_coef((0.1, 0.3), "smallest") == 0.05
    assert merge.next_coef((-0.1, 0.3), "smallest") == -0.5


def test_select_coef_finds_the_maximum_and_ties_go_to_the_smaller():
    base, vector = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    found = merge.select_coef(base, vector, lambda params: -abs(params["w"].sum().item() - 1.8))
    assert found.best == 0.6
    assert [coef for coef, _ in found.curve] == list(merge.COEFS)
    for coefs in (merge.COEFS, merge.COEFS[::-1]):
        assert merge.select_coef(base, vector, lambda params: 1.0, coefs).best == 0.1
        assert merge.select_coef(base, vector, lambda params: float(params["w"][0] > 0.45), coefs).best == 0.5


@pytest.mark.parametrize(
    ("coefs", "text"),
    [
        (0.3, "coefs are 0.3: give several numbers"),
        (None, "coefs are None: give"),
        ("12", "coefs are '12': give"),
        ([0.1, "x", math.nan], "coef is 'x', must be a number"),
        ([0.1, math.nan], "coef is nan, must be finite"),
    ],
)
def test_coefficients_that_are_no_numbers_are_named(coefs, text):
    tree = {"w": torch.ones(3)}
    for call in (
        lambda: merge.select_coef(tree, tree, lambda params: 1.0, coefs),
        lambda: merge.select_coefs(tree, lambda own: 1.0, coefs, start=0.3),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            call()
    with pytest.raises(ValueError, match=r"sweeps is 1.5: give at least one"):
        merge.select_coefs(tree, lambda own: 1.0, start=0.3, sweeps=1.5)


def test_select_coef_scores_the_very_trees_that_the_merger_gives(family):
    base, experts = family(torch.bfloat16)
    key, seen = random.key(3), []
    vector = merge.dare_vector(key, base, experts, drop_prob=0.3)
    before = {path: leaf.clone() for path, leaf in vector.items()}

    def score(params):
        seen.append({path: leaf.clone() for path, leaf in params.items()})
        for leaf in params.values():
            leaf.zero_()  # a score that spoils its tree spoils no other
        return 0.0

    merge.select_coef(base, vector, score)
    assert len(seen) == len(merge.COEFS)
    for coef, params in zip(merge.COEFS, seen, strict=True):
        final = merge.dare(key, base, experts, coef=coef, drop_prob=0.3)
        assert all(torch.equal(final[path], params[path]) for path in base)
    assert all(torch.equal(before[path], leaf) for path, leaf in vector.items())


def test_select_sees_only_the_score_it_is_given():
    assert list(inspect.signature(merge.select_coef).parameters) == ["base", "vector", "score", "coefs"]
    assert list(inspect.signature(merge.choose).parameters) == ["candidates", "score"]
    dev, test = torch.tensor([0.3]), torch.tensor([0.9])  # the two disagree: dev alone decides
    base, vector, touched = {"w": torch.zeros(1)}, {"w": torch.ones(1)}, []

    def score(target, name):
        return lambda params: touched.append(name) or -(params["w"] - target).abs().item()

    scores = {"dev": score(dev, "dev"), "test": score(test, "test")}
    assert merge.select_coef(base, vector, scores["dev"]).best == 0.3
    assert set(touched) == {"dev"}


def test_blocks_are_told_by_the_first_number():
    paths = "embed.w", "layers.0.w", "layers.0.2.w", "enc.h.11.b", "3.w", "layers.4"
    assert [merge.block_prefix(path) for path in paths] == ["", "layers.0", "layers.0", "enc.h.11", "", ""]


def test_coordinate_ascent_finds_the_best_coefficient_of_each_block():
    vector = {path: torch.ones(2) for path in ("embed", "h.0.w", "h.0.b", "h.1.w")}
    best, calls = {"": 0.2, "h.0": 0.7, "h.1": 1.0}, []

    def score(coefs):
        calls.append(dict(coefs))
        return -sum(abs(coefs[block] - best[block]) for block in best)

    found = merge.select_coefs(vector, score, merge.COEFS, start=0.5)
    assert found.coefs == best
    assert found.score == 0
    assert calls[0] == dict.fromkeys(best, 0.5)
    assert len(calls) == 1 + 3 * 9  # the coefficient that a block has is not tried again
    assert found.curve[:2] == (("", 0.1, score({**calls[0], "": 0.1})), ("", 0.2, score({**calls[0], "": 0.2})))


def test_a_further_sweep_sees_the_others_and_one_without_a_change_is_the_last():
    vector = {"h.0.w": torch.ones(1), "h.1.w": torch.ones(1)}
    table = {(1, 1): 0, (2, 1): -1, (1, 2): 1, (2, 2): 3}  # h.0 pays only once h.1 has moved
    tried = []

    def score(coefs):
        tried.append((coefs["h.0"], coefs["h.1"]))
        return table[tried[-1]]

    assert merge.select_coefs(vector, score, (1, 2), start=1).coefs == {"h.0": 1, "h.1": 2}
    tried.clear()
    assert merge.select_coefs(vector, score, (1, 2), start=1, sweeps=9).coefs == {"h.0": 2, "h.1": 2}
    assert len(tried) == 1 + 2 + 2 + 2  # two sweeps that change, one that does not
    equal = merge.select_coefs(vector, lambda coefs: 5, (1, 2), start=1, sweeps=3)
    assert equal.coefs == {"h.0": 1, "h.1": 1}  # equal scores change nothing
    with pytest.raises(ValueError, match=r"coefs are \[\] and sweeps is 0"):
        merge.select_coefs(vector, score, (), start=1, sweeps=0)


def test_blocks_are_applied_with_their_own_coefficients():
    base = {"embed": torch.ones(2), "h.0.w": torch.ones(2), "n": torch.tensor(3)}
    vector = {"embed": torch.tensor([1.0, 2.0]), "h.0.w": torch.tensor([1.0, -2.0])}
    merged = merge.apply_blocks(base, vector, {"": 0.5, "h.0": 2.0})
    assert (merged["embed"].tolist(), merged["h.0.w"].tolist(), int(merged["n"])) == ([1.5, 2.0], [3.0, -3.0], 3)
    with pytest.raises(ValueError, match=r"blocks \['h.0'\] have no coefficient"):
        merge.apply_blocks(base, vector, {"": 0.5})
    with pytest.raises(ValueError, match=r"coefs name blocks \['h.7'\], which the vector does not have"):
        merge.apply_blocks(base, vector, {"": 0.5, "h.0": 2.0, "h.7": 1.0})
    with pytest.raises(ValueError, match=r"coef of block '' is nan, must be finite; coef of block 'h\.0' is None"):
        merge.apply_blocks(base, vector, {"": float("nan"), "h.0": None})
    assert merge.select_coefs(vector, lambda coefs: coefs["h.0"], torch.tensor([0.5, 1.0]), start=0.5).score == 1
