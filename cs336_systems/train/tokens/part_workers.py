"""Tokenizes parts in several processes; the results come in the order of the parts."""

import errno
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cs336_systems.train.tokens.documents import Reading
from cs336_systems.train.tokens.inputs import Part
from cs336_systems.train.tokens.parts import Counts, PartFiles
from cs336_systems.train.tokens.token_store import dtype_for
from cs336_systems.train.tokens.vocabulary import Vocabulary, one_thread

WAITING_PER_WORKER = 4
"""Parts queued for each worker, so that a long one does not leave the others idle."""


@dataclass(frozen=True)
class Recipe:
    """All settings, besides its bytes, that determine the tokens of a part."""

    tokenizer: bytes
    tokenizer_name: str
    end_token: str
    parses_special: bool
    reading: Reading

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            self.tokenizer, self.tokenizer_name, end_token=self.end_token, parses_special=self.parses_special
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the fields for a worker: a pickled tokenizer loses its handling of special tokens."""
        return Recipe, (self.tokenizer, self.tokenizer_name, self.end_token, self.parses_special, self.reading)

    @property
    def text(self) -> str:
        """Text that is equal only for equal recipes."""
        vocabulary = self.vocabulary
        return repr((vocabulary.hash, vocabulary.end_token, self.parses_special, self.reading))

    def write(self, part: Part, files: PartFiles) -> Counts:
        return files.write(part, self.vocabulary, self.reading, dtype_for(self.vocabulary.size))


def write_parts(
    recipe: Recipe, work: Iterable[tuple[Part, PartFiles]], workers: int
) -> Iterator[tuple[PartFiles, Counts]]:
    """Write parts and yield their counts, in order. The first failing part in this order raises its error."""
    if workers == 1:
        one_thread()
        for part, files in work:
            yield files, recipe.write(part, files)
        return
    context = multiprocessing.get_context("spawn")  # the library has threads, which a fork would not copy
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _prepare, (recipe,)) as pool:
        waiting: deque[tuple[PartFiles, Future[Counts]]] = deque()
        try:
            for part, files in work:
                waiting.append((files, pool.submit(_write, part, files.folder, files.key)))
                if len(waiting) >= workers * WAITING_PER_WORKER:
                    yield _first(waiting)
            while waiting:
                yield _first(waiting)
        except BrokenProcessPool:
            reason = "a worker process was ended, perhaps for lack of memory"
            advice = "the finished parts are kept, and the same command with fewer --workers continues"
            raise OSError(errno.ENOMEM, f"{reason}; {advice}") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:  # a part may take hours
                worker.terminate()
            raise


def _first(waiting: deque[tuple[PartFiles, Future[Counts]]]) -> tuple[PartFiles, Counts]:
    files, future = waiting.popleft()
    return files, future.result()


_recipe: Recipe
"""Set in a worker process."""


def _prepare(recipe: Recipe) -> None:
    """Prepare a worker process, which ends when its parent process ends."""
    global _recipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    one_thread()
    _recipe = recipe


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _write(part: Part, folder: Path, key: str) -> Counts:
    return _recipe.write(part, PartFiles(folder, key))
