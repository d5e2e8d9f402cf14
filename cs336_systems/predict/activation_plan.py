"""The plan for the activations of each Transformer block between forward and backward. No torch.

Backward of a fused block reads five tensors, in the order in which forward writes them:

- input: the residual stream at the block's start;
- qkv: the projections of q, k and v, rotated;
- attention: the output of attention, with its logsumexp;
- middle: the residual stream after attention;
- gate_up: the two projections of the feed-forward network before the activation function.

Each is kept on the GPU, recomputed from those before it, or offloaded to host memory and fetched again. The input has
nothing before it: it is never recomputed.
"""

from typing import NamedTuple

from cs336_systems.config import ModelConfig

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
CHOICES = (KEEP, RECOMPUTE, OFFLOAD)
KINDS = ("input", "qkv", "attention", "middle", "gate_up")


class BlockPlan(NamedTuple):
    """A choice for each tensor of one block: KEEP, RECOMPUTE or OFFLOAD."""

    input: str = KEEP
    qkv: str = KEEP
    attention: str = KEEP
    middle: str = KEEP
    gate_up: str = KEEP

    @property
    def keeps_all(self) -> bool:
        return all(choice == KEEP for choice in self)

    @property
    def offloads(self) -> bool:
        return OFFLOAD in self

    def kinds(self, choice: str) -> list[str]:
        """Return the kinds of tensors for which the plan makes this choice."""
        return [kind for kind, own in zip(KINDS, self, strict=True) if own == choice]


KEEP_ALL = BlockPlan()
RECOMPUTE_ALL = BlockPlan(KEEP, *[RECOMPUTE] * 4)

Plan = tuple[BlockPlan, ...]
"""The plans of all blocks, the first one first."""


def is_managed(plan: Plan, number: int) -> bool:
    """Return True for a block that does more than keep its tensors: the block after an offloading block starts its
    fetches."""
    return not plan[number].keeps_all or (number > 0 and plan[number - 1].offloads)


FLOPS_PER_BYTE = 12_000
"""FLOPs that an H200 computes while it copies one byte from the host."""


def is_fetched_late(plan: BlockPlan, model: ModelConfig) -> bool:
    """Return True if copying a block's tensors back takes less time than the attention half of the next block's
    backward pass: they are then fetched during that half, and need no memory during the feed-forward half."""
    stream, qkv, q = model.d_model, model.qkv_width, model.q_width
    widths = {"input": stream, "qkv": qkv, "attention": q, "middle": stream, "gate_up": 2 * model.d_ff}
    copied = 2 * sum(widths[kind] for kind in plan.kinds(OFFLOAD))
    computed = 5 * model.context_length * q + 4 * model.d_model * (qkv + q)
    return computed >= FLOPS_PER_BYTE * copied
