"""Metrics on the 0 to 100 scale: those of class indices, and those of TRACE's texts.

A text metric is ``metric(predictions, references, prompts) -> float``, the mean over rows; only SARI reads the prompts.
Predictions and references are stripped first. An empty prediction has no label, no number and ROUGE 0, but a SARI: it
has deleted all that is to be deleted.
"""

import math
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import imported, name_rows, raise_problems, suggestion, takes

TextMetric: TypeAlias = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]

_LETTER = r"[\s:=()\[\]\"'*]*([A-D])(?![A-Za-z0-9])"
# in the order in which they are tried, on NFKC text, whose colons and brackets are ASCII
_LABELS = (
    *(
        re.compile(keyword + _LETTER, re.IGNORECASE)
        for keyword in (
            r"(?<![a-z])answer(?:\s+is)?",
            r"(?<![a-z])(?:choose|choice|option)(?:\s+is)?",
            r"(?:答案|选择|选项|选)(?:是|为)?",
        )
    ),
    re.compile(r"\A[\[(]?\s*([A-D])\s*[\])]?\s*[.,:、。\-]?\Z", re.IGNORECASE),
    re.compile(r"(?<![A-Za-z0-9])([A-D])(?![A-Za-z0-9])"),
)
_DIGITS = r"([-+]?\d+(?:\.\d+)?)(?!\w|\.\d)"
_NUMBERS = (
    re.compile(r"\banswer(?:\s+is)?[\s:=$(*]*" + _DIGITS, re.IGNORECASE | re.ASCII),
    re.compile(r"(?<![\w.])" + _DIGITS, re.ASCII),
)
# Thai to Myanmar, Khmer, kana, Chinese characters: four in a row are more than one word
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]{4}")


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """``100 * (number of equal entries) / N``, NaN where a prediction is negative: its logits were NaN.

    Args: predictions, labels: integers of one shape (N,).
    Raises: ValueError for unequal shapes and for N = 0.
    """
    if predictions.shape != labels.shape or not labels.numel():
        raise ValueError(
            f"accuracy of predictions {tuple(predictions.shape)} against labels {tuple(labels.shape)}: "
            "give one prediction per label, at least one"
        )
    if bool((predictions < 0).any()):
        return math.nan
    return 100 * int((predictions == labels.to(predictions.device)).sum()) / labels.numel()


def balanced_accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The mean of the accuracies on the rows of each class, for classes with rows. Args, Raises: as `accuracy`."""
    return _by_class(predictions, labels, lambda right, rows, _: right / rows, lambda rows, _: rows > 0)


def macro_f1(predictions: Tensor, labels: Tensor) -> float:
    """The mean over classes of ``2 |right| / (|rows| + |predicted|)``, for classes that a row or a prediction has.

    Args, Raises: as `accuracy`.
    """
    return _by_class(
        predictions,
        labels,
        lambda right, rows, predicted: 2 * right / (rows + predicted),
        lambda rows, predicted: rows + predicted > 0,
    )


def _by_class(
    predictions: Tensor,
    labels: Tensor,
    value: Callable[[Tensor, Tensor, Tensor], Tensor],
    counts: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """100 times the mean of a value over the classes that count, of the numbers of right rows, rows, predictions."""
    if math.isnan(accuracy(predictions, labels)):
        return math.nan
    labels = labels.to(predictions.device)
    right, rows, predicted = (
        own.bincount(minlength=int(max(predictions.max(), labels.max())) + 1).double().cpu()
        for own in (labels[predictions == labels], labels, predictions)
    )
    those = counts(rows, predicted)
    return 100 * value(right[those], rows[those], predicted[those]).mean().item()


CLASS_METRICS: Mapping[str, Callable[[Tensor, Tensor], float]] = MappingProxyType(
    {"accuracy": accuracy, "balanced-accuracy": balanced_accuracy, "macro-f1": macro_f1}
)


def extract_label(text: str) -> str:
    """The letter A to D that a text answers with, "" where there is none.

    The first that is found of: a letter after "answer"; after "choose", "choice" or "option"; after 答案, 选择, 选项
    or 选; a letter alone, perhaps in brackets or with a full stop; a stand-alone capital anywhere. Only the last minds
    the case, so that "the answer is a dovish one" reads as A.
    """
    text = unicodedata.normalize("NFKC", text).strip()
    for pattern in _LABELS:
        if match := pattern.search(text):
            return match[1].upper()
    return ""


def extract_number(text: str) -> str:
    """The number after "answer", else the first stand-alone number, "" where there is none; digits as they stand."""
    for pattern in _NUMBERS:
        if match := pattern.search(text):
            return match[1]
    return ""


def label_accuracy(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Share of rows whose `extract_label` is the reference's first character (C-STANCE, FOMC)."""
    return _mean(predictions, references, lambda p, r: float(extract_label(p) == r[:1].upper() != ""))


def first_letter_accuracy(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """`label_accuracy` of the predictions' first characters alone (ScienceQA: a letter, then the reasons).

    The first character counts whatever follows it: "B" and "Because" are both B, "The answer is B" has no label.
    """
    return _mean(predictions, references, lambda p, r: float(extract_label(p[:1]) == r[:1].upper() != ""))


def numeric_accuracy(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Share of rows whose `extract_number` is the reference, as strings: 7.0 is not 7 (NumGLUE).

    A reference that is not a number must be the whole prediction.
    """

    def row(prediction: str, reference: str) -> float:
        numeric = re.fullmatch(_DIGITS, reference, re.ASCII)
        return float((extract_number(prediction) if numeric else prediction) == reference)

    return _mean(predictions, references, row)


def rouge_l(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Mean F of summary-level ROUGE-L as in package ``rouge`` 1.0.1, the reference passed first (MeetingBank).

    Sentences end at full stops, words at spaces, case counts. 0 where a text has nothing but full stops. The package
    adds 1e-8 to a denominator: equal texts score 99.99999950.
    """
    from rouge import Rouge

    scorer = Rouge(metrics=["rouge-l"], stats=["f"])
    limit = sys.getrecursionlimit()

    def row(prediction: str, reference: str) -> float:
        if not all(text.replace(".", "").strip() for text in (prediction, reference)):
            return 0.0
        # the package walks back through its table by recursion, a word a call
        sys.setrecursionlimit(limit + len(prediction.split()) + len(reference.split()))
        try:
            return scorer.get_scores(reference, prediction)[0]["rouge-l"]["f"]
        finally:
            sys.setrecursionlimit(limit)

    return _mean(predictions, references, row)


def word_rouge_l(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Mean F1 of ROUGE-L: 2 l / (n_p + n_r), l the length of the longest common subsequence of words.

    Words are between spaces, in lower case, in NFKC and without punctuation at their ends but for a number's sign. Each
    counts as often as it stands there, unlike in `rouge_l`, which MeetingBank's published scores are of.

    Source: Lin, "ROUGE: a package for automatic evaluation of summaries", 2004.
    """

    def row(prediction: str, reference: str) -> float:
        p, r = map(_bare_words, (prediction, reference))
        return 2 * _common(p, r) / (len(p) + len(r)) if p and r else 0.0

    return _mean(predictions, references, row)


def sari(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str]) -> float:
    """Mean SARI against one reference, the prompt as source; lower case, sacrebleu's 13a tokens (20Minuten).

    With n-gram counts S, P, R of source, prediction and reference, the mean over n = 1..4 of the mean of
    - keep: F of precision mean_{g in S&P} (S&P&R)[g] / (S&P)[g] and recall sum(S&P&R) / sum(S&R),
    - delete: precision mean_{g in S-P} (S-P-R)[g] / (S-P)[g],
    - add: F of the precision and recall of the set P\\S against R\\S,
    where & is the minimum, - the positive difference, and a mean over nothing is 1.
    Raises: ValueError unless there is a prompt per prediction.
    Source: Xu et al., TACL 2016, as in Hugging Face's metric ``sari``.
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    if len(prompts) != len(predictions):
        raise ValueError(f"SARI needs a prompt per prediction: got {len(prompts)} for {len(predictions)}")
    # "" is one empty word, as in Hugging Face's metric
    sources = iter([tokenize(prompt.lower()).split(" ") for prompt in prompts])

    def row(prediction: str, reference: str) -> float:
        source, *others = next(sources), *(tokenize(text.lower()).split(" ") for text in (prediction, reference))
        return sum(_sari(*(_grams(words, n) for words in (source, *others))) for n in range(1, 5)) / 4

    return _mean(predictions, references, row)


def exact_match(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Share of rows whose words are the reference's words (`_words`), in their order."""

    def row(prediction: str, reference: str) -> float:
        p, r = _words(prediction, reference)
        return float(p == r)

    return _mean(predictions, references, row)


def token_f1(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Mean F1 of words (`_words`): 2 c / (n_p + n_r), n their numbers, c the size of their multiset intersection.

    Two texts without a word score 1, one without a word 0.

    Source: the F1 of SQuAD 2.0 (Rajpurkar et al., ACL 2018); SQuAD 1.1 scores two texts without a word 0.
    """

    def row(prediction: str, reference: str) -> float:
        p, r = map(Counter, _words(prediction, reference))
        return 2 * (p & r).total() / (p.total() + r.total()) if p or r else 1.0

    return _mean(predictions, references, row)


def contains(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Share of rows whose prediction holds the reference's words one after another (`_words`); an empty one never."""

    def row(prediction: str, reference: str) -> float:
        p, r = (f" {' '.join(words)} " for words in _words(prediction, reference))
        return float(bool(r.strip()) and r in p)

    return _mean(predictions, references, row)


def likelihood(predictions: Sequence[str], references: Sequence[str] = (), prompts: Sequence[str] = ()) -> float:
    """``100 exp(1/n sum log p)`` over all n tokens of all rows' answers or plain texts: 100 / perplexity.

    Args: predictions: "SUM COUNT" of each row, the sum of log p of its tokens and their number, as `likelihood.reader`
        gives them.
    """
    sums, counts = zip(*(map(float, text.split()) for text in predictions), strict=True)
    return 100 * math.exp(math.fsum(sums) / math.fsum(counts))


def same_choice(predictions: Sequence[str], references: Sequence[str], prompts: Sequence[str] = ()) -> float:
    """Share of rows whose likeliest choice, as `likelihood.reader` gives it, is the reference."""
    return 100 * sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)


def uncounted(metric: TextMetric, references: Sequence[str]) -> list[str]:
    """How many references a metric does not compare as it is meant to, and why."""
    found: list[tuple[int, str]] = []
    if metric is numeric_accuracy:
        odd = [text for text in references if not re.fullmatch(_DIGITS, text.strip(), re.ASCII)]
        why = (
            "are not plain numbers, and count only where the whole prediction is the same text: write digits without "
            f"separators and units, or choose another metric; the first is {odd[0][:40] if odd else ''!r}"
        )
        found.append((len(odd), why))
    if metric in (word_rouge_l, contains):
        what = "are empty" if metric is word_rouge_l else "are empty or punctuation alone"
        why = f"{what}, which this metric never counts as right: remove these rows, or choose another metric"
        own = (text.split() if metric is word_rouge_l else _words("", text)[1] for text in references)
        found.append((sum(not words for words in own), why))
    if metric in (word_rouge_l, token_f1, contains):
        why = "have no spaces between words, which this metric compares: exact, or a function of your own, fits better"
        found.append((sum(bool(_UNSPACED.search(text)) for text in references), why))
    return [f"{count} {why}" for count, why in found if count]


def metric_of(name: str) -> TextMetric:
    """The metric of a name in `METRICS`, or of a function as ``module:function``.

    Raises: ValueError for an unknown name, and for a module or function that cannot be imported.
    """
    if name in METRICS:
        return METRICS[name]
    if not isinstance(name, str) or ":" not in name:
        name = str(name)
        near = suggestion(name, METRICS) or ","
        known = ", ".join(map(repr, METRICS))
        raise ValueError(f"metric {name!r} is unknown{near} choose one of {known}, or give module:function")
    found: Any = imported("metric", name)
    if not callable(found):
        raise ValueError(f"metric {name!r} is a {type(found).__name__}, must be a function of lists of texts")
    if not takes(found, 3):
        raise ValueError(f"metric {name!r} does not take three lists of texts: predictions, answers, prompts")
    return found


METRICS: Mapping[str, TextMetric] = MappingProxyType(
    {
        "rouge-l": word_rouge_l,
        "label": label_accuracy,
        "number": numeric_accuracy,
        "exact": exact_match,
        "f1": token_f1,
        "contains": contains,
        "likelihood": likelihood,
        "choice": same_choice,
        "choice_norm": same_choice,
    }
)
TRACE_METRICS: Mapping[str, TextMetric] = MappingProxyType(
    {
        "C-STANCE": label_accuracy,
        "FOMC": label_accuracy,
        "MeetingBank": rouge_l,
        "ScienceQA": first_letter_accuracy,
        "NumGLUE-cm": numeric_accuracy,
        "NumGLUE-ds": numeric_accuracy,
        "20Minuten": sari,
    }
)


def _words(prediction: str, reference: str) -> list[list[str]]:
    """The words of both in lower case, without punctuation and English articles, as SQuAD compares answers.

    Beyond SQuAD, which drops ``string.punctuation`` (with symbols such as $ and +): texts are in NFKC, other
    punctuation of Unicode is dropped too, and where the reference has nothing but articles they are kept: the A of a
    choice is an answer.
    """
    texts = [unicodedata.normalize("NFKC", text).lower() for text in (prediction, reference)]
    words = ["".join(c for c in text if not _is_punctuation(c)).split() for text in texts]
    articles = {"a", "an", "the"}
    if words[1] and articles.issuperset(words[1]):
        return words
    return [[word for word in own if word not in articles] for own in words]


def _bare_words(text: str) -> list[str]:
    """The words of `word_rouge_l`; punctuation that stands alone, where there is nothing else."""
    words = unicodedata.normalize("NFKC", text).replace("\u2212", "-").lower().split()
    return [bare for word in words if (bare := _bare(word))] or words


def _bare(word: str) -> str:
    while word and _is_punctuation(word[-1]):
        word = word[:-1]
    while word and _is_punctuation(word[0]) and not (word[0] in "+-" and word[1:2].isdigit()):
        word = word[1:]
    return word


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence, all of a row of its table at once as the bits of a number.

    Source: Hyyrö, "Bit-parallel LCS-length computation revisited", 2004.
    """
    places = dict[str, int]()
    for i, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << i
    every = row = (1 << len(left)) - 1
    for word in right:
        same = row & places.get(word, 0)
        row = (row + same | row - same) & every
    return len(left) - row.bit_count()


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _sari(source: Counter[str], prediction: Counter[str], reference: Counter[str]) -> float:
    kept, keepable = source & prediction, source & reference
    right = kept & reference
    precision = sum(right[g] / kept[g] for g in right) / len(kept) if kept else 1.0
    recall = right.total() / keepable.total() if keepable else 1.0
    keep = _harmonic(precision, recall)

    deleted = source - prediction
    good = deleted - reference
    delete = sum(good[g] / deleted[g] for g in good) / len(deleted) if deleted else 1.0

    added, addable = prediction.keys() - source.keys(), reference.keys() - source.keys()
    hits = len(added & addable)
    add = _harmonic(hits / len(added) if added else 1.0, hits / len(addable) if addable else 1.0)
    return (keep + delete + add) / 3


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


def _grams(words: list[str], n: int) -> Counter[str]:
    return Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


def _mean(predictions: Sequence[str], references: Sequence[str], row: Callable[[str, str], float]) -> float:
    problems = [
        f"{name} is one string: give a list of them"
        for name, texts in (("predictions", predictions), ("references", references))
        if isinstance(texts, str)
    ]
    if len(predictions) != len(references) or not len(references):
        problems.append(f"{len(predictions)} predictions for {len(references)} references: give one each, at least one")
    for name, texts in (("predictions", predictions), ("references", references)):
        if odd := [i for i, text in enumerate(texts) if not isinstance(text, str)]:
            problems.append(f"{name} holds a {type(texts[odd[0]]).__name__} in {name_rows(odd)} (from 0): give texts")
    raise_problems(problems)
    pairs = zip(predictions, references, strict=True)
    return 100 * sum(row(prediction.strip(), reference.strip()) for prediction, reference in pairs) / len(references)
