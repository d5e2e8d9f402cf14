"""How it spreads over ranks."""
