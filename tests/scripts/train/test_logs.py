"""What else a log does: trackers that need not be installed, rates of tokens, laps, lines that are kept."""

import itertools
import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn.mat.finetune import Info
from smat_fn.scripts.train import logs, stopwatch, trackers
from smat_fn.scripts.train.logs import Log
from smat_fn.scripts.train.stopwatch import Stopwatch

CPU = torch.device("cpu")


class FakeRun:
    def __init__(self, **options):
        self.options, self.rows, self.closed = options, [], 0

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.closed += 1


class FakeWriter(FakeRun):
    def __init__(self, folder, purge_step):
        super().__init__(folder=folder, purge_step=purge_step)

    def add_scalar(self, name, value, step):
        self.rows.append((step, {name: value}))

    def close(self):
        self.closed += 1


@pytest.fixture
def installed(monkeypatch):
    """All three packages as modules that record; their runs by name."""
    made = {}

    def fake(name, attribute, kind):
        module = types.ModuleType(name)
        setattr(module, attribute, lambda *a, **k: made.setdefault(name, []).append(kind(*a, **k)) or made[name][-1])
        monkeypatch.setitem(sys.modules, name, module)

    fake("wandb", "init", FakeRun)
    fake("trackio", "init", FakeRun)
    fake("torch.utils.tensorboard", "SummaryWriter", FakeWriter)
    return made


def test_trackers_get_every_line_and_are_closed(installed, train, tmp_path):
    train(tmp_path, tasks=("rot90",), log=("tensorboard", "wandb", "trackio"), log_every=2)
    lines = [json.loads(line) for line in (tmp_path / "rot90.log.jsonl").read_text().splitlines()]
    rows = [{n: float(v) for n, v in line.items() if not isinstance(v, str) and n != "step"} for line in lines]
    assert "peak_memory_bytes" in rows[-1]
    want = [(line["step"], row) for line, row in zip(lines, rows, strict=True)]
    for name in ("wandb", "trackio"):
        (run,) = installed[name]
        assert run.rows == want
        assert run.closed == 1
        assert run.options["project"] == "smat_fn"
        assert run.options["name"].startswith("SMAT-rot90-seed21")
        assert run.options["config"]["hyperparameters"]["period"] == 4
        assert run.options["resume"] == "allow"
    (writer,) = installed["torch.utils.tensorboard"]
    assert writer.rows == [(step, {name: value}) for step, row in want for name, value in row.items()]
    assert writer.options == {"folder": str(tmp_path / "tensorboard/SMAT-rot90-seed21"), "purge_step": 0}
    assert writer.closed == 1


def test_a_run_that_goes_on_is_the_same_run_to_its_trackers(installed, tmp_path):
    progress = {}
    for start in (0, 3):
        with Log(
            tmp_path / "log.jsonl", task="t", total=6, device=CPU, rates=lambda step: {}, start=start,
            before=progress or None, trackers=("tensorboard", "wandb"), run="r",
        ) as log:  # fmt: skip
            for step in range(start, start + 3):
                log.step(step, Info(torch.tensor(1.0), None, torch.tensor(2.0)), torch.zeros(4, 2))
            progress = json.loads(json.dumps(log.progress()))
    first, second = installed["wandb"]
    assert first.options["id"] == second.options["id"] == progress["run_id"]
    assert [w.options["purge_step"] for w in installed["torch.utils.tensorboard"]] == [0, 3]
    assert progress["totals"]["clean_steps"] == 6
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    assert len(seconds) == 6


def test_trackers_get_measurements_after_the_lines_of_earlier_steps(installed, tmp_path):
    path = tmp_path / "log.jsonl"
    with Log(path, task="t", total=7, every=3, device=CPU, rates=lambda step: {}, trackers=("wandb",)) as log:
        for step in range(7):
            log.step(step, Info(torch.tensor(1.0), None, torch.tensor(2.0)), torch.zeros(4, 2))
            if step in (1, 4, 6):
                log.note(step, dev_score=50.0)
        log.finish(seconds=1.0)
    steps = [1, 2, 4, 5, 6, 6]
    assert [step for step, _ in installed["wandb"][0].rows] == steps
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert ["dev_score" in line for line in lines] == [True, False, True, False, True, False]


def test_a_tracker_that_cannot_begin_is_an_error_with_a_way_out(installed, tmp_path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    names = ("tensorboard", "wandb")
    log = Log(tmp_path / "log.jsonl", task="t", total=1, device=CPU, rates=lambda step: {}, trackers=names)
    with (
        pytest.raises(ValueError, match=r"^--log wandb: wandb cannot begin a run \(api_key not conf.*: log in, or"),
        log,
    ):
        pass
    assert [writer.closed for writer in installed["torch.utils.tensorboard"]] == [1]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named_before_any_work(name, train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    with pytest.raises(ValueError, match=f"--log {name} needs the package {name}, which cannot be imported"):
        train(tmp_path / "run", tasks=("rot90",), log=(name,))
    assert list(tmp_path.iterdir()) == []


def test_batches_are_counted_in_tokens_or_examples():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert logs.amount_of({"input_ids": torch.zeros(2, 3), "attention_mask": mask}) == ("tokens", 3)
    assert logs.amount_of((torch.zeros(5, 2), torch.zeros(5))) == ("examples", 5)
    assert logs.amount_of({"x": torch.zeros(4)}) == ("examples", 4)
    assert logs.amount_of("anything") == ("examples", 1)


def test_laps_are_added_up_by_kind_and_what_is_skipped_is_not(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    watch = Stopwatch(CPU, {"clean_steps": 2.0, "clean_seconds": 8.0})
    for seconds, kind in ((1.0, "clean"), (4.0, "simulated"), (2.0, "clean")):
        now[0] += seconds
        watch.lap(kind)
        now[0] += 100
        watch.skip()
    assert watch.totals() == {
        "clean_steps": 4.0, "clean_seconds": 11.0, "simulated_steps": 1.0, "simulated_seconds": 4.0,
    }  # fmt: skip
    assert watch.seconds() == 15.0


def test_a_line_says_tokens_a_second_memory_and_the_share_of_simulating(tmp_path, monkeypatch):
    now, peak = [10.0], [100]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(logs, "peak_memory", lambda device: {"peak_memory_bytes": peak[0], "peak_memory_of": "x"})
    masks = [torch.ones(2, n, dtype=torch.int64) for n in (3, 4, 5, 6)]
    with Log(tmp_path / "log.jsonl", task="t", total=4, every=2, device=CPU, rates=lambda step: {}) as log:
        for step, (seconds, mask) in enumerate(zip((1.0, 1.0, 3.0, 2.5), masks, strict=True)):
            now[0], peak[0] = now[0] + seconds, peak[0] + step
            info = Info(torch.tensor(1.0), None, torch.tensor(2.0))
            log.step(step, SimpleNamespace(**info._asdict(), simulated=step == 3), {"attention_mask": mask})
        log.finish()
    first, last = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    # 2 x (3 + 4) tokens in 2 s, then 2 x (5 + 6) in 5.5 s
    assert (first["tokens_per_second"], last["tokens_per_second"]) == (7.0, 4.0)
    assert (first["peak_memory_bytes"], last["peak_memory_bytes"]) == (101, 106)
    # three clean steps of 5 s together, and one of 2.5 s
    assert (first["simulation_share"], last["simulation_share"]) == (0.0, round((2.5 - 5 / 3) / 7.5, 4))
    assert (first["seconds"], last["seconds"]) == (2.0, 7.5)


def test_a_training_that_ends_early_has_a_line_of_its_last_step(tmp_path, monkeypatch):
    path, now = tmp_path / "log.jsonl", itertools.count()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(now)))
    with Log(path, task="t", total=9, every=4, device=CPU, rates=lambda step: {"lr": 0.5}) as log:
        assert log.largest_norm is None
        for step, norm in enumerate((2.0, 3.0, 7.0)):
            log.step(step, Info(torch.tensor(1.0), None, torch.tensor(norm)), torch.zeros(4, 2))
        log.end()
        assert log.largest_norm == 7
        log.finish(note=1)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["step"], line["grad_norm"], line["lr"], line["note"]) == (2, 7.0, 0.5, 1)
    assert line["examples_per_second"] == round(12 / line["seconds"], 2)


def test_the_largest_norm_is_that_of_all_lines(tmp_path):
    with Log(tmp_path / "log.jsonl", task="t", total=3, device=CPU, rates=lambda step: {}) as log:
        for step, norm in enumerate((2.0, 5.0, 0.0)):
            log.step(step, Info(torch.tensor(1.0), None, torch.tensor(norm)), torch.zeros(4, 2))
    assert log.largest_norm == 5


class Reads(TorchDispatchMode):
    """Counts values that are taken out of tensors, for which a device would be waited for."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_no_number_of_its_own(tmp_path):
    path, mask = tmp_path / "log.jsonl", torch.ones(2, 3, dtype=torch.int64)
    seen = []
    with Log(path, task="t", total=3, device=CPU, rates=lambda step: {}) as log:
        for step in range(3):
            with Reads() as reads:
                log.step(step, Info(torch.tensor(float(step)), None, torch.tensor(2.0)), {"attention_mask": mask})
            written = [json.loads(line) for line in path.read_text().splitlines()]
            assert [line["loss"] for line in written] == list(range(step))  # of the steps before
            seen.append(reads.found)
            assert all(line["tokens_per_second"] > 0 for line in written)
        assert log.cost()["clean_step_seconds"] > 0
        assert seen[0] == 0
        assert seen[1] > 0
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("read", ["step", "progress", "exit"])
def test_a_loss_that_is_not_finite_passes_no_line_and_no_snapshot(read, tmp_path):
    rows = iter([1.0, float("nan"), 1.0])

    def go():
        with Log(tmp_path / "log.jsonl", task="t", total=9, device=CPU, rates=lambda step: {}) as log:
            for step in range(3 if read == "step" else 2):
                log.step(step, Info(torch.tensor(next(rows)), None, torch.tensor(2.0)), torch.zeros(4, 2))
            if read == "progress":
                log.progress()

    with pytest.raises(ValueError, match="loss of t is nan at step 1"):
        go()


def test_there_is_no_share_of_simulating_where_no_step_is_clean():
    watch = Stopwatch(CPU)
    watch.lap("simulated")
    assert watch.simulation_share() is None


def test_lines_of_later_steps_and_cut_ones_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in range(4)]
    path.write_text("".join(lines) + '{"st')
    logs.keep_lines(path, before=3)
    assert path.read_text() == "".join(lines[:3])
    logs.keep_lines(path, before=0)
    assert path.read_text() == ""
    logs.keep_lines(tmp_path / "new" / "log.jsonl", before=2)
    assert (tmp_path / "new" / "log.jsonl").read_text() == ""


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"\xff\xfe\n", b"[]\n", b'{"loss": 1}\n'])
def test_a_damaged_log_keeps_the_lines_before_the_damage(tmp_path, damage):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'{"step": 1}\n')
    assert logs.keep_lines(path, before=2) == 0
    assert path.read_text() == '{"step": 0}\n'
