"""Building blocks of findings: phrases in both languages, and values of cells that may be missing."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any, TypeVar

from cs336_systems.report.cells import CellView
from cs336_systems.report.entries import baselines
from cs336_systems.report.names import size_name
from cs336_systems.report.points import bar_name
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, ms, number, percent, varying
from cs336_systems.report.terms import KERNEL_KINDS, MODE_WORDS
from cs336_systems.text import Text, say

MOST = 3
"""Findings shown for one machine."""

Given = TypeVar("Given")
Answer = TypeVar("Answer")


_ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""Errors that data of an unexpected shape raise."""


def safely(make: Callable[[Given], Answer], given: Given) -> Answer | None:
    try:
        return make(given)
    except _ODD:
        return None


def together(first: Text | None, second: Text | None) -> Text | None:
    """Join two sentences if both exist; the last one has no full stop."""
    if first is None or second is None:
        return first or second
    return say("{}. {}", "{}。{}", first, capital(second))


def capital(text: Text) -> Text:
    """Capitalise the sentence, unless it begins with a name such as bf16 or cuDNN."""
    first = text.en.split(maxsplit=1)[0].rstrip(",:;")
    return Text(text.en[:1].upper() + text.en[1:], text.zh) if first.isalpha() and first.islower() else text


def ended(text: Text) -> Text:
    """Capitalise the sentence and add a full stop; in Chinese remove the spaces that templates leave in it."""
    zh = re.sub(r"(?<=[\u4e00-\u9fff）]) (?=[\u4e00-\u9fff（])", "", text.in_("zh"))
    return Text(f"{capital(text).en}.", f"{zh}。")


def mode_name(mode: Any) -> Text:
    return MODE_WORDS.get(str(mode), Text("step", "训练步"))


def in_mode(mode: Any) -> Text:
    found = mode_name(mode)
    return Text(f"a {found.en}", found.zh) if found.en.endswith("step") else found


def times_text(ratio: float) -> str:
    """Return a ratio with as many digits as distinguish it from 1."""
    return number(ratio, 0 if ratio >= 9.95 else 1 if ratio >= 1.15 else 2)


def ratio_text(ratio: float) -> str:
    """Return a ratio that may be far below 1 as text."""
    return f"{ratio:.2g}" if ratio < 0.1 else times_text(ratio)


def value_of(cell: CellView, metric: str) -> float | None:
    """Return the mean of a metric if it is finite and above 0, as everything measured here must be."""
    found = safely(lambda cell: cell.value(metric), cell)
    return found if found is not None and isfinite(found) and found > 0 else None


def known(cell: CellView, metric: str) -> float:
    """Return the mean of a metric that must exist; a LookupError drops the sentence."""
    found = value_of(cell, metric)
    if found is None:
        raise LookupError(metric)
    return found


def median_of(cell: CellView, metric: str) -> float | None:
    found = cell.median(metric)
    return found if found is not None and isfinite(found) and found > 0 else None


def having(cells: Iterable[CellView], *metrics: str) -> list[CellView]:
    """Return cells that succeeded and have all of these metrics."""
    return [cell for cell in cells if cell.ok and all(value_of(cell, metric) for metric in metrics)]


def scale_of(cell: CellView) -> float:
    width, layers = cell.get("d_model"), cell.get("num_layers")
    return width * width * layers if isinstance(width, int) and isinstance(layers, int) else 0


def size_of(cell: CellView) -> Text:
    return size_name(cell.get("size")) if cell.get("size") else Text("the model", "该模型")


def naming(cells: Cells) -> Callable[[CellView], Text]:
    """Return a function that names a cell among these cells."""
    shown = varying(cells)

    def name(cell: CellView) -> Text:
        found = bar_name(cell, shown)
        return found if found.en else size_of(cell)

    return name


def named_values(cells: Cells, value: Callable[[CellView], float | None]) -> list[tuple[float, Text]]:
    """Return the value of each cell that succeeded and has one, with the cell's name; for `extremes`."""
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    return [(found, name(cell)) for cell in fine if (found := value(cell)) is not None and isfinite(found)]


def pairs_of(cells: Cells, field: str, baseline: Any, metric: str = "step_time") -> list[tuple[CellView, CellView]]:
    """Return (cell, the cell that differs from it only in having the baseline value), by size."""
    fine = sorted(having(cells, metric), key=scale_of)
    base_of = baselines(fine, lambda cell: cell.get(field) == baseline, field)
    return [(cell, base) for cell in fine if cell.get(field) != baseline and (base := base_of(cell))]


def speed_up(pair: tuple[CellView, CellView], metric: str = "step_time") -> float:
    cell, base = pair
    return (value_of(base, metric) or 0.0) / (value_of(cell, metric) or 1.0)


def named_speed_ups(pairs: Sequence[tuple[CellView, CellView]], metric: str = "step_time") -> list[tuple[float, Text]]:
    """Return the speed-up of each pair with the cell's name; for `compared`."""
    name = naming([cell for cell, _ in pairs])
    return [(speed_up(pair, metric), name(pair[0])) for pair in pairs]


def span(values: Sequence[float], show: Callable[[float], str]) -> Text:
    least, most = show(min(values)), show(max(values))
    return Text(least) if least == most else say("{} to {}", "{} 到 {}", least, most)


Named = Sequence[tuple[float, Text]]
"""Values with the names of their cells; a name is empty if it is not shown."""


def ranging(en: str, zh: str, found: Named, show: Callable[[float], str], *others: str | Text) -> Text:
    """Return a sentence with the smallest and the largest value as its first argument, each with its name in brackets.

    A single value has its name at the end.
    """
    (least, least_name), (most, most_name) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if show(least) == show(most):
        return with_name(say(en, zh, show(least), *others), _only_name(found))
    ends = (with_name(Text(show(least)), least_name), with_name(Text(show(most)), most_name))
    return say(en, zh, say("{} to {}", "{} 到 {}", *ends), *others)


def _only_name(found: Named) -> Text:
    return found[0][1] if len(found) == 1 else Text("")


def with_name(said: Text, name: Text) -> Text:
    return say("{} ({})", "{}（{}）", said, name) if name.en else said


# -- comparisons ------------------------------------------------------------------------------------------------------

SAME = 1.02
"""Times or sizes within this factor of each other are called equal."""
WITHIN = Text("within 2%", "相差不超过 2%")


def is_same(ratio: float) -> bool:
    return 1 / SAME <= ratio <= SAME


def compared(ours: Text, other: Text, found: Named) -> Text:
    """State how fast `ours` is beside `other`, from the other's time over ours in each cell.

    "X is 1.30 times as fast as Y", "X takes 1.40 times as long as Y", "X is as fast as Y, within 2%", or the best and
    the worst where cells differ in that.
    """
    if not all(isfinite(ratio) and ratio > 0 for ratio, _ in found):
        raise ValueError("ratios of times must be finite and above 0")
    worst, best = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if is_same(worst[0]) and is_same(best[0]):
        same = with_name(say("{} is as fast as {}", "{} 与 {} 一样快", ours, other), _only_name(found))
        return say("{}, {}", "{}，{}", same, WITHIN)
    if worst[0] > SAME:
        return ranging("{1} is {0} times as fast as {2}", "{1} 的速度是 {2} 的 {0} 倍", found, times_text, ours, other)
    if best[0] < 1 / SAME:
        longer = [(1 / ratio, name) for ratio, name in found]
        return ranging(
            "{1} takes {0} times as long as {2}", "{1} 的用时是 {2} 的 {0} 倍", longer, times_text, ours, other
        )
    return say("{}, and {}", "{}，{}", _at_best(ours, other, *best), _at_worst(*worst))


def _at_best(ours: Text, other: Text, ratio: float, name: Text) -> Text:
    if is_same(ratio):
        return with_name(say("{} is at best as fast as {}", "{} 最好时与 {} 一样快", ours, other), name)
    values = (ours, times_text(ratio), other)
    return with_name(say("{} is at best {} times as fast as {}", "{0} 最好时速度是 {2} 的 {1} 倍", *values), name)


def _at_worst(ratio: float, name: Text) -> Text:
    if is_same(ratio):
        return with_name(Text("at worst as fast", "最差时一样快"), name)
    return with_name(say("at worst takes {} times as long", "最差时用时是其 {} 倍", times_text(1 / ratio)), name)


def beside(ratio: float, other: Text) -> Text:
    """Return the same comparison as part of a sentence that has stated a time: "1.30 times as fast as Y"."""
    if is_same(ratio):
        return say("as fast as {}, {}", "与 {} 一样快，{}", other, WITHIN)
    if ratio > 1:
        return say("{1} times as fast as {0}", "速度是 {0} 的 {1} 倍", other, times_text(ratio))
    return say("{1} times as long as {0}", "是 {0} 的 {1} 倍", other, times_text(1 / ratio))


def longer(one: Text, other: Text, ratio: float) -> Text:
    """State which takes longer, given the time of `one` over that of the other."""
    if is_same(ratio):
        return say("{} takes as long as {}, {}", "{} 与 {} 用时相同，{}", one, other, WITHIN)
    if ratio < 1:
        one, other, ratio = other, one, 1 / ratio
    return say("{} takes {} times as long as {}", "{0} 的用时是 {2} 的 {1} 倍", one, times_text(ratio), other)


def memory_beside(ratios: Sequence[float], other: Text) -> Text | None:
    """State the peak memory over that of `other`; None where there is none."""
    if not ratios:
        return None
    if all(map(is_same, ratios)):
        return say("its peak memory is that of {}, {}", "峰值显存与 {} 相同，{}", other, WITHIN)
    times = span(ratios, ratio_text)
    return say("its peak memory is {1} times that of {0}", "峰值显存是 {0} 的 {1} 倍", other, times)


def with_time(name: Text, milliseconds: str) -> Text:
    return say("{} ({} ms)", "{}（{} ms）", name, milliseconds)


def error_text(error: float) -> Text:
    """Return a relative error without its sign."""
    return Text("less than 0.01%", "不到 0.01%") if error < 5e-5 else Text(percent(error, 2))


def worst_prediction(cells: Cells) -> Text | None:
    """State the largest error of predicted peak memory."""
    fine = having(cells, "peak_memory", "predicted_memory")
    worst = max(fine, key=lambda cell: abs(cell.memory_error or 0.0))
    error = error_text(abs(worst.memory_error or 0.0))
    said = say("the predicted peak is off by {}", "预测的峰值误差 {}", error)
    if len(fine) > 1:
        said = say("the worst of {} predicted peaks is off by {}", "{} 个峰值预测的最大误差 {}", str(len(fine)), error)
    sizes = [gib(value_of(worst, name)) for name in ("predicted_memory", "peak_memory")]
    values = say("{} GiB predicted, {} GiB measured", "预测 {} GiB，实测 {} GiB", *sizes)
    return with_name(say("{}: {}", "{}：{}", said, values), naming(fine)(worst) if len(fine) > 1 else Text(""))


def worst_step_time(cells: Cells) -> Text | None:
    """State the largest error of predicted step times, and the kind of kernels that takes most of this one."""
    fine = [cell for cell in having(cells, "step_time") if cell.time_error is not None]
    if not fine:
        return None
    worst = max(fine, key=lambda cell: abs(cell.time_error or 0.0))
    error = percent(abs(worst.time_error or 0.0))
    said = say("the predicted step time is off by {}", "预测的单步时间误差 {}", error)
    if len(fine) > 1:
        said = say(
            "the worst of {} predicted step times is off by {}", "{} 个单步时间预测的最大误差 {}", str(len(fine)), error
        )
    times = [ms(seconds) for seconds in (worst.predicted_time, worst.value("step_time"))]
    values = say("{} ms predicted, {} ms measured", "预测 {} ms，实测 {} ms", *times)
    named = with_name(say("{}: {}", "{}：{}", said, values), naming(fine)(worst) if len(fine) > 1 else Text(""))
    return together(named, _largest_kind(worst))


LAUNCH_BOUND = Text("it is launch-bound: the host's launches decide its time", "该步受限于主机发射内核的速度")


def _largest_kind(cell: CellView) -> Text | None:
    """State the kind of kernels with the largest share of a predicted step: the first to look at."""
    if cell.prediction is None:
        return None
    if cell.prediction.time.is_launch_bound:
        return LAUNCH_BOUND
    kind = KERNEL_KINDS[next(iter(cell.prediction.time.by_kind()))]
    return say("{} are the largest part of its predicted time", "其预测时间中{}占比最大", kind)


def predictions_hold(cells: Cells) -> Text | None:
    """State for the first screen how far predicted step times are off."""
    fast = [cell for cell in having(cells, "step_time") if (cell.get("fast") or "off") != "off"]
    errors = [abs(cell.time_error) for cell in fast if cell.time_error is not None]
    if not errors:
        return None
    count, error = str(len(errors)), percent(max(errors))
    return say(
        "predicted times of {} fast steps are off by {} at most", "{} 个快速步的预测时间误差不超过 {}", count, error
    )
