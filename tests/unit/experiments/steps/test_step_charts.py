"""Charts of the experiments on the time of a step."""

import pytest

from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.report.web.svg import svg
from tests.unit.experiments.steps.samples import SAMPLES
from tests.unit.report.page_cases import Page
from tests.unit.report.step_cells import OOM, cell, charts, step, values


def test_a_step_is_stacked_by_phase():
    (chart,) = charts(cell("end_to_end"), cell("end_to_end", mode="inference"), cell("end_to_end", size="xl"))
    assert chart.kind == "stacked"
    assert [series.name.en for series in chart.series] == ["forward", "backward", "optimizer"]
    assert values(chart.series[1]) == pytest.approx({"small": 60.0, "xl": 60.0}), "training steps alone"


def test_too_many_bars_are_not_drawn():
    assert charts(*(cell("end_to_end", batch_size=size) for size in range(1, 26))) == []


def test_steps_from_a_cold_start_are_a_line():
    (chart,) = charts(SAMPLES["warmup"])
    (series,) = chart.series
    assert values(series) == pytest.approx({1: 900.0, 2: 100.0, 3: 100.0})
    assert chart.log_y


def test_speed_ups_over_the_baseline():
    (chart,) = charts(SAMPLES["precision"], cell("precision", size="xl", precision="bf16"))
    (series,) = chart.series
    assert (series.name.en, values(series)) == ("bf16", pytest.approx({"small": 1.25, "2.7B": 3.0}))
    (chart,) = charts(SAMPLES["compile"])
    assert chart.y.en == "times as fast as eager"
    assert values(chart.series[0]) == pytest.approx({"small": 1.0 / 0.9})
    assert charts(cell("compile"), cell("compile", compile=True, status=OOM)) == []


def test_the_rival_is_placed_by_its_time():
    (chart,) = charts(
        cell("fast_step", fast="off", metrics=step(0.03)),
        cell("fast_step", fast="on", metrics=step(0.005)),
        cell("fast_step", model_factory=LLAMA, metrics=step(0.02)),
        cell("fast_step", fast="graph", metrics=step(0.01)),
    )
    assert chart.places == ["none", "Llama of transformers", "graph", "all"]
    tops = [(float(e["y"]), e["data-label"]) for e in Page(svg(chart)).all("rect") if "data-label" in e]
    assert [name for _, name in sorted(tops)] == chart.places


def test_measured_and_predicted_peaks_are_side_by_side():
    (chart,) = charts(SAMPLES["peak_memory"], cell("peak_memory", size="xl"))
    assert [values(series) for series in chart.series] == [
        {"small": 10.0, "xl": 10.0},
        pytest.approx({"small": 10.1, "xl": 10.1}),
    ]
