"""The time of a step: the sum of its kernels, the clock at the power limit, and profiles."""

import dataclasses
import json
import math
import re
import warnings

import pytest

from cs336_systems.config import ModelConfig, RunConfig, UserError, model_config
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time import gpu_profile as profiles
from cs336_systems.predict.time import kernel_seconds as kernel_times
from cs336_systems.predict.time.gpu_profile import (
    DATA_SHEET,
    MEASURED,
    AttentionRates,
    GpuProfile,
    PassRates,
    keep_profile,
    profile_of,
)
from cs336_systems.predict.time.kernel_seconds import (
    attention_rates,
    attention_seconds,
    kernel_seconds,
    matmul_seconds,
    pass_seconds,
)
from cs336_systems.predict.time.on_gpu import predicted_of, predicted_on
from cs336_systems.predict.time.step_kernels import FORWARD, AttentionPass, Matmul, Pass
from cs336_systems.predict.time.time_model import predicts, step_kernels, step_time


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def h200():
    return profiles.shipped_profiles()["h200"]


def run_of(size="small", context=512, batch=4, vocabulary=10_000, **fields):
    model = model_config(size, context_length=context, vocab_size=vocabulary)
    return RunConfig(
        model=model, size=size, batch_size=batch, precision="bf16", attention="auto", fast="on", device="cuda", **fields
    )


MEASURED_MS = {("small", 512, 4): 5.04, ("large", 512, 4): 30.1, ("2.7B", 512, 4): 91.4, ("2.7B", 2048, 4): 317.4}
"""Steps of an H200 (results/h200), after 5 others and among 10."""


@pytest.mark.parametrize("case", MEASURED_MS)
def test_steps_of_an_h200(case, h200):
    found = step_time(run_of(*case), h200, steps=15)
    assert found.seconds * 1e3 == pytest.approx(MEASURED_MS[case], rel=0.05)
    assert found.low < found.seconds < found.high


def test_the_sum_of_kernels_and_gaps(h200):
    found = step_time(run_of(), h200)
    assert sum(found.by_name().values()) + found.gaps == pytest.approx(found.seconds)
    assert list(found.by_name().values()) == sorted(found.by_name().values(), reverse=True)
    assert found.tokens_per_second == pytest.approx(4 * 512 / found.seconds)
    assert 0.1 < found.mfu(989e12, causal=True) < found.mfu(989e12) < 0.6


def test_micro_batches_share_the_update(h200):
    one, four = (step_time(run_of("2.7B"), h200, number) for number in (1, 4))
    update = one.by_name()["adamw"]
    assert four.by_name()["adamw"] == pytest.approx(update, rel=0.02)
    assert 3.7 * (one.seconds - update) < four.seconds - update < 4.3 * (one.seconds - update)
    assert four.tokens_per_second > one.tokens_per_second


def test_recomputation_runs_the_blocks_again(h200):
    plain, again = (step_time(run_of("large", 1024, checkpoint_blocks=group), h200) for group in (0, 2))
    assert 1.2 < again.seconds / plain.seconds < 1.34
    names = [kernel.name for kernel in step_kernels(run_of("large", checkpoint_blocks=2))]
    assert names.count("qkv") == 2
    assert names.count("logits") == 1


def test_without_a_graph_the_host_bounds_small_steps(h200):
    small, large = (step_time(run_of(*case), h200) for case in (("small", 512, 4), ("2.7B", 4096, 4)))
    eager = step_time(dataclasses.replace(run_of(), fast="kernels,loss,optimizer"), h200)
    assert not small.is_launch_bound
    assert eager.is_launch_bound
    assert eager.seconds > 3 * small.seconds
    slow = step_time(dataclasses.replace(run_of("2.7B", 4096), fast="kernels,loss,optimizer"), h200)
    assert slow.seconds == pytest.approx(large.seconds)


def test_only_steps_whose_kernels_are_known(h200):
    assert predicts(run_of())
    for fields in (
        {"fast": "off"}, {"precision": "fp32"}, {"mode": "inference"}, {"memory_budget": "10GiB"}, {"compile": True},
    ):  # fmt: skip
        run = dataclasses.replace(run_of(), **{"fast": "on", **fields}) if fields != {"compile": True} else None
        run = run or dataclasses.replace(run_of(), fast="off", compile=True)
        assert not predicts(run)
        assert step_time(run, h200) is None


# -- power ------------------------------------------------------------------------------------------------------------


def test_the_clock_falls_where_power_is_short(h200):
    small, large = (step_time(run_of(*case), h200) for case in (("small", 512, 1), ("2.7B", 2048, 4)))
    assert small.clock == 1.0
    assert 0.7 < large.clock < 0.9
    unlimited = step_time(run_of("2.7B", 2048, 4), dataclasses.replace(h200, power=None))
    assert unlimited.clock == 1.0
    assert 1.05 < large.seconds / unlimited.seconds < 1.2
    more = dataclasses.replace(h200, power=dataclasses.replace(h200.power, limit=900.0))
    assert unlimited.seconds < step_time(run_of("2.7B", 2048, 4), more).seconds < large.seconds


def test_a_cool_gpu_is_faster(h200):
    run = run_of("2.7B", 2048, 4)
    first, later, warm = (step_time(run, h200, steps=steps) for steps in (1, 8, None))
    assert first.seconds < later.seconds < warm.seconds < 1.04 * first.seconds
    small = run_of("small", 512, 1)
    assert step_time(small, h200, steps=1).seconds == step_time(small, h200).seconds, "no limit, no warmth"
    recorded = dataclasses.replace(run, warmup_steps=3, num_steps=5)
    assert predicted_of(recorded.to_dict(), "NVIDIA H200").time.seconds == later.seconds
    assert predicted_on(recorded, find_card("h200")).time.seconds == warm.seconds


def test_mean_power_is_the_limit(h200):
    """At the predicted clock the energy of the step over its time is the limit."""
    found = step_time(run_of("2.7B", 2048, 4), h200)
    power = h200.power
    joules = 0.0
    for kernel, _ in found.kernels:
        if isinstance(kernel, Pass):
            joules += kernel.times * kernel.bytes * power.per_byte
        elif isinstance(kernel, (Matmul, AttentionPass)):
            kind = "matmul" if isinstance(kernel, Matmul) else "attention"
            joules += kernel.times * kernel.flops * power.per_flop[kind]
    watts = power.static_after(math.inf) + joules * found.clock**power.exponent / found.seconds
    assert watts == pytest.approx(power.limit, rel=0.01)


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_a_matmul_takes_whole_rounds_of_tiles(h200):
    """One tile more than the SMs hold needs another round, but for the share that overlaps."""
    whole = dataclasses.replace(h200, matmul=dataclasses.replace(h200.matmul, overlap=0.0))
    below, above = (matmul_seconds(128 * tiles, 256, 4096, False, False, whole) for tiles in (132, 265))
    assert above > 1.4 * below
    large = matmul_seconds(8192, 8192, 8192, False, False, h200)
    assert 0.75 * h200.peak < 2 * 8192**3 / large < 0.9 * h200.peak


@pytest.mark.parametrize("wider", ["adds", "is_wide"])
def test_more_bytes_of_results_take_longer(wider, h200):
    plain = Matmul("matmul", 4096, 4096, 512, FORWARD)
    assert kernel_seconds(plain._replace(**{wider: True}), h200) > kernel_seconds(plain, h200)


def test_a_thin_matmul_is_bound_by_its_operands(h200):
    seconds = matmul_seconds(16, 8192, 8192, False, False, h200)
    assert seconds > 2 * 8192 * 8192 / h200.bandwidth


def test_attention_is_bound_by_all_programs_or_the_longest():
    rates = AttentionRates(tile=1e-6, program=3e-6, fixed=5e-6)
    one = AttentionPass("forward", 1, 1, 1, 4096, 64)
    assert attention_seconds(one, rates, sms=132) == pytest.approx(5e-6 + 32e-6 + 3e-6)
    many = one._replace(batch=64, heads=32, kv_heads=32)
    tiles, programs = 64 * 32 * 32 * 33 / 2, 64 * 32 * 32
    assert attention_seconds(many, rates, sms=132) == pytest.approx(5e-6 + (tiles * 1e-6 + programs * 3e-6) / 132)
    grouped = AttentionPass("backward", 2, 64, 8, 4096, 64)
    tiles, programs = 2 * 64 * 32 * 33 / 2, 2 * 8 * 32
    assert kernel_times.head_parts(grouped, 132) == 1
    assert attention_seconds(grouped, rates, sms=132) == pytest.approx(5e-6 + (tiles * 1e-6 + programs * 3e-6) / 132)


def test_few_kv_heads_are_split_over_programs():
    rates = AttentionRates(tile=1e-6, program=3e-6, fixed=5e-6)
    few = AttentionPass("backward", 1, 8, 2, 4096, 64)
    assert kernel_times.head_parts(few, 132) == 4
    shared = (8 * 32 * 33 / 2 * 1e-6 + 4 * 2 * 32 * 3e-6) / 132
    expected = 5e-6 + shared + kernel_times.SPLIT_HEADS_KERNEL
    assert attention_seconds(few, rates, sms=132) == pytest.approx(expected)
    assert expected < 4 * 32e-6, "the longest program with all heads of a group"


def test_rows_in_turn_add_their_time_and_programs_hide_theirs():
    rates = PassRates(bandwidth=1e12, fixed=0.0, program=1e-6, element=1e-9)
    plain = Pass("pass", 10**9)
    assert pass_seconds(plain, rates, sms=100) == pytest.approx(1e-3)
    few, many = (plain._replace(programs=number, elements=1000) for number in (1000, 100_000))
    assert pass_seconds(few, rates, sms=100) == pytest.approx(1e-3), "hidden by moving the bytes"
    assert pass_seconds(many, rates, sms=100) == pytest.approx(2e-3), "1,000 programs an SM, 2 us each"
    in_turn = few._replace(elements=1024, together=200)
    assert pass_seconds(in_turn, rates, sms=100) == pytest.approx(1e-3 + 5 * 2.024e-6)
    large = in_turn._replace(elements=8192)  # an SM holds one such row
    assert pass_seconds(large, rates, sms=100) == pytest.approx(1e-3 + 10 * 9.192e-6)


def test_logits_that_are_not_aligned_take_longer(h200):
    even, odd = (
        [k for k in step_kernels(run_of(vocabulary=size)) if k.name == "cross_entropy"] for size in (10_000, 9_999)
    )
    assert kernel_seconds(odd[0], h200) > 1.5 * kernel_seconds(even[0], h200)


def test_attention_takes_the_kernels_of_its_size():
    names = [kernel.name for kernel in step_kernels(run_of("small", 512, 1)) if isinstance(kernel, AttentionPass)]
    assert names == ["forward small", "backward small"]
    names = [kernel.name for kernel in step_kernels(run_of("small", 1024, 4)) if isinstance(kernel, AttentionPass)]
    assert names == ["forward triton", "backward triton"]
    names = [kernel.name for kernel in step_kernels(run_of("small", 4096, 4)) if isinstance(kernel, AttentionPass)]
    assert names == ["forward short", "backward"]
    names = [kernel.name for kernel in step_kernels(run_of("small", 8192, 4)) if isinstance(kernel, AttentionPass)]
    assert names == ["forward", "backward"]


def test_older_profiles_have_rates_for_all_attention_kernels(h200):
    known = {name: own for name, own in h200.attention.items() if "small" not in name and "triton" not in name}
    older = dataclasses.replace(h200, attention=known)
    for case in (("small", 512, 1), ("small", 1024, 4)):
        assert 0.7 < step_time(run_of(*case), older).seconds / step_time(run_of(*case), h200).seconds < 1.3


def test_portable_tiles_are_those_of_the_kernels():
    from cs336_systems.kernels.flash import tiles

    def tile(kernel, dim, descriptors):
        found = tiles.shipped("sm_90", tiles.Key(kernel, 16, dim, True, descriptors))
        return found.block_m, found.block_n

    for dim in (64, 128):
        assert kernel_times.SMALL_TILES["forward small"][dim] == tile("forward", dim, False)
        assert kernel_times.SMALL_TILES["forward triton"][dim] == tile("forward", dim, True)
        assert kernel_times.SMALL_TILES["backward triton"][dim] == tile("grad_q", dim, True)
        assert kernel_times.KEY_TILES[dim] == tile("grad_kv", dim, True)
    assert kernel_times.SMALL_TILES["backward small"] == {tiles.WIDEST_GRAD: tile("grad", tiles.WIDEST_GRAD, False)}


GRADIENT_US = {
    (140, 128, 5, 5): 69.4, (9, 384, 8, 1): 92.1, (1, 1152, 22, 22): 60.8, (6, 128, 6, 3): 9.8,
}  # fmt: skip
"""Backward passes in one kernel, in steps on an H200, by batch, length, heads and KV heads; head dim 64."""
WIDE_GRADIENT_US = {
    (1, 1024, 4): 41.8, (4, 256, 8): 18.4, (1, 512, 16): 26.6, (2, 512, 4): 25.7, (3, 1152, 4): 53.6,
    (16, 256, 16): 86.8, (4, 512, 16): 55.3, (8, 512, 16): 108.7, (2, 1024, 16): 78.5,
    (1, 2048, 8): 91.4, (8, 128, 32): 37.8,
}  # fmt: skip
"""Backward passes in two kernels, alone on an H200, by batch, length and heads; head dim 128."""
SHORT_US = {
    (16, 1024, 12, 64): 73.0, (4, 2048, 16, 64): 78.7, (64, 512, 12, 64): 106.6, (4, 1024, 16, 64): 26.1,
    (2, 1024, 12, 64): 12.6, (16, 1024, 16, 128): 175.3, (32, 512, 16, 128): 122.6, (4, 512, 16, 128): 16.5,
    (2, 1024, 16, 128): 23.1, (1, 2048, 8, 128): 24.8,
}  # fmt: skip
"""Forward passes in Hopper's small programs, alone on an H200, by batch, length, heads and head dim."""
HEADS_ABOVE_128_US = {
    ("forward", 2, 8192, 256): 1379, ("forward", 8, 1024, 256): 138, ("forward", 2, 8192, 192): 1181,
    ("forward", 8, 1024, 192): 134, ("forward", 1, 16384, 192): 2268, ("backward", 2, 8192, 256): 6736,
    ("backward", 2, 8192, 192): 5352, ("backward", 8, 1024, 192): 490,
}  # fmt: skip
"""The Hopper kernels, alone on an H200 with 16 heads and a causal mask, by pass, batch, length and head dim."""


@pytest.mark.parametrize("shape", GRADIENT_US)
def test_small_backward_of_an_h200(shape, h200):
    batch, length, heads, kv_heads = shape
    found = kernel_seconds(AttentionPass("backward small", batch, heads, kv_heads, length, 64), h200)
    assert found * 1e6 == pytest.approx(GRADIENT_US[shape], rel=0.07)


@pytest.mark.parametrize("shape", WIDE_GRADIENT_US)
def test_backward_of_wide_heads_of_an_h200(shape, h200):
    batch, length, heads = shape
    found = kernel_seconds(AttentionPass("backward triton", batch, heads, heads, length, 128), h200)
    assert found * 1e6 == pytest.approx(WIDE_GRADIENT_US[shape], rel=0.17)


@pytest.mark.parametrize("shape", SHORT_US)
def test_small_programs_of_an_h200(shape, h200):
    batch, length, heads, head_dim = shape
    found = kernel_seconds(AttentionPass("forward short", batch, heads, heads, length, head_dim), h200)
    assert found * 1e6 == pytest.approx(SHORT_US[shape], rel=0.08)


@pytest.mark.parametrize("shape", HEADS_ABOVE_128_US)
def test_head_dims_above_128_of_an_h200(shape, h200):
    name, batch, length, head_dim = shape
    found = kernel_seconds(AttentionPass(name, batch, 16, 16, length, head_dim), h200)
    assert found * 1e6 == pytest.approx(HEADS_ABOVE_128_US[shape], rel=0.03)
    padded = kernel_seconds(AttentionPass(name, batch, 16, 16, length, head_dim - 56), h200)
    assert padded == pytest.approx(found), "other head dims use 192 or 256 columns"


def test_head_dims_above_128_in_profiles_without_them(h200):
    """8 matmuls in place of the 5 of backward."""
    known = {name: own for name, own in h200.attention.items() if int(name.split()[-1]) <= 128}
    older = dataclasses.replace(h200, attention=known)
    for shape, measured in HEADS_ABOVE_128_US.items():
        name, batch, length, head_dim = shape
        found = kernel_seconds(AttentionPass(name, batch, 16, 16, length, head_dim), older)
        assert found * 1e6 == pytest.approx(measured, rel=0.18)


def test_portable_kernels_pad_the_head_dim(h200):
    for name in ("forward small", "backward small", "forward triton", "backward triton"):
        narrow, padded = (kernel_seconds(AttentionPass(name, 4, 8, 4, 500, dim), h200) for dim in (80, 128))
        assert narrow == padded


def test_small_tiles_wait_for_their_operands(h200):
    """The time for a unit of depth has a least value, whatever the tile."""
    shallow, deep = (matmul_seconds(384, 768, depth, False, False, h200) for depth in (768, 1920))
    assert deep - shallow == pytest.approx(1152 * h200.matmul.least, rel=0.4)
    at_once = dataclasses.replace(h200, matmul=dataclasses.replace(h200.matmul, least=0.0))
    assert matmul_seconds(384, 768, 1920, False, False, at_once) < deep
    large = (8192, 8192, 1024, False, False)
    assert matmul_seconds(*large, at_once) == matmul_seconds(*large, h200)


def test_heads_that_share_nothing_wait_for_memory(h200):
    """119 heads have no divisor that fits the cache: programs that run side by side share no queries."""
    alone, shared = (AttentionPass("backward", 7, heads, heads, 1792, 128) for heads in (17, 20))
    assert kernel_seconds(alone, h200) / 17 > 1.2 * kernel_seconds(shared, h200) / 20


def test_rates_of_head_dims_that_were_not_measured(h200):
    def tile(dim, name="forward"):
        return attention_rates(h200, AttentionPass(name, 1, 8, 8, 1024, dim)).tile

    assert tile(32) == tile(64) < tile(80) < tile(96) < tile(128) < tile(192) < tile(256)
    assert tile(256, "forward flash2") == pytest.approx(2 * tile(128, "forward flash2"))


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_profiles_of_other_cards_are_from_data_sheets(h200):
    run = run_of("large", 1024, 8)
    times = {}
    for name in ("h200", "h100", "a100-40gb"):
        own = profile_of(find_card(name))
        assert own.source == (MEASURED if name == "h200" else DATA_SHEET)
        times[name] = step_time(run, own).seconds
    assert times["h200"] < times["h100"] < times["a100-40gb"]
    assert 2.5 < times["a100-40gb"] / times["h200"] < 4
    assert profile_of(find_card("h200")) == h200


def test_a_profile_survives_json_and_a_broken_one_is_named(h200):
    again = GpuProfile.of(json.loads(json.dumps(h200.to_dict())))
    assert again == h200
    for broken in ({}, {**h200.to_dict(), "matmul": 3}, {**h200.to_dict(), "more": 1}):
        with pytest.raises(UserError, match="not a GPU profile"):
            GpuProfile.of(broken)


def test_a_profile_of_another_version_is_not_used(h200):
    path = keep_profile(dataclasses.replace(h200, version=1, small=1.0))
    with pytest.warns(UserWarning, match=f"{re.escape(repr(str(path)))} is not used: another version"):
        assert profile_of(find_card("h200")).small == h200.small


def test_matmuls_of_unaligned_sizes_are_slow_on_hopper_alone(h200):
    assert profile_of(find_card("h100")).unaligned == h200.unaligned
    assert profile_of(find_card("4090")).unaligned == {}
    keep_profile(dataclasses.replace(h200, unaligned={}))  # as a calibration leaves it
    assert profile_of(find_card("h200")).unaligned == h200.unaligned


def test_a_profile_measured_here_comes_first(h200):
    path = keep_profile(dataclasses.replace(h200, gpu="NVIDIA H200", small=5e-6))
    assert profile_of(find_card("h200")).small == 5e-6
    path.write_text("{")
    with pytest.warns(UserWarning, match="is not used"):
        assert profile_of(find_card("h200")).small == h200.small
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_of(find_card("h200")) == h200


def test_families_have_times(h200):
    model = ModelConfig(
        vocab_size=50_257, d_model=1024, num_heads=16, num_kv_heads=4, d_ff=2816, num_layers=4, context_length=1024,
        qk_norm=True, qkv_bias=True, tied_embeddings=True,
    )  # fmt: skip
    run = dataclasses.replace(run_of(), model=model)
    names = step_time(run, h200).by_name()
    assert {"norm_rotate", "sum of biases' gradients"} <= set(names)
