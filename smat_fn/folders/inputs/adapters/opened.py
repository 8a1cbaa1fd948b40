"""An opened adapter, of PEFT or of another tool: its tensors by the names that PEFT gives them."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Made:
    """Tensors by name, each made of those of a file when it is read: the part of `Store` that a reader needs."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Tensor, Callable[[], Tensor]]] = {}
        # a weight is read in chunks, each of which takes all its factors
        self._latest = lru_cache(maxsize=4)(lambda name: self._made[name][1]())

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._made)

    def add(self, name: str, like: Tensor, make: Callable[[], Tensor]) -> None:
        """One more tensor. Args: like: a meta tensor of its shape and dtype."""
        self._made[name] = like, make

    def header(self, name: str) -> Tensor:
        """Shape and dtype of a tensor, as a meta tensor."""
        return self._made[name][0]

    def get_tensor(self, name: str) -> Tensor:
        """A tensor's values."""
        return self._latest(name)


class Opened(NamedTuple):
    """An adapter with the names that peft gives to factors."""

    config: dict[str, Any]
    store: Any  # `Store`, `Pickled` or `Made`
    scale: Callable[[str, int | None], float] | None  # of factors of this rank; None where settings are broken
    problems: list[str]
    files: dict[Path, Any]  # as `Folder.stores`
    note: str = ""
