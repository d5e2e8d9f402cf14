"""The axes of a drawing: their range, their ticks, and the ticks as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.report.document import LEAST

FEW_TICKS = 4
"""A logarithmic axis whose ends differ by less than this factor has the ticks of a linear one."""


def number(value: float, digits: int = 3) -> str:
    """Return a number in the short form of axes: 0.1, 20, 1k, 1024, 10M."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if 1e3 <= size < 1e6 and float(f"{value:.3g}") != value:
        return f"{value:.6g}"
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{float(f'{value / scale:.{digits}g}'):g}{letter}"
    return f"{float(f'{value:.{digits}g}'):g}"


def numbers(values: Sequence[float]) -> list[str]:
    """Return ticks as text, with enough digits that no two are equal."""
    for digits in range(3, 12):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return math.log(value / self.low) / math.log(self.high / self.low)


def linear_axis(values: Sequence[float], *, zero: bool, snap: bool) -> Axis:
    """Return an axis that includes zero if `zero` is set or the values are close to it; `snap` extends it to whole
    ticks."""
    low, high = min(values), max(values)
    if zero or (snap and 0 <= low <= 0.6 * high):
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high), LEAST):
        margin = abs(high) / 10 if abs(high) > LEAST else 0.5
        low, high = (low - margin, high + margin) if high or not snap else (0.0, 1.0)
    step = _step((high - low) / (5 if snap else 7))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if snap:
        low, high = first * step, last * step
    ticks = [float(f"{k * step:.12g}") for k in range(first, last + 1)]
    slack = (high - low) * 1e-9
    return Axis(low, high, False, [tick for tick in ticks if low - slack <= tick <= high + slack])


def _step(about: float) -> float:
    power = float(f"1e{math.floor(math.log10(about))}")
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999)


def log_axis(values: Sequence[float], *, snap: bool) -> Axis:
    low, high = min(values), max(values)
    if high / low < 1 + 1e-9:
        low, high = low / 3, high * 3
    if all(math.log2(value).is_integer() and value >= 1 for value in values) and not snap:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return Axis(low, high, True, [2.0**power for power in powers])
    if snap and high / low < FEW_TICKS:  # powers of ten would leave one or two ticks
        step = _step((high - low) / 5)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if first > 0:
            return Axis(first * step, last * step, True, [float(f"{k * step:.12g}") for k in range(first, last + 1)])
    decades = math.log10(high / low)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [float(f"{m}e{e}") for e in exponents for m in ((1, 2, 5) if decades <= 2.5 else (1,))]
    if snap:
        low = max(mark for mark in marks if mark <= low * (1 + 1e-9))
        high = min(mark for mark in marks if mark >= high * (1 - 1e-9))
    ticks = [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]
    if len(ticks) < 2:
        ticks = [tick for tick in linear_axis([low, high], zero=False, snap=False).ticks if tick > 0]
    return Axis(low, high, True, ticks[:: math.ceil(len(ticks) / 9)])
