r"""Times a Transformer's forward, backward and optimizer step, end to end, and measures its peak memory.

One cell, by shape or by name:
    python cs336_systems/benchmark/benchmark.py \
        --context_length 512 --d_model 768 --num_layers 12 --num_heads 12 --d_ff 3072
    cs336 bench --size small --mode train-step --precision bf16

A sweep, resumed when repeated with the same --output:
    cs336 bench --sizes small,medium --context_lengths 128,512 --precisions fp32,bf16 --output runs/sweep.jsonl

Your own nn.Module, built by a function that takes vocab_size, context_length, d_model, num_layers, num_heads, d_ff and
rope_theta, and called with token ids (batch, context):
    cs336 bench --model mypackage.model:build --size small
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # run by path: this folder would come first and hide standard modules behind its files
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336_systems.config import RunConfig, flag, flag_like
from cs336_systems.experiments.session import SessionArguments, new_run_file, run_session
from cs336_systems.predict.model_flags import ShapeArguments


@dataclass(frozen=True)
class BenchArguments(SessionArguments, ShapeArguments):
    sizes: tuple[str, ...] = flag((), "sweep over these sizes")
    context_lengths: tuple[int, ...] = flag((), "sweep over these context lengths")
    modes: tuple[str, ...] = flag((), "sweep over these modes")
    precisions: tuple[str, ...] = flag((), "sweep over these precisions")
    attentions: tuple[str, ...] = flag((), "sweep over these attention implementations")
    compile: bool = flag_like(RunConfig, "compile")
    fast: str = flag_like(RunConfig, "fast")
    forward_only: bool = flag(False, "time the forward pass alone (same as --mode forward)")
    max_grad_norm: float = flag_like(RunConfig, "max_grad_norm")
    seed: int = flag_like(RunConfig, "seed")
    model: str | None = flag_like(RunConfig, "model_factory")

    def configs(self, device: str) -> list[RunConfig]:
        """The cells of the sweep; a plain call has one."""
        mode = "forward" if self.forward_only else self.mode
        axes: list[list[tuple[str, Any]]] = [
            [("size", value) for value in self.sizes or (self.size,)],
            [("context_length", value) for value in self.context_lengths or (self.context_length,)],
            [("mode", value) for value in self.modes or (mode,)],
            [("precision", value) for value in self.precisions or (self.precision,)],
            [("attention", value) for value in self.attentions or (self.attention,)],
        ]
        names = ("compile", "fast", "max_grad_norm", "warmup_steps", "num_steps", "seed")
        common = {name: getattr(self, name) for name in names}
        default_size = "small" if device.startswith("cuda") else "tiny"
        return [
            self.run_config(
                default_size=default_size,
                device=device,
                model_factory=self.model,
                **common,
                **{name: value for name, value in cell if value is not None},
            )
            for cell in product(*axes)
        ]


def bench(arguments: BenchArguments) -> int:
    arguments.configs(arguments.device or "cpu")  # mistakes in the configuration are told before a process is started
    path = Path(arguments.output) if arguments.output else new_run_file("bench")
    run_session(arguments, path, lambda device: [("bench", config.to_dict()) for config in arguments.configs(device)])
    return 0


# -- the instrument: runs in the worker -----------------------------------------------------------------------------


def measure_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[list[Any]]:
    """Time and memory of the configured step as [metric, unit, samples] rows."""
    from cs336_systems.measure.timing import STEP, time_as_configured
    from cs336_systems.step.train_step import TrainStep, require_attention

    run = RunConfig.from_dict(config)
    require_attention(run)
    if run.compile:
        start_compiling_from_nothing()
    step = TrainStep.build(run)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    metrics = [*timings.metrics, ["parameters", "1", [sum(p.numel() for p in step.model.parameters())]]]
    if run.compile:
        metrics += _compile_metrics(timings.warmup or timings.wall[STEP], timings.wall[STEP])
    metrics += _work_metrics(run, step, batch, peak_tflops)
    metrics += _memory_metrics(run, step, batch, timings.peak_memory)
    return metrics


def start_compiling_from_nothing() -> None:
    """A compile time read from a disk cache would be that of some earlier run, and so might the code be: the cache does
    not know under which SDPA backend it was filled."""
    import torch
    import torch._functorch.config

    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True
    torch._functorch.config.enable_autograd_cache = False


def _compile_metrics(first_steps: list[float], steps: list[float]) -> list[list[Any]]:
    """Compilation happens in the first step: what that took beyond a steady one."""
    import statistics

    from torch._dynamo.utils import counters

    return [
        ["compile_time", "s", [max(0.0, first_steps[0] - statistics.median(steps))]],
        ["graph_breaks", "1", [sum(counters["graph_break"].values())]],
    ]


def _work_metrics(run: RunConfig, step: Any, batch: Any, peak_tflops: float | None) -> list[list[Any]]:
    """FLOPs of the step, counted where the model is not ours, and the peak of the device where it is known."""
    import torch

    from cs336_systems.measure.flop_counter import count_flops
    from cs336_systems.predict.flops import model_flops
    from cs336_systems.predict.gpus import peak_flops

    flops = model_flops(run) if run.model_factory is None else count_flops(lambda: step(*batch))
    gpu = torch.cuda.get_device_name(step.device) if step.device.type == "cuda" else None
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(gpu, run.precision)
    return [["flops", "FLOP", [flops]], *([["peak_flops", "FLOP/s", [peak]]] if peak else [])]


def _memory_metrics(run: RunConfig, step: Any, batch: Any, measured: int | None) -> list[list[Any]]:
    """Peak measured (by the allocator on a GPU, by tracking tensors on a CPU) and predicted."""
    from cs336_systems.measure import memory_trace
    from cs336_systems.predict import memory_model

    if run.compile:  # what a compiled model keeps is inductor's choice, and its tensors are not dispatched one by one
        return [["peak_memory", "B", [measured]]] if measured is not None else []
    if measured is None:
        measured = memory_trace.measure_peak(step, batch)
    if run.model_factory is None and run.fast == "off":
        predicted = memory_model.estimate(run).peak
    else:
        predicted = memory_trace.predict_by_tracing(run).peak
    return [["peak_memory", "B", [measured]], ["predicted_memory", "B", [predicted]]]


def main(argv: list[str] | None = None) -> int:
    from cs336_systems.commands import run_command

    return run_command("benchmark.py", __doc__, BenchArguments, bench, argv)


if __name__ == "__main__":
    sys.exit(main())
