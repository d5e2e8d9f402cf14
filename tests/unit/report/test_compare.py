"""Two files of records compared: the error rate of verdicts, which cells are paired, which files are refused."""

import contextlib
import copy
import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cs336_systems import record
from cs336_systems.config import UserError
from cs336_systems.record import CELL_TIME, GIB, Record
from cs336_systems.report import intervals
from cs336_systems.report.compare import compare, parse_percent
from cs336_systems.report.compare_output import table
from cs336_systems.report.intervals import Ratio, geometric_mean, ratio_of_medians
from cs336_systems.table import FORMATS
from tests.helpers import assert_refused, clean_env, execute, exit_code
from tests.unit.any_text import any_text
from tests.unit.report.compare_cells import GPU, STEADY, cell, entries, times

pytestmark = pytest.mark.usefixtures("elsewhere")


def column(comparison, heading):
    found = table(comparison).plain()
    (index,) = [i for i, column in enumerate(found.columns) if column.heading() == heading]
    return [row[index] for row in found.rows]


def verdicts(comparison):
    return column(comparison, "verdict")


def notes(comparison, word):
    return [note.en for note in table(comparison).notes if word in note.en]


def refusal(*sides, **options):
    with pytest.raises(UserError) as caught:
        compare(*sides, **options)
    return str(caught.value)


# -- how often a verdict is wrong -------------------------------------------------------------------------------------

PAIRS = 1000


def gaussian(generator, n):
    return 1 + 0.01 * generator.standard_normal((PAIRS, n))


def lognormal(generator, n):
    return np.exp(0.01 * generator.standard_normal((PAIRS, n)))


def skewed(generator, n):
    return np.exp(0.3 * generator.standard_normal((PAIRS, n)))


def interrupted(generator, n):
    """One step in twenty takes half as long again."""
    return gaussian(generator, n) * np.where(generator.random((PAIRS, n)) < 0.05, 1.5, 1.0)


def two_levels(generator, n):
    """As clocks do that jump between two values."""
    return np.where(generator.random((PAIRS, n)) < 0.5, 1.0, 1.03) * (1 + 0.003 * generator.standard_normal((PAIRS, n)))


def ends(a, b, confidence):
    """Ends of `ratio_of_medians` of all rows at once."""
    a, b = np.sort(a), np.sort(b)
    medians = []
    for samples, seed in ((a, 0), (b, 1)):
        low, high = np.array(intervals._middles(samples.shape[1], seed)).T
        medians.append((samples[:, low] + samples[:, high]) / 2)
    tail = (1 - confidence) / 2
    center = np.median(b, axis=1) / np.median(a, axis=1)
    ends = np.quantile(medians[1] / medians[0], (tail, 1 - tail), axis=1)
    return center * (ends / center) ** intervals._widening(min(a.shape[1], b.shape[1]) - 1, confidence)


def shares(noise, n_a=10, n_b=10, factor=1.0, confidence=0.95):
    """The shares of pairs found faster, found slower, and whose interval misses the true ratio."""
    generator = np.random.default_rng(336)
    a, b = noise(generator, n_a), factor * noise(generator, n_b)
    low, high = ends(a, b, confidence)
    for index in range(0, PAIRS, 100):
        ratio = ratio_of_medians(a[index].tolist(), b[index].tolist(), confidence)
        assert (ratio.low, ratio.high) == pytest.approx((low[index], high[index]), rel=1e-12)
    return np.mean(high < 1), np.mean(low > 1), np.mean((factor < low) | (high < factor))


NO_DIFFERENCE = {
    **{noise.__name__: {"noise": noise} for noise in (gaussian, lognormal, skewed, interrupted, two_levels)},
    # The plain percentile bootstrap finds one in 33% (2, 2), 20% (2, 10) and 10% (3, 3) of the pairs.
    **{f"{a} and {b} samples": {"n_a": a, "n_b": b} for a, b in [(2, 2), (3, 3), (5, 5), (2, 10), (3, 10), (100, 100)]},
    "80% confidence": {"confidence": 0.8},
    "99% confidence": {"confidence": 0.99},
}


@pytest.mark.parametrize("case", NO_DIFFERENCE)
def test_false_positives_are_as_rare_as_the_confidence_says(case):
    options = {"noise": gaussian, "confidence": 0.95, **NO_DIFFERENCE[case]}
    faster, slower, _ = shares(**options)
    assert faster + slower <= 1.3 * (1 - options["confidence"])


@pytest.mark.parametrize("factor", [1.03, 1 / 1.03])
def test_a_difference_of_three_percent_is_found(factor):
    faster, slower, missed = shares(gaussian, factor=factor)
    right, wrong = (slower, faster) if factor > 1 else (faster, slower)
    assert right >= 0.95
    assert wrong == 0
    assert missed <= 0.06


def test_interrupted_steps_do_not_hide_a_difference():
    """They would hide it from an interval of means: such a step moves the mean by 5%."""
    assert shares(interrupted, factor=1.03)[1] >= 0.85


@pytest.mark.parametrize(("degrees", "confidence", "t_over_z"), [(1, 0.95, 6.483), (9, 0.8, 1.0792), (4, 0.99, 1.7874)])
def test_student_t_quantiles(degrees, confidence, t_over_z):
    assert intervals._widening(degrees, confidence) == pytest.approx(t_over_z, rel=3e-4)


def test_intervals_are_repeatable_and_follow_unit_and_direction():
    there = ratio_of_medians(times(), times(1.05))
    intervals._middles.cache_clear()
    assert ratio_of_medians(times()[::-1], times(1.05)) == there
    scaled, back = ratio_of_medians(times(1e6), times(1.05e6)), ratio_of_medians(times(1.05), times())
    assert dataclasses.astuple(scaled) == pytest.approx(dataclasses.astuple(there))
    assert back.value == pytest.approx(1 / there.value)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low), rel=0.01)


@settings(max_examples=50, deadline=None)
@given(*[st.lists(st.floats(1e-90, 1e90), min_size=2, max_size=12)] * 2, st.sampled_from([0.5, 0.95, 0.999]))
def test_intervals_contain_their_ratio(a, b, confidence):
    ratio = ratio_of_medians(a, b, confidence)
    assert 0 < ratio.low <= ratio.value * (1 + 1e-9)
    assert ratio.value <= ratio.high * (1 + 1e-9) < math.inf


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "verdict", "shown"),
    [
        (1.0, "undecided", "1.000"),
        (1.05, "slower", "1.050"),
        (0.95, "faster", "0.950"),
        (1.001, "undecided", "1.001"),
    ],
)
def test_verdicts(factor, verdict, shown):
    found = compare(cell(), cell(times(factor)))
    assert (verdicts(found), column(found, "B / A"), column(found, "n")) == ([verdict], [shown], ["10"])
    low, high = float(column(found, "95% low")[0]), float(column(found, "95% high")[0])
    assert low <= float(shown) <= high
    assert (low > 1, high < 1) == (verdict == "slower", verdict == "faster")


def test_medians_are_compared():
    found = compare(cell((0.1,) * 10), cell((*[0.1] * 9, 5.0)))
    assert (column(found, "A"), column(found, "B"), verdicts(found)) == (["100.0"], ["100.0"], ["undecided"])


@pytest.mark.parametrize(("a", "b"), [((0.1,), times(2)), (times(), (0.2,)), ((0.1,), (0.2,))])
def test_one_sample_tells_nothing(a, b):
    found = compare(cell(a), cell(b))
    shown = (verdicts(found), column(found, "B / A"), column(found, "95% low"))
    assert shown == (["undecided: n = 1"], ["2.000"], [""])
    assert len(found.untold) == 1
    assert found.slower_by(5) == []


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (["forward_time", "step_time", "step_event_time", "profiled_step_time"], "step_time"),
        (["forward_time", "backward_time", "forward_backward_time"], "forward_backward_time"),
        (["leaderboard_time", "flops"], "leaderboard_time"),
    ],
)
def test_the_headline_is_compared_by_default(metrics, shown):
    records = entries("x", {"heads": 4}, dict.fromkeys(metrics, STEADY))
    assert column(compare(records, records), "metric") == [shown]


# -- variants ---------------------------------------------------------------------------------------------------------


def with_variants(**factors):
    """A cell of one sweep that measured several variants, each slower than STEADY by its factor."""
    variants = [
        Record("x", {"heads": 4}, metric, "s", times(factor), "ok", GPU, variant)
        for variant, factor in factors.items()
        for metric in ("forward_backward_time", "forward_time")
    ]
    return [*variants, Record("x", {"heads": 4}, CELL_TIME, "s", (9.0,), "ok", GPU)]


def test_variants_are_paired_by_name():
    found = compare(with_variants(naive=1, flat=1, old=1), with_variants(new=1, flat=2, naive=0.5))
    assert column(found, "cell") == ["x, naive", "x, flat"]
    assert column(found, "metric") == ["forward_backward_time"] * 2
    assert column(found, "B / A") == ["0.500", "2.000"]
    assert [row.variant for row in found.slower_by(50)] == ["flat"]


def test_a_metric_of_variants_that_is_asked_for():
    sides = with_variants(naive=1, flat=1), with_variants(naive=3, flat=1)
    assert verdicts(compare(*sides, metrics=("forward_time",))) == ["slower", "undecided"]
    assert "forward_time" in refusal(*sides, metrics=("loss_time",))


def test_variants_of_a_failed_cell():
    failed = entries("x", {"heads": 4}, {}, "oom: too much")
    found = compare(with_variants(naive=1, flat=1), failed)
    assert (column(found, "cell"), verdicts(found)) == (["x, naive", "x, flat"], ["failed in B"] * 2)


def test_variants_of_schema_1_are_paired_with_those_of_schema_2(tmp_path):
    config = {"implementations": ["sdpa", "sdpa_flash"], "heads": 4}
    items = [Record("x", config, "step_time", "s", STEADY, "ok", GPU, name) for name in config["implementations"]]
    items.append(Record("x", config, CELL_TIME, "s", (9.0,), "ok", GPU))
    older = [{**json.loads(item.to_json()), "schema_version": 1} for item in items]
    for item in older:
        variant = item.pop("variant")
        item["metric"] = f"{variant}_{item['metric']}" if variant else item["metric"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in older))
    record.append(tmp_path / "b.jsonl", items)
    found = compare(record.load(tmp_path / "a.jsonl").records, record.load(tmp_path / "b.jsonl").records)
    assert column(found, "cell") == ["x, sdpa", "x, sdpa_flash"]
    assert verdicts(found) == ["undecided"] * 2


# -- metrics and names ------------------------------------------------------------------------------------------------


def test_metrics_that_are_asked_for():
    a = cell(metrics={"forward_time": times(0.3), "peak_memory": (GIB,) * 3, "bandwidth": times(1e10)})
    b = cell(metrics={"forward_time": times(0.4), "peak_memory": (2 * GIB,) * 3, "bandwidth": times(2e10)})
    found = compare(a, b, metrics=("peak_memory", "bandwidth", "forward_time"))
    assert column(found, "metric") == ["peak_memory", "bandwidth", "forward_time"]
    assert column(found, "unit") == ["GiB", "B/s", "ms"]
    assert column(found, "A")[::2] == ["1.00", "30.000"]
    assert verdicts(found) == ["more", "faster", "slower"]
    assert [row.metric for row in found.slower_by(10)] == ["forward_time"]


def test_a_rate_that_falls_is_slower():
    records = [entries("x", {"heads": 4}, {"bandwidth": times(factor)}) for factor in (1.0, 0.5)]
    found = compare(*records, metrics=("bandwidth",))
    assert verdicts(found) == ["slower"]
    assert (len(found.slower_by(80)), len(found.slower_by(120))) == (1, 0)


def test_cells_without_a_time_are_refused_or_remarked_on():
    sums = entries("accumulation", {"term": "fp16"}, {"sum": (9.9,), "kind": ("a word",)})
    assert "--metric" in refusal(sums, sums)
    found = compare([*cell(), *sums], [*cell(), *sums])
    assert len(found.rows) == 1
    assert notes(found, "1 cell with nothing to compare in both: accumulation")


def test_memory_cannot_be_slower():
    records = cell(metrics={"peak_memory": (GIB,) * 3})
    with pytest.raises(UserError, match="peak_memory is none"):
        compare(records, records, metrics=("peak_memory",)).slower_by(5)


def test_rows_are_named_by_what_tells_them_apart():
    records = [*cell(mode="forward"), *cell(size="large", mode="forward"), *cell(mode="inference")]
    assert column(compare(records, records), "cell") == ["small forward", "large forward", "small inference"]
    contexts = [*cell(context=128), *cell(context=256)]
    assert column(compare(contexts, contexts), "cell") == ["small context 128", "small context 256"]
    homemade = [*entries("x", {"knob": 3}, {"step_time": STEADY}), *entries("x", {"knob": 4}, {"step_time": STEADY})]
    assert column(compare(homemade, homemade), "cell") == ["knob 3", "knob 4"]


def test_names_have_no_more_fields_than_tell_rows_apart():
    """Lists, and how it was measured, only where nothing else differs."""

    def rivals(shape, **fields):
        return entries("x", {"size": shape, **fields}, {"step_time": STEADY})

    records = [*rivals("a", rounds=3, implementations=[1]), *rivals("b", rounds=4, implementations=[2])]
    assert column(compare(records, records), "cell") == ["a", "b"]
    records = [*rivals("a", rounds=3, implementations=[1]), *rivals("a", rounds=3, implementations=[2])]
    assert column(compare(records, records), "cell") == ["a implementations [1]", "a implementations [2]"]


def test_one_experiment_of_several():
    records = [*cell(), *cell(experiment="precision", precision="bf16")]
    assert column(compare(records, records), "experiment") == ["bench", "precision"]
    assert column(compare(records, records, experiments=("precision",)), "experiment") == ["precision"]


def test_a_measurement_that_several_experiments_share_is_one_row():
    """`run` measures a cell once and records it under every experiment that asks for it."""
    a, b = ([*cell(times(factor)), *cell(times(factor), experiment="precision")] for factor in (1, 2))
    found = compare(a, b)
    assert (column(found, "experiment"), column(found, "B / A")) == (["bench"], ["2.000"])
    assert notes(found, "1 row left out: the same measurements under other experiments")
    assert len(compare(a, [*cell(), *cell(times(2), experiment="precision")]).rows) == 2


# -- order and mean ---------------------------------------------------------------------------------------------------


def several(*factors, **fields):
    """Two sides with a cell for each factor."""
    contexts = [2 ** (5 + number) for number in range(len(factors))]
    b = [
        item for context, factor in zip(contexts, factors, strict=True) for item in cell(times(factor), context=context)
    ]
    return [item for context in contexts for item in cell(context=context)], b


def test_the_largest_change_comes_first_and_the_undecided_last():
    a, b = several(1.001, 1.1, 0.5, 1.0, 1.3)
    failed = cell(context=8, status="oom: too much")
    one_sample = cell((0.5,), context=16)
    odd = cell((math.nan,), context=17)
    found = compare([*a, *cell(context=8), *cell(context=16), *cell(context=17)], [*b, *failed, *one_sample, *odd])
    assert column(found, "B / A") == ["", "0.500", "1.300", "1.100", "5.000", "1.001", "1.000", ""]
    assert verdicts(found)[:2] == ["failed in B", "faster"]
    assert {verdict.en: count for verdict, count in found.counts.items()} == {
        **{"failed in B": 1, "faster": 1, "slower": 2, "undecided": 4}
    }


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=8), st.randoms())
def test_the_order_does_not_depend_on_the_files(factors, random):
    a, b = several(*factors)
    mixed_a, mixed_b = (random.sample(side, len(side)) for side in (a, b))
    here, there = compare(a, b), compare(mixed_a, mixed_b)
    assert sorted(row.name for row in here.rows) == sorted({row.name for row in there.rows})
    for found in (here, there):
        groups = [(row.verdict.en == "undecided", -row.change) for row in found.rows]
        assert groups == sorted(groups)
    assert [row.change for row in here.rows] == [row.change for row in there.rows]


RATIOS = st.builds(
    lambda value, below, above: Ratio(value, value / below, value * above),
    st.floats(1e-90, 1e90),
    st.floats(1, 10),
    st.floats(1, 10),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(RATIOS, min_size=1, max_size=20))
def test_the_geometric_mean_is_among_the_ratios(ratios):
    mean = geometric_mean(ratios)
    slack = 1 + 1e-9
    assert min(r.value for r in ratios) / slack <= mean.value <= max(r.value for r in ratios) * slack
    assert min(r.low for r in ratios) / slack <= mean.low <= mean.value * slack
    assert mean.value / slack <= mean.high <= max(r.high for r in ratios) * slack
    back = geometric_mean([Ratio(1 / r.value, 1 / r.high, 1 / r.low) for r in ratios])
    assert (back.value, back.low, back.high) == pytest.approx((1 / mean.value, 1 / mean.high, 1 / mean.low))


def test_geometric_means():
    assert geometric_mean([Ratio(2.0, 1.0, 4.0)] * 4) == Ratio(*map(pytest.approx, (2.0, 2**0.5, 2**1.5)))
    assert geometric_mean([Ratio(0.5), Ratio(2.0, 1.9, 2.1)]) == Ratio(pytest.approx(1.0))


def test_a_mean_for_each_unit():
    def side(factor):
        more = {"peak_memory": (factor * GIB,) * 3}
        return [item for context in (64, 128) for item in cell(times(factor), context=context, metrics=more)]

    found = compare(side(1), side(2), metrics=("step_time", "peak_memory"))
    means = {(mean.unit, round(mean.ratio.value, 6), mean.count, mean.verdict.en) for mean in found.means}
    assert means == {("B", 2, 2, "more"), ("s", 2, 2, "slower")}
    assert compare(cell(), cell()).means == [], "one row is its own mean"


@pytest.mark.parametrize("odd", [(0.1,), (math.nan, 0.1, 0.2)])
def test_rows_without_an_interval_are_not_in_the_mean(odd):
    a, b = several(1.5, 1.5)
    found = compare([*a, *cell(context=8)], [*b, *cell(odd, context=8)])
    (mean,) = found.means
    assert (round(mean.ratio.value, 6), mean.count) == (1.5, 2)


# -- what is the same work --------------------------------------------------------------------------------------------


def test_how_it_was_measured_is_noted_once():
    other = {"warmup_steps": 2, "num_steps": 5, "seed": 1, "device": "cuda:1"}
    b = [*cell(times()[:5], **other), *cell(times()[:5], size="large", **other)]
    found = compare([*cell(), *cell(size="large")], b)
    assert (column(found, "cell"), column(found, "n")) == (["small", "large"], ["10, 5"] * 2)
    (note,) = notes(found, "measured differently")
    for part in ("warm-up 5 in A, 2 in B", "num_steps 10 in A, 5", "seed 0 in A, 1", "device cuda in A, cuda:1"):
        assert part in note
    assert not notes(found, "different work")


def test_where_it_was_measured_is_noted_once():
    changes = {"gpu": "H100", "torch": "2.13", "git_commit": "b" * 40, "git_dirty": True, "triton": "3.7", "utc": "9"}
    other = dataclasses.replace(GPU, **changes)
    found = compare([*cell(), *cell(size="large")], [*cell(environment=other), *cell(size="large", environment=other)])
    (note,) = notes(found, "environment")
    for part in ("gpu H200 in A, H100 in B", "torch 2.11 in A, 2.13", "triton unknown in A, 3.7", "no in A, yes"):
        assert part in note
    assert "git_commit aaaaaaaaaa in A, bbbbbbbbbb in B" in note
    assert "utc" not in note
    assert "H100, H200" in table(found).title.en


def test_the_time_of_day_and_the_name_of_a_size_do_not_matter():
    found = compare(cell(size="2.7B"), cell(size="2026/xl", environment=dataclasses.replace(GPU, utc="later")))
    assert len(found.rows) == 1
    assert not notes(found, "environment")


def test_cells_that_differ_only_in_warm_up_stay_apart():
    records = [*cell(experiment="warmup", warmup_steps=0), *cell(times(2), experiment="warmup", warmup_steps=5)]
    found = compare(records, records)
    assert column(found, "cell") == ["small warm-up 0", "small warm-up 5"]
    assert verdicts(found) == ["undecided"] * 2


def test_ambiguous_cells_are_not_paired():
    a = [*cell(), *cell(warmup_steps=1), *cell(warmup_steps=2)]
    b = [*cell(), *cell(warmup_steps=3), *cell(warmup_steps=4)]
    found = compare(a, b)
    assert column(found, "cell") == ["small"]
    assert notes(found, "2 cells of A without a partner in B")
    assert notes(found, "2 cells of B without a partner in A")


def test_cells_of_one_file_are_counted_and_a_few_named():
    more = [item for context in (64, 128, 256, 1024) for item in cell(context=context)]
    (note,) = notes(compare([*cell(), *more], cell()), "partner in B")
    named = ", ".join(f"bench small {context} train-step fp32" for context in (64, 128, 256))
    assert note == f"4 cells of A without a partner in B: {named}, ..."


@pytest.mark.parametrize(
    ("fields", "named", "way_out"),
    [
        ({"precision": "bf16"}, "precision fp32 in A, bf16 in B", False),
        ({"size": "large"}, "size small in A, large in B", False),
        ({"context": 128}, "context 512 in A, 128 in B", False),
        ({"batch_size": 8}, "batch 4 in A, 8 in B", False),
        ({"attention": "sdpa"}, "attention reference in A, sdpa in B", True),
        ({"device": "cpu"}, "device cuda in A, cpu in B", True),
        ({"fast": "on"}, "fast off in A, on in B", True),
        ({"experiment": "precision"}, "experiment bench in A, precision in B", True),
    ],
)
def test_different_work_is_refused(fields, named, way_out):
    message = refusal(cell(), cell(**fields))
    assert message.startswith("A and B did different work")
    assert named in message
    assert ("--different_work" in message) == way_out
    if way_out:
        found = compare(cell(), cell(times(0.5), **fields), different_work=True)
        assert verdicts(found) == ["faster"]
        assert notes(found, f"different work: {named}")
    else:
        assert "size, context, batch, mode and precision" in refusal(cell(), cell(**fields), different_work=True)


def test_one_baseline_against_several_settings():
    variants = [*cell(times(0.9), fast="kernels"), *cell(times(0.5), fast="on")]
    found = compare(cell(), variants, different_work=True)
    assert column(found, "cell") == ["small fast off -> on", "small fast off -> kernels"]
    assert column(found, "B / A") == ["0.500", "0.900"]


def test_the_same_work_comes_before_different_work():
    a = [*cell(), *cell(attention="sdpa")]
    b = [*cell(attention="sdpa"), *cell(attention="auto")]
    found = compare(a, b, different_work=True)
    assert column(found, "cell") == ["small reference -> auto", "small sdpa"]


# -- what is wrong with records ---------------------------------------------------------------------------------------


def test_a_cell_that_failed_or_was_interrupted_on_one_side_is_shown():
    found = compare(cell(), cell(status="oom: needs 99.9 GiB of 24.0 GiB"))
    assert (column(found, "A"), column(found, "B"), verdicts(found)) == (["100.0"], ["OOM"], ["failed in B"])
    assert notes(found, "failed in B: bench small 512 train-step fp32: oom: needs 99.9 GiB of 24.0 GiB")
    assert verdicts(compare(cell(), [item for item in cell() if item.metric != CELL_TIME])) == ["failed in B"]
    back = compare(cell(status="error: crashed"), cell())
    assert (column(back, "A"), column(back, "B"), verdicts(back)) == (["error"], ["100.0"], ["failed in A"])


def test_a_cell_that_failed_on_both_sides_is_remarked_on():
    failed = cell(size="large", status="oom: too much")
    found = compare([*cell(), *failed], [*cell(), *failed])
    assert column(found, "cell") == ["small"]
    assert len(notes(found, "oom: too much")) == 2
    assert "failed in both" in refusal(failed, failed)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, -1.0, 1e-200, "fast"])
def test_samples_that_are_no_times(odd):
    for sides in ((cell(), cell((*STEADY, odd))), (cell((odd, *STEADY)), cell())):
        found = compare(*sides)
        assert verdicts(found) == ["undecided: invalid values"]
        assert found.slower_by(5) == []
        assert all(table(found).render(format) for format in FORMATS)


def test_units_that_differ():
    other = [dataclasses.replace(item, unit="ms") for item in cell()]
    assert verdicts(compare(cell(), other)) == ["undecided: units differ"]


@pytest.mark.parametrize("sample", [None, True, [], {}, 10**400, 1e200])
def test_records_with_fields_of_the_wrong_type_are_left_out(sample):
    found = compare(cell(), [*cell(), *cell((sample,), size="large")], files=("a", "b.jsonl"))
    assert len(found.rows) == 1
    assert notes(found, "b.jsonl: 1 record with fields of the wrong type left out")


HOSTILE = "\x1b[31m\n| a | b |\r\\end{table}#`$<b>\u202e\ud800" + 500 * "x"


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_names(format):
    def dressed(records):
        return [
            dataclasses.replace(
                item, experiment=HOSTILE, config={**item.config, "size": HOSTILE, HOSTILE: item.config["mode"]}
            )
            for item in records
        ]

    a, b = (dressed([*cell(), *cell(mode="forward"), *cell(mode=mode)]) for mode in ("inference", "forward-backward"))
    text = table(compare(a, b, files=(HOSTILE, HOSTILE))).render(format)
    assert not any(char in text for char in "\x1b\r\u202e\ud800")
    assert max(map(len, text.splitlines())) < 2500
    assert "\x1b" not in refusal(a, cell())


AB = {"files": ("a.jsonl", "b.jsonl")}
KNOBS = [entries("x", {"knob": knob}, {"step_time": STEADY}) for knob in (3, 4)]
REFUSED = {
    "first file empty": ([], cell(), AB, ["'a.jsonl' holds no records"]),
    "second file empty": (cell(), [], AB, ["'b.jsonl' holds no records"]),
    "no such experiment": (cell(), cell(), {"experiments": ("astrology",)}, ["no experiment astrology; it has: bench"]),
    "no such metric": (
        *(cell(), cell(metrics={"loss_time": STEADY})),
        *({"metrics": ("loss_time",)}, ["loss_time", "step_time"]),
    ),
    "no shape": (*KNOBS, {}, ["knob 3 in A, 4 in B"]),
    "no shape, loosely": (*KNOBS, {"different_work": True}, ["nothing to compare"]),
    **{
        f"confidence {value}": (cell(), cell(), {"confidence": value}, [repr(value)])
        for value in (0.0, 0.49, 1.0, -1.0, 95.0, math.nan)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_reason(case):
    a, b, options, named = REFUSED[case]
    assert all(word in refusal(a, b, **options) for word in named)


# -- the command line -------------------------------------------------------------------------------------------------


def files(a, b):
    for name, records in (("a.jsonl", a), ("b.jsonl", b)):
        record.append(name, records)


@pytest.mark.parametrize(("text", "percent"), [("5%", 5), ("5", 5), ("0", 0), ("0.5%", 0.5), (" 12.25% ", 12.25)])
def test_percentages(text, percent):
    assert parse_percent(text) == percent


@pytest.mark.parametrize("text", ["0.05", "2.5", "-5%", "", "%", "5 %%", "five", "nan", "inf%", "1e3", "٣", "9" * 400])
def test_other_texts_are_no_percentages(text):
    with pytest.raises(UserError, match="percentage"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("factor", "limit", "code"), [(1.10, "5%", 1), (1.10, "15%", 0), (1.052, "5%", 0), (0.9, "5%", 0), (1.10, None, 0)]
)
def test_exit_codes(factor, limit, code, capsys):
    """At 1.052 the interval reaches below 1.05: slower, but not surely by more than that."""
    files(cell(), cell(times(factor)))
    assert exit_code(["compare", "a.jsonl", "b.jsonl", *(["--fail_if_slower", limit] if limit else [])]) == code
    printed = capsys.readouterr()
    assert ("slower" if factor > 1 else "faster") in printed.out
    said = "1 of 1 rows slower by more than 5% (the lower end of the 95% interval counts), such as: bench small"
    assert (said in printed.err) == (code == 1)


def test_a_limit_says_of_how_many_rows_it_knows_nothing(capsys):
    files([*cell(), *cell((0.1,), size="large")], [*cell(), *cell((0.9,), size="large")])
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--fail_if_slower", "5%"]) == 0
    assert "cannot tell in 1 of 2 rows" in capsys.readouterr().err


def test_a_row_that_is_named_after_its_experiment_has_the_name_once(capsys):
    config = {"ranks": 2, "calls": 10}
    files(*(entries("collectives", config, {"step_time": times(factor)}) for factor in (1, 2)))
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--fail_if_slower", "5%"]) == 1
    assert capsys.readouterr().err.strip().endswith("such as: collectives")


def test_offered_metrics_have_a_unit():
    """Bare numbers are mostly settings of an instrument, such as the addend of a sum."""
    sides = [
        [
            dataclasses.replace(item, unit="1") if item.metric == "term" else item
            for item in cell(metrics={"term": (0.1,)})
        ]
        for _ in "AB"
    ]
    said = refusal(*sides, metrics=("nope",))
    assert "step_time" in said
    assert "term" not in said
    assert CELL_TIME not in said


# -- training runs ----------------------------------------------------------------------------------------------------


def training(output, *, losses=(4.0, 3.0), seconds=STEADY, restarted=False, **fields):
    """Records of a run as `cs336 train` writes them: stretches of ten steps; a restart trains the last one again."""
    config = {"output": output, "size": "tiny", "context_length": 64, "batch_size": 4, "warmup_steps": 2, **fields}
    found = entries("train", {**config, "first_step": 1, "started": output}, {"ranks": (1.0,)})
    for place, loss in enumerate([*losses, *losses[-1:] * restarted]):
        first = 1 + 10 * min(place, len(losses) - 1)
        noise = 5.0 if restarted and place == len(losses) - 1 else 0.0  # the values before the restart
        samples = {"step_time": seconds, "loss": tuple(loss + noise + 0.01 * step for step in range(10))}
        found += entries("train", {**config, "first_step": first}, samples)
    found += entries("train", {**config, "first_step": 20}, {"validation_loss": (losses[-1] + 0.5,)})
    return [
        dataclasses.replace(item, unit="1" if "loss" in item.metric else item.unit)
        for item in found
        if item.metric != CELL_TIME
    ]


def test_training_runs_are_compared_as_wholes():
    """Step times and the losses at the end; the output folder and what is saved are not part of the work."""
    found = compare(training("runs/a", save_every=10), training("runs/b", losses=(4.0, 2.0), seconds=times(1.1)))
    assert [(row.metric, row.verdict.en) for row in found.rows] == [
        ("final_loss", "less"),
        ("step_time", "slower"),
        ("final_validation_loss", "undecided: n = 1"),
    ]
    a, b = found.rows[0].sides
    assert a.samples("final_loss") == tuple(3.0 + 0.01 * step for step in range(10))
    assert len(a.samples("step_time")) == 20
    assert b.samples("final_validation_loss") == (2.5,)
    assert notes(found, "save_every")


def test_steps_that_were_trained_twice_count_once():
    (row, *_) = compare(training("runs/a"), training("runs/b", restarted=True), metrics=("final_loss",)).rows
    assert row.sides[0].samples("final_loss") == row.sides[1].samples("final_loss")


@pytest.mark.parametrize("options", [{}, {"different_work": True}], ids=str)
def test_different_training_runs_point_to_the_report(options):
    said = refusal(training("runs/a"), training("runs/b", batch_size=8, warmup_steps=5), **options)
    assert said.endswith("; training runs side by side: cs336 report A B")
    assert ("learning_rate_warmup 2 in A, 5 in B" in said) == (not options)


def test_a_limit_on_slowness_is_for_the_times_of_a_run(capsys):
    files(training("runs/a"), training("runs/b", losses=(4.0, 9.0)))
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--fail_if_slower", "5%"]) == 0
    assert "cannot tell" not in capsys.readouterr().err


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, capsys):
    files(cell(), cell(times(1.1), warmup_steps=3))
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--format", format]) == 0
    printed = capsys.readouterr()
    assert all(word in printed.out for word in ("1.100", "slower", "small", "step"))
    assert ("warm-up 5 in A, 3 in B" in printed.out) == (format != "csv")
    assert ("warm-up 5 in A, 3 in B" in printed.err) == (format == "csv"), "CSV has no place for notes"


def test_flags_reach_the_comparison(capsys):
    files(cell(metrics={"loss_time": STEADY}), cell(attention="sdpa", metrics={"loss_time": STEADY}))
    assert exit_code(["compare", "a.jsonl", "b.jsonl"]) == 2
    flags = ["--different_work", "--metric", "loss_time", "--experiments", "bench", "--confidence", "0.9"]
    capsys.readouterr()
    assert exit_code(["compare", "a.jsonl", "b.jsonl", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("loss_time", "90% interval", "reference in A, sdpa in B"))


BAD_ARGUMENTS = {
    "no files": [],
    "one file": ["a.jsonl"],
    "three files": ["a.jsonl", "b.jsonl", "c.jsonl"],
    "missing file": ["a.jsonl", "missing.jsonl"],
    "folder": ["a.jsonl", "."],
    "no percentage": ["a.jsonl", "b.jsonl", "--fail_if_slower=0.05"],
}


LINE = cell()[0].to_json()
BAD_FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 4,
    "other": b"a,b\n1,2\n",
    "config": LINE.replace('"config":{', '"config":null,"old":{').encode() + b"\n",
    "environment": LINE.replace('"environment":{', '"environment":[],"old":{').encode() + b"\n",
    "metric": LINE.replace('"metric":"', '"metric":[],"old":"').encode() + b"\n",
}


@pytest.mark.parametrize("case", [*BAD_ARGUMENTS, *BAD_FILES])
def test_mistakes_are_one_line(case, capsys, tmp_path):
    files(cell(), cell())
    (tmp_path / "odd.jsonl").write_bytes(BAD_FILES.get(case, b""))
    either_side = [["a.jsonl", "odd.jsonl"], ["odd.jsonl", "b.jsonl"]]
    for argv in [BAD_ARGUMENTS[case]] if case in BAD_ARGUMENTS else either_side:
        assert_refused(["compare", *argv], [], capsys)


def test_a_torn_line_is_remarked_on(capsys, tmp_path):
    files(cell(), cell())
    with open("b.jsonl", "a") as file:
        file.write('{"experiment":"ben')
    assert exit_code(["compare", "a.jsonl", "b.jsonl"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("b.jsonl: the last line is torn")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SAMPLE = json.loads(cell()[0].to_json())
PLACES = [
    *((name,) for name in SAMPLE),
    *((outer, name) for outer in ("config", "environment") for name in SAMPLE[outer]),
    *(("config", "model", name) for name in SAMPLE["config"]["model"]),
    ("samples", 0),
]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=1, max_size=3),
    in_both=st.booleans(),
    loosely=st.booleans(),
)
@example(changes=[(("environment", "gpu"), [])], in_both=True, loosely=False)
@example(changes=[(("config", "batch_size"), {})], in_both=True, loosely=True)
def test_any_value_anywhere_is_no_traceback(changes, in_both, loosely, tmp_path):
    """Fields of some records replaced by whatever JSON can hold: a table, or one line that says why not."""
    whole = [json.loads(item.to_json()) for item in (*cell(), *cell(size="large"))]
    changed = copy.deepcopy(whole)
    for item in changed[:2]:
        for place, value in changes:
            replace(item, place, value)
    for name, items in (("a.jsonl", changed if in_both else whole), ("b.jsonl", changed)):
        (tmp_path / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    with contextlib.suppress(UserError):
        found = compare(record.load("a.jsonl").records, record.load("b.jsonl").records, different_work=loosely)
        assert found.slower_by(5) == []
        assert all(table(found).render(format) for format in FORMATS)


def replace(item, place, value):
    """Unless an earlier change has taken the place away."""
    *path, last = place
    for name in path:
        item = item[name] if isinstance(item, dict) and name in item else None
    if isinstance(item, dict) or (isinstance(item, list) and last == 0 and item):
        item[last] = value


def test_output_does_not_depend_on_the_hash_seed_and_needs_no_torch(tmp_path):
    files([*cell(), *cell(size="large")], [*cell(times(1.2)), *cell(size="large")])
    argv = ["compare", "a.jsonl", "b.jsonl", "--fail_if_slower", "5%"]
    program = (
        f"import sys; from cs336_systems.cli import main; code = main({argv!r}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    results = [
        execute(sys.executable, "-c", program, cwd=tmp_path, env=clean_env(PYTHONHASHSEED=seed)) for seed in "12"
    ]
    assert [result.returncode for result in results] == [1, 1], results[0].stderr
    assert results[0].stdout == results[1].stdout
