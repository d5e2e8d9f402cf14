"""`cs336 inspect` reads traces and memory snapshots from elsewhere; of a trace also its critical path and what-ifs."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.config import UserError, flag
from cs336_systems.experiments.kernels.kernel_time import KIND_NAMES, kernel_tables
from cs336_systems.experiments.training.fp8_shares import lost_table
from cs336_systems.files import all_kept
from cs336_systems.measure.readers.kernel_classes import GAP, HOST
from cs336_systems.record import GIB, MIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import kernel_ms, percent, shortened, signed
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, say
from cs336_systems.timeline import Timeline

if TYPE_CHECKING:
    from cs336_systems.measure.readers.trace import Trace
    from cs336_systems.measure.readers.trace_replay import OnPath, Replay
    from cs336_systems.measure.readers.unprofiled import Unprofiled
    from cs336_systems.measure.readers.what_if import Outcome, Scenario

FAR_OFF = 10.0
"""If the times of a step with and without the profiler differ by more than this factor, one of them is a mistake."""
LARGEST_SHOWN = 10
ON_PATH = Text("on the path", "在路径上")
PATH_NAMES = {**KIND_NAMES, HOST: Text("host", "主机"), GAP: Text("gaps between kernels", "内核间隙")}
AT_EQUAL_POWER = Text(
    "at equal power: first-order estimate for a GPU at its power limit; expect a time between the two predictions",
    "功率不变时：对达到功率上限的 GPU 的一阶估计；实际时间预计介于两个预测值之间",
)
FACTORS = Text(
    "without the profiler: the host takes {} times its recorded time; then all times are multiplied by {}",
    "不用 profiler：主机时间为记录值的 {} 倍；之后所有时间再乘以 {}",
)
WITH_PROFILER = Text(
    "times are those under the profiler, which is slower; --step_time TIME, measured without it, predicts without it",
    "以上为 profiler 下的时间，比实际慢；用 --step_time 给出不用 profiler 时测得的步时间，即可得到不用 profiler 的预测",
)
IDLE = Text(
    "at equal power: not estimated; no kernel runs for {} of the time, so the power limit hardly matters",
    "功率不变时：不作估计；有 {} 的时间没有内核在运行，功率上限几乎没有影响",
)


@dataclass(frozen=True)
class InspectArguments:
    files: tuple[str, ...] = flag(
        (),
        "traces of torch.profiler (.json, .json.gz) or nsys (.sqlite), snapshots, records of a run in FP8",
        positional=True,
        metavar="FILE",
    )
    critical_path: bool = flag(False, "of a trace: which kernels, gaps and host time make up the time of a step")
    what_if: tuple[str, ...] = flag(
        (),
        "of a trace: predict the step if kernels of a kind, phase, part or name (*) took FACTOR times as long, or TIME "
        "(ms, us, s) in a step, TIME/48 in 48 kernels; may be repeated",
        repeatable=True,
        metavar="NAME=FACTOR|TIME,...",
    )
    step_time: str | None = flag(
        None,
        "with --what_if: the time of the step without the profiler, such as 75ms; predictions are then without it too",
    )
    power_limited: bool = flag(
        False, "with --what_if: also the time at the power of the recorded step, for a GPU at its power limit"
    )
    format: str = flag("terminal", "table format", FORMATS)

    @property
    def asks_for_replay(self) -> bool:
        return self.critical_path or bool(self.what_if)


def inspected(path: Path, arguments: InspectArguments) -> list[Table]:
    """Return the tables of a file; for a snapshot also write a page beside it."""
    from cs336_systems.measure.readers.nsys import read_nsys
    from cs336_systems.measure.readers.snapshot import read_snapshot
    from cs336_systems.measure.readers.trace import read_chrome

    name = path.name.lower()
    readers = {(".sqlite", ".db"): read_nsys, (".json", ".json.gz"): read_chrome}
    for endings, read in readers.items():
        if name.endswith(endings):
            return (_replayed if arguments.asks_for_replay else _kernel_tables)(path, read(path), arguments)
    if name.endswith((".pickle", ".pkl")):
        if arguments.asks_for_replay:
            raise UserError(
                f"{str(path)!r} is a memory snapshot; --critical_path and --what_if need a trace of kernels"
            )
        return _memory_tables(path, read_snapshot(path))
    if name.endswith(".jsonl"):
        if arguments.asks_for_replay:
            raise UserError(
                f"{str(path)!r} is a file of records; --critical_path and --what_if need a trace of kernels, such as "
                "one of cs336 profile"
            )
        return [lost_table(path)]
    raise UserError(
        f"{str(path)!r}: traces end in .json, .json.gz or .sqlite, memory snapshots in .pickle, records of a training "
        "run in .jsonl"
    )


def _kernel_tables(path: Path, trace: "Trace", _: InspectArguments) -> list[Table]:
    from cs336_systems.measure.readers.trace import trace_metrics

    return kernel_tables([CellView.of("trace", {"size": path.name}, trace_metrics(trace.in_a_phase()))])


# -- replays ----------------------------------------------------------------------------------------------------------


def scenarios(arguments: InspectArguments) -> list["Scenario"]:
    """Return the scenarios that the flags describe; mistakes are found before a file is read."""
    from cs336_systems.measure.readers.what_if import parse_scenario

    for name, given in (("power_limited", arguments.power_limited), ("step_time", arguments.step_time)):
        if given and not arguments.what_if:
            raise UserError(f"--{name} belongs to --what_if; name a change, such as --what_if attention=0.8")
    _step_seconds(arguments)
    return [parse_scenario(text) for text in arguments.what_if]


def _step_seconds(arguments: InspectArguments) -> float | None:
    from cs336_systems.measure.readers.what_if import parse_time

    if arguments.step_time is None:
        return None
    if len(arguments.files) > 1:
        raise UserError(f"--step_time is that of one trace; {len(arguments.files)} files are named")
    seconds = parse_time(arguments.step_time)
    if seconds is None:
        raise UserError(f"--step_time {arguments.step_time!r} is not a time above 0 in s, ms or us, such as 75ms")
    return seconds


def _replayed(path: Path, trace: "Trace", arguments: InspectArguments) -> list[Table]:
    from cs336_systems.measure.readers.trace_graph import graph_of
    from cs336_systems.measure.readers.what_if import outcome

    if arguments.power_limited and not trace.on_gpu:
        raise UserError(f"{str(path)!r} is a trace without a GPU; --power_limited needs one with kernels of a GPU")
    with all_kept():
        graph = graph_of(trace)
        recorded = graph.replay()
        tables = _path_tables(path, recorded) if arguments.critical_path else []
        if asked := scenarios(arguments):
            factors = _unprofiled(recorded, arguments)
            outcomes = [outcome(graph, recorded, scenario, factors) for scenario in asked]
            tables.append(_what_if_table(path, recorded, outcomes, arguments, factors))
    return tables


def _unprofiled(recorded: "Replay", arguments: InspectArguments) -> "Unprofiled":
    """Return the factors from recorded times to times without the profiler that `--step_time` implies."""
    from cs336_systems.measure.readers.unprofiled import AS_RECORDED, unprofiled

    seconds, traced = _step_seconds(arguments), recorded.span / recorded.graph.steps
    if seconds is None:
        return AS_RECORDED
    if not seconds / FAR_OFF <= traced <= seconds * FAR_OFF:
        raise UserError(
            f"--step_time {arguments.step_time!r} is far from the {kernel_ms(traced)} ms of a step in the trace; give "
            "the time of the same step without the profiler"
        )
    return unprofiled(recorded.graph, recorded, seconds)


def _step_name(replay: "Replay") -> Text:
    """Return the name of what a replay predicts: one step, or a trace without steps."""
    return terms.STEP if replay.graph.has_steps else Text("trace", "整个 trace")


def _path_tables(path: Path, replay: "Replay") -> list[Table]:
    """Time on the critical path by kind, and the kernels that take most of it."""
    stretches = replay.critical_path()
    tables = [_kinds_on_path(path, replay, stretches), _kernels_on_path(path, replay, stretches)]
    return [table for table in tables if table.rows]


def _kinds_on_path(path: Path, replay: "Replay", stretches: list["OnPath"]) -> Table:
    graph, steps = replay.graph, replay.graph.steps
    on_path: dict[str, float] = defaultdict(float)
    in_all: dict[str, float] = defaultdict(float)
    for kind, seconds, _ in stretches:
        on_path[kind] += seconds
    for number in graph.measured_kernels:
        in_all[graph.nodes[number].kind] += graph.nodes[number].own
    rows: list[list[str | Text]] = []
    for kind in sorted({*on_path, *in_all}, key=lambda kind: (-on_path[kind], -in_all[kind])):
        of_all = kernel_ms(in_all[kind] / steps) if kind in KIND_NAMES else ""
        share = on_path[kind] / (replay.span or 1.0)
        rows.append([PATH_NAMES[kind], percent(share), kernel_ms(on_path[kind] / steps), of_all])
    time = kernel_ms(replay.span / steps)
    title = say("critical path: {}, {} of {} ms", "关键路径：{}，{} {} ms", path.name, _step_name(replay), time)
    columns = [word(terms.KIND), Column(terms.SHARE), Column(ON_PATH, "ms")]
    return Table(title, [*columns, Column(Text("all kernels", "全部内核"), "ms")], rows)


def _kernels_on_path(path: Path, replay: "Replay", stretches: list["OnPath"]) -> Table:
    nodes, steps = replay.graph.nodes, replay.graph.steps
    seconds_of: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kind, seconds, number in stretches:
        if number is not None and nodes[number].kernel is not None:
            seconds_of[kind, nodes[number].name].append(seconds)
    rows: list[list[str | Text]] = []
    for (kind, name), found in sorted(seconds_of.items(), key=lambda item: -sum(item[1]))[:LARGEST_SHOWN]:
        total, instances = sum(found), f"{len(found) / steps:g}"
        times = [percent(total / (replay.span or 1.0)), kernel_ms(total / steps), instances]
        rows.append([*times, PATH_NAMES[kind], shortened(name)])
    title = say("critical path: longest kernels of {}", "关键路径：{} 中耗时最长的内核", path.name)
    columns = [Column(terms.SHARE), Column(ON_PATH, "ms"), Column(Text("instances", "次数"))]
    return Table(title, [*columns, word(terms.KIND), word(terms.NAME)], rows)


def _what_if_table(
    path: Path, recorded: "Replay", outcomes: list["Outcome"], arguments: InspectArguments, factors: "Unprofiled"
) -> Table:
    """Return a row for the recorded step, one for the step without the profiler if its time is given, and the
    scenarios."""
    before = recorded.span / recorded.graph.steps
    rows: list[list[str | Text]] = [[terms.RECORDED, "", "", kernel_ms(before), "", "", ""]]
    if seconds := _step_seconds(arguments):
        before = seconds
        rows.append([Text("without the profiler", "不用 profiler"), "", "", kernel_ms(before), "", "", ""])
    for found in outcomes:
        change = found.step - before
        relative = signed(change / before, 2) if before else ""
        kernels = [kernel_ms(found.selected), kernel_ms(found.changed)]
        times = [kernel_ms(found.step), f"{change * 1e3:+,.3f}", relative]
        at_limit = kernel_ms(found.at_limit) if found.may_be_limited else ""
        rows.append([found.scenario.text, *kernels, *times, at_limit])
    columns = [
        word(Text("scenario", "假设")),
        Column(Text("its kernels", "相关内核"), "ms"),
        Column(Text("become", "变为"), "ms"),
        Column(_step_name(recorded), "ms"),
        Column(Text("change", "变化"), "ms"),
        Column(Text("relative", "相对变化")),
        Column(Text("at equal power", "功率不变时"), "ms"),
    ]
    title = say("what if: {}", "假设分析：{}", path.name)
    notes = [say(FACTORS.en, FACTORS.zh, *(f"{factor:.3f}" for factor in factors))] if seconds else [WITH_PROFILER]
    if not arguments.power_limited:
        return Table(title, columns[:-1], [row[:-1] for row in rows], notes)
    if any(found.may_be_limited for found in outcomes):
        notes.append(AT_EQUAL_POWER)
    if waiting := [found.idle for found in outcomes if not found.may_be_limited]:
        notes.append(say(IDLE.en, IDLE.zh, percent(max(waiting), 0)))
    return Table(title, columns, rows, notes)


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory_tables(path: Path, timeline: Timeline) -> list[Table]:
    from cs336_systems.report.web.timeline_page import write_page

    page = path.with_suffix(".html")
    try:
        write_page(timeline, page)
        written = say("open in a browser: {}", "用浏览器打开：{}", str(page))
    except OSError as error:
        reason = f"{str(page)!r}: {error.strerror}"
        written = say("no page: cannot write {}", "没有页面：无法写入 {}", reason)
    moment, peak = timeline.peak()
    at_peak = Text("at the peak", "峰值处")
    parts = [[label, f"{size / GIB:.3f}", f"{size / peak:.1%}"] for label, size in timeline.parts_at(moment).items()]
    columns = [word(Text("made by", "产生者")), Column(at_peak, "GiB"), Column(terms.SHARE)]
    largest = sorted(timeline.blocks, key=lambda block: -block.size)[:LARGEST_SHOWN]
    blocks = [[f"{block.size / MIB:,.1f}", block.line or block.label] for block in largest]
    title = say("snapshot: {}, peak {} GiB", "快照：{}，峰值 {} GiB", path.name, f"{peak / GIB:.3f}")
    largest_title = Text("snapshot: the largest blocks", "快照：最大的块")
    return [
        Table(title, columns, parts, [written]),
        Table(largest_title, [Column(terms.BYTES, "MiB"), word(terms.LINE)], blocks),
    ]
