"""Every attention implementation on a grid of shapes: naive attention by itself, and all of them side by side."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    MODULE,
    OURS,
    Size,
    Times,
    attention_config,
    by_head_dim,
    by_shape,
    compilation_notes,
    label_shape,
    naive_memory,
    rates_by_length,
    roofline,
    side_by_side,
    time_by_length,
)
from cs336_systems.experiments.spec import PRESETS, Config, Experiment, Instrument
from cs336_systems.report import entries
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight
from cs336_systems.report.names import attention_name
from cs336_systems.report.phrases import (
    compared,
    having,
    median_of,
    pairs_of,
    speed_up,
    times_text,
    together,
    value_of,
)
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, kernel_ms, row_words, varying
from cs336_systems.report.terms import BACKWARD, FORWARD, PEAK, PREDICTED
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

# -- pytorch_attention: naive attention, eager and compiled -----------------------------------------------------------


PASSES = ("forward_time", "backward_time")


def naive_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield the cells of naive attention."""
    batch = 8
    dims: tuple[int, ...] = (16, 32, 64, 128)
    lengths: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    if preset == "quick":
        dims, lengths = (16, 64), (1024, 4096)
        if base.device_type == "cpu":
            batch, lengths = 2, (64, 256)
    for dim, length, name in product(dims, lengths, ("reference", "compiled")):
        fields = {"implementation": name, "warmup_steps": base.warmup_steps, "num_steps": base.num_steps}
        yield attention_config(base, Size(batch, 1, length, dim), "fp32", is_causal=False, **fields)


def naive_tables(cells: Cells) -> list[Table]:
    cells = sorted(cells, key=by_shape)
    shown = varying(cells, always=("head_dim", "seq_len", "implementation"))
    eager = entries.baselines(cells, lambda cell: cell.get("implementation") == "reference", "implementation")
    columns = [
        entries.mean_and_std(FORWARD, "forward_time", kernel_ms),
        entries.mean_and_std(BACKWARD, "backward_time", kernel_ms),
        entries.gib(Text("before backward", "反向之前"), "memory_before_backward"),
        entries.gib(PEAK, "peak_memory"),
        *entries.reserved(cells),
        entries.gib(PREDICTED, "predicted_memory"),
        entries.speed_up(Text("forward speed-up", "前向加速"), "forward_time", eager),
        entries.speed_up(Text("backward speed-up", "反向加速"), "backward_time", eager),
    ]
    notes = [
        Text("speed-up: over reference, the same formula run eagerly", "加速：相对 reference，即 eager 下的同一公式"),
        *compilation_notes(cells),
    ]
    what = Text("naive attention (mean ± std)", "朴素注意力（均值 ± 标准差）")
    return [entries.cell_table(what, cells, columns, shown=shown, notes=notes)]


def naive_charts(cells: Cells) -> list[Chart]:
    what = Text("Naive attention, backward", "朴素注意力，反向")
    batch, passes = (str(cells[0].get(name)) for name in ("batch_size", "num_steps"))
    statistic = say("means of {} passes, batch {}, 1 head", "{} 次的均值，batch {}，1 个头", passes, batch)
    return [time_by_length(what, group, "backward_time", statistic) for group in by_head_dim(cells)]


def longest(cells: Cells) -> list[CellView]:
    """Return cells with the most tokens and, among these, the widest heads."""
    shape = max((cell.get("seq_len"), cell.get("head_dim")) for cell in cells)
    return [cell for cell in cells if (cell.get("seq_len"), cell.get("head_dim")) == shape]


def _shape(cell: CellView) -> Text:
    return listed(row_words(cell, ("seq_len", "head_dim")), (", ", "、"))


def eager_cost(cells: Cells) -> Text | None:
    by_name = {cell.get("implementation"): cell for cell in longest(having(cells, *PASSES))}
    cell = by_name.get("reference") or next(iter(by_name.values()))
    said = say(
        "at {}, forward of {} takes {} ms and backward {} ms",
        "{} 时，{} 的前向用时 {} ms，反向 {} ms",
        *(_shape(cell), attention_name(cell.get("implementation"))),
        *(kernel_ms(value_of(cell, phase)) for phase in PASSES),
    )
    kept = value_of(cell, "memory_before_backward")
    return together(said, say("before backward it holds {} GiB", "反向之前占用 {} GiB", gib(kept))) if kept else said


def compiled_gain(cells: Cells) -> Text | None:
    """Compare forward and backward of the longest shape, compiled and eager."""
    pairs = pairs_of(cells, "implementation", "reference", "backward_time")
    long = longest([cell for cell, _ in pairs])
    cell, base = pair = next(pair for pair in pairs if pair[0] in long)
    names = (
        (Text("compiled forward", "编译版前向"), Text("eager forward", "eager 版前向")),
        (Text("compiled backward", "编译版反向"), Text("eager backward", "eager 版反向")),
    )
    said = None
    for phase, (ours, other) in zip(PASSES, names, strict=True):
        said = together(said, compared(ours, other, [(speed_up(pair, phase), Text(""))]))
    peaks = [value_of(found, "peak_memory") for found in (cell, base)]
    if not all(peaks):
        return said
    memory = say("peak memory is {} GiB, eager {} GiB", "峰值显存 {} GiB，eager 为 {} GiB", *map(gib, peaks))
    return together(said, memory)


def out_of_memory(cells: Cells) -> Text | None:
    failed = [cell for cell in cells if cell.is_oom]
    shortest = min(cell.get("seq_len") or 0 for cell in failed)
    return say(
        "{} of {} cells ran out of memory, the shortest at {} tokens",
        "{1} 个配置中有 {0} 个显存不足，最短的为 {2} 个 token",
        *(str(len(failed)), str(len(cells)), str(shortest)),
    )


PYTORCH_ATTENTION = Experiment(
    name="pytorch_attention",
    title=Text("Naive attention", "朴素注意力"),
    question=Text(
        "What does naive attention cost, eager and compiled?", "朴素注意力在 eager 与编译模式下的开销各是多少？"
    ),
    instrument=Instrument(
        "pytorch_attention", f"{MODULE}:measure_pytorch_attention", label=label_shape, memory=naive_memory
    ),
    grid=naive_grid,
    default_steps={preset: 100 for preset in PRESETS if preset != "quick"},
    tables=naive_tables,
    charts=naive_charts,
    group="attention",
    findings=(eager_cost, compiled_gain, out_of_memory),
    problems_2026=("pytorch_attention", "torch_compile"),
    order=10,
)

# -- flash: time, memory and error of every implementation ------------------------------------------------------------


ON_CPU = ("reference", "flash_torch", "compiled", "sdpa")
ON_CUDA = (
    "auto", "flash_triton", "flash_torch", "reference", "compiled",
    "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex",
)  # fmt: skip
"""`auto` chooses by the GPU and the shape, as in training."""
HALF_PRECISION_ONLY = ("sdpa_flash", "sdpa_cudnn", "flex")
"""The first two have no fp32; flex runs fp32 matmuls without tensor cores, so it is no rival there."""


def flash_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield the implementations of one shape after one another, because they share the reference results."""
    on_cpu = base.device_type == "cpu"
    precisions: tuple[str, ...] = ("bf16", "fp32")
    dims: tuple[int, ...] = (16, 32, 64, 128)
    lengths = tuple(2**n for n in range(7, 17))
    if preset == "quick":
        precisions, dims, lengths = (("fp32",), (16, 64), (64, 256)) if on_cpu else (("bf16",), (64, 128), (1024, 4096))
    for precision, dim, length, name in product(precisions, dims, lengths, ON_CPU if on_cpu else ON_CUDA):
        if precision in ("bf16", "fp16") or name not in HALF_PRECISION_ONLY:
            size = Size(1, 1, length, dim)
            yield attention_config(base, size, precision, implementation=name, warmup_ms=5, rep_ms=20)


def flash_tables(cells: Cells) -> list[Table]:
    """Return, for each precision, tables of times, rates, memory and errors with a row per shape."""
    by_precision = grouped(sorted(cells, key=by_shape), lambda cell: cell.get("precision"))
    return [table for chosen in by_precision.values() for table in _tables_of(chosen)]


def _tables_of(cells: Cells) -> list[Table]:
    shown = [name for name in varying(cells, always=("head_dim", "seq_len")) if name != "implementation"]
    timed = Text("times: medians, on a GPU of do_bench", "时间：中位数；GPU 上来自 do_bench")
    return side_by_side(cells, shown, [timed, *compilation_notes(cells)])


def flash_charts(cells: Cells) -> list[Chart]:
    """Return charts of the rates by length, forward and backward apart, and the roofline of the widest head."""
    groups = by_head_dim(cells)
    statistic = Text("medians, batch 1, 1 head", "中位数，batch 1，1 个头")
    found = [rates_by_length(group, metric, statistic) for group in groups for metric in PASSES]
    return [*found, *roofline(groups[-1])]


def memory_highlight(cells: Cells) -> list[Highlight]:
    """Return the memory of our attention beside that of naive attention, at the greatest length."""
    fine = having(cells, "peak_memory")
    long = longest(fine) if fine else []
    for same in grouped(long, lambda cell: cell.get("precision")).values():
        by_name = {cell.get("implementation"): value_of(cell, "peak_memory") for cell in same}
        ours = next((by_name[name] for name in OURS if by_name.get(name)), None)
        naive = by_name.get("reference")
        if ours and naive:
            length, dim = f"{same[0].get('seq_len'):,}", str(same[0].get("head_dim"))
            what = say(
                "less memory than naive attention at {} tokens", "{} token 时注意力显存少于朴素实现的倍数", length
            )
            values = (gib(ours), gib(naive), dim, str(same[0].get("precision")))
            detail = say("ours {} GiB, naive {} GiB (d {}, {})", "本项目 {} GiB，朴素实现 {} GiB（d {}，{}）", *values)
            return [Highlight(45, Text(f"{times_text(naive / ours)}x"), what, detail)] if naive > ours else []
    return []


TimesByShape = Mapping[tuple[int, int], Times]
"""(head dimension, tokens) -> forward and backward of each implementation."""


def _times(cells: Cells) -> TimesByShape:
    found: dict[tuple[int, int], Times] = {}
    for cell in cells:
        seconds = median_of(cell, "forward_backward_time") if cell.ok else None
        if seconds:
            found.setdefault((cell.get("head_dim"), cell.get("seq_len")), {})[cell.get("implementation")] = seconds
    return dict(sorted(found.items()))


def flash_speed(cells: Cells, which: int) -> Text | None:
    """State, for the first or second precision, where ours is the fastest and by how much at the greatest length."""
    precision = list(dict.fromkeys(cell.get("precision") for cell in cells))[which]
    times = _times([cell for cell in cells if cell.get("precision") == precision])
    ours = next(name for name in (*OURS, "flash_torch") if any(name in found for found in times.values()))
    times = {shape: found for shape, found in times.items() if ours in found and len(found) > 1}
    wins = say("in {}, {}", "{} 下，{}", str(precision), _wins(times, ours))
    return together(wins, _longest_lead(times, ours))


def _wins(times: TimesByShape, ours: str) -> Text:
    ahead = {shape: min(found, key=lambda name: found[name]) == ours for shape, found in times.items()}
    values = (attention_name(ours), str(max(map(len, times.values()))), str(sum(ahead.values())), str(len(times)))
    if not any(ahead.values()):
        return say(
            "{0} is the fastest of {1} implementations in none of {3} shapes",
            "{0} 在 {3} 个形状中均不是 {1} 种实现里最快的",
            *values,
        )
    said = say(
        "{0} is the fastest of {1} implementations in {2} of {3} shapes",
        "{0} 在 {3} 个形状中有 {2} 个是 {1} 种实现里最快的",
        *values,
    )
    starts = [_ahead_from(ahead, dim) for dim in dict.fromkeys(dim for dim, _ in times)]
    if None in starts:
        return said
    start = str(max(filter(None, starts)))
    everywhere = say("at every head dim from {} tokens on", "{} 个 token 起在所有头维度上最快", start)
    return say("{}: {}", "{}：{}", said, everywhere)


def _ahead_from(ahead: Mapping[tuple[int, int], bool], dim: int) -> int | None:
    """Return the length from which on ours is always the fastest; None if there is none."""
    start = None
    for (found, length), is_first in ahead.items():
        if found == dim:
            start = (start or length) if is_first else None
    return start


def _longest_lead(times: TimesByShape, ours: str) -> Text | None:
    """State our speed against the fastest other implementation at the greatest length, over all head dimensions."""
    length = max(length for _, length in times)
    leads = []
    for (dim, seq), found in times.items():
        others = [name for name in found if name not in (ours, *OURS)]
        if seq == length and others:
            rival = min(others, key=lambda name: found[name])
            leads.append((found[rival] / found[ours], say("head dim {}", "头维度 {}", str(dim)), rival))
    if not leads:
        return None
    rivals = {rival for *_, rival in leads}
    other = attention_name(rivals.pop()) if len(rivals) == 1 else Text("the fastest other", "其他最快的实现")
    subject = say("at {} tokens it", "{} 个 token 时，它", str(length))
    return compared(subject, other, [(ratio, name) for ratio, name, _ in leads])


def flash_memory(cells: Cells) -> Text | None:
    long = longest(having(cells, "peak_memory"))
    same = [cell for cell in long if cell.get("precision") == long[0].get("precision")]
    by_name = {str(cell.get("implementation")): cell for cell in same}
    ours = next((by_name[name] for name in (*OURS, "flash_torch") if name in by_name), None)
    naive = by_name.get("reference")
    if not ours or not naive:
        return None
    return say(
        "at {}, {} needs {} GiB, naive attention {} GiB",
        "{} 时，{} 需要 {} GiB，朴素注意力需要 {} GiB",
        *(_shape(ours), attention_name(ours.get("implementation"))),
        *(gib(value_of(cell, "peak_memory")) for cell in (ours, naive)),
    )


FLASH = Experiment(
    name="flash",
    title=Text("Attention implementations side by side", "各注意力实现对比"),
    question=Text(
        "How fast and how exact is each attention, and how much memory does it need?",
        "各注意力实现的速度、显存和精度如何？",
    ),
    instrument=Instrument(
        "flash", f"{MODULE}:measure_flash", label=label_shape, memory=partial(naive_memory, keeps_graph=True)
    ),
    grid=flash_grid,
    tables=flash_tables,
    charts=flash_charts,
    highlights=memory_highlight,
    group="attention",
    findings=(partial(flash_speed, which=0), partial(flash_speed, which=1), flash_memory),
    statistic="median",
    problems_2026=("flash_benchmarking",),
    order=20,
)
