"""Copies of snapshots on other nodes: choosing their holders, sending them, and receiving them."""
