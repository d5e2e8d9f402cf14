"""Classifies kernels by name: kernels of cuBLAS, CUTLASS, PyTorch, Triton and NCCL, and CPU operators."""

import re
from collections.abc import Mapping
from functools import cache

from cs336_systems.measure.readers.recorded_tables import ComparedRow
from cs336_systems.predict.attention_model import OUTPUT, SCORES, SOFTMAX

MATMUL, ATTENTION, ELEMENTWISE, REDUCTION = "matmul", "attention", "elementwise", "softmax/reduction"
COPY, OPTIMIZER, COMMUNICATION, OTHER, UNKNOWN = "copy", "optimizer", "communication", "other", "unknown"
KINDS = (MATMUL, ATTENTION, ELEMENTWISE, REDUCTION, COPY, OPTIMIZER, COMMUNICATION, OTHER, UNKNOWN)
HOST, GAP = "host", "gap"
"""Kinds of time besides those of kernels: the host, and a GPU that waits between two kernels."""

__all__ = ["GAP", "HOST", "KINDS", "OUTPUT", "SCORES", "SOFTMAX", "classify", "compared_kinds"]

# The first match counts, so specific patterns come first: a fused optimizer uses multi_tensor_apply, a softmax is a
# reduction with an elementwise epilogue, a cast is an elementwise kernel that copies.
_PATTERNS: list[tuple[str, str]] = [
    (ELEMENTWISE, r"^triton_poi_"),  # torch.compile; the rest of the name lists what was fused
    (REDUCTION, r"^triton_(per|red)_"),
    # flash_triton.py, hopper_*.py, packing_triton.py
    (ATTENTION, r"^(forward|backward|prepare|finish|combine|gradient|grad_q|grad_kv|grad|documents)_kernel$"),
    (COMMUNICATION, r"nccl|gloo:|c10d::|all_?reduce|all_?gather|reduce_?scatter|broadcast_kernel"),
    (ATTENTION, r"flash|fmha|attention|sdpa|\bmha_|_attn_"),
    (OPTIMIZER, r"adam|lamb\b|sgd|multi_tensor|optimizer|_foreach_"),
    (MATMUL, r"nvjet|cutlass|xmma|gemm|gemv|cublas|splitk|mat_?mul|aten::(mm|bmm|addmm|baddbmm|linear|dot|einsum)\b"),
    (COPY, r"memcpy|memset|direct_copy|copy_kernel|copy_device_to_device|catarray|fillfunctor"
           r"|aten::(_?to_?(copy)?|copy_|clone|cat|contiguous|fill_|zero_|zeros|zeros_like|ones|ones_like|empty|empty_like|new_zeros|new_empty.*|stack|full.*)$"),
    (REDUCTION, r"softmax|reduce|norm|cross_entropy|nll_?loss|logsumexp|welford|cunn_|amax|argmax"
                r"|aten::(sum|mean|max|min|_?amp_foreach.*)$|gamma_?beta|rms"),
    (OTHER, r"sort|scan|embedding|index|gather|scatter|philox|distribution|random|radix|histogram|unique|krn_partial"
            r"|compute_grad_weight|sum_and_scatter|segment_offsets|item|is_nonzero|_local_scalar_dense|lift_fresh"
            r"|compute_num|write_num"),
    (ELEMENTWISE, r"elementwise|vectorized|unrolled|pointwise|triu|tril|masked|where|functor"
                  r"|aten::(mul|add|sub|div|neg|exp|log|pow|sqrt|rsqrt|silu(_backward)?|sigmoid|addcmul|flip|reciprocal|relu|gelu"
                  r"|tanh|cos|sin|eq|ne|lt|gt|le|ge|bitwise.*|logical.*|repeat_interleave|arange|clamp.*|abs)(_|\.\w+)?$"),
    (OTHER, r"^(aten|autograd|torch|cs336|prim|profiler)::|backward\d*$|accumulategrad|^optimizer|^detach$"),
]  # fmt: skip
_COMPILED = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS]


@cache
def classify(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), UNKNOWN)


def compared_kinds(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[ComparedRow]:
    """Return the seconds of matmuls, of attention and of all other kernels. A prediction's other kinds differ from a
    trace's."""
    rows = [ComparedRow(kind, measured.get(kind, 0.0), predicted.get(kind, 0.0)) for kind in (MATMUL, ATTENTION)]
    rest = (
        sum(seconds.values()) - sum(seconds.get(row.kind, 0.0) for row in rows) for seconds in (measured, predicted)
    )
    return [*rows, ComparedRow(OTHER, *rest)]
