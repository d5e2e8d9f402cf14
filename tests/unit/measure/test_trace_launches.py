"""Scenarios that say in how many kernels: the host's time that goes with kernels, or comes with more of them.

Times in microseconds. The traces are those of test_trace_replay.py, or small enough to replay by hand.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.config import UserError
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_launches import Launches
from cs336_systems.measure.readers.what_if import change_of, outcome, parse_scenario, parse_time, selections
from tests.unit.measure.test_trace_replay import (
    AUTOGRAD,
    FLASH,
    GEMM,
    H200,
    MAIN,
    MICRO,
    POINTWISE,
    Script,
    gpu_bound,
    span_of,
    step_of,
)


@pytest.fixture
def script():
    return Script()


def launched_every(script, apart, names, *, slowdown=1):
    """Kernels of 2 us that start 4 us after their launches; a launch takes 1 us. `slowdown`: of the host."""
    for n, name in enumerate(names):
        script.kernel(name, apart * slowdown * n + 4, 2, launch=apart * slowdown * n, took=slowdown)
    return script


def test_fewer_kernels_take_the_time_of_the_host_along(script, tmp_path):
    """Five of ten kernels become one: four launches go, each 10 us after the one before. The 10 us of the kernel that
    stays end at 24, and the next launch is at 20."""
    graph = launched_every(script, 10, [GEMM, FLASH] * 5).graph(tmp_path)
    assert span_of(graph) == pytest.approx(96)
    assert step_of(graph, "attention=10us") == pytest.approx(96)
    assert step_of(graph, "attention=10us/1") == pytest.approx(96 - 40)
    assert step_of(graph, "attention=10us/3") == pytest.approx(96 - 20)


def test_kernels_that_stay_are_spread_and_take_the_time_of_those_that_go(script, tmp_path):
    graph = launched_every(script, 10, [FLASH] * 7).graph(tmp_path)
    change = change_of(graph, parse_scenario("attention=28us/3"))
    times = [change.seconds[number] / MICRO for number in graph.measured_kernels]
    assert times == pytest.approx([8, 0, 8, 0, 12, 0, 0])


def test_more_kernels_add_launches_of_the_usual_cost(script, tmp_path):
    """Five kernels become ten: each launch is followed by another one of 10 us, and the last of them ends the step."""
    graph = launched_every(script, 10, [GEMM, FLASH] * 5).graph(tmp_path)
    assert Launches(graph).usual_seconds / MICRO == pytest.approx(10)
    assert step_of(graph, "attention=10us/10") == pytest.approx(90 + 40 + 11)
    assert step_of(graph, "attention=10us/10,host=0.5") == pytest.approx((90 + 40) / 2 + 4 + 2)


def test_as_many_kernels_as_recorded_change_nothing_more(script, tmp_path):
    graph = launched_every(script, 10, [GEMM, FLASH] * 5).graph(tmp_path)
    assert step_of(graph, "attention=6us/5") == pytest.approx(step_of(graph, "attention=6us"))


def test_a_gpu_bound_step_loses_the_gaps_of_kernels_that_go(script, tmp_path):
    """Three flash kernels of 100 us become one of 300 us; two of the gaps of 1 us go."""
    graph = gpu_bound(script).graph(tmp_path)
    assert step_of(graph, "attention=300us") == pytest.approx(631)
    assert step_of(graph, "attention=300us/1") == pytest.approx(629)


def test_a_removed_kernel_takes_the_time_of_the_host_along(script, tmp_path):
    graph = launched_every(script, 10, [GEMM, FLASH] * 5).graph(tmp_path)
    assert step_of(graph, "attention=0") == pytest.approx(96 - 50)


def test_what_is_removed_does_not_hold_up_the_kernels_after_it(script, tmp_path):
    """The kernel started 40 us after its launch. Without it the last one starts 4 us after its own launch, at 10."""
    script.kernel(GEMM, 4, 2, launch=0)
    script.kernel(FLASH, 50, 2, launch=10)
    script.kernel(GEMM, 52, 2, launch=20)
    graph = script.graph(tmp_path)
    assert span_of(graph) == pytest.approx(54)
    assert step_of(graph, "attention=0") == pytest.approx(10 + 4 + 2)


def test_small_calls_before_a_launch_belong_to_it_and_waits_do_not(script, tmp_path):
    """Without the kernel at 60 its launch goes, and with it a query 5 us before and the host's time since the wait; the
    wait stays."""
    script.kernel(GEMM, 4, 30, launch=0)
    script.call("cudaStreamSynchronize", 2, 33)
    script.call("cudaFuncGetAttributes", 50, 2)
    script.kernel(FLASH, 61, 2, launch=57)
    script.kernel(GEMM, 74, 2, launch=70)
    graph = script.graph(tmp_path)
    launches = Launches(graph)
    launch = next(node.launch for node in graph.nodes if node.name == FLASH)
    names = [graph.nodes[call].name for call in launches.calls_for(launch)]
    assert names == ["cudaLaunchKernel", "cudaFuncGetAttributes"]
    assert span_of(graph) == pytest.approx(76)
    assert step_of(graph, "attention=0") == pytest.approx(76 - (58 - 35))


def test_the_change_of_threads_stays(script, tmp_path):
    """The first launch of backward's thread comes 20 us after the last one of the main thread, which is no dispatch."""
    script.kernel(GEMM, 4, 2, launch=0)
    script.kernel(FLASH, 25, 2, launch=21, thread=AUTOGRAD)
    script.kernel(FLASH, 35, 2, launch=31, thread=AUTOGRAD)
    script.kernel(GEMM, 45, 2, launch=41, thread=AUTOGRAD)
    graph = script.graph(tmp_path)
    assert span_of(graph) == pytest.approx(47)
    assert step_of(graph, "attention=0") == pytest.approx(47 - 1 - 10)


def test_kernels_of_a_cuda_graph_cost_the_host_nothing(script, tmp_path):
    number = script.call("cudaGraphLaunch", 0, 10)
    for n, name in enumerate((GEMM, FLASH, FLASH, GEMM)):
        script.kernel(name, 20 + 101 * n, 100, number=number)
    graph = script.graph(tmp_path)
    assert span_of(graph) == pytest.approx(423)
    assert step_of(graph, "attention=200us/1") == pytest.approx(423 - 1)
    assert step_of(graph, "attention=200us/500") == pytest.approx(423 - 1)


def test_each_step_has_that_many_kernels(script, tmp_path):
    """Two steps with four kernels, launched every 10 us from 5 us on; one kernel a step stays."""
    for at in (0, 100):
        script.event("user_annotation", "forward", at, 100, MAIN)
        for n in range(4):
            script.kernel(FLASH, at + 9 + 10 * n, 2, launch=at + 5 + 10 * n)
    graph = script.graph(tmp_path)
    assert graph.steps == 2
    assert [found.kernels for found in selections(graph, ["attention"])] == [4]
    assert step_of(graph, "attention=8us/1") == pytest.approx(100 - 30)


@given(names=st.lists(st.sampled_from([GEMM, FLASH, POINTWISE]), min_size=1, max_size=12), count=st.integers(1, 30))
def test_more_kernels_never_make_a_step_faster(names, count, tmp_path_factory):
    graph = launched_every(Script(), 10, [*names, FLASH]).graph(tmp_path_factory.mktemp("trace"))
    fewer, more = (step_of(graph, f"attention=8us/{number}") for number in (count, count + 1))
    assert fewer <= more + 1e-6


def test_at_equal_power_the_number_of_kernels_does_not_matter(script, tmp_path):
    """Fewer kernels do the same arithmetic."""
    graph = gpu_bound(script).graph(tmp_path)
    times = [outcome(graph, graph.replay(), parse_scenario(f"attention=200us{n}")).at_limit for n in ("", "/3", "/1")]
    assert times == pytest.approx([times[0]] * 3)


# -- the kernels of a name --------------------------------------------------------------------------------------------


def test_time_and_number_of_selected_kernels(script, tmp_path):
    """Gaps count between kernels of a group that follow one another, as far as they are usual."""
    for n, name in enumerate((GEMM, FLASH, FLASH, POINTWISE)):
        script.kernel(name, 10 + 101 * n, 100, launch=2 * n)
    graph = script.graph(tmp_path)
    attention, rest = selections(graph, ["attention", "attention+elementwise"])
    assert (attention.seconds / MICRO, attention.kernels) == (pytest.approx(201), 2)
    assert (rest.seconds / MICRO, rest.kernels) == (pytest.approx(100), 1)


def test_half_of_the_kernels_of_an_h200_take_their_host_time_along():
    """The step is bound by the host, so it becomes faster by exactly the time that belonged to them."""
    graph = graph_of(read_chrome(H200))
    (found,) = selections(graph, ["elementwise"])
    text = f"elementwise={found.seconds * 1e6:.6f}us/{found.kernels // 2}"
    change = change_of(graph, parse_scenario(text))
    launches = Launches(graph)
    removed = [n for n in graph.measured_kernels if change.seconds.get(n) == 0]
    gone = sum(launches.seconds_for(launch) for launch in launches.unused(removed))
    assert len(removed) == pytest.approx(graph.steps * found.kernels / 2, abs=graph.steps)
    assert 0.05 * span_of(graph) < gone / MICRO < 0.5 * span_of(graph)
    assert step_of(graph, text) == pytest.approx((span_of(graph) - gone / MICRO) / graph.steps, rel=0.01)


# -- texts ------------------------------------------------------------------------------------------------------------


def test_a_number_of_kernels_follows_the_time():
    first, second = parse_scenario("softmax/reduction=3.1ms/48, matmul = 2 us / 7").settings
    assert (first.name, first.seconds, first.kernels) == ("softmax/reduction", pytest.approx(3.1e-3), 48)
    assert (second.name, second.seconds, second.kernels) == ("matmul", pytest.approx(2e-6), 7)


@pytest.mark.parametrize("value", ["3ms/0", "3ms/", "3ms/x", "3ms/-1", "3ms/1.5", "3ms/1e3", "3ms/4/5", "3ms/99999999"])
def test_no_number_of_kernels(value):
    with pytest.raises(UserError, match=r"is not a number of kernels from 1 on, such as 3\.1ms/48"):
        parse_scenario(f"attention={value}")


def test_a_factor_has_no_number_of_kernels():
    with pytest.raises(UserError, match="a number of kernels belongs to a time, such as attention"):
        parse_scenario("attention=0.8/48")


@pytest.mark.parametrize(("text", "seconds"), [("75ms", 0.075), (" 1.5 s ", 1.5), ("2e2us", 2e-4)])
def test_a_time(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "75", "0ms", "-1ms", "nanms", "infs", "1e999s", "fast", "ms"])
def test_no_time(text):
    assert parse_time(text) is None
