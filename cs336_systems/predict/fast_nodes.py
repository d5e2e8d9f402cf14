"""The nodes of a Transformer block, forward and backward, as allocations: fused ones and those of torch. No torch.

Each mirrors one operation of model.py or kernels/fused/nodes.py as it runs on a GPU. Forward allocates results and,
with a tape, saves what backward reads. Backward takes the gradient of its output from `grad` and leaves that of its
input there; `grad_x` is the gradient of the residual stream.
"""

from collections.abc import Callable
from functools import partial

from cs336_systems.config import RunConfig
from cs336_systems.predict.memory_model import Tensors
from cs336_systems.predict.simulated_memory import Block, Memory, Node, Tape

PACK_ALIGNMENT = 128
NORM_PROGRAMS, MANY_ROWS = 264, 8192
"""Equal to the constants of kernels/fused; a test compares them."""
ACTIVATIONS, TEMPORARY, CASTS, GRADIENTS = "activations", "temporary", "weight casts", "gradients"


class Nodes:
    """Fused nodes and attention, with the sizes, weights and current gradients that all nodes share."""

    def __init__(self, config: RunConfig, *, packed: bool):
        self.config, model = config, config.model
        self.t = Tensors(config)
        self.memory = Memory(on_cuda=self.t.on_cuda)
        self.packed = packed
        self.low = self.t.low_precision
        self.s = self.t.s
        """Bytes per element in matmuls."""
        self.rw = self.s if packed else 4
        """Bytes per element of the residual stream, which has the embedding's dtype: low precision when packed."""
        self.rows, self.d, self.f = config.tokens, model.d_model, model.d_ff
        self.q, self.kv = model.q_width, model.kv_width
        self.qkv_sizes = (self.d * self.q, self.d * self.kv, self.d * self.kv)
        self.square, self.wide, self.table = self.d * self.q, self.d * self.f, model.vocab_size * self.d
        self.label = ACTIVATIONS
        self.autocast_cache: list[Block] = []
        self.gradients: list[Block] = []
        self.grad_x: Block | None = None
        self.grad: Block | None = None
        self.head_grads: list[Block] = []
        """Gradients of q, k and v."""
        self.weight_grad: Block | None = None
        self.partial: Block | None = None
        self.pending: Block | None = None

    def new(self, elements: int, width: int | None = None, label: str | None = None) -> Block:
        return self.memory.new(label or self.label, elements, width or self.s)

    def stream(self, width: int | None = None) -> Block:
        """Allocate a tensor of the residual stream's shape."""
        return self.new(self.rows * self.d, width)

    def queries(self, width: int | None = None) -> Block:
        """Allocate queries, or the output of attention."""
        return self.new(self.rows * self.q, width)

    def keys(self, width: int | None = None) -> Block:
        """Allocate keys, or values."""
        return self.new(self.rows * self.kv, width)

    def heads(self, number: int, width: int | None = None) -> Block:
        """Allocate a tensor of the shape of q (0), k (1) or v (2)."""
        return self.keys(width) if number else self.queries(width)

    def scores(self, width: int) -> Block:
        model = self.config.model
        return self.new(self.config.batch_size * model.num_heads * model.context_length**2, width)

    def take_grad(self) -> Block | None:
        grad, self.grad = self.grad, None
        return grad

    def take_grad_x(self) -> Block | None:
        grad, self.grad_x = self.grad_x, None
        return grad

    # -- weights ------------------------------------------------------------------------------------------------------

    def _is_view(self, sizes: tuple[int, ...]) -> bool:
        """Return True if weights of these sizes form one matrix in the optimizer's memory."""
        return self.packed and all(size % PACK_ALIGNMENT == 0 for size in sizes[:-1])

    def joined(self, *sizes: int) -> Block | None:
        """Copy weights into one matrix of the matmul's width; return None if they already form one."""
        if self._is_view(sizes) or (len(sizes) == 1 and not self.low):
            return None
        copies = self.low and not self.packed
        if len(sizes) > 1 and copies:
            parts = [self.new(size, label=CASTS) for size in sizes]
            matrix = self.new(sum(sizes), label=CASTS)
            parts.clear()
            return matrix
        return self.new(sum(sizes), label=CASTS)

    def weight_gradients(self, *sizes: int) -> None:
        if self._is_view(sizes):
            return
        found = self.new(sum(sizes), label=TEMPORARY if self.low or self.packed else GRADIENTS)
        if not self.packed:
            self.gradients += [self.new(size, 4, GRADIENTS) for size in sizes] if self.low else [found]

    def gain_gradient(self, width: int) -> None:
        gain = self.new(width, 4, TEMPORARY if self.packed else GRADIENTS)
        if not self.packed:
            self.gradients.append(gain)

    # -- fused nodes --------------------------------------------------------------------------------------------------

    def add_norm(self, x: Block, delta: Block | None, tape: Tape | None) -> Block:
        """Run the last norm: x + delta, and its norm."""
        y, rstd = self.stream(self.rw), self.new(self.rows, 4)
        total = x if delta is None else self.stream(self.rw)
        if tape is not None:
            tape.append(Node(self._add_norm_backward, (total, rstd)))
        return y

    def _add_norm_backward(self, total: Block, rstd: Block) -> None:
        grad_y = self.take_grad()
        self.grad_x = self._norm_gradients()
        del grad_y
        self.grad = self._delta_gradient()

    def _norm_gradients(self) -> Block:
        dx = self.stream(self.rw)
        self._summed_gain_gradients(self.d)
        return dx

    def _summed_gain_gradients(self, width: int, count: int = 1) -> None:
        """Compute the gradients of `count` gains from the partial sums of a kernel's programs."""
        programs = min(self.rows, NORM_PROGRAMS if self.rows < MANY_ROWS else 2 * NORM_PROGRAMS)
        partial = self.new(count * programs * width, 4)
        for _ in range(count):
            self.gain_gradient(width)
        del partial

    def _delta_gradient(self) -> Block | None:
        """Return the gradient of delta: that of x, cast if their widths differ."""
        return self.grad_x if self.rw == self.s else self.stream()

    def norm_linear(
        self, x: Block, delta: Block | None, sizes: tuple[int, ...], tape: Tape | None
    ) -> tuple[Block, Block]:
        y, rstd = self.stream(), self.new(self.rows, 4)
        total = x if delta is None else self.stream(self.rw)
        matrix = self.joined(*sizes)
        out = self.new(self.rows * (sum(sizes) // self.d))
        del y
        if tape is not None:

            def backward(total: Block, rstd: Block, matrix: Block | None) -> None:
                self._norm_linear_backward(sizes, has_delta=delta_given)

            delta_given = delta is not None
            tape.append(Node(backward, (total, rstd, matrix)))
        return total, out

    def _norm_linear_backward(self, sizes: tuple[int, ...], *, has_delta: bool) -> None:
        grad_total, grad_out = self.take_grad_x(), self.take_grad()
        grad_y = self.stream()
        self.grad_x = self._norm_gradients()
        self.weight_gradients(*sizes)
        del grad_y, grad_out, grad_total
        self.grad = self._delta_gradient() if has_delta else None

    def linear(self, x: Block, d_in: int, d_out: int, tape: Tape | None) -> Block:
        """Run the fused matmul on an input that already has the matmul's width."""
        matrix = self.joined(d_in * d_out)
        out = self.new(self.rows * d_out)
        if tape is not None:

            def backward(x: Block, matrix: Block | None) -> None:
                grad = self.take_grad()
                self.grad = self.new(self.rows * d_in)
                self.weight_gradients(d_in * d_out)
                del grad

            tape.append(Node(backward, (x, matrix)))
        return out

    def swiglu_linear(self, gate_up: Block, tape: Tape | None) -> Block:
        matrix = self.joined(self.wide)
        gated = self.new(self.rows * self.f)
        out = self.stream()
        del gated
        if tape is not None:
            tape.append(Node(self._swiglu_linear_backward, (gate_up, matrix)))
        return out

    def _swiglu_linear_backward(self, gate_up: Block, matrix: Block | None) -> None:
        grad = self.take_grad()
        grad_gated = self.new(self.rows * self.f)
        self.grad = self.new(self.rows * 2 * self.f)
        self.weight_gradients(self.wide)
        del grad_gated, grad

    def rotary_heads(self, qkv: Block, tape: Tape | None) -> Block:
        """Rotate q and k in place; after norms, into memory of their own, and keep `qkv` for backward."""
        has_norms = self.config.model.qk_norm
        if tape is not None:
            tape.append(Node(self._rotary_heads_backward, (qkv,) if has_norms else ()))
        return self.new(self.rows * (self.q + self.kv)) if has_norms else qkv

    def _rotary_heads_backward(self, *qkv: Block) -> None:
        self.grad = self.qkv_gradient()
        if not self.t.fused_attention:
            self.keys()  # a contiguous copy of dk
        self.head_grads.clear()

    def qkv_gradient(self) -> Block:
        """Compute the gradient of `qkv` from those of the rotated heads, and the gradients of the heads' norms."""
        found = self.new(self.rows * (self.q + 2 * self.kv))
        if self.config.model.qk_norm:
            self._summed_gain_gradients(self.config.model.head_dim, 2)
        return found

    def fused_block(self, x: Block, delta: Block | None, tape: Tape | None) -> tuple[Block, Block]:
        x, qkv = self.norm_linear(x, delta, self.qkv_sizes, tape)
        delta = self._fused_attention(self.rotary_heads(qkv, tape), qkv, tape)
        del qkv
        x, gate_up = self.norm_linear(x, delta, (self.wide,) * 2, tape)
        return x, self.swiglu_linear(gate_up, tape)

    def _fused_attention(self, rotated: Block, qkv: Block, tape: Tape | None) -> Block:
        out = self.attention(rotated, rotated, qkv, tape)
        return self.linear(self.rows_first(out), self.q, self.d, tape)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(self, q: Block, k: Block, v: Block, tape: Tape | None) -> Block:
        """Run attention on q, k and v, which may be views of one block."""
        if not self.t.fused_attention:
            return self._naive_attention(tape)
        out = self.queries()
        logsumexp = self.memory.new(self.label, self.t.logsumexp(), 1)
        if tape is not None:
            tape.append(Node(self._attention_backward, (q, k, v, out, logsumexp)))
        return out

    def rows_first(self, out: Block) -> Block:
        """Return the output of attention, (batch, rows, heads * dim): a copy of what naive attention returns."""
        return out if self.t.fused_attention else self.queries()

    def _attention_backward(self, *saved: Block) -> None:
        grad = self.take_grad()
        self.head_grads += [self.heads(number) for number in range(3)]
        del grad

    def _naive_attention(self, tape: Tape | None) -> Block:
        # Contiguous copies of q and k for the matmul, where KV heads are repeated for every query head.
        scaled, q, k = self.queries(), self.queries(), self.queries()
        scores = self.scores(self.s)
        queries_and_keys = (q, k) if tape is not None else ()
        del scaled, q, k
        ones = self.memory.new(self.label, self.t.mask(), 1)
        mask = self.memory.new(self.label, self.t.mask(), 1)
        del ones
        if tape is not None:
            tape.append(Node(self._scores_backward, (*queries_and_keys, mask)))
        del mask, queries_and_keys
        wide = self.scores(4) if self.low else None
        weights = self.scores(4)
        del wide, scores
        low = self.scores(self.s) if self.low else None
        v, out = self.queries(), self.queries()
        if tape is not None:
            tape.append(Node(self._softmax_backward, (weights,)))
            tape.append(Node(self._output_backward, (low, v)))
        return out

    def _output_backward(self, low: Block | None, v: Block) -> None:
        grad = self.take_grad()
        heads_first = self.queries()
        del grad
        self.head_grads.append(self.keys())
        self.grad = self.scores(self.s)
        del heads_first

    def _softmax_backward(self, weights: Block) -> None:
        if self.low:
            self.grad = self.scores(4)
        grad = self.take_grad()
        self.grad = self.scores(4)
        self.scores(4)  # CUDA's kernel allocates grad * output
        del grad

    def _scores_backward(self, q: Block, k: Block, mask: Block) -> None:
        if self.low:
            self.grad = self.scores(self.s)
        self.grad = self.scores(self.s)  # masked
        dk, scaled = self.keys(), self.queries()
        self.grad = None
        self.head_grads[:0] = [self.queries(), dk]
        del dk, scaled


class PlainNodes(Nodes):
    """The operations of torch between the matmuls, and matmuls whose weights autocast copies."""

    ranks = 1
    """GPUs of a tensor-parallel group. `rows` are those of one GPU; only a gathered input or a sum over GPUs has
    more."""

    @property
    def keeps_products(self) -> bool:
        """True if the result of a matmul in backward is the gradient that the optimizer reads, without a cast."""
        return not self.low

    def cast(self, size: int) -> Block | None:
        """Return autocast's copy of a weight, which is kept until autocast exits."""
        if not self.low or self.packed:
            return None
        self.autocast_cache.append(self.new(size, label=CASTS))
        return self.autocast_cache[-1]

    def matmul(
        self,
        x: Block,
        d_in: int,
        d_out: int,
        tape: Tape | None,
        after: Callable[[], None] | None = None,
        *,
        by_columns: bool = True,
    ) -> Block:
        """Run a projection: the fused matmul with packed weights, else torch's. `after` runs after its backward. Ranks
        split the columns of its result, or those of its input, and then sum their results."""
        if self.packed:
            if tape is not None and after is not None:
                tape.append(Node(after, ()))
            return self.linear(x, d_in, d_out, tape)
        self.matmul_nodes(x, d_in, d_out, tape, after, by_columns=by_columns)
        return self.new(self.rows * d_out * (1 if by_columns else self.ranks))

    def matmul_nodes(
        self,
        x: Block,
        d_in: int,
        d_out: int,
        tape: Tape | None,
        after: Callable[[], None] | None = None,
        *,
        by_columns: bool = True,
    ) -> None:
        """Cast the weight of torch's matmul, and save what its backward reads."""
        size, rows = d_in * d_out // self.ranks, self.rows * (self.ranks if by_columns else 1)
        matrix = self.cast(size)
        if tape is not None:

            def backward(x: Block, matrix: Block | None) -> None:
                grad = self.take_grad()
                self.weight_grad = self.new(size, label=GRADIENTS if self.keeps_products else TEMPORARY)
                self.grad = self.new(rows * d_in)
                del grad

            def accumulate() -> None:
                found, self.weight_grad = self.weight_grad, None
                assert found is not None
                self.keep_gradient(found, size)

            tape.append(Node(accumulate, ()))
            if after is not None:
                tape.append(Node(after, ()))
            tape.append(Node(backward, (x, matrix)))

    def keep_gradient(self, found: Block, size: int) -> None:
        """Keep the gradient of a weight, cast to the weight's width."""
        self.gradients.append(found if self.keeps_products else self.new(size, 4, GRADIENTS))

    def output(self, x: Block, d_in: int, tape: Tape | None) -> Block:
        """Run the matmul that ends a branch."""
        return self.matmul(x, d_in, self.d, tape)

    # -- norms and the residual stream --------------------------------------------------------------------------------

    def norm(self, x: Block, tape: Tape | None) -> Block:
        """Run RMSNorm in the stream's width at the beginning of a branch; its output is cast to the matmul's width."""
        if tape is not None:
            tape.append(Node(self._add_backward, ()))
        rstd = self.new(self.rows, 4)
        y = self.stream(self.rw)
        if tape is not None:
            tape.append(Node(self._norm_backward, (x, rstd)))
        del rstd
        return y if self.rw == self.s else self.stream()

    def _norm_backward(self, x: Block, rstd: Block) -> None:
        if self.rw != self.s:
            self.grad = self.stream(self.rw)
        grad = self.take_grad()
        self.grad = self.stream(self.rw)
        self.gain_gradient(self.d)
        del grad

    def _add_backward(self) -> None:
        """Add the gradient of a branch to that of the stream."""
        self.grad_x = self.take_grad() if self.grad_x is None else self.stream(self.rw)
        self.grad = None

    def _branch_backward(self) -> None:
        """Compute the gradient at a branch's end: that of the stream, cast to the matmul's width."""
        self.grad = self.grad_x if self.rw == self.s else self.stream()

    def plain_block(self, x: Block, tape: Tape | None) -> Block:
        branch = self.plain_attention(self.norm(x, tape), tape)
        total = self._joined_stream(tape)
        del branch
        branch = self.feed_forward(self.norm(total, tape), tape)
        out = self._joined_stream(tape)
        del branch
        return out

    def _joined_stream(self, tape: Tape | None) -> Block:
        if tape is not None:
            tape.append(Node(self._branch_backward, ()))
        return self.stream(self.rw)

    def _merge(self) -> None:
        """Add up the gradients of an input that several matmuls read."""
        found = self.take_grad()
        self.partial = found if self.partial is None else self.new(self.ranks * self.rows * self.d)

    def _merged(self) -> None:
        self.grad, self.partial = self.partial, None

    # -- attention and feed-forward -----------------------------------------------------------------------------------

    def plain_attention(self, x: Block, tape: Tape | None) -> Block:
        if tape is not None:
            tape.append(Node(self._merged, ()))
        q, k, v = (self._head_projection(number, x, tape) for number in range(3))
        if self.config.model.qk_norm:
            q, k = self._head_norm(0, q, tape), self._head_norm(1, k, tape)
        q, k = self._rotate(0, q), self._rotate(1, k)
        if tape is not None:
            tape += [Node(partial(self._rotate_backward, number), ()) for number in (0, 1)]
        out = self.attention(q, k, v, tape)
        return self.output(self.rows_first(out), self.q, tape)

    def _head_projection(self, number: int, x: Block, tape: Tape | None) -> Block:
        out = self.matmul(x, self.d, self.kv if number else self.q, tape, after=self._merge)
        if tape is not None:
            tape.append(Node(partial(self._next_head_gradient, number), ()))
        return out

    def _next_head_gradient(self, number: int) -> None:
        self.grad = self.head_grads.pop()
        if not self.t.fused_attention:
            self.grad = self.heads(number)  # a contiguous copy

    def _head_norm(self, number: int, x: Block, tape: Tape | None) -> Block:
        """Run the norm of each head of q (0) or k (1)."""
        model = self.config.model
        rstd = self.new(self.rows * (model.kv_heads if number else model.num_heads), 4)
        if tape is not None:

            def backward(x: Block, rstd: Block) -> None:
                self.head_grads[number] = self.heads(number)

            tape.append(Node(backward, (x, rstd)))
        return self.heads(number)

    def _rotate(self, number: int, x: Block) -> Block:
        swapped = self.heads(number)
        product = self.heads(number, 4)
        out = self.heads(number, 4)
        del product
        if not self.low:
            return out
        low = self.heads(number)
        del out, swapped
        return low

    def _rotate_backward(self, number: int) -> None:
        wide = self.head_grads[number]
        if self.low:
            wide = self.heads(number, 4)
            self.head_grads[number] = wide
        by_sin = self.heads(number, 4)
        if self.low:
            by_sin = self.heads(number)
        by_cos = self.heads(number, 4)
        if self.low:
            by_cos = self.heads(number)
        self.head_grads[number] = by_cos
        del wide
        swapped = self.heads(number)
        del by_sin
        self.head_grads[number] = self.heads(number)
        del by_cos, swapped

    def feed_forward(self, x: Block, tape: Tape | None) -> Block:
        if tape is not None:
            tape.append(Node(self._merged, ()))
        return self.output(self._gated(x, tape), self.f, tape)

    def _gated(self, x: Block, tape: Tape | None) -> Block:
        gate = self.matmul(x, self.d, self.f, tape, after=self._merge)
        silu = self.new(self.rows * self.f)
        if tape is not None:
            tape.append(Node(self._silu_backward, (gate,)))
        del gate
        up = self.matmul(x, self.d, self.f, tape, after=self._merge)
        if tape is not None:
            tape.append(Node(self._product_backward, (silu, up)))
        return self.new(self.rows * self.f)

    def _product_backward(self, silu: Block, up: Block) -> None:
        grad = self.take_grad()
        self.grad, self.pending = self.new(self.rows * self.f), self.new(self.rows * self.f)
        del grad

    def _silu_backward(self, gate: Block) -> None:
        self.grad = self.new(self.rows * self.f)
        self.pending = None
