"""The same work on several machines or in several runs: a row for each piece of work, a column for each of them."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cs336_systems.report.cells import CellView, by_machine
from cs336_systems.report.published import PUBLISHED
from cs336_systems.report.rows import FIELDS, as_text, gib, kernel_ms, key_columns, keys, ms, ratio, title_of, varying
from cs336_systems.table import Column, Table

QUANTITIES = {
    "forward_time": "forward",
    "backward_time": "backward",
    "forward_backward_time": "forward and backward",
    "step_time": "step",
    "leaderboard_time": "leaderboard",
    "memory_before_backward": "memory before backward",
    "peak_memory": "peak memory",
}
"""Metric -> what a table of it is called."""
BY_MEDIAN = ("flash", "attention_rivals", "attention_step", "ddp", "optimizer_sharding", "fsdp")
"""Experiments whose own tables show medians; those of all others show means."""
SHAPE = ("d_model", "num_layers", "num_heads", "d_ff", "ranks", "backend", "fast", "inner")
"""With the fields that tables show, what makes work the same."""
PASSES = ("forward_time", "backward_time")
ONE_PASS = ("forward-backward", "train-step")
"""Modes whose forward and backward are the same work."""


class Place(NamedTuple):
    """A row: the cell that names it, and which of several things that cell measured (an implementation, a wrapper)."""

    cell: CellView
    part: str


def side_by_side(cells: Sequence[CellView]) -> list[Table]:
    """A table of each quantity that two machines or more have of the same work; none where there is one machine."""
    machines = by_machine(cells)
    if len(machines) < 2:
        return []
    tables = (_table(metric, machines) for metric in QUANTITIES)
    return [table for table in tables if table is not None]


def _table(metric: str, machines: dict[str, list[CellView]]) -> Table | None:
    places: dict[tuple, Place] = {}
    texts: dict[str, dict[tuple, str]] = {}
    values: dict[str, dict[tuple, float]] = {}
    for machine, cells in machines.items():
        texts[machine], values[machine] = {}, {}
        for cell in cells:
            for part, value in _measured(cell, metric):
                key = (*_work(cell, metric), part)
                if key not in texts[machine]:  # of two modes with the same pass the first counts
                    places.setdefault(key, Place(cell, part))
                    texts[machine][key] = cell.verdict if value is None else _shown(cell, metric)(value)
                    if value is not None:
                        values[machine][key] = value
    shared = [key for key in places if _is_shared([found.get(key) for found in values.values()])]
    if not shared:
        return None
    present = [machine for machine in machines if any(key in values[machine] for key in shared)]
    return _written(metric, [(key, places[key]) for key in shared], present, texts, values)


def _is_shared(values: Sequence[float | None]) -> bool:
    return sum(value is not None for value in values) > 1


def _written(
    metric: str,
    rows: Sequence[tuple[tuple, Place]],
    machines: Sequence[str],
    texts: dict[str, dict[tuple, str]],
    values: dict[str, dict[tuple, float]],
) -> Table:
    cells = [place.cell for _, place in rows]
    unsaid = ["warmup_steps", *(["mode"] if metric in PASSES else [])]
    always = ("size",) if any(cell.get("size") for cell in cells) else ()
    telling = [name for name in varying(cells, always=always) if name not in unsaid or cells[0].experiment == "warmup"]
    with_parts = any(place.part for _, place in rows)
    first, *others = machines
    unit = "GiB" if "memory" in metric else "ms"
    columns = [
        *key_columns(telling),
        *([Column("of", numeric=False)] if with_parts else []),
        *(Column(machine, unit) for machine in machines),
        *(Column(f"{_short(other)} / {_short(first)}") for other in others),
    ]
    lines = [
        [
            *keys(place.cell, telling),
            *([place.part] if with_parts else []),
            *(texts[machine].get(key, "") for machine in machines),
            *(ratio(values[other].get(key), values[first].get(key)) for other in others),
        ]
        for key, place in rows
    ]
    experiment = cells[0].experiment
    what = f"{QUANTITIES[metric]}, side by side"
    notes = ["medians" if experiment in BY_MEDIAN else "means"]
    if any(machine.endswith(PUBLISHED) for machine in machines):
        notes.append(f"{PUBLISHED}: from write-ups of the course's assignment, on software they do not name")
    return Table(title_of(experiment, what, cells, [*telling, *unsaid], machines=()), columns, lines, notes)


def _short(machine: str) -> str:
    return re.sub(rf"^NVIDIA (GeForce )?| · {PUBLISHED}$", "", machine)


def _measured(cell: CellView, metric: str) -> Iterator[tuple[str, float | None]]:
    """What a cell has of a quantity: itself, or one for each thing that was measured in turns. None: it failed."""
    if not cell.ok:
        yield "", None
        return
    middle = cell.median if cell.experiment in BY_MEDIAN else cell.value
    for name in cell.metrics:
        part = name.removesuffix(metric).rstrip("_: ")
        if name.endswith(metric) and (name == metric or part in _parts(cell)):
            value = middle(name)
            if value is not None:
                yield part, value


def _parts(cell: CellView) -> Sequence[str]:
    return cell.get("implementations") or cell.get("arrangements") or ()


def _work(cell: CellView, metric: str) -> tuple:
    """What must be the same. How many steps came before matters where that is the question."""
    names = [name for name in FIELDS if name not in ("mode", "warmup_steps")]
    mode = cell.get("mode")
    warmup = cell.get("warmup_steps") if cell.experiment == "warmup" else None
    whole = ONE_PASS if metric in PASSES and mode in ONE_PASS else mode
    return (whole, warmup, *(as_text(cell.get(name)) for name in (*names, *SHAPE)))


def _shown(cell: CellView, metric: str) -> Callable[[float | None], str]:
    if "memory" in metric:
        return gib
    return kernel_ms if cell.get("seq_len") else ms
