"""Shared memory of snapshots: regions, slots, pins and the memory budget."""
