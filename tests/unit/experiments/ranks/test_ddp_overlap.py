"""`ddp`: exposed communication and the lanes of a step."""

import re
from dataclasses import replace

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Environment, Metric
from cs336_systems.report.cells import group
from cs336_systems.report.rows import percent
from tests.unit.experiments.ranks.samples import SAMPLES, arrangement_cell, charts, tables
from tests.unit.report.step_cells import values

TIMES = {"none": 10, "naive": 15, "torch DDP": 15}
LANES = [
    Metric("phase", "", ["forward", "backward"], "naive"),
    Metric("phase_start", "s", [0.0, 0.004], "naive"),
    Metric("phase_end", "s", [0.004, 0.010], "naive"),
    Metric("message", "", ["all_reduce"] * 2, "naive"),
    Metric("message_start", "s", [0.010, 0.012], "naive"),
    Metric("message_end", "s", [0.012, 0.015], "naive"),
]


def test_table_compares_with_no_wrapper_and_with_torch():
    (table,) = tables(SAMPLES["ddp"])
    assert table.rows[0] == ["none", "100.00", "100.00", "", "", "", "", "0.40x", ""]
    assert table.rows[1] == ["naive", "400.00", "", "", "200.00", "300.00", percent(-0.5, 0), "1.60x", "0.0e+00"]


def test_title_names_the_emulated_network():
    (table,) = tables([arrangement_cell("ddp", TIMES, link=[5e-3, 1e8])])
    assert table.title.en == (
        "ddp: averaging gradients, emulated network of 0.1 GB/s and 5 ms · unknown machine, 2 ranks, gloo, cuda, "
        "small, context 512, batch 4 on each rank"
    )
    assert table.title.zh == (
        "ddp：梯度平均，模拟 0.1 GB/s、5 ms 的网络 · unknown machine，2 个 rank，gloo，cuda，"
        "small，上下文长度 512，每个 rank 批大小 4"
    )


def test_exposed_communication_and_lanes():
    exposed, lanes = charts(arrangement_cell("ddp", TIMES, metrics=LANES))
    alone, felt = map(values, exposed.series)
    assert alone == {"naive DDP": 200, "PyTorch DDP": 200}
    assert felt == {"naive DDP": pytest.approx(5), "PyTorch DDP": pytest.approx(5)}
    assert (lanes.kind, lanes.name) == ("spans", "ddp-lanes")
    kinds = [(series.name.en, series.lane) for series in lanes.series]
    assert kinds == [("forward", 0), ("backward", 0), ("all-reduce", 1)]
    assert spans(lanes) == [("naive DDP", *ends) for ends in ((0, 4), (4, 10), (10, 12), (12, 15))]


def spans(chart):
    return [(point.place, point.start, point.y) for series in chart.series for point in series.points]


def test_lanes_draw_phases_at_their_medians_and_move_collectives_with_them():
    """The recorded step's forward takes 4 ms, usually 2; backward 6 ms, usually 3. The all-reduce starts there."""
    usual = [Metric("forward_time", "s", [0.002, 0.002, 0.02], "naive"), Metric("backward_time", "s", [0.003], "naive")]
    sent = [Metric("message", "", ["all_reduce"], "naive"), Metric("message_start", "s", [0.006], "naive")]
    sent.append(Metric("message_end", "s", [0.012], "naive"))
    _, lanes = charts(arrangement_cell("ddp", TIMES, metrics=[*LANES[:3], *usual, *sent]))
    drawn = [(start, end) for _, start, end in spans(lanes)]
    assert drawn == [pytest.approx(ends) for ends in ((0, 2), (2, 5), (3, 7))]


def test_a_wrapper_without_recorded_collectives_has_its_phases():
    phases = [metric._replace(variant="torch DDP") for metric in LANES[:3]]
    _, lanes = charts(arrangement_cell("ddp", TIMES, metrics=[*LANES, *phases]))
    assert lanes.bar_names == ["naive DDP", "PyTorch DDP"]


def test_the_highlight_compares_the_fastest_wrapper_with_naive():
    times = {"none": 100, "naive": 400, "overlap": 300, "bucketed 25": 200, "torch DDP": 50}
    cells = [arrangement_cell("ddp", times), arrangement_cell("ddp", times, link=[5e-3, 1e8])]
    (found,) = catalogue()["ddp"].highlights(cells)
    assert (found.rank, found.value.en, found.ratio) == (65, "2.0x", None)
    assert found.what.en == "training step with bucketed DDP (25 MB), against naive DDP"
    assert found.detail.en.endswith("200.00 ms, 400.00 ms")
    assert catalogue()["ddp"].highlights([arrangement_cell("ddp", {"none": 1, "naive": 2})]) == []
    assert catalogue()["ddp"].highlights(cells[1:]) == [], "an emulated network is no result"


def test_titles_say_that_ranks_share_a_gpu():
    (cell,) = SAMPLES["ddp"]
    one = Environment(gpu="NVIDIA H200", gpu_count=1)
    records = [replace(record, environment=one) for record in cell.records]
    (exposed,) = charts(*group(records))
    assert exposed.title.en == "Averaging gradients: small, 2 ranks sharing one GPU, gloo"


def test_charts_of_several_cells_have_different_names():
    cells = [arrangement_cell("ddp", times, metrics=LANES) for times in (TIMES, {"none": 1, "naive": 2}, {"naive": 1})]
    names = [chart.name for chart in charts(*cells)]
    assert names[:2] == ["ddp-1", "ddp-lanes"]
    assert len(set(names)) == len(names) == 6
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert charts(arrangement_cell("ddp", {"none": 10})) == []
