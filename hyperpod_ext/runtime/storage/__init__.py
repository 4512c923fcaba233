"""Stores that outlive the node, and checkpoints in them. `open.open_store(url)` opens one."""
