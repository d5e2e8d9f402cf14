"""Pictures drawn by matplotlib: one palette, readable with colour blindness, and one style; SVG and PNG of a drawing.

matplotlib takes half a second to import, so it is imported only to draw.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cs336_systems.files import replacing
from cs336_systems.text import Language

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#f0e442")
"""The palette of Okabe and Ito, blue first."""
MORE = ("#004f7c", "#7f5800", "#005b43", "#7a3f62")
"""Dark variants of the first four, for charts with more than eight series."""
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
    "svg.fonttype": "none",  # text stays text: searchable, and in the fonts of the reader
    "svg.hashsalt": "cs336",  # the same picture always has the same ids
}

CHINESE = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "SimHei")
"""Fonts with Chinese characters; the first one that is installed is used."""


@dataclass(frozen=True)
class Picture:
    name: str
    """Name of its files, without suffix."""
    caption: str
    draw: Callable[[Any], None]
    """Draws on an empty matplotlib figure."""
    size: tuple[float, float] = (7.0, 3.6)
    """Inches."""


def save(pictures: Sequence[Picture], folder: Path, formats: tuple[str, ...] = ("svg", "png")) -> list[Path]:
    """Write every picture in every format and return the files in order."""
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
                # No date and no version: the same records give the same bytes.
                metadata = {"Date": None} if format == "svg" else {"Software": None}
                with replacing(path) as fresh:
                    figure.savefig(fresh, format=format, dpi=160, metadata=metadata)
                written.append(path)
    return written


def can_write_chinese() -> bool:
    return _chinese_font() is not None


def fonts(language: Language) -> AbstractContextManager:
    """Return a context with a font that has the characters of the language."""
    import matplotlib

    font = _chinese_font() if language == "zh" else None
    return matplotlib.rc_context({"font.family": [font, "sans-serif"]} if font else {})


@cache
def _chinese_font() -> str | None:
    from matplotlib import font_manager

    def found() -> str | None:
        installed = {font.name for font in font_manager.fontManager.ttflist}
        return next((name for name in CHINESE if name in installed), None)

    if found() is None:  # the font may be newer than matplotlib's cached list
        for path in font_manager.findSystemFonts():
            if re.search(r"cjk|wqy|hans|simhei|pingfang", Path(path).name, re.IGNORECASE):
                font_manager.fontManager.addfont(path)
    return found()
