"""Records in, tables out. Nothing here imports torch, and nothing that measures is called from here."""
