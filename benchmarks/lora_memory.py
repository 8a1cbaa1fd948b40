"""Memory of a step of adapters above that of the weights: with W_0 + sBA of one layer at a time, or of all at once."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smat_fn import lora, optim
from smat_fn.grad import ModuleLoss, apply_fn
from smat_fn.random import key
from smat_fn.scripts.train.memory import process_peak, reset_process_peak
from smat_fn.where import block_linear

from . import timing

FILE = timing.RESULTS / "lora_memory.json"
LAYERS, WIDTH, RANK, ROWS = 16, 2048, 8, 8
OTHER = {torch.float32: 2048, torch.bfloat16: 4096}  # the other width: a layer has 16 MiB in either dtype
PEAK = "MiB above the weights"


class Stack(nn.Module):
    """Linear layers, each a block of its own."""

    def __init__(self, width: int, other: int, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [(width, other), (other, width)] * (LAYERS // 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*size, bias=False, dtype=dtype)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def main(*, dry_run: bool = False) -> None:
    """Measure every case in a process of its own, and store the table.

    Args:
        dry_run: small layers, and nothing is stored.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of glibc: what the processes to come free goes back at once
    context, rows = multiprocessing.get_context("spawn"), []
    for by_layer in (True, False):
        for simulated in (False, True):
            for dtype in OTHER:
                with context.Pool(1) as pool:
                    peak = pool.apply(_peak, (by_layer, simulated, dtype, 32 if dry_run else 1))
                case = "simulated" if simulated else "clean", "a layer at a time" if by_layer else "all at once"
                rows.append(dict(zip(("state", "weights"), case, strict=True)) | {"dtype": str(dtype)[6:], PEAK: peak})
                print(*rows[-1].values(), sep="\t", flush=True)
    if not dry_run:
        sizes = {"layers": LAYERS, "width": WIDTH, "rank": RANK, "rows of a batch": ROWS}
        timing.store(FILE, {**timing.describe("python -m benchmarks lora-memory"), **sizes, "rows": rows})


def _peak(by_layer: bool, simulated: bool, dtype: torch.dtype, smaller: int) -> float:
    """The peak of resident memory in a step, in MiB above that before it."""
    torch.set_num_threads(1)
    _step(by_layer, simulated, dtype, 32)()  # loads code
    step = _step(by_layer, simulated, dtype, smaller)
    gc.collect()
    reset_process_peak()
    start = process_peak() or 0
    step()
    return round(((process_peak() or 0) - start) / 2**20, 1)


def _step(by_layer: bool, simulated: bool, dtype: torch.dtype, smaller: int) -> Callable[[], Any]:
    """The first step of adapters of all layers, with layers of widths that are so many times smaller."""
    model = Stack(WIDTH // smaller, OTHER[dtype] // smaller, dtype)
    base = {name: leaf.detach() for name, leaf in model.named_parameters()}
    adapter = lora.Lora(lora.linear_paths(model)[0], rank=RANK, alpha=2.0 * RANK)
    batch, run = torch.ones(ROWS, WIDTH // smaller, dtype=dtype), apply_fn(model)

    def of_weights(params: Mapping[str, Tensor], batch: Tensor) -> tuple[Tensor, None]:
        return run(params, batch).float().square().mean(), None

    of_module = ModuleLoss(model, lambda module, batch: (module(batch).float().square().mean(), None))
    method = lora.build(
        of_module if by_layer else of_weights, optim.adam(1e-3), base, adapter,
        where=block_linear(model), sigma=1e-3, drop_prob=0.5, period=1 if simulated else 4,
    )  # fmt: skip
    state = method.init(lora.init(key(0), base, adapter))
    return lambda: method.update(key(0), state, batch)
