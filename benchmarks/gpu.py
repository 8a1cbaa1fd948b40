"""All benchmarks that need a CUDA device, one after the other, a short table of each last.

``--dry-run`` needs none: it compiles every kernel variant for sm_90 and takes every path of the harness on the CPU.
"""

import importlib
import importlib.util
import subprocess
import sys
import time

import torch

from . import timing

NAMES = ("kernels", "steps")  # modules with run(dry_run) -> rows, and perhaps SUMMARY, the columns of a short table
LIMIT = 8 * 60


def main(arguments: list[str]) -> None:
    """Run them; ``--dry-run``: tiny sizes on the CPU, every path. None is started after 6 of the 8 minutes."""
    dry_run = "--dry-run" in arguments
    if not (dry_run or torch.cuda.is_available()):
        sys.exit("benchmarks gpu: needs a CUDA device; --dry-run takes every path on tiny sizes on the CPU")
    start, tables = time.monotonic(), []
    if dry_run:
        subprocess.run([sys.executable, "-m", "benchmarks", "sass", "--check"], check=True)
    for name in NAMES:
        if importlib.util.find_spec(f".{name}", __package__) is None:
            continue
        if time.monotonic() - start > 0.75 * LIMIT:
            tables.append(f"{name}: not started, {LIMIT // 60} minutes are nearly over")
            continue
        module = importlib.import_module(f".{name}", __package__)
        rows = module.run(dry_run)
        print(timing.markdown(rows), flush=True)
        short = timing.markdown(rows, getattr(module, "SUMMARY", None))
        tables.append(f"{name}, after {time.monotonic() - start:.0f} s\n{short}")
    print("\n\n".join([timing.describe("python -m benchmarks gpu")["hardware"], *tables]))
