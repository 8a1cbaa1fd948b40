"""Prepared images: the processor's own values bit for bit, in uint8 until they are needed."""

import io

import numpy as np
import pytest
import torch

from smat_fn.data import pixels
from smat_fn.data.images import Images


def processor(**changes):
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(**{"size": {"shortest_edge": 12}, "crop_size": {"height": 8, "width": 8}, **changes})


def pictures(count=5, seed=0):
    """Images of several sizes, as an object that is indexed."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (3 + i, 20 - i, 3), dtype=np.uint8) for i in range(count)]


def encoded(images):
    from PIL import Image

    def read(i):
        out = io.BytesIO()
        Image.fromarray(images[i]).save(out, "PNG")
        return out.getvalue()

    return Images(read, range(len(images)))


@pytest.mark.parametrize(
    "changes", [{}, {"do_normalize": False}, {"do_rescale": False}, {"do_resize": False}], ids=lambda c: str(*c)
)
def test_prepared_and_looked_up_values_are_the_processors_own(changes):
    own, images = processor(**changes), pictures()
    ready = pixels.prepare(encoded(images), own)
    assert ready.dtype == torch.uint8
    assert ready.shape == (5, 3, 8, 8)
    expected = own(images, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    assert torch.equal(pixels.look_up(pixels.value_table(own), ready), expected.float())


TRANSPARENT = {  # name: (mode, options of saving)
    "rgba.png": ("RGBA", {}),
    "la.png": ("LA", {}),
    "palette.png": ("P", {"transparency": 3}),
    "palette_alpha.png": ("P", {"transparency": bytes(range(0, 250, 5))}),
    "gray.png": ("L", {"transparency": 0}),
    "rgb.png": ("RGB", {"transparency": (0, 0, 0)}),
    "rgba.webp": ("RGBA", {"lossless": True}),
    "palette.gif": ("P", {"transparency": 3}),
    "rgba.tiff": ("RGBA", {}),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_images_are_on_white_as_the_processor_puts_them(name):
    from PIL import Image

    mode, options = TRANSPARENT[name]
    values = np.random.default_rng(0).integers(0, 256, (9, 14, 4), dtype=np.uint8)
    values[:3] = 0  # black that nobody sees
    whole, out = Image.fromarray(values), io.BytesIO()
    (whole.convert("RGB").quantize(64) if mode == "P" else whole.convert(mode)).save(out, name.split(".")[1], **options)
    own, stored = processor(), Images(lambda i: out.getvalue(), range(1))
    expected = own(Image.open(out), return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels.look_up(pixels.value_table(own), pixels.prepare(stored, own)), expected.float())
    assert (stored[0] == 255).all(-1).any()


@pytest.mark.parametrize("changes", [{}, {"include_top": False}, {"rescale_offset": True, "rescale_factor": 1 / 127.5}])
def test_a_processor_that_normalizes_twice_is_followed(changes):
    from transformers import EfficientNetImageProcessorPil

    own, images = EfficientNetImageProcessorPil(size={"height": 8, "width": 8}, **changes), pictures()
    ready = pixels.prepare(encoded(images), own)
    expected = own(images, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    assert torch.equal(pixels.look_up(pixels.value_table(own), ready), expected.float())


def test_a_processor_that_pads_what_it_has_normalized_is_refused():
    import transformers

    size = {"height": 24, "width": 24}
    for kind, options in (("Donut", {"size": size}), ("Sam", {"size": {"longest_edge": 24}, "pad_size": size})):
        own = getattr(transformers, f"{kind}ImageProcessorPil")(**options)
        with pytest.raises(ValueError, match=f"{kind}ImageProcessorPil pads or resizes images that are already rescal"):
            pixels.value_table(own)


def test_a_table_has_a_value_for_every_level_of_every_channel():
    table = pixels.value_table(processor(image_mean=[0.0, 0.5, 0.5], image_std=[1.0, 0.5, 0.25]))
    levels = torch.arange(256) / 255
    torch.testing.assert_close(table, torch.stack([levels, 2 * levels - 1, 4 * levels - 2]), rtol=0, atol=1e-6)


def test_many_images_are_prepared_as_one_is():
    images, own = np.stack([np.full((9, 9, 3), i, dtype=np.uint8) for i in range(50)]), processor()
    assert pixels.prepare(images, own)[:, 0, 0, 0].tolist() == list(range(50))
    assert pixels.prepare(images, own, [49, 3])[:, 0, 0, 0].tolist() == [49, 3]


def test_access_is_by_place_and_through_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path))
    images, own = np.stack([np.full((8, 8, 3), i, dtype=np.uint8) for i in range(7)]), processor()
    first, places = pixels.prepare(images, own, [0]), torch.tensor([5, 0, 5])
    expected = pixels.open_pixels(images, own, first)(places)
    assert expected[:, 0, 0, 0].tolist() == [5, 0, 5]
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "prepare", lambda *args: pytest.fail("it is in the cache"))
        assert torch.equal(pixels.open_pixels(images.copy(), own, first)(places), expected)
    # other content, another processor: other files
    pixels.open_pixels(images + 1, own, first)
    pixels.open_pixels(images, processor(size={"shortest_edge": 8}), first)
    assert len(list(tmp_path.iterdir())) == 3


def test_pixels_of_another_decoding_are_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path))
    stored, own = encoded(pictures()), processor()
    for number in (1, 2, 2):
        monkeypatch.setattr(pixels, "DECODING", number)
        pixels.open_pixels(stored, own, pixels.prepare(stored, own, [0]))
    assert len(list(tmp_path.glob("pixels-*"))) == 2


def test_a_large_split_is_prepared_when_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path))
    monkeypatch.setattr(pixels, "HELD", 7 * 3 * 8 * 8 - 1)
    images, own = np.stack([np.full((8, 8, 3), i, dtype=np.uint8) for i in range(7)]), processor()
    read = pixels.open_pixels(images, own, pixels.prepare(images, own, [0]))
    assert read(torch.tensor([5, 0, 5]))[:, 2, 7, 7].tolist() == [5, 0, 5]
    assert not list(tmp_path.iterdir())


def test_content_is_that_of_the_images_as_they_are_stored():
    images = pictures()
    same, other = encoded(images), encoded([*images[:-1], images[0]])
    assert pixels.content(same) == pixels.content(encoded([i.copy() for i in images])) != pixels.content(other)
    assert pixels.content(same.take([1, 0])) != pixels.content(same.take([0, 1]))
    one, other = (Images(files.__getitem__, range(2)) for files in ([b"ab", b"c"], [b"a", b"bc"]))
    assert pixels.content(one) != pixels.content(other)
    array = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    assert pixels.content(array) == pixels.content(array.copy()) != pixels.content(array + 1)


def test_a_processor_that_does_not_fit_is_told():
    with pytest.raises(ValueError, match=r"CLIPImageProcessorPil fails on the images"):
        pixels.prepare(encoded(pictures()), processor(do_resize=False, do_center_crop=False))

    class Floats:
        def __call__(self, images, **options):
            return {"pixel_values": torch.zeros(len(images), 3, 8, 8)}

    with pytest.raises(ValueError, match=r"Floats gives torch\.float32 \(5, 3, 8, 8\).*must be uint8"):
        pixels.prepare(encoded(pictures()), Floats())
