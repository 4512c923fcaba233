"""Save a worker's state: copy it into the node's memory, during the next step if possible."""
