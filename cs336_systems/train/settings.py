"""What to train: the flags of `cs336 train`. No torch here, so that mistakes are told at once."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from cs336_systems.config import (
    ATTENTIONS,
    FAST_PARTS,
    ModelConfig,
    RunConfig,
    UserError,
    flag,
    flag_like,
    model_config,
)

PARALLEL = ("none", "ddp", "ddp-sharded", "fsdp")
BYTES = 256
LAUNCH_BOUND = 4 << 20
"""Numbers in the residual stream of a micro batch. Without a CUDA graph, which ranks that talk to each other do not
have, fewer are over before Python has launched the fused kernels: large lost 26%, 2.7B won 13% (H200, 2,048 tokens)."""


@dataclass(frozen=True)
class TrainSettings:
    data: str = flag("", "a text file (bytes are tokens), or tokens: .bin (16-bit) or .npy")
    output: str = flag("runs/train", "folder of checkpoints and records; a run that is there goes on")
    size: str = flag("tiny", "a size's name; any of its fields may be replaced")
    vocab_size: int | None = flag(None, "vocabulary size (default: 256 for text, else 10000)")
    context_length: int | None = flag(None, "tokens per sequence (default: the size's)")
    d_model: int | None = flag(None, "width of the residual stream (default: the size's)")
    num_layers: int | None = flag(None, "Transformer blocks (default: the size's)")
    num_heads: int | None = flag(None, "attention heads (default: the size's)")
    d_ff: int | None = flag(None, "inner width of the feed-forward network (default: the size's)")
    steps: int = flag(200, "steps in all")
    batch_size: int = flag(8, "sequences in a step, over all ranks")
    micro_batch_size: int = flag(8, "sequences that a rank computes with at a time; less is accumulated")
    learning_rate: float = flag(1e-3, "at its peak")
    final_share: float = flag(0.1, "of the peak, at the end of the cosine")
    warmup_steps: int = flag(20, "steps until the peak")
    weight_decay: float = flag(0.1, "of matrices; norms have none")
    beta1: float = flag(0.9, "AdamW's")
    beta2: float = flag(0.95, "AdamW's")
    max_grad_norm: float = flag(1.0, "clip the gradient's norm to this (0: no clipping)")
    precision: str = flag_like(RunConfig, "precision")
    attention: str = flag("auto", "attention implementation", ATTENTIONS)
    checkpoint_blocks: int = flag_like(RunConfig, "checkpoint_blocks")
    compile: bool = flag_like(RunConfig, "compile")
    fast: str | None = flag(
        None, f"the fast step: on, off, or some of {','.join(FAST_PARTS)} (default: on for a GPU, off for a CPU)"
    )
    parallel: str = flag("ddp", "how ranks share the work: none, ddp, ddp-sharded (ZeRO 1), fsdp", PARALLEL)
    device: str | None = flag(None, "cpu or cuda (default: cuda where there is one)")
    rank_timeout: float = flag(600.0, "seconds that ranks wait for one that does not answer")
    seed: int = flag(0, "of weights and of the order of sequences")
    validation_share: float = flag(0.1, "of the file, its end: never trained on")
    log_every: int = flag(10, "steps between lines")
    eval_every: int = flag(50, "steps between evaluations (0: none)")
    eval_batches: int = flag(4, "micro batches in an evaluation, on each rank")
    save_every: int = flag(50, "steps between checkpoints")
    async_save: bool = flag(False, "write checkpoints beside the training, from a copy in the host's memory")
    keep: int = flag(2, "latest checkpoints that are kept")
    keep_every: int = flag(0, "checkpoints of multiples of this step are kept, too (0: none)")
    tensorboard: bool = flag(False, "write losses and rates for TensorBoard, too, into the output's folder")
    most_skipped: int = flag(10, "end after this many steps in a row that were not finite")
    loss_scale_growth: int = flag(2000, "good steps after which fp16's loss scale is doubled")
    sample_prompt: str = flag("The ", "what a sample of text begins with")
    sample_tokens: int = flag(60, "bytes of a sample at each evaluation")

    FIXED: ClassVar[tuple[str, ...]] = ("batch_size", "seed", "validation_share", "precision")
    """What a run must not change when it goes on, besides its model and its data: it would be another run."""

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("name a file to train on: --data text.txt")
        if not Path(self.data).is_file():
            raise UserError(f"no file {self.data!r}; --data is a text file, or tokens as .bin or .npy")
        for name in ("steps", "batch_size", "micro_batch_size", "log_every", "eval_batches", "save_every", "keep"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "eval_every", "keep_every", "sample_tokens", "checkpoint_blocks"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("most_skipped", "loss_scale_growth"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_grad_norm", "weight_decay"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value >= 0, "a finite number of at least 0")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("rank_timeout", math.isfinite(self.rank_timeout) and self.rank_timeout >= 1, "at least 1")
        self._require("learning_rate", math.isfinite(self.learning_rate) and self.learning_rate > 0, "above 0")
        self._require("validation_share", 0 < self.validation_share < 1, "between 0 and 1")
        self._require("final_share", 0 <= self.final_share <= 1, "between 0 and 1")
        self._require("warmup_steps", self.warmup_steps < self.steps, f"below --steps, {self.steps}")
        _ = self.model  # its own mistakes are told now, too

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise UserError(f"--{name} must be {what}, got {getattr(self, name)}")

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def is_text(self) -> bool:
        return Path(self.data).suffix not in (".bin", ".npy")

    @cached_property
    def model(self) -> ModelConfig:
        names = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return model_config(self.size, **({"vocab_size": BYTES} if self.is_text else {}) | given)

    def run_config(self, device: str, world_size: int) -> RunConfig:
        """What a rank's step is, with those parts of the fast one that this way of sharing the work allows."""
        fast = self.fast or ("on" if device.startswith("cuda") else "off")
        config = RunConfig(
            model=self.model,
            batch_size=self.micro_batch_size,
            precision=self.precision,
            attention=self.attention,
            checkpoint_blocks=self.checkpoint_blocks,
            compile=self.compile,
            fast=fast,
            max_grad_norm=self.max_grad_norm,
            device=device,
            seed=self.seed,
        )
        stream = config.tokens * self.model.d_model
        pays = fast != "on" or stream >= LAUNCH_BOUND
        allowed = FAST_PARTS if world_size == 1 else ("kernels", "loss") if self.parallel != "fsdp" and pays else ()
        left_out = sorted(config.fast_parts - set(allowed))
        if left_out and fast != "on":
            raise UserError(
                f"--fast {','.join(left_out)} cannot be had with {world_size} ranks and --parallel {self.parallel}; "
                f"use --fast on for what can be"
            )
        parts = [part for part in allowed if part in config.fast_parts]
        if "graph" in parts and "optimizer" not in parts:
            if fast != "on":
                raise UserError("--fast graph needs the optimizer, too: --fast optimizer,graph")
            parts.remove("graph")
        return dataclasses.replace(config, fast=",".join(parts) or "off")

    def micro_batches(self, world_size: int) -> int:
        """How many micro batches a rank goes through in a step."""
        if self.batch_size % world_size:
            raise UserError(
                f"--batch_size {self.batch_size} cannot be shared out evenly among {world_size} ranks; "
                f"use a multiple of {world_size}"
            )
        per_rank = self.batch_size // world_size
        if per_rank <= self.micro_batch_size:
            return 1
        if per_rank % self.micro_batch_size:
            raise UserError(
                f"a rank has {per_rank} sequences of a step, which is no multiple of --micro_batch_size "
                f"{self.micro_batch_size}"
            )
        return per_rank // self.micro_batch_size

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "model": dataclasses.asdict(self.model)}
