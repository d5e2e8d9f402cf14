"""Shared by the tables of all experiments: how numbers are written, how rows and tables are named."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cs336_systems.record import GIB, Statistics
from cs336_systems.report.cells import CellView
from cs336_systems.report.names import attention_name, implementation_name, size_name
from cs336_systems.report.referee import ON_SPREAD, remarks
from cs336_systems.report.terms import MODE_WORDS
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

FIELDS = {
    "size": Text("size", "规模"),
    "model_factory": Text("model", "模型"),
    "context_length": Text("context", "上下文长度"),
    "batch_size": Text("batch", "批大小"),
    "vocab_size": Text("vocabulary", "词表"),
    "mode": Text("mode", "模式"),
    "precision": Text("precision", "精度"),
    "attention": Text("attention", "注意力"),
    "checkpoint_blocks": Text("checkpoint", "重计算"),
    "memory_budget": Text("memory budget", "显存预算"),
    "compile": Text("compiled", "编译"),
    "fast": Text("fast", "fast 部分"),
    "optimizer_state": Text("optimizer state", "优化器状态"),
    "update_in_backward": Text("update in backward", "反向中更新"),
    "warmup_steps": Text("warm-up", "预热"),
    "heads": Text("heads", "头数"),
    "head_dim": Text("d", "头维度"),
    "seq_len": Text("seq", "序列长度"),
    "is_causal": Text("causal", "因果"),
    "mix": Text("documents", "文档"),
    "implementation": Text("implementation", "实现"),
}
"""Fields that may distinguish rows, with their headings. Fields that are equal in all rows go in the title."""
_IN_TITLE = {
    **dict.fromkeys(("context_length", "batch_size", "heads", "head_dim", "seq_len", "is_causal"), True),
    **dict.fromkeys(("mode", "precision"), False),
    "attention": True,
}
"""Fields that a title names if all rows agree -> True if with their heading."""
_USUAL = {
    **{"vocab_size": 10_000, "checkpoint_blocks": 0, "compile": False, "warmup_steps": 5, "model_factory": None},
    **{"optimizer_state": "fp32", "update_in_backward": False, "memory_budget": ""},
}
"""Usual values of fields; a title names the field only if all rows have another value."""
_PACKAGED = ("cs336_systems.benchmark.", "cs336_systems.experiments.steps.")
"""Prefixes of model factories of this package, which tables leave out."""


# -- formatting -------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "N/A" if value is None else f"{value:,.{digits}f}"


def ms(seconds: float | None) -> str:
    return "" if seconds is None else number(seconds * 1e3, 2 if seconds < 1 else 1)


def kernel_ms(seconds: float | None) -> str:
    """Return milliseconds of a kernel, which may take microseconds: three digits after the point below 100 ms."""
    return "" if seconds is None else number(seconds * 1e3, 3 if seconds < 0.1 else 1)


def spread(found: Statistics | None, show: Callable[[float | None], str] = ms) -> str:
    return f"{show(found.mean)} ± {show(found.std)}" if found else ""


def tflops(per_second: float | None) -> str:
    if per_second and per_second < 1e10:  # a CPU on a small shape
        return f"{per_second / 1e12:.2g}"
    return number(per_second / 1e12 if per_second else None, 1 if per_second and per_second > 1e12 else 3)


def gib(size: float | None) -> str:
    if size is None:
        return ""
    return number(size / GIB, 2 if size >= GIB / 10 else 4)


def percent(share: float | None, digits: int = 1) -> str:
    return "N/A" if share is None else f"{share:.{digits}%}"


def signed(share: float | None, digits: int) -> str:
    """Return a relative error with its sign."""
    return "" if share is None else f"{share:+.{digits}%}"


def ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}x" if over and under else ""


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = "" if value is None else str(value)
    for prefix in _PACKAGED:
        text = text.removeprefix(prefix)
    return text


def shortened(name: str, limit: int = 90) -> str:
    """Return a name with at most `limit` characters: those of C++ templates are far longer."""
    return name if len(name) <= limit else name[: limit - 1] + "…"


# -- rows -------------------------------------------------------------------------------------------------------------


def varying(cells: Sequence[CellView], *, always: Sequence[str] = ("size",)) -> list[str]:
    """Return the fields in which the cells differ, and those `always` shown."""
    return [name for name in FIELDS if name in always or _differs(cells, name)]


def _differs(cells: Sequence[CellView], name: str) -> bool:
    first = cells[0].get(name) if cells else None
    return any(cell.get(name) != first for cell in cells)


def settings_of(cell: CellView, *without: str) -> tuple[str, ...]:
    return tuple(as_text(cell.get(name)) for name in FIELDS if name not in without)


def key_columns(names: Sequence[str]) -> list[Column]:
    return [word(FIELDS[name]) for name in names]


def keys(cell: CellView, names: Sequence[str]) -> list[str]:
    return [as_text(cell.get(name)) for name in names]


def key_texts(cell: CellView, names: Sequence[str]) -> list[str | Text]:
    """Return the fields as cells of a table."""
    return [cell_text(name, text) for name, text in zip(names, keys(cell, names), strict=True)]


def cell_text(name: str, value: str) -> str | Text:
    text = value_text(name, value)
    return text if text.zh else value


_YES_NO = {"yes": "是", "no": "否"}


def value_text(name: str, value: str) -> Text:
    """Return the value of a field as its flag takes it; in Chinese a mode and yes/no are words."""
    words = MODE_WORDS.get(value) if name == "mode" else None
    return Text(value, words.in_("zh") if words else _YES_NO.get(value, ""))


def setting(name: str, value: str) -> Text:
    """Return a field with its heading: `context 512`, `causal yes`."""
    return say("{} {}", "{} {}", FIELDS[name], value_text(name, value))


def title_of(
    experiment: str, what: Text, cells: Sequence[CellView], shown: Sequence[str], machines: Sequence[str] | None = None
) -> Text:
    """Return the subject of a table, the machine, and the settings that all rows share, except the usual ones."""
    first = cells[0]
    same = {name: first.get(name) for name in FIELDS if name not in shown and not _differs(cells, name)}
    told = [name for name in _IN_TITLE if same.get(name) is not None]
    told += [name for name, usual in _USUAL.items() if same.get(name) not in (usual, None)]
    texts = [(name, as_text(same[name])) for name in told]
    settings = [setting(name, text) if _IN_TITLE.get(name, True) else value_text(name, text) for name, text in texts]
    named = sorted({cell.machine for cell in cells}) if machines is None else machines
    return titled(experiment, what, [*named, *settings])


def titled(experiment: str, what: Text, where: Sequence[str | Text] = ()) -> Text:
    """Return `experiment: subject · where it was measured`."""
    subject = say("{}: {}", "{}：{}", experiment, what)
    return say("{} · {}", "{} · {}", subject, listed(where, (", ", "，"))) if where else subject


def row_name(cell: CellView, shown: Sequence[str]) -> Text:
    """Return the distinguishing fields of a cell's row as in its table; numbers and yes/no come with their heading."""
    texts = [
        setting(field, text) if text.isdigit() or text in ("yes", "no") else value_text(field, text)
        for field, text in zip(shown, keys(cell, shown), strict=True)
        if text
    ]
    return listed(texts, (" ", " "))


def row_words(cell: CellView, shown: Sequence[str]) -> list[Text]:
    """Return the distinguishing fields in readers' words, for sentences and charts."""
    return [_word(field, cell.get(field), text) for field, text in zip(shown, keys(cell, shown), strict=True) if text]


def _word(field: str, value: Any, text: str) -> Text:
    match field:
        case "size":
            return size_name(value)
        case "mode":
            return MODE_WORDS.get(text) or Text(text)
        case "attention":
            return attention_name(value)
        case "implementation":
            return implementation_name(value)
        case "compile" if isinstance(value, bool):
            return Text("compiled", "编译") if value else Text("eager")
        case "is_causal" if isinstance(value, bool):
            return Text("causal", "因果") if value else Text("not causal", "非因果")
        case "checkpoint_blocks" if text.isdigit():
            groups = say("recomputed in groups of {}", "每 {} 块一组重计算", text)
            return groups if value else Text("no recomputation", "不重计算")
        case "warmup_steps" if text.isdigit():
            return Text(f"{text} warm-up step{'' if text == '1' else 's'}", f"预热 {text} 步")
        case "model_factory":
            llama = text.startswith("llama:")
            return Text("Llama of transformers", "transformers 的 Llama") if llama else Text("own model", "自定义模型")
        case "fast":
            whole = {"off": Text("plain step", "普通训练步"), "on": Text("fast step", "最快训练步")}
            return whole.get(text) or Text(text.replace(",", " + "))
        case "optimizer_state":
            states = {"fp32": Text("fp32 masters", "fp32 主权重"), "bf16": Text("bf16 state", "bf16 状态")}
            return states.get(text) or Text(text)
        case "head_dim":
            return say("head dim {}", "头维度 {}", text)
        case "seq_len":
            return say("{} tokens", "{} 个 token", text)
        case "heads":
            return say("{} heads", "{} 个头", text)
    return setting(field, text) if text.isdigit() or text in ("yes", "no") else Text(text)


def remarks_on(cells: Sequence[CellView], shown: Sequence[str] | None = None, *, on_spread: bool = True) -> list[Text]:
    """Return the referee's remarks, with cells named as in the table's rows; without those on the spread of step times
    if the table's subject is not time."""
    named = varying(cells) if shown is None else shown
    found = remarks(cells, lambda cell: row_name(cell, named))
    return [remark.text for remark in found if on_spread or remark.kind not in ON_SPREAD]


def failed_row(cell: CellView, columns: Sequence[Column]) -> list[str | Text]:
    return [cell.verdict, *[""] * (len(columns) - 1)]


def rows_table(
    what: Text,
    cells: Sequence[CellView],
    columns: Sequence[Column],
    rows: Callable[[CellView], Iterable[Sequence[str | Text]]],
    *,
    shown: Sequence[str] | None = None,
    notes: Sequence[Text] = (),
) -> Table:
    """Return a table with the rows that `rows` gives for each cell, behind the cell's distinguishing fields."""
    shown = varying(cells) if shown is None else shown
    lines = [[*key_texts(cell, shown), *row] for cell in cells for row in rows(cell)]
    title = title_of(cells[0].experiment, what, cells, shown)
    return Table(title, [*key_columns(shown), *columns], lines, notes)
