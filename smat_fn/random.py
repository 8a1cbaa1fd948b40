r"""Counter-based random numbers: a key is a value, the same key gives bit-identical numbers on every device.

Philox4x32-10 (Salmon et al., SC'11) in integer arithmetic. A key is an int64 tensor ``(..., 2)`` = (seed, offset);
block i of a key is ``philox(seed, offset + i)``: four 32-bit words. Names and meaning follow ``jax.random``: a key is
split, folded into, or drawn from, and only once.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from . import execution

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def key(seed: int) -> Tensor:
    """The key of a seed.

    Args:
        seed: any integer, taken modulo 2**64.

    Returns:
        int64 tensor (2,) = (seed, 0).

    Raises:
        ValueError: seed is not an integer.
    """
    return torch.tensor([_int64(seed), 0], dtype=torch.int64, device="cpu")


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of 64-bit keys and counters (upper counter words 0), elementwise.

    Args: seed, counter: int64 tensors of one (broadcastable) shape.
    Returns: four int64 tensors that hold unsigned 32-bit words.
    """
    if seed.numel() and counter.numel() and _looped(seed, counter):
        w0, w1, w2, w3 = torch.from_numpy(_words(seed.numpy(), counter.numpy()).view(numpy.int64))
        return w0, w1, w2, w3
    return _rounds(seed, counter, torch.zeros_like(counter))


def _rounds(seed: Any, counter: Any, zero: Any) -> Any:
    """`philox` of int64 tensors, or of integers, any of which stands for its remainder by 2**64."""
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2 = c3 = zero
    for _ in range(_ROUNDS):
        # c m as c (m - 2^32) + 2^32 c: a signed overflow would be undefined in compiled code; only c0 and c2 are
        # multiplied, so only they must be single words here
        p, q = c0 * (_MULTIPLIERS[0] - 2**32), c2 * (_MULTIPLIERS[1] - 2**32)
        c0, c1, c2, c3 = (((q >> 32) + c2) ^ c1 ^ k0) & _WORD, q, (((p >> 32) + c0) ^ c3 ^ k1) & _WORD, p
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1 & _WORD, c2, c3 & _WORD


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys, independent of each other.

    Args:
        key: int64 (..., 2).

    Returns:
        int64 (num, ..., 2); row i is block i of the key, ``fold_in(key, i)``.
    """
    _check_key(key)
    num = _int64(num)
    if num < 1:
        raise ValueError(f"split: num is {num}, must be at least 1")
    return _derive(key, numpy.arange(num).reshape(-1, *[1] * (key.ndim - 1)))


def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """The child key of a number or a name.

    Args:
        key: int64 (..., 2).
        data: an integer (modulo 2**64), an int64 tensor that broadcasts with ``key[..., 0]``, or a string, which stands
            for its 64-bit BLAKE2b hash.

    Returns:
        int64 (..., 2).
    """
    _check_key(key)
    if isinstance(data, str):
        data = name_hashes((data,))[0]
    if isinstance(data, Tensor) and (data.is_floating_point() or data.is_complex()):
        raise ValueError(f"fold_in: data is a {data.dtype} tensor, must be one of integers, an integer or a name")
    return _derive(key, data if isinstance(data, Tensor) else _int64(data))


def step_key(key: Tensor, step: int | Tensor) -> Tensor:
    """The key of a step: its number folded into the run key, which goes to where a number on a device is."""
    if isinstance(step, Tensor):
        if step.is_cpu:
            step = step.to(key.device)
        else:  # the other way the host would wait for the number
            key = key.to(step.device, non_blocking=step.is_cuda)
    return fold_in(key, step)


def bits(key: Tensor, size: int, *, start: int = 0) -> Tensor:
    """The 16-bit fields of one stream: coordinate n has field n % 8 of block n // 8, little-endian halves of its words.

    Args:
        key: int64 (2,).
        size: number of coordinates.
        start: first coordinate; start + size is at most 2**66 - 8.

    Returns:
        int64 (size,) in [0, 65536).

    Raises:
        ValueError: size or start is negative, or they are too large.
    """
    check_key(key)
    if size < 0 or start < 0:
        raise ValueError(f"bits: size is {size} and start {start}, must not be negative")
    if start + size > 8 * (2**63 - 1):
        raise ValueError(f"bits: size is {size} and start {start}: their sum must be at most 2**66 - 8")
    return streams(key[None], (size,), starts=(start,))[0]


def streams(keys: Tensor, sizes: Sequence[int], *, starts: Sequence[int] | None = None) -> list[Tensor]:
    """`bits` of many streams in one pass: ``streams(keys, sizes)[i] == bits(keys[i], sizes[i])``.

    Args: keys: int64 (n, 2); sizes, starts: n integers each.
    Returns: n int64 tensors of shapes (sizes[i],).
    Raises: ValueError for unequal numbers of keys, sizes and starts.
    """
    _check_key(keys)
    starts = [0] * len(sizes) if starts is None else starts
    if keys.ndim != 2 or not len(keys) == len(sizes) == len(starts):
        raise ValueError(
            f"streams: keys of shape {tuple(keys.shape)}, {len(sizes)} sizes and {len(starts)} starts: give a key, a "
            "size and a start for each stream"
        )
    firsts = [start // 8 for start in starts]
    counts = [(start + size + 7) // 8 - first for start, size, first in zip(starts, sizes, firsts, strict=True)]
    if not sum(counts):
        return [torch.zeros(size, dtype=torch.int64, device=keys.device) for size in sizes]
    ranges = [torch.arange(first, first + n, device=keys.device) for first, n in zip(firsts, counts, strict=True)]
    owners = [torch.full((n,), i, device=keys.device) for i, n in enumerate(counts)]
    counters, owner = torch.cat(ranges), torch.cat(owners)
    words = philox(keys[:, 0][owner], keys[:, 1][owner] + counters)
    fields = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1).reshape(-1)
    out, position = [], 0
    for start, size, first, count in zip(starts, sizes, firsts, counts, strict=True):
        skip = start - 8 * first
        out.append(fields[8 * position + skip : 8 * position + skip + size])
        position += count
    return out


def leaf_streams(key: Tensor, paths: Sequence[str]) -> Tensor:
    """The two streams of every leaf of a tree: its path's hash folded into the key, then split.

    Args: key: int64 (2,); paths: n parameter names.
    Returns: int64 (2, n, 2), the keys of the mask streams and of the noise streams.
    """
    check_key(key)
    if _looped(key):
        seed, offset = key.numpy().tolist()
        return torch.from_numpy(_leaf_table(seed, offset, tuple(paths)).copy())
    hashes = torch.tensor(name_hashes(tuple(paths)), dtype=torch.int64, device="cpu")
    hashes = hashes.to(key.device, non_blocking=key.device.type == "cuda")  # the host does not wait
    return split(fold_in(key, hashes))


@lru_cache(maxsize=16)
def _leaf_table(seed: int, offset: int, paths: tuple[str, ...]) -> numpy.ndarray:
    """`leaf_streams` of one step: asked for by all that draws the same mask again."""
    children = _pairs(numpy.array([seed, offset]), numpy.array(_known_hashes(paths), numpy.int64))
    return _pairs(children, numpy.arange(2)[:, None])


def threshold(prob: float | Tensor) -> Tensor:
    """The 16-bit realisation of a drop probability: a coordinate is dropped iff its field is below it.

    ``T = min(round(65536 p), 65535)``; the realised probability is T / 65536. Args: prob in [0, 1], or -p, which gives
    -T (`smat_fn.simulation.opposite`). Returns: int64.
    """
    # a tensor stays where it is, whatever torch.set_default_device says
    prob = torch.as_tensor(prob, dtype=torch.float64, device=prob.device if isinstance(prob, Tensor) else "cpu")
    if execution.readable(prob) and not prob.ndim and not prob.requires_grad:
        limit = max(min(round(65536 * float(prob.numpy())), 65535), -65535)
        return torch.full((), limit, dtype=torch.int64, device=prob.device)
    return (prob * 65536).round().clamp(min=-65535, max=65535).to(torch.int64)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """Uniform numbers in [minval, maxval): ``minval + (maxval - minval) * u``, u = the low 24 bits of a word / 2**24.

    What rounds to maxval becomes the number of the dtype before it.

    Args:
        key: int64 (2,).
        shape: of the result, word n of the key's blocks at flat index n.
        dtype: of the result, in which the bounds are taken.
    """
    check_key(key)
    if any(size < 0 for size in shape):
        raise ValueError(f"uniform: shape {tuple(shape)} has a negative size")
    if not (maxval >= minval and math.isfinite(maxval - minval)):
        raise ValueError(f"uniform: minval {minval} is above maxval {maxval}, or one of them is not finite")
    if not dtype.is_floating_point:
        raise ValueError(f"uniform: dtype {dtype} is not a floating-point dtype")
    size = math.prod(shape)
    if _looped(key) and size <= _SMALL:
        seed, offset = key.numpy()[:, None]
        drawn_words = _words(seed, offset + numpy.arange(-(-size // 4))).T.reshape(-1)[:size]
        unit = torch.from_numpy((drawn_words & 0xFFFFFF) * 2.0**-24)
    else:
        pairs = _derive(key, numpy.arange(-(-size // 4)))
        words = torch.stack((pairs & _WORD, (pairs >> 32) & _WORD), -1).reshape(-1)[:size]
        unit = (words & 0xFFFFFF).to(torch.float64) * 2.0**-24
    drawn = (minval + (maxval - minval) * unit).to(dtype).reshape(shape)
    if (minval, maxval) == (0, 1) and torch.finfo(dtype).eps <= 2.0**-23:  # u has as many bits as float32
        return drawn
    low, high = (torch.full((), bound, dtype=dtype, device=key.device) for bound in (minval, maxval))
    return drawn.minimum(torch.nextafter(high, low))


def name_hashes(names: tuple[str, ...]) -> list[int]:
    """64-bit BLAKE2b hashes of names, as signed little-endian integers."""
    return [int.from_bytes(hashlib.blake2b(n.encode(), digest_size=8).digest(), "little", signed=True) for n in names]


# torch.compile takes the result as a constant instead of tracing hashlib; the public decorator for this,
# torch.compiler.assume_constant_result, sets this attribute but imports torch._dynamo (and with it triton) to do so
name_hashes._dynamo_marked_constant = True  # type: ignore[attr-defined]


_known_hashes = lru_cache(maxsize=16)(name_hashes)
_SMALL = 4096  # keys that numpy derives as fast as torch


def _derive(key: Tensor, data: int | numpy.ndarray | Tensor) -> Tensor:
    """Block ``data`` of a key as a key."""
    if isinstance(data, int) and key.ndim == 1 and execution.readable(key):  # as fast as loops, which need loading
        seed, offset = key.numpy().tolist()
        w0, w1, w2, w3 = _rounds(seed, offset + data, 0)
        return torch.from_numpy(numpy.array([w0 | w1 << 32, w2 | w3 << 32], numpy.uint64).view(numpy.int64))
    if _looped(key, *((data,) if isinstance(data, Tensor) else ())):
        blocks = data.numpy() if isinstance(data, Tensor) else numpy.asarray(data, numpy.int64)
        return torch.from_numpy(_pairs(key.numpy(), blocks.astype(numpy.int64)))
    if isinstance(data, numpy.ndarray):
        data = torch.arange(data.size, device=key.device).view(data.shape)
    given, number = (data, 0) if isinstance(data, Tensor) else (None, data)
    every = (key,) if given is None else (key, given)
    if execution.opaque(*every) and all(tensor.is_cpu for tensor in every):  # on a device the rounds are fused
        return torch.ops.smat_fn.derive(key, given, number)
    seed, counter = torch.broadcast_tensors(key[..., 0], key[..., 1] + data)
    w0, w1, w2, w3 = philox(seed, counter)
    return torch.stack((w0 | (w1 << 32), w2 | (w3 << 32)), -1)


@torch.library.custom_op("smat_fn::derive", mutates_args=())
def _operation(key: Tensor, data: Tensor | None, number: int) -> Tensor:
    """`_derive` as an operation of compiled code. Args: data: or else ``number``."""
    return _derive(key, number if data is None else data)


@_operation.register_fake
def _(key, data, number):  # type: ignore[no-untyped-def]
    blocks = key.shape[:-1] if data is None else torch.broadcast_shapes(key.shape[:-1], data.shape)
    return key.new_empty((*blocks, 2))


def _pairs(key: numpy.ndarray, data: numpy.ndarray) -> numpy.ndarray:
    """`_derive` on int64 arrays: no launch, and nothing that a device waits for."""
    seed, offset, data = (part[..., None] for part in numpy.broadcast_arrays(key[..., 0], key[..., 1], data))
    words = _words(seed[..., 0], (offset + data)[..., 0])  # arrays wrap around in silence, scalars warn
    return numpy.stack((words[0] | words[1] << 32, words[2] | words[3] << 32), -1).view(numpy.int64)


def _words(seed: numpy.ndarray, counter: numpy.ndarray) -> numpy.ndarray:
    """`philox` on int64 arrays: uint64 (4, ...)."""
    both = numpy.array(numpy.broadcast_arrays(seed, counter)).view(numpy.uint64)
    seeds, counters = both.reshape(2, -1)
    out = numpy.empty((4, *both.shape[1:]), numpy.uint64)
    loops = execution.loops()
    assert loops is not None
    loops.words(seeds, counters, out.reshape(-1))
    return out


def _looped(*tensors: Tensor) -> bool:
    """Whether `_words` takes these: values that numpy may read, and loops that are not switched off."""
    return execution.readable(*tensors) and execution.loops() is not None


def _int64(number: int) -> int:
    try:
        return (operator.index(number) + 2**63) % 2**64 - 2**63
    except TypeError:
        # what is rounded to an integer, or to a multiple of 2**11, would be the key of another number
        problem = f"{number!r} is not an integer: keys are made of integers, and fold_in takes names too"
        raise ValueError(problem) from None


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.ndim == 0 or key.shape[-1] != 2:
        got = f"{key.dtype} {tuple(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        raise ValueError(f"a key is an int64 tensor of shape (..., 2), got {got}: make one by smat_fn.random.key(seed)")


def check_key(key: Tensor) -> None:
    """Raises: ValueError unless this is one key, int64 of shape (2,)."""
    _check_key(key)
    if key.ndim != 1:
        raise ValueError(
            f"a draw takes one key, of shape (2,), got {key.dtype} {tuple(key.shape)}: use torch.func.vmap"
        )
