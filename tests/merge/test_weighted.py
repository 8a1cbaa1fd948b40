"""Weights by expert: the merge is that of the experts θ₀ + w_i Δ_i, in memory and of folders."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import merge, tree
from smat_fn.config import Consensus, DcMerge, IsoC, IsoCts, MagMax, Opcm, Pcb, Sce, TsvMerge, Wudi
from smat_fn.folders import merge_folders
from smat_fn.folders.inputs.stacks import StackPart, stack_of
from smat_fn.merge.parts import arithmetic, tall
from smat_fn.merge.parts.per_expert import Weighted

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "tests" / "scripts" / "merge" / "subcommands" / "make_recipes.py"
_spec = importlib.util.spec_from_file_location("make_recipes", RECIPES)
make_recipes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_recipes)

CONFIGS = {
    "tsv_merge": TsvMerge(coef=0.5),
    "tsv_merge, all of it": TsvMerge(coef=0.5, share=1.0, others="zero"),
    "iso_c": IsoC(coef=0.5),
    "iso_cts": IsoCts(coef=0.5, common=0.5),
    "wudi": Wudi(coef=0.5),
    "act_mat": Wudi(coef=0.5, ridge=0.0, norms=False),
    "dc_merge": DcMerge(coef=0.5, keep=0.1),
    "dc_merge linear": DcMerge(coef=0.5, keep=0.5, share=0.4, smooth="linear", elect=False),
    "opcm": Opcm(coef=0.5),
    "opcm raw": Opcm(coef=0.5, norms=False, skip=("row",)),
    "magmax": MagMax(coef=0.5),
    "pcb": Pcb(coef=0.5, ratio=0.5, clip=0.1),
    "sce": Sce(coef=0.5, floor=0.0),
    "sce half": Sce(coef=0.5, density=0.5, floor=0.0),
    "consensus": Consensus(coef=0.5, ratio=0.4),
}
TALL = "tsv_merge", "iso_c", "iso_cts"
POWERS = {"cstance": -0.5, "fomc": 0.0, "sum": {"*at*": 2.0, "*": 0.25}}  # and 1 of the others
FRACTIONS = {"cstance": -0.7, "fomc": 0.0, "sum": {"*at*": 1.3, "*": 0.4}}
every_config = pytest.mark.parametrize("name", CONFIGS)


def weight(weights, name, path):
    """An expert's weight of a leaf."""
    found = weights.get(name, 1.0)
    if isinstance(found, dict):
        return next(iter(found.values())) if "at" in path else found["*"]
    return found


def scaled(base, experts, weights):
    """The experts θ₀ + w_i Δ_i."""

    def moved(name, path, leaf):
        if not leaf.is_floating_point():
            return leaf.clone()
        return base[path] + weight(weights, name, path) * (leaf - base[path])

    return {name: {path: moved(name, path, leaf) for path, leaf in own.items()} for name, own in experts.items()}


def on_a_grid(family, dtype):
    """Trees whose values, scaled ones too, are multiples of 1/64 below 4: in bfloat16 all sums are exact."""
    base, experts = family(torch.float64, count=4)

    def rounded(leaf, step, most):
        return (leaf / step).round().clamp(-most, most) * step if leaf.is_floating_point() else leaf

    start = {path: rounded(leaf, 2**-2, 4) for path, leaf in base.items()}
    moved = {
        name: {
            path: start[path] + rounded(4 * (leaf - base[path]), 2**-3, 6) if leaf.is_floating_point() else leaf
            for path, leaf in own.items()
        }
        for name, own in experts.items()
    }
    exact = {"": start, **moved, **{f"{name} scaled": own for name, own in scaled(start, moved, POWERS).items()}}
    for own in exact.values():
        for leaf in own.values():
            assert torch.equal(leaf.to(dtype).to(leaf.dtype), leaf)
    return tree.cast(start, dtype), {name: tree.cast(own, dtype) for name, own in moved.items()}


def same(left, right):
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        assert leaf.dtype == right[path].dtype
        assert torch.equal(leaf, right[path]), path


def test_every_merger_that_scales_its_task_vectors_is_here():
    kinds = [kind for kind in (*merge.MERGERS, *merge.MORE_MERGERS) if issubclass(kind, Weighted)]
    assert {kind.name for kind in kinds if kind.rule is Weighted.rule} == {config.name for config in CONFIGS.values()}
    assert {kind.name for kind in kinds if kind.rule is not Weighted.rule} == {
        *("ta", "ties", "dare", "dare_ties", "della", "breadcrumbs", "fisher")
    }


def test_the_lists_of_mergers_with_weights_are_complete():
    kinds = {kind.name for kind in (*merge.MERGERS, *merge.MORE_MERGERS) if issubclass(kind, Weighted)}
    listed = re.search(
        r"FOLDER@0.5 sets a weight \((.*?)\)", (ROOT / "smat_fn/scripts/commands/merge.py").read_text(), re.S
    )
    assert sorted(listed[1].replace("\n", " ").replace(",", "").split()) == sorted({*kinds, "weighted_average"})
    page = (ROOT / "docs/merging.md").read_text()
    rows = page.partition("| Merger | Result with weights w |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert sorted(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows))) == sorted(
        {*kinds, "weighted_average"}
    )


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_powers_of_two_are_scaled_experts_bit_for_bit(name, dtype, family):
    base, experts = on_a_grid(family, dtype)
    found = merge.merge_by(replace(CONFIGS[name], weights=POWERS), base, experts)
    same(found, merge.merge_by(CONFIGS[name], base, scaled(base, experts, POWERS)))
    assert not torch.equal(found["matrix"], merge.merge_by(CONFIGS[name], base, experts)["matrix"])


@every_config
def test_other_weights_are_scaled_experts_up_to_rounding(name, family):
    base, experts = family(torch.float64, count=4)
    found = merge.merge_by(replace(CONFIGS[name], weights=FRACTIONS), base, experts)
    expected = merge.merge_by(CONFIGS[name], base, scaled(base, experts, FRACTIONS))
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-8)


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folders_give_what_memory_gives(name, dtype, family, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "BLOCK", 32)
    base, experts = family(dtype, count=4)
    config = replace(CONFIGS[name], weights=FRACTIONS)
    expected = merge.merge_by(config, base, experts)
    for file, own in {"base": base, **experts}.items():
        save_file(own, tmp_path / f"{file}.safetensors")
    paths = tmp_path / "base.safetensors", {name: tmp_path / f"{name}.safetensors" for name in experts}
    for chunk, workers in ((40, 3), (1 << 19, 1)):
        out = tmp_path / f"{chunk}"
        merge_folders(config, *paths, out, chunk=chunk, workers=workers)
        same(load_file(out / "model.safetensors"), expected)


@every_config
def test_weights_of_one_change_no_bit(name, family):
    base, experts = family()
    expected = merge.merge_by(CONFIGS[name], base, experts)
    for weights in (None, dict.fromkeys(experts, 1.0), {"sum": {"*at*": 1.0, "*": 1.0}}):
        same(merge.merge_by(replace(CONFIGS[name], weights=weights), base, experts), expected)


@pytest.mark.parametrize("name", TALL)
def test_tall_matrices_by_blocks_of_rows_are_scaled_too(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tall, "LARGE", 403 * 12 - 1)
    generator = torch.Generator().manual_seed(1)
    base = {"embed": torch.zeros(403, 12), "bias": torch.zeros(5)}
    experts = {n: {p: torch.randn(leaf.shape, generator=generator) for p, leaf in base.items()} for n in "xyz"}
    weights = {"x": -0.5, "y": 0.0, "z": {"bias": 4.0, "*": 2.0}}
    own = {"x": -0.5, "y": 0.0, "z": 2.0}
    moved = {
        n: {"embed": own[n] * e["embed"], "bias": (4 if n == "z" else own[n]) * e["bias"]} for n, e in experts.items()
    }
    config = replace(CONFIGS[name], weights=weights)
    found = merge.merge_by(config, base, experts)
    same(found, merge.merge_by(CONFIGS[name], base, moved))
    monkeypatch.setattr(tall, "LARGE", 1 << 28)
    torch.testing.assert_close(merge.merge_by(config, base, experts)["embed"], found["embed"], rtol=0, atol=1e-4)
    monkeypatch.setattr(tall, "LARGE", 403 * 12 - 1)
    for file, leaves in {"base": base, **experts}.items():
        save_file(leaves, tmp_path / f"{file}.safetensors")
    paths = tmp_path / "base.safetensors", {n: tmp_path / f"{n}.safetensors" for n in experts}
    merge_folders(config, *paths, tmp_path / "out", chunk=1000, workers=2)
    same(load_file(tmp_path / "out" / "model.safetensors"), found)


def test_an_expert_without_some_layers_leaves_the_weights_of_others_to_them(tmp_path):
    make_recipes.write_models(tmp_path)
    experts = {name: tmp_path / name for name in "ABC"}
    experts["A"] = stack_of([StackPart(tmp_path / "A", 0, 2, True), StackPart(tmp_path / "A", 2, 4)])
    base, weights = tmp_path / "BASE", {"A": 4.0, "B": -0.5, "C": 2.0}
    start, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("BASE", *"ABC"))
    merge_folders(replace(CONFIGS["sce"], weights=weights), base, experts, tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    trees = dict(zip("ABC", others, strict=True))
    for path, leaf in merged.items():
        gone = "A" if ".0." in path or ".1." in path or "embed" in path else ""
        own = {name: {path: found[path]} for name, found in trees.items() if name != gone}
        there = {name: weights[name] for name in own}
        expected = merge.sce({path: start[path]}, own, coef=0.5, floor=0.0, weights=there)
        assert torch.equal(leaf, expected[path]), path


def test_matrix_mergers_by_hand():
    generator = torch.Generator().manual_seed(3)
    deltas = torch.randn(3, 6, 9, dtype=torch.float64, generator=generator)
    biases = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    base = {"w": torch.zeros(6, 9, dtype=torch.float64), "b": torch.zeros(7, dtype=torch.float64)}
    experts = {name: {"w": d, "b": b} for name, d, b in zip("xyz", deltas, biases, strict=True)}
    numbers = [0.3, -1.7, 1.4]  # whose sum is 0
    weights = dict(zip("xyz", numbers, strict=True))

    def close(merged, matrix):
        torch.testing.assert_close(merged["w"], matrix, rtol=0, atol=1e-9)
        mean = sum(w * b for w, b in zip(numbers, biases, strict=True)) / 3
        torch.testing.assert_close(merged["b"], mean, rtol=0, atol=1e-12)

    parts = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
    left, right = (
        torch.linalg.svd(torch.cat(own, 1), full_matrices=False)
        for own in ([u[:, :2] for u, _, _ in parts], [v[:2].mT for _, _, v in parts])
    )
    values = torch.cat([w * s[:2] for w, (_, s, _) in zip(numbers, parts, strict=True)])  # of the signs of weights
    close(
        merge.tsv_merge(base, experts, coef=1.0, weights=weights),
        (left[0] @ left[2] * values) @ (right[0] @ right[2]).mT,
    )
    u, s, v = torch.linalg.svd(sum(w * d for w, d in zip(numbers, deltas, strict=True)), full_matrices=False)
    close(merge.iso_c(base, experts, coef=1.0, weights=weights), s.mean() * u @ v)
    grams = [d.mT @ d / d.square().sum() for d in deltas]  # of changes of norm 1: no weight is in them
    above = sum(w * d @ g for w, d, g in zip(numbers, deltas, grams, strict=True))
    close(merge.wudi(base, experts, coef=1.0, ridge=0.0, weights=weights), above @ torch.linalg.pinv(sum(grams)))
    grams = [w**2 * d.mT @ d for w, d in zip(numbers, deltas, strict=True)]
    above = sum(w * d @ g for w, d, g in zip(numbers, deltas, grams, strict=True))
    found = merge.wudi(base, experts, coef=1.0, ridge=0.0, norms=False, weights=weights)
    close(found, above @ torch.linalg.pinv(sum(grams)))


def test_an_expert_of_weight_0_keeps_its_share_of_the_directions_and_fills_it_with_nothing():
    generator = torch.Generator().manual_seed(3)
    base = {"w": torch.zeros(6, 9, dtype=torch.float64)}
    experts = {name: {"w": torch.randn(6, 9, dtype=torch.float64, generator=generator)} for name in "xyz"}
    found = merge.tsv_merge_vector(base, experts, weights={"y": 0.0})["w"]
    others = {name: experts[name] for name in "xz"}
    torch.testing.assert_close(found, merge.tsv_merge_vector(base, others, share=1 / 3)["w"], rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(found) == 4  # two of each, and none of y


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_of_no_expert_and_what_is_no_number_are_errors(name, family):
    base, experts = family()
    with pytest.raises(ValueError, match="weights names 'other', which is not an expert") as error:
        merge.merge_by(replace(CONFIGS[name], weights={"other": 1.0, "sum": float("nan")}), base, experts)
    assert "the weight of 'sum' is nan, must be finite" in str(error.value)
