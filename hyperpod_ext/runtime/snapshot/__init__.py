"""Format of snapshots: layout in memory and signed manifest; and the choice of the snapshot to restore."""
