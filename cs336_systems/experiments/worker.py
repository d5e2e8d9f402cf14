"""The process that measures cells. Started by runner.py as `python -m cs336_systems.experiments.worker`.

One JSON line in on standard input for each cell, one JSON line out on what was standard output. After any failure the
runner replaces the process, so that no cell inherits another's broken state.
"""

import dataclasses
import gc
import importlib
import json
import os
import sys
import threading
import timeit
import traceback
from queue import SimpleQueue
from typing import Any

from cs336_systems.config import UserError


def main() -> None:
    # The protocol keeps the real standard output to itself; whatever a model or a library prints goes to the log.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    _send(channel, _machine())
    modules = 0
    while True:
        _send(channel, _answer(requests.get()))
        _clean_up()
        if len(sys.modules) > modules:
            # Objects of imported modules stay. Searching them for garbage again takes 0.2 s, as long as a cell.
            gc.freeze()
            modules = len(sys.modules)


def _listen(requests: SimpleQueue) -> None:
    """Pass requests on; when the runner is gone, even by SIGKILL, the pipe ends and so does this process, mid-cell."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _send(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")


def _machine() -> dict[str, Any]:
    import torch

    from cs336_systems.measure.environment import capture

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"event": "ready", "device": device, "environment": dataclasses.asdict(capture())}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from cs336_systems.measure.environment import capture
    from cs336_systems.predict.memory_planner import NotEnoughMemoryError

    module, function = request["measure"].split(":")
    start = timeit.default_timer()
    try:
        measure = getattr(importlib.import_module(module), function)
        metrics = measure(request["config"], **request["options"])
    except UserError as error:
        if isinstance(error, NotEnoughMemoryError) and request["config"].get("memory_budget") == "auto":
            return {"event": "failure", "status": "oom"}
        return {"event": "user_error", "message": error.marked}
    except (torch.OutOfMemoryError, MemoryError):
        return {"event": "failure", "status": "oom"}
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        return {"event": "failure", "status": f"error: {type(error).__name__}: {reason}"}
    return {
        "event": "measured",
        "metrics": metrics,
        "environment": dataclasses.asdict(capture(request["config"].get("device"))),
        "seconds": timeit.default_timer() - start,
    }


def _clean_up() -> None:
    """Leave nothing of this cell to the next: no tensors, no cached blocks, no cuBLAS workspaces."""
    from cs336_systems.measure.timing import release_memory

    gc.collect()
    release_memory()


if __name__ == "__main__":
    main()
