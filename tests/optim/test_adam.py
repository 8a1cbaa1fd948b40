"""Adam and AdamW against torch.optim's classes, bit for bit, and as pure functions."""

import importlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import checkpoint, optim, tree
from smat_fn.types import Optimizer

adam = importlib.import_module("smat_fn.optim.adam")  # whose name is the function's
STEPS = 10
SHAPES = {"w": (5, 3), "b": (3,), "scalar": (), "empty": (0, 2), "big": (70, 3)}
IMPLEMENTATIONS = {"default": {}, "single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}


def gradients(dtype=torch.float32):
    return [make(dtype, seed=100 + step) for step in range(STEPS)]


def ours(kind, lr, **options):
    return optim.adam(lr, **options) if kind == "adam" else optim.adamw(lr, **{"weight_decay": 0.05, **options})


def run(optimizer, params, grads, **options):
    state = optimizer.init(params)
    for g in grads:
        params, state = optimizer.update(g, state, params, **options)
    return params, state


def run_torch(kind, params, grads, lr, *, schedule=None, **options):
    """Parameters and moments after torch.optim's own class."""
    params = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    options = {"weight_decay": 0.05, **options} if kind == "adamw" else options
    optimizer = TORCH[kind](params.values(), lr=lr, **options)
    scheduler = schedule(optimizer) if schedule else None
    for g in grads:
        for name, p in params.items():
            p.grad = g[name].clone()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return params, {name: optimizer.state[p] for name, p in params.items()}


def assert_equal(a, b):
    assert list(a) == list(b)
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype
        assert torch.equal(leaf, b[path]), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", TORCH)
def test_bits_of_torch_optim(kind, how, dtype):
    options = IMPLEMENTATIONS[how]
    params, grads = make(dtype), gradients(dtype)
    got, state = run(ours(kind, 1e-2, **options), params, grads)
    want, moments = run_torch(kind, params, grads, 1e-2, **options)
    assert_equal(got, {n: p.detach() for n, p in want.items()})
    assert_equal(state.mu, {n: s["exp_avg"] for n, s in moments.items()})
    assert_equal(state.nu, {n: s["exp_avg_sq"] for n, s in moments.items()})
    assert state.step == STEPS
    assert {leaf.dtype for leaf in (*got.values(), *state.mu.values(), *state.nu.values())} == {dtype}
    assert not torch.equal(got["w"], params["w"])


@pytest.mark.parametrize("kind", TORCH)
def test_hyperparameters_reach_torch(kind):
    options = {"betas": (0.7, 0.95), "eps": 1e-3}
    params, grads = make(), gradients()
    assert_equal(
        run(ours(kind, 0.1, **options), params, grads)[0], _values(run_torch(kind, params, grads, 0.1, **options))
    )
    assert not torch.equal(
        run(ours(kind, 0.1), params, grads)[0]["w"], run(ours(kind, 0.1, **options), params, grads)[0]["w"]
    )


class Operations(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("how", "family"), [("single", ""), ("foreach", "_foreach_"), ("fused", "_fused_adam")])
@pytest.mark.parametrize("kind", TORCH)
def test_the_choice_of_implementation_reaches_torch(kind, how, family):
    optimizer, params = ours(kind, 0.1, **IMPLEMENTATIONS[how]), make()
    state = optimizer.init(params)
    with Operations() as operations:
        optimizer.update(params, state, params)
    # the fused one counts its steps by a foreach operation
    found = [f for f in ("_fused_adam", "_foreach_") if any(name.startswith(f) for name in operations.names)]
    assert found[:1] == ([family] if family else [])


@pytest.mark.parametrize("how", ["single", "foreach"])
@pytest.mark.parametrize("kind", TORCH)
def test_steps_are_counted_in_float32_whatever_the_default_dtype(kind, how):
    optimizer, params = ours(kind, 0.1, **IMPLEMENTATIONS[how]), make()
    state = optimizer.init(params)._replace(step=300)
    want, _ = optimizer.update(params, state, params)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got, _ = optimizer.update(params, state, params)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(got, want)


OPTIMIZERS = {
    "rate that is a tensor": optim.adam(torch.tensor(1e-2, dtype=torch.float64), betas=(0.7, 0.95), eps=1e-3),
    "weight decay by leaf": optim.adamw(1e-2, weight_decay=0.05, decays=lambda path, leaf: leaf.ndim == 2),
    "schedule": optim.adamw(optim.cosine(1e-2, 8, warmup=2), weight_decay=0.05, foreach=True),
    "fused": optim.adamw(1e-2, weight_decay=0.05, fused=True),
    "no leaf decays": optim.adamw(1e-2, weight_decay=0.05, decays=lambda path, leaf: False),
}


def test_a_compiled_update_has_the_bits_of_a_plain_one():
    """Strided, 0-d and empty leaves of three dtypes, which are not written to."""

    def mixed(seed):
        dtypes = {"w": torch.float64, "b": torch.bfloat16, "big": torch.bfloat16}
        made = {path: leaf.to(dtypes.get(path, torch.float32)) for path, leaf in make(seed=seed).items()}
        return made | {"big": made["big"].T.contiguous().T}

    def updates(grads, states, params):
        return {how: o.update(grads, states[how], params[how]) for how, o in OPTIMIZERS.items()}

    torch._dynamo.reset()
    compiled, starts = torch.compile(updates, fullgraph=True, backend="eager"), mixed(0)
    wanted = {how: (starts, o.init(starts)) for how, o in OPTIMIZERS.items()}
    found = {how: (starts, numbers_as_tensors(state)) for how, (_, state) in wanted.items()}
    for seed in range(1, 4):
        grads = mixed(seed)
        found, wanted = (
            call(grads, {how: end[1] for how, end in ends.items()}, {how: end[0] for how, end in ends.items()})
            for call, ends in ((compiled, found), (updates, wanted))
        )
        assert_equal(grads, mixed(seed))
    torch._dynamo.reset()
    assert_equal(starts, mixed(0))
    for how, (params, state) in found.items():
        assert_equal(params, wanted[how][0])
        assert_equal(*(tree.flatten(numbers_as_tensors(own)) for own in (state, wanted[how][1])))
        assert params["big"].stride() == starts["big"].stride()


def test_an_update_that_is_differentiated_or_batched_is_traced():
    params, optimizer = {"w": torch.ones(3)}, optim.adam(0.1)
    state = numbers_as_tensors(optimizer.init(params))
    end = lambda w: optimizer.update({"w": w}, state, params)[0]["w"].sum()  # noqa: E731
    lr = torch.tensor(0.1, requires_grad=True)
    rated = optim.adam(lambda step: lr)
    calls = {
        "plain": lambda w: end(w),
        "grad": torch.func.grad(end),
        "vmap": lambda w: torch.func.vmap(end)(w[None]),
        "rate": lambda w: rated.update({"w": w}, state, params)[0]["w"],
    }
    operations = {}
    for name, call in calls.items():

        def keep(module, inputs, name=name):
            operations[name] = sum(str(node.target) == "smat_fn.adam" for node in module.graph.nodes)
            return module.forward

        torch._dynamo.reset()
        torch.compile(call, fullgraph=True, backend=keep)(torch.ones(3))
    torch._dynamo.reset()
    assert operations == {"plain": 1, "grad": 0, "vmap": 0, "rate": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_steps_and_rates_that_stay_on_a_device_give_the_values_of_the_fused_kernel(dtype):
    optimizer, params, grads = ours("adamw", 1e-2, fused=True), make(dtype), gradients(dtype)[:3]
    wanted, state = run(optimizer, params, grads)
    trees = [list(tree.clone(params).values()), *([torch.zeros_like(p) for p in params.values()] for _ in range(2))]
    for count, g in enumerate(grads):
        step, lr = torch.tensor(count), torch.tensor(1e-2, dtype=torch.float64)
        numbers = adam._Numbers(0.9, 0.999, 1e-8, 0.05)
        adam._write_unread(trees[0], list(g.values()), *trees[1:], step, lr, numbers)
    for own, expected in zip(trees, (wanted, state.mu, state.nu), strict=True):
        torch.testing.assert_close(
            own, list(expected.values()), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-8
        )


def numbers_as_tensors(state):
    return torch.utils._pytree.tree_map(torch.as_tensor, state)


def _values(result):
    return {name: p.detach() for name, p in result[0].items()}


def test_weight_decay_is_decoupled():
    params, zero = make(), tree.tree_map(torch.zeros_like, make())
    got, _ = optim.adamw(0.5, weight_decay=0.25).update(zero, optim.adamw(0.5, weight_decay=0.25).init(params), params)
    assert_equal(got, {name: leaf * 0.875 for name, leaf in params.items()})


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("kind", TORCH)
def test_a_schedule_is_the_learning_rate_of_each_step(kind, warmup):
    schedule = optim.cosine(3e-2, STEPS, warmup=warmup)
    params, grads = make(), gradients()
    got, _ = run(ours(kind, schedule), params, grads)
    # torch multiplies the lambda by the optimizer's learning rate: one, so that it is the schedule's own number
    want = run_torch(kind, params, grads, 1.0, schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, schedule))
    assert_equal(got, _values(want))


def test_a_schedule_stands_beside_torch_cosine_annealing():
    def annealing(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    params, grads = make(torch.float64), gradients(torch.float64)
    got, _ = run(optim.adam(optim.cosine(3e-2, STEPS)), params, grads)
    want = _values(run_torch("adam", params, grads, 3e-2, schedule=annealing))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", TORCH)
def test_pure_and_donated_have_the_same_bits(kind, how):
    optimizer = ours(kind, 1e-2, **IMPLEMENTATIONS[how])
    params, grads = make(), gradients()
    copies = tree.clone(params), [tree.clone(g) for g in grads]
    pure, state = run(optimizer, params, grads)
    assert_equal(params, copies[0])
    kept = tree.clone(state.mu), tree.clone(state.nu), tree.clone(pure)
    optimizer.update(grads[0], state, pure)
    for got, want in zip((state.mu, state.nu, pure), kept, strict=True):
        assert_equal(got, want)

    own = tree.clone(params)
    donated, donated_state = run(optimizer, own, grads, donate=True)
    assert_equal(donated, pure)
    assert_equal(donated_state.mu, state.mu)
    assert_equal(donated_state.nu, state.nu)
    assert all(donated[name] is own[name] for name in own)
    for g, copy in zip(grads, copies[1], strict=True):
        assert_equal(g, copy)


def test_nested_trees_are_flat_trees():
    flat, grads = make(), gradients()
    nest = lambda d: {"a": [d["w"], (d["b"], d["scalar"])], "z": {"e": d["empty"], "g": d["big"]}}  # noqa: E731
    got, state = run(optim.adam(1e-2), nest(flat), [nest(g) for g in grads])
    want, want_state = run(optim.adam(1e-2), flat, grads)
    for a, b in ((got, want), (state.mu, want_state.mu), (state.nu, want_state.nu)):
        assert_equal(tree.flatten(a), tree.flatten(nest(b)))
    assert type(got["a"][1]) is tuple


def test_parameters_that_require_grad_give_results_that_do_not():
    params = {"w": torch.ones(2, requires_grad=True)}
    got, state = run(optim.adam(0.1), params, [{"w": torch.ones(2)}])
    assert not any(leaf.requires_grad for leaf in (got["w"], state.mu["w"], state.nu["w"]))
    assert torch.equal(params["w"].detach(), torch.ones(2))


def test_the_order_of_gradients_does_not_matter():
    params, grads = make(), gradients()
    shuffled = [dict(reversed(g.items())) for g in grads]
    assert_equal(run(optim.adam(0.1), params, shuffled)[0], run(optim.adam(0.1), params, grads)[0])


@pytest.mark.parametrize("kind", TORCH)
def test_a_state_that_was_saved_goes_on_with_the_same_bits(kind, tmp_path):
    optimizer = ours(kind, optim.cosine(1e-2, STEPS))
    params, grads = make(torch.bfloat16), gradients(torch.bfloat16)
    want, _ = run(optimizer, params, grads)
    half, state = run(optimizer, params, grads[:5])
    saved = {"params": half, "mu": state.mu, "nu": state.nu}
    checkpoint.save_expert(tmp_path / "e", saved, {"step": state.step})
    loaded, manifest = checkpoint.load_expert(tmp_path / "e", saved)
    got, state = loaded["params"], optim.AdamState(manifest["step"], loaded["mu"], loaded["nu"])
    for g in grads[5:]:
        got, state = optimizer.update(g, state, got)
    assert_equal(got, want)


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf, -1e-3])
def test_bad_learning_rates_are_refused(lr):
    for build in (optim.adam, lambda x: optim.adamw(x, weight_decay=0.0), optim.constant, lambda x: optim.cosine(x, 5)):
        with pytest.raises(ValueError, match=f"learning rate is {lr}, must be finite and not negative"):
            build(lr)
    start = {"w": torch.ones(2)}
    falling = optim.adam(lambda step: lr)  # as a decay that runs on after its end
    with pytest.raises(ValueError, match=f"step 0 of the schedule: learning rate is {lr}"):
        falling.update(start, falling.init(start), start)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.vmap], ids=["plain", "vmap"])
def test_gradients_of_another_dtype_are_named(transform):
    params, adam = {"w": torch.ones(2), "b": torch.ones(2)}, optim.adam(0.1)
    wrong = r"^the gradient of parameter 'w' is bfloat16, the parameter float32: cast the gradient$"
    with pytest.raises(ValueError, match=wrong):
        transform(lambda g: adam.update({"w": g, "b": torch.ones(2)}, adam.init(params), params)[0])(
            torch.ones(2, 2, dtype=torch.bfloat16)[0 if transform is not torch.func.vmap else slice(None)]
        )


def test_all_bad_hyperparameters_are_listed_at_once():
    with pytest.raises(ValueError, match=r"betas are \(0\.9, 0\.99, 0\.999\): give two numbers"):
        optim.adam(1e-3, betas=(0.9, 0.99, 0.999))
    with pytest.raises(ValueError, match=r"betas are 0\.9: give two numbers; lr is a tensor, which foreach=True"):
        optim.adam(torch.tensor(1e-3), betas=0.9, foreach=True)
    with pytest.raises(ValueError, match="learning rate is nan") as caught:
        optim.adamw(math.nan, weight_decay=-1.0, betas=(1.0, math.nan), eps=math.inf)
    text = str(caught.value)
    for part in (
        "beta 1.0 is outside [0, 1)",
        "beta nan is outside",
        "eps is inf, must be finite",
        "weight_decay is -1.0",
    ):
        assert part in text


def test_trees_that_do_not_match_are_refused():
    params = make()
    optimizer = optim.adam(0.1)
    with pytest.raises(ValueError, match="parameter 'i' of params has dtype int64"):
        optimizer.init({"i": torch.tensor([1])})
    wrong = {**make(), "w": torch.zeros(3, 5), "new": torch.zeros(1)}
    del wrong["b"]
    with pytest.raises(ValueError, match="grads lacks parameter 'b' of params") as caught:
        optimizer.update(wrong, optimizer.init(params), params)
    assert "grads has parameter 'new' that params lacks" in str(caught.value)
    assert "parameter 'w' has shape (3, 5) in grads but (5, 3) in params" in str(caught.value)


def test_a_state_of_other_parameters_or_of_another_optimizer_is_refused():
    params, other = {"w": torch.ones(2, 2), "b": torch.ones(2)}, {"w": torch.ones(3, 3), "c": torch.ones(2)}
    adam, every = optim.adam(0.1), lambda path, leaf: True
    kinds = {
        "mu": adam,
        "momentum": optim.muon(0.1, rest=adam),
        "optimizer": optim.chain(adam),
        "average": optim.averaged(adam, optim.ema(0.9)),
        "rest": optim.partition(every, adam, adam),
    }
    for field, optimizer in kinds.items():
        with pytest.raises(
            ValueError, match=r"^the optimizer's state is of other parameters \(.* has shape \(3, 3\)"
        ) as told:
            optimizer.update(params, optimizer.init(other), params)
        assert field == "momentum" or "lacks parameter 'b' of params" in str(told.value)
        assert str(told.value).endswith("returned for these")
        with pytest.raises(ValueError, match=r"^the optimizer's state is a tuple, which has no "):
            optimizer.update(params, (0, params), params)
        others = {own for own in kinds.values() if own is not optimizer}
        for another in others:  # the chain's one field is a field of an average too
            with pytest.raises(
                ValueError, match=r"^the optimizer's state is a \w+State, which has (no|an unknown field) \w+:"
            ):
                optimizer.update(params, another.init(params), params)
    state = adam.init(other)._replace(step=torch.tensor(0))
    with pytest.raises(ValueError, match="mu lacks parameter 'b' of params"):
        adam.update(params, state, params)


def test_an_optimizer_is_a_pair_of_functions():
    assert isinstance(optim.adam(0.1), Optimizer)
    assert isinstance(optim.adamw(0.1, weight_decay=0.0), Optimizer)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_gradients_with_other_strides_count_by_their_positions(how):
    params, generator = {"w": torch.arange(12.0).reshape(4, 3)}, torch.Generator().manual_seed(5)
    grads = [torch.randn(3, 4, generator=generator).t() for _ in range(3)]  # as autograd gives them for x @ w.t()
    assert all(g.stride() != params["w"].stride() for g in grads)
    optimizer = optim.adam(0.1, **IMPLEMENTATIONS[how])
    found, _ = run(optimizer, params, [{"w": g} for g in grads])
    wanted, _ = run(optimizer, params, [{"w": g.contiguous()} for g in grads])
    assert_equal(found, wanted)
