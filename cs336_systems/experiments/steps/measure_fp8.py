"""Instrument of `fp8_losses`: gradients by block against fp32, and losses of a training run, in one precision.

The text is Python's standard library, byte by byte: every machine has it.
"""

import sysconfig
import timeit
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.config import RunConfig
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, cosine_lr, require_attention
from cs336_systems.step.updates import Update

TEXT_BYTES = 8 << 20
HELD_OUT = 16
"""One of this many sequences is held out."""
WARMUP_SHARE = 0.05


@cache
def text() -> Tensor:
    """Return the first bytes of the modules of the standard library, ordered by name."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= TEXT_BYTES:
            break
    return torch.frombuffer(found[:TEXT_BYTES], dtype=torch.uint8)


def batch_of(run: RunConfig, number: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step: the same for every precision."""
    tokens, length = text(), run.model.context_length
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + number)
    places = torch.randint((len(tokens) - 1) // length // HELD_OUT, (run.batch_size,), generator=generator)
    offset = 0 if held_out else 1
    starts = (places * HELD_OUT + offset) * length
    if not held_out:
        starts += torch.randint((HELD_OUT - 2) * length, (run.batch_size,), generator=generator)
    rows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()]).long().to(run.device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def measure_losses(config: dict[str, Any]) -> list[Metric]:
    """Train, and compare the gradients of the first and the last weights with those of fp32."""
    run, steps = RunConfig.of(config), config["steps"]
    require_attention(run)
    step = TrainStep.build(run)
    metrics = _cosines(step, "start")
    losses, seconds, skipped, peak = [], [], 0, config["learning_rate"]
    warmup = max(1, round(WARMUP_SHARE * steps))
    for number in range(steps):
        rate = cosine_lr(number, peak=peak, floor=peak / 10, warmup_steps=warmup, total_steps=steps)
        batch = batch_of(run, number)
        begin = timeit.default_timer()
        result = step.train([batch], learning_rate=rate)
        losses.append(result.loss)  # on the host: the step has ended
        seconds.append(timeit.default_timer() - begin)
        skipped += result.update is not Update.APPLIED
    metrics += _cosines(step, "end")
    metrics.append(Metric("loss", "1", losses))
    metrics.append(Metric("train_time", "s", [median(seconds)]))
    metrics.append(Metric("skipped_steps", "1", [float(skipped)]))
    metrics.append(Metric("held_out_loss", "1", _held_out_losses(step)))
    fp8 = getattr(step.model, "fp8", None)
    if fp8 is not None:
        shares = fp8.take_shares()
        metrics.append(Metric("lost_share", "1", [max((share.share for share in shares), default=0.0)]))
    return metrics


def _held_out_losses(step: TrainStep, batches: int = 8) -> list[float]:
    run = step.config
    return [step.evaluate(*batch_of(run, number, held_out=True)).item() for number in range(batches)]


def _cosines(step: TrainStep, when: str) -> list[Metric]:
    """Return the cosine, for each block, between its gradients and those in fp32 with the same weights and batch."""
    run = step.config
    batch = batch_of(run, 10**6)
    found = _block_gradients(step, batch)
    step.model.zero_grad(set_to_none=True)
    plain = TrainStep.build(RunConfig(model=run.model, batch_size=run.batch_size, device=run.device, attention="sdpa"))
    weights = {name: p.detach().float() for name, p in step.model.named_parameters()}
    plain.model.load_state_dict(weights, strict=False)
    expected = _block_gradients(plain, batch)
    cosines = [
        nn.functional.cosine_similarity(own, other, dim=0).item() for own, other in zip(found, expected, strict=True)
    ]
    return [Metric(f"cosine_{when}", "1", cosines)]


def _block_gradients(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the gradient of each block as one vector."""
    step.model.zero_grad(set_to_none=True)
    step._one_batch(*batch, lambda loss: loss, nullcontext)
    layers: Any = step.model.layers
    return [torch.cat([p.grad.float().flatten() for p in block.parameters()]) for block in layers]
