"""Shared memory for snapshots: a slot has room for one snapshot, and a pin keeps a slot from being overwritten."""
