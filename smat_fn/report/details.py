"""Details of a report: costs, scores by task, coefficients, tuning, settings and provenance."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluate.results import EXPERT
from .found import Cost, Found, times
from .section import DASH, Section, Table, size, spread, words
from .tables import cell_of, marked, other_table, other_tasks_of, plain


def cost_section(costs: Mapping[str, Cost], references: Mapping[str, str | None]) -> Section | None:
    """Seconds a step and in all, and memory, beside the reference's; None where nothing was recorded."""
    known = {label: cost for label, cost in costs.items() if cost.seconds or cost.peak}
    if not known:
        return None
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    for label, cost in known.items():
        base = costs.get(references.get(label) or "")
        ratio = times(cost, base)
        more = 100 * (cost.peak / base.peak - 1) if cost.peak and base and base.peak else None
        rows.append(
            [
                label,
                cost.per_step and cost.per_step.text(4),
                cost.seconds and cost.seconds.text(1),
                ratio and ("1" if cost is base else ratio.text(3)),
                cost.peak and size(cost.peak),
                None if more is None or cost is base else f"{round(more, 1) + 0.0:+.1f} %",
            ]
        )
        records.append(
            {
                "method": label,
                "seconds_per_step": cost.per_step and cost.per_step.mean,
                "seconds": cost.seconds and cost.seconds.mean,
                "seconds_sd": cost.seconds and cost.seconds.sd,
                "times_reference": ratio and ratio.mean,
                "peak_memory_bytes": cost.peak,
            }
        )
    others = dict.fromkeys(name for name in map(references.get, known) if name)
    against = next(iter(others)) if len(others) == 1 else "reference"
    of = ", ".join(dict.fromkeys(cost.peak_of for cost in known.values() if cost.peak_of))
    columns = ["Method", "Seconds a step", "Seconds in all", f"x {against}", "Peak memory", f"against {against}"]
    text = (
        "Seconds of the training loops, batches and logging included, summed over the experts of a set; loading, "
        "saving, merging and evaluation are left out. Mean over seeds. Memory: the largest peak of training an expert."
    )
    text += f" It is of: {of}." if of else ""
    if len(others) > 1:
        names = {x: [plain(label) for label in known if references.get(label) == x != label] for x in others}
        each = "; ".join(f"{plain(x)} of {', '.join(own)}" for x, own in names.items() if own)
        text += f" References: {each}." if each else ""
    return Section("Training cost", text, Table(columns, rows, records))


def per_task(found: Found) -> Section:
    """Every task's scores: its own expert and each merged model."""
    columns = [column for column in found.table.columns if column != "Avg"]
    scores: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in found.rows:
        column = "Expert" if row.model == EXPERT + row.task else row.model.upper()
        if column in columns:
            scores.setdefault((row.method, row.task, column), {})[row.seed] = row.score
    rows, records = [], []
    for method, task in dict.fromkeys((method, task) for method, task, _ in scores):
        line = {c: cell_of(scores[method, task, c]) for c in columns if (method, task, c) in scores}
        rows.append([task, method, *(line[c].text() if c in line else None for c in columns)])
        records.append({"task": task, "method": method, **spread(line)})
    rows.sort(key=lambda row: str(row[0]))
    return Section(
        "Scores by task", "Mean ± standard deviation over seeds.", Table(["Task", "Method", *columns], rows, records)
    )


def other_tasks(found: Found) -> Section | None:
    """Scores on tasks that no model here was made for."""
    table, tasks = other_table(found.rows, split=found.table.split), other_tasks_of(found.rows)
    if not tasks:
        return None
    rows = [[method, *texts] for method, texts in marked(table, str).items()]
    records = [{"method": method, **spread(line)} for method, line in table.cells.items()]
    text = (
        f"Mean over tasks that the models were not made from ({', '.join(map(plain, tasks))}). Expert: mean over the "
        "experts too, the base in its own line. Mean ± standard deviation over seeds."
    )
    return Section("Other tasks", text, Table(["Method", *table.columns], rows, records))


def coefficients(found: Found) -> Section | None:
    """The coefficient of every merged model."""
    coefs: dict[str, dict[str, dict[int, float]]] = {}
    for row in found.rows:
        if row.coef is not None:
            coefs.setdefault(row.method, {}).setdefault(row.model.upper(), {})[row.seed] = row.coef
    if not coefs:
        return None
    mergers = [m for m in found.table.columns if any(m in line for line in coefs.values())]
    rows = [
        [label, *(", ".join(f"{c:g}" for _, c in sorted(line[m].items())) if m in line else None for m in mergers)]
        for label, line in coefs.items()
    ]
    records = [
        {"method": label, "merger": merger, "seed": seed, "coef": coef}
        for label, line in coefs.items() for merger in mergers for seed, coef in sorted(line.get(merger, {}).items())
    ]  # fmt: skip
    text = " ".join(["In order of seeds; chosen on dev where a search was made.", *_other_settings(found, mergers)])
    return Section("Coefficients", text, Table(["Method", *mergers], rows, records))


def _other_settings(found: Found, mergers: Sequence[str]) -> list[str]:
    """A sentence for each merger whose models differ in more than the coefficient."""
    sentences = []
    for merger in mergers:
        own: dict[str, dict[str, None]] = {}  # labels by settings
        for run in found.runs:
            if not run.trains and run.model.upper() == merger:
                kept = {k: "by parameter" if k == "coefs" else v for k, v in run.hyperparameters.items() if k != "coef"}
                own.setdefault(words(kept) or "no others", {})[run.label] = None
        if len(own) > 1:
            each = "; ".join(f"{', '.join(map(plain, labels))}: {settings}" for settings, labels in own.items())
            sentences.append(f"**Other settings of {merger} differ** ({each}).")
        several = [run for run in found.runs if run.model.upper() == merger and "coefs" in run.hyperparameters]
        if several:
            labels = ", ".join(dict.fromkeys(plain(run.label) for run in several))
            sentences.append(f"{merger} of {labels} has other coefficients for some parameters.")
    return sentences


def dev_curves(found: Found) -> Section | None:
    """Scores on dev while experts trained, of runs with ``--eval-every``."""
    runs = [run for run in found.runs if run.evaluations]
    if not runs:
        return None
    rows, records = [], []
    for run in runs:
        own, name = run.evaluations, run.model.removeprefix(EXPERT)
        ended, planned = own["curve"][-1][0], run.training.get("steps")
        steps = f"{ended} of {planned}" if planned not in (None, ended) else f"{ended}"
        rows.append([run.label, name, run.seed, own["by"], f"{own['best']:.4g}", own["step"], steps, len(own["curve"])])
        records += [
            {"method": run.label, "task": name, "seed": run.seed, "by": own["by"], "step": step, "value": value}
            for step, value in own["curve"]
        ]
    columns = ["Method", "Task", "Seed", "Measured by", "Best on dev", "at step", "Steps", "Evaluations"]
    text = "Each expert is its state at the best evaluation: its dev score is optimistic, its test score is not."
    return Section("Dev scores while training", text, Table(columns, rows, records))


def tuning(facts: Mapping[str, Any]) -> Section | None:
    """Dev scores of what a study chose from: learning rates, or candidates with all their settings."""
    candidates = [
        (label, *found)
        for label, tried in (facts.get("dev") or {}).items()
        for found in (_rates(label, tried, facts) if isinstance(tried, Mapping) else _candidates(label, tried, facts))
    ]
    if not candidates:
        return None
    rows, records = [], []
    for label, what, scores, chosen in candidates:
        cell = cell_of(dict(enumerate(scores)))
        rows.append([label, what, cell.text(), "chosen" if chosen else ""])
        records.append({"method": label, "candidate": what, "dev": cell.mean, "dev_sd": cell.sd, "chosen": chosen})
    text = "The five-merger mean on dev; mean ± standard deviation over the seeds of the tuning."
    return Section("Tuning", text, Table(["Method", "Candidate", "Dev", ""], rows, records))


Candidate = tuple[str, list[float], bool]  # what it is, dev scores by seed, whether it was chosen


def _rates(label: str, tried: Mapping[str, list[float]], facts: Mapping[str, Any]) -> list[Candidate]:
    chosen = float(facts.get("lr", {}).get(label, "nan"))
    return [(f"lr {lr}", scores, float(lr) == chosen) for lr, scores in tried.items()]


def _candidates(label: str, tried: list[dict[str, Any]], facts: Mapping[str, Any]) -> list[Candidate]:
    """Candidates of a label; settings that all of them share are left out of their descriptions."""
    chosen, flat = facts.get("chosen", {}).get(label, {}), [{**c["training"], **c["hyperparameters"]} for c in tried]
    own = [k for k in dict.fromkeys(k for c in flat for k in c) if any(c.get(k) != flat[0].get(k) for c in flat)]
    same = ("hyperparameters", "training")
    return [
        (words({k: c[k] for k in own if k in c}), given["dev"], all(given[k] == chosen.get(k) for k in same))
        for given, c in zip(tried, flat, strict=True)
    ]


def settings(found: Found) -> Section | None:
    """How the experts of every label were trained."""
    if not found.settings:
        return None
    rows = []
    for label, setting in found.settings.items():
        budgets = [n for run in found.runs if run.label == label and (n := run.training.get("steps"))]
        steps = " to ".join(map(str, sorted({min(budgets), max(budgets)}))) if budgets else None
        rows.append([label, setting.method, words(setting.described) or DASH, words(setting.training), steps])
    return Section("Settings", "", Table(["Label", "Method", "Hyperparameters", "Training", "Steps"], rows))


def provenance(found: Found, facts: Mapping[str, Any]) -> Section:
    """Provenance of the numbers: suite, versions, hardware, commit, commands."""
    recipes = [run.suite for run in found.runs if run.suite]
    suite = {k: v for k, v in recipes[0].items() if k != "seed"} if recipes else {}
    versions: dict[str, dict[str, None]] = {}  # several, where runs were made with several
    for made in [*(run.versions for run in found.runs), facts.get("versions", {})]:
        for name, version in made.items():
            versions.setdefault(name, {})[version] = None
    known = {
        "Suite": words(suite),
        "Versions": words({name: " and ".join(several) for name, several in versions.items()}),
        "Hardware": facts.get("hardware"),
        "Commit": facts.get("commit"),
        "Command": facts.get("command") and f"`{facts['command']}`",
    }
    lines = [f"- {name}: {value or 'not recorded'}" for name, value in known.items()]
    return Section("Provenance", "\n".join(lines))
