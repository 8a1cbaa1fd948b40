"""Put mutants into copies of the repository and run the tests of their folders."""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from smat_fn.checkpoint import write_text

from .catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.json"
COPIED = "smat_fn", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "train.py", "merge.py", "eval.py"
# where the tests of a part are, if not in the folder of its name
TESTS = {
    "grad": "tests/core/test_grad.py",
    "grad/trained.py": "tests/mat/test_around.py",
    "grouped.py": "tests/core/test_grouped.py",
    "tree.py": "tests/core/test_grad.py",
    "where.py": "tests/core/test_where.py",
    "scripts": "tests/scripts/train",
    "scripts/train/loop.py:_expert": "tests/parallel/test_parallel.py",
    "scripts/train/loop.py:_moments": "tests/parallel/test_parallel.py",
    "scripts/train/loop.py:_on_frozen_shards": "tests/parallel/test_parallel.py",
    "lora/per_module.py:_hiding": "tests/parallel/test_parallel.py",
    "scripts/train/dev_curve.py:DevCurve": "tests/parallel/test_parallel.py",
    "scripts/train/training.py:Kept": "tests/parallel/test_parallel.py",
    "errors.py": "tests/core/test_errors.py",
    "models/modules.py": "tests/models/test_modules.py",
    "folders/streaming/chunks.py": "tests/folders/test_chunks.py",
    "merge/parts/arithmetic.py:gram_memory": "tests/merge/test_arithmetic.py",
    "merge/karcher.py:Karcher": "tests/scripts/merge/subcommands/test_recipe.py",
    "merge/parts/windows.py": "tests/merge/test_loops.py",
    "merge/parts/looped_ranks.py": "tests/merge/test_loops.py",
    "merge/parts/sampled.py": "tests/merge/test_loops.py",
    "simulation/state.py:check_max_norm": "tests/optim/test_chain.py",
    "simulation/state.py:draw_parts": "tests/parallel/test_parallel.py",
    "parallel/shards.py:ShardWeights": "tests/integrations/test_shards.py",
    "parallel/shards.py:base_shards": "tests/integrations/test_shards.py",
    "parallel/shards.py:restart": "tests/integrations/test_shards.py",
    "parallel/shards.py:_shards_in": "tests/integrations/test_shards.py",
    "parallel/sharded.py:_unsharded": "tests/parallel/test_parallel.py",
    "parallel/sharded.py:sharded_copy": "tests/parallel/test_parallel.py",
    "ops/climb.py:climb_into": "tests/parallel/test_parallel.py",
    "tree.py:global_norm": "tests/parallel/test_parallel.py",
    "tree.py:partition": "tests/parallel/test_parallel.py",
    "optim/muon.py:_on_shards": "tests/parallel/test_parallel.py",
    "_loops.py": "tests/folders/test_loops.py",
    "_loops.py:ranked_by_buckets": "tests/ops/test_loops.py",
    "_loops.py:_insert": "tests/ops/test_loops.py",
    "_loops.py:_buckets": "tests/ops/test_loops.py",
    "_loops.py:_ranked_rest": "tests/ops/test_loops.py",
    "scripts/commands/train.py": "tests/commands/test_scripts.py",
    "scripts/commands/merge.py": "tests/commands/test_merge.py",
    "scripts/merge/subcommands/by_recipe.py": "tests/commands/test_merge.py",
    "scripts/recipes/several.py": "tests/scripts/merge/subcommands/test_file_of_merges.py",
    "scripts/merge/subcommands/transport.py": "tests/scripts/merge/subcommands/test_transport.py",
    "scripts/merge/search/over.py": "tests/scripts/merge/search/test_search_over.py",
    "scripts/merge/search/outside.py": "tests/commands/test_search_by_score.py",
    "folders/searching.py": "tests/folders/test_searching.py",
    "folders/transplant.py": "tests/folders/test_transplant.py",
    "folders/inputs/spelling.py": "tests/folders/test_transplant.py",
    "folders/inputs/adapters/changes.py": "tests/folders/test_products.py",
    "folders/inputs/adapters/products.py": "tests/folders/test_products.py",
    "folders/inputs/adapters/experts.py": "tests/folders/test_products.py",
    "folders/inputs/quantised.py": "tests/folders/test_quantised.py",
    "folders/inputs/quantised_values.py": "tests/folders/test_quantised.py",
    "folders/inputs/adapters/places.py": "tests/folders/test_original_names.py",
    "folders/inputs/adapters/original_names.py": "tests/folders/test_original_names.py",
    "folders/inputs/adapters/original_names.py:flat": "tests/folders/test_lora_files.py",
    "folders/inputs/adapters/other_tools.py": "tests/folders/test_original_names.py",
    "folders/inputs/adapters/other_tools.py:scale_of_module": "tests/folders/test_lora_files.py",
    "folders/inputs/adapters/factors.py": "tests/folders/test_combining_files.py",
    "folders/inputs/adapters/file_factors.py": "tests/folders/test_combining_files.py",
    "merge/around/pursuit.py:_pursued": "tests/merge/test_pursuit.py",
    "merge/around/pursuit.py:combined": "tests/merge/test_pursuit.py",
    "merge/parts/per_expert.py:Scaled": "tests/merge/test_weighted.py",
    "merge/parts/per_expert.py:combined": "tests/merge/test_stitching.py",
    "merge/around/select.py:choose_coef": "tests/folders/test_searching.py",
    "merge/around/select.py:combinations": "tests/folders/test_searching.py",
    "merge/around/weights.py": "tests/merge/test_select_weights.py",
    "report/tables.py:relative_table": "tests/report/test_tables.py",
    "report/tables.py:other_table": "tests/report/test_tables.py",
    "scripts/evaluate/evaluation.py:_with_other_tasks": "tests/scripts/evaluate/test_other_tasks.py",
    "analyses/disentanglement.py": "tests/analyses/test_disentanglement.py",
    "scripts/analyse/scores.py": "tests/commands/test_analyses.py",
    "scripts/analyse/weights.py": "tests/commands/test_analyses.py",
}
NICE = 15  # of the tests
LIMIT = 900  # seconds of one run of a folder's tests; a mutant that takes longer has failed
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.M)

HEAD = """# Mutation check

`make mutants` puts small faults into a copy of the library, one at a time (sign flips, off-by-one, swapped arguments,
dropped terms), and runs the tests in the folder of the fault's package until one fails (for `grad` and `tree.py`
`tests/core/test_grad.py`, for `where.py` and `errors.py` their files in `tests/core`, for the compiled loops and what
calls them `test_loops.py` of `tests/folders`, `tests/merge` or `tests/ops`, for `scripts` `tests/scripts/train`, for
options of the scripts a file of `tests/commands`). `benchmarks/mutants/catalogue.py` lists the faults. A fault whose
place in the source is gone is reported, not skipped; a fault runs again when its file, or the test that found it, has
changed.
`benchmarks/results/mutants.json` names the test that found each fault.
"""

Result = dict[str, Any]
T = TypeVar("T")


def main(arguments: Sequence[str]) -> None:
    """Run mutants whose result is missing or stale; exit status 1 for anchors that are gone and for survivors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mutants", description=__doc__)
    parser.add_argument("places", nargs="*", help="parts of places, for example merge/ties.py; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and anchors that are gone")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.places or any(part in m.place for part in options.places)]
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    waiting, gone = [], []
    for mutant in chosen:
        try:
            text = mutated(ROOT, mutant)
        except ValueError as error:
            gone.append(str(error))
            continue
        found = stored.get(name(mutant), {})
        if not found or found["version"] != digest(ROOT, mutant, text, found["killer"]):
            waiting.append(mutant)
    print(f"{len(chosen)} mutants, {len(waiting)} to run, {len(gone)} anchors are gone")
    if waiting and not options.dry_run:
        run_all(waiting, stored, jobs=options.jobs)
    if not options.dry_run:
        kept = {name(m): {**stored[name(m)], "equivalent": m.equivalent} for m in MUTANTS if name(m) in stored}
        store(kept)
        write_text(ROOT / "docs/mutants.md", page(kept))
    survivors = [name(m) for m in chosen if survives(m, stored)]
    print("\n".join([*gone, *(f"survives: {text}" for text in survivors)]))
    sys.exit(bool(gone or survivors))


def name(mutant: Mutant) -> str:
    """The key of a mutant in the results."""
    return f"{mutant.place}: {mutant.old} -> {mutant.new}"


def survives(mutant: Mutant, stored: dict[str, Result]) -> bool:
    """Whether a mutant has run, no test failed, and no reason is given."""
    return name(mutant) in stored and not stored[name(mutant)]["killer"] and not mutant.equivalent


def tests_of(mutant: Mutant) -> str:
    """The folder, or file, of the tests that must find a mutant."""
    part = mutant.place.partition(":")[0].partition("/")[0]
    return TESTS.get(mutant.place) or TESTS.get(part, f"tests/{part}")


def mutated(root: Path, mutant: Mutant) -> str:
    """The text of the mutant's file, changed. Raises: ValueError for an anchor that is not there just once."""
    file, _, inside = mutant.place.partition(":")
    path = root / "smat_fn" / file
    if not path.exists():
        raise ValueError(f"{mutant.place}: no file {path.relative_to(root)}: give its new place")
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    begins = [0]
    for line in text.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset

    nodes = list(ast.walk(tree))
    within = [(0, len(text.encode()))]
    if inside:
        within = [span(n) for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == inside]
        if len(within) != 1:
            raise ValueError(f"{mutant.place}: {inside} is defined {len(within)} times in {file}: name another place")
    strings = [span(n) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    data, old = text.encode(), mutant.old.encode()
    found = [
        match.start()
        for match in re.finditer(re.escape(old), data)
        if within[0][0] <= match.start() < within[0][1] and not any(a <= match.start() < b for a, b in strings)
    ]
    if len(found) != 1:
        problem = f"is there {len(found)} times" if found else "is gone"
        raise ValueError(f"{mutant.place}: the anchor {mutant.old!r} {problem}: anchor the mutant anew")
    changed = (data[: found[0]] + mutant.new.encode() + data[found[0] + len(old) :]).decode()
    ast.parse(changed)  # a mutant is a program
    return changed


def digest(root: Path, mutant: Mutant, text: str, killer: str) -> str:
    """A hash of a mutant's file and of the test that fails, or, if none does, of all tests of the folder.

    Comments and docstrings do not count: no test depends on them.
    """
    place = root / (killer.partition("::")[0].partition(" ")[0] or tests_of(mutant))
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []
    found = hashlib.blake2b(code_of(text).encode(), digest_size=8)
    for file in files:
        found.update(code_of(file.read_text(encoding="utf-8")).encode())
    return found.hexdigest()


def code_of(text: str) -> str:
    """A program without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [one for one in node.body if not _is_text(one)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Copy:
    """A copy of the repository, and a process at low priority that runs tests in it (`server`)."""

    def __init__(self, folder: Path) -> None:
        self.root = copy_to(folder)
        # modules that no mutant is in are compiled once
        own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        own |= {"TRITON_INTERPRET": "1", "CI": ""}
        self._server = subprocess.Popen(
            ["nice", "-n", str(NICE), sys.executable, str(folder / "benchmarks/mutants/server.py")],
            cwd=folder,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pytest(self, *tests: str) -> tuple[int, str]:
        """Exit status and output of some tests."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out = self.root / "output.txt"
        self._server.stdin.write(json.dumps({"tests": tests, "out": str(out), "limit": LIMIT}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        return json.loads(answer), out.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process."""
        self._server.communicate()


def run_all(waiting: Sequence[Mutant], stored: dict[str, Result], *, jobs: int) -> None:
    """Run mutants, several at a time, each in a copy of its own; results are stored as they come."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            copies.put(copy := Copy(Path(folder) / str(job)))
            stack.callback(copy.close)

        def in_a_copy(task: Callable[[Copy], T]) -> T:
            copy = copies.get()
            try:
                return task(copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            folders = sorted({tests_of(mutant) for mutant in waiting})
            for tests, (status, output) in zip(
                folders, pool.map(lambda tests: in_a_copy(lambda copy: copy.pytest(tests)), folders), strict=True
            ):
                if status:
                    raise SystemExit(f"{tests} fail without any mutant:\n{output}")
            running = {pool.submit(in_a_copy, partial(run, mutant, stored)): mutant for mutant in waiting}
            for count, done in enumerate(as_completed(running), start=1):
                mutant, result = running[done], done.result()
                stored[name(mutant)] = {**result, "equivalent": mutant.equivalent}
                store(stored)
                print(f"{count}/{len(waiting)} {name(mutant)}\n    {result['killer'] or 'SURVIVES'}", flush=True)


def copy_to(folder: Path) -> Path:
    """A copy of the library, its tests and what they read."""
    folder.mkdir()
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, folder / part)
    return folder


def likely(mutant: Mutant, stored: dict[str, Result]) -> list[str]:
    """Tests to try before the whole folder: the one that failed before, and the files that find most in this folder."""
    own, folder = stored.get(name(mutant), {}).get("killer", ""), tests_of(mutant)
    files = [result["killer"].partition("::")[0] for result in list(stored.values()) if "::" in result["killer"]]
    often = [file for file, _ in Counter(file for file in files if file.startswith(folder)).most_common(2)]
    return [own, f"{folder}/test_{Path(mutant.place.partition(':')[0]).stem}.py", *often]


def whole(root: Path, tests: str) -> tuple[str, ...]:
    """A folder as its files, the longest first, and then its subfolders: what is most likely to fail comes first."""
    if not (root / tests).is_dir():
        return (tests,)
    files = sorted((root / tests).glob("test_*.py"), key=lambda file: -file.stat().st_size)
    folders = {file.parent for file in (root / tests).rglob("test_*.py")} - {root / tests}
    return tuple(str(path.relative_to(root)) for path in (*files, *sorted(folders)))


def run(mutant: Mutant, stored: dict[str, Result], copy: Copy) -> Result:
    """The first test that fails, and seconds. Args: stored: results so far, which say what is likely to fail."""
    path = copy.root / "smat_fn" / mutant.place.partition(":")[0]
    clean, begun = path.read_text(encoding="utf-8"), time.perf_counter()
    killer = ""
    try:
        changed = mutated(copy.root, mutant)
        path.write_text(changed, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # the same size and second may be no change
        for tests in dict.fromkeys([*((test,) for test in likely(mutant, stored)), whole(copy.root, tests_of(mutant))]):
            if not killer and all(test and (copy.root / test.partition("::")[0]).exists() for test in tests):
                status, output = copy.pytest(*tests)
                killer = killer_in(status, output, tests_of(mutant))
    finally:
        path.write_text(clean, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    seconds = round(time.perf_counter() - begun, 1)
    return {"killer": killer, "seconds": seconds, "version": digest(copy.root, mutant, changed, killer)}


def killer_in(status: int, output: str, tests: str) -> str:
    """The first failed test, or "" if all passed. Raises: RuntimeError if pytest could not run."""
    if status in (0, 4, 5):  # 5: no tests; 4: the test that was likely is gone
        return ""
    if match := FAILED.search(output):
        return match[1]
    if status < 0:
        return f"{tests} (ended by signal {-status}, or not within {LIMIT} s)"
    raise RuntimeError(f"pytest {tests} ended with {status} and no failed test:\n{output}")


def store(results: dict[str, Result]) -> None:
    """Write the results."""
    write_text(RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of the results by the names of mutants."""
    left = {name: result for name, result in results.items() if not result["killer"]}
    count = f"{len(results)} faults, {len(results) - len(left)} found by a test, {len(left)} not."
    lines = [HEAD, count, "", "## Not found", ""]
    if left:
        lines += ["| Place | Fault | Reason |", "| --- | --- | --- |"]
        lines += [row(name, result["equivalent"] or "none yet: a test is missing") for name, result in left.items()]
    else:
        lines += ["None."]
    return "\n".join(lines) + "\n"


def row(name: str, last: str) -> str:
    """A line of a table."""
    place, _, change = name.partition(": ")
    old, _, new = change.partition(" -> ")
    fault = f"`{old}` becomes `{new}`" if new else f"`{old}` is left out"
    return f"| `smat_fn/{place}` | {fault} | {last} |"
