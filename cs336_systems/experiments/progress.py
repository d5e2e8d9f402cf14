"""Progress of a run: a bar with the time left on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any


class Progress:
    def __init__(self, total: int, *, quiet: bool = False):
        self.total = total
        self.quiet = quiet
        self.done = 0
        self.started = self.begun = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        if self.total and not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Bar(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, name: str) -> None:
        self.begun = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, description=name)
        elif not self.quiet:
            print(f"[{self.done + 1}/{self.total}] {name}: started", file=sys.stderr, flush=True)

    def end(self, name: str, headline: str) -> None:
        self.done += 1
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(f"{name}: {headline}", markup=False, highlight=False)
            self.bar.advance(self.task)
            return
        now = time.monotonic()
        took, left = now - self.begun, (now - self.started) / self.done * (self.total - self.done)
        place, times = f"[{self.done}/{self.total}]", f"took {_duration(took)}, {_duration(left)} left"
        print(f"{place} {name}: {headline}  ({times})", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
