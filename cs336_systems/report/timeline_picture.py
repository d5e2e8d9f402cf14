"""Memory over one step as a still picture."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.report.picture import Picture
from cs336_systems.report.timeline_reduction import label_colors, reduce, size_text, unit
from cs336_systems.report.timeline_words import title_text
from cs336_systems.timeline import Span, Timeline

PICTURE_MOMENTS = 500
"""Maximum moments: a picture has few columns, and its SVG stays small."""


def timeline_picture(timeline: Timeline, name: str) -> Picture:
    return Picture(name, title_text(timeline).en, partial(_draw, timeline=timeline), (8.0, 4.0))


def _draw(figure: Any, timeline: Timeline) -> None:
    axes = figure.subplots()
    title = f"{title_text(timeline).en}, {timeline.device}"
    peak_time, peak = timeline.peak()
    if not peak:
        axes.set_title(title)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no memory was recorded", ha="center", va="center", transform=axes.transAxes)
        return
    reduced = reduce(timeline, peak_time, moments=PICTURE_MOMENTS, blocks=0)
    name, scale = unit(peak)
    times = [time * 1e3 for time in reduced.edges]
    rows = [[size / scale for size in [*row, row[-1]]] for row in reduced.series]
    colors = label_colors(reduced.labels)
    # Areas share their edges; antialiasing would draw pale lines between them.
    axes.stackplot(times, rows, labels=reduced.labels, colors=colors, step="post", linewidth=0, antialiased=False)
    axes.set(
        xlabel="ms since the step began, by the host's clock while tracing",
        ylabel=name,
        xlim=(times[0], times[-1]),
        ylim=(0, 1.14 * peak / scale),
    )
    _mark_peak(axes, peak_time * 1e3, peak / scale, f"peak {size_text(peak)}")
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
    """Draw bands above the axes, with names that do not fit written above them; return their height in points."""
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
