"""The runner: what it writes, what it does not run again, and what it survives.

Where the question is only what gets asked of a worker and what is written, `Scripted` stands in for the process.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from cs336_systems import record
from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments import runner as runner_module
from cs336_systems.experiments.runner import Outcome, Runner, gather
from cs336_systems.record import CELL_TIME, Environment
from tests.helpers import CPU_ONLY, CS336, MODEL, TINY, Marked, running, tiny_config, wait_until

MACHINE = Environment(cpu="a processor", memory=16 * 2**30, torch="2.0", python="3.11", utc="2025-01-01T00:00:00+00:00")


class Scripted:
    """A worker that measures nothing. `asked` are the requests of all of its kind; `answer` may be replaced."""

    asked: list[dict]

    def __init__(self):
        self.used = False
        self.machine = {"event": "ready", "device": "cpu", "environment": dataclasses.asdict(MACHINE)}

    def ask(self, request, timeout):
        self.used = True
        self.asked.append(request)
        return self.answer(request)

    @staticmethod
    def answer(request):
        return measured(len(Scripted.asked))

    def stop(self):
        pass


def measured(seconds):
    metrics = [["step_time", "s", [seconds, seconds]], ["flops", "FLOP", [7]]]
    environment = dataclasses.asdict(MACHINE)
    return {"event": "measured", "metrics": metrics, "environment": environment, "seconds": seconds}


@pytest.fixture
def scripted(monkeypatch):
    kind = type("Scripted", (Scripted,), {"asked": []})
    kind.answer = staticmethod(lambda request: measured(len(kind.asked)))
    monkeypatch.setattr(runner_module, "Worker", kind)
    return kind


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)


def run(path, *requests, **options) -> Outcome:
    with Runner(path, quiet=True, **options) as runner:
        return runner.run(gather(requests))


def raw(path) -> list[dict]:
    """Every line of the file, also those that later ones replace."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def ends(path) -> dict[int, str]:
    """The status that counts of each cell, by context length."""
    return {r.config["model"]["context_length"]: r.status for r in record.load(path).records if r.metric == CELL_TIME}


# -- one cell, for real -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_experiments(tmp_path_factory):
    """A file with one cell that two experiments asked for in one run."""
    path = tmp_path_factory.mktemp("measured") / "records.jsonl"
    with pytest.MonkeyPatch.context() as patch:
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


def test_a_cell_that_two_experiments_want_is_measured_once_and_recorded_under_both(two_experiments):
    path, outcome = two_experiments
    assert (outcome.done, outcome.reused, outcome.failed) == (1, 0, 0)
    by_experiment = {
        name: {line["metric"]: line["samples"] for line in raw(path) if line["experiment"] == name}
        for name in ("end_to_end", "precision")
    }
    assert by_experiment["end_to_end"] == by_experiment["precision"]
    assert len(raw(path)) == 2 * len(by_experiment["precision"])


def test_resume_runs_nothing_again(two_experiments):
    path, _ = two_experiments
    before = path.read_bytes()
    outcome = run(path, ("end_to_end", tiny_config()), ("precision", tiny_config()))
    assert (outcome.done, outcome.reused) == (0, 1)
    assert path.read_bytes() == before


# -- what is asked of the worker, and what is written -----------------------------------------------------------------


def test_force_measures_again_and_appends(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    run(path, ("bench", tiny_config()))
    before = path.read_bytes()
    outcome = run(path, ("bench", tiny_config()), force=True)
    assert (outcome.done, outcome.reused) == (1, 0)
    assert path.read_bytes().startswith(before)
    assert len(raw(path)) == 2 * before.count(b"\n")
    assert [r.samples for r in record.load(path).records if r.metric == "step_time"] == [(2, 2)]


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
    assert [(r.metric, r.samples) for r in copies] == [("step_time", (1, 1)), ("flops", (7,)), (CELL_TIME, (1,))]
    assert all(r.config == renamed and r.environment == MACHINE for r in copies)
    assert len(raw(path)) == 2 * len(copies)


def test_a_cell_that_cannot_fit_is_not_tried(tmp_path, scripted):
    """Told from the memory model. Not left to a real worker: if this broke, the test would take the machine down."""
    path = tmp_path / "r.jsonl"
    config = RunConfig(model=model_config("2.7B"), size="2.7B", batch_size=64).to_dict()
    outcome = run(path, ("bench", config), ("bench", tiny_config()))
    assert [request["config"] for request in scripted.asked] == [tiny_config()]
    assert (outcome.done, outcome.failed) == (2, 1)
    row = next(item for item in record.load(path).records if item.config == config)
    assert (row.metric, row.samples, row.environment) == (CELL_TIME, (), MACHINE)
    assert re.fullmatch(r"oom: needs \d{3,}\.\d GiB of 16\.0 GiB \(predicted, not tried\)", row.status)
    assert run(path, ("bench", config)).reused == 1


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


def test_a_file_of_another_machine_is_refused(tmp_path, two_experiments):
    path = tmp_path / "r.jsonl"
    lines = raw(two_experiments[0])
    for line in lines:
        line["environment"]["cpu"] = "Another Processor"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = path.read_bytes()
    with pytest.raises(UserError, match="Another Processor"):
        run(path, ("bench", tiny_config()))
    assert path.read_bytes() == before


def test_a_refused_run_stops_the_worker_it_started(tmp_path, scripted):
    run(tmp_path / "r.jsonl", ("bench", tiny_config()))
    alive = []
    scripted.machine = property(
        lambda self: {"event": "ready", "device": "cpu", "environment": dataclasses.asdict(Environment(cpu="another"))},
        lambda self, value: alive.append(self),
    )
    scripted.stop = lambda self: alive.remove(self)
    with pytest.raises(UserError):
        run(tmp_path / "r.jsonl", ("bench", tiny_config()))
    assert alive == []


def test_a_second_run_on_the_same_file_is_refused(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    refusals = []

    def answer(request):
        if path.stat().st_size:  # while the first run is in its second cell
            with pytest.raises(UserError, match="another run is writing") as refusal:
                run(path, ("bench", tiny_config(10)))
            refusals.append(str(refusal.value))
        return measured(1)

    scripted.answer = staticmethod(answer)
    run(path, ("bench", tiny_config(8)), ("bench", tiny_config(9)))
    assert len(refusals) == 1
    assert str(path) in refusals[0]
    assert ends(path) == {8: "ok", 9: "ok"}


def test_a_refused_run_leaves_the_file_of_the_first_one_locked(tmp_path, scripted):
    """In its first cell a run has a lock on an empty file; without that file a third run could write as well."""
    path = tmp_path / "r.jsonl"
    refused = []

    def answer(request):
        if request["config"]["model"]["context_length"] == 8:
            for _ in range(2):
                with pytest.raises(UserError, match="another run is writing"):
                    run(path, ("bench", tiny_config(10)))
                refused.append(path.exists())
        return measured(1)

    scripted.answer = staticmethod(answer)
    run(path, ("bench", tiny_config(8)))
    assert refused == [True, True]
    assert ends(path) == {8: "ok"}


def test_cells_that_another_run_finished_in_the_meantime_are_not_run_again(tmp_path, scripted):
    """Two commands started together: the second waits for its worker while the first one ends."""
    path = tmp_path / "r.jsonl"
    late = Runner(path, quiet=True)
    run(path, ("bench", tiny_config()))
    with late:
        outcome = late.run(gather([("bench", tiny_config())]))
    assert (outcome.done, outcome.reused) == (0, 1)


def test_a_user_error_leaves_no_file_behind(tmp_path, scripted):
    scripted.answer = staticmethod(lambda request: {"event": "user_error", "message": "no such factory"})
    with pytest.raises(UserError, match="no such factory"):
        run(tmp_path / "new" / "r.jsonl", ("bench", tiny_config()))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_user_error_keeps_the_cells_before_it(tmp_path, scripted):
    def answer(request):
        bad = request["config"]["model"]["context_length"] == 9
        return {"event": "user_error", "message": "no such factory"} if bad else measured(1)

    scripted.answer = staticmethod(answer)
    with pytest.raises(UserError):
        run(tmp_path / "r.jsonl", ("bench", tiny_config(8)), ("bench", tiny_config(9)))
    assert ends(tmp_path / "r.jsonl") == {8: "ok"}


def test_a_device_as_output_is_not_deleted(tmp_path, scripted):
    """`--output /dev/null` run by root deletes /dev/null; here a link stands for it, since that is what is unlinked."""
    (tmp_path / "null").symlink_to(os.devnull)
    with contextlib.suppress(UserError):  # refusing it is as good
        run(tmp_path / "null", ("bench", tiny_config()))
    assert (tmp_path / "null").is_symlink()


# -- a file cut off anywhere ------------------------------------------------------------------------------------------


def test_a_torn_file_resumes_with_the_cells_before_the_tear(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    requests = [("bench", tiny_config(context)) for context in (8, 9, 10)]
    run(path, *requests)
    whole, lines = path.read_bytes(), path.read_bytes().splitlines(keepends=True)
    first_cell = sum(map(len, lines[: len(lines) // 3]))
    generator = random.Random(0)
    for cut in [first_cell, len(whole) - 1, *generator.sample(range(first_cell, len(whole)), 20)]:
        path.write_bytes(whole[:cut])
        survivors = ends(path)
        assert 8 in survivors
        outcome = run(path, *requests)
        assert (outcome.reused, outcome.done) == (len(survivors), 3 - len(survivors))
        assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, cut) + 1])
        assert ends(path) == {8: "ok", 9: "ok", 10: "ok"}


def test_a_file_torn_in_its_first_line_resumes(tmp_path, scripted):
    path = tmp_path / "r.jsonl"
    run(path, ("bench", tiny_config()))
    path.write_bytes(path.read_bytes()[:100])
    outcome = run(path, ("bench", tiny_config()))
    assert outcome.done == 1
    assert ends(path) == {8: "ok"}


def test_a_tear_between_two_experiments_is_mended_by_copying(tmp_path, scripted):
    """One write holds the cell under both names; when only the first got to disk the second is not measured again."""
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
from pathlib import Path

working = build

def build(context_length, **fields):
    with open("calls.txt", "a") as calls:
        calls.write(f"{context_length}\\n")
    if not Path("mended").exists():
        match context_length:
            case 9: raise MemoryError
            case 10: os._exit(3)
            case 11: os.kill(os.getpid(), signal.SIGSEGV)
            case 12: time.sleep(600)
    return working(context_length=context_length, **fields)
"""
)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_crashes_are_rows_and_the_sweep_goes_on(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    path = tmp_path / "r.jsonl"
    requests = [("bench", tiny_config(context, model_factory="faulty:build")) for context in (9, 10, 11, 8)]
    outcome = run(path, *requests, timeout=60)
    statuses = ends(path)
    assert statuses[9].startswith("oom")
    assert statuses[10].startswith("error: crashed (exit code 3)")
    assert statuses[11].startswith("error: crashed (SIGSEGV)")
    assert statuses[8] == "ok"
    assert (outcome.done, outcome.failed) == (4, 3)
    rows = [r for r in record.load(path).records if not r.ok]
    assert [(r.metric, r.samples) for r in rows] == [(CELL_TIME, ())] * 3
    assert all(r.environment.torch for r in rows)

    (tmp_path / "calls.txt").unlink()
    (tmp_path / "mended").touch()
    outcome = run(path, *requests, timeout=60)
    assert (outcome.done, outcome.reused, outcome.failed) == (2, 2, 0)
    assert set((tmp_path / "calls.txt").read_text().split()) == {"10", "11"}
    assert {context: status.split(":")[0] for context, status in ends(path).items()} == {
        8: "ok", 9: "oom", 10: "ok", 11: "ok",
    }  # fmt: skip


@pytest.mark.timeout(60)
def test_a_cell_that_takes_too_long_is_given_up(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    started = time.monotonic()
    with Runner(tmp_path / "r.jsonl", quiet=True, timeout=1) as runner:
        process = runner.worker.process
        runner.run(gather([("bench", tiny_config(12, model_factory="faulty:build"))]))
        assert process.returncode == -signal.SIGKILL
    assert ends(tmp_path / "r.jsonl") == {12: "error: timeout after 1 s"}
    assert time.monotonic() - started < 30


# -- runs that are stopped --------------------------------------------------------------------------------------------

CELLS = 12
SWEEP = [str(CS336), "bench", *TINY, "--num_steps", "100", "--context_lengths", "8,16,24"]
SWEEP += ["--modes", "forward,train-step", "--precisions", "fp32,bf16", "--output", "r.jsonl"]
START, FIRST_CELL = "", "] "
"""What a run has said by then: nothing when it starts, `[1/12] ...` when its first cell has ended."""


def finished(path) -> dict[tuple[str, str], list[record.Record]]:
    """Complete cells and their records."""
    cells: dict[tuple[str, str], list[record.Record]] = {}
    for item in record.load(path).records:
        cells.setdefault((item.experiment, item.cell), []).append(item)
    return {key: records for key, records in cells.items() if any(r.metric == CELL_TIME for r in records)}


def kill_when(marked: Marked, said: str, seconds: float) -> bool:
    """SIGKILL to the runner alone, `seconds` after it `said` that; False if it ended before."""
    assert wait_until(lambda: marked.said(said) or marked.ended, 60)
    time.sleep(seconds)
    if marked.ended:
        return False
    os.kill(marked.process.pid, signal.SIGKILL)
    return marked.process.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_killed_ten_times_loses_nothing_and_runs_no_finished_cell_twice(tmp_path):
    path = tmp_path / "r.jsonl"
    generator = random.Random(336)
    # Three kills while it starts, three in or near the first cell it runs, four between cells.
    moments = [(START, generator.uniform(0, 1)) for _ in range(3)]
    moments += [(START, generator.uniform(1.5, 4)) for _ in range(3)]
    moments += [(FIRST_CELL, generator.uniform(0, 0.3)) for _ in range(4)]
    generator.shuffle(moments)
    kept, lines, kills = {}, b"", 0
    for said, seconds in moments:
        with running(SWEEP, tmp_path) as marked:
            kills += kill_when(marked, said, seconds)
            assert wait_until(lambda marked=marked: not marked.alive(), 10), "a worker outlived its runner"
        if path.exists():
            data = path.read_bytes()
            assert data.startswith(lines)
            lines = data[: data.rfind(b"\n") + 1]
            now = finished(path)
            assert {key: now.get(key) for key in kept} == kept
            kept = now
    assert kills >= 6, f"only {kills} of 10 kills came before the end of the sweep"
    assert kept, "no kill came after a finished cell"

    with running(SWEEP, tmp_path) as marked:
        assert marked.process.wait(timeout=90) == 0
    cells = finished(path)
    assert path.read_bytes().startswith(lines)
    assert {key: cells[key] for key in kept} == kept
    assert len(cells) == CELLS
    for records in cells.values():
        by_metric = {r.metric: r for r in records}
        assert all(r.ok for r in records)
        assert len(by_metric["step_time"].samples) == 100
        assert {"peak_memory", "predicted_memory", "flops"} <= by_metric.keys()
    ok = Counter(
        (line["experiment"], record.cell_key(line["config"]))
        for line in raw(path)
        if line["metric"] == CELL_TIME and line["status"] == "ok"
    )
    assert set(ok.values()) == {1}
    assert len(ok) == CELLS


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    with running(SWEEP, tmp_path) as marked:
        assert wait_until(lambda: marked.said(FIRST_CELL), 40)
        os.killpg(marked.process.pid, signal.SIGINT)  # as a terminal does, to the whole foreground group
        assert marked.process.wait(timeout=10) == 130
        assert wait_until(lambda: not marked.alive(), 5)
        last = marked.log.read_text().splitlines()[-1]
    assert last.startswith("cs336 bench: stopped")
    assert not marked.said("Traceback")
    assert 1 <= len(finished(tmp_path / "r.jsonl")) < CELLS


@pytest.mark.timeout(60)
def test_ctrl_c_while_the_worker_starts(tmp_path):
    with running(SWEEP, tmp_path) as marked:
        assert wait_until(lambda: len(marked.alive()) == 2, 20)
        os.killpg(marked.process.pid, signal.SIGINT)
        assert marked.process.wait(timeout=10) == 130
        assert wait_until(lambda: not marked.alive(), 5)
    assert marked.log.read_text().startswith("cs336 bench: stopped")
    assert not (tmp_path / "r.jsonl").exists()
