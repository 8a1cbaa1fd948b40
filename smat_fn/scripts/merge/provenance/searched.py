"""The candidates and the choice of a search: in words, and as facts of a manifest."""

from collections.abc import Mapping, Sequence
from typing import Any

from .... import merge
from ....merge.around.select import Tuned, best_of
from ....merge.around.weights import OVER, ByExpert


def alike(scores: Sequence[float]) -> bool:
    """Whether there are several scores and none exceeds another."""
    return len(scores) > 1 and not merge.exceeds(max(scores), min(scores))


def chosen_of(tuned: Sequence[Tuned]) -> dict[str, Any]:
    """The options of the best score: the first of equal ones; empty where a search tried none."""
    return best_of([(own.options, own.score) for own in tuned])[0] if tuned else {}


def edges_of(tuned: Sequence[Tuned]) -> dict[str, str]:
    """The options whose chosen number is the "smallest" or the "largest" of those tried."""
    chosen = chosen_of(tuned)
    tried = {name: {own.options[name] for own in tuned} for name in chosen}
    numbers = {name: value for name, value in chosen.items() if type(value) in (int, float)}
    edges = {name: merge.grid_edge(value, sorted(tried[name])) for name, value in numbers.items()}
    return {name: edge for name, edge in edges.items() if edge}


def chosen_text(tuned: Sequence[Tuned]) -> str:
    """The chosen options, each after a comma, such as ", ratio 0.2 (smallest of those tried), least 2"."""
    edges = {name: f" ({edge} of those tried)" for name, edge in edges_of(tuned).items()}
    return "".join(f", {name} {value}{edges.get(name, '')}" for name, value in chosen_of(tuned).items())


def tuned_text(own: Tuned, score: str) -> str:
    """A line on a combination, with its best coefficient where one was searched. Args: score: its text."""
    edge = merge.grid_edge(own.coef, [coef for coef, _ in own.curve]) if own.coef is not None else ""
    chosen = f" coef {own.coef:g}{f' ({edge} of those tried)' if edge else ''}," if own.curve else ""
    return f"{text_of(own.options)}:{chosen} {score}"


def facts_of_options(tuned: Sequence[Tuned], start: str) -> dict[str, Any]:
    """The options of a search for a manifest: every combination, and numbers at an edge. Args: start: of the names."""
    every = [
        {"options": own.options, "coef": own.coef, start: own.score, "curve": [list(point) for point in own.curve]}
        for own in tuned
    ]
    return {f"{start}_options": every, f"{start}_option_edges": edges_of(tuned)} if every else {}


def numbers_text(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """Numbers by expert nearly as options take them, such as "weights A 0.5 C -1, densities A 0.2 C 0.4"."""
    return ", ".join(
        f"{option} {' '.join(f'{name} {number:g}' for name, number in own.items())}" for option, own in numbers.items()
    )


def facts_of_trials(curve: Sequence[tuple[Mapping[str, Mapping[str, float]], float]], start: str) -> dict[str, Any]:
    """The trials of a search for a manifest: (numbers by expert, score) for each option. Args: start: of the names."""
    options = list(curve[0][0]) if curve else []
    return {f"{start}_{option}": [[dict(own[option]), score] for own, score in curve] for option in options}


def trials_of(manifest: Mapping[str, Any], start: str) -> tuple[tuple[ByExpert, float], ...]:
    """The trials whose `facts_of_trials` a manifest has."""
    found = {option: manifest[f"{start}_{option}"] for option in OVER if f"{start}_{option}" in manifest}
    return tuple(
        ({option: dict(own) for option, (own, _) in zip(found, points, strict=True)}, points[0][1])
        for points in zip(*found.values(), strict=True)
    )


def text_of(options: Mapping[str, Any]) -> str:
    """Names and values of a combination, such as "ratio 0.2, least 1"."""
    return ", ".join(f"{name} {value}" for name, value in options.items())
