"""Elementwise arithmetic on trees: the bits of one leaf at a time, whatever is taken together."""

import operator

import pytest
import torch

from smat_fn import grouped, random, tree


def trees(dtypes):
    """Two trees with leaves of awkward sizes, of one dtype each or of several."""
    sizes = [(), (1,), (3, 5), (0,), (7,), (2, 3, 4), (11, 2)]
    keys, names = random.split(random.key(3), 2), [f"leaf{i}" for i in range(len(sizes))]

    def made(key):
        values = [random.uniform(random.fold_in(key, i), size) - 0.5 for i, size in enumerate(sizes)]
        kinds = [dtypes[i % len(dtypes)] for i in range(len(sizes))]
        return {n: value.to(kind) for n, value, kind in zip(names, values, kinds, strict=True)}

    return [made(key) for key in keys]


def formula(a, b):
    return 0.3 * a + 1.7 * (b - a)


def one_at_a_time(a, b):
    dtype = tree.compute_dtype(a, b)
    return (0.3 * a.to(dtype) + 1.7 * (b.to(dtype) - a.to(dtype))).to(a.dtype)


SEVERAL = [torch.float32, torch.bfloat16, torch.float64]
DTYPES = [[torch.float32], [torch.bfloat16], [torch.float16], [torch.float64], SEVERAL]


@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "bfloat16", "float16", "float64", "several"])
@pytest.mark.parametrize("group", [1, 20, 1 << 26])
def test_groups_have_the_bits_of_one_leaf_at_a_time(dtypes, group, monkeypatch):
    monkeypatch.setattr(grouped, "WIDE", group)
    first, second = trees(dtypes)
    given = tree.clone(first)
    found = grouped.elementwise(formula, first, second)
    torch.testing.assert_close(found, tree.tree_map(one_at_a_time, first, second), rtol=0, atol=0)
    torch.testing.assert_close(first, given, rtol=0, atol=0)  # inputs stay as they are


@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "bfloat16", "float16", "float64", "several"])
@pytest.mark.parametrize("group", [1, 1 << 26])
def test_donated_leaves_take_the_result(dtypes, group, monkeypatch):
    monkeypatch.setattr(grouped, "WIDE", group)
    first, second = trees(dtypes)
    expected = tree.tree_map(one_at_a_time, first, second)
    found = grouped.elementwise(formula, first, second, donate=True)
    assert all(found[path] is leaf for path, leaf in first.items())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_trees_of_two_dtypes_are_computed_in_the_wider_and_rounded_to_the_first():
    (first, _), (_, second) = trees([torch.bfloat16]), trees([torch.float64])
    found = grouped.elementwise(formula, first, second)
    torch.testing.assert_close(found, tree.tree_map(one_at_a_time, first, second), rtol=0, atol=0)
    assert {leaf.dtype for leaf in found.values()} == {torch.bfloat16}


def test_a_wide_result_is_not_rounded():
    first, second = trees([torch.bfloat16])
    found = grouped.elementwise(operator.sub, first, second, wide=True)
    expected = {path: leaf.float() - second[path].float() for path, leaf in first.items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["autograd", "vmap"])
def test_what_is_differentiated_or_batched_is_taken_leaf_by_leaf(kind):
    first, second = trees([torch.float32])
    if kind == "autograd":
        first = {path: leaf.requires_grad_() for path, leaf in first.items()}
        found = grouped.elementwise(formula, first, second)
        total = torch.stack([leaf.sum() for leaf in found.values()]).sum()
        slopes = torch.autograd.grad(total, list(first.values()))
        for slope in slopes:
            torch.testing.assert_close(slope, torch.full_like(slope, 0.3 - 1.7))
    else:
        two = {path: torch.stack([leaf, 2 * leaf]) for path, leaf in first.items()}
        found = torch.func.vmap(lambda a: grouped.elementwise(formula, a, second))(two)
        again = grouped.elementwise(formula, tree.tree_map(lambda leaf: 2 * leaf, first), second)
        torch.testing.assert_close(tree.tree_map(lambda leaf: leaf[1], found), again)


def test_a_number_that_is_a_tensor_does_not_widen_leaves_without_dimensions():
    first, second = trees([torch.float32])
    rate = torch.tensor(0.3, dtype=torch.float64)
    found = grouped.elementwise(lambda a, b: rate * a + b, first, second)
    assert {leaf.dtype for leaf in found.values()} == {torch.float32}
    expected = {path: (rate.float() * leaf + second[path]) for path, leaf in first.items()}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("change", "told"), [("lacks", "tree 2 lacks"), ("adds", "tree 2 has parameter 'more'")])
def test_trees_of_other_leaves_are_an_error_that_names_them(change, told):
    first, second = trees([torch.float32])
    second = {**second, "more": torch.zeros(2)} if change == "adds" else {n: second[n] for n in list(second)[1:]}
    with pytest.raises(ValueError, match=told):
        grouped.elementwise(formula, first, second)


def test_a_number_that_is_learned_has_its_derivative():
    first, second = trees([torch.bfloat16])
    rate = torch.tensor(0.3, requires_grad=True)
    found = grouped.elementwise(lambda a, b: rate * a + (1 - rate) * b, first, second)
    torch.stack([leaf.float().sum() for leaf in found.values()]).sum().backward()
    wanted = sum((leaf.float() - second[path].float()).sum() for path, leaf in first.items())
    torch.testing.assert_close(rate.grad, wanted, rtol=1e-2, atol=1e-2)


def test_groups_hold_as_many_coordinates_as_allowed_or_one_leaf():
    leaves = {name: torch.zeros(size) for name, size in {"a": 10, "b": 10, "c": 30, "d": 5}.items()}
    leaves["e"] = torch.zeros(4, dtype=torch.bfloat16)
    assert list(grouped.groups(leaves, limit=20)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(grouped.groups(leaves)) == [["a", "b", "c", "d"], ["e"]]


def test_wide_copies_are_of_few_coordinates_at_a_time(monkeypatch):
    first, second = trees([torch.float32])
    sizes, multiply = [], torch._foreach_mul

    def counted(leaves, number):
        sizes.append(sum(leaf.numel() for leaf in leaves))
        return multiply(leaves, number)

    monkeypatch.setattr(torch, "_foreach_mul", counted)
    monkeypatch.setattr(grouped, "WIDE", 24)
    grouped.elementwise(formula, first, second)
    assert max(sizes) == 24
    assert sum(sizes) == 2 * sum(leaf.numel() for leaf in first.values())
