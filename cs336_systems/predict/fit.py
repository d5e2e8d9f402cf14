"""Predicts which model sizes, context lengths and batch sizes fit on a GPU."""

import dataclasses
import re
from dataclasses import dataclass
from itertools import product

from cs336_systems.config import COURSE_SIZES, RunConfig, UserError, flag, flag_like, model_config
from cs336_systems.predict.gpus import CARDS, find_card
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import GIB
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, say

CONTEXT_RESERVE = 0.6 * GIB
"""Memory that CUDA takes before the first tensor: its context, its kernels, and the allocator's fragments."""
MODEL_ERROR = 0.02
LARGEST_BATCH = 65536
LARGEST_GPU = 1024 * GIB
CONTEXT_LENGTHS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class FitArguments:
    gpu: str = flag("24GiB", "memory, such as 24GiB or 80GB, or a card: 4090, A100, H200, ...")
    sizes: tuple[str, ...] = flag((), "sizes to try (default: the course's five)")
    context_lengths: tuple[int, ...] = flag((), "context lengths to try (default: 128 ... 4096)")
    mode: str = flag_like(RunConfig, "mode")
    precision: str = flag_like(RunConfig, "precision")
    attention: str = flag_like(RunConfig, "attention")
    checkpoint_blocks: int = flag_like(RunConfig, "checkpoint_blocks")
    format: str = flag("terminal", "table format", FORMATS)


def gpu_bytes(text: str) -> int:
    """Return the bytes of `24GiB`, `80GB`, a bare number of GiB, or a card's name."""
    gpu = find_card(text)
    if gpu is not None and gpu.memory_gib is not None:
        return int(gpu.memory_gib * GIB)
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|g)?\s*", text.lower()):
        size = float(match[1]) * (10**9 if match[2] == "gb" else GIB)
        if not 1 <= size <= LARGEST_GPU:  # 4070 is a card that is not in the table, not four thousand GiB
            raise UserError(f"--gpu {text!r}: memory must be above 0 and at most {LARGEST_GPU // GIB} GiB, as in 24GiB")
        return int(size)
    raise UserError(f"unknown --gpu {text!r}; give its memory, such as 24GiB, or one of: {', '.join(CARDS)}")


def usable_bytes(capacity: float) -> float:
    """Return the predicted peak that is safe on a GPU of `capacity` bytes."""
    return (capacity - CONTEXT_RESERVE) / (1 + MODEL_ERROR)


def largest_batch(config: RunConfig, budget: float) -> int:
    """Return the largest batch, up to LARGEST_BATCH, whose peak is within `budget` bytes; 0 if one sequence is not."""

    def fits(batch: int) -> bool:
        return estimate(dataclasses.replace(config, batch_size=batch)).peak <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        if high == LARGEST_BATCH:
            return high
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fit_table(arguments: FitArguments) -> Table:
    """Return the largest batch and its peak for every size and context length."""
    capacity = gpu_bytes(arguments.gpu)
    budget = usable_bytes(capacity)
    contexts = arguments.context_lengths or CONTEXT_LENGTHS
    shared = {name: getattr(arguments, name) for name in ("mode", "precision", "attention", "checkpoint_blocks")}
    base = RunConfig(device="cuda", batch_size=1, **shared)
    rows: list[list[str]] = []
    fitting: list[RunConfig] = []
    failing: list[RunConfig] = []
    for size in arguments.sizes or COURSE_SIZES:
        row = [size]
        for context in contexts:
            config = dataclasses.replace(base, model=model_config(size, context_length=context), size=size)
            batch = largest_batch(config, budget)
            chosen = dataclasses.replace(config, batch_size=max(batch, 1))
            row.append(f"{batch or '-'} ({estimate(chosen).peak / GIB:.1f})")
            (fitting if batch else failing).append(chosen)
        rows.append(row)
    headings = [say("context {}", "上下文 {}", str(context)) for context in contexts]
    title = say(
        "largest batch (peak GiB) on {} GiB: {}, {}, attention {}, checkpoint {}",
        "{} GiB 显存可容纳的最大 batch（峰值 GiB）：{}，{}，注意力 {}，激活重计算 {}",
        f"{capacity / GIB:.1f}",
        arguments.mode,
        arguments.precision,
        arguments.attention,
        str(arguments.checkpoint_blocks) if arguments.checkpoint_blocks else Text("off", "关闭"),
    )
    columns = [word(Text("size", "规模")), *(Column(heading) for heading in headings)]
    return Table(title, columns, rows, [*_notes(fitting), *_suggestions(failing, budget)])


def _notes(fitting: list[RunConfig]) -> list[Text]:
    best = max(fitting, key=lambda config: (config.model.parameters, config.model.context_length), default=None)
    largest = Text("none of these fits", "以上配置都放不下")
    if best is not None:
        largest = say(
            "largest model that fits: {}, up to context {} with batch {}",
            "放得下的最大模型：{}，上下文可到 {}，batch {}",
            best.size,
            str(best.model.context_length),
            str(best.batch_size),
        )
    return [
        largest,
        Text(
            "`-`: does not fit even with one sequence; the figure is what that would need",
            "`-`：batch 为 1 也放不下；括号内是此时所需的显存",
        ),
        say(
            "{} GiB are left to CUDA itself and {} to the model's error",
            "为 CUDA 自身预留 {} GiB，为模型误差预留 {}",
            f"{CONTEXT_RESERVE / GIB:.1f}",
            f"{MODEL_ERROR:.0%}",
        ),
    ]


def _suggestions(failing: list[RunConfig], budget: float) -> list[Text]:
    """Return the flags that make the first configuration that can fit, fit; the cheapest in time first."""
    changes: tuple[dict, ...] = (
        {"attention": "sdpa"},
        {"attention": "sdpa", "precision": "bf16"},
        {"attention": "sdpa", "checkpoint_blocks": 1},
        {"attention": "sdpa", "precision": "bf16", "checkpoint_blocks": 1},
    )
    for config, change in product(failing, changes):
        if batch := largest_batch(dataclasses.replace(config, **change), budget):
            flags = " ".join(f"--{name} {value}" for name, value in change.items())
            return [
                say(
                    "{} at context {} would fit with {} (batch {})",
                    "{}、上下文 {} 加上 {} 即可放下（batch {}）",
                    config.size,
                    str(config.model.context_length),
                    flags,
                    str(batch),
                )
            ]
    return []
