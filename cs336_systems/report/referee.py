"""Checks numbers before they are shown. A pure function of cells; what is off becomes one line under the table."""

from collections.abc import Callable, Iterable

from cs336_systems.record import CELL_TIME, cell_key, steady_from
from cs336_systems.report.cells import CellView

COLD_RATIO = 1.5
NOISY = 0.05
CLOCK_TOLERANCE = 1.02
"""Events and the host's clock differ by microseconds of launch; only more than this is odd."""

Check = Callable[[CellView], str | None]


def remarks(cells: Iterable[CellView], name: Callable[[CellView], str] = lambda cell: cell.name) -> list[str]:
    """One line for each thing that is off, with the cells it concerns; `name` is what a cell is called in its table."""
    cells = list(cells)
    found: dict[str, list[str]] = {}
    for cell in cells:
        for check in _CHECKS:
            if text := check(cell):
                found.setdefault(text, []).append(name(cell) or cell.experiment)
    lines = [f"{_some(names, len(cells))}: {text}" for text, names in found.items()]
    return lines + _backward_for_free(cells) + _several_machines(cells)


def _some(names: list[str], total: int) -> str:
    names = list(dict.fromkeys(names))
    if len(names) == total > 1:
        return "all rows"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _failed(cell: CellView) -> str | None:
    if cell.ok:
        return None
    return cell.status if CELL_TIME in cell.metrics else "interrupted before it ended; run the same command again"


def _above_peak(cell: CellView) -> str | None:
    if cell.mfu is None or cell.mfu <= 1:
        return None
    return f"{cell.mfu:.0%} of the hardware's peak: impossible, so the precision or the clock is not what it says"


def _tf32_in_fp32(cell: CellView) -> str | None:
    if cell.get("precision") == "fp32" and cell.get("device") != "cpu" and cell.environment.tf32:
        return "TF32 was on in an fp32 row"
    return None


def _tf32_on_cpu(cell: CellView) -> str | None:
    if cell.get("precision") == "tf32" and cell.get("device") == "cpu":
        return "a CPU has no TF32: this is fp32 again"
    return None


def _cold(cell: CellView) -> str | None:
    steps = cell.metrics["step_time"].numbers if "step_time" in cell.metrics else []
    if len(steps) < 3 or steps[0] < COLD_RATIO * sorted(steps)[len(steps) // 2]:
        return None
    warmup = cell.get("warmup_steps")
    advice = "add --warmup_steps 5" if warmup == 0 else f"{warmup} warm-up steps were too few"
    return f"the first measured step is far above the rest (cold): {advice}"


def _noisy(cell: CellView) -> str | None:
    step = cell.statistics("step_time")
    if step is None or step.n < 3 or step.variation <= NOISY or _cold(cell):
        return None
    if steady_from(cell.metrics["step_time"].numbers) is None:
        return f"step times vary by more than {NOISY:.0%} and never settle: look for other load on the machine"
    return f"step times vary by more than {NOISY:.0%} (std / mean): compare medians, or take more steps"


def _throttled(cell: CellView) -> str | None:
    reasons = cell.environment.throttle_reasons
    return f"the GPU held its clocks down ({', '.join(reasons)})" if reasons else None


def _company(cell: CellView) -> str | None:
    return "another process was using the GPU" if cell.environment.other_gpu_processes else None


def _clocks_disagree(cell: CellView) -> str | None:
    wall, events = cell.value("step_time"), cell.value("step_event_time")
    if wall and events and events > CLOCK_TOLERANCE * wall:
        return "the GPU's own time exceeds the wall clock's: the timing did not wait for the GPU"
    return None


def _two_graphs(cell: CellView) -> str | None:
    if cell.get("mode") == "forward" and cell.memory_error is not None and cell.memory_error < -0.3:
        return "far more memory than one graph needs: were two alive?"
    return None


_CHECKS: tuple[Check, ...] = (
    _failed,
    _above_peak,
    _tf32_in_fp32,
    _tf32_on_cpu,
    _cold,
    _noisy,
    _throttled,
    _company,
    _clocks_disagree,
    _two_graphs,
)


def _backward_for_free(cells: list[CellView]) -> list[str]:
    """Forward alone cannot take longer than forward and backward together."""
    by_work: dict[tuple, dict[str, float]] = {}
    for cell in cells:
        median = cell.statistics("step_time")
        if median is not None:
            others = cell_key({name: value for name, value in cell.config.items() if name != "mode"})
            work = (cell.machine, others, cell.get("size"), cell.get("context_length"), cell.get("precision"))
            by_work.setdefault(work, {})[str(cell.get("mode"))] = median.median
    return [
        f"{work[2]} {work[3]} {work[4]}: forward alone is slower than forward and backward together"
        for work, modes in by_work.items()
        if modes.get("forward", 0) > modes.get("forward-backward", float("inf"))
    ]


def _several_machines(cells: list[CellView]) -> list[str]:
    machines = sorted({cell.machine for cell in cells})
    return [f"results of {len(machines)} machines in one table: {', '.join(machines)}"] if len(machines) > 1 else []
