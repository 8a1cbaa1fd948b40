"""The registry and the interface that every suite carries."""

import json

import pytest
import torch

from smat_fn import random, tree
from smat_fn.mat import finetune
from smat_fn.optim import adam
from smat_fn.suites import SUITES, load_suite


def test_unknown_suite_names_the_known_ones():
    with pytest.raises(ValueError, match=f"'digitz' is unknown, the suites are {next(iter(SUITES))!r}"):
        load_suite("digitz", seed=0)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match=r"no options \['epochs'\].*batch_size"):
        load_suite("digits", seed=0, epochs=3)


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
    with pytest.raises(ValueError, match=r"lacks leaf 'layernorm\.weight'.*'layernorm\.weigth'"):
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
