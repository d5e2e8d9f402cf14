"""What `cs336 train` records."""
