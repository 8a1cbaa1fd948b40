"""AdaMerging and RegMean++ against their definitions, written out."""

import pytest
import torch
from torch import nn

from smat_fn import random
from smat_fn.grad import ModuleLoss
from smat_fn.merge import reg_mean
from smat_fn.merge.adamerging import adamerging, entropy
from smat_fn.merge.reg_mean_plus import reg_mean_plus
from smat_fn.where import block_prefix

GENERATOR = torch.Generator().manual_seed(9)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR)


@pytest.fixture(autouse=True)
def alone():
    """Numbers of a test do not depend on the tests before it."""
    GENERATOR.manual_seed(9)


def classify(params, batch):
    inputs, labels = batch
    logits = torch.tanh(inputs @ params["w"].T) @ params["v"].T
    return nn.functional.cross_entropy(logits, labels), logits


@pytest.fixture
def tasks():
    """Base, two experts, their losses and a few batches of unlabelled rows."""
    base = {"w": normal(4, 3), "v": normal(3, 4), "steps": torch.tensor(3)}
    experts = {n: {"w": base["w"] + normal(4, 3), "v": base["v"] + normal(3, 4), "steps": base["steps"]} for n in "ab"}
    none = torch.full((6,), 0)
    batches = {n: [(normal(6, 3), none) for _ in range(3)] for n in "ab"}
    return dict.fromkeys("ab", classify), base, experts, batches


@pytest.mark.parametrize("layer_wise", [True, False])
def test_adamerging_is_adam_on_the_entropy(tasks, layer_wise):
    losses, base, experts, batches = tasks
    key, steps = random.key(2), 6
    found = adamerging(losses, base, experts, batches, key, layer_wise=layer_wise, steps=steps, lr=0.05, start=0.4)
    raw = {n: torch.full((2 if layer_wise else 1,), 0.4, requires_grad=True) for n in experts}
    optimizer, values = torch.optim.Adam(raw.values(), lr=0.05), []

    def merged():
        clamped = {n: coef.clamp(0, 1) for n, coef in raw.items()}
        return {
            path: base[path]
            + sum(clamped[n][i if layer_wise else 0] * (experts[n][path] - base[path]) for n in experts)
            for i, path in enumerate(("w", "v"))
        }

    for step in range(steps):
        total = 0
        for n in experts:
            u = float(random.uniform(random.fold_in(random.fold_in(key, n), step), (1,), dtype=torch.float64))
            p = classify(merged(), batches[n][int(3 * u)])[1].softmax(1)
            total = total - (p * p.log()).sum(1).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        values.append(float(total.detach()))
    assert found.entropy == pytest.approx(values, rel=1e-5)
    for n, coef in raw.items():
        names = ("w", "v") if layer_wise else ("*",)
        assert found.coefs[n] == pytest.approx(dict(zip(names, coef.clamp(0, 1).tolist(), strict=True)), rel=1e-4)
    for path, leaf in merged().items():
        torch.testing.assert_close(found.params[path], leaf.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.params["steps"], base["steps"])


def test_adamerging_lowers_the_entropy_whatever_the_labels(tasks):
    losses, base, experts, batches = tasks
    key = random.key(0)
    one = {n: own[:1] for n, own in batches.items()}
    found = adamerging(losses, base, experts, one, key, steps=60, lr=0.05)
    assert found.entropy[-1] < found.entropy[0] - 0.1
    assert all(0 <= coef <= 1 for own in found.coefs.values() for coef in own.values())
    other = {n: [(x, labels + 2) for x, labels in own] for n, own in one.items()}
    assert adamerging(losses, base, experts, other, key, steps=60, lr=0.05).coefs == found.coefs


def test_the_key_orders_the_batches(tasks):
    losses, base, experts, batches = tasks
    runs = [adamerging(losses, base, experts, batches, random.key(k), steps=8, start=1).entropy for k in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_adamerging_lists_its_problems(tasks, steps):
    losses, base, experts, batches = tasks
    with pytest.raises(ValueError, match=rf"steps is {steps}, .*lr is -1.*start is 2, must be in \[0, 1\]"):
        adamerging(losses, base, experts, batches, random.key(0), steps=steps, lr=-1, start=2)
    with pytest.raises(ValueError, match=r"task 'a' has no loss.*task 'b' has no batches"):
        adamerging({"b": classify}, base, experts, {"a": batches["a"], "b": []}, random.key(0))


@pytest.mark.parametrize(("aux", "got"), [(torch.Tensor.detach, "without a gradient"), (lambda _: None, "a NoneType")])
def test_logits_without_a_gradient_would_move_no_coefficient(tasks, aux, got):
    losses, base, experts, batches = tasks

    def cut(params, batch):
        loss, logits = classify(params, batch)
        return loss, aux(logits)

    with pytest.raises(ValueError, match=f"the aux of task 'b' is {got}, so that its coefficients would stay"):
        adamerging({**losses, "b": cut}, base, experts, batches, random.key(0))


def test_logits_that_are_not_finite_end_adamerging(tasks):
    losses, base, experts, batches = tasks

    def masked(params, batch):
        loss, logits = classify(params, batch)
        return loss, torch.cat([logits, torch.full_like(logits[:, :1], -float("inf"))], 1)

    with pytest.raises(ValueError, match="the entropy in step 0 is nan: a task's logits are not finite there"):
        adamerging({**losses, "b": masked}, base, experts, batches, random.key(0))


def test_entropy_of_known_distributions():
    assert float(entropy(torch.zeros(5, 4))) == pytest.approx(float(torch.tensor(4.0).log()))
    assert float(entropy(torch.tensor([[100.0, 0.0]]))) == pytest.approx(0, abs=1e-6)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_every_block_sees_what_the_merged_ones_before_it_give():
    torch.manual_seed(1)
    modules = {n: Stack() for n in ("base", "a", "b")}
    trees = {n: {p: leaf.detach().clone() for p, leaf in m.named_parameters()} for n, m in modules.items()}
    base, experts = trees["base"], {n: trees[n] for n in "ab"}
    loss = ModuleLoss(Stack(), lambda module, batch: (module(batch).sum(), None))
    batches = {n: [normal(90, 3), normal(50, 3)] for n in "ab"}  # few rows make ill-conditioned Gram matrices
    found = reg_mean_plus(dict.fromkeys("ab", loss), base, experts, batches, scale=0.7)

    inputs = {n: torch.cat(batches[n]) @ found["embed.weight"].T for n in "ab"}
    expected = {"embed.weight": (experts["a"]["embed.weight"] + experts["b"]["embed.weight"]) / 2}
    for block in range(2):
        names = [f"layers.{block}.{part}.{kind}" for part in (0, 2) for kind in ("weight", "bias")]
        grams = {}
        for n, own in experts.items():
            w, b = own[names[0]], own[names[1]]
            inner = torch.relu(inputs[n] @ w.T + b)  # of the expert's own first layer
            grams[n] = {names[0]: inputs[n].T @ inputs[n] / 140, names[2]: inner.T @ inner / 140}
        part = {n: {p: own[p] for p in names} for n, own in experts.items()}
        expected |= reg_mean({p: base[p] for p in names}, part, grams, scale=0.7)
        for n, x in inputs.items():
            w, b, v, c = (expected[p] for p in names)
            inputs[n] = torch.tanh(torch.relu(x @ w.T + b) @ v.T + c)
    assert list(found) == list(base)
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=1e-4, atol=1e-5)
    # trees of a file, whose names are in another order than the module's
    backwards = {n: {p: tree[p] for p in reversed(tree)} for n, tree in trees.items()}
    own = {n: backwards[n] for n in "ab"}
    again = reg_mean_plus(dict.fromkeys("ab", loss), backwards["base"], own, batches, scale=0.7)
    assert all(torch.equal(again[path], leaf) for path, leaf in found.items())
    doubled = {n: {p: leaf.double() for p, leaf in tree.items()} for n, tree in experts.items()}  # run in base's dtypes
    for path, leaf in reg_mean_plus(dict.fromkeys("ab", loss), base, doubled, batches, scale=0.7).items():
        torch.testing.assert_close(leaf, found[path], rtol=1e-4, atol=1e-5)
    plain = [reg_mean(base, experts, {n: {"layers.1.0.weight": torch.eye(4)} for n in "ab"})["layers.1.0.weight"]]
    assert not torch.allclose(found["layers.1.0.weight"], plain[0])


def test_reg_mean_plus_wants_blocks_losses_and_rows():
    leaf = {"w": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"scale is 2.*no parameter is in a numbered.*'a' has no loss.*'a' has no bat"):
        reg_mean_plus({}, leaf, {"a": leaf}, {}, scale=2)
    assert [block_prefix(p) for p in ("h.3.w", "enc.layer.11.mlp.0.w", "w", "3.w", "h.3")] == [
        "h.3", "enc.layer.11", "", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_plays_no_part_in_adamerging(tasks, dtype):
    losses, base, experts, batches = tasks
    want = adamerging(losses, base, experts, batches, random.key(0), steps=4)
    torch.set_default_dtype(dtype)
    try:
        found = adamerging(losses, base, experts, batches, random.key(0), steps=4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.coefs, found.entropy) == (want.coefs, want.entropy)
    assert all(torch.equal(found.params[path], want.params[path]) for path in base)


@pytest.mark.parametrize("option", ["lr", "start"])
def test_options_of_adamerging_have_no_derivative(tasks, option):
    losses, base, experts, batches = tasks

    def merged(value):
        return adamerging(losses, base, experts, batches, random.key(0), steps=2, **{option: value}).params["w"].sum()

    with pytest.raises(ValueError, match=f"'{option}' of the call is differentiated by torch.func"):
        torch.func.grad(merged)(torch.tensor(0.1))
