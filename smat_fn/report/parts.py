"""SMAT's parts: ablations, and Perturb alone with noise of several kinds and strengths."""

from .found import Found
from .section import Section, Table, spread
from .settings import PARTS
from .tables import COLUMNS, Cell, cell_of
from .words import evidence, finding


def ablation(found: Found) -> Section | None:
    """SMAT without some of its parts, beside full SMAT."""
    labels = found.labels("ablation")
    if not labels:
        return None
    fulls = list(dict.fromkeys(full for label in labels if (full := found.full(label))))
    rows, records, told = [], [], []
    for label in [*fulls, *labels]:
        line, setting = found.table.cells[label], found.settings[label]
        off = [part for part in PARTS if part not in (setting.parts or ())]
        variant = f"without {' and '.join(off)}" if off else "full SMAT"
        other = found.compared_with(label) if off else None
        change = found.difference(label, "Avg", other)
        if off and "Avg" in line:
            told.append(f"- {finding(variant, other or found.reference, change)}")
        interval = f"{change.interval[0]:+.2f} to {change.interval[1]:+.2f}" if change and change.interval else None
        texts = [line[column].text() if column in line else None for column in COLUMNS]
        rows.append([variant, label, *texts, f"{change.mean:+.2f}" if change else None, interval])
        records.append({"variant": variant, "method": label, **spread(line), "avg_change": change and change.mean})
    columns = ["Variant", "Label", *COLUMNS, "Change", "95 % interval"]
    against = ", ".join(dict.fromkeys(other for label in labels if (other := found.compared_with(label))))
    text = f"Change: five-merger mean against {against or 'nothing that is here'}.\n\n" + "\n".join(told)
    return Section("Ablation", text, Table(columns, rows, records))


def noise(found: Found) -> Section | None:
    """Perturb alone: the mean of five mergers by family and RMS of the noise."""
    from .plots import noise_plot

    labels = [label for label in found.labels("noise") if "Avg" in found.table.cells[label]]
    if not labels:
        return None
    rows, records = [], []
    curves: dict[str, dict[float, Cell]] = {}
    order = sorted(labels, key=lambda x: (_noise(found, x), float(found.settings[x].hyperparameters["sigma"])))
    for label in order:
        sigma, line = float(found.settings[label].hyperparameters["sigma"]), found.table.cells[label]
        family, other = _noise(found, label), found.compared_with(label)
        curves.setdefault(family, {})[sigma] = line["Avg"]
        got = found.difference(label, "Avg", other)
        open_ = evidence(got) if got and got.interval else None
        expert = line["Expert"].text() if "Expert" in line else None
        rows.append([family, f"{sigma:g}", expert, line["Avg"].text(), f"{got.mean:+.2f}" if got else None, open_])
        records.append(
            {"noise": family, "sigma": sigma, "method": label, **spread(line), "avg_change": got and got.mean}
        )
    base = found.base(muon=found.muon(order[0]))
    seeds = {seed for points in curves.values() for cell in points.values() for seed in cell.by_seed}
    whole = found.table.cells[base].get("Avg") if base else None
    level = {seed: score for seed, score in whole.by_seed.items() if seed in seeds} if whole else {}
    columns = ["Noise", "RMS", "Expert", "Avg", f"Avg - {base or found.reference}", "Over seeds"]
    text = "Perturb alone, without Scale and Mask. A highest point was found on these very scores: it flatters itself."
    if whole and len(level) < len(whole.by_seed):
        text += f" In the figure {base} is the mean over the seeds that were trained with noise."
    drawn = noise_plot(curves, reference=(base, cell_of(level)) if base and level else None)
    return Section("Noise", text, Table(columns, rows, records), drawn)


def _noise(found: Found, label: str) -> str:
    return str(found.settings[label].hyperparameters.get("noise", "uniform"))
