"""The Llama of the same shape in Hugging Face's transformers: the fast step is compared with it, `accelerate` makes it
faster.

    cs336 bench --model cs336_systems.experiments.steps.llama:build --compile --precision bf16

transformers is not installed with this package.
"""

from collections.abc import Mapping
from typing import Any


def build(
    *, vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int, rope_theta: float
) -> Any:
    """Build a LlamaForCausalLM that returns logits alone, without the KV cache that only sampling needs."""
    from torch import Tensor, nn

    class Logits(nn.Module):
        def __init__(self, llama: nn.Module):
            super().__init__()
            self.llama = llama

        def forward(self, tokens: Tensor) -> Tensor:
            return self.llama(tokens, use_cache=False).logits

    shape = {"vocab_size": vocab_size, "context_length": context_length, "d_model": d_model, "num_layers": num_layers}
    return Logits(language_model({**shape, "num_heads": num_heads, "d_ff": d_ff, "rope_theta": rope_theta}))


def language_model(shape: Mapping[str, Any]) -> Any:
    """Build a LlamaForCausalLM; `shape` has the fields of ModelConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": shape["vocab_size"],
        "max_position_embeddings": shape["context_length"],
        "hidden_size": shape["d_model"],
        "intermediate_size": shape["d_ff"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**fields))
