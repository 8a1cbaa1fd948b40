"""Every variant of the kernels compiled for sm_90 without a GPU: instructions, registers, spills, width of accesses.

The variants are those that launches ask for: the launches of small trees are recorded and compiled instead of run.
The kernels of `rand4x`, with which `kernels` compares, are only compiled.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

from smat_fn import machine

from . import timing
from .readme import table as markdown

ROOT = Path(__file__).parent.parent
COMMAND = "python -m benchmarks sass"
DTYPES = ("bfloat16", "float16", "float32")
NOTE = "compiled for sm_90, not run"
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, arguments, options of a launch


def main(*, check: bool = False, dry_run: bool = False) -> None:
    """Compile the variants and print a table.

    Args: check: write no file; dry_run: a few variants only, no file.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels of an interpreting process cannot be compiled
        clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=clean, cwd=ROOT, check=False).returncode)
    rows = [measure(*call) for call in record(dry_run=dry_run)]
    for call in record_baseline():
        compiled_of(*call)
    print(table(rows))
    if not (check or dry_run):
        result = {**machine.describe(COMMAND), "note": NOTE, "rows": rows}
        timing.store(timing.RESULTS / "sass.json", result)
    problems = [f"{name(row)}: {problem}" for row in rows for problem in row["problems"]]
    sys.exit("\n".join(problems) if problems else 0)


class Recorded:
    """A kernel whose launches are kept, one of each variant, instead of run."""

    def __init__(self, kernel: Any, calls: dict[Any, Call]) -> None:
        self.kernel, self.__name__, self._calls = kernel, kernel.__name__, calls

    def __getitem__(self, grid: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            kinds = tuple((t.dtype, t.data_ptr() % 16 == 0) if hasattr(t, "data_ptr") else type(t) for t in arguments)
            key = self.__name__, kinds, tuple((k, str(v)) for k, v in options.items())
            self._calls.setdefault(key, (self.kernel, arguments, options))

        return call


@contextmanager
def recording(module: Any, names: Sequence[str]) -> Iterator[dict[Any, Call]]:
    """The launches inside of kernels of a module."""
    calls: dict[Any, Call] = {}
    with ExitStack() as stack:
        for kernel in names:
            stack.enter_context(mock.patch.object(module, kernel, Recorded(getattr(module, kernel), calls)))
        yield calls


def record(*, dry_run: bool) -> list[Call]:
    """One launch of every variant: kernel, tensors and options, nothing is run."""
    import torch

    from smat_fn import ops, random
    from smat_fn.ops import kernels, library
    from smat_fn.ops.cpu import Numbers
    from smat_fn.simulation.noise import quantiles

    def trees() -> Iterator[tuple[list[Any], list[Any], bool, str]]:
        every = product(DTYPES, (8, 7), (True, False), ("uniform", "gaussian"))
        for dtype, size, masked, noise in islice(every, 1 if dry_run else None):
            leaf = torch.zeros(size, dtype=getattr(torch, dtype))
            yield [leaf], [leaf.clone()], masked, noise
            if dtype == "float32":
                yield [leaf], [leaf.bfloat16()], masked, noise

    zero = torch.zeros((), dtype=torch.float64)
    with library.forced(), recording(kernels, ("simulate_kernel", "reweight_kernel", "climb_kernel")) as calls:
        for params, base, masked, noise in trees():
            streams = random.leaf_streams(random.key(0), ["w"])
            numbers = Numbers(streams, torch.ones(()), zero.long(), zero, quantiles(noise))  # type: ignore[arg-type]
            ops.simulate(params, base, numbers, [masked], [0])
            ops.reweight(params, numbers, [masked], [0])
            for max_norm in (None, 1.0):
                ops.reweight_and_clip({"w": params[0]}, numbers, [masked], max_norm=max_norm, donate=False)
            ops.reweight_and_clip({"w": params[0]}, None, [masked], max_norm=None, donate=False)
            for adaptive in (True,) if dry_run else (True, False):
                ops.climb(params, base, rho=0.5, adaptive=adaptive)
    return list(calls.values())


def record_baseline() -> list[Call]:
    """The same of the kernels of `rand4x`."""
    import torch

    from . import rand4x

    leaves = [torch.zeros(8, dtype=torch.bfloat16)]
    with recording(rand4x, ("simulate_kernel", "reweight_kernel")) as calls:
        rand4x.simulate(leaves, leaves, leaves, [True], seed=7, scale=0.5, drop_prob=0.5, sigma=1e-3)
        rand4x.reweight(leaves, leaves, [True], seed=7, scale=0.5, drop_prob=0.5)
    return list(calls.values())


class Sm90:
    """The device that Triton compiles for, where it asks its driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The program of a launch, compiled in the way of launches."""
    from triton.runtime import driver

    driver.set_active(Sm90())  # for good: without a GPU there is no other
    return kernel.warmup(*arguments, grid=(1,), **options)


def measure(kernel: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Compile one variant and count. Instructions are all of the program's, both sides of a branch included."""
    from smat_fn.ops.launch import OPTIONS

    compiled = compiled_of(kernel, tensors, options)
    ptx, (level, operations) = compiled.asm["ptx"], instructions(compiled)
    widths = Counter(op for op in operations if op.startswith(("LDG", "STG", "ld.global", "st.global")))
    threads, coordinates = 32 * OPTIONS["num_warps"], 8 * options["ROWS"].value
    row = {
        "kernel": kernel.__name__,
        **{n.lower(): str(v) for n, v in options.items() if n not in {*OPTIONS, "ROWS", "INTERPRET"}},
        "counted in": level,
        "instructions per coordinate": round(len(operations) * threads / coordinates, 2),
        **resources(compiled.asm["cubin"]),
        "shared bytes": compiled.metadata.shared,
        "barriers": sum(op.startswith(("BAR", "bar.")) for op in operations),
        "global accesses": dict(sorted(widths.items())),
    }
    return row | {"problems": problems(row, ptx)}


def problems(row: dict[str, Any], ptx: str) -> list[str]:
    """Problems of a compiled variant: instructions that change results or cost bandwidth."""
    found = []
    fused = sorted(set(re.findall(r"\bfma\.[\w.]+|\b(?:mul|add|sub)\.(?:rn\.)?ftz\.[\w.]+", ptx)))
    if fused:
        found.append(f"arithmetic that rounds once or flushes: {', '.join(fused)}")
    if row["aligned"] == "True":
        wide = [op for op in row["global accesses"] if op.endswith(".128") or ".v4.b32" in op]
        loads, stores = (any(op[:2].upper() == kind for op in wide) for kind in ("LD", "ST"))
        measures = row.get("store", str(row["kernel"] != "climb_kernel" or row["norm"] == "False")) == "False"
        if not loads or not (stores or measures):
            found.append(f"no 128-bit accesses: {row['global accesses']}")
        if any("16" in op.split(".")[-1] for op in row["global accesses"]):
            found.append(f"2-byte accesses: {row['global accesses']}")
    return found


def instructions(compiled: Any) -> tuple[str, list[str]]:
    """("sass" or, without nvdisasm, "ptx"; operations in order, no NOP)."""
    predicate = r"(?:@!?%?U?P\w+\s+)?"
    try:
        lines, level, pattern = compiled.asm["sass"].splitlines(), "sass", rf"\t{predicate}([A-Z][A-Z0-9_.]+)"
    except (RuntimeError, OSError, subprocess.SubprocessError):
        lines, level, pattern = compiled.asm["ptx"].splitlines(), "ptx", rf"\t{predicate}([a-z][a-z0-9_.:]+)\s"
    found = (re.search(pattern, line) for line in lines)
    return level, [match[1] for match in found if match and match[1] != "NOP"]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a program; empty without cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.findall(r"REG:(\d+)", text)[0]),
        "stack bytes": int(re.findall(r"STACK:(\d+)", text)[0]),
    }


def name(row: dict[str, Any]) -> str:
    """The name of a compiled variant in the table: kernel, dtypes and options."""
    other = row.get("base") or row.get("slope") or row["dtype"]
    words = [row["dtype"] if other == row["dtype"] else f"{row['dtype']} on {other}"]
    words += ["table noise"] if row.get("noise") == "2" else []
    words += [flag for flag in ("adaptive", "masked", "norm", "clip", "store", "aligned") if row.get(flag) == "True"]
    return f"{row['kernel'].removesuffix('_kernel')} {', '.join(words)}"


def table(rows: list[dict[str, Any]]) -> str:
    """The compiled variants as a Markdown table."""
    columns = ("instructions per coordinate", "registers", "stack bytes", "shared bytes", "barriers")
    lines = []
    for row in rows:
        wide = sum(n for op, n in row["global accesses"].items() if op.endswith(".128") or ".v4.b32" in op)
        lines.append([name(row), *(str(row.get(c, "")) for c in columns), str(wide)])
    return markdown([NOTE, *columns, "128-bit"], lines).rstrip()
