"""Every method inside every transform: a whole update compiles, batches over seeds and experts, and differentiates.

A cell of the matrix holds what a plain run gives, or is refused with its reason.
"""

import collections
import contextlib
import importlib
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from torch.func import grad, jacfwd, jvp, vmap

import smat_fn.mat
import smat_fn.tree
from smat_fn import draw, execution, lora, optim, random, reweight, simulate
from smat_fn.grad import ModuleLoss, value_and_grad
from smat_fn.mat import finetune, smat
from smat_fn.mat.step import as_tensors
from smat_fn.simulation import reweight_and_clip
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree
from smat_fn.types import Micro

# torch's own: Inductor's passes import modules of torch.jit
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

SHAPES = {"w": (4, 6), "b": (6,), "v": (6, 2)}
HYPER = {
    "smat": {"period": 2, "sigma": 0.05, "alpha_min": 0.2, "drop_prob": 0.3},
    "asam": {"rho": 0.1},
    "msam": {"rho": 0.1},
    "mergopt": {"b": 0.01},
    "orthoreg": {"lambda_reg": 0.01},
    "talos": {"sparsity": 0.5, "rounds": 1, "calibration": 1},
}
RUNS = {name: (name, HYPER.get(name, {})) for name in smat_fn.mat.__all__}
RUNS |= {
    "smat every step": ("smat", {"period": 1, "sigma": 0.05, "noise": "gaussian"}),
    "smat mixed": ("smat", {"lam": 0.4, "sigma": 0.05}),
    "smat climbing": ("smat", {"period": 1, "sigma": 0.05, "climb": "both", "rho": 0.1}),
    "smat by the update": ("smat", {"period": 1, "sigma": 0.4, "sigma_of": "update", "alpha_max": 1.5}),
    "smat by leaf": ("smat", {"lam": 0.4, "sigma": 0.4, "sigma_of": "leaf"}),
    "smat by depth in pairs": ("smat", {**HYPER["smat"], "alpha_depth": {"w": 1.5, "v": 0.5}, "antithetic": True}),
    "msam along the gradient": ("msam", {"rho": 0.1, "along": "gradient"}),
}
each = pytest.mark.parametrize("run", RUNS)
each_method = pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.slow] * (run not in smat_fn.mat.__all__)) for run in RUNS]
)
KEY = random.key(3)
ROOT = Path(__file__).resolve().parents[2]
NO_CXX = shutil.which("g++") is None and shutil.which("clang++") is None


def loss_fn(params, batch):
    x, y = batch
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return (hidden @ params["v"] - y).square().mean(), {"hidden": hidden.mean()}


@pytest.mark.parametrize(
    ("name", "options"), [("l2sp", {}), ("smat", {"lam": 0.4}), ("finetune", {})], ids=["l2sp", "mixed", "micro"]
)
def test_a_weight_of_one_number_is_differentiated_as_a_vector_of_one(name, options):
    """Torch's forward derivative of a 0-d number times a Python float is float64."""
    batch = [Micro(torch.tensor(x), x) for x in (1.0, 3.0)] if name == "finetune" else torch.tensor(2.0)
    found = []
    for shape in ((), (1,)):
        base = {"s": torch.full(shape, 0.5)}

        def twice(start, base=base):
            loss = lambda params, x: (x * params["s"].square().sum(), None)  # noqa: E731
            method = importlib.import_module(f"smat_fn.mat.{name}").build(
                loss, optim.adam(0.1), base, engine="func", **options
            )
            state = method.init(base)._replace(params={"s": start})
            for _ in range(2):
                state, _ = method.update(KEY, state, batch)
            return state.params["s"]

        found.append(jvp(twice, (torch.full(shape, 1.5),), (torch.ones(shape),)))
    for one, vector in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one.reshape(1), vector)


def tree(seed, dtype=torch.float32):
    return random_tree(seed, SHAPES, dtype=dtype)


def batches(count, seed=0, dtype=torch.float32):
    made = random_tree(seed + 50, {str(i): (5, 6) for i in range(count)}, dtype=dtype)
    return [(leaf[:, :4], leaf[:, 4:]) for leaf in made.values()]


def only_w(path, leaf):
    return path == "w"


def build(run, base, **options):
    name, hyper = RUNS[run]
    optimizer = optim.chain(optim.clip_by_global_norm(2.0), optim.adamw(optim.cosine(1e-2, 9), weight_decay=0.1))
    options = {"optimizer": optimizer, "where": only_w, "max_grad_norm": 0.5, "engine": "func", **hyper} | options
    return importlib.import_module(f"smat_fn.mat.{name}").build(loss_fn, base=base, **options)


def trained(update, state, data, key=KEY):
    infos = []
    for batch in data:
        state, info = update(key, state, batch)
        infos.append(info)
    return state, infos


def assert_close(found, expected, rtol=1e-4, atol=1e-6):
    """States and infos of two runs, numbers of both as tensors."""
    flat = [torch.utils._pytree.tree_leaves(thing) for thing in (found, expected)]
    assert len(flat[0]) == len(flat[1])
    wide = [[torch.as_tensor(leaf).double() for leaf in leaves] for leaves in flat]
    assert_trees_close(*wide, rtol=rtol, atol=atol)


def row(thing, index):
    return torch.utils._pytree.tree_map(lambda leaf: leaf[index], thing)


@each
def test_a_state_of_tensors_gives_the_same_run(run):
    method = build(run, tree(1))
    found = trained(method.update, as_tensors(method.init(tree(2))), batches(4))
    assert found[0].step.dtype == torch.int64
    assert_close(found, trained(method.update, method.init(tree(2)), batches(4)))


def compiles(run, backend):
    method = build(run, tree(1), donate=True)
    update = torch.compile(method.update, fullgraph=True, backend=backend)
    state, first = as_tensors(method.init(tree(2))), batches(3)
    found = [trained(update, state, first[:1])]
    with torch._dynamo.config.patch(error_on_recompile=True):  # one program for clean and simulated steps
        found.append(trained(update, found[0][0], first[1:]))
    expected = trained(method.update, method.init(tree(2)), first)
    assert_close((found[1][0], found[0][1] + found[1][1]), expected)


@pytest.fixture
def few_rounds(monkeypatch):
    # a tenth of the rounds to trace, which compiled loops do not follow
    monkeypatch.setattr(random, "_ROUNDS", 1)
    monkeypatch.setattr(execution, "_off", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("run", smat_fn.mat.__all__)
def test_an_update_compiles_as_one_graph(run, few_rounds):
    compiles(run, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_a_second_method_with_other_numbers_compiles_too():
    start = {"w": torch.zeros(16)}
    for number in (1e-3, 2e-3):  # which torch takes for a variable from the second one on
        method = smat.build(
            lambda params, batch: ((params["w"] - batch).square().sum(), {}), optim.adam(number), start, sigma=number,
            alpha_min=0.2 + number, alpha_max=1 + number, drop_prob=0.5 + number, max_grad_norm=number, engine="func",
        )  # fmt: skip
        update = torch.compile(method.update, fullgraph=True, backend="eager")
        found, _ = update(KEY, as_tensors(method.init(start)), torch.ones(16))
        assert_close(found.params, method.update(KEY, method.init(start), torch.ones(16))[0].params)


@pytest.mark.slow
@pytest.mark.skipif(NO_CXX, reason="slow: Inductor needs a C++ compiler")
@each
def test_an_update_compiles_by_inductor(run, few_rounds):
    compiles(run, "inductor")


def llama(layers):
    """Meta tensors of the shapes of Llama-3.2-1B, cut to some layers."""
    square, wide = (2048, 2048), (8192, 2048)
    block = {"self_attn.q_proj": square, "self_attn.k_proj": (512, 2048), "self_attn.v_proj": (512, 2048)}
    block |= {"self_attn.o_proj": square, "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1]}
    block |= {"input_layernorm": (2048,), "post_attention_layernorm": (2048,)}
    shapes = {"model.embed_tokens": (128256, 2048), "model.norm": (2048,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    return {f"{name}.weight": torch.empty(s, dtype=torch.bfloat16, device="meta") for name, s in shapes.items()}


def nodes_of(function, *args):
    """Nodes of the one graph that a function compiles to, by name."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    # what meets tensors without values when it runs
    with contextlib.suppress(NotImplementedError):
        torch.compile(function, fullgraph=True, backend=keep)(*args)
    torch._dynamo.reset()
    (graph,) = graphs
    names = (str(node.target).removesuffix(".default") for node in graph.nodes if node.op.startswith("call"))
    return collections.Counter(names)


@pytest.mark.slow
def test_mask_and_noise_of_all_leaves_are_one_operation_of_compiled_code():
    def pair(key, params, base):
        drawn = draw(key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        states = simulate(params, base, drawn, where=lambda path, leaf: "proj" in path)
        return states, smat_fn.tree.global_norm(reweight(states, drawn))

    few, many = (nodes_of(pair, KEY, llama(layers), llama(layers)) for layers in (1, 3))
    names = {"simulate": 1, "reweight": 1, "block_squares": 1, "derive": few["smat_fn.derive"]}
    assert {n.removeprefix("smat_fn."): c for n, c in many.items() if n.startswith("smat_fn.")} == names
    # a leaf is taken out of each list, and there may be another halving of the blocks' sums
    assert 0 < many.total() - few.total() <= 2 * 2 * 9 + 9
    assert few.total() < 200


@pytest.mark.slow
def test_a_step_on_a_billion_coordinates_compiles_to_seven_nodes_a_leaf_besides_its_loss():
    base = llama(16)

    def total(params, batch):
        return sum(leaf.float().sum() for leaf in params.values()) * batch, None

    method = smat.build(total, optim.adamw(1e-3, weight_decay=0.1), base, max_grad_norm=1.0, engine="func")
    one = torch.ones((), device="meta")
    found = nodes_of(method.update, KEY, as_tensors(method.init(base)), one)
    # the second reweighting clips
    wanted = {"simulate": 1, "reweight": 2, "choose_into": 2, "block_squares": 1, "adam": 1}
    assert {name: found[f"smat_fn.{name}"] for name in wanted} == wanted
    own = found - nodes_of(value_and_grad(total), base, one)
    # each operation's result is taken apart, three times for Adam; keys on a device are derived by traced rounds
    assert own.total() < 7 * len(base) + 1200


def test_the_operations_of_a_step_do_not_multiply_with_its_leaves():
    """On the CPU, where keys are derived by an operation too."""
    totals = []
    for count in (2, 5):
        base = {str(i): torch.zeros(2) for i in range(count)}
        optimizer = optim.adamw(optim.cosine(1e-3, 9), weight_decay=0.1)

        def step(key, params, base, state, optimizer=optimizer):
            drawn = draw(key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
            grads, norm = reweight_and_clip(simulate(params, base, drawn), drawn, max_norm=1.0)
            return optimizer.update(grads, state, params), norm

        totals.append(nodes_of(step, KEY, base, base, optimizer.init(base)))
    few, many = totals
    names = dict.fromkeys(("simulate", "block_squares", "adam"), 1)
    for found in totals:
        assert {name: found[f"smat_fn.{name}"] for name in names} == names
    # a leaf is taken out of each result, and there may be more halvings of the blocks' sums
    assert 0 < many.total() - few.total() <= 6 * 3 + 2 * 4
    assert few.total() < 150


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_run_has_the_bits_of_a_plain_one(backend):
    method = build("smat", tree(1, torch.bfloat16), donate=True)
    data = batches(4, dtype=torch.bfloat16)
    torch._dynamo.reset()
    update = torch.compile(method.update, fullgraph=True, backend=backend)
    found, infos = trained(update, as_tensors(method.init(tree(2, torch.bfloat16))), data[:1])
    with torch._dynamo.config.patch(error_on_recompile=True):  # one program for clean and simulated steps
        found, more = trained(update, found, data[1:])
    infos += more
    torch._dynamo.reset()
    wanted, plain = trained(method.update, method.init(tree(2, torch.bfloat16)), data)
    adam, expected = (state.opt_state.optimizer for state in (found, wanted))
    assert (int(adam.step), adam.step.dtype) == (4, torch.int64)
    for own, other in ((found.params, wanted.params), (adam.mu, expected.mu), (adam.nu, expected.nu)):
        assert_trees_equal(own, other)
    for info, other in zip(infos, plain, strict=True):
        assert (info.grad_norm, info.scale, bool(info.simulated)) == (other.grad_norm, other.scale, other.simulated)


@pytest.mark.slow
def test_compiled_states_have_the_bits_of_plain_ones():
    params, base = tree(1, torch.bfloat16), tree(2, torch.bfloat16)

    def state(key, params, base):
        drawn = draw(key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        return simulate(params, base, drawn), reweight(params, drawn)

    torch._dynamo.reset()
    found = torch.compile(state, fullgraph=True, backend="aot_eager")(KEY, params, base)
    torch._dynamo.reset()
    for compiled_tree, plain in zip(found, state(KEY, params, base), strict=True):
        assert_trees_equal(compiled_tree, plain)


@pytest.mark.slow
def test_a_batch_of_experts_compiles(few_rounds):
    method, keys = build("smat", tree(1)), random.split(KEY, 2)
    starts = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), tree(2), tree(3))
    update = torch.compile(vmap(method.update, in_dims=(0, 0, None)), fullgraph=True, backend="aot_eager")
    found = trained(update, vmap(method.init)(starts), batches(2), keys)
    for i in range(2):
        assert_close(row(found, i), trained(method.update, method.init(tree(2 + i)), batches(2), keys[i]))


@each
def test_seeds_are_one_batched_program(run):
    method, keys = build(run, tree(1)), random.split(KEY, 3)

    def whole(key):
        return trained(method.update, method.init(tree(2)), batches(3), key)

    found = vmap(whole)(keys)
    for i, key in enumerate(keys):
        assert_close(row(found, i), trained(method.update, method.init(tree(2)), batches(3), key))


@each_method
def test_experts_are_one_batched_program(run):
    """Each with its own start, data and key, from a stack of states."""
    method, keys = build(run, tree(1)), random.split(KEY, 2)
    states = [as_tensors(method.init(tree(2 + i))) for i in range(2)]
    data = [batches(3, seed=i) for i in range(2)]
    state = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    together = [tuple(map(torch.stack, zip(*pair, strict=True))) for pair in zip(*data, strict=True)]
    found = trained(vmap(method.update), state, together, keys)
    for i in range(2):
        assert_close(row(found, i), trained(method.update, method.init(tree(2 + i)), data[i], keys[i]))


@each
def test_two_steps_have_the_derivative_of_differences(run):
    base, start, u = (tree(seed, torch.float64) for seed in (1, 2, 3))
    first, last = batches(2, dtype=torch.float64), batches(3, dtype=torch.float64)[2]
    method = build(run, base, optimizer=optim.adam(1e-2, eps=1e-3))

    def end(start):
        state, infos = trained(method.update, method.init(start), first)
        return loss_fn(state.params, last)[0] + infos[1].loss

    def along(t):
        return end({path: leaf + t * u[path] for path, leaf in start.items()})

    found = sum((slope * u[path]).sum() for path, slope in grad(end)(start).items())
    assert found.abs() > 1e-4
    # alpha, p and sigma of a draw are float32 in part, differences as large as they are keep six digits
    torch.testing.assert_close(found, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-5, atol=1e-8)


LEARNED = [
    *(("smat every step", name) for name in ("sigma", "alpha_min", "alpha_max")),
    *(("smat mixed", "lam"), ("smat climbing", "rho"), ("asam", "rho"), ("msam", "rho"), ("mergopt", "b")),
    *(("orthoreg", "lambda_reg"), ("l2sp", "pull")),
]


@pytest.mark.parametrize(("run", "name"), LEARNED)
def test_hyperparameters_are_learned_through_two_steps(run, name):
    base, start = (tree(seed, torch.float64) for seed in (1, 2))
    first, last = batches(2, dtype=torch.float64), batches(3, dtype=torch.float64)[2]

    def end(value):
        method = build(run, base, optimizer=optim.adam(0.1, eps=1.0), max_grad_norm=None, **{name: value})
        return loss_fn(trained(method.update, method.init(start), first)[0].params, last)[0]

    number = 1.2 if name == "alpha_max" else 0.2
    value = torch.tensor(number, dtype=torch.float64)
    step = 1e-3 if name.startswith("alpha") else 1e-5  # alpha is rounded to float32
    found, difference = grad(end)(value), (end(value + step) - end(value - step)) / (2 * step)
    assert found.abs() > 1e-6
    torch.testing.assert_close(found, difference, rtol=2e-3, atol=1e-9)
    assert torch.equal(end(value), end(number))
    values = torch.stack([value - 0.1, value + 0.1])
    torch.testing.assert_close(vmap(end)(values), torch.stack([end(v) for v in values]), rtol=1e-9, atol=0)


DIFFERENTIATED = {
    "grad": grad,
    "jvp": lambda fn: lambda p: jvp(fn, (p,), (torch.ones_like(p),)),
    "jacfwd": jacfwd,
    "jvp of grad": lambda fn: lambda p: jvp(lambda q: grad(lambda x: x * fn(q))(p), (p,), (p,)),
    "vmap of jvp": lambda fn: lambda p: vmap(lambda q: jvp(fn, (q,), (q,)))(torch.stack([p, p])),
    "compiled jvp": lambda fn: torch.compile(lambda p: jvp(fn, (p,), (p,)), backend="eager"),
}


def by_drop_prob(run):
    """The loss after a step, as a function of drop_prob."""

    def end(drop_prob):
        method = build(run, tree(1), drop_prob=drop_prob)
        return trained(method.update, method.init(tree(2)), batches(1))[1][0].loss

    return end


@pytest.mark.parametrize("run", ["smat every step", "mixout"])
def test_drop_prob_can_be_a_tensor_and_mapped_over(run, few_rounds):
    end, drop_prob = by_drop_prob(run), torch.tensor(0.25, dtype=torch.float64)
    assert torch.equal(end(drop_prob), end(0.25))
    drop_probs = torch.stack([drop_prob, 2 * drop_prob])
    torch.testing.assert_close(vmap(end)(drop_probs), torch.stack([end(p) for p in drop_probs]))


@pytest.mark.parametrize(
    ("run", "way"),
    [
        pytest.param(run, way, marks=[pytest.mark.slow] if way == "compiled jvp" else [])
        for run in ("smat every step", "mixout")
        for way in DIFFERENTIATED
    ],
)
def test_a_differentiated_drop_prob_raises_in_either_direction(run, way, few_rounds):
    with pytest.raises(Exception, match="drop_prob is differentiated, but the mask is a step function of it: detach"):
        DIFFERENTIATED[way](by_drop_prob(run))(torch.tensor(0.25, dtype=torch.float64))


def test_clean_and_simulated_updates_are_the_two_halves_of_the_schedule():
    whole, clean = build("smat", tree(1)), build("finetune", tree(1))
    every = build("smat every step", tree(1), **{**HYPER["smat"], "period": 1, "noise": "uniform"})
    state = other = whole.init(tree(2))
    for step, batch in enumerate(batches(4)):
        state, _ = whole.update(KEY, state, batch)
        other, _ = (every if smat.is_simulated(step, 2) else clean).update(KEY, other, batch)
    assert_trees_equal(state.params, other.params)


def test_micro_batches_batch_too():
    method, keys = build("smat", tree(1)), random.split(KEY, 2)
    parts = [Micro(batch, weight) for batch, weight in zip(batches(2), (1.0, 3.0), strict=True)]
    found, _ = vmap(lambda key: trained(method.update, method.init(tree(2)), [parts, parts], key))(keys)
    expected, _ = trained(method.update, method.init(tree(2)), [parts, parts], keys[1])
    assert_close(row(found, 1), expected)


@each
def test_what_cannot_be_transformed_says_why(run):
    batch, start = batches(1)[0], tree(2)

    def total(start, method):
        state, _ = method.update(KEY, method.init(start), batch)
        return sum(leaf.sum() for leaf in state.params.values())

    with pytest.raises(ValueError, match="take engine='func'"):
        grad(total)(start, build(run, tree(1), engine="autograd"))
    with pytest.raises(ValueError, match=r"donate=True.*take donate=False"):
        grad(total)(start, build(run, tree(1), donate=True))


def test_offloaded_bases_and_adapters_say_why():
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    base = {name: p.detach() for name, p in module.named_parameters()}
    loss = ModuleLoss(module, lambda module, batch: ((module(batch[0]) - batch[1]).square().mean(), {}))
    batch = batches(1)[0]

    def total(start, method):
        state, _ = method.update(KEY, method.init(start), batch)
        return sum(leaf.sum() for leaf in state.params.values())

    for offload, engine in (("cpu", "func"), ("recompute", "autograd"), ("stream", "autograd")):
        method = smat.build(loss, optim.adam(1e-3), base, period=1, offload=offload, engine=engine)
        with pytest.raises(ValueError, match="take offload=None"):
            grad(total)(base, method)
    adapters = lora.Lora(("0.weight",), rank=2, alpha=4.0)
    method = lora.build(loss, optim.adam(1e-3), base, adapters, period=2, engine="func")
    start = lora.init(KEY, base, adapters)
    with pytest.raises(ValueError, match="take period=1 or lam"):
        method.update(KEY, as_tensors(method.init(start)), batch)
    clean = finetune.build(lambda p, b: loss(p, b), optim.adam(1e-3), base, engine="func")
    assert vmap(lambda x: clean.update(KEY, clean.init(base), (x, batch[1]))[0].step)(batch[0][None]).tolist() == [1]


def test_the_example_trains_experts_as_the_loop_does(capsys):
    runpy.run_path(str(ROOT / "examples" / "batched_experts.py"))["main"](2, 4)
    shown = capsys.readouterr().out
    assert float(re.search(r"largest difference of a weight (\S+)", shown)[1]) < 1e-5
    assert re.search(r"one batched program: [\d.]+ ms a step of all, [\d.]+ times as fast", shown)
