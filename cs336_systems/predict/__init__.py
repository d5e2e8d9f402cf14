"""Predictions without running anything: memory, FLOPs, attention, parallel layouts. Never imports torch."""
