"""Stores that outlive the node, and checkpoints in them. `object_store.open_store(url)` opens one."""
