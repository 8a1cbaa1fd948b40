"""The command line that the scripts share: options from a dataclass, bad input as one line. No torch in here."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from types import NoneType
from typing import TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

OPEN = "preset"  # how --help says that an option is None
Options = TypeVar("Options")
REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """``X | None`` is given as an X, or left out."""
    kinds = get_args(info.type)
    if NoneType not in kinds:
        return None
    kind = reduce(or_, (k for k in kinds if k is not NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [OPEN] if value is None else spec.str_from_instance(value),
    )


def parse(options: type[Options], *, description: str | None, args: list[str] | None = None) -> Options:
    """Options from the command line (``args``: from these words); exits with tyro's own message if they do not fit."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs)
    return tyro.cli(options, description=description, args=args, config=config, registry=REGISTRY)


def run(script: str, main: Callable[[Options], None], options: type[Options], *, description: str | None) -> None:
    """``main`` on the command line's options; bad input and files that cannot be written end it with one line."""
    parsed = parse(options, description=description)
    try:
        main(parsed)
    except (ValueError, OSError) as error:
        sys.exit(f"{script}: {error}")
