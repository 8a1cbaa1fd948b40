"""Weights rebuilt module by module: how often, how many at once, and what cannot be done is said."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from smat_fn import ModuleLoss, optim, random, value_and_grad
from smat_fn.mat import smat
from smat_fn.mat.offload.rebuild import blocks, rebuilding
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree

KEY = random.key(2**33 + 5)
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.4, "sigma": 0.05}


def mlp(depth, width=5):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def new_values(module, seed=1):
    return random_tree(seed, {name: p.shape for name, p in module.named_parameters()})


def rebuilt(module, values, loss, asked=None):
    """Loss and gradients with weights rebuilt from ``values``; what is asked for is appended to ``asked``."""
    leaves = {name: torch.full_like(v, float("nan")).requires_grad_() for name, v in values.items()}

    def states(paths):
        if asked is not None:
            asked.append(tuple(paths))
        return [values[path].clone() for path in paths]

    with rebuilding(module, leaves, states):
        value = loss(module)
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(leaves, grads, strict=True))


def plain(module, values, loss):
    (value, _), grads = value_and_grad(ModuleLoss(module, lambda m: (loss(m), None)), engine="autograd")(values)
    return value, grads


def check(module, loss, values=None):
    values = new_values(module) if values is None else values
    expected, grads = plain(module, values, loss)
    found, theirs = rebuilt(module, values, loss)
    assert torch.equal(found, expected)
    assert_trees_equal(theirs, grads)


def train(module, loss, params, base, *, steps=1, **options):
    method = smat.build(
        ModuleLoss(module, lambda m, b: (loss(m), None)),
        optim.adam(0.01),
        base,
        **{"period": 1, **STRENGTHS, **options},
    )
    state = method.init(params)
    for _ in range(steps):
        state, info = method.update(KEY, state, 0)
    return state, info


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_rebuilds_of_a_network_of_linear_layers(depth):
    module, x, asked = mlp(depth), torch.ones(3, 5), []
    rebuilt(module, new_values(module), lambda m: m(x).sum(), asked)
    layers = [(f"{2 * i}.weight", f"{2 * i}.bias") for i in range(depth)]
    # backward finds the last layer still there; the first has no use for its weight, as its input has no gradient
    assert asked == layers + layers[-2:0:-1]


def test_blocks_are_the_layers_of_a_transformer():
    paths = ["h.0.attn.q.weight", "h.1.norm.bias", "h.0.mlp.bias", "embed.weight", "embed.bias", "h.10.mlp.2.w", "cls"]
    groups = [("h.0.attn.q.weight", "h.0.mlp.bias"), ("h.1.norm.bias",), ("embed.weight", "embed.bias")]
    groups += [("h.10.mlp.2.w",), ("cls",)]
    assert blocks(paths) == {path: group for group in groups for path in group}
    assert blocks([]) == {}


def test_a_block_is_made_once_in_forward_and_once_in_backward(case):
    for family in ("llama", "llama tied", "gpt2 tied", "vit", "clip"):
        model, asked = case(family), []
        batch = model.batches(1)[0]
        rebuilt(model.module, model.params, lambda m, batch=batch, model=model: model.loss(m, batch)[0], asked)
        layers = [paths for paths in asked if any(".0." in path or ".1." in path for path in paths)]
        first, second = layers[:2]
        assert layers == [first, second, second, first] or layers == [first, second, first]  # ViT ends with a layer
        assert len(asked) <= 2 * len(set(blocks(model.params).values()))


def test_frozen_and_unused_weights_are_not_rebuilt():
    module, asked = mlp(3), []
    values = {name: v for name, v in new_values(module).items() if not name.startswith("2.")}
    own = module[2].weight
    rebuilt(module, values, lambda m: m[:4](torch.ones(2, 5)).sum(), asked)
    assert asked == [("0.weight", "0.bias")]
    assert module[2].weight is own
    check(module, lambda m: m(torch.ones(2, 5)).sum(), values)


def test_a_module_called_twice():
    module, x = mlp(2), torch.linspace(-1, 1, 5).view(1, 5)
    check(module, lambda m: (m(m(x)) + m[0](x)).sum())


def test_one_weight_under_three_names():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.embed = nn.Linear(5, 5, bias=False), nn.Embedding(5, 5)
            self.embed.weight = self.same = self.also = self.first.weight

        def forward(self, x):
            return self.first(x) @ self.same + self.also + self.embed(torch.arange(5))

    module, asked = Twins(), []
    values = new_values(module)
    rebuilt(module, values, lambda m: m(torch.eye(5)).sum(), asked)
    assert asked == [("same",)]
    (found, theirs), (expected, grads) = (
        rebuilt(module, values, lambda m: m(torch.eye(5)).pow(2).sum()),
        plain(module, values, lambda m: m(torch.eye(5)).pow(2).sum()),
    )
    assert torch.equal(found, expected)
    # four gradients of one leaf, summed in another order
    assert_trees_close(theirs, grads, rtol=1e-5, atol=1e-5)


def test_a_module_with_leaves_of_two_blocks():
    module = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5))
    module[1].weight = module[0].weight
    asked = []
    rebuilt(module, new_values(module), lambda m: m(torch.eye(5)).sum(), asked)
    assert asked == [("0.weight",), ("0.weight", "1.bias")]
    check(module, lambda m: m(torch.eye(5)).pow(2).sum())


def test_a_weight_read_as_another_dtype():
    class Bits(nn.Linear):
        def forward(self, x):
            # the upper halves of its words, a factor that backward needs
            return super().forward(x) * self.weight.detach().view(torch.bfloat16)[:, 1::2]

    check(nn.Sequential(nn.Linear(5, 5), Bits(5, 5)), lambda m: m(torch.eye(5)).pow(2).sum())


def test_hooks_of_the_module_see_its_weights():
    module, x = mlp(2), torch.ones(1, 5)
    seen = []
    handles = [
        module[0].register_forward_pre_hook(lambda m, args: seen.append(m.weight.sum().item())),
        module[0].register_forward_hook(lambda m, args, out: out + m.bias),
    ]
    values = new_values(module)
    check(module, lambda m: m(x).sum(), values)
    assert seen == [values["0.weight"].sum().item()] * 2
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "parametrization", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal]
)
def test_parametrized_weights(parametrization):
    module = mlp(2)
    parametrization(module[2])
    check(module, lambda m: m(torch.linspace(-1, 1, 5).view(1, 5)).pow(2).sum())


def test_a_weight_changed_in_place_is_refused():
    module = nn.Embedding(5, 5, max_norm=0.1)
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        rebuilt(module, new_values(module), lambda m: m(torch.arange(5)).sum())


def test_what_backward_needs_and_was_written_to_is_an_error_as_in_torch():
    module = mlp(2)

    def loss(m):
        h = m[0](torch.linspace(-1, 1, 5).view(1, 5)).exp()
        h += 1  # the derivative of exp needs what this overwrites
        return h.sum()

    with pytest.raises(RuntimeError, match="that the backward pass needs was changed in place: it is at version 1"):
        rebuilt(module, new_values(module), loss)


def test_a_weight_of_another_module_is_not_there():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(5, 5)

        def forward(self, x):
            # shape, dtype and device may be asked for
            assert (self.child.weight.shape, self.child.weight.dtype) == ((5, 5), torch.float32)
            assert self.child.weight.device == x.device
            return x.to(self.child.weight) @ self.child.weight

    module = Reader()
    with pytest.raises(ValueError, match=r"leaf 'child.weight' was read by .* outside the forward pass of the module"):
        rebuilt(module, new_values(module), lambda m: m(torch.ones(2, 5)).sum())
    with pytest.raises(ValueError, match="use offload 'cpu' or None"):
        rebuilt(module, new_values(module), lambda m: m.child.weight.sum())


def test_weights_leave_with_a_forward_that_fails():
    class Forgiving(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(5, 5)

        def forward(self, x):
            with pytest.raises(RuntimeError, match="shapes"):
                self.child(x[:, :2])
            return x.sum() + self.child.weight.sum()

    module = Forgiving()
    with pytest.raises(ValueError, match=r"leaf 'child\.weight' was read"):
        rebuilt(module, new_values(module), lambda m: m(torch.ones(2, 5)))


def test_attention_of_torch_reads_its_childs_weights():
    module, x = nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    with pytest.raises(ValueError, match=r"leaf 'out_proj\.(weight|bias)'"):
        rebuilt(module, new_values(module), lambda m: m(x, x, x)[0].sum())


@pytest.mark.parametrize("offload", ["recompute", "stream"])
def test_one_module_at_a_time(ledger, offload):
    module, x = mlp(6, width=16), torch.ones(2, 16)
    layer = 4 * (16 * 16 + 16)
    peaks = []
    for i in range(0, 12, 2):
        module[i].register_forward_hook(lambda *_: peaks.append(ledger.peak))
    base = new_values(module)
    train(module, lambda m: m(x).sum(), new_values(module, 2), base, offload=offload)
    assert peaks == [layer] * 6  # in forward
    assert ledger.peak == layer  # and in backward
    assert ledger.alive == 0
    assert len(ledger.made) == 2 * (6 + 4)


@pytest.mark.parametrize("offload", ["recompute", "stream"])
def test_nothing_is_alive_after_an_exception(ledger, offload):
    module, x = mlp(6), torch.ones(2, 5)

    def burst(*_):
        raise KeyError("burst")

    module[8].register_forward_hook(burst)
    with pytest.raises(KeyError, match="burst"):
        train(module, lambda m: m(x).sum(), new_values(module, 2), new_values(module), offload=offload)
    gc.collect()  # frames of the exception
    assert ledger.alive == 0


@pytest.mark.parametrize("offload", ["recompute", "stream"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", ["llama tied", "vit"])
def test_less_than_a_copy(ledger, case, checkpoint, family, checkpointing, offload):
    model = case(family)
    if checkpointing:
        checkpoint(model.module)
    batch, calls = model.batches(1)[0], [0]
    linear = next(name for name, m in model.module.named_modules() if isinstance(m, nn.Linear) and ".0." in name)
    model.module.get_submodule(linear).register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
    train(model.module, lambda m: model.loss(m, batch)[0], model.params, model.base, offload=offload, steps=2)
    full = sum(leaf.nbytes for leaf in model.params.values())
    size = {path: leaf.nbytes for path, leaf in model.params.items()}
    largest = max(sum(size[path] for path in group) for group in blocks(size).values())
    # what is run again saves the weights of its block until it is done
    assert ledger.peak <= largest * (1 + checkpointing)
    assert ledger.peak < full
    assert ledger.alive == 0
    # a step: in forward, and in backward or in what is run again
    assert ledger.made.count(f"{linear}.weight") == 2 * 2
    assert calls == [2 * (1 + checkpointing)]


def test_checkpoint_of_torch_within_the_loss():
    module, x = mlp(4), torch.linspace(-1, 1, 5).view(1, 5).requires_grad_()
    check(module, lambda m: recompute(m[2:], recompute(m[:2], x, use_reentrant=False), use_reentrant=False).sum())


def test_recurrent_weights():
    module, x = nn.LSTM(3, 4, batch_first=True), torch.linspace(-1, 1, 6).view(1, 2, 3)
    check(module, lambda m: m(x)[0].sum())


def test_an_empty_parameter():
    module = mlp(2)
    module[1].nothing = nn.Parameter(torch.zeros(0, 3))
    check(module, lambda m: m(torch.ones(2, 5)).sum())


def test_a_module_that_hands_out_its_weight():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 5))

        def forward(self):
            return self.weight

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = Table(), nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x * self.table()) * self.table()

    check(Sum(), lambda m: m(torch.full((2, 5), 3.0)).sum())
