"""One training step, timed, profiled and trained by the same code; eager or as CUDA graphs."""

from cs336_systems.step.train_step import TrainStep

__all__ = ["TrainStep"]
