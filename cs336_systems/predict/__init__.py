"""What can be known without running: memory, FLOPs, attention, parallel layouts. Never imports torch."""
