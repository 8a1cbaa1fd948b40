"""Every command of the documents, and of the scripts' own descriptions, is one that the scripts take."""

import ast
import importlib
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest
from tyro import _arguments

from benchmarks import options, readme
from smat_fn.config import MERGERS, METHODS, MORE_MERGERS, MORE_METHODS, PRESETS
from smat_fn.scripts import cli, entry
from smat_fn.scripts.commands.merge import All
from smat_fn.scripts.merge.settings import AdaMerging, ByData, RegMeanPlus

ROOT = Path(__file__).resolve().parents[2]
PLACES = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
    *(ROOT / "smat_fn/scripts/commands" / f"{name}.py" for name in entry.COMMANDS),
]
COMMAND = re.compile(
    r"^ *(?:\$ )?(?:(?:python|torchrun(?: --nproc-per-node \d)?) (?:(?P<script>train|merge|eval)\.py"
    r"|-m smat_fn (?P<module>train|merge|eval))|smat-(?P<installed>train|merge|eval)) (?P<words>.+)$",
    re.M,
)
INLINE = re.compile(
    r"`(?:python (?P<script>train|merge|eval)\.py|smat-(?P<installed>train|merge|eval)) (?P<words>[^`]+)`"
)
MAKE = re.compile(r"(?:^ *|`)make (?P<target>[a-z][\w-]*)", re.M)
INSTALL = re.compile(r"pip install (?:-e )?'?(?:\.|smat_fn)\[(?P<extras>[\w,]+)\]")
BENCHMARK = re.compile(r"`python -m benchmarks (?P<name>[\w-]+)")


def text_of(place):
    """A document, or the docstring of a script."""
    text = place.read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or "" if place.suffix == ".py" else text


def commands():
    """(script, words) of every command that stands on a line of its own, or is code in a sentence and whole."""
    for place in PLACES:
        text = text_of(place)
        for found in COMMAND.finditer(text):
            name = found["script"] or found["module"] or found["installed"]
            yield name, found["words"].strip()
        for found in INLINE.finditer(text):
            words = " ".join(found["words"].split())
            if "--help" not in words and "..." not in words:
                yield found["script"] or found["installed"], words


COMMANDS = sorted(set(commands()))


@cache
def script(name):
    """(options of the main job, options by command, what prepares words), as the script gives them to `cli.run`."""
    given = {}

    def take(script, main, options, *, description, commands, prepare=list, **_):
        given.update(main=options, commands=commands, prepare=prepare)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", take)
        patch.setattr("sys.argv", [name])
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    return given["main"], {word: options for word, (_, options) in given["commands"].items()}, given["prepare"]


def subcommands(name):
    """Every subcommand of a script; "" for eval.py's own job."""
    main = {"train": [*METHODS, *MORE_METHODS], "merge": [All, *MERGERS, *MORE_MERGERS], "eval": []}[name]
    return ["" if name == "eval" else main[0].name, *(config.name for config in main[1:]), *script(name)[1]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, 0) for name in entry.COMMANDS),
        *(pytest.param(name, part, marks=pytest.mark.slow) for name in ("train", "merge") for part in (1, 2)),
    ],
)
def test_help_breaks_no_sentence_and_shows_no_empty_default(name, part, monkeypatch, capsys):
    """Each part has every third of the subcommands."""
    main, commands, _ = script(name)
    texts, helptext = [], _arguments.generate_argument_helptext

    def recorded(arg, *args, **options):
        texts.append((arg.field.extern_name, text := helptext(arg, *args, **options).as_str_no_ansi()))
        assert "(at least one)" not in text or arg.field.default != (), f"{word}: none are fine"
        return helptext(arg, *args, **options)

    monkeypatch.setattr(_arguments, "generate_argument_helptext", recorded)
    for word in subcommands(name)[part::3]:
        before = len(texts)
        with pytest.raises(SystemExit):
            cli.parse(
                commands.get(word, main), description=None, prog=name,
                args=[*([word] if word and word not in commands else []), "--help"],
            )  # fmt: skip
        assert len(texts) > before
        of_presets = [(option, text) for option, text in texts[before:] if "(default: preset)" in text]
        assert not commands.get(word) or not of_presets, f"{word} has no presets"
        assert not any(option == "task" or "Presets have none" in text for option, text in of_presets)
    assert [(option, text) for option, text in texts if "\n" in text or "(default: )" in text] == []
    assert any(len(text) > 120 for _, text in texts), "a text of more than a line of code is among them"


@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=[f"{name}.py {line}" for name, line in COMMANDS])
def test_a_command_parses(name, line):
    assert_parses(name, shlex.split(line, comments=True))


def assert_parses(name, words):
    main, commands, prepare = script(name)
    words = prepare(words)
    options = commands.get(words[0], main)
    parsed = cli.parse(options, description=None, args=words[words[0] in commands :], prog=name)
    preset = getattr(getattr(parsed, "data", parsed), "preset", "PRESET")
    assert preset in (None, "PRESET", *PRESETS)


RECORDER = """#!/bin/sh
printf '%s\\n' "$@" --end-- >> "$RECORD"
while [ $# -gt 0 ]; do [ "$1" = --out ] && mkdir -p "$2"; shift; done
"""


FEW = {"SEEDS": "0", "METHODS": "smat", "SIGMAS": "0.1", "NOISES": "uniform laplace"}


@pytest.mark.parametrize("file", [file.name for file in sorted((ROOT / "examples").glob("*.sh"))])
def test_commands_of_an_example_parse(file, tmp_path):
    """The slow tests of tests/examples run them."""
    (tmp_path / "python").write_text(RECORDER)
    (tmp_path / "python").chmod(0o755)
    given = {"PYTHON": "python", "RECORD": "words", "OUT": "out"}
    places = {name: str(tmp_path / place) for name, place in given.items()}
    subprocess.run(["bash", ROOT / "examples" / file], env=os.environ | places | FEW, check=True)
    if file == "common.sh":  # the others begin with it
        assert not (tmp_path / "words").exists()
        return
    calls = (tmp_path / "words").read_text().split("--end--\n")[:-1]
    assert {call.split(".py")[0] for call in calls} > {"train"}
    seen = set()
    for call in calls:
        name, *words = call.splitlines()
        options = (name, *(word for word in words if word.startswith("--")))
        if options not in seen:  # others differ in values alone
            seen.add(options)
            assert_parses(name.removesuffix(".py"), words)


def test_there_are_commands_of_every_kind():
    found = {(name, line.split()[0]) for name, line in COMMANDS}
    wanted = {(name, word) for name in ("train", "merge", "eval") for word in script(name)[1]}
    assert wanted <= found, "a command that no document shows"
    assert {("train", "ft"), ("train", "smat"), ("merge", "all"), ("merge", "ties")} <= found


def test_every_benchmark_that_is_named_exists():
    named = {m["name"] for place in PLACES for m in BENCHMARK.finditer(text_of(place))}
    known = importlib.import_module("benchmarks.__main__").BENCHMARKS
    assert named
    assert named <= set(known)


def test_every_make_target_and_extra_that_is_named_exists():
    texts = [text_of(place) for place in PLACES]
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    named = {m["target"] for text in texts for m in MAKE.finditer(text)}
    assert {"demo", "test", "lint"} <= named <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for text in texts for m in INSTALL.finditer(text) for name in m["extras"].split(",")}
    assert "eval" in extras
    assert extras <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", options.PAGES)
def test_a_table_of_options_is_that_of_the_dataclass(name):
    """`python -m benchmarks readme` writes it."""
    place, own = options.PAGES[name]
    page = (ROOT / place).read_text(encoding="utf-8")
    assert readme.between(page, name, options.table(own)) == page


ELSEWHERE = {"coef", "task", "weights", "densities", "windows", "largest", "rescale", "aggregate", "others", "skip"}


def test_the_table_of_mergers_has_their_options_and_defaults():
    """All but those that the sentence above it names; where a default depends on the preset, presets set it."""
    text = (ROOT / "docs/merging.md").read_text(encoding="utf-8").partition("## Options of single mergers\n")[2]
    listed, mergers = {}, ()
    for line in text.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[1].startswith("`"):
            mergers = re.findall(r"`(\w+)`", cells[0]) or mergers
            for name in re.findall(r"`--([\w-]+)`", cells[1].partition("(")[0]):
                listed |= {(merger, name): cells[3] for merger in mergers}
    known = {}
    for config in (*MERGERS, *MORE_MERGERS, AdaMerging, RegMeanPlus):
        shared = ELSEWHERE | ({field.name for field in fields(ByData)} if issubclass(config, ByData) else set())
        for field in fields(config):
            if field.name not in shared:
                word = field.name.replace("_", "-")
                name = {AdaMerging: "adamerging", RegMeanPlus: "reg_mean_plus"}.get(config) or config.name
                known[name, f"no-{word}" if field.default is True else word] = field.default
    assert listed.keys() == known.keys()
    words = {True: "off", False: "off", MISSING: "required"}
    for (merger, name), default in known.items():
        found = listed[merger, name]
        if default is None:
            assert f"the preset's: {getattr(PRESETS['digits'].mergers[merger], name.replace('-', '_'))}" in found
        elif isinstance(default, bool) or default is MISSING:
            assert words[default] in found
        elif isinstance(default, str):
            assert found == default
        else:
            assert float(found) == default
