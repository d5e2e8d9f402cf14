"""How attention's work is divided among programs: rules that the kernels and predicted times share."""

import pytest

from cs336_systems.predict.attention_programs import (
    KEYS,
    MAX_HEAD_ROUNDS,
    MAX_SPLIT_ROUNDS,
    QUERIES,
    Split,
    causal_tiles,
    even_end,
    heads_of_part,
    heads_of_section,
    numbers_of_parts,
    parts_of_group,
    sees_few_keys,
)

SMS = 132


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1, 100, 128, 129, 1000, 4096])
def test_every_pair_of_query_and_key_is_in_a_tile(length, head_dim):
    tiles = causal_tiles(length, head_dim)
    queries = QUERIES[head_dim]
    for block, count in enumerate(tiles):
        first = length // queries * queries if length % queries else length - queries
        assert first // queries - count + 1 <= block * KEYS // queries, "the first query that sees these keys"
    assert len(tiles) == -(-length // KEYS)
    assert tiles[0] == -(-length // queries), "all queries see the first keys"
    assert min(tiles) >= 1


# H200, causal, bf16: query heads of a group, tokens, head dim, KV heads of all batches -> parts of the fastest program
MEASURED = {
    (4, 2048, 128, 4): 4,
    (4, 2048, 128, 8): 2,
    (4, 2048, 128, 16): 1,
    (4, 4096, 128, 8): 1,
    (6, 2048, 128, 8): 2,
    (6, 4096, 128, 2): 6,
    (6, 4096, 128, 4): 2,
    (7, 2048, 128, 4): 4,
    (7, 2048, 128, 16): 1,
    (7, 2048, 64, 8): 2,
    (7, 4096, 128, 8): 1,
    (7, 4096, 64, 2): 7,
    (7, 4096, 64, 4): 2,
    (7, 4096, 96, 4): 7,
    (5, 1536, 128, 8): 3,
    (7, 8192, 128, 8): 1,
    (4, 2048, 64, 8): 2,
    (8, 2048, 64, 8): 2,
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_choice_is_the_fastest_that_was_measured(shape):
    group, length, head_dim, kv_heads = shape
    assert parts_of_group(group, head_dim, causal_tiles(length, head_dim), kv_heads, SMS) == MEASURED[shape]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 64])
@pytest.mark.parametrize("length", [128, 1024, 65_536])
def test_groups_are_split_within_the_memory(length, kv_heads, group):
    tiles = causal_tiles(length, 128)
    parts = parts_of_group(group, 128, tiles, kv_heads, SMS)
    assert parts in numbers_of_parts(group)
    assert parts == 1 or len(tiles) * kv_heads * parts <= MAX_HEAD_ROUNDS * SMS


@pytest.mark.parametrize("group", range(1, 65))
def test_parts_are_almost_equal(group):
    """The kernel takes parts for equal ones if the largest divides the group."""
    for parts in numbers_of_parts(group):
        largest = heads_of_part(group, parts)
        assert (largest - 1) * parts < group <= largest * parts
        assert (group % largest == 0) == (largest * parts == group)
    assert {heads_of_part(group, parts) for parts in numbers_of_parts(group)} == {
        heads_of_part(group, parts) for parts in range(1, group + 1)
    }


def test_many_programs_are_not_split():
    assert parts_of_group(4, 128, causal_tiles(8192, 128), 64, SMS) == 1


# H200, bf16: head dim, mask, keys -> relative time of small programs
RELATIVE = {
    (64, "causal", 512): 0.73, (64, "causal", 1024): 0.76, (64, "causal", 2048): 0.86, (64, "causal", 4096): 0.96,
    (64, "causal", 8192): 1.04, (64, "causal", 16384): 1.08, (64, "full", 1024): 0.95, (64, "full", 2048): 1.04,
    (64, "window", 512): 0.66, (64, "window", 4096): 0.91, (64, "window", 8192): 0.94, (128, "causal", 512): 0.93,
    (128, "causal", 1024): 1.01, (96, "causal", 1024): 1.05, (128, "causal", 2048): 1.09, (128, "full", 512): 1.06,
    (128, "window", 1024): 0.88, (128, "window", 4096): 0.97, (128, "window", 8192): 1.03,
}  # fmt: skip


@pytest.mark.parametrize("case", RELATIVE)
def test_small_programs_run_where_they_were_faster(case):
    head_dim, mask, keys = case
    assert sees_few_keys(head_dim, keys, mask) == (RELATIVE[case] < 1)


@pytest.mark.parametrize("tiles", [1, 2, 3, 17, 256])
@pytest.mark.parametrize("units", [1, 8, 100, 131, 132, 133, 192, 300, 704, 2048, 5000])
def test_pieces_pay_and_take_little_memory(units, tiles):
    split = even_end(units, tiles, 132, 0.0)
    assert split.programs == split.unsplit + (units - split.unsplit) * split.splits
    assert 0 <= split.unsplit <= units
    assert 1 <= split.splits <= tiles
    if split.split_units:
        assert split.unsplit % 132 == 0
        assert split.split_units * split.splits <= MAX_SPLIT_ROUNDS * 132
        # In tiles that the busiest multiprocessor goes through.
        pieces = -(-split.split_units * split.splits // 132) * -(-tiles // split.splits)
        assert split.unsplit // 132 * tiles + pieces < -(-units // 132) * tiles


def test_pieces_are_for_a_last_round_that_is_not_full():
    assert even_end(132, 128, 132, 0.0) == Split(132, 132, 1)
    assert even_end(8 * 132, 128, 132, 0.0) == Split(8 * 132, 8 * 132, 1)
    assert even_end(192, 48, 132, 0.0) == Split(192, 132, 2)
    assert even_end(32, 64, 132, 0.0) == Split(32, 0, 4)  # all at once, as many as there are multiprocessors
    assert even_end(32, 1, 132, 0.0) == Split(32, 32, 1)
    few = even_end(16 * 128, 128, 132, 0.0)
    assert few.split_units == 2048 % 132
    assert even_end(16 * 128, 128, 132, 0.04) == Split(2048, 2048, 1)  # saves 2%


@pytest.mark.parametrize(
    ("heads", "blocks", "fit", "least"), [(119, 14, 9, 264), (96, 8, 200, 0), (1, 5, 0, 264), (44, 42, 6, 0)]
)
def test_sections_have_a_number_of_heads_that_divides_all(heads, blocks, fit, least):
    section = heads_of_section(heads, blocks, fit, least)
    assert heads % section == 0
    assert section * blocks >= min(least, heads * blocks)
    others = [own for own in range(1, heads + 1) if heads % own == 0 and own * blocks >= least]
    assert all(max(section, fit) * min(own, max(fit, 1)) <= max(own, fit) * min(section, max(fit, 1)) for own in others)
