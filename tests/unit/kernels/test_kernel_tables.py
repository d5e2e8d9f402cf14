"""The shipped tiles, the file of tuned ones, and `cs336 tune`: all that can be held without a GPU."""

import json
from collections.abc import Iterable
from dataclasses import astuple
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from cs336_systems.kernels.flash import tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.tiles import BLOCK_DIMS, KERNELS, SHARED_MEMORY, Key, Tile
from tests.unit.kernels import compiled

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

CAUSAL, FULL, WINDOW = [None, 0], [None, None], [-40, 8]
WITH_TMA = ("sm_90", "sm_100")

SPILLS = {
    # fp32 in three TF32 products keeps both halves of its operands in registers. The rest are variants for which there
    # is no tile of their own: windows, grouped queries, head dims that are padded.
    "sm_90": set(),
    "sm_100": {
        *((kernel, 32, 128, "causal") for kernel in ("forward", "grad_q")),
        *((kernel, 16, 40, "full, grouped") for kernel in (*KERNELS, "grad")),
        ("forward", 32, 64, "causal"),
        ("grad_kv", 32, 32, "causal"),
    },
    "sm_80": {
        *((kernel, 16, 40, "full, grouped") for kernel in ("grad_q", "grad_kv")),
        ("forward", 32, 64, "causal"),
        ("grad_kv", 32, 32, "causal"),
        ("grad_kv", 16, 64, "window, grouped"),
    },
    "sm_120": {
        *((kernel, 32, 128, "causal") for kernel in KERNELS),
        *((kernel, 32, 32, "causal") for kernel in ("grad_q", "grad_kv")),
        ("forward", 32, 64, "causal"),
        *(("grad_kv", 16, d, rest) for d, rest in ((64, "window, grouped"), (40, "full, grouped"))),
    },
}
"""Family -> (kernel, bits, head dim, mask) that spill registers, with tiles moved by descriptors or by pointers."""


def cross_compile(family: str, requests: list) -> list[dict[str, int]]:
    return compiled.compile_apart("compile_kernels", family, json.dumps(requests))


def variants(family: str, kind: str) -> list[list]:
    """[kernel, bits, head dim, by descriptors, band, query heads for each KV head]"""
    bits, descriptors = (32 if kind == "fp32" else 16), kind == "descriptors"
    found = []
    for kernel in KERNELS if kind != "pointers" else (*KERNELS, "grad"):
        widest = tiles.WIDEST_GRAD if kernel == "grad" else BLOCK_DIMS[-1]
        for d in (d for d in BLOCK_DIMS if d <= widest):
            found.append([kernel, bits, d, descriptors, CAUSAL, 1])
            keys = [Key(kernel, bits, d, causal, descriptors) for causal in (False, True)]
            if len({tiles.shipped(family, key) for key in keys}) == 2:
                found.append([kernel, bits, d, descriptors, FULL, 1])
        if bits == 16:
            found += [[kernel, bits, 64, descriptors, WINDOW, 2], [kernel, bits, 40, descriptors, FULL, 4]]
        if bits == 16 and family == "sm_90":  # it has tiles for these
            found += [[kernel, bits, 40, descriptors, WINDOW, 2]]
            for d in (d for d in (24, 80, 128, 200, 256) if d <= widest):
                found += [[kernel, bits, d, descriptors, FULL, 4], [kernel, bits, d, descriptors, WINDOW, 2]]
    return found


KINDS = [
    (f, kind)
    for f in SHARED_MEMORY
    for kind in ("descriptors", "pointers", "fp32")
    if kind != "descriptors" or f in WITH_TMA
]


def resources(family: str, kind: str) -> Iterable[tuple[list, dict[str, int]]]:
    """Of each variant."""
    requests, own = variants(family, kind), "cs336_systems/kernels/flash"
    sources = [f"{own}/{name}.py" for name in ("flash_triton", "portable_launch", "launch_plan", "tiles")]
    found = compiled.results(
        [[family, *request] for request in requests],
        [*sources, "tests/unit/kernels/compile_kernels.py"],
        compiled.triton_version(),
        lambda chosen: cross_compile(family, [request[1:] for request in chosen]),
        sample=kind == "pointers",
    )
    return zip(requests, found, strict=True)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_every_variant_compiles_and_fits(family, kind):
    spilling = set()
    for request, found in resources(family, kind):
        assert found["shared"] <= SHARED_MEMORY[family], request
        if found["stack"]:
            kernel, bits, d, _, band, group = request
            mask = {str(CAUSAL): "causal", str(FULL): "full", str(WINDOW): "window"}[str(band)]
            spilling.add((kernel, bits, d, mask + (", grouped" if group > 1 else "")))
    assert spilling <= SPILLS[family], f"spills that nobody knew of: {spilling - SPILLS[family]}"


POINTWISE = [*([family, 16, 2560, 80] for family in SHARED_MEMORY), ["sm_90", 32, 768, 64]]
"""Family, bits, width of the model, head dim."""


def pointwise_resources() -> Iterable[tuple[list, list[dict[str, int]]]]:
    """Of all kernels, for each request."""
    found = compiled.results(
        [["pointwise", *request] for request in POINTWISE],
        ["cs336_systems/kernels/fused/pointwise_triton.py", "tests/unit/kernels/compile_kernels.py"],
        compiled.triton_version(),
        lambda chosen: [{"kernels": cross_compile(family, [name, *rest])} for name, family, *rest in chosen],
        sample=True,
    )
    return zip(POINTWISE, (each["kernels"] for each in found), strict=True)


@pytest.mark.slow
@needs_triton
def test_pointwise_kernels_compile_without_spills():
    for (family, *request), found in pointwise_resources():
        assert len({kernel["kernel"] for kernel in found}) == 8
        large = [kernel for kernel in found if kernel["stack"] or kernel["shared"] > SHARED_MEMORY[family]]
        assert large == [], (family, request)


def test_every_key_has_a_tile():
    for family in SHARED_MEMORY:
        for kernel in KERNELS:
            for bits in (16, 32):
                for d in BLOCK_DIMS:
                    for causal in (False, True):
                        tile = tiles.shipped(family, Key(kernel, bits, d, causal, False))
                        assert all(number & (number - 1) == 0 for number in astuple(tile)[:3]), "powers of 2"
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
def test_a_card_gets_tiles_that_fit_it(capability, family):
    """8.6 and 8.9 have 99 KiB, not the 163 of 8.0; a card nobody knows yet gets the smallest."""
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
@pytest.mark.parametrize("text", ["", "{", "[]", '{"A, triton 3": 5}', "null"])
def test_a_broken_file_is_as_good_as_none(tuned_file, text):
    tuned_file.parent.mkdir()
    tuned_file.write_text(text)
    assert tiles.tuned("A") == {}
    tiles.keep("A", {KEY: Tile(64, 32, 4, 1)})
    assert tiles.tuned("A") == {KEY: Tile(64, 32, 4, 1)}


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
def test_candidates_are_tiles_that_exist_once(kernel, bits):
    from cs336_systems.experiments.attention.measure_tiles import candidates

    found = list(candidates(kernel, bits))
    assert len(found) == len(set(found)) > 20
    # Triton 3.6 miscompiles a tile of 16 rows over 8 warps: an illegal access at run time.
    assert all(min(tile.block_m, tile.block_n) >= 32 for tile in found)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (((300,), ("bf16",), 1.0), "--head_dims 300"),
        (((64,), ("int8",), 1.0), "'int8'"),
        (((64,), ("bf16",), 0.0), "--seconds"),
        (((64,), ("bf16",), float("nan")), "--seconds"),
        (((64,), ("bf16",), 1.0), "needs a CUDA GPU"),
    ],
)
def test_tune_says_what_is_wrong(arguments, complaint, monkeypatch):
    from cs336_systems.config import UserError
    from cs336_systems.experiments.attention.tune import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=complaint):
        tune(*arguments)


@pytest.mark.gpu
def test_tune_finds_keeps_and_stays_in_time(tuned_file):
    import time

    from cs336_systems.experiments.attention.tune import tune

    start = time.monotonic()
    table = tune((64,), ("bf16",), 10.0)
    assert time.monotonic() - start < 60, "one candidate of each kernel may be compiling when the time is up"
    assert len(table.rows) == 6
