"""A training step as CUDA graphs: the device executes it without waiting for Python to launch kernels.

Three graphs support any number of micro batches: the gradients of the first one, the gradients of a later one, and the
update. The first steps run eagerly, and count as steps: they load the kernels and size the memory pools.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

EAGER_STEPS = 2

Batches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets of each micro batch."""
Gradients = Callable[[Tensor, Tensor, float], Tensor]
"""(inputs, targets, factor of the gradient) -> detached loss."""


class StepGraph:
    """Captures a step on its first micro batches and replays it; batches of another shape run eagerly.

    `gradients` must overwrite gradients that are None and accumulate into others; `drop` sets them to None.
    """

    def __init__(self, gradients: Gradients, update: Callable[[], None], drop: Callable[[], None]):
        self._gradients, self._update, self._drop = gradients, update, drop
        self._eager_steps = 0
        self._is_eager = True
        self._stream = torch.cuda.Stream()
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._losses: dict[str, Tensor] = {}
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None
        self._count = 0
        self.peak_memory = 0
        """Peak bytes during capture; a replay allocates nothing."""

    def prepare(self, batches: Batches) -> None:
        """Capture a step on micro batches of this number and shape, unless it is captured or more eager steps are
        needed."""
        if self._eager_steps >= EAGER_STEPS and self._inputs is None:
            self._inputs, self._targets = self._capture(batches)

    def forget(self) -> None:
        """Drop the captured graphs: the next step is captured again."""
        self._graphs.clear()
        self._losses.clear()
        self._inputs = self._targets = None

    def gradients(self, batches: Batches) -> Tensor:
        """Compute the gradients of a step and return the mean loss, on the device. Earlier gradients are overwritten.

        The first steps run eagerly, on the stream of the later capture: autograd nodes remember the stream they were
        made on. So do batches of another shape.
        """
        self.prepare(batches)
        self._is_eager = self._inputs is None or self._differs(batches)
        if self._is_eager:
            with self._on_stream():
                self._drop()
                eager = [self._gradients(inputs, targets, 1 / len(batches)) for inputs, targets in batches]
                return torch.stack(eager).mean()
        assert self._inputs is not None
        assert self._targets is not None
        losses = []
        for number, (inputs, targets) in enumerate(batches):
            self._inputs.copy_(inputs)
            self._targets.copy_(targets)
            name = "later" if number else "first"
            self._graphs[name].replay()
            losses.append(self._losses[name].clone())
        return torch.stack(losses).mean()

    def update(self) -> None:
        """Update the weights with the gradients that were computed last."""
        if not self._is_eager:
            self._graphs["update"].replay()
            return
        self._eager_steps += 1
        with self._on_stream():
            self._update()

    def _differs(self, batches: Batches) -> bool:
        assert self._inputs is not None
        return len(batches) != self._count or any(inputs.shape != self._inputs.shape for inputs, _ in batches)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Capture the three graphs; return the buffers that they read inputs and targets from."""
        self._drop()
        torch.cuda.reset_peak_memory_stats()
        self._count = len(batches)
        inputs, targets = (tensor.clone() for tensor in batches[0])
        pool = torch.cuda.graph_pool_handle()
        for name in ("first", "later")[: self._count]:
            self._graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[name], pool=pool, stream=self._stream):
                self._losses[name] = self._gradients(inputs, targets, 1 / self._count)
        self._graphs["update"] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graphs["update"], pool=pool, stream=self._stream):
            self._update()
        self.peak_memory = torch.cuda.max_memory_allocated()
        return inputs, targets
