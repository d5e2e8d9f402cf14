"""Hand-made records of every experiment on the time of a step."""

import dataclasses

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.steps.drawn_steps import SEED, eager_steps, fast_steps
from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.experiments.steps.leaderboard_step import BOARD
from cs336_systems.predict.flops import causal_model_flops, model_flops
from cs336_systems.record import CELL_TIME, GIB, Record
from tests.unit.report.step_cells import CPU, GPU, cell, entries, step

COLD = {"step_time": (0.9, 0.1, 0.1), "warmup_time": ()}
DO_BENCH = {"do_bench_forward_time": (0.03,), "do_bench_backward_time": (0.05,), "do_bench_step_time": (0.101,)}
AGREE = {"do_bench_forward_time": (0.03,), "do_bench_step_time": (0.08,)}


def accumulation(accumulator: str, total: float, status: str = "ok") -> list[Record]:
    config = {"accumulator": accumulator, "term": "fp16", "value": 0.01, "count": 1000}
    return entries("accumulation", config, {"sum": (total,), "term": (0.0100021362,)}, status, CPU)


def dtypes(autocast: str, model: str = "toy", status: str = "ok") -> list[Record]:
    config = {"model": model, "autocast": autocast, "device": "cuda"}
    end = Record("autocast_dtypes", config, CELL_TIME, "s", (1.0,) if status == "ok" else (), status, GPU)
    tensors = {"fc1 output": f"{autocast}loat", "loss": "float32"} if status == "ok" else {}
    return [Record(end.experiment, config, "dtype", "", (name,), variant=tensor, environment=GPU)
            for tensor, name in tensors.items()] + [end]  # fmt: skip


def board(state: str, micro_batches: int, seconds: float, status: str = "ok") -> list[Record]:
    """A cell of the 2026 leaderboard's job, with the FLOPs of its model and the peak of an H200."""
    run = RunConfig(
        model=BOARD,
        batch_size=2 // micro_batches,
        precision="bf16",
        attention="auto",
        fast="kernels,loss,optimizer",
        optimizer_state=state,
        update_in_backward=micro_batches == 1,
        memory_budget="auto",
        device="cuda",
    )
    whole = dataclasses.replace(run, batch_size=2)
    metrics = {
        "step_time": (seconds, seconds),
        "cold_start_time": (60.0,),
        **{"first_loss": (11.95,), "last_loss": (9.5,)},
        "flops": (model_flops(whole),),
        "causal_flops": (causal_model_flops(whole),),
        "peak_flops": (989.4e12,),
        **{"peak_memory": (130 * GIB,), "predicted_memory": (130.13 * GIB,)},
    }
    return entries("train_leaderboard", {**run.to_dict(), "micro_batches": micro_batches}, metrics, status)


def accelerated(size: str, seconds: dict[str, float], failed: str = "", status: str = "ok") -> list[Record]:
    """A cell of `accelerate` with the times of its implementations, one of which may have failed."""
    run = RunConfig(model=model_config(size, context_length=2048, vocab_size=32_000), size=size, batch_size=4)
    run = dataclasses.replace(run, precision="bf16", attention="auto", device="cuda")
    config = {**run.to_dict(), "implementations": [*seconds, *([failed] if failed else [])], "rounds": 10}
    found = entries("accelerate", config, {}, status)
    for number, (name, time) in enumerate(seconds.items()):
        metrics = {"loss": 10.4 + number / 1000, "gradient_norm": 2.5, "peak_memory": (60 - 4 * number) * GIB}
        units = {"loss": "1", "gradient_norm": "1", "peak_memory": "B"}
        samples = {metric: ((value,), units[metric]) for metric, value in metrics.items()}
        for metric, (values, unit) in {**samples, "step_time": ((time, time * 1.01), "s")}.items():
            found.append(Record("accelerate", config, metric, unit, values, variant=name, environment=GPU))
    if failed:
        reason = "RuntimeError: it does not run here"
        found.append(Record("accelerate", config, "status", "", (reason,), variant=failed, environment=GPU))
    return found


def published(size: str, state: str, batch_size: int, seconds: float, status: str = "ok") -> list[Record]:
    """A step of 524,288 tokens of a published model."""
    run = RunConfig(
        model=model_config(f"qwen2.5/{size}", context_length=1024),
        size=f"qwen2.5/{size}",
        batch_size=batch_size,
        precision="bf16",
        attention="auto",
        fast="on",
        optimizer_state=state,
        device="cuda",
    )
    count = 512 // batch_size
    whole = dataclasses.replace(run, batch_size=512)
    metrics = {
        "step_time": (seconds, seconds),
        "predicted_time": (seconds - 0.1,),
        "tokens": (whole.tokens,),
        "parameters": (run.model.parameters,),
        "flops": (model_flops(whole),),
        "causal_flops": (causal_model_flops(whole),),
        "peak_flops": (989.4e12,),
        **{"peak_memory": (60 * GIB,), "predicted_memory": (59.9 * GIB,)},
    }
    return entries("published_models", {**run.to_dict(), "micro_batches": count}, metrics, status)


def way(
    batch_size: int, seconds: float, predicted: float, gib: float, status: str = "ok", **fields: object
) -> list[Record]:
    """A way to run a step of 65,536 tokens, measured and predicted."""
    model = model_config("small", context_length=1024)
    fast = {"precision": "bf16", "attention": "auto", "fast": "on", "device": "cuda", **fields}
    run = RunConfig(model=model, size="small", batch_size=batch_size, warmup_steps=2, num_steps=3, **fast)
    whole = dataclasses.replace(run, batch_size=64)
    metrics = {
        "step_time": (seconds, seconds),
        "predicted_time": (predicted,),
        "tokens": (whole.tokens,),
        "flops": (model_flops(whole),),
        "peak_flops": (989.4e12,),
        **{"peak_memory": (gib * GIB,), "predicted_memory": (gib * GIB,)},
    }
    return entries("optimized_steps", {**run.to_dict(), "micro_batches": 64 // batch_size}, metrics, status)


def unseen(
    run: RunConfig, seconds: float, predicted: float, matmul: float = 0.0, launch_bound: int = 0, status: str = "ok"
) -> list[Record]:
    """A step that was drawn, measured and predicted; `matmul`: seconds by which matmuls are predicted too long."""
    attention, other = 0.1 * seconds, 0.2 * seconds
    kinds = ("matmul", 0.6 * seconds - matmul, 0.6 * seconds, "attention", attention, attention, "other", other, other)
    metrics = {
        "step_time": (seconds, seconds, 1.01 * seconds),
        "predicted_time": (predicted,),
        "compared_kinds": kinds,
        "launch_bound": (launch_bound,),
        **{"peak_memory": (60 * GIB,), "predicted_memory": (59.9 * GIB,)},
    }
    return entries("unseen_steps", {**run.to_dict(), "draw_seed": SEED}, metrics, status, MEASURED_AT)


def falling(final: float) -> tuple[float, ...]:
    """A hundred losses from 5.5 to `final`, in a straight line."""
    return tuple(5.5 - (5.5 - final) * number / 99 for number in range(100))


def fp8_losses(
    precision: str, seed: int, curve: tuple[float, ...], *, seconds: float | None = 0.4, cosine: float = 0.995
) -> list[Record]:
    """A training run of small; `seconds`: of each of its steps."""
    run = RunConfig(
        model=model_config("small", vocab_size=256), size="small", batch_size=16, precision=precision, fast="on",
        attention="auto", device="cuda", seed=seed,
    )  # fmt: skip
    metrics = {"loss": curve, "held_out_loss": curve[-1:], "skipped_steps": (0.0,)}
    metrics |= {f"cosine_{when}": (0.999, cosine) for when in ("start", "end")}
    metrics |= {"train_time": (seconds,)} if seconds is not None else {}
    return entries("fp8_losses", {**run.to_dict(), "steps": len(curve), "learning_rate": 1e-3}, metrics)


LOSSES = [
    *(
        r
        for seed, loss in enumerate((1.50, 1.52, 1.54))
        for r in fp8_losses("bf16", seed, falling(loss), cosine=0.99999)
    ),
    *(r for seed, loss in enumerate((1.51, 1.52, 1.56)) for r in fp8_losses("fp8", seed, falling(loss), seconds=0.3)),
]
MEASURED_AT = dataclasses.replace(GPU, git_commit="0123456789abcdef", git_dirty=False)
DRAWN = (*fast_steps(60), *eager_steps(40))


SAMPLES: dict[str, list[Record]] = {
    "bench": cell("bench"),
    "end_to_end": cell("end_to_end") + cell("end_to_end", size="2.7B", metrics=step(0.4)),
    "warmup": cell("warmup", warmup_steps=0, metrics=COLD) + cell("warmup", warmup_steps=5),
    "precision": cell("precision")
    + cell("precision", precision="bf16", metrics=step(0.08, peak_memory=(9 * GIB,)))
    + cell("precision", size="2.7B", metrics=step(0.9))
    + cell("precision", size="2.7B", precision="bf16", metrics=step(0.3)),
    "compile": cell("compile") + cell("compile", compile=True, metrics=step(0.09, compile_time=(20.0,))),
    "fast_step": cell("fast_step", fast="off", metrics=step(0.1))
    + cell("fast_step", fast="on", metrics=step(0.01, peak_memory=(5 * GIB,)))
    + cell("fast_step", fast="kernels,loss,optimizer", metrics=step(0.05))
    + cell("fast_step", fast="loss,optimizer,graph", metrics=step(0.02))
    + cell("fast_step", compile=True, model_factory=LLAMA, metrics=step(0.04))
    + cell("fast_step", size="2.7B", fast="off", metrics=step(0.3))
    + cell("fast_step", size="2.7B", fast="on", metrics=step(0.2)),
    "accelerate": accelerated("large", {"plain": 0.12, "ours": 0.08, "packed": 0.078}, failed="liger")
    + accelerated("2.7B", {"plain": 0.46, "compiled": 0.415, "liger": 0.381, "ours": 0.33, "packed": 0.328}),
    "train_leaderboard": board("fp32", 2, 9.0) + board("fp32", 1, 8.5) + board("bf16", 2, 8.0),
    "published_models": published("0.5B", "bf16", 64, 3.4)
    + published("0.5B", "fp32", 64, 3.42)
    + published("7B", "bf16", 16, 35.7),
    "optimized_steps": way(64, 0.402, 0.4, 15)
    + way(32, 0.4, 0.405, 8.3)
    + way(16, 0.41, 0.412, 5)
    + way(8, 0.43, 0.42, 3.2)
    + way(64, 0.52, 0.51, 3.5, checkpoint_blocks=4)
    + way(64, 0.43, 0.425, 7.9, memory_budget="8GiB")
    + way(64, 0.41, 0.4, 15, fast="kernels,loss,optimizer")
    + way(4, 0.45, 0.44, 2.2, optimizer_state="bf16"),
    "fp8_losses": LOSSES,
    "unseen_steps": unseen(DRAWN[5], 0.1, 0.098)
    + unseen(DRAWN[20], 0.2, 0.21, matmul=0.012)
    + unseen(DRAWN[30], 0.3, 0.303)
    + unseen(DRAWN[70], 0.4, 0.38)
    + unseen(DRAWN[62], 0.05, 0.04, launch_bound=1),
    "peak_memory": cell("peak_memory")
    + cell("peak_memory", attention="sdpa", metrics={"predicted_memory": (9.5 * GIB,)}),
    "timing_agreement": cell("timing_agreement", metrics=AGREE)
    + cell("timing_agreement", size="2.7B", metrics={**AGREE, "do_bench_step_time": (0.099,)}),
    "accumulation": accumulation("fp32", 10.002) + accumulation("fp16", 9.9531),
    "autocast_dtypes": dtypes("fp16") + dtypes("bf16"),
}
