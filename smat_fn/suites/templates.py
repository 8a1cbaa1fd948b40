"""Prompts of the eight vision tasks for a zero-shot head; ``{}`` stands for the name of a class."""

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType

DEFAULT = ("a photo of a {}.",)
_NUMBER = ('a photo of the number: "{}".',)
TEMPLATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Cars": (
            *(f"a photo of {which} {{}}." for which in ("a", "the", "my", "my dirty", "my clean", "my new", "my old")),
            "i love my {}!",
        ),
        "DTD": tuple(
            f"a photo of {which} {{}} {what}."
            for which, what in product(("a", "the"), ("texture", "pattern", "thing", "object"))
        ),
        "EuroSAT": tuple(f"a centered satellite photo of {which}{{}}." for which in ("", "a ", "the ")),
        "GTSRB": tuple(f'a {how} photo of a "{{}}" traffic sign.' for how in ("zoomed in", "centered", "close up")),
        "MNIST": _NUMBER,
        "RESISC45": tuple(
            f"{where} {what} of {which}{{}}."
            for which, what, where in product(("", "a ", "the "), ("imagery", "photo", "view"), ("satellite", "aerial"))
        ),
        "SUN397": ("a photo of a {}.", "a photo of the {}."),
        "SVHN": _NUMBER,
    }
)


def prompts(templates: Sequence[str], names: Sequence[str]) -> list[str]:
    """Every template of every class, class by class."""
    return [template.replace("{}", name) for name in names for template in templates]
