"""A training step as CUDA graphs: the device runs one launch after another without waiting for Python.

Three graphs, so that any number of micro batches can be added up: the gradients of the first, those of a later one, the
update. The first steps run as they are, and count; they load the kernels and find the memory that a graph needs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EAGER_STEPS = 2

Gradients = Callable[[Tensor, Tensor, float], Tensor]
"""(inputs, targets, factor of the gradient) -> detached loss."""


class StepGraph:
    """Called with the micro batches of a step. Those of another shape than the first run as they are.

    `gradients` must overwrite gradients that are None, and add to others; `drop` sets them to None.
    """

    def __init__(self, gradients: Gradients, update: Callable[[], None], drop: Callable[[], None]):
        self._gradients, self._update, self._drop = gradients, update, drop
        self._eager = 0
        self._stream = torch.cuda.Stream()
        self._parts: dict[str, torch.cuda.CUDAGraph] = {}
        self._losses: dict[str, Tensor] = {}
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None
        self._count = 0
        self.peak_memory = 0
        """Bytes, while it was captured: a replay allocates nothing."""

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The mean loss, on the device."""
        if self._eager < EAGER_STEPS or not self._is_captured_for(batches):
            if self._eager < EAGER_STEPS or self._inputs is not None:
                return self._as_it_is(batches)
            self._capture(batches)
        assert self._inputs is not None
        assert self._targets is not None
        losses = []
        for number, (inputs, targets) in enumerate(batches):
            self._inputs.copy_(inputs)
            self._targets.copy_(targets)
            name = "later" if number else "first"
            self._parts[name].replay()
            losses.append(self._losses[name].clone())
        self._parts["update"].replay()
        return torch.stack(losses).mean()

    def _is_captured_for(self, batches: Sequence[tuple[Tensor, Tensor]]) -> bool:
        inputs = self._inputs
        return inputs is not None and len(batches) == self._count and all(b[0].shape == inputs.shape for b in batches)

    def _as_it_is(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """On the stream that will capture, so that what autograd remembers of streams is right there, too."""
        self._eager += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._drop()
            losses = [self._gradients(inputs, targets, 1 / len(batches)) for inputs, targets in batches]
            self._update()
            loss = torch.stack(losses).mean()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._drop()
        torch.cuda.reset_peak_memory_stats()
        self._count = len(batches)
        self._inputs, self._targets = batches[0][0].clone(), batches[0][1].clone()
        pool = torch.cuda.graph_pool_handle()
        for name in ("first", "later")[: self._count]:
            self._parts[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._parts[name], pool=pool, stream=self._stream):
                self._losses[name] = self._gradients(self._inputs, self._targets, 1 / self._count)
        self._parts["update"] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._parts["update"], pool=pool, stream=self._stream):
            self._update()
        self.peak_memory = torch.cuda.max_memory_allocated()
