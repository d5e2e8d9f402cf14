"""Models of Hugging Face transformers trained with this project's kernels: `accelerate(model)` and an attention."""

from cs336_systems.hugging_face.attention_interface import register_attention
from cs336_systems.hugging_face.patch import Accelerated, accelerate

__all__ = ["Accelerated", "accelerate", "register_attention"]
