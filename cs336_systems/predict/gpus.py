"""What GPUs can do at most, by the names that their drivers give: dense FLOP/s and bytes per second of their memory.

From the vendors' data sheets; where a sheet gives sparse figures, half of them. What is not known is None: no guesses.
"""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """Dense TFLOP/s: fp32 on CUDA cores, tf32, bf16, fp16 with fp32 accumulation (None: no such unit); and GB/s."""

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float | None = None
    """None where sheets differ, or where one name stands for cards with other memory."""


_GPUS: list[tuple[str, Gpu]] = [
    (r"GB200", Gpu(80.0, 1250.0, 2500.0, 2500.0, 8000.0)),
    (r"\bB200", Gpu(75.0, 1125.0, 2250.0, 2250.0)),
    (r"H200 NVL", Gpu(60.0, 417.5, 835.5, 835.5, 4800.0)),
    (r"GH200 480GB", Gpu(66.9, 494.7, 989.4, 989.4, 4000.0)),
    (r"GH200", Gpu(66.9, 494.7, 989.4, 989.4)),
    (r"H200", Gpu(66.9, 494.7, 989.4, 989.4, 4800.0)),
    (r"H100 80GB HBM3|H100 SXM|H800(?! PCIe)", Gpu(66.9, 494.7, 989.4, 989.4, 3350.0)),
    (r"H100 NVL", Gpu(60.0, 417.5, 835.5, 835.5, 3900.0)),
    (r"H100 PCIe|H800 PCIe", Gpu(51.2, 378.0, 756.0, 756.0, 2000.0)),
    (r"\bH20-3e", Gpu(44.0, 74.0, 148.0, 148.0)),
    (r"\bH20\b", Gpu(44.0, 74.0, 148.0, 148.0, 4000.0)),
    (r"A[18]00-SXM4-80GB", Gpu(19.5, 156.0, 312.0, 312.0, 2039.0)),
    (r"A[18]00 80GB PCIe", Gpu(19.5, 156.0, 312.0, 312.0, 1935.0)),
    (r"A100-(SXM4|PCIE)-40GB", Gpu(19.5, 156.0, 312.0, 312.0, 1555.0)),
    (r"A100|A800", Gpu(19.5, 156.0, 312.0, 312.0)),
    (r"RTX PRO 6000 Blackwell (Max-Q )?Workstation", Gpu(125.0, 251.9, 503.8, 503.8, 1792.0)),
    (r"RTX PRO 6000 Blackwell", Gpu(125.0, 251.9, 503.8, 503.8)),
    (r"RTX 6000 Ada", Gpu(91.1, 182.1, 364.2, 364.2, 960.0)),
    (r"L40S", Gpu(91.6, 183.0, 362.0, 362.0, 864.0)),
    (r"L40\b", Gpu(90.5, 90.5, 181.0, 181.0, 864.0)),
    (r"\bL20\b", Gpu(59.8, 59.8, 119.5, 119.5, 864.0)),
    (r"\bL4\b", Gpu(30.3, 60.0, 121.0, 121.0, 300.0)),
    (r"RTX A6000", Gpu(38.7, 77.4, 154.8, 154.8, 768.0)),
    (r"\bA40\b", Gpu(37.4, 74.8, 149.7, 149.7, 696.0)),
    (r"\bA10G", Gpu(31.5, 35.0, 70.0, 70.0, 600.0)),
    (r"\bA10\b", Gpu(31.2, 62.5, 125.0, 125.0, 600.0)),
    (r"\bA30\b", Gpu(10.3, 82.0, 165.0, 165.0, 933.0)),
    (r"RTX 5090(?! D)", Gpu(104.8, 104.8, 209.5, 209.5, 1792.0)),
    (r"RTX 5080", Gpu(56.3, 56.3, 112.6, 112.6, 960.0)),
    (r"RTX 4090 D", Gpu(73.5, 73.5, 147.0, 147.0, 1008.0)),
    (r"RTX 4090", Gpu(82.6, 82.6, 165.2, 165.2, 1008.0)),
    (r"RTX 4080 SUPER", Gpu(52.2, 52.2, 104.4, 104.4, 736.0)),
    (r"RTX 4080", Gpu(48.7, 48.7, 97.5, 97.5, 716.8)),
    (r"RTX 3090 Ti", Gpu(40.0, 40.0, 80.0, 80.0, 1008.0)),
    (r"RTX 3090", Gpu(35.6, 35.6, 71.2, 71.2, 936.0)),
    (r"RTX 3080(?! Ti)", Gpu(29.8, 29.8, 59.5, 59.5)),
    (r"RTX 2080 Ti", Gpu(13.4, None, None, 53.8, 616.0)),
    (r"V100-(SXM2|PCIE)", Gpu(15.7, None, None, 125.0, 900.0)),
    (r"V100", Gpu(15.7, None, None, 125.0)),
    (r"\bT4\b", Gpu(8.1, None, None, 65.0)),
]
"""By a pattern that the driver's name holds; the first that matches counts."""


def _known(name: str | None) -> Gpu | None:
    if not name or "Laptop" in name:  # it has the name of a faster card
        return None
    return next((gpu for pattern, gpu in _GPUS if re.search(pattern, name)), None)


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Dense peak in FLOP/s of a GPU by its driver's name."""
    known = _known(gpu)
    peak = known._asdict()[precision] if known else None
    return None if peak is None else peak * 1e12


def memory_bandwidth(gpu: str | None) -> float | None:
    """Bytes per second between a GPU and its memory, by its driver's name."""
    known = _known(gpu)
    return None if known is None or known.bandwidth is None else known.bandwidth * 1e9
