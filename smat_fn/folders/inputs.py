"""Base and experts as they are found: folders, hub names, adapters, other vocabularies, tied heads."""

from collections.abc import Mapping
from pathlib import Path

from ..merge.inputs import Leaves, fit_problems
from .adapters import is_adapter, open_adapter
from .hub import local_folder
from .parts import placed
from .reading import Folder, open_folder
from .vocabulary import fit_rows, one_head


def read_inputs(
    base: Path, experts: Mapping[str, Path], problems: list[str]
) -> tuple[Leaves | None, dict[str, Leaves]]:
    """`open_inputs`, checked against each other, as leaves: mapped, or in memory where they are formed."""
    start, found = open_inputs(base, experts, "error", problems)
    if start is None:
        return None, {}
    problems += fit_problems(start.leaves, "base", {name: folder.leaves for name, folder in found.items()})
    if problems:
        return None, {}
    return _values(start), {name: _values(folder) for name, folder in found.items()}


def _values(folder: Folder) -> Leaves:
    return {path: folder.read(path, 0, leaf.numel()).view(leaf.shape) for path, leaf in folder.leaves.items()}


def open_inputs(
    base: Path, experts: Mapping[str, Path], vocabulary: str, problems: list[str], *, partial: bool = False
) -> tuple[Folder | None, dict[str, Folder]]:
    """Base and those experts that can be opened; what speaks against any of them is added to ``problems``.

    Args: partial: experts may hold a part of base's leaves, and have the others of base (`parts.placed`).
    """
    start, found = None, {}
    try:
        start = open_folder("base", local_folder("base", Path(base)))
    except ValueError as error:
        problems.append(str(error))
    for name, path in experts.items():
        label = f"expert {name!r}"
        try:
            folder = local_folder(label, Path(path))
            if not is_adapter(folder):
                opened = open_folder(label, folder)
                found[name] = placed(start, opened) if partial and start is not None else opened
            elif start is not None:
                found[name] = open_adapter(label, folder, start)
        except ValueError as error:
            problems.append(str(error))
    if start is None:
        return None, found
    start, found, tied = one_head(start, found)
    found, rows = fit_rows(start, found, vocabulary)
    problems += tied + rows
    return start, found
