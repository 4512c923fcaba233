"""Faults that a user orders: injected by the agent or by a worker, and the files that contain the orders."""
