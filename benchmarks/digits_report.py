"""The digits study, its analyses and its report from nothing: docs/results/digits_methods/.

``python -m benchmarks digits-report FOLDER`` goes on from what stands in FOLDER, and writes the report again each time.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import digits_methods, machine
from .methods import Protocol, frozen, run, say

ROOT = Path(__file__).parent.parent
COMMAND = "python -m benchmarks digits-report"
COMPARED = "FT", "SMAT", "ASAM", "MergOPT", "OrthoReg"  # in the analyses, all with Adam


def main(arguments: list[str]) -> None:
    """Run what is missing, then write the report."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=Path, help="keeps the trials; a stopped run goes on from it")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/digits_methods")
    asked = parser.parse_args(arguments)
    protocol = digits_methods.PROTOCOL
    run(protocol, asked.folder, asked.jobs, machine.describe(f"{COMMAND} FOLDER"))
    report(protocol, asked.folder, asked.out)


def report(protocol: Protocol, work: Path, out: Path) -> None:
    """Analyses of the kept experts, and a report of them and the stored scores."""
    candidates, folder = frozen(protocol), work / "analyses"
    experts = {
        label: [protocol.trial(label, candidates[label], seed).folder(work / "evaluation") for seed in protocol.kept]
        for label in COMPARED
    }
    everything = [path for label in COMPARED for path in experts[label]]
    others = [path for label in COMPARED[1:] for path in experts[label]]
    first = [experts[label][0] for label in COMPARED[1:]]
    run_eval("experts-curve", *everything, "--out", folder / "experts-curve")
    run_eval("replacement", "--ft", *experts["FT"], "--other", *others, "--out", folder / "replacement")
    run_eval("landscape", "--ft", experts["FT"][0], "--methods", *first, "--out", folder / "landscape")
    title = f"{protocol.preset}: all methods"
    run_eval("report", protocol.file(".jsonl"), folder, "--out", out, "--title", title)


def run_eval(*words: str | Path) -> None:
    """A command of eval.py; its folder --out is made anew."""
    out = Path(words[list(words).index("--out") + 1])
    shutil.rmtree(out, ignore_errors=True)
    command: Sequence[str] = [sys.executable, str(ROOT / "eval.py"), *map(str, words)]
    say(f"eval.py {words[0]}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
