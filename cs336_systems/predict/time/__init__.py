"""Time of a training step, predicted from its configuration."""
