"""Predicted step times of the configurations that `cs336 fit` finds: ms, tokens per second, MFU, days and money."""

from collections.abc import Sequence
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time.on_gpu import SETTINGS, launch_notes, mfu_note, predicted_on, source_notes
from cs336_systems.predict.training_cost import Cost
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say


class Fitting(NamedTuple):
    """A configuration that fits, and its GPU."""

    name: str
    """First column of its row: a size or a GPU."""
    gpu: str
    """The GPU as the user wrote it."""
    config: RunConfig


def step_times(first: Text, where: Text, fitting: Sequence[Fitting], cost: Cost) -> list[Table]:
    """Return the table of predicted times; none if no step is predicted."""
    rows, found = [], []
    for name, gpu, config in fitting:
        if one := predicted_on(config, find_card(gpu)):
            found.append(one)
            rate = one.time.tokens_per_second
            shape = [str(config.model.context_length), str(config.batch_size)]
            rows.append([name, *shape, one.milliseconds, f"{rate:,.0f}", f"{one.mfu:.1%}", *cost.cells(rate)])
    if not rows:
        return []
    columns = [
        word(first),
        Column(Text("context", "上下文")),
        Column(Text("batch")),
        Column(Text("step", "单步"), "ms"),
    ]
    columns += [Column(Text("tokens/s")), Column(Text("MFU")), *cost.columns]
    title = say("predicted time of a step {}", "单步时间预测{}", where)
    peaks = [one.peak for one in found if one.time.config.precision == "fp8"]
    about_mfu = [mfu_note(peaks)] if peaks else []
    return [Table(title, columns, rows, [*source_notes(found), *about_mfu, *launch_notes(found), *cost.notes])]


def missing_times(gpus: Sequence[str], config: RunConfig) -> list[Text]:
    """Return a line on why the time of a step is not predicted; nothing if it is predicted on one of the GPUs."""
    if any(predicted_on(config, find_card(gpu)) for gpu in gpus):
        return []
    change = [f"--{name} {value}" for name, value in SETTINGS.items() if getattr(config, name) != value]
    if config.memory_budget:
        return [Text("step time: not predicted with a memory budget", "单步时间：设有显存预算时不预测")]
    if change:
        return [say("step time: predicted with {}", "单步时间：加上 {} 即可预测", " ".join(change))]
    if not any(map(find_card, gpus)):
        return [
            Text(
                "step time: predicted for a card, such as --gpu h200", "单步时间：给出显卡型号（如 --gpu h200）即可预测"
            )
        ]
    return [
        say(
            "step time: not predicted on {}, whose bandwidth or bf16 rate is not in the table of GPUs",
            "单步时间：{} 的带宽或 bf16 算力不在 GPU 表中，无法预测",
            ", ".join(gpu for gpu in gpus if find_card(gpu)),
        )
    ]
