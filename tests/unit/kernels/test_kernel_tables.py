"""The shipped tiles, the file of tuned tiles, and `cs336 tune`, without a GPU."""

import itertools
import json
import os
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from cs336_systems.kernels.flash import tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.tiles import BLOCK_DIMS, KERNELS, SHARED_MEMORY, Key, Tile

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("family", SHARED_MEMORY)
def test_every_key_has_a_tile(family):
    for kernel, bits, d, causal in itertools.product(KERNELS, (16, 32), BLOCK_DIMS, (False, True)):
        tile = tiles.shipped(family, Key(kernel, bits, d, causal, False))
        assert all(number & (number - 1) == 0 for number in (tile.block_m, tile.block_n, tile.num_warps))
        assert min(tile.block_m, tile.block_n) >= 16


def test_calls_that_need_more_registers_have_tiles_of_their_own():
    key = Key("grad_kv", 16, 64, True, True)
    assert tiles.sparing("sm_90", key, frozenset()) is None
    assert tiles.sparing("sm_90", key, frozenset({"grouped", "padded"})) is None
    assert tiles.sparing("sm_90", key, frozenset({"window", "grouped"})) == Tile(64, 64, 4, 3)
    assert tiles.sparing("sm_90", key._replace(descriptors=False), frozenset({"window"})) is None
    assert tiles.sparing("sm_80", key, frozenset({"window"})) is None


@needs_triton
@pytest.mark.parametrize(
    ("shape", "heads", "band", "expected"),
    [
        ((1, 4, 64, 64), 4, Band(None, 0), set()),
        ((1, 4, 64, 40), 4, Band(None, 0), {"padded"}),
        ((1, 4, 64, 64), 2, Band(-8, 0), {"grouped", "window"}),
    ],
)
def test_traits_of_a_call(shape, heads, band, expected):
    from cs336_systems.kernels.flash import portable_launch as flash_launch

    q = torch.empty(shape)
    k = torch.empty(shape[0], heads, *shape[2:])
    with mock.patch.object(flash_launch, "INTERPRETED", True):
        assert flash_launch.traits("forward", (q, k, k, q), band) == expected


@needs_triton
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 16, 1024, 64), False),
        ((1, 16, 1536, 64), True),  # by its work
        ((1, 2, 2048, 64), True),  # by its keys
        ((64, 16, 32, 64), True),  # by its elements
    ],
)
def test_calls_that_are_worth_descriptors(shape, expected):
    from cs336_systems.kernels.flash import portable_launch as flash_launch

    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.multiple(flash_launch, INTERPRETED=False, SMALLEST_FOR_DESCRIPTORS=1 << 21),
    ):
        assert flash_launch.tile_key("grad_q", (q, q, q, q, q, q), Band(None, 0)).descriptors == expected


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_120"),
        ((8, 9), "sm_120"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((13, 0), "sm_120"),
    ],
)
def test_family_of_a_compute_capability(capability, family):
    """8.6 and 8.9 have 99 KiB, not the 163 of 8.0; an unknown GPU gets the smallest tiles."""
    assert tiles.family(capability) == family


KEY = Key("forward", 16, 64, True, True)


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tiles.json"
    monkeypatch.setenv("CS336_TILES", str(path))
    tiles.tuned.cache_clear()
    yield path
    tiles.tuned.cache_clear()


@needs_triton
def test_tuned_tiles_are_kept_for_this_gpu_alone(tuned_file):
    assert tiles.tuned("A") == {}
    tiles.keep("A", {KEY: Tile(64, 32, 4, 1)})
    tiles.keep("A", {KEY._replace(causal=False): Tile(32, 32, 4, 1)})
    tiles.keep("B", {KEY: Tile(128, 32, 4, 1)})
    assert tiles.tuned("A") == {KEY: Tile(64, 32, 4, 1), KEY._replace(causal=False): Tile(32, 32, 4, 1)}
    assert tiles.tuned("B") == {KEY: Tile(128, 32, 4, 1)}
    assert [path.name for path in tuned_file.parent.iterdir()] == ["tiles.json"], "no temporary file is left"


@needs_triton
def test_tiles_of_another_triton_are_not_used(tuned_file, monkeypatch):
    import triton

    tiles.keep("A", {KEY: Tile(64, 32, 4, 1)})
    monkeypatch.setattr(triton, "__version__", "99.0")
    tiles.tuned.cache_clear()
    assert tiles.tuned("A") == {}


@needs_triton
@pytest.mark.parametrize("text", ["", "{", "[]", '{"A": 5}', "null", "[" * 10**5, '{"A": NaN, "A": [[1]]', " " * 2**21])
def test_a_broken_file_of_tuned_tiles_is_ignored(tuned_file, text):
    tuned_file.parent.mkdir()
    tuned_file.write_text(text)
    with nullcontext() if text == '{"A": 5}' else pytest.warns(UserWarning, match=r"tiles\.json.*cs336 tune"):
        assert tiles.tuned("A") == {}
    tiles.keep("A", {KEY: Tile(64, 32, 4, 1)})
    assert tiles.tuned("A") == {KEY: Tile(64, 32, 4, 1)}


ENTRIES = {
    "a number": 5,
    "an empty pair": [[]],
    "texts": [["key", "tile"]],
    "a dictionary": {"key": "tile"},
    "an unknown kernel": [[["os", 16, 64, True, True], [64, 64, 4, 2]]],
    "a head dim that is not padded": [[["forward", 16, 80, True, True], [64, 64, 4, 2]]],
    "causal as a text": [[["forward", 16, 64, "yes", True], [64, 64, 4, 2]]],
    "a tile of no queries": [[list(KEY), [0, 64, 4, 2]]],
    "a tile of a billion keys": [[list(KEY), [64, 10**9, 4, 2]]],
    "a negative number of stages": [[list(KEY), [64, 64, 4, -1]]],
    "a tile of three numbers": [[list(KEY), [64, 64, 4]]],
    "a tile of texts": [[list(KEY), ["64", "64", "4", "2"]]],
    "400 digits": [[list(KEY), [64, 64, 4, 10**400]]],
    "lists in a tile": [[list(KEY), [[64], 64, 4, 2]]],
}


@needs_triton
@pytest.mark.parametrize("name", ENTRIES)
def test_tuned_tiles_that_no_kernel_can_have_are_not_used(tuned_file, name):
    tuned_file.parent.mkdir()
    tuned_file.write_text(json.dumps({tiles._section("A"): ENTRIES[name]}))
    with pytest.warns(UserWarning, match=r"tiles\.json.*cs336 tune"):
        assert tiles.tuned("A") == {}


@needs_triton
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_file_of_tuned_tiles_that_is_no_file(tuned_file, kind):
    tuned_file.parent.mkdir()
    os.mkfifo(tuned_file) if kind == "pipe" else tuned_file.mkdir()
    with pytest.warns(UserWarning, match="not used"):
        assert tiles.tuned("A") == {}


@needs_triton
def test_a_tuned_tile_is_chosen_before_the_shipped_one(tuned_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    shipped = tiles.choose(KEY, gpu)
    assert shipped == tiles.shipped("sm_90", KEY)
    tiles.keep("A", {KEY: Tile(16, 16, 4, 1)})
    assert tiles.choose(KEY, gpu) == Tile(16, 16, 4, 1) != shipped


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bits", [16, 32])
def test_candidates_are_distinct(kernel, bits):
    from cs336_systems.experiments.attention.measure_tiles import candidates

    found = list(candidates(kernel, bits))
    assert len(found) == len(set(found)) > 20
    # Triton 3.6 miscompiles a tile of 16 rows over 8 warps: an illegal access at run time.
    assert all(min(tile.block_m, tile.block_n) >= 32 for tile in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((300,), ("bf16",), 1.0), "--head_dims 300"),
        (((64,), ("int8",), 1.0), "'int8'"),
        (((64,), ("bf16",), 0.0), "--seconds"),
        (((64,), ("bf16",), float("nan")), "--seconds"),
        (((64,), ("bf16",), 1.0), "needs a CUDA GPU"),
    ],
)
def test_tune_refuses(arguments, message, monkeypatch):
    from cs336_systems.config import UserError
    from cs336_systems.experiments.attention.tune import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        tune(*arguments)


@pytest.mark.gpu
def test_tune_on_a_gpu(tuned_file):
    from cs336_systems.experiments.attention.tune import tune

    assert len(tune((64,), ("bf16",), 10.0).rows) == 6
