"""The measurements of a calibration, and the profile that is fitted to them."""

import dataclasses

import pytest
import torch

from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments.kernels import measure_calibration, measure_operators
from cs336_systems.predict.time import calibration_plan as calibration
from cs336_systems.predict.time import gpu_profile as profiles
from cs336_systems.predict.time import operator_plan
from cs336_systems.predict.time.calibration_plan import (
    ATTENTIONS,
    CLOCK,
    KERNEL_TIME,
    LAUNCHES,
    MATMULS,
    MULTIPROCESSORS,
    PASSES,
    POWER,
    POWER_LIMIT,
    SUSTAINED_ATTENTION,
    SUSTAINED_BYTES,
    SUSTAINED_SIZE,
    SUSTAINED_TIME,
    WATTS,
    calibration_cells,
    kernels_of,
    measured_kernels,
    profile_from,
)
from cs336_systems.predict.time.eager_kernels import (
    CAST,
    COPY,
    MIXED,
    POINTWISE,
    RMS_NORM,
    SOFTMAX,
    STRIDED,
    TRANSPOSED,
)
from cs336_systems.predict.time.eager_time import eager_step_time
from cs336_systems.predict.time.kernel_seconds import kernel_seconds
from cs336_systems.predict.time.operator_plan import HOST
from cs336_systems.predict.time.step_kernels import AttentionPass, Matmul, Pass, gradient_kernels, update_kernels
from cs336_systems.record import Environment, Record
from cs336_systems.step.train_step import set_matmul_precision
from tests.unit.test_families import FAMILIES

ENVIRONMENT = Environment(
    gpu="NVIDIA H200", compute_capability="9.0", sm_clock_max_mhz=1980, torch="2.11.0", triton="3.6.0"
)


def h200():
    return profiles.shipped_profiles()["h200"]


def record(config, metric, *numbers, variant=""):
    return Record("kernel_rates", config, metric, "s", numbers, environment=ENVIRONMENT, variant=variant)


@pytest.fixture(scope="module")
def records():
    """A short calibration of a GPU that is exactly as the shipped profile says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "RUNS", {MATMULS: 8, PASSES: 6})
        patch.setattr(operator_plan, "RUNS_OF_A_PART", 3)
        yield records_of(h200())


def records_of(profile):
    found = []
    for config in calibration_cells("cuda"):
        if config["part"] == LAUNCHES:
            found.append(record(config, KERNEL_TIME, profile.small, profile.gap, profile.launch))
            found.append(record(config, MULTIPROCESSORS, profile.sms))
        elif config["part"] == HOST:
            rates = profile.host
            times = (rates.forward, rates.inference, rates.backward, rates.parameter, rates.release, rates.step)
            found.append(record(config, KERNEL_TIME, *times, rates.compiled))
        elif config["part"] == POWER:
            found += power_records(config)
        else:
            times = [kernel_seconds(kernel, profile) + profile.gap for _, kernel in kernels_of(config)]
            found.append(record(config, KERNEL_TIME, *times))
    return found


@pytest.fixture(scope="module")
def fitted(records):
    return profile_from(records)


def power_records(config):
    """Sustained work at 0.8 of the clock, 10% slower than at first; copies at full clock draw 560 W."""
    found = [record(config, POWER_LIMIT, 700.0)]
    for name, first, seconds, clock, watts in (
        ("matmul", 1.4e-3, 1.54e-3, 0.8, 700.0),
        ("attention", 4e-3, 4.4e-3, 0.8, 700.0),
        ("copy", 2.6e-4, 2.6e-4, 1.0, 560.0),
    ):
        values = {KERNEL_TIME: first, SUSTAINED_TIME: seconds, CLOCK: clock, WATTS: watts}
        found += [record(config, metric, value, variant=name) for metric, value in values.items()]
    return found


def test_cells_are_the_same_every_time():
    first, again = ([kernels_of(config) for config in calibration_cells("cuda")] for _ in range(2))
    assert first == again
    sizes = {config["part"]: 0 for config in calibration_cells("cuda")}
    for config in calibration_cells("cuda"):
        sizes[config["part"]] += len(kernels_of(config))
    assert sizes[MATMULS] > 600
    assert sizes[PASSES] > 200
    assert sizes[ATTENTIONS] > 40
    names = {kernel.name for config in calibration_cells("cuda") for _, kernel in kernels_of(config)}
    assert set(measure_calibration.PASSES) <= names | {"embedding_backward_unsorted"}


def test_the_fit_finds_the_rates_that_made_the_times(records, fitted):
    found, expected = fitted, h200()
    assert (found.sms, found.small, found.gap, found.launch) == (132, expected.small, expected.gap, expected.launch)
    assert found.peak == pytest.approx(expected.peak, rel=1e-3)
    assert found.spread == 0.03
    errors = [abs(kernel_seconds(k, found) / (seconds - found.gap) - 1) for k, seconds in measured_kernels(records)]
    assert sum(errors) / len(errors) < 0.02
    assert found.passes["adamw"].bandwidth == pytest.approx(expected.passes["adamw"].bandwidth, rel=0.03)
    assert_times_of_passes(records, found, ("swiglu", "adamw", "add_norm_backward", "rotate", "norm_rotate_backward"))


def assert_times_of_passes(records, found, names):
    """Several rates of a pass may explain one set of times; the times themselves must come out."""
    for name in names:
        own = [(kernel, seconds) for kernel, seconds in measured_kernels(records) if kernel.name == name]
        assert own, name
        for kernel, seconds in own:
            assert kernel_seconds(kernel, found) == pytest.approx(seconds - found.gap, rel=0.05), kernel


def test_the_fit_finds_the_rates_of_eager_steps(records, fitted):
    expected = h200()
    assert fitted.host == expected.host
    assert fitted.spreads == expected.spreads
    for precision in ("fp32", "tf32"):
        assert fitted.wide[precision].peak == pytest.approx(expected.wide[precision].peak, rel=2e-3)
    wide = [(k, seconds) for k, seconds in measured_kernels(records) if isinstance(k, Matmul) and k.precision]
    errors = [abs(kernel_seconds(k, fitted) / (seconds - fitted.gap) - 1) for k, seconds in wide]
    assert len(errors) > 50
    assert sum(errors) / len(errors) < 0.04
    for name in ("cast", "narrow", "softmax"):
        assert fitted.passes[name].bandwidth == pytest.approx(expected.passes[name].bandwidth, rel=0.03)
    assert_times_of_passes(records, fitted, ("cast", "masked", "softmax", "rms_norm", "rms_norm_backward", "strided"))
    assert "backward efficient 128" in fitted.attention
    run = RunConfig(model=model_config("2.7B", context_length=512), attention="sdpa", device="cuda")
    assert eager_step_time(run, fitted).seconds == pytest.approx(eager_step_time(run, expected).seconds, rel=0.05)


def test_cells_of_an_older_plan_are_measured_again(records):
    """They timed other kernels, so that their times would be taken for those of others."""
    older = [
        dataclasses.replace(one, config={name: value for name, value in one.config.items() if name != "plan"})
        for one in records
    ]
    assert measured_kernels(older) == []
    with pytest.raises(UserError, match=r"there are no times of attention.*run cs336 calibrate again"):
        profile_from(older)
    assert len(measured_kernels([*older, *records])) == len(measured_kernels(records))


def test_a_calibration_from_before_eager_steps_still_gives_a_profile(records):
    new = (operator_plan.HOST, operator_plan.OPERATORS, operator_plan.WIDE, operator_plan.LIBRARIES)
    older = profile_from([item for item in records if item.config["part"] not in new])
    assert (older.host, older.wide) == (None, {})
    run = RunConfig(model=model_config("small"), device="cuda")
    assert eager_step_time(run, older) is None


def test_every_operator_of_an_eager_step_can_be_timed():
    device = torch.device("cpu")
    run = RunConfig(model=FAMILIES["qwen3"], batch_size=2, device="cuda")
    for name in operator_plan.TIMED_PASSES:
        for call in measure_operators.operator_calls(Pass(name, 1 << 16), run, device):
            call(0)
    for library in operator_plan.LIBRARY_KERNELS:
        kernel = AttentionPass(f"backward {library}", 1, 2, 2, 16, 8)
        for call in measure_operators.library_attention(kernel, device):
            call(0)
    matmul = Matmul("matmul", 8, 4, 16, "forward", batch=3, precision="tf32")
    try:
        assert measure_operators.wide_matmul(matmul, device)(0).shape == (3, 8, 4)
    finally:
        set_matmul_precision("fp32")


@pytest.mark.parametrize(
    ("name", "tensors"),
    [(POINTWISE, 12), (CAST, 6), (MIXED, 10), (STRIDED, 8), (TRANSPOSED, 8), (COPY, 8), (SOFTMAX, 8), (RMS_NORM, 8)],
)
def test_an_operator_moves_the_bytes_of_its_pass(name, tensors):
    """The result has as many elements as the bytes of the pass over those of one element."""
    run = RunConfig(model=FAMILIES["llama"], batch_size=2, device="cuda")
    elements = run.model.d_model * 3 * 64 * 64
    [call] = measure_operators.operator_calls(Pass(name, tensors * elements), run, torch.device("cpu"))
    out = call(0)
    assert out.numel() == elements


def test_the_host_is_timed_by_a_small_step(monkeypatch):
    model = dataclasses.replace(measure_operators.HOST_MODEL, d_model=32, d_ff=32, num_layers=2, context_length=8)
    monkeypatch.setattr(measure_operators, "HOST_MODEL", model)
    monkeypatch.setattr(measure_operators, "HOST_STEPS", 2)
    config = {"device": "cpu", "part": operator_plan.HOST, "number": 0}
    (metric,) = measure_calibration.measure_calibration(config)
    assert len(metric.samples) == 7
    assert all(seconds > 0 for seconds in metric.samples[:4])
    assert all(seconds >= 0 for seconds in metric.samples[4:])


def test_the_power_model(records, fitted):
    power = fitted.power
    assert (power.limit, power.static) == (700.0, 280.0)
    assert power.slowdown["matmul"] == pytest.approx(0.1 / (1 / 0.8 - 1))
    assert power.per_flop["matmul"] == pytest.approx(420 * 1.54e-3 / (2 * SUSTAINED_SIZE**3 * 0.8**power.exponent))
    flops = SUSTAINED_ATTENTION.flops * 7 // 2
    assert power.per_flop["attention"] == pytest.approx(420 * 4.4e-3 / (flops * 0.8**power.exponent))
    assert power.per_byte == pytest.approx(280 / (2 * SUSTAINED_BYTES / 2.6e-4))
    without = [item for item in records if item.metric != WATTS]
    assert calibration._power(without) is None


def test_a_part_that_is_missing_is_named(records):
    some = [item for item in records if item.config["part"] != ATTENTIONS]
    with pytest.raises(UserError, match="no times of attention; run cs336 calibrate again"):
        profile_from(some)
    failed = [dataclasses.replace(item, status="error: x") for item in records if item.config["part"] == PASSES]
    with pytest.raises(UserError, match="no times of passes"):
        profile_from([*(item for item in records if item.config["part"] != PASSES), *failed])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kernel_of_a_step_can_be_timed(name):
    run = RunConfig(model=FAMILIES[name], batch_size=2, precision="bf16", fast="on", device="cuda")
    device = torch.device("cpu")
    for kernel in (*gradient_kernels(run), *update_kernels(run)):
        if isinstance(kernel, Pass):
            measure_calibration.PASSES[kernel.name](run, kernel, device)(0)
        elif isinstance(kernel, Matmul):
            measure_calibration._matmul(kernel, device)(0)
        elif isinstance(kernel, AttentionPass):
            assert kernel.kv_heads == run.model.kv_heads


def test_a_pass_writes_what_the_step_writes():
    """The number of bytes that the list gives a pass is that of the tensors which its timing moves."""
    run = RunConfig(model=FAMILIES["qwen3"], batch_size=2, precision="bf16", fast="on", device="cuda")
    swiglu = next(kernel for kernel in gradient_kernels(run) if kernel.name == "swiglu")
    out = measure_calibration.PASSES["swiglu"](run, swiglu, torch.device("cpu"))(0)
    assert 3 * out.nbytes == swiglu.bytes
    deposit = next(kernel for kernel in gradient_kernels(run) if kernel.name == "deposit")
    copied = measure_calibration.PASSES["deposit"](run, deposit, torch.device("cpu"))(0)
    assert 2 * copied.nbytes == deposit.bytes // 4 * 4
