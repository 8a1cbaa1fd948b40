"""The kernels on a GPU: against a device copy of the same bytes, plain torch, and two rand4x per four coordinates."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat_fn import ops, random
from smat_fn.ops import library
from smat_fn.ops.cpu import Numbers
from smat_fn.simulation import draw

from . import timing
from .shapes import SHAPES, llama

COMMAND = "python -m benchmarks kernels"
DRAW: dict[str, Any] = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3}
RESULTS = timing.RESULTS / "kernels.json"
SIZES = (10**6, 10**7, 10**8, 10**9)
# columns of a short table
SUMMARY = ("tree", "dtype", "operation", "ms", "time / copy", "torch / time", "rand4x / time")
# times a leaf's bytes are read or written
PASSES = {"simulate": 3, "reweight": 2, "finish": 2, "finish, clip": 3, "clean, clip": 3}


class Leaves(NamedTuple):
    """theta, theta_0 (also the gradient), the result, and which leaves are masked."""

    params: list[Tensor]
    base: list[Tensor]
    out: list[Tensor]
    masked: list[bool]

    @property
    def bytes(self) -> int:
        """The size of one tree in bytes."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.params)


def main(*, dry_run: bool = False) -> list[dict[str, Any]]:
    """Measure, print a table, write benchmarks/results/kernels.json. Exits where there is no device.

    Args: dry_run: tiny sizes on the CPU, no result file.
    Returns: all rows.
    """
    on_cuda = torch.cuda.is_available()
    if not on_cuda:
        if not dry_run:
            sys.exit("benchmarks kernels: needs a CUDA device; --dry-run takes every path on tiny sizes on the CPU")
        os.environ.setdefault("TRITON_INTERPRET", "1")
    device = torch.device("cuda" if on_cuda else "cpu")
    rows = []
    check_bits(device)
    for name, shapes, dtype in cases(dry_run):
        leaves = make(shapes, dtype, device)
        with by_kernels(device):
            rows += measure(name, leaves, rounds=2 if dry_run else 20)
        del leaves
        if on_cuda:
            torch.cuda.empty_cache()
        if not dry_run:  # what is measured is kept, should a larger case run out of memory or time
            timing.store(RESULTS, {**timing.describe(COMMAND), "draw": DRAW, "rows": rows})
    print(timing.markdown(rows), flush=True)
    if dry_run:
        print("dry run on tiny sizes: the numbers mean nothing")
    return rows


def by_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Run the kernels inside the block, on the CPU in Triton's interpreter."""
    return library.forced() if device.type == "cpu" else nullcontext()


def cases(dry_run: bool) -> list[tuple[str, Mapping[str, Sequence[int]], torch.dtype]]:
    """(name, shapes, dtype) of every case."""
    trees: dict[str, Mapping[str, Sequence[int]]] = {"Llama-3.2-1B": llama_shapes(dry_run)}
    trees |= {f"{size:.0e}": {"layers.w": (size,)} for size in ((8, 5001) if dry_run else SIZES)}
    return [(name, shapes, dtype) for dtype in (torch.bfloat16, torch.float32) for name, shapes in trees.items()]


def llama_shapes(tiny: bool) -> dict[str, Sequence[int]]:
    """Shapes of the 146 parameters of Llama-3.2-1B."""
    shape = SHAPES["llama-3.2-1b"]
    with torch.device("meta"):
        module = llama({**shape.sizes, **(shape.tiny if tiny else {})})
    return {path: leaf.shape for path, leaf in module.named_parameters()}


def make(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> Leaves:
    """Leaves like trained weights; the weights of layers are masked."""
    base = [torch.empty(tuple(shape), dtype=dtype, device=device).normal_(0, 0.02) for shape in shapes.values()]
    params = [torch.empty_like(leaf).normal_(0, 1e-3).add_(leaf) for leaf in base]
    masked = ["layers" in path and "norm" not in path for path in shapes]
    return Leaves(params, base, [torch.empty_like(leaf) for leaf in base], masked)


def numbers_of(leaves: Leaves, device: torch.device) -> Numbers:
    """A draw, on the device."""
    d = draw(random.key(1).to(device), **DRAW)
    streams = random.leaf_streams(d.key, [str(i) for i in range(len(leaves.params))])
    return Numbers(streams, d.scale, random.threshold(d.drop_prob), d.sigma, d.noise)


def check_bits(device: torch.device) -> None:
    """Check that the kernels give the CPU's bits, before they are timed. Raises: AssertionError."""
    for dtype in library.SUPPORTED:
        here = make({"layers.w": (5001,), "b": (16,)}, dtype, torch.device("cpu"))
        params, base, out = ([leaf.to(device, copy=True) for leaf in leaves] for leaves in here[:3])
        there = Leaves(params, base, out, here.masked)
        for leaves, context in ((here, nullcontext()), (there, by_kernels(device))):
            numbers = numbers_of(leaves, leaves.params[0].device)
            with context:
                ops.simulate_into(leaves.params, leaves.base, leaves.out, *numbers, leaves.masked, [0, 0])
        same = [torch.equal(a, b.cpu()) for a, b in zip(here.out, there.out, strict=True)]
        assert all(same), "kernels and torch differ: run tests/ops"


def measure(name: str, leaves: Leaves, *, rounds: int) -> list[dict[str, Any]]:
    """One row per operation: bytes, milliseconds, bandwidth, and ratios of its round."""
    device = leaves.params[0].device
    candidates = ours(leaves, device) | {f"copy {n}": copy_of(n * leaves.bytes, device) for n in (2, 3)}
    candidates |= {f"{op}, torch": run for op, run in plain(leaves).items()}
    candidates |= {f"{op}, rand4x": run for op, run in two_rand4x(leaves).items()}
    times = timing.interleaved(candidates, rounds=rounds, clock=timing.device_time)
    host = timing.interleaved(ours(leaves, device), rounds=min(rounds, 10), clock=timing.host_time)
    rows = []
    for op, passes in PASSES.items():
        moved, copy = passes * leaves.bytes, times[f"copy {passes}"]
        row: dict[str, Any] = {
            "tree": name,
            "dtype": str(leaves.params[0].dtype).removeprefix("torch."),
            "operation": op,
            "leaves": len(leaves.params),
            "bytes": moved,
            "ms": timing.quartiles(times[op], 1e3),
            "host ms": timing.quartiles(host[op], 1e3),
            "GB/s": timing.quartiles([moved / t for t in times[op]], 1e-9),
            "copy GB/s": timing.quartiles([moved / t for t in copy], 1e-9),
            "time / copy": timing.ratios(times[op], copy),
        }
        for other in ("torch", "rand4x"):
            if f"{op}, {other}" in times:
                row[f"{other} / time"] = timing.ratios(times[f"{op}, {other}"], times[op])
        rows.append(row)
    return rows


def ours(leaves: Leaves, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The operations of smat_fn; those of `finish` write a tree that the allocator has at hand."""
    params, base, out, masked = leaves
    numbers, starts = numbers_of(leaves, device), [0] * len(params)
    grads = {str(i): leaf for i, leaf in enumerate(base)}

    def finish(draw: Numbers | None, max_norm: float | None) -> Callable[[], Any]:
        return lambda: ops.reweight_and_clip(grads, draw, masked, max_norm=max_norm, donate=False)

    return {
        "simulate": lambda: ops.simulate_into(params, base, out, *numbers, masked, starts),
        "reweight": lambda: ops.reweight_into(base, out, *numbers[:3], masked, starts),
        "finish": finish(numbers, None),
        "finish, clip": finish(numbers, 1.0),
        "clean, clip": finish(None, 1.0),
    }


def copy_of(moved: int, device: torch.device) -> Callable[[], Any]:
    """A device copy that reads and writes ``moved`` bytes in all."""
    source = torch.randint(256, (max(moved // 2, 1),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def plain(leaves: Leaves) -> dict[str, Callable[[], Any]]:
    """The operations by torch's own random numbers: mask and noise are tensors."""
    params, base, out, masked = leaves
    p, half = DRAW["drop_prob"], 3**0.5 * DRAW["sigma"]

    def coefficient(leaf: Tensor, flag: bool) -> Tensor | float:
        return 0.6 / (1 - p) * (torch.rand(leaf.shape, device=leaf.device) >= p) if flag else 0.6

    def simulate() -> None:
        for theta, theta_0, state, flag in zip(params, base, out, masked, strict=True):
            noise = (2 * torch.rand(theta.shape, device=theta.device) - 1) * half
            center = theta_0.float()
            state.copy_(center + coefficient(theta, flag) * (theta.float() - center) + noise)

    def reweight() -> None:
        for g, weighted, flag in zip(base, out, masked, strict=True):
            weighted.copy_(coefficient(g, flag) * g.float())

    def clip() -> None:
        torch.nn.utils.clip_grads_with_norm_(clipped, 1.0, torch.nn.utils.get_total_norm(out))

    def finish() -> None:
        reweight()
        torch.nn.utils.get_total_norm(out)

    def finish_clip() -> None:
        reweight()
        clip()

    clipped = [torch.nn.Parameter(leaf) for leaf in out]
    for leaf in clipped:
        leaf.grad = leaf.data
    return {
        "simulate": simulate,
        "reweight": reweight,
        "finish": finish,
        "finish, clip": finish_clip,
        "clean, clip": clip,
    }


def two_rand4x(leaves: Leaves) -> dict[str, Callable[[], Any]]:
    """simulate and reweight by `rand4x`."""
    from . import rand4x

    params, base, out, masked = leaves
    given = {"seed": 7, "scale": 0.6, "drop_prob": DRAW["drop_prob"]}
    return {
        "simulate": lambda: rand4x.simulate(params, base, out, masked, **given, sigma=DRAW["sigma"]),
        "reweight": lambda: rand4x.reweight(base, out, masked, **given),
    }
