"""Meshes of torch's engine: each trains as one process does, and a run may change mesh and engine in every start."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.train.loop import STOPPED
from tests.distributed.rank_group import RankGroups
from tests.distributed.train_cases import Outcome, Run, checkpoints, fields, losses_of, perform_all, state_of, text_of

INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved"}
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, INTERLEAVED],
    4: [
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2},
        {"dp_replicate": 2, **INTERLEAVED},
    ],
    8: [
        {"dp_shard": 8},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_replicate": 2, "cp": 2},
        {"pp": 4, "dp_shard": 2},
    ],
}
"""Flags by number of ranks."""
WRAPPERS = ("ddp", "ddp-sharded", "fsdp")
SHAPE = {"num_layers": 4, "num_heads": 4, "vocab_size": 257}  # an odd vocabulary
RUN = {**SHAPE, "batch_size": 8, "micro_batch_size": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5, "sample_tokens": 0}


class Way(NamedTuple):
    """How a run is started."""

    ranks: int
    flags: dict[str, Any]

    def __str__(self) -> str:
        axes = {name: value for name, value in self.flags.items() if name not in ("engine", "parallel")}
        shown = " ".join(f"{name} {value}" for name, value in axes.items()) or self.flags["parallel"]
        return f"{shown} on {self.ranks}"


TORCH = [Way(ranks, {"engine": "torch", "parallel": "ddp", **mesh}) for ranks in MESHES for mesh in MESHES[ranks]]
OURS = [Way(1, {"engine": "ours", "parallel": "none"})]
OURS += [
    Way(ranks, {"engine": "ours", "parallel": name}) for ranks in (2, 4) for name in ("ddp", "ddp-sharded", "fsdp")
]


class Difference(NamedTuple):
    """Largest absolute distance of the losses of all steps, and of the weights after the last one."""

    losses: float
    weights: float


def difference(output: Path, expected: Path, steps: int) -> Difference:
    losses = zip(losses_of(str(output)), losses_of(str(expected)), strict=True)
    found, wanted = (state_of(checkpoints(each)[steps]) for each in (output, expected))
    weights = [name for name in wanted if name.startswith("model/")]
    return Difference(
        max(abs(one - other) for one, other in losses),
        max(float((found[name] - wanted[name]).abs().max()) for name in weights),
    )


class Trainings:
    """Runs of one folder on groups of ranks that are started once."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder, steps
        self._groups = RankGroups()
        (folder / "text.txt").write_bytes(text_of(5000))

    def __enter__(self) -> "Trainings":
        return self

    def __exit__(self, *_: object) -> None:
        self._groups.close()

    def train(self, name: str, way: Way, stop_after: int | None = None) -> Path:
        """Train the run of this name, or go on with it; require that it ends as expected."""
        output = self.folder / name
        flags = fields(output, "text.txt", **RUN, steps=self.steps, save_every=self.steps, **way.flags)
        outcome: Outcome = self._groups.call(way.ranks, perform_all, {name: Run(flags, stop_after)})[0][name]
        expected = 0 if stop_after in (None, self.steps) else STOPPED
        if (outcome.code, outcome.step) != (expected, stop_after or self.steps):
            problem = outcome.crash or outcome.error or f"exit code {outcome.code} at step {outcome.step}"
            raise AssertionError(f"{way}: {problem}")
        return output


def against_one_process(
    folder: Path, steps: int, ways: Iterable[Way], note: Callable[[str], None]
) -> dict[str, Difference]:
    """Train on every mesh, and once in one process; return the differences by mesh. Failures are noted."""
    found = {}
    with Trainings(folder, steps) as trainings:
        alone = trainings.train("alone", OURS[0])
        for number, way in enumerate(ways):
            try:
                found[str(way)] = difference(trainings.train(f"run-{number}", way), alone, steps)
            except Exception as error:
                note(f"{way}: {error}")
    return found


def switched(folder: Path, switches: int, seed: int) -> tuple[Difference, list[str]]:
    """Train one run that starts anew after every second step, each time in another way; compare it with one process."""
    chance, steps = random.Random(seed), 2 * (switches + 1)
    ways: list[Way] = []
    while len(ways) <= switches:
        way = chance.choice([one for one in chance.choice((TORCH, OURS)) if not ways or one != ways[-1]])
        ways.append(way)
    with Trainings(folder, steps) as trainings:
        alone = trainings.train("alone", OURS[0])
        for number, way in enumerate(ways, start=1):
            output = trainings.train("switched", way, stop_after=2 * number)
    return difference(output, alone, steps), [str(way) for way in ways]
