"""Injects faults that a user has ordered: from the agent or from a worker. The orders are files in the run
directory."""
