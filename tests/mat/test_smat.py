"""SMAT against the paper's text, written out: naive simulation, plain backward, torch.optim."""

import inspect

import pytest
import torch

from smat_fn import mixed_loss, optim, participation, random, simulate, tree, value_and_grad
from smat_fn.mat import finetune, smat
from smat_fn.simulation import draw, naive, reweight
from smat_fn.types import Micro, Optimizer
from smat_fn.where import never

KEY = random.key(2**40 + 3)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.05}
OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(seed, dtype=torch.float32):
    shapes = {"embed": (6, 5), "blocks.0.w": (5, 4), "blocks.0.b": (4,), "head": (4, 2)}
    return {name: randn(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def in_block(path, leaf):
    return path == "blocks.0.w"


def network(params, batch):
    tokens, y = batch
    hidden = torch.tanh(params["embed"][tokens] @ params["blocks.0.w"] + params["blocks.0.b"])
    return ((hidden @ params["head"] - y) ** 2).mean(), {name: leaf.detach().clone() for name, leaf in params.items()}


def batches(count, dtype=torch.float32):
    tokens = torch.randint(6, (count, 7), generator=torch.Generator().manual_seed(3))
    return [(tokens[i], randn(7, 2, seed=70 + i, dtype=dtype)) for i in range(count)]


def linear(params, batch):
    """A loss whose gradient is one everywhere, so that what is seen is what `reweight` made of it."""
    return sum(leaf.sum() for leaf in params.values()), {name: leaf.detach().clone() for name, leaf in params.items()}


def recorder():
    """An optimizer that leaves params alone and keeps the gradients it is given as its state."""
    return Optimizer(lambda params: None, lambda grads, state, params: (params, grads))


def run(method, params, data, key=KEY):
    state, infos = method.init(params), []
    for batch in data:
        state, info = method.update(key, state, batch)
        infos.append(info)
    return state, infos


def gradients(params, loss, batch):
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    value, _ = loss(leaves, batch)
    value.backward()
    return value.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def literal(params, base, data, *, period, where, max_norm, make, noise="uniform"):
    """Section 4 of the paper, step by step, with an optimizer of torch.optim."""
    theta = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer, losses, norms = make(theta.values()), [], []
    for s, batch in enumerate(data):
        now = {name: p.detach() for name, p in theta.items()}
        if (s + 1) % period == 0:
            drawn = draw(random.fold_in(KEY, s), noise=noise, **STRENGTHS)
            loss, grads = gradients(naive.simulate(now, base, drawn, where=where), network, batch)
            grads = naive.reweight(grads, drawn, where=where)
        else:
            loss, grads = gradients(now, network, batch)
        norm = tree.global_norm(grads)
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        for name, p in theta.items():
            p.grad = grads[name] * factor
        optimizer.step()
        losses.append(loss)
        norms.append(norm.float())
    return {name: p.detach() for name, p in theta.items()}, losses, norms


OPTIMIZERS = {
    "adam": (optim.adam(0.03), lambda ps: torch.optim.Adam(ps, lr=0.03)),
    "adamw": (optim.adamw(0.03, weight_decay=0.3), lambda ps: torch.optim.AdamW(ps, lr=0.03, weight_decay=0.3)),
}


SETTINGS = [
    (4, in_block, None, "uniform"),
    (1, in_block, 0.05, "uniform"),
    (3, None, 0.05, "uniform"),
    (2, in_block, 0.05, "gaussian"),
    (2, None, None, "laplace"),
]


@pytest.mark.parametrize(
    ("period", "where", "max_norm", "noise", "kind", "donate"),
    [  # each two of setting, optimizer and donate together, the others are slow
        pytest.param(*setting, kind, bool(k), marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for i, setting in enumerate(SETTINGS)
        for j, kind in enumerate(OPTIMIZERS)
        for k in range(2)
    ],
)
def test_update_is_the_paper_bit_for_bit(kind, period, where, max_norm, noise, donate):
    optimizer, make = OPTIMIZERS[kind]
    params, base, data = parameters(0), parameters(10), batches(9)
    options = {"where": where, "max_grad_norm": max_norm, "period": period, "noise": noise, "donate": donate}
    state, infos = run(smat.build(network, optimizer, base, **options, **STRENGTHS), params, data)
    want, losses, norms = literal(
        params, base, data, period=period, where=where, max_norm=max_norm, make=make, noise=noise
    )
    for name, leaf in want.items():
        assert torch.equal(state.params[name], leaf), name
    assert [info.loss.item() for info in infos] == [loss.item() for loss in losses]
    assert [info.grad_norm.item() for info in infos] == [norm.item() for norm in norms]


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_step_s_is_simulated_when_s_plus_one_is_a_multiple_of_the_period(period):
    _, infos = run(smat.build(network, optim.adam(0.01), parameters(10), period=period), parameters(0), batches(12))
    want = [(s + 1) % period == 0 for s in range(12)]
    assert [info.simulated for info in infos] == want
    assert [smat.is_simulated(s, period) for s in range(12)] == want
    assert sum(want) == 12 // period
    for s, info in enumerate(infos):
        drawn = draw(random.fold_in(KEY, s), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        assert torch.equal(info.scale, drawn.scale if want[s] else torch.ones(()))
        assert info.scale.dtype == torch.float32


def test_defaults_are_those_of_the_paper():
    defaults = {n: p.default for n, p in inspect.signature(smat.build).parameters.items()}
    want = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3, "period": 4, "noise": "uniform", "lam": None}
    assert {name: defaults[name] for name in want} == want


@pytest.mark.parametrize("schedule", [{"period": 1}, {"period": 4}, {"lam": 0.5}, {"lam": 1.0}], ids=str)
def test_with_everything_off_it_is_finetune_bit_for_bit(schedule):
    params, base, data = parameters(0), parameters(10), batches(5)
    got, infos = run(smat.build(network, optim.adam(0.03), base, max_grad_norm=0.5, **OFF, **schedule), params, data)
    want, want_infos = run(finetune.build(network, optim.adam(0.03), base, max_grad_norm=0.5), params, data)
    assert all(torch.equal(got.params[name], leaf) for name, leaf in want.params.items())
    for info, want_info in zip(infos, want_infos, strict=True):
        assert torch.equal(info.loss, want_info.loss)
        assert torch.equal(info.grad_norm, want_info.grad_norm)
        assert not info.simulated
        assert info.scale == 1


def test_finetune_is_torch_optim_bit_for_bit():
    params, data = parameters(0), batches(5)
    got, _ = run(finetune.build(network, optim.adam(0.03), parameters(10)), params, data)
    make = OPTIMIZERS["adam"][1]
    want, _, _ = literal(params, params, data, period=10**6, where=None, max_norm=None, make=make)
    assert all(torch.equal(got.params[name], leaf) for name, leaf in want.items())


def test_a_simulation_that_changes_almost_nothing_is_near_finetune():
    params, base, data = parameters(0), parameters(10), batches(5)
    nothing = {**OFF, "sigma": 1e-30}
    got, infos = run(smat.build(network, optim.adam(0.03), base, period=1, **nothing), params, data)
    want, _ = run(finetune.build(network, optim.adam(0.03), base), params, data)
    assert all(info.simulated for info in infos)
    torch.testing.assert_close(got.params, want.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_the_mixed_objective_has_the_gradient_of_the_mixed_loss(lam, engine):
    params, base, batch = parameters(0, torch.float64), parameters(10, torch.float64), batches(1, torch.float64)[0]
    method = smat.build(network, recorder(), base, where=in_block, lam=lam, engine=engine, **STRENGTHS)
    state = method.init(params)
    for s in range(2):
        state, info = method.update(KEY, state, batch)
        drawn = draw(random.fold_in(KEY, s), **STRENGTHS)
        loss = mixed_loss(network, lam, where=in_block)
        (value, _), grads = value_and_grad(loss)(params, base, batch, drawn)
        torch.testing.assert_close(info.loss, value, rtol=1e-13, atol=0)
        torch.testing.assert_close(state.opt_state, grads, rtol=1e-11, atol=1e-14)
        assert info.simulated == (lam > 0)


@pytest.mark.parametrize(("lam", "period"), [(0.0, 10**6), (1.0, 1)])
def test_the_ends_of_the_mixed_objective_are_its_two_losses_bit_for_bit(lam, period):
    params, base, data = parameters(0), parameters(10), batches(4)
    mixed, infos = run(smat.build(network, optim.adam(0.03), base, lam=lam, **STRENGTHS), params, data)
    want, want_infos = run(smat.build(network, optim.adam(0.03), base, period=period, **STRENGTHS), params, data)
    assert all(torch.equal(mixed.params[name], leaf) for name, leaf in want.params.items())
    assert [i.loss.item() for i in infos] == [i.loss.item() for i in want_infos]


def test_the_mixed_objective_in_bf16_is_added_in_float32():
    params, base = (tree.cast(parameters(seed), torch.bfloat16) for seed in (0, 10))
    tokens, y = batches(1)[0]
    batch = (tokens, y.bfloat16())
    parts = [
        run(smat.build(network, recorder(), base, lam=lam, **STRENGTHS), params, [batch])[0] for lam in (0.0, 1.0, 0.3)
    ]
    clean, simulated, mixed = (part.opt_state for part in parts)
    for name, leaf in mixed.items():
        assert torch.equal(leaf, (0.7 * clean[name].float() + 0.3 * simulated[name].float()).bfloat16())


def test_simulated_steps_under_one_key_differ_and_can_be_repeated():
    params, base, batch = parameters(0), parameters(10), batches(1)[0]
    method = smat.build(network, recorder(), base, period=1, **STRENGTHS)
    state, infos = run(method, params, [batch] * 6)
    assert len({info.scale.item() for info in infos}) == 6
    assert len({info.loss.item() for info in infos}) == 6
    again, info = method.update(KEY, state._replace(step=5), batch)
    assert torch.equal(info.loss, infos[5].loss)
    assert torch.equal(info.scale, infos[5].scale)
    assert not torch.equal(method.update(random.key(1), state._replace(step=5), batch)[1].scale, info.scale)
    assert again.step == 6


def one_step(strengths, *, where=in_block, dtype=torch.float32, noise="uniform"):
    """(params, base, draw, the state the loss saw, the gradient the optimizer got) with a gradient of one."""
    params, base = parameters(0, dtype), parameters(10, dtype)
    method = smat.build(linear, recorder(), base, where=where, period=1, noise=noise, **strengths)
    state, (info,) = run(method, params, [None])
    return params, base, draw(random.fold_in(KEY, 0), noise=noise, **strengths), info.aux, state.opt_state


def test_full_simulation_is_simulate_and_reweight():
    params, base, drawn, seen, got = one_step(STRENGTHS)
    want = simulate(params, base, drawn, where=in_block)
    ones = tree.tree_map(torch.ones_like, params)
    for name, weight in participation(drawn, params, where=in_block).items():
        assert torch.equal(seen[name], want[name])
        assert torch.equal(got[name], reweight(ones, drawn, where=in_block)[name])
        assert torch.equal(got[name], weight)


def test_embeddings_biases_and_heads_are_weighted_by_alpha_alone():
    *_, drawn, _, got = one_step(STRENGTHS)
    for name in ("embed", "blocks.0.b", "head"):
        assert (got[name] == drawn.scale).all()
    weights = got["blocks.0.w"]
    assert 0 < (weights == 0).sum() < weights.numel()
    kept = drawn.scale * torch.tensor(65536 / (65536 - round(0.4 * 65536)), dtype=torch.float32)
    assert set(weights.unique().tolist()) == {0.0, kept.item()}


def test_where_none_masks_every_leaf():
    *_, got = one_step({**STRENGTHS, "drop_prob": 0.9}, where=None)
    assert all((leaf == 0).any() for leaf in (got["embed"], got["blocks.0.w"], got["head"]))


def test_without_scale():
    *_, drawn, _, got = one_step({**STRENGTHS, "alpha_min": 1.0, "drop_prob": 0.5})
    assert drawn.scale == 1
    assert (got["embed"] == 1).all()
    assert set(got["blocks.0.w"].unique().tolist()) == {0.0, 2.0}


def test_without_mask():
    *_, drawn, _, got = one_step({**STRENGTHS, "drop_prob": 0.0})
    assert drawn.scale < 1
    assert all((leaf == drawn.scale).all() for leaf in got.values())


def test_without_perturb():
    params, base, _, seen, got = one_step({**STRENGTHS, "sigma": 0.0})
    for name, theta in params.items():
        assert torch.equal(seen[name], base[name] + got[name] * (theta - base[name]))
    dropped = got["blocks.0.w"] == 0
    assert dropped.any()
    assert torch.equal(seen["blocks.0.w"][dropped], base["blocks.0.w"][dropped])


def test_perturb_alone_moves_every_coordinate_within_its_bound():
    sigma = 0.05
    params, _, _, seen, got = one_step({**OFF, "sigma": sigma}, dtype=torch.float64)
    assert all((leaf == 1).all() for leaf in got.values())
    noise = torch.cat([(seen[name] - theta).flatten() for name, theta in params.items()])
    assert (noise != 0).all()
    assert noise.abs().max() <= 3**0.5 * sigma
    # RMS of a uniform sample: (noise / sigma)**2 has mean 1 and variance 4 / 5
    assert abs((noise / sigma).square().mean() - 1) < 4 * (0.8 / noise.numel()) ** 0.5


def test_weight_decay_acts_on_theta():
    def flat(params, batch):
        return 0.0 * sum(leaf.sum() for leaf in params.values()), None

    params = parameters(0)
    method = smat.build(flat, optim.adamw(0.5, weight_decay=0.25), parameters(10), period=1, **STRENGTHS)
    state, (info,) = run(method, params, [None])
    assert info.simulated
    # nothing but the decay moves theta: the simulated state has not leaked into it
    assert all(torch.equal(state.params[name], theta * 0.875) for name, theta in params.items())


def test_clipping_comes_after_reweighting():
    params, base = parameters(0), parameters(10)
    strengths = {"alpha_min": 0.0, "drop_prob": 0.9, "sigma": 0.0}
    drawn = draw(random.fold_in(KEY, 0), **strengths)
    weights = participation(drawn, params, where=in_block)
    norm = tree.global_norm(weights)
    count = sum(leaf.numel() for leaf in params.values())
    # a bound between the norm after and before reweighting tells the two orders apart
    assert norm < 0.9 * count**0.5
    for bound in (norm.item() * 1.01, norm.item() / 2):
        method = smat.build(
            linear, recorder(), base, where=in_block, period=1, max_grad_norm=bound, **strengths
        )  # fmt: skip
        state, (info,) = run(method, params, [None])
        assert torch.equal(info.grad_norm, norm.float())
        want, _ = optim.clip(weights, bound)
        assert all(torch.equal(state.opt_state[name], leaf) for name, leaf in want.items())


def test_the_reweighted_gradient_is_rounded_to_the_gradients_dtype_before_it_is_measured():
    params, base = (tree.cast(parameters(seed), torch.bfloat16) for seed in (0, 10))
    method = smat.build(linear, recorder(), base, where=in_block, period=1, **STRENGTHS)
    state, (info,) = run(method, params, [None])
    drawn = draw(random.fold_in(KEY, 0), **STRENGTHS)
    rounded = tree.cast(participation(drawn, params, where=in_block), torch.bfloat16)
    assert all(torch.equal(state.opt_state[name], leaf) for name, leaf in rounded.items())
    assert torch.equal(info.grad_norm, tree.global_norm(rounded).float())


def test_all_micro_batches_of_a_step_see_one_simulated_state():
    params, base, data = parameters(0), parameters(10), batches(3)
    method = smat.build(network, recorder(), base, where=in_block, period=1, **STRENGTHS)
    state, (info,) = run(method, params, [[Micro(batch) for batch in data]])
    drawn = draw(random.fold_in(KEY, 0), **STRENGTHS)
    want = naive.simulate(params, base, drawn, where=in_block)
    assert len(info.aux) == 3
    for aux in info.aux:
        assert all(torch.equal(aux[name], leaf) for name, leaf in want.items())
    each = [gradients(want, network, batch)[1] for batch in data]
    mean = {name: sum(g[name] for g in each) / 3 for name in params}
    torch.testing.assert_close(state.opt_state, naive.reweight(mean, drawn, where=in_block))


@pytest.mark.parametrize("period", [0, -1, 1.5, None])
def test_bad_periods_are_refused(period):
    with pytest.raises(ValueError, match=f"period is {period}, must be an integer of at least 1"):
        smat.build(network, optim.adam(0.1), parameters(10), period=period)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"antithetic": "no"}, "antithetic is 'no', must be True or False"),
        ({"alpha_depth": 0.5}, "alpha_depth is 0.5: cannot unpack"),
        ({"alpha_depth": {"w": "a"}}, "factors of alpha must be numbers: w 'a'"),
        ({"period": True}, "period is True, must be an integer"),
    ],
)
def test_options_of_another_type_are_named(options, message):
    with pytest.raises(ValueError, match=f"smat: {message}"):
        smat.build(lambda p, x: (p["w"].sum(), None), optim.adam(0.1), {"w": torch.ones(2)}, **options)
    with pytest.raises(ValueError, match="learning rate is '1', must be a number or a function of the step"):
        optim.adam("1")


def test_a_mask_with_nothing_to_act_on_is_refused_and_never_is_not():
    with pytest.raises(ValueError, match="Mask has nothing to act on: where picks none of 4 parameters"):
        smat.build(network, optim.adam(0.1), parameters(10), where=lambda path, leaf: "layers" in path)
    smat.build(network, optim.adam(0.1), parameters(10), where=lambda path, leaf: "layers" in path, drop_prob=0.0)
    smat.build(network, optim.adam(0.1), parameters(10), where=never)
