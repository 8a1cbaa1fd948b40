"""Tables of the pages, between their marks, from stored results and options: ``python -m benchmarks readme``."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from smat_fn.checkpoint import write_bytes, write_text
from smat_fn.evaluate.statistics import estimate, paired, settled_together

from . import options
from .by_seed import by_seed

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
DATA, MEANS = "digits_data_mergers", ("Avg", "All", "Drop")
EIGHT = "WA", "TA", "TIES", "DARE", "DELLA", "TSV_MERGE", "ISO_C", "WUDI"  # of the means of one pass against two
FIGURE = ROOT / "docs/results/studies.png"
ONE_PASS = {
    "digits": "Digits",
    "vit": "ViT",
    "vit_blocks": "Blocks",
    "text": "Text",
    "smollm2_text_strengths": "Language",
}
OTHER_WORK = "Training times are of a machine that did other work too."
RIVALS = "TA", "TSV_MERGE"  # without data: the simplest, and the best
WITHOUT_HEADS = "the order of batches and the draws"  # what a seed decides
Scores: TypeAlias = dict[str, dict[str, list[float]]]  # by method and column, of every seed


def main() -> None:
    """Write every table of options, every one whose results stand, and the figure of the studies."""
    for name, (page, own) in options.PAGES.items():
        fill(ROOT / page, name, options.table(own))
    for name, (page, text) in TABLES.items():
        file = RESULTS / f"{SOURCES.get(name, name)}.json"
        if file.exists():
            fill(ROOT / page, name.replace("_", "-"), text(stored(file.stem)))
    studies = {title: stored(f"{name}_onepass") for name, title in ONE_PASS.items()}
    write_bytes(FIGURE, by_seed(studies, [*studies["Text"]["paired"]]))


def stored(name: str) -> dict[str, Any]:
    """The results of a name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def fill(page: Path, name: str, text: str) -> None:
    """Write the page with the text between its marks ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    write_text(page, between(page.read_text(encoding="utf-8"), name, text))


def between(page: str, name: str, text: str) -> str:
    """The page with ``text`` between two marks. Raises: ValueError unless each is there once, in order."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if (page.count(begin), page.count(end)) != (1, 1) or page.index(begin) > page.index(end):
        raise ValueError(f"the page must have the lines {begin} and {end} once, in this order: the table goes between")
    return page[: page.index(begin)] + begin + "\n" + text + page[page.index(end) :]


def digits_methods(result: dict[str, Any]) -> str:
    """All methods on digits."""
    return (
        f"{methods('digits_methods', result)}\n"
        f"Test score, mean over four tasks and {seeds(result)} ± standard deviation. Learning rate and "
        "hyperparameter of each method were chosen among six candidates on dev of three other seeds, by a "
        "[protocol](protocols/digits_methods.md) fixed before the runs. Seeds re-split the same images, so "
        f"intervals are optimistic. {corrected(result)} {beside('digits_methods', result)} "
        f"From `make report` at commit {result['commit'][:7]} on {result['hardware']}: "
        "[the whole report](results/digits_methods/report.md).\n"
    )


def minilm_methods(result: dict[str, Any]) -> str:
    """All methods on a pretrained text encoder."""
    return (
        f"{methods('minilm_methods', result)}\n"
        f"Test score, mean over five tasks and {seeds(result)} ± standard deviation. Learning rate and "
        "hyperparameter of each method were chosen among four candidates on dev of another seed, by a "
        "[protocol](protocols/minilm.md) fixed before the runs. Model, tasks and rows are the same for all seeds, "
        f"so intervals do not cover their choice. {corrected(result)} {beside('minilm_methods', result)} "
        f"From `{result['command']}` at commit {result['commit'][:7]} on "
        f"{result['hardware']}: [the whole report](results/minilm_methods/report.md).\n"
    )


def on_digits(result: dict[str, Any], *, name: str, tuned: str, end: str = "", budget: bool = False) -> str:
    """One backward pass a step against two, on digits. Args: budget: dev chose the steps of every method."""
    return (
        f"{one_pass(name, result, whole=budget)}\n"
        f"Test score, mean over four tasks and {seeds(result)} ± standard deviation; differences are paired by seed. "
        f"{corrected(result)} {candidates(name)} of each method were compared on dev of {tuned}, in grids that widen "
        f"where the best one is at an edge, by a [protocol](protocols/{name}.md) fixed before the runs. A seed splits "
        "the same images anew, pretrains its own base, and decides the order of batches and the draws; intervals are "
        "optimistic, since seeds share the images. "
        f"{since(result, OTHER_WORK)}{by_merger(result['test'])}{end}\n"
    )


def digits_equal_passes(result: dict[str, Any]) -> str:
    """The same methods and seeds at equal passes, after the study."""
    return (
        f"{one_pass('digits_equal_passes', result, whole=True)}\n"
        "The same seeds at equal passes, [fixed](protocols/digits_equal_passes.md) after the study above and before "
        f"these runs; {seeds(result)}, eight mergers. {since(result, OTHER_WORK).rstrip()}\n"
    )


def digits_length(result: dict[str, Any]) -> str:
    """SMAT beside fine-tuning at several lengths of training, on digits."""
    own = {(one["length"], one["family"]): one for one in result["by_dev"]}
    pairs = [(f"{what}, FT", "SMAT") for what in ("Expert", "Merged", "TSV-M")]
    gain = "SMAT - FT (95 %)"
    head = ("Steps", "Learning rates", *pairs[0], *pairs[1], gain, *pairs[2], gain)
    lines = []
    for length in sorted({steps for steps, _ in own}):
        ft, smat = own[length, "FT"], own[length, "SMAT"]
        rates = f"{ft['lr']:g}, {smat['lr']:g}"
        mean, tsv = ranged(smat["from_ft"]), ranged(smat["tsv_merge_from_ft"])
        scores = [(f"{ft[name]:.2f}", f"{smat[name]:.2f}") for name in ("expert", "mean", "tsv_merge")]
        lines.append((str(length), rates, *scores[0], *scores[1], mean, *scores[2], tsv))
    doubled = [ranged(result["per_doubling"][f"SMAT, {name}"]) for name in ("mean", "tsv_merge")]
    return (
        f"{table(head, lines)}\n"
        f"Test score, mean over four tasks and {seeds(result)}, merged: mean of WA, TA and TIES; differences are "
        f"paired by seed. A doubling of the steps adds {doubled[0]} to the difference, by TSV-M {doubled[1]}. Each "
        "method has the learning rate that dev chose at this length, by a [protocol](protocols/digits_length.md) fixed "
        f"before the runs. From `{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}.\n"
    )


def whole_vit(result: dict[str, Any]) -> str:
    """One backward pass a step against two, on all weights of a ViT."""
    together = f"While they trained, 18 processes shared the GPU, with torch {result['versions']['torch']}."
    return pretrained("vit", "eight image tasks", result, protocol="backbones", times=together)


def pretrained(
    name: str,
    tasks: str,
    result: dict[str, Any],
    decides: str = f"the training rows of the heads, {WITHOUT_HEADS}",
    protocol: str | None = None,
    times: str = OTHER_WORK,
    without: str | None = None,
) -> str:
    """One backward pass a step against two, on a pretrained backbone.

    Args: without: a merger, whose share the differences are shown without too.
    """
    return (
        f"{one_pass(f'{name}_onepass', result)}\n"
        f"Test score, mean over {tasks} and {seeds(result)} ± standard deviation; differences are paired by seed. "
        f"{corrected(result)} {candidates(f'{name}_onepass')} of each method were compared on dev of another seed, by "
        f"a [protocol](protocols/{protocol or name}.md) fixed before the runs. A seed decides {decides}; model, tasks "
        "and test rows are the same for all, so intervals do not cover their choice. "
        f"{since(result, times)}{by_merger(result['test'])}\n{of_others(without, result['test']) if without else ''}"
    )


def of_others(merger: str, test: Scores) -> str:
    """The differences from FT of the mean over the other mergers, in a sentence."""
    others = [name for name in mergers_of(test) if name != merger]
    own = {
        label: [mean(scores) for scores in zip(*(line[name] for name in others), strict=True)]
        for label, line in test.items()
    }
    told = "; ".join(f"{label} {of_pair(own['FT'], scores)}" for label, scores in own.items() if label != "FT")
    return f"\nMean of the mergers other than {merger}, minus FT's (95 %): {told}.\n"


def corrected(result: dict[str, Any]) -> str:
    """The differences from FT that stay significant when corrected for their number, in a sentence."""
    own = {label: estimate(found["differences"]) for label, found in result["paired"].items()}
    names = settled_together(own)
    kept = f"these are significant: {'; '.join(names)}" if names else "none is significant"
    return f"Intervals are single ones; with Holm's correction for the {len(own)} differences from FT {kept}."


def candidates(name: str) -> str:
    """How many candidates of a method were tuned: the fewest and the most."""
    numbers = {len(own) for own in stored(f"{name}_tuning")["dev"].values()}
    return f"{' to '.join(str(n) for n in sorted({min(numbers), max(numbers)}))} candidates"


def since(result: dict[str, Any], times: str) -> str:
    """Where the numbers of a table of one pass against two are from."""
    return f"{times} From `{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}.\n\n"


def one_pass(name: str, result: dict[str, Any], *, whole: bool = False) -> str:
    """Passes, scores, differences from FT and from all of ASAM, and training times, by method.

    Args: whole: passes of the training, not of a step.
    """
    test = result["test"]
    rivals = [name for name in test if name.startswith("ASAM")]
    seconds, steps = training_seconds(name), steps_of(name)
    lines = []
    for label, scores in test.items():
        ratio = mean(seconds[label][seed] / seconds["FT"][seed] for seed in result["seeds"])
        against = [of_pair(test[rival]["All"], scores["All"]) if label != rival else "-" for rival in rivals]
        values = spread(scores["Expert"]), spread(scores["All"]), interval(result, label), *against, f"{ratio:.2f}"
        lines.append((label, f"{passes(label) * (steps[label] if whole else 1):,}", *values))
    differences = (f"- {name} (95 %)" for name in ("FT", *rivals))
    count = {5: "five", 8: "eight"}[len(mergers_of(test))]
    head = (
        "Method",
        "Passes" if whole else "Passes a step",
        "Expert",
        f"Mean of {count} mergers",
        *differences,
        "Training time x FT",
    )
    return table(head, lines)


def by_merger(test: Scores) -> str:
    """Means by method and each merger, the best of a merger in bold."""
    names = mergers_of(test)
    best = {name: max(mean(scores[name]) for scores in test.values()) for name in names}

    def cell(scores: dict[str, list[float]], name: str) -> str:
        shown = f"{(value := mean(scores[name])):.2f}"
        return f"**{shown}**" if value == best[name] else shown

    lines = [(label, *(cell(own, name) for name in names)) for label, own in test.items()]
    return (
        f"{table(('Method', *names), lines)}\n"
        "The same scores by merger, mean over seeds; the best method of each merger is bold."
    )


def mergers_of(test: Scores) -> list[str]:
    """Those of the eight mergers that the methods were compared with."""
    return [name for name in EIGHT if name in test["FT"]]


def digits_mergers(result: dict[str, Any]) -> str:
    """Every merger by the methods of the one-pass study, a line for each merger; then those with data beside others."""
    test, sees = with_data(result["test"])
    commands = [result["command"]] + ([stored(DATA)["command"]] if sees else [])
    return (
        f"{every_merger(test, sees)}\n"
        f"Test score on digits, mean over four tasks and {seeds(result)}, at the choices of the one-pass study; lines "
        "are in the order of their mean over the methods that all of them have. A merger's coefficient is chosen on "
        "dev, AdaMerging's coefficients by entropy alone; nothing else is tuned. Where there is no number a merger was "
        "not run, or, with Muon, there are no moments to merge by. "
        f"From {' and '.join(f'`{command}`' for command in commands)} on {result['hardware']}.\n"
        f"{from_others(test, sees, result)}"
    )


def from_others(test: Scores, sees: Mapping[str, str], result: dict[str, Any]) -> str:
    """Differences of mergers with data from two without, over the methods with Adam; nothing where there are none."""
    names = [name for name in ordered(test) if name in sees]
    having = {name: [x for x, own in test.items() if name in own and "Muon" not in x] for name in names}
    lines = [
        (name, *(of_pair(mean_of(test, own, other), mean_of(test, own, name)) for other in RIVALS), str(len(own)))
        for name, own in having.items()
    ]
    if not lines:
        return ""
    head = "Merger with data", *(f"- {other} (95 %)" for other in RIVALS), "Methods"
    return (
        f"\n{table(head, lines)}\n"
        "The same scores as differences, averaged over the methods with Adam that have them, paired by seed, with the "
        f"95 % t interval over {seeds(result)}.\n"
    )


def text_mergers(result: dict[str, Any]) -> str:
    """Every merger without data by the methods of the text encoder's study, a line for each merger."""
    return (
        f"{every_merger(without_means(result['test']))}\n"
        f"Test score on the text encoder, mean over five tasks and {seeds(result)}, at the choices of the "
        "[study](studies.md#a-text-encoder-at-one-pass); lines are in the order of their mean over the methods. A "
        "merger's coefficient is chosen on dev; nothing else of a merger is tuned. "
        f"From `{result['command']}` on {result['hardware']}.\n"
    )


def text_data_mergers(result: dict[str, Any]) -> str:
    """Mergers with data on the text encoder beside some without, on the same experts."""
    whole = stored("text_onepass")
    places = [whole["seeds"].index(seed) for seed in result["seeds"]]
    test = {
        label: line | {name: [whole["test"][label][name][place] for place in places] for name in RIVALS}
        for label, line in result["test"].items()
    }
    return (
        f"{every_merger(test, result['sees'])}\n"
        f"The same with mergers that need data, and two that need none, mean over five tasks and {seeds(result)}. "
        "Coefficients are chosen on dev, AdaMerging's by entropy alone; nothing else is tuned. "
        f"From `{result['command']}` on {result['hardware']}.\n"
        f"{from_others(test, result['sees'], result)}"
    )


def every_merger(test: Scores, sees: Mapping[str, str] | None = None) -> str:
    """Means by merger and method, with a column of the data that mergers see where ``sees`` is given."""
    lines = []
    for name in ordered(test):
        data = () if sees is None else (sees.get(name, "-"),)
        lines.append((name, *data, *(f"{mean(own[name]):.1f}" if name in own else "-" for own in test.values())))
    return table(("", *(() if sees is None else ("Data",)), *test), lines)


def without_means(test: Scores) -> Scores:
    """Scores of experts and mergers alone."""
    return {x: {name: s for name, s in line.items() if name not in MEANS} for x, line in test.items()}


def with_data(test: Scores) -> tuple[Scores, dict[str, str]]:
    """Scores of mergers without data together with those of mergers with data, where stored, and what these see."""
    own = without_means(test)
    if not (RESULTS / f"{DATA}.json").exists():
        return own, {}
    found = stored(DATA)
    for label, line in found["test"].items():
        own[label] |= {name: scores for name, scores in line.items() if name != "Expert"}
    return own, {name: rows for name, rows in found["sees"].items() if any(name in line for line in own.values())}


def ordered(test: Scores) -> list[str]:
    """Experts and mergers by their mean over the methods that have them all."""
    names = list(dict.fromkeys(name for line in test.values() for name in line))
    common = [line for line in test.values() if all(name in line for name in names)]
    return sorted(names, key=lambda name: -mean(mean(line[name]) for line in common))


def mean_of(test: Scores, labels: Sequence[str], name: str) -> list[float]:
    """A merger's mean over methods, by seed."""
    return [mean(scores) for scores in zip(*(test[label][name] for label in labels), strict=True)]


def of_pair(reference: Sequence[float], other: Sequence[float]) -> str:
    """The mean of paired differences with its interval."""
    return ranged(paired(reference, other))


def ranged(found: Mapping[str, Any]) -> str:
    """The mean of differences with its interval; of one seed, which has none, the mean alone."""
    low, high = found.get("interval", (None, None))
    return f"{found['mean']:+.2f}" + ("" if low is None else f" ({low:+.2f} to {high:+.2f})")


def passes(label: str) -> int:
    """Backward passes in a step of a method."""
    return 2 if label.startswith("ASAM") else 1


def steps_of(name: str) -> dict[str, int]:
    """Steps of training by method."""
    lines = map(json.loads, (RESULTS / f"{name}_runs.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["label"]: line["training"]["steps"] for line in lines}


def training_seconds(name: str) -> dict[str, dict[int, float]]:
    """Seconds of training by method and seed."""
    seconds: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (RESULTS / f"{name}_runs.jsonl").read_text(encoding="utf-8").splitlines()):
        seconds.setdefault(line["label"], {})[line["seed"]] = line["training_seconds"]
    return seconds


def methods(name: str, result: dict[str, Any]) -> str:
    """Experts, the five-merger mean, its difference from FT, and the cost of training, by method."""
    seconds, lines = training_seconds(name), []
    for label, scores in result["test"].items():
        difference = interval(result, label)
        ratio = mean(seconds[label][seed] / seconds["FT"][seed] for seed in result["seeds"])
        lines.append((label, spread(scores["Expert"]), spread(scores["Avg"]), difference, f"{ratio:.2f}"))
    head = "Method", "Expert", "Mean of five mergers", "Difference from FT (95 % interval)", "Training time x FT"
    return table(head, lines)


def beside(name: str, result: dict[str, Any]) -> str:
    """Facts beside the table: SMAT against ASAM, and choices at an edge of their grid."""
    found = paired(result["test"]["SMAT"]["Avg"], result["test"]["ASAM"]["Avg"])
    tuning = json.loads((RESULTS / f"{name}_tuning.json").read_text(encoding="utf-8"))
    return (
        f"ASAM - SMAT, paired by seed: {ranged(found)}. "
        f"The choices of {', '.join(at_edge(tuning))} lie at an edge of their grid, beyond which better ones may lie."
    )


def at_edge(tuning: dict[str, Any]) -> list[str]:
    """Methods whose chosen learning rate or hyperparameter is the smallest or the largest of those tried."""

    def numbers(candidate: dict[str, Any]) -> dict[str, float]:
        values = {**candidate["hyperparameters"], **candidate["training"]}
        return {name: value for name, value in values.items() if isinstance(value, (int, float))}

    found = []
    for label, candidates in tuning["dev"].items():
        tried, own = [numbers(candidate) for candidate in candidates], numbers(tuning["chosen"][label])
        grids = {name: {one[name] for one in tried} for name in own}
        if any(len(grid) > 1 and own[name] in (min(grid), max(grid)) for name, grid in grids.items()):
            found.append(label)
    return found


def seeds(result: dict[str, Any]) -> str:
    """The numbers of complete and of planned seeds."""
    done, planned = len(result["seeds"]), len(result["planned_seeds"])
    return f"{done} seed{'s' * (done != 1)}" if done == planned else f"{done} of {planned} planned seeds"


def beside_mergekit(result: dict[str, Any]) -> str:
    """Seconds, memory and their ratios to mergekit's by merger, of a model in bfloat16."""
    shown = {
        "s": 2, "mergekit s": 1, "time ratio": 1, "command s": 1, "mergekit command s": 1, "command ratio": 1,
        "MB": 0, "mergekit MB": 0, "memory ratio": 0,
    }  # fmt: skip
    head = "Merger", "s", "mergekit s", "ratio", "command s", "mergekit's", "ratio", "MB", "mergekit MB", "ratio"
    return table(
        head,
        [(row["merger"], *(f"{row[name]:.{digits}f}" for name, digits in shown.items())) for row in model_rows(result)],
    )


def merge_avx2(result: dict[str, Any]) -> str:
    """The same beside mergekit on a processor whose vector registers are half as wide."""
    return (
        f"{beside_mergekit(result)}\n"
        f"The same with {result['instructions']}, on a machine whose memory is slower: from `{result['command']}` at "
        f"commit {result['commit'][:7]} on "
        f"{result['hardware']}.{_later(result)}\n"
    )


def merge_shared(result: dict[str, Any]) -> str:
    """Mergers that share one compiled loop, beside mergekit."""
    times = "; ".join(f"{row['merger']}: {row['times the floor']:.1f}" for row in model_rows(result))
    return (
        f"{beside_mergekit(result)}\n"
        f"Mergers that share one loop, on a third machine. Times over copying the same bytes are {times}. From "
        f"`{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}.\n"
    )


def merge_gpu(result: dict[str, Any]) -> str:
    """Merges on a GPU, beside the same on that machine's CPU and mergekit's on the GPU."""
    head = "Merger", "s", "on the CPU", "mergekit s", "command s", "mergekit's", "ratio"
    shown = {"s": 2, "s on the CPU": 2, "mergekit s": 2, "command s": 1, "mergekit command s": 1, "command ratio": 1}
    rows = [(row["merger"], *(f"{row[name]:.{digits}f}" for name, digits in shown.items())) for row in result["rows"]]
    other = sum(row["other bits than the CPU's"] for row in result["rows"])
    return (
        f"{table(head, rows)}\n"
        f"{result['experts']} experts of {result['MB of a model']} MB, {result['threads']} threads, chunks of "
        f"{result['chunk']:,} coordinates; mergekit on the GPU too. Weights that differ from those merged on the CPU: "
        f"{other}. From `{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}."
        f"{_again(result)}\n"
    )


def _again(result: dict[str, Any]) -> str:
    """Sentences on rows of another run with other chunks."""
    found: dict[tuple[int, str], list[str]] = {}
    for row in result["rows"]:
        if "chunk" in row:
            found.setdefault((row["chunk"], row["commit"][:7]), []).append(row["merger"])
    return "".join(
        f" The numbers of {' and '.join(names)} are from a later run, at commit {commit}, with chunks of {chunk:,}."
        for (chunk, commit), names in found.items()
    )


def _later(result: dict[str, Any]) -> str:
    """Sentences on rows that are not of the run of all."""
    found = dict[tuple[str, str], list[str]]()
    for row in result["rows"]:
        if "commit" in row:
            found.setdefault((row["merger"], row["commit"][:7]), []).append(row["case"])
    return "".join(
        f" Our numbers of {name} ({', '.join(cases)}) are from a later run, at commit {commit}."
        for (name, commit), cases in found.items()
    )


def _alone(cases: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """A sentence on rows of float32 without mergekit."""
    found = [row["merger"] for row in cases.get("float32", ()) if "command ratio" not in row]
    text = "The rows were measured in parts, by --cases and --mergers; those of float32 with a - without mergekit. "
    return text if found else ""


def merge(result: dict[str, Any]) -> str:
    """`beside_mergekit`; cost of the other cases beside that of copying."""
    cases = {case: [row for row in result["rows"] if row["case"] == case] for case in result["MB"]}
    costs = [(case, *cost) for case, found in cases.items() for cost in _costs(result, case, found)]
    more = "Case", "Merger", "s", "ns of CPU a weight", "x copying", "command s", "mergekit's / ours", "MB"
    rows_, columns = result["embedding"]
    return (
        f"{beside_mergekit(result)}\n"
        f"{result['experts']} experts of {result['MB of a model']} MB (bfloat16), {result['threads']} threads, "
        f"mergekit {result['mergekit'].split()[0]} on CPU. The first times are of the merge itself; those of commands "
        "are from their start to their end, with imports and our hashing and model card. MB is anonymous memory of the "
        "merge.\n\n"
        f"{table(more, costs)}\n"
        f"The same in float32, and {result['embedding_experts']} experts of one embedding of {rows_:,} x {columns:,} "
        "in bfloat16, for which mergekit may need more memory than the machine has. CPU time is of all threads, for "
        "each weight of each expert; copying reads all inputs and writes as many bytes as the merge. "
        f"{_alone(cases)}From `{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}."
        f"{_earlier(result)}{_later(result)}\n"
    )


def _earlier(result: dict[str, Any]) -> str:
    """A sentence on cases that were measured at an earlier commit."""
    found = dict[str, list[str]]()
    for case, commit in result.get("earlier", {}).items():
        found.setdefault(commit[:7], []).append(case)
    return "".join(
        f" The rows of {' and '.join(own)} are from an earlier run, at commit {c}." for c, own in found.items()
    )


def _costs(result: dict[str, Any], case: str, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Cost of the mergers of a case, without its name."""
    width, count = (4 if case == "float32" else 2), result["embedding_experts" if case == "embedding" else "experts"]
    weights = result["MB"][case] * 1e6 / width * count
    for row in rows:
        ratio = f"{row['command ratio']:.1f}" if "command ratio" in row else "-"
        own = f"{row['s']:.2f}", f"{row['cpu s'] / weights * 1e9:.1f}", f"{row['times the floor']:.1f}"
        yield row["merger"], *own, f"{row['command s']:.1f}", ratio, f"{row['MB']:.0f}"


def model_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The merges of a model in bfloat16 that mergekit did too."""
    return [row for row in result["rows"] if "mergekit s" in row and row.get("case", "bfloat16") == "bfloat16"]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, of one value the value."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def results(digits: dict[str, Any]) -> str:
    """The README's table: passes, scores and differences from FT on digits, differences on pretrained models.

    Methods of the study on digits alone are on the page of studies.
    """
    names = "vit", "vit_blocks", "text", "smollm2_text_strengths"
    vit, blocks, texts, words = (stored(f"{name}_onepass") for name in names)
    lines = [
        (
            label,
            str(passes(label)),
            spread(scores["Expert"]),
            spread(scores["All"]),
            interval(digits, label),
            spread(scores["TSV_MERGE"]),
            interval(vit, label),
            interval(blocks, label),
            interval(texts, label),
            interval(words, label),
        )
        for label, scores in digits["test"].items()
        if label in texts["test"]
    ]
    others = "ViT: minus FT", "Blocks: minus FT", "Text: minus FT", "Language: minus FT"
    head = "Method", "Passes", "Experts", "Merged", "Merged minus FT (95 %)", "By TSV-M", *others
    return (
        f"{table(head, lines)}\n"
        f"Test scores, means over tasks and eight mergers, {seeds(digits)} on digits (a tiny ViT, four tasks), with "
        "backward passes a step; in brackets single 95 % t intervals over seeds, which cover neither other data nor "
        "the number of comparisons. "
        f"ViT: the same on ViT-S/14 (eight image tasks, five mergers, {seeds(vit)}). "
        f"Blocks: on two blocks of it (six of the tasks, {seeds(blocks)}). "
        f"Text: on all-MiniLM-L6-v2 (three layers trained, five tasks, {seeds(texts)}). "
        f"Language: on SmolLM2-135M (four layers trained, four tasks, five mergers, {seeds(words)}). "
        "Every method was tuned by the same rule; from "
        f"`{digits['command']}` and `{blocks['command']}` (or `text`, `smollm2_text_strengths`) on "
        f"{digits['hardware']}, and `--name vit` on {vit['hardware'].split(', ')[1].split(' (')[0]}.\n"
    )


def interval(result: dict[str, Any], label: str) -> str:
    """The difference of a method from FT with its interval; "-" where there is none."""
    found = result["paired"].get(label)
    return ranged(found) if found else "-"


def in_words(merger: str) -> str:
    """The name of a merger in a sentence, from that of `merge.py`."""
    return {"wa": "averaging", "ta": "task arithmetic"}.get(merger) or merger.upper().replace("_", "-")


def merge_sentence(result: dict[str, Any]) -> str:
    """Time and memory beside mergekit's, in two sentences."""
    rows = model_rows(result)
    inner, whole, memory = ([row[name] for row in rows] for name in ("time ratio", "command ratio", "memory ratio"))
    least, most = (of(rows, key=lambda row: row["command ratio"])["merger"].split(",")[0] for of in (min, max))
    return (
        f"A whole command, with start-up, hashing and model card, takes 1/{min(whole):.1f} ({in_words(least)}) to "
        f"1/{max(whole):.0f} ({in_words(most)}) of the time of mergekit {result['mergekit'].split()[0]} on CPU; "
        f"the merge itself takes 1/{min(inner):.1f} to 1/{max(inner):.0f} of its time and "
        f"1/{min(memory):.0f} to 1/{max(memory):.0f} of its memory ({result['experts']} experts of "
        f"{result['MB of a model']} MB, {result['hardware']}: "
        "[table](docs/folders.md#memory-and-time)).\n"
    )


def kernels(result: dict[str, Any]) -> str:
    """The kernels on the tree of a Llama beside a copy of the same bytes, on two devices."""
    head = "GPU", "dtype", "Operation", "ms", "GB/s", "x copy", "torch's time / ours", "host ms"
    both = [(_gpu(own), row) for own in (result, stored("kernels_h100")) for row in own["rows"]]
    lines = [
        (name, row["dtype"], row["operation"], *(f"{row[key]['median']:.4g}" if key in row else "-" for key in KERNELS))
        for name, row in both
        if row["tree"] == "Llama-3.2-1B"
    ]
    return f"{table(head, lines)}\nMedians of 20 rounds. {_measured(result, stored('kernels_h100'))}\n"


KERNELS = "ms", "GB/s", "time / copy", "torch / time", "host ms"


def steps(result: dict[str, Any]) -> str:
    """A step of a loop in torch and of SMAT beside fine-tuning, by offload mode."""
    head = "Model", "Method", "offload", "ms a step", "x FT (95 %)", "median", "simulate", "finish", "peak GB"
    clip = stored("steps_h100")
    both = [(result, "llama"), (clip, "clip")]
    lines = [
        (
            f"{row['model']}, {_gpu(own)}",
            row["method"],
            row["offload"] or "-",
            f"{row['ms a step']['median']:.1f}",
            f"{row['ratio']:.3f} ({row['95 %']})",
            f"{row['median ratio']:.3f}" if "median ratio" in row else "-",
            *(f"{row[f'{part} ms a period']:.1f}" for part in ("simulate", "finish")),
            f"{row['peak GB']:.1f}",
        )
        for own, family in both
        for row in own["rows"]
        if row["model"].startswith(family)
    ]
    return f"{table(head, lines)}\n{_measured(result, clip)}\n"


def lora_memory(result: dict[str, Any]) -> str:
    """Peaks of a step of adapters above the weights, by what is formed at a time and dtype."""
    peaks = {(row["state"], row["weights"], row["dtype"]): row["MiB above the weights"] for row in result["rows"]}
    kinds = dict.fromkeys(dtype for _, _, dtype in peaks)
    cases = dict.fromkeys((state, weights) for state, weights, _ in peaks)
    lines = [(", ".join(case), *(f"{peaks[*case, kind]:,.0f} MiB" for kind in kinds)) for case in cases]
    head = f"Peak of a step above the {result['layers'] * 16} MiB of weights", *kinds
    return (
        f"{table(head, lines)}\n"
        f"{result['layers']} linear layers with adapters of rank {result['rank']}, Adam included. From "
        f"`{result['command']}` at commit {result['commit'][:7]} on {result['hardware']}.\n"
    )


def _gpu(result: dict[str, Any]) -> str:
    return re.search(r"NVIDIA (\w+)", result["hardware"])[1]  # type: ignore[index]


def _measured(*results: dict[str, Any]) -> str:
    """Sentence: which commands gave the numbers, where."""
    versions = results[0]["versions"]
    each = [f"`{own['command']}` at commit {own['commit'][:7]} on one {_gpu(own)}" for own in results]
    return f"From {'; '.join(each)}; torch {versions['torch']}, triton {versions['triton']}."


# marks -> (page, text of a result); the result has the same name unless `SOURCES` has another
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "results": ("README.md", results),
    "merge_sentence": ("README.md", merge_sentence),
    "digits_onepass": (
        "docs/studies.md",
        partial(
            on_digits,
            name="digits_onepass",
            tuned="two other seeds",
            end=" FT takes twice the steps of the others with Adam: its dev scores chose that.",
        ),
    ),
    "digits_passes": (
        "docs/studies.md",
        partial(on_digits, name="digits_passes", tuned="two other seeds", budget=True),
    ),
    "digits_equal_passes": ("docs/studies.md", digits_equal_passes),
    "digits_length": ("docs/studies.md", digits_length),
    "digits_lora": ("docs/studies.md", partial(on_digits, name="digits_lora", tuned="another seed")),
    "text": ("docs/studies.md", partial(pretrained, "text", "five tasks")),
    "vit": ("docs/studies.md", whole_vit),
    "vit_blocks": ("docs/studies.md", partial(pretrained, "vit_blocks", "six image tasks")),
    "smollm2_text": ("docs/studies.md", partial(pretrained, "smollm2_text", "four tasks", decides=WITHOUT_HEADS)),
    "smollm2_text_tuned": (
        "docs/studies.md",
        partial(pretrained, "smollm2_text_strengths", "four tasks", decides=WITHOUT_HEADS, without="WUDI"),
    ),
    "digits_methods": ("docs/studies.md", digits_methods),
    "minilm_methods": ("docs/studies.md", minilm_methods),
    "digits_mergers": ("docs/merging.md", digits_mergers),
    "text_mergers": ("docs/merging.md", text_mergers),
    "text_data_mergers": ("docs/merging.md", text_data_mergers),
    "merge": ("docs/folders.md", merge),
    "merge_avx2": ("docs/folders.md", merge_avx2),
    "merge_shared": ("docs/folders.md", merge_shared),
    "merge_gpu": ("docs/folders.md", merge_gpu),
    "lora_memory": ("docs/lora.md", lora_memory),
    "kernels": ("docs/kernels.md", kernels),
    "steps": ("docs/kernels.md", steps),
}
SOURCES = {
    "results": "digits_onepass",
    "merge_sentence": "merge",
    "vit": "vit_onepass",
    "vit_blocks": "vit_blocks_onepass",
    "text": "text_onepass",
    "smollm2_text": "smollm2_text_onepass",
    "smollm2_text_tuned": "smollm2_text_strengths_onepass",
    "text_mergers": "text_onepass",
}
