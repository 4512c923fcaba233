"""Format of snapshots (layout in memory, signed manifest), and the choice of the snapshots to restore."""
