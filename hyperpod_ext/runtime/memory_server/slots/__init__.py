"""Shared memory that snapshots lie in: regions, slots, what is pinned, and how much there may be."""
