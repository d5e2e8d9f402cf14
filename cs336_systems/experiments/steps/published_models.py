"""Training steps of published models: Qwen 2.5 of five sizes as LLMQ's table has them, beside its numbers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import OPTIMIZER_STATES, RunConfig, model_config
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, require_gpu
from cs336_systems.predict.fit import usable_bytes
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import GIB
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import having, known, together, value_of, worst_step_time
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import number, percent, remarks_on, signed, title_of
from cs336_systems.table import Table, word
from cs336_systems.text import Text, say

CONTEXT, TOKENS = 1024, 524_288
"""Tokens of a sequence, and tokens of a step."""
RIVAL = {"0.5B": 149.0, "1.5B": 59.0, "3B": 31.0, "7B": 14.0, "14B": 6.3}
"""Thousands of tokens per second of LLMQ (C++ and CUDA) on one H100, whose peak FLOP/s equals that of an H200: bf16,
with bf16 weights and optimizer state."""
RIVAL_FP8 = {"0.5B": 164.0, "1.5B": 73.0, "3B": 40.0, "7B": 19.0, "14B": 9.3}
"""Thousands of tokens per second of LLMQ on one H100 with matmuls in FP8."""
LARGEST_BATCH = 64
ASSUMED_MEMORY = 139 * GIB
"""Memory of the GPU for which the sizes of micro batches are chosen."""
STATES = {
    "bf16": Text("bf16 (as LLMQ's)", "bf16（与 LLMQ 相同）"),
    "fp32": Text("fp32 masters", "fp32 主权重"),
    "fp8": Text("bf16, matmuls in FP8", "bf16，FP8 矩阵乘"),
}
"""Kind of a cell -> its optimizer state, as tables show it."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield every size with both precisions of the optimizer's state; sizes that fit no micro batch need a memory
    budget."""
    if preset == "quick":
        model = model_config("qwen2.5/0.5B", d_model=56, num_layers=2, d_ff=128, vocab_size=1000, context_length=64)
        for state in OPTIMIZER_STATES:
            run = _run(dataclasses.replace(base, model=model, size="", num_steps=2), state)
            yield {**dataclasses.replace(run, batch_size=2).to_dict(), "micro_batches": 2}
        return
    require_gpu(
        "published_models", base, "a step of half a billion parameters and 524,288 tokens would take hours on a CPU"
    )
    kinds = [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp8")]
    for size, (state, precision) in product(RIVAL, kinds):
        name = f"qwen2.5/{size}"
        model = model_config(name, context_length=CONTEXT)
        run = _run(dataclasses.replace(base, model=model, size=name, num_steps=1), state)  # of many micro batches
        run = dataclasses.replace(run, precision=precision)
        if (chosen := _with_batch(run)) is not None:
            yield {**chosen.to_dict(), "micro_batches": TOKENS // chosen.tokens}


def _run(base: RunConfig, state: str) -> RunConfig:
    on_cuda = base.device_type == "cuda"
    precision = "bf16" if on_cuda or state == "bf16" else "fp32"  # most CPUs emulate bf16
    return dataclasses.replace(
        base, precision=precision, attention="auto", fast="on", optimizer_state=state, warmup_steps=2
    )


def _with_batch(run: RunConfig) -> RunConfig | None:
    """Return the run with the largest micro batch that fits, a power of two; with a memory budget and without a CUDA
    graph if only plans fit; None if nothing fits."""
    room, batch = usable_bytes(ASSUMED_MEMORY), LARGEST_BATCH
    while batch:
        sized = dataclasses.replace(run, batch_size=batch)
        if estimate(sized).peak <= room:
            return sized
        batch //= 2
    if estimate(_smallest(run)).peak > room:
        return None
    return dataclasses.replace(run, batch_size=16, memory_budget="auto", fast="kernels,loss,optimizer")


def _smallest(run: RunConfig) -> RunConfig:
    """Return the step with the least memory: every block is recomputed."""
    return dataclasses.replace(run, batch_size=1, memory_budget="", precision="bf16", checkpoint_blocks=1)


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    kind = f"{run.size} {run.precision}, {run.optimizer_state} state"
    return f"{kind}, {config['micro_batches']} micro batches of {run.batch_size}"


def _memory(config: Mapping[str, Any]) -> Memory:
    run = RunConfig.of(config)
    if run.memory_budget:
        return Memory(estimate(_smallest(run)).peak, at_least=True)
    return Memory(estimate(run).peak)


# -- tables -----------------------------------------------------------------------------------------------------------


def _rate(cell: CellView) -> float | None:
    """Return the rate in thousands of tokens per second."""
    tokens, seconds = value_of(cell, "tokens"), value_of(cell, "step_time")
    return tokens / seconds / 1e3 if tokens and seconds else None


def _rival(cell: CellView) -> float | None:
    """Return the rate of LLMQ for this cell's model, step and precision."""
    rates = RIVAL_FP8 if cell.get("precision") == "fp8" else RIVAL
    is_its_step = cell.get("context_length") == CONTEXT and value_of(cell, "tokens") == TOKENS
    return rates.get(str(cell.get("size")).removeprefix("qwen2.5/")) if is_its_step else None


def _kind(cell: CellView) -> str:
    """Return the cell's key in STATES."""
    return "fp8" if cell.get("precision") == "fp8" else str(cell.get("optimizer_state"))


def _state(cell: CellView) -> Text:
    return STATES.get(_kind(cell), Text(_kind(cell)))


def _position(cell: CellView) -> tuple[float, int]:
    return value_of(cell, "parameters") or 0.0, list(STATES).index(_kind(cell))


def _tables(cells: Cells) -> list[Table]:
    columns = [
        entries.of(THOUSANDS, lambda cell: number(_rate(cell), 1)),
        entries.of(Text("LLMQ, H100", "LLMQ 公布值（H100）"), lambda cell: number(_rival(cell), 1)),
        entries.ms(terms.STEP, "step_time"),
        *entries.predicted_time(cells),
        entries.of(Text("causal MFU", "因果 MFU"), lambda cell: percent(cell.causal_mfu)),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
    ]
    rows: list[list[str | Text]] = []
    for cell in sorted(cells, key=_position):
        batch = say("{} x {}", "{} x {}", str(cell.get("micro_batches")), str(cell.get("batch_size")))
        names: list[str | Text] = [size_name(cell.get("size")), _state(cell), batch]
        found = [entry.text(cell) for entry in columns] if cell.ok else [cell.verdict, *[""] * (len(columns) - 1)]
        rows.append([*names, *found])
    shown = ["size", "optimizer_state", "batch_size", "precision", "fast", "memory_budget"]
    keys = [
        word(Text("model", "模型")),
        word(Text("optimizer", "优化器")),
        word(Text("micro batches", "micro batch 数")),
    ]
    title = title_of(cells[0].experiment, Text("training published models", "训练公开模型"), cells, shown)
    return [Table(title, [*keys, *(entry.column for entry in columns)], rows, [*NOTES, *remarks_on(cells, shown)])]


THOUSANDS = Text("thousand tokens/s", "千 token/s")
NOTES = [
    Text(
        "whole steps: forward, loss and backward of all micro batches (number x sequences), and AdamW; random weights",
        "完整训练步：全部 micro batch（个数 x 序列数）的前向、损失与反向，以及 AdamW；随机权重",
    ),
    Text(
        "LLMQ: its published rates on an H100, bf16 weights and state; H100 and H200 have the same arithmetic peak",
        "LLMQ：其公布的 H100 速率，bf16 权重与状态；H100 与 H200 的算力峰值相同",
    ),
    Text(
        "causal: masked scores are no work; MFU counts them, as all tables here",
        "因果：被掩码的分数不计入计算量；MFU 计入，与其他表格一致",
    ),
]


# -- charts and findings ----------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    """Chart rates relative to LLMQ's: the absolute rates of 0.5B and 14B differ by a factor of 25."""
    series = []
    for kind, name in STATES.items():
        own = [cell for cell in sorted(having(cells, "step_time"), key=_position) if _kind(cell) == kind]
        points = [(cell, _rate(cell), _rival(cell)) for cell in own]
        found = [Point(size_name(cell.get("size")), rate / rival) for cell, rate, rival in points if rate and rival]
        if found:
            series.append(Series(name, found))
    if not series:
        return []
    title = Text("Training published models, relative to LLMQ", "训练公开模型，相对 LLMQ")
    note = Text("tokens a second over those of LLMQ on one H100", "每秒 token 数与 LLMQ 在单块 H100 上之比")
    what = Text("times LLMQ's rate", "LLMQ 速率的倍数")
    return [Chart("", title, "bars", Text("model", "模型"), what, series, horizontal=True, digits=2, note=note)]


def _rates(cells: Cells) -> Text | None:
    said = None
    for cell in sorted(having(cells, "step_time"), key=_position):
        if _kind(cell) == "bf16" and (rate := _rate(cell)):
            own = say(
                "{} trains at {} thousand tokens/s",
                "{} 的训练速率为 {} 千 token/s",
                size_name(cell.get("size")),
                number(rate, 1),
            )
            if rival := _rival(cell):
                own = say("{} (LLMQ {})", "{}（LLMQ 为 {}）", own, number(rival, 1))
            said = together(said, own)
    return said


def _cost_of_masters(cells: Cells) -> Text | None:
    """Compare fp32 masters with bf16 state for the smallest and the largest model that has both."""
    pairs: dict[str, dict[str, float]] = {}
    for cell in sorted(having(cells, "step_time"), key=_position):
        pairs.setdefault(str(cell.get("size")), {})[_kind(cell)] = known(cell, "step_time")
    both = {size: times["fp32"] / times["bf16"] - 1 for size, times in pairs.items() if {"fp32", "bf16"} <= set(times)}
    if not both:
        return None
    ends = dict.fromkeys([next(iter(both)), list(both)[-1]])
    said = None
    for size in ends:
        share = percent(abs(both[size]), 1)
        text = ("with fp32 masters a step of {} takes {} more", "使用 fp32 主权重时，{} 的每步多用 {}")
        if both[size] < 0:
            text = ("with fp32 masters a step of {} takes {} less", "使用 fp32 主权重时，{} 的每步少用 {}")
        said = together(said, say(*text, size_name(size), share))
    return said


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the largest lead over LLMQ."""
    rated = [(cell, _rate(cell), _rival(cell)) for cell in having(cells, "step_time")]
    ahead = [(rate / rival, cell, rate, rival) for cell, rate, rival in rated if rate and rival]
    if not ahead:
        return []
    lead, cell, rate, rival = max(ahead, key=lambda found: found[0])
    detail = say(
        "{} with {}: {} thousand tokens/s; LLMQ on an H100: {}",
        "{}，{}：{} 千 token/s；LLMQ 在 H100 上为 {}",
        *(size_name(cell.get("size")), _state(cell), number(rate, 1), number(rival, 1)),
    )
    what = Text("LLMQ's rate of training Qwen 2.5", "LLMQ 训练 Qwen 2.5 的速率")
    return [Highlight(29, Text(f"{lead:.2f}x"), what, detail)]


PUBLISHED_MODELS = Experiment(
    name="published_models",
    title=Text("Published models", "公开模型"),
    question=Text(
        "How many tokens a second does this GPU train of Qwen 2.5, from 0.5 to 14 billion parameters?",
        "本 GPU 训练 5 亿到 140 亿参数的 Qwen 2.5，每秒多少 token？",
    ),
    grid=_grid,
    instrument=Instrument(
        "published_models",
        "cs336_systems.experiments.steps.measure_step:measure_accumulated_step",
        label=_label,
        memory=_memory,
        takes_peak_tflops=True,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    tables=_tables,
    charts=_charts,
    findings=(_rates, _cost_of_masters, worst_step_time),
    highlights=_highlights,
    group="speed",
    identity=("micro_batches",),
    order=46,
)
