"""Memory of a block whose matmuls are in FP8 (kernels/fused/fp8_run.py), simulated as allocations. No torch."""

from cs336_systems.predict.planned_nodes import Kept, PlannedNodes
from cs336_systems.predict.simulated_memory import Block

COUNTED_TENSORS, SLOTS = 16, 32
"""Equal to the numbers of fp8_run.TENSORS and fp8.SLOTS; a test compares them."""


class Fp8Nodes(PlannedNodes):
    """A block in FP8. Operands take one byte per element, and a scale of four bytes per row; weights are cast before
    each matmul. The forward matmul of qkv has 16-bit operands."""

    @property
    def fp8(self) -> bool:
        return self.config.precision == "fp8"

    def counters(self) -> list[Block]:
        """Allocate the counters of lost elements and of work, and 32 bytes of scales for each matmul."""
        layers = self.config.model.num_layers
        return [self.new(size, 8, "buffers") for size in (layers * COUNTED_TENSORS * SLOTS, 2, layers * 16)]

    def _operand(self, width: int) -> tuple[Block, Block]:
        """Allocate the values and scales of a matrix with a row for each token."""
        return self.new(self.rows * width, 1), self.new(self.rows, 4)

    def _norm_operand(self, kept: Kept, kind: str) -> Block:
        if not self.fp8:
            return super()._norm_operand(kept, kind)
        if kind == "input":  # its matmul of forward is not in FP8
            y, kept["input scale"] = self.new(self.rows * self.d), self.new(self.rows, 4)
            return y
        y, kept[f"{kind} scale"] = self._operand(self.d)
        return y

    def _projected(self, y: Block) -> Block:
        if not self.fp8:
            return super()._projected(y)
        self._cast_weight(self.qkv_sizes, self.q + 2 * self.kv)
        return super()._times(self.qkv_sizes, self.q + 2 * self.kv)

    def _gated_operand(self, kept: Kept) -> Block:
        if not self.fp8:
            return super()._gated_operand(kept)
        gated, kept["gated scale"] = self._operand(self.f)
        return gated

    def _attention_product(self, kept: Kept) -> Block:
        if not self.fp8:
            return super()._attention_product(kept)
        out, kept["attention scale"] = self._operand(self.q)
        product = self._times((self.square,), self.d)
        del out
        return product

    def _times(self, sizes: tuple[int, ...], width: int) -> Block:
        if not self.fp8:
            return super()._times(sizes, width)
        weight = self._cast_weight(sizes, width)
        out = self.new(self.rows * width)
        del weight
        return out

    def _cast_weight(self, sizes: tuple[int, ...], width: int) -> tuple[Block, Block]:
        """Allocate the values and scales of a weight with `width` rows."""
        matrix = self.joined(*sizes)
        found = self.new(sum(sizes), 1), self.new(width, 4)
        del matrix
        return found

    def _times_transposed(self, sizes: tuple[int, ...], d_in: int) -> Block:
        """Compute the gradient of a matmul's input."""
        matrix = self.joined(*sizes)
        scale, by_columns = self.new(d_in, 4), self.new(sum(sizes), 1)
        del matrix
        out = self.new(self.rows * d_in)
        del by_columns, scale
        return out

    def _fp8_weight_gradients(self, sizes: tuple[int, ...], d_out: int) -> None:
        largest = self.new(8, 4)
        by_columns = self.new(self.rows * d_out, 1)
        self.weight_gradients(*sizes)
        del largest, by_columns

    def _down_backward(self, kept: Kept) -> tuple[Block, ...]:
        if not self.fp8:
            return super()._down_backward(kept)
        grad = self._operand(self.d)
        grad_gated = self._times_transposed((self.wide,), self.f)
        grad_gate_up = self._operand(2 * self.f)
        gated = self.new(self.rows * self.f, 1)
        del kept["gate_up"], grad_gated
        by_columns = self.new(self.rows * self.f, 1)
        del gated
        self._fp8_weight_gradients((self.wide,), self.d)
        del by_columns, kept["gated scale"], grad
        return grad_gate_up

    def _planned_norm_backward(self, kept: Kept, kind: str, sizes: tuple[int, ...]) -> Block:
        if not self.fp8:
            return super()._planned_norm_backward(kept, kind, sizes)
        width = sum(sizes) // self.d
        grad = self._operand(width) if kind == "input" else None
        grad_y = self._times_transposed(sizes, self.d)
        dx = self._norm_gradients()
        del grad_y
        by_columns = self.new(self.rows * self.d, 1)
        del kept[kind]
        self._fp8_weight_gradients(sizes, width)
        del by_columns, grad, kept[f"{kind} scale"]
        return dx

    def _out_backward(self, kept: Kept) -> Block:
        if not self.fp8:
            return super()._out_backward(kept)
        grad = self._operand(self.d)
        grad_out = self._times_transposed((self.square,), self.q)
        by_columns = self.new(self.rows * self.q, 1)
        self._fp8_weight_gradients((self.square,), self.d)
        del by_columns, kept["attention scale"], grad
        return grad_out
