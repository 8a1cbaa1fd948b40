"""The findings: sentences, the main table, paired differences, ablations and noise; None where nothing is to show."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ..evaluate.statistics import Estimate, signed
from .found import PARTS, Found, times
from .section import Section, Table, size, spread, words
from .tables import COLUMNS, JOINT, MORE, Cell, cell_of, drop, is_best, marked, plain, seed_notes

FEW = 4  # pairs that are shown in every column
NOTE = (
    "A difference is taken seed by seed; its interval is Student's t over seeds and covers what seeds change, not the "
    "choice of tasks or data. Several comparisons are not corrected for their number."
)


def summary(found: Found, notes: str = "") -> Section:
    """The summary: a line per label and the label it is compared with."""
    alone = found.labels("noise")
    labels = [label for label in found.table.cells if label not in alone]
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    for label, other in ((x, other) for x in labels for other in found.comparisons(x)):
        column = _scored(found, label)
        got, experts = found.difference(label, column, other), found.difference(label, "Expert", other)
        ratio = times(found.costs.get(label), found.costs.get(other))
        signs = None if got is None else " / ".join(map(str, got.signs))
        texts = [*with_interval(got), signs, verdict(got), *with_interval(experts), ratio and ratio.text(3)]
        rows.append([label, other, column, *texts])
        low, high = (got and got.interval) or (None, None)
        records.append(
            {
                "method": label, "reference": other, "column": column, "mean": got and got.mean, "low": low,
                "high": high, "n": len(got.values) if got else 0, "finding": verdict(got),
                "experts": experts and experts.mean, "times_reference": ratio and ratio.mean,
            }
        )  # fmt: skip
    parts = [" ".join([*_uncompared(found, labels), *_alone(found, alone)]), _legend(found, rows), notes.strip()]
    columns = [
        "Label", "Against", "On", "Difference", "95 % interval", "Seeds + / = / -", "Finding", "Experts",
        "95 % interval of experts", "Time x",
    ]  # fmt: skip
    table = Table(columns, rows, records) if rows else None  # a CSV without a line would have no header
    return Section("Summary", "\n\n".join(part for part in parts if part), table)


def _scored(found: Found, label: str) -> str:
    return "Avg" if "Avg" in found.table.cells[label] else "Expert"


def with_interval(got: Estimate | None) -> tuple[str | None, str | None]:
    """A difference and its interval as texts."""
    if got is None:
        return None, None
    return signed(got.mean), got.interval and f"{signed(got.interval[0])} to {signed(got.interval[1])}"


_EXPERTS = (
    "the experts, since WA, TA, TIES, DARE and DELLA were not all scored: differences here are before merging, those "
    "after it are under Paired differences"
)


def _uncompared(found: Found, labels: list[str]) -> list[str]:
    lines = []
    for label in labels:
        if not found.comparisons(label):
            role = "is the reference" if label == found.base(muon=found.muon(label)) else "has no reference here"
            line, column = found.table.cells[label], _scored(found, label)
            place = "the mean of five mergers" if column == "Avg" else _EXPERTS
            mean = f": {line[column].text()} on {place}" if column in line else ""
            lines.append(f"**{plain(label)}** {role}{mean}.")
    return lines


def _legend(found: Found, rows: list[list[object]]) -> str:
    seeds = sorted({seed for line in found.table.cells.values() for cell in line.values() for seed in cell.by_seed})
    split = found.table.split.capitalize()
    text = f"{split} scores from 0 to 100, means over tasks; seeds {', '.join(map(str, seeds))}."
    if notes := seed_notes(found.table, plain):
        text += f" **Means are over different seeds** ({'; '.join(notes)}), differences over common ones."
    if rows:
        text += (
            " Difference: of the mean of five mergers (Avg), or of the experts where not all five are there. Finding: "
            '"above" or "below" where the interval leaves out zero, else no difference is established. Experts: their '
            f"difference before merging. Time: of training, over that of what it is compared with. {NOTE}"
        )
    return text


def _alone(found: Found, labels: list[str]) -> list[str]:
    """A sentence for each reference of Perturb alone: how many of its settings have which finding."""
    differences: dict[str, list[Estimate]] = {}
    for label in labels:
        other = found.compared_with(label)
        if other is not None and (got := found.difference(label, "Avg", other)):
            differences.setdefault(other, []).append(got)
    sentences = []
    for other, own in differences.items():
        open_ = Counter(verdict(got) for got in own if got.interval is None or (got.alike and got.settled))
        above, below = (sum(verdict(got) == finding for got in own) for finding in ("above", "below"))
        sentences.append(
            f"**Perturb alone**, {len(own)} setting{'s' * (len(own) > 1)} of its noise: the interval of the difference "
            f"from {plain(other)} lies above zero for {above}, below zero for {below}, and contains it for "
            f"{len(own) - above - below - open_.total()}{''.join(f'; {n} {finding}' for finding, n in open_.items())}."
        )
    return sentences


def main_results(found: Found, title: str, *, muon: bool) -> Section | None:
    """The paper's main table, and its bars."""
    from .plots import drawable, main_plot

    table = found.part(found.labels("main", muon=muon)).paper
    if not table.cells:
        return None
    base = found.base(muon=muon)
    texts = marked(table, "**{}**".format if len(table.cells) > 1 else str)
    rows, records = [], []
    for label, line in table.cells.items():
        change = found.difference(label, "Avg", base)
        cost, other = found.costs.get(label), found.costs.get(base or "")
        ratio = times(cost, other)
        cost_of_merging = drop(line)
        costs = ratio and ("1" if label == base else ratio.text(3)), cost and cost.peak and size(cost.peak)
        gain = signed(change.mean) if change and label != base else None
        rows.append([label, *texts[label], cost_of_merging and cost_of_merging.text(), gain, *costs])
        records.append(
            {
                "method": label,
                **spread({**line, "Drop": cost_of_merging} if cost_of_merging else line),
                "avg_change": change and change.mean,
                "times_reference": ratio and ratio.mean,
                "peak_memory_bytes": cost and cost.peak,
            }
        )
    against = base or found.reference
    head = ["Method", *table.columns, "Drop", f"Avg - {against}", f"Time x {against}", "Peak memory"]
    text = (
        "Expert: mean score of the experts on their own tasks, before merging. Avg: mean of the five mergers. Drop: "
        "Expert - Avg, what merging costs. Mean ± standard deviation over seeds; the best of each column in bold, "
        "whatever its interval."
    )
    drawn = main_plot(table, title=title) if drawable(table) else None
    text += "" if drawn or not table.scored else " There are more labels than colours, so there is no figure."
    return Section(title, text, Table(head, rows, records), drawn)


def paired_differences(found: Found) -> Section | None:
    """Differences seed by seed; of many pairs the experts and the mean alone are shown, the CSV has every column.

    Perturb alone is shown where there is nothing else: it has a section of its own.
    """
    from .plots import paired_plot

    pairs = [(label, other) for label in found.table.cells for other in found.comparisons(label)]
    shown = [pair for pair in pairs if found.kind(pair[0]) != "noise"] or pairs
    few = len(shown) <= FEW
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    drawn: dict[str, dict[str, Estimate]] = {}
    for (label, other), column in product(pairs, found.table.columns):
        got = found.difference(label, column, other)
        if got is None:
            continue
        pair, (above, equal, below), (low, high) = f"{label} - {other}", got.signs, got.interval or (None, None)
        records.append(
            {
                "method": label, "reference": other, "column": column, "mean": got.mean, "sd": got.sd, "low": low,
                "high": high, "n": len(got.values), "above": above, "equal": equal, "below": below,
                "differences": " ".join(map(repr, got.values)),
            }
        )  # fmt: skip
        if (label, other) in shown and (few or column in ("Expert", "Avg")):
            block, line = (pair, column) if few else (column, pair)
            drawn.setdefault(block, {})[line] = got
            rows.append([pair, column, *_texts(got)])
    if not rows:
        return None
    columns = ["Difference", "Scores", "Mean", "sd", "95 % interval", "Contains 0", "n", "Signs", "By seed"]
    text = f"Dots are seeds, bars 95 % intervals of the mean. {NOTE}"
    left_out = [*([] if few else ["every merger"]), *([] if shown == pairs else ["Perturb alone"])]
    text += f" `paired-differences.csv` has {' and '.join(left_out)} too." if left_out else ""
    return Section("Paired differences", text, Table(columns, rows, records), paired_plot(drawn))


def _texts(got: Estimate) -> list[object]:
    above, equal, below = got.signs
    mean, interval = with_interval(got)
    return [
        mean,
        None if got.sd is None else f"{got.sd:.2f}",
        interval,
        None if got.interval is None else "no" if got.settled else "yes",
        len(got.values),
        f"{above} + / {below} -" + (f" / {equal} =" if equal else ""),
        ", ".join(map(signed, got.values)),
    ]


def ablation(found: Found) -> Section | None:
    """SMAT without some of its parts, beside full SMAT."""
    labels = found.labels("ablation")
    if not labels:
        return None
    fulls = list(dict.fromkeys(full for label in labels if (full := found.full(label))))
    rows, records = [], []
    for label in [*fulls, *labels]:
        line, setting = found.table.cells[label], found.settings[label]
        off = [part for part in PARTS if part not in (setting.parts or ())]
        variant = f"without {' and '.join(off)}" if off else "full SMAT"
        other = found.compared_with(label) if off else None
        change = found.difference(label, "Avg", other)
        texts = [line[column].text() if column in line else None for column in COLUMNS]
        rows.append([variant, label, *texts, *with_interval(change), verdict(change) if other else None])
        records.append({"variant": variant, "method": label, **spread(line), "avg_change": change and change.mean})
    columns = ["Variant", "Label", *COLUMNS, "Change", "95 % interval", "Finding"]
    against = ", ".join(dict.fromkeys(plain(other) for label in labels if (other := found.compared_with(label))))
    text = f"Change: five-merger mean against {against or 'nothing that is here'}."
    return Section("Ablation", text, Table(columns, rows, records))


def noise(found: Found) -> Section | None:
    """Perturb alone: the mean of five mergers by family and RMS of the noise."""
    from .plots import noise_plot

    labels = [label for label in found.labels("noise") if "Avg" in found.table.cells[label]]
    if not labels:
        return None
    rows, records = [], []
    curves: dict[str, dict[float, Cell]] = {}
    families = _families(found, labels)
    order = sorted(labels, key=lambda x: (families[x], found.settings[x].sigma))
    for label in order:
        sigma, line = found.settings[label].sigma, found.table.cells[label]
        family, other = families[label], found.compared_with(label)
        curves.setdefault(family, {})[sigma] = line["Avg"]
        got = found.difference(label, "Avg", other)
        open_ = evidence(got) if got and got.interval else None
        expert = line["Expert"].text() if "Expert" in line else None
        rms = f"{sigma:g}" if len(found.settings[label].sigmas) < 2 else found.settings[label].described["sigma"]
        rows.append([family, rms, expert, line["Avg"].text(), signed(got.mean) if got else None, open_])
        records.append(
            {"noise": family, "sigma": sigma, "method": label, **spread(line), "avg_change": got and got.mean}
        )
    bases = dict.fromkeys(found.compared_with(label) for label in order)
    base = next(iter(bases)) if len(bases) == 1 else None
    seeds = {seed for points in curves.values() for cell in points.values() for seed in cell.by_seed}
    whole = found.table.cells[base].get("Avg") if base else None
    level = {seed: score for seed, score in whole.by_seed.items() if seed in seeds} if whole else {}
    against = base or (found.reference if len(bases) == 1 else "reference")
    columns = ["Noise", "RMS", "Expert", "Avg", f"Avg - {against}", "Over seeds"]
    text = "Perturb alone, without Scale and Mask. The best sigma was selected on the same scores, so it is optimistic."
    if whole and len(level) < len(whole.by_seed):
        text += f" In the figure {plain(base or '')} is the mean over the seeds that were trained with noise."
    if any(len(found.settings[label].sigmas) > 1 for label in order):
        text += " Where --sigma auto found several, the figure has their mean."
    if len(bases) > 1:
        each = {families[label]: found.compared_with(label) or "none" for label in order}
        text += f" Reference: {'; '.join(f'of {plain(name)}, {plain(other)}' for name, other in each.items())}."
    drawn = noise_plot(curves, reference=(base, cell_of(level)) if base and level else None)
    return Section("Noise", text, Table(columns, rows, records), drawn)


def _families(found: Found, labels: Sequence[str]) -> dict[str, str]:
    """The curve of each label: its noise, and other settings where optimizers differ or several labels have one sigma.

    A point stands for one label, and a curve for one reference.
    """
    values = {x: {**found.settings[x].hyperparameters, **found.settings[x].training} for x in labels}
    names = {label: str(own.get("noise", "uniform")) for label, own in values.items()}
    for name in dict.fromkeys(names.values()):
        own = [label for label in labels if names[label] == name]
        fields = dict.fromkeys(field for x in own for field in values[x] if field not in ("noise", "sigma"))
        differ = [field for field in fields if any(values[x].get(field) != values[own[0]].get(field) for x in own)]
        if len({found.settings[x].sigma for x in own}) < len(own) or len({found.muon(x) for x in own}) > 1:
            more = {x: words({field: values[x].get(field) for field in differ}) for x in own}
            names |= {x: ", ".join(filter(None, (name, more[x]))) for x in own}
    points = Counter((names[x], found.settings[x].sigma) for x in labels)
    return {x: f"{names[x]}, {x}" if points[names[x], found.settings[x].sigma] > 1 else names[x] for x in labels}


def verdict(found: Estimate | None) -> str:
    """The finding that the interval of a paired difference supports."""
    if found is None:
        return "no seed has both"
    if found.signs[1] == len(found.values):
        return "equal"
    if found.interval is None:
        return "open: one seed"
    if found.alike:
        return "open: the same in all seeds"
    if not found.settled:
        return "not established"
    return "above" if found.mean > 0 else "below"


def evidence(found: Estimate) -> str:
    """The interval, whether it contains zero, and how many seeds have each sign."""
    assert found.interval is not None
    low, high = found.interval
    above, equal, below = found.signs
    if found.alike and found.settled:
        return f"{signed(found.mean)} in all {len(found.values)} seeds, which establishes nothing"
    counts = [f"{n} {name}" for n, name in ((above, "above"), (equal, "equal"), (below, "below")) if n]
    contains = "leaves out zero" if found.settled else "contains zero"
    return f"95 % interval {signed(low)} to {signed(high)} {contains} ({len(found.values)} seeds: {', '.join(counts)})"


def mergers(found: Found, facts: Mapping[str, Any]) -> Section | None:
    """Every merger with every way to train, where there are more mergers than the paper's."""
    from .plots import merger_plot

    besides = {"Expert", "Avg", JOINT}
    labels = [x for x, line in found.table.cells.items() if found.kind(x) != "noise" and line.keys() - besides]
    table = found.part(labels)
    if not table.scored.intersection(MORE):
        return None
    names = [column for column in table.columns if column not in besides and column in table.scored]
    pairs = [(label, other) for label in table.cells if (other := found.compared_with(label)) in table.cells]
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    for name in names:
        cells = {label: line[name] for label, line in table.cells.items() if name in line}
        texts = {
            x: f"**{cell.text()}**" if len(cells) > 1 and is_best(cell, cells.values()) else cell.text()
            for x, cell in cells.items()
        }
        gains = {pair: got for pair in pairs if (got := found.difference(pair[0], name, pair[1]))}
        seeds = {x: ", ".join(map(str, cell.by_seed)) for x, cell in cells.items()}
        same = len({*seeds.values()}) == 1
        each = "; ".join(f"{x} {own}" for x, own in seeds.items())
        counts = str(len(next(iter(cells.values())).by_seed)) if same else each
        changes = [with_interval(gains.get(pair)) for pair in pairs]
        differences = [f"{mean} ({interval})" if interval else mean for mean, interval in changes]
        rows.append([name, _coef(found, name), counts, *map(texts.get, table.cells), *differences])
        for label, cell in cells.items():
            other = found.compared_with(label)
            got = gains.get((label, other or ""))
            low, high = (got and got.interval) or (None, None)
            records.append(
                {
                    "merger": name, "method": label, "mean": cell.mean, "sd": cell.sd, "n": len(cell.scores),
                    "reference": other, "difference": got and got.mean, "low": low, "high": high,
                }
            )  # fmt: skip
    tuned = list(facts.get("chosen") or facts.get("lr") or {})
    text = (
        "Mean ± standard deviation over seeds; the best of each line in bold, whatever its interval. Differences are "
        "paired by seed, with their 95 % interval. Coefficient: the smallest and the largest of all models, "
        '"dev" where each was chosen on dev. '
    )
    training = f"chosen on dev for {', '.join(map(plain, tuned))}" if tuned else "not recorded whether they were tuned"
    text += f"Learning rate and hyperparameters of training: {training}."
    columns = ["Merger", "Coefficient", "Seeds", *table.cells, *(f"{label} - {other}" for label, other in pairs)]
    return Section("Trainers and mergers", text, Table(columns, rows, records), merger_plot(table, names))


def _coef(found: Found, merger: str) -> str | None:
    """The range of a merger's coefficients, and whether dev chose them all."""
    coefs = [row.coef for row in found.rows if row.model.upper() == merger and row.coef is not None]
    if not coefs:
        return None
    scored = {(row.method, row.seed) for row in found.rows if row.model.upper() == merger and row.coef is not None}
    runs = {(run.label, run.seed): run for run in found.runs if run.model.upper() == merger}
    text = f"{min(coefs):g}" + (f" to {max(coefs):g}" if max(coefs) > min(coefs) else "")
    return text + " dev" * all(key in runs and len(runs[key].dev_curve) > 1 for key in scored)
