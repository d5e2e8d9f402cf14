"""Tables of training runs: losses, speed and interruptions, settings."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from cs336_systems.experiments.training.curves import Curve, Run, runs_of
from cs336_systems.experiments.training.training_charts import MEANS, on_window
from cs336_systems.report.names import PARALLEL_SETTINGS, parallel_name, size_name
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, as_text, cell_text, gib, ms, number, percent, titled
from cs336_systems.report.terms import PEAK_MEMORY
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

DEFAULT = Text("default", "默认")
STEPS = Text("steps", "步数")
SETTINGS = {
    "size": Text("model", "模型"),
    "num_layers": Text("blocks", "层数"),
    "d_model": Text("d_model"),
    "vocab_size": FIELDS["vocab_size"],
    "context_length": FIELDS["context_length"],
    "batch_size": FIELDS["batch_size"],
    "micro_batch_size": Text("micro batch"),
    "steps": STEPS,
    "learning_rate": Text("peak learning rate", "峰值学习率"),
    "warmup_steps": Text("warm-up steps", "预热步数"),
    "weight_decay": Text("weight decay"),
    "max_grad_norm": Text("gradient clipping", "梯度裁剪"),
    "precision": FIELDS["precision"],
    "attention": FIELDS["attention"],
    "fast": FIELDS["fast"],
    "parallel": Text("parallel", "并行方式"),
    "ranks": Text("ranks", "rank 数"),
    "data": Text("data", "数据"),
    "seed": Text("seed", "随机种子"),
}
"""Settings that the table of settings always shows; others only where runs differ, by the name of their flag."""
FEW_SETTINGS = 3
"""Number of the differing settings that are columns of the table of losses; the table of settings has all."""
NO_SETTINGS = ("model", "output", "first_step", "started", "resume_from")

Entry = tuple[Column, Callable[[Run], str | Text]]
"""A column, and the text of a run in it; empty where it was not recorded."""


def training_tables(cells: Cells) -> list[Table]:
    runs = runs_of(cells)
    if not runs:
        return []
    machine = [cells[0].machine]
    name, *losses = _LOSSES
    differing = [setting for setting in _differing(runs) if setting != "steps"]  # a column of its own
    settings = map(_setting, differing[:FEW_SETTINGS])
    width = on_window(runs, MEANS)
    notes = [say("last and lowest loss: {}", "最终与最低损失：{}", width)] if width else []
    if unfinished := [Text(run.name) for run in runs if not run.is_finished]:
        notes.append(say("not finished: {}", "未完成：{}", listed(unfinished, (", ", "，"))))
    return [
        _table(titled("train", Text("losses", "损失"), machine), runs, [name, *settings, *losses], notes),
        _table(titled("train", Text("speed and interruptions", "速度与中断"), machine), runs, _PROGRESS),
        _settings(titled("train", Text("settings", "设置"), machine), runs),
    ]


def _table(title: Text, runs: Sequence[Run], entries: Sequence[Entry], notes: Sequence[Text] = ()) -> Table:
    """Return a table with a row for each run, without columns that no run has."""
    found = [(column, [text(run) for run in runs]) for column, text in entries]
    shown = [(column, texts) for column, texts in found if any(texts)]
    rows = [[texts[place] for _, texts in shown] for place in range(len(runs))]
    return Table(title, [column for column, _ in shown], rows, notes)


def _settings(title: Text, runs: Sequence[Run]) -> Table:
    """Return a table with a row for each setting, those that differ first."""
    differing, fields = _differing(runs), list(map(_fields, runs))
    common = [name for name in SETTINGS if name not in differing and any(as_text(own.get(name)) for own in fields)]
    rows: list[list[str | Text]] = [
        [_setting_name(name), *(_setting_text(run, name) for run in runs)] for name in [*differing, *common]
    ]
    note = Text("settings that differ come first", "先列出不同的设置")
    columns = [word(Text("setting", "设置项")), *(word(say("run {}", "运行 {}", run.name)) for run in runs)]
    return Table(title, columns, rows, [note] if differing and common else [])


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings in which the runs differ."""
    fields = list(map(_fields, runs))
    names = dict.fromkeys([*SETTINGS, *itertools.chain(*fields)])
    return [name for name in names if len({as_text(own.get(name)) for own in fields}) > 1]


def _setting(name: str) -> Entry:
    return word(_setting_name(name)), lambda run: _setting_text(run, name)


def _setting_name(name: str) -> Text:
    return SETTINGS.get(name) or Text(f"--{name}")


def _setting_text(run: Run, name: str) -> str | Text:
    value = _fields(run).get(name)
    if name == "size" and value:
        return size_name(value)
    return cell_text(name, text) if (text := as_text(value)) else DEFAULT


def _fields(run: Run) -> dict[str, object]:
    ranks = list(run.ranks.values())[-1:]
    found = {name: value for name, value in run.settings.items() if name not in NO_SETTINGS}
    if found.get("engine") == "torch":
        found["parallel"] = parallel_name(found, ranks[0] if ranks else 1)
    found = {name: value for name, value in found.items() if name not in PARALLEL_SETTINGS}
    return {**found, **({"ranks": ranks[0]} if ranks else {})}


def loss_text(value: float | None) -> str:
    return "" if value is None else number(value, 4)


def last_of(curve: Curve) -> float | None:
    return list(curve.values())[-1] if curve else None


def first_of(curve: Curve) -> float | None:
    return next(iter(curve.values()), None)


def lowest_of(curve: Curve) -> float | None:
    return min(curve.values(), default=None)


def best_step(run: Run) -> str:
    return number(min(run.validation, key=run.validation.__getitem__), 0) if run.validation else ""


def median_of(curve: Curve) -> float | None:
    return statistics.median(curve.values()) if curve else None


def run_steps(run: Run) -> tuple[int, int]:
    """Return the step that a run has reached, and the step that it was to end with."""
    reached = max(run.losses)
    return reached, run.planned or reached


def steps_text(run: Run) -> str | Text:
    """Return the number of steps; of a run that has not finished the step it has reached, too."""
    if run.is_finished:
        return number(len(run.losses), 0)
    return say("{} of {}", "{} / {}", *(number(step, 0) for step in run_steps(run)))


def tokens_text(run: Run) -> str:
    return "" if run.tokens is None else _large(run.tokens)


def _large(count: float) -> str:
    """Return a number of tokens with three digits: 16.4M, 1.2B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= scale:
            return f"{float(f'{count / scale:.3g}'):g}{letter}"
    return number(count, 0)


def speed_text(run: Run) -> str:
    speed = median_of(run.speeds)
    return "" if speed is None else number(float(f"{speed:.3g}"), 0)


def mfu_text(run: Run) -> str:
    return percent(median_of(run.utilization)) if run.utilization else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


_NAME: Entry = (word(Text("run", "运行")), lambda run: run.name)
_LOSSES: list[Entry] = [
    _NAME,
    (Column(STEPS), steps_text),
    (Column(Text("tokens", "token 数")), tokens_text),
    (Column(Text("first loss", "最初损失")), lambda run: loss_text(first_of(run.smoothed_losses))),
    (Column(Text("last loss", "最终损失")), lambda run: loss_text(last_of(run.smoothed_losses))),
    (Column(Text("lowest loss", "最低损失")), lambda run: loss_text(lowest_of(run.smoothed_losses))),
    (Column(Text("lowest validation loss", "最低验证损失")), lambda run: loss_text(lowest_of(run.validation))),
    (Column(Text("at step", "所在步")), best_step),
    (Column(Text("last validation loss", "最终验证损失")), lambda run: loss_text(last_of(run.validation))),
]
_PROGRESS: list[Entry] = [
    _NAME,
    (Column(Text("median tokens/s", "tokens/s 中位数")), speed_text),
    (Column(Text("median MFU", "MFU 中位数")), mfu_text),
    (Column(PEAK_MEMORY, "GiB"), lambda run: gib(max(run.memory.values(), default=None))),
    (Column(Text("restarts", "重启次数")), lambda run: str(len(run.restarts))),
    (Column(Text("skipped steps", "跳过的步数")), lambda run: number(len(run.skipped), 0)),
    (Column(Text("saves", "保存次数")), lambda run: str(len(run.saves)) if run.saves else ""),
    (Column(Text("median save", "保存中位数"), "ms"), lambda run: ms(median_of(run.saves))),
    (Column(Text("wall time", "总时长")), lambda run: _duration(run.wall_time)),
]
