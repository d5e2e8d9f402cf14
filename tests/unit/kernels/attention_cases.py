"""Shared parts of the attention tests: named cases, a float64 oracle written from the definition, and the comparison.

Nothing here calls the package: an implementation is any function (q, k, v, *, is_causal, window, scale) -> (out, lse),
with None for the logsumexp where it has none.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

Implementation = Callable[..., tuple[Tensor, Tensor | None]]

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    len_q: int
    len_k: int
    d: int = 64
    is_causal: bool | str = False
    window: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2

    @property
    def name(self) -> str:
        parts = [f"{self.batch}x{self.heads}"] + [f"kv{self.kv_heads}"] * (self.heads != self.kv_heads)
        parts += [f"{self.len_q}x{self.len_k}", f"d{self.d}"]
        parts += [{True: "causal"}.get(self.is_causal, str(self.is_causal))] * bool(self.is_causal)
        window = self.window if isinstance(self.window, tuple) else (self.window,)
        parts += ["w" + "_".join("any" if side is None else str(side) for side in window)] * (self.window is not None)
        return "-".join(parts + [f"scale{self.scale}"] * (self.scale is not None))

    @property
    def mask(self) -> dict[str, object]:
        return {"is_causal": self.is_causal, "window": self.window, "scale": self.scale}


def named(*cases: Case) -> dict[str, Case]:
    table = {case.name: case for case in cases}
    assert len(table) == len(cases), "two cases have the same name"
    return table


CASES = named(
    # Lengths around, at and off the tile sizes.
    Case(1, 1),
    Case(1, 1, is_causal=True),
    Case(17, 17),
    Case(17, 17, is_causal=True, batch=3),
    Case(63, 63, is_causal=True),
    Case(113, 113),
    Case(128, 128),
    Case(128, 128, is_causal=True, batch=2),
    Case(203, 203, is_causal=True),
    Case(257, 257),
    Case(257, 257, is_causal=True),
    # Unequal lengths; bottom-right with more queries than keys leaves the first rows without a key.
    Case(64, 128),
    Case(64, 128, is_causal="top-left"),
    Case(128, 192, is_causal="bottom-right"),
    Case(239, 1),
    Case(239, 1, is_causal=True),
    Case(239, 1, is_causal="bottom-right"),
    Case(113, 203),
    Case(113, 203, is_causal="bottom-right", batch=2),
    Case(203, 113, is_causal="top-left"),
    Case(203, 113, is_causal="bottom-right"),
    Case(108, 256, is_causal="bottom-right"),
    Case(1, 257),
    Case(1, 257, is_causal=True),
    Case(1, 257, is_causal="bottom-right"),
    # Head dimensions: powers of two or not, below the 16 a tensor core takes, and the largest.
    Case(17, 17, d=1),
    Case(63, 63, d=8, is_causal=True),
    Case(113, 203, d=8),
    Case(113, 113, d=40, is_causal=True),
    Case(64, 128, d=40),
    Case(128, 128, d=80),
    Case(203, 113, d=80, is_causal="bottom-right"),
    Case(113, 113, d=96, is_causal=True),
    Case(128, 128, d=128, is_causal=True),
    Case(257, 257, d=128),
    Case(113, 203, d=128, is_causal="bottom-right"),
    Case(63, 63, d=256, is_causal=True),
    Case(40, 97, d=200, is_causal="bottom-right"),
    # Windows: empty, narrow, one-sided, together with causal, wider than the sequence.
    Case(113, 113, window=0),
    Case(128, 128, window=16, batch=2),
    Case(203, 203, window=(32, 0)),
    Case(257, 257, window=(None, 8)),
    Case(257, 257, window=(40, None)),
    Case(63, 63, window=(None, None)),
    Case(128, 128, is_causal=True, window=500),
    Case(203, 203, is_causal=True, window=(64, 5)),
    Case(257, 257, d=128, is_causal=True, window=(50, 0)),
    Case(113, 203, is_causal="bottom-right", window=(20, 10)),
    Case(64, 128, is_causal="top-left", window=(None, 3)),
    # ... and some that leave rows without any key: at the end, at the beginning, all but a few.
    Case(203, 113, is_causal="top-left", window=(10, 0)),
    Case(203, 113, is_causal="bottom-right", window=4),
    Case(239, 1, is_causal="top-left", window=(5, None)),
    # Grouped query.
    Case(113, 113, is_causal=True, heads=4, kv_heads=2, batch=2),
    Case(128, 128, heads=4, kv_heads=1),
    Case(113, 203, d=128, is_causal="bottom-right", heads=4, kv_heads=2),
    Case(63, 63, is_causal=True, window=(9, None), heads=4, kv_heads=1),
    # Scales. With a negative one the largest raw score is the smallest logit; with 0 every key weighs the same.
    Case(113, 113, is_causal=True, scale=-0.5),
    Case(203, 113, is_causal="bottom-right", window=(30, None), scale=-0.25),
    Case(63, 63, scale=0.0),
    Case(63, 63, is_causal=True, scale=0.0),
    Case(128, 128, d=40, scale=1.5),
)

LONG = named(
    # For Triton's interpreter, which takes seconds a case: cases whose lengths are not cut. The longest, and those in
    # which it matters whether there are more queries or more keys.
    Case(161, 161, d=8, heads=1, kv_heads=1),
    Case(113, 203, d=40, is_causal="bottom-right", heads=1, kv_heads=1),
    Case(203, 113, d=64, is_causal="bottom-right", window=(4, None), heads=1, kv_heads=1),
    Case(64, 128, d=8, is_causal="top-left", heads=2, kv_heads=1),
    Case(1, 257, d=64, is_causal="bottom-right"),
    Case(239, 1, d=8, is_causal="top-left", window=(5, None), heads=1, kv_heads=1),
)


def visible(case: Case, device: str = "cpu") -> Tensor:
    """(len_q, len_k), True where the query may look at the key."""
    position = torch.arange(case.len_q, device=device)[:, None]
    key = torch.arange(case.len_k, device=device)[None, :]
    if case.is_causal == "bottom-right":
        position = position + case.len_k - case.len_q
    seen = torch.ones(case.len_q, case.len_k, dtype=torch.bool, device=device)
    if case.is_causal:
        seen &= key <= position
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention by its definition: matmuls in the inputs' dtype, the softmax in fp32 (float64 for float64).

    In float64 this is the oracle; in a low precision it measures the error of plain PyTorch.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = ((q * scale) @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    blind = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(blind[:, None], 0)  # No -inf minus -inf in the backward
    weights = torch.softmax(scores, -1).masked_fill(blind[:, None], 0)
    return weights.to(v.dtype) @ v, torch.logsumexp(scores, -1).masked_fill(blind, -math.inf)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    # The same values at other strides. What lies between them is NaN: reading it shows.
    "contiguous": lambda x: x,
    "heads_inside": lambda x: torch.full_like(x.transpose(1, 2).contiguous(), math.nan).transpose(1, 2).copy_(x),
    "packed": lambda x: (
        x.new_full((x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]), math.nan).select(2, 1).transpose(1, 2).copy_(x)
    ),
    "transposed": lambda x: torch.full_like(x.mT.contiguous(), math.nan).mT.copy_(x),
    "padded_rows": lambda x: x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)[..., :-3].copy_(x),
    "unaligned": lambda x: x.new_full((x.numel() + 1,), math.nan)[1:].view(x.shape).copy_(x),
    "every_other": lambda x: x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)[..., ::2].copy_(x),
    "broadcast": lambda x: x[:1, :1].expand(x.shape),
}


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    """None where only the output has a gradient, as in most models."""

    def cast(self, dtype: torch.dtype) -> "Inputs":
        dlse = None if self.dlse is None else self.dlse.to(torch.promote_types(dtype, torch.float32))
        return Inputs(*(x.to(dtype) for x in (self.q, self.k, self.v, self.dout)), dlse)


def make_inputs(
    case: Case,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: str = "cpu",
    magnitude: float = 1.0,
    through_lse: bool = False,
    layout: str = "contiguous",
    dout_layout: str = "contiguous",
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    q = random(case.batch, case.heads, case.len_q, case.d) * magnitude
    k, v = (random(case.batch, case.kv_heads, case.len_k, case.d) * magnitude for _ in range(2))
    dout, dlse = random(*q.shape), random(*q.shape[:-1]).to(torch.promote_types(dtype, torch.float32))
    q, k, v = (LAYOUTS[layout](x.to(dtype)) for x in (q, k, v))
    return Inputs(q, k, v, LAYOUTS[dout_layout](dout.to(dtype)), dlse if through_lse else None)


def differentiate(function: Implementation, inputs: Inputs) -> dict[str, Tensor]:
    """Output, logsumexp and the three gradients of `function` for q, k, v, by `NAMES`."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    assert [x.stride() for x in leaves] == [x.stride() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = function(*leaves)
    roots, seeds = ([out], [inputs.dout]) if inputs.dlse is None else ([out, lse], [inputs.dout, inputs.dlse])
    gradients = torch.autograd.grad(roots, leaves, seeds)
    found = dict(zip(NAMES, (out, lse, *gradients), strict=True))
    return {name: x.detach() for name, x in found.items() if x is not None}


def uncancelled(inputs: Inputs, seen: Tensor, scale: float | None) -> tuple[dict[str, Tensor], float]:
    """Each result with all its terms positive, and the largest such score: rounding errors are proportional to these.

    They are not proportional to results whose terms cancel: with one visible key the gradient of q is 0, not its error.
    """
    x = inputs.cast(torch.float64)
    scale = 1 / math.sqrt(x.q.shape[-1]) if scale is None else scale
    groups = x.q.shape[1] // x.k.shape[1]
    k, v = (y.repeat_interleave(groups, dim=1) for y in (x.k, x.v))
    _, lse = naive(x.q, k, v, seen, scale)
    weights = (scale * x.q @ k.mT - lse[..., None]).exp().masked_fill(~seen, 0)
    scale, q, k, v, dout = abs(scale), x.q.abs(), k.abs(), v.abs(), x.dout.abs()
    scores, dweights = scale * q @ k.mT, dout @ v.mT
    dscores = dweights + (weights * dweights).sum(-1, keepdim=True)
    dscores = weights * (dscores if x.dlse is None else dscores + x.dlse.abs()[..., None])
    largest = scores.max().item() if scores.numel() else 0.0
    sizes = {"out": weights @ v, "lse": torch.full_like(lse, 1 + largest), "dq": scale * dscores @ k}
    per_head = {"dk": scale * dscores.mT @ q, "dv": weights.mT @ dout}
    sizes |= {name: y.unflatten(1, (-1, groups)).sum(2) for name, y in per_head.items()}
    return sizes, largest


EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Allowed error relative to the norm, for dtypes whose error is not compared with that of plain PyTorch."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def flash_limit(name: str, plain: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """FlashAttention's rule: twice (gradients: three times) the error of plain PyTorch, and twice a rounding at 0.3."""
    rounded = ((expected.to(dtype).float() + 0.3).to(dtype).float() - 0.3).to(dtype)  # As a GPU does; a CPU rounds 0.3
    plain_error = (plain.double() - expected).abs().max().item()
    return (3 if name.startswith("d") else 2) * plain_error + 2 * (rounded.double() - expected).abs().max().item()


class Truth(NamedTuple):
    """Results to compare those of an implementation with, by `NAMES`; it may be reused for several."""

    expected: dict[str, Tensor]
    """In float64."""
    plain: dict[str, Tensor]
    """In the inputs' dtype."""
    sizes: dict[str, Tensor]
    """With all terms positive."""
    blind: Tensor
    """Queries without keys."""
    largest_score: float


def truth_of(inputs: Inputs, case: Case) -> Truth:
    seen = visible(case, str(inputs.q.device))
    expected = differentiate(lambda q, k, v: naive(q, k, v, seen, case.scale), inputs.cast(torch.float64))
    plain = differentiate(lambda q, k, v: naive(q, k, v, seen, case.scale), inputs)
    sizes, largest_score = uncancelled(inputs, seen, case.scale)
    return Truth(expected, plain, sizes, ~seen.any(-1).expand(expected["lse"].shape), largest_score)


@functools.lru_cache(maxsize=2)  # tests of one implementation after the other have the same inputs
def truth_on_a_cpu(case: Case, dtype: torch.dtype, with_mkldnn: bool, **inputs_options: object) -> Truth:
    assert torch.backends.mkldnn.enabled == with_mkldnn  # it rounds in other places
    return truth_of(make_inputs(case, dtype, **inputs_options), case)  # type: ignore[arg-type]


def compare(
    found: dict[str, Tensor], inputs: Inputs, case: Case, truth: Truth | None = None, *, large: bool = False
) -> list[str]:
    """The errors in `found`, one line each.

    fp32 and float64 are judged by `EXACT`, lower precisions by FlashAttention's rule. With `large` inputs rounding
    alone breaks both (a logit of 1000 in fp32 is exact to 6e-5, and so is its weight): its bound is then allowed, too.
    """
    expected, plain, sizes, blind, largest_score = truth or truth_of(inputs, case)
    dtype = inputs.q.dtype
    wrong = errors(found, expected, plain, sizes, dtype, blind, largest_score if large else None)
    return [f"{case.name} {dtype}: {line}" for line in wrong]


def errors(
    found: dict[str, Tensor], expected: dict[str, Tensor], plain: dict[str, Tensor], sizes: dict[str, Tensor],
    dtype: torch.dtype, blind: Tensor, largest_score: float | None = None,
) -> list[str]:  # fmt: skip
    """The errors in `found` by the limits of `compare`. `expected` is in float64, `plain` in `dtype`, `sizes` has all
    terms positive; `blind`: queries without keys; `largest_score`: of large inputs."""
    unit = torch.finfo(dtype).eps / 2
    wrong = []
    for name, x in found.items():
        truth, low, size = expected[name], plain[name], sizes[name]
        if (x.shape, x.dtype) != (low.shape, low.dtype):
            wrong.append(f"{name} is {tuple(x.shape)} {x.dtype} instead of {tuple(low.shape)} {low.dtype}")
            continue
        if name == "lse":  # -inf where, and only where, there is no key
            if not bool((x[blind] == -math.inf).all()):
                wrong.append("lse of a row without keys is not -inf")
            x, truth, low, size = x[~blind], truth[~blind], low[~blind], size[~blind]
        if not x.numel():
            continue
        if not bool(x.isfinite().all()):
            wrong.append(f"{name} has {int((~x.isfinite()).sum())} of {x.numel()} values not finite")
            continue
        difference = x.double() - truth
        if dtype in EXACT and largest_score is None:
            error, limit = difference.norm().item(), max(EXACT[dtype] * truth.norm().item(), unit * size.norm().item())
        else:
            error, limit = difference.abs().max().item(), flash_limit(name, low, truth, dtype)
            if largest_score is not None:
                limit += (unit + 6e-8 * largest_score) * size.max().item()
        if not error <= limit:
            wrong.append(f"{name} is off by {error:.2e}; allowed {limit:.2e}")
    return wrong


def failures(
    implementation: Implementation, case: Case, dtype: torch.dtype, *, large: bool = False, **inputs_options: object
) -> list[str]:
    inputs = make_inputs(case, dtype, **inputs_options)  # type: ignore[arg-type]
    found = differentiate(lambda q, k, v: implementation(q, k, v, **case.mask), inputs)
    is_known = "device" not in inputs_options
    truth = truth_on_a_cpu(case, dtype, torch.backends.mkldnn.enabled, **inputs_options) if is_known else None
    return compare(found, inputs, case, truth, large=large)


def check(implementation: Implementation, case: Case, dtype: torch.dtype, **options: object) -> None:
    wrong = failures(implementation, case, dtype, **options)  # type: ignore[arg-type]
    assert not wrong, "\n".join(wrong)


def check_autocast(function: Callable[..., Tensor], case: Case, device: str = "cpu") -> None:
    """fp32 inputs under autocast to bf16: the output is bf16, the gradients fp32, both as exact as bf16 inputs give."""
    inputs = make_inputs(case, torch.float32, device=device)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast(device, torch.bfloat16):
        out = function(*leaves)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, leaves, inputs.dout.bfloat16())
    assert [x.dtype for x in gradients] == [torch.float32] * 3
    found = {"out": out.detach(), **{f"d{name}": x.bfloat16() for name, x in zip("qkv", gradients, strict=True)}}
    wrong = compare(found, inputs.cast(torch.bfloat16), case)
    assert not wrong, "\n".join(wrong)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that an unwritten element shows. Fresh memory is often zero, which hides it."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*args: object, **kwargs: object) -> Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return poison

    owners = {torch: ("empty", "empty_like", "empty_strided"), Tensor: ("new_empty", "new_empty_strided")}
    patches = [
        mock.patch.object(owner, name, poisoned(getattr(owner, name)))
        for owner, names in owners.items()
        for name in names
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
