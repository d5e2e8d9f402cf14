"""Folders of published models in the format of Hugging Face: `cs336 import` and `cs336 export --format hf`."""
