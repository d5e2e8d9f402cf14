"""The ratio of two medians, the geometric mean of several ratios, and their confidence intervals.

The interval is a percentile bootstrap, widened by Student's t of the smaller sample. At 95% the plain one finds a
difference in 33% of pairs that have none at n = 2, in 10% at n = 3 and in 3% at n = 10; the widened one in 1 to 2%.
What that leaves is needed: steps that resemble the step before (correlation 0.3) make it 6%.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cs336_systems.record import percentile

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians; the bounds are None where a side has a single sample."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio_of_medians(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Ratio:
    """Return B / A of samples above 0, with its interval; the result is deterministic."""
    a, b = sorted(a), sorted(b)
    value = statistics.median(b) / statistics.median(a)
    if min(len(a), len(b)) < 2:
        return Ratio(value)
    under, over = _resampled_medians(a, seed=0), _resampled_medians(b, seed=1)
    ratios = sorted(y / x for x, y in zip(under, over, strict=True))
    tail = (1 - confidence) / 2 * 100
    wider = _widening(min(len(a), len(b)) - 1, confidence)
    low, high = (_stretched(value, percentile(ratios, percent), wider) for percent in (tail, 100 - tail))
    return Ratio(value, low, high)


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """Return the geometric mean of ratios, with the interval that their own intervals give if their errors are
    independent: in logarithms, the squares of the errors add up. No interval where a ratio has none."""
    logs = [math.log(ratio.value) for ratio in ratios]
    center = math.fsum(logs) / len(logs)
    ends = [_mean_end(center, logs, [getattr(ratio, end) for ratio in ratios], sign) for end, sign in _ENDS]
    return Ratio(_bounded_exp(center), *ends)


_ENDS = (("low", -1), ("high", 1))


def _mean_end(center: float, logs: Sequence[float], ends: Sequence[float | None], sign: int) -> float | None:
    errors = [math.log(end) - log for end, log in zip(ends, logs, strict=True) if end is not None]
    return _bounded_exp(center + sign * math.hypot(*errors) / len(logs)) if len(errors) == len(logs) else None


def _stretched(center: float, end: float, factor: float) -> float:
    """Return the end of an interval, moved to `factor` times its distance from the center; in logarithms, so that it
    stays above 0."""
    return _bounded_exp(math.log(center) + factor * math.log(end / center))


def _bounded_exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))


def _resampled_medians(ordered: Sequence[float], seed: int) -> list[float]:
    return [(ordered[low] + ordered[high]) / 2 for low, high in _middles(len(ordered), seed)]


@lru_cache(maxsize=256)
def _middles(n: int, seed: int) -> list[tuple[int, int]]:
    """Return, for each bootstrap resample of n sorted samples, the indices of its two middle ones (equal if n is odd).

    The other samples are not drawn, so that thousands of samples cost no more than ten: of n uniform numbers the k-th
    follows a beta distribution, and so does the least of the n - k above it.
    """
    generator = random.Random(seed)
    lower = (n + 1) // 2
    found = []
    for _ in range(RESAMPLES):
        low = generator.betavariate(lower, n - lower + 1)
        high = low if n % 2 else 1 - (1 - low) * generator.random() ** (1 / (n - lower))
        found.append((min(int(n * low), n - 1), min(int(n * high), n - 1)))
    return found


@lru_cache(maxsize=256)
def _widening(degrees: int, confidence: float) -> float:
    """Return Student's t over the normal distribution's z: the factor that widens an interval of so few samples."""
    degrees = min(degrees, 1000)  # beyond, t is z to a thousandth
    below, above = 0.0, math.pi / 2
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (middle, above) if _share_within(middle, degrees) < confidence else (below, middle)
    return math.sqrt(degrees) * math.tan(below) / statistics.NormalDist().inv_cdf((1 + confidence) / 2)


def _share_within(angle: float, degrees: int) -> float:
    """Return the share of Student's t within ±sqrt(degrees) tan(angle): a finite sum (Abramowitz and Stegun,
    26.7.3-4)."""
    odd, cosine = degrees % 2, math.cos(angle)
    term, total = cosine**odd, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
