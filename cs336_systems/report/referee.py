"""Checks numbers before they are shown: a pure function of cells; each doubt becomes a remark under the table."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cs336_systems.record import CELL_TIME, Record, cell_key, steady_from
from cs336_systems.report.cells import CellView
from cs336_systems.text import Text, listed, say

COLD_RATIO = 1.5
NOISY = 0.05
UNRELIABLE = 0.2
"""Coefficient of variation of step times above which conclusions from them carry a warning."""
CLOCK_TOLERANCE = 1.02
"""CUDA events and the host's clock differ by microseconds of launch time; a larger factor than this is odd."""
FAR = 2
"""A step is odd if its time deviates from its prediction by more than this multiple of the expected interval."""
NAMED_ROWS = 3


class Kind(Enum):
    """The kinds of remarks, each with its sentence in English and Chinese."""

    FAILED = ("{}", "{}")
    INTERRUPTED = ("interrupted before it ended; run the same command again", "结束前被中断；请再次运行同一条命令")
    ABOVE_PEAK = (
        "{} of the hardware's peak: impossible, so the precision or the clock is not what it says",
        "达到硬件峰值的 {}：不可能，精度或时钟与所说不符",
    )
    TF32_IN_FP32 = ("TF32 was on in an fp32 row", "fp32 行里开着 TF32")
    TF32_ON_CPU = ("a CPU has no TF32: this is fp32 again", "CPU 没有 TF32：这仍是 fp32")
    COLD = (
        "the first measured step is far above the rest (cold): add --warmup_steps 5",
        "第一个测量步远高于其余（冷启动）：加上 --warmup_steps 5",
    )
    COLD_AFTER_WARMUP = (
        "the first measured step is far above the rest (cold): {} warm-up steps were too few",
        "第一个测量步远高于其余（冷启动）：{} 步预热太少",
    )
    UNSTEADY = (
        "step times vary by more than {} and never settle: look for other load on the machine",
        "单步时间变动超过 {}，一直不稳定：检查机器上的其他负载",
    )
    NOISY = (
        "step times vary by more than {} (std / mean): compare medians, or take more steps",
        "单步时间变动超过 {}（标准差 / 均值）：比较中位数，或多测几步",
    )
    THROTTLED = ("the GPU held its clocks down ({})", "GPU 降频（{}）")
    OTHER_PROCESSES = ("another process was using the GPU", "GPU 上有别的进程")
    CLOCKS_DISAGREE = (
        "the GPU's own time exceeds the wall clock's: the timing did not wait for the GPU",
        "GPU 自己的时间超过墙钟：计时没有等待 GPU",
    )
    TWO_GRAPHS = (
        "far more memory than one graph needs: were two alive?",
        "显存远多于一个计算图所需：是否有两个同时存在？",
    )
    SLOWER_THAN_PREDICTED = (
        "{} ms measured, {} ms predicted: look for a throttled or shared GPU, or other versions than those of the "
        "prediction",
        "实测 {} ms，预测 {} ms：检查 GPU 是否降频或被共用，或版本与预测所依据的不同",
    )
    FASTER_THAN_PREDICTED = (
        "{} ms measured, {} ms predicted: faster versions than those of the prediction, or a step that does less",
        "实测 {} ms，预测 {} ms：版本比预测所依据的更快，或该步少做了工作",
    )
    FORWARD_SLOWER = (
        "forward alone is slower than forward and backward together",
        "单独的前向比前向加反向还慢",
    )
    SEVERAL_MACHINES = ("results of {} machines in one table: {}", "一张表中有 {} 台机器的结果：{}")


ON_SPREAD = frozenset({Kind.NOISY, Kind.UNSTEADY})
"""Remarks on the spread of step times; they do not belong under a table whose subject is not time."""


@dataclass(frozen=True)
class Remark:
    kind: Kind
    arguments: tuple[str | Text, ...] = ()
    rows: tuple[Text, ...] = ()
    """Names of the rows it concerns; empty for a remark on the table."""
    on_all_rows: bool = False

    @property
    def text(self) -> Text:
        said = say(*self.kind.value, *self.arguments)
        if not self.rows:
            return said
        rows = listed(self.rows[:NAMED_ROWS], (", ", "，"))
        if self.on_all_rows:
            rows = Text("all rows", "所有行")
        elif len(self.rows) > NAMED_ROWS:
            rows = say("{} and {} more", "{} 及另外 {} 行", rows, str(len(self.rows) - NAMED_ROWS))
        return say("{}: {}", "{}：{}", rows, said)


Check = Callable[[CellView], Remark | None]


def remarks(cells: Iterable[CellView], name: Callable[[CellView], Text] = lambda cell: Text(cell.name)) -> list[Remark]:
    """Return one remark for each doubt, with the rows it concerns; `name` gives the name of a cell's row in its
    table."""
    cells = list(cells)
    found: dict[Remark, list[Text]] = {}
    for cell in cells:
        for check in _CHECKS:
            if remark := check(cell):
                row = name(cell)
                found.setdefault(remark, []).append(row if row.en else Text(cell.experiment))
    on_rows = []
    for remark, names in found.items():
        rows = tuple(dict.fromkeys(names))
        on_rows.append(replace(remark, rows=rows, on_all_rows=len(rows) == len(cells) > 1))
    return on_rows + _forward_slower_than_both(cells) + _several_machines(cells)


def _failed(cell: CellView) -> Remark | None:
    if cell.ok:
        return None
    return Remark(Kind.FAILED, (status_text(cell.status),)) if CELL_TIME in cell.metrics else Remark(Kind.INTERRUPTED)


def status_text(status: str) -> Text:
    """Return the status of a failed cell in both languages; details from a library are not translated."""
    kind, _, detail = status.partition(": ")
    if kind == "oom":
        if found := re.fullmatch(r"needs (?:at least )?(\S+) GiB of (\S+) GiB( \(predicted, not tried\))?", detail):
            needed = f"需要{'至少' if 'at least' in detail else ''} {found[1]} GiB，共有 {found[2]} GiB"
            return Text(status, f"显存不足：{needed}{'（预测，未尝试）' if found[3] else ''}")
        return Text(status, "显存不足" if detail in ("", "out of memory") else f"显存不足：{detail}")
    if found := re.fullmatch(r"timeout after (\S+) s", detail):
        return Text(status, f"超时：超过 {found[1]} s")
    if found := re.fullmatch(r"\w+: wrong result: (\w+) off by (\S+), more than (\S+) in (\w+)", detail):
        return Text(status, f"结果错误：{found[1]} 偏差 {found[2]}，超过 {found[3]}（{found[4]}）")
    return Text(status, f"出错：{detail}" if kind == "error" and detail else "")


def _cold(cell: CellView) -> Remark | None:
    steps = cell.metrics["step_time"].numbers if "step_time" in cell.metrics else []
    if cell.experiment == "train":  # every first step of a run is cold
        return None
    if len(steps) < 3 or steps[0] < COLD_RATIO * sorted(steps)[len(steps) // 2]:
        return None
    warmup = cell.get("warmup_steps")
    return Remark(Kind.COLD) if warmup == 0 else Remark(Kind.COLD_AFTER_WARMUP, (str(warmup),))


def _noisy(cell: CellView) -> Remark | None:
    step = cell.statistics("step_time")
    if step is None or step.n < 3 or step.variation <= NOISY or _cold(cell):
        return None
    settles = steady_from(cell.metrics["step_time"].numbers) is not None
    return Remark(Kind.NOISY if settles else Kind.UNSTEADY, (f"{NOISY:.0%}",))


def doubt(cells: Iterable[CellView]) -> Text | None:
    """Return a warning for the conclusions from these cells, if the steps of half of them vary too much to compare."""
    found = (cell.statistics("step_time") for cell in cells if cell.ok and not _cold(cell))
    spreads = [step.variation for step in found if step is not None and step.n >= 3]
    spread = statistics.median(spreads) if spreads else 0.0
    if not spread > UNRELIABLE:
        return None
    return say(
        "unreliable: single steps vary by {} of their mean, so measure again without other load on the machine",
        "不可靠：单步时间的波动达均值的 {}，请在机器空闲时重新测量",
        f"{spread:.0%}",
    )


GROUPS = 8
"""Unreliable cells are shifted one by one, or in this many groups if there are more."""


def doubts(
    stated: Sequence[object],
    conclude: Callable[[Sequence[CellView]], Sequence[object]],
    cells: Sequence[CellView],
    name: Callable[[CellView], Text] = lambda cell: Text(cell.name),
) -> list[Text | None]:
    """Return for each of the conclusions `stated` from these cells a warning, or None if it does not depend on
    unreliable step times.

    A conclusion depends on them if it changes when the times of an unreliable cell are longer or shorter by their own
    spread. `conclude` makes the conclusions again and must not raise.
    """
    wild = [cell for cell in cells if cell.ok and not _cold(cell) and _spread(cell) > UNRELIABLE]
    groups = [wild[first::GROUPS] for first in range(min(len(wild), GROUPS))]
    concerned: list[list[CellView]] = [[] for _ in stated]
    for group in groups:
        for place in _changed(conclude, cells, group, stated):
            concerned[place] += group
    return [_unreliable(own, name) if own else None for own in concerned]


def _changed(
    conclude: Callable[[Sequence[CellView]], Sequence[object]],
    cells: Sequence[CellView],
    group: Sequence[CellView],
    stated: Sequence[object],
) -> set[int]:
    """Return the places of the conclusions that change with the times of the cells of `group`."""
    found: set[int] = set()
    for is_longer in (True, False):
        shifted = {}
        for number, cell in enumerate(group):
            factor = 1 + _spread(cell)
            shifted[id(cell)] = _shifted(cell, factor if is_longer == (number % 2 == 0) else 1 / factor)
        now = conclude([shifted.get(id(cell), cell) for cell in cells])
        found |= {place for place, one in enumerate(stated) if place >= len(now) or now[place] != one}
    return found


def _spread(cell: CellView) -> float:
    """Return the largest coefficient of variation of a cell's step times, and of those of its variants."""
    found = (view.statistics("step_time") for view in (cell, *map(cell.variant, cell.variants)))
    return max((step.variation for step in found if step is not None and step.n >= 3), default=0.0)


def _shifted(cell: CellView, factor: float) -> CellView:
    """Return the cell with all measured times multiplied by a factor."""

    def shifted(metrics: Mapping[str, Record]) -> dict[str, Record]:
        return {
            metric: replace(own, samples=tuple(factor * sample for sample in own.numbers))
            if own.unit == "s" and metric != CELL_TIME and not metric.startswith("predicted")
            else own
            for metric, own in metrics.items()
        }

    variants = {name: shifted(metrics) for name, metrics in cell.variants.items()}
    return replace(cell, metrics=shifted(cell.metrics), variants=variants)


def _unreliable(cells: Sequence[CellView], name: Callable[[CellView], Text]) -> Text:
    """Return the warning for a conclusion from these cells."""
    rows = list(dict.fromkeys(map(name, cells)))
    where = listed(rows[:NAMED_ROWS], ("; ", "；"))
    if len(rows) > NAMED_ROWS:
        where = say("{} and {} more", "{} 及另外 {} 个", where, str(len(rows) - NAMED_ROWS))
    return say(
        "unreliable: single steps vary by {} of their mean{}, so measure again without other load on the machine",
        "不可靠：单步时间的波动达均值的 {}{}，请在机器空闲时重新测量",
        *(f"{max(map(_spread, cells)):.0%}", say(" ({})", "（{}）", where) if where.en else Text("")),
    )


_THROTTLE_REASONS = {
    "power cap": "功率上限",
    "hardware slowdown": "硬件降速",
    "thermal": "温度",
    "thermal (software)": "温度（软件）",
    "thermal (hardware)": "温度（硬件）",
    "power brake": "外部限电",
}


def _throttled(cell: CellView) -> Remark | None:
    reasons = [Text(reason, _THROTTLE_REASONS.get(reason, "")) for reason in cell.environment.throttle_reasons]
    return Remark(Kind.THROTTLED, (listed(reasons),)) if reasons else None


def _above_peak(cell: CellView) -> Remark | None:
    return Remark(Kind.ABOVE_PEAK, (f"{cell.mfu:.0%}",)) if cell.mfu is not None and cell.mfu > 1 else None


def _far_from_prediction(cell: CellView) -> Remark | None:
    measured, predicted, about = cell.median("step_time"), cell.predicted_time, cell.prediction
    if not (cell.ok and measured and predicted and about):
        return None
    distance = measured / predicted - 1
    if abs(distance) <= FAR * about.time.spread:
        return None
    kind = Kind.SLOWER_THAN_PREDICTED if distance > 0 else Kind.FASTER_THAN_PREDICTED
    return Remark(kind, tuple(f"{1e3 * seconds:,.{2 if seconds < 1 else 1}f}" for seconds in (measured, predicted)))


def _if(condition: Callable[[CellView], bool], kind: Kind) -> Check:
    return lambda cell: Remark(kind) if condition(cell) else None


def _tf32_in_fp32(cell: CellView) -> bool:
    return cell.get("precision") == "fp32" and cell.get("device") != "cpu" and bool(cell.environment.tf32)


def _clocks_disagree(cell: CellView) -> bool:
    wall, events = cell.value("step_time"), cell.value("step_event_time")
    return bool(wall and events and events > CLOCK_TOLERANCE * wall)


_CHECKS: tuple[Check, ...] = (
    _failed,
    _above_peak,
    _if(_tf32_in_fp32, Kind.TF32_IN_FP32),
    _if(lambda cell: cell.get("precision") == "tf32" and cell.get("device") == "cpu", Kind.TF32_ON_CPU),
    _cold,
    _noisy,
    _throttled,
    _far_from_prediction,
    _if(lambda cell: bool(cell.environment.other_gpu_processes), Kind.OTHER_PROCESSES),
    _if(_clocks_disagree, Kind.CLOCKS_DISAGREE),
    _if(lambda cell: cell.get("mode") == "forward" and (cell.memory_error or 0.0) < -0.3, Kind.TWO_GRAPHS),
)


def _forward_slower_than_both(cells: list[CellView]) -> list[Remark]:
    """Check that forward alone does not take longer than forward and backward together."""
    by_work: dict[tuple, dict[str, float]] = {}
    for cell in cells:
        median = cell.median("step_time")
        if median is not None:
            others = cell_key({name: value for name, value in cell.config.items() if name != "mode"})
            name = f"{cell.get('size')} {cell.get('context_length')} {cell.get('precision')}"
            by_work.setdefault((cell.machine, others, name), {})[str(cell.get("mode"))] = median
    return [
        Remark(Kind.FORWARD_SLOWER, rows=(Text(name),))
        for (*_, name), modes in by_work.items()
        if modes.get("forward", 0) > modes.get("forward-backward", float("inf"))
    ]


def _several_machines(cells: list[CellView]) -> list[Remark]:
    machines = sorted({cell.machine for cell in cells})
    return [Remark(Kind.SEVERAL_MACHINES, (str(len(machines)), ", ".join(machines)))] if len(machines) > 1 else []
