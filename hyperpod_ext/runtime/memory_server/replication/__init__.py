"""Copies snapshots to other nodes: chooses the nodes, sends copies, and receives copies."""
