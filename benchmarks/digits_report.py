"""The digits study, its analyses and its report from nothing: docs/results/digits_methods/.

``python -m benchmarks digits-report FOLDER`` resumes from FOLDER, and writes the report again each time.
"""

import argparse
from pathlib import Path

from smat_fn import machine

from . import digits_methods
from .methods import ROOT, run, write_report

COMMAND = "python -m benchmarks digits-report"


def main(arguments: list[str]) -> None:
    """Run what is missing, then write the report."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=Path, help="keeps the trials; a stopped run resumes from it")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/digits_methods")
    asked = parser.parse_args(arguments)
    protocol = digits_methods.PROTOCOL
    run(protocol, asked.folder, asked.jobs, machine.describe(f"{COMMAND} FOLDER"))
    write_report(protocol, asked.folder, asked.out)
