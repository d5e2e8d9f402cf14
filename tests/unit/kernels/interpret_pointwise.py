"""Runs the pointwise Triton kernels under Triton's interpreter, on the CPU, in a process of its own.

Each function of `pointwise` runs twice on the same values: as its kernel and as its formula in PyTorch. Reads a JSON
list of cases (arguments of `run`) from standard input; prints a JSON list: for each case the lines that say what is
wrong.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cs336_systems.kernels.fused import fp8, pointwise, pointwise_triton
from cs336_systems.model import RotaryEmbedding
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.fast_interpreter import speed_up
from tests.unit.kernels.fused_cases import LIMITS, check, laid

Named = dict[str, Tensor | None]
GUARD = 40
"""Elements around every input that must neither be read nor written."""
EXACT = {torch.float64: 0.0, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, fp8.E4M3: 5e-3}
"""Allowed difference relative to the norm: one rounding of the lowest precision in use. e4m3 rounds by up to 6%, but
rounds another way only where fp32 does."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case(NamedTuple):
    inputs: Named
    call: Callable[[Named], Named]
    changed: tuple[str, ...] = ()
    """Inputs that the call overwrites."""


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The values inside a larger buffer, and that buffer."""
    memory = torch.full((x.numel() + 2 * GUARD,), math.nan if x.is_floating_point() else 77, dtype=x.dtype)
    return memory[GUARD : GUARD + x.numel()].view(x.shape).copy_(x), memory


def add_norm(rows: int, width: int, delta: bool, out: str, dtype: torch.dtype, delta_dtype: str | None = None) -> Case:
    inputs: Named = {"x": random(rows, width, seed=1, dtype=dtype), "gain": random(width, seed=3)}
    if delta:
        inputs["delta"] = random(rows, width, seed=2, dtype=getattr(torch, delta_dtype) if delta_dtype else dtype)

    def call(t: Named) -> Named:
        return pointwise.add_norm(t["x"], t.get("delta"), t["gain"], 1e-3, getattr(torch, out))._asdict()

    return Case(inputs, call)


def add_norm_backward(
    rows: int, width: int, has_grad_x: bool, recompute_y: bool, dtype: torch.dtype, programs: int = 264
) -> Case:
    x = random(rows, width, seed=1, dtype=dtype)
    inputs: Named = {"x": x, "gain": random(width, seed=3), "grad_y": random(rows, width, seed=4, dtype=dtype)}
    inputs |= {"grad_x": random(rows, width, seed=5, dtype=dtype)} if has_grad_x else {}
    inputs["rstd"] = (x.float().square().mean(-1) + 1e-3).rsqrt()

    def call(t: Named) -> Named:
        given = (t["grad_y"], t.get("grad_x"), t["x"], t["rstd"], t["gain"])
        with mock.patch.object(pointwise_triton, "NORM_PROGRAMS", programs):
            return pointwise.add_norm_backward(*given, recompute_y=recompute_y)._asdict()

    return Case(inputs, call, ("grad_y",) if recompute_y else ())


class Heads(NamedTuple):
    """Shape of q, k and v; `context`: rows of the rotary table, where it has more than the tensors."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    context: int
    halves: bool = False
    """Pairs of dimensions are (i, i + dim / 2), and each batch item has its own angles."""

    def table(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin; with `halves` as transformers passes them."""
        if not self.halves:
            table = RotaryEmbedding(self.context, self.dim, 100.0)
            return table.cos, table.sin
        angles = random(self.batch, self.rows, self.dim // 2, seed=8).repeat(1, 1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def qkv(self, dtype: torch.dtype) -> Tensor:
        return random(self.batch, self.rows, self.heads + 2 * self.kv_heads, self.dim, seed=1, dtype=dtype)

    def gradients(self, dtype: torch.dtype, heads_first: bool) -> Named:
        """Return gradients of q, k and v; `heads_first`: (batch, heads, rows, dim) in memory, as attention has them."""
        found: Named = {}
        for number, (name, heads) in enumerate((("dq", self.heads), ("dk", self.kv_heads), ("dv", self.kv_heads))):
            middle = (heads, self.rows) if heads_first else (self.rows, heads)
            found[name] = random(self.batch, *middle, self.dim, seed=number, dtype=dtype)
        return found


def heads_of(
    batch: int, rows: int, heads: int, dim: int, kv_heads: int = 0, context: int = 0, halves: bool = False
) -> Heads:
    return Heads(batch, rows, heads, kv_heads or heads, dim, context or rows, halves)


def rotate(dtype: torch.dtype, **shape: int) -> Case:
    heads = heads_of(**shape)
    table = heads.table(dtype)

    def call(t: Named) -> Named:
        pointwise.rotate_(t["qkv"], *table, heads.heads, heads.halves)
        return {}

    return Case({"qkv": heads.qkv(dtype)}, call, ("qkv",))


def rotate_backward(heads_first: bool, dtype: torch.dtype, **shape: int) -> Case:
    heads = heads_of(**shape)
    table = heads.table(dtype)

    def call(t: Named) -> Named:
        given = [x.transpose(1, 2) if heads_first else x for x in t.values()]
        return {"dqkv": pointwise.rotate_backward(*given, *table, heads.halves)}

    return Case(heads.gradients(dtype, heads_first), call)


def norm_rotate(dtype: torch.dtype, **shape: int) -> Case:
    heads = heads_of(**shape)
    table = heads.table(dtype)
    inputs: Named = {"qkv": heads.qkv(dtype), "q_gain": random(heads.dim, seed=6), "k_gain": random(heads.dim, seed=7)}

    def call(t: Named) -> Named:
        given = (t["qkv"], t["q_gain"], t["k_gain"], 1e-3, *table, heads.heads, heads.halves)
        return {"qk": pointwise.norm_rotate(*given)}

    return Case(inputs, call)


def norm_rotate_backward(heads_first: bool, dtype: torch.dtype, programs: int = 264, **shape: int) -> Case:
    heads = heads_of(**shape)
    table, gradients = heads.table(dtype), heads.gradients(dtype, heads_first)
    inputs = norm_rotate(dtype, **shape).inputs | gradients

    def call(t: Named) -> Named:
        given = [t[name].transpose(1, 2) if heads_first else t[name] for name in gradients]
        given += [t["qkv"], t["q_gain"], t["k_gain"], 1e-3, *table, heads.halves]
        with mock.patch.object(pointwise_triton, "NORM_PROGRAMS", programs):
            return pointwise.norm_rotate_backward(*given)._asdict()

    return Case(inputs, call)


def swiglu(rows: int, width: int, dtype: torch.dtype) -> Case:
    gate_up = 3 * random(rows, 2 * width, seed=1, dtype=dtype)
    return Case({"gate_up": gate_up}, lambda t: {"out": pointwise.swiglu(t["gate_up"])})


def swiglu_backward(rows: int, width: int, dtype: torch.dtype) -> Case:
    inputs: Named = {"gate_up": 3 * random(rows, 2 * width, seed=1, dtype=dtype)}
    inputs["grad"] = random(rows, width, seed=2, dtype=dtype)
    return Case(inputs, lambda t: {"dgate_up": pointwise.swiglu_backward(t["grad"], t["gate_up"])}, ("grad",))


def cross_entropy(
    rows: int, vocabulary: int, dtype: torch.dtype, size: float = 1.0, ignored: int = -100, bad: int | None = None
) -> Case:
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2))
    targets[1::3] = ignored
    if bad is not None:
        targets[-1] = bad
    logits = size * random(rows, vocabulary, seed=1, dtype=dtype)

    def call(t: Named) -> Named:
        """Rows of logits are apart in memory, and what lies between them is left alone."""
        memory = t["logits"].new_full((rows, vocabulary + 5), 7.0)
        memory[:, :vocabulary] = t["logits"]
        losses = pointwise.cross_entropy_(memory[:, :vocabulary], t["targets"], t["weight"], ignored)
        assert (memory[:, vocabulary:] == 7.0).all()
        t["logits"].copy_(memory[:, :vocabulary])
        return {"losses": losses}

    return Case({"logits": logits, "targets": targets, "weight": torch.tensor(0.3)}, call, ("logits",))


def adamw(
    count: int, split: bool, dtype: torch.dtype, grads: str = "float32", update: float = 1.0, state: str = "float32"
) -> Case:
    """`state`: dtype of the moments, and of the weights where they are not split."""
    weights = random(count, seed=1)
    inputs: Named = {
        "weights": weights.to(getattr(torch, state)),
        "grads": random(count, seed=2).to(getattr(torch, grads)),
        "mean": 0.1 * random(count, seed=3, dtype=getattr(torch, state)),
        "square": 0.1 * random(count, seed=4, dtype=getattr(torch, state)).square(),
        "scalars": torch.tensor([0.01, 0.7, 0.2, 0.3, update]),
    }
    if split:
        inputs["weights"], inputs["low_bits"] = (torch.empty(count, dtype=d) for d in (torch.bfloat16, torch.int16))
        pointwise.split_(weights, inputs["weights"], inputs["low_bits"])
        assert torch.equal(pointwise.united(inputs["weights"], inputs["low_bits"]), weights)

    def call(t: Named) -> Named:
        given = [t["weights"], t.get("low_bits"), t["grads"], t["mean"], t["square"], t["scalars"]]
        pointwise.adamw_(*given, (0.9, 0.95), 1e-8, 0.1)
        if not split:
            return {}
        whole = pointwise.united(t["weights"], t["low_bits"])
        assert bool(((whole - t["weights"]).abs() <= (whole - whole.bfloat16()).abs()).all())
        return {"whole": whole}

    changed = ("weights", *(("low_bits",) if split else ()), "mean", "square")
    return Case(inputs, call, changed if update else ())


def checksums(count: int, dtype: torch.dtype) -> Case:
    return Case({"x": random(count, seed=1, dtype=dtype)}, lambda t: {"sums": pointwise.checksums(t["x"])})


def fp8_rows(rows: int, width: int, seed: int, dtype: torch.dtype, bad: float | None = None) -> Tensor:
    """Rows of very different sizes, one of zeros, elements that are too small for e4m3, and perhaps a bad one."""
    found = random(rows, width, seed=seed) * 10.0 ** (torch.arange(rows) % 7 - 3)[:, None]
    found[:, ::3] *= 1e-5
    found[1::4] = 0.0
    if bad is not None:
        found[-1, width // 2] = bad
    return found.to(dtype)


def fp8_quantize(rows: int, width: int, dtype: torch.dtype, bad: float | None = None) -> Case:
    def call(t: Named) -> Named:
        return fp8.quantize(t["x"], t["lost"])._asdict() | {"total": t["lost"].sum()}

    return Case({"x": fp8_rows(rows, width, 1, dtype, bad), "lost": counters()}, call, ("lost",))


def counters() -> Tensor:
    return torch.zeros(fp8.SLOTS, dtype=torch.int64)


def fp8_add_norm(rows: int, width: int, delta: bool, dtype: torch.dtype) -> Case:
    inputs: Named = {"x": random(rows, width, seed=1, dtype=dtype), "gain": random(width, seed=3), "lost": counters()}
    inputs |= {"delta": random(rows, width, seed=2, dtype=dtype)} if delta else {}
    for name in inputs.keys() & {"x", "delta"}:
        inputs[name][rows // 2] = 0  # its scale is the smallest

    def call(t: Named) -> Named:
        given = t["x"], t.get("delta"), t["gain"], 1e-3, t["lost"]
        found = fp8.add_norm(*given)
        by_columns = fp8.transposed_norm(found.total, found.rstd, t["gain"], found.scale)
        assert torch.equal(by_columns.view(torch.uint8).t(), found.y.view(torch.uint8))
        count = t["lost"].sum()
        wide = fp8.add_norm(*given, torch.float16)  # the interpreter has no bf16
        assert torch.equal(wide.scale, found.scale)
        assert t["lost"].sum() == 2 * count
        return {"wide": wide.y, "count": count, **found._asdict()}

    return Case(inputs, call, ("lost",))


def fp8_swiglu(rows: int, width: int, dtype: torch.dtype) -> Case:
    inputs: Named = {"gate_up": 3 * fp8_rows(rows, 2 * width, 1, dtype), "lost": counters()}
    inputs["grad"] = fp8_rows(rows, width, 2, dtype)

    def call(t: Named) -> Named:
        gated = fp8.swiglu(t["gate_up"], t["lost"])
        found = fp8.swiglu_backward(t["grad"], t["gate_up"], gated.scale, t["lost"])
        same = (found.gated.view(torch.uint8) == gated.values.view(torch.uint8)).float().mean()
        assert same > 0.99  # where fp32 rounds differently
        return gated._asdict() | {"grad": found.gate_up.values, "grad_scale": found.gate_up.scale}

    return Case(inputs, call, ("lost",))


def fp8_transposed(rows: int, width: int, dtype: torch.dtype, bad: float | None = None) -> Case:
    inputs: Named = {"grad": fp8_rows(rows, width, 1, dtype, bad), "x": fp8_rows(rows, 16, 2, dtype)}

    def call(t: Named) -> Named:
        grad, x, lost = fp8.quantize(t["grad"]), fp8.quantize(t["x"]), counters()
        weight = fp8.transposed_weight(t["grad"], fp8.largest_scale(grad.scale)[0, 0])
        found = fp8.weight_gradient(grad, fp8.transposed(x.values), x.scale, None, lost)
        plain = fp8.transposed_rows(t["x"], x.scale)
        assert torch.equal(plain.view(torch.uint8), x.values.t().contiguous().view(torch.uint8))
        return {"weight": weight.values, "scale": weight.scale, "gradient": found, "lost": lost.sum()}

    return Case(inputs, call)


FUNCTIONS = (
    *(fp8_quantize, fp8_add_norm, fp8_swiglu, fp8_transposed),
    *(add_norm, add_norm_backward, rotate, rotate_backward, norm_rotate, norm_rotate_backward, swiglu),
    *(swiglu_backward, cross_entropy, adamw, checksums),
)


def differences(name: str, found: Tensor | None, expected: Tensor | None, limit: float) -> list[str]:
    if found is None or expected is None:
        return [] if found is expected else [f"{name} is {found} instead of {expected}"]
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return [f"{name} is {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"]
    if found.dtype == torch.int64:
        return [] if torch.equal(found, expected) else [f"{name} is another number"]
    if not found.is_floating_point():
        return []
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()) or not torch.equal(found.isnan(), expected.isnan()):
        return [f"{name} is finite where the formula is not, or the other way round"]
    finite = expected.isfinite()
    error, size = (found - expected)[finite].norm().item(), expected[finite].norm().item()
    return [] if error <= limit * size + 1e-9 else [f"{name} is off by {error:.2e} of {size:.2e}"]


def compare_kernel_with_formula(function: Callable[..., Case], dtype: torch.dtype, **options: Any) -> list[str]:
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
                with ExitStack() as stack:
                    for module in (pointwise, fp8):
                        stack.enter_context(mock.patch.object(module, "_triton", return_value=None))
                    made = call(given)
        results.append(made | {name: given[name] for name in changed})
        for name, (_, memory) in placed.items():
            inside = slice(GUARD, memory.numel() - GUARD)
            if name in changed:
                memory[inside] = before[name][inside]
            if not torch.equal(memory.nan_to_num(7), before[name].nan_to_num(7)):
                wrong.append(f"the {'kernel' if by_kernel else 'formula'} has overwritten {name} or memory around it")
    found, expected = results
    limit = EXACT[torch.float32 if function is adamw else dtype]
    for name, x in expected.items():
        low = x.dtype if x is not None and x.dtype in (torch.bfloat16, fp8.E4M3) else torch.float32
        wrong += differences(name, found[name], x, max(limit, EXACT[low]))
    return wrong


def node(part: str, dtype: torch.dtype, layout: str, gain: str | None = None) -> list[str]:
    """Compare an autograd node, run by kernels, with its formula, for tensors of a layout and a gain of its own."""
    tested, inputs, seeds = laid(part, layout, dtype, gain)
    try:
        check(tested, dtype, inputs=inputs, seeds=seeds, limit=LIMITS.get(dtype, 5e-3))
    except AssertionError as error:
        return str(error).splitlines()
    return []


def run(name: str, dtype: str, **options: Any) -> list[str]:
    functions = {function.__name__: function for function in FUNCTIONS}
    try:
        if name == "node":
            return node(dtype=getattr(torch, dtype), **options)
        return compare_kernel_with_formula(functions[name], getattr(torch, dtype), **options)
    except Exception:
        return [traceback.format_exc()]


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps([run(**arguments) for arguments in json.load(sys.stdin)]))


if __name__ == "__main__":
    speed_up()
    main()
