"""Places a snapshot can live that outlive the node. `object_store.open_store(url)` opens one."""
