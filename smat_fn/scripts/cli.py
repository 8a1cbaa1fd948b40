"""The command line that the scripts share: options from a dataclass, bad input as one line. No torch in here."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

NONE = tyro.conf.arg(help_behavior_hint="(default: none)")
OPEN = "preset"  # how --help says that an option is None
Options = TypeVar("Options")
REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """``X | None`` is given as an X, or left out; a union of more types accepts the word None too."""
    kinds = get_args(info.type)
    if NoneType not in kinds or len(kinds) != 2:
        return None
    kind = next(k for k in kinds if k is not NoneType)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [OPEN] if value is None else spec.str_from_instance(value),
    )


def parse(
    options: type[Options], *, description: str | None, args: list[str] | None = None, prog: str | None = None
) -> Options:
    """Options from the command line (``args``: from these words); exits with tyro's own message if they do not fit."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(options, prog=prog, description=description, args=args, config=config, registry=REGISTRY)


Command = tuple[Callable[[Any], None], type]  # what it does, the class of its options


def run(
    script: str,
    main: Callable[[Any], None],
    options: type,
    *,
    description: str | None,
    commands: Mapping[str, Command] = MappingProxyType({}),
) -> None:
    """Call ``main`` on the command line's options; ValueError and OSError end the script with one line.

    Args: commands: subcommands by name; the docstring of the class of their options is their description.
    """
    words, prog = sys.argv[1:], script
    if words and words[0] in commands:
        prog = f"{script} {words[0]}"
        main, options = commands[words.pop(0)]
        description = options.__doc__
    parsed: Any = parse(options, description=description, args=words, prog=prog)
    try:
        main(parsed)
    except (ValueError, OSError) as error:
        sys.exit(f"{prog}: {error}")
