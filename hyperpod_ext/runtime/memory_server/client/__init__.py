"""Clients of memory servers, for workers and agents, and code that starts a memory server."""
