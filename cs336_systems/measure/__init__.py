"""Instruments: a step or a callable in, samples out."""
