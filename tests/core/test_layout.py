"""The package layout: no circle between packages, submodules as attributes, functions that fit on a screen."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "smat_fn"
SOURCES = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / f"{s}.py" for s in ("train", "merge", "eval"))]  # fmt: skip  # noqa: E501


def top(module):
    """The package below smat_fn, or the package of a script, that a module belongs to."""
    parts = module.split(".")[1:] or ["smat_fn"]
    return ".".join(parts[:2]) if parts[0] == "scripts" else parts[0]


@cache
def parsed(file):
    """(import statements, first and last lines of functions) of a file, which is parsed once."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return imports, [(node.lineno, node.end_lineno) for node in nodes if isinstance(node, ast.FunctionDef)]


def imported(file):
    """Modules of smat_fn that a file imports, inside functions and for types alone too."""
    own = ["smat_fn", *file.relative_to(PACKAGE).with_suffix("").parts]
    home = own[:-1]
    for node in parsed(file)[0]:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("smat_fn"))
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "smat_fn":
                for alias in node.names:
                    deeper = PACKAGE.joinpath(*module.split(".")[1:], alias.name)
                    there = deeper.is_dir() or deeper.with_suffix(".py").exists()
                    yield f"{module}.{alias.name}" if there else module


def test_packages_import_each_other_in_no_circle():
    arrows = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "__init__.py":  # names what is below it
            continue
        own = top(".".join(["smat_fn", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"))
        arrows[own] |= {top(module) for module in imported(file) if module != "smat_fn"} - {own}
    try:
        order = list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(f"packages in a circle: {' -> '.join(error.args[1])}")
    assert order.index("types") < order.index("tree") < order.index("mat") < order.index("scripts.train")
    assert order.index("merge") < order.index("folders") < order.index("scripts.merge")


def beyond(folder, *allowed):
    """Imports of a folder's modules that lie in its package, but not in the folder or in ``allowed``."""
    package = f"smat_fn.{folder.split('/')[0]}"
    mine = (f"smat_fn.{folder.replace('/', '.')}", *(f"{package}.{name}" for name in allowed))
    return {
        f"{file.stem}: {module}"
        for file in (PACKAGE / folder).glob("*.py")
        for module in imported(file)
        if f"{module}.".startswith(f"{package}.") and not f"{module}.".startswith(tuple(f"{m}." for m in mine))
    }


def test_what_mergers_are_made_of_imports_no_merger_and_no_merger_what_is_around_them():
    assert not beyond("merge/parts")
    mergers = [*(PACKAGE / "merge").glob("[!_]*.py")]
    assert len(mergers) > 30
    assert not {f"{m.stem}: {name}" for m in mergers for name in imported(m) if name.startswith("smat_fn.merge.around")}


def test_reading_of_folders_imports_neither_merging_nor_writing_and_merging_of_leaves_no_writing():
    assert not beyond("folders/inputs", "files")
    assert not beyond("folders/streaming", "files", "inputs")


def test_training_imports_neither_merging_nor_scoring_and_merging_no_scoring_of_folders():
    order = "recipes", "train", "merge", "evaluate", "analyse", "commands"
    back = {
        f"{file.relative_to(PACKAGE)}: {module}"
        for place, name in enumerate(order)
        for file in (PACKAGE / "scripts" / name).rglob("*.py")
        for module in imported(file)
        if module.split(".")[2:3] and module.split(".")[:2] == ["smat_fn", "scripts"]
        if module.split(".")[2] in order[place + 1 :]
    }
    assert not back


def test_what_merging_is_made_of_imports_nothing_that_stands_on_it():
    order = "experts", "provenance", "on_disk", "search", "in_memory", "subcommands"
    folder = PACKAGE / "scripts/merge"
    assert {file.parent.name for file in folder.rglob("*/*.py")} == {name for name in order if (folder / name).is_dir()}
    back = {
        f"{file.relative_to(folder)}: {module}"
        for place, name in enumerate(order)
        for file in [*folder.glob(f"{name}.py"), *(folder / name).glob("*.py")]
        for module in imported(file)
        if module.split(".")[1:3] == ["scripts", "merge"] and module.split(".")[3] in (*order[place + 1 :], "commands")
    }
    assert not back


def test_functions_above_sixty_lines_say_why():
    silent = []
    for file in SOURCES:
        lines = file.read_text(encoding="utf-8").splitlines()
        for first, last in parsed(file)[1]:
            if last - first >= 60:
                own = lines[first - 2 : last]
                silent += [] if any("# over 60 lines:" in line for line in own) else [f"{file}:{first}"]
    assert not silent, f"split these functions, or say why in a comment '# over 60 lines: ...': {silent}"
