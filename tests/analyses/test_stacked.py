"""Many models in one evaluation are the loop over them, however they are cut into batches."""

import logging

import pytest
import torch

from smat_fn import random
from smat_fn.analyses import Job, evaluate, score_jobs, stack
from smat_fn.suites import load_suite

COUNT = 7
X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def model(number):
    return {"layer": {"w": X.T.contiguous() * number, "b": torch.full((3,), float(number), dtype=torch.float64)}}


def builds(calls=None):
    def build(number):
        if calls is not None:
            calls.append(number)
        return model(number)

    return [lambda number=number: build(number) for number in range(COUNT)]


def fn(params):
    layer = params["layer"]
    return ((X @ layer["w"] + layer["b"]) ** 2).sum()


def score_tensor(params, task):
    return fn(params) + len(task)


def test_stack_adds_an_axis_and_copies():
    trees = [model(number) for number in range(3)]
    stacked = stack(trees)
    assert stacked["layer"]["w"].shape == (3, 4, 3)
    assert all(torch.equal(stacked["layer"]["b"][n], trees[n]["layer"]["b"]) for n in range(3))
    stacked["layer"]["b"].zero_()
    assert trees[2]["layer"]["b"].sum() == 6
    with pytest.raises(ValueError, match="no trees"):
        stack([])
    with pytest.raises(ValueError, match="tree 1 has parameter 'v' that tree 0 lacks"):
        stack([{"w": torch.ones(1)}, {"w": torch.ones(1), "v": torch.ones(1)}])


@pytest.mark.parametrize("memory", [0, 1, 1000, 1 << 20])
def test_values_are_those_of_the_loop_whatever_the_memory(memory):
    expected, calls = [float(fn(model(number))) for number in range(COUNT)], []
    assert evaluate(fn, builds(calls), memory=memory) == pytest.approx(expected, rel=1e-14)
    assert calls == list(range(COUNT))


def test_a_batch_holds_as_many_models_as_fit():
    # a model has 15 float64 weights, its largest activation 9 numbers: 2 * 120 + 4 * 72 bytes
    for memory, batches in ((0, [1] * 7), (2 * 528 - 1, [1] * 7), (2 * 528, [1, 2, 2, 2]), (5 * 528 - 1, [1, 4, 2])):
        done = []
        evaluate(fn, builds(), memory=memory, done=done.append)
        assert done == batches


def test_batches_are_one_call_of_the_function():
    calls = []
    evaluate(lambda params: (calls.append(params["layer"]["w"].shape), fn(params))[1], builds())
    assert calls == [(4, 3)] * 2  # the first model, and vmap's view of one of the others


def test_nothing_is_evaluated_for_nothing():
    assert evaluate(fn, []) == []


def test_a_function_that_vmap_refuses_is_looped_with_a_line_in_the_log(caplog):
    def refused(params):
        return torch.tensor(float(fn(params)), dtype=torch.float64)

    with caplog.at_level(logging.INFO):
        values = evaluate(refused, builds())
    assert values == [float(fn(model(number))) for number in range(COUNT)]
    (record,) = caplog.records
    assert "one by one" in record.getMessage()


def test_an_operation_without_a_batching_rule_is_looped_too(caplog):
    def attended(params):
        x = params["layer"]["w"].view(1, 1, 4, 3)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).sum()

    with caplog.at_level(logging.INFO):
        values = evaluate(attended, builds())
    assert values == [float(attended(model(number))) for number in range(COUNT)]
    assert "batching rule" in caplog.text


def test_errors_of_the_function_itself_come_through():
    def broken(params):
        if isinstance(params["layer"]["w"], torch.Tensor) and params["layer"]["b"].sum() != 0:
            raise ValueError("no good")
        return fn(params)

    with pytest.raises(ValueError, match="no good"):
        evaluate(broken, builds(), memory=0)


def test_no_gradient_is_recorded():
    seen = []
    evaluate(lambda p: (seen.append(torch.is_grad_enabled()), fn(p))[1], builds())
    assert seen == [False, False]


@pytest.mark.parametrize("memory", [0, 900, 1 << 20])
def test_jobs_are_scored_on_their_own_tasks_batched_or_not(memory):
    tasks = [("a", "bb"), ("bb",), ("a", "ccc", "bb")]
    jobs = [Job(lambda n=n: model(n), own) for n, own in enumerate(tasks)]
    done, expected = [], [{t: float(score_tensor(model(n), t)) for t in own} for n, own in enumerate(tasks)]
    looped = score_jobs(jobs, lambda p, t: float(score_tensor(p, t)), done=done.append)
    assert looped == expected
    assert done == [1] * 6
    done.clear()
    batched = score_jobs(jobs, None, batched=score_tensor, memory=memory, done=done.append)
    assert [list(found) for found in batched] == [list(own) for own in tasks]
    assert all(b == pytest.approx(e, rel=1e-14) for b, e in zip(batched, expected, strict=True))
    assert sum(done) == 6


def test_looped_jobs_build_each_model_once():
    calls = []
    jobs = [Job(build, ("a", "b")) for build in builds(calls)]
    score_jobs(jobs, lambda params, task: 1.0)
    assert calls == list(range(COUNT))


def test_digits_scores_and_losses_of_a_stack_are_those_of_a_loop():
    suite = load_suite("digits", seed=21, pretrain_steps=10, images_per_task=120, progress=False)
    key = random.key(1)
    noise = {path: 0.02 * random.uniform(random.fold_in(key, path), leaf.shape) for path, leaf in suite.base.items()}
    models = [{path: leaf + n * noise[path] for path, leaf in suite.base.items()} for n in range(4)]
    jobs = [Job(lambda m=m: m, ("mirror", "stripes")) for m in models]
    expected = [{task: suite.score(m, task, "dev") for task in ("mirror", "stripes")} for m in models]
    batched = score_jobs(jobs, None, batched=lambda p, t: suite.score_tensor(p, t, "dev"))
    assert batched == expected
    assert len({found["mirror"] for found in expected}) > 1
    batch = suite.batch("mirror", key, 0)
    losses = evaluate(lambda p: suite.loss_fn("mirror")(p, batch)[0], [job.build for job in jobs])
    assert losses == pytest.approx([float(suite.loss_fn("mirror")(m, batch)[0]) for m in models], rel=1e-5)
