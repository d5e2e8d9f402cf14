"""Step times as commands and reports show them: of a configuration on a known GPU, with an interval. No torch."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.gpus import GPU, TERA, find_by_driver_name
from cs336_systems.predict.time.eager_time import eager_step_time
from cs336_systems.predict.time.gpu_profile import DATA_SHEET, GpuProfile, profile_of
from cs336_systems.predict.time.step_kernels import CHUNK_BYTES
from cs336_systems.predict.time.time_model import StepTime, step_time
from cs336_systems.text import Text, listed, say

SETTINGS = {"mode": "train-step", "precision": "bf16", "attention": "auto", "fast": "on"}
"""Settings for which a predicted step time is shown."""
DRAW_SEED = "draw_seed"
"""Field of randomly drawn configurations: the seed of the draw."""
RECORDED = frozenset({"micro_batches", "warmup_ms", "rep_ms", "way", "profiler", DRAW_SEED}) | {
    f.name for f in dataclasses.fields(RunConfig)
}
"""Fields of recorded configurations that predictions know; other fields may change what a step does."""
MOST_LOGITS = 1_000 * CHUNK_BYTES
"""Maximum elements of a micro batch's logits for which a step is predicted: its loss is listed chunk by chunk."""


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
        """The step's time, and half the width of the interval in which a measurement is expected."""
        middle, half = 1e3 * self.time.seconds, 1e3 * (self.time.high - self.time.low) / 2
        digits = 0 if middle >= 1000 else 1 if middle >= 100 else 2
        return f"{middle:,.{digits}f} ± {half:,.{digits}f}"


def predicted_on(
    config: RunConfig, gpu: GPU | None, micro_batches: int = 1, steps: int | None = None
) -> Predicted | None:
    """Return the time of a step, fast in a CUDA graph or without any of the fast parts; None where its kernels or the
    GPU's rates are not known. Steps with only some of the fast parts are not predicted, because they depend on the
    host's speed. `steps`: number of steps before the measured ones; None for a step of a long run, on a warm GPU."""
    if gpu is None or config.tokens * config.model.vocab_size > MOST_LOGITS:
        return None
    profile, peak = profile_of(gpu, config.precision), gpu.peak_flops(config.precision)
    if profile is None or peak is None:
        return None
    if "graph" in config.fast_parts:
        time = step_time(config, profile, micro_batches, steps)
    else:
        time = eager_step_time(config, profile, steps) if micro_batches == 1 else None
    return Predicted(time, profile, peak) if time else None


def predicted_of(config: Mapping[str, Any], driver_name: str | None) -> Predicted | None:
    """Return the time of the step that an instrument ran with `config` on the GPU of this name."""
    gpu, micro_batches = find_by_driver_name(driver_name), config.get("micro_batches", 1)
    is_known = config.keys() <= RECORDED and isinstance(micro_batches, int) and micro_batches > 0
    if gpu is None or not is_known or config.get("device") == "cpu":
        return None
    try:
        run = RunConfig.of(config)
        return predicted_on(run, gpu, micro_batches, run.warmup_steps + run.num_steps)
    except (ArithmeticError, TypeError, ValueError):  # a damaged record, or one of another version
        return None


def source_notes(found: Iterable[Predicted]) -> list[Text]:
    """State the source of the GPUs' rates, and the expected error of a prediction."""
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


def mfu_note(peaks: Iterable[float]) -> Text:
    """State the peak of FP8, which the MFU of its steps is relative to."""
    rates = ", ".join(dict.fromkeys(f"{peak / TERA:,.0f}" for peak in peaks))
    return say(
        "MFU in FP8: relative to the dense peak of FP8, {} TFLOP/s, twice that of bf16",
        "FP8 的 MFU：相对于 FP8 稠密峰值 {} TFLOP/s，为 bf16 的两倍",
        rates,
    )


def launch_notes(found: Sequence[Predicted]) -> list[Text]:
    """Name the steps that are bound by the host's launches, for which a faster GPU would not help."""
    bound = [one.time.config for one in found if one.time.is_launch_bound]
    if not bound:
        return []
    names = listed(f"{own.size}, {own.batch_size} x {own.model.context_length}" for own in bound)
    return [
        say(
            "launch-bound, the host needs longer than the GPU, and its time varies: {}; --fast on has no such bound",
            "受限于主机发射内核（主机比 GPU 慢，耗时不稳定）：{}；--fast on 无此限制",
            names,
        )
    ]
