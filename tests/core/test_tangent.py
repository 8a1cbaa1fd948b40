"""Linearised models against Jacobians written out, with every method, on transformers' attention."""

import importlib

import pytest
import torch
from torch import nn

import smat_fn.mat
from smat_fn import optim, parallel, random, testing, tree
from smat_fn.grad import ModuleLoss, linearised, value_and_grad, with_master_weights
from smat_fn.mat import finetune
from smat_fn.models.pretrained import checkpoint_blocks

# torch's own: forward derivatives import modules of torch.jit
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

KEY = random.key(5)
each_engine = pytest.mark.parametrize("engine", ["func", "autograd"])


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype).eval()


def squares(module, batch):
    x, y = batch
    out = module(x)
    return ((out - y) ** 2).mean(), out


def base_of(module):
    return {path: p.detach().clone() for path, p in module.named_parameters()}


def moved(base, seed=1, by=0.3):
    return tree.tree_map(lambda leaf, other: leaf + by * other.to(leaf), base, testing.random_tree(seed, shapes(base)))


def shapes(base):
    return {path: tuple(leaf.shape) for path, leaf in base.items()}


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(6, n, generator=generator, dtype=torch.float64).to(dtype) for n in (4, 3))


@each_engine
def test_outputs_and_gradient_are_those_of_the_jacobian(engine):
    module = network()
    base, (x, y) = base_of(module), batch()
    theta = moved(base)

    def outputs(weights):
        return torch.func.functional_call(module, weights, (x,))

    jacobian = torch.func.jacrev(outputs)(base)
    change = {path: leaf.flatten(2) @ (theta[path] - base[path]).flatten() for path, leaf in jacobian.items()}
    wanted = outputs(base) + sum(change.values())
    (loss, out), grads = value_and_grad(linearised(ModuleLoss(module, squares), base), engine=engine)(theta, (x, y))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(loss, ((wanted - y) ** 2).mean())
    slope = 2 * (wanted - y) / y.numel()
    for path, leaf in jacobian.items():
        torch.testing.assert_close(grads[path], torch.einsum("bo,bo...->...", slope, leaf))


def test_outputs_of_a_merge_are_the_merge_of_outputs():
    module = network()
    base = base_of(module)
    loss = linearised(ModuleLoss(module, squares), base)
    experts, coefs = [moved(base, seed) for seed in (1, 2, 3)], (0.4, 0.7, -0.2)
    merged = tree.tree_map(
        lambda start, *own: start + sum(c * (e - start) for c, e in zip(coefs, own, strict=True)), base, *experts
    )
    start = squares(module, batch())[1]
    wanted = start + sum(c * (loss(e, batch())[1] - start) for c, e in zip(coefs, experts, strict=True))
    torch.testing.assert_close(loss(merged, batch())[1], wanted)
    assert torch.equal(loss(base, batch())[1], start)


def test_steps_of_gradient_descent_on_a_linear_module_are_the_plain_ones():
    module = nn.Linear(4, 3).double()
    base, (x, y) = base_of(module), batch()
    plain = ModuleLoss(module, squares)
    ends = []
    for loss in (plain, linearised(plain, base)):
        method = finetune.build(loss, optim.adam(0.05), base)
        state = method.init(base)
        for _ in range(5):
            state, _ = method.update(KEY, state, (x, y))
        ends.append(state.params)
    testing.assert_trees_close(*ends, atol=1e-12)


@pytest.mark.parametrize("name", smat_fn.mat.__all__)
def test_every_method_takes_it(name):
    module = network()
    base = base_of(module)
    loss = linearised(ModuleLoss(module, squares), base)
    soon = {"calibration": 4} if name == "talos" else {}  # steps in which nothing moves
    method = importlib.import_module(f"smat_fn.mat.{name}").build(loss, optim.adam(0.05), base, **soon)
    state, losses = method.init(base), []
    for _ in range(6):
        state, info = method.update(KEY, state, batch())
        losses.append(float(info.loss))
    assert losses[-1] < losses[0]
    assert all(leaf.isfinite().all() for leaf in state.params.values())


def test_frozen_parameters_stay_and_bf16_copies_train():
    module = network(torch.float32)
    module[0].requires_grad_(False)
    base = {path: p.detach().clone() for path, p in module.named_parameters() if p.requires_grad}
    loss = linearised(ModuleLoss(module, squares), base)
    data, theta = batch(torch.float32), moved(base)
    # the second layer is linear in its weights
    torch.testing.assert_close(loss(theta, data)[1], torch.func.functional_call(module, theta, (data[0],)))
    low = ModuleLoss(network(torch.bfloat16), squares)
    whole = {path: leaf.float() for path, leaf in base_of(low.module).items()}
    narrow = with_master_weights(linearised(low, whole), torch.bfloat16)
    (value, _), grads = value_and_grad(narrow, engine="autograd")(moved(whole), batch(torch.bfloat16))
    assert value.dtype == torch.bfloat16
    assert {leaf.dtype for leaf in grads.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_attention_of_transformers(kind):
    import transformers as hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.BertConfig(vocab_size=20, attn_implementation=kind, **sizes)
    torch.manual_seed(0)
    module = hf.BertModel(config, add_pooling_layer=False).double().eval()
    base = base_of(module)

    def loss(module, ids):
        assert module.config is config
        found = module(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return found.square().mean(), found

    ids = torch.arange(12).reshape(2, 6)
    own, whole = linearised(ModuleLoss(module, loss), base), ModuleLoss(module, loss)
    gaps = []
    for by in (1e-2, 5e-3):
        theta = moved(base, by=by)
        (_, found), _ = value_and_grad(own, engine="autograd")(theta, ids)
        gaps.append(float((found - whole(theta, ids)[1]).norm()))
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)  # what is left is of second order


def test_what_cannot_be_linearised_is_refused():
    module = network()
    base = base_of(module)
    with pytest.raises(ValueError, match="the loss is a function, where the model ends in it is unknown"):
        linearised(lambda params, batch: None, base)
    for around in (with_master_weights, parallel.replicated):
        with pytest.raises(ValueError, match="take with_master_weights or replicated of the linearised loss"):
            linearised(around(ModuleLoss(module, squares)), base)
    with pytest.raises(ValueError, match="leaf 'x' is not a parameter of the module"):
        linearised(ModuleLoss(module, squares), {"x": torch.ones(2)})
    shared = linearised(ModuleLoss(module, squares), dict(module.named_parameters()))
    module.load_state_dict(base)
    with pytest.raises(ValueError, match="base was written to since the method was built"):
        shared(base, batch())
    parts = linearised(ModuleLoss(module, lambda module, x: (module.get_submodule("0")(x).sum(), None)), base)
    with pytest.raises(ValueError, match="takes '0' of the module, which is not linearised"):
        parts(base, batch()[0])


def test_gradient_checkpointing_is_refused():
    import transformers as hf

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    module = hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **sizes), add_pooling_layer=False).eval()
    checkpoint_blocks(module)
    loss = linearised(ModuleLoss(module, lambda module, x: (module(x).last_hidden_state.sum(), None)), base_of(module))
    with pytest.raises(ValueError, match="gradient checkpointing has no forward derivative"):
        loss(base_of(module), torch.ones(1, 3, 8, 8))
