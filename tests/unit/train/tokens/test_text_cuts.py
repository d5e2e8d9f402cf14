"""Long texts are cut where tokenizers end a word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from cs336_systems.train.tokens import text_cuts
from cs336_systems.train.tokens.text_cuts import find_cut, pieces
from tests.unit.any_text import any_text
from tests.unit.train.tokens.conftest import SENTENCES

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Words of Llama 3 and, but for the digits, of GPT-4 and Qwen."""
WORDS = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": pre_tokenizers.Split(Regex(LLAMA), "isolated"),
}

PLAIN = st.text(st.sampled_from("ab1.,!' é猫"), min_size=1, max_size=8).map(lambda word: f"a{word}b")
LINES = st.lists(st.tuples(PLAIN, st.sampled_from([" ", "\n", "\n\n", "  \n ", "\r\n", "\u3000\n", "\t"])), max_size=40)


@pytest.mark.parametrize("kind", WORDS)
@given(lines=LINES, size=st.integers(5, 40))
@settings(max_examples=20, deadline=None)
def test_both_sides_have_the_words_of_the_whole(kind, lines, size):
    """There is always a good place after the wanted one: lines are shorter than what is searched."""
    data = ("".join(word + between for word, between in lines) + "a b\nc d").encode()
    whole = [word for word, _ in WORDS[kind].pre_tokenize_str(data.decode())]
    for wanted in range(0, data.rindex(b"\n"), size):
        place = find_cut(data, wanted)
        sides = [side for side in (data[:place].decode(), data[place:].decode()) if side]
        assert [word for side in sides for word, _ in WORDS[kind].pre_tokenize_str(side)] == whole


@given(text=any_text(), size=st.integers(1, 20), searched=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_any_text_is_cut_between_characters(text, size, searched):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cuts, "SEARCHED", max(searched, 4))
        found = pieces(text.encode(), size)
    assert b"".join(found) == text.encode()
    assert "".join(piece.decode() for piece in found) == text
    assert max(map(len, found)) <= size + max(searched, 4)


def test_a_cut_is_after_a_line_where_there_is_one():
    data = "".join(SENTENCES).encode()
    for wanted in range(0, 2000, 100):
        place = find_cut(data, wanted)
        assert data[place - 1 : place] == b"\n" or place == 0
        assert place >= wanted
