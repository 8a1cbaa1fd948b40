"""What all tests share: the cache in a folder of the run, and no silent skips in CI."""

import atexit
import gc
import os
import signal
import warnings
import zlib

# one thread a worker: small tensors gain nothing from more, and workers share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs

# torch is imported inside of functions: with -n the first process runs no test, and starts the others after its imports
gc.disable()  # until all tests are collected: modules are not garbage

SHAPES = {  # every kind of shape that a merger must accept
    "scalar": (),
    "one": (1,),
    "column": (5, 1),
    "row": (1, 7),
    "vector": (9,),
    "matrix": (6, 11),
    "conv": (2, 3, 2, 3),
    "empty": (0, 4),
    "void": (3, 0),
}
TOGETHER = (  # tests of one worker: the first share a stand-in, the second compile the same loops
    ("tests/examples/",),
    (
        "tests/folders/test_bits",
        "tests/folders/test_loops",
        "tests/folders/test_memory",  # alone it comes among the last, and the other worker is idle
        "tests/merge/test_conformance",
        "tests/merge/test_loops",
    ),
)
ALLOWED_SKIPS = (
    "no GPU", "no Chromium", "no ../shared", "mergekit is not installed", "TRL is not installed",
    "vllm is not installed", "slow",
)  # fmt: skip


def pytest_configure(config):
    """Triton interprets kernels only if this is set when it is first imported, which transformers.Trainer does too."""
    if not getattr(config.option, "numprocesses", None):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Cached bases of the suites go to a folder of this run, which all its workers share."""
    if "SMAT_FN_CACHE" not in os.environ:
        own = tmp_path_factory.getbasetemp()
        folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
        folder.mkdir(exist_ok=True)
        os.environ["SMAT_FN_CACHE"] = str(folder)


@pytest.fixture(autouse=True)
def _seeded(request):
    """Numbers that a test draws without a seed of its own are the same in every run."""
    import torch

    seed = zlib.crc32(request.node.name.encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else `torch.manual_seed` keeps a stack for later, a millisecond a test
        torch.cuda.manual_seed_all(seed)


@pytest.fixture
def caplog(request):
    """pytest's own, without its plugin, which looks through all loggers six times a test."""
    request.node.stash[caplog_handler_key] = handler = LogCaptureHandler()
    with catching_logs(handler):
        captured = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield captured
        captured._finalize()


@pytest.fixture
def loops_called(monkeypatch):
    """``loops_called(names)``: a set, to which each of these compiled loops adds its name when it is called."""

    def watch(watched):
        from smat_fn import execution

        loops, names = execution.loops(), set()
        for name in watched:
            loop = getattr(loops, name)
            monkeypatch.setattr(loops, name, lambda *args, name=name, loop=loop: names.add(name) or loop(*args))
        return names

    return watch


@pytest.fixture(scope="session")
def killed():
    """``killed(call)``: call in a fork, which need not import torch again, and which SIGKILL must end."""

    def run(call):
        with warnings.catch_warnings():
            # of Python 3.12 and later, about threads that pytest-xdist has and the fork does not use
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                call()
            finally:
                os._exit(1)  # neither reports nor fixtures are the fork's
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    return run


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file go to one worker, and so do those of files that `TOGETHER` names in one line."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return next((own[0] for own in TOGETHER if nodeid.startswith(own)), super()._split_scope(nodeid))

    return Files(config, log)


def pytest_collection_finish(session):
    """Collect garbage from now on, but not often, and not among what the imports have left."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """After each file: what it has imported is not looked through by the collections of the next."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()


# or triton's bindings list what is left; at the very end, since pytest collects garbage several times before
atexit.register(gc.unfreeze)


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


def _family(dtype=None, *, count=3, seed=0, scale=0.1, grid=None):
    """(base, {name: expert}): flat trees, of float32 unless a dtype is given.

    With ``grid`` all values are multiples of it, so that sums are exact.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def leaves(scale):
        drawn = {
            path: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for path, shape in SHAPES.items()
        }
        return {path: (leaf / grid).round() * grid if grid else leaf for path, leaf in drawn.items()}

    buffers = {"steps": torch.tensor(7), "causal": torch.tensor([True, False, True])}
    base = leaves(1.0)
    names = ["sum", "cstance", "qa", "fomc"][:count]
    deltas = {name: leaves(scale) for name in names}
    trees = {name: {path: base[path] + delta[path] for path in base} for name, delta in deltas.items()}
    cast = {
        name: {path: leaf.to(dtype or torch.float32) for path, leaf in tree.items()}
        for name, tree in {"": base, **trees}.items()
    }
    full = {name: {**tree, **{path: leaf.clone() for path, leaf in buffers.items()}} for name, tree in cast.items()}
    return full.pop(""), full


@pytest.fixture(scope="session")
def family():
    return _family


@pytest.fixture
def as_on_cuda():
    from .as_on_cuda import AsOnCuda

    return AsOnCuda


@pytest.fixture
def rows():
    """Two methods, two tasks, two seeds, by formula: task scores 10 and 20 higher than multiples of the column."""
    from smat_fn.evaluate import Result

    out = []
    for bonus, method in ((0.0, "FT"), (4.0, "SMAT")):
        for seed in (0, 1):
            for place, model in enumerate(("expert", "wa", "ta", "ties", "dare", "della")):
                for more, task in ((10.0, "a"), (20.0, "b")):
                    name = f"expert:{task}" if model == "expert" else model
                    out.append(Result(method, name, task, "test", 10.0 * place + more + bonus + 2 * seed, seed))
    return out
