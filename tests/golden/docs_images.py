"""Draws the pictures of docs/images from the charts of results/h200.

python -m tests.golden.docs_images      # redraws them; check them before committing
"""

import dataclasses

from cs336_systems import record
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.report.picture import Picture, save
from cs336_systems.report.sections import pictures
from tests.golden.report_goldens import H200
from tests.helpers import ROOT

FOLDER = ROOT / "docs" / "images"
CHARTS = {
    "checkpointing": "checkpointing-1",
    "ddp-lanes": "ddp-lanes",
    "fast-step-1": "fast-step-1",
    "fast-step-3": "fast-step-3",
    "fsdp-memory": "fsdp-1",
    "kernels": "kernels-1",
    "memory": "memory-1",
}
"""Name of a file -> name of its chart."""


def drawn() -> list[Picture]:
    found = pictures(record.load(H200 / "records.jsonl").records, catalogue())
    by_name = {picture.name: picture for picture in found}
    return [dataclasses.replace(by_name[chart], name=file) for file, chart in CHARTS.items()]


if __name__ == "__main__":
    save(drawn(), FOLDER, ("png",))
