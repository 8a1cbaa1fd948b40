"""Experts on disk: the same bits again, the same data for every method, nothing left of a run that fails."""

import json
import math
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from statistics import stdev

import pytest
import torch

from smat_fn import checkpoint, mat, optim, random, tree
from smat_fn.checkpoint import same
from smat_fn.config import DIGITS, METHODS, MORE_METHODS, Adapters, Asam, Finetune, Mergopt, Msam, Smat, Training
from smat_fn.grad import linearised, value_and_grad
from smat_fn.lora import peft
from smat_fn.mat.offload import storage
from smat_fn.scripts.train import logs, loop, memory, stopwatch, training
from smat_fn.scripts.train.logs import Log
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.options import RunOptions
from smat_fn.simulation import probe
from smat_fn.suites import task_names
from smat_fn.testing import assert_trees_close

SMAT = partial(Smat, alpha_min=0.2, drop_prob=0.5, sigma=0.01, period=2, noise="uniform")
SIX = Training(steps=6, lr=5e-4)
TIMED = {
    "seconds", "examples_per_second", "clean_step_seconds", "simulated_step_seconds", "peak_memory_bytes",
    "simulation_share",
}  # fmt: skip


def log_of(folder, task):
    return [json.loads(line) for line in (folder / f"{task}.log.jsonl").read_text().splitlines()]


def test_a_run_leaves_experts_logs_and_the_base(runs, suite):
    folders = [*suite.tasks, "base"]
    assert sorted(p.name for p in runs["smat"].iterdir()) == sorted(
        [*folders, *(f"{t}.log.jsonl" for t in suite.tasks)]
    )
    base, manifest = checkpoint.load_expert(runs["smat"] / "base", suite.base)
    assert same(base, suite.base)
    assert (manifest["kind"], manifest["suite"]) == ("base", dict(suite.recipe))


def test_epochs_of_a_suite_that_has_none_are_refused(suite):
    with pytest.raises(ValueError, match="suite 'digits' is trained by steps, not by epochs: give `steps`"):
        loop.budget(suite, "rot90", Training(None, 1e-3, epochs={"rot90": 2}))


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(runs, train, tmp_path):
    again = ("rot90", "stripes")
    train(tmp_path / "again", tasks=again)
    train(tmp_path / "other", seed=22, tasks=("rot90",))
    for task in again:
        assert (tmp_path / "again" / task / "model.safetensors").read_bytes() == (
            runs["smat"] / task / "model.safetensors"
        ).read_bytes()
    prints = {
        checkpoint.load_manifest(folder / "rot90")["fingerprint"] for folder in (runs["smat"], tmp_path / "other")
    }
    assert len(prints) == 2


def test_an_expert_does_not_depend_on_the_tasks_trained_before_it(runs, train, tmp_path):
    train(tmp_path / "alone", tasks=("stripes",))
    alone, among = (checkpoint.load_leaves(folder / "stripes")[0] for folder in (tmp_path / "alone", runs["smat"]))
    assert same(alone, among)


def test_all_methods_see_the_same_batches(suite):
    seen = {}
    for name in ("ft", "smat"):
        batches = seen[name] = []

        def recorded(task, key, step, batches=batches):
            batches.append(suite.batch(task, key, step))
            return batches[-1]

        train_expert(suite.replace(batch=recorded), "mirror", DIGITS.methods[name], SIX, seed=3)
    assert len(seen["ft"]) == len(seen["smat"]) == 6
    for ours, theirs in zip(seen["ft"], seen["smat"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(seen["ft"][0][0], seen["ft"][1][0])


def test_smat_is_ft_until_its_first_simulated_step(runs, suite):
    ft, smat = (log_of(runs[name], "rot90") for name in ("ft", "smat"))
    # period 4: the loss of step 3 is the first that meets a simulated state
    assert [a["loss"] == b["loss"] for a, b in zip(ft, smat, strict=True)] == [True] * 3 + [False] * 3
    long = replace(DIGITS.methods["smat"], period=7)
    expert = train_expert(suite, "rot90", long, SIX, seed=21)
    assert same(expert, checkpoint.load_leaves(runs["ft"] / "rot90")[0])


def test_the_log_names_simulated_steps_and_their_scale(runs):
    rows = log_of(runs["smat"], "negative")
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["simulated"] for row in rows] == [False, False, False, True, False, False]
    assert all(row["scale"] == 1 for row in rows if not row["simulated"])
    assert 0.1 <= rows[3]["scale"] < 1
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 and row["seconds"] > 0 for row in rows)


def test_log_every_thins_the_log_and_keeps_the_last_step(runs, train, tmp_path):
    train(tmp_path / "run", tasks=("rot90",), log_every=4)
    rows, every = log_of(tmp_path / "run", "rot90"), log_of(runs["smat"], "rot90")
    for row in (*rows, *every):
        for name in TIMED & row.keys():
            del row[name]
    assert rows == [every[3], every[5]]


def test_the_manifest_says_how_the_expert_was_made(runs, suite):
    manifest = checkpoint.load_manifest(runs["smat"] / "rot90")
    expert, _ = checkpoint.load_leaves(runs["smat"] / "rot90")
    assert manifest["hyperparameters"] == {
        "alpha_min": 0.1, "drop_prob": 0.5, "sigma": 0.01, "period": 4, "noise": "uniform",
    }  # fmt: skip
    assert manifest["training"] == {
        "steps": 6, "lr": 5e-4, "optimizer": "adam", "muon_lr": None, "schedule": "cosine", "weight_decay": 0.0,
        "max_grad_norm": None, "accumulate": 1, "precision": None,
    }  # fmt: skip
    told = {name: manifest[name] for name in ("kind", "task", "label", "method", "seed", "suite")}
    assert told == {
        "kind": "expert", "task": "rot90", "label": "SMAT", "method": "smat", "seed": 21, "suite": dict(suite.recipe),
    }  # fmt: skip
    assert manifest["base_fingerprint"] == checkpoint.fingerprint(suite.base)
    assert manifest["fingerprint"] == checkpoint.fingerprint(expert)
    assert manifest["versions"]["torch"] == version("torch")
    assert manifest["seconds"] > 0


def test_all_problems_are_told_before_any_work(suite, train, tmp_path):
    (tmp_path / "mirror").mkdir()
    with pytest.raises(ValueError, match="steps is 0") as error:
        train(
            tmp_path,
            method=Smat(alpha_min=2.0, drop_prob=1.0, sigma=0.01, period=0, noise="uniform"),
            tasks=("rot9", "mirror", "negative", "negative", "Base"),
            training=Training(steps=0, lr=1e-3, weight_decay=0.1, max_grad_norm=-1.0, accumulate=0),
            log_every=0,
            save_every_steps=0,
            save_every_minutes=0.0,
            probe=-1,
            log=("wandp",),
        )
    text = str(error.value)
    for part in ("log_every is 0", "weight_decay is 0.1", "alpha_min is 2.0", "drop_prob is 1.0", "period is 0"):
        assert part in text
    for part in ("accumulate is 0", "save_every_steps is 0", "save_every_minutes is 0", "probe is -1", "'wandp'"):
        assert part in text
    for part in ("-1.0", "'rot9' is unknown", "mirror exists", "'negative' is named twice", "'Base' is named like a"):
        assert part in text
    assert text.count("steps is 0") == 2  # of training, and save_every_steps
    assert "\n" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["mirror"]
    with pytest.raises(ValueError, match="learning rate is nan"):
        train(tmp_path / "run", training=Training(steps=6, lr=math.nan))
    with pytest.raises(ValueError, match="no tasks"):
        train(tmp_path / "run", tasks=())


def test_what_keeps_tasks_from_training_is_told_of_all_at_once(suite, tmp_path):
    def steps(task):
        raise ValueError(f"rows of {task} are too long")

    run = RunOptions(tmp_path, ("mirror", "rot90"), 0)
    with pytest.raises(ValueError, match="rows of mirror are too long; rows of rot90 are too long"):
        training.planned(suite.replace(epoch_steps=steps), DIGITS.methods["ft"], SIX, run)
    linear = suite.replace(recipe={**suite.recipe, "linearised": True})
    with pytest.raises(ValueError, match="`shard` is not supported with linearised: leave one of them out"):
        training.planned(linear, DIGITS.methods["ft"], replace(SIX, shard=True), run)


def test_overwrite_replaces_experts_and_nothing_else(train, tmp_path):
    train(tmp_path, tasks=("rot90", "mirror"))
    before = {task: checkpoint.load_manifest(tmp_path / task)["fingerprint"] for task in ("rot90", "mirror")}
    with pytest.raises(ValueError, match=r"rot90 exists, trained .*--overwrite"):
        train(tmp_path, "ft", tasks=("rot90",))
    train(tmp_path, "ft", tasks=("rot90",), overwrite=True, label="plain")
    manifests = {task: checkpoint.load_manifest(tmp_path / task) for task in before}
    assert (manifests["rot90"]["method"], manifests["rot90"]["label"]) == ("ft", "plain")
    assert manifests["rot90"]["fingerprint"] != before["rot90"]
    assert manifests["mirror"]["fingerprint"] == before["mirror"]


def test_the_base_of_other_experts_is_not_replaced(suite, train, tmp_path):
    train(tmp_path, tasks=("rot90",))
    other = suite.replace(base={path: leaf + 1 for path, leaf in suite.base.items()})
    with pytest.raises(ValueError, match=r"base is another base than suite 'digits' gives"):
        train(tmp_path, suite=other, tasks=("mirror",))
    assert checkpoint.load_manifest(tmp_path / "base")["fingerprint"] == checkpoint.fingerprint(suite.base)
    assert not (tmp_path / "mirror").exists()
    train(tmp_path, suite=other, tasks=("mirror",), overwrite=True)
    assert checkpoint.load_manifest(tmp_path / "base")["fingerprint"] == checkpoint.fingerprint(other.base)


def test_a_nan_loss_stops_with_its_step_and_leaves_no_expert(suite, train, tmp_path):
    def broken(task, key, step):
        images, labels = suite.batch(task, key, step)
        return (images * math.nan if step == 2 else images), labels

    broken_suite = suite.replace(batch=broken, batch_rows=None)
    with pytest.raises(ValueError, match=r"loss of mirror is nan at step 2: lower the learning rate$"):
        train(tmp_path, suite=broken_suite, tasks=("mirror", "rot90"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "mirror.log.jsonl"]
    assert [row["step"] for row in log_of(tmp_path, "mirror")] == [0, 1]


def test_parameters_that_are_not_finite_are_never_saved(suite, train, tmp_path):
    def kink(params, batch):
        # zero, with an infinite slope
        return sum((leaf - leaf.detach()).abs().sum().sqrt() for leaf in params.values()), None

    with pytest.raises(ValueError, match=r"of the mirror expert holds \d+ values that are NaN"):
        train(
            tmp_path,
            "ft",
            suite=suite.replace(loss_fn=lambda task: kink),
            tasks=("mirror",),
            training=Training(steps=1, lr=1e-3),
        )
    assert not (tmp_path / "mirror").exists()


def test_a_loss_that_is_not_finite_is_found_between_lines_and_names_its_rows(suite, train, tmp_path):
    def broken(task, key, step):
        images, labels = suite.batch(task, key, step)
        return (images * math.nan if step in (2, 3) else images), labels

    rows = suite.batch_rows("mirror", random.fold_in(random.key(21), "mirror"), 2)
    _, labels = suite.batch("mirror", random.fold_in(random.key(21), "mirror"), 2)
    assert len(rows) == len(labels)
    with pytest.raises(ValueError, match=f"is nan at step 2, on training rows {', '.join(map(str, rows))}: lower"):
        train(tmp_path, suite=suite.replace(batch=broken), tasks=("mirror",), log_every=5)
    assert log_of(tmp_path, "mirror") == []


def test_micro_batches_give_the_same_expert_up_to_rounding(suite):
    # Adam makes steps of rounding where a gradient is zero on paper: that of the bias of keys is; where it is tiny,
    # rounding still shows, since transformers computes the softmax in float32
    exact = suite.replace(base={path: leaf.double() for path, leaf in suite.base.items()})
    whole, other = (
        train_expert(exact, "rot90", DIGITS.methods["smat"], replace(SIX, steps=4, accumulate=n), seed=21)
        for n in (1, 3)
    )
    assert all(leaf.dtype == torch.float64 for leaf in whole.values())
    assert not same(other, whole)
    apart = {path for path in whole if not torch.allclose(other[path], whole[path], rtol=0, atol=1e-5)}
    assert apart <= {path for path in whole if path.endswith("k_proj.bias")}


@pytest.mark.slow
def test_precisions_train_what_they_say_and_keep_the_dtypes_of_the_suite(suite):
    seen = {}
    for precision in (None, "fp32", "bf16", "mixed"):
        dtypes = seen[precision] = set()

        def loss_fn(task, dtypes=dtypes):
            inner = suite.loss_fn(task)

            def loss(params, batch):
                dtypes.update(leaf.dtype for leaf in params.values())
                return inner(params, batch)

            return loss

        training_ = replace(SIX, steps=4, precision=precision)
        watched = suite.replace(loss_fn=loss_fn)
        seen[precision, "expert"] = train_expert(watched, "rot90", DIGITS.methods["smat"], training_, seed=21)
        assert {leaf.dtype for leaf in seen[precision, "expert"].values()} == {torch.float32}
    assert seen[None] == seen["fp32"] == {torch.float32}
    assert seen["bf16"] == seen["mixed"] == {torch.bfloat16}
    assert same(seen[None, "expert"], seen["fp32", "expert"])
    rounded = {p: all(torch.equal(leaf, leaf.bfloat16().float()) for leaf in seen[p, "expert"].values())
               for p in ("bf16", "mixed")}  # fmt: skip
    assert rounded == {"bf16": True, "mixed": False}
    assert_trees_close(seen["mixed", "expert"], seen[None, "expert"], atol=4.1e-3)  # 4 steps of Adam at 5e-4, twice


def test_a_base_in_bf16_is_trained_by_masters_and_rounded_once_at_the_end(suite):
    narrow = suite.replace(base={path: leaf.bfloat16() for path, leaf in suite.base.items()})
    small = Training(steps=4, lr=1e-5, schedule="constant", precision="mixed")
    masters = suite.replace(base={path: leaf.float() for path, leaf in narrow.base.items()})
    expert = train_expert(narrow, "rot90", DIGITS.methods["ft"], small, seed=21)
    wide = train_expert(masters, "rot90", DIGITS.methods["ft"], small, seed=21)
    assert same(expert, {path: leaf.bfloat16() for path, leaf in wide.items()})


def test_an_expert_is_probed_on_dev_at_keys_that_all_runs_share(suite, train, tmp_path):
    at = DIGITS.methods["smat"]
    train(tmp_path, "ft", tasks=("rot90",), probe=3, probe_at=at)
    manifest, row = checkpoint.load_manifest(tmp_path / "rot90"), log_of(tmp_path, "rot90")[-1]
    expert, _ = checkpoint.load_expert(tmp_path / "rot90", suite.base)
    keys = random.split(random.fold_in(random.key(0), "probe"), 3)
    given = {"alpha_min": 0.1, "drop_prob": 0.5, "sigma": 0.01, "noise": "uniform"}
    (dev,) = suite.dev_batches("rot90")
    assert len(dev.batch[1]) == dev.weight == 64
    want = probe(suite.loss_fn("rot90"), expert, suite.base, [dev], keys, where=suite.where, **given)
    told = {"clean": want.clean, "simulated": want.mean, "sd": stdev(want.simulated), "keys": 3, **given}
    assert manifest["probe"] == told
    assert (row["probe_clean"], row["probe_simulated"]) == (want.clean, want.mean)
    with pytest.raises(ValueError, match="probe is 1: give its hyperparameters too, probe_at"):
        train(tmp_path / "other", tasks=("rot90",), probe=1)
    with pytest.raises(ValueError, match="'digits' has no batches of its dev split: leave out `probe`"):
        train(tmp_path / "other", tasks=("rot90",), probe=1, probe_at=at, suite=suite.replace(dev_batches=None))


def test_manifest_and_last_line_say_what_training_cost(runs):
    manifest, rows = checkpoint.load_manifest(runs["smat"] / "rot90"), log_of(runs["smat"], "rot90")
    names = ("seconds", "clean_step_seconds", "simulated_step_seconds", "peak_memory_bytes", "peak_memory_of")
    assert {name: rows[-1][name] for name in names} == {name: manifest[name] for name in names}
    assert set(names) & set(rows[-2]) == {"seconds", "peak_memory_bytes"}
    cost = 5 * manifest["clean_step_seconds"] + manifest["simulated_step_seconds"]
    assert cost == pytest.approx(manifest["seconds"], abs=1e-3)
    assert manifest["peak_memory_bytes"] > 2**26
    assert manifest["peak_memory_of"] == "resident process"
    assert "simulated_step_seconds" not in checkpoint.load_manifest(runs["ft"] / "rot90")
    assert [row["lr"] for row in rows] == [optim.cosine(5e-4, 6)(step) for step in range(6)]
    assert all(row["examples_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0)], ids=["weights", "adapters"])
def test_a_finished_expert_is_probed_when_its_run_is_resumed(suite, train, tmp_path, adapters):
    at, said = DIGITS.methods["smat"], []
    options = {"tasks": ("rot90",), "probe_at": at, "training": replace(SIX, steps=2, lora=adapters)}
    train(tmp_path / "one", "ft", probe=2, **options)
    train(tmp_path / "two", "ft", **options)
    manifest = checkpoint.load_manifest(tmp_path / "two" / "rot90")
    for _ in range(2):  # the second time, the probe is there
        train(tmp_path / "two", "ft", probe=2, resume=True, report=said.append, **options)
    probed = checkpoint.load_manifest(tmp_path / "one" / "rot90")["probe"]
    assert checkpoint.load_manifest(tmp_path / "two" / "rot90") == {**manifest, "probe": probed}
    line = f"rot90: dev loss {probed['clean']:.4f}, at 2 simulated states {probed['simulated']:.4f}"
    assert said == ["rot90: already finished", line, "rot90: already finished"]
    for count, sigma in ((1, at.sigma), (1, 2 * at.sigma)):
        changed = options | {"probe": count, "probe_at": replace(at, sigma=sigma)}
        train(tmp_path / "two", "ft", resume=True, **changed)
        found = checkpoint.load_manifest(tmp_path / "two" / "rot90")["probe"]
        assert (found["keys"], found["sigma"]) == (count, sigma)


def test_a_finished_expert_is_probed_again_where_its_dev_rows_have_changed(suite, train, tmp_path):
    told = []
    for dev in ("a", "a", "b"):
        own = suite.replace(train_rows=lambda task, dev=dev: {"from": "x", "count": 1, "hash": "h", "dev": dev})
        options = {"tasks": ("rot90",), "probe_at": DIGITS.methods["smat"], "probe": 1, "report": told.append}
        train(tmp_path, "ft", suite=own, training=replace(SIX, steps=2), resume=True, **options)
        assert checkpoint.load_manifest(tmp_path / "rot90")["probe"]["dev_rows"] == dev
    assert sum("simulated states" in line for line in told) == 2


@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0)])
def test_the_peak_of_memory_is_with_that_of_saving_and_without_that_of_the_probe(
    adapters, train, tmp_path, monkeypatch
):
    peak, module = [5], checkpoint if adapters is None else peft
    write, probed = module.save_file, training.simulation.probe

    def wrote(leaves, path, **options):
        peak[0] = 7 if "rot90" in str(path) else peak[0]
        write(leaves, path, **options)

    def probes(*args, **options):
        peak[0] = 9
        return probed(*args, **options)

    monkeypatch.setattr(logs, "peak_memory", lambda device: {"peak_memory_bytes": peak[0], "peak_memory_of": "x"})
    monkeypatch.setattr(module, "save_file", wrote)
    monkeypatch.setattr(training.simulation, "probe", probes)
    one = replace(SIX, steps=1, lora=adapters)
    train(tmp_path, "ft", tasks=("rot90",), training=one, probe=1, probe_at=DIGITS.methods["smat"])
    found, last = checkpoint.load_manifest(tmp_path / "rot90"), log_of(tmp_path, "rot90")[-1]
    assert (found["peak_memory_bytes"], last["peak_memory_bytes"], peak[0]) == (7, 7, 9)


def test_what_a_suite_prepares_first_is_no_time_of_training(suite, tmp_path, monkeypatch):
    now, prepared = [0.0], []

    def batch(task, key, step):
        now[0] += 1.0 if prepared else 100.0
        prepared.append(step)
        return suite.batch(task, key, step)

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    cpu = torch.device("cpu")
    with Log(tmp_path / "log.jsonl", task="rot90", total=6, device=cpu, rates=lambda step: {}) as log:
        train_expert(suite.replace(batch=batch), "rot90", DIGITS.methods["ft"], SIX, seed=3, log=log)
        assert log.cost()["seconds"] == 6.0
    assert prepared == [0, *range(6)]


@pytest.mark.parametrize(
    "precision", [pytest.param(None, marks=pytest.mark.slow), "mixed", pytest.param("fp32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("method", "place"),
    [
        (Asam(rho=0.5), "auto"),
        *(pytest.param(own, "auto", marks=pytest.mark.slow) for own in (Finetune(), Mergopt(b=1e-3, k_max=3), Msam())),
        (SMAT(), "stream"),
        pytest.param(SMAT(), "cpu", marks=pytest.mark.slow),
    ],
    ids=["asam", "ft", "mergopt", "msam", "stream", "cpu"],
)
def test_base_gives_its_memory_back_while_it_is_not_needed(method, place, precision, suite, monkeypatch):
    base = tree.clone(suite.base)
    module = suite.loss_fn("rot90").module
    own = {name: p.data for name, p in module.named_parameters() if name in base}
    for name, p in module.named_parameters():  # as a language model's, whose base is the module's own weights
        if name in base:
            p.data = base[name]
    four = Training(steps=4, lr=5e-4, precision=precision)
    resting_suite, sizes = suite.replace(base=base), []
    wanted = train_expert(suite, "rot90", method, four, seed=3)
    assert not memory.offloads_base(method, base)  # on a CPU there is nothing to give back

    def on_device(method, leaves, offload):
        return method.name != "orthoreg"

    def look(step, info):
        sizes.extend(leaf.untyped_storage().nbytes() for leaf in base.values())
        if step == 3:
            raise KeyboardInterrupt

    held, copied, size = [], loop._on_host, sum(leaf.nbytes for leaf in base.values())

    class Pageable(storage.HostRuntime):
        """As of a device: host memory is a copy, and copies start from there."""

        def pin(self, leaves):
            held.append(sum(leaf.nbytes for leaf in leaves.values()))
            return storage.Arena(leaves, lambda size: torch.empty(size, dtype=torch.uint8), least=1 << 12)

    monkeypatch.setattr(storage, "runtime_for", Pageable)
    monkeypatch.setattr(loop, "_on_host", lambda leaves: held.append(size) or copied(leaves))
    monkeypatch.setattr(loop, "offloads_base", on_device)
    try:
        found = train_expert(resting_suite, "rot90", method, four, seed=3, offload=place)
        with pytest.raises(KeyboardInterrupt):
            train_expert(resting_suite, "rot90", method, four, seed=3, on_step=look, offload=place)
    finally:
        for name, p in module.named_parameters():
            p.data = own.get(name, p.data)
    assert same(found, wanted)
    assert set(sizes) == {0}
    assert same(base, suite.base)
    assert held == [size, size]  # once in each run


def reads_values_of_base(config):
    """Whether a step of a method needs the values of base; its names and shapes are there."""
    hyper = {"k_max": 2} if config is Mergopt else {"period": 1} if config is Smat else {}
    params = {"w": torch.ones(2, 2)}
    base = {"w": torch.empty(2, 2, device="meta")}
    method = mat.build_of(config())(lambda p, batch: (p["w"].square().sum(), None), optim.adam(0.1), base, **hyper)
    try:
        method.update(random.key(0), method.init(params), ())
    except (ValueError, RuntimeError):
        return True
    return False


def test_methods_whose_base_gives_its_memory_back_are_all_that_read_no_value_of_it():
    free = {config.name for config in (*METHODS, *MORE_METHODS) if not reads_values_of_base(config)}
    assert free == set(memory.STRUCTURE_ALONE)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch: forward derivatives import it
def test_a_base_that_a_linearised_loss_reads_stays(suite, monkeypatch):
    base = tree.clone(suite.base)
    own = suite.replace(base=base, losses={"rot90": linearised(suite.loss_fn("rot90"), base)})
    monkeypatch.setattr(loop, "offloads_base", lambda *_: True)
    monkeypatch.setattr(loop, "offloaded", None)  # reading freed memory would end the process
    train_expert(own, "rot90", Finetune(), Training(steps=1, lr=5e-4), seed=3)


def test_memory_that_others_share_stays():
    both = torch.arange(6.0)
    part, alone, kept = both[:2], torch.ones(3), {"part": torch.tensor([7.0, 8.0]), "alone": torch.zeros(3)}
    with memory.offloaded({"part": part, "alone": alone}, storage.Unpinned(kept)) as present:
        assert both.tolist() == [0, 1, 2, 3, 4, 5]
        assert alone.untyped_storage().nbytes() == 0
        with present():
            assert torch.equal(alone, torch.zeros(3))
        assert alone.untyped_storage().nbytes() == 0
    assert both.tolist() == [7, 8, 2, 3, 4, 5]
    assert torch.equal(alone, torch.zeros(3))


def test_weight_decay_needs_adamw(suite):
    with pytest.raises(ValueError, match=r"weight_decay is 0\.1, adam has none"):
        loop.make_optimizer(Training(steps=1, lr=1e-3, weight_decay=0.1))
    decayed = Training(steps=1, lr=0.25, optimizer="adamw", schedule="constant", weight_decay=0.5)
    still = suite.replace(loss_fn=lambda task: lambda params, batch: ((0.0 * params["layernorm.weight"]).sum(), None))
    expert = train_expert(still, "rot90", DIGITS.methods["ft"], decayed, seed=0)
    # a zero gradient leaves AdamW with its decay alone: theta * (1 - lr * decay), exact in these numbers
    assert all(torch.equal(expert[path], leaf * 0.875) for path, leaf in suite.base.items())


def test_muon_takes_the_masked_matrices_and_adamw_the_rest(suite):
    training_ = Training(steps=2, lr=1e-3, optimizer="muon", muon_lr=0.5, schedule="constant", weight_decay=0.25)
    optimizer = loop.make_optimizer(training_, suite.where)
    matrices = {path for path, leaf in suite.base.items() if leaf.ndim == 2 and suite.where(path, leaf)}
    assert 0 < len(matrices) < len(suite.base)
    state = optimizer.init(suite.base)
    assert set(state.momentum) == matrices
    zero = {path: torch.zeros_like(leaf) for path, leaf in suite.base.items()}
    moved, _ = optimizer.update(zero, state, suite.base)
    # a zero gradient leaves the decays alone, each at its own learning rate
    for path, leaf in suite.base.items():
        assert torch.allclose(moved[path], leaf * (1 - 0.25 * (0.5 if path in matrices else 1e-3)), rtol=1e-6)
    for optimizer, muon_lr in (("muon", None), ("adam", 0.5)):
        with pytest.raises(ValueError, match=f"muon_lr is {muon_lr} for {optimizer}"):
            loop.make_optimizer(Training(steps=1, lr=1e-3, optimizer=optimizer, muon_lr=muon_lr))


def test_muon_takes_adapters_and_of_modules_beside_them_the_masked_matrices(suite):
    matrix = next(p for p, leaf in suite.base.items() if leaf.ndim == 2 and "attention" not in p)
    own = suite.replace(where=lambda path, leaf: path != matrix and suite.where(path, leaf))
    adapters = Adapters(2, 4.0, ("*attention*",), save=(matrix.removesuffix(".weight"),))
    still = Training(steps=1, lr=1e-3, optimizer="muon", muon_lr=0.0, schedule="constant", lora=adapters)
    trained = train_expert(own, "rot90", Finetune(), still, seed=0)
    assert not torch.equal(trained[matrix], suite.base[matrix])  # by AdamW
    assert all(not leaf.any() for path, leaf in trained.items() if path.endswith("lora_B.weight"))


def test_tasks_are_known_without_loading_the_suite(suite):
    assert task_names("digits") == suite.tasks


GROUPS = Training(
    steps=6, lr=5e-4, optimizer="adamw", weight_decay=0.5, schedule="linear", warmup=2, decay_matrices=True
)


def test_warmup_linear_decay_and_decay_of_matrices_alone(train, suite, tmp_path):
    train(tmp_path / "run", "ft", tasks=("rot90",), training=GROUPS)
    manifest, rows = checkpoint.load_manifest(tmp_path / "run" / "rot90"), log_of(tmp_path / "run", "rot90")
    assert [row["lr"] for row in rows] == [optim.linear(5e-4, 6, warmup=2)(step) for step in range(6)]
    assert (manifest["training"]["warmup"], manifest["training"]["decay_matrices"]) == (2, True)
    # by hand, leaf by leaf: one optimizer that decays, one that does not, on the gradients of the same run
    params = suite.base
    both = {flag: optim.adamw(optim.linear(5e-4, 6, warmup=2), weight_decay=0.5 * flag, fused=True) for flag in (1, 0)}
    states = {flag: both[flag].init(params) for flag in both}
    at = value_and_grad(suite.loss_fn("rot90"), engine="autograd")
    key = random.fold_in(random.key(21), "rot90")
    for step in range(6):
        _, grads = at(params, suite.batch("rot90", key, step))
        found = {flag: both[flag].update(grads, states[flag], params) for flag in both}
        states = {flag: state for flag, (_, state) in found.items()}
        params = {path: found[leaf.ndim > 1][0][path] for path, leaf in params.items()}
    expert, _ = checkpoint.load_leaves(tmp_path / "run" / "rot90")
    assert same(expert, params)
    assert {leaf.ndim for leaf in params.values()} >= {1, 2}


def test_a_warmup_longer_than_the_training_of_a_task_is_told_before_any_work(train, suite, tmp_path):
    with pytest.raises(ValueError, match=r"warmup is 7, must lie in \[0, steps = 6\]"):
        train(tmp_path / "one", training=replace(SIX, warmup=7, schedule="constant"))
    by_epochs = Training(None, 1e-3, warmup=40, epochs={"rot90": 1, "mirror": 1, "negative": 2})
    suite = suite.replace(epoch_steps={"rot90": 30, "mirror": 10, "negative": 30}.__getitem__)
    with pytest.raises(ValueError, match=r"^rot90: warmup is 40, must.*30\]; mirror: warmup is 40, must.*10\]$"):
        train(tmp_path / "two", suite=suite, tasks=("rot90", "mirror", "negative"), training=by_epochs)
    with pytest.raises(ValueError, match="decay_matrices requires a weight decay"):
        train(tmp_path / "three", training=replace(SIX, decay_matrices=True))
    assert not list(tmp_path.iterdir())
