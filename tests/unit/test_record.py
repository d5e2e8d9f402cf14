"""Records: what is written can be read back, whatever was measured and wherever the writing was cut off."""

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.config import UserError
from cs336_systems.record import (
    CELL_TIME,
    SCHEMA_VERSION,
    UNITS,
    Environment,
    Record,
    append,
    bootstrap_interval,
    cell_key,
    drop_torn_line,
    latest,
    load,
    percentile,
    steady_from,
    summarize,
)

INF, NAN = float("inf"), float("nan")
quick = settings(max_examples=100, deadline=None)

LOOKS_LIKE_SOMETHING_ELSE = (
    "",
    "=",
    "=1",
    "==",
    "inf",
    "-inf",
    "nan",
    "1.0",
    "1e5",
    "null",
    "NaN",
    "Infinity",
    '"',
    "\n",
)
samples = st.lists(
    st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.text(), st.sampled_from(LOOKS_LIKE_SOMETHING_ELSE)),
    max_size=12,
).map(tuple)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
configs = st.dictionaries(st.text(), st.one_of(plain_values, st.dictionaries(st.text(), plain_values)), max_size=5)
environments = st.builds(Environment, **{spec.name: ... for spec in dataclasses.fields(Environment)})
records = st.builds(
    Record,
    experiment=st.text(),
    config=configs,
    metric=st.text(),
    unit=st.sampled_from(UNITS),
    samples=samples,
    status=st.one_of(st.sampled_from(["ok", "oom: needs 30.1 GiB of 24.0 GiB", "error: 出错了"]), st.text()),
    environment=environments,
)


def record(metric="step_time", *samples, experiment="bench", config=None, **fields):
    fields = {"unit": "s", "samples": samples, **fields}
    return Record(experiment, {"size": "small", "seed": 0} if config is None else config, metric, **fields)


def exactly(found):
    """Text that is the same only for the same records: nan counts as equal to itself, 1 and 1.0 do not."""
    return [repr(item) for item in found]


# -- one record -------------------------------------------------------------------------------------------------------


@quick
@given(records)
@example(record("loss", INF, -INF, NAN, -0.0, "inf", "=inf", "", "1.0"))
def test_a_record_survives_json(item):
    line = item.to_json()
    assert "\n" not in line
    assert exactly([Record.from_dict(json.loads(line))]) == exactly([item])


@quick
@given(records)
def test_a_record_is_json_that_any_reader_takes(item):
    """NaN and Infinity are not JSON; jq and most other readers refuse them."""

    def refuse(constant):
        raise AssertionError(f"{constant} in {item.to_json()}")

    json.loads(item.to_json(), parse_constant=refuse)


def test_numbers_are_the_samples_that_are_not_text():
    assert record("x", 1, "2", 3.5, "nan").numbers == [1.0, 3.5]


def test_the_cell_is_the_work_whatever_its_name_and_order():
    first = record(config={"size": "2.7B", "seed": 0, "batch_size": 4})
    assert record(config={"batch_size": 4, "seed": 0, "size": "2026/xl"}).cell == first.cell
    assert record(config={"batch_size": 5, "seed": 0, "size": "2.7B"}).cell != first.cell
    assert cell_key({"a": 1}) != cell_key({"a": "1"})


def test_a_record_is_ok_only_if_it_says_so():
    assert record(status="ok").ok
    assert not record(status="oom").ok
    assert not record(status="").ok


def test_the_machine_is_the_gpu_where_there_is_one():
    assert Environment(gpu="H200", cpu="Xeon").machine == "H200"
    assert Environment(cpu="Xeon").machine == "Xeon"
    assert Environment().machine == "unknown machine"


# -- files ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(records, max_size=4))
def test_a_file_holds_what_was_appended(items):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "records.jsonl"
        append(path, items[:1])
        append(path, items[1:])
        loaded = load(path)
    assert exactly(loaded.records) == exactly(latest(items))
    assert loaded.remarks == []


def three_records():
    status = ("ok", "oom: 内存不足", "ok")
    return [record("步骤", float(i), "=é", INF, config={"i": i}, status=status[i]) for i in range(3)]


def test_a_file_cut_at_any_byte_gives_the_whole_records_before_the_cut(tmp_path):
    items, path = three_records(), tmp_path / "records.jsonl"
    append(path, items)
    data = path.read_bytes()
    assert len(data) > 600
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        torn = not data[:cut].endswith(b"\n") and cut > 0
        # A run killed while it wrote its very first record leaves such a file too, and must be able to go on.
        loaded = load(path)
        assert exactly(loaded.records) == exactly(items[:whole]), cut
        assert len(loaded.remarks) == torn, cut
        assert all("torn" in remark and "records.jsonl" in remark for remark in loaded.remarks)


def test_after_a_cut_the_next_record_starts_on_a_line_of_its_own(tmp_path):
    items, path = three_records(), tmp_path / "records.jsonl"
    append(path, items)
    data, added = path.read_bytes(), record("added", 1.0, config={"i": "added"})
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({0, 1, *range(0, len(data), 97), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        torn = cut > 0 and cut not in ends
        assert drop_torn_line(path) is torn, cut
        append(path, [added])
        loaded = load(path)
        assert exactly(loaded.records) == exactly([*items[:whole], added]), cut
        assert loaded.remarks == []


def test_nothing_is_dropped_where_there_is_nothing(tmp_path):
    path = tmp_path / "none.jsonl"
    assert not drop_torn_line(path)
    assert not path.exists()


def test_an_empty_file_holds_no_records(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"")
    assert load(path).records == load(path).remarks == []


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"no file '.*nowhere\.jsonl'.*cs336 bench --output"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path)


def test_a_newer_schema_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "future.jsonl"
    append(path, [record("x", 1.0), record("y", 1.0, schema_version=SCHEMA_VERSION + 41)])
    with pytest.raises(UserError, match=r"future\.jsonl, line 2: ") as refusal:
        load(path)
    message = str(refusal.value)
    assert f"version {SCHEMA_VERSION + 41}" in message
    assert f"up to {SCHEMA_VERSION}" in message
    assert len(message.splitlines()) == 1


COMPLETE = json.loads(record("x", 1.0).to_json())


@pytest.mark.parametrize(
    "data",
    [
        b"size,step_ms\nsmall,12.5\n",
        b"size,step_ms",
        b'[{"a": 1}]\n',
        b"\xff\xfe\x00\x01\x80\n\x00",
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        b'{"loss": 2.5, "step": 1}\n{"loss": 2.4, "step": 2}\n',
        b'"text"\n',
        b"null\n",
        b"NaN\n",
        b'{"schema_version": "1", "metric": "x", "experiment": "y"}\n',
        json.dumps({k: v for k, v in COMPLETE.items() if k != "samples"}).encode() + b"\n",
        json.dumps({**COMPLETE, "samples": ["fast"]}).encode() + b"\n",
        json.dumps({**COMPLETE, "environment": None}).encode() + b"\n",
        json.dumps({**COMPLETE, "environment": {"colour": "blue"}}).encode() + b"\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_a_foreign_file_is_refused_in_one_line_with_its_name_and_line(tmp_path, data):
    path = tmp_path / "foreign.dat"
    path.write_bytes(data)
    with pytest.raises(UserError) as refusal:
        load(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}, line 1: ")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (record("x", 1.0).to_json().encode() + b"\nsize,step_ms\n", 2),
        (b"\n\nsize,step_ms\n", 3),
        (b"\n\nsize,step_ms", 3),
    ],
)
def test_the_line_named_is_the_one_that_cannot_be_read(tmp_path, data, line):
    path = tmp_path / "records.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"records\.jsonl, line {line}: "):
        load(path)


def test_an_error_message_with_undecodable_bytes_does_not_stop_a_run(tmp_path):
    """Python hands on bytes that are not UTF-8, in a file name say, as lone surrogates, which no encoder takes."""
    path = tmp_path / "records.jsonl"
    append(path, [record(CELL_TIME, status="error: FileNotFoundError: weights-\udcff.pt")])
    assert load(path).records[0].status.startswith("error: FileNotFoundError: weights-")


# -- the latest run of a cell -----------------------------------------------------------------------------------------


def finished(*times):
    return [record("step_time", *times), record("peak_memory", 7.0, unit="B"), record(CELL_TIME, 9.0)]


def failure(status="oom"):
    return [record(CELL_TIME, status=status)]


def test_of_two_runs_of_a_cell_the_later_counts():
    first, second = finished(1.0), finished(2.0)
    assert exactly(latest([*first, *second])) == exactly(second)


def test_a_failure_after_a_good_run_leaves_only_the_failure():
    """Else a table would show the times of the old run beside the verdict of the new one."""
    assert exactly(latest([*finished(1.0), *failure()])) == exactly(failure())


def test_a_good_run_after_a_failure_leaves_only_the_good_run():
    assert exactly(latest([*failure(), *finished(1.0)])) == exactly(finished(1.0))
    assert exactly(latest([*finished(1.0), *failure(), *finished(2.0)])) == exactly(finished(2.0))


def test_cells_and_experiments_are_kept_apart():
    other_cell = [dataclasses.replace(item, config={"size": "small", "seed": 1}) for item in finished(3.0)]
    other_experiment = [dataclasses.replace(item, experiment="warmup") for item in finished(4.0)]
    items = [*finished(1.0), *other_cell, *other_experiment]
    assert exactly(latest(items)) == exactly(items)


def test_the_name_of_a_size_does_not_make_another_cell():
    renamed = [dataclasses.replace(item, config={"size": "2026/small", "seed": 0}) for item in finished(2.0)]
    assert exactly(latest([*finished(1.0), *renamed])) == exactly(renamed)


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.1, 9)), max_size=12))
def test_latest_is_the_last_run_of_each_cell(history):
    items, last = [], {}
    for seed, ok, seconds in history:
        run = [dataclasses.replace(r, config={"seed": seed}) for r in (finished(seconds) if ok else failure())]
        items += run
        last[seed] = run
    assert sorted(exactly(latest(items))) == sorted(exactly([r for run in last.values() for r in run]))
    assert exactly(latest(latest(items))) == exactly(latest(items))


# -- statistics -------------------------------------------------------------------------------------------------------

measurements = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


@quick
@given(measurements)
def test_statistics_are_those_of_numpy(values):
    found, array = summarize(values), np.array(values)
    close = {"rel": 1e-9, "abs": 1e-9 * max(1.0, np.abs(array).max())}
    assert found.n == len(values)
    assert found.mean == pytest.approx(array.mean(), **close)
    assert found.std == pytest.approx(array.std(ddof=1) if len(values) > 1 else 0.0, **close)
    assert found.median == pytest.approx(np.median(array), **close)
    assert (found.min, found.max) == (array.min(), array.max())
    assert (found.p5, found.p95) == pytest.approx(tuple(np.percentile(array, [5, 95])), **close)


@quick
@given(measurements, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    close = {"rel": 1e-9, "abs": 1e-9 * max(1.0, *map(abs, values))}
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), **close)


def test_variation_is_std_over_mean():
    assert summarize([9.0, 10.0, 11.0]).variation == pytest.approx(0.1)
    assert summarize([0.0, 0.0]).variation == 0


def test_no_samples_have_no_statistics():
    for statistic in (summarize, bootstrap_interval):
        with pytest.raises(ValueError, match="no samples"):
            statistic([])


@pytest.mark.parametrize("values", [[1.0, INF], [INF, INF], [1.0, 2.0, NAN], [-INF, INF]], ids=repr)
def test_a_run_that_diverged_has_statistics_too(values):
    """Records may hold inf and nan (a loss that diverged); a report over them must not end in a traceback."""
    found = summarize(values)
    assert found.n == len(values)
    assert not math.isfinite(found.mean)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_the_bootstrap_interval_contains_the_mean_and_is_always_the_same(values):
    low, high = bootstrap_interval(values)
    mean, rounding = float(np.mean(values)), 1e-9 * max(values)
    assert low - rounding <= mean <= high + rounding
    assert min(values) - rounding <= low
    assert high <= max(values) + rounding
    assert bootstrap_interval(list(values)) == (low, high)


def test_the_bootstrap_interval_shrinks_with_more_samples():
    """With the root of n: sixteen times the samples, a quarter of the width."""
    few = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    width = {n: np.diff(bootstrap_interval(few * n))[0] for n in (1, 4, 16)}
    assert width[1] / width[4] == pytest.approx(2, rel=0.15)
    assert width[1] / width[16] == pytest.approx(4, rel=0.15)


def test_the_bootstrap_interval_is_that_of_the_normal_approximation_for_many_samples():
    values = np.random.default_rng(0).normal(10, 2, size=400)
    low, high = bootstrap_interval(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)


def test_less_confidence_is_a_narrower_interval():
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    (low, high), (lower, higher) = (bootstrap_interval(values, confidence=c) for c in (0.5, 0.95))
    assert lower < low < high < higher


@pytest.mark.parametrize(
    ("steps", "steady"),
    [
        ([], None),
        ([1.0], 0),
        ([1.0] * 10, 0),
        ([9.0, 1.0, 1.0, 1.0, 1.0], 1),
        ([9.0, 3.0, 1.04, 1.0, 0.96, 1.0, 1.0], 2),
        ([1.0] * 9 + [5.0] + [1.0] * 10, 0),  # one outlier in twenty is a shared machine, not a run that is not steady
        ([5.0 if step in (3, 6, 9) else 1.0 for step in range(20)], 7),  # one in ten of what follows, not three
        ([5.0] + [1.0] * 19, 1),  # but not when it comes first: that is the cold start
        ([1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0], 4),  # throttled for good after four steps
        ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], None),
    ],
)
def test_steady_from(steps, steady):
    assert steady_from(steps) == steady


@pytest.mark.parametrize("steps", [[1.0, 2.0] * 10, [1.0, 2.0] * 5, [2.0, 1.0] * 5, [1.0, 2.0, 1.0, 2.0, 1.0]])
def test_a_run_that_alternates_is_never_steady(steps):
    """Not even from its last step, after which there is nothing left to vary."""
    assert steady_from(steps) is None


def test_the_tolerance_of_steadiness_can_be_chosen():
    steps = [1.2, 1.1, 1.0, 1.0, 1.0, 1.0]
    assert [steady_from(steps, tolerance) for tolerance in (0.01, 0.15, 0.25)] == [2, 1, 0]
