"""Finds the module in which a value becomes NaN or infinite, or in which values jump.

The batch runs forward and backward once more, module by module and without fused kernels, and hooks measure the inputs
and outputs of every module and the gradients of its outputs, in the order in which they are computed.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.collectives import gather, local_part
from cs336_systems.step.cuda_graph import Batches
from cs336_systems.step.train_step import StepResult, TrainStep
from cs336_systems.step.updates import Update

JUMP = 4.0
"""A tensor jumps if its root mean square is at least this many times that of another batch."""
SPIKE = 10.0
"""A gradient norm jumps if it is at least this many times the median of recent steps."""
RECENT, FEWEST = 32, 8
"""Number of recent steps whose median is compared with, and the minimum number of them."""


class Seen(NamedTuple):
    """A tensor that a module has read or written."""

    name: str
    """Name of the tensor, such as "the output of layers.3.ffn.w2"."""
    rms: float
    """Root mean square; NaN or infinite if any element is."""


def trace(step: TrainStep, batches: Batches) -> list[Seen]:
    """Return the weights, then what the modules compute for these batches, in order; gradients are dropped after.

    Called by all ranks together: wrappers communicate as in a step.
    """
    inner = getattr(step.model, "module", step.model)
    values = _Values()
    for name, parameter in inner.named_parameters():
        values.add(f"the weight {name}", parameter)
    with _module_by_module(inner):
        (_trace_batches if step.pipeline is None else _trace_pipeline)(step, inner, batches, values)
    for name, parameter in inner.named_parameters():
        if parameter.grad is not None:
            values.add(f"the gradient of {name}", parameter.grad)
    if step.graph is None:  # graphs overwrite gradients in the memory that they were captured with
        step.model.zero_grad(set_to_none=True)
    return values.read()


def _trace_batches(step: TrainStep, inner: nn.Module, batches: Batches, values: "_Values") -> None:
    for inputs, targets in batches:
        with _hooks(inner, values), step.autocast():  # without hooks in backward, which may recompute blocks
            logits = step.model(inputs)
        loss = step.loss(logits, targets)
        values.add("the loss", loss)
        (loss * (step.loss_scale.value / len(batches))).backward()
        finish = getattr(step.model, "finish_gradient_synchronization", None)
        if finish is not None:
            finish()


def _trace_pipeline(step: TrainStep, inner: nn.Module, batches: Batches, values: "_Values") -> None:
    """Run the micro batches through the stages of a pipeline; each rank measures the modules that it has."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        found = step.loss(logits, targets)
        values.add("the loss", found)
        return found

    with _hooks(inner, values), step.loss_context():
        step.pipeline.accumulate(batches, lambda found: found * (step.loss_scale.value / len(batches)), loss)
    step.model.finish_gradient_synchronization()  # type: ignore[operator]


def first_not_finite(seen: Sequence[Seen]) -> str | None:
    """Return the name of the first tensor that is not finite."""
    return next((name for name, rms in seen if not rms < float("inf")), None)


def first_jump(seen: Sequence[Seen], usual: Sequence[Seen]) -> str | None:
    """Return the first tensor whose values are JUMP times as large as those of another batch, with both sizes."""
    before = dict(usual)
    for name, rms in seen:
        if name in before and rms > JUMP * before[name] > 0:
            return f"{name}: {rms:.3g} (root mean square), {rms / before[name]:.1f} times that of the step before"
    return None


class Tracer:
    """Explains the steps of a run that are not finite, or whose gradient norm jumps. All ranks call it together."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=RECENT)

    def explain(
        self, step: TrainStep, result: StepResult, batches: Batches, before: Callable[[], Batches]
    ) -> str | None:
        """Return an explanation of the step that was just run on `batches`; None if there is nothing to explain.

        `before` gives the batches of the step before. The weights are those after the step.
        """
        norm, usual = result.gradient_norm, statistics.median(self._norms) if len(self._norms) >= FEWEST else math.inf
        if math.isfinite(norm):
            self._norms.append(norm)
        if result.update is Update.SKIPPED:
            found = _named(first_not_finite(trace(step, batches)), step)
            return f"not finite first in {found}" if found else "not finite, but computed module by module it is"
        if norm < SPIKE * usual or result.update is not Update.APPLIED:
            return None
        found = _named(first_jump(trace(step, batches), trace(step, before())), step)
        seen = f"first seen in {found}" if found else "no module stands out: the weights have changed, not the data"
        return f"the gradient's norm is {norm:.3g}, {norm / usual:.1f} times the median of recent steps; {seen}"


def _named(found: str | None, step: TrainStep) -> str | None:
    """Return the finding of the first rank that has one; in a pipeline gradients come from the last rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    every = [(rank, text) for rank, text in enumerate(gather(found)) if text]
    if step.pipeline is not None:
        every.sort(key=lambda each: (True, -each[0]) if each[1].startswith("the gradient") else (False, each[0]))
    return next((f"{text} (rank {rank})" for rank, text in every), None)


class _Values:
    """Root mean squares by name, the largest of all micro batches, kept on the device until all are computed."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        tensor = local_part(tensor.detach())
        if tensor.is_floating_point() and tensor.numel():
            # The largest first: squares of finite values may overflow.
            largest = tensor.abs().amax().float()
            scale = torch.where(largest > 0, largest, 1.0)
            rms = largest * (tensor.float() / scale).square().mean().sqrt()
            known = self._found.get(name)
            self._found[name] = rms if known is None else torch.maximum(known, rms)  # maximum keeps NaN

    def read(self) -> list[Seen]:
        if not self._found:
            return []
        values = torch.stack([value.to("cpu") for value in self._found.values()]).tolist()
        return [Seen(name, value) for name, value in zip(self._found, values, strict=True)]


@contextmanager
def _module_by_module(model: nn.Module) -> Iterator[None]:
    """Call every module separately, because fused kernels would bypass modules."""
    is_fused = getattr(model, "is_fused", None)
    if is_fused is None:
        yield
        return
    model.is_fused = False  # type: ignore[assignment]
    try:
        yield
    finally:
        model.is_fused = is_fused


@contextmanager
def _hooks(model: nn.Module, values: _Values) -> Iterator[None]:
    """Measure all tensors that a module without submodules reads and writes, and the gradient of its outputs."""
    handles = []
    calls: Counter[str] = Counter()

    def watch(module_name: str, module: nn.Module) -> None:
        def measure(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls[module_name] += 1
            name = module_name if calls[module_name] == 1 else f"{module_name} (call {calls[module_name]})"
            for tensor in inputs:
                if isinstance(tensor, Tensor):
                    values.add(f"the input of {name}", tensor)
            if isinstance(output, Tensor):
                values.add(f"the output of {name}", output)
                if output.requires_grad:
                    output.register_hook(lambda grad: values.add(f"the gradient of the output of {name}", grad))

        handles.append(module.register_forward_hook(measure))

    for name, module in model.named_modules():
        if not list(module.children()):
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
