"""Words of a memory timeline for readers: its title, labels, phases and operators in both languages."""

import re

from cs336_systems.report.cells import CellView
from cs336_systems.report.names import PART_NAMES
from cs336_systems.report.phrases import in_mode
from cs336_systems.report.rows import row_words
from cs336_systems.report.terms import MODE_WORDS, PHASE_NAMES
from cs336_systems.report.timeline_reduction import OTHER
from cs336_systems.text import Text, listed, say
from cs336_systems.timeline import Timeline

_WORDS = {
    **PART_NAMES,
    OTHER: Text(OTHER, "其他"),
    "allocated before the recording": Text("allocated before the recording", "记录开始前已分配"),
    "inside an operator": Text("inside an operator", "算子内部"),
}
_TITLE = re.compile(
    r"(?:(?P<model_factory>[^,:]+:[^,:]+)|(?P<size>[^,:]+)), "
    rf"(?P<mode>{'|'.join(MODE_WORDS)}), (?P<precision>\w+), batch (?P<batch_size>\d+), "
    r"context (?P<context_length>\d+), attention (?P<attention>\w+)(?:, checkpoint (?P<checkpoint_blocks>\d+))?"
)
"""A title that the instrument writes; its groups are fields of a configuration."""


def word_text(word: str) -> Text:
    """Return a label or operator of a block in readers' words."""
    return _WORDS.get(word) or Text(word)


def phase_text(name: str) -> Text:
    return PHASE_NAMES.get(name) or Text(name)


def title_text(timeline: Timeline) -> Text:
    """Return the title in readers' words if an instrument wrote it; a snapshot's title is the name of its file."""
    found = _TITLE.fullmatch(timeline.title)
    if not found:
        return Text(timeline.title)
    fields = {name: value for name, value in found.groupdict().items() if value}
    mode = in_mode(fields.pop("mode"))
    settings = listed(row_words(CellView.of("memory", fields, []), list(fields)), (", ", "，"))
    memory = "内存" if timeline.device == "CPU" else "显存"
    return say("Memory in {}: {}", f"{{}}的{memory}：{{}}", mode, settings)
