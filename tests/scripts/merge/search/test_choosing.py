"""A search: candidates written over each other in one buffer, every score computed once, and told what it cost."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import checkpoint, merge, random
from smat_fn.config import DIGITS, Dare, Della, TaskArithmetic, Ties, TsvMerge, WeightAverage
from smat_fn.evaluate import Scorer
from smat_fn.merge.parts import chunks
from smat_fn.scripts.merge.experts import suite as scoring
from smat_fn.scripts.merge.experts.inputs import Inputs, load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.search import candidates, choosing
from smat_fn.scripts.merge.search.candidates import Models
from smat_fn.scripts.merge.search.choosing import Tried, calibrate, merge_one, total
from smat_fn.scripts.run_folder import find_inputs

TIES = Ties(keep=0.5, aggregate="sum", scope="global")
TWO = ("stripes", "mirror")


@pytest.fixture
def inputs():
    base = {"w": torch.randn(30, 50, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(7).bfloat16()}
    experts = {task: {path: leaf + 0.1 * i for path, leaf in base.items()} for i, task in enumerate(TWO, 1)}
    return Inputs(base, experts, {})


@pytest.fixture
def counted(suite, monkeypatch):
    """The suite that merge_run loads counts what it scores, and stops where ``stop`` says."""
    state = SimpleNamespace(calls=[], stop=None)

    def score(params, task, split):
        if len(state.calls) == state.stop:
            raise KeyboardInterrupt
        state.calls.append((checkpoint.fingerprint(params), task, split))
        return suite.score(params, task, split)

    monkeypatch.setattr(scoring, "load_suite", lambda **recipe: suite.replace(score=score))
    return state


def search(runs, out, configs, name="ft", **options):
    base, _ = find_inputs(runs[name])
    experts = [runs[name] / task for task in options.pop("tasks", TWO)]
    given = {"search": True, "seed": 0, "overwrite": True, **options}
    return {
        folder.name: model for folder, model in merge_run(Request(configs, base, experts, out=out, **given)).items()
    }


def test_an_average_in_memory_has_the_counts_of_base_where_the_experts_differ(inputs):
    counts = {"base": 3, "one": 5, "two": 6}
    trees = [inputs.base, *inputs.experts.values()]
    for tree, count in zip(trees, counts.values(), strict=True):
        tree |= {"steps": torch.tensor(count), "same": torch.tensor(9)}
    merged = merge_one(WeightAverage(), inputs, seed=0).params
    assert (merged["steps"], merged["same"]) == (3, 9)
    assert candidates.with_buffers(inputs)[1].startswith("parameter 'steps', not floating-point, differs among the")
    inputs.experts["mirror"]["steps"] = torch.tensor(6.0)
    with pytest.raises(ValueError, match="parameter 'steps' is float32"):
        merge_one(WeightAverage(), inputs, seed=0)


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


def test_a_search_merges_on_the_gpu_that_scores_where_bits_are_the_same_and_memory_is_enough(inputs, monkeypatch):
    free = {"cuda": 0}
    monkeypatch.setattr(candidates, "_free", lambda device: free[device.type])
    on = {name: {"w": torch.empty(2, device=name)} for name in ("cpu", "meta")}
    on["cuda"] = {"w": torch.empty(2).as_subclass(OnCuda)}
    scorers = {name: SimpleNamespace(suite=SimpleNamespace(base=base)) for name, base in on.items()}
    scorers["both"] = SimpleNamespace(suite=SimpleNamespace(base={"a": on["cuda"]["w"], "b": on["cpu"]["w"]}))
    assert candidates.gpu_for(TIES, inputs, scorers["cuda"]) is None
    # base and two experts, two vectors in float32, two models, and as much again
    free["cuda"] = 2 * (3 * (1500 * 4 + 7 * 2) + 2 * 1507 * 4 + 2 * (1500 * 4 + 7 * 2)) + 1
    assert candidates.gpu_for(TIES, inputs, scorers["cuda"]) == torch.device("cuda", 0)
    assert candidates.gpu_for(TsvMerge(), inputs, scorers["cuda"]) is None
    others = scorers["cpu"], scorers["meta"], scorers["both"], None  # meta for all devices that are not CUDA's
    assert [candidates.gpu_for(TIES, inputs, one) for one in others] == [None] * 4
    inputs.experts["mirror"]["b"] = inputs.experts["mirror"]["b"].float()  # as those of adapters
    assert candidates.gpu_for(TIES, inputs, scorers["cuda"]) is None


def test_memory_that_torch_holds_without_use_is_free_and_none_where_cuda_does_not_say(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("freed"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: found.append(device.index) or (5, 9))
    assert candidates._free(torch.device("cuda", 1)) == 5
    assert found == ["freed", 1]

    def fails(device):
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert candidates._free(torch.device("cuda", 1)) == 0


@pytest.mark.parametrize("where", ["_moved", "vector_by", "apply_blocks", "scored"])
def test_a_search_without_enough_memory_on_the_gpu_goes_on_on_the_cpu(inputs, suite, monkeypatch, where):
    """The CPU stands in for the GPU."""
    failing, places, freed = {"on": False}, [], []

    def once_out_of_memory(module, name):
        function = getattr(module, name)

        def call(*args, **given):
            if failing.pop("on", False):
                raise torch.OutOfMemoryError("no more")
            return function(*args, **given)

        monkeypatch.setattr(module, name, call)

    def score(params, task, split):
        if where == "scored" and failing.pop("on", False):
            raise torch.OutOfMemoryError("no more")
        return 50 - abs(float((params["w"] - inputs.base["w"]).mean()) / 0.3 - 0.5)

    leave = Models._leave
    monkeypatch.setattr(Models, "_leave", lambda self: places.append(self._device) or leave(self))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    scorer = Scorer(suite.replace(score=score))
    plain = merge_one(TIES, inputs, seed=0, scorer=scorer, sweeps=1)
    assert (places, freed) == ([], [])
    monkeypatch.setattr(choosing, "gpu_for", lambda *_: torch.device("cpu"))
    merge_one(TIES, inputs, seed=0, scorer=Scorer(suite.replace(score=score)), sweeps=1)
    assert (len(places), len(freed)) == (1, 1)  # when the merged model has come home
    if where != "scored":
        once_out_of_memory(merge if where in ("vector_by", "apply_blocks") else candidates, where)
    failing["on"] = True
    found = merge_one(TIES, inputs, seed=0, scorer=Scorer(suite.replace(score=score)), sweeps=1)
    assert (failing, len(places)) == ({}, 2)
    assert (found.coef, found.dev, found.curve, found.layers) == (plain.coef, plain.dev, plain.curve, plain.layers)
    assert all(torch.equal(leaf, found.params[path]) for path, leaf in plain.params.items())


def test_the_seconds_of_merging_on_a_gpu_end_when_it_is_done(inputs, monkeypatch):
    waited = []
    monkeypatch.setattr(candidates, "_moved", lambda leaves, device: dict(leaves))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Models(inputs, 0, torch.device("cuda", 0))(TaskArithmetic(0.2))
    assert waited == [torch.device("cuda", 0)]


def test_memory_that_is_not_enough_on_the_cpu_is_an_error(inputs, suite):
    def score(params, task, split):
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        merge_one(TIES, inputs, seed=0, scorer=Scorer(suite.replace(score=score)))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
def test_a_merge_on_a_device_has_the_bits_of_one_on_the_cpu_and_comes_home(inputs, device):
    here, there = Models(inputs, 3), Models(inputs, 3, torch.device(device))
    for config in (WeightAverage(), TaskArithmetic(0.2), replace(TIES, coef=1.0), Dare(0.7, 0.5), Della(0.7, 0.5, 0.2)):
        found = there(config)
        assert {leaf.device.type for leaf in found.values()} == {device}
        assert list(found) == list(inputs.base)
        assert all(torch.equal(leaf.cpu(), here(config)[path]) for path, leaf in found.items())
    home = there.home(found)
    assert {leaf.device.type for leaf in home.values()} == {"cpu"}
    assert all(torch.equal(leaf, here(config)[path]) for path, leaf in home.items())


def test_every_candidate_stands_in_the_same_buffer_with_the_mergers_own_bits(inputs):
    models, key = Models(inputs, 3), random.fold_in(random.key(3), "merge")
    expected = {
        TaskArithmetic(0.2): lambda: merge.task_arithmetic(inputs.base, inputs.experts, coef=0.2),
        TaskArithmetic(0.7): lambda: merge.task_arithmetic(inputs.base, inputs.experts, coef=0.7),
        Dare(0.7, 0.5): lambda: merge.dare(key, inputs.base, inputs.experts, coef=0.7, drop_prob=0.5),
        replace(TIES, coef=1.0): lambda: merge.ties(inputs.base, inputs.experts, coef=1.0, keep=0.5),
    }
    places = []
    for config, made in expected.items():
        params = models(config)
        assert all(torch.equal(params[path], leaf) for path, leaf in made().items())
        places.append([leaf.data_ptr() for leaf in params.values()])
    assert all(place == places[0] for place in places)
    average = models(WeightAverage())
    assert all(torch.equal(average[p], leaf) for p, leaf in merge.weight_average(inputs.experts).items())


class Allocations(TorchDispatchMode):
    """The number of coordinates of every tensor that was made while it is on, and all the numbers computed."""

    def __init__(self, known):
        super().__init__()
        self.known, self.sizes, self.computed = {t.untyped_storage().data_ptr() for t in known}, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            if out.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(out.untyped_storage().nbytes() // out.element_size())
            if func._schema.name in ("aten::mul", "aten::add_", "aten::copy_"):
                self.computed += out.numel()
        return out


@pytest.mark.parametrize(("peak", "chosen", "more"), [(0.5, 0.5, 0), (1.34, 1.3, 4), (0.03, 0.025, 3), (9.0, 2.0, 10)])
def test_a_widened_search_goes_beyond_the_edge_and_scores_nothing_twice(inputs, suite, peak, chosen, more):
    calls = []

    def score(params, task, split):
        calls.append(task)
        shift = (params["w"] - inputs.base["w"]).mean().item() / 0.3
        return 50 - 5 * abs(shift - peak)

    scorer = Scorer(suite.replace(score=score))
    plain = merge_one(TaskArithmetic(), inputs, seed=0, scorer=scorer)
    assert plain.edge == {0.5: "", 0.03: "smallest"}.get(peak, "largest")
    calls.clear()
    found = merge_one(TaskArithmetic(), inputs, seed=0, scorer=Scorer(suite.replace(score=score)), widen=True)
    assert found.coef == pytest.approx(chosen, abs=1e-9)
    assert found.edge == ("largest" if peak == 9.0 else "")
    assert len(found.curve) == 10 + more == found.tried.candidates
    assert len(calls) == 2 * (10 + more) == found.tried.scores
    assert [coef for coef, _ in found.curve] == sorted(coef for coef, _ in found.curve)


def test_a_search_whose_scores_are_equal_is_not_widened(inputs, suite):
    scorer = Scorer(suite.replace(score=lambda params, task, split: 50.0))
    found = merge_one(TaskArithmetic(), inputs, seed=0, scorer=scorer, widen=True)
    assert (found.coef, found.edge, len(found.curve)) == (0.1, "smallest", 10)


def test_a_step_of_the_coefficient_is_one_pass_in_small_pieces(inputs, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 64)
    made = []
    vector = merge.vector_by
    monkeypatch.setattr(merge, "vector_by", lambda *args, **key: made.append(1) or vector(*args, **key))
    models = Models(inputs, 0)
    buffer = models(replace(TIES, coef=0.1))
    known = [*inputs.base.values(), *buffer.values(), *models._made[1].values()]
    with Allocations(known) as watched:
        again = models(replace(TIES, coef=0.2))
        models(replace(TIES, coef=0.2))
    assert made == [1]
    assert watched.sizes
    assert max(watched.sizes) <= 64
    # a product, a sum and a store for every coordinate, once
    assert watched.computed == 3 * (1500 + 7)
    assert again["w"].data_ptr() == buffer["w"].data_ptr()


def test_a_buffer_of_another_kind_is_refused(inputs):
    vector = merge.task_arithmetic_vector(inputs.base, inputs.experts)
    for out, message in (
        ({"w": inputs.base["w"]}, "out lacks parameter 'b' of base"),
        ({path: leaf.double() for path, leaf in inputs.base.items()}, "parameter 'w' of out is torch.float64, base's"),
    ):
        with pytest.raises(ValueError, match=message):
            merge.apply_vector(inputs.base, vector, coef=1.0, out=out)


@pytest.mark.slow
def test_a_second_search_scores_nothing_and_gives_the_same(runs, counted, tmp_path):
    configs = list(DIGITS.mergers.values())
    first = search(runs, tmp_path, configs)
    scored = len(counted.calls)
    assert scored == 2 + 4 * 10 * 2
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == scored
    second = search(runs, tmp_path, configs)
    assert len(counted.calls) == scored
    for name, model in first.items():
        again = second[name]
        assert (again.coef, again.dev, again.curve) == (model.coef, model.dev, model.curve)
        assert all(torch.equal(again.params[path], leaf) for path, leaf in model.params.items())
        assert (model.tried.kept, again.tried.kept) == (0, model.tried.scores)
        assert again.tried.seconds_scoring == 0
        assert again.tried.seconds_saved == pytest.approx(model.tried.seconds_scoring, abs=0.1)


@pytest.mark.parametrize(
    ("change", "new"),
    [
        pytest.param({"seed": 1}, 20, marks=pytest.mark.slow),
        pytest.param({"name": "smat"}, 20, marks=pytest.mark.slow),
        pytest.param({"tasks": TWO[::-1]}, 20, marks=pytest.mark.slow),
        pytest.param({"tasks": (*TWO, "rot90")}, 30, marks=pytest.mark.slow),
        ({"configs": [replace(TIES, keep=0.4)]}, 20),
        pytest.param({"configs": [replace(TIES, coef=0.4)]}, 0, marks=pytest.mark.slow),
        ({"configs": [TIES]}, 0),
    ],
)
def test_scores_of_other_inputs_or_options_are_not_taken(runs, counted, tmp_path, change, new):
    search(runs, tmp_path, [TIES])
    del counted.calls[:]
    search(runs, tmp_path, **{"configs": [TIES], **change})
    assert len(counted.calls) == new


def test_a_search_that_was_ended_goes_on(runs, counted, tmp_path):
    whole = search(runs, tmp_path / "whole", [TIES])["ties"]
    calls, counted.stop = counted.calls[:], 27
    with pytest.raises(KeyboardInterrupt):
        search(runs, tmp_path / "part", [TIES])
    assert not (tmp_path / "part" / "ties").exists()
    counted.stop = None
    model = search(runs, tmp_path / "part", [TIES])["ties"]
    assert counted.calls[20:] == calls
    assert (model.coef, model.dev, model.curve) == (whole.coef, whole.dev, whole.curve)
    assert model.tried.kept == 7


def test_calibration_and_search_share_scores_and_the_card_tells_both(runs, counted, tmp_path):
    model = search(runs, tmp_path, [TIES], calibration=merge.CALIBRATION_COEFS["vision"])["ties"]
    # four fractions and ten coefficients, of which 0.2 at the chosen fraction is known
    assert len(counted.calls) == (4 + 10 - 1) * 2
    assert model.tried[:3] == (10, 20, 2)
    assert model.calibration.tried[:3] == (4, 8, 0)
    manifest = checkpoint.load_manifest(tmp_path / "ties")
    found = manifest["calibration"]
    assert (found["field"], found["coef"]) == ("keep", 0.2)
    assert [value for value, _ in found["curve"]] == [0.5, 0.3, 0.2, 0.1]
    tried = manifest["tried"]
    assert [tried[name] for name in ("candidates", "scores", "kept")] == [14, 28, 2]
    assert tried["seconds_scoring"] > 0
    card = (tmp_path / "ties" / "README.md").read_text()
    assert "keep was chosen on dev at coefficient 0.2 (mean over tasks): 0.5: " in card
    assert "Tried on dev: 14 candidates, 28 scores of one task and decode (2 known from before, " in card
    (line, *_) = map(json.loads, (tmp_path / "scores.jsonl").read_text().splitlines())
    assert line["name"] == "ties, coef 0.2, keep 0.5, aggregate sum, scope global"
    assert (line["task"], line["split"], line["repeat"]) == ("stripes", "dev", 0)


def test_a_merge_without_a_search_keeps_no_scores_and_tells_no_cost(runs, counted, tmp_path):
    model = search(runs, tmp_path, [TaskArithmetic(0.3)], search=False)["ta"]
    assert model.tried is None
    assert "tried" not in checkpoint.load_manifest(tmp_path / "ta")
    assert "Tried" not in (tmp_path / "ta" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["ta"]


def test_costs_add_up():
    assert total(Tried(1, 2, 3, 0.5, 0.25, 4.0), Tried(10, 20, 30, 1.0, 1.0, 1.0)) == Tried(11, 22, 33, 1.5, 1.25, 5.0)


def test_a_candidate_with_a_score_that_is_no_number_is_named(suite, inputs):
    broken = suite.replace(score=lambda params, task, split: float("nan"))
    with pytest.raises(ValueError, match=r"score of ta, coef 0\.1 on stripes \(dev\) is nan"):
        merge_one(TaskArithmetic(), inputs, seed=0, scorer=Scorer(broken))
    with pytest.raises(ValueError, match=r"score of dare, coef 0\.2, drop_prob 0\.1 on stripes \(dev\) is nan"):
        calibrate(Dare(drop_prob=0.3), inputs, Scorer(broken), coef=0.2, seed=0)


def test_fingerprints_of_inputs_are_of_the_weights_and_in_order(runs):
    loaded = load_inputs(runs["ft"] / "base", [runs["ft"] / task for task in TWO])
    told = candidates.about(loaded)
    assert [name for name, _ in told["experts"]] == list(TWO)
    assert told["experts"][0][1] == loaded.manifests[TWO[0]]["fingerprint"]
    moved = loaded._replace(base={path: leaf + 1 for path, leaf in loaded.base.items()})
    assert candidates.about(moved)["base"] != told["base"]


def test_experts_of_a_search_are_hashed_once(tmp_path, monkeypatch):
    base, expert = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    for name, kind, params in (("base", "base", base), ("a", "expert", expert)):
        manifest = checkpoint.describe(params, kind=kind, task=name, base_fingerprint=checkpoint.fingerprint(base))
        checkpoint.save_expert(tmp_path / name, params, manifest)
    hashed, true = [], checkpoint.fingerprint
    monkeypatch.setattr(checkpoint, "fingerprint", lambda tree: hashed.append(tree) or true(tree))
    loaded = load_inputs(tmp_path / "base", [tmp_path / "a"])
    assert candidates.about(loaded)["experts"] == [["a", true(expert)]]
    assert sum(bool(tree["w"].any()) for tree in hashed) == 1


def test_a_search_hashes_base_experts_and_results_once(counted, runs, tmp_path, monkeypatch):
    """Experts of another tool too, which no manifest vouches for."""
    alone = tmp_path / "mirror"
    alone.mkdir()
    shutil.copy(runs["ft"] / "mirror" / checkpoint.WEIGHTS, alone)
    hashed, true = [], checkpoint.fingerprint
    monkeypatch.setattr(checkpoint, "fingerprint", lambda tree: hashed.append(true(tree)) or hashed[-1])
    experts = [runs["ft"] / "stripes", alone]
    (found,) = merge_run(
        Request([TaskArithmetic(0.3)], runs["ft"] / "base", experts, out=tmp_path / "out", search=True, seed=0)
    ).values()
    assert len(counted.calls) == 2
    made = checkpoint.load_manifest(tmp_path / "out" / "ta")
    inputs = [made["base_fingerprint"], *made["experts"].values()]
    assert sorted(hashed[:-1]) == sorted([*inputs, *[true(found.params)] * 2])  # `counted` hashes what it scores
    assert hashed[-1] == made["fingerprint"] == true(found.params)
