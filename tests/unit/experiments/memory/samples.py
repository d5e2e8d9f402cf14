"""Hand-made records of the experiments on memory."""

from cs336_systems.config import RunConfig, model_config
from cs336_systems.record import GIB, MIB, Record
from tests.unit.report.step_cells import CPU, cell, entries


def memory(context=512, peak=10.0, status="ok", **given) -> list[Record]:
    """`given`: fields of the configuration, and metrics."""
    run = {name: given.pop(name) for name in ("mode", "attention", "precision") if name in given}
    parts = ("parameters", 2.0 * GIB, "activations", (peak - 2.0) * GIB)
    blocks = (64.0 * MIB, "activations", "layers.0.attn", "aten::bmm 4x8", "reference.py:49 in scores")
    found = {"peak_memory": (peak * GIB,), "part_memory": parts, "largest_blocks": blocks, "peak_phase": ("forward",)}
    found |= {"traced_step_time": (1.5,), "unlabelled_memory": (0.1 * GIB,)}
    return cell("memory", context=context, status=status, metrics={**found, **given}, **run)


def recomputed(
    blocks, peak, seconds, inner=0, status="ok", precision="fp32", predicted=None, recursive=False, **shape
) -> list[Record]:
    """`shape`: fields of the model that are not those of `small`."""
    model = model_config("small", **shape)
    run = RunConfig(model=model, device="cuda", checkpoint_blocks=blocks, precision=precision)
    metrics = {"peak_memory": (peak * GIB,), "step_time": (seconds,)}
    metrics["predicted_by_tracing_memory"] = ((predicted or peak) * GIB,)
    own = {"inner": inner, **({"recursive": True} if recursive else {})}
    return entries("checkpointing", {**run.to_dict(), **own}, metrics, status)


def saved(mebibytes, status="ok", metrics=None, **fields) -> list[Record]:
    found = {"saved_memory": (mebibytes * MIB,), "saved_tensors": (5.0,), "saved_parameter_memory": (3.0 * MIB,)}
    found["largest_saved"] = (64.0 * MIB, "layers.0.attn", "4x8x8 float32", "reference.py:23 in attention")
    config = RunConfig(**{"model": model_config("small", num_layers=1), "device": "cuda", **fields}).to_dict()
    return entries("saved_tensors", config, {**found, **(metrics or {})}, status)


def predicted(size="small", peak=6.0, status="ok") -> list[Record]:
    names = ("parameter", "gradient", "optimizer", "activation", "loss", "predicted", "traced")
    metrics = {f"{name}_memory": ((1 + i) * GIB,) for i, name in enumerate(names)}
    metrics |= {"predicted_memory": (peak * GIB,), "peak_phase": ("backward",)}
    metrics |= {"block_activation_memory": (192 * MIB,), "residual_memory": (6 * MIB,)}
    config = RunConfig(model=model_config(size), size=size, device="cuda").to_dict()
    return entries("memory_model", config, metrics, status, CPU)


def budgeted(way, peak, seconds, budget=None, predicted=None, status="ok", context=512, **fields) -> list[Record]:
    """A step of `memory_budgets`; sizes in GiB."""
    own = {"torch_budget": fields.pop("torch_budget")} if way == "torch" else {}
    if way in ("plan", "offload"):
        fields["memory_budget"] = f"{budget}GiB"
    fields = {"fast": "on", "attention": "auto", **fields}
    model = model_config("small", context_length=context)
    run = RunConfig(model=model, size="small", device="cuda", precision="bf16", **fields)
    metrics = {"peak_memory": (peak * GIB,), "step_time": (seconds,)}
    if way != "torch":
        metrics["predicted_memory"] = ((predicted or peak) * GIB,)
    if budget:
        metrics |= {"host_memory": (0.5 * GIB,), "predicted_added_time": (0.002,)}
    return entries("memory_budgets", {**run.to_dict(), "way": way, **own}, metrics, status)


def compiled(budget, peak, seconds) -> list[Record]:
    fields = {"fast": "off", "attention": "sdpa", "compile": True}
    return budgeted("torch", peak, seconds, torch_budget=budget, **fields)


BLOCK = {
    "block_saved_memory": (100 * MIB,),
    "block_operations": ("softmax", "layers.0.attn", 60 * MIB, 1, "rms_norm", "layers.0.ln1", 40 * MIB, 2),
    "block_backward_change": (-70 * MIB,),
    "block_gradient_memory": (30 * MIB,),
}
"""Metrics of one block that keeps 100 MiB and adds gradients of 30."""

SAMPLES: dict[str, list[Record]] = {
    "memory": memory() + memory(1024, 11.0),
    "checkpointing": recomputed(0, 60.0, 1.0)
    + recomputed(1, 20.0, 1.3)
    + recomputed(4, 30.0, 1.25)
    + recomputed(4, 20.0, 1.5, inner=1)
    + recomputed(1, 20.0, 1.8, recursive=True),
    "saved_tensors": saved(200, metrics=BLOCK)
    + saved(150, attention="sdpa")
    + saved(50, checkpoint_blocks=1)
    + saved(180, compile=True),
    "memory_budgets": budgeted("plan", 9.9, 0.130, budget=10)
    + budgeted("groups", 11.0, 0.140, checkpoint_blocks=2)
    + budgeted("plan", 13.9, 0.112, budget=14, predicted=13.8)
    + budgeted("groups", 13.0, 0.138, checkpoint_blocks=8)
    + budgeted("plan", 17.8, 0.102, budget=18)
    + budgeted("groups", 20.0, 0.100)
    + budgeted("offload", 18.9, 0.101, budget=19)
    + compiled(0.3, 15.0, 0.160)
    + compiled(1.0, 25.0, 0.150),
    "memory_model": predicted("small", 9) + predicted("2.7B", 30),
}
