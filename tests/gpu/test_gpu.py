"""Timing, memory, FLOPs and traces on a GPU: run with `pytest -m gpu`."""

import gc
from itertools import product

import pytest
import torch

from cs336_systems.config import MODES, PLAIN_PRECISIONS, RunConfig, model_config
from cs336_systems.measure.environment import capture
from cs336_systems.measure.flop_counter import count_flops
from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.measure.timing import time_steps
from cs336_systems.predict.flops import executed_flops
from cs336_systems.predict.memory_model import estimate
from cs336_systems.step.train_step import TrainStep

HUNGRY = "tests.gpu.hungry:build"
"""A model that runs out of memory."""
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_gpu")]


def step_of(size="tiny", **fields):
    return TrainStep.build(RunConfig(model=model_config(size), device="cuda", **fields))


@pytest.mark.parametrize(("mode", "precision"), list(product(MODES, PLAIN_PRECISIONS)))
def test_every_mode_and_precision(mode, precision):
    step = step_of(mode=mode, precision=precision)
    batch = step.random_batch()
    timings = time_steps(lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=1, num_steps=3)
    assert all(len(samples) == 3 for samples in timings.wall.values())
    assert timings.events.keys() == timings.wall.keys()
    for phase, samples in timings.events.items():
        assert all(0 < event <= wall * 1.02 for event, wall in zip(samples, timings.wall[phase], strict=True))
    assert timings.peak_memory > 0


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_loss_and_gradients_equal_those_of_a_cpu(attention):
    losses = {}
    for device in ("cpu", "cuda"):
        config = RunConfig(model=model_config("tiny"), device=device, mode="forward-backward", attention=attention)
        step = TrainStep.build(config)
        torch.manual_seed(0)
        for parameter in step.model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) * 0.05)
        loss = step(*step.random_batch())
        gradients = torch.cat([parameter.grad.flatten().cpu() for parameter in step.model.parameters()])
        losses[device] = (loss.item(), gradients)
    assert losses["cuda"][0] == pytest.approx(losses["cpu"][0], rel=1e-5)
    difference = (losses["cuda"][1] - losses["cpu"][1]).norm() / losses["cpu"][1].norm()
    assert difference < 1e-4


def test_fp32_is_not_tf32():
    """TF32 keeps 10 bits of mantissa: its relative error is near 3e-4, that of fp32 far below."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 1024, 1024, device="cuda", dtype=torch.float64)
    errors = {}
    for precision in ("fp32", "tf32"):
        step_of(precision=precision, mode="inference")
        found = (a.float() @ b.float()).double()
        errors[precision] = ((found - a @ b).norm() / (a @ b).norm()).item()
    assert errors["fp32"] < 1e-5 < 1e-4 < errors["tf32"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["inference", "forward", "forward-backward", "train-step"])
@pytest.mark.parametrize(("attention", "group"), [("reference", 0), ("sdpa", 0), ("reference", 3), ("sdpa", 1)])
def test_predicted_peak(mode, precision, attention, group):
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # otherwise the step would reuse those of an earlier test
    others = torch.cuda.memory_allocated()  # held by earlier tests of this process
    step = step_of("small", mode=mode, precision=precision, attention=attention, checkpoint_blocks=group)
    batch = step.random_batch()
    timings = time_steps(lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=3, num_steps=2)
    plain = attention == "reference" and not group
    measured = timings.peak_memory - others
    assert estimate(step.config).peak == pytest.approx(measured, rel=0.02 if plain else 0.03)
    assert predict_by_tracing(step.config).peak == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flops_equal_torchs_counter(attention, precision):
    step = step_of(attention=attention, precision=precision)
    batch = step.random_batch()
    assert count_flops(lambda: step(*batch)) == executed_flops(step.config)


def test_environment_names_the_gpu():
    found = capture()
    assert found.gpu == torch.cuda.get_device_name()
    assert found.gpu_memory == torch.cuda.get_device_properties(0).total_memory
    assert found.compute_capability
    assert found.cuda == torch.version.cuda


def test_out_of_memory_is_a_row(tmp_path):
    from cs336_systems.experiments.runner import Runner, gather
    from cs336_systems.record import load

    fits, not_predictable = (
        RunConfig(model=model_config("tiny"), device="cuda", num_steps=2).to_dict(),
        RunConfig(model=model_config("tiny"), device="cuda", num_steps=2, model_factory=HUNGRY).to_dict(),
    )
    path = tmp_path / "records.jsonl"
    with Runner(path, quiet=True) as runner:
        runner.run(gather([("bench", not_predictable), ("bench", fits)]))
    by_factory = {r.config["model_factory"]: r.status for r in load(path).records if r.metric == "cell_time"}
    assert by_factory[HUNGRY].startswith("oom")
    assert by_factory[None] == "ok"


def test_two_ranks_on_one_gpu_agree_with_one():
    from cs336_systems.parallel.launch import spawn
    from tests.gpu.gpu_ranks import WRAPPERS, differences

    for by_wrapper in spawn(differences, 2, backend="gloo", device="cuda", timeout=240):
        assert list(by_wrapper) == list(WRAPPERS)
        for name, (weights, loss) in by_wrapper.items():
            assert weights < 1e-6, f"{name}: {weights}"
            assert loss < 1e-5, f"{name}: {loss}"


def test_phase_kind_and_part_of_kernels(tmp_path):
    from cs336_systems.measure.kernel_trace import profile_steps
    from cs336_systems.measure.readers.kernel_classes import OUTPUT, SCORES, SOFTMAX

    step = step_of("small")
    batch = step.random_batch()
    step(*batch)
    trace = profile_steps(step, batch, num_steps=2, keep=tmp_path / "trace.json.gz").trace
    assert (trace.on_gpu, trace.steps) == (True, 2)
    total = sum(kernel.duration for kernel in trace.kernels)
    assert sum(kernel.duration for kernel in trace.kernels if kernel.kind == "unknown") < 0.01 * total
    assert sum(kernel.duration for kernel in trace.of(None)) < 0.02 * total
    matmuls = {
        (phase, part): len([k for k in trace.of(phase) if k.part == part and k.kind == "matmul"]) / 2
        for phase in ("forward", "backward")
        for part in (SCORES, SOFTMAX, OUTPUT)
    }
    layers = step.config.model.num_layers
    assert matmuls == {
        ("forward", SCORES): layers,
        ("forward", SOFTMAX): 0,
        ("forward", OUTPUT): layers,
        ("backward", SCORES): 2 * layers,
        ("backward", SOFTMAX): 0,
        ("backward", OUTPUT): 2 * layers,
    }
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"attention": "auto"}, {"checkpoint_blocks": 3}, {"mode": "forward"}])
def test_every_block_of_the_peak_has_a_label(precision, fields):
    from cs336_systems.measure.memory_timeline import UNLABELLED, trace_memory

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    step = step_of("small", precision=precision, **fields)
    batch = step.random_batch()
    timings = time_steps(lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=3, num_steps=2)
    trace = trace_memory(step, batch)
    assert trace.peak == pytest.approx(timings.peak_memory, rel=0.01), "tracing does not change the peak"
    assert sum(trace.parts.values()) == trace.peak
    assert trace.parts.get(UNLABELLED, 0) < 0.02 * trace.peak
    assert trace.parts["parameters"] == pytest.approx(4 * step.config.model.parameters, rel=0.01)
    if step.trains:
        assert trace.parts["optimizer state"] == pytest.approx(8 * step.config.model.parameters, rel=0.01)


def test_the_snapshot_has_the_stacks_of_allocations(tmp_path):
    import pickle

    from cs336_systems.experiments.memory.measure_memory import SNAPSHOT_FILE, measure_memory

    config = RunConfig(model=model_config("tiny"), device="cuda", num_steps=2, warmup_steps=2)
    measure_memory(config.to_dict(), folder=str(tmp_path))
    snapshot = pickle.loads((tmp_path / SNAPSHOT_FILE).read_bytes())
    assert {"segments", "device_traces"} <= snapshot.keys()
    frames = [frame["name"] for event in snapshot["device_traces"][0] for frame in event.get("frames", ())]
    assert "scores" in frames
