"""Training: data in a reproducible order, a loop that survives faults, and atomic checkpoints."""
