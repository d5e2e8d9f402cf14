"""What need not be worked out again for the next call of the same kind."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """Begins anew when it is full: shapes that change with every call must not fill the memory."""

    LIMIT = 4096

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(key, value)
