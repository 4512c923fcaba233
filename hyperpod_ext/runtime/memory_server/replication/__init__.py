"""Copies of snapshots on other nodes: who holds which, sending and receiving them."""
