"""Tracks the nodes and ranks of a job, and decides what each fault leads to, as pure functions of incoming messages."""
