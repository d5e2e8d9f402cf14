"""Experiments on attention."""
