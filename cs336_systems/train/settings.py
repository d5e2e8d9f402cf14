"""The settings of `cs336 train`, nested by concern; each field is a flag. No torch here: mistakes are reported at once.

Flags and the manifests of checkpoints are flat and keep their names, where a field inside has a clearer one
(`optimizer.lr_warmup_steps` is `--warmup_steps`).
"""

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from cs336_systems.config import (
    ATTENTIONS,
    FAST_PARTS,
    LARGEST_NUMBER,
    SIZES,
    ModelConfig,
    RunConfig,
    UserError,
    flag,
    flag_like,
    model_config,
    require_seed,
    size_name,
)
from cs336_systems.flags import flat, renamed
from cs336_systems.predict.model_flags import FamilyArguments, of_size
from cs336_systems.predict.rank_shards import STAGES_PER_RANK, Mesh, require_schedule, require_split
from cs336_systems.text import counted
from cs336_systems.train.tokens.token_store import HEADER, UNFINISHED, is_store, read_store
from cs336_systems.train.weight_files import model_of_weights, tokenizer_of_weights

PACKS = ("none", "documents")
PARALLEL = ("none", "ddp", "ddp-sharded", "fsdp")
ENGINES = ("ours", "torch")
BYTES = 256
SMALLEST = "tiny"
"""The size of a run without any flag of its shape."""
INIT_CONTEXT = 512
"""Longest context that a run takes over from the weights of `--init`: published models have up to 131,072 tokens."""
WARMUP_STEPS = 20
LEAST_USED = 0.9
"""Share of a published size's vocabulary that data of its own tokenizer uses at least: Qwen's uses 99.7%."""
LAUNCH_BOUND = 4 << 20
"""With fewer elements in a micro batch's residual stream, Python is slower than the fused kernels that it launches.
Ranks that communicate have no CUDA graph: large lost 26%, 2.7B won 13% (H200, 2,048 tokens)."""


class _Checked:
    """Base class that reports an invalid value with the name of its flag."""

    def _require(self, holds: bool, name: str, requirement: str) -> None:
        if not holds:
            (spec,) = (spec for spec in dataclasses.fields(self) if spec.name == name)  # type: ignore[arg-type]
            shown = spec.metadata.get("flag", name)
            raise UserError(f"--{shown} must be {requirement}, got {getattr(self, name)}")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) >= least, name, f"at least {least}")


@dataclass(frozen=True)
class DataSettings(_Checked):
    path: str = renamed(
        "data",
        flag("", "a text file (bytes are tokens), tokens as .bin (16-bit) or .npy, or a folder of cs336 tokenize"),
    )
    validation_share: float = flag(0.1, "share of the file, at its end, that is never trained on")
    pack: str = flag(
        "none",
        "documents: attention, positions and targets stay within documents of a cs336 tokenize folder",
        PACKS,
    )
    batch_size: int = flag(8, "sequences in a step, over all ranks")
    micro_batch_size: int = flag(8, "sequences that a rank computes at a time; larger shares are accumulated")

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("name a file to train on: --data text.txt")
        if not Path(self.path).is_file() and not self.is_store:
            raise UserError(_no_data(Path(self.path)))
        if Path(self.path).suffix in (".jsonl", ".gz"):
            raise UserError(
                f"--data {self.path!r} has documents to tokenize first: cs336 tokenize {self.path} --train_tokenizer "
                f"8000 --output data/tokens"
            )
        if self.pack not in PACKS:
            raise UserError(f"--pack must be one of {', '.join(PACKS)}, got {self.pack!r}")
        if self.pack == "documents" and not self.is_store:
            raise UserError(f"--pack documents needs a folder of cs336 tokenize, and --data {self.path!r} is none")
        self._at_least(1, "batch_size", "micro_batch_size")
        self._require(self.micro_batch_size <= LARGEST_NUMBER, "micro_batch_size", f"at most {LARGEST_NUMBER}")
        self._require(0 < self.validation_share < 1, "validation_share", "above 0 and below 1")

    @property
    def is_text(self) -> bool:
        return Path(self.path).suffix not in (".bin", ".npy") and not self.is_store

    @property
    def is_store(self) -> bool:
        """True for a folder that `cs336 tokenize` has written."""
        return is_store(Path(self.path))

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens in the vocabulary, if the data defines it."""
        if self.is_store:
            return read_store(Path(self.path)).vocab_size
        return BYTES if self.is_text else None

    def micro_batches(self, world_size: int) -> int:
        """Return the number of micro batches of a rank in a step."""
        if self.batch_size % world_size:
            raise UserError(
                f"--batch_size {self.batch_size} cannot be divided evenly among {world_size} ranks; "
                f"use a multiple of {world_size}"
            )
        per_rank = self.batch_size // world_size
        if per_rank <= self.micro_batch_size:
            return 1
        if per_rank % self.micro_batch_size:
            raise UserError(
                f"a rank has {per_rank} sequences of a step, which is not a multiple of --micro_batch_size "
                f"{self.micro_batch_size}"
            )
        return per_rank // self.micro_batch_size


def _no_data(path: Path) -> str:
    """Return why a path is not usable training data, and what to do."""
    if not path.is_dir():
        problem = f"{str(path)!r} is not a regular file" if path.exists() else f"no file {str(path)!r}"
        return f"{problem}; --data is a text file, tokens as .bin or .npy, or a finished folder of cs336 tokenize"
    if (path / UNFINISHED).is_dir():
        return (
            f"--data {str(path)!r} is unfinished: cs336 tokenize has not written its {HEADER} yet; the same cs336 "
            f"tokenize command continues it"
        )
    if stores := sorted(str(one) for one in path.iterdir() if is_store(one)):
        return f"--data {str(path)!r} is a folder without {HEADER}; did you mean {stores[0]!r}?"
    name = path.resolve().name
    how = (
        f"cs336 tokenize {shlex.quote(str(path))} --train_tokenizer 8000 --output {shlex.quote(f'data/{name}-tokens')}"
    )
    return (
        f"--data {str(path)!r} is a folder without {HEADER}, so not one of cs336 tokenize; to make one of texts: {how}"
    )


@dataclass(frozen=True)
class ShapeSettings(FamilyArguments):
    size: str | None = flag(
        None, f"name of a size; any of its fields may be replaced (default: {SMALLEST}, or the shape of --init)"
    )
    vocab_size: int | None = of_size(
        "vocab_size", "a published size's own; else 256 for text, the tokenizer's for a folder"
    )
    context_length: int | None = of_size("context_length")
    d_model: int | None = of_size("d_model")
    num_layers: int | None = of_size("num_layers")
    num_heads: int | None = of_size("num_heads")
    d_ff: int | None = of_size("d_ff")

    @property
    def given(self) -> dict[str, Any]:
        """Fields of the model that are set by flags, without those of a size."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "size"}

    @property
    def is_given(self) -> bool:
        """True if a flag sets more of the model than its context."""
        return self.size is not None or bool(self.given.keys() - {"context_length"})

    @property
    def published_vocabulary(self) -> int:
        """Vocabulary that belongs to a size; 0 for sizes without one."""
        wanted = (self.size or SMALLEST).lower()
        return next((size.get("vocab_size", 0) for name, size in SIZES.items() if name.lower() == wanted), 0)

    def model(self, vocab_size: int | None) -> ModelConfig:
        """Return the model; `vocab_size` is used where no flag sets one."""
        given = {} if vocab_size is None else {"vocab_size": vocab_size}
        return model_config(self.size or SMALLEST, **{**given, **self.given})

    def of_weights(self, saved: ModelConfig, init: str) -> "ShapeSettings":
        """Return the shape of the weights of `--init`; raise UserError if a flag contradicts it.

        No weight depends on the context: it is that of the flag, else that of the weights, at most INIT_CONTEXT.
        """
        effective = {**vars(saved), "num_kv_heads": saved.kv_heads, "d_head": saved.head_dim}
        for shown, fields in self._asked():
            wrong = [
                f"{name} is {effective[name]}" + (f" and not {value}" if len(fields) > 1 else "")
                for name, value in fields.items()
                if name != "context_length" and value not in (getattr(saved, name), effective[name])
            ]
            if wrong:
                others = f" (and {len(wrong) - 1} more fields differ)" if len(wrong) > 1 else ""
                raise UserError(
                    f"{shown} contradicts --init {init!r}, whose {wrong[0]}{others}; leave it out: the shape is that "
                    f"of --init"
                )
        context = min(saved.context_length, INIT_CONTEXT) if self.context_length is None else self.context_length
        size = self.size or (name if (name := size_name(saved)) in SIZES else None)
        fields: dict[str, Any] = {**vars(saved), "context_length": context, "size": size}
        return ShapeSettings(**fields)

    def _asked(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each flag of the shape as spelled, and the fields of the model that it sets."""
        for name, value in self.given.items():
            switch = f"--{name}" if value else f"--no-{name}"
            yield switch if isinstance(value, bool) else f"--{name} {value}", {name: value}
        if self.size is not None:
            replaced = {*self.given, *(() if self.published_vocabulary else ("vocab_size",))}
            named = vars(model_config(self.size))
            yield f"--size {self.size}", {name: value for name, value in named.items() if name not in replaced}


@dataclass(frozen=True)
class ComputeSettings(_Checked):
    precision: str = flag_like(RunConfig, "precision")
    attention: str = flag("auto", "attention implementation", ATTENTIONS)
    recompute_blocks: int = renamed("checkpoint_blocks", flag_like(RunConfig, "checkpoint_blocks"))
    memory_budget: str = flag_like(RunConfig, "memory_budget")
    compile: bool = flag_like(RunConfig, "compile")
    fast: str | None = flag(
        None, f"the fast step: on, off, or some of {','.join(FAST_PARTS)} (default: on for a GPU, off for a CPU)"
    )
    device: str | None = flag(None, "cpu or cuda (default: cuda where there is one)")

    def __post_init__(self) -> None:
        self._at_least(0, "recompute_blocks")


@dataclass(frozen=True)
class OptimizerSettings(_Checked):
    learning_rate: float = flag(1e-3, "peak learning rate")
    min_lr_share: float = renamed("final_share", flag(0.1, "minimum learning rate, as a share of the peak"))
    lr_warmup_steps: int | None = renamed(
        "warmup_steps",
        flag(
            None,
            f"steps of linear warm-up to the peak learning rate (default: a tenth of all, at most {WARMUP_STEPS})",
        ),
    )
    """None: a tenth of the steps, at most WARMUP_STEPS; TrainSettings fills it in."""
    weight_decay: float = flag(0.1, "weight decay of matrices; norms have none")
    beta1: float = flag(0.9, "AdamW's decay rate of the gradient's mean")
    beta2: float = flag(0.95, "AdamW's decay rate of the squared gradient's mean")
    state: str = renamed("optimizer_state", flag_like(RunConfig, "optimizer_state"))
    max_grad_norm: float = flag(1.0, "clip the gradient's norm to this (0: no clipping)")
    max_skipped: int = renamed("most_skipped", flag(10, "end after this many non-finite steps in a row"))
    loss_scale_growth: int = flag(2000, "good steps after which the loss scale of fp16 is doubled")

    def __post_init__(self) -> None:
        rate = self.learning_rate
        self._require(math.isfinite(rate) and rate > 0, "learning_rate", "a finite number above 0")
        self._require(0 <= self.min_lr_share <= 1, "min_lr_share", "at least 0 and at most 1")
        self._require((self.lr_warmup_steps or 0) >= 0, "lr_warmup_steps", "at least 0")
        self._at_least(1, "max_skipped", "loss_scale_growth")
        for name in ("max_grad_norm", "weight_decay"):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value >= 0, name, "a finite number of at least 0")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")


AXES = Mesh._fields


@dataclass(frozen=True)
class ParallelSettings(_Checked):
    wrapper: str = renamed(
        "parallel", flag("ddp", "how ranks share the work: none, ddp, ddp-sharded (ZeRO 1), fsdp", PARALLEL)
    )
    engine: str = flag("ours", "who runs --parallel: our wrappers, or torch's own over the axes below", ENGINES)
    pp: int = flag(1, "--engine torch: ranks that hold a part of the blocks each (pipeline parallel)")
    pp_schedule: str = flag(
        "1f1b",
        "order of micro batches in the pipeline; interleaved has two stages on each rank",
        tuple(STAGES_PER_RANK),
    )
    dp_replicate: int = flag(1, "--engine torch: groups of ranks with a copy of the model each")
    dp_shard: int = flag(1, "--engine torch: ranks that shard weights, gradients and state (0: all remaining ranks)")
    cp: int = flag(1, "--engine torch: ranks that split every sequence (context parallel); they shard weights, too")
    tp: int = flag(1, "--engine torch: ranks that split every layer (tensor parallel)")
    rank_timeout: float = flag(600.0, "seconds to wait for a rank that does not respond")

    def __post_init__(self) -> None:
        self._at_least(1, "pp", "dp_replicate", "cp", "tp")
        self._at_least(0, "dp_shard")
        if self.engine == "torch" and self.wrapper != "ddp":
            axes = ", ".join(f"--{name}" for name in AXES)
            raise UserError(f"--parallel {self.wrapper} is for --engine ours; --engine torch takes {axes}")
        for name in AXES:
            if self.engine == "ours" and getattr(self, name) != 1:
                raise UserError(f"--{name} {getattr(self, name)} needs --engine torch")
        if self.pp == 1 and self.pp_schedule != "1f1b":
            raise UserError(f"--pp_schedule {self.pp_schedule} needs a pipeline: --pp 2 or more")
        self._require(
            math.isfinite(self.rank_timeout) and self.rank_timeout >= 1, "rank_timeout", "a finite number of at least 1"
        )

    def axes(self, world_size: int) -> Mesh:
        """Return the mesh of a number of ranks; raise UserError if they do not multiply to it."""
        mesh = Mesh(pp=self.pp, dp_replicate=self.dp_replicate, cp=self.cp, tp=self.tp)
        mesh = mesh._replace(dp_shard=self.dp_shard or max(1, world_size // mesh.gpus))
        if mesh.gpus != world_size:
            multiple = "a multiple of " if self.dp_shard == 0 else ""
            raise UserError(
                f"{self._shown_axes} needs {multiple}{counted(self.least_ranks, 'rank')}, and there "
                f"{'is' if world_size == 1 else 'are'} {world_size}; --dp_shard 0 uses all that the other axes leave"
            )
        return mesh

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that the axes divide."""
        return math.prod(getattr(self, name) or 1 for name in AXES)

    @property
    def _shown_axes(self) -> str:
        """The axes that are not 1, as flags."""
        given = [f"--{name} {getattr(self, name)}" for name in AXES if getattr(self, name) != 1]
        return " x ".join(given or ["--dp_shard 1"])

    def require_processes(self, world_size: int) -> None:
        """Raise UserError for the axes of several ranks in a process that was started alone."""
        if self.engine == "torch" and world_size == 1 < self.least_ranks:
            how = f"torchrun --nproc_per_node {self.least_ranks} -m cs336_systems train ..."
            needed = f"{self._shown_axes} needs {self.least_ranks} ranks"
            raise UserError(f"{needed}, and this is 1 process; start them with: {how}")

    def data_place(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return which share of a batch a rank computes, and the number of shares: 0 if a group needs more ranks.

        Ranks of one group of the axes "cp" and "tp", which are neighbours, compute the same share, and so do the ranks
        of one pipeline, which are farthest apart.
        """
        group = self.cp * self.tp
        shares = world_size // (group * self.pp)
        return rank // group % shares if shares else 0, shares

    @property
    def splits_data_only(self) -> bool:
        """True if every rank computes whole sequences with whole layers."""
        return self.pp == self.cp == self.tp == 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline on all ranks."""
        return self.pp * STAGES_PER_RANK[self.pp_schedule] if self.pp > 1 else 1

    def require_model(self, model: ModelConfig) -> None:
        """Raise UserError for a model that the ranks of torch's engine cannot split."""
        mesh = Mesh(pp=self.pp, dp_replicate=self.dp_replicate, cp=self.cp, tp=self.tp)
        require_split(model, mesh, self.stages)

    def require_micro_batches(self, count: int) -> None:
        """Raise UserError if torch's schedule cannot run this number of micro batches in a step."""
        require_schedule(self.pp, self.pp_schedule, count)


@dataclass(frozen=True)
class CheckpointSettings(_Checked):
    save_every: int = flag(50, "steps between checkpoints")
    async_save: bool = flag(False, "write checkpoints while training goes on, from a copy in host memory")
    keep: int = flag(2, "number of latest checkpoints to keep")
    keep_every: int = flag(0, "also keep checkpoints of multiples of this step (0: none)")
    keep_best: int = flag(0, "also keep this many checkpoints of lowest validation loss")
    resume_from: str | None = flag(
        None, "checkpoint to resume from: a step of this run, or the folder of another run or of one of its checkpoints"
    )

    def __post_init__(self) -> None:
        self._at_least(1, "save_every", "keep")
        self._at_least(0, "keep_every", "keep_best")


@dataclass(frozen=True)
class FaultSettings(_Checked):
    replay_every: int = flag(
        0, "run every N-th step twice and stop if the gradients differ in one bit: finds faulty hardware (0: never)"
    )
    fp8_check_every: int = flag(
        100,
        "with precision fp8: count what became 0 in every N-th step; a block that has lost half the elements of a "
        "tensor returns to bf16 (0: never)",
    )
    find_nan: bool = flag(
        False, "name the module where a value that is not finite, or a jump of the gradient's norm, comes from"
    )

    def __post_init__(self) -> None:
        self._at_least(0, "replay_every", "fp8_check_every")


@dataclass(frozen=True)
class LogSettings(_Checked):
    log_every: int = flag(10, "steps between log lines")
    tensorboard: bool = flag(False, "also write metrics for TensorBoard, into the output folder")
    eval_every: int = flag(50, "steps between evaluations (0: none)")
    eval_batches: int = flag(4, "micro batches in an evaluation, on each rank")
    sample_prompt: str = flag("The ", "prompt of the text sampled at each evaluation", may_be_empty=True)
    sample_tokens: int = flag(60, "bytes sampled at each evaluation")

    def __post_init__(self) -> None:
        self._at_least(1, "log_every", "eval_batches")
        self._at_least(0, "eval_every", "sample_tokens")


@dataclass(frozen=True)
class TrainSettings(_Checked):
    data: DataSettings = field(default_factory=DataSettings)
    output: str = flag("runs/train", "folder of checkpoints and records; a run that is there is resumed", short="-o")
    steps: int = flag(200, "number of training steps")
    seed: int = flag(0, "seed of the weights and of the order of sequences")
    init: str | None = flag(
        None,
        "start from a file of weights of cs336 export or a folder of cs336 import; they have the shape with them",
        excludes=("resume_from",),
    )
    shape: ShapeSettings = field(default_factory=ShapeSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    log: LogSettings = field(default_factory=LogSettings)

    FIXED: ClassVar[tuple[str, ...]] = ("batch_size", "seed", "validation_share", "precision")
    """Flags, besides those of the model and the data, that must not change when a run is resumed, because it would be
    another run."""

    def __post_init__(self) -> None:
        self._at_least(1, "steps")
        require_seed(self.seed)
        warmup = self.optimizer.lr_warmup_steps
        if warmup is None:
            warmup = min(WARMUP_STEPS, self.steps // 10)
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, lr_warmup_steps=warmup))
        if warmup >= self.steps:
            raise UserError(f"--warmup_steps must be below --steps, {self.steps}, got {warmup}")
        if self.checkpoint.keep_best and not self.log.eval_every:
            raise UserError("--keep_best compares validation losses, which --eval_every 0 turns off; give another one")
        self._fill_shape()
        _ = self.model  # reports its own mistakes now, too
        if self.parallel.engine == "torch":
            self._require_for_torch_engine()
        if self.data.pack == "documents":
            self._require_for_documents()

    def _fill_shape(self) -> None:
        """Take the shape of the model from the weights of `--init`, or the smallest size where nothing is given."""
        saved = self._saved_model()
        if self.init is not None and saved is not None:
            shape = self.shape.of_weights(saved, self.init)
            self._require_tokens_of(saved, Path(self.init))
            object.__setattr__(self, "shape", shape)
        if self.shape.size is None:
            object.__setattr__(self, "shape", dataclasses.replace(self.shape, size=SMALLEST))

    def _saved_model(self) -> ModelConfig | None:
        """Return the model of the weights of `--init`; None if it is unknown, or the weights are on rank 0 only."""
        if self.init is None or (self.shape.is_given and not Path(self.init).exists()):
            return None
        return model_of_weights(Path(self.init))

    def _require_tokens_of(self, saved: ModelConfig, init: Path) -> None:
        """Raise UserError if the data has other tokens than the weights of `--init` were trained on.

        A model that was trained on bytes has BYTES tokens, or as many as `--vocab_size` said.
        """
        tokenizer = tokenizer_of_weights(init)
        problem = ""
        if self.data.is_text and (tokenizer or (saved.vocab_size != BYTES and self.shape.vocab_size is None)):
            problem = "is text, whose bytes would be the tokens"
        elif self.data.is_store and (count := read_store(Path(self.data.path)).vocab_size) > saved.vocab_size:
            problem = f"has a vocabulary of {count:,} tokens"
        if problem:
            source = shlex.quote(self.data.path) if self.data.is_text else "TEXT"
            named = shlex.quote(str(tokenizer or "tokenizer.json"))
            raise UserError(
                f"--data {self.data.path!r} {problem}, and --init {self.init!r} has {saved.vocab_size:,} tokens of its "
                f"own; tokenize with its tokenizer: cs336 tokenize {source} --tokenizer {named} --output data/tokens"
            )

    @property
    def has_other_tokenizer(self) -> bool:
        """True if the data was tokenized with another tokenizer.json than the one beside the weights of `--init`."""
        tokenizer = tokenizer_of_weights(Path(self.init)) if self.init is not None else None
        if tokenizer is None or not self.data.is_store:
            return False
        return hashlib.sha256(tokenizer.read_bytes()).hexdigest() != read_store(Path(self.data.path)).tokenizer_hash

    @property
    def unused_vocabulary(self) -> str:
        """A remark on a published size's vocabulary that is much larger than that of the data, or an empty string.

        Published models have room for a few tokens more than their tokenizers have.
        """
        if not self.data.is_store or self.shape.vocab_size is not None:
            return ""
        used, size = read_store(Path(self.data.path)).vocab_size, self.shape.size
        if used >= LEAST_USED * self.model.vocab_size:
            return ""
        return (
            f"the vocabulary of {self.model.vocab_size:,} tokens is that of --size {size}, and the data has {used:,}; "
            f"--vocab_size {used} makes the model smaller"
        )

    def _require_for_documents(self) -> None:
        """Raise UserError for settings that do not support documents."""
        compute, splits = self.compute, self.parallel.engine == "torch" and not self.parallel.splits_data_only
        given = {"--compile": compute.compile, "--memory_budget": compute.memory_budget, "--tp, --cp and --pp": splits}
        given["--precision fp8"] = compute.precision == "fp8"
        if others := [name for name, value in given.items() if value]:
            raise UserError(f"--pack documents cannot be combined with {', '.join(others)}; leave out one of them")
        if compute.attention == "sdpa":
            raise UserError("--attention sdpa has no packed documents; use --attention auto")

    def _require_for_torch_engine(self) -> None:
        """Raise UserError for settings that need our engine, and for a model that torch's ranks cannot split."""
        only_ours = {
            "compile": self.compute.compile,
            "memory_budget": self.compute.memory_budget,
            "optimizer_state": self.optimizer.state != "fp32",
        }
        if given := [f"--{name}" for name, value in only_ours.items() if value]:
            raise UserError(f"{' and '.join(given)} {'need' if len(given) > 1 else 'needs'} --engine ours")
        self.parallel.require_model(self.model)

    def require_ranks(self, world_size: int) -> None:
        """Raise UserError unless this number of ranks can share the steps."""
        if self.parallel.engine == "torch":
            self.parallel.axes(world_size)
        _, shares = self.parallel.data_place(0, world_size)
        self.parallel.require_micro_batches(self.data.micro_batches(shares))

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @cached_property
    def model(self) -> ModelConfig:
        known = self.data.vocab_size
        if self.data.is_store and self.shape.published_vocabulary >= (known or 0):
            known = None  # published models have room for more tokens than their tokenizers have
        return self.shape.model(known)

    @property
    def first_compared(self) -> int:
        """The first step that is both evaluated and saved, which `--keep_best` needs."""
        return min(self.steps, math.lcm(self.checkpoint.save_every, self.log.eval_every or self.steps))

    def run_config(self, device: str, world_size: int) -> RunConfig:
        """Return the configuration of a rank's step, with those parts of the fast step that its wrapper allows."""
        compute = self.compute
        is_fp8, wrapper = compute.precision == "fp8", self.parallel.wrapper
        if is_fp8 and (self.parallel.engine == "torch" or (world_size > 1 and wrapper == "fsdp")):
            how = "--engine torch" if self.parallel.engine == "torch" else "--parallel fsdp"
            raise UserError(
                f"--precision fp8 needs whole layers on every GPU, which {how} does not keep; use --parallel ddp or "
                f"ddp-sharded, or --precision bf16"
            )
        fast = compute.fast or ("on" if device.startswith("cuda") or is_fp8 else "off")
        config = RunConfig(
            model=self.model,
            batch_size=self.data.micro_batch_size,
            precision=compute.precision,
            attention=compute.attention,
            checkpoint_blocks=compute.recompute_blocks,
            memory_budget=compute.memory_budget,
            compile=compute.compile,
            fast=fast,
            optimizer_state=self.optimizer.state,
            max_grad_norm=self.optimizer.max_grad_norm,
            device=device,
            seed=self.seed,
        )
        pays = config.tokens * self.model.d_model >= LAUNCH_BOUND or fast != "on" or is_fp8
        with_ranks = ("kernels", "loss") if wrapper != "fsdp" and pays else ()
        allowed: tuple[str, ...] = FAST_PARTS if world_size == 1 else with_ranks
        if self.parallel.engine == "torch":  # the fused kernels do not know of split layers, sequences and stages
            allowed = with_ranks if self.parallel.splits_data_only else ()
        if self.data.pack == "documents":  # a graph has no memory for the boundaries of documents
            allowed = tuple(part for part in allowed if part != "graph")
        excluded = sorted(config.fast_parts - set(allowed))
        if excluded and fast != "on":
            sizes = {name: getattr(self.parallel, name) for name in ("pp", "cp", "tp")}
            axes = "".join(f" --{name} {size}" for name, size in sizes.items() if size > 1)
            how = f"--engine torch{axes}" if self.parallel.engine == "torch" else f"--parallel {wrapper}"
            raise UserError(
                f"--fast {','.join(excluded)} is not available with {counted(world_size, 'rank')} and {how}; "
                f"--fast on selects what is"
            )
        parts = [part for part in allowed if part in config.fast_parts]
        if "graph" in parts and "optimizer" not in parts:
            if fast != "on":
                raise UserError("--fast graph needs the optimizer, too: --fast optimizer,graph")
            parts.remove("graph")
        return dataclasses.replace(config, fast=",".join(parts) or "off")

    def to_dict(self) -> dict[str, Any]:
        """Return the flat form, by flag, that manifests and records hold."""
        return {**flat(self), "model": self.model.to_dict()}
