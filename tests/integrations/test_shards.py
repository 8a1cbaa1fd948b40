"""SMAT on FSDP2 shards in the Trainer: two processes of gloo on a CPU against one process on the same whole batches."""

import pytest
import torch

from smat_fn import draw, random, simulate
from smat_fn.mat import asam
from smat_fn.where import block_linear

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
distributed = pytest.importorskip("transformers.distributed")
if not hasattr(distributed, "DistributedConfig"):
    pytest.skip("transformers that loads no shards", allow_module_level=True)

from ..processes import found_by  # noqa: E402
from . import shards_worker as worker  # noqa: E402
from .test_trainer import KEY, STRENGTHS, llama  # noqa: E402

MODELS = {"loaded": False, "accelerate": True, "both": False, "asam": False}  # whether embeddings are tied


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder):
    return found_by("tests.integrations.shards_worker", folder)


@pytest.fixture(scope="module")
def alone(folder):
    """The same trainings in one process, with whole weights."""
    kept = {}

    def run(name):
        if name not in kept:
            options = {"eval_strategy": "steps", "eval_steps": 2} if name == "loaded" else {}
            if name in ("both", "asam"):
                options = {"kind": transformers.Trainer, "given": {"climb": name}}
            module = llama(worker.SIZE, tied=MODELS[name])
            kept[name] = worker.trained(module, folder / "alone", batch=2, **options)[1]
        return kept[name]

    return run


@pytest.mark.parametrize("name", ["loaded", "accelerate"])
def test_gathered_shards_of_a_simulated_step_are_the_state_of_whole_weights_bit_for_bit(name, found):
    module = llama(worker.SIZE, tied=MODELS[name])
    base = {path: p.detach() for path, p in module.named_parameters()}
    drawn = draw(random.fold_in(KEY, 1), **{own: STRENGTHS[own] for own in ("alpha_min", "drop_prob", "sigma")})
    for one in found:
        wanted = simulate(one[name]["after"][0], base, drawn, where=block_linear(module))
        assert one[name]["simulated"].keys() == wanted.keys()
        assert all(torch.equal(one[name]["simulated"][path], leaf) for path, leaf in wanted.items())


@pytest.mark.parametrize("name", list(MODELS))
def test_two_processes_train_shards_as_one_trains_whole_weights(name, found, alone):
    assert found[0]["type"] == ("DistributedType.FSDP", True)
    for one in found:
        assert len(one[name]["after"]) == worker.STEPS
        for own, wanted in zip(one[name]["after"], alone(name)["after"], strict=True):
            assert own.keys() == wanted.keys()
            for path, leaf in wanted.items():
                torch.testing.assert_close(own[path], leaf, rtol=0, atol=1e-5)
        assert one[name]["record"] == alone(name)["record"]  # samples of theta_0, those of one process
        assert one[name]["told"] == alone(name)["told"]  # the RMS of the update, over all shards
        assert "times the RMS of the update" in one[name]["told"][-1]


def test_evaluations_see_theta_inside_a_simulated_step_too(found, alone):
    for one in found:
        assert one["loaded"]["losses"] == pytest.approx(alone("loaded")["losses"], abs=1e-4)
        first, inside, again = one["loaded"]["around"]
        theta = one["loaded"]["after"][2]
        assert len(inside) == 2  # the second batch on weights that the first one left gathered
        assert all(torch.equal(own[path], leaf) for own in inside for path, leaf in theta.items())
        assert all(torch.equal(first[path], leaf) for path, leaf in again.items())
        assert not any(torch.equal(first[path], leaf) for path, leaf in theta.items())


def test_a_saved_model_has_whole_weights_without_noise(found, folder):
    module = transformers.LlamaForCausalLM.from_pretrained(folder / "saved")
    for path, p in module.named_parameters():
        assert torch.equal(p.detach(), found[0]["loaded"]["after"][-1][path])


def test_a_run_of_shards_that_resumes_is_the_uninterrupted_one_bit_for_bit(found):
    for one in found:
        assert len(one["resumed"]["after"]) == worker.STEPS - 2
        for own, wanted in zip(one["resumed"]["after"], one["accelerate"]["after"][2:], strict=True):
            assert all(torch.equal(own[path], leaf) for path, leaf in wanted.items())
        assert one["resumed"]["record"] == one["accelerate"]["record"]


def test_after_an_error_no_weight_stays_simulated_and_no_gradient_of_its_step_is_added_to_the_next_one(found):
    for one in found:
        (*_, third, fourth, last), failed, loss = one["failing"]
        assert failed == loss
        assert fourth == last
        assert third == last[:1]
        assert all(torch.equal(*grads) for grads in one["dropped"])  # in a loop of one's own


def test_shards_in_host_memory_change_when_their_copies_to_a_device_are_complete(found):
    for one in found:
        seen, simulated = one["waited"]
        assert [torch.equal(shard, simulated) for shard in seen] == [False, True] * 2


def test_weights_that_some_processes_copy_and_others_share_are_simulated_and_climb_as_whole_ones(found):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    theta = {name: p.detach().clone() for name, p in module.named_parameters()}
    base = {name: leaf * 0.5 for name, leaf in theta.items()}
    wanted = simulate(theta, base, draw(KEY, alpha_min=0.2, drop_prob=0.5, sigma=0.02))
    module(torch.ones(2, 3)).square().sum().backward()
    slopes = {name: p.grad for name, p in module.named_parameters()}
    above = asam.climb(theta, slopes, rho=0.3)
    for one in found:
        for simulated, climbed, after in one["copied"]:
            assert all(torch.equal(simulated[path], leaf) for path, leaf in wanted.items())
            for path, leaf in above.items():
                torch.testing.assert_close(climbed[path], leaf, rtol=0, atol=1e-6)
                assert torch.equal(after[path], theta[path])


def test_a_second_attach_keeps_theta_0_and_trained_shards_are_not_taken_for_it(found):
    for one in found:
        again, other = one["again"]
        assert again is None
        assert "trained with SMAT by another trainer before" in other


def test_shards_that_are_not_supported_are_refused_in_all_processes_alike(found):
    for one in found:
        options, placed, changed = one["errors"]
        assert options == "base is 'host', which shards do not support: leave base out"
        assert "parameter 'model.embed_tokens.weight' is placed as (Shard(dim=1),): shard its first" in placed
        # in the second process alone
        assert changed.startswith("1 of 20 parameters (model.norm.weight) have changed between attach")


def test_a_loop_of_ones_own_restores_shards_that_transformers_loaded(found):
    for one in found:
        before, inside, after = one["by hand"]
        assert all(torch.equal(before[path], leaf) for path, leaf in after.items())
        assert not any(torch.equal(before[path], leaf) for path, leaf in inside.items())
