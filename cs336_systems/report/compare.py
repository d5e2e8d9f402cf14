"""Compares two files of records: for each cell in both the ratio of medians B / A, its interval and a verdict.

Medians, so that one interrupted step decides nothing. Cells are the same when they do the same work; how often and
where it was measured (steps, warm-up, seed, which GPU of several) may differ, and a note says so.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import UserError, nearest
from cs336_systems.record import HEADLINES, Record, cell_key
from cs336_systems.report.cells import CellView, fields_of, group, grouped
from cs336_systems.report.intervals import Ratio, ratio_of_medians
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import FIELDS, as_text, gib, kernel_ms, title_of
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, printable, say

HOW_MEASURED = ("device", "warmup_steps", "num_steps", "seed", "warmup_ms", "rep_ms", "rounds", "calls")
"""Fields of a configuration that do not change the work; of the device only which one of its kind."""
IMPLIED = ("d_model", "d_ff", "num_layers", "num_heads")
"""Fields of a model that its size stands for."""
_ATTENTION = ("heads", "head_dim", "seq_len", "is_causal")
AGREED = (*IMPLIED, "vocab_size", "context_length", "batch_size", "mode", "precision", *_ATTENTION)
"""Fields in which cells of different work must agree to be compared."""
PASSING = ("utc", "sm_clock_mhz", "memory", "gpu_memory")
"""Fields of an environment that change all the time, or that the machine's name implies."""
LEAST, MOST = 1e-100, 1e100
"""Samples beyond are no measurement, and their ratios no numbers."""


# -- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    a: CellView
    b: CellView

    @property
    def sides(self) -> tuple[CellView, CellView]:
        return self.a, self.b

    def of(self, variant: str) -> tuple[CellView, CellView]:
        """The views of one variant; the cells themselves for ""."""
        return (self.a.variant(variant), self.b.variant(variant)) if variant else self.sides


@dataclass(frozen=True)
class Row:
    """One metric of one pair."""

    pair: Pair
    variant: str
    name: str
    metric: str
    unit: str
    ratio: Ratio | None
    verdict: str

    @property
    def sides(self) -> tuple[CellView, CellView]:
        return self.pair.of(self.variant)

    @property
    def is_speed(self) -> bool:
        return self.unit == "s" or self.unit.endswith("/s")

    def is_slower_by(self, percent: float) -> bool:
        """With all of the interval."""
        if not self.is_speed or self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return False
        return (self.ratio.low if self.unit == "s" else 1 / self.ratio.high) > 1 + percent / 100


@dataclass(frozen=True)
class Comparison:
    table: Table
    rows: Sequence[Row]

    def slower_by(self, percent: float) -> list[Row]:
        if not any(row.is_speed for row in self.rows):
            metrics = ", ".join(dict.fromkeys(_short(row.metric) for row in self.rows))
            raise UserError(f"--fail_if_slower is for times, and {metrics} is none; name another --metric")
        return [row for row in self.rows if row.is_slower_by(percent)]

    @property
    def untold(self) -> list[Row]:
        """Rows without a verdict: a limit says nothing about them."""
        return [row for row in self.rows if row.ratio is None or row.ratio.low is None]


def compare(
    a: Iterable[Record],
    b: Iterable[Record],
    *,
    files: tuple[str, str] = ("A", "B"),
    metrics: Sequence[str] = (),
    experiments: Sequence[str] = (),
    confidence: float = 0.95,
    different_work: bool = False,
) -> Comparison:
    """Cells that both have, a row for each cell and metric. UserError where there is nothing to compare."""
    if not 0.5 <= confidence <= 0.999:
        raise UserError(f"confidence must be between 0.5 and 0.999, got {confidence!r}", "confidence")
    (cells_a, odd_a), (cells_b, odd_b) = (
        _cells(records, file, experiments) for records, file in zip((a, b), files, strict=True)
    )
    pairs = _pair_up(cells_a, cells_b, different_work)
    if not pairs:
        raise UserError(_why_none(cells_a, cells_b, different_work))
    rows = [row for pair, name in _named(pairs) for row in _rows(pair, name, metrics, confidence)]
    if not rows:
        raise UserError(_why_empty(pairs, metrics))
    notes = [
        f"A: {files[0]}, B: {files[1]}",
        _summary(rows, confidence),
        *_differences(pairs),
        *_failures(pairs),
        *_left_out([pair.a for pair in pairs], (row.pair.a for row in rows), "with nothing to compare in both"),
        *_left_out(cells_a, (pair.a for pair in pairs), "of A without a partner in B"),
        *_left_out(cells_b, (pair.b for pair in pairs), "of B without a partner in A"),
        *odd_a,
        *odd_b,
        *_oddities(rows),
    ]
    return Comparison(_table(rows, notes, confidence), rows)


def parse_percent(text: str) -> float:
    """5 of `5%` and of `5`. A bare fraction is refused: 0.05 may be meant as 5% or as 0.05%."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?%|[0-9]{1,6}", text.strip()):
        raise UserError(f"--fail_if_slower {text!r} is not a percentage; write it as 5% (or 0.5%)")
    return float(text.strip().removesuffix("%"))


# -- cells ------------------------------------------------------------------------------------------------------------


def _cells(records: Iterable[Record], file: str, experiments: Sequence[str]) -> tuple[list[CellView], list[str]]:
    """The cells asked for, experiment by experiment, and remarks on the file."""
    records = list(records)
    usable = [record for record in records if _is_usable(record)]
    have = list(dict.fromkeys(record.experiment for record in usable))
    if not have:
        raise UserError(f"{file!r} holds no records that can be compared")
    for name in experiments:
        if name not in have:
            raise UserError(f"{file!r} has no experiment {name}{nearest(name, have)}; it has: {_some(have, 8)}")
    wanted = [record for record in usable if not experiments or record.experiment in experiments]
    cells = sorted(group(wanted), key=lambda cell: have.index(cell.experiment))
    odd = [record for record in records if not _is_usable(record)]
    return cells, [f"{file}: {_counted(odd, 'record')} with fields of the wrong type left out"] if odd else []


def _is_usable(record: Record) -> bool:
    """Check that every field has the right type: a file may have been written by anything."""
    environment = record.environment
    fields = fields_of(record.config)
    return (
        all(isinstance(text, str) for text in environment.throttle_reasons)
        and all(isinstance(name, str | None) for name in (environment.gpu, environment.cpu))
        and not any(isinstance(fields.get(name), list | dict) for name in FIELDS)
        and all(_is_sample(sample) for sample in record.samples)
    )


def _is_sample(sample: Any) -> bool:
    if isinstance(sample, str):
        return True
    if isinstance(sample, bool) or not isinstance(sample, int | float):
        return False
    return not abs(sample) > MOST or abs(sample) == math.inf  # larger ones overflow where they are added up


def _device_type(cell: CellView) -> str:
    return as_text(cell.get("device")).split(":")[0]


Key = Callable[[CellView], Hashable]


def _exactly(cell: CellView) -> Hashable:
    return cell.experiment, cell_key(cell.config)


def _same_work(cell: CellView) -> Hashable:
    work = {name: value for name, value in cell.config.items() if name not in HOW_MEASURED}
    return cell.experiment, cell_key(work), _device_type(cell)


def _same_shape(cell: CellView) -> Hashable:
    """None where a configuration has no shape: such cells have nothing in common."""
    values = tuple(as_text(cell.get(name)) for name in AGREED)
    return values if any(values) else None


def _same_shape_and_experiment(cell: CellView) -> Hashable:
    shape = _same_shape(cell)
    return shape and (cell.experiment, shape)


def _pair_up(a: Sequence[CellView], b: Sequence[CellView], different_work: bool) -> list[Pair]:
    """The most alike first. One baseline may stand against several others of different work; several against several
    are left alone, as nothing says which belongs to which."""
    pairs: list[Pair] = []
    keys: list[tuple[Key, bool]] = [(_exactly, False), (_same_work, False)]
    if different_work:
        keys += [(_same_shape_and_experiment, True), (_same_shape, True)]
    for key, one_to_many in keys:
        taken = {id(cell) for pair in pairs for cell in pair.sides}
        groups_a, groups_b = (grouped((cell for cell in cells if id(cell) not in taken), key) for cells in (a, b))
        for found in groups_a.keys() & groups_b.keys() - {None}:
            ours, theirs = groups_a[found], groups_b[found]
            if min(len(ours), len(theirs)) == 1 and (one_to_many or len(ours) == len(theirs)):
                pairs += [Pair(x, y) for x in ours for y in theirs]
    places = {id(cell): place for cells in (a, b) for place, cell in enumerate(cells)}
    return sorted(pairs, key=lambda pair: (places[id(pair.a)], places[id(pair.b)]))


def _why_none(a: Sequence[CellView], b: Sequence[CellView], different_work: bool) -> str:
    if different_work:
        return "no cell of A agrees with one of B in size, context, batch, mode and precision: nothing to compare"
    how = {*HOW_MEASURED} - {"device"}
    differing = _differing(
        list(map(_described, a)), list(map(_described, b)), lambda name, x, y: name not in how and not x & y
    )
    reason = f"A and B did different work ({'; '.join(differing[:4]) or 'no configuration is in both'})"
    return reason + ("; --different_work compares all the same" if _pair_up(a, b, True) else ": nothing to compare")


# -- rows -------------------------------------------------------------------------------------------------------------


def _named(pairs: Sequence[Pair]) -> list[tuple[Pair, str]]:
    """Each with what tells it from the others of its experiment, in words."""
    by_experiment: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_experiment.setdefault(pair.a.experiment, []).append(pair)
    shown = {experiment: _telling(found) for experiment, found in by_experiment.items()}
    return [(pair, _name(pair, shown[pair.a.experiment])) for pair in pairs]


def _telling(pairs: Sequence[Pair]) -> list[str]:
    """The fields that differ from cell to cell within A or within B, and the size always."""
    sides = [[pair.a for pair in pairs], [pair.b for pair in pairs]]
    names = sorted({name for side in sides for cell in side for name in cell.fields} - {"model", *IMPLIED})

    def differs(name: str) -> bool:
        return any(len({as_text(cell.get(name)) for cell in side}) > 1 for side in sides)

    return [name for name in dict.fromkeys([*FIELDS, *names]) if name == "size" or differs(name)]


def _name(pair: Pair, shown: Sequence[str]) -> str:
    words = []
    for name in shown:
        texts = list(dict.fromkeys(_short(as_text(cell.get(name))) for cell in pair.sides))
        text = " -> ".join(text or "none" for text in texts) if len(texts) > 1 else texts[0]
        speaks = name in ("size", "mode", "precision", "attention", "implementation", "model_factory")
        words += [text if speaks else f"{_field(name)} {text}"] if text else []
    return _short(" ".join(words) or pair.a.name or pair.a.experiment, 120)


def _rows(pair: Pair, name: str, metrics: Sequence[str], confidence: float) -> list[Row]:
    """The rows of a pair: of the cells themselves, then of each variant that both measured.

    A pair that failed on one side shows the values of the other; one that failed on both has no rows.
    """
    whole = [cell for cell in pair.sides if cell.ok]
    if not whole:
        return []
    shared = [variant for variant in whole[0].variants if all(variant in cell.variants for cell in whole)]
    return [row for variant in ("", *shared) for row in _rows_of(pair, variant, name, metrics, confidence)]


def _rows_of(pair: Pair, variant: str, name: str, metrics: Sequence[str], confidence: float) -> list[Row]:
    whole = [cell for cell in pair.of(variant) if cell.ok]
    name = _short(f"{name}, {variant}", 120) if variant else name
    rows = []
    for metric in _chosen([m for m in whole[0].metrics if all(m in cell.metrics for cell in whole)], metrics):
        found = whole[0].metrics[metric]
        if not any(cell.metrics[metric].numbers for cell in whole):
            continue  # words: nothing to divide
        failed = None, f"failed in {'B' if pair.a.ok else 'A'}"
        ratio, verdict = failed if len(whole) == 1 else _judged(found, whole[1].metrics[metric], confidence)
        rows.append(Row(pair, variant, name, metric, found.unit, ratio, verdict))
    return rows


def _chosen(have: Sequence[str], asked: Sequence[str]) -> list[str]:
    """The metrics asked for, or the headline."""
    if asked:
        return [name for name in dict.fromkeys(asked) if name in have]
    return next(([name] for name in HEADLINES if name in have), [])


def _judged(a: Record, b: Record, confidence: float) -> tuple[Ratio | None, str]:
    if a.unit != b.unit:
        return None, "units differ: cannot tell"
    samples = (*a.samples, *b.samples)
    if not (a.samples and b.samples and all(isinstance(s, int | float) and LEAST < s < MOST for s in samples)):
        return None, "not all finite and above 0: cannot tell"
    ratio = ratio_of_medians(a.numbers, b.numbers, confidence)
    if ratio.low is None or ratio.high is None:
        return ratio, "n = 1: cannot tell"
    more, less = ("slower", "faster") if a.unit == "s" else ("more", "less")
    if a.unit.endswith("/s"):
        more, less = "faster", "slower"
    return ratio, more if ratio.low > 1 else less if ratio.high < 1 else "no difference"


def _why_empty(pairs: Sequence[Pair], metrics: Sequence[str]) -> str:
    if all(pair.a.experiment == "train" for pair in pairs):
        return "A and B are training runs, which have no cells to compare; side by side: cs336 report A B"
    if not any(cell.ok for pair in pairs for cell in pair.sides):
        return f"all {len(pairs)} cells that A and B have in common failed in both: nothing to compare"
    have = dict.fromkeys(
        metric
        for pair in pairs
        if pair.a.ok and pair.b.ok
        for a, b in map(pair.of, ("", *pair.a.variants))
        for metric, record in a.metrics.items()
        if metric in b.metrics and record.numbers
    )
    wanted = " or ".join(metrics or HEADLINES)
    return f"no cell of A and B has {wanted}; choose a --metric that both have: {_some(have, 8) or 'there is none'}"


# -- the table --------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], notes: Sequence[str], confidence: float) -> Table:
    """The same columns whatever is compared, for programs that read it as CSV."""
    names = (Text("experiment", "实验"), Text("cell", "配置"), Text("metric", "指标"), Text("unit", "单位"))
    columns = [*map(word, names), *(Column(Text(name)) for name in ("A", "B", "n", "B / A"))]
    columns += [Column(say("{}% {}", "{}% {}", f"{confidence * 100:g}", end)) for end in _ENDS]
    columns += [word(Text("verdict", "结论"))]
    lines = [[row.pair.a.experiment, row.name, row.metric, _shown_unit(row.unit), *_values(row)] for row in rows]
    cells = [cell for row in rows for cell in row.pair.sides]
    what = Text("B / A of medians", "中位数之比 B / A")
    title = title_of("compare", what, cells, _telling([row.pair for row in rows]))
    return Table(
        Text(*(_short(text, 400) for text in title)),
        columns,
        [[_short(text, 120) for text in line] for line in lines],
        [Text(_short(note, 1000)) for note in notes],
    )


_ENDS = (Text("low", "下限"), Text("high", "上限"))


def _values(row: Row) -> list[str]:
    ratio = row.ratio
    counts = [str(len(cell.metrics[row.metric].samples)) for cell in row.sides if row.metric in cell.metrics]
    return [
        *(_median(cell, row) for cell in row.sides),
        ", ".join(dict.fromkeys(counts)),
        *(_factor(value) for value in ((ratio.value, ratio.low, ratio.high) if ratio else (None,) * 3)),
        row.verdict,
    ]


def _median(cell: CellView, row: Row) -> str:
    if not cell.ok:
        return cell.verdict
    found = cell.statistics(row.metric)
    if found is None:
        return ""
    return kernel_ms(found.median) if row.unit == "s" else gib(found.median) if row.unit == "B" else f"{found.median:g}"


def _shown_unit(unit: str) -> str:
    return {"s": "ms", "B": "GiB", "1": ""}.get(unit, unit)


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if 0.01 < value < 1000 else f"{value:.3g}"


# -- notes ------------------------------------------------------------------------------------------------------------


def _field(name: str) -> str:
    return FIELDS[name].en if name in FIELDS else name


def _short(text: str, most: int = 60) -> str:
    """Return a name from a file, which may be a whole book, shortened; a table would be as wide."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def _some(names: Iterable[str], most: int = 3) -> str:
    """Up to `most` of them; the same name only once."""
    names = list(dict.fromkeys(_short(name) for name in names))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _counted(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}" + "s" * (len(items) != 1)


def _summary(rows: Sequence[Row], confidence: float) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).items())
    chance = (1 - confidence) * sum(row.ratio is not None for row in rows)
    return (
        f"{counts}. Intervals ({confidence * 100:g}%) are by bootstrap over the steps of one run on each side: what "
        "changes from run to run is not in them" + (f"; up to {chance:.0f} rows may differ by chance" * (chance >= 1))
    )


def _differences(pairs: Sequence[Pair]) -> list[str]:
    """Notes on differences of work, of how it was measured and of where; each once for all rows."""
    a, b = ([_described(pair.sides[side]) for pair in pairs] for side in (0, 1))
    there, here = ([_surroundings(pair.sides[side]) for pair in pairs] for side in (0, 1))
    found = {name for x, y in zip(a, b, strict=True) for name in x.keys() | y.keys() if x.get(name) != y.get(name)}
    how = found & {*HOW_MEASURED, "size"}
    if any(_device_type(pair.a) != _device_type(pair.b) for pair in pairs):
        how.discard("device")
    differing = {
        "different work": _differing(a, b, lambda name, *_: name in found - how),
        "measured differently": _differing(a, b, lambda name, *_: name in how),
        "environment": _differing(there, here, lambda _, x, y: x != y),
    }
    return [f"{what}: {'; '.join(lines)}" for what, lines in differing.items() if lines]


def _described(cell: CellView) -> dict[str, str]:
    """The fields of the configuration that may differ, as text."""
    names = dict.fromkeys([*FIELDS, *sorted(cell.fields.keys() - {"model", *IMPLIED})])
    texts = {name: as_text(cell.get(name)) for name in names}
    return {"experiment": cell.experiment, **{name: text for name, text in texts.items() if text}}


def _surroundings(cell: CellView) -> dict[str, str]:
    """The fields of the environment that may differ, as text."""
    values = {name: value for name, value in vars(cell.environment).items() if name not in PASSING}
    values["git_commit"] = as_text(values["git_commit"])[:10]
    values["throttle_reasons"] = ", ".join(values["throttle_reasons"]) or "none"
    return {name: as_text(value) or "unknown" for name, value in values.items()}


def _differing(
    a: Sequence[dict[str, str]], b: Sequence[dict[str, str]], worth: Callable[[str, set[str], set[str]], bool]
) -> list[str]:
    """`precision fp32 in A, bf16 in B` for each name that is worth it by its values in A and in B."""
    lines = []
    for name in dict.fromkeys(name for described in (*a, *b) for name in described):
        ours, theirs = ({described.get(name, "none") for described in side} for side in (a, b))
        if worth(name, ours, theirs):
            lines.append(f"{_short(_field(name))} {_some(sorted(ours))} in A, {_some(sorted(theirs))} in B")
    return lines


def _failures(pairs: Sequence[Pair]) -> list[str]:
    failed: dict[tuple[str, str], list[str]] = {}
    for side in (0, 1):
        for cell in (pair.sides[side] for pair in pairs):
            if not cell.ok:
                failed.setdefault(("AB"[side], cell.status), []).append(_title(cell))
    return [f"failed in {side}: {_some(names)}: {_short(status, 200)}" for (side, status), names in failed.items()]


def _left_out(cells: Sequence[CellView], kept: Iterable[CellView], why: str) -> list[str]:
    ids = {id(cell) for cell in kept}
    left = [cell for cell in cells if id(cell) not in ids]
    return [f"{_counted(left, 'cell')} {why}: {_some(map(_title, left))}"] if left else []


def _title(cell: CellView) -> str:
    return f"{cell.experiment} {cell.name}".strip()


def _oddities(rows: Sequence[Row]) -> list[str]:
    """The referee's remarks on either side."""
    names = {id(cell): row.name for row in rows for cell in row.pair.sides}
    lines = []
    for side in (0, 1):
        cells = list({id(row.pair.sides[side]): row.pair.sides[side] for row in rows}.values())
        found = remarks([cell for cell in cells if cell.ok], lambda cell: Text(names[id(cell)]))
        lines += [f"{'AB'[side]}: {remark.text.en}" for remark in found]
    return lines
