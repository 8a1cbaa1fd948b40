"""Images as a processor of ``transformers`` prepares them, uint8 until they are on the device.

A processor resizes, crops, and then maps each 8-bit value of a channel to a float. The first two are done once an image
and kept; the last is a table of 256 values a channel, made by the processor itself, so that looking values up gives its
own result bit for bit at a quarter of its size.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor

from ..checkpoint import fingerprint
from ..progress import bar
from .cache import HELD, cached, versions
from .images import DECODING, Images, hash_of

_TOGETHER = 16
_ELEMENTWISE = ("do_rescale", "do_normalize", "include_top")  # the last of EfficientNet: it normalizes twice
_WAY = (
    "save another processor with the model, a CLIPImageProcessorPil with this one's sizes, mean and standard deviation"
)
_LAYOUT = {"input_data_format": "channels_last", "return_tensors": "pt"}

Pixels = Callable[[Tensor], Tensor]  # places (n,) -> uint8 (n, 3, H, W)


def prepare(images: np.ndarray | Images, processor: Any, places: Sequence[int] | None = None) -> Tensor:
    """The images at these places (None: all), resized and cropped: uint8 (n, 3, H, W).

    Raises: ValueError for a processor that gives other than 8-bit values then, or images of several sizes.
    """
    places = range(len(images)) if places is None else places
    later = {step: False for step in _ELEMENTWISE if hasattr(processor, step)}

    def some(start: int) -> Tensor:
        chosen = [np.asarray(images[place]) for place in places[start : start + _TOGETHER]]
        return processor(chosen, **_LAYOUT, **later)["pixel_values"]

    try:
        starts, found = range(0, len(places), _TOGETHER), []
        with ThreadPoolExecutor() as pool, bar(len(starts), desc="preparing images", leave=False, delay=1) as shown:
            for part in pool.map(some, starts):
                found.append(part)
                shown.update()
        parts = torch.cat(found)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the image processor {type(processor).__name__} fails on the images ({error})") from error
    if parts.dtype != torch.uint8 or parts.ndim != 4 or parts.shape[1] != 3:
        raise ValueError(
            f"the image processor {type(processor).__name__} gives {parts.dtype} {tuple(parts.shape)} before it "
            f"rescales, must be uint8 (N, 3, H, W): {_WAY}"
        )
    return parts


def value_table(processor: Any) -> Tensor:
    """The processor's values for 8-bit values: float32 (3, 256).

    Raises: ValueError for a processor whose values are others: it pads, or resizes, after it has rescaled.
    """
    levels = repeat(np.arange(256, dtype=np.uint8), "(h w) -> h w c", h=16, c=3)
    sizes = dict.fromkeys(("do_resize", "do_center_crop"), False)
    table = rearrange(processor([levels], **_LAYOUT, **sizes)["pixel_values"], "1 c h w -> c (h w)").float()
    wide = np.random.default_rng(0).integers(0, 256, (1, 20, 33, 3), dtype=np.uint8)
    for images in (wide, wide.transpose(0, 2, 1, 3)):
        own = processor(list(images), **_LAYOUT)["pixel_values"]
        if len(table[0]) != 256 or not torch.equal(look_up(table, prepare(images, processor, [0])), own.float()):
            name = type(processor).__name__
            raise ValueError(f"the image processor {name} pads or resizes images that are already rescaled: {_WAY}")
    return table


def look_up(table: Tensor, pixels: Tensor) -> Tensor:
    """``table[channel, value]`` of every value: float (N, 3, H, W) in the table's dtype.

    Args: table: (3, 256); pixels: uint8 (N, 3, H, W) on the same device.
    """
    channels = torch.arange(3, dtype=torch.int32, device=pixels.device).view(3, 1, 1)
    return table.flatten().index_select(0, (pixels + 256 * channels).flatten()).view(pixels.shape)


def open_pixels(images: np.ndarray | Images, processor: Any, first: Tensor) -> Pixels:
    """Access to `prepare` of images: through the cache, by content, where they take no more than `HELD` bytes.

    Args: first: one image prepared, (1, 3, H, W).
    """
    if len(images) * first.numel() > HELD:
        return lambda places: prepare(images, processor, places.tolist())
    config = {
        "images": content(images),
        "processor": processor.to_json_string(),
        **decoding(images),
        **versions("transformers", "pillow"),
    }
    kept = cached("pixels", config, lambda: {"pixels": prepare(images, processor)})["pixels"]
    return lambda places: kept[places]


def decoding(images: np.ndarray | Images) -> dict[str, int]:
    """Of encoded images, for keys of what is made of them."""
    return {} if isinstance(images, np.ndarray) else {"decoding": DECODING}


def each(images: np.ndarray | Images) -> list[bytes]:
    """Hash of every stored image."""
    return [hash_of(image.tobytes()) for image in images] if isinstance(images, np.ndarray) else images.hashes


def content(images: np.ndarray | Images) -> str:
    """Hash of the stored images."""
    if isinstance(images, np.ndarray):
        return fingerprint({"images": torch.from_numpy(np.ascontiguousarray(images))})
    digest = hashlib.sha256()
    for place in range(len(images)):
        encoded = images.encoded(place)
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
