"""All benchmarks that need a CUDA device, one after the other, a short table of each last.

``--dry-run`` needs none: it compiles every kernel variant for sm_90 and takes every path of the harness on the CPU.
"""

import subprocess
import sys
import time
import traceback

import torch

from . import kernels, steps, timing

LIMIT = 8 * 60


def main(*, dry_run: bool = False) -> None:
    """Run them; none is started after 6 of the 8 minutes. One that fails ends neither the other nor the tables.

    Args: dry_run: tiny sizes on the CPU, every path.
    """
    if not (dry_run or torch.cuda.is_available()):
        sys.exit("benchmarks gpu: needs a CUDA device; --dry-run takes every path on tiny sizes on the CPU")
    start, tables, failed = time.monotonic(), list[str](), list[str]()
    if dry_run:
        subprocess.run([sys.executable, "-m", "benchmarks", "sass", "--check"], check=True)
    for name, run, columns in (("kernels", kernels.main, kernels.SUMMARY), ("steps", steps.main, None)):
        if not dry_run and time.monotonic() - start > 0.75 * LIMIT:
            tables.append(f"{name}: not started, {LIMIT // 60} minutes are nearly over")
            continue
        try:
            table = timing.markdown(run(dry_run=dry_run), columns)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        tables.append(f"{name}, after {time.monotonic() - start:.0f} s\n{table}")
    print("\n\n".join([timing.describe("python -m benchmarks gpu")["hardware"], *tables]))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
