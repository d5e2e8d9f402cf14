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

from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336_systems.config import RunConfig, flag, flag_like
from cs336_systems.experiments.catalogue import Request
from cs336_systems.experiments.session import (
    SessionArguments,
    new_run_file,
    require_module,
    require_runnable,
    run_session,
)
from cs336_systems.experiments.steps.step_time import BENCH
from cs336_systems.predict.model_flags import OWN_MODEL, ShapeArguments
from cs336_systems.record import output_file


@dataclass(frozen=True)
class BenchArguments(SessionArguments, ShapeArguments):
    sizes: tuple[str, ...] = flag((), "sweep over these sizes", excludes=("size",))
    context_lengths: tuple[int, ...] = flag((), "sweep over these context lengths", excludes=("context_length",))
    modes: tuple[str, ...] = flag((), "sweep over these modes", excludes=("mode",))
    precisions: tuple[str, ...] = flag((), "sweep over these precisions", excludes=("precision",))
    attentions: tuple[str, ...] = flag((), "sweep over these attention implementations", excludes=("attention",))
    compile: bool = flag_like(RunConfig, "compile")
    fast: str = flag_like(RunConfig, "fast")
    forward_only: bool = flag(False, "time the forward pass alone (same as --mode forward)", excludes=("mode", "modes"))
    max_grad_norm: float = flag_like(RunConfig, "max_grad_norm")
    seed: int = flag_like(RunConfig, "seed")
    model: str | None = flag(None, OWN_MODEL, excludes=("attention", "attentions", "checkpoint_blocks"))

    def configs(self, device: str) -> list[RunConfig]:
        """Return the configurations of the sweep; a plain call has one."""
        mode = "forward" if self.forward_only else self.mode
        axes: list[list[tuple[str, Any]]] = [
            [("size", value) for value in self.sizes or (self.size,)],
            [("context_length", value) for value in self.context_lengths or (self.context_length,)],
            [("mode", value) for value in self.modes or (mode,)],
            [("precision", value) for value in self.precisions or (self.precision,)],
            [("attention", value) for value in self.attentions or (self.attention,)],
        ]
        names = ("compile", "fast", "max_grad_norm", "warmup_steps", "num_steps", "seed")
        common = {name: value for name in names if (value := getattr(self, name)) is not None}
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
    """Measure the cells of the sweep and print their tables."""
    arguments.configs(arguments.device or "cpu")  # reports mistakes before a process is started
    require_module(arguments.model)
    path = output_file(arguments.output) if arguments.output else new_run_file("bench")

    def requests_on(device: str, gpu_memory: int | None) -> list[Request]:
        configs = arguments.configs(device)
        for config in configs:
            require_runnable(config)
        return [(BENCH.name, config.to_dict()) for config in configs]

    return run_session(arguments, path, requests_on).code
