"""A picture, and how all of them look: one palette that the colour-blind can read, SVG and PNG from one drawing.

matplotlib takes half a second to import, so only drawing does it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#f0e442")
"""Okabe and Ito's, blue first."""
MORE = ("#004f7c", "#7f5800", "#005b43", "#7a3f62")
"""Dark ones of the first four, where eight are not enough."""
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and is drawn by the reader's own fonts
    "svg.hashsalt": "cs336",  # else the same picture would have other ids each time
}


@dataclass(frozen=True)
class Picture:
    name: str
    """Of its files, without an ending."""
    caption: str
    draw: Callable[[Any], None]
    """On an empty matplotlib figure."""
    size: tuple[float, float] = (7.0, 3.6)
    """Inches."""


def save(pictures: Sequence[Picture], folder: Path, formats: tuple[str, ...] = ("svg", "png")) -> list[Path]:
    """Write every picture in every format; the files, in order."""
    if not pictures:
        return []
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    for picture in pictures:
        with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=PALETTE)}):  # type: ignore[arg-type]
            figure = Figure(figsize=picture.size, layout="constrained")
            FigureCanvasAgg(figure)
            picture.draw(figure)
            for format in formats:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{picture.name}.{format}"
                # Neither may hold the date: the same records give the same bytes.
                metadata = {"Date": None} if format == "svg" else {"Software": None}
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written


def stacked_bars(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars, one for each name, in the order given from the top; made of parts, each in a colour."""
    left = [0.0] * len(names)
    for color, (label, sizes) in zip((*PALETTE, *MORE), parts.items(), strict=False):
        axes.barh(range(len(names)), sizes, 0.6, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
