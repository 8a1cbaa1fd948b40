"""Many runs from one command: one a device, again only what has not ended well, and a table of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from smat_fn import checkpoint, machine
from smat_fn.checkpoint import write_text
from smat_fn.folders.writing import locked
from smat_fn.mat.finetune import State
from smat_fn.scripts import cli
from smat_fn.scripts.signals import leaving_on_signals
from smat_fn.scripts.train import launching, resuming, sweep
from smat_fn.scripts.train.launching import Job
from smat_fn.scripts.train.resuming import Saver
from smat_fn.scripts.train.sweep import Status, Sweep

# stands for train.py: appends its arguments to a file, leaves an expert, fails where a file says so
SCRIPT = f"""
import json, os, sys
from pathlib import Path
here = Path(__file__).parent
if "--out" in sys.argv and not (here / f"fail-{{sys.argv[1]}}").exists():
    expert = Path(sys.argv[sys.argv.index("--out") + 1]) / "rot90"
    expert.mkdir(parents=True, exist_ok=True)
    manifest = {{"kind": "expert", "code": {machine.code()!r}}}
    if not (expert / "manifest.json").exists():
        (expert / "manifest.json").write_text(json.dumps(manifest))
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES")]) + "\\n")
print("hello from", sys.argv[1])
sys.exit(3 if (here / f"fail-{{sys.argv[1]}}").exists() else 0)
"""


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Jobs here take milliseconds: look for ended ones more often."""
    monkeypatch.setattr(launching, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10)))


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def calls(script):
    file = script.parent / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_every_method_with_every_seed_and_again_only_what_failed(script, tmp_path):
    options = Sweep(tmp_path / "out", methods=("ft", "smat"), seeds=(1, 2), flags="--steps 2 --label 'a b'")
    (tmp_path / "fail-smat").touch()
    lines = []
    with pytest.raises(ValueError, match=r"2 runs failed.*smat-seed1\.log.*smat-seed2\.log"):
        sweep.sweep(options, script=[str(script)], report=lines.append)
    rest = ["--resume", "--steps", "2", "--label", "a b"]
    assert [words for words, _ in calls(script)] == [
        [method, "--seed", str(seed), "--out", str(tmp_path / f"out/{method}-seed{seed}"), *rest]
        for seed in (1, 2)
        for method in ("ft", "smat")
    ]
    assert lines[0].startswith("4 runs, 0 of them done")
    assert lines[2] == "[2/4] smat-seed1: failed with status 3"
    assert (tmp_path / "out/jobs/ft-seed1.log").read_text() == "hello from ft\n"
    (tmp_path / "fail-smat").unlink()
    sweep.sweep(options, script=[str(script)], report=lines.append)
    assert len(calls(script)) == 6
    assert lines[5].startswith("4 runs, 2 of them done")
    sweep.sweep(options, script=[str(script)], report=lines.append)
    assert len(calls(script)) == 6
    # other flags are another run
    sweep.sweep(Sweep(tmp_path / "out", seeds=(1,), flags="--steps 3"), script=[str(script)], report=lines.append)
    assert len(calls(script)) == 8


def test_a_run_of_another_sweep_is_told_before_any_begins(script, tmp_path):
    options, lock = Sweep(tmp_path / "out", seeds=(1,)), tmp_path / "out/jobs/smat-seed1.lock"
    with locked(lock, ""), pytest.raises(ValueError, match=rf"another sweep runs smat-seed1 \(it holds {lock}\): wait"):
        sweep.sweep(options, script=[str(script)])
    assert calls(script) == []
    with locked(lock, ""):
        sweep.sweep(replace(options, methods=("ft",)), script=[str(script)])
    sweep.sweep(options, script=[str(script)])
    assert [words[0] for words, _ in calls(script)] == ["ft", "smat"]
    assert not lock.exists()


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ("--preset lm", ["ft", "ft", "smat", "smat"]),  # sigma is auto there: measured on the runs of ft
        ("--sigma auto", ["ft", "ft", "smat", "smat"]),
        ("--preset lm --sigma 0.1", ["smat", "ft", "smat", "ft"]),
        ("", ["smat", "ft", "smat", "ft"]),
    ],
)
def test_runs_that_measure_their_sigma_wait_for_those_that_it_is_measured_on(flags, order, script, tmp_path):
    options = Sweep(tmp_path / "out", methods=("smat", "ft"), seeds=(1, 2), flags=flags)
    sweep.sweep(options, script=[str(script)], report=lambda line: None)
    assert [words[0] for words, _ in calls(script)] == order


def test_a_sweep_of_many_runs_holds_one_lock(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_MOST", 1)
    options, lock = Sweep(tmp_path / "out", methods=("ft",), seeds=(1, 2)), tmp_path / "out/jobs/sweep.lock"
    with locked(lock, ""), pytest.raises(ValueError, match=r"another sweep runs here .it holds"):
        sweep.sweep(options, script=[str(script)])
    sweep.sweep(options, script=[str(script)])
    assert len(calls(script)) == 2


def test_flags_of_some_methods_are_given_to_these(script, tmp_path):
    flags = "--steps 2 --sigma auto --alpha-min=0.5 --no-adaptive --rho 0.1 --label x"
    options, lines = Sweep(tmp_path / "out", methods=("asam", "ft", "smat"), seeds=(1,), flags=flags), []
    sweep.sweep(options, script=[str(script)], report=lines.append)
    given = {words[0]: words[words.index("--resume") + 1 :] for words, _ in calls(script)}
    assert list(given) == ["ft", "asam", "smat"]
    assert given["ft"] == ["--steps", "2", "--label", "x"]
    assert given["asam"] == ["--steps", "2", "--no-adaptive", "--rho", "0.1", "--label", "x"]
    assert given["smat"] == ["--steps", "2", "--sigma", "auto", "--alpha-min=0.5", "--rho", "0.1", "--label", "x"]
    assert lines[:2] == [
        "note: asam has no --sigma or --alpha-min, and is trained without",
        "note: ft has no --sigma or --alpha-min or --no-adaptive or --rho, and is trained without",
    ]
    sweep.sweep(options, script=[str(script)], report=lines.append)
    assert len(calls(script)) == 3


def test_no_run_takes_another_sigma_because_the_run_that_it_is_measured_on_failed(script, tmp_path):
    options = Sweep(tmp_path / "out", methods=("smat", "ft"), seeds=(1, 2), flags="--sigma auto")
    (tmp_path / "fail-ft").touch()
    with pytest.raises(ValueError, match=r"^2 runs failed: .*; 2 wait for their sigma, which is measured on these$"):
        sweep.sweep(options, script=[str(script)], report=lambda line: None)
    assert [words[0] for words, _ in calls(script)] == ["ft", "ft"]


@pytest.mark.parametrize("gone", ["out/ft-seed1", "out/ft-seed1/rot90", "out/ft-seed1/rot90/manifest.json"])
def test_a_run_whose_experts_are_gone_is_not_done(gone, script, tmp_path):
    options, lines = Sweep(tmp_path / "out", seeds=(1,)), []
    sweep.sweep(options, script=[str(script)], report=lines.append)
    shutil.rmtree(tmp_path / gone) if (tmp_path / gone).is_dir() else (tmp_path / gone).unlink()
    sweep.sweep(options, script=[str(script)], report=lines.append)
    assert lines[3:] == [lines[0].replace("0 of them", "1 of them"), "[1/1] ft-seed1: done"]
    assert (tmp_path / "out/ft-seed1/rot90/manifest.json").exists()


def test_a_run_that_leaves_no_expert_is_not_done(script, tmp_path):
    options, lines = Sweep(tmp_path / "out", methods=("ft",), seeds=(1,)), []
    sweep.sweep(options, script=[str(script)], report=lines.append)
    mark = tmp_path / "out/jobs/ft-seed1.done.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"experts": []}))
    sweep.sweep(options, script=[str(script)], report=lines.append)
    assert [line for line in lines if "runs" in line] == [lines[0]] * 2


def test_a_task_that_is_added_to_the_data_is_trained_unless_tasks_are_named(script, tmp_path):
    def count(flags=""):
        before = len(calls(script))
        sweep.sweep(Sweep(tmp_path / "out", ("ft",), (1,), flags), script=[str(script)], report=lambda line: None)
        return len(calls(script)) - before

    def expert(task, name="trace", data=str(tmp_path / "data")):
        manifest = {"kind": "expert", "code": machine.code(), "suite": {"name": name, "seed": 0, "data": data}}
        write_text(tmp_path / "out/ft-seed1" / task / "manifest.json", json.dumps(manifest))

    expert("rot90")
    assert [count(), count()] == [1, 0]  # the data are not there any more
    for task in ("rot90", "later"):
        write_text(tmp_path / "data" / task / "train.jsonl", "")
    assert [count(), count()] == [1, 1]  # train.py itself would leave the expert
    expert("later")
    assert count() == 0
    shutil.rmtree(tmp_path / "out/ft-seed1/later")
    flags, file = f"--data={tmp_path / 'of tasks.json'}".replace(" ", "' '"), tmp_path / "of tasks.json"
    write_text(file, '{"rot90": "somewhere/else"}')
    expert("rot90", "short_text", {"rot90": "somewhere/else"})
    assert [count(flags), count(flags)] == [1, 0]
    write_text(file, '{"rot90": "somewhere/else", "later": "somewhere"}')
    assert count(flags) == 1
    for flags in ("--tasks rot90", "--tasks=rot90", "--suite-options tasks rot90"):
        assert [count(flags), count(flags)] == [1, 0]


def test_experts_and_snapshots_of_other_code_are_told_before_any_run(script, tmp_path):
    options, lines = Sweep(tmp_path / "out", seeds=(1,)), []
    sweep.sweep(options, script=[str(script)], report=lines.append)
    for method, code in (("ft", {"code": "0.0.1+abc"}), ("smat", {})):
        write_text(tmp_path / f"out/{method}-seed1/rot90/manifest.json", json.dumps({"kind": "expert", **code}))
    saver = Saver(resuming.path_of(tmp_path / "out/ft-seed1", "mirror"), {})
    saver.save(State({}, (), 1), {})
    saver.wait()
    (tmp_path / "out/elsewhere").mkdir()
    with pytest.raises(
        ValueError, match=r"ft-seed1/rot90 is of code 0\.0\.1\+abc; \S+/smat-seed1/rot90 is of code unk"
    ) as told:
        sweep.sweep(options, script=[str(script)], report=lines.append)
    assert str(told.value).endswith("give another --out, remove them, or keep them with --other-code")
    assert "mirror" not in str(told.value)
    assert len(calls(script)) == 2
    sweep.sweep(replace(options, other_code=True), script=[str(script)], report=lines.append)
    assert lines[-1].startswith("2 runs, 2 of them done")


def test_data_that_were_edited_during_a_sweep_are_told(tmp_path):
    found = {"ft-seed1": (1, "old"), "smat-seed1": (1, "new"), "ft-seed2": (2, "new"), "smat-seed2": (2, "new")}
    options, script = Sweep(tmp_path / "out", seeds=(1, 2)), tmp_path / "train.py"
    script.write_text("")
    for name, (seed, rows) in found.items():
        manifest = {"kind": "expert", "code": machine.code(), "seed": seed, "train_rows": {"hash": rows}}
        write_text(tmp_path / "out" / name / "rot90/manifest.json", json.dumps(manifest))
    told = "^the training rows of rot90 changed during the sweep: those of ft-seed1 are not those of smat-seed1; remove"
    with pytest.raises(ValueError, match=told):
        sweep.sweep(options, script=[str(script)], report=lambda line: None)


def test_one_process_at_a_time_on_each_device(script, tmp_path):
    jobs = [Job(str(i), (sys.executable, str(script), str(i)), tmp_path / f"{i}.log") for i in range(5)]
    ended = dict((job.name, status) for job, status in launching.local(devices=("0", "3"))(jobs))
    assert ended == dict.fromkeys("01234", 0)
    assert {device for _, device in calls(script)} == {"0", "3"}
    file = tmp_path / "order"
    line = f"echo begin $CUDA_VISIBLE_DEVICES >> {file}; sleep 0.1; echo end $CUDA_VISIBLE_DEVICES >> {file}"
    jobs = [Job(str(i), ("sh", "-c", line), tmp_path / f"{i}.log") for i in range(5)]
    assert len(list(launching.local(devices=("0", "3"))(jobs))) == 5
    for device in "03":
        own = [line.split()[0] for line in file.read_text().splitlines() if line.endswith(device)]
        assert own == ["begin", "end"] * (len(own) // 2)


def test_children_are_ended_when_the_parent_stops(tmp_path):
    wait = (
        "import signal, sys, time; signal.signal(15, lambda *a: (print('saved', flush=True), sys.exit(143)));"
        "print('up', flush=True); time.sleep(60)"
    )
    jobs = [
        Job("quick", (sys.executable, "-c", "import time; time.sleep(0.3)"), tmp_path / "quick.log"),
        Job("slow", (sys.executable, "-c", wait), tmp_path / "slow.log"),
    ]
    running = launching.local(processes=2)(jobs)
    assert next(running)[0].name == "quick"
    deadline = time.monotonic() + 60
    while "up" not in (tmp_path / "slow.log").read_text():
        assert time.monotonic() < deadline, "the slow job has not begun within a minute"
        time.sleep(0.01)
    running.close()
    assert (tmp_path / "slow.log").read_text() == "up\nsaved\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_sweep_unless_nohup_has_it_ignored(number):
    before = signal.signal(number, handler := lambda *_: None)
    try:
        with pytest.raises(SystemExit) as caught, leaving_on_signals():
            signal.raise_signal(number)
        assert caught.value.code == 128 + number
        assert signal.signal(number, signal.SIG_IGN) is handler
        with leaving_on_signals():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_end_ends_its_runs(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import sys; from pathlib import Path; from smat_fn.scripts.train.sweep import Sweep, sweep;"
        "here = Path(sys.argv[1]); options = Sweep(here / 'out', methods=('ft',), seeds=(0,));"
        "sweep(options, script=[str(here / 'train.py')])"
    )
    root, pid = Path(__file__).parents[3], tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path)], cwd=root, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its logs open
def test_jobs_of_a_cluster(script, tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "fail-two").touch()
    jobs = [Job(name, (sys.executable, str(script), name), tmp_path / f"{name}.log") for name in ("one", "two")]
    launch = launching.submitit_jobs(tmp_path / "submitit", cluster="debug", timeout_min=1)
    assert {job.name: status for job, status in launch(jobs)} == {"one": 0, "two": 3}


def test_a_job_of_a_cluster_has_a_day_and_a_gpu_unless_told_otherwise(tmp_path, monkeypatch):
    submitit, taken = pytest.importorskip("submitit"), []
    monkeypatch.setattr(submitit.AutoExecutor, "update_parameters", lambda self, **given: taken.append(given))
    launching.submitit_jobs(tmp_path, cluster="debug")
    launching.submitit_jobs(tmp_path, cluster="debug", timeout_min=5)
    assert taken == [{"timeout_min": minutes, "gpus_per_node": 1} for minutes in (24 * 60, 5)]


PREEMPTED = """
import os, signal, sys, time
from pathlib import Path
begun = Path(sys.argv[1])
if not begun.exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
    begun.touch()
    os.kill(os.getppid(), signal.SIGUSR2)
    time.sleep(60)
print("resumed")
"""


def test_a_preempted_job_waits_until_its_command_has_saved(tmp_path):
    job = Job("one", (sys.executable, "-c", PREEMPTED, str(tmp_path / "begun")), tmp_path / "one.log")
    asked = []
    before = signal.signal(signal.SIGUSR2, lambda *_: asked.append(job.log.read_text()))  # as submitit's own
    try:
        assert launching._Attempt(job)() == 0
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert asked == ["saved\n"]


@pytest.mark.slow  # submitit asks every ten seconds
def test_a_preempted_job_is_queued_again(tmp_path):
    pytest.importorskip("submitit")
    job = Job("one", (sys.executable, "-c", PREEMPTED, str(tmp_path / "begun")), tmp_path / "one.log")
    launch = launching.submitit_jobs(tmp_path / "submitit", cluster="local", timeout_min=2, gpus_per_node=0)
    assert list(launch([job])) == [(job, 0)]
    assert job.log.read_text() == "saved\nresumed\n"


def test_what_a_cluster_does_not_take_is_told(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    for name, value in (("timeout_mins", 3), ("slurm_queue", "gpu"), ("timeout_min", "long")):
        with pytest.raises(
            ValueError, match=rf"^--cluster-options {name} {value}: submitit does not take them \(.*{name}"
        ):
            launching.submitit_jobs(tmp_path, cluster="debug", **{name: value})

    def refuse(*args):
        raise submitit.core.utils.FailedSubmissionError("sbatch: invalid partition")

    launch = launching.submitit_jobs(tmp_path, cluster="debug")
    monkeypatch.setattr(submitit.AutoExecutor, "submit", refuse)
    with pytest.raises(ValueError, match=r"does not accept the job one: check --cluster-options \(sbatch: invalid"):
        next(launch([Job("one", ("true",), tmp_path / "one.log")]))


def test_the_table_tells_how_far_every_expert_is(tmp_path, capsys):
    run = tmp_path / "smat-seed0"
    checkpoint.save_expert(run / "rot90", {"w": torch.zeros(1)}, {"kind": "expert"})
    checkpoint.save_expert(run / "base", {"w": torch.zeros(1)}, {"kind": "base"})
    (run / "rot90.log.jsonl").write_text('{"step": 399, "loss": 0.5}\n')
    (run / "mirror.log.jsonl").write_bytes(b'{"step": 6, "loss": 0.25}\n5\n\xff\n{"step": 7, "lo')
    rows = sweep.progress(tmp_path)
    assert [row[1:4] for row in rows] == [("mirror", False, 6), ("rot90", True, 399)]
    sweep.status(Status(tmp_path))
    printed = capsys.readouterr().out
    assert "step 7, loss 0.250" in printed
    assert "1/2" in printed
    resuming.replace_expert(run, "rot90")  # by a run with --overwrite
    assert [row.done for row in sweep.progress(tmp_path)] == [False, False]
    with pytest.raises(ValueError, match="holds no run"):
        sweep.progress(tmp_path / "smat-seed0" / "base" / "none")


def test_the_runs_of_others_need_not_be_writable(tmp_path, monkeypatch, capsys):
    checkpoint.save_expert(tmp_path / "ft" / "rot90", {"w": torch.zeros(1)}, {"kind": "expert"})
    monkeypatch.setattr(os, "access", lambda place, mode: not mode & os.W_OK)
    monkeypatch.setattr(sys, "argv", ["train.py", "status", str(tmp_path)])
    cli.run("train.py", print, Sweep, description=None, commands={"status": (sweep.status, Status)})
    assert "rot90" in capsys.readouterr().out


def test_runs_of_other_tasks_are_counted_by_themselves(capsys):
    rows = [
        *(sweep.Progress("a", task, True, 9, 0.5) for task in ("x", "y")),
        sweep.Progress("b", "x", True, 9, 0.5),  # has yet to train y
        sweep.Progress("other", "z", True, 9, 0.5),
    ]
    Console(width=100).print(sweep.table(rows))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["a", "done", "done", "", "2/2"],
        ["b", "done", "-", "", "1/2"],
        ["other", "", "", "done", "1/1"],
    ]


def test_bad_input_is_listed():
    with pytest.raises(ValueError, match=r"method 'sgd' is unknown.*seeds are \(1, 1\).*flag --out is set") as error:
        sweep.jobs(Sweep(Path("x"), methods=("sgd",), seeds=(1, 1), flags="--out y"), script=["train.py"])
    assert "ft, smat" in str(error.value)
    with pytest.raises(ValueError, match=r"--flags=.--label 'a. cannot be split into words \(No closing"):
        sweep.jobs(Sweep(Path("x"), flags="--label 'a"), script=["train.py"])
    lone = Sweep(Path("x"), cluster_options={"timeout_min": 5})
    for options, told in (
        (lone, "--cluster-options timeout_min 5 would change nothing: pass --launcher submitit"),
        (replace(lone, launcher="submitit", devices=("0",)), "--devices and --processes are those of --launcher local"),
    ):
        with pytest.raises(ValueError, match=told):
            sweep.sweep(options, script=["train.py"])
    with pytest.raises(ValueError, match="processes is 0"):
        launching.local(processes=0)
    with pytest.raises(ValueError, match="name each once"):
        launching.local(devices=("0", "0"))
