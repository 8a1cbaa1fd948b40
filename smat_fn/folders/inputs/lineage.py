"""Experts that were trained from another model than base: a sample of their weights is compared with base's."""

from collections.abc import Iterator, Mapping

from .reading import Folder

MATRICES, COORDINATES = 8, 4096  # that are read of each model (some are formed whole), and of each matrix
LARGE = 1 << 16  # weights of a matrix that is compared: in small ones chance is too large
ALIKE = 0.5  # fine-tuned matrices have cosines near 1 with those of base, unrelated ones near 0


def strangers(base: Folder, experts: Mapping[str, Folder]) -> Iterator[str]:
    """A note on every expert whose matrices have a median cosine below `ALIKE` with those of base.

    Matrices that equal base's do not count: what a tower lacks is base's.

    Args:
        base: the model that experts are compared with.
        experts: models with the leaves of base, by name.
    """
    matrices = {path: leaf for path, leaf in base.leaves.items() if leaf.is_floating_point() and leaf.ndim > 1}
    large = [path for path, leaf in matrices.items() if leaf.numel() >= LARGE]
    paths = [path for path in large[:: -(-len(large) // MATRICES) or 1] if path not in base.absent]
    for name, expert in experts.items():
        every = (_cosine(base, expert, path) for path in paths if path not in expert.absent)
        found = [cosine for cosine in every if cosine is not None]
        if found and (middle := sorted(found)[len(found) // 2]) < ALIKE:
            yield (
                f"the weights of expert {name!r} have little in common with base's (cosine {middle:.2f} in the median "
                "of a sample): was it trained from another base?"
            )


def _cosine(base: Folder, expert: Folder, path: str) -> float | None:
    """The cosine of the coordinates in the middle of a leaf: 1 if one of the two is 0, None if they are equal."""
    start = (base.leaves[path].numel() - COORDINATES) // 2
    a, b = (folder.read(path, start, start + COORDINATES).double() for folder in (base, expert))
    if a.equal(b):
        return None
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else 1.0
