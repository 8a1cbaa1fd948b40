"""Loops that numba compiles: Philox fields, and simulate and reweight in one pass. Only `compiled` imports this.

No fused multiply-add and no reordering: every operation is rounded as in torch. Keys and blocks are uint64, the
coordinate ``8 * block + skip`` is the first of a window. A pass works on a tile of 8 * LANES coordinates.
One file on purpose: numba's cache does not see changes in other modules.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from numpy import float32, float64, int32, uint32, uint64

LANES = 128  # blocks of a tile: their state stays in the first-level cache
TILE = 8 * LANES
_WORD, _HALF = uint64(0xFFFFFFFF), uint64(32)
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
def _round(a, b, c, d, k0, k1):  # type: ignore[no-untyped-def]
    # upper halves may hold anything but where they are multiplied
    p, q = (a & _WORD) * _MULTIPLIERS[0], (c & _WORD) * _MULTIPLIERS[1]
    return (q >> _HALF) ^ b ^ k0, q, (p >> _HALF) ^ d ^ k1, p


@jit
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


@jit
def simulate(mask, noise, block, skip, theta, theta_0, out, masked, scale, kept, cutoff, step, quantiles):  # type: ignore[no-untyped-def]
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


@jit
def reweight(mask, block, skip, gradient, out, masked, scale, kept, cutoff):  # type: ignore[no-untyped-def]
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
    if cutoff >= 0:
        for i in range(count):
            factor[i] = kept if int32(halves[i]) >= cutoff else float32(0)
    else:  # the opposite mask
        for i in range(count):
            factor[i] = kept if int32(halves[i]) < int32(65536) + cutoff else float32(0)


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
def items(delta, length, out):  # type: ignore[no-untyped-def]
    """Magnitude above position in the row: all different, in the order of a stable sort. Args: out: uint64."""
    bits = delta.view(np.uint32)
    for first in range(0, len(delta), length):
        row, places = bits[first : first + length], out[first : first + length]
        for i in range(length):
            places[i] = (uint64(row[i] & uint32(0x7FFFFFFF)) << _HALF) | uint64(i)


@jit
def dropped_by_rank(delta, order, fields, by_rank, out):  # type: ignore[no-untyped-def]
    """`dropped` with a cutoff T for each rank of |delta| in its row, equal ones by position; ``kept = 1 - T / 65536``.

    Args: order: `items`, sorted in each row; fields: int16, less 32768; by_rank: int32, T by ascending rank, whose
        length is that of the rows; out: not delta, or it takes five times as long.
    """
    length = len(by_rank)
    cutoffs = np.empty(length, np.int32)
    for first in range(0, len(delta), length):
        row = slice(first, first + length)
        ranked = order[row]
        for rank in range(length):
            cutoffs[ranked[rank] & _WORD] = by_rank[rank]
        _drop_row(delta[row], fields[row], cutoffs, out[row])


@jit
def _drop_row(delta, fields, cutoffs, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        kept = float32(1) - float32(cutoffs[i]) / float32(65536)
        out[i] = delta[i] / kept if int32(fields[i]) >= cutoffs[i] - int32(32768) else float32(0)


@jit
def agree(values, sign, total, count):  # type: ignore[no-untyped-def]
    """Adds the values of that sign to the total, and one to the count."""
    for i in range(len(total)):
        agrees = values[i] * sign[i] > 0
        total[i] += values[i] if agrees else float32(0)
        count[i] += float32(1) if agrees else float32(0)


def _address(kind: Any) -> Any:
    """A pointer to numbers of a kind, from an address."""

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        result = types.CPointer(kind)

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(result))

        return result(types.uint64), code

    return pointer


_floats, _halves = _address(types.float32), _address(types.uint16)


@jit
def _load(source, first, out):  # type: ignore[no-untyped-def]
    """float32 of the numbers from ``first`` on. Args: source: an address, and 1 for bfloat16, 0 for float32."""
    if source[1]:
        _widen(carray(_halves(source[0] + uint64(2 * first)), len(out)), out)
    else:
        _widen(carray(_floats(source[0] + uint64(4 * first)), len(out)), out)


@jit
def _store(values, target, first):  # type: ignore[no-untyped-def]
    """Rounds as `_narrow`; ``values`` become what was written. Returns: their largest magnitude, as bits."""
    if target[1]:
        out = carray(_halves(target[0] + uint64(2 * first)), len(values))
        _narrow(values, out)
        _widen(out, values)
    else:
        _narrow(values, carray(_floats(target[0] + uint64(4 * first)), len(values)))
    return _largest(values)


@jit
def _largest(values):  # type: ignore[no-untyped-def]
    bits, largest = values.view(np.uint32), uint32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & uint32(0x7FFFFFFF))
    return largest


@jit
def _delta(source, first, origin, out):  # type: ignore[no-untyped-def]
    """The task vector from ``first`` on. Returns: its largest magnitude, as bits."""
    _load(source, first, out)
    for i in range(len(out)):
        out[i] -= origin[i]
    return _largest(out)


@jit
def _finish(merged, origin, coef, target, first, sums):  # type: ignore[no-untyped-def]
    """Writes ``origin + coef * merged``, at most a tile. Returns: the largest magnitude that is written, as bits.

    Args: merged: is written to; sums: float64 (2, 64), squares of the rounding error and of the change are added.
    """
    exact, count = np.zeros(TILE, np.float32), len(merged)
    for i in range(count):
        merged[i] *= coef
    _squares(merged, sums[1])
    for i in range(count):
        merged[i] += origin[i]
        exact[i] = merged[i]
    largest = _store(merged, target, first)
    if target[1]:
        for i in range(count):
            merged[i] = exact[i] - merged[i]
        _squares(merged, sums[0])
    return largest


@jit
def _squares(values, sums):  # type: ignore[no-untyped-def]
    whole = len(values) // 64 * 64
    for first in range(0, whole, 64):
        for i in range(64):
            value = float64(values[first + i])
            sums[i] += value * value
    for i in range(whole, len(values)):
        value = float64(values[i])
        sums[i - whole] += value * value


@jit
def _band(values, position, band, splits):  # type: ignore[no-untyped-def]
    """Zeroes what is outside of a band of magnitudes. Args: position: of the first; band, splits: see `banded`."""
    count, bits = len(values), values.view(np.uint32)
    low, high = min(max(splits[0] - position, 0), count), min(max(splits[1] - position, 0), count)
    _inside(bits[: min(low, high)], band[0], band[2])
    _inside(bits[low:high], band[1], band[2])
    _inside(bits[high:low], band[0], band[3])
    _inside(bits[max(low, high) :], band[1], band[3])


@jit
def _inside(bits, low, high):  # type: ignore[no-untyped-def]
    width = high - low
    for i in range(len(bits)):
        bits[i] = bits[i] if (bits[i] & uint32(0x7FFFFFFF)) - low < width else uint32(0)


@jit
def banded(sources, start, size, bands, splits, elect, mean, majority, coef, target):  # type: ignore[no-untyped-def]
    """Merges task vectors of which only bands of magnitudes stay.

    Args: sources: uint64 (experts + 1, 2), see `_load`, base first; start: of the window in its leaf; bands: uint32
        (experts, 4), magnitudes from [0] on, below [2], stay, from position splits[0] on those from [1] on, and from
        splits[1] on those below [3]; splits: int64 (experts, 2); elect: TIES, else a sum; majority: of a zero sum;
        target: as a row of sources.
    Returns: squared norms of rounding error and change, the largest magnitude of a difference and of the result.
    """
    count = len(sources) - 1
    rows, origin = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32)
    merged, sign, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written = uint32(0), uint32(0)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        for i in range(count):
            largest = max(largest, _delta(sources[i + 1], first, origin[:n], rows[i, :n]))
            _band(rows[i, :n], start + first, bands[i], splits[i])
        _sum(rows, merged[:n])
        if elect:
            for j in range(n):
                total = merged[j]
                sign[j] = float32(1) if total > 0 else float32(-1) if total < 0 else majority
            _agreeing(rows, sign[:n], mean, merged[:n])
        written = max(written, _finish(merged[:n], origin, coef, target, first, sums))
    return sums[0].sum(), sums[1].sum(), largest, written


@jit
def _sum(rows, out):  # type: ignore[no-untyped-def]
    for j in range(len(out)):
        out[j] = rows[0, j]
    for i in range(1, len(rows)):
        for j in range(len(out)):
            out[j] += rows[i, j]


@jit
def _agreeing(rows, sign, mean, out):  # type: ignore[no-untyped-def]
    """Sum, or mean, of what has the sign; +0 where there is nothing."""
    for j in range(len(out)):
        out[j] = float32(0)
    for i in range(len(rows)):
        for j in range(len(out)):
            value = rows[i, j]
            out[j] += value if value * sign[j] > 0 else float32(0)
    if mean:
        count = np.zeros(len(out), np.float32)
        for i in range(len(rows)):
            for j in range(len(out)):
                count[j] += float32(1) if rows[i, j] * sign[j] > 0 else float32(0)
        for j in range(len(out)):
            out[j] /= max(count[j], float32(1))


@jit
def votes(sources, start, size, bands, splits):  # type: ignore[no-untyped-def]
    """The sum of the signs of sums of task vectors; arguments as `banded`'s."""
    count = len(sources) - 1
    rows, origin = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32)
    total, net = np.empty(TILE, np.float32), 0
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        for i in range(count):
            _delta(sources[i + 1], first, origin[:n], rows[i, :n])
            _band(rows[i, :n], start + first, bands[i], splits[i])
        _sum(rows, total[:n])
        tile = int32(0)
        for j in range(n):
            tile += int32(total[j] > 0) - int32(total[j] < 0)
        net += int(tile)
    return net


@jit
def count_high(sources, size, counts):  # type: ignore[no-untyped-def]
    """Counts magnitudes of a task vector by their upper 16 bits. Args: sources: base, expert; counts: (2, 65536)."""
    value, origin = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    bits = value.view(np.uint32)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        _delta(sources[1], first, origin[:n], value[:n])
        for i in range(n):  # two tables: equal neighbours need not wait for each other
            counts[i & 1, (bits[i] & uint32(0x7FFFFFFF)) >> uint32(15)] += 1


@jit
def count_low(sources, size, high, counts):  # type: ignore[no-untyped-def]
    """Counts by their lower 15 bits the magnitudes whose upper 16 bits are ``high``. Args: counts: (32832,)."""
    value, origin = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    bits = value.view(np.uint32)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        _delta(sources[1], first, origin[:n], value[:n])
        for part in range(0, n, 64):
            stop = min(part + 64, n)
            found, ones, zeros = uint32(0), uint32(0), uint32(0)
            for i in range(part, stop):
                word = bits[i] & uint32(0x7FFFFFFF)
                match = uint32(0xFFFFFFFF) if word >> uint32(15) == high else uint32(0)
                found += match & uint32(1)
                ones |= match & word
                zeros |= match & ~word
            if found and not (ones & zeros):  # all of them are equal
                counts[ones & uint32(0x7FFF)] += found
            elif found:
                for i in range(part, stop):  # no branch that nothing foretells: others have places behind the table
                    word = bits[i] & uint32(0x7FFFFFFF)
                    match = uint32(i & 63) + uint32(32768)
                    counts[word & uint32(0x7FFF) if word >> uint32(15) == high else match] += 1


@jit
def nth_equal(sources, size, wanted, left):  # type: ignore[no-untyped-def]
    """The position of the ``left``-th (from 1) magnitude whose bits are ``wanted``, or -1, and how many were met."""
    value, origin = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    bits, met = value.view(np.uint32), 0
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        _delta(sources[1], first, origin[:n], value[:n])
        found = uint32(0)
        for i in range(n):
            found += uint32((bits[i] & uint32(0x7FFFFFFF)) == wanted)
        if met + found < left:
            met += int(found)
            continue
        for i in range(n):
            met += (bits[i] & uint32(0x7FFFFFFF)) == wanted
            if met == left:
                return first + i, met
    return -1, met


@jit
def magnitudes(sources, size, out):  # type: ignore[no-untyped-def]
    """The bits of a task vector's magnitudes. Args: out: uint32 (size,)."""
    value, origin = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    bits = value.view(np.uint32)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        _delta(sources[1], first, origin[:n], value[:n])
        part = out[first : first + n]
        for i in range(n):
            part[i] = bits[i] & uint32(0x7FFFFFFF)


@jit
def deltas(sources, size, out):  # type: ignore[no-untyped-def]
    """A task vector. Args: sources: base, expert; out: float32 (size,). Returns: its largest magnitude, as bits."""
    origin, largest = np.empty(TILE, np.float32), uint32(0)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(sources[0], first, origin[:n])
        largest = max(largest, _delta(sources[1], first, origin[:n], out[first : first + n]))
    return largest


@jit
def masked(sources, block, skip, size, keys, cutoff, kept, elect, mean, coef, target):  # type: ignore[no-untyped-def]
    """Merges task vectors whose mask streams drop coordinates, the others divided by ``kept``: DARE.

    Args: block, skip: the place of the window in the streams; keys: (experts, 2); elect: take only what has the sign of
        the sum, + where that is 0; sources, mean, coef, target: as `banded`'s.
    Returns: as `banded`.
    """
    count = len(sources) - 1
    state, words = np.empty((2, LANES), np.uint64), np.empty((LANES, 2), np.uint64)
    halves = words.view(np.uint16).reshape(-1)
    rows, origin = np.empty((count, TILE), np.float32), np.empty(TILE, np.float32)
    merged, sign, sums = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.zeros((2, 64))
    largest, written, first, counter = uint32(0), uint32(0), 0, block
    while first < size:
        n = min(TILE - skip, size - first)
        _load(sources[0], first, origin[:n])
        for i in range(count):
            largest = max(largest, _delta(sources[i + 1], first, origin[:n], rows[i, :n]))
            _draw(keys[i, 0], keys[i, 1] + counter, skip + n, state, words)
            _keep(rows[i, :n], halves[skip:], cutoff, kept)
        _sum(rows, merged[:n])
        if elect:
            _elected(merged[:n], sign)
            _agreeing(rows, sign[:n], mean, merged[:n])
        written = max(written, _finish(merged[:n], origin, coef, target, first, sums))
        first += n
        counter += uint64(LANES)
        skip = 0
    return sums[0].sum(), sums[1].sum(), largest, written


@jit
def _keep(values, halves, cutoff, kept):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        values[i] = values[i] / kept if int32(halves[i]) >= cutoff else float32(0)


@jit
def _elected(total, sign):  # type: ignore[no-untyped-def]
    for j in range(len(total)):
        sign[j] = float32(1) if total[j] >= 0 else float32(-1)


@jit
def elected(vectors, base, size, mean, coef, target):  # type: ignore[no-untyped-def]
    """Merges what has the sign of the sum, + where that is 0. Args: vectors: float32 (experts, size); base, mean, coef,
    target: as `banded`'s sources[0], mean, coef, target. Returns: as `banded`, the first magnitude 0.
    """
    origin, merged, sign = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    rows, sums, written = np.empty((len(vectors), TILE), np.float32), np.zeros((2, 64)), uint32(0)
    for first in range(0, size, TILE):
        n = min(TILE, size - first)
        _load(base, first, origin[:n])
        for i in range(len(rows)):
            _widen(vectors[i, first : first + n], rows[i])
        _sum(rows, merged[:n])
        _elected(merged[:n], sign)
        _agreeing(rows, sign[:n], mean, merged[:n])
        written = max(written, _finish(merged[:n], origin, coef, target, first, sums))
    return sums[0].sum(), sums[1].sum(), uint32(0), written
