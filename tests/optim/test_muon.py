"""Muon against torch.optim.Muon, bit for bit, with another optimizer on the rest."""

import pytest
import torch

from smat_fn import optim


def leaves(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = {"tall": (8, 3), "embed": (5, 4), "wide": (3, 8), "bias": (6,), "gain": ()}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def in_blocks(path, leaf):
    return path != "embed"


def reference(params, steps, dtype, lr):
    params = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    matrices = [params["tall"], params["wide"]]
    rest = [params[name] for name in ("embed", "bias", "gain")]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1)
    for step in range(steps):
        for name, grad in leaves(50 + step, dtype).items():
            params[name].grad = grad
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in params.items()}


def make(lr=0.02):
    return optim.muon(lr, rest=optim.adamw(1e-3, weight_decay=0.1), where=in_blocks, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("donate", [False, True])
def test_bits_of_torch_optim_on_matrices_and_of_the_rest(dtype, donate):
    start = leaves(1, dtype)
    params, kept = {name: leaf.clone() for name, leaf in start.items()}, start
    optimizer = make()
    state = optimizer.init(params)
    for step in range(6):
        params, state = optimizer.update(leaves(50 + step, dtype), state, params, donate=donate)
    expected = reference(start, 6, dtype, 0.02)
    assert list(params) == list(start)
    assert all(torch.equal(params[name], expected[name]) for name in start)
    assert all(torch.equal(kept[name], leaf) for name, leaf in leaves(1, dtype).items())


def test_pure_updates_leave_their_arguments_alone():
    params, grads, optimizer = leaves(1), leaves(2), make()
    state = optimizer.init(params)
    _, state = optimizer.update(grads, state, params)
    before = {name: leaf.clone() for name, leaf in state.momentum.items()}
    optimizer.update(grads, state, params)
    assert all(torch.equal(state.momentum[name], leaf) for name, leaf in before.items())
    assert all(torch.equal(params[n], leaf) for n, leaf in leaves(1).items())
    assert all(torch.equal(grads[n], leaf) for n, leaf in leaves(2).items())


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_a_matrix_without_entries_is_left_to_the_rest(shape):
    params = {"none": torch.zeros(shape), "w": torch.eye(2)}
    optimizer = optim.muon(1.0, rest=optim.adam(1e-3))
    moved, state = optimizer.update(params, optimizer.init(params), params)
    assert list(state.momentum) == ["w"]
    assert moved["none"].shape == shape


def test_an_update_of_a_matrix_is_nearly_orthogonal():
    params = {"w": torch.zeros(6, 4)}
    optimizer = optim.muon(1.0, rest=optim.adam(1e-3))
    moved, _ = optimizer.update({"w": leaves(3)["tall"].new_ones(6, 4).triu()}, optimizer.init(params), params)
    singular = torch.linalg.svdvals(moved["w"])[:4] / (6 / 4) ** 0.5
    assert ((singular > 0.3) & (singular < 1.3)).all()


def test_a_schedule_is_read_at_the_step():
    params, grads = leaves(1), leaves(2)
    optimizer = optim.muon(lambda step: 0.1 * step, rest=optim.adam(lambda step: 0.0))
    first, state = optimizer.update(grads, optimizer.init(params), params)
    assert all(torch.equal(first[name], params[name]) for name in params)
    second, _ = optimizer.update(grads, state, first)
    assert not torch.equal(second["tall"], params["tall"])


def test_gradients_of_another_dtype_are_named():
    params, muon = {"w": torch.ones(2, 2), "b": torch.ones(2)}, optim.muon(0.1, rest=optim.adam(0.1))
    grads = {"w": torch.ones(2, 2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(
        ValueError, match=r"'w' is float64, the parameter float32: cast the gradient; .*'b' is bfloat16"
    ):
        muon.update(grads, muon.init(params), params)


def test_bad_values_are_listed_at_once():
    with pytest.raises(
        ValueError, match=r"momentum 1.0 .*ns_steps is 0.*rest is a int.*weight_decay is -1.*learning rate"
    ):
        optim.muon(-1.0, rest=3, momentum=1.0, ns_steps=0, weight_decay=-1)
    with pytest.raises(ValueError, match="ns_steps is 100, must be 1 to 99"):
        optim.muon(1e-3, rest=optim.adam(1e-3), ns_steps=100)
