"""Save a worker's state: copy it into the node's memory tier, during the next step if possible."""
