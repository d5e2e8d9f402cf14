"""What is known of GPUs by their names, and that nothing is guessed."""

import re

import pytest

from cs336_systems.experiments.ranks.layouts import NODES
from cs336_systems.predict.gpus import _GPUS, Gpu, memory_bandwidth, peak_flops


def test_peaks_are_known_by_name_and_never_guessed():
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == 494.7e12
    assert peak_flops("NVIDIA H800 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H20", "bf16") == 148e12
    assert peak_flops("NVIDIA GeForce RTX 4090 D", "bf16") == 147e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "fp32") == 82.6e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("NVIDIA RTX 9999", "bf16") is None
    assert peak_flops(None, "fp32") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32") is None
    assert peak_flops("NVIDIA GeForce RTX 3080 Ti", "fp32") is None


def test_what_is_no_precision_is_a_mistake():
    for name in ("int8", "bandwidth_", "index", ""):
        with pytest.raises(KeyError):
            peak_flops("NVIDIA H200", name)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H200 NVL", 4800),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA H800 PCIe", 2000),
        ("NVIDIA H800", 3350),
        ("NVIDIA H20", 4000),
        ("NVIDIA H20-3e", None),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A800-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("A100", None),
        ("NVIDIA GeForce RTX 5090", 1792),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3080", None),
        ("Tesla V100-SXM2-16GB", 900),
        ("Tesla V100S-PCIE-32GB", None),
        ("NVIDIA RTX 9999", None),
        ("", None),
        (None, None),
    ],
)
def test_bandwidths_are_known_by_name_and_never_guessed(name, gigabytes):
    assert memory_bandwidth(name) == (None if gigabytes is None else gigabytes * 1e9)


def test_every_entry_can_be_found_and_is_in_its_units():
    """A pattern that an earlier one covers would never be used; a figure of ten times its unit would be a slip."""
    for number, (pattern, gpu) in enumerate(_GPUS):
        plain = re.sub(r"\\b|\(\?![^)]*\)", "", pattern)
        for written, meant in ((r"\(([^|)]*)[^)]*\)\??", r"\1"), (r"\[18\]", "1"), (r"\|.*", "")):
            plain = re.sub(written, meant, plain)
        name = f"NVIDIA {plain}"
        assert next(place for place, (other, _) in enumerate(_GPUS) if re.search(other, name)) == number, name
        rates = [rate for rate in gpu[:4] if rate is not None]
        assert rates == sorted(rates), name
        assert all(5 < rate < 5000 for rate in rates)
        assert gpu.bandwidth is None or 250 < gpu.bandwidth < 9000


def test_gpus_of_plans_are_in_the_table():
    assert all(peak_flops(node.driver_name, "bf16") for node in NODES.values())
    assert Gpu._fields[:4] == ("fp32", "tf32", "bf16", "fp16")
