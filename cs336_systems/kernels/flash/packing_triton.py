"""The table of blocks of packed documents, made on the device by one small kernel.

A kernel that works on packed documents has a fixed number of programs, whatever the documents are. Program n reads line
n of a table: which rows of which document it has. Blocks never cross a document's end, so there are at most
`most_blocks` of them; the other lines stay 0, which is a block of a document of no rows.

Rows after the last document are one more document, which sees nothing and is seen by none: its results are 0.
"""

import triton
import triton.language as tl

ROW, FIRST_Q, LEN_Q, FIRST_K, LEN_K, SHIFT, PADDED_Q = (tl.constexpr(i) for i in range(7))
"""Fields of a line: first row of the block within its document; first row and length of the document among the queries
and among the keys; shift of the band for the mask's alignment; queries of the documents before, each document padded to
a multiple of PADDING."""
FIELDS = tl.constexpr(8)
PADDING = tl.constexpr(128)
AT_ONCE = tl.constexpr(128)
"""Documents that a program processes at a time."""
BLOCKS_AT_ONCE = tl.constexpr(32)

AS_PACKED, LONGEST_FIRST, DIAGONAL = (tl.constexpr(i) for i in range(3))
"""Orders of the lines: as the documents lie; blocks of the longest documents first; blocks that see the most under a
causal mask first, the last queries or the first keys of a document. The programs of the first lines start first."""


@triton.jit(
    do_not_specialize=["documents", "queries", "keys", "lines"],
    do_not_specialize_on_alignment=["table", "offsets_q", "offsets_k"],
)
def documents_kernel(
    table, offsets_q, offsets_k, documents, queries, keys, lines,
    ROWS: tl.constexpr, OF_KEYS: tl.constexpr, ORDER: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """Write the lines of one document: its blocks of ROWS queries, or of ROWS keys. `table` is initially 0."""
    document = tl.program_id(0)
    first_q, len_q = _document(offsets_q, document, documents, queries)
    first_k, len_k = _document(offsets_k, document, documents, keys)
    own = len_k if OF_KEYS else len_q
    blocks = tl.cdiv(own, ROWS)
    if OF_KEYS:  # nothing sees the rows after the last document, and they see nothing
        len_q = tl.where(document == documents, 0, len_q)
    else:
        len_k = tl.where(document == documents, 0, len_k)
    shift = len_k - len_q if BOTTOM_RIGHT else 0
    padded = _padded_before(offsets_q, document, documents, queries)
    for start in tl.range(0, blocks, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        if OF_KEYS:
            line = _lines(offsets_k, document, blocks, block, documents, keys, ROWS, OF_KEYS, ORDER)
        else:
            line = _lines(offsets_q, document, blocks, block, documents, queries, ROWS, OF_KEYS, ORDER)
        to, inside = table + line * FIELDS, (block < blocks) & (line < lines)
        tl.store(to + ROW, block * ROWS, mask=inside)
        tl.store(to + FIRST_Q, tl.zeros_like(block) + first_q, mask=inside)
        tl.store(to + LEN_Q, tl.zeros_like(block) + len_q, mask=inside)
        tl.store(to + FIRST_K, tl.zeros_like(block) + first_k, mask=inside)
        tl.store(to + LEN_K, tl.zeros_like(block) + len_k, mask=inside)
        tl.store(to + SHIFT, tl.zeros_like(block) + shift, mask=inside)
        tl.store(to + PADDED_Q, tl.zeros_like(block) + padded, mask=inside)


@triton.jit
def _document(offsets, number, documents, tokens):
    """Return first row and length of the documents with these indices; index `documents` means the rows after the last
    one. Offsets that are not in order give wrong results, but no access outside the tensors."""
    inside = number <= documents
    first = tl.load(offsets + number, mask=inside, other=0)
    end = tl.load(offsets + number + 1, mask=number < documents, other=0)
    end = tl.where(number < documents, end, tokens)
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.where(inside, tl.maximum(tl.minimum(end, tokens) - first, 0), 0)


@triton.jit
def _padded_before(offsets, document, documents, tokens):
    """Return the number of rows in the documents before this one, each padded to a multiple of PADDING."""
    found = tl.zeros([AT_ONCE], tl.int32)
    for start in tl.range(0, document, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        _, length = _document(offsets, other, documents, tokens)
        found += tl.where(other < document, tl.cdiv(length, PADDING) * PADDING, 0)
    return tl.sum(found, 0)


@triton.jit
def _lines(
    offsets, document, blocks, block, documents, tokens,
    ROWS: tl.constexpr, OF_KEYS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Return the lines of some blocks of a document: the number of blocks that come before them."""
    place = block
    if ORDER == DIAGONAL and OF_KEYS:
        place = blocks - 1 - block
    before = tl.zeros([AT_ONCE, BLOCKS_AT_ONCE], tl.int32)
    for start in tl.range(0, documents + 1, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        _, length = _document(offsets, other, documents, tokens)
        count = tl.cdiv(length, ROWS)
        earlier = other < document
        if ORDER == AS_PACKED:
            before += tl.where(earlier, count, 0)[:, None]
        elif ORDER == LONGEST_FIRST:
            before += tl.where((count > blocks) | ((count == blocks) & earlier), count, 0)[:, None]
        else:  # further places of any document, and the same place of earlier documents
            before += tl.maximum(count[:, None] - 1 - place[None, :], 0)
            before += (earlier[:, None] & (count[:, None] > place[None, :])).to(tl.int32)
    found = tl.sum(before, 0)
    return found if ORDER == DIAGONAL else found + block
