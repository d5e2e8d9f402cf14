"""A snapshot of CUDA's allocator, as torch.cuda.memory._dump_snapshot writes it, read as a timeline. No torch here.

Whoever recorded it, on whatever machine. It knows no tensors, only the stack of each allocation: blocks are labelled by
the function that made them.
"""

import io
import pickle
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError
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
    """Those that the history shows, and those that were there before it began."""
    first = min((event["time_us"] for event in events if "time_us" in event), default=0)
    found: list[Block] = []
    alive: dict[int, tuple[dict[str, Any], float]] = {}
    for event in events:
        now = (event.get("time_us", first) - first) / 1e6
        if event["action"] == "alloc":
            alive[event["addr"]] = event, now
        elif event["action"] == "free_completed":
            made, start = alive.pop(event["addr"], (None, 0.0))
            found.append(_block(event["size"], start, now, made))
    found += [_block(made["size"], start, None, made) for made, start in alive.values()]
    held = (block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated")
    found += [
        _block(block.get("requested_size", block["size"]), 0.0, None, None)
        for block in held
        if block.get("address") not in alive
    ]
    return found


def _block(size: int, start: float, end: float | None, made: dict[str, Any] | None) -> Block:
    if made is None:
        return Block(EARLIER, size, 0.0, end)
    frame = next((frame for frame in made.get("frames") or () if _is_of_the_user(frame["filename"])), None)
    if frame is None:
        return Block("unlabelled", size, start, end)
    file = Path(frame["filename"]).name
    return Block(f"{file}: {frame['name']}", size, start, end, line=f"{file}:{frame['line']} in {frame['name']}")


def _is_of_the_user(filename: str) -> bool:
    """Neither torch's nor C++."""
    return filename.endswith(".py") and "/torch/" not in filename.replace("\\", "/")


class _OnlyData(pickle.Unpickler):
    """A snapshot is made of numbers, words and lists. What names a class or function is something else, and is not
    given the chance to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        snapshot = _OnlyData(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except Exception as error:  # pickle raises whatever the bytes lead it to
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{str(path)!r} is not a memory snapshot, or is cut off: {reason}") from None
    if not (isinstance(snapshot, dict) and {"segments", "device_traces"} <= snapshot.keys()):
        raise UserError(f"{str(path)!r} is not a memory snapshot: it has no segments and device_traces")
    return snapshot
