"""Chooses how several GPUs run a step of given tokens: data-parallel layout, micro batches, recomputation. No torch.

Memory and communication are those of parallel_model.py. Computation is that of the fast step's kernels on one GPU: a
lower bound, since ranks update by torch's AdamW and have fp32 weights. Ranks without the fused kernels run operator by
operator. Communication that exceeds the computation it can overlap with is added.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from cs336_systems.config import RunConfig
from cs336_systems.predict.optimize import Candidate, Prediction, Search, Task
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload, runs_fused, transformer
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.time.rank_time import plain_rank_seconds

LAYOUTS = ("dp", "zero1", "zero3")
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
    def _workloads(self) -> dict[tuple[str, int], Workload]:
        return {}

    def plan_of(self, candidate: Candidate) -> Plan:
        """Return the parallel plan of a candidate's layout."""
        strategy = Strategy.parse(candidate.layout)
        key = FAST_OF_RANKS if self.runs_fused(candidate) else "off", candidate.group
        if key not in self._workloads:
            self._workloads[key] = transformer(self._whole(*key))
        return Plan(self._workloads[key], self.cluster, strategy, candidate.micro_batches)

    def _whole(self, fast: str, group: int) -> RunConfig:
        """Return the configuration with all sequences of a GPU in one batch."""
        sequences = self.task.sequences
        return dataclasses.replace(self.task.config, batch_size=sequences, fast=fast, checkpoint_blocks=group)

    def peak(self, candidate: Candidate) -> int:
        return int(self.plan_of(candidate).total)

    def least_memory(self) -> int:
        groups = (0, *self.groups)
        return min(self.peak(self._sized(1, group=group, layout=layout)) for layout in LAYOUTS for group in groups)

    def waiting(self, candidate: Candidate) -> float:
        """Return the seconds of communication that no computation hides. Weights and gradients that are not sharded
        are sent once a step, beside the first or the last micro batch."""
        plan, share = self.plan_of(candidate), RECOMPUTING_SHARE if candidate.group else FORWARD_SHARE
        computed = self._computed(candidate) - self.times.update_seconds()
        beside = computed if plan.strategy.stage == 3 else computed / candidate.micro_batches
        windows = {"forward": share * beside, "backward": (1 - share) * beside}
        return sum(max(0.0, plan.communication(during) - window) for during, window in windows.items())

    def _computed(self, own: Candidate) -> float:
        fast = self.times.seconds(own.micro_batch, own.micro_batches, recomputes=own.group > 0, graph=False)
        plain = None if self.runs_fused(own) else self._plain(own.micro_batch, own.group > 0)
        return fast if plain is None else own.micro_batches * plain + self.times.update_seconds()

    def runs_fused(self, candidate: Candidate) -> bool:
        """Return True if the ranks of a candidate have the fused kernels and loss."""
        return runs_fused(Strategy.parse(candidate.layout), self.task.gpus)

    def has_plain_time(self, candidate: Candidate) -> bool:
        """Return True if the time of a candidate is that of single operators."""
        return not self.runs_fused(candidate) and self._plain(candidate.micro_batch, candidate.group > 0) is not None

    def _plain(self, micro_batch: int, recomputes: bool) -> float | None:
        """Return the seconds of a micro batch without the fast step, operator by operator; None if they are not known
        or if launches bound them, to which FSDP adds."""
        key = micro_batch, recomputes
        if key not in self._plain_seconds:
            fields = {"batch_size": micro_batch, "checkpoint_blocks": int(recomputes), "fast": "off"}
            config = dataclasses.replace(self.task.config, **fields, max_grad_norm=0.0)
            mesh = Mesh(dp_shard=self.task.gpus)
            found = plain_rank_seconds(config, mesh, self.task.profile, is_ours=True)
            self._plain_seconds[key] = None if found is None else found.gradients
        return self._plain_seconds[key]

    @cached_property
    def _plain_seconds(self) -> dict[tuple[int, bool], float | None]:
        return {}

    def _seconds(self, own: Candidate) -> float:
        shards = 1 if own.layout == "dp" else self.task.gpus
        spared = self.times.update_seconds() * (1 - 1 / shards)
        return self._computed(own) - spared + self.waiting(own)

    def _plans(self) -> Iterator[Prediction]:
        """Return no plans: memory budgets are supported on one GPU only."""
        return iter(())
