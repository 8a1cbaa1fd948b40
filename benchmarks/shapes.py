"""The paper's models in their true shapes, with random weights, and what trains them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smat_fn import ModuleLoss, optim
from smat_fn import where as pick
from smat_fn.mat import finetune


class Shape(NamedTuple):
    """A model of the paper: sizes as in its published configuration."""

    family: str  # llama or clip
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]  # what the dry run has instead
    batch: tuple[int, ...]  # sequences x tokens, or images
    dtype: torch.dtype
    hyperparameters: Mapping[str, Any]
    clip: float | None


_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_LLAMA, _TINY_CLIP = {**_TINY, "vocab_size": 64, "num_key_value_heads": 1}, {**_TINY, "image_size": 28}
_TEXT, _IMAGES = {"alpha_min": 0.2, "sigma": 2e-3}, {"alpha_min": 0.1, "sigma": 1e-3}


def _llama(hidden: int, inner: int, layers: int, *, tied: bool) -> Shape:
    sizes = {**_LLAMA, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes["tie_word_embeddings"] = tied
    return Shape("llama", sizes, _TINY_LLAMA, (8, 512), torch.bfloat16, _TEXT, 1.0)


def _clip(hidden: int, layers: int, heads: int, patch: int) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    sizes = {**sizes, "num_attention_heads": heads, "image_size": 224, "patch_size": patch}
    return Shape("clip", sizes, {**_TINY_CLIP, "patch_size": 14}, (128,), torch.float32, _IMAGES, None)


SHAPES = {
    "llama-3.2-1b": _llama(2048, 8192, 16, tied=True),
    "clip-vit-b32": _clip(768, 12, 12, 32),
    "llama-3.1-8b": _llama(4096, 14336, 32, tied=False),
    "clip-vit-l14": _clip(1024, 24, 16, 14),
}


class Setup(NamedTuple):
    """A model on the device, its batch, and the one state that all methods train."""

    loss: ModuleLoss
    where: Any
    optimizer: Any
    state: Any
    batch: Any
    shape: Shape
    layers: str


def set_up(shape: Shape, device: torch.device, dry_run: bool) -> Setup:
    """Built on the device, in the dtype of training; the module itself then holds no weights."""
    sizes, full = _sizes(shape, device, dry_run), shape.sizes["num_hidden_layers"]
    module, loss, batch = _built(shape, sizes, device, dry_run)
    where, params = pick.block_linear(module), {name: p.detach() for name, p in module.named_parameters()}
    _hollow(module)
    text = shape.family == "llama"
    optimizer = optim.adamw(2e-5, weight_decay=1e-3, fused=True) if text else optim.adam(1e-5, fused=True)
    wrapped = ModuleLoss(module, loss)
    state = finetune.build(wrapped, optimizer, params, engine="autograd").init(params)
    return Setup(wrapped, where, optimizer, state, batch, shape, f"{sizes['num_hidden_layers']} of {full}")


def by_hand(shape: Shape, device: torch.device, dry_run: bool) -> Callable[[], None]:
    """A step of fine-tuning as torch users write it, on a model of its own: backward, clip, fused optimizer."""
    module, loss, batch = _built(shape, _sizes(shape, device, dry_run), device, dry_run)
    optimizer: torch.optim.Optimizer
    if shape.family == "llama":
        optimizer = torch.optim.AdamW(module.parameters(), 2e-5, weight_decay=1e-3, fused=True)
    else:
        optimizer = torch.optim.Adam(module.parameters(), 1e-5, fused=True)

    def step() -> None:
        loss(module, batch)[0].backward()
        if shape.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sizes(shape: Shape, device: torch.device, dry_run: bool) -> dict[str, Any]:
    sizes = {**shape.sizes, **(shape.tiny if dry_run else {})}
    if not dry_run and device.type == "cuda":
        sizes["num_hidden_layers"] = _layers_that_fit(shape, sizes, device)
    return sizes


def _built(
    shape: Shape, sizes: Mapping[str, Any], device: torch.device, dry_run: bool
) -> tuple[nn.Module, Callable[..., Any], Any]:
    """(module, loss, batch)."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with device:
            return (_text if shape.family == "llama" else _images)(shape, sizes, dry_run)
    finally:
        torch.set_default_dtype(before)


def llama(sizes: Mapping[str, Any]) -> nn.Module:
    """A Llama of these sizes with random weights, on the default device in the default dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def _text(shape: Shape, sizes: Mapping[str, Any], dry_run: bool) -> tuple[nn.Module, Any, Tensor]:
    module = llama({**sizes, "max_position_embeddings": 131072}).train()
    tokens = torch.randint(sizes["vocab_size"], (2, 16) if dry_run else shape.batch)
    return module, lambda m, batch: (m(input_ids=batch, labels=batch).loss, None), tokens


def _images(shape: Shape, sizes: Mapping[str, Any], dry_run: bool) -> tuple[nn.Module, Any, Any]:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    module = CLIPVisionModel(CLIPVisionConfig(**sizes)).train()
    count = 2 if dry_run else shape.batch[0]
    head = torch.randn(sizes["hidden_size"], 100) / sizes["hidden_size"] ** 0.5
    batch = (torch.randn(count, 3, sizes["image_size"], sizes["image_size"]), torch.randint(100, (count,)))

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        return nn.functional.cross_entropy(m(pixel_values=batch[0]).pooler_output @ head, batch[1]), None

    return module, loss, batch


def _layers_that_fit(shape: Shape, sizes: Mapping[str, Any], device: torch.device) -> int:
    # theta, gradient, two moments, theta_0 and theta~, and activations of about 40 numbers a token and hidden unit
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    if shape.family != "llama":
        return sizes["num_hidden_layers"]
    width = shape.dtype.itemsize
    tokens, heads = shape.batch[0] * shape.batch[1], sizes["num_key_value_heads"] / sizes["num_attention_heads"]
    layer = 6 * width * (2 * hidden**2 * (1 + heads) + 3 * hidden * inner) + 40 * width * tokens * hidden
    ends = 6 * width * sizes["vocab_size"] * hidden * (1 if sizes["tie_word_embeddings"] else 2)
    ends += 4 * 4 * tokens * sizes["vocab_size"]  # logits and what becomes of them
    room = 0.92 * torch.cuda.get_device_properties(device).total_memory - ends
    return max(1, min(sizes["num_hidden_layers"], int(room // layer)))


def _hollow(module: nn.Module) -> None:
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                owner._parameters[name] = empty[id(p)]
