"""Finds where a long text can be cut so that tokenizing both sides gives the tokens of the whole.

A tokenizer first divides text into words, and merges never cross them. Nearly all tokenizers of language models, such
as those of GPT-2, GPT-4, Llama 3 and Qwen, end a word at a line feed and at a space before a word. A cut is made

1. after a line feed between two characters that are not white space, or else
2. before a space between two characters that are not white space, or else
3. between any two characters.
"""

SEARCHED = 1 << 16
"""Bytes after the wanted position that are searched for a better one."""
MARGIN = 8
"""Bytes on both sides of a position, besides the separator's, that must be known to judge it."""
_LONGEST_CHARACTER = 4


def find_cut(data: bytes, wanted: int, separator: bytes = b"") -> int:
    """Return the first good position at or after `wanted` to cut a UTF-8 text, outside separators if possible.

    The result is at most SEARCHED bytes after `wanted`, and at most the length of the text.
    """
    last = min(wanted + SEARCHED, len(data))
    for mark, behind in ((b"\n", 1), (b" ", 0)):
        place = data.find(mark, max(wanted - behind, 1), last)
        while place >= 0:
            if _is_alone(data, place) and not _is_inside(data, place + behind, separator):
                return place + behind
            place = data.find(mark, place + 1, last)
    for place in range(wanted, last):
        if _begins_character(data[place]) and not _is_inside(data, place, separator):
            return place
    return min(next((p for p in range(wanted, last) if _begins_character(data[p])), wanted), len(data))


def pieces(data: bytes, size: int) -> list[bytes]:
    """Return a text in pieces of about `size` bytes."""
    found, begin = [], 0
    while len(data) - begin > size + SEARCHED:
        end = begin + find_cut(data[begin : begin + size + SEARCHED + MARGIN], size)
        found.append(data[begin:end])
        begin = end
    return [*found, data[begin:]]


def _is_alone(data: bytes, place: int) -> bool:
    """Return True if the characters on both sides of a byte exist and are not white space."""
    before = data[max(place - _LONGEST_CHARACTER, 0) : place].decode(errors="ignore")[-1:]
    after = data[place + 1 : place + 1 + _LONGEST_CHARACTER].decode(errors="ignore")[:1]
    return bool(before and after) and not before.isspace() and not after.isspace()


def _is_inside(data: bytes, place: int, separator: bytes) -> bool:
    reach = len(separator) - 1
    return reach > 0 and separator in data[max(place - reach, 0) : place + reach]


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80
