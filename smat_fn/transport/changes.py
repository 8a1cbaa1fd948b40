"""The change of an expert from its old base, checked against the base that is to receive it."""

from collections.abc import Sequence

from .. import errors, tree
from ..errors import problems_of
from ..merge.parts.chunks import delta_of
from ..merge.parts.inputs import Leaves, batch_problems, fit_problems, flattened, kind_problems
from ..types import Params


def changes(
    new: Params, old: Params, expert: Params, problems: Sequence[str], *, same_shapes: bool
) -> tuple[Leaves, Leaves]:
    """Detached leaves of the new base, and θ − θ_old of every leaf that is floating-point there, in compute dtype.

    Args:
        problems: found before, raised with those found here.
        same_shapes: the leaves of both bases must have the same shapes; else the same names.

    Raises: ValueError that lists the given problems and all of names, shapes and dtypes.
    """
    found, given = [*problems], {"new": new, "old": old, "expert": expert}
    flat = {label: own for label, params in given.items() if (own := flattened(label, params, found)) is not None}
    if len(flat) == 3:
        found += batch_problems(flat) + fit_problems(flat["old"], "old", {"expert": flat["expert"]})
        if same_shapes:
            found += fit_problems(flat["old"], "old", {"new": flat["new"]})
        else:
            shapeless = {label: {path: leaf.new_empty(0) for path, leaf in flat[label].items()} for label in flat}
            found += problems_of(lambda: tree.check_same(shapeless["old"], "old", new=shapeless["new"]))
            found += kind_problems(flat["old"], "old", flat["new"], "new")
    errors.raise_problems(found)
    start, origin, trained = flat.values()
    return start, {
        path: delta_of(trained[path], origin[path], tree.compute_dtype(leaf, origin[path], trained[path]))
        for path, leaf in start.items()
        if leaf.is_floating_point()
    }
