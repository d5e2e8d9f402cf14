"""Cells of two files that did the same work, in pairs, with the names of their rows.

Cells match if they do the same work; the number of measurements and the place (steps, warm-up, seed, which of several
GPUs) may differ.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import UserError, nearest
from cs336_systems.record import Record, cell_key
from cs336_systems.report.cells import CellView, fields_of, group, grouped
from cs336_systems.report.names import implementation_name, size_name
from cs336_systems.report.phrases import MODE_WORDS
from cs336_systems.report.rows import FIELDS, as_text
from cs336_systems.report.whole_runs import joined_runs
from cs336_systems.text import Text, listed, printable, say

LOGGED = ("log_every", "tensorboard", "save_every", "async_save", "keep", "keep_every", "keep_best")
"""Fields of a training run that say what is written and when."""
HOW_MEASURED = ("device", "warmup_steps", "num_steps", "seed", "warmup_ms", "rep_ms", "rounds", "calls", *LOGGED)
"""Fields of a configuration that do not change the work; a device may only differ in its index."""
IMPLIED = ("d_model", "d_ff", "num_layers", "num_heads")
"""Fields of a model that are implied by its size."""
SIDE_BY_SIDE = "; training runs side by side: cs336 report A B"
_ATTENTION = ("heads", "head_dim", "seq_len", "is_causal")
AGREED = (*IMPLIED, "vocab_size", "context_length", "batch_size", "mode", "precision", *_ATTENTION)
"""Fields in which cells of different work must agree to be compared."""
PASSING = ("utc", "sm_clock_mhz", "memory", "gpu_memory")
"""Fields of an environment that always change, or that follow from the machine's name."""
MOST = 1e100
"""Larger samples are not valid measurements."""
LONGEST_NAME, LONGEST_LABEL = 120, 180
"""Maximum characters of the name of a cell, and of that name with a variant's."""
_BARE = ("size", "mode", "precision", "attention", "implementation", "model_factory")
"""Fields whose values are understood without a heading."""


@dataclass(frozen=True)
class Pair:
    a: CellView
    b: CellView

    @property
    def sides(self) -> tuple[CellView, CellView]:
        return self.a, self.b

    def of(self, variant: str) -> tuple[CellView, CellView]:
        """Return the views of one variant, or the cells themselves for ""."""
        return (self.a.variant(variant), self.b.variant(variant)) if variant else self.sides


# -- cells ------------------------------------------------------------------------------------------------------------


def usable_cells(records: Iterable[Record], file: str, experiments: Sequence[str]) -> tuple[list[CellView], list[Text]]:
    """Return the cells asked for, by experiment, and remarks on the file."""
    records = list(records)
    usable = [record for record in records if _is_usable(record)]
    have = list(dict.fromkeys(record.experiment for record in usable))
    if not have:
        raise UserError(f"{file!r} holds no records that can be compared")
    for name in experiments:
        if name not in have:
            raise UserError(f"{file!r} has no experiment {name}{nearest(name, have)}; it has: {some(have, 8)}")
    wanted = [record for record in usable if not experiments or record.experiment in experiments]
    cells = sorted(joined_runs(group(wanted)), key=lambda cell: have.index(cell.experiment))
    odd = len(records) - len(usable)
    english = f"{{}}: {odd} record{'s' * (odd != 1)} with fields of the wrong type left out"
    return cells, [say(english, f"{{}}：略去 {odd} 条字段类型有误的记录", short(file, 400))] if odd else []


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


# -- pairs ------------------------------------------------------------------------------------------------------------

Key = Callable[[CellView], Hashable]


def device_type(cell: CellView) -> str:
    return as_text(cell.get("device")).split(":")[0]


def _exactly(cell: CellView) -> Hashable:
    return cell.experiment, cell_key(cell.config)


def _same_work(cell: CellView) -> Hashable:
    work = {name: value for name, value in cell.config.items() if name not in HOW_MEASURED}
    return cell.experiment, cell_key(work), device_type(cell)


def _same_shape(cell: CellView) -> Hashable:
    """Return the model's shape; None if a configuration has no shape, since such cells cannot be matched."""
    values = tuple(as_text(cell.get(name)) for name in AGREED)
    return values if any(values) else None


def _same_shape_and_experiment(cell: CellView) -> Hashable:
    shape = _same_shape(cell)
    return shape and (cell.experiment, shape)


def pair_up(a: Sequence[CellView], b: Sequence[CellView], different_work: bool) -> list[Pair]:
    """Pair cells, the most similar first. One baseline may be paired with several cells of different work; several
    baselines with several cells are ambiguous and not paired. Raise UserError if no cells are similar."""
    pairs = _pairs(a, b, different_work)
    if not pairs:
        raise UserError(_why_none(a, b, different_work))
    return pairs


def _pairs(a: Sequence[CellView], b: Sequence[CellView], different_work: bool) -> list[Pair]:
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
    is_training = all(any(cell.experiment == "train" for cell in cells) for cells in (a, b))
    if different_work:
        reason = "no cell of A agrees with one of B in size, context, batch, mode and precision"
        return f"{reason}{SIDE_BY_SIDE if is_training else ': nothing to compare'}"
    how = {*HOW_MEASURED} - {"device"}
    differing = _differing(
        list(map(_described, a)), list(map(_described, b)), lambda name, x, y: name not in how and not x & y
    )
    lines = "; ".join(text.en for text in differing[:4])
    reason = f"A and B did different work ({lines or 'no configuration is in both'})"
    if is_training:
        return reason + SIDE_BY_SIDE
    return reason + ("; --different_work compares all the same" if _pairs(a, b, True) else ": nothing to compare")


# -- names ------------------------------------------------------------------------------------------------------------


class Names:
    """The names of pairs, which distinguish the pairs of an experiment."""

    def __init__(self, pairs: Sequence[Pair]):
        by_experiment: dict[str, list[Pair]] = {}
        for pair in pairs:
            by_experiment.setdefault(pair.a.experiment, []).append(pair)
        self._fields = {experiment: _distinct_fields(found) for experiment, found in by_experiment.items()}

    def of(self, pair: Pair, variant: str = "") -> Text:
        """Return the name as records and flags spell it: `small fast off -> on`."""
        name = _joined((_spelled(pair, name) for name in self._fields[pair.a.experiment]), (" ", " "))
        return _joined([name if name.en else _plain_name(pair), Text(variant)], (", ", "，"))

    def for_readers(self, pair: Pair, variant: str = "") -> Text:
        """Return the name as charts and sentences spell it, the variant first: `cuDNN, 2.7B, training step`."""
        words = [_spelled(pair, name, for_readers=True) for name in self._fields[pair.a.experiment]]
        name = _joined([implementation_name(variant), *words], (", ", "，"))
        return name if name.en else _plain_name(pair)


def _plain_name(pair: Pair) -> Text:
    return Text(short(pair.a.name or pair.a.experiment, LONGEST_NAME))


def _joined(words: Iterable[Text], separators: tuple[str, str]) -> Text:
    """Return the words that are not empty."""
    return _shortened(listed([_shortened(word, LONGEST_NAME) for word in words if word.en], separators), LONGEST_LABEL)


def _distinct_fields(pairs: Sequence[Pair]) -> list[str]:
    """Return the fields that distinguish the pairs: those that tables name, and as few others as necessary."""
    differing = telling(pairs)
    values = {name: {type(cell.get(name)) for pair in pairs for cell in pair.sides} for name in differing}
    lists = {name for name, types in values.items() if types & {list, dict}}
    named = [name for name in differing if name in FIELDS and name not in HOW_MEASURED]
    levels = (named, {*differing} - {*HOW_MEASURED} - lists, {*differing} - lists, differing)
    for level in levels:
        fields = [name for name in differing if name in level]
        if len({tuple(_spelled(pair, name) for name in fields) for pair in pairs}) == len(pairs):
            return fields
    return differing


def telling(pairs: Sequence[Pair]) -> list[str]:
    """Return the fields that differ from cell to cell within A or within B, and always the size."""
    sides = [[pair.a for pair in pairs], [pair.b for pair in pairs]]
    names = sorted({name for side in sides for cell in side for name in cell.fields} - {"model", *IMPLIED})

    def differs(name: str) -> bool:
        return any(len({as_text(cell.get(name)) for cell in side}) > 1 for side in sides)

    return [name for name in dict.fromkeys([*FIELDS, *names]) if name == "size" or differs(name)]


_READERS: dict[str, Callable[[str], Text]] = {
    "size": size_name,
    "attention": implementation_name,
    "implementation": implementation_name,
    "mode": lambda mode: MODE_WORDS.get(mode, Text(mode)),
}
"""Fields whose values have other names for readers."""


def _spelled(pair: Pair, name: str, *, for_readers: bool = False) -> Text:
    """Return a field of both cells as text, with its heading unless its values are self-explanatory; "" if neither has
    it."""
    values = list(dict.fromkeys(as_text(cell.get(name)) for cell in pair.sides))
    if not any(values):
        return Text("")
    heading = _shortened(field_name(name), 60)
    if for_readers and len(values) == 1 and values[0] in _IN_WORDS:
        return say(*_IN_WORDS[values[0]], heading)
    rename = _READERS.get(name, Text) if for_readers else Text
    texts = [_ANSWERS.get(value) or _shortened(rename(value), 60) for value in values]
    said = listed(texts, (" -> ", " -> "))
    return said if name in _BARE else say("{} {}", "{} {}", heading, said)


_ANSWERS = {"yes": Text("yes", "是"), "no": Text("no", "否"), "": Text("none", "无")}
_IN_WORDS = {"yes": ("{}", "{}"), "no": ("not {}", "{}：否")}


def field_name(name: str) -> Text:
    return FIELDS.get(name) or Text(name)


def title(cell: CellView) -> str:
    return f"{cell.experiment} {cell.name}".strip()


def short(text: str, most: int = 60) -> str:
    """Return a name from a file, shortened, because an arbitrarily long one would make a table too wide."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def _shortened(text: Text, most: int) -> Text:
    return Text(*(short(one, most) for one in text))


def some(names: Iterable[str], most: int = 3) -> str:
    """Join at most `most` of the names, without duplicates."""
    names = list(dict.fromkeys(short(name) for name in names))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


# -- differences ------------------------------------------------------------------------------------------------------


def differences(pairs: Sequence[Pair]) -> list[Text]:
    """Return the differences between A and B in work, measurement and environment; each once for all pairs."""
    a, b = ([_described(pair.sides[side]) for pair in pairs] for side in (0, 1))
    there, here = ([_surroundings(pair.sides[side]) for pair in pairs] for side in (0, 1))
    found = {name for x, y in zip(a, b, strict=True) for name in x.keys() | y.keys() if x.get(name) != y.get(name)}
    how = found & {*HOW_MEASURED, "size"}
    if any(device_type(pair.a) != device_type(pair.b) for pair in pairs):
        how.discard("device")
    differing = {
        Text("different work", "工作不同"): _differing(a, b, lambda name, *_: name in found - how),
        Text("measured differently", "测量方式不同"): _differing(a, b, lambda name, *_: name in how),
        Text("environment", "环境不同"): _differing(there, here, lambda _, x, y: x != y),
    }
    return [say("{}: {}", "{}：{}", what, listed(lines, ("; ", "；"))) for what, lines in differing.items() if lines]


def _described(cell: CellView) -> dict[str, str]:
    """Return the fields of the configuration that may differ, as text."""
    names = dict.fromkeys([*FIELDS, *sorted(cell.fields.keys() - {"model", *IMPLIED})])
    texts = {name: as_text(cell.get(name)) for name in names}
    return {"experiment": cell.experiment, **{name: text for name, text in texts.items() if text}}


def _surroundings(cell: CellView) -> dict[str, str]:
    """Return the fields of the environment that may differ, as text."""
    values = {name: value for name, value in vars(cell.environment).items() if name not in PASSING}
    values["git_commit"] = as_text(values["git_commit"])[:10]
    values["throttle_reasons"] = ", ".join(values["throttle_reasons"]) or "none"
    return {name: as_text(value) or "unknown" for name, value in values.items()}


def _differing(
    a: Sequence[dict[str, str]], b: Sequence[dict[str, str]], worth: Callable[[str, set[str], set[str]], bool]
) -> list[Text]:
    """Return `precision fp32 in A, bf16 in B` for each name whose values in A and in B differ and matter."""
    lines = []
    for name in dict.fromkeys(name for described in (*a, *b) for name in described):
        ours, theirs = ({described.get(name, "none") for described in side} for side in (a, b))
        if worth(name, ours, theirs):
            values = (_shortened(field_name(name), 60), some(sorted(ours)), some(sorted(theirs)))
            lines.append(say("{} {} in A, {} in B", "{}：A 为 {}，B 为 {}", *values))
    return lines
