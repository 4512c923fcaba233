"""Faults on order: in the agent, in a worker, and the files that order them."""
