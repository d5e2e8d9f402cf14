"""The files that golden tests of the report compare: a few cells of every experiment of results/h200, in every format.

python -m tests.golden.report_goldens   # writes tests/golden/report again; review the diff
"""

import dataclasses
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Loaded, Record
from cs336_systems.report.build import document, markdown, tables_in
from cs336_systems.report.cells import group
from cs336_systems.report.document import Document
from cs336_systems.report.web.page import page
from cs336_systems.text import LANGUAGES, Text
from tests.helpers import ROOT, records_of_h200

H200 = ROOT / "results" / "h200"
FOLDER = Path(__file__).parent / "report"
CELLS = {"flash": 8}
"""Number of cells of an experiment; two of every other."""


@cache
def some_records() -> list[Record]:
    every = [r for name in ("records", "loss_curves") for r in records_of_h200(name)]
    found: list[Record] = []
    taken: dict[str, int] = {}
    for cell in group(every):
        taken[cell.experiment] = taken.get(cell.experiment, 0) + 1
        if taken[cell.experiment] <= CELLS.get(cell.experiment, 2):
            found += cell.records
    return found


def records_of(*experiments: str) -> list[Record]:
    return [r for r in some_records() if r.experiment in experiments]


def some_document() -> Document:
    return document([Loaded(some_records(), [Text("records.jsonl: the last line is torn")])], catalogue())


class PageText(HTMLParser):
    """The text of a page in one language, a line for each run of text; drawings, scripts and styles left out."""

    def __init__(self, html: str, language: str):
        super().__init__()
        self.language, self.lines, self.hidden = language, [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        other = dict(attributes).get("class") in {*LANGUAGES} - {self.language}
        if self.hidden or other or tag in ("script", "style", "svg"):
            self.hidden += [tag] if tag not in ("meta", "link", "br", "img", "input") else []

    def handle_endtag(self, tag):
        if self.hidden and self.hidden[-1] == tag:
            self.hidden.pop()

    def handle_data(self, data):
        if not self.hidden and data.strip():
            self.lines.append(" ".join(data.split()))


MISSING = ("collectives", "parallel_plan")
"""The experiments without records that the goldens list: all of them would change with every new experiment."""


@cache
def goldens() -> dict[str, str]:
    """File name -> text."""
    report = some_document()
    report = dataclasses.replace(report, missing={name: report.missing[name] for name in MISSING})
    found = {f"report.{language}.md": markdown(report, language) for language in LANGUAGES}
    found |= {f"tables.{format}": "\n\n".join(tables_in(report, format)) + "\n" for format in ("csv", "latex", "typst")}
    for language in LANGUAGES:
        found[f"page.{language}.txt"] = "\n".join(PageText(page(report, language), language).lines) + "\n"
    return found


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in goldens().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
