"""Triton kernels: a program works on one block of 4,096 coordinates of one leaf, found through a pointer table.

Row of the table: addresses of inputs and output, number of coordinates, index of the first one in the full leaf, first
program, whether masked, place among the streams. Layout of bits and numbers: docs/kernels.md.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

INTERPRET = triton.knobs.runtime.interpret
COLUMNS = 8
ROWS = tl.constexpr(512)


@triton.jit
def _fields(key, row, ROWS: tl.constexpr):
    """The eight 16-bit fields of each Philox4x32-10 block ``row`` of a stream: uint32 [ROWS, 8]."""
    seed = tl.load(key)
    counter = row + tl.load(key + 1)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(10):
        # one wide product each instead of a high and a low one
        p = c0.to(tl.uint64) * 0xD2511F53
        q = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (q >> 32).to(tl.uint32) ^ c1 ^ k0, q.to(tl.uint32)
        c2, c3 = (p >> 32).to(tl.uint32) ^ c3 ^ k1, p.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    low = tl.join(tl.join(c0 & 0xFFFF, c2 & 0xFFFF), tl.join(c1 & 0xFFFF, c3 & 0xFFFF))
    high = tl.join(tl.join(c0 >> 16, c2 >> 16), tl.join(c1 >> 16, c3 >> 16))
    return tl.reshape(tl.join(low, high), [ROWS, 8])


@triton.jit
def _round(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Round to nearest even; by integer arithmetic where the interpreter's cast to bfloat16 truncates."""
    if INTERPRET and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _place(entry, program, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    """(Philox block of each row, index into the leaf, whether it is inside) of a program."""
    size, start = tl.load(entry + 3), tl.load(entry + 4)
    row = (program - tl.load(entry + 5) + start // (ROWS * 8)) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 8)[None, :]
    if ALIGNED:  # start and size multiples of 8: whole rows, 16-byte accesses
        first = start // 8
        return row, (row - first)[:, None] * 8 + column, ((row >= first) & (row < first + size // 8))[:, None]
    else:
        index = row[:, None] * 8 + column - start
        return row, index, (index >= 0) & (index < size)


@triton.jit
def _leaf(entry, field, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        return tl.multiple_of(tl.load(entry + field).to(tl.pointer_type(DTYPE)), 16)
    else:
        return tl.load(entry + field).to(tl.pointer_type(DTYPE))


@triton.jit
def _coefficient(entry, streams, factors, cutoff, row, MASKED: tl.constexpr, ROWS: tl.constexpr):
    """alpha m of every coordinate, float32 [ROWS, 8]; the branch is the same for a whole leaf."""
    c = tl.zeros([ROWS, 8], dtype=tl.float32) + tl.load(factors)
    if MASKED:  # noqa: SIM102 (decided at compile time)
        if tl.load(entry + 6) != 0:
            field = _fields(streams + tl.load(entry + 7) * 2, row, ROWS)
            signed, kept = tl.load(cutoff), tl.load(factors + 1) + tl.zeros_like(c)
            below = field.to(tl.int32) < (signed & 65535)  # 65536 - T of -T, whose mask drops from there on
            c = tl.where(below == (signed < 0), kept, tl.zeros_like(c))
    return c


@triton.jit
def _halved(x):
    """Sum of 4,096 numbers, i added to i + half until one is left: two terms at a time, so the order is fixed."""
    x = tl.sum(tl.sum(tl.reshape(x, [2, 2, 1024]), axis=0), axis=0)
    # halves side by side in one thread: one exchange between threads instead of one for each level
    low, high = tl.split(tl.permute(tl.reshape(x, [2, 2, 2, 128]), [3, 2, 1, 0]))
    low, high = tl.split(low + high)
    low, high = tl.split(low + high)
    low, high = tl.split(tl.permute(tl.reshape(low + high, [2, 2, 32]), [2, 1, 0]))
    low, high = tl.split(low + high)
    x = low + high
    for level in tl.static_range(5):
        x = tl.sum(tl.reshape(x, [2, 16 >> level]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def simulate_kernel(
    table,  # int64 [leaves, 8]: params, base, out, size, start, first program, masked, place
    owner,  # int32 [programs]: row of the table
    streams,  # int64 [2, places, 2]: mask keys
    noises,  # the same tensor at its noise keys
    factors,  # float32 [3]: alpha, alpha m of what is kept, noise step
    cutoff,  # int32 [1]
    quantiles,  # float32 [65536], not read for uniform noise
    DTYPE: tl.constexpr,
    BASE: tl.constexpr,
    MASKED: tl.constexpr,
    NOISE: tl.constexpr,  # 1 uniform, 2 table
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """theta~ = (theta_0 + c (theta - theta_0)) + epsilon, Eq. smat-state."""
    program = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(owner + program).to(tl.int64) * 8
    row, index, inside = _place(entry, program, ALIGNED, ROWS)
    center = tl.load(_leaf(entry, 1, BASE, ALIGNED) + index, mask=inside, other=0).to(tl.float32)
    delta = tl.load(_leaf(entry, 0, DTYPE, ALIGNED) + index, mask=inside, other=0).to(tl.float32) - center
    state = center + _coefficient(entry, streams, factors, cutoff, row, MASKED, ROWS) * delta
    field = _fields(noises + tl.load(entry + 7) * 2, row, ROWS)
    if NOISE == 1:
        # the bits of 2**22 + field + 1/2, less 2**22 + 32768: no conversion from integers
        unit = (0x4A800001 | (field << 1)).to(tl.float32, bitcast=True) - 4227072.0
    else:
        unit = tl.load(quantiles + field.to(tl.int32))
    state += unit * tl.load(factors + 2)
    tl.store(_leaf(entry, 2, DTYPE, ALIGNED) + index, _round(state, DTYPE, INTERPRET), mask=inside)


@triton.jit
def reweight_kernel(
    table,  # int64 [leaves, 8]: grads, first block of sums, out, size, start, first program, masked, place
    owner,
    streams,
    factors,  # float32 [2]: alpha, alpha m of what is kept
    cutoff,
    sums,  # float32 [blocks of all leaves]: sums of squares, written if NORM
    clip,  # float32 [1]: factor of the gradient norm's clip, read if CLIP
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    STORE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """c g, Eq. smat-gradient; then the block's sum of squares, the clip, or both passes' other halves."""
    program = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(owner + program).to(tl.int64) * 8
    row, index, inside = _place(entry, program, ALIGNED, ROWS)
    g = tl.load(_leaf(entry, 0, DTYPE, ALIGNED) + index, mask=inside, other=0).to(tl.float32)
    weighted = _coefficient(entry, streams, factors, cutoff, row, MASKED, ROWS) * g
    rounded = _round(weighted, DTYPE, INTERPRET)
    if NORM:
        x = rounded.to(tl.float32)
        tl.store(sums + tl.load(entry + 1) + program - tl.load(entry + 5), _halved(x * x))
    if CLIP:
        rounded = _round(rounded.to(tl.float32) * tl.load(clip), DTYPE, INTERPRET)
    if STORE:
        tl.store(_leaf(entry, 2, DTYPE, ALIGNED) + index, rounded, mask=inside)


@triton.jit
def climb_kernel(
    table,  # int64 [leaves, 8]: params, slopes, out, size, start, first program, first block of sums, place
    owner,
    sums,  # float32 [blocks of all leaves]: sums of squares of |theta| s, written if NORM
    length,  # float32 [1], read otherwise
    DTYPE: tl.constexpr,
    SLOPE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    NORM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """theta + |theta| (|theta| s) length, or the norm's part before it; |theta| is 1 where not ADAPTIVE."""
    program = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(owner + program).to(tl.int64) * 8
    _, index, inside = _place(entry, program, ALIGNED, ROWS)
    theta = tl.load(_leaf(entry, 0, DTYPE, ALIGNED) + index, mask=inside, other=0).to(tl.float32)
    step = tl.load(_leaf(entry, 1, SLOPE, ALIGNED) + index, mask=inside, other=0).to(tl.float32)
    if ADAPTIVE:
        step = tl.abs(theta) * step
    if NORM:
        tl.store(sums + tl.load(entry + 6) + program - tl.load(entry + 5), _halved(step * step))
    else:
        if ADAPTIVE:
            step = tl.abs(theta) * step
        moved = _round(theta + step * tl.load(length), DTYPE, INTERPRET)
        tl.store(_leaf(entry, 2, DTYPE, ALIGNED) + index, moved, mask=inside)
