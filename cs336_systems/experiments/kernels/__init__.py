"""Experiments on the kernels of a training step."""
