"""Texts for hypothesis to draw."""

from typing import Any

from hypothesis import strategies as st


def any_text(**options: Any) -> st.SearchStrategy[str]:
    """Draw from all characters that UTF-8 can encode. `st.text()` draws from the same characters, and takes three
    seconds in a fresh clone to ask the codec about each."""
    return st.text(st.characters(exclude_categories=["Cs"]), **options)
