"""What goes around a merger: coefficients by depth, norms of task vectors."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import merge
from smat_fn.config import Ties, TsvMerge
from smat_fn.folders import merge_folders

BLOCKS = ["embed.weight", "layers.0.w", "layers.0.b", "layers.1.w", "layers.2.w", "head"]


def leaves(value, paths=BLOCKS):
    return {path: torch.full((2, 2), value) for path in paths}


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("model.layers.11.mlp.up.weight", 11),
        ("encoder.layer.3.0.weight", 3),
        ("visual.resblocks.0.ln", 0),
        ("3.weight", None),
        ("classifier.2", None),
        ("norm.weight", None),
    ],
)
def test_the_block_of_a_leaf(path, block):
    assert merge.block_of(path) == block


def test_lines_by_hand():
    coefs = merge.lines_coefs(BLOCKS, low=0.2, high=1.0)
    assert list(coefs) == BLOCKS
    assert list(coefs.values()) == [0.2, 0.2, 0.2, pytest.approx(0.6), 1.0, 0.2]
    by_name = {"layers.0.w": 0, "layers.2.w": 1}.get
    assert list(merge.lines_coefs(BLOCKS, low=0.0, high=1.0, layer_of=by_name).values()) == [0, 0, 0, 0, 1, 0]
    scaled = merge.lines(leaves(2.0), low=0.2, high=1.0)
    assert all(torch.equal(scaled[path], torch.full((2, 2), 2.0) * coef) for path, coef in coefs.items())
    assert merge.lines_coefs([], low=0.2, high=1.0) == {}


def test_rules_are_one_a_block_and_give_every_leaf_its_coefficient():
    assert merge.lines_rules(BLOCKS, low=0.2, high=1.0) == {
        "layers.0.*": 0.2,
        "layers.1.*": pytest.approx(0.6),
        "layers.2.*": 1.0,
        "*": 0.2,
    }
    stacks = ["enc.layers.0.w", "enc.layers.2.1.w", "dec[x].h.1.0.w", "dec.3"]
    rules = merge.lines_rules(stacks, low=0.0, high=2.0)
    assert merge.coefs_of(stacks, rules) == merge.lines_coefs(stacks, low=0.0, high=2.0)
    inside = stacks[:-1]
    assert "*" not in merge.lines_rules(inside, low=0.0, high=2.0)
    assert merge.coefs_of(inside, merge.lines_rules(inside, low=0.0, high=2.0))["dec[x].h.1.0.w"] == 1.0


def test_lines_of_one_block_or_of_no_number_is_refused():
    for paths in (["a", "b"], ["layers.0.a", "layers.0.b"]):
        with pytest.raises(ValueError, match=r"(low|high) is nan, must be finite; no two blocks by the names"):
            merge.lines_coefs(paths, low=float("nan"), high=1.0)


@pytest.mark.parametrize("config", [Ties(keep=0.5, aggregate="sum", scope="global"), TsvMerge()])
def test_lines_goes_around_a_merger_in_memory_and_on_folders(config, tmp_path):
    generator = torch.Generator().manual_seed(0)
    base, *others = [{path: torch.randn(3, 4, generator=generator) for path in BLOCKS} for _ in range(4)]
    experts = dict(zip("abc", others, strict=True))
    coefs = merge.lines_coefs(BLOCKS, low=0.2, high=0.9)
    merged = merge.merge_by(config, base, experts, coef=coefs)
    vector = merge.vector_by(config, base, experts)
    expected = merge.apply_vector(base, merge.lines(vector, low=0.2, high=0.9), coef=1.0)
    for path, leaf in expected.items():
        torch.testing.assert_close(merged[path], leaf)
    for name, tree in {"base": base, **experts}.items():
        (tmp_path / name).mkdir()
        save_file(tree, tmp_path / name / "model.safetensors")
    paths = {name: tmp_path / name for name in experts}
    merge_folders(config, tmp_path / "base", paths, tmp_path / "out", coef=coefs, chunk=5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(leaf, merged[path]) for path, leaf in stored.items())


def test_the_first_coefficient_of_the_authors():
    base, experts = leaves(0.0), [leaves(1.0), leaves(3.0)]
    vector = merge.task_arithmetic_vector(base, experts)
    assert merge.lines_low(vector, base, experts) == 1 / 2
    assert merge.lines_low({path: leaf / 4 for path, leaf in vector.items()}, base, experts) == 2.0
    with pytest.raises(ValueError, match="the merged vector is zero"):
        merge.lines_low(leaves(0.0), base, experts)
    with pytest.raises(ValueError, match="the merged vector holds values that are NaN or infinite"):
        merge.lines_low(leaves(float("inf")), base, experts)
    for wrong, told in (({"w": 1.0}, "vector: "), ({"w": torch.ones(3)}, "vector lacks parameter")):
        with pytest.raises(ValueError, match=told):
            merge.lines_low(wrong, base, experts)


def test_norms_of_task_vectors(family):
    base, experts = family(torch.bfloat16)
    paths = [path for path, leaf in base.items() if leaf.is_floating_point()]
    for name, size in merge.norms(base, experts).items():
        squares = ((experts[name][path].double() - base[path].double()).square().sum().item() for path in paths)
        assert size == pytest.approx(sum(squares) ** 0.5)


def test_unequal_norms_are_named_and_shortened():
    base, experts = leaves(0.0), {"a": leaves(1.0), "b": leaves(3.0), "c": leaves(-4.0)}
    sizes = merge.norms(base, experts)
    text = "the task vector of 'c' (norm 19.6) is 4.0 times as long as that of 'a' (4.9): the longest decides a merge"
    assert merge.norms_note(sizes) == text
    assert merge.norms_note(sizes, 4.0) == merge.norms_note({}) == ""
    factors = merge.shortening(sizes)
    assert factors == {"a": 1.0, "b": pytest.approx(1 / 3), "c": 0.25}
    short = {name: {p: leaf * factors[name] for p, leaf in expert.items()} for name, expert in experts.items()}
    assert list(merge.norms(base, short).values()) == [pytest.approx(sizes["a"])] * 3
    assert "longer than that of 'd'" in merge.norms_note({**sizes, "d": 0.0})
    with pytest.raises(ValueError, match="the task vector of 'd' is zero: leave it out"):
        merge.shortening({**sizes, "d": 0.0})
