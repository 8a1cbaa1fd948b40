"""Statistics of trained experts: what they are computed from, and merges that take them, in memory and on disk."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint, random
from smat_fn.config import Fisher, RegMean
from smat_fn.data.batching import split_rows
from smat_fn.folders.writing import locked
from smat_fn.merge.statistics import diagonal_fisher, drawn_labels, input_grams
from smat_fn.scripts.merge import on_disk
from smat_fn.scripts.merge.experts.inputs import load_inputs, read_statistics
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.settings import Statistics
from smat_fn.scripts.merge.subcommands import statistics
from smat_fn.scripts.run_folder import find_inputs

DEFAULTS = {"kinds": ("fisher", "gram"), "rows": 20, "seed": 3}
MAKING = """
import sys
from pathlib import Path
from smat_fn import checkpoint
from smat_fn.scripts.merge.settings import Statistics
from smat_fn.scripts.merge.subcommands.statistics import make_statistics
save = checkpoint.save_shared
def slow(leaves, file, facts):
    print("writes", flush=True)
    sys.stdin.read(1)
    save(leaves, file, facts)
checkpoint.save_shared = slow
asked = Statistics((Path(sys.argv[1]),), ("gram",), rows=20, seed=int(sys.argv[2]), overwrite=True)
for line in make_statistics(asked):
    print(line, flush=True)
"""


def make(places, base=None, *, kinds=DEFAULTS["kinds"], **changes):
    return list(statistics.make_statistics(Statistics(places, base=base, **{**DEFAULTS, "kinds": kinds, **changes})))


@pytest.fixture(scope="module")
def known(runs, tmp_path_factory):
    """A run with statistics of two experts, to be read only."""
    run = tmp_path_factory.mktemp("known") / "ft"
    run.mkdir()
    for name in ("base", "rot90", "mirror"):
        shutil.copytree(runs["ft"] / name, run / name)
    make([run])
    return run


def test_statistics_are_those_of_the_tasks_training_rows(known, suite):
    folder, key = known / "rot90", random.fold_in(random.fold_in(random.key(3), "statistics"), "rot90")
    params, loss_fn = checkpoint.load_leaves(folder)[0], suite.loss_fn("rot90")
    batches = [suite.batch("rot90", key, step) for step in range(2)]  # of 16 rows each
    grams = input_grams(loss_fn, params, batches)
    drawn = [drawn_labels(loss_fn, params, b, random.fold_in(key, n)) for n, b in enumerate(batches)]
    fisher = diagonal_fisher(loss_fn, params, [row for batch in drawn for row in split_rows(batch, 16)])
    for kind, expected in (("gram", grams), ("fisher", fisher)):
        found = checkpoint.load_statistics(folder / f"{kind}.safetensors")
        assert set(found) == set(expected)
        assert all(torch.equal(found[path], leaf) for path, leaf in expected.items())
    assert set(fisher) == set(suite.base)
    assert len(grams) == 12  # six linear layers in each of two blocks
    facts = checkpoint.statistics_facts(folder / "fisher.safetensors")
    assert facts == {
        "kind": "fisher", "expert": checkpoint.load_manifest(folder)["fingerprint"], "task": "rot90", "split": "train",
        "rows": 32, "data": statistics.digest(batches), "seed": 3, "labels": "model", "suite": facts["suite"],
    }  # fmt: skip


def test_layers_without_a_gram_matrix_are_named(known, tmp_path, monkeypatch):
    expert = shutil.copytree(known / "rot90", tmp_path / "rot90", ignore=shutil.ignore_patterns("gram*"))
    shutil.copytree(known / "base", tmp_path / "base")

    def grams(*args):
        found = input_grams(*args)
        gone.append(found.popitem()[0])
        return found

    gone = []
    monkeypatch.setattr(statistics, "input_grams", grams)
    told = make([expert], kinds=("gram",))
    assert told[0].startswith(f"note: 1 linear layers are called as functions (first: {gone[0]}) and have no Gram")
    assert len(told) == 2


def test_no_row_comes_twice_and_none_from_test(suite):
    key = random.key(0)
    every = statistics.batches_of(suite, "rot90", "train", 10**6, key)
    assert sum(map(statistics.length, every)) == 120
    images = torch.cat([images for images, _ in every])
    assert len(images.flatten(1).unique(dim=0)) == len(suite._train["rot90"].images.flatten(1).unique(dim=0))
    dev = statistics.batches_of(suite, "rot90", "dev", 10**6, key)
    assert torch.equal(dev[0][0], suite.dev_batches("rot90")[0].batch[0])
    with pytest.raises(ValueError, match="split is 'test', must be 'train' or 'dev'"):
        statistics.batches_of(suite, "rot90", "test", 1, key)


def test_those_that_are_there_stay_and_others_are_not_replaced_unasked(known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    assert make([run]) == [f"kept: {run / task / kind}.safetensors, 32 rows"
                           for task in ("mirror", "rot90") for kind in ("fisher", "gram")]  # fmt: skip
    with pytest.raises(ValueError, match=r"gram\.safetensors is from other rows, weights or settings: remove it, or"):
        make([run / "mirror"], kinds=("gram",), split="dev")
    with pytest.raises(ValueError, match=r"gram\.safetensors is from other rows, weights or settings: remove it, or"):
        make([run / "mirror"], kinds=("gram",), suite_options={"linearised": True})
    (line,) = make([run / "mirror"], kinds=("gram",), split="dev", overwrite=True)
    assert line == f"gram: {run / 'mirror' / 'gram.safetensors'}, 64 rows"
    with pytest.raises(ValueError, match="rows is 0, must be at least 1; kinds is empty"):
        make([run], kinds=(), rows=0)
    with pytest.raises(ValueError, match="no experts: give at least one folder"):
        make([])
    with pytest.raises(ValueError, match="owner/name is not a folder, and statistics are stored beside the weights"):
        make([run / "mirror", Path("rot90=owner/name")])


@pytest.mark.parametrize(
    "config",
    [pytest.param(Fisher(coef=0.8), marks=pytest.mark.slow), RegMean(coef=0.8)],
    ids=["fisher", "reg_mean"],
)
def test_memory_and_disk_agree_and_memory_searches(config, known, suite, tmp_path):
    base, experts = find_inputs(known)
    options = {"seed": 0, "overwrite": False}
    (plain,) = merge_run(Request([config], base, experts, out=tmp_path / "memory", search=False, **options)).values()
    order = on_disk.order(base, experts, out=tmp_path / "disk", seed=0)
    list(on_disk.stream_run([config], order))
    stored = checkpoint.load_leaves(tmp_path / "disk" / config.name)[0]
    assert all(torch.equal(leaf, stored[path]) for path, leaf in plain.params.items())
    assert [report for _, report in on_disk.stream_run([config], order)] == [None]  # it is kept
    searched = type(config)()
    options |= {"search": True, "coefs": (0.4, 0.8), "out": tmp_path / "searched"}
    (best,) = merge_run(Request([searched], base, experts, **options)).values()
    assert best.coef in (0.4, 0.8)
    assert best.dev == {task: suite.score(best.params, task, "dev") for task in ("mirror", "rot90")}
    (again,) = merge_run(Request([searched], base, experts, **options)).values()
    assert again.kept


def test_other_statistics_are_another_merge(known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    base, experts = find_inputs(run)
    options = {"out": tmp_path / "out", "search": True, "seed": 0, "coefs": (0.5,)}
    merge_run(Request([Fisher()], base, experts, **options))
    make([run], kinds=("fisher",), labels="data", overwrite=True)
    with pytest.raises(ValueError, match=r"holds another merge: its asked.statistics.mirror is"):
        merge_run(Request([Fisher()], base, experts, **options))
    scores = (tmp_path / "out" / "scores.jsonl").read_text().count("\n")
    merge_run(Request([Fisher()], base, experts, **options, overwrite=True))
    assert (tmp_path / "out" / "scores.jsonl").read_text().count("\n") == 2 * scores


def test_a_search_over_the_kind_of_statistics_reads_both_and_depends_on_both(known, tmp_path):
    run, over = shutil.copytree(known, tmp_path / "run"), {"weights_from": ("adam", "fisher")}
    base, experts = find_inputs(run)
    options = {"out": tmp_path / "out", "search": True, "seed": 0, "coefs": (0.5,)}
    with pytest.raises(ValueError, match=r"adam\.safetensors"):
        merge_run(Request([Fisher()], base, experts, over=over, **options))
    for expert in experts:
        found = checkpoint.load_statistics(expert / "fisher.safetensors")
        facts = checkpoint.statistics_facts(expert / "fisher.safetensors")
        facts = {name: facts[name] for name in facts if name not in ("kind", "labels")}
        checkpoint.save_statistics(expert, "adam", {path: leaf.flip(0) for path, leaf in found.items()}, facts)
    (made,) = merge_run(Request([Fisher()], base, experts, over=over, **options)).values()
    alone = {}
    for own in made.tuned:
        kind = own.options["weights_from"]
        (alone[kind],) = merge_run(
            Request([Fisher(weights_from=kind)], base, experts, **options | {"out": tmp_path / kind})
        ).values()
        assert (own.coef, own.curve) == (alone[kind].coef, alone[kind].curve)
    assert [*alone] == ["adam", "fisher"]
    assert not checkpoint.same(alone["adam"].params, alone["fisher"].params)
    assert checkpoint.same(made.params, alone[made.options["weights_from"]].params)
    manifest = checkpoint.load_manifest(tmp_path / "out" / "fisher")
    prints = manifest["asked"]["statistics"]
    assert [(kind, [*prints[kind]]) for kind in sorted(prints)] == [
        (kind, ["mirror", "rot90"]) for kind in ("adam", "fisher")
    ]


@pytest.mark.parametrize("config", [Fisher(coef=0.8), RegMean(coef=0.8)], ids=["fisher", "reg_mean"])
def test_statistics_that_are_not_finite_are_refused_in_memory_and_on_disk(config, known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    kind, file = config.statistics(), run / "rot90" / f"{config.statistics()}.safetensors"
    facts, found = checkpoint.statistics_facts(file), checkpoint.load_statistics(file)
    next(iter(found.values()))[0] = float("nan")
    checkpoint.save_statistics(run / "rot90", kind, found, {name: own for name, own in facts.items() if name != "kind"})
    base, experts = find_inputs(run)
    with pytest.raises(ValueError, match=rf"{kind}\.safetensors holds \d+ values that are NaN or infinite"):
        merge_run(Request([config], base, experts, out=tmp_path / "memory", search=False, seed=0))
    with pytest.raises(ValueError, match=rf"{kind}\.safetensors holds values that are NaN or infinite: compute it"):
        list(on_disk.stream_run([config], on_disk.order(base, experts, out=tmp_path / "disk", seed=0)))
    assert not (tmp_path / "memory").exists()
    assert not (tmp_path / "disk" / config.name).exists()


def test_fishers_of_different_labels_are_refused_in_memory_and_on_disk(known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    facts = checkpoint.statistics_facts(file := run / "rot90" / "fisher.safetensors") | {"labels": "data"}
    checkpoint.save_statistics(run / "rot90", facts.pop("kind"), checkpoint.load_statistics(file), facts)
    base, experts = find_inputs(run)
    told = r"computed with different labels \(mirror: model, rot90: data\): compute all with the same ones"
    with pytest.raises(ValueError, match=told):
        merge_run(Request([Fisher(coef=0.8)], base, experts, out=tmp_path / "memory", search=False, seed=0))
    with pytest.raises(ValueError, match=told):
        list(on_disk.stream_run([Fisher(coef=0.8)], on_disk.order(base, experts, out=tmp_path / "disk", seed=0)))


def test_experts_run_in_the_dtypes_of_base(known, suite, tmp_path):
    params = checkpoint.load_leaves(known / "rot90")[0]
    params = {path: leaf.double() if leaf.ndim == 2 else leaf for path, leaf in params.items()}
    asked = Statistics((), rows=1, labels="data")  # as of an adapter on a base in bfloat16, whose weights are float32
    (line,) = statistics.write_statistics(suite, tmp_path, "rot90", params, asked)
    assert line == f"fisher: {tmp_path / 'fisher.safetensors'}, 16 rows"


def test_weights_whose_hash_is_known_are_not_hashed_again(known, tmp_path, monkeypatch):
    run = shutil.copytree(known, tmp_path / "run")
    base, experts = find_inputs(run)
    for expert in experts:  # as written by another tool
        (expert / checkpoint.MANIFEST).unlink()
    inputs = load_inputs(base, experts)
    monkeypatch.setattr(checkpoint, "fingerprint", lambda params: pytest.fail("hashed again"))
    assert read_statistics(Fisher(coef=0.8), inputs).keys() == {"rot90", "mirror"}


def test_missing_statistics_are_said_before_any_merging(runs, tmp_path):
    base, experts = find_inputs(runs["smat"])
    with pytest.raises(ValueError, match=r"no gram\.safetensors in .*: make them by `python merge\.py statistics"):
        merge_run(Request([RegMean(coef=1.0)], base, experts, out=tmp_path / "out", search=True, seed=0))
    assert not (tmp_path / "out").exists()


def test_experts_of_another_program_need_a_base_and_a_suite(runs, tmp_path):
    base, experts = find_inputs(runs["smat"])
    own = shutil.copytree(experts[0], tmp_path / "own")
    (own / checkpoint.MANIFEST).unlink()
    way = r"--suite-options name NAME model BASE data DATA, NAME trace \(texts\), short_text or clip8"
    with pytest.raises(ValueError, match=rf"{own} is not an expert of train.py, .* pass --base BASE, {way}"):
        list(statistics.make_statistics(Statistics((own,))))
    with pytest.raises(ValueError, match=f"no expert names a suite: pass {way}"):
        list(statistics.make_statistics(Statistics((own,), base=base)))


def test_a_run_makes_them_for_its_experts(known, suite, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    before = (run / "rot90" / "gram.safetensors").read_bytes()
    lines = list(statistics.statistics_of_run(suite, [run / "rot90"], kinds=("gram",), seed=21))
    assert lines == [f"gram: {run / 'rot90' / 'gram.safetensors'}, 120 rows"]
    assert (run / "rot90" / "gram.safetensors").read_bytes() != before


def test_what_killed_processes_left_goes_once_no_other_process_makes_the_file(known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    left, file = run / "rot90" / ".gram.safetensors.new-1", run / "rot90" / "gram.safetensors"
    left.mkdir()
    with ThreadPoolExecutor(1) as pool, ExitStack() as held:
        held.enter_context(locked(run / ".rot90.gram.safetensors.lock", ""))
        found = statistics.make_statistics(Statistics((run / "rot90",), base=None, **DEFAULTS))
        lines = [pool.submit(next, found).result() for _ in range(2)]
        assert lines[0].startswith("kept")
        assert lines[1] == f"waiting: another process makes {file}"
        rest = pool.submit(list, found)
        assert left.is_dir()
        held.close()
        assert rest.result() == [f"kept: {file}, 32 rows"]
    assert not [*run.glob(".*"), *(run / "rot90").glob(".*")]


@pytest.mark.slow
def test_two_processes_make_statistics_of_one_expert(known, tmp_path):
    run = shutil.copytree(known, tmp_path / "run")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", MAKING, run / "rot90"]
    file = run / "rot90" / "gram.safetensors"
    with subprocess.Popen([*command, "1"], **pipes) as first:
        assert first.stdout.readline() == "writes\n"
        with subprocess.Popen([*command, "2"], **pipes) as second:
            started = second.stdout.readline()
            for process in (first, second):
                assert process.communicate("x")[1] == ""
                assert process.returncode == 0
    assert started == f"waiting: another process makes {file}\n"
    assert checkpoint.statistics_facts(file)["seed"] == 2
    assert not [*run.glob(".*"), *(run / "rot90").glob(".*")]
