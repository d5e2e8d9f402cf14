"""Memory over one step as an interactive page: one HTML file without network access."""

import heapq
import re
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from cs336_systems.files import write_file
from cs336_systems.report.rows import shortened
from cs336_systems.report.timeline_reduction import Reduced, label_colors, reduce, size_text, unit
from cs336_systems.report.web.assets import asset, embedded_json, policy
from cs336_systems.timeline import Block, Span, Timeline

LARGEST = 20
"""Rows of the table of the largest blocks."""
WORD_LENGTH = 120
"""Maximum length of a text of a block, which bounds the size of the page."""


def write_page(timeline: Timeline, path: Path) -> None:
    """Write the page as one self-contained file. The same timeline gives the same bytes."""
    peak_time, peak = timeline.peak()
    reduced = reduce(timeline, peak_time)
    phases = sorted(timeline.phases, key=lambda span: (span.start, span.end))
    fields = {
        "title": escape(timeline.title),
        "summary": escape(_summary(timeline, phases, peak_time, peak)),
        "alternative": escape(_alternative(reduced, phases, peak_time, peak)),
        "state": "full" if peak else "empty",
        "peak_table": _peak_table(reduced, peak_time, peak),
        "block_table": _block_table(timeline.blocks, phases, reduced),
        "note": escape(_note(reduced)),
        "data": embedded_json(_page_data(reduced, phases, peak_time, peak)),
        "policy": policy(asset("timeline.js")),
        "style": asset("timeline.css"),
        "script": asset("timeline.js"),
    }
    # One pass: a title that contains a placeholder is not expanded.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], asset("timeline.html"))
    write_file(path, page)


def _page_data(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> dict[str, Any]:
    """The data of timeline.js: columns, times in whole nanoseconds, series as differences, which are mostly zero."""
    name, scale = unit(peak)
    colors = label_colors(reduced.labels)
    texts = [[_clip(word) for word in (b.what, b.module, b.line, _lifetime(b, phases))] for b in reduced.blocks]
    words = sorted({word for row in texts for word in row})
    place = {word: index for index, word in enumerate(words)}
    what, module, line, lifetime = ([place[row[i]] for row in texts] for i in range(4))
    return {
        "unit": {"name": name, "bytes": scale},
        "peak": {"time": _nanoseconds(peak_time), "bytes": peak},
        "phases": [[span.name, _nanoseconds(span.start), _nanoseconds(span.end)] for span in phases],
        "labels": [[_clip(label), color] for label, color in zip(reduced.labels, colors, strict=True)],
        "edges": [_nanoseconds(time) for time in reduced.edges],
        "moments": [_nanoseconds(time) for time in reduced.moments],
        "changes": [[row[0], *(b - a for a, b in pairwise(row))] for row in reduced.series],
        "words": words,
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


_clip = partial(shortened, limit=WORD_LENGTH)


def _when(phases: Sequence[Span], time: float) -> tuple[int, str]:
    """Index and name of the phase at a time; -1 and the time itself before the first phase."""
    for index in reversed(range(len(phases))):
        if phases[index].start <= time:
            name = phases[index].name
            return index, name if time <= phases[index].end else f"after {name}"
    return -1, f"{time * 1e3:.2f} ms"


def _lifetime(block: Block, phases: Sequence[Span]) -> str:
    born, born_in = _when(phases, block.start)
    if block.end is None:
        return "whole step" if block.start <= 0 else f"{born_in} to the end"
    # A block freed at the start of a phase belongs to the phase before.
    died, died_in = _when([span for span in phases if span.start < block.end], block.end)
    if block.start <= 0:
        return f"until {died_in}"
    return born_in if born == died >= 0 and born_in == died_in else f"{born_in} to {died_in}"


def _summary(timeline: Timeline, phases: Sequence[Span], peak_time: float, peak: int) -> str:
    if not peak:
        return timeline.device
    return (
        f"{timeline.device}. Peak {size_text(peak)} at {peak_time * 1e3:.2f} ms ({_when(phases, peak_time)[1]}); "
        f"{len(timeline.blocks):,} blocks in {timeline.end * 1e3:.2f} ms of host time under tracing."
    )


def _alternative(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> str:
    """The text alternative of the chart."""
    parts = ", ".join(f"{label} {size_text(size)}" for label, size in reduced.parts_at(peak_time).items() if size)
    names = ", ".join(span.name for span in phases) or "none"
    return (
        f"Memory over time, stacked by label. Phases: {names}. "
        f"Peak {size_text(peak)} at {peak_time * 1e3:.2f} ms: {parts}. The tables below say the same in numbers."
    )


def _note(reduced: Reduced) -> str:
    if not reduced.merged:
        return ""
    return (
        f"Drawn one by one: the {len(reduced.blocks):,} blocks that cover most of the chart. "
        f"{reduced.merged:,} others are part of their label's area."
    )


def _peak_table(reduced: Reduced, peak_time: float, peak: int) -> str:
    name, scale = unit(peak)
    swatches = _swatches(reduced)
    rows = [
        [swatches[label], f"{size / scale:.3f}", f"{size / peak:.1%}", f"{size:,}"]
        for label, size in reduced.parts_at(peak_time).items()
        if size
    ]
    total = ["all", f"{peak / scale:.3f}", "100.0%", f"{peak:,}"]
    return _table(["label", name, "share", "bytes"], "lrrr", [*rows, total], footer=True)


def _block_table(blocks: Iterable[Block], phases: Sequence[Span], reduced: Reduced) -> str:
    swatches = _swatches(reduced)
    rows = [
        [
            size_text(block.size),
            swatches.get(block.label, escape(_clip(block.label))),
            *(escape(_clip(word)) for word in (block.module, block.what, block.line)),
            escape(_lifetime(block, phases)),
        ]
        for block in heapq.nlargest(LARGEST, blocks, key=lambda block: block.size)
    ]
    return _table(["size", "label", "module", "what", "line", "alive in"], "rlllll", rows)


def _swatches(reduced: Reduced) -> dict[str, str]:
    """Label -> HTML of the label behind a square of its colour."""
    return {
        label: f'<span class="swatch" style="background:{color}"></span>{escape(_clip(label))}'
        for label, color in zip(reduced.labels, label_colors(reduced.labels), strict=True)
    }


def _table(headings: Sequence[str], aligned: str, rows: Sequence[Sequence[str]], *, footer: bool = False) -> str:
    """An HTML table. Cells are HTML; `aligned` has an r for each right-aligned column. The last row may be a footer."""

    def row(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} class="{a}">{c}</{tag}>' for a, c in zip(aligned, cells, strict=True)) + "</tr>"
        )

    body = rows[:-1] if footer else rows
    parts = ["<thead>", row(headings, "th"), "</thead>\n<tbody>", *(row(cells, "td") for cells in body), "</tbody>"]
    if footer:
        parts += ["<tfoot>", row(rows[-1], "td"), "</tfoot>"]
    return "<table>" + "\n".join(parts) + "</table>"
