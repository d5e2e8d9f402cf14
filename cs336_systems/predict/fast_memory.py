"""Peak memory of the fast step, computed from the configuration in milliseconds: no torch, no GPU.

`fast_estimate` simulates one steady-state step, for every subset of `config.FAST_PARTS`, as it runs on a GPU. Tests
compare it with a trace of the real operators (memory_trace.py) and with an H200. The memory of blocks between the first
and the last is extrapolated.
"""

from collections import Counter
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.activation_plan import KEEP, KEEP_ALL, KINDS, Plan, is_managed
from cs336_systems.predict.fast_nodes import ACTIVATIONS, CASTS, GRADIENTS, PACK_ALIGNMENT, TEMPORARY
from cs336_systems.predict.fp8_nodes import Fp8Nodes
from cs336_systems.predict.memory_model import (
    ROUNDING,
    Breakdown,
    MemoryEstimate,
    Tensors,
    estimate,
    simulated_parts,
    workspace,
)
from cs336_systems.predict.simulated_memory import Block, Memory, Node, Repetitions, Snapshot, Tape

CHUNK_BYTES, LOGIT_ALIGNMENT = 512 << 20, 64
"""Equal to the constants of kernels/fused/nodes.py; a test compares them."""
LOGITS = "logits and loss"


def fast_estimate(config: RunConfig, plan: Plan | None = None) -> MemoryEstimate:
    """Return the peak of one steady-state fast step, whose blocks follow the plan, if given."""
    memory = FastStep(config, plan).run()
    parts = {label: size for label, size in memory.peak_parts.items() if size}
    if beyond := memory.peak - sum(parts.values()):
        parts[ROUNDING] = beyond
    return MemoryEstimate(parts, memory.peak, memory.where)


class FastStep(Fp8Nodes):
    """Simulates one step."""

    BLOCKS: tuple[int, int] = (3, 1)
    BLOCKS_OF_GROUP: tuple[int, int] = (2, 1)
    GROUPS: tuple[int, int] = (2, 1)
    """Number of repetitions that are simulated at the beginning and at the end: of blocks, of blocks in a recomputed
    group, and of such groups."""

    def __init__(self, config: RunConfig, plan: Plan | None = None):
        self.parts = simulated_parts(config)
        self.plan = plan
        super().__init__(config, packed="optimizer" in self.parts)
        self.fused = "kernels" in self.parts
        self.x: Block | None = None
        self.delta: Block | None = None
        """The branch output that is still to be added to the residual stream."""

    def run(self) -> Memory:
        held = self._held()
        memory, mode = self.memory, self.config.mode
        memory.phase = "forward"
        tape = None if mode == "inference" else Tape()
        result = self._forward(tape)
        if mode in ("forward-backward", "train-step"):
            assert tape is not None
            memory.phase = "backward"
            del result
            self.label = TEMPORARY
            tape.run_backward()
            memory.phase = "optimizer"
            memory.update_peak()
        del held
        return memory

    # -- memory that a step finds -------------------------------------------------------------------------------------

    def _held(self) -> list[Block]:
        t, memory = self.t, self.memory
        held = [memory.new("buffers", t.buffers(), 1), memory.new("inputs", t.inputs(), 1)]
        held.append(memory.new("workspace", workspace(self.config), 1))
        if self.fp8:
            held += self.counters()
        if self.packed:
            return held + packed_state(memory, self.config)
        trains = self.config.mode == "train-step"
        sizes = {"parameters": t.parameters(), "optimizer state": t.optimizer_state() if trains else 0}
        rounding = t.parameter_rounding * (3 if trains else 1)
        memory.add(Snapshot(Counter(sizes), sum(sizes.values()) + rounding), 1)
        return held

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, tape: Tape | None) -> Block | None:
        """Run the forward pass; return the logits, unless they are formed in chunks."""
        if tape is not None:
            tape.append(Node(self._embedding_backward, ()))
        self.x = self.stream(self.rw)
        group = self.config.checkpoint_blocks
        if self.plan is not None and tape is not None:
            self._planned_blocks_forward(self.plan, tape)
        elif group and tape is not None:
            self._groups_forward(group, tape)
        else:
            self._blocks_forward(self.config.model.num_layers, tape)
        hidden = self._last_norm(tape)
        self.x = self.delta = None
        if "loss" in self.parts:
            assert tape is not None
            self._fused_loss(hidden, tape)
            self._leave_autocast()
            return None
        logits = self._head(hidden, tape)
        del hidden
        self._leave_autocast()
        if self.config.mode in ("forward-backward", "train-step"):
            assert tape is not None
            self.memory.phase = "loss"
            self._loss(logits, tape)
            return None
        return logits

    def _block(self, tape: Tape | None, *, is_last: bool = False) -> None:
        """Run a block; `is_last` of all blocks, or of a recomputed group."""
        assert self.x is not None
        if self.fp8:
            self.x, self.delta = self.planned_block(0, (KEEP_ALL,), self.x, self.delta, tape)
        elif self.fused:
            self.x, self.delta = self.fused_block(self.x, self.delta, tape)
        else:
            self.x = self.plain_block(self.x, tape)

    def _last_norm(self, tape: Tape | None) -> Block:
        assert self.x is not None
        return self.add_norm(self.x, self.delta, tape) if self.fused else self.norm(self.x, tape)

    def _blocks_forward(self, count: int, tape: Tape | None) -> None:
        blocks = Repetitions(count, *(self.BLOCKS_OF_GROUP if self.config.checkpoint_blocks else self.BLOCKS))
        change: list[Snapshot] = []

        def body(number: int) -> None:
            if tape is not None and blocks.is_after_skipped(number):
                tape.append(Node(lambda: self._skip_backward(change[0], blocks.skipped, blocks.skipped), ()))
            self._block(tape, is_last=number == count - 1)

        change += blocks.run(self.memory, body)

    def _planned_blocks_forward(self, plan: Plan, tape: Tape) -> None:
        for number in range(len(plan)):
            if is_managed(plan, number) or self.fp8:
                assert self.x is not None
                self.x, self.delta = self.planned_block(number, plan, self.x, self.delta, tape)
            else:
                self._block(tape)

    def _skip_backward(self, saved: Snapshot, times: int, blocks: int) -> None:
        """Free what `times` extrapolated repetitions saved, and add the gradients of their blocks."""
        self.memory.add(saved, -times)
        if not self.packed:
            size = self.t.block_parameters()
            rounding = self.t.parameter_rounding / self.config.model.num_layers
            self.memory.add(Snapshot(Counter({GRADIENTS: size}), size + rounding), blocks)

    # -- recomputation ------------------------------------------------------------------------------------------------

    def _groups_forward(self, group: int, tape: Tape) -> None:
        """Run groups of blocks that save only their inputs."""
        layers = self.config.model.num_layers
        count = -(-layers // group)
        head, tail = self.GROUPS
        groups = Repetitions(count, head, tail + (layers % group > 0))  # the last may be smaller than those before
        change: list[Snapshot] = []

        def body(number: int) -> None:
            if groups.is_after_skipped(number):
                tape.append(Node(lambda: self._skip_backward(change[0], groups.skipped, groups.skipped * group), ()))
            size = min(group, layers - number * group)
            tape.append(Node(lambda x, delta: self._group_backward(size, x, delta), (self.x, self.delta)))
            self._blocks_forward(size, None)

        for found in groups.run(self.memory, body):
            # Autocast frees its copies of weights when it exits, before backward.
            kept = Counter({label: size for label, size in found.live.items() if label != CASTS})
            change.append(Snapshot(kept, found.total - found.live[CASTS]))

    def _group_backward(self, size: int, x: Block, delta: Block | None) -> None:
        """Recompute a group of blocks from its input, and run its backward pass."""
        tape = Tape()
        self.label, self.x, self.delta = ACTIVATIONS, x, delta
        self._blocks_forward(size, tape)
        self.x = self.delta = None
        self.autocast_cache.clear()
        self.label = TEMPORARY
        tape.run_backward()

    def _leave_autocast(self) -> None:
        """Free autocast's copies of weights that are not saved, including those of extrapolated blocks."""
        self.autocast_cache.clear()
        if self.config.checkpoint_blocks and self.config.mode != "inference" and not self.fused:
            head_saves_one = self.low and not self.packed and "loss" not in self.parts
            kept = self.t.embedding(2) // self.ranks if head_saves_one else 0
            copies = self.memory.live[CASTS] - kept
            self.memory.add(Snapshot(Counter({CASTS: copies}), copies), -1)

    # -- head and loss ------------------------------------------------------------------------------------------------

    def _head(self, hidden: Block, tape: Tape | None) -> Block:
        """Compute all logits."""
        self.label = LOGITS
        if self.fused and self.rw != self.s:
            if tape is not None:
                tape.append(Node(self._hidden_cast_backward, ()))
            hidden = self.memory.new(ACTIVATIONS, self.rows * self.d, self.s)
        return self.matmul(hidden, self.d, self.config.model.vocab_size, tape)

    def _hidden_cast_backward(self) -> None:
        self.grad = self.stream(4)

    def _loss(self, logits: Block, tape: Tape) -> None:
        """Run cross entropy in fp32 on all logits."""
        size = logits.size // self.s
        wide = self.new(size, 4) if self.low else logits
        log_softmax = self.new(size, 4)
        del wide

        def backward(log_softmax: Block) -> None:
            picked = self.new(size, 4, LOGITS)
            self.grad = self.new(size, 4, LOGITS)
            del picked

        def cast_backward() -> None:
            if self.low:
                self.grad = self.new(size, label=LOGITS)

        tape += [Node(cast_backward, ()), Node(backward, (log_softmax,))]

    def _fused_loss(self, hidden: Block, tape: Tape) -> None:
        """Run cross entropy on logits that are formed in chunks, and compute their gradients."""
        x = hidden
        if self.fused and self.rw != self.s:
            tape.append(Node(self._hidden_cast_backward, ()))
            x = self.stream()
        matrix = self.joined(self.table)
        row, chunks = logit_row(self.config), loss_chunks(self.config)
        grad_x = self.stream()
        grad_weight: Block | None = None
        size = -(-self.rows // chunks)
        for start in range(0, self.rows, size):
            logits = self.new(min(size, self.rows - start) * row, label=LOGITS)
            self.new(size, 4)
            wide = chunks > 1 and self.low
            if grad_weight is None:
                grad_weight = self.new(self.table, 4 if wide else self.s, LOGITS)
            del logits
        del matrix, x
        tape.append(Node(self._fused_loss_backward, (grad_x, grad_weight)))

    def _fused_loss_backward(self, grad_x: Block, grad_weight: Block) -> None:
        if not self.packed:
            is_fp32 = grad_weight.size == self.t.embedding(4)
            scaled = self.new(self.table, 4 if is_fp32 else self.s, GRADIENTS if is_fp32 else TEMPORARY)
            self.gradients.append(scaled if is_fp32 else self.new(self.table, 4, GRADIENTS))
            del scaled
        self.grad = self.stream()

    def _embedding_backward(self) -> None:
        joins = self.packed or self.config.model.tied_embeddings  # a gradient that is there
        grad = self.new(self.table, self.rw, TEMPORARY if joins else GRADIENTS)
        if not joins:
            self.gradients.append(grad)
        self.grad_x = self.grad = None


def loss_chunks(config: RunConfig) -> int:
    """Return the number of chunks in which the fused loss forms the logits."""
    return max(1, -(-config.tokens * config.model.vocab_size * Tensors(config).s // CHUNK_BYTES))


def logit_row(config: RunConfig) -> int:
    """Return the number of elements between two rows of the fused loss's logits in memory."""
    return -(-config.model.vocab_size // LOGIT_ALIGNMENT) * LOGIT_ALIGNMENT


def fast_breakdown(config: RunConfig, plan: Plan | None = None) -> Breakdown:
    """Return all parts of the fast step's memory, which do not coexist; activations are those that the plan keeps."""
    step, tape = FastStep(config), Tape()
    t, packed, held = step.t, step.packed, step._held()
    before, gradients = step.memory.snapshot(), t.parameters()
    step.x = step.stream(step.rw)
    step._block(tape)
    one = step.memory.snapshot()
    step._block(tape)
    block = step.memory.snapshot().since(one, 1).live
    layers, group = config.model.num_layers, config.checkpoint_blocks
    inputs = t.residual(step.rw) + (t.residual(t.s) if step.fused else 0)
    saved = -(-layers // group) * inputs if group else layers * block[ACTIVATIONS]
    if plan is not None:
        saved -= step.rows * sum(step.row_bytes[kind] for own in plan for kind in KINDS if getattr(own, kind) != KEEP)
    with_graph, with_gradients = config.mode != "inference", config.mode in ("forward-backward", "train-step")
    logits = t.logits(t.s) + (t.logits(4) if with_gradients else 0)
    if "loss" in step.parts:
        chunks = loss_chunks(config)
        logits = config.tokens * logit_row(config) * t.s // chunks + t.embedding(4 if chunks > 1 else t.s)
    if packed:
        gradients = before.live[GRADIENTS]
    del held
    return Breakdown(
        parameters=before.live["parameters"],
        gradients=gradients if with_gradients else 0,
        optimizer_state=before.live["optimizer state"],
        residual=t.residual(step.rw),
        activations_per_block=block[ACTIVATIONS] if with_graph else 0,
        activations=saved + 2 * t.residual(step.rw) if with_graph else 0,
        logits_and_loss=logits,
        weight_casts=0 if packed else layers * block[CASTS] + (t.embedding(2) if t.low_precision else 0),
        workspace=workspace(config),
        peak=estimate(config) if plan is None else fast_estimate(config, plan),
    )


# -- the packed optimizer ---------------------------------------------------------------------------------------------


def packed_sizes(config: RunConfig) -> tuple[int, int]:
    """Return the elements of the packed matrices and of the packed gains of norms and biases, each aligned."""
    model, (block, table, gain, small) = config.model, _aligned_sizes(config)
    tables = (1 if model.tied_embeddings else 2) * table
    return model.num_layers * block + tables, (2 * model.num_layers + 1) * gain + model.num_layers * small


def gradient_sizes(config: RunConfig) -> tuple[int, int]:
    """Return the same sizes for the gradients that exist at a time: all, or those of a block, a table or a norm."""
    if not config.update_in_backward:
        return packed_sizes(config)
    block, table, gain, small = _aligned_sizes(config)
    if Tensors(config).low_precision:
        return max(block, table), 2 * gain + small
    return max(block + 2 * gain + small, table), 0  # one pack


def _aligned_sizes(config: RunConfig) -> tuple[int, int, int, int]:
    """Return the elements of a block's matrices, of the embedding or the head, of a norm's gain, and of a block's
    biases and gains of heads."""

    def aligned(size: int) -> int:
        return -(-size // PACK_ALIGNMENT) * PACK_ALIGNMENT

    model = config.model
    square, narrow = aligned(model.d_model * model.q_width), aligned(model.d_model * model.kv_width)
    block = 2 * square + 2 * narrow + 3 * aligned(model.d_model * model.d_ff)
    biases = model.qkv_bias * (aligned(model.q_width) + 2 * aligned(model.kv_width))
    small = biases + 2 * model.qk_norm * aligned(model.head_dim)
    return block, aligned(model.vocab_size * model.d_model), aligned(model.d_model), small


class Pack(NamedTuple):
    """Parameters of one dtype: the number of elements, and the bytes of each in the flat tensors."""

    size: int
    gradients: int
    """Elements of the gradients that are in memory at the same time."""
    weight: int
    """Bytes of a weight, and of its gradient."""
    low_bits: int
    moment: int


def packs(config: RunConfig) -> list[Pack]:
    """Return the packs of PackedAdamW: one for matrices and one for gains, or a single one if all are fp32."""
    whole, kept = packed_sizes(config), gradient_sizes(config)
    if not Tensors(config).low_precision:
        return [Pack(sum(whole), sum(kept), 4, 0, 4)]
    low_bits, moment = (0, 2) if config.optimizer_state == "bf16" else (2, 4)
    return [Pack(whole[0], kept[0], 2, low_bits, moment), Pack(whole[1], kept[1], 4, 0, 4)]


def packed_state(memory: Memory, config: RunConfig) -> list[Block]:
    """Allocate the flat tensors of PackedAdamW: weights, their low 16 bits, gradients, moments."""
    held = []
    for pack in packs(config):
        if pack.low_bits:
            held.append(memory.new("optimizer state", pack.size, pack.low_bits))
        held.append(memory.new("parameters", pack.size, pack.weight))
        held.append(memory.new(GRADIENTS, pack.gradients, pack.weight))
        held += [memory.new("optimizer state", pack.size, pack.moment) for _ in range(2)]
    return held
