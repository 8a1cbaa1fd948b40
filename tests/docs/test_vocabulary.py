"""Texts that users read are in the field's words: no private term of this project, no riddle."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if "results" not in page.parts),  # those are written by runs
]
SOURCES = [
    *(ROOT / f"{name}.py" for name in ("train", "merge", "eval")),
    *sorted([*ROOT.glob("smat_fn/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]),
]
CODE = re.compile(r"^ *```.*?^ *```[ ]*$|``[^`]*``|`[^`]*`", flags=re.M | re.S)
# what not to write: what to write instead
TERMS = {
    r"\bresidences?\b": "offload mode",
    r"\bin house\b|\bthe (?:house|rooms)\b": "the package layout, packages",
    r"\bleaf paths?\b": "parameter names",
    r"\b(?:same|equal) bits\b|\bto the bits?\b": "bit-identical",
    r"(?<!hugging[ -])\bfaces?\b": "a wrapper",
    r"(?<!regularization )\bstrengths?\b": "hyperparameters",
    r"\bmasters\b": "master weights",
    r"\bwidened\b": "upcast",
    r"\bexperts of others\b": "third-party experts",
    r"\bpieces?\b|\bspans?\b": "chunks",
    r"\bjournals?\b": "score cache",
    r"(?<!model )(?<!graphics )\bcards?\b": "model card",
    r"\btold\b": "reported, known, distinguished",
    r"\bgo(?:es)? on\b": "continues, resumes",
    r"\bcan(?:not)? be had\b": "is (un)available",
    r"\blet(?:s|ting)? go\b": "frees, releases",
    r"\bflatter(?:s|ed)?\b": "is optimistic about",
    r"\bspeaks? against\b": "errors, problems",
    r"\b(?:to be|could be) had\b": "available",
    r"\bcall(?:ed|s)? again\b": "rerun",
    r"\bdone before\b": "already finished",
    r"\bmake room\b": "free disk space",
    r"\bwhole or not\b": "atomically",
    r"\bcome what may\b|\bwhatever happens\b": "even after an exception",
    r"\bwhoever\b|\bnobody\b|\bsomebody\b": "the code or process that is meant",
    r"\bone's own\b": "your own",
    r"--[\w-]+ is of\b|\bsay --": "requires, pass",
    r"\bdear to\b": "expensive to",
    r"\bon the spot\b": "when first used",
    r"(?<!there )(?<!here )\b(?:is|are) no (?!more|longer|less|such)[a-z]": "is not a",
}
# (the place's beginning, what is written): the field's own word there
RIGHT = {("smat_fn/merge/wudi.py", "Whoever started"), ("smat_fn/merge/karcher.py", "plane that the experts span")}


def pages():
    for page in PAGES:
        for number, paragraph in enumerate(re.split(r"\n\n+", CODE.sub("", page.read_text(encoding="utf-8"))), start=1):
            yield f"{page.relative_to(ROOT)}, paragraph {number}", paragraph


@cache
def sources():
    """(texts of `docstrings`, texts of `messages`): every file is parsed once."""
    described, said = [], []
    for file in SOURCES:
        place, tree = file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        described += described_in(place, nodes)
        if place.parts[0] != "benchmarks":  # strings there are code to break, or are in a page
            said += said_in(place, nodes)
    return described, said


def docstrings():
    return sources()[0]


def messages():
    return sources()[1]


def described_in(file, nodes):
    """Docstrings (of modules and private functions the first paragraph), and help texts: strings below fields."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            public = file.parts[0] == "smat_fn" and not getattr(node, "name", "_").startswith("_")
            yield f"{file}:{node.body[0].lineno}", CODE.sub("", text if public else text.split("\n\n")[0])
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    yield f"{file}:{after.lineno}", CODE.sub("", str(ast.literal_eval(after.value)))


def said_in(file, nodes):
    """Strings with words in them, other than docstrings: errors, notes and lines that are printed."""
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            alone.update(id(part) for part in node.values)
            constants = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield f"{file}:{node.lineno}", "".join(map(str, constants))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield f"{file}:{node.lineno}", node.value if " " in node.value else ""


ANY = re.compile("|".join(TERMS), flags=re.I)


def found(texts):
    return [
        f"{place}: “{match[0]}” in “{text[max(0, match.start() - 60) : match.end() + 60]}”: say {instead}"
        for place, text in ((place, " ".join(text.split())) for place, text in texts)
        if ANY.search(text)  # most have none, and thirty searches take longer
        for term, instead in TERMS.items()
        for match in re.finditer(term, text, flags=re.I)
        if not any(place.startswith(start) and words in text for start, words in RIGHT)
    ]


@pytest.mark.parametrize("texts", [pages, docstrings, messages])
def test_texts_are_in_the_fields_words(texts):
    assert found(texts()) == []


def test_no_docstring_begins_with_what():
    assert [place for place, text in docstrings() if re.match(r"What\b", text)] == []


@pytest.mark.parametrize("text", ["The same bits.", "x is no expert", "Widened to float32", "a card", "goes  on"])
def test_what_is_looked_for_is_found(text):
    assert found([("here", text)])
