"""The Llama of the same shape in Hugging Face's transformers, which the fast step is compared with.

    cs336 bench --model cs336_systems.experiments.steps.llama:build --compile --precision bf16

transformers is not installed with this package.
"""

from typing import Any


def build(
    *, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int, rope_theta: float
) -> Any:
    """A LlamaForCausalLM that returns logits alone, without the KV cache that only sampling needs."""
    from torch import Tensor, nn
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(nn.Module):
        def __init__(self, llama: nn.Module):
            super().__init__()
            self.llama = llama

        def forward(self, tokens: Tensor) -> Tensor:
            return self.llama(tokens, use_cache=False).logits

    fields: dict[str, Any] = {  # transformers declares not all that it accepts
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "hidden_size": d_model,
        "intermediate_size": d_ff,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    return Logits(LlamaForCausalLM(LlamaConfig(**fields)))
