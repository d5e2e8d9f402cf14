"""Attention inside packed documents, against other kernels for them and against padding."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    BOTH,
    ERRORS,
    OURS,
    Contest,
    Quantity,
    Size,
    attention_config,
    contestants,
    lead,
    length_name,
    medians,
    rate,
    rates_chart,
    side_by_side,
    time_quantity,
    views,
)
from cs336_systems.experiments.attention.rivals import FASTEST_RIVAL, MEDIANS
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_gpu
from cs336_systems.predict.attention_model import AttentionShape
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart
from cs336_systems.report.names import attention_name
from cs336_systems.report.phrases import compared, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import tflops, varying
from cs336_systems.report.terms import FORWARD, FORWARD_AND_BACKWARD
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

MODULE = "cs336_systems.experiments.attention.measure_varlen"
TOKENS, HEADS = 32768, 16
MIXES = {
    "short": Text("short documents", "短文档"),
    "mixed": Text("documents around 1k", "1k 上下的文档"),
    "giant": Text("one of 16k and short ones", "一篇 16k 加短文档"),
}
"""Mix of document lengths -> its name."""
CONVENTION = Text(
    "FLOPs of visible pairs: 4 x d x heads for each pair of a query and a key it sees, 3.5 times that with backward",
    "FLOPs 只计可见的配对：每对 query 与其可见的 key 计 4 x d x 头数，含反向为其 3.5 倍",
)


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("attention_varlen", base, "the rivals are GPU kernels")
    rivals = [name for name in contestants() if name in (*OURS, "flash_attention_4")]
    names = [*rivals, "torch_varlen", "padded"]
    mixes = ("mixed",) if preset == "quick" else tuple(MIXES)
    for mix, dim in product(mixes, (64,) if preset == "quick" else (64, 128)):
        # As many rounds as names, twice if they are odd, so that each follows every other equally often.
        timing: dict[str, Any] = {"warmup_ms": 10, "rep_ms": 30, "rounds": len(names) * (1 + len(names) % 2)}
        size = Size(1, HEADS, TOKENS, dim)
        yield attention_config(base, size, "bf16", mix=mix, implementations=names, **timing)


def label_mix(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{AttentionShape.of(config)} {config['mix']} interleaved"


PASSES = ((FORWARD_AND_BACKWARD, BOTH), (FORWARD, "forward_time"))
RATES = tuple(
    Quantity(say("{} (TFLOP/s)", "{}（TFLOP/s）", what), partial(rate, metric=metric), tflops, max)
    for what, metric in PASSES
)


def tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("mix", "head_dim"))
    times = [time_quantity(what, metric) for what, metric in PASSES]
    notes = [MEDIANS, CONVENTION, *_documents(cells)]
    return side_by_side(cells, shown, notes, with_lead=True, quantities=(*times, *RATES, ERRORS))


def _documents(cells: Cells) -> list[Text]:
    """State what each mix consists of."""
    found = {}
    for cell in (cell for cell in cells if cell.ok):
        count, longest = cell.value("documents"), cell.value("longest_document")
        if count and longest:
            texts = (str(cell.get("mix")), f"{count:.0f}", str(cell.get("seq_len")), f"{longest:.0f}")
            found[cell.get("mix")] = say(
                "{}: {} documents in {} tokens, the longest {}", "{}：{} 篇文档，共 {} 个 token，最长 {}", *texts
            )
    return list(found.values())


def charts(cells: Cells) -> list[Chart]:
    """Draw forward, and forward and backward, a group of bars for each mix and head dim."""
    fine = [cell for cell in cells if cell.ok]
    found = []
    for (tokens, precision), own in grouped(fine, lambda cell: (cell.get("seq_len"), cell.get("precision"))).items():
        where = say(
            "packed documents, {} tokens, {}", "打包文档，{} token，{}", length_name(tokens), Text(str(precision))
        )
        for metric in ("forward_time", BOTH):
            contests = [Contest(_name(cell), views(cell), metric) for cell in own]
            found.append(rates_chart(contests, where, AXIS, MEDIANS, CONVENTION))
    return found


AXIS = Text("documents, head dim", "文档，头维度")


def _name(cell: CellView) -> Text:
    mix = str(cell.get("mix"))
    return listed([MIXES.get(mix) or Text(mix), f"d {cell.get('head_dim')}"], (", ", "，"))


def _leads(cells: Cells, metric: str, rival: str | None = None) -> list[tuple[float, Text]]:
    """Return the lead of our fastest kernel over a rival, or over the fastest rival, in each cell that has both."""
    found = []
    for cell in (cell for cell in cells if cell.ok):
        times = medians(cell, metric)
        kept = {name: time for name, time in times.items() if rival is None or name in (*OURS, rival)}
        if own := lead(kept):
            found.append((own.ratio, _name(cell)))
    return found


def against_fastest(cells: Cells) -> Text | None:
    found = _leads(cells, BOTH)
    if not found:
        return None
    said = compared(Text("our attention inside packed documents", "本项目的打包文档注意力"), FASTEST_RIVAL, found)
    forward = _leads(cells, "forward_time")
    return together(said, compared(Text("forward alone", "单独前向"), FASTEST_RIVAL, forward)) if forward else said


def against_padding(cells: Cells) -> Text | None:
    found = _leads(cells, BOTH, "padded")
    if not found:
        return None
    return compared(Text("packing", "打包"), Text("padding to the longest document", "按最长文档填充"), found)


def of_our_kernels(cells: Cells) -> Text | None:
    """Compare our two kernels."""
    hopper, portable = "flash_hopper", "flash_triton"
    found = []
    for cell in (cell for cell in cells if cell.ok):
        times = medians(cell, BOTH)
        if hopper in times and portable in times:
            found.append((times[portable] / times[hopper], _name(cell)))
    return compared(attention_name(hopper), attention_name(portable), found) if found else None


ATTENTION_VARLEN = Experiment(
    name="attention_varlen",
    title=Text("Attention inside packed documents", "打包文档内的注意力"),
    question=Text(
        "How fast is attention inside packed documents of several lengths?", "文档长短不一并打包时，注意力有多快？"
    ),
    instrument=Instrument("attention_varlen", f"{MODULE}:measure_varlen", label=label_mix),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(against_fastest, against_padding, of_our_kernels),
    group="attention",
    statistic="median",
    order=35,
)
