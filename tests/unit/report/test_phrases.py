"""Phrases of findings: comparisons that read right for ratios below, at and above 1, of one cell and of several."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.report.phrases import (
    SAME,
    beside,
    compared,
    ended,
    error_text,
    is_same,
    longer,
    memory_beside,
    ranging,
    times_text,
    together,
)
from cs336_systems.text import Text

X, Y, NOWHERE = Text("X", "甲"), Text("Y", "乙"), Text("")
SMALL, LARGE = Text("small"), Text("large")
COMPARED = {
    ((1.3, NOWHERE),): ("X is 1.3 times as fast as Y.", "甲的速度是乙的 1.3 倍。"),
    ((0.02, SMALL),): ("X takes 50 times as long as Y (small).", "甲的用时是乙的 50 倍（small）。"),
    ((1.004, NOWHERE),): ("X is as fast as Y, within 2%.", "甲与乙一样快，相差不超过 2%。"),
    ((0.99, SMALL),): ("X is as fast as Y (small), within 2%.", "甲与乙一样快（small），相差不超过 2%。"),
    ((0.99, SMALL), (1.0, LARGE)): ("X is as fast as Y, within 2%.", "甲与乙一样快，相差不超过 2%。"),
    ((2.0, SMALL), (2.01, LARGE)): ("X is 2.0 times as fast as Y.", "甲的速度是乙的 2.0 倍。"),
    ((1.2, SMALL), (5.8, LARGE)): (
        "X is 1.2 (small) to 5.8 (large) times as fast as Y.",
        "甲的速度是乙的 1.2（small）到 5.8（large）倍。",
    ),
    ((0.5, SMALL), (0.25, LARGE)): (
        "X takes 2.0 (small) to 4.0 (large) times as long as Y.",
        "甲的用时是乙的 2.0（small）到 4.0（large）倍。",
    ),
    ((0.5, SMALL), (3.0, LARGE)): (
        "X is at best 3.0 times as fast as Y (large), and at worst takes 2.0 times as long (small).",
        "甲最好时速度是乙的 3.0 倍（large），最差时用时是其 2.0 倍（small）。",
    ),
    ((1.0, SMALL), (3.0, LARGE)): (
        "X is at best 3.0 times as fast as Y (large), and at worst as fast (small).",
        "甲最好时速度是乙的 3.0 倍（large），最差时一样快（small）。",
    ),
    ((1.0, SMALL), (0.5, LARGE)): (
        "X is at best as fast as Y (small), and at worst takes 2.0 times as long (large).",
        "甲最好时与乙一样快（small），最差时用时是其 2.0 倍（large）。",
    ),
}


@pytest.mark.parametrize("found", COMPARED, ids=str)
def test_compared(found):
    assert ended(compared(X, Y, found)) == COMPARED[found]


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), 0.0, -1.0])
def test_ratios_that_cannot_be_measured_are_not_stated(ratio):
    with pytest.raises(ValueError, match="finite and above 0"):
        compared(X, Y, [(ratio, NOWHERE)])


@given(ours=st.floats(1e-6, 1e4), other=st.floats(1e-6, 1e4))
def test_the_stated_ratio_is_that_of_the_slower_over_the_faster(ours, other):
    for said in (compared(X, Y, [(other / ours, NOWHERE)]), beside(other / ours, Y)):
        found = re.search(r"([\d,.]+) times as (fast|long)", said.en)
        if is_same(other / ours):
            assert found is None
            continue
        assert found is not None
        slower = max(ours, other) / min(ours, other)
        assert (found[1], found[2]) == (times_text(slower), "fast" if ours < other else "long")
        assert f"{found[1]} 倍" in said.zh
        assert ("速度" in said.zh) == (ours < other)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (2.0, "X takes 2.0 times as long as Y"),
        (0.5, "Y takes 2.0 times as long as X"),
        (1 / SAME, "X takes as long as Y, within 2%"),
    ],
)
def test_longer_names_what_takes_longer_first(ratio, said):
    assert longer(X, Y, ratio).en == said


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.94, 1.02], "its peak memory is 0.94 to 1.02 times that of Y"),
        ([1.0, 1.01], "its peak memory is that of Y, within 2%"),
        ([0.003], "its peak memory is 0.003 times that of Y"),
        ([12.0], "its peak memory is 12 times that of Y"),
    ],
)
def test_memory_beside(ratios, said):
    found = memory_beside(ratios, Y)
    assert found is not None
    assert found.en == said
    assert memory_beside([], Y) is None


def test_a_single_value_has_its_name_at_the_end():
    assert ranging("it is {} of {}", "占 {1} 的 {0}", [(0.5, SMALL)], "{:.0%}".format, Y).en == "it is 50% of Y (small)"


def test_sentences_begin_with_a_capital_unless_with_a_name():
    said = together(Text("our kernel is fast", "快"), together(Text("cuDNN is slow", "慢"), Text("it is", "是")))
    assert said is not None
    assert ended(said) == ("Our kernel is fast. cuDNN is slow. It is.", "快。慢。是。")
    assert ended(Text("bf16 is fast", "bf16 快")).en == "bf16 is fast."
    assert together(None, X) == together(X, None) == X


def test_errors_below_what_is_shown_are_not_zero():
    assert [error_text(error).en for error in (0.0, 4e-5, 1e-4)] == ["less than 0.01%", "less than 0.01%", "0.01%"]
