"""One training step, which is timed, profiled and trained by the same code, eagerly or as CUDA graphs."""

from cs336_systems.step.train_step import TrainStep

__all__ = ["TrainStep"]
