"""Compares two files of records: for each cell in both the ratio of medians B / A, its interval and a verdict.

Medians, so that one interrupted step decides nothing. pairing.py says which cells are compared, compare_output.py shows
the result: as a table, on a terminal, as a page with a forest plot.
"""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cs336_systems.config import UserError
from cs336_systems.record import CELL_TIME, HEADLINES, Record, cell_key
from cs336_systems.report.cells import CellView
from cs336_systems.report.intervals import Ratio, geometric_mean, ratio_of_medians
from cs336_systems.report.pairing import MOST, Names, Pair, differences, pair_up, short, some, title, usable_cells
from cs336_systems.report.referee import remarks
from cs336_systems.report.whole_runs import AT_END
from cs336_systems.text import Text, say

LEAST = 1 / MOST
"""Smaller samples are not valid measurements."""

FASTER, SLOWER = Text("faster", "更快"), Text("slower", "更慢")
LESS, MORE = Text("less", "更少"), Text("more", "更多")
DECIDED = (FASTER, SLOWER, LESS, MORE)
"""Verdicts whose interval does not contain 1."""
UNDECIDED = Text("undecided", "不显著")
UNITS_DIFFER = Text("undecided: units differ", "无法判断：单位不同")
INVALID = Text("undecided: invalid values", "无法判断：数值无效")
ONE_SAMPLE = Text("undecided: n = 1", "无法判断：n = 1")
FAILED = {side: Text(f"failed in {side}", f"{side} 失败") for side in "AB"}


@dataclass(frozen=True)
class Row:
    """One metric of one pair of cells."""

    pair: Pair
    variant: str
    name: Text
    """Name of the row as records and flags spell it."""
    label: Text
    """Name of the row as charts and sentences spell it."""
    metric: str
    unit: str
    ratio: Ratio | None
    verdict: Text

    @property
    def sides(self) -> tuple[CellView, CellView]:
        return self.pair.of(self.variant)

    @property
    def title(self) -> str:
        """The experiment and the row's name, which may begin with that of the experiment."""
        return with_experiment(short(self.pair.a.experiment), self.name).en

    @property
    def is_speed(self) -> bool:
        return self.unit == "s" or self.unit.endswith("/s")

    @property
    def change(self) -> float:
        """The factor between the medians, at least 1: equal for ratios of 2 and of 1/2."""
        return abs(math.log(self.ratio.value)) if self.ratio else 0.0

    def is_slower_by(self, percent: float) -> bool:
        """Return True if the whole interval is slower by more than this percentage."""
        if not self.is_speed or self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return False
        return (self.ratio.low if self.unit == "s" else 1 / self.ratio.high) > 1 + percent / 100

    @property
    def _order(self) -> tuple[int, float]:
        """Sort key: failures first, then the largest changes, then undecided rows."""
        groups = (self.verdict in FAILED.values(), self.verdict in DECIDED, self.ratio is not None, True)
        return groups.index(True), -self.change

    @property
    def _measurement(self) -> Hashable:
        """Key that is equal for rows of one measurement, which a file may hold under several experiments."""
        samples = (cell.samples(self.metric) for cell in self.sides)
        return (*(cell_key(cell.config) for cell in self.sides), self.variant, self.metric, *samples)


@dataclass(frozen=True)
class Mean:
    """The geometric mean of the ratios of one unit."""

    unit: str
    ratio: Ratio
    count: int

    @property
    def verdict(self) -> Text:
        return _verdict(self.unit, self.ratio)


@dataclass(frozen=True)
class Comparison:
    files: tuple[str, str]
    rows: Sequence[Row]
    """Rows in order: failures first, then the largest changes, undecided ones last."""
    confidence: float
    differences: Sequence[Text] = ()
    """Differences between A and B in settings and environment."""
    remarks: Sequence[Text] = ()
    """Remarks on failures, on what is left out, and on oddities."""

    def slower_by(self, percent: float) -> list[Row]:
        if not self.timed:
            metrics = ", ".join(dict.fromkeys(short(row.metric) for row in self.rows))
            raise UserError(f"--fail_if_slower is for times, and {metrics} is none; name another --metric")
        return [row for row in self.timed if row.is_slower_by(percent)]

    @property
    def untold(self) -> list[Row]:
        """Rows of times without an interval, which a limit cannot be applied to."""
        return [row for row in self.timed if row.ratio is None or row.ratio.low is None]

    @property
    def timed(self) -> list[Row]:
        """Rows of times and rates, which a limit on slowness is for."""
        return [row for row in self.rows if row.is_speed]

    @property
    def means(self) -> list[Mean]:
        """The geometric mean of the times, of the rates and of the bytes, where several have an interval."""
        by_unit: dict[str, list[Ratio]] = {}
        for row in self.rows:
            if row.ratio and row.ratio.low is not None and (row.is_speed or row.unit == "B"):
                by_unit.setdefault(row.unit, []).append(row.ratio)
        return [Mean(unit, geometric_mean(found), len(found)) for unit, found in by_unit.items() if len(found) > 1]

    @property
    def counts(self) -> dict[Text, int]:
        """Verdict -> number of rows, also of verdicts that no row has; all that are undecided together, and last."""
        verdicts = [row.verdict if row.verdict in (*FAILED.values(), *DECIDED) else UNDECIDED for row in self.rows]
        possible = [*((FASTER, SLOWER) if row.is_speed else (LESS, MORE) for row in self.rows)]
        asked = dict.fromkeys(verdict for pair in possible for verdict in pair)
        failed = [verdict for verdict in FAILED.values() if verdict in verdicts]
        return {verdict: verdicts.count(verdict) for verdict in (*failed, *asked, UNDECIDED)}


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
    """Compare the cells that both files have, with a row for each cell and metric; raise UserError if there are
    none."""
    if not 0.5 <= confidence <= 0.999:
        raise UserError(f"confidence must be between 0.5 and 0.999, got {confidence!r}", "confidence")
    (cells_a, odd_a), (cells_b, odd_b) = (
        usable_cells(records, file, experiments) for records, file in zip((a, b), files, strict=True)
    )
    pairs = pair_up(cells_a, cells_b, different_work)
    names = Names(pairs)
    every = [row for pair in pairs for row in _rows(pair, names, metrics, confidence)]
    if not every:
        raise UserError(_why_empty(pairs, metrics))
    rows = list({row._measurement: row for row in reversed(every)}.values())[::-1]
    notes = [
        *_repeated(len(every) - len(rows)),
        *_failures(pairs),
        *_left_out(
            [pair.a for pair in pairs],
            (row.pair.a for row in every),
            Text("with nothing to compare in both", "两边没有可比较的指标"),
        ),
        *_left_out(
            cells_a, (pair.a for pair in pairs), Text("of A without a partner in B", "仅 A 有，B 中没有对应配置")
        ),
        *_left_out(
            cells_b, (pair.b for pair in pairs), Text("of B without a partner in A", "仅 B 有，A 中没有对应配置")
        ),
        *odd_a,
        *odd_b,
        *_oddities([row.pair for row in rows], names),
    ]
    return Comparison(files, sorted(rows, key=lambda row: row._order), confidence, differences(pairs), notes)


def parse_percent(text: str) -> float:
    """Return the number in a percentage: 5 for `5%` and for `5`. A bare fraction is refused: 0.05 may be meant as 5% or
    as 0.05%."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?%|[0-9]{1,6}", text.strip()):
        raise UserError(f"--fail_if_slower {text!r} is not a percentage; write it as 5% (or 0.5%)")
    return float(text.strip().removesuffix("%"))


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(pair: Pair, names: Names, metrics: Sequence[str], confidence: float) -> Iterator[Row]:
    """Yield the rows of a pair: of the cells themselves, then of each variant that both measured.

    A pair that failed on one side shows the values of the other; one that failed on both has no rows.
    """
    whole = [cell for cell in pair.sides if cell.ok]
    if not whole:
        return
    shared = [variant for variant in whole[0].variants if all(variant in cell.variants for cell in whole)]
    for variant in ("", *shared):
        yield from _rows_of(pair, variant, names, metrics, confidence)


def _rows_of(pair: Pair, variant: str, names: Names, metrics: Sequence[str], confidence: float) -> Iterator[Row]:
    whole = [cell for cell in pair.of(variant) if cell.ok]
    for metric in _chosen([m for m in whole[0].metrics if all(m in cell.metrics for cell in whole)], metrics):
        found = whole[0].metrics[metric]
        if not any(cell.metrics[metric].numbers for cell in whole):
            continue  # words: nothing to divide
        ratio, verdict = None, FAILED["B" if pair.a.ok else "A"]
        if len(whole) == 2:
            ratio, verdict = _judged(found, whole[1].metrics[metric], confidence)
        name, label = names.of(pair, variant), names.for_readers(pair, variant)
        yield Row(pair, variant, name, label, metric, found.unit, ratio, verdict)


def _chosen(have: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return the metrics asked for, or the headline and, of a training run, the losses at its end."""
    if asked:
        return [name for name in dict.fromkeys(asked) if name in have]
    headline = next(([name] for name in HEADLINES if name in have), [])
    return headline + [name for name in AT_END if name in have]


def _judged(a: Record, b: Record, confidence: float) -> tuple[Ratio | None, Text]:
    if a.unit != b.unit:
        return None, UNITS_DIFFER
    samples = (*a.samples, *b.samples)
    if not (a.samples and b.samples and all(isinstance(s, int | float) and LEAST < s < MOST for s in samples)):
        return None, INVALID
    ratio = ratio_of_medians(a.numbers, b.numbers, confidence)
    return ratio, _verdict(a.unit, ratio)


def _verdict(unit: str, ratio: Ratio) -> Text:
    if ratio.low is None or ratio.high is None:
        return ONE_SAMPLE
    above, below = (SLOWER, FASTER) if unit == "s" else (FASTER, SLOWER) if unit.endswith("/s") else (MORE, LESS)
    return above if ratio.low > 1 else below if ratio.high < 1 else UNDECIDED


def _why_empty(pairs: Sequence[Pair], metrics: Sequence[str]) -> str:
    if not any(cell.ok for pair in pairs for cell in pair.sides):
        return f"all {len(pairs)} cells that A and B have in common failed in both: nothing to compare"
    units = {
        metric: record.unit
        for pair in pairs
        if pair.a.ok and pair.b.ok
        for a, b in map(pair.of, ("", *pair.a.variants))
        for metric, record in a.metrics.items()
        if metric in b.metrics and record.numbers and metric != CELL_TIME
    }
    have = [metric for metric, unit in units.items() if unit != "1"] or list(units)  # most bare numbers are settings
    wanted = " or ".join(metrics or HEADLINES)
    return f"no cell of A and B has {wanted}; choose a --metric that both have: {some(have, 8) or 'there is none'}"


def with_experiment(experiment: str, name: Text, template: tuple[str, str] = ("{} {}", "{} {}")) -> Text:
    """Return the name of a row with that of its experiment, which is left out where the name begins with it."""
    return name if re.match(rf"{re.escape(experiment)}(,|$)", name.en) else say(*template, experiment, name)


# -- remarks ----------------------------------------------------------------------------------------------------------


def _repeated(number: int) -> list[Text]:
    if not number:
        return []
    english = f"{number} row{'s' * (number != 1)} left out: the same measurements under other experiments"
    return [Text(english, f"略去 {number} 行：其他实验名下的相同测量")]


def _failures(pairs: Sequence[Pair]) -> list[Text]:
    failed: dict[tuple[str, str], list[str]] = {}
    for side in (0, 1):
        for cell in (pair.sides[side] for pair in pairs):
            if not cell.ok:
                failed.setdefault(("AB"[side], cell.status), []).append(title(cell))
    return [
        say("{}: {}: {}", "{}：{}：{}", FAILED[side], some(names), short(status, 200))
        for (side, status), names in failed.items()
    ]


def _left_out(cells: Sequence[CellView], kept: Iterable[CellView], why: Text) -> list[Text]:
    ids = {id(cell) for cell in kept}
    left = [cell for cell in cells if id(cell) not in ids]
    count = Text(f"{len(left)} cell{'s' * (len(left) != 1)}", f"{len(left)} 个配置")
    return [say("{} {}: {}", "{}{}：{}", count, why, some(map(title, left)))] if left else []


def _oddities(pairs: Sequence[Pair], names: Names) -> list[Text]:
    """Return the referee's remarks on either side."""
    lines = []
    for side in (0, 1):
        named = {id(pair.sides[side]): names.of(pair) for pair in pairs}
        cells = list({id(pair.sides[side]): pair.sides[side] for pair in pairs if pair.sides[side].ok}.values())
        found = remarks(cells, partial(_name_in, named))
        lines += [say("{}: {}", "{}：{}", "AB"[side], remark.text) for remark in found]
    return lines


def _name_in(names: Mapping[int, Text], cell: CellView) -> Text:
    return names[id(cell)]
