"""Findings as sentences. What the numbers leave open is said to be open."""

from ..evaluate.statistics import Estimate

NOTE = (
    "A difference is taken seed by seed; its interval is Student's t over seeds and covers what seeds change, not the "
    "choice of tasks or data. Several comparisons are not corrected for their number."
)


def finding(label: str, reference: str, found: Estimate | None, *, of: str = "the mean of five mergers") -> str:
    """One sentence on the paired difference ``label - reference``."""
    if found is None:
        return f"**{label}** cannot be compared with {reference} on {of}: no seed has both."
    if set(found.values) == {0.0}:
        return f"**{label}** equals {reference} on {of}, seed by seed (of {len(found.values)})."
    points = f"{found.mean:+.2f} points on {of}"
    if found.interval is None:
        return f"**{label}** against {reference}: {points} in one seed. One seed leaves open what chance does."
    if not found.settled:
        return f"**{label}**: no difference from {reference} is established: {points}, {evidence(found)}."
    place = "above" if found.mean > 0 else "below"
    return f"**{label}** is {place} {reference}: {points}, {evidence(found)}."


def evidence(found: Estimate) -> str:
    """The interval, whether it contains zero, and how many seeds point where."""
    assert found.interval is not None
    low, high = found.interval
    above, equal, below = found.signs
    counts = [f"{n} {name}" for n, name in ((above, "above"), (equal, "equal"), (below, "below")) if n]
    contains = "leaves out zero" if found.settled else "contains zero"
    return f"95 % interval {low:+.2f} to {high:+.2f} {contains} ({len(found.values)} seeds: {', '.join(counts)})"


def experts(found: Estimate | None) -> str:
    """The difference of the experts before merging, as an addition to a finding."""
    if found is None:
        return ""
    if found.interval is None:
        return f"Its experts before merging: {found.mean:+.2f}."
    low, high = found.interval
    zero = "leaves out zero" if found.settled else "contains zero"
    return f"Its experts before merging: {found.mean:+.2f}, interval {low:+.2f} to {high:+.2f} {zero}."
