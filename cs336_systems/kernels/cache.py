"""A dictionary of bounded size, for results by shape."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dictionary that is cleared when full, so that shapes that change with every call do not fill the memory."""

    LIMIT = 4096

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(key, value)
