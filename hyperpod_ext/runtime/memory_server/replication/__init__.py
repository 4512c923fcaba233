"""Copies of snapshots on other nodes: choosing these nodes, sending copies, and receiving copies."""
