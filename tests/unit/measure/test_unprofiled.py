"""Steps without the profiler, from their trace and their time: traces whose answers can be computed by hand."""

import pytest

from cs336_systems.cli import main
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.unprofiled import LEAST_HOST, MOST_HOST, USUAL_HOST, unprofiled
from cs336_systems.measure.readers.what_if import outcome, parse_scenario
from tests.helpers import assert_refused
from tests.unit.measure.test_trace_launches import launched_every
from tests.unit.measure.test_trace_replay import FLASH, GEMM, H200, MAIN, MICRO, Script, gpu_bound, span_of

QUEUED = 4 + 10 * 2 + 9 * 0.55
"""Microseconds of ten queued kernels of 2 us; the trace itself does not show the gaps between queued kernels."""


@pytest.fixture
def script():
    return Script()


def factors_of(graph, step):
    return unprofiled(graph, graph.replay(), step * MICRO)


def step_without_profiler(graph, step, text):
    """Return the predicted microseconds of a scenario, given those of the step without the profiler."""
    return outcome(graph, graph.replay(), parse_scenario(text), factors_of(graph, step)).step / MICRO


def host_bound(script, folder):
    """Ten kernels of 2 us, launched every 10 us: 90 us of the host, a latency of 4 us, the last kernel."""
    return launched_every(script, 10, [GEMM, FLASH] * 5).graph(folder)


def test_the_host_takes_what_the_profiler_added(script, tmp_path):
    """60 us are 0.6 x 90 + 6. Without a host the kernels alone remain, whatever the profiler added."""
    graph = host_bound(script, tmp_path)
    assert span_of(graph) == pytest.approx(96)
    assert factors_of(graph, 60) == (pytest.approx(0.6, abs=1e-4), pytest.approx(1, abs=1e-4))
    assert step_without_profiler(graph, 60, "host=1") == pytest.approx(60)
    assert step_without_profiler(graph, 60, "matmul=0.5,attention=0.5") == pytest.approx(59, abs=0.01)
    assert step_without_profiler(graph, 60, "host=0.5") == pytest.approx(33, abs=0.01)
    assert step_without_profiler(graph, 60, "host=0") == pytest.approx(QUEUED, abs=0.01)
    assert step_without_profiler(graph, 60, "attention=10us/1") == pytest.approx(60 - 0.6 * 40, abs=0.01)


def test_a_host_that_was_slower_without_the_profiler(script, tmp_path):
    graph = host_bound(script, tmp_path)
    assert factors_of(graph, 150) == (pytest.approx(1.6, abs=1e-4), pytest.approx(1, abs=1e-4))
    assert step_without_profiler(graph, 150, "host=0") == pytest.approx(QUEUED, abs=0.01)


@pytest.mark.parametrize(("step", "host", "at_bound"), [(20, LEAST_HOST, QUEUED), (500, MOST_HOST, 186)])
def test_the_rest_beyond_the_bounds_of_the_host_scales_all(step, host, at_bound, script, tmp_path):
    graph = host_bound(script, tmp_path)
    assert factors_of(graph, step) == (pytest.approx(host, abs=1e-4), pytest.approx(step / at_bound, rel=1e-3))
    assert step_without_profiler(graph, step, "host=1") == pytest.approx(step)


def test_a_step_bound_by_its_kernels_does_not_tell_the_factor(script, tmp_path):
    """The usual one is taken, and the step without the profiler is met by scaling: of 631 us, 16 are the host's."""
    graph = gpu_bound(script).graph(tmp_path)
    for step in (600, 630, 660):
        host, scale = factors_of(graph, step)
        assert host == USUAL_HOST
        assert scale == pytest.approx(step / (631 - 0.4 * 16), rel=0.01)
        assert step_without_profiler(graph, step, "host=1") == pytest.approx(step)
    assert step_without_profiler(graph, 600, "attention=0.5") == pytest.approx(600 - 150 * 600 / 625, rel=0.005)


def test_at_equal_power_the_step_without_the_profiler_counts(script, tmp_path):
    graph = gpu_bound(script).graph(tmp_path)
    found = outcome(graph, graph.replay(), parse_scenario("matmul=1"), factors_of(graph, 600))
    assert found.may_be_limited
    assert (found.step / MICRO, found.at_limit / MICRO) == (pytest.approx(600), pytest.approx(600))


def test_power_does_not_limit_a_step_that_comes_to_wait_for_the_host(script, tmp_path):
    graph = gpu_bound(script).graph(tmp_path)
    assert not outcome(graph, graph.replay(), parse_scenario("*=0.05")).may_be_limited


def test_without_a_gpu_all_times_are_scaled(script, tmp_path):
    """Operators have the profiler's time in them, as Python has between them."""
    script.event("cpu_op", "aten::mm", 0, 100, MAIN)
    script.event("cpu_op", "aten::add", 150, 50, MAIN)
    graph = script.graph(tmp_path)
    assert factors_of(graph, 100) == (1, pytest.approx(0.5))
    assert step_without_profiler(graph, 100, "matmul=0.5") == pytest.approx(75)
    assert not outcome(graph, graph.replay(), parse_scenario("matmul=1")).may_be_limited


def test_a_time_that_is_given_is_one_without_the_profiler(script, tmp_path):
    script.event("cpu_op", "aten::mm", 0, 100, MAIN)
    script.event("cpu_op", "aten::add", 150, 50, MAIN)
    graph = script.graph(tmp_path)
    found = outcome(graph, graph.replay(), parse_scenario("matmul=80us"), factors_of(graph, 100))
    assert found.selected / MICRO == pytest.approx(50)
    assert found.changed / MICRO == pytest.approx(80)
    assert found.step / MICRO == pytest.approx(130)


@pytest.mark.parametrize("factor", [0.4, 0.61, 0.9, 1.3])
def test_any_host_factor_of_an_h200s_trace_is_found(factor):
    """Replays of the host-bound trace at a known factor take the place of steps without the profiler."""
    graph = graph_of(read_chrome(H200))
    recorded = graph.replay()
    step = outcome(graph, recorded, parse_scenario(f"host={factor}")).step
    host, scale = unprofiled(graph, recorded, step)
    assert (host, scale) == (pytest.approx(factor, abs=1e-3), pytest.approx(1, abs=1e-3))


# -- the command ------------------------------------------------------------------------------------------------------


def test_inspect_predicts_the_step_without_the_profiler(script, tmp_path, capsys):
    path = launched_every(script, 10, [GEMM, FLASH] * 5).write(tmp_path)
    flags = ["--what_if", "host=0", "--what_if", "attention=10us/1", "--step_time", "60us"]
    assert main(["inspect", str(path), *flags, "--format", "csv"]) == 0
    out = capsys.readouterr().out
    assert "recorded,,,0.096,," in out
    assert "without the profiler,,,0.060,," in out
    assert "host=0,0.000,0.000,0.029,-0.031,-51.75%" in out
    assert "attention=10us/1,0.010,0.010,0.036,-0.024,-40.00%" in out
    assert main(["inspect", str(path), *flags]) == 0
    assert "the host takes 0.600 times its recorded time; then all times are multiplied by 1.000" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert main(["inspect", str(path), *flags[:-2]]) == 0
    assert "times are those under the profiler, which is slower; --step_time TIME" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("time", "named"),
    [("75", "'75' is not a time above 0"), ("0ms", "'0ms'"), ("-3ms", "'-3ms'"), ("soon", "such as 75ms"),
     ("96ms", "is far from the 0.096 ms"), ("9us", "without the profiler")],
)  # fmt: skip
def test_times_of_no_step(time, named, script, elsewhere, capsys):
    path = launched_every(script, 10, [GEMM, FLASH] * 5).write(elsewhere)
    assert_refused(["inspect", str(path), "--what_if", "host=0", f"--step_time={time}"], ["--step_time", named], capsys)


def test_a_step_time_belongs_to_one_trace_and_a_scenario(script, elsewhere, capsys):
    path = str(gpu_bound(script).write(elsewhere))
    assert_refused(["inspect", path, "--step_time", "1ms"], ["--step_time", "--what_if"], capsys)
    both = ["inspect", path, path, "--what_if", "host=0", "--step_time", "1ms"]
    assert_refused(both, ["--step_time", "2 files"], capsys)
