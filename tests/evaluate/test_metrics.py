"""Metrics of texts: by hand, by stored values of the packages, and of real references against themselves."""

import json
import math
import random
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from sklearn.metrics import f1_score, recall_score

from smat_fn.evaluate.metrics import (
    CLASS_METRICS,
    TRACE_METRICS,
    accuracy,
    balanced_accuracy,
    contains,
    exact_match,
    extract_label,
    extract_number,
    first_letter_accuracy,
    label_accuracy,
    macro_f1,
    metric_of,
    numeric_accuracy,
    rouge_l,
    sari,
    token_f1,
    word_rouge_l,
)

SHARED = Path(__file__).resolve().parents[3] / "shared"
needs_golden = pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason="no ../shared/golden")
needs_trace = pytest.mark.skipif(not (SHARED / "data" / "trace").is_dir(), reason="no ../shared/data/trace")


def golden(name):
    stored = json.loads((SHARED / "golden" / "metrics.json").read_text(encoding="utf-8"))
    return next(cases for key, cases in stored.items() if key.startswith(name))


@pytest.mark.parametrize("classes", [2, 7])
def test_metrics_of_unequal_classes_are_those_of_scikit_learn(classes):
    draw = torch.Generator().manual_seed(classes)
    labels = torch.multinomial(torch.arange(1.0, classes + 1), 60, replacement=True, generator=draw)
    predictions = torch.where(torch.rand(60, generator=draw) < 0.6, labels, labels.roll(1))
    y, x = labels.tolist(), predictions.tolist()
    assert macro_f1(predictions, labels) == pytest.approx(100 * f1_score(y, x, average="macro"), abs=1e-12)
    recall = recall_score(y, x, average="macro", labels=sorted(set(y)))
    assert balanced_accuracy(predictions, labels) == pytest.approx(100 * recall, abs=1e-12)


def test_metrics_of_classes_by_hand():
    """One of four rows is of class 1, and nobody is of class 2, which is predicted once."""
    labels, predictions = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 2, 0])
    assert accuracy(predictions, labels) == 50
    assert balanced_accuracy(predictions, labels) == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert macro_f1(predictions, labels) == pytest.approx(100 * (4 / 6 + 0 + 0) / 3)
    for metric in CLASS_METRICS.values():
        assert metric(labels, labels) == 100
        assert math.isnan(metric(torch.tensor([0, -1]), torch.tensor([0, 1])))
        with pytest.raises(ValueError, match="give one prediction per label"):
            metric(torch.zeros(0), torch.zeros(0))


def test_accuracy_counts_equal_entries():
    assert accuracy(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 0])) == 75
    assert math.isnan(accuracy(torch.tensor([0, -1]), torch.tensor([0, 1])))  # its logits were NaN
    with pytest.raises(ValueError, match=r"predictions \(0,\) against labels \(0,\)"):
        accuracy(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("  b\n", "B"),
        ("(C)", "C"),
        ("(b)", "B"),
        ("[d].", "D"),
        ("D.", "D"),
        ("A.支持", "A"),
        ("\uff22", "B"),
        ("B: hawkish", "B"),
        ("The answer is B.", "B"),
        ("Answer:\nC", "C"),
        ("**Answer: D**", "D"),
        ("answer: (a)", "A"),
        ("I choose D", "D"),
        ("option C is right", "C"),
        ("The choice is B", "B"),
        ("答案是B。", "B"),
        ("答案\uff1a\uff23", "C"),
        ("选择\uff08D\uff09", "D"),
        ("态度\uff1aC", "C"),
        ("neutral, so C it is", "C"),
        # earlier rules win over earlier places
        ("A is wrong, the answer is B", "B"),
        ("Option A? The answer is D", "D"),
        ("A和B中选B项", "B"),
        ("答案是C, option B", "B"),
        ("Because of this", ""),
        ("ABC", ""),
        ("A1", ""),
        ("E", ""),
        ("dovish", ""),
        ("", ""),
    ],
)
def test_extract_label(text, letter):
    assert extract_label(text) == letter


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", "7"),
        ("It is 12.", "12"),
        ("-3.5 degrees", "-3.5"),
        ("5 + 2 = 7", "5"),
        ("5 + 2, the answer is 7.", "7"),
        ("Answer: $42", "42"),
        ("x5 or v2.0, so 9", "9"),
        ("20%", "20"),
        ("1.4300000000000002", "1.4300000000000002"),
        ("12km", ""),
        ("1.2.3", ""),
        ("August", ""),
        ("", ""),
    ],
)
def test_extract_number(text, number):
    assert extract_number(text) == number


def test_label_accuracies():
    assert label_accuracy(["A", "The answer is B", "c", ""], ["A", "B", "B", "C"]) == 50
    # the first character of the prediction, whatever follows
    predictions = ["B\nbecause", "Because", "The answer is B", "", " b)"]
    for metric, scores in ((first_letter_accuracy, (100, 100, 0, 0, 100)), (label_accuracy, (100, 0, 100, 0, 100))):
        assert tuple(metric([text], ["B\nIt rhymes."]) for text in predictions) == scores
        assert metric(predictions, ["B\nIt rhymes."] * 5) == 60
    assert TRACE_METRICS["ScienceQA"] is first_letter_accuracy
    assert first_letter_accuracy(["", "E"], ["A", "E"]) == 0


def test_numeric_accuracy_compares_strings():
    assert numeric_accuracy(["7.0", "07", "The answer is 7.", "7"], ["7"] * 4) == 50
    assert numeric_accuracy(["August", "august", "August 12", ""], ["August"] * 4) == 25
    assert numeric_accuracy([" 3 pm "], ["3 pm"]) == 100
    assert numeric_accuracy(["", "none"], ["3", "4"]) == 0


def test_rouge_l_by_hand():
    assert rouge_l(["a b c d e"], ["e d c b a"]) == pytest.approx(20, rel=1e-6)
    assert rouge_l(["x y"], ["a b"]) == 0
    assert rouge_l(["a b", "x y"], ["a b", "a b"]) == pytest.approx(50, rel=1e-6)
    # recall 2/4, precision 1
    assert rouge_l(["a b"], ["a b c d"]) == pytest.approx(200 / 3, rel=1e-6)
    # the package walks through the sentences of its second text, here the prediction's: the order matters
    assert rouge_l(["a b. b"], ["b a."]) == pytest.approx(50, rel=1e-6)
    assert rouge_l(["b a."], ["a b. b"]) == pytest.approx(100, rel=1e-6)


def test_word_rouge_l_by_hand():
    cases = {
        ("0.5 " * 50, "0.5"): 200 / 51,  # each word counts as often as it is there
        ("5.12", "12.5"): 0,
        ("U.S.A.", "A.S.U."): 0,
        ("(Paris)!", "paris."): 100,
        ("the cat sat on", "The cat on the mat"): 200 * 3 / 9,
        ("-5", "5"): 0,
        ("(-5)", "\u22125"): 100,
        ("a b c d e", "e d c b a"): 20,
        ("...", "..."): 100,
        ("", "a"): 0,
        ("a", "..."): 0,
    }
    for (prediction, reference), value in cases.items():
        assert word_rouge_l([prediction], [reference]) == pytest.approx(value, abs=1e-12)
    mean = sum(cases.values()) / len(cases)
    assert word_rouge_l(*map(list, zip(*cases, strict=True))) == pytest.approx(mean, rel=1e-12)


def test_word_rouge_l_has_the_longest_common_subsequence_of_a_table():
    drawn = random.Random(0)
    for _ in range(300):
        left, right = ([drawn.choice("abcd") for _ in range(drawn.randrange(1, 90))] for _ in range(2))
        row = [0] * (len(right) + 1)
        for x in left:
            before = row
            row = [0]
            for j, y in enumerate(right):
                row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
        wanted = 200 * row[-1] / (len(left) + len(right))
        assert word_rouge_l([" ".join(left)], [" ".join(right)]) == pytest.approx(wanted, rel=1e-12)


def test_rouge_l_without_a_word_is_zero():
    assert rouge_l(["", " ", "...", ". ."], ["a b"] * 4) == 0
    assert rouge_l(["a b"], ["."]) == 0


def test_rouge_l_of_a_sentence_longer_than_the_recursion_limit():
    before = sys.getrecursionlimit()
    words = before // 2 + 50
    assert rouge_l([" ".join(f"a{i}" for i in range(words))], [" ".join(f"b{i}" for i in range(words))]) == 0
    assert sys.getrecursionlimit() == before


@needs_golden
def test_rouge_l_has_the_packages_values():
    cases = golden("rouge_l")
    for case in cases:
        assert rouge_l([case["prediction"]], [case["reference"]]) == pytest.approx(100 * case["f"], rel=1e-12)
    assert len(cases) == 6


def test_sari_by_hand():
    # sums of (keep + delete + add) over n = 1..4
    total = (
        (Fraction(2, 3) + Fraction(1, 2) + 1)  # keep: precision 1, recall 1/2; delete a and b, b alone is right
        + (0 + Fraction(1, 2) + Fraction(2, 3))  # "a a" should be kept; "a c" and "c c" added, "a c" is right
        + (1 + 1 + 0)  # nothing to keep
        + 3  # no n-grams at all
    )
    assert sari(["a c c"], ["a a c"], ["a a b"]) == pytest.approx(float(100 * total / 12), rel=1e-12)


def test_sari_lowers_and_splits_punctuation():
    assert sari(["The END."], ["the end ."], ["The end, then."]) == pytest.approx(100, rel=1e-12)
    assert sari(["B", "C"], ["B", "D"], ["A", "A"]) == pytest.approx((100 + sari(["C"], ["D"], ["A"])) / 2, rel=1e-12)


@needs_golden
def test_sari_is_hugging_faces():
    cases = golden("sari")
    for case in cases:
        scored = sari([case["prediction"]], case["references"], [case["source"]])
        assert scored == pytest.approx(100 * case["sari"], rel=1e-12)
    assert any(not case["prediction"] for case in cases)


@needs_trace
@pytest.mark.parametrize("task", TRACE_METRICS)
def test_real_references_are_right_answers(task):
    rows = []
    for split in ("train", "dev", "eval"):
        rows += json.loads((SHARED / "data" / "trace" / task / f"{split}.json").read_text(encoding="utf-8"))
    if task in ("MeetingBank", "20Minuten"):
        rows = rows[:: 5 if task == "MeetingBank" else 25]
    answers, prompts = [row["answer"] for row in rows], [row["prompt"] for row in rows]
    score = TRACE_METRICS[task](answers, answers, prompts)
    if task == "MeetingBank":
        assert score == pytest.approx(100, abs=1e-4)
    elif task == "20Minuten":
        # an n-gram that the answer rightly keeps once of three times counts as wrongly deleted
        assert 99 < score < 100
    else:
        assert score == 100
    # one place on, most answers are wrong
    moved = TRACE_METRICS[task](answers[1:] + answers[:1], answers, prompts)
    assert moved < 65
    empty = TRACE_METRICS[task]([""] * len(answers), answers, prompts)
    assert empty == 0 or (task == "20Minuten" and 0 < empty < 50)


def test_bad_lists_are_refused():
    for metric in TRACE_METRICS.values():
        with pytest.raises(ValueError, match="1 predictions for 2 references"):
            metric(["A"], ["A", "B"], ["p"])
        with pytest.raises(ValueError, match="0 predictions for 0 references"):
            metric([], [], [])
    with pytest.raises(ValueError, match=r"predictions is one string.*references is one string"):
        label_accuracy("A", "A")
    with pytest.raises(ValueError, match=r"predictions holds a NoneType in rows 1 and 2 \(from 0\): give texts"):
        label_accuracy(["A", None, None], ["A", "B", "C"])
    with pytest.raises(ValueError, match="got 0 for 1"):
        sari(["A"], ["A"], [])


def test_exact_f1_and_contains_compare_words_as_squad_does():
    says = ["The Eiffel Tower!", "a  cat sat", "", "not at all"]
    want = ["eiffel tower", "the cat", "", "tall"]
    assert exact_match(says, want) == 50  # the first and the empty one
    # 1; cat sat and cat: 2 * 1 / 3; two empty texts: 1; 0
    assert token_f1(says, want) == pytest.approx(100 * (1 + 2 / 3 + 1 + 0) / 4)
    assert token_f1(["x x y"], ["x x x z"]) == pytest.approx(100 * 2 * 2 / 7)
    assert token_f1([""], ["x"]) == token_f1(["x"], [""]) == 0
    assert contains(says, want) == 50  # whole words one after another, and nothing is in nothing
    assert contains(["tower eiffel", "the eiffel, tower of"], ["eiffel tower", "eiffel tower"]) == 50


@pytest.mark.parametrize(("says", "want"), [("$5", "5"), ("C++", "C"), ("`code`", "code"), ("5\u20135", "5-5")])
def test_symbols_of_ascii_are_punctuation_as_in_squad_and_so_is_that_of_unicode(says, want):
    assert exact_match([says], [want]) == token_f1([says], [want]) == contains([says], [want]) == 100
    assert exact_match([f"{says}\u20ac"], [want]) == 0  # the euro sign is not punctuation


def test_the_a_of_a_choice_is_an_answer_and_no_article():
    says = ["A", "the answer is (A).", "", "the", "B"]
    assert exact_match(says, ["A"] * 5) == token_f1(["A", "", "the", "B"], ["A"] * 4) - 5 == 20
    assert contains(says, ["A"] * 5) == 40
    assert (exact_match(["the A"], ["b"]), exact_match(["a B"], ["b"])) == (0, 100)


def test_metrics_are_found_by_name_or_as_functions():
    assert metric_of("exact") is exact_match
    assert metric_of("smat_fn.evaluate.metrics:sari") is sari
    with pytest.raises(ValueError, match="metric 'exat' is unknown, did you mean 'exact'"):
        metric_of("exat")
    with pytest.raises(ValueError, match=r"metric 'no\.such:f' cannot be imported"):
        metric_of("no.such:f")
    with pytest.raises(ValueError, match="metric 'json:__name__' is a str, must be a function"):
        metric_of("json:__name__")
