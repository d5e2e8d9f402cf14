"""Registers, shared memory and spills of every kernel: kernel_resources.txt, one line per variant, reviewed as a diff.

    python -m tests.golden.kernel_resources             # compile everything anew (minutes) and write the file
    python -m tests.golden.kernel_resources --check     # compile everything and compare with the file
    python -m tests.golden.kernel_resources --sample    # compile a small fixed sample and print its lines

Triton cross-compiles for GPUs that are not present, from tensors of the "meta" device, which have no memory. The
fingerprint at the top of the file covers the device code, without docstrings, comments and line numbers, and the
arguments of every launch. Other changes of host code leave it as it is.
"""

import argparse
import ast
import hashlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from cs336_systems.kernels.flash import portable_launch, tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.packing import FIELDS, PackedMask
from cs336_systems.kernels.flash.tiles import BLOCK_DIMS, KERNELS, SHARED_MEMORY, WIDEST_GRAD, Key
from cs336_systems.kernels.fused import fp8_triton, pointwise_triton
from cs336_systems.kernels.fused.fp8 import E4M3, SLOTS
from cs336_systems.kernels.fused.pointwise import CHECKED, INTEGERS
from tests.helpers import PACKAGE
from tests.unit.kernels import sass

FILE = Path(__file__).with_suffix(".txt")
REWRITE = "python -m tests.golden.kernel_resources rewrites the file; review the diff"

SECTIONS = {
    "portable attention": ("arch", "kernel", "dtype", "d", "mask", "group", "loads", "tile"),
    "Hopper attention": ("arch", "kernel", "dtype", "d", "mask", "group", "queries", "keys"),
    "pointwise": ("arch", "kernel", "dtype", "d", "constants"),
    "FP8": ("arch", "kernel", "dtype", "d", "constants"),
}
"""Section of the file -> columns that identify a row. `d`: head dim, or width of the model; `group`: query heads per KV
head; `tile`: queries x keys, warps, stages."""
RESOURCES = ("registers", "shared", "stack")
"""Registers of a thread, bytes of shared memory of a program, bytes of stack of a thread: spilled registers."""
CODE = ("spills_in_loops", "loops", "wgmma", "tma", "barriers", "setmaxnreg", "hazards", "remarks")
"""Facts of the Hopper kernels' machine code: see `sass.Report`."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTH, LONG, UNEVEN, ODD, LONG_ODD = 4096, 16_384, 6144, 500, 10_000
"""Sequence lengths. Without a mask UNEVEN makes the Hopper kernels split the keys. ODD and LONG_ODD end in a partial
tile. With ODD, and with LENGTH and a head dim of 64, forward of the Hopper kernels runs in small programs."""
MASKS = {
    "full": Band(),
    "causal": Band(None, 0),
    "window": Band(-40, 8),
    "sliding": Band(-1023, 0),
    "far": Band(-8191, 0),
    "causal+17": Band(None, 17),
}
PASSES = {"grad_q": 0, "grad_k": 1, "grad_v": 2, "grad_kv": 1}
"""Backward in passes: kernel -> index of the pass. Head dims above 128 have one for each gradient, repeatable gradients
of others one for those of keys and values."""
HOPPER = [
    # kernel, dtype, head dim, mask, query heads per KV head, queries, keys
    ("forward", "bf16", 64, "causal", 1, LENGTH, LENGTH),
    ("forward", "bf16", 64, "causal", 1, LONG, LONG),
    ("forward", "bf16", 64, "full", 1, ODD, ODD),
    ("forward", "bf16", 64, "full", 1, LONG, LONG),
    ("forward", "fp16", 64, "causal+17", 4, ODD, LENGTH),
    ("forward", "fp16", 64, "causal+17", 4, LONG_ODD, LONG_ODD),
    ("forward", "bf16", 80, "causal+17", 1, ODD, ODD),
    ("forward", "bf16", 80, "causal+17", 1, LONG_ODD, LONG_ODD),
    ("forward", "bf16", 96, "causal", 1, ODD, ODD),
    ("forward", "bf16", 96, "causal", 1, LENGTH, LENGTH),
    ("forward", "bf16", 128, "causal", 1, ODD, ODD),
    ("forward", "bf16", 128, "causal", 1, LENGTH, LENGTH),
    ("forward", "bf16", 128, "full", 1, 250, 250),
    ("forward", "bf16", 128, "full", 1, UNEVEN, UNEVEN),
    ("forward", "fp16", 128, "causal", 1, ODD, ODD),
    ("forward", "fp16", 128, "causal", 1, LENGTH, LENGTH),
    ("forward", "bf16", 64, "sliding", 1, LENGTH, LENGTH),
    ("forward", "bf16", 64, "far", 1, LONG, LONG),
    ("forward", "bf16", 128, "window", 4, LENGTH, LENGTH),
    ("forward", "bf16", 128, "far", 4, LONG, LONG),
    ("backward", "bf16", 64, "causal", 1, LENGTH, LENGTH),
    ("backward", "fp16", 64, "causal+17", 4, ODD, ODD),
    ("backward", "bf16", 128, "causal", 1, LENGTH, LENGTH),
    ("backward", "bf16", 128, "full", 1, LENGTH, LENGTH),
    ("backward", "bf16", 64, "full", 1, UNEVEN, UNEVEN),
    ("backward", "bf16", 128, "full", 1, UNEVEN, UNEVEN),
    ("backward", "bf16", 128, "causal", 4, LENGTH, LENGTH),
    ("backward", "bf16", 128, "causal", 4, LONG, LONG),
    ("backward", "bf16", 64, "causal", 7, LENGTH, LENGTH),
    ("backward", "bf16", 128, "causal", 7, LENGTH, LENGTH),
    ("backward", "bf16", 80, "causal", 1, LENGTH, LENGTH),
    ("backward", "fp16", 80, "causal+17", 1, LENGTH, ODD),
    ("backward", "bf16", 96, "full", 1, LENGTH, LENGTH),
    ("backward", "bf16", 96, "causal", 4, LENGTH, LENGTH),
    ("backward", "bf16", 96, "causal", 4, LONG, LONG),
    ("backward", "bf16", 64, "sliding", 1, LENGTH, LENGTH),
    ("backward", "bf16", 128, "sliding", 1, LENGTH, LENGTH),
    ("backward", "bf16", 128, "window", 4, LENGTH, LENGTH),
    *(("forward", "bf16", d, mask, 1, LENGTH, LENGTH) for d in (192, 256) for mask in ("causal", "full")),
    ("forward", "fp16", 192, "causal+17", 4, ODD, LENGTH),
    ("forward", "bf16", 256, "sliding", 4, LENGTH, LENGTH),
    ("forward", "bf16", 256, "full", 1, UNEVEN, UNEVEN),
    *(
        (kernel, *call)
        for kernel in ("grad_q", "grad_k", "grad_v")
        for call in (
            ("bf16", 192, "causal", 1, LENGTH, LENGTH),
            ("fp16", 192, "causal+17", 4, ODD, LENGTH),
            ("bf16", 256, "causal", 1, LENGTH, LENGTH),
            ("bf16", 256, "full", 4, LENGTH, LENGTH),
            ("bf16", 256, "window", 4, LENGTH, LENGTH),
        )
    ),
    *(
        (kernel, *call)
        for kernel in ("grad_q", "grad_kv")
        for call in (
            ("bf16", 64, "causal", 1, LENGTH, LENGTH),
            ("bf16", 64, "sliding", 4, LENGTH, LENGTH),
            ("fp16", 80, "causal+17", 4, ODD, LENGTH),
            ("bf16", 96, "full", 1, LENGTH, LENGTH),
            ("bf16", 128, "causal", 4, LENGTH, LENGTH),
            ("bf16", 128, "full", 1, LENGTH, LENGTH),
            ("bf16", 128, "window", 4, LENGTH, LENGTH),
        )
    ),
]
"""All that makes another kernel: head dim, mask, tiles on the diagonal, small programs, split keys, heads of a group
split evenly and not, a partial tile."""
PACKED = [("bf16", 64, "causal", 1), ("bf16", 128, "causal", 1), ("bf16", 64, "window", 2), ("fp32", 64, "causal", 1)]
"""Dtype, head dim, mask and group of the calls with packed documents; their rows are read through pointers."""
PACKED_HOPPER = [
    *(
        (kernel, documents, dtype, d, mask, group, bottom_right)
        for kernel, documents in (("forward", 64), ("forward", 1), ("backward", 64))
        for dtype, d, mask, group, bottom_right in (
            ("bf16", 64, "causal", 1, False),
            ("bf16", 128, "causal", 1, False),
            ("bf16", 64, "full", 1, False),
            ("bf16", 128, "full", 1, False),
            ("bf16", 128, "causal", 4, True),
            ("fp16", 64, "causal", 4, True),
            ("bf16", 80, "causal", 1, False),
            ("bf16", 128, "sliding", 4, True),
        )
    ),
    *(
        (kernel, 64, *call)
        for kernel in ("forward", "grad_q", "grad_k", "grad_v")
        for call in (
            ("bf16", 192, "causal", 4, True),
            ("bf16", 256, "causal", 1, False),
            ("fp16", 256, "full", 1, False),
        )
    ),
    *(
        (kernel, 64, *call)
        for kernel in ("grad_q", "grad_kv")
        for call in (
            ("bf16", 64, "causal", 1, False),
            ("bf16", 96, "full", 1, False),
            ("bf16", 128, "sliding", 4, True),
        )
    ),
]
"""Kernel, documents, dtype, head dim, mask, query heads per KV head, and whether the mask is aligned to the ends of
documents. With one document forward runs in large programs."""
DOCUMENTS = 64
POINTWISE = [*((arch, "bf16", 2560, 80) for arch in SHARED_MEMORY), ("sm_90", "fp32", 768, 64)]
"""Architecture, dtype, width of the model, head dim."""
SAMPLE = {
    "portable attention": [
        {"arch": "sm_80", "kernel": "forward", "dtype": "bf16", "d": "16", "mask": "causal"},
        {"arch": "sm_90", "kernel": "forward", "dtype": "bf16", "d": "64", "mask": "causal", "loads": "tma"},
        {"arch": "sm_100", "kernel": "forward", "dtype": "bf16", "d": "16", "mask": "causal", "loads": "pointers"},
        {"arch": "sm_120", "kernel": "grad_q", "dtype": "bf16", "d": "64", "mask": "causal"},
        {"arch": "sm_90", "kernel": "grad_kv", "dtype": "bf16", "d": "64", "mask": "window", "loads": "packed"},
    ],
    "Hopper attention": [
        {"kernel": "forward", "dtype": "fp16", "d": "128", "mask": "causal", "queries": "500"},
        {"kernel": "forward", "dtype": "bf16", "d": "64", "mask": "packed-causal-one"},
        {"kernel": "grad_q", "dtype": "bf16", "d": "256", "mask": "causal"},
        {"kernel": "grad_kv", "dtype": "bf16", "d": "128", "mask": "full"},
    ],
    "pointwise": [{"arch": arch, "kernel": "cross_entropy"} for arch in ("sm_80", "sm_120")],
    "FP8": [{"arch": "sm_90", "kernel": kernel} for kernel in ("quantize", "swiglu_backward")],
}
"""Rows that every test run compiles: section -> columns to match."""


Row = dict[str, str]


class Launch(NamedTuple):
    """A kernel with the arguments of a launch, and the row that it has in the file."""

    section: str
    row: Row
    """Columns that identify it; `measure` adds the others."""
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class AbsentGPU:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, arch: str):
        self.capability = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device: here every architecture is one

    def get_current_stream(self, device: int) -> int:
        return 0


# -- variants ---------------------------------------------------------------------------------------------------------


def launches() -> list[Launch]:
    """Every variant of every kernel; compiles nothing."""
    return [*portable_launches(), *hopper_launches(), *packed_hopper_launches(), *pointwise_launches(), *fp8_launches()]


def portable_launches() -> Iterator[Launch]:
    """All shipped tiles of the portable attention kernels, and calls that need more registers: masks with two bounds,
    grouped heads, padded head dims."""
    for arch, kernel in itertools.product(SHARED_MEMORY, (*KERNELS, "grad")):
        dims = [d for d in BLOCK_DIMS if kernel != "grad" or d <= WIDEST_GRAD]
        for loads, dtype in (("tma", "bf16"), ("pointers", "bf16"), ("pointers", "fp32")):
            if loads == "tma" and (arch not in ("sm_90", "sm_100") or kernel == "grad"):
                continue
            if dtype == "fp32" and kernel == "grad":
                continue
            bits = 8 * DTYPES[dtype].itemsize
            calls = {(d, "causal", 1) for d in dims}
            for d in dims:
                full, causal = (tiles.shipped(arch, Key(kernel, bits, d, x, loads == "tma")) for x in (False, True))
                calls |= set() if full == causal else {(d, "full", 1)}
            if bits == 16:
                calls |= {(64, "window", 2), (40, "full", 4)}
            if bits == 16 and arch == "sm_90":  # it has tiles for these
                more = [d for d in (24, 80, 128, 200, 256) if d <= dims[-1]]
                calls |= {(40, "window", 2), *((d, *rest) for d in more for rest in (("full", 4), ("window", 2)))}
            for d, mask, group in calls:
                yield portable(arch, kernel, dtype, d, mask, group, loads)
    for arch, kernel in itertools.product(SHARED_MEMORY, KERNELS):
        for dtype, d, mask, group in PACKED:
            yield portable(arch, kernel, dtype, d, mask, group, "packed")


def portable(arch: str, kernel: str, dtype: str, d: int, mask: str, group: int, loads: str) -> Launch:
    q = torch.empty(2, 2 * group, LENGTH, d, dtype=DTYPES[dtype], device="meta")
    k = torch.empty(2, 2, LENGTH, d, dtype=DTYPES[dtype], device="meta")
    lse = torch.empty(2, 2 * group, LENGTH, device="meta")
    is_packed = loads == "packed"
    table = torch.empty(FIELDS * LENGTH, dtype=torch.int32, device="meta") if is_packed else None
    documents = DOCUMENTS if is_packed else None
    if is_packed:
        q, k, lse = q[:1].transpose(1, 2).contiguous().transpose(1, 2), k[:1], lse[:1]
    tensors = [{"q": q, "k": k}[side] for side in portable_launch.SIDES[kernel]]
    numbers: dict[str, tuple[Any, ...]] = {
        "forward": (lse, table),
        "grad_q": (lse, None, lse, table),
        "grad_kv": (lse, lse, table),
        "grad": (lse, None),
    }
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    least = 0 if loads == "tma" else 1 << 62
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.multiple(
            portable_launch,
            SMALLEST_FOR_DESCRIPTORS=least,
            LONG_FOR_DESCRIPTORS=least,
            LAUNCH_BOUND=least,
            WIDE_FOR_DESCRIPTORS=least,
        ),
    ):
        call = (kernel, tensors, MASKS[mask], is_packed)
        key, traits = portable_launch.tile_key(*call), portable_launch.traits(*call)
        tile = tiles.sparing(arch, key, traits) or tiles.shipped(arch, key)
        plan = portable_launch.plan(kernel, tensors, MASKS[mask], tile, documents)
    assert (plan.descriptions is not None) == (loads == "tma")
    shape = f"{tile.block_m}x{tile.block_n},{tile.num_warps},{tile.num_stages}"
    row = _row("portable attention", arch, kernel, dtype, d, mask, group, loads, shape)
    arguments = plan.arguments(tensors, numbers[kernel], 0.125)
    return Launch("portable attention", row, plan.kernel, arguments, plan.options)


def hopper_launches() -> Iterator[Launch]:
    from cs336_systems.kernels.flash.hopper_launch import Problem

    for kernel, dtype, d, mask, group, len_q, len_k in HOPPER:
        q = torch.empty(2, 2 * group, len_q, d, dtype=DTYPES[dtype], device="meta")
        k = torch.empty(2, 2, len_k, d, dtype=DTYPES[dtype], device="meta")
        problem = Problem(q, k, k, MASKS[mask], repeatable=kernel in PASSES)
        numbers = torch.empty(q.shape[:3], device="meta")
        tensors: tuple[Any, ...] = (q, k, k, q)
        pointers: tuple[Any, ...] = ()
        if kernel == "forward":
            plans, pointers = problem.plan_forward(tensors), (numbers,)
        else:
            plans = problem.plan_backward(q, k, k, q, q, q, k, k)
            tensors += backward_tensors(kernel, problem.scratch(q.device), q, k)
        if kernel in PASSES:
            plan, pointers = plans.passes[PASSES[kernel]].plan, (None,)
        else:
            plan, pointers = plans.main, (*pointers, numbers if plans.split else None, None)
        row = _row("Hopper attention", "sm_90", kernel, dtype, d, mask, group, len_q, len_k)
        yield Launch("Hopper attention", row, plan.kernel, plan.arguments(tensors, pointers, 0.125), plan.options)


def packed_hopper_launches() -> Iterator[Launch]:
    """The Hopper kernels on packed documents; `queries` and `keys` are then the tokens of all documents."""
    from cs336_systems.kernels.flash.hopper_launch import PackedProblem

    for kernel, documents, dtype, d, mask, group, bottom_right in PACKED_HOPPER:
        q, k = (
            torch.empty(1, LENGTH, heads, d, dtype=DTYPES[dtype], device="meta").transpose(1, 2)
            for heads in (2 * group, 2)
        )
        mask_of_documents = PackedMask(MASKS[mask], bottom_right)
        problem = PackedProblem(q, k, k, mask_of_documents, documents, repeatable=kernel in PASSES)
        table = torch.empty(FIELDS * LENGTH, dtype=torch.int32, device="meta")
        if kernel == "forward":
            lse = torch.empty(q.shape[:3], device="meta")
            plan, tensors, pointers = problem.plan_forward((q, k, k, q)), (q, k, k, q), (lse, None, table)
        else:
            plans = problem.plan_backward(q, k, k, q, q, q, k, k)
            is_pass = kernel in PASSES
            plan = plans.passes[PASSES[kernel]].plan if is_pass else plans.main
            pointers = (table,) if is_pass else (None, table)
            tensors = (q, k, k, q, *backward_tensors(kernel, problem.scratch(q.device), q, k))
        name = f"packed-{mask}" + "-end" * bottom_right + "-one" * (documents == 1)
        row = _row("Hopper attention", "sm_90", kernel, dtype, d, name, group, LENGTH, LENGTH)
        yield Launch("Hopper attention", row, plan.kernel, plan.arguments(tensors, pointers, 0.125), plan.options)


def backward_tensors(kernel: str, scratch: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
    """Return the tensors that a backward kernel takes beside q, k, v and the gradient of the output."""
    if kernel in PASSES:
        return scratch, scratch, *((q, q) if kernel == "grad_q" else (k, k))
    return scratch, scratch, scratch, k, k


def pointwise_launches() -> Iterator[Launch]:
    """All kernels of pointwise_triton.py: the launches that its functions make."""
    for arch, dtype, width, head_dim in POINTWISE:
        call = partial(_call_pointwise, DTYPES[dtype], width, head_dim)
        yield from _made_by(call, pointwise_triton, "pointwise", arch, dtype, width)


def fp8_launches() -> Iterator[Launch]:
    """All kernels of fp8_triton.py, for GPUs that have e4m3."""
    for arch, dtype, width, _ in POINTWISE:
        if arch != "sm_80" and dtype == "bf16":
            yield from _made_by(partial(_call_fp8, width, 4 * width), fp8_triton, "FP8", arch, dtype, width)


def _made_by(
    call: Callable[[], None], module: ModuleType, section: str, arch: str, dtype: str, width: int
) -> Iterator[Launch]:
    """The launches of a module of kernels that a call makes."""
    with mock.patch.object(module, "launch") as launch:
        call()
    made = {}
    for each in launch.call_args_list:
        kernel, _, *arguments = each.args
        constants = ",".join(f"{name}={value}" for name, value in each.kwargs.items())
        row = _row(section, arch, kernel.fn.__name__.strip("_"), dtype, width, constants)
        made[constants, row["kernel"]] = Launch(section, row, kernel, tuple(arguments), each.kwargs)
    yield from made.values()


def _call_fp8(width: int, wide: int) -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fp32 = torch.float32
    x, gain, scale = tensor(64, width), tensor(width, dtype=fp32), tensor(64, dtype=fp32)
    lost, scalar = tensor(SLOTS, dtype=torch.int64), tensor(dtype=fp32)
    values, gate_up = tensor(64, width, dtype=E4M3), tensor(64, 2 * wide)
    gated, by_columns = tensor(64, wide, dtype=E4M3), tensor(width, 64, dtype=E4M3)
    for counters in (None, lost):
        fp8_triton.quantize(x, values, scale, counters)
    for delta in (None, x):
        for y in (values, x):
            fp8_triton.add_norm(x, delta, gain, 1e-5, x, y, scale, scale, lost)
    fp8_triton.swiglu(gate_up, gated, scale, lost)
    fp8_triton.swiglu_backward(tensor(64, wide), gate_up, scale, tensor(64, 2 * wide, dtype=E4M3), scale, gated, lost)
    for other in (None, scale):
        fp8_triton.largest(scale, other, tensor(2, 4, dtype=fp32))
    fp8_triton.transposed(values, None, None, None, None, by_columns, None, None)
    fp8_triton.transposed(x, None, None, scalar, None, by_columns, gain, None)
    fp8_triton.transposed(values, scale, scale, scalar, None, by_columns, None, lost)
    fp8_triton.transposed(x, None, None, scale, None, by_columns, None, None)
    fp8_triton.transposed(x, scale, None, scale, gain, by_columns, None, None)


def _call_pointwise(dtype: torch.dtype, width: int, head_dim: int) -> None:
    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = torch.float32
    x, gain, rstd = tensor(64, width), tensor(width, dtype=wide), tensor(64, dtype=wide)
    for delta in (None, x):
        pointwise_triton.add_norm(x, delta, gain, 1e-5, x, x, rstd)
        pointwise_triton.add_norm_backward(x, delta, x, rstd, gain, x, True)
    heads = width // head_dim
    q, qkv = tensor(2, 32, heads, head_dim), tensor(2, 32, 3 * heads, head_dim)
    table, head_gain = tensor(32, 1, head_dim, dtype=wide), tensor(head_dim, dtype=wide)
    for halves in (False, True):
        pointwise_triton.rotate(q, q, None, table, table, qkv, 1.0, halves)
        pointwise_triton.rotate(q, q, q, table, table, qkv, -1.0, halves)
        norms = (head_gain, head_gain, 1e-5, table, table, qkv, halves)
        pointwise_triton.norm_rotate(q, q, *norms)
        pointwise_triton.norm_rotate_backward(q, q, q, q, q, *norms)
    pointwise_triton.swiglu(tensor(64, 2 * width), x)
    pointwise_triton.swiglu_backward(x, tensor(64, 2 * width), tensor(64, 2 * width))
    pointwise_triton.cross_entropy(tensor(64, 50257), tensor(64, dtype=torch.int64), rstd, tensor(dtype=wide), -100)
    flat, moment, scalars = tensor(1 << 20), tensor(1 << 20, dtype=wide), tensor(5, dtype=wide)
    low_bits = tensor(1 << 20, dtype=torch.int16) if dtype == torch.bfloat16 else None
    pointwise_triton.adamw(flat, low_bits, flat, moment, moment, scalars, (0.9, 0.95), 1e-8, 0.1)
    if dtype == torch.bfloat16:
        pointwise_triton.adamw(flat, None, flat, flat, flat, scalars, (0.9, 0.95), 1e-8, 0.1)
    bits = tensor(1 << 20, dtype=INTEGERS[dtype.itemsize])
    pointwise_triton.checksums(bits, tensor(1 << 6, dtype=torch.int64), CHECKED)


def _row(section: str, *values: Any) -> Row:
    return dict(zip(SECTIONS[section], map(str, values), strict=True))


# -- fingerprint ------------------------------------------------------------------------------------------------------


def fingerprint(of: Sequence[Launch]) -> str:
    """Hash of the device code and of the arguments of all launches."""
    code = [canonical(node) for path in sorted(PACKAGE.glob("kernels/**/*.py")) for node in device_code(path)]
    calls = [[*each.row.values(), *map(_described, each.arguments), sorted(each.options.items())] for each in of]
    return hashlib.sha256(repr([sorted(map(repr, code)), sorted(map(repr, calls))]).encode()).hexdigest()[:16]


def device_code(path: Path) -> list[ast.stmt]:
    """Decorated definitions and constants of a module that defines Triton or Gluon kernels; else nothing."""
    body = ast.parse(path.read_text()).body
    decorators = {id(node): list(map(ast.unparse, getattr(node, "decorator_list", []))) for node in body}
    if not any(name.startswith(("triton.jit", "gluon.jit")) for names in decorators.values() for name in names):
        return []
    return [node for node in body if decorators[id(node)] or isinstance(node, ast.Assign | ast.AnnAssign)]


def canonical(node: Any) -> Any:
    """A syntax tree as nested lists, without docstrings, positions and empty fields, which differ between versions of
    Python."""
    if isinstance(node, list):
        kept = (x for x in node if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)))
        return [canonical(x) for x in kept]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return [type(node).__name__, *((name, canonical(value)) for name, value in fields)]


def _described(argument: Any) -> str:
    """An argument as far as compiling depends on it, and not on where tensors are."""
    if isinstance(argument, torch.Tensor):
        return str(argument.dtype)
    if hasattr(argument, "block_shape"):
        layout = getattr(argument, "layout", None)
        return f"{argument.base.dtype} {argument.shape} {argument.strides} {argument.block_shape} {layout}"
    return repr(argument)


# -- compiling --------------------------------------------------------------------------------------------------------


def measure(launch: Launch) -> Row:
    """Compile a launch's kernel; its whole row."""
    arch = launch.row["arch"]
    triton.runtime.driver.set_active(AbsentGPU(arch))
    compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
    if launch.section == "Hopper attention":
        report = sass.read(compiled)
        for line in (*report.hazards, *report.remarks):
            print(f"{' '.join(launch.row.values())}: {line}", file=sys.stderr)
        facts = {name: getattr(report, name) for name in (*RESOURCES, *CODE)}
        counts = {name: len(fact) if isinstance(fact, tuple) else fact for name, fact in facts.items()}
    else:
        registers, stack = sass.resources(sass.disassemble(compiled.asm["cubin"], "-res-usage"))
        counts = dict(zip(RESOURCES, (registers, compiled.metadata.shared, stack), strict=True))
    return launch.row | {name: str(count) for name, count in counts.items()}


def measure_all(chosen: Sequence[Launch], processes: int = 1) -> dict[str, list[Row]]:
    """Rows by section, sorted."""
    if processes == 1:
        rows = list(map(measure, chosen))
    else:  # forked: launches hold functions that cannot be pickled
        _chosen[:] = chosen
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            rows = pool.map(_measure_at, range(len(chosen)), chunksize=1)
    found: dict[str, list[Row]] = {section: [] for section in SECTIONS}
    for launch, row in zip(chosen, rows, strict=True):
        found[launch.section].append(row)
    return {section: sorted(rows, key=_order) for section, rows in found.items()}


_chosen: list[Launch] = []


def _measure_at(index: int) -> Row:
    return measure(_chosen[index])


def _order(row: Row) -> list[tuple[int, str]]:
    return [(int(x), "") if x.isdigit() else (0, x) for x in (row["arch"].removeprefix("sm_"), *row.values())]


def sample(of: Sequence[Launch], sections: Sequence[str] = tuple(SECTIONS)) -> list[Launch]:
    """The launches that every test run compiles."""
    return [
        launch
        for launch in of
        if launch.section in sections and any(wanted.items() <= launch.row.items() for wanted in SAMPLE[launch.section])
    ]


# -- the file ---------------------------------------------------------------------------------------------------------


class Golden(NamedTuple):
    triton: str
    fingerprint: str
    rows: dict[str, list[Row]]
    """Section -> its rows."""


def load(text: str | None = None) -> Golden:
    lines = (FILE.read_text() if text is None else text).splitlines()
    header = dict(line.split(": ", 1) for line in lines if ": " in line)
    rows: dict[str, list[Row]] = {}
    columns: list[str] = []
    for line in lines:
        if line.startswith("["):
            rows[line.strip("[]")], columns = [], []
        elif line and rows and not columns:
            columns = line.split()
        elif line and rows:
            rows[list(rows)[-1]].append(dict(zip(columns, line.split(), strict=True)))
    return Golden(header["triton"], header["fingerprint"], rows)


def render(golden: Golden) -> str:
    text = f"# python -m tests.golden.kernel_resources\ntriton: {golden.triton}\nfingerprint: {golden.fingerprint}\n"
    return text + "".join(f"\n[{section}]\n{table(rows)}" for section, rows in golden.rows.items())


def table(rows: Sequence[Row]) -> str:
    """Aligned columns under their names: numbers to the right."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [column[1].isdigit() for column in zip(*lines, strict=True)]
    padded = (
        [x.rjust(w) if right else x.ljust(w) for x, w, right in zip(line, widths, numeric, strict=True)]
        for line in lines
    )
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the file; do not write it")
    mode.add_argument("--sample", nargs="*", metavar="SECTION", help="compile the sample of these sections, or of all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    flags = parser.parse_args()
    known = launches()
    if flags.sample is not None:
        rows = measure_all(sample(known, flags.sample or tuple(SECTIONS)))
        print(render(Golden(triton.__version__, fingerprint(known), {name: own for name, own in rows.items() if own})))
        return 0
    text = render(Golden(triton.__version__, fingerprint(known), measure_all(known, flags.processes)))
    if not flags.check:
        FILE.write_text(text)
    elif text != FILE.read_text():
        print(f"{FILE.name} is not what the kernels compile to: {REWRITE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
