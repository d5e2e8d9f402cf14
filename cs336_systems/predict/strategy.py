"""Names of parallel strategies, such as `zero3+tp8+pp4`, and the sizes of their axes. No torch."""

import re
from dataclasses import dataclass, replace
from typing import Any

from cs336_systems.config import UserError

_AXES = {"zero": "stage", "tp": "tensor", "cp": "context", "replicate": "replicate"}


@dataclass(frozen=True)
class Strategy:
    """ZeRO stage (replicas shard: 1 optimizer state, 2 also gradients, 3 also weights) and sizes of the other axes."""

    stage: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    replicate: int = 1
    """Groups of replicas; stage 3 shards within a group (HSDP)."""
    chunks: int = 1
    """Chunks of layers on each pipeline stage: more than one for the interleaved schedule."""
    ring: bool = False
    """True if keys and values are passed round a ring, False if they are gathered."""

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Return the strategy with this name, such as `zero3+tp8`, or title, such as `ZeRO-3 + TP 8`."""
        found: dict[str, Any] = {}
        for part in re.sub(r"[\s-]", "", text.lower()).split("+"):
            if part in ("dp", "ddp", "none"):
                found["stage"] = 0
            elif part == "fsdp":
                found["stage"] = 3
            elif match := re.fullmatch(r"(zero(?=[1-3]$)|tp|cp|replicate)([1-9]\d*)", part):
                found[_AXES[match[1]]] = int(match[2])
            elif match := re.fullmatch(r"ring(?:cp)?([1-9]\d*)", part):
                found |= {"context": int(match[1]), "ring": int(match[1]) > 1}
            elif match := re.fullmatch(r"pp([1-9]\d*)(?:x([1-9]\d*))?", part):
                found |= {"pipeline": int(match[1]), "chunks": int(match[2] or 1)}
            else:
                raise UserError(
                    f"unknown strategy {text!r}; use dp, zero1, zero2, zero3, tp8, pp4, pp4x2 (interleaved), cp4, "
                    f"ring4, replicate2, or a mix such as zero3+tp8"
                )
        strategy = cls(**found)
        if strategy.replicate > 1 and strategy.stage != 3:
            raise UserError(
                f"strategy {text!r}: replicate{strategy.replicate} is for zero3; dp and zero1 replicate all"
            )
        if strategy.chunks > 1 and strategy.pipeline == 1:
            raise UserError(f"strategy {text!r}: chunks need stages, as in pp4x{strategy.chunks}")
        return strategy

    @property
    def group(self) -> int:
        """Number of GPUs that process a sequence together."""
        return self.tensor * self.context * self.pipeline

    def within(self, gpus: int) -> "Strategy":
        """Return this strategy with groups that divide `gpus`, by halving the axes: stages, then context, then tensor
        parallelism."""
        found = self
        while gpus % found.group:
            axis = next(name for name in ("pipeline", "context", "tensor") if getattr(found, name) > 1)
            found = replace(found, **{axis: max(1, getattr(found, axis) // 2)})
        return found

    @property
    def name(self) -> str:
        return self._written(f"zero{self.stage}" if self.stage else "dp", "+", "replicate", "tp", "cp", "ring", "pp")

    @property
    def title(self) -> str:
        """The strategy's name as papers write it."""
        words = ("replicate ", "TP ", "CP ", "ring CP ", "PP ")
        return self._written(f"ZeRO-{self.stage}" if self.stage else "DP", " + ", *words)

    def _written(self, data: str, plus: str, *words: str) -> str:
        replicate, tensor, context, ring, pipeline = words
        stages = f"{self.pipeline}x{self.chunks}" if self.chunks > 1 else str(self.pipeline)
        axes = [
            (self.replicate, f"{replicate}{self.replicate}"),
            (self.tensor, f"{tensor}{self.tensor}"),
            (self.context, f"{ring if self.ring else context}{self.context}"),
            (self.pipeline, f"{pipeline}{stages}"),
        ]
        return plus.join([data, *(text for size, text in axes if size > 1)])
