"""Statistics beside experts: merged on disk as in memory, and refused where they are missing or stale."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smat_fn import checkpoint, merge
from smat_fn.config import Fisher, RegMean
from smat_fn.folders import merge_folders, plan


def statistics_of(kind, experts):
    """Of every expert, drawn."""
    generator = torch.Generator().manual_seed(7)

    def own(path, leaf):
        if kind != "gram":
            return torch.rand(leaf.shape, generator=generator)
        rows = torch.randn(9, leaf.shape[1], generator=generator)
        return rows.mT @ rows

    def wanted(leaf):
        return leaf.ndim == 2 if kind == "gram" else leaf.is_floating_point()

    return {
        name: {path: own(path, leaf) for path, leaf in expert.items() if wanted(leaf)}
        for name, expert in experts.items()
    }


@pytest.fixture
def saved(family, folders, tmp_path):
    """``saved(kind, dtype)``: base, experts, their statistics in memory and, beside them, on disk."""

    def save(kind, dtype=torch.float32, stored=torch.float32):
        base, experts = family(dtype)
        paths = folders.save_family(tmp_path, base, experts)
        found = statistics_of(kind, experts)
        for name, own in found.items():
            found[name] = {path: leaf.to(stored) for path, leaf in own.items()}
            facts = {"expert": checkpoint.fingerprint(experts[name])}
            checkpoint.save_statistics(paths[1][name], kind, found[name], facts)
        return base, experts, found, paths

    return save


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Fisher(coef=0.7), "fisher"),
        (Fisher(coef=1.0, normalize=False, floor=0.3, weights={"qa": 0.5}), "fisher"),
        (Fisher(coef=0.7, weights_from="adam"), "adam"),
        (RegMean(coef=0.7), "gram"),
        (RegMean(coef=0.7, scale=1.0, others="zero"), "gram"),
    ],
    ids=["fisher", "fisher raw", "adam", "reg_mean", "reg_mean full"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cuts", [((1 << 19, 1), (40, 3)), pytest.param(((5, 1),), marks=pytest.mark.slow)], ids=["", "single"]
)
def test_folders_merge_to_the_bits_of_memory(cuts, config, kind, dtype, saved, folders, tmp_path):
    base, experts, found, paths = saved(kind, dtype, torch.bfloat16 if kind == "adam" else torch.float32)
    expected = merge.merge_by(config, base, experts, statistics=found)
    assert not torch.equal(expected["matrix"], base["matrix"])
    assert plan(config, *paths, tmp_path / "planned").seconds > 0
    for chunk, workers in cuts:
        out = tmp_path / f"out-{chunk}"
        merge_folders(config, *paths, out, chunk=chunk, shard_size=150, workers=workers)
        folders.assert_same_bits(folders.load(out), expected)


def test_missing_statistics_are_one_error_with_the_command(saved, tmp_path):
    _, _, _, (base, experts) = saved("fisher")
    gone = [str(path) for path in list(experts.values())[:2]]
    for path in gone:
        (Path(path) / "fisher.safetensors").unlink()
    way = f"make them by `python merge.py statistics {' '.join(gone)} --kinds fisher`, which says what else it needs"
    told = f"no fisher.safetensors in {', '.join(gone)}: {way}"
    with pytest.raises(ValueError, match=f"^{re.escape(told)} for experts that train.py did not make$"):
        merge_folders(Fisher(coef=1.0), base, experts, tmp_path / "out")
    with pytest.raises(ValueError, match=r"no adam\.safetensors in .* `python train\.py \.\.\. --keep-moments`"):
        plan(Fisher(coef=1.0, weights_from="adam"), base, experts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_statistics_of_other_weights_and_shapes_are_refused(saved, tmp_path):
    _, weights, found, (base, experts) = saved("fisher")
    name = next(iter(experts))
    facts = {"kind": "expert", "fingerprint": checkpoint.fingerprint(weights[name])}
    (experts[name] / "manifest.json").write_text("[]")  # another program's
    plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    (experts[name] / "manifest.json").write_text(json.dumps(facts))
    plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    stored, kept = experts[name] / "model.safetensors", (experts[name] / "model.safetensors").read_bytes()
    save_file({path: leaf + 1 for path, leaf in weights[name].items()}, stored)
    with pytest.raises(ValueError, match="was computed from other weights than those in its folder now"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    stored.write_bytes(kept)
    checkpoint.save_statistics(experts[name], "fisher", found[name], {"expert": "another"})
    with pytest.raises(ValueError, match="was computed from other weights than those in its folder now"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    checkpoint.save_statistics(experts[name], "fisher", {"matrix": torch.ones(1)}, {"expert": "another"})
    with pytest.raises(ValueError, match=r"parameter 'matrix' has shape \(1,\)"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    file = experts[name] / "fisher.safetensors"
    checkpoint.save_statistics(experts[name], "adam", found[name], {"expert": facts["fingerprint"]})
    (experts[name] / "adam.safetensors").replace(file)
    with pytest.raises(ValueError, match=r"fisher\.safetensors holds statistics of kind adam: give it back the name"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    save_file(found[name], file, {"facts": "[]"})
    with pytest.raises(ValueError, match="holds no statistics of smat_fn"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")
    file.write_bytes(b"no file")
    with pytest.raises(ValueError, match="holds no statistics of smat_fn"):
        plan(Fisher(coef=1.0), base, experts, tmp_path / "out")


def test_statistics_are_among_the_files_of_a_merge(saved, tmp_path):
    _, experts, _, paths = saved("fisher")
    first = merge_folders(Fisher(coef=1.0), *paths, tmp_path / "out")
    name = next(iter(experts))
    read = [file.name for file in first.inputs[f"expert {name!r}"]]
    assert "fisher.safetensors" in read  # hashed into the card, and watched while it is read
