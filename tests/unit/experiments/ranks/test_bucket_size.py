"""`bucket_model`: the model of exposed communication, and its chart."""

import pytest

from cs336_systems.experiments.ranks.ddp_overlap import exposed
from tests.unit.experiments.ranks.samples import SAMPLES, charts, tables
from tests.unit.report.step_cells import values


@pytest.mark.parametrize(
    ("bucket", "backward", "expected"),
    [
        (100.0, 10.0, 1 + 100 / 10),  # one bucket: nothing is hidden
        (50.0, 10.0, 1 + 5 + 1),  # the second waits for the first, which ends 1 s after backward
        (10.0, 1000.0, 1 + 1.0),  # a slow backward hides all but the last
        (10.0, 0.0, 10 * (1 + 1.0)),  # no backward hides nothing
    ],
)
def test_exposed_follows_the_buckets(bucket, backward, expected):
    """100 bytes at 10 bytes a second, 1 s for each collective."""
    assert exposed(100.0, bucket, backward, 1.0, 10.0) == pytest.approx(expected)


def test_the_best_bucket_is_near_the_closed_form():
    total, bandwidth, latency = 100e6, 1e9, 1e-3
    sizes = [2.0**n * 1e5 for n in range(11)]
    times = [exposed(total, size, total / bandwidth, latency, bandwidth) for size in sizes]
    best, closed_form = sizes[times.index(min(times))], (total * bandwidth * latency) ** 0.5
    assert 0.5 <= best / closed_form <= 2


def test_table_and_chart_show_predicted_and_measured():
    cells = SAMPLES["bucket_model"]
    (table,), (chart,) = tables(cells), charts(*cells)
    assert [row[:2] for row in table.rows] == [["1.0", "8"], ["4.0", "2"]]
    assert [row[4] for row in table.rows] == ["30.00", "100.00"]
    kinds = [(series.name.en, series.dashed) for series in chart.series]
    assert kinds == [("measured", False), ("predicted", True), ("S / (n w) + n o", True)]
    assert values(chart.series[0]) == {1.0: pytest.approx(30.0), 4.0: pytest.approx(100.0)}
