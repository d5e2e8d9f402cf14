"""Rows of the tables that are recorded as the samples of one metric, row after row. Writer and reader share them."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar


class KindRow(NamedTuple):
    """A row of `kind_table: PHASE`: the kernels of one kind in one step."""

    kind: str
    kernels: float
    seconds: float


class ComparedRow(NamedTuple):
    """A row of `compared_kinds`: the kernels of one kind in one step, in a trace and as predicted."""

    kind: str
    measured: float
    predicted: float


class PartRow(NamedTuple):
    """A row of `part_table: PHASE`: the kernels of one kind launched by one part of the model in one step."""

    part: str
    kind: str
    seconds: float


class KernelRow(NamedTuple):
    """A row of `kernel_table: PHASE`: the kernels of one name; number and total of one step."""

    name: str
    kernels: float
    seconds: float
    median: float
    least: float
    greatest: float


class LabelRow(NamedTuple):
    """A row of `part_memory`: bytes by label at the peak."""

    label: str
    size: int


class BlockRow(NamedTuple):
    """A row of `largest_blocks`."""

    size: int
    label: str
    module: str
    what: str
    line: str


class SavedRow(NamedTuple):
    """A row of `largest_saved`: a tensor saved for backward."""

    size: int
    module: str
    what: str
    line: str


class OperationRow(NamedTuple):
    """A row of `block_operations`: the tensors of one block that one operation of one module saves for backward."""

    operation: str
    module: str
    size: int
    tensors: int


Row = TypeVar("Row", KindRow, ComparedRow, PartRow, KernelRow, LabelRow, BlockRow, SavedRow, OperationRow)


def flatten(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the samples of a recorded table."""
    return list(chain.from_iterable(rows))


def rows_of(samples: Sequence[Any], row: type[Row]) -> list[Row]:
    """Return the rows of a recorded table; an incomplete last row is dropped."""
    width = len(row._fields)
    return [row(*samples[start : start + width]) for start in range(0, len(samples) - width + 1, width)]
