"""The fast path against the literal equations bit for bit; where the cuts fall, trees, buffers and errors."""

import itertools
import random as random_module
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch

from smat_fn import execution, merge, optim, random
from smat_fn.mat import smat
from smat_fn.simulation import (
    NOISES,
    Draw,
    draw,
    materialise,
    naive,
    participation,
    reweight,
    reweight_and_clip,
    simulate,
)
from smat_fn.simulation import state as state_module
from smat_fn.testing import assert_trees_equal, random_tree

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"one": (1,), "scalar": (), "w7": (7,), "w8": (2, 4), "w63": (7, 9), "empty": (0, 3)}
OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}


def only_odd(path, leaf):
    return path in {"one", "w63", "big"}


def nowhere(path, leaf):
    return False


def state(dtype, shapes=SHAPES, seed=0):
    return random_tree(seed, shapes, dtype=dtype), random_tree(seed + 1, shapes, dtype=dtype)


def naive_pieces(drawn, leaves, where, start=0):
    def masked(path, leaf):
        return where is None or where(path, leaf)

    masks = {p: naive.mask(drawn, p, v, masked=masked(p, v), start=start) for p, v in leaves.items()}
    return masks, {p: naive.noise(drawn, p, v, start=start) for p, v in leaves.items()}


@pytest.mark.parametrize("where", [None, only_odd, nowhere], ids=["all", "some", "none"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_output_equals_the_naive_one_bit_for_bit(dtype, noise, where):
    theta, theta_0 = state(dtype)
    for seed in (0, -(2**40)):
        drawn = draw(random.key(seed), alpha_min=0.1, drop_prob=0.3, sigma=2e-3, noise=noise)
        assert_trees_equal(
            simulate(theta, theta_0, drawn, where=where), naive.simulate(theta, theta_0, drawn, where=where)
        )
        assert_trees_equal(reweight(theta, drawn, where=where), naive.reweight(theta, drawn, where=where))
        masks, noises = naive_pieces(drawn, theta, where)
        mask, epsilon = materialise(drawn, theta, where=where)
        assert_trees_equal(mask, masks)
        assert_trees_equal(epsilon, noises)
        factor = {p: drawn.scale.to(m.dtype) * m for p, m in masks.items()}
        assert_trees_equal(participation(drawn, theta, where=where), factor)


@pytest.mark.parametrize(
    "strengths",
    [
        OFF,
        OFF | {"alpha_min": 0.0},
        OFF | {"drop_prob": 0.999999},
        OFF | {"drop_prob": 1e-9},
        OFF | {"drop_prob": 1 / 3},
        OFF | {"sigma": 1e-3},
        OFF | {"sigma": 1e30},
    ],
    ids=str,
)
def test_each_operation_alone_equals_the_naive_one(strengths):
    for dtype in DTYPES[:3]:
        theta, theta_0 = state(dtype, seed=4)
        drawn = draw(random.key(3), **strengths)
        assert_trees_equal(simulate(theta, theta_0, drawn), naive.simulate(theta, theta_0, drawn))
        assert_trees_equal(reweight(theta, drawn), naive.reweight(theta, drawn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_leaf_equals_the_naive_one(dtype):
    shapes = {"big": (17, 241)}
    theta, theta_0 = state(dtype, shapes)
    drawn = draw(random.key(9), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    assert theta["big"].numel() == 4097
    assert_trees_equal(simulate(theta, theta_0, drawn), naive.simulate(theta, theta_0, drawn))
    assert_trees_equal(reweight(theta, drawn), naive.reweight(theta, drawn))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_batch_of_draws_equals_the_naive_ones(dtype):
    theta, theta_0 = state(dtype)
    drawn, keys = draw(random.key(9), alpha_min=0.2, drop_prob=0.5, sigma=2e-3), random.split(random.key(9), 2)

    def both(key):
        one = drawn._replace(key=key)
        return simulate(theta, theta_0, one, where=only_odd), reweight(theta, one, where=only_odd)

    states, grads = torch.func.vmap(both)(keys)
    for i, key in enumerate(keys):
        one = drawn._replace(key=key)
        assert_trees_equal({p: v[i] for p, v in states.items()}, naive.simulate(theta, theta_0, one, where=only_odd))
        assert_trees_equal({p: v[i] for p, v in grads.items()}, naive.reweight(theta, one, where=only_odd))


@pytest.mark.parametrize("above", [0, 1])
def test_a_coordinate_is_dropped_iff_its_field_is_below_the_threshold(above):
    theta, theta_0 = state(torch.float32, {"w": (40,)})
    key = random.key(2)
    fields = random.bits(random.leaf_streams(key, ["w"])[0, 0], 40)
    drawn = draw(key, alpha_min=1.0, drop_prob=(int(fields[3]) + above) / 65536, sigma=0.0)
    dropped = fields < fields[3] + above
    assert dropped[3] == bool(above)
    assert torch.equal(simulate(theta, theta_0, drawn)["w"] == theta_0["w"], dropped)
    assert torch.equal(reweight(theta, drawn)["w"] == 0, dropped)
    assert torch.equal(participation(drawn, theta)["w"] == 0, dropped)
    assert torch.equal(naive.mask(drawn, "w", theta["w"], masked=True) == 0, dropped)


def test_float32_masters_with_a_bfloat16_base_and_the_other_way_round():
    drawn = draw(random.key(9), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    masters, low = state(torch.float32)[0], state(torch.bfloat16)[1]
    assert_trees_equal(simulate(masters, low, drawn), naive.simulate(masters, low, drawn))
    assert_trees_equal(simulate(low, masters, drawn), naive.simulate(low, masters, drawn))


@pytest.mark.parametrize("start", [0, 3, 8, 2**35 + 5, 8 * 2**32 - 4])
@pytest.mark.parametrize("noise", ["uniform", "laplace"])
def test_starts_shift_into_the_full_leaf(start, noise):
    theta, theta_0 = state(torch.bfloat16, {"w": (63,), "other": (9,)})
    drawn = draw(random.key(2), alpha_min=0.2, drop_prob=0.4, sigma=1e-2, noise=noise)
    masks, noises = naive_pieces(drawn, {"w": theta["w"]}, None, start)
    c, center = drawn.scale * masks["w"], theta_0["w"].float()
    expected = (center + c * (theta["w"].float() - center) + noises["w"]).bfloat16()
    got = simulate(theta, theta_0, drawn, starts={"w": start})
    assert_trees_equal({"w": got["w"]}, {"w": expected})
    assert_trees_equal({"other": got["other"]}, {"other": simulate(theta, theta_0, drawn)["other"]})
    assert_trees_equal(
        {"w": reweight(theta, drawn, starts={"w": start})["w"]}, {"w": (c * theta["w"].float()).bfloat16()}
    )


@pytest.mark.parametrize("cuts", [(0, 1000), (0, 1, 1000), (0, 8, 500, 503, 1000), (0, 999, 1000)])
def test_shards_put_together_are_the_whole(cuts):
    theta, theta_0 = state(torch.float32, {"w": (1000,)})
    drawn = draw(random.key(6), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, noise="gaussian")
    states, grads = [], []
    for lo, hi in itertools.pairwise(cuts):
        part = {"w": theta["w"][lo:hi]}
        states.append(simulate(part, {"w": theta_0["w"][lo:hi]}, drawn, starts={"w": lo})["w"])
        grads.append(reweight(part, drawn, starts={"w": lo})["w"])
    assert_trees_equal({"w": torch.cat(states)}, simulate(theta, theta_0, drawn))
    assert_trees_equal({"w": torch.cat(grads)}, reweight(theta, drawn))


@pytest.mark.parametrize("piece", [5, 8, 64, 70])
def test_where_leaves_are_cut_does_not_matter(monkeypatch, piece):
    theta, theta_0 = state(torch.float32, SHAPES | {"w300": (300,), "tail": (2, 3)})
    drawn = draw(random.key(6), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, noise="laplace")
    starts = {"w300": 2**35 + 3}

    def everything(where):
        return [
            simulate(theta, theta_0, drawn, where=where, starts=starts),
            reweight(theta, drawn, where=where, starts=starts),
            *materialise(drawn, theta, where=where),
        ]

    whole = [everything(where) for where in (None, only_odd, nowhere)]
    monkeypatch.setattr("smat_fn.ops.plain.CHUNK", piece)
    for where, expected in zip((None, only_odd, nowhere), whole, strict=True):
        for got, want in zip(everything(where), expected, strict=True):
            assert_trees_equal(got, want)


def test_strided_leaves_are_read_in_their_logical_order():
    theta, theta_0 = state(torch.float32, {"w": (6, 10)})
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    turned = {"w": theta["w"].t().contiguous().t()}
    assert not turned["w"].is_contiguous()
    assert_trees_equal(simulate(turned, theta_0, drawn), simulate(theta, theta_0, drawn))
    assert_trees_equal(reweight(turned, drawn), reweight(theta, drawn))


HALVED = draw(random.key(1), **OFF)._replace(scale=torch.tensor(0.5))
LAID = {
    "simulate": lambda tree: simulate(tree, {path: torch.zeros(leaf.shape) for path, leaf in tree.items()}, HALVED),
    "reweight": lambda tree: reweight(tree, HALVED),
    "clip": lambda tree: reweight_and_clip(tree, HALVED, max_norm=1e9)[0],
    "norm": lambda tree: reweight_and_clip(tree, HALVED)[0],
}


def as_halves(tree):
    """Assert that results are half of a tree, with the strides that products of its leaves have."""
    for name, fn in LAID.items():
        for path, leaf in fn(tree).items():
            assert leaf.stride() == (half := tree[path] * 0.5).stride(), (name, path)
            assert leaf.is_meta or torch.equal(leaf, half), (name, path)
    for shown, value in zip((participation(HALVED, tree), *materialise(HALVED, tree)), (0.5, 1, 0), strict=True):
        for path, leaf in shown.items():
            assert leaf.stride() == tree[path].stride(), path
            assert leaf.is_meta or (leaf == value).all(), path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_strides_of_their_leaves(dtype):
    theta = random_tree(0, {"turned": (6, 4), "channels": (2, 3, 4, 5), "whole": (3, 4)}, dtype=dtype)
    theta = theta | {"turned": theta["turned"].t(), "channels": theta["channels"].permute(0, 3, 1, 2)}
    as_halves(theta)
    with execution.off():
        as_halves(theta)
    as_halves({path: leaf.detach().requires_grad_() for path, leaf in theta.items()})
    for fn in LAID.values():
        sparse = fn({"columns": torch.ones(8, 8, dtype=dtype)[:, ::2]})["columns"]
        assert sparse.is_contiguous()
        assert (sparse == 0.5).all()


def test_results_without_values_and_of_compiled_code_have_the_strides_of_their_leaves():
    turned = {"turned": torch.arange(24.0).view(6, 4).t()}
    meta = {path: leaf.to("meta") for path, leaf in turned.items()}
    drawn = Draw(*(field.to("meta") for field in HALVED[:-1]))
    assert reweight(meta, drawn)["turned"].stride() == (1, 4)
    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        shown = torch.compile(partial(participation, HALVED), backend="aot_eager", **options)
        assert shown(turned)["turned"].stride() == (1, 4)
        tracked = {path: leaf.clone().requires_grad_() for path, leaf in turned.items()}
        halved = torch.compile(LAID["reweight"], backend="aot_eager", **options)(tracked)["turned"]
        assert halved.stride() == (1, 4)
        assert torch.equal(halved, turned["turned"] / 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_of_torch_reads_a_strided_gradient_that_was_reweighted(fused):
    p = torch.nn.Parameter(torch.zeros(4, 4).t())
    p.grad = torch.empty_like(p).copy_(torch.arange(16.0).view(4, 4) - 7.5)
    p.grad, signs = reweight({"p": p.grad}, HALVED)["p"], p.grad.sign()
    torch.optim.Adam([p], lr=0.25, fused=fused).step()
    torch.testing.assert_close(p.detach(), -0.25 * signs)  # the first step of Adam is lr in each coordinate


class Layer(NamedTuple):
    weight: object
    bias: object


class Names(OrderedDict):
    pass


FLAT = {"a.weight": (3, 5), "a.bias": (5,), "b.0": (1,), "b.1": (2, 2)}


def nested(flat):
    layer = Layer(flat["a.weight"], flat["a.bias"])
    return {
        "flat": flat,
        "dicts": {"a": {"weight": layer.weight, "bias": layer.bias}, "b": {"0": flat["b.0"], "1": flat["b.1"]}},
        "mixed": {"a": layer, "b": [flat["b.0"], flat["b.1"]]},
        "tuples": {"a": layer, "b": (flat["b.0"], flat["b.1"])},
        "ordered": Names(flat),
    }


@pytest.mark.parametrize("form", ["flat", "dicts", "mixed", "tuples", "ordered"])
def test_any_nesting_gives_the_flat_numbers_in_its_own_structure(form):
    theta, theta_0 = state(torch.float32, FLAT)
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    results = {
        "simulate": (simulate, (nested(theta)[form], nested(theta_0)[form], drawn), (theta, theta_0, drawn)),
        "reweight": (reweight, (nested(theta)[form], drawn), (theta, drawn)),
        "participation": (participation, (drawn, nested(theta)[form]), (drawn, theta)),
    }
    for fn, args, flat_args in results.values():
        got, want = fn(*args), fn(*flat_args)
        assert_trees_equal(got, want)
        assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(nested(want)[form])


@pytest.mark.parametrize("tree", [[1.0, 2.0], (1.0, 2.0), Layer(1.0, 2.0)], ids=["list", "tuple", "NamedTuple"])
def test_sequences_at_the_root_are_named_by_position_or_field(tree):
    leaves = random_tree(0, {"x": (5,), "y": (6,)})
    params = type(tree)(*leaves.values()) if hasattr(tree, "_fields") else type(tree)(leaves.values())
    names = getattr(tree, "_fields", ("0", "1"))
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    flat = dict(zip(names, leaves.values(), strict=True))
    got = simulate(params, params, drawn)
    assert type(got) is type(tree)
    assert_trees_equal(got, simulate(flat, flat, drawn))


def test_where_sees_paths_and_leaves():
    theta, theta_0 = state(torch.float32, FLAT)
    seen = []
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    simulate(nested(theta)["mixed"], nested(theta_0)["mixed"], drawn, where=lambda p, v: seen.append((p, v)) or True)
    assert [path for path, _ in seen] == list(FLAT)
    assert all(leaf is theta[path] for path, leaf in seen)


@pytest.mark.parametrize("target", ["fresh", "params", "base"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_receives_the_pure_result_even_when_it_is_an_input(dtype, target):
    theta, theta_0 = state(dtype, FLAT)
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    pure = simulate(theta, theta_0, drawn)
    out = {"fresh": {p: torch.full_like(v, torch.nan) for p, v in theta.items()}, "params": theta, "base": theta_0}[
        target
    ]
    storages = {p: v.data_ptr() for p, v in out.items()}
    assert simulate(theta, theta_0, drawn, out=out) is out
    assert {p: v.data_ptr() for p, v in out.items()} == storages
    assert_trees_equal(out, pure)


def test_out_of_reweight_may_be_the_gradient_and_of_any_nesting():
    grads, _ = state(torch.bfloat16, FLAT)
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    pure = reweight(grads, drawn)
    nest = nested(grads)["mixed"]
    assert reweight(grads, drawn, out=nest) is nest
    assert_trees_equal(grads, pure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_out_may_be_other_leaves_of_the_inputs(dtype):
    leaves, drawn = {"a": (5, 5), "b": (5, 5)}, draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=0.1)
    for turned in (
        lambda theta, theta_0: {"a": theta["b"], "b": theta["a"]},
        lambda theta, theta_0: {"a": theta["b"], "b": theta_0["a"]},
        lambda theta, theta_0: {"a": theta["a"].T, "b": theta["b"]},
    ):
        theta, theta_0 = state(dtype, leaves)
        pure = simulate(theta, theta_0, drawn)
        assert_trees_equal(simulate(theta, theta_0, drawn, out=turned(theta, theta_0)), pure)
    whole = torch.randn(99, dtype=dtype)
    ahead, zero = {"a": whole[:98]}, {"a": torch.zeros(98, dtype=dtype)}
    pure, weighted = simulate(ahead, zero, drawn), reweight(ahead, drawn)
    assert_trees_equal(simulate(ahead, zero, drawn, out={"a": whole[1:]}), pure)
    whole = torch.cat([ahead["a"][:1], whole[:98]])
    grads = {"a": torch.randn(99, dtype=dtype)[:98]}
    weighted = reweight(grads, drawn)
    assert_trees_equal(reweight(grads, drawn, out={"a": grads["a"]}), weighted)


def test_leaves_of_out_that_share_memory_are_refused_before_anything_is_written():
    one, drawn = torch.randn(6, 5), draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=0.1)
    tied, base, kept = {"a": one, "b": one}, {"a": torch.zeros(6, 5), "b": torch.zeros(6, 5)}, one.clone()
    flat = torch.zeros(31)
    overlapping = {"a": flat[:30].view(6, 5), "b": flat[1:].view(6, 5)}
    for out in (tied, overlapping):
        with pytest.raises(ValueError, match="parameters 'a' and 'b' of out share memory: give each its own"):
            simulate(tied, base, drawn, out=out)
        with pytest.raises(ValueError, match="share memory"):
            reweight(tied, drawn, out=out)
        with pytest.raises(ValueError, match="share memory"):
            merge.apply_vector(tied, base, coef=1.0, out=out)
    assert torch.equal(one, kept)
    assert not flat.any()
    side_by_side = torch.zeros(30, 2)
    columns = {"a": side_by_side[:, 0].view(6, 5), "b": side_by_side[:, 1].view(6, 5)}
    assert_trees_equal(simulate(tied, base, drawn, out=columns), simulate(tied, base, drawn))
    vector = {"a": torch.ones(6, 5), "b": torch.ones(6, 5)}
    assert_trees_equal(merge.apply_vector(tied, vector, coef=1.0, out=columns), {"a": one + 1, "b": one + 1})


def test_results_are_written_in_place_unless_a_leaf_lies_over_another():
    lengths, flat, told = {"a": 3, "b": 1, "c": 4, "none": 0}, torch.zeros(24), 0
    rng = random_module.Random(0)

    def cut(own):
        return {path: flat[own[path] : own[path] + size] for path, size in lengths.items()}

    def over(path, start, other, to):
        return max(start, to) < min(start + lengths[path], to + lengths[other])

    for _ in range(2000):
        at = [{path: rng.randrange(20) for path in lengths} for _ in "ab"]
        targets = {path: rng.choice(at)[path] for path in lengths}
        pairs = [(path, other, to) for path in lengths for other, to in targets.items()]
        crossed = any(over(path, targets[path], other, to) for path, other, to in pairs if path != other)
        crossed |= any(over(p, at[0][p], q, to) for p, q, to in pairs if (p, at[0][p]) != (q, to))
        found = state_module._in_place(cut(targets), cut(at[0]))
        assert not (found and crossed)
        told += found
    assert told > 50
    own, others = ({path: torch.zeros(size) for path, size in lengths.items()} for _ in "ab")
    assert state_module._in_place(own, own)
    assert state_module._in_place(own, others, own)
    assert not state_module._in_place(own, {**own, "a": own["c"][1:]})
    assert not state_module._in_place(own, {**own, "a": own["a"].double()})


def test_a_base_without_memory_is_refused_and_not_read_as_whatever_is_there():
    theta, drawn = {"a": torch.ones(3)}, draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=0.1)
    absent = {"a": torch.ones(3, device="meta")}
    for params, base in ((theta, absent), (absent, theta)):
        with pytest.raises(ValueError, match=r"leaf 'a' of base is on .* move one of them"):
            simulate(params, base, drawn)
    method = smat.build(lambda p, x: (p["a"].sum(), None), optim.adam(0.1), absent, period=1)
    with pytest.raises(ValueError, match="leaf 'a' of base is on meta, that of params on cpu"):
        method.update(random.key(1), method.init(theta), None)


def test_what_is_no_draw_no_dense_leaf_and_no_start_is_named():
    theta, drawn = {"a": torch.ones(3)}, draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=0.1)
    with pytest.raises(ValueError, match=r"draw is a Tensor, must be what smat_fn\.draw returns"):
        simulate(theta, theta, random.key(1))
    with pytest.raises(ValueError, match="parameter 'a' of grads is sparse_coo: only dense tensors are supported"):
        reweight({"a": torch.eye(3).to_sparse()}, drawn)
    with pytest.raises(ValueError, match=r"starts\['a'\] is 1.5, must be an integer and not negative"):
        simulate(theta, theta, drawn, starts={"a": 1.5})


def test_out_that_requires_gradients_or_has_a_lower_dtype_receives_values():
    theta, theta_0 = state(torch.float32, FLAT)
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    pure = simulate(theta, theta_0, drawn)
    leaves = {p: torch.zeros_like(v, requires_grad=True) for p, v in theta.items()}
    assert_trees_equal(simulate({p: v.requires_grad_() for p, v in theta.items()}, theta_0, drawn, out=leaves), pure)
    assert all(v.is_leaf and v.requires_grad for v in leaves.values())
    low = simulate(
        theta, theta_0, drawn, out={p: torch.empty_like(v, dtype=torch.bfloat16) for p, v in theta_0.items()}
    )
    assert_trees_equal(low, {p: v.bfloat16() for p, v in pure.items()})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            torch.zeros(3, 4, dtype=torch.int64),
            "'b' of out is int64 on cpu, which cannot hold a result: give a floating",
        ),
        (torch.zeros(3, 4, dtype=torch.bool), "'b' of out is bool on cpu"),
        (torch.zeros(3, 4, device="meta"), "'b' of out is float32 on meta"),
        (torch.zeros(8).as_strided((3, 4), (1, 1)), "coordinates of parameter 'b' of out share memory: give it memory"),
        (torch.zeros(1, 4).expand(3, 4), "coordinates of parameter 'b' of out share memory"),
    ],
)
def test_an_out_that_cannot_hold_the_result_is_refused_before_anything_is_written(leaf, message):
    theta, theta_0 = state(torch.float32, {"a": (2,), "b": (3, 4)})
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    for call in partial(simulate, theta, theta_0), partial(reweight, theta):
        out = {"a": torch.zeros(2), "b": leaf}
        with pytest.raises(ValueError, match=message):
            call(drawn, out=out)
        assert not out["a"].any()
    strided = {"a": torch.zeros(4)[::2], "b": torch.zeros(4, 6)[:, ::2].T}
    assert_trees_equal(simulate(theta, theta_0, drawn, out=strided), simulate(theta, theta_0, drawn))


def test_inputs_are_never_changed():
    theta, theta_0 = state(torch.float32, FLAT)
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, noise="gaussian")
    numbers = {name: value for name, value in drawn._asdict().items() if name != "factors"}
    copies = [{p: v.clone() for p, v in t.items()} for t in (theta, theta_0, numbers)]
    simulate(theta, theta_0, drawn)
    reweight(theta, drawn)
    participation(drawn, theta)
    results = simulate(theta, theta_0, drawn), *materialise(drawn, theta, where=nowhere)
    for result in (*results, reweight(theta, drawn), participation(drawn, theta, where=nowhere)):
        for leaf in result.values():
            leaf.zero_()
    for tree, copy in zip((theta, theta_0, numbers), copies, strict=True):
        assert_trees_equal(tree, copy)


def test_an_empty_tree_stays_empty():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    assert simulate({}, {}, drawn) == {}
    assert reweight([], drawn) == []


GOOD = {"a": torch.zeros(2), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    ("params", "base", "out", "message"),
    [
        (
            GOOD | {"c": torch.zeros(1)},
            {"a": torch.zeros(2), "b": torch.zeros(3, 1), "d": torch.zeros(1)},
            None,
            r"base lacks parameter 'c' of params; base has parameter 'd' that params lacks; "
            r"parameter 'b' has shape \(3, 1\) in base but \(3,\) in params",
        ),
        (
            GOOD,
            GOOD,
            {"a": torch.zeros(1)},
            r"out lacks parameter 'b' of the result; parameter 'a' has shape \(1,\) in out but \(2,\) in the result",
        ),
        (
            {"n": torch.zeros(2, dtype=torch.int64), "m": {"c": torch.zeros(1, dtype=torch.complex64)}},
            GOOD,
            None,
            r"parameter 'n' of params has dtype int64: only floating.*; parameter 'm.c' of params has dtype complex64",
        ),
        (GOOD, GOOD | {"a": torch.zeros(2, dtype=torch.bool)}, None, "parameter 'a' of base has dtype bool"),
        (
            {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
            GOOD,
            None,
            "two parameters have the name 'a.b': rename one",
        ),
        (
            {"a": {"b": 1.0}, "c": "x"},
            GOOD,
            None,
            "parameter 'a.b' is a float, not a tensor: .*; parameter 'c' is a str",
        ),
    ],
    ids=["structure", "out", "integers", "bool base", "duplicates", "no tensors"],
)
def test_trees_that_do_not_fit_are_refused_with_every_problem(params, base, out, message):
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    with pytest.raises(ValueError, match=message):
        simulate(params, base, drawn, out=out)


def test_reweight_participation_and_materialise_refuse_integer_leaves():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    tree = {"w": torch.zeros(2), "steps": [torch.zeros(2, dtype=torch.int32)]}
    for name, call in {
        "grads": lambda: reweight(tree, drawn),
        "like": lambda: participation(drawn, tree),
        "like ": lambda: materialise(drawn, tree),
    }.items():
        with pytest.raises(ValueError, match=f"parameter 'steps.0' of {name.strip()} has dtype int32"):
            call()
    with pytest.raises(ValueError, match="out has parameter 'x' that the result lacks"):
        reweight(GOOD, drawn, out=GOOD | {"x": torch.zeros(1)})


def test_bad_starts_are_refused_together():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    message = r"starts names 'z', which is not a leaf; starts\['a'\] is -1, must be an integer and not negative"
    for call in (lambda s: simulate(GOOD, GOOD, drawn, starts=s), lambda s: reweight(GOOD, drawn, starts=s)):
        with pytest.raises(ValueError, match=message):
            call({"a": -1, "z": 0, "b": 4})


def test_factors_of_other_paths_are_refused():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, factors={"a": 0.5, "typo": 0.0})
    with pytest.raises(ValueError, match="factors of alpha name 'typo', which no parameter here has"):
        simulate(GOOD, GOOD, drawn)
    part = {"a": GOOD["a"]}
    simulate(part, part, state_module.of_leaves(drawn, part))


def test_a_batch_of_draws_is_refused_outside_vmap():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    batched = drawn._replace(key=random.split(drawn.key, len(GOOD)))
    with pytest.raises(ValueError, match=r"a draw takes one key, of shape \(2,\), got torch.int64 \(2, 2\)"):
        simulate(GOOD, GOOD, batched)


def test_a_refused_call_writes_nothing():
    drawn = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    out = {"a": torch.full((2,), 7.0), "b": torch.full((4,), 7.0)}
    with pytest.raises(ValueError, match="parameter 'b' has shape"):
        simulate(GOOD, GOOD, drawn, out=out)
    assert_trees_equal(out, {"a": torch.full((2,), 7.0), "b": torch.full((4,), 7.0)})
