"""Shared memory for snapshots: regions, slots, pins and the memory budget."""
