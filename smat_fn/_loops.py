"""Loops that numba compiles: Philox fields, and simulate and reweight in one pass. Only `compiled` imports this.

No fused multiply-add and no reordering: every operation is rounded as in torch. Keys and blocks are uint64, the
coordinate ``8 * block + skip`` is the first of a window. A pass works on a tile of 8 * LANES coordinates.
One file on purpose: numba's cache does not see changes in other modules.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy import float32, int32, uint32, uint64

LANES = 128  # blocks of a tile: their state stays in the first-level cache
TILE = 8 * LANES
SHORT = 64  # rows up to this length are ranked by comparing all pairs
_WORD, _BYTE, _HALF = uint64(0xFFFFFFFF), uint64(0xFF), uint64(32)
_MULTIPLIERS = uint64(0xD2511F53), uint64(0xCD9E8D57)
_WEYL = uint64(0x9E3779B9), uint64(0xBB67AE85)


def jit(function: Callable[..., Any]) -> Any:
    """Compiled at the first call and then kept in a folder: beside the package, or the user's own."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to
        return njit(**options)(function)


@jit
def _draw(seed, counter, size, state, words):  # type: ignore[no-untyped-def]
    """The blocks from a counter on that hold ``size`` fields, at most a tile."""
    count = (size + 7) // 8
    a, b, c, d = state[0], state[1], state[2], state[3]
    k0, k1 = seed & _WORD, seed >> _HALF
    for i in range(count):
        a[i] = counter + uint64(i)
        b[i] = a[i] >> _HALF
        c[i] = d[i] = uint64(0)
    for _ in range(10):
        for i in range(count):
            # upper halves may hold anything but where they are multiplied
            p, q = (a[i] & _WORD) * _MULTIPLIERS[0], (c[i] & _WORD) * _MULTIPLIERS[1]
            a[i] = (q >> _HALF) ^ b[i] ^ k0
            b[i] = q
            c[i] = (p >> _HALF) ^ d[i] ^ k1
            d[i] = p
        k0 += _WEYL[0]
        k1 += _WEYL[1]
    for i in range(count):
        words[i, 0], words[i, 1], words[i, 2], words[i, 3] = uint32(a[i]), uint32(b[i]), uint32(c[i]), uint32(d[i])


@jit
def words(seeds, counters, out):  # type: ignore[no-untyped-def]
    """One block of each of n keys. Args: seeds, counters: (n,); out: (4 n,), the first words first."""
    n = len(seeds)
    for i in range(n):
        a, b, c, d = counters[i] & _WORD, counters[i] >> _HALF, uint64(0), uint64(0)
        k0, k1 = seeds[i] & _WORD, seeds[i] >> _HALF
        for _ in range(10):
            p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
            a, b, c, d = ((q >> _HALF) ^ b ^ k0) & _WORD, q & _WORD, ((p >> _HALF) ^ d ^ k1) & _WORD, p & _WORD
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        out[i], out[n + i], out[2 * n + i], out[3 * n + i] = a, b, c, d


@jit
def fields(keys, blocks, skips, sizes, out):  # type: ignore[no-untyped-def]
    """``field - 32768`` of the windows of n streams, one after the other. Args: keys: (n, 2); out: int16 (total,)."""
    state, words = np.empty((4, LANES), np.uint64), np.empty((LANES, 4), np.uint32)
    halves = words.view(np.uint16).reshape(-1)
    position = 0
    for i in range(len(sizes)):
        counter, skip, end = keys[i, 1] + blocks[i], skips[i], position + sizes[i]
        while position < end:
            count = min(TILE - skip, end - position)
            _draw(keys[i, 0], counter, skip + count, state, words)
            _center(halves[skip:], out[position : position + count])
            position += count
            counter += uint64(LANES)
            skip = 0


@jit
def simulate(mask, noise, block, skip, theta, theta_0, out, masked, scale, kept, cutoff, step, quantiles):  # type: ignore[no-untyped-def]
    """Eq. smat-state of a window. Args: mask, noise: keys (2,); theta, theta_0, out: float32, or bfloat16 as uint16."""
    state, words = np.empty((4, LANES), np.uint64), np.empty((LANES, 4), np.uint32)
    halves = words.view(np.uint16).reshape(-1)
    factor, value, center = np.full(TILE, scale), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    counter, position = block, 0
    while position < len(out):
        count = min(TILE - skip, len(out) - position)
        part = slice(position, position + count)
        _widen(theta[part], value)
        _widen(theta_0[part], center)
        if masked:
            _draw(mask[0], mask[1] + counter, skip + count, state, words)
            _factors(halves[skip:], count, kept, cutoff, factor)
        _draw(noise[0], noise[1] + counter, skip + count, state, words)
        drawn = halves[skip:]
        if len(quantiles):
            for i in range(count):
                moved = (value[i] - center[i]) * factor[i] + center[i]
                value[i] = moved + quantiles[drawn[i]] * step
        else:
            for i in range(count):
                moved = (value[i] - center[i]) * factor[i] + center[i]
                value[i] = moved + (float32(int32(drawn[i]) - int32(32768)) + float32(0.5)) * step
        _narrow(value, out[part])
        position += count
        counter += uint64(LANES)
        skip = 0


@jit
def reweight(mask, block, skip, gradient, out, masked, scale, kept, cutoff):  # type: ignore[no-untyped-def]
    """Eq. smat-gradient of a window; arguments as `simulate`'s."""
    state, words = np.empty((4, LANES), np.uint64), np.empty((LANES, 4), np.uint32)
    halves = words.view(np.uint16).reshape(-1)
    factor, value = np.full(TILE, scale), np.empty(TILE, np.float32)
    counter, position = block, 0
    while position < len(out):
        count = min(TILE - skip, len(out) - position)
        part = slice(position, position + count)
        if masked:
            _draw(mask[0], mask[1] + counter, skip + count, state, words)
            _factors(halves[skip:], count, kept, cutoff, factor)
        _widen(gradient[part], value)
        for i in range(count):
            value[i] = factor[i] * value[i]
        _narrow(value, out[part])
        position += count
        counter += uint64(LANES)
        skip = 0


@jit
def slope_squares(theta, slope, adaptive, sums):  # type: ignore[no-untyped-def]
    """Sums of squares of ``|theta| slope`` (slope where not adaptive) by blocks of 4096, each added by halves.

    Args: theta, slope: as `simulate`'s; sums: float32, one a block.
    """
    value, other = np.empty(4096, np.float32), np.empty(4096, np.float32)
    for block in range(len(sums)):
        part = slice(4096 * block, min(4096 * (block + 1), len(slope)))
        count = part.stop - part.start
        value[count:] = 0
        _widen(slope[part], value)
        if adaptive:
            _widen(theta[part], other)
            for i in range(count):
                value[i] = abs(other[i]) * value[i]
        for i in range(count):
            value[i] *= value[i]
        half = 2048
        while half > 0:
            for i in range(half):
                value[i] += value[i + half]
            half //= 2
        sums[block] = value[0]


@jit
def climb(theta, slope, adaptive, length, out):  # type: ignore[no-untyped-def]
    """``theta + theta^2 slope length``, or ``theta + slope length``. Args: as `slope_squares`'; length: float32."""
    value, other = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for position in range(0, len(out), TILE):
        part = slice(position, min(position + TILE, len(out)))
        _widen(theta[part], value)
        _widen(slope[part], other)
        if adaptive:
            for i in range(part.stop - part.start):
                weight = abs(value[i])
                value[i] = value[i] + (weight * (weight * other[i])) * length
        else:
            for i in range(part.stop - part.start):
                value[i] = value[i] + other[i] * length
        _narrow(value, out[part])


@jit
def _center(halves, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = int32(halves[i]) - int32(32768)


@jit
def _factors(halves, count, kept, cutoff, factor):  # type: ignore[no-untyped-def]
    for i in range(count):
        factor[i] = kept if int32(halves[i]) >= cutoff else float32(0)


def _widen(source: Any, target: Any) -> None:
    """float32 of float32, or of bfloat16 as uint16."""


def _narrow(source: Any, target: Any) -> None:
    """The inverse of `_widen`, rounded to nearest, ties to even."""


@overload(_widen)
def _(source, target):  # type: ignore[no-untyped-def]
    def same(source, target):  # type: ignore[no-untyped-def]
        for i in range(len(source)):
            target[i] = source[i]

    def shifted(source, target):  # type: ignore[no-untyped-def]
        bits = target.view(np.uint32)
        for i in range(len(source)):
            bits[i] = uint32(source[i]) << uint32(16)

    return same if source.dtype == types.float32 else shifted


@overload(_narrow)
def _(source, target):  # type: ignore[no-untyped-def]
    def same(source, target):  # type: ignore[no-untyped-def]
        for i in range(len(target)):
            target[i] = source[i]

    def rounded(source, target):  # type: ignore[no-untyped-def]
        bits = source.view(np.uint32)
        for i in range(len(target)):
            word = bits[i]
            nearest = (word + uint32(0x7FFF) + ((word >> uint32(16)) & uint32(1))) >> uint32(16)
            target[i] = np.uint16(nearest) if (word & uint32(0x7FFFFFFF)) <= uint32(0x7F800000) else np.uint16(0x7FC0)

    return same if target.dtype == types.float32 else rounded


@jit
def dropped(delta, fields, cutoff, kept, out):  # type: ignore[no-untyped-def]
    """``delta / kept``, 0 where the field is below the cutoff. Args: fields, cutoff: int32."""
    for i in range(len(out)):
        out[i] = delta[i] / kept if fields[i] >= cutoff else float32(0)


@jit
def add_dropped(mask, block, skip, leaf, origin, cutoff, kept, first, total):  # type: ignore[no-untyped-def]
    """Adds `dropped` of ``leaf - origin`` to a window, or writes the first; mask and leaf as `simulate`'s.

    Returns: the largest magnitude of a difference, as bits.
    """
    state, words = np.empty((4, LANES), np.uint64), np.empty((LANES, 4), np.uint32)
    halves = words.view(np.uint16).reshape(-1)
    value, largest = np.empty(TILE, np.float32), uint32(0)
    counter, position = block, 0
    while position < len(total):
        count = min(TILE - skip, len(total) - position)
        part = slice(position, position + count)
        _draw(mask[0], mask[1] + counter, skip + count, state, words)
        _widen(leaf[part], value)
        largest = max(largest, _subtract(value, origin[part]))
        _add_kept(value, halves[skip:], cutoff, kept, first, total[part])
        position += count
        counter += uint64(LANES)
        skip = 0
    return largest


@jit
def _subtract(value, origin):  # type: ignore[no-untyped-def]
    bits, largest = value.view(np.uint32), uint32(0)
    for i in range(len(origin)):
        value[i] -= origin[i]
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    return largest


@jit
def _add_kept(value, halves, cutoff, kept, first, total):  # type: ignore[no-untyped-def]
    if first:
        for i in range(len(total)):
            total[i] = value[i] / kept if int32(halves[i]) >= cutoff else float32(0)
    else:
        for i in range(len(total)):
            total[i] += value[i] / kept if int32(halves[i]) >= cutoff else float32(0)


@jit
def dropped_by_rank(delta, fields, by_rank, out):  # type: ignore[no-untyped-def]
    """`dropped` with a cutoff T for each rank of |delta| in its row, equal ones by position; ``kept = 1 - T / 65536``.

    Args: by_rank: int32, T by ascending rank; its length is that of the rows. Magnitudes are ordered as their bits.
    """
    length = len(by_rank)
    items, other, cutoffs = np.empty(length, np.uint64), np.empty(length, np.uint64), np.empty(length, np.int32)
    counts, bits = np.empty((4, 256), np.int64), delta.view(np.uint32)
    for first in range(0, len(delta), length):
        row = slice(first, first + length)
        _magnitudes(bits[row], items)
        if length <= SHORT:
            for i in range(length):
                rank = 0
                for j in range(length):
                    rank += items[j] < items[i]
                cutoffs[i] = by_rank[rank]
        elif _sort(items, other, counts):
            _scatter(other, by_rank, cutoffs)
        else:
            _scatter(items, by_rank, cutoffs)
        _drop_row(delta[row], fields[row], cutoffs, out[row])


@jit
def _magnitudes(bits, items):  # type: ignore[no-untyped-def]
    """Magnitude above position: all different, in the order of a stable sort."""
    for i in range(len(items)):
        items[i] = (uint64(bits[i] & uint32(0x7FFFFFFF)) << _HALF) | uint64(i)


@jit
def _sort(items, other, counts):  # type: ignore[no-untyped-def]
    """Radix sort by the upper halves. Returns: whether the result is in ``other``."""
    counts[:] = 0
    for i in range(len(items)):
        key = items[i] >> _HALF
        counts[0, key & _BYTE] += 1
        counts[1, (key >> uint64(8)) & _BYTE] += 1
        counts[2, (key >> uint64(16)) & _BYTE] += 1
        counts[3, key >> uint64(24)] += 1
    swapped = False
    for digit in range(4):
        shift = uint64(32 + 8 * digit)
        source, target = (other, items) if swapped else (items, other)
        if counts[digit, (source[0] >> shift) & _BYTE] == len(items):
            continue
        total = 0
        for byte in range(256):
            count = counts[digit, byte]
            counts[digit, byte] = total
            total += count
        for i in range(len(items)):
            item = source[i]
            byte = (item >> shift) & _BYTE
            target[counts[digit, byte]] = item
            counts[digit, byte] += 1
        swapped = not swapped
    return swapped


@jit
def _scatter(items, by_rank, cutoffs):  # type: ignore[no-untyped-def]
    for rank in range(len(items)):
        cutoffs[items[rank] & _WORD] = by_rank[rank]


@jit
def _drop_row(delta, fields, cutoffs, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        kept = float32(1) - float32(cutoffs[i]) / float32(65536)
        out[i] = delta[i] / kept if fields[i] >= cutoffs[i] else float32(0)


@jit
def agree(values, sign, total, count):  # type: ignore[no-untyped-def]
    """Adds the values of that sign to the total, and one to the count."""
    for i in range(len(total)):
        agrees = values[i] * sign[i] > 0
        total[i] += values[i] if agrees else float32(0)
        count[i] += float32(1) if agrees else float32(0)
