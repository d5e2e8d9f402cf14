"""Instruments that measure a step or a callable: time, kernels, memory, FLOPs, communication."""
