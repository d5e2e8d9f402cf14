"""Predicted step times against steps that were measured without a prediction: recorded ones, and published ones.

    python -m cs336_systems.report.step_errors results/h200/records.jsonl

prints the tables of docs/TIME.md. Rates of eager steps were fitted to half of the configurations of that file, those of
`is_fitted`; the errors of the others are those of steps that the model has not seen.
"""

import dataclasses
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.predict.gpus import find_by_driver_name, find_card
from cs336_systems.predict.time.eager_kernels import lists_operators
from cs336_systems.predict.time.eager_time import kind_of_step
from cs336_systems.predict.time.on_gpu import DRAW_SEED, RECORDED, predicted_on
from cs336_systems.record import Record, load
from cs336_systems.report.published import published
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text

ALL = "all"
ALSO = ("small", 512, 4, "train-step", "bf16", "auto", 0, True)
"""The one compiled step that is launch-bound. It was drawn into the other half, but the host's time for a compiled
kernel was fitted to it, so its error does not predict that of other steps."""
LLMQ = {"0.5B": 149e3, "1.5B": 59e3, "3B": 31e3, "7B": 14e3, "14B": 6.3e3}
"""Tokens a second that LLMQ publishes for one H100: Qwen 2.5 in bf16, 524,288 tokens a step, sequences of 1,024. It is
a different implementation, with a CUDA graph and fused kernels."""
LLMQ_TOKENS, LLMQ_CONTEXT, LLMQ_BATCH = 524_288, 1024, 8


class StepError(NamedTuple):
    config: RunConfig
    gpu: str
    kind: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted / self.measured - 1


def recorded_errors(records: Iterable[Record]) -> list[StepError]:
    """Return the errors of eager and compiled steps, one for each configuration: the median of all its steps. Those of
    random draws belong to neither half."""
    samples: dict[tuple[str, RunConfig], list[float]] = {}
    for record in records:
        is_step = record.metric == "step_time" and record.ok and not record.variant and record.samples
        if not is_step or not isinstance(record.config.get("model"), dict) or not record.config.keys() <= RECORDED:
            continue
        if record.environment.gpu is None or DRAW_SEED in record.config:
            continue
        run = RunConfig.of({name: value for name, value in record.config.items() if name != "micro_batches"})
        if lists_operators(run):
            samples.setdefault((record.environment.gpu, _work(run)), []).append(statistics.median(record.numbers))
    return [
        error
        for (gpu, run), seconds in samples.items()
        if (error := _error(run, gpu, statistics.median(seconds))) is not None
    ]


def published_errors() -> list[StepError]:
    """Return the errors of published steps: forward and backward of a write-up's own model, on a card that was not
    measured here."""
    seconds: dict[tuple[str, RunConfig], dict[str, float]] = {}
    for record in published():
        if record.metric in ("forward_time", "backward_time") and isinstance(record.config.get("model"), dict):
            phases = seconds.setdefault((record.environment.gpu or "", _work(RunConfig.of(record.config))), {})
            (phases[record.metric],) = record.numbers  # tables of one write-up repeat rows
    found = (_error(run, gpu, sum(phases.values())) for (gpu, run), phases in seconds.items())
    return [error for error in found if error is not None]


def llmq_errors() -> list[StepError]:
    """Return the errors of fast steps on an H100 with rates from its data sheet, compared with LLMQ's published
    rates."""
    card = find_card("h100")
    assert card is not None
    found = []
    for size, rate in LLMQ.items():
        model = model_config(f"qwen2.5/{size}", context_length=LLMQ_CONTEXT)
        run = RunConfig(
            model=model, batch_size=LLMQ_BATCH, precision="bf16", attention="auto", fast="on", optimizer_state="bf16",
            device="cuda",
        )  # fmt: skip
        one = predicted_on(run, card, LLMQ_TOKENS // (LLMQ_BATCH * LLMQ_CONTEXT))
        assert one is not None
        found.append(StepError(run, card.name, "fast", LLMQ_TOKENS / rate, one.time.seconds))
    return found


def _work(run: RunConfig) -> RunConfig:
    """Return the configuration without fields that do not change a step's time."""
    return dataclasses.replace(run, warmup_steps=0, num_steps=1, seed=0, device="cuda")


def _error(run: RunConfig, driver_name: str, measured: float) -> StepError | None:
    gpu = find_by_driver_name(driver_name)
    one = predicted_on(run, gpu)
    if one is None or gpu is None:
        return None
    return StepError(run, gpu.name, kind_of_step(one.time), measured, one.time.seconds)


def is_fitted(errors: Sequence[StepError]) -> list[bool]:
    """Return for each step whether rates were fitted to it: half of the configurations, drawn at random, and ALSO."""
    keys = sorted({_key(error.config) for error in errors})
    random.Random(0).shuffle(keys)
    fitted = {*keys[::2], ALSO}
    return [_key(error.config) in fitted for error in errors]


def _key(run: RunConfig) -> tuple[object, ...]:
    shape = run.size, run.model.context_length, run.batch_size
    return (*shape, run.mode, run.precision, run.attention, run.checkpoint_blocks, run.compile)


def corrected(errors: Sequence[StepError]) -> list[StepError]:
    """Cross-validate a correction factor: return the errors of every second step of each kind after a factor fitted to
    the other steps, and vice versa."""
    by_kind: dict[str, list[StepError]] = {}
    for error in errors:
        by_kind.setdefault(error.kind, []).append(error)
    found = []
    for own in by_kind.values():
        for held_out, seen in ((own[::2], own[1::2]), (own[1::2], own[::2])):
            if seen:
                factor = statistics.median(error.measured / error.predicted for error in seen)
                found += [error._replace(predicted=factor * error.predicted) for error in held_out]
    return found


def error_table(title: Text, errors: Sequence[StepError]) -> Table:
    """Return the median and the largest error of each kind on each GPU."""
    groups: dict[tuple[str, str], list[float]] = {}
    for error in errors:
        groups.setdefault((error.gpu, error.kind), []).append(error.error)
    for gpu in {error.gpu for error in errors}:
        groups[gpu, ALL] = [error.error for error in errors if error.gpu == gpu]
    columns = [word(Text("GPU")), word(Text("kind", "类型")), Column(Text("steps", "步数"))]
    columns += [Column(Text("median error", "误差中位数")), Column(Text("largest error", "最大误差"))]
    rows = [
        [gpu, kind, str(len(own)), f"{statistics.median(map(abs, own)):.1%}", f"{max(own, key=abs):+.1%}"]
        for (gpu, kind), own in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] == ALL, group[0][1]))
    ]
    return Table(title, columns, rows)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise UserError("give one file of records, such as results/h200/records.jsonl")
    recorded = recorded_errors(load(arguments[0]).records)
    halves = is_fitted(recorded)
    unseen = [error for error, fitted in zip(recorded, halves, strict=True) if not fitted]
    seen = [error for error, fitted in zip(recorded, halves, strict=True) if fitted]
    for title, errors in (
        ("steps that rates were not fitted to", unseen),
        ("steps that rates were fitted to", seen),
        ("published steps of other cards", published_errors()),
        ("the same, corrected by published steps, on steps held out", corrected(published_errors())),
        ("fast steps of LLMQ", llmq_errors()),
    ):
        print(error_table(Text(title), errors).render("md"))


if __name__ == "__main__":
    main(sys.argv[1:])
