"""Text files, JSON lines and files of tokens as one folder of tokens with document boundaries: `cs336 tokenize`."""
