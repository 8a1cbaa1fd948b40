"""The baseline kernels: two calls of ``tl.rand4x`` for four coordinates, one for the mask and one for the noise.

One launch per leaf; other bits than smat_fn's, the same distribution.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _four(seed, quad, Q: tl.constexpr):
    a, b, c, d = tl.rand4x(seed, quad)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [Q, 4])


@triton.jit
def _tile(size, Q: tl.constexpr):
    quad = tl.program_id(0).to(tl.int64) * Q + tl.arange(0, Q)
    index = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    return quad, index, index < size


@triton.jit
def simulate_kernel(theta, base, out, size, seed, scale, drop_prob, half_width, MASKED: tl.constexpr, Q: tl.constexpr):
    """theta~ with uniform noise on [-half_width, half_width]."""
    quad, index, inside = _tile(size, Q)
    center = tl.load(base + index, mask=inside, other=0).to(tl.float32)
    delta = tl.load(theta + index, mask=inside, other=0).to(tl.float32) - center
    c = scale
    if MASKED:
        c = tl.where(_four(seed, quad, Q) < drop_prob, 0.0, scale / (1 - drop_prob))
    state = center + c * delta + (2 * _four(seed + 1, quad, Q) - 1) * half_width
    tl.store(out + index, state.to(out.dtype.element_ty), mask=inside)


@triton.jit
def reweight_kernel(grads, out, size, seed, scale, drop_prob, MASKED: tl.constexpr, Q: tl.constexpr):
    """alpha m (.) g."""
    quad, index, inside = _tile(size, Q)
    c = scale
    if MASKED:
        c = tl.where(_four(seed, quad, Q) < drop_prob, 0.0, scale / (1 - drop_prob))
    weighted = c * tl.load(grads + index, mask=inside, other=0).to(tl.float32)
    tl.store(out + index, weighted.to(out.dtype.element_ty), mask=inside)


def _grid(leaf):
    return (triton.cdiv(leaf.numel(), 4 * QUADS),)


QUADS = 512
OPTIONS = {"enable_fp_fusion": True}  # Triton's default, of which version 3.9 warns


def simulate(params, base, out, masked, *, seed, scale, drop_prob, sigma):
    """All leaves, a launch each."""
    for i, (theta, theta_0, state, flag) in enumerate(zip(params, base, out, masked, strict=True)):
        numbers = theta.numel(), seed + 2 * i, scale, drop_prob, 3**0.5 * sigma
        simulate_kernel[_grid(theta)](theta, theta_0, state, *numbers, MASKED=flag, Q=QUADS, **OPTIONS)


def reweight(grads, out, masked, *, seed, scale, drop_prob):
    """All leaves, a launch each."""
    for i, (g, weighted, flag) in enumerate(zip(grads, out, masked, strict=True)):
        reweight_kernel[_grid(g)](
            g, weighted, g.numel(), seed + 2 * i, scale, drop_prob, MASKED=flag, Q=QUADS, **OPTIONS
        )
