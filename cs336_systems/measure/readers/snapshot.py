"""Reads a snapshot of CUDA's allocator (torch.cuda.memory._dump_snapshot) as a timeline. No torch.

A snapshot knows no tensors, only the stack of each allocation: blocks are labelled by the function that allocated them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.files import LONGEST_NAME, MOST_ITEMS, foreign, is_number, limit, read_input, require_at_most, shown
from cs336_systems.plain_pickle import load_plain
from cs336_systems.text import printable
from cs336_systems.timeline import Block, Timeline

EARLIER = "allocated before the recording"
MOST_INSTRUCTIONS = 16_000_000
"""Maximum instructions of a pickle; an event has about 25, and MOST_ITEMS events are read. This many take 4 s."""
MOST_FRAMES = 100
"""Frames of a stack, from the innermost, that are searched for user code."""


def read_snapshot(path: Path) -> Timeline:
    with foreign(path, "a memory snapshot"):
        snapshot = load_plain(read_input(path), most=limit(MOST_INSTRUCTIONS))
        if not (isinstance(snapshot, dict) and {"segments", "device_traces"} <= snapshot.keys()):
            raise UserError(f"{str(path)!r} is not a memory snapshot: it has no segments and device_traces")
        events = list(_all_of(_dicts(trace, "a history of events") for trace in snapshot["device_traces"]))
        held = _all_of(_dicts(s["blocks"], "a segment") for s in _dicts(snapshot["segments"], "the list of segments"))
        timeline = Timeline(path.name, "CUDA", _blocks(events, held))
        if not timeline.blocks:
            raise UserError(
                f"{str(path)!r} holds no allocations: was torch.cuda.memory._record_memory_history() called?"
            )
        timeline.check()
        return timeline


def _dicts(values: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(type(value) is dict for value in values):
        raise ValueError(f"{what} is not a list of dictionaries")
    return values


def _all_of(parts: Iterable[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the items of all parts; a small file may reference one list many times."""
    total = 0
    for part in parts:
        total += len(part)
        require_at_most(total, MOST_ITEMS, "events or blocks")
        yield from part


def _blocks(events: list[dict[str, Any]], held: Iterable[dict[str, Any]]) -> list[Block]:
    """Return the blocks of the history, and those allocated before it began."""
    labels = _Labels()
    for event in events:
        if not is_number(event.get("time_us", 0)):
            raise ValueError(f"an event at the time {shown(event['time_us'])}")
    first = min((event["time_us"] for event in events if "time_us" in event), default=0)
    found: list[Block] = []
    live: dict[int, tuple[dict[str, Any], float]] = {}
    for event in events:
        now = (event.get("time_us", first) - first) / 1e6
        if event["action"] == "alloc":
            live[_address(event["addr"])] = event, now
        elif event["action"] == "free_completed":
            allocation, start = live.pop(_address(event["addr"]), (None, 0.0))
            found.append(labels.block(event["size"], start, now, allocation))
    found += [labels.block(allocation["size"], start, None, allocation) for allocation, start in live.values()]
    found += [
        Block(EARLIER, block.get("requested_size", block["size"]), 0.0, None)
        for block in held
        if block["state"] == "active_allocated" and _address(block.get("address", 0)) not in live
    ]
    return found


def _address(value: Any) -> int:
    """Return an address of at most 64 bits; larger integers can be chosen such that a dictionary of them is slow."""
    if not (isinstance(value, int) and 0 <= value < 2**64):
        raise ValueError(f"a block at the address {shown(value)}")
    return value


_NO_FRAMES: list[Any] = []


class _Labels:
    """Labels blocks by the innermost function of user code that allocated them; many share a stack."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}

    def block(self, size: int, start: float, end: float | None, allocation: dict[str, Any] | None) -> Block:
        if allocation is None:
            return Block(EARLIER, size, 0.0, end)
        frames = allocation.get("frames") or _NO_FRAMES
        if id(frames) not in self._known:
            self._known[id(frames)] = self._label(_dicts(frames[:MOST_FRAMES], "a stack"))
        label, line = self._known[id(frames)]
        return Block(label, size, start, end, line=line)

    def _label(self, frames: list[dict[str, Any]]) -> tuple[str, str]:
        frame = next((frame for frame in frames if _is_user_code(frame["filename"])), None)
        if frame is None:
            return "unlabelled", ""
        if not isinstance(frame["name"], str) or not is_number(frame["line"]):
            raise ValueError(f"a frame of {shown(frame['name'])}, line {shown(frame['line'])}")
        file, name = (printable(text[:200]) for text in (Path(frame["filename"]).name, frame["name"]))
        line = frame["line"]
        return f"{file}: {name}", f"{file}:{line} in {name}"


def _is_user_code(filename: str) -> bool:
    """Return whether a frame is Python code outside torch."""
    if len(filename) > LONGEST_NAME:
        raise ValueError(f"a file name of {len(filename):,} characters")
    return filename.endswith(".py") and "/torch/" not in filename.replace("\\", "/")
