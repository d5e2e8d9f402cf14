"""Attention by sequence length in the form of the FlashAttention papers: forward and backward, by head dim and mask."""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    CAUSAL,
    ERRORS,
    MODULE,
    TOKENS,
    Contest,
    Size,
    attention_config,
    contestants,
    label_shape,
    length_name,
    rates_chart,
    side_by_side,
    time_quantity,
    views,
)
from cs336_systems.experiments.attention.rivals import MEDIANS, leads_over_fastest
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_gpu
from cs336_systems.report.cells import grouped
from cs336_systems.report.document import Chart
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import varying
from cs336_systems.report.terms import BACKWARD, FORWARD
from cs336_systems.table import Table
from cs336_systems.text import Text, say

PASSES = ("forward_time", "backward_time")
WIDTH = 2048
"""Heads times head dim, as in the papers."""
TOKENS_OF_BATCH = 16384
"""Sequences times their length, as in the papers."""


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("attention_lengths", base, "the rivals are GPU kernels")
    names = [*(name for name in contestants() if name != "flex"), "sdpa_efficient"]
    lengths = (2048,) if preset == "quick" else (512, 1024, 2048, 4096, 8192, 16384)
    for dim, is_causal, length in product((64, 128), (True, False), lengths):
        size = Size(TOKENS_OF_BATCH // length, WIDTH // dim, length, dim)
        # As many rounds as names, twice if they are odd, so that each follows every other equally often.
        rounds = len(names) * (1 + len(names) % 2)
        timing = {"warmup_ms": 10, "rep_ms": 30, "rounds": rounds, "phases": ["forward", "backward"]}
        yield attention_config(base, size, "bf16", is_causal=is_causal, implementations=names, **timing)


def tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("head_dim", "is_causal", "batch_size", "heads", "seq_len"))
    times = [time_quantity(what, metric) for what, metric in zip((FORWARD, BACKWARD), PASSES, strict=True)]
    return side_by_side(cells, shown, [MEDIANS], with_lead=True, quantities=(*times, ERRORS))


def charts(cells: Cells) -> list[Chart]:
    """Draw each head dim and mask, forward and backward apart."""
    fine = sorted((cell for cell in cells if cell.ok), key=lambda cell: cell.get("seq_len"))
    found = []
    for (dim, is_causal), own in grouped(fine, lambda cell: (cell.get("head_dim"), cell.get("is_causal"))).items():
        mask = CAUSAL if is_causal else Text("no mask", "无掩码")
        where = say("d {}, {}", "d {}，{}", str(dim), mask)
        for metric in PASSES:
            contests = [Contest(Text(length_name(cell.get("seq_len"))), views(cell), metric) for cell in own]
            found.append(rates_chart(contests, where, TOKENS, MEDIANS))
    return found


def forward_lead(cells: Cells) -> Text | None:
    return leads_over_fastest(cells, PASSES[0], FORWARD)


def backward_lead(cells: Cells) -> Text | None:
    return leads_over_fastest(cells, PASSES[1], BACKWARD)


ATTENTION_LENGTHS = Experiment(
    name="attention_lengths",
    title=Text("Attention by sequence length", "不同序列长度下的注意力"),
    question=Text(
        "How fast is attention in the setting of the FlashAttention papers?",
        "在 FlashAttention 论文的设置下，注意力有多快？",
    ),
    instrument=Instrument("attention_rivals", f"{MODULE}:measure_rivals", label=label_shape),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(forward_lead, backward_lead),
    group="attention",
    statistic="median",
    order=5,
)
