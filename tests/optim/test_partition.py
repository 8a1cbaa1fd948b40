"""Parameter groups against those of torch, bit for bit."""

import pytest
import torch

from smat_fn import optim, where

STEPS = 5


def leaves(seed):
    g = torch.Generator().manual_seed(seed)
    shapes = {"tall": (8, 3), "norm.weight": (8,), "kernel": (4, 2, 3, 3), "bias": (6,), "gain": ()}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def grads():
    return [leaves(50 + step) for step in range(STEPS)]


def trained(optimizer, *, donate=False):
    params = leaves(1)
    state = optimizer.init(params)
    for grad in grads():
        params, state = optimizer.update(grad, state, params, donate=donate)
    return params, state


def by_torch(*groups):
    params = {name: torch.nn.Parameter(leaf) for name, leaf in leaves(1).items()}
    optimizer = torch.optim.AdamW([{**group, "params": [params[name] for name in group["params"]]} for group in groups])
    for grad in grads():
        for name, p in params.items():
            p.grad = grad[name]
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def same(got, want):
    return list(got) == list(want) and all(torch.equal(got[name], leaf) for name, leaf in want.items())


@pytest.mark.parametrize("donate", [False, True])
def test_norms_and_biases_do_not_decay(donate):
    schedule = optim.linear(1e-2, STEPS)
    got, state = trained(optim.adamw(1e-2, weight_decay=0.3, decays=where.matrices), donate=donate)
    decaying, others = ["tall", "kernel"], ["norm.weight", "bias", "gain"]
    want = by_torch(
        {"params": decaying, "lr": 1e-2, "weight_decay": 0.3}, {"params": others, "lr": 1e-2, "weight_decay": 0.0}
    )
    assert same(got, want)
    assert (list(state.chosen.mu), list(state.rest.mu)) == (decaying, others)
    # a schedule reaches both groups
    every, none = (optim.adamw(schedule, weight_decay=0.3, decays=lambda path, leaf, b=b: b) for b in (True, False))
    assert same(trained(every)[0], trained(optim.adamw(schedule, weight_decay=0.3))[0])
    assert same(trained(none)[0], trained(optim.adamw(schedule, weight_decay=0.0))[0])


def test_groups_of_other_rates():
    got, _ = trained(optim.partition(where.matrices, *(optim.adamw(lr, weight_decay=0.1) for lr in (1e-2, 1e-3))))
    groups = {1e-2: ["tall", "kernel"], 1e-3: ["norm.weight", "bias", "gain"]}
    assert same(got, by_torch(*({"params": names, "lr": lr, "weight_decay": 0.1} for lr, names in groups.items())))


def test_pure_updates_leave_their_arguments_alone_and_a_tree_keeps_its_shape():
    optimizer = optim.adamw(1e-2, weight_decay=0.3, decays=where.matrices)
    params, grad = (
        {"a": {"w": torch.ones(2, 2)}, "b": torch.ones(2)},
        {"a": {"w": torch.ones(2, 2)}, "b": torch.ones(2)},
    )
    state = optimizer.init(params)
    new, _ = optimizer.update(grad, state, params)
    assert list(new) == ["a", "b"]
    assert list(new["a"]) == ["w"]
    assert torch.equal(params["a"]["w"], torch.ones(2, 2))
    assert not state.chosen.mu["a.w"].any()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rest is a function, give an optimizer"):
        optim.partition(where.matrices, optim.adam(1e-3), leaves)
    with pytest.raises(ValueError, match="weight_decay is -1"):
        optim.adamw(1e-3, weight_decay=-1, decays=where.matrices)
    optimizer = optim.adamw(1e-3, weight_decay=0.1, decays=where.matrices)
    params = leaves(1)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="grads lacks parameter 'bias' of params"):
        optimizer.update({name: leaf for name, leaf in params.items() if name != "bias"}, state, params)
