"""A Transformer block as one autograd node whose plan says what is kept, recomputed or offloaded for backward.

The computation is that of the nodes in nodes.py, bit for bit. Backward frees each tensor after its last use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.kernels import ranges
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.operators import OPERATORS, is_traced, kernels_for
from cs336_systems.kernels.fused import nodes, pointwise
from cs336_systems.kernels.fused.host_memory import HostMemory
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD, BlockPlan

CAUSAL = Band(hi=0)
RECOMPUTED = "activations, recomputed"
"""Name of a tensor in memory profiles."""


class Weights(NamedTuple):
    gain: Tensor
    """Of the norm before attention."""
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    feed_forward_gain: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_gain: Tensor | None = None
    """Of the norm of each head's queries."""
    k_gain: Tensor | None = None

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in (self.q_bias, self.k_bias, self.v_bias) if bias is not None]


class Setting(NamedTuple):
    """All that a block needs besides its input and weights."""

    number: int
    plan: BlockPlan
    before: BlockPlan | None
    """The plan of the block before, whose offloaded tensors this block fetches in backward."""
    fetches_late: bool
    """They are fetched after the feed-forward network's backward."""
    host: HostMemory
    attention: str
    """A fused implementation of attention."""
    heads: int
    cos: Tensor
    sin: Tensor
    eps: float


def planned_block(x: Tensor, delta: Tensor | None, setting: Setting, weights: Weights) -> tuple[Tensor, Tensor]:
    """The block's output as residual stream and what is to be added to it, as `Block.fused` returns it."""
    dtype = nodes.matmul_dtype(x)
    with nodes.no_autocast(x):
        return _PlannedBlock.apply(x, delta, setting, dtype, *weights)


class _PlannedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, setting: Setting, dtype: torch.dtype, *weights: Any) -> Any:
        run = _Run(setting, Weights(*weights), dtype, x.shape)
        middle, out = run.forward(nodes.as_rows(x), None if delta is None else nodes.as_rows(delta))
        ctx.run, ctx.has_delta = run, delta is not None
        ctx.set_materialize_grads(False)
        return middle.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_middle: Tensor | None, grad_out: Tensor | None) -> Any:
        run: _Run = ctx.run
        ctx.run = None
        if run is None:
            raise RuntimeError("a planned block supports one backward pass: its activations are freed on the way")
        if grad_out is None:
            grad_out = torch.zeros(run.shape, dtype=run.dtype, device=run.setting.cos.device)
        with nodes.no_autocast(grad_out):
            dx, grads = run.backward(grad_middle, grad_out, ctx.needs_input_grad[4:])
        dx = dx.view(run.shape)
        return dx, dx if ctx.has_delta else None, None, None, *grads


@dataclass
class _Run:
    """One pass of a block over a batch: what forward has left for backward."""

    setting: Setting
    weights: Weights
    dtype: torch.dtype
    shape: torch.Size

    def __post_init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.number_of_pass = self.setting.host.passes

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, eps = self.weights, self.setting.eps
        stream, y, self.rstd = pointwise.add_norm(x, delta, weights.gain, eps, self.dtype)
        self._store("input", stream)
        qkv = self._projections(y)
        del y
        self._store("qkv", qkv)
        out = self._attend(qkv)
        del qkv
        self._store("attention", out)
        middle, y, self.middle_rstd = self._after_attention(stream, out)
        del out, stream
        self._store("middle", middle)
        gate_up = torch.mm(y, self._matrix("gate", "up").t())
        del y
        self._store("gate_up", gate_up)
        result = torch.mm(pointwise.swiglu(gate_up), self._matrix("down").t())
        self.setting.host.release(self.setting.number - 1)
        return middle, result

    def _store(self, kind: str, tensor: Tensor) -> None:
        """Keep, offload or drop a tensor. The node's own output is stored without its link to the node."""
        choice = getattr(self.setting.plan, kind)
        if choice == KEEP:
            self.kept[kind] = tensor.detach()
        elif choice == OFFLOAD:
            self.setting.host.send((self.setting.number, kind), tensor.detach())

    def _projections(self, y: Tensor) -> Tensor:
        """q, k and v, rotated unless their norms come first, which backward computes again."""
        qkv = nodes.product_with(y, self._matrix("q", "k", "v"), self.weights.biases)
        if self.weights.q_gain is None:
            pointwise.rotate_(self._by_head(qkv), self.setting.cos, self.setting.sin, self.setting.heads)
        return qkv

    def _by_head(self, rows: Tensor) -> Tensor:
        """(rows, heads * dim) -> (batch, sequence, heads, dim)."""
        return rows.view(*self.shape[:-1], -1, self.setting.cos.shape[-1])

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        weights, setting, parts = self.weights, self.setting, self._by_head(qkv)
        q, k, v = pointwise.heads_of(parts, setting.heads)
        if weights.q_gain is not None and weights.k_gain is not None:
            gains = weights.q_gain, weights.k_gain
            normed = pointwise.norm_rotate(parts, *gains, setting.eps, setting.cos, setting.sin, setting.heads)
            q, k = normed[:, :, : setting.heads], normed[:, :, setting.heads :]
        return tuple(t.transpose(1, 2) for t in (q, k, v))

    def _attend(self, qkv: Tensor) -> Tensor:
        """The output of attention, (rows, heads * dim); its logsumexp is kept."""
        q, k, v = self._heads(qkv)
        out, self.lse = self._kernels(q, k, v).forward(q, k, v, self._scale, CAUSAL)
        return nodes.as_rows(out.transpose(1, 2).flatten(-2))

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        name = self.setting.attention
        return OPERATORS[name] if is_traced(q) else kernels_for(name, q, k, v, CAUSAL)

    @property
    def _scale(self) -> float:
        return self.setting.cos.shape[-1] ** -0.5

    def _after_attention(self, stream: Tensor, out: Tensor) -> pointwise.AddNorm:
        delta = torch.mm(out, self._matrix("out").t())
        return pointwise.add_norm(stream, delta, self.weights.feed_forward_gain, self.setting.eps, self.dtype)

    def _matrix(self, *names: str) -> Tensor:
        """The weights of these names as one matrix."""
        return nodes.joined([getattr(self.weights, name) for name in names], self.dtype)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, grad_middle: Tensor | None, grad_out: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Any]]:
        """The gradients of the input and of all weights; `needed` says which weights need one."""
        self.needs = dict(zip(Weights._fields, needed, strict=True))
        self.grads: dict[str, Tensor | None] = {}
        self._take()
        if not self.setting.fetches_late:
            self._fetch()
        self._recompute()
        grad_gate_up = self._down_backward(nodes.as_rows(grad_out))
        dx = self._norm_backward("middle", ("gate", "up"), grad_gate_up, grad_middle)
        del grad_gate_up
        if self.setting.fetches_late:
            self._fetch()
        grad_qkv = self._attention_backward(dx.to(self.dtype))
        dx = self._norm_backward("input", ("q", "k", "v"), grad_qkv, dx)
        self._bias_gradients(grad_qkv)
        return dx, [self.grads.get(name) for name in Weights._fields]

    def _down_backward(self, grad: Tensor) -> Tensor:
        """The gradient of gate_up."""
        grad_gated = torch.mm(grad, self._matrix("down"))
        grad_gate_up = pointwise.swiglu_backward(grad_gated, self.kept.pop("gate_up"))
        gated = grad_gated  # swiglu_backward has overwritten it
        self._weight_gradients(("down",), grad, gated)
        return grad_gate_up

    def _norm_backward(self, kind: str, names: tuple[str, ...], grad: Tensor, grad_stream: Tensor | None) -> Tensor:
        """The gradient of the residual stream `kind` from that of the matmul of its norm with the weights `names`."""
        gain_name, rstd = ("gain", self.rstd) if kind == "input" else ("feed_forward_gain", self.middle_rstd)
        gain = getattr(self.weights, gain_name)
        grad_y = torch.mm(grad, self._matrix(*names))
        stream = None if grad_stream is None else nodes.as_rows(grad_stream)
        dx, grad_gain = pointwise.add_norm_backward(grad_y, stream, self.kept.pop(kind), rstd, gain, recompute_y=True)
        self.grads[gain_name] = nodes.deposit(gain, grad_gain) if self.needs[gain_name] else None
        y = grad_y  # add_norm_backward has overwritten it
        self._weight_gradients(names, grad, y)
        return dx

    def _weight_gradients(self, names: tuple[str, ...], grad: Tensor, x: Tensor) -> None:
        weights, needed = [getattr(self.weights, name) for name in names], [self.needs[name] for name in names]
        self.grads.update(zip(names, nodes.weight_gradients(weights, needed, grad, x), strict=True))

    def _bias_gradients(self, grad: Tensor) -> None:
        if biases := self.weights.biases:
            names = ("q_bias", "k_bias", "v_bias")
            needed = [self.needs[name] for name in names]
            self.grads.update(zip(names, nodes.bias_gradients(biases, needed, grad), strict=True))

    def _attention_backward(self, grad: Tensor) -> Tensor:
        """The gradient of qkv before its rotation from that of the projection of attention's output."""
        setting, out = self.setting, self.kept.pop("attention")
        grad_out = torch.mm(grad, self._matrix("out"))
        self._weight_gradients(("out",), grad, out)
        del grad
        qkv = self.kept.pop("qkv")
        q, k, v = self._heads(qkv)
        by_head = [self._by_head(t).transpose(1, 2) for t in (grad_out, out)]
        del grad_out, out
        dq, dk, dv = self._kernels(q, k, v).backward(
            by_head[0], None, q, k, v, by_head[1], self.lse, self._scale, CAUSAL
        )
        del q, k, v, by_head, self.lse
        rows_first = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        gains = self.weights.q_gain, self.weights.k_gain
        if gains[0] is None or gains[1] is None:
            del qkv
            return pointwise.rotate_backward(*rows_first, setting.cos, setting.sin).view(len(self.rstd), -1)
        found = pointwise.norm_rotate_backward(
            *rows_first, self._by_head(qkv), gains[0], gains[1], setting.eps, setting.cos, setting.sin
        )
        for name, gain, gradient in zip(("q_gain", "k_gain"), gains, found[1:], strict=True):
            assert gain is not None
            self.grads[name] = nodes.deposit(gain, gradient) if self.needs[name] else None
        return found.qkv.view(len(self.rstd), -1)

    def _take(self) -> None:
        """Take this block's own tensors back from the host."""
        setting = self.setting
        if setting.plan.offloads:
            setting.host.require_last_pass(self.number_of_pass)
        for kind in setting.plan.kinds(OFFLOAD):
            self.kept[kind] = setting.host.take((setting.number, kind))

    def _fetch(self) -> None:
        """Start to fetch the tensors of the block before."""
        setting = self.setting
        if setting.before is not None:
            setting.host.fetch((setting.number - 1, kind) for kind in setting.before.kinds(OFFLOAD))

    def _recompute(self) -> None:
        """Recompute what was neither kept nor offloaded, in the order of forward."""
        kept, weights, eps = self.kept, self.weights, self.setting.eps
        stream = kept["input"]
        if "qkv" not in kept:
            y = pointwise.add_norm(stream, None, weights.gain, eps, self.dtype).y
            kept["qkv"] = ranges.name(self._projections(y), RECOMPUTED)
            del y
        if "attention" not in kept:
            kept["attention"] = ranges.name(self._attend(kept["qkv"]), RECOMPUTED)
        if "middle" in kept and "gate_up" in kept:
            return
        if "middle" in kept:
            y = pointwise.add_norm(kept["middle"], None, weights.feed_forward_gain, eps, self.dtype).y
        else:
            kept["middle"], y, _ = self._after_attention(stream, kept["attention"])
            ranges.name(kept["middle"], RECOMPUTED)
        if "gate_up" not in kept:
            kept["gate_up"] = ranges.name(torch.mm(y, self._matrix("gate", "up").t()), RECOMPUTED)
