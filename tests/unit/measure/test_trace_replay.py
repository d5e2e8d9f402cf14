"""Dependency graphs of traces: replays with known answers, critical paths, what-if scenarios. Times in microseconds."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.measure.readers.kernel_classes import GAP, HOST
from cs336_systems.measure.readers.nsys import read_nsys
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_replay import end_of, start_of
from cs336_systems.measure.readers.what_if import outcome, parse_scenario
from tests.helpers import ROOT, assert_refused
from tests.unit.measure.test_nsys import Recording

H200 = ROOT / "tests" / "golden" / "trace_h200.json.gz"
MAIN, AUTOGRAD, COMPUTE, SIDE = 1, 2, 7, 20
MICRO = 1e-6
GEMM, FLASH, NCCL, ADAM, POINTWISE = "sgemm_nn", "flash_fwd", "ncclDevKernel_AllReduce", "adam", "elementwise_kernel"


class Script:
    """A trace of torch.profiler with host calls, kernels on streams, and synchronisation."""

    def __init__(self):
        self.events = []
        self.numbers = itertools.count(1)

    def event(self, category, name, start, duration, thread, process=1, **arguments):
        times = {"ts": start, "dur": duration, "pid": process, "tid": thread}
        self.events.append({"ph": "X", "cat": category, "name": name, **times, "args": arguments})

    def call(self, name, start, duration=1, *, thread=MAIN):
        """Add a call of the host and return its correlation id."""
        number = next(self.numbers)
        self.event("cuda_runtime", name, start, duration, thread, correlation=number)
        return number

    def kernel(self, name, start, duration, *, launch=None, stream=COMPUTE, thread=MAIN, number=None, took=1):
        """Add a kernel, and its launch at the time `launch`; return the correlation id."""
        if launch is not None:
            number = self.call("cudaLaunchKernel", launch, took, thread=thread)
        arguments = {} if number is None else {"correlation": number}
        self.event("kernel", name, start, duration, stream, process=0, stream=stream, **arguments)
        return number

    def wait(self, call, record, *, stream, source):
        """Add what the profiler records of a stream that waits for an event."""
        link = {"wait_on_stream": source, "wait_on_cuda_event_record_corr_id": record}
        self.event("cuda_sync", "Stream Wait Event", 0, 0, stream, 0, correlation=call, stream=stream, **link)

    def write(self, folder):
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return path

    def graph(self, folder):
        return graph_of(read_chrome(self.write(folder)))


@pytest.fixture
def script():
    return Script()


def step_of(graph, text):
    """Return the predicted step of a scenario in microseconds."""
    return outcome(graph, graph.replay(), parse_scenario(text)).step / MICRO


def span_of(graph):
    return graph.replay().span / MICRO


def path_of(graph):
    """Return the microseconds of the critical path by kind."""
    found = Counter()
    for stretch in graph.replay().critical_path():
        found[stretch.kind] += stretch.seconds / MICRO
    return dict(found)


def assert_replays(graph):
    """With the recorded durations all times are the recorded ones, and the critical path covers the span."""
    replay = graph.replay()
    for number, node in enumerate(graph.nodes):
        assert replay.times[start_of(number)] == pytest.approx(node.start, abs=1e-12)
        assert replay.times[end_of(number)] == pytest.approx(node.end, abs=1e-12)
    assert sum(stretch.seconds for stretch in replay.critical_path()) == pytest.approx(replay.span, abs=1e-12)


# -- synthetic traces -------------------------------------------------------------------------------------------------


def test_a_host_bound_trace_gains_by_the_host_alone(script, tmp_path):
    """Launches every 10 us, kernels of 2 us that start 4 us after their launch."""
    for n in range(10):
        script.kernel(GEMM, 10 * n + 4, 2, launch=10 * n)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(96)
    assert step_of(graph, "matmul=0.5") == pytest.approx(95)
    assert step_of(graph, "host=0.5") == pytest.approx(51)
    assert path_of(graph) == pytest.approx({HOST: 90, GAP: 4, "matmul": 2})


def test_a_late_start_after_a_launch_does_not_count_behind_other_kernels(tmp_path):
    """The fourth kernel starts 30 us after its launch instead of 4. Four kernels of 20 us behind each other do not wait
    for it; one that starts 90 us late has another reason, and keeps its delay."""
    for late, hidden in ((30, True), (94, False)):
        own = Script()
        for n in range(4):
            own.kernel(GEMM, 50 * n + (late if n == 3 else 4), 20, launch=50 * n)
        (tmp_path / str(late)).mkdir()
        graph = own.graph(tmp_path / str(late))
        assert_replays(graph)
        assert step_of(graph, "host=0.5") == pytest.approx(75 + late + 20)
        queued = 4 + 4 * 20 + 3 * 0.55
        assert step_of(graph, "host=0") == pytest.approx(queued if hidden else queued + 90)


def gpu_bound(script):
    """Six kernels of 100 us, queued within 12 us, 1 us apart, and a synchronisation that returns 5 us after them."""
    for n in range(6):
        script.kernel(FLASH if n % 2 else GEMM, 10 + 101 * n, 100, launch=2 * n)
    script.call("cudaDeviceSynchronize", 20, 600)
    script.call("cudaEventQuery", 630)
    return script


def test_a_gpu_bound_trace_gains_by_its_kernels(script, tmp_path):
    graph = gpu_bound(script).graph(tmp_path)
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(631)
    assert step_of(graph, "attention=0.8") == pytest.approx(631 - 60)
    assert step_of(graph, "attention=0.8,matmul=2") == pytest.approx(631 - 60 + 300)
    assert path_of(graph) == pytest.approx({GAP: 15, "matmul": 300, "attention": 300, HOST: 16})


def test_a_gpu_that_becomes_fast_enough_leaves_the_host(script, tmp_path):
    """The launches take 11 us, the call of the synchronisation is made at 20 us."""
    graph = gpu_bound(script).graph(tmp_path)
    assert step_of(graph, "attention=0.001,matmul=0.001") < 60 + 11
    assert step_of(graph, "attention=0,matmul=0,host=0") < 20


def test_a_removed_kernel_takes_its_gap_along(script, tmp_path):
    graph = gpu_bound(script).graph(tmp_path)
    assert step_of(graph, "attention=0") == pytest.approx(631 - 3 * 101)


def test_a_time_is_that_of_one_step_with_the_gaps_inside(script, tmp_path):
    """Two steps; in each of them two flash kernels follow one another, 1 us apart, after a matmul."""
    for at in (0, 1000):
        script.event("user_annotation", "forward", at, 900, MAIN)
        for n, name in enumerate((GEMM, FLASH, FLASH)):
            script.kernel(name, at + 10 + 101 * n, 100, launch=at + 1 + 2 * n)
        script.call("cudaDeviceSynchronize", at + 20, 300)
    graph = script.graph(tmp_path)
    assert graph.steps == 2
    assert span_of(graph) == pytest.approx(1900)
    found = outcome(graph, graph.replay(), parse_scenario("attention=50us"))
    assert (found.selected / MICRO, found.changed / MICRO) == (pytest.approx(200), pytest.approx(50))
    assert found.step / MICRO == pytest.approx((1900 - 2 * 151) / 2)


def two_streams(script, *, records_events):
    """A collective on a second stream waits for the first kernel; the last kernel waits for the collective."""
    script.kernel(GEMM, 10, 100, launch=0)
    record = script.call("cudaEventRecord", 2)
    wait = script.call("cudaStreamWaitEvent", 4)
    script.kernel(NCCL, 112, 200, launch=6, stream=SIDE)
    back = script.call("cudaEventRecord", 8)
    script.kernel(POINTWISE, 111, 50, launch=10)
    wait_back = script.call("cudaStreamWaitEvent", 12)
    script.kernel(ADAM, 314, 30, launch=14)
    script.call("cudaDeviceSynchronize", 20, 330)
    if records_events:
        script.wait(wait, record, stream=SIDE, source=COMPUTE)
        script.wait(wait_back, back, stream=COMPUTE, source=SIDE)
    return script


@pytest.mark.parametrize("records_events", [True, False], ids=["recorded", "inferred from the times"])
def test_streams_that_wait_for_one_another(records_events, script, tmp_path):
    graph = two_streams(script, records_events=records_events).graph(tmp_path)
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(350)
    assert step_of(graph, "matmul=0.5") == pytest.approx(300)
    assert step_of(graph, "communication=0.5") == pytest.approx(250)
    assert step_of(graph, "elementwise=0") == pytest.approx(350)
    on_path = path_of(graph)
    assert "elementwise" not in on_path
    assert on_path["communication"] == pytest.approx(200)


def test_a_wait_that_was_over_binds_when_the_other_stream_is_slower(script, tmp_path):
    """Only a trace with recorded events knows it: the collective had ended before the kernel could start."""
    script.kernel(NCCL, 10, 20, launch=0, stream=SIDE)
    record = script.call("cudaEventRecord", 2)
    script.kernel(GEMM, 14, 100, launch=4)
    wait = script.call("cudaStreamWaitEvent", 6)
    script.kernel(ADAM, 115, 30, launch=8)
    script.wait(wait, record, stream=COMPUTE, source=SIDE)
    graph = script.graph(tmp_path)
    assert span_of(graph) == pytest.approx(145)
    assert step_of(graph, "communication=10") == pytest.approx(10 + 200 + 2 + 30, abs=2)


def test_kernels_of_a_cuda_graph_keep_their_gaps(script, tmp_path):
    """All carry the id of one launch. A branch on another stream begins after the first kernel; the next launch waits
    for both branches."""
    number = script.call("cudaGraphLaunch", 0, 10)
    script.kernel(GEMM, 20, 100, number=number)
    script.kernel(POINTWISE, 123, 10, number=number)
    script.kernel(FLASH, 125, 300, number=number, stream=SIDE)
    script.kernel(ADAM, 427, 20, launch=12)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(447)
    assert step_of(graph, "matmul=0.5") == pytest.approx(397)
    assert step_of(graph, "attention=0.5") == pytest.approx(297)
    assert step_of(graph, "elementwise=10") == pytest.approx(447)
    assert step_of(graph, "host=0") == pytest.approx(447, abs=12)


def test_branches_of_a_cuda_graph_that_join_inside_it(script, tmp_path):
    """The last kernel follows a short one on its stream, and waits for the other branch."""
    number = script.call("cudaGraphLaunch", 0, 10)
    script.kernel(GEMM, 20, 100, number=number)
    script.kernel(POINTWISE, 121, 10, number=number)
    script.kernel(FLASH, 122, 300, number=number, stream=SIDE)
    script.kernel(ADAM, 424, 20, number=number)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "attention=0.5") == pytest.approx(444 - 150)
    assert step_of(graph, "elementwise=2") == pytest.approx(444)


def test_two_processes_do_not_wait_for_one_another(script, tmp_path):
    """Two ranks in one trace; the synchronisation of the first returns right after a kernel of the second has ended."""
    script.kernel(GEMM, 10, 100, launch=0)
    script.call("cudaDeviceSynchronize", 2, 112)
    script.event("cuda_runtime", "cudaLaunchKernel", 0, 1, 50, process=2, correlation=99)
    script.event("kernel", FLASH, 10, 103, COMPUTE, process=9, correlation=99)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "attention=0.5,matmul=0.5") == pytest.approx(114 - 50)


def test_a_launch_into_a_full_queue_waits_for_the_gpu(script, tmp_path):
    """From the fifth on a launch returns when a kernel has ended; the host is then always 100 us behind."""
    for n in range(40):
        at = 2 * n if n < 5 else 101 * (n - 4)
        script.kernel(GEMM, 10 + 101 * n, 100, launch=at, took=1 if n < 5 else 99)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "matmul=0.5") == pytest.approx(span_of(graph) - 40 * 50, rel=0.02)


def test_the_host_waits_for_the_thread_of_backward(script, tmp_path):
    """The optimizer is launched 10 us after the last launch of the other thread, which waits for the GPU."""
    script.kernel(GEMM, 5, 10, launch=0)
    script.kernel(GEMM, 25, 100, launch=20, thread=AUTOGRAD)
    script.call("cudaStreamSynchronize", 30, 100, thread=AUTOGRAD)
    script.kernel(ADAM, 145, 10, launch=140)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "matmul=0.5") == pytest.approx(155 - 50)


def test_a_thread_that_launches_nothing_does_not_hold_the_end(script, tmp_path):
    """NCCL's watchdog polls events for as long as the trace lasts."""
    gpu_bound(script)
    for n in range(300):
        script.call("cudaEventQuery", 2.5 * n, thread=99)
    assert step_of(script.graph(tmp_path), "attention=0.8") == pytest.approx(631 - 60)


def test_a_kernel_that_starts_before_the_one_before_it_has_ended(script, tmp_path):
    """Programmatic dependent launch: the second kernel starts 5 us early."""
    script.kernel(GEMM, 10, 100, launch=0)
    script.kernel(FLASH, 105, 50, launch=2)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "matmul=0.5") == pytest.approx(155 - 50)
    assert step_of(graph, "matmul=0.01") == pytest.approx(12 + 50)


def test_steps_of_a_profiler_schedule(script, tmp_path):
    """Work from before the first step delays it: the step begins when the GPU has finished that."""
    script.kernel(POINTWISE, 0, 100, launch=-10)
    for n in range(3):
        script.event("user_annotation", f"ProfilerStep#{n}", 100 * n, 100, MAIN)
        script.kernel(GEMM, 101 + 100 * n, 99, launch=100 * n + 5)
    graph = script.graph(tmp_path)
    assert graph.steps == 3
    assert span_of(graph) == pytest.approx(300)
    assert step_of(graph, "matmul=0.5") < 100


def test_operators_of_a_cpu_are_replayed_without_their_nested_ones(script, tmp_path):
    """A softmax of 100 us inside of attention that takes 300 us itself, then 50 us of Python."""
    script.event("cpu_op", "aten::scaled_dot_product_attention", 0, 400, MAIN)
    script.event("cpu_op", "aten::_softmax", 150, 100, MAIN)
    script.event("cpu_op", "aten::mm", 450, 50, MAIN)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(500)
    assert step_of(graph, "attention=0.5") == pytest.approx(350)
    assert step_of(graph, "aten::_soft*=0") == pytest.approx(400)
    assert step_of(graph, "host=0") == pytest.approx(450)
    kinds = {"attention": 300, "softmax/reduction": 100, HOST: 50, "matmul": 50}
    assert path_of(graph) == pytest.approx(kinds)


def test_operators_that_touch_follow_one_another(script, tmp_path):
    """In floats, the first part of an operator ends 7e-18 s after the start of the operator nested in it."""
    script.event("cpu_op", "aten::add", 0, 1, MAIN)
    script.event("cpu_op", "aten::bmm", 4236, 40000, MAIN)
    script.event("cpu_op", "aten::select", 43228, 8, MAIN)
    trace = read_chrome(script.write(tmp_path))
    _, bmm, select, _ = trace.pieces
    assert bmm.end > select.start
    graph = graph_of(trace)
    assert_replays(graph)
    assert step_of(graph, "matmul=0.5") == pytest.approx(span_of(graph) - 39992 / 2)


# -- any trace --------------------------------------------------------------------------------------------------------

TIMES = st.integers(0, 60)
KERNELS = st.tuples(TIMES, st.integers(0, 30), TIMES, st.sampled_from([COMPUTE, SIDE]), st.booleans())
CALLS = st.tuples(
    st.sampled_from(["cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaGraphLaunch"]),
    TIMES,
    st.integers(0, 90),
    st.sampled_from([MAIN, AUTOGRAD]),
)


@settings(max_examples=150, deadline=None)
@given(kernels=st.lists(KERNELS, min_size=1, max_size=12), calls=st.lists(CALLS, max_size=6), data=st.data())
def test_any_trace_replays_as_recorded_and_never_gains_by_slower_kernels(kernels, calls, data, tmp_path_factory):
    """Also impossible traces: kernels before their launches, waits for events of the future."""
    script = Script()
    numbers = [script.call(name, at, took, thread=thread) for name, at, took, thread in calls]
    for start, took, launch, stream, is_known in kernels:
        number = script.kernel(GEMM, start, took, launch=launch if is_known else None, stream=stream)
        if number is None and numbers:
            script.events[-1]["args"]["correlation"] = data.draw(st.sampled_from(numbers))
    for call, record in data.draw(st.lists(st.tuples(*[st.sampled_from([*numbers, 0])] * 2), max_size=3)):
        script.wait(call, record, stream=SIDE, source=COMPUTE)
    graph = script.graph(tmp_path_factory.mktemp("any"))
    assert_replays(graph)
    faster, same, slower = (step_of(graph, f"matmul={factor}") for factor in (0.5, 1, 2))
    assert same == pytest.approx(span_of(graph))
    assert faster <= same + 1e-6 <= slower + 2e-6


def test_links_that_lead_back_in_time_are_left_out(script, tmp_path):
    """Two streams that each wait for the other's later kernel would be a cycle."""
    script.kernel(GEMM, 10, 50, launch=0)
    first = script.call("cudaStreamWaitEvent", 1)
    script.kernel(GEMM, 20, 50, launch=2, stream=SIDE)
    second = script.call("cudaEventRecord", 3)
    script.kernel(GEMM, 70, 50, launch=4)
    script.wait(first, second, stream=COMPUTE, source=SIDE)
    script.wait(second, first, stream=SIDE, source=COMPUTE)
    assert_replays(script.graph(tmp_path))


def test_kernels_without_correlation_ids_follow_one_another(script, tmp_path):
    script.kernel(GEMM, 0, 100)
    script.kernel(FLASH, 110, 100)
    script.kernel(NCCL, 215, 100, stream=SIDE)
    graph = script.graph(tmp_path)
    assert_replays(graph)
    assert step_of(graph, "matmul=0.5") == pytest.approx(315 - 50)
    assert step_of(graph, "attention=0.5") == pytest.approx(315 - 50)


# -- an H200's trace, and nsys ----------------------------------------------------------------------------------------


def test_the_trace_of_an_h200_replays_exactly():
    """A tiny model under a profiler, so the host takes all of the step and its kernels none of it."""
    trace = read_chrome(H200)
    graph = graph_of(trace)
    assert_replays(graph)
    first, last = trace.phases[0], trace.phases[-1]
    assert graph.replay().span == pytest.approx(last.end - first.start)
    assert len(graph.measured_kernels) == len(trace.kernels)
    assert set(path_of(graph)) == {HOST}
    assert step_of(graph, "matmul=0.1") == pytest.approx(span_of(graph))
    assert step_of(graph, "host=0.5") == pytest.approx(span_of(graph) / 2, rel=0.02)


PLACE = "globalPid, deviceId, streamId, correlationId, eventId"
NSYS_TABLES = (
    f"CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION ({PLACE}, syncType)",
    f"CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT ({PLACE})",
)


def test_events_of_nsys(tmp_path):
    """The kernel on the second stream waits for the event that was recorded after the first kernel, not for the one
    that was recorded later."""
    recording = Recording(tmp_path / "nsys.sqlite")
    for statement in NSYS_TABLES:
        recording.database.execute(statement)

    def kernel(name, launch, ran, stream):
        recording.kernel(name, launch, ran)
        last = "WHERE correlationId = (SELECT MAX(correlationId) FROM CUPTI_ACTIVITY_KIND_KERNEL)"
        recording.database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = {stream} {last}")

    def call(at, table, stream, *more):
        made = recording.launch(at)
        row = (made["globalPid"], 0, stream, made["correlationId"], 3, *more)
        recording.database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({', '.join('?' * len(row))})", row)

    kernel("gemm", 1, (10, 110), COMPUTE)
    call(3, "CUDA_EVENT", COMPUTE)
    kernel("elementwise_kernel", 5, (111, 400), COMPUTE)
    call(7, "SYNCHRONIZATION", SIDE, 2)
    kernel("flash_fwd", 9, (112, 612), SIDE)
    call(11, "CUDA_EVENT", COMPUTE)
    graph = graph_of(read_nsys(recording.close()))
    assert_replays(graph)
    assert span_of(graph) == pytest.approx(611)
    assert step_of(graph, "matmul=0.5") == pytest.approx(561)
    assert step_of(graph, "elementwise=0.5") == pytest.approx(611)


# -- scenarios --------------------------------------------------------------------------------------------------------


@pytest.fixture
def graph(script, tmp_path):
    """One step of 20 + 3 x 101 us: a matmul in forward, attention by name and by part, an elementwise optimizer."""
    for name, start, end in (("forward", 0, 8), ("backward", 8, 12), ("optimizer", 12, 400)):
        script.event("user_annotation", name, start, end - start, MAIN)
    script.event("user_annotation", "attention softmax", 3, 3, MAIN)
    for n, (name, launch) in enumerate(((GEMM, 1), ("cunn_SoftMaxForward", 4), (FLASH, 9), (POINTWISE, 13))):
        script.kernel(name, 20 + 101 * n, 100, launch=launch)
    script.call("cudaDeviceSynchronize", 30, 394)
    return script.graph(tmp_path)


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("matmul=2", 100),
        ("attention=2", 200),
        ("attention softmax=2", 100),
        ("softmax/reduction=2", 100),
        ("optimizer=2", 100),
        ("forward=2", 200),
        ("*=2", 400),
        ("flash_*=2", 100),
        ("matmul+flash_*=2", 200),
        ("matmul + communication=2", 100),
        ("s?emm_nn=2 , flash_fwd = 2", 200),
        ("matmul=2,*=1", 400),
        ("host=2", 0),
    ],
)
def test_what_a_name_selects(text, selected, graph):
    assert outcome(graph, graph.replay(), parse_scenario(text)).selected / MICRO == pytest.approx(selected)


def test_the_first_setting_of_a_kernel_counts(graph):
    assert step_of(graph, "matmul=2,*=1") == pytest.approx(step_of(graph, "matmul=2"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("matmul=1.5ms", 1.5e-3), ("matmul=20us", 2e-5), ("matmul=1e-3 s", 1e-3), ("matmul=0ms", 0)]
)
def test_times_have_units(text, seconds):
    (setting,) = parse_scenario(text).settings
    assert (setting.factor, setting.seconds) == (None, pytest.approx(seconds))


BAD_VALUES = ("", "-1", "nan", "inf", "1e999", "fast", "5kg", "-1ms", "1ms2", "0x10", "nanms")


@pytest.mark.parametrize(
    "text", ["", ",", "attention", "=0.5", "host=3ms", *(f"attention={value}" for value in BAD_VALUES)]
)
def test_a_scenario_that_cannot_be_read(text):
    with pytest.raises(UserError) as caught:
        parse_scenario(text)
    assert "--what_if" in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones(graph):
    with pytest.raises(
        UserError, match=r"'atention'.*did you mean 'attention'.*matmul, attention.*forward, loss.*host"
    ):
        step_of(graph, "atention=0.5")


@pytest.mark.parametrize("name", ["communication", "matmul+nope_*", "matmul+", "host+matmul"])
def test_names_without_kernels(name, graph):
    with pytest.raises(UserError, match="the trace has no such kernel"):
        step_of(graph, f"{name}=0.5")


# -- the power limit --------------------------------------------------------------------------------------------------


def at_limit(graph, text):
    return outcome(graph, graph.replay(), parse_scenario(text)).at_limit / MICRO


def test_at_equal_power_faster_arithmetic_gains_nothing_and_less_memory_traffic_less(script, tmp_path):
    for n, name in enumerate((GEMM, FLASH, POINTWISE, GEMM)):
        script.kernel(name, 5 + 100 * n, 100, launch=n)
    graph = script.graph(tmp_path)
    recorded = span_of(graph)
    assert at_limit(graph, "matmul=1") == pytest.approx(recorded)
    assert at_limit(graph, "attention=0.75") == pytest.approx(recorded, rel=0.01)
    assert step_of(graph, "elementwise=0.5") < at_limit(graph, "elementwise=0.5") < recorded
    assert at_limit(graph, "attention=0") < step_of(graph, "attention=0")


def test_a_measured_switch_lies_between_both_times(script, tmp_path):
    """Attention of 32.4 ms became 24.3 ms; the step of an H200 at its power limit fell from 251.5 to 250.6 ms."""
    start = 10
    for n, (name, took) in enumerate(((GEMM, 190_000), (POINTWISE, 29_100), (FLASH, 32_400))):
        script.kernel(name, start, took, launch=n)
        start += took
    graph = script.graph(tmp_path)
    assert step_of(graph, "attention=24.3ms") < 250_600 < at_limit(graph, "attention=24.3ms")


# -- the command ------------------------------------------------------------------------------------------------------


def test_inspect_prints_the_critical_path_and_each_scenario(script, tmp_path, capsys):
    path = gpu_bound(script).write(tmp_path)
    flags = ["--critical_path", "--what-if", "attention=0.8", "--what_if", "matmul=0.1ms,host=2", "--power_limited"]
    assert main(["inspect", str(path), *flags, "--format", "csv"]) == 0
    by_kind, longest, what_if = capsys.readouterr().out.strip().split("\n\n")
    assert "matmul,47.5%,0.300,0.300" in by_kind
    assert f"47.5%,0.300,3,attention,{FLASH}" in longest
    header, recorded, scaled, both = what_if.split("\n")
    assert "0.631" in recorded
    assert scaled.startswith("attention=0.8,0.300,0.240,0.571,-0.060,-9.51%,")
    assert both.startswith('"matmul=0.1ms,host=2",')
    assert header.count(",") == scaled.count(",")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--what_if", "attention=-2"], ["'attention=-2'", "-2"]),
        (["--what_if", "nope=2"], ["'nope'", "matmul"]),
        (["--what_if", ""], ["--what_if"]),
        (["--power_limited"], ["--power_limited", "--what_if"]),
    ],
)
def test_mistakes_in_the_flags(flags, named, script, elsewhere, capsys):
    assert_refused(["inspect", str(gpu_bound(script).write(elsewhere)), *flags], named, capsys)


def test_a_snapshot_and_a_trace_without_a_gpu_have_no_such_answer(script, elsewhere, capsys):
    (elsewhere / "s.pickle").write_bytes(b"")
    assert_refused(["inspect", str(elsewhere / "s.pickle"), "--critical_path"], ["s.pickle", "trace"], capsys)
    script.event("cpu_op", "aten::mm", 0, 5, MAIN)
    path = str(script.write(elsewhere))
    assert_refused(["inspect", path, "--what_if", "matmul=2", "--power_limited"], [path, "GPU"], capsys)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda script: script.events.clear(), "holds no kernels"),
        (lambda script: script.kernel(GEMM, 5, -3, launch=1), "that lasts -3"),
    ],
    ids=["empty", "negative duration"],
)
def test_traces_that_cannot_be_replayed(change, named, script, elsewhere, capsys):
    change(gpu_bound(script))
    assert_refused(["inspect", str(script.write(elsewhere)), "--critical_path"], ["trace.json", named], capsys)
