"""Texts: the number of a noun."""

import pytest

from cs336_systems.text import counted


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (12_345, "12,345 steps")]
)
def test_a_counted_noun(count, expected):
    assert counted(count, "step") == expected
