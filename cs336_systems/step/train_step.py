"""One training step in named phases: forward, loss, backward, sync, optimizer.

The same object is timed, profiled and trained. Each phase runs inside a profiler range of its own name
(record_function, and NVTX on a GPU) and inside whatever context manager the caller's `watch` returns for that name: the
timer and the memory tracker are watchers.

    step = TrainStep.build(RunConfig(model=model_config("small"), device="cuda"))
    loss = step(*step.random_batch())
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.kernels.flash.dispatch import best_fused, gluon_problem, triton_problem
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.model import TransformerLM
from cs336_systems.step.cuda_graph import StepGraph

Watch = Callable[[str], AbstractContextManager]

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainStep:
    """Runs the phases of `config.mode` on one batch. An optimizer the mode needs and is not given is AdamW."""

    def __init__(self, model: nn.Module, config: RunConfig, optimizer: torch.optim.Optimizer | None = None):
        self.model = model
        self.config = config
        self.device = torch.device(config.device)
        self.trains = config.mode == "train-step"
        set_matmul_precision(config.precision)
        self._parts = config.fast_parts
        if optimizer is None and self.trains:
            optimizer = self._default_optimizer()
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16" and self.trains)
        # A wrapper of parallel/ that overlaps communication with backward ends it in the sync phase.
        self._finish_sync = getattr(model, "finish_gradient_synchronization", None)
        self._forward: Callable[..., Tensor] = torch.compile(model) if config.compile else model
        self.graph = StepGraph(self._gradients_of, self._update, self._drop) if "graph" in self._parts else None

    @classmethod
    def build(cls, config: RunConfig) -> "TrainStep":
        """A step on random weights."""
        require_device(config.device)
        torch.manual_seed(config.seed)
        with torch.device(config.device):
            model = build_model(config)
        return cls(model, config)

    def _default_optimizer(self) -> torch.optim.Optimizer:
        if "optimizer" not in self._parts:
            return torch.optim.AdamW(self.model.parameters(), fused=True, capturable="graph" in self._parts)
        assert isinstance(self.model, TransformerLM)
        dtype = AUTOCAST_DTYPES.get(self.config.precision, torch.float32)
        parameters = self.model.in_packing_order()
        return PackedAdamW(parameters, dtype=dtype, max_grad_norm=self.config.max_grad_norm)

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, (batch, context) each."""
        generator = torch.Generator().manual_seed(self.config.seed)
        shape = (2, self.config.batch_size, self.config.model.context_length)
        tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator)
        inputs, targets = tokens.to(self.device)
        return inputs, targets

    def __call__(self, inputs: Tensor, targets: Tensor, *, watch: Watch = nullcontext) -> Tensor | None:
        """One step; the detached loss, or None in the modes that have none.

        Gradients are dropped before the step in forward-backward mode, and at its end in train-step mode.
        """
        mode = self.config.mode
        if mode in ("inference", "forward"):
            with torch.set_grad_enabled(mode == "forward"), self._phase("forward", watch):
                # Held to the end of the phase, so that freeing the graph is not timed; dropped on return, so that no
                # caller has two graphs alive in its next step.
                logits = self.logits(inputs)
            del logits
            return None
        if self.graph is not None:
            return self.train([(inputs, targets)])
        if mode == "forward-backward":
            self._drop()
        loss = self._gradients(inputs, targets, watch)
        if self.trains:
            with self._phase("optimizer", watch):
                self._update()
        return loss

    def _gradients(self, inputs: Tensor, targets: Tensor, watch: Watch) -> Tensor:
        loss = self._one_batch(inputs, targets, self.scaler.scale, watch)
        self._synchronize(watch)
        return loss

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """One step on several batches of one size, update included: the mean loss, on the device."""
        if self.graph is not None:
            if isinstance(self.optimizer, PackedAdamW):
                self.optimizer.upload_rates()
            return self.graph(batches)
        loss = self.accumulate(batches)
        self._update()
        return loss

    def accumulate(
        self, batches: Sequence[tuple[Tensor, Tensor]], *, loss_scale: float = 1.0, watch: Watch = nullcontext
    ) -> Tensor:
        """The mean loss of several batches of one size, and the gradient of it times `loss_scale`, over all ranks; the
        update is the caller's. Only the last batch is sent, where the wrapper can wait with that."""
        factor = loss_scale / len(batches)
        no_sync: Any = getattr(self.model, "no_sync", nullcontext)
        losses = []
        for number, (inputs, targets) in enumerate(batches, start=1):
            with no_sync() if number < len(batches) else nullcontext():
                losses.append(self._one_batch(inputs, targets, lambda loss: loss * factor, watch))
        self._synchronize(watch)
        return torch.stack(losses).mean()

    def _one_batch(self, inputs: Tensor, targets: Tensor, scaled: Callable[[Tensor], Tensor], watch: Watch) -> Tensor:
        """Forward, loss, and backward of what `scaled` makes of the loss. The fused loss is part of forward."""
        if "loss" in self._parts:
            with self._phase("forward", watch), self.autocast():
                loss = self._forward(inputs, targets)
        else:
            with self._phase("forward", watch):
                logits = self.logits(inputs)
            with self._phase("loss", watch):
                loss = self.loss(logits, targets)
                del logits
        with self._phase("backward", watch):
            scaled(loss).backward()
        return loss.detach()

    def _gradients_of(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        return self._one_batch(inputs, targets, lambda loss: loss * factor, nullcontext)

    def _synchronize(self, watch: Watch) -> None:
        if self._finish_sync is not None:
            with self._phase("sync", watch):
                self._finish_sync()

    def logits(self, inputs: Tensor) -> Tensor:
        """The forward pass in the configured precision."""
        with self.autocast():
            logits = self._forward(inputs)
        expected = (*inputs.shape, self.config.model.vocab_size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"the model must return logits of shape {expected}, got {got}")
        return logits

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, without gradients."""
        with torch.no_grad(), self.autocast():
            if "loss" in self._parts:
                return self._forward(inputs, targets)
            return self.loss(self.logits(inputs), targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _update(self) -> None:
        assert self.optimizer is not None
        if self.config.max_grad_norm and not isinstance(self.optimizer, PackedAdamW):  # which clips by itself
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.graph is None:  # its graphs overwrite gradients, in the memory that these have
            self.optimizer.zero_grad(set_to_none=True)

    def _drop(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def autocast(self) -> AbstractContextManager:
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    @contextmanager
    def _phase(self, name: str, watch: Watch) -> Iterator[None]:
        nvtx = torch.cuda.nvtx.range(name) if self.device.type == "cuda" else nullcontext()
        with record_function(name), nvtx, watch(name):
            yield


def set_matmul_precision(precision: str) -> None:
    """fp32 means fp32: TF32 is on only for the precision of that name, for matmuls and convolutions alike."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def require_device(device: str) -> None:
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise UserError(f"device {device!r} is absent: torch {torch.__version__} sees no CUDA GPU; use --device cpu")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise UserError(f"device {device!r} is absent: this machine has {torch.cuda.device_count()} GPU(s)")


def require_attention(config: RunConfig) -> None:
    if config.attention not in ("flash_triton", "flash_hopper"):
        return
    device = torch.device(config.device)
    problem = triton_problem(device)
    if problem is None and config.attention == "flash_hopper":
        problem = gluon_problem(device)
    if problem is not None:
        raise UserError(f"--attention {config.attention}: {problem}; use --attention auto")


def build_model(config: RunConfig) -> nn.Module:
    """Our Transformer, or the user's own module when the config names a factory."""
    if config.model_factory is None:
        # Inside a CUDA graph nothing is launched by Python, which is what "auto" avoids for small problems.
        in_graph = "graph" in config.fast_parts and config.attention == "auto" and config.precision == "bf16"
        return TransformerLM(
            config.model,
            attention=_best_in_graph(config) if in_graph else config.attention,
            checkpoint_blocks=config.checkpoint_blocks,
            fused="kernels" in config.fast_parts,
        )
    return _call_factory(config.model_factory, config.model)


def _best_in_graph(config: RunConfig) -> str:
    device, model = torch.device("cuda"), config.model
    if triton_problem(device) is not None:
        return config.attention
    elements = config.batch_size * model.context_length * model.d_model
    return best_fused(elements, model.context_length, model.d_model // model.num_heads, device)


def _call_factory(spec: str, model: ModelConfig) -> nn.Module:
    module_name, factory_name = spec.split(":")
    if os.getcwd() not in sys.path:  # last, so that a file there does not stand in for a standard module
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises while it is imported
        raise UserError(f"--model {spec}: cannot import {module_name!r}: {type(error).__name__}: {error}") from None
    factory = getattr(module, factory_name, None)
    if factory is None:
        raise UserError(f"--model {spec}: {module_name!r} has no {factory_name!r}")
    fields = dict(vars(model))
    try:
        built = factory(**fields)
    except TypeError as error:
        raise UserError(f"--model {spec}: must accept the fields {', '.join(fields)}: {error}") from None
    if not isinstance(built, nn.Module):
        raise UserError(f"--model {spec}: must return a torch.nn.Module, got {type(built).__name__}")
    return built


def cosine_lr(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `floor` at `total_steps`, and `floor` after."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
