"""A step is the same step however its batch is split: micro-batches weighted by what their losses are means of."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from smat_fn import grouped, optim, random, testing, tree
from smat_fn.data import text
from smat_fn.data.batching import split_rows
from smat_fn.mat import step
from smat_fn.types import Micro, Optimizer

METHODS = {
    "ft": ("finetune", {}),
    "smat": ("smat", {"period": 2, "sigma": 0.01}),
    "smat mixed": ("smat", {"lam": 0.3, "sigma": 0.01}),
    "smat host": ("smat", {"period": 1, "sigma": 0.01, "offload": "cpu"}),
    "asam": ("asam", {"rho": 0.05}),
    "mergopt": ("mergopt", {"b": 0.01, "k_max": 4}),
    "orthoreg": ("orthoreg", {"lambda_reg": 0.01}),
}
each_method = pytest.mark.parametrize("name", METHODS)
BASE = testing.random_tree(0, {"table": (11, 4), "out": (4, 11)}, dtype=torch.float64)
START = testing.random_tree(1, {"table": (11, 4), "out": (4, 11)}, dtype=torch.float64)


@pytest.mark.parametrize("parts", [0, -1, 1.5])
def test_no_batch_has_fewer_parts_than_one(parts):
    with pytest.raises(ValueError, match=f"split_rows: parts is {parts}, must be an integer of at least 1"):
        split_rows(torch.ones(3), parts)


def test_a_batch_without_rows_is_not_split():
    with pytest.raises(ValueError, match=r"the batch has no rows in 'n', 0-d"):
        split_rows({"x": torch.ones(3), "n": torch.tensor(3)}, 2)


def gradients(name, loss_fn, batches):
    """What the method hands to the optimizer, step by step, and its losses; parameters stay."""
    recorder = Optimizer(lambda params: None, lambda grads, state, params, **_: (params, grads))
    module, hyper = METHODS[name]
    method = importlib.import_module(f"smat_fn.mat.{module}").build(loss_fn, recorder, BASE, **hyper)
    state, found = method.init(START), []
    for batch in batches:
        state, info = method.update(random.key(3), state, batch)
        found.append({**state.opt_state, "loss": info.loss})
    return found


def slope(params, batch):
    """``mean(batch) / 2 * |theta|^2``."""
    return sum((0.5 * leaf**2).sum() for leaf in params.values()) * batch.mean(), None


def next_token(params, batch):
    """The mean over all supervised tokens of a batch, as causal language models have it."""
    logits = params["table"][batch["input_ids"]] @ params["out"]
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100), None


def rows(lengths, seed=0):
    """A collated batch of rows of these lengths, half of each row supervised."""
    ids = torch.randint(11, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).split(lengths)
    examples = []
    for row in ids:
        tokens = tuple(row.tolist())
        examples.append(text.Example(tokens, (-100,) * (len(tokens) // 2) + tokens[len(tokens) // 2 :]))
    return text.collate(examples, pad=0)


@each_method
def test_one_by_eight_is_two_by_four_is_eight_by_one_bit_for_bit(name):
    # one example carries the slope, so that no sum rounds: what is left is the draw, the weights and their order
    whole = torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    want = gradients(name, slope, [whole] * 3)
    for parts in (1, 2, 4, 8):
        micro = split_rows(whole, parts)
        assert [part.weight for part in micro] == [8 // parts] * parts
        for got, expected in zip(gradients(name, slope, [micro] * 3), want, strict=True):
            testing.assert_trees_equal(got, expected)


@each_method
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_the_mean_over_all_tokens_comes_out(name, parts):
    batches = [rows([9, 2, 17, 5, 30, 3, 8], seed) for seed in range(3)]
    micro = [text.split(batch, parts) for batch in batches]
    assert len({part.weight for part in micro[0]}) > 1
    want = gradients(name, next_token, batches)
    for got, expected in zip(gradients(name, next_token, micro), want, strict=True):
        testing.assert_trees_close(got, expected, rtol=1e-11, atol=1e-13)
    # equal weights would be another objective
    even = gradients(name, next_token, [[Micro(part.batch) for part in parts] for parts in micro])
    assert (even[0]["out"] - want[0]["out"]).abs().max() > 1e-4


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
def test_sums_of_many_leaves_at_once_are_those_of_each_leaf_bit_for_bit(weights, monkeypatch):
    shapes = {f"{name}{i}": (3 * i,) if i else () for i in range(4) for name in ("float32.", "bfloat16.", "float64.")}
    leaves = {path: torch.empty(shape, dtype=getattr(torch, path[:-2])) for path, shape in shapes.items()}
    shared = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    given = [testing.random_tree(seed, shapes) for seed in range(3)]
    given = [{path: g.to(leaves[path].dtype) for path, g in own.items()} for own in given]
    for own in given:  # one tensor of two leaves, one that is not contiguous, one that is expanded
        own |= {"one": shared, "two": shared, "turned": shared.T, "wide": shared[0, 0].expand(6)}
    before = [tree.clone(own) for own in given]

    def mean():
        batch = [Micro(i, weight) for i, weight in enumerate(weights)]
        return step.accumulate(lambda params, i: ((torch.zeros(()), None), given[i]), given[0], batch)[2]

    monkeypatch.setattr(grouped, "GROUP", 10)
    found = mean()
    monkeypatch.setattr(step, "plain", lambda leaves: False)
    testing.assert_trees_equal(found, mean())
    for own, old in zip(given, before, strict=True):
        testing.assert_trees_equal(own, old)


def test_micro_batches_of_text_are_trimmed_and_weighted_by_supervised_tokens():
    batch = rows([9, 2, 17, 5])
    first, second = text.split(batch, 2)
    assert batch["input_ids"].shape == (4, 24)
    assert (first.batch["input_ids"].shape, second.batch["input_ids"].shape) == ((2, 16), (2, 24))
    # the first token of a row is never predicted
    assert (first.weight, second.weight) == (5 + 1, 9 + 3)
    for name, tensor in first.batch.items():
        assert torch.equal(tensor, batch[name][:2, :16])
    silent = text.collate([text.Example((1, 2), (-100, -100)), text.Example((1, 2), (1, 2))], pad=0)
    assert [part.weight for part in text.split(silent, 2)] == [1]


def test_rows_are_cut_into_sizes_that_differ_by_one_and_never_into_nothing():
    batch = (torch.arange(7), {"x": torch.arange(14).view(7, 2)})
    parts = split_rows(batch, 3)
    assert [part.weight for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat([part.batch[0] for part in parts]), batch[0])
    assert torch.equal(torch.cat([part.batch[1]["x"] for part in parts]), batch[1]["x"])
    assert type(parts[0].batch) is tuple
    assert [part.weight for part in split_rows(torch.arange(2), 5)] == [1, 1]
    with pytest.raises(ValueError, match=r"lengths \{'0': 2, '1': 3\}: to be split they need the same rows"):
        split_rows((torch.zeros(2), torch.zeros(3)), 2)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_that_are_not_positive_are_refused(weight):
    batch = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"weights of micro-batches are \[.*must be positive"):
        gradients("ft", slope, [[Micro(batch, 1.0), Micro(batch, weight)]])


def test_a_list_is_one_batch_unless_all_its_members_are_micro_batches():
    # torch's default collate makes lists of the tuples of a data set
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([1.0, -2.0, 0.5])
    (batch,) = DataLoader(TensorDataset(x, y), batch_size=3)
    assert type(batch) is list

    def loss_fn(params, batch):
        return ((batch[0] @ params["w"] - batch[1]) ** 2).mean(), None

    params = {"w": torch.tensor([0.5, -1.0])}
    method = importlib.import_module("smat_fn.mat.finetune").build(loss_fn, optim.adam(0.1), params)
    state, info = method.update(random.key(0), method.init(params), batch)
    want, tupled = method.update(random.key(0), method.init(params), (x, y))
    testing.assert_trees_equal([state.params, info.loss], [want.params, tupled.loss])
    assert info.loss == ((x @ params["w"] - y) ** 2).mean()


@pytest.mark.parametrize(
    "batch",
    [Micro(torch.ones(1), 2.0), (Micro(torch.ones(1)), Micro(torch.ones(1))), [Micro(torch.ones(1)), torch.ones(1)]],
    ids=["alone", "tuple", "some"],
)
def test_micro_batches_in_another_form_are_refused(batch):
    with pytest.raises(ValueError, match="the batch is a generator, which can be read only once"):
        gradients("asam", slope, [(part for part in batch)])
    with pytest.raises(ValueError, match=r"micro-batches are a list whose members are all Micro\(batch, weight\)"):
        gradients("ft", slope, [batch])


def test_sums_in_bf16_keep_their_weights_in_float32():
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    module = importlib.import_module("smat_fn.mat.finetune")
    recorder = Optimizer(lambda params: None, lambda grads, state, params, **_: (params, tree.clone(grads)))
    method = module.build(lambda p, b: ((p["w"] * b).sum(), None), recorder, params)
    data = [Micro(torch.full((2,), value, dtype=torch.bfloat16), w) for value, w in ((256.0, 1), (1.0, 3))]
    state, _ = method.update(random.key(0), method.init(params), data)
    # (256 + 3) / 4 rounded once; 256 + 3 is 258 or 260 in bfloat16
    assert state.opt_state["w"].tolist() == [torch.tensor(64.75).bfloat16().item()] * 2
