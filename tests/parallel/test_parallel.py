"""Two processes against one: drawn states bit for bit, training within rounding."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from smat_fn import draw, lora, merge, optim, parallel, random, reweight, simulate, value_and_grad, where
from smat_fn.checkpoint import fingerprint, same
from smat_fn.data.batching import split_rows
from smat_fn.grad import ModuleLoss, with_master_weights
from smat_fn.lora.per_module import shard_problems
from smat_fn.mat import asam, finetune, orthoreg, smat
from smat_fn.mat import step as steps
from smat_fn.mat import weights as of_weights
from smat_fn.mat.weights import SimulatedWeights
from smat_fn.parallel import ALONE, replicas, world
from smat_fn.types import Micro

from ..processes import found_by
from . import worker
from .worker import KEY, STEPS, STRENGTHS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("tests.parallel.worker", tmp_path_factory.mktemp("group"))


@pytest.mark.parametrize("name", worker.TRAINED)
def test_two_replicas_train_as_one_process(name, found):
    params, losses = worker.trained(name)
    for own, seen in (one[name] for one in found):
        torch.testing.assert_close(seen, losses, rtol=1e-12, atol=0)
        for path, leaf in params.items():
            torch.testing.assert_close(own[path], leaf, rtol=1e-11, atol=1e-13)
    assert all(torch.equal(found[0][name][0][path], found[1][name][0][path]) for path in params)


@pytest.mark.parametrize("kind", worker.KINDS)
def test_mean_gradients_are_those_of_whole_leaves_whatever_a_process_touches(kind, found):
    for one in found:
        means, wanted, _, left, clean = one["means"][kind]
        assert means.keys() == wanted.keys()
        for path, leaf in wanted.items():
            assert means[path].dtype == leaf.dtype
            assert torch.equal(means[path], leaf)
        assert left == 0
        assert clean
    reduced = [[event for event in one["means"][kind][2] if event != "first layer"] for one in found]
    assert reduced[0] == reduced[1]  # in one order
    assert {dtype for _, dtype in reduced[0]} == {torch.float32}


@pytest.mark.skipif(not replicas.OVERLAPS, reason="torch before 2.13")
def test_gradients_are_reduced_before_the_first_layers_backward_pass_begins(found):
    for one in found:
        events = one["means"]["whole"][2]
        sizes = [event if event == "first layer" else event[0] for event in events]
        # a bucket, in the order of the model, is full at 8 numbers; the last one goes first
        assert sizes == [3 + 3 + 1, "first layer", 7 + 21, 35]


def test_replicas_meet_the_state_of_one_process_bit_for_bit(found):
    (wanted,) = worker.drawn()
    for one in found:
        (seen,) = one["drawn"]
        assert all(torch.equal(seen[path], leaf) for path, leaf in wanted.items())


def test_torchs_own_data_parallel_around_ones_own_loop(found):
    states, weights = worker.wrapped()
    first, second = (one["wrapped"] for one in found)
    assert all(torch.equal(first[0][0][path], leaf) for path, leaf in states[0].items())
    for one, other, wanted in zip((*first[0], first[1]), (*second[0], second[1]), (*states, weights), strict=True):
        assert all(torch.equal(one[path], leaf) for path, leaf in other.items())
        for path, leaf in wanted.items():
            torch.testing.assert_close(one[path], leaf, rtol=1e-4, atol=1e-6)


def test_a_signal_to_one_process_ends_all_at_one_step_after_the_state_is_written(found):
    first, second = (one["interrupted"] for one in found)
    assert first == second
    text, status, step = first["ended"]
    assert text.startswith("stopped by signal 15 after 4 steps of task; the last good state, after 4 steps, is ")
    assert (status, step) == (143, 4)
    assert first["resumed"] == first["whole"]


def test_processes_that_would_resume_from_other_states_or_train_other_experts_refuse(found):
    first, second = (one["apart"] for one in found)
    # only the first one has opened what it alone writes and removes
    assert first[1] > second[1] == 0
    for rank, told in enumerate((first, second)):
        stopped, _, missing, again, stale, settings = told
        assert stopped.startswith("stopped by signal 15 after 2 steps")
        assert missing.startswith("process 1: ")
        assert "disk1/task.resume.safetensors cannot be read" in missing
        assert "process 0" not in missing
        assert again.startswith("stopped by signal 15 after 4 steps")
        assert stale.startswith("process 1 finds the state after 2 steps of run ")
        assert f"disk{rank}/task.resume.safetensors, the first one the state after 4 steps of run " in stale
        assert "--out must lie on a disk that they share" in missing
        assert settings == (
            "process 1 would train another expert than the first one: task.training.lr was 0.01, is 0.02"
        )


@pytest.mark.parametrize("switch", [True, False], ids=["switched", "written in place"])
@pytest.mark.parametrize("inside", [True, False], ids=["while simulating", "in the block"])
def test_weights_of_others_are_theirs_again_after_running_out_of_memory(switch, inside, monkeypatch):
    module = worker.model(torch.float32)
    weights = {path: p.detach().clone() for path, p in module.named_parameters()}
    base = {path: leaf + 0.5 for path, leaf in weights.items()}
    places = {path: p.data_ptr() for path, p in module.named_parameters()}
    drawn, into = draw(KEY, **STRENGTHS), of_weights.simulate

    def half(params, *args, out, **options):
        into(params, *args, out=out, **options)  # all is written, as far as the weights go
        raise torch.OutOfMemoryError("no more")

    own = SimulatedWeights(dict(module.named_parameters()), base, switch=switch)
    at = own.at if switch else lambda drawn: parallel.simulated_shards(module, base, drawn)
    with monkeypatch.context() as patch:
        if inside:
            patch.setattr(of_weights, "simulate", half)
        with pytest.raises(torch.OutOfMemoryError), at(drawn):
            pytest.fail("the block was entered") if inside else half({}, {}, drawn, out={})
    for path, p in module.named_parameters():
        assert torch.equal(p, weights[path])
        assert p.data_ptr() == places[path]
    # and the next try meets the state, not what the first one has left of it
    wanted = simulate(weights, base, drawn)
    with at(drawn):
        assert all(torch.equal(p, wanted[path]) for path, p in module.named_parameters())


def setting():
    module = worker.model()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    return ModuleLoss(module, worker.squares), base, {path: leaf + 0.1 for path, leaf in base.items()}


def gradient_of(loss_fn, base, start, drawn):
    (_, _), grads = value_and_grad(loss_fn, engine="autograd")(simulate(start, base, drawn), worker.batch(0))
    return reweight(grads, drawn)


def test_independent_draws_give_the_mean_of_the_processes_own_gradients(found):
    loss_fn, base, start = setting()
    own = [
        gradient_of(loss_fn, base, start, draw(random.fold_in(random.fold_in(KEY, 0), rank), **STRENGTHS))
        for rank in range(2)
    ]
    for path in base:
        wanted = (own[0][path] + own[1][path]) / 2
        for one in found:
            torch.testing.assert_close(one["independent"][path], wanted, rtol=1e-9, atol=1e-12)


def test_independent_draws_halve_the_variance_and_keep_the_mean():
    loss_fn, base, start = setting()
    drawn = [draw(key, **STRENGTHS) for key in random.split(KEY, 200)]
    grads = torch.stack([gradient_of(loss_fn, base, start, one)["0.weight"].sum() for one in drawn])
    pairs = (grads[:100] + grads[100:]) / 2
    assert abs(grads.mean() - pairs.mean()) < 1e-12
    # the ratio of two sample variances has a relative standard error of about sqrt(2 / 100 + 2 / 200)
    assert pairs.var() / grads.var() == pytest.approx(0.5, rel=4 * (2 / 100 + 2 / 200) ** 0.5)


def test_shards_simulate_what_one_process_does_bit_for_bit(found):
    module = worker.model(torch.float32)
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    first = draw(random.fold_in(KEY, 0), **STRENGTHS)
    wanted = simulate(base, base, first, where=worker.masked)
    for one in found:
        states = one["sharded"]["states"]
        assert all(torch.equal(states[0][path], leaf) for path, leaf in wanted.items())
    # the rest of the loop in one process
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for step in range(STEPS):
        drawn = draw(random.fold_in(KEY, step), **STRENGTHS)
        params = {path: p.detach() for path, p in module.named_parameters()}
        batch = tuple(part.float() for part in worker.batch(step))
        state = simulate(params, base, drawn, where=worker.masked)
        _, grads = value_and_grad(ModuleLoss(module, worker.squares), engine="autograd")(state, batch)
        grads = reweight(grads, drawn, where=worker.masked)
        for path, p in module.named_parameters():
            p.grad = grads[path]
        optimizer.step()
        for one in found:
            for path, leaf in state.items():
                torch.testing.assert_close(one["sharded"]["states"][step][path], leaf, rtol=0, atol=2e-6)
    for path, p in module.named_parameters():
        torch.testing.assert_close(found[0]["sharded"]["params"][path], p.detach(), rtol=0, atol=2e-6)


def test_shards_take_the_papers_literal_steps_bit_for_bit(found):
    wanted = worker.literally()
    for one in found:
        assert all(torch.equal(one["literally"][path], leaf) for path, leaf in wanted.items())


def test_forward_passes_alone_meet_the_shards(found):
    module = worker.model(torch.float32)
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    expert = {path: leaf + 0.5 for path, leaf in base.items()}
    merged = simulate(expert, base, draw(KEY, **STRENGTHS), where=worker.masked)
    x = worker.batch(0)[0].float()
    wanted = [torch.func.functional_call(module, params, (x,)) for params in (expert, merged, expert)]
    for one in found:
        outputs, shapes = one["evaluated"]
        for got, want in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
        assert all(now == before for now, before in shapes.values())


def test_sharded_runs_of_train_py_are_those_of_one_process(found, tmp_path):
    first, second = (one["train.py"] for one in found)
    for name in ("ft", "smat", "auto"):
        wanted = worker.of_train_py(tmp_path / name, name, worker.SHARDED, world=ALONE)
        for path, leaf in wanted.items():
            assert first[name][path].shape == leaf.shape
            torch.testing.assert_close(first[name][path], leaf, rtol=1e-4, atol=1e-5)
    for name in ("ft", "auto"):
        assert not torch.equal(first[name]["last.weight"], first["smat"]["last.weight"])
    assert all(torch.equal(first["off"][path], leaf) for path, leaf in first["ft"].items())
    assert "stopped by signal 15 after 4 steps" in first["ended"]
    for again in ("resumed", "saved"):
        assert all(torch.equal(first[again][path], leaf) for path, leaf in first["smat"].items())
    for own, moments, whole in (first["sizes"], second["sizes"]):
        assert own == moments
        assert own < 0.7 * whole
    assert first["sizes"][0] + second["sizes"][0] == whole
    assert first["by task"] == second["by task"] == {"task": 3, "other": 3}


def test_a_module_is_sharded_block_by_block_from_its_own_memory(found):
    base = worker.blocks(dtype=torch.bfloat16).base
    for one in found:
        whole, _, moved_alone = one["train.py"]["block by block"]
        assert whole == [5 * 7 + 7, 7 * 3 + 3, 3 + 1]
        assert moved_alone  # the module that was given stays
    for path, leaf in found[0]["train.py"]["block by block"][1].items():
        assert torch.equal(leaf, base[path].float())
        assert leaf.dtype == torch.float32


def test_numbers_of_the_module_and_of_base_stay_and_frozen_layers_keep_their_dtype(found):
    for one in found:
        numbers, dtypes, (trained, frozen) = one["train.py"]["numbers stay"]
        assert numbers == (2.0, 2.0)
        assert dtypes == (torch.float64, torch.bfloat16, torch.float64)
        assert trained == pytest.approx(frozen, rel=1e-6)  # of inference tensors


def test_an_averaged_climb_on_shards_is_that_of_one_process_and_resumes_bit_for_bit(found, tmp_path):
    first = found[0]["train.py"]
    training = replace(worker.SHARDED, average="ema:0.7")
    for path, leaf in worker.of_train_py(tmp_path / "msam", "msam", training, world=ALONE).items():
        torch.testing.assert_close(first["msam"][path], leaf, rtol=1e-4, atol=1e-5)
        assert torch.equal(first["msam resumed"][path], first["msam"][path])


def test_sharded_runs_are_scored_at_their_whole_weights_by_the_first_process(found, tmp_path):
    first, second = (one["beside"] for one in found)
    expert, seen, manifest = first["evaluated"]
    assert same(expert, seen[1])
    assert same(seen[3], found[0]["train.py"]["smat"])  # scores change no step
    _, wanted, alone = worker.evaluated_by(tmp_path, worker.VALUES, worker.EVALUATED, world=ALONE)
    assert manifest["evaluations"] == alone["evaluations"]
    for own, other in zip(seen, wanted, strict=True):
        for path, leaf in other.items():
            torch.testing.assert_close(own[path], leaf, rtol=1e-4, atol=1e-5)
    again, rest, resumed = first["resumed"]
    assert same(again, expert)
    assert all(map(same, rest, seen[2:]))
    assert resumed["evaluations"] == manifest["evaluations"]
    assert same(first["patient"][0], seen[0])
    assert first["patient"][2]["evaluations"]["curve"] == [[2, 2.0], [4, 1.0]]
    assert same(first["replicas"][0], first["replicas"][1][1])
    assert not any(second[name][1] for name in ("evaluated", "patient", "resumed", "replicas"))


def test_where_the_first_process_fails_beside_training_no_other_waits_for_it(found):
    first, second = (one["beside"] for one in found)
    assert first["nan"].startswith("the dev score is nan after 4 steps: check the weights")
    assert second["nan"] in first["nan"]
    assert (first["failed"], second["failed"]) == ("no more", "the first process has failed: no more")
    assert first["unwritten"] == "[Errno 28] the disk is full"
    assert second["unwritten"] == "the first process has failed: [Errno 28] the disk is full"


def test_sharded_runs_keep_the_snapshots_and_moments_of_whole_weights(found, tmp_path):
    expert, snapshots, moments = found[0]["beside"]["kept"]
    assert same(expert, found[0]["train.py"]["smat"])
    assert all(map(same, snapshots, found[0]["beside"]["evaluated"][1][:2]))
    _, _, wanted = worker.kept_by(tmp_path, worker.SHARDED, world=ALONE)
    assert moments.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert moments[path].shape == leaf.shape
        # stored in bfloat16
        torch.testing.assert_close(moments[path], leaf, rtol=2**-7, atol=1e-4 * float(leaf.max()))


@pytest.mark.parametrize("name", worker.ON_FROZEN)
def test_adapters_of_a_base_on_shards_are_those_of_whole_weights(found, name, tmp_path):
    first, second = (one["frozen"] for one in found)
    if ("replicas", name) in first:  # layers of a narrow dtype add their updates there too
        assert same(first[name], first["replicas", name])
    else:
        wanted = worker.adapted(tmp_path, name, world=ALONE, shard=False)
        assert first[name].keys() == wanted.keys()
        for path, leaf in wanted.items():
            torch.testing.assert_close(first[name][path], leaf, rtol=0, atol=1e-6)
    assert same(first["resumed"], first["smat"])
    assert same(*first["again"])
    assert first["again"][0]["layers.0.up.lora_B.weight"].all()
    (adapters, gathered), (wanted, _) = first["between"]
    assert gathered == []
    for path, leaf in wanted.items():
        torch.testing.assert_close(adapters[path], leaf, rtol=0, atol=1e-12)
    assert not same(first["factors"], first["smat"])
    (one, whole), (other, _) = first["sizes"], second["sizes"]
    assert one + other == whole
    assert one < 0.7 * whole


def test_adapters_on_shards_are_scored_and_kept_with_the_base_whose_memory_is_back_meanwhile(found):
    first, second = (one["frozen"]["beside"] for one in found)
    adapters, seen, manifest = first["evaluated"]
    assert manifest["evaluations"]["curve"] == [[2, 1.0], [4, 3.0], [6, 2.0], [7, 0.0]]
    assert same(first["kept"][0], adapters)  # after 4 steps both
    assert first["kept"][1] == fingerprint(seen[1])
    for own, other in zip(seen, first["replicas"][1], strict=True):
        assert own.keys() == other.keys()
        for path, leaf in other.items():
            torch.testing.assert_close(own[path], leaf, rtol=0, atol=1e-6)
    again, rest, resumed = first["resumed"]
    assert same(again, adapters)
    assert all(map(same, rest, seen[2:]))
    assert resumed["evaluations"] == manifest["evaluations"]
    assert not second["evaluated"][1]
    assert first["restored"]
    assert second["restored"]


def test_adapters_that_shards_would_leave_out_are_refused(found):
    assert shard_problems(lora.Lora(("attention.in_proj_weight",))) == [
        "'attention.in_proj_weight' is of an nn.MultiheadAttention, which reads it whole: name other targets"
    ]
    for one in (own["frozen"] for own in found):
        for read in ("in its block", "later"):
            assert "leaf 'layers.1.up.weight' was read by aten.sum.default outside the forward pass of" in one[read]
        assert one["whole"].startswith("first.bias, first.weight, last.bias")
        assert "would replace shards, which are frozen" in one["whole"]
        assert one["otherwise"].startswith("frozen_shards: shards run the module itself, not as a _AveragedModule does")
        assert one["saved"].startswith(
            "adapters on shards: 'last.weight' is to be trained whole, and shards are frozen"
        )


@pytest.mark.parametrize("name", worker.ON_SHARDS)
def test_methods_take_the_same_steps_on_shards(found, name):
    wanted, squares, norms = worker.stepped(name, lambda build, *given, **options: build(*given, **options))
    weights, moments, own = found[0]["on shards"][name]
    assert own == found[1]["on shards"][name][2]
    torch.testing.assert_close(own, norms, rtol=1e-6, atol=0)
    # elsewhere weights depend on a norm, whose float32 sums end where a shard ends
    exact = "ft", "mergopt", "l2sp", "mixout", "smat", "by depth", "mixed", "rounded", "rounded, frozen", "muon"
    for path, leaf in wanted.items():
        torch.testing.assert_close(weights[path], leaf, rtol=0, atol=0 if name in exact else 1e-6)
    assert moments.keys() == squares.keys()
    for path, leaf in squares.items():
        torch.testing.assert_close(moments[path], leaf, rtol=0 if name in exact else 1e-4, atol=0)
    if name != "ft":
        assert not torch.equal(weights["last.weight"], found[0]["on shards"]["ft"][0]["last.weight"])


def test_odd_modules_take_the_same_steps_on_shards_after_one_that_ran_out_of_memory(found):
    wanted = worker.odd(lambda build, *given, **options: build(*given, **options), worker.odd_batches)
    assert found[0]["odd"].keys() == wanted.keys()
    for path, leaf in wanted.items():
        torch.testing.assert_close(found[0]["odd"][path], leaf, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("weights", "size"), [((3, 3, 2, 2), 2), ((5, 1, 1), 2), ((4,), 3)])
def test_shares_add_up_to_the_weighted_mean(weights, size):
    parts = [Micro(float(i + 1), weight) for i, weight in enumerate(weights)]
    shares = [parallel.share(parts, rank=rank, size=size) for rank in range(size)]
    assert len({len(own) for own in shares}) == 1
    means = [sum(one.batch.factor * one.batch.batch for one in own) / len(own) for own in shares]
    wanted = sum(part.weight * part.batch for part in parts) / sum(weights)
    assert sum(means) / size == pytest.approx(wanted, rel=1e-14)


def test_shards_of_wrapped_blocks_have_the_names_and_draws_of_the_module_itself():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    drawn, found = draw(KEY, **STRENGTHS), []
    for wrap in (lambda layer: layer, checkpoint_wrapper, lambda layer: torch.compile(layer, backend="eager")):
        module = worker.model(torch.float32)
        module[0], module[2] = wrap(module[0]), wrap(module[2])
        base, names = parallel.base_shards(module), [name for name, _ in module.named_parameters()]
        assert list(base) == [name for name, _ in worker.model().named_parameters()]
        chosen = {name for name in names if name.endswith("weight")}  # as read in this module
        for theta_0 in (base, dict(zip(names, base.values(), strict=True))):
            module.zero_grad()
            with parallel.simulated_shards(module, theta_0, drawn, where=lambda path, _: path in chosen):  # noqa: B023
                states = [p.detach().clone() for p in module.parameters()]
                sum(p.sum() for p in module.parameters()).backward()
            parallel.reweight_grads(module, drawn, where=lambda path, _: path in chosen)  # noqa: B023
            found.append([*states, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))
    assert not found[0][6].all()  # the first weight's gradient, where Mask is


def test_whole_parameters_start_at_zero():
    module = torch.nn.Linear(3, 2)
    assert parallel.starts_of(module) == {"weight": 0, "bias": 0}


def test_processes_of_a_machine_with_gpus_may_train_on_its_cpu_and_no_more_join_than_it_has(monkeypatch):
    groups, places = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", places.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: groups.append(backend) or 1 / 0)
    for rank in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("LOCAL_RANK", rank)
        wanted = pytest.raises(ZeroDivisionError) if rank == "1" else pytest.raises(ValueError, match=r"shows 2 GPUs")
        with wanted, parallel.joined():
            pass
    assert (groups, places) == (["cpu:gloo,cuda:nccl"], [1])


def test_what_is_no_share_is_named():
    parts = split_rows(worker.batch(0), 2)
    with pytest.raises(ValueError, match=r"share: rank is 2, must be in \[0, 2\)"):
        parallel.share(parts, rank=2, size=2)
    for wrong in ([], [worker.batch(0)], [parts[0]._replace(weight=0)]):
        with pytest.raises(ValueError, match=r"share: parts must be a list of Micro\(batch, weight\) of positive"):
            parallel.share(wrong, rank=0, size=2)
    module = worker.model()
    base = {path: p.detach() for path, p in module.named_parameters()}
    for loss_fn in (one := ModuleLoss(module, worker.squares), lambda params, batch: one(params, batch)):
        own = finetune.build(parallel.replicated(loss_fn), optim.adam(1e-2), base)
        with pytest.raises(ValueError, match=r"the batch is not that of parallel\.share"):
            own.update(KEY, own.init(base), worker.batch(0))


@pytest.mark.parametrize("kind", ["module", "function"])
def test_the_key_of_a_loss_is_another_one_in_each_process(kind, monkeypatch):
    module, seen = worker.model(), []

    def loss(module, batch, *, key):
        seen.append(key.tolist())
        return worker.squares(module, batch)

    loss_fn = ModuleLoss(module, loss)
    inner = loss_fn if kind == "module" else lambda params, batch, *, key: loss_fn(params, batch, key=key)
    params = {path: p.detach() for path, p in module.named_parameters()}
    monkeypatch.setattr(replicas.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda *args, **options: None)
    for rank in (0, 1, 0):
        monkeypatch.setattr(replicas.dist, "get_rank", lambda rank=rank: rank)
        parallel.replicated(inner)(params, parallel.Share(worker.batch(0), 1.0), key=KEY)
    assert seen[0] == seen[2] != seen[1]
    assert KEY.tolist() not in seen


def test_what_the_first_process_prepares_may_take_hours(monkeypatch):
    asked, dist = [], world.dist
    for name in ("init_process_group", "destroy_process_group", "barrier"):
        monkeypatch.setattr(dist, name, lambda *args: None)
    monkeypatch.setattr(dist, "new_group", lambda **options: asked.append(options) or "hosts")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with parallel.joined() as found:
        assert found == (1, 2, "hosts")
    assert asked == [{"backend": "gloo", "timeout": timedelta(days=1)}]


def test_parameters_of_which_a_process_holds_a_part_are_no_parameters_of_a_method():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        spread = {"w": distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)))}
        with pytest.raises(ValueError, match=r"parameters are DTensors \(w\): use smat_fn.parallel.simulated_shards"):
            SimulatedWeights(spread, {"w": torch.ones(2, 2)})
        own = finetune.build(lambda params, batch: ((params["w"] ** 2).sum(), None), optim.adam(1e-2), spread)
        with pytest.raises(ValueError, match=r"'w' is a DTensor, of which a process holds a part: give parallel.Shard"):
            own.init(spread)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*FSDP")
@pytest.mark.parametrize("original", [True, False])
def test_parameters_of_fsdp1_are_refused(original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = FullyShardedDataParallel(worker.model(), use_orig_params=original, device_id=torch.device("cpu"))
        params = dict(module.named_parameters())
        base = {path: p.detach().clone() for path, p in params.items()}
        for use in (lambda: SimulatedWeights(params, base), lambda: parallel.base_shards(module)):
            with pytest.raises(ValueError, match=r"FSDP1 owns the storage of .*: shard by FSDP2"):
                use()
    finally:
        torch.distributed.destroy_process_group()


def test_shards_without_gradients_are_told():
    module = worker.model()
    drawn = draw(KEY, **STRENGTHS)
    with pytest.raises(ValueError, match="no parameter of the module has a gradient: reweight after backward"):
        parallel.reweight_grads(module, drawn)


def merged_outputs(module, batch):
    out = module(batch[0])
    return merge.task_arithmetic({"w": torch.zeros_like(out)}, [{"w": out}], coef=1.0)["w"].sum(), None


def test_a_loss_on_shards_has_a_key_of_its_process():
    module, seen = worker.model(torch.float32), []

    def loss(module, batch, *, key):
        seen.append(key)
        return worker.squares(module, batch)

    base = {path: p.detach() for path, p in module.named_parameters()}
    batch = tuple(part.float() for part in worker.batch(0))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shards = parallel.Sharded(ModuleLoss(module, loss), optim.adam(1e-2), asam.build)
        shards.update(KEY, shards.init(base), [Micro(parallel.Share(batch, 1.0)) for _ in range(2)])
    finally:
        torch.distributed.destroy_process_group()
    step = random.fold_in(KEY, 0)
    keys = [random.fold_in(random.fold_in(random.fold_in(step, f"loss:{i}"), "rank:0"), "loss") for i in range(2)]
    assert torch.stack(seen).tolist() == torch.stack(keys * 2).tolist()


def test_dropout_on_shards_has_keys_whatever_becomes_of_the_module():
    module, losses = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(), torch.nn.Linear(7, 1)), []
    base = {path: p.detach() for path, p in module.named_parameters()}
    parts = [Micro(parallel.Share(tuple(part.float() for part in worker.batch(0)), 1.0))]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for seed in range(2):
            shards = parallel.Sharded(ModuleLoss(module.train(), worker.squares), optim.adam(1e-2))
            state = shards.init(base)
            module.eval()
            torch.manual_seed(seed)
            losses.append(shards.update(KEY, state, parts)[1].loss)
    finally:
        torch.distributed.destroy_process_group()
    assert losses[0] == losses[1] != worker.squares(module, parts[0].batch.batch)[0]


def test_what_shards_would_ignore_or_get_wrong_is_refused(monkeypatch):
    module, adam = worker.model(torch.float32), optim.adam(1e-2)
    loss_fn = ModuleLoss(module, worker.squares)
    base = {path: p.detach() for path, p in module.named_parameters()}
    wrong = {"period": 2.5, "sigma": -1.0}
    with pytest.raises(
        ValueError, match=r"Sharded: smat: sigma is -1.*; period is 2.5.*not as an? _AveragedModule does"
    ):
        parallel.Sharded(with_master_weights(parallel.replicated(loss_fn)), adam, smat.build, **wrong)
    with pytest.raises(ValueError, match=r"smat\.build on shards has no engine, offload: leave it out"):
        parallel.Sharded(loss_fn, adam, smat.build, offload="cpu", engine="func")
    with pytest.raises(
        ValueError, match=r"method is orthoreg\.build, which shards do not support: give build of finet"
    ):
        parallel.Sharded(loss_fn, adam, orthoreg.build)
    with pytest.raises(ValueError, match=r"drop_prob is 0.5, but Mask has nothing to act on: where picks none of 6"):
        parallel.Sharded(loss_fn, adam, smat.build, where=lambda path, leaf: False).init(base)
    parts = [Micro(parallel.Share(tuple(part.float() for part in worker.batch(0)), 1.0))]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        clipped = optim.partition(where.matrices, optim.chain(optim.clip_by_global_norm(1.0), adam), adam)
        with pytest.raises(ValueError, match="holds a ChainState, but a process sees its shards alone"):
            parallel.Sharded(loss_fn, clipped).init(base)
        with monkeypatch.context() as with_a_gpu:  # shards stay where the weights are
            with_a_gpu.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
            assert all(leaf.is_cpu for leaf in parallel.Sharded(loss_fn, adam).init(base).params.values())
        shards = parallel.Sharded(loss_fn, adam)
        for wrong, text in (
            ({}, "params is empty: give the parameters to train"),
            ({**base, "0.weigth": base["0.weight"]}, "leaf '0.weigth' is not a parameter of the module"),
            ({**base, "0.weight": torch.ones(5, 5)}, r"leaf '0.weight' has shape \(5, 5\), the module's is \(7, 5\)"),
        ):
            with pytest.raises(ValueError, match=text):
                shards.init(wrong)
        state = shards.init(base)
        for wrong in (parts[0].batch.batch, [], [Micro(parts[0].batch.batch)]):
            with pytest.raises(ValueError, match=r"the batch of a process is not that of parallel\.share"):
                shards.update(KEY, state, wrong)
        few = state._replace(params={"0.bias": state.params["0.bias"]})
        for wrong, text in ((base, "state is a dict"), (few, "state lacks parameter '0.weight' of the shards of")):
            with pytest.raises(ValueError, match=f"{text}.*: give what init or update of these shards returned"):
                shards.update(KEY, wrong, parts)
        with pytest.raises(ValueError, match="the step of state is a tensor"):
            shards.update(KEY, steps.as_tensors(state), parts)
        with pytest.raises(ValueError, match=r"state has parameter '0.weight' that the shards .* lacks"):
            parallel.Sharded(loss_fn, adam).update(KEY, state, parts)
        several = {**base, "4.bias": base["4.bias"].double()}
        with pytest.raises(
            ValueError, match=r"several dtypes \('0.weight' float32, '4.bias' float64\).*: tree.cast them"
        ):
            shards.init(several)
        for loss, text in (
            (lambda module, batch: (batch[1].sum(), None), "the loss has no gradient"),
            (
                lambda module, batch: (module[4].weight.sum() * module[0](batch[0]).sum(), None),
                "outside of the forward",
            ),
        ):
            own = parallel.Sharded(ModuleLoss(module, loss), adam)
            with monkeypatch.context() as older:
                older.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state", raising=False)
                with pytest.raises(ValueError, match=text):
                    own.update(KEY, own.init(base), parts)
            with pytest.raises(ValueError, match=r"ended in an exception, .* torch 2\.13 on: begin with init"):
                own.update(KEY, state, parts)
        frozen = lora.with_lora(parallel.frozen_shards(loss_fn, base), base, worker.ADAPTERS)
        adapters = lora.init(KEY, base, worker.ADAPTERS)
        with monkeypatch.context() as older:
            older.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state", raising=False)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                frozen(adapters, (torch.ones(2, 3), torch.ones(2, 1)))
        with pytest.raises(ValueError, match=r"ended in an exception, .* torch 2\.13 on: begin with frozen_shards"):
            frozen(adapters, parts[0].batch.batch)
        number = torch.nn.ParameterDict({"scale": torch.tensor(1.0)})
        with pytest.raises(ValueError, match=r"parameter 'scale' is one number.*: freeze it"):
            parallel.Sharded(ModuleLoss(number, worker.squares), adam).init(dict(number.named_parameters()))
        places = [leaf.data_ptr() for leaf in state.params.values()]
        state, _ = shards.update(KEY, state, parts)  # of which there is no copy
        assert [leaf.data_ptr() for leaf in state.params.values()] == places

        def own_method(*given, **options):
            return finetune.build(*given, **options)

        with pytest.raises(ValueError, match=r"own_method, which shards do not support: .* or enter one of your own"):
            parallel.Sharded(loss_fn, adam, own_method)
        monkeypatch.setitem(parallel.SHARDED, own_method, False)
        entered = parallel.Sharded(loss_fn, adam, own_method)
        assert entered.update(KEY, entered.init(base), parts)[0].step == 1
        merging = parallel.Sharded(ModuleLoss(module, merged_outputs), adam)
        with pytest.raises(
            ValueError, match=r"'w' of expert '0' requires grad inside a loss, and merging has no deriv"
        ):
            merging.update(KEY, merging.init(base), parts)
        own = parallel.independent_smat(loss_fn, adam, base, period=1, **STRENGTHS)
        base["0.bias"].add_(1)
        with pytest.raises(ValueError, match="base was written to since the method was built"):
            own.update(KEY, own.init(base), parts)
    finally:
        torch.distributed.destroy_process_group()
