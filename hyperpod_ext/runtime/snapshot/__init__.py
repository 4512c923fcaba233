"""The form of a snapshot: its layout in memory, the record that makes it exist, and which to restore."""
