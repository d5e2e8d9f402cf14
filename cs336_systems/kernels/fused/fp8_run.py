"""A Transformer block's forward and backward pass with FP8 matmuls. Attention, the residual stream and the forward
matmul of qkv are not in FP8: in the latter it would cause half of the error of all gradients (docs/FP8.md).

Weights are cast by one pass over the bf16 weights before each matmul, so FP8 copies are not stored. Backward casts the
bf16 activations that forward kept again, with forward's scales, which take 16 bytes per token.
"""

from functools import partial
from typing import Any

from torch import Tensor

from cs336_systems.kernels.fused import fp8, nodes
from cs336_systems.kernels.fused.block_run import Run

OPERANDS = ("input", "attention", "middle", "gated")
"""Inputs of the four matmuls: norm, output of attention, norm, output of the activation function."""
MATMULS = {"input": "qkv", "attention": "out", "middle": "gate_up", "gated": "down"}
"""Operand -> the matmul's name in `TENSORS`."""
TENSORS = (
    *OPERANDS,
    *(f"{kind} of {matmul}" for kind in ("weight", "gradient", "transposed gradient") for matmul in MATMULS.values()),
)
"""Tensors of a block in FP8, in the order of their counters."""


class Fp8Run(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.scales: dict[str, Tensor] = {}
        """FP8 scales of each operand's rows, by name in OPERANDS."""
        self.counts = True

    def _lost(self, tensor: str) -> Tensor | None:
        """Return the counters of a tensor; None while it is recomputed."""
        return None if self.setting.lost is None or not self.counts else self.setting.lost[TENSORS.index(tensor)]

    # -- forward ------------------------------------------------------------------------------------------------------

    def _normed(self, kind: str, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Any, Tensor]:
        dtype = self.dtype if kind == "input" else fp8.E4M3
        found = fp8.add_norm(x, delta, self._gain(kind), self.setting.eps, self._lost(kind), dtype)
        self.scales[kind] = found.scale
        y = found.y if kind == "input" else fp8.Rows(found.y, found.scale)
        return found.total, y, found.rstd

    def _gated(self, gate_up: Tensor) -> fp8.Rows:
        found = fp8.swiglu(gate_up, self._lost("gated"))
        self.scales["gated"] = found.scale
        return found

    def _rows(self, out: Tensor) -> fp8.Rows:
        found = fp8.quantize(out, self._lost("attention"))
        self.scales["attention"] = found.scale
        return found

    def _product(self, operand: fp8.Rows | Tensor, *names: str) -> Tensor:
        if isinstance(operand, Tensor):
            if self.setting.weight_scales is not None:
                self._weight(*names)  # for its scale, which backward needs
            return super()._product(operand, *names)
        biases = self._biases(names)
        bias = nodes.joined(biases, self.dtype) if biases else None
        return fp8.matmul(operand, self._weight(*names), bias)

    def _weight(self, *names: str) -> fp8.Rows:
        rows = fp8.quantize(self._matrix(*names), self._lost(f"weight of {_matmul_of(names)}"))
        if self.setting.weight_scales is not None and self.counts:
            fp8.largest_scale(rows.scale, out=self._weight_scale(names))
        return rows

    def _weight_scale(self, names: tuple[str, ...]) -> Tensor:
        assert self.setting.weight_scales is not None, "a pass with gradients has them"
        return self.setting.weight_scales[tuple(MATMULS.values()).index(_matmul_of(names))]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _recompute(self) -> None:
        self.counts = False
        super()._recompute()
        self.counts = True

    def _down_backward(self, grad: Tensor) -> fp8.Rows:
        rows = fp8.quantize(grad, self._lost("gradient of down"))
        grad_gated = self._times_weight(rows, "down")
        lost = self._lost("gradient of gate_up")
        grad_gate_up, gated = fp8.swiglu_backward(grad_gated, self.kept.pop("gate_up"), self.scales["gated"], lost)
        del grad_gated
        by_columns = fp8.transposed(gated)
        del gated
        self._operand_gradients("gated", ("down",), rows, by_columns)
        return grad_gate_up

    def _norm_backward(
        self, kind: str, names: tuple[str, ...], grad: fp8.Rows | Tensor, grad_stream: Tensor | None
    ) -> Tensor:
        rows = fp8.quantize(grad, self._lost("gradient of qkv")) if isinstance(grad, Tensor) else grad
        del grad
        grad_y = self._times_weight(rows, *names)
        x = self.kept.pop(kind)
        dx = self._through_norm(kind, grad_y, grad_stream, x, recompute_y=False)
        del grad_y
        rstd = self.rstd if kind == "input" else self.middle_rstd
        y = fp8.transposed_norm(x, rstd, self._gain(kind), self.scales[kind])
        del x
        self._operand_gradients(kind, names, rows, y)
        return dx

    def _out_backward(self, grad: Tensor, out: Tensor) -> Tensor:
        rows = fp8.quantize(grad, self._lost("gradient of out"))
        grad_out = self._times_weight(rows, "out")
        self._operand_gradients("attention", ("out",), rows, fp8.transposed_rows(out, self.scales["attention"]))
        return grad_out

    def _times_weight(self, grad: fp8.Rows, *names: str) -> Tensor:
        """Return the gradient of a matmul's input, given that of its output."""
        return fp8.matmul(grad, fp8.transposed_weight(self._matrix(*names), self._weight_scale(names)[0, 0]))

    def _operand_gradients(self, operand: str, names: tuple[str, ...], grad: fp8.Rows, x: Tensor) -> None:
        """Deposit the gradients of weights. x: the transposed values of their operand."""
        lost = self._lost(f"transposed gradient of {MATMULS[operand]}")
        self._deposit_products(names, partial(_gradient_product, grad, x, self.scales.pop(operand), lost))


def _matmul_of(names: tuple[str, ...]) -> str:
    return {"q": "qkv", "gate": "gate_up"}.get(names[0], names[0])


def _gradient_product(
    grad: fp8.Rows, x: Tensor, scale: Tensor, lost: Tensor | None, out: Tensor | None, *, adds: bool
) -> Tensor:
    """Compute a `nodes.GradientProduct`. cuBLAS cannot accumulate into `out` in FP8, so the addition is a separate
    pass."""
    if out is None or not adds:
        return fp8.weight_gradient(grad, x, scale, out, lost)
    return out.add_(fp8.weight_gradient(grad, x, scale, None, lost))
