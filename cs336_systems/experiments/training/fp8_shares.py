"""A table for `cs336 inspect`: elements that FP8 has lost in a training run, from its records."""

from pathlib import Path
from typing import NamedTuple

from cs336_systems import record
from cs336_systems.config import FP8_LOST, LARGEST_LOST_SHARE, UserError
from cs336_systems.record import Record
from cs336_systems.report.rows import percent
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say


class _Share(NamedTuple):
    share: float
    block: str
    step: int


def lost_table(path: Path) -> Table:
    """Return, for every FP8 tensor, the largest share of elements that became 0, and the share in the last checked
    step."""
    found: dict[str, list[Record]] = {}
    for item in record.load(path).records:
        if item.experiment == "train" and item.metric.startswith(FP8_LOST) and item.numbers:
            found.setdefault(item.metric.removeprefix(FP8_LOST), []).append(item)
    if not found:
        raise UserError(
            f"{str(path)!r} has no records of a training run in FP8: cs336 train --precision fp8 writes them in every "
            "step of --fp8_check_every"
        )
    rows: list[list[str | Text]] = []
    checked: set[int] = set()
    for tensor, items in found.items():
        shares = [share for item in items for share in _shares(item)]
        checked |= {share.step for share in shares}
        worst, last = max(shares), max(share.step for share in shares)
        now = max(share.share for share in shares if share.step == last)
        rows.append([tensor, percent(worst.share, 2), worst.block, str(worst.step), percent(now, 2)])
    columns = [
        word(Text("tensor", "张量")),
        Column(Text("lost, at most", "归零，最多")),
        Column(Text("block", "块")),
        Column(Text("step", "步")),
        Column(Text("lost in the last checked step", "最后检查步的归零")),
    ]
    title = say("elements that became 0 in FP8: {}", "FP8 中归零的元素：{}", str(path))
    note = say(
        "{} steps were checked; blocks above {} return to bf16",
        "检查了 {} 步；超过 {} 的块回到 bf16",
        *(str(len(checked)), percent(LARGEST_LOST_SHARE, 0)),
    )
    return Table(title, columns, rows, [note])


def _shares(item: Record) -> list[_Share]:
    """Return the shares of one record; its configuration names the blocks."""
    blocks = str(item.config.get("blocks", "")).split(",")
    step = item.config.get("first_step")
    if not isinstance(step, int) or len(blocks) != len(item.numbers):
        raise UserError(f"a record of {item.metric!r} does not name its step and its blocks")
    return [_Share(share, block, step) for share, block in zip(item.numbers, blocks, strict=True)]
