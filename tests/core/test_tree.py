"""Paths, structure checks, spans and the one global norm."""

import math
import random as python_random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from smat_fn import optim, testing, tree
from smat_fn.mat import smat


class Pair(NamedTuple):
    left: object
    right: object


@dataclass
class Layer:
    """A registered dataclass; its name is not a leaf."""

    weight: object
    bias: object = None
    name: str = "layer"

    def __len__(self):
        return 3


class Stack:
    """A registered node whose children have no names; ``kept`` is its context."""

    def __init__(self, *parts, kept=0):
        self.parts, self.kept = parts, kept

    def __len__(self):
        return self.kept


pytree.register_dataclass(Layer, field_names=["weight", "bias"], drop_field_names=["name"])
pytree.register_pytree_node(
    Stack, lambda node: (list(node.parts), node.kept), lambda parts, kept: Stack(*parts, kept=kept)
)


def t(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1


TREES = {
    "flat": ({"a.weight": t(2, 3), "b": t()}, ["a.weight", "b"]),
    "nested": ({"a": {"w": t(2), "b": {"x": t(1)}}, "c": t(3)}, ["a.w", "a.b.x", "c"]),
    "list": ([t(1), [t(2), t(3)]], ["0", "1.0", "1.1"]),
    "tuple": ((t(1), {"k": t(2)}), ["0", "1.k"]),
    "namedtuple": (Pair(t(1), Pair([t(2)], t(3))), ["left", "right.left.0", "right.right"]),
    "ordered": (OrderedDict(z=t(1), a=t(2)), ["z", "a"]),
    "default": (defaultdict(list, z=t(1), a=t(2)), ["z", "a"]),
    "proxy": (MappingProxyType({"z": t(1)}), ["z"]),
    "int keys": ({3: t(1), 1: t(2)}, ["3", "1"]),
    "bare tensor": (t(2), [""]),
    "empty": ({}, []),
    "none": ({"a": None, "b": [None, t(1)], "c": Pair(None, t(2))}, ["b.1", "c.right"]),
    "dataclass": ({"l": Layer(t(2), t(1)), "m": Layer([t(3)])}, ["l.weight", "l.bias", "m.weight.0"]),
    "node": ([Stack(t(1), {"x": t(2)}, kept=7)], ["0.0", "0.1.x"]),
    "deque": ({"q": deque([t(1), t(2)], maxlen=5)}, ["q.0", "q.1"]),
    "empty parts": ({"a": {}, "b": [], "c": (), "d": t(1), "e": Pair([], {})}, ["d"]),
}
each_tree = pytest.mark.parametrize(("nested", "paths"), TREES.values(), ids=TREES)


def same_structure(a, b):
    """Equal types at every node, equal keys in order, and the very same leaves."""
    if isinstance(a, torch.Tensor):
        return a is b
    if a is None:
        return b is None
    if isinstance(a, Layer):
        return type(b) is Layer and same_structure([a.weight, a.bias], [b.weight, b.bias])
    if isinstance(a, Stack):
        return type(b) is Stack and a.kept == b.kept and same_structure(a.parts, b.parts)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if type(a) is not type(b) or len(a) != len(b):
        return False
    if isinstance(a, (dict, MappingProxyType)):
        return list(a) == list(b) and all(same_structure(a[k], b[k]) for k in a)
    return all(same_structure(x, y) for x, y in zip(a, b, strict=True))


@each_tree
def test_flatten_names_leaves_in_the_order_of_the_tree(nested, paths):
    assert list(tree.flatten(nested)) == paths


@each_tree
def test_unflatten_inverts_flatten(nested, paths):
    assert same_structure(tree.unflatten(nested, tree.flatten(nested)), nested)


@each_tree
def test_tree_map_keeps_the_structure(nested, paths):
    doubled = tree.tree_map(lambda leaf, other: leaf + other, nested, nested)
    assert list(tree.flatten(doubled)) == paths
    for path, leaf in tree.flatten(doubled).items():
        assert torch.equal(leaf, 2 * tree.flatten(nested)[path])


def test_tree_map_pairs_leaves_by_path_not_by_position():
    got = tree.tree_map(torch.sub, {"a": t(1), "b": t(2)}, {"b": t(2), "a": t(1)})
    assert all(not leaf.any() for leaf in got.values())


def test_tree_map_refuses_surplus_and_missing_leaves_by_name():
    first = {"a": t(1), "b": [t(1), t(1)]}
    with pytest.raises(ValueError, match="tree") as caught:
        tree.tree_map(lambda a, b, c: a, first, {"a": t(1), "b": [t(1)]}, {**first, "z": t(1)})
    assert set(str(caught.value).split("; ")) == {
        "tree 2 lacks parameter 'b.1' of tree 1",
        "tree 3 has parameter 'z' that tree 1 lacks",
    }


def test_unflatten_names_what_is_missing():
    with pytest.raises(ValueError, match=r"^parameter 'a\.x' is missing; parameter 'b' is missing$"):
        tree.unflatten({"a": {"x": t(1), "y": t(1)}, "b": t(1)}, {"a.y": t(1)})


def test_where_is_a_predicate_or_a_tree_of_bools():
    params = {"a": [t(1), t(2)], "l": Layer(t(3))}
    assert tree.predicate(None) is None
    assert tree.predicate(max) is max
    picks = tree.predicate({"a": [True, False], "l": Layer(True), "more": False})
    assert [picks(path, leaf) for path, leaf in tree.flatten(params).items()] == [True, False, True]
    assert list(tree.partition(params, {"a": [True, False], "l": Layer(True)})[0]) == ["a.0", "l.weight"]
    with pytest.raises(ValueError, match=r"lacks parameter 'a\.1': give it a bool for every one"):
        tree.partition(params, {"a": [True], "l": {"weight": False}})


@pytest.mark.parametrize("where", [{"a"}, frozenset("a"), "blocks", 3, {"a": 1}, ["a", "b"], {"a": t(1)}], ids=str)
def test_where_of_another_kind_is_one_sentence(where):
    with pytest.raises(
        ValueError, match=rf"where is a {type(where).__name__}: give a function \(name, weight\) -> bool"
    ):
        tree.predicate(where)


class Named:
    def __call__(self, name):
        return True

    def both(self, name, weight):
        return True


ONE_ARGUMENT = {
    "lambda": lambda name: True,
    "none": lambda: True,
    "object": Named(),
    "partial": partial(lambda name, weight: True, "w", "w"),
}


@pytest.mark.parametrize("where", ONE_ARGUMENT.values(), ids=ONE_ARGUMENT)
def test_a_predicate_takes_two_arguments(where):
    with pytest.raises(ValueError, match=r"^where does not take two arguments: give a function \(name, weight\) -> "):
        tree.predicate(where)
    with pytest.raises(ValueError, match="where does not take two arguments"):
        smat.build(lambda params, batch: (params["w"].sum(), {}), optim.adam(0.1), {"w": t(1)}, where=where)


def test_predicates_of_other_forms_are_taken():
    for where in (Named().both, partial(lambda name, weight, *, at: at, at=True), lambda *both: True, max):
        assert tree.predicate(where) is where


def test_a_module_or_its_parameter_dict_is_no_tree():
    with pytest.raises(ValueError, match=r"is a Linear, not a tensor.*give dict\(module\.named_parameters\(\)\)"):
        tree.flatten(nn.Linear(1, 1))
    weights = nn.ParameterDict({"w": t(1)})
    with pytest.raises(ValueError, match=r"is a ParameterDict, not a tensor.*give dict\(it\.items\(\)\)"):
        tree.flatten({"x": weights})
    assert list(tree.flatten(dict(weights.items()))) == ["w"]


def test_bad_leaves_are_all_listed_at_once():
    bad = {"a": {"x": 1.0, "y": t(1)}, "b": ["text", t(1)], "a.y": t(2), "c": 1j, "d": None}
    with pytest.raises(ValueError, match="not a tensor") as caught:
        tree.flatten(bad)
    text = str(caught.value)
    assert "parameter 'a.x' is a float" in text
    assert "parameter 'b.0' is a str" in text
    assert "parameter 'c' is a complex" in text
    assert "two parameters have the name 'a.y': rename one of them" in text
    assert "parameter 'a.y'" not in text
    assert "parameter 'b.1'" not in text


def test_keys_that_print_alike_are_one_path():
    with pytest.raises(ValueError, match="two parameters have the name '1'"):
        tree.flatten({1: t(1), "1": t(1)})


def test_check_same_lists_every_difference_of_every_tree():
    reference = {"a": t(2), "b": t(3), "c": t(1)}
    tree.check_same(reference, "params", base=dict(reversed(reference.items())))
    with pytest.raises(ValueError, match="base") as caught:
        tree.check_same(reference, "params", base={"a": t(1, 2), "b": t(3)}, grads={**reference, "d": t(1)})
    problems = str(caught.value).split("; ")
    assert set(problems) == {
        "base lacks parameter 'c' of params",
        "parameter 'a' has shape (1, 2) in base but (2,) in params",
        "grads has parameter 'd' that params lacks",
    }


def test_of_many_differences_the_first_are_listed_and_the_others_counted():
    reference = {f"l{i}": t(1) for i in range(200)}
    with pytest.raises(ValueError, match="lacks parameter 'l0' of base") as caught:
        tree.check_same(reference, "base", expert={}, twelve=dict(list(reference.items())[12:]))
    told = str(caught.value).split("; ")
    assert told[:4] == [
        *(f"expert lacks parameter 'l{i}' of base" for i in range(3)),
        "expert lacks 194 more parameters of base",
    ]
    assert told[4:] == [*(f"twelve lacks parameter 'l{i}' of base" for i in range(3)), "and 12 more like these"]


def test_check_same_takes_any_name():
    tree.check_same({"a": t(1)}, "params", reference={"a": t(1)}, name={"a": t(1)})


def test_check_floating_lists_every_other_leaf():
    ok = {"a": t(1), "b": t(1).bfloat16(), "c": t(1).double(), "d": t(1).half()}
    tree.check_floating(ok, "params")
    bad = {"i": t(1).long(), "f": t(1), "c": t(1).to(torch.complex64), "b": t(1).bool()}
    with pytest.raises(ValueError, match="of params has dtype") as caught:
        tree.check_floating(bad, "params")
    text = str(caught.value)
    assert all(f"{path!r} of params has dtype {name}" in text for path, name in zip("icb", _NAMES, strict=True))
    assert "'f'" not in text


_NAMES = ("int64", "complex64", "bool")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_what_is_not_finite_is_found_among_numbers_whose_sum_exceeds_the_dtype(dtype):
    most = torch.finfo(dtype).max
    for values, finite in (([most] * 5, True), ([most, -most, 1.0], True), ([most, math.inf, -math.inf], False)):
        assert tree.is_finite(torch.tensor(values, dtype=torch.float64).to(dtype)) == finite
    assert not tree.is_finite(torch.tensor([1.0, math.nan]).to(dtype))
    assert tree.is_finite(torch.zeros(0).to(dtype))


def test_check_finite_counts_the_bad_values():
    tree.check_finite({"a": t(2), "i": t(1).long(), "e": t(0)}, "base")
    bad = {"a": torch.tensor([1.0, math.nan, math.inf]), "b": torch.tensor(-math.inf), "c": t(1)}
    with pytest.raises(ValueError, match="parameter 'a' of base holds 2 values") as caught:
        tree.check_finite(bad, "base")
    assert "parameter 'b' of base holds 1 values" in str(caught.value)
    assert "'c'" not in str(caught.value)


def test_compute_dtype():
    assert tree.compute_dtype(t(1).bfloat16(), t(1).half()) == torch.float32
    assert tree.compute_dtype(t(1), t(1).double()) == torch.float64


def test_cast_changes_floating_leaves_only():
    source = {"f": t(2), "n": [t(1).double()], "i": torch.tensor([1])}
    got = tree.cast(source, torch.bfloat16)
    assert [leaf.dtype for leaf in tree.flatten(got).values()] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert source["f"].dtype == torch.float32


def test_clone_shares_no_memory_and_no_graph():
    shared = t(3).requires_grad_()
    source = {"a": shared, "b": [shared], "v": t(4)[1:3]}
    copy = tree.clone(source)
    for leaf in tree.flatten(copy).values():
        assert not leaf.requires_grad
        leaf.zero_()
    assert torch.equal(shared.detach(), t(3))
    assert torch.equal(source["v"], torch.tensor([2.0, 3.0]))
    again = tree.clone(source)
    again["a"].zero_()
    assert again["b"][0].any()


@each_tree
def test_combine_inverts_partition(nested, paths):
    picked, rest = tree.partition(nested, lambda path, leaf: leaf.numel() % 2 == 0)
    assert sorted([*picked, *rest]) == sorted(paths)
    assert all(leaf.numel() % 2 == 0 for leaf in picked.values())
    assert not any(leaf.numel() % 2 == 0 for leaf in rest.values())
    assert same_structure(tree.combine(nested, rest, picked), nested)


@pytest.mark.parametrize("seed", range(8))
def test_spans_cover_every_coordinate_once_in_order_within_the_limit(seed):
    rng = python_random.Random(seed)
    limit = rng.choice([1, 3, 8, 64])
    sizes = [rng.choice([0, 1, 2, 7, 8, 9, 63, 64, 65, 200]) for _ in range(rng.randint(1, 12))]
    groups = list(tree.spans(sizes, limit))
    assert all(groups)
    assert all(sum(stop - start for _, start, stop in group) <= limit for group in groups)
    assert all(start % limit == 0 for group in groups for _, start, _ in group)
    covered = [(index, n) for group in groups for index, start, stop in group for n in range(start, stop)]
    assert covered == [(index, n) for index, size in enumerate(sizes) for n in range(size)]


def test_spans_put_small_items_together():
    assert list(tree.spans([2, 3, 4, 10], 8)) == [
        [(0, 0, 2), (1, 0, 3)],
        [(2, 0, 4)],
        [(3, 0, 8)],
        [(3, 8, 10)],
    ]
    assert list(tree.spans([], 8)) == []
    assert list(tree.spans([0, 0], 8)) == []


def by_halves(values):
    values = [*values, *([0 * values[0]] * ((1 << (len(values) - 1).bit_length()) - len(values)))]
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


def norm_by_definition(leaves):
    """Number by number."""
    sums = []
    for leaf in leaves:
        wide = leaf if leaf.dtype == torch.float64 else leaf.float()
        values = wide.flatten().numpy()
        for first in range(0, len(values), 4096):
            block = values[first : first + 4096]
            sums.append(float(by_halves([*(block * block), *([block.dtype.type(0)] * (4096 - len(block)))])))
    return math.sqrt(by_halves(sums))


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_global_norm_is_its_definition(dtype):
    leaves = [gaussian(3, 1500, dtype=dtype), gaussian(dtype=dtype), gaussian(0), gaussian(17, 9, dtype=dtype, seed=1)]
    norm = tree.global_norm(leaves)
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert norm.item() == norm_by_definition(leaves)
    exact = math.sqrt(sum(leaf.double().square().sum().item() for leaf in leaves))
    assert norm.item() == pytest.approx(exact, rel=1e-6)


def test_global_norm_computes_float64_leaves_in_float64():
    leaves = [gaussian(5000, dtype=torch.float64), gaussian(30, dtype=torch.float64, seed=1)]
    assert tree.global_norm(leaves).item() == norm_by_definition(leaves)
    assert tree.global_norm(leaves).item() == pytest.approx(torch.linalg.norm(torch.cat(leaves)).item(), rel=1e-14)


def test_a_float64_leaf_does_not_change_how_its_neighbours_are_added():
    single, double = gaussian(5000), torch.zeros(3, dtype=torch.float64)
    assert tree.global_norm([single]) == norm_by_definition([single])
    for leaves in ([single, double], [double, single], [single, double, single[:7]]):
        assert tree.global_norm(leaves).item() == norm_by_definition(leaves)


def test_the_sum_by_halves_is_its_definition_on_any_number_of_threads():
    for size in (1, 2, 3, 7, 8, 100):
        values = gaussian(size, dtype=torch.float64)
        assert tree.sum_by_halves(values).item() == by_halves(values.tolist())
    assert tree.sum_by_halves(torch.empty(0)).item() == 0
    many, threads = gaussian(100_003, dtype=torch.float64, seed=3), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert tree.sum_by_halves(many).item() == by_halves(many.tolist())
    finally:
        torch.set_num_threads(threads)


def test_global_norm_over_more_than_one_group():
    # 1,048,577 coordinates of 1/2: one more than a group holds
    assert tree.global_norm([torch.full((2**20 + 1,), 0.5), t()]).item() == math.sqrt((2**20 + 1) / 4 + 1)


@pytest.mark.parametrize(
    ("leaves", "norm"),
    [([[3.0], [4.0]], 5.0), ([[3.0, 4.0], [12.0]], 13.0), ([[1.0] * 4096, [1.0] * 4096 * 3], 128.0), ([[-0.5]], 0.5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_global_norm_is_exact_where_the_sum_is(leaves, norm, dtype):
    assert tree.global_norm([torch.tensor(leaf, dtype=dtype) for leaf in leaves]).item() == norm


def test_a_strided_leaf_is_copied_once(monkeypatch):
    leaf, copies = gaussian(1500, 2000).T, []
    reshape = torch.Tensor.reshape
    monkeypatch.setattr(torch.Tensor, "reshape", lambda own, *shape: copies.append(own) or reshape(own, *shape))
    norm = tree.global_norm([leaf])
    monkeypatch.undo()
    assert len(copies) == 1
    assert torch.equal(norm, tree.global_norm([leaf.contiguous()]))


def test_global_norm_does_not_depend_on_nesting_or_strides():
    a, b, c = gaussian(70, 90), gaussian(11, seed=1), gaussian(5, 4, seed=2)
    norm = tree.global_norm({"a": a, "b": b, "c": c})
    assert torch.equal(norm, tree.global_norm([a, (b, {"c": c})]))
    assert torch.equal(norm, tree.global_norm(Pair({"x": [a]}, [b, c.T.contiguous().T])))
    assert torch.equal(norm, tree.global_norm([a.reshape(-1), b, c.reshape(4, 5)]))


@pytest.mark.parametrize("empty", [{}, [], {"a": {}}, {"a": torch.zeros(0)}, [torch.zeros(0, 3), torch.zeros(0)]])
def test_global_norm_of_nothing_is_zero(empty):
    norm = tree.global_norm(empty)
    assert norm.dtype == torch.float64
    assert norm.item() == 0


def test_global_norm_shows_what_is_not_finite():
    assert tree.global_norm([torch.tensor([math.inf, 1.0])]).item() == math.inf
    assert math.isnan(tree.global_norm([torch.tensor([math.nan]), t(3)]).item())


def test_global_norm_of_complex_numbers_is_refused():
    with pytest.raises(ValueError, match="parameter 'a' is complex"):
        tree.global_norm({"a": torch.tensor([3 + 4j])})


def test_trees_of_complex128_are_compared():
    one, two = ({"a": torch.tensor([1, part], dtype=torch.complex128)} for part in (3j, 4j))
    testing.assert_trees_equal(one, one)
    with pytest.raises(AssertionError, match="'a' differs in 1 of 2 values, first at flat index 1: 3j, expected 4j"):
        testing.assert_trees_equal(one, two)


@pytest.mark.parametrize("value", [math.inf, -math.inf, complex(math.inf, 1)])
def test_an_infinity_is_close_to_an_equal_one_alone(value):
    far = {"a": torch.tensor([1.0, value])}
    for rtol in (0.0, 1e-3):
        testing.assert_trees_close(far, far, rtol=rtol)
        for one, two in ((far, {"a": torch.tensor([1.0, 5.0])}), ({"a": torch.tensor([1.0, 5.0])}, far)):
            with pytest.raises(AssertionError, match="1 of 2 values off, by up to inf"):
                testing.assert_trees_close(one, two, rtol=rtol)
        with pytest.raises(AssertionError, match="1 of 1 values off, by up to nan"):
            testing.assert_trees_close({"a": torch.tensor([math.nan])}, {"a": torch.tensor([math.nan])}, rtol=rtol)


def test_trees_leave_no_leaf_alive():
    import gc
    import weakref

    leaf = torch.zeros(3)
    alive = weakref.ref(leaf)
    gc.disable()
    try:
        tree.tree_map(torch.add, {"a": [leaf]}, {"a": [leaf]})
        del leaf
        assert alive() is None
    finally:
        gc.enable()
