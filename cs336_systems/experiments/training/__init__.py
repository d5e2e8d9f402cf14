"""The records of `cs336 train`: loss curves."""
