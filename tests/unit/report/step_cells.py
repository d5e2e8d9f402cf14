"""Hand-made records of cells that time a training step, and readers of tables, charts and findings."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import GIB, Environment, Record
from cs336_systems.report import sections
from cs336_systems.report.cells import group
from cs336_systems.report.document import Chart, Highlight, Series
from cs336_systems.report.sections import charts_of, findings_of
from cs336_systems.table import Table
from cs336_systems.text import Text
from tests import helpers

GPU = Environment(gpu="H200", gpu_count=1, gpu_memory=140 * GIB, tf32=False, other_gpu_processes=0)
CPU = Environment(cpu="Xeon", cpu_cores=8)
OOM = "oom: needs 64.5 GiB of 24.0 GiB (predicted, not tried)"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
CLEAN = {
    "forward_time": (0.030, 0.031, 0.029),
    "backward_time": (0.060, 0.061, 0.059),
    "optimizer_time": (0.010, 0.010, 0.010),
    "step_time": (0.100, 0.102, 0.098),
    "step_event_time": (0.099, 0.101, 0.097),
    "warmup_time": (0.900, 0.101),
    "flops": (5e12,),
    "peak_flops": (1e14,),
    "peak_memory": (10 * GIB,),
    "predicted_memory": (10.1 * GIB,),
}
"""A step of 100 ms over 4 x 512 tokens at 50 TFLOP/s, half the peak; memory predicted 1% too high."""


def entries(
    experiment: str, config: dict[str, Any], metrics: dict[str, Any], status: str = "ok", environment: Environment = GPU
) -> list[Record]:
    return helpers.entries(experiment, config, metrics, status, environment)


def cell(
    experiment="bench", *, size="small", context=512, vocab=10_000, status="ok", environment=GPU, metrics=None, **run
) -> list[Record]:
    """Records of a cell like CLEAN, with metrics replaced (None: left out) and fields of its configuration."""
    model = model_config(size, context_length=context, vocab_size=vocab)
    config = RunConfig(model=model, size=size, **{"device": "cuda", **run}).to_dict()
    kept = {name: samples for name, samples in {**CLEAN, **(metrics or {})}.items() if samples is not None}
    return entries(experiment, config, kept, status, environment)


def step(seconds: float, **others: Any) -> dict[str, Any]:
    """Metrics of a step that always takes the same time."""
    return {"step_time": (seconds,) * 3, "step_event_time": (seconds,) * 3, **others}


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(*records: Iterable[Record]) -> list[Table]:
    return sections.tables(itertools.chain(*records), catalogue())


def column(table: Table, heading: str) -> list[str]:
    (index,) = [i for i, column in enumerate(table.columns) if column.heading() == heading]
    return [row[index].en if isinstance(row[index], Text) else str(row[index]) for row in table.rows]


def rows(table: Table, *headings: str) -> list[tuple[str, ...]]:
    return list(zip(*(column(table, heading) for heading in headings), strict=True))


def notes(table: Table) -> list[str]:
    return [note.en for note in table.notes]


# -- charts and findings ----------------------------------------------------------------------------------------------


def charts(*records: Iterable[Record]) -> list[Chart]:
    found = [*itertools.chain(*records)]
    return charts_of(catalogue()[found[0].experiment], group(found))


def values(series: Series) -> dict[float | str, float]:
    """The values of a series by x, or by the English name of the bar."""
    return {point.place if isinstance(point.x, Text) else point.x: point.y for point in series.points}


def highlights(*records: Iterable[Record]) -> list[Highlight]:
    found = [*itertools.chain(*records)]
    return catalogue()[found[0].experiment].highlights(group(found))


def large_numbers(*records: Iterable[Record]) -> list[tuple[int, str, str, str]]:
    """Rank and English texts of the results for the first screen; the Chinese must have the same numbers."""
    found = highlights(*records)
    for one in found:
        for text in (one.value, one.what, one.detail):
            assert numbers(text.en) == numbers(text.in_("zh")), text
        assert CHINESE.search(one.what.zh), one
    return [(one.rank, one.value.en, one.what.en, one.detail.en) for one in found]


def trusted(*records: Iterable[Record]) -> str | None:
    found = [*itertools.chain(*records)]
    said = catalogue()[found[0].experiment].trust(group(found))
    assert said is None or numbers(said.en) == numbers(said.zh)
    return said and said.en


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def findings(*records: Iterable[Record]) -> list[Text]:
    found = [*itertools.chain(*records)]
    return findings_of(catalogue()[found[0].experiment], group(found))


def stated(*records: Iterable[Record]) -> list[str]:
    """The findings in English; the Chinese must have the same numbers."""
    found = findings(*records)
    for text in found:
        assert (text.en[-1], text.zh[-1]) == (".", "。")
        assert numbers(text.en) == numbers(text.zh), text
        assert CHINESE.search(text.zh), text
    return [text.en for text in found]
