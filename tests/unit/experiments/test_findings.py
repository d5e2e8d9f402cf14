"""Findings of every experiment: sentences that are true and readable whatever was measured."""

import dataclasses
import random
import re
from collections import Counter
from functools import cache
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import CELL_TIME, Record
from cs336_systems.report.cells import by_experiment, group
from cs336_systems.report.names import IMPLEMENTATIONS
from cs336_systems.report.sections import findings_of
from cs336_systems.text import Text
from tests.golden.report_goldens import some_records
from tests.helpers import records_of_h200
from tests.unit.report.step_cells import OOM, numbers
from tests.unit.report.test_sections import SAMPLES


@cache
def records_by_experiment() -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {name: [*SAMPLES.get(name, ())] for name in catalogue()}
    for record in some_records():
        found[record.experiment].append(record)
    return found


FACTORS = (1.0, 1.0, 1.0, 1.001, 0.985, 1.1, 0.7, 3.0, 0.02, 50.0, 1e-4, 1e4)
"""Multiples of what was recorded: equal, hardly different, and over many magnitudes."""
STATUSES = ("ok", "ok", "ok", OOM, "error: crashed (SIGSEGV)")
FIELDS = {
    "size": ("2560/10240/1/32", "256/1024/6/8", "small"),
    "model_factory": (None, "my_package.model:build_model"),
    "mode": ("inference", "forward", "forward-backward", "train-step"),
    "attention": tuple(IMPLEMENTATIONS),
}
"""Fields of configurations that are replaced, with values that sentences must not show as they are."""

# -- what a sentence must not say -------------------------------------------------------------------------------------

IDENTIFIER = re.compile(
    r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9]*_\w|\d+/\d+/\d+/\d+|\w\.\w+:[A-Za-z]|train-step|forward-backward|aten::"
)
"""snake_case, d_model/d_ff/layers/heads, paths of models, modes, operators."""
SOURCE_LINE = re.compile(r"\b[\w/]+\.py:\d+")
RATIO = re.compile(r"([\d.,]+)(?: \([^()]*\))?(?: to ([\d.,]+)(?: \([^()]*\))?)? times as (?:fast|long)")
UNIT = re.compile(r"\d (ms|us|s|[MG]iB|MB|GB/s|TFLOP/s|tokens/s|times)(?!\w)|\d(%)")
CHINESE_GAP = re.compile(r"[\u4e00-\u9fff，。；：（）] +[\u4e00-\u9fff，。；：（）]|  ")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<!\d)[.](?= )|(?<=\d)[.](?= [A-Za-z])|。", text)


def faults(text: Text) -> list[str]:
    """The faults of a finding, in words."""
    found = []
    for language, said in text._asdict().items():
        if IDENTIFIER.search(SOURCE_LINE.sub("", said)):
            found.append(f"{language}: an identifier")
        if re.search(r"\b(nan|inf|None|N/A)\b|毫秒|\{|\}", said):
            found.append(f"{language}: a value that is none")
        if re.search(r"(?<![\w.])-\d", said):
            found.append(f"{language}: a negative number")
        if max(len({*chain(*UNIT.findall(one))} - {""}) for one in sentences(said)) > 2:
            found.append(f"{language}: numbers of more than two units in a sentence")
    ratios = [float(value.replace(",", "")) for values in RATIO.findall(text.en) for value in values if value]
    if not all(ratio > 1 for ratio in ratios):
        found.append("times as fast, or as long, with a ratio that is not above 1")
    if re.search(r"speeds? up|\d(?:x| times) (?:less|faster|slower)", text.en):
        found.append("a ratio that does not say of what")
    if Counter(numbers(text.en)) != Counter(numbers(text.zh)):
        found.append("other numbers in Chinese")
    if CHINESE_GAP.search(text.zh):
        found.append("a gap in Chinese")
    return found


def require_readable(texts: list[Text]) -> None:
    for text in texts:
        assert faults(text) == [], text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (Text("fp16 speeds up tiny 0.02x.", "fp16 的加速：tiny 0.02 倍。"), "a ratio that does not say of what"),
        (Text("It is 0.50 times as fast.", "速度为 0.50 倍。"), "times as fast, or as long, with a ratio"),
        (Text("It takes 2.0 (a) to 1.00 (b) times as long.", "2.0 到 1.00 倍。"), "times as fast, or as long"),
        (Text("naive hides -4%.", "naive 掩盖 -4%。"), "en: a negative number"),
        (Text("With sdpa_cudnn.", "用 sdpa_cudnn。"), "zh: an identifier"),
        (Text("2560/10240/1/32 is large.", "很大。"), "en: an identifier"),
        (Text("1 ms, 2 GiB, 3%.", "1 ms，2 GiB，3%。"), "en: numbers of more than two units"),
        (Text("It takes nan ms.", "用时 nan ms。"), "zh: a value that is none"),
        (Text("It takes 1 ms.", "用时 2 ms。"), "other numbers in Chinese"),
        (Text("Naive attention.", "朴素 注意力。"), "a gap in Chinese"),
    ],
)
def test_faults_are_found(text, fault):
    assert any(found.startswith(fault) for found in faults(text))


def test_units_are_counted_by_sentence():
    assert faults(Text("2.7B takes 1 ms, 2.0 times as long. It has 3 GiB.", "1 ms，2.0 倍，2.7B。占 3 GiB。")) == []


# -- random records ---------------------------------------------------------------------------------------------------


def disturbed(records: list[Record], seed: int) -> list[Record]:
    """Some cells of the records, with other values, failures and configurations."""
    chance = random.Random(seed)
    cells = group(records)
    kept = chance.sample(cells, chance.choice((1, len(cells), chance.randint(1, len(cells)))))
    factors = chance.choice((FACTORS, FACTORS[:5], (1.0,)))
    found = []
    for cell in kept:
        status = chance.choice(STATUSES)
        names = [name for name in FIELDS if name in cell.config and cell.get("strategies") is None]
        names = [name for name in names if chance.random() < 0.1]
        config = {**cell.config, **{name: chance.choice(FIELDS[name]) for name in names}}
        for one in cell.records:
            samples = one.samples
            if one.metric != CELL_TIME:
                factor = chance.choice(factors)
                samples = tuple(x * factor if isinstance(x, float) and x > 0 else x for x in samples)
            elif status != "ok":
                samples = ()
            own = status if one.metric == CELL_TIME else one.status
            found.append(dataclasses.replace(one, config=config, samples=samples, status=own))
    return found


@pytest.mark.parametrize("experiment", catalogue())
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=828879)  # accelerate: milliseconds, "times" and "within 2%" in one sentence
@example(seed=360)
@example(seed=426)
def test_findings_of_any_values_are_readable(experiment, seed):
    records = records_by_experiment()[experiment]
    if records:
        require_readable(findings_of(catalogue()[experiment], group(disturbed(records, seed))))


def test_findings_of_all_records_are_readable():
    files = ("records", "loss_curves", "other_card/records")
    every = [record for file in files for record in records_of_h200(file)]
    for name, cells in by_experiment(group(every)).items():
        require_readable(findings_of(catalogue()[name], cells))
