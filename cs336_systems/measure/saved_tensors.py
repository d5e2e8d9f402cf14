"""Tensors that a forward pass saves for backward, as reported by autograd, and the memory change in a block's
backward."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from cs336_systems.config import UserError
from cs336_systems.measure.memory_trace import StorageTracker, labelled
from cs336_systems.measure.where import ModuleStack, calling_line, describe_tensor
from cs336_systems.step.train_step import TrainStep


@dataclass(frozen=True)
class Saved:
    """A saved storage, listed once however many operators save it."""

    size: int
    module: str
    what: str
    line: str
    is_parameter: bool
    """True for a parameter's storage, which takes no extra memory."""
    operation: str = ""
    """The torch function that saves it; empty inside a compiled model or an autograd Function."""


class _Operations(TorchFunctionMode):
    """Tracks which torch function is running."""

    running = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running = (resolve_name(func) or "").split(".")[-1].strip("_")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = ""


def saved_tensors(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Saved]:
    """Return the storages saved by one forward pass and its loss, in the order in which they are saved."""
    if step.config.mode == "inference":
        raise UserError("mode 'inference' keeps nothing for backward; use forward, forward-backward or train-step")
    found: dict[int, Saved] = {}
    held: list[Tensor] = []  # keeps every storage allocated, so that no address is reused
    modules, operations = ModuleStack(), _Operations()
    parameters = {p.untyped_storage().data_ptr() for p in step.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in found and size:
            is_parameter = address in parameters
            where = (modules.innermost, describe_tensor(tensor), calling_line())
            found[address] = Saved(size, *where, is_parameter, operations.running)
            held.append(tensor.detach())
        return tensor

    with ExitStack() as stack:
        if not step.config.compile:  # a compiled model does not call its modules
            stack.enter_context(modules.following(step.model))
            stack.enter_context(operations)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        loss = step.loss(step.logits(batch[0]), batch[1])
    del loss
    return list(found.values())


class BlockBackward(NamedTuple):
    """Bytes of tensors over the backward pass of one block."""

    change: int
    """Bytes allocated after it minus bytes allocated before it."""
    gradients: int
    """Bytes of parameter gradients that it adds."""


def block_backward(step: TrainStep, batch: tuple[Tensor, Tensor], block: nn.Module) -> BlockBackward:
    """Return how the memory changes between the gradient of the block's output and that of its input."""
    tracker = StorageTracker()
    moments: list[Counter[str]] = []

    def watch(tensor: Tensor) -> None:
        tensor.register_hook(lambda grad: moments.append(tracker.live.copy()))

    handles = [
        block.register_forward_pre_hook(lambda module, inputs: watch(inputs[0])),
        block.register_forward_hook(lambda module, inputs, output: watch(output)),
    ]
    try:
        with labelled(step, tracker), tracker:
            step.loss(step.logits(batch[0]), batch[1]).backward()
    finally:
        for handle in handles:
            handle.remove()
    step.model.zero_grad(set_to_none=True)
    before, after = moments[0], moments[-1]
    return BlockBackward(after.total() - before.total(), after["gradients"] - before["gradients"])
