"""How a worker saves: its state copied into the node's memory, during the next step if possible."""
