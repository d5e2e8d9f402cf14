"""The table of GPUs: memory, bandwidth, dense peak FLOP/s and interconnect. A new GPU, or a new figure, is one line.
An architecture says what its GPUs have in common: FP8, the link to the host, and for Hopper the kernels of the H200.

`fit` and `plan` look a GPU up by its card name (`4090`, `h100`), MFU and rooflines by the name that its driver reports
(`NVIDIA H100 80GB HBM3`). Figures are those of the vendors' data sheets; sparse figures are halved. Unknown figures are
None, never a guess.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from cs336_systems.record import GIB, MIB

TERA, GIGA = 1e12, 1e9
PCIE_LINK, ETHERNET = 25.0, 3.0
"""GB/s, one way, that `plan` assumes for GPUs whose interconnect is not in the table: PCIe 4.0 x16, and 25 Gb/s."""


class Architecture(NamedTuple):
    name: str
    has_fp8: bool
    """True if the tensor cores support FP8: compute capability 8.9 and later."""
    host_link: float
    """GB/s, one way, to pinned host memory: PCIe 5.0 x16 as measured on an H200, or PCIe 4.0 x16."""


VOLTA = Architecture("Volta", False, PCIE_LINK)
TURING = Architecture("Turing", False, PCIE_LINK)
AMPERE = Architecture("Ampere", False, PCIE_LINK)
ADA = Architecture("Ada", True, PCIE_LINK)
HOPPER = Architecture("Hopper", True, 55.0)
BLACKWELL = Architecture("Blackwell", True, 55.0)


class Peaks(NamedTuple):
    """Dense TFLOP/s by precision: fp32 on CUDA cores, fp16 with fp32 accumulation. None: not supported."""

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None

    def of(self, precision: str) -> float | None:
        return self._asdict()[precision]


@dataclass(frozen=True)
class GPU:
    name: str
    """The name shown to users; without the vendor's prefix it is the card name that `fit` and `plan` accept."""
    architecture: Architecture
    driver_name: str
    """A regular expression for the driver's name; the first GPU in the table that matches counts."""
    peaks: Peaks
    bandwidth: float | None = None
    """Memory bandwidth in GB/s. None if data sheets differ, or if one name stands for GPUs with different memory."""
    memory_gib: float | None = None
    """GiB that CUDA reports, with ECC where it is on by default; a GPU without it cannot be chosen by card name."""
    link: float | None = None
    """GB/s, one way, to the other GPUs of a node of eight: NVLink or PCIe."""
    network: float | None = None
    """GB/s, one way, to other nodes: 400 or 200 Gb/s per GPU; for cards with PCIe one 200 Gb/s adapter per node."""
    aliases: tuple[str, ...] = ()
    """Other names for it that users give."""

    @property
    def card(self) -> str:
        return card_name(self.name)

    @property
    def host_link(self) -> float:
        """GB/s, one way, to pinned host memory."""
        return self.architecture.host_link

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s; that of FP8, with fp32 sums, is twice that of bf16 where there is one."""
        if precision == "fp8":
            return 2 * self.peaks.bf16 * TERA if self.peaks.bf16 and self.architecture.has_fp8 else None
        peak = self.peaks.of(precision)
        return None if peak is None else peak * TERA


_B200 = Peaks(75.0, 1125.0, 2250.0, 2250.0)
_H100 = Peaks(66.9, 494.7, 989.4, 989.4)
_H100_NVL = Peaks(60.0, 417.5, 835.5, 835.5)
_H20 = Peaks(44.0, 74.0, 148.0, 148.0)
_A100 = Peaks(19.5, 156.0, 312.0, 312.0)
_PRO_6000 = Peaks(125.0, 251.9, 503.8, 503.8)
_V100 = Peaks(15.7, None, None, 125.0)

GPUS = (
    GPU("GB200", BLACKWELL, r"GB200", Peaks(80.0, 1250.0, 2500.0, 2500.0), 8000.0),
    GPU("B200", BLACKWELL, r"\bB200", _B200, memory_gib=178.4, link=900, network=50),
    GPU("H200 NVL", HOPPER, r"H200 NVL", _H100_NVL, 4800.0, memory_gib=139.8),
    GPU("GH200 480GB", HOPPER, r"GH200 480GB", _H100, 4000.0, memory_gib=94.5),
    GPU("GH200", HOPPER, r"GH200", _H100),
    GPU("H200", HOPPER, r"H200", _H100, 4800.0, memory_gib=139.8, link=450, network=50),
    GPU(
        "H100",
        HOPPER,
        r"H100 80GB HBM3|H100 SXM",
        _H100,
        3350.0,
        memory_gib=79.2,
        link=450,
        network=50,
        aliases=("H100 SXM", "H100 80GB HBM3"),
    ),
    GPU("H800", HOPPER, r"H800(?! PCIe)", _H100, 3350.0, memory_gib=79.2, link=200, network=50),
    GPU("H100 NVL", HOPPER, r"H100 NVL", _H100_NVL, 3900.0, memory_gib=93.0),
    GPU("H100 PCIe", HOPPER, r"H100 PCIe|H800 PCIe", Peaks(51.2, 378.0, 756.0, 756.0), 2000.0, memory_gib=79.2),
    GPU("H20-3e", HOPPER, r"\bH20-3e", _H20, memory_gib=139.8),
    GPU("H20", HOPPER, r"\bH20\b", _H20, 4000.0, memory_gib=95.1, link=450, network=50),
    GPU("A100-SXM4-80GB", AMPERE, r"A[18]00-SXM4-80GB", _A100, 2039.0, memory_gib=79.2),
    GPU("A100-PCIE-80GB", AMPERE, r"A[18]00 80GB PCIe", _A100, 1935.0, memory_gib=79.2),
    GPU("A100-40GB", AMPERE, r"A100-(SXM4|PCIE)-40GB", _A100, 1555.0, memory_gib=39.4),
    GPU("A100", AMPERE, r"A100", _A100, memory_gib=79.2, link=300, network=25),
    GPU("A800", AMPERE, r"A800", _A100, memory_gib=79.2, link=200, network=25),
    GPU(
        "RTX PRO 6000 Workstation",
        BLACKWELL,
        r"RTX PRO 6000 Blackwell (Max-Q )?Workstation",
        _PRO_6000,
        1792.0,
        94.9,
        link=50,
        network=3,
        aliases=("RTX PRO 6000 Blackwell Workstation", "RTX PRO 6000 Blackwell Workstation Edition"),
    ),
    GPU(
        "RTX PRO 6000",
        BLACKWELL,
        r"RTX PRO 6000 Blackwell",
        _PRO_6000,
        memory_gib=94.9,
        link=50,
        network=3,
        aliases=("RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell Server Edition"),
    ),
    GPU("RTX 6000 Ada", ADA, r"RTX 6000 Ada", Peaks(91.1, 182.1, 364.2, 364.2), 960.0, memory_gib=44.4),
    GPU("L40S", ADA, r"L40S", Peaks(91.6, 183.0, 362.0, 362.0), 864.0, memory_gib=44.4),
    GPU("L40", ADA, r"L40\b", Peaks(90.5, 90.5, 181.0, 181.0), 864.0, memory_gib=44.4),
    GPU("L20", ADA, r"\bL20\b", Peaks(59.8, 59.8, 119.5, 119.5), 864.0, memory_gib=44.4),
    GPU("L4", ADA, r"\bL4\b", Peaks(30.3, 60.0, 121.0, 121.0), 300.0, memory_gib=22.0),
    GPU("RTX A6000", AMPERE, r"RTX A6000", Peaks(38.7, 77.4, 154.8, 154.8), 768.0, memory_gib=47.4),
    GPU("A40", AMPERE, r"\bA40\b", Peaks(37.4, 74.8, 149.7, 149.7), 696.0, memory_gib=44.4),
    GPU("A10G", AMPERE, r"\bA10G", Peaks(31.5, 35.0, 70.0, 70.0), 600.0, memory_gib=22.1),
    GPU("A10", AMPERE, r"\bA10\b", Peaks(31.2, 62.5, 125.0, 125.0), 600.0, memory_gib=22.1),
    GPU("A30", AMPERE, r"\bA30\b", Peaks(10.3, 82.0, 165.0, 165.0), 933.0, memory_gib=23.6),
    GPU("RTX 5090", BLACKWELL, r"RTX 5090(?! D)", Peaks(104.8, 104.8, 209.5, 209.5), 1792.0, 31.4, link=50, network=3),
    GPU("RTX 5080", BLACKWELL, r"RTX 5080", Peaks(56.3, 56.3, 112.6, 112.6), 960.0, memory_gib=15.5),
    GPU("RTX 4090 D", ADA, r"RTX 4090 D", Peaks(73.5, 73.5, 147.0, 147.0), 1008.0, memory_gib=23.5),
    GPU("RTX 4090", ADA, r"RTX 4090", Peaks(82.6, 82.6, 165.2, 165.2), 1008.0, memory_gib=23.5, link=25, network=3),
    GPU("RTX 4080 SUPER", ADA, r"RTX 4080 SUPER", Peaks(52.2, 52.2, 104.4, 104.4), 736.0, memory_gib=15.7),
    GPU("RTX 4080", ADA, r"RTX 4080", Peaks(48.7, 48.7, 97.5, 97.5), 716.8, memory_gib=15.7),
    GPU("RTX 3090 Ti", AMPERE, r"RTX 3090 Ti", Peaks(40.0, 40.0, 80.0, 80.0), 1008.0, memory_gib=23.6),
    GPU("RTX 3090", AMPERE, r"RTX 3090", Peaks(35.6, 35.6, 71.2, 71.2), 936.0, memory_gib=23.7),
    GPU("RTX 3080", AMPERE, r"RTX 3080(?! Ti)", Peaks(29.8, 29.8, 59.5, 59.5), memory_gib=9.8),
    GPU("RTX 2080 Ti", TURING, r"RTX 2080 Ti", Peaks(13.4, None, None, 53.8), 616.0, memory_gib=10.7),
    GPU("V100 SXM2", VOLTA, r"V100-(SXM2|PCIE)", _V100, 900.0),
    GPU("V100", VOLTA, r"V100", _V100, memory_gib=15.8),
    GPU("T4", TURING, r"\bT4\b", Peaks(8.1, None, None, 65.0), memory_gib=14.6),
)


UNITS = {"gib": GIB, "gb": 10**9, "g": GIB, "mib": MIB, "mb": 10**6, "m": MIB}
"""Units of memory sizes in lower case, with their bytes; a bare number is one of GiB."""


def memory_size(text: str) -> tuple[float, str] | None:
    """Return the bytes of a size such as `24GiB`, `80GB`, `512MiB` or `24` (GiB), and its unit as written; None if it
    is not a size."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})?\s*", text, re.IGNORECASE)
    if match is None:
        return None
    unit = match[2] or ""
    return float(match[1]) * UNITS.get(unit.lower(), GIB), unit


def card_name(text: str) -> str:
    """Return a GPU's name in lower case, without vendor, series and spaces: `NVIDIA GeForce RTX 4090` -> `4090`."""
    return re.sub(r"nvidia|geforce|rtx|tesla|[\s_]", "", text.lower())


CARDS = {gpu.card: gpu for gpu in GPUS if gpu.memory_gib is not None}
"""The GPUs that can be chosen by card name."""
BY_NAME = {card_name(name): gpu for gpu in CARDS.values() for name in (gpu.name, *gpu.aliases)}
"""The same GPUs by card name and by alias."""
H200 = CARDS["h200"]
"""The GPU on which the package's rates were measured: other GPUs' rates are in proportion to their figures."""


def find_card(text: str) -> GPU | None:
    """Return the GPU that a user names, such as `4090` or `RTX 4090`."""
    return BY_NAME.get(card_name(text))


def shown_name(text: str) -> str:
    """Return the name that tables use for a GPU as the user wrote it: that of its card, if it is known."""
    card = find_card(text)
    return card.name if card else text


def find_by_driver_name(name: str | None) -> GPU | None:
    """Return the GPU whose driver reports `name`; laptop GPUs carry the name of a faster card and are unknown."""
    if not name or "Laptop" in name:
        return None
    return next((gpu for gpu in GPUS if re.search(gpu.driver_name, name)), None)


def peak_flops(driver_name: str | None, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s."""
    gpu = find_by_driver_name(driver_name)
    return None if gpu is None else gpu.peak_flops(precision)


def memory_bandwidth(driver_name: str | None) -> float | None:
    """Return the memory bandwidth of a GPU in bytes per second."""
    gpu = find_by_driver_name(driver_name)
    return None if gpu is None or gpu.bandwidth is None else gpu.bandwidth * GIGA
