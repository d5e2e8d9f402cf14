"""What the report's golden tests compare: a few cells of every experiment that results/h200 holds, in every format.

python -m tests.golden.report_goldens   # write tests/golden/report anew; review the diff
"""

from functools import cache
from pathlib import Path

from cs336_systems import record
from cs336_systems.record import Loaded, Record
from cs336_systems.report.build import document, markdown, tables_in
from cs336_systems.report.cells import group
from cs336_systems.report.document import Document
from tests.helpers import ROOT

H200 = ROOT / "results" / "h200"
FOLDER = Path(__file__).parent / "report"
CELLS = {"flash": 8}
"""Of an experiment; else two."""


@cache
def some_records() -> list[Record]:
    every = [r for name in ("records.jsonl", "loss_curves.jsonl") for r in record.load(H200 / name).records]
    found: list[Record] = []
    taken: dict[str, int] = {}
    for cell in group(every):
        taken[cell.experiment] = taken.get(cell.experiment, 0) + 1
        if taken[cell.experiment] <= CELLS.get(cell.experiment, 2):
            found += cell.metrics.values()
    return found


def some_document() -> Document:
    return document([Loaded(some_records(), ["records.jsonl: the last line is torn"])])


@cache
def goldens() -> dict[str, str]:
    """File name -> text."""
    report = some_document()
    found = {f"report.{language}.md": markdown(report, language) for language in ("en", "zh")}
    found |= {f"tables.{format}": "\n\n".join(tables_in(report, format)) + "\n" for format in ("csv", "latex", "typst")}
    return found


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in goldens().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
