"""A Transformer block's forward and backward pass, whose activations are kept, recomputed or offloaded.

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
"""Label of recomputed tensors in memory profiles."""
GAINS = {"input": "gain", "middle": "feed_forward_gain"}
"""Name of a residual stream -> name of the gain of its norm."""


class Weights(NamedTuple):
    gain: Tensor
    """Gain of the norm before attention."""
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
    """Gain of the norm of each head's queries."""
    k_gain: Tensor | None = None

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in (self.q_bias, self.k_bias, self.v_bias) if bias is not None]


class Setting(NamedTuple):
    """All inputs of a block other than activations and weights."""

    number: int
    plan: BlockPlan
    before: BlockPlan | None
    """The plan of the block before, whose offloaded tensors this block fetches in backward."""
    fetches_late: bool
    """True if they are fetched after the feed-forward network's backward."""
    host: HostMemory
    attention: str
    """Name of a fused implementation of attention."""
    heads: int
    cos: Tensor
    sin: Tensor
    eps: float
    fp8: bool = False
    """True if matmuls with the block's weights are in FP8."""
    lost: Tensor | None = None
    """Counters of the elements that became 0 in FP8, for each of fp8_run.TENSORS; None disables counting."""
    weight_scales: Tensor | None = None
    """Filled in forward, for backward: the largest scale of each weight (`fp8.largest_scale`), by fp8_run.MATMULS."""


@dataclass
class Run:
    """A forward and backward pass in which the operands of `_product`, from `_normed`, `_gated` and `_rows`, are
    tensors of the matmuls' dtype; `Fp8Run` has FP8 operands."""

    setting: Setting
    weights: Weights
    dtype: torch.dtype
    shape: torch.Size

    def __post_init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.number_of_pass = self.setting.host.passes

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        stream, y, self.rstd = self._normed("input", x, delta)
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
        gate_up = self._product(y, "gate", "up")
        del y
        self._store("gate_up", gate_up)
        result = self._product(self._gated(gate_up), "down")
        self.setting.host.release(self.setting.number - 1)
        return middle, result

    def _normed(self, kind: str, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Any, Tensor]:
        """Return the residual stream `kind`, x + delta; its norm as a matmul operand; and 1 / RMS of its rows."""
        return pointwise.add_norm(x, delta, self._gain(kind), self.setting.eps, self.dtype)

    def _gain(self, kind: str) -> Tensor:
        return getattr(self.weights, GAINS[kind])

    def _gated(self, gate_up: Tensor) -> Any:
        """Return the activation function's result as a matmul operand."""
        return pointwise.swiglu(gate_up)

    def _rows(self, out: Tensor) -> Any:
        """Return attention's output as a matmul operand."""
        return out

    def _product(self, operand: Any, *names: str) -> Tensor:
        """Multiply an operand with the weights of these names, and add their biases."""
        return nodes.product_with(operand, self._matrix(*names), self._biases(names))

    def _biases(self, names: tuple[str, ...]) -> list[Tensor]:
        return self.weights.biases if "q" in names else []

    def _store(self, kind: str, tensor: Tensor) -> None:
        """Keep, offload or drop a tensor. It is stored detached: the block's output would refer to its own autograd
        node."""
        choice = getattr(self.setting.plan, kind)
        if choice == KEEP:
            self.kept[kind] = tensor.detach()
        elif choice == OFFLOAD:
            self.setting.host.send((self.setting.number, kind), tensor.detach())

    def _projections(self, y: Any) -> Tensor:
        """Return q, k and v. They are rotated here unless norms precede the rotation: then backward recomputes norms
        and rotation."""
        qkv = self._product(y, "q", "k", "v")
        if self.weights.q_gain is None:
            pointwise.rotate_(self._by_head(qkv), self.setting.cos, self.setting.sin, self.setting.heads)
        return qkv

    def _by_head(self, rows: Tensor) -> Tensor:
        """Return a view of (rows, heads * dim) as (batch, sequence, heads, dim)."""
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
        """Return the output of attention, (rows, heads * dim), and keep its logsumexp."""
        q, k, v = self._heads(qkv)
        out, self.lse = self._kernels(q, k, v).forward(q, k, v, self._scale, CAUSAL)
        return nodes.as_rows(out.transpose(1, 2).flatten(-2))

    def _kernels(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        name = self.setting.attention
        return OPERATORS[name] if is_traced(q) else kernels_for(name, q, k, v, CAUSAL)

    @property
    def _scale(self) -> float:
        return self.setting.cos.shape[-1] ** -0.5

    def _after_attention(self, stream: Tensor, out: Tensor) -> tuple[Tensor, Any, Tensor]:
        return self._normed("middle", stream, self._product(self._rows(out), "out"))

    def _matrix(self, *names: str) -> Tensor:
        """Return the weights of these names as one matrix."""
        return nodes.joined([getattr(self.weights, name) for name in names], self.dtype)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, grad_middle: Tensor | None, grad_out: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Any]]:
        """Return the gradients of the input and of all weights; `needed` says which weights need one."""
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

    def _down_backward(self, grad: Tensor) -> Any:
        """Return the gradient of gate_up in the form that `_norm_backward` takes."""
        grad_gated = torch.mm(grad, self._matrix("down"))
        grad_gate_up = pointwise.swiglu_backward(grad_gated, self.kept.pop("gate_up"))
        gated = grad_gated  # swiglu_backward has overwritten it
        self._weight_gradients(("down",), grad, gated)
        return grad_gate_up

    def _norm_backward(self, kind: str, names: tuple[str, ...], grad: Any, grad_stream: Tensor | None) -> Tensor:
        """Return the gradient of the residual stream `kind`, given that of the matmul of its norm with the weights
        `names`."""
        grad_y = torch.mm(grad, self._matrix(*names))
        dx = self._through_norm(kind, grad_y, grad_stream, self.kept.pop(kind), recompute_y=True)
        y = grad_y  # add_norm_backward has overwritten it
        self._weight_gradients(names, grad, y)
        return dx

    def _through_norm(
        self, kind: str, grad_y: Tensor, grad_stream: Tensor | None, x: Tensor, *, recompute_y: bool
    ) -> Tensor:
        """Return the gradient of the residual stream x, given that of its norm; deposit the gradient of the gain."""
        rstd, gain = self.rstd if kind == "input" else self.middle_rstd, self._gain(kind)
        stream = None if grad_stream is None else nodes.as_rows(grad_stream)
        dx, grad_gain = pointwise.add_norm_backward(grad_y, stream, x, rstd, gain, recompute_y=recompute_y)
        self.grads[GAINS[kind]] = nodes.deposit(gain, grad_gain) if self.needs[GAINS[kind]] else None
        return dx

    def _weight_gradients(self, names: tuple[str, ...], grad: Tensor, x: Tensor) -> None:
        self._deposit_products(names, nodes.gradient_product(grad, x))

    def _deposit_products(self, names: tuple[str, ...], product: nodes.GradientProduct) -> None:
        weights, needed = [getattr(self.weights, name) for name in names], [self.needs[name] for name in names]
        self.grads.update(zip(names, nodes.weight_gradients(weights, needed, product, self.dtype), strict=True))

    def _bias_gradients(self, grad: Tensor) -> None:
        if biases := self.weights.biases:
            names = ("q_bias", "k_bias", "v_bias")
            needed = [self.needs[name] for name in names]
            self.grads.update(zip(names, nodes.bias_gradients(biases, needed, grad), strict=True))

    def _out_backward(self, grad: Tensor, out: Tensor) -> Tensor:
        """Return the gradient of attention's output, given that of its projection."""
        grad_out = torch.mm(grad, self._matrix("out"))
        self._weight_gradients(("out",), grad, out)
        return grad_out

    def _attention_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of qkv before its rotation, given that of the projection of attention's output."""
        setting, out = self.setting, self.kept.pop("attention")
        grad_out = self._out_backward(grad, out)
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
        """Recompute the tensors that were neither kept nor offloaded, in the order of forward."""
        kept = self.kept
        stream = kept["input"]
        if "qkv" not in kept:
            y = self._normed("input", stream, None)[1]
            kept["qkv"] = ranges.name(self._projections(y), RECOMPUTED)
            del y
        if "attention" not in kept:
            kept["attention"] = ranges.name(self._attend(kept["qkv"]), RECOMPUTED)
        if "middle" in kept and "gate_up" in kept:
            return
        if "middle" in kept:
            y = self._normed("middle", kept["middle"], None)[1]
        else:
            kept["middle"], y, _ = self._after_attention(stream, kept["attention"])
            ranges.name(kept["middle"], RECOMPUTED)
        if "gate_up" not in kept:
            kept["gate_up"] = ranges.name(self._product(y, "gate", "up"), RECOMPUTED)
