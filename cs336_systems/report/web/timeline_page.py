"""Memory over one step as an interactive page: one HTML file without network access."""

import heapq
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from cs336_systems.files import write_file
from cs336_systems.report import terms
from cs336_systems.report.rows import shortened
from cs336_systems.report.timeline_reduction import Reduced, label_colors, reduce, size_text, unit
from cs336_systems.report.timeline_words import phase_text, title_text, word_text
from cs336_systems.report.web.assets import asset, embedded_json, policy
from cs336_systems.report.web.controls import aria_label, attributes, controls, html_attributes, html_text
from cs336_systems.text import Language, Text, listed, say
from cs336_systems.timeline import Block, Span, Timeline

LARGEST = 20
"""Rows of the table of the largest blocks."""
WORD_LENGTH = 120
"""Maximum length of a text of a block, which bounds the size of the page."""
_TEXTS = {
    "nothing": Text(
        "No memory was recorded: the timeline has no block that was alive at any time.",
        "没有记录到内存：时间线中没有任何存活过的块。",
    ),
    "whole_step": Text("Whole step", "整步"),
    "help": Text(
        "Scroll or drag to zoom in time; scroll with shift, or drag a box, to zoom in memory as well. With the chart "
        "focused, arrow keys pan, + and − zoom in time, shift with up and down zooms in memory. Double-click or Escape "
        "shows the whole step. Press a label to hide or show it.",
        "滚动或拖动可缩放时间轴；按住 Shift 滚动可缩放纵轴，拖出一个方框可同时缩放两轴。图表获得焦点后，方向键平移，"
        "+ 和 − 缩放时间轴，Shift 加上下键缩放纵轴。双击或按 Esc 显示整步。点击类别可隐藏或显示它。",
    ),
    "at_peak": Text("Memory at the peak", "峰值的组成"),
    "largest": Text("Largest blocks", "最大的块"),
}
"""Texts of timeline.html."""
_NAMES = {
    "name_legend": Text("Labels: press to hide or show", "类别：点击可隐藏或显示"),
    "name_zoom_in": Text("Zoom in", "放大"),
    "name_zoom_out": Text("Zoom out", "缩小"),
    "name_earlier": Text("Move to earlier times", "移到更早的时间"),
    "name_later": Text("Move to later times", "移到更晚的时间"),
    "name_at_peak": _TEXTS["at_peak"],
    "name_largest": _TEXTS["largest"],
}
"""Names of its elements for screen readers."""
_LABEL = Text("label", "类别")


def write_page(timeline: Timeline, path: Path, language: Language = "en") -> None:
    """Write the page as one self-contained file; `language` is the one it opens in.

    The same timeline gives the same bytes.
    """
    peak_time, peak = timeline.peak()
    reduced = reduce(timeline, peak_time)
    phases = sorted(timeline.phases, key=lambda span: (span.start, span.end))
    title = title_text(timeline)
    scripts = {"early": asset("page_early.js"), "choice": asset("controls.js"), "script": asset("timeline.js")}
    fields = {
        "language": html_attributes(language),
        "titles": attributes("data-", title),
        "name": escape(title.in_(language)),
        "title": html_text(title),
        "controls": controls(language),
        "summary": html_text(_summary(timeline, phases, peak_time, peak)),
        "alternative": aria_label(_alternative(reduced, phases, peak_time, peak), language),
        "state": "full" if peak else "empty",
        "peak_table": _peak_table(reduced, peak_time, peak),
        "block_table": _block_table(timeline.blocks, phases, reduced),
        "note": html_text(_note(reduced)),
        "data": embedded_json(_page_data(reduced, phases, peak_time, peak)),
        "policy": policy(*scripts.values()),
        "style": asset("timeline.css"),
        **scripts,
        **{name: html_text(text) for name, text in _TEXTS.items()},
        **{name: aria_label(text, language) for name, text in _NAMES.items()},
    }
    # One pass: a title that contains a placeholder is not expanded.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], asset("timeline.html"))
    write_file(path, page)


def _page_data(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> dict[str, Any]:
    """Return the data of timeline.js: columns, times in whole nanoseconds, series as differences, which are mostly
    zero."""
    name, scale = unit(peak)
    colors = label_colors(reduced.labels)
    texts = [
        [_clip(text) for text in (word_text(b.what), Text(b.module), Text(b.line), _lifetime(b, phases))]
        for b in reduced.blocks
    ]
    words = sorted({word for row in texts for word in row})
    place = {word: index for index, word in enumerate(words)}
    what, module, line, lifetime = ([place[row[i]] for row in texts] for i in range(4))
    return {
        "unit": {"name": name, "bytes": scale},
        "peak": {"time": _nanoseconds(peak_time), "bytes": peak},
        "phases": [[_said(phase_text(span.name)), _nanoseconds(span.start), _nanoseconds(span.end)] for span in phases],
        "labels": [[_said(_label(label)), color] for label, color in zip(reduced.labels, colors, strict=True)],
        "edges": [_nanoseconds(time) for time in reduced.edges],
        "moments": [_nanoseconds(time) for time in reduced.moments],
        "changes": [[row[0], *(b - a for a, b in pairwise(row))] for row in reduced.series],
        "words": [_said(word) for word in words],
        "blocks": {
            "label": reduced.block_labels,
            "size": [block.size for block in reduced.blocks],
            "start": [_nanoseconds(block.start) for block in reduced.blocks],
            "end": [None if block.end is None else _nanoseconds(block.end) for block in reduced.blocks],
            "first": [first for first, _ in reduced.block_moments],
            "last": [last for _, last in reduced.block_moments],
            "what": what,
            "module": module,
            "line": line,
            "lifetime": lifetime,
        },
    }


def _nanoseconds(time: float) -> int:
    return round(time * 1e9)


def _clip(text: Text) -> Text:
    return Text(*(shortened(one, WORD_LENGTH) for one in text))


def _label(label: str) -> Text:
    return _clip(word_text(label))


def _said(text: Text) -> str | Text:
    """Return a text as timeline.js takes it: both languages, or one string that serves for both."""
    return text if text.in_("zh") != text.en else text.en


def _when(phases: Sequence[Span], time: float) -> tuple[int, Text]:
    """Return index and name of the phase at a time; -1 and the time itself before the first phase."""
    for index in reversed(range(len(phases))):
        if phases[index].start <= time:
            name = phase_text(phases[index].name)
            return index, name if time <= phases[index].end else say("after {}", "{}之后", name)
    return -1, Text(f"{time * 1e3:.2f} ms")


def _lifetime(block: Block, phases: Sequence[Span]) -> Text:
    born, born_in = _when(phases, block.start)
    if block.end is None:
        return Text("whole step", "整步") if block.start <= 0 else say("{} to the end", "{} → 结束", born_in)
    # A block freed at the start of a phase belongs to the phase before.
    died, died_in = _when([span for span in phases if span.start < block.end], block.end)
    if block.start <= 0:
        return say("until {}", "开始 → {}", died_in)
    return born_in if born == died >= 0 and born_in == died_in else say("{} to {}", "{} → {}", born_in, died_in)


def _summary(timeline: Timeline, phases: Sequence[Span], peak_time: float, peak: int) -> Text:
    if not peak:
        return Text(timeline.device)
    return say(
        "{}. Peak {} at {} ms ({}); {} blocks in {} ms of host time under tracing.",
        "{}。峰值 {}，出现在 {} ms（{}）；共 {} 个块，追踪时主机用时 {} ms。",
        timeline.device,
        size_text(peak),
        f"{peak_time * 1e3:.2f}",
        _when(phases, peak_time)[1],
        f"{len(timeline.blocks):,}",
        f"{timeline.end * 1e3:.2f}",
    )


def _alternative(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> Text:
    """Return the text alternative of the chart."""
    parts = reduced.parts_at(peak_time)
    return say(
        "Memory over time, stacked by label. Phases: {}. Peak {} at {} ms: {}. "
        "The tables below say the same in numbers.",
        "内存随时间的变化，按类别堆叠。阶段：{}。峰值 {}，出现在 {} ms：{}。下方表格列出同样的数字。",
        listed(phase_text(span.name) for span in phases) if phases else Text("none", "无"),
        size_text(peak),
        f"{peak_time * 1e3:.2f}",
        listed(say("{} {}", "{} {}", _label(label), size_text(size)) for label, size in parts.items() if size),
    )


def _note(reduced: Reduced) -> Text:
    if not reduced.merged:
        return Text("")
    return say(
        "Drawn one by one: the {} blocks that cover most of the chart. {} others are part of their label's area.",
        "单独画出的是覆盖图表大部分面积的 {} 个块；其余 {} 个块并入所属类别的面积。",
        f"{len(reduced.blocks):,}",
        f"{reduced.merged:,}",
    )


def _peak_table(reduced: Reduced, peak_time: float, peak: int) -> str:
    name, scale = unit(peak)
    swatches = _swatches(reduced)
    rows = [
        [swatches[label], f"{size / scale:.3f}", f"{size / peak:.1%}", f"{size:,}"]
        for label, size in reduced.parts_at(peak_time).items()
        if size
    ]
    total = [html_text(Text("all", "合计")), f"{peak / scale:.3f}", "100.0%", f"{peak:,}"]
    return _table([_LABEL, Text(name), terms.SHARE, Text("bytes", "字节")], "lrrr", [*rows, total], footer=True)


def _block_table(blocks: Iterable[Block], phases: Sequence[Span], reduced: Reduced) -> str:
    swatches = _swatches(reduced)
    rows = [
        [
            size_text(block.size),
            swatches.get(block.label) or html_text(_label(block.label)),
            *(html_text(_clip(text)) for text in (Text(block.module), word_text(block.what), Text(block.line))),
            html_text(_lifetime(block, phases)),
        ]
        for block in heapq.nlargest(LARGEST, blocks, key=lambda block: block.size)
    ]
    operator, alive = Text("operator", "算子"), Text("alive in", "存活阶段")
    return _table([terms.BYTES, _LABEL, terms.MODULE, operator, terms.LINE, alive], "rlllll", rows)


def _swatches(reduced: Reduced) -> dict[str, str]:
    """Label -> HTML of the label behind a square of its colour."""
    return {
        label: f'<span class="swatch" style="background:{color}"></span>{html_text(_label(label))}'
        for label, color in zip(reduced.labels, label_colors(reduced.labels), strict=True)
    }


def _table(headings: Sequence[Text], aligned: str, rows: Sequence[Sequence[str]], *, footer: bool = False) -> str:
    """Return an HTML table. Cells are HTML; `aligned` has an r for each right-aligned column. The last row may be a
    footer."""

    def row(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} class="{a}">{c}</{tag}>' for a, c in zip(aligned, cells, strict=True)) + "</tr>"
        )

    body = rows[:-1] if footer else rows
    parts = [
        "<thead>",
        row([html_text(heading) for heading in headings], "th"),
        "</thead>\n<tbody>",
        *(row(cells, "td") for cells in body),
        "</tbody>",
    ]
    if footer:
        parts += ["<tfoot>", row(rows[-1], "td"), "</tfoot>"]
    return "<table>" + "\n".join(parts) + "</table>"
