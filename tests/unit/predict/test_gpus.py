"""The table of GPUs: lookups by driver name and by card name; unknown GPUs are never guessed."""

import re

import pytest

from cs336_systems.predict.gpus import (
    CARDS,
    GPUS,
    H200,
    HOPPER,
    card_name,
    find_by_driver_name,
    find_card,
    memory_bandwidth,
    memory_size,
    peak_flops,
)
from cs336_systems.predict.memory_planner import Rates
from cs336_systems.predict.time.gpu_profile import profile_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("80gb", 80e9),
        ("1.5 G", 1.5 * 2**30),
        ("512MiB", 2**29),
        ("500MB", 5e8),
        ("512m", 2**29),
        ("24", 24 * 2**30),
        ("24KiB", None),
        ("MiB", None),
        ("-1GiB", None),
    ],
)
def test_sizes_of_memory(text, size):
    found = memory_size(text)
    assert (found and found[0]) == size


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth"),
    [
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA H200 NVL", 835.5, 4800),
        ("NVIDIA GH200 480GB", 989.4, 4000),
        ("NVIDIA GH200 144G HBM3e", 989.4, None),
        ("NVIDIA H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H800 PCIe", 756, 2000),
        ("NVIDIA H800", 989.4, 3350),
        ("NVIDIA H20", 148, 4000),
        ("NVIDIA H20-3e", 148, None),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A800-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("A100", 312, None),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA GeForce RTX 5090", 209.5, 1792),
        ("NVIDIA GeForce RTX 5090 D", None, None),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 4090 D", 147, 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 3080", 59.5, None),
        ("NVIDIA GeForce RTX 3080 Ti", None, None),
        ("Tesla V100-SXM2-16GB", None, 900),
        ("Tesla V100S-PCIE-32GB", None, None),
        ("NVIDIA RTX 9999", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_rates_by_driver_name(name, bf16, bandwidth):
    assert peak_flops(name, "bf16") == (None if bf16 is None else bf16 * 1e12)
    assert memory_bandwidth(name) == (None if bandwidth is None else bandwidth * 1e9)


def test_rates_by_precision():
    for precision, tera in (("fp32", 66.9), ("tf32", 494.7), ("fp16", 989.4)):
        assert peak_flops("NVIDIA H200", precision) == tera * 1e12
    for unknown in ("int8", "index", ""):
        with pytest.raises(KeyError):
            peak_flops("NVIDIA H200", unknown)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_found_and_in_its_units(gpu):
    """An earlier pattern must not cover a later one; a figure ten times off is a slip."""
    plain = re.sub(r"\\b|\(\?![^)]*\)", "", gpu.driver_name)
    for written, meant in ((r"\(([^|)]*)[^)]*\)\??", r"\1"), (r"\[18\]", "1"), (r"\|.*", "")):
        plain = re.sub(written, meant, plain)
    assert find_by_driver_name(f"NVIDIA {plain}") is gpu
    peaks = [peak for peak in gpu.peaks if peak is not None]
    assert peaks == sorted(peaks)
    assert gpu.peak_flops("fp8") in (None, 2 * (gpu.peak_flops("bf16") or 0))
    assert all(5 < peak < 5000 for peak in peaks)
    for value, low, high in ((gpu.bandwidth, 250, 9000), (gpu.memory_gib, 9, 300), (gpu.link, 20, 2000)):
        assert value is None or low < value < high
    assert (gpu.link is None) == (gpu.network is None)


@pytest.mark.parametrize("text", ["4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx_4090"])
def test_a_card_is_found_by_any_spelling(text):
    assert find_card(text) is CARDS["4090"]


def test_card_names_are_unique():
    cards = [gpu.card for gpu in GPUS] + [card_name(alias) for gpu in GPUS for alias in gpu.aliases]
    assert len(cards) == len(set(cards))
    assert {"3080", "4090d", "2080ti", "a6000", "a100-40gb", "l40s", "h20", "t4", "v100"} <= CARDS.keys()
    assert find_card("4070") is None


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("RTX PRO 6000", "pro6000"),
        ("RTX PRO 6000 Blackwell", "pro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "pro6000"),
        ("RTX PRO 6000 Blackwell Workstation", "pro6000workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "pro6000workstation"),
        ("H100 SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_a_card_is_found_by_its_other_names(text, card):
    assert find_card(text) is CARDS[card]
    assert find_by_driver_name(text) in (CARDS[card], None)


NAMES_BY_GROUP = {
    ("FP8", "Hopper", 55.0): "GH200 480GB|GH200|H200 NVL|H200|H100 NVL|H100 PCIe|H100|H800|H20-3e|H20",
    ("FP8", "", 55.0): "GB200|B200|RTX PRO 6000 Workstation|RTX PRO 6000|RTX 5090|RTX 5080",
    ("FP8", "", 25.0): "RTX 6000 Ada|L40S|L40|L20|L4|RTX 4090 D|RTX 4090|RTX 4080 SUPER|RTX 4080",
    ("", "", 25.0): "A100-SXM4-80GB|A100-PCIE-80GB|A100-40GB|A100|A800|RTX A6000|A40|A10G|A10|A30|RTX 3090 Ti|RTX 3090|"
    "RTX 3080|RTX 2080 Ti|V100 SXM2|V100|T4",
}
"""(FP8, kernels of the H200, GB/s to the host) -> GPUs, as regular expressions over names gave them before the table
had architectures."""


def test_architectures_give_what_names_gave():
    by_name = {gpu.name: gpu for gpu in GPUS}
    unaligned = profile_of(CARDS["h200"]).unaligned
    for (fp8, hopper, host_link), names in NAMES_BY_GROUP.items():
        for gpu in (by_name.pop(name) for name in names.split("|")):
            has_fp8 = bool(fp8 and gpu.peaks.bf16)
            assert gpu.peak_flops("fp8") == (2e12 * gpu.peaks.bf16 if has_fp8 else None), gpu
            assert gpu.host_link == host_link, gpu
            assert (gpu.architecture == HOPPER) == bool(hopper), gpu
            if profile := profile_of(gpu, "fp16"):
                assert profile.unaligned == (unaligned if hopper else {}), gpu


def test_an_unknown_gpu_has_the_rates_of_the_h200():
    for precision in ("bf16", "fp8"):
        assert Rates.of(None, precision) == Rates.of(CARDS["h200"], precision)
    assert Rates.of(None).host == 55e9
    assert CARDS["h200"] is H200


def test_fp8_peaks_are_those_of_the_data_sheets():
    found = {
        card: CARDS[card].peak_flops("fp8") for card in ("h200", "4090", "l4", "l40s", "b200", "a100", "3090", "v100")
    }
    assert {card: peak and round(peak / 1e12) for card, peak in found.items()} == {
        "h200": 1979, "4090": 330, "l4": 242, "l40s": 724, "b200": 4500, "a100": None, "3090": None, "v100": None,
    }  # fmt: skip
