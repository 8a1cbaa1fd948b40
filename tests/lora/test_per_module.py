"""Adapters formed layer by layer: the bits of the definition, what is alive when, and updates below an ulp of bf16."""

import weakref

import pytest
import torch
from torch.nn.functional import linear
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import draw, lora, materialise, random, simulate, value_and_grad
from smat_fn.grad import ModuleLoss, linearised, with_master_weights
from smat_fn.where import block_linear

KEY = random.key(5)
STRENGTHS = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.05}
SIZE, LAYERS = 64, 8


class Blocks(torch.nn.Module):
    def __init__(self, size=SIZE, layers=LAYERS):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(size, size)}) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["up"](x)
        return x


def squares(module, batch):
    return (module(batch).float() ** 2).mean(), None


def setting(model, rank=2):
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    paths, transposed = lora.linear_paths(model)
    adapter = lora.Lora(paths, rank=rank, alpha=2.0 * rank, transposed=transposed)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: leaf + (0.1 * torch.randn(leaf.shape, generator=generator)).to(leaf.dtype)
        for name, leaf in lora.init(KEY, base, adapter).items()
    }
    return base, adapter, moved


class Alive(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive together, at the most."""

    def __init__(self):
        super().__init__()
        self.peak, self._sizes = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (place := leaf.untyped_storage()._cdata) not in given | {
                *self._sizes
            }:
                self._sizes[place] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self._sizes.pop, place)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out


class InPlace(Blocks):
    def forward(self, x):
        h = self.layers[0]["up"](x).exp()
        h += 1  # the derivative of exp needs what this overwrites
        return self.layers[1]["up"](h)


@pytest.mark.parametrize("simulated", [False, True])
def test_what_backward_needs_and_was_written_to_is_an_error_as_in_torch(simulated):
    model = InPlace(4, 2)
    base, adapter, moved = setting(model)
    drawn = draw(KEY, **STRENGTHS) if simulated else None
    loss = lora.with_lora(ModuleLoss(model, squares), base, adapter, drawn=drawn)
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\) that the backward pass needs was changed in place"):
        value_and_grad(loss, engine="autograd")(moved, torch.ones(3, 4))


@pytest.mark.parametrize("written", ["A", "B"])
@pytest.mark.parametrize("layer", [0, 1])
def test_adapters_that_are_written_to_before_backward_are_an_error(layer, written):
    model = Blocks(4, 2).double()
    base, adapter, moved = setting(model)
    leaves = {name: leaf.requires_grad_() for name, leaf in moved.items()}

    def loss_of(module, batch):
        loss = squares(module, batch)
        with torch.no_grad():
            leaves[f"layers.{layer}.up.lora_{written}.weight"].mul_(2)
        return loss

    # of the first layer backward reads the factors alone, of the others the weight that they make, too
    with pytest.raises(RuntimeError, match=r"changed in place|adapters were written to"):
        lora.with_lora(ModuleLoss(model, squares), base, adapter).gradient(
            leaves, lambda module: loss_of(module, torch.ones(3, 4).double())
        )


def test_derivatives_are_those_of_all_weights_at_once():
    model = Blocks(4, 2).double()
    base, adapter, moved = setting(model)
    batch, sigma = torch.linspace(-1, 1, 12).view(3, 4).double(), torch.tensor(0.05, requires_grad=True)
    full = ModuleLoss(model, squares)
    whole = lambda params, batch: full(params, batch)  # noqa: E731

    def found(loss_fn):
        origin = {path: leaf.clone().requires_grad_() for path, leaf in base.items()}
        own = {name: leaf.clone().requires_grad_() for name, leaf in moved.items()}
        drawn = draw(KEY, alpha_min=0.3, drop_prob=0.5, sigma=sigma)
        leaves = [*own.values(), *(origin[path] for path in adapter.paths), sigma]
        loss = lora.with_lora(loss_fn, origin, adapter, drawn=drawn)(own, batch)[0]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        plain = lora.with_lora(loss_fn, origin, adapter, drawn=draw(KEY, **STRENGTHS))(own, batch)[0]
        grads = torch.autograd.grad(plain, list(own.values()), create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**2).sum() for g in grads), list(own.values()))]

    for one, two in zip(found(full), found(whole), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "simulated", "weights"),
    [
        (torch.float32, False, 3.5),
        (torch.float32, True, 4.5),
        (torch.bfloat16, False, 1.0),
        (torch.bfloat16, True, 9.0),
    ],
)
def test_the_weight_and_the_gradient_of_one_layer_are_alive_at_a_time(dtype, simulated, weights):
    torch.manual_seed(0)
    model = Blocks().to(dtype)
    base, adapter, moved = setting(model)
    drawn = draw(KEY, **STRENGTHS) if simulated else None
    at = value_and_grad(lora.with_lora(ModuleLoss(model, squares), base, adapter, drawn=drawn), engine="autograd")
    batch = torch.randn(1, SIZE, dtype=dtype)
    at(moved, batch)  # tables of the first use
    with Alive() as alive:
        at(moved, batch)
    # of 8 layers; all weights and their gradients together would be 16, float32 sums beside them not counted
    assert alive.peak < weights * SIZE * SIZE * dtype.itemsize


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes, **options)).eval()


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tokens(module, batch):
    return module(input_ids=batch, labels=batch).loss, None


IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize(
    ("make", "loss", "batch"),
    [(llama, tokens, IDS), (gpt2, tokens, IDS), (encoder, squares, torch.linspace(-1, 1, 48).view(2, 3, 8))],
)
def test_float32_results_are_bit_identical_to_those_of_all_weights_formed_at_once(make, loss, batch, simulated):
    model = make()
    base, adapter, moved = setting(model)
    drawn = draw(KEY, **STRENGTHS) if simulated else None
    whole = ModuleLoss(model, loss)
    options = {"drawn": drawn, "where": block_linear(model)}
    layered = lora.with_lora(whole, base, adapter, **options)
    at_once = lora.with_lora(lambda params, batch: whole(params, batch), base, adapter, **options)
    (one, _), grads = value_and_grad(layered, engine="autograd")(moved, batch)
    (two, _), wanted = value_and_grad(at_once, engine="autograd")(moved, batch)
    assert torch.equal(one, two)
    assert all(torch.equal(grads[name], leaf) for name, leaf in wanted.items())
    assert all(p.requires_grad for p in model.parameters())  # the module's own again


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_clean_loss_in_bf16_is_pefts_own_bit_for_bit(make, tmp_path):
    peft = pytest.importorskip("peft")
    model = make().bfloat16()
    base, adapter, moved = setting(model)
    lora.save_peft(tmp_path / "adapter", moved, adapter, base="tiny")
    wrapped = peft.PeftModel.from_pretrained(
        make().bfloat16(), tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False
    ).eval()
    wanted = wrapped(input_ids=IDS, labels=IDS).loss
    wanted.backward()
    loss = lora.with_lora(ModuleLoss(model, tokens), base, adapter)
    (found, _), grads = value_and_grad(loss, engine="autograd")(moved, IDS)
    assert torch.equal(found, wanted.detach())
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            own = name.removeprefix("base_model.model.").replace(".default", "")
            assert torch.equal(grads[own], parameter.grad)
    (_, _), other = value_and_grad(loss, engine="func")(moved, IDS)
    assert all(torch.allclose(other[name], leaf, rtol=0.05, atol=1e-2) for name, leaf in grads.items())


@pytest.mark.parametrize("masters", [False, True])
def test_an_update_below_an_ulp_of_bf16_reaches_the_simulated_loss(masters):
    torch.manual_seed(0)
    wide = Blocks(layers=1)
    model = wide.bfloat16()
    base, adapter, moved = setting(model)
    moved = {name: leaf * (1e-3 if "lora_B" in name else 1) for name, leaf in moved.items()}
    if masters:
        base, moved = ({name: leaf.float() for name, leaf in leaves.items()} for leaves in (base, moved))
    drawn = draw(KEY, alpha_min=0.3, drop_prob=0.5, sigma=1e-6)
    seen = []

    def recorded(module, x):
        seen.append(module.layers[0]["up"](x))
        return seen[-1].float().square().mean(), None

    whole = ModuleLoss(model, recorded)
    loss = lora.with_lora(with_master_weights(whole) if masters else whole, base, adapter, drawn=drawn)
    x = torch.randn(4, SIZE).bfloat16()
    (_, _), grads = value_and_grad(loss, engine="autograd")(moved, x)
    (path,) = adapter.paths
    a, b = (moved[path.replace("weight", f"lora_{name}.weight")].float() for name in "AB")
    delta = 2.0 * (b @ a)
    mask, noise = materialise(drawn, {path: delta})
    wanted = drawn.scale * mask[path] * delta + noise[path]
    origin = base[path].bfloat16()
    lost = (origin + wanted.bfloat16()) == origin
    assert lost.float().mean() > 0.5  # as one rounded weight most of it would not be there
    plain = linear(x, origin, base["layers.0.up.bias"].bfloat16())
    torch.testing.assert_close(seen[0], plain + x @ wanted.bfloat16().T, rtol=0, atol=0)
    assert grads[path.replace("weight", "lora_B.weight")].dtype == moved[path.replace("weight", "lora_B.weight")].dtype
    upstream = (2 / seen[0].numel() * seen[0].float()).bfloat16()
    dense = (drawn.scale * mask[path] * (upstream.T @ x).float()).to(torch.bfloat16).float()
    found = grads[path.replace("weight", "lora_B.weight")].float()
    torch.testing.assert_close(found, 2.0 * dense @ a.T, rtol=0.02, atol=0.02 * found.abs().max().item())


def test_dropout_in_bf16_drops_the_input_of_the_update():
    torch.manual_seed(0)
    model, p = Blocks(layers=1).bfloat16(), 0.4
    base, adapter, moved = setting(model)
    seen, x = [], torch.randn(4, SIZE).bfloat16()

    def recorded(module, x):
        seen.append(module.layers[0]["up"](x))
        return seen[-1].float().mean(), None

    loss = lora.with_lora(lora.with_dropout(ModuleLoss(model, recorded), base, adapter, p), base, adapter)
    value_and_grad(loss, engine="autograd")(moved, x, key=KEY)
    (path,) = adapter.paths
    kept = random.uniform(random.fold_in(random.fold_in(KEY, "adapters"), path), tuple(x.shape)) >= p
    a, b = (moved[path.replace("weight", f"lora_{name}.weight")] for name in "AB")
    dropped = torch.where(kept, x / (1 - p), 0)
    wanted = linear(x, base[path], base["layers.0.up.bias"]) + linear(linear(dropped, a), b) * 2.0
    assert torch.equal(seen[0], wanted)


class Conv1D(torch.nn.Module):
    """GPT-2's layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


def test_a_layer_that_stores_its_weight_transposed_without_saying_so_is_refused():
    module = torch.nn.Sequential(Conv1D(torch.randn(4, 4, dtype=torch.bfloat16)))
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    right = lora.Lora(("0.weight",), rank=2, alpha=4.0, transposed=frozenset({"0.weight"}))
    moved = {name: leaf.float() + 0.5 for name, leaf in lora.init(KEY, base, right).items()}
    merged, x = lora.expand(moved, base, right)["0.weight"], torch.randn(2, 4).bfloat16()
    found, _ = lora.with_lora(ModuleLoss(module, squares), base, right)(moved, x)
    named = ModuleLoss(module, lambda module, x: squares(lambda x: module[0](x=x), x))
    assert lora.with_lora(named, base, right)(moved, x)[0] == found
    torch.testing.assert_close(found, squares(lambda x: x @ merged, x)[0], rtol=0.05, atol=0)
    wrong = lora.Lora(("0.weight",), rank=2, alpha=4.0)  # x A^T B^T would be another update than that of W_0 + s B A
    with pytest.raises(ValueError, match=r"0\.weight of a Conv1D is stored \(in, out\): give lora the transposed"):
        lora.with_lora(ModuleLoss(module, squares), base, wrong)(moved, x)


def test_what_cannot_be_formed_layer_by_layer_is_refused():
    model = Blocks(size=4, layers=2)
    base, adapter, moved = setting(model)
    outside = ModuleLoss(model, lambda module, x: (module.layers[0]["up"].weight.sum(), None))
    with pytest.raises(ValueError, match=r"'layers.0.up.weight' was read by .* outside the forward pass of the layer"):
        lora.with_lora(outside, base, adapter)(moved, torch.ones(1, 4))
    shared = {**base, adapter.paths[1]: base[adapter.paths[0]]}
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight are tied"):
        lora.with_lora(ModuleLoss(model, squares), shared, adapter)(moved, torch.ones(1, 4))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in moved.items()}
    value, _ = lora.with_lora(ModuleLoss(model, squares), base, adapter)(leaves, torch.ones(1, 4))
    with torch.no_grad():
        leaves["layers.1.up.lora_A.weight"].add_(1)
    with pytest.raises(RuntimeError, match=r"adapters were written to|modified by an inplace"):
        value.backward()
    narrow = {name: leaf.bfloat16() for name, leaf in base.items()}
    loss = lora.with_lora(ModuleLoss(model.bfloat16(), squares), narrow, adapter)
    step = torch.compile(lambda a, x: loss(a, x)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="which a compiled step and a linearised module cannot"):
        step({name: leaf.bfloat16() for name, leaf in moved.items()}, torch.ones(1, 4).bfloat16())


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own: forward derivatives
@pytest.mark.parametrize("simulated", [False, True])
def test_adapters_of_a_linearised_module_move_its_weights(simulated):
    model = Blocks(size=4, layers=2).double()
    base, adapter, moved = setting(model)
    inner, x = linearised(ModuleLoss(model, squares), base), torch.randn(3, 4, dtype=torch.float64)
    loss, weights = lora.with_lora(inner, base, adapter), lora.expand(moved, base, adapter)
    if simulated:
        drawn = draw(KEY, **STRENGTHS)
        loss = lora.with_lora(inner, base, adapter, drawn=drawn)
        weights = simulate(weights, {path: base[path] for path in weights}, drawn)
    value, _ = value_and_grad(loss)(moved, x)[0]
    assert value == inner({**base, **weights}, x)[0]
    plain, _ = ModuleLoss(model, squares)({**base, **weights}, x)
    assert abs(value - plain) > 1e-6  # it is the expansion that runs
