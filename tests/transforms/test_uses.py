"""Every transform of torch.func, autograd and torch.compile over `simulate` and `reweight`, against closed forms.

The closed forms are written with the mask and noise of `materialise`: s = theta_0 + a m (theta - theta_0) + e and
r = a m u, under the nonlinear loss sum W sin(.), so that second derivatives are not zero.
"""

import shutil

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from smat_fn import execution, random
from smat_fn.simulation import draw, materialise, reweight, simulate
from smat_fn.testing import assert_trees_close, random_tree

# torch's own: forward mode registers decompositions by torch.jit.script, linearize folds constants of a graph
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

SHAPE = 4, 7
T, T0, W, U = (random_tree(seed, {"x": SHAPE}, dtype=torch.float64)["x"] for seed in (1, 2, 3, 4))
KEY, A = random.key(5), torch.tensor(0.7, dtype=torch.float64)
KEYS, ALPHAS = random.split(KEY, 3), torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
DRAW = draw(KEY, alpha_min=0.2, drop_prob=0.4, sigma=0.1)


def only_w(path, leaf):
    return path == "w"


def leaves(x):
    return {"w": x[:3], "b": x[3:]}


def joined(tree):
    return torch.cat([tree["w"], tree["b"]])


def sim(t, t0, k, a):
    return joined(simulate(leaves(t), leaves(t0), DRAW._replace(key=k, scale=a), where=only_w))


def rew(u, k, a):
    return joined(reweight(leaves(u), DRAW._replace(key=k, scale=a), where=only_w))


def sim_loss(t, t0, k, a):
    return (torch.sin(sim(t, t0, k, a)) * W).sum()


def rew_loss(u, k, a):
    return (torch.sin(rew(u, k, a)) * W).sum()


class Closed:
    """Derivatives of both losses by hand, at one key and alpha."""

    def __init__(self, t=T, t0=T0, u=U, k=KEY, a=A):
        mask, noise = materialise(DRAW._replace(key=k), leaves(t), where=only_w)
        m = joined(mask)
        self.state = t0 + a * m * (t - t0) + joined(noise)
        self.c, self.by_alpha = a * m, m * (t - t0)
        self.slope, self.curvature = W * torch.cos(self.state), -W * torch.sin(self.state)
        self.weighted, self.rew_by_alpha = a * m * u, m * u
        self.rew_slope, self.rew_curvature = W * torch.cos(self.weighted), -W * torch.sin(self.weighted)


HERE = Closed()
PER_KEY = [Closed(k=k) for k in KEYS]
PER_BOTH = [Closed(k=k, a=a) for k, a in zip(KEYS, ALPHAS, strict=True)]
MOVED = [Closed(t=T), Closed(t=T + 1)]


def stacked(values, dim=0):
    return torch.stack(list(values), dim)


def diagonal(x):
    return torch.diag(x.flatten()).reshape(SHAPE * 2)


def leaf_grad(fn, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(fn(leaf), leaf)[0]


def dual(fn, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent))).tangent


def compiled_backward(fn, x):
    leaf = x.clone().requires_grad_()
    fn(leaf).backward()
    return leaf.grad


def at(fn):
    """The function of its first argument alone, the others as in the module."""
    return {sim: lambda t: sim(t, T0, KEY, A), sim_loss: lambda t: sim_loss(t, T0, KEY, A)}.get(
        fn, lambda u: fn(u, KEY, A)
    )


EAGER = {
    "forward": (lambda: sim(T, T0, KEY, A), lambda: HERE.state),
    "grad theta": (lambda: grad(sim_loss)(T, T0, KEY, A), lambda: HERE.c * HERE.slope),
    "grad theta_0": (lambda: grad(sim_loss, 1)(T, T0, KEY, A), lambda: (1 - HERE.c) * HERE.slope),
    "grad alpha": (lambda: grad(sim_loss, 3)(T, T0, KEY, A), lambda: (HERE.slope * HERE.by_alpha).sum()),
    "autograd leaf": (lambda: leaf_grad(at(sim_loss), T), lambda: HERE.c * HERE.slope),
    "vjp": (lambda: vjp(at(sim), T)[1](W)[0], lambda: HERE.c * W),
    "hvp": (lambda: grad(lambda t: (grad(at(sim_loss))(t) * U).sum())(T), lambda: HERE.c**2 * HERE.curvature * U),
    "vmap key": (lambda: vmap(lambda k: sim(T, T0, k, A))(KEYS), lambda: stacked(x.state for x in PER_KEY)),
    "vmap key, alpha": (
        lambda: vmap(lambda k, a: sim(T, T0, k, a))(KEYS, ALPHAS),
        lambda: stacked(x.state for x in PER_BOTH),
    ),
    "vmap theta dim 2": (
        lambda: vmap(at(sim), in_dims=2, out_dims=1)(torch.stack([T, T + 1], 2)),
        lambda: stacked((x.state for x in MOVED), 1),
    ),
    "vmap(grad) key": (
        lambda: vmap(lambda k: grad(sim_loss)(T, T0, k, A))(KEYS),
        lambda: stacked(x.c * x.slope for x in PER_KEY),
    ),
    "grad(vmap mean)": (
        lambda: grad(lambda t: vmap(lambda k: sim_loss(t, T0, k, A))(KEYS).mean())(T),
        lambda: stacked(x.c * x.slope for x in PER_KEY).mean(0),
    ),
    "jvp theta": (lambda: jvp(at(sim), (T,), (W,))[1], lambda: HERE.c * W),
    "jvp theta_0": (lambda: jvp(lambda t0: sim(T, t0, KEY, A), (T0,), (W,))[1], lambda: (1 - HERE.c) * W),
    "jvp alpha": (lambda: jvp(lambda a: sim(T, T0, KEY, a), (A,), (torch.ones_like(A),))[1], lambda: HERE.by_alpha),
    "forward over reverse": (lambda: jvp(grad(at(sim_loss)), (T,), (U,))[1], lambda: HERE.c**2 * HERE.curvature * U),
    "hessian": (lambda: hessian(at(sim_loss))(T), lambda: diagonal(HERE.c**2 * HERE.curvature)),
    "jacrev jacrev": (lambda: jacrev(jacrev(at(sim_loss)))(T), lambda: diagonal(HERE.c**2 * HERE.curvature)),
    "jacfwd jacfwd": (lambda: jacfwd(jacfwd(at(sim_loss)))(T), lambda: diagonal(HERE.c**2 * HERE.curvature)),
    "linearize": (lambda: linearize(at(sim), T)[1](W), lambda: HERE.c * W),
    "dual numbers": (lambda: dual(at(sim), T, W), lambda: HERE.c * W),
    "explicit pair, differentiated": (
        lambda: grad(lambda t: (rew(torch.cos(sim(t, T0, KEY, A)) * W, KEY, A) * U).sum())(T),
        lambda: HERE.c**2 * HERE.curvature * U,
    ),
}
REWEIGHT = {
    "forward": (lambda: rew(U, KEY, A), lambda: HERE.weighted),
    "grad gradient": (lambda: grad(rew_loss)(U, KEY, A), lambda: HERE.c * HERE.rew_slope),
    "grad alpha": (lambda: grad(rew_loss, 2)(U, KEY, A), lambda: (HERE.rew_slope * HERE.rew_by_alpha).sum()),
    "autograd leaf": (lambda: leaf_grad(at(rew_loss), U), lambda: HERE.c * HERE.rew_slope),
    "vjp": (lambda: vjp(at(rew), U)[1](W)[0], lambda: HERE.c * W),
    "hvp": (lambda: grad(lambda u: (grad(at(rew_loss))(u) * T).sum())(U), lambda: HERE.c**2 * HERE.rew_curvature * T),
    "vmap key": (lambda: vmap(lambda k: rew(U, k, A))(KEYS), lambda: stacked(x.weighted for x in PER_KEY)),
    "vmap key, alpha": (
        lambda: vmap(lambda k, a: rew(U, k, a))(KEYS, ALPHAS),
        lambda: stacked(x.weighted for x in PER_BOTH),
    ),
    "vmap gradient dim 2": (
        lambda: vmap(at(rew), in_dims=2, out_dims=1)(torch.stack([U, U + 1], 2)),
        lambda: stacked((HERE.c * U, HERE.c * (U + 1)), 1),
    ),
    "vmap(grad) key": (
        lambda: vmap(lambda k: grad(rew_loss)(U, k, A))(KEYS),
        lambda: stacked(x.c * x.rew_slope for x in PER_KEY),
    ),
    "grad(vmap mean)": (
        lambda: grad(lambda u: vmap(lambda k: rew_loss(u, k, A))(KEYS).mean())(U),
        lambda: stacked(x.c * x.rew_slope for x in PER_KEY).mean(0),
    ),
    "jvp gradient": (lambda: jvp(at(rew), (U,), (W,))[1], lambda: HERE.c * W),
    "jvp alpha": (lambda: jvp(lambda a: rew(U, KEY, a), (A,), (torch.ones_like(A),))[1], lambda: HERE.rew_by_alpha),
    "forward over reverse": (
        lambda: jvp(grad(at(rew_loss)), (U,), (T,))[1],
        lambda: HERE.c**2 * HERE.rew_curvature * T,
    ),
    "hessian": (lambda: hessian(at(rew_loss))(U), lambda: diagonal(HERE.c**2 * HERE.rew_curvature)),
    "jacrev jacrev": (lambda: jacrev(jacrev(at(rew_loss)))(U), lambda: diagonal(HERE.c**2 * HERE.rew_curvature)),
    "jacfwd jacfwd": (lambda: jacfwd(jacfwd(at(rew_loss)))(U), lambda: diagonal(HERE.c**2 * HERE.rew_curvature)),
    "linearize": (lambda: linearize(at(rew), U)[1](W), lambda: HERE.c * W),
    "dual numbers": (lambda: dual(at(rew), U, W), lambda: HERE.c * W),
}
# (use with a compiler, expected from the closed forms)
COMPILED = {
    "simulate backward": (lambda c: compiled_backward(c(at(sim_loss)), T), lambda x: x.c * x.slope),
    "simulate grad": (lambda c: c(lambda t, k: grad(sim_loss)(t, T0, k, A))(T, KEY), lambda x: x.c * x.slope),
    "simulate vmap": (
        lambda c: c(lambda ks: vmap(lambda k: sim(T, T0, k, A))(ks))(KEYS),
        lambda x: stacked(Closed(k=k).state for k in KEYS),
    ),
    "simulate jvp": (lambda c: c(lambda t: jvp(at(sim), (t,), (W,))[1])(T), lambda x: x.c * W),
    "reweight backward": (lambda c: compiled_backward(c(at(rew_loss)), U), lambda x: x.c * x.rew_slope),
    "reweight grad": (lambda c: c(lambda u, k: grad(rew_loss)(u, k, A))(U, KEY), lambda x: x.c * x.rew_slope),
    "reweight vmap": (
        lambda c: c(lambda ks: vmap(lambda k: rew(U, k, A))(ks))(KEYS),
        lambda x: stacked(Closed(k=k).weighted for k in KEYS),
    ),
    "reweight jvp": (lambda c: c(lambda u: jvp(at(rew), (u,), (W,))[1])(U), lambda x: x.c * W),
}
NO_CXX = shutil.which("g++") is None and shutil.which("clang++") is None


def check(actual, expected):
    assert_trees_close([actual], [expected], rtol=1e-12, atol=1e-14)


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield lambda backend: lambda fn: torch.compile(fn, fullgraph=True, backend=backend)
    torch._dynamo.reset()


@pytest.mark.parametrize("use", EAGER)
def test_simulate(use):
    actual, expected = EAGER[use]
    check(actual(), expected())


@pytest.mark.parametrize("use", REWEIGHT)
def test_reweight(use):
    actual, expected = REWEIGHT[use]
    check(actual(), expected())


def test_the_rows_are_not_trivial():
    dropped = HERE.c == 0
    assert 0 < dropped.sum() < dropped.numel()
    assert (HERE.c[3] == A).all()
    assert min(x.abs().max() for x in (HERE.curvature, HERE.rew_curvature, HERE.by_alpha)) > 0.1


# seconds each; the others are of the same functions
MORE = (
    "simulate backward",
    "simulate grad",
    "simulate jvp",
    "simulate vmap",
    "reweight backward",
    "reweight vmap",
    "reweight jvp",
)


@pytest.mark.parametrize("use", [pytest.param(use, marks=[pytest.mark.slow] * (use in MORE)) for use in COMPILED])
def test_compiled_without_graph_breaks(compiler, monkeypatch, use):
    # a tenth of the rounds to trace, which compiled loops do not follow; the next test and Inductor's take all
    monkeypatch.setattr(random, "_ROUNDS", 1)
    monkeypatch.setattr(random, "_leaf_table", random._leaf_table.__wrapped__)  # kept tables are of all rounds
    monkeypatch.setattr(execution, "_off", True)
    actual, expected = COMPILED[use]
    check(actual(compiler("aot_eager")), expected(Closed()))


@pytest.mark.slow
def test_a_compiled_draw_and_state_serve_every_key_without_compiling_again(compiler):
    def step(key, t, t0):
        drawn = draw(random.fold_in(key, "step"), alpha_min=0.2, drop_prob=0.4, sigma=0.1, noise="laplace")
        return joined(simulate(leaves(t), leaves(t0), drawn, where=only_w)), drawn.scale

    compiled = compiler("aot_eager")(step)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = [compiled(key, T, T0) for key in KEYS]
    for result, key in zip(results, KEYS, strict=True):
        assert_trees_close(list(result), list(step(key, T, T0)))
    assert len({float(scale) for _, scale in results}) == 3


@pytest.mark.slow
@pytest.mark.skipif(NO_CXX, reason="slow: Inductor needs a C++ compiler")
@pytest.mark.parametrize("use", COMPILED)
def test_compiled_by_inductor(compiler, use):
    actual, expected = COMPILED[use]
    check(actual(compiler("inductor")), expected(Closed()))
