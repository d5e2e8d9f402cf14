"""Seconds of the kernels of one rank's step: all of them without the fused kernels, in micro batches and pipeline
stages; with them, what the rank adds to the fast step of one GPU. No torch.

Communication is not in it (parallel_model.py), and neither is the time in which stages wait for each other.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.time.eager_kernels import ADAMW, ADAMW_BYTES, CAST, COPY, NARROW, POINTWISE
from cs336_systems.predict.time.eager_time import predicts_eager, time_of_phases
from cs336_systems.predict.time.engine_kernels import EngineKernels
from cs336_systems.predict.time.gpu_profile import GpuProfile
from cs336_systems.predict.time.kernel_seconds import kernel_seconds
from cs336_systems.predict.time.step_kernels import Kernel, Pass

ADDED_GRADIENT = 12
"""Bytes that move for each weight when a micro batch's gradient is added to that of earlier ones, in fp32."""


class RankSeconds(NamedTuple):
    """Seconds of a rank's kernels in a step."""

    gradients: float
    """Those of all micro batches."""
    update: float
    """That of the weights that the rank holds."""


def plain_rank_seconds(
    config: RunConfig, mesh: Mesh, profile: GpuProfile, micro_batches: int = 1
) -> RankSeconds | None:
    """Return the seconds of a step's kernels on a rank of `mesh` of average work; None if they are not known, or if
    launches of the host bound them, to which the ranks' wrappers add.

    `config.batch_size`: sequences that a replica, the ranks of `cp` x `tp`, processes in a micro batch.
    """
    if not predicts_eager(config, profile):
        return None
    step = EngineKernels(config, mesh)
    found = time_of_phases(step.phases(), config, profile)
    if found is None or found.is_launch_bound:
        return None
    update = found.by_name()[ADAMW]
    gradients = micro_batches * (found.seconds - update) / mesh.pp
    added = [Pass(POINTWISE, ADDED_GRADIENT * step.held_weights, micro_batches - 1)] if micro_batches > 1 else []
    return RankSeconds(gradients + _seconds(added, profile), update)


def added_seconds(config: RunConfig, mesh: Mesh, profile: GpuProfile) -> RankSeconds:
    """Return what the fast step of a rank has instead of the packed optimizer: for each micro batch casts and copies of
    weights and gradients, by torch's `fully_shard` or by autocast; and torch's AdamW of whole fp32 weights, or of the
    shards of `fully_shard`."""
    model, step = config.model, EngineKernels(config, mesh)
    joined = model.num_layers * model.d_model * (model.q_width + 2 * model.kv_width + 2 * model.d_ff)
    matrices = model.parameters - model.vector_parameters
    casts = step.sharding() if step.sharded else (Pass(NARROW, 6 * matrices), Pass(CAST, 6 * matrices))
    update = Pass(ADAMW, ADAMW_BYTES * step.held_weights)
    return RankSeconds(_seconds([*casts, Pass(COPY, 4 * joined)], profile), _seconds([update], profile))


def _seconds(kernels: Iterable[Kernel], profile: GpuProfile) -> float:
    return sum(kernel.times * kernel_seconds(kernel, profile) for kernel in kernels)
