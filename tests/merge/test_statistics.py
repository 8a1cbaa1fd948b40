"""Mergers by statistics against their definitions, and the statistics against closed forms."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smat_fn import random
from smat_fn.data.batching import split_rows
from smat_fn.grad import ModuleLoss
from smat_fn.merge import fisher, fisher_vector, reg_mean, reg_mean_vector
from smat_fn.merge.statistics import diagonal_fisher, drawn_labels, input_grams
from smat_fn.tree import clone
from smat_fn.types import Micro

GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def uniform(*shape):
    return torch.rand(*shape, generator=GENERATOR)


# ---- mergers


def test_fisher_is_the_weighted_mean_coordinate_by_coordinate():
    base = {"w": normal(3, 2), "b": normal(2)}
    experts = {name: {"w": normal(3, 2), "b": normal(2)} for name in "xyz"}
    fishers = {name: {"w": uniform(3, 2) * 3, "b": uniform(2) * 1e-3} for name in "zyx"}
    weights = {"x": 0.5, "z": 2.0}
    merged = fisher(base, experts, fishers, weights=weights, floor=1e-2)
    rms = {n: (sum(float(leaf.double().square().sum()) for leaf in f.values()) / 8) ** 0.5 for n, f in fishers.items()}
    for path, leaf in merged.items():
        for place in torch.cartesian_prod(*map(torch.arange, leaf.shape)).reshape(-1, leaf.ndim).tolist():
            at = tuple(place)
            shares = {n: weights.get(n, 1.0) * max(float(fishers[n][path][at]) / rms[n], 1e-2) for n in experts}
            mean = sum(shares[n] * float(experts[n][path][at]) for n in experts) / sum(shares.values())
            assert float(leaf[at]) == pytest.approx(mean, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("exponent", [-140, 130, 400])
def test_fisher_of_diagonals_that_float32_does_not_hold(exponent):
    base, experts = {"w": torch.zeros(3, 2)}, {name: {"w": normal(3, 2)} for name in "xy"}
    plain = {name: {"w": uniform(3, 2).double() + 0.1} for name in "xy"}
    scaled = {name: {"w": own["w"] * 2.0**exponent} for name, own in plain.items()}  # exactly
    want = fisher(base, experts, plain)
    assert torch.equal(fisher(base, experts, scaled)["w"], want["w"])
    small = {name: {"w": own["w"].mul(2.0**-135).float()} for name, own in plain.items()}  # 2**-149 is the least
    torch.testing.assert_close(fisher(base, experts, small)["w"], want["w"], rtol=0, atol=1e-3)
    weights = dict.fromkeys("xy", 2.0 ** -abs(exponent))
    assert torch.equal(fisher(base, experts, plain, weights=weights)["w"], want["w"])


def test_fisher_of_equal_diagonals_is_the_mean_and_the_largest_decides():
    base, ones = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    experts = [{"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"w": torch.tensor([3.0, 2.0, 1.0, 0.0])}]
    assert fisher(base, experts, [ones, ones])["w"].tolist() == [2.0, 2.0, 2.0, 2.0]
    assert fisher(base, experts, [ones, {"w": torch.zeros(4)}], floor=1e-9)["w"].tolist() == [1.0, 2.0, 3.0, 4.0]
    scaled = fisher(base, experts, [ones, {"w": torch.full((4,), 1e-8)}])["w"]
    assert torch.allclose(scaled, torch.full((4,), 2.0))  # the sizes of the losses play no part
    raw = fisher(base, experts, [ones, {"w": torch.full((4,), 3.0)}], normalize=False)["w"]
    assert raw.tolist() == [2.5, 2.0, 1.5, 1.0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [-1e-9, torch.nan, torch.inf])
def test_diagonals_that_are_no_means_of_squares(value, normalize):
    tree, ones = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    wrong = {"w": torch.tensor([1.0, 2.0, value, 0.0])}
    with pytest.raises(ValueError, match=r"'w' of the statistics of '1' has values that are negative or not finite"):
        fisher(tree, [tree, clone(tree)], [ones, wrong], normalize=normalize)


def test_complex_statistics_have_no_order():
    tree, ones = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    with pytest.raises(ValueError, match="parameter 'w' of statistics of '1' is complex64, must be floating-point"):
        fisher(tree, [tree, clone(tree)], [ones, {"w": torch.ones(4, dtype=torch.complex64)}])


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([[1.0, 2.0], [-2.0, 4.0]]), torch.tensor([[-1.0, 0.0], [0.0, 1.0]]), torch.full((2, 2), torch.nan)],
)
def test_gram_matrices_that_are_none(wrong):
    tree, gram = {"w": torch.zeros(3, 2)}, {"w": torch.eye(2)}
    with pytest.raises(ValueError, match=r"a Gram matrix of weights \(3, 2\) is not one"):
        reg_mean(tree, [tree, clone(tree)], [gram, {"w": wrong}])


def test_gram_matrices_that_were_rounded_are_taken():
    rows = normal(50, 7)
    gram = {"w": (rows.mT @ rows).bfloat16()}
    gram["w"][0, 1] = torch.nextafter(gram["w"][0, 1], torch.tensor(torch.inf, dtype=torch.bfloat16))
    tree = {"w": normal(3, 7)}
    merged = reg_mean({"w": torch.zeros(3, 7)}, [tree, clone(tree)], [gram, gram])
    torch.testing.assert_close(merged["w"], tree["w"], rtol=0, atol=5e-3)


def test_reg_mean_minimises_the_difference_of_outputs():
    weights, inputs = [normal(4, 5).double() for _ in range(3)], [normal(20, 5).double() for _ in range(3)]
    grams = [{"w": x.mT @ x / len(x)} for x in inputs]
    merged = reg_mean({"w": normal(4, 5).double()}, [{"w": w} for w in weights], grams, scale=1.0)["w"]
    # the same least squares, over all rows at once
    outputs = torch.cat([x @ w.mT for x, w in zip(inputs, weights, strict=True)])
    expected = torch.linalg.lstsq(torch.cat(inputs), outputs).solution.mT
    torch.testing.assert_close(merged, expected)


def test_reg_mean_with_a_scale_is_its_formula():
    base, weights = normal(2, 3), [normal(2, 3), normal(2, 3)]
    grams = [(x := normal(8, 3)).mT @ x / 8 for _ in weights]
    merged = reg_mean({"w": base, "b": torch.zeros(2)}, [{"w": w, "b": torch.ones(2)} for w in weights],
                      [{"w": g} for g in grams], scale=0.3)  # fmt: skip
    shrunk = [0.3 * g + 0.7 * torch.diag(torch.diag(g)) for g in grams]
    expected = torch.linalg.inv(sum(shrunk)) @ sum(g @ w.T for g, w in zip(shrunk, weights, strict=True))
    torch.testing.assert_close(merged["w"], expected.T)
    assert merged["b"].tolist() == [1.0, 1.0]


def test_inputs_that_never_occur_take_the_mean():
    x = [normal(9, 3), normal(9, 3)]
    for rows in x:
        rows[:, 1] = 0
    deltas = [normal(2, 3), normal(2, 3)]
    for scale in (0.5, 1.0):
        grams = [{"w": rows.mT @ rows} for rows in x]
        vector = reg_mean_vector({"w": torch.zeros(2, 3)}, [{"w": d} for d in deltas], grams, scale=scale)["w"]
        assert torch.allclose(vector[:, 1], (deltas[0] + deltas[1])[:, 1] / 2)
        assert vector.isfinite().all()


def test_problems_are_listed_together():
    base, expert = {"w": torch.zeros(2, 3)}, {"w": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=r"expert 'b' has no statistics \(fisher\).*merge.py statistics.*'c', which"):
        fisher(base, {"a": expert, "b": clone(expert)}, {"a": expert, "c": expert})
    with pytest.raises(ValueError, match=r"there are statistics of 'place 1', which is not an expert"):
        fisher(base, [expert], [expert, expert])
    with pytest.raises(ValueError, match=r"statistics of '0' lacks parameter 'w'"):
        fisher_vector(base, [expert], [{}])
    with pytest.raises(ValueError, match=r"parameter 'w' has shape \(2, 2\) in statistics of '0' but \(3, 3\)"):
        reg_mean(base, [expert], [{"w": torch.eye(2)}])
    with pytest.raises(ValueError, match="of other layers than the first"):
        reg_mean(base, [expert, clone(expert)], [{"w": torch.eye(3)}, {}])
    with pytest.raises(ValueError, match=r"floor is 0, must be positive.*|floor is 0, must be a positive.*-1"):
        fisher(base, [expert], [expert], floor=0, weights={"0": -1})
    with pytest.raises(ValueError, match="all weights are 0"):
        fisher(base, [expert], [expert], weights={"0": 0})
    with pytest.raises(ValueError, match="all weights of parameter 'w' are 0: leave one expert in"):
        fisher(base, [expert], [expert], weights={"0": {"w": 0}})
    with pytest.raises(ValueError, match=r"scale is 1.5, must be in \[0, 1\]"):
        reg_mean(base, [expert], [{}], scale=1.5)


# ---- statistics


def logistic(params, batch):
    inputs, labels = batch
    logits = inputs @ params["w"].T
    return nn.functional.cross_entropy(logits, labels), logits


def test_the_empirical_diagonal_is_that_of_a_linear_classifier():
    params, inputs, labels = {"w": normal(3, 4)}, normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 1])
    found = diagonal_fisher(logistic, params, split_rows((inputs, labels), 6))["w"]
    shares = (inputs @ params["w"].T).softmax(1)
    errors = shares - nn.functional.one_hot(labels, 3)  # the gradient of a row is its outer product with the input
    torch.testing.assert_close(found, (errors.square().T @ inputs.square()) / 6)
    assert found.dtype == torch.float32


def test_a_row_of_several_tokens_counts_by_its_sum():
    params, inputs, labels = {"w": normal(3, 4)}, normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 1])
    found = diagonal_fisher(logistic, params, [Micro((inputs, labels), 6), Micro((inputs, labels), 6)])["w"]
    errors = (inputs @ params["w"].T).softmax(1) - nn.functional.one_hot(labels, 3)
    torch.testing.assert_close(found, (errors.T @ inputs).square())


def test_drawn_labels_follow_the_predictions(as_on_cuda):
    params, inputs = {"w": torch.tensor([[1.0], [0.0], [-1.0]])}, torch.ones(20_000, 1)
    given = torch.zeros(len(inputs), dtype=torch.int64)
    _, labels = drawn_labels(logistic, params, (inputs, given), random.key(4))
    shares = torch.bincount(labels, minlength=3) / len(labels)
    torch.testing.assert_close(shares, torch.tensor([1.0, 0.0, -1.0]).softmax(0), atol=0.01, rtol=0)
    with as_on_cuda():
        again = drawn_labels(logistic, params, (inputs, given), random.key(4))[1]
    other = drawn_labels(logistic, params, (inputs, given), random.key(5))[1]
    assert torch.equal(labels, again)
    assert not torch.equal(labels, other)


@pytest.mark.slow
def test_drawn_labels_give_the_fisher_matrix_on_average():
    params, inputs = {"w": normal(2, 1)}, torch.full((4000, 1), 0.7)
    batch = drawn_labels(logistic, params, (inputs, torch.zeros(4000, dtype=torch.int64)), random.key(1))
    found = diagonal_fisher(logistic, params, split_rows(batch, 4000))["w"]
    p = float((inputs[:1] @ params["w"].T).softmax(1)[0, 0])
    torch.testing.assert_close(found, torch.full((2, 1), p * (1 - p) * 0.49), rtol=0.1, atol=0)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def layered():
    torch.manual_seed(0)
    module = Layers()
    loss = ModuleLoss(module, lambda m, batch: (m(batch["x"] if isinstance(batch, dict) else batch).sum(), None))
    return module, loss, {name: leaf.detach().clone() for name, leaf in module.named_parameters()}


def test_grams_are_those_of_all_inputs(layered):
    module, loss, params = layered
    params["first.weight"] = normal(4, 3)  # not the module's own
    batches = [normal(5, 3), normal(2, 3)]
    found = input_grams(loss, params, batches)
    x = torch.cat(batches)
    hidden = torch.relu(x @ params["first.weight"].T + params["first.bias"])
    assert list(found) == ["first.weight", "second.weight"]  # the others see nothing
    torch.testing.assert_close(found["first.weight"], x.T @ x / 7)
    torch.testing.assert_close(found["second.weight"], hidden.T @ hidden / 7)
    assert list(input_grams(loss, params, batches, only=["second.weight"])) == ["second.weight"]
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    module.first = nn.Linear(4, 2, bias=False)
    module.first.weight = module.second.weight  # shared: the inputs of both
    shared = ModuleLoss(module, lambda m, x: (m.second(torch.relu(m.first(input=x) @ torch.ones(2, 4))).sum(), None))
    params, x = dict(module.named_parameters()), normal(5, 4)
    rows = torch.cat([x, torch.relu(x @ params["first.weight"].T @ torch.ones(2, 4))])
    torch.testing.assert_close(input_grams(shared, params, [x])["first.weight"], rows.T @ rows / 10)


def test_grams_are_products_in_float32_inside_autocast(layered):
    _, loss, params = layered
    x = normal(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = input_grams(loss, params, [x])["first.weight"]
    assert torch.equal(found, x.T @ x / 5)


def test_grams_leave_padding_out(layered):
    _, loss, params = layered
    x, mask = normal(2, 3, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = input_grams(loss, params, [{"x": x, "attention_mask": mask}])["first.weight"]
    kept = x[mask.bool()]
    torch.testing.assert_close(found, kept.T @ kept / 3)
    joined = ModuleLoss(loss.module, lambda m, batch: (m(batch["x"].reshape(-1, 3)).sum(), None))  # as OPT's MLP
    assert torch.equal(input_grams(joined, params, [{"x": x, "attention_mask": mask}])["first.weight"], found)


def test_padding_that_no_mask_tells_is_an_error(layered):
    module, loss, params = layered
    module.config = SimpleNamespace(is_encoder_decoder=True)
    mask, labels = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[3, 1], [1, -100]])
    for change in ({"labels": labels.abs()}, {"attention_mask": mask.clamp(min=1)}):
        batch = {"x": normal(2, 3, 3), "attention_mask": mask, "labels": labels, **change}
        with pytest.raises(ValueError, match=r"encoder-decoder are filled up to two lengths: give batches of one row"):
            input_grams(loss, params, [batch])
        for row, _ in split_rows(batch, 2)[:1]:  # it has none
            assert torch.equal(input_grams(loss, params, [row])["first.weight"], row["x"][0].T @ row["x"][0] / 3)


def test_values_that_are_not_finite_are_no_statistics(layered):
    _, loss, params = layered
    large = torch.tensor([[1e20, 1.0, 1.0]])
    with pytest.raises(ValueError, match=r"parameter 'first.weight' of the Gram matrices holds 1 values that are"):
        input_grams(loss, params, [large])
    thin = [{"w": x.T @ x} for x in (torch.logspace(-3, 3, 32) * normal(2, 32), normal(2, 32))]
    with pytest.raises(ValueError, match=r"have a singular sum at scale 0\.999999999: pass a smaller scale"):
        reg_mean({"w": normal(3, 32)}, [{"w": normal(3, 32)} for _ in thin], thin, scale=1 - 1e-9)
    with pytest.raises(ValueError, match=r"parameter 'w' of the Fisher matrix holds 2 values that are"):
        diagonal_fisher(logistic, {"w": torch.zeros(2, 3)}, [Micro((large, torch.tensor([0])), 1)])


def test_statistics_want_rows_and_a_module(layered):
    _, loss, params = layered
    with pytest.raises(ValueError, match="no rows: give at least one"):
        diagonal_fisher(logistic, {"w": normal(3, 4)}, [])
    with pytest.raises(ValueError, match="no batches: give at least one"):
        input_grams(loss, params, [])
    with pytest.raises(ValueError, match=r"give a smat_fn\.grad\.ModuleLoss"):
        input_grams(logistic, params, [])
    with pytest.raises(ValueError, match=r"row 0 is a tuple: give Micro\(batch, weight\) of one row each"):
        diagonal_fisher(logistic, {"w": normal(3, 4)}, [(normal(1, 4), torch.zeros(1, dtype=torch.int64))])
    convolution = nn.Conv1d(1, 1, 1)
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear of Conv1d has its weight among the 2 parameters"):
        input_grams(ModuleLoss(convolution, lambda m, x: (m(x).sum(), None)), dict(convolution.named_parameters()), [])
