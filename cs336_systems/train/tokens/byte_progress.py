"""Progress in bytes of the inputs: a bar with tokens/s and the time left on a terminal, else a line now and then."""

import sys
import time
from typing import Any

LINE_EVERY = 10.0
"""Seconds between lines if there is no terminal."""


class ByteProgress:
    def __init__(self, total: int):
        self.total = total
        self.done = self.tokens = 0
        self._started = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ByteProgress":
        if self.total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip(self, size: int) -> None:
        """Skip a part that was finished earlier."""
        self.total -= size
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def add(self, size: int, tokens: int) -> None:
        """Count a finished part."""
        self.done += size
        self.tokens += tokens
        now = time.monotonic()
        rate = f"{self.tokens / max(now - self._started, 1e-3):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=rate)
        elif now - self._said >= LINE_EVERY:
            self._said = now
            left = (now - self._started) * (self.total - self.done) / self.done
            done = f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
            print(f"tokenizing: {done}, {rate}, {left:.0f} s left", file=sys.stderr, flush=True)
