"""Object stores for data that outlives the node, and the checkpoints in them. `open.open_store(url)` opens a store."""
