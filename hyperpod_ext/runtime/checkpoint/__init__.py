"""How a worker saves: its state copied into the node's memory, beside the next step where that can be."""
