"""Snapshots of training state: their layout in memory, the record that makes them exist, and which to restore."""
