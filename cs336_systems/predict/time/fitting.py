"""A GPU's profile from measured kernels: the rates with which `kernel_seconds` is closest to them. No torch."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from cs336_systems.predict.time.gpu_profile import AttentionRates, GpuProfile, MatmulRates, PassRates
from cs336_systems.predict.time.kernel_seconds import attention_seconds, kernel_seconds, pass_seconds, rates_name
from cs336_systems.predict.time.step_kernels import AttentionPass, Matmul, Pass

LARGEST_ERROR = 0.3
"""Maximum relative error of a kernel in the fit; a kernel with a larger error ran other code than assumed and is
ignored."""
FIRST_STEP, LAST_STEP = 0.2, 0.01
"""First and last relative change of a rate in the search."""

PROGRAM_SECONDS = (1e-7, 3e-7, 1e-6)
"""Seconds per program from which the search starts."""
ATTENTION_BEGINS = (
    AttentionRates(1e-6, 4e-6, 3e-6),
    AttentionRates(1e-6, 2e-7, 2e-7),
    AttentionRates(1e-6, 2e-6, 1e-6, alone=1.5),
)
"""Rates of attention from which the search starts; they are first scaled such that their sum matches the times."""

Rates = TypeVar("Rates", MatmulRates, AttentionRates, PassRates)


Timed = Matmul | Pass | AttentionPass
"""Kernels that are timed one by one."""


class Measured(NamedTuple):
    kernel: Timed
    seconds: float


def fit_matmuls(found: Sequence[Measured], profile: GpuProfile, precision: str = "") -> MatmulRates:
    """Return the rates of matmuls of one precision, "" for 16 bits; `profile` has the peak, the number of SMs, and
    initial rates."""
    own = [(k, seconds) for k, seconds in found if isinstance(k, Matmul) and k.precision == precision]

    def error(rates: MatmulRates) -> float:
        if precision:
            wide = {precision: dataclasses.replace(profile.wide[precision], rates=rates)}
            changed = dataclasses.replace(profile, wide=wide)
        else:
            changed = dataclasses.replace(profile, matmul=rates)
        return _mean_error((kernel_seconds(kernel, changed), seconds) for kernel, seconds in own)

    return _search(profile.wide[precision].rates if precision else profile.matmul, error)


def fit_passes(found: Iterable[Measured], sms: int) -> dict[str, PassRates]:
    """Return the rates of each pass by name, and the medians of all under "other"."""
    by_name: dict[str, list[tuple[Pass, float]]] = defaultdict(list)
    for kernel, seconds in found:
        if isinstance(kernel, Pass):
            by_name[kernel.name].append((kernel, seconds))
    rates = {name: _fit_programs(own, sms) for name, own in by_name.items()}
    every = list(rates.values())
    middle = [statistics.median(getattr(own, field) for own in every) for field in ("bandwidth", "fixed")]
    return {**rates, "other": PassRates(*middle)}


def _fit_programs(points: list[tuple[Pass, float]], sms: int) -> PassRates:
    """Return the rates of a pass; if some of its kernels are bound by their programs, fit the programs' rates, too."""
    plain = _fit_pass([(kernel.bytes, seconds) for kernel, seconds in points])
    if not any(kernel.programs for kernel, _ in points):
        return plain

    def error(rates: PassRates) -> float:
        return _mean_error((pass_seconds(kernel, rates, sms), seconds) for kernel, seconds in points)

    fastest = max(kernel.bytes / seconds for kernel, seconds in points)
    begins = (plain, *(PassRates(fastest, 1e-6, own, own / 1000) for own in PROGRAM_SECONDS))
    return min((_search(begin, error) for begin in begins), key=error)


def _fit_pass(points: list[tuple[int, float]]) -> PassRates:
    """Return the line with the least squares of relative errors: fixed / seconds + size / (bandwidth * seconds) = 1."""
    a = sum(1 / seconds**2 for _, seconds in points)
    b = sum(size / seconds**2 for size, seconds in points)
    c = sum(size**2 / seconds**2 for size, seconds in points)
    ones, sizes = sum(1 / seconds for _, seconds in points), sum(size / seconds for size, seconds in points)
    determinant = a * c - b * b
    fixed = (ones * c - sizes * b) / determinant if determinant > 1e-9 * a * c else 0.0
    if not 0 <= fixed < min(seconds for _, seconds in points):
        fixed = 0.0
    usual = statistics.median(size / (seconds - fixed) for size, seconds in points)
    return PassRates(usual, fixed)


def fit_attention(found: Iterable[Measured], sms: int) -> dict[str, AttentionRates]:
    """Return the rates of each pass and head dim; grouped heads have their own."""
    by_name: dict[str, list[tuple[AttentionPass, float]]] = defaultdict(list)
    for kernel, seconds in found:
        if isinstance(kernel, AttentionPass):
            by_name[rates_name(kernel)].append((kernel, seconds))

    def fitted(points: list[tuple[AttentionPass, float]]) -> AttentionRates:
        def error(rates: AttentionRates) -> float:
            return _mean_error((attention_seconds(kernel, rates, sms), seconds) for kernel, seconds in points)

        found = []
        for begin in ATTENTION_BEGINS:
            ratio = statistics.median(seconds / attention_seconds(kernel, begin, sms) for kernel, seconds in points)
            scaled = AttentionRates(ratio * begin.tile, ratio * begin.program, ratio * begin.fixed, alone=begin.alone)
            found.append(_search(scaled, error))
        return min(found, key=error)

    return {name: fitted(points) for name, points in by_name.items()}


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean relative error of (predicted, measured) seconds; long kernels weigh more than short ones."""
    total = weights = 0.0
    for predicted, measured in pairs:
        weight = 0.3 + 0.7 * math.sqrt(min(measured, 1e-3) / 1e-3)
        total += weight * min(abs(math.log(predicted / measured)), LARGEST_ERROR)
        weights += weight
    return total / weights


def _search(rates: Rates, error: Callable[[Rates], float]) -> Rates:
    """Change one rate at a time, up or down, as long as the error falls; then with smaller changes."""
    best, step = error(rates), FIRST_STEP
    while step > LAST_STEP:
        improved = False
        for field in dataclasses.fields(rates):
            for factor in (math.exp(step), math.exp(-step)):
                changed = dataclasses.replace(rates, **{field.name: getattr(rates, field.name) * factor})
                if (found := error(changed)) < best - 1e-6:
                    best, rates, improved = found, changed, True
                    break
        if not improved:
            step /= 2
    return rates
