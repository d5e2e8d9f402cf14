"""FP8 against bf16: time and memory of a step with its rivals, and what training loses."""

import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import mean, stdev
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, run_config, step_is_cold
from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.phrases import beside, having, known, scale_of, size_of, together, with_time
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import as_text, ms, number, percent, settings_of, signed, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, say

TORCHAO = tuple(f"cs336_systems.experiments.steps.float8_llama:{recipe}" for recipe in ("tensorwise", "rowwise"))
VOCABULARY = 32_000
VARIED = ("precision", "fast", "compile", "model_factory")
"""Fields in which steps of the same work differ."""
LOSSES = {"small": (1000, (0, 1, 2)), "large": (300, (0, 1, 2))}
"""Steps of a training run and its seeds, by size."""
RATE = {"tiny": 1e-3, "small": 6e-4, "large": 3e-4}
BYTES = 256
EQUAL_LOSS_SHARE = 0.9
"""The time to equal loss uses the loss that bf16 reaches after this share of its run."""

# -- the step ---------------------------------------------------------------------------------------------------------


def _step_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield the fast step in both precisions, and if installed compiled Llama in bf16 and with torchao's FP8."""
    on_cuda = base.device_type == "cuda"
    base = dataclasses.replace(base, attention="auto")
    variants: list[dict[str, Any]] = [{"precision": precision, "fast": "on"} for precision in ("bf16", "fp8")]
    if on_cuda and importlib.util.find_spec("transformers") is not None:
        factories = [LLAMA, *(TORCHAO if importlib.util.find_spec("torchao") is not None else ())]
        variants += [{"precision": "bf16", "compile": True, "model_factory": factory} for factory in factories]
    if preset == "quick":
        for variant in variants[:2]:
            run = run_config(base, "small" if on_cuda else "tiny", 512 if on_cuda else 64, **variant)
            yield {**run, "model": {**run["model"], "vocab_size": BYTES}}
        return
    for (size, context, batch), variant in product((("small", 1024, 8), ("2.7B", 2048, 4)), variants):
        run = run_config(base, size, context, batch_size=batch, **variant)
        yield {**run, "model": {**run["model"], "vocab_size": VOCABULARY}}


def _name(cell: CellView) -> Text:
    factory = str(cell.get("model_factory") or "")
    if factory in TORCHAO:
        recipe = factory.rsplit(":", 1)[1]
        return say("torchao {}, compiled", "torchao {}，编译", recipe)
    if factory:
        built = Text("compiled Llama", "编译后的 Llama")
        return built if factory == LLAMA else Text(as_text(factory))
    return say("ours, {}", "本项目，{}", str(cell.get("precision")))


def _step_tables(cells: Cells) -> list[Table]:
    base_of = entries.baselines(cells, _is_ours_in("bf16"), *VARIED)
    columns = [
        entries.of(Text("step by", "训练步"), _name),
        entries.ms(terms.STEP, "step_time"),
        entries.std(terms.STD, "step_time"),
        entries.speed_up(terms.SPEED_UP, "step_time", base_of),
        entries.of(terms.TOKENS_PER_SECOND, lambda cell: number(cell.tokens_per_second, 0)),
        entries.of(Text("of the FP8 peak", "占 FP8 峰值"), lambda cell: percent(_share(cell, "fp8"))),
        entries.of(Text("of the bf16 peak", "占 bf16 峰值"), lambda cell: percent(_share(cell, "bf16"))),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.over_base(terms.MEMORY, "peak_memory", base_of),
        entries.of(terms.PREDICTED, lambda cell: signed(cell.memory_error, 2)),
    ]
    what = Text("a training step in FP8 and in bf16", "FP8 与 bf16 的训练步")
    shown = [name for name in varying(cells, always=("size", "batch_size")) if name not in VARIED]  # `_name` has them
    return [entries.cell_table(what, cells, columns, shown=shown)]


def _is_ours_in(precision: str) -> Any:
    return lambda cell: cell.get("precision") == precision and not cell.get("model_factory")


def _share(cell: CellView, precision: str) -> float | None:
    """Return the model's FLOP/s as a share of the GPU's peak in a precision; the peak of FP8 is twice that of bf16."""
    own = cell.mfu
    if own is None:
        return None
    in_bf16 = 2 * own if cell.get("precision") == "fp8" else own
    return in_bf16 if precision == "bf16" else in_bf16 / 2


def _works(cells: Cells) -> list[list[CellView]]:
    """Return groups of cells with the same model, context and batch, the largest first."""
    fine = sorted(having(cells, "step_time"), key=scale_of, reverse=True)
    return list(grouped(fine, lambda cell: settings_of(cell, *VARIED)).values())


def _pair(work: Cells) -> tuple[CellView, CellView] | None:
    """Return our step in FP8 and in bf16."""
    found = [next(filter(_is_ours_in(precision), work), None) for precision in ("fp8", "bf16")]
    return (found[0], found[1]) if found[0] and found[1] else None


def _step_charts(cells: Cells) -> list[Chart]:
    charts = []
    for work in _works(cells):
        title = say(
            "A training step of {}, {} x {} tokens", "{} 的训练步，{} x {} token", size_of(work[0]), *_shape(work[0])
        )
        points = [Point(_name(cell), 1e3 * known(cell, "step_time")) for cell in work]
        what = Text("step by", "训练步")
        charts.append(Chart("", title, "bars", what, terms.MS, [Series(terms.STEP, points)], horizontal=True, digits=1))
    return charts


def _shape(cell: CellView) -> tuple[str, str]:
    return str(cell.get("batch_size")), str(cell.get("context_length"))


def _speed(cells: Cells) -> Text | None:
    for work in _works(cells):
        pair = _pair(work)
        if pair is None:
            continue
        fp8, bf16 = (known(cell, "step_time") for cell in pair)
        said = say(
            "in FP8 a step of {} takes {} ms: {}",
            "FP8 下 {} 每步 {} ms：{}",
            *(size_of(pair[0]), ms(fp8), beside(bf16 / fp8, with_time(Text("bf16"), ms(bf16)))),
        )
        rivals = [cell for cell in work if cell.get("model_factory") in TORCHAO]
        if not rivals:
            return said
        best = min(rivals, key=lambda cell: known(cell, "step_time"))
        seconds = known(best, "step_time")
        return say("{}; {}", "{}；{}", said, beside(seconds / fp8, with_time(_name(best), ms(seconds))))
    return None


def _highlights(cells: Cells) -> list[Highlight]:
    for work in _works(cells):
        pair = _pair(work)
        if pair is not None:
            fp8, bf16 = (known(cell, "step_time") for cell in pair)
            detail = say(
                "{}, {} x {} tokens: FP8 {} ms, bf16 {} ms",
                "{}，{} x {} token：FP8 {} ms，bf16 {} ms",
                *(size_of(pair[0]), *_shape(pair[0]), ms(fp8), ms(bf16)),
            )
            what = Text("training step in FP8, against our bf16", "FP8 训练步，相对本项目的 bf16")
            return [Highlight(28, Text(f"{bf16 / fp8:.2f}x"), what, detail, bf16 / fp8, what)]
    return []


FP8_STEP = Experiment(
    name="fp8_step",
    title=Text("Training steps in FP8", "FP8 训练步"),
    question=Text("How much faster is a step in FP8?", "FP8 训练步快多少？"),
    grid=_step_grid,
    instrument=Instrument(
        "fp8_step",
        "cs336_systems.experiments.steps.measure_step:measure_step",
        label=label_step,
        needs_fresh_process=step_is_cold,
        takes_peak_tflops=True,
    ),
    tables=_step_tables,
    charts=_step_charts,
    findings=(_speed,),
    highlights=_highlights,
    group="speed",
    order=54,
)

# -- losses -----------------------------------------------------------------------------------------------------------


def _loss_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield training runs on text from the same seeds, in both precisions."""
    on_cuda = base.device_type == "cuda"
    sizes = {"small" if on_cuda else "tiny": (20, (0, 1))} if preset == "quick" else LOSSES
    for (size, (steps, seeds)), precision in product(sizes.items(), ("bf16", "fp8")):
        context, batch = (64, 4) if size == "tiny" else (512, 16)
        for seed in seeds:
            more = {"precision": precision, "fast": "on", "attention": "auto", "max_grad_norm": 1.0}
            run = run_config(base, size, context, batch_size=batch, seed=seed, **more)
            run = {**run, "model": {**run["model"], "vocab_size": BYTES}}
            yield {**run, "steps": steps, "learning_rate": RATE[size]}


def _loss_label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{config['size']} {config['precision']} seed {config['seed']}, {config['steps']} steps"


def _loss_tables(cells: Cells) -> list[Table]:
    columns = [
        entries.of(Text("seed", "种子"), lambda cell: str(cell.get("seed"))),
        entries.of(Text("final loss", "最终损失"), lambda cell: number(_final(cell), 4)),
        entries.of(Text("held-out loss", "验证损失"), lambda cell: number(_held_out(cell), 4)),
        entries.of(
            Text("least cosine at the start", "开始时的最小余弦"), lambda cell: number(_least(cell, "start"), 5)
        ),
        entries.of(Text("least cosine at the end", "结束时的最小余弦"), lambda cell: number(_least(cell, "end"), 5)),
        entries.ms(Text("a step", "每步"), "train_time"),
        entries.of(Text("skipped steps", "跳过的步"), lambda cell: number(cell.value("skipped_steps"), 0)),
        entries.of(
            Text("lost elements, at most", "归零元素（最多）"), lambda cell: percent(cell.value("lost_share"), 2)
        ),
    ]
    what = Text("training on text, by precision and seed", "在文本上训练，按精度与随机种子")
    shown = varying(cells, always=("size", "precision"))
    notes = [
        Text(
            "cosines: between a block's gradients and those of the same weights and batch in fp32; the least of all "
            "blocks",
            "余弦：每个块的梯度与相同权重、相同批次 fp32 梯度之间；取所有块中的最小值",
        ),
        Text("final loss: mean of the last tenth of the steps", "最终损失：最后十分之一步的均值"),
    ]
    table = entries.cell_table(what, cells, columns, shown=shown)
    return [dataclasses.replace(table, notes=[*notes, *table.notes])]


def _final(cell: CellView) -> float:
    losses = cell.metrics["loss"].numbers
    return mean(losses[-max(1, len(losses) // 10) :])


def _held_out(cell: CellView) -> float:
    return mean(cell.metrics["held_out_loss"].numbers)


def _smoothed(cell: CellView) -> list[float]:
    """Return running means of losses, each over as many steps as a tenth of the run: the step itself and those before
    it."""
    losses = cell.metrics["loss"].numbers
    window = max(1, len(losses) // 10)
    return [sum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def _steps_to(cell: CellView, target: float) -> int | None:
    """Return the number of steps after which the smoothed loss is as low as `target`."""
    smoothed = _smoothed(cell)
    first = len(cell.metrics["loss"].numbers) - len(smoothed) + 1
    return next((first + number for number, loss in enumerate(smoothed) if loss <= target), None)


def _least(cell: CellView, when: str) -> float:
    return min(cell.metrics[f"cosine_{when}"].numbers)


def _loss_charts(cells: Cells) -> list[Chart]:
    """Chart the losses of a size by precision: means over seeds and over twentieths of the run."""
    charts = []
    for size, own in grouped(having(cells, "loss"), lambda cell: cell.get("size")).items():
        series = []
        for precision, runs in grouped(own, lambda cell: str(cell.get("precision"))).items():
            losses = [mean(of_step) for of_step in zip(*(cell.metrics["loss"].numbers for cell in runs), strict=False)]
            window = max(1, len(losses) // 20)
            starts = range(0, len(losses) - window + 1, window)
            points = [Point(float(start + window), mean(losses[start : start + window])) for start in starts]
            series.append(Series(Text(precision), points))
        title = say("Loss of {} on text", "{} 在文本上的损失", str(size))
        seeds = str(len({cell.get("seed") for cell in own}))
        note = say("means of {} seeds", "{} 个随机种子的均值", seeds)
        charts.append(Chart("", title, "lines", Text("step", "步"), terms.LOSS, series, digits=3, note=note))
    return charts


def _time_to_equal_loss(cells: Cells) -> Text | None:
    """Compare the times until the smoothed loss is that of bf16 after most of its steps, summed over seeds."""
    said = None
    for own in grouped(having(cells, "loss", "train_time"), lambda cell: str(cell.get("size"))).values():
        size = size_of(own[0])
        times = {"bf16": 0.0, "fp8": 0.0}
        by_seed = grouped(own, lambda cell: cell.get("seed"))
        pairs = [{str(cell.get("precision")): cell for cell in both} for both in by_seed.values()]
        pairs = [pair for pair in pairs if pair.keys() == times.keys()]
        for pair in pairs:
            smoothed = _smoothed(pair["bf16"])
            target = smoothed[math.ceil(EQUAL_LOSS_SHARE * len(smoothed)) - 1]
            for precision, cell in pair.items():
                steps = _steps_to(cell, target)
                times[precision] += math.inf if steps is None else steps * known(cell, "train_time")
        if not pairs:
            continue
        if math.isinf(times["fp8"]):
            own_text = say("{} in FP8 does not reach the loss of bf16", "{} 的 FP8 训练未达到 bf16 的损失", size)
        else:
            own_text = say(
                "{} in FP8 reaches the loss of bf16 in {} of its time",
                "{} 的 FP8 训练达到同样损失所用时间为 bf16 的 {}",
                *(size, percent(times["fp8"] / times["bf16"], 0)),
            )
        said = together(said, own_text)
    return said


def _spread(cells: Cells) -> Text | None:
    """Compare the mean difference of the precisions with the spread of bf16's seeds."""
    said = None
    for own in grouped(having(cells, "loss"), lambda cell: str(cell.get("size"))).values():
        size = size_of(own[0])
        finals = {
            precision: {cell.get("seed"): _held_out(cell) for cell in own if cell.get("precision") == precision}
            for precision in ("bf16", "fp8")
        }
        seeds = finals["bf16"].keys() & finals["fp8"].keys()
        if len(seeds) < 2:
            continue
        difference = mean(finals["fp8"][seed] - finals["bf16"][seed] for seed in seeds)
        spread = stdev(finals["bf16"].values())
        side = Text("above", "高") if difference > 0 else Text("below", "低")
        own_text = say(
            "the held-out loss of {} in FP8 is {} {} that of bf16, and seeds of bf16 differ by {} (standard deviation)",
            "{0} 的 FP8 验证损失比 bf16 {2} {1}，bf16 各种子之间相差 {3}（标准差）",
            *(size, f"{abs(difference):.4f}", side, f"{spread:.4f}"),
        )
        said = together(said, own_text)
    return said


FP8_LOSSES = Experiment(
    name="fp8_losses",
    title=Text("What FP8 loses", "FP8 的损失"),
    question=Text("Does training in FP8 reach the loss of bf16?", "FP8 训练能达到 bf16 的损失吗？"),
    grid=_loss_grid,
    instrument=Instrument(
        "fp8_losses", "cs336_systems.experiments.steps.measure_fp8:measure_losses", label=_loss_label
    ),
    tables=_loss_tables,
    charts=_loss_charts,
    findings=(_spread, _time_to_equal_loss),
    group="trust",
    order=84,
)
