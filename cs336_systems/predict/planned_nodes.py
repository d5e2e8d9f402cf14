"""Memory of a planned block (kernels/fused/block.py), simulated as allocations: kept, recomputed and offloaded. No
torch.

Like the other nodes of fast_nodes.py, each method mirrors a method of the block, in the order in which it allocates.
"""

from functools import cached_property

from cs336_systems.config import RunConfig
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD, BlockPlan, Plan, is_fetched_late
from cs336_systems.predict.fast_nodes import ACTIVATIONS, TEMPORARY, PlainNodes
from cs336_systems.predict.simulated_memory import Block, Node, Tape

Kept = dict[str, Block]
"""Tensors of one block by kind; `activation_plan.KINDS` names them."""


class PlannedNodes(PlainNodes):
    """Blocks that follow a plan. Tensors that copies are reading or writing are in `sent` and `fetched`, by block and
    kind."""

    def __init__(self, config: RunConfig, *, packed: bool):
        super().__init__(config, packed=packed)
        self.sent: dict[tuple[int, str], Block] = {}
        self.fetched: dict[tuple[int, str], Block] = {}

    def planned_block(
        self, number: int, plan: Plan, x: Block, delta: Block | None, tape: Tape | None
    ) -> tuple[Block, Block]:
        own, kept = plan[number], dict[str, Block]()

        def store(kind: str, block: Block) -> None:
            if getattr(own, kind) == KEEP:
                kept[kind] = block
            elif getattr(own, kind) == OFFLOAD:
                self.sent[number, kind] = block

        y, kept["rstd"] = self._norm_operand(kept, "input"), self.new(self.rows, 4)
        stream = x if delta is None else self.stream(self.rw)
        store("input", stream)
        qkv = self._projected(y)
        del y
        store("qkv", qkv)
        out, kept["lse"] = self._attended()
        del qkv
        store("attention", out)
        middle, y, kept["middle_rstd"] = self._after_attention(kept)
        del out, stream
        store("middle", middle)
        gate_up = self._gate_and_up()
        del y
        store("gate_up", gate_up)
        gated = self._gated_operand(kept)
        result = self._times((self.wide,), self.d)
        del gated, gate_up
        self._release(number - 1)
        if tape is None:
            return middle, result
        has_delta = delta is not None
        before = plan[number - 1] if number else None
        tape.append(Node(lambda: self._planned_backward(number, own, before, kept, has_delta=has_delta), ()))
        return middle, result

    # -- forward, also as recomputation -------------------------------------------------------------------------------

    def _times(self, sizes: tuple[int, ...], width: int) -> Block:
        """Return the result of a matmul with weights of these sizes."""
        matrix = self.joined(*sizes)
        out = self.new(self.rows * width)
        del matrix
        return out

    def _projected(self, y: Block) -> Block:
        return self._times(self.qkv_sizes, self.q + 2 * self.kv)

    def _attended(self) -> tuple[Block, Block]:
        rotated = self._normed_heads()
        found = self.queries(), self.memory.new(self.label, self.t.logsumexp(), 1)
        del rotated
        return found

    def _normed_heads(self) -> Block | None:
        """Return queries and keys after their norms, if they have any; both passes compute these from `qkv`."""
        return self.new(self.rows * (self.q + self.kv)) if self.config.model.qk_norm else None

    def _norm_operand(self, kept: Kept, kind: str) -> Block:
        """Return the norm of the residual stream `kind` as a matmul operand."""
        return self.stream()

    def _gated_operand(self, kept: Kept) -> Block:
        """Return the result of the activation function as a matmul operand."""
        return self.new(self.rows * self.f)

    def _after_attention(self, kept: Kept) -> tuple[Block, Block, Block]:
        delta = self._attention_product(kept)
        y, rstd = self._norm_operand(kept, "middle"), self.new(self.rows, 4)
        middle = self.stream(self.rw)
        del delta
        return middle, y, rstd

    def _attention_product(self, kept: Kept) -> Block:
        return self._times((self.square,), self.d)

    def _gate_and_up(self) -> Block:
        return self._times((self.wide,) * 2, 2 * self.f)

    def _release(self, number: int) -> None:
        for key in [key for key in self.sent if key[0] == number]:
            del self.sent[key]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _planned_backward(
        self, number: int, plan: BlockPlan, before: BlockPlan | None, kept: Kept, *, has_delta: bool
    ) -> None:
        grads = self.take_grad_x(), self.take_grad()  # autograd holds them until the node is done
        for kind in plan.kinds(OFFLOAD):
            key = number, kind
            kept[kind] = self.sent.pop(key) if key in self.sent else self.fetched.pop(key)
        self.label = ACTIVATIONS
        fetches_late = before is not None and is_fetched_late(before, self.config.model)
        if before is not None and not fetches_late:
            self._fetch(number - 1, before)
        self._recompute(kept)
        self.label = TEMPORARY
        grad_gate_up = self._down_backward(kept)
        dx = self._planned_norm_backward(kept, "middle", (self.wide,) * 2)
        del grad_gate_up
        if before is not None and fetches_late:
            self._fetch(number - 1, before)
        grad_qkv = self._planned_attention_backward(kept)
        before_attention = dx
        dx = self._planned_norm_backward(kept, "input", self.qkv_sizes)
        del before_attention, grad_qkv, grads
        self.grad_x = dx
        self.grad = self._delta_gradient() if has_delta else None

    def _fetch(self, number: int, plan: BlockPlan) -> None:
        for kind in plan.kinds(OFFLOAD):
            if (number, kind) not in self.sent:
                self.fetched[number, kind] = self.new(self.rows, self.row_bytes[kind], ACTIVATIONS)

    @cached_property
    def row_bytes(self) -> dict[str, int]:
        """Bytes per token of each kind of tensor."""
        residual, qkv = self.d * self.rw, (self.q + 2 * self.kv) * self.s
        attention, wide = self.q * self.s, 2 * self.f * self.s
        return {"input": residual, "qkv": qkv, "attention": attention, "middle": residual, "gate_up": wide}

    def _recompute(self, kept: Kept) -> None:
        if "qkv" not in kept:
            y = self._normed(kept, "input")
            kept["qkv"] = self._projected(y)
            del y
        if "attention" not in kept:
            kept["attention"], kept["lse"] = self._attended()
        if "middle" in kept and "gate_up" in kept:
            return
        if "middle" in kept:
            y = self._normed(kept, "middle")
        else:
            kept["middle"], y, _rstd = self._after_attention(kept)
        if "gate_up" not in kept:
            kept["gate_up"] = self._gate_and_up()

    def _normed(self, kept: Kept, kind: str) -> Block:
        y, _rstd = self._norm_operand(kept, kind), self.new(self.rows, 4)
        return y

    def _down_backward(self, kept: Kept) -> tuple[Block, ...]:
        """Return the gradient of gate_up."""
        matrix = self.joined(self.wide)
        grad_gated = self.new(self.rows * self.f)
        del matrix
        grad_gate_up = self.new(self.rows * 2 * self.f)
        del kept["gate_up"]
        self.weight_gradients(self.wide)
        del grad_gated
        return (grad_gate_up,)

    def _planned_norm_backward(self, kept: Kept, kind: str, sizes: tuple[int, ...]) -> Block:
        matrix = self.joined(*sizes)
        grad_y = self.stream()
        del matrix
        dx = self._norm_gradients()
        del kept[kind]
        self.weight_gradients(*sizes)
        del grad_y
        return dx

    def _out_backward(self, kept: Kept) -> Block:
        matrix = self.joined(self.square)
        grad_out = self.queries()
        del matrix
        self.weight_gradients(self.square)
        return grad_out

    def _planned_attention_backward(self, kept: Kept) -> Block:
        out = kept.pop("attention")
        grad = None if self.rw == self.s else self.stream()
        grad_out = self._out_backward(kept)
        del grad
        rotated = self._normed_heads()
        grads = [self.heads(number) for number in range(3)]
        qkv = kept.pop("qkv")
        if rotated is None:
            del qkv
        del kept["lse"], out, grad_out, rotated
        grad_qkv = self.qkv_gradient()
        grads.clear()
        return grad_qkv
