"""Weights and densities of single experts, by any score: CMA-ES moves a normal distribution to the best candidates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from ...errors import count_problem, raise_problems
from ..parts.inputs import type_problems
from ..parts.merger import Merger
from ..parts.per_expert import Sparse
from .select import Selection, best_of, choose, exceeds

K = TypeVar("K")
ByExpert: TypeAlias = dict[str, dict[str, float]]  # numbers by option of a merger, such as "weights", and by expert

OVER: Final = {"weights": "weight", "densities": "density"}  # the options that trials vary, and a number of each
STEP = 0.3  # standard deviation of the first log factors: most lie between 0.5 and 2
_FAR = math.log(100.0)  # a log factor is at most this large in size
_DIGITS = 4  # of a number: equal numbers to this precision are the same model


def numbers_of(config: Merger, names: Sequence[str], over: Sequence[str] = ("weights",)) -> ByExpert:
    """The weights or densities of a merger by expert: where none is given 1, or the merger's own density.

    Args: names: of the experts, in their order; over: "weights", "densities" or both.
    """
    found = ByExpert()
    for option in over:
        own: Any = vars(config)[option]
        given = own if isinstance(own, Mapping) else dict(zip(names, own, strict=False))
        default: Callable[[str], Any] = (lambda _: 1.0) if option == "weights" else _sparse(config).density
        found[option] = {name: given[name] if name in given else default(name) for name in names}
    return found


def _sparse(config: Merger) -> Sparse:
    assert isinstance(config, Sparse), "others have no densities"
    return config


def with_numbers(config: Merger, numbers: Mapping[str, Mapping[str, float]]) -> Merger:
    """The merger with other numbers, itself where it has these. Args: numbers: as of `numbers_of`."""
    changes: dict[str, Any] = {
        option: dict(own) if isinstance(vars(config)[option], Mapping) else tuple(own.values())
        for option, own in numbers.items()
        if own != numbers_of(config, list(own), [option])[option]
    }
    return replace(config, **changes) if changes else config


def population(count: int) -> int:
    """Candidates in a generation of CMA-ES of ``count`` numbers: 4 + ⌊3 ln count⌋."""
    return 4 + int(3 * math.log(count))


def over_problems(config: Merger, over: Sequence[str], label: str = "over", trials: str = "trials") -> list[str]:
    """Errors for options that trials cannot vary. Args: label, trials: names of ``over`` and of trials in errors."""
    known = isinstance(over, (list, tuple)) and all(option in list(OVER) for option in over)
    if not known or not 0 < len(over) == len({*over}):
        return [f"{label} is {over!r}, must be {' or '.join(OVER)}, or both"]
    return [
        f"{trials}: {config.name} takes no {option} by expert, leave {label if option != 'weights' else 'it'} out"
        for option in over
        if option not in vars(config)
    ]


def check_trials(start: Mapping[str, Mapping[str, float]], trials: int, label: str = "trials") -> None:
    """Check numbers by option and expert that CMA-ES is to begin with. Args: label: name of trials in errors.

    Raises: ValueError and ModuleNotFoundError as `select_weights`.
    """
    every = {f"the {OVER[option]} of {name!r}": x for option, own in start.items() for name, x in own.items()}
    problems = type_problems(**every)
    raise_problems(problems or [f"{what} is {x}, must be finite" for what, x in every.items() if not math.isfinite(x)])
    counts = {option: sum(x != 0 for x in own.values()) for option, own in start.items()}
    if (count := sum(counts.values())) < 2:
        raise ValueError(
            f"{label}: CMA-ES needs at least two {' and '.join(counts)} other than 0, of {[*start[next(iter(start))]]} "
            f"there {'is' if count else 'are'} {count or 'none'}: search one coefficient alone"
        )
    kinds = " and ".join(f"{own} {option}" for option, own in counts.items())
    raise_problems([f"{text}: a generation of {kinds}" for text in count_problem(label, trials, population(count))])
    _cma()


def _cma() -> Any:
    try:
        import cma
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("CMA-ES needs the package cma: pip install cma", name="cma") from error
    return cma


def select_weights(
    start: Mapping[str, float], score: Callable[[dict[str, float]], float], *, trials: int, seed: int = 0
) -> Selection[dict[str, float]]:
    """A weight for each expert, by CMA-ES: the weights of the largest score among ``start`` and ``trials`` others.

    The weight of an expert is w = s exp(z), s that of ``start``, |z| at most ln 100: it keeps the sign of s, and 0
    stays 0. z is normal, at first of mean 0 and standard deviation 0.3; after each generation of 4 + ⌊3 ln n⌋
    candidates, n the number of weights other than 0, its mean and covariance move towards those that do best. Weights
    have four significant digits. The same arguments and scores give the same candidates, and more trials begin with
    them.

    Args:
        start: weights by expert, scored first, such as 1 for each.
        score: of weights by expert, the larger the better: the mean dev score of the merged model.
        trials: candidates beside ``start``, at most: after a generation of equal scores there are no more.
        seed: of the normal numbers, any integer.

    Returns:
        The choice, the earlier one of equal scores; its curve begins with ``start``.

    Raises:
        ValueError: fewer than two weights are other than 0, trials are fewer than a generation, a weight is not finite,
            or a score is NaN.
        ModuleNotFoundError: the package cma is missing.

    Source: Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772; the package cma.
    """
    if not isinstance(start, Mapping):
        raise ValueError(f"start is {start!r}, must be a mapping {{expert's name: weight}}")
    check_trials({"weights": start}, trials)
    return _select(start, {}, score, trials, seed)


def select_numbers(
    config: Merger,
    names: Sequence[str],
    score: Callable[[ByExpert], float],
    *,
    over: Sequence[str] = ("weights",),
    trials: int,
    seed: int = 0,
) -> Selection[ByExpert]:
    """A weight, a density, or both, for each expert, by CMA-ES as in `select_weights`, from a merger's numbers on.

    A density is s exp(z) in the range that the merger allows: (0, 1], of DELLA as its window allows.

    Args:
        config: its numbers are the start (`numbers_of`), and `with_numbers` puts others in.
        names: of the experts, in their order.
        score: of numbers by option and expert, the larger the better.
        over: "weights", "densities" or both, options of the merger.
        trials, seed: as of `select_weights`.

    Returns:
        The choice as `select_weights` returns it, of numbers by option and expert.

    Raises:
        ValueError: as `select_weights`; for ``over`` that names other options, or those that the merger does not have.
        ModuleNotFoundError: the package cma is missing.
    """
    raise_problems(over_problems(config, over))
    start = numbers_of(config, names, over)
    check_trials(start, trials)
    flat = {(option, name): x for option, own in start.items() for name, x in own.items()}
    limits = {at: _sparse(config).density_limits(at[1]) for at in flat if at[0] == "densities"}

    def nested(numbers: Mapping[tuple[str, str], float]) -> ByExpert:
        return {option: {name: numbers[option, name] for name in own} for option, own in start.items()}

    found = _select(flat, limits, lambda own: score(nested(own)), trials, seed)
    return Selection(nested(found.best), found.score, tuple((nested(own), value) for own, value in found.curve))


def _select(
    start: Mapping[K, float],
    limits: Mapping[K, tuple[float, float]],
    score: Callable[[dict[K, float]], float],
    trials: int,
    seed: int,
) -> Selection[dict[K, float]]:
    """The choice of `select_weights` among any numbers. Args: limits: the lowest and the largest value of some."""
    first, curve = {name: float(x) for name, x in start.items()}, list[tuple[dict[K, float], float]]()

    def scored(numbers: dict[K, float]) -> float:
        curve.append((numbers, choose([numbers], score).score))
        return curve[-1][1]

    scored(first)
    search = _strategy(sum(x != 0 for x in first.values()), seed)
    while (left := trials + 1 - len(curve)) > 0:
        points = search.ask()
        found = [scored(_numbers(first, limits, point)) for point in points[:left]]
        if left < len(points) or not exceeds(max(found), min(found)):
            break
        # places in order of their scores, not scores: they may be infinite, and of equal ones the earlier comes first
        order = sorted(range(len(found)), key=lambda place: -found[place])
        search.tell(points, [order.index(place) for place in range(len(found))])
    return Selection(*best_of(curve), tuple(curve))


def _numbers(
    start: Mapping[K, float], limits: Mapping[K, tuple[float, float]], point: Sequence[float]
) -> dict[K, float]:
    """The numbers of log factors, one for each number of ``start`` that is not 0."""
    factors, found = iter(point), dict[K, float]()
    for name, x in start.items():
        low, high = limits.get(name, (-math.inf, math.inf))
        found[name] = min(max(float(f"{x * math.exp(next(factors)):.{_DIGITS}g}"), low), high) if x else x
    return found


def _strategy(count: int, seed: int) -> Any:
    """CMA-ES of ``count`` log factors, with random numbers of its own: NumPy's global ones stay as they are."""
    # a stream that NumPy never changes, so that a later version resumes the same search
    numbers = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed % 2**64)))
    options = {
        "popsize": population(count), "bounds": [-_FAR, _FAR], "randn": numbers.randn, "seed": math.nan,
        "verbose": -9,
    }  # fmt: skip
    return _cma().CMAEvolutionStrategy([0.0] * count, STEP, options)
