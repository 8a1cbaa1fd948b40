"""Hooks of mkdocs (mkdocs.yml): pages made from the README, the commands' --help-all, the package and the notebooks.

Links to files that the site does not have become links to the API page of a module, or plain text.
"""

import contextlib
import io
import json
import os
import posixpath
import re
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# pages that lie above docs/, by their place in the site
ABOVE = {f"{name}.md": ROOT / f"{name.upper()}.md" for name in ("contributing", "changelog", "security")}
ABOVE["index.md"] = ROOT / "README.md"
PLACES = {path: uri for uri, path in ABOVE.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.M | re.S)


def on_config(config):
    """Add the protocols to the studies."""
    (studies,) = (section["Studies"] for section in config["nav"] if "Studies" in section)
    studies += [f"protocols/{path.name}" for path in sorted((ROOT / "docs" / "protocols").glob("*.md"))]
    return config


def on_files(files, config):
    """Add the pages that are made here."""
    made = {uri: path.read_text(encoding="utf-8") for uri, path in ABOVE.items()}
    made |= dict(commands()) | dict(api()) | dict(notebooks())
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links of a page, as the site has their targets; code stays as it is."""
    uri = page.file.src_uri
    source = ABOVE.get(uri, ROOT / "docs" / uri)
    known = {file.src_uri for file in files}

    def link(match):
        image, text, target = match.groups()
        place, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not place:
            return match[0]
        path = (source.parent / place).resolve()
        new = site_place(path)
        if new not in known:
            return text
        return f"{image}[{text}]({posixpath.relpath(new, posixpath.dirname(uri) or '.')}{anchor and '#' + anchor})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def site_place(path):
    """Where the site has a file of the repository; an empty text for one that is not below it."""
    if path in PLACES:
        return PLACES[path]
    if path == ROOT / "docs" / "README.md":  # the list of documents: the site has its navigation
        return ""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    if path.is_relative_to(ROOT / "smat_fn") and path.suffix == ".py":
        return f"reference/{module_name(path)}.md"
    return ""


def module_name(path):
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def commands():
    """(place, Markdown) of the options of each command, as ``--help-all`` prints them."""
    from smat_fn.config import MERGERS, METHODS, MORE_MERGERS, MORE_METHODS
    from smat_fn.scripts import entry
    from smat_fn.scripts.merge.commands import COMMANDS

    pages = {
        "train": [*(c.name for c in (*METHODS, *MORE_METHODS)), "sweep", "status"],
        "merge": ["all", *(c.name for c in (*MERGERS, *MORE_MERGERS)), *COMMANDS],
        "eval": ["", "experts-curve", "replacement", "gains", "landscape", "diagnose", "interference", "report"],
    }
    for name, subcommands in pages.items():
        lines = [f"# smat-{name}\n", f"{entry.COMMANDS[name].capitalize()}. In a clone: `python {name}.py`.\n"]
        for word in subcommands:
            call = f"smat-{name} {word}".strip()
            lines.append(f"## {call}\n\n```text\n{help_text(entry.run, name, word)}\n```\n")
        yield f"reference/smat-{name}.md", "\n".join(lines)


def help_text(run, name, word):
    """The text that a command prints for --help-all, 100 columns wide and without colours."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    sys.argv = [f"smat-{name}", *([word] if word else []), "--help-all"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        run(name, f"smat-{name}", ())
    if "usage:" not in shown.getvalue():
        raise RuntimeError(f"smat-{name} {word} --help-all prints no usage")
    return re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue()).strip()


def api():
    """(place, Markdown) of every public module, and of the list of them."""
    index = ["# Functions\n", "`smat_fn` itself has the names that its submodules define:\n", "::: smat_fn\n"]
    index += ["    options: {members: false}\n", "| module | |", "|---|---|"]
    for path in sorted((ROOT / "smat_fn").rglob("*.py")):
        name = module_name(path)
        if any(part.startswith("_") for part in name.split(".")) or name == "smat_fn":
            continue
        first = re.match(r'r?"""(.*?)(?:"""|\n\n|$)', path.read_text(encoding="utf-8"), re.S)
        about = " ".join(first[1].split()).replace("|", "\\|") if first else ""
        index.append(f"| [{name}]({name}.md) | {about} |")
        yield f"reference/{name}.md", f"# {name}\n\n::: {name}\n    options: {{show_root_heading: false}}\n"
    yield "reference/api.md", "\n".join(index)


def notebooks():
    """(place, Markdown) of every notebook, with the outputs that it keeps."""
    for path in sorted((ROOT / "docs").glob("notebooks/*.ipynb")):
        parts = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if "image/png" in data:
                    parts.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
                elif shown := "".join(output.get("text", data.get("text/plain", ""))):
                    parts.append(f"```text\n{shown}\n```")
        yield f"notebooks/{path.stem}.md", "\n\n".join(parts)


class Examples(griffe.Extension):
    """Read ``Example:`` in docstrings as griffe reads ``Examples:``, as code and not as Markdown."""

    def on_instance(self, *, obj, **_):
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
