"""torch's own parallelism behind the interface of our wrappers: `cs336 train --engine torch`.

    model = TorchEngine(model, Mesh(dp_shard=4, tp=2), device)
    with model.loss_context():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).full_tensor()
        loss.backward()
    model.finish_gradient_synchronization()
    model.clip_grad_norm_(1.0)

Ranks form one DeviceMesh with the axes of `Mesh`, the last one innermost: ranks of one tensor-parallel group are
neighbours and get the same batch, and so do those of a context-parallel group.

- pp is torch's pipeline of stages (`pipeline`); the other axes split each stage.
- dp_replicate alone is torch's DistributedDataParallel.
- dp_shard is `fully_shard`, a group for each block and one for the rest; with dp_replicate it is hybrid (HSDP).
- cp is context_parallel.py: each rank computes a part of the sequence. Its ranks shard weights as those of dp_shard do,
  and with them: `fully_shard` is over both axes.
- tp is `parallelize_module`: heads and the feed-forward layer by columns, then by rows; between them, and in norms,
  each rank holds a part of the sequence; embedding and head are split by the vocabulary, and so is the loss.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.parallel.collectives import Wrapper, broadcast, held_slices, local_part
from cs336_systems.parallel.context_parallel import ContextParallel
from cs336_systems.parallel.pipeline import Pipeline
from cs336_systems.predict.rank_shards import Mesh

_IS_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.13
BUFFERS_STAY: dict[str, Any] = {"forward_sync_buffers" if _IS_RENAMED else "broadcast_buffers": False}
"""Keyword arguments that stop DDP from broadcasting buffers in every forward: they are RoPE's tables, which are
constant."""


class TorchEngine(Wrapper):
    """Trains a TransformerLM, or a model with modules of the same names, over the axes of a mesh.

    `compute_dtype`: dtype in which `fully_shard` gathers weights and in which blocks compute; gradients are reduced in
    fp32. Where nothing is sharded the caller's autocast does that. `fill`: for a module on the "meta" device. It is
    called with the whole module once this rank's part has memory, and sets weights and buffers by `store_shard`: no
    rank ever holds the whole model. Without it all ranks get rank 0's weights. `schedule`: the schedule of the
    pipeline. `timeout`: seconds to wait for a rank, instead of torch's half an hour.
    """

    def __init__(
        self,
        module: nn.Module,
        axes: Mesh,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        *,
        fill: Callable[[nn.Module], None] | None = None,
        schedule: str = "1f1b",
        timeout: float | None = None,
    ):
        super().__init__(module)
        if fill is None:
            with torch.no_grad():
                broadcast([*module.parameters(), *module.buffers()])
        self._tp, self._pp = axes.tp, axes.pp
        self._in_loss_context = False
        self._context: ContextParallel | None = None
        self._ddp: DistributedDataParallel | None = None
        self.pipeline: Pipeline | None = None
        """Runs forward and backward passes if the model is split into stages; `module` has this rank's stages."""
        if axes.cp > 1:
            self._context = ContextParallel(device_mesh(axes, device.type, timeout)["cp"])
            self._context.install(module)
        axes = axes.of_weights
        mesh = device_mesh(axes, device.type, timeout)
        if axes.pp > 1:
            split_layers(module, mesh, axes)
            self.pipeline = Pipeline(
                *(module, mesh.get_group("pp"), device),
                schedule=schedule,
                compute_dtype=compute_dtype,
                sequence_parts=axes.tp,
            )
            self.module = self.pipeline.module
            for stage in self.pipeline.stages.values():
                # Weights stay gathered from the first micro batch to the last.
                shard(stage, stage.blocks, mesh, axes, compute_dtype, reshard_after_forward=False)
        elif axes.dp_shard > 1 or axes.tp > 1:  # DDP does not know of DTensors
            split(module, mesh, axes, compute_dtype)
        if fill is not None:
            self.module.to_empty(device=device)
            _tie(module)
            fill(module)
        if axes.is_replicated:
            self._ddp = DistributedDataParallel(module, **BUFFERS_STAY)

    def forward(self, tokens: Tensor | tuple[Tensor, ...], targets: Tensor | None = None) -> Tensor:
        """Return the logits: within `loss_context` those of `own_part`, split by the vocabulary, elsewhere all.

        Data-parallel ranks alone can also take packed documents, a tuple of tensors, and targets: with these, return
        the loss that the model computes.
        """
        if targets is not None:
            return self._run(tokens, targets)
        if isinstance(tokens, tuple):
            return self._run(tokens)
        length = tokens.shape[1]
        context = None if self._in_loss_context else self._context
        multiple = self._tp * (2 * context.ranks if context else 1)
        tokens = F.pad(tokens, (0, -length % multiple))  # later tokens change nothing: attention is causal
        logits = self._logits(context.own(tokens) if context else tokens)
        if context is not None:
            logits = context.joined(logits)
        return logits[:, :length] if logits.shape[1] != length else logits

    @property
    def repeats_sums(self) -> bool:
        """False until the second pass of DistributedDataParallel, which then groups gradients anew, in the order in
        which they came. Sums over three ranks or more differ from those of the first pass in their last bits."""
        return self._ddp is None or getattr(self._ddp, "_has_rebuilt_buckets", True)

    def _logits(self, tokens: Tensor) -> Tensor:
        if self.pipeline is not None:
            found = self.pipeline.forward(tokens)
            return self.pipeline.whole_logits(None if found is None else whole(found), tokens)
        logits = self._run(tokens)
        return logits if self._in_loss_context else whole(logits)

    def _run(self, *inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        found = (self._ddp or self.module)(*inputs)
        if isinstance(self.module, FSDPModule) and not torch.is_grad_enabled():
            self.module.reshard()  # no backward pass will do it, and checkpoints hold shards
        return found

    @contextmanager
    def loss_context(self) -> Iterator[None]:
        """Compute the loss, and its backward pass, of this rank's part of sequences and vocabulary."""
        self._in_loss_context = True
        try:
            with loss_parallel() if self._tp > 1 else nullcontext():
                yield
        finally:
            self._in_loss_context = False

    def own_part(self, tokens: Tensor) -> Tensor:
        """Return the tokens of every sequence that this rank computes in `loss_context`."""
        return tokens if self._context is None else self._context.own(tokens)

    def no_sync(self) -> AbstractContextManager:
        """Accumulate gradients; the backward pass after this context averages them over all ranks. Those of sharded
        weights are scattered all the same, so that no rank keeps whole gradients, but not averaged over replicas."""
        if self._ddp is not None:
            return self._ddp.no_sync()
        return _without_all_reduce(self.module) if isinstance(self.module, FSDPModule) else nullcontext()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Sum the gradients of weights that all ranks of a tensor-parallel group hold, each for its part of the
        sequence. All other gradients are complete when the backward pass ends."""
        for p in self.module.parameters():
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients by their norm over all ranks; return that norm. For all ranks together."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
        for grad in grads:
            square += torch.linalg.vector_norm(local_part(grad), dtype=torch.float64).square() / self._copies(grad)
        dist.all_reduce(square)  # one collective, where DTensor's own norm needs one for each axis
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            local_part(grad).mul_(scale)
        return norm.float()

    def _copies(self, tensor: Tensor) -> int:
        """Return the number of ranks that hold each element. Meshes leave out axes of size 1, and the pipeline's."""
        if not isinstance(tensor, DTensor):
            return dist.get_world_size() // self._pp
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        return math.prod(size for size, placement in sizes if placement.is_replicate())


def device_mesh(axes: Mesh, device_type: str, timeout: float | None = None) -> DeviceMesh:
    """Return torch's mesh of all ranks, with a group for each axis that waits `timeout` seconds for a rank."""
    mesh = init_device_mesh(device_type, tuple(axes), mesh_dim_names=axes._fields)
    if timeout is not None:
        for name in axes._fields:
            _set_pg_timeout(timedelta(seconds=timeout), mesh.get_group(name))
    return mesh


@torch.no_grad()
def store_shard(parameter: nn.Parameter, value: Tensor) -> None:
    """Overwrite `value` with rank 0's, and a parameter, or this rank's shard of it, with `value`. For all ranks.

    A parameter of another stage of a pipeline has no memory here and stays as it is.
    """
    dist.broadcast(value, 0)
    if not parameter.is_meta:
        local_part(parameter).copy_(_shard_like(parameter, value))


def _shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor."""
    return value[held_slices(parameter)] if isinstance(parameter, DTensor) else value


def whole(tensor: Tensor) -> Tensor:
    """Return a distributed tensor gathered from all ranks, any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split(module: nn.Module, mesh: DeviceMesh, axes: Mesh, compute_dtype: torch.dtype | None) -> None:
    """Split the layers of a model over the axis "tp", and shard its blocks and the rest over the axes "dp_*"."""
    split_layers(module, mesh, axes)
    shard(module, cast(Any, module).layers, mesh, axes, compute_dtype)


def split_layers(module: nn.Module, mesh: DeviceMesh, axes: Mesh) -> None:
    """Split the layers of a model over the axis "tp"."""
    if axes.tp > 1:
        parallelize_module(module, mesh["tp"], tensor_parallel_plan(module))
        _tie(module)


def _tie(module: nn.Module) -> None:
    """Tie embedding and head again if they are tied in the model: torch replaces their weights one by one."""
    if (tie := getattr(module, "tie", None)) is not None:
        tie()


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    axes: Mesh,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool | None = None,
) -> None:
    """Shard the blocks of a module, one by one, and the rest of it over the axes "dp_*"."""
    if axes.dp_replicate == axes.dp_shard == 1:
        return
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if axes.dp_replicate > 1 else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32 if compute_dtype else None),
        "reshard_after_forward": reshard_after_forward,
    }
    # What fused kernels return are views, and nothing writes to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in blocks:
        fully_shard(block, **options)
        if hasattr(block, "fused"):  # the forward pass of fused kernels gathers the weights, too
            register_fsdp_forward_method(block, "fused")
    fully_shard(module, **options)


@contextmanager
def _without_all_reduce(module: FSDPModule) -> Iterator[None]:
    module.set_requires_all_reduce(False)
    try:
        yield
    finally:
        module.set_requires_all_reduce(True)


def tensor_parallel_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """Return how `parallelize_module` splits each module of the model. Shard(1) is the sequence."""
    by_columns = {
        f"layers.*.{name}": ColwiseParallel()
        for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3")
    }
    by_rows = {f"layers.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attn.output_proj", "ffn.w2")}
    norms = {name: SequenceParallel() for name in ("layers.*.ln1", "layers.*.ln2", "ln_final")}
    if any(name.endswith("attn.q_norm") for name, _ in module.named_modules()):
        # (batch, sequence, heads, dim): each rank normalises its own heads, by gains that all ranks hold.
        of_heads = ("layers.*.attn.q_norm", "layers.*.attn.k_norm")
        norms |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in of_heads}
    return {
        "token_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        # The second argument of attention is the table of RoPE.
        "layers.*.attn": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "layers.*.ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **by_columns,
        **by_rows,
        **norms,
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
