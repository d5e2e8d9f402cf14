"""Output of a comparison: on a terminal, as a table in every format, as a page with a forest plot."""

import os
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TextIO

from cs336_systems.report.cells import CellView
from cs336_systems.report.compare import DECIDED, FASTER, LESS, MORE, SLOWER, Comparison, Mean, Row, with_experiment
from cs336_systems.report.document import Chart, Document, Highlight, Limit, Point, Section, Series
from cs336_systems.report.intervals import Ratio
from cs336_systems.report.pairing import short, some, telling
from cs336_systems.report.phrases import ended
from cs336_systems.report.points import FEW
from cs336_systems.report.rows import gib, kernel_ms, title_of
from cs336_systems.report.side_by_side import QUANTITIES
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

WIDE = 10_000
"""Width for output that is not a terminal, so that lines are not broken."""
LEAST_NAME = 24
"""Minimum number of columns for the name of a row."""
_COLORS = {FASTER: "32", LESS: "32", SLOWER: "31", MORE: "31"}
"""Verdict -> its colour on a terminal: green and red."""

RATIO = Text("B / A")
CELL = Text("cell", "配置")
METRIC = Text("metric", "指标")
EXPERIMENT = Text("experiment", "实验")
VERDICT = Text("verdict", "结论")
MEAN = Text("geometric mean", "几何平均")
_METRICS = {
    **QUANTITIES,
    "final_loss": Text("loss at the end", "最终损失"),
    "final_validation_loss": Text("last validation loss", "最后的验证损失"),
}
"""Metric -> its name in the name of a row."""
_KINDS = {"s": Text("times", "时间"), "B": Text("sizes", "字节数")}
"""Kinds of metrics by unit; all other units are rates."""


# -- texts ------------------------------------------------------------------------------------------------------------


def summary(found: Comparison) -> Text:
    """Return the number of rows that are faster, slower and undecided, as a sentence."""
    counts = [say("{} {}", "{} 项{}", str(count), verdict) for verdict, count in found.counts.items()]
    total = len(found.rows)
    rows = Text(f"{total} comparison{'s' * (total != 1)}", f"{total} 项比较")
    return say("{}: {}", "{}：{}", rows, listed(counts, (", ", "，")))


def mean_text(mean: Mean, found: Comparison) -> Text:
    interval = say("{}% interval {}", "{}% 区间 {}", f"{found.confidence * 100:g}", _interval(mean.ratio))
    values = (_mean_name(mean, found), str(mean.count), _factor(mean.ratio.value), interval, mean.verdict)
    return say("{} of B / A over {} rows: {} ({}), {}", "{1} 行 B / A 的{0}：{2}（{3}），{4}", *values)


def _mean_name(mean: Mean, found: Comparison) -> Text:
    if len(found.means) == 1:
        return MEAN
    return say("{}, {}", "{}（{}）", MEAN, _KINDS.get(mean.unit, Text("rates", "速率")))


def _caution(found: Comparison) -> Text:
    confidence = f"{found.confidence * 100:g}"
    chance = (1 - found.confidence) * sum(row.ratio is not None for row in found.rows)
    said = say(
        "intervals ({}%) are by bootstrap over the steps of one run on each side: what changes from run to run is not "
        "in them",
        "{}% 区间由每边一次运行的各步自助抽样得到，不包含多次运行之间的变化",
        confidence,
    )
    if chance < 1:
        return said
    return say("{}; up to {} rows may differ by chance", "{}；可能有至多 {} 行纯属偶然", said, f"{chance:.0f}")


def _files(found: Comparison) -> list[Text]:
    return [say("{}: {}", "{}：{}", side, short(file, 400)) for side, file in zip("AB", found.files, strict=True)]


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if 0.01 < value < 1000 else f"{value:.3g}"


def _interval(ratio: Ratio | None) -> Text:
    if ratio is None or ratio.low is None:
        return Text("")
    return say("{} to {}", "{} 到 {}", _factor(ratio.low), _factor(ratio.high))


def _median(cell: CellView, row: Row) -> str:
    if not cell.ok:
        return cell.verdict
    found = cell.statistics(row.metric)
    if found is None:
        return ""
    return kernel_ms(found.median) if row.unit == "s" else gib(found.median) if row.unit == "B" else f"{found.median:g}"


def _shown_unit(unit: str) -> str:
    return {"s": "ms", "B": "GiB", "1": ""}.get(unit, unit)


def _title(found: Comparison) -> Text:
    cells = [cell for row in found.rows for cell in row.pair.sides]
    metrics = some((row.metric for row in found.rows), 3)
    what = say("B / A of the medians of {}", "{} 的中位数之比 B / A", metrics)
    title = title_of("compare", what, cells, telling([row.pair for row in found.rows]))
    return Text(*(short(text, 400) for text in title))


def _differ(values: Sequence[str]) -> bool:
    return len(set(values)) > 1


def _names(found: Comparison) -> list[Text]:
    """Return the names of rows as records spell them, with the experiment where there are several."""
    named = _with_metrics(found.rows, [row.name for row in found.rows])
    experiments = [short(row.pair.a.experiment) for row in found.rows]
    if not _differ(experiments):
        return named
    return [with_experiment(*pair, ("{}: {}", "{}：{}")) for pair in zip(experiments, named, strict=True)]


def _labels(found: Comparison) -> list[Text]:
    """Return the names of rows for readers: the most distinctive parts come first, because the end may be cut."""
    named = _with_metrics(found.rows, [row.label for row in found.rows])
    experiments = [short(row.pair.a.experiment.replace("_", " ")) for row in found.rows]
    if not _differ(experiments):
        return named
    return [say("{} ({})", "{}（{}）", *pair) for pair in zip(named, experiments, strict=True)]


def _with_metrics(rows: Sequence[Row], names: Sequence[Text]) -> list[Text]:
    """Return the names, with the metric where a cell has several."""
    counts = Counter((id(row.pair), row.variant) for row in rows)
    return [
        say("{}, {}", "{}，{}", name, _METRICS.get(row.metric) or short(row.metric))
        if counts[id(row.pair), row.variant] > 1
        else name
        for row, name in zip(rows, names, strict=True)
    ]


# -- the table --------------------------------------------------------------------------------------------------------


def table(found: Comparison) -> Table:
    """Return a table whose columns are always the same, for programs that read it as CSV."""
    ends = (Text("low", "下限"), Text("high", "上限"))
    columns = [Column(RATIO)]
    columns += [Column(say("{}% {}", "{}% {}", f"{found.confidence * 100:g}", end)) for end in ends]
    columns += [word(VERDICT), Column(Text("A")), Column(Text("B")), word(Text("unit", "单位")), Column(Text("n"))]
    columns += map(word, (EXPERIMENT, CELL, METRIC))
    notes = [*_files(found), *found.differences, *found.remarks, summary(found), _caution(found)]
    notes += [mean_text(mean, found) for mean in found.means]
    return Table(_title(found), columns, list(map(_line, found.rows)), [_cut(note, 1000) for note in notes])


def _line(row: Row) -> list[str | Text]:
    ratio = row.ratio
    counts = [str(len(cell.samples(row.metric))) for cell in row.sides if row.metric in cell.metrics]
    factors = map(_factor, (ratio.value, ratio.low, ratio.high) if ratio else (None,) * 3)
    medians = [_median(cell, row) for cell in row.sides]
    measured = [short(_shown_unit(row.unit)), ", ".join(dict.fromkeys(counts))]
    return [*factors, row.verdict, *medians, *measured, short(row.pair.a.experiment), row.name, short(row.metric)]


def _cut(text: Text, most: int) -> Text:
    return Text(*(short(one, most) for one in text))


# -- the terminal -----------------------------------------------------------------------------------------------------


def on_screen(found: Comparison, stream: TextIO) -> str:
    """Return the text for a stream: with a terminal's width and, unless NO_COLOR is set, colours; neither for a file or
    pipe."""
    if not stream.isatty():
        return on_terminal(found)
    colored = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return on_terminal(found, shutil.get_terminal_size().columns, colored=colored)


def on_terminal(found: Comparison, width: int = WIDE, *, colored: bool = False) -> str:
    """Return differences of settings, the rows, remarks, and the geometric mean, in lines of at most `width` columns.

    Only names and notes are broken over several lines: a number that is broken misleads.
    """

    def paint(text: str, verdict: Text) -> str:
        return f"\033[{_COLORS[verdict]}m{text}\033[0m" if colored and verdict in _COLORS else text

    above = [_title(found), *_files(found), *found.differences]
    below = [*found.remarks, _caution(found)]
    means = [(mean_text(mean, found).en, mean.verdict) for mean in found.means]
    return "\n".join(
        [
            *(line for text in above for line in _wrapped(_cut(text, 1000).en, width, "", "   ")),
            *("", *_rows(found, width, paint), ""),
            *(line for text in below for line in _wrapped(_cut(text, 1000).en, width, "! ", "  ")),
            *_wrapped(summary(found).en, width, "", "  "),
            *(paint(line, verdict) for text, verdict in means for line in _wrapped(text, width, "", "  ")),
        ]
    )


def _rows(found: Comparison, width: int, paint: Callable[[str, Text], str]) -> list[str]:
    """Return the heading and the rows: the ratio first, the name last, over several lines where it is long."""
    units = [_shown_unit(row.unit) for row in found.rows]
    heads = [RATIO.en, f"{found.confidence * 100:g}% interval", *(_head(side, units) for side in "AB"), VERDICT.en]
    beside = units if _differ(units) else [""] * len(units)
    lines = [_values(row, unit) for row, unit in zip(found.rows, beside, strict=True)]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    left = sum(widths) + 2 * len(widths)
    room = max(LEAST_NAME, width - left)
    names = [_wrapped(name.en, room) or [""] for name in _names(found)]
    rule = "─" * (left + max(len(line) for name in names for line in name))

    def draw(values: Sequence[str], name: Sequence[str], verdict: Text) -> str:
        padded = [text.rjust(size) for text, size in zip(values[:-1], widths[:-1], strict=True)]
        padded[0] = paint(padded[0], verdict)
        padded.append(paint(values[-1].ljust(widths[-1]), verdict))
        return "  ".join([*padded, f"\n{' ' * left}".join(name)]).rstrip()

    drawn = [draw(line, name, row.verdict) for line, name, row in zip(lines, names, found.rows, strict=True)]
    return [draw(heads, [CELL.en], Text("")), rule, *drawn, rule]


def _values(row: Row, unit: str) -> list[str]:
    """Return ratio, interval, both medians and verdict as text; the medians with their unit, if one is given."""
    medians = [f"{_median(cell, row)} {short(unit)}".rstrip() for cell in row.sides]
    return [_factor(row.ratio.value if row.ratio else None), _interval(row.ratio).en, *medians, row.verdict.en]


def _head(side: str, units: Sequence[str]) -> str:
    return side if _differ(units) or not units[0] else f"{side} ({short(units[0])})"


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


# -- the page ---------------------------------------------------------------------------------------------------------


def chart(found: Comparison) -> Chart:
    """Return a forest plot: a row for each of the largest changes with its interval, and the geometric mean last."""
    drawn = [(label, row.ratio) for label, row in zip(_labels(found), found.rows, strict=True) if row.ratio]
    shown = sorted(_distinct(drawn[:FEW]), key=lambda pair: pair[1].value)
    cells = [Point(name, ratio.value, low=ratio.low, high=ratio.high) for name, ratio in shown]
    means = [
        Point(_mean_name(mean, found), mean.ratio.value, low=mean.ratio.low, high=mean.ratio.high)
        for mean in found.means
    ]
    return Chart(
        "compare-ratios",
        _chart_title(found),
        "dots",
        CELL,
        RATIO,
        [Series(Text("ratio of medians", "中位数之比"), cells), Series(MEAN, means)],
        log_y=True,
        limits=[Limit(1.0, Text("no change", "无变化"))],
        digits=3,
        note=_chart_note(found, len(drawn)),
        places=[point.place for point in (*cells, *means)],
    )


def _distinct(rows: Sequence[tuple[Text, Ratio]]) -> list[tuple[Text, Ratio]]:
    """Return the rows under unique names: a chart has one row for each name."""
    seen: dict[str, int] = {}
    named = []
    for name, ratio in rows:
        seen[name.en] = seen.get(name.en, 0) + 1
        again = f" ({seen[name.en]})" if seen[name.en] > 1 else ""
        named.append((say("{}{}", "{}{}", name, again), ratio))
    return named


def _chart_title(found: Comparison) -> Text:
    if all(row.unit == "s" for row in found.rows):
        return Text("Time of B over time of A", "B 的时间与 A 的时间之比")
    return Text("B over A", "B 与 A 之比")


def _chart_note(found: Comparison, drawable: int) -> Text:
    note = say("ratio of medians with its {}% interval", "中位数之比及其 {}% 区间", f"{found.confidence * 100:g}")
    if all(row.unit == "s" for row in found.rows):
        note = say("{}; below 1: B is faster", "{}；小于 1 表示 B 更快", note)
    if drawable > FEW:
        shown = say("the {} largest changes of {}", "{1} 项中变化最大的 {0} 项", str(FEW), str(drawable))
        note = say("{}; {}", "{}；{}", note, shown)
    return note


def document(found: Comparison) -> Document:
    """Return the page of a comparison: findings, the forest plot and the table."""
    largest = next((row for row in found.rows if row.verdict in DECIDED), None)
    sentences = [summary(found), *(mean_text(mean, found) for mean in found.means)]
    sentences += [_largest(largest)] if largest else []
    drawn = chart(found)
    section = Section(
        name="compare",
        title=Text("B against A", "B 与 A 对比"),
        question=Text("What changed between two runs, beyond noise?", "两次运行之间有哪些变化超出噪声？"),
        findings=[*map(ended, sentences), *found.differences],
        tables=[table(found)],
        charts=[drawn] if any(series.points for series in drawn.series) else [],
    )
    machines = dict.fromkeys(cell.machine for row in found.rows for cell in row.pair.sides)
    facts = {Text("A"): found.files[0], Text("B"): found.files[1], Text("machine", "机器"): ", ".join(machines)}
    numbers = [
        Highlight(
            rank,
            Text(_factor(mean.ratio.value)),
            Text("B / A, geometric mean", "B / A，几何平均"),
            mean_text(mean, found),
        )
        for rank, mean in enumerate(found.means)
    ]
    return Document(Text("Comparison of two runs", "两次运行的对比"), facts, [section], highlights=numbers)


def _largest(row: Row) -> Text:
    a, b = (_median(cell, row) for cell in row.sides)
    return say(
        "the largest change: {}, {} in A and {} {} in B, a ratio of {}",
        "变化最大：{}，A 为 {}，B 为 {} {}，比值 {}",
        *(row.label, a, b, _shown_unit(row.unit), _factor(row.ratio.value if row.ratio else None)),
    )
