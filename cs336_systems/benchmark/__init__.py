"""Experiments: grids of configurations through the instruments."""
