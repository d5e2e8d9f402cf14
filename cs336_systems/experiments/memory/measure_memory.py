"""Instruments on the memory of a step: its peak and parts, recomputation, saved tensors, predictions."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import RunConfig, UserError
from cs336_systems.files import replacing
from cs336_systems.measure.block_planner import build_step, predict_step
from cs336_systems.measure.memory_timeline import MOST_EVENTS, UNLABELLED, MemoryTrace, trace_memory
from cs336_systems.measure.memory_trace import measure_peak, predict_by_tracing
from cs336_systems.measure.readers.recorded_tables import BlockRow, OperationRow, SavedRow, flatten
from cs336_systems.measure.saved_tensors import Saved, block_backward, saved_tensors
from cs336_systems.measure.timing import STEP, time_as_configured, time_steps
from cs336_systems.predict.memory_model import breakdown, estimate
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, Watch
from cs336_systems.timeline import TIMELINE_FILE, Block

LARGEST_KEPT = 10
FIRST_BLOCK = "layers.0"
SNAPSHOT_FILE = "snapshot.pickle"


def measure_memory(config: dict[str, Any], *, folder: str | None = None) -> list[Metric]:
    """Measure and predict the peak, its parts and largest blocks, and how much each instrument slows a step down.

    `folder` receives the timeline, and on CUDA the allocator's own snapshot for memory_viz.
    """
    run = RunConfig.from_dict(config)
    if run.compile:
        raise UserError(
            "memory is traced operator by operator, which a compiled model does not have; leave out --compile"
        )
    step = build_step(run)
    batch = step.random_batch()
    plain = time_as_configured(step, batch)
    overheads: list[Metric] = []
    if step.device.type == "cuda":
        overheads.append(Metric("history_step_time", "s", _snapshot(step, batch, folder)))
    traces: list[MemoryTrace] = []

    def traced(watch: Watch) -> None:
        traces.append(trace_memory(step, batch))

    time = time_steps(traced, device=step.device, warmup_steps=0, num_steps=1)
    overheads.append(Metric("traced_step_time", "s", time.wall[STEP]))
    (trace,) = traces
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        trace.timeline.save(Path(folder) / TIMELINE_FILE)
    measured = trace.peak if plain.peak_memory is None else plain.peak_memory
    return [
        *plain.metrics,
        *overheads,
        Metric("peak_memory", "B", [measured]),
        Metric("traced_peak_memory", "B", [trace.peak]),
        Metric("unlabelled_memory", "B", [trace.parts.get(UNLABELLED, 0)]),
        Metric("peak_phase", "", [trace.phase]),
        Metric("part_memory", "B", flatten(trace.parts.items())),
        Metric("largest_blocks", "B", flatten(map(_row, trace.largest[:LARGEST_KEPT]))),
        *predictions(step),
    ]


def predictions(step: TrainStep) -> list[Metric]:
    """Return predicted peaks: by the closed form, where it covers the model, and by tracing."""
    run = step.config
    traced = [Metric("predicted_by_tracing_memory", "B", [predict_step(step).peak])]
    if run.model_factory is not None or run.fast != "off" or run.memory_budget:
        return traced
    return [Metric("predicted_memory", "B", [estimate(run).peak]), *traced]


def measure_recomputation(config: dict[str, Any]) -> list[Metric]:
    """Measure a step that recomputes groups of blocks: flat, with groups of `inner` blocks inside, or by halves."""
    run = RunConfig.of(config)
    inner, recursive = config["inner"], config.get("recursive", False)

    def prepare(step: TrainStep) -> None:
        step.model.checkpoint_inner = inner
        step.model.checkpoint_recursive = recursive

    step = TrainStep.build(run)
    prepare(step)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    measured = measure_peak(step, batch) if timings.peak_memory is None else timings.peak_memory
    closed_form = [] if inner or recursive else [Metric("predicted_memory", "B", [estimate(run).peak])]
    return [
        *timings.metrics,
        Metric("peak_memory", "B", [measured]),
        *closed_form,
        Metric("predicted_by_tracing_memory", "B", [predict_by_tracing(run, prepare).peak]),
    ]


def _row(block: Block) -> BlockRow:
    return BlockRow(block.size, block.label, block.module, block.what, block.line)


def _snapshot(step: TrainStep, batch: tuple[Tensor, Tensor], folder: str | None) -> list[float]:
    """Return the seconds of one step while the allocator records its history, which is written to `folder`."""
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MOST_EVENTS)
    try:
        timings = time_steps(lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=0, num_steps=1)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with replacing(Path(folder) / SNAPSHOT_FILE) as fresh:
                torch.cuda.memory._dump_snapshot(str(fresh))
    finally:
        torch.cuda.memory._record_memory_history(None)
    return timings.wall[STEP]


def measure_saved_tensors(config: dict[str, Any]) -> list[Metric]:
    run = RunConfig.from_dict(config)
    step = build_step(run)
    found = saved_tensors(step, step.random_batch())
    kept = [saved for saved in found if not saved.is_parameter]
    by_module: dict[str, int] = {}
    for saved in kept:
        by_module[saved.module] = by_module.get(saved.module, 0) + saved.size
    largest = sorted(kept, key=lambda saved: -saved.size)[:LARGEST_KEPT]
    of_block = [saved for saved in kept if saved.module.startswith(FIRST_BLOCK)]
    return [
        *_block_metrics(step, of_block),
        Metric("saved_memory", "B", [sum(saved.size for saved in kept)]),
        Metric("saved_tensors", "1", [len(kept)]),
        Metric("saved_parameter_memory", "B", [sum(saved.size for saved in found if saved.is_parameter)]),
        Metric("saved_by_module", "B", flatten(by_module.items())),
        Metric("largest_saved", "B", flatten(SavedRow(s.size, s.module, s.what, s.line) for s in largest)),
    ]


def _block_metrics(step: TrainStep, saved: list[Saved]) -> list[Metric]:
    """Return what the first block saves, by operation, and what its backward changes; nothing for a model without
    blocks."""
    layers = getattr(step.model, "layers", None)
    if not saved or layers is None:
        return []
    by_operation: dict[tuple[str, str], list[int]] = {}
    for one in saved:
        by_operation.setdefault((one.operation, one.module), []).append(one.size)
    rows = [OperationRow(*name, sum(sizes), len(sizes)) for name, sizes in by_operation.items()]
    found = [
        Metric("block_saved_memory", "B", [sum(one.size for one in saved)]),
        Metric("block_operations", "B", flatten(sorted(rows, key=lambda row: -row.size)[:LARGEST_KEPT])),
    ]
    run = step.config  # a block of a user's model may be called otherwise; a recomputed one is saved by its input alone
    if run.model_factory is not None or run.checkpoint_blocks:
        return found
    change, gradients = block_backward(step, step.random_batch(), layers[0])
    return [
        *found,
        Metric("block_backward_change", "B", [change]),
        Metric("block_gradient_memory", "B", [gradients]),
    ]


def measure_prediction(config: dict[str, Any]) -> list[Metric]:
    """Predict the memory of a step and of its parts; nothing runs on a device."""
    run = RunConfig.from_dict(config)
    full, traced = breakdown(run), predict_by_tracing(run)
    return [
        Metric("parameter_memory", "B", [full.parameters]),
        Metric("gradient_memory", "B", [full.gradients]),
        Metric("optimizer_memory", "B", [full.optimizer_state]),
        Metric("activation_memory", "B", [full.activations]),
        Metric("block_activation_memory", "B", [full.activations_per_block]),
        Metric("residual_memory", "B", [full.residual]),
        Metric("loss_memory", "B", [full.logits_and_loss]),
        Metric("predicted_memory", "B", [full.peak.peak]),
        Metric("traced_memory", "B", [traced.peak]),
        Metric("peak_phase", "", [full.peak.where]),
    ]
