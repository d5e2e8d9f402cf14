"""Chooses how several GPUs run a step of given tokens: data-parallel layout, micro batches, recomputation. No torch.

Memory and communication are those of parallel_model.py. Computation is that of the fast step's kernels on one GPU: a
lower bound, since ranks update by torch's AdamW and have fp32 weights. Communication that exceeds the computation it
can overlap with is added.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from cs336_systems.config import RunConfig
from cs336_systems.predict.optimize import Candidate, Prediction, Search, Task
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload, transformer
from cs336_systems.predict.strategy import Strategy

LAYOUTS = {"dp": "kernels,loss", "zero1": "kernels,loss", "zero3": "off"}
"""Layouts, each with the parts of the fast step that `cs336 train` runs with it."""
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the computation of a micro batch without recomputation."""
RECOMPUTING_SHARE = 1 / 4


class RankSearch(Search):
    """Predicts all candidates of a task on several GPUs."""

    layouts = tuple(LAYOUTS)
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
        key = LAYOUTS[candidate.layout], candidate.group
        if key not in self._workloads:
            self._workloads[key] = transformer(self._whole(*key))
        strategy = Strategy.parse(candidate.layout)
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
        return self.times.seconds(own.micro_batch, own.micro_batches, recomputes=own.group > 0, graph=False)

    def _seconds(self, own: Candidate) -> float:
        shards = 1 if own.layout == "dp" else self.task.gpus
        spared = self.times.update_seconds() * (1 - 1 / shards)
        return self._computed(own) - spared + self.waiting(own)

    def _plans(self) -> Iterator[Prediction]:
        """Return no plans: memory budgets are supported on one GPU only."""
        return iter(())
