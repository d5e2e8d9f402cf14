"""Triton's kernels between the matrix products under Triton's interpreter, on the CPU, in a process of its own.

Each function of `pointwise` runs twice on the same values: by its kernel, and by its formula in PyTorch. Reads a JSON
list of runs (the arguments of `run`) from standard input; prints a JSON list: what was wrong, for each of them.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cs336_systems.kernels.fused import pointwise
from cs336_systems.model import RotaryEmbedding
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.test_fused import FEW, LIMITS, check, lay, make, make_seeds, rotary

Named = dict[str, Tensor | None]
GUARD = 40

EXACT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Allowed difference relative to the norm: one rounding of the lowest precision there is."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The values amid memory that must not count and must stay as it is."""
    memory = torch.full((x.numel() + 2 * GUARD,), math.nan if x.is_floating_point() else 77, dtype=x.dtype)
    return memory[GUARD : GUARD + x.numel()].view(x.shape).copy_(x), memory


def add_norm(rows: int, width: int, delta: bool, out: str, delta_dtype: str | None = None, **given: Any) -> Any:
    dtype = given["dtype"]
    inputs = {"x": random(rows, width, seed=1, dtype=dtype), "gain": random(width, seed=3)}
    if delta:
        inputs["delta"] = random(rows, width, seed=2, dtype=getattr(torch, delta_dtype) if delta_dtype else dtype)

    def call(t: Named) -> Named:
        made = pointwise.add_norm(t["x"], t.get("delta"), t["gain"], 1e-3, getattr(torch, out))
        return dict(zip(("total", "y", "rstd"), made, strict=True))

    return inputs, call, ()


def add_norm_backward(rows: int, width: int, adds: bool, remake: bool, dtype: torch.dtype) -> Any:
    x = random(rows, width, seed=1, dtype=dtype)
    rstd = (x.float().square().mean(-1) + 1e-3).rsqrt()
    inputs = {"x": x, "gain": random(width, seed=3), "grad_y": random(rows, width, seed=4, dtype=dtype)}
    inputs |= {"grad_x": random(rows, width, seed=5, dtype=dtype)} if adds else {}
    with mock.patch.object(pointwise, "_triton", return_value=None):
        inputs["rstd"] = pointwise.add_norm(x, None, inputs["gain"], 1e-3, dtype)[2]
    assert torch.allclose(inputs["rstd"].view(-1), rstd, rtol=1e-5)

    def call(t: Named) -> Named:
        made = pointwise.add_norm_backward(t["grad_y"], t.get("grad_x"), t["x"], t["rstd"], t["gain"], remake=remake)
        return dict(zip(("dx", "dgain"), made, strict=True))

    return inputs, call, ("grad_y",) if remake else ()


def turn(batch: int, rows: int, heads: int, dim: int, dtype: torch.dtype, context: int | None = None) -> Any:
    rotate = RotaryEmbedding(context or rows, dim, 100.0)
    inputs = {"qkv": random(batch, rows, 3, heads, dim, seed=1, dtype=dtype)}

    def call(t: Named) -> Named:
        pointwise.turn_(t["qkv"], rotate.cos, rotate.sin)
        return {}

    return inputs, call, ("qkv",)


def turned_back(
    batch: int, rows: int, heads: int, dim: int, dtype: torch.dtype, context: int | None = None, inside: bool = False
) -> Any:
    """`inside`: the heads are outside of the rows in memory, as attention leaves its gradients."""
    rotate = RotaryEmbedding(context or rows, dim, 100.0)
    shape = (batch, heads, rows, dim) if inside else (batch, rows, heads, dim)
    inputs = {name: random(*shape, seed=number, dtype=dtype) for number, name in enumerate(("dq", "dk", "dv"))}

    def call(t: Named) -> Named:
        given = [x.transpose(1, 2) if inside else x for x in t.values()]
        return {"dqkv": pointwise.turned_back(*given, rotate.cos, rotate.sin)}

    return inputs, call, ()


def swiglu(rows: int, width: int, dtype: torch.dtype) -> Any:
    inputs = {"gate_up": 3 * random(rows, 2 * width, seed=1, dtype=dtype)}
    return inputs, lambda t: {"out": pointwise.swiglu(t["gate_up"])}, ()


def swiglu_backward(rows: int, width: int, dtype: torch.dtype) -> Any:
    inputs = {"gate_up": 3 * random(rows, 2 * width, seed=1, dtype=dtype)}
    inputs["grad"] = random(rows, width, seed=2, dtype=dtype)
    return inputs, lambda t: {"dgate_up": pointwise.swiglu_backward(t["grad"], t["gate_up"])}, ("grad",)


def cross_entropy(
    rows: int, vocabulary: int, dtype: torch.dtype, size: float = 1.0, ignored: int = -100, bad: int | None = None
) -> Any:
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2))
    targets[1::3] = ignored
    if bad is not None:
        targets[-1] = bad
    inputs = {
        "logits": size * random(rows, vocabulary, seed=1, dtype=dtype),
        "targets": targets,
        "weight": torch.tensor(0.3),
    }

    def call(t: Named) -> Named:
        return {"losses": pointwise.cross_entropy_(t["logits"], t["targets"], t["weight"], ignored)}

    return inputs, call, ("logits",)


def adamw(count: int, split: bool, dtype: torch.dtype, grads: str | None = None, does: float = 1.0) -> Any:
    weights = random(count, seed=1)
    inputs: Named = {
        "weights": weights.to(dtype),
        "grads": random(count, seed=2).to(getattr(torch, grads) if grads else dtype),
        "mean": 0.1 * random(count, seed=3),
        "square": 0.1 * random(count, seed=4).square(),
        "scalars": torch.tensor([0.01, 0.7, 0.2, 0.3, does]),
    }
    if split:
        inputs["weights"], inputs["rest"] = (torch.empty(count, dtype=d) for d in (torch.bfloat16, torch.int16))
        pointwise.split_(weights, inputs["weights"], inputs["rest"])

    def call(t: Named) -> Named:
        given = [t["weights"], t.get("rest"), t["grads"], t["mean"], t["square"], t["scalars"]]
        pointwise.adamw_(*given, (0.9, 0.95), 1e-8, 0.1)
        if not split:
            return {}
        masters = pointwise.united(t["weights"], t["rest"])
        assert bool(((masters - t["weights"]).abs() <= (masters - masters.bfloat16()).abs()).all())
        return {"masters": masters}

    changed = ("weights", "rest", "mean", "square") if split else ("weights", "mean", "square")
    return inputs, call, changed if does else ()


def halves(count: int, dtype: torch.dtype) -> Any:
    inputs = {"whole": random(count, seed=1, dtype=dtype)}

    def call(t: Named) -> Named:
        weights, rest = (torch.empty(count, dtype=d) for d in (torch.bfloat16, torch.int16))
        pointwise.split_(t["whole"], weights, rest)
        assert torch.equal(pointwise.united(weights, rest), t["whole"])
        return {"weights": weights, "rest": rest}

    return inputs, call, ()


FUNCTIONS = (add_norm, add_norm_backward, turn, turned_back, swiglu, swiglu_backward, cross_entropy, adamw, halves)


def differences(name: str, found: Tensor | None, expected: Tensor | None, limit: float) -> list[str]:
    if found is None or expected is None:
        return [] if found is expected else [f"{name} is {found} instead of {expected}"]
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return [f"{name} is {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"]
    if not found.is_floating_point():
        return []
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()) or not torch.equal(found.isnan(), expected.isnan()):
        return [f"{name} is finite where the formula is not, or the other way round"]
    finite = expected.isfinite()
    error, size = (found - expected)[finite].norm().item(), expected[finite].norm().item()
    return [] if error <= limit * size + 1e-9 else [f"{name} is off by {error:.2e} of {size:.2e}"]


def by_kernel_and_formula(function: Callable[..., Any], dtype: torch.dtype, **options: Any) -> list[str]:
    inputs, call, changed = function(dtype=dtype, **options)
    results, wrong = [], []
    for by_kernel in (True, False):
        placed = {name: guarded(x) for name, x in inputs.items()}
        before = {name: memory.clone() for name, (_, memory) in placed.items()}
        given = {name: x for name, (x, _) in placed.items()}
        with poisoned_memory():
            if by_kernel:
                assert pointwise._triton(torch.zeros(1)) is not None
                made = call(given)
            else:
                with mock.patch.object(pointwise, "_triton", return_value=None):
                    made = call(given)
        results.append(made | {name: given[name] for name in changed})
        for name, (_, memory) in placed.items():
            place = slice(GUARD, memory.numel() - GUARD)
            if name in changed:
                memory[place] = before[name][place]
            if not torch.equal(memory.nan_to_num(7), before[name].nan_to_num(7)):
                wrong.append(f"{name} has changed by the {'kernel' if by_kernel else 'formula'}")
    found, expected = results
    limit = EXACT[torch.float32 if function is adamw else dtype]
    for name, x in expected.items():
        low = torch.bfloat16 if x is not None and x.dtype == torch.bfloat16 else torch.float32
        wrong += differences(name, found[name], x, max(limit, EXACT[low]))
    return wrong


def part(name: str, dtype: torch.dtype, layout: str, gain: str = "contiguous") -> list[str]:
    """A fused part by its kernels; its tensors lie in memory as `layout` and, of the gain, `gain` say."""
    tested = FEW[name]
    if name == "rotary_heads":  # turned in place, it cannot be broadcast; its gradients can
        tested = rotary(2, 5, 3, 8, layout="contiguous" if layout == "broadcast" else layout)
        inputs = make(tested, dtype)
    else:
        inputs = {key: lay(x, gain if key == "gain" else layout) for key, x in make(tested, dtype).items()}
    seeds = [lay(x, layout) if x.dim() else x for x in make_seeds(tested, inputs, dtype)]
    try:
        check(tested, dtype, inputs=inputs, seeds=seeds, limit=LIMITS.get(dtype, 5e-3))
    except AssertionError as error:
        return str(error).splitlines()
    return []


def run(name: str, dtype: str, **options: Any) -> list[str]:
    functions = {function.__name__: function for function in FUNCTIONS}
    try:
        if name in functions:
            wrong = by_kernel_and_formula(functions[name], getattr(torch, dtype), **options)
        else:
            wrong = part(name.removeprefix("fused."), dtype=getattr(torch, dtype), **options)
    except Exception:
        wrong = [traceback.format_exc()]
    return [f"{name} {dtype} {options}: {line}" for line in wrong]


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps([run(**arguments) for arguments in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
