"""A stand-in for torch while ``--help`` is printed: options are beside the arithmetic, which nothing calls then."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class whose attributes are such classes; a call gives the class, which has no items."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(name)


class _Finder(MetaPathFinder, Loader):
    """Finds torch and its modules, all empty."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the stand-in module is empty."""


@contextmanager
def without_torch() -> Iterator[None]:
    """Replace torch by a stand-in inside the block: importing it takes no time, and nothing of it computes.

    Afterwards all modules imported inside are forgotten, so that torch itself can be imported by them.
    """
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("torch", __package__.split(".")[0]):
                del sys.modules[name]


def _attribute(name: str) -> Any:
    if name.startswith("__") and name != "__members__":
        raise AttributeError(name)
    return _Anything(name, (), {})
