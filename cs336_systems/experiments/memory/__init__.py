"""Experiments on memory: the peak, its parts, recomputation, saved tensors."""
