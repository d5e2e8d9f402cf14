"""Experiments on several ranks: collectives, data parallel, sharding, layouts."""
