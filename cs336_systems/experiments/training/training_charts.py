"""Charts of training runs: loss, differences, speed, gradient norm, learning rate, memory."""

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from cs336_systems.experiments.training.curves import (
    LONG,
    Curve,
    Run,
    difference,
    finite_values,
    runs_of,
    sampled,
    smoothed,
    thinned,
)
from cs336_systems.files import is_number
from cs336_systems.record import GIB
from cs336_systems.report.document import Chart, Event, Limit, Point, Series
from cs336_systems.report.phrases import span
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import number, percent
from cs336_systems.report.terms import GIB_TEXT, LOSS, MEMORY, TOKENS_PER_SECOND
from cs336_systems.text import Text, listed, say

STEP = Text("step", "步")
SINGLE_STEPS = Text("single steps", "单步")
RUNNING_MEDIAN = Text("running median", "滑动中位数")
RUNNING_MEAN = Text("running mean", "滑动均值")
VALIDATION = Text("validation", "验证")
VALIDATION_LOSS = Text("validation loss", "验证损失")
GRADIENT_NORM = Text("gradient norm", "梯度范数")
LEARNING_RATE = Text("learning rate", "学习率")
DIFFERENCE = Text("difference", "差值")
LOSS_TITLE = Text("Loss", "损失")
VALIDATION_TITLE = Text("Validation loss", "验证损失")
SPEED_TITLE = Text("Tokens per second", "每秒 token 数")
NORM_TITLE = Text("Gradient norm", "梯度范数")
RATE_TITLE = Text("Learning rate", "学习率")
MEMORY_TITLE = Text("Peak memory", "峰值显存")
MEANS = ("running means of {} steps", "{} 步的滑动均值")
MEDIANS = ("running medians of {} steps", "{} 步的滑动中位数")
NOT_FINITE = Text("not finite: the step was skipped", "非有限值：该步被跳过")
LOG_FROM = 20.0
"""A chart has a logarithmic axis if the ratio of its largest to its smallest value exceeds this."""
MOST_SAVES = 8
"""Saves are marked in a chart only if there are at most this many."""
MOST_RESTARTS = 12
MOST_CROSSES = 40
"""Maximum number of skipped steps that a chart marks; of more only an equally spaced selection is marked."""
Value = TypeVar("Value")


def training_charts(cells: Cells) -> list[Chart]:
    """Return the charts, the most important first: a page may show only that one."""
    runs = runs_of(cells)
    if not runs:
        return []
    charts = _charts_of_one(runs[0]) if len(runs) == 1 else _charts_of_several(runs)
    return [chart for chart in charts if chart.shown]


def _charts_of_one(run: Run) -> list[Chart]:
    restarts = _restarts(run)
    loss = _measured(run, run.losses, LOSS, run.smoothed_losses, RUNNING_MEAN, run.skipped)
    validation = Series(VALIDATION, _points(thinned(run.drawn(run.validation))), drawn="marks")
    speed = _medians(run, run.speeds, TOKENS_PER_SECOND)
    mfu = statistics.median(run.utilization.values()) if run.utilization else None
    on_mfu = say("median MFU {}", "MFU 中位数 {}", percent(mfu)) if mfu else None
    norms = _medians(run, run.curve("gradient_norm"), GRADIENT_NORM)
    memory = {step: value / GIB for step, value in run.memory.items()}
    on_memory = Text("peak on rank 0 since the record before", "rank 0 自上一条记录以来的峰值")
    return [
        _lines("loss", LOSS_TITLE, LOSS, [*loss, validation], note=_note([run], MEANS), events=restarts, digits=4),
        _lines(
            "speed",
            SPEED_TITLE,
            TOKENS_PER_SECOND,
            speed,
            note=_note([run], MEDIANS, on_mfu),
            events=[*restarts, *_saves(run)],
            digits=0,
            from_zero=True,
        ),
        _norm_chart([run], norms, restarts),
        _rate_chart([run]),
        _lines(
            "memory", MEMORY_TITLE, GIB_TEXT, [_line(MEMORY, thinned(memory))], note=on_memory, digits=2, from_zero=True
        ),
    ]


def _charts_of_several(runs: Sequence[Run]) -> list[Chart]:
    """Return charts with a series for each run, so that a run has the same colour in all."""

    def by_run(curve: Callable[[Run], Curve]) -> list[Series]:
        return [_line(Text(run.name), run.drawn(curve(run))) for run in runs]

    loss, less = by_run(lambda run: run.smoothed_losses), by_run(lambda run: _loss_less(run, runs[0]))
    validation = [Series(Text(run.name), _points(thinned(run.validation))) for run in runs]
    speed = by_run(lambda run: smoothed(run.speeds, run.window))
    norms = by_run(lambda run: smoothed(run.curve("gradient_norm"), run.window))
    means, below = _note(runs, MEANS), Text("below 0: a lower loss", "低于 0：损失更低")
    title = say("Loss less that of {}", "损失与 {} 之差", runs[0].name)
    events = [event for run in runs for event in _restarts(run, run.name)]
    events = events if len(events) <= MOST_RESTARTS else []
    return [
        _lines("loss", LOSS_TITLE, LOSS, loss, note=means, events=events, digits=4),
        _lines(
            "difference",
            title,
            DIFFERENCE,
            less if any(series.points for series in less[1:]) else [],
            note=_note(runs, MEANS, below),
            digits=4,
            can_be_log=False,
        ),
        _lines("validation", VALIDATION_TITLE, VALIDATION_LOSS, validation, digits=4),
        _lines(
            "speed",
            SPEED_TITLE,
            TOKENS_PER_SECOND,
            speed,
            note=_note(runs, MEDIANS),
            events=events,
            digits=0,
            from_zero=True,
        ),
        _norm_chart(runs, norms),
        _rate_chart(runs),
    ]


def _lines(
    name: str,
    title: Text,
    y: Text,
    series: Sequence[Series],
    *,
    note: Text | None = None,
    limits: Sequence[Limit] = (),
    events: Sequence[Event] = (),
    digits: int | None = None,
    can_be_log: bool = True,
    from_zero: bool = False,
) -> Chart:
    log = can_be_log and not from_zero and _needs_log(series)
    return Chart(
        name,
        title,
        "lines",
        STEP,
        y,
        series,
        log_y=log,
        note=note,
        limits=limits,
        events=events,
        digits=digits,
        from_zero=from_zero,
    )


def _needs_log(series: Sequence[Series]) -> bool:
    """Return True if the lines span a wide range, or if marks of single steps would flatten them."""
    drawn = [(point.y, one.drawn == "marks") for one in series for point in one.points if not point.note]
    lines = [value for value, is_mark in drawn if not is_mark] or [value for value, _ in drawn]
    if not lines or min(lines) <= 0:
        return False
    return max(lines) > LOG_FROM * min(lines) or max(value for value, _ in drawn) > LOG_FROM * max(lines)


def _norm_chart(runs: Sequence[Run], series: Sequence[Series], events: Sequence[Event] = ()) -> Chart:
    """Chart the gradient norm, with the clipping threshold if all runs have the same."""
    norms = {str(norm): norm for norm in (run.get("max_grad_norm") for run in runs)}
    clipped = [norm for norm in norms.values() if len(norms) == 1 and is_number(norm, 1e-9)]
    limits = [Limit(norm, Text("clipped above", "超过即裁剪"), dashed=True) for norm in clipped]
    return _lines("norm", NORM_TITLE, GRADIENT_NORM, series, note=_note(runs, MEDIANS), limits=limits, events=events)


def _rate_chart(runs: Sequence[Run]) -> Chart:
    """Chart the learning rates; runs with the same rates share the line of the first of them."""
    curves = [thinned(run.curve("learning_rate")) for run in runs]
    series = []
    for number_of_run, curve in enumerate(curves):
        sharing = [run.name for run, other in zip(runs, curves, strict=True) if other == curve]
        is_first = curves.index(curve) == number_of_run
        series.append(_line(listed(sharing), curve if is_first else {}))
    return _lines("rate", RATE_TITLE, LEARNING_RATE, series, can_be_log=False)


def _medians(run: Run, curve: Curve, name: Text) -> list[Series]:
    return _measured(run, curve, name, smoothed(curve, run.window), RUNNING_MEDIAN)


def _measured(
    run: Run, curve: Curve, name: Text, line: Curve, line_name: Text, skipped: Sequence[int] = ()
) -> list[Series]:
    """Return each step as a mark, and a smoothed line; the values alone if the run is too short to smooth."""
    crosses = [Point(step, 0.0, note=NOT_FINITE) for step in _some(skipped, MOST_CROSSES)]
    if run.window == 1:
        return [Series(name, [*_points(finite_values(curve)), *crosses])]
    single = sampled(run.drawn(curve))
    return [
        Series(SINGLE_STEPS, [*_points(single), *crosses], drawn="marks"),
        _line(line_name, run.drawn(line)),
    ]


def _line(name: Text, curve: Curve) -> Series:
    return Series(name, _points(curve), drawn="line" if len(curve) > 1 else "both")


def _points(curve: Curve) -> list[Point]:
    return [Point(step, value) for step, value in curve.items()]


def _loss_less(run: Run, base: Run) -> Curve:
    """Return smoothed differences of losses: runs that see the same data have much of their noise in common."""
    less = difference(finite_values(run.losses), finite_values(base.losses))
    return smoothed(less, min(run.window, base.window), statistics.fmean)


def on_window(runs: Sequence[Run], statistic: tuple[str, str] = MEDIANS) -> Text | None:
    """Return the name of the smoothing statistic; None if the runs are too short to smooth."""
    widths = [run.window for run in runs]
    return say(*statistic, span(widths, lambda width: number(width, 0))) if max(widths) > 1 else None


def _note(runs: Sequence[Run], statistic: tuple[str, str], *more: Text | None) -> Text | None:
    """Return a note on the smoothing statistic and the step at which the chart begins."""
    cut = [run.drawn_from for run in runs if len(run.losses) >= LONG]
    start = say("from step {} on", "从第 {} 步起", span(cut, lambda step: number(step, 0))) if cut else None
    return _joined([on_window(runs, statistic), start, *more])


def _joined(texts: Sequence[Text | None]) -> Text | None:
    found = [text for text in texts if text is not None]
    return listed(found, ("; ", "；")) if found else None


def _restarts(run: Run, name: str = "") -> list[Event]:
    """Return the restarts, with the number of ranks if it changed, and the name of the run if given."""
    found = []
    for step, ranks in _some(run.restarts, MOST_RESTARTS):
        count = Text("1 rank" if ranks == 1 else f"{ranks} ranks", f"{ranks} 个 rank")
        more: list[str | Text] = [*([name] if name else []), *([count] if ranks else [])]
        text = Text("restart", "重启")
        found.append(Event(max(step, 1), say("{}: {}", "{}：{}", text, listed(more, (", ", "，"))) if more else text))
    return found


def _saves(run: Run) -> list[Event]:
    restarts = {step for step, _ in run.restarts}
    steps = [step for step in run.saves if step not in restarts]
    return [Event(step, Text("save", "保存")) for step in steps] if len(steps) <= MOST_SAVES else []


def _some(values: Sequence[Value], most: int) -> Sequence[Value]:
    """Return at most `most` of the values, equally spaced."""
    return values[:: -(-len(values) // most) or 1]
