"""Fused parts of a block with their formulas, and the comparison of both, for the tests of fused kernels and models.

Formulas are in float64, with gradients by autograd.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cs336_systems.config import ModelConfig
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.model import RotaryEmbedding, TransformerLM
from tests.unit.kernels.attention_cases import LAYOUTS, poisoned_memory

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Allowed error relative to the norm: bf16 rounds a few times, by up to 2^-9."""


@dataclass(frozen=True)
class Part:
    """A fused function of named tensors, and its formula."""

    shapes: dict[str, tuple[int, ...]]
    call: Callable
    formula: Callable
    outputs: int = 1

    @property
    def weights(self):
        return [name for name in self.shapes if name[0] == "w"]


def norm(x, gain, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def total(t):
    return t["x"] + t["delta"] if "delta" in t else t["x"]


def side_by_side(t):
    return torch.cat([t[name] for name in t if name[0] == "w"])


def add_norm(*shape, delta, eps=1e-5):
    return Part(
        {"x": shape, **dict.fromkeys(["delta"] * delta, shape), "gain": shape[-1:]},
        lambda t: fused.add_norm(t["x"], t.get("delta"), t["gain"], eps),
        lambda t: (total(t), norm(total(t), t["gain"], eps)),
        2,
    )


def norm_linear(*shape, delta, rows, eps=1e-5, biased=False):
    weights = {f"w{number}": (count, shape[-1]) for number, count in enumerate(rows)}
    biases = {f"bias{number}": (count,) for number, count in enumerate(rows if biased else ())}

    def call(t):
        given = [t[name] for name in weights]
        return fused.norm_linear(t["x"], t.get("delta"), t["gain"], eps, *given, biases=[t[name] for name in biases])

    def formula(t):
        out = norm(total(t), t["gain"], eps) @ side_by_side(t).T
        return total(t), out + torch.cat([t[name] for name in biases]) if biased else out

    shapes = {"x": shape, **dict.fromkeys(["delta"] * delta, shape), "gain": shape[-1:], **weights, **biases}
    return Part(shapes, call, formula, 2)


def linear(*shape, rows, biased=False):
    return Part(
        {"x": shape, "w": (rows, shape[-1]), **dict.fromkeys(["bias"] * biased, (rows,))},
        lambda t: (fused.linear(t["x"], t["w"], t.get("bias")),),
        lambda t: (t["x"] @ t["w"].T + (t["bias"] if biased else 0),),
    )


def swiglu_linear(*shape, rows):
    def formula(t):
        gate, up = t["gate_up"].chunk(2, -1)
        return ((gate * torch.sigmoid(gate) * up) @ t["w"].T,)

    return Part(
        {"gate_up": (*shape[:-1], 2 * shape[-1]), "w": (rows, shape[-1])},
        lambda t: (fused.swiglu_linear(t["gate_up"], t["w"]),),
        formula,
    )


class Strided(torch.autograd.Function):
    """The same values in memory of another layout that is no view: rotary_heads may rotate it in place."""

    @staticmethod
    def forward(ctx, x, layout):
        laid = LAYOUTS[layout](x.clone())
        return x.new_empty(0).set_(laid.untyped_storage(), laid.storage_offset(), laid.shape, laid.stride())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def rotary(batch, rows, heads, dim, kv_heads=None, context=None, layout="contiguous", normed=False):
    rotate, kv_heads, eps = RotaryEmbedding(context or rows, dim, 100.0), kv_heads or heads, 1e-3

    def formula(t):
        q, k, v = t["qkv"].view(batch, rows, -1, dim).split((heads, kv_heads, kv_heads), 2)
        if normed:
            q, k = norm(q, 1 + t["q_gain"], eps), norm(k, 1 + t["k_gain"], eps)
        return tuple(x.transpose(1, 2) for x in (rotate(q), rotate(k), v))

    def call(t):
        norms = fused.HeadNorms(1 + t["q_gain"], 1 + t["k_gain"], eps) if normed else None
        return fused.rotary_heads(Strided.apply(t["qkv"], layout), rotate.cos, rotate.sin, heads, norms)

    gains = dict.fromkeys(["q_gain", "k_gain"] if normed else (), (dim,))
    return Part({"qkv": (batch, rows, (heads + 2 * kv_heads) * dim), **gains}, call, formula, 3)


def targets_of(vocabulary, *shape, seed=5):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


SHAPE = ModelConfig(vocab_size=61, context_length=12, d_model=24, num_layers=3, num_heads=3, d_ff=40)


def model_of(checkpoint_blocks=0, checkpoint_inner=0, attention="reference", **options):
    model = TransformerLM(SHAPE, attention=attention, checkpoint_blocks=checkpoint_blocks, **options)
    model.checkpoint_inner = checkpoint_inner
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def cross_entropy(*shape, vocabulary, targets=None, **options):
    targets = targets_of(vocabulary, *shape[:-1]) if targets is None else targets
    ignored = options.get("ignored", -100)

    def formula(t):
        logits = (t["x"] @ t["w"].T).flatten(0, -2)
        return (F.cross_entropy(logits, targets.flatten(), ignore_index=ignored),)

    return Part(
        {"x": shape, "w": (vocabulary, shape[-1])},
        lambda t: (fused.linear_cross_entropy(t["x"], t["w"], targets, **options),),
        formula,
    )


FEW = {
    "add_norm": add_norm(2, 5, 24, delta=True),
    "norm_linear": norm_linear(2, 5, 24, delta=True, rows=(9, 16, 3)),
    "linear": linear(2, 5, 24, rows=7),
    "swiglu_linear": swiglu_linear(2, 5, 24, rows=7),
    "rotary_heads": rotary(2, 5, 3, 8),
    "linear_cross_entropy": cross_entropy(2, 5, 24, vocabulary=11),
}
PARTS = {
    **FEW,
    "add_norm-no_delta": add_norm(2, 5, 24, delta=False),
    "add_norm-1x1x1": add_norm(1, 1, 1, delta=True),
    "add_norm-1x70x1000": add_norm(1, 70, 1000, delta=False),
    "add_norm-eps": add_norm(2, 5, 24, delta=True, eps=0.5),
    "norm_linear-one_weight": norm_linear(2, 5, 24, delta=True, rows=(9,)),
    "norm_linear-no_delta": norm_linear(2, 5, 24, delta=False, rows=(9, 16, 3)),
    "norm_linear-1x1x7": norm_linear(1, 1, 7, delta=True, rows=(1, 2)),
    "norm_linear-6x100": norm_linear(6, 100, delta=False, rows=(31, 31, 31)),
    "linear-1x1x7": linear(1, 1, 7, rows=1),
    "swiglu_linear-1x1x7": swiglu_linear(1, 1, 7, rows=1),
    "rotary_heads-one_row": rotary(2, 1, 3, 8),
    "rotary_heads-one_head": rotary(2, 5, 1, 8),
    "rotary_heads-dim_2": rotary(1, 5, 3, 2),
    "rotary_heads-dim_6": rotary(2, 7, 5, 6),
    "rotary_heads-longer_table": rotary(2, 5, 3, 8, context=9),
    "rotary_heads-grouped": rotary(2, 5, 6, 8, kv_heads=2),
    "rotary_heads-norms": rotary(2, 5, 6, 8, kv_heads=2, normed=True),
    "norm_linear-biases": norm_linear(2, 5, 24, delta=True, rows=(9, 16, 3), biased=True),
    "linear-bias": linear(2, 5, 24, rows=7, biased=True),
    "linear_cross_entropy-vocabulary_1": cross_entropy(2, 5, 24, vocabulary=1),
    "linear_cross_entropy-vocabulary_5000": cross_entropy(2, 5, 24, vocabulary=5000),
    "linear_cross_entropy-1x1x7": cross_entropy(1, 1, 7, vocabulary=11),
}


def make(part, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(name, shape):
        x = torch.randn(shape, generator=generator)
        return (x / math.sqrt(shape[-1]) if name[0] == "w" else 1 + 0.3 * x if name == "gain" else x).to(dtype)

    return {name: random(name, shape) for name, shape in part.shapes.items()}


def make_seeds(part, inputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        outs = part.formula({name: x.double() for name, x in inputs.items()})
    return [torch.randn(x.shape, generator=generator).to(dtype) for x in outs]


def backward(outs, seeds, **options):
    used = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad and seed is not None]
    roots, given = zip(*((out, seed.to(out.dtype)) for out, seed in used), strict=True)
    torch.autograd.backward(roots, given, **options)


def differentiate(function, inputs, seeds, frozen=(), calls=1):
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.items()}
    for _ in range(calls):
        outs = function(leaves)
        backward(outs, seeds)
    found = {f"out{number}": out.detach() for number, out in enumerate(outs)}
    return found | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def in_double(part, inputs, seeds, **options):
    wide = {name: x.double() for name, x in inputs.items()}
    return differentiate(part.formula, wide, [None if s is None else s.double() for s in seeds], **options)


def compare(found, expected, limit):
    wrong = []
    for name, truth in expected.items():
        x = found[name]
        if truth is None or x is None:
            if any(y is not None and bool(y.any()) for y in (x, truth)):
                wrong.append(f"{name} is {'missing' if x is None else 'not nothing'}")
            continue
        if x.shape != truth.shape:
            wrong.append(f"{name} is {tuple(x.shape)} instead of {tuple(truth.shape)}")
            continue
        error, size = (x.double() - truth).norm().item(), truth.norm().item()
        if not error <= limit * size + 1e-9 * math.sqrt(x.numel()):
            wrong.append(f"{name} is off by {error:.2e} of {size:.2e}")
    assert not wrong, "\n".join(wrong)


def check(part, dtype=torch.float32, *, inputs=None, seeds=None, limit=None, **options):
    inputs = inputs or make(part, dtype)
    seeds = seeds or make_seeds(part, inputs, dtype)
    with poisoned_memory():
        found = differentiate(part.call, inputs, seeds, **options)
    compare(found, in_double(part, inputs, seeds, **options), limit or LIMITS[dtype])
    return found


def lay(x, layout):
    """Apply one of LAYOUTS, which expect more dimensions. The rows of a broadcast matrix stay different."""
    if x.dim() > 2 or (x.dim() == 2 and layout != "broadcast"):
        return LAYOUTS[layout](x)
    if layout == "broadcast":
        return x[..., :1].expand(x.shape)
    return x if layout == "contiguous" else LAYOUTS["every_other"](x)


def laid(name, layout, dtype=torch.float32, gain=""):
    """One of PARTS with inputs and gradients of a layout, and a gain of its own layout: part, inputs, seeds."""
    part = PARTS[name]
    if name == "rotary_heads":  # rotated in place, it cannot be broadcast; its gradients can
        part = rotary(2, 5, 3, 8, layout="contiguous" if layout == "broadcast" else layout)
        inputs = make(part, dtype)
    else:
        inputs = {key: lay(x, gain or layout if key == "gain" else layout) for key, x in make(part, dtype).items()}
    return part, inputs, [lay(x, layout) if x.dim() else x for x in make_seeds(part, inputs, dtype)]
