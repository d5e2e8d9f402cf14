"""What a forward pass keeps for backward, tensor by tensor: asked of autograd itself, so it holds for any model."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.measure.where import ModuleStack, calling_line
from cs336_systems.step.train_step import TrainStep


@dataclass(frozen=True)
class Saved:
    """Memory that is kept, once, however many operators keep it."""

    size: int
    module: str
    what: str
    line: str
    is_parameter: bool
    """Then it would be there anyway."""


def saved_tensors(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Saved]:
    """Of one forward pass and its loss, in the order in which they were kept."""
    if step.config.mode == "inference":
        raise UserError("mode 'inference' keeps nothing for backward; use forward, forward-backward or train-step")
    found: dict[int, Saved] = {}
    held: list[Tensor] = []  # so that no two of them have the same address
    modules = ModuleStack()
    parameters = {p.untyped_storage().data_ptr() for p in step.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in found and storage.nbytes():
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            what = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
            found[address] = Saved(storage.nbytes(), modules.innermost, what, calling_line(), address in parameters)
            held.append(tensor.detach())
        return tensor

    def unpack(tensor: Any) -> Any:
        return tensor

    with ExitStack() as stack:
        if not step.config.compile:  # a compiled model is one function: its modules are not called
            stack.enter_context(modules.following(step.model))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        loss = step.loss(step.logits(batch[0]), batch[1])
    del loss
    return list(found.values())
