"""Reads traces, Nsight Systems databases and memory snapshots. Never imports torch."""
