"""Measure where the time and memory of training a Transformer go, and make it faster."""

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time `typing` would take longer to import than all of this package's root
    from typing import Any

__version__ = "0.2.0.dev0"

_PUBLIC = {
    "cs336_systems.config": ("ModelConfig", "RunConfig", "SIZES", "UserError", "model_config"),
    "cs336_systems.record": ("Metric", "Record", "append", "load"),
    "cs336_systems.model": ("TransformerLM",),
    "cs336_systems.step": ("TrainStep",),
    "cs336_systems.kernels": ("FlashAttentionTorch", "FlashAttentionTriton", "attention"),
    "cs336_systems.hugging_face": ("accelerate", "register_attention"),
    "cs336_systems.parallel": (
        "DDP",
        "FSDP",
        "FlatDDP",
        "NaiveDDP",
        "ShardedOptimizer",
        "clip_grad_norm_",
        "gather_full_params",
    ),
}
"""Module -> its public names. They are imported on first use: importing the package does not import torch."""
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
