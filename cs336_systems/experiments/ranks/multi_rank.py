"""Shared by the experiments with several ranks: arrangements, their instrument and grid, titles, notes, findings.

All arrangements of a cell train the same model on the same data in one group of ranks, interleaved one step at a time:
a disturbance of the machine affects all of them. Comparisons are made within a round.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments.spec import Config, Instrument
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import MOST, safely, together
from cs336_systems.report.presentation import Cells, MakeCharts, MakeTables, Sentence
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import setting, titled
from cs336_systems.report.terms import STATUS
from cs336_systems.table import Table, word
from cs336_systems.text import Text, listed, say

Wrapper = Literal["none", "naive", "flat", "overlapped", "bucketed", "fsdp"]
Part = Literal["parameter", "gradient", "optimizer"]
PARTS: tuple[Part, ...] = ("parameter", "gradient", "optimizer")
"""Parts of the training state whose memory is measured."""


@dataclass(frozen=True)
class Arrangement:
    """A wrapper and an optimizer, from this package or from torch."""

    wrapper: Wrapper = "none"
    optimizer: Literal["AdamW", "sharded"] = "AdamW"
    bucket_size_mb: float | None = None
    """Size of a bucket in MiB (`bucketed` only); None: the default size."""
    library: Literal["ours", "torch"] = "ours"
    """The origin of the sharded optimizer where there is one, otherwise of the wrapper."""

    @property
    def name(self) -> str:
        """The variant's name in records, and the row's in tables."""
        if self.bucket_size_mb is not None:
            return f"{_BUCKETED}{self.bucket_size_mb:g}"
        return _NAMES[self]

    @property
    def label(self) -> Text:
        """The arrangement's name in charts and sentences."""
        if self.bucket_size_mb is not None:
            return say("bucketed DDP ({} MB)", "分桶 DDP（{} MB）", f"{self.bucket_size_mb:g}")
        return _LABELS.get(self, Text(self.name))

    @classmethod
    def named(cls, name: str) -> "Arrangement":
        """Return the arrangement that a record or a configuration names."""
        try:
            if name.startswith(_BUCKETED):
                return cls("bucketed", bucket_size_mb=float(name.removeprefix(_BUCKETED)))
            return _BY_NAME[name]
        except (KeyError, ValueError):
            known = ", ".join([*_BY_NAME, f"{_BUCKETED}25"])
            raise UserError(f"unknown arrangement {name!r}; choose from: {known}") from None

    @property
    def sharded_parts(self) -> tuple[Part, ...]:
        """Parts of the training state that are divided by the number of ranks."""
        if self.wrapper == "fsdp":
            return PARTS
        return ("optimizer",) if self.optimizer == "sharded" else ()


NONE = Arrangement()
DDP = Arrangement("bucketed")
TORCH_DDP = Arrangement("bucketed", library="torch")
SHARDED = Arrangement("bucketed", "sharded")
TORCH_ZERO = Arrangement("bucketed", "sharded", library="torch")
FSDP = Arrangement("fsdp")
TORCH_FSDP = Arrangement("fsdp", library="torch")

_BUCKETED = "bucketed "
_NAMES = {
    NONE: "none",
    Arrangement("naive"): "naive",
    Arrangement("flat"): "flat",
    Arrangement("overlapped"): "overlap",
    DDP: "ddp",
    TORCH_DDP: "torch DDP",
    SHARDED: "sharded",
    TORCH_ZERO: "torch ZeRO",
    FSDP: "fsdp",
    TORCH_FSDP: "torch fully_shard",
}
_LABELS = {
    NONE: Text("no wrapper", "不封装"),
    Arrangement("naive"): Text("naive DDP", "朴素 DDP"),
    Arrangement("flat"): Text("flat DDP", "展平 DDP"),
    Arrangement("overlapped"): Text("overlapped DDP", "重叠 DDP"),
    DDP: Text("our DDP", "本项目 DDP"),
    SHARDED: Text("our sharded optimizer", "本项目分片优化器"),
    FSDP: Text("our FSDP", "本项目 FSDP"),
    TORCH_DDP: Text("PyTorch DDP"),
    TORCH_ZERO: Text("PyTorch ZeRO"),
    TORCH_FSDP: Text("PyTorch FSDP"),
}
_BY_NAME = {name: arrangement for arrangement, name in _NAMES.items()}

ARRANGEMENT = Text("arrangement", "方案")
WEIGHT_ERROR = Text("weight error", "权重偏差")

# -- instrument and grid ----------------------------------------------------------------------------------------------


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{', '.join(experiments)} {config['size']}, {config['ranks']} ranks, interleaved"


INTERLEAVED = Instrument(
    name="arrangements",
    measure="cs336_systems.experiments.ranks.measure_ranks:measure_arrangements",
    label=_label,
    label_has_name=False,
)
SMALL_MODEL = {
    "context_length": 64,
    "d_model": 256,
    "d_ff": 1024,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 4000,
}
"""The model of the quick preset and of the slow network."""
SLOW_LINK = [5e-3, 1e8]
"""Seconds and bytes per second: sending the gradients of the small model takes as long as its backward pass."""


def arrangement_grid(
    preset: str, base: RunConfig, arrangements: Iterable[Arrangement], link: list[float] | None = None
) -> Iterable[Config]:
    """Yield two ranks on the CPU or sharing a GPU through Gloo, and with two GPUs also one rank per GPU through NCCL.

    The quick preset and the emulated network (`link`) always run the small model on the CPU.
    """
    small = preset == "quick" or link is not None
    model = model_config("tiny", **SMALL_MODEL) if small else model_config("small")
    run = dataclasses.replace(base, model=model, size="", device="cpu" if small else base.device, warmup_steps=2)
    for backend in ("gloo", "nccl") if run.device_type == "cuda" else ("gloo",):
        # torch 2.11: fully_shard ends in a segmentation fault on CUDA through Gloo.
        crashes = {TORCH_FSDP} if (backend, run.device_type) == ("gloo", "cuda") else set()
        names = [arrangement.name for arrangement in arrangements if arrangement not in crashes]
        own = {"ranks": 2, "backend": backend, "arrangements": names, "link": link}
        yield {**run.to_dict(), **own, "rounds": 5 if preset == "quick" else 9}


# -- cells ------------------------------------------------------------------------------------------------------------


def arrangements_of(cell: CellView) -> list[Arrangement]:
    return [Arrangement.named(name) for name in cell.get("arrangements")]


def paired_steps(one: CellView, base: CellView, compare: Callable[[float, float], float]) -> float | None:
    """Return the median over rounds of a comparison of step times within the round, which cancels common
    disturbances."""
    if "step_time" not in one.metrics or "step_time" not in base.metrics:
        return None
    pairs = zip(one.metrics["step_time"].numbers, base.metrics["step_time"].numbers, strict=True)
    return statistics.median(compare(a, b) for a, b in pairs)


# -- tables and charts ------------------------------------------------------------------------------------------------


def tables_per_cell(*makers: Callable[[CellView], Table]) -> MakeTables:
    """Return the tables of each cell that succeeded, or one table of the failures."""
    return lambda cells: [make(cell) for cell in cells if cell.ok for make in makers] or [failure_table(cells)]


def charts_per_cell(*makers: Callable[[CellView], Chart]) -> MakeCharts:
    return lambda cells: [make(cell) for cell in cells if cell.ok for make in makers]


def failure_table(cells: Cells) -> Table:
    rows = [[cell.verdict] for cell in cells]
    return Table(Text(cells[0].experiment), [word(STATUS)], rows, [remark.text for remark in remarks(cells)])


def cell_title(cell: CellView, what: Text) -> Text:
    size, context, batch = (str(cell.get(name)) for name in ("size", "context_length", "batch_size"))
    on_each = say("batch {} on each rank", "每个 rank 批大小 {}", batch)
    where: list[str | Text] = [cell.machine, _ranks(cell), size, setting("context_length", context), on_each]
    return titled(cell.experiment, _with_network(cell, what), where)


def chart_title(cell: CellView, what: Text) -> Text:
    return say("{}: {}", "{}：{}", what, chart_place(cell))


def chart_place(cell: CellView) -> Text:
    """Return the model, the ranks and their link."""
    ranks, backend = (str(cell.get(name)) for name in ("ranks", "backend"))
    one_gpu = str(cell.get("device")).startswith("cuda") and cell.environment.gpu_count == 1
    shared = say("{} ranks sharing one GPU, {}", "{} 个 rank 共用一块 GPU，{}", ranks, backend)
    where = listed([size_name(cell.get("size")), shared if one_gpu else _ranks(cell)], (", ", "，"))
    return _with_network(cell, where)


def collective_name(name: str) -> Text:
    return Text(name.replace("_", "-"))


def _ranks(cell: CellView) -> Text:
    values = [str(cell.get(name)) for name in ("ranks", "backend", "device")]
    return say("{} ranks, {}, {}", "{} 个 rank，{}，{}", *values)


def _with_network(cell: CellView, said: Text) -> Text:
    """Name the emulated network, where there is one."""
    link = cell.get("link")
    if not link:
        return said
    values = (f"{link[1] / 1e9:g}", f"{link[0] * 1e3:g}")
    return say("{}, emulated network of {} GB/s and {} ms", "{}，模拟 {} GB/s、{} ms 的网络", said, *values)


def gloo_notes(cells: Cells) -> list[Text]:
    if all(cell.get("backend") == "nccl" for cell in cells):
        return []
    note = "Gloo between processes of one machine stands in for a network: these are not GPU-to-GPU numbers"
    return [Text(note, "以一台机器上进程间的 Gloo 代替网络：并非 GPU 之间的通信数字")]


# -- findings ---------------------------------------------------------------------------------------------------------


def per_link(*facts: Callable[[CellView], Text | None]) -> tuple[Sentence, ...]:
    """Return one sentence for each link between the ranks; links between GPUs come first."""

    def sentence(cells: Cells, number: int) -> Text | None:
        fine = sorted((cell for cell in cells if cell.ok), key=lambda cell: cell.get("backend") != "nccl")
        cell = fine[number]
        said = None
        for fact in facts:
            said = together(said, safely(fact, cell))
        return say("{}: {}", "{}：{}", _link(cell), said) if said else None

    return tuple(partial(sentence, number=number) for number in range(MOST))


def _link(cell: CellView) -> Text:
    """Return the name of the link between the ranks; Gloo within one machine must not be taken for a network."""
    backend = str(cell.get("backend"))
    device = "GPU" if str(cell.get("device")).startswith("cuda") else "CPU"
    values = (str(cell.get("ranks")), {"gloo": "Gloo", "nccl": "NCCL"}.get(backend, backend), device)
    said = say("{} ranks through {} ({})", "{} 个 rank，{}（{}）", *values)
    if backend == "gloo":
        said = say("{} ranks of one machine through {} ({})", "单机 {} 个 rank，{}（{}）", *values)
    return say("{}, emulated slow network", "{}，模拟的慢速网络", said) if cell.get("link") else said
