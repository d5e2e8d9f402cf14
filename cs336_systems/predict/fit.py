"""Predicts which model sizes, context lengths and batch sizes fit on a GPU, in a step and while the model is built."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from cs336_systems.config import COURSE_SIZES, RunConfig, UserError, flag, nearest, without_unit
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.engine_memory import engine_peak
from cs336_systems.predict.fit_times import Fitting, missing_times, step_times
from cs336_systems.predict.gpus import CARDS, card_name, find_card, memory_size
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import budget_bytes, least_peak, most_economical
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.training_cost import CostArguments
from cs336_systems.record import GIB
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, say

CONTEXT_RESERVE = 0.6 * GIB
"""Memory that CUDA takes before the first tensor: its context, its kernels, and the allocator's fragments."""
MODEL_ERROR = 0.02
FAST_ERROR = 0.005
"""Error of the predicted peak of a fast step, all of whose memory is modelled: at most 0.3% was seen on an H200. There
42,624 tokens are the longest context of 2.7B that is predicted to fit; they do, and 128 more do not."""
FIT_MARGIN = 1.03
"""Work is refused only if its predicted peak is this many times the memory: predictions err by up to 2%."""
LARGER_GROUPS = (2, 4)
"""Blocks of a recomputed group that save more memory than one block where activations are large."""
LARGEST_BATCH = 65536
LARGEST_CONTEXT = 2**24
CONTEXT_STEP = 128
"""Step in tokens of the search for the longest context."""
SECOND_GUESS = 8
"""Second number that a search tries, after 1; between smaller numbers rounding hides the slope."""
MOST_DOUBLINGS = 10
"""1,024 GPUs are the most that are named where one is too small."""
LARGEST_GPU = 1024 * GIB
LARGEST_BARE_NUMBER = 512
"""A larger number without a unit is the name of a GPU, such as 3060, and not its memory in GiB."""
CONTEXT_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
CONTEXTS_2026 = tuple(2**power for power in range(8, 15))
"""Contexts of the 2026 handout, which profiles the largest that fits."""


@dataclass(frozen=True)
class FitArguments(CostArguments, ShapeArguments):
    gpu: str = flag("24GiB", "memory, such as 24GiB or 80GB, or a card: 4090, A100, H200, ...; or several: 4090,h100")
    sizes: tuple[str, ...] = flag((), "sizes to try (default: the course's five, or the one shape that is given)")
    context_lengths: tuple[int, ...] = flag((), "context lengths to try (default: 128 ... 4096)")
    batch_size: int = flag(0, "sequences per step (0: find the largest that fits)")
    host_memory: str = flag("", "host memory that a memory budget may use, such as 128GiB (default: any amount)")
    format: str = flag("terminal", "table format", FORMATS)


def gpu_bytes(text: str) -> int:
    """Return the bytes of `24GiB` or `80GB`, or the memory of a named GPU."""
    gpu = find_card(text)
    if gpu is not None and gpu.memory_gib is not None:
        return int(gpu.memory_gib * GIB)
    found = memory_size(text)
    if found and not found[1] and found[0] <= LARGEST_BARE_NUMBER * GIB:
        raise UserError(f"--gpu {text!r} {without_unit(text)}, or a card such as 4090")
    if found and found[1]:
        size = found[0]
        if not 1 <= size <= LARGEST_GPU:
            raise UserError(f"--gpu {text!r}: memory must be above 0 and at most {LARGEST_GPU // GIB} GiB, as in 24GiB")
        return int(size)
    near = nearest(card_name(text), CARDS)
    raise UserError(f"unknown --gpu {text!r}{near}; give its memory, such as 24GiB, or one of: {', '.join(CARDS)}")


def usable_bytes(capacity: float, error: float = MODEL_ERROR) -> float:
    """Return the predicted peak that is safe on a GPU of `capacity` bytes."""
    return (capacity - CONTEXT_RESERVE) / (1 + error)


def margin_note(error: float = MODEL_ERROR) -> Text:
    """Say how much of a GPU's memory is not usable."""
    return say(
        "{} GiB are left to CUDA itself and {} to the model's error",
        "为 CUDA 自身预留 {} GiB，为模型误差预留 {}",
        f"{CONTEXT_RESERVE / GIB:.1f}",
        f"{100 * error:g}%",
    )


def reference_notes(config: RunConfig) -> list[Text]:
    """Say that a training step is that of `bench`, if none of the settings that `train` has on a GPU was asked for."""
    asked = config.model_factory or config.attention != "reference" or config.fast != "off" or config.memory_budget
    if config.mode != "train-step" or asked:
        return []
    return [
        Text(
            "the reference step, as `cs336 bench` runs it; `cs336 train` on a GPU has --attention auto --fast on",
            "为 `cs336 bench` 所测的参考实现的一步；`cs336 train` 在 GPU 上默认使用 --attention auto --fast on",
        )
    ]


@lru_cache(maxsize=4096)
def step_peak(config: RunConfig, batch: int, host_limit: float = math.inf) -> int:
    """Return the peak bytes of a step with this batch; with a memory budget, of its most economical plan."""
    config = dataclasses.replace(config, batch_size=batch)
    return least_peak(config, host_limit) if config.memory_budget else estimate(config).peak


def largest_batch(config: RunConfig, budget: float, host_limit: float = math.inf) -> int:
    """Return the largest batch, up to LARGEST_BATCH, whose peak is within `budget` bytes; 0 if one sequence is not."""
    return _largest(lambda batch: step_peak(config, batch, host_limit), budget, LARGEST_BATCH)


def longest_context(config: RunConfig, budget: float, host_limit: float = math.inf) -> int:
    """Return the longest context, in steps of CONTEXT_STEP, with which a step of this batch and building the model are
    within `budget` bytes; 0 if the shortest is not."""

    def peak(steps: int) -> int:
        longer = _with_context(config, CONTEXT_STEP * steps)
        return max(step_peak(longer, config.batch_size, host_limit), building_peak(longer).peak)

    return CONTEXT_STEP * _largest(peak, budget, LARGEST_CONTEXT // CONTEXT_STEP)


def _largest(peak: Callable[[int], int], budget: float, most: int) -> int:
    """Return the largest number, up to `most`, whose peak is within `budget` bytes; 0 if that of 1 is not.

    The peak is close to a straight line, so interpolation finds it in a few predictions.
    """
    first = peak(1)
    if first > budget:
        return 0
    low, low_peak, guess = 1, first, SECOND_GUESS
    while True:
        if (found := peak(guess)) > budget:
            high, high_peak = guess, found
            break
        low, low_peak = guess, found
        if low == most:
            return low
        slope = max((low_peak - first) / (low - 1), 1.0)
        guess = min(max(low + int((budget - low_peak) / slope) + 1, low + 1), most)
    rounds = 0
    while high - low > 1:
        rounds += 1
        inside = int((budget - low_peak) * (high - low) / (high_peak - low_peak))
        guess = (low + high) // 2 if rounds % 3 == 0 else min(max(low + inside, low + 1), high - 1)
        if (found := peak(guess)) > budget:
            high, high_peak = guess, found
        else:
            low, low_peak = guess, found
    return low


def largest_contexts(config: RunConfig, budget: float, count: int = 3) -> list[int]:
    """Return `count` contexts of `CONTEXTS_2026`: the largest whose peak is within `budget` bytes and those below it,
    or the smallest ones if too few are within it."""
    fitting = sum(1 for _ in takewhile(lambda context: _peak_at(config, context) <= budget, CONTEXTS_2026))
    last = max(fitting, count)
    return list(CONTEXTS_2026[last - count : last])


def _peak_at(config: RunConfig, context: int) -> int:
    return step_peak(_with_context(config, context), config.batch_size)


def _with_context(config: RunConfig, context: int) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, context_length=context))


class Cell(NamedTuple):
    """The batch of one configuration that fits, and its peak."""

    config: RunConfig
    """The configuration with the batch that fits, or with the smallest batch that was tried."""
    batch: int
    """0 if none fits."""
    peak: int
    """Peak bytes of the step or of building the model, whichever is larger."""
    is_building: bool
    """True if building the model needs more memory than a step."""

    @classmethod
    def of(cls, config: RunConfig, budget: float, batch: int = 0, host_limit: float = math.inf) -> "Cell":
        """Return the largest batch that fits; if `batch` is given, check that one only."""
        building = building_peak(config).peak
        if batch:
            fits = batch if step_peak(config, batch, host_limit) <= budget else 0
        else:
            fits = largest_batch(config, budget, host_limit) if building <= budget else 0
        chosen = dataclasses.replace(config, batch_size=fits or batch or 1)
        step = step_peak(config, chosen.batch_size, host_limit)
        return cls(chosen, fits if building <= budget else 0, max(step, building), building > step)

    def __str__(self) -> str:
        return f"{self.batch or '-'} ({self.peak / GIB:.1f}{'*' if self.is_building else ''})"


class Row(NamedTuple):
    name: str
    gpu: str
    cells: list[Cell]
    longest: int | None = None
    """The longest context that fits with the requested batch, or with one sequence; only for the fast step."""


def fit_tables(arguments: FitArguments) -> list[Table]:
    """Return a table for each GPU, followed by predicted step times; for one shape on several GPUs, one table with a
    row for each GPU."""
    if arguments.batch_size < 0:
        raise UserError(f"--batch_size must be at least 0 (0: the largest that fits), got {arguments.batch_size}")
    names = [name.strip() for name in arguments.gpu.split(",") if name.strip()] or [arguments.gpu]
    gpus = {name: gpu_bytes(name) for name in names}
    if len(gpus) == 1 or len(_sizes(arguments)) > 1:
        return [table for name, capacity in gpus.items() for table in _tables(arguments, name, capacity)]
    rows = []
    for gpu, capacity in gpus.items():
        name = f"{gpu}, {capacity / GIB:.1f} GiB" if find_card(gpu) else gpu
        rows.append(_row(arguments, gpu, "", safe_peak(capacity, arguments))._replace(name=name))
    shape = rows[0].cells[0].config
    return _rendered(arguments, Text("GPU"), rows, say("of {}", "{}", shape.size), [])


def _sizes(arguments: FitArguments) -> tuple[str, ...]:
    """Return the sizes to try; an empty name stands for the shape given by flags."""
    return arguments.sizes or (("",) if arguments.has_shape else COURSE_SIZES)


def _contexts(arguments: FitArguments) -> tuple[int, ...]:
    given = (arguments.context_length,) if arguments.context_length is not None else CONTEXT_LENGTHS
    return arguments.context_lengths or given


def _model_error(settings: FitArguments | RunConfig) -> float:
    """Return the prediction error to allow for; with a memory budget the same as that of a plan."""
    return FAST_ERROR if settings.fast == "on" and not settings.memory_budget else MODEL_ERROR


def safe_peak(capacity: float, settings: FitArguments | RunConfig) -> float:
    """Return the largest predicted peak that is safe with these settings."""
    return usable_bytes(capacity, _model_error(settings))


def _row(arguments: FitArguments, gpu: str, size: str, budget: float) -> Row:
    host_limit, own = _host_limit(arguments), {"size": size} if size else {}
    configs = [
        arguments.predicted_config(**own, context_length=context, batch_size=arguments.batch_size or 1)
        for context in _contexts(arguments)
    ]
    if arguments.memory_budget:  # which the configurations have checked
        budget = min(budget, budget_bytes(arguments.memory_budget, budget))
    cells = [Cell.of(config, budget, arguments.batch_size, host_limit) for config in configs]
    longest = longest_context(configs[-1], budget, host_limit) if arguments.fast != "off" else None
    return Row(cells[0].config.size, gpu, cells, longest)


def _host_limit(arguments: FitArguments) -> float:
    if not arguments.host_memory:
        return math.inf
    if not arguments.memory_budget:
        raise UserError("--host_memory is used by plans only; add --memory_budget auto")
    found = memory_size(arguments.host_memory)
    if found is None or not found[1]:
        problem = without_unit(arguments.host_memory) or "is not a size; use one such as 128GiB"
        raise UserError(f"--host_memory {arguments.host_memory!r} {problem}")
    return found[0]


def _tables(arguments: FitArguments, gpu: str, capacity: int) -> list[Table]:
    budget = safe_peak(capacity, arguments)
    rows = [_row(arguments, gpu, size, budget) for size in _sizes(arguments)]
    where = say("on {} GiB", "（{} GiB 显存）", f"{capacity / GIB:.1f}")
    if find_card(gpu):
        where = say("on {}, {} GiB", "（{}，{} GiB 显存）", gpu, f"{capacity / GIB:.1f}")
    failing = [next((cell for cell in row.cells if not cell.batch), None) for row in rows]
    notes = _suggestions([cell.config for cell in failing if cell is not None], capacity)
    if not any(failing) and not arguments.batch_size:
        notes = _larger_batches([cell for row in rows for cell in row.cells], capacity)
    return _rendered(arguments, Text("size", "规模"), rows, where, notes)


def _rendered(arguments: FitArguments, first: Text, rows: list[Row], where: Text, notes: list[Text]) -> list[Table]:
    title = say(
        "{} (peak GiB) {}: {}, {}, attention {}, checkpoint {}{}{}",
        "{}（峰值 GiB）{}：{}，{}，注意力 {}，激活重计算 {}{}{}",
        Text("batch") if arguments.batch_size else Text("largest batch", "最大 batch"),
        where,
        arguments.mode,
        arguments.precision,
        arguments.attention,
        str(arguments.checkpoint_blocks) if arguments.checkpoint_blocks else Text("off", "关闭"),
        Text("") if arguments.fast == "off" else say(", fast {}", "，快速步 {}", arguments.fast),
        say(", memory budget {}", "，显存预算 {}", arguments.memory_budget) if arguments.memory_budget else Text(""),
    )
    contexts = [say("context {}", "上下文 {}", str(context)) for context in _contexts(arguments)]
    columns = [word(first), *(Column(heading) for heading in contexts)]
    cells = [[row.name, *map(str, row.cells)] for row in rows]
    if rows[0].longest is not None:
        columns.append(Column(say("longest, batch {}", "最长，batch {}", str(arguments.batch_size or 1))))
        cells = [[*texts, f"{row.longest:,}" if row.longest else "-"] for texts, row in zip(cells, rows, strict=True)]
    planned = _plan_notes(rows, _host_limit(arguments)) if arguments.memory_budget else []
    own = _notes(rows, first, _model_error(arguments), asked=arguments.batch_size > 0)
    untimed = missing_times([row.gpu for row in rows], rows[0].cells[0].config)
    fitting = [Fitting(row.name, row.gpu, cell.config) for row in rows for cell in row.cells if cell.batch]
    times = step_times(first, where, fitting, arguments.cost())
    return [Table(title, columns, cells, [*own, *planned, *untimed, *notes]), *times]


def _plan_notes(rows: list[Row], host_limit: float) -> list[Text]:
    """Say that peaks are those of plans, and how much host memory these take."""
    fitting = [cell.config for row in rows for cell in row.cells if cell.batch]
    host = [most_economical(config, host_limit).host_bytes for config in fitting]
    return [
        say(
            "planned: peaks are those of the most economical plan, with up to {} GiB of activations in host memory; "
            "a step takes the fastest plan that fits",
            "已规划：峰值为最省显存的方案的峰值，最多有 {} GiB 激活位于主机内存；训练时采用放得下的最快方案",
            f"{max(host, default=0) / GIB:.1f}",
        )
    ]


def _notes(rows: list[Row], first: Text, error: float, *, asked: bool) -> Iterator[Text]:
    cells = [cell for row in rows for cell in row.cells]
    fitting = [cell.config for cell in cells if cell.batch]
    best = max(fitting, key=lambda config: (config.model.parameters, config.model.context_length), default=None)
    if best is None:
        yield Text("none of these fits", "以上配置都放不下")
    elif first.en == "size":
        yield say(
            "largest model that fits: {}, up to context {} with batch {}",
            "放得下的最大模型：{}，上下文可到 {}，batch {}",
            best.size,
            str(best.model.context_length),
            str(best.batch_size),
        )
    yield (
        Text("`-`: does not fit; the figure is what it would need", "`-`：放不下；括号内是所需的显存")
        if asked
        else Text(
            "`-`: does not fit even with one sequence; the figure is what that would need",
            "`-`：batch 为 1 也放不下；括号内是此时所需的显存",
        )
    )
    if any(cell.is_building for cell in cells):
        yield Text(
            "`*`: building the model is the peak: its largest weight in fp32 beside the packed optimizer's memory",
            "`*`：峰值出现在构建模型时：最大的 fp32 权重与打包优化器的内存同时存在",
        )
    yield margin_note(error)
    yield from reference_notes(cells[0].config)
    if error == FAST_ERROR:
        yield Text(
            "the last few GiB need PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments",
            "用到最后几 GiB 时须设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True，以免显存碎片",
        )


_CHANGES: tuple[dict, ...] = (
    {"attention": "auto"},
    {"attention": "auto", "precision": "bf16"},
    {"attention": "auto", "precision": "bf16", "fast": "on"},
    {"attention": "auto", "precision": "bf16", "fast": "on", "memory_budget": "auto"},
    {"attention": "auto", "checkpoint_blocks": 1},
    {"attention": "auto", "precision": "bf16", "checkpoint_blocks": 1},
    {"attention": "auto", "precision": "bf16", "fast": "on", "checkpoint_blocks": 1},
    {"attention": "auto", "precision": "bf16", "fast": "on", "optimizer_state": "bf16"},
    {"attention": "auto", "precision": "bf16", "fast": "on", "optimizer_state": "bf16", "memory_budget": "auto"},
)
"""Flags with which more fits, the cheapest in time first; those that change the numerics of the update last."""


def _suggestions(failing: list[RunConfig], capacity: float) -> list[Text]:
    """Return the flags that make the first configuration that can fit, fit. Where these change the numerics of the
    update, or there are none, also return the number of GPUs on which the first configuration fits."""
    tried = [(config, change) for config in failing for change in _changes(config)]
    for config, change in sorted(tried, key=lambda own: "optimizer_state" in own[1]):
        try:
            changed = dataclasses.replace(config, batch_size=1, **change)
        except UserError:  # a change that this configuration does not support
            continue
        cell = Cell.of(changed, safe_peak(capacity, changed))
        if cell.batch:
            said = say(
                "{} at context {} would fit with {} (batch {})",
                "{}、上下文 {} 加上 {} 即可放下（batch {}）",
                config.size,
                str(config.model.context_length),
                _flags(change),
                str(cell.batch),
            )
            return [said, *(_on_more_gpus(config, capacity) if "optimizer_state" in change else [])]
    return _on_more_gpus(failing[0], capacity) if failing else []


def _changes(config: RunConfig) -> Iterator[dict]:
    """Yield the changes without what a configuration has already. One in FP8 keeps its precision if it can, and one
    with another attention than the reference keeps that, but for a memory budget."""
    for kept in ({"precision"}, set()) if config.precision == "fp8" else (set(),):
        for change in _CHANGES:
            asked = set() if config.attention == "reference" or "memory_budget" in change else {"attention"}
            left = {name: value for name, value in change.items() if name not in kept | asked}
            yield {name: value for name, value in left.items() if getattr(config, name) != value}


def _on_more_gpus(config: RunConfig, capacity: float) -> list[Text]:
    """Return the number of GPUs, a power of two, on which ZeRO-3 fits with the settings that `plan` has without
    flags."""
    if config.mode != "train-step":
        return []
    plain = {"precision": "bf16", "attention": "auto", "checkpoint_blocks": 1, "fast": "kernels,loss"}
    others = {"batch_size": 1, "memory_budget": "", "optimizer_state": "fp32", "update_in_backward": False}
    run = dataclasses.replace(config, **plain, **others)
    for gpus in (2**power for power in range(1, MOST_DOUBLINGS + 1)):
        if engine_peak(run, Mesh(dp_shard=gpus), 1, 1) <= usable_bytes(capacity):
            return [
                say(
                    "{} at context {} would fit on {} GPUs by ZeRO-3: see cs336 plan --gpus {}",
                    "{}、上下文 {} 用 {} 张 GPU 的 ZeRO-3 即可放下：见 cs336 plan --gpus {}",
                    *(config.size, str(config.model.context_length), str(gpus), str(gpus)),
                )
            ]
    return []


def _larger_batches(fitting: list[Cell], capacity: float) -> list[Text]:
    """Return the flags of the fast step, and the batch that it allows, for the largest model at its longest context."""
    best = max(fitting, key=lambda cell: (cell.config.model.parameters, cell.config.model.context_length))
    config = best.config
    faster = {"precision": "bf16", "attention": "auto", "fast": "on"}
    change: dict = {name: value for name, value in faster.items() if getattr(config, name) != value}
    if config.fast != "off" or config.mode != "train-step" or config.memory_budget:
        return []
    try:
        changed = dataclasses.replace(config, **change)
        larger = Cell.of(changed, safe_peak(capacity, changed))
    except UserError:  # settings that the fast step does not support
        return []
    if larger.batch <= best.batch:
        return []
    return [
        say(
            "{} at context {}: batch {} -> {} with {}",
            "{}、上下文 {}：batch {} -> {}，加上 {}",
            config.size,
            str(config.model.context_length),
            str(best.batch),
            str(larger.batch),
            _flags(change),
        )
    ]


def _flags(change: dict) -> str:
    return " ".join(f"--{name} {value}" for name, value in change.items())
