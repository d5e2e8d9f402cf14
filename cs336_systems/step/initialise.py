"""Initial weights of a model that was built on the "meta" device, without the whole model in memory."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

StoreWeight = Callable[[nn.Parameter, Tensor], None]
"""Stores a whole fp32 weight where the parameter has its memory: a packed tensor, or the shard of a rank."""


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device, store: StoreWeight) -> None:
    """Draw the weights module by module, by their `reset_parameters`, and give each to `store`.

    Random numbers are drawn in the order of the modules, as building on `device` draws them: the weights are the same.
    One module's weights exist in fp32 at a time. Buffers get their memory here where they have none. A module that
    shares its weights with an earlier one draws nothing.
    """
    drawn: set[nn.Parameter] = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        stored = {name: p for name, p in module._parameters.items() if p is not None}
        if not module._buffers and drawn.issuperset(stored.values()):
            continue
        drawn.update(stored.values())
        for name, parameter in stored.items():
            whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        module.reset_parameters()  # type: ignore[operator]
        for name, parameter in stored.items():
            store(parameter, cast(Tensor, module._parameters[name]))
            module._parameters[name] = parameter
