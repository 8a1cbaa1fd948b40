"""The registry and the interface that every suite carries."""

import json
import weakref
from dataclasses import MISSING, fields
from importlib import import_module

import pytest
import torch

from smat_fn import random, tree
from smat_fn.mat import finetune
from smat_fn.optim import adam
from smat_fn.suites import SUITES, describe_options, load_suite, task_names
from smat_fn.suites.suite import remembered


def test_unknown_suite_names_the_known_ones():
    with pytest.raises(ValueError, match=f"'digitz' is unknown, the suites are {next(iter(SUITES))!r}"):
        load_suite("digitz", seed=0)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match=r"no options \['epochs'\].*batch_size"):
        load_suite("digits", seed=0, epochs=3)


def test_unknown_options_are_refused_before_any_loading():
    with pytest.raises(ValueError, match=r"trace has no options \['eval_batch'\].*'decode_batch'"):
        load_suite("trace", seed=0, model="none", data="none", eval_batch=3)
    with pytest.raises(ValueError, match=r"clip8 has no options \['decode_batch'\].*'eval_batch'"):
        task_names("clip8", decode_batch=3)


@pytest.mark.parametrize("name", SUITES)
def test_every_option_has_the_text_that_help_prints(name):
    options = getattr(import_module(f"smat_fn.suites.{name}"), SUITES[name]).Options
    described = describe_options(name)
    assert list(described) == [field.name for field in fields(options)]
    assert all(text.endswith(".") for _, text in described.values())
    assert [option for option, (default, _) in described.items() if default is None] == [
        field.name for field in fields(options) if field.default is MISSING
    ]
    assert set(options.LOCAL) <= set(described)


def test_a_replaced_member_leaves_the_suite_alone(suite):
    other = suite.replace(tasks=("rot90",), dev_batches=None)
    assert (other.tasks, other.dev_batches) == (("rot90",), None)
    assert suite.tasks == task_names("digits")
    assert suite.dev_batches("mirror")
    with pytest.raises(ValueError, match="digits task 'mirror' is unknown"):
        other.loss_fn("mirror")


def test_results_are_kept_with_their_object_and_not_beyond_it():
    calls = []

    class Counted:
        @remembered
        def twice(self, x):
            calls.append(x)
            return 2 * x

    one, other = Counted(), Counted()
    assert [one.twice(3), one.twice(3), one.twice(4), other.twice(3)] == [6, 6, 8, 6]
    assert calls == [3, 4, 3]
    gone = weakref.ref(one)
    del one
    assert gone() is None


def test_recipe_is_json_and_rebuilds_the_suite(suite, few):
    recipe = json.loads(json.dumps(suite.recipe))
    assert recipe.pop("name") == suite.name == "digits"
    assert recipe["seed"] == suite.seed
    twin = few(**recipe)
    assert twin.recipe == suite.recipe
    assert twin.tasks == suite.tasks
    assert all(torch.equal(twin.base[name], leaf) for name, leaf in suite.base.items())
    assert twin.score(twin.base, "mirror", "dev") == suite.score(suite.base, "mirror", "dev")


def test_batch_is_a_function_of_task_key_and_step(suite):
    key = random.key(4)
    seen = {(t, s): suite.batch(t, key, s) for t in suite.tasks for s in (0, 5, 9)}
    for (task, step), (images, labels) in reversed(seen.items()):
        again = suite.batch(task, key, step)
        assert torch.equal(again[0], images)
        assert torch.equal(again[1], labels)
    assert len({images.sum().item() for images, _ in seen.values()}) == len(seen)
    assert not torch.equal(suite.batch("mirror", random.key(5), 0)[0], seen["mirror", 0][0])


def test_unknown_tasks_and_splits_are_refused(suite):
    for call in (
        lambda: suite.loss_fn("rot180"),
        lambda: suite.batch("rot180", random.key(0), 0),
        lambda: suite.score(suite.base, "rot180", "dev"),
    ):
        with pytest.raises(ValueError, match=r"digits task 'rot180' is unknown.*'rot90'"):
            call()
    with pytest.raises(ValueError, match=r"split 'train' is unknown.*'dev', 'test'"):
        suite.score(suite.base, "rot90", "train")


def test_scoring_refuses_parameters_of_another_model(suite):
    params = dict(suite.base)
    params["layernorm.weigth"] = params.pop("layernorm.weight")
    with pytest.raises(ValueError, match=r"lacks parameter 'layernorm\.weight'.*'layernorm\.weigth'"):
        suite.score(params, "rot90", "dev")


def test_a_method_trains_on_it_and_leaves_the_base_alone(suite):
    kept, key, task = tree.clone(suite.base), random.key(0), "negative"
    method = finetune.build(suite.loss_fn(task), adam(1e-3), suite.base, donate=True)
    state, losses = method.init(suite.base), []
    for step in range(30):
        state, info = method.update(key, state, suite.batch(task, key, step))
        losses.append(info.loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in kept.items())
