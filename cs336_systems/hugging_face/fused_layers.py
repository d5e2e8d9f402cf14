"""Forward methods for modules of transformers' Llama, Qwen2, Qwen3 and Mistral, made of the nodes of kernels/fused.

Each takes the place of one module's `forward` and has its arguments. Where its kernels do not apply (a cache of keys
and values, modules that were replaced, attention weights asked for) it calls the module's own.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.kernels.flash.operators import is_plain
from cs336_systems.kernels.fused import nodes, pointwise

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
"""The linear layers of a decoder layer, by the module they are in."""


def projections(layer: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a decoder layer."""
    return [getattr(getattr(layer, part), name) for part, names in PROJECTIONS.items() for name in names]


# -- a decoder layer --------------------------------------------------------------------------------------------------


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a decoder layer; under gradient checkpointing, recomputed in backward."""
    kwargs |= {"position_ids": position_ids, "use_cache": use_cache, "attention_mask": attention_mask}
    if past_key_values is not None or position_embeddings is None or not _is_as_patched(self, kwargs):
        kwargs |= {"past_key_values": past_key_values, "position_embeddings": position_embeddings}
        return type(self).forward(self, hidden_states, **kwargs)
    run: Callable[[Tensor], Tensor] = functools.partial(
        _fused_layer, self, position_embeddings=position_embeddings, **kwargs
    )
    if self.gradient_checkpointing and self.training and not _checkpoints_calls():
        return self._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)


def _is_as_patched(layer: Any, kwargs: dict[str, Any]) -> bool:
    """True unless a linear layer was replaced, say by an adapter, or the caller asks for attention weights."""
    wants_weights = kwargs.get("output_attentions", layer.self_attn.config.output_attentions)
    return not wants_weights and all(type(linear) is nn.Linear for linear in projections(layer))


@functools.cache
def _checkpoints_calls() -> bool:
    """Return True if transformers checkpoints a layer's call, False if its forward (from about 5.18 on)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" in vars(GradientCheckpointingLayer)


def _fused_layer(self: Any, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
    attn, mlp = self.self_attn, self.mlp
    x, qkv = _norm_linear(hidden_states, None, self.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj)
    out = _attend(attn, qkv, position_embeddings, **kwargs)
    del qkv
    delta = nodes.linear(out.flatten(-2), attn.o_proj.weight, attn.o_proj.bias)
    x, gate_up = _norm_linear(x, delta, self.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    return x + nodes.swiglu_linear(gate_up, mlp.down_proj.weight, mlp.down_proj.bias)


def _norm_linear(x: Tensor, delta: Tensor | None, norm: Any, *linears: nn.Linear) -> tuple[Tensor, Tensor]:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weights = [linear.weight for linear in linears]
    return nodes.norm_linear(x, delta, norm.weight, norm.variance_epsilon, *weights, biases=biases)


def _attend(attn: Any, qkv: Tensor, angles: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
    """Return attention, (batch, rows, heads, dim), by the implementation that the model's configuration names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    q, k, v = _rotated(attn, qkv, *angles)
    # Mistral has the window in its configuration; Qwen in the layers that have one.
    window = getattr(attn, "sliding_window", None)
    if attn.config.model_type == "mistral":
        window = attn.config.sliding_window
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attn.config._attn_implementation, _eager_attention(attn))
    dropout = attn.attention_dropout if attn.training else 0.0
    mask = kwargs.pop("attention_mask")
    kwargs |= {"dropout": dropout, "scaling": attn.scaling} | ({} if window is None else {"sliding_window": window})
    return attend(attn, q, k, v, mask, **kwargs)[0]


def _eager_attention(attn: nn.Module) -> Callable[..., Any]:
    return sys.modules[type(attn).__module__].eager_attention_forward


def _rotated(attn: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, (batch, heads, rows, dim), with Qwen3's norms of q and k, and the rotary embedding."""
    norms = None
    if hasattr(attn, "q_norm"):
        norms = nodes.HeadNorms(attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.variance_epsilon)
    heads = attn.q_proj.out_features // attn.head_dim
    return nodes.rotary_heads(qkv, cos.contiguous(), sin.contiguous(), heads, norms, halves=True)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Run an RMSNorm."""
    return nodes.add_norm(hidden_states, None, self.weight, self.variance_epsilon)[1]


# -- models -----------------------------------------------------------------------------------------------------------


def base_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a model without its head. In training it fills no cache of keys and values unless asked to."""
    if self.training and past_key_values is None and use_cache is None:
        use_cache = False
    kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
    kwargs |= {"inputs_embeds": inputs_embeds, "use_cache": use_cache}
    return type(self).forward(self, input_ids, **kwargs)


def causal_lm_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> Any:
    """Run a language model. In training with labels the result has a loss and no logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
    inputs |= {"inputs_embeds": inputs_embeds, "use_cache": use_cache}
    if labels is None or not _fuses_loss(self, logits_to_keep):
        return type(self).forward(self, input_ids, labels=labels, logits_to_keep=logits_to_keep, **inputs, **kwargs)
    return_dict = kwargs.pop("return_dict", None)
    outputs = self.model(input_ids, **inputs, **kwargs)
    result = CausalLMOutputWithPast(
        loss=_causal_lm_loss(outputs.last_hidden_state, self.lm_head.weight, labels, **kwargs),
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    is_dict = self.config.return_dict if return_dict is None else return_dict
    return result if is_dict else result.to_tuple()


def _fuses_loss(model: Any, logits_to_keep: int | Tensor) -> bool:
    """Return True in training, with the usual loss over all tokens and an unsharded head without bias."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
    head = model.lm_head
    head_is_plain = type(head) is nn.Linear and head.bias is None and is_plain(head.weight)
    return model.training and keeps_all and head_is_plain and model.loss_function is ForCausalLMLoss


def _causal_lm_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = pointwise.IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss as transformers' ForCausalLMLoss does: each token predicts the next."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device)
    count = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=hidden.device)
    return nodes.linear_cross_entropy(hidden, head, targets, ignored=ignore_index, count=count)
