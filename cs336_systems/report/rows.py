"""What the tables of all experiments share: how numbers are written, how rows and tables are named."""

from collections.abc import Callable, Sequence
from typing import Any

from cs336_systems.record import GIB, Statistics
from cs336_systems.report.cells import CellView
from cs336_systems.report.referee import remarks
from cs336_systems.table import Column, Table

# Fields of a configuration that may tell rows apart, with their headings. What is the same in all goes in the title.
FIELDS = {
    "size": "size",
    "model_factory": "model",
    "context_length": "context",
    "batch_size": "batch",
    "vocab_size": "vocabulary",
    "mode": "mode",
    "precision": "precision",
    "attention": "attention",
    "checkpoint_blocks": "checkpoint",
    "compile": "compiled",
    "fast": "fast",
    "warmup_steps": "warm-up",
    "heads": "heads",
    "head_dim": "d",
    "seq_len": "seq",
    "is_causal": "causal",
    "implementation": "implementation",
}


# -- formatting -------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "N/A" if value is None else f"{value:,.{digits}f}"


def ms(seconds: float | None) -> str:
    return "" if seconds is None else number(seconds * 1e3, 2 if seconds < 1 else 1)


def kernel_ms(seconds: float | None) -> str:
    """A kernel may take microseconds: three digits after the point until there are three before it."""
    return "" if seconds is None else number(seconds * 1e3, 3 if seconds < 0.1 else 1)


def spread(found: Statistics | None, show: Callable[[float | None], str] = ms) -> str:
    return f"{show(found.mean)} ± {show(found.std)}" if found else ""


def tflops(per_second: float | None) -> str:
    if per_second and per_second < 1e10:  # a CPU on a small shape
        return f"{per_second / 1e12:.2g}"
    return number(per_second / 1e12 if per_second else None, 1 if per_second and per_second > 1e12 else 3)


def gib(size: float | None) -> str:
    if size is None:
        return ""
    return number(size / GIB, 2 if size >= GIB / 10 else 4)


def percent(share: float | None, digits: int = 1) -> str:
    return "N/A" if share is None else f"{share:.{digits}%}"


def ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}x" if over and under else ""


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value).removeprefix("cs336_systems.benchmark.")


# -- pieces -----------------------------------------------------------------------------------------------------------


def varying(cells: Sequence[CellView], *, always: Sequence[str] = ("size",)) -> list[str]:
    return [name for name in FIELDS if name in always or _differs(cells, name)]


def _differs(cells: Sequence[CellView], name: str) -> bool:
    first = cells[0].get(name) if cells else None
    return any(cell.get(name) != first for cell in cells)


def key_columns(names: Sequence[str]) -> list[Column]:
    return [Column(FIELDS[name], numeric=False) for name in names]


def keys(cell: CellView, names: Sequence[str]) -> list[str]:
    return [as_text(cell.get(name)) for name in names]


def title_of(
    experiment: str,
    what: str,
    cells: Sequence[CellView],
    shown: Sequence[str],
    machines: Sequence[str] | None = None,
) -> str:
    """What the table holds, on which machine, and the settings that are the same in all rows, the usual ones unsaid."""
    first = cells[0]
    same = [name for name in FIELDS if name not in shown and not _differs(cells, name)]
    settings = [
        f"{label} {as_text(first.get(name))}" if label else as_text(first.get(name))
        for name, label in (
            ("context_length", "context"),
            ("batch_size", "batch"),
            ("heads", "heads"),
            ("head_dim", "d"),
            ("seq_len", "seq"),
            ("is_causal", "causal"),
            ("mode", ""),
            ("precision", ""),
            ("attention", "attention"),
        )
        if name in same and first.get(name) is not None
    ]
    unusual = {"vocab_size": 10_000, "checkpoint_blocks": 0, "compile": False, "warmup_steps": 5, "model_factory": None}
    settings += [
        f"{FIELDS[name]} {as_text(first.get(name))}"
        for name, usual in unusual.items()
        if name in same and first.get(name) not in (usual, None)
    ]
    named = sorted({cell.machine for cell in cells}) if machines is None else machines
    where = ", ".join([*named, *settings])
    return f"{experiment}: {what} · {where}" if where else f"{experiment}: {what}"


def cell_table(
    what: str,
    cells: Sequence[CellView],
    shown: Sequence[str],
    columns: Sequence[Column],
    row: Callable[[CellView], list[str]],
    notes: Sequence[str] | None = None,
) -> Table:
    """One row for each cell: its distinguishing fields, then `row`, or its verdict where it failed."""
    rows = []
    for cell in cells:
        values = row(cell) if cell.ok else [cell.verdict] + [""] * (len(columns) - 1)
        rows.append([*keys(cell, shown), *values])
    title = title_of(cells[0].experiment, what, cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows, remarks_on(cells, shown) if notes is None else notes)


def row_name(cell: CellView, shown: Sequence[str]) -> str:
    """What tells a cell's row from the others, in words."""
    return " ".join(
        f"{FIELDS[field]} {text}" if text.isdigit() or text in ("yes", "no") else text
        for field, text in zip(shown, keys(cell, shown), strict=True)
        if text
    )


def remarks_beside_times(cells: Sequence[CellView], shown: Sequence[str]) -> list[str]:
    """Of a table whose subject is not time."""
    return [note for note in remarks_on(cells, shown) if "step times vary" not in note]


def remarks_on(cells: Sequence[CellView], shown: Sequence[str]) -> list[str]:
    """The referee's, with the cells named as in the table's rows."""
    return remarks(cells, lambda cell: row_name(cell, shown))
