"""`Arrangement`: one way to train on several ranks, as records, grids, the instrument and the tables name it."""

from dataclasses import dataclass
from typing import Literal

from cs336_systems.config import UserError

Wrapper = Literal["none", "naive", "flat", "overlapped", "bucketed", "fsdp"]
Part = Literal["parameter", "gradient", "optimizer"]
PARTS: tuple[Part, ...] = ("parameter", "gradient", "optimizer")
"""Parts of the training state whose memory is measured."""


@dataclass(frozen=True)
class Arrangement:
    """A wrapper and an optimizer, from this package or from torch."""

    wrapper: Wrapper = "none"
    optimizer: Literal["AdamW", "sharded"] = "AdamW"
    bucket_size_mb: float | None = None
    """Size of a bucket in MiB (`bucketed` only); None: the default size."""
    library: Literal["ours", "torch"] = "ours"
    """The origin of the sharded optimizer where there is one, otherwise of the wrapper."""

    @property
    def name(self) -> str:
        """The variant's name in records, and the row's in tables."""
        if self.bucket_size_mb is not None:
            return f"{_BUCKETED}{self.bucket_size_mb:g}"
        return _NAMES[self]

    @classmethod
    def named(cls, name: str) -> "Arrangement":
        """The arrangement that a record or a configuration names."""
        try:
            if name.startswith(_BUCKETED):
                return cls("bucketed", bucket_size_mb=float(name.removeprefix(_BUCKETED)))
            return _BY_NAME[name]
        except (KeyError, ValueError):
            known = ", ".join([*_BY_NAME, f"{_BUCKETED}25"])
            raise UserError(f"unknown arrangement {name!r}; choose from: {known}") from None

    @property
    def sharded_parts(self) -> tuple[Part, ...]:
        """Parts of the training state that are divided by the number of ranks."""
        if self.wrapper == "fsdp":
            return PARTS
        return ("optimizer",) if self.optimizer == "sharded" else ()


NONE = Arrangement()
DDP = Arrangement("bucketed")
TORCH_DDP = Arrangement("bucketed", library="torch")
SHARDED = Arrangement("bucketed", "sharded")
TORCH_ZERO = Arrangement("bucketed", "sharded", library="torch")
FSDP = Arrangement("fsdp")
TORCH_FSDP = Arrangement("fsdp", library="torch")

_BUCKETED = "bucketed "
_NAMES = {
    NONE: "none",
    Arrangement("naive"): "naive",
    Arrangement("flat"): "flat",
    Arrangement("overlapped"): "overlap",
    DDP: "ddp",
    TORCH_DDP: "torch DDP",
    SHARDED: "sharded",
    TORCH_ZERO: "torch ZeRO",
    FSDP: "fsdp",
    TORCH_FSDP: "torch fully_shard",
}
_BY_NAME = {name: arrangement for arrangement, name in _NAMES.items()}
