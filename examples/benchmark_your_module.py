"""Benchmark your own nn.Module: time by phase, peak memory, FLOPs and MFU.

    python examples/benchmark_your_module.py

The module is built by a function that takes the fields of ModelConfig, and is called with token ids (batch, context).
The same from the command line, with tables and records: `cs336 bench --model examples.benchmark_your_module:build`.
"""

from torch import Tensor, nn

from cs336_systems import RunConfig, TrainStep, model_config
from cs336_systems.measure.memory_trace import measure_peak
from cs336_systems.measure.timing import time_as_configured
from cs336_systems.record import GIB, summarize


class BagOfWords(nn.Module):
    """A language model that looks at one token at a time."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def build(*, vocab_size: int, d_model: int, **unused: object) -> nn.Module:
    return BagOfWords(vocab_size, d_model)


def main() -> None:
    config = RunConfig(model=model_config("tiny"), model_factory=f"{build.__module__}:build", num_steps=5)
    step = TrainStep(build(**vars(config.model)), config)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    for phase, samples in timings.wall.items():
        print(f"{phase:10} {summarize(samples).mean * 1e3:8.2f} ms")
    print(f"peak       {measure_peak(step, batch) / GIB:8.3f} GiB")


if __name__ == "__main__":
    main()
