"""Records: everything written can be read back, in both schema versions, wherever a file was cut off."""

import dataclasses
import errno
import json
import math
import os
import re
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
    Environment,
    Record,
    append,
    cell_key,
    latest,
    load,
    percentile,
    steady_from,
    summarize,
)
from tests.helpers import refused
from tests.unit.any_text import any_text

INF, NAN = float("inf"), float("nan")
quick = settings(max_examples=60, deadline=None)

LOOKS_LIKE_SOMETHING_ELSE = ["", "=", "=1", "==", "inf", "-inf", "nan", "1.0", "1e5", "null", "NaN", '"', "\n"]
samples = st.lists(
    st.one_of(st.floats(), st.integers(-(2**53), 2**53), any_text(), st.sampled_from(LOOKS_LIKE_SOMETHING_ELSE)),
    max_size=12,
).map(tuple)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), any_text()
)
configs = st.dictionaries(any_text(), st.one_of(plain_values, st.dictionaries(any_text(), plain_values)), max_size=5)
st.register_type_strategy(str, any_text())  # for the texts of an environment
environments = st.builds(Environment, **{spec.name: ... for spec in dataclasses.fields(Environment)})
records = st.builds(
    Record,
    experiment=any_text(),
    config=configs,
    metric=any_text(),
    unit=st.sampled_from(("s", "B", "B/s", "FLOP", "FLOP/s", "1", "")),
    samples=samples,
    status=st.one_of(st.sampled_from(["ok", "oom: needs 30.1 GiB of 24.0 GiB", "error: 出错了"]), any_text()),
    environment=environments,
    variant=any_text(),
)


def record(metric="step_time", *samples, experiment="bench", config=None, **fields):
    fields = {"unit": "s", "samples": samples, **fields}
    return Record(experiment, {"size": "small", "seed": 0} if config is None else config, metric, **fields)


def exactly(found):
    """Text that is the same only for the same records: nan counts as equal to itself, 1 and 1.0 do not."""
    return [repr(item) for item in found]


# -- one record -------------------------------------------------------------------------------------------------------


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@quick
@given(records)
@example(record("loss", INF, -INF, NAN, -0.0, "inf", "=inf", "", "1.0"))
def test_round_trip_through_json(item):
    """Strict JSON: jq and most other readers refuse NaN and Infinity."""
    line = item.to_json()
    assert "\n" not in line
    assert exactly([Record.from_dict(json.loads(line, parse_constant=refuse))]) == exactly([item])


def test_numbers_are_the_samples_that_are_not_text():
    assert record("x", 1, "2", 3.5, "nan").numbers == [1.0, 3.5]


def test_the_cell_is_the_work_whatever_its_name_and_order():
    first = record(config={"size": "2.7B", "seed": 0, "batch_size": 4})
    assert record(config={"batch_size": 4, "seed": 0, "size": "2026/xl"}).cell == first.cell
    assert record(config={"batch_size": 5, "seed": 0, "size": "2.7B"}).cell != first.cell
    assert cell_key({"a": 1}) != cell_key({"a": "1"})


# -- schema 1 ---------------------------------------------------------------------------------------------------------

SPLIT = {
    "implementation": ({"implementations": ["flash_triton", "sdpa"]}, "sdpa_forward_time", "sdpa", "forward_time"),
    "longer implementation": ({"implementations": ["sdpa", "sdpa_flash"]}, "sdpa_flash_time", "sdpa_flash", "time"),
    "arrangement": ({"arrangements": ["naive", "ddp 25 MB"]}, "ddp 25 MB: step_time", "ddp 25 MB", "step_time"),
    "strategy": ({"strategies": ["adamw", "sharded"]}, "sharded: state_memory", "sharded", "state_memory"),
    "collective": ({"collectives": ["all_reduce"]}, "all_reduce 1048576: time", "all_reduce 1048576", "time"),
    "dtype": ({"model": "toy"}, "dtype of fc1 output", "fc1 output", "dtype"),
    "no variant": ({"implementations": ["sdpa"]}, "step_time", "", "step_time"),
    "phase of a table": ({}, "kind_table: forward", "", "kind_table: forward"),
    "other collective": ({"collectives": ["all_reduce"]}, "broadcast: time", "", "broadcast: time"),
    "name that is a variant": ({"implementations": ["step"]}, "step", "", "step"),
    "odd list": ({"implementations": "sdpa", "arrangements": [3, None]}, "sdpa_time", "", "sdpa_time"),
}


def older(config, metric, **changes):
    """A line of schema 1 as a dictionary: no variant."""
    values = {**json.loads(record(metric, 1.0, config=config).to_json()), "schema_version": 1, **changes}
    return {name: value for name, value in values.items() if name != "variant"}


@pytest.mark.parametrize("case", SPLIT)
def test_schema_1_names_are_split_into_variant_and_metric(case):
    config, name, variant, metric = SPLIT[case]
    found = Record.from_dict(older(config, name))
    assert (found.variant, found.metric, found.schema_version) == (variant, metric, SCHEMA_VERSION)
    again = Record.from_dict(json.loads(found.to_json()))
    assert exactly([again]) == exactly([found])


def test_schema_2_names_are_not_split():
    config = {"implementations": ["sdpa"], "arrangements": ["naive"]}
    for metric in ("sdpa_time", "naive: step_time", "dtype of loss"):
        found = Record.from_dict(json.loads(record(metric, config=config, variant="mine").to_json()))
        assert (found.variant, found.metric) == ("mine", metric)


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_factory_that_moved_is_found_where_it_is(version):
    values = older({"model_factory": "cs336_systems.benchmark.llama:build"}, "step_time", schema_version=version)
    moved = {"model_factory": "cs336_systems.experiments.steps.llama:build"}
    assert Record.from_dict(values).config == moved
    assert Record.from_dict(values).cell == cell_key(moved)  # a run of today resumes an older file


def test_both_schemas_in_one_file_agree_on_the_latest(tmp_path):
    config = {"implementations": ["sdpa"]}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(older(config, "sdpa_time")) + "\n")
    newer = record("time", 2.0, config=config, variant="sdpa")
    append(path, [newer])
    assert exactly(load(path).records) == exactly([newer])


def test_the_machine_is_the_gpu_where_there_is_one():
    assert Environment(gpu="H200", cpu="Xeon").machine == "H200"
    assert Environment(cpu="Xeon").machine == "Xeon"
    assert Environment().machine == "unknown machine"


# -- files ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(records, max_size=4))
def test_a_file_holds_what_was_appended(items):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "records.jsonl"
        append(path, items[:1])
        append(path, items[1:])
        loaded = load(path)
    assert exactly(loaded.records) == exactly(latest(items))
    assert loaded.remarks == []


def test_a_file_cut_at_any_byte_keeps_the_records_before_the_cut(tmp_path):
    """Also in its very first record; and the next record starts on a line of its own."""
    status = ("ok", "oom: 内存不足", "ok")
    items = [record("步骤", float(i), "=é", INF, config={"i": i}, status=status[i]) for i in range(3)]
    added, path = record("added", 1.0, config={"i": "added"}), tmp_path / "records.jsonl"
    append(path, items)
    data = path.read_bytes()
    ends = [0, *(index + 1 for index, byte in enumerate(data) if byte == ord("\n"))]
    for cut in sorted({1, *range(0, len(data), 7), *ends, *(end - 1 for end in ends[1:])}):
        path.write_bytes(data[:cut])
        whole, torn = items[: data[:cut].count(b"\n")], cut not in ends
        loaded = load(path)
        assert exactly(loaded.records) == exactly(whole), cut
        assert len(loaded.remarks) == torn, cut
        assert all("torn" in remark.en and "不完整" in remark.zh for remark in loaded.remarks)
        append(path, [added])
        loaded = load(path)
        assert exactly(loaded.records) == exactly([*whole, added]), cut
        assert loaded.remarks == []


def test_missing_and_empty_files(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"")
    assert load(path).records == load(path).remarks == []
    with pytest.raises(UserError, match=r"no file '.*nowhere\.jsonl'.*cs336 bench --output"):
        load(tmp_path / "nowhere.jsonl")
    assert load(tmp_path).records == []  # a folder stands for its records.jsonl
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"cannot read .* a folder"):
        load(tmp_path)


def test_a_newer_schema_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "future.jsonl"
    append(path, [record("y", 1.0, schema_version=SCHEMA_VERSION + 41)])
    with refused("future.jsonl, line 1: ", f"version {SCHEMA_VERSION + 41}", f"up to {SCHEMA_VERSION}"):
        load(path)


COMPLETE = json.loads(record("x", 1.0).to_json())


def changed(**fields):
    values = {name: value for name, value in {**COMPLETE, **fields}.items() if value is not ...}
    return json.dumps(values).encode() + b"\n"


FOREIGN = {
    "CSV": (b"size,step_ms\nsmall,12.5\n", 1),
    "CSV without line end": (b"size,step_ms", 1),
    "array": (b'[{"a": 1}]\n', 1),
    "bytes": (b"\xff\xfe\x00\x01\x80\n\x00", 1),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), 1),
    "JSON of another program": (b'{"loss": 2.5, "step": 1}\n{"loss": 2.4, "step": 2}\n', 1),
    "string": (b'"text"\n', 1),
    "null": (b"null\n", 1),
    "NaN": (b"NaN\n", 1),
    "version as text": (changed(schema_version="1"), 1),
    "no samples": (changed(samples=...), 1),
    "samples of words": (changed(samples=["fast"]), 1),
    "no environment": (changed(environment=None), 1),
    "unknown environment": (changed(environment={"colour": "blue"}), 1),
    "variant of another type": (changed(variant=[]), 1),
    "deeply nested": (b"[" * 100_000 + b"\n", 1),
    "a sample of 400 digits": (changed(samples=[10**400]), 1),
    "a sample that is a list": (changed(samples=[[1]]), 1),
    "a GPU that is a list": (changed(environment={"gpu": ["H200"]}), 1),
    "a configuration of many levels": (changed(config={"a": [[[[[[[[[[1]]]]]]]]]]}), 1),
    "an integer of 400 digits": (changed(config={"a": 10**400}), 1),
    "after blank lines": (b"\n\nsize,step_ms\n", 3),
    "after blank lines, without line end": (b"\n\nsize,step_ms", 3),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_unreadable_line_is_one_clear_error(tmp_path, case):
    path = tmp_path / "foreign.dat"
    data, line = FOREIGN[case]
    path.write_bytes(data)
    with refused(f"{path}, line {line}: "):
        load(path)


def test_unreadable_lines_are_left_out_and_remarked_on(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"no JSON\n" + changed() + changed(schema_version=99))
    loaded = load(path)
    assert len(loaded.records) == 1
    assert "2 lines left out" in loaded.remarks[0].en
    assert "records.jsonl, line 1: " in loaded.remarks[0].en
    assert "2 行" in loaded.remarks[0].zh


def test_a_record_behind_a_torn_one_on_the_same_line_is_read(tmp_path):
    """A writer that did not cut off the torn line of another one left such files."""
    path = tmp_path / "records.jsonl"
    first, second, third = (record(name, 1.0, config={"name": name}).to_json() for name in ("a", "b", "c"))
    path.write_text(f"{first}\n{first[:60]}{second}\n{third}\n")
    loaded = load(path)
    assert [item.metric for item in loaded.records] == ["a", "b", "c"]
    assert "line 2: " in loaded.remarks[0].en


@pytest.mark.parametrize("failing", ["write", "fsync"])
@pytest.mark.parametrize("torn", [b"", b'{"experiment":"tr'], ids=["whole", "torn"])
def test_a_failed_append_is_undone(tmp_path, monkeypatch, failing, torn):
    """A full disk takes some of the bytes, then none; the file is as it was, less a torn line."""
    path = tmp_path / "records.jsonl"
    append(path, [record("a", 1.0)])
    before = path.read_bytes()
    path.write_bytes(before + torn)
    write = os.write

    def some(descriptor, data):
        if len(data) < 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data[:100]))

    def none(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, {"write": some, "fsync": none}[failing])
        with pytest.raises(OSError, match=re.escape(str(path))):
            append(path, [record("b", *range(200))])
    assert path.read_bytes() == before
    append(path, [record("b", 2.0)])
    assert [item.metric for item in load(path).records] == ["a", "b"]
    assert load(path).remarks == []


def test_writers_do_not_interleave(tmp_path):
    """Four processes append to one file, with writes of a few bytes each; every line is whole."""
    path = tmp_path / "records.jsonl"

    def work(number):
        write = os.write
        os.write = lambda descriptor, data: write(descriptor, bytes(data[:64]))
        for turn in range(10):
            append(path, [record("loss", 1.0, config={"writer": number, "turn": turn})])

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                work(number)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    loaded = load(path)
    assert (len(loaded.records), loaded.remarks) == (40, [])


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


def test_cells_experiments_and_variants_are_kept_apart():
    other_cell = [dataclasses.replace(item, config={"size": "small", "seed": 1}) for item in finished(3.0)]
    other_experiment = [dataclasses.replace(item, experiment="warmup") for item in finished(4.0)]
    variants = [record("step_time", 1.0, config={"seed": 2}, variant=name) for name in ("naive", "flat")]
    items = [*finished(1.0), *other_cell, *other_experiment, *variants]
    assert exactly(latest(items)) == exactly(items)


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.1, 9)), max_size=12))
@example([(0, True, 1.0), (0, False, 1.0)])
@example([(0, False, 1.0), (0, True, 1.0)])
def test_latest_is_the_last_run_of_each_cell(history):
    """Else a table would show the times of one run beside the verdict of another."""
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
@given(measurements, st.floats(0, 100))
def test_statistics_are_those_of_numpy(values, percent):
    found, array = summarize(values), np.array(values)
    close = {"rel": 1e-9, "abs": 1e-9 * max(1.0, np.abs(array).max())}
    assert found.n == len(values)
    assert found.mean == pytest.approx(array.mean(), **close)
    assert found.std == pytest.approx(array.std(ddof=1) if len(values) > 1 else 0.0, **close)
    assert found.median == pytest.approx(np.median(array), **close)
    assert (found.min, found.max) == (array.min(), array.max())
    percentiles = (found.p5, found.p95, percentile(values, percent))
    assert percentiles == pytest.approx(tuple(np.percentile(array, [5, 95, percent])), **close)


def test_statistics_at_the_edges():
    assert summarize([9.0, 10.0, 11.0]).variation == pytest.approx(0.1)
    assert summarize([0.0, 0.0]).variation == 0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])
    for diverged in ([1.0, INF], [INF, INF], [1.0, 2.0, NAN], [-INF, INF]):
        assert summarize(diverged).n == len(diverged)
        assert math.isnan(summarize(diverged).mean)


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
        ([1.0, 2.0] * 10, None),  # not even from its last step, after which there is nothing left to vary
        ([1.0, 2.0, 1.0, 2.0, 1.0], None),
    ],
)
def test_steady_from(steps, steady):
    assert steady_from(steps) == steady


def test_the_tolerance_of_steadiness_can_be_chosen():
    steps = [1.2, 1.1, 1.0, 1.0, 1.0, 1.0]
    assert [steady_from(steps, tolerance) for tolerance in (0.01, 0.15, 0.25)] == [2, 1, 0]


@pytest.mark.parametrize(("count", "end"), [(4, "run-3/records.jsonl"), (9, "run-3/records.jsonl (and 5 more)")])
def test_a_folder_of_runs_names_some_of_their_files_and_how_many_more(count, end, tmp_path):
    for number in range(count):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "records.jsonl").touch()
    with pytest.raises(UserError, match="name one of: ") as refused:
        load(tmp_path)
    assert str(refused.value).endswith(end)
