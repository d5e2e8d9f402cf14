"""Memory over time: every block of a step with its label, size and lifetime. Instruments write it, the report draws it.

A file holds one Timeline as gzipped JSON by column: a step has ten thousand blocks, a long trace a million.
"""

import dataclasses
import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.config import UserError
from cs336_systems.files import (
    MOST_ITEMS,
    decompressed,
    foreign,
    is_number,
    read_input,
    require_at_most,
    shown,
    write_file,
)

FORMAT = "cs336 memory timeline"
VERSION = 1
TIMELINE_FILE = "timeline.json.gz"
LARGEST_TIMELINE = 64 << 20
"""Maximum bytes of a file, compressed and decompressed: a million blocks have 40 MB. As values of Python they take ten
times that."""
_WORDS = ("label", "module", "what", "line")
"""Columns of text, stored as indices into a list of words."""


@dataclass(frozen=True)
class Block:
    """One allocation. Times are seconds since the start of the step; earlier allocations start at 0."""

    label: str
    """Kind of the memory: parameters, gradients, optimizer state, activations, ..."""
    size: int
    start: float
    end: float | None
    """Time of the deallocation; None: still allocated at the end of the step."""
    module: str = ""
    """The module that allocated it: layers.3.attn."""
    what: str = ""
    """The operator that allocated it, with shape and dtype."""
    line: str = ""
    """The source line that allocated it: model.py:102 in forward."""


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    end: float


class Peak(NamedTuple):
    time: float
    size: int


@dataclass(frozen=True)
class Timeline:
    title: str
    device: str
    blocks: list[Block]
    phases: list[Span] = field(default_factory=list)

    @property
    def end(self) -> float:
        times = [span.end for span in self.phases] + [t for b in self.blocks for t in (b.start, b.end or 0.0)]
        return max(times, default=0.0)

    def alive_at(self, time: float) -> list[Block]:
        return [b for b in self.blocks if b.start <= time and (b.end is None or time < b.end)]

    def peak(self) -> Peak:
        """Return the first moment at which the allocated bytes are at their maximum."""
        events = [(block.start, block.size) for block in self.blocks]
        events += [(block.end, -block.size) for block in self.blocks if block.end is not None]
        now = most = 0
        when = 0.0
        for time, change in sorted(events, key=lambda event: (event[0], event[1] > 0)):
            now += change
            if now > most:
                most, when = now, time
        return Peak(when, most)

    def parts_at(self, time: float) -> dict[str, int]:
        """Return the allocated bytes by label, the largest first."""
        total: Counter[str] = Counter()
        for block in self.alive_at(time):
            total[block.label] += block.size
        return dict(total.most_common())

    def save(self, path: Path) -> None:
        columns: dict[str, Any] = {
            spec.name: [getattr(block, spec.name) for block in self.blocks] for spec in dataclasses.fields(Block)
        }
        words = sorted({word for name in _WORDS for word in columns[name]})
        indices = {word: index for index, word in enumerate(words)}
        for name in _WORDS:
            columns[name] = [indices[word] for word in columns[name]]
        document = {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "device": self.device,
            "phases": [dataclasses.astuple(span) for span in self.phases],
            "words": words,
            "blocks": columns,
        }
        # mtime=0: the same timeline gives the same bytes.
        write_file(path, gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> "Timeline":
        """Read a file written by `save`; raise UserError for any other."""
        with foreign(path, "a memory timeline"):
            data = read_input(path, LARGEST_TIMELINE)
            if not data.startswith(b"\x1f\x8b"):
                raise ValueError("it is not gzipped")
            document = json.loads(b"".join(decompressed(data, LARGEST_TIMELINE)))
            if document["format"] != FORMAT:
                raise ValueError("unknown format")
            if document["version"] > VERSION:
                raise UserError(f"{str(path)!r} is of version {document['version']}, newer than this cs336: upgrade it")
            words, columns = document["words"], document["blocks"]
            require_at_most(len(columns["size"]), MOST_ITEMS, "blocks")
            for name in _WORDS:
                columns[name] = [words[index] for index in columns[name]]
            rows = zip(*(columns[spec.name] for spec in dataclasses.fields(Block)), strict=True)
            found = cls(
                document["title"],
                document["device"],
                [Block(*row) for row in rows],
                [Span(*row) for row in document["phases"]],
            )
            found.check()
            return found

    def check(self) -> None:
        """Raise ValueError for values that cannot be drawn, because a file may hold any."""
        texts = [self.title, self.device, *(span.name for span in self.phases)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its title, device and phases are not all texts")
        for span in self.phases:
            if not (is_number(span.start, 0) and is_number(span.end, span.start)):
                raise ValueError(f"the phase {span.name[:40]!r} lasts from {shown(span.start)} to {shown(span.end)}")
        for block in self.blocks:
            if not (is_number(block.start, 0) and (block.end is None or is_number(block.end, block.start))):
                raise ValueError(f"a block is allocated from {shown(block.start)} to {shown(block.end)}")
            if not (isinstance(block.size, int) and is_number(block.size, 0)):
                raise ValueError(f"a block has a size of {shown(block.size)}")
            if not all(isinstance(text, str) for text in (block.label, block.module, block.what, block.line)):
                raise ValueError("the words of a block are not all texts")
