"""The documents name nothing that does not exist, and their code runs."""

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path

import pytest

import smat_fn

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT.parent / "shared" / "paper.tex"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```[ ]*$", flags=re.M | re.S)
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
# a file, and perhaps a function in it, as code: `tests/core/test_tree.py::test_cast`
PLACE = re.compile(r"`(?P<file>[\w./-]+\.(?:py|md|json|toml))(?:::(?P<name>\w+))?`")


def prose(document):
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def anchors(document):
    """Anchors of headings as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(document), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def defines(file, name):
    """Whether a file defines a top-level function or class."""
    return re.search(rf"^(?:def|class) {name}\b", file.read_text(encoding="utf-8"), flags=re.M) is not None


def rows():
    """(name, code cell, test cell) of every line of the tables of equations.md."""
    for line in prose(ROOT / "docs" / "equations.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[3] not in ("Tests", "---"):
            name, statement, code, tests = cells
            yield f"{name}: {statement}", code, tests


def lines(code, tests):
    """(functions, tests) of every line of two cells, each a list of (name, file from the root)."""
    cells = ([places(line) for line in cell.split("<br>")] for cell in (code, tests))
    return list(zip(*cells, strict=True))


def places(line):
    return [(text.strip("`"), (ROOT / "docs" / target).resolve()) for text, target in LINK.findall(line)]


def defined(file, name):
    """What a name of a module is, and the file that defines it, if it is a function or class."""
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    value = reduce(getattr, name.split("."), module)
    return value, Path(inspect.getsourcefile(inspect.unwrap(value))) if callable(value) else None


def blocks():
    """(document, first line, code) of every ```python block that stands alone; those marked py are not run.

    The examples of adding_a_*.md are modules, which tests of their own put together.
    """
    for document in DOCUMENTS:
        if not document.name.startswith("adding_a"):
            text = document.read_text(encoding="utf-8")
            for block in FENCE.finditer(text):
                if block["kind"] == "python":
                    yield document, 1 + text[: block.start("code")].count("\n"), block["code"]


ROWS = list(rows())
BLOCKS = list(blocks())


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_relative_links_and_files_resolve(document):
    problems = []
    for _, target in LINK.findall(prose(document)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists():
            problems.append(f"link to {target}: no such file")
        elif anchor and anchor not in anchors(file):
            problems.append(f"link to {target}: no such heading")
    for place, name in PLACE.findall(prose(document)):
        if "/" not in place:
            continue
        if not (ROOT / place).exists():
            problems.append(f"{place}: no such file")
        elif name and not defines(ROOT / place, name):
            problems.append(f"{place} defines no {name}")
    assert not problems, "; ".join(problems)


@pytest.mark.parametrize(("code", "tests"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_line_of_the_equations_names_functions_and_their_tests(code, tests):
    if code.startswith("not "):
        assert code == tests == "not yet" or (code.startswith("not computed: ") and not tests)
        return
    for functions, checks in lines(code, tests):
        assert functions
        assert checks
        for name, file in functions:
            _, origin = defined(file, name)
            assert origin == file or (
                origin is None and re.search(rf"^{name}\b", file.read_text(encoding="utf-8"), flags=re.M)
            ), f"{name} is defined elsewhere"
        for name, file in checks:
            assert name.startswith("test_")
            assert defines(file, name), f"{file} has no {name}"


def test_every_equation_and_proposition_of_the_paper_has_a_line():
    if not PAPER.exists():
        pytest.skip("no ../shared with the paper")
    labels = re.findall(r"\\label\{((?:eq|prop):[^}]*)\}", PAPER.read_text(encoding="utf-8"))
    listed = [name.split("`")[1] for name, *_ in ROWS if name.startswith("`")]
    assert sorted(listed) == sorted(labels)


def test_the_version_is_the_same_everywhere():
    version = re.escape(smat_fn.__version__)
    assert re.search(rf"^## \[{version}\] - ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)


def test_every_document_is_on_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w/-]+\.md$", navigation, flags=re.M))
    pages = {document.relative_to(ROOT / "docs").as_posix() for document in ROOT.glob("docs/**/*.md")}
    protocols = {page for page in pages if page.startswith("protocols/")}  # site_pages.py adds them
    assert pages - protocols - {"README.md"} <= listed


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_code_that_is_not_run_is_python(document):
    """Blocks marked py need data, devices or packages that are not here; fences of an unknown kind are found too."""
    text = document.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        assert block["kind"] in ("", "py", "python", "yaml", "text", "bash")
        if block["kind"] == "py":
            compile(block["code"], f"{document} line {1 + text[: block.start('code')].count(chr(10))}", "exec")


def case(document, line, code):
    slow = (
        [pytest.mark.slow] if "torch.compile(" in code or "@torch.compile" in code else []
    )  # a cold compiler takes long
    return pytest.param(document, line, code, id=f"{document.name} line {line}", marks=slow)


@pytest.mark.parametrize(("document", "line", "code"), [case(*block) for block in BLOCKS])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, inside its compiler
def test_the_code_of_the_documents_runs(document, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # blank lines in front, so that a traceback shows the document's own line
    exec(compile("\n" * (line - 1) + code, str(document), "exec"), {"__name__": "__main__"})


def test_the_pure_step_of_the_readme_goes_on_from_its_loop():
    blocks = FENCE.finditer((ROOT / "README.md").read_text("utf-8"))
    loop, step = [match for match in blocks if re.search(r"schedule\.draw|smat\.build", match["code"])]
    assert (loop["kind"], step["kind"]) == ("python", "py")
    names = {}
    for block in (loop, step):
        exec(block["code"], names)
    assert names["state"].step == 20
    assert names["info"].loss < 1  # the mean square of what an untrained layer norm returns
