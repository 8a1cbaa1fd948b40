"""KnOTS and Core Space against the dense definitions, and what a change of coordinates must keep."""

import pytest
import torch

from smat_fn import merge, random
from smat_fn.config import Dare, IsoC, Slerp, TaskArithmetic, Ties, TsvMerge
from smat_fn.merge import Factors

KEY = random.key(3)
TA, TIES = TaskArithmetic(), Ties(keep=0.4, aggregate="mean", scope="global")
SHAPES = {"q": (12, 9), "up": (7, 14), "long": (4, 3)}
SPACES = {"knots": merge.knots, "core_space": merge.core_space}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def some(names="xyz", rank=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def factors(out, into, scale):
        return Factors(torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator), scale)

    return {
        name: {module: factors(*shape, 0.5 + i) for module, shape in SHAPES.items()} for i, name in enumerate(names)
    }


def product(factors):
    return factors.scale * factors.b.double() @ factors.a.double()


def dense(adapters):
    return {name: {module: product(found) for module, found in own.items()} for name, own in adapters.items()}


def close(merged, expected):
    assert merged.keys() == expected.keys()
    for module, found in merged.items():
        torch.testing.assert_close(product(found), expected[module], rtol=1e-5, atol=1e-5, msg=module)


def literal_coordinates(adapters, space):
    """Bases and coordinates of every module as the papers write them, from dense changes."""
    changes, bases, seen = dense(adapters), {}, {name: {} for name in adapters}
    for module in SHAPES:
        if space == "knots":
            u, values, v = torch.linalg.svd(
                torch.cat([own[module] for own in changes.values()], 1), full_matrices=False
            )
            real = values > 1e-5
            bases[module] = u[:, real], None
            for name, part in zip(changes, v.split(SHAPES[module][1], 1), strict=True):
                seen[name][module] = torch.diag(values[real]) @ part[real]
            continue
        below = torch.cat([own[module].a.double() for own in adapters.values()])
        beside = torch.cat([own[module].scale * own[module].b.double() for own in adapters.values()], 1)
        right = torch.linalg.svd(below, full_matrices=False)[2]
        left = torch.linalg.svd(beside, full_matrices=False)[0]
        bases[module] = left, right
        for name, own in changes.items():
            seen[name][module] = left.T @ own[module] @ right.T
    return bases, seen


def literal_ties(vectors, keep):
    """One threshold an expert over all modules, elected sign of the sum, mean of what agrees."""
    flat = {name: torch.cat([leaf.reshape(-1) for leaf in own.values()]) for name, own in vectors.items()}
    cuts = {name: v.abs().sort().values[max(len(v) - int(len(v) * keep), 1) - 1] for name, v in flat.items()}
    merged = {}
    for module in SHAPES:
        kept = torch.stack([own[module] * (own[module].abs() >= cuts[name]) for name, own in vectors.items()])
        sign = kept.sum(0).sign()
        agrees = (kept * sign > 0).double()
        merged[module] = (kept * agrees).sum(0) / agrees.sum(0).clamp(min=1)
    return merged


@pytest.mark.parametrize("name", SPACES)
def test_ties_in_shared_coordinates_is_its_definition(name):
    adapters = some()
    bases, seen = literal_coordinates(adapters, name)
    merged = literal_ties(seen, 0.4)
    expected = {
        module: 0.7 * left @ merged[module] @ (torch.eye(merged[module].shape[1]).double() if right is None else right)
        for module, (left, right) in bases.items()
    }
    found = SPACES[name](adapters, TIES, coef=0.7)
    close(found, expected)
    other = merge.vector_by(TIES, dict.fromkeys(SHAPES, torch.zeros(1)) | {
        m: torch.zeros(s, dtype=torch.float64) for m, s in SHAPES.items()
    }, dense(adapters))  # fmt: skip
    assert not torch.allclose(product(found["q"]), 0.7 * other["q"])  # another one than TIES on dense changes


@every_space
def test_what_adds_up_is_the_dense_sum_and_the_rank_is_that_of_all(space):
    adapters = some()
    total = {m: sum(0.3 * own[m] for own in dense(adapters).values()) for m in SHAPES}
    merged = space(adapters, TA, coef=0.3)
    close(merged, total)
    ranks = {module: found.rank for module, found in merged.items()}
    assert ranks == {"q": 6, "up": 6, "long": 3 if space is merge.core_space else 4}
    assert all(found.scale == 1.0 and found.a.dtype == torch.float32 for found in merged.values())
    low = space(adapters, TA, coef=0.3, rank=2)
    u, values, v = torch.linalg.svd(total["q"])
    torch.testing.assert_close(product(low["q"]), (u[:, :2] * values[:2]) @ v[:2], rtol=1e-5, atol=1e-5)


@every_space
def test_one_expert_is_itself_equal_ones_are_one_and_zero_is_nothing(space):
    adapters = some("x")
    close(space(adapters, TA, coef=1.0), dense(adapters)["x"])
    twins = dict.fromkeys("abc", adapters["x"])
    close(space(twins, Ties(keep=1.0, aggregate="mean", scope="global"), coef=1.0), dense(adapters)["x"])
    zero = {"x": {m: found._replace(b=torch.zeros_like(found.b)) for m, found in adapters["x"].items()}}
    merged = space(zero, TA, coef=1.0)
    assert all(found.rank == 1 and not product(found).any() for found in merged.values())
    close(space(adapters | {"zero": zero["x"]}, TA, coef=1.0), dense(adapters)["x"])


@every_space
@pytest.mark.parametrize("merger", [TA, TIES, TsvMerge(), IsoC(), Dare(drop_prob=0.5)], ids=lambda m: m.name)
def test_the_order_of_experts_plays_no_part(space, merger):
    adapters = some()
    merged = space(adapters, merger, coef=0.5, key=KEY)
    if merger.name == "dare":  # masks are of coordinates, whose signs are free: only the key is checked
        close(space(adapters, merger, coef=0.5, key=KEY.clone()), {m: product(f) for m, f in merged.items()})
        other = space(adapters, merger, coef=0.5, key=random.key(4))
        assert not torch.allclose(product(other["q"]), product(merged["q"]))
        return
    close(space(dict(reversed(adapters.items())), merger, coef=0.5), {m: product(f) for m, f in merged.items()})


@every_space
def test_modules_that_an_expert_lacks_are_those_of_no_change(space):
    adapters = some()
    del adapters["y"]["q"]
    total = {m: sum(own[m] for own in dense(adapters).values() if m in own) for m in SHAPES}
    close(space(adapters, TA, coef=1.0), total)


@every_space
def test_scales_are_those_of_the_adapters(space):
    adapters = some()
    halved = {name: {m: Factors(f.a * 2, f.b, f.scale / 2) for m, f in own.items()} for name, own in adapters.items()}
    expected = {m: product(f) for m, f in merge.knots(adapters, TIES, coef=1.0).items()}
    close(merge.knots(halved, TIES, coef=1.0), expected)
    close(space(halved, TA, coef=1.0), {m: sum(own[m] for own in dense(adapters).values()) for m in SHAPES})


@every_space
def test_what_makes_no_sense_is_refused_all_at_once(space):
    with pytest.raises(ValueError, match="slerp takes no base"):
        space(some("xy"), Slerp(), coef=0.5)
    with pytest.raises(ValueError, match=r"merger is a str and adapters are a list: pass options such as Ties"):
        merge.knots([], "ties", coef=1.0)
    with pytest.raises(ValueError, match=r"coef is nan.*drops at random: pass a key.*rank is 0"):
        space(some(), Dare(drop_prob=0.5), coef=float("nan"), rank=0)
    with pytest.raises(ValueError, match="key must be an int64"):
        space(some(), Dare(drop_prob=0.5), coef=1.0, key=torch.zeros(3))
    broken = some()
    broken["x"]["q"] = Factors(torch.zeros(2, 9), torch.zeros(12, 3))
    broken["y"]["up"] = Factors(torch.zeros(2, 14), torch.full((7, 2), float("inf")))
    broken["z"]["long"] = Factors(torch.zeros(2, 5), torch.zeros(4, 2))
    with pytest.raises(
        ValueError, match=r"'q' of expert 'x' do not fit.*'y': 'up' holds values.*'long' is of different"
    ):
        space(broken, TA, coef=1.0)
    with pytest.raises(ValueError, match="no adapters"):
        space({}, TA, coef=1.0)
    with pytest.raises(ValueError, match="adapters have no modules"):
        space({"x": {}}, TA, coef=1.0)
    with pytest.raises(ValueError, match="adapters of 'x' are a list, must be a mapping"):
        space({"x": []}, TA, coef=1.0)
