"""Shared memory for snapshots: regions of memory, slots for one snapshot each, pins that protect slots, and the memory
budget."""
