"""Single files of diffusion models: metadata, marks of the parametrisation, and files that hold a part of base."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from smat_fn.config import Emr, TaskArithmetic
from smat_fn.folders import Part, merge_folders, merge_part, plan
from smat_fn.folders.run import export_task

TA = TaskArithmetic(coef=0.5)
SHAPES = {
    "model.diffusion_model.blocks.0.weight": (3, 2),
    "model.diffusion_model.out.bias": (3,),
    "first_stage_model.decoder.conv.weight": (2, 2),
    "cond_stage_model.embed.weight": (4, 2),
}
KEPT = {"config": json.dumps({"transformer": {"layers": 48}}), "modelspec.architecture": "ltx", "z": "Ünïcode"}
LEFT = {
    "modelspec.hash_sha256": "0x" + "ab" * 32,
    "modelspec.thumbnail": "data:image/png;base64,",
    "sshs_legacy_hash": "abcd",
    "ss_learning_rate": "1e-4",
    "sd_merge_recipe": "{}",
    "unet_dtype": "float16",
    "made_of": "0123456789abcdef" * 4,
}


def leaves(seed: int, *, of: str = "", **more: torch.Tensor) -> dict:
    draws = torch.Generator().manual_seed(seed)
    found = {path: torch.randn(shape, generator=draws).bfloat16() for path, shape in SHAPES.items()}
    return {path: leaf for path, leaf in found.items() if path.startswith(of)} | more


def metadata(file) -> dict:
    with safe_open(file, "pt") as store:
        return store.metadata()


@pytest.fixture
def files(tmp_path):
    save_file(leaves(0), tmp_path / "base.safetensors", metadata={"format": "np", **LEFT, **KEPT})
    save_file(leaves(1), tmp_path / "x.safetensors", metadata={"config": "of x"})
    return tmp_path / "base.safetensors", {"x": tmp_path / "x.safetensors"}


def test_the_output_has_bases_metadata_without_what_describes_its_weights(files, tmp_path):
    report = merge_folders(TA, *files, tmp_path / "out")
    merged = tmp_path / "out/model.safetensors"
    assert metadata(merged) == {"format": "pt"} | KEPT
    assert "the output has the metadata of base's file (config, modelspec.architecture, z)" in report.notes
    (left,) = (note for note in report.notes if "left out" in note)
    assert all(name in left for name in LEFT)
    merge_part(TA, *files, tmp_path / "part", Part(1, 1))
    assert (tmp_path / "part/model.safetensors").read_bytes() == merged.read_bytes()
    merge_folders(TA, merged, files[1], tmp_path / "again")  # an output is an input
    assert metadata(tmp_path / "again/model.safetensors") == {"format": "pt"} | KEPT


def test_other_outputs_have_the_format_alone(files, folders, tmp_path):
    """Of a base in a folder, a pickled file, a stack of a file's layers."""
    base, experts = files
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(base.read_bytes())
    torch.save(leaves(0), tmp_path / "base.pt")
    stack = Path(f"{base}[0:1]+{base}[0:1]")
    for name, origin, own in (
        ("in", tmp_path / "in", experts),
        ("pt", tmp_path / "base.pt", experts),
        ("s", stack, {"x": stack}),
    ):
        merge_folders(TA, origin, own, tmp_path / f"out-{name}")
        assert metadata(tmp_path / f"out-{name}/model.safetensors") == {"format": "pt"}, name


def test_the_model_of_a_task_has_the_metadata_once_it_is_exported(files, tmp_path):
    report = merge_folders(Emr(), *files, tmp_path / "several", describe=None)
    assert not [note for note in report.notes if "metadata" in note]
    report = export_task(tmp_path / "several", files[0], "x", tmp_path / "x", describe=None)
    assert metadata(tmp_path / "x/model.safetensors") == {"format": "pt"} | KEPT
    assert len([note for note in report.notes if "metadata" in note]) == 2


@pytest.mark.parametrize("mark", ["v_pred", "ztsnr", "edm_vpred.sigma_max"])
def test_models_of_another_parametrisation_are_an_error_of_its_own(mark, files, tmp_path):
    marked = tmp_path / "v.safetensors"
    save_file(leaves(2, **{mark: torch.ones(0)}), marked)
    for heads in "error", "keep":
        with pytest.raises(
            ValueError, match=rf"^expert 'v' is another kind .* it has {mark}, base none: merge"
        ) as caught:
            plan(TA, files[0], {"v": marked}, tmp_path / "out", heads=heads)
        assert "heads" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"expert 'x' is another kind .* it has none, base {mark}: merge"):
        plan(TA, marked, files[1], tmp_path / "out")
    merge_folders(TA, marked, {"v": marked}, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")[mark].shape == (0,)
    save_file(leaves(3, of="model."), tmp_path / "unet.safetensors")  # without the mark, as a part may be
    plan(TA, marked, {"u": tmp_path / "unet.safetensors"}, tmp_path / "other", partial=True)


def test_a_file_of_a_part_is_told_to_take_the_rest_from_base(files, folders, tmp_path):
    base, _ = files
    unet, inner = tmp_path / "unet.safetensors", tmp_path / "inner.safetensors"
    buffers = {"model.diffusion_model.position_ids": torch.arange(3)}
    own = leaves(2, of="model.")
    save_file(own | buffers, unet)
    save_file({path.removeprefix("model.diffusion_model."): leaf for path, leaf in own.items()}, inner)
    for file, told in (
        (unet, r"lacks cond_stage_model, first_stage_model as a whole: pass `partial=True`, which takes"),
        (inner, r"names in base start with 'model\.diffusion_model\.': if it is a part of base, pass `partial=True`"),
    ):
        with pytest.raises(ValueError, match=told) as caught:
            plan(TA, base, {"u": file}, tmp_path / "out")
        assert "into" not in str(caught.value)
        report = merge_folders(TA, base, {"u": file}, tmp_path / file.stem, partial=True)
        assert "expert 'u' lacks cond_stage_model, first_stage_model: it has base's" in report.notes
        wanted = folders.in_memory(TA, leaves(0), {"u": leaves(0) | own})
        folders.assert_same_bits(load_file(tmp_path / file.stem / "model.safetensors"), wanted)
