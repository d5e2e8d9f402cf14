"""A memory timeline reduced to what a page or a picture can draw.

A trace can hold a million blocks, a screen a few thousand columns. A reduction holds the state of memory at a bounded
number of moments, each the one with the most memory of its interval, and only the blocks that are large and long-lived
enough to be visible. The bytes at every moment are exact, and the peak is the peak of the timeline.
"""

import heapq
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cs336_systems.record import GIB, MIB
from cs336_systems.report.picture import PALETTE
from cs336_systems.timeline import Block, Timeline

MOMENTS = 16_000
"""Maximum moments on a page: a step of ten thousand blocks is drawn almost event by event."""
KEPT_BLOCKS = 12_000
"""Maximum blocks that a page draws individually, over the whole step."""
MAX_LABELS = 12
OTHER = "other"

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
    "activations, offloaded": _DARKER[4],
    "activations, fetched": _DARKER[1],
    "activations, recomputed": _DARKER[5],
    "logits and loss": PALETTE[5],
    "temporary": PALETTE[7],
    "unlabelled": PALETTE[6],
    "allocator rounding": _DARKER[3],
}
"""Labels of the instruments, from the bottom of the stack up: the longest-lived are lowest."""


@dataclass(frozen=True)
class Reduced:
    """A timeline reduced to what can be drawn: memory by label at some moments, and the largest blocks."""

    labels: list[str]
    """Labels from the bottom of the stack to its top."""
    moments: list[float]
    edges: list[float]
    """The state at moment i is drawn from edge i to edge i + 1; no other moment between them has more memory."""
    series: list[list[int]]
    """Bytes alive at each moment, by label; `blocks` are included."""
    blocks: list[Block]
    """Blocks that are drawn individually, ordered by start."""
    block_labels: list[int]
    block_moments: list[tuple[int, int]]
    """For each block, the index of the first moment at which it is alive and of the first at which it is freed."""
    merged: int
    """Number of all other blocks, which are drawn only as part of their label."""

    def parts_at(self, time: float) -> dict[str, int]:
        """Return bytes by label at a moment, largest first."""
        index = bisect_left(self.moments, time)
        return dict(
            Counter({label: row[index] for label, row in zip(self.labels, self.series, strict=True)}).most_common()
        )


def reduce(timeline: Timeline, peak_time: float, *, moments: int = MOMENTS, blocks: int = KEPT_BLOCKS) -> Reduced:
    """Reduce a timeline to about this many moments, the peak among them, and at most this many blocks."""
    alive = [b for b in timeline.blocks if b.size > 0 and (b.end is None or b.end > b.start)]
    marks = [peak_time, *(time for span in timeline.phases for time in (span.start, span.end))]
    at, edges = _moments(alive, marks, moments)
    end = timeline.end
    edges.append(end if end > edges[0] else edges[0] + 1e-6)  # a single moment needs some width

    shown = _shown_labels(alive, end)
    labels = sorted(set(shown.values()), key=_stack_order)
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
    """Return the moment with the most memory in each interval, and the start of each interval."""
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
    """Return the indices in `times` at which intervals start. With few events every event starts one. Otherwise half of
    them are spaced evenly in time, for the whole view, and half evenly in events, for zooming in; marks are added."""
    if len(times) <= limit:
        return list(range(len(times)))
    half = limit // 2
    width = (times[-1] - times[0]) / half
    even_in_time = {bisect_left(times, times[0] + width * i) for i in range(half)}
    even_in_events = {len(times) * i // half for i in range(half)}
    marked = {bisect_left(times, mark) for mark in marks}
    return sorted((even_in_time | even_in_events | marked) - {len(times)})


def _visible(blocks: Sequence[Block], end: float, limit: int) -> list[Block]:
    """Return the blocks with the largest area in the chart. The shortest block is about one pixel wide."""
    pixel = end / 2000

    def area(index: int) -> float:
        block = blocks[index]
        return block.size * max((end if block.end is None else block.end) - block.start, pixel)

    chosen = sorted(heapq.nlargest(limit, range(len(blocks)), key=area))
    return sorted((blocks[index] for index in chosen), key=lambda block: block.start)


def _shown_labels(blocks: Iterable[Block], end: float) -> dict[str, str]:
    """Map each label to the label under which it is drawn. If there are more labels than colours, the smallest are
    drawn as one."""
    area: defaultdict[str, float] = defaultdict(float)
    for block in blocks:
        area[block.label] += block.size * ((end if block.end is None else block.end) - block.start)
    ranked = sorted(area, key=area.__getitem__, reverse=True)
    own = ranked if len(ranked) <= MAX_LABELS else ranked[: MAX_LABELS - 1]
    return {label: label if label in own else OTHER for label in ranked}


def _stack_order(label: str) -> tuple[int, str]:
    """Return the sort key of the stack: the labels of the instruments first, then all others by name."""
    known = list(LABEL_COLORS)
    return (known.index(label) if label in known else len(known), label)


def label_colors(labels: Sequence[str]) -> list[str]:
    """Return the colours of labels. The labels of the instruments have fixed colours; others get the remaining ones in
    order."""
    left = iter([color for color in COLORS if color not in {LABEL_COLORS.get(label) for label in labels}])
    return [LABEL_COLORS.get(label) or next(left) for label in labels]


def unit(peak: int) -> tuple[str, int]:
    """Return the unit of a timeline with this peak, and its bytes."""
    if peak >= GIB // 10:
        return "GiB", GIB
    return ("MiB", MIB) if peak >= MIB // 10 else ("KiB", 2**10)


def size_text(size: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
