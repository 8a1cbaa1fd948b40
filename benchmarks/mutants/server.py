"""Runs tests in forks of a process that has imported what all of them need, but nothing of smat_fn.

``python server.py`` in a copy of the repository reads lines ``{"tests": [...], "out": FILE, "limit": seconds}`` and
answers each with the exit status of pytest, -1 for a run that was ended at its limit. A file, not a module.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings

PRELOADED = "numpy", "torch", "torch.func", "torch.testing", "safetensors.torch", "jax.numpy", "transformers", "pytest"


def main() -> None:
    """Serve until standard input ends."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # jax has no threads yet
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(status(asked["tests"], asked["out"], asked["limit"])), flush=True)


def status(tests: list[str], out: str, limit: float) -> int:
    """The exit status of pytest in a fork, its output in a file."""
    child = os.fork()
    if not child:
        os.setsid()
        run(tests, out)
    end = time.monotonic() + limit
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.02)


def run(tests: list[str], out: str) -> None:
    """Pytest in this process, which ends with it."""
    import pytest

    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for own, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(own, target)
    code = 3  # pytest's own for an internal error
    try:
        words = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
        words += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # anyio, by transformers
        code = int(pytest.main([*words, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
