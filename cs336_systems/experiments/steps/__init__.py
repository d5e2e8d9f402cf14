"""Experiments on the time of a training step."""
