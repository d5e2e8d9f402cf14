"""Configurations of training steps that a seeded generator draws, for checks of predictions on steps nobody chose.

The draw is the same on every machine and sees no measurement: a step is kept if it fits by the memory model and if a
data sheet allows it to be short. Each step has a generator of its own, so that a step that is drawn again leaves the
others as they are. Only `random()` is used, whose numbers are the same in every version of Python.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from cs336_systems.config import SIZES, ModelConfig, RunConfig, UserError
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.fit import usable_bytes
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import GIGA, find_card
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import GIB

SEED = 338
"""Seed of the draw. After a change of the model based on a draw, the next draw needs a new seed; 336 was the first."""
WARMUP_STEPS, MEASURED_STEPS = 3, 5
"""A fast step is captured in its third warm-up step; five more steps show its spread."""
MEMORY = 139 * GIB
"""Memory of the GPU that steps are drawn for."""
FASTEST_SHARE = {"fp32": 0.62, "tf32": 0.3, "bf16": 0.5}
"""Share of the peak FLOP/s that the lower bound of a step's time assumes, by precision."""
PASSES = 6
"""Number of times that the lower bound of an eager step's time assumes all of its memory to be read or written."""
MULTIPLE = 64
CONTEXT_MULTIPLE = 128
WHOLE_VOCABULARIES = 0.75
"""Share of drawn vocabularies that are multiples of 64; the others, like GPT-2's, are any number."""
ATTENTIONS = ("reference", "sdpa", "auto")
PRECISIONS = ("fp32", "tf32", "bf16")
COMPILED_SHARE = 0.25
MOST_ATTEMPTS = 10_000

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranges:
    """Bounds of the steps that are drawn."""

    parameters: tuple[float, float]
    contexts: tuple[int, int]
    seconds: float
    vocabularies: tuple[int, int] = (256, 152_000)
    widths: tuple[int, int] = (256, 6144)
    layers: tuple[int, int] = (4, 64)
    compiled_layers: int = 12
    """Maximum number of blocks of a compiled model: the compiler takes two to three seconds for each."""
    tokens: int = 65_536
    """Maximum tokens of a step."""


FAST = Ranges((50e6, 8e9), (128, 32_768), seconds=2.5)
EAGER = Ranges((30e6, 1.5e9), (128, 2048), seconds=1.5, widths=(256, 3072), layers=(4, 48))
SMALL = Ranges((10e6, 60e6), (128, 512), seconds=0.1, vocabularies=(256, 32_000), widths=(256, 768), tokens=4096)
TINY = Ranges(
    (50e3, 500e3), (128, 128), seconds=0.1, vocabularies=(256, 1024), widths=(64, 128), layers=(1, 3), tokens=256
)


@dataclass(frozen=True)
class Family:
    """A family of models: the fields, other than sizes, that distinguish it."""

    is_grouped: bool = False
    """True if groups of query heads share a KV head."""
    has_own_heads: bool = False
    """True if the queries may be wider or narrower than the residual stream."""
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = (Family(), Family(is_grouped=True), Family(is_grouped=True, qkv_bias=True),
            Family(is_grouped=True, has_own_heads=True, qk_norm=True))  # fmt: skip
"""The families of the course's model, of Llama 3, Qwen 2.5 and Qwen 3."""


@lru_cache
def fast_steps(count: int, ranges: Ranges = FAST, seed: int = SEED) -> tuple[RunConfig, ...]:
    """Return fast steps in bf16, in ascending order of parameters."""
    settings = {"fast": "on", "precision": "bf16", "attention": "auto"}
    return _steps(random.Random(seed), ranges, [settings] * count)


@lru_cache
def eager_steps(count: int, ranges: Ranges = EAGER, seed: int = SEED) -> tuple[RunConfig, ...]:
    """Return steps without the fast parts, in ascending order of parameters: all precisions and attentions equally
    often, a quarter of the steps compiled."""
    chance = random.Random(seed)
    compiled = round(COMPILED_SHARE * count)
    decks = (
        _shuffled(chance, [PRECISIONS[number % len(PRECISIONS)] for number in range(count)]),
        _shuffled(chance, [ATTENTIONS[number % len(ATTENTIONS)] for number in range(count)]),
        _shuffled(chance, [number < compiled for number in range(count)]),
    )
    settings = [dict(zip(("precision", "attention", "compile"), own, strict=True)) for own in zip(*decks, strict=True)]
    return _steps(chance, ranges, settings)


def _steps(chance: random.Random, ranges: Ranges, settings: Sequence[dict[str, Any]]) -> tuple[RunConfig, ...]:
    """Draw a step for each of the settings. Their targets of parameters are spread over the range on a log scale."""
    least, most = ranges.parameters
    found = []
    for number, own in enumerate(settings):
        target = least * (most / least) ** ((number + chance.random()) / len(settings))
        found.append(_step(random.Random(int(chance.random() * 2**53)), ranges, target, own))
    return tuple(found)


def _step(chance: random.Random, ranges: Ranges, target: float, settings: dict[str, Any]) -> RunConfig:
    """Draw until a step is valid and within the bounds."""
    for _ in range(MOST_ATTEMPTS):
        context = _rounded(_between(chance, *ranges.contexts), CONTEXT_MULTIPLE)
        batch = int(_between(chance, 1, ranges.tokens // context + 1))
        model = _model(chance, ranges, target, context, settings)
        if model is None:
            continue
        run = RunConfig(
            model=model,
            batch_size=batch,
            device="cuda",
            warmup_steps=WARMUP_STEPS,
            num_steps=MEASURED_STEPS,
            **settings,
        )
        if run.size not in SIZES and run.tokens <= ranges.tokens and is_short(run, ranges.seconds) and fits(run):
            return run
    raise AssertionError(f"no step of about {target:.3g} parameters is within {ranges}")


def _model(
    chance: random.Random, ranges: Ranges, target: float, context: int, settings: dict[str, Any]
) -> ModelConfig | None:
    """Draw a model of about `target` parameters: its width, its other fields, and as many blocks as needed. None if it
    is not a valid model, or out of the range."""
    family = _one_of(chance, FAMILIES)
    width = _rounded(_between(chance, *ranges.widths), MULTIPLE)
    head_dim = _one_of(chance, (64, 128))
    share = _between(chance, 0.5, 2) if family.has_own_heads else 1.0
    heads = max(1, round(share * width / head_dim))
    group = _one_of(chance, (2, 4, 8)) if family.is_grouped and settings["attention"] == "auto" else 1
    least, most = ranges.vocabularies
    vocabulary = int(least * (most / least) ** math.sqrt(chance.random()))  # half of them above 23,000
    if chance.random() < WHOLE_VOCABULARIES:
        vocabulary = _rounded(vocabulary, MULTIPLE)
    fields = {
        "vocab_size": min(vocabulary, most),
        "context_length": context,
        "d_model": width,
        "num_heads": heads,
        "d_ff": _rounded(_between(chance, 2, 5) * width, MULTIPLE),
        "num_kv_heads": heads // group,
        "d_head": head_dim,
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "tied_embeddings": chance.random() < 0.5,
    }
    if heads % group or (not family.has_own_heads and heads * head_dim != width):
        return None
    try:
        one, two = (ModelConfig(num_layers=number, **fields) for number in (1, 2))  # type: ignore[arg-type]
        block = two.parameters - one.parameters
        layers = 1 + round((target - one.parameters) / block)
        model = ModelConfig(num_layers=layers, **fields)  # type: ignore[arg-type]
    except UserError:
        return None
    deepest = ranges.compiled_layers if settings.get("compile") else ranges.layers[1]
    is_deep_enough = ranges.layers[0] <= layers <= deepest
    return model if is_deep_enough and ranges.parameters[0] <= model.parameters <= ranges.parameters[1] else None


def is_short(run: RunConfig, seconds: float) -> bool:
    """Return True if the GPU's data sheet allows the step to take at most `seconds`."""
    gpu = find_card("h200")
    assert gpu is not None
    assert gpu.bandwidth is not None
    peak = gpu.peak_flops(run.precision)
    assert peak is not None
    computing = model_flops(run) / (FASTEST_SHARE[run.precision] * peak)
    if computing > seconds or run.fast != "off":
        return computing <= seconds
    return computing + PASSES * estimate(_eager(run)).peak / (gpu.bandwidth * GIGA) <= seconds


def fits(run: RunConfig) -> bool:
    """Return True if both building the model and a step fit. A compiled step keeps less than an eager one."""
    room = usable_bytes(MEMORY)
    return building_peak(run).peak <= room and estimate(_eager(run)).peak <= room


def _eager(run: RunConfig) -> RunConfig:
    return dataclasses.replace(run, compile=False)


# -- draws by random() alone ------------------------------------------------------------------------------------------


def _between(chance: random.Random, least: float, most: float) -> float:
    """Return a number drawn uniformly on a log scale."""
    return least * (most / least) ** chance.random()


def _rounded(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple


def _one_of(chance: random.Random, items: Sequence[Item]) -> Item:
    return items[int(chance.random() * len(items))]


def _shuffled(chance: random.Random, items: Sequence[Item]) -> list[Item]:
    return [item for _, item in sorted(((chance.random(), item) for item in items), key=lambda pair: pair[0])]
