"""Chooses how several GPUs run a step of given tokens: data-parallel layout, micro batches, recomputation. No torch.

Memory and communication are those of parallel_model.py. Computation is that of the fast step's kernels on one GPU, with
torch's AdamW instead of the packed one, and with what casts and copies its fp32 weights. Communication that exceeds the
computation it can overlap with is added.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from cs336_systems.config import RunConfig
from cs336_systems.predict.engine_memory import engine_peak
from cs336_systems.predict.optimize import Candidate, Prediction, Search, Task
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload, transformer
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.time.rank_time import RankSeconds, added_seconds

SHARDED = "zero3"
LAYOUTS = ("dp", "zero1", SHARDED)
FAST_OF_RANKS = "kernels,loss"
"""Parts of the fast step that several GPUs can use."""
FP8_ON_RANKS = (
    "--precision fp8 is predicted for one GPU only, by cs336 fit and cs336 optimize; on several cs336 train runs it "
    "with --parallel ddp or ddp-sharded"
)
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the computation of a micro batch without recomputation."""
RECOMPUTING_SHARE = 1 / 4


class RankSearch(Search):
    """Predicts all candidates of a task on several GPUs."""

    layouts = LAYOUTS
    states = ("fp32",)
    graphs = (False,)

    def __init__(self, task: Task, cluster: Cluster):
        self.cluster = cluster
        super().__init__(task)

    @cached_property
    def _workloads(self) -> dict[int, Workload]:
        return {}

    def plan_of(self, candidate: Candidate) -> Plan:
        """Return the parallel plan of a candidate's layout."""
        strategy = Strategy.parse(candidate.layout)
        group = candidate.group
        if group not in self._workloads:
            self._workloads[group] = transformer(self._run(self.task.sequences, group))
        return Plan(self._workloads[group], self.cluster, strategy, candidate.micro_batches)

    def _run(self, sequences: int, group: int) -> RunConfig:
        """Return the configuration of a rank for this many sequences at a time."""
        fields = {"batch_size": sequences, "fast": FAST_OF_RANKS, "checkpoint_blocks": group}
        return dataclasses.replace(self.task.config, **fields)

    def peak(self, candidate: Candidate) -> int:
        """Return the bytes that a GPU needs, as `cs336 plan` does: the peak of torch's engine where that runs it."""
        plan = self.plan_of(candidate)
        if not plan.is_on_engine:
            return int(plan.total)
        run = self._run(candidate.micro_batch, candidate.group)
        return engine_peak(run, Mesh(dp_shard=self.task.gpus), candidate.micro_batches)

    def least_memory(self) -> int:
        groups = (0, *self.groups)
        return min(self.peak(self._sized(1, group=group, layout=layout)) for layout in LAYOUTS for group in groups)

    def waiting(self, candidate: Candidate) -> float:
        """Return the seconds of communication that no computation hides. Weights and gradients that are not sharded
        are sent once a step, beside the first or the last micro batch."""
        plan, share = self.plan_of(candidate), RECOMPUTING_SHARE if candidate.group else FORWARD_SHARE
        computed = self._gradients(candidate)
        beside = computed if plan.strategy.stage == 3 else computed / candidate.micro_batches
        windows = {"forward": share * beside, "backward": (1 - share) * beside}
        return sum(max(0.0, plan.communication(during) - window) for during, window in windows.items())

    def _gradients(self, own: Candidate) -> float:
        """Return the seconds of the kernels of all micro batches."""
        fast = self.times.seconds(own.micro_batch, own.micro_batches, recomputes=own.group > 0, graph=False)
        return fast - self.times.update_seconds() + own.micro_batches * self._added[own.layout].gradients

    @cached_property
    def _added(self) -> dict[str, RankSeconds]:
        """Return what ranks have instead of the packed optimizer, by layout."""
        task = self.task
        whole, sharded = (added_seconds(task.config, mesh, task.profile) for mesh in (Mesh(), Mesh(dp_shard=task.gpus)))
        by_shard = whole._replace(update=whole.update / task.gpus)
        return dict(zip(LAYOUTS, (whole, by_shard, sharded), strict=True))

    def _seconds(self, own: Candidate) -> float:
        return self._gradients(own) + self._added[own.layout].update + self.waiting(own)

    def _plans(self) -> Iterator[Prediction]:
        """Return no plans: memory budgets are supported on one GPU only."""
        return iter(())
