"""Shared parts of the tests of packed documents: random packings, and an oracle that loops over documents.

The oracle and the comparison of one document are those of attention_cases.py; nothing here calls the package.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.unit.kernels.attention_cases import (
    NAMES,
    Case,
    Implementation,
    Inputs,
    differentiate,
    errors,
    naive,
    uncancelled,
    visible,
)


@dataclass(frozen=True)
class Packed:
    """Documents of these lengths, the mask inside each, and rows after the last document."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    """None: those of the queries, and no offsets of their own."""
    d: int = 64
    is_causal: bool | str = False
    window: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    heads: int = 2
    kv_heads: int = 2
    after_q: int = 0
    after_k: int = 0

    @property
    def name(self) -> str:
        return f"{len(self.lengths_q)} documents, {self.tokens_q}x{self.tokens_k}, {self}"

    @property
    def keys(self) -> tuple[int, ...]:
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    @property
    def tokens_q(self) -> int:
        return sum(self.lengths_q) + self.after_q

    @property
    def tokens_k(self) -> int:
        return sum(self.keys) + (self.after_q if self.lengths_k is None else self.after_k)

    @property
    def mask(self) -> dict[str, object]:
        return {"is_causal": self.is_causal, "window": self.window, "scale": self.scale}

    def offsets(self, device: str = "cpu") -> dict[str, Tensor]:
        found = {"cu_seqlens_q": offsets_of(self.lengths_q, device)}
        return found if self.lengths_k is None else {**found, "cu_seqlens_k": offsets_of(self.lengths_k, device)}

    def documents(self) -> list[tuple[Case, slice, slice]]:
        """Each document as a case of its own, with its rows."""
        found, row, column = [], 0, 0
        for len_q, len_k in zip(self.lengths_q, self.keys, strict=True):
            heads = {"heads": self.heads, "kv_heads": self.kv_heads}
            case = Case(len_q, len_k, self.d, self.is_causal, self.window, self.scale, 1, **heads)
            found.append((case, slice(row, row + len_q), slice(column, column + len_k)))
            row, column = row + len_q, column + len_k
        return found


def offsets_of(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device=device, dtype=torch.int32)


def random_packed(seed: int, longest: int = 150, head_dims: tuple[int, ...] = (8, 16, 40, 64)) -> Packed:
    """Documents of many kinds: short ones, empty ones, a giant among short ones; any mask, grouped heads."""
    draw = random.Random(seed)
    kind = draw.choice(("short", "mixed", "giant", "edges"))
    count = draw.randint(1, 24 if kind == "short" else 7)

    def length() -> int:
        match kind:
            case "short":
                return draw.randint(0, 9)
            case "edges":
                return draw.choice((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65))
            case _:
                return min(longest, int(draw.lognormvariate(math.log(longest / 5), 1.0)))

    lengths = [length() for _ in range(count)]
    if kind == "giant":
        lengths[draw.randrange(count)] = longest + draw.randint(0, longest)
    other = None
    if draw.random() < 0.4:
        other = tuple(max(0, n + draw.choice((0, 0, -n, -1, 1, draw.randint(-n, longest)))) for n in lengths)
    is_causal: bool | str = draw.choice((False, True, "top-left", "bottom-right"))
    sides = (None, 0, 1, 7, 40)
    window = draw.choice((None, None, (draw.choice(sides), draw.choice(sides))))
    if window is not None and isinstance(is_causal, bool) and other is not None:
        is_causal = draw.choice(("top-left", "bottom-right"))
    kv_heads = draw.choice((1, 2))
    return Packed(
        tuple(lengths),
        other,
        d=draw.choice(head_dims),
        is_causal=is_causal,
        window=window,
        heads=kv_heads * draw.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        after_q=draw.choice((0, 0, 1, 37)),
        after_k=draw.choice((0, 0, 5)),
    )


def make_packed(
    case: Packed, dtype: torch.dtype, *, seed: int = 0, device: str = "cpu", through_lse: bool = False,
    magnitude: float = 1.0,
) -> Inputs:  # fmt: skip
    """Inputs of shape (tokens, heads, d). Rows after the last document are NaN: nothing may depend on them."""
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(tokens: int, heads: int, inside: int, factor: float = magnitude) -> Tensor:
        x = torch.randn(tokens, heads, case.d, generator=generator, device=device) * factor
        x[inside:] = math.nan
        return x.to(dtype)

    in_q, in_k = sum(case.lengths_q), sum(case.keys)
    q = tensor(case.tokens_q, case.heads, in_q)
    k, v = (tensor(case.tokens_k, case.kv_heads, in_k) for _ in range(2))
    dout = tensor(case.tokens_q, case.heads, in_q, 1.0)
    dlse = torch.randn(case.heads, case.tokens_q, generator=generator, device=device)
    dlse[:, in_q:] = 0  # the gradient of -inf
    return Inputs(q, k, v, dout, dlse.to(torch.promote_types(dtype, torch.float32)) if through_lse else None)


def of_document(inputs: Inputs, rows: slice, keys: slice) -> Inputs:
    """One document's inputs, (1, heads, length, d)."""
    q, dout = (x[rows].transpose(0, 1)[None] for x in (inputs.q, inputs.dout))
    k, v = (x[keys].transpose(0, 1)[None] for x in (inputs.k, inputs.v))
    return Inputs(q, k, v, dout, None if inputs.dlse is None else inputs.dlse[None, :, rows])


def looped(case: Packed, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All results by a loop over documents in the inputs' dtype, and each with all terms positive."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    found = {"out": inputs.q, "lse": inputs.q[:, :, 0].T.to(wide), "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    found = {name: torch.zeros_like(x, memory_format=torch.contiguous_format) for name, x in found.items()}
    found["lse"].fill_(-math.inf)
    sizes = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in found.items()}
    for document, rows, keys in case.documents():
        own = of_document(inputs, rows, keys)
        seen = visible(document, str(inputs.q.device))
        scale = document.scale
        parts = differentiate(lambda q, k, v, seen=seen, scale=scale: naive(q, k, v, seen, scale), own)
        uncut, _ = uncancelled(own, seen, document.scale)
        for target, of in ((found, parts), (sizes, uncut)):
            for name in NAMES:
                if name == "lse":
                    target[name][:, rows] = of[name][0].to(target[name].dtype)
                else:
                    target[name][keys if name in ("dk", "dv") else rows] = of[name][0].transpose(0, 1)
    return found, sizes


class Truth(NamedTuple):
    """Results to compare those of an implementation with; it may be reused for several."""

    expected: dict[str, Tensor]
    """In float64."""
    sizes: dict[str, Tensor]
    """With all terms positive."""
    plain: dict[str, Tensor]
    """In the inputs' dtype."""


def truth_of(inputs: Inputs, case: Packed) -> Truth:
    return Truth(*looped(case, inputs.cast(torch.float64)), looped(case, inputs)[0])


def compare_packed(
    found: dict[str, Tensor], inputs: Inputs, case: Packed, truth_for: Truth | None = None
) -> list[str]:  # fmt: skip
    """The errors in `found`, one line each; the limits are those of attention_cases.compare."""
    expected, sizes, plain = truth_for or truth_of(inputs, case)
    wrong = errors(found, expected, plain, sizes, inputs.q.dtype, expected["lse"] == -math.inf)
    return [f"{case.name} {inputs.q.dtype}: {line}" for line in wrong]


def packed_failures(
    implementation: Implementation, case: Packed, dtype: torch.dtype, *, device: str = "cpu", **options: object
) -> list[str]:
    """`implementation`: (q, k, v, *, cu_seqlens_q, cu_seqlens_k, is_causal, window, scale) -> (out, lse)."""
    inputs = make_packed(case, dtype, device=device, **options)  # type: ignore[arg-type]
    found = differentiate(lambda q, k, v: implementation(q, k, v, **case.offsets(device), **case.mask), inputs)
    return compare_packed(found, inputs, case)


PACKED = (
    Packed((5, 3)),
    Packed((1,)),
    Packed((0,), d=16),
    Packed((), d=16, after_q=3),
    Packed((0, 1, 0, 1, 1, 0), is_causal=True, d=16),
    Packed((33, 0, 64, 1, 17), is_causal=True),
    Packed((33, 0, 64, 1, 17, 0, 0), is_causal=True, after_q=40, d=40),
    Packed((130, 3, 2, 5, 1), is_causal=True, heads=4, kv_heads=2),
    Packed((3,) * 40, is_causal=True, d=16, heads=3, kv_heads=1),
    Packed((70, 31), window=(9, 4), d=8),
    Packed((70, 31, 100), is_causal=True, window=(20, None), heads=2, kv_heads=1),
    Packed((20, 0, 40, 7), (31, 5, 0, 90), is_causal="bottom-right", after_k=9),
    Packed((20, 0, 40, 7), (31, 5, 0, 90), is_causal="top-left", after_q=9),
    Packed((40, 90, 7), (66, 30, 7), is_causal="bottom-right", window=(11, 3)),
    Packed((40, 90, 7), (66, 30, 7), is_causal="top-left", window=(None, 3)),
    Packed((33, 65), (64, 1)),
    Packed((33, 65, 2), is_causal=True, scale=-0.5, d=16),
    Packed((33, 5), scale=0.0, d=16),
)


def shortened(case: Packed, heads: int = 1) -> Packed:
    """The case with fewer heads, for the interpreter."""
    group = case.heads // case.kv_heads
    return replace(case, heads=heads * group, kv_heads=heads)
