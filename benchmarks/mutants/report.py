"""docs/mutants.md from the stored results."""

from collections.abc import Mapping
from typing import Any

HEAD = """# Mutation check

`make mutants` puts small faults into a copy of the library, one at a time (sign flips, off-by-one, swapped arguments,
dropped terms), and runs the tests of the fault's own folder until one fails; those of `grad` and `where.py` are
`tests/core/test_grad.py` and `tests/core/test_where.py`. The faults stand in `benchmarks/mutants/catalogue.py`. One
whose place in the source has changed is reported, not skipped. A fault runs again when its file, or the test that
found it, has changed.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of the results by the names of mutants."""
    killed = {name: result for name, result in results.items() if result["killer"]}
    left = {name: result for name, result in results.items() if not result["killer"]}
    lines = [HEAD, f"{len(results)} faults, {len(killed)} found by a test, {len(left)} not.", "", "## Not found", ""]
    if left:
        lines += ["| Place | Fault | Reason |", "| --- | --- | --- |"]
        lines += [row(name, result["equivalent"] or "none yet: a test is missing") for name, result in left.items()]
    else:
        lines += ["None."]
    lines += ["", "## Found", "", "| Place | Fault | Found by |", "| --- | --- | --- |"]
    lines += [row(name, f"`{result['killer']}`") for name, result in killed.items()]
    return "\n".join(lines) + "\n"


def row(name: str, last: str) -> str:
    """A line of a table."""
    place, _, change = name.partition(": ")
    old, _, new = change.partition(" -> ")
    fault = f"`{old}` becomes `{new}`" if new else f"`{old}` is left out"
    return f"| `smat_fn/{place}` | {fault} | {last} |"
