"""What every training method owes its user. A new method file joins by one entry in ``METHODS``."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import smat_fn.mat
from smat_fn import optim, random, tree
from smat_fn.testing import assert_trees_close, verify_donation
from smat_fn.types import Method, Micro, Optimizer, Params


def by_name(path):
    """A factor of alpha."""
    return 1.5 if path in ("blocks.0.w", "a") else 0.5


# file -> (hyperparameters to run with, by label; bad hyperparameters and the text that refuses each)
METHODS = {
    "finetune": ({"": {}}, {}),
    "smat": (
        {
            "every third": {"period": 3, "sigma": 0.01},
            "always": {"period": 1, "sigma": 0.01, "noise": "gaussian"},
            "mixed": {"lam": 0.3, "sigma": 0.01},
            "climbing": {"period": 3, "sigma": 0.01, "climb": "clean", "rho": 0.05},
            "by leaf": {"period": 2, "sigma": 0.5, "sigma_of": "leaf", "alpha_max": 1.5},
            "by update": {"period": 2, "sigma": 0.5, "sigma_of": "update"},
            "by depth in pairs": {"period": 2, "alpha_depth": by_name, "antithetic": True},
            "climbing always": {"period": 2, "sigma": 0.01, "climb": "both", "rho": 0.05},
        },
        {
            "alpha_min": (1.5, "alpha_min is 1.5"),
            "drop_prob": (1.0, "drop_prob is 1.0"),
            "sigma": (-1.0, "sigma is -1.0"),
            "noise": ("pink", "noise is 'pink'"),
            "period": (0, "period is 0"),
            "alpha_max": (math.inf, "alpha_max is inf"),
            "sigma_of": ("tree", "sigma_of is 'tree'"),
            "climb": ("up", "climb is 'up'"),
            "alpha_depth": ((0.5, math.nan), "high is nan, must be finite"),
            "rho": (-1.0, "rho is -1.0"),
            "lam": (2.0, "lam is 2.0"),
        },
    ),
    "asam": (
        {"": {"rho": 0.05}, "sam": {"rho": 0.05, "adaptive": False}},
        {"rho": (-1.0, "rho is -1.0"), "adaptive": ("False", "adaptive is 'False', must be True or False")},
    ),
    "l2sp": ({"": {"pull": 0.05}}, {"pull": (-1.0, "pull is -1.0")}),
    "mixout": ({"": {"drop_prob": 0.3}}, {"drop_prob": (1.0, "the probability of taking the base's weight")}),
    "msam": (
        {"": {"rho": 0.05}, "gradient": {"rho": 0.05, "along": "gradient"}, "plain": {"rho": 0.05, "adaptive": False}},
        {"rho": (math.inf, "rho is inf"), "along": ("up", "along is 'up'"), "adaptive": (0, "adaptive is 0, must be")},
    ),
    "talos": (
        {
            "": {"sparsity": 0.5, "rounds": 2, "calibration": 2},
            "one round": {"sparsity": 0.2, "rounds": 1, "calibration": 1},
        },
        {
            "sparsity": (1.0, "sparsity is 1.0, must lie in"),
            "rounds": (0, "rounds is 0"),
            "calibration": (0, "calibration is 0"),
        },
    ),
    "mergopt": (
        {"": {"b": 0.01, "k_max": 4}},
        {"b": (math.inf, "b is inf"), "k_max": (0, "k_max is 0")},
    ),
    "orthoreg": (
        {"": {"lambda_reg": 0.01}},
        {"lambda_reg": (-0.1, "lambda_reg is -0.1"), "block_only": ("no", "block_only is 'no', must be")},
    ),
}
FILES = sorted(
    f.stem
    for f in Path(smat_fn.mat.__file__).parent.glob("*.py")
    if not f.stem.startswith("_") and f.stem not in ("ascent", "step", "simulated", "sigma_units", "weights")
)
RUNS = [pytest.param(name, kw, id=f"{name} {label}") for name in METHODS for label, kw in METHODS[name][0].items()]
each_run = pytest.mark.parametrize(("name", "hyper"), RUNS)
# one run of each method, of smat one of each kind of step; the others are slow
ONE = {f"{name} {next(iter(METHODS[name][0]))}" for name in METHODS} | {"smat mixed", "smat climbing always"}
FEW = [pytest.param(*run.values, id=run.id, marks=[pytest.mark.slow] * (run.id not in ONE)) for run in RUNS]
few_runs = pytest.mark.parametrize(("name", "hyper"), FEW)
each_engine = pytest.mark.parametrize("engine", ["func", "autograd"])
KEY = random.key(17)


def method(name, *args, **kwargs):
    return importlib.import_module(f"smat_fn.mat.{name}").build(*args, **kwargs)


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(dtype=torch.float32, seed=0):
    """A nested tree with every kind of node."""
    return {
        "blocks": [{"w": randn(4, 3, seed=seed, dtype=dtype), "b": randn(3, seed=seed + 1, dtype=dtype)}],
        "head": (randn(3, 2, seed=seed + 2, dtype=dtype), randn(seed=seed + 3, dtype=dtype)),
    }


def in_block(path, leaf):
    return path == "blocks.0.w"


def regression(params, batch):
    """Least squares of a two-layer linear network."""
    x, y = batch
    block, (head, shift) = params["blocks"][0], params["head"]
    out = (x @ block["w"] + block["b"]) @ head + shift
    return ((out - y) ** 2).mean(), {"out": out.detach()}


def quadratic(params, batch):
    """``mean(batch) / 2 * |theta|^2``: its gradient at theta is ``mean(batch) * theta``."""
    return sum((0.5 * leaf**2).sum() for leaf in tree.flatten(params).values()) * batch.mean(), None


def bowl(params, batch):
    """``|theta - 1|^2 / 2``, seen through a noisy batch."""
    return sum(0.5 * (leaf - 1 - batch).square().mean() for leaf in tree.flatten(params).values()), None


def batches(count, dtype=torch.float32):
    return [(randn(8, 4, seed=50 + i, dtype=dtype), randn(8, 2, seed=90 + i, dtype=dtype)) for i in range(count)]


def run(m, params, data, key=KEY):
    """(last state, all infos)."""
    state, infos = m.init(params), []
    for batch in data:
        state, info = m.update(key, state, batch)
        infos.append(info)
    return state, infos


class Recorded(NamedTuple):
    """State of a recorder."""

    momentum: Params
    grads: Params


def recorder():
    """An optimizer that leaves params alone and keeps the gradients it is given; its momentum stays what it was."""

    def update(grads, state, params, *, donate=False):
        return params, state._replace(grads=tree.clone(grads))

    return Optimizer(lambda params: Recorded(tree.tree_map(torch.ones_like, params), ()), update)


def tensors(thing):
    """Every tensor in any nest of tuples, lists and mappings."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        return [leaf for value in thing.values() for leaf in tensors(value)]
    return [leaf for value in thing for leaf in tensors(value)] if isinstance(thing, (list, tuple)) else []


def to_numpy(state):
    def convert(leaf):
        if not isinstance(leaf, torch.Tensor):
            return np.asarray(leaf)
        leaf = leaf.detach().clone()
        if leaf.dtype == torch.bfloat16:
            return leaf.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return leaf.numpy()

    return jax.tree_util.tree_map(convert, state)


def assert_bits(a, b):
    left, right = tensors(a), tensors(b)
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_every_method_file_has_an_entry_here():
    assert sorted(METHODS) == FILES, "add the new method, its hyperparameters and its bad values to METHODS"
    assert sorted(smat_fn.mat.__all__) == FILES
    registered = smat_fn.mat.METHODS + smat_fn.mat.MORE_METHODS
    assert set(registered) == set(get_args(smat_fn.mat.MethodConfig))
    assert {config.__module__.rpartition(".")[2] for config in registered} == set(FILES)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_file_has_state_info_and_build(name):
    module = importlib.import_module(f"smat_fn.mat.{name}")
    assert module.State._fields[:3] == ("params", "opt_state", "step")
    assert {"loss", "grad_norm"} <= set(module.Info._fields)
    built = module.build(regression, optim.adam(0.1), parameters())
    assert isinstance(built, Method)
    assert built.update.__name__ == "update"
    assert "Args:" in built.update.__doc__
    assert "Source:" in module.build.__doc__
    assert "Raises:" in module.build.__doc__


@each_run
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
def test_state_keeps_its_structure_shapes_and_dtypes(name, hyper, dtype):
    m = method(name, regression, optim.adamw(0.01, weight_decay=0.1), parameters(dtype), where=in_block, **hyper)
    state = m.init(parameters(dtype, seed=5))
    first = to_numpy(state)
    for step, batch in enumerate(batches(4, dtype)):
        state, info = m.update(KEY, state, batch)
        assert type(state) is importlib.import_module(f"smat_fn.mat.{name}").State
        assert state.step == step + 1
        now = to_numpy(state)
        chex.assert_trees_all_equal_structs(first, now)
        chex.assert_trees_all_equal_shapes(first, now)
        chex.assert_trees_all_equal_dtypes(first, now)
        assert all(leaf.dtype == dtype for leaf in tensors(state.params))
        assert all(leaf.isfinite().all() for leaf in tensors(state))
        assert info.loss.shape == info.grad_norm.shape == ()
        assert info.loss.isfinite()
        assert info.grad_norm.isfinite()
        assert info.grad_norm > 0
        assert info.grad_norm.dtype == torch.float32
        assert not any(leaf.requires_grad for leaf in tensors([info, state]))
        scalars = [leaf for field, value in info._asdict().items() if field != "aux" for leaf in tensors(value)]
        assert all(leaf.shape == () for leaf in scalars)


@each_run
@pytest.mark.parametrize(
    ("engine", "max_grad_norm"),
    [
        *(("func", 0.1), ("autograd", None)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("func", None), ("autograd", 0.1))),
    ],
)
def test_inputs_are_never_changed(name, hyper, engine, max_grad_norm):
    params, base, data, key = parameters(seed=5), parameters(), batches(4), KEY.clone()
    m = method(name, regression, optim.adam(0.01), base, engine=engine, max_grad_norm=max_grad_norm, **hyper)
    given = [params, base, data, key]
    copy = [leaf.clone() for leaf in tensors(given)]
    states, state = [], m.init(params)
    for batch in data:
        states.append((state, [leaf.clone() for leaf in tensors(state)]))
        state, _ = m.update(key, state, batch)
    assert_bits(given, copy)
    for old, old_copy in states:
        assert_bits(old, old_copy)


@each_run
def test_the_same_key_gives_the_same_bits(name, hyper):
    m = method(name, regression, optim.adam(0.01), parameters(), **hyper)
    state, infos = run(m, parameters(seed=5), batches(4))
    again, infos_again = run(m, parameters(seed=5), batches(4))
    assert_bits([state, infos], [again, infos_again])
    # from the middle, and with a fresh method: all state is in the state
    state, _ = run(m, parameters(seed=5), batches(4)[:2])
    m = method(name, regression, optim.adam(0.01), parameters(), **hyper)
    for batch in batches(4)[2:]:
        state, _ = m.update(KEY, state, batch)
    assert_bits(state, again)


@each_run
@pytest.mark.parametrize("engine", ["func", pytest.param("autograd", marks=pytest.mark.slow)])
def test_no_operation_of_a_step_lacks_a_deterministic_form_on_cuda(name, hyper, engine, as_on_cuda):
    muon = optim.chain(optim.clip_by_global_norm(1.0), optim.muon(0.01, rest=optim.adamw(0.01, weight_decay=0.1)))
    optimizer = optim.averaged(muon, optim.ema(0.9))
    m = method(name, regression, optimizer, parameters(), engine=engine, **{"max_grad_norm": 0.1, **hyper})
    with as_on_cuda():  # in which no compiled loop runs, as on CUDA
        steps = run(m, parameters(seed=5), batches(3))
    assert_bits(steps, run(m, parameters(seed=5), batches(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@each_run
@each_engine
def test_steps_on_a_gpu_are_those_of_the_cpu_within_rounding(name, hyper, engine):
    ends = []
    for device in ("cpu", "cuda"):
        params, data = (tree.tree_map(lambda leaf, at=device: leaf.to(at), part) for part in (parameters(), batches(7)))
        trained = method(name, regression, optim.adam(1e-2), params, where=in_block, engine=engine, **hyper)
        state, infos = run(trained, tree.tree_map(lambda leaf: leaf + 0.01, params), data)
        ends.append([{path: leaf.cpu() for path, leaf in tree.flatten(state.params).items()}, infos[-1].loss.cpu()])
    assert_trees_close(*ends, rtol=1e-4, atol=1e-5)


@each_run
def test_global_random_state_plays_no_part(name, hyper):
    m = method(name, regression, optim.adam(0.01), parameters(), **hyper)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(run(m, parameters(seed=5), batches(3))[0])
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(after, torch.rand(1))
    assert_bits(*results)


@few_runs
@pytest.mark.parametrize(
    ("engine", "max_grad_norm", "micro"),
    [
        *(("func", None, False), ("autograd", 0.1, True)),
        *(pytest.param("func", *both, marks=pytest.mark.slow) for both in ((0.1, True), (0.1, False), (None, True))),
        *(pytest.param("autograd", *b, marks=pytest.mark.slow) for b in ((None, False), (0.1, False), (None, True))),
    ],
)
def test_donation_has_the_same_bits_and_spares_the_users_tensors(name, hyper, engine, max_grad_norm, micro):
    params, base, data = parameters(seed=5), parameters(), batches(6)
    data = [[Micro(one) for one in step] for step in (data[:3], data[3:], data[1:4])] if micro else data
    options = {"max_grad_norm": max_grad_norm, "engine": engine, "where": in_block, **hyper}
    build = lambda donate: method(name, regression, optim.adam(0.01), base, donate=donate, **options)  # noqa: E731
    verify_donation(build, params, data, key=KEY, untouched=base)
    # the base itself is a fine start
    verify_donation(build, base, data, key=KEY)


def test_donation_that_does_harm_is_found():
    params, data = parameters(seed=5), batches(2)

    def build(optimizer):
        return lambda donate: method("finetune", regression, optimizer(donate), params, donate=donate)

    def other(donate):
        adam = optim.adam(0.01)
        rate = 2.0 if donate else 1.0
        scaled = lambda grads: tree.tree_map(lambda g: rate * g, grads)  # noqa: E731
        return Optimizer(adam.init, lambda g, state, p, **how: adam.update(scaled(g), state, p, **how))

    def elsewhere(donate):
        adam = optim.adam(0.01)
        return Optimizer(adam.init, lambda grads, state, p, **how: adam.update(grads, state, tree.clone(p)))

    def careless(donate):
        def update(grads, state, own, **how):
            for leaf in tensors(params) if how else ():
                leaf.add_(1.0)
            return own, state

        return Optimizer(lambda own: None, update)

    for optimizer, told in ((other, "differs in"), (elsewhere, "do not lie where"), (careless, "params")):
        with pytest.raises(AssertionError, match=told):
            verify_donation(build(optimizer), params, data, key=KEY)


def test_donation_needs_an_optimizer_that_takes_it():
    params, own = parameters(), optim.adam(0.01)
    strict = Optimizer(own.init, lambda grads, state, leaves: own.update(grads, state, leaves))
    with pytest.raises(ValueError, match=r"donate=True needs an optimizer whose update takes donate: add \*, donate=F"):
        method("finetune", regression, strict, params, donate=True)


@few_runs
@each_engine
def test_donation_with_leaves_that_share_one_gradient(name, hyper, engine):
    def shared(params, batch):
        return ((params["a"] + params["b"] - batch) ** 2).sum() + params["c"].sum(), None

    params = {name: randn(3, seed=i) for i, name in enumerate("abc")}
    base = tree.tree_map(torch.zeros_like, params)
    options = {"max_grad_norm": 0.5, "engine": engine, **hyper}
    pure, donating = (method(name, shared, optim.adam(0.1, eps=1.0), base, donate=d, **options) for d in (False, True))
    assert_bits(run(pure, params, [torch.ones(3)] * 3), run(donating, params, [torch.ones(3)] * 3))


@each_run
@pytest.mark.parametrize("weights", [pytest.param([0.0, 2.0], marks=pytest.mark.slow), [0.0, 0.0, 4.0, 0.0]])
def test_a_list_of_micro_batches_is_the_whole_batch(name, hyper, weights):
    # with these weights every sum is exact, so that one draw for all micro-batches is a matter of bits
    params, base = parameters(torch.float64, seed=5), parameters(torch.float64)
    m = method(name, quadratic, recorder(), base, where=in_block, **hyper)
    whole = torch.tensor([[w] * 4 for w in weights], dtype=torch.float64)
    state, other = m.init(params), m.init(params)
    for _ in range(4):
        state, info = m.update(KEY, state, whole)
        other, micro_info = m.update(KEY, other, [Micro(row) for row in whole])
        assert_bits(state.opt_state.grads, other.opt_state.grads)
        assert_bits([info.loss, info.grad_norm], [micro_info.loss, micro_info.grad_norm])


@few_runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_are_averaged_within_rounding(name, hyper, dtype):
    m = method(name, regression, recorder(), parameters(dtype), **hyper)
    (x, y), params = batches(1, dtype)[0], parameters(dtype, seed=5)
    whole, _ = m.update(KEY, m.init(params), (x, y))
    parts, info = m.update(KEY, m.init(params), [Micro((x[i : i + 2], y[i : i + 2])) for i in range(0, 8, 2)])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.2}
    torch.testing.assert_close(tensors(parts.opt_state.grads), tensors(whole.opt_state.grads), **tolerance)
    assert {leaf.dtype for leaf in tensors(parts.opt_state.grads)} == {dtype}
    assert len(tensors(info.aux)) % 4 == 0


def test_micro_batches_in_bf16_are_added_in_float32():
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    m = method("finetune", lambda p, batch: ((p["w"] * batch).sum(), None), recorder(), params)
    data = [Micro(torch.full((2,), value, dtype=torch.bfloat16)) for value in (256.0, 1.0, 1.0, 6.0)]
    state, _ = m.update(KEY, m.init(params), data)
    # 256 + 1 is 256 in bfloat16
    assert state.opt_state.grads["w"].tolist() == [66.0, 66.0]
    assert state.opt_state.grads["w"].dtype == torch.bfloat16


@each_run
def test_no_micro_batch_at_all_is_refused(name, hyper):
    m = method(name, regression, optim.adam(0.1), parameters(), **hyper)
    with pytest.raises(ValueError, match="the batch is an empty list: give one batch, or a list of at least one Micro"):
        m.update(KEY, m.init(parameters()), [])


@few_runs
def test_clipping_is_that_of_the_optimizer_room(name, hyper):
    params = parameters(seed=5)
    free, clipped = (
        method(name, regression, recorder(), parameters(), max_grad_norm=bound, **hyper) for bound in (None, 0.25)
    )
    state, other = free.init(params), clipped.init(params)
    for batch in batches(3):
        state, info = free.update(KEY, state, batch)
        other, clipped_info = clipped.update(KEY, other, batch)
        want, norm = optim.clip(state.opt_state.grads, 0.25)
        assert_bits(other.opt_state.grads, want)
        # the norm that is shown is the one before clipping
        assert_bits([info.grad_norm, clipped_info.grad_norm], [norm, norm])
        assert norm > 0.25
        assert tree.global_norm(other.opt_state.grads).item() == pytest.approx(0.25, rel=1e-5)


@few_runs
def test_the_engines_agree_within_rounding(name, hyper):
    params, base, data = parameters(torch.float64, seed=5), parameters(torch.float64), batches(4, torch.float64)
    func, autograd = (
        run(method(name, regression, optim.adam(0.01), base, engine=engine, **hyper), params, data)
        for engine in ("func", "autograd")
    )
    torch.testing.assert_close(tensors(func), tensors(autograd), rtol=1e-9, atol=1e-11)


@few_runs
@each_engine
def test_parameters_of_a_module_train_without_a_graph(name, hyper, engine):
    params = tree.tree_map(lambda leaf: torch.nn.Parameter(leaf.clone()), parameters(seed=5))
    m = method(name, regression, optim.adam(0.01), params, engine=engine, **hyper)
    state, infos = run(m, params, batches(2))
    assert not any(leaf.requires_grad for leaf in tensors([state, infos]))
    assert all(leaf.grad is None for leaf in tensors(params))
    want, _ = run(m, parameters(seed=5), batches(2))
    assert_bits(state, want)


# frozen coordinates do not converge: test_talos.py looks at the others
@pytest.mark.parametrize(("name", "hyper"), [run for run in FEW if run.values[0] != "talos"])
def test_converges_on_a_convex_quadratic(name, hyper):
    params = tree.tree_map(lambda leaf: torch.full_like(leaf, -2.0), parameters())
    base = tree.tree_map(lambda leaf: torch.full_like(leaf, 0.5), parameters())
    m = method(name, bowl, optim.adam(optim.cosine(0.2, 60)), base, where=in_block, **hyper)
    state, _ = run(m, params, [0.01 * randn(1, seed=i) for i in range(60)])
    start, end = (bowl(p, torch.zeros(1))[0].item() for p in (params, state.params))
    assert start == pytest.approx(4 * 4.5)
    assert end < 0.02 * start


@pytest.mark.parametrize("name", METHODS)
def test_bad_arguments_are_all_listed_at_once(name):
    bad = METHODS[name][1]
    hyper = {argument: value for argument, (value, _) in bad.items()}
    with pytest.raises(ValueError, match=f"{name}: ") as caught:
        method(name, regression, object(), parameters(), max_grad_norm=math.nan, engine="jax", donate="no", **hyper)
    text = str(caught.value)
    shared = "optimizer is a object", "max_grad_norm is nan", "engine is 'jax'", "donate is 'no', must be True or False"
    for part in (*shared, *(words for _, words in bad.values())):
        assert part in text, part


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n in METHODS for a in METHODS[n][1]])
def test_each_bad_hyperparameter_is_refused_alone(name, argument):
    value, words = METHODS[name][1][argument]
    with pytest.raises(ValueError, match=words):
        method(name, regression, optim.adam(0.1), parameters(), **{argument: value})


@each_run
def test_params_that_do_not_match_the_base_are_refused(name, hyper):
    m = method(name, regression, optim.adam(0.1), parameters(), **hyper)
    wrong = {"blocks": [{"w": torch.zeros(3, 4), "bias": torch.zeros(3)}], "head": parameters()["head"]}
    with pytest.raises(ValueError, match=r"parameter 'blocks\.0\.w' has shape") as caught:
        m.init(wrong)
    assert "params lacks parameter 'blocks.0.b' of base" in str(caught.value)
    assert "params has parameter 'blocks.0.bias' that base lacks" in str(caught.value)
    integers = {**parameters(), "blocks": [{"w": torch.zeros(4, 3).long(), "b": torch.zeros(3)}]}
    with pytest.raises(ValueError, match=r"parameter 'blocks\.0\.w' of params has dtype int64"):
        m.init(integers)
    with pytest.raises(ValueError, match=r"parameter 'blocks\.0\.w' of base has dtype int64"):
        method(name, regression, optim.adam(0.1), integers, **hyper).init(parameters())
    other = {"tail" if key == "head" else key: leaf for key, leaf in parameters().items()}
    state = method(name, regression, optim.adam(0.1), other, **hyper).init(other)
    with pytest.raises(
        ValueError,
        match=r"state is of other parameters than the method \('head\.0', 'head\.1', 'tail\.0', 'tail\.1' in",
    ):
        m.update(random.key(0), state, batches(1)[0])
