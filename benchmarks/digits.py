"""FT against SMAT on digits by docs/protocols/digits.md: results as JSON, table and plot for README.md.

``python -m benchmarks digits FOLDER`` keeps checkpoints there, so that a stopped run resumes; ``--report`` runs nothing
and writes table and plot again from the stored results.
"""

import json
import tempfile
from pathlib import Path

from tyro.conf import Positional

from benchmarks.study.study import as_json, paired, run_study
from smat_fn import machine
from smat_fn.checkpoint import write_bytes, write_text
from smat_fn.config import DIGITS
from smat_fn.evaluate import read_results, write_results
from smat_fn.report.tables import main_table, markdown

from .readme import between, fill

ROOT = Path(__file__).parent.parent
SEEDS = (21, 22, 23)
METHODS = ("ft", "smat")
COMMAND = "python -m benchmarks digits"


def main(folder: Positional[Path | None] = None, *, report: bool = False) -> None:
    """Run the protocol.

    Args: folder: keeps the checkpoints; report: only write table and plot again.
    """
    from smat_fn.suites.digits import TASKS

    if report:
        publish()
        return
    work = folder or Path(tempfile.mkdtemp(prefix="digits-study-"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    between(page, "digits", "")  # tells of lost marks before the runs, not after
    facts = machine.describe(COMMAND)
    print(f"{len(SEEDS) * len(METHODS) * len(DIGITS.lr_grid)} trials of {len(TASKS)} experts, kept in {work}")
    study = run_study("digits", METHODS, SEEDS, work=work, jobs=2, report=print)
    table = main_table(study.rows)
    first, second = (table.cells[label]["Avg"].scores for label in ("FT", "SMAT"))
    result = {
        **facts,
        "seeds": SEEDS,
        **as_json(study),
        "test": {m: {column: list(cell.scores) for column, cell in line.items()} for m, line in table.cells.items()},
        "paired": paired(first, second),
    }
    write_text(ROOT / "benchmarks/results/digits.json", json.dumps(result, indent=1) + "\n")
    write_results(ROOT / "benchmarks/results/digits.jsonl", study.rows)
    publish()


def publish() -> None:
    """The stored results as the table of README.md and docs/results/digits.png."""
    from smat_fn.report.plots import main_plot

    result = json.loads((ROOT / "benchmarks/results/digits.json").read_text())
    table = main_table(read_results(ROOT / "benchmarks/results/digits.jsonl"))
    text = paragraph(result, markdown(table))
    fill(ROOT / "README.md", "digits", text)
    write_bytes(ROOT / "docs/results/digits.png", main_plot(table, title=f"digits, {len(result['seeds'])} seeds"))
    print(text)


def paragraph(result: dict, table: str) -> str:
    """The README's paragraph."""
    p = result["paired"]
    each = ", ".join(f"{d:+.2f}" for d in p["differences"])
    rates = ", ".join(f"{method.upper()} {lr:g}" for method, lr in result["lr"].items())
    low, high = p["interval"]
    return (
        f"{table}\n"
        f"Test score, mean over four tasks and {len(result['seeds'])} seeds ± standard deviation; learning rates "
        f"chosen on dev: {rates}. SMAT - FT of the five-merger mean by seed: {each}; mean {p['mean']:+.2f}, standard "
        f"deviation {p['sd']:.2f}, 95 % interval {low:+.2f} to {high:+.2f} (optimistic: seeds re-split the same "
        "images). From "
        f"`{result['command']}` on {result['hardware']}, by [docs/protocols/digits.md](docs/protocols/digits.md).\n"
    )
