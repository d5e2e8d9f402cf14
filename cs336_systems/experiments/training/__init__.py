"""The records of `cs336 train`: curves, speed, restarts."""
