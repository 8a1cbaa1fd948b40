"""Means over seeds and their uncertainty: Student's t intervals, paired differences, signs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROUNDING = 1e-9  # points: means of equal scores in another order differ by less


class Estimate(NamedTuple):
    """A mean of n independent values, with its interval where n > 1."""

    values: tuple[float, ...]
    mean: float
    sd: float | None  # n - 1
    interval: tuple[float, float] | None  # of the mean, by Student's t with n - 1 degrees of freedom

    @property
    def signs(self) -> tuple[int, int, int]:
        """How many values are above, at, and below 0, but for rounding."""
        above, below = sum(v > ROUNDING for v in self.values), sum(v < -ROUNDING for v in self.values)
        return above, len(self.values) - above - below, below

    @property
    def alike(self) -> bool:
        """Whether all values are equal, but for rounding: such an interval is a point, whatever n."""
        return max(self.values) - min(self.values) <= ROUNDING

    @property
    def settled(self) -> bool:
        """Whether the interval leaves out 0, by more than rounding."""
        return self.interval is not None and (self.interval[0] > ROUNDING or self.interval[1] < -ROUNDING)


def estimate(values: Iterable[float], *, level: float = 0.95) -> Estimate:
    """``mean ± t_{(1 + level) / 2, n - 1} sd / sqrt(n)``.

    Raises: ValueError for no values, and for a level outside (0, 1).
    """
    values = tuple(values)
    if not values or not 0 < level < 1:
        raise ValueError(f"level {level} of {len(values)} values: give a level in (0, 1), and some values")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(values, mean, None, None)
    from scipy.special import stdtrit  # the quantile behind scipy.stats.t, which takes a second to import

    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stdtrit(n - 1, (1 + level) / 2)) * sd / math.sqrt(n)
    return Estimate(values, mean, sd, (mean - half, mean + half))


def settled_together(found: Mapping[str, Estimate], *, level: float = 0.05) -> list[str]:
    """Names of means that differ from 0 by t tests with Holm's correction for their number.

    The smallest of k p-values is compared with level / k, the next one with level / (k - 1), and so on until one is
    larger: the probability of any false name is at most ``level``.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    from scipy.special import stdtr

    p = {}
    for name, own in found.items():
        if own.sd is None or abs(own.mean) <= ROUNDING:
            p[name] = 1.0
        else:
            n = len(own.values)
            p[name] = 2 * float(stdtr(n - 1, -abs(own.mean) * math.sqrt(n) / own.sd)) if own.sd else 0.0
    names = []
    for place, name in enumerate(sorted(p, key=lambda name: p[name])):
        if p[name] > level / (len(p) - place):
            break
        names.append(name)
    return [name for name in found if name in names]


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign; one that is 0 but for rounding as +0.00."""
    return f"{0.0 if abs(value) <= ROUNDING else value:+.{digits}f}"


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """``second - first`` per seed that both have, None where there is none."""
    seeds = sorted(set(first) & set(second))
    return estimate(second[seed] - first[seed] for seed in seeds) if seeds else None


def paired(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Differences second - first per seed: mean, standard deviation (n - 1) and 95 % t interval of the mean."""
    found = estimate(b - a for a, b in zip(first, second, strict=True))
    facts = {"differences": list(found.values), "mean": found.mean}
    if found.interval is None:
        return facts
    return {**facts, "sd": found.sd, "interval": list(found.interval)}
