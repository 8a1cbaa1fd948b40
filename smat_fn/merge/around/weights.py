"""A weight for each expert, by any score: CMA-ES, which moves a normal distribution towards the best candidates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import count_problem, raise_problems
from ..parts.inputs import type_problems
from ..parts.merger import Merger
from .select import Selection, best_of, choose, exceeds

STEP = 0.3  # standard deviation of the first log factors: most lie between 0.5 and 2
_FAR = math.log(100.0)  # a log factor is at most this large in size
_DIGITS = 4  # of a weight: equal weights to this precision are the same model


def weights_of(config: Merger, names: Sequence[str]) -> dict[str, float]:
    """The weights of a merger by expert, 1 where none is given. Args: names: of the experts, in their order."""
    own: Any = vars(config)["weights"]
    given = own if isinstance(own, Mapping) else dict(zip(names, own, strict=False))
    return {name: given.get(name, 1.0) for name in names}


def with_weights(config: Merger, weights: Mapping[str, float]) -> Merger:
    """The merger with other weights, itself where it has these. Args: weights: by expert, in their order."""
    if weights == weights_of(config, list(weights)):
        return config
    by_name = isinstance(vars(config)["weights"], Mapping)
    changes: Any = {"weights": dict(weights) if by_name else tuple(weights.values())}
    return replace(config, **changes)


def population(count: int) -> int:
    """Candidates in a generation of CMA-ES with ``count`` weights: 4 + ⌊3 ln count⌋."""
    return 4 + int(3 * math.log(count))


def check_trials(start: Mapping[str, float], trials: int, label: str = "trials") -> None:
    """Check what `select_weights` is given. Args: label: name of trials in errors.

    Raises: ValueError and ModuleNotFoundError as `select_weights`.
    """
    if not isinstance(start, Mapping):
        raise ValueError(f"start is {start!r}, must be a mapping {{expert's name: weight}}")
    problems = [text for name, w in start.items() for text in type_problems(**{f"the weight of {name!r}": w})]
    infinite = [name for name, w in start.items() if not problems and not math.isfinite(w)]
    raise_problems(problems or [f"the weight of {name!r} is {start[name]}, must be finite" for name in infinite])
    count = sum(w != 0 for w in start.values())
    if count < 2:
        raise ValueError(
            f"{label}: CMA-ES needs two experts at least with a weight other than 0, of {list(start)} there "
            f"{'is' if count else 'are'} {count or 'none'}: search one coefficient alone"
        )
    least = population(count)
    raise_problems([f"{text}: a generation of {count} weights" for text in count_problem(label, trials, least)])
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
    check_trials(start, trials)
    first, curve = {name: float(w) for name, w in start.items()}, list[tuple[dict[str, float], float]]()

    def scored(weights: dict[str, float]) -> float:
        curve.append((weights, choose([weights], score).score))
        return curve[-1][1]

    scored(first)
    search = _strategy(sum(w != 0 for w in first.values()), seed)
    while (left := trials + 1 - len(curve)) > 0:
        points = search.ask()
        found = [scored(_weights(first, point)) for point in points[:left]]
        if left < len(points) or not exceeds(max(found), min(found)):
            break
        # places in order of their scores, not scores: they may be infinite, and of equal ones the earlier comes first
        order = sorted(range(len(found)), key=lambda place: -found[place])
        search.tell(points, [order.index(place) for place in range(len(found))])
    return Selection(*best_of(curve), tuple(curve))


def _weights(start: Mapping[str, float], point: Sequence[float]) -> dict[str, float]:
    """Weights by expert of log factors, one for each weight of ``start`` that is not 0."""
    factors = iter(point)
    return {name: float(f"{w * math.exp(next(factors)):.{_DIGITS}g}") if w else w for name, w in start.items()}


def _strategy(count: int, seed: int) -> Any:
    """CMA-ES of ``count`` log factors, with random numbers of its own: NumPy's global ones stay as they are."""
    # a stream that NumPy never changes, so that a later version resumes the same search
    numbers = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed % 2**64)))
    options = {
        "popsize": population(count), "bounds": [-_FAR, _FAR], "randn": numbers.randn, "seed": math.nan,
        "verbose": -9,
    }  # fmt: skip
    return _cma().CMAEvolutionStrategy([0.0] * count, STEP, options)
