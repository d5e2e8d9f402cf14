"""Where a run's records go by default, and what is printed when it has ended."""

import datetime
import sys
from pathlib import Path

from cs336_systems import record
from cs336_systems.benchmark.runner import Outcome
from cs336_systems.report.sections import tables


def new_run_file(command: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{command}-{stamp}" / "records.jsonl"


def show(path: Path, wanted: set[tuple[str, str]]) -> None:
    """Print the tables of the (experiment, cell) pairs that were asked for."""
    if not path.exists():
        return
    loaded = record.load(path)
    for remark in loaded.remarks:
        print(remark, file=sys.stderr)
    for table in tables([item for item in loaded.records if (item.experiment, item.cell) in wanted]):
        print(table.render("terminal"), end="\n\n")


def report_outcome(outcome: Outcome, path: Path) -> None:
    parts = [f"{outcome.done} cell{'' if outcome.done == 1 else 's'} measured"]
    if outcome.reused:
        parts.append(f"{outcome.reused} taken from the file")
    if outcome.failed:
        parts.append(f"{outcome.failed} failed or did not fit")
    print(f"{', '.join(parts)}, in {outcome.seconds:.0f} s on {outcome.environment.machine}")
    print(f"records: {path}    as a table: cs336 table {path} --format md")
