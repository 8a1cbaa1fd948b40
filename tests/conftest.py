"""What all tests share: the cache in a folder of the run, and no silent skips in CI."""

import os

# one thread a worker: small tensors gain nothing from more, and workers share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# kernels are interpreted only if this is set when triton is first imported, which transformers.Trainer does too
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ALLOWED_SKIPS = ("no GPU", "no ../shared", "mergekit is not installed", "slow")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Cached bases of the suites go to a folder of this run."""
    if "SMAT_FN_CACHE" not in os.environ:
        os.environ["SMAT_FN_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """In CI a skip for another reason than those allowed fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true":
        return
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)]
    unexpected = [reason for reason in reasons if not any(allowed in reason for allowed in ALLOWED_SKIPS)]
    if unexpected:
        reporter.write_line("unexpected skips: " + "; ".join(unexpected), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
