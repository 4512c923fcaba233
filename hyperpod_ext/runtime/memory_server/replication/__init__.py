"""Copies of snapshots on other nodes: choosing the holders, sending and receiving."""
