"""Step times as commands and reports show them: of a configuration on a known GPU, with an interval. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.gpus import GPU
from cs336_systems.predict.time.profile import DATA_SHEET, GpuProfile, profile_of
from cs336_systems.predict.time.step_time import StepTime, step_time
from cs336_systems.text import Text, listed, say

SETTINGS = {"mode": "train-step", "precision": "bf16", "attention": "auto", "fast": "on"}
"""Settings of the steps that are shown with a predicted time."""


class Predicted(NamedTuple):
    """A step's time on a GPU."""

    time: StepTime
    profile: GpuProfile
    peak: float
    """FLOP/s of the GPU's data sheet, which MFU is relative to."""

    @property
    def mfu(self) -> float:
        return self.time.mfu(self.peak)

    @property
    def milliseconds(self) -> str:
        """The step's time and half of the interval in which a measurement is expected."""
        middle, half = 1e3 * self.time.seconds, 1e3 * (self.time.high - self.time.low) / 2
        digits = 0 if middle >= 1000 else 1 if middle >= 100 else 2
        return f"{middle:,.{digits}f} ± {half:,.{digits}f}"


def predicted_on(config: RunConfig, gpu: GPU | None, micro_batches: int = 1) -> Predicted | None:
    """Return the time of a fast step; None where its kernels or the GPU's rates are not known, and without a CUDA
    graph, where the host's speed decides as much as the GPU's."""
    profile = profile_of(gpu, config.precision) if gpu else None
    peak = gpu.peak_flops(config.precision) if gpu else None
    if profile is None or peak is None or "graph" not in config.fast_parts:
        return None
    time = step_time(config, profile, micro_batches)
    return Predicted(time, profile, peak) if time else None


def source_notes(found: Iterable[Predicted]) -> list[Text]:
    """Say where the rates of GPUs are from, and how far a prediction may be off."""
    profiles = list({one.profile.gpu: one.profile for one in found}.values())
    notes = [
        say(
            "step times are predicted from kernels measured on {} ({}); a measured step is expected within ±",
            "单步时间由 {} 上实测的内核时间推算（{}）；实测值预期在 ± 范围内",
            *(profile.gpu, profile.about),
        )
        for profile in profiles
        if profile.source != DATA_SHEET
    ]
    if guessed := [profile for profile in profiles if profile.source == DATA_SHEET]:
        spread = max(profile.spread for profile in guessed)
        names = listed(profile.gpu for profile in guessed)
        notes.append(
            say(
                "step times of {} are from the data sheet: they may be off by a factor of {}",
                "{} 的单步时间由数据手册推算：误差可达 {} 倍",
                *(names, f"{1 + spread:.3g}"),
            )
        )
    return notes
