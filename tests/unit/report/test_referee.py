"""The referee: which doubt becomes which remark, on which rows, in both languages."""

import dataclasses
import itertools

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import CELL_TIME, GIB
from cs336_systems.report.cells import group
from cs336_systems.report.first_screen import highlights_of
from cs336_systems.report.referee import GROUPS, Kind, Remark, doubt, doubts, remarks, status_text
from cs336_systems.report.rows import remarks_on
from cs336_systems.report.sections import findings_of
from cs336_systems.text import Text
from tests.unit.report.step_cells import CHINESE, CPU, GPU, OOM, cell, numbers, step

COLD = (0.9, *(0.1,) * 9)
NOISY = (*(0.1,) * 9, 0.2, *(0.1,) * 9)


def remarked(*cells):
    return remarks(group(itertools.chain(*cells)))


def gpu(**fields):
    return {"environment": dataclasses.replace(GPU, **fields)}


FAST = {"precision": "bf16", "attention": "auto", "fast": "on"}
H100 = {"environment": dataclasses.replace(GPU, gpu="NVIDIA H100 80GB HBM3")}
"""A GPU whose rates are those of its data sheet: ± 25%."""


def fast(seconds: float, predicted: float = 0.1, **fields):
    return {**FAST, "metrics": step(seconds, predicted_time=(predicted,)), **fields}


WRONG = {
    "slower than predicted": (fast(0.13), Kind.SLOWER_THAN_PREDICTED, ("130.00", "100.00")),
    "faster than predicted": (fast(0.08), Kind.FASTER_THAN_PREDICTED, ("80.00", "100.00")),
    "above the peak": ({"metrics": {"flops": (2e13,)}}, Kind.ABOVE_PEAK, ("200%",)),
    "tf32 in fp32": (gpu(tf32=True), Kind.TF32_IN_FP32, ()),
    "tf32 on a CPU": ({"device": "cpu", "precision": "tf32"}, Kind.TF32_ON_CPU, ()),
    "cold": ({"metrics": {"step_time": COLD}, "warmup_steps": 2}, Kind.COLD_AFTER_WARMUP, ("2",)),
    "cold without warm-up": ({"metrics": {"step_time": COLD}, "warmup_steps": 0}, Kind.COLD, ()),
    "noise": ({"metrics": {"step_time": NOISY}}, Kind.NOISY, ("5%",)),
    "unsettled": ({"metrics": {"step_time": (0.1, 0.12, 0.15, 0.2, 0.27, 0.35, 0.5)}}, Kind.UNSTEADY, ("5%",)),
    "throttled": (
        gpu(throttle_reasons=("power cap", "thermal")),
        Kind.THROTTLED,
        (Text("power cap, thermal", "功率上限、温度"),),
    ),
    "other processes": (gpu(other_gpu_processes=2), Kind.OTHER_PROCESSES, ()),
    "clocks": ({"metrics": {"step_event_time": (0.2,)}}, Kind.CLOCKS_DISAGREE, ()),
    "two graphs": ({"mode": "forward", "metrics": {"predicted_memory": (5 * GIB,)}}, Kind.TWO_GRAPHS, ()),
    "out of memory": ({"status": OOM}, Kind.FAILED, (status_text(OOM),)),
    "crash": ({"status": "error: crashed (SIGSEGV)"}, Kind.FAILED, (status_text("error: crashed (SIGSEGV)"),)),
}
RIGHT = {
    "near its prediction": fast(0.106),
    "near a data sheet's prediction": fast(0.13, **H100),
    "an unknown GPU": fast(1.0, environment=dataclasses.replace(GPU, gpu="Another GPU")),
    "a step without a CUDA graph": fast(1.0, 0.1, fast="kernels,loss,optimizer"),
    "at the peak": {"metrics": {"flops": (9.99e12,)}},
    "tf32 on in a bf16 row": {**gpu(tf32=True), "precision": "bf16"},
    "tf32 in a tf32 row": {**gpu(tf32=True), "precision": "tf32"},
    "first step barely slower": {"metrics": {"step_time": (0.104, *(0.1,) * 9)}},
    "two samples have no spread": {"metrics": {"step_time": (0.1, 0.12)}},
    "events within two percent of the wall clock": {"metrics": {"step_event_time": (0.1015,)}},
    "a training step above its prediction": {"metrics": {"predicted_memory": (6 * GIB,)}},
    "other processes unknown": gpu(other_gpu_processes=None),
    "a CPU": {"environment": CPU, "device": "cpu", "metrics": {"step_event_time": None}},
    "tf32 on in the GPU beside the CPU": {**gpu(tf32=True), "device": "cpu"},
}


@pytest.mark.parametrize("doubt", WRONG)
def test_a_doubt_is_one_remark_on_its_row(doubt):
    fields, kind, arguments = WRONG[doubt]
    (row,) = group(cell(**fields))
    (remark,) = remarked(cell(**fields), cell(size="large"))
    assert remark == Remark(kind, arguments, (Text(row.name),))
    assert remark.text.en.startswith(f"{row.name}: ")
    assert numbers(remark.text.en) == numbers(remark.text.zh)
    assert CHINESE.search(remark.text.zh)


@pytest.mark.parametrize("case", RIGHT)
def test_no_remark_on(case):
    assert remarked(cell(**RIGHT[case])) == []


def test_a_step_far_from_the_prediction_of_a_data_sheet_is_remarked():
    (remark,) = remarked(cell(**fast(1.6, 1.0, **H100)))
    assert (remark.kind, remark.arguments) == (Kind.SLOWER_THAN_PREDICTED, ("1,600.0", "1,000.0"))


def test_a_cell_without_an_end_was_interrupted():
    (remark,) = remarked(record for record in cell() if record.metric != CELL_TIME)
    assert remark.kind is Kind.INTERRUPTED


STATUSES = {
    OOM: "显存不足：需要 64.5 GiB，共有 24.0 GiB（预测，未尝试）",
    "oom: needs at least 9.0 GiB of 8.0 GiB": "显存不足：需要至少 9.0 GiB，共有 8.0 GiB",
    "oom: out of memory": "显存不足",
    "oom: NCCL": "显存不足：NCCL",
    "error: timeout after 600 s": "超时：超过 600 s",
    "error: ArithmeticError: wrong result: dq off by 3.1e-01, more than 0.02 in bf16": (
        "结果错误：dq 偏差 3.1e-01，超过 0.02（bf16）"
    ),
    "error: crashed (SIGSEGV): {0}": "出错：crashed (SIGSEGV): {0}",
    "a status of the future": "",
}


@pytest.mark.parametrize("status", STATUSES)
def test_status_in_both_languages(status):
    assert status_text(status) == Text(status, STATUSES[status])


# -- remarks on several rows ------------------------------------------------------------------------------------------


def test_forward_alone_cannot_be_slower_than_forward_and_backward():
    forward, both = cell(mode="forward", metrics=step(0.2)), cell(mode="forward-backward", metrics=step(0.1))
    assert remarked(forward, both) == [Remark(Kind.FORWARD_SLOWER, rows=(Text("small 512 fp32"),))]
    assert remarked(cell(mode="forward", metrics=step(0.1)), cell(mode="forward-backward", metrics=step(0.2))) == []


@pytest.mark.parametrize(
    "difference",
    [{"size": "large"}, {"batch_size": 8}, {"precision": "bf16"}, {"attention": "sdpa"}, {"compile": True},
     {"checkpoint_blocks": 4}, {"model_factory": "package.module:build"}, {"vocab": 50_257}],
    ids=str,
)  # fmt: skip
def test_forward_of_other_work_may_be_slower(difference):
    forward = cell(mode="forward", metrics=step(0.2), **difference)
    assert remarked(forward, cell(mode="forward-backward", metrics=step(0.1))) == []


def test_several_machines_in_one_table():
    (remark,) = remarked(cell(), cell(environment=dataclasses.replace(GPU, gpu="RTX 4090")))
    assert (remark.kind, remark.arguments, remark.rows) == (Kind.SEVERAL_MACHINES, ("2", "H200, RTX 4090"), ())
    assert remark.text.zh == "一张表中有 2 台机器的结果：H200, RTX 4090"


def test_a_remark_names_three_rows_at_most():
    sizes = ("tiny", "small", "medium", "large", "xl")
    throttled = [cell(size=size, **gpu(throttle_reasons=("thermal",))) for size in sizes]
    (every,) = remarked(*throttled)
    assert every.text == Text("all rows: the GPU held its clocks down (thermal)", "所有行：GPU 降频（温度）")
    (most,) = remarked(*throttled, cell(size="2.7B"))
    assert len(most.rows) == 5
    names = [f"{size} 512 train-step fp32" for size in sizes[:3]]
    assert most.text.en == f"{', '.join(names)} and 2 more: the GPU held its clocks down (thermal)"
    assert most.text.zh == f"{'，'.join(names)} 及另外 2 行：GPU 降频（温度）"
    (one,) = remarked(throttled[0])
    assert (one.on_all_rows, one.text.en.partition(":")[0]) == (False, "tiny 512 train-step fp32")


def test_rows_are_named_as_in_their_table():
    cells = group([*cell(warmup_steps=0, metrics={"step_time": COLD}), *cell()])
    assert remarks_on(cells, ["size", "warmup_steps"])[0] == Text(
        "small warm-up 0: the first measured step is far above the rest (cold): add --warmup_steps 5",
        "small 预热 0：第一个测量步远高于其余（冷启动）：加上 --warmup_steps 5",
    )


# -- conclusions from steps that vary too much ------------------------------------------------------------------------

WILD = (0.1, 0.3, 0.1, 0.4, 0.1)
EVEN, SLOW = (0.1,) * 5, (0.5,) * 5


@pytest.mark.parametrize(
    ("samples", "doubted"),
    [((WILD,), True), ((WILD, WILD, EVEN), True), ((WILD, SLOW, SLOW), True), ((EVEN,), False), ((COLD,), False)],
)
def test_conclusions_from_wild_steps_carry_a_warning(samples, doubted):
    records = (cell("end_to_end", metrics={"step_time": own}, seed=seed) for seed, own in enumerate(samples))
    cells = group(itertools.chain(*records))
    end_to_end = catalogue()["end_to_end"]
    findings, results = findings_of(end_to_end, cells), highlights_of({"end_to_end": end_to_end}, {"end_to_end": cells})
    assert findings
    assert results
    for texts in (findings[:1], [one.detail for one in results]):
        assert all(("nreliable" in text.en) == ("不可靠" in text.zh) == doubted for text in texts)


@pytest.mark.parametrize(
    ("samples", "doubted"), [((WILD,), True), ((WILD, WILD, EVEN), True), ((WILD, EVEN, EVEN), False), ((COLD,), False)]
)
def test_a_table_is_doubted_if_half_of_its_steps_are_wild(samples, doubted):
    records = (cell("end_to_end", metrics={"step_time": own}, seed=seed) for seed, own in enumerate(samples))
    assert (doubt(group(itertools.chain(*records))) is not None) == doubted


def test_a_comparison_with_one_wild_configuration_is_unreliable():
    """SDPA's steps vary by 32%, those of naive attention by 0: their median, 16%, is not above the limit."""
    sdpa = cell("bench", metrics={"step_time": (0.3, 0.5, 0.2, 0.35, 0.35)}, attention="sdpa")
    cells = group([*sdpa, *cell("bench", metrics={"step_time": EVEN}, attention="reference")])
    assert doubt(cells) is None
    bench = catalogue()["bench"]
    (first, *_) = findings_of(bench, cells)
    assert "It is 3.4 times as fast as the slowest" in first.en
    assert "Unreliable: single steps vary by 32% of their mean (small, SDPA), so measure again" in first.en
    assert "不可靠：单步时间的波动达均值的 32%（small，SDPA），请" in first.zh
    tiles = highlights_of({"bench": bench}, {"bench": cells})
    assert tiles[0].value.en == "20,480 tokens/s"
    assert not any("nreliable" in tile.detail.en for tile in tiles)  # of naive attention alone


def test_a_wild_configuration_that_a_conclusion_does_not_depend_on_is_not_named():
    cells = [cell("end_to_end", metrics={"step_time": own}, seed=seed) for seed, own in enumerate((WILD, EVEN))]
    found = group(itertools.chain(*cells))

    def means(cells):
        return [cells[1].value("step_time"), cells[0].value("step_time")]

    assert [bool(one) for one in doubts(means(found), means, found)] == [False, True]


def test_many_wild_configurations_are_shifted_in_groups():
    count = 3 * GROUPS
    records = (cell("end_to_end", metrics={"step_time": WILD}, seed=seed) for seed in range(count))
    cells, calls = group(itertools.chain(*records)), []

    def conclude(cells):
        calls.append(1)
        return [cells[0].value("step_time") / cells[GROUPS].value("step_time")]

    (warning,) = doubts(conclude(cells), conclude, cells, lambda cell: Text(str(cell.get("seed"))))
    assert "(0; 8; 16)" in warning.en
    assert len(calls) == 1 + 2 * GROUPS
