"""The runner: records it writes, cells it does not run again, failures it survives.

`Scripted` of scripted_worker.py stands in for the worker process wherever no real measurement is needed.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336_systems import record
from cs336_systems.commands import flags_named
from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments import worker
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.experiments.runner import SLOWDOWN, Runner, gather
from cs336_systems.measure.environment import measure_slowdown
from cs336_systems.predict.memory_planner import NotEnoughMemoryError
from cs336_systems.record import CELL_TIME
from tests.helpers import CPU_ONLY, MODEL, TINY, running, tiny_config, wait_until
from tests.unit.experiments.scripted_worker import MACHINE, measured, run

pytestmark = [pytest.mark.usefixtures("elsewhere"), pytest.mark.xdist_group("ranks")]


def raw(path) -> list[dict]:
    """Every line of the file, also those that later ones replace."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def ends(path) -> dict[int, str]:
    """The status that counts of each cell, by context length."""
    return {r.config["model"]["context_length"]: r.status for r in record.load(path).records if r.metric == CELL_TIME}


# -- one cell, for real -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_experiments(tmp_path_factory, forked_python):
    """A file with one cell that two experiments asked for in one run."""
    path = tmp_path_factory.mktemp("measured") / "records.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(forked_python))
        for name, value in CPU_ONLY.items():
            patch.setenv(name, value)
        outcome = run(path, ("end_to_end", tiny_config()), ("precision", tiny_config()))
    return path, outcome


def test_a_cell_gives_complete_records(two_experiments):
    path, outcome = two_experiments
    loaded = record.load(path)
    assert loaded.remarks == []
    records = {r.metric: r for r in loaded.records if r.experiment == "end_to_end"}
    assert {"step_time", "forward_time", "backward_time", "optimizer_time", "flops", "parameters"} <= records.keys()
    assert {"peak_memory", "predicted_memory"} <= records.keys()
    assert list(records)[-1] == CELL_TIME
    assert all(r.ok and r.config == tiny_config() for r in records.values())
    assert len(records["step_time"].samples) == 2
    assert len(records["warmup_time"].samples) == 5
    assert all(sample > 0 for sample in records["step_time"].samples)
    assert records[CELL_TIME].numbers[0] >= sum(records["step_time"].numbers)
    environment = records["step_time"].environment
    assert all((environment.torch, environment.cpu, environment.python, environment.utc, environment.memory))
    assert outcome.environment.machine == environment.machine == environment.cpu


def test_a_cell_of_two_experiments_is_measured_once_and_recorded_under_both(two_experiments):
    path, outcome = two_experiments
    assert (outcome.done, outcome.reused, outcome.failed) == (1, 0, 0)
    first, second = (
        {line["metric"]: line["samples"] for line in raw(path) if line["experiment"] == name}
        for name in ("end_to_end", "precision")
    )
    assert first == second
    assert len(raw(path)) == 2 * len(first)


# -- requests to the worker, and records ------------------------------------------------------------------------------


def test_a_request_names_the_function_that_measures(tmp_path, scripted):
    run(tmp_path / "r.jsonl", ("bench", tiny_config()), peak_tflops=3.0)
    [request] = scripted.asked
    instrument = catalogue()["bench"].instrument
    assert request == {"measure": instrument.measure, "config": tiny_config(), "options": {"peak_tflops": 3.0}}


def test_environment_variables_of_an_instrument_reach_a_process_of_its_own(tmp_path, scripted, monkeypatch):
    instrument = dataclasses.replace(catalogue()["end_to_end"].instrument, environment={"A": "b"})
    started = []
    monkeypatch.setattr(scripted, "ask", lambda self, *_: started.append((self, self.variables)) or measured(0.1))
    with Runner(tmp_path / "records.jsonl", quiet=True) as runner:
        cells = gather([("end_to_end", tiny_config()), ("end_to_end", tiny_config(batch_size=2))])
        for cell, chosen in zip(cells, (instrument, catalogue()["end_to_end"].instrument), strict=True):
            cell.instrument = chosen
        runner.run(cells)
    assert [variables for _, variables in started] == [{"A": "b"}, {}]
    assert started[0][0] is not started[1][0]


def test_resume_runs_nothing_again_unless_forced(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    run(path, ("bench", tiny_config()))
    before = path.read_bytes()
    outcome = run(path, ("bench", tiny_config()))
    assert (outcome.done, outcome.reused) == (0, 1)
    assert path.read_bytes() == before
    outcome = run(path, ("bench", tiny_config()), force=True)
    assert (outcome.done, outcome.reused) == (1, 0)
    assert path.read_bytes().startswith(before)
    assert len(raw(path)) == 2 * before.count(b"\n")
    assert [(r.variant, r.samples) for r in record.load(path).records] == [("", (2, 2)), ("rival", (7.0,)), ("", (2,))]


def test_a_later_experiment_gets_copies_without_measuring(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    run(path, ("end_to_end", tiny_config()))
    before = path.read_bytes()
    renamed = {**tiny_config(), "size": "another name of the same work"}
    for _ in range(2):  # and the second time there is nothing left to copy
        outcome = run(path, ("peak_memory", renamed))
        assert (outcome.done, outcome.reused) == (0, 1)
    assert len(scripted.asked) == 1
    assert path.read_bytes().startswith(before)
    copies = [r for r in record.load(path).records if r.experiment == "peak_memory"]
    assert [(r.metric, r.samples) for r in copies] == [("step_time", (1, 1)), ("step_time", (7.0,)), (CELL_TIME, (1,))]
    assert all(r.config == renamed and r.environment == MACHINE for r in copies)
    assert len(raw(path)) == 2 * len(copies)


def test_a_cell_that_cannot_fit_is_not_tried(tmp_path, scripted):
    """Predicted by the memory model. A real worker would exhaust the machine if this broke."""
    path = tmp_path / "r.jsonl"
    config = RunConfig(model=model_config("2.7B"), size="2.7B", batch_size=64).to_dict()
    outcome = run(path, ("bench", config), ("bench", tiny_config()))
    assert [request["config"] for request in scripted.asked] == [tiny_config()]
    assert (outcome.done, outcome.failed) == (2, 1)
    row = next(item for item in record.load(path).records if item.config == config)
    assert (row.metric, row.samples, row.environment) == (CELL_TIME, (), MACHINE)
    assert re.fullmatch(r"oom: needs [\d,]{3,}\.\d GiB of 16\.0 GiB \(predicted, not tried\)", row.status)
    assert run(path, ("bench", config)).reused == 1


@pytest.mark.parametrize("skip_slow", [True, False], ids=["quick run", "other runs"])
def test_a_quick_run_leaves_out_precisions_that_the_cpu_emulates(skip_slow, tmp_path, scripted):
    path, low, plain = tmp_path / "r.jsonl", tiny_config(precision="bf16"), tiny_config()

    def answer(request):
        if request["measure"] == SLOWDOWN:
            return {"event": "measured", "metrics": [["bf16", "1", [180.0], ""], ["fp16", "1", [2.0], ""]]}
        return measured(0.5)

    scripted.answer = staticmethod(answer)
    half = tiny_config(precision="fp16")
    run(path, ("bench", low), ("bench", plain), ("bench", half), skip_slow=skip_slow)
    statuses = {item.config["precision"]: item.status for item in record.load(path).records if item.metric == CELL_TIME}
    reason = "skipped: a bf16 matmul takes 180x as long as in fp32 on this CPU"
    assert statuses == {"bf16": reason if skip_slow else "ok", "fp32": "ok", "fp16": "ok"}


def test_how_much_slower_low_precision_is():
    assert {metric.name: metric.samples[0] > 0 for metric in measure_slowdown({})} == {"bf16": True, "fp16": True}


def test_failures_are_tried_again_and_cells_that_ran_out_of_memory_are_not(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    statuses = {8: "oom", 9: "error: crashed (SIGSEGV)", 10: "error: timeout after 1 s"}
    requests = [("bench", tiny_config(context)) for context in statuses]
    scripted.answer = staticmethod(
        lambda request: {"event": "failure", "status": statuses[request["config"]["model"]["context_length"]]}
    )
    assert run(path, *requests).failed == 3
    assert ends(path)[8].startswith("oom: needs ")
    scripted.answer = staticmethod(lambda request: measured(1))
    outcome = run(path, *requests)
    assert (outcome.done, outcome.reused, outcome.failed) == (2, 1, 0)
    assert {context: status.split(":")[0] for context, status in ends(path).items()} == {8: "oom", 9: "ok", 10: "ok"}


def test_an_error_under_one_experiment_is_replaced_when_another_measured_the_cell(tmp_path, scripted):
    """Both failed, one was run again alone: the other must not show the error for ever."""
    path = tmp_path / "r.jsonl"
    scripted.answer = staticmethod(lambda request: {"event": "failure", "status": "error: crashed (SIGKILL)"})
    run(path, ("end_to_end", tiny_config()), ("precision", tiny_config()))
    scripted.answer = staticmethod(lambda request: measured(1))
    run(path, ("end_to_end", tiny_config()))
    run(path, ("precision", tiny_config()))
    assert {r.experiment: r.status for r in record.load(path).records} == {"end_to_end": "ok", "precision": "ok"}


def test_cells_are_on_disk_before_the_next_begins(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    seen = []

    def answer(request):
        seen.append(list(ends(path)) if path.exists() else [])
        return measured(1)

    scripted.answer = staticmethod(answer)
    run(path, *(("bench", tiny_config(context)) for context in (8, 9, 10)))
    assert seen == [[], [8], [8, 9]]


def test_a_file_of_another_machine_is_refused(tmp_path, scripted):
    """And the worker that reported the machine is stopped."""
    path = tmp_path / "r.jsonl"
    run(path, ("bench", tiny_config()))
    path.write_text(path.read_text().replace("a processor", "another processor"))
    before, stopped = path.read_bytes(), []
    scripted.stop = lambda self: stopped.append(self)
    with pytest.raises(UserError, match="another processor"):
        run(path, ("bench", tiny_config(9)))
    assert path.read_bytes() == before
    assert len(stopped) == 1


def test_a_second_run_on_the_same_file_is_refused(tmp_path, scripted):
    """Also in the first cell, when the locked file is still empty: the refused run must not delete it."""
    path = tmp_path / "r.jsonl"
    refused = []

    def answer(request):
        for _ in range(2):
            with pytest.raises(UserError, match="another run is writing") as refusal:
                run(path, ("bench", tiny_config(10)))
            refused.append(path.exists() and str(path) in str(refusal.value))
        return measured(1)

    scripted.answer = staticmethod(answer)
    run(path, ("bench", tiny_config(8)), ("bench", tiny_config(9)))
    assert refused == [True] * 4
    assert ends(path) == {8: "ok", 9: "ok"}


def test_cells_finished_by_another_run_in_the_meantime_are_not_run_again(tmp_path, scripted):
    """Two commands started together: the second waits for its worker while the first one ends."""
    path = tmp_path / "r.jsonl"
    late = Runner(path, quiet=True)
    run(path, ("bench", tiny_config()))
    with late:
        outcome = late.run(gather([("bench", tiny_config())]))
    assert (outcome.done, outcome.reused) == (0, 1)


def test_a_user_error_keeps_the_cells_before_it_and_makes_no_empty_file(tmp_path, scripted):
    def answer(request):
        bad = request["config"]["model"]["context_length"] == 9
        return {"event": "user_error", "message": "no such factory"} if bad else measured(1)

    scripted.answer = staticmethod(answer)
    for contexts, kept in (([9], False), ([8, 9], True)):
        path = tmp_path / "new" / "r.jsonl"
        with pytest.raises(UserError, match="no such factory"):
            run(path, *(("bench", tiny_config(context)) for context in contexts))
        assert path.exists() == path.parent.exists() == kept
    assert ends(path) == {8: "ok"}


def test_a_device_as_output_is_not_deleted(tmp_path, scripted):
    """A run as root with `--output /dev/null` must not unlink it; a link stands in for it here."""
    (tmp_path / "null").symlink_to(os.devnull)
    with contextlib.suppress(UserError):  # refusing it is as good
        run(tmp_path / "null", ("bench", tiny_config()))
    assert (tmp_path / "null").is_symlink()


# -- a file cut off anywhere ------------------------------------------------------------------------------------------


def test_a_torn_file_resumes_with_the_cells_before_the_tear(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    requests = [("bench", tiny_config(context)) for context in (8, 9, 10)]
    run(path, *requests)
    whole = path.read_bytes()
    for cut in [100, len(whole) - 1, *random.Random(0).sample(range(100, len(whole)), 12)]:
        path.write_bytes(whole[:cut])
        survivors = ends(path)
        outcome = run(path, *requests)
        assert (outcome.reused, outcome.done) == (len(survivors), 3 - len(survivors))
        assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, cut) + 1])
        assert ends(path) == {8: "ok", 9: "ok", 10: "ok"}


def test_a_tear_between_two_experiments_is_repaired_by_copying(tmp_path, scripted):
    """One write holds the cell under both names; the second is not measured again when only the first was written."""
    path = tmp_path / "r.jsonl"
    requests = [("end_to_end", tiny_config()), ("precision", tiny_config())]
    run(path, *requests)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    assert run(path, *requests).done == 0
    records = record.load(path).records
    assert Counter(r.experiment for r in records) == {"end_to_end": 3, "precision": 3}


# -- models that take their process down ------------------------------------------------------------------------------

FAULTY = (
    MODEL
    + """
import os, signal, time

working = build

def build(context_length, **fields):
    match context_length:
        case 9: raise MemoryError
        case 11: os.kill(os.getpid(), signal.SIGSEGV)
        case 12: time.sleep(600)
    return working(context_length=context_length, **fields)
"""
)


@pytest.fixture
def forked_worker(forked_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(forked_python))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_worker")
def test_crashes_are_rows_and_the_sweep_goes_on(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    path = tmp_path / "r.jsonl"
    outcome = run(path, *(("bench", tiny_config(context, model_factory="faulty:build")) for context in (9, 11, 8)))
    statuses = ends(path)
    assert statuses[9].startswith("oom")
    assert statuses[11].startswith("error: crashed (SIGSEGV)")
    assert statuses[8] == "ok"
    assert (outcome.done, outcome.failed) == (3, 2)
    rows = [r for r in record.load(path).records if not r.ok]
    assert [(r.metric, r.samples) for r in rows] == [(CELL_TIME, ())] * 2
    assert all(r.environment.torch for r in rows)


@pytest.mark.usefixtures("forked_worker")
def test_a_cell_that_takes_too_long_is_given_up(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with Runner(tmp_path / "r.jsonl", quiet=True, timeout=1) as runner:
        process = runner.worker.process
        runner.run(gather([("bench", tiny_config(12, model_factory="faulty:build"))]))
        assert process.returncode == -signal.SIGKILL
    assert ends(tmp_path / "r.jsonl") == {12: "error: timeout after 1 s"}


@pytest.mark.parametrize(("budget", "event"), [("auto", "failure"), ("1GiB", "user_error")])
def test_a_gpu_without_a_plan_is_out_of_memory_and_a_budget_without_one_is_a_mistake(monkeypatch, budget, event):
    def measure(config):
        raise NotEnoughMemoryError("too small")

    monkeypatch.setitem(sys.modules, "measuring", SimpleNamespace(measure=measure))
    request = {"measure": "measuring:measure", "config": {"memory_budget": budget}, "options": {}}
    answer = worker._answer(request)
    assert answer["event"] == event
    assert answer.get("status") == ("oom" if budget == "auto" else None)


def test_a_mistake_found_by_the_worker_names_flags(tmp_path, scripted):
    request = {"measure": "cs336_systems.config:model_config", "config": "nope", "options": {}}
    answer = json.loads(json.dumps(worker._answer(request)))
    scripted.answer = staticmethod(lambda request: answer)
    with pytest.raises(UserError, match=r"^unknown size 'nope'") as caught:
        run(tmp_path / "r.jsonl", ("bench", tiny_config()))
    assert flags_named(caught.value).startswith("unknown --size 'nope'")


# -- runs that are stopped --------------------------------------------------------------------------------------------

CELLS = 8
SWEEP = ["bench", *TINY, "--num_steps", "100", "--context_lengths", "8,16"]
SWEEP = [word for word, before in zip(SWEEP, ["", *SWEEP], strict=False) if "--context_length" not in (word, before)]
SWEEP += ["--modes", "forward,train-step", "--precisions", "fp32,bf16", "--output", "r.jsonl"]
START, FIRST_CELL = "", "(took "
"""Texts on standard error: nothing when a run starts, `[1/8] ...` when its first cell has ended."""
LONG = 120
"""Seconds to wait on a busy machine; nothing is expected to take so long."""
COMMAND = "import sys; sys.executable = sys.argv.pop(1); from cs336_systems.__main__ import main; sys.exit(main())"
"""A program that runs `cs336` and starts its workers by another interpreter."""


@pytest.fixture
def sweep(forked_python) -> list[str]:
    """A command of 8 cells. It is a process of its own; its worker is forked from a process that has torch."""
    return [sys.executable, "-c", COMMAND, str(forked_python), *SWEEP]


def finished(path) -> dict[tuple[str, str], list[record.Record]]:
    """Complete cells and their records."""
    cells: dict[tuple[str, str], list[record.Record]] = {}
    for item in record.load(path).records:
        cells.setdefault((item.experiment, item.cell), []).append(item)
    return {key: records for key, records in cells.items() if any(r.metric == CELL_TIME for r in records)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_again_and_again_loses_nothing_and_repeats_no_cell(sweep, tmp_path):
    path = tmp_path / "r.jsonl"
    kept, lines = {}, b""
    for printed, seconds in [(FIRST_CELL, 0), (START, 1)]:
        with running(sweep, tmp_path) as marked:
            assert wait_until(lambda marked=marked, text=printed: marked.said(text) or marked.ended, LONG)
            time.sleep(seconds)
            marked.process.kill()  # the runner alone
            marked.process.wait()
            assert wait_until(lambda marked=marked: not marked.alive(), LONG), "a worker outlived its runner"
        if path.exists():
            data = path.read_bytes()
            assert data.startswith(lines)
            lines = data[: data.rfind(b"\n") + 1]
            now = finished(path)
            assert {key: now.get(key) for key in kept} == kept
            kept = now
    assert kept, "no kill came after a finished cell"

    with running(sweep, tmp_path) as marked:
        assert marked.process.wait() == 0
    cells = finished(path)
    assert path.read_bytes().startswith(lines)
    assert {key: cells[key] for key in kept} == kept
    for records in cells.values():
        by_metric = {r.metric: r for r in records}
        assert all(r.ok for r in records)
        assert len(by_metric["step_time"].samples) == 100
        assert {"peak_memory", "predicted_memory", "flops"} <= by_metric.keys()
    measured_once = Counter(record.cell_key(line["config"]) for line in raw(path) if line["metric"] == CELL_TIME)
    assert list(measured_once.values()) == [1] * CELLS


@pytest.mark.slow
@pytest.mark.parametrize("when", ["the worker starts", "a cell has ended"])
def test_ctrl_c_keeps_the_finished_cells(when, sweep, tmp_path):
    with running(sweep, tmp_path) as marked:
        if when == "a cell has ended":
            assert wait_until(lambda: marked.said(FIRST_CELL), LONG)
        else:
            assert wait_until(lambda: len(marked.alive()) == 2, LONG)
        os.killpg(marked.process.pid, signal.SIGINT)  # as a terminal does, to the whole foreground group
        assert marked.process.wait() == 130
        assert wait_until(lambda: not marked.alive(), LONG)
        assert marked.log.read_text().splitlines()[-1].startswith("cs336 bench: stopped")
    assert not marked.said("Traceback")
    cells = finished(tmp_path / "r.jsonl") if (tmp_path / "r.jsonl").exists() else {}
    assert len(cells) < CELLS
    assert bool(cells) == (when == "a cell has ended")
