"""One feed-forward layer on N devices in closed form: FLOPs, bytes, times, the largest N. No torch.

x is B x D, W1 and W2 are D x F, W3 is F x D, an element has two bytes. A device computes C FLOP/s and sends W bytes/s.
Forward has three matmuls of 2 B D F FLOPs, backward six. A ring all-reduce of S bytes sends 2 (N-1)/N S from each
device, an all-gather or a reduce-scatter half of that.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

BYTES = 2
"""Bytes per element."""
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Layer:
    tokens: int
    """B: tokens on all devices together."""
    width: int
    """D."""
    inner: int
    """F."""
    flops: float
    """C: FLOP/s of a device."""
    bandwidth: float
    """W: bytes/s that a device sends."""

    @property
    def weights(self) -> float:
        """Bytes of the three matrices."""
        return 3 * BYTES * self.width * self.inner

    @property
    def stream(self) -> float:
        """Bytes of x."""
        return BYTES * self.tokens * self.width

    def work(self, during: Pass) -> float:
        """FLOPs of a pass on all devices together."""
        return (6 if during == "forward" else 12) * self.tokens * self.width * self.inner


class Cost(NamedTuple):
    """Seconds of one pass on one device."""

    flops: float
    sent: float
    compute: float
    """Seconds of matmuls."""
    communication: float
    """Seconds of communication, which may overlap with `compute`."""


def _cost(layer: Layer, devices: int, during: Pass, sent: float) -> Cost:
    flops = layer.work(during) / devices
    return Cost(flops, sent, flops / layer.flops, sent / layer.bandwidth)


def data_parallel(layer: Layer, devices: int, during: Pass) -> Cost:
    """Return the cost with all weights on every device; backward all-reduces their gradients."""
    sent = 2 * _others(devices) * layer.weights if during == "backward" else 0.0
    return _cost(layer, devices, during, sent)


def fully_sharded(layer: Layer, devices: int, during: Pass) -> Cost:
    """Return the cost with sharded weights: forward gathers them; backward gathers them again and scatters their
    gradients."""
    sent = (1 if during == "forward" else 2) * _others(devices) * layer.weights
    return _cost(layer, devices, during, sent)


def tensor_parallel(layer: Layer, devices: int, during: Pass) -> Cost:
    """Return the cost with W1 and W2 split by columns, W3 by rows; forward all-reduces the output, backward the
    gradient of the input."""
    return _cost(layer, devices, during, 2 * _others(devices) * layer.stream)


def _others(devices: int) -> float:
    return (devices - 1) / devices


LAYOUTS = {"DP": data_parallel, "FSDP": fully_sharded, "TP": tensor_parallel}


def most_devices(layer: Layer, layout: str, during: Pass) -> float:
    """Return the number of devices, not rounded, up to which communication hides behind matmuls; inf without
    communication.

    DP and FSDP: (N-1)/W <= B/C. TP: 4 B D (N-1) / (N W) <= 6 B D F / (N C) in forward, twice that in backward.
    """
    ratio = layer.bandwidth / layer.flops
    if layout == "TP":
        return 1 + (1.5 if during == "forward" else 3.0) * layer.inner * ratio
    return math.inf if layout == "DP" and during == "forward" else 1 + layer.tokens * ratio


class Split(NamedTuple):
    """Forward with FSDP over `sharded` groups of `tensor` devices each."""

    sharded: int
    tensor: int
    compute: float
    gather: float
    """Seconds to gather a device's part of the weights."""
    reduce: float
    """Seconds to all-reduce a group's output."""

    @property
    def overlapped(self) -> float:
        """Seconds if matmuls and both communications overlap, over links of their own."""
        return max(self.compute, self.gather, self.reduce)

    @property
    def in_turn(self) -> float:
        """Seconds if the two communications run one after the other on one link, and overlap with matmuls."""
        return max(self.compute, self.gather + self.reduce)


def split(layer: Layer, sharded: int, tensor: int) -> Split:
    gather = _others(sharded) * layer.weights / tensor
    reduce = 2 * _others(tensor) * layer.stream / sharded
    compute = layer.work("forward") / (sharded * tensor) / layer.flops
    return Split(sharded, tensor, compute, gather / layer.bandwidth, reduce / layer.bandwidth)


def splits(layer: Layer, devices: int) -> list[Split]:
    """Return every way to split the devices."""
    return [split(layer, devices // tensor, tensor) for tensor in range(1, devices + 1) if devices % tensor == 0]


def best_tensor_degree(layer: Layer, devices: int) -> float:
    """Return the tensor-parallel degree, not rounded, with the least total communication, for many devices.

    With N devices in groups of T, gathering takes about 6 D F / (T W) and reducing 4 B D T / (N W): their sum is least
    where they are equal, at T = sqrt(3 F N / (2 B)).
    """
    return math.sqrt(1.5 * layer.inner * devices / layer.tokens)


def ring_of_whole_tensors(nbytes: float, devices: int, bandwidth: float) -> float:
    """Return the seconds of an all-reduce that passes whole tensors round the ring: N - 1 times S bytes, N/2 times the
    usual."""
    return (devices - 1) * nbytes / bandwidth


def ring(nbytes: float, devices: int, bandwidth: float) -> float:
    """Return the seconds of the usual ring all-reduce: a reduce-scatter and an all-gather of S/N bytes at a time."""
    return 2 * _others(devices) * nbytes / bandwidth
