"""Merging of folders on disk against mergekit on random Llama-shaped checkpoints: time and anonymous memory.

Every merge is a process of its own, the inputs are in the page cache, the clock starts after the imports, also those
that numba leaves for the first call of a loop. The floor reads all inputs and writes as many bytes as the merge, as
plain bytes in one thread: base's size, or of `emr` and `tall_mask`, whose one folder has the models of all experts, a
float32 vector and a bit a weight for each expert. It, ours and mergekit's take turns, and so do the whole commands of
both, with imports, checks, hashes and model card.
"""

import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from smat_fn import config as mergers
from smat_fn import machine
from smat_fn.config import MergerConfig as Merging
from smat_fn.merge.parts.masked import of_all_tasks

from . import timing
from .shapes import llama

ROOT = Path(__file__).parent.parent
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 32000}
# its embedding has more weights than are sorted, its rows are longer too, so that the loops that count are compiled
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}
LONG = 10.0  # seconds
DELTA = 1e-3  # RMS of the experts' changes; the weights' is 0.02

# one process a merge; it says "ready" when all is imported, merges on a line of input, and says "done"
OURS = """
import sys, torch
from pathlib import Path
from smat_fn import execution, random
from smat_fn.config import *
from smat_fn.folders import merge_folders
config, base, out, *experts = sys.argv[1:]
names = [Path(e).name for e in experts]
torch.set_num_threads(1)
execution.loops()
torch.zeros(1, device={device!r})  # a GPU's context
inputs = Path(base), {{Path(e).name: Path(e) for e in experts}}, Path(out)
print("ready", flush=True); sys.stdin.readline()
merge_folders(eval(config), *inputs, key=random.key(0), workers={threads}, device={device!r})
print("done", flush=True); sys.stdin.readline()
"""
THEIRS = """
import json, sys, torch
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
torch.set_num_threads({threads})
config = MergeConfiguration.model_validate(json.loads(sys.argv[1]))
torch.zeros(1, device={device!r})
print("ready", flush=True); sys.stdin.readline()
options = MergeOptions(copy_tokenizer=False, random_seed=42, quiet=True, device={device!r})
run_merge(config, sys.argv[2], options)
print("done", flush=True); sys.stdin.readline()
"""
FLOOR = """
import os, sys
from pathlib import Path
base, out, *experts = map(Path, sys.argv[1:])
print("ready", flush=True); sys.stdin.readline()
out.mkdir()
buffer, left = memoryview(bytearray(1 << 22)), {written}
with open(out / "model.safetensors", "wb", buffering=0) as target:
    for folder in (*experts, base):
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as source:
                while count := source.readinto(buffer):
                    left -= target.write(buffer[:min(count, left)])
    os.fsync(target)
print("done", flush=True); sys.stdin.readline()
"""
Merger = Literal[
    "wa", "ta", "ties, threshold per tensor", "ties, threshold per expert", "ties, weights", "dare", "dare_ties",
    "dare_ties, weights and L1 norms", "della", "breadcrumbs", "karcher", "sce", "sce, density 0.1", "ram",
    "ram, boost", "model_stock", "multislerp", "pcb", "arcee_fusion", "emr", "tall_mask",
]  # fmt: skip
WEIGHTED = "weights=dict.fromkeys(names, 0.3)"  # names: of the experts
MERGERS: dict[Merger, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "wa": ("WeightAverage()", "linear", {}, {"weight": 1.0}),
    "ta": ("TaskArithmetic(coef=0.3)", "task_arithmetic", {"lambda": 0.3, "normalize": False}, {"weight": 1.0}),
    "ties, threshold per tensor": (
        "Ties(coef=0.3, keep=0.5, aggregate='sum', scope='tensor')",
        "ties",
        {"lambda": 0.3, "normalize": False},
        {"weight": 1.0, "density": 0.5},
    ),
    # mergekit has no threshold over a whole model: its time is that of one per tensor
    "ties, threshold per expert": (
        "Ties(coef=0.3, keep=0.5, aggregate='sum', scope='global')",
        "ties",
        {"lambda": 0.3, "normalize": False},
        {"weight": 1.0, "density": 0.5},
    ),
    "ties, weights": (
        f"Ties(coef=1.0, keep=0.6, aggregate='sum', scope='tensor', {WEIGHTED})",
        "ties",
        {"normalize": False},
        {"weight": 0.3, "density": 0.6},
    ),
    "dare": ("Dare(coef=0.3, drop_prob=0.3)", "dare_linear", {"lambda": 0.3}, {"weight": 1.0, "density": 0.7}),
    "dare_ties": ("DareTies(coef=0.3, drop_prob=0.3)", "dare_ties", {"lambda": 0.3}, {"weight": 1.0, "density": 0.7}),
    "dare_ties, weights and L1 norms": (  # both by default in mergekit
        f"DareTies(coef=1.0, drop_prob=0.4, rescale=True, {WEIGHTED})",
        "dare_ties",
        {"normalize": False},
        {"weight": 0.3, "density": 0.6},
    ),
    "breadcrumbs": (
        "Breadcrumbs(coef=0.3, drop_smallest=0.45, drop_largest=0.05, count='kept')",
        "breadcrumbs",
        {"lambda": 0.3, "normalize": False},
        {"weight": 1.0, "density": 0.5, "gamma": 0.05},
    ),
    "della": (
        "Della(coef=1.0, drop_prob=0.5, window=0.14)",
        "della",
        {"lambda": 1.0},
        {"weight": 1.0, "density": 0.5, "epsilon": 0.07},
    ),
    "karcher": ("Karcher()", "karcher", {}, {}),
    "sce": ("Sce()", "sce", {"select_topk": 1.0}, {}),
    "sce, density 0.1": ("Sce(density=0.1)", "sce", {"select_topk": 0.1}, {}),
    "ram": ("Ram()", "ram", {}, {}),
    "ram, boost": ("Ram(boost=0.1, cap=0.2, scope='tensor')", "ramplus_tl", {}, {}),
    "model_stock": ("ModelStock()", "model_stock", {}, {}),
    "multislerp": ("MultiSlerp()", "multislerp", {}, {"weight": 1.0}),
    "pcb": ("Pcb(coef=0.3)", "", {}, {}),  # mergekit has none
    "arcee_fusion": ("ArceeFusion()", "", {}, {}),  # of two experts; mergekit's changes base by one
    "emr": ("Emr()", "", {}, {}),  # this and the next one make a folder for all experts' tasks, mergekit has neither
    "tall_mask": ("TallMask(ratio=0.4)", "", {}, {}),
}
WITHOUT_BASE = "linear", "karcher"  # of mergekit
Case = Literal["bfloat16", "float32", "embedding"]
DTYPES: dict[Case, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float32": torch.float32, "embedding": torch.bfloat16
}  # fmt: skip
SAME_BITS = "wa", "ta"  # TIES: equal magnitudes are common in bfloat16, and mergekit takes any of them


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    mergekit: str | None = os.environ.get("MERGEKIT_PYTHON")
    """A Python that has mergekit (default: $MERGEKIT_PYTHON); without one, no comparison."""
    small: bool = False
    """Tiny checkpoints."""
    out: Path | None = None
    """File for results (default: merge.json, on a GPU merge_gpu.json, in benchmarks/results; none with --small or
    without the case bfloat16)."""
    experts: int = 7
    """Number of experts."""
    threads: int = 2
    """Threads of a merge."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where both compute; on a GPU the outputs are also compared with those of the CPU."""
    repeats: int = 1
    """Runs of what takes less than 10 s; the best counts."""
    mergers: tuple[Merger, ...] = tuple(name for name, (_, method, *_) in MERGERS.items() if method)
    """Mergers to compare: those of mergekit, not pcb, arcee_fusion (of two experts), emr and tall_mask, by default."""
    cases: tuple[Case, ...] = get_args(Case)
    """A model in bfloat16, the same in float32, one embedding in bfloat16."""
    embedding: tuple[int, int] = (262144, 4096)
    """Rows and columns of the embedding."""
    embedding_experts: int = 2
    """Experts of it."""

    def experts_of(self, case: Case) -> int:
        """Number of experts."""
        return self.embedding_experts if case == "embedding" else self.experts


def main(options: Options) -> None:
    """Print a table for each case and store the results."""
    rows: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    for case in options.cases:
        compile_loops(case, options)
        with tempfile.TemporaryDirectory(prefix="merge-") as name:
            base, experts = checkpoints(Path(name), case, options)
            sizes[case] = round(sum(file.stat().st_size for file in base.glob("*.safetensors")) / 1e6)
            theirs: dict[str, tuple[Cost, Cost] | str] = {}
            for merger in options.mergers:
                rows.append({"case": case} | compare(merger, base, experts, case, options, theirs))
                print(json.dumps(rows[-1]), flush=True)
    for case in options.cases:
        print(f"{case}\n\n{timing.markdown([row for row in rows if row['case'] == case])}")
    own = "merge.json" if options.device == "cpu" else "merge_gpu.json"
    stored = None if options.small or "bfloat16" not in options.cases else timing.RESULTS / own
    if (file := options.out or stored) is not None:
        describe = machine.describe if options.device == "cpu" else timing.describe
        facts = describe("python -m benchmarks merge " + shlex.join(_public(sys.argv[2:])))
        names = "threads", "device", "repeats", "experts", "embedding", "embedding_experts"
        facts |= {name: getattr(options, name) for name in names}
        facts |= {"model": SMALL if options.small else LARGE, "MB": sizes, "MB of a model": sizes.get("bfloat16")}
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()  # loops and sorts use them too
        facts |= {"mergekit": _version(options.mergekit), "load at the end": os.getloadavg()[0], "rows": rows}
        timing.store(file, facts)


def compile_loops(case: Case, options: Options) -> None:
    """Merge something small by every merger, so that no merge that counts is the first one of its kind."""
    with tempfile.TemporaryDirectory(prefix="merge-") as name:
        base, experts = checkpoints(Path(name), case, replace(options, small=True, experts=2))
        for merger, device in itertools.product(options.mergers, sorted({"cpu", options.device})):
            words = OURS.format(threads=1, device=device), MERGERS[merger][0]
            measure([sys.executable, "-c", *words, *map(str, (base, Path(name) / f"{merger}-{device}", *experts))], 1)


def checkpoints(folder: Path, case: Case, options: Options) -> tuple[Path, list[Path]]:
    """A random Llama, or an embedding, and experts at small distances."""
    torch.manual_seed(0)
    base, sizes = folder / "base", SMALL if options.small else LARGE
    if case == "embedding":
        # mergekit asks for a known architecture, which a model without layers has
        rows, columns = (512, 64) if options.small else options.embedding
        sizes = {**SMALL, "num_hidden_layers": 0, "vocab_size": rows, "hidden_size": columns}
    heads, tied = sizes["hidden_size"] // 64 or 1, case == "embedding"
    model: Any = llama({**sizes, "num_attention_heads": heads, "tie_word_embeddings": tied})
    model.to(DTYPES[case]).save_pretrained(base)
    experts = [folder / f"expert-{i}" for i in range(options.experts_of(case))]
    for expert in experts:
        expert.mkdir()
        with safe_open(base / "model.safetensors", framework="pt") as held:
            leaves = {name: _moved(held.get_tensor(name)) for name in held.keys()}  # noqa: SIM118
        save_file(leaves, expert / "model.safetensors", {"format": "pt"})
        (expert / "config.json").write_text((base / "config.json").read_text())
    os.sync()  # or the first merges would share the disk with what is still to be written
    return base, experts


def _moved(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf at a small distance; by the row, since an embedding may be large."""
    rows = [(row + DELTA * torch.randn(row.shape)).to(leaf.dtype) for row in leaf.split(1 << 12)]
    return torch.cat(rows)


class Cost(NamedTuple):
    """Cost of one merge: the best of several runs."""

    seconds: float
    cpu: float  # of all threads: less than seconds x threads where other processes had the cores
    megabytes: float  # of anonymous memory at the peak, above that after the imports


def compare(
    merger: Merger,
    base: Path,
    experts: Sequence[Path],
    case: Case,
    options: Options,
    known: dict[str, tuple[Cost, Cost] | str],
) -> dict[str, Any]:
    """Cost of one merge by both; mergekit computes in float32 too. ``known``: of mergekit's runs, by recipe."""
    folder, threads = base.parent, options.threads
    config, method, *_ = MERGERS[merger]
    ours, other, copied, command, theirs_command = (
        folder / n for n in ("ours", "theirs", "floor", "ours-2", "theirs-2")
    )
    recipe = folder / "recipe.yml"
    recipe.write_text(text := json.dumps(_recipe(merger, base, experts, case)))  # JSON is YAML
    floor = FLOOR.format(written=written(config, base, experts, case))
    scripts = {copied: [floor], ours: [OURS.format(threads=threads, device=options.device), config]}
    candidates: dict[Path, Callable[[], Cost]] = {
        to: partial(measure, [sys.executable, "-c", *words, *map(str, (base, to, *experts))], threads)
        for to, words in scripts.items()
    }
    if WEIGHTED in config:
        words = [sys.executable, str(ROOT / "merge.py"), str(recipe), "--threads", str(threads)]
    else:
        words = _words(config, base, experts, threads)
    words += ["--device", options.device]
    candidates[command] = partial(whole, [*words, "--out", str(command)], threads)
    if options.mergekit and method and text not in known:
        known[text] = _too_large(base, experts)
    if options.mergekit and method and not known[text]:
        inner = [options.mergekit, "-c", THEIRS.format(threads=threads, device=options.device), text, str(other)]
        entire = [options.mergekit, "-m", "mergekit.scripts.run_yaml", str(recipe), str(theirs_command), "--quiet"]
        candidates[other] = partial(measure, inner, threads)
        candidates[theirs_command] = partial(
            whole, [*entire, "--random-seed", "42", "--no-copy-tokenizer", "--device", options.device], threads
        )
    copying, own, entire_own, *rest = best(candidates, options.repeats)
    row: dict[str, Any] = {"merger": merger, "s": own.seconds, "cpu s": own.cpu, "MB": own.megabytes}
    row |= {"floor s": copying.seconds, "floor cpu s": copying.cpu}
    row["times the floor"] = round(own.seconds / max(copying.seconds, 0.01), 2)
    row |= {"command s": entire_own.seconds, "command cpu s": entire_own.cpu}
    if rest:
        known[text] = (rest[0], rest[1])
    row |= _beside(own, entire_own, known.get(text, ""))
    if merger in SAME_BITS and other.exists():
        row["differing coordinates"] = differing(ours, other)
    if options.device != "cpu":
        again = OURS.format(threads=threads, device="cpu"), config, str(base), str(folder / "on-cpu")
        on_cpu = measure([sys.executable, "-c", *again, *map(str, experts)], threads)
        row |= {"s on the CPU": on_cpu.seconds, "other bits than the CPU's": differing(ours, folder / "on-cpu")}
        shutil.rmtree(folder / "on-cpu")
    for used in candidates:
        shutil.rmtree(used, ignore_errors=True)
    return row


def written(config: str, base: Path, experts: Sequence[Path], case: Case) -> int:
    """Bytes of weights that a merge writes, but for the headers of files."""
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if not of_all_tasks(_config(config)):
        return size
    weights = size // DTYPES[case].itemsize
    return 4 * weights + len(experts) * (weights // 8)


def _config(text: str) -> Merging:
    """The configuration of one of `MERGERS`."""
    found: Merging = eval(text, vars(mergers), {"names": []})
    return found


def _beside(ours: Cost, command: Cost, theirs: tuple[Cost, Cost] | str) -> dict[str, Any]:
    """Costs of mergekit and their ratios to ours, or why there are none."""
    if isinstance(theirs, str):
        return {"no mergekit": theirs} if theirs else {}
    inner, entire = theirs
    row = {"mergekit s": inner.seconds, "mergekit cpu s": inner.cpu, "mergekit MB": inner.megabytes}
    row["time ratio"] = round(inner.seconds / max(ours.seconds, 0.01), 2)
    row["cpu ratio"] = round(inner.cpu / max(ours.cpu, 0.01), 2)
    row["memory ratio"] = round(inner.megabytes / max(ours.megabytes, 0.1), 1)
    row |= {"mergekit command s": entire.seconds, "mergekit command cpu s": entire.cpu}
    return row | {"command ratio": round(entire.seconds / max(command.seconds, 0.01), 2)}


def _words(config: str, base: Path, experts: Sequence[Path], threads: int) -> list[str]:
    """merge.py with the options of a merger."""
    found = _config(config)
    defaults = {field.name: field.default for field in fields(found)}
    given = [(name, value) for name, value in found.settings().items() if isinstance(value, (int, float, str))]
    options = [
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"  # a flag has no value
        for name, value in ((name.replace("_", "-"), value) for name, value in given if value != defaults[name])
    ]
    inputs = ["--base", str(base), "--experts", *map(str, experts), "--threads", str(threads)]
    return [sys.executable, str(ROOT / "merge.py"), found.name, *inputs, *options]


def _too_large(base: Path, experts: Sequence[Path]) -> str:
    """Why mergekit is not run: it holds a float32 copy of every model's tensor, and several of what it computes."""
    with safe_open(base / "model.safetensors", framework="pt") as held:
        largest = max(math.prod(held.get_slice(name).get_shape()) for name in held.keys())  # noqa: SIM118
    needed, free = 4 * largest * (3 * len(experts) + 3), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "" if needed < free else f"may need {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def _recipe(merger: Merger, base: Path, experts: Sequence[Path], case: Case) -> dict[str, Any]:
    """The mergekit recipe for a merger."""
    _, method, top, each = MERGERS[merger]
    models = [{"model": str(expert), "parameters": each} for expert in experts]
    recipe = {"merge_method": method, "models": models, "parameters": top}
    recipe |= {"dtype": "float32", "out_dtype": str(DTYPES[case]).removeprefix("torch.")}
    return recipe | ({} if method in WITHOUT_BASE else {"base_model": str(base)})


def best(candidates: Mapping[Path, Callable[[], Cost]], repeats: int) -> list[Cost]:
    """The least of every cost of several runs by their output, in turns, those of long ones of one run.

    The last outputs stay.
    """
    costs: list[list[Cost]] = [[] for _ in candidates]
    for _ in range(repeats):
        for found, (out, run) in zip(costs, candidates.items(), strict=True):
            if found and found[0].seconds > LONG:
                continue
            shutil.rmtree(out, ignore_errors=True)
            found.append(run())
    return [Cost(*map(min, zip(*found, strict=True))) for found in costs]


def whole(command: Sequence[str], threads: int) -> Cost:
    """The cost of a command from its start to its end, imports and hashing too; of its memory nothing."""
    with tempfile.TemporaryFile("w+") as text:
        begin, before = time.perf_counter(), os.times()
        done = subprocess.run(command, stdout=text, stderr=text, env=_environment(threads), check=False)
        seconds, after = time.perf_counter() - begin, os.times()
        if done.returncode:
            raise RuntimeError(_text(text))
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(round(seconds, 2), round(cpu, 2), 0.0)


def _environment(threads: int) -> dict[str, str]:
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": found}
    return os.environ | own | {"PYTHONDONTWRITEBYTECODE": ""}  # an installed package has its bytecode


def measure(command: Sequence[str], threads: int) -> Cost:
    """The cost of a process, watched from outside."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(threads)
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError(_text(errors))
        start = peak = timing.anonymous_memory(child.pid)
        cpu, begin = _cpu(child.pid), time.perf_counter()
        child.stdin.write("\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        while "done" not in (child.stdout.readline() or ""):
            if child.poll() is not None:
                raise RuntimeError(_text(errors))
            peak = max(peak, timing.anonymous_memory(child.pid))
            time.sleep(0.005)
        seconds, cpu = time.perf_counter() - begin, _cpu(child.pid) - cpu
        child.stdin.write("\n")
    return Cost(round(seconds, 2), round(cpu, 2), round((peak - start) / 1e6, 1))


def differing(left: Path, right: Path) -> int:
    """Coordinates whose bits differ between two checkpoints of the same leaves."""
    found = 0
    placed = [{name: store for store in _stores(folder) for name in store.keys()} for folder in (left, right)]  # noqa: SIM118
    assert placed[0].keys() == placed[1].keys()
    for name in placed[0]:
        ours, theirs = (stores[name].get_tensor(name) for stores in placed)
        bits = {2: torch.int16, 4: torch.int32}[ours.itemsize]
        found += int((ours.view(bits) != theirs.view(bits)).sum())
    return found


def _stores(folder: Path) -> list[Any]:
    return [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]


def _cpu(pid: int) -> float:
    """Seconds that all threads of a process have run."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()[-2000:]


def _version(python: str | None) -> str | None:
    if python is None:
        return None
    show = "from importlib.metadata import version; print(version('mergekit'), 'with torch', version('torch'))"
    return subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


def _public(arguments: Sequence[str]) -> list[str]:
    """The arguments without the path of a Python."""
    return ["PYTHON" if i and arguments[i - 1] == "--mergekit" else word for i, word in enumerate(arguments)]
