"""Reads a snapshot of CUDA's allocator (torch.cuda.memory._dump_snapshot) as a timeline. No torch.

A snapshot knows no tensors, only the stack of each allocation: blocks are labelled by the function that allocated them.
"""

import io
import pickle
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.files import read_input
from cs336_systems.timeline import Block, Timeline

EARLIER = "allocated before the recording"


def read_snapshot(path: Path) -> Timeline:
    snapshot = _unpickled(path)
    events = [event for trace in snapshot["device_traces"] for event in trace]
    blocks = _blocks(events, snapshot["segments"])
    if not blocks:
        raise UserError(f"{str(path)!r} holds no allocations: was torch.cuda.memory._record_memory_history() called?")
    return Timeline(path.name, "CUDA", blocks)


def _blocks(events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[Block]:
    """Return the blocks of the history, and those allocated before it began."""
    first = min((event["time_us"] for event in events if "time_us" in event), default=0)
    found: list[Block] = []
    live: dict[int, tuple[dict[str, Any], float]] = {}
    for event in events:
        now = (event.get("time_us", first) - first) / 1e6
        if event["action"] == "alloc":
            live[event["addr"]] = event, now
        elif event["action"] == "free_completed":
            allocation, start = live.pop(event["addr"], (None, 0.0))
            found.append(_block(event["size"], start, now, allocation))
    found += [_block(allocation["size"], start, None, allocation) for allocation, start in live.values()]
    held = (block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated")
    found += [
        _block(block.get("requested_size", block["size"]), 0.0, None, None)
        for block in held
        if block.get("address") not in live
    ]
    return found


def _block(size: int, start: float, end: float | None, allocation: dict[str, Any] | None) -> Block:
    if allocation is None:
        return Block(EARLIER, size, 0.0, end)
    frame = next((frame for frame in allocation.get("frames") or () if _is_user_code(frame["filename"])), None)
    if frame is None:
        return Block("unlabelled", size, start, end)
    file = Path(frame["filename"]).name
    return Block(f"{file}: {frame['name']}", size, start, end, line=f"{file}:{frame['line']} in {frame['name']}")


def _is_user_code(filename: str) -> bool:
    """Return whether a frame is Python code outside torch."""
    return filename.endswith(".py") and "/torch/" not in filename.replace("\\", "/")


class _OnlyData(pickle.Unpickler):
    """Unpickles numbers, strings and containers only; a pickle that names a class or function is refused, never run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled(path: Path) -> dict[str, Any]:
    data = read_input(path)
    try:
        snapshot = _OnlyData(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{str(path)!r} is not a memory snapshot, or is cut off: {reason}") from None
    if not (isinstance(snapshot, dict) and {"segments", "device_traces"} <= snapshot.keys()):
        raise UserError(f"{str(path)!r} is not a memory snapshot: it has no segments and device_traces")
    return snapshot
