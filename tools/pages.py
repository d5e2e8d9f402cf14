"""Builds the pages of results/h200 for static hosting, and the pictures of the documents.

python tools/pages.py               # site/: a start page, reports, a comparison, a memory timeline
python tools/pages.py --pictures    # docs/images as well; needs chromium for those of pages
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cs336_systems.cli import main as cs336
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import load
from cs336_systems.report.build import document, write, write_report
from cs336_systems.report.document import Document, Link, Section
from cs336_systems.report.picture import save
from cs336_systems.report.sections import pictures
from cs336_systems.report.web.timeline_page import write_page
from cs336_systems.text import Text
from cs336_systems.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
H200, SITE, IMAGES = ROOT / "results" / "h200", ROOT / "site", ROOT / "docs" / "images"
CHARTS = {
    "attention-lengths": "attention-lengths-5",
    "ddp-lanes": "ddp-lanes",
    "fast-step-3": "fast-step-3",
}
"""Name of a picture in docs/images -> name of its chart."""
SHOTS = {"report": ("h200", 1240, 1075), "training": ("training", 1240, 1010)}
"""Name of a picture of a page -> its folder in the site, width and height of the window; light and dark."""


class Page(NamedTuple):
    """A page of the site: its folder, what the start page says of it, and what builds it."""

    folder: str
    title: Text
    about: Text
    build: Callable[[Path], object]


def report(*names: str, title: str, published: bool = False) -> Callable[[Path], object]:
    paths = [str(H200 / name) for name in names]
    return lambda folder: write_report(paths, folder, catalogue(), title=title, with_published=published)


def comparison(folder: Path) -> object:
    names = ("records.jsonl", "other_card/records.jsonl")
    files = [os.path.relpath(H200 / name) for name in names]  # as the page shows them
    metrics = "forward_time,forward_backward_time"
    return cs336(["compare", *files, "--metric", metrics, "--output", str(folder)])


def cards(folder: Path) -> object:
    """The experiments that both cards have."""
    both = [load(H200 / name) for name in ("records.jsonl", "other_card/records.jsonl")]
    shared = set.intersection(*({record.experiment for record in one.records} for one in both))
    chosen = [
        dataclasses.replace(one, records=[record for record in one.records if record.experiment in shared])
        for one in both
    ]
    return write(document(chosen, catalogue(), title="Two H200 cards side by side"), folder)


def timeline(folder: Path) -> object:
    folder.mkdir(parents=True, exist_ok=True)
    found = Timeline.load(H200 / "timelines" / "2.7B-train-step-fp32.json.gz")
    return write_page(found, folder / "index.html")


PAGES = (
    Page(
        "h200",
        Text("Everything measured on one H200", "单张 H200 上的全部测量"),
        Text(
            "Speed, attention, memory, ranks and how far to trust the numbers.",
            "速度、注意力、显存、多进程，以及数字的可信度。",
        ),
        report("records.jsonl", title="cs336_systems on an H200", published=True),
    ),
    Page(
        "training",
        Text("Two training runs", "两次训练"),
        Text(
            "Loss, speed, gradient norm; one of them was killed and resumed.",
            "损失、速度、梯度范数；其中一次被中断后恢复。",
        ),
        report("training/lr-6e-4.jsonl", "training/lr-2e-3.jsonl", title="Two training runs"),
    ),
    Page(
        "cards",
        Text("Two cards side by side", "两张卡并列"),
        Text("The same attention on two H200 cards, in one chart.", "同样的注意力在两张 H200 上，同一张图。"),
        cards,
    ),
    Page(
        "compare",
        Text("What differs between two cards", "两张卡之间的差别"),
        Text("Ratios with confidence intervals, and their geometric mean.", "带置信区间的比值，及其几何平均。"),
        comparison,
    ),
    Page(
        "timeline",
        Text("Memory of one training step", "一个训练步的显存"),
        Text(
            "Every allocation of a step of 2.7B, by kind, phase and module.",
            "2.7B 一步中的每次分配，按类别、阶段和模块。",
        ),
        timeline,
    ),
)


def build_site() -> None:
    """Write every page and a start page that leads to them."""
    shutil.rmtree(SITE, ignore_errors=True)
    for page in PAGES:
        page.build(SITE / page.folder)
    opens = Text("Open the page", "打开页面")
    sections = [
        Section(page.folder, page.title, page.about, links=[Link(opens, f"{page.folder}/index.html")]) for page in PAGES
    ]
    write(Document(Text("cs336_systems"), sections=sections), SITE)


def draw_pictures() -> None:
    found = {picture.name: picture for picture in pictures(load(H200 / "records.jsonl").records, catalogue())}
    save([dataclasses.replace(found[chart], name=name) for name, chart in CHARTS.items()], IMAGES, ("png",))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no chromium: the pictures of pages are not drawn")
    for name, (folder, width, height) in SHOTS.items():
        for theme, scheme in (("light", 1), ("dark", 0)):
            with tempfile.TemporaryDirectory() as profile:
                options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                options += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
                options += [f"--blink-settings=preferredColorScheme={scheme}"]
                picture = f"--screenshot={IMAGES / f'{name}-{theme}.png'}"
                address = (SITE / folder / "index.html").as_uri()
                subprocess.run([chromium, *options, picture, address], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="draw docs/images, too")
    arguments = parser.parse_args()
    build_site()
    if arguments.pictures:
        draw_pictures()
    print(SITE / "index.html")
