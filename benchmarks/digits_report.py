"""The digits study, its analyses and its report from nothing: docs/results/digits_methods/.

``python -m benchmarks digits-report FOLDER`` resumes from FOLDER, and writes the report again each time.
"""

from pathlib import Path

from tyro.conf import Positional

from smat_fn import machine

from .digits_methods import PROTOCOL
from .methods import ROOT, run, write_report


def main(folder: Positional[Path], *, jobs: int = 2, out: Path = ROOT / "docs/results/digits_methods") -> None:
    """Run what is missing, then write the report.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        jobs: processes of one thread each.
        out: folder of the report.
    """
    run(PROTOCOL, folder, jobs, machine.describe("python -m benchmarks digits-report FOLDER"))
    write_report(PROTOCOL, folder, out)
