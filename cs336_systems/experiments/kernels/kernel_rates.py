"""`cs336 calibrate`: a GPU's profile, from kernels timed one by one. Predictions of a step's time use it."""

import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_systems import record
from cs336_systems.config import UserError
from cs336_systems.experiments.runner import Runner, gather
from cs336_systems.experiments.spec import Experiment, Instrument
from cs336_systems.predict.time.calibration_plan import PROFILE, calibration_cells, measured_kernels, profile_from
from cs336_systems.predict.time.gpu_profile import GpuProfile, keep_profile
from cs336_systems.predict.time.kernel_seconds import kernel_seconds, rates_name
from cs336_systems.predict.time.step_kernels import FORWARD, AttentionPass, Matmul
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import percent, remarks_on
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, counted, say

KERNEL = Text("kernel", "内核")
LARGE = 8192
"""Rows, columns and depth of the matmul whose rate is shown."""
SHORTEST = 1e-7
"""Shorter times in seconds cannot be told from the gap before a kernel."""


def calibrate(path: Path, *, force: bool = False) -> Table:
    """Measure all cells that the file does not have yet, fit the profile, keep it for this machine and describe it."""
    with Runner(path, force=force) as runner:
        if runner.device == "cpu":
            raise UserError("calibrate needs a CUDA GPU: there is nothing to time on this machine")
        requests = [(KERNEL_RATES.name, config) for config in calibration_cells(runner.device)]
        outcome = runner.run(gather(requests))
    records = [item for item in record.latest(record.load(path).records) if item.experiment == KERNEL_RATES.name]
    profile = profile_from(records)
    record.append(path, profile_records(profile, records[-1]))
    kept = keep_profile(profile)
    print(f"{counted(outcome.done, 'cell')} measured in {outcome.seconds:.0f} s; profile in {kept}", file=sys.stderr)
    return _table(profile, records)


def profile_records(profile: GpuProfile, like: record.Record) -> list[record.Record]:
    """Return the profile as a cell of its own, so that a report need not fit it again."""
    config = {"device": like.config["device"], "part": PROFILE, "number": 0}
    text = json.dumps(profile.to_dict())
    found = record.Record(KERNEL_RATES.name, config, PROFILE, "", (text,), environment=like.environment)
    return [found, dataclasses.replace(found, metric=record.CELL_TIME, unit="s", samples=(0.0,))]


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{config['part']} {config.get('head_dim', config['number'] + 1)}"


def _tables(cells: Cells) -> list[Table]:
    """Return the rates of the profile, if the calibration is complete."""
    if (profile := _profile(cells)) is None:
        return []
    return [_table(profile, [item for cell in cells for item in cell.records], remarks_on(cells))]


def _profile(cells: Cells) -> GpuProfile | None:
    for cell in cells:
        if PROFILE in cell.metrics and cell.ok:
            return GpuProfile.of(json.loads(str(cell.metrics[PROFILE].samples[0])))
    return None


def _table(profile: GpuProfile, records: Sequence[record.Record], remarks: Sequence[Text] = ()) -> Table:
    columns = [word(KERNEL), Column(Text("timed", "计时数")), word(Text("rate", "速率"))]
    columns += [Column(Text("mean error", "平均误差")), Column(Text("largest error", "最大误差"))]
    errors = _errors_by_name(profile, records)
    rows = [
        [_shown(name), str(len(own)), rate, percent(statistics.mean(own)), percent(max(own))]
        for name, rate in _rates(profile)
        if (own := errors.get(name))
    ]
    notes = [
        Text(
            "at the highest clock; errors: of the profile's rates against each kernel",
            "在最高频率下；误差：按速率模型算出的时间相对各内核实测",
        ),
        say(
            "launches: {} us for a small kernel, {} us between two of a CUDA graph, {} us of the host without one",
            "启动：小内核 {} us，CUDA graph 中两个内核之间 {} us，不用 graph 时主机 {} us",
            *(f"{seconds * 1e6:.2f}" for seconds in (profile.small, profile.gap, profile.launch)),
        ),
        *_power_notes(profile),
        *remarks,
    ]
    title = say("kernel_rates: rates of kernels · {}", "kernel_rates：内核速率 · {}", profile.gpu)
    return Table(title, columns, rows, notes)


def _rates(profile: GpuProfile) -> Iterator[tuple[str, str]]:
    """Return the names of kernels and their rates, matmuls first."""
    square = Matmul("matmul", LARGE, LARGE, LARGE, FORWARD)
    yield "matmul", f"{square.flops / kernel_seconds(square, profile) / 1e12:.0f} TFLOP/s ({LARGE}^3)"
    for name, attention in sorted(profile.attention.items()):
        yield name, f"{attention.tile * 1e6:.2f} us / 128 x 128"
    for name, rates in profile.passes.items():
        yield name, f"{rates.bandwidth / 1e12:.2f} TB/s + {rates.fixed * 1e6:.1f} us"


def _shown(name: str) -> str:
    """Return the name of a kernel in tables."""
    if name.startswith(("forward ", "backward ")):
        return f"attention {name}"
    return name.replace("_", " ")


def _power_notes(profile: GpuProfile) -> list[Text]:
    if profile.power is None:
        return [Text("power could not be read: clocks are taken as the highest", "无法读取功耗：按最高频率计算")]
    return [
        say(
            "power limit {} W: matmuls take {} pJ a FLOP, attention {}, memory {} a byte",
            "功耗上限 {} W：矩阵乘每 FLOP {} pJ，注意力 {}，显存每字节 {}",
            f"{profile.power.limit:.0f}",
            *(f"{joules * 1e12:.2f}" for joules in (*profile.power.per_flop.values(), profile.power.per_byte)),
        )
    ]


def _errors_by_name(profile: GpuProfile, records: Sequence[record.Record]) -> dict[str, list[float]]:
    """Return the relative error of the profile's rates for each kernel that was timed."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel, seconds in measured_kernels(records):
        name = rates_name(kernel) if isinstance(kernel, AttentionPass) else kernel.name
        found[name].append(abs(kernel_seconds(kernel, profile) / max(seconds - profile.gap, SHORTEST) - 1))
    return found


def _errors(cells: Cells) -> Text | None:
    profile = _profile(cells)
    if profile is None:
        return None
    found = _errors_by_name(profile, [item for cell in cells for item in cell.records]).get("matmul")
    if not found:
        return None
    return say(
        "the rates are off by {} for a matmul, at the median of {}",
        "速率模型对单个矩阵乘的误差中位数为 {}，共 {} 个",
        percent(statistics.median(found), 1),
        str(len(found)),
    )


KERNEL_RATES = Experiment(
    name="kernel_rates",
    title=Text("Rates of kernels", "内核速率"),
    question=Text(
        "How fast is each kernel of a training step on this GPU, by itself?",
        "训练步的每个内核在本 GPU 上单独运行有多快？",
    ),
    instrument=Instrument(
        "kernel_rates",
        "cs336_systems.experiments.kernels.measure_calibration:measure_calibration",
        label=_label,
    ),
    runnable=False,
    tables=_tables,
    findings=(_errors,),
    group="speed",
    identity=("part", "number", "plan"),
    order=70,
)
"""The experiment of `cs336 calibrate`."""
