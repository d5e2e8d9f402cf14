"""Configuration of a run: `ModelConfig`, `RunConfig` and the named `SIZES`. Validated data; standard library only.

A size is looked up by name and any of its fields may be overridden:

    RunConfig(model=model_config("small", context_length=256), mode="train-step", precision="bf16")

Plain size names are those of the course's 2025 handout. The 2026 handout uses some of the same names for other models,
so its names carry the year (`2026/xl`). Published models carry their family's name (`qwen2.5/0.5B`).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MODES = ("inference", "forward", "forward-backward", "train-step")
PLAIN_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Precisions that every step supports."""
PRECISIONS = (*PLAIN_PRECISIONS, "fp8")
LOW_PRECISIONS = ("bf16", "fp16", "fp8")
"""Precisions whose activations have 16 bits. With "fp8" these are bf16, and the operands of the blocks' matmuls FP8."""
FP8_MULTIPLE = 16
"""The dimensions of a matmul in FP8 are multiples of this."""
FP8_LOST = "fp8 lost: "
"""Prefix of the training metrics that give, for each tensor, the share of elements that FP8 rounded to 0."""
LARGEST_LOST_SHARE = 0.5
"""A block returns to bf16 if FP8 rounds a larger share of any of its tensors' elements to 0."""
HOPPER_ATTENTIONS = ("flash_hopper", "flash_hopper_repeatable")
"""Implementations of attention for Hopper GPUs alone."""
TRITON_ATTENTIONS = ("flash_triton", *HOPPER_ATTENTIONS)
ATTENTIONS = ("auto", "reference", "flash_torch", *TRITON_ATTENTIONS, "sdpa")

FAST_PARTS = ("kernels", "loss", "optimizer", "graph")
"""Parts of the fast step: fused kernels between the matmuls; a loss that never forms the full logits; an optimizer that
writes the low-precision weights; the step captured as a CUDA graph."""

OPTIMIZER_STATES = ("fp32", "bf16")

ADDED_LATER = {"fast": "off", "optimizer_state": "fp32", "update_in_backward": False, "memory_budget": ""}
"""Fields of RunConfig that older records do not have, with the values that those were measured with."""

FAMILY_FIELDS = {
    "num_kv_heads": 0,
    "d_head": 0,
    "qkv_bias": False,
    "qk_norm": False,
    "tied_embeddings": False,
    "norm_eps": 1e-5,
    "rope_scaling": "",
}
"""Fields of ModelConfig that tell families of models apart, with the values of the course's model. Older records and
checkpoints do not have them."""

LARGEST_NUMBER = 2**31 - 1
LARGEST = {"num_layers": 10_000}
"""Upper bounds: larger numbers are mistakes, and a prediction of a million blocks would take hours."""
SEEDS = range(-(2**63), 2**64)
"""Seeds that torch accepts."""


MARKED = re.compile(r"\0(\w+)\0")
"""A field's name as `arg` marks it; no command line has a NUL character."""


def arg(name: str) -> str:
    """Return a field's name for the message of a UserError, marked so that the command line shows it as a flag."""
    return f"\0{name}\0"


class UserError(ValueError):
    """An error that the user can fix: shown as one line with exit code 2 and no traceback.

    The command line shows fields as flags: `argument`, with which the message begins, and those marked by `arg`. All
    other words stay as they are: "the fast step" is no flag.
    """

    def __init__(self, message: str, argument: str = ""):
        assert message.startswith(argument), (message, argument)
        self.marked = arg(argument) + message.removeprefix(argument) if argument else message
        """The message with marked fields; `str` of the error has them plain."""
        super().__init__(MARKED.sub(r"\1", self.marked))


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the choice that is most like `name`; "" if none is."""
    import difflib

    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.7)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def without_unit(text: str) -> str:
    """Return what is wrong with a size of memory that is a bare number, and the way out; "" for other texts."""
    number = text.strip()
    return f"has no unit; use {number}GiB or {number}GB" if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", number) else ""


def flag(default: Any, help: str, choices: tuple[str, ...] | None = None, **metadata: Any) -> Any:
    """Return a dataclass field that is also a command-line flag; `flags.add_flags` lists the metadata."""
    return field(default=default, metadata={"help": help, "choices": choices, **metadata})


def flag_like(owner: type, name: str) -> Any:
    """Return the flag that `owner` declares, with its default, help and choices, for use in another command."""
    (spec,) = (spec for spec in dataclasses.fields(owner) if spec.name == name)
    return field(default=spec.default, metadata=spec.metadata)


def _at_least(least: int, owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}", name)
        if value > LARGEST.get(name, LARGEST_NUMBER):
            raise UserError(f"{name} must be at most {LARGEST.get(name, LARGEST_NUMBER)}, got {value}", name)


def require_seed(seed: int) -> None:
    if isinstance(seed, int) and seed not in SEEDS:
        raise UserError(f"seed must be a 64-bit number, got {seed}", "seed")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"unknown {arg(name)} {value!r}{nearest(value, choices)}; choose one of: {', '.join(choices)}")


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer's shape."""

    vocab_size: int = flag(10_000, "vocabulary size")
    context_length: int = flag(512, "tokens per sequence")
    d_model: int = flag(768, "width of the residual stream")
    num_layers: int = flag(12, "Transformer blocks")
    num_heads: int = flag(12, "attention heads")
    d_ff: int = flag(3072, "inner width of the feed-forward network")
    rope_theta: float = flag(10_000.0, "base of the rotary position embedding")
    num_kv_heads: int = flag(0, "heads of keys and values, shared by groups of query heads (0: as many as heads)")
    d_head: int = flag(0, "dimensions of a head (0: d_model / num_heads)")
    qkv_bias: bool = flag(False, "biases on the projections of queries, keys and values")
    qk_norm: bool = flag(False, "RMS norms of each head's queries and keys")
    tied_embeddings: bool = flag(False, "the head has the weights of the token embedding")
    norm_eps: float = flag(1e-5, "epsilon of RMS norms")
    rope_scaling: str = flag("", "Llama 3's scaling of rotary frequencies: factor,low,high,original context")

    def __post_init__(self) -> None:
        _at_least(1, self, "vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff")
        _at_least(0, self, "num_kv_heads", "d_head")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be a finite number above 0, got {value!r}", name)
            object.__setattr__(self, name, float(value))
        for name in ("qkv_bias", "qk_norm", "tied_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if not self.d_head and self.d_model % self.num_heads:
            raise UserError(
                f"d_model {self.d_model} is not divisible by {arg('num_heads')} {self.num_heads}; "
                f"change one so that each head gets a whole number of dimensions, or give {arg('d_head')}",
                "d_model",
            )
        if self.head_dim % 2:
            how = f"d_model / num_heads = {self.d_model} / {self.num_heads} = " if not self.d_head else ""
            raise UserError(
                f"head dimension {how}{self.head_dim} is odd; "
                f"rotary embeddings rotate pairs of dimensions, so it must be even"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of {arg('num_kv_heads')} {self.kv_heads}; change one "
                f"so that groups of query heads share a KV head",
                "num_heads",
            )
        if self.kv_heads == self.num_heads:  # one model has one configuration
            object.__setattr__(self, "num_kv_heads", 0)
        if self.d_head * self.num_heads == self.d_model:
            object.__setattr__(self, "d_head", 0)
        _ = self.frequency_scaling

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def q_width(self) -> int:
        """Elements of a token's queries, and of attention's output."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    @property
    def frequency_scaling(self) -> tuple[float, float, float, float] | None:
        """`rope_scaling` as factor, low and high frequency factor and original context; None without it."""
        if not isinstance(self.rope_scaling, str):
            raise UserError(f"rope_scaling must be a text, got {self.rope_scaling!r}", "rope_scaling")
        if not self.rope_scaling:
            return None
        try:
            factor, low, high, original = (float(part) for part in self.rope_scaling.split(","))
        except ValueError:
            factor = low = high = original = math.nan
        if not (1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= original < math.inf):
            raise UserError(
                f"rope_scaling {self.rope_scaling!r} is not factor,low,high,original context with factor at least 1 "
                f"and low below high, such as 8,1,4,8192",
                "rope_scaling",
            )
        return factor, low, high, original

    @property
    def linear_parameters(self) -> int:
        """Weights of matmuls: attention and feed-forward projections of all blocks, and the head, also a tied one."""
        per_block = self.d_model * (self.qkv_width + self.q_width) + 3 * self.d_model * self.d_ff
        return self.num_layers * per_block + self.vocab_size * self.d_model

    @property
    def vector_parameters(self) -> int:
        """Gains of norms, and biases."""
        per_block = 2 * self.d_model + self.qkv_bias * self.qkv_width + 2 * self.qk_norm * self.head_dim
        return self.num_layers * per_block + self.d_model

    @property
    def parameters(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.d_model
        return embedding + self.linear_parameters + self.vector_parameters

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, without those of FAMILY_FIELDS at their defaults: older files keep their cell keys."""
        return {name: value for name, value in vars(self).items() if FAMILY_FIELDS.get(name, ...) != value}


@dataclass(frozen=True)
class RunConfig:
    """One cell of an experiment: a model, what a step does with it, and how it is measured."""

    model: ModelConfig = field(default_factory=ModelConfig)
    size: str = ""
    """The name shown in tables; derived from the model's shape when empty. It does not affect the computation."""
    batch_size: int = flag(4, "sequences per step")
    mode: str = flag("train-step", "what a step does", MODES)
    precision: str = flag(
        "fp32", "fp32 (TF32 off), tf32, autocast to bf16 / fp16, or fp8 for the matmuls of bf16 blocks", PRECISIONS
    )
    attention: str = flag("reference", "attention implementation", ATTENTIONS)
    checkpoint_blocks: int = flag(0, "recompute activations in groups of this many blocks (0: keep them all)")
    memory_budget: str = flag(
        "", "peak memory to stay within, such as 130GiB or auto: plans what is kept, recomputed and offloaded"
    )
    compile: bool = flag(False, "run the model through torch.compile")
    fast: str = flag("off", f"the fast step: on, off, or some of {','.join(FAST_PARTS)}")
    optimizer_state: str = flag(
        "fp32",
        "fp32: master weights and moments in fp32; bf16: weights and moments in bf16 alone (less memory, coarser)",
        OPTIMIZER_STATES,
    )
    update_in_backward: bool = flag(
        False,
        "update each weight as soon as its gradient is final; gradients are not kept (one micro batch, no clipping)",
    )
    max_grad_norm: float = flag(0.0, "clip the gradient's norm to this (0: no clipping)")
    device: str = flag("cpu", "cpu, cuda or cuda:N")
    warmup_steps: int = flag(5, "steps run before measuring")
    num_steps: int = flag(10, "steps measured")
    seed: int = flag(0, "seed of weights and tokens")
    model_factory: str | None = flag(None, "package.module:factory of your own nn.Module")

    def __post_init__(self) -> None:
        _at_least(1, self, "batch_size", "num_steps")
        _at_least(0, self, "warmup_steps", "checkpoint_blocks")
        _one_of("mode", self.mode, MODES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        require_seed(self.seed)
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0):
            value = self.max_grad_norm
            raise UserError(f"max_grad_norm must be a finite number of at least 0, got {value!r}", "max_grad_norm")
        if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", self.device):
            raise UserError(f"unknown {arg('device')} {self.device!r}; use cpu, cuda or cuda:N")
        factory = self.model_factory
        if factory is not None and not re.fullmatch(r"[\w.]+:\w+", factory):
            raise UserError(f"model_factory {factory!r} is not of the form package.module:factory", "model_factory")
        if not self.size:
            object.__setattr__(self, "size", size_name(self.model))
        object.__setattr__(self, "fast", self._checked_fast())
        if self.optimizer_state != "fp32":
            self._require_packed_bf16()
        if self.precision == "fp8" and (problem := self._fp8_problem()):
            raise UserError(f"precision fp8 {problem}", "precision")
        if self.update_in_backward and (problem := self._update_conflict()):
            raise UserError(f"update_in_backward {problem}", "update_in_backward")
        if self.memory_budget and (problem := self._budget_problem()):
            raise UserError(f"memory_budget {self.memory_budget!r} {problem}", "memory_budget")

    def _require_packed_bf16(self) -> None:
        """Raise UserError unless the fast step's optimizer updates bf16 weights."""
        if "optimizer" not in self.fast_parts or self.precision not in ("bf16", "fp8"):
            raise UserError(
                f"optimizer_state {self.optimizer_state} needs {arg('precision')} bf16 or fp8 and the optimizer of the "
                f"fast step, got {arg('precision')} {self.precision} and {arg('fast')} {self.fast}; use "
                f"{arg('precision')} bf16 and {arg('fast')} on, in one process",
                "optimizer_state",
            )

    def _fp8_problem(self) -> str | None:
        """Return why matmuls cannot be in FP8, or None."""
        model = self.model
        if "kernels" not in self.fast_parts:
            return f"needs the kernels of the fast step, got {arg('fast')} {self.fast}; use {arg('fast')} on"
        if self.attention in ("reference", "sdpa"):
            return f"needs the fused attention of this package, not {self.attention}; use {arg('attention')} auto"
        if self.checkpoint_blocks:
            return f"recomputes by a {arg('memory_budget')}; leave {arg('checkpoint_blocks')} out"
        sizes = {name: getattr(model, name) for name in ("d_model", "d_ff", "q_width", "kv_width", "context_length")}
        for name, size in sizes.items():
            if size % FP8_MULTIPLE:
                how = f"use {arg('precision')} bf16"
                return f"needs sizes that are multiples of {FP8_MULTIPLE}, got {name} {size}; {how}"
        return None

    def _update_conflict(self) -> str | None:
        """Return why weights cannot be updated while backward runs, or None."""
        if "optimizer" not in self.fast_parts:
            needs = "needs the optimizer of the fast step"
            if self.fast == "on":
                return f"{needs}, which {self._fast_conflict('optimizer')}"
            return f"{needs}, got {arg('fast')} {self.fast}; use {arg('fast')} on"
        if self.model.tied_embeddings:
            problem = "needs a head of its own: the gradient of a tied one is final at the end"
            return f"{problem}; use {arg('tied_embeddings')} false"
        if self.max_grad_norm:
            found = f"{arg('max_grad_norm')} {self.max_grad_norm}"
            return f"cannot clip: the norm is known after backward, got {found}; use 0"
        if self.compile:
            return f"cannot be combined with {arg('compile')}, whose backward is one operation"
        return None

    def _checked_fast(self) -> str:
        """Return `fast` in its shortest form; raise UserError for a part that this configuration does not support."""
        if not isinstance(self.fast, str):
            raise UserError(f"fast must be on, off, or some of {', '.join(FAST_PARTS)}, got {self.fast!r}", "fast")
        if self.fast in ("on", "off"):
            return self.fast
        asked = self.fast.replace(" ", "").split(",")
        if {"on", "off"} & set(asked):
            raise UserError(f"fast {self.fast!r}: on and off cannot be combined with anything", "fast")
        if unknown := [part for part in asked if part not in FAST_PARTS]:
            meant = nearest(unknown[0], ("on", "off", *FAST_PARTS))
            known = f"on, off, {', '.join(FAST_PARTS)}"
            raise UserError(f"fast {self.fast!r}: {unknown[0]!r}{meant} is none of: {known}", "fast")
        for part in asked:
            if problem := self._fast_conflict(part):
                raise UserError(f"fast {part}: {problem}", "fast")
        return ",".join(part for part in FAST_PARTS if part in asked)

    def _budget_problem(self) -> str | None:
        """Return why a memory budget is not supported here, or None."""
        if not re.fullmatch(r"auto|\d{1,6}(\.\d{1,6})?(GiB|GB|MiB|MB)", self.memory_budget):
            return without_unit(self.memory_budget) or "is not a size; use one such as 130GiB or 80GB, or auto"
        if self.checkpoint_blocks:
            return f"decides what is recomputed; leave {arg('checkpoint_blocks')} out"
        if self.mode not in ("forward-backward", "train-step"):
            return f"has nothing to choose in {arg('mode')} {self.mode}, which has no backward pass"
        if self.compile:
            return f"cannot plan a compiled model, whose compiler decides what is kept; leave {arg('compile')} out"
        if not self.plans_whole_blocks and self.attention in ("reference", "sdpa"):
            return f"needs the fused attention of this package for fused blocks, not {self.attention}; use auto"
        return None

    @property
    def plans_whole_blocks(self) -> bool:
        """True if a memory budget keeps, recomputes or offloads whole blocks; those of the fast step have finer plans,
        tensor by tensor."""
        return bool(self.memory_budget) and "kernels" not in self.fast_parts

    def _fast_conflict(self, part: str) -> str | None:
        """Return why a part of the fast step is not supported here, or None."""
        if self.model_factory is not None:
            return f"supports this package's model only, not {arg('model_factory')}"
        if part in ("kernels", "graph") and self.compile:
            return f"cannot be combined with {arg('compile')}"
        if part in ("optimizer", "graph") and self.mode != "train-step":
            return f"needs {arg('mode')} train-step, not {self.mode}"
        if part in ("optimizer", "graph") and self.precision == "fp16":
            return f"has no loss scaling, which fp16 needs; use {arg('precision')} bf16"
        if part == "graph" and self.device_type != "cuda":
            return "needs a CUDA GPU"
        return None

    @property
    def fast_parts(self) -> frozenset[str]:
        """The enabled parts of the fast step; "on" enables all that are supported."""
        if self.fast == "on":
            return frozenset(part for part in FAST_PARTS if self._fast_conflict(part) is None)
        return frozenset() if self.fast == "off" else frozenset(self.fast.split(","))

    @property
    def has_low_precision(self) -> bool:
        """True if activations have 16 bits."""
        return self.precision in LOW_PRECISIONS

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.model.context_length

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, without those of ADDED_LATER at their defaults: older files keep their cell keys."""
        values = {**vars(self), "model": self.model.to_dict()}
        return {name: value for name, value in values.items() if ADDED_LATER.get(name, ...) != value}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunConfig":
        """Return the RunConfig in an instrument's configuration, which may have more fields."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls.from_dict({name: value for name, value in config.items() if name in names})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(f"unknown configuration fields: {' '.join(', '.join(unknown).split())}")
        try:
            model = ModelConfig(**values["model"])
        except (KeyError, TypeError) as error:
            raise UserError(f"configuration without a valid model: {' '.join(str(error).split())}") from None
        fields: dict[str, Any] = {**values, "model": model}
        return cls(**fields)


def _shape(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> dict[str, int]:
    return {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}


def _llama(d_model: int, d_ff: int, num_layers: int, num_heads: int, scaling: str, **fields: Any) -> dict[str, Any]:
    shape = _shape(d_model, d_ff, num_layers, num_heads)
    return {**shape, "num_kv_heads": 8, "vocab_size": 128_256, "rope_theta": 5e5, "rope_scaling": scaling, **fields}


def _qwen(d_model: int, d_ff: int, num_layers: int, num_heads: int, num_kv_heads: int, **fields: Any) -> dict[str, Any]:
    shape = {**_shape(d_model, d_ff, num_layers, num_heads), "num_kv_heads": num_kv_heads}
    return {**shape, "vocab_size": 151_936, "rope_theta": 1e6, "norm_eps": 1e-6, **fields}


_BIASED: dict[str, Any] = {"qkv_bias": True}
_TIED: dict[str, Any] = {"tied_embeddings": True}
_NORMED: dict[str, Any] = {"qk_norm": True, "d_head": 128}

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {**_shape(128, 512, 4, 4), "context_length": 128},
    "small": _shape(768, 3072, 12, 12),
    "medium": _shape(1024, 4096, 24, 16),
    "large": _shape(1280, 5120, 36, 20),
    "xl": _shape(1600, 6400, 48, 25),
    "2.7B": _shape(2560, 10240, 32, 32),
    "xxl": _shape(16384, 53248, 126, 128),
    "2026/small": _shape(768, 3072, 12, 12),
    "2026/medium": _shape(1024, 4096, 24, 16),
    "2026/large": _shape(1280, 5120, 36, 20),
    "2026/xl": _shape(2560, 10240, 32, 32),
    "2026/10B": _shape(4608, 12288, 50, 36),
    "llama3/1B": _llama(2048, 8192, 16, 32, "32,1,4,8192", **_TIED),
    "llama3/3B": _llama(3072, 8192, 28, 24, "32,1,4,8192", **_TIED),
    "llama3/8B": _llama(4096, 14336, 32, 32, "8,1,4,8192"),
    "qwen2.5/0.5B": _qwen(896, 4864, 24, 14, 2, **_BIASED, **_TIED),
    "qwen2.5/1.5B": _qwen(1536, 8960, 28, 12, 2, **_BIASED, **_TIED),
    "qwen2.5/3B": _qwen(2048, 11008, 36, 16, 2, **_BIASED, **_TIED),
    "qwen2.5/7B": _qwen(3584, 18944, 28, 28, 4, **_BIASED, vocab_size=152_064),
    "qwen2.5/14B": _qwen(5120, 13824, 48, 40, 8, **_BIASED, vocab_size=152_064, norm_eps=1e-5),
    "qwen3/0.6B": _qwen(1024, 3072, 28, 16, 8, **_NORMED, **_TIED),
    "qwen3/1.7B": _qwen(2048, 6144, 28, 16, 8, **_NORMED, **_TIED),
    "qwen3/4B": _qwen(2560, 9728, 36, 32, 8, **_NORMED, **_TIED),
    "qwen3/8B": _qwen(4096, 12288, 36, 32, 8, **_NORMED),
}
"""Fields of ModelConfig by size. A published model has its own vocabulary; the caller chooses its context length."""
COURSE_SIZES = ("small", "medium", "large", "xl", "2.7B")
SIZES_2026 = ("small", "medium", "large", "2.7B", "2026/10B")
"""Sizes of the 2026 handout. Its xl is the 2.7B of 2025 and keeps that name: one model has one name in a file."""


def model_config(size: str, **overrides: Any) -> ModelConfig:
    """Return the model of a named size with any fields overridden; names are case-insensitive."""
    by_lower = {name.lower(): name for name in SIZES}
    if size.lower() not in by_lower:
        raise UserError(f"unknown {arg('size')} {size!r}{nearest(size, SIZES)}; choose one of: {', '.join(SIZES)}")
    return ModelConfig(**{**SIZES[by_lower[size.lower()]], **overrides})


def canonical_size(size: str, model: ModelConfig) -> str:
    """Return the name to show for `model`: `size` if the model still has the shape of that size."""
    return next((name for name in _sizes_of(model) if name.lower() == size.lower()), size_name(model))


def recorded_size(size: Any, model: Mapping[str, Any]) -> Any:
    """Return the name to show for a recorded model: `cs336 train` records `--size` as it was given, and other flags may
    have replaced fields of that size. A name that is none of SIZES stays."""
    if not isinstance(size, str) or size.lower() not in map(str.lower, SIZES):
        return size
    try:
        return canonical_size(size, ModelConfig(**model))
    except (TypeError, ValueError):  # fields of another version
        return size


def size_name(model: ModelConfig) -> str:
    """Return the first name in SIZES with this shape, or the shape itself."""
    shape = [str(size) for size in (model.d_model, model.d_ff, model.num_layers, model.num_heads)]
    shape += [f"kv{model.num_kv_heads}"] * bool(model.num_kv_heads) + [f"head{model.d_head}"] * bool(model.d_head)
    shape += ["bias"] * model.qkv_bias + ["qknorm"] * model.qk_norm + ["tied"] * model.tied_embeddings
    return next(_sizes_of(model), "/".join(shape))


def _sizes_of(model: ModelConfig) -> Iterator[str]:
    """Yield the names in SIZES that have the shape of `model`, whatever its context."""
    for name, shape in _shapes().items():
        if all(getattr(model, key) == value for key, value in shape.items()):
            yield name


@functools.cache
def _shapes() -> dict[str, dict[str, Any]]:
    """Return the model fields of each size, without the context length."""

    def shape(fields: dict[str, Any]) -> dict[str, Any]:
        named = ModelConfig(**fields)
        return {key: getattr(named, key) for key in {**fields, **FAMILY_FIELDS} if key != "context_length"}

    return {name: shape(fields) for name, fields in SIZES.items()}
