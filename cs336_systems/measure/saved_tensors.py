"""Tensors that a forward pass saves for backward, as reported by autograd; works for any model."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336_systems.config import UserError
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
    """A parameter's storage takes no extra memory."""


def saved_tensors(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Saved]:
    """Return the storages saved by one forward pass and its loss, in the order in which they are saved."""
    if step.config.mode == "inference":
        raise UserError("mode 'inference' keeps nothing for backward; use forward, forward-backward or train-step")
    found: dict[int, Saved] = {}
    held: list[Tensor] = []  # keeps every storage allocated, so that no address is reused
    modules = ModuleStack()
    parameters = {p.untyped_storage().data_ptr() for p in step.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in found and size:
            is_parameter = address in parameters
            found[address] = Saved(size, modules.innermost, describe_tensor(tensor), calling_line(), is_parameter)
            held.append(tensor.detach())
        return tensor

    with ExitStack() as stack:
        if not step.config.compile:  # a compiled model does not call its modules
            stack.enter_context(modules.following(step.model))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        loss = step.loss(step.logits(batch[0]), batch[1])
    del loss
    return list(found.values())
