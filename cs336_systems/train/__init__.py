"""Training: data in a fixed order, a loop that loses nothing, checkpoints that are whole or not there."""
