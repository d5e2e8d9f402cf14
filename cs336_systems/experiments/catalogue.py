"""Every experiment by name: what it asks, its grid of cells, and the instrument that measures a cell. No torch here."""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336_systems.config import COURSE_SIZES, FAST_PARTS, MODES, PRECISIONS, RunConfig, UserError, model_config
from cs336_systems.predict.attention_model import AttentionShape

PRESETS = ("quick", "course", "full")

INSTRUMENTS = {
    "step": "cs336_systems.benchmark.benchmark:measure_step",
    "fast_step": "cs336_systems.experiments.steps.measure_fast_step:measure_fast_step",
    "kernels": "cs336_systems.experiments.kernels.measure_kernels:measure_kernels",
    "memory": "cs336_systems.experiments.memory.measure_memory:measure_memory",
    "checkpointing": "cs336_systems.experiments.memory.measure_memory:measure_checkpointing",
    "saved_tensors": "cs336_systems.experiments.memory.measure_memory:measure_saved_tensors",
    "agreement": "cs336_systems.experiments.steps.measure_agreement:measure_agreement",
    "pytorch_attention": "cs336_systems.experiments.attention.measure_attention:measure_pytorch_attention",
    "flash": "cs336_systems.experiments.attention.measure_attention:measure_flash",
    "attention_rivals": "cs336_systems.experiments.attention.measure_attention:measure_rivals",
    "flash_leaderboard": "cs336_systems.experiments.attention.measure_attention:measure_leaderboard",
    "attention_step": "cs336_systems.experiments.attention.measure_attention_step:measure_attention_step",
    "collectives": "cs336_systems.experiments.ranks.measure_collectives:measure_collectives",
    "arrangements": "cs336_systems.experiments.ranks.measure_arrangements:measure_arrangements",
    "parallel_plan": "cs336_systems.experiments.ranks.layouts:measure_plan",
    "memory_model": "cs336_systems.benchmark.calculate_memory:measure_prediction",
    "accumulation": "cs336_systems.experiments.steps.measure_numerics:measure_accumulation",
    "autocast_dtypes": "cs336_systems.experiments.steps.measure_numerics:measure_dtypes",
}
"""Name -> function(config) -> list of [metric, unit, samples]; imported in the worker only."""

ATTENTION_INSTRUMENTS = ("pytorch_attention", "flash", "attention_rivals", "flash_leaderboard")
"""Those whose configurations are an AttentionShape with more fields, and not a RunConfig."""

STEP_INSTRUMENTS = ("step", "fast_step", "kernels", "memory", "saved_tensors", "attention_step")
"""Those whose configurations are a RunConfig, and that run its step."""
KEEPING_FILES = ("kernels", "memory")
"""Those that take a `folder` for what is too large for a record: traces, snapshots."""

Grid = Callable[[str, RunConfig], Iterable[dict[str, Any]]]


@dataclass(frozen=True)
class Experiment:
    question: str
    instrument: str
    grid: Grid
    """(preset, base) -> configurations; `base` carries the device and whatever the user set for all cells."""


def cells(names: Iterable[str], preset: str, base: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """(experiment, configuration) for every cell of the named experiments."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; choose one of: {', '.join(PRESETS)}")
    requests = []
    for name in names:
        if name not in RUNNABLE:
            raise UserError(f"unknown experiment {name!r}; choose from: {', '.join(RUNNABLE)}")
        requests += [(name, config) for config in EXPERIMENTS[name].grid(preset, base)]
    return requests


def _sizes(preset: str, base: RunConfig) -> tuple[str, ...]:
    if preset != "quick":
        return COURSE_SIZES
    return ("small", "medium") if base.device_type == "cuda" else ("tiny",)


def _run(base: RunConfig, size: str, context: int | None = None, **fields: Any) -> dict[str, Any]:
    overrides = {"context_length": context} if context else {}
    return dataclasses.replace(base, model=model_config(size, **overrides), size=size, **fields).to_dict()


def _require_gpu(experiment: str, base: RunConfig, reason: str) -> None:
    if base.device_type != "cuda":
        raise UserError(f"{experiment} needs a CUDA GPU: {reason}")


def _end_to_end(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    contexts: tuple[int | None, ...] = (512, 128, 256, 1024) if preset == "full" else (None,)
    for context, size, mode in product(contexts, _sizes(preset, base), MODES):
        yield _run(base, size, context, mode=mode)


def _warmup(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    if preset == "quick":
        sizes: tuple[str, ...] = ("small",) if base.device_type == "cuda" else ("tiny",)
    else:
        sizes = COURSE_SIZES if preset == "full" else ("small", "2.7B")
    for size, steps in product(sizes, (0, 1, 2, 5)):
        yield _run(base, size, warmup_steps=steps)


def _precision(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    on_cpu_quickly = preset == "quick" and base.device_type == "cpu"
    precisions = PRECISIONS if preset == "full" or on_cpu_quickly else ("fp32", "bf16")
    modes = MODES if on_cpu_quickly else ("train-step",)
    for size, precision, mode in product(_sizes(preset, base), precisions, modes):
        yield _run(base, size, precision=precision, mode=mode)


def _compile(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for size, compiled in product(_sizes(preset, base), (False, True)):
        yield _run(base, size, compile=compiled)


LLAMA = "cs336_systems.experiments.steps.llama:build"
"""The Llama of the same shape in Hugging Face's transformers, where it is installed: the rival of the fast step."""


def _fast_step(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """Nothing, each part alone, all but one, all; torch.compile; and the rival."""
    on_cuda = base.device_type == "cuda"
    base = dataclasses.replace(base, attention="auto", precision="bf16" if on_cuda else "fp32")
    parts = [part for part in FAST_PARTS if on_cuda or part != "graph"]
    without_one = [",".join(other for other in parts if other != part) for part in parts]
    variants: list[dict[str, Any]] = [{"fast": fast} for fast in ("off", *parts, *without_one, "on")]
    if importlib.util.find_spec("transformers") is not None:
        variants.append({"compile": True, "model_factory": LLAMA})
    sizes = _sizes("quick", base)[:1] if preset == "quick" else ("small", "large", "2.7B")
    yield _run(base, sizes[0], compile=True)
    for size, variant in product(sizes, variants):
        yield _run(base, size, **variant)
    if preset != "quick":
        for variant in variants:
            if variant.get("fast") in ("off", "on") or "model_factory" in variant:
                yield _run(base, "large", 1024, batch_size=16, **variant)


def _peak_memory(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    modes = ("inference", "forward", "train-step")
    for size, mode, precision in product(_sizes(preset, base), modes, ("fp32", "bf16")):
        yield _run(base, size, mode=mode, precision=precision)
    if preset == "quick":
        return
    for context, mode, precision in product((128, 256), modes, ("fp32", "bf16")):
        yield _run(base, "2.7B", context, mode=mode, precision=precision)
    for size, precision in product(("small", "large", "2.7B"), ("fp32", "bf16")):
        yield _run(base, size, precision=precision, attention="sdpa")
        yield _run(base, size, precision=precision, checkpoint_blocks=1)
        yield _run(base, size, precision=precision, checkpoint_blocks=4)
        yield _run(base, size, precision=precision, attention="sdpa", checkpoint_blocks=2)


def _timing_agreement(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    _require_gpu("timing_agreement", base, "do_bench times with CUDA events")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield _run(base, size)


def _kernels(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    if preset == "quick":
        for mode in ("inference", "train-step"):
            yield _run(base, "small" if base.device_type == "cuda" else "tiny", mode=mode)
        return
    for size, context, mode in product(COURSE_SIZES, (128, 256, 512, 1024), ("inference", "train-step")):
        yield _run(base, size, context, mode=mode)


def _attention_ops(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    return (config for config in _kernels(preset, base) if config["mode"] == "inference")


def _profiler_agreement(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    _require_gpu("profiler_agreement", base, "its clocks are the GPU's")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield {**_run(base, size), "profiler": "both"}


def _memory(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    modes = ("inference", "forward", "train-step")
    if preset == "quick":
        for mode in modes:
            yield _run(base, "small" if base.device_type == "cuda" else "tiny", mode=mode)
        return
    for context, mode, precision in product((128, 256, 512), modes, ("fp32", "bf16")):
        yield _run(base, "2.7B", context, mode=mode, precision=precision)
    for precision in ("fp32", "bf16"):  # the score matrices are gone
        yield _run(base, "2.7B", 512, precision=precision, attention="auto")
    if preset == "full":
        for size, mode in product(COURSE_SIZES, modes):
            yield _run(base, size, mode=mode)


CHECKPOINT_GROUPS = ((0, 0), (1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (4, 1), (8, 1), (8, 2), (16, 4))
"""Blocks that are recomputed together, and blocks of these that are recomputed together once more."""


def _checkpointing(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    quick = preset == "quick"
    overrides = {"num_layers": 8, "vocab_size": 1000} if quick else {"context_length": 2048}
    model = model_config("tiny" if quick else "2.7B", **overrides)
    groups = ((0, 0), (1, 0), (2, 0), (4, 0), (4, 1)) if quick else CHECKPOINT_GROUPS
    for precision, (outer, inner) in product(("fp32",) if quick else ("fp32", "bf16"), groups):
        run = dataclasses.replace(base, model=model, size="", precision=precision, checkpoint_blocks=outer)
        yield {**run.to_dict(), "inner": inner}


def _saved_tensors(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """One block, so that what is kept can be read."""
    size = "tiny" if preset == "quick" and base.device_type == "cpu" else "2.7B"
    model = model_config(size, num_layers=1)
    for fields in (
        {"attention": "reference"},
        {"attention": "auto"},
        {"attention": "reference", "compile": True},
        {"attention": "reference", "checkpoint_blocks": 1},
    ):
        for precision in ("fp32",) if preset == "quick" else ("fp32", "bf16"):
            yield dataclasses.replace(base, model=model, size="", precision=precision, **fields).to_dict()


def _memory_model(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """Predictions are for a GPU whatever this machine is: that is what they are for."""
    gpu = dataclasses.replace(base, device="cuda")
    sizes = ("small", "2.7B") if preset == "quick" else COURSE_SIZES
    contexts = (128, 256, 512) if preset != "quick" else (512,)
    for size, context, precision in product(sizes, contexts, ("fp32", "bf16")):
        yield _run(gpu, size, context, precision=precision)


def _attention(
    base: RunConfig, size: tuple[int, int, int, int], precision: str, is_causal: bool = True, **fields: Any
) -> dict[str, Any]:
    """`size`: batch, heads, sequence, head dimension."""
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    return {**dataclasses.asdict(shape), "device": base.device, "seed": base.seed, **fields}


def _pytorch_attention(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """100 passes, unless --num_steps says otherwise."""
    batch, passes = 8, 100 if base.num_steps == RunConfig.num_steps else base.num_steps
    dims: tuple[int, ...] = (16, 32, 64, 128)
    lengths: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    if preset == "quick":
        dims, lengths, passes = (16, 64), (1024, 4096), base.num_steps
        if base.device_type == "cpu":
            batch, lengths = 2, (64, 256)
    for dim, length, name in product(dims, lengths, ("reference", "compiled")):
        fields = {"implementation": name, "warmup_steps": base.warmup_steps, "num_steps": passes}
        yield _attention(base, (batch, 1, length, dim), "fp32", False, **fields)


ON_CPU = ("reference", "flash_torch", "compiled", "sdpa")
ON_CUDA = (
    "flash_triton", "flash_torch", "reference", "compiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex",
)  # fmt: skip
HALF_PRECISION_ONLY = ("sdpa_flash", "sdpa_cudnn", "flex")
"""The first two have no fp32. Flex multiplies it without tensor cores: no rival there."""
RIVALS = ("flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn", "flash_attention_4", "flex")
RIVAL_SHAPES = (
    ((1, 16, 16384, 64), True),
    ((1, 16, 16384, 128), True),
    ((1, 16, 16384, 64), False),
    ((1, 16, 16384, 128), False),
    ((4, 16, 2048, 64), True),
    ((4, 16, 2048, 128), True),
    ((4, 12, 512, 64), True),
)
"""(batch, heads, sequence, head dimension) and whether causal: long, medium, and the small model's own."""


def _flash(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """The implementations of one shape come one after another: they share what they are checked against."""
    on_cpu = base.device_type == "cpu"
    precisions: tuple[str, ...] = ("bf16", "fp32")
    dims: tuple[int, ...] = (16, 32, 64, 128)
    lengths = tuple(2**n for n in range(7, 17))
    if preset == "quick":
        precisions, dims, lengths = (("fp32",), (16, 64), (64, 256)) if on_cpu else (("bf16",), (64, 128), (1024, 4096))
    for precision, dim, length, name in product(precisions, dims, lengths, ON_CPU if on_cpu else ON_CUDA):
        if precision in ("bf16", "fp16") or name not in HALF_PRECISION_ONLY:
            yield _attention(base, (1, 1, length, dim), precision, implementation=name, warmup_ms=5, rep_ms=20)


def _rivals() -> list[str]:
    """Those there are: FlashAttention-4 is not required, and measured where it is installed."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return [name for name in RIVALS if name != "flash_attention_4"]
    return list(RIVALS)


def _attention_rivals(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    _require_gpu("attention_rivals", base, "the rivals are GPU kernels")
    # Not flex: it takes longer to compile than all others to run, and `flash` and the leaderboard have it.
    rivals = [name for name in _rivals() if name != "flex"]
    for size, is_causal in RIVAL_SHAPES[-1:] if preset == "quick" else RIVAL_SHAPES:
        # Rounds: so that each comes after each other equally often.
        fields: dict[str, Any] = {"implementations": rivals, "rounds": 2 * len(rivals)}
        if size[2] <= 8192:
            # At the mercy of the host, which may be busy for a second: rounds that take longer than that; and "auto",
            # which then leaves the work to whoever is launched fastest.
            names = ["auto", *rivals]
            fields = {"implementations": names, "rounds": 4 * len(names), "replayed": True}
        yield _attention(base, size, "bf16", is_causal, warmup_ms=20, rep_ms=60, **fields)


def _flash_leaderboard(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    _require_gpu("flash_leaderboard", base, "the course timed it on one")
    warmup_ms, rep_ms = (200, 1000) if preset == "quick" else (1000, 10_000)
    for name in _rivals():
        size = (1, 16, 16384, 64)
        yield _attention(base, size, "bf16", implementation=name, warmup_ms=warmup_ms, rep_ms=rep_ms)


def _attention_step(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """The longer the context, the more of a step is attention."""
    on_cuda = base.device_type == "cuda"
    names = ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn"] if on_cuda else ["flash_torch", "sdpa"]
    run = dataclasses.replace(base, precision="bf16" if on_cuda else base.precision, batch_size=1)
    sizes: tuple[tuple[str, int | None], ...] = (("small", 4096), ("large", 4096), ("2.7B", 4096))
    if preset == "quick":
        sizes = (("small", 1024),) if on_cuda else (("tiny", None),)
    for size, context in sizes:
        # Rounds: so that each comes after each other equally often.
        yield {**_run(run, size, context), "implementations": names, "rounds": 2 * len(names)}


MB = 10**6
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def _links(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """How ranks of this machine can talk: through Gloo on the CPU, and through NCCL where it has GPUs."""
    yield {"backend": "gloo", "device": "cpu"}
    if base.device_type == "cuda" and preset != "quick":
        yield {"backend": "nccl", "device": "cuda"}


def _collectives(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    sizes = [MB // 100, MB, 10 * MB, 50 * MB] if preset == "quick" else [MB, 10 * MB, 100 * MB, 1000 * MB]
    for link, ranks in product(_links(preset, base), (2,) if preset == "quick" else (2, 4, 6)):
        yield {**link, "ranks": ranks, "collectives": list(COLLECTIVES), "sizes": sizes, "calls": 10}


SLOW_LINK = [5e-3, 1e8]
"""Seconds and bytes per second: sending the gradients of the quick preset's model takes as long as its backward."""


def _arrangements(
    preset: str, base: RunConfig, arrangements: tuple[str, ...], link: list[float] | None = None
) -> Iterable[dict[str, Any]]:
    """Two ranks: on the CPU, or on the GPU, which they share through Gloo; and on a GPU each through NCCL, where the
    machine has two. Rows say which. A slow network is that of the quick preset, on the CPU, always."""
    quick = preset == "quick" or link is not None
    overrides = {
        "context_length": 64,
        "d_model": 256,
        "d_ff": 1024,
        "num_layers": 6,
        "num_heads": 8,
        "vocab_size": 4000,
    }
    model = model_config("tiny", **overrides) if quick else model_config("small")
    run = dataclasses.replace(base, model=model, size="", device="cpu" if quick else base.device, warmup_steps=2)
    for backend in ("gloo", "nccl") if run.device_type == "cuda" else ("gloo",):
        # torch's fully_shard ends in a segmentation fault there (2.11).
        left_out = {"torch fully_shard"} if (backend, run.device_type) == ("gloo", "cuda") else set()
        names = [name for name in arrangements if name not in left_out]
        own = {"ranks": 2, "backend": backend, "arrangements": names, "link": link}
        yield {**run.to_dict(), **own, "rounds": 5 if preset == "quick" else 9}


def _ddp(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """On the machine as it is, and on a slow network; torch's own all-reduces cannot be slowed down from here."""
    ours = ("none", "naive", "flat", "overlap", "bucketed 5", "bucketed 25")
    yield from _arrangements(preset, base, (*ours, "torch DDP"))
    yield from _arrangements(preset, base, ours, SLOW_LINK)


def _bucket_model(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    sizes = ("0.5", "1", "2", "4", "8", "16", "32")
    return _arrangements(preset, base, ("none", *(f"bucketed {size}" for size in sizes)), SLOW_LINK)


def _optimizer_sharding(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    return _arrangements(preset, base, ("ddp", "sharded", "torch ZeRO"))


def _fsdp(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    return _arrangements(preset, base, ("ddp", "sharded", "fsdp", "torch fully_shard"))


def _parallel_plan(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """The handout's exercise and the same shape as a whole model, on clusters of H100s."""
    from cs336_systems.experiments.ranks.layouts import PlanArguments, plan_config

    for count, gpus in product(("feed-forward", "transformer"), (1024,) if preset == "quick" else (64, 1024, 16384)):
        yield plan_config(PlanArguments(gpus=gpus, count=count, context_length=4096))


def _accumulation(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for accumulator, term in (("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16"), ("fp32", "fp16 cast to fp32")):
        yield {"accumulator": accumulator, "term": term, "value": 0.01, "count": 1000}


def _autocast_dtypes(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for model, dtype in product(("toy", "transformer"), ("fp16", "bf16")):
        yield {"model": model, "autocast": dtype, "device": base.device}


def _none(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    return ()


EXPERIMENTS: dict[str, Experiment] = {
    "bench": Experiment("How long does a step take, and how much memory?", "step", _none),
    "end_to_end": Experiment("How long do forward, backward and the optimizer take, by size?", "step", _end_to_end),
    "warmup": Experiment("What do too few warm-up steps do to the numbers?", "step", _warmup),
    "precision": Experiment("What does lower precision give, in time and memory?", "step", _precision),
    "compile": Experiment("What does torch.compile give, and cost?", "step", _compile),
    "fast_step": Experiment("What does each part of the fast step give?", "fast_step", _fast_step),
    "peak_memory": Experiment("Does the predicted peak agree with the measured one?", "step", _peak_memory),
    "timing_agreement": Experiment(
        "Does another timer give the same times for the same work?", "agreement", _timing_agreement
    ),
    "kernels": Experiment("Which kernels take the time, by phase and kind?", "kernels", _kernels),
    "attention_ops": Experiment("Inside attention, what takes the time and what the FLOPs?", "kernels", _attention_ops),
    "profiler_agreement": Experiment(
        "Do the profiler, CUDA events and the clock agree, and what is the gap?", "kernels", _profiler_agreement
    ),
    "memory": Experiment("What is memory made of at its peak, and which line made it?", "memory", _memory),
    "checkpointing": Experiment(
        "How many blocks should be recomputed together, predicted and measured?", "checkpointing", _checkpointing
    ),
    "saved_tensors": Experiment("What does forward keep for backward?", "saved_tensors", _saved_tensors),
    "pytorch_attention": Experiment(
        "What does attention by the formula cost, eager and compiled?", "pytorch_attention", _pytorch_attention
    ),
    "flash": Experiment("How fast is each attention, how much memory, how exact?", "flash", _flash),
    "attention_rivals": Experiment(
        "Is our kernel faster than the best others, measured in turns?", "attention_rivals", _attention_rivals
    ),
    "flash_leaderboard": Experiment(
        "How fast is attention as the course's leaderboard timed it?", "flash_leaderboard", _flash_leaderboard
    ),
    "attention_step": Experiment(
        "What does a faster attention give to a training step?", "attention_step", _attention_step
    ),
    "collectives": Experiment(
        "How long does a collective take, and what does the link give?", "collectives", _collectives
    ),
    "ddp": Experiment("What does averaging gradients cost, and how much of it is hidden?", "arrangements", _ddp),
    "bucket_model": Experiment("Which bucket size is best, predicted and measured?", "arrangements", _bucket_model),
    "optimizer_sharding": Experiment(
        "What does an optimizer with its state shared out save, and cost?", "arrangements", _optimizer_sharding
    ),
    "fsdp": Experiment("What does sharding everything save, and cost?", "arrangements", _fsdp),
    "parallel_plan": Experiment(
        "Which layout fits a large model on a cluster, and what does it wait for?", "parallel_plan", _parallel_plan
    ),
    "memory_model": Experiment("What needs how much memory, before a GPU is paid for?", "memory_model", _memory_model),
    "accumulation": Experiment("Where does precision get lost when adding up?", "accumulation", _accumulation),
    "autocast_dtypes": Experiment("Which dtype has what under autocast?", "autocast_dtypes", _autocast_dtypes),
}
RUNNABLE = tuple(name for name in EXPERIMENTS if name != "bench")
