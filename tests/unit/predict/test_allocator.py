"""The model of CUDA's caching allocator: its rules by example, and invariants after any sequence of calls."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.predict.allocator import ALIGNMENT, CachingAllocator
from cs336_systems.record import MIB

SHARED = 9.765625
"""MiB of a tensor of which two fit into a segment of 20 MiB."""


@pytest.mark.parametrize(("size", "charge"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1000, 1024)])
def test_sizes_are_rounded_up_to_512_bytes(size, charge):
    allocator = CachingAllocator()
    assert allocator.size(allocator.allocate(size)) == charge


@pytest.mark.parametrize(
    ("sizes", "charges"),
    [
        pytest.param([39.0625], [40], id="segment of 40 leaves 0.94: not split"),
        pytest.param([78.125], [78.125], id="segment of 80 leaves 1.875: split"),
        pytest.param([11], [12], id="a remainder of exactly 1 is not split"),
        pytest.param([11.5], [12], id="segments are multiples of 2"),
        pytest.param([10, 9.5], [10, 9.5], id="from 10 on a segment of its own"),
        pytest.param([SHARED, SHARED], [SHARED, 20 - SHARED], id="two share a segment of 20"),
        pytest.param([SHARED] * 3, [SHARED, 20 - SHARED, SHARED], id="a third begins another segment"),
        pytest.param([9.5, 2, 9], [9.5, 2, 9], id="the remainder of a shared segment is split"),
        pytest.param([1, 1 - 1 / 2048, 1 / 2048, 1], [1, 1 - 1 / 2048, 1 / 2048, 1], id="small tensors are exact"),
    ],
)
def test_blocks_of_tensors_in_mib(sizes, charges):
    allocator = CachingAllocator()
    blocks = [allocator.size(allocator.allocate(int(size * MIB))) for size in sizes]
    assert blocks == [charge * MIB for charge in charges]


def test_small_and_large_tensors_do_not_share_segments():
    allocator = CachingAllocator()
    large, small = allocator.allocate(5 * MIB), allocator.allocate(1024)
    assert not large <= small < large + 20 * MIB


def test_the_smallest_free_block_that_fits_is_reused():
    allocator = CachingAllocator()
    blocks = {size: allocator.allocate(size * MIB) for size in (100, 40, 60)}
    for address in blocks.values():
        allocator.release(address)
    assert allocator.allocated == 0
    assert allocator.allocate(39 * MIB + MIB // 2) == blocks[40]
    assert allocator.allocated == 40 * MIB, "the whole block is charged"
    assert allocator.allocate(50 * MIB) == blocks[60]


# -- invariants -------------------------------------------------------------------------------------------------------

edges = st.sampled_from([0, 1, 512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 11 * MIB])
sizes = st.one_of(st.integers(1, MIB), st.integers(MIB + 1, 10 * MIB), st.integers(10 * MIB, 64 * MIB), edges)
calls = st.lists(st.one_of(st.tuples(st.just("allocate"), sizes), st.tuples(st.just("release"), st.integers(0, 99))))


def check_blocks(allocator):
    """Blocks fill the address space without gap or overlap; the free ones are merged and listed by size."""
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
            assert not (block.free and block.after.free), "free neighbours of a segment are merged"
    for small, listed in allocator._free.items():
        free = [(block.size, block.address) for block in blocks if block.free and block.small is small]
        assert listed == sorted(free)


@settings(max_examples=80, deadline=None)
@given(calls)
def test_blocks_are_consistent_after_any_sequence_of_calls(sequence):
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
