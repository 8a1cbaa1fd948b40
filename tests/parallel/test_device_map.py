"""A model whose blocks lie on two devices trains as on one, bit for bit: one draw, one norm, one state."""

import importlib

import pytest
import torch

from smat_fn import draw, lora, optim, random, reweight, simulate, testing, tree
from smat_fn.grad import ModuleLoss, with_master_weights
from smat_fn.mat.step import as_tensors
from smat_fn.models.causal_lm import next_token_loss
from smat_fn.scripts.train import resuming
from smat_fn.scripts.train.resuming import Saver
from smat_fn.types import Micro
from smat_fn.where import block_linear

from . import devices
from .devices import FIRST, SECOND, Placed, Places

KEY = random.key(4)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.02}
METHODS = {
    "ft": ("finetune", {}),
    "smat": ("smat", {"period": 2, **STRENGTHS}),
    "smat mixed": ("smat", {"lam": 0.3, **STRENGTHS}),
    "smat by depth in pairs": ("smat", {"period": 2, "alpha_depth": (0.5, 1.5), "antithetic": True, **STRENGTHS}),
    "asam": ("asam", {"rho": 0.05}),
    "mergopt": ("mergopt", {"b": 0.01, "k_max": 4}),
    "orthoreg": ("orthoreg", {"lambda_reg": 0.01}),
}
MORE = {
    "smat climbing": ("smat", {"period": 2, "climb": "both", "rho": 0.05, **STRENGTHS}),
    "msam": ("msam", {"rho": 0.05}),
    "msam along the gradient": ("msam", {"rho": 0.05, "along": "gradient"}),
    "smat by the update": ("smat", {"period": 2, **STRENGTHS, "sigma_of": "update", "alpha_max": 1.5}),
    "smat by leaf": ("smat", {"period": 2, **STRENGTHS, "sigma_of": "leaf"}),
    "l2sp": ("l2sp", {"pull": 0.1}),
    "mixout": ("mixout", {}),
}


class Halves(torch.nn.Module):
    """Two blocks and a head; every layer takes its input to where its weight lies, as accelerate's hooks do."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(6, 9), "down": torch.nn.Linear(9, 6)}) for _ in range(2)
        )
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x.to(layer["up"].weight)
            x = x + layer["down"](layer["up"](x).tanh())
        return self.head(x.to(self.head.weight))


def squares(module, x):
    return module(x).float().square().mean(), None


def place(path):
    """The device map: the first block, and all that comes after it."""
    return FIRST if path.startswith("layers.0") else SECOND


def setting():
    torch.manual_seed(0)
    module = Halves()
    base = {path: p.detach().clone() for path, p in module.named_parameters()}
    start = {path: leaf + 0.05 * torch.randn_like(leaf) for path, leaf in base.items()}
    batches = [torch.randn(4, 6) for _ in range(4)]
    return module, base, start, batches


def spread(leaves):
    return {path: Placed(leaf.clone(), place(path)) for path, leaf in leaves.items()}


def gathered(leaves):
    assert all(leaf.device == place(path) for path, leaf in leaves.items())
    return {path: leaf.inner for path, leaf in leaves.items()}


def trained(build, base, start, batches, **options):
    method = build(base, max_grad_norm=0.05, donate=True, **options)
    state, norms = method.init(start), []
    for x in batches:
        state, info = method.update(KEY, state, [Micro(x[:2]), Micro(x[2:])])
        norms.append(float(info.grad_norm))
    return state, norms


def check(build, base, start, batches, **options):
    """Both states, after the two have been compared."""
    one, norms = trained(build, base, start, batches, **options)
    with Places():
        two, other = trained(build, spread(base), spread(start), batches, **options)
    assert norms == other
    assert max(norms) > 0.05  # the clip has worked
    testing.assert_trees_equal(gathered(two.params), one.params)
    return one, two


@pytest.mark.parametrize("masters", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "smat by depth in pairs" or name in list(MORE)[1:]))
        for name in (*METHODS, *MORE)
    ],
)
def test_every_method_trains_to_the_bits_of_one_device(name, masters):
    module, base, start, batches = setting()
    loss_fn = ModuleLoss(module, squares)
    loss_fn = with_master_weights(loss_fn) if masters else loss_fn
    kind, hyper = (METHODS | MORE)[name]

    def build(base, **options):
        optimizer = optim.adamw(1e-2, weight_decay=0.1, fused=True)
        where = block_linear(module)
        return importlib.import_module(f"smat_fn.mat.{kind}").build(
            loss_fn, optimizer, base, where=where, **hyper, **options
        )

    one, two = check(build, base, start, batches)
    testing.assert_trees_equal(gathered(two.opt_state.nu), one.opt_state.nu)


@pytest.mark.parametrize("engine", ["autograd", "func"])
@pytest.mark.parametrize("name", METHODS)
def test_no_step_reads_a_number_from_a_device(name, engine, monkeypatch):
    base = {f"layers.{i}.w": Placed(torch.ones(6, 6), FIRST) for i in range(2)}
    read, compute = [], devices.compute

    def watched(func, args, kwargs):
        found = compute(func, args, kwargs)
        there = any(isinstance(leaf, Placed) for leaf in args)
        if there and isinstance(found, bool | int | float | torch.Tensor) and not isinstance(found, Placed):
            read.append(func.name())
        return found

    def loss_fn(params, x):
        return (x @ params["layers.0.w"] @ params["layers.1.w"]).square().mean(), None

    monkeypatch.setattr(devices, "compute", watched)
    kind, hyper = METHODS[name]
    with Places():
        optimizer = optim.adamw(1e-2, weight_decay=0.1, fused=True)
        build = importlib.import_module(f"smat_fn.mat.{kind}").build
        method = build(loss_fn, optimizer, base, max_grad_norm=0.05, engine=engine, **hyper)
        state = method.init({path: leaf.clone() for path, leaf in base.items()})
        state = as_tensors(state) if engine == "func" else state  # as in a compiled step
        for _ in range(4):
            state, info = method.update(KEY, state, Placed(torch.ones(2, 6), FIRST))
        assert read == []
        float(info.loss)
    assert read  # the loss


def test_what_a_step_reports_of_its_alpha_lies_where_the_key_lies():
    with Places():
        base, key = {"w": Placed(torch.ones(3), FIRST)}, Placed(KEY.clone(), FIRST)
        method = importlib.import_module("smat_fn.mat.smat").build(
            lambda params, x: (params["w"].sum(), None), optim.adam(1e-2), base, period=2, **STRENGTHS
        )
        state = method.init(base)
        for _ in range(2):  # a clean step and a simulated one
            state, info = method.update(key, state, None)
            assert info.scale.device == FIRST


def test_muon_and_adapters_too():
    module, base, start, batches = setting()
    loss_fn, where = ModuleLoss(module, squares), block_linear(module)

    def muon(base, **options):
        optimizer = optim.muon(1e-2, rest=optim.adamw(1e-2, weight_decay=0.0), where=where)
        return importlib.import_module("smat_fn.mat.smat").build(
            loss_fn, optimizer, base, where=where, period=2, **STRENGTHS, **options
        )

    check(muon, base, start, batches)
    adapter = lora.Lora(lora.linear_paths(module)[0], rank=2, alpha=8.0)

    def adapted(base, **options):
        return lora.build(loss_fn, optim.adam(1e-2), base, adapter, where=where, period=2, **STRENGTHS, **options)

    one, norms = trained(adapted, base, lora.init(KEY, base, adapter), batches)
    with Places():
        spread_base = spread(base)
        two, other = trained(adapted, spread_base, lora.init(KEY, spread_base, adapter), batches)
    assert norms == other
    testing.assert_trees_equal(gathered(two.params), one.params)


def test_a_snapshot_of_two_devices_goes_on_on_them(tmp_path):
    module, base, start, batches = setting()
    smat = importlib.import_module("smat_fn.mat.smat")

    def begun(base):
        return smat.build(ModuleLoss(module, squares), optim.adam(1e-2), base, period=2, donate=True, **STRENGTHS)

    with Places():
        method = begun(spread(base))
        state = method.init(spread(start))
        for x in batches[:3]:
            state, _ = method.update(KEY, state, x)
        saver = Saver(tmp_path / "a.safetensors", {})
        saver.save(state, {})
        saver.wait()
        back = resuming.restore(saver.path, method.init(spread(base)))
        assert back.step == 3
        testing.assert_trees_equal(gathered(back.params), gathered(state.params))
        state, back = (method.update(KEY, one, batches[3])[0] for one in (state, back))
    testing.assert_trees_equal(gathered(back.params), gathered(state.params))


def test_the_states_and_gradients_lie_where_their_leaves_lie():
    _, base, start, _ = setting()
    drawn = draw(KEY, **STRENGTHS, noise="laplace")
    with Places():
        found = simulate(spread(start), spread(base), drawn), reweight(spread(start), drawn)
        norm = tree.global_norm(spread(start))
        clipped, before = optim.clip(spread(start), 0.1)
    testing.assert_trees_equal(gathered(found[0]), simulate(start, base, drawn))
    testing.assert_trees_equal(gathered(found[1]), reweight(start, drawn))
    testing.assert_trees_equal(gathered(clipped), optim.clip(start, 0.1)[0])
    assert float(norm) == float(tree.global_norm(start))
    assert float(before) == float(optim.clip(start, None)[1])


@pytest.mark.parametrize("masters", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("offload", ["cpu", "recompute", "stream"])
def test_an_offload_mode_serves_each_device(offload, masters):
    module, base, start, batches = setting()
    loss_fn = with_master_weights(ModuleLoss(module, squares)) if masters else ModuleLoss(module, squares)

    def build(base, **options):
        own = {"offload": offload, "period": 2, "where": block_linear(module), **STRENGTHS, **options}
        return importlib.import_module("smat_fn.mat.smat").build(loss_fn, optim.adam(1e-2), base, **own)

    check(build, base, start, batches)


def test_the_hooks_of_a_device_map_change_no_bit():
    accelerate, transformers = pytest.importorskip("accelerate"), pytest.importorskip("transformers")
    smat, found = importlib.import_module("smat_fn.mat.smat"), []
    for mapped in (False, True):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        module = transformers.LlamaForCausalLM(config).eval()
        if mapped:
            names = [
                "model.embed_tokens",
                "model.layers.0",
                "model.layers.1",
                "model.norm",
                "model.rotary_emb",
                "lm_head",
            ]
            accelerate.dispatch_model(module, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)
            assert module.model.layers[1]._hf_hook is not None
        base = {path: p.detach().clone() for path, p in module.named_parameters()}
        ids = torch.arange(24).view(2, 12) % 32
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        loss_fn, options = (
            ModuleLoss(module, next_token_loss),
            {"where": block_linear(module), "period": 2, **STRENGTHS},
        )
        method = smat.build(loss_fn, optim.adam(1e-2), base, **options)
        state = method.init(base)
        for _ in range(4):
            state, _ = method.update(KEY, state, batch)
        found.append(state.params)
    testing.assert_trees_equal(*found)
