"""Analyses of the experts that a protocol keeps, and a report of them and its stored scores, all by eval.py."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .methods import ROOT, Protocol, frozen, say

COMPARED = "FT", "SMAT", "ASAM", "MergOPT", "OrthoReg"  # in the analyses, all with Adam
ANALYSES = "experts-curve", "replacement", "landscape"


def write_report(protocol: Protocol, work: Path, out: Path, analyses: Sequence[str] = ANALYSES) -> None:
    """The analyses anew, kept beside the trials, and the report."""
    candidates, folder = frozen(protocol), work / "analyses"
    experts = {
        label: [protocol.trial(label, candidates[label], seed).folder(work / "evaluation") for seed in protocol.kept]
        for label in COMPARED
    }
    others = [path for label in COMPARED[1:] for path in experts[label]]
    first = [experts[label][0] for label in COMPARED[1:]]
    runs: dict[str, Sequence[str | Path]] = {
        "experts-curve": [*experts["FT"], *others],
        "replacement": ["--ft", *experts["FT"], "--other", *others],
        "landscape": ["--ft", experts["FT"][0], "--methods", *first],
    }
    for name in analyses:
        run_eval(name, *runs[name], "--out", folder / name)
    run_eval("report", protocol.file(".jsonl"), folder, "--out", out, "--title", f"{protocol.preset}: all methods")


def run_eval(*words: str | Path) -> None:
    """A command of eval.py; its folder --out is made anew."""
    out = Path(words[list(words).index("--out") + 1])
    shutil.rmtree(out, ignore_errors=True)
    command: Sequence[str] = [sys.executable, str(ROOT / "eval.py"), *map(str, words)]
    say(f"eval.py {words[0]}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
