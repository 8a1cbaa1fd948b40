"""Loss slices on a quadratic, whose value at every point is known."""

import pytest
import torch

from smat_fn import merge, random
from smat_fn.analyses import landscape, mean_loss, partner_update, slice_point
from smat_fn.types import Micro

A, B = (0.0, 0.5, 1.0, 1.5), (-1.0, 0.0, 2.0)


def tree_of(seed, dtype=torch.float64):
    key = random.key(seed)
    shapes = {"w": (3, 4), "b": (5,)}
    return {
        n: random.uniform(random.fold_in(key, n), s, minval=-1.0, dtype=torch.float64).to(dtype)
        for n, s in shapes.items()
    }


@pytest.fixture(scope="module")
def family():
    base = tree_of(0)
    return base, {
        task: {n: base[n] + 0.1 * leaf for n, leaf in tree_of(seed).items()} for seed, task in enumerate("abc", 1)
    }


def loss(params):
    """Half the squared distance from one, weighted by position."""
    return sum(
        (torch.arange(1, leaf.numel() + 1).view(leaf.shape) * (leaf - 1) ** 2).sum() / 2 for leaf in params.values()
    )


def test_the_partner_update_leaves_the_target_out(family):
    base, experts = family
    update = partner_update(base, experts, "b", coef=0.3)
    for name, leaf in base.items():
        expected = 0.3 * ((experts["a"][name] - leaf) + (experts["c"][name] - leaf))
        torch.testing.assert_close(update[name], expected, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="'a' has no other expert"):
        partner_update(base, {"a": experts["a"]}, "a")
    with pytest.raises(ValueError, match="task 'd' is not an expert: choose one of 'a', 'b', 'c'"):
        partner_update(base, experts, "d")
    with pytest.raises(ValueError, match="coef is 'x', must be a number; experts are a list: give a mapping"):
        partner_update(base, list(experts.values()), "a", coef="x")


def test_what_is_no_slice_is_refused_at_once(family):
    base, experts = family
    partners = partner_update(base, experts, "a")

    def told(match, **changes):
        given = {"partners": partners, "loss": loss, "a": [0.0, 1.0], "b": [0.0], **changes}
        with pytest.raises(ValueError, match=match):
            landscape(base, experts["a"], given.pop("partners"), given.pop("loss"), **given)

    told(r"a is 'x', must be a list of finite numbers; b is \[nan\], must.*loss is None: give.*memory is -1", a="x",
         b=[float("nan")], loss=None, memory=-1)  # fmt: skip
    told("partners: parameter .* is a float", partners=dict.fromkeys(partners, 1.0))
    told("partners lacks parameter", partners={})
    told(r"parameter .* has shape \(1, 1, 1\) in partners", partners={path: torch.ones(1, 1, 1) for path in partners})


@pytest.mark.parametrize("batches", [[], [torch.ones(1)], [Micro(1.0), 1.0]], ids=["none", "tensor", "one is not"])
def test_a_mean_of_no_batches_or_of_others_is_refused(batches):
    with pytest.raises(ValueError, match="batches must be a list of at least one Micro"):
        mean_loss(loss, batches)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mean_by_weights_that_are_not_positive_is_refused(weight):
    with pytest.raises(ValueError, match=rf"weights of batches are \[{weight}\]: must be positive"):
        mean_loss(loss, [Micro(1.0), Micro(2.0, weight)])
    mean = mean_loss(lambda params, batch: (params * batch, None), [Micro(1.0), Micro(2.0, 3.0)])
    assert mean(torch.tensor(1.0)) == 1.75


def test_every_point_is_the_equation(family):
    base, experts = family
    other = {n: leaf + 0.2 * tree_of(9)[n] for n, leaf in base.items()}  # another method's expert of the task
    partners = partner_update(base, experts, "a")
    values = landscape(base, other, partners, loss, a=A, b=B)
    assert (len(values), len(values[0])) == (len(B), len(A))
    for b, line in zip(B, values, strict=True):
        for a, value in zip(A, line, strict=True):
            point = {
                n: base[n] + a * (other[n] - base[n])
                + b * 0.3 * (experts["b"][n] + experts["c"][n] - 2 * base[n])
                for n in base
            }  # fmt: skip
            assert value == pytest.approx(float(loss(point)), rel=1e-12)


def test_marked_points_are_the_base_the_expert_and_the_merge(family):
    base, experts = family
    delta, partners = merge.task_vector(experts["c"], base), partner_update(base, experts, "c", coef=0.3)
    start = slice_point(base, delta, partners, 0.0, 0.0)
    assert all(torch.equal(start[n], base[n]) for n in base)
    torch.testing.assert_close(slice_point(base, delta, partners, 1.0, 0.0), experts["c"], rtol=1e-15, atol=1e-16)
    merged = merge.task_arithmetic(base, experts, coef=0.3)
    torch.testing.assert_close(slice_point(base, delta, partners, 0.3, 1.0), merged, rtol=1e-14, atol=1e-16)


def test_one_at_a_time_and_all_together_give_the_same_slice(family):
    base, experts = family
    partners = partner_update(base, experts, "a")
    looped, batched = (landscape(base, experts["a"], partners, loss, a=A, b=B, memory=m) for m in (0, 1 << 24))
    assert batched == [pytest.approx(line, rel=1e-14) for line in looped]


def test_points_keep_dtypes_with_one_rounding_and_leave_other_leaves_alone():
    base = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "steps": torch.tensor([3])}
    delta, partners = (
        {"w": torch.tensor([2.0**-9, 0.25]), "steps": torch.tensor([0])},
        {"w": torch.tensor([2.0**-8, 0.0])},
    )
    point = slice_point(base, delta, partners, 1.0, 1.0)
    # 1 + 2^-9 + 2^-8 is nearer to 1 + 2^-7 than to 1; each step alone would round back to 1
    assert point["w"].tolist() == [1.0 + 2.0**-7, 2.25]
    assert point["w"].dtype == torch.bfloat16
    assert point["steps"].tolist() == [3]
    assert base["w"].tolist() == [1.0, 2.0]
