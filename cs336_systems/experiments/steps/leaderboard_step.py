"""The job of the 2026 leaderboard: one training step of 8.1 billion parameters, timed as the board times it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import OPTIMIZER_STATES, ModelConfig, RunConfig, model_config
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, require_gpu
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.record import CELL_TIME
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Limit
from cs336_systems.report.phrases import having, known, together
from cs336_systems.report.points import measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, percent, remarks_on, signed, tflops, title_of
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

BOARD = ModelConfig(vocab_size=151_936, context_length=32_768, d_model=4096, num_layers=34, num_heads=32, d_ff=11_008)
SEQUENCES = 2
WARMUP_MS, REP_MS = 10_000, 30_000
"""Arguments of do_bench in the board's script."""
LIMIT_SECONDS = 600
"""The board's limit for a run that starts with empty compile caches."""
NAIVE_SECONDS, BEST_SECONDS = 10.0, 3.837
"""The board's naive baseline and its best entry, both on two B200 GPUs."""
BOARD_GPUS = 2
STATES = {
    "fp32": Text("fp32 masters", "fp32 主权重"),
    "bf16": Text("bf16 state (as on the board)", "bf16 状态（与排行榜相同）"),
}
MICRO_BATCHES = (1, 2)

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield both precisions of the optimizer's state, with the whole batch and with two micro batches."""
    quick, on_cuda = preset == "quick", base.device_type == "cuda"
    if not quick:
        require_gpu("train_leaderboard", base, "a step of 8.1 billion parameters would take days on a CPU")
    # Without a GPU there is no memory to fill: blocks are recomputed, so that the same nodes run.
    saving: dict[str, Any] = {"memory_budget": "auto"} if on_cuda else {"checkpoint_blocks": 1}
    for state, count in product(OPTIMIZER_STATES, MICRO_BATCHES):
        run = dataclasses.replace(
            base,
            model=model_config("tiny", vocab_size=1000, num_layers=2) if quick else BOARD,
            size="",
            batch_size=SEQUENCES // count,
            precision="bf16" if on_cuda or state == "bf16" else "fp32",  # most CPUs emulate bf16
            attention="auto",
            fast="kernels,loss,optimizer",  # a step of seconds gains nothing from a graph
            optimizer_state=state,
            update_in_backward=count == 1,
            **saving,
        )
        warmup_ms, rep_ms = (20, 60) if quick else (WARMUP_MS, REP_MS)
        yield {**run.to_dict(), "micro_batches": count, "warmup_ms": warmup_ms, "rep_ms": rep_ms}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    return f"{run.size} {run.model.context_length} {run.optimizer_state} state, micro batches {config['micro_batches']}"


def _memory(config: Mapping[str, Any]) -> Memory:
    """Return the bytes of the model's state; the memory for activations is chosen when the GPU is known."""
    return Memory(building_peak(RunConfig.of(config)).peak, at_least=True)


# -- tables -----------------------------------------------------------------------------------------------------------


def _state(cell: CellView) -> Text:
    return STATES.get(str(cell.get("optimizer_state")), Text(str(cell.get("optimizer_state"))))


def _position(cell: CellView) -> tuple[bool, int]:
    return cell.get("optimizer_state") != "fp32", cell.get("micro_batches")


def _is_board(cell: CellView) -> bool:
    return all(cell.get(name) == value for name, value in vars(BOARD).items())


def _losses(cell: CellView) -> str:
    found = [cell.value(name) for name in ("first_loss", "last_loss")]
    return ", ".join(number(loss, 3) for loss in found if loss is not None)


def _tables(cells: Cells) -> list[Table]:
    def seconds(metric: str) -> entries.Entry:
        return entries.of(HEADINGS[metric], lambda cell: number(cell.value(metric), 1), "s")

    columns = [
        entries.ms(terms.STEP, "step_time"),
        entries.std(terms.STD, "step_time"),
        entries.of(Text("causal TFLOP/s", "因果 TFLOP/s"), lambda cell: tflops(cell.causal_flops_per_second)),
        entries.of(Text("causal MFU", "因果 MFU"), lambda cell: percent(cell.causal_mfu)),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
        seconds("cold_start_time"),
        seconds(CELL_TIME),
        entries.of(Text("loss, first and last step", "损失，首步与末步"), _losses),
    ]
    rows: list[list[str | Text]] = []
    for cell in sorted(cells, key=_position):
        names: list[str | Text] = [_state(cell), str(cell.get("micro_batches"))]
        found = [entry.text(cell) for entry in columns] if cell.ok else [cell.verdict, *[""] * (len(columns) - 1)]
        rows.append([*names, *found])
    shown = ["optimizer_state", "batch_size", "update_in_backward", "precision"]
    keys = [word(Text("optimizer", "优化器")), Column(Text("micro batches", "micro batch 数"))]
    what = Text("the 2026 leaderboard's training step", "2026 年排行榜的训练步")
    title = title_of(cells[0].experiment, what, cells, shown)
    return [Table(title, [*keys, *(entry.column for entry in columns)], rows, [*NOTES, *remarks_on(cells, shown[:2])])]


HEADINGS = {
    "cold_start_time": Text("to the end of the first step", "到首步结束"),
    CELL_TIME: Text("whole run", "整个运行"),
}
NOTES = [
    Text(
        "forward, loss, backward and AdamW of 2 sequences, one after another with 2 micro batches; mean of do_bench",
        "2 条序列的前向、损失、反向与 AdamW；2 个 micro batch 时逐条计算；do_bench 的均值",
    ),
    Text(
        "with one micro batch each weight is updated as soon as its gradient is final",
        "1 个 micro batch 时，权重的梯度一旦完成便立即更新",
    ),
    Text(
        "causal: masked scores are no work, as in the board's own count; MFU counts them, as all tables here",
        "因果：被掩码的分数不计入计算量，与排行榜的算法相同；MFU 计入，与其他表格一致",
    ),
    say(
        "on two B200 GPUs the board's naive baseline takes {} ms and its best entry {} ms",
        "在两块 B200 上，排行榜的朴素基线为 {} ms，最佳成绩为 {} ms",
        *(ms(NAIVE_SECONDS), ms(BEST_SECONDS)),
    ),
    Text(
        "times to the first step and of the run begin with empty compile caches; the board allows 600 s",
        "首步与整个运行的时间从空的编译缓存开始计算；排行榜限 600 s",
    ),
]


# -- charts -----------------------------------------------------------------------------------------------------------


def _batches(cell: CellView) -> Text:
    count = cell.get("micro_batches")
    return (
        Text("1 micro batch", "1 个 micro batch")
        if count == 1
        else say("{} micro batches", "{} 个 micro batch", str(count))
    )


def _charts(cells: Cells) -> list[Chart]:
    fine = sorted(having(cells, "step_time"), key=_position)
    title = Text("The 2026 leaderboard's training step", "2026 年排行榜的训练步")
    points = (measured(cell, "step_time", say("{}, {}", "{}，{}", _state(cell), _batches(cell))) for cell in fine)
    lines = _board_lines() if any(map(_is_board, fine)) else []
    note = Text("means of do_bench", "do_bench 的均值")
    if lines:
        note = Text(
            "means of do_bench; the lines are entries of the board on two B200 GPUs: other hardware",
            "do_bench 的均值；直线为排行榜上两块 B200 的成绩：硬件不同",
        )
    ours = series_of(Text("this package", "本项目"), points)
    what = Text("optimizer and micro batches", "优化器与 micro batch")
    return [Chart("", title, "bars", what, terms.MS, [ours], horizontal=True, limits=lines, digits=1, note=note)]


def _board_lines() -> list[Limit]:
    naive = say("naive, two B200: {} ms", "朴素实现，两块 B200：{} ms", ms(NAIVE_SECONDS))
    best = say("best entry, two B200: {} ms", "最佳成绩，两块 B200：{} ms", ms(BEST_SECONDS))
    return [Limit(1e3 * NAIVE_SECONDS, naive, dashed=True), Limit(1e3 * BEST_SECONDS, best, dashed=True)]


# -- first screen and findings ----------------------------------------------------------------------------------------


def _fastest(cells: Cells) -> list[CellView]:
    """Return the fastest cell of each optimizer state."""
    fine = sorted(having(cells, "step_time"), key=lambda cell: known(cell, "step_time"))
    found = [next((cell for cell in fine if cell.get("optimizer_state") == state), None) for state in OPTIMIZER_STATES]
    return [cell for cell in found if cell is not None]


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the fastest step of the board's job."""
    own = [cell for cell in _fastest(cells) if _is_board(cell)]
    if not own:
        return []
    cell = min(own, key=lambda cell: known(cell, "step_time"))
    detail = say(
        "2 x 32,768 tokens, {}, {}: {} ms; the board's best entry, on two B200 GPUs: {} ms",
        "2 x 32,768 token，{}，{}：{} ms；排行榜最佳成绩（两块 B200）：{} ms",
        *(_state(cell), _batches(cell), ms(known(cell, "step_time")), ms(BEST_SECONDS)),
    )
    what = Text("a training step of 8.1 billion parameters", "81 亿参数的训练步")
    return [Highlight(28, Text(f"{known(cell, 'step_time'):.2f} s"), what, detail)]


def _step_times(cells: Cells) -> Text | None:
    said = None
    for cell in _fastest(cells):
        values = (_state(cell), ms(known(cell, "step_time")), _batches(cell))
        own = say("with {} a step takes {} ms ({})", "{} 时每步 {} ms（{}）", *values)
        if share := cell.causal_mfu:
            own = say("{}, a causal MFU of {}", "{}，因果 MFU 为 {}", own, percent(share))
        said = together(said, own)
    return said


def _beside_the_board(cells: Cells) -> Text | None:
    """Compare the shares of the peak FLOP/s: the board's entries ran on other hardware."""
    cell = min((cell for cell in _fastest(cells) if _is_board(cell)), key=lambda cell: known(cell, "step_time"))
    share, peak = cell.causal_mfu, peak_flops("B200", "bf16")
    if share is None or peak is None:
        return None
    best = known(cell, "causal_flops") / BEST_SECONDS / (BOARD_GPUS * peak)
    return say(
        "the board's best entry takes {} ms on two B200 GPUs, {} of their dense peak; this GPU reaches {} of its own",
        "排行榜最佳成绩在两块 B200 上用时 {} ms，为其稠密峰值的 {}；本 GPU 达到自身峰值的 {}",
        *(ms(BEST_SECONDS), percent(best), percent(share)),
    )


def _from_empty_caches(cells: Cells) -> Text | None:
    fine = having(cells, "cold_start_time", CELL_TIME)
    slowest = max(fine, key=lambda cell: known(cell, CELL_TIME))
    return say(
        "from empty compile caches the first step ends after {} s, the longest run after {} s; the board allows {} s",
        "从空的编译缓存开始，首步在 {} s 后结束，最长的运行用时 {} s；排行榜限 {} s",
        *(number(known(slowest, "cold_start_time"), 1), number(known(slowest, CELL_TIME), 1), str(LIMIT_SECONDS)),
    )


TRAIN_LEADERBOARD = Experiment(
    name="train_leaderboard",
    title=Text("The 2026 leaderboard", "2026 年排行榜"),
    question=Text(
        "How long does a training step of 8.1 billion parameters take, as the 2026 leaderboard times it?",
        "按 2026 年排行榜的计时方式，81 亿参数的训练步要多久？",
    ),
    grid=_grid,
    instrument=Instrument(
        "train_leaderboard",
        "cs336_systems.experiments.steps.measure_step:measure_leaderboard_step",
        label=_label,
        memory=_memory,
        takes_peak_tflops=True,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    tables=_tables,
    charts=_charts,
    findings=(_step_times, _beside_the_board, _from_empty_caches),
    highlights=_highlights,
    group="speed",
    problems_2026=("leaderboard",),
    identity=("micro_batches",),
    order=45,
)
