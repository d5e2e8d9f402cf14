"""Command-line flags for a model's shape and its step, shared by all commands that build or predict a model."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import ModelConfig, RunConfig, UserError, canonical_size, flag, flag_like, model_config

MODEL_FIELDS = frozenset(spec.name for spec in dataclasses.fields(ModelConfig))
SHAPE_FIELDS = ("d_model", "num_layers", "num_heads", "d_ff")
LIMITS = {
    "num_layers": 2_000,
    "d_model": 1_000_000,
    "d_ff": 10_000_000,
    "vocab_size": 100_000_000,
    "context_length": 100_000_000,
    "batch_size": 100_000_000,
}
"""Largest values for which a prediction is made: far beyond every real model, and still fast to predict."""

OWN_MODEL = "package.module:factory of your own nn.Module, which has its own attention and recomputation"


def of_size(name: str, default: str = "the size's") -> Any:
    """Return the flag of a field of ModelConfig, None by default."""
    return flag(None, f"{flag_like(ModelConfig, name).metadata['help']} (default: {default})")


@dataclass(frozen=True)
class FamilyArguments:
    """Fields of a model that distinguish Llama, Qwen and the course's model."""

    rope_theta: float | None = of_size("rope_theta")
    num_kv_heads: int | None = of_size("num_kv_heads")
    d_head: int | None = of_size("d_head")
    qkv_bias: bool | None = of_size("qkv_bias")
    qk_norm: bool | None = of_size("qk_norm")
    tied_embeddings: bool | None = of_size("tied_embeddings")
    norm_eps: float | None = of_size("norm_eps")
    rope_scaling: str | None = of_size("rope_scaling")


@dataclass(frozen=True)
class ModelArguments(FamilyArguments):
    """A size by name; any of its fields can be overridden."""

    size: str = flag(
        "", "tiny, small, medium, large, xl, 2.7B, 2026/xl, qwen2.5/0.5B, ... (default: small; tiny without a GPU)"
    )
    vocab_size: int | None = of_size("vocab_size")
    context_length: int | None = of_size("context_length")
    d_model: int | None = of_size("d_model")
    num_layers: int | None = of_size("num_layers")
    num_heads: int | None = of_size("num_heads")
    d_ff: int | None = of_size("d_ff")

    @property
    def has_shape(self) -> bool:
        """True if a size or a field of the shape is given."""
        return bool(self.size) or any(getattr(self, name) is not None for name in SHAPE_FIELDS)

    def named_model(self, default_size: str = "small", **fields: Any) -> tuple[str, ModelConfig]:
        """Return the name of the size and the model; `fields` of the model and a size override the arguments."""
        given = {name: getattr(self, name) for name in MODEL_FIELDS if getattr(self, name) is not None}
        given |= {name: value for name, value in fields.items() if name in MODEL_FIELDS}
        # A shape without a size name starts from `small`, as in the course's own script.
        shape_given = given.keys() & set(SHAPE_FIELDS)
        size = fields.get("size", self.size) or ("small" if shape_given else default_size)
        model = model_config(size, **given)
        return canonical_size(size, model), model


@dataclass(frozen=True)
class ShapeArguments(ModelArguments):
    """A model and its step."""

    batch_size: int = flag_like(RunConfig, "batch_size")
    mode: str = flag_like(RunConfig, "mode")
    precision: str = flag_like(RunConfig, "precision")
    attention: str = flag_like(RunConfig, "attention")
    checkpoint_blocks: int = flag_like(RunConfig, "checkpoint_blocks")
    memory_budget: str = flag_like(RunConfig, "memory_budget")
    fast: str = flag_like(RunConfig, "fast")
    optimizer_state: str = flag_like(RunConfig, "optimizer_state")
    update_in_backward: bool = flag_like(RunConfig, "update_in_backward")

    def run_config(self, *, default_size: str = "small", **fields: Any) -> RunConfig:
        """Return the configuration; `fields` of the run or the model override the arguments."""
        size, model = self.named_model(default_size, **fields)
        names = ("batch_size", "mode", "precision", "attention", "checkpoint_blocks", "memory_budget")
        own = ("fast", "optimizer_state", "update_in_backward")
        run = {name: getattr(self, name) for name in (*names, *own)}
        more = {name: value for name, value in fields.items() if name not in {*MODEL_FIELDS, "size"}}
        return RunConfig(model=model, size=size, **{**run, **more})

    def predicted_config(self, **fields: Any) -> RunConfig:
        """Return the configuration on a GPU, for a prediction; raise UserError for sizes beyond LIMITS."""
        return within_limits(self.run_config(device="cuda", **fields))


def within_limits(config: RunConfig) -> RunConfig:
    """Return the configuration; raise UserError if a prediction of it would take too long."""
    for name, limit in LIMITS.items():
        value = getattr(config if name == "batch_size" else config.model, name)
        if value > limit:
            raise UserError(f"--{name} {value:,} is too large for a prediction: at most {limit:,}")
    return config
