"""Instrument of attention_varlen: attention inside packed documents, implementations interleaved.

Each is checked against float64, document by document, before it is timed. FLOPs are counted over the pairs of query and
key that the mask shows.
"""

import importlib
import inspect
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.experiments.attention.measure_attention import (
    Results,
    attention_in_float64,
    check_errors,
    failure_of,
    interleave,
    prepare,
    timed_calls,
    times_of,
    torch_dtype,
)
from cs336_systems.kernels import Packing, attention
from cs336_systems.predict.attention_model import AttentionShape
from cs336_systems.record import Metric

MOST_PADDING = 16
"""Padding is skipped where it would increase the number of tokens by more than this factor."""
SHORT_MEAN, MIXED_MEDIAN, MIXED_SIGMA, GIANT = 128, 1024, 0.8, 16384
"""Mean length of short documents; median and sigma of the log-normal lengths of the mix; length of the giant."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q, k and v of (tokens, heads, d) to an output of the same shape."""
Builder = Callable[[Sequence[int], bool, torch.device], Attend]
"""(lengths of the documents, causal, device) -> attention within the documents."""


def document_lengths(mix: str, tokens: int, seed: int) -> list[int]:
    """Return document lengths of one mix, which fill the tokens exactly; equal arguments give equal lengths."""
    draw = random.Random(seed)
    found = [min(GIANT, tokens // 2)] if mix == "giant" else []
    left = tokens - sum(found)
    while left:
        if mix == "mixed":
            length = int(draw.lognormvariate(math.log(MIXED_MEDIAN), MIXED_SIGMA))
        else:
            length = int(draw.expovariate(1 / SHORT_MEAN))
        found.append(min(max(length, 1), left))
        left -= found[-1]
    return found


def visible_flops(lengths: Sequence[int], shape: AttentionShape) -> int:
    """Return the FLOPs of forward and backward, 14 per column of a visible pair: a fused backward runs five matmuls,
    forward two."""
    pairs = sum(n * (n + 1) // 2 if shape.is_causal else n * n for n in lengths)
    return 14 * pairs * shape.heads * shape.head_dim


# -- implementations --------------------------------------------------------------------------------------------------


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _ours(name: str, lengths: Sequence[int], is_causal: bool, device: torch.device) -> Attend:
    packing = Packing(_offsets(lengths, device))
    return partial(attention, cu_seqlens_q=packing, is_causal=is_causal, impl=name)


def _padded(lengths: Sequence[int], is_causal: bool, device: torch.device) -> Attend:
    """Return our batched kernel on documents padded to the longest; the call includes padding and unpadding the
    rows."""
    longest, tokens = max(lengths), sum(lengths)
    if not is_causal:
        raise ValueError("without a causal mask documents would see the padding")
    if len(lengths) * longest > MOST_PADDING * tokens:
        raise ValueError(f"padding would make {len(lengths) * longest} tokens of {tokens}")
    starts = torch.arange(len(lengths), device=device) * longest - _offsets(lengths, device)[:-1]
    index = torch.arange(tokens, device=device) + starts.repeat_interleave(torch.tensor(lengths, device=device))

    def pad(x: Tensor) -> Tensor:
        flat = x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, index, x)
        return flat.unflatten(0, (len(lengths), longest)).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(pad(q), pad(k), pad(v), is_causal=is_causal).transpose(1, 2).flatten(0, 1)[index]

    return attend


def _flash_attention_4(lengths: Sequence[int], is_causal: bool, device: torch.device) -> Attend:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    offsets, longest = _offsets(lengths, device), max(lengths)
    wanted = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": is_causal}
    options = _known(function, {**wanted, "max_seqlen_q": longest, "max_seqlen_k": longest})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return attend


def _torch_varlen(lengths: Sequence[int], is_causal: bool, device: torch.device) -> Attend:
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    offsets, longest = _offsets(lengths, device), max(lengths)
    # Its first versions have a flag for a causal mask, later ones a window.
    options = _known(function, {"is_causal": is_causal}) or {"window_size": (-1, 0) if is_causal else (-1, -1)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, offsets, offsets, longest, longest, **options)
        return out

    return attend


def _known(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a function has parameters for: libraries rename theirs."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


IMPLEMENTATIONS: dict[str, Builder] = {
    **{name: partial(_ours, name) for name in ("auto", "flash_hopper", "flash_triton", "flash_torch", "reference")},
    "flash_attention_4": _flash_attention_4,
    "torch_varlen": _torch_varlen,
    "padded": _padded,
}


# -- the instrument ---------------------------------------------------------------------------------------------------


def draw_packed(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """Return q, k, v of (tokens, heads, d), which require gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.seq_len, shape.heads, shape.head_dim)
    tensors = [torch.randn(size, generator=generator, device=device, dtype=torch_dtype(shape)) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]


@lru_cache(maxsize=1)
def _exact(shape: AttentionShape, mix: str, device: torch.device, seed: int) -> Results:
    inputs = [x.detach() for x in draw_packed(shape, device, seed)]
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    start = 0
    for length in document_lengths(mix, shape.seq_len, seed):
        own = (x[start : start + length].transpose(0, 1) for x in inputs)
        for name, found in attention_in_float64(*own, is_causal=shape.is_causal).items():
            parts[name].append(found.transpose(0, 1))
        start += length
    return {name: torch.cat(found).cpu() for name, found in parts.items()}


def measure_varlen(config: dict[str, Any]) -> list[Metric]:
    """Time several implementations interleaved, one sample of each per round."""
    shape, device = prepare(config)
    mix, seed = config["mix"], config["seed"]
    lengths = document_lengths(mix, shape.seq_len, seed)
    inputs, exact = draw_packed(shape, device, seed), _exact(shape, mix, device, seed)
    metrics = [
        Metric("flops", "FLOP", [visible_flops(lengths, shape)]),
        Metric("documents", "", [len(lengths)]),
        Metric("longest_document", "", [max(lengths)]),
    ]
    able: dict[str, Attend] = {}
    for name in config["implementations"]:
        try:
            attend = IMPLEMENTATIONS[name](lengths, shape.is_causal, device)
            errors = check_errors(attend, inputs, exact, shape.precision)
        except Exception as error:  # a failure is a result, and does not end the others
            metrics.append(failure_of(name, error))
        else:
            metrics += [metric._replace(variant=name) for metric in errors]
            able[name] = attend
    medians: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for name in interleave(list(able), config["rounds"]):
        for phase, call in timed_calls(able[name], inputs, ("forward", "forward_backward")):
            medians[name, f"{phase}_time"].append(statistics.median(times_of(call, config, device, inputs)))
    return metrics + [Metric(metric, "s", samples, variant=name) for (name, metric), samples in medians.items()]
