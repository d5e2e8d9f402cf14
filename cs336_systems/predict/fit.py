"""What fits on a GPU, predicted before it is paid for."""

import dataclasses
import re
from dataclasses import dataclass
from itertools import product

from cs336_systems.config import COURSE_SIZES, RunConfig, UserError, flag, flag_like, model_config
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import GIB
from cs336_systems.table import Column, Table

CONTEXT_RESERVE = 0.6 * GIB
"""What CUDA itself takes before the first tensor: its context, kernels, and the allocator's unusable corners."""
MODEL_ERROR = 0.02
LARGEST_BATCH = 65536
LARGEST_GPU = 1024 * GIB

GPU_MEMORY = {  # GiB that the driver reports
    "3090": 23.7, "4090": 23.5, "4090d": 23.5, "5090": 31.4, "4080": 15.7, "3080": 9.8, "2080ti": 10.7, "a10": 22.1,
    "a10g": 22.1, "a30": 23.6, "a40": 44.4, "a6000": 47.4, "a100-40gb": 39.4, "a100": 79.2, "a800": 79.2, "l4": 22.0,
    "l40s": 44.4, "h20": 95.1, "h100": 79.2, "h800": 79.2, "h200": 139.8, "b200": 178.4, "t4": 14.6, "v100": 15.8,
}  # fmt: skip


@dataclass(frozen=True)
class FitArguments:
    gpu: str = flag("24GiB", "memory, such as 24GiB or 80GB, or a card: 4090, A100, H200, ...")
    sizes: tuple[str, ...] = flag((), "sizes to try (default: the course's five)")
    context_lengths: tuple[int, ...] = flag((), "context lengths to try (default: 128 ... 4096)")
    mode: str = flag_like(RunConfig, "mode")
    precision: str = flag_like(RunConfig, "precision")
    attention: str = flag_like(RunConfig, "attention")
    checkpoint_blocks: int = flag_like(RunConfig, "checkpoint_blocks")


def card_name(text: str) -> str:
    """As the tables of cards have it: without its maker."""
    return re.sub(r"nvidia|geforce|rtx|tesla|[\s_]", "", text.lower())


def gpu_bytes(text: str) -> int:
    """Bytes of `24GiB`, `80GB`, a bare number of GiB, or a card's name."""
    if card_name(text) in GPU_MEMORY:
        return int(GPU_MEMORY[card_name(text)] * GIB)
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|g)?\s*", text.lower()):
        size = float(match[1]) * (10**9 if match[2] == "gb" else GIB)
        if not 1 <= size <= LARGEST_GPU:  # 4070 is a card that is not in the list, not four thousand GiB
            raise UserError(f"--gpu {text!r}: memory must be above 0 and at most {LARGEST_GPU // GIB} GiB, as in 24GiB")
        return int(size)
    raise UserError(f"unknown --gpu {text!r}; give its memory, such as 24GiB, or one of: {', '.join(GPU_MEMORY)}")


def largest_batch(config: RunConfig, budget: float) -> int:
    """The largest batch, up to LARGEST_BATCH, whose peak is within `budget` bytes; 0 if not even one sequence is."""

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
    capacity = gpu_bytes(arguments.gpu)
    budget = (capacity - CONTEXT_RESERVE) / (1 + MODEL_ERROR)
    contexts = arguments.context_lengths or (128, 256, 512, 1024, 2048, 4096)
    sizes = arguments.sizes or COURSE_SIZES
    base = RunConfig(
        mode=arguments.mode,
        precision=arguments.precision,
        attention=arguments.attention,
        checkpoint_blocks=arguments.checkpoint_blocks,
        device="cuda",
        batch_size=1,
    )
    rows: list[list[str]] = []
    fitting: list[RunConfig] = []
    failing: list[RunConfig] = []
    for size in sizes:
        row = [size]
        for context in contexts:
            config = dataclasses.replace(base, model=model_config(size, context_length=context), size=size)
            batch = largest_batch(config, budget)
            chosen = dataclasses.replace(config, batch_size=max(batch, 1))
            peak = estimate(chosen).peak
            row.append(f"{batch} ({peak / GIB:.1f})" if batch else f"- ({peak / GIB:.1f})")
            (fitting if batch else failing).append(chosen)
        rows.append(row)
    columns = [Column("size", numeric=False), *(Column(f"context {context}") for context in contexts)]
    title = (
        f"largest batch (peak GiB) on {capacity / GIB:.1f} GiB: {arguments.mode}, {arguments.precision}, "
        f"attention {arguments.attention}, checkpoint {arguments.checkpoint_blocks or 'off'}"
    )
    return Table(title, columns, rows, [*_notes(fitting), *_ways_out(failing, budget)])


def _notes(fitting: list[RunConfig]) -> list[str]:
    best = max(fitting, key=lambda config: (config.model.parameters, config.model.context_length), default=None)
    largest = "none of these fits"
    if best is not None:
        reach = f"up to context {best.model.context_length} with batch {best.batch_size}"
        largest = f"largest model that fits: {best.size}, {reach}"
    return [
        largest,
        "`-`: does not fit even with one sequence; the figure is what that would need",
        f"{CONTEXT_RESERVE / GIB:.1f} GiB are left to CUDA itself and {MODEL_ERROR:.0%} to the model's error",
    ]


def _ways_out(failing: list[RunConfig], budget: float) -> list[str]:
    """For the first cell that can be made to fit: what does it, the cheapest in time first."""
    ways: tuple[dict, ...] = (
        {"attention": "sdpa"},
        {"attention": "sdpa", "precision": "bf16"},
        {"attention": "sdpa", "checkpoint_blocks": 1},
        {"attention": "sdpa", "precision": "bf16", "checkpoint_blocks": 1},
    )
    for config, way in product(failing, ways):
        if batch := largest_batch(dataclasses.replace(config, **way), budget):
            flags = " ".join(f"--{name} {value}" for name, value in way.items())
            return [f"{config.size} at context {config.model.context_length} would fit with {flags} (batch {batch})"]
    return []
