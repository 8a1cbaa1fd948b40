"""Bad input: one ValueError that lists everything, before any work."""

import re

import pytest
import torch

from smat_fn import merge, random
from smat_fn.config import Della, Ties

KEY = random.key(0)


def raises(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def base():
    return {"a": torch.zeros(2), "b": torch.zeros(3), "n": torch.tensor(1)}


def test_all_problems_of_a_merge_at_once():
    bad = {"a": torch.zeros(4), "c": torch.zeros(1), "n": torch.tensor(1.0)}
    with raises(
        "key must be an int64 tensor of shape (2,), got int: make one by smat_fn.random.key(seed)",
        "coef is nan, must be finite",
        "drop_prob is 1.0, must be in [0, 1)",
        "window is -0.1, must be at least 0",
        "expert 'qa' lacks parameter 'b' of base",
        "expert 'qa' has parameter 'c' that base lacks",
        "parameter 'a' has shape (4,) in expert 'qa' but (2,) in base",
        "parameter 'n' is float32 in expert 'qa' but int64 in base",
    ):
        merge.della(0, base(), {"ok": base(), "qa": bad}, coef=float("nan"), drop_prob=1.0, window=-0.1)


def test_all_problems_of_ties_at_once():
    with raises("coef is inf", "keep is 0.0, must be in (0, 1]", "scope is 'layer'", "aggregate is 'max'"):
        merge.ties(base(), [base()], coef=float("inf"), keep=0.0, aggregate="max", scope="layer")


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, float("nan")])
def test_keep_range(keep):
    for call in (merge.ties_vector, merge.ties_density):
        with raises(f"keep is {keep}, must be in (0, 1]: it is the density"):
            call(base(), [base()], keep=keep)


@pytest.mark.parametrize("drop_prob", [-0.1, 1, float("nan")])
def test_drop_prob_range(drop_prob):
    with raises(f"drop_prob is {drop_prob}, must be in [0, 1): it is 1 - density"):
        merge.dare(KEY, base(), [base()], coef=1.0, drop_prob=drop_prob)
    with raises(f"drop_prob is {drop_prob}, must be in [0, 1): it is 1 - density"):
        merge.della(KEY, base(), [base()], coef=1.0, drop_prob=drop_prob, window=0.1)


@pytest.mark.parametrize("key", [torch.zeros(2), torch.zeros(3, 2, dtype=torch.int64), None])
def test_key(key):
    with raises("key must be an int64 tensor of shape (2,)"):
        merge.dare(key, base(), [base()], coef=1.0, drop_prob=0.5)


MERGERS = {
    "wa": lambda experts: merge.weight_average(experts),
    "ta": lambda experts: merge.task_arithmetic(base(), experts, coef=1.0),
    "ties": lambda experts: merge.ties(base(), experts, coef=1.0, keep=0.5),
    "dare": lambda experts: merge.dare(KEY, base(), experts, coef=1.0, drop_prob=0.5),
    "della": lambda experts: merge.della(KEY, base(), experts, coef=1.0, drop_prob=0.5, window=0.1),
}


@pytest.mark.parametrize("merger", MERGERS.values(), ids=MERGERS)
def test_experts(merger):
    with raises("experts is empty"):
        merger({})
    with raises("experts is a generator: pass a mapping {name: tree} or a list of trees"):
        merger(tree for tree in [base()])
    with raises("expert 'a' is a tensor, not a tree", "expert 'b' is a tensor, not a tree"):
        merger(base())
    with raises("experts have equal names among ['1', '1']"):
        merger({1: base(), "1": base()})
    with raises("expert 'x': parameter 'a' is a float, not a tensor", "expert 'y' lacks parameter 'b' of"):
        merger({"z": base(), "x": {"a": 0.5}, "y": {"a": torch.zeros(2), "n": torch.tensor(1)}})


def test_base_that_is_no_tree():
    with raises("base: parameter 'a' is a str, not a tensor", "expert '0': parameter 'a' is a float"):
        merge.task_arithmetic({"a": "x"}, [{"a": 0.5}], coef=1.0)


def test_weight_average_lists_all_that_differs():
    other = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(4), "n": torch.tensor(2)}
    with raises(
        "parameter 'b' has shape (4,) in expert '1' but (3,) in expert '0'",
        "parameter 'a' is bfloat16 in expert '1' but float32 in expert '0': cast one of them",
        "parameter 'n' (int64) differs between expert '0' and expert '1'",
    ):
        merge.weight_average([base(), other])


def test_apply_vector_lists_all_that_does_not_fit():
    with raises("coef is -inf, must", "vector has parameter 'n', which is not", "vector lacks parameter 'b' of base"):
        merge.apply_vector(base(), {"a": torch.zeros(2), "n": torch.tensor(1)}, coef=float("-inf"))


ONE = {"w": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: merge.ties(ONE, [ONE], coef="1", keep="0.5"), "coef is '1', must be a number; keep is '0.5', must be"),
        (lambda: merge.svc(ONE, [ONE, ONE], alpha=1e39), "alpha is 1e+39, must be at most 3.4e+38 in size"),
        (lambda: merge.nearswap(ONE, [ONE], t=1e39), "t is 1e+39, must be at most"),
        (lambda: merge.task_arithmetic(ONE, [ONE], coef=-1e39), "coef is -1e+39, must be at most"),
        (lambda: merge.apply_rules(ONE, ONE, coef={"*": 1e39}), "coef of '*' is 1e+39, must be at most"),
        (lambda: merge.weighted_average([ONE], weights=[1e39]), "the weight of '0' is 1e+39, must be at most"),
        (lambda: merge.weighted_average([ONE] * 2, weights=[3e38] * 2), "the sum of weights is 6e+38, must be at most"),
        (
            lambda: merge.dare(KEY, ONE, [ONE], coef=1.0, drop_prob=0.5, weights={"0": 1e39}, aggregate="mean"),
            "the weight of '0' is 1e+39, must be at most",
        ),
        (lambda: merge.ties_density(ONE, [ONE], keep=None), "keep is None, must be a number"),
        (lambda: merge.della(KEY, ONE, [ONE], coef=1.0, drop_prob=0.5, window=[0.1]), "window is [0.1], must be a"),
        (lambda: merge.ties(ONE, [ONE], coef=1.0, keep=0.5, densities=0.5), "densities is 0.5, must be a mapping"),
        (
            lambda: merge.task_arithmetic(ONE, [ONE], coef=1.0, weights=[1.0]),
            "weights is [1.0], must be a mapping",
        ),
        (
            lambda: merge.task_arithmetic(ONE, [ONE], coef=1.0, weights={0: 1.0}),
            "names 0, which is not an expert",
        ),
        (lambda: merge.task_arithmetic(ONE, [ONE], coef=1.0, weights={"0": "1"}), "the weight of '0' is '1', must be"),
        (
            lambda: merge.weighted_average([ONE], weights=0.5),
            "weights is 0.5, must be a mapping {expert's name:",
        ),
        (lambda: merge.weighted_average([ONE], weights=["x"]), "the weight of '0' is 'x', must be a number"),
        (lambda: merge.multislerp(ONE, [ONE], weights=None), "weights is None, must be a mapping"),
        (
            lambda: merge.multislerp(ONE, [ONE, ONE], weights=[1, -1]),
            "the sum of weights is 0: give other weights, or normalize False",
        ),
        (
            lambda: merge.della(KEY, ONE, [ONE], coef=1.0, drop_prob=0.5, window=0.1, elect="False"),
            "elect is 'False', must be",
        ),
        (lambda: merge.ties(ONE, [ONE], coef=1.0, keep=0.5, rescale="False"), "rescale is 'False', must be True or"),
        (lambda: merge.model_stock(ONE, [ONE, ONE], clamp=0), "clamp is 0, must be True or False"),
        (lambda: merge.weighted_average([ONE], weights=[1], normalize="False"), "normalize is 'False', must be True"),
        (lambda: merge.slerp([ONE, ONE], coef=0.5, zeros="False"), "zeros is 'False', must be True or False"),
        (lambda: merge.cart([ONE], coef=1.0, share="x"), "share is 'x', must be a number"),
        (lambda: merge.karcher([ONE], tol=None), "tol is None, must be a number"),
        (lambda: merge.pcb(ONE, [ONE], coef=1.0, ratio="x"), "ratio is 'x', must be a number"),
        (lambda: merge.fisher(ONE, [ONE], [ONE], floor="x"), "floor is 'x', must be a number"),
        (lambda: merge.fisher(ONE, [ONE], None), "the statistics (fisher) are a NoneType: pass a mapping"),
        (lambda: merge.reg_mean(ONE, [ONE], [{}], scale="x"), "scale is 'x', must be a number"),
        (lambda: merge.apply_rules(ONE, ONE, coef={"*": None}), "coef of '*' is None, must be a number"),
        (lambda: merge.apply_vector(ONE, [1], coef=1.0), "vector: parameter '0' is a int, not a tensor"),
        (
            lambda: merge.merge_by(Ties(keep=0.5), ONE, [ONE]),
            "ties needs a coefficient: give coef here or in",
        ),
        (
            lambda: merge.merge_by(Ties(coef=1.0), ONE, [ONE]),
            "keep of Ties is None: give a value, a preset's",
        ),
        (lambda: merge.vector_by(Della(drop_prob=0.5), ONE, [ONE], key=KEY), "window of Della is None: give a value"),
        (
            lambda: merge.ties(ONE, [ONE], coef=1.0, keep=None, scope=None, aggregate=None),
            "keep is None, must be a number; aggregate is None: give a value; scope is None: give a value",
        ),
        (lambda: merge.vector_by("ties", ONE, [ONE]), "config is 'ties', must be the options of a merger"),
        (lambda: merge.merge_by(Ties, ONE, [ONE]), "must be the options of a merger, such as Ties(coef=0.4, keep=0.2)"),
    ],
)
def test_values_of_another_type_are_named(call, message):
    with raises(message):
        call()


def test_a_nested_vector_is_applied_and_one_of_buffers_named():
    nested = {"layer": {"w": torch.ones(2)}}
    zeros = {"layer": {"w": torch.zeros(2)}}
    assert merge.apply_vector(zeros, merge.task_vector(nested, zeros), coef=0.5)["layer"]["w"].tolist() == [0.5, 0.5]
    assert merge.apply_rules(zeros, nested, coef={"*": 2.0})["layer"]["w"].tolist() == [2.0, 2.0]
    with raises("vector has parameter 'n', which is not floating-point in base and stays as it is: leave it out"):
        merge.apply_vector(base(), merge.task_vector(base(), base()), coef=1.0)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_vector_is_written_to_parameters(contiguous):
    weight = torch.nn.Parameter(torch.zeros(2, 3) if contiguous else torch.zeros(3, 2).mT)
    base, vector = {"w": torch.ones(2, 3)}, {"w": torch.arange(6.0).view(2, 3)}
    merged = merge.apply_vector(base, vector, coef=0.5, out={"w": weight})
    assert merged["w"] is weight
    assert weight.tolist() == [[1.0, 1.5, 2.0], [2.5, 3.0, 3.5]]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda leaf: leaf.to("meta"), "on the meta device"),
        (torch.Tensor.to_sparse, r"sparse_coo: give leaf\.to_dense"),
    ],
)
def test_leaves_without_values_and_sparse_ones_are_named(odd, why):
    one = {"w": torch.eye(2), "n": torch.arange(2)}
    two = {path: odd(leaf) for path, leaf in one.items()}
    for call in (lambda: merge.task_arithmetic(one, [one, two], coef=1.0), lambda: merge.weight_average([one, two])):
        with pytest.raises(ValueError, match=f"parameter 'w' of expert '1' is {why}"):
            call()
    vector, odd_vector = {"w": torch.eye(2)}, {"w": two["w"]}
    for label, call in {
        "params": lambda: merge.task_vector(two, one),
        "base": lambda: merge.apply_vector(two, vector, coef=1.0),
        "vector": lambda: merge.apply_vector(one, odd_vector, coef=1.0),
        "out": lambda: merge.apply_vector(one, vector, coef=1.0, out=two),
    }.items():
        with pytest.raises(ValueError, match=f"parameter 'w' of {label} is {why}"):
            call()


@pytest.mark.parametrize("shape", [(2, 2**30), (23_170, 23_170), (40_000, 54_000)], ids=str)
@pytest.mark.parametrize("name", ["cart", "iso_c", "iso_cts", "svc", "tsv_merge"])
def test_matrices_that_no_library_decomposes_are_refused_before_any_work(name, shape):
    tree = {"embed": torch.zeros(()).expand(shape), "w": torch.eye(2)}  # of which nothing is read
    experts = [tree, {**tree, "w": torch.eye(2)}]
    trees = [experts] if name == "cart" else [tree, experts]
    with pytest.raises(ValueError, match=r"parameter 'embed' is .* count in 32 bits: .* name it in `skip`$"):
        getattr(merge, name)(*trees, coef=1.0)


def test_experts_that_are_one_models_memory_are_named():
    model = torch.nn.Linear(3, 2)
    base = {name: leaf.detach().clone() for name, leaf in model.state_dict().items()}
    experts = {f"t{i}": model.state_dict() for i in range(4)}
    calls = {
        "and 2 more ": lambda: merge.ties(base, experts, coef=0.5, keep=0.5),
        "": lambda: merge.weight_average([model.state_dict(), model.state_dict(), base]),
    }
    for (more, call), (first, second) in zip(calls.items(), [("t0", "t1"), ("0", "1")], strict=True):
        text = (
            f"experts '{first}' and '{second}' {more}are the same tensors: a state_dict() holds the model's own "
            "memory, clone it, {name: w.detach().clone() for name, w in model.state_dict().items()}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()
    with pytest.raises(ValueError, match=r"drop_prob is 2.*; experts 't0' and 't1' and 2 more are the same"):
        merge.dare(KEY, base, experts, coef=0.5, drop_prob=2.0)


def test_experts_that_share_some_memory_or_none_are_accepted():
    one, shared = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2)
    mean = torch.tensor([[1.0, 2.5], [2.5, 4.0]])
    experts = [{"w": one, "b": shared}, {"w": one.mT, "b": shared}]  # the same address, other strides
    assert torch.equal(merge.weight_average(experts)["w"], mean)
    two = [{"w": one, "b": shared}, {"w": one, "b": shared.clone()}]
    assert torch.equal(merge.weight_average(two)["w"], one)
    assert torch.equal(merge.task_arithmetic({"w": one}, [{"w": one}], coef=1.0)["w"], one)  # base itself
    batched = torch.func.vmap(lambda leaf: merge.weight_average([{"w": leaf}, {"w": leaf}])["w"])(one)
    assert torch.equal(batched, one)
    none = {"n": torch.arange(3), "empty": torch.zeros(0)}
    assert merge.weight_average([none, none])["n"].tolist() == [0, 1, 2]


def test_complex_leaves_are_no_buffers():
    one, two = ({"w": torch.ones(2, dtype=torch.complex64) * i} for i in (1, 2))
    calls = merge.task_vector, lambda a, b: merge.task_arithmetic(a, [b], coef=1.0), lambda *t: merge.weight_average(t)
    for call in (*calls, lambda a, b: merge.apply_vector(a, {}, coef=1.0)):
        with raises("parameter 'w' of", "is complex64, which is not merged: merge torch.view_as_real(leaf)"):
            call(one, two)


def test_a_tied_weight_under_two_names_is_refused_where_it_would_count_twice():
    tied = torch.ones(4)
    twice = {"embed": tied, "head": tied}
    for merger in ("ties", "dare", "della"):
        with raises("parameters 'embed' and 'head' of base share memory, as a tied weight in module.state_dict() does"):
            calls = {"ties": merge.ties_vector, "dare": merge.dare_vector, "della": merge.della_vector}
            keyed = () if merger == "ties" else (KEY,)
            options = {"ties": {"keep": 0.5}, "dare": {"drop_prob": 0.5}, "della": {"drop_prob": 0.5, "window": 0.1}}
            calls[merger](*keyed, twice, [twice], **options[merger])
    assert merge.task_arithmetic(twice, [twice], coef=1.0)["head"].tolist() == [1.0] * 4  # no difference there
