"""Times of eager and compiled steps: phases, the host's bound, intervals, and steps that were measured on an H200."""

import dataclasses
import statistics

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.model import TransformerLM
from cs336_systems.predict.gpus import find_by_driver_name, find_card
from cs336_systems.predict.time.compiled_kernels import compiled_phases
from cs336_systems.predict.time.eager_kernels import eager_phases
from cs336_systems.predict.time.eager_time import (
    CLOSE_STEP,
    COMPILED,
    LAUNCH_BOUND_STEP,
    eager_step_time,
    kind_of_step,
    parameter_tensors,
)
from cs336_systems.predict.time.gpu_profile import GpuProfile, profile_of, shipped_profiles
from cs336_systems.predict.time.kernel_seconds import kernel_seconds
from cs336_systems.predict.time.on_gpu import predicted_on
from cs336_systems.predict.time.step_kernels import Matmul
from cs336_systems.report.step_errors import corrected, is_fitted, llmq_errors, published_errors, recorded_errors
from tests.helpers import records_of_h200
from tests.unit.test_families import FAMILIES

H200 = shipped_profiles()["h200"]


def run_of(size="2.7B", context=512, **fields):
    return RunConfig(model=model_config(size, context_length=context), device="cuda", **fields)


def seconds(run, profile=H200):
    return eager_step_time(run, profile).seconds


def test_modes_add_phases():
    modes = [seconds(run_of(mode=mode)) for mode in ("inference", "forward", "forward-backward", "train-step")]
    assert modes == sorted(modes)
    assert modes[2] > 2.5 * modes[1]


def test_lower_precision_is_faster_where_the_gpu_decides():
    times = [seconds(run_of(batch_size=16, precision=precision)) for precision in ("fp32", "tf32", "bf16")]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[2]


def test_recomputation_costs_a_forward_pass_without_the_last_matmul_of_blocks():
    kept, again = (seconds(run_of(checkpoint_blocks=group)) for group in (0, 1))
    assert (again - kept) / seconds(run_of(mode="inference")) == pytest.approx(239 / 312, rel=0.03), "as measured"


def test_a_step_is_launch_bound_where_the_host_is_slower_than_the_gpu():
    small, large = (eager_step_time(run_of(size, 128, precision="bf16"), H200) for size in ("small", "2.7B"))
    assert small.is_launch_bound
    assert kind_of_step(small) == LAUNCH_BOUND_STEP
    slow = dataclasses.replace(H200, host=dataclasses.replace(H200.host, forward=1e-3, backward=1e-3))
    fast = dataclasses.replace(H200, host=dataclasses.replace(H200.host, forward=1e-9, inference=1e-9, backward=1e-9))
    assert eager_step_time(large.config, slow).is_launch_bound
    assert not eager_step_time(small.config, fast).is_launch_bound
    assert eager_step_time(large.config, slow).seconds > 5 * seconds(large.config, fast)


def test_the_interval_is_that_of_the_kind():
    kinds = {
        LAUNCH_BOUND_STEP: run_of("small", 128),
        CLOSE_STEP: run_of("small", 512),
        COMPILED: run_of(compile=True),
        "fp32": run_of(),
        "tf32": run_of(batch_size=32, precision="tf32"),
        "bf16": run_of(batch_size=32, precision="bf16", attention="auto"),
    }
    found = {kind: eager_step_time(run, H200) for kind, run in kinds.items()}
    assert {kind: kind_of_step(time) for kind, time in found.items()} == {kind: kind for kind in kinds}
    assert {kind: pytest.approx(time.spread) for kind, time in found.items()} == H200.spreads


def test_compiled_steps_have_the_matmuls_of_eager_ones_and_fewer_passes():
    run = run_of(batch_size=8, precision="bf16", attention="sdpa")
    for phase, kernels in compiled_phases(dataclasses.replace(run, compile=True)).items():
        eager = eager_phases(run)[phase]
        assert [k for k in kernels if isinstance(k, Matmul)] == [k for k in eager if isinstance(k, Matmul)]
    assert seconds(dataclasses.replace(run, compile=True)) < seconds(run)


@pytest.mark.parametrize(("precision", "most"), [("bf16", 7), ("tf32", 3), ("fp32", 1)])
def test_vocabularies_that_are_not_aligned_take_older_kernels(precision, most):
    times = []
    for vocabulary in (50_304, 50_306, 50_257):
        run = run_of(precision=precision)
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=vocabulary))
        found = [k for kernels in eager_phases(run).values() for k in kernels if k.name == "logits"]
        times.append(kernel_seconds(found[0], H200))
    ratios = [time / times[0] for time in times]
    assert ratios[2] > 0.99 * ratios[1] > 0.98
    assert ratios[2] <= most
    assert (ratios[1] > 2) is (precision != "fp32")
    compiled = dataclasses.replace(run, compile=True)
    assert all(not k.multiple for k in compiled_phases(compiled)["forward"] if isinstance(k, Matmul))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_parameters_is_that_of_the_model(name):
    assert parameter_tensors(FAMILIES[name]) == len(list(TransformerLM(FAMILIES[name]).parameters()))


def test_without_rates_of_the_host_or_of_the_precision_there_is_no_time():
    assert eager_step_time(run_of(), dataclasses.replace(H200, host=None)) is None
    assert eager_step_time(run_of(), dataclasses.replace(H200, wide={})) is None
    assert eager_step_time(run_of(precision="bf16"), dataclasses.replace(H200, wide={})) is not None
    assert predicted_on(run_of(), find_card("h200"), 2) is None, "micro batches are not listed"


def test_a_profile_survives_its_file_and_older_ones_are_read():
    assert GpuProfile.of(H200.to_dict()) == H200
    older = {name: value for name, value in H200.to_dict().items() if name not in ("host", "wide", "spreads")}
    assert (GpuProfile.of(older).host, GpuProfile.of(older).wide) == (None, {})


def test_a_data_sheet_scales_each_precision_by_its_own_peak():
    card = find_by_driver_name("NVIDIA GeForce RTX 4090")
    profile = profile_of(card, "fp32")
    assert profile.wide["fp32"].peak == pytest.approx(H200.wide["fp32"].peak * 82.6 / 66.9)
    assert profile.wide["tf32"].peak == pytest.approx(H200.wide["tf32"].peak * 82.6 / 494.7)
    assert profile.peak == profile_of(card, "bf16").peak
    assert min(profile.spreads.values()) == 0.25
    turing = profile_of(find_by_driver_name("NVIDIA GeForce RTX 2080 Ti"), "fp32")
    assert turing.wide.keys() == {"fp32"}


# -- measured steps ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return recorded_errors(records_of_h200())


def test_recorded_steps_that_no_rate_was_fitted_to(recorded):
    unseen = [error for error, fitted in zip(recorded, is_fitted(recorded), strict=True) if not fitted]
    errors = [abs(error.error) for error in unseen]
    assert len(unseen) == 60
    assert statistics.median(errors) < 0.05
    on_gpu = [abs(error.error) for error in unseen if error.kind in ("fp32", "bf16", COMPILED)]
    assert len(on_gpu) == 26
    assert statistics.median(on_gpu) < 0.03
    assert max(on_gpu) < 0.07


def test_most_recorded_steps_lie_in_their_interval(recorded):
    inside = [abs(error.measured / error.predicted - 1) <= H200.spreads[error.kind] for error in recorded]
    assert sum(inside) >= 0.9 * len(recorded)


def test_published_steps_and_their_correction():
    errors = published_errors()
    assert len(errors) == 25
    assert {error.gpu for error in errors} == {"H100 PCIe"}
    median, after = (statistics.median(abs(error.error) for error in own) for own in (errors, corrected(errors)))
    assert after < median < 0.15
    assert max(abs(error.error) for error in llmq_errors()) < 0.15
