"""A worker's training state and progress, which survive a fault, and the comparison of state between ranks."""
