"""`accelerate(model)`: a model of transformers trains with this project's kernels until `undo` is called.

Forward methods of instances are replaced, never those of classes. Weights that multiply the same input (q, k and v;
gate and up) become views of one matrix, so that they are multiplied at once. The parameters remain the same objects
under the same names, and state_dict, save_pretrained and optimizers work as before.
"""

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from cs336_systems.config import UserError
from cs336_systems.hugging_face import fused_layers
from cs336_systems.hugging_face.attention_interface import register_attention
from cs336_systems.kernels.flash.operators import is_plain
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
"""Model type -> the name that its classes begin with."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEIGHBOURS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""Weights of a decoder layer that multiply the same input."""


class Accelerated:
    """A model with replaced forward methods. `undo` restores it."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._base = _checked_base(model)
        self._undo: list[Callable[[], None]] = []
        try:
            self._patch_all()
        except BaseException:  # say, no memory for a joined matrix
            self.undo()
            raise

    def __repr__(self) -> str:
        state = f"{len(self._base.layers)} layers" if self._undo else "undone"
        return f"<{type(self).__name__} {type(self.model).__name__}: {state}>"

    def _patch_all(self) -> None:
        self._set_attention(register_attention())
        for layer in self._base.layers:
            for part, names in NEIGHBOURS:
                self._join([getattr(getattr(layer, part), name).weight for name in names])
            self._patch(layer, fused_layers.layer_forward)
        self._patch(self._base.norm, fused_layers.norm_forward)
        self._patch(self._base, fused_layers.base_forward)
        if _is_language_model(self.model):
            self._patch(self.model, fused_layers.causal_lm_forward)

    def _set_attention(self, name: str) -> None:
        """Give the model a configuration of its own with this attention, because other models may share its present
        one."""
        shared = self._base.config
        own = copy.copy(shared)
        own._attn_implementation = name

        def exchange(old: Any, new: Any) -> None:
            for module in self.model.modules():
                if vars(module).get("config") is old:
                    module.config = new

        self._undo.append(lambda: exchange(own, shared))
        exchange(shared, own)

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        # torch.compile leaves it as it is. (As a decorator, `disable` would import the compiler with this package.)
        module.forward = MethodType(torch.compiler.disable(forward), module)
        self._undo.append(lambda: delattr(module, "forward"))

    @torch.no_grad()
    def _join(self, weights: list[nn.Parameter]) -> None:
        """Make weights views of one matrix."""
        if len({(weight.dtype, weight.device) for weight in weights}) > 1:
            return
        matrix = torch.cat([weight.data for weight in weights])
        memory = matrix.untyped_storage().data_ptr()

        def part() -> None:
            for weight in weights:
                is_packed = hasattr(weight, "grad_memory")  # its memory may have been the matrix's before
                if weight.untyped_storage().data_ptr() == memory and not is_packed:
                    weight.data = weight.data.clone()

        self._undo.append(part)
        for weight, rows in zip(weights, matrix.split([len(weight) for weight in weights]), strict=True):
            weight.data = rows

    def undo(self) -> None:
        """Restore the model: its forward methods, its attention, and each weight in memory of its own.

        Weights that a packed optimizer owns stay in its memory. A second call does nothing.
        """
        while self._undo:
            self._undo.pop()()

    def packed_adamw(self, *, update_in_backward: bool = False, **options: Any) -> PackedAdamW:
        """Build the packed AdamW for the model; `options` are those of PackedAdamW: lr, weight_decay, max_grad_norm ...

        The weights keep the model's dtype, bf16 or fp32. Those of bf16 get fp32 masters and moments, unless
        `state_dtype` is torch.bfloat16. `update_in_backward` updates a layer as soon as its gradients are complete.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float32}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no parameters"
            raise UserError(f"the packed AdamW needs a model in bfloat16 or float32, got {names}; use model.to()")
        if update_in_backward and self._is_tied:
            raise UserError("update_in_backward needs a head of its own: this model's is tied to the embedding")
        # A stable sort: weights stay in the model's order, so q, k and v are adjacent, as are gate and up.
        ordered = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
        groups = self._gradient_groups(parameters) if update_in_backward else ()
        return PackedAdamW(ordered, dtype=dtypes.pop(), update_in_backward=groups, **options)

    @property
    def _is_tied(self) -> bool:
        head = getattr(self.model, "lm_head", None)
        return head is not None and head.weight is self._base.embed_tokens.weight

    def _gradient_groups(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters of each layer, and the others one by one."""
        layers = [[p for p in layer.parameters() if p.requires_grad] for layer in self._base.layers]
        in_layers = {parameter for layer in layers for parameter in layer}
        return [*(layer for layer in layers if layer), *([p] for p in parameters if p not in in_layers)]


def accelerate(model: nn.Module) -> Accelerated:
    """Make a Llama, Qwen2, Qwen3 or Mistral model of transformers train with this project's kernels.

        accelerated = accelerate(model)                      # the model in its dtype, on its device
        optimizer = accelerated.packed_adamw(lr=3e-4)        # or any optimizer of torch
        loss = model(input_ids, labels=labels).loss
        accelerated.undo()

    Attention, norms with the residual additions before them, rotary embedding, SwiGLU, and the head with its loss are
    fused; in training with labels the output has a loss and no logits. Generation with a cache of keys and values uses
    transformers' own code. Call it before torch.compile, wrappers of data parallelism and adapters.
    """
    return Accelerated(model)


def _checked_base(model: nn.Module) -> Any:
    """Return the model without its head; UserError where it cannot be accelerated."""
    register_attention()
    base: Any = getattr(model, "base_model", model)
    type_of = getattr(getattr(base, "config", None), "model_type", None)
    name = FAMILIES.get(type_of or "", "")
    module = f"transformers.models.{type_of}.modeling_{type_of}"
    if not name or type(base).__name__ != f"{name}Model" or {type(model).__module__, type(base).__module__} != {module}:
        raise UserError(
            f"accelerate takes models of transformers, {', '.join(FAMILIES.values())}, without wrappers; "
            f"got {type(model).__name__}"
        )
    if base.config.hidden_act not in ("silu", "swish"):
        raise UserError(f"accelerate takes models with SwiGLU, hidden_act 'silu'; got {base.config.hidden_act!r}")
    for parameter in model.parameters():
        if parameter.dtype not in DTYPES or parameter.is_meta or not is_plain(parameter):
            found = "on the meta device" if parameter.is_meta else str(parameter.dtype)
            raise UserError(f"accelerate takes weights in float32, bfloat16 or float16, loaded and whole; got {found}")
    for module in (model, base, base.norm, *base.layers):
        if (own := vars(module).get("forward")) is None:
            continue
        if getattr(own, "__module__", "") == fused_layers.__name__:
            raise UserError(f"{type(model).__name__} is already accelerated; call undo() first")
        raise UserError(f"{type(module).__name__} already has a forward of its own: accelerate(model) comes first")
    for layer in base.layers:
        for linear in fused_layers.projections(layer):
            if type(linear) is not nn.Linear:
                raise UserError(f"accelerate takes plain nn.Linear layers, got {type(linear).__name__}: merge adapters")
    return base


def _is_language_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForCausalLM")
