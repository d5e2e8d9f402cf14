"""The model of CUDA's caching allocator: its rules by hand, and what must hold after any sequence of calls."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.predict.allocator import ALIGNMENT, CachingAllocator, round_up
from cs336_systems.record import MIB


def charged(*sizes):
    """What each of these tensors is charged, allocated one after another on a fresh GPU."""
    allocator = CachingAllocator()
    return [allocator.size(allocator.allocate(int(size))) for size in sizes]


@pytest.mark.parametrize(("size", "charge"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1000, 1024)])
def test_sizes_are_rounded_up_to_512_bytes(size, charge):
    assert charged(size) == [charge]


@pytest.mark.parametrize(
    ("size", "charge"),
    [
        (39.0625, 40),  # the segment of 40 leaves 0.94: too little to split off
        (78.125, 78.125),  # the segment of 80 leaves 1.875: split off
        (40, 40),
        (10, 10),  # 10 MiB and more have a segment of their own
        (10.5, 10.5),
        (11.5, 12),
        (11, 12),  # what is left must be more than 1 MiB, not just 1 MiB
        (2, 2),
    ],
)
def test_a_large_tensor_is_charged_its_segment_unless_more_than_1_mib_is_left(size, charge):
    assert charged(size * MIB) == [charge * MIB]


def test_two_tensors_below_10_mib_share_a_segment_of_20_and_the_second_is_charged_the_rest():
    size = 9.765625 * MIB
    assert charged(size, size) == [size, 20 * MIB - size]


def test_a_tensor_that_does_not_fit_in_the_rest_begins_another_segment():
    size = 9.765625 * MIB
    assert charged(size, size, size) == [size, 20 * MIB - size, size]
    assert charged(9.5 * MIB, 2 * MIB, 9 * MIB) == [9.5 * MIB, 2 * MIB, 9 * MIB]


def test_a_tensor_of_10_mib_leaves_nothing_for_others():
    """Were it in a segment of 20, the second would be charged the other 10."""
    assert charged(10 * MIB, 9.5 * MIB) == [10 * MIB, 9.5 * MIB]


def test_small_tensors_are_charged_what_they_need():
    """Up to 1 MiB: segments of 2 MiB, split down to the last 512 bytes."""
    assert charged(MIB, MIB - 512, 512, MIB) == [MIB, MIB - 512, 512, MIB]


def test_small_and_large_tensors_do_not_share_segments():
    allocator = CachingAllocator()
    large = allocator.allocate(5 * MIB)
    small = allocator.allocate(1024)
    assert not large <= small < large + 20 * MIB


def test_a_released_block_is_used_again():
    allocator = CachingAllocator()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.release(first)
    assert allocator.allocated == 30 * MIB
    assert allocator.allocate(30 * MIB) == first
    assert allocator.allocated == 60 * MIB
    assert first != second


def test_of_the_free_blocks_the_smallest_that_fits_is_taken():
    allocator = CachingAllocator()
    blocks = {size: allocator.allocate(size * MIB) for size in (100, 40, 60)}
    for address in blocks.values():
        allocator.release(address)
    assert allocator.allocate(39 * MIB + MIB // 2) == blocks[40]
    assert allocator.allocate(50 * MIB) == blocks[60]


def test_a_tensor_in_a_hole_slightly_too_large_is_charged_the_hole():
    """Where predictions that add up tensors go wrong: the same tensor costs more after another one has gone."""
    allocator = CachingAllocator()
    hole = allocator.allocate(40 * MIB)
    allocator.release(hole)
    assert allocator.allocate(39 * MIB + MIB // 4) == hole
    assert allocator.allocated == 40 * MIB


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 2**24))
def test_round_up_is_the_next_multiple(size, multiple):
    rounded = round_up(size, multiple)
    assert rounded % multiple == 0
    assert size <= rounded < size + multiple


# -- after any sequence of calls --------------------------------------------------------------------------------------

edges = st.sampled_from(
    [0, 1, 512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 11 * MIB, 20 * MIB]
)
sizes = st.one_of(st.integers(1, MIB), st.integers(MIB + 1, 10 * MIB), st.integers(10 * MIB, 64 * MIB), edges)
calls = st.lists(st.one_of(st.tuples(st.just("allocate"), sizes), st.tuples(st.just("release"), st.integers(0, 99))))


def check_blocks(allocator):
    """Blocks, free and taken, fill the address space without gap or overlap; the free ones are listed by size."""
    blocks = sorted(allocator._blocks.values(), key=lambda block: block.address)
    end = 0
    for block in blocks:
        assert block.address == end
        assert block.size > 0
        assert block.size % ALIGNMENT == 0
        end += block.size
        if block.after is not None:
            assert block.after.address == end
            assert block.after.before is block
            assert not (block.free and block.after.free), "neighbours of a segment that should have been merged"
    for small, listed in allocator._free.items():
        free = [(block.size, block.address) for block in blocks if block.free and block.small is small]
        assert listed == sorted(free)


@settings(max_examples=150, deadline=None)
@given(calls)
def test_whatever_is_allocated_and_released_the_books_are_right(sequence):
    allocator, live = CachingAllocator(), {}
    segments = 0
    for call, value in sequence:
        if call == "allocate":
            before = allocator._next_segment
            address = allocator.allocate(value)
            segments += allocator._next_segment > before
            assert address not in live
            live[address] = value
        elif live:
            address = sorted(live)[value % len(live)]
            del live[address]
            allocator.release(address)
        assert allocator.allocated == sum(map(allocator.size, live))
        check_blocks(allocator)
    for address, requested in live.items():
        slack = allocator.size(address) - requested
        assert 0 <= slack <= (MIB + ALIGNMENT - 1 if requested > MIB else ALIGNMENT)
    spans = sorted((address, address + allocator.size(address)) for address in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))

    for address in live:
        allocator.release(address)
    check_blocks(allocator)
    assert allocator.allocated == 0
    assert len(allocator._blocks) == segments
    assert all(block.free and block.before is None and block.after is None for block in allocator._blocks.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(sizes, max_size=30))
def test_a_block_is_at_most_1_mib_larger_than_its_tensor(requested):
    for size, charge in zip(requested, charged(*requested), strict=True):
        rounded = round_up(max(size, 1), ALIGNMENT)
        if rounded <= MIB:
            assert charge == rounded
        else:
            assert rounded <= charge <= rounded + MIB
