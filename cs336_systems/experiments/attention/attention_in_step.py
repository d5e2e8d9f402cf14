"""attention_step: what a faster attention gives to a training step."""

import dataclasses
from collections.abc import Iterable, Sequence

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    OURS,
    Row,
    failure_notes,
    fastest,
    medians,
    side_by_side,
    time_quantity,
    views,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, run_config
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import together
from cs336_systems.report.points import measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import keys, ms, remarks_on, row_name, varying
from cs336_systems.report.terms import MS
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

STEP_TIME = "step_time"


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Long contexts: the longer the context, the larger attention's share of a step."""
    on_cuda = base.device_type == "cuda"
    names = ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn"] if on_cuda else ["flash_torch", "sdpa"]
    run = dataclasses.replace(base, precision="bf16" if on_cuda else base.precision, batch_size=1)
    sizes: tuple[tuple[str, int | None], ...] = (("small", 4096), ("large", 4096), ("2.7B", 4096))
    if preset == "quick":
        sizes = (("small", 1024),) if on_cuda else (("tiny", None),)
    for size, context in sizes:
        # A multiple of the number of names: each then follows each other equally often.
        yield {**run_config(run, size, context), "implementations": names, "rounds": 2 * len(names)}


def tables(cells: Cells) -> list[Table]:
    """Median step times; the notes have the extremes, which show how far to trust a lead."""
    shown = varying(cells, always=("size", "context_length"))
    rows = [Row(keys(cell, shown), views(cell)) for cell in cells]
    notes = [
        Text(
            "medians of steps of one model on one batch, its attention implementations interleaved",
            "同一模型、同一批数据上各步的中位数，各注意力实现交替测量",
        ),
        *(_extremes(cell, row_name(cell, shown)) for cell in cells if cell.ok),
        *failure_notes(rows, shown),
        *remarks_on(cells, shown),
    ]
    step = time_quantity(Text("training step", "训练步"), STEP_TIME, ms)
    with_lead = any(name in OURS for row in rows for name in row.views)
    return side_by_side(cells, shown, rows, notes, with_lead=with_lead, quantities=(step,))


def _extremes(cell: CellView, name: Text) -> Text:
    found = {name: view.statistics(STEP_TIME) for name, view in views(cell).items()}
    each = ", ".join(f"{name} {ms(stats.min)} - {ms(stats.max)}" for name, stats in found.items() if stats)
    return say("minimum and maximum in ms, {}: {}", "最小与最大（ms），{}：{}", name, each)


def charts(cells: Cells) -> list[Chart]:
    names = dict.fromkeys(name for cell in cells if cell.ok for name in views(cell))
    series = [
        series_of(
            name,
            (measured(c.variant(name), STEP_TIME, f"{c.get('size')}, {c.get('context_length')}") for c in cells),
        )
        for name in names
    ]
    title = Text("A training step, attention implementations interleaved", "训练步，各注意力实现交替测量")
    return [Chart("", title, "bars", Text("size, context", "规模，上下文"), MS, series, horizontal=True)]


def speed(cells: Cells) -> Text | None:
    """Step times of the last cell: that of our fastest kernel, and those of its rivals."""
    fine = [cell for cell in cells if cell.ok and fastest(medians(cell, STEP_TIME), ours=True)]
    if not fine:
        return None
    cell = fine[-1]
    times = medians(cell, STEP_TIME)
    ours = fastest(times, ours=True)
    assert ours is not None
    each = [
        say(
            "{} with {} ({}x, ahead of it in {} of {} rounds)",
            "用 {1} 为 {0}（{2} 倍，{4} 轮中有 {3} 轮更快）",
            *(ms(seconds), name, f"{seconds / times[ours]:.2f}"),
            *(str(rounds_ahead(cell, ours, name)), str(cell.config["rounds"])),
        )
        for name, seconds in times.items()
        if name not in OURS
    ]
    said = say(
        "{}, context {}: a step takes {} ms with {}",
        "{0}、上下文 {1}：用 {3} 时一步 {2} ms",
        *(str(cell.get("size")), str(cell.get("context_length")), ms(times[ours]), ours),
    )
    return together(said, listed(each)) if each else said


def rounds_ahead(cell: CellView, ours: str, other: str) -> int:
    """The number of rounds in which ours is faster.

    Clocks and the host drift from round to round, within one round for both alike: this can separate two
    implementations whose step times, taken together, overlap.
    """
    rounds = cell.config["rounds"]
    steps = len(cell.variant(ours).metrics[STEP_TIME].samples) // rounds
    mine, theirs = (_sums(cell.variant(name).samples(STEP_TIME), steps) for name in (ours, other))
    if len(mine) != rounds:
        raise ValueError(f"{rounds} rounds, and samples for {len(mine)}")
    return sum(a < b for a, b in zip(mine, theirs, strict=True))


def _sums(samples: Sequence[float], width: int) -> list[float]:
    """The sums of `width` consecutive samples each: the steps of one round."""
    return [sum(samples[start : start + width]) for start in range(0, len(samples), width)]


ATTENTION_STEP = Experiment(
    name="attention_step",
    title=Text("A training step by its attention", "不同注意力下的训练步"),
    question=Text("What does a faster attention give to a training step?", "更快的注意力能给训练步带来多少？"),
    instrument=Instrument(
        "attention_step",
        "cs336_systems.experiments.attention.measure_attention_step:measure_attention_step",
        label=label_step,
    ),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(speed,),
    statistic="median",
    order=50,
)
