"""The first screen of a report: which numbers are large, the chart below them, the line of trust."""

from cs336_systems.report.cells import group
from cs336_systems.report.document import Highlight, Section
from cs336_systems.report.first_screen import MOST_BARS, MOST_NUMBERS, hero_of, highlights_of, numbers_of, trust_of
from cs336_systems.report.presentation import Presentation
from cs336_systems.text import Text
from tests.unit.report.page_cases import chart
from tests.unit.report.step_cells import OOM, cell
from tests.unit.report.test_side_by_side import OTHER


def highlight(rank, section="s", ratio=None, bar=""):
    return Highlight(rank, Text(f"{rank}x"), Text("w"), Text("d"), ratio, Text(bar) if bar else None, section)


def experiment(name, *ranks, **fields):
    def highlights(cells):
        return [highlight(rank, f"{len(cells)} cells") for rank in ranks]

    return Presentation(name=name, title=Text(name), question=Text(""), highlights=highlights, **fields)


def ranks(found):
    return [one.rank for one in found]


def test_highlights_of_all_experiments_are_sorted_and_know_their_section():
    experiments = {"a": experiment("a", 3, 1), "b": experiment("b", 2)}
    cells = {name: group([*cell(name), *cell(name, size="medium", status=OOM)]) for name in experiments}
    assert [(one.rank, one.section) for one in highlights_of(experiments, cells)] == [(1, "a"), (2, "b"), (3, "a")]


def test_odd_data_cost_highlights_never_the_report():
    def fail(cells):
        raise KeyError("missing")

    experiments = {"a": experiment("a", 1), "b": Presentation(name="b", title=Text("b"), question=Text(""))}
    experiments["c"] = Presentation(name="c", title=Text("c"), question=Text(""), highlights=fail)
    cells = {name: group(cell(name)) for name in experiments}
    assert ranks(highlights_of(experiments, cells)) == [1]
    assert highlights_of(experiments, {"a": []}) == []


def test_highlights_see_complete_cells_only_unless_no_cell_has_an_end():
    cells = {"a": group([*cell("a"), *cell("a", size="medium", status=OOM)])}
    for complete, count in ((True, 1), (False, 2)):
        seen = []
        one = Presentation(
            name="a", title=Text("a"), question=Text(""), complete_cells_only=complete,
            highlights=lambda cells, seen=seen: seen.extend(cells) or [],
        )  # fmt: skip
        highlights_of({"a": one}, cells)
        assert len(seen) == count


def test_highlights_of_several_machines_compare_them():
    cells = {"a": group([*cell("a"), *cell("a", environment=OTHER)])}
    found = highlights_of({"a": experiment("a", 1)}, cells)
    assert [one.what.en.split(":")[0] for one in found] == ["step", "peak memory"]


def test_the_numbers_are_of_different_sections_first():
    same = [highlight(rank, "a", ratio=2.0) for rank in range(1, 9)]
    found = numbers_of([*same, highlight(20, "a"), highlight(30, "b", ratio=1.5)])
    assert ranks(found) == [1, 2, 3, 20, 30]
    assert len(found) == MOST_NUMBERS
    assert numbers_of([]) == []


def test_the_chart_shows_speed_ups():
    bars = [highlight(n, ratio=n / 2, bar=f"bar {n}") for n in range(1, MOST_BARS + 5)]
    hero = hero_of([highlight(0), *bars, highlight(99, ratio=3.0)], [])
    assert hero.kind == "bars"
    (series,) = hero.series
    assert [(point.place, point.y) for point in series.points] == [(f"bar {n}", n / 2) for n in range(1, MOST_BARS + 1)]
    assert [limit.value for limit in hero.limits] == [1.0]


def test_without_two_speed_ups_the_chart_is_the_first_of_the_report():
    sections = [Section(name, Text(name), Text(""), charts=charts) for name, charts in (("a", []), ("b", [chart()]))]
    hero = hero_of([highlight(1, ratio=2.0, bar="alone")], sections)
    assert hero == chart()
    assert hero_of([], sections[:1]) is None


def test_trust_is_one_line_of_all_experiments_that_state_it():
    def said(number):
        return lambda cells: Text(f"{len(cells)} cells of {number}", f"{number} 的 {len(cells)} 项")

    experiments = [experiment("a", trust=said("a")), experiment("b"), experiment("c", trust=said("c"))]
    cells = {one.name: group([*cell(one.name), *cell(one.name, size="medium", status=OOM)]) for one in experiments}
    found = trust_of(experiments, cells)
    assert found.en.endswith("1 cells of a; 1 cells of c.")
    assert found.zh.endswith("a 的 1 项；c 的 1 项。")
    assert trust_of(experiments[1:2], cells) is None
