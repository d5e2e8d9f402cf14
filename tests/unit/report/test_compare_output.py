"""A comparison as people see it: on a terminal, as a forest plot, as a page."""

import io
import re

import pytest

from cs336_systems.record import GIB
from cs336_systems.report.compare import compare
from cs336_systems.report.compare_output import chart, document, on_screen, on_terminal
from cs336_systems.report.points import FEW
from cs336_systems.report.web.page import page
from tests.helpers import exit_code
from tests.unit.report.compare_cells import STEADY, cell, entries, times
from tests.unit.report.test_compare import HOSTILE, files, several, with_variants

pytestmark = pytest.mark.usefixtures("elsewhere")


# -- the terminal -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def wide_comparison():
    """Rows whose names are as long as those of attention kernels."""
    fields = {"batch_size": 4, "heads": 16, "head_dim": 128, "seq_len": 16384, "is_causal": True, "knob": "k" * 20}
    sides = []
    for factor in (1, 1.2):
        own = [entries("x", {**fields, "head_dim": d}, {"step_time": times(factor)}) for d in (64, 128)]
        sides.append([*cell(times(factor)), *own[0], *own[1]])
    return compare(*sides, files=("a" * 30, "b" * 30))


def test_lines_fit_on_a_terminal(terminal):
    found = wide_comparison()
    lines = re.sub(r"\033\[\d+m", "", on_screen(found, terminal)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > len(on_terminal(found).splitlines())


def test_every_name_is_whole_on_a_narrow_terminal():
    found = wide_comparison()
    narrow = " ".join(on_terminal(found, 60).split())
    assert all(row.name.en in narrow for row in found.rows)


def test_the_ratio_comes_first_and_the_mean_last():
    a, b = several(0.5, 2.0, 1.0)
    lines = on_terminal(compare(a, b)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("B / A"))
    assert [line.split()[0] for line in lines[first + 2 : first + 5]] == ["0.500", "2.000", "1.000"]
    assert lines[-2] == "3 comparisons: 1 faster, 1 slower, 1 undecided"
    assert lines[-1].startswith("geometric mean of B / A over 3 rows: 1.000 (95% interval 0.9")


def test_settings_that_differ_come_before_the_rows():
    text = on_terminal(compare(cell(), cell(times(2), warmup_steps=1)))
    assert text.index("warm-up 5 in A, 1 in B") < text.index("2.000")


def test_colours_tell_faster_from_slower(terminal):
    a, b = several(0.5, 2.0, 1.0)
    text = on_screen(compare(a, b), terminal)
    assert "\033[32m0.500\033[0m" in text
    assert "\033[31m2.000\033[0m" in text
    assert not re.search(r"\033\[\d+m1\.000", text)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(name, value, terminal, monkeypatch):
    monkeypatch.setenv(name, value)
    assert "\033" not in on_screen(wide_comparison(), terminal)


def test_a_file_has_neither_colours_nor_broken_lines():
    found = wide_comparison()
    assert on_screen(found, io.StringIO()) == on_terminal(found)
    assert "\033" not in on_terminal(found)


def test_units_stand_in_the_heading_or_beside_values():
    metrics = {"peak_memory": (GIB,) * 3}
    one = on_terminal(compare(cell(), cell()))
    several_units = on_terminal(
        compare(cell(metrics=metrics), cell(metrics=metrics), metrics=("step_time", "peak_memory"))
    )
    assert "A (ms)" in one
    assert "100.0 ms" in several_units
    assert "1.00 GiB" in several_units
    assert "small, peak memory" in several_units


def test_hostile_names_do_not_reach_the_terminal():
    records = entries(HOSTILE, {"size": HOSTILE, HOSTILE: 3}, {"step_time": STEADY})
    for width in (80, 10_000):
        text = on_terminal(compare(records, records, files=(HOSTILE, HOSTILE)), width, colored=True)
        assert not any(char in text for char in "\x1b\r\u202e\ud800")


# -- the forest plot --------------------------------------------------------------------------------------------------


def names(series):
    return [point.label.en for point in series.points]


def test_a_row_for_each_cell_and_the_mean_last():
    found = compare(*several(2.0, 0.5, 1.0))
    drawn = chart(found)
    cells, mean = drawn.series
    assert [round(point.y, 6) for point in cells.points] == [0.5, 1.0, 2.0]
    assert all(point.low <= point.y <= point.high for series in drawn.series for point in series.points)
    assert names(mean) == ["geometric mean"]
    assert drawn.bar_names == [*names(cells), "geometric mean"]
    assert (drawn.kind, drawn.log_y, [limit.value for limit in drawn.limits]) == ("dots", True, [1.0])


@pytest.mark.parametrize("number", [FEW, FEW + 6])
def test_of_many_cells_the_largest_changes_are_drawn(number):
    factors = [1.01 + 0.01 * index for index in range(number)]
    a, b = ([], [])
    for index, factor in enumerate(factors):
        a += cell(context=64 + index)
        b += cell(times(factor), context=64 + index)
    drawn = chart(compare(a, b))
    assert [round(point.y, 6) for point in drawn.series[0].points] == pytest.approx(factors[-FEW:])
    assert (f"the {FEW} largest changes of {number}" in drawn.note.en) == (number > FEW)


def test_charts_use_the_names_of_readers():
    sides = [with_variants(sdpa_cudnn=factor, flash_hopper=factor) for factor in (1, 1.5)]
    assert names(chart(compare(*sides)).series[0]) == ["cuDNN", "ours, Hopper"]
    modes = [[*cell(times(f)), *cell(times(f), mode="inference", attention="sdpa")] for f in (1, 2)]
    assert set(names(chart(compare(*modes)).series[0])) == {"small, training step, naive", "small, inference, SDPA"}


def test_equal_names_have_rows_of_their_own():
    long = {"knob": "k" * 200}
    sides = [
        [*entries("x", {**long, "end": 1}, {"step_time": times(f)}), *entries("y", long, {"step_time": times(f)})]
        for f in (1, 2)
    ]
    drawn = chart(compare(*sides))
    assert len(drawn.bar_names) == 3


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_terminal_says():
    a, b = several(0.5, 2.0, 1.0)
    (section,) = document(compare(a, b)).sections
    said = " ".join(finding.en for finding in section.findings)
    assert "1 faster, 1 slower, 1 undecided" in said
    assert "Geometric mean" in said
    assert all(finding.zh for finding in section.findings)
    assert (len(section.charts), len(section.tables)) == (1, 1)
    assert section.tables[0].rows[0][0] == "0.500"


def test_a_page_without_ratios_has_no_chart():
    (section,) = document(compare(cell(), cell(status="oom: too much"))).sections
    assert section.charts == []
    assert page(document(compare(cell(), cell(status="oom: too much"))))


def test_output_writes_the_page(capsys, tmp_path):
    files(*several(0.5, 2.0))
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--output", "out/page"]) == 0
    written = (tmp_path / "out" / "page" / "index.html").read_text()
    assert "<svg" in written
    assert "geometric mean" in written
    assert "open in a browser: out/page/index.html" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(capsys, tmp_path):
    files(cell(), cell())
    (tmp_path / "taken").write_text("")
    assert exit_code(["compare", "a.jsonl", "b.jsonl", "--output", "taken"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'taken'" in line
