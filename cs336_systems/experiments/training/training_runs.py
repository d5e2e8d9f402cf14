"""`train`: how does the loss fall, how fast, and what interrupted it?

`cs336 train` records a cell for each stretch between two lines of its log; charts and tables show whole runs.
"""

from collections.abc import Sequence

from cs336_systems.experiments.spec import Experiment
from cs336_systems.experiments.training.curves import Run, runs_of
from cs336_systems.experiments.training.training_charts import training_charts
from cs336_systems.experiments.training.training_tables import (
    best_step,
    last_of,
    lowest_of,
    median_of,
    mfu_text,
    run_steps,
    speed_text,
    tokens_text,
    training_tables,
)
from cs336_systems.report.document import Highlight
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import span, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import number, ratio
from cs336_systems.text import Text, listed, say

RANK = 70
"""Rank of its first result on the first screen: after comparisons of speed and memory."""
NEAR = 0.02
"""The final validation loss is mentioned if it is above the lowest by more than this share."""


def _runs(cells: Cells) -> list[Run]:
    """Return the runs with a finite loss, at least one; otherwise a ValueError drops the sentence."""
    runs = [run for run in runs_of(cells) if run.smoothed_losses]
    if not runs:
        raise ValueError("no run has a finite loss")
    return runs


# -- findings ---------------------------------------------------------------------------------------------------------


def outcome(cells: Cells) -> Text | None:
    """State how the loss fell, or the best and the worst of several runs."""
    runs = _runs(cells)
    return _outcome_of(runs[0]) if len(runs) == 1 else _comparison(runs)


def validation(cells: Cells) -> Text | None:
    """State the validation loss of one run, or the speeds of several runs."""
    runs = _runs(cells)
    return _validation_of(runs[0]) if len(runs) == 1 else _speeds(runs)


def course(cells: Cells) -> Text | None:
    """State speed, restarts and skipped steps."""
    runs = _runs(cells)
    return together(_speed_of(runs[0]) if len(runs) == 1 else None, _interruptions(runs))


def _outcome_of(run: Run) -> Text:
    first, *_, last = [*run.smoothed_losses.values()] * 2
    way = Text("fell", "降到") if last < first else Text("rose", "升到") if last > first else Text("went", "变为")
    return say(
        "{0}: the loss {1} from {2} to {3}", "{0}：损失从 {2} {1} {3}", _extent(run), way, _loss(first), _loss(last)
    )


def _extent(run: Run) -> Text:
    steps = Text("1 step", "1 步") if len(run.losses) == 1 else _counted(len(run.losses), "steps", "步")
    if not run.is_finished:
        steps = say("{} of {} steps, not finished", "{} / {} 步，未完成", *(f"{n:,}" for n in run_steps(run)))
    return listed([steps, say("{} tokens", "{} 个 token", tokens_text(run))] if run.tokens else [steps], (", ", "，"))


def _validation_of(run: Run) -> Text | None:
    best, last = lowest_of(run.validation), last_of(run.validation)
    if best is None or last is None:
        return None
    if best == last:
        return say("the validation loss at the end, {}, is its lowest", "最终验证损失 {} 也是最低值", _loss(best))
    found = say(
        "the validation loss is lowest at step {}, {}", "验证损失在第 {} 步最低，为 {}", best_step(run), _loss(best)
    )
    rise = say("at the end it is {}", "最终为 {}", _loss(last)) if last > (1 + NEAR) * best else None
    return together(found, rise)


def _speed_of(run: Run) -> Text | None:
    if not run.speeds:
        return None
    speed = say("{} tokens/s", "{} tokens/s", speed_text(run))
    return say("{}, {} MFU", "{}，MFU {}", speed, mfu_text(run)) if run.utilization else speed


def _interruptions(runs: Sequence[Run]) -> Text:
    restarts = sum(len(run.restarts) for run in runs)
    times = Text("1 restart", "重启 1 次") if restarts == 1 else Text(f"{restarts:,} restarts", f"重启 {restarts:,} 次")
    found = listed([times if restarts else Text("no restart", "没有重启"), _skipped(*runs)], (", ", "，"))
    return say("in {0} runs: {1}", "{0} 个运行：{1}", str(len(runs)), found) if len(runs) > 1 else found


def _skipped(*runs: Run) -> Text:
    count = sum(len(run.skipped) for run in runs)
    steps = Text("1 step", "1 步") if count == 1 else _counted(count, "steps", "步")
    return say("{} skipped", "跳过 {}", steps) if count else Text("no step skipped", "没有跳过任何一步")


def _comparison(runs: Sequence[Run]) -> Text:
    """Compare the largest group of comparable runs by lowest validation loss if every run has one, else by final
    loss."""
    chosen, validated = comparable(runs)
    if not chosen:
        return NOT_COMPARED
    results = {run.name: _result(run, validated) for run in chosen}
    low, high = (pick(results, key=results.__getitem__) for pick in (min, max))
    what = Text("lowest validation loss", "最低验证损失") if validated else Text("loss at the end", "最终损失")
    values = (what, _loss(results[low]), low, _loss(results[high]), high)
    if len(set(map(_loss, results.values()))) == 1:
        found = say("the {} is {} in all runs", "所有运行的{}都是 {}", *values[:2])
    elif len(chosen) == 2:
        found = say("the {} is {} in {}, {} in {}", "{}：{}（{}），{}（{}）", *values)
    else:
        found = say(
            "the {} is {} in {}, the best run, and {} in {}, the worst", "{}：最好 {}（{}），最差 {}（{}）", *values
        )
    if len(chosen) < len(runs):
        counts = (str(len(chosen)), str(len(runs)))
        found = say("{} of {} runs can be compared: {}", "{1} 个运行中 {0} 个可比：{2}", *counts, found)
    return together(found, _rise(chosen)) or found


NOT_COMPARED = Text(
    "losses are not ranked: fewer than two runs have finished on the same data, vocabulary and context",
    "未给损失排名：在相同数据、词表和上下文长度上完成的运行不足两个",
)


def comparable(runs: Sequence[Run]) -> tuple[list[Run], bool]:
    """Return the largest group of at least two finished runs whose losses can be compared, and whether to compare
    their validation losses instead of the training losses at the end."""
    finished = [run for run in runs if run.is_finished and run.smoothed_losses]
    for validated in (True, False):
        groups: dict[tuple[object, ...], list[Run]] = {}
        for run in finished:
            if run.validation or not validated:
                groups.setdefault(run.validated_on if validated else run.trained_on, []).append(run)
        largest = max(groups.values(), key=len, default=[])
        if len(largest) > 1:
            return largest, validated
    return [], False


def _rise(runs: Sequence[Run]) -> Text | None:
    """State the validation losses at the end, if runs end far above their lowest."""
    ends = [last_of(run.validation) or 0.0 for run in runs if run.validation]
    lowest = [lowest_of(run.validation) or 0.0 for run in runs if run.validation]
    if not any(end > (1 + NEAR) * low for end, low in zip(ends, lowest, strict=True)):
        return None
    return say("at the end it is {}", "最终为 {}", span(ends, _loss))


def _result(run: Run, validated: bool) -> float:
    """Return the loss by which runs are compared."""
    found = lowest_of(run.validation) if validated else last_of(run.smoothed_losses)
    assert found is not None
    return found


def _speeds(runs: Sequence[Run]) -> Text | None:
    """State the fastest run and the slowest, if they differ by more than rounding."""
    timed = [(speed, run) for run in runs if (speed := median_of(run.speeds))]
    (least, slow), (most, fast) = (pick(timed, key=lambda pair: pair[0]) for pick in (min, max))
    if speed_text(slow) == speed_text(fast):
        return None
    return say(
        "the fastest run is {}, {} tokens/s ({}); the slowest {}, {}",
        "最快的是 {}，{} tokens/s（{}）；最慢的是 {}，{}",
        *(fast.name, speed_text(fast), ratio(most, least), slow.name, speed_text(slow)),
    )


def _counted(count: int, en: str, zh: str) -> Text:
    return Text(f"{count:,} {en}", f"{count:,} {zh}")


def _loss(value: float) -> str:
    return number(value, 3)


# -- first screen -----------------------------------------------------------------------------------------------------


def training_highlights(cells: Cells) -> list[Highlight]:
    """Return results of the only run, or of the best run of those that can be compared."""
    runs = runs_of(cells)
    fine = [run for run in runs if run.smoothed_losses]
    chosen, validated = (fine, all(run.validation for run in fine)) if len(fine) == 1 else comparable(fine)
    if not chosen:
        return []
    best = min(chosen, key=lambda run: _result(run, validated))
    return [
        Highlight(RANK + place, value, what, _in_run(detail, best, runs))
        for place, (value, what, detail) in enumerate(_results(best, validated))
    ]


def _results(run: Run, validated: bool) -> list[tuple[Text, Text, Text]]:
    """Return the value, subject and detail of each result."""
    what = Text("lowest validation loss", "最低验证损失") if validated else Text("loss at the end", "最终损失")
    found = [(Text(_loss(_result(run, validated))), what, _extent(run))]
    if run.speeds:
        text = Text("training speed, median of steps", "训练速度，各步的中位数")
        found.append((say("{} tokens/s", "{} tokens/s", speed_text(run)), text, _work(run)))
    if run.utilization:
        text = Text("of the peak FLOP/s (MFU), median of steps", "峰值 FLOP/s 利用率（MFU），各步的中位数")
        found.append((Text(mfu_text(run)), text, _work(run)))
    if run.restarts:
        text = Text("restart survived" if len(run.restarts) == 1 else "restarts survived", "次重启后继续训练")
        found.append((Text(str(len(run.restarts))), text, _skipped(run)))
    return found


def _work(run: Run) -> Text:
    """Return the model, the tokens of a step, the precision and the number of ranks, if they are known."""
    size, batch, context, precision = map(run.get, ("size", "batch_size", "context_length", "precision"))
    step = [say("{} x {} tokens", "{} x {} token", str(batch), str(context))] if run.tokens_per_step else []
    ranks = [_counted(count, "ranks", "个 rank") for count in list(run.ranks.values())[-1:] if count > 1]
    named = [size_name(size)] if size else []
    return listed([*named, *step, *([Text(str(precision))] if precision else []), *ranks], (", ", "，"))


def _in_run(detail: Text, run: Run, runs: Sequence[Run]) -> Text:
    return say("{}: {}", "{}：{}", run.name, detail) if len(runs) > 1 else detail


TRAINING = Experiment(
    name="train",
    title=Text("Training", "训练"),
    question=Text(
        "How does the loss fall, how fast is training, and what interrupted it?",
        "损失如何下降？训练速度如何？有没有中断？",
    ),
    tables=training_tables,
    charts=training_charts,
    findings=(outcome, validation, course),
    highlights=training_highlights,
    group="training",
    runnable=False,
    machines_together=True,
    complete_cells_only=False,
)
