"""Measure where the time and memory of training a Transformer go, and make it faster."""

__version__ = "0.1.0"
