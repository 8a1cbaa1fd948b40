"""Every variant of the kernels compiled for sm_90 without a GPU: instructions, registers, spills, width of accesses.

The variants are those that launches ask for: the launches of small trees are recorded and compiled instead of run.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

from smat_fn import machine

from . import timing
from .readme import table as markdown

ROOT = Path(__file__).parent.parent
COMMAND = "python -m benchmarks sass"
DTYPES = ("bfloat16", "float16", "float32")
NOTE = "compiled for sm_90, not run"
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, tensors, options of a launch


def main(*, check: bool = False, dry_run: bool = False) -> None:
    """Compile the variants and print a table.

    Args: check: write no file; dry_run: a few variants only, no file.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels of an interpreting process cannot be compiled
        clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=clean, cwd=ROOT, check=False).returncode)
    rows = [measure(*call) for call in record(dry_run=dry_run)]
    print(table(rows))
    if not (check or dry_run):
        result = {**machine.describe(COMMAND), "note": NOTE, "rows": rows}
        timing.store(timing.RESULTS / "sass.json", result)
    problems = [f"{name(row)}: {problem}" for row in rows for problem in row["problems"]]
    sys.exit("\n".join(problems) if problems else 0)


def record(*, dry_run: bool) -> list[Call]:
    """One launch of every variant: kernel, tensors and options, nothing is run."""
    import torch

    from smat_fn import ops, random
    from smat_fn.ops import kernels, library
    from smat_fn.ops.cpu import Numbers
    from smat_fn.simulation.noise import quantiles

    calls: dict[Any, Call] = {}

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel, self.__name__ = kernel, kernel.__name__

        def __getitem__(self, grid: Any) -> Any:
            def call(*tensors: Any, **options: Any) -> None:
                pointers = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors)
                key = self.__name__, pointers, tuple((k, str(v)) for k, v in options.items())
                calls.setdefault(key, (self.kernel, tensors, options))

            return call

    def trees() -> Iterator[tuple[list[Any], list[Any], bool, str]]:
        every = product(DTYPES, (8, 7), (True, False), ("uniform", "gaussian"))
        for dtype, size, masked, noise in islice(every, 1 if dry_run else None):
            leaf = torch.zeros(size, dtype=getattr(torch, dtype))
            yield [leaf], [leaf.clone()], masked, noise
            if dtype == "float32":
                yield [leaf], [leaf.bfloat16()], masked, noise

    originals = kernels.simulate_kernel, kernels.reweight_kernel
    kernels.simulate_kernel, kernels.reweight_kernel = (Recorded(kernel) for kernel in originals)
    zero = torch.zeros((), dtype=torch.float64)
    try:
        with library.forced():
            for params, base, masked, noise in trees():
                streams = random.leaf_streams(random.key(0), ["w"])
                numbers = Numbers(streams, torch.ones(()), zero.long(), zero, quantiles(noise))  # type: ignore[arg-type]
                ops.simulate(params, base, numbers, [masked], [0])
                ops.reweight(params, numbers, [masked], [0])
                for max_norm in (None, 1.0):
                    ops.reweight_and_clip({"w": params[0]}, numbers, [masked], max_norm=max_norm, donate=False)
                ops.reweight_and_clip({"w": params[0]}, None, [masked], max_norm=None, donate=False)
    finally:
        kernels.simulate_kernel, kernels.reweight_kernel = originals
    return list(calls.values())


def measure(kernel: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Compile one variant and count. Instructions are all of the program's, both sides of a branch included."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from smat_fn.ops.launch import OPTIONS

    pointer = {"float32": "*fp32", "int64": "*i64", "int32": "*i32"}
    names = kernel.arg_names
    signature = {n: "constexpr" for n in names}
    signature |= {n: pointer[str(t.dtype).removeprefix("torch.")] for n, t in zip(names, tensors, strict=False)}
    constants = {(names.index(n),): getattr(v, "value", v) for n, v in options.items() if n not in OPTIONS}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(tensors) if t.data_ptr() % 16 == 0}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
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
        if not loads or (not stores and row.get("store") != "False"):
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
    words = [row["dtype"] if row.get("base", row["dtype"]) == row["dtype"] else f"{row['dtype']} on {row['base']}"]
    words += ["table noise"] if row.get("noise") == "2" else []
    words += [flag for flag in ("masked", "norm", "clip", "store", "aligned") if row.get(flag) == "True"]
    return f"{row['kernel'].removesuffix('_kernel')} {', '.join(words)}"


def table(rows: list[dict[str, Any]]) -> str:
    """The compiled variants as a Markdown table."""
    columns = ("instructions per coordinate", "registers", "stack bytes", "shared bytes", "barriers")
    lines = []
    for row in rows:
        wide = sum(n for op, n in row["global accesses"].items() if op.endswith(".128") or ".v4.b32" in op)
        lines.append([name(row), *(str(row.get(c, "")) for c in columns), str(wide)])
    return markdown([NOTE, *columns, "128-bit"], lines).rstrip()
