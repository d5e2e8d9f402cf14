"""One training step in named phases: forward, loss, backward, sync, optimizer. A pipeline runs the first three as one.

The same object is timed, profiled and trained. Each phase runs inside a profiler range of its own name
(record_function, and NVTX on a GPU) and inside the context manager that the caller's `watch` returns for that name: the
timer and the memory tracker are watchers.

    step = TrainStep.build(RunConfig(model=model_config("small"), device="cuda"))
    loss = step(*step.random_batch())            # measured: the host never waits for the device
    result = step.train([step.random_batch()])   # trained: checked, and agreed on by all ranks
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from cs336_systems.config import HOPPER_ATTENTIONS, TRITON_ATTENTIONS, ModelConfig, RunConfig, UserError, arg
from cs336_systems.kernels.flash.dispatch import best_fused, gluon_problem, triton_problem
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import communication_device
from cs336_systems.step.block_memory import ChoiceByBlock
from cs336_systems.step.cuda_graph import Batches, StepGraph
from cs336_systems.step.initialise import initialise
from cs336_systems.step.memory_budget import apply_memory_budget
from cs336_systems.step.replay import Replay
from cs336_systems.step.updates import LossScale, Update, adapt

Watch = Callable[[str], AbstractContextManager]
Scaling = Callable[[Tensor], Tensor]

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability of GPUs with e4m3."""
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of the packed optimizer's state by `RunConfig.optimizer_state`."""


@dataclass(frozen=True)
class StepResult:
    """The result of one training step, the same on all ranks."""

    loss: float
    """Mean over micro batches and ranks."""
    gradient_norm: float
    """Norm over the whole model, before clipping."""
    update: Update
    stop: bool
    """True if any rank asked to stop."""


class TrainStep:
    """Runs the phases of `config.mode`: micro batches, loss scaling, clipping, finite check and update.

    The optimizer defaults to AdamW where the mode needs one. Calling the step measures one batch, and `train` trains;
    both run eagerly or as CUDA graphs, under any wrapper of parallel/.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss_scale: LossScale | None = None,
    ):
        self.model = model
        self.config = config
        self.blocks: ChoiceByBlock | None = None
        """The memory budget's plan for whole blocks."""
        self.device = torch.device(config.device)
        self.trains = config.mode == "train-step"
        set_matmul_precision(config.precision)
        self._parts = config.fast_parts
        if optimizer is None and self.trains:
            optimizer = self._default_optimizer()
        self.optimizer = optimizer
        self._adapted = adapt(optimizer) if optimizer is not None else None
        # A measured step scales by GradScaler, whose decision stays on the device; `train` by `loss_scale`.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16" and self.trains)
        self.loss_scale = loss_scale or LossScale.of(config.precision)
        # Methods that wrappers of parallel/ may have: the end of communication that overlaps with backward, the norm
        # of sharded gradients, backward without communication, the loss of logits that are split over ranks, and this
        # rank's part of the sequences. One whose model is split into stages has a pipeline, which runs the micro
        # batches.
        self._finish_sync = getattr(model, "finish_gradient_synchronization", None)
        self._clip_sharded = getattr(model, "clip_grad_norm_", None)
        self._no_sync: Callable[[], AbstractContextManager] = getattr(model, "no_sync", nullcontext)
        self.loss_context: Callable[[], AbstractContextManager] = getattr(model, "loss_context", nullcontext)
        self._own_part: Callable[[Tensor], Tensor] = getattr(model, "own_part", lambda tokens: tokens)
        self.pipeline: Any = getattr(model, "pipeline", None)
        self._forward: Callable[..., Tensor] = torch.compile(model) if config.compile else model
        self.graph = StepGraph(self._captured_gradients, self._update, self._drop) if "graph" in self._parts else None

    @classmethod
    def build(cls, config: RunConfig, blocks: ChoiceByBlock | None = None) -> "TrainStep":
        """Build a step with random weights. `blocks`: the memory budget's plan for whole blocks."""
        require_device(config.device)
        require_fp8(config)
        packs = "optimizer" in config.fast_parts and config.mode == "train-step"
        packs = packs and not torch._C._len_torch_dispatch_stack()  # a trace's tensors have no memory to save
        torch.manual_seed(config.seed)
        with torch.device("meta" if packs else config.device):
            model = build_model(config)
        step = cls(model, config)
        if isinstance(step.optimizer, PackedAdamW):
            initialise(model, step.optimizer.device, step.optimizer.load_master)
        if not torch._C._len_torch_dispatch_stack():  # a trace is of another device: it applies the plan itself
            apply_memory_budget(model, config, blocks)
            step.blocks = blocks
        return step

    def _default_optimizer(self) -> torch.optim.Optimizer:
        if "optimizer" not in self._parts:
            return torch.optim.AdamW(self.model.parameters(), fused=True, capturable="graph" in self._parts)
        assert isinstance(self.model, TransformerLM)
        dtype = AUTOCAST_DTYPES.get(self.config.precision, torch.float32)
        return PackedAdamW(
            self.model.in_packing_order(),
            dtype=dtype,
            state_dtype=STATE_DTYPES[self.config.optimizer_state],
            max_grad_norm=self.config.max_grad_norm,
            device=torch.device(self.config.device),
            update_in_backward=_gradient_groups(self.model) if self.config.update_in_backward else (),
        )

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Return random tokens and targets, (batch, context) each."""
        generator = torch.Generator().manual_seed(self.config.seed)
        shape = (2, self.config.batch_size, self.config.model.context_length)
        tokens = torch.randint(self.config.model.vocab_size, shape, generator=generator)
        inputs, targets = tokens.to(self.device)
        return inputs, targets

    # -- the two ways to run a step -----------------------------------------------------------------------------------

    def __call__(self, inputs: Tensor, targets: Tensor, *, watch: Watch = nullcontext) -> Tensor | None:
        """Run one step for measurement; return the detached loss, or None in the modes that have none.

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
        if mode == "forward-backward":
            self._drop()
            return self._accumulate([(inputs, targets)], self.scaler.scale, watch)
        return self.launch([(inputs, targets)], watch=watch)

    def launch(self, batches: Batches, *, watch: Watch = nullcontext) -> Tensor:
        """Run one step on micro batches of one size, update included, without waiting for the device.

        Returns the mean loss, on the device. CUDA graphs have no phases to watch.
        """
        loss = self._gradients(batches, watch)
        self._apply(watch)
        return loss

    def train(
        self,
        batches: Batches,
        *,
        learning_rate: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        replay: bool = False,
    ) -> StepResult:
        """Run one step on micro batches of one size; the update is left out on all ranks if it is not finite.

        Loss, norm and decision cover all ranks, which agree by one small all-reduce. It also carries the result of
        `stop`, which is called after the backward pass and returns True if this rank is asked to stop. `learning_rate`
        is set in all parameter groups first. With `replay` the gradients are computed twice, and ReplayError is raised
        on all ranks, before the update, if the two results differ in one bit.
        """
        optimizer, adapted = self.optimizer, self._adapted
        assert optimizer is not None
        assert adapted is not None
        if self.config.update_in_backward:
            raise UserError(
                "update_in_backward cannot leave out a step that is not finite, as training does; it is for `launch`",
                "update_in_backward",
            )
        if learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

        def run() -> Tensor:
            if adapted.clips_itself:
                return self._gradients(batches)
            return self._accumulate(batches, _times(self.loss_scale.value / len(batches)), nullcontext)

        # Graphs overwrite gradients in the memory that they were captured with.
        drop = self._drop if self.graph is None else lambda: None
        loss = Replay(self.model, adapted).check(run, drop) if replay else run()
        if adapted.clips_itself:
            self._apply()
            assert adapted.grad_norm is not None, "the optimizer must check for finite gradients"
            norm = adapted.grad_norm.item()
        else:
            norm = self._unscale_and_clip()
        mean, any_stop = _agree(loss.item(), stop())
        update = self.loss_scale.update(math.isfinite(norm) and math.isfinite(mean))
        if not adapted.clips_itself:
            if update is Update.APPLIED:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return StepResult(mean, norm, update, any_stop)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, without gradients: with context parallel that of this rank's part of the sequences."""
        inputs, targets = self._own_part(inputs), self._own_part(targets)
        with torch.no_grad(), self.loss_context(), self.autocast():
            if "loss" in self._parts:
                return self._forward(inputs, targets)
            if self.pipeline is not None:
                return self.pipeline.evaluate(inputs, targets, self.loss)
            return self.loss(self.logits(inputs), targets)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _gradients(self, batches: Batches, watch: Watch = nullcontext) -> Tensor:
        """Compute the gradients of a step whose decisions stay on the device; return the mean loss."""
        if self.config.update_in_backward and len(batches) > 1:
            raise UserError(
                f"update_in_backward needs all sequences of a step in one micro batch, got {len(batches)}",
                "update_in_backward",
            )
        if self.graph is not None:
            if self._adapted is not None:
                self._adapted.upload_rates()
            return self.graph.gradients(batches)
        share = _times(1 / len(batches))
        return self._accumulate(batches, lambda loss: self.scaler.scale(share(loss)), watch)

    def _accumulate(self, batches: Batches, scaling: Scaling, watch: Watch) -> Tensor:
        """Add up the gradients of scaled losses, and average them over ranks once, after the last micro batch.

        Returns the mean loss, on the device.
        """
        if self.pipeline is not None:
            with self._phase("pipeline", watch), self.loss_context():
                own = [(self._own_part(inputs), self._own_part(targets)) for inputs, targets in batches]
                losses = [self.pipeline.accumulate(own, scaling, self.loss)]
        else:
            losses = []
            for number, (inputs, targets) in enumerate(batches, start=1):
                with self._no_sync() if number < len(batches) else nullcontext(), self.loss_context():
                    losses.append(self._one_batch(inputs, targets, scaling, watch))
        if self._finish_sync is not None:
            with self._phase("sync", watch):
                self._finish_sync()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _one_batch(self, inputs: Tensor, targets: Tensor, scaling: Scaling, watch: Watch) -> Tensor:
        """Run forward, loss and the backward pass of the scaled loss. A fused loss belongs to the forward phase."""
        inputs, targets = self._own_part(inputs), self._own_part(targets)
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
            scaling(loss).backward()
        return loss.detach()

    def _captured_gradients(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        return self._one_batch(inputs, targets, _times(factor), nullcontext)

    def logits(self, inputs: Tensor) -> Tensor:
        """Run the forward pass in the configured precision."""
        with self.autocast():
            logits = self._forward(inputs)
        expected = (*inputs.shape, self.config.model.vocab_size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"the model must return logits of shape {expected}, got {got}")
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        gather = getattr(loss, "full_tensor", None)  # of a DTensor: the logits are split over ranks
        return loss if gather is None else gather()

    # -- the update ---------------------------------------------------------------------------------------------------

    def _apply(self, watch: Watch = nullcontext) -> None:
        """Run the update as a separate phase, or as a CUDA graph."""
        if self.graph is None:
            with self._phase("optimizer", watch):
                self._update()
            return
        self.graph.update()

    def _update(self) -> None:
        """Clip, update and drop the gradients; every decision stays on the device."""
        assert self.optimizer is not None
        assert self._adapted is not None
        if self.config.max_grad_norm and not self._adapted.clips_itself:
            self.scaler.unscale_(self.optimizer)
            self._clip(self.config.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.graph is None:  # graphs overwrite gradients in the memory that they were captured with
            self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _unscale_and_clip(self) -> float:
        """Undo the loss scale and clip; return the norm, which is not finite if any gradient on any rank is not."""
        if self.loss_scale.value != 1.0:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, 1 / self.loss_scale.value)
        return self._clip(self.config.max_grad_norm or math.inf).item()

    def _clip(self, max_norm: float) -> Tensor:
        if self._clip_sharded is not None:
            return self._clip_sharded(max_norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

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


def _gradient_groups(model: TransformerLM) -> list[list[nn.Parameter]]:
    """Return the parameters of each block, and the others one by one. Backward has gradients of one group at a time."""
    blocks = [list(block.parameters()) for block in model.layers]
    in_blocks = {parameter for block in blocks for parameter in block}
    return [*blocks, *([parameter] for parameter in model.parameters() if parameter not in in_blocks)]


def _times(factor: float) -> Scaling:
    """Return a function that multiplies by `factor`; for 1 it launches no kernel."""
    return (lambda loss: loss) if factor == 1 else (lambda loss: loss * factor)


def _agree(loss: float, stop: bool) -> tuple[float, bool]:
    """Return the mean loss over ranks, and whether any rank asks to stop."""
    if not dist.is_initialized():
        return loss, stop
    shared = torch.tensor([loss, float(stop)], dtype=torch.float64, device=communication_device())
    dist.all_reduce(shared)
    total, stops = shared.tolist()
    return total / dist.get_world_size(), bool(stops)


def set_matmul_precision(precision: str) -> None:
    """Enable TF32, for matmuls and convolutions, in the precision "tf32" only: fp32 means fp32."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def require_device(device: str) -> None:
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise UserError(f"device {device!r} is absent: torch {torch.__version__} sees no CUDA GPU; use cpu", "device")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise UserError(f"device {device!r} is absent: this machine has {torch.cuda.device_count()} GPU(s)", "device")


def require_fp8(config: RunConfig) -> None:
    """Raise UserError if the configuration asks for FP8 on a GPU that does not support it."""
    if config.precision != "fp8" or config.device_type != "cuda":
        return
    capability = torch.cuda.get_device_capability(torch.device(config.device))
    if capability < FP8_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
        raise UserError(
            f"precision fp8 needs a GPU of compute capability {needed} or newer, and this one has {found}; use bf16",
            "precision",
        )


def require_attention(config: RunConfig) -> None:
    if config.attention not in TRITON_ATTENTIONS:
        return
    device = torch.device(config.device)
    problem = triton_problem(device)
    if problem is None and config.attention in HOPPER_ATTENTIONS:
        problem = gluon_problem(device)
    if problem is not None:
        raise UserError(f"attention {config.attention}: {problem}; use {arg('attention')} auto", "attention")


def build_model(config: RunConfig) -> nn.Module:
    """Build our Transformer, or the user's own module if the config names a factory."""
    if config.model_factory is None:
        # "auto" avoids the launch overhead of Python for small problems; a CUDA graph has none.
        in_graph = "graph" in config.fast_parts and config.attention == "auto" and config.precision in ("bf16", "fp8")
        return TransformerLM(
            config.model,
            attention=best_attention(config) if in_graph else config.attention,
            checkpoint_blocks=config.checkpoint_blocks,
            fused="kernels" in config.fast_parts,
            fp8=config.precision == "fp8",
        )
    return _call_factory(config.model_factory, config.model)


def best_attention(config: RunConfig) -> str:
    """Return the fastest implementation on this GPU for a step in 16 bits, launch overhead aside."""
    device, model = torch.device("cuda"), config.model
    if triton_problem(device) is not None:
        return config.attention
    return best_fused(config.tokens * model.q_width, model.context_length, model.head_dim, device)


def _call_factory(spec: str, model: ModelConfig) -> nn.Module:
    module_name, factory_name = spec.split(":")
    if os.getcwd() not in sys.path:  # last, so that a file there does not shadow a standard module
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"model_factory {spec}: cannot import {module_name!r}: {reason}", "model_factory") from None
    factory = getattr(module, factory_name, None)
    if factory is None:
        raise UserError(f"model_factory {spec}: {module_name!r} has no {factory_name!r}", "model_factory")
    fields = model.to_dict()
    try:
        built = factory(**fields)
    except TypeError as error:
        problem = f"must accept the fields {', '.join(fields)}: {error}"
        raise UserError(f"model_factory {spec}: {problem}", "model_factory") from None
    if not isinstance(built, nn.Module):
        problem = f"must return a torch.nn.Module, got {type(built).__name__}"
        raise UserError(f"model_factory {spec}: {problem}", "model_factory")
    return built


def cosine_lr(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate: linear warm-up to `peak`, half a cosine to `floor` at `total_steps`, then `floor`."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
