"""The climb of ASAM: a step of given length along a slope, scaled by the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import tree
from ..execution import over_shards, transformed
from . import cpu, launch, library


def climb(
    params: Sequence[Tensor],
    slopes: Sequence[Tensor],
    *,
    rho: float,
    adaptive: bool,
    donate: bool = False,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """``theta + rho theta^2 (.) s / (|| |theta| (.) s || + 1e-12)``; not adaptive: ``|theta|`` is replaced by 1.

    In float32 (float64 for float64 leaves), rounded once; norm by `smat_fn.tree.global_norm`. Compiled loops and
    kernels read weights and slopes twice, once for the norm, and write the result once, with no tree between them; all
    ways are bit-identical.

    Args: donate: may write into slopes; out: receives the result, of params' shapes and dtypes (without: and strides).
    """
    dispatched = any(type(leaf) not in tree.PLAIN for leaf in (*params, *slopes))
    if out is None and (dispatched or transformed()):
        return _moved(params, slopes, rho / (tree.global_norm(_weighted(params, slopes, adaptive)) + 1e-12), adaptive)
    with torch.no_grad():
        if out is None:
            free = library.owned(dict(enumerate(slopes))) if donate else set()
            out = [
                slope if i in free and slope.is_contiguous() and _alike(slope, theta) else torch.empty_like(theta)
                for i, (theta, slope) in enumerate(zip(params, slopes, strict=True))
            ]
        with library.written(out) as flat:
            climb_into(list(params), list(slopes), flat, rho, adaptive)
    return list(out)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


@torch.library.custom_op("smat_fn::climb_into", mutates_args=("out",), tags=library.TAGS)
def climb_into(params: list[Tensor], slopes: list[Tensor], out: list[Tensor], rho: float, adaptive: bool) -> None:
    """`climb` written into ``out``: contiguous leaves of params' dtypes, may be slopes."""
    if not params:
        return
    ways: dict[tuple[torch.device, type[_Way] | type[launch.Climbing]], list[int]] = {}
    for i, (theta, slope) in enumerate(zip(params, slopes, strict=True)):
        ways.setdefault((theta.device, _way_of(theta, slope)), []).append(i)
    passes: list[tuple[_Way | launch.Climbing, list[int]]] = []
    for (_, kind), rows in ways.items():
        own, along, into = ([leaves[i].contiguous() for i in rows] for leaves in (params, slopes, out))
        passes.append((kind(own, along, into, adaptive), rows))
    sums = library.in_order([(way.squares(), rows) for way, rows in passes], params)
    squares = tree.sum_by_halves(sums) if len(sums) else sums.new_zeros(())
    length = rho / (over_shards(squares).sqrt() + 1e-12)
    for way, _ in passes:
        way.move(length)


@climb_into.register_fake
def _(params, slopes, out, rho, adaptive):  # type: ignore[no-untyped-def]
    return None


class _Way:
    """Plain torch: two passes over leaves of one device."""

    def __init__(
        self, params: Sequence[Tensor], slopes: Sequence[Tensor], out: Sequence[Tensor], adaptive: bool
    ) -> None:
        self._params, self._slopes, self._out, self._adaptive = params, slopes, out, adaptive

    def squares(self) -> Tensor:
        """Sums of squares of ``|theta| s`` by blocks."""
        pairs = zip(self._params, self._slopes, strict=True)
        return torch.cat([tree.block_squares(_weighted([p], [s], self._adaptive)) for p, s in pairs])

    def move(self, length: Tensor) -> None:
        """Write the climbed weights."""
        for theta, slope, target in zip(self._params, self._slopes, self._out, strict=True):
            target.copy_(_moved([theta], [slope], length, self._adaptive)[0])


class _Looped(_Way):
    def squares(self) -> Tensor:
        return cpu.slope_squares(self._params, self._slopes, adaptive=self._adaptive)

    def move(self, length: Tensor) -> None:
        cpu.climb(self._params, self._slopes, self._out, adaptive=self._adaptive, length=length)


def _way_of(theta: Tensor, slope: Tensor) -> type[_Way] | type[launch.Climbing]:
    if library.by_kernel([theta], [slope]):
        return launch.Climbing
    return _Looped if library.by_loops([theta], [slope]) else _Way


def _weighted(params: Sequence[Tensor], slopes: Sequence[Tensor], adaptive: bool) -> list[Tensor]:
    wide = [slope.to(tree.compute_dtype(theta)) for theta, slope in zip(params, slopes, strict=True)]
    return [theta.to(s.dtype).abs() * s if adaptive else s for theta, s in zip(params, wide, strict=True)]


def _moved(params: Sequence[Tensor], slopes: Sequence[Tensor], length: Tensor, adaptive: bool) -> list[Tensor]:
    found = []
    for theta, weighted in zip(params, _weighted(params, slopes, adaptive), strict=True):
        wide = theta.to(weighted.dtype)
        step = wide.abs() * weighted if adaptive else weighted
        found.append((wide + step * length.to(step.device, step.dtype)).to(theta.dtype))
    return found
