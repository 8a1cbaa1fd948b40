"""Loops that numba compiles: Philox fields, and simulate and reweight in one pass. Only `compiled` imports this.

No fused multiply-add and no reordering: every operation is rounded as in torch. Keys and blocks are uint64, the
coordinate ``8 * block + skip`` is the first of a window. A pass works on a tile of 8 * LANES coordinates.
One file on purpose: numba's cache does not see changes in other modules.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from numpy import float32, float64, int32, int64, uint16, uint32, uint64

LANES = 128  # blocks of a tile: their state stays in the first-level cache
TILE = 8 * LANES
COLUMNS = uint64(64)  # of a tile whose magnitudes are counted
RUN = 16  # coordinates of a sample that are neighbours
ROWS, MAGNITUDES = 8, 1 << 11  # whose magnitudes are counted at a time; those counted, 16 exponents of bfloat16
MAGMAX, SCE, RAM, CONSENSUS, TALL_MASK, EMR, NEARSWAP = range(7)  # of `combined`
_WORD, _HALF = uint64(0xFFFFFFFF), uint64(32)
_MULTIPLIERS = uint64(0xD2511F53), uint64(0xCD9E8D57)
_WEYL = uint64(0x9E3779B9), uint64(0xBB67AE85)
_PER_LOG_2, _LEAST = 1.4426950408889634, float32(2**-126)


def jit(function: Callable[..., Any], **more: bool) -> Any:
    """Compiled at the first call and then kept in a folder: beside the package, or the user's own."""
    # without the part for calls from C, which takes time to compile
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **more}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to
        return njit(**options)(function)


def inner(function: Callable[..., Any]) -> Any:
    """`jit` of what only other loops call: without the part for calls from Python, which takes time to compile."""
    return jit(function, no_cpython_wrapper=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Compiled into the loops that call it: a call with arrays costs as much as 100 coordinates."""
    return njit(inline="always", error_model="numpy")(function)


@inner
def _round(a, b, c, d, k0, k1):  # type: ignore[no-untyped-def]
    # upper halves may hold anything but where they are multiplied
    p, q = (a & _WORD) * _MULTIPLIERS[0], (c & _WORD) * _MULTIPLIERS[1]
    return (q >> _HALF) ^ b ^ k0, q, (p >> _HALF) ^ d ^ k1, p


@inner
def _draw(seed, counter, size, state, words):  # type: ignore[no-untyped-def]
    """The blocks from a counter on that hold ``size`` fields, at most a tile."""
    count = (size + 7) // 8
    low, high = state[0], state[1]
    k0, k1 = seed & _WORD, seed >> _HALF
    for i in range(count):  # a loop over the rounds in here would not be kept in vector registers
        a = counter + uint64(i)
        b, c, d = a >> _HALF, uint64(0), uint64(0)
        a, b, c, d = _round(a, b, c, d, k0, k1)
        a, b, c, d = _round(a, b, c, d, k0 + uint64(1) * _WEYL[0], k1 + uint64(1) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(2) * _WEYL[0], k1 + uint64(2) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(3) * _WEYL[0], k1 + uint64(3) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(4) * _WEYL[0], k1 + uint64(4) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(5) * _WEYL[0], k1 + uint64(5) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(6) * _WEYL[0], k1 + uint64(6) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(7) * _WEYL[0], k1 + uint64(7) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(8) * _WEYL[0], k1 + uint64(8) * _WEYL[1])
        a, b, c, d = _round(a, b, c, d, k0 + uint64(9) * _WEYL[0], k1 + uint64(9) * _WEYL[1])
        low[i], high[i] = (a & _WORD) | (b << _HALF), (c & _WORD) | (d << _HALF)
    for i in range(count):
        words[i, 0], words[i, 1] = low[i], high[i]


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
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
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


@inner
def _simulate(mask, noise, block, skip, theta, theta_0, out, masked, scale, kept, cutoff, step, quantiles):  # type: ignore[no-untyped-def]
    """Eq. smat-state of a window. Args: mask, noise: keys (2,); theta, theta_0, out: float32, or bfloat16 as uint16."""
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
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


@inner
def _reweight(mask, block, skip, gradient, out, masked, scale, kept, cutoff):  # type: ignore[no-untyped-def]
    """Eq. smat-gradient of a window; arguments as `simulate`'s."""
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
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


@inner
def _slope_squares(theta, slope, adaptive, sums):  # type: ignore[no-untyped-def]
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
        sums[block] = _halved(value, 4096)


@inner
def _climb(theta, slope, adaptive, length, out):  # type: ignore[no-untyped-def]
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
def simulate(windows, masks, noises, masked, scale, kept, cutoff, step, quantiles, theta_like, theta_0_like):  # type: ignore[no-untyped-def]
    """`_simulate` of windows of many leaves: a call from Python takes as long as thousands of coordinates.

    Args: windows: uint64 (n, 7): addresses of theta, theta_0 and out, size, leaf, block, skip; masks, noises, masked:
        of all leaves; theta_like, theta_0_like: arrays of the dtypes.
    """
    for i in range(len(windows)):
        size, leaf = windows[i, 3], windows[i, 4]
        theta, theta_0 = _window(windows[i, 0], size, theta_like), _window(windows[i, 1], size, theta_0_like)
        out, block, skip = _window(windows[i, 2], size, theta_like), windows[i, 5], int64(windows[i, 6])
        keys = masks[leaf], noises[leaf]
        _simulate(*keys, block, skip, theta, theta_0, out, masked[leaf], scale, kept, cutoff, step, quantiles)


@jit
def reweight(windows, masks, masked, scale, kept, cutoff, like):  # type: ignore[no-untyped-def]
    """`_reweight` of windows. Args: windows: addresses of gradient and out, then as `simulate`'s."""
    for i in range(len(windows)):
        gradient, out = _window(windows[i, 0], windows[i, 2], like), _window(windows[i, 1], windows[i, 2], like)
        leaf, block, skip = windows[i, 3], windows[i, 4], int64(windows[i, 5])
        _reweight(masks[leaf], block, skip, gradient, out, masked[leaf], scale, kept, cutoff)


@jit
def slope_squares(windows, adaptive, sums, theta_like, slope_like):  # type: ignore[no-untyped-def]
    """`_slope_squares` of windows that begin at a block. Args: windows: theta, slope, size, leaf, place in sums."""
    for i in range(len(windows)):
        theta, slope = (
            _window(windows[i, 0], windows[i, 2], theta_like),
            _window(windows[i, 1], windows[i, 2], slope_like),
        )
        at = int64(windows[i, 4])
        _slope_squares(theta, slope, adaptive, sums[at : at + (len(slope) + 4095) // 4096])


@jit
def climb(windows, adaptive, length, theta_like, slope_like):  # type: ignore[no-untyped-def]
    """`_climb` of windows. Args: windows: theta, slope, out, size, leaf."""
    for i in range(len(windows)):
        size = windows[i, 3]
        theta, slope = _window(windows[i, 0], size, theta_like), _window(windows[i, 1], size, slope_like)
        _climb(theta, slope, adaptive, length, _window(windows[i, 2], size, theta_like))


@inner
def _center(halves, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = int32(halves[i]) - int32(32768)


@inner
def _factors(halves, count, kept, cutoff, factor):  # type: ignore[no-untyped-def]
    if cutoff >= 0:
        for i in range(count):
            factor[i] = kept if int32(halves[i]) >= cutoff else float32(0)
    else:  # the opposite mask
        for i in range(count):
            factor[i] = kept if int32(halves[i]) < int32(65536) + cutoff else float32(0)


@inlined
def _wide(half):  # type: ignore[no-untyped-def]
    """float32 of the bits of a bfloat16."""
    return uint32(uint32(half) << uint32(16)).view(np.float32)


@inlined
def _half(value):  # type: ignore[no-untyped-def]
    """Bits of the nearest bfloat16, ties to even."""
    word = float32(value).view(np.uint32)
    nearest = uint32(uint32(word + uint32(0x7FFF)) + uint32(uint32(word >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(nearest) if uint32(word & uint32(0x7FFFFFFF)) <= uint32(0x7F800000) else uint16(0x7FC0)


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
        for i in range(len(source)):
            target[i] = _wide(source[i])

    return same if source.dtype == types.float32 else shifted


@overload(_narrow)
def _(source, target):  # type: ignore[no-untyped-def]
    def same(source, target):  # type: ignore[no-untyped-def]
        for i in range(len(target)):
            target[i] = source[i]

    def rounded(source, target):  # type: ignore[no-untyped-def]
        for i in range(len(target)):
            target[i] = _half(source[i])

    return same if target.dtype == types.float32 else rounded


def _pointer(kind: Any) -> Any:
    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.uint64), code

    return at


_floats, _halves = _pointer(types.float32), _pointer(types.uint16)


def _window(address: Any, size: Any, like: Any) -> Any:
    """The ``size`` numbers at an address, of the dtype of ``like``."""


@overload(_window)
def _(address, size, like):  # type: ignore[no-untyped-def]
    def floats(address, size, like):  # type: ignore[no-untyped-def]
        return carray(_floats(address), int64(size))

    def halves(address, size, like):  # type: ignore[no-untyped-def]
        return carray(_halves(address), int64(size))

    return floats if like.dtype == types.float32 else halves


@jit
def dropped(delta, fields, cutoff, kept, out):  # type: ignore[no-untyped-def]
    """``delta / kept``, 0 where the field is below the cutoff. Args: fields, cutoff: int32."""
    for i in range(len(out)):
        out[i] = delta[i] / kept if fields[i] >= cutoff else float32(0)


@jit
def items(sizes, length, out):  # type: ignore[no-untyped-def]
    """Magnitude above position in the row: all different, in the order of a stable sort.

    Args: sizes: bits of float32, whose sign does not matter; out: uint64.
    """
    for first in range(0, len(sizes), length):
        row, places = sizes[first : first + length], out[first : first + length]
        for i in range(length):
            places[i] = (uint64(row[i] & uint32(0x7FFFFFFF)) << _HALF) | uint64(i)


@jit
def ranked_in_order(order, by_rank, out):  # type: ignore[no-untyped-def]
    """A number for each coordinate of rows by the rank of its magnitude in its row, equal ones by position.

    Args: order: `items`, sorted in each row; by_rank: uint16, as long as a row; out: uint16.
    """
    length = len(by_rank)
    for first in range(0, len(out), length):
        ranked, row = order[first : first + length], out[first : first + length]
        for rank in range(length):
            row[ranked[rank] & _WORD] = by_rank[rank]


@jit
def ranked_by_buckets(sizes, by_rank, bits, out):  # type: ignore[no-untyped-def]
    """`ranked_in_order` of magnitudes that are distributed over buckets, after which few are out of order.

    A row of at most 2^16 has 2^bits buckets: the first one for zeros, the others for magnitudes down to 2^-16 of the
    largest one; those below are in the second one. Counts of eight rows are neighbours, as in `ranked_by_counts`.

    Args: sizes: bits of float32, whose sign does not matter, whole rows; others as `ranked_in_order`'s.
    Returns: False, and stops, where so many are in one bucket that sorting takes less time.
    """
    length, buckets, left = uint64(len(by_rank)), 1 << bits, 4 * len(sizes)
    keys, order = np.empty((ROWS, length), np.uint16), np.zeros(length + uint64(1), np.uint64)
    sums, ranked = np.empty((buckets, 2), np.uint64), order[1:]  # behind a 0, which is above no item
    counts = sums.view(np.uint16).reshape(-1)
    for begin in range(uint64(0), uint64(len(sizes)), uint64(ROWS * length)):
        rows = min(uint64(ROWS), (uint64(len(sizes)) - begin) // length)
        sums[:] = uint64(0)
        for row in range(rows):
            _buckets(sizes[begin + row * length :], bits, keys[row])
        for i in range(length):
            for row in range(rows):
                counts[uint64(keys[row, i]) * uint64(ROWS) + row] += 1
        below = uint64(0), uint64(0)
        for k in range(buckets):
            own = sums[k, 0], sums[k, 1]
            sums[k, 0], sums[k, 1] = below
            below = below[0] + own[0], below[1] + own[1]
        for row in range(rows):
            first = begin + row * length
            for i in range(length):
                at = uint64(keys[row, i]) * uint64(ROWS) + row
                rank = uint64(counts[at])
                counts[at] = uint16(rank + uint64(1))
                ranked[rank] = (uint64(sizes[first + i] & uint32(0x7FFFFFFF)) << uint64(16)) | i
            left -= _insert(order, left)
            if left < 0:
                return False
            for place in range(length):
                out[first + (ranked[place] & uint64(0xFFFF))] = by_rank[place]
    return True


@inlined
def _insert(items, most):  # type: ignore[no-untyped-def]
    """Sorts what is nearly in order, the smallest one in front. Returns: how many places items moved together.

    Args: most: such places, after which it stops.
    """
    moved = 0
    for k in range(uint64(1), uint64(len(items))):
        item, at = items[k], uint64(k)
        while items[at - uint64(1)] > item:
            items[at] = items[at - uint64(1)]
            at -= uint64(1)
            moved += 1
        items[at] = item
        if moved > most:
            break
    return moved


@inlined
def _buckets(sizes, bits, out):  # type: ignore[no-untyped-def]
    """The bucket of every magnitude of a row."""
    largest, shift = uint32(0), uint32(27 - bits)  # 16 exponents and 23 bits of a fraction are 2^27 magnitudes
    for i in range(len(out)):
        largest = max(largest, uint32(sizes[i] & uint32(0x7FFFFFFF)))
    below = int64(largest >> shift) - ((1 << bits) - 2)
    floor = uint32(max(below, 0) << int64(shift))
    for i in range(len(out)):
        size = uint32(sizes[i] & uint32(0x7FFFFFFF))
        out[i] = uint16(uint32(uint32(max(size, floor) - floor) >> shift) + min(size, uint32(1)))


@jit
def ranked_by_counts(sources, size, by_rank, like, out):  # type: ignore[no-untyped-def]
    """`ranked_in_order` of magnitudes that are counted, not sorted: those of few bits, as of differences of bfloat16.

    Counts of eight rows are neighbours: one sum is for several rows, and equal magnitudes in a row do not wait.

    Args: sources: as `banded`'s, or of one vector; by_rank: uint16, of each vector or one for all; like: of the dtype
        of counts, which holds the length of a row; out: uint16 (vectors, size).
    Returns: False, and stops, where too many have bits that are not counted.
    """
    length, words = by_rank.shape[1], like.itemsize
    sums, rest = np.empty((MAGNITUDES, words), np.uint64), np.empty((2, length), np.uint64)
    order, vector = np.full((ROWS, length), -1, np.int32), np.empty(ROWS * length, np.float32)
    counts, origin = sums.view(like.dtype).reshape(-1), np.zeros(TILE, np.float32)
    for begin in range(uint64(0), uint64(size), uint64(ROWS * length)):
        end = min(begin + uint64(ROWS * length), uint64(size))
        for i in range(len(out)):
            own, first, largest = by_rank[i % len(by_rank)], uint64(begin), uint32(0)
            while first < end:
                n = min(uint64(TILE), end - first)
                if len(sources) > 1:
                    _load(sources, 0, first, n, origin)
                found = _delta(sources, len(sources) - len(out) + i, first, n, origin, vector[first - begin :])
                largest = max(largest, found)
                first += n
            upper = int64(largest >> uint32(16)) - int64(MAGNITUDES - 1)
            floor = uint32(upper << int64(16)) if upper > 0 else uint32(0)
            keys, some = out[i, begin:end].reshape(-1, length), vector[: end - begin].view(np.uint32)
            rows, odd = uint64(len(keys)), 0
            for row in range(rows):
                odd += _keys(some[row * length :], row, floor, keys[row])
            if ROWS * odd > len(some):
                return False
            sums[:] = uint64(0)
            if rows == uint64(ROWS):  # a number that is known takes a tenth less time
                count = _ranked_rows(keys, uint64(ROWS), sums, counts, own, rest)
            else:
                count = _ranked_rows(keys, rows, sums, counts, own, rest)
            if not _ranked_rest(some, rest[:, :count], counts, order, own, keys):
                return False
    return True


@inlined
def _ranked_rows(keys, rows, sums, counts, by_rank, rest):  # type: ignore[no-untyped-def]
    """Ranks rows by the counts of their keys. Args: counts: of sums. Returns: how many are written to rest instead."""
    count = uint64(0)
    for i in range(uint64(keys.shape[1])):
        for row in range(rows):
            counts[keys[row, i] >> uint64(1)] += 1
    for word in range(sums.shape[1]):
        total = uint64(0)
        for k in range(MAGNITUDES):
            total, sums[k, word] = total + sums[k, word], total
    for i in range(uint64(keys.shape[1])):
        for row in range(rows):
            key = uint64(keys[row, i])
            if key & uint64(1):
                rest[0, count] = (row << _HALF) | i
                count += uint64(1)
            else:
                rank = uint64(counts[key >> uint64(1)])
                counts[key >> uint64(1)] = rank + uint64(1)
                keys[row, i] = by_rank[rank]
    return count


@inlined
def _keys(sizes, row, floor, out):  # type: ignore[no-untyped-def]
    """Where counts of magnitudes are, twice, and one more for those whose lower bits are not 0. Returns: how many."""
    odd, base = uint32(0), uint32(2 * row)
    for i in range(len(out)):
        size = uint32(sizes[i] & uint32(0x7FFFFFFF))
        upper = uint32(uint32(max(size, floor) - floor) >> uint32(12)) & uint32(0xFFF0)
        lower = uint32(size & (uint32(0xFFFF) if size >= floor else uint32(0xFFFFFFFF)))
        flag = uint32(min(lower, uint32(1)))
        out[i] = uint32(uint32(upper | base) | flag)
        odd = uint32(odd + flag)
    return int64(odd)


@inner
def _ranked_rest(sizes, rest, counts, order, by_rank, keys):  # type: ignore[no-untyped-def]
    """Those of the same upper bits are behind the others, and sorted by inserting one after the other.

    Args: rest: uint64 (2, n): row and place of each, and room for ranks; order: -1, and again afterwards.
    """
    length, left = uint64(keys.shape[1]), 4 * len(sizes)
    for k in range(rest.shape[1]):
        row, i = rest[0, k] >> _HALF, rest[0, k] & _WORD
        at, size = uint64(keys[row, i]) >> uint64(1), uint32(sizes[row * length + i] & uint32(0x7FFFFFFF))
        rank = uint64(counts[at])
        counts[at] += 1
        rest[1, k] = rank
        while rank > uint64(0):
            before = order[row, rank - uint64(1)]
            if before < 0 or uint32(sizes[row * length + uint64(before)] & uint32(0x7FFFFFFF)) <= size:
                break
            order[row, rank] = before
            rank -= uint64(1)
            left -= 1
        order[row, rank] = i
        if left < 0:
            return False
    for k in range(rest.shape[1]):
        row, rank = rest[0, k] >> _HALF, rest[1, k]
        keys[row, uint64(order[row, rank])] = by_rank[rank]
    for k in range(rest.shape[1]):
        order[rest[0, k] >> _HALF, rest[1, k]] = -1
    return True


@jit
def agree(values, sign, total, count):  # type: ignore[no-untyped-def]
    """Adds the values of that sign to the total, and one to the count."""
    for i in range(len(total)):
        agrees = values[i] * sign[i] > 0
        total[i] += values[i] if agrees else float32(0)
        count[i] += float32(1) if agrees else float32(0)


def _reader(kind: Any) -> Any:
    """``read(address, index)``: a number of that kind. An array of them would cost as much as 50 coordinates."""

    @intrinsic
    def read(context: Any, address: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = builder.inttoptr(values[0], context.get_value_type(types.CPointer(kind)))
            return builder.load(builder.gep(pointer, [values[1]]))

        return kind(types.uint64, types.uint64), code

    return read


def _writer(kind: Any) -> Any:
    """``write(address, index, number)``."""

    @intrinsic
    def write(context: Any, address: Any, index: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = builder.inttoptr(values[0], context.get_value_type(types.CPointer(kind)))
            builder.store(values[2], builder.gep(pointer, [values[1]]))
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64, kind), code

    return write


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Asks for the memory at an address, which may be any number."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # to be read, into the second-level cache: the first one would wait for each line
        builder.call(prefetch, [builder.inttoptr(values[0], byte), number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), code


_float_at, _half_at = _reader(types.float32), _reader(types.uint16)
_set_float, _set_half = _writer(types.float32), _writer(types.uint16)


@inlined
def _size(value):  # type: ignore[no-untyped-def]
    """The magnitude of a float32, as bits."""
    return uint32(float32(value).view(np.uint32) & uint32(0x7FFFFFFF))


@inlined
def _wide_16(half):  # type: ignore[no-untyped-def]
    """float32 of the bits of a float16."""
    word = uint32(uint32(uint32(half) & uint32(0x7FFF)) << uint32(13))
    normal = uint32(word + uint32(0x38000000))  # 112 more, the difference of the exponents' biases
    raised = uint32(word + uint32(0x38800000)).view(np.float32)
    least = float32(float32(raised) - float32(2**-14)).view(np.uint32)  # without float32's own subnormals
    beyond = uint32(word | uint32(0x7F800000))
    found = beyond if word >= uint32(0x0F800000) else normal if word >= uint32(0x00800000) else least
    return uint32(found | uint32(uint32(uint32(half) & uint32(0x8000)) << uint32(16))).view(np.float32)


@inlined
def _half_16(value):  # type: ignore[no-untyped-def]
    """Bits of the nearest float16, ties to even."""
    word = float32(value).view(np.uint32)
    size = uint32(word & uint32(0x7FFFFFFF))
    raised = float32(float32(uint32(size).view(np.float32)) + float32(0.5)).view(np.uint32)
    least = uint32(raised - uint32(0x3F000000))
    odd = uint32(uint32(size >> uint32(13)) & uint32(1))
    normal = uint32(uint32(size + uint32(0xC8000FFF)) + odd) >> uint32(13)
    beyond = uint32(0x7C00) if size <= uint32(0x7F800000) else uint32(0x7E00)
    found = beyond if size >= uint32(0x47800000) else least if size < uint32(0x38800000) else normal
    return uint16(uint32(found) | uint32(uint32(word >> uint32(16)) & uint32(0x8000)))


@inlined
def _load(sources, row, first, n, out):  # type: ignore[no-untyped-def]
    """float32 of the n numbers from ``first`` on, at most a tile.

    Args: sources: of each row an address, and 0 for float32, 1 for bfloat16, 2 for float16.
    """
    kind = sources[row, 1]
    size = uint64(4) if kind == uint64(0) else uint64(2)
    _copy(kind, sources[row, 0] + size * first, n, uint64(out.ctypes.data))


@inner
def _copy(kind, at, n, out):  # type: ignore[no-untyped-def]
    # one kind of number behind it: loops that choose among several would not be kept in vector registers
    size = uint64(4) if kind == uint64(0) else uint64(2)
    if n > uint64(RUN):  # a sample reads nothing else there
        # processors foresee no tile behind another one, and nothing beyond a page of memory
        for line in range(at + size * uint64(TILE), at + size * uint64(2 * TILE), uint64(64)):
            _prefetch(line)
    if kind == uint64(0):
        for j in range(n):
            _set_float(out, j, _float_at(at, j))
    elif kind == uint64(1):
        for j in range(n):
            _set_float(out, j, _wide(_half_at(at, j)))
    else:
        for j in range(n):
            _set_float(out, j, _wide_16(_half_at(at, j)))


@inlined
def _delta(sources, row, first, n, origin, out):  # type: ignore[no-untyped-def]
    """n numbers of a task vector from ``first`` on. Returns: their largest magnitude, as bits."""
    largest = uint32(0)
    _load(sources, row, first, n, out)
    for j in range(n):
        value = out[j] - origin[j]
        out[j] = value
        largest = max(largest, _size(value))
    return largest


@inlined
def _banded_delta(sources, row, first, n, origin, low, width, ratio, weight, out, total):  # type: ignore[no-untyped-def]
    """`_delta` times two numbers, 0 where the magnitude less ``low`` is not below ``width``; adds it to the total."""
    largest = uint32(0)
    _load(sources, row, first, n, out)
    for j in range(n):
        value = out[j] - origin[j]
        size = _size(value)
        largest = max(largest, size)
        value = (value if uint32(size - low) < width else float32(0)) * ratio * weight
        out[j] = value
        total[j] += value
    return largest


@inlined
def _until(splits, position, n):  # type: ignore[no-untyped-def]
    """At most n, up to the next position at which the band of an expert changes."""
    for i in range(len(splits)):
        for k in range(2):
            left = splits[i, k] - int64(position)
            if left > 0 and left < int64(n):
                n = uint64(left)
    return n


@inlined
def _finish(merged, n, origin, coef, target, first, change, error, sums):  # type: ignore[no-untyped-def]
    """`_write` of ``origin + coef * merged``, which is written to merged, or of ``coef * merged`` to kind 3."""
    if target[0, 1] == uint64(3):
        for j in range(n):
            origin[j] = float32(-0.0)  # which changes no number that it is added to
    for j in range(n):
        value = merged[j] * coef
        change[j] = value
        merged[j] = value + origin[j]
    return _write(merged, n, change, target, first, error, sums)


@inlined
def _write(values, n, change, target, first, error, sums):  # type: ignore[no-untyped-def]
    """Writes n numbers, at most a tile. Returns: the largest magnitude that is written, as bits.

    Args: target: a row as `_load`'s sources; change: from base; error: float32 (TILE,), is written to; sums: float64
        (2, 64), squares of the rounding error and of the change are added.
    """
    kind = target[0, 1] % uint64(3)
    size = uint64(4) if kind == uint64(0) else uint64(2)
    largest = _put(kind, uint64(values.ctypes.data), n, uint64(error.ctypes.data), target[0, 0] + size * first)
    if kind != uint64(0):
        _squares(error, n, sums[0])
    _squares(change, n, sums[1])
    return largest


@inner
def _put(kind, values, n, error, at):  # type: ignore[no-untyped-def]
    largest = uint32(0)
    if kind == uint64(0):
        for j in range(n):
            value = _float_at(values, j)
            _set_float(at, j, value)
            largest = max(largest, _size(value))
    elif kind == uint64(1):
        for j in range(n):
            value = _float_at(values, j)
            half = _half(value)
            written = _wide(half)
            _set_half(at, j, half)
            _set_float(error, j, value - written)
            largest = max(largest, _size(written))
    else:
        for j in range(n):
            value = _float_at(values, j)
            half = _half_16(value)
            written = _wide_16(half)
            _set_half(at, j, half)
            _set_float(error, j, value - written)
            largest = max(largest, _size(written))
    return largest


@inner
def _squares(values, n, sums):  # type: ignore[no-untyped-def]
    """Adds the squares of n numbers, of which those behind become 0 up to a multiple of 64."""
    stop = (n + uint64(63)) // uint64(64) * uint64(64)
    for j in range(n, stop):
        values[j] = float32(0)
    for block in range(stop // uint64(64)):
        start = block * uint64(64)
        for lane in range(uint64(64)):
            value = float64(values[start + lane])
            sums[lane] += value * value


@jit
def banded(sources, start, size, bands, splits, ratios, weights, elect, mean, majority, divisor, coef, target):  # type: ignore[no-untyped-def]
    """Merges task vectors of which only bands of magnitudes stay.

    Args: sources: uint64 (experts + 1, 2), see `_load`, base first; start: of the window in its leaf; bands: uint32
        (experts, 4), magnitudes from [0] on, below [2], stay, from position splits[0] on those from [1] on, and from
        splits[1] on those below [3]; splits: int64 (experts, 2); ratios, weights: float32 (experts,), each vector is
        multiplied by both; elect: take only what has the sign of the sum, else all; mean: over the weights of what is
        elected, or of what is not 0; majority: the sign of a zero sum; divisor: of the sum of all; target: (1, 2), as
        sources.
    Returns: squared norms of rounding error and change, the largest magnitude of a difference and of the result.
    """
    count = len(sources) - 1
    rows, origin, merged = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    sign, agreeing = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    while first < end:
        position = uint64(start) + first
        n = _until(splits, position, min(uint64(TILE), end - first))
        _load(sources, 0, first, n, origin)
        for j in range(n):
            merged[j] = float32(-0.0)  # so that a first -0 stays one
        for i in range(count):
            low = bands[i, 0] if int64(position) < splits[i, 0] else bands[i, 1]
            high = bands[i, 2] if int64(position) < splits[i, 1] else bands[i, 3]
            width, ratio, weight = uint32(high - low), ratios[i], weights[i]
            found = _banded_delta(sources, i + 1, first, n, origin, low, width, ratio, weight, rows[i], merged)
            largest = max(largest, found)
        if elect:
            for j in range(n):
                total = merged[j]
                sign[j] = float32(1) if total > 0 else float32(-1) if total < 0 else majority
            _agreeing(rows, 0, n, sign, mean, weights, merged, agreeing)
        elif mean:
            _over_present(rows, n, weights, merged, agreeing)
        else:
            _divided(merged, n, divisor)
        written = max(written, _finish(merged, n, origin, coef, target, first, change, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest, written


@inlined
def _over_present(rows, n, weights, total, share):  # type: ignore[no-untyped-def]
    """Divides the sums of n numbers of all rows by the weights of those that are not 0, where their sum is not 0."""
    for j in range(n):
        share[j] = float32(0)
    for i in range(len(rows)):
        row, weight = rows[i], weights[i]
        for j in range(n):
            share[j] += weight if row[j] != 0 else float32(0)
    for j in range(n):
        total[j] /= share[j] if share[j] != 0 else float32(1)


@inlined
def _divided(values, n, divisor):  # type: ignore[no-untyped-def]
    if divisor != 1:
        for j in range(n):
            values[j] /= divisor


@inlined
def _agreeing(rows, first, n, sign, mean, weights, out, share):  # type: ignore[no-untyped-def]
    """Sum of what has the sign among n numbers of each row from ``first`` on, +0 where there is nothing.

    Args: mean: divide by the weights of these rows, where their sum is not 0; share: is written to.
    """
    for j in range(n):
        out[j] = float32(0)
        share[j] = float32(0)
    if mean:
        for i in range(len(rows)):
            row, weight = rows[i, first:], weights[i]
            for j in range(n):
                value = row[j]
                agrees = value * sign[j] > 0
                out[j] += value if agrees else float32(0)
                share[j] += weight if agrees else float32(0)
        for j in range(n):
            out[j] /= share[j] if share[j] != 0 else float32(1)
    else:
        for i in range(len(rows)):
            row = rows[i, first:]
            for j in range(n):
                value = row[j]
                out[j] += value if value * sign[j] > 0 else float32(0)


@jit
def votes(sources, start, size, bands, splits):  # type: ignore[no-untyped-def]
    """The sum of the signs of sums of task vectors; arguments as `banded`'s."""
    count = len(sources) - 1
    row, origin, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    net, first, end = 0, uint64(0), uint64(size)
    while first < end:
        position = uint64(start) + first
        n = _until(splits, position, min(uint64(TILE), end - first))
        _load(sources, 0, first, n, origin)
        for j in range(n):
            total[j] = float32(-0.0)
        for i in range(count):
            low = bands[i, 0] if int64(position) < splits[i, 0] else bands[i, 1]
            high = bands[i, 2] if int64(position) < splits[i, 1] else bands[i, 3]
            one = float32(1)
            _banded_delta(sources, i + 1, first, n, origin, low, uint32(high - low), one, one, row, total)
        tile = int32(0)
        for j in range(n):
            tile += int32(total[j] > 0) - int32(total[j] < 0)
        net += int(tile)
        first += n
    return net


@inlined
def _sizes(sources, first, n, origin, out):  # type: ignore[no-untyped-def]
    """The bits of the magnitudes of a task vector, which may be the only source. Returns: the largest.

    Args: sources: base, expert; origin: is written to, if there is a base; out: uint32.
    """
    largest = uint32(0)
    if len(sources) > 1:
        _load(sources, 0, first, n, origin)
    _load(sources, len(sources) - 1, first, n, out)
    for j in range(n):
        size = _size(uint32(out[j]).view(np.float32) - origin[j])
        out[j] = size
        largest = max(largest, size)
    return largest


@inlined
def _place(run, step):  # type: ignore[no-untyped-def]
    """Where a run of a sample begins, among all coordinates."""
    drawn = (uint64(run) * uint64(0x9E3779B97F4A7C15)) >> _HALF
    return run * step + int64((drawn * uint64(step - RUN)) >> _HALF)


@jit
def sampled(sources, size, offset, step, out):  # type: ignore[no-untyped-def]
    """Magnitudes of a task vector: RUN neighbours, at a random place among every ``step`` coordinates.

    Args: sources: base, expert; offset: of the window among all coordinates; out: uint32 (runs, RUN).
    Returns: how many runs are written.
    """
    origin, found, end = np.empty(RUN, np.float32), 0, offset + size
    for run in range(offset // step, (end + step - 1) // step):
        first = _place(run, step) - offset
        if 0 <= first <= size - RUN:
            _sizes(sources, uint64(first), uint64(RUN), origin, out[found])
            found += 1
    return found


@inlined
def _found(sizes, n, low, high, flags, hits, found):  # type: ignore[no-untyped-def]
    """Writes those of n numbers, at most a tile, that lie between two others, from ``found`` on.

    Returns: how many are below low, equal to low, equal to high; where the next one will be written.
    """
    start, width = uint32(low + uint32(1)), uint32(high - low - uint32(1))
    under, lows, highs = uint32(0), uint32(0), uint32(0)
    for j in range(n):
        under = uint32(under + uint32(sizes[j] < low))
        lows = uint32(lows + uint32(sizes[j] == low))
        highs = uint32(highs + uint32(sizes[j] == high))
    for j in range(n, uint64(TILE)):
        sizes[j] = uint32(0xFFFFFFFF)
    for column in range(COLUMNS):
        flags[column] = uint32(0)
    for row in range(uint64(0), uint64(TILE), COLUMNS):
        for column in range(COLUMNS):
            inside = uint32(uint32(sizes[row + column] - start) < width)
            flags[column] = uint32(flags[column] | inside)
    for column in range(COLUMNS):
        if flags[column]:
            for j in range(column, uint64(TILE), COLUMNS):
                hits[found] = sizes[j]
                found += uint64(uint32(sizes[j] - start) < width)
    return int64(under), int64(lows), int64(highs), found


@jit
def between(sources, size, low, high, hits):  # type: ignore[no-untyped-def]
    """Finds the magnitudes of a task vector that lie between two others.

    Args: sources: base, expert; low, high: uint32, low < high; hits: uint32 (size + 1,), those found are written here.
    Returns: how many are below low, equal to low, found and equal to high; the largest of all.
    """
    sizes, origin, flags = np.empty(TILE, np.uint32), np.empty(TILE, np.float32), np.empty(COLUMNS, np.uint32)
    below, at_low, found, at_high, largest = int64(0), int64(0), uint64(0), int64(0), uint32(0)
    first, end = uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        largest = max(largest, _sizes(sources, first, n, origin, sizes))
        under, lows, highs, found = _found(sizes, n, low, high, flags, hits, found)
        below, at_low, at_high = below + under, at_low + lows, at_high + highs
        first += n
    return below, at_low, found, at_high, largest


@jit
def among(sources, start, size, length, factors, limits, hits, counts):  # type: ignore[no-untyped-def]
    """Finds the numbers that lie between two others, as integers of their order.

    Args: sources: of the numbers, or two whose differences have magnitudes that are multiplied by a number a row;
        start: of them in their leaf; length, factors: of rows, and float32; limits: uint32 (n, 2), low < high, whose
        numbers are counted and written to hits, uint32 (n, size + 1), and counts, int64 (n, 4), as by `between`.
    """
    keys, flags, first, end = np.empty(TILE, np.uint32), np.empty(COLUMNS, np.uint32), uint64(0), uint64(size)
    one, two = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    counts[:] = 0
    while first < end:
        n = min(uint64(TILE), end - first)
        _load(sources, 0, first, n, one)
        if len(sources) > 1:
            _load(sources, 1, first, n, two)
            done = uint64(0)
            while done < n:
                place = uint64(start) + first + done
                stop = min(n, done + uint64(length) - place % uint64(length))
                factor = factors[place // uint64(length)]
                for j in range(done, stop):
                    one[j] = abs(two[j] - one[j]) * factor
                done = stop
        for j in range(n):
            word = float32(one[j]).view(np.uint32)
            keys[j] = uint32(word ^ (uint32(0xFFFFFFFF) if word >= uint32(0x80000000) else uint32(0x80000000)))
        for k in range(len(limits)):
            found = uint64(counts[k, 2])
            under, lows, highs, found = _found(keys, n, limits[k, 0], limits[k, 1], flags, hits[k], found)
            counts[k, 0] += under
            counts[k, 1] += lows
            counts[k, 2] = int64(found)
            counts[k, 3] += highs
        first += n


@jit
def count_high(sources, size, counts):  # type: ignore[no-untyped-def]
    """Counts magnitudes of a task vector by their upper 16 bits. Args: sources: base, expert; counts: (2, 65536)."""
    sizes, origin = np.empty(TILE, np.uint32), np.empty(TILE, np.float32)
    first, end = uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _sizes(sources, first, n, origin, sizes)
        for j in range(n):  # two tables: equal neighbours need not wait for each other
            counts[j & uint64(1), sizes[j] >> uint32(15)] += uint32(1)
        first += n


@jit
def count_between(sources, size, low, counts):  # type: ignore[no-untyped-def]
    """Counts the magnitudes of a task vector from ``low`` on, each in a place of its own.

    Args: sources: base, expert; counts: uint32, of low and those after it; others are not counted.
    """
    sizes, origin, hits = np.empty(TILE, np.uint32), np.empty(TILE, np.float32), np.empty(TILE + 1, np.uint32)
    width, first, end = uint32(len(counts)), uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _sizes(sources, first, n, origin, sizes)
        found = uint64(0)
        for j in range(n):  # no branch, which nothing would foretell
            place = uint32(sizes[j] - low)
            hits[found] = place
            found += uint64(place < width)
        for j in range(found):
            counts[hits[j]] += uint32(1)
        first += n


@jit
def nth_equal(sources, size, wanted, left):  # type: ignore[no-untyped-def]
    """The position of the ``left``-th (from 1) magnitude whose bits are ``wanted``, or -1, and how many were met."""
    sizes, origin = np.empty(TILE, np.uint32), np.empty(TILE, np.float32)
    met, first, end = int64(0), uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _sizes(sources, first, n, origin, sizes)
        found = uint32(0)
        for j in range(n):
            found += uint32(sizes[j] == wanted)
        if met + int64(found) >= left:
            for j in range(n):
                met += int64(sizes[j] == wanted)
                if met == left:
                    return int64(first + j), met
        met += int64(found)
        first += n
    return -1, met


@jit
def magnitudes(sources, size, out):  # type: ignore[no-untyped-def]
    """The bits of a task vector's magnitudes. Args: sources: as `_sizes`'; out: uint32 (size,)."""
    origin, first, end = np.zeros(TILE, np.float32), uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _sizes(sources, first, n, origin, out[first:])
        first += n


@jit
def vectors(sources, size, out):  # type: ignore[no-untyped-def]
    """Task vectors. Args: out: float32 (experts, size). Returns: the largest magnitude, as bits."""
    origin, largest = np.empty(TILE, np.float32), uint32(0)
    first, end = uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _load(sources, 0, first, n, origin)
        for i in range(len(out)):
            largest = max(largest, _delta(sources, i + 1, first, n, origin, out[i, first:]))
        first += n
    return largest


@jit
def masked(  # type: ignore[no-untyped-def]
    sources, block, skip, size, keys, cutoffs, kept, ranked, share, ratios, weights, elect, mean, divisor, coef, target
):
    """Merges task vectors whose mask streams drop coordinates, the others divided by ``kept``: DARE, DELLA.

    Args: block, skip: the place of the window in the streams; keys: (experts, 2); cutoffs, kept: int32 and float32, one
        an expert; ranked: uint16 (experts, size), cutoffs of coordinates, or none: they are dropped by both, and their
        ``kept`` is less by cutoff times ``share``; elect: take only what has the sign of the sum, + where that is 0;
        others as `banded`'s.
    Returns: as `banded`.
    """
    count = len(sources) - 1
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
    halves = words.view(np.uint16).reshape(-1)
    rows, origin, merged = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    sign, agreeing = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    counter, ahead = block, uint64(skip)
    while first < end:
        n = min(uint64(TILE) - ahead, end - first)
        _load(sources, 0, first, n, origin)
        for j in range(n):
            merged[j] = float32(-0.0)
        for i in range(count):
            row = rows[i]
            largest = max(largest, _delta(sources, i + 1, first, n, origin, row))
            _draw(keys[i, 0], keys[i, 1] + counter, int64(ahead + n), state, words)
            drawn, cutoff, probability, ratio, weight = halves[ahead:], cutoffs[i], kept[i], ratios[i], weights[i]
            if ranked.shape[1]:
                own = ranked[i, first:]
                for j in range(n):
                    divided = row[j] / (probability - float32(own[j]) * share)
                    stays = int32(drawn[j]) >= max(int32(own[j]), cutoff)
                    row[j] = (divided if stays else float32(0)) * ratio * weight
            else:
                _divided(row, n, probability)
                for j in range(n):
                    row[j] = (row[j] if int32(drawn[j]) >= cutoff else float32(0)) * ratio * weight
            for j in range(n):
                merged[j] += row[j]
        if elect:
            _elected(merged, n, sign)
            _agreeing(rows, 0, n, sign, mean, weights, merged, agreeing)
        else:
            _divided(merged, n, divisor)
        written = max(written, _finish(merged, n, origin, coef, target, first, change, error, sums))
        first += n
        counter += uint64(LANES)
        ahead = uint64(0)
    return sums[0].sum(), sums[1].sum(), largest, written


@inlined
def _elected(total, n, sign):  # type: ignore[no-untyped-def]
    for j in range(n):
        sign[j] = float32(1) if total[j] >= 0 else float32(-1)


@jit
def combined(sources, size, weights, kind, numbers, coef, target):  # type: ignore[no-untyped-def]
    """Merges tiles of all task vectors by the arithmetic of one merger.

    Args: weights: float32 (experts,), of task vectors; kind: one of the constants above; numbers: float32, what the
        merger's function takes, then one number for each expert; others and returns: as `banded`'s.
    """
    count = len(sources) - 1
    rows, origin, merged = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    first_room, second_room = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    one, two, shares = numbers[0], numbers[1], numbers[2:]
    while first < end:
        n = min(uint64(TILE), end - first)
        _load(sources, 0, first, n, origin)
        for i in range(count):
            largest = max(largest, _delta(sources, i + 1, first, n, origin, rows[i]))
            _times(rows[i], n, weights[i])
        if kind == MAGMAX:
            _farthest(rows, n, merged, first_room)
        elif kind == SCE:
            _erased(rows, n, shares, one, merged, first_room, second_room)
        elif kind == RAM:
            _shared(rows, n, one, shares, merged, first_room, second_room)
        elif kind == CONSENSUS:
            _needed(rows, n, one, two, merged, first_room)
        elif kind == TALL_MASK:
            _needed_by(rows, n, one, int64(two), merged)
        elif kind == EMR:
            _of_task(rows, n, int64(one), merged, first_room)
            for j in range(n):
                merged[j] *= two
        else:
            _clamped(rows[0], n, one, merged)
        written = max(written, _finish(merged, n, origin, coef, target, first, change, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest, written


@inlined
def _total(rows, n, out):  # type: ignore[no-untyped-def]
    for j in range(n):
        out[j] = rows[0, j]
    for i in range(1, len(rows)):
        row = rows[i]
        for j in range(n):
            out[j] += row[j]


@inner
def _farthest(rows, n, out, low):  # type: ignore[no-untyped-def]
    """MagMax: what has the largest magnitude, of opposite numbers the positive."""
    for j in range(n):
        out[j] = low[j] = rows[0, j]
    for i in range(1, len(rows)):
        row = rows[i]
        for j in range(n):
            value = row[j]
            out[j] = value if value > out[j] else out[j]
            low[j] = value if value < low[j] else low[j]
    for j in range(n):
        out[j] = (out[j] if out[j] >= -low[j] else low[j]) + float32(0)  # no −0


@inner
def _erased(rows, n, weights, least, out, sign, share):  # type: ignore[no-untyped-def]
    """SCE: means by weight of what has the sign of the sum, + where that is 0. Args: least: of a sum of weights."""
    _total(rows, n, out)
    _elected(out, n, sign)
    for j in range(n):
        out[j] = float32(0)
        share[j] = float32(0)
    for i in range(len(rows)):
        row, weight = rows[i], weights[i]
        for j in range(n):
            value = row[j]
            own = weight if value * sign[j] > 0 else float32(0)
            out[j] += value * own
            share[j] += own
    for j in range(n):
        out[j] /= share[j] if share[j] > least else least


@inner
def _shared(rows, n, threshold, factors, out, shared, count):  # type: ignore[no-untyped-def]
    """RAM: means of what exceeds the threshold in several rows; what does in one, times its factor."""
    for j in range(n):
        out[j] = shared[j] = count[j] = float32(0)
    for i in range(len(rows)):
        row, factor = rows[i], factors[i]
        for j in range(n):
            small = abs(row[j]) <= threshold
            value = float32(0) if small else row[j]
            shared[j] += value
            out[j] += value * factor
            count[j] += float32(0) if small else float32(1)
    for j in range(n):
        mean = shared[j] / (count[j] if count[j] > 1 else float32(1))
        out[j] = mean if count[j] > 1 else out[j]


@inner
def _needed(rows, n, ratio, least, out, count):  # type: ignore[no-untyped-def]
    """Consensus TA: the sum where at least so many rows exceed a ratio of the sum of the others."""
    _total(rows, n, out)
    for j in range(n):
        count[j] = float32(0)
    for i in range(len(rows)):
        row = rows[i]
        for j in range(n):
            count[j] += float32(1) if abs(row[j]) > abs(out[j] - row[j]) * ratio else float32(0)
    for j in range(n):
        out[j] = out[j] if count[j] >= least else float32(0)


@inner
def _needed_by(rows, n, ratio, place, out):  # type: ignore[no-untyped-def]
    """TALL mask: the same of one row."""
    _total(rows, n, out)
    row = rows[place]
    for j in range(n):
        out[j] = out[j] if abs(row[j]) > abs(out[j] - row[j]) * ratio else float32(0)


@inner
def _of_task(rows, n, place, out, sign):  # type: ignore[no-untyped-def]
    """EMR: `_outermost`, where the row at ``place`` has that sign."""
    _outermost(rows, n, out, sign)
    row = rows[place]
    for j in range(n):
        out[j] = out[j] if row[j] * sign[j] > 0 else float32(0)


@inlined
def _outermost(rows, n, out, sign):  # type: ignore[no-untyped-def]
    """The number of the sum's sign farthest from 0, and that sign: 0 counts as −."""
    _total(rows, n, out)
    for j in range(n):
        sign[j] = float32(1) if out[j] > 0 else float32(-1)
        out[j] = float32(0)
    for i in range(len(rows)):
        row = rows[i]
        for j in range(n):
            value = row[j] * sign[j]
            out[j] = value if value > out[j] else out[j]
    for j in range(n):
        out[j] = out[j] * sign[j] + float32(0)  # no −0


@inner
def _clamped(row, n, most, out):  # type: ignore[no-untyped-def]
    """NearSwap."""
    for j in range(n):
        value = row[j] if row[j] > -most else -most
        out[j] = value if value < most else most


@inlined
def _near_exp(delta, low, high, inverse, less, factor):  # type: ignore[no-untyped-def]
    """The exponential in PCB, off by less than 2^-11 of it. Args: inverse: 1 / (high - low); factor: N / log 2."""
    value = abs(delta)
    value = low if value < low else value
    value = high if value > high else value
    value = (value - low) * inverse
    scaled = (value * value - less) * factor
    scaled = scaled if scaled > float32(-126) else float32(-126)
    whole = scaled + float32(12582912)  # 1.5 * 2^23: its last bits are the nearest integer
    part = scaled - (whole - float32(12582912))
    power = uint32(uint32(float32(whole).view(np.uint32) << uint32(23)) + uint32(0x3F800000)).view(np.float32)
    series = float32(0.24022651) + part * (float32(0.05550411) + part * float32(0.009618129))
    return power * (float32(1) + part * (float32(0.6931472) + part * series))


@inlined
def _is_near(low, high, count):  # type: ignore[no-untyped-def]
    """Whether float32 is enough for `_near_exp`."""
    exact = float64(float32(low)) == low and float64(float32(high)) == high and count <= 1000
    return exact and (high <= low or 2.0**-100 <= high - low <= 2.0**100)


@inlined
def _beta_between(row, total, n, low, high, less, count, least, most):  # type: ignore[no-untyped-def]
    """Two numbers for each of n coordinates, between which PCB's β lies, rounded to float32 or not.

    Args: row, total: of finite numbers; low, high, less, count: as of `_exponent`; least, most: are written to.
    """
    inverse = float32(1.0 / (high - low)) if high > low else float32(0)
    start, stop, minus, factor = float32(low), float32(high), float32(less), float32(count * _PER_LOG_2)
    for j in range(n):
        delta, others = row[j], total[j]
        power = _near_exp(delta, start, stop, inverse, minus, factor)
        size = abs(delta * others)
        size = size if size < float32(1) else float32(1)
        # x - x^3 / 3 <= tanh(x) <= min(x, 1); _LEAST is more than is lost to rounding next to 0
        upper = power * (size * float32(1 + 2**-10) + _LEAST) + _LEAST
        lower = power * ((size - _LEAST) * (float32(1 - 2**-10) - size * size * float32(0.34))) - _LEAST
        lower = lower if lower > float32(0) else float32(0)
        zero, agrees = (delta == float32(0)) | (others == float32(0)), (delta > float32(0)) == (others > float32(0))
        most[j] = float32(0) if zero else upper if agrees else -lower
        least[j] = float32(0) if zero else lower if agrees else -upper


@inlined
def _exponent(delta, low, high, width, less, count):  # type: ignore[no-untyped-def]
    """The argument of the exponential in PCB. Args: width: high - low, or infinity; less: a number to subtract."""
    value = abs(delta)
    value = low if value < low else value
    value = high if value > high else value
    value = (value - low) / width
    return (value * value - less) * count


@jit
def betas_among(sources, bounds, less, limits, edges, exponents, products, written, counts):  # type: ignore[no-untyped-def]
    """Counts PCB's β beside two numbers, where `_beta_between` decides; others are left to torch's exponential.

    Args: sources: of task vectors; bounds: float64 (experts, 4), low and high first; less: a number to subtract;
        limits: uint32 (experts, n, 2), as `among`'s, of each expert; edges: the same numbers as float32; exponents,
        products: float64 (experts, size), the arguments of the exponential and of the hyperbolic tangent where these
        are left; written: int64 (experts,), how many; counts: int64 (experts, n, 4), as `among`'s, of the others.
    Returns: the largest magnitude of a task vector or of their sum, as bits; if not finite, nothing else is right.
    """
    count, size = exponents.shape
    rows, total, near = np.empty((count, TILE), np.float32), np.empty(TILE, np.float64), np.empty(TILE, np.float32)
    least, most, flags = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros(TILE, np.uint8)
    words, largest, first = flags.view(np.uint64), uint32(0), uint64(0)
    while first < uint64(size):
        n = min(uint64(TILE), uint64(size) - first)
        for i in range(count):
            _load(sources, i, first, n, rows[i])
            largest = max(largest, _added(rows[i], n, i, total))
        for j in range(n):
            near[j] = total[j]
            largest = max(largest, _size(near[j]))
        for i in range(count):
            row, low, high = rows[i], bounds[i, 0], bounds[i, 1]
            width = high - low if high > low else np.inf
            if _is_near(low, high, count):
                _beta_between(row, near, n, low, high, less, count, least, most)
            else:
                least[:], most[:] = -np.inf, np.inf
            for j in range(TILE):
                flags[j] = 0
            for k in range(limits.shape[1]):
                below, start, stop = uint32(0), edges[i, k, 0], edges[i, k, 1]
                for j in range(n):
                    under = most[j] < start
                    below = uint32(below + uint32(under))
                    flags[j] |= np.uint8(not (under | (least[j] > stop)))
                counts[i, k, 0] += int64(below)
            for word in range((n + uint64(7)) // uint64(8)):
                if words[word]:
                    for j in range(uint64(8) * word, uint64(8) * word + uint64(8)):
                        if flags[j]:
                            for k in range(limits.shape[1]):
                                counts[i, k, 0] -= int64(most[j] < edges[i, k, 0])
                            delta, at = float64(row[j]), written[i]
                            product = delta * total[j]
                            if not (product == 0.0 and _zero_among(product, limits[i], counts[i])):
                                exponents[i, at] = _exponent(delta, low, high, width, less, count)
                                products[i, at] = product
                                written[i] = at + 1
        first += n
    return largest


@inlined
def _zero_among(zero, limits, counts):  # type: ignore[no-untyped-def]
    """Counts a zero of its sign beside all pairs of limits; False, and nothing is counted, if it is between two."""
    negative = float64(zero).view(np.uint64) >> uint64(63)
    key, inside = uint32(0x7FFFFFFF) if negative else uint32(0x80000000), False
    for k in range(len(limits)):
        inside |= limits[k, 0] < key < limits[k, 1]
    for k in range(0 if inside else len(limits)):
        counts[k, 0] += int64(key < limits[k, 0])
        counts[k, 1] += int64(key == limits[k, 0])
        counts[k, 3] += int64(key == limits[k, 1])
    return not inside


@inlined
def _added(row, n, i, total):  # type: ignore[no-untyped-def]
    """Adds the i-th of several rows to the total. Returns: its largest magnitude, as bits."""
    largest = uint32(0)
    for j in range(n):
        value = float64(row[j])
        total[j] = total[j] + value if i else value
        largest = max(largest, _size(row[j]))
    return largest


@inlined
def _times(row, n, weight):  # type: ignore[no-untyped-def]
    if weight != float32(1):
        for j in range(n):
            row[j] *= weight


@jit
def competing(sources, weights, begin, end, bounds, less, exponents, products, places, written):  # type: ignore[no-untyped-def]
    """The arguments of the exponential and of the hyperbolic tangent in PCB where β may be above its floor.

    Args: sources: as `banded`'s; weights: float32 (experts,), of task vectors; begin, end: coordinates of the window;
        bounds: float64 (experts, 4), low, high and floor first; exponents, products: float64 (experts, n); places:
        int32 (experts, n + 1), of these coordinates from begin on; written: int64 (experts,), how many.
    Returns: the largest magnitude of a weighted task vector, as bits.
    """
    count, factor = len(sources) - 1, float32((len(sources) - 1) * _PER_LOG_2)
    rows, origin, near = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    total, flags, largest, first = np.empty(TILE, np.float64), np.empty(TILE, np.uint8), uint32(0), uint64(begin)
    while first < uint64(end):
        n, tile, place = min(uint64(TILE), uint64(end) - first), uint32(0), int64(first) - int64(begin)
        _load(sources, 0, first, n, origin)
        for i in range(count):
            _delta(sources, i + 1, first, n, origin, rows[i])
            _times(rows[i], n, weights[i])
            tile = max(tile, _added(rows[i], n, i, total))
        for j in range(n):
            near[j] = total[j]
        largest = max(largest, tile)
        for i in range(count):
            row, low, high, floor = rows[i], bounds[i, 0], bounds[i, 1], bounds[i, 2]
            width, least = high - low if high > low else np.inf, float32(floor)
            own, others, found, start = exponents[i], products[i], places[i], written[i]
            stop = start
            if floor >= 0 and tile < uint32(0x7F800000) and _is_near(low, high, count):
                begins, ends, minus, inverse = float32(low), float32(high), float32(less), float32(1.0 / width)
                for j in range(n):
                    delta, sum_of = row[j], near[j]
                    power = _near_exp(delta, begins, ends, inverse, minus, factor)
                    size = abs(delta * sum_of)
                    size = size if size < float32(1) else float32(1)
                    upper = power * (size * float32(1 + 2**-10) + _LEAST) + _LEAST
                    agrees = ((delta > 0) & (sum_of > 0)) | ((delta < 0) & (sum_of < 0))
                    flags[j] = np.uint8(agrees & (upper > least))
                for j in range(n):
                    found[stop] = int32(place + int64(j))
                    stop += int64(flags[j])
            else:
                for j in range(n):
                    found[stop] = int32(place + int64(j))
                    stop += 1
            for k in range(start, stop):
                at = int64(found[k]) - place
                delta = float64(row[at])
                own[k] = _exponent(delta, low, high, width, less, count)
                others[k] = delta * total[at]
            written[i] = stop
        first += n
    return largest


@jit
def balanced(sources, weights, begin, end, bounds, exponentials, tangents, places, written, coef, target):  # type: ignore[no-untyped-def]
    """PCB's mean of task vectors by what stands out in each. Args: as `competing`'s and `banded`'s.

    Returns: squared norms of rounding error and change, the largest magnitude of the result.
    """
    count, done = len(sources) - 1, np.zeros(len(sources), np.int64)
    row, origin, out = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    merged, total, scales = np.empty(TILE, np.float64), np.empty(TILE, np.float64), np.empty(TILE, np.float64)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, first = uint32(0), uint64(begin)
    while first < uint64(end):
        n, place = min(uint64(TILE), uint64(end) - first), int64(first) - int64(begin)
        _load(sources, 0, first, n, origin)
        for i in range(count):
            low, high, floor, top = bounds[i, 0], bounds[i, 1], bounds[i, 2], bounds[i, 3]
            own, width, k, stop = places[i], top - floor if top > floor else np.inf, done[i], written[i]
            _delta(sources, i + 1, first, n, origin, row)
            _times(row, n, weights[i])
            for j in range(n):
                scales[j] = 0.0
            while k < stop and int64(own[k]) < place + int64(n):
                scale = (float64(float32(exponentials[i, k] * tangents[i, k])) - floor) / width
                scales[int64(own[k]) - place] = 0.0 if scale <= 0 else scale
                k += 1
            done[i] = k
            for j in range(n):
                delta = float64(row[j])
                value = abs(delta)
                value = low if value < low else value
                value = high if value > high else value
                value = value * (float64(delta > 0) - float64(delta < 0)) * scales[j]
                merged[j] = merged[j] + value if i else value
                total[j] = total[j] + scales[j] if i else scales[j]
        for j in range(n):
            divisor = 1e-12 if total[j] < 1e-12 else total[j]
            out[j] = merged[j] / divisor
        largest = max(largest, _finish(out, n, origin, coef, target, first, change, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest


@jit
def counted(sources, size, threshold, counts):  # type: ignore[no-untyped-def]
    """Coordinates that each expert changes by more than the threshold: with others, then alone.

    Args: counts: float64 (2, experts, 1), is written to; others as `banded`'s.
    """
    count = len(sources) - 1
    rows, origin, several = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    together, all_of, first, end = np.zeros(count, np.int64), np.zeros(count, np.int64), uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _load(sources, 0, first, n, origin)
        several[:] = 0
        for i in range(count):
            row = rows[i]
            _delta(sources, i + 1, first, n, origin, row)
            for j in range(n):
                several[j] += int32(abs(row[j]) > threshold)
        for i in range(count):
            row, both, every = rows[i], int32(0), int32(0)
            for j in range(n):
                changed = int32(abs(row[j]) > threshold)
                every += changed
                both += changed if several[j] > 1 else int32(0)
            together[i] += both
            all_of[i] += every
        first += n
    for i in range(count):
        counts[0, i, 0] = float64(together[i])
        counts[1, i, 0] = float64(all_of[i] - together[i])


@jit
def norms_of_task(sources, size, place, sums):  # type: ignore[no-untyped-def]
    """Sums of magnitudes by blocks as of `absolute_sums`: of the task vector at ``place``, and of `_of_task`.

    Args: sums: float64 (2, 1, blocks); others as `banded`'s.
    """
    count, work = len(sources) - 1, np.empty(512, np.float64)
    rows, origin, sign = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    before, after = np.empty(4096, np.float32), np.empty(4096, np.float32)
    for block in range(sums.shape[2]):
        begin, end = uint64(4096 * block), min(uint64(4096 * (block + 1)), uint64(size))
        first = begin
        while first < end:
            n, at = min(uint64(TILE), end - first), first - begin
            _load(sources, 0, first, n, origin)
            for i in range(count):
                _delta(sources, i + 1, first, n, origin, rows[i])
            _of_task(rows, n, place, after[at:], sign)
            row, own = rows[place], before[at:]
            for j in range(n):
                own[j] = row[j]
            first += n
        before[end - begin :] = 0
        after[end - begin :] = 0
        sums[0, 0, block] = _absolute(before, work)
        sums[1, 0, block] = _absolute(after, work)


@jit
def of_all_tasks(sources, size, kind, ratio, vector, masks, out):  # type: ignore[no-untyped-def]
    """The vector that all tasks share, and every task's mask, of at most 64 blocks of 4096.

    Args: sources: as `banded`'s; kind: TALL_MASK, or EMR; ratio: float32, of TALL_MASK; vector: float32 (size,) is
        written to; masks: uint8 (experts, bytes) are written to, a bit a coordinate, the highest one the first; out:
        float64 (experts, 2), sums of magnitudes of the task vectors and of what their masks leave, the `absolute_sums`
        added by halves, or none.
    Returns: the largest magnitude of a difference and of the vector, as bits.
    """
    count, sums = len(sources) - 1, np.zeros((len(out), 2, 64))
    rows, origin = np.empty((count, 4096), np.float32), np.empty(TILE, np.float32)
    sign, flags, work = np.empty(4096, np.float32), np.empty(TILE, np.uint8), np.empty(512, np.float64)
    words, sizes, largest, written = flags.view(np.uint64), np.empty(4096, np.float32), uint32(0), uint32(0)
    for block in range((size + 4095) // 4096):
        begin, end = uint64(4096 * block), min(uint64(4096 * (block + 1)), uint64(size))
        first = begin
        while first < end:
            n, at = min(uint64(TILE), end - first), first - begin
            total, signs = vector[first:], sign[at:]
            _load(sources, 0, first, n, origin)
            for i in range(count):
                largest = max(largest, _delta(sources, i + 1, first, n, origin, rows[i, at:]))
            if kind == EMR:
                _outermost(rows[:, at:], n, total, signs)
            else:
                _total(rows[:, at:], n, total)
            for j in range(n):
                written = max(written, _size(total[j]))
            for j in range(n, uint64(TILE)):
                flags[j] = np.uint8(0)
            for i in range(count):
                row, mask = rows[i, at:], masks[i, first // uint64(8) :]
                if kind == EMR:
                    for j in range(n):
                        flags[j] = np.uint8(row[j] * signs[j] > 0)
                else:
                    for j in range(n):
                        flags[j] = np.uint8(abs(row[j]) > abs(total[j] - row[j]) * ratio)
                for word in range((n + uint64(7)) // uint64(8)):  # no two of these products share a bit
                    mask[word] = np.uint8((words[word] * uint64(0x8040201008040201)) >> uint64(56))
            first += n
        if len(out):
            for j in range(end - begin):
                sizes[j] = abs(vector[begin + j])
            for i in range(count):
                row = rows[i]
                row[end - begin :] = 0  # which no sign agrees with
                sums[i, 0, block] = _absolute(row, work)
                for k in range(512):  # as `_absolute`
                    a = _agreed(sizes, row, sign, k) + _agreed(sizes, row, sign, k + 2048)
                    b = _agreed(sizes, row, sign, k + 512) + _agreed(sizes, row, sign, k + 2560)
                    c = _agreed(sizes, row, sign, k + 1024) + _agreed(sizes, row, sign, k + 3072)
                    d = _agreed(sizes, row, sign, k + 1536) + _agreed(sizes, row, sign, k + 3584)
                    work[k] = (a + c) + (b + d)
                sums[i, 1, block] = _halved(work, 512)
    for i in range(len(out)):
        for k in range(2):
            out[i, k] = _halved(sums[i, k], 64)
    return largest, written


@inlined
def _agreed(sizes, row, sign, k):  # type: ignore[no-untyped-def]
    return float64(sizes[k] if row[k] * sign[k] > 0 else float32(0))


@jit
def averaged(sources, size, weights, divisor, line, target):  # type: ignore[no-untyped-def]
    """Adds weighted experts, without base. Args and returns: as `banded`'s, the first magnitude one of the inputs.

    Args: line: add the weighted differences of the others from the first one to it.
    """
    origin, merged, first_one = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _load(sources, 0, first, n, origin)
        for j in range(n):
            merged[j] = float32(-0.0)
            largest = max(largest, _size(origin[j]))
        if line:
            _load(sources, 1, first, n, first_one)
            for j in range(n):
                merged[j] = first_one[j]
                largest = max(largest, _size(merged[j]))
        for i in range(2 if line else 1, len(sources)):
            weight = weights[i - 1]
            _load(sources, i, first, n, error)
            for j in range(n):
                largest = max(largest, _size(error[j]))
            if line:
                for j in range(n):
                    error[j] -= first_one[j]
            for j in range(n):
                merged[j] += error[j] * weight
        _divided(merged, n, divisor)
        for j in range(n):
            change[j] = merged[j] - origin[j]
        written = max(written, _write(merged, n, change, target, first, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest, written


@jit
def fused(sources, start, size, length, divergences, threshold, coef, target):  # type: ignore[no-untyped-def]
    """Arcee Fusion. Args and returns: as `averaged`'s; start: of the window in its leaf.

    Args: length: of a row; divergences: float32, one a row; threshold: of the importance.
    """
    origin, one, two = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    while first < end:
        place = uint64(start) + first
        row, left = place // uint64(length), uint64(length) - place % uint64(length)
        n, divergence = min(uint64(TILE), end - first, left), divergences[row]
        _load(sources, 0, first, n, origin)
        _load(sources, 1, first, n, one)
        _load(sources, 2, first, n, two)
        for j in range(n):
            largest = max(largest, max(_size(one[j]), _size(two[j])))
            delta = two[j] - one[j]
            factor = coef * float32(abs(delta) * divergence >= threshold)
            one[j] = delta * factor + one[j]
            change[j] = one[j] - origin[j]
        written = max(written, _write(one, n, change, target, first, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest, written


@jit
def norms(sources, start, size, bands, splits, keys, cutoffs, ranked, sums):  # type: ignore[no-untyped-def]
    """Sums of magnitudes of task vectors, and of what stays of them, by blocks as of `absolute_sums`.

    Args: start: a multiple of 4096; keys: (experts, 2) of mask streams, none where nothing is random; cutoffs, ranked:
        as `masked`'s; sums: float64 (2, experts, blocks); others as `banded`'s.
    """
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
    halves, work = words.view(np.uint16).reshape(-1), np.empty(512, np.float64)
    origin, row, kept = np.empty(4096, np.float32), np.empty(4096, np.float32), np.empty(4096, np.float32)
    for block in range(sums.shape[2]):
        begin, end = uint64(4096 * block), min(uint64(4096 * (block + 1)), uint64(size))
        first = begin
        while first < end:
            n = min(uint64(TILE), end - first)
            _load(sources, 0, first, n, origin[first - begin :])
            first += n
        row[end - begin :] = 0
        kept[end - begin :] = 0
        for i in range(len(sources) - 1):
            first = begin
            while first < end:
                place, at, tile = uint64(start) + first, first - begin, (first - begin) % uint64(TILE)
                n = _until(splits[i : i + 1], place, min(uint64(TILE) - tile, end - first))
                low = bands[i, 0] if int64(place) < splits[i, 0] else bands[i, 1]
                high = bands[i, 2] if int64(place) < splits[i, 1] else bands[i, 3]
                values, some, width = row[at:], kept[at:], uint32(high - low)
                _delta(sources, i + 1, first, n, origin[at:], values)
                if len(keys):  # all magnitudes are in bands then
                    _draw(keys[i, 0], keys[i, 1] + place // uint64(8), int64(n), state, words)
                    cutoff = cutoffs[i]
                    for j in range(n):
                        some[j] = values[j] if int32(halves[j]) >= cutoff else float32(0)
                    for j in range(n if ranked.shape[1] else 0):
                        some[j] = some[j] if halves[j] >= ranked[i, first + j] else float32(0)
                else:
                    for j in range(n):
                        some[j] = values[j] if uint32(_size(values[j]) - low) < width else float32(0)
                first += n
            sums[0, i, block] = _absolute(row, work)
            sums[1, i, block] = _absolute(kept, work)


@jit
def absolute_sums(rows, sums):  # type: ignore[no-untyped-def]
    """Sums of magnitudes of blocks of 4096, the last one filled up with zeros, each added by halves.

    Args: rows: float32 (n, size); sums: float64 (n, blocks).
    """
    work, rest = np.empty(512, np.float64), np.zeros(4096, np.float32)
    left = rows.shape[1] % 4096
    for i in range(len(rows)):
        for block in range(rows.shape[1] // 4096):
            sums[i, block] = _absolute(rows[i, 4096 * block :], work)
        if left:
            for k in range(left):  # slices assigned to each other bring numba's error messages: 3 s to compile
                rest[k] = rows[i, rows.shape[1] - left + k]
            sums[i, -1] = _absolute(rest, work)


@inlined
def _absolute(values, work):  # type: ignore[no-untyped-def]
    """The sum of the first 4096 magnitudes. Args: work: float64 (512,)."""
    for k in range(512):  # three halvings, without writing any before
        a = float64(abs(values[k])) + float64(abs(values[k + 2048]))
        b = float64(abs(values[k + 512])) + float64(abs(values[k + 2560]))
        c = float64(abs(values[k + 1024])) + float64(abs(values[k + 3072]))
        d = float64(abs(values[k + 1536])) + float64(abs(values[k + 3584]))
        work[k] = (a + c) + (b + d)
    return _halved(work, 512)


@inlined
def _halved(values, size):  # type: ignore[no-untyped-def]
    """The sum of a power of two of numbers, added by halves; they are written to."""
    half = size // 2
    while half > 0:
        for i in range(half):
            values[i] += values[i + half]
        half //= 2
    return values[0]


@jit
def gram(sources, size, based, diagonal, out):  # type: ignore[no-untyped-def]
    """Inner products in float64 by blocks of 4096, of at most 64 blocks; both levels are added by halves.

    Args: sources: as `banded`'s; based: of task vectors, else of the experts, and base is not read; diagonal: only of
        each with itself, the others are 0; out: float64 (experts, experts).
    """
    count = len(sources) - 1
    rows, origin, work = np.empty((count, 4096), np.float32), np.empty(4096, np.float32), np.empty(512, np.float64)
    sums, first, end = np.zeros((count, count, 64), np.float64), uint64(0), uint64(size)
    for block in range((size + 4095) // 4096):
        stop, at = min(first + uint64(4096), end), uint64(0)
        rows[:, stop - first :] = 0
        while first < stop:
            n = min(uint64(TILE), stop - first)
            if based:
                _load(sources, 0, first, n, origin)
            for i in range(count):
                row = rows[i, at:]
                _load(sources, i + 1, first, n, row)
                if based:
                    for j in range(n):
                        row[j] -= origin[j]
            first += n
            at += n
        for i in range(count):
            for j in range(i if diagonal else 0, i + 1):
                _folded(rows[i], rows[j], 512, work)
                sums[i, j, block] = _halved(work, 512)
    for i in range(count):
        for j in range(i + 1):
            out[i, j] = out[j, i] = _halved(sums[i, j], 64)


@inner
def _folded(left, right, eighth, out):  # type: ignore[no-untyped-def]
    """The products after three halvings, without writing any before."""
    for k in range(eighth):
        a = float64(left[k]) * float64(right[k])
        b = float64(left[k + eighth]) * float64(right[k + eighth])
        c = float64(left[k + 2 * eighth]) * float64(right[k + 2 * eighth])
        d = float64(left[k + 3 * eighth]) * float64(right[k + 3 * eighth])
        a += float64(left[k + 4 * eighth]) * float64(right[k + 4 * eighth])
        b += float64(left[k + 5 * eighth]) * float64(right[k + 5 * eighth])
        c += float64(left[k + 6 * eighth]) * float64(right[k + 6 * eighth])
        d += float64(left[k + 7 * eighth]) * float64(right[k + 7 * eighth])
        out[k] = (a + c) + (b + d)


@inlined
def _spread(rows, n, mean, out):  # type: ignore[no-untyped-def]
    """N times the variance of n numbers over the N rows. Args: mean: is written to."""
    count, start = float32(len(rows)), rows[0]
    for j in range(n):
        mean[j] = out[j] = float32(0)
    for i in range(len(rows)):
        row = rows[i]
        for j in range(n):
            mean[j] += row[j] - start[j]
    for j in range(n):
        mean[j] /= count
    for i in range(len(rows)):
        row = rows[i]
        for j in range(n):
            away = row[j] - start[j] - mean[j]
            out[j] += away * away


@inlined
def _bound(least, last, place, n):  # type: ignore[no-untyped-def]
    """From which bits on numbers stay, and of how many at most: those above ``least``, and up to ``last`` equal ones.

    Args: place: of the first of n numbers.
    """
    equal = last + 1 - int64(place)
    if equal > 0:
        return least, min(n, uint64(equal))
    return uint32(least + uint32(1)), n


@inlined
def _varied(sources, first, n, weights, origin, rows, mean, out):  # type: ignore[no-untyped-def]
    """`_spread` of weighted task vectors. Args: origin, rows, mean: are written to."""
    _load(sources, 0, first, n, origin)
    for i in range(len(rows)):
        _delta(sources, i + 1, first, n, origin, rows[i])
        _times(rows[i], n, weights[i])
    _spread(rows, n, mean, out)


@jit
def variances(sources, size, weights, out):  # type: ignore[no-untyped-def]
    """Variances over the task vectors times their number. Args: weights: of the vectors; out: float32 (size,)."""
    count = len(sources) - 1
    rows, origin, mean = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    first, end = uint64(0), uint64(size)
    while first < end:
        n = min(uint64(TILE), end - first)
        _varied(sources, first, n, weights, origin, rows, mean, out[first:])
        first += n


@jit
def sampled_variances(sources, size, weights, offset, step, out):  # type: ignore[no-untyped-def]
    """The bits of `variances`, of a sample as of `sampled`. Args: weights: as `variances`'; others as `sampled`'s."""
    rows, mean = np.empty((len(sources) - 1, RUN), np.float32), np.empty(RUN, np.float32)
    origin, spread, found, end = np.empty(RUN, np.float32), np.empty(RUN, np.float32), 0, offset + size
    for run in range(offset // step, (end + step - 1) // step):
        first = _place(run, step) - offset
        if 0 <= first <= size - RUN:
            _varied(sources, uint64(first), uint64(RUN), weights, origin, rows, mean, spread)
            for j in range(RUN):
                out[found, j] = _size(spread[j])
            found += 1
    return found


@jit
def variances_between(sources, size, weights, low, high, hits):  # type: ignore[no-untyped-def]
    """`between` of `variances`, as bits. Returns: how many are below low, equal to low, found, equal to high, and 0."""
    rows, origin = np.empty((len(sources) - 1, TILE), np.float32), np.empty(TILE, np.float32)
    mean, spread = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    sizes, flags = np.empty(TILE, np.uint32), np.empty(COLUMNS, np.uint32)
    below, at_low, found, at_high, none = int64(0), int64(0), uint64(0), int64(0), int64(0)
    first, end = uint64(0), uint64(size)
    while first < end:
        n, zeros = min(uint64(TILE), end - first), uint32(0)
        _varied(sources, first, n, weights, origin, rows, mean, spread)
        for j in range(n):
            sizes[j] = _size(spread[j])
            zeros = uint32(zeros + uint32(sizes[j] == uint32(0)))
        under, lows, highs, found = _found(sizes, n, low, high, flags, hits, found)
        below, at_low, at_high, none = below + under, at_low + lows, at_high + highs, none + int64(zeros)
        first += n
    return below, at_low, found, at_high, none


@jit
def nth_equal_variance(sources, size, weights, wanted, left):  # type: ignore[no-untyped-def]
    """The position of the ``left``-th (from 1) of the `variances` whose bits are ``wanted``, or -1."""
    rows, origin = np.empty((len(sources) - 1, TILE), np.float32), np.empty(TILE, np.float32)
    mean, spread = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    first, end = uint64(0), uint64(size)
    while first < end:
        n, found = min(uint64(TILE), end - first), uint32(0)
        _varied(sources, first, n, weights, origin, rows, mean, spread)
        for j in range(n):
            found = uint32(found + uint32(_size(spread[j]) == wanted))
        for j in range(n if int64(found) >= left else uint64(0)):
            left -= int64(_size(spread[j]) == wanted)
            if left == 0:
                return int64(first + j)
        left -= int64(found)
        first += n
    return -1


@jit
def varying_squares(sources, start, size, weights, least, last, sums):  # type: ignore[no-untyped-def]
    """Squared norms of what stays of task vectors, by blocks of 4096, each added by halves.

    Args: start: a multiple of 4096; least, last: as of `varying`; sums: float64 (experts, blocks).
    """
    count = len(sources) - 1
    rows, origin, work = np.empty((count, 4096), np.float32), np.empty(TILE, np.float32), np.empty(512, np.float64)
    mean, spread, end = np.empty(TILE, np.float32), np.empty(TILE, np.float32), uint64(size)
    for block in range(sums.shape[1]):
        begin, first = uint64(4096 * block), uint64(4096 * block)
        stop = min(begin + uint64(4096), end)
        rows[:, stop - begin :] = 0
        while first < stop:
            place, at = uint64(start) + first, first - begin
            bound, n = _bound(least, last, place, min(uint64(TILE), stop - first))
            _load(sources, 0, first, n, origin)
            for i in range(count):
                _delta(sources, i + 1, first, n, origin, rows[i, at:])
                _times(rows[i, at:], n, weights[i])
            _spread(rows[:, at:], n, mean, spread)
            for i in range(count):
                row = rows[i, at:]
                for j in range(n):
                    row[j] = row[j] if _size(spread[j]) >= bound else float32(0)
            first += n
        for i in range(count):
            _folded(rows[i], rows[i], 512, work)
            sums[i, block] = _halved(work, 512)


@jit
def varying(sources, start, size, weights, shares, least, last, floor, coef, target):  # type: ignore[no-untyped-def]
    """SCE of the coordinates whose variance is above a number, or equal to it up to a position; 0 in the others.

    Args: start: of the window in its leaf; shares, floor: as of `_erased`; least: uint32, the bits of that number;
        last: that position; others and returns: as `combined`'s.
    """
    count = len(sources) - 1
    rows, origin, merged = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    spread, sign, share = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    change, error, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    places = np.empty(TILE + 1, np.uint16)
    largest, written, first, end = uint32(0), uint32(0), uint64(0), uint64(size)
    while first < end:
        bound, n = _bound(least, last, uint64(start) + first, min(uint64(TILE), end - first))
        _load(sources, 0, first, n, origin)
        for i in range(count):
            largest = max(largest, _delta(sources, i + 1, first, n, origin, rows[i]))
            _times(rows[i], n, weights[i])
        _spread(rows, n, merged, spread)
        some = uint64(0)
        for j in range(n):
            places[some] = j
            some += uint64(_size(spread[j]) >= bound)
        if 4 * some < n:  # few: they are merged side by side
            for i in range(count):
                row = rows[i]
                for k in range(some):
                    row[k] = row[places[k]]
            _erased(rows, some, shares, floor, spread, sign, share)
            for j in range(n):
                merged[j] = float32(0)
            for k in range(some):
                merged[places[k]] = spread[k]
        else:
            _erased(rows, n, shares, floor, merged, sign, share)
            for j in range(n):
                merged[j] = merged[j] if _size(spread[j]) >= bound else float32(0)
        written = max(written, _finish(merged, n, origin, coef, target, first, change, error, sums))
        first += n
    return sums[0].sum(), sums[1].sum(), largest, written
