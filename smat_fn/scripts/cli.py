"""Shared command line of the scripts: options from a dataclass, one-line errors. Does not import torch."""

import ast
import errno
import inspect
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from ..errors import Problems, printable, raise_problems, suggestion
from . import outcome
from .other_names import spelled_otherwise

NONE = tyro.conf.arg(help_behavior_hint="(default: none)")
SUITE = tyro.conf.arg(metavar="[NAME VALUE ...]", help_behavior_hint="(default: as they were trained)")
Values: TypeAlias = dict[str, bool | int | float | str | None]  # of --suite-options
OPEN, NONE_SET = "preset", "none"  # how --help says that an option is None, and that the preset shown sets none
Options = TypeVar("Options")
First: TypeAlias = Mapping[type, Sequence[str]]


def _registry(instances: Sequence[Any], first: First) -> ConstructorRegistry:
    """tyro's rules for options that may be left out, for help texts, and for other defaults: those of ``instances``.

    Args: first: the options that are shown of a dataclass; of classes that it does not name, all.
    """
    registry, by_class = ConstructorRegistry(), {type(instance): instance for instance in instances}
    asked: set[Any] = set()  # types whose rule asks tyro's own rules

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        """``X | None`` is given as an X, or left out, and so with a Literal; a union of more takes the word None."""
        kinds = get_args(info.type)
        if NoneType not in kinds or (len(kinds) != 2 and not any(get_origin(k) is Literal for k in kinds)):
            return None
        kind: Any = Union[tuple(k for k in kinds if k is not NoneType)]  # noqa: UP007 - of a tuple
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
        if not isinstance(spec, PrimitiveConstructorSpec):
            return None
        nothing = NONE_SET if instances else OPEN
        return replace(
            spec,
            is_instance=lambda value: value is None or spec.is_instance(value),
            str_from_instance=lambda value: [nothing] if value is None else spec.str_from_instance(value),
        )

    @registry.primitive_rule
    def path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        """A path with the home folder for ``~``: shells leave it in ``--out=~/x``, and a folder ``~`` would be made."""
        if info.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda words: _at_home(words[0]),
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.struct_rule
    def filled(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Dataclasses with the defaults of their instance, and with help texts in one line.

        tyro 1.0 joins the lines of a field's docstring only where they are not indented, as they are in a class.
        """
        if not is_dataclass(info.type) or info.type in asked:
            return None
        asked.add(info.type)
        try:
            found = ConstructorRegistry.get_struct_spec(replace(info, default=by_class.get(info.type, info.default)))
        finally:
            asked.remove(info.type)
        if not isinstance(found, StructConstructorSpec):
            return None
        own = [_readable(option) for option in found.fields]
        kept = first.get(info.type, [option.name for option in own])
        fields = tuple(option for option in own if option.name in kept)
        return replace(found, fields=tuple(map(_ungrouped, fields)) if first else fields)

    return registry


def _at_home(word: str) -> Path:
    """A path from the command line; ``~name`` stays where there is no such user."""
    if not word:  # pathlib would take the current folder
        raise ValueError("the path is empty: is a variable of the shell unset?")
    return Path(os.path.expanduser(word))


def _readable(option: StructFieldSpec) -> StructFieldSpec:
    """The option with its help text in one line, and in words a default that is empty, in no preset, or a flag's.

    A field that is True by default is the flag --no-NAME: of "True: ...; False: ..." its help is the second part.
    """
    off = option.type is bool and option.default is True

    def text() -> str | None:
        found = option.helptext() if callable(option.helptext) else option.helptext
        if found is None:
            return None
        own = " ".join(found.split())
        part = own.partition("False: ")[2] if off else ""
        return part[:1].upper() + part[1:] or own

    kind: Any = option.type
    # no preset has a coef or a task
    absent = option.default in ({}, ()) or (option.name in ("coef", "task") and option.default is None)
    if absent and get_origin(kind) is not Annotated:
        kind = Annotated[kind, NONE]
    if off:
        kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="(default: not given)")]
    return replace(option, helptext=text, type=kind)


def _ungrouped(option: StructFieldSpec) -> StructFieldSpec:
    """A group of options without a name, so that a short ``--help`` has one box."""
    kind: Any = get_args(option.type)[0] if get_origin(option.type) is Annotated else option.type
    if not is_dataclass(kind):
        return option
    unnamed: Any = Annotated[kind, tyro.conf.arg(name="")]
    return replace(option, type=unnamed)


def open_at(text: str) -> Callable[[str], str]:
    """The hint of an option whose default ``--help`` describes by ``text``, unless a preset has a value for it."""
    return lambda value: f"(default: {text if value in (OPEN, NONE_SET) else value})"


def with_named(options: Mapping[str, Any], **named: Any) -> dict[str, Any]:
    """Options of a suite with those that have an option of their own.

    Raises: ValueError for one given twice, and for ``only``.
    """
    if "only" in options:
        raise ValueError("--suite-options only is set by --tasks of train.py alone: leave it out")
    given = {name: value for name, value in named.items() if value is not None}
    twice = [name for name in given if name in options]
    raise_problems(
        [f"--{n.replace('_', '-')} is also given as --suite-options {n}: leave one of them out" for n in twice]
    )
    return {**options, **given}


def parse(
    options: type[Options],
    *,
    description: str | None,
    args: list[str] | None = None,
    prog: str | None = None,
    shown: Sequence[Any] = (),
    first: First = MappingProxyType({}),
) -> Options:
    """Options from the command line; exits with tyro's own message if they do not fit.

    Args: args: these words instead; shown: instances of dataclasses of options, whose values ``--help`` prints as the
        defaults of their classes; first: the options of a class that a short ``--help`` shows, instead of all.
    """
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff)
    own = _registry(shown, first)
    return tyro.cli(options, prog=prog, description=description, args=args, config=config, registry=own)


def value_of(option: str, words: Sequence[str], default: Any = None) -> Any:
    """The word after the last ``option`` of a command line; the default where there is none."""
    found = default
    for word, after in pairwise([*" ".join(words).replace("=", " ").split(), ""]):
        found = after if word == option else found
    return found


def suite_help(options: type, words: Sequence[str]) -> str:
    """The section of ``--help`` on --suite-options: those of the suite of --preset, with the preset's values.

    Nothing for a script without --suite-options, and without a known preset in the words or as the default.
    """
    parts = (options, *(kind for kind in get_type_hints(options).values() if is_dataclass(kind)))
    defaults = {field.name: field.default for part in parts for field in fields(part)}
    name = value_of("--preset", words, defaults.get("preset"))
    if "suite_options" not in defaults or name is None:
        return ""
    from ..config import PRESETS  # loads torch
    from ..suites import describe_options

    if name not in PRESETS:
        return ""
    preset = PRESETS[name]
    lines = [f"suite options (--preset {name}, suite {preset.suite}), as --suite-options NAME VALUE ..."]
    for option, (written, text) in describe_options(preset.suite).items():
        value = str(preset.options.get(option, written)).strip("'\"")
        if value != "None":
            text = f"{re.sub(r' [(]default: .*[)][.]$', '.', text)} (default: {value})"
        lines += textwrap.wrap(f"{option}: {text}", 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([*lines, ""])


_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")  # an argument of a function in an error, perhaps with its value
_OTHERWISE = {"workers": "threads"}  # arguments whose option has another name
_IN_A_RECIPE = {"tokenizer_from": "tokenizer_source"}
_OF_SUITES = "max_length", "max_new_tokens", "train_layers", "truncate"


def spoken(text: str, names: Sequence[str] = ()) -> str:
    """Write arguments that an error of the library names as options: `heads='keep'` is --heads keep.

    Args: names: options of the command; also written so where no backticks are around: those of several words, and
        those of one that begin a problem and are followed by "is", as in "coef is nan, must be finite".
    """
    text = _ARGUMENT.sub(lambda found: _option(found[1], found[2], names) or found[0], text)
    single = "|".join(name for name in names if "_" not in name)
    text = re.sub(rf"(?m)^(\s*(?:\w+: )?)({single})(?= is )", r"\1--\2", text) if single else text
    several = "|".join(name for name in names if "_" in name)  # not in paths, field names with dots, and quotes
    bare = rf"(?<!suite-options )(?<![\w.'\"/=-])({several})(?![\w.'\"/=(])"
    return re.sub(bare, lambda found: f"--{found[1].replace('_', '-')}", text) if several else text


def _option(name: str, value: str | None, names: Sequence[str]) -> str:
    """An option with its value; empty for what is none, as in an error of another library.

    Args: value: as Python has it.
    """
    try:
        given = None if value is None else ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return ""
    words = [f"{glob}={number}" for glob, number in given.items()] if isinstance(given, dict) else [str(given)]
    shown = "" if value is None or given is True else " ".join(["", *map(shlex.quote, words)])
    name = _OTHERWISE.get(name, name)
    if name in names:
        return f"--{name.replace('_', '-')}{shown}"
    if name in _IN_A_RECIPE:
        return f"{_IN_A_RECIPE[name]}{shown and ':'}{shown} in the recipe"
    return f"--suite-options {name}{shown}" if name in _OF_SUITES and "suite_options" in names else ""


def listing(title: str, texts: Mapping[str, str]) -> str:
    """The title and, for each name, the first line of its text, 80 columns wide; nothing without texts."""
    if not texts:
        return ""
    width = max(map(len, texts))
    lines = [f"{title}:"]
    for name, text in texts.items():
        first = text.partition("\n")[0]
        lines += textwrap.wrap(first, 80, initial_indent=f"  {name:<{width}}  ", subsequent_indent=" " * (width + 4))
    return "\n".join([*lines, ""])


def named(text: str, script: str) -> str:
    """A text about train.py, merge.py and eval.py, in the installed commands' names unless ``script`` is a file."""
    if script.endswith(".py"):
        return text
    text = re.sub(r"(torchrun .*?)\b(train|merge|eval)\.py", r"\1-m smat_fn \2", text)
    return re.sub(r"(?:python )?\b(train|merge|eval)\.py", r"smat-\1", text)


def mistyped(
    words: Sequence[str],
    names: Sequence[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    needed: Sequence[str] = (),
) -> str:
    """Error for a first word that is nearly a subcommand, and neither an option nor a path; else an empty text.

    And for options alone, where a subcommand is needed.

    Args: needed: subcommands of which there must be one; with them any other word is an error, and no word, too.
    """
    word = words[0] if words else ""
    some = ", ".join(needed[:SHOWN]) + (", ..." if len(needed) > SHOWN else "")
    if needed and word.startswith("-") and not {*words} & {*names, *outcome.HELPS}:
        return f"no subcommand among the options: give one of {some} first"
    if word.startswith("-") or word in names or (word and Path(word).exists()):
        return ""
    if word in elsewhere:
        return f"{word!r} is unknown, it is called {elsewhere[word]} here"
    if near := suggestion(word, names) if word else "":
        return f"{word!r} is unknown{near}"
    if not needed:
        return ""
    return f"{word!r} is unknown, the first word is one of {some}" if word else f"give one of {some} first"


NAME = 230  # bytes of a name in --out: file systems take 255, and temporary names are longer
SHOWN = 10  # names of subcommands in an error
Command = tuple[Callable[[Any], None], type]  # what it does, the class of its options


def run(
    script: str,
    main: Callable[[Any], None],
    options: type,
    *,
    description: str | None,
    commands: Mapping[str, Command] = MappingProxyType({}),
    prepare: Callable[[list[str]], list[str]] = list,
    names: Sequence[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    shown: Callable[[Sequence[str]], Sequence[Any]] = lambda words: (),
    first: First = MappingProxyType({}),
    brief: tuple[type, Mapping[str, str]] | None = None,
) -> None:
    """Call ``main`` on the command line's options; ValueError, OSError and a full GPU end the script with one line.

    Args:
        commands: subcommands by name; the docstring of the class of their options is their description.
        prepare: rewrites the words of the command line, or raises ValueError for words that never are options here.
        names: other subcommands, to suggest one for a mistyped word.
        elsewhere: subcommands by the names that other tools have for them.
        shown: from the words, what `parse` shows as defaults, asked for with ``--help`` alone.
        first: the options that ``--help`` shows of a class, where ``--help-all`` shows all.
        brief: ``options`` with fewer mergers, for ``--help`` of the script alone, and descriptions of the others.
    """
    try:
        words, prog = prepare(sys.argv[1:]), script
        if problem := mistyped(words, [*commands, *names], elsewhere, names):
            raise ValueError(f"{problem} ({script} --help lists all)")
    except ValueError as error:
        print(f"{script}:{named(in_lines(error), script)}", file=sys.stderr)
        sys.exit(2)  # as tyro's errors
    if words and words[0] in commands:
        prog = f"{script} {words[0]}"
        main, options = commands[words.pop(0)]
        description = inspect.getdoc(options)
    helped, whole = bool(outcome.HELPS & set(words)), "--help-all" in words
    words = ["--help" if word == "--help-all" else word for word in words]
    _refuse([] if helped else spelled_otherwise(words, options), prog)
    if not helped or whole or prog != script:
        first = {}
    elif words[0].startswith("-"):  # the script alone: its examples and subcommands
        first = dict.fromkeys(first, ())
        options = brief[0] if brief else options
    try:
        defaults = shown(words) if helped else ()
        text = None if description is None else named(description, script)
        parsed: Any = parse(options, description=text, args=words, prog=prog, shown=defaults, first=first)
    except SystemExit:
        if helped:
            more = brief[1] if brief and not whole else {}
            others = {name: inspect.getdoc(kind) or "" for name, (_, kind) in commands.items() if name not in more}
            alone = prog == script and words[0].startswith("-")
            below = suite_help(options, words) if not first else ""
            below += listing("more mergers", more) + listing("commands", others) if alone else ""
            below += f"all options: {script if alone else f'{script} {words[0]}'} --help-all\n" if first else ""
            print(named(below, script) + outcome.HELP, end="")
        raise
    _call(main, parsed, words, prog, script)


def _refuse(problems: list[str], prog: str) -> None:
    """Exit as tyro does for a command line that it cannot read, where there are problems."""
    if problems:
        print(f"{prog}:{in_lines(Problems(problems))}", file=sys.stderr)
        sys.exit(2)


def _call(main: Callable[[Any], None], parsed: Any, words: Sequence[str], prog: str, script: str) -> None:
    """Raises: SystemExit with the text of an error that a user can do something about."""
    try:
        raise_problems([*_twice(words, parsed), *_no_folder(parsed)])
        for part in (parsed, *vars(parsed).values()):
            if (threads := getattr(part, "threads", 1)) < 1:
                raise ValueError(f"--threads is {threads}, must be at least 1")
        main(parsed)
    except BrokenPipeError:
        raise  # the reader of the output has ended, and so does `entry.run`
    except (ValueError, OSError) as error:
        names = [name for name, _ in _values(parsed)]
        sys.exit(f"{prog}:{named(spoken(printable(in_lines(error)), names), script)}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search("an(not|'t) allocate memory", str(error)):  # of torch
            sys.exit(
                f"{prog}: the system gives no more memory or address space ({textwrap.shorten(str(error), 300)}): end "
                "other programs, or raise the limit that is set here (ulimit -v, --mem of Slurm)"
            )
        if "determine home directory" in str(error):  # of pathlib
            sys.exit(
                f"{prog}: a path begins with ~ or lies in the home folder, but the system knows no such home: write "
                "the whole path, or set HOME to a folder that this user may write to"
            )
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which is not imported here
            raise
        sys.exit(
            f"{prog}: the GPU is out of memory ({textwrap.shorten(str(error), 200)}): take less at a time, in training "
            "--accumulate 8, --offload stream or --gradient-checkpointing, for scores "
            "--suite-options decode_batch 4 (texts) or eval_batch 16 (images)"
        )


def _twice(words: Sequence[str], parsed: Any) -> list[str]:
    """Errors for options of several values that are given again, of which argparse silently takes the last."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    several = {f"--{name.replace('_', '-')}" for name, value in _values(parsed) if isinstance(value, (tuple, dict))}
    return [
        f"{name} is given twice: give all its values after one {name}"
        for name in dict.fromkeys(names)
        if names.count(name) > 1 and name.replace("_", "-") in several
    ]


def _no_folder(parsed: Any) -> list[str]:
    """An error for an --out that no folder can be made at or written to, before anything is loaded."""
    out = dict(_values(parsed)).get("out")
    if isinstance(out, Path) and (long := [part for part in out.parts if len(os.fsencode(part)) > NAME]):
        return [f"--out holds a name of {len(os.fsencode(long[0]))} bytes, {long[0][:20]}...: give at most {NAME}"]
    if not isinstance(out, Path) or out.is_symlink():
        return []
    above = next((place for place in (out, *out.parents) if place.is_symlink() or place.exists()), None)
    if above is None:
        return []
    if above.is_dir():
        fine = dict(_values(parsed)).get("dry_run") or os.access(above, os.W_OK)
        return [] if fine else [f"--out is {out}, but {above} cannot be written to: choose another folder"]
    what = "a link that leads nowhere" if above.is_symlink() else "a file"
    return [f"--out is {out}, but {above} is {what}: remove it, or choose another folder"]


def _values(options: Any) -> Iterator[tuple[str, Any]]:
    """The options of a dataclass by name, and of those inside it."""
    for name, value in vars(options).items():
        yield from _values(value) if is_dataclass(value) else [(name, value)]


def in_lines(error: Exception) -> str:
    """The text of an error after the colon, or a line for each of several problems."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        rerun = "free disk space and rerun the command, it resumes from what is kept (training with --resume)"
        return f" {error.filename or 'a file'} cannot be written ({error.strerror}): {rerun}"
    if isinstance(error, PermissionError) and error.filename is not None:
        return f" {error.filename} cannot be read or written by this user: ask its owner (chmod), or give another place"
    found = getattr(error, "problems", ())
    return f" {error}" if len(found) < 2 else "".join(f"\n  {problem}" for problem in found)
