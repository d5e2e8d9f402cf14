"""The Transformer language model: pre-norm RMSNorm, RoPE, SwiGLU, causal multi-head attention.

Parameter names are those of the course's staff model, so its checkpoints load here and give the same logits. Fields of
ModelConfig make it a Llama or a Qwen: grouped KV heads, biases of q, k and v, norms of q and k, a tied head.
Shapes: B batch, T tokens, D d_model, H heads, K head dimension, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.dispatch import fused_implementation
from cs336_systems.kernels.flash.operators import cast_for_autocast
from cs336_systems.kernels.flash.packing import Packing
from cs336_systems.kernels.flash.prefix import PrefixAttention
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.kernels.fused.block import planned_block
from cs336_systems.kernels.fused.block_run import Setting, Weights
from cs336_systems.kernels.fused.fp8_blocks import Fp8Blocks
from cs336_systems.kernels.fused.host_memory import HostMemory
from cs336_systems.kernels.fused.nodes import HeadNorms
from cs336_systems.predict.activation_plan import KEEP_ALL, Plan, is_fetched_late, is_managed

if TYPE_CHECKING:  # it needs DTensor, which takes 0.8 s to import
    from cs336_systems.parallel.context_parallel import ContextParallel


class PackedTokens(NamedTuple):
    """Sequences of several documents each. A document attends to itself alone, and its positions begin at 0."""

    tokens: Tensor
    """(B, T)"""
    positions: Tensor
    """(B, T)"""
    cu_seqlens: Tensor
    """Offsets of the documents among the B x T tokens, then B x T; int32."""

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def to(self, device: torch.device) -> "PackedTokens":
        return PackedTokens(*(tensor.to(device) for tensor in self))


class Linear(nn.Linear):
    """A projection; truncated-normal weights, as the course initialises them, and a bias of 0, if any."""

    def __init__(self, d_in: int, d_out: int, bias: bool = False):
        super().__init__(d_in, d_out, bias)

    def reset_parameters(self) -> None:
        std = (2 / (self.in_features + self.out_features)) ** 0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        # The fused matmul writes the gradient of a weight into its grad_memory, which PackedAdamW allocates.
        is_fused = hasattr(self.weight, "grad_memory")
        return fused.linear(input, self.weight, self.bias) if is_fused else super().forward(input)


class Embedding(nn.Embedding):
    """A token embedding with truncated-normal weights, as the course initialises them.

    A head that is tied to it gives logits with a variance of 1 for `std` = 1 / sqrt(D).
    """

    def __init__(self, vocab_size: int, d_model: int, std: float = 1.0):
        self.std = std
        super().__init__(vocab_size, d_model)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=self.std, a=-3 * self.std, b=3 * self.std)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), eps=self.eps)
        # Every norm feeds several matmuls. Under autocast each of them would make and save a low-precision copy of its
        # own; one cast here serves them all.
        device = x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


class RotaryEmbedding(nn.Module):
    """Rotates the pairs (2i, 2i+1) of a head's dimensions by the angle position * theta^(-2i/K).

    With Llama 3's scaling the frequencies of long waves are divided by a factor, for contexts longer than `original`.
    """

    cos: Tensor
    sin: Tensor
    context: "ContextParallel | None" = None
    """Set if the tokens are one rank's part of the sequence under context parallelism."""
    packing: None = None
    """None: each sequence is one document; see RotaryRows."""

    def __init__(
        self,
        context_length: int,
        head_dim: int,
        theta: float,
        scaling: tuple[float, float, float, float] | None = None,
    ):
        super().__init__()
        self.theta, self.scaling = theta, scaling
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context_length, 1, head_dim), persistent=False)  # (T, 1, K)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, also after the module was built on the "meta" device."""
        context_length, _, head_dim = self.cos.shape
        frequencies = self.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if self.scaling is not None:
            frequencies = _scaled(frequencies, *self.scaling)
        angles = torch.arange(context_length, dtype=torch.float64)[:, None] * frequencies  # (T, K/2)
        # For the pair (a, b): out = (a, b) * (cos, cos) + (b, a) * (-sin, sin), so the signs are in the table.
        sin = torch.stack((-angles.sin(), angles.sin()), dim=-1).flatten(-2)  # (T, K)
        self.cos.copy_(angles.cos().repeat_interleave(2, dim=-1)[:, None])
        self.sin.copy_(sin[:, None])

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H, K)
        return _rotated(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])

    def of_part(self, length: int) -> "Rotary":
        """Return the rotation of this rank's part of the sequence, `length` tokens; without `context` that is self."""
        if self.context is None:
            return self
        spans = self.context.positions(length)
        cos, sin = (torch.cat([table[span] for span in spans]) for table in (self.cos, self.sin))
        return RotaryRows(cos, sin)

    def of_packed(self, packed: PackedTokens) -> "RotaryRows":
        """Return the rotation of (1, T, H, K), all documents of a batch one after another, each from position 0 on."""
        positions = packed.positions.flatten()
        return RotaryRows(self.cos[positions], self.sin[positions], Packing(packed.cu_seqlens))


class RotaryRows:
    """The rotation by some rows of the tables. They are selected once for all blocks, which keep them for backward."""

    def __init__(self, cos: Tensor, sin: Tensor, packing: Packing | None = None):
        self.cos, self.sin = cos, sin  # (T, 1, K)
        self.packing = packing

    def __call__(self, x: Tensor) -> Tensor:
        return _rotated(x, self.cos, self.sin)


Rotary = RotaryEmbedding | RotaryRows


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # The table is fp32, and so is the rotation, whatever x is: bf16 is too coarse for angles.
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def _scaled(frequencies: Tensor, factor: float, low: float, high: float, original: float) -> Tensor:
    """Divide by `factor` the frequencies with fewer than `low` waves in the original context, keep those with more than
    `high`, and interpolate between them, as Llama 3 does."""
    waves = frequencies * original / (2 * math.pi)
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class Attention(nn.Module):
    context: "ContextParallel | None" = None
    """Same as RotaryEmbedding.context."""
    deterministic = False
    """True if the kernels that a call chooses must have gradients that are bitwise equal in every run."""

    def __init__(self, config: ModelConfig, impl: str):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.impl = impl
        self.q_proj = Linear(config.d_model, config.q_width, config.qkv_bias)
        self.k_proj = Linear(config.d_model, config.kv_width, config.qkv_bias)
        self.v_proj = Linear(config.d_model, config.kv_width, config.qkv_bias)
        self.output_proj = Linear(config.q_width, config.d_model)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotate: Rotary) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, K); tensor parallel: this rank's heads
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q), rotate(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.context is None:
            out = self._attend(q, k, v, rotate.packing)
        else:
            q, k, v = cast_for_autocast(q, k, v)
            out = self.context.attend(q, k, v, PrefixAttention(self.impl))
        return self.output_proj(out.transpose(1, 2).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None) -> Tensor:
        """Compute causal attention over (B, H, T, K), within documents if they are packed."""
        compute = partial(attention, is_causal=True, impl=self.impl, deterministic=self.deterministic)
        if packing is None:
            return compute(q, k, v)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (T, H, K)
        return compute(q, k, v, cu_seqlens_q=packing).transpose(0, 1)[None]

    def fused(self, qkv: Tensor, rotate: Rotary) -> Tensor:
        """Compute attention from the concatenated projections of q, k and v."""
        q, k, v = fused.rotary_heads(qkv, rotate.cos, rotate.sin, self.num_heads, self.norms)
        out = self._attend(q, k, v, rotate.packing)
        return fused.linear(out.transpose(1, 2).flatten(-2), self.output_proj.weight)

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of q and k for the fused kernels, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """The biases of q, k and v, if there are any."""
        found = (self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)
        return tuple(bias for bias in found if bias is not None)


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, impl: str):
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config, impl)
        self.ln2 = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x: Tensor, rotate: Rotary) -> Tensor:
        x = x + self.attn(self.ln1(x), rotate)
        return x + self.ffn(self.ln2(x))

    def fused(self, x: Tensor, delta: Tensor | None, rotate: Rotary) -> tuple[Tensor, Tensor]:
        """Compute the block with fused kernels. The residual stream is x + delta; the next kernel adds them."""
        attn, ffn = self.attn, self.ffn
        qkv_weights = (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        x, qkv = fused.norm_linear(x, delta, self.ln1.weight, self.ln1.eps, *qkv_weights, biases=attn.biases)
        delta = attn.fused(qkv, rotate)
        x, gate_up = fused.norm_linear(x, delta, self.ln2.weight, self.ln2.eps, ffn.w1.weight, ffn.w3.weight)
        return x, fused.swiglu_linear(gate_up, ffn.w2.weight)

    @property
    def weights(self) -> Weights:
        attn, ffn = self.attn, self.ffn
        attention = (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight, attn.output_proj.weight)
        feed_forward = (ffn.w1.weight, ffn.w3.weight, ffn.w2.weight)
        q_bias, k_bias, v_bias = attn.biases or (None, None, None)
        q_gain, k_gain = attn.norms[:2] if attn.norms is not None else (None, None)
        others = (q_bias, k_bias, v_bias, q_gain, k_gain)
        return Weights(self.ln1.weight, *attention, self.ln2.weight, *feed_forward, *others)


class TransformerLM(nn.Module):
    """The language model: embedding, blocks, final norm and head.

    `attention` names an implementation of `kernels.attention`. `fused` computes the blocks with the kernels of
    kernels/fused/nodes.py. `checkpoint_blocks` = k saves only the input of every k-th block and recomputes the rest in
    backward (0: saves everything). `checkpoint_inner` = j recomputes such a group in groups of j blocks: less memory
    for a third forward pass. `checkpoint_recursive` recomputes the groups by halves: the least memory of all. `plan`,
    for a fused model, instead chooses for each tensor of each block to keep, recompute or offload it. `fp8` computes
    the matmuls of a fused model's blocks in FP8.
    """

    checkpoint_inner = 0
    checkpoint_recursive = False
    plan: Plan | None = None
    fp8: Fp8Blocks | None
    """The blocks whose matmuls are in FP8."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: str = "auto",
        checkpoint_blocks: int = 0,
        fused: bool = False,
        fp8: bool = False,
    ):
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks
        self.is_fused = fused
        self.host = HostMemory()
        std = config.d_model**-0.5 if config.tied_embeddings else 1.0
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, std)
        self.rotate = RotaryEmbedding(
            config.context_length, config.head_dim, config.rope_theta, config.frequency_scaling
        )
        self.layers = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model, config.norm_eps)
        self.fp8 = Fp8Blocks(config) if fp8 else None
        if config.tied_embeddings:
            with torch.device("meta"):
                self.lm_head = Linear(config.d_model, config.vocab_size)
            self.tie()
        else:
            self.lm_head = Linear(config.d_model, config.vocab_size)

    def forward(self, tokens: Tensor | PackedTokens, targets: Tensor | None = None) -> Tensor:
        """Return logits, (B, T) -> (B, T, V); or, with targets, the mean loss without materialising all logits.

        Targets of -100 do not count.
        """
        if isinstance(tokens, PackedTokens):
            hidden = self._hidden(tokens.tokens.reshape(1, -1), self.rotate.of_packed(tokens))
            hidden = hidden.view(*tokens.shape, -1)
        else:
            hidden = self._hidden(tokens, self.rotate.of_part(tokens.shape[1]))
        if targets is None:
            return self.lm_head(hidden)
        return fused.linear_cross_entropy(hidden, self.lm_head.weight, targets)

    def tie(self) -> None:
        """Give the head the weights of the embedding, if the configuration says so."""
        if self.config.tied_embeddings:
            self.lm_head.weight = self.token_embeddings.weight

    def in_packing_order(self) -> list[nn.Parameter]:
        """Return all parameters, with weights that multiply the same input next to each other."""
        feed_forwards = [cast(Block, block).ffn for block in self.layers]
        neighbour = {id(ffn.w3.weight): id(ffn.w1.weight) for ffn in feed_forwards}
        parameters = list(self.parameters())
        position = {id(parameter): number for number, parameter in enumerate(parameters)}
        return sorted(parameters, key=lambda p: position[neighbour.get(id(p), id(p))])  # stable: w1, then w3

    def _hidden(self, tokens: Tensor, rotate: Rotary) -> Tensor:
        """Return the hidden states after the last norm, (B, T, D)."""
        x: Tensor = self.token_embeddings(tokens)
        delta: Tensor | None = None
        group = self.checkpoint_blocks
        plan = self.plan if torch.is_grad_enabled() else None
        if plan is not None or self.fp8 is not None:
            if rotate.packing is not None:
                name, does = ("precision fp8", "train on") if plan is None else ("memory_budget", "plan")
                raise UserError(f"{name} cannot {does} packed documents", name.split()[0])
            x, delta = self._planned_blocks(x, plan or (KEEP_ALL,) * len(self.layers))
        elif group and self.checkpoint_recursive and torch.is_grad_enabled():
            from cs336_systems.step.recursive_checkpoint import run_by_halves  # the package `step` imports this module

            starts = range(0, len(self.layers), group)
            groups = [partial(self._blocks, rotate=rotate, start=start, stop=start + group) for start in starts]
            x, delta = run_by_halves(groups, x, delta)
        elif group and torch.is_grad_enabled():
            for start in range(0, len(self.layers), group):
                stop = min(start + group, len(self.layers))
                x, delta = _recompute(self._group, x, delta, rotate, start, stop)
        else:
            for block in self.layers:  # not in _blocks, whose caller would keep the first x alive
                x, delta = self._block(block, x, delta, rotate)
        if self.is_fused:
            return fused.add_norm(x, delta, self.ln_final.weight, self.ln_final.eps)[1]
        return self.ln_final(x)

    def _planned_blocks(self, x: Tensor, plan: Plan) -> tuple[Tensor, Tensor | None]:
        delta: Tensor | None = None
        self.host.begin()
        if self.fp8 is not None and torch.is_grad_enabled():
            self.fp8.count(x.shape[0] * x.shape[1])
        for number, block in enumerate(self.layers):
            if is_managed(plan, number) or (self.fp8 is not None and number in self.fp8.numbers):
                x, delta = self._planned_block(number, x, delta, plan)
            else:
                x, delta = cast(Block, block).fused(x, delta, self.rotate)
        return x, delta

    def _planned_block(self, number: int, x: Tensor, delta: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
        block, before = cast(Block, self.layers[number]), plan[number - 1] if number else None
        buffers = self.fp8 if torch.is_grad_enabled() else None
        setting = Setting(
            number,
            plan[number],
            before,
            before is not None and is_fetched_late(before, self.config),
            self.host,
            fused_implementation(block.attn.impl, x, self.config.num_heads, self.config.head_dim),
            self.config.num_heads,
            *(self.rotate.cos, self.rotate.sin, self.config.norm_eps),
            fp8=self.fp8 is not None and number in self.fp8.numbers,
            lost=None if buffers is None else buffers.lost[number],
            weight_scales=None if buffers is None else buffers.weight_scales[number],
        )
        return planned_block(x, delta, setting, block.weights)

    def _group(
        self, x: Tensor, delta: Tensor | None, rotate: Rotary, start: int, stop: int
    ) -> tuple[Tensor, Tensor | None]:
        inner = self.checkpoint_inner
        if not inner:
            return self._blocks(x, delta, rotate, start, stop)
        for begin in range(start, stop, inner):
            x, delta = _recompute(self._blocks, x, delta, rotate, begin, min(begin + inner, stop))
        return x, delta

    def _blocks(
        self, x: Tensor, delta: Tensor | None, rotate: Rotary, start: int, stop: int
    ) -> tuple[Tensor, Tensor | None]:
        for block in self.layers[start:stop]:
            x, delta = self._block(block, x, delta, rotate)
        return x, delta

    def _block(self, block: nn.Module, x: Tensor, delta: Tensor | None, rotate: Rotary) -> tuple[Tensor, Tensor | None]:
        if self.is_fused:
            return cast(Block, block).fused(x, delta, rotate)
        return block(x, rotate), None


def _recompute(run: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
