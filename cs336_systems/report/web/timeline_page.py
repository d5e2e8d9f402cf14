"""Memory over one step as a page to look into, in one HTML file that needs no network, and as a still picture.

A trace can hold a million blocks, a screen a few thousand columns. So the page is given the state of memory at a
bounded number of moments, each the fullest of its stretch of time, and by themselves only the blocks large and
long-lived enough to be seen. What is drawn is at every moment what was alive then: parts add up, and the peak is the
timeline's own.
"""

import heapq
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from cs336_systems.record import GIB, MIB
from cs336_systems.report.picture import PALETTE, Picture
from cs336_systems.timeline import Block, Span, Timeline

MOMENTS = 16_000
"""At most, on a page. A step of ten thousand blocks is then drawn almost event by event."""
KEPT_BLOCKS = 12_000
"""At most, drawn one by one: the number of a whole step. At any moment a screen has room for a few hundred."""
PICTURE_MOMENTS = 500
"""A still picture has no more columns worth drawing, and an SVG of it stays small."""
MAX_LABELS = 12
OTHER = "other"
LARGEST = 20
WORD_LENGTH = 120
"""The longest text of a block: without a bound there would be none on the size of the page."""

_DARKER = tuple("#" + "".join(f"{int(color[i : i + 2], 16) * 11 // 20:02x}" for i in (1, 3, 5)) for color in PALETTE)
COLORS = PALETTE + _DARKER
LABEL_COLORS = {
    "parameters": PALETTE[0],
    "buffers": _DARKER[0],
    "optimizer state": PALETTE[2],
    "workspace": _DARKER[7],
    "inputs": _DARKER[2],
    "gradients": PALETTE[1],
    "weight casts": PALETTE[3],
    "activations": PALETTE[4],
    "logits and loss": PALETTE[5],
    "temporary": PALETTE[7],
    "unlabelled": PALETTE[6],
    "allocator rounding": _DARKER[3],
}
"""The labels of our own instruments from the bottom of the stack up: what lasts longest lies lowest."""


@dataclass(frozen=True)
class Reduced:
    """What there is to draw of a timeline: memory by label at some moments, and the blocks that can be told apart."""

    labels: list[str]
    """From the bottom of the stack up."""
    moments: list[float]
    edges: list[float]
    """The state at moment i is drawn from edge i to edge i + 1; the moment is the fullest of that stretch."""
    series: list[list[int]]
    """Of each label, the bytes alive at each moment, those of `blocks` among them."""
    blocks: list[Block]
    """In the order they began."""
    block_labels: list[int]
    block_moments: list[tuple[int, int]]
    """Of each block, the first moment at which it was alive and the first at which it no longer was."""
    merged: int
    """How many more blocks there are, known only as part of their label's bytes."""

    def parts_at(self, time: float) -> dict[str, int]:
        """Bytes by label at a moment, the largest first."""
        index = bisect_left(self.moments, time)
        return dict(
            Counter({label: row[index] for label, row in zip(self.labels, self.series, strict=True)}).most_common()
        )


def reduce(timeline: Timeline, peak_time: float, *, moments: int = MOMENTS, blocks: int = KEPT_BLOCKS) -> Reduced:
    """At most about so many moments and blocks; the peak's is one of them."""
    alive = [b for b in timeline.blocks if b.size > 0 and (b.end is None or b.end > b.start)]
    marks = [peak_time, *(time for span in timeline.phases for time in (span.start, span.end))]
    at, edges = _moments(alive, marks, moments)
    end = timeline.end
    edges.append(end if end > edges[0] else edges[0] + 1e-6)  # one moment alone needs some width to be seen

    shown = _shown_labels(alive, end)
    labels = sorted(set(shown.values()), key=_place)
    changes = {label: [0] * (len(at) + 1) for label in labels}
    for block in alive:
        change = changes[shown[block.label]]
        change[bisect_left(at, block.start)] += block.size
        if block.end is not None:
            change[bisect_left(at, block.end)] -= block.size
    kept = _visible(alive, end, blocks)
    return Reduced(
        labels=labels,
        moments=at,
        edges=edges,
        series=[list(accumulate(changes[label][:-1])) for label in labels],
        blocks=kept,
        block_labels=[labels.index(shown[block.label]) for block in kept],
        block_moments=[(bisect_left(at, b.start), len(at) if b.end is None else bisect_left(at, b.end)) for b in kept],
        merged=len(alive) - len(kept),
    )


def _moments(blocks: Iterable[Block], marks: Iterable[float], limit: int) -> tuple[list[float], list[float]]:
    """The fullest moment of each stretch of time, and where each stretch begins."""
    change: Counter[float] = Counter({0.0: 0})
    for block in blocks:
        change[block.start] += block.size
        if block.end is not None:
            change[block.end] -= block.size
    times = sorted(change)
    totals = list(accumulate(change[time] for time in times))
    cuts = _cuts(times, marks, limit)
    fullest = [max(range(a, b), key=totals.__getitem__) for a, b in pairwise([*cuts, len(times)])]
    return [times[index] for index in fullest], [times[index] for index in cuts]


def _cuts(times: Sequence[float], marks: Iterable[float], limit: int) -> list[int]:
    """Indexes in `times` at which stretches begin: at each while there are few, else half of them evenly in time (what
    is seen of the whole) and half evenly in events (what zooming in finds), and at the marks."""
    if len(times) <= limit:
        return list(range(len(times)))
    half = limit // 2
    width = (times[-1] - times[0]) / half
    even_in_time = {bisect_left(times, times[0] + width * i) for i in range(half)}
    even_in_events = {len(times) * i // half for i in range(half)}
    marked = {bisect_left(times, mark) for mark in marks}
    return sorted((even_in_time | even_in_events | marked) - {len(times)})


def _visible(blocks: Sequence[Block], end: float, limit: int) -> list[Block]:
    """Those that cover most of the picture. However short its life, a block is drawn about a pixel wide."""
    pixel = end / 2000

    def area(index: int) -> float:
        block = blocks[index]
        return block.size * max((end if block.end is None else block.end) - block.start, pixel)

    chosen = sorted(heapq.nlargest(limit, range(len(blocks)), key=area))
    return sorted((blocks[index] for index in chosen), key=lambda block: block.start)


def _shown_labels(blocks: Iterable[Block], end: float) -> dict[str, str]:
    """Each label to the one it is drawn as: beyond the number of colours, the smallest are drawn together."""
    area: defaultdict[str, float] = defaultdict(float)
    for block in blocks:
        area[block.label] += block.size * ((end if block.end is None else block.end) - block.start)
    ranked = sorted(area, key=area.__getitem__, reverse=True)
    own = ranked if len(ranked) <= MAX_LABELS else ranked[: MAX_LABELS - 1]
    return {label: label if label in own else OTHER for label in ranked}


def _place(label: str) -> tuple[int, str]:
    """Orders labels in the stack: the instruments' own first, then all others by name."""
    known = list(LABEL_COLORS)
    return (known.index(label) if label in known else len(known), label)


def label_colors(labels: Sequence[str]) -> list[str]:
    """Of an instrument's own label the same on every page; other labels get what these leave, in order."""
    left = iter([color for color in COLORS if color not in {LABEL_COLORS.get(label) for label in labels}])
    return [LABEL_COLORS.get(label) or next(left) for label in labels]


def write_page(timeline: Timeline, path: Path) -> None:
    """One file, to open in any browser. The same timeline gives the same bytes."""
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
        "data": _embedded(_page_data(reduced, phases, peak_time, peak)),
    }
    template = Path(__file__).with_name("timeline_page.html").read_text(encoding="utf-8")
    # In one pass: a title that looks like a placeholder stays a title.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], template)
    path.write_text(page, encoding="utf-8", errors="replace")


def _page_data(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> dict[str, Any]:
    """Columns rather than rows, times in whole nanoseconds, series as differences: mostly zeros, so short to write."""
    unit, scale = _unit(peak)
    colors = label_colors(reduced.labels)
    texts = [[_clip(word) for word in (b.what, b.module, b.line, _lifetime(b, phases))] for b in reduced.blocks]
    words = sorted({word for row in texts for word in row})
    place = {word: index for index, word in enumerate(words)}
    what, module, line, lifetime = ([place[row[i]] for row in texts] for i in range(4))
    return {
        "unit": {"name": unit, "bytes": scale},
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


def _embedded(document: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or open a comment."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _nanoseconds(time: float) -> int:
    return round(time * 1e9)


def _clip(word: str) -> str:
    return word if len(word) <= WORD_LENGTH else word[: WORD_LENGTH - 1] + "…"


def _unit(peak: int) -> tuple[str, int]:
    """In which a timeline with this peak is best told."""
    if peak >= GIB // 10:
        return "GiB", GIB
    return ("MiB", MIB) if peak >= MIB // 10 else ("KiB", 2**10)


def _size(size: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def _when(phases: Sequence[Span], time: float) -> tuple[int, str]:
    """The phase in which something happened: its index, and its name. The time itself where no phase had begun."""
    for index in reversed(range(len(phases))):
        if phases[index].start <= time:
            name = phases[index].name
            return index, name if time <= phases[index].end else f"after {name}"
    return -1, f"{time * 1e3:.2f} ms"


def _lifetime(block: Block, phases: Sequence[Span]) -> str:
    born, born_in = _when(phases, block.start)
    if block.end is None:
        return "whole step" if block.start <= 0 else f"{born_in} to the end"
    # What is freed just as a phase begins belonged to the one before.
    died, died_in = _when([span for span in phases if span.start < block.end], block.end)
    if block.start <= 0:
        return f"until {died_in}"
    return born_in if born == died >= 0 and born_in == died_in else f"{born_in} to {died_in}"


def _summary(timeline: Timeline, phases: Sequence[Span], peak_time: float, peak: int) -> str:
    if not peak:
        return timeline.device
    return (
        f"{timeline.device}. Peak {_size(peak)} at {peak_time * 1e3:.2f} ms ({_when(phases, peak_time)[1]}); "
        f"{len(timeline.blocks):,} blocks in {timeline.end * 1e3:.2f} ms of the host, while each was followed."
    )


def _alternative(reduced: Reduced, phases: Sequence[Span], peak_time: float, peak: int) -> str:
    """The chart in words, for who cannot see it."""
    parts = ", ".join(f"{label} {_size(size)}" for label, size in reduced.parts_at(peak_time).items() if size)
    names = ", ".join(span.name for span in phases) or "none"
    return (
        f"Memory over time, stacked by label. Phases: {names}. "
        f"Peak {_size(peak)} at {peak_time * 1e3:.2f} ms: {parts}. The tables below say the same in numbers."
    )


def _note(reduced: Reduced) -> str:
    if not reduced.merged:
        return ""
    return (
        f"Drawn one by one: the {len(reduced.blocks):,} blocks that cover most of the chart. "
        f"{reduced.merged:,} others are part of their label's area."
    )


def _peak_table(reduced: Reduced, peak_time: float, peak: int) -> str:
    unit, scale = _unit(peak)
    swatches = _swatches(reduced)
    rows = [
        [swatches[label], f"{size / scale:.3f}", f"{size / peak:.1%}", f"{size:,}"]
        for label, size in reduced.parts_at(peak_time).items()
        if size
    ]
    total = ["all", f"{peak / scale:.3f}", "100.0%", f"{peak:,}"]
    return _table(["label", unit, "share", "bytes"], "lrrr", [*rows, total], footer=True)


def _block_table(blocks: Iterable[Block], phases: Sequence[Span], reduced: Reduced) -> str:
    swatches = _swatches(reduced)
    rows = [
        [
            _size(block.size),
            swatches.get(block.label, escape(_clip(block.label))),
            *(escape(_clip(word)) for word in (block.module, block.what, block.line)),
            escape(_lifetime(block, phases)),
        ]
        for block in heapq.nlargest(LARGEST, blocks, key=lambda block: block.size)
    ]
    return _table(["size", "label", "module", "what", "line", "alive in"], "rlllll", rows)


def _swatches(reduced: Reduced) -> dict[str, str]:
    """Each label as HTML, with its colour before it."""
    return {
        label: f'<span class="swatch" style="background:{color}"></span>{escape(_clip(label))}'
        for label, color in zip(reduced.labels, label_colors(reduced.labels), strict=True)
    }


def _table(headings: Sequence[str], aligned: str, rows: Sequence[Sequence[str]], *, footer: bool = False) -> str:
    """Cells are HTML; `aligned` has an r for each column of numbers. The last row may be a footer."""

    def row(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>" + "".join(f'<{tag} class="{a}">{c}</{tag}>' for a, c in zip(aligned, cells, strict=True)) + "</tr>"
        )

    body = rows[:-1] if footer else rows
    parts = ["<thead>", row(headings, "th"), "</thead>\n<tbody>", *(row(cells, "td") for cells in body), "</tbody>"]
    if footer:
        parts += ["<tfoot>", row(rows[-1], "td"), "</tfoot>"]
    return "<table>" + "\n".join(parts) + "</table>"


def timeline_picture(timeline: Timeline, name: str) -> Picture:
    return Picture(name, f"Memory over one step: {timeline.title}", partial(_draw, timeline=timeline), (8.0, 4.0))


def _draw(figure: Any, timeline: Timeline) -> None:
    axes = figure.subplots()
    title = f"{timeline.title}, {timeline.device}"
    peak_time, peak = timeline.peak()
    if not peak:
        axes.set_title(title)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no memory was recorded", ha="center", va="center", transform=axes.transAxes)
        return
    reduced = reduce(timeline, peak_time, moments=PICTURE_MOMENTS, blocks=0)
    unit, scale = _unit(peak)
    times = [time * 1e3 for time in reduced.edges]
    rows = [[size / scale for size in [*row, row[-1]]] for row in reduced.series]
    colors = label_colors(reduced.labels)
    # Its areas share their edges: with smoothing, the paper would show through between them as pale lines.
    axes.stackplot(times, rows, labels=reduced.labels, colors=colors, step="post", linewidth=0, antialiased=False)
    axes.set(xlabel="ms since the step began", ylabel=unit, xlim=(times[0], times[-1]), ylim=(0, 1.14 * peak / scale))
    _mark_peak(axes, peak_time * 1e3, peak / scale, f"peak {_size(peak)}")
    axes.set_title(title, pad=6 + _mark_phases(axes, timeline.phases))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _mark_peak(axes: Any, time: float, height: float, text: str) -> None:
    axes.axvline(time, color="black", linewidth=0.8, linestyle="--")
    left, right = axes.get_xlim()
    beyond_middle = time > (left + right) / 2
    axes.annotate(
        text,
        (time, height),
        xytext=(-5 if beyond_middle else 5, 4),
        textcoords="offset points",
        ha="right" if beyond_middle else "left",
    )


def _mark_phases(axes: Any, phases: Sequence[Span]) -> int:
    """Bands above the axes. A name wider than its band stands above it. Gives the height taken, in points."""
    left, right = axes.get_xlim()
    taken = 20 if phases else 0
    for index, span in enumerate(phases):
        start, end = span.start * 1e3, span.end * 1e3
        shade = "#d9d9d9" if index % 2 else "#ececec"
        axes.axvspan(start, end, ymin=1.01, ymax=1.08, color=shade, clip_on=False, linewidth=0)
        axes.axvline(start, color="#8c8c8c", linewidth=0.5)
        fits = (end - start) / (right - left) > 0.011 * len(span.name)
        taken = taken if fits else 28
        axes.text(
            (start + end) / 2,
            1.045 if fits else 1.085,
            span.name,
            ha="center",
            va="center" if fits else "bottom",
            fontsize=8,
            transform=axes.get_xaxis_transform(),
        )
    return taken
