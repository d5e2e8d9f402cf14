"""Peak memory of a step, computed from the configuration in milliseconds: no torch, no GPU.

`estimate(config)` simulates the step: a ledger records the tensors in the order in which PyTorch's eager mode allocates
and frees them. Tests compare the result with a trace of the operators (memory_trace.py), with measurements on a CPU,
and with the allocator of an H200 (results/h200).

`s` is the bytes per element in matmuls (4, or 2 under autocast). The residual stream, norms, softmax and the loss are
always fp32.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cs336_systems.config import ModelConfig, RunConfig, UserError, arg
from cs336_systems.predict.activation_plan import Plan
from cs336_systems.predict.allocator import ALIGNMENT, CachingAllocator, round_up
from cs336_systems.record import MIB

ROUNDING = "allocator rounding"
CUBLAS_WORKSPACE = 32 * MIB
"""Bytes that cuBLAS keeps for each thread and stream on Hopper and later."""
CUBLAS_WORKSPACES = (CUBLAS_WORKSPACE, 8 * MIB + MIB // 8)
"""Workspace sizes by GPU generation: Hopper and later, earlier."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak of a step, its parts (bytes by label; they add up to the peak) and the phase in which it occurs."""

    parts: dict[str, int]
    peak: int
    where: str


def cublas_workspace(*, on_cuda: bool, backward: bool) -> int:
    """Return the bytes of cuBLAS workspaces: one for the main thread, one for autograd's thread that runs backward."""
    return CUBLAS_WORKSPACE * (2 if backward else 1) if on_cuda else 0


def workspace(config: RunConfig) -> int:
    """Return the bytes of cuBLAS workspaces in a step of `config`."""
    backward = config.mode in ("forward-backward", "train-step")
    return cublas_workspace(on_cuda=config.device_type == "cuda", backward=backward)


@dataclass(frozen=True)
class Tensors:
    """Sizes in bytes of the tensors of a step, and the rounding that CUDA's allocator adds."""

    config: RunConfig

    @property
    def on_cuda(self) -> bool:
        return self.config.device_type == "cuda"

    def _bytes(self, elements: int, width: int) -> int:
        return round_up(elements * width, ALIGNMENT) if self.on_cuda else elements * width

    def rounding(self, sizes: list[int]) -> int:
        """Return the bytes that CUDA's allocator adds to tensors of these sizes, allocated in this order."""
        if not self.on_cuda:
            return 0
        allocator = CachingAllocator()
        for size in sizes:
            allocator.allocate(size)
        return allocator.allocated - sum(sizes)

    @property
    def low_precision(self) -> bool:
        return self.config.has_low_precision

    @property
    def s(self) -> int:
        return 2 if self.low_precision else 4

    @property
    def fused_attention(self) -> bool:
        return self.config.attention != "reference"

    @property
    def fused_norm(self) -> bool:
        return self.on_cuda

    def residual(self, width: int) -> int:
        return self._bytes(self.config.tokens * self.config.model.d_model, width)

    def hidden(self) -> int:
        return self._bytes(self.config.tokens * self.config.model.d_ff, self.s)

    def scores(self, width: int) -> int:
        model = self.config.model
        return self._bytes(self.config.batch_size * model.num_heads * model.context_length**2, width)

    def mask(self) -> int:
        return self._bytes(self.config.model.context_length**2, 1)

    def logsumexp(self) -> int:
        model = self.config.model
        rows = round_up(model.context_length, 1 if self.low_precision else 32)
        return self._bytes(self.config.batch_size * model.num_heads * rows, 4)

    def logits(self, width: int) -> int:
        return self._bytes(self.config.tokens * self.config.model.vocab_size, width)

    def per_token(self) -> int:
        return self._bytes(self.config.tokens, 4)

    def queries(self, width: int | None = None) -> int:
        """Bytes of all queries, and of attention's output."""
        return self._bytes(self.config.tokens * self.config.model.q_width, width or self.s)

    def keys(self, width: int | None = None) -> int:
        """Bytes of all keys, and of all values."""
        return self._bytes(self.config.tokens * self.config.model.kv_width, width or self.s)

    def head_norms(self) -> int:
        """Return the bytes that the norms of q and k save: their inputs, and 1/rms per head."""
        model = self.config.model
        if not model.qk_norm:
            return 0
        per_head = self._bytes(self.config.tokens * model.num_heads, 4)
        return self.queries() + self.keys() + per_head + self._bytes(self.config.tokens * model.kv_heads, 4)

    def square(self, width: int) -> int:
        """Bytes of the projection of queries, and of that of attention's output."""
        return self._bytes(self.config.model.d_model * self.config.model.q_width, width)

    def narrow(self, width: int) -> int:
        """Bytes of the projection of keys, and of that of values."""
        return self._bytes(self.config.model.d_model * self.config.model.kv_width, width)

    def projections(self, width: int) -> int:
        """Bytes of a block's four attention projections."""
        return 2 * self.square(width) + 2 * self.narrow(width)

    def wide(self, width: int) -> int:
        """Bytes of one of a block's three feed-forward projections."""
        return self._bytes(self.config.model.d_model * self.config.model.d_ff, width)

    def embedding(self, width: int) -> int:
        """Bytes of the embedding or the language-model head."""
        return self._bytes(self.config.model.d_model * self.config.model.vocab_size, width)

    def gain(self) -> int:
        return self._bytes(self.config.model.d_model, 4)

    def small_parameters(self) -> list[int]:
        """Bytes of the biases of q, k and v, and of the gains of their norms, in one block."""
        model = self.config.model
        biases = (model.q_width, model.kv_width, model.kv_width) if model.qkv_bias else ()
        gains = (model.head_dim,) * 2 if model.qk_norm else ()
        return [self._bytes(elements, 4) for elements in (*biases, *gains)]

    def block_parameters(self) -> int:
        return self.projections(4) + 3 * self.wide(4) + 2 * self.gain() + sum(self.small_parameters())

    def tables(self, width: int) -> int:
        """Bytes of the embedding and the head, which may be one."""
        return (1 if self.config.model.tied_embeddings else 2) * self.embedding(width)

    @property
    def parameter_rounding(self) -> int:
        return _parameter_rounding(self.config.model) if self.on_cuda else 0

    def parameters(self) -> int:
        return self.config.model.num_layers * self.block_parameters() + self.tables(4) + self.gain()

    def optimizer_state(self) -> int:
        """Bytes of AdamW's two moments and its step count per parameter tensor."""
        model = self.config.model
        tensors = (9 + len(self.small_parameters())) * model.num_layers + (2 if model.tied_embeddings else 3)
        return 2 * self.parameters() + tensors * self._bytes(1, 4)

    def inputs(self) -> int:
        """Bytes of inputs and targets; a CUDA graph reads copies of them."""
        copies = 2 if "graph" in self.config.fast_parts else 1
        return 2 * copies * self._bytes(self.config.tokens, 8)

    def buffers(self) -> int:
        return 2 * self._bytes(self.config.model.context_length * self.config.model.head_dim, 4)


@lru_cache
def _parameter_rounding(model: ModelConfig) -> int:
    t = Tensors(RunConfig(model=model, device="cuda"))
    projections = [t.square(4), t.narrow(4), t.narrow(4), t.square(4), *t.small_parameters()]
    block = [t.gain(), *projections, t.gain(), *[t.wide(4)] * 3]
    head = [] if model.tied_embeddings else [t.embedding(4)]
    return t.rounding([t.embedding(4), *block * model.num_layers, t.gain(), *head])


class Ledger:
    """Allocated bytes by label, and their peak."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.peak_parts: dict[str, int] = {}
        self.where = ""
        self.phase = ""

    def add(self, label: str, size: int) -> None:
        self.live[label] += size
        self.touch(0)

    def drop(self, label: str, size: int) -> None:
        self.live[label] -= size

    def touch(self, temporary: int) -> None:
        """Account for `temporary` bytes that are allocated on top of the ledger and freed again."""
        total = self.live.total() + temporary
        if total > self.peak:
            self.peak, self.where = total, self.phase
            self.peak_parts = dict(self.live)
            self.peak_parts["temporary"] = self.peak_parts.get("temporary", 0) + temporary


class SimulatedStep:
    """Simulates one steady-state step of a configuration and records its tensors in a ledger."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.t = Tensors(config)
        self.ledger = Ledger()
        self.keeps_graph = config.mode != "inference"
        self.trains = config.mode == "train-step"

    def run(self) -> Ledger:
        ledger, t = self.ledger, self.t
        ledger.add("parameters", t.parameters())
        ledger.add(ROUNDING, t.parameter_rounding * (3 if self.trains else 1))
        ledger.add("buffers", t.buffers())
        ledger.add("inputs", t.inputs())
        if self.trains:
            ledger.add("optimizer state", t.optimizer_state())
        ledger.add("workspace", workspace(self.config))
        self._forward()
        if self.config.mode in ("forward-backward", "train-step"):
            self._loss()
            self._backward()
            ledger.phase = "optimizer"
            ledger.touch(0)
        return ledger

    # -- tensors saved by a block -----------------------------------------------------------------------------------

    @cached_property
    def norm_saved(self) -> int:
        """Bytes that a norm saves besides its input: 1/rms per token; on a CPU also the normalized input."""
        return self.t.per_token() + (0 if self.t.fused_norm else self.t.residual(4))

    @cached_property
    def attention_saved(self) -> int:
        """Bytes saved by softmax(q k^T) v: q, k, v, the output, and the score matrix or one logsumexp per row."""
        t = self.t
        inputs_and_output = 2 * t.queries() + 2 * t.keys() + t.head_norms()
        if t.fused_attention:
            return inputs_and_output + t.logsumexp()
        low_precision_copy = t.scores(t.s) if t.low_precision else 0
        return inputs_and_output + t.scores(4) + low_precision_copy + t.mask()

    @cached_property
    def attention_half(self) -> int:
        """Bytes saved by ln1, attention with its projections, and the residual sum."""
        return self.norm_saved + self.t.residual(self.t.s) + self.attention_saved + self.t.residual(4)

    @cached_property
    def feed_forward_half(self) -> int:
        """Bytes saved by ln2, w1's output, its silu, w3's output, their product, and the residual sum."""
        return self.norm_saved + self.t.residual(self.t.s) + 4 * self.t.hidden() + self.t.residual(4)

    @cached_property
    def block_saved(self) -> int:
        return self.attention_half + self.feed_forward_half

    @cached_property
    def block_casts(self) -> int:
        """Bytes of autocast's low-precision copies of a block's weights."""
        return self.t.projections(2) + 3 * self.t.wide(2) if self.t.low_precision else 0

    # -- allocator rounding -----------------------------------------------------------------------------------------

    @cached_property
    def _kept_rounding(self) -> dict[bool, int]:
        """Rounding of the tensors that a block keeps in forward, by whether it saves activations: autocast's weight
        copies, and the activations if it saves them."""
        t, layers = self.t, self.config.model.num_layers
        low = t.low_precision
        square, narrow, wide = ([t.square(2)], [t.narrow(2)], [t.wide(2)]) if low else ([], [], [])
        r, r4, hidden, q, kv = t.residual(t.s), t.residual(4), t.hidden(), t.queries(), t.keys()
        scores = [t.logsumexp()] if t.fused_attention else [t.scores(4), *([t.scores(2)] if t.low_precision else [])]
        kept = [
            r, *square, *narrow * 2, q, kv, *scores, kv, q, *square, r4,
            r, *wide, hidden, hidden, *wide, hidden, hidden, *wide, r4,
        ]  # fmt: skip
        return {
            True: t.rounding(kept * layers) // layers,
            False: self._casts_rounding() if t.low_precision else 0,
        }

    def _casts_rounding(self) -> int:
        """Return the rounding of weight copies: they outlive activations, and some reuse larger free blocks."""
        t, layers = self.t, self.config.model.num_layers
        if not t.on_cuda:
            return 0
        allocator = CachingAllocator()
        r, r4, hidden, q, kv = t.residual(t.s), t.residual(4), t.hidden(), t.queries(), t.keys()
        stream = allocator.allocate(r4)

        def hold(*sizes: int) -> list[int]:
            return [allocator.allocate(size) for size in sizes]

        def drop(addresses: list[int]) -> None:
            for address in addresses:
                allocator.release(address)

        casts: list[int] = []
        for _ in range(layers):
            norm32, norm = hold(r4, r)
            drop([norm32])
            projected = []
            for weight, result in ((t.square(2), q), (t.narrow(2), kv), (t.narrow(2), kv)):
                casts += hold(weight)
                projected += hold(result)
            rotated = hold(q, kv)  # q and k; their fp32 intermediates have been freed
            output = hold(q)
            drop(projected[:2])
            casts += hold(t.square(2))
            projection = hold(r)
            drop([norm, projected[2], *rotated, *output])
            total = hold(r4)
            drop(projection)
            norm32, norm = hold(r4, r)
            drop([norm32])
            casts += hold(t.wide(2))
            gate = hold(hidden, hidden)
            drop(gate[:1])
            casts += hold(t.wide(2))
            up = hold(hidden, hidden)
            drop([gate[1], up[0]])
            casts += hold(t.wide(2))
            down = hold(r)
            drop([up[1], norm])
            (following,) = hold(r4)
            drop([*down, *total, stream])
            stream = following
        return (sum(map(allocator.size, casts)) - layers * self.block_casts) // layers

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        ledger, t = self.ledger, self.t
        layers = self.config.model.num_layers
        group = self.config.checkpoint_blocks if self.keeps_graph else 0
        ledger.phase = "forward"
        ledger.add("activations", t.residual(4))
        for layer in range(layers):
            inside = t.residual(4) if group and layer % group else 0  # a block's input that no graph saves
            ledger.add("activations", inside)
            self._block_forward(keep=self.keeps_graph and not group)
            ledger.drop("activations", inside)
            if group and ((layer + 1) % group == 0 or layer + 1 == layers):
                ledger.add("activations", t.residual(4))  # the input of the next group, or of the final norm
        self._norm_forward(keep=self.keeps_graph)
        if not self.keeps_graph:  # the norm's input and 1/rms
            ledger.drop("activations", t.residual(4) + t.per_token())
        self._cast(t.embedding(2))
        ledger.add("logits and loss", t.logits(t.s))
        if group:
            # Autocast frees its copies on exit, except those that a graph saves: the head's.
            ledger.drop("weight casts", layers * self.block_casts)
            ledger.drop(ROUNDING, layers * self._kept_rounding[False])

    def _cast(self, size: int, *, beside: int = 0) -> None:
        """Add autocast's copy of a weight, kept until autocast exits, while `beside` temporary bytes are allocated."""
        if self.t.low_precision:
            self.ledger.add("weight casts", size)
        self.ledger.touch(beside)

    def _norm_forward(self, *, keep: bool) -> None:
        """Add the output of a norm and, if `keep`, the tensors saved for backward."""
        t = self.t
        self.ledger.add("activations", (self.norm_saved if keep else t.per_token()) + t.residual(t.s))
        self.ledger.touch((t.residual(4) if t.low_precision else 0) + (0 if t.fused_norm else t.residual(4)))

    def _block_forward(self, *, keep: bool) -> None:
        """Run one block. Its saved tensors stay on the ledger if `keep`; autocast's weight copies always do."""
        t, ledger = self.t, self.ledger
        r, r4, hidden, q, kv = t.residual(t.s), t.residual(4), t.hidden(), t.queries(), t.keys()
        start = ledger.live["activations"]
        ledger.add(ROUNDING, self._kept_rounding[keep])
        self._norm_forward(keep=keep)
        self._cast(t.square(2) + 2 * t.narrow(2))
        qkv, low = q + 2 * kv, t.low_precision
        ledger.touch(qkv + q + 2 * t.queries(4) + (q if low else 0))  # q, k, v, and q being rotated
        ledger.touch(qkv + q + kv + 2 * t.keys(4) + (kv if low else 0))  # q, k, v, rotated q, and k being rotated
        weights = 0  # of naive attention
        if t.fused_attention:
            ledger.touch(qkv + q + r + t.logsumexp())  # q, k, v, the output, its projection
        else:
            r = q  # KV heads are repeated for every query head
            copies = 2 * r if keep else 0  # contiguous q and k for the matmul, saved for backward
            ledger.touch(6 * r + t.scores(t.s))
            converted = t.scores(t.s) + t.scores(4) if t.low_precision else t.scores(4)
            mask = t.mask() if keep else 0  # backward masks the gradient
            ledger.touch(3 * r + copies + converted + t.scores(4) + mask)
            weights = t.scores(4) + (t.scores(t.s) if t.low_precision else 0) + mask
            ledger.touch(5 * r + copies + weights)
            ledger.touch(8 * r + weights if keep else 5 * r)
        self._cast(t.square(2))
        if not t.fused_attention:
            ledger.touch(9 * r + weights if keep else 6 * r)
        r = t.residual(t.s)
        if keep:
            ledger.add("activations", self.attention_half - self.norm_saved - r)
        else:
            ledger.live["activations"] = start
            ledger.add("activations", r4)  # the residual sum; the caller still holds the block's input
        ledger.touch(r)
        self._norm_forward(keep=keep)
        for alive in (2, 4 if keep else 3):  # w1 and its silu; w3 and the product, with w1 and its silu if saved
            self._cast(t.wide(2))
            ledger.touch(alive * hidden)
        if keep:
            self._cast(t.wide(2), beside=4 * hidden)
            ledger.touch(4 * hidden + r)
            ledger.add("activations", self.feed_forward_half - self.norm_saved - r)
            ledger.touch(r)
        else:
            self._cast(t.wide(2), beside=hidden)
            ledger.touch(hidden + r)
            ledger.touch(r4)  # the block's output, after the inner tensors are freed
            ledger.live["activations"] = start

    # -- loss and backward ----------------------------------------------------------------------------------------

    def _loss(self) -> None:
        ledger, t = self.ledger, self.t
        ledger.phase = "loss"
        ledger.add("logits and loss", t.logits(4))  # log-softmax, saved for backward
        ledger.touch(t.logits(4) if t.low_precision else 0)
        ledger.drop("logits and loss", t.logits(t.s))

    def _backward(self) -> None:
        ledger, t = self.ledger, self.t
        ledger.phase = "backward"
        group = self.config.checkpoint_blocks
        ledger.touch(2 * t.logits(4))
        ledger.drop("logits and loss", t.logits(4))
        ledger.touch(t.logits(4) + (t.logits(2) if t.low_precision else 0))
        self._weight_gradient(
            t.embedding(2), t.embedding(4), during=t.logits(t.s) + t.residual(t.s), after=t.residual(t.s)
        )
        ledger.drop("activations", t.residual(t.s))
        self._norm_backward()
        ledger.add("temporary", t.residual(4))  # the gradient of the residual stream, passed from block to block
        for size in self._groups_backwards():
            if group:
                for _ in range(size):
                    self._block_forward(keep=True)
                ledger.drop("activations", t.residual(4))  # recomputation stops before the group's own output
            for _ in range(size):
                self._block_backward()
        ledger.touch(t.embedding(4))
        ledger.drop("temporary", t.residual(4))
        ledger.drop("activations", ledger.live["activations"])
        if not self.config.model.tied_embeddings:  # the head's gradient is there
            ledger.add("gradients", t.embedding(4))

    def _groups_backwards(self) -> list[int]:
        """Return the sizes of the groups of blocks, last group first; a single group without recomputation."""
        layers, group = self.config.model.num_layers, self.config.checkpoint_blocks
        if not group:
            return [layers]
        return [min(group, layers - start) for start in range(0, layers, group)][::-1]

    def _weight_gradient(self, cast: int, gradient: int, *, during: int, after: int) -> None:
        """Add the gradient of a projection; under autocast free the weight's copy and cast the gradient."""
        ledger = self.ledger
        if self.t.low_precision:
            ledger.touch(cast + during)
            ledger.drop("weight casts", cast)
            ledger.touch(cast + gradient + after)
            ledger.add("gradients", gradient)
        else:
            ledger.add("gradients", gradient)
            ledger.touch(during)

    def _norm_backward(self) -> None:
        ledger, t = self.ledger, self.t
        ledger.touch((3 if t.low_precision else 2) * t.residual(4))
        ledger.drop("activations", self.norm_saved + t.residual(4))
        ledger.add("gradients", t.gain())

    def _block_backward(self) -> None:
        """Run a block's backward: free its activations and its input, add its gradients."""
        ledger, t = self.ledger, self.t
        ledger.drop(ROUNDING, self._kept_rounding[True])
        ledger.add(ROUNDING, t.parameter_rounding // self.config.model.num_layers)
        r, hidden, q, kv = t.residual(t.s), t.hidden(), t.queries(), t.keys()
        cast_copy = r if t.low_precision else 0
        # w2, the product, silu, w3, w1
        self._weight_gradient(t.wide(2), t.wide(4), during=hidden + cast_copy, after=hidden)
        ledger.drop("activations", hidden)
        ledger.touch(3 * hidden)
        ledger.drop("activations", 2 * hidden)
        self._weight_gradient(t.wide(2), t.wide(4), during=2 * hidden + r, after=hidden + r)
        ledger.touch(2 * hidden + r)
        ledger.drop("activations", hidden)
        self._weight_gradient(t.wide(2), t.wide(4), during=hidden + 2 * r, after=r)
        ledger.drop("activations", r)
        self._norm_backward()
        # output projection, softmax(q k^T) v, q, k, v projections
        self._weight_gradient(t.square(2), t.square(4), during=q + cast_copy, after=q)
        if t.fused_attention:
            ledger.touch(2 * q + 2 * kv + t.per_token())
        else:
            self._scores_backward(q)
        ledger.drop("activations", self.attention_saved)
        ledger.touch(q + 2 * kv + 2 * t.queries(4))  # gradients of q, k and v, one of them being rotated back in fp32
        # v, k and q: gradients not yet used, and the sum accumulated for the norm.
        self._weight_gradient(t.narrow(2), t.narrow(4), during=q + 2 * kv + r, after=q + kv + r)
        self._weight_gradient(t.narrow(2), t.narrow(4), during=q + kv + 2 * r, after=q + r)
        self._weight_gradient(t.square(2), t.square(4), during=q + 2 * r, after=r)
        ledger.add("gradients", sum(t.small_parameters()))
        ledger.drop("activations", r)
        self._norm_backward()

    def _scores_backward(self, r: int) -> None:
        t, ledger = self.t, self.ledger
        ledger.drop("activations", r)  # the output saved by the projection
        ledger.touch(2 * r + t.scores(t.s))
        freed = r + (t.scores(t.s) if t.low_precision else 0)  # v and the low-precision weights
        ledger.touch(r + (t.scores(2) + t.scores(4) if t.low_precision else 0) - freed)
        product = t.scores(4) if t.on_cuda else 0  # CUDA's softmax backward allocates grad * output first
        ledger.touch(r + 2 * t.scores(4) + product - freed)
        ledger.add("activations", r)


def simulated_parts(config: RunConfig) -> frozenset[str]:
    """Return the parts of the fast step that change its memory. A CUDA graph allocates the same as the eager step."""
    inactive = {"graph"} if config.mode in ("forward-backward", "train-step") else {"graph", "loss"}
    return config.fast_parts - inactive


def estimate(config: RunConfig) -> MemoryEstimate:
    """Return the peak of one steady-state step, plain or fast. Compiled models are not covered: Inductor chooses what
    to save."""
    if config.plans_whole_blocks:
        raise UserError(
            "memory_budget of a model without fused blocks is planned by tracing it, when it runs; predict it with "
            f"{arg('fast')} on",
            "memory_budget",
        )
    if config.memory_budget:
        from cs336_systems.predict.memory_planner import budget_bytes, plan_memory

        return plan_memory(config, budget_bytes(config.memory_budget)).estimate
    if simulated_parts(config):
        from cs336_systems.predict.fast_memory import fast_estimate

        return fast_estimate(config)
    ledger = SimulatedStep(config).run()
    parts = {label: size for label, size in ledger.peak_parts.items() if size}
    return MemoryEstimate(parts, ledger.peak, ledger.where)


@dataclass(frozen=True)
class Breakdown:
    """The parts of a step's memory in full, in bytes. They do not coexist: only `peak.parts` adds up to the peak."""

    parameters: int
    gradients: int
    optimizer_state: int
    residual: int
    """Bytes of one tensor of the residual stream: batch x context x d_model."""
    activations_per_block: int
    activations: int
    """Bytes of tensors saved for backward, without logits and loss; with checkpointing, those saved when backward
    starts."""
    logits_and_loss: int
    weight_casts: int
    workspace: int
    peak: MemoryEstimate


def breakdown(config: RunConfig, plan: Plan | None = None) -> Breakdown:
    """Return the parts of a step's memory; with a memory budget, those of `plan` or of the plan for an H200."""
    if simulated_parts(config):
        from cs336_systems.predict.fast_memory import fast_breakdown
        from cs336_systems.predict.memory_planner import budget_bytes, plan_memory

        if plan is None and config.memory_budget:
            plan = plan_memory(config, budget_bytes(config.memory_budget)).plan
        return fast_breakdown(config, plan)
    step = SimulatedStep(config)
    t, layers = step.t, config.model.num_layers
    with_graph = config.mode != "inference"
    with_gradients = config.mode in ("forward-backward", "train-step")
    groups = -(-layers // config.checkpoint_blocks) if config.checkpoint_blocks else 0
    blocks = groups * t.residual(4) if groups else layers * step.block_saved
    head = t.residual(4) + step.norm_saved + t.residual(t.s)
    return Breakdown(
        parameters=t.parameters(),
        gradients=t.parameters() if with_gradients else 0,
        optimizer_state=t.optimizer_state() if config.mode == "train-step" else 0,
        residual=t.residual(4),
        activations_per_block=step.block_saved if with_graph else 0,
        activations=blocks + head if with_graph else 0,
        logits_and_loss=t.logits(t.s) + (t.logits(4) if with_gradients else 0),
        weight_casts=layers * step.block_casts + t.embedding(2) if t.low_precision else 0,
        workspace=workspace(config),
        peak=estimate(config),
    )
